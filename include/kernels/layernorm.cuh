// LayerNorm over rows: (x - mean) / sqrt(variance + eps), fused with whatever comes before and after.
//
//   k::layernorm(stream, k::load(x, ld), k::affine(gamma, beta) | k::store(y, ld), rows, cols);
//
//   // bias + residual + layernorm, updating the residual stream in place, one pass over memory:
//   auto h = k::load(x, ld) | k::add(k::row(bias)) | k::add(k::load(res, ld)) | k::tee(res, ld);
//   k::layernorm(stream, h, k::affine(gamma, beta) | k::store(y, ld), rows, cols,
//                k::LayerNorm{}.eps(1e-5).mean(mean).rstd(rstd));
//
// Computed by Welford's recurrence: no cancellation under a large mean. Shapes, types, aliasing, determinism: as in
// softmax.cuh.
#pragma once

#include "detail/row/engine.cuh"

KERNELS_BEGIN

template <class Load, class Store, class Compute = void>
Status layernorm(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols,
                 const LayerNorm& options = {}, const RowPolicy& policy = {}) {
  detail::check_compute<Load, Compute>();
  return detail::run_rows(ex, options, in, out, rows, cols, policy).in("layernorm");
}

// OneFlow's signature: layernorm<Load, Store, float>(stream, load, store, rows, cols, eps, mean, inv_variance), where
// inv_variance receives 1 / sqrt(variance + eps). A null pointer means that the result is not wanted.
template <class Load, class Store, class Compute>
Status layernorm(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols, double eps,
                 Compute* mean, Compute* inv_variance) {
  return layernorm<Load, Store, Compute>(ex, in, out, rows, cols,
                                         LayerNorm{}.eps(eps).mean(mean).inv_variance(inv_variance));
}

KERNELS_END
