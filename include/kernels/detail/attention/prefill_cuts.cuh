// Keys of attention that are split among thread blocks: in how many parts, and what each of them leaves in the
// workspace for the merge.
//
//   a long context, few queries:    | keys 0 | keys 1 | keys 2 |   parts, a thread block each
//                                       |        |        |
//                                    outputs, logsumexp of each    workspace -> merge -> results
#pragma once

#include "../../core/attention_call.h"
#include "../../exec.cuh"
#include "../../kv.h"

KERNELS_BEGIN
namespace detail {

// What blocks leave in the workspace of rows whose keys are split: for each part of the keys the rows of the sequence,
// with all heads, one behind the other. They hold the outputs of the part, finished, and what its merge has to know.
struct PrefillParts {
  // Of the row of a part. In the first part's, `parts` says how many there are, `distance` rows apart, and which query
  // and head it is; in others' it is 0.
  struct alignas(16) Row {
    int32_t token;
    uint16_t head, parts;
    int32_t distance;
    float logsumexp;
  };
  static_assert(sizeof(Row) == 16, "one access");

  int32_t* count = nullptr;  // of rows, of all parts
  Row* rows = nullptr;
  float* outputs = nullptr;
};

// In how many parts keys are cut: so many that the sequence's own blocks fill the machine, once, or twice where that
// leaves fewer multiprocessors idle, as long as a part is worth its state. Other sequences have no say in this, so that
// bits do not depend on them.
struct PrefillCuts {
  static constexpr int kMost = 32, kFewestTiles = 8, kFewestOfFew = 32;
  static constexpr int kFewRows =
      64;  // single queries, say: what a block does before and behind its tiles takes as long as many of these
  static constexpr int kOnEach = 2;  // blocks of what is split, on a multiprocessor, at most
  // Tiles of keys of a part of what is shared out. H200 (CUDA 13.0, 2026-11, a program that was not kept), latents, 1,
  // 2 and 3 tiles: one sequence of 4,096 keys with 16 heads takes 20.8, 21.3 and 24.7 us, with 128 31.2, 29.2 and
  // 31.2; 3 of 1,000 keys 28.3, 28.0 and 29.7.
  static constexpr int kFewestOfShared = 2;
  int once, twice;  // how many blocks that is
  int fixed;        // parts that are asked for, or 0
  int most_tiles;   // of keys that are announced, or that there can be
  bool shared;      // blocks are shared out among all sequences instead, in parts of as many tiles of keys

  PrefillCuts() = default;
  PrefillCuts(const DeviceInfo& device, const Attention& options, int on_each, int tile_keys, bool share,
              int64_t most_keys = kMostKeys)
      : once(on_each * device.sm_count),
        twice(kOnEach * device.sm_count),
        fixed(options.fixed_splits()),
        shared(share && fixed == 0) {
    if (options.expected_keys() > 0) most_keys = lesser(most_keys, options.expected_keys());
    most_tiles = int((most_keys + tile_keys - 1) / tile_keys) + 1;
  }

  // Of any sequence.
  KERNELS_HD int most() const { return fixed > 0 ? fixed : greater(1, lesser(int(kMost), most_tiles / kFewestTiles)); }
  // Of one that has so many blocks, and of one that has so many tiles of keys as well, and rows of heads that share
  // them.
  KERNELS_HD int most_of(unsigned blocks) const {
    const int of_once = int(unsigned(once) / blocks), of_twice = int(unsigned(twice) / blocks);
    return fixed > 0 ? fixed
                     : greater(1, lesser(most(), 8 * of_twice > 19 * of_once ? of_twice : of_once));  // a fifth better
  }
  KERNELS_HD int of(unsigned blocks, int tiles, unsigned rows) const {
    return greater(
        1, lesser(most_of(blocks), fixed > 0 ? tiles : tiles / (rows <= kFewRows ? kFewestOfFew : kFewestTiles)));
  }
};

// How many rows blocks leave at most, whichever kernel it is.
struct PrefillRoom {
  static constexpr int most_rows(int64_t dim, bool in_8_bits = true) {
    return dim <= 64 || (dim <= 128 && in_8_bits) ? 192 : 128;
  }  // of a tile, of heads of so many columns
  static constexpr int kSharedRows = 64;  // the same where blocks are shared out among all sequences, one on each
  static constexpr size_t kCountBytes = 16;
  int64_t rows = 0;
  size_t state_bytes = 0, output_bytes = 0;

  // For shapes that are the largest of several: a sequence with fewer queries may be split where a longer one is not.
  struct Largest {
    AttentionShape shape;
  };
  PrefillRoom(const DeviceInfo& device, const Largest& all, const Attention& options)
      : PrefillRoom(device, all.shape, options, false, true) {}
  PrefillRoom(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool share = false)
      : PrefillRoom(device, shape, options, share, shape.q_offsets != nullptr) {}
  size_t bytes() const { return kCountBytes + state_bytes + output_bytes; }

 private:
  // shorter: whether sequences may have fewer queries than the shape says.
  PrefillRoom(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool share,
              bool shorter) {
    constexpr int fewest_keys = 32;  // of a tile
    const PrefillCuts cuts(device, options, PrefillCuts::kOnEach, fewest_keys, share);
    const int64_t of_one =
        int64_t(cuts.twice) * most_rows(greater(shape.dim, shape.value_dim()), options.wants_8_bits());
    if (cuts.shared) {
      rows = int64_t(device.sm_count) * kSharedRows;
    } else {
      if (cuts.most() == 1 || (cuts.fixed == 0 && !shorter && shape.q_len * shape.heads > of_one)) return;
      rows = shape.total_queries() * shape.heads * cuts.most();
      if (cuts.fixed == 0) rows = lesser(rows, shape.batch * of_one);
    }
    state_bytes = size_t(rows) * sizeof(PrefillParts::Row),
    output_bytes = size_t(rows) * size_t(shape.value_dim()) * sizeof(float);
  }
};

}  // namespace detail
KERNELS_END
