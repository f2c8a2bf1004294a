// Products with many tokens for sm_90a, whose weights TMA copies to shared memory in wgmma's layout.
//
// Warp specialization: a producer thread issues the TMA copies of weights, and of inputs that are in memory in that
// layout as well; other inputs are loaded by all threads of the producer warps. Consumer warpgroups multiply. Weights
// have 16 bits, or 8 if both operands are 8-bit codes (gemm_in_eight.cuh).
//
//                     kRows (128 or 256) rows of weights
//                    +---------------+---------------+      producer   | stage 0 | stage 1 | ... |   as far ahead as
//   kTokens          | warps 0 to 3  | warps 4 to 7  |                                               there are stages
//                    +---------------+---------------+      consumers      | stage 0 | stage 1 | ...
//
// A stage holds one step: inputs of kTokens rows, then weights of kRows rows, each 128 bytes (64 columns, or 128 of 8
// bits) with the 128-byte swizzle of wgmma and TMA. Sums and split-K in clusters are as in gemm.cuh. With few tokens,
// tiles of 64 rows, for a single warpgroup, give all multiprocessors work without split-K. Weights are the rows of the
// wgmma; in tiles of 256 rows with scales, tokens are: then warps 4 to 7 have the second half of the tokens.
//
// Results that leave by TMA (gemm_results.cuh) make the kernel persistent if tiles have 256 rows: each block takes one
// tile after the other, and operands of the next tile are always in flight. So does ping-pong, with any sink: two
// warpgroups take turns at tiles of 128 rows.
//
//   warps 0 to 3   | multiply tile 0 | its sums to the sink |      | multiply tile 2 | ...
//   warps 4 to 7                     | multiply tile 1      | its sums to the sink   | multiply tile 3 | ...
#pragma once

#include "gemm.cuh"
#include "gemm_in_eight.cuh"
#include "gemm_inputs.cuh"
#include "gemm_results.cuh"
#include "gemm_weights.cuh"

KERNELS_BEGIN
namespace detail {

template <class P, class T, int kRows>
struct TmaGemmMaps {
  InputMaps<typename P::X, T> x;
  WeightMaps<P, T, kRows> weights;
  GemmResults<P, kRows == 64 ? 64 : 128, tokens_are_rows<P, T, kRows>> results;
};
template <class P, class T, int kRows>
struct TmaGemmParams : GemmParams<P> {
  TmaGemmMaps<P, T, kRows> maps;
  unsigned tiles = 0;  // in all, for persistent blocks
};

template <class P, class T, int kRows_, bool kPingPong_ = false>
struct TmaGemmBody {
  using X = typename P::X;
  using Params = TmaGemmParams<P, T, kRows_>;
  using Maps = TmaGemmMaps<P, T, kRows_>;
  static constexpr int kRows = kRows_, kOutputs = kRows / P::matrices, kRowBytes = 128,
                       kStep = kRowBytes / int(sizeof(T));
  static constexpr bool is_8bit = sizeof(T) == 1;
  // by_rows: tokens are the rows of the mma. kGroups: warpgroups that multiply a tile; kGroupRows: the weight rows of
  // each.
  static constexpr bool by_rows = tokens_are_rows<P, T, kRows_>, kPingPong = kPingPong_;
  static constexpr int kGroups = kRows == 256 ? 2 : 1, kGroupRows = by_rows ? kRows : kRows / kGroups,
                       kTilesAtOnce = kPingPong ? 2 : 1, kConsumers = 128 * kGroups * kTilesAtOnce;
  static_assert(!kPingPong || kRows == 128, "tiles of one warpgroup");
  static constexpr int kTokens[5] = {64, 96, 128, 160, 192};
  static constexpr bool waits_for_predecessor_itself = true, weights_by_tma = true, weights_copied = true;
  static constexpr bool inputs_by_tma = InputMaps<X, T>::possible,
                        possible = WeightMaps<P, T, kRows_>::possible && (inputs_by_tma || !is_8bit);
  // Producers that load inputs are whole warpgroups that take turns: functors take their time, and so do loads.
  static constexpr int kWarpgroup = 128, kTurns = inputs_by_tma || kRows == 256 ? 1 : 2;
  static constexpr int kProducers = kTurns * kWarpgroup;
  static constexpr int max_threads = kConsumers + kProducers;
  static constexpr bool trades_registers = max_threads > 256;
  static constexpr int registers = trades_registers ? 168 : 255;
  static constexpr int kProducerRegisters = inputs_by_tma ? 40 : kRows == 256 ? 72 : 144,
                       kConsumerRegisters = inputs_by_tma ? 232 : kRows == 256 ? 216 : 208;
  template <int kHeight>
  using ByThreads = InputsByThreads<T, X, kHeight, kWarpgroup, 384>;
  using Slabs =
      GemmSlabs<P, 1, by_rows ? SlabOrder::by_tokens : kDefaultOrder, arch::kWarpgroupMma && !kPingPong ? 512 : 64,
                kRows == 64 && arch::kWarpgroupMma ? 2 : 1, kPingPong>;
  using Results = decltype(Maps::results);
  // Whether results may leave by TMA; and whether a block may take one tile after the other.
  static constexpr bool has_boxes = Results::possible && inputs_by_tma,
                        may_persist = kPingPong || (has_boxes && kRows == 256);
  // Slabs take the place of the stages. Behind stages that are in use meanwhile are one slab for each warp (ping-pong),
  // or the buffers of results: one or two for each warpgroup.
  static constexpr int kSlabBytes = kPingPong ? kConsumers / 32 * (32 * 32 * 4) : 0,
                       kMostBytes = (may_persist && !is_8bit ? 224 : 216) << 10;
  static KERNELS_HD constexpr int buffers_for(int tokens) {
    return !has_boxes || !may_persist ? 0 : is_8bit || (tokens == 160 && !kPingPong) ? 1 : 2;
  }
  static KERNELS_HD constexpr int bytes_behind(int tokens) {
    const int boxes = 2 * buffers_for(tokens) * Results::kPieceBytes;
    return boxes > kSlabBytes ? boxes : kSlabBytes;
  }
  static constexpr bool has(int tokens, int architecture) {
    if (!possible || architecture != 90) return false;
    if (is_8bit && tokens > 128) return false;  // registers would not suffice
    if (kPingPong) return inputs_by_tma && (tokens == 128 || tokens == 192);
    if (kRows == 64) return P::matrices == 1 && tokens <= 96;
    if (kRows == 256) return tokens >= 128 && (inputs_by_tma || (tokens <= 160 && ByThreads<128>::copied));
    return tokens < 160 || inputs_by_tma || (tokens == 160 && ByThreads<160>::ahead);
  }
  static constexpr bool has_any() { return has(64, 90) || has(128, 90); }
  static constexpr GemmRing ring(int tokens, int, int, int room) {
    const int all = bytes_for(tokens) + kGemmAligned;
    return {all <= room ? all : 0, false};
  }
  // The stages and what is behind them; or the sums of all of a block's warps (not with ping-pong).
  static KERNELS_HD constexpr int bytes_for(int tokens) {
    const int stages = stages_for(tokens) * gemm_stage_bytes(tokens, kRows) + bytes_behind(tokens),
              sums = kPingPong ? 0 : tokens * kRows * 4;
    return stages > sums ? stages : sums;
  }
  static KERNELS_HD constexpr int stages_for(int tokens) {
    return (kMostBytes - bytes_behind(tokens)) / gemm_stage_bytes(tokens, kRows);
  }
  // Whether the driver can encode the tensor maps. in_boxes: results are to leave by TMA.
  static bool make_maps(const Exec& ex, const P& p, int tokens, bool in_boxes, Maps& maps) {
    maps.x.make(ex, p, tokens);
    if (in_boxes) maps.results.make(ex, p);
    return (!inputs_by_tma || maps.x.made) && maps.weights.make(ex, p);
  }
  static bool in_boxes(const Maps& maps) { return maps.results.made; }
  // Whether a block takes one tile after the other.
  static KERNELS_HD bool is_persistent(const Maps& maps) { return kPingPong || (may_persist && maps.results.made); }

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (arch::kWarpgroupMma && (is_here<64> || is_here<128>)) {
      extern __shared__ __align__(128) unsigned char shared[];
      __shared__ uint64_t barriers[2 * kMostStages];
      __shared__ __align__(8) float factors[Factors::possible || by_rows ? kScalesAt + kRows : 1];
      static_assert(kMostBytes + kGemmAligned + int(sizeof(barriers) + sizeof(factors)) <= 227 << 10,
                    "what a block has, with the most that stages take");
      const P& p = params.problem;
      const Ring ring{opaque(arch::shared_address(barriers))};
      const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
      unsigned char* const stages = shared + (-arch::shared_address(shared) & (kGemmAligned - 1));
      if (p.groups.offsets != nullptr) arch::grid_dependency_wait();
      if constexpr (may_persist) {
        if (is_persistent(params.maps)) {
          init_ring(params, ring, 1, kPingPong ? 1 : kGroups);
          return run_persistent(params, ring, stages, factors);
        }
      }
      const Tile tile = tile_at<kOutputs>(params, arch::cluster_index());
      if (tile.token >= tile.token_end) return;
      const bool has_factors = Factors::are_there(p);
      const int loaders = has_factors ? kFactorThreads : inputs_by_tma ? 0 : kWarpgroup;
      init_ring(params, ring, 1 + loaders, has_factors ? kConsumers : kGroups);
      const int steps = int((p.k + kStep - 1) / kStep);
      const int first = int(int64_t(steps) * rank / splits), end = int(int64_t(steps) * (rank + 1) / splits);
      const bool produces = threadIdx.x >= kConsumers;
      if constexpr (inputs_by_tma) {
        if (produces) {
          if constexpr (trades_registers) arch::release_registers<kProducerRegisters>();
          if constexpr (Factors::possible)
            if (has_factors && threadIdx.x >= kConsumers + 32)
              return load_factors(params, tile, ring, factors, first, end);
          if (!issues_tma(0)) return;
          PipelineState at(stages_for(params.tokens));
          return produce(params, tile, ring, opaque(arch::shared_address(stages)), first, end, at, true);
        }
        arch::grid_dependency_pass();
      } else {
        // Weights may be loaded before the kernel ahead has ended.
        const int begun = comes_early(params) ? lesser(end, first + stages_for(params.tokens)) : first;
        if (issues_tma(0)) {
          const auto weights = params.maps.weights.of_tile(p, tile);
#pragma unroll 1
          for (int step = first; step < begun; ++step)
            load_weights(params, ring, arch::shared_address(stages), weights, step, step - first);
        }
        arch::grid_dependency_pass();
        __shared__ Uninitialized<TokenState<X>, 160> states;
        find_states<pack_within<X, 8>>(states.items, p.x, tile.token, params.tokens, tile.token_end, p.k,
                                       tile.output == 0 && rank == 0);
        if (produces) {
          if constexpr (trades_registers) arch::release_registers<kProducerRegisters>();
          load_operands(params, tile, ring, stages, states.items, first, begun, end);
          return;
        }
      }
      if constexpr (trades_registers) arch::claim_registers<kConsumerRegisters>();
      load_scales(p, tile, factors);
      const auto run_if = [&](auto height) {
        constexpr int kHeight = decltype(height)::value;
        if constexpr (is_here<kHeight>) {
          if (params.tokens != kHeight) return;
          consume<kHeight>(params, tile, ring, stages, factors, end - first);
        }
      };
      run_if(std::integral_constant<int, 64>()), run_if(std::integral_constant<int, 96>());
      run_if(std::integral_constant<int, 128>()), run_if(std::integral_constant<int, 160>());
      run_if(std::integral_constant<int, 192>());
      if (has_boxes && params.maps.results.made) return;
      const int slabs = by_rows ? kRows / Slabs::kRows : params.tokens / Slabs::kTokens,
                row = by_rows ? threadIdx.x / 32 * 16 : 0;
      Slabs::put_slabs(params, tile, Slabs::of_warp(reinterpret_cast<float*>(stages), slabs), slabs, row, rank, splits);
    }
  }

 private:
  template <int kHeight>
  static constexpr bool is_here = has(kHeight, arch::kCompiledFor);
  static constexpr int kMostStages = stages_for(kRows == 256 || kPingPong ? 128 : 64);
  static constexpr int kBarrier = 1;     // a named barrier, or the turn of either group
  static constexpr int kOwnBarrier = 3;  // of either group
  static constexpr int kFactorThreads = kWarpgroup - 32;
  using Factors = StepFactors<P, T, kRows, kFactorThreads>;
  using Gate = typename Factors::Gate;
  static_assert(by_rows || kGroups == 1 || !Factors::possible, "factors of one warpgroup");
  // Behind the factors of all stages are the scales of rows of weights.
  static constexpr int kScalesAt = Factors::kFloats * kMostStages;
  // The barriers of all stages, by address: with a variable the compiler would recompute the address at each use.
  struct Ring {
    uint32_t at;
    __device__ __forceinline__ uint32_t full(int stage) const { return at + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return at + (kMostStages + stage) * 8; }
  };
  // Called by all threads; `producers` and `consumers` are the arrival counts of a stage's barriers.
  static __device__ __forceinline__ void init_ring(const Params& params, const Ring& ring, int producers,
                                                   int consumers) {
    if (threadIdx.x == kConsumers) {
      if (inputs_by_tma) arch::prefetch_map(params.maps.x.whole);
      for (const arch::TensorMap& map : params.maps.weights.maps) arch::prefetch_map(map);
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMostStages; ++i)
        arch::mbarrier_init(ring.full(i), producers), arch::mbarrier_init(ring.empty(i), consumers);
      arch::mbarrier_init_fence();
    }
    __syncthreads();
  }

  // Issues the copies of a step's weights, with input_bytes of inputs expected besides. By one thread.
  template <bool kParted = true, class Boxes>
  static __device__ __forceinline__ void load_weights(const Params& params, const Ring& ring, uint32_t stages,
                                                      const Boxes& weights, int step, int stage, int input_bytes = 0) {
    const uint32_t full = ring.full(stage), at = stages + stage * gemm_stage_bytes(params.tokens, kRows);
    arch::mbarrier_arrive_expect(full, weights.template bytes<kParted>() + input_bytes);
    weights.template copy<kParted>(at + params.tokens * kRowBytes, step * kStep, full);
  }
  // Whether weights are loaded before the kernel ahead has ended.
  static __device__ __forceinline__ bool comes_early(const Params& params) {
    return params.weights_ready && params.problem.groups.offsets == nullptr;
  }

  // ---- producers ----------------------------------------------------------------------------------------------------

  // True in one producer thread. ptxas knows that it is a single thread, and uses uniform instructions.
  static __device__ __forceinline__ bool issues_tma(int group) {
    return threadIdx.x / 32 == (kConsumers + group * kWarpgroup) / 32 && arch::elect_one();
  }
  // Producer loop: copies both operands of a tile, the block's first one or a later one.
  static __device__ __forceinline__ void produce(const Params& params, const Tile& tile, const Ring& ring,
                                                 uint32_t stages, int first, int end, PipelineState& at,
                                                 bool is_first) {
    if (params.maps.weights.of_tile(params.problem, tile).parted() ||
        params.maps.x.of_tile(tile, params.tokens).count > 1)
      return produce<true>(params, tile, ring, stages, first, end, at, is_first);
    return produce<false>(params, tile, ring, stages, first, end, at, is_first);
  }
  // kParted: more than one box for each operand, which takes longer than the products of a small tile.
  template <bool kParted>
  static __device__ __forceinline__ void produce(const Params& params, const Tile& tile, const Ring& ring,
                                                 uint32_t stages, int first, int end, PipelineState& at,
                                                 bool is_first) {
    const int begun = is_first ? lesser(end, first + at.stages) : first,
              stage_bytes = gemm_stage_bytes(params.tokens, kRows);
    const auto inputs = params.maps.x.of_tile(tile, params.tokens);
    const auto boxes = params.maps.weights.of_tile(params.problem, tile);
    const bool early = is_first && comes_early(params);
    const auto weights = [&](int step, int stage) {
      load_weights<kParted>(params, ring, stages, boxes, step, stage, inputs.bytes());
    };
    if (early) {
      PipelineState ahead(at.stages);
#pragma unroll 1
      for (int step = first; step < begun; ++step) weights(step, ahead.stage), ahead.next();
    }
    if (is_first) arch::grid_dependency_wait();
#pragma unroll 1
    for (int step = first; step < end; ++step) {
      if (step >= begun) arch::mbarrier_wait_in_block(ring.empty(at.stage), at.parity ^ 1);
      if (!early || step >= begun) weights(step, at.stage);
      inputs.template copy<kParted>(stages + at.stage * stage_bytes, step * kStep, ring.full(at.stage));
      at.next();
    }
  }
  // The remaining warps of the producer load the factors of steps.
  static __device__ __forceinline__ void load_factors(const Params& params, const Tile& tile, const Ring& ring,
                                                      float* factors, int first, int end) {
    const int count = stages_for(params.tokens);
    Factors mine(params.problem, tile, threadIdx.x - kConsumers - 32);
    arch::grid_dependency_wait();
    mine.fetch(first * kStep);
    PipelineState at(count);
#pragma unroll 1
    for (int step = first; step < end; ++step) {
      if (step - first >= count) arch::mbarrier_wait_in_block(ring.empty(at.stage), at.parity ^ 1);
      mine.put(factors + at.stage * Factors::kFloats);
      arch::mbarrier_arrive(ring.full(at.stage));
      if (step + 1 < end) mine.fetch((step + 1) * kStep);
      at.next();
    }
  }
  // Producer loop if threads load the inputs: loads these, and the weights of all steps from `begun` on.
  static __device__ __forceinline__ void load_operands(const Params& params, const Tile& tile, const Ring& ring,
                                                       unsigned char* stages, const TokenState<X>* states, int first,
                                                       int begun, int end) {
    const auto run_if = [&](auto height) {
      constexpr int kHeight = decltype(height)::value;
      if constexpr (is_here<kHeight>) {
        if (params.tokens != kHeight) return;
        constexpr int kStageBytes = gemm_stage_bytes(kHeight, kRows);
        const int count = stages_for(kHeight);
        const auto weights = params.maps.weights.of_tile(params.problem, tile);
        const int group = (threadIdx.x - kConsumers) / kWarpgroup, mine = first + group;
        ByThreads<kHeight> x(params.problem, tile, states, mine * kStep, kTurns);
        if (mine < end) x.prefetch(mine * kStep);
        PipelineState at(count);
        at.advance(group);
        // A group waits only for some of a stage's phases, and a parity does not distinguish a phase from the last but
        // one. But consumers free stages in order: once the stage for which it waited before is free, the last but one
        // phase is over.
#pragma unroll 1
        for (int step = mine; step < end; step += kTurns) {
          if (step - first >= count) arch::mbarrier_wait_in_block(ring.empty(at.stage), at.parity ^ 1);
          if (step >= begun && issues_tma(group))
            load_weights(params, ring, arch::shared_address(stages), weights, step, at.stage);
          __syncwarp();
          x.load(stages + at.stage * kStageBytes, step * kStep);
          x.arrive(ring.full(at.stage));
          if (step + kTurns < end) x.prefetch((step + kTurns) * kStep);
          at.advance(kTurns);
        }
      }
    };
    run_if(std::integral_constant<int, 64>()), run_if(std::integral_constant<int, 96>());
    run_if(std::integral_constant<int, 128>()), run_if(std::integral_constant<int, 160>());
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------

  // The sums of a warpgroup: of one mma with columns for all tokens or all weights, or of two with 64 rows of weights
  // each.
  template <int kHeight>
  using Sums =
      std::conditional_t<kGroupRows == 128, float[kHeight / 32][32], float[(by_rows ? kRows : kHeight) / 8][4]>;
  // Sums of 8-bit operands as the tensor cores accumulate them, in halves of the weights.
  static constexpr int kHalves = kGroupRows == 64 ? 1 : 2, kHalfRows = kGroupRows / kHalves;
  template <int kHeight>
  using HalfSums8Bit = Sums8Bit<T, by_rows ? kHalfRows : kHeight>;
  template <int kHeight>
  using RunningSums = std::conditional_t<is_8bit, HalfSums8Bit<kHeight>[kHalves], Sums<kHeight>>;
  // Four sums of a half: columns 8j + 2t and 8j + 2t + 1 of row g, then of row g + 8.
  template <int kBlocks>
  static __device__ __forceinline__ float* four_of(float (&sums)[kBlocks][32], int half, int j) {
    return sums[j / 4] + half * 16 + j % 4 * 4;
  }
  template <int kEights>
  static __device__ __forceinline__ float* four_of(float (&sums)[kEights][4], int half, int j) {
    return sums[half * (kHalfRows / 8) + j];
  }

  // Descriptors of a warpgroup's inputs and weights in the first stage.
  struct Operands {
    uint64_t x, w;
    __device__ __forceinline__ Operands(unsigned char* stages, int height)
        : x(arch::warpgroup_tile(arch::shared_address(stages) + (by_rows ? threadIdx.x / 128 * (64 * kRowBytes) : 0))),
          w(arch::warpgroup_tile(arch::shared_address(stages) + height * kRowBytes +
                                 (by_rows || kPingPong ? 0 : threadIdx.x / 128 * (kGroupRows * kRowBytes)))) {}
  };
  template <int kBlocks>
  static __device__ __forceinline__ void begin_step(float (&sums)[kBlocks][32], const Operands& of, int stage) {
    begin_products<T>(sums, of.w, of.x, stage);
  }
  template <int kEights>
  static __device__ __forceinline__ void begin_step(float (&sums)[kEights][4], const Operands& of, int stage) {
    arch::warpgroup_fence();
    multiply(sums, of, stage, 0, true);
    arch::warpgroup_commit();
  }
  template <int kWidth>
  static __device__ __forceinline__ void begin_step(Sums8Bit<T, kWidth> (&sums)[kHalves], const Operands& of,
                                                    int stage) {
    arch::warpgroup_fence();
    KERNELS_UNROLL
    for (int half = 0; half < kHalves; ++half) multiply(sums[half].sums, of, stage, half, true);
    arch::warpgroup_commit();
  }
  // For the weights from the beginning of a half on.
  template <class Sum, int kEights>
  static __device__ __forceinline__ void multiply(Sum (&sums)[kEights][4], const Operands& of, int stage, int half,
                                                  bool adds) {
    const uint64_t x = of.x + stage / 16, w = of.w + (stage + half * (kHalfRows * kRowBytes)) / 16;
    multiply_step<T>(sums, by_rows ? x : w, by_rows ? w : x, adds);
  }

  // Main loop if the tensor cores accumulate over all of K. last_begun(): called when the last products have been
  // issued.
  template <int kHeight, class F>
  static __device__ __forceinline__ void multiply_all(Sums<kHeight>& sums, const Operands& operands, const Ring& ring,
                                                      PipelineState& at, int steps, const F& last_begun) {
    if constexpr (is_8bit) {
      RunningSums<kHeight> running = {};
      add_up<kHeight>(running, operands, ring, at, steps, last_begun);
      KERNELS_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        arch::pin(running[half].sums);
        running[half].add_to([&](int j) { return four_of(sums, half, j); }, Nothing{});
      }
    } else {
      add_up<kHeight>(sums, operands, ring, at, steps, last_begun);
      KERNELS_UNROLL
      for (auto& some : sums) arch::pin(some);
    }
  }
  template <int kHeight, class F>
  static __device__ __forceinline__ void add_up(RunningSums<kHeight>& sums, const Operands& operands, const Ring& ring,
                                                PipelineState& at, int steps, const F& last_begun) {
    int done = -1;  // the stage of the previous step
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      arch::mbarrier_wait_in_block(ring.full(at.stage), at.parity);
      if constexpr (!inputs_by_tma) arch::async_proxy_fence();
      begin_step(sums, operands, at.stage * gemm_stage_bytes(kHeight, kRows));
      if (step == steps - 1) last_begun();
      arch::warpgroup_wait<1>();
      if (done >= 0 && threadIdx.x % 128 == 0) arch::mbarrier_arrive(ring.empty(done));
      done = at.stage;
      at.next();
    }
    arch::warpgroup_wait<0>();
  }
  // Main loop of a tile. Returns whether the stage of the last step is still to be released; last_begun() is called if
  // so. kFactors: whether steps may have factors.
  template <int kHeight, bool kFactors, class F>
  static __device__ __forceinline__ bool add_tile(const Params& params, Sums<kHeight>& sums, const Operands& operands,
                                                  const Ring& ring, PipelineState& at, const float* factors, int steps,
                                                  const F& last_begun) {
    if constexpr (kFactors)
      if (Factors::are_there(params.problem)) {
        add_steps<kHeight, true>(sums, operands, ring, at, factors, steps);
        return false;
      }
    if constexpr (std::is_same<T, float8_e4m3>::value && !kPingPong)
      if (!params.fast_sums) {
        add_steps<kHeight, false>(sums, operands, ring, at, factors, steps);
        return false;
      }
    multiply_all<kHeight>(sums, operands, ring, at, steps, last_begun);
    return steps > 0;
  }
  template <int kHeight>
  static __device__ __forceinline__ void consume(const Params& params, const Tile& tile, const Ring& ring,
                                                 unsigned char* stages, const float* factors, int steps) {
    Sums<kHeight> sums = {};
    PipelineState at(stages_for(kHeight));
    add_tile<kHeight, Factors::possible>(params, sums, Operands(stages, kHeight), ring, at, factors, steps, [] {});
    const P& p = params.problem;
    arch::named_barrier_sync(kBarrier, kConsumers);  // results replace the stages; scales are visible
    if constexpr (is_8bit) scale_rows<kHeight>(p, tile, factors, sums);
    if constexpr (has_boxes && !may_persist) {
      if (params.maps.results.made) {
        store<kHeight, kHeight / 32>(params, tile, sums, arch::shared_address(stages), 0);
        if (threadIdx.x == 0) arch::stored_boxes_wait();
        return;
      }
    }
    lay_out<kHeight>(sums, stages);
  }
  // By warpgroup `group`, which has a part of the tile, or all of it.
  template <int kHeight, int kBuffers>
  static __device__ __forceinline__ void store(const Params& params, const Tile& tile, Sums<kHeight>& sums,
                                               uint32_t buffers, int group) {
    const int part = kPingPong ? 0 : group;
    params.maps.results.template put<by_rows ? kOutputs / 64 : kHeight / 32, kBuffers>(
        params.problem, int(tile.token) + (by_rows ? part * 64 : 0),
        int(tile.output) + (by_rows ? 0 : part * (kOutputs / kGroups)), int(tile.token_end), buffers,
        kOwnBarrier + group, [&](int half, int j) { return four_of(sums, half, j); });
  }
  // A warpgroup of the persistent kernel.
  struct Consumer {
    const Params& params;
    const Ring& ring;
    const Operands operands;
    const float* const factors;
    const int group, steps;
    const uint32_t buffers;  // of results
    PipelineState at;

    // A tile up to its sums, or, if results leave by TMA, to their end.
    template <int kHeight, class F>
    __device__ __forceinline__ void add(const Tile& tile, Sums<kHeight>& sums, const F& last_begun) {
      const P& p = params.problem;
      const bool holds_stage = add_tile<kHeight, false>(params, sums, operands, ring, at, factors, steps, last_begun);
      if (holds_stage && threadIdx.x % 128 == 0) arch::mbarrier_arrive(ring.empty(at.previous()));
      if constexpr (by_rows) arch::named_barrier_sync(kBarrier, kConsumers);  // scales are visible
      if constexpr (is_8bit) scale_rows<kHeight>(p, tile, factors, sums);
      if constexpr (has_boxes) {
        if (kPingPong && !params.maps.results.made) return;
        store<kHeight, buffers_for(kHeight)>(params, tile, sums, buffers, group);
      }
    }
    template <int kHeight>
    __device__ __forceinline__ void add_and_store(const Tile& tile) {
      Sums<kHeight> sums = {};
      add<kHeight>(tile, sums, [] {});
    }
  };
  // The sums of a tile of any height are the first of these. Lambdas refer to them by these names, as CUDA 12.4's
  // compiler crashes if they name an alias template for an array.
  static constexpr int kMostTokens = is_8bit ? 128 : 192;
  using MostSums = Sums<kMostTokens>;
  template <int kHeight>
  static __device__ __forceinline__ Sums<kHeight>& first_of(MostSums& sums) {
    return reinterpret_cast<Sums<kHeight>&>(sums);
  }
  // The persistent kernel. With ping-pong, both groups enumerate all tiles and take every other one. A group waits for
  // its tile's first operands only after the other one has seen the last of its own: the parity of a barrier does not
  // distinguish a phase from the last but one.
  static __device__ __forceinline__ void run_persistent(const Params& params, const Ring& ring, unsigned char* stages,
                                                        float* factors) {
    static_assert(!kPingPong || Slabs::kFloats * 4 * (kConsumers / 32) == kSlabBytes, "as the host counts");
    const P& p = params.problem;
    const int steps = int((p.k + kStep - 1) / kStep);
    PipelineState at(stages_for(params.tokens));
    const auto each_tile = [&](const auto& f) {
      int count = 0;
#pragma unroll 1
      for (unsigned number = blockIdx.x; number < params.tiles; number += gridDim.x) {
        const Tile tile = tile_at<kOutputs>(params, number);
        if (tile.token < tile.token_end) f(tile, count++);
      }
      return count;
    };
    if (threadIdx.x >= kConsumers) {
      arch::release_registers<kProducerRegisters>();
      if (threadIdx.x >= kConsumers + 32) return;
      const uint32_t to = opaque(arch::shared_address(stages));
      // The whole warp enumerates tiles, and the same thread of it issues all copies.
      each_tile([&](const Tile& tile, int i) {
        if (issues_tma(0)) produce(params, tile, ring, to, 0, steps, at, i == 0);
        __syncwarp();
      });
      return;
    }
    arch::grid_dependency_pass();
    arch::claim_registers<kConsumerRegisters>();
    const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0);  // uniform
    const auto wait_for_turn = [&] { arch::named_barrier_sync(kBarrier + group, kConsumers); };
    const auto pass_turn = [&] { arch::named_barrier_arrive(kBarrier + 1 - group, kConsumers); };
    unsigned char* const behind = stages + at.stages * gemm_stage_bytes(params.tokens, kRows);
    Consumer consumer{params,
                      ring,
                      {stages, params.tokens},
                      factors,
                      group,
                      steps,
                      arch::shared_address(behind) + group * (buffers_for(params.tokens) * Results::kPieceBytes),
                      at};
    const auto for_height = [&](const auto& f) {
      const auto run_if = [&](auto height) {
        if constexpr (is_here<decltype(height)::value>) {
          if (params.tokens == decltype(height)::value) f(height);
        }
      };
      run_if(std::integral_constant<int, 128>()), run_if(std::integral_constant<int, 160>());
      run_if(std::integral_constant<int, 192>());
    };
    if (kPingPong && group == 1) pass_turn();
    const int count = each_tile([&](const Tile& tile, int number) {
      if constexpr (kPingPong) {
        if (number % 2 != group) return consumer.at.skip(steps);
        wait_for_turn();
        MostSums sums = {};
        for_height([&](auto height) {
          constexpr int kHeight = decltype(height)::value;
          consumer.template add<kHeight>(tile, first_of<kHeight>(sums), pass_turn);
        });
        if (has_boxes && params.maps.results.made) return;
        float* const slab = Slabs::of_warp(reinterpret_cast<float*>(behind), 1);
#pragma unroll 1
        for (int i = 0; i < params.tokens / Slabs::kTokens; ++i) {
          KERNELS_UNROLL
          for (int j = 0; j < kMostTokens / Slabs::kTokens; ++j)
            if (i == j) Slabs::lay_out(slab, sums[j]);
          Slabs::put_slabs(params, tile, slab, 1, i * Slabs::kTokens, 0, 1);
        }
      } else {
        if constexpr (by_rows) {
          arch::named_barrier_sync(kBarrier, kConsumers);  // all have finished with the scales of the last tile
          load_scales(p, tile, factors);
        }
        for_height([&](auto height) { consumer.template add_and_store<decltype(height)::value>(tile); });
      }
    });
    if (kPingPong && count % 2 == group) wait_for_turn();  // consumes a turn that nobody takes
    if (threadIdx.x % 128 == 0) arch::stored_boxes_wait();
  }
  // Main loop if threads add up the sums of steps. If registers allow it, the sums of one half of the weights are added
  // to the totals while the tensor cores multiply the other half.
  template <int kHeight, bool kFactors>
  static __device__ __forceinline__ void add_steps(Sums<kHeight>& sums, const Operands& operands, const Ring& ring,
                                                   PipelineState& at, const float* factors, int steps) {
    constexpr int kStageBytes = gemm_stage_bytes(kHeight, kRows), kAtOnce = kHalves == 2 && kHeight <= 96 ? 2 : 1;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float* const of_lane = factors + (by_rows ? warp * 16 + g : 2 * t);
    HalfSums8Bit<kHeight> of_step[kAtOnce];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      arch::mbarrier_wait_in_block(ring.full(at.stage), at.parity);
      const auto begin = [&](int half) {
        arch::warpgroup_fence();
        multiply(of_step[half % kAtOnce].sums, operands, at.stage * kStageBytes, half, false);
        arch::warpgroup_commit();
      };
      KERNELS_UNROLL
      for (int half = 0; half < kAtOnce; ++half) begin(half);
      KERNELS_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        if (half >= kAtOnce) begin(half);
        if (kAtOnce == 2 && half == 0)
          arch::warpgroup_wait<1>();
        else
          arch::warpgroup_wait<0>();
        auto& some = of_step[half % kAtOnce];
        arch::pin(some.sums);
        if (!kFactors && half == kHalves - 1 && threadIdx.x % 128 == 0) arch::mbarrier_arrive(ring.empty(at.stage));
        const auto into = [&](int j) { return four_of(sums, half, j); };
        if constexpr (kFactors)
          some.add_to(into, factors_of(of_lane + at.stage * Factors::kFloats, half));
        else
          some.add_to(into, Nothing{});
      }
      // wgmma reads operands for the whole warpgroup, but each lane reads its own factors, so every lane arrives.
      if constexpr (kFactors) arch::mbarrier_arrive(ring.empty(at.stage));
      at.next();
    }
  }

  // The factors of a lane's sums with one half of the weights.
  static __device__ __forceinline__ auto factors_of(const float* factors, int half) {
    constexpr int kTokens = Factors::kTokens;
    if constexpr (by_rows) {
      // With a gate, 32 rows of either matrix are adjacent.
      const float of_part[2][2] = {{factors[0], factors[8]}, {factors[kTokens], factors[kTokens + 8]}};
      return [of_part, half](int j) {
        const auto& of = of_part[P::matrices == 1 ? half : j / 4 % 2];
        return ::float4{of[0], of[0], of[1], of[1]};
      };
    } else {
      return [factors, half](int j) {
        const auto two = *reinterpret_cast<const ::float2*>(factors + half * kTokens + j * 8);
        return ::float4{two.x, two.y, two.x, two.y};
      };
    }
  }
  // The scale of weight row `row` of the tile, if there is a scale for each row. Rows beyond the end use the last one.
  static __device__ __forceinline__ float weight_scale(const P& p, const Tile& tile, int row, int matrix) {
    const int64_t n = tile.weights + lesser<int64_t>(tile.output + row, p.n - 1);
    return convert<float>(matrix == 0 ? *coded_row(p.template weights<0>(), n).scales
                                      : *coded_row(p.template weights<P::matrices - 1>(), n).scales);
  }
  static __device__ __forceinline__ bool has_weight_scales(const P& p) {
    return !scaled_by_steps(p.template weights<0>(), p.k);
  }
  // If tokens are the rows of the mma, a lane has all of the tile's weights: each thread loads one scale, and all read
  // them when sums are laid out.
  static __device__ __forceinline__ void load_scales(const P& p, const Tile& tile, float* factors) {
    if constexpr (by_rows && Coded<Gate>::scaled) {
      if (!has_weight_scales(p)) return;
      arch::grid_dependency_wait();
      const int row = threadIdx.x, of_matrix = P::matrices == 1 ? row : row / 64 * 32 + row % 32;
      factors[kScalesAt + row] = weight_scale(p, tile, of_matrix, P::matrices == 1 ? 0 : row / 32 % 2);
    }
  }
  // Multiplies sums by the scales of whole rows.
  template <int kHeight>
  static __device__ __forceinline__ void scale_rows(const P& p, const Tile& tile, const float* factors,
                                                    Sums<kHeight>& sums) {
    const int warp = threadIdx.x / 32 % (kPingPong ? 4 : kConsumers / 32), g = threadIdx.x % 32 / 4,
              t = threadIdx.x % 4;
    if constexpr (Coded<Gate>::scaled) {
      if (has_weight_scales(p)) {
        if constexpr (by_rows) {
          KERNELS_UNROLL
          for (int j = 0; j < kRows / 8; ++j) {
            const auto two = *reinterpret_cast<const ::float2*>(factors + kScalesAt + j * 8 + 2 * t);
            sums[j][0] *= two.x, sums[j][1] *= two.y, sums[j][2] *= two.x, sums[j][3] *= two.y;
          }
        } else {
          KERNELS_UNROLL
          for (int half = 0; half < kHalves; ++half) {
            KERNELS_UNROLL
            for (int i = 0; i < 2; ++i) {
              const int of_warp = kHalves == 1 || P::matrices == 2 ? warp * 16 : warp * 32 + half * 16;
              const float factor = weight_scale(p, tile, of_warp + i * 8 + g, half % P::matrices);
              KERNELS_UNROLL
              for (int j = 0; j < kHeight / 8; ++j) {
                float* const four = four_of(sums, half, j);
                four[2 * i] *= factor, four[2 * i + 1] *= factor;
              }
            }
          }
        }
      }
    }
    if constexpr (Coded<X>::scaled) {
      if (!scaled_by_steps(p.x, p.k)) {
        const auto scale_of = [&](int of_tile) {
          const int64_t token = lesser<int64_t>(tile.token + of_tile, tile.token_end - 1);
          return convert<float>(*p.x.scales().scale_at(token, 0));
        };
        if constexpr (by_rows) {
          const float factors[2] = {scale_of(warp * 16 + g), scale_of(warp * 16 + g + 8)};
          KERNELS_UNROLL
          for (auto& four : sums) {
            KERNELS_UNROLL
            for (int i = 0; i < 4; ++i) four[i] *= factors[i / 2];
          }
        } else {
          KERNELS_UNROLL
          for (int j = 0; j < kHeight / 8; ++j) {
            KERNELS_UNROLL
            for (int i = 0; i < 2; ++i) {
              const float factor = scale_of(j * 8 + t * 2 + i);
              KERNELS_UNROLL
              for (int half = 0; half < kHalves; ++half) {
                float* const four = four_of(sums, half, j);
                four[i] *= factor, four[2 + i] *= factor;
              }
            }
          }
        }
      }
    }
  }
  // Stores the sums in shared memory, from `stages` on, as the slabs of the warps.
  template <int kHeight>
  static __device__ __forceinline__ void lay_out(const Sums<kHeight>& sums, unsigned char* stages) {
    static_assert(bytes_for(kHeight) <= kMostBytes, "as much as stages may take");
    constexpr int kSlabs = by_rows ? kRows / Slabs::kRows : kHeight / Slabs::kTokens,
                  kOfSlab = int(sizeof(sums) / sizeof(sums[0])) / kSlabs;
    float* const mine = Slabs::of_warp(reinterpret_cast<float*>(stages), kSlabs);
    KERNELS_UNROLL
    for (int i = 0; i < kSlabs; ++i) Slabs::lay_out(mine + i * Slabs::kFloats, sums[i * kOfSlab]);
  }
};

}  // namespace detail
KERNELS_END
