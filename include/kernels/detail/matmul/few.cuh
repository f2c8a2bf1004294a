// Products with few tokens on tensor cores, for sm_80 and up: 16-bit weights stream through shared memory.
//
//   a block:   up to 64 rows of weights x all tokens (32 at most), K in steps of 128 columns
//
//   ring:      | step i | step i+1 | step i+2 | ...   3, 4 or 6 stages of: weights 64 x 128 | inputs 32 x 128
//   a step:    | warp 0: 32 columns | warp 1 | warp 2 | warp 3 |
//   mma:       tokens are the 16 rows, weights the 8 columns
//
// 256 bytes of a row of weights come at a time, as DRAM is faster with long runs. A fragment's k may be in any order
// that both operands share, so that the 16 bytes which a lane reads are operands of two mma. The warps' sums are added
// in their order, and where blocks of a cluster share K, in that of their ranks.
//
// All blocks run at once and read the same inputs: each begins at another step, so that they do not all want the same
// lines of the L2 at the same time (14336 x 4096, 32 tokens: 32.0 instead of 34.7 us, 8 tokens 30.0 instead of 31.0).
#pragma once

#include "product.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int kFewTokens = 32;

template <class P>
struct FewBody {
  using X = typename P::X;
  using Gate = std::decay_t<decltype(std::declval<const P&>().template weights<0>())>;
  using T = meeting_type<X, typename P::W>;
  static constexpr int kRows = 64, kTokens = kFewTokens, kStep = 128, kThreads = 128;
  static constexpr int max_threads = kThreads, registers = 168;
  using Inputs = TileOperand<T, X, kTokens, kThreads, 8, kStep>;
  using Weights = TileOperand<T, Gate, kRows, kThreads, 8, kStep>;
  static_assert(Weights::copied, "weights that lie in memory as tensor cores take them");

  static constexpr bool waits_by_itself = true;
  struct Params {
    P problem;
    int rows;    // of weights that a block has, those of a gate included: a multiple of 8 for each matrix
    int stages;  // 3, 4 or 6
    bool wide_out;       // whether the sink takes packs of 8
    bool weights_ready;  // before the kernel ahead has ended
  };
  static KERNELS_HD int stage_bytes(int64_t tokens) {
    return Weights::kBytes + (Inputs::copied && tokens <= 16 ? Inputs::kBytes / 2 : Inputs::kBytes);
  }

  static __device__ __forceinline__ void run(const Params& params) {
    extern __shared__ __align__(128) unsigned char shared[];
    const P& p = params.problem;
    if (!params.weights_ready) arch::grid_dependency_pass();
    const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
    const int tile = int(blockIdx.x / splits), tokens = int(p.m), columns = int(p.k);
    const int64_t output = int64_t(tile) * (params.rows / P::matrices);
    __shared__ Uninitialized<TokenState<X>, kTokens> states;
    const auto input = [&](int i, const auto& f) { f(states.items[i].bind(p.x), i < tokens ? i : 0, i < tokens); };

    const int steps = (columns + kStep - 1) / kStep;
    const int first = int(int64_t(steps) * rank / splits), end = int(int64_t(steps) * (rank + 1) / splits),
              count = end - first;
    const Copies copies(p, params.rows, output);
    const Inputs x(input, 0);
    typename Inputs::Waiting waiting;
    const int stages = params.stages, stage_size = stage_bytes(tokens), last_stage = (stages - 1) * stage_size;
    const uint32_t address = arch::shared_address(shared);
    Ring<decltype(input)> ring{copies, x, input, shared, address, columns, stage_size, waiting};
    const int begin = first + tile % count;
    const auto after = [&](int step) { return step + 1 == end ? first : step + 1; };
    if (params.weights_ready) {
      ring.bring_first_weights(stages, begin, count, after);
      arch::grid_dependency_pass();
    }
    find_states<8>(states.items, p.x, 0, kTokens, p.m, p.k, blockIdx.x == 0);
    int step = ring.bring_first(stages, begin, count, after, params.weights_ready);  // the one to be brought

    float sums[kTokens / 16][kRows / 8][4] = {};
    const unsigned char* const mine =
        shared + Weights::place((threadIdx.x & 31) / 4, threadIdx.x / 32 * 4 + threadIdx.x % 4);
    int stage = 0, free = last_stage;  // where the next step is, and where one will be brought
    int waits = 0;                     // where inputs that are not copied will go, and of which step they are
    int waiting_step = 0;
    for (int i = 0; i < count; ++i) {
      wait_for_step(stages);
      uint32_t weights[kRows / 8][4], inputs[kTokens / 8][4];
      read_step(mine + stage, tokens, weights, inputs);
      if (i > 0 && i + stages - 2 < count) ring.store_inputs(waits, waiting_step);
      if (i + stages - 1 < count) {
        ring.bring_weights(free, step);
        ring.bring_inputs(free, step);
        waits = free, waiting_step = step;
        step = after(step);
      }
      arch::copy_async_commit();
      multiply(sums[0], inputs[0], inputs[1], weights);
      if (tokens > 16) multiply(sums[1], inputs[2], inputs[3], weights);
      free = stage;
      stage = stage == last_stage ? 0 : stage + stage_size;
    }
    arch::copy_async_wait<0>();
    __syncthreads();
    hand_over(params, sums, reinterpret_cast<float*>(shared), output, rank, splits);
  }

 private:
  static constexpr int kTileBytes = 8 * kStep * 2;  // of 8 rows in a stage
  static constexpr int kPitch = kRows + 8;          // floats between the sums of two tokens in shared memory

  // What a thread copies of a step: a chunk of 8 columns of every eighth row. Rows that are not there are those before
  // them once more, as their sums are not used; columns that are not there are zeros.
  struct Copies {
    const T* weights[kRows / 8];
    const T* inputs[Inputs::copied ? kTokens / 8 : 1];
    int row_tiles, token_tiles;

    __device__ __forceinline__ Copies(const P& p, int rows, int64_t output)
        : row_tiles(rows / 8), token_tiles(int(p.m + 7) / 8) {
      KERNELS_UNROLL
      for (int j = 0; j < kRows / 8; ++j) {
        // With a gate, runs of 8 rows of either matrix take turns.
        const int64_t n = lesser(output + j / P::matrices * 8 + row(), p.n - 1);
        weights[j] = opaque((j % P::matrices == 0 ? address_of(p.template weights<0>(), n, 0)
                                                  : address_of(p.template weights<P::matrices - 1>(), n, 0)) +
                            chunk() * 8);
      }
      if constexpr (Inputs::copied) {
        KERNELS_UNROLL
        for (int j = 0; j < kTokens / 8; ++j)
          inputs[j] = opaque(address_of(p.x, lesser<int64_t>(j * 8 + row(), p.m - 1), 0) + chunk() * 8);
      }
    }
    __device__ __forceinline__ void bring_weights(uint32_t stage, int col, int columns) const {
      const bool zeros = col + chunk() * 8 >= columns;
      KERNELS_UNROLL
      for (int j = 0; j < kRows / 8; ++j)
        arch::copy_async_16_if(stage + mine() + j * kTileBytes, weights[j] + col, j < row_tiles, zeros);
    }
    __device__ __forceinline__ void bring_inputs(uint32_t stage, int col, int columns) const {
      const bool zeros = col + chunk() * 8 >= columns;
      KERNELS_UNROLL
      for (int j = 0; j < kTokens / 8; ++j)
        arch::copy_async_16_if(stage + Weights::kBytes + mine() + j * kTileBytes, inputs[j] + col, j < token_tiles,
                               zeros);
    }

   private:
    static __device__ __forceinline__ int chunk() { return threadIdx.x % (kStep / 8); }
    static __device__ __forceinline__ int row() { return threadIdx.x / (kStep / 8); }
    static __device__ __forceinline__ uint32_t mine() { return Weights::place(row(), chunk()); }
  };
  static_assert(kThreads == 8 * (kStep / 8), "threads copy eight rows at a time");

  // The ring of stages, and how a step of K comes to one of them. It refers to what a thread copies: with that as its
  // own members the compiler makes other code.
  template <class Input>
  struct Ring {
    const Copies& copies;
    const Inputs& x;
    const Input& input;
    unsigned char* memory;
    uint32_t address;
    int columns, stage_size;
    typename Inputs::Waiting& waiting;

    // What all stages but one hold at first: steps from `begin` on, after(step) the one that follows. Weights may come
    // before the rest; bring_first() returns the step that is next.
    template <class After>
    __device__ __forceinline__ void bring_first_weights(int stages, int begin, int count, const After& after) const {
      for (int i = 0, step = begin; i < lesser(stages - 1, count); ++i, step = after(step))
        bring_weights(i * stage_size, step);
    }
    template <class After>
    __device__ __forceinline__ int bring_first(int stages, int begin, int count, const After& after, bool has_weights) {
      int step = begin;
      for (int i = 0; i < stages - 1; ++i) {
        if (i < count) {
          if (!has_weights) bring_weights(i * stage_size, step);
          bring_inputs(i * stage_size, step);
          store_inputs(i * stage_size, step);
          step = after(step);
        }
        arch::copy_async_commit();
      }
      return step;
    }

    __device__ __forceinline__ void bring_weights(int stage, int step) const {
      copies.bring_weights(address + stage, step * kStep, columns);
    }
    // Inputs that are not copied are on their way to registers until they are stored.
    __device__ __forceinline__ void bring_inputs(int stage, int step) {
      if constexpr (Inputs::copied) copies.bring_inputs(address + stage, step * kStep, columns);
      else x.prefetch(waiting, input, 0, Inputs::kEach, step * kStep, columns);
    }
    __device__ __forceinline__ void store_inputs(int stage, int step) const {
      if constexpr (!Inputs::copied)
        x.store(waiting, memory + stage + Weights::kBytes, input, 0, Inputs::kEach, step * kStep, columns);
    }
  };

  // Until the next step is there.
  static __device__ __forceinline__ void wait_for_step(int stages) {
    if (stages == 3) arch::copy_async_wait<1>();
    else if (stages == 4) arch::copy_async_wait<2>();
    else arch::copy_async_wait<4>();
    __syncthreads();
  }
  // What a lane multiplies of a step.
  static __device__ __forceinline__ void read_step(const unsigned char* from, int tokens,
                                                   uint32_t (&weights)[kRows / 8][4],
                                                   uint32_t (&inputs)[kTokens / 8][4]) {
    KERNELS_UNROLL
    for (int j = 0; j < kTokens / 8; ++j) {
      if (j < 2 || tokens > 16)
        memcpy(inputs[j], __builtin_assume_aligned(from + Weights::kBytes + j * kTileBytes, 16), 16);
    }
    KERNELS_UNROLL
    for (int j = 0; j < kRows / 8; ++j) memcpy(weights[j], __builtin_assume_aligned(from + j * kTileBytes, 16), 16);
  }

  // Products that depend on each other are apart.
  static __device__ __forceinline__ void multiply(float (&sums)[kRows / 8][4], const uint32_t (&upper)[4],
                                                  const uint32_t (&lower)[4], const uint32_t (&weights)[kRows / 8][4]) {
    KERNELS_UNROLL
    for (int i = 0; i < 4; i += 2) {
      const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
      KERNELS_UNROLL
      for (int j = 0; j < kRows / 8; ++j) {
        const uint32_t b[2] = {weights[j][i], weights[j][i + 1]};
        arch::mma_16816<T>(sums[j], a, b);
      }
    }
  }

  // To the sink by way of shared memory.
  static __device__ __forceinline__ void hand_over(const Params& params,
                                                   const float (&sums)[kTokens / 16][kRows / 8][4], float* shared,
                                                   int64_t output, unsigned rank, unsigned splits) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, tokens = int(params.problem.m);
    float* mine = shared + threadIdx.x / 32 * (kTokens * kPitch) + g * kPitch + 2 * t;
    KERNELS_UNROLL
    for (int i = 0; i < kTokens / 16; ++i) {
      if (16 * i >= tokens) break;
      KERNELS_UNROLL
      for (int j = 0; j < kRows / 8; ++j) {
        *reinterpret_cast<::float2*>(mine + i * (16 * kPitch) + j * 8) = {sums[i][j][0], sums[i][j][1]};
        *reinterpret_cast<::float2*>(mine + (i * 16 + 8) * kPitch + j * 8) = {sums[i][j][2], sums[i][j][3]};
      }
    }
    if (splits > 1) arch::cluster_arrive(), arch::cluster_wait();
    else __syncthreads();
    if (params.wide_out) put_sums<8>(params, shared, output, rank, splits);
    else put_sums<outputs_per_store<P>>(params, shared, output, rank, splits);
    // No block leaves while others read its sums.
    if (splits > 1) arch::cluster_arrive_relaxed(), arch::cluster_wait();
  }

  template <int N>
  static __device__ __forceinline__ void put_sums(const Params& params, const float* from, int64_t output,
                                                  unsigned rank, unsigned splits) {
    const P& p = params.problem;
    const int packs = params.rows / P::matrices / N, all = int(p.m) * packs;
    const auto map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    for (int i = int(threadIdx.x + kThreads * rank); i < all; i += kThreads * int(splits)) {
      const int64_t row = i / packs;
      const int at = i % packs * N;
      const int64_t col = output + at;
      if (col >= p.n) continue;
      const float* sums = from + row * kPitch + (P::matrices == 1 ? at : at / 8 * 16 + at % 8);
      if constexpr (P::matrices == 2) {
        put_joined(sink, map, total<N>(sums, splits), total<N>(sums + 8, splits), row, col);
      } else {
        put_mapped(sink, map, total<N>(sums, splits), row, col);
      }
    }
  }
  template <int N>
  static __device__ __forceinline__ Pack<float, N> total(const float* at, unsigned splits) {
    return sum_of_blocks(at, splits, [](const float* from) {
      Pack<float, N> sum, warp;
      KERNELS_UNROLL
      for (int i = 0; i < kThreads / 32; ++i) {
        memcpy(warp.v, __builtin_assume_aligned(from + i * (kTokens * kPitch), N < 4 ? 4 * N : 16), 4 * N);
        sum = i == 0 ? warp : sum + warp;
      }
      return sum;
    });
  }
};

}  // namespace detail
KERNELS_END
