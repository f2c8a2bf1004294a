// Teams: the threads that share a row, and how they bring their values together.
//
// GroupTeam: 1 to 32 lanes of a warp. BlockTeam: a block, or the blocks of a cluster. Every member gets the same bits:
// sum and max exchange crosswise (a + b == b + a), states are merged in the order of the ranks that they cover.
#pragma once

#include "../arch/arch.cuh"
#include "../arch/sm90.cuh"
#include "../core/math.h"

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

struct Add {
  template <class C>
  static __device__ __forceinline__ C neutral() { return C{}; }
  template <class C>
  __device__ __forceinline__ C operator()(const C& a, const C& b) const { return a + b; }
};
struct Max {
  template <class C>
  static __device__ __forceinline__ C neutral() { return -infinity<C>(); }
  template <class C>
  __device__ __forceinline__ C operator()(const C& a, const C& b) const { return greater(a, b); }
};

// A commutative operation over `lanes` lanes (a power of two); all lanes of the warp call this.
template <class C, class F>
__device__ __forceinline__ C exchange(C value, F f, int lanes) {
  KERNELS_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance < lanes) value = f(value, shuffle_xor(value, distance));
  }
  return value;
}

// Merges states in the order of their lanes. Op has merge(State&, const State&).
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
  static constexpr bool reads_ahead = false;  // there are many groups, and they overlap each other
  int lanes;

  __device__ __forceinline__ int rank() const { return threadIdx.x & (lanes - 1); }
  __device__ __forceinline__ int size() const { return lanes; }
  template <class C>
  __device__ __forceinline__ C sum(const C& value) const { return exchange(value, Add{}, lanes); }
  template <class C>
  __device__ __forceinline__ C max(const C& value) const { return exchange(value, Max{}, lanes); }
  // The state of the team is the state of the row.
  template <class Op, class State>
  __device__ __forceinline__ State across_blocks(const Op&, const State& state) const { return state; }
  template <class Op, class State>
  __device__ __forceinline__ State reduce(const Op& op, const State& state) const { return reduce_lanes(op, state, lanes); }
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
  static constexpr bool reads_ahead = true;

  // Begins with an arrival at the cluster's barrier, so that by the first exchange every block is known to run.
  __device__ __forceinline__ explicit BlockTeam(TeamScratch<kBytes>& scratch)
      : scratch_(scratch), blocks_(arch::cluster_size()), warps_(blockDim.x / 32) {
    if (blocks_ > 1) arch::cluster_arrive_relaxed();
  }

  __device__ __forceinline__ int rank() const { return threadIdx.x; }
  __device__ __forceinline__ int size() const { return blockDim.x; }
  __device__ __forceinline__ int block() const { return arch::cluster_rank(); }
  __device__ __forceinline__ int blocks() const { return blocks_; }

  // Over the threads of this block.
  template <class C>
  __device__ __forceinline__ C sum(const C& value) { return combine(value, Add{}); }
  template <class C>
  __device__ __forceinline__ C max(const C& value) { return combine(value, Max{}); }

  // From the state of this block to that of the cluster.
  template <class Op, class State>
  __device__ __forceinline__ State across_blocks(const Op& op, const State& state) {
    if (blocks_ == 1) return state;
    if (!met_) arch::cluster_wait();
    met_ = true;
    block_turn_ ^= 1;
    if (threadIdx.x < blocks_) {
      constexpr int words = sizeof(State) / 4;
      uint32_t raw[words];
      memcpy(raw, &state, sizeof(State));
      KERNELS_UNROLL
      for (int i = 0; i < words; ++i) {
        arch::store_remote(scratch_.blocks[block_turn_][block()] + 4 * i, threadIdx.x, raw[i]);
      }
    }
    arch::cluster_arrive();
    arch::cluster_wait();
    return reduce_lanes(op, slot(scratch_.blocks[block_turn_], blocks_, State{}), blocks_);
  }

  // From the state of this thread to that of the whole team.
  template <class Op, class State>
  __device__ __forceinline__ State reduce(const Op& op, State state) {
    state = reduce_lanes(op, state, 32);
    if (warps_ > 1) {
      share(state);
      state = reduce_lanes(op, slot(scratch_.warps[warp_turn_], warps_, State{}), lanes_for(warps_));
    }
    return across_blocks(op, state);
  }

 private:
  template <class C, class F>
  __device__ __forceinline__ C combine(C value, F f) {
    value = exchange(value, f, 32);
    if (warps_ == 1) return value;
    share(value);
    return exchange(slot(scratch_.warps[warp_turn_], warps_, F::template neutral<C>()), f, lanes_for(warps_));
  }

  // Puts this warp's value where every warp can read it. One barrier per use is enough, because uses alternate between
  // two sets of slots: whoever writes to a set again has passed the barrier that its readers reached after reading.
  template <class V>
  __device__ __forceinline__ void share(const V& value) {
    static_assert(sizeof(V) <= kBytes, "the scratch was sized for smaller states");
    warp_turn_ ^= 1;
    if ((threadIdx.x & 31) == 0) memcpy(scratch_.warps[warp_turn_][threadIdx.x / 32], &value, sizeof(V));
    __syncthreads();
  }

  static __device__ __forceinline__ int lanes_for(int count) { return count <= 1 ? 1 : 1 << (32 - __clz(count - 1)); }

  // What this lane takes part with when `count` slots are brought together. The slots repeat across the warp, so that
  // every lane ends with the result.
  template <class V>
  static __device__ __forceinline__ V slot(const unsigned char (*slots)[kBytes], int count, V neutral) {
    const int index = threadIdx.x & (lanes_for(count) - 1);
    V value = neutral;
    if (index < count) memcpy(&value, __builtin_assume_aligned(slots[index], 8), sizeof(V));
    return value;
  }

  TeamScratch<kBytes>& scratch_;
  int blocks_;
  int warps_;
  int warp_turn_ = 0;
  int block_turn_ = 0;
  bool met_ = false;
};

}  // namespace detail
KERNELS_END
