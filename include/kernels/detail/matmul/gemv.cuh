// Products with few tokens on CUDA cores: weights are read directly into registers, once for M tokens.
//
//               K: | warp 0 | warp 1 | ... | warp 0 | warp 1 | ...    a warp reads `step` columns at a time
//   weights row 0  |########|########|     |########|
//           row R-1|########|########|     |########|         a block has R rows of weights (with a
//   token   0..M-1 |--------|--------|     |--------|         gate, of both matrices) and M tokens
//
//   sums[R x M] of each warp -> shared memory -> added in the order of warps -> sink, one result (or pair) for a thread
//
// A block has as many threads, up to 512, as it takes to have a whole row in flight: each thread then waits for memory
// once, and the following blocks keep the memory busy. The order of additions depends only on shapes and types.
#pragma once

#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// Whether weights have a scale for whole packs.
template <class W, class Fetched, class = void>
struct has_unscaled : std::false_type {};
template <class W, class Fetched>
struct has_unscaled<W, Fetched, void_t<decltype(std::declval<const W&>().scale_of(std::declval<const Fetched&>()))>>
    : std::true_type {};

// sum + weights * x; a scale that the pack's weights share is applied once.
template <class W, class Fetched, class C, int N>
__device__ __forceinline__ C add_product(C sum, const W& w, const Fetched& fetched, const Pack<C, N>& x, int64_t row,
                                         int64_t col) {
  const auto chain = [&](C total, const auto& weights) {
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) total = fma(C(weights.v[i]), x.v[i], total);
    return total;
  };
  if constexpr (has_unscaled<W, Fetched>::value)
    return fma(C(w.scale_of(fetched)), chain(C(0), w.unscaled(fetched, row, col)), sum);
  else return chain(sum, resolve(w, fetched, row, col));
}

// One row of a source, with everything that depends on the row computed once, as far as the source allows.
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

// Rows row + r, up to `last`, of one head. What depends on the part and the head is computed once for all of them, as
// instructions are the limit: every thread does this before it can read a weight (QKV with RoPE, 6144 x 4096: 15.0 us;
// computed for each row 17.0).
template <class One, int R>
struct RowsOf {
  One rows[R];
};
template <class One, class W, size_t... r>
__device__ __forceinline__ RowsOf<One, int(sizeof...(r))> rows_of_head(const W& w, unsigned row, unsigned last,
                                                                       std::index_sequence<r...> all) {
  if constexpr (is_stacked<W>::value) {
    return w.visit(row, [&](const auto& part, int64_t begin) {
      return rows_of_head<One>(part, unsigned(row - begin), unsigned(last - begin), all);
    });
  } else if constexpr (has_at_row<W>::value) {
    return {{One{w.at_row(row, lesser(unsigned(r), last - row)), {}}...}};
  } else {
    return {{One{w, lesser(row + unsigned(r), last)}...}};
  }
}

// R rows of a matrix, kStep apart, and their packs in flight. Rows beyond the end are replaced by the last one; packs
// beyond their end are zeros if kZeros.
template <class W, int N, int R, int U, bool kZeros, int kStep = 1>
struct GemvRows {
  using One = decltype(row_of(std::declval<const W&>(), kAny));
  using Source = std::decay_t<decltype(std::declval<const One&>().source)>;
  One rows[R];
  Fetched<Source, N> fetched[U][R];

  __device__ __forceinline__ GemvRows(const W& w, unsigned row, unsigned end)
      : GemvRows(w, row, end - 1, std::make_index_sequence<R>()) {}

  __device__ __forceinline__ void prefetch(int u, int col, int end) {
    if (col < end) {
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r)
        fetched[u][r] =
            fetch<N>(rows[r].source, rows[r].row, int64_t(unsigned(col)));  // unsigned: no sign extension
    } else if constexpr (kZeros) {
      memset(&fetched[u], 0, sizeof(fetched[u]));
    }
  }

 private:
  template <size_t... r>
  __device__ __forceinline__ GemvRows(const W& w, unsigned row, unsigned last, std::index_sequence<r...> all)
      : GemvRows(find(w, row, last, all), all) {}
  template <class Found, size_t... r>
  __device__ __forceinline__ GemvRows(const Found& found, std::index_sequence<r...>) : rows{found.rows[r]...} {}
  template <size_t... r>
  static __device__ __forceinline__ RowsOf<One, R> find(const W& w, unsigned row, unsigned last,
                                                        std::index_sequence<r...> all) {
    if constexpr (in_heads<W> && kStep == 1 && 8 % R == 0) return rows_of_head<One>(w, lesser(row, last), last, all);
    else return {{row_of(w, lesser(row + unsigned(r) * kStep, last))...}};
  }
};

// The tokens of a block. A token beyond the end is replaced by the last one and not written.
template <class P, int M>
struct GemvTokens {
  using State = TokenState<typename P::X>;
  const P& p;
  int64_t first;
  State states[M];

  __device__ __forceinline__ int64_t row(int m) const { return M == 1 ? first : lesser(first + m, p.m - 1); }
  __device__ __forceinline__ decltype(auto) source(int m) const { return states[m].bind(p.x); }
};

// The sums of a block's warps, in shared memory. Every block ends with them, so the total is computed without a branch:
// missing warps count as zeros.
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

// The totals of a warp's kSums sums, whose parts are distributed over its lanes.
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

// The dot products of R rows of each matrix with M tokens on CUDA cores, in the compute type.
template <class P, int N, int R, int M>
struct PlainDots {
  using C = typename P::C;
  static constexpr int pack = N, rows = R, tokens = M, max_threads = 512;
  static constexpr int step = 32 * N;     // columns that a warp takes at a time
  static constexpr bool few_warps = false;  // whether a few warps should share a row
  static constexpr int pieces = 1;          // of a step: each is prefetched again once it has been used
  template <class Weights, int U>
  using Rows = GemvRows<Weights, N, R, U, false>;
  static constexpr int input_pack = pack_within<typename P::X, N>;
  // As few as barely avoid spilling: following blocks keep the memory busy.
  static constexpr int registers = sizeof(C) > 4 || N == 1 || M > 4 ? 128
                                   : M > 1                          ? 80
                                   : !starts_normed<typename P::X>  ? 32
                                   : R * P::matrices > 4            ? 96
                                                                    : 48;
  C sums[P::matrices][M][R] = {};
  static constexpr int bytes_of_warp = 0;  // of shared memory
  __device__ __forceinline__ PlainDots(unsigned char*, const GemvTokens<P, M>&, int) {}

  static __device__ __forceinline__ unsigned first_row() { return 0; }
  template <class Some>
  static __device__ __forceinline__ void prefetch(Some& rows, int u, int begin, int end) {
    rows.prefetch(u, begin + int(threadIdx.x & 31) * N, end);
  }

  // Adds what the warp has prefetched of the step at column `begin`, piece u of those in flight.
  template <class First, class Second>
  __device__ __forceinline__ void add(const First& first, const Second& second, int u, const GemvTokens<P, M>& of,
                                      int begin) {
    const int col = begin + int(threadIdx.x & 31) * N;
    if (col >= of.p.k) return;
    KERNELS_UNROLL
    for (int m = 0; m < M; ++m) {
      const Pack<C, N> x = read(of.source(m), of.row(m), col);
      KERNELS_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[0][m][r] =
            add_product(sums[0][m][r], first.rows[r].source, first.fetched[u][r], x, first.rows[r].row, col);
        if constexpr (P::matrices == 2)
          sums[1][m][r] =
              add_product(sums[1][m][r], second.rows[r].source, second.fetched[u][r], x, second.rows[r].row, col);
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

// A block computes R rows of outputs for M tokens.
template <class P, class Dots, int U>
struct GemvBody {
  using C = typename P::C;
  static constexpr int max_threads = Dots::max_threads, registers = Dots::registers;
  static constexpr int step = Dots::step, R = Dots::rows, M = Dots::tokens, under_way = U;
  static constexpr bool few_warps = Dots::few_warps;
  static constexpr int bytes_of_warp = Dots::bytes_of_warp;
  static constexpr int kSums = M * R, kPieces = Dots::pieces;  // sums for each matrix; pieces of a step
  static constexpr bool waits_for_predecessor_itself = true;
  struct Params {
    P problem;
    bool weights_ready;  // weights may be read before the kernel ahead has ended
  };
  static constexpr int kOut = outputs_per_store<P>;
  static_assert(R % kOut == 0, "pairs are whole");
  static constexpr bool kReads = !std::is_empty<Operands<P, kOut>>::value;
  using Prepared = decltype(prepare<kOut>(sink_end(std::declval<const P&>().out), kAny, kAny));
  static constexpr bool kPrepares = !std::is_same<Prepared, Nothing>::value;
  using Tokens = GemvTokens<P, M>;
  using State = typename Tokens::State;

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ WarpSums<C, P::matrices * kSums, max_threads / 32> sums;
    __shared__ typename State::Scratch scratch;
    extern __shared__ __align__(16) unsigned char of_warps[];
    __shared__ Uninitialized<Prepared, kPrepares ? kSums / kOut : 1> prepared;
    if (!params.weights_ready) arch::grid_dependency_pass();  // also before expert ids are read
    const P& p = params.problem;
    const unsigned row = blockIdx.x * R,
                   rows = unsigned(p.n);  // 32 bits: work before the first loads counts
    Tokens tokens{p, (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * M};
    if (by_token<typename P::W> && tokens.first >= p.m) return;
    const auto& weights = p.template weights_for<0>(tokens.first);
    const auto& others = p.template weights_for<P::matrices - 1>(tokens.first);
    typename Dots::template Rows<std::decay_t<decltype(weights)>, kPieces * U> first(weights, row + Dots::first_row(),
                                                                                     rows);
    typename Dots::template Rows<std::decay_t<decltype(others)>, kPieces * U> second(others, row + Dots::first_row(),
                                                                                     rows);
    const int warp = threadIdx.x / 32, stride = int(blockDim.x / 32) * step, cols = int(p.k);
    const auto prefetch = [&](int u, int begin) {
      Dots::prefetch(first, u, begin, cols);
      if constexpr (P::matrices == 2) Dots::prefetch(second, u, begin, cols);
    };
    int begin = warp * step;
    KERNELS_UNROLL
    for (int u = 0; u < U * kPieces; ++u) prefetch(u, begin + u / kPieces * stride);
    if (tokens.first >= p.m) return;  // after issuing loads of weights, if these are the same for all tokens
    sums.clear_missing();
    arch::grid_dependency_pass();
    typename State::Team team(scratch);
    KERNELS_UNROLL
    for (int m = 0; m < M; ++m) {  // while the weights are in flight
      tokens.states[m] = State::template by_block<pack_within<typename P::X, Dots::pack>>(
          team, p.x, tokens.row(m), cols, blockIdx.x == 0 && tokens.first + m < p.m);
    }
    // The first threads compute the results, a row (or pair) and a token each. The sink's operands are prefetched now.
    const int64_t token = tokens.first + threadIdx.x / (R / kOut);
    const unsigned output = row + threadIdx.x % (R / kOut) * kOut;
    const bool makes = int(threadIdx.x) < kSums / kOut && token < p.m && output < rows;
    Operands<P, kOut> operands;
    if constexpr (kReads) operands = Result<P>::fetch(p, makes ? token : tokens.first, makes ? output : row);
    if constexpr (kPrepares) {
      if (makes)
        prepared.items[threadIdx.x] = prepare<kOut>(sink_end(p.out), token, output);  // read again by the same thread
    }
    Dots dots(of_warps + warp * Dots::bytes_of_warp, tokens, begin);
    add_steps(dots, first, second, tokens, begin, stride, cols, prefetch);
    dots.share(sums);
    __syncthreads();
    if (!makes) return;
    if constexpr (!kReads) operands = Result<P>::fetch(p, token, output);
    put_totals(Result<P>{p, token, output, operands}, sums, prepared.items[kPrepares ? threadIdx.x : 0]);
  }

 private:
  // Processes a warp's steps from column `begin` on; prefetch(u, column) issues the loads of later ones.
  template <class First, class Second, class Prefetch>
  static __device__ __forceinline__ void add_steps(Dots& dots, const First& first, const Second& second,
                                                   const Tokens& tokens, int begin, int stride, int cols,
                                                   const Prefetch& prefetch) {
    for (; begin < cols; begin += U * stride) {
      KERNELS_UNROLL
      for (int u = 0; u < U * kPieces; ++u) {
        const int at = begin + u / kPieces * stride;
        if (at >= cols) break;
        dots.add(first, second, u, tokens, at);
        if (at + U * stride < cols) prefetch(u, at + U * stride);
      }
    }
  }

  // A thread's result: the total of all warps' sums.
  template <class Sums>
  static __device__ __forceinline__ void put_totals(const Result<P>& result, const Sums& sums,
                                                    const Prepared& prepared) {
    Pack<C, kOut> totals[P::matrices];
    KERNELS_UNROLL
    for (int i = 0; i < P::matrices; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kOut; ++j) totals[i].v[j] = sums.total(i * kSums + threadIdx.x * kOut + j);
    }
    result.put_sums(totals, prepared);
  }
};

}  // namespace detail
KERNELS_END
