// A row of logits on the GPU, by one block or the blocks of a cluster.
//
//   row:   | block 0: warp 0 | warp 1 | ... | block 1: warp 0 | ... |   a range of tokens for each warp
//
//   LargestOfRow   the largest tokens decide (greedy, top-k): one read; blocks send candidates to block 0 at once
//   DrawOfRow      all tokens count: what fits is kept in shared memory between the passes
//   SampleRow      all others (penalties, bias, typical ...): the row as core/sampling.h goes through it
#pragma once

#include "../arch/sm80.cuh"
#include "../core/row_call.h"
#include "../core/sampling.h"
#include "../exec.cuh"
#include "../functor.h"
#include "../tuning/sampling.h"

KERNELS_BEGIN
namespace detail {

constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;

// A block's shared memory. What the first block of a cluster has in `shared` is for all.
struct SampleRoom {
  SampleShared shared;
  uint64_t warp_sums[kSampleWarps], block_sum[2], rest;
  uint32_t warp_keys[2][kSampleWarps];
  uint32_t top, floor;
  int owner;
};
constexpr int kSampleRoom = (sizeof(SampleRoom) + 15) / 16 * 16;  // and what lies behind begins
__device__ __forceinline__ SampleRoom& room_of_block() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return *reinterpret_cast<SampleRoom*>(dynamic_shared);
}

// The largest and the smallest of the block's keys, in all threads.
__device__ __forceinline__ void extremes_of_block(SampleRoom& room, uint32_t key, uint32_t& high, uint32_t& low) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  high = __reduce_max_sync(0xffffffffu, key), low = __reduce_min_sync(0xffffffffu, key);
  if (lane == 0) room.warp_keys[0][warp] = high, room.warp_keys[1][warp] = low;
  __syncthreads();
  high = __reduce_max_sync(0xffffffffu, room.warp_keys[0][lane & (kSampleWarps - 1)]);
  low = __reduce_min_sync(0xffffffffu, room.warp_keys[1][lane & (kSampleWarps - 1)]);
}

// A key from low to high that at least `want` keys reach, as they do reach low, and few more; count(key) says how many do.
template <class Count>
__device__ __forceinline__ uint32_t floor_for(int want, uint32_t low, uint32_t high, const Count& count) {
  KERNELS_ROLLED
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const int reach = count(middle);
    if (reach >= want) low = middle;
    else high = middle - 1;
    if (reach >= want && reach <= want + want / 4 + 2) break;
  }
  return low;
}

__device__ __forceinline__ uint64_t sum_of_warp(uint64_t mine) {
  KERNELS_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, distance);
  return mine;
}

class SampleBlock {
 public:
  __device__ __forceinline__ explicit SampleBlock(SampleRoom& room) : room_(room) {}
  __device__ __forceinline__ SampleShared& shared() const { return room_.shared; }

  template <class F>
  __device__ __forceinline__ void each(int n, const F& f) const {
    KERNELS_ROLLED
    for (int i = threadIdx.x; i < n; i += kSampleThreads) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ __forceinline__ uint64_t sum(int n, const F& f) const {
    uint64_t mine = 0;
    KERNELS_ROLLED
    for (int i = threadIdx.x; i < n; i += kSampleThreads) mine += f(i);
    return scan_threads(room_, mine).all;
  }
  template <class F>
  __device__ __forceinline__ int count(int n, const F& f) const {
    return int(sum(n, [&f](int i) { return uint64_t(f(i) ? 1 : 0); }));
  }
  // Of at most kFew values.
  template <class Get, class Put>
  __device__ __forceinline__ uint64_t scan(int n, const Get& get, const Put& put) const {
    constexpr int most = kFew / kSampleThreads;
    const int each = (n + kSampleThreads - 1) / kSampleThreads, first = int(threadIdx.x) * each;
    uint64_t values[most], mine = 0;
    KERNELS_UNROLL
    for (int j = 0; j < most; ++j) {
      values[j] = j < each && first + j < n ? get(first + j) : 0;
      mine += values[j];
    }
    Scanned sums = scan_threads(room_, mine);
    KERNELS_UNROLL
    for (int j = 0; j < most; ++j) {
      if (j < each && first + j < n) put(first + j, sums.before);
      sums.before += values[j];
    }
    __syncthreads();
    return sums.all;
  }
  // Counts for each entry how many are larger, by as many threads as there are for it.
  template <class Put>
  __device__ __forceinline__ void ranks(int n, const uint64_t* entries, const Put& put) const {
    int log_share = 0;
    while (log_share < 5 && n << (log_share + 1) <= kSampleThreads) ++log_share;
    const int share = 1 << log_share;
    KERNELS_ROLLED
    for (int base = 0; base < n; base += kSampleThreads >> log_share) {
      const int i = base + (int(threadIdx.x) >> log_share);
      const uint64_t entry = i < n ? entries[i] : ~uint64_t(0);
      int larger = 0;
      _Pragma("unroll 4")
      for (int j = int(threadIdx.x) & (share - 1); j < n; j += share) larger += entries[j] > entry ? 1 : 0;
      KERNELS_ROLLED
      for (int distance = 1; distance < share; distance *= 2) larger += __shfl_xor_sync(0xffffffffu, larger, distance);
      if (i < n && (threadIdx.x & (share - 1)) == 0) put(i, larger);
    }
    __syncthreads();
  }

 private:
  // The sum of what the threads before this one have, and that of all. A function of its own, as many call it.
  struct Scanned {
    uint64_t before, all;
  };
  static __device__ __noinline__ Scanned scan_threads(SampleRoom& room, uint64_t mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const auto scan_lanes = [lane](uint64_t sum) {
      KERNELS_ROLLED
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
      }
      return sum;
    };
    const uint64_t sum = scan_lanes(mine);
    if (lane == 31) room.warp_sums[warp] = sum;
    __syncthreads();
    const uint64_t others = scan_lanes(lane < kSampleWarps ? room.warp_sums[lane] : 0);
    const uint64_t all = __shfl_sync(0xffffffffu, others, kSampleWarps - 1), earlier = __shfl_sync(0xffffffffu, others, warp > 0 ? warp - 1 : 0);
    __syncthreads();  // the sums may be written again
    return {(warp > 0 ? earlier : 0) + sum - mine, all};
  }

  SampleRoom& room_;
};

// The same by one warp, for what is short.
class SampleWarp {
 public:
  __device__ __forceinline__ explicit SampleWarp(SampleShared& shared) : shared_(shared) {}
  __device__ __forceinline__ SampleShared& shared() const { return shared_; }

  template <class F>
  __device__ __forceinline__ void each(int n, const F& f) const {
    KERNELS_ROLLED
    for (int i = lane(); i < n; i += 32) f(i);
    __syncwarp();
  }
  template <class F>
  __device__ __forceinline__ int count(int n, const F& f) const {
    int mine = 0;
    KERNELS_ROLLED
    for (int i = lane(); i < n; i += 32) mine += f(i) ? 1 : 0;
    return __reduce_add_sync(0xffffffffu, mine);
  }
  template <class Get, class Put>
  __device__ __forceinline__ uint64_t scan(int n, const Get& get, const Put& put) const {
    const int each = (n + 31) / 32, first = lane() * each, end = lesser(n, first + each);
    uint64_t before = 0;
    KERNELS_ROLLED
    for (int i = first; i < end; ++i) before += get(i);
    const uint64_t all = scan_lanes(before);
    KERNELS_ROLLED
    for (int i = first; i < end; ++i) {
      const uint64_t value = get(i);
      put(i, before);
      before += value;
    }
    __syncwarp();
    return all;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  // From each lane's value to the sum of those of the lanes before it, and that of all.
  static __device__ __forceinline__ uint64_t scan_lanes(uint64_t& value) {
    uint64_t sum = value;
    KERNELS_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane() >= distance) sum += other;
    }
    value = sum - value;
    return __shfl_sync(0xffffffffu, sum, 31);
  }

  SampleShared& shared_;
};

// The row's address is found out once, where the source has one.
template <class Source>
KERNELS_HD auto one_row(const Source& source, int64_t row) {
  if constexpr (has_at_row<Source>::value) return source.at_row(row);
  else return source;
}

// The packs of a row that are one thread's: `packs_` of them from column first_ on, step_ apart.
template <class Source, int N>
class SamplePacks {
 protected:
  // Packs that a thread has on their way, and the tokens of a warp's packs.
  static constexpr int kLooks = N > 4 ? 4 : 8, kLogSegment = N == 8 ? 8 : N == 4 ? 7 : N == 2 ? 6 : 5, kSegment = 1 << kLogSegment;
  static_assert(kSegment == 32 * N, "packs are of 1, 2, 4 or 8");

  __device__ __forceinline__ SamplePacks(const Source& source, int64_t row, int vocabulary, int rank, int blocks)
      : source_(one_row(source, row)), row_(has_at_row<Source>::value ? 0 : row), vocabulary_(vocabulary), rank_(rank), blocks_(blocks) {}

  // Those up to column `end`.
  __device__ __forceinline__ void take(int first, int log_step, int end) {
    first_ = first, step_ = 1 << log_step;
    packs_ = first < end ? (end - first + step_ - 1) >> log_step : 0;
  }
  __device__ __forceinline__ auto fetch_at(int col) const { return fetch<N>(source_, row_, col); }
  template <class Fetched>
  __device__ __forceinline__ Pack<float, N> values_of(const Fetched& fetched, int col) const { return convert<float>(resolve(source_, fetched, row_, col)); }

  // f(values, column, number) for those from number `from` on, kMany of them loaded at a time, and then(time) behind each time;
  // meanwhile() while the first ones are on their way.
  template <int kMany, class F, class Then, class Meanwhile>
  __device__ __forceinline__ void each_pack(int from, const F& f, const Then& then, const Meanwhile& meanwhile) const {
    constexpr bool ahead = kMany < 8;  // else there are no registers for the next ones while these are there
    // Packs that are not there are the row's first one: a choice of addresses keeps all loads together.
    const auto column = [this](int number) { return number < packs_ ? first_ + number * step_ : 0; };
    decltype(fetch_at(0)) fetched[kMany];
    KERNELS_UNROLL
    for (int k = 0; k < kMany; ++k) fetched[k] = fetch_at(column(from + k));
    meanwhile();
    int number = from;
    KERNELS_ROLLED
    for (; number + kMany < packs_; number += kMany) {
      KERNELS_UNROLL
      for (int k = 0; k < kMany; ++k) {
        const int col = first_ + (number + k) * step_;
        const Pack<float, N> x = values_of(fetched[k], col);
        if (ahead) fetched[k] = fetch_at(column(number + k + kMany));
        f(x, col, number + k);
      }
      KERNELS_UNROLL
      for (int k = 0; !ahead && k < kMany; ++k) fetched[k] = fetch_at(column(number + k + kMany));
      then(number / kMany);
    }
    KERNELS_UNROLL
    for (int k = 0; k < kMany; ++k) {
      const int col = first_ + (number + k) * step_;
      if (number + k < packs_) f(values_of(fetched[k], col), col, number + k);
    }
    if (number < packs_) then(number / kMany);
  }
  template <int kMany, class F>
  __device__ __forceinline__ void each_pack(int from, const F& f) const {
    each_pack<kMany>(from, f, [](int) {}, [] {});
  }

  decltype(one_row(std::declval<const Source&>(), kAny)) source_;
  int64_t row_;
  int vocabulary_, rank_, blocks_, first_, step_, packs_;
};

// A row's tokens, a range for each warp, blocks and warps in order. What weigh() and find() are made of.
template <class Source, int N>
class SampleRanges : protected SamplePacks<Source, N> {
 public:
  using Packs = SamplePacks<Source, N>;

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
  using Packs::kSegment, Packs::vocabulary_, Packs::rank_, Packs::blocks_, Packs::first_, Packs::step_, Packs::packs_, Packs::fetch_at, Packs::values_of;

  __device__ __forceinline__ SampleRanges(const Source& source, int64_t row, int vocabulary, int rank, int blocks)
      : Packs(source, row, vocabulary, rank, blocks), room_(room_of_block()) {
    const int segments = (vocabulary + kSegment - 1) / kSegment, warps = blocks * kSampleWarps;
    of_warp_ = (segments + warps - 1) / warps;
    const int begin = (rank * kSampleWarps + int(threadIdx.x) / 32) * of_warp_ * kSegment;
    this->take(begin + (int(threadIdx.x) & 31) * N, Packs::kLogSegment, lesser(vocabulary, begin + of_warp_ * kSegment));
  }

  template <class T>
  __device__ __forceinline__ T* leaders(T* own) const {
    return blocks_ > 1 ? arch::in_block(own, 0u) : own;
  }

  static __device__ __noinline__ uint64_t sum_of_warp_called(uint64_t mine) { return sum_of_warp(mine); }
  // The sum of what all threads have.
  __device__ __forceinline__ uint64_t sum_of_row(uint64_t mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    own_ = sum_of_warp(mine);
    if (lane == 0) room_.warp_sums[warp] = own_;
    __syncthreads();
    const uint64_t of_warp = lane < kSampleWarps ? room_.warp_sums[lane] : 0;
    uint64_t all = sum_of_warp(of_warp);
    before_ = sum_of_warp(lane < warp ? of_warp : 0);
    if (blocks_ == 1) {
      __syncthreads();  // the sums may be written again
      return all;
    }
    // Two in turn: other blocks may still read the one before.
    turn_ ^= 1;
    if (threadIdx.x == 0) room_.block_sum[turn_] = all;
    sync();
    const uint64_t of_block = lane < blocks_ ? *arch::in_block(&room_.block_sum[turn_], unsigned(lane)) : 0;
    all = sum_of_warp(of_block);
    before_ += sum_of_warp(lane < rank_ ? of_block : 0);
    return all;
  }
  // The first token at which the sum of mass(x, id) so far exceeds the target. The warps of the block that has it share the range of the
  // one that has it: first for the sums of its parts. pack(number, thread, column) is a pack of that thread's.
  template <class GetPack, class Mass>
  __device__ __forceinline__ void find_by(uint64_t target, const GetPack& pack, const Mass& mass) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const bool here = target >= before_ && target - before_ < own_;
    if (here && lane == 0) room_.owner = warp, room_.rest = target - before_;
    if (!__syncthreads_or(here)) return sync();
    constexpr int most_parts = 2 * kFew;
    uint64_t* const sums = room_.shared.mass;
    const int owner = room_.owner, of_part = (of_warp_ + most_parts - 1) / most_parts, parts = (of_warp_ + of_part - 1) / of_part;
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
    KERNELS_ROLLED
    for (int part = warp; part < parts; part += kSampleWarps) {
      uint64_t sum = 0;
      KERNELS_ROLLED
      for (int number = part * of_part; number < lesser(of_warp_, (part + 1) * of_part); ++number) sum += look_at(number);
      sum = sum_of_warp(sum);
      if (lane == 0) sums[part] = sum;
    }
    __syncthreads();
    if (warp == 0) {
      uint64_t rest = room_.rest;
      int number = 0;
      KERNELS_ROLLED
      for (int from = 0; from < parts; from += 32) {
        const uint64_t mine = from + lane < parts ? sums[from + lane] : 0, before = before_lane(mine), all = __shfl_sync(0xffffffffu, before + mine, 31);
        if (rest >= all) {
          rest -= all;
          continue;
        }
        const int holder = __ffs(int(__ballot_sync(0xffffffffu, rest < before + mine))) - 1;
        rest -= __shfl_sync(0xffffffffu, before, holder);
        number = (from + holder) * of_part;
        break;
      }
      KERNELS_ROLLED
      for (;; ++number) {
        const uint64_t mine = look_at(number), all = sum_of_warp(mine);
        if (rest < all) {
          uint64_t before = before_lane(mine);
          KERNELS_UNROLL
          for (int i = 0; i < N; ++i) {
            if (before <= rest && rest - before < each[i]) shared().edge = entry_of(key_of(x.v[i]), uint32_t(first + number * step_ + i));
            before += each[i];
          }
          break;
        }
        rest -= all;
      }
    }
    sync();
  }
  // The sum of what the lanes before this one have.
  static __device__ __noinline__ uint64_t before_lane(uint64_t mine) {
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
  int of_warp_, turn_ = 0;  // packs that a thread has at most
  uint64_t before_ = 0, own_ = 0;  // the sum of what lies before this warp's tokens, and that of these
};

template <class Source, int N>
class SampleRow : public SampleRanges<Source, N> {
  using Ranges = SampleRanges<Source, N>;

 public:
  using Ranges::shared, Ranges::is_first, Ranges::sync;
  // For how many of a thread's packs tokens of a list are counted at once.
  static constexpr int kCounted = N == 1 ? 8 : 8192 / (kSampleThreads * N), kTile = kCounted * kSampleThreads * N;

  __device__ __forceinline__ SampleRow(const Source& source, const SampleOptions& options, const SampleRules& rules, int64_t row, int vocabulary,
                                       int rank, int blocks)
      : Ranges(source, row, vocabulary, rank, blocks), adjust_(options, rules, row), adjusted_(options.adjusted()), block_(room_) {
    if (options.previous.p != nullptr) {
      previous_ = options.previous.at(row);
      listed_ = options.lengths[row];
      counts_ = reinterpret_cast<int32_t*>(&room_) + kSampleRoom / sizeof(int32_t);
    }
    if (is_first()) room_.shared.listed = 0;
  }

  __device__ __forceinline__ SampleBlock& block() { return block_; }
  __device__ __forceinline__ bool leads() const { return rank_ == 0; }

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
    // If each block has its share above a floor, all have.
    if (want > 1) low = floor_for((want + blocks_ - 1) / blocks_, low, top, [this](uint32_t key) { return __syncthreads_count(greatest_ >= key); });
    floor = low;
    if (blocks_ > 1) {
      if (threadIdx.x == 0) room_.top = top, room_.floor = floor;
      sync();
      const SampleRoom* const other = arch::in_block(&room_, unsigned(lesser(lane, blocks_ - 1)));
      top = __reduce_max_sync(0xffffffffu, other->top);
      floor = __reduce_min_sync(0xffffffffu, other->floor);
    }
    if (want == 0) floor = 0;  // all tokens count, also those behind the largest of their thread
    if (want == 1) floor = top;
    return top;
  }

  __device__ __forceinline__ void list(uint32_t from) {
    each(from, [this, from](uint32_t key, uint32_t id) {
      if (key >= from) append(entry_of(key, id), key);
    });
  }
  // Of one token, in a row that nothing changes.
  __device__ __forceinline__ uint32_t key_at(int64_t id) const { return key_of(convert<float>(resolve(source_, fetch<1>(source_, row_, id), row_, id)).v[0]); }

  // A function of its own, as it is long and many call it; so is what adjusts a logit.
  template <class V>
  __device__ __noinline__ void visit(uint32_t from, const V& all) {
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
  // A sum of 64 bits is one of 32 and one of what that carries: wider ones take shared memory several tries.
  __device__ __forceinline__ void bin(int i, uint64_t mass) const {
    uint32_t* const halves = reinterpret_cast<uint32_t*>(&room_.shared.mass[i]);
    const uint32_t low = uint32_t(mass), sum = atomicAdd(&halves[0], low) + low;
    atomicAdd(&halves[1], uint32_t(mass >> 32) + (sum < low ? 1u : 0u));
    atomicAdd(&room_.shared.count[i], 1u);
  }
  // Those of all blocks, in the first one.
  __device__ __forceinline__ void gather_bins() const {
    sync();
    if (blocks_ == 1 || !leads()) return;
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
      if ((threadIdx.x & 31) == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&s.sums[i]), static_cast<unsigned long long>(mine));
    }
    sync();
    for (int i = 0; i < 4; ++i) result[i] = s.sums[i];
  }
  __device__ __forceinline__ void sum(int i, uint64_t value) { sums_[i] += value; }

  template <class V>
  __device__ __noinline__ uint64_t weigh(const V& all) {
    uint64_t mass = 0;
    each(first_of_entry(all.kept.least), [&mass, &all](uint32_t key, uint32_t id) { mass += mass_left(all, key, id); });
    return this->sum_of_row(mass);
  }
  template <class V>
  __device__ __noinline__ void find(const V& all, uint64_t target) const {
    const auto pack = [this](int, int, int col) { return adjusted_pack(col); };
    this->find_by(target, pack, [&all](float x, int id) { return mass_left(all, key_of(x), uint32_t(id)); });
  }

 private:
  using Ranges::kSegment, Ranges::source_, Ranges::row_, Ranges::vocabulary_, Ranges::rank_, Ranges::blocks_, Ranges::first_, Ranges::step_, Ranges::packs_,
      Ranges::fetch_at, Ranges::values_of, Ranges::leaders, Ranges::room_, Ranges::of_warp_;

  // f(key, id), of logits as the filters see them. The block counts how often tokens occur in the list for some packs of every thread at
  // a time.
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
        if (more) fetched = fetch_at(col + step_);  // on its way meanwhile
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
  __device__ __noinline__ Pack<float, N> adjusted_pack(int col) const {
    if (col >= vocabulary_) return this->nothing();
    Pack<float, N> x = values_of(fetch_at(col), col);
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) x.v[i] = adjusted_ ? adjust_one(adjust_, x.v[i], col + i, times_listed(col + i)) : x.v[i];
    return x;
  }
  template <class V>
  static __device__ __noinline__ uint64_t mass_left(const V& what, uint32_t key, uint32_t id) { return what.mass_left(key, id); }
  static __device__ __noinline__ float adjust_one(const Adjust& adjust, float x, int id, int count) { return adjust(x, id, count); }

  // Of this block's tokens, those of the packs from number `begin` on.
  __device__ __forceinline__ void count_previous(int begin) const {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile; i += kSampleThreads) counts_[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < listed_; i += kSampleThreads) {
      const int32_t token = previous_[i];
      if (token < 0 || token >= vocabulary_) continue;
      const int segment = token / kSegment, warp = segment / of_warp_, slot = segment - warp * of_warp_ - begin;
      if (warp / kSampleWarps != rank_ || slot < 0 || slot >= kCounted) continue;
      atomicAdd(&counts_[(slot * kSampleThreads + warp % kSampleWarps * 32) * N + token % kSegment], 1);
    }
    __syncthreads();
  }
  // The same of one token.
  __device__ __forceinline__ int times_listed(int token) const {
    int count = 0;
    KERNELS_ROLLED
    for (int i = 0; i < listed_; ++i) count += previous_[i] == token ? 1 : 0;
    return count;
  }

  Adjust adjust_;
  bool adjusted_;
  SampleBlock block_;
  const int32_t* previous_ = nullptr;
  int listed_ = 0;
  int32_t* counts_ = nullptr;
  uint32_t greatest_ = 0;
  uint64_t sums_[4];
};

// A row of which all tokens count, in a call that leaves logits as they are, and without typical(). What of it there is room for is kept
// in shared memory, so that it is read from there from the second time on.
template <class P, int N>
class DrawOfRow : public SampleRanges<typename P::Source, N> {
  using Ranges = SampleRanges<typename P::Source, N>;

 public:
  __device__ __forceinline__ DrawOfRow(const P& p, int64_t row, int rank, int blocks)
      : Ranges(p.source, row, int(p.vocabulary), rank, blocks),
        kept_(lesser(of_warp_, (int(arch::dynamic_shared_bytes()) - kSampleRoom) / int(kSampleThreads * N * sizeof(float)))) {}

  __device__ __forceinline__ void draw(const P& p, int64_t row) {
    float most = -infinity<float>();
    KERNELS_ROLLED
    for (int number = packs_; number < kept_; ++number) keep(number, this->nothing());
    this->template each_pack<4>(0, [this, &most](const Pack<float, N>& x, int, int number) {
      if (number < kept_) keep(number, x);
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) most = arch::max_or_nan(most, x.v[i]);
    });
    uint32_t top, nothing;
    extremes_of_block(room_, key_of(most), top, nothing);
    if (blocks_ > 1) {
      if (threadIdx.x == 0) room_.top = top;
      this->sync();
      top = __reduce_max_sync(0xffffffffu, arch::in_block(&room_, unsigned(lesser(int(threadIdx.x) & 31, blocks_ - 1)))->top);
    }
    const SampleRules rules(p.options, row);
    const Sampled status = !rules.right(p.vocabulary) ? Sampled::parameter : top == kNanKey ? Sampled::nan : top <= kLowestKey ? Sampled::none : Sampled::ok;
    if (status == Sampled::ok) {
      Visit<NoDraft> visit(Levels(top, rules.temperature), NoDraft{});
      draw_by_id(*this, visit, rules, rules.top_p, RowDraw(p.options, row, 0));
    }
    if (this->is_first()) write_sampled(p.options, p.tokens, row, status, status == Sampled::ok ? int64_t(id_of(room_.shared.edge)) : kNoToken);
  }

  template <class V>
  __device__ __forceinline__ uint64_t weigh(const V& what) {
    const auto mass = mass_of(what);
    uint64_t all = 0;
    const auto add = [&all, &mass](const Pack<float, N>& x, int col, int) {
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) all += mass(x.v[i], col + i);
    };
    KERNELS_ROLLED
    for (int number = 0; number < kept_; ++number) add(kept(number, int(threadIdx.x)), first_ + number * step_, number);
    if (kept_ < of_warp_) this->template each_pack<2>(kept_, add);
    return this->sum_of_row(all);
  }
  template <class V>
  __device__ __forceinline__ void find(const V& what, uint64_t target) const {
    const auto pack = [this](int number, int thread, int col) {
      return number < kept_ ? kept(number, thread) : col < vocabulary_ ? values_of(fetch_at(col), col) : this->nothing();
    };
    this->find_by(target, pack, mass_of(what));
  }

 private:
  using Ranges::vocabulary_, Ranges::blocks_, Ranges::first_, Ranges::step_, Ranges::packs_, Ranges::fetch_at, Ranges::values_of, Ranges::room_, Ranges::of_warp_;

  // What Visit::mass_left() says of such rows, in few instructions.
  template <class V>
  static __device__ __forceinline__ auto mass_of(const V& what) {
    const Levels levels = what.levels;
    const float least = logit_of(first_of_entry(what.kept.least));
    const uint32_t last = id_of(what.kept.least);
    const uint32_t last_level = what.kept.least_weight > 0 ? last_level_of(what.kept.least_weight) : kNoLevel;
    return [=](float x, int id) {
      const uint32_t level = levels.of(x);
      const bool left = ((x > least) | ((x == least) & (uint32_t(id) <= last))) & (level <= last_level);
      return weight_of(left ? level : kNoLevel);
    };
  }

  // In parts of 16 bytes, those of a warp side by side. What is kept of a row that ends early is -infinity behind its end.
  static constexpr int kWidth = N < 4 ? N : 4, kParts = N / kWidth;
  struct alignas(kWidth * sizeof(float)) Part {
    float v[kWidth];
  };
  static __device__ __forceinline__ Part& part(int number, int i, int thread) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    return reinterpret_cast<Part*>(dynamic_shared + kSampleRoom)[(number * kParts + i) * kSampleThreads + thread];
  }
  static __device__ __forceinline__ Pack<float, N> kept(int number, int thread) {
    Pack<float, N> x;
    KERNELS_UNROLL
    for (int i = 0; i < kParts; ++i) {
      const Part some = part(number, i, thread);
      KERNELS_UNROLL
      for (int j = 0; j < kWidth; ++j) x.v[i * kWidth + j] = some.v[j];
    }
    return x;
  }
  static __device__ __forceinline__ void keep(int number, const Pack<float, N>& x) {
    KERNELS_UNROLL
    for (int i = 0; i < kParts; ++i) {
      Part some;
      KERNELS_UNROLL
      for (int j = 0; j < kWidth; ++j) some.v[j] = x.v[i * kWidth + j];
      part(number, i, int(threadIdx.x)) = some;
    }
  }

  int kept_;
};

// What the blocks of a cluster tell the first one of a row's largest tokens.
struct LargestRoom {
  static constexpr int kParts = 8, kItems = kFew, kMostBlocks = 16;
  uint64_t arrived;            // a barrier
  uint64_t said[kMostBlocks];  // by each block: the key from which on it has sent all tokens, and how many
  uint64_t sent[kFew];         // by block b as number i: at i * blocks + b
  float greatest[kParts][kSampleThreads];
  uint32_t item[kItems];       // thread + kSampleThreads * part
  uint32_t items;
  SampleRules rules;           // of the row, and what the first block's first thread makes of it
  uint64_t random;
  bool right;
};

// A row of which the k largest tokens decide, k at most kMostListed, in a call that leaves logits as they are. A block's only row.
template <class P, int N>
class LargestOfRow : SamplePacks<typename P::Source, N> {
  using Packs = SamplePacks<typename P::Source, N>;

 public:
  __device__ __forceinline__ LargestOfRow(const P& p, int64_t row, SampleRoom& room, LargestRoom& largest, int rank, int blocks)
      : Packs(p.source, row, int(p.vocabulary), rank, blocks), p_(p), number_(row), room_(room), largest_(largest) {
    static_assert(kSampleWarps == 16, "their logarithm is 4");
    this->take(first_of(int(threadIdx.x)), Packs::kLogSegment + 4 + log_blocks(), vocabulary_);
  }

  // The largest token.
  __device__ __forceinline__ void greedy() const {
    float most = -infinity<float>();
    int at = 0;
    const auto look = [&most, &at](const Pack<float, N>& x, int col, int) {
      float larger = most;
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) larger = arch::max_or_nan(larger, x.v[i]);
      at = larger != most ? col : at;
      most = larger;
    };
    this->template each_pack<kLooks>(0, look, [](int) {}, [this] { prepare([] {}); });
    const uint32_t greatest = key_of(most);
    uint32_t top, nothing;
    extremes_of_block(room_, greatest, top, nothing);
    // Which of its pack it is, is found out once for the block, from the pack.
    if (greatest == top) {
      const Pack<float, N> x = values_of(fetch_at(at), at);
      int i = N - 1;
      KERNELS_UNROLL
      for (int j = N - 2; j >= 0; --j) i = key_of(x.v[j]) == top ? j : i;
      atomicMax(&room_.top, ~uint32_t(at + i));
    }
    __syncthreads();
    if (blocks_ > 1) arch::cluster_wait();
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    uint64_t entry = uint64_t(top) << 32 | room_.top;
    if (blocks_ > 1) {
      if (lane == 0) send(largest_.said[rank_], entry), announce(1);
      if (rank_ > 0) return;
    }
    if (blocks_ > 1) {
      arch::mbarrier_wait(&largest_.arrived, 0);
      entry = first_of_warp(largest_.said[lesser(lane, blocks_ - 1)]);
    }
    conclude(first_of_entry(entry), entry);
  }

  // A draw from the k largest. False, in the first block: they were not found, as too many are equal, or lie in one block.
  __device__ __forceinline__ bool draw(int k) const {
    int log_part = log_looks;  // of how many packs a part is
    while (LargestRoom::kParts * step_ << log_part < vocabulary_) ++log_part;
    const uint32_t greatest = greatest_of_parts(log_part), from = floor_of_block(k, greatest);
    list_parts(greatest, from, log_part);
    __syncthreads();
    const int parts = int(largest_.items);
    list_tokens(parts, from, log_part);
    __syncthreads();
    const Listed own = listed_here(parts, from);
    if (blocks_ > 1) {
      tell(own);
      if (rank_ > 0) return true;
    }
    return draw_from(k, own);
  }

 private:
  static constexpr uint32_t kTooMany = 0x7fffffffu;
  using Packs::kLooks;
  static constexpr int log_looks = kLooks == 8 ? 3 : 2;
  using Packs::kSegment, Packs::vocabulary_, Packs::rank_, Packs::blocks_, Packs::first_, Packs::step_, Packs::fetch_at, Packs::values_of;

  // What a block lists: all its tokens from a key on, and how many these are.
  struct Listed {
    uint64_t said;
    int count;
  };

  // The key of the thread's largest logit, of all its packs; those of its parts go to shared memory.
  __device__ __forceinline__ uint32_t greatest_of_parts(int log_part) const {
    float most = -infinity<float>(), of_part = most, of_some = most;
    this->template each_pack<kLooks>(
        0,
        [&of_some](const Pack<float, N>& x, int, int) {
          KERNELS_UNROLL
          for (int i = 0; i < N; ++i) of_some = arch::max_or_nan(of_some, x.v[i]);
        },
        [&](int time) {
          const int part = time << log_looks >> log_part;
          of_part = part << log_part == time << log_looks ? of_some : arch::max_or_nan(of_part, of_some);
          most = arch::max_or_nan(most, of_some);
          largest_.greatest[part][int(threadIdx.x)] = of_part;
          of_some = -infinity<float>();
        },
        [this] { prepare([this] { largest_.random = RowDraw(p_.options, number_, 0).token; }); });
    return key_of(most);
  }
  // A key that enough tokens of this block reach for the k largest to be among them, unless very many of these are in this one.
  __device__ __forceinline__ uint32_t floor_of_block(int k, uint32_t greatest) const {
    const int share = (k + blocks_ - 1) >> log_blocks(), want = blocks_ == 1 ? k : lesser(k, share + share / 2 + 12);
    uint32_t high, low;
    extremes_of_block(room_, greatest, high, low);
    low = floor_for(want, low, high, [greatest](uint32_t key) { return __syncthreads_count(greatest >= key); });
    return greater(low, kLowestKey + 1);
  }
  // The parts that have a token to list.
  __device__ __forceinline__ void list_parts(uint32_t greatest, uint32_t from, int log_part) const {
    if (greatest < from) return;
    const int thread = int(threadIdx.x);
    KERNELS_ROLLED
    for (int part = 0; part < LargestRoom::kParts && first_ + (part * step_ << log_part) < vocabulary_; ++part) {
      if (key_of(largest_.greatest[part][thread]) < from) continue;
      const uint32_t at = atomicAdd(&largest_.items, 1u);
      if (at < uint32_t(LargestRoom::kItems)) largest_.item[at] = uint32_t(part * kSampleThreads + thread);
    }
  }
  // These parts are read again, their packs shared among all threads.
  __device__ __forceinline__ void list_tokens(int parts, uint32_t from, int log_part) const {
    const int packs = lesser(parts, LargestRoom::kItems) << log_part;
    constexpr int kUnroll = N < 8 ? 8 / N : 1;
    KERNELS_ROLLED
    for (int first = int(threadIdx.x); first < packs; first += kUnroll * kSampleThreads) {
      decltype(fetch_at(0)) fetched[kUnroll];
      int cols[kUnroll];
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        const int number = first + i * kSampleThreads;
        const int item = int(largest_.item[(number < packs ? number : first) >> log_part]), begin = first_of(item % kSampleThreads);
        const int col = begin + ((item / kSampleThreads << log_part) + (number & ((1 << log_part) - 1))) * step_;
        cols[i] = number < packs ? col : vocabulary_;
        fetched[i] = fetch_at(cols[i] < vocabulary_ ? col : begin);
      }
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        if (cols[i] >= vocabulary_) continue;
        const Pack<float, N> x = values_of(fetched[i], cols[i]);
        KERNELS_UNROLL
        for (int j = 0; j < N; ++j) {
          if (key_of(x.v[j]) >= from) list(entry_of(key_of(x.v[j]), uint32_t(cols[i] + j)));
        }
      }
    }
  }
  __device__ __forceinline__ Listed listed_here(int parts, uint32_t from) const {
    const int count = int(room_.shared.listed);
    return {uint64_t(from) << 32 | (parts <= LargestRoom::kItems && count <= kFew >> log_blocks() ? uint32_t(count) : kTooMany), count};
  }
  // The first block what this one has listed.
  __device__ __forceinline__ void tell(const Listed& own) const {
    arch::cluster_wait();
    const int thread = int(threadIdx.x), sent = lesser(own.count, kFew >> log_blocks());
    if (thread < sent) send(largest_.sent[thread * blocks_ + rank_], room_.shared.entries[thread]);
    if (thread == 0) send(largest_.said[rank_], own.said), announce(1 + sent);
  }
  // By the first block, of what all have listed.
  __device__ __forceinline__ bool draw_from(int k, const Listed& own) const {
    SampleShared& s = room_.shared;
    const int thread = int(threadIdx.x), lane = thread & 31, listed = own.count;
    uint64_t all_said = own.said;
    if (blocks_ > 1) {
      arch::mbarrier_wait(&largest_.arrived, 0);
      all_said = largest_.said[lesser(lane, blocks_ - 1)];
    }
    const uint32_t known = __reduce_max_sync(0xffffffffu, uint32_t(all_said >> 32)), most_of_one = __reduce_max_sync(0xffffffffu, uint32_t(all_said));
    if (most_of_one == kTooMany) return false;
    // Every thread takes one or two of them.
    const bool two = most_of_one * uint32_t(blocks_) > uint32_t(kSampleThreads);
    const auto entry = [&](int at) {
      if (blocks_ == 1) return at < listed ? s.entries[at] : 0;
      return uint32_t(at >> log_blocks()) < uint32_t(largest_.said[at & (blocks_ - 1)]) ? largest_.sent[at] : 0;
    };
    const uint64_t a = entry(thread), b = two ? entry(thread + kSampleThreads) : 0;
    const uint32_t first = first_of_entry(a), second = first_of_entry(b);
    uint32_t top, nothing;
    extremes_of_block(room_, greater(first, second), top, nothing);
    if (top != kNanKey && top > kLowestKey) {
      // Only above the highest of the blocks' keys are all tokens known.
      const auto reach = [first, second, two](uint32_t key) {
        const int one = __syncthreads_count(first >= key);
        return two ? one + __syncthreads_count(second >= key) : one;
      };
      if (blocks_ > 1 || listed > k + k / 2 + 16) {
        const int reached = reach(known);
        if (reached < k && known > kLowestKey + 1) return false;
        const uint32_t floor = reached > k + k / 2 + 16 ? floor_for(k, known, top, reach) : known;
        if (thread == 0) s.listed = 0;
        __syncthreads();
        if (first >= floor) list(a);
        if (second >= floor) list(b);
        __syncthreads();
      }
      SampleBlock block(room_);
      const SampleRules& rules = largest_.rules;
      rank_listed(block, Levels(top, rules.temperature));
      if (thread < 32) {
        SampleWarp warp(s);
        draw_ranked(warp, keep_first(warp, k, rules), largest_.random);
      }
    }
    if (thread < 32) conclude(top, s.edge);
    return true;
  }

  // What does not depend on the logits, in the time in which the first of them are on their way.
  template <class More>
  __device__ __forceinline__ void prepare(const More& more) const {
    if (threadIdx.x == 0) largest_.items = room_.shared.listed = room_.top = 0;
    if (blocks_ > 1) {
      if (threadIdx.x == 0) {
        arch::mbarrier_init(&largest_.arrived, blocks_);
        arch::mbarrier_init_fence();
      }
      arch::cluster_arrive_relaxed();  // waited for before anything is sent
    }
    if (rank_ > 0 || threadIdx.x > 0) return;
    largest_.rules = SampleRules(p_.options, number_);
    largest_.right = largest_.rules.right(p_.vocabulary);
    more();
  }

  // A cluster has 1, 2, 4, 8 or 16 blocks.
  __device__ __forceinline__ int log_blocks() const { return 31 - __clz(blocks_); }
  // Warps take segments of 32 packs in turn, blocks in turn as well, so that each has some of the tokens that are frequent.
  __device__ __forceinline__ int first_of(int thread) const { return (thread / 32 * blocks_ + rank_) * kSegment + (thread & 31) * N; }

  // The first in order of a warp's entries.
  static __device__ __forceinline__ uint64_t first_of_warp(uint64_t entry) {
    const uint32_t key = __reduce_max_sync(0xffffffffu, first_of_entry(entry));
    return uint64_t(key) << 32 | __reduce_max_sync(0xffffffffu, first_of_entry(entry) == key ? uint32_t(entry) : 0u);
  }
  __device__ __forceinline__ void list(uint64_t entry) const {
    const uint32_t at = atomicAdd(&room_.shared.listed, 1u);
    if (at < uint32_t(kFew)) room_.shared.entries[at] = entry;
  }
  // To the first block, which waits for as many numbers as are announced.
  __device__ __forceinline__ void send(const uint64_t& to, uint64_t value) const {
    arch::store_async(arch::remote_address(&to, 0), value, arch::remote_address(&largest_.arrived, 0));
  }
  __device__ __forceinline__ void announce(int numbers) const {
    arch::mbarrier_arrive_expect_there(arch::remote_address(&largest_.arrived, 0), numbers * int(sizeof(uint64_t)));
  }
  __device__ __forceinline__ void conclude(uint32_t top, uint64_t entry) const {
    if (threadIdx.x > 0) return;
    const Sampled status = !largest_.right ? Sampled::parameter : top == kNanKey ? Sampled::nan : top <= kLowestKey ? Sampled::none : Sampled::ok;
    write_sampled(p_.options, p_.tokens, number_, status, status == Sampled::ok ? int64_t(id_of(entry)) : kNoToken);
  }

  const P& p_;
  int64_t number_;
  SampleRoom& room_;
  LargestRoom& largest_;
};

// Of how many of a row's largest tokens one is drawn: 0 where others count as well, -1 where parameters that lie on the device say it.
inline int drawn_from(const SampleOptions& o, int64_t vocabulary) {
  if (o.adjusted()) return 0;
  if (o.temperature.on_device() || o.top_k.on_device() || o.typical.on_device()) return -1;
  const int k = o.temperature.value() == 0.f ? 1 : o.top_k.value();
  return k <= kMostListed && k < vocabulary && o.typical.value() >= 1.f ? k : 0;
}
// Whether they are rows for DrawOfRow, likewise.
inline bool decided_by_all(const SampleOptions& o, int64_t vocabulary) {
  if (o.adjusted() || o.temperature.on_device() || o.top_k.on_device() || o.typical.on_device()) return false;
  return o.temperature.value() != 0.f && (o.top_k.value() == 0 || o.top_k.value() == vocabulary) && o.typical.value() >= 1.f;
}

template <class P, int N>
struct SampleBody {
  static constexpr int max_threads = kSampleThreads, registers = 64;
  using Row = SampleRow<typename P::Source, N>;
  // What is wanted first comes first, and together.
  struct Params {
    int few;  // drawn_from()
    P p;
  };

  // Behind the room lies a LargestRoom, or the counts of tokens that occur in a list, or logits that are kept.
  static constexpr size_t kCounts = size_t(Row::kTile) * sizeof(int32_t);
  static __device__ __forceinline__ void run(const Params& params) {
    const P& p = params.p;
    int rank = int(arch::cluster_rank()), blocks = int(arch::cluster_size());
    const int clusters = int(arch::clusters());
    int64_t row = arch::cluster_index();
    if constexpr (P::kOnlyDraws) {
      int few = params.few;
      if (few < 0) {
        const int32_t k = p.options.temperature.at(row) == 0.f ? 1 : p.options.top_k.at(row);
        few = k <= kMostListed && k < p.vocabulary && p.options.typical.at(row) >= 1.f ? k : 0;
      }
      if (few > 0 && p.rows <= clusters) {
        SampleRoom& room = room_of_block();
        const LargestOfRow<P, N> largest(p, row, room, *reinterpret_cast<LargestRoom*>(reinterpret_cast<unsigned char*>(&room) + kSampleRoom), rank, blocks);
        if (few == 1) return largest.greedy();
        if (largest.draw(few)) return;
        rank = 0, blocks = 1;  // the first block, now alone, does the whole row
        __syncthreads();       // all have read what was listed, the room for which is now used again
      }
    }
    for (; row < p.rows; row += clusters) {
      if (P::kOnlyDraws && draws_from_all(p, row)) drawn(p, row, rank, blocks);
      else wholly(p, row, rank, blocks);
    }
  }

 private:
  static __device__ __forceinline__ bool draws_from_all(const P& p, int64_t row) {
    const int32_t top_k = p.options.top_k.at(row);
    return !p.options.adjusted() && (top_k == 0 || top_k == p.vocabulary) && p.options.temperature.at(row) != 0.f && p.options.typical.at(row) >= 1.f;
  }
  static __device__ __forceinline__ void drawn(const P& p, int64_t row, int rank, int blocks) {
    if constexpr (P::kOnlyDraws) {
      DrawOfRow<P, N> one(p, row, rank, blocks);
      one.draw(p, row);
      one.sync();  // all have seen what they share
    }
  }
  // A function of its own, so that what it needs is no burden for rows that are done without.
  static __device__ __noinline__ void wholly(const P& p, int64_t row, int rank, int blocks) {
    const SampleRules rules = p.rules(row);
    Row one(p.source, p.options, rules, row, int(p.vocabulary), rank, blocks);
    p.solve(one, rules, row);
    one.sync();  // all have seen what they share
  }
};

template <class P, int N>
Status start_sample(const Exec& ex, const P& problem) {
  using Body = SampleBody<P, N>;
  Launch how;
  how.threads = kSampleThreads;
  int image = 0;
  KERNELS_TRY(image_architecture<Body>(ex, image));
  const bool newer = ex.device().capability >= 90 && image >= 90, of_all = P::kOnlyDraws && decided_by_all(problem.options, problem.vocabulary);
  const size_t kept = of_all ? tuning::kSampleKeptBytes / (newer ? 1 : 2) : 0;
  how.shared = kSampleRoom + (problem.options.previous.p != nullptr ? Body::kCounts : P::kOnlyDraws ? greater(sizeof(LargestRoom), kept) : 0);
  if (newer) {
    // As many blocks for a row as leave room for all rows at the same time. 16 are an option of the hardware.
    const int64_t room = tuning::kSampleBlocksPerMultiprocessor * ex.device().sm_count;
    for (int cluster = 16; cluster > 1; cluster /= 2) {
      if (problem.rows > room / cluster || problem.vocabulary < cluster * tuning::kSampleTokensPerBlock) continue;
      Launch larger = how;
      larger.cluster = cluster;
      larger.grid.x = unsigned(cluster);
      int64_t clusters = 0;
      if (!resident_clusters<Body>(ex, larger, clusters).ok() || clusters < problem.rows) continue;
      how.cluster = cluster;
      break;
    }
  }
  how.grid.x = unsigned(lesser<int64_t>(problem.rows, int64_t(1) << 26) * how.cluster);
  return launch<Body>(ex, how, {P::kOnlyDraws ? drawn_from(problem.options, problem.vocabulary) : 0, problem});
}

// `problem` is made from a source by make(source).
template <class Load, class Make>
Status run_samples(const Exec& ex, const Load& logits, int64_t vocabulary, const Make& make) {
  const auto problem = make(cached(logits));
  using Problem = std::decay_t<decltype(problem)>;
  using Source = typename Problem::Source;
  constexpr int wide = widest_of<Source>() < 8 ? widest_of<Source>() : 8;
  if (max_pack_of(problem.source, vocabulary) >= wide && vocabulary % wide == 0) return start_sample<Problem, wide>(ex, problem);
  return start_sample<Problem, 1>(ex, problem);
}

// One thread for each sequence.
template <class P>
struct VerifiedBody {
  static constexpr int max_threads = 128, registers = 64;
  using Params = P;
  static __device__ __forceinline__ void run(const Params& p) {
    const int64_t sequences = p.rows / (p.drafts + 1), all = int64_t(gridDim.x) * max_threads;
    for (int64_t i = int64_t(blockIdx.x) * max_threads + threadIdx.x; i < sequences; i += all) p.finish(i);
  }
};

template <class P>
Status finish_sequences(const Exec& ex, const P& problem) {
  using Body = VerifiedBody<P>;
  Launch how;
  how.threads = Body::max_threads;
  how.grid.x = unsigned(lesser<int64_t>((problem.rows / (problem.drafts + 1) + Body::max_threads - 1) / Body::max_threads, int64_t(1) << 30));
  return launch<Body>(ex, how, problem);
}

}  // namespace detail
KERNELS_END
