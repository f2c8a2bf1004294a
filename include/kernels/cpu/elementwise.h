// A pass over a matrix, or over a flat tensor, on the CPU: the sink gets what the source gives, element by element.
//
//   k::cpu::copy(cx, k::load(x) | k::gelu(), k::store(y), n);                                  // n elements, flat
//   k::cpu::copy(cx, k::gate_up(k::load(x, 2 * f), f) | k::swiglu(), k::store(y, f), rows, f); // halves of a tensor
//   k::cpu::copy(cx, in, k::quantize(q, ld, scales, cols / 128, 128), rows, cols);             // one for 128 columns
//   k::cpu::copy(cx, k::embed(k::load(table, d), ids, vocabulary), k::store(x, d), rows, d);
//   k::cpu::copy(cx, k::load(x, ld) | rope, k::append_keys(kv, at, dim), rows, cols);          // keys to the cache
//
// Shapes, types, determinism, compiler flags: as in softmax.h. Flat tensors and in-place use: as in ../elementwise.cuh.
#pragma once

#include "../dropout.h"
#include "../embed.h"
#include "../quantize.h"
#include "detail/row/engine.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Long rows are split at multiples of this, which packs of any width and groups of any power of two up to it divide.
constexpr int64_t kPieceCols = 16384;

// Columns [begin, end) of a row.
template <class Load, class Store>
void copy_piece(const Packs<Load, Store>& packs, const Load& in, const Store& out, int64_t row, int64_t begin,
                int64_t end) {
  packs.each(begin, end, [&in, &out, row](auto width, int64_t col) KERNELS_INLINE {
    constexpr int N = decltype(width)::value;
    put(out, resolve(in, fetch<N>(in, row, col), row, col), row, col);
  });
}

template <class Load, class Store>
void copy_group(const Packs<Load, Store>& packs, const Load& in, const Store& out, int64_t row, int64_t index,
                int64_t begin, int64_t end) {
  const auto values = [row](const auto& source, const auto& map, auto width, int64_t col) KERNELS_INLINE {
    constexpr int N = decltype(width)::value;
    return apply_map(map, resolve(source, fetch<N>(source, row, col), row, col), fetch_operands<N>(map, row, col), row,
                     col);
  };
  const auto map = sink_map(out);
  const auto silent = without_effects(map);
  const auto& again = second_pass(in);
  quantize_group(
      packs, sink_end(out), row, index, begin, end,
      [&](auto width, int64_t col) KERNELS_INLINE { return values(in, silent, width, col); },
      [&](auto width, int64_t col) KERNELS_INLINE { return values(again, map, width, col); });
}

template <class Load, class Store>
Status run_copy(const cpu::Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  bool empty = false;
  KERNELS_TRY(check_operands(in, out, rows, cols, empty));
  KERNELS_TRY(cx.status());
  if (empty) return {};
  if constexpr (is_row_sink<Store> && !by_group<Store>) {
    return run_rows(cx, AsItIs{}, in, out, rows, cols);
  } else {
    // The last columns of a single row may not fill a pack. With groups, they are a multiple of the pack.
    const int64_t whole = rows == 1 && !by_group<Store> ? cols / kWidestPack * kWidestPack : cols;
    int64_t width = kPieceCols, divides = whole;
    if constexpr (by_group<Store>) {
      width = sink_end(out).group();
      divides = dividing_groups(cols, width);
    }
    const Packs<Load, Store> packs(in, out, divides), singles(in, out, 1);
    const int64_t pieces = (cols + width - 1) / width, units = rows * pieces;
    const Team team = cx.team().for_work(double(rows) * double(cols));
    parallel_shares(team, units, [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t row = unit / pieces, piece = unit % pieces, begin = piece * width,
                      end = lesser(cols, begin + width);
        if constexpr (by_group<Store>) {
          copy_group(packs, in, out, row, piece, begin, end);
        } else {
          copy_piece(packs, in, out, row, begin, lesser(end, whole));
          if (end > whole) copy_piece(singles, in, out, row, greater(begin, whole), end);
        }
      }
    });
    return {};
  }
}

}  // namespace host
}  // namespace detail

namespace cpu {

template <class Load, class Store>
Status copy(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  if constexpr (!::kernels::detail::takes_values<Load, Store>()) {
    return ::kernels::detail::not_compiled();
  } else {
    KERNELS_TRY(::kernels::detail::check_shape(rows, cols).in("copy"));
    return ::kernels::detail::host::run_copy(cx, in, out, rows, cols).in("copy");
  }
}

template <class Load, class Store>
Status copy(const Exec& cx, const Load& in, const Store& out, int64_t n) {
  if constexpr (!::kernels::detail::takes_values<Load, Store>()) {
    return ::kernels::detail::not_compiled();
  } else {
    if (n < 0) return invalid("copy: n is negative");
    return ::kernels::detail::host::run_copy(cx, in, out, 1, n).in("copy");
  }
}

}  // namespace cpu
KERNELS_END
