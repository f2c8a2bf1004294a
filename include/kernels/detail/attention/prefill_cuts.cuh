// Split-KV in prefill: how many splits the keys of a sequence get, and the partial results that the splits leave in the
// workspace for the merge kernel.
//
//   a long context, few queries:    | keys 0 | keys 1 | keys 2 |   splits, a thread block each
//                                       |        |        |
//                                    outputs, logsumexp of each    workspace -> merge -> results
#pragma once

#include "../../core/attention_call.h"
#include "../../exec.cuh"
#include "../../kv.h"

KERNELS_BEGIN
namespace detail {

// Partial results in the workspace. For each split of a sequence's keys there are the rows of the sequence, with all
// heads, one after the other. They hold normalized outputs, and what the merge has to know of the row.
struct PartialResults {
  // A row of a split. For the first split, `parts` is the number of splits, whose rows are `distance` rows apart, and
  // token and head say which row of the result it is. For other splits, parts is 0.
  struct alignas(16) Row {
    int32_t token;
    uint16_t head, parts;
    int32_t distance;
    float logsumexp;
  };
  static_assert(sizeof(Row) == 16, "one access");

  int32_t* count = nullptr;  // rows of all splits
  Row* rows = nullptr;
  float* outputs = nullptr;
};

// How many splits a sequence gets: as many as fill the machine with this sequence's blocks, once, or twice if that
// leaves fewer multiprocessors idle, as long as a split is worth its overhead. Other sequences have no influence, so
// that bits do not depend on the batch.
struct SplitPolicy {
  // The most splits, and the fewest key tiles of a split: kFewestOfFew for up to kFewRows rows (single queries, for
  // example), where prologue and epilogue of a block take as long as many key tiles.
  static constexpr int kMost = 32, kFewestTiles = 8, kFewestOfFew = 32;
  static constexpr int kFewRows =
      64;
  static constexpr int kOnEach = 2;  // the most resident blocks per multiprocessor, of kernels with splits
  // The fewest key tiles of a split if the work of all sequences is shared out. H200 (CUDA 13.0, 2026-11, ad hoc
  // benchmark), latents, with 1, 2 and 3 tiles: one sequence of 4,096 keys with 16 heads takes 20.8, 21.3 and 24.7 us,
  // with 128 heads 31.2, 29.2 and 31.2; 3 sequences of 1,000 keys take 28.3, 28.0 and 29.7.
  static constexpr int kFewestOfShared = 2;
  int once, twice;  // resident blocks of the kernel; kOnEach blocks per multiprocessor
  int fixed;        // splits that the caller asks for, or 0
  int most_tiles;   // key tiles of the longest sequence: as announced, or as is possible
  bool shared;      // the work of all sequences is shared out instead, in splits with the same number of key tiles

  SplitPolicy() = default;
  SplitPolicy(const DeviceInfo& device, const Attention& options, int on_each, int tile_keys, bool share,
              int64_t most_keys = kMostKeys)
      : once(on_each * device.sm_count),
        twice(kOnEach * device.sm_count),
        fixed(options.fixed_splits()),
        shared(share && fixed == 0) {
    if (options.expected_keys() > 0) most_keys = lesser(most_keys, options.expected_keys());
    most_tiles = int((most_keys + tile_keys - 1) / tile_keys) + 1;
  }

  // The most splits of any sequence.
  KERNELS_HD int most() const { return fixed > 0 ? fixed : greater(1, lesser(int(kMost), most_tiles / kFewestTiles)); }
  // The most splits of a sequence with so many blocks; and the splits of one that also has so many key tiles, and so
  // many rows of heads that share them.
  KERNELS_HD int most_of(unsigned blocks) const {
    const int of_once = int(unsigned(once) / blocks), of_twice = int(unsigned(twice) / blocks);
    // Two blocks per multiprocessor have to be at least a fifth better.
    return fixed > 0 ? fixed
                     : greater(1, lesser(most(), 8 * of_twice > 19 * of_once ? of_twice : of_once));
  }
  KERNELS_HD int of(unsigned blocks, int tiles, unsigned rows) const {
    return greater(
        1, lesser(most_of(blocks), fixed > 0 ? tiles : tiles / (rows <= kFewRows ? kFewestOfFew : kFewestTiles)));
  }
};

// The size of the workspace: how many rows of partial results there can be, whichever kernel takes the call.
struct PrefillWorkspace {
  static constexpr int most_rows(int64_t dim, bool in_8_bits = true) {
    return dim <= 64 || (dim <= 128 && in_8_bits) ? 192 : 128;
  }  // rows of a query tile, for heads of so many columns
  // The same if the work of all sequences is shared out, with one block per multiprocessor
  static constexpr int kSharedRows = 64;
  static constexpr size_t kCountBytes = 16;
  int64_t rows = 0;
  size_t state_bytes = 0, output_bytes = 0;

  // For a shape that is the maximum of several: a sequence with fewer queries may be split where a longer one is not.
  struct Largest {
    AttentionShape shape;
  };
  PrefillWorkspace(const DeviceInfo& device, const Largest& all, const Attention& options)
      : PrefillWorkspace(device, all.shape, options, false, true) {}
  PrefillWorkspace(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool share = false)
      : PrefillWorkspace(device, shape, options, share, shape.q_offsets != nullptr) {}
  size_t bytes() const { return kCountBytes + state_bytes + output_bytes; }

 private:
  // shorter: whether sequences may have fewer queries than the shape says.
  PrefillWorkspace(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool share,
                   bool shorter) {
    constexpr int fewest_keys = 32;  // of a tile
    const SplitPolicy split_policy(device, options, SplitPolicy::kOnEach, fewest_keys, share);
    const int64_t of_one =
        int64_t(split_policy.twice) * most_rows(greater(shape.dim, shape.value_dim()), options.wants_8_bits());
    if (split_policy.shared) {
      rows = int64_t(device.sm_count) * kSharedRows;
    } else {
      if (split_policy.most() == 1 || (split_policy.fixed == 0 && !shorter && shape.q_len * shape.heads > of_one))
        return;
      rows = shape.total_queries() * shape.heads * split_policy.most();
      if (split_policy.fixed == 0) rows = lesser(rows, shape.batch * of_one);
    }
    state_bytes = size_t(rows) * sizeof(PartialResults::Row),
    output_bytes = size_t(rows) * size_t(shape.value_dim()) * sizeof(float);
  }
};

}  // namespace detail
KERNELS_END
