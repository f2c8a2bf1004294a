// Scheduler of the decoding kernels (stream-K style split-KV; picture in flash_decode.cuh). Every block computes its
// equal share of the work by itself, from the lengths as they are on the device, and iterates over it part by part.
//
// Words: an item is a KV head of a sequence, with tiles of rows. A unit is kUnit keys of one tile. A part is a range of
// units of one tile that a block processes.
#pragma once

#include "../../score.h"
#include "../pointwise.cuh"

KERNELS_BEGIN
namespace detail {

// A range of keys for the rows of one tile of an item. Units are counted from the beginning of the tile's keys.
struct DecodePart {
  int b, head, tile, rows, begin, end;
  int unit, next_unit, units;  // first unit, end unit, and how many units the tile has

  __device__ __forceinline__ bool starts() const { return unit == 0; }
  __device__ __forceinline__ bool ends() const { return next_unit == units; }
  __device__ __forceinline__ bool whole() const { return starts() && ends(); }
};

// Where the `count` partial results of a tile are in the workspace: part 0 at `first`, part i > 0 at others + i *
// distance, and that of this block at `mine`. A block has room for two partial results: of a tile that it continues,
// and of one that it begins. The block that begins a tile owns the counter of its parts. With a fixed number of splits,
// each tile has its own places.
struct PartialSlots {
  int64_t counter, mine, first, others;
  int distance, count;
};

// Distribution of units among blocks.
template <class P, int kUnit>
class DecodeSchedule {
  // The keys [begin, end) that a tile sees, how many rows it has, and its units.
  struct KeySpan {
    int begin, end, rows, units;
  };

 public:
  // Iterates over a block's parts.
  class Cursor {
   public:
    __device__ __forceinline__ bool next(const P& p, DecodePart& part) {
      if (left_ <= 0) return false;
      while (unit_ == keys_.units) {
        unit_ = 0;
        if (++tile_ == p.tiles) tile_ = 0, ++b_;
        if (b_ == p.shape.batch) b_ = 0, ++head_;
        keys_ = keys_of(p, b_, tile_);
      }
      const int up_to = p.splits > 0 ? cut_after(unit_, keys_.units, p.splits)
                                     : int(lesser<int64_t>(unit_ + left_, keys_.units)),
                begin = keys_.begin + unit_ * kUnit;
      part = {b_,         head_, tile_,
              keys_.rows, begin, int(lesser<int64_t>(keys_.end, keys_.begin + int64_t(up_to) * kUnit)),
              unit_,      up_to, keys_.units};
      left_ -= up_to - unit_;
      unit_ = up_to;
      return true;
    }

   private:
    friend class DecodeSchedule;
    // `left` units, from number `offset` of KV head `head` of sequence b on.
    __device__ __forceinline__ Cursor(const P& p, int head, int b, int64_t offset, int64_t left)
        : left_(left), b_(b), head_(head) {
      keys_ = {};
      do {
        offset -= keys_.units;
        keys_ = keys_of(p, b, ++tile_);
      } while (offset >= keys_.units);
      unit_ = int(offset);
      if (p.splits > 0) {
        const int cut = cut_after(unit_ - 1, keys_.units, p.splits);
        left_ -= cut - unit_;
        unit_ = cut;
      }
    }

    int64_t left_;
    int b_, head_, tile_ = -1, unit_;
    KeySpan keys_;
  };

  // Called by all threads of the block: finds its units.
  __device__ __forceinline__ explicit DecodeSchedule(const P& p) { find(p); }
  __device__ __forceinline__ bool idle() const { return next_ == first_; }
  __device__ __forceinline__ Cursor cursor(const P& p) const { return Cursor(p, head_, b_, offset_, next_ - first_); }

  // `part` begins `at` units after the block's first unit.
  __device__ __forceinline__ PartialSlots partial_slots(const P& p, const DecodePart& part, int64_t at) const {
    if (p.splits > 0) {
      const int64_t item = (int64_t(part.b) * p.kv_heads + part.head) * p.tiles + part.tile,
                    first = item * p.splits;
      const int count = lesser(p.splits, part.units);
      return {item, first + number_of_cut(part.unit, part.units, count), first, first, 1, count};
    }
    const int64_t item = first_ + at - part.unit;
    const int first = part.starts() ? int(blockIdx.x) : block_of(item),
              last = part.ends() ? int(blockIdx.x) : block_of(item + part.units - 1);
    return {first,           2 * int64_t(blockIdx.x) + part.starts(), 2 * int64_t(first) + 1, 2 * int64_t(first), 2,
            last - first + 1};
  }

 private:
  static __device__ __forceinline__ KeySpan keys_of(const P& p, int64_t b, int tile) {
    const int q_len = int(p.shape.queries(b)), all = q_len * p.group, first = tile * p.tile_rows;
    if (first >= all) return {0, 0, 0, 0};
    const int rows = lesser(p.tile_rows, all - first);
    const KeyRange seen =
        key_range(p.score, {b, p.query_of(first), p.query_of(first + rows - 1), q_len, p.kv.length(b)});
    // Rows that see no keys have a result as well, so there is at least one unit.
    return {int(seen.begin), int(seen.end), rows,
            greater(1, int(unsigned(seen.end - seen.begin + kUnit - 1) / unsigned(kUnit)))};
  }
  // Units of a sequence for each KV head.
  static __device__ __forceinline__ int64_t units_of(const P& p, int64_t b) {
    int64_t sum = 0;
    KERNELS_ROLLED
    for (int tile = 0; tile < p.tiles; ++tile) sum += keys_of(p, b, tile).units;
    return sum;
  }

  // Fixed splits: cut i of `count` is at unit units * i / count. number_of_cut(): the number of the first cut at or
  // after a unit. cut_after(): the unit of the next cut behind a unit.
  static __device__ __forceinline__ int number_of_cut(int unit, int units, int count) {
    return int((int64_t(unit) * count + units - 1) / units);
  }
  static __device__ __forceinline__ int cut_after(int unit, int units, int splits) {
    const int count = lesser(splits, units);
    return int(int64_t(units) * number_of_cut(unit + 1, units, count) / count);
  }
  // Block i has the units from total * i / blocks on.
  __device__ __forceinline__ int64_t first_of(int block) const {
    return block < blocks_ ? quotient(total_ * block, blocks_) : total_;
  }
  __device__ __forceinline__ int block_of(int64_t unit) const {
    return int(quotient((unit + 1) * blocks_ - 1, total_));
  }

  // Each thread counts the units of some sequences; after a prefix sum, one thread finds the sequence where the block
  // begins. For few sequences every warp does so by itself.
  __device__ __forceinline__ void find(const P& p) {
    __shared__ int64_t sums[32], found[2];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const bool few = p.shape.batch <= 32;
    const int64_t each = few ? 1 : (p.shape.batch + blockDim.x - 1) / blockDim.x;
    const int64_t begin = lesser<int64_t>((few ? lane : int(threadIdx.x)) * each, p.shape.batch),
                  end = lesser(begin + each, p.shape.batch);
    int64_t mine = 0;
    KERNELS_ROLLED
    for (int64_t b = begin; b < end; ++b) mine += units_of(p, b);
    int64_t up_to = mine;
    const int lanes = int(lesser<int64_t>(p.shape.batch, 32));
    KERNELS_ROLLED
    for (int distance = 1; distance < lanes; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
      if (lane >= distance) up_to += other;
    }
    int64_t of_head = __shfl_sync(0xffffffffu, up_to, lanes - 1);
    if (!few) {
      if (lane == 31) sums[warp] = up_to;
      __syncthreads();
      of_head = 0;
      KERNELS_ROLLED
      for (int i = 0; i < int(blockDim.x) / 32; ++i) {
        if (i < warp) up_to += sums[i];
        of_head += sums[i];
      }
    }
    total_ = of_head * p.kv_heads;
    blocks_ = int(lesser<int64_t>(p.blocks, total_));
    first_ = first_of(int(blockIdx.x)), next_ = first_of(int(blockIdx.x) + 1);
    head_ = total_ > 0 ? int(quotient(first_, of_head)) : 0;
    const int64_t of_this = first_ - head_ * of_head;
    offset_ = of_this - (up_to - mine), b_ = int(begin);
    const bool here = offset_ >= 0 && of_this < up_to;
    if (few) {
      const int owner = greater(0, __ffs(int(__ballot_sync(0xffffffffu, here))) - 1);
      offset_ = __shfl_sync(0xffffffffu, offset_, owner), b_ = __shfl_sync(0xffffffffu, b_, owner);
    } else {
      if (here) {
        KERNELS_ROLLED
        for (int64_t units; offset_ >= (units = units_of(p, b_)); ++b_) offset_ -= units;
        found[0] = offset_, found[1] = b_;
      }
      __syncthreads();
      offset_ = found[0], b_ = int(found[1]);
    }
  }

  // offset_: from the first unit of head_ of sequence b_ to the block's first unit.
  int64_t total_, first_, next_, offset_;
  int blocks_, head_, b_;
};

}  // namespace detail
KERNELS_END
