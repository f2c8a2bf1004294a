// Rows that begin at any element: where their aligned packs are, and which elements remain at both ends.
#pragma once

#include <cstdint>

#include "macros.h"

KERNELS_BEGIN
namespace detail {

// Where rows begin, in elements modulo the width of a pack: the first row's phase, and the step from row to row.
struct RowPhase {
  uint32_t first = 0, step = 0;
  KERNELS_HD uint32_t at(int64_t row) const { return first + step * uint32_t(row); }
};

// A row of `cols` columns that begins `phase` elements after a multiple of `pack`, a power of two. Its aligned packs
// begin at columns head, head + pack, ... below `end`, with at least pack - 1 columns on either side, so that the words
// read around a pack are inside the row. At most 4 * pack - 4 elements remain: those before head and those from `end`
// on.
struct RowEnds {
  int head, end, cols;

  KERNELS_HD RowEnds(uint32_t phase, int pack, int columns) : cols(columns) {
    const int first = pack - 1 + int((1u - phase) & uint32_t(pack - 1));
    head = first < columns ? first : columns;
    const int room = columns - (pack - 1) - head;
    end = head + (room > 0 ? room & ~(pack - 1) : 0);
  }
  // A row without single elements at its ends.
  static KERNELS_HD RowEnds none(int columns) { return RowEnds(0u, 1, columns); }
  // An upper bound on the packs of such a row.
  static constexpr int64_t most_packs(int64_t columns, int pack) {
    return columns < 2 * pack - 2 ? 0 : (columns - 2 * pack + 2) / pack;
  }

  KERNELS_HD int left() const { return cols - (end - head); }
  // The column of the i-th remaining element.
  KERNELS_HD int column(int i) const { return i < head ? i : end + (i - head); }
};

// The columns of one lane if the blocks of a cluster and their warps share the columns [from, to) of a row. Each block
// has `width` contiguous columns, each of its warps `warp_width`, and the lane every 32nd pack of these, from `first`
// on and below `end`.
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
