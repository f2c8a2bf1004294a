// SampleRow: a row for core/sampling_search.h and core/sampling_row.h, with any filters and adjustments of logits.
//
//   row:   | block 0: warp 0 | warp 1 | ... | block 1: warp 0 | ... |   a range of tokens for each warp, in order
#pragma once

#include "../../core/sampling_row.h"
#include "block.cuh"
#include "listed.cuh"

KERNELS_BEGIN
namespace detail {

// A row's tokens as a range for each warp, with blocks and warps in order. Base of weigh() and find().
template <class Source, int N, bool kListed = false>
class SampleRanges : protected SamplePacks<Source, N, kListed> {
 public:
  using Packs = SamplePacks<Source, N, kListed>;

  __device__ __forceinline__ SampleShared& shared() const { return *leaders(&room_.shared); }
  __device__ __forceinline__ bool is_first() const { return rank_ == 0 && threadIdx.x == 0; }
  __device__ __forceinline__ void sync() const {
    if (blocks_ > 1) {
      arch::cluster_arrive();
      arch::cluster_wait();
    } else {
      __syncthreads();
    }
  }

 protected:
  using Packs::kSegment, Packs::vocabulary_, Packs::rank_, Packs::blocks_, Packs::first_, Packs::step_, Packs::packs_,
      Packs::fetch_at, Packs::values_of;

  __device__ __forceinline__ SampleRanges(const Source& source, int64_t row, int vocabulary, int rank, int blocks)
      : Packs(source, row, vocabulary, rank, blocks), room_(room_of_block()) {
    const int segments = (vocabulary + kSegment - 1) / kSegment, warps = blocks * kSampleWarps;
    of_warp_ = (segments + warps - 1) / warps;
    const int begin = (rank * kSampleWarps + int(threadIdx.x) / 32) * of_warp_ * kSegment;
    this->take(begin + (int(threadIdx.x) & 31) * N, Packs::kLogSegment,
               lesser(vocabulary, begin + of_warp_ * kSegment));
  }

  template <class T>
  __device__ __forceinline__ T* leaders(T* own) const {
    return blocks_ > 1 ? arch::in_block(own, 0u) : own;
  }

  static __device__ KERNELS_CALLED uint64_t sum_of_warp_called(uint64_t mine) { return sum_of_warp(mine); }
  // The sum of all threads' values.
  __device__ __forceinline__ uint64_t sum_of_row(uint64_t mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    own_ = sum_of_warp(mine);
    if (lane == 0) room_.warp_sums[warp] = own_;
    __syncthreads();
    const uint64_t of_warp = lane < kSampleWarps ? room_.warp_sums[lane] : 0;
    uint64_t all = sum_of_warp(of_warp);
    before_ = sum_of_warp(lane < warp ? of_warp : 0);
    if (blocks_ == 1) {
      __syncthreads();  // the sums may be overwritten from here on
      return all;
    }
    // Double-buffered: other blocks may still read the previous one.
    turn_ ^= 1;
    if (threadIdx.x == 0) room_.block_sum[turn_] = all;
    sync();
    const uint64_t of_block = lane < blocks_ ? *arch::in_block(&room_.block_sum[turn_], unsigned(lane)) : 0;
    all = sum_of_warp(of_block);
    before_ += sum_of_warp(lane < rank_ ? of_block : 0);
    return all;
  }
  // Finds the first token at which the cumulative sum of mass(x, id) exceeds the target. All warps of the block that
  // has it share the range of the warp that has it: they first sum its parts. pack(index, thread, column) is a pack of
  // that thread.
  template <class GetPack, class Mass>
  __device__ __forceinline__ void find_by(uint64_t target, const GetPack& pack, const Mass& mass) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const bool here = target >= before_ && target - before_ < own_;
    if (here && lane == 0) room_.owner = warp, room_.rest = target - before_;
    if (!__syncthreads_or(here)) return sync();
    constexpr int most_parts = 2 * kFew;
    uint64_t* const sums = room_.shared.mass;
    const int owner = room_.owner, of_part = (of_warp_ + most_parts - 1) / most_parts,
              parts = (of_warp_ + of_part - 1) / of_part;
    const int first = ((rank_ * kSampleWarps + owner) * of_warp_ * 32 + lane) * N;
    uint64_t each[N];
    Pack<float, N> x;
    const auto look_at = [&](int number) {
      x = pack(number, owner * 32 + lane, first + number * step_);
      uint64_t all = 0;
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) all += each[i] = mass(x.v[i], first + number * step_ + i);
      return all;
    };
    sum_parts(sums, parts, of_part, lane, warp, look_at);
    __syncthreads();
    if (warp == 0) {
      uint64_t rest = room_.rest;
      KERNELS_ROLLED
      for (int number = find_part(sums, parts, lane, rest) * of_part;; ++number) {
        const uint64_t mine = look_at(number), all = sum_of_warp(mine);
        if (rest < all) {
          uint64_t before = before_lane(mine);
          KERNELS_UNROLL
          for (int i = 0; i < N; ++i) {
            if (before <= rest && rest - before < each[i])
              shared().edge = entry_of(key_of(x.v[i]), uint32_t(first + number * step_ + i));
            before += each[i];
          }
          break;
        }
        rest -= all;
      }
    }
    sync();
  }
  // Sums look_at(index) over parts of `of_part` indices, a warp for each part.
  template <class LookAt>
  __device__ __forceinline__ void sum_parts(uint64_t* sums, int parts, int of_part, int lane, int warp,
                                            const LookAt& look_at) const {
    KERNELS_ROLLED
    for (int part = warp; part < parts; part += kSampleWarps) {
      uint64_t sum = 0;
      KERNELS_ROLLED
      for (int number = part * of_part; number < lesser(of_warp_, (part + 1) * of_part); ++number)
        sum += look_at(number);
      sum = sum_of_warp(sum);
      if (lane == 0) sums[part] = sum;
    }
  }
  // By one warp: the part in which the cumulative sum exceeds `rest`; `rest` becomes the remainder within that part.
  static __device__ __forceinline__ int find_part(const uint64_t* sums, int parts, int lane, uint64_t& rest) {
    KERNELS_ROLLED
    for (int from = 0; from < parts; from += 32) {
      const uint64_t mine = from + lane < parts ? sums[from + lane] : 0, before = before_lane(mine),
                     all = __shfl_sync(0xffffffffu, before + mine, 31);
      if (rest >= all) {
        rest -= all;
        continue;
      }
      const int holder = __ffs(int(__ballot_sync(0xffffffffu, rest < before + mine))) - 1;
      rest -= __shfl_sync(0xffffffffu, before, holder);
      return from + holder;
    }
    return 0;
  }
  // The sum of lower lanes' values.
  static __device__ KERNELS_CALLED uint64_t before_lane(uint64_t mine) {
    uint64_t sum = mine;
    KERNELS_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if ((threadIdx.x & 31) >= distance) sum += other;
    }
    return sum - mine;
  }
  static __device__ __forceinline__ Pack<float, N> nothing() {
    Pack<float, N> x;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) x.v[i] = -infinity<float>();
    return x;
  }

  SampleRoom& room_;
  int of_warp_, turn_ = 0;  // of_warp_: the most packs of a thread
  uint64_t before_ = 0, own_ = 0;  // the sum before this warp's tokens, and the sum of these
};

template <class Source, int N>
class SampleRow : public SampleRanges<Source, N> {
  using Ranges = SampleRanges<Source, N>;

 public:
  using Ranges::shared, Ranges::is_first, Ranges::sync;
  // The packs of each thread whose occurrences in the list are counted together.
  static constexpr int kCounted = N == 1 ? 8 : 8192 / (kSampleThreads * N), kTile = kCounted * kSampleThreads * N;

  __device__ __forceinline__ SampleRow(const Source& source, const SampleOptions& options, const SampleRules& rules,
                                       int64_t row, int vocabulary, int rank, int blocks)
      : Ranges(source, row, vocabulary, rank, blocks),
        adjust_(options, rules, row),
        adjusted_(options.adjusted()),
        block_(room_) {
    if (options.previous.p != nullptr) {
      previous_ = options.previous.at(row);
      listed_ = options.lengths[row];
      if (options.prompts != nullptr) prompt_ = options.prompts[row];
      counts_ = reinterpret_cast<int32_t*>(&room_) + kSampleRoom / sizeof(int32_t);
    }
    if (is_first()) room_.shared.listed = 0;
  }

  __device__ __forceinline__ SampleBlock& block() { return block_; }
  __device__ __forceinline__ bool is_leader() const { return rank_ == 0; }

  __device__ __forceinline__ uint32_t look(int want, uint32_t& floor) {
    if (adjusted_) {
      greatest_ = 0;
      each(0, [this](uint32_t key, uint32_t) { greatest_ = greatest_ < key ? key : greatest_; });
    } else {
      float most = -infinity<float>();
      this->template each_pack<2>(0, [&most](const Pack<float, N>& x, int, int) {
        KERNELS_UNROLL
        for (int i = 0; i < N; ++i) most = arch::max_or_nan(most, x.v[i]);
      });
      greatest_ = key_of(most);
    }

    const int lane = threadIdx.x & 31;
    uint32_t top, low;
    extremes_of_block(room_, greatest_, top, low);
    // If each block has its share above a floor, the cluster has enough.
    if (want > 1)
      low = floor_for((want + blocks_ - 1) / blocks_, low, top,
                      [this](uint32_t key) { return __syncthreads_count(greatest_ >= key); });
    floor = low;
    if (blocks_ > 1) {
      if (threadIdx.x == 0) room_.top = top, room_.floor = floor;
      sync();
      const SampleRoom* const other = arch::in_block(&room_, unsigned(lesser(lane, blocks_ - 1)));
      top = __reduce_max_sync(0xffffffffu, other->top);
      floor = __reduce_min_sync(0xffffffffu, other->floor);
    }
    if (want == 0) floor = 0;  // all tokens count, not only those up to the largest of each thread
    if (want == 1) floor = top;
    return top;
  }

  __device__ __forceinline__ void list(uint32_t from) {
    each(from, [this, from](uint32_t key, uint32_t id) {
      if (key >= from) append(entry_of(key, id), key);
    });
  }
  // The key of one token, in a row without adjustments.
  __device__ __forceinline__ uint32_t key_at(int64_t id) const {
    return key_of(convert<float>(resolve(source_, fetch<1>(source_, row_, id), row_, id)).v[0]);
  }

  // Called, not inlined, as it is long and has many uses; so is the function that adjusts a logit.
  template <class V>
  __device__ KERNELS_CALLED void visit(uint32_t from, const V& all) {
    const V what = all;
    each(from, [this, &what](uint32_t key, uint32_t id) { what(*this, key, id); });
  }

  __device__ __forceinline__ void append(uint64_t entry, uint32_t key) const {
    SampleShared& s = shared();
    const uint32_t at = atomicAdd(&s.listed, 1u);
    if (at >= uint32_t(kFew)) return;
    s.entries[at] = entry;
    s.keys[at] = key;
  }

  __device__ __forceinline__ void clear_bins() const {
    block_.each(kBins, [this](int i) { room_.shared.mass[i] = 0, room_.shared.count[i] = 0; });
  }
  // A 64-bit sum as a 32-bit sum and a carry: 64-bit atomics on shared memory take several attempts.
  __device__ __forceinline__ void bin(int i, uint64_t mass) const {
    uint32_t* const halves = reinterpret_cast<uint32_t*>(&room_.shared.mass[i]);
    const uint32_t low = uint32_t(mass), sum = atomicAdd(&halves[0], low) + low;
    atomicAdd(&halves[1], uint32_t(mass >> 32) + (sum < low ? 1u : 0u));
    atomicAdd(&room_.shared.count[i], 1u);
  }
  // Adds up the bins of all blocks in the first block.
  __device__ __forceinline__ void gather_bins() const {
    sync();
    if (blocks_ == 1 || !is_leader()) return;
    block_.each(kBins, [this](int i) {
      for (int block = 1; block < blocks_; ++block) {
        const SampleShared* const other = arch::in_block(&room_.shared, unsigned(block));
        room_.shared.mass[i] += other->mass[i];
        room_.shared.count[i] += other->count[i];
      }
    });
  }

  template <class V>
  __device__ __forceinline__ void sums(const V& what, uint64_t (&result)[4]) {
    SampleShared& s = shared();
    if (is_first()) {
      for (int i = 0; i < 4; ++i) s.sums[i] = 0;
    }
    for (int i = 0; i < 4; ++i) sums_[i] = 0;
    sync();
    visit(0, what);
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint64_t mine = this->sum_of_warp_called(sums_[i]);
      if ((threadIdx.x & 31) == 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(&s.sums[i]), static_cast<unsigned long long>(mine));
    }
    sync();
    for (int i = 0; i < 4; ++i) result[i] = s.sums[i];
  }
  __device__ __forceinline__ void sum(int i, uint64_t value) { sums_[i] += value; }

  template <class V>
  __device__ KERNELS_CALLED uint64_t weigh(const V& all) {
    uint64_t mass = 0;
    each(first_of_entry(all.kept.least), [&mass, &all](uint32_t key, uint32_t id) { mass += mass_left(all, key, id); });
    return this->sum_of_row(mass);
  }
  template <class V>
  __device__ KERNELS_CALLED void find(const V& all, uint64_t target) const {
    const auto pack = [this](int, int, int col) { return adjusted_pack(col); };
    this->find_by(target, pack, [&all](float x, int id) { return mass_left(all, key_of(x), uint32_t(id)); });
  }

 private:
  using Ranges::kSegment, Ranges::source_, Ranges::row_, Ranges::vocabulary_, Ranges::rank_, Ranges::blocks_,
      Ranges::first_, Ranges::step_, Ranges::packs_, Ranges::fetch_at, Ranges::values_of, Ranges::leaders,
      Ranges::room_, Ranges::of_warp_;

  // Calls f(key, id) with adjusted logits. The block counts occurrences of listed tokens for some packs of every thread
  // at a time.
  template <class F>
  __device__ __forceinline__ void each(uint32_t from, const F& f) {
    const bool takes_part = greatest_ >= from;
    if (!takes_part && listed_ == 0) return;
    KERNELS_ROLLED
    for (int begin = 0; begin < of_warp_; begin += kCounted) {
      if (listed_ > 0) count_previous(begin);
      if (!takes_part || begin >= packs_) continue;
      decltype(fetch_at(0)) fetched = fetch_at(first_ + begin * step_);
      KERNELS_ROLLED
      for (int k = 0; k < kCounted; ++k) {
        const int col = first_ + (begin + k) * step_;
        const bool more = k + 1 < kCounted && begin + k + 1 < packs_;
        const Pack<float, N> x = values_of(fetched, col);
        if (more) fetched = fetch_at(col + step_);  // in flight meanwhile
        const int32_t* const counts = counts_ + (k * kSampleThreads + int(threadIdx.x)) * N;
        KERNELS_ROLLED
        for (int i = 0; i < N; ++i) {  // rolled, as f is long
          float logit = x.v[0];
          KERNELS_UNROLL
          for (int j = 1; j < N; ++j) logit = i == j ? x.v[j] : logit;
          if (adjusted_) logit = adjust_one(adjust_, logit, col + i, listed_ > 0 ? counts[i] : 0);
          f(key_of(logit), uint32_t(col + i));
        }
        if (!more) break;
      }
    }
  }
  __device__ KERNELS_CALLED Pack<float, N> adjusted_pack(int col) const {
    if (col >= vocabulary_) return this->nothing();
    Pack<float, N> x = values_of(fetch_at(col), col);
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i)
      x.v[i] = adjusted_ ? adjust_one(adjust_, x.v[i], col + i, times_listed(col + i)) : x.v[i];
    return x;
  }
  template <class V>
  static __device__ KERNELS_CALLED uint64_t mass_left(const V& what, uint32_t key, uint32_t id) {
    return what.mass_left(key, id);
  }
  static __device__ KERNELS_CALLED float adjust_one(const Adjust& adjust, float x, int id, int count) {
    return adjust(x, id, count);
  }

  // Counts occurrences of this block's tokens, for the packs from index `begin` on.
  __device__ __forceinline__ void count_previous(int begin) const {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile; i += kSampleThreads) counts_[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < listed_; i += kSampleThreads) {
      const int32_t token = previous_[i];
      if (token < 0 || token >= vocabulary_) continue;
      const int segment = token / kSegment, warp = segment / of_warp_, slot = segment - warp * of_warp_ - begin;
      if (warp / kSampleWarps != rank_ || slot < 0 || slot >= kCounted) continue;
      add_occurrence(&counts_[(slot * kSampleThreads + warp % kSampleWarps * 32) * N + token % kSegment], i < prompt_);
    }
    __syncthreads();
  }
  // The same for one token.
  __device__ __forceinline__ int times_listed(int token) const {
    int count = 0;
    KERNELS_ROLLED
    for (int i = 0; i < listed_; ++i) {
      if (previous_[i] == token) count = Occurrences::with(count, i < prompt_);
    }
    return count;
  }

  Adjust adjust_;
  bool adjusted_;
  SampleBlock block_;
  const int32_t* previous_ = nullptr;
  int listed_ = 0, prompt_ = 0;
  int32_t* counts_ = nullptr;
  uint32_t greatest_ = 0;
  uint64_t sums_[4];
};

}  // namespace detail
KERNELS_END
