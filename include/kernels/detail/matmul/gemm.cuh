// Products with many tokens on tensor cores, for sm_80 and later. In code for sm_90a, gemm_boxes.cuh replaces this for
// weights that TMA can copy, and gemm_codes.cuh for codes.
//
//                     kRows (128 or 256) rows of weights
//                    +---------------+---------------+
//   kTokens          | warps 0 to 3  | warps 4 to 7  |    a block's tile. Each four warps compute all tokens x 128
//   (64 or 128)      |               |               |    rows: on sm_90a by wgmma, 64 rows of weights at a time,
//                    +---------------+---------------+    else by mma.sync, each warp half of the tokens x 64 rows,
//                                                         or, if weights are codes, all tokens x 32 rows
//
//   pipeline:   | stage 0 | stage 1 | ... |   each: inputs kTokens x 64 | weights kRows x 64, one step of K
//
// Aligned 16-bit operands are copied to a stage by cp.async, and so are codes of 8 and 4 bits, which lanes decode.
// Other operands are read through their functors, rounded to 16 bits and stored. In shared memory a row of a step is
// eight 16-byte chunks, swizzled so that neither writes nor reads have bank conflicts. The epilogue goes through shared
// memory in slabs, which belong to a warp each, so that the sink gets whole rows.
//
// If the image supports clusters, the blocks of a cluster can share K (split-K): the partial sums are added in the
// order of the blocks' ranks.
#pragma once

#include <cstdint>

#include "../fast_division.cuh"
#include "coded_operand.cuh"
#include "gemm_slabs.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

// Shared memory for stages, in an image for this architecture: within 99 KB up to sm_89, most of a multiprocessor's
// later. Deep pipelines matter more than a second block: 6 stages of 128 x 128 instead of twice 3 took 34.7 instead of
// 42.8 us with 65 tokens, but 110 instead of 102 with 512.
KERNELS_HD constexpr bool has_much_shared(int architecture) { return architecture >= 90 && architecture < 120; }
constexpr int kGemmAligned = 1024;  // alignment for wgmma, where shared memory is large
KERNELS_HD constexpr int gemm_stage_bytes(int tokens, int rows) { return (tokens + rows) * 64 * 2; }
KERNELS_HD constexpr int gemm_stages(int architecture, int stage_bytes, bool normed) {
  const int most = (has_much_shared(architecture) ? 216 << 10 : 96 << 10) / stage_bytes;
  return normed && !has_much_shared(architecture) ? most - 1 : most;
}
KERNELS_HD constexpr int gemm_stages(int architecture, int tokens, int rows, bool normed) {
  return gemm_stages(architecture, gemm_stage_bytes(tokens, rows), normed);
}
// The width that stands for weights copied as codes.
constexpr int kCodedWeights = 0;
// PTX compiled for a GPU with much shared memory may run on one with 99 KB, where this number of stages must do. wgmma
// code runs on sm_90 only, which has much; counting stages at run time would cost it 10 % (4096 x 14336, 64 tokens:
// 44.2 us instead of 38.1).
constexpr int kGemmFewStages = 3;
struct GemmRing {
  int bytes;  // 0: more than a block can have
  bool few;
};

// Rasterization: tiles are ordered in bands of kBand tiles of tokens, so that blocks that run at the same time form a
// compact area and share operands in the L2. Each block computes its tile's place before it reads anything; with
// divisions instead of Divisor that took 400 cycles more.
class TileOrder {
 public:
  struct Coordinates {
    unsigned token_tile, output_tile;
  };
  // For fewer than 2^31 tiles; more are refused earlier.
  TileOrder(int64_t token_tiles, int64_t output_tiles)
      : of_band_(lesser<int64_t>(INT32_MAX, lesser<int64_t>(kBand, token_tiles) * output_tiles)),
        last_height_(greater<int64_t>(1, token_tiles % kBand)),
        whole_bands_(unsigned(token_tiles / kBand)) {}
  __device__ __forceinline__ Coordinates coordinates(unsigned tile) const {
    const unsigned band = of_band_(tile);
    unsigned row = tile % kBand, column = tile / kBand;
    if (band == whole_bands_) row = tile, column = last_height_(row);
    return {band * kBand + row, column};
  }

 private:
  static constexpr unsigned kBand = 8;
  FastDivision of_band_, last_height_;
  unsigned whole_bands_;
};

template <class P>
struct GemmParams {
  P problem;
  TileOrder order;
  int tokens;          // of a tile
  bool wide_out;       // whether the sink takes packs of 8
  bool weights_ready;  // weights may be read before the kernel ahead has ended
  bool few_stages;     // use kGemmFewStages, as the device has no room for more
  int group_log2;      // of codes: see group_log2_of()
  bool fast_sums;      // for e4m3: MatmulPolicy::fast_sums
};

template <int kOutputs, class P>
__device__ __forceinline__ Tile tile_at(const GemmParams<P>& params, unsigned number) {
  const TileOrder::Coordinates coordinates = params.order.coordinates(number);
  return Tile(params.problem, coordinates.token_tile, params.tokens, int64_t(coordinates.output_tile) * kOutputs);
}

// Issues the products of a step of 64 columns, for 128 rows of weights with all tokens. w and x are the first stage's
// weights and inputs; the step is `stage` bytes further.
template <class T, int kBlocks>
__device__ __forceinline__ void begin_products(float (&sums)[kBlocks][32], uint64_t w, uint64_t x, int stage) {
  arch::warpgroup_fence();
  KERNELS_UNROLL
  for (int k = 0; k < 4; ++k) {
    arch::warpgroup_mma<T, 0>(sums, w + stage / 16 + 2 * k, x + stage / 16 + 2 * k);
    arch::warpgroup_mma<T, 1>(sums, w + (stage + 64 * 64 * 2) / 16 + 2 * k, x + stage / 16 + 2 * k);
  }
  arch::warpgroup_commit();
}

// A step's products of 64 rows of weights w with all tokens x, added to the sums, or, without `adds`, overwriting them.
template <class T, class Sum, int kEights>
__device__ __forceinline__ void multiply_step(Sum (&sums)[kEights][4], uint64_t w, uint64_t x, bool adds) {
  KERNELS_UNROLL
  for (int k = 0; k < 4; ++k) arch::warpgroup_mma<T>(sums, w + 2 * k, x + 2 * k, adds || k > 0);
}

template <class P, class T, int kWidth, int kTokens_, int kRows_>
struct GemmTile {
  using X = typename P::X;
  static constexpr bool coded = kWidth == kCodedWeights, transposed = arch::kWarpgroupMma || coded;
  using Slabs = GemmSlabs<P, 1, coded ? SlabOrder::transposed : kDefaultOrder>;
  using Params = GemmParams<P>;
  using Gate = FirstWeights<P>;
  static constexpr int kTokens = kTokens_, kRows = kRows_, kStep = 64, kThreads = kRows;
  static constexpr int kOutputs = kRows / P::matrices, kInputWidth = coded ? 8 : kWidth;
  using Inputs = TileOperand<T, X, kTokens, kThreads, kInputWidth, kStep, coded>;
  using Weights = std::conditional_t<coded, CodedOperand<T, Gate, kRows, kThreads>,
                                     TileOperand<T, Gate, kRows, kThreads, kWidth>>;
  static constexpr bool copied = Inputs::copied && Weights::copied;
  static constexpr int kStageBytes = Inputs::kBytes + Weights::kBytes;
  static_assert(coded || kStageBytes == gemm_stage_bytes(kTokens, kRows), "as the host counts");
  static_assert(!Slabs::all_at_once || has_much_shared(arch::kCompiledFor), "room for all slabs of a tile");

  // Computes a tile and leaves its sums in shared memory, from `stages` on, as the slabs of its warps; if there is no
  // room for all slabs, passes them to the sink one after the other.
  static __device__ __forceinline__ void run(const Params& params, const Tile& tile, bool early_weights,
                                             unsigned char* stages, TokenState<X>* states) {
    const P& p = params.problem;
    const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
    const int64_t token = tile.token, output = tile.output;
    const auto input = [&](int i, const auto& f) {
      const bool there = token + i < tile.token_end;
      f(states[there ? i : 0].bind(p.x), there ? token + i : token, there);
    };
    const auto weight = [&](int i, const auto& f) {
      const int64_t n = output + output_of(i);
      const bool there = n < p.n;
      if constexpr (P::matrices == 2) {
        if (i % (2 * kHalf) >= kHalf) return f(p.template weights<1>(), tile.weights + (there ? n : 0), there);
      }
      f(p.template weights<0>(), tile.weights + (there ? n : 0), there);
    };

    const int columns = int(p.k), steps = (columns + kStep - 1) / kStep;
    const int first = int(int64_t(steps) * rank / splits), end = int(int64_t(steps) * (rank + 1) / splits);
    const auto weights = [&] {
      if constexpr (coded) return Weights(weight, first * kStep, columns, params.group_log2);
      else return Weights(weight, first * kStep);
    };
    Tiles<decltype(input), decltype(weight)> tiles{
        input, weight, {input, first * kStep}, weights(), stages, stages_of(params), first, end - first, columns};
    if (early_weights) {
      tiles.load(0, 0, kWeightsOnly);
#pragma unroll 1
      for (int step = 1; step < tiles.prologue(); ++step) tiles.load(step, step * kStageBytes, kWeightsOnly);
      arch::grid_dependency_pass();
    }
    find_states<pack_within<X, kInputWidth>>(states, p.x, token, kTokens, tile.token_end, p.k,
                                             tile.output == 0 && rank == 0);
    const Which rest = early_weights ? kInputsOnly : kBoth;
    tiles.prefetch(0, 4, 0);
    tiles.load(0, 0, rest);
    arch::copy_async_commit();
#pragma unroll 1
    for (int step = 1; step < tiles.prologue(); ++step) {
      tiles.load(step, step * kStageBytes, rest);
      arch::copy_async_commit();
    }
    float sums[kBlocks][32] = {};
    if constexpr (coded) multiply_codes(tiles, sums, weight, params.group_log2);
    else if constexpr (arch::kWarpgroupMma) multiply_by_warpgroups(tiles, sums);
    else multiply_by_warps(tiles, sums);
    arch::copy_async_wait<0>();
    __syncthreads();
    hand_over(params, tile, sums, reinterpret_cast<float*>(stages), rank, splits);
  }

 private:
  static constexpr int kStages = gemm_stages(arch::kCompiledFor, kStageBytes, starts_normed<X>);
  static constexpr int kBlocks = kTokens / 32, kSlabs = Slabs::all_at_once ? kBlocks : 1;
  // With a gate, half of a slab's rows belong to one matrix and the other half to the same rows of the other. wgmma
  // gives a warp 16 rows of each 64.
  static constexpr int kHalf = coded ? 16 : arch::kWarpgroupMma ? 64 : 32;
  static __device__ __forceinline__ int output_of(int i) {
    constexpr int each = Slabs::kRows / P::matrices;
    if constexpr (coded) return P::matrices == 1 ? i : i / 32 * each + i % 16;
    else if constexpr (arch::kWarpgroupMma)
      return (i / 128 * 4 + i / 16 % 4) * each + (P::matrices == 1 ? i / 64 % 2 * 16 : 0) + i % 16;
    else return P::matrices == 1 ? i : i / 64 * each + i % 32;
  }
  // The number of stages is read at run time where it may be reduced.
  static constexpr bool kMayBeFew =
      has_much_shared(arch::kCompiledFor) && !arch::kWarpgroupMma && kRows == 128 && kStages > kGemmFewStages;
  static __device__ __forceinline__ int stages_of(const Params& params) {
    return kMayBeFew && params.few_stages ? kGemmFewStages : kStages;
  }
  // Waits until all but the last kStages - kLess steps have arrived.
  template <int kLess>
  static __device__ __forceinline__ void wait_for_step(int stages) {
    if (kMayBeFew && stages == kGemmFewStages) arch::copy_async_wait<kGemmFewStages - kLess>();
    else arch::copy_async_wait<kStages - kLess>();
  }
  // Steps that are queued at the tensor cores behind the running one, so that these need not wait until the next step's
  // data is visible. H200: 1024^3 12.9 us, without 13.7; 4096^3 in tiles of 128 x 128 281 and 295.
  static constexpr int kQueued = arch::kWarpgroupMma && kStages > 2 ? 1 : 0,
                       kFewest = kMayBeFew ? kGemmFewStages : kStages;
  enum Which { kBoth, kInputsOnly, kWeightsOnly };
  static_assert(kThreads / 32 * kSlabs * Slabs::kFloats * 4 <= kFewest * kStageBytes,
                "what is handed over takes the place of the stages");

  // A step's operands on their way to shared memory. The last step of K may be partial; it is processed first.
  template <class Input, class Weight>
  struct Tiles {
    const Input& input;
    const Weight& weight;
    Inputs x;
    Weights w;
    unsigned char* stages;
    int ring, first, count, columns;  // ring: the number of stages
    typename Inputs::Waiting inputs;
    typename Weights::Waiting weights;

    // Operands that are not copied wait in registers until they are stored, or are loaded only then (14336 x 4096,
    // half, 128 normalized tokens: 267 us, with 512 bytes waiting 567; halves times numbers, with 384 bytes waiting
    // 161, without 287).
    static constexpr int kMostWaiting = 384, kWaitBytes = 256;
    template <class Operand>
    static constexpr bool waits = !Operand::copied && sizeof(typename Operand::Waiting) <= kMostWaiting;

    static constexpr int kCopies = (Inputs::copied ? Inputs::kEach : 0) + (Weights::copied ? Weights::kEach : 0);

    __device__ __forceinline__ int prologue() const { return ring - 1 - kQueued; }
    __device__ __forceinline__ int next(int stage) const {
      return stage == (ring - 1) * kStageBytes ? 0 : stage + kStageBytes;
    }
    __device__ __forceinline__ int column(int i) const { return (first + (i == 0 ? count : i) - 1) * kStep; }
    __device__ __forceinline__ uint32_t address(int stage) const { return arch::shared_address(stages) + stage; }

    // Issues copy i of a step.
    __device__ __forceinline__ void copy(int i, int stage, bool more) {
      if constexpr (Inputs::copied) {
        if (i < Inputs::kEach) return x.copy(i, address(stage), more);
      }
      if constexpr (Weights::copied)
        w.copy(i - (Inputs::copied ? Inputs::kEach : 0), address(stage) + Inputs::kBytes, more);
    }
    // Prefetches quarters [begin, end) of what is not copied: a step's loads are issued when the previous step's are
    // stored.
    __device__ __forceinline__ void prefetch(int begin, int end, int step) {
      if (step >= count) return;
      if constexpr (waits<Inputs>)
        x.prefetch(inputs, input, begin * Inputs::kEach / 4, end * Inputs::kEach / 4, column(step), columns);
      if constexpr (waits<Weights>)
        w.prefetch(weights, weight, begin * Weights::kEach / 4, end * Weights::kEach / 4, column(step), columns);
    }
    __device__ __forceinline__ void store(int begin, int end, int step, int stage) {
      if (step >= count) return;
      store(x, inputs, input, stages + stage, begin, end, step);
      store(w, weights, weight, stages + stage + Inputs::kBytes, begin, end, step);
    }
    template <class Operand, class Waiting, class Row>
    __device__ __forceinline__ void store(const Operand& operand, const Waiting& waiting, const Row& row,
                                          unsigned char* to, int begin, int end, int step) const {
      constexpr int kEach = Operand::kEach;
      begin = begin * kEach / 4, end = end * kEach / 4;
      if constexpr (waits<Operand>) operand.store(waiting, to, row, begin, end, column(step), columns);
      else if constexpr (!Operand::copied)
        operand.template load_and_store<kWaitBytes>(to, row, begin, end, column(step), columns);
    }
    __device__ __forceinline__ void store_and_prefetch(int begin, int end, int step, int stage) {
      store(begin, end, step, stage);
      prefetch(begin, end, step + 1);
    }
    // Loads a step: issues the copies, and stores what was prefetched.
    __device__ __forceinline__ void load(int step, int stage, Which which = kBoth) {
      if (step > 0) {
        constexpr int kInputCopies = Inputs::copied ? Inputs::kEach : 0;
        KERNELS_UNROLL
        for (int i = 0; i < kCopies; ++i) {
          if (which != (i < kInputCopies ? kWeightsOnly : kInputsOnly)) copy(i, stage, step < count);
        }
      } else if (count > 0) {
        if constexpr (Inputs::copied) {
          if (which != kWeightsOnly) x.copy_cut(address(stage), (count - 1) * kStep, columns - column(0));
        }
        if constexpr (Weights::copied) {
          if (which != kInputsOnly)
            w.copy_cut(address(stage) + Inputs::kBytes, (count - 1) * kStep, columns - column(0));
        }
      }
      if (which != kWeightsOnly) store_and_prefetch(0, 4, step, stage);
    }
  };

  // While wgmma processes a step, the one `distance` later is copied into the free stage.
  template <class Tiles>
  static __device__ __forceinline__ void multiply_by_warpgroups(Tiles& tiles, float (&sums)[kBlocks][32]) {
    const int distance = tiles.prologue();
    const uint64_t x = arch::warpgroup_tile(tiles.address(0)),
                   w = arch::warpgroup_tile(tiles.address(Inputs::kBytes + threadIdx.x / 128 * (128 * kStep * 2)));
    int stage = 0, free = distance * kStageBytes;
    for (int step = 0; step < tiles.count; ++step) {
      wait_for_step<2 + kQueued>(tiles.ring);
      arch::async_proxy_fence();
      __syncthreads();
      begin_products<T>(sums, w, x, stage);
      tiles.load(step + distance, free);
      arch::copy_async_commit();
      arch::warpgroup_wait<kQueued>();
      stage = tiles.next(stage), free = tiles.next(free);
    }
    arch::warpgroup_wait<0>();
    KERNELS_UNROLL
    for (int i = 0; i < kBlocks; ++i) arch::pin(sums[i]);
  }

  // Loads fragments of 16 columns, each for 16 rows of the step.
  template <int kCount>
  static __device__ __forceinline__ void load_fragments(uint32_t (&fragments)[kCount][4], uint32_t from) {
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) arch::load_matrix_x4(fragments[i], from + i * (16 * kStep * 2));
  }

  // Fragments are loaded 16 columns ahead, across steps. Copies are spread over the products of a step: the memory
  // queue is short, and a warp that waits for room in it does not multiply.
  template <class Tiles>
  static __device__ __forceinline__ void multiply_by_warps(Tiles& tiles, float (&sums)[kBlocks][32]) {
    constexpr int kRuns = kStages > 2 ? 4 : 1;  // with two stages copies must be issued early to arrive in time
    // Into the last stage: what the first step does not load on the way.
    int free = (tiles.ring - 1) * kStageBytes, coming = tiles.ring - 1;  // the stage to load into, and the step to load
    KERNELS_UNROLL
    for (int i = 0; i < Tiles::kCopies / kRuns; ++i) tiles.copy(i, free, coming < tiles.count);
    tiles.store_and_prefetch(0, 1, coming, free);
    const int lane = threadIdx.x & 31;
    const uint32_t from_x = tiles.address(Inputs::swizzled_offset(warp_row() + lane % 16, lane / 16));
    const uint32_t from_w = tiles.address(
        Inputs::kBytes + Weights::swizzled_offset(warp_column() + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    constexpr int kBuffers = copied ? 2 : 1;  // as registers allow
    uint32_t x[kBuffers][kBlocks][4], w[kBuffers][4][4];
    const auto load = [&](int buffer, int stage, int run) {
      load_fragments(x[buffer], (from_x + stage) ^ (run * 32));
      load_fragments(w[buffer], (from_w + stage) ^ (run * 32));
    };
    const auto multiply = [&](int buffer, int run) {
      constexpr int kCopies = Tiles::kCopies;
      const int begin = run < kRuns ? run * kCopies / kRuns : kCopies,
                end = run < kRuns ? (run + 1) * kCopies / kRuns : kCopies;
      const bool more = coming < tiles.count;
      int copies = begin;
      KERNELS_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        KERNELS_UNROLL
        for (int jj = 0; jj < 8; ++jj) {
          if (copies < end && (i * 8 + jj) * (end - begin) >= (copies - begin) * kBlocks * 8)
            tiles.copy(copies++, free, more);
          const int j = i % 2 ? 7 - jj : jj;
          const uint32_t b[2] = {w[buffer][j / 2][j % 2 * 2], w[buffer][j / 2][j % 2 * 2 + 1]};
          arch::mma_16816<T>(sums[i] + j * 4, x[buffer][i], b);
        }
      }
      tiles.store_and_prefetch(run, run + 1, coming, free);
    };
    const auto load_and_multiply = [&](int run, int stage, int next_run) {
      if (kBuffers == 2) load((run + 1) % kBuffers, stage, next_run);
      multiply(run % kBuffers, next_run);
      if (kBuffers == 1) load(0, stage, next_run);
    };
    wait_for_step<2>(tiles.ring);
    __syncthreads();
    load(0, 0, 0);
    int stage = 0;
    for (int step = 0; step < tiles.count; ++step) {
      KERNELS_UNROLL
      for (int run = 0; run < 3; ++run) load_and_multiply(run, stage, run + 1);
      arch::copy_async_commit();
      wait_for_step<2>(tiles.ring);
      __syncthreads();
      free = stage, coming = step + tiles.ring;
      stage = tiles.next(stage);
      load_and_multiply(3, stage, 0);
    }
  }

  // A lane multiplies rows lane / 4 + 8j of its warp's 32 with all tokens, 8 columns of each half of a step: four pairs
  // of both operands, for two mma. Decoded values may be in any register, so weights are the rows of the mma.
  template <class Tiles, class Weight>
  static __device__ __forceinline__ void multiply_codes(Tiles& tiles, float (&sums)[kBlocks][32], const Weight& weight,
                                                        int group_log2) {
    const int row = threadIdx.x / 32 * 32 + (threadIdx.x & 31) / 4;
    if (Weights::scaled && group_log2 != kOneForAll) {
      multiply_lanes(tiles, sums, typename Weights::template Lane<Weights::scaled>(row, group_log2));
    } else {
      float factors[4];
      if constexpr (Weights::scaled) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i)
          weight(row + 8 * i, [&](const Gate& source, int64_t at, bool) {
            factors[i] = convert<float>(*coded_row(source, at).scales);
          });
      }
      multiply_lanes(tiles, sums, typename Weights::template Lane<false>(row, group_log2));
      if constexpr (Weights::scaled) {
        KERNELS_UNROLL
        for (int i = 0; i < kBlocks; ++i) {
          KERNELS_UNROLL
          for (int j = 0; j < 32; ++j) sums[i][j] *= factors[j / 16 * 2 + j % 4 / 2];
        }
      }
    }
  }
  template <class Tiles, class Lane>
  static __device__ __forceinline__ void multiply_lanes(Tiles& tiles, float (&sums)[kBlocks][32], Lane lane) {
    const int distance = tiles.prologue();
    int stage = 0, free = distance * kStageBytes;
    for (int step = 0; step < tiles.count; ++step) {
      wait_for_step<2>(tiles.ring);
      __syncthreads();
      tiles.load(step + distance, free);
      arch::copy_async_commit();
      const unsigned char* const inputs = tiles.stages + stage + (threadIdx.x & 31) / 4 * (kStep * 2);
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        lane.begin(tiles.stages + stage + Inputs::kBytes, tiles.column(step), half);
        const int chunk = Inputs::swizzled_offset((threadIdx.x & 31) / 4 % 2, half * 4 + threadIdx.x % 4) % (kStep * 2);
        uint32_t weights[4][4];
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) lane.decode(weights[i], i);
        KERNELS_UNROLL
        for (int j = 0; j < kTokens / 8; ++j) {
          uint32_t x[4];
          memcpy(x, __builtin_assume_aligned(inputs + j * (8 * kStep * 2) + chunk, 16), 16);
          order_pairs<typename Weights::Code>(x);
          KERNELS_UNROLL
          for (int i = 0; i < 2; ++i) {
            KERNELS_UNROLL
            for (int k = 0; k < 4; k += 2) {
              const uint32_t a[4] = {weights[2 * i][k], weights[2 * i + 1][k], weights[2 * i][k + 1],
                                     weights[2 * i + 1][k + 1]},
                             b[2] = {x[k], x[k + 1]};
              arch::mma_16816<T>(sums[j / 4] + (i * 4 + j % 4) * 4, a, b);
            }
          }
        }
      }
      stage = tiles.next(stage), free = tiles.next(free);
    }
  }

  // A warp's first token in the tile.
  static __device__ __forceinline__ int warp_row() { return transposed ? 0 : threadIdx.x / 32 % 2 * (kTokens / 2); }
  static __device__ __forceinline__ int warp_column() { return Slabs::warp_column(); }

  static __device__ __forceinline__ void hand_over(const Params& params, const Tile& tile,
                                                   const float (&sums)[kBlocks][32], float* shared, unsigned rank,
                                                   unsigned splits) {
    float* mine = Slabs::of_warp(shared, kSlabs);
    // A loop, so that the sink's code is compiled once for each width, and not for each slab.
#pragma unroll 1
    for (int first = 0; first < kBlocks; first += kSlabs) {
      KERNELS_UNROLL
      for (int i = 0; i < kBlocks; ++i) {  // registers cannot be indexed at run time
        if (i / kSlabs * kSlabs == first) Slabs::lay_out(mine + i % kSlabs * Slabs::kFloats, sums[i]);
      }
      if constexpr (!Slabs::all_at_once)
        Slabs::put_slabs(params, tile, mine, kSlabs, warp_row() + first * Slabs::kTokens, rank, splits);
    }
  }
};

// Tiles of several heights; the host chooses the number of tokens.
template <class P, class T, int kWidth, int kRows_>
struct GemmBody {
  static constexpr int kRows = kRows_, kOutputs = kRows / P::matrices, kStep = 64;
  using Tile64 = GemmTile<P, T, kWidth, 64, kRows>;
  using Slabs = typename Tile64::Slabs;
  static constexpr bool coded = kWidth == kCodedWeights, copied = Tile64::copied;
  static constexpr bool weights_copied = Tile64::Weights::copied;
  static constexpr int kTokens[2] = {64, 128};
  static constexpr int max_threads = kRows, registers = 255;
  static constexpr int kTilesAtOnce = 1;
  static constexpr bool waits_for_predecessor_itself = true, weights_by_tma = false;

  using Params = GemmParams<P>;

  // In images for sm_90a, gemm_boxes.cuh and gemm_codes.cuh have further ones.
  static constexpr bool has(int tokens, int) { return tokens == 64 ? kRows == 128 : tokens == 128 && kWidth != 1; }
  // The stages of a tile, for blocks with `room` bytes of shared memory on a device of this capability.
  static constexpr GemmRing ring(int tokens, int architecture, int capability, int room) {
    const bool much = has_much_shared(architecture);
    const int each = Tile64::kStageBytes + (tokens - 64) * (kStep * 2), besides = much ? kGemmAligned : 0;
    const int all = gemm_stages(architecture, each, starts_normed<typename P::X>) * each + besides,
              few = kGemmFewStages * each + besides;
    if (all <= room) return {all, false};
    return {much && capability != 90 && kRows == 128 && few <= room ? few : 0, true};
  }

  static __device__ __forceinline__ void run(const Params& params) {
    // These are in gemm_codes.cuh and gemm_boxes.cuh.
    if constexpr ((coded || (kWidth == 8 && weights_in_rows<P, T>)) && arch::kWarpgroupMma) return;
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int most = is_here<128> ? 128 : 64;
    __shared__ Uninitialized<TokenState<typename P::X>, most> states;
    const bool early_weights =
        params.weights_ready && Tile64::Weights::copied && params.problem.groups.offsets == nullptr;
    if (!early_weights) arch::grid_dependency_pass();
    const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
    const Tile tile = tile_at<kOutputs>(params, arch::cluster_index());
    if (tile.token >= tile.token_end) return;
    unsigned char* stages = shared + (kAligns ? -arch::shared_address(shared) & (kGemmAligned - 1) : 0);
    const auto run_if = [&](auto height) {
      constexpr int kTokens = decltype(height)::value;
      if constexpr (is_here<kTokens>) {
        if (params.tokens == kTokens)
          GemmTile<P, T, kWidth, kTokens, kRows>::run(params, tile, early_weights, stages, states.items);
      }
    };
    run_if(std::integral_constant<int, 64>()), run_if(std::integral_constant<int, 128>());
    // The epilogue, shared by tiles of both heights, as it is most of the code.
    if constexpr (Slabs::all_at_once) {
      const int slabs = params.tokens / Slabs::kTokens;
      Slabs::put_slabs(params, tile, Slabs::of_warp(reinterpret_cast<float*>(stages), slabs), slabs, 0, rank, splits);
    }
  }

 private:
  static constexpr bool kAligns = has_much_shared(arch::kCompiledFor);
  template <int kTokens>
  static constexpr bool is_here = has(kTokens, arch::kCompiledFor);
};

}  // namespace detail
KERNELS_END
