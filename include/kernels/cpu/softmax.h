// Softmax and log-softmax over rows on the CPU, fused with whatever comes before and after.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::softmax(cx, k::load(x, ld), k::store(y, ld), rows, cols);
//   k::cpu::log_softmax(cx, k::load(x, ld) | k::scale(s) | k::add(k::row(mask)), k::store(y, ld), rows, cols);
//
// The functors are those of the GPU, with host pointers. rows >= 0, 0 <= cols <= 2^30, any alignment, any row stride.
// Types: half, bfloat16, float, double, float8_e4m3, float8_e5m2, int8 in and out, in any combination. Computed in
// float (double if the source is double). In-place use is allowed. A row of only -inf gives zeros (log-softmax: -inf);
// a NaN or +inf makes its row NaN. The same input gives the same bits, whatever the number of threads.
//
// Compile with the flags of the target machine (-march=native, or -mavx2 -mfma -mf16c): the code uses the instruction
// sets that the flags enable.
#pragma once

#include "detail/row/engine.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Store, class Compute = void>
Status softmax(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  ::kernels::detail::check_compute<Load, Compute>();
  return detail::host::run_rows(cx, Softmax{}, in, out, rows, cols).in("softmax");
}

template <class Load, class Store, class Compute = void>
Status log_softmax(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  ::kernels::detail::check_compute<Load, Compute>();
  return detail::host::run_rows(cx, LogSoftmax{}, in, out, rows, cols).in("log_softmax");
}

}  // namespace cpu
KERNELS_END
