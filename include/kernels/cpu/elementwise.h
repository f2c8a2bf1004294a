// A pass over a matrix on the CPU: the sink gets what the source gives.
//
//   k::cpu::copy(cx, k::load(q, ld) | rope, k::store(r, ld), rows, cols);                            // rotary positions
//   k::cpu::copy(cx, k::load(x, ld) | rope, k::append_keys(kv, at, dim), rows, cols);                // new keys to the cache
//
// Shapes, types, determinism, flags: as in softmax.h. In place is fine where every map sees only the columns that it changes.
#pragma once

#include "detail/row_engine.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Store>
Status copy(const Exec& cx, const Load& in, const Store& out, int64_t rows, int64_t cols) {
  if constexpr (!::kernels::detail::takes_copy<Load, Store>()) {
    return ::kernels::detail::not_compiled();
  } else {
    namespace host = ::kernels::detail::host;
    bool empty = false;
    KERNELS_TRY(::kernels::detail::check_rows(Softmax{}, in, out, rows, cols, empty));
    KERNELS_TRY(cx.status());
    if (empty) return {};
    const host::Packs<Load, Store> packs(in, out, cols);
    const host::Team team = cx.team().for_work(double(rows) * double(cols));
    const int parts = int(lesser<int64_t>(team.threads, rows));
    const auto share = [&](int part) { return rows / parts * part + rows % parts * part / parts; };
    host::parallel(team, parts, [&](int part) {
      for (int64_t row = share(part); row < share(part + 1); ++row) {
        packs.each(0, cols, [&in, &out, row](auto width, int64_t col) KERNELS_INLINE {
          constexpr int N = decltype(width)::value;
          ::kernels::detail::put(out, ::kernels::detail::resolve(in, ::kernels::detail::fetch<N>(in, row, col), row, col), row, col);
        });
      }
    });
    return {};
  }
}

}  // namespace cpu
KERNELS_END
