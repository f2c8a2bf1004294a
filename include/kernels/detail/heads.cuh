// norm_heads(): each head of a row is held in the registers of a few lanes, reduced to its state, and written to the
// sink.
//
//   token:  | head 0       | head 1       | ...      a power of two of lanes for a head, N columns for each
//           | l0 l1 .. l15 | l0 l1 .. l15 |
//
// The two columns of a rotary pair, half a head apart or adjacent, are read by the same lane and are adjacent in its
// pack.
#pragma once

#include "../exec.cuh"
#include "../heads.h"
#include "pointwise.cuh"
#include "row/bodies.cuh"

KERNELS_BEGIN
namespace detail {

template <class Op_, class Source_, class Sink_>
struct HeadProblem {
  using Op = Op_;
  using Source = Source_;
  using Sink = Sink_;
  using C = compute_type<Source>;
  Op op;
  Source source;
  Sink sink;
  HeadShape shape;
  Count<C> columns;  // of a head
};

// A lane has packs of N values in the sink's order, with the columns of a pair adjacent. In the source they are two
// runs of N / 2 columns.
template <class P, int N>
struct HeadBody {
  using C = typename P::C;
  using Source = typename P::Source;
  static constexpr int max_threads = 128, registers = sizeof(C) > 4 ? 128 : 64;
  static constexpr int kHalf = N / 2, kPacks = kMaxHeadDim / 32 / N;
  static constexpr bool kSingles =
      N == 2 && !wants_pairs<typename P::Sink>();  // a sink without pairs may take only one column at a time
  struct Params {
    P problem;
    int lanes_log2;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    const P& p = params.problem;
    const GroupLanes<C> lanes(1 << params.lanes_log2, p.columns);
    const int64_t all = p.shape.tokens * p.shape.heads, groups = max_threads >> params.lanes_log2;
    KERNELS_ROLLED
    for (int64_t first = int64_t(blockIdx.x) * groups; first < all; first += int64_t(gridDim.x) * groups) {
      // Lanes without a head take part in the exchanges with the last head, and do not write it.
      const int64_t index = first + lanes.group_of(threadIdx.x);
      one_head(p, lanes, index < all ? index : all - 1, index < all);
    }
  }

 private:
  static __device__ __forceinline__ void one_head(const P& p, const GroupLanes<C>& lanes, int64_t index, bool writes) {
    const int64_t token = quotient(index, p.shape.heads);
    const int head = int(index - token * p.shape.heads), dim = int(p.shape.dim);
    const auto has = [&](int i) { return (i * lanes.count() + lanes.rank()) * N < dim; };
    const auto column = [&](int i) { return int64_t(head) * dim + (i * lanes.count() + lanes.rank()) * N; };
    Fetched<Source, kHalf> fetched[kPacks][2];
    Runs at[kPacks];
    Pack<C, N> values[kPacks];
    KERNELS_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      if (!has(i)) continue;
      at[i] = runs(p, column(i));
      fetched[i][0] = fetch<kHalf>(p.source, token, at[i].first);
      fetched[i][1] = fetch<kHalf>(p.source, token, at[i].second);
    }
    KERNELS_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      values[i] = broadcast<N>(C(0));
      if (!has(i)) continue;
      const Pack<C, kHalf> a = resolve(p.source, fetched[i][0], token, at[i].first),
                           b = resolve(p.source, fetched[i][1], token, at[i].second);
      KERNELS_UNROLL
      for (int j = 0; j < N; ++j)
        values[i].v[j] = at[i].apart ? (j % 2 == 0 ? a : b).v[j / 2] : (j < kHalf ? a : b).v[j % kHalf];
    }
    if (p.shape.normed > 0) {
      typename P::Op::State seen;
      take_packs<kPacks>(p.op, seen, values, has);
      const auto state = p.op.gather(seen, lanes);
      if (head < p.shape.normed) {
        const auto result = p.op.finish(state, p.columns);
        const auto linear = p.op.linear(state, result);
        KERNELS_UNROLL
        for (int i = 0; i < kPacks; ++i) values[i] = linear(p.op.center(values[i], state));
        if (writes && lanes.rank() == 0) p.op.write_row(result, token * p.shape.normed + head);
      }
    }
    if constexpr (HeadScales<typename P::Sink>::computes_scales) {
      HeadScales<typename P::Sink> scales;
      put_head(scales.collecting(p.sink), values, token, has, column);
      scales.gather(lanes);
      if (!writes) return;
      if (lanes.rank() == 0) scales.write(p.sink, token, int64_t(head) * dim, dim);
      put_head(scales.writing(p.sink), values, token, has, column);
    } else if (writes) {
      put_head(p.sink, values, token, has, column);
    }
  }
  template <class Sink, class Has, class Column>
  static __device__ __forceinline__ void put_head(const Sink& sink, const Pack<C, N> (&values)[kPacks], int64_t token,
                                                  const Has& has, const Column& column) {
    KERNELS_ROLLED  // the sink is most of the code
    for (int i = 0; i < kPacks; ++i) {
      if (has(i)) put_pack(sink, values[i], token, column(i));
    }
  }

  struct Runs {
    int64_t first, second;
    bool apart;
  };
  static __device__ __forceinline__ Runs runs(const P& p, int64_t col) {
    const ColumnPair pair = pair_at(p.sink, col);
    const bool apart = pair.second != pair.first + 1;
    return {pair.first, apart ? pair.second : pair.first + kHalf, apart};
  }
  template <class Sink>
  static __device__ __forceinline__ void put_pack(const Sink& sink, const Pack<C, N>& v, int64_t row, int64_t col) {
    if constexpr (kSingles) {
      put(sink, Pack<C, 1>{{v.v[0]}}, row, col);
      put(sink, Pack<C, 1>{{v.v[1]}}, row, col + 1);
    } else {
      put(sink, v, row, col);
    }
  }
};

// The most blocks for each multiprocessor. They take one head after the other, as the setup before a thread's first
// head is a fifth of its instructions. H200, bench_norm_heads, 32/8 heads of 128 columns: 8,192 tokens took 122 us, 129
// with a block for every eight heads, 117 with twice as many blocks; 1,024 tokens 17.5, 18.2 and 18.2.
constexpr int kHeadBlocks = 32;

template <int N, class P>
Status start_heads(const Exec& ex, const P& problem) {
  using Body = HeadBody<P, N>;
  const int64_t packs = (problem.shape.dim + N - 1) / N;
  int lanes_log2 = 0;
  while (lanes_log2 < 5 && int64_t(1) << lanes_log2 < packs) ++lanes_log2;
  const int64_t groups = Body::max_threads >> lanes_log2, all = problem.shape.tokens * problem.shape.heads;
  Launch how;
  how.threads = Body::max_threads;
  how.grid.x = unsigned(lesser<int64_t>((all + groups - 1) / groups, ex.device().sm_count * kHeadBlocks));
  return launch<Body>(ex, how, {problem, lanes_log2});
}

}  // namespace detail
KERNELS_END
