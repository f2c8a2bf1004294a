// Softmax and log-softmax over rows, fused with whatever comes before and after.
//
//   k::softmax(stream, k::load(x, ld), k::store(y, ld), rows, cols);
//   k::log_softmax(stream, k::load(x, ld) | k::scale(s) | k::add(k::row(mask)), k::store(y, ld), rows, cols);
//
// rows >= 0, 0 <= cols <= 2^30, any alignment, any row stride. Types: half, bfloat16, float, double, float8_e4m3,
// float8_e5m2, int8 in and out, in any combination. Computed in float (double if the source is double). In-place use is
// allowed. A row of only -inf gives zeros (log-softmax: -inf); a NaN or +inf makes its row NaN.
//
// Nothing is allocated or synchronized: calls can be captured in a graph. The same input gives the same bits, whatever
// the grid.
//
// Functors in OneFlow's form are accepted. Explicit template arguments, softmax<Load, Store, float>(...), have
// OneFlow's meaning: the third is the compute type, the one that the load produces.
#pragma once

#include "detail/row/engine.cuh"

KERNELS_BEGIN

template <class Load, class Store, class Compute = void>
Status softmax(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols,
               const RowPolicy& policy = {}) {
  detail::check_compute<Load, Compute>();
  return detail::run_rows(ex, Softmax{}, in, out, rows, cols, policy).in("softmax");
}

template <class Load, class Store, class Compute = void>
Status log_softmax(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols,
                   const RowPolicy& policy = {}) {
  detail::check_compute<Load, Compute>();
  return detail::run_rows(ex, LogSoftmax{}, in, out, rows, cols, policy).in("log_softmax");
}

KERNELS_END
