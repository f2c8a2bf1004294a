// Teams: the threads that share a row, and how they reduce values.
//
//   Lanes       1 to 32 lanes of a warp, a power of two; butterfly exchange, so that every lane gets the same bits
//   BlockTeam   | warp 0 | warp 1 | ... |  x  blocks of a cluster: warps reduce by Lanes, then through shared memory,
//               and blocks through distributed shared memory
//
// A row op combines states over lanes by its gather() (core/row_op.h).
#pragma once

#include "../arch/arch.cuh"
#include "../arch/sm90.cuh"
#include "../core/welford.h"

KERNELS_BEGIN
namespace detail {

template <class State>
__device__ __forceinline__ State shuffle_xor(const State& state, int mask) {
  static_assert(sizeof(State) % 4 == 0, "states are exchanged as 32-bit words");
  constexpr int words = sizeof(State) / 4;
  uint32_t raw[words];
  memcpy(raw, &state, sizeof(State));
  KERNELS_UNROLL
  for (int i = 0; i < words; ++i) raw[i] = __shfl_xor_sync(0xffffffffu, raw[i], mask);
  State out;
  memcpy(&out, raw, sizeof(State));
  return out;
}

// Adjacent lanes of a warp, a power of two of them: kCount, or, if that is 0, the constructor's argument. All lanes of
// the warp must make the calls, including those of other teams.
template <int kCount = 0>
class Lanes {
 public:
  __device__ __forceinline__ explicit Lanes(int count = kCount) : count_(count) {}

  __device__ __forceinline__ int count() const { return kCount ? kCount : count_; }
  __device__ __forceinline__ int rank() const { return threadIdx.x & (count() - 1); }
  // The group of count() lanes to which a thread belongs.
  __device__ __forceinline__ unsigned group_of(unsigned thread) const {
    return kCount ? thread / (kCount ? unsigned(kCount) : 1u) : thread >> (31 - __clz(count_));
  }
  template <class V>
  __device__ __forceinline__ V sum(const V& value) const {
    return exchange(value, [](const V& a, const V& b) { return a + b; });
  }
  template <class V>
  __device__ __forceinline__ V(max)(const V& value) const {
    return exchange(value, [](const V& a, const V& b) { return greater(a, b); });
  }
  // Sums several values at once, a power of two of them; a lane gets the sum of value rank() / (32 / kValues). This
  // takes fewer exchanges than separate sums, as lanes send the values whose sums they do not need.
  template <class V, int kValues>
  __device__ __forceinline__ V sums(const V (&values)[kValues]) const {
    static_assert(kCount == 32 && kValues >= 1 && kValues <= 32 && (kValues & (kValues - 1)) == 0, "for whole warps");
    return exchange_some(values, std::integral_constant<int, 16>());
  }
  template <class V>
  __device__ __forceinline__ V first(const V& value) const {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8, "a number");
    return __shfl_sync(0xffffffffu, value, 0, count());
  }

 private:
  template <class V, class F>
  __device__ __forceinline__ V exchange(V value, F f) const {
    KERNELS_UNROLL
    for (int distance = 1; distance < (kCount ? kCount : 32); distance *= 2) {
      const V both = f(value, shuffle_xor(value, distance));
      value = kCount || distance < count_ ? both : value;  // a selection costs less than a branch around the exchange
    }
    return value;
  }

  template <class V, int kValues, int kDistance>
  __device__ __forceinline__ V exchange_some(const V (&values)[kValues], std::integral_constant<int, kDistance>) const {
    if constexpr (kDistance == 0) {
      return values[0];
    } else if constexpr (kValues == 1) {
      const V both[1] = {values[0] + shuffle_xor(values[0], kDistance)};
      return exchange_some(both, std::integral_constant<int, kDistance / 2>());
    } else {
      constexpr int kHalf = kValues / 2;
      const bool upper = rank() & kDistance;
      V kept[kHalf];
      KERNELS_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        const V sent = upper ? values[i] : values[i + kHalf], mine = upper ? values[i + kHalf] : values[i];
        kept[i] = mine + shuffle_xor(sent, kDistance);
      }
      return exchange_some(kept, std::integral_constant<int, kDistance / 2>());
    }
  }

  int count_;
};

// Lanes whose values are counted, unless their number is known.
template <class C, int kLanes = 32>
class PartLanes : public Lanes<kLanes> {
 public:
  __device__ __forceinline__ explicit PartLanes(const Count<C>* known = nullptr) : known_(known) {}

  __device__ __forceinline__ Count<C> total(C mine) const {
    if (known_ != nullptr) return *known_;
    if constexpr (kLanes == 32) return Count<C>(int(__reduce_add_sync(0xffffffffu, int(mine))));
    else return Count<C>(this->sum(int(mine)));
  }

 private:
  const Count<C>* known_;
};

// The lanes of a group that shares a row of `columns` columns.
template <class C>
class GroupLanes : public Lanes<> {
 public:
  __device__ __forceinline__ GroupLanes(int count, const Count<C>& columns) : Lanes<>(count), columns_(columns) {}
  __device__ __forceinline__ const Count<C>& total(C) const { return columns_; }

 private:
  const Count<C>& columns_;
};

// kLanes lanes that share a row of exactly kColumns columns.
template <class C, int kLanes, int kColumns>
class FullLanes : public Lanes<kLanes> {
 public:
  __device__ __forceinline__ constexpr Count<C> total(C) const { return {C(kColumns), C(1.0 / kColumns)}; }
};

constexpr int kMaxWarps = 32;
constexpr int kMaxCluster = 16;

// Memory for the states of a block's warps and of a cluster's blocks, twice: consecutive uses alternate, so one barrier
// for each use is enough. A thread that overwrites a set has passed the barrier that its readers reached after reading.
template <int kBytes>
struct alignas(16) TeamScratch {
  unsigned char warps[2][kMaxWarps][kBytes];
  unsigned char blocks[2][kMaxCluster][kBytes];
  uint64_t arrived[2];
};

template <class... States>
constexpr int largest_state() {
  int largest = 4;
  const int sizes[] = {int(sizeof(States))...};
  for (int size : sizes) largest = size > largest ? size : largest;
  return (largest + 7) / 8 * 8;
}

template <int kBytes>
class BlockTeam {
 public:
  __device__ __forceinline__ explicit BlockTeam(TeamScratch<kBytes>& scratch)
      : scratch_(scratch), blocks_(arch::cluster_size()), warps_(blockDim.x / 32) {
    if (blocks_ > 1) {
      if (threadIdx.x == 0) {
        arch::mbarrier_init(&scratch_.arrived[0], 1);
        arch::mbarrier_init(&scratch_.arrived[1], 1);
        arch::mbarrier_init_fence();
      }
      arch::cluster_arrive();  // completed before the first exchange
    }
  }
  __device__ __forceinline__ ~BlockTeam() {
    if (blocks_ > 1 && exchanges_ == 0) arch::cluster_wait();
  }

  __device__ __forceinline__ int rank() const { return threadIdx.x; }
  __device__ __forceinline__ int size() const { return blockDim.x; }
  __device__ __forceinline__ int block() const { return arch::cluster_rank(); }
  __device__ __forceinline__ int blocks() const { return blocks_; }
  // The index of the cluster, and the number of clusters; their size is a power of two.
  __device__ __forceinline__ int64_t cluster() const { return blockIdx.x >> (31 - __clz(blocks_)); }
  __device__ __forceinline__ int64_t clusters() const { return gridDim.x >> (31 - __clz(blocks_)); }

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }

  // From each thread's state to the row's, with one barrier and one message between blocks. kWarp: the number of values
  // of every warp, or 0 if unknown.
  template <int kWarp = 0, class Op, class Seen, class C>
  __device__ __forceinline__ auto reduce(const Op& op, const Seen& seen, const Count<C>& row) {
    const auto lanes = [&] {
      if constexpr (kWarp > 0) return FullLanes<C, 32, kWarp>();
      else return PartLanes<C>();
    };
    auto state = op.gather(seen, lanes());
    using State = decltype(state);
    static_assert(sizeof(State) <= kBytes, "the scratch was sized for smaller states");
    if (warps_ > 1) {
      turn_ ^= 1;
      if (lane() == 0) memcpy(scratch_.warps[turn_][warp()], &state, sizeof(State));
      __syncthreads();
      state = gather<State>(op, scratch_.warps[turn_], warps_, blocks_ > 1 ? nullptr : &row);
    }
    if (blocks_ > 1) {
      if (exchanges_ == 0) arch::cluster_wait();
      const int turn = exchanges_ & 1;
      send(state, turn);
      arch::mbarrier_wait(&scratch_.arrived[turn], (exchanges_ >> 1) & 1);
      ++exchanges_;
      state = gather<State>(op, scratch_.blocks[turn], blocks_, &row);
    }
    return state;
  }

 private:
  // Every warp does the same work on the same states, and gets the same result.
  template <class State, class Op, class C>
  static __device__ __forceinline__ State gather(const Op& op, const unsigned char (*states)[kBytes], int count,
                                                 const Count<C>* total) {
    return count <= 4 ? gather_lanes<State>(op, states, count, PartLanes<C, 4>(total))
                      : gather_lanes<State>(op, states, count, PartLanes<C>(total));
  }
  template <class State, class Op, class L>
  static __device__ __forceinline__ State gather_lanes(const Op& op, const unsigned char (*states)[kBytes], int count,
                                                       const L& lanes) {
    State state{};
    if (lanes.rank() < count) memcpy(&state, __builtin_assume_aligned(states[lanes.rank()], 8), sizeof(State));
    return op.gather(state, lanes);
  }

  // Sends the block's state to every block of the cluster, including itself.
  template <class State>
  __device__ __forceinline__ void send(const State& state, int turn) {
    if (threadIdx.x == 0) arch::mbarrier_arrive_expect(&scratch_.arrived[turn], blocks_ * int(sizeof(State)));
    if (int(threadIdx.x) < blocks_) {
      constexpr int words = sizeof(State) / 4;
      uint32_t raw[words];
      memcpy(raw, &state, sizeof(State));
      const uint32_t slot = arch::remote_address(scratch_.blocks[turn][block()], threadIdx.x);
      const uint32_t barrier = arch::remote_address(&scratch_.arrived[turn], threadIdx.x);
      KERNELS_UNROLL
      for (int i = 0; i < words; ++i) arch::store_async(slot + 4 * i, raw[i], barrier);
    }
  }

  TeamScratch<kBytes>& scratch_;
  int blocks_;
  int warps_;
  int turn_ = 0;
  int exchanges_ = 0;
};

}  // namespace detail
KERNELS_END
