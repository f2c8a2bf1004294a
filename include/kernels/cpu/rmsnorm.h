// RMSNorm over rows on the CPU: x / sqrt(mean(x^2) + eps), fused with whatever stands before and after.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::rmsnorm(cx, k::load(x, ld), k::affine(gamma) | k::store(y, ld), rows, cols, k::RmsNorm{}.eps(1e-6));
//
//   Gemma                  k::affine(k::one_plus(weight)) | ...
//   Hugging Face's Llama   k::round_to<half>() | k::affine(weight) | ...      (casts before it multiplies)
//
// Squares are summed in float: |x| above about 1e19 overflows. Shapes, types, aliasing, determinism, flags: as in softmax.h.
#pragma once

#include "detail/row_engine.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Store>
Status rmsnorm(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols, const RmsNorm& options = {}) {
  return detail::host::run_rows(cx, options, in, out, rows, cols);
}

}  // namespace cpu
KERNELS_END
