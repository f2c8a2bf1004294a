// What a warp of decoding on tensor cores brings to shared memory: its keys and values of all parts of its block, stage
// by stage, ahead of the products.
#pragma once

#include "../../tuning/attention.h"
#include "decode_side.cuh"
#include "flash_decode.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int kTileScales = 2 * kDecodeKeys;  // of a tile of keys, and then of their values

// Slots of kSlot bytes for kKeyTiles times 16 keys, then the values. Steps: to the warp's next keys of a part.
template <class P, class Cursor, class Steps, class Keys, class Values, int kKeyTiles, int kStages, int kSlot>
class DecodeRing {
 public:
  static constexpr int kKeysBytes = kKeyTiles * Keys::kBytes;
  static_assert(kSlot % 128 == 0 && Keys::kBytes % 128 == 0, "DecodeSide permutes chunks within 128 bytes");

  // scales: kKeyTiles * kTileScales floats for each slot, if there are scales.
  __device__ __forceinline__ DecodeRing(const P& p, const unsigned char* slots, float* scales, const Cursor& cursor)
      : p_(p), kept_(scales), slots_(arch::shared_address(slots)), ahead_(cursor) {}

  __device__ __forceinline__ uint32_t at(int slot) const { return slots_ + slot * kSlot; }
  // Brings as many of the first keys and values as are old, before the kernel ahead has ended. Returns how many times
  // it did. Not where there are scales.
  __device__ __forceinline__ int fill_ready() {
    static_assert(!scaled, "fill() forgets where scales go");
    int count = 0;
    KERNELS_ROLLED
    for (; count < kFirst && next_ready(); ++count) bring<true>();
    return count;
  }
  // Brings the first keys and values, but for those that fill_ready() has brought.
  __device__ __forceinline__ void fill(int already) {
    if constexpr (scaled) {
      KERNELS_UNROLL
      for (int i = 0; i < kScalesAhead; ++i) scale_slots_[i] = -1;
    }
    KERNELS_ROLLED
    for (int i = already; i < kFirst; ++i) bring<true>();
  }
  // Brings the next ones, if there are more.
  __device__ __forceinline__ void bring() { bring<false>(); }

 private:
  // Keys are looked for ahead of time; first of all, before there are any to bring. Of a view of the user's own nothing
  // is known.
  static constexpr bool kInOneRun = in_one_run<typename P::Kv>, kInPages = in_pages<typename P::Kv>,
                        kFoundAhead = kInOneRun || kInPages;
  // Calls of bring() that fill all stages but one: the first only looks for keys if these are found ahead of time.
  static constexpr int kFirst = kFoundAhead ? kStages : kStages - 1;
  static constexpr bool scaled = Keys::scaled || Values::scaled;
  static constexpr int kScalesAhead = kStages > 4 ? 4 : kStages > 1 ? kStages - 1 : 1;

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }

  // Whether all keys that bring() would bring are old.
  __device__ __forceinline__ bool next_ready() const {
    return there_ == 0 || int64_t(steps_.first) + there_ <= p_.options.ready_keys(p_.kv.length(next_.b));
  }

  // kOnce: what runs once has to be short.
  template <bool kOnce>
  __device__ __forceinline__ void bring() {
    if constexpr (scaled) keep_scales();
    if constexpr (!kFoundAhead) find();
    if (there_ > 0) {
      const uint32_t keys = at(bring_), values = keys + kKeysBytes;
      const int key_bytes = Keys::bytes_of(p_.dim), value_bytes = Values::bytes_of(p_.v_dim);
      if constexpr (scaled) scale_slots_[0] = bring_;
      if constexpr (kInOneRun) {
        copy_run<kOnce, Keys>(keys, key_, key_distance_, key_bytes);
        copy_run<kOnce, Values>(values, value_, value_distance_, value_bytes);
        if constexpr (scaled) {
          KERNELS_UNROLL
          for (int tile = 0; tile < kKeyTiles; ++tile)
            prefetch_scale(tile, scale_at_ + tile * kDecodeKeys * scale_distance_);
        }
      } else {
        KERNELS_UNROLL
        for (int tile = 0; tile < kKeyTiles; ++tile) {
          const auto key = key_run(tile);
          const auto value = value_run(tile);
          copy_tile<kOnce, Keys>(keys, key, key_bytes, tile);
          copy_tile<kOnce, Values>(values, value, value_bytes, tile);
          if constexpr (scaled) prefetch_scale(tile, lane_scale(key, value, by_tile_ ? lane() % kDecodeKeys : 0));
        }
      }
    }
    arch::copy_async_commit();
    bring_ = bring_ + 1 == kStages ? 0 : bring_ + 1;
    if constexpr (kFoundAhead) find();
    if constexpr (scaled && kStages == 1) keep_scales();
  }
  template <bool kOnce, class Side>
  __device__ __forceinline__ void copy_run(uint32_t to, const char* from, int64_t distance, int bytes) const {
    from += lane() / Side::kSharers * distance;
    KERNELS_UNROLL
    for (int tile = 0; tile < kKeyTiles; ++tile)
      copy_rows<kOnce, Side>(to + tile * Side::kBytes, from, distance, bytes, there_ - tile * kDecodeKeys);
  }
  // From a lane's row on.
  template <bool kOnce, class Side>
  static __device__ __forceinline__ void copy_rows(uint32_t to, const char*& from, int64_t distance, int bytes,
                                                   int rows) {
    Side::template copy<kOnce>(to, bytes, rows, [&](int) {
      const char* const row = from;
      from += 32 / Side::kSharers * distance;
      return row;
    });
  }
  template <bool kOnce, class Side, class Run>
  __device__ __forceinline__ void copy_tile(uint32_t to, const Run& run, int bytes, int tile) const {
    const char* from = row_address(run.codes, 0);
    const int rows = there_ - tile * kDecodeKeys;
    to += tile * Side::kBytes;
    if (by_tile_) {
      const int64_t distance = row_address(run.codes, 1) - from;
      from += lane() / Side::kSharers * distance;
      copy_rows<kOnce, Side>(to, from, distance, bytes, rows);
    } else {
      Side::template copy<kOnce>(to, bytes, rows, [&](int row) { return of_lane(from, row); });
    }
  }
  // Of a tile of the next keys or, where these are anywhere, of a lane's own.
  __device__ __forceinline__ auto key_run(int tile) const {
    if constexpr (kInPages) return p_.kv.keys().run(KvSlot{page_[tile], place_[tile], 1}, next_.head);
    else return p_.kv.key(next_.b, next_.head, key_of(tile));
  }
  __device__ __forceinline__ auto value_run(int tile) const {
    if constexpr (kInPages) return p_.kv.values().run(KvSlot{page_[tile], place_[tile], 1}, next_.head);
    else return p_.kv.value(next_.b, next_.head, key_of(tile));
  }
  __device__ __forceinline__ uint32_t key_of(int tile) const {
    return steps_.first + lesser(tile * kDecodeKeys + (by_tile_ ? 0 : lane() % kDecodeKeys), there_ - 1);
  }

  // Where the warp's next keys and values are.
  __device__ __forceinline__ void find() {
    [[maybe_unused]] const uint32_t before = steps_.first;
    const bool goes_on = steps_.next(uint32_t(next_.end));
    if (!goes_on) {
      do {
        if (!ahead_.next(p_, next_)) {
          there_ = 0;
          return;
        }
        steps_.begin(uint32_t(next_.begin));
      } while (!steps_.next(uint32_t(next_.end)));
    }
    there_ = int(steps_.count);
    if constexpr (kInOneRun) {
      if (goes_on) {
        const int64_t further = steps_.first - before;
        key_ += further * key_distance_, value_ += further * value_distance_;
        if constexpr (scaled) scale_at_ += further * scale_distance_;
      } else {
        enter_run(p_.kv.key(next_.b, next_.head, steps_.first), p_.kv.value(next_.b, next_.head, steps_.first));
      }
    } else {
      by_tile_ = true;
      if constexpr (kInPages) {
        look_up_pages();
      } else {
        KERNELS_UNROLL
        for (int tile = 0; tile < kKeyTiles; ++tile)
          by_tile_ = by_tile_ && lesser(key_run(tile).count, value_run(tile).count) >= in_tile(tile);
      }
    }
  }
  __device__ __forceinline__ int in_tile(int tile) const { return lesser(kDecodeKeys, there_ - tile * kDecodeKeys); }
  template <class KeyRun, class ValueRun>
  __device__ __forceinline__ void enter_run(const KeyRun& key, const ValueRun& value) {
    key_ = row_address(key.codes, 0), value_ = row_address(value.codes, 0);
    key_distance_ = row_address(key.codes, 1) - key_, value_distance_ = row_address(value.codes, 1) - value_;
    if constexpr (scaled) {
      scale_at_ = lane_scale(key, value, lane() % kDecodeKeys);
      scale_distance_ = lane() < kDecodeKeys ? scale_address(key, 1) - scale_address(key, 0)
                                             : scale_address(value, 1) - scale_address(value, 0);
    }
  }
  // Asks the table for the pages of the next tiles, or of a lane's own keys if a tile is in several, and leaves the
  // answers alone until these are brought.
  __device__ __forceinline__ void look_up_pages() {
    const uint32_t size = p_.kv.where().pages.size;
    uint32_t page = steps_.first / size, place = steps_.first - page * size;
    KERNELS_UNROLL
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const int here = in_tile(tile);
      if (here > 0) look_up_page(tile, page, place);
      by_tile_ = by_tile_ && place + uint32_t(greater(0, here)) <= size;
      place += kDecodeKeys;
      if (place >= size) place -= size, ++page;
    }
    if (!by_tile_) {
      KERNELS_UNROLL
      for (int tile = 0; tile < kKeyTiles; ++tile) look_up_page(tile, key_of(tile) / size, key_of(tile) % size);
    }
    if constexpr (!Keys::coded && !Values::coded) prefetch_table(size);
  }
  // Brings what the table says of keys some steps further on into the L1: an answer from beyond it comes late, behind
  // the keys and values that have been asked for. Codes gain nothing, whose decoding takes as long.
  __device__ __forceinline__ void prefetch_table(uint32_t size) const {
    // Nobody reads these. If all copies of a warp went to one place, racecheck would call each of them an error; with a
    // place for each stage it warns of the first few.
    __shared__ uint32_t nowhere[Steps::warps][kStages];
    constexpr uint32_t kStep = Steps::warps * kKeyTiles * kDecodeKeys;
    const uint32_t key = lesser(steps_.first + tuning::kTableStepsAhead * kStep, uint32_t(next_.end) - 1);
    if (lane() == 0)
      arch::copy_async_4(arch::shared_address(&nowhere[threadIdx.x / 32][bring_]), entry_of(key / size), 4);
  }
  __device__ __forceinline__ void look_up_page(int tile, uint32_t page, uint32_t place) {
    page_[tile] = *entry_of(page), place_[tile] = place;
  }
  __device__ __forceinline__ const int32_t* entry_of(uint32_t page) const {
    const Pages& pages = p_.kv.where().pages;
    return pages.table + (next_.b * pages.ld + page);
  }
  // The first lanes bring the keys' scales, the others those of values.
  template <class KeyRun, class ValueRun>
  static __device__ __forceinline__ const char* lane_scale(const KeyRun& key, const ValueRun& value, int position) {
    return lane() < kDecodeKeys ? scale_address(key, position) : scale_address(value, position);
  }
  template <class Run>
  static __device__ __forceinline__ const char* scale_address(const Run& run, int position) {
    if constexpr (Run::scaled) return reinterpret_cast<const char*>(run.scales + position * run.scale_stride);
    else return nullptr;
  }
  __device__ __forceinline__ void prefetch_scale(int tile, const char* at) {
    scales_[0][tile] = 0;
    if (tile * kDecodeKeys + lane() % kDecodeKeys < there_)
      scales_[0][tile] = lane() < kDecodeKeys ? Keys::scale_bits(at) : Values::scale_bits(at);
  }
  // Scales take as long to come as keys: nothing is done with their bits before.
  __device__ __forceinline__ void keep_scales() {
    KERNELS_UNROLL
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const uint32_t bits = scales_[kScalesAhead - 1][tile];
      if (scale_slots_[kScalesAhead - 1] >= 0)
        kept_[(scale_slots_[kScalesAhead - 1] * kKeyTiles + tile) * kTileScales + lane()] =
            lane() < kDecodeKeys ? Keys::scale_of(bits) : Values::scale_of(bits);
      KERNELS_UNROLL
      for (int i = kScalesAhead - 1; i > 0; --i) scales_[i][tile] = scales_[i - 1][tile];
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
  float* const kept_;  // scales
  const uint32_t slots_;
  int bring_ = kFoundAhead ? kStages - 1 : 0;  // the slot to bring to next
  Cursor ahead_;
  DecodePart next_ = {};
  Steps steps_;
  int there_ = 0;                          // keys that are next
  const char *key_, *value_;               // the first of them in one run
  int64_t key_distance_, value_distance_;  // bytes
  int32_t page_[kKeyTiles];
  uint32_t place_[kKeyTiles];  // in the page
  bool by_tile_;               // whether the keys of a tile follow each other
  const char* scale_at_;       // of the lane's first
  int64_t scale_distance_;     // bytes
  uint32_t scales_[kScalesAhead][kKeyTiles];
  int scale_slots_[kScalesAhead];
};

}  // namespace detail
KERNELS_END
