// Products with few tokens on CUDA cores: every weight is read once, straight into registers.
//
// A block owns R rows of weights and a few tokens; its threads share K, each with many packs under way. What a thread has
// summed up is added over the block's warps in a fixed order, so that results depend on nothing but shapes and types.
#pragma once

#include "../weights.h"
#include "row_bodies.cuh"

KERNELS_BEGIN
namespace detail {

template <class X_, class W_, class Out_>
struct ProductProblem {
  using X = X_;
  using W = W_;
  using Out = Out_;
  using C = compute_type<X>;
  using Map = decltype(sink_map(std::declval<const Out&>()));
  static constexpr int matrices = is_gated<W>::value ? 2 : 1;

  X x;
  W w;
  Out out;
  int64_t m, n, k;
  Groups groups;

  // The weights that go into a result: one matrix, or the two of a gate.
  template <int i>
  __device__ __forceinline__ decltype(auto) weights() const {
    if constexpr (!is_gated<W>::value) return (w);
    else if constexpr (i == 0) return w.gate();
    else return w.up();
  }
  // For a token, where they differ from one to the next.
  template <int i>
  __device__ __forceinline__ decltype(auto) weights_for(int64_t token) const { return for_token(weights<i>(), token); }
};

// Whether weights have a scale for whole packs.
template <class W, class Fetched, class = void>
struct has_unscaled : std::false_type {};
template <class W, class Fetched>
struct has_unscaled<W, Fetched, void_t<decltype(std::declval<const W&>().scale_of(std::declval<const Fetched&>()))>> : std::true_type {};

// sum + weights * x, with a scale that the pack's weights share applied once.
template <class W, class Fetched, class C, int N>
__device__ __forceinline__ C add_product(C sum, const W& w, const Fetched& fetched, const Pack<C, N>& x, int64_t row, int64_t col) {
  const auto chain = [&](C total, const auto& weights) {
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) total = fma(C(weights.v[i]), x.v[i], total);
    return total;
  };
  if constexpr (has_unscaled<W, Fetched>::value) return fma(C(w.scale_of(fetched)), chain(C(0), w.unscaled(fetched, row, col)), sum);
  else return chain(sum, resolve(w, fetched, row, col));
}

// A tile of one product: its tokens end before row_end, its weights begin at row `weights`.
struct Tile {
  int64_t token, output;  // the first of either
  int64_t token_end, weights;

  // The tile with this number among the token tiles of all groups, of `height` tokens each, and that one in its outputs.
  template <class P>
  __device__ __forceinline__ Tile(const P& p, int64_t token_tile, int64_t height, int64_t first_output) : output(first_output) {
    const Groups& groups = p.groups;
    int64_t group = 0, begin = 0;
    token_end = p.m;
    if (groups.offsets != nullptr) {
      token_end = 0;  // none, if there are more blocks than tiles
      for (; group < groups.count; ++group) {
        const int64_t first = groups.offsets[group], end = groups.offsets[group + 1], tiles = (end - first + height - 1) / height;
        if (token_tile < tiles) {
          begin = first;
          token_end = end;
          break;
        }
        token_tile -= tiles;
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

// How many token tiles there are, at most.
template <class P>
int64_t token_tiles(const P& p, int64_t height) {
  const int64_t tiles = (p.m + height - 1) / height;
  if (p.groups.offsets == nullptr) return p.groups.count * tiles;
  return tiles + (p.groups.count < p.m ? p.groups.count : p.m);
}

// What the sink reads for a result, asked for before the sum is known.
template <class P>
struct Result {
  const P& p;
  int64_t row, col;
  Operands<P, 1> operands;
  __device__ __forceinline__ Result(const P& problem, int64_t token, int64_t output)
      : p(problem), row(token), col(output), operands(fetch_operands<1>(sink_map(p.out), row, col)) {}

  __device__ __forceinline__ void put_sums(const typename P::C (&sums)[P::matrices]) const {
    using One = Pack<typename P::C, 1>;
    const auto map = sink_map(p.out);
    const auto sink = sink_end(p.out);
    if constexpr (P::matrices == 2) {
      // The gate's map is the first of a chain and reads nothing itself.
      const One joined = first_map(map).join(One{{sums[0]}}, One{{sums[1]}});
      const auto later = later_maps(map);
      put(sink, apply_map(later, joined, fetch_operands<1>(later, row, col), row, col), row, col);
    } else {
      put(sink, apply_map(map, One{{sums[0]}}, operands, row, col), row, col);
    }
  }
};

// What must be known of a token's inputs before any can be read: the state of their row, if the source begins with normed().
template <class X, bool = starts_normed<X>>
struct TokenState {
  template <int N, class Gather>
  static __device__ __forceinline__ TokenState of(const X&, int64_t, int64_t, int, int, bool, const Gather&) { return {}; }
  __device__ __forceinline__ const X& bind(const X& x) const { return x; }
};
template <class X>
struct TokenState<X, true> {
  using Base = std::decay_t<decltype(base_of(std::declval<const X&>()))>;
  typename Base::State state;
  Linear<typename Base::C> linear;

  // By `size` threads of which this one is number `rank`; gather(op, state) makes one state of theirs. `writes`: what the
  // caller wants to know of each row, too.
  template <int N, class Gather>
  static __device__ __forceinline__ TokenState of(const X& x, int64_t row, int64_t cols, int rank, int size, bool writes, const Gather& gather) {
    const auto& base = base_of(x);
    using Before = std::decay_t<decltype(base.before())>;
    using C = typename Base::C;
    typename Base::Op::Running running;
    each_run<4>(rank * N, size * N, int(cols), [&](const auto& at) {
      Fetched<Before, N> fetched[at.count];
      Pack<C, N> values[at.count];
      fetch_run<N>(fetched, base.before(), row, at);
      take_run<N>(base.op(), base.before(), running, fetched, values, row, at);
    });
    const auto state = gather(base.op(), base.op().state(running));
    const auto result = base.op().finish(state, Count<C>(int(cols)));
    if (writes && rank == 0) base.op().write_row(result, row);
    return {state, base.op().linear(state, result)};
  }
  __device__ __forceinline__ auto bind(const X& x) const {
    return on_base(x, [&](const Base& base) { return base.with(state, linear); });
  }
};

// Room in shared memory for what has constructors: they do not run.
template <class T, int kCount>
union Alone {
  T items[kCount];
  __device__ Alone() {}
};

// The states of a block's tokens, a warp for each in turn, in shared memory.
template <int N, class X>
__device__ __forceinline__ void find_states(TokenState<X>* states, const X& x, int64_t first, int count, int64_t rows, int64_t cols, bool writes) {
  if constexpr (starts_normed<X>) {
    const auto gather = [](const auto& op, const auto& state) { return op.gather(state, PartLanes<compute_type<X>>()); };
    for (int i = threadIdx.x / 32; i < count && first + i < rows; i += blockDim.x / 32) {
      const auto state = TokenState<X>::template of<N>(x, first + i, cols, threadIdx.x & 31, 32, writes, gather);
      if ((threadIdx.x & 31) == 0) states[i] = state;
    }
    __syncthreads();
  }
}

template <class P, int N, int R, int M, int U>
struct GemvBody {
  using C = typename P::C;
  static constexpr int max_threads = 256;
  static constexpr int registers = 128;
  static constexpr int kSums = M * R;  // of each matrix
  static constexpr int each = N < widest_of<typename P::X>() ? N : widest_of<typename P::X>();
  struct Params {
    P problem;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ C partial[max_threads / 32][P::matrices][kSums];
    const P& p = params.problem;
    const int64_t row = int64_t(blockIdx.x) * R, token = int64_t(blockIdx.y) * M;
    __shared__ Alone<TokenState<typename P::X>, M> states;
    find_states<each>(states.items, p.x, token, M, p.m, p.k, blockIdx.x == 0);
    C sums[P::matrices][M][R] = {};
    each_run<U>(int(threadIdx.x) * N, int(blockDim.x) * N, int(p.k), [&](const auto& at) { add_run(p, at, row, token, states.items, sums); });

    const Lanes<32> lanes;
    KERNELS_UNROLL
    for (int i = 0; i < P::matrices * kSums; ++i) {
      const C sum = lanes.sum((&sums[0][0][0])[i]);
      if (lanes.rank() == 0) (&partial[threadIdx.x / 32][0][0])[i] = sum;
    }
    __syncthreads();
    if (int(threadIdx.x) >= kSums) return;
    const int64_t mine = token + threadIdx.x / R, output = row + threadIdx.x % R;
    if (mine >= p.m || output >= p.n) return;
    const Result<P> result(p, mine, output);
    C totals[P::matrices] = {};
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) {
      KERNELS_UNROLL
      for (int i = 0; i < P::matrices; ++i) totals[i] = totals[i] + partial[warp][i][threadIdx.x];
    }
    result.put_sums(totals);
  }

 private:
  // Rows and tokens beyond the end take part with the last one, and are not written.
  template <class At>
  static __device__ __forceinline__ void add_run(const P& p, const At& at, int64_t row, int64_t token, const TokenState<typename P::X>* states, C (&sums)[P::matrices][M][R]) {
    const auto row_at = [&](int r) { return row + r < p.n ? row + r : p.n - 1; };
    const auto token_at = [&](int m) { return token + m < p.m ? token + m : p.m - 1; };
    decltype(auto) weights = p.template weights_for<0>(token);
    decltype(auto) others = p.template weights_for<P::matrices - 1>(token);
    const auto fetch_weights = [&](auto& fetched, const auto& w) {
      KERNELS_UNROLL
      for (int u = 0; u < At::count; ++u) {
        KERNELS_UNROLL
        for (int r = 0; r < R; ++r) fetched[u][r] = fetch<N>(w, row_at(r), at.col(u));
      }
    };
    Fetched<std::decay_t<decltype(weights)>, N> first[At::count][R];
    Fetched<std::decay_t<decltype(others)>, N> second[P::matrices == 2 ? At::count : 1][R];
    fetch_weights(first, weights);
    if constexpr (P::matrices == 2) fetch_weights(second, others);
    KERNELS_UNROLL
    for (int u = 0; u < At::count; ++u) {
      const int col = at.col(u);
      Pack<C, N> x[M];
      KERNELS_UNROLL
      for (int m = 0; m < M; ++m) x[m] = read_input(states[int(token_at(m) - token)].bind(p.x), token_at(m), col);
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) {
        KERNELS_UNROLL
        for (int m = 0; m < M; ++m) {
          sums[0][m][r] = add_product(sums[0][m][r], weights, first[u][r], x[m], row_at(r), col);
          if constexpr (P::matrices == 2) sums[1][m][r] = add_product(sums[1][m][r], others, second[u][r], x[m], row_at(r), col);
        }
      }
    }
  }

  // N inputs, in as many packs as they need.
  template <class X>
  static __device__ __forceinline__ Pack<C, N> read_input(const X& x, int64_t token, int col) {
    Pack<C, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; i += each) {
      const Pack<C, each> part = resolve(x, fetch<each>(x, token, col + i), token, col + i);
      KERNELS_UNROLL
      for (int j = 0; j < each; ++j) out.v[i + j] = part.v[j];
    }
    return out;
  }
};

}  // namespace detail
KERNELS_END
