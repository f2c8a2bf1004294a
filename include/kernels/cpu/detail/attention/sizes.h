// How many rows and keys attention on the CPU works on at a time, and what that takes on the stack.
#pragma once

#include "../../../core/attention_call.h"
#include "../matmul/gemm.h"
#include "../matmul/units.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Rows up to this number are multiplied without turning keys and values around.
constexpr int kFewRows = 8;
// Heads of keys that are worked on together, of few rows: as they usually lie side by side, memory is read in long
// stretches.
constexpr int kHeadsPerItem = 8;
// Keys of a tile, of few rows and of many; of many rows with a larger head, fewer. On an EPYC with AVX-512, one thread,
// halves, 8 key heads of 128, as a share of a plain read with 8 and with 32 query heads: one head at a time 0.74 and
// 0.46, 8 together 0.87 and 0.52, then with 32 keys 0.83 and 0.50.
constexpr int kFewRowsKeys = 64, kManyRowsKeys = 128;
// Of a tile of few rows, so many keys are worked on for all heads before the next ones, which come into the first-level
// cache meanwhile. On the same machine, one thread, 32 query heads, against a head's whole tile at a time and the next
// tile into the second-level cache: 1.29 times as fast, and 1.24 times into the second level, which drops what it has
// no room for. Against blocks of 16, blocks of 8 were 0.86 to 0.92 times as fast and those of 32 0.90.
constexpr int kBlockKeys = 16;
constexpr int kMostTileKeys =
    kFewRowsKeys * kHeadsPerItem > kManyRowsKeys ? kFewRowsKeys* kHeadsPerItem : kManyRowsKeys;
// What a thread has on its stack.
constexpr int kAttentionFloats = 104 << 10;
constexpr int kMostRows = 126;
// Rows of keys, or values, that are copied at a time where they cannot be read in vectors.
constexpr int kDecoded = 16;

// In floats: of each row, and of all together.
struct AttentionSizes {
  using T = Tiles<float>;
  int64_t keys, q, o, turned_keys = 0, turned_values = 0, rows, each, shared;
  AttentionSizes(const AttentionShape& shape, int64_t count) {
    const int64_t dim = shape.dim, v_dim = shape.value_dim(), panels = (v_dim + T::cols - 1) / T::cols * T::cols;
    const bool few = count <= kFewRows;
    keys = few                          ? kFewRowsKeys
           : greater(dim, v_dim) <= 128 ? kManyRowsKeys
           : greater(dim, v_dim) <= 256 ? kManyRowsKeys / 2
                                        : kManyRowsKeys / 4;
    q = few ? padded(dim) + kRowGap : (dim + T::depth - 1) / T::depth * T::depth;
    o = panels;
    if (!few) turned_keys = keys * padded(dim), turned_values = keys * panels;
    rows = greater(kLanes<float>, kDecoded) * padded(greater(dim, v_dim));
    each = q + o + keys + (few ? kFewRowsKeys : T::depth);
    shared = turned_keys + turned_values + rows;
  }
  static int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }
};

}  // namespace host
}  // namespace detail
KERNELS_END
