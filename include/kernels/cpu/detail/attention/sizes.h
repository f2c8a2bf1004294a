// Sizes of CPU attention: how many rows and keys are processed at a time, and the stack that this takes.
#pragma once

#include "../../../core/attention_call.h"
#include "../matmul/gemm.h"
#include "../matmul/units.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Up to this number of rows, keys and values are multiplied without transposing them.
constexpr int kFewRows = 8;
// With few rows, the heads of keys that are processed together: heads are usually adjacent, so memory is read in long
// runs. EPYC with AVX-512, one thread, halves, 8 key heads of 128, speed relative to a plain read with 8 and with 32
// query heads: one head at a time 0.74 and 0.46, 8 together 0.87 and 0.52.
constexpr int kHeadsPerItem = 8;
// Keys of a tile; fewer with many rows of larger heads. EPYC with 32 KB of L1, few rows, 32 query heads over 8 of 128
// columns, speed with 128 keys relative to 64: halves 1.03, e4m3 1.03, int8 1.04, int4 1.03.
constexpr int kTileKeys = 128;
// With few rows, this many keys of a tile are processed for all heads before the next ones, which are meanwhile
// prefetched into the L2: the L1 drops what exceeds its capacity, and stalls if many lines are in flight. Same machine,
// halves, blocks of 16, speed relative to prefetching into the L1: 1.33 with 32 query heads, 1.85 with 8; on a machine
// with 48 KB of L1 0.96 with 32. Relative to blocks of 32, blocks of 16 reached 0.98 and blocks of 64 0.96.
constexpr int kBlockKeys = 32;
constexpr int kMostTileKeys = kTileKeys * kHeadsPerItem;
// The stack that a thread uses.
constexpr int kAttentionFloats = 104 << 10;
constexpr int kMostRows = 126;
// Rows of keys or values that are copied at a time if they cannot be read in vectors.
constexpr int kDecoded = 16;

// Sizes in floats: `each` for a row, `shared` for all rows together.
struct AttentionSizes {
  using T = Tiles<float>;
  int64_t keys, q, o, transposed_keys = 0, transposed_values = 0, rows, each, shared;
  AttentionSizes(const AttentionShape& shape, int64_t count) {
    const int64_t dim = shape.dim, v_dim = shape.value_dim(), panels = (v_dim + T::cols - 1) / T::cols * T::cols;
    const bool few = count <= kFewRows;
    keys = few || greater(dim, v_dim) <= 128 ? kTileKeys : greater(dim, v_dim) <= 256 ? kTileKeys / 2 : kTileKeys / 4;
    q = few ? padded(dim) + kRowGap : (dim + T::depth - 1) / T::depth * T::depth;
    o = panels;
    if (!few) transposed_keys = keys * padded(dim), transposed_values = keys * panels;
    rows = greater(kLanes<float>, kDecoded) * padded(greater(dim, v_dim));
    each = q + o + keys + (few ? kTileKeys : T::depth);
    shared = transposed_keys + transposed_values + rows;
  }
  static int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }
};

}  // namespace host
}  // namespace detail
KERNELS_END
