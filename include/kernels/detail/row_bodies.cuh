// The row engine's kernels: read a row, bring its state together, write the row.
//
// They differ in where the row waits between the two passes, and in nothing else:
//   ResidentBody  in registers: of a group of lanes, of a block, or of the blocks of a cluster
//   StagedBody    in shared memory of a block or a cluster, or nowhere (the row is read again)
//   PartialBody, FinishBody   nowhere, with the row cut into chunks for many blocks: two launches
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
  int first, stride, count;

  template <int N, int K>
  static __device__ __forceinline__ Place at(int first, int stride, int end) {
    int count = 0;
    KERNELS_UNROLL
    for (int k = 0; k < K; ++k) count += first + k * stride < end ? 1 : 0;
    return {first, stride, count};
  }
};

// One thread's part of a row in registers.
template <class C, int N, int K>
struct Tile {
  Pack<C, N * K> values;
  int first = 0;  // columns fit 31 bits; only their products with rows do not
  int stride = 0;
  int count = 0;

  __device__ __forceinline__ void place(const Place& place) {
    first = arch::opaque(place.first);
    stride = place.stride;
    count = place.count;
  }
  __device__ __forceinline__ int col(int k) const { return first + k * stride; }
  __device__ __forceinline__ Pack<C, N> get(int k) const {
    Pack<C, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = values.v[k * N + i];
    return out;
  }
  __device__ __forceinline__ void set(int k, const Pack<C, N>& pack) {
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) values.v[k * N + i] = pack.v[i];
  }

  // f(k) for every pack in the row. The usual cases, all of them or all but one (rows of 3 x 2^n), are kept free of
  // conditions: addresses are then computed once for all packs.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    if (count == K) {
      KERNELS_UNROLL
      for (int k = 0; k < K; ++k) f(k);
    } else if (K == 4 && count == K - 1) {
      KERNELS_UNROLL
      for (int k = 0; k < K - 1; ++k) f(k);
    } else {
      KERNELS_UNROLL
      for (int k = 0; k < K; ++k) {
        if (k < count) f(k);
      }
    }
  }

  // f(k) gives the value of every pack in the row; the others are filled with padding.
  template <class F>
  __device__ __forceinline__ void fill(C padding, F f) {
    if (count == K) {
      KERNELS_UNROLL
      for (int k = 0; k < K; ++k) set(k, f(k));
    } else {
      KERNELS_UNROLL
      for (int k = 0; k < K; ++k) {
        Pack<C, N> pack = broadcast<N>(padding);
        if (k < count) pack = f(k);
        set(k, pack);
      }
    }
  }

  template <class Op, class State>
  __device__ __forceinline__ void accumulate(const Op& op, State& state) const {
    op.accumulate(state, values, count * N);
  }
};

// Fetches for several rows are all issued before the first value is used.
template <int N, int K, class Source>
struct Fetches {
  using Fetched = decltype(fetch<N>(std::declval<const Source&>(), kAny, kAny));
  Fetched items[K];

  template <class C>
  __device__ __forceinline__ void issue(const Source& source, int64_t row, const Tile<C, N, K>& tile) {
    tile.each([&](int k) { items[k] = fetch<N>(source, row, tile.col(k)); });
  }
  template <class C>
  __device__ __forceinline__ void resolve_into(Tile<C, N, K>& tile, const Source& source, int64_t row, C padding) const {
    tile.fill(padding, [&](int k) { return resolve(source, items[k], row, tile.col(k)); });
  }
};

template <int N, int K, class Source, class C>
__device__ __forceinline__ void read_tile(Tile<C, N, K>& tile, const Source& source, int64_t row, C padding) {
  Fetches<N, K, Source> fetches;
  fetches.issue(source, row, tile);
  fetches.resolve_into(tile, source, row, padding);
}

// ---- a row in registers --------------------------------------------------------------------------------------------

// Which rows a team works on: base + offset + r * spacing for r < R, then the same with base + stride, up to end.
struct RowWalk {
  int64_t base, offset, spacing, stride, end;
  __device__ __forceinline__ int64_t row(int r) const { return base + offset + r * spacing; }
};

// Each thread holds K packs of each of R rows. With kAhead a team reads
// ahead: while a row is being worked on, the next one is on its way, so that memory stays busy through the reductions
// even where one block fills a multiprocessor.
template <int N, int K, int R, bool kAhead, class P, class Team>
__device__ __forceinline__ void resident_rows(const P& p, Team&& team, RowWalk walk, const Place& place,
                                              const Columns<typename P::C>& columns, bool leader) {
  using C = typename P::C;
  const auto map = sink_map(p.sink);
  const auto sink = sink_end(p.sink);
  using Operands = decltype(fetch_operands<N>(map, kAny, kAny));
  // With few packs there are registers to spare for fetching the maps' operands before they are needed.
  constexpr bool early = K == 1;

  Tile<C, N, K> tile[R];
  Fetches<N, K, typename P::Source> fetches[R];
  Operands operands[R];
  const auto issue = [&] {
    KERNELS_UNROLL
    for (int r = 0; r < R; ++r) {
      tile[r].place(place);
      if (walk.row(r) >= walk.end) tile[r].count = 0;
      fetches[r].issue(p.source, walk.row(r), tile[r]);
    }
  };

  if (kAhead) issue();
  while (walk.base < walk.end) {
    if (!kAhead) issue();
    int64_t row[R];
    int count[R];
    typename P::Op::State local[R];
    KERNELS_UNROLL
    for (int r = 0; r < R; ++r) {
      row[r] = walk.row(r);
      count[r] = tile[r].count;
      if constexpr (early) {
        if (count[r] > 0) operands[r] = fetch_operands<N>(map, row[r], tile[r].col(0));
      }
      fetches[r].resolve_into(tile[r], p.source, row[r], p.op.padding());
    }
    walk.base += walk.stride;
    if (kAhead) issue();
    KERNELS_UNROLL
    for (int r = 0; r < R; ++r) {
      tile[r].count = count[r];
      local[r] = p.op.absorb(tile[r].values, count[r] * N);
    }

    KERNELS_UNROLL
    for (int r = 0; r < R; ++r) {
      const auto result = p.op.finish(team.reduce(p.op, local[r], columns), columns.row);
      const auto linear = p.op.linear(local[r], result);
      if (leader && row[r] < p.rows) p.op.write_row(result, row[r]);

      const auto mapped = [&](int k) {
        if constexpr (!early) operands[r] = fetch_operands<N>(map, row[r], tile[r].col(k));
        return apply_map(map, linear(tile[r].get(k)), operands[r], row[r], tile[r].col(k));
      };
      if constexpr (P::row_sink) {
        tile[r].fill(sink.padding(), mapped);
        typename P::End::State sink_state;
        tile[r].accumulate(sink, sink_state);
        sink_state = team.reduce(sink, sink_state, columns);
        if (leader && row[r] < p.rows) sink.write_row(sink_state, row[r]);
        const auto sink_result = sink.finish(sink_state);
        tile[r].each([&](int k) { sink.store(tile[r].get(k), sink_result, row[r], tile[r].col(k)); });
      } else {
        tile[r].each([&](int k) { put(sink, mapped(k), row[r], tile[r].col(k)); });
      }
      tile[r].count = walk.row(r) < walk.end ? place.count : 0;  // of what was read ahead
    }
  }
}

// A source that reads 4 bytes or more for each value, and doubles, need more registers.
template <class P, int N, int K>
constexpr bool heavy = sizeof(typename P::C) > 4 || sizeof(typename Fetches<N, K, typename P::Source>::Fetched) >= 4 * N;

// R rows per group of 1 to 32 lanes.
template <class P, int N, int K, int R>
struct GroupBody {
  static constexpr int max_threads = 128;
  // Registers for the values and as much again, but no more: with enough warps the rest hides itself.
  static constexpr int values = N * K * R * int(sizeof(typename P::C)) / 4;
  static constexpr int registers = (values <= 8 ? 40 : values <= 16 ? 64 : 80) * (N == 1 || heavy<P, N, K> ? 8 : 5) / 5;
  struct Params {
    P problem;
    int64_t walk;  // passes per block
    int lanes;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    const GroupTeam team{Lanes<>(params.lanes)};
    const int groups = blockDim.x / params.lanes;
    // Rows of one pass lie side by side, so that neighbouring groups touch neighbouring memory.
    const int64_t pass = int64_t(groups) * R, begin = blockIdx.x * pass * params.walk;
    const int64_t end = begin + pass * params.walk;
    const int64_t rows = params.problem.rows;
    const RowWalk walk{begin, int64_t(threadIdx.x / params.lanes), groups, pass, end < rows ? end : rows};
    const int cols = int(params.problem.cols);
    const int lane = team.lanes.rank();
    const Place place = Place::at<N, K>(lane * N, params.lanes * N, cols);
    using C = typename P::C;
    const Count<C>& all = params.problem.columns;
    const Columns<C> columns{all, all, all};
    resident_rows<N, K, R, false>(params.problem, team, walk, place, columns, lane == 0);
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

// Threads take packs in turn: how many of `columns` columns, the first of them `begin`, fall to this warp.
template <int N>
__device__ __forceinline__ int warp_columns(int columns) {
  const int stride = blockDim.x * N;
  const int first = int(threadIdx.x / 32) * 32 * N;
  const int rest = columns % stride - first;
  const int most = 32 * N;
  return columns / stride * most + (rest < 0 ? 0 : rest < most ? rest : most);
}

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

// One row per block or cluster, in registers, and the next one on its way. A block stays for a few rows: long enough to
// read ahead, short enough for the hardware to balance the multiprocessors. Every warp has a run of columns of its own,
// so that a thread's packs are a fixed distance apart.
template <class P, int N, int K>
struct BlockBody {
  static constexpr int registers = heavy<P, N, K> ? 128 : 80;
  static constexpr int max_threads = heavy<P, N, K> ? 512 : 768;
  struct Params {
    P problem;
    Walk walk;
    int width;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    BlockTeam team(scratch);
    const Slice slice(team, params.width, int(params.problem.cols));
    const int run = (params.width + blockDim.x * N - 1) / (blockDim.x * N) * 32 * N;  // columns of a warp
    const int begin = slice.begin + int(threadIdx.x / 32) * run;
    const int end = begin + run < slice.end ? begin + run : slice.end;
    const Place place = Place::at<N, K>(begin + int(threadIdx.x & 31) * N, 32 * N, end);
    const bool leader = team.rank() == 0 && team.block() == 0;
    const int64_t index = blockIdx.x / team.blocks();
    const int64_t last = params.walk.first(index + 1);
    const RowWalk walk{params.walk.first(index), 0, 0, 1, last < params.problem.rows ? last : params.problem.rows};
    using C = typename P::C;
    const Columns<C> columns{Count<C>(end > begin ? end - begin : 0), Count<C>(slice.columns()), params.problem.columns};
    resident_rows<N, K, 1, true>(params.problem, team, walk, place, columns, leader);
  }
};

// ---- a row in shared memory, or nowhere ----------------------------------------------------------------------------

// kKeep: what a block fetches of a row goes straight to shared memory, all of it at once, and stays there for the second
// pass. Otherwise the row is read twice. Every thread reads only the packs that it fetched itself.
template <class P, int N, int K, bool kKeep>
struct StagedBody {
  static constexpr int max_threads = 256;
  static constexpr int registers = !kKeep ? 128 : heavy<P, N, K> ? 80 : 64;
  struct Params {
    P problem;
    int width;
  };
  using C = typename P::C;
  using T = Tile<C, N, K>;
  using Source = typename P::Source;
  using Kept = typename Fetches<N, K, Source>::Fetched;

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const P& p = params.problem;
    BlockTeam team(scratch);
    const Slice slice(team, params.width, int(p.cols));
    const Columns<C> columns{Count<C>(warp_columns<N>(slice.columns())), Count<C>(slice.columns()), p.columns};
    const bool leader = team.rank() == 0 && team.block() == 0;
    Kept* const kept = reinterpret_cast<Kept*>(dynamic_shared);
    const auto again = second_pass(p.source);
    const auto pure = without_effects(p.source);
    const auto map = sink_map(p.sink);
    const auto silent = without_effects(map);
    const auto sink = sink_end(p.sink);

    const int stride = team.size() * N;
    const int begin = slice.begin + team.rank() * N;
    const auto tile_at = [&](int at) {
      T tile;
      tile.place(Place::at<N, K>(at, stride, slice.end));
      return tile;
    };
    const auto slot = [&](const T& tile, int k) { return (tile.col(k) - slice.begin) / N; };

    for (int64_t row = blockIdx.x / team.blocks(); row < p.rows; row += gridDim.x / team.blocks()) {
      typename P::Op::State state;
      if constexpr (kKeep) {
        for (int at = begin; at < slice.end; at += K * stride) {
          const T tile = tile_at(at);
          tile.each([&](int k) { fetch_async<N>(kept + slot(tile, k), p.source, row, tile.col(k)); });
          arch::close_async();
        }
      }
      int left = kKeep && begin < slice.end ? (slice.end - 1 - begin) / (K * stride) : 0;  // groups after this one
      for (int at = begin; at < slice.end; at += K * stride, --left) {
        T tile = tile_at(at);
        if constexpr (kKeep) {
          wait_for(left);
          tile.fill(p.op.padding(), [&](int k) { return resolve(p.source, kept[slot(tile, k)], row, tile.col(k)); });
        } else {
          read_tile(tile, p.source, row, p.op.padding());
        }
        tile.accumulate(p.op, state);
      }
      state = team.reduce(p.op, state, columns);
      const auto result = p.op.finish(state, columns.row);
      const auto linear = p.op.linear(state, result);
      if (leader) p.op.write_row(result, row);

      // The row once more, finished: f(col, y).
      const auto each_finished = [&](const auto& m, auto f) {
        for (int at = begin; at < slice.end; at += K * stride) {
          T tile = tile_at(at);
          if constexpr (kKeep) {
            tile.fill(p.op.padding(), [&](int k) { return resolve(pure, kept[slot(tile, k)], row, tile.col(k)); });
          } else {
            read_tile(tile, again, row, p.op.padding());
          }
          tile.each([&](int k) {
            const int col = tile.col(k);
            const auto y = linear(p.op.center(tile.get(k), state));
            f(col, apply_map(m, y, fetch_operands<N>(m, row, col), row, col));
          });
        }
      };
      if constexpr (P::row_sink) {
        typename P::End::State sink_state;
        each_finished(silent, [&](int, const Pack<C, N>& y) { sink.accumulate(sink_state, y, N); });
        sink_state = team.reduce(sink, sink_state, columns);
        if (leader) sink.write_row(sink_state, row);
        const auto sink_result = sink.finish(sink_state);
        each_finished(map, [&](int col, const Pack<C, N>& y) { sink.store(y, sink_result, row, col); });
      } else {
        each_finished(map, [&](int col, const Pack<C, N>& y) { put(sink, y, row, col); });
      }
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

template <class P, int N, int K>
struct PartialBody {
  static constexpr int max_threads = 512;
  static constexpr int registers = 128;
  using Params = SplitParams<P>;

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    const P& p = params.problem;
    BlockTeam team(scratch);
    const int stride = team.size() * N;
    for (int64_t piece = blockIdx.x; piece < p.rows * params.chunks; piece += gridDim.x) {
      const int64_t row = piece / params.chunks;
      const int begin = int(piece % params.chunks) * params.width;
      const int end = begin + params.width < p.cols ? begin + params.width : int(p.cols);
      typename P::Op::State state;
      for (int at = begin + team.rank() * N; at < end; at += K * stride) {
        Tile<typename P::C, N, K> tile;
        tile.place(Place::at<N, K>(at, stride, end));
        read_tile(tile, p.source, row, p.op.padding());
        tile.accumulate(p.op, state);
      }
      const Count<typename P::C> all(end - begin);
      state = team.reduce(p.op, state, Columns<typename P::C>{Count<typename P::C>(warp_columns<N>(end - begin)), all, all});
      if (team.rank() == 0) params.partial[piece] = state;
    }
  }
};

template <class P, int N, int K>
struct FinishBody {
  static constexpr int max_threads = 512;
  static constexpr int registers = 128;
  using Params = SplitParams<P>;

  static __device__ __forceinline__ void run(const Params& params) {
    const P& p = params.problem;
    const auto again = second_pass(p.source);
    const auto map = sink_map(p.sink);
    const auto sink = sink_end(p.sink);
    const int stride = int(blockDim.x) * N;
    for (int64_t piece = blockIdx.x; piece < p.rows * params.chunks; piece += gridDim.x) {
      const int64_t row = piece / params.chunks;
      const int begin = int(piece % params.chunks) * params.width;
      const int end = begin + params.width < p.cols ? begin + params.width : int(p.cols);
      typename P::Op::State state;
      for (int i = threadIdx.x & 31; i < params.chunks; i += 32) p.op.merge(state, params.partial[row * params.chunks + i]);
      // Every warp brings all the partial states together, one lane after the other where there are more than 32.
      state = p.op.gather(state, Lanes<32>(), p.columns);
      const auto result = p.op.finish(state, p.columns);
      const auto linear = p.op.linear(state, result);
      if (int(threadIdx.x) == 0 && begin == 0) p.op.write_row(result, row);
      for (int at = begin + int(threadIdx.x) * N; at < end; at += K * stride) {
        Tile<typename P::C, N, K> tile;
        tile.place(Place::at<N, K>(at, stride, end));
        read_tile(tile, again, row, typename P::C(0));
        tile.each([&](int k) {
          const int col = tile.col(k);
          const auto y = linear(p.op.center(tile.get(k), state));
          put(sink, apply_map(map, y, fetch_operands<N>(map, row, col), row, col), row, col);
        });
      }
    }
  }
};

}  // namespace detail
KERNELS_END
