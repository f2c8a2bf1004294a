// What the bodies of row operations share: the problem, a thread's packs of a row, the way from the state of a row to
// the sink, and what is left of a row on both sides of its packs.
#pragma once

#include "../../core/row_call.h"
#include "../../core/row_ends.h"
#include "../../core/row_policy.h"
#include "../../functor.h"
#include "../groups.cuh"
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
  static constexpr bool row_sink = is_row_sink<End>, quantizes_groups = by_group<Sink>;

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

// kCount packs that lie in the row: at column `first` and `stride` columns apart. How many there are is known at
// compile time, so that there is no branch around a pack. Columns fit 31 bits; only their products with rows do not.
template <int kCount>
struct Run {
  static constexpr int count = kCount;
  static constexpr bool whole = true;
  int first, stride;

  __device__ __forceinline__ int col(int k) const { return first + k * stride; }
  __device__ __forceinline__ constexpr bool has(int) const { return true; }
};

// kCount packs of which those before `end` lie in the row, the first one in any case. In place of the others there is
// the `last` one before it, which does no harm to what only reads: so there is no branch around a pack here either, but
// around what comes of it.
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

// The same for a lane of a warp whose lanes have their packs side by side: whole runs while all lanes have them, and
// one run of what is left. Lanes never go different ways around a run then.
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
__device__ __forceinline__ void fetch_run(Fetched<Source, N>* fetched, const Source& source, int64_t row,
                                          const At& at) {
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

// Packs' values, as a row op takes them in. has(k): whether there is a pack k; if not even pack 0, what is there is
// finite.
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
  // The mean of a quarter of the values, to take deviations from: exact when they are equal, and safe from overflow.
  // The first one takes the place of what is missing.
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
__device__ __forceinline__ void take_packs(const Op& op, typename Op::State& running, const Pack<C, N>* values,
                                           const Has& has) {
  op.take(running, Taken<C, N, kPacks, Has>{values, has});
}

// Takes a fetched run into a row's running state, and leaves it as values.
template <int N, class Op, class Source, class C, class At>
__device__ __forceinline__ void take_run(const Op& op, const Source& source, typename Op::State& running,
                                         const Fetched<Source, N>* fetched, Pack<C, N>* values, int64_t row,
                                         const At& at) {
  KERNELS_UNROLL
  for (int k = 0; k < At::count; ++k) values[k] = resolve(source, fetched[k], row, at.col(k));
  if constexpr (At::whole) take_packs<At::count>(op, running, values, Always{});
  else take_packs<At::count>(op, running, values, Chosen<At>{at});
}

// ---- the second half of every body: from the state of the row to the sink ------------------------------------------

template <class P, int N>
using Operands = decltype(fetch_operands<N>(std::declval<const typename P::Map&>(), kAny, kAny));

// Whether values that maps have changed can take the place of the row's, for a sink that looks at them before it
// writes.
template <class P, class C = typename P::C>
constexpr bool holds_finished =
    P::row_sink && !P::quantizes_groups &&
    std::is_same<decltype(apply_map(std::declval<const typename P::Map&>(), std::declval<Pack<C, 1>>(),
                                    std::declval<Operands<P, 1>>(), kAny, kAny)),
                 Pack<C, 1>>::value;

// f(pack, operands, column, whether it is there) for a run whose packs value(k) gives. What the sink's maps read for a
// pack is prefetched while the pack before it is worked on: a store in between would keep the compiler from doing so.
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
    else if constexpr (!P::row_sink && !has_effects<typename P::Map>)
      f(value(k), operands[k % 2], at.col(k), at.has(k));
    else if (at.has(k)) f(value(k), operands[k % 2], at.col(k), std::true_type());
  }
}

// visit(f) calls f(pack, what the sink's maps read for it, column, whether it is there) for every pack of the thread,
// centered on `local`, and again whenever it is asked to; visit(f, true_type) one pack after the other, as they are cut
// when they are written: then there are branches around every pack, and more at a time gain nothing. kCuts: whether a
// body has both. kHolds: what f returns takes the pack's place, and visit(f, Finished()) shows that, so that maps are
// applied once where a sink looks at values before it writes them.
struct Finished {};
template <bool kCuts = false, bool kHolds = false, class P, class Local, class State, class Visit, class Reduce>
__device__ __forceinline__ void finish_row(const P& p, const Local& local, const State& state, int64_t row, bool leader,
                                           const Visit& visit, const Reduce& reduce) {
  const auto& map = sink_map(p.sink);
  const auto& sink = sink_end(p.sink);
  const auto result = p.op.finish(state, p.columns);
  const auto linear = p.op.linear(local, result);
  if constexpr (P::quantizes_groups) {
    visit([&](const auto& x, const auto& operands, int col,
              auto) { put_group(sink, apply_map(map, linear(x), operands, row, col), row, col); },
          std::false_type());
  } else if constexpr (P::row_sink) {
    typename P::End::State sink_state{};
    const auto& first_map = [&]() -> decltype(auto) {
      if constexpr (kHolds) return (map);
      else return without_effects(map);
    }();
    visit([&](const auto& x, const auto& operands, int col, auto) {
      const auto finished = apply_map(first_map, linear(x), operands, row, col);
      sink.accumulate(sink_state, finished, x.size);
      return finished;
    }, std::false_type());
    sink_state = reduce(sink, sink_state);
    if (leader) sink.write_row(sink_state, row);
    const auto sink_result = sink.finish(sink_state);
    visit([&](const auto& x, const auto& operands, int col, auto) {
      if constexpr (kHolds) sink.store(x, sink_result, row, col);
      else sink.store(apply_map(map, linear(x), operands, row, col), sink_result, row, col);
    }, std::conditional_t<kHolds, Finished, std::false_type>());
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

// A body whose functors may change themselves: each thread works on its own copy of them, made bit by bit as a kernel's
// arguments are, whatever their copy constructors are for.
template <class Body>
struct OnOwnCopy : Body {
  using Params = typename Body::Params;
  static __device__ __forceinline__ void run(const Params& given) {
    alignas(Params) unsigned char own[sizeof(Params)];
    memcpy(own, &given, sizeof(Params));
    Body::run(*reinterpret_cast<const Params*>(own));
  }
};

// How many columns a row has, for a team's exchange. That may be pointed to, and what is pointed to is not in
// registers: so a thread with its own copy of the problem passes on a copy of this.
template <class P>
__device__ __forceinline__ decltype(auto) columns_of(const P& p) {
  if constexpr (changes_itself<typename P::Source> || changes_itself<typename P::Sink>)
    return Count<typename P::C>(p.columns);
  else return (p.columns);
}

// ---- what is left of a row on both sides of its packs ---------------------------------------------------------------

// At most one element for a thread; it waits in a register for the second half.
template <class P, bool kEnds>
class Edge {
 public:
  __device__ __forceinline__ Edge(const RowEnds& row, int rank)
      : col_(row.column(rank)), there_(unsigned(rank) < unsigned(row.left())) {}

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
  // The same; what f returns takes the value's place.
  template <class Center, class F>
  __device__ __forceinline__ void finish(const P& p, int64_t row, const Center& center, const F& f) {
    show(p, row, center, [&](const auto&... what) { value_ = f(what...); });
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
  template <class Center, class F>
  __device__ __forceinline__ void finish(const P&, int64_t, const Center&, const F&) const {}
};

// What a body's parameters have besides, where rows have edges.
template <bool kEnds>
struct Phase {
  RowPhase phase;
};
template <>
struct Phase<false> {};

}  // namespace detail
KERNELS_END
