// RMSNorm over rows on the CPU: x / sqrt(mean(x^2) + eps), fused with whatever comes before and after.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::rmsnorm(cx, k::load(x, ld), k::affine(gamma) | k::store(y, ld), rows, cols, k::RmsNorm{}.eps(1e-6));
//
//   Gemma                  k::affine(k::one_plus(weight)) | ...
//   Hugging Face's Llama   k::round_to<half>() | k::affine(weight) | ...      (casts before it multiplies)
//
// Squares are summed in float: |x| above about 1e19 overflows. Shapes, types, aliasing, determinism, compiler flags: as
// in softmax.h.
#pragma once

#include "detail/row/engine.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Store, class Compute = void>
Status rmsnorm(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols,
               const RmsNorm& options = {}) {
  detail::check_compute<Load, Compute>();
  return detail::host::run_rows(cx, options, in, out, rows, cols).in("rmsnorm");
}

// OneFlow's argument order, as on the GPU.
template <class Load, class Store, class Compute>
Status rmsnorm(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols, double eps,
               Compute* inv_rms) {
  return rmsnorm<Load, Store, Compute>(cx, in, out, rows, cols, RmsNorm{}.eps(eps).rstd(inv_rms));
}

}  // namespace cpu
KERNELS_END
