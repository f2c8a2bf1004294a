// The threads that share a row of logits: block-wide operations, and a thread's packs of the row.
#pragma once

#include "../../arch/sm80.cuh"
#include "../../core/row_call.h"
#include "../../core/sampling_search.h"
#include "../../exec.cuh"
#include "../../functor.h"
#include "listed.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;

// A block's shared memory. `shared` of a cluster's first block is used by all its blocks.
struct SampleRoom {
  SampleShared shared;
  uint64_t warp_sums[kSampleWarps], block_sum[2], rest;
  uint32_t warp_keys[2][kSampleWarps];
  uint32_t top, floor;
  int owner;
};
constexpr int kSampleRoom = (sizeof(SampleRoom) + 15) / 16 * 16;  // what follows begins here
__device__ __forceinline__ SampleRoom& room_of_block() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return *reinterpret_cast<SampleRoom*>(dynamic_shared);
}

// Follows the SampleRoom, if there are listed tokens; below, where what follows begins.
__device__ __forceinline__ ListedTokens& listed_of_block() {
  static_assert(ListedTokens::kMost + kSampleThreads < ListedTokens::kSlots, "as take() says");
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return *reinterpret_cast<ListedTokens*>(dynamic_shared + kSampleRoom);
}
template <bool kListed>
constexpr int kBehindListed = kSampleRoom + (kListed ? (int(sizeof(ListedTokens)) + 15) / 16 * 16 : 0);

// The largest and the smallest of the block's keys, in all threads.
__device__ __forceinline__ void extremes_of_block(SampleRoom& room, uint32_t key, uint32_t& high, uint32_t& low) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  high = __reduce_max_sync(0xffffffffu, key), low = __reduce_min_sync(0xffffffffu, key);
  if (lane == 0) room.warp_keys[0][warp] = high, room.warp_keys[1][warp] = low;
  __syncthreads();
  high = __reduce_max_sync(0xffffffffu, room.warp_keys[0][lane & (kSampleWarps - 1)]);
  low = __reduce_min_sync(0xffffffffu, room.warp_keys[1][lane & (kSampleWarps - 1)]);
}

// A key in [low, high] that at least `want` keys reach, and few more; at least `want` keys reach low. count(key)
// returns how many keys reach a key.
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
  // For at most kFew values.
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
  // Computes each entry's rank by counting larger entries, with as many threads for each as there are.
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
  // The sum of lower-numbered threads' values, and that of all. Called, not inlined, as there are many uses.
  struct Scanned {
    uint64_t before, all;
  };
  static __device__ KERNELS_CALLED Scanned scan_threads(SampleRoom& room, uint64_t mine) {
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
    const uint64_t all = __shfl_sync(0xffffffffu, others, kSampleWarps - 1),
                   earlier = __shfl_sync(0xffffffffu, others, warp > 0 ? warp - 1 : 0);
    __syncthreads();  // the sums may be overwritten from here on
    return {(warp > 0 ? earlier : 0) + sum - mine, all};
  }

  SampleRoom& room_;
};

// The same operations by one warp, for short lists.
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
  // Replaces each lane's value by the sum of lower lanes' values; returns the total.
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

// The source for one row; computes the row's address once, if it has one.
template <class Source>
KERNELS_HD auto one_row(const Source& source, int64_t row) {
  if constexpr (has_at_row<Source>::value) return source.at_row(row);
  else return source;
}

// A thread's packs of a row: `packs_` packs from column first_ on, step_ apart. kListed: logits of the tokens in
// listed_of_block() are adjusted when they are read.
template <class Source, int N, bool kListed = false>
class SamplePacks {
 protected:
  // Packs that a thread has in flight, and the tokens of a warp's packs.
  static constexpr int kLooks = N > 4 || kListed ? 4 : 8,
                       kLogSegment = N == 8   ? 8
                                     : N == 4 ? 7
                                     : N == 2 ? 6
                                              : 5,
                       kSegment = 1 << kLogSegment;
  static_assert(kSegment == 32 * N, "packs are of 1, 2, 4 or 8");

  __device__ __forceinline__ SamplePacks(const Source& source, int64_t row, int vocabulary, int rank, int blocks)
      : source_(one_row(source, row)),
        row_(has_at_row<Source>::value ? 0 : row),
        vocabulary_(vocabulary),
        rank_(rank),
        blocks_(blocks) {}

  // The packs up to column `end`.
  __device__ __forceinline__ void take(int first, int log_step, int end) {
    first_ = first, step_ = 1 << log_step;
    packs_ = first < end ? (end - first + step_ - 1) >> log_step : 0;
  }
  __device__ __forceinline__ auto fetch_at(int col) const { return fetch<N>(source_, row_, col); }
  template <class Fetched>
  __device__ __forceinline__ Pack<float, N> values_of(const Fetched& fetched, int col) const {
    Pack<float, N> x = convert<float>(resolve(source_, fetched, row_, col));
    if constexpr (kListed) listed_of_block().change(x, col);
    return x;
  }

  // Calls f(values, column, index) for the packs from index `from` on, kMany loaded at a time, then(time) after each
  // time, and meanwhile() while the first ones are in flight.
  template <int kMany, class F, class Then, class Meanwhile>
  __device__ __forceinline__ void each_pack(int from, const F& f, const Then& then, const Meanwhile& meanwhile) const {
    constexpr bool ahead = kMany < 8;  // otherwise registers do not suffice for the next packs
    // Packs that do not exist are replaced by the row's first: selecting addresses keeps all loads together.
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

}  // namespace detail
KERNELS_END
