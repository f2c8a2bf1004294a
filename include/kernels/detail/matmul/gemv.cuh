// Products with few tokens on CUDA cores: every weight is read once, straight into registers.
//
// A block owns R rows of weights and a few tokens; its threads share K. There are as many of them as it takes to ask for all of
// a row at once, up to 512: a thread then has one wait in its life, and the blocks behind keep the memory busy. What a thread has
// summed up is added over the block's warps in a fixed order, so that results depend on nothing but shapes and types.
#pragma once

#include "../../weights.h"
#include "../row/bodies.cuh"

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

  // The weights that go into a result: one matrix, or the two of a gate.
  template <int i>
  KERNELS_HD decltype(auto) weights() const {
    if constexpr (!is_gated<W>::value) return (w);
    else if constexpr (i == 0) return w.gate();
    else return w.up();
  }
  // For a token, where they differ from one to the next.
  template <int i>
  __device__ __forceinline__ decltype(auto) weights_for(int64_t token) const { return for_token(weights<i>(), token); }
};

// Elements per access to N values of a source: N, or as many as it can read at once.
template <class S, int N>
constexpr int pack_within = N < widest_of<S>() ? N : widest_of<S>();

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

  // The tile with this number among the token tiles of all groups, of `height` tokens each, and that one in its outputs. For all
  // threads of a block at once.
  template <class P>
  __device__ __forceinline__ Tile(const P& p, int64_t token_tile, int64_t height, int64_t first_output) : output(first_output) {
    const Groups& groups = p.groups;
    int64_t group = 0, begin = 0;
    token_end = p.m;
    if (groups.offsets != nullptr) {
      token_end = 0;  // none, if there are more blocks than tiles
      // Every warp looks at 32 groups at a time.
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

// How many token tiles there are, at most.
template <class P>
int64_t token_tiles(const P& p, int64_t height) {
  const int64_t tiles = (p.m + height - 1) / height;
  if (p.groups.offsets == nullptr) return p.groups.count * tiles;
  return tiles + (p.groups.count < p.m ? p.groups.count : p.m);
}

// How many results a sink has to get at once: one, or the two of a pair.
template <class P>
constexpr int together = wants_pairs<typename P::Out>() ? 2 : 1;

// A result, or a pair, on its way to the sink, with what the sink reads for it.
template <class P>
struct Result {
  static constexpr int N = together<P>;
  static_assert(N == 1 || P::matrices == 1, "what a gate joins does not come in pairs");
  using Sums = Pack<typename P::C, N>;
  const P& p;
  int64_t row, col;
  Operands<P, N> operands;

  static __device__ __forceinline__ Operands<P, N> ask(const P& p, int64_t token, int64_t output) { return fetch_operands<N>(sink_map(p.out), token, output); }
  static __device__ __forceinline__ Result of(const P& p, int64_t token, int64_t output) { return {p, token, output, ask(p, token, output)}; }
  // prepared: by the sink, for this result.
  template <class Prepared>
  __device__ __forceinline__ void put_sums(const Sums (&sums)[P::matrices], const Prepared& prepared) const {
    const auto map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    if constexpr (P::matrices == 2) {
      // The gate's map is the first of a chain and reads nothing itself.
      const Sums joined = first_map(map).join(sums[0], sums[1]);
      const auto later = later_maps(map);
      put_prepared(sink, prepared, apply_map(later, joined, fetch_operands<N>(later, row, col), row, col), row, col);
    } else {
      put_prepared(sink, prepared, apply_map(map, sums[0], operands, row, col), row, col);
    }
  }
};

// What must be known of a token's inputs before any can be read: the state of their row, if the source begins with normed().
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

  // By the threads of a block. `writes`: what the caller wants to know of each row, too.
  template <int N>
  static __device__ __forceinline__ TokenState by_block(Team& team, const X& x, int64_t row, int cols, bool writes) {
    return found<N>(x, row, cols, team.rank(), team.size(), writes, [&](const auto& op, const auto& state) { return team.reduce(op, state, Count<C>(cols)); });
  }
  // By a warp.
  template <int N>
  static __device__ __forceinline__ TokenState by_warp(const X& x, int64_t row, int cols, bool writes) {
    return found<N>(x, row, cols, threadIdx.x & 31, 32, writes, [](const auto& op, const auto& state) { return op.gather(state, PartLanes<C>()); });
  }
  __device__ __forceinline__ auto bind(const X& x) const {
    return on_base(x, [&](const Base& base) { return base.with(state, linear); });
  }

 private:
  template <int N, class Gather>
  static __device__ __forceinline__ TokenState found(const X& x, int64_t row, int cols, int rank, int size, bool writes, const Gather& gather) {
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
    for (int i = threadIdx.x / 32; i < count && first + i < rows; i += blockDim.x / 32) {
      const auto state = TokenState<X>::template by_warp<N>(x, first + i, int(cols), writes);
      if ((threadIdx.x & 31) == 0) states[i] = state;
    }
    __syncthreads();
  }
}

// One row of a source: with what depends on the row found out once, as far as the source lets that be done.
template <class S, class Row>
struct RowOf {
  S source;
  Row row;
};
struct RowZero {
  __device__ __forceinline__ constexpr operator int64_t() const { return 0; }
};
template <class W>
__device__ __forceinline__ auto row_of(const W& w, int64_t row) {
  if constexpr (is_stacked<W>::value) {
    return w.visit(row, [&](const auto& part, int64_t begin) { return row_of(part, row - begin); });
  } else if constexpr (has_at_row<W>::value) {
    return RowOf<std::decay_t<decltype(w.at_row(row))>, RowZero>{w.at_row(row), {}};
  } else {
    return RowOf<W, int64_t>{w, row};
  }
}

// R rows of a matrix, kStep apart, and the packs of them that are under way. Rows beyond the end are read as the last one, packs
// beyond their end as zeros, if these are asked for.
template <class W, int N, int R, int U, bool kZeros, int kStep = 1>
struct GemvRows {
  using One = decltype(row_of(std::declval<const W&>(), kAny));
  using Source = std::decay_t<decltype(std::declval<const One&>().source)>;
  One rows[R];
  Fetched<Source, N> fetched[U][R];

  __device__ __forceinline__ GemvRows(const W& w, unsigned row, unsigned end) : GemvRows(w, row, end, std::make_index_sequence<R>()) {}
  template <size_t... r>
  __device__ __forceinline__ GemvRows(const W& w, unsigned row, unsigned end, std::index_sequence<r...>) : rows{row_of(w, lesser(row + unsigned(r) * kStep, end - 1))...} {}

  __device__ __forceinline__ void ask(int u, int col, int end) {
    if (col < end) {
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) fetched[u][r] = fetch<N>(rows[r].source, rows[r].row, col);
    } else if constexpr (kZeros) {
      memset(&fetched[u], 0, sizeof(fetched[u]));
    }
  }
};

// The tokens of a block: one beyond the end takes part as the last one, and is not written.
template <class P, int M>
struct GemvTokens {
  using State = TokenState<typename P::X>;
  const P& p;
  int64_t first;
  State states[M];

  __device__ __forceinline__ int64_t row(int m) const { return M == 1 ? first : lesser(first + m, p.m - 1); }
  __device__ __forceinline__ decltype(auto) source(int m) const { return states[m].bind(p.x); }
};

// What the warps of a block have summed up, in shared memory. As every block ends with it, its total is made without a branch: warps
// that a block has not count as zeros.
template <class C, int kSums, int kWarps>
struct WarpSums {
  static constexpr int kPitch = (kWarps + 3) / 4 * 4;
  alignas(16) C sums[kSums][kPitch];

  __device__ __forceinline__ void clear_missing() {
    for (int i = threadIdx.x; i < kSums * kPitch; i += blockDim.x) {
      if (i % kPitch >= int(blockDim.x / 32)) sums[i / kPitch][i % kPitch] = C(0);
    }
  }
  __device__ __forceinline__ void put(int i, const C& sum) { sums[i][threadIdx.x / 32] = sum; }
  __device__ __forceinline__ C total(int i) const {
    C sum = C(0);
    KERNELS_UNROLL
    for (int warp = 0; warp < kPitch; warp += 4) {
      Pack<C, 4> four;
      memcpy(four.v, __builtin_assume_aligned(&sums[i][warp], 16), sizeof(four));
      sum = sum + ((four.v[0] + four.v[1]) + (four.v[2] + four.v[3]));
    }
    return sum;
  }
};

// Each of a warp's kSums sums, whose parts its lanes have.
template <int kSums, class To, class Part>
__device__ __forceinline__ void share_parts(To& to, const Part& part) {
  using C = std::decay_t<decltype(part(0))>;
  const Lanes<32> lanes;
  C parts[kSums];
  KERNELS_UNROLL
  for (int i = 0; i < kSums; ++i) parts[i] = part(i);
  const C sum = lanes.sums(parts);
  constexpr int kSharers = 32 / kSums;  // lanes with the same sum
  const int lane = threadIdx.x & 31;
  if (lane % kSharers == 0) to.put(lane / kSharers, sum);
}

// The dot products of R rows, of each matrix, with M tokens: on CUDA cores, in the type of computation.
template <class P, int N, int R, int M>
struct PlainDots {
  using C = typename P::C;
  static constexpr int pack = N, rows = R, tokens = M, max_threads = 512;
  static constexpr int step = 32 * N;     // columns that a warp takes in at a time
  static constexpr bool thrifty = false;  // whether few warps are to share a row
  template <class Weights, int U>
  using Rows = GemvRows<Weights, N, R, U, false>;
  static constexpr int input_pack = pack_within<typename P::X, N>;
  // As few as hardly spill: blocks behind keep the memory busy.
  static constexpr int registers = sizeof(C) > 4 || N == 1 ? 128 : M > 1 ? 80 : !starts_normed<typename P::X> ? 32 : R * P::matrices > 4 ? 96 : 48;
  C sums[P::matrices][M][R] = {};

  static __device__ __forceinline__ unsigned first_row() { return 0; }
  template <class Some>
  static __device__ __forceinline__ void ask(Some& rows, int u, int begin, int end) { rows.ask(u, begin + int(threadIdx.x & 31) * N, end); }

  // Takes in what the warp has asked for from column `begin` on, as number u of what is under way.
  template <class First, class Second>
  __device__ __forceinline__ void add(const First& first, const Second& second, int u, const GemvTokens<P, M>& of, int begin) {
    const int col = begin + int(threadIdx.x & 31) * N;
    if (col >= of.p.k) return;
    KERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      const Pack<C, N> x = read(of.source(m), of.row(m), col);
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[0][m][r] = add_product(sums[0][m][r], first.rows[r].source, first.fetched[u][r], x, first.rows[r].row, col);
        if constexpr (P::matrices == 2) sums[1][m][r] = add_product(sums[1][m][r], second.rows[r].source, second.fetched[u][r], x, second.rows[r].row, col);
      }
    }
  }
  template <class To>
  __device__ __forceinline__ void share(To& to) const {
    share_parts<P::matrices * M * R>(to, [&](int i) { return sums[i / (M * R)][i / R % M][i % R]; });
  }

 private:
  template <class X>
  static __device__ __forceinline__ Pack<C, N> read(const X& x, int64_t token, int col) {
    Pack<C, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; i += input_pack) {
      const Pack<C, input_pack> some = resolve(x, fetch<input_pack>(x, token, col + i), token, col + i);
      KERNELS_UNROLL
      for (int j = 0; j < input_pack; ++j) out.v[i + j] = some.v[j];
    }
    return out;
  }
};

// A block makes R rows of outputs for M tokens.
template <class P, class Dots, int U>
struct GemvBody {
  using C = typename P::C;
  static constexpr int max_threads = Dots::max_threads, registers = Dots::registers;
  static constexpr int step = Dots::step, R = Dots::rows, M = Dots::tokens, under_way = U;
  static constexpr bool thrifty = Dots::thrifty;
  static constexpr int kSums = M * R;  // of each matrix
  static constexpr bool early = true;
  struct Params {
    P problem;
    bool weights_ready;  // before the kernel ahead has ended
  };
  static constexpr int kOut = together<P>;
  static_assert(R % kOut == 0, "pairs are whole");
  static constexpr bool kReads = !std::is_empty<Operands<P, kOut>>::value;
  using Prepared = decltype(prepare<kOut>(sink_end(std::declval<const P&>().out), kAny, kAny));
  static constexpr bool kPrepares = !std::is_same<Prepared, Nothing>::value;
  using Tokens = GemvTokens<P, M>;
  using State = typename Tokens::State;

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ WarpSums<C, P::matrices * kSums, max_threads / 32> sums;
    __shared__ typename State::Scratch scratch;
    __shared__ Alone<Prepared, kPrepares ? kSums / kOut : 1> prepared;
    if (!params.weights_ready) arch::grid_dependency_pass();  // also before ids of experts are read
    const P& p = params.problem;
    const unsigned row = blockIdx.x * R, rows = unsigned(p.n);  // 32 bits: what a block computes before it asks for weights counts
    Tokens tokens{p, (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * M};
    if (by_token<typename P::W> && tokens.first >= p.m) return;
    const auto& weights = p.template weights_for<0>(tokens.first);
    const auto& others = p.template weights_for<P::matrices - 1>(tokens.first);
    typename Dots::template Rows<std::decay_t<decltype(weights)>, U> first(weights, row + Dots::first_row(), rows);
    typename Dots::template Rows<std::decay_t<decltype(others)>, U> second(others, row + Dots::first_row(), rows);
    const int warp = threadIdx.x / 32, stride = int(blockDim.x / 32) * step, cols = int(p.k);
    const auto ask = [&](int u, int begin) {
      Dots::ask(first, u, begin, cols);
      if constexpr (P::matrices == 2) Dots::ask(second, u, begin, cols);
    };
    int begin = warp * step;
    KERNELS_UNROLL
    for (int u = 0; u < U; ++u) ask(u, begin + u * stride);
    if (tokens.first >= p.m) return;  // not before weights are asked for, if they are the same for all
    sums.clear_missing();
    arch::grid_dependency_pass();
    typename State::Team team(scratch);
    KERNELS_UNROLL
    for (int m = 0; m < M; ++m) {  // while the weights are on their way
      tokens.states[m] = State::template by_block<pack_within<typename P::X, Dots::pack>>(team, p.x, tokens.row(m), cols, blockIdx.x == 0 && tokens.first + m < p.m);
    }
    // The first threads will make the results, a row (or a pair) and a token each. What the sink reads for them is asked for now.
    const int64_t token = tokens.first + threadIdx.x / (R / kOut);
    const unsigned output = row + threadIdx.x % (R / kOut) * kOut;
    const bool makes = int(threadIdx.x) < kSums / kOut && token < p.m && output < rows;
    Operands<P, kOut> operands;
    if constexpr (kReads) operands = Result<P>::ask(p, makes ? token : tokens.first, makes ? output : row);
    if constexpr (kPrepares) {
      if (makes) prepared.items[threadIdx.x] = prepare<kOut>(sink_end(p.out), token, output);  // read again by the same thread
    }
    Dots dots;
    for (; begin < cols; begin += U * stride) {
      KERNELS_UNROLL
      for (int u = 0; u < U; ++u) {
        const int at = begin + u * stride;
        if (at >= cols) break;
        dots.add(first, second, u, tokens, at);
        if (at + U * stride < cols) ask(u, at + U * stride);
      }
    }

    dots.share(sums);
    __syncthreads();
    if (!makes) return;
    if constexpr (!kReads) operands = Result<P>::ask(p, token, output);
    const Result<P> result{p, token, output, operands};
    Pack<C, kOut> totals[P::matrices];
    KERNELS_UNROLL
    for (int i = 0; i < P::matrices; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kOut; ++j) totals[i].v[j] = sums.total(i * kSums + threadIdx.x * kOut + j);
    }
    result.put_sums(totals, prepared.items[kPrepares ? threadIdx.x : 0]);
  }
};

}  // namespace detail
KERNELS_END
