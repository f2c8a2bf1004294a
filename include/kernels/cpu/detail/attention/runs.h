// The addresses of a tile's keys or values, for several heads, gathered from the runs that a view returns.
#pragma once

#include <new>

#include "../matmul/gemv.h"
#include "sizes.h"
#include "vectors.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Storage for objects without a default constructor.
template <class Row, int kCount>
struct Room {
  alignas(Row) unsigned char bytes[kCount * sizeof(Row)];
  Row* at(int64_t i) { return reinterpret_cast<Row*>(bytes) + i; }
  const Row* at(int64_t i) const { return reinterpret_cast<const Row*>(bytes) + i; }
};

// Data that is prefetched during the computation: keys or values of all heads, in the order of memory. Each row that is
// processed prefetches another row, or a part of one.
struct Ahead {
  const char* const* rows = nullptr;
  int count = 0;
  int begin = 0, end = 0;  // in bytes, of each row
  int each = 0;            // bytes to prefetch for each processed column, in units of 2^-16

  KERNELS_INLINE void operator()(int i) const {
    if (i < count) prefetch_lines(rows[i] + begin, rows[i] + end);
  }
  Ahead from(int first) const { return {rows + first, count - first, begin, end, each}; }
  // The part of each row that the processing of columns [first, last) prefetches.
  Ahead part(int64_t first, int64_t last) const {
    return {rows, count, int(first * each >> 16), int(last * each >> 16), each};
  }
};

// The keys of all heads at a position: at(head). The library's own views look up the position only once.
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

// The rows of a tile and their scales, with all heads of a position side by side.
template <class Run>
class GatheredRuns {
  using Codes = typename Run::Codes;
  static constexpr bool kAddressable = Addressable<Codes>::bits > 0;

 public:
  // keys: the most in a tile.
  GatheredRuns(int heads, int keys) : heads_(heads), keys_(keys) {}

  // Gathers `count` positions for each head from `begin` on; at(position)(head) returns a run.
  template <class At>
  void gather(int64_t begin, int count, const At& at) {
    constexpr int N = kLanes<float>;
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
    // Whole vectors of keys are multiplied: the last key fills up the last vector.
    for (int row = count; row > 0 && row % N != 0; ++row) {
      for (int head = 0; head < heads_; ++head)
        new (rows_.at(row * heads_ + head)) Row(*rows_.at((row - 1) * heads_ + head));
    }
    look_up_pages();
  }

  Gathered<Codes> of(int head) const { return Gathered<Codes>(rows_.at(head), heads_); }
  const float* scales(int head) const { return scales_ + head * keys_; }
  // Prefetches rows [first, last) of `cols` columns, for all heads, while other rows of `others` columns are processed.
  Ahead ahead(int first, int last, int64_t cols, int64_t others) const {
    const int bytes = int(cols * Addressable<Codes>::bits / 8);
    return {addresses_ + first, kAddressable ? last - first : 0, 0, bytes, int((int64_t(bytes) << 16) / others)};
  }

 private:
  using Row = RowAt<Codes>;
  KERNELS_INLINE void put(int head, int i, const Run& run, int64_t row) {
    new (rows_.at(i * heads_ + head)) Row(run.codes, row);
    if constexpr (kAddressable) {
      const char** const address = addresses_ + i * heads_ + head;
      *address = Addressable<Codes>::of(run.codes, row, 0);
      const bool known =
          (head > 0 && in_one_page(*address, address[-1])) || (i > 0 && in_one_page(*address, address[-heads_]));
      // If a view's runs end at different positions for each head, some rows are put more than once.
      if (!known && page_count_ < kMostTileKeys) pages_[page_count_++] = *address;
    }
    if constexpr (Run::scaled) scales_[head * keys_ + i] = run.scale(row);
  }

  // Loads the TLB with the pages in which rows begin, several walks at a time: later prefetches would otherwise wait
  // for address translation, one page after the other, and delay what follows.
  void look_up_pages() {
    for (int i = 0; i < page_count_; ++i) prefetch_lines(pages_[i], pages_[i] + 1);
    page_count_ = 0;
  }

  // Pages of 4 KB, the smallest size.
  static bool in_one_page(const char* a, const char* b) {
    return ((reinterpret_cast<uintptr_t>(a) ^ reinterpret_cast<uintptr_t>(b)) >> 12) == 0;
  }

  int heads_, keys_;
  Room<Row, kMostTileKeys> rows_;
  const char* addresses_[kMostTileKeys];
  const char* pages_[kMostTileKeys];
  int page_count_ = 0;
  float scales_[kMostTileKeys];
};

}  // namespace host
}  // namespace detail
KERNELS_END
