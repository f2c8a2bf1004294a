// Where a tile's rows of keys, or values, are, of several heads: gathered from the runs that a view gives.
#pragma once

#include <new>

#include "../matmul/gemv.h"
#include "sizes.h"
#include "vectors.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Room for what has no default constructor.
template <class Row, int kCount>
struct Room {
  alignas(Row) unsigned char bytes[kCount * sizeof(Row)];
  Row* at(int64_t i) { return reinterpret_cast<Row*>(bytes) + i; }
};

// What comes into the cache meanwhile, keys or values, of all heads in the order of memory: each row that is worked on
// prefetches part of another, `bytes` from its `begin` on.
struct Ahead {
  const char* const* rows;
  int count;
  KERNELS_INLINE void operator()(int i, int64_t begin, int64_t bytes) const {
    if (i < count) prefetch_lines(rows[i] + begin, rows[i] + begin + bytes);
  }
};

// The rows of a tile, and what they are scaled with: those of all heads at a position side by side.
template <class Run>
class GatheredRuns {
  using Codes = typename Run::Codes;
  static constexpr bool kHasPlaces = Place<Codes>::bits > 0;

 public:
  // keys: of a tile, at most.
  GatheredRuns(int heads, int keys) : heads_(heads), keys_(keys) {}

  // `count` of each head, from position `begin` on, where at(head, position) says they are.
  template <class At>
  void gather(int64_t begin, int count, const At& at) {
    constexpr int N = kLanes<float>;
    const int heads = heads_;
    for (int head = 0; head < heads; ++head) {
      RowAt<Codes>* const rows = rows_.at(head);
      const char** const places = places_ + head;
      float* const scales = scales_ + head * keys_;
      int i = 0;
      while (i < count) {
        const Run run = at(head, begin + i);
        const int end = int(lesser<int64_t>(count, i + run.count)), from = i;
        for (; i < end; ++i) {
          new (rows + i * heads) RowAt<Codes>{run.codes, i - from};
          if constexpr (kHasPlaces) places[i * heads] = Place<Codes>::of(run.codes, i - from, 0);
          if constexpr (Run::scaled) scales[i] = run.scale(i - from);
        }
      }
      // Whole vectors of keys are multiplied: the last one stands in for those that lack.
      for (; i > 0 && i % N != 0; ++i) new (rows + i * heads) RowAt<Codes>(rows[(i - 1) * heads]);
    }
  }

  Gathered<Codes> of(int head) { return Gathered<Codes>(rows_.at(head), heads_); }
  const float* scales(int head) const { return scales_ + head * keys_; }
  // Those of all heads from number `first` on, up to `count`.
  Ahead ahead(int first, int count) const { return {places_ + first, kHasPlaces ? count - first : 0}; }

 private:
  int heads_, keys_;
  Room<RowAt<Codes>, kMostTileKeys> rows_;
  const char* places_[kMostTileKeys];
  float scales_[kMostTileKeys];
};

}  // namespace host
}  // namespace detail
KERNELS_END
