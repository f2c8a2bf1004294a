// A pass over a matrix: the sink gets what the source gives.
//
//   k::copy(stream, k::load(q, ld) | rope, k::store(r, ld), rows, cols);                            // rotary positions
//   k::copy(stream, k::load(x, ld) | rope, k::append_keys(kv, at, dim), rows, cols);                // new keys to the cache
//
// Any types, any alignment; captured in graphs; the same input gives the same bits. In place is fine where every map sees only the
// columns that it changes.
#pragma once

#include "core/row_call.h"
#include "core/row_op.h"
#include "detail/pointwise.cuh"
#include "functor.h"

KERNELS_BEGIN
namespace detail {

template <class Load, class Store>
struct CopyOf {
  Load in;
  Store out;
  template <int N>
  __device__ __forceinline__ void at(int64_t row, int64_t col) const {
    const auto map = sink_map(out);
    const auto values = resolve(in, fetch<N>(in, row, col), row, col);
    put(sink_end(out), apply_map(map, values, fetch_operands<N>(map, row, col), row, col), row, col);
  }
};

}  // namespace detail

template <class Load, class Store>
[[nodiscard]] Status copy(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  if constexpr (!detail::takes_copy<Load, Store>()) {
    return detail::not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(detail::check_rows(Softmax{}, in, out, rows, cols, empty));
    KERNELS_TRY(ex.status());
    if (empty) return {};
    constexpr int in_wide = detail::widest_of<Load>(), out_wide = detail::widest_of<Store>(), wide = in_wide < out_wide ? in_wide : out_wide;
    return detail::each_pack<wide>(ex, detail::CopyOf<Load, Store>{in, out}, rows, cols, lesser(detail::max_pack_of(in), detail::max_pack_of(out)));
  }
}

KERNELS_END
