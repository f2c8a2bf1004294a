// The copy pipeline of a warp of decoding on tensor cores: a ring of stages (slots) in shared memory, to which keys and
// values of all parts of the block are copied by cp.async ahead of the products.
#pragma once

#include "../../tuning/attention.h"
#include "decode_side.cuh"
#include "flash_decode.cuh"

KERNELS_BEGIN
namespace detail {

// A slot of kSlot bytes holds the keys, then the values, of kKeyTiles * 16 positions of kHeads KV heads. Steps:
// iterates over the warp's keys of a part. With several teams, the first one copies keys and scales, the last one
// values.
template <class P, class Cursor, class Steps, class Keys, class Values, int kHeads, int kKeyTiles, int kStages,
          int kSlot, bool kShortOfRegisters>
class DecodeRing {
 public:
  static constexpr int kKeysBytes = kKeyTiles * Keys::kBytes;
  static_assert(kSlot % 128 == 0 && Keys::kBytes % 128 == 0, "DecodeSide permutes chunks within 128 bytes");

  // scales: shared memory for the scales, if there are some. A slot has floats for each of its key tiles: those of the
  // keys, head by head, then those of the values.
  __device__ __forceinline__ DecodeRing(const P& p, const unsigned char* first_slot, float* scales,
                                        const Cursor& cursor)
      : p_(p), kept_(scales), slots_(arch::shared_address(first_slot)), ahead_(cursor) {}

  __device__ __forceinline__ uint32_t at(int slot) const { return slots_ + slot * kSlot; }
  // Starts the pipeline with keys and values that are old (Attention::new_keys), before the preceding kernel has ended.
  // Returns how many steps it has copied. Not available with scales.
  __device__ __forceinline__ int fill_ready() {
    static_assert(!scaled, "fill() forgets where scales go");
    int count = 0;
    KERNELS_ROLLED
    for (; count < kFirst && next_ready(); ++count) load<true>();
    return count;
  }
  // Starts the pipeline, except for the steps that fill_ready() has copied.
  __device__ __forceinline__ void fill(int already) {
    if constexpr (scaled) {
      KERNELS_UNROLL
      for (int i = 0; i < kScalesAhead; ++i) scale_slots_[i] = -1;
    }
    KERNELS_ROLLED
    for (int i = already; i < kFirst; ++i) load<true>();
  }
  // Issues the copies of the next step, if there is one.
  __device__ __forceinline__ void load() { load<false>(); }

 private:
  // Whether a step's addresses are looked up one call of load() ahead of its copies, so that these do not wait for a
  // page table. Then the first call only looks up addresses. Not for user-defined views, of which nothing is known.
  static constexpr bool kConstantStride = constant_stride<typename P::Kv>, kInPages = in_pages<typename P::Kv>,
                        kLooksAhead = kConstantStride || kInPages;
  // Calls of load() that fill all stages but one. With kLooksAhead the first of them copies nothing.
  static constexpr int kFirst = kLooksAhead ? kStages : kStages - 1;
  static constexpr bool scaled = Keys::scaled || Values::scaled;
  static_assert(kHeads == 1 || kLooksAhead, "heads lie at equal distances");
  static __device__ __forceinline__ bool loads_keys() { return Steps::team() == 0; }
  static __device__ __forceinline__ bool loads_values() { return Steps::team() == Steps::teams - 1; }
  // Calls of load() after which scales that were loaded are written to shared memory. It is one less for teams, as the
  // barrier of a step is ahead of its load(), so that scales must be in shared memory a call sooner. 0: they are
  // written at the end of the call that loads them.
  static constexpr int kScaleSteps = kStages - (Steps::teams > 1 ? 2 : 1);
  static constexpr int kScalesAhead = kScaleSteps > 4 ? 4 : kScaleSteps > 1 ? kScaleSteps : 1;

  // Addresses of rows, or of scales: rows of a block, blocks, and heads are each at equal distances.
  struct Lines {
    const char* first;
    int64_t block, head, distance;  // bytes
    Lines() = default;
    // From `heads` heads and `rows` rows behind `start` on, where address(slot, head) is an address.
    template <class Address>
    __device__ __forceinline__ Lines(const KvSlot& start, int heads, int rows, const Address& address)
        : first(address(start, 0)),
          block(address(KvSlot{start.block + 1, start.place, 1}, 0) - first),
          head(address(start, 1) - first),
          distance(address(KvSlot{start.block, start.place + 1, 1}, 0) - first) {
      first += rows * distance + heads * head;
    }
    __device__ __forceinline__ const char* at(int32_t blocks, uint32_t rows) const {
      return first + (int64_t(blocks) * block + int64_t(rows) * distance);
    }
  };

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }

  // Whether all keys of the next load() are old.
  __device__ __forceinline__ bool next_ready() const {
    return there_ == 0 || int64_t(steps_.first) + there_ <= p_.options.ready_keys(p_.kv.length(next_.b));
  }

  // kCold: for code that runs once, which must be short, as it misses the instruction cache.
  template <bool kCold>
  __device__ __forceinline__ void load() {
    if constexpr (scaled) keep_scales();
    if constexpr (!kLooksAhead) find();
    if (there_ > 0) {
      if constexpr (scaled) scale_slots_[0] = loads_keys() ? load_slot_ : -1;
      if (!kCold && all_there())
        copy<kCold, true>();
      else
        copy<kCold, false>();
    }
    arch::copy_async_commit();
    load_slot_ = load_slot_ + 1 == kStages ? 0 : load_slot_ + 1;
    if constexpr (kLooksAhead) find();
    if constexpr (scaled && kScaleSteps == 0) keep_scales();
  }
  // Whether the next step has all rows and columns of a slot, and the keys of each tile are contiguous.
  __device__ __forceinline__ bool all_there() const {
    return there_ == kKeyTiles * kDecodeKeys && tiles_contiguous_ && Keys::bytes_of(p_.dim) == Keys::kHeadBytes &&
           Values::bytes_of(p_.v_dim) == Values::kHeadBytes;
  }
  template <bool kCold, bool kAll>
  __device__ __forceinline__ void copy() {
    const uint32_t to = at(load_slot_);
    Found found;
    if constexpr (kConstantStride) found = find_tile(0, steps_.first);
    KERNELS_UNROLL
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const int rows = there_ - tile * kDecodeKeys;
      if constexpr (kInPages)
        found = find_tile(page_[tile], page_offset_[tile]);
      else if constexpr (!kConstantStride)
        found = find_tile_of_view(tile);
      if constexpr (scaled) {
        KERNELS_UNROLL
        for (int i = 0; i < kHeads; ++i) {
          scales_[0][tile * kHeads + i] = 0;
          if (kAll || lane() % kDecodeKeys < rows)
            scales_[0][tile * kHeads + i] =
                of_values(i) ? Values::scale_bits(found.scales[i]) : Keys::scale_bits(found.scales[i]);
          if constexpr (kConstantStride) found.scales[i] += kDecodeKeys * lane_scales_[i].distance;
        }
      }
      if (loads_keys())
        copy_tile<kCold, kAll, Keys>(to + tile * Keys::kBytes, found.key, keys_, Keys::bytes_of(p_.dim), rows);
      if (loads_values())
        copy_tile<kCold, kAll, Values>(to + kKeysBytes + tile * Values::kBytes, found.value, values_,
                                       Values::bytes_of(p_.v_dim), rows);
    }
  }
  // Addresses for a tile: the first rows of keys and values that the lane copies from, or, if the keys of the tile are
  // not contiguous, the lane's own key and value; and the scales that the lane loads.
  struct Found {
    const char *key, *value, *scales[kHeads];
  };
  __device__ __forceinline__ Found find_tile(int32_t page, uint32_t offset) const {
    Found found;
    found.key = keys_.at(page, offset), found.value = values_.at(page, offset);
    if constexpr (scaled) {
      KERNELS_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        found.scales[i] = lane_scales_[i].at(page, offset);
        if (kInPages && !tiles_contiguous_) found.scales[i] -= lane() % kDecodeKeys * lane_scales_[i].distance;
      }
    }
    return found;
  }
  // The same for a user-defined view, where each tile may have another distance between its rows.
  __device__ __forceinline__ Found find_tile_of_view(int tile) {
    const auto key = p_.kv.key(next_.b, next_.head, key_of(tile));
    const auto value = p_.kv.value(next_.b, next_.head, key_of(tile));
    Found found;
    const auto find_row = [](const auto& codes, int row, const char*& at, Lines& lines) {
      at = row_address(codes, 0), lines.distance = row_address(codes, 1) - at, at += row * lines.distance;
    };
    find_row(key.codes, Keys::lane_row(), found.key, keys_);
    find_row(value.codes, Values::lane_row(), found.value, values_);
    if constexpr (scaled) found.scales[0] = lane_scale(0, key, value, tiles_contiguous_ ? lane() % kDecodeKeys : 0);
    return found;
  }
  // Copies a tile. from: the first row that the lane copies from, which then advances to the next tile; or the lane's
  // own row, if the keys of the tile are not contiguous.
  template <bool kCold, bool kAll, class Side>
  __device__ __forceinline__ void copy_tile(uint32_t to, const char*& from, const Lines& lines, int bytes,
                                            int rows) const {
    if (kConstantStride || kAll || tiles_contiguous_) {
      Side::template copy<kCold, kAll>(to, bytes, rows, [&](int) {
        const char* const row = from;
        from += Side::kRows * lines.distance;
        return row;
      });
    } else {
      const int64_t heads = kHeads == 1 ? 0 : Side::lane_head() * lines.head;
      from -= Side::lane_row() * lines.distance + heads;
      Side::template copy<kCold, false>(to, bytes, rows, [&](int row) { return of_lane(from, row) + heads; });
    }
  }
  __device__ __forceinline__ uint32_t key_of(int tile) const {
    return steps_.first + lesser(tile * kDecodeKeys + (tiles_contiguous_ ? 0 : lane() % kDecodeKeys), there_ - 1);
  }

  // Finds the warp's next keys and values.
  __device__ __forceinline__ void find() {
    if (!steps_.next(uint32_t(next_.end))) {
      do {
        if (!ahead_.change([&](Cursor& cursor) { return cursor.next(p_, next_); })) {
          there_ = 0;
          return;
        }
        steps_.begin(uint32_t(next_.begin));
      } while (!steps_.next(uint32_t(next_.end)));
      if constexpr (kLooksAhead) find_lines();
    }
    there_ = int(steps_.count);
    if constexpr (kInPages) {
      look_up_pages();
    } else if constexpr (!kConstantStride) {
      tiles_contiguous_ = true;
      KERNELS_UNROLL
      for (int tile = 0; tile < kKeyTiles; ++tile)
        tiles_contiguous_ =
            tiles_contiguous_ && lesser(p_.kv.key(next_.b, next_.head, key_of(tile)).count,
                                        p_.kv.value(next_.b, next_.head, key_of(tile)).count) >= in_tile(tile);
    }
  }
  __device__ __forceinline__ int in_tile(int tile) const { return lesser(kDecodeKeys, there_ - tile * kDecodeKeys); }
  // Computes the addresses of a part's sequence and head.
  __device__ __forceinline__ void find_lines() {
    const KvSlot start = kInPages ? KvSlot{0, 0, 1} : p_.kv.where().slot(next_.b, 0);
    const int64_t first = int64_t(next_.head) * kHeads;
    const auto key = [&](const KvSlot& slot, int head) { return p_.kv.keys().run(slot, first + head); };
    const auto value = [&](const KvSlot& slot, int head) { return p_.kv.values().run(slot, first + head); };
    keys_ = Lines(start, Keys::lane_head(), Keys::lane_row(),
                  [&](const KvSlot& slot, int head) { return row_address(key(slot, head).codes, 0); });
    values_ = Lines(start, Values::lane_head(), Values::lane_row(),
                    [&](const KvSlot& slot, int head) { return row_address(value(slot, head).codes, 0); });
    if constexpr (scaled) {
      KERNELS_UNROLL
      for (int i = 0; i < kHeads; ++i) {
        lane_scales_[i] =
            Lines(start, (i * 32 + lane()) / kDecodeKeys % kHeads, lane() % kDecodeKeys,
                  [&](const KvSlot& slot, int head) { return lane_scale(i, key(slot, head), value(slot, head), 0); });
      }
    }
  }
  // Loads the page table entries of the next tiles, or of each lane's own key if a tile spans several pages. Nothing
  // uses the loaded values before the next load().
  __device__ __forceinline__ void look_up_pages() {
    tiles_contiguous_ = true;
    const uint32_t size = p_.kv.where().pages.size;
    uint32_t page = steps_.first / size, offset = steps_.first - page * size;
    KERNELS_UNROLL
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const int here = in_tile(tile);
      if (here > 0) look_up_page(tile, page, offset);
      tiles_contiguous_ = tiles_contiguous_ && offset + uint32_t(greater(0, here)) <= size;
      offset += kDecodeKeys;
      if (offset >= size) offset -= size, ++page;
    }
    if (!tiles_contiguous_) {
      KERNELS_UNROLL
      for (int tile = 0; tile < kKeyTiles; ++tile) look_up_page(tile, key_of(tile) / size, key_of(tile) % size);
    }
    if constexpr (!scaled) prefetch_table(size);
  }
  // Prefetches into L1 the page table entries of keys some steps ahead: a load from beyond L1 would be queued behind
  // the copies of keys and values. e4m3 in pages of 16, H200: 64 x 4,096 keys 139.4 instead of 142.5 us, 8 x 4,096 25.2
  // instead of 26.9. With scales, int8 took up to 6 % longer.
  __device__ __forceinline__ void prefetch_table(uint32_t size) const {
    // Nobody reads these. If all copies of a warp went to one address, racecheck would call each an error. With an
    // address for each stage, it warns of the first few, and reports errors for sequences of a few keys.
    __shared__ uint32_t nowhere[Steps::warps][kStages];
    constexpr uint32_t kStep = Steps::warps * kKeyTiles * kDecodeKeys;
    const uint32_t key = lesser(steps_.first + tuning::kTableStepsAhead * kStep, uint32_t(next_.end) - 1);
    if (lane() == 0 && loads_keys())
      arch::copy_async_4(arch::shared_address(&nowhere[Steps::number()][load_slot_]), entry_of(key / size), 4);
  }
  __device__ __forceinline__ void look_up_page(int tile, uint32_t page, uint32_t offset) {
    page_[tile] = *entry_of(page), page_offset_[tile] = offset;
  }
  __device__ __forceinline__ const int32_t* entry_of(uint32_t page) const {
    const Pages& pages = p_.kv.where().pages;
    return pages.table + (next_.b * pages.ld + page);
  }
  // Scales are loaded in kHeads rounds, those of keys first. Whether the lane loads one of a value in round `go`.
  static __device__ __forceinline__ bool of_values(int go) { return go * 32 + lane() >= kHeads * kDecodeKeys; }
  template <class KeyRun, class ValueRun>
  static __device__ __forceinline__ const char* lane_scale(int go, const KeyRun& key, const ValueRun& value,
                                                           int position) {
    return of_values(go) ? scale_address(value, position) : scale_address(key, position);
  }
  template <class Run>
  static __device__ __forceinline__ const char* scale_address(const Run& run, int position) {
    if constexpr (Run::scaled) return reinterpret_cast<const char*>(run.scales + position * run.scale_stride);
    else return nullptr;
  }
  // Writes scales to shared memory that were loaded some calls ago: their loads take as long as those of keys, and
  // nothing may wait for them earlier.
  __device__ __forceinline__ void keep_scales() {
    KERNELS_UNROLL
    for (int at = 0; at < kKeyTiles * kHeads; ++at) {
      const uint32_t bits = scales_[kScalesAhead - 1][at];
      if (scale_slots_[kScalesAhead - 1] >= 0)
        kept_[(scale_slots_[kScalesAhead - 1] * kKeyTiles * kHeads + at) * 32 + lane()] =
            of_values(at % kHeads) ? Values::scale_of(bits) : Keys::scale_of(bits);
      KERNELS_UNROLL
      for (int i = kScalesAhead - 1; i > 0; --i) scales_[i][at] = scales_[i - 1][at];
    }
    KERNELS_UNROLL
    for (int i = kScalesAhead - 1; i > 0; --i) scale_slots_[i] = scale_slots_[i - 1];
    scale_slots_[0] = -1;
  }
  template <class T>
  static __device__ __forceinline__ T* of_lane(T* p, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(p), lane));
  }

  const P& p_;
  float* const kept_;  // where scales are kept in shared memory
  const uint32_t slots_;
  int load_slot_ = kLooksAhead ? kStages - 1 : 0;  // the slot to copy to next
  SpilledToShared<Cursor, Steps::warps * Steps::teams, kShortOfRegisters, 1> ahead_;
  DecodePart next_ = {};
  Steps steps_;
  int there_ = 0;  // keys of the next step
  Lines keys_, values_, lane_scales_[kHeads];
  int32_t page_[kKeyTiles];
  uint32_t page_offset_[kKeyTiles];  // in the page
  bool tiles_contiguous_ = true;     // whether the keys of each tile are contiguous
  uint32_t scales_[kScalesAhead][kKeyTiles * kHeads];
  int scale_slots_[kScalesAhead];
};

}  // namespace detail
KERNELS_END
