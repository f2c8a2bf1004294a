// The row engine's kernels: read a row, bring its state together, write the row.
//
// They differ in where the row waits between the two passes, and in nothing else:
//   GroupBody    in registers of 1 to 32 lanes
//   BlockBody    in registers of a block, or of the blocks of a cluster
//   StagedBody   in shared memory of a block or a cluster, or nowhere (the row is read again)
//   PartialBody, FinishBody   nowhere, with the row cut into chunks for many blocks: two launches
//
// In blocks a row waits as it was fetched, not as it is computed on: that takes half the registers for 16-bit types, and
// the warps that then fit hide more than converting once more costs. In groups, where rows are short and instructions
// count, it waits as values that are already relative to what the lane knows. (H200, halves: 3 to 6 % and 4 to 9 % of the
// copy bandwidth against the other way round.)
#pragma once

#include "../functor.h"
#include "team.cuh"

KERNELS_BEGIN
namespace detail {

template <class Op_, class Source_, class Sink_>
struct RowProblem {
  using Op = Op_;
  using Source = Source_;
  using Sink = Sink_;
  using C = compute_type<Source>;
  using Map = decltype(sink_map(std::declval<const Sink&>()));
  using End = decltype(sink_end(std::declval<const Sink&>()));
  static constexpr bool row_sink = is_row_sink<End>;

  Op op;
  Source source;
  Sink sink;
  int64_t rows;
  int64_t cols;
  Count<C> columns;  // of a row, for the ops
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

// The columns of one thread: K packs, the k-th at first + k * stride. Those that lie in the row come first.
struct Place {
  int first, stride, count;  // columns fit 31 bits; only their products with rows do not

  template <int N, int K>
  static __device__ __forceinline__ Place at(int first, int stride, int end) {
    int count = 0;
    KERNELS_UNROLL
    for (int k = 0; k < K; ++k) count += first + k * stride < end ? 1 : 0;
    return {first, stride, count};
  }
  __device__ __forceinline__ int col(int k) const { return first + k * stride; }
  template <int K, class F>
  __device__ __forceinline__ void each(F f) const {
    KERNELS_UNROLL
    for (int k = 0; k < K; ++k) {
      if (k < count) f(k);
    }
  }
};

// ---- what a thread holds of a row, to be looked at as often as needed ----------------------------------------------
//
// each(f): f(col, pack) for every pack. first(): one of the values. count(): how many values, at most `most`.

// A source that can be resolved twice: nothing is written on the way.
template <class Source>
constexpr bool is_pure = std::is_same<decltype(without_effects(std::declval<const Source&>())), Source>::value;

// K packs in registers: as fetched where that is not larger and can be resolved again, as values otherwise.
template <class Source, int N, int K>
class HeldPacks {
 public:
  using C = compute_type<Source>;
  using Fetched = decltype(fetch<N>(std::declval<const Source&>(), kAny, kAny));
  static constexpr int most = N * K;
  static constexpr bool as_fetched = is_pure<Source> && sizeof(Fetched) <= sizeof(Pack<C, N>);
  using Item = std::conditional_t<as_fetched, Fetched, Pack<C, N>>;
  static constexpr int registers = K * int(sizeof(Item)) / 4;

  // Every fetch is issued before the first value is used.
  __device__ __forceinline__ HeldPacks(const Source& source, int64_t row, const Place& place)
      : source_(source), row_(row), place_{arch::opaque(place.first), place.stride, place.count} {
    if constexpr (as_fetched) {
      place_.each<K>([&](int k) { items_[k] = fetch<N>(source, row, place_.col(k)); });
    } else {
      Fetched fetched[K];
      place_.each<K>([&](int k) { fetched[k] = fetch<N>(source, row, place_.col(k)); });
      place_.each<K>([&](int k) { items_[k] = resolve(source, fetched[k], row, place_.col(k)); });
    }
  }

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    place_.each<K>([&](int k) { f(place_.col(k), value(k)); });
  }
  __device__ __forceinline__ C first() const { return place_.count > 0 ? value(0).v[0] : C(0); }
  __device__ __forceinline__ int count() const { return place_.count * N; }

 private:
  __device__ __forceinline__ Pack<C, N> value(int k) const {
    if constexpr (as_fetched) return resolve(source_, items_[k], row_, place_.col(k));
    else return items_[k];
  }

  const Source& source_;
  int64_t row_;
  Place place_;
  Item items_[K];
};

// K packs in registers as values, absorbed into the lane's own state and centered on it (core/row_op.h).
template <class P, int N, int K>
class CenteredPacks {
 public:
  using C = typename P::C;
  using Source = typename P::Source;
  using State = typename P::Op::State;
  using Fetched = decltype(fetch<N>(std::declval<const Source&>(), kAny, kAny));
  static constexpr int registers = N * K * int(sizeof(C)) / 4;

  __device__ __forceinline__ void fetch_from(const Source& source, int64_t row, const Place& place) {
    place_ = {arch::opaque(place.first), place.stride, place.count};
    place_.each<K>([&](int k) { fetched_[k] = fetch<N>(source, row, place_.col(k)); });
  }
  __device__ __forceinline__ State absorb(const P& p, int64_t row) {
    KERNELS_UNROLL
    for (int k = 0; k < K; ++k) {
      Pack<C, N> pack = broadcast<N>(p.op.padding());
      if (k < place_.count) pack = resolve(p.source, fetched_[k], row, place_.col(k));
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) values_.v[k * N + i] = pack.v[i];
    }
    return p.op.absorb(values_, place_.count * N);
  }

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    place_.each<K>([&](int k) {
      Pack<C, N> pack;
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) pack.v[i] = values_.v[k * N + i];
      f(place_.col(k), pack);
    });
  }

 private:
  Place place_;
  Fetched fetched_[K];
  Pack<C, N * K> values_;
};

// K packs in shared memory, as fetched. `pure` resolves them without writing, for every look but the first.
template <class Source, int N, int K>
class KeptPacks {
 public:
  using C = compute_type<Source>;
  using Fetched = typename HeldPacks<Source, N, K>::Fetched;
  static constexpr int most = N * K;

  __device__ __forceinline__ KeptPacks(const Source& source, const Fetched* kept, int64_t row, const Place& place)
      : source_(source), kept_(kept), row_(row), place_(place) {}

  template <class F>
  __device__ __forceinline__ void each(F f) const {
    place_.each<K>([&](int k) { f(place_.col(k), value(k)); });
  }
  __device__ __forceinline__ C first() const { return place_.count > 0 ? value(0).v[0] : C(0); }
  __device__ __forceinline__ int count() const { return place_.count * N; }

 private:
  __device__ __forceinline__ Pack<C, N> value(int k) const {
    return resolve(source_, kept_[k * (place_.stride / N)], row_, place_.col(k));
  }

  const Source& source_;
  const Fetched* kept_;
  int64_t row_;
  Place place_;
};

// Packs that a function shows: show(f).
template <class Show>
struct ShownBy {
  const Show& show;
  template <class F>
  __device__ __forceinline__ void each(F f) const { show(f); }
};

// The second half of every body: from the state of the row to the sink. packs.each() shows all that the thread holds;
// center(values) makes it relative to `local`, if it is not already.
template <int N, class P, class Packs, class Reduce, class Center>
__device__ __forceinline__ void finish_row(const P& p, const Packs& packs, const typename P::Op::State& local,
                                           const typename P::Op::State& state, int64_t row, bool leader,
                                           const Reduce& reduce, Center center) {
  using C = typename P::C;
  const auto map = sink_map(p.sink);
  const auto sink = sink_end(p.sink);
  const auto result = p.op.finish(state, p.columns);
  const auto linear = p.op.linear(local, result);
  if (leader) p.op.write_row(result, row);
  const auto finished = [&](const auto& m, auto f) {
    packs.each([&](int col, const Pack<C, N>& x) {
      const auto operands = fetch_operands<N>(m, row, col);
      f(col, apply_map(m, linear(center(x)), operands, row, col));
    });
  };
  if constexpr (P::row_sink) {
    typename P::End::State sink_state;
    finished(without_effects(map), [&](int, const Pack<C, N>& y) { sink.accumulate(sink_state, y, N); });
    sink_state = reduce(sink, sink_state);
    if (leader) sink.write_row(sink_state, row);
    const auto sink_result = sink.finish(sink_state);
    finished(map, [&](int col, const Pack<C, N>& y) { sink.store(y, sink_result, row, col); });
  } else {
    finished(map, [&](int col, const Pack<C, N>& y) { put(sink, y, row, col); });
  }
}
template <int N, class P, class Packs, class Reduce>
__device__ __forceinline__ void finish_row(const P& p, const Packs& packs, const typename P::Op::State& state, int64_t row,
                                           bool leader, const Reduce& reduce) {
  finish_row<N>(p, packs, state, state, row, leader, reduce, [&](const Pack<typename P::C, N>& x) { return p.op.center(x, state); });
}

// Registers per thread for a body that holds `held` of them, `more` beside them for its arithmetic.
constexpr int registers_for(int held, int more) {
  const int wanted = held + more;
  return wanted <= 40 ? 40 : wanted <= 48 ? 48 : wanted <= 64 ? 64 : wanted <= 80 ? 80 : 128;
}

// ---- a row in registers --------------------------------------------------------------------------------------------

// The rows of a block: `walk` of them, but fewer for the last blocks, which then end more nearly together.
struct Walk {
  int64_t rows;
  int64_t long_blocks;
  int64_t short_rows;

  // `even`: as few blocks as possible.
  static Walk over(int64_t passes, int64_t walk, bool even) {
    if (even || walk == 1) return {walk, (passes + walk - 1) / walk, 1};
    return {walk, passes * 7 / 8 / walk, walk >= 4 ? walk / 4 : 1};
  }
  int64_t blocks(int64_t passes) const {
    const int64_t rest = passes - long_blocks * rows;
    return long_blocks + (rest > 0 ? (rest + short_rows - 1) / short_rows : 0);
  }
  __device__ __forceinline__ int64_t first(int64_t block) const {
    return block < long_blocks ? block * rows : long_blocks * rows + (block - long_blocks) * short_rows;
  }
};


// R rows per group of 1 to 32 lanes.
template <class P, int N, int K, int R>
struct GroupBody {
  using Packs = CenteredPacks<P, N, K>;
  static constexpr int max_threads = 128;
  static constexpr bool heavy = sizeof(typename Packs::Fetched) > 4 * N || sizeof(typename P::C) > 4;
  static constexpr int registers = registers_for(R * Packs::registers, heavy || N == 1 ? 72 : R * Packs::registers <= 8 ? 32 : 48);
  struct Params {
    P problem;
    Walk walk;  // passes over R rows per group
    int lanes;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    const P& p = params.problem;
    const GroupTeam team{Lanes<>(params.lanes)};
    const Columns<typename P::C> columns{p.columns, p.columns, p.columns};
    const auto reduce = [&](const auto& op, const auto& state) { return team.reduce(op, state, columns); };
    const int lane = team.lanes.rank(), group = threadIdx.x / params.lanes, groups = blockDim.x / params.lanes;
    const Place place = Place::at<N, K>(lane * N, params.lanes * N, int(p.cols));
    const int64_t last = params.walk.first(blockIdx.x + int64_t(1));
    for (int64_t pass = params.walk.first(blockIdx.x); pass < last; ++pass) {
      // Rows of one pass lie side by side, so that neighbouring groups touch neighbouring memory. Lanes without a row
      // still take part in the exchanges.
      const auto row = [&](int r) { return (pass * R + r) * groups + group; };
      Packs packs[R];
      typename P::Op::State local[R];
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) packs[r].fetch_from(p.source, row(r), row(r) < p.rows ? place : Place{0, 0, 0});
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) local[r] = packs[r].absorb(p, row(r));
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) {
        const bool leader = lane == 0 && row(r) < p.rows;
        const auto centered = [](const auto& x) { return x; };
        finish_row<N>(p, packs[r], local[r], reduce(p.op, local[r]), row(r), leader, reduce, centered);
      }
    }
  }
};

// Where a block's part of a row lies when the blocks of a cluster share rows: `width` columns each, but for the last.
template <class Team>
struct Slice {
  int begin, end;
  __device__ Slice(const Team& team, int width, int cols)
      : begin(width * team.block()), end(begin + width < cols ? begin + width : cols) {}
  __device__ int columns() const { return end > begin ? end - begin : 0; }
};

// Threads take packs in turn: how many of `columns` columns fall to this warp. The first form knows that there are at
// most K turns and does without divisions, which a block that works on one row would feel.
template <int N, int K>
__device__ __forceinline__ int warp_columns_of(int columns) {
  const int packs = (columns + N - 1) / N - int(threadIdx.x / 32) * 32;
  int mine = 0;
  KERNELS_UNROLL
  for (int k = 0; k < K; ++k) {
    const int rest = packs - k * int(blockDim.x);
    mine += rest < 0 ? 0 : rest < 32 ? rest : 32;
  }
  return mine * N;
}
template <int N>
__device__ __forceinline__ int warp_columns(int columns) {
  const int stride = blockDim.x * N;
  const int first = int(threadIdx.x / 32) * 32 * N;
  const int rest = columns % stride - first;
  const int most = 32 * N;
  return columns / stride * most + (rest < 0 ? 0 : rest < most ? rest : most);
}

// What one thread of a block needs beside the packs it holds. Large blocks get along with less, so that several fit.
template <class P, int N, int K>
constexpr int more_registers(bool large) {
  using Held = HeldPacks<typename P::Source, N, K>;
  if (sizeof(typename P::C) > 4) return 64;
  if (!Held::as_fetched) return 24 + int(sizeof(typename Held::Fetched)) / 4 * K;
  return N == 1 ? 40 : large ? 24 : 32;
}

// One row per block or cluster, in registers.
template <class P, int N, int K, bool kLarge>
struct BlockBody {
  using Held = HeldPacks<typename P::Source, N, K>;
  static constexpr int registers = registers_for(Held::registers, more_registers<P, N, K>(kLarge));
  static constexpr int max_threads = !kLarge ? 256 : registers <= 64 ? 1024 : registers <= 80 ? 768 : 512;
  struct Params {
    P problem;
    Walk walk;
    int width;
    bool even;                          // every thread holds K packs
    Count<typename P::C> block_columns; // then
  };

  static __device__ __forceinline__ void run(const Params& params) {
    using C = typename P::C;
    __shared__ Scratch<P> scratch;
    const P& p = params.problem;
    BlockTeam team(scratch);
    const Slice slice(team, params.width, int(p.cols));
    constexpr Count<C> whole_warp(C(32 * N * K), C(1.0 / (32 * N * K)));
    const auto reduce = [&](const auto& op, const auto& state) {
      Columns<C> columns{whole_warp, params.block_columns, p.columns};
      if (!params.even) columns = {Count<C>(warp_columns_of<N, K>(slice.columns())), Count<C>(slice.columns()), p.columns};
      return team.reduce(op, state, columns);
    };
    const Place place = Place::at<N, K>(slice.begin + team.rank() * N, team.size() * N, slice.end);
    const bool leader = team.rank() == 0 && team.block() == 0;
    const int64_t index = team.cluster(), last = params.walk.first(index + 1);
    for (int64_t row = params.walk.first(index); row < last && row < p.rows; ++row) {
      const Held held(p.source, row, place);
      finish_row<N>(p, held, reduce(p.op, p.op.scan(held)), row, leader, reduce);
    }
  }
};

// ---- a row in shared memory, or nowhere ----------------------------------------------------------------------------

// kKeep: what a block fetches of a row goes straight to shared memory, all of it at once, and stays there for the second
// pass. Otherwise the row is read twice. Every thread reads only the packs that it fetched itself.
template <class P, int N, int K, bool kKeep>
struct StagedBody {
  using C = typename P::C;
  using Source = typename P::Source;
  using Held = HeldPacks<Source, N, K>;
  using Kept = typename Held::Fetched;
  using Again = decltype(second_pass(std::declval<const Source&>()));
  using Pure = decltype(without_effects(std::declval<const Source&>()));
  static constexpr int registers = kKeep ? (sizeof(C) > 4 ? 128 : 64) : registers_for(Held::registers, more_registers<P, N, K>(false) + 24);
  static constexpr int max_threads = 256;
  struct Params {
    P problem;
    int width;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const P& p = params.problem;
    BlockTeam team(scratch);
    const Slice slice(team, params.width, int(p.cols));
    const Columns<C> columns{Count<C>(warp_columns<N>(slice.columns())), Count<C>(slice.columns()), p.columns};
    const auto reduce = [&](const auto& op, const auto& state) { return team.reduce(op, state, columns); };
    const bool leader = team.rank() == 0 && team.block() == 0;
    const Again again = second_pass(p.source);
    const Pure pure = without_effects(p.source);

    const int stride = team.size() * N;
    const int begin = slice.begin + team.rank() * N;
    Kept* const kept = reinterpret_cast<Kept*>(dynamic_shared) + team.rank();  // this thread's packs are size() apart
    const auto kept_at = [&](int at) { return kept + (at - begin) / N; };
    const auto steps = [&](auto f) {
      for (int at = begin; at < slice.end; at += K * stride) f(at, Place::at<N, K>(at, stride, slice.end));
    };

    for (int64_t row = team.cluster(); row < p.rows; row += team.clusters()) {
      typename P::Op::State state;
      if constexpr (kKeep) {
        steps([&](int at, const Place& place) {
          place.each<K>([&](int k) { fetch_async<N>(kept_at(at) + k * team.size(), p.source, row, place.col(k)); });
          arch::close_async();
        });
        int left = begin < slice.end ? (slice.end - 1 - begin) / (K * stride) : 0;  // groups after this one
        steps([&](int at, const Place& place) {
          wait_for(left--);
          if constexpr (!is_pure<Source>) {  // what is written on the way is written once
            place.each<K>([&](int k) { (void)resolve(p.source, kept_at(at)[k * team.size()], row, place.col(k)); });
          }
          p.op.merge(state, p.op.scan(KeptPacks<Pure, N, K>(pure, kept_at(at), row, place)));
        });
      } else {
        steps([&](int, const Place& place) { p.op.merge(state, p.op.scan(Held(p.source, row, place))); });
      }

      // The whole of this thread's part once more.
      const auto once_more = [&](auto f) {
        steps([&](int at, const Place& place) {
          if constexpr (kKeep) KeptPacks<Pure, N, K>(pure, kept_at(at), row, place).each(f);
          else HeldPacks<Again, N, K>(again, row, place).each(f);
        });
      };
      finish_row<N>(p, ShownBy<decltype(once_more)>{once_more}, reduce(p.op, state), row, leader, reduce);
    }
  }

 private:
  // All but the `left` latest groups are here. The instruction wants a constant; waiting for more is always right.
  static __device__ __forceinline__ void wait_for(int left) {
    if (left >= 8) arch::wait_async<8>();
    else if (left >= 4) arch::wait_async<4>();
    else if (left >= 2) arch::wait_async<2>();
    else if (left >= 1) arch::wait_async<1>();
    else arch::wait_async<0>();
  }
};

// ---- a row cut into chunks for many blocks -------------------------------------------------------------------------

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
  template <int N, int K, class F>
  __device__ __forceinline__ void steps(F f) const {
    const int stride = int(blockDim.x) * N;
    for (int at = begin + int(threadIdx.x) * N; at < end; at += K * stride) f(Place::at<N, K>(at, stride, end));
  }
};

template <class P, int N, int K>
struct PartialBody {
  static constexpr int max_threads = 512;
  static constexpr int registers = 128;
  using Params = SplitParams<P>;

  static __device__ __forceinline__ void run(const Params& params) {
    using C = typename P::C;
    __shared__ Scratch<P> scratch;
    const P& p = params.problem;
    BlockTeam team(scratch);
    for (int64_t index = blockIdx.x; index < p.rows * params.chunks; index += gridDim.x) {
      const Piece piece(params, index);
      typename P::Op::State state;
      piece.steps<N, K>([&](const Place& place) {
        p.op.merge(state, p.op.scan(HeldPacks<typename P::Source, N, K>(p.source, piece.row, place)));
      });
      const Count<C> all(piece.end - piece.begin);
      state = team.reduce(p.op, state, Columns<C>{Count<C>(warp_columns<N>(piece.end - piece.begin)), all, all});
      if (team.rank() == 0) params.partial[index] = state;
    }
  }
};

template <class P, int N, int K>
struct FinishBody {
  static constexpr int max_threads = 512;
  static constexpr int registers = 128;
  using Params = SplitParams<P>;
  using Again = decltype(second_pass(std::declval<const typename P::Source&>()));

  static __device__ __forceinline__ void run(const Params& params) {
    const P& p = params.problem;
    const Again again = second_pass(p.source);
    for (int64_t index = blockIdx.x; index < p.rows * params.chunks; index += gridDim.x) {
      const Piece piece(params, index);
      // Every warp brings all the partial states together, one lane after the other where there are more than 32.
      typename P::Op::State state;
      for (int i = threadIdx.x & 31; i < params.chunks; i += 32) p.op.merge(state, params.partial[piece.row * params.chunks + i]);
      state = p.op.gather(state, Lanes<32>(), p.columns);
      const bool leader = threadIdx.x == 0 && piece.begin == 0;
      const auto once_more = [&](auto f) {
        piece.template steps<N, K>([&](const Place& place) { HeldPacks<Again, N, K>(again, piece.row, place).each(f); });
      };
      const auto nothing_to_reduce = [](const auto&, const auto& s) { return s; };
      finish_row<N>(p, ShownBy<decltype(once_more)>{once_more}, state, piece.row, leader, nothing_to_reduce);
    }
  }
};

}  // namespace detail
KERNELS_END
