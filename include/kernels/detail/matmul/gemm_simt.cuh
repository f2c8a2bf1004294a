// Products with many tokens on CUDA cores, for float and double weights, which tensor cores would round.
//
//             128 or 64 outputs
//            +--------------------------+     256 threads, 16 x 16. A thread has 8 x 8 or 4 x 4 sums, in groups of 16
//   128 or   | t0 t1 .. t15 | t0 t1 ..  |     bytes, 16 threads apart: a warp reads whole lines
//   64       | t16 ...      |           |
//   tokens   +--------------------------+     K in steps of 16: one in shared memory, the next in registers
#pragma once

#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// kWidth: elements in one access to either operand. kTile_: tokens and outputs of a tile.
template <class P, int kWidth, int kTile_>
struct SimtGemmBody {
  using C = typename P::C;
  using X = typename P::X;
  static constexpr int kTile = kTile_, kSide = kTile / 16, kStep = 16;
  static constexpr int max_threads = 256, registers = kTile * int(sizeof(C)) > 256 ? 255 : 128;
  static constexpr int kPitch = kTile + 16 / int(sizeof(C));
  static constexpr int kPacks = kTile * kStep / kWidth / max_threads;  // of each operand, for a thread
  static constexpr int kTokens = kTile, kOutputs = kTile;
  struct Params {
    P problem;
    int64_t token_tiles;
  };
  using Weights0 = FirstWeights<P>;
  using Weights1 = std::decay_t<decltype(std::declval<const P&>().template weights<P::matrices - 1>())>;

  static __device__ __forceinline__ void run(const Params& params) {
    __shared__ __align__(16) C x[kStep * kPitch], w[P::matrices][kStep * kPitch];
    const P& p = params.problem;
    const Tile tile(p, blockIdx.x % params.token_tiles, kTile, blockIdx.x / params.token_tiles * kTile);
    const int64_t token = tile.token, output = tile.weights + tile.output, output_end = tile.weights + p.n;
    if (token >= tile.token_end) return;
    __shared__ Uninitialized<TokenState<X>, kTile> states;
    find_states<kWidth>(states.items, p.x, token, kTile, tile.token_end, p.k, tile.output == 0);
    const auto input = [&](int i) -> decltype(auto) { return states.items[i].bind(p.x); };
    const auto weights = [&p](auto i) {
      return [&p](int) -> decltype(auto) { return p.template weights<decltype(i)::value>(); };
    };
    const auto weights0 = weights(std::integral_constant<int, 0>());
    const auto weights1 = weights(std::integral_constant<int, P::matrices - 1>());
    Fetched<X, kWidth> inputs[kPacks];
    Fetched<Weights0, kWidth> first[kPacks];
    Fetched<Weights1, kWidth> second[P::matrices == 2 ? kPacks : 1];
    const auto prefetch = [&](int col) {
      prefetch_operand<X>(inputs, input, token, tile.token_end, col, p.k);
      prefetch_operand<Weights0>(first, weights0, output, output_end, col, p.k);
      if constexpr (P::matrices == 2) prefetch_operand<Weights1>(second, weights1, output, output_end, col, p.k);
    };
    C sums[P::matrices][kSide][kSide] = {};
    if (p.k > 0) prefetch(0);
    for (int64_t col = 0; col < p.k; col += kStep) {
      __syncthreads();
      store_operand<X>(x, inputs, input, token, tile.token_end, int(col), p.k);
      store_operand<Weights0>(w[0], first, weights0, output, output_end, int(col), p.k);
      if constexpr (P::matrices == 2)
        store_operand<Weights1>(w[1], second, weights1, output, output_end, int(col), p.k);
      __syncthreads();
      if (col + kStep < p.k) prefetch(int(col) + kStep);
      add_step(sums, x, w);
    }
    put_sums(p, tile, sums);
  }

 private:
  // A thread's values are in groups of four (double: two), 16 threads apart, so that a warp reads whole lines.
  static constexpr int kVector = 16 / int(sizeof(C));
  static __device__ __forceinline__ int index_of(int thread, int i) {
    return i / kVector * (16 * kVector) + thread * kVector + i % kVector;
  }
  static __device__ __forceinline__ void side(C (&values)[kSide], const C* from, int thread) {
    KERNELS_UNROLL
    for (int i = 0; i < kSide; i += kVector)
      memcpy(values + i, __builtin_assume_aligned(from + index_of(thread, i), 16), 16);
  }

  // Adds the products of the step in shared memory.
  static __device__ __forceinline__ void add_step(C (&sums)[P::matrices][kSide][kSide], const C (&x)[kStep * kPitch],
                                                  const C (&w)[P::matrices][kStep * kPitch]) {
    KERNELS_UNROLL
    for (int k = 0; k < kStep; ++k) {
      C mine[kSide];
      side(mine, x + k * kPitch, threadIdx.x / 16);
      KERNELS_UNROLL
      for (int i = 0; i < P::matrices; ++i) {
        C theirs[kSide];
        side(theirs, w[i] + k * kPitch, threadIdx.x % 16);
        KERNELS_UNROLL
        for (int a = 0; a < kSide; ++a) {
          KERNELS_UNROLL
          for (int b = 0; b < kSide; ++b) sums[i][a][b] = fma(mine[a], theirs[b], sums[i][a][b]);
        }
      }
    }
  }

  static __device__ __forceinline__ void put_sums(const P& p, const Tile& tile,
                                                  const C (&sums)[P::matrices][kSide][kSide]) {
    KERNELS_UNROLL
    for (int a = 0; a < kSide; ++a) {
      KERNELS_UNROLL
      for (int b = 0; b < kSide; b += outputs_per_store<P>) {
        const int64_t row = tile.token + index_of(threadIdx.x / 16, a),
                      col = tile.output + index_of(threadIdx.x % 16, b);
        if (row >= tile.token_end || col >= p.n) continue;
        typename Result<P>::Sums totals[P::matrices];
        KERNELS_UNROLL
        for (int i = 0; i < P::matrices; ++i) {
          KERNELS_UNROLL
          for (int j = 0; j < outputs_per_store<P>; ++j) totals[i].v[j] = sums[i][a][b + j];
        }
        Result<P>::of(p, row, col).put_sums(totals, Nothing{});
      }
    }
  }

  // Calls f(index of the pack, row in the tile, column in the step) for a thread's packs.
  template <class F>
  static __device__ __forceinline__ void each_pack(const F& f) {
    KERNELS_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int index = i * max_threads + threadIdx.x;
      f(i, index / (kStep / kWidth), index % (kStep / kWidth) * kWidth);
    }
  }
  // source(row in the tile)
  template <class Source, class At>
  static __device__ __forceinline__ void prefetch_operand(Fetched<Source, kWidth> (&fetched)[kPacks], const At& source,
                                                          int64_t begin, int64_t rows, int col, int64_t cols) {
    each_pack([&](int i, int row, int at) {
      if (begin + row < rows && col + at < cols) fetched[i] = fetch<kWidth>(source(row), begin + row, col + at);
    });
  }
  template <class Source, class At>
  static __device__ __forceinline__ void store_operand(C* to, const Fetched<Source, kWidth> (&fetched)[kPacks],
                                                       const At& source, int64_t begin, int64_t rows, int col,
                                                       int64_t cols) {
    each_pack([&](int i, int row, int at) {
      Pack<C, kWidth> values = broadcast<kWidth>(C(0));
      if (begin + row < rows && col + at < cols)
        values = convert<C>(resolve(source(row), fetched[i], begin + row, col + at));
      KERNELS_UNROLL
      for (int j = 0; j < kWidth; ++j) to[(at + j) * kPitch + row] = values.v[j];
    });
  }
};

}  // namespace detail
KERNELS_END
