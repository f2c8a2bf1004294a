// Rows that begin at any element: where their aligned packs lie, and what is left on both sides of these.
#pragma once

#include <cstdint>

#include "macros.h"

KERNELS_BEGIN
namespace detail {

// Where rows begin, in elements modulo the width of a pack: the first one, and how much further each next one.
struct RowPhase {
  uint32_t first = 0, step = 0;
  KERNELS_HD uint32_t at(int64_t row) const { return first + step * uint32_t(row); }
};

// A row of `cols` columns that begins `phase` elements behind a multiple of `pack`, a power of two. Its packs lie at
// multiples of that, at columns head, head + pack, ... before `end`, with pack - 1 columns more on either side: what is
// read around a pack lies in the row. 4 * pack - 4 elements at most are left, some before head and some from `end` on.
struct RowEnds {
  int head, end, cols;

  KERNELS_HD RowEnds(uint32_t phase, int pack, int columns) : cols(columns) {
    const int first = pack - 1 + int((1u - phase) & uint32_t(pack - 1));
    head = first < columns ? first : columns;
    const int room = columns - (pack - 1) - head;
    end = head + (room > 0 ? room & ~(pack - 1) : 0);
  }
  // A row that is packs throughout.
  static KERNELS_HD RowEnds none(int columns) { return RowEnds(0u, 1, columns); }
  // How many packs such a row has at most.
  static constexpr int64_t most_packs(int64_t columns, int pack) {
    return columns < 2 * pack - 2 ? 0 : (columns - 2 * pack + 2) / pack;
  }

  KERNELS_HD int left() const { return cols - (end - head); }
  // The column of the i-th element that is left.
  KERNELS_HD int column(int i) const { return i < head ? i : end + (i - head); }
};

// What one lane of a warp works on when the blocks of a cluster and their warps share the columns [from, to) of a row:
// `width` columns per block and `warp_width` per warp, side by side, and of these every 32nd pack, from `first` on and
// before `end`.
struct LaneColumns {
  int first, end;

  KERNELS_HD LaneColumns(int block, int warp, int lane, int pack, int width, int warp_width, int from, int to) {
    const int begin = from + width * block, block_end = begin + width < to ? begin + width : to;
    const int warp_begin = begin + warp * warp_width, warp_end = warp_begin + warp_width;
    first = warp_begin + lane * pack;
    end = warp_end < block_end ? warp_end : block_end;
  }
};

}  // namespace detail
KERNELS_END
