// The row engine's kernels: read a row, reduce it to a state, write the row. They differ in where the row is kept
// between the two passes:
//
//   GroupBody     | row | row | row | row |   registers of 1 to 32 lanes; a warp has several rows
//                  lanes  lanes ...
//   BlockBody     | warp 0 | warp 1 | ... |   registers of a block, or of the blocks of a cluster; a warp's
//                   lane 0 1 2 ... 31, 0 1 2 ... 31, ...     packs are adjacent, K of them for a thread
//   StreamBody    | kept in shared memory | read again |   distributed among warps likewise; as much is kept as fits
//   PartialBody,  | chunk 0 | chunk 1 | ... |   nowhere; many blocks share a row: two launches, of which
//   FinishBody        block     block           the first leaves each chunk's state in the workspace
//
// Reading a row again is fast: it comes from a cache (H200: the L1 up to 32,768 halves, the L2 up to 131,072), no
// registers hold it, and occupancy is higher. So StreamBody serves all rows that are too long for a warp, and its speed
// depends on the number of instructions for each pack.
//
//   kEnds:   ....|head|  pack  |  pack  |  pack  |tail|....      | : multiples of 16 bytes
//
// Rows that do not begin or end at multiples of 16 bytes (because of an odd number of columns, say) are moved in wide
// packs as well, from the first aligned address on. Head and tail, the row's edge, are moved in single elements, one
// for each thread. Where packs begin depends on the row; functors other than the one that leads take packs at any
// column (concepts.h).
#pragma once

#include "packs.cuh"

KERNELS_BEGIN
namespace detail {

// ---- a row in registers --------------------------------------------------------------------------------------------

// The packs that a thread holds in registers, at most K. kCount: every thread of the team holds this number; 0: it
// differs.
template <int K, int kCount>
struct Place {
  int first, stride, end;

  __device__ __forceinline__ bool has(int k) const { return kCount > 0 || first + k * stride < end; }
  // Calls f(run, index of its first pack).
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
__device__ __forceinline__ void fetch_row(Fetched<Source, N> (&fetched)[K], const Source& source, int64_t row,
                                          const Place<K, kCount>& place) {
  place.each([&](const auto& at, int k) { fetch_run<N>(fetched + k, source, row, at); });
}

// Resolves the packs that a thread has fetched, and adds them to its running state.
template <int N, int K, int kCount, class P, bool kEnds>
__device__ __forceinline__ void take_held(const P& p, const Fetched<typename P::Source, N> (&fetched)[K],
                                          Pack<typename P::C, N> (&values)[K], Edge<P, kEnds>& edge, int64_t row,
                                          const Place<K, kCount>& place, typename P::Op::State& running) {
  // With ops that read values twice, one run of a single pack at a time takes fewer registers.
  if constexpr (kCount > 0 || P::Op::takes_two_passes) {
    place.each([&](const auto& at, int k) { take_run<N>(p.op, p.source, running, fetched + k, values + k, row, at); });
  } else {
    place.each([&](const auto& at, int k) { values[k] = resolve(p.source, fetched[k], row, at.col(0)); });
    take_packs<K>(p.op, running, values, [&place](int k) { return place.has(k); });
  }
  edge.take(p, running, row);
}

// From the packs that a thread has fetched to the sink; in between the row's values are in registers.
template <int N, int K, int kCount, class P, bool kEnds, class Reduce>
__device__ __forceinline__ void hold_row(const P& p, const Fetched<typename P::Source, N> (&fetched)[K],
                                         Edge<P, kEnds> edge, int64_t row, const Place<K, kCount>& place, bool writes,
                                         bool leader, const Reduce& reduce) {
  Pack<typename P::C, N> values[K];
  if constexpr (kCount < K) {
    KERNELS_UNROLL
    for (int k = 0; k < K; ++k)
      values[k] = broadcast<N>(typename P::C(0));  // otherwise the compiler carries missing packs from row to row
  }
  typename P::Op::State running;
  if (repeatable<typename P::Source> || writes) take_held<N>(p, fetched, values, edge, row, place, running);
  // Expensive centering is done while other threads are still loading, on the thread's running state; cheap centering
  // later, on the row's state, which is the better one.
  constexpr bool late = P::Op::cheap_center;
  KERNELS_UNROLL
  for (int k = 0; k < K; ++k) values[k] = late ? values[k] : p.op.center(values[k], running);
  if constexpr (!late) edge.center(p, running);

  // If the sink's operands are few, they are prefetched before the barrier, so that no thread waits for them
  // afterwards.
  const auto& map = sink_map(p.sink);
  constexpr bool early = K * sizeof(Operands<P, N>) <= 32;
  Operands<P, N> operands[early ? K : 1];
  const auto fetch_early = [&](const auto& at, int from) {
    KERNELS_UNROLL
    for (int k = 0; k < at.count; ++k) operands[from + k] = fetch_operands<N>(map, row, at.col(k));
  };
  if constexpr (early) place.each(fetch_early);
  const auto state = reduce(p.op, running);
  const auto center = [&](const auto& value) { return late ? p.op.center(value, state) : value; };
  const auto visit = [&](const auto& f, auto how) {
    if (!writes) return;
    if constexpr (std::is_same<decltype(how), Finished>::value) {
      place.each([&](const auto& at, int from) {
        KERNELS_UNROLL
        for (int k = 0; k < at.count; ++k) f(values[from + k], Nothing(), at.col(k), std::true_type());
      });
      edge.show(p, row, [](const auto& value) { return value; }, f);
    } else {
      place.each([&](const auto& at, [[maybe_unused]] int from) {
        [[maybe_unused]] int number = from;
        const auto show = [&](const auto&... what) {
          if constexpr (holds_finished<P>) values[number++] = f(what...);
          else f(what...);
        };
        if constexpr (early) {
          KERNELS_UNROLL
          for (int k = 0; k < at.count; ++k)
            show(center(values[from + k]), operands[from + k], at.col(k), std::true_type());
        } else {
          show_run<N>(p, row, at, [&](int k) { return center(values[from + k]); }, show);
        }
      });
      if constexpr (holds_finished<P>) edge.finish(p, row, center, f);
      else edge.show(p, row, center, f);
    }
  };
  finish_row<false, holds_finished<P>>(p, late ? state : running, state, row, leader, visit, reduce);
}

// A row for each group of 1 to 32 lanes, a power of two. kAll: every lane holds K packs, and the number of lanes, at
// least two, is known at compile time as well. kEnds: a row has edges, with at most as many elements as lanes.
template <class P, int N, int K, bool kAll, bool kEnds = false>
struct GroupBody {
  static_assert(!kEnds || !kAll, "rows with edges differ from each other");
  using C = typename P::C;
  using Source = typename P::Source;
  static constexpr int max_threads = 128, operands = sizeof(Operands<P, N>) / 4;
  // Such rows are short: it is important that all their blocks run at the same time.
  static constexpr bool one_tensor = sizeof(Fetched<Source, N>) <= 16;
  static constexpr int registers =
      kAll && sizeof(C) == 4 && one_tensor
          ? 40
          : registers_for<P, N, K>(N * K + operands, (one_tensor ? 28 : 36) + (kEnds ? 16 : 0));
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

  // Rows of one pass are adjacent, so neighbouring groups access neighbouring memory. Groups without a row take part in
  // the exchanges with the last row, and do not write it.
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

// The packs of a thread of a team, at constant distances.
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

// A row for each block or cluster, in registers.
template <class P, int N, int K>
struct BlockBody {
  using C = typename P::C;
  static constexpr int registers = registers_for<P, N, K>(N * K, 28);
  static constexpr int max_threads = threads_for(registers);
  struct Params {
    P problem;
    int width, warp_width;
    int count;  // packs of every thread whose columns are in the row; 0: that differs
  };

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ Scratch<P> scratch;
    BlockTeam team(scratch);
    const bool whole = params.width * (team.block() + 1) <= params.problem.cols;
    counted<K>(params, team, whole ? params.count : 0);
  }

 private:
  // Numbers of packs above half of K have instantiations of their own, if packs are wide and K therefore is small.
  template <int kCount, class Team>
  static __device__ __forceinline__ void counted(const Params& params, Team& team, int count) {
    if (count == kCount) rows<kCount>(params, team);
    else if constexpr (kCount <= K / 2 || N * sizeof(C) < 16) rows<0>(params, team);
    else counted<kCount - 1>(params, team, count);
  }

  template <int kCount, class Team>
  static __device__ __forceinline__ void rows(const Params& params, Team& team) {
    const P& p = params.problem;
    const auto reduce = [&](const auto& op, const auto& seen) {
      return team.template reduce<kCount * 32 * N>(op, seen, columns_of(p));
    };
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

// Each thread processes its part of the row K packs at a time. What it fetched in the first `kept` steps stays in
// shared memory, which only this thread reads; nothing is kept of rows with edges.
template <class P, int N, int K, bool kEnds = false>
struct StreamBody {
  using C = typename P::C;
  using Source = typename P::Source;
  using Kept = Fetched<Source, N>;
  static constexpr int registers = registers_for<P, N, K>(
      P::Op::takes_two_passes ? N * K : 24, (K * N > 32 ? 32 : 24) + (kEnds ? P::Op::takes_two_passes ? 8 : 16 : 0));
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
    BlockTeam team(scratch);
    const auto reduce = [&](const auto& op, const auto& state) {
      return team.reduce(op, state, columns_of(params.problem));
    };
    const bool leader = team.rank() == 0 && team.block() == 0;

    for (int64_t row = team.cluster(); row < params.problem.rows; row += team.clusters()) {
      const RowEnds ends = ends_of(params, row);
      const Slice<N> slice(team, params.width, params.warp_width, ends.head, ends.end);
      decltype(auto) p = placed(params.problem, row, slice.first);
      const Part part{p, row, slice, team, params.kept};
      auto edge = edge_of(ends, team);

      typename P::Op::State running;
      edge.fetch(p, row);
      part.take(running);
      edge.take(p, running, row);
      const auto state = reduce(p.op, running);

      const auto visit = [&](const auto& f, auto cut) {
        part.template show<decltype(cut)::value>(state, f);
        edge.show(p, row, [&](const auto& value) { return p.op.center(value, state); }, f);
      };
      finish_row<kEnds>(p, state, state, row, leader, visit, reduce);
    }
  }

 private:
  using Team = decltype(BlockTeam(std::declval<Scratch<P>&>()));

  static __device__ __forceinline__ RowEnds ends_of([[maybe_unused]] const Params& params,
                                                    [[maybe_unused]] int64_t row) {
    if constexpr (kEnds) return RowEnds(params.phase.at(row), N, int(params.problem.cols));
    else return RowEnds::none(int(params.problem.cols));
  }
  // The problem itself, or one row of it.
  static __device__ __forceinline__ decltype(auto) placed(const P& p, [[maybe_unused]] int64_t row,
                                                          [[maybe_unused]] int col) {
    if constexpr (kEnds) return p.template placed<N>(row, col);
    else return (p);
  }
  // The last warp of a block has the fewest packs, so it takes the edge.
  static __device__ __forceinline__ Edge<P, kEnds> edge_of([[maybe_unused]] const RowEnds& ends,
                                                           [[maybe_unused]] const Team& team) {
    if constexpr (kEnds) return {ends, team.block() == 0 ? team.rank() - (team.size() - 32) : -1};
    else return {};
  }

  // A thread's part of a row, which it processes twice or more.
  struct Part {
    const P& p;
    int64_t row;
    const Slice<N>& slice;
    const Team& team;
    int kept;

    // The first pass.
    __device__ __forceinline__ void take(typename P::Op::State& running) const {
      const auto& source = cached(p.source);
      const int rest = each_kept([&](const auto& at, Kept* here) {
        Kept fetched[at.count];
        fetch_run<N>(fetched, p.source, row, at);
        KERNELS_UNROLL
        for (int k = 0; k < at.count; ++k) here[k * team.size()] = fetched[k];
        take_fetched(running, p.source, fetched, at);
      });
      each_other(rest, [&](const auto& at) {
        Fetched<FirstPass<Source>, N> fetched[at.count];
        fetch_run<N>(fetched, source, row, at);
        take_fetched(running, source, fetched, at);
      });
    }

    // Later passes: f(pack, operands, column, whether it exists), as in show_run.
    template <bool kCut, class State, class F>
    __device__ __forceinline__ void show(const State& state, const F& f) const {
      const auto& pure = without_effects(p.source);
      const auto& again = second_pass(p.source);
      const int rest = each_kept([&](const auto& at, const Kept* here) {
        Kept fetched[at.count];
        KERNELS_UNROLL
        for (int k = 0; k < at.count; ++k) fetched[k] = here[k * team.size()];
        show_fetched(state, pure, fetched, at, f);
      });
      const auto read_again = [&](const auto& at) {
        Fetched<SecondPass<Source>, N> fetched[at.count];
        fetch_run<N>(fetched, again, row, at);
        show_fetched(state, again, fetched, at, f);
      };
      if constexpr (kCut && repeatable<Source>) each_run<1>(rest, 32 * N, slice.end, read_again);
      else each_other(rest, read_again);
    }

   private:
    // Calls f(run, where its packs are kept, `size()` apart); returns the first column after those runs.
    template <class F>
    __device__ __forceinline__ int each_kept([[maybe_unused]] const F& f) const {
      if constexpr (kEnds) return slice.first;
      extern __shared__ __align__(16) unsigned char dynamic_shared[];
      Kept* here = reinterpret_cast<Kept*>(dynamic_shared) + team.rank();
      int first = slice.first, i = 0;
      for (; i < kept && first + (K - 1) * 32 * N < slice.end; ++i, first += K * 32 * N, here += K * team.size())
        f(Run<K>{first, 32 * N}, here);
      if constexpr (loaded_once<Source>) {  // a last, shorter step as well
        for (; i < kept && first < slice.end; first += 32 * N, here += team.size()) f(Run<1>{first, 32 * N}, here);
      }
      return first;
    }

    // The packs that are not kept in shared memory. In a warp's last run a lane may read another lane's pack, unless
    // reading has effects.
    template <class F>
    __device__ __forceinline__ void each_other(int first, const F& f) const {
      if constexpr (kEnds && repeatable<Source>) each_run_of_warp<N, K>(first, team.lane(), slice.end, f);
      else each_run<K>(first, 32 * N, slice.end, f);
    }

    template <class From, class Fetch, class At>
    __device__ __forceinline__ void take_fetched(typename P::Op::State& running, const From& from,
                                                 const Fetch& fetched, const At& at) const {
      Pack<C, N> values[At::count];
      take_run<N>(p.op, from, running, fetched, values, row, at);
    }
    template <class State, class From, class Fetch, class At, class F>
    __device__ __forceinline__ void show_fetched(const State& state, const From& from, const Fetch& fetched,
                                                 const At& at, const F& f) const {
      show_run<N>(
          p, row, at, [&](int k) { return p.op.center(resolve(from, fetched[k], row, at.col(k)), state); }, f);
    }
  };
};

// ---- a row cut into chunks for many blocks -------------------------------------------------------------------------

// For code without clusters; with clusters these bodies are empty, as a cluster shares a long row instead.

template <class P>
struct SplitParams {
  P problem;
  typename P::Op::State* partial;  // rows x chunks
  int chunks;
  int width;                       // columns per chunk
};

// The columns of a piece, a chunk of a row; its threads take packs in turn.
struct Piece {
  int64_t row;
  int begin, end;
  template <class P>
  __device__ __forceinline__ Piece(const SplitParams<P>& params, int64_t index)
      : row(index / params.chunks), begin(int(index % params.chunks) * params.width),
        end(begin + params.width < params.problem.cols ? begin + params.width : int(params.problem.cols)) {}
  // Calls f(run) for all of a thread's packs.
  template <int N, int K, class F>
  __device__ __forceinline__ void each(F f) const {
    each_run<K>(begin + int(threadIdx.x) * N, int(blockDim.x) * N, end, f);
  }
};

template <class P, int N, int K>
struct PartialBody {
  static constexpr int max_threads = 512, registers = 128;
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
  static constexpr int max_threads = 512, registers = 128;
  using Params = SplitParams<P>;

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (!arch::kClusters) {
      const P& p = params.problem;
      const auto& again = second_pass(p.source);
      for (int64_t index = blockIdx.x; index < p.rows * params.chunks; index += gridDim.x) {
        const Piece piece(params, index);
        // Every warp combines all partial states; if there are more than 32, each lane first merges several.
        typename P::Op::State state;
        for (int i = threadIdx.x & 31; i < params.chunks; i += 32)
          p.op.merge(state, params.partial[piece.row * params.chunks + i]);
        state = p.op.gather(state, PartLanes<C>(&p.columns));
        const bool leader = threadIdx.x == 0 && piece.begin == 0;
        const auto visit = [&](const auto& f, auto) {
          piece.each<N, K>([&](const auto& at) {
            Fetched<SecondPass<typename P::Source>, N> fetched[at.count];
            fetch_run<N>(fetched, again, piece.row, at);
            show_run<N>(
                p, piece.row, at,
                [&](int k) { return p.op.center(resolve(again, fetched[k], piece.row, at.col(k)), state); }, f);
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
