// Prefill kernel for sm_80 and newer: o = softmax(q k^T) v with mma.sync and cp.async, one pass over the key tiles with
// online softmax (FlashAttention-2).
//
//                   keys:  | tile 0 | tile 1 | tile 2 | ...    key tiles begin at multiples of their size
//   rows   warp 0    16    |########|########|###\    |    each warp has 16 or 32 rows to itself: their logits,
//   of a   warp 1    16    |########|########|#######\|    weights, softmax state and outputs stay in its registers
//   block  ...             |        | whole  |partial |    whole: visible to all of the rows, so no mask is applied
//
//   shared memory:  | queries kRows x kDim | keys 0 | values 0 | keys 1 | values 1 |   one stage if heads are large
//
// A block's rows are queries of one head, or, for few queries, those of all heads that share a KV head (GQA packing).
// cp.async copies 16-bit operands that are aligned. Other operands are read through their functors, rounded to 16 bits
// and stored to shared memory. Weights are rounded to 16 bits and stay in registers as the A operand of the second
// product. prefill_tiles.cuh defines the layout of the tiles in shared memory.
//
// Keys that none of a block's rows sees are not read. A warp skips key tiles that none of its own rows sees, and masks
// single keys only in tiles that its rows see partially. Key tiles begin at multiples of their size, wherever the first
// visible key of the block is. So the bits of a row do not depend on which other rows are in its block.
#pragma once

#include "../../arch/sm80.cuh"
#include "../../arch/sm90.cuh"
#include "prefill_softmax.cuh"
#include "prefill_tiles.cuh"

KERNELS_BEGIN
namespace detail {

// Whether a prefill kernel for sm_90a exists (prefill_hopper.cuh): for heads of at most kMostHopperDim columns, whose
// keys and values are both copied as they are (copies_kv) or both decoded (decodes_kv).
template <class P>
constexpr bool copies_kv =
    !KeyRun<typename P::Kv>::scaled && !ValueRun<typename P::Kv>::scaled &&
    is_stored_as<typename KeyRun<typename P::Kv>::Codes, key_meeting_type<typename P::Q, typename P::Kv>> &&
    is_stored_as<typename ValueRun<typename P::Kv>::Codes, value_meeting_type<typename P::Q, typename P::Kv>>;
// Whether queries, keys and values are all float8_e4m3, so that both products can be those of 8 bits.
template <class P>
constexpr bool copies_e4m3 =
    is_stored_as<typename P::Q, float8_e4m3>&& is_stored_as<typename KeyRun<typename P::Kv>::Codes, float8_e4m3>&&
        is_stored_as<typename ValueRun<typename P::Kv>::Codes, float8_e4m3> &&
    !ValueRun<typename P::Kv>::scaled;
template <class P, int kDim>
constexpr bool has_hopper_prefill = kDim <= kMostHopperDim && (copies_kv<P> || decodes_kv<typename P::Kv>);
// Whether the latent kernel exists, in which columns of the keys are the values (prefill_latent.cuh).
template <class P, int kDim>
constexpr bool has_latent_prefill = kDim == kLatentDim && copies_kv<P> && is_kv_cache<typename P::Kv>;

// kTiles: tiles of 16 rows of a warp. kDim, kCols: the most columns of queries and keys, and of values. kStages: 2 if
// the next keys and values fit into shared memory beside the current ones. kReplaced: in code for sm_90a this kernel is
// empty if a kernel for sm_90a exists, as that one or another tile takes its calls.
template <class P, int kWarps, int kTiles, int kKeys_, int kDim_, int kCols_, int kStages, int kRegisters,
          bool kReplaced = false>
struct PrefillBody {
  using Kv = typename P::Kv;
  using S = typename P::S;
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  using TK = key_meeting_type<typename P::Q, Kv>;
  using TV = value_meeting_type<typename P::Q, Kv>;
  static constexpr int kThreads = kWarps * 32, kRows = kWarps * kTiles * 16, kKeys = kKeys_, kDim = kDim_,
                       kCols = kCols_, kResultPack = 8, kOnEach = 2;
  static constexpr int max_threads = kThreads, registers = kRegisters;
  static constexpr bool kParted = kCols < kDim;  // whether the output's columns may be split into several parts
  using Queries = TileLayout<kDim, kThreads>;
  using Keys = KvTiles<TK, Key, constant_stride<Kv>, kKeys, kDim, kThreads>;
  using Values = KvTiles<TV, Value, constant_stride<Kv>, kKeys, kCols, kThreads>;
  static constexpr int kStageBytes = Keys::kBytes + Values::kBytes, kQueryBytes = kRows * Queries::kRowBytes;
  static constexpr int kScaleBytes = Key::scaled || Value::scaled ? 2 * kKeys * 4 : 0;
  static constexpr int kPitch = kCols + 8;  // floats in a row of results that are staged for the sink
  static constexpr int kTileBytes = kQueryBytes + kStages * (kStageBytes + kScaleBytes),
                       kResultBytes = kRows * kPitch * 4;
  static constexpr int kSharedBytes =
      // Results reuse the memory of the tiles.
      kTileBytes > kResultBytes ? kTileBytes : kResultBytes;
  static_assert(kSharedBytes + kRows * 8 + kWarps * 16 + int(sizeof(PrefillRows)) <= 99 * 1024,
                "what a block of sm_86 can have");
  // Full key tiles, which all of the block's rows see completely, have a copy of the loop body without branches, which
  // the compiler can schedule better: 5 to 10 % faster. With fewer than kFewestFull of them, fetching these
  // instructions costs more than it gains: with 64 columns, 3 full tiles cost a sixth (causal, 512 keys). H200,
  // bench_prefill. Code for sm_90a has no such loop where heads of the full size go to the kernel for sm_90a.
  static constexpr bool kFullSteps =
      Keys::copied && Values::copied && !(arch::kWarpgroupMma && kDim == kCols && has_hopper_prefill<P, kDim>);
  static constexpr int kFewestFull = kDim == 64 ? 8 : 1;
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  static constexpr int kPersistentBlocksPerSm = 0;
  static constexpr bool kWarpgroups = false;
  static void choose_schedule(PrefillGrid&, const P&) {}

  struct Params {
    P problem;
    PrefillGrid grid;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (!(kReplaced && arch::kWarpgroupMma && has_hopper_prefill<P, kDim>)) attend(params);
  }

 private:
  struct Work;

  // The keys that a block processes, as key tiles from position `begin` on.
  struct Span {
    int end, low, begin, tiles;
    // Ranges of key tiles: those that any of the warp's rows sees (first, last), those that all of its rows see
    // completely (first_whole, last_whole), and those for the loop without branches, which all rows of the block see
    // completely.
    int first, last, first_whole, last_whole, first_full = 0, last_full = 0;

    __device__ __forceinline__ Span(const SeenKeys& of_warp, const SeenKeys& of_block)
        : end(of_block.any_end),
          low(lesser(of_block.any_begin, end)),
          begin(low / kKeys * kKeys),
          tiles(tiles_in(end - begin, kKeys - 1)),
          first(tile_of(of_warp.any_begin, 0)),
          last(of_warp.any_begin < of_warp.any_end ? tile_of(of_warp.any_end, kKeys - 1) : 0),
          first_whole(tile_of(of_warp.all_begin, kKeys - 1)),
          last_whole(tile_of(of_warp.all_end, 0)) {}
    __device__ __forceinline__ void find_full(const SeenKeys& of_block) {
      first_full = tile_of(of_block.all_begin, kKeys - 1);
      last_full = lesser(tile_of(of_block.all_end, 0), (end - begin) / kKeys - 1);
      if (last_full - first_full < kFewestFull) last_full = 0;
    }
    static __device__ __forceinline__ int tiles_in(int keys, int up) {
      return int(unsigned(keys + unsigned(up)) / kKeys);
    }
    // Key tiles before position `key`: full ones, or with up = kKeys - 1 those that are partial as well.
    __device__ __forceinline__ int tile_of(int key, int up) const {
      return tiles_in(greater(begin, lesser(key, end)) - begin, up);
    }
  };

  static __device__ __forceinline__ SeenKeys join_warps(const SeenKeys (&seen)[kWarps]) {
    SeenKeys all = seen[0];
    KERNELS_UNROLL
    for (int i = 1; i < kWarps; ++i) all = join(all, seen[i]);
    return all;
  }
  // Zeros the columns of the stages that heads do not have.
  static __device__ __forceinline__ void clear_behind(unsigned char* stages, int dim, int cols) {
    KERNELS_ROLLED
    for (int stage = 0; stage < kStages; ++stage) {
      Keys::Layout::clear_behind(stages + stage * kStageBytes, kKeys, dim);
      Values::Layout::clear_behind(stages + stage * kStageBytes + Keys::kBytes, kKeys, cols);
    }
  }
  static __device__ __forceinline__ float* scales_of(unsigned char* stages, int stage) {
    return reinterpret_cast<float*>(stages + kStages * kStageBytes + stage * kScaleBytes);
  }
  // Copies the keys (kHalf: 0) or the values (1) of a key tile to a stage, with their scales.
  template <bool kFull, int kHalf, class Side, class At>
  static __device__ __forceinline__ void load(Side& side, const At& at, const Span& span, int tile,
                                              unsigned char* stages, int stage,
                                              const void* const (&addresses)[Keys::kLaneAddresses]) {
    const int pos = span.begin + tile * kKeys;
    if constexpr (Side::scaled) {
      const auto has_key = [&](int row) { return row >= span.low - pos && row < span.end - pos; };
      if (threadIdx.x < kKeys)
        scales_of(stages, stage)[kHalf * kKeys + threadIdx.x] =
            has_key(threadIdx.x) ? at(pos + threadIdx.x).scale(0) : 0.f;
    }
    side.template load<kFull>(stages + stage * kStageBytes + kHalf * Keys::kBytes, at, pos, span.low - pos,
                              span.end - pos, addresses, kHalf);
  }

  // Looks up the addresses of a key tile's rows at `pos`: lanes 0 to 15 of a warp those of keys, the others those of
  // values.
  template <class KeyAt, class ValueAt>
  static __device__ __forceinline__ void find_rows(const Keys& keys, const KeyAt& key_at, const Values& values,
                                                   const ValueAt& value_at, const Span& span, int pos, int lane,
                                                   const void* (&addresses)[Keys::kLaneAddresses]) {
    if constexpr (!constant_stride<Kv> && (Keys::copied || Values::copied)) {
      if (unsigned(pos) >= unsigned(span.end) || lane % 16 >= Keys::kWarpRows) return;  // pos may have wrapped
      KERNELS_UNROLL
      for (int j = 0; j < Keys::kLaneAddresses; ++j) {
        const int at = greater(span.low, pos + lesser(Keys::tile_row(lane % 16 + j * 16), span.end - 1 - pos));
        addresses[j] = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
      }
    }
  }

  // An iteration of the main loop. kFull: all of the block's rows see the whole key tile, and all rows of it and of the
  // next one exist, so that nothing is tested.
  template <bool kFull, class Find, class LoadKeys, class LoadValues>
  static __device__ __forceinline__ void take_tile(const Params& params, const PrefillRows& rows,
                                                   const RowKeys* row_keys, const Span& span, unsigned char* queries,
                                                   unsigned char* stages, int tile, int dim, int cols, Work& work,
                                                   const Find& find, const LoadKeys& load_keys,
                                                   const LoadValues& load_values) {
    constexpr std::bool_constant<kFull> full{};
    const P& p = params.problem;
    const int stage = kStages == 2 ? tile & 1 : 0;
    const unsigned char* const at = stages + stage * kStageBytes;
    const bool busy = kFull || (tile >= span.first && tile < span.last),
               whole = kFull || (tile >= span.first_whole && tile < span.last_whole);
    const bool more = kFull || tile + 1 < span.tiles;
    arch::copy_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 2) {
      if (more) {
        load_keys(tile + 1, stage ^ 1, full);
        load_values(tile + 1, stage ^ 1, full);
        find(span.begin + (tile + 2) * kKeys);
      }
      arch::copy_async_commit();
      if (busy) work.template multiply_keys<kFull>(queries, at, dim, scales_of(stages, stage));
    } else {
      if (kFull || tile >= 0) {
        load_values(tile, 0, full);
        find(span.begin + (tile + 1) * kKeys);
      }
      arch::copy_async_commit();
      if (busy) work.template multiply_keys<kFull>(queries, at, dim, scales_of(stages, 0));
      arch::copy_async_wait<0>();
      __syncthreads();
      if (more) load_keys(tile + 1, 0, full);
      arch::copy_async_commit();
    }
    if (kStages == 1 && !kFull && tile < 0) prefetch_next_queries(params, dim);
    if (busy) {
      work.template weigh<kFull>(p, rows, row_keys, span.begin + tile * kKeys, whole, scales_of(stages, stage) + kKeys);
      work.template add_values<kFull>(at + Keys::kBytes, cols);
    }
  }

  static __device__ __forceinline__ void attend(const Params& params) {
    extern __shared__ __align__(128) unsigned char tiles_memory[];
    __shared__ SeenKeys seen_by_warps[kWarps];
    __shared__ RowKeys row_keys[kRows];
    __shared__ PrefillRows kept;
    const P& p = params.problem;
    PrefillRows rows = params.grid.template rows<PrefillBody>(p, kept);
    if (rows.count == 0) return;
    if (!kParted) rows.part = 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = int(p.shape.dim);
    const int cols = int(lesser<int64_t>(kCols, p.shape.value_dim() - rows.part * kCols));

    load_query_tile<TK, kRows, Queries>(p, rows, 0, tiles_memory, dim);

    // The keys that the rows of the block and of this warp see.
    const int mine = warp * kTiles * 16 + lane % (kTiles * 16);
    row_keys[mine] = keys_seen(p, rows, mine);
    const SeenKeys seen = join_lanes(seen_by(rows, mine, row_keys[mine]));
    if (lane == 0) seen_by_warps[warp] = seen;

    unsigned char* const stages = tiles_memory + kQueryBytes;
    clear_behind(stages, dim, cols);
    __syncthreads();
    const SeenKeys all = join_warps(seen_by_warps);
    Span span(seen, all);

    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    Keys keys(key_at, span.begin, 0, dim, p.wide_keys);
    Values values(value_at, span.begin, rows.part * kCols, cols, p.wide_values);
    const void* addresses[Keys::kLaneAddresses] = {};
    const auto find = [&](int pos) { find_rows(keys, key_at, values, value_at, span, pos, lane, addresses); };
    const auto load_keys = [&](int tile, int stage, auto full) {
      load<decltype(full)::value, 0>(keys, key_at, span, tile, stages, stage, addresses);
    };
    const auto load_values = [&](int tile, int stage, auto full) {
      load<decltype(full)::value, 1>(values, value_at, span, tile, stages, stage, addresses);
    };
    Work work;
    find(span.begin);
    const auto step = [&](int tile, auto full) {
      take_tile<decltype(full)::value>(params, rows, row_keys, span, tiles_memory, stages, tile, dim, cols, work, find,
                                       load_keys, load_values);
    };
    if constexpr (kFullSteps) {
      if (keys.full() && values.full() && p.scale > kSmallScale) span.find_full(all);
    }
    // Iteration -1 is the prologue, which copies the first tile. A separate prologue would cost more in instruction
    // cache misses than it takes.
#pragma unroll 1
    for (int tile = -1; tile < span.tiles; ++tile) {
      if constexpr (kFullSteps) {
        if (tile >= span.first_full && tile < span.last_full) {
          step(tile, std::true_type{});
          continue;
        }
      }
      step(tile, std::false_type{});
    }
    arch::copy_async_wait<0>();
    __syncthreads();
    rows = same_in_lanes(kept);  // read again, so that it takes no registers during the loop
    if (!kParted) rows.part = 0;
    work.finish(p, rows, reinterpret_cast<float*>(tiles_memory) + warp * (kTiles * 16) * kPitch, cols);
  }

  // Prefetches into L2 the queries of the block that takes this one's place. Otherwise blocks that start together all
  // wait for their queries. With 256 columns and 512 keys this is 3 % faster; with two stages it costs more than it
  // gains. H200, bench_prefill.
  static __device__ __forceinline__ void prefetch_next_queries(const Params& params, int dim) {
    if constexpr (is_stored_as<typename P::Q, TK>) {
      const P& p = params.problem;
      if (!params.grid.even || blockIdx.x + params.grid.resident_blocks >= gridDim.x) return;
      const PrefillRows rows = params.grid.even_rows(p, kRows, blockIdx.x + params.grid.resident_blocks);
      const int lines = dim / 64;
#pragma unroll 1
      for (int x = threadIdx.x; x < rows.count * lines; x += kThreads) {
        const auto place = rows.query_head(x / lines);
        arch::prefetch_l2(p.q.at(rows.token + place.query, place.head * dim + x % lines * 64));
      }
    }
  }

  // The rows of a warp in fragments of mma.sync, and the two products.
  struct Work : SoftmaxAccumulator<P, TV, kTiles, kKeys, kCols> {
    using Base = SoftmaxAccumulator<P, TV, kTiles, kKeys, kCols>;
    using Base::each, Base::finish_row, Base::first_row, Base::logits, Base::outputs, Base::row, Base::weights;

    static __device__ __forceinline__ uint32_t query_address(const unsigned char* queries) {
      const int lane = threadIdx.x % 32;
      return arch::shared_address(queries) + Queries::swizzled_offset(first_row() + lane % 16, lane / 16);
    }
    template <bool kFull>
    __device__ __forceinline__ void multiply_keys(const unsigned char* from, const unsigned char* keys, int dim,
                                                  const float* scales) {
      const int lane = threadIdx.x % 32;
      const uint32_t q = query_address(from), k = arch::shared_address(keys) +
                                                  Keys::Layout::swizzled_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) logits[i][j][0] = logits[i][j][1] = logits[i][j][2] = logits[i][j][3] = 0.f;
      }
      const auto load_queries = [&](uint32_t (&a)[kTiles][4], int run, int step) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i)
          arch::load_matrix_x4(a[i], (q ^ (step * 32)) + run * 128 + i * (16 * Queries::kRowBytes));
      };
      const auto load_keys = [&](uint32_t (&b)[4], int run, int step, int j) {
        arch::load_matrix_x4(b, (k ^ (step * 32)) + run * 128 + j * (16 * Keys::Layout::kRowBytes));
      };
      const auto multiply = [&](const uint32_t (&a)[kTiles][4], const uint32_t (&b)[4], int j) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          arch::mma_16816<TK>(logits[i][2 * j], a[i], {b[0], b[1]});
          arch::mma_16816<TK>(logits[i][2 * j + 1], a[i], {b[2], b[3]});
        }
      };
      if constexpr (kDim <= 128) {
        KERNELS_UNROLL
        for (int i = 0; i < kDim / 16; ++i) {
          uint32_t a[kTiles][4];
          load_queries(a, i / 4, i % 4);
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 16; ++j) {
            uint32_t b[4];
            load_keys(b, i / 4, i % 4, j);
            multiply(a, b, j);
          }
        }
      } else {
        // The number of runs (64 columns) depends on the call. The operands of the next step are loaded during this
        // one.
        uint32_t a[2][kTiles][4], b[2][kKeys / 16][4];
        const auto load = [&](int buffer, int run, int step) {
          load_queries(a[buffer], run, step);
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 16; ++j) load_keys(b[buffer][j], run, step, j);
        };
        const auto multiply_run = [&](int run, int runs) {
          KERNELS_UNROLL
          for (int step = 0; step < 4; ++step) {
            const int next = step < 3 ? run : lesser(run + 1, runs - 1);
            if (!kFull || step < 3 || next != run) load((step + 1) % 2, next, (step + 1) % 4);
            KERNELS_UNROLL
            for (int j = 0; j < kKeys / 16; ++j) multiply(a[step % 2], b[step % 2][j], j);
          }
        };
        load(0, 0, 0);
        if constexpr (kFull) {
          KERNELS_UNROLL
          for (int run = 0; run < kDim / 64; ++run) multiply_run(run, kDim / 64);
        } else {
          const int runs = (dim + 63) / 64;
#pragma unroll 1
          for (int run = 0; run < runs; ++run) multiply_run(run, runs);
        }
      }
      if constexpr (Key::scaled) {
        each([&](int i, int j, int x, float& logit) { logit *= scales[j * 8 + lane % 4 * 2 + x % 2]; });
      }
    }

    template <bool kFull>
    __device__ __forceinline__ void add_values(const unsigned char* values, int cols) {
      const int lane = threadIdx.x % 32;
      const uint32_t v = arch::shared_address(values) + Values::Layout::swizzled_offset(lane % 16, lane / 16);
      constexpr int kSteps = kKeys / 16;
      const auto load = [&](uint32_t (&b)[4], int run, int k, int j) {
        arch::load_matrix_x4_trans(b, (v ^ (j * 32)) + run * 128 + k * (16 * Values::Layout::kRowBytes));
      };
      const auto multiply = [&](const uint32_t (&b)[4], int run, int k, int j) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          arch::mma_16816<TV>(outputs[i][run * 8 + 2 * j], weights[i][k], {b[0], b[1]});
          arch::mma_16816<TV>(outputs[i][run * 8 + 2 * j + 1], weights[i][k], {b[2], b[3]});
        }
      };
      if constexpr (kCols <= 128) {
        KERNELS_UNROLL
        for (int i = 0; i < kCols / 64 * kSteps * 4; ++i) {
          uint32_t b[4];
          load(b, i / 4 / kSteps, i / 4 % kSteps, i % 4);
          multiply(b, i / 4 / kSteps, i / 4 % kSteps, i % 4);
        }
      } else {
        uint32_t b[2][4][4];
        KERNELS_UNROLL
        for (int j = 0; j < 4; ++j) load(b[0][j], 0, 0, j);
        KERNELS_UNROLL
        for (int run = 0; run < kCols / 64; ++run) {
          if (!kFull && run * 64 >= cols) break;
          KERNELS_UNROLL
          for (int k = 0; k < kSteps; ++k) {
            const int next = run * kSteps + k + 1;
            KERNELS_UNROLL
            for (int j = 0; j < 4; ++j) {
              if (next < kCols / 64 * kSteps) load(b[next % 2][j], next / kSteps, next % kSteps, j);
            }
            KERNELS_UNROLL
            for (int j = 0; j < 4; ++j) multiply(b[(next - 1) % 2][j], run, k, j);
          }
        }
      }
    }

    // Stages the results in shared memory, so that whole rows are written to the sink. slab: the warp's part of it.
    __device__ __forceinline__ void finish(const P& p, const PrefillRows& rows, float* slab, int cols) {
      const int lane = threadIdx.x % 32;
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float inverse = finish_row(p, rows, i, half);
          float* const to = slab + (i * 16 + half * 8 + lane / 4) * kPitch + lane % 2 * 2;
          KERNELS_UNROLL
          for (int j = 0; j < kCols / 8; ++j)
            *reinterpret_cast<::float2*>(to + j * 8 + half_of(lane / 4, j, lane / 2 % 2)) = {
                outputs[i][j][half * 2] * inverse, outputs[i][j][half * 2 + 1] * inverse};
        }
      }
      __syncwarp();
      if (p.out_pack == 8 && cols == kCols) put_rows<true>(p, rows, slab, cols, 8);
      else put_rows<false>(p, rows, slab, cols, p.out_pack);
    }
    // Swizzles the two halves of 8 columns, so that eight lanes that read at the same time meet no bank conflict.
    static __device__ __forceinline__ int half_of(int row, int pack, int half) {
      return ((row + pack / 4) % 2 ^ half) * 4;
    }
    // Each lane writes some packs of a row. most: the widest pack that the sink takes. kWhole: that is 8, and all kCols
    // columns exist.
    template <bool kWhole>
    static __device__ __forceinline__ void put_rows(const P& p, const PrefillRows& rows, const float* slab, int cols,
                                                    int most) {
      constexpr int kEach = kCols == 64 ? 2 : 4, kLanes = kCols / 8 / kEach, kAtOnce = kWhole ? kEach : 1;
      const int64_t v_dim = p.shape.value_dim(), first_col = rows.part * kCols;
      const int lane = threadIdx.x % 32;
      const auto map = sink_map(p.out);
      const auto& end = sink_end(p.out);
#pragma unroll 1
      for (int i = lane / kLanes; i < kTiles * 16; i += 32 / kLanes) {
        const int r = first_row() + i;
        if (r >= rows.count) break;
        const auto place = rows.query_head(r);
        const int64_t to = rows.token + place.query;
#pragma unroll 1
        for (int first = lane % kLanes; first < kCols / 8; first += kLanes * kAtOnce) {
          Pack<float, 8> values[kAtOnce];
          KERNELS_UNROLL
          for (int k = 0; k < kAtOnce; ++k) {
            const int pack = first + k * kLanes;
            const float* const from = slab + i * kPitch + pack * 8;
            memcpy(values[k].v, __builtin_assume_aligned(from + half_of(i, pack, 0), 16), 16);
            memcpy(values[k].v + 4, __builtin_assume_aligned(from + half_of(i, pack, 1), 16), 16);
          }
          KERNELS_UNROLL
          for (int k = 0; k < kAtOnce; ++k) {
            const int col = (first + k * kLanes) * 8;
            if (!kWhole && col >= cols) break;
            if (is_split<P>(rows)) {
              store_partial_outputs(p, rows, r, values[k], first_col + col);
              continue;
            }
            in_packs(kWhole ? 8 : most, values[k], place.head * v_dim + first_col + col,
                     [&](const auto& some, int64_t at) { put_mapped(end, map, some, to, at); });
          }
        }
      }
    }
  };
};

}  // namespace detail
KERNELS_END
