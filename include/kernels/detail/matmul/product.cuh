// What all product kernels share: the problem, its tiles (of one product, or of a mixture's groups), the state of
// inputs that are normalized while they are read, and how a result gets to the sink.
#pragma once

#include "../../weights.h"
#include "../row/bodies.cuh"
#include "../uninitialized.cuh"

KERNELS_BEGIN
namespace detail {

template <class X_, class W_, class Out_>
struct ProductProblem {
  using X = X_;
  using W = W_;
  using Out = Out_;
  using C = compute_type<X>;
  using Map = std::decay_t<decltype(sink_map(std::declval<const Out&>()))>;
  static constexpr int matrices = is_gated<W>::value ? 2 : 1;

  X x;
  W w;
  Out out;
  int64_t m, n, k;
  Groups groups;

  // The weights of a result: one matrix, or the two of a gate.
  template <int i>
  KERNELS_HD decltype(auto) weights() const {
    if constexpr (!is_gated<W>::value) return (w);
    else if constexpr (i == 0) return w.gate();
    else return w.up();
  }
  // For a token, if weights depend on it.
  template <int i>
  __device__ __forceinline__ decltype(auto) weights_for(int64_t token) const { return for_token(weights<i>(), token); }
};
// The only matrix, or the gate.
template <class P>
using FirstWeights = std::decay_t<decltype(std::declval<const P&>().template weights<0>())>;

// A tile of one product: tokens [token, token_end), and weights whose group begins at row `weights`.
struct Tile {
  int64_t token, output;  // the first of each
  int64_t token_end, weights;

  // Tile number `token_tile` of `height` tokens among those of all groups, with outputs from first_output on. Called by
  // all threads of a block.
  template <class P>
  __device__ __forceinline__ Tile(const P& p, int64_t token_tile, int64_t height, int64_t first_output)
      : output(first_output) {
    const Groups& groups = p.groups;
    int64_t group = 0, begin = 0;
    token_end = p.m;
    if (groups.offsets != nullptr) {
      token_end = 0;  // none, if there are more blocks than tiles
      // Every warp examines 32 groups at a time.
      const int lane = threadIdx.x & 31;
      for (int64_t some = 0; some < groups.count; some += 32) {
        const bool there = some + lane < groups.count;
        const int first = there ? groups.offsets[some + lane] : 0, end = there ? groups.offsets[some + lane + 1] : 0;
        const int tiles = end > first ? int((unsigned(end - first) + unsigned(height) - 1) / unsigned(height)) : 0;
        int up_to = tiles;
        KERNELS_UNROLL
        for (int distance = 1; distance < 32; distance *= 2) {
          const int other = __shfl_up_sync(0xffffffffu, up_to, distance);
          up_to += lane >= distance ? other : 0;
        }
        const unsigned holds = __ballot_sync(0xffffffffu, token_tile < up_to);
        if (holds == 0) {
          token_tile -= __shfl_sync(0xffffffffu, up_to, 31);
          continue;
        }
        const int found = __ffs(int(holds)) - 1;
        group = some + found;
        begin = __shfl_sync(0xffffffffu, first, found);
        token_end = __shfl_sync(0xffffffffu, end, found);
        token_tile -= __shfl_sync(0xffffffffu, up_to - tiles, found);
        break;
      }
    } else if (groups.count > 1) {
      const int64_t tiles = (p.m + height - 1) / height;
      group = token_tile / tiles;
      token_tile -= group * tiles;
      begin = group * p.m;
      token_end = begin + p.m;
    }
    token = begin + token_tile * height;
    weights = group * p.n;
  }
};

// An upper bound on the number of token tiles.
template <class P>
int64_t token_tiles(const P& p, int64_t height) {
  const int64_t tiles = (p.m + height - 1) / height;
  if (p.groups.offsets == nullptr) return p.groups.count * tiles;
  return tiles + (p.groups.count < p.m ? p.groups.count : p.m);
}

// The results that a sink takes at once: one, or the two of a pair.
template <class P>
constexpr int outputs_per_store = wants_pairs<typename P::Out>() ? 2 : 1;

// N results on their way to the sink, by default one, or a pair; with the sink's operands.
template <class P, int N = outputs_per_store<P>>
struct Result {
  static_assert(outputs_per_store<P> == 1 || P::matrices == 1, "what a gate joins does not come in pairs");
  using Sums = Pack<typename P::C, N>;
  const P& p;
  int64_t row, col;
  Operands<P, N> operands;

  static __device__ __forceinline__ Operands<P, N> fetch(const P& p, int64_t token, int64_t output) {
    return fetch_operands<N>(sink_map(p.out), token, output);
  }
  static __device__ __forceinline__ Result of(const P& p, int64_t token, int64_t output) {
    return {p, token, output, fetch(p, token, output)};
  }
  // prepared: what the sink prepared for this result.
  template <class Prepared>
  __device__ __forceinline__ void put_sums(const Sums (&sums)[P::matrices], const Prepared& prepared) const {
    const auto map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    if constexpr (P::matrices == 2) {
      put_joined(sink, map, sums[0], sums[1], row, col, prepared);
    } else {
      put_prepared(sink, prepared, apply_map(map, sums[0], operands, row, col), row, col);
    }
  }
};

// What must be known of a token's inputs before they can be read: their row's state, if the source begins with
// normed().
template <class X, bool = starts_normed<X>>
struct TokenState {
  using Scratch = Nothing;
  struct Team {
    __device__ __forceinline__ explicit Team(Scratch&) {}
  };
  template <int N>
  static __device__ __forceinline__ TokenState by_block(Team&, const X&, int64_t, int, bool) { return {}; }
  __device__ __forceinline__ const X& bind(const X& x) const { return x; }
};
template <class X>
struct TokenState<X, true> {
  using Base = std::decay_t<decltype(base_of(std::declval<const X&>()))>;
  using C = typename Base::C;
  using Scratch = TeamScratch<largest_state<typename Base::State>()>;
  using Team = BlockTeam<largest_state<typename Base::State>()>;
  typename Base::State state;
  Linear<C> linear;

  // Computed by the threads of a block. `writes`: also writes the row statistics that the caller asked for.
  template <int N>
  static __device__ __forceinline__ TokenState by_block(Team& team, const X& x, int64_t row, int cols, bool writes) {
    return found<N>(x, row, cols, team.rank(), team.size(), writes,
                    [&](const auto& op, const auto& state) { return team.reduce(op, state, Count<C>(cols)); });
  }
  // Computed by a warp.
  template <int N>
  static __device__ __forceinline__ TokenState by_warp(const X& x, int64_t row, int cols, bool writes) {
    return found<N>(x, row, cols, threadIdx.x & 31, 32, writes,
                    [](const auto& op, const auto& state) { return op.gather(state, PartLanes<C>()); });
  }
  __device__ __forceinline__ auto bind(const X& x) const {
    return on_base(x, [&](const Base& base) { return base.with(state, linear); });
  }

 private:
  template <int N, class Gather>
  static __device__ __forceinline__ TokenState found(const X& x, int64_t row, int cols, int rank, int size, bool writes,
                                                     const Gather& gather) {
    const auto& base = base_of(x);
    using Before = std::decay_t<decltype(base.before())>;
    typename Base::Op::State running;
    each_run<4>(rank * N, size * N, cols, [&](const auto& at) {
      Fetched<Before, N> fetched[at.count];
      Pack<C, N> values[at.count];
      fetch_run<N>(fetched, base.before(), row, at);
      take_run<N>(base.op(), base.before(), running, fetched, values, row, at);
    });
    const auto state = gather(base.op(), running);
    const auto result = base.op().finish(state, Count<C>(cols));
    if (writes && rank == 0) base.op().write_row(result, row);
    return {state, base.op().linear(state, result)};
  }
};

// Computes the states of a block's tokens in shared memory, a warp for each.
template <int N, class X>
__device__ __forceinline__ void find_states(TokenState<X>* states, const X& x, int64_t first, int count, int64_t rows,
                                            int64_t cols, bool writes) {
  if constexpr (starts_normed<X>) {
    for (int i = threadIdx.x / 32; i < count && first + i < rows; i += blockDim.x / 32) {
      const auto state = TokenState<X>::template by_warp<N>(x, first + i, int(cols), writes);
      if ((threadIdx.x & 31) == 0) states[i] = state;
    }
    __syncthreads();
  }
}

// N sums in shared memory, aligned to their size or to 16 bytes.
template <int N>
__device__ __forceinline__ Pack<float, N> sums_at(const float* from) {
  Pack<float, N> out;
  memcpy(out.v, __builtin_assume_aligned(from, N < 4 ? 4 * N : 16), 4 * N);
  return out;
}

}  // namespace detail
KERNELS_END
