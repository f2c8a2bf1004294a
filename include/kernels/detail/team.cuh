// Teams: the threads that share a row, and how they bring their states together.
//
// GroupTeam: 1 to 32 lanes of a warp. BlockTeam: a block, or the blocks of a cluster. Every member gets the same bits:
// states are always merged in the order of the ranks that they cover, whatever lane does it.
#pragma once

#include "../arch/arch.cuh"
#include "../arch/sm90.cuh"
#include "../core/pack.h"

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

// All lanes of the warp call this; lanes is a power of two. Op has merge(State&, const State&).
template <class Op, class State>
__device__ __forceinline__ State reduce_lanes(const Op& op, State state, int lanes) {
  const int lane = threadIdx.x & 31;
  for (int distance = 1; distance < lanes; distance *= 2) {
    const State other = shuffle_xor(state, distance);
    const bool upper = lane & distance;
    State low = upper ? other : state;
    const State high = upper ? state : other;
    op.merge(low, high);
    state = low;
  }
  return state;
}

struct GroupTeam {
  int lanes;

  __device__ int rank() const { return threadIdx.x & (lanes - 1); }
  __device__ int size() const { return lanes; }
  template <class Op, class State>
  __device__ State reduce(const Op& op, const State& state) {
    return reduce_lanes(op, state, lanes);
  }
};

constexpr int kMaxWarps = 32;
constexpr int kMaxCluster = 16;

// Room for the states of a block's warps and a cluster's blocks, twice: consecutive reductions alternate, so that one
// barrier per reduction is enough.
template <int kBytes>
struct alignas(16) TeamScratch {
  unsigned char warps[2][kMaxWarps][kBytes];
  unsigned char blocks[2][kMaxCluster][kBytes];
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
  // Begins with an arrival at the cluster's barrier, so that by the first exchange every block is known to run.
  __device__ explicit BlockTeam(TeamScratch<kBytes>& scratch) : scratch_(scratch), cluster_(arch::cluster_size()) {
    if (cluster_ > 1) arch::cluster_arrive_relaxed();
  }

  __device__ int rank() const { return threadIdx.x; }
  __device__ int size() const { return blockDim.x; }
  __device__ int block() const { return arch::cluster_rank(); }
  __device__ int blocks() const { return cluster_; }

  template <class Op, class State>
  __device__ State reduce(const Op& op, State state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, warps = blockDim.x / 32;
    state = reduce_lanes(op, state, 32);
    if (warps > 1) {
      if (lane == 0) memcpy(scratch_.warps[turn_][warp], &state, sizeof(State));
      __syncthreads();
      state = gather<State>(scratch_.warps[turn_], warps, op);
    }
    if (cluster_ > 1) state = reduce_cluster(op, state);
    turn_ ^= 1;
    return state;
  }

 private:
  // Merges `count` states that lie in shared memory; every warp does the same work and gets the same result.
  template <class State, class Op>
  __device__ State gather(unsigned char (*slots)[kBytes], int count, const Op& op) {
    const int lane = threadIdx.x & 31;
    State state;
    if (lane < count) memcpy(&state, slots[lane], sizeof(State));
    int lanes = 1;
    while (lanes < count) lanes *= 2;
    state = reduce_lanes(op, state, lanes);
    return broadcast_first(state);
  }

  template <class State>
  __device__ State broadcast_first(const State& state) {
    constexpr int words = sizeof(State) / 4;
    uint32_t raw[words];
    memcpy(raw, &state, sizeof(State));
    KERNELS_UNROLL
    for (int i = 0; i < words; ++i) raw[i] = __shfl_sync(0xffffffffu, raw[i], 0);
    State out;
    memcpy(&out, raw, sizeof(State));
    return out;
  }

  template <class Op, class State>
  __device__ State reduce_cluster(const Op& op, State state) {
    if (!met_) arch::cluster_wait();
    met_ = true;
    if (threadIdx.x < cluster_) {
      constexpr int words = sizeof(State) / 4;
      uint32_t raw[words];
      memcpy(raw, &state, sizeof(State));
      KERNELS_UNROLL
      for (int i = 0; i < words; ++i) {
        arch::store_remote(scratch_.blocks[turn_][arch::cluster_rank()] + 4 * i, threadIdx.x, raw[i]);
      }
    }
    arch::cluster_arrive();
    arch::cluster_wait();
    return gather<State>(scratch_.blocks[turn_], cluster_, op);
  }

  TeamScratch<kBytes>& scratch_;
  unsigned cluster_;
  int turn_ = 0;
  bool met_ = false;
};

}  // namespace detail
KERNELS_END
