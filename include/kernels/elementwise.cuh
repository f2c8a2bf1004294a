// copy(): one pass over a matrix or a flat tensor, in which the sink gets what the source gives, element by element.
//
//   k::copy(stream, k::load(x) | k::gelu(), k::store(y), n);                                   // n elements, flat
//   k::copy(stream, k::load(x, ld) | k::silu() | k::mul(k::load(up, ld)), k::store(y, ld), rows, cols);
//   k::copy(stream, k::gate_up(k::load(x, 2 * f), f) | k::swiglu(), k::store(y, f), rows, f);  // halves of a tensor
//   k::copy(stream, in, k::both(k::store(y, ld), k::gelu() | k::quantize(q, ld, k::tensor_scale(s))), rows, cols);
//   k::copy(stream, in, k::quantize(q, ld, scales, cols / 128, 128), rows, cols);              // one for 128 columns
//   k::copy(stream, k::embed(k::load(table, d), ids, vocabulary), k::store(x, d), rows, d);
//   k::copy(stream, k::load(x, ld) | rope, k::append_keys(kv, at, dim), rows, cols);           // keys to the cache
//
// Any types, any alignment, any number of rows, up to 2^30 columns. Calls can be captured in a graph. The same input
// gives the same bits. In-place use is allowed if every map reads only the columns that it changes.
//
// A flat tensor is a single row of n columns, without a limit on n. Element i is read at row 0 and column i: of sources
// without a row stride, as load(p), and of all others. So row(p) gives p[i], and per_row(p) gives p[0].
#pragma once

#include "core/row_call.h"
#include "core/row_op.h"
#include "detail/groups.cuh"
#include "detail/pointwise.cuh"
#include "detail/row/engine.cuh"
#include "dropout.h"
#include "embed.h"
#include "functor.h"
#include "quantize.h"

KERNELS_BEGIN
namespace detail {

template <class Load, class Store>
struct CopyOf {
  static constexpr bool takes_rest = !by_group<Store>;
  Load in;
  Store out;
  // KERNELS_HD although only the GPU runs it: the host asks for the size of what is fetched, and cannot deduce the
  // return type of a device function.
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return pair(detail::fetch<N>(in, row, col), fetch_operands<N>(sink_map(out), row, col));
  }
  template <int N, class Fetched>
  __device__ __forceinline__ void finish(const Fetched& fetched, int64_t row, int64_t col) const {
    const auto values = resolve(in, first_of(fetched), row, col);
    const auto results = apply_map(sink_map(out), values, second_of(fetched), row, col);
    if constexpr (by_group<Store>)
      put_group(sink_end(out), results, row, col);
    else
      put(sink_end(out), results, row, col);
  }
};

template <class Load, class Store>
Status start_copy(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  using Widths = PackWidths<Load, Store>;
  bool empty = false;
  KERNELS_TRY(check_operands(in, out, rows, cols, empty));
  KERNELS_TRY(ex.status());
  if (empty) return {};
  if constexpr (is_row_sink<Store> && !by_group<Store>) {
    return run_rows(ex, AsItIs{}, in, out, rows, cols, {});
  } else {
    const int pack = lesser(max_pack_of(in, cols), max_pack_of(out, cols));
    if constexpr (by_group<Store>) {
      if constexpr (writes_packs<Store, Widths::wide>) {
        if (pack >= Widths::wide && warps_hold_groups(sink_end(out).group(), Widths::wide, cols))
          return start_packs<Widths::wide>(ex, CopyOf<Load, Store>{in, out}, rows, cols);
      }
      return each_group<Widths::wide, Widths::middle>(ex, in, out, rows, cols, pack);
    } else {
      return each_pack<Widths::wide, Widths::middle>(ex, CopyOf<Load, Store>{in, out}, rows, cols, pack);
    }
  }
}

}  // namespace detail

template <class Load, class Store>
[[nodiscard]] Status copy(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  if constexpr (!detail::takes_values<Load, Store>()) {
    return detail::not_compiled();
  } else {
    KERNELS_TRY(detail::check_shape(rows, cols).in("copy"));
    return detail::start_copy(ex, in, out, rows, cols).in("copy");
  }
}

template <class Load, class Store>
[[nodiscard]] Status copy(const Exec& ex, const Load& in, const Store& out, int64_t n) {
  if constexpr (!detail::takes_values<Load, Store>()) {
    return detail::not_compiled();
  } else {
    if (n < 0) return invalid("copy: n is negative");
    return detail::start_copy(ex, in, out, 1, n).in("copy");
  }
}

KERNELS_END
