// LayerNorm over rows on the CPU: (x - mean) / sqrt(variance + eps), fused with whatever comes before and after.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::layernorm(cx, k::load(x, ld), k::affine(gamma, beta) | k::store(y, ld), rows, cols);
//
//   // bias + residual + layernorm, updating the residual stream in place, one pass over memory:
//   auto h = k::load(x, ld) | k::add(k::row(bias)) | k::add(k::load(res, ld)) | k::tee(res, ld);
//   k::cpu::layernorm(cx, h, k::affine(gamma, beta) | k::store(y, ld), rows, cols,
//                     k::LayerNorm{}.eps(1e-5).mean(mean).rstd(rstd));
//
// There is no cancellation under a large mean. Shapes, types, aliasing, determinism, compiler flags: as in softmax.h.
#pragma once

#include "detail/row/engine.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Store, class Compute = void>
Status layernorm(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols,
                 const LayerNorm& options = {}) {
  detail::check_compute<Load, Compute>();
  return detail::host::run_rows(cx, options, in, out, rows, cols).in("layernorm");
}

// OneFlow's argument order, as on the GPU.
template <class Load, class Store, class Compute>
Status layernorm(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols, double eps,
                 Compute* mean, Compute* inv_variance) {
  return layernorm<Load, Store, Compute>(cx, in, out, rows, cols,
                                         LayerNorm{}.eps(eps).mean(mean).inv_variance(inv_variance));
}

}  // namespace cpu
KERNELS_END
