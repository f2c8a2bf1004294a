// How products read their operands on the CPU: stretches of a row as floats, in a buffer.
#pragma once

#include "../../weights.h"
#include "row_engine.h"

KERNELS_BEGIN
namespace detail {
namespace host {
inline namespace KERNELS_ISA {

// A source's values in columns [begin, begin + count) of a row.
template <class Source, class C>
void read_row(const Source& source, int64_t row, int64_t begin, int64_t count, C* to) {
  const Packs<Source, DirectStore<C, C>> packs(source, DirectStore<C, C>(to, 0), begin % kWidestPack == 0 ? count : 1);
  packs.each(begin, begin + count, [&source, row, begin, to](auto width, int64_t col) KERNELS_INLINE {
    constexpr int N = decltype(width)::value;
    const Pack<C, N> values = convert<C>(resolve(source, fetch<N>(source, row, col), row, col));
    copy_bytes<int(sizeof(values.v))>(to + (col - begin), values.v);
  });
}

}
}  // namespace host
}  // namespace detail
KERNELS_END
