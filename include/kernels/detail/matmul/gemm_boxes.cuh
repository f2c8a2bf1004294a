// Products with many tokens for sm_90a, where inputs and weights of one 16-bit type lie in memory as wgmma takes them:
// then nobody has to carry them. A thread has the TMA unit copy boxes of both, and groups of four warps multiply.
//
//                     kRows (128 or 256) rows of weights
//                    +---------------+---------------+      producer   | stage 0 | stage 1 | ... |   as far ahead as
//   kTokens          | warps 0 to 3  | warps 4 to 7  |                                               there are stages
//                    +---------------+---------------+      consumers      | stage 0 | stage 1 | ...
//
// A stage is what a step of 64 columns takes: inputs kTokens x 64, then weights kRows x 64, rows of 128 bytes, swizzled
// as wgmma and the TMA unit have it. Sums and clusters that share K are as in gemm.cuh. Where there are few tokens,
// tiles of 64 rows, four warps' own, give all multiprocessors something to do without sharing K.
#pragma once

#include <limits>

#include "../tensor_map.cuh"
#include "gemm.cuh"

KERNELS_BEGIN
namespace detail {

// A stage of a ring, and the parity of its barriers' phase. It goes as many stages further at a time as there are, at
// most.
struct RingPlace {
  int stages, stage = 0, parity = 0;
  __device__ __forceinline__ explicit RingPlace(int count) : stages(count) {}
  __device__ __forceinline__ void go(int further) {
    stage += further;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  __device__ __forceinline__ void next() { go(1); }
};

// Operands that lie in memory in rows of one distance, as they are.
template <class S>
struct RowsInMemory : std::false_type {};
template <class Src, Cache kCache>
struct RowsInMemory<DirectLoad<Src, float, kCache>> : std::integral_constant<bool, is_16_bit<Src>> {};

// The last tokens, of each group, have a box of their own: one whose rows are partly not there takes longer (129 x 4096
// x 4096: 25.5 us for 19.6 with 192 tokens). What lies in shared memory behind them makes results that nobody wants.
struct InputMaps {
  arch::TensorMap inputs, last_inputs;
  int last_tokens;

  // For steps of 64 columns of so many tokens. Not where only the device knows which rows are there.
  template <class P>
  bool make(const Exec& ex, const P& p, int tokens) {
    const int64_t rows = p.m * p.groups.count, stride = p.x.at(1, 0) - p.x.at(0, 0);
    if (p.groups.offsets != nullptr || stride == 0 || rows > std::numeric_limits<int32_t>::max()) return false;
    const MappedRows tensor{p.x.at(0, 0), 2, p.k, rows, 1, 1, stride, 0, 0};
    last_tokens = p.m % tokens == 0 ? tokens : int(p.m % tokens);
    return make_tensor_map(ex, tensor, tokens, inputs) && make_tensor_map(ex, tensor, last_tokens, last_inputs);
  }
  // That of a tile, and how many of its rows that leaves as they are.
  struct OfTile {
    const arch::TensorMap& map;
    int missing;
  };
  __device__ __forceinline__ OfTile of_tile(const Tile& tile, int tokens) const {
    if (tile.token + tokens > tile.token_end) return {last_inputs, tokens - last_tokens};
    return {inputs, 0};
  }
};
template <int kMatrices>
struct GemmMaps {
  InputMaps x;
  arch::TensorMap weights[kMatrices];
};
template <class P>
struct BoxedGemmParams : GemmParams<P> {
  GemmMaps<P::matrices> maps;
};

template <class P, class T, int kRows_>
struct BoxedGemmBody {
  using X = typename P::X;
  using Gate = std::decay_t<decltype(std::declval<const P&>().template weights<0>())>;
  using Up = std::decay_t<decltype(std::declval<const P&>().template weights<P::matrices - 1>())>;
  using Params = BoxedGemmParams<P>;
  using Maps = GemmMaps<P::matrices>;
  static constexpr int kRows = kRows_, kOutputs = kRows / P::matrices, kStep = 64;
  // Warpgroups, and the rows of each.
  static constexpr int kGroups = kRows == 256 ? 2 : 1, kGroupRows = kRows / kGroups;
  static constexpr int kConsumers = 128 * kGroups, kProducers = 128;
  static constexpr int kTokens[4] = {64, 96, 128, 160};
  static constexpr int max_threads = kConsumers + kProducers, registers = kRows == 256 ? 168 : 255;
  static constexpr bool waits_by_itself = true, boxed = true, weights_copied = true;
  static constexpr bool possible = RowsInMemory<X>::value && RowsInMemory<Gate>::value && RowsInMemory<Up>::value &&
                                   std::is_same<copied_type<X>, T>::value &&
                                   std::is_same<copied_type<Gate>, T>::value && std::is_same<copied_type<Up>, T>::value;
  using Slabs = GemmSlabs<P, 1, arch::kWarpgroupMma, arch::kWarpgroupMma ? 512 : 64,
                          kRows == 64 && arch::kWarpgroupMma ? 2 : 1>;
  // Rows of a matrix that wgmma gives a warp one behind the other as outputs, and rows of a copy of weights.
  static constexpr int kEach = kRows == 64 ? 16 : 32 / P::matrices, kCopyRows = kRows == 64 ? 64 : 128 / P::matrices;

  static constexpr bool has(int tokens, int architecture) {
    if (!possible || architecture != 90) return false;
    return kRows == 64 ? P::matrices == 1 && tokens <= 96 : kRows == 128 || tokens >= 128;
  }
  static constexpr GemmRing ring(int tokens, int architecture, int, int room) {
    const int all = gemm_stages(architecture, tokens, kRows, false) * gemm_stage_bytes(tokens, kRows) + kGemmAligned;
    return {all <= room ? all : 0, false};
  }
  // Whether rows of weights that belong together in a map are all there.
  static bool has_whole_rows(const P& p) { return p.n % kEach == 0; }
  // Whether the driver can make maps of the operands.
  static bool make_maps(const Exec& ex, const P& p, int tokens, Maps& maps) {
    return maps.x.make(ex, p, tokens) &&
           make_weight_map(ex, p, p.template weights<0>(), maps.weights[0]) &&
           make_weight_map(ex, p, p.template weights<P::matrices - 1>(), maps.weights[P::matrices - 1]);
  }

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (possible && arch::kWarpgroupMma) {
      extern __shared__ __align__(128) unsigned char shared[];
      __shared__ uint64_t barriers[2 * kMostStages];
      const Ring ring{opaque(arch::shared_address(barriers))};
      const unsigned rank = arch::cluster_rank(), splits = arch::cluster_size();
      const Tile tile = place_tile<kOutputs>(params, arch::cluster_index());
      unsigned char* const stages = shared + (-arch::shared_address(shared) & (kGemmAligned - 1));
      if (threadIdx.x == kConsumers) {
        arch::prefetch_map(params.maps.x.inputs);
        for (const arch::TensorMap& map : params.maps.weights) arch::prefetch_map(map);
      }
      if (threadIdx.x == 0) {
        for (int i = 0; i < kMostStages; ++i)
          arch::mbarrier_init(ring.full(i), 1), arch::mbarrier_init(ring.empty(i), kGroups);
        arch::mbarrier_init_fence();
      }
      __syncthreads();
      const int steps = int((params.problem.k + kStep - 1) / kStep);
      const int first = int(int64_t(steps) * rank / splits), end = int(int64_t(steps) * (rank + 1) / splits);
      if (threadIdx.x >= kConsumers) {
        if constexpr (kRows == 256) arch::fewer_registers<40>();
        if (threadIdx.x < kConsumers + 32 && arch::elect_one())
          produce(params, tile, ring, arch::shared_address(stages), first, end);
        return;
      }
      if constexpr (kRows == 256) arch::more_registers<232>();
      arch::grid_dependency_pass();
      const auto run_if = [&](auto height) {
        constexpr int kHeight = decltype(height)::value;
        if constexpr (is_here<kHeight>) {
          if (params.tokens == kHeight) consume<kHeight>(ring, stages, end - first);
        }
      };
      run_if(std::integral_constant<int, 64>()), run_if(std::integral_constant<int, 96>());
      run_if(std::integral_constant<int, 128>()), run_if(std::integral_constant<int, 160>());
      const int slabs = params.tokens / Slabs::kTokens;
      Slabs::put_slabs(params, tile, Slabs::of_warp(reinterpret_cast<float*>(stages), slabs), slabs, 0, rank, splits);
    }
  }

 private:
  template <int kHeight>
  static constexpr bool is_here = has(kHeight, arch::kCompiledFor);
  static constexpr int kMostStages = gemm_stages(90, 64, kRows, false);
  static constexpr int kBarrier = 1;  // a named barrier
  // The barriers of all stages, by their address: of a variable the compiler would find it anew each time.
  struct Ring {
    uint32_t at;
    __device__ __forceinline__ uint32_t full(int stage) const { return at + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return at + (kMostStages + stage) * 8; }
  };
  static __device__ __forceinline__ int stages_for(int tokens) {
    return gemm_stages(arch::kCompiledFor, tokens, kRows, false);
  }

  // In a tile, rows of weights are as the slabs of the epilogue want them: of each 64, wgmma gives a warp 16, and with
  // 128 of one matrix those of two 64s are neighbors as outputs: half h of slab s lies behind the halves h of four
  // slabs. With a gate, a slab has 16 rows of either matrix.
  template <class S>
  static bool make_weight_map(const Exec& ex, const P& p, const S& weights, arch::TensorMap& map) {
    const int64_t ld = weights.at(1, 0) - weights.at(0, 0);
    const MappedRows rows{weights.at(0, 0), 2,  p.k,        16,     p.groups.count * p.n / kEach,
                          kEach / 16,       ld, kEach * ld, 16 * ld};
    return make_tensor_map(ex, rows, 16, map, 4, kEach / 16);
  }

  static __device__ __forceinline__ void produce(const Params& params, const Tile& tile, const Ring& ring,
                                                 uint32_t stages, int first, int end) {
    const int inputs = params.tokens * kStep * 2, stage_bytes = gemm_stage_bytes(params.tokens, kRows);
    const int token = int(tile.token), slab = int((tile.weights + tile.output) / kEach);
    const auto of_tile = params.maps.x.of_tile(tile, params.tokens);
    const auto bring_weights = [&](int step, const RingPlace& at) {
      const uint32_t full = ring.full(at.stage), to = stages + at.stage * stage_bytes + inputs;
      arch::mbarrier_arrive_expect(full, stage_bytes - of_tile.missing * (kStep * 2));
      KERNELS_UNROLL
      for (int i = 0; i < kRows / kCopyRows; ++i)
        arch::copy_box(to + i * (kCopyRows * kStep * 2), params.maps.weights[i % P::matrices], step * kStep, 0,
                       slab + i / P::matrices * 4, 0, full);
    };
    const auto bring_inputs = [&](int step, const RingPlace& at) {
      arch::copy_box(stages + at.stage * stage_bytes, of_tile.map, step * kStep, token, 0, 0, ring.full(at.stage));
    };
    const int count = stages_for(params.tokens), begun = lesser(end, first + count);
    const bool early = params.weights_ready;
    RingPlace ahead(count);
    if (early) {
#pragma unroll 1
      for (int step = first; step < begun; ++step) bring_weights(step, ahead), ahead.next();
    }
    arch::grid_dependency_wait();
    RingPlace at(count);
#pragma unroll 1
    for (int step = first; step < end; ++step) {
      if (step >= begun) arch::mbarrier_wait_in_block(ring.empty(at.stage), at.parity ^ 1);
      if (!early || step >= begun) bring_weights(step, at);
      bring_inputs(step, at);
      at.next();
    }
  }

  // A warpgroup's sums, of 128 or 64 rows of weights with all tokens.
  template <int kHeight>
  using Sums = std::conditional_t<kGroupRows == 128, float[kHeight / 32][32], float[kHeight / 8][4]>;
  template <int kBlocks>
  static __device__ __forceinline__ void begin_step(float (&sums)[kBlocks][32], uint64_t w, uint64_t x, int stage) {
    begin_products<T>(sums, w, x, stage);
  }
  template <int kEights>
  static __device__ __forceinline__ void begin_step(float (&sums)[kEights][4], uint64_t w, uint64_t x, int stage) {
    arch::warpgroup_fence();
    KERNELS_UNROLL
    for (int k = 0; k < 4; ++k) arch::warpgroup_mma<T>(sums, w + stage / 16 + 2 * k, x + stage / 16 + 2 * k, true);
    arch::warpgroup_commit();
  }
  // Leaves the sums in shared memory, from `stages` on, as the slabs of warps.
  template <int kHeight>
  static __device__ __forceinline__ void consume(const Ring& ring, unsigned char* stages, int steps) {
    constexpr int kStageBytes = gemm_stage_bytes(kHeight, kRows), kBlocks = kHeight / 32;
    static_assert(kRows / 32 * kBlocks * Slabs::kFloats * 4 <= gemm_stages(90, kHeight, kRows, false) * kStageBytes,
                  "what is handed over takes the place of the stages");
    const int group = threadIdx.x / 128;
    const uint64_t x = arch::warpgroup_tile(arch::shared_address(stages)),
                   w = arch::warpgroup_tile(arch::shared_address(stages) + kHeight * kStep * 2 +
                                            group * (kGroupRows * kStep * 2));
    Sums<kHeight> sums = {};
    RingPlace at(stages_for(kHeight));
    int done = -1;  // the stage of the step before
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      arch::mbarrier_wait_in_block(ring.full(at.stage), at.parity);
      begin_step(sums, w, x, at.stage * kStageBytes);
      arch::warpgroup_wait<1>();
      if (done >= 0 && threadIdx.x % 128 == 0) arch::mbarrier_arrive(ring.empty(done));
      done = at.stage;
      at.next();
    }
    arch::warpgroup_wait<0>();
    KERNELS_UNROLL
    for (auto& some : sums) arch::pin(some);
    arch::named_barrier_sync(kBarrier, kConsumers);  // slabs take the place of the stages
    float* const mine = Slabs::of_warp(reinterpret_cast<float*>(stages), kBlocks);
    KERNELS_UNROLL
    for (int i = 0; i < kBlocks; ++i)
      Slabs::lay_out(mine + i * Slabs::kFloats, sums[i * (kGroupRows == 128 ? 1 : 4)]);
  }
};

}  // namespace detail
KERNELS_END
