// Prefill kernels for sm_90a (FlashAttention-3 style): warp specialization with TMA, mbarriers and wgmma. This file has
// the configuration, the shared memory, and what producers and consumers share.
//
//   warpgroup 0      the producer: copies queries by cp.async, and keys and values to a ring of stages, by TMA where
//                    possible (prefill_boxes.cuh); transposes values of 8 bits for products of 8 bits
//   warpgroup 1      a second producer, for keys and values of 8 or 4 bits that are decoded: one of the two decodes the
//                    keys, the other the values
//   the others       consumers, 64 rows of the query tile each: logits by wgmma from shared memory, softmax in
//                    registers, and from there the product with the values by wgmma
//
//   shared memory:   | queries of this tile, of the next | K0 | V0 | K1 | V1 | ...
//
//   tensor cores:    | K1 ... | V0 ... | K2 ... | V1 ... |      of one consumer; products of the others fill the gaps
//   softmax:                  |   1    |        |   2    |
//
// A block may process several query tiles, one after the other (persistent blocks). During the last weights and the
// epilogue of one tile, the first keys and values of the next tile are already copied, and so are its queries (even
// earlier, where shared memory has room for two query tiles). The softmax is in prefill_softmax.cuh, the tile scheduler
// in prefill_rows.cuh.
#pragma once

#include "../../arch/sm90.cuh"
#include "prefill_boxes.cuh"
#include "prefill_hopper_results.cuh"
#include "prefill_softmax.cuh"
#include "prefill_tiles.cuh"

KERNELS_BEGIN
namespace detail {

// What the prefill kernels for sm_90a have in common: the pipeline of query tiles (items) through a block, and the
// stages of key tiles. kRows: rows of a query tile. kItems: how many items are in flight. kCopies: whether keys and
// values are copied as they are. kPairs: whether the blocks of a cluster may share a query tile.
template <class P, int kRows_, int kKeys_, int kStages_, int kItems_, bool kCopies, bool kPairs_ = false>
struct HopperItems {
  using Problem = P;
  static constexpr int kRows = kRows_, kKeys = kKeys_, kStages = kStages_, kItems = kItems_;
  static constexpr bool kPairs = kPairs_, kWarpgroups = true;
  static constexpr int kResultPack = 8, kOnEach = 1, kAligned = 1024;
  // Persistent blocks per multiprocessor, if sequences differ. They are used if there are tiles for twice as many
  // blocks, or, if keys may be split and the host only knows an upper bound of the tiles, for as many. Blocks reverse
  // their order each round, so that a block with many keys gets few in the next.
  //
  // H200 (CUDA 13.0, 2026-11, ad hoc benchmark), causal, 32 heads of 128 columns on 8 KV heads, with 1, 2 and 4 blocks
  // per multiprocessor and with one block per tile:
  // - 16 sequences of 1,024 queries: 327, 329, 331 and 399 us;
  // - 64 of 256: 185, 187, 191 and 272;
  // - 4 of 4,096: 901, 905, 906 and 945;
  // - 16 of 64 to 2,063: 544, 502, 518 and 540.
  //
  // With few tiles, two per multiprocessor leave some idle: 16 heads of 64 columns, 4 sequences of 4,096, 433 us for
  // 311.
  static constexpr int kPersistentBlocksPerSm = 4;
  // Query tiles that one search finds. Paired blocks seldom have a second one: latents take 1 us less than with 8
  // (H200).
  static constexpr int kItemsPerSearch = kPairs ? 1 : 8;
  static constexpr int kProducerBarrier = 1;  // of the producer's threads; consumers use the following numbers

  // Whether TMA may copy keys and values: where their layout is known.
  static constexpr bool kUsesTma = kCopies && is_kv_cache<typename P::Kv>;

  struct Params {
    P problem;
    PrefillGrid grid;
    std::conditional_t<kUsesTma, TileBoxes, Nothing> boxes = {};
  };

  // A query tile as the producer publishes it: its rows, and the keys that they see, each of them and all.
  struct Item {
    PrefillRows rows;
    SeenKeys all;
    RowKeys row_keys[kRows];
  };

  // Barrier phases of the stages: one parity bit for each stage. Every query tile begins with stage 0, so that the
  // compiler knows the stage to be uniform.
  struct StagePhases {
    unsigned bits = 0;
    static __device__ __forceinline__ int stage(int tile) { return tile % kStages; }
    __device__ __forceinline__ int at(int tile) const { return int(bits >> stage(tile) & 1); }
    __device__ __forceinline__ void next(int tile) { bits ^= 1u << stage(tile); }
  };
  // Index and number of blocks. Blocks that share a query tile count as one.
  static __device__ __forceinline__ unsigned index() { return kPairs ? arch::cluster_index() : blockIdx.x; }
  static __device__ __forceinline__ unsigned count() { return kPairs ? arch::clusters() : gridDim.x; }
  // Calls f(number, tile, round) for each query tile of the block, until f returns false. `number` counts the block's
  // tiles, `tile` is the index in the grid. It is computed anew in each round, as the main loop needs the registers.
  // The count of rounds shows the compiler that the loop is uniform, so that it keeps more barrier addresses in uniform
  // registers.
  template <class F>
  static __device__ __forceinline__ void each_item(const PrefillGrid& grid, const F& f) {
    int number = 0;
#pragma unroll 1
    for (unsigned round = 0; round < grid.rounds; ++round) {
      const unsigned tile = grid.tile_of(round, index(), count());
      if (tile >= unsigned(grid.total_items)) continue;
      if (!f(number, tile, round)) break;
      ++number;
    }
  }

  // The same as an iterator.
  struct ItemIterator {
    unsigned round = 0;  // the next one
    int number = -1;
    __device__ __forceinline__ bool next(const PrefillGrid& grid, unsigned& tile) {
#pragma unroll 1
      while (round < grid.rounds) {
        tile = grid.tile_of(round++, index(), count());
        if (tile < unsigned(grid.total_items)) return ++number, true;
      }
      return false;
    }
  };

  // Called by a whole warp; all lanes get the keys that rows [first, first + count) see.
  static __device__ __forceinline__ SeenKeys seen_by_rows(const Item& item, int first, int count) {
    const int lane = threadIdx.x % 32;
    const auto of = [&](int row) { return seen_by(item.rows, row, item.row_keys[row]); };
    SeenKeys seen = of(first + lane % count);
    for (int i = 32; i < count; i += 32) seen = join(seen, of(first + i + lane));
    return join_lanes(seen);
  }

  // The key tiles of a query tile; they begin at multiples of kKeys.
  struct Tiles {
    int low, begin, end, count;
    __device__ __forceinline__ Tiles(const SeenKeys& all) : end(all.any_end) {
      low = lesser(all.any_begin, end);
      begin = low / kKeys * kKeys;
      count = tiles_in(end, kKeys - 1);
    }
    // Key tiles before position `key`: full ones, or with up = kKeys - 1 those that are partial as well.
    __device__ __forceinline__ int tiles_in(int key, int up) const {
      return int(unsigned(greater(begin, lesser(key, end)) - begin + unsigned(up)) / kKeys);
    }
  };

  // Where a search puts its results: directly in the item if it finds only one.
  template <class Shared>
  static __device__ __forceinline__ PrefillRows* search_results(Shared& shared, Item& item) {
    if constexpr (kItemsPerSearch > 1)
      return shared.found_items;
    else
      return &item.rows;
  }
  template <class Shared>
  static __device__ __forceinline__ const Item& wait_for_item(Shared& shared, int number) {
    arch::mbarrier_wait_in_block(&shared.item_full[number % kItems], number / kItems % 2);
    return shared.items[number % kItems];
  }
  // Called by the producer before it copies queries. Here each item has its own place for them.
  template <class Shared>
  static __device__ __forceinline__ void wait_for_room(Shared&, int) {}
};

// What fits into 227 KB. If the next queries do not fit, they are copied after the last logits of this tile. This is
// also done where keys are decoded, though they would fit: with them, 16,384 keys of float8_e4m3 and 128 columns took
// 3,850 us instead of 3,590 (H200), but 1,024 and 4,096 keys took 3 % less.
template <int kDim, bool k8Bit>
constexpr int hopper_stages = kDim == 64 || k8Bit ? 3 : 2;
template <int kDim, bool kDecodes>
constexpr int hopper_query_stages = kDim > 128 || kDecodes ? 1 : 2;
template <bool kDecodes>
constexpr int hopper_items = kDecodes ? 1 : 2;

// Configuration for heads of up to kDim columns and values of up to kCols. If both are equal, the kernel also has
// products for fewer columns (kReducedDim, kReducedCols). Columns that a head does not have are zeros. k8Bit_:
// queries, keys, values and weights are float8_e4m3.
template <class P, int kDim_, int kCols_, int kKeys_, int kGroups_, bool k8Bit_>
struct HopperPrefillParts
    : HopperItems<P, 64 * kGroups_, kKeys_, hopper_stages<kDim_, k8Bit_>,
                  hopper_items<decodes_kv<typename P::Kv> && !k8Bit_>, !decodes_kv<typename P::Kv> || k8Bit_> {
  using Items = HopperItems<P, 64 * kGroups_, kKeys_, hopper_stages<kDim_, k8Bit_>,
                            hopper_items<decodes_kv<typename P::Kv> && !k8Bit_>, !decodes_kv<typename P::Kv> || k8Bit_>;
  using Items::kRows, Items::kKeys, Items::kStages, Items::kItems, Items::kAligned;
  using typename Items::Item;
  static constexpr int kGroups = kGroups_;
  static constexpr bool k8Bit = k8Bit_;
  using Kv = typename P::Kv;
  using TK = std::conditional_t<k8Bit, float8_e4m3, key_meeting_type<typename P::Q, Kv>>;
  using TV = std::conditional_t<k8Bit, float8_e4m3, value_meeting_type<typename P::Q, Kv>>;
  static constexpr int kDim = kDim_, kCols = kCols_;
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  static constexpr bool kDecodes = decodes_kv<Kv> && !k8Bit;
  static constexpr int kQueryStages = hopper_query_stages<kDim, kDecodes>;
  // kTurns: consumer groups take turns at issuing products. With 64 columns, or 8 bits, exponentials take as long as
  // products, and turns keep the groups apart.
  //
  // With more than 128 columns, a group that skips the last key tile would be a tile ahead of the other from then on,
  // and with two stages both would wait for keys. H200, 256 columns, causal, 8 heads, 4,096 keys: 428 us, without turns
  // 472, and 434 if groups begin each query tile together. 192 columns with values of 128, 16 heads, 16,384 keys: 3,370
  // us, without turns 4,210, and with the tiles of 256 columns 3,885.
  //
  // With 128 columns turns gain nothing.
  static constexpr bool kExponentialsBound = kDim == 64 || k8Bit, kTurns = kExponentialsBound || kDim > 128;
  static constexpr bool kHasFewer = kDim != 64 && kDim == kCols;
  static constexpr int kReducedDim = !kHasFewer ? kDim : k8Bit ? kDim / 2 : kDim / 4 * 3;
  static constexpr int kReducedCols = !kHasFewer ? kCols : k8Bit ? kCols / 2 : kCols == 128 ? 96 : 128;
  static constexpr int kProducers = kDecodes ? 2 : 1;
  static constexpr int max_threads = 128 * (kProducers + kGroups), registers = 512 / (kProducers + kGroups) / 8 * 8;
  // Producers that decode hold the codes of a tile in registers; consumers get the rest. H200, queries of half, 16,384
  // keys of float8_e4m3: with 128 columns 3,590 us with 56 or 64 registers for producers, and 5,500 with 72, as
  // consumers then have too few; with 256 columns 3,600 with 48 and 7,300 with 56.
  static constexpr int kProducerRegisters = kDecodes ? (kDim == 256 ? 48 : 56) : kGroups == 2 || k8Bit ? 56 : 32;
  static constexpr int kConsumerRegisters = kDecodes       ? 256 - kProducerRegisters
                                            : kGroups == 2 ? 224
                                            : k8Bit        ? 152
                                                           : 160;
  static_assert(!kDecodes || kGroups == 2, "registers of two warpgroups of either");
  using Queries = TileLayout<kDim* int(sizeof(TK)) / 2, 128, 64>;
  using Keys = KvTiles<TK, Key, constant_stride<Kv>, kKeys, kDim, 128, true>;
  using Values = KvTiles<TV, Value, constant_stride<Kv>, kKeys, kCols, 128, true>;
  // Queries that are not plain memory are read through their functor by the consumers that need them.
  static constexpr bool kCopiesQueries = is_stored_as<typename P::Q, TK>, kTmaValues = true;
  // Whether results may be stored by TMA. They are staged where the queries of their tile were, which is free if the
  // next queries have another place. A query tile then ends sooner, but with 128 columns its key tiles take longer.
  // H100, without it in brackets: causal, 512 keys, 16 heads of 128 columns 105 us (113), 32 heads on 8 KV heads 203
  // (221); 32 heads of 64 columns, causal, 2,048 keys 320 (337), without a mask 1,024 keys 336 (344); but 16 heads of
  // 128 columns, 2,048 keys without a mask, 468 (457).
  static constexpr bool kTmaResults = Items::kUsesTma && kQueryStages == 2 && !k8Bit && is_16_bit<result_type<P>> &&
                                      (kDim == 64 || score_ranges<typename P::S>);

  // Offsets of the scales of keys, and then of values, of all stages.
  static constexpr int kKeyScales = 0, kValueScales = Key::scaled ? kStages * kKeys : 0,
                       kScales = kValueScales + (Value::scaled ? kStages * kKeys : 0);
  struct Shared {
    float scales[kScales > 0 ? kScales : 1];
    // mbarriers: the producers complete those that are `full`; consumers complete those that are `empty` as they
    // release a stage, an item, or queries.
    uint64_t keys_full[kStages], values_full[kStages], keys_empty[kStages], values_empty[kStages],
        item_full[kItems], item_empty[kItems], queries_empty[kQueryStages];
    uint64_t copied_full[k8Bit ? kStages : 1];  // values before they are transposed
    Item items[kItems];
    PrefillRows found_items[Items::kItemsPerSearch];
  };
  static constexpr int kQueryBytes = Queries::kRuns * Queries::kRunBytes,
                       kStageBytes = Keys::kBytes + (k8Bit ? kCols * 128 : Values::kBytes);
  static constexpr int kTilesAt =
      (int(sizeof(Shared)) + kAligned - 1) / kAligned * kAligned;  // after the struct Shared
  // Behind the stages: the values of each stage before they are transposed.
  static constexpr int kSharedBytes =
      kTilesAt + kQueryStages * kGroups * kQueryBytes + kStages * kStageBytes + (k8Bit ? kStages * Values::kBytes : 0);
  static_assert(kSharedBytes <= 227 * 1024, "what a block can have");
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  // Chooses between persistent blocks and one block per tile. Persistent blocks pay for prologue and epilogue once, but
  // only help if the load is balanced:
  // - There are many tiles, and either all have about as many keys, or a head has few of them or a multiple of 8:
  //   persistent blocks. With other numbers some blocks would get long tiles again and again (up to 88 % more for a
  //   block, simulated).
  // - Later queries see more keys, and a head has more than a few tiles, but not 16: persistent blocks in sections of
  //   heads.
  // - With 64 columns, or 8 bits, and few tiles per head: contiguous tiles, mostly of one head.
  //
  // 16 heads of 128 columns:
  // - 2,048 keys: 548 us, with a block per tile 604 (H200).
  // - Causal, 8,192 keys: 1,040 us with a block per tile, 992 in the order of the sections, 910 with persistent blocks
  //   (H100).
  // - Causal, in sections and with persistent blocks without sections (H100): 1,920 keys 241 and 266 us, 1,152 keys 180
  //   and 191, but 1,024 keys 167 and 160, and 2,048 keys of 32 heads on 8 KV heads 536 and 528.
  //
  // Few tiles per head, contiguous tiles: H200, causal, products of 8 bits, 640 keys 118 us, and 141 in blocks of whole
  // heads, whose number per multiprocessor differs; 768 keys 114 and 119, 512 keys 99 and 99. With more tiles per head
  // they are slower: 1,536 keys of 32 heads of 64 columns 279 us, in sections 251 (H100).
  static void choose_schedule(PrefillGrid& grid, const P& p) {
    const int64_t all = grid.total_items, resident_blocks = grid.resident_blocks;
    const unsigned of_head = grid.tiles.divisor, few = kExponentialsBound ? 4 : 8;
    if (kExponentialsBound && of_head <= few) {
      if (kQueryStages > 1 && all >= 2 * resident_blocks) grid.take_contiguous_items(16);
      return;
    }
    const KeysOfLater keys = keys_of_later(p.score, p.shape.q_len);
    if (keys == KeysOfLater::more && of_head > few && of_head != 16) {
      const int64_t columns = p.shape.dim + p.shape.value_dim();
      if (all >= 2 * resident_blocks) grid.persist_by_sections(p.shape.q_len * columns * int64_t(sizeof(TK)));
      return;
    }
    const bool even = keys == KeysOfLater::alike || of_head <= 16 || (of_head <= 32 && of_head % 8 == 0);
    if (even && all >= 7 * resident_blocks) grid.persist_in_one_wave();
  }

  // Called by the producer before it copies queries: there may be fewer places for queries than items.
  static __device__ __forceinline__ void wait_for_room(Shared& shared, int number) {
    arch::mbarrier_wait_in_block(&shared.queries_empty[number % kQueryStages], number / kQueryStages % 2 ^ 1);
  }
  static __device__ __forceinline__ unsigned char* queries_of(unsigned char* memory, int item, int group) {
    return memory + (item % kQueryStages * kGroups + group) * kQueryBytes;
  }
  static __device__ __forceinline__ unsigned char* stages_of(unsigned char* memory) {
    return memory + kQueryStages * kGroups * kQueryBytes;
  }
  template <int kOf>
  static __device__ __forceinline__ float* scales_of(Shared& shared) {
    return shared.scales + kOf;
  }
};

}  // namespace detail
KERNELS_END
