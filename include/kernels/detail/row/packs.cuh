// What the bodies of row operations share: the problem, a thread's packs of a row, the second half of a body (from the
// row's state to the sink), and a row's edge.
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

  // One row of the problem, for a thread whose packs begin at column `col`.
  template <int N>
  __device__ __forceinline__ RowProblem placed(int64_t row, int col) const {
    return {op, detail::placed<N>(source, row, col), detail::placed<N>(sink, row, col), rows, cols, columns};
  }
};

// The state that a row sink has for each row, or nothing.
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

// The sources of the first and of the second pass over a row.
template <class Source>
using FirstPass = std::decay_t<decltype(cached(std::declval<const Source&>()))>;
template <class Source>
using SecondPass = std::decay_t<decltype(second_pass(std::declval<const Source&>()))>;

// Whether a source may be read any number of times: reading has no effects.
template <class Source>
constexpr bool repeatable = !has_effects<Source> && !loaded_once<Source>;

// ---- the packs of one thread ---------------------------------------------------------------------------------------

// kCount packs of the row, at columns `first`, first + stride ... Their number is known at compile time, so there is no
// branch around a pack. Columns fit 31 bits; only their products with rows do not.
template <int kCount>
struct Run {
  static constexpr int count = kCount;
  static constexpr bool whole = true;
  int first, stride;

  __device__ __forceinline__ int col(int k) const { return first + k * stride; }
  __device__ __forceinline__ constexpr bool has(int) const { return true; }
};

// kCount packs, of which those before `end` are in the row, at least the first. The others are replaced by the `last`
// one before the end, which is harmless for reads: so there is no branch around a read here either, only around its
// use.
template <int kCount>
struct PartRun {
  static constexpr int count = kCount;
  static constexpr bool whole = false;
  int first, stride, end, last;

  __device__ __forceinline__ int col(int k) const { return k == 0 ? first : lesser(first + k * stride, last); }
  __device__ __forceinline__ bool has(int k) const { return k == 0 || first + k * stride < end; }
};

// Splits the packs at first, first + stride, ... below `end` into runs of K, then K / 2, K / 4 ..., and calls f(run).
template <int K, class F>
__device__ __forceinline__ void each_run(int first, int stride, int end, F f) {
  for (; first + (K - 1) * stride < end; first += K * stride) f(Run<K>{first, stride});
  if constexpr (K > 1) each_run<K / 2>(first, stride, end, f);
}

// The same for a lane of a warp with adjacent packs: whole runs while all lanes have them, then one run for the
// remainder. So lanes never diverge around a run.
template <int N, int K, class F>
__device__ __forceinline__ void each_run_of_warp(int first, int lane, int end, F f) {
  constexpr int stride = 32 * N;
  for (; first + (31 - lane) * N + (K - 1) * stride < end; first += K * stride) f(Run<K>{first, stride});
  if (first < end) f(PartRun<K>{first, stride, end, end - N});
}

// For packs that all exist.
struct Always {
  __device__ __forceinline__ constexpr bool operator()(int) const { return true; }
};

// Issues every fetch of a run before the first value is used.
template <int N, class Source, class At>
__device__ __forceinline__ void fetch_run(Fetched<Source, N>* fetched, const Source& source, int64_t row,
                                          const At& at) {
  KERNELS_UNROLL
  for (int k = 0; k < At::count; ++k) fetched[k] = fetch<N>(source, row, at.col(k));
}

// For packs that are all read, but of which some do not count.
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

// The values of packs, as a row op takes them. has(k): whether pack k counts. If not even pack 0 does, its values are
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
  // The mean of a quarter of the values, as an origin for deviations: exact if they are equal, and safe from overflow.
  // Missing packs are replaced by the first one.
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

// Resolves a fetched run, adds it to the row's running state, and returns its values.
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

// Whether mapped values can replace the row's values, for a sink that needs the whole row before it writes.
template <class P, class C = typename P::C>
constexpr bool holds_finished =
    P::row_sink && !P::quantizes_groups &&
    std::is_same<decltype(apply_map(std::declval<const typename P::Map&>(), std::declval<Pack<C, 1>>(),
                                    std::declval<Operands<P, 1>>(), kAny, kAny)),
                 Pack<C, 1>>::value;

// Calls f(pack, operands, column, whether it exists) for a run whose packs are value(k). A pack's operands are
// prefetched while the previous pack is processed: the compiler would not move them across the store in between.
template <int N, class P, class At, class Value, class F>
__device__ __forceinline__ void show_run(const P& p, int64_t row, const At& at, const Value& value, const F& f) {
  const auto& map = sink_map(p.sink);
  constexpr bool ahead = At::count > 2;  // a shorter run has too few registers, and little to gain
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

// visit(f) calls f(pack, operands of the sink's maps, column, whether it exists) for every pack of the thread, centered
// on `local`, each time that it is called. visit(f, true_type) takes one pack after the other, for packs that are split
// when they are written: there are branches around each anyway. kCuts: whether a body has both. kHolds: f's result
// replaces the pack, and visit(f, Finished()) shows these, so that maps are applied once for a sink that needs the
// whole row first.
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

// Registers of a thread that processes K packs at a time, with `values` values of the compute type among what it keeps.
// Determined by compiling: the least without spilling, for occupancy.
template <class P, int N, int K>
constexpr int registers_for(int values, int others) {
  if (sizeof(typename P::C) > 4) return 128;
  if (N * sizeof(typename P::C) < 16) others += 32;  // more addresses for the same bytes
  const int fetched = (int(sizeof(Fetched<typename P::Source, N>)) + 3) / 4 * K;
  const int wanted = others + (values > fetched ? values : fetched);
  return wanted <= 48 ? 48 : wanted <= 56 ? 56 : wanted <= 64 ? 64 : wanted <= 80 ? 80 : 128;
}
constexpr int threads_for(int registers) { return registers <= 64 ? 1024 : registers <= 80 ? 768 : 512; }

// A body whose functors may change themselves: each thread uses its own bitwise copy, made like a kernel's arguments,
// without calling copy constructors.
template <class Body>
struct OnOwnCopy : Body {
  using Params = typename Body::Params;
  static __device__ __forceinline__ void run(const Params& given) {
    alignas(Params) unsigned char own[sizeof(Params)];
    memcpy(own, &given, sizeof(Params));
    Body::run(*reinterpret_cast<const Params*>(own));
  }
};

// The number of columns, for a team's exchange. It may be taken by address, and a variable whose address is taken is
// not in registers: so a thread with its own copy of the problem passes a copy of this.
template <class P>
__device__ __forceinline__ decltype(auto) columns_of(const P& p) {
  if constexpr (changes_itself<typename P::Source> || changes_itself<typename P::Sink>)
    return Count<typename P::C>(p.columns);
  else return (p.columns);
}

// ---- a row's edge: the single elements at both ends of its packs ----------------------------------------------------

// At most one element for each thread; it stays in a register for the second half.
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
  // Calls f(pack, operands, column) with center(pack).
  template <class Center, class F>
  __device__ __forceinline__ void show(const P& p, int64_t row, const Center& center, const F& f) const {
    if (there_) f(center(value_), fetch_operands<1>(sink_map(p.sink), row, col_), col_, std::true_type());
  }
  // The same; f's result replaces the value.
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
// For rows without an edge.
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

// Additional parameters of a body for rows with edges.
template <bool kEnds>
struct Phase {
  RowPhase phase;
};
template <>
struct Phase<false> {};

}  // namespace detail
KERNELS_END
