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
  const Row* at(int64_t i) const { return reinterpret_cast<const Row*>(bytes) + i; }
};

// What comes into the cache meanwhile, keys or values, of all heads in the order of memory: each row that is worked on
// prefetches another, or a part of it.
struct Ahead {
  const char* const* rows = nullptr;
  int count = 0;
  int begin = 0, end = 0;  // in bytes, of each row
  int each = 0;            // how many 2^-16 of a byte there are for a column that is worked on

  KERNELS_INLINE void operator()(int i) const {
    if (i < count) prefetch_lines<1>(rows[i] + begin, rows[i] + end);
  }
  Ahead from(int first) const { return {rows + first, count - first, begin, end, each}; }
  // The part of each row that columns [first, last) have to bring.
  Ahead part(int64_t first, int64_t last) const {
    return {rows, count, int(first * each >> 16), int(last * each >> 16), each};
  }
};

// Where the rows of all heads at a position are: at(head). The library's own views find the position once for all.
template <class Kv>
auto keys_at(const Kv& kv, int64_t b, int64_t pos) {
  return [&kv, b, pos](int64_t head) KERNELS_INLINE { return kv.key(b, head, pos); };
}
template <class Kv>
auto values_at(const Kv& kv, int64_t b, int64_t pos) {
  return [&kv, b, pos](int64_t head) KERNELS_INLINE { return kv.value(b, head, pos); };
}
template <class K, class V, class Where>
auto keys_at(const KvCache<K, V, Where>& kv, int64_t b, int64_t pos) {
  return [keys = kv.keys(), slot = kv.where().slot(b, pos)](int64_t head)
             KERNELS_INLINE { return keys.run(slot, head); };
}
template <class K, class V, class Where>
auto values_at(const KvCache<K, V, Where>& kv, int64_t b, int64_t pos) {
  return [values = kv.values(), slot = kv.where().slot(b, pos)](int64_t head)
             KERNELS_INLINE { return values.run(slot, head); };
}

// The rows of a tile, and what they are scaled with: those of all heads at a position side by side.
template <class Run>
class GatheredRuns {
  using Codes = typename Run::Codes;
  static constexpr bool kHasPlaces = Place<Codes>::bits > 0;

 public:
  // keys: of a tile, at most.
  GatheredRuns(int heads, int keys) : heads_(heads), keys_(keys) {}

  // `count` of each head, from position `begin` on, where at(position)(head) says they are.
  template <class At>
  void gather(int64_t begin, int count, const At& at) {
    constexpr int N = kLanes<float>;
    page_count_ = 0;
    for (int i = 0; i < count;) {
      const auto run_of = at(begin + i);
      int next = count;
      for (int head = 0; head < heads_; ++head) {
        const Run run = run_of(head);
        next = int(lesser<int64_t>(next, i + run.count));
        for (int row = i; row < next; ++row) put(head, row, run, row - i);
      }
      i = next;
    }
    // Whole vectors of keys are multiplied: the last one stands in for those that lack.
    for (int row = count; row > 0 && row % N != 0; ++row) {
      for (int head = 0; head < heads_; ++head)
        new (rows_.at(row * heads_ + head)) Row(*rows_.at((row - 1) * heads_ + head));
    }
  }

  Gathered<Codes> of(int head) const { return Gathered<Codes>(rows_.at(head), heads_); }
  const float* scales(int head) const { return scales_ + head * keys_; }
  // Rows [first, last) of `cols` columns, of all heads, while others of `others` columns are worked on.
  Ahead ahead(int first, int last, int64_t cols, int64_t others) const {
    const int bytes = int(cols * Place<Codes>::bits / 8);
    return {places_ + first, kHasPlaces ? last - first : 0, 0, bytes, int((int64_t(bytes) << 16) / others)};
  }

  // Step `step` of `steps` in which the machine looks up where the pages are that rows begin in: what is prefetched
  // from them later would wait for that, and hold up what is behind it.
  void look_up_pages(int step, int steps) const {
    for (int i = page_count_ * step / steps; i < page_count_ * (step + 1) / steps; ++i)
      prefetch_lines(pages_[i], pages_[i] + 1);
  }

 private:
  using Row = RowAt<Codes>;
  KERNELS_INLINE void put(int head, int i, const Run& run, int64_t row) {
    new (rows_.at(i * heads_ + head)) Row(run.codes, row);
    if constexpr (kHasPlaces) {
      const char** const place = places_ + i * heads_ + head;
      *place = Place<Codes>::of(run.codes, row, 0);
      const bool known = (head > 0 && in_one_page(*place, place[-1])) || (i > 0 && in_one_page(*place, place[-heads_]));
      // Rows of a view whose runs end elsewhere for each head are put more than once.
      if (!known && page_count_ < kMostTileKeys) pages_[page_count_++] = *place;
    }
    if constexpr (Run::scaled) scales_[head * keys_ + i] = run.scale(row);
  }

  // Of 4 KB, the smallest there are.
  static bool in_one_page(const char* a, const char* b) {
    return ((reinterpret_cast<uintptr_t>(a) ^ reinterpret_cast<uintptr_t>(b)) >> 12) == 0;
  }

  int heads_, keys_;
  Room<Row, kMostTileKeys> rows_;
  const char* places_[kMostTileKeys];
  const char* pages_[kMostTileKeys];
  int page_count_ = 0;
  float scales_[kMostTileKeys];
};

}  // namespace host
}  // namespace detail
KERNELS_END
