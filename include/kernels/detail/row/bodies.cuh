// The row engine's kernels: read a row, reduce it to a state, write the row. They differ in where the row waits between
// the two passes:
//
//   GroupBody     | row | row | row | row |   registers of 1 to 32 lanes; a warp has several rows
//                  lanes  lanes ...
//   BlockBody     | warp 0 | warp 1 | ... |   registers of a block, or of the blocks of a cluster; a warp's
//                   lane 0 1 2 ... 31, 0 1 2 ... 31, ...     packs are adjacent, K of them for a thread
//   StreamBody    | kept in shared memory | read again |   shared out to warps alike; as much is kept as fits
//   PartialBody,  | chunk 0 | chunk 1 | ... |   nowhere; many blocks share a row: two launches, of which
//   FinishBody        block     block           the first leaves each chunk's state in the workspace
//
// Reading again is fast: the row comes out of a cache (H200: the L1 up to 32,768 halves, the L2 up to 131,072), no
// registers hold it meanwhile, and occupancy is higher. So StreamBody serves all rows that are too long for a warp, and
// its speed depends on how few instructions there are for each pack.
//
//   kEnds:   ....|head|  pack  |  pack  |  pack  |tail|....      | : multiples of 16 bytes
//
// Rows that do not begin or end at multiples of 16 bytes (an odd number of columns, say) are moved in wide packs as
// well, from the first aligned address on; head and tail, the row's edge, are moved in single elements, one for a
// thread. Where packs begin depends on the row, and functors other than the one that leads take packs at any column
// (concepts.h).
#pragma once

#include "../../core/row_ends.h"
#include "../../core/row_policy.h"
#include "../../functor.h"
#include "../team.cuh"

KERNELS_BEGIN
namespace detail {

template <class Op_, class Source_, class Sink_>
struct RowProblem {
  using Op = Op_;
  using Source = Source_;
  using Sink = Sink_;
  using C = compute_type<Source>;
  using Map = std::decay_t<decltype(sink_map(std::declval<const Sink&>()))>;
  using End = SinkEnd<Sink>;
  static constexpr bool row_sink = is_row_sink<End>;

  Op op;
  Source source;
  Sink sink;
  int64_t rows;
  int64_t cols;
  Count<C> columns;  // of a row, for the ops

  // One row of it, for a thread whose packs begin at column `col`.
  template <int N>
  __device__ __forceinline__ RowProblem placed(int64_t row, int col) const {
    return {op, detail::placed<N>(source, row, col), detail::placed<N>(sink, row, col), rows, cols, columns};
  }
};

// What a sink keeps per row, or nothing.
template <class End, bool = is_row_sink<End>>
struct SinkState {
  using type = Nothing;
};
template <class End>
struct SinkState<End, true> {
  using type = typename End::State;
};

template <class P>
using Scratch = TeamScratch<largest_state<typename P::Op::State, typename SinkState<typename P::End>::type>()>;

template <class Source, int N>
using Fetched = decltype(fetch<N>(std::declval<const Source&>(), kAny, kAny));

// The source of the first of two passes over a row, and that of the second.
template <class Source>
using FirstPass = std::decay_t<decltype(cached(std::declval<const Source&>()))>;
template <class Source>
using SecondPass = std::decay_t<decltype(second_pass(std::declval<const Source&>()))>;

// A source that may be read any number of times: it changes nothing on the way.
template <class Source>
constexpr bool repeatable = !has_effects<Source> && !loaded_once<Source>;

// ---- the packs of one thread ---------------------------------------------------------------------------------------

// kCount packs that lie in the row: at column `first` and `stride` columns apart. How many there are is known at compile
// time, so that there is no branch around a pack. Columns fit 31 bits; only their products with rows do not.
template <int kCount>
struct Run {
  static constexpr int count = kCount;
  static constexpr bool whole = true;
  int first, stride;

  __device__ __forceinline__ int col(int k) const { return first + k * stride; }
  __device__ __forceinline__ constexpr bool has(int) const { return true; }
};

// kCount packs of which those before `end` lie in the row, the first one in any case. In place of the others there is the `last` one
// before it, which does no harm to what only reads: so there is no branch around a pack here either, but around what comes of it.
template <int kCount>
struct PartRun {
  static constexpr int count = kCount;
  static constexpr bool whole = false;
  int first, stride, end, last;

  __device__ __forceinline__ int col(int k) const { return k == 0 ? first : lesser(first + k * stride, last); }
  __device__ __forceinline__ bool has(int k) const { return k == 0 || first + k * stride < end; }
};

// Splits the packs at first, first + stride, ... before `end` into runs of K, then K / 2, K / 4 ... : f(run).
template <int K, class F>
__device__ __forceinline__ void each_run(int first, int stride, int end, F f) {
  for (; first + (K - 1) * stride < end; first += K * stride) f(Run<K>{first, stride});
  if constexpr (K > 1) each_run<K / 2>(first, stride, end, f);
}

// The same for a lane of a warp whose lanes have their packs side by side: whole runs while all lanes have them, and one run of what is
// left. Lanes never go different ways around a run then.
template <int N, int K, class F>
__device__ __forceinline__ void each_run_of_warp(int first, int lane, int end, F f) {
  constexpr int stride = 32 * N;
  for (; first + (31 - lane) * N + (K - 1) * stride < end; first += K * stride) f(Run<K>{first, stride});
  if (first < end) f(PartRun<K>{first, stride, end, end - N});
}

// Of packs that are all there.
struct Always {
  __device__ __forceinline__ constexpr bool operator()(int) const { return true; }
};

// Every fetch of a run is issued before the first value is used.
template <int N, class Source, class At>
__device__ __forceinline__ void fetch_run(Fetched<Source, N>* fetched, const Source& source, int64_t row, const At& at) {
  KERNELS_UNROLL
  for (int k = 0; k < At::count; ++k) fetched[k] = fetch<N>(source, row, at.col(k));
}

// Of packs that are all read, and of which some do not count.
template <class At>
struct Chosen {
  const At& at;
  __device__ __forceinline__ bool operator()(int k) const { return at.has(k); }
};
template <class Has>
struct IsChosen : std::false_type {};
template <class At>
struct IsChosen<Chosen<At>> : std::true_type {};

template <class C>
__device__ __forceinline__ C choose(bool yes, C a, C b) { return yes ? a : b; }
template <class C, int N>
__device__ __forceinline__ Pack<C, N> choose(bool yes, const Pack<C, N>& a, const Pack<C, N>& b) {
  Pack<C, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) out.v[i] = yes ? a.v[i] : b.v[i];
  return out;
}

// Packs' values, as a row op takes them in. has(k): whether there is a pack k; if not even pack 0, what is there is finite.
template <class C, int N, int kPacks, class Has>
struct Taken {
  const Pack<C, N>* values;
  Has has;

  template <class A, class F>
  __device__ __forceinline__ A fold(A folded, F f) const {
    KERNELS_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (IsChosen<Has>::value) folded = choose(has(k), f(folded, values[k]), folded);
      else if (has(k)) folded = f(folded, values[k]);
    }
    return folded;
  }
  // The mean of a quarter of the values, to take deviations from: exact when they are equal, and safe from overflow. The
  // first one takes the place of what is missing.
  __device__ __forceinline__ C typical() const {
    constexpr int most = N * kPacks, few = most >= 32 ? 16 : most >= 16 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
    Pack<C, few> some;
    KERNELS_UNROLL
    for (int i = 0; i < few; ++i) some.v[i] = (has(i / N) ? values[i / N].v[i % N] : values[0].v[0]) * C(1.0 / few);
    return sum(some);
  }
  __device__ __forceinline__ Count<C> count() const {
    if constexpr (std::is_same<Has, Always>::value) {
      return {C(N * kPacks), C(1.0 / (N * kPacks))};
    } else {
      int packs = 0;
      KERNELS_UNROLL
      for (int k = 0; k < kPacks; ++k) packs += has(k);
      return Count<C>(N * packs);
    }
  }
};
template <int kPacks, class Op, class C, int N, class Has>
__device__ __forceinline__ void take_packs(const Op& op, typename Op::State& running, const Pack<C, N>* values, const Has& has) {
  op.take(running, Taken<C, N, kPacks, Has>{values, has});
}

// Takes a fetched run into a row's running state, and leaves it as values.
template <int N, class Op, class Source, class C, class At>
__device__ __forceinline__ void take_run(const Op& op, const Source& source, typename Op::State& running, const Fetched<Source, N>* fetched,
                                         Pack<C, N>* values, int64_t row, const At& at) {
  KERNELS_UNROLL
  for (int k = 0; k < At::count; ++k) values[k] = resolve(source, fetched[k], row, at.col(k));
  if constexpr (At::whole) take_packs<At::count>(op, running, values, Always{});
  else take_packs<At::count>(op, running, values, Chosen<At>{at});
}

// ---- the second half of every body: from the state of the row to the sink ------------------------------------------

template <class P, int N>
using Operands = decltype(fetch_operands<N>(std::declval<const typename P::Map&>(), kAny, kAny));

// f(pack, operands, column, whether it is there) for a run whose packs value(k) gives. What the sink's maps read for a pack is prefetched while the
// pack before it is worked on: a store in between would keep the compiler from doing so.
template <int N, class P, class At, class Value, class F>
__device__ __forceinline__ void show_run(const P& p, int64_t row, const At& at, const Value& value, const F& f) {
  const auto& map = sink_map(p.sink);
  constexpr bool ahead = At::count > 2;  // a shorter run has no registers for that, nor much to gain
  Operands<P, N> operands[2];
  if constexpr (ahead) operands[0] = fetch_operands<N>(map, row, at.col(0));
  KERNELS_UNROLL
  for (int k = 0; k < At::count; ++k) {
    if constexpr (!ahead) operands[k % 2] = fetch_operands<N>(map, row, at.col(k));
    else if (k + 1 < At::count) operands[(k + 1) % 2] = fetch_operands<N>(map, row, at.col(k + 1));
    if constexpr (At::whole) f(value(k), operands[k % 2], at.col(k), std::true_type());
    else if constexpr (!P::row_sink && !has_effects<typename P::Map>) f(value(k), operands[k % 2], at.col(k), at.has(k));
    else if (at.has(k)) f(value(k), operands[k % 2], at.col(k), std::true_type());
  }
}

// visit(f) calls f(pack, what the sink's maps read for it, column, whether it is there) for every pack of the thread, centered on `local`, and
// again whenever it is asked to; visit(f, true_type) one pack after the other, as they are cut when they are written: then there are
// branches around every pack, and more at a time gain nothing. kCuts: whether a body has both.
template <bool kCuts = false, class P, class Local, class State, class Visit, class Reduce>
__device__ __forceinline__ void finish_row(const P& p, const Local& local, const State& state, int64_t row, bool leader,
                                           const Visit& visit, const Reduce& reduce) {
  const auto& map = sink_map(p.sink);
  const auto& sink = sink_end(p.sink);
  const auto result = p.op.finish(state, p.columns);
  const auto linear = p.op.linear(local, result);
  if constexpr (P::row_sink) {
    typename P::End::State sink_state;
    visit([&](const auto& x, const auto& operands, int col, auto) {
      sink.accumulate(sink_state, apply_map(without_effects(map), linear(x), operands, row, col), x.size);
    }, std::false_type());
    sink_state = reduce(sink, sink_state);
    if (leader) sink.write_row(sink_state, row);
    const auto sink_result = sink.finish(sink_state);
    visit([&](const auto& x, const auto& operands, int col, auto) {
      sink.store(apply_map(map, linear(x), operands, row, col), sink_result, row, col);
    }, std::false_type());
  } else {
    const auto write = [&](const auto& to, auto cut) {
      visit([&](const auto& x, const auto& operands, int col, auto there) {
        put_if(there, to, apply_map(map, linear(x), operands, row, col), row, col);
      }, cut);
    };
    if constexpr (!kCuts || !has_whole<typename P::End>::value) write(sink, std::false_type());
    else if (sink.is_whole()) write(sink.whole(), std::false_type());
    else write(sink, std::true_type());
  }
  if (leader) p.op.write_row(result, row);
}

// Registers per thread when K packs are worked on at a time with `values` compute values among what is kept. Found by
// compiling: no more than is needed without spilling, so that many threads fit.
template <class P, int N, int K>
constexpr int registers_for(int values, int others) {
  if (sizeof(typename P::C) > 4) return 128;
  if (N * sizeof(typename P::C) < 16) others += 32;  // more addresses for the same bytes
  const int fetched = (int(sizeof(Fetched<typename P::Source, N>)) + 3) / 4 * K;
  const int wanted = others + (values > fetched ? values : fetched);
  return wanted <= 48 ? 48 : wanted <= 56 ? 56 : wanted <= 64 ? 64 : wanted <= 80 ? 80 : 128;
}
constexpr int threads_for(int registers) { return registers <= 64 ? 1024 : registers <= 80 ? 768 : 512; }

// A body whose functors may change themselves: each thread works on its own copy of them, made bit by bit as a kernel's arguments
// are, whatever their copy constructors are for.
template <class Body>
struct OnOwnCopy : Body {
  using Params = typename Body::Params;
  static __device__ __forceinline__ void run(const Params& given) {
    alignas(Params) unsigned char own[sizeof(Params)];
    memcpy(own, &given, sizeof(Params));
    Body::run(*reinterpret_cast<const Params*>(own));
  }
};

// How many columns a row has, for a team's exchange. That may be pointed to, and what is pointed to is not in registers: so a thread
// with its own copy of the problem passes on a copy of this.
template <class P>
__device__ __forceinline__ decltype(auto) columns_of(const P& p) {
  if constexpr (changes_itself<typename P::Source> || changes_itself<typename P::Sink>) return Count<typename P::C>(p.columns);
  else return (p.columns);
}

// ---- what is left of a row on both sides of its packs ----------------------------------------------------------------

// At most one element for a thread; it waits in a register for the second half.
template <class P, bool kEnds>
class Edge {
 public:
  __device__ __forceinline__ Edge(const RowEnds& row, int rank) : col_(row.column(rank)), there_(unsigned(rank) < unsigned(row.left())) {}

  __device__ __forceinline__ void fetch(const P& p, int64_t row) {
    if (there_) fetched_ = detail::fetch<1>(p.source, row, col_);
  }
  __device__ __forceinline__ void take(const P& p, typename P::Op::State& running, int64_t row) {
    if (!there_) return;
    value_ = resolve(p.source, fetched_, row, col_);
    take_packs<1>(p.op, running, &value_, Always{});
  }
  __device__ __forceinline__ void center(const P& p, const typename P::Op::State& state) {
    if (there_) value_ = p.op.center(value_, state);
  }
  // f(pack, operands, column), of center(pack).
  template <class Center, class F>
  __device__ __forceinline__ void show(const P& p, int64_t row, const Center& center, const F& f) const {
    if (there_) f(center(value_), fetch_operands<1>(sink_map(p.sink), row, col_), col_, std::true_type());
  }

 private:
  int col_;
  bool there_;
  Fetched<typename P::Source, 1> fetched_;
  Pack<typename P::C, 1> value_;
};
// Of a row that is packs throughout.
template <class P>
class Edge<P, false> {
 public:
  __device__ __forceinline__ void fetch(const P&, int64_t) const {}
  __device__ __forceinline__ void take(const P&, const typename P::Op::State&, int64_t) const {}
  __device__ __forceinline__ void center(const P&, const typename P::Op::State&) const {}
  template <class Center, class F>
  __device__ __forceinline__ void show(const P&, int64_t, const Center&, const F&) const {}
};

// What a body's parameters have besides, where rows have edges.
template <bool kEnds>
struct Phase {
  RowPhase phase;
};
template <>
struct Phase<false> {};

// ---- a row in registers --------------------------------------------------------------------------------------------

// At most K packs, which a thread holds in registers. kCount: every thread of the team holds so many; 0: that differs.
template <int K, int kCount>
struct Place {
  int first, stride, end;

  __device__ __forceinline__ bool has(int k) const { return kCount > 0 || first + k * stride < end; }
  // f(run, number of its first pack)
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    if constexpr (kCount > 0) {
      f(Run<kCount>{first, stride}, 0);
    } else {
      KERNELS_UNROLL
      for (int k = 0; k < K; ++k) {
        if (has(k)) f(Run<1>{first + k * stride, stride}, k);
      }
    }
  }
};

template <int N, int K, int kCount, class Source>
__device__ __forceinline__ void fetch_row(Fetched<Source, N> (&fetched)[K], const Source& source, int64_t row, const Place<K, kCount>& place) {
  place.each([&](const auto& at, int k) { fetch_run<N>(fetched + k, source, row, at); });
}

// From what a thread has fetched of a row to the sink, with the row's values in registers on the way.
template <int N, int K, int kCount, class P, bool kEnds, class Reduce>
__device__ __forceinline__ void hold_row(const P& p, const Fetched<typename P::Source, N> (&fetched)[K], Edge<P, kEnds> edge, int64_t row,
                                         const Place<K, kCount>& place, bool writes, bool leader, const Reduce& reduce) {
  Pack<typename P::C, N> values[K];
  if constexpr (kCount < K) {
    KERNELS_UNROLL
    for (int k = 0; k < K; ++k) values[k] = broadcast<N>(typename P::C(0));  // or the compiler carries what is not there from row to row
  }
  typename P::Op::State running;
  if (repeatable<typename P::Source> || writes) {
    // One run of a single pack at a time takes fewer registers where an op looks twice.
    if constexpr (kCount > 0 || P::Op::folds_twice) {
      place.each([&](const auto& at, int k) { take_run<N>(p.op, p.source, running, fetched + k, values + k, row, at); });
    } else {
      place.each([&](const auto& at, int k) { values[k] = resolve(p.source, fetched[k], row, at.col(0)); });
      take_packs<K>(p.op, running, values, [&place](int k) { return place.has(k); });
    }
    edge.take(p, running, row);
  }
  // What costs much is done while the others are still on their way; the rest on the row's state, which is the better one.
  constexpr bool late = P::Op::centers_fast;
  KERNELS_UNROLL
  for (int k = 0; k < K; ++k) values[k] = late ? values[k] : p.op.center(values[k], running);
  if constexpr (!late) edge.center(p, running);

  // What little the sink reads is prefetched before the barrier, so that no thread waits for it afterwards.
  const auto& map = sink_map(p.sink);
  constexpr bool early = K * sizeof(Operands<P, N>) <= 32;
  Operands<P, N> operands[early ? K : 1];
  const auto fetch_early = [&](const auto& at, int from) {
    KERNELS_UNROLL
    for (int k = 0; k < at.count; ++k) operands[from + k] = fetch_operands<N>(map, row, at.col(k));
  };
  if constexpr (early) place.each(fetch_early);
  const auto state = reduce(p.op, running);
  const auto centered = [&](int k) { return late ? p.op.center(values[k], state) : values[k]; };
  const auto visit = [&](const auto& f, auto) {
    if (!writes) return;
    place.each([&](const auto& at, int from) {
      if constexpr (early) {
        KERNELS_UNROLL
        for (int k = 0; k < at.count; ++k) f(centered(from + k), operands[from + k], at.col(k), std::true_type());
      } else {
        show_run<N>(p, row, at, [&](int k) { return centered(from + k); }, f);
      }
    });
    edge.show(p, row, [&](const auto& value) { return late ? p.op.center(value, state) : value; }, f);
  };
  finish_row(p, late ? state : running, state, row, leader, visit, reduce);
}

// A row per group of 1 to 32 lanes, a power of two. kAll: every lane holds K packs, and how many lanes there are, two at
// least, is known at compile time as well. kEnds: a row has edges, no more elements than there are lanes.
template <class P, int N, int K, bool kAll, bool kEnds = false>
struct GroupBody {
  static_assert(!kEnds || !kAll, "rows with edges differ from each other");
  using C = typename P::C;
  using Source = typename P::Source;
  static constexpr int max_threads = 128;
  static constexpr int operands = sizeof(Operands<P, N>) / 4;
  // Whole rows are short: it counts that all their blocks are under way at once.
  static constexpr bool one_tensor = sizeof(Fetched<Source, N>) <= 16;
  static constexpr int registers =
      kAll && sizeof(C) == 4 && one_tensor ? 40 : registers_for<P, N, K>(N * K + operands, (one_tensor ? 28 : 36) + (kEnds ? 16 : 0));
  struct Params : Phase<kEnds> {
    P problem;
    int lanes_log2;
    Params(const P& p, int log2, const Phase<kEnds>& phase) : Phase<kEnds>(phase), problem(p), lanes_log2(log2) {}
  };

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (kAll) whole_rows<2>(params);
    else rows(params, GroupLanes<C>(1 << params.lanes_log2, params.problem.columns));
  }

 private:
  template <int kLanes>
  static __device__ __forceinline__ void whole_rows(const Params& params) {
    if constexpr (kLanes < 32) {
      if (1 << params.lanes_log2 != kLanes) return whole_rows<2 * kLanes>(params);
    }
    rows(params, FullLanes<C, kLanes, kLanes * N * K>());
  }

  // Rows of one pass lie side by side, so that neighbouring groups touch neighbouring memory. Groups without a row take part
  // in the exchanges with the last row, which they do not write.
  template <class L>
  static __device__ __forceinline__ void rows(const Params& params, const L& lanes) {
    const P& p = params.problem;
    const int groups = blockDim.x / lanes.count();
    for (int64_t first = int64_t(blockIdx.x) * groups; first < p.rows; first += int64_t(gridDim.x) * groups) {
      const int thread = arch::thread_here();
      const int lane = thread & (lanes.count() - 1);
      const int64_t mine = first + lanes.group_of(thread);
      const auto reduce = [&](const auto& op, const auto& state) { return op.gather(state, lanes); };
      const bool has = mine < p.rows;
      const int64_t row = has ? mine : p.rows - 1;
      const auto go = [&](const P& p, const auto& place, auto edge) {
        Fetched<Source, N> fetched[K];
        if (repeatable<Source> || has) {
          fetch_row<N>(fetched, p.source, row, place);
          edge.fetch(p, row);
        }
        hold_row<N>(p, fetched, edge, row, place, has, has && lane == 0, reduce);
      };
      if constexpr (kEnds) {
        const RowEnds ends(params.phase.at(row), N, int(p.cols));
        const Place<K, 0> place{ends.head + lane * N, lanes.count() * N, ends.end};
        go(p.template placed<N>(row, place.first), place, Edge<P, true>(ends, lane));
      } else {
        go(p, Place<K, kAll ? K : 0>{lane * N, lanes.count() * N, int(p.cols)}, Edge<P, false>());
      }
    }
  }
};

// The packs of a thread of a team, which lie at constant distances.
template <int N>
struct Slice {
  int first, end;

  template <class Team>
  __device__ __forceinline__ Slice(const Team& team, int width, int warp_width, int from, int to) {
    const LaneColumns mine(team.block(), team.warp(), team.lane(), N, width, warp_width, from, to);
    first = arch::opaque(mine.first);
    end = mine.end;
  }
};

// One row per block or cluster, in registers.
template <class P, int N, int K>
struct BlockBody {
  using C = typename P::C;
  static constexpr int registers = registers_for<P, N, K>(N * K, 28);
  static constexpr int max_threads = threads_for(registers);
  struct Params {
    P problem;
    int width, warp_width;
    int count;  // how many packs every thread of a block holds whose columns lie in the row; 0: that differs
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    BlockTeam team(scratch);
    const bool whole = params.width * (team.block() + 1) <= params.problem.cols;
    counted<K>(params, team, whole ? params.count : 0);
  }

 private:
  // Half a thread's packs and more are worth code of their own, where packs are few.
  template <int kCount, class Team>
  static __device__ __forceinline__ void counted(const Params& params, Team& team, int count) {
    if (count == kCount) rows<kCount>(params, team);
    else if constexpr (kCount <= K / 2 || N * sizeof(C) < 16) rows<0>(params, team);
    else counted<kCount - 1>(params, team, count);
  }

  template <int kCount, class Team>
  static __device__ __forceinline__ void rows(const Params& params, Team& team) {
    const P& p = params.problem;
    const auto reduce = [&](const auto& op, const auto& seen) { return team.template reduce<kCount * 32 * N>(op, seen, columns_of(p)); };
    const bool leader = team.rank() == 0 && team.block() == 0;
    for (int64_t row = team.cluster(); row < p.rows; row += team.clusters()) {
      const Slice<N> slice(team, params.width, params.warp_width, 0, int(p.cols));
      const Place<K, kCount> place{slice.first, 32 * N, slice.end};
      Fetched<typename P::Source, N> fetched[K];
      fetch_row<N>(fetched, p.source, row, place);
      hold_row<N>(p, fetched, Edge<P, false>(), row, place, true, leader, reduce);
    }
  }
};

// ---- a row in shared memory, or read again -------------------------------------------------------------------------

// Each thread goes through its part of the row K packs at a time; the first `kept` times it leaves what it fetched in
// shared memory, where only itself will look for it; but nothing of rows that have edges.
template <class P, int N, int K, bool kEnds = false>
struct StreamBody {
  using C = typename P::C;
  using Source = typename P::Source;
  using Kept = Fetched<Source, N>;
  static constexpr int registers = registers_for<P, N, K>(P::Op::folds_twice ? N * K : 24, (K * N > 32 ? 32 : 24) + (kEnds ? P::Op::folds_twice ? 8 : 16 : 0));
  static constexpr int max_threads = threads_for(registers);
  struct Params : Phase<kEnds> {
    P problem;
    int width, warp_width;
    int kept;
    Params(const P& p, const RowPlan& plan, const Phase<kEnds>& phase)
        : Phase<kEnds>(phase), problem(p), width(plan.width), warp_width(plan.warp_width), kept(plan.kept) {}
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    BlockTeam team(scratch);
    const auto reduce = [&](const auto& op, const auto& state) { return team.reduce(op, state, columns_of(params.problem)); };
    const bool leader = team.rank() == 0 && team.block() == 0;

    for (int64_t row = team.cluster(); row < params.problem.rows; row += team.clusters()) {
      const auto ends = [&] {
        if constexpr (kEnds) return RowEnds(params.phase.at(row), N, int(params.problem.cols));
        else return RowEnds::none(int(params.problem.cols));
      }();
      const Slice<N> slice(team, params.width, params.warp_width, ends.head, ends.end);
      decltype(auto) p = [&]() -> decltype(auto) {
        if constexpr (kEnds) return params.problem.template placed<N>(row, slice.first);
        else return (params.problem);
      }();
      const auto& source = cached(p.source);
      const auto& pure = without_effects(p.source);
      const auto& again = second_pass(p.source);
      // The last warp of a block has the fewest packs.
      auto edge = [&] {
        if constexpr (kEnds) return Edge<P, true>(ends, team.block() == 0 ? team.rank() - (team.size() - 32) : -1);
        else return Edge<P, false>();
      }();
      // f(run, where its packs wait, one after the other `size()` apart); returns the first column after those runs.
      const auto each_kept = [&]([[maybe_unused]] const auto& f) {
        if constexpr (kEnds) return slice.first;
        Kept* here = reinterpret_cast<Kept*>(dynamic_shared) + team.rank();
        int first = slice.first, i = 0;
        for (; i < params.kept && first + (K - 1) * 32 * N < slice.end; ++i, first += K * 32 * N, here += K * team.size()) {
          f(Run<K>{first, 32 * N}, here);
        }
        if constexpr (loaded_once<Source>) {  // the packs of a last, shorter step as well
          for (; i < params.kept && first < slice.end; first += 32 * N, here += team.size()) f(Run<1>{first, 32 * N}, here);
        }
        return first;
      };

      // The packs that do not wait in shared memory. In a warp's last run a lane may read a pack of another: not where reading has effects.
      const auto each_other = [&](int first, const auto& f) {
        if constexpr (kEnds && repeatable<Source>) each_run_of_warp<N, K>(first, team.lane(), slice.end, f);
        else each_run<K>(first, 32 * N, slice.end, f);
      };

      typename P::Op::State running;
      const auto take = [&](const auto& from, const auto& fetched, const auto& at) {
        Pack<C, N> values[at.count];
        take_run<N>(p.op, from, running, fetched, values, row, at);
      };
      edge.fetch(p, row);
      const int rest = each_kept([&](const auto& at, Kept* here) {
        Kept fetched[at.count];
        fetch_run<N>(fetched, p.source, row, at);
        KERNELS_UNROLL
        for (int k = 0; k < at.count; ++k) here[k * team.size()] = fetched[k];
        take(p.source, fetched, at);
      });
      each_other(rest, [&](const auto& at) {
        Fetched<FirstPass<Source>, N> fetched[at.count];
        fetch_run<N>(fetched, source, row, at);
        take(source, fetched, at);
      });
      edge.take(p, running, row);
      const auto state = reduce(p.op, running);

      const auto visit = [&](const auto& f, [[maybe_unused]] auto cut) {
        const auto show = [&](const auto& from, const auto& fetched, const auto& at) {
          show_run<N>(p, row, at, [&](int k) { return p.op.center(resolve(from, fetched[k], row, at.col(k)), state); }, f);
        };
        const int rest = each_kept([&](const auto& at, const Kept* here) {
          Kept fetched[at.count];
          KERNELS_UNROLL
          for (int k = 0; k < at.count; ++k) fetched[k] = here[k * team.size()];
          show(pure, fetched, at);
        });
        const auto read_again = [&](const auto& at) {
          Fetched<SecondPass<Source>, N> fetched[at.count];
          fetch_run<N>(fetched, again, row, at);
          show(again, fetched, at);
        };
        if constexpr (decltype(cut)::value && repeatable<Source>) each_run<1>(rest, 32 * N, slice.end, read_again);
        else each_other(rest, read_again);
        edge.show(p, row, [&](const auto& value) { return p.op.center(value, state); }, f);
      };
      finish_row<kEnds>(p, state, state, row, leader, visit, reduce);
    }
  }
};

// ---- a row cut into chunks for many blocks -------------------------------------------------------------------------

// Where there are clusters these share a long row, and the bodies have no code.

template <class P>
struct SplitParams {
  P problem;
  typename P::Op::State* partial;  // rows x chunks
  int chunks;
  int width;                       // columns per chunk
};

// The columns of a piece, a row's chunk; its threads take packs in turn.
struct Piece {
  int64_t row;
  int begin, end;
  template <class P>
  __device__ __forceinline__ Piece(const SplitParams<P>& params, int64_t index)
      : row(index / params.chunks), begin(int(index % params.chunks) * params.width),
        end(begin + params.width < params.problem.cols ? begin + params.width : int(params.problem.cols)) {}
  // f(run) for all of a thread's packs.
  template <int N, int K, class F>
  __device__ __forceinline__ void each(F f) const {
    each_run<K>(begin + int(threadIdx.x) * N, int(blockDim.x) * N, end, f);
  }
};

template <class P, int N, int K>
struct PartialBody {
  static constexpr int max_threads = 512;
  static constexpr int registers = 128;
  using Params = SplitParams<P>;

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (!arch::kClusters) {
      __shared__ Scratch<P> scratch;
      const P& p = params.problem;
      BlockTeam team(scratch);
      for (int64_t index = blockIdx.x; index < p.rows * params.chunks; index += gridDim.x) {
        typename P::Op::State running;
        const Piece piece(params, index);
        const auto& source = cached(p.source);
        piece.each<N, K>([&](const auto& at) {
          Fetched<typename P::Source, N> fetched[at.count];
          Pack<typename P::C, N> values[at.count];
          fetch_run<N>(fetched, source, piece.row, at);
          take_run<N>(p.op, source, running, fetched, values, piece.row, at);
        });
        const auto state = team.reduce(p.op, running, Count<typename P::C>(piece.end - piece.begin));
        if (team.rank() == 0) params.partial[index] = state;
      }
    }
  }
};

template <class P, int N, int K>
struct FinishBody {
  using C = typename P::C;
  static constexpr int max_threads = 512;
  static constexpr int registers = 128;
  using Params = SplitParams<P>;

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (!arch::kClusters) {
      const P& p = params.problem;
      const auto& again = second_pass(p.source);
      for (int64_t index = blockIdx.x; index < p.rows * params.chunks; index += gridDim.x) {
        const Piece piece(params, index);
        // Every warp brings all the partial states together, one lane after the other where there are more than 32.
        typename P::Op::State state;
        for (int i = threadIdx.x & 31; i < params.chunks; i += 32) p.op.merge(state, params.partial[piece.row * params.chunks + i]);
        state = p.op.gather(state, PartLanes<C>(&p.columns));
        const bool leader = threadIdx.x == 0 && piece.begin == 0;
        const auto visit = [&](const auto& f, auto) {
          piece.each<N, K>([&](const auto& at) {
            Fetched<SecondPass<typename P::Source>, N> fetched[at.count];
            fetch_run<N>(fetched, again, piece.row, at);
            show_run<N>(p, piece.row, at, [&](int k) { return p.op.center(resolve(again, fetched[k], piece.row, at.col(k)), state); }, f);
          });
        };
        const auto nothing_to_reduce = [](const auto&, const auto& s) { return s; };
        finish_row(p, state, state, piece.row, leader, visit, nothing_to_reduce);
      }
    }
  }
};

}  // namespace detail
KERNELS_END
