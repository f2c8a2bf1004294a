// LayerNorm over rows: (x - mean) / sqrt(variance + eps), fused with whatever stands before and after.
//
//   k::layernorm(stream, k::load(x, ld), k::affine(gamma, beta) | k::store(y, ld), rows, cols);
//
//   // bias + residual + layernorm, updating the residual stream in place, one pass over memory:
//   auto h = k::load(x, ld) | k::add(k::row(bias)) | k::add(k::load(res, ld)) | k::tee(res, ld);
//   k::layernorm(stream, h, k::affine(gamma, beta) | k::store(y, ld), rows, cols,
//                k::LayerNorm{}.eps(1e-5).mean(mean).rstd(rstd));
//
// Welford's recurrence: no cancellation under a large mean. Shapes, types, aliasing, determinism: as in softmax.cuh.
#pragma once

#include "detail/row_engine.cuh"

KERNELS_BEGIN

template <class Load, class Store>
Status layernorm(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols,
                 const LayerNorm& options = {}, const RowPolicy& policy = {}) {
  return detail::run_rows(ex, options, in, out, rows, cols, policy);
}

KERNELS_END
