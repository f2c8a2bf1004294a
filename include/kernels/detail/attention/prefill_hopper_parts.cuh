// Attention of many queries for sm_90a: the schedule of Hopper's fastest kernels, and what its producers and consumers
// share.
//
//   warpgroup 0      the producer: copies queries by cp.async, and keys and values to a ring of stages, by the TMA unit
//                    where it can (prefill_boxes.cuh); turns values of 8 bits where they are multiplied as such
//   warpgroup 1      where keys and values have 8 or 4 bits: each of the two decodes the one or the other
//   the others       consumers, with 64 of a tile's rows each: logits by wgmma from shared memory, their softmax in
//                    registers, and from there the product with the values by wgmma
//
//   shared memory:   | queries of a tile, of the next | K0 | V0 | K1 | V1 | ...
//
//   tensor cores:    | K1 ... | V0 ... | K2 ... | V1 ... |      of one group; the other's products fill the gaps
//   softmax:                  |   1    |        |   2    |
//
// A thread block takes some tiles of queries, one behind the other: while the last weights and results of one are made,
// the first keys and values of the next come in, and its queries, or earlier where there is room for both. What is done
// with logits is that of prefill_softmax.cuh, which rows a block has and which keys these see that of prefill_rows.cuh.
#pragma once

#include "../../arch/sm90.cuh"
#include "prefill_boxes.cuh"
#include "prefill_hopper_results.cuh"
#include "prefill_softmax.cuh"
#include "prefill_tiles.cuh"

KERNELS_BEGIN
namespace detail {

// Tiles of queries on their way through a block, one behind the other, and the stages of a tile of keys: what the
// kernels for sm_90a have in common. kRows: of a tile of queries; kItems: how many of these a block knows; kCopies:
// whether keys and values are copied as they are; kPairs: whether the blocks of a cluster may have a tile of queries
// together.
template <class P, int kRows_, int kKeys_, int kStages_, int kItems_, bool kCopies, bool kPairs_ = false>
struct HopperItems {
  using Problem = P;
  static constexpr int kRows = kRows_, kKeys = kKeys_, kStages = kStages_, kItems = kItems_;
  static constexpr bool kPairs = kPairs_, kWarpgroups = true;
  static constexpr int kResultPack = 8, kOnEach = 1, kAligned = 1024;
  // Blocks for each multiprocessor, where sequences differ and there are tiles for twice as many, or, where keys may be
  // cut and the host only knows how many tiles there can be, for as many. They go there and back, so that who had tiles
  // with many keys then has some with few. H200 (CUDA 13.0, 2026-11, a program that was not kept), causal, 32 heads of
  // 128 columns on 8, with 1, 2 and 4 of them, and with one for each tile: 16 sequences of 1,024 queries 327, 329, 331
  // and 399 us, 64 of 256 185, 187, 191 and 272, 4 of 4,096 901, 905, 906 and 945, 16 of 64 to 2,063 544, 502, 518 and
  // 540. With few tiles two leave multiprocessors idle: 16 heads of 64 columns, 4 of 4,096 433 us for 311.
  static constexpr int kWalking = 4;
  // Tiles of queries that are looked for at a time. Blocks that are paired seldom have a second one: latents take 1 us
  // less than with 8 (H200).
  static constexpr int kSought = kPairs ? 1 : 8;
  static constexpr int kProducerBarrier = 1;  // of the producer's threads; those behind are the consumers'

  // Whether the TMA unit may copy keys and values: where their layout is known.
  static constexpr bool kBoxes = kCopies && is_kv_cache<typename P::Kv>;

  struct Params {
    P problem;
    PrefillGrid grid;
    std::conditional_t<kBoxes, TileBoxes, Nothing> boxes = {};
  };

  // A tile of queries, as the producer found it: which keys its rows see, each of them and all.
  struct Item {
    PrefillRows rows;
    SeenKeys all;
    RowKeys row_keys[kRows];
  };

  // Stages of a tile of keys, or of values: each tile of queries begins with the first, so that the compiler knows that
  // all threads are at the same. Whether it is an even or an odd time that a stage is used.
  struct Parities {
    unsigned bits = 0;
    static __device__ __forceinline__ int stage(int tile) { return tile % kStages; }
    __device__ __forceinline__ int at(int tile) const { return int(bits >> stage(tile) & 1); }
    __device__ __forceinline__ void next(int tile) { bits ^= 1u << stage(tile); }
  };
  // Which block it is, of how many; those that have a tile together count as one.
  static __device__ __forceinline__ unsigned index() { return kPairs ? arch::cluster_index() : blockIdx.x; }
  static __device__ __forceinline__ unsigned count() { return kPairs ? arch::clusters() : gridDim.x; }
  // Calls f for each of the block's tiles with its number, of the block and in all, and that of its round, until it
  // says that there are no more. Where they are is computed anew each time, as the loop over keys needs the registers.
  // By the count of rounds the compiler sees that all threads go through the same ones, and keeps the addresses of more
  // barriers in uniform registers.
  template <class F>
  static __device__ __forceinline__ void each_item(const PrefillGrid& grid, const F& f) {
    int number = 0;
#pragma unroll 1
    for (unsigned round = 0; round < grid.rounds; ++round) {
      const unsigned tile = grid.tile_of(round, index(), count());
      if (tile >= unsigned(grid.tiles_in_all)) continue;
      if (!f(number, tile, round)) break;
      ++number;
    }
  }

  // The same for one who asks for the next tile when he wants it.
  struct Walk {
    unsigned round = 0;  // the next one
    int number = -1;
    __device__ __forceinline__ bool next(const PrefillGrid& grid, unsigned& tile) {
#pragma unroll 1
      while (round < grid.rounds) {
        tile = grid.tile_of(round++, index(), count());
        if (tile < unsigned(grid.tiles_in_all)) return ++number, true;
      }
      return false;
    }
  };

  // By a whole warp, for all of its lanes.
  static __device__ __forceinline__ SeenKeys seen_by_rows(const Item& item, int first, int count) {
    const int lane = threadIdx.x % 32;
    const auto of = [&](int row) { return seen_by(item.rows, row, item.row_keys[row]); };
    SeenKeys seen = of(first + lane % count);
    for (int i = 32; i < count; i += 32) seen = join(seen, of(first + i + lane));
    return join_lanes(seen);
  }

  // Tiles of keys that a tile of queries goes through; those begin at multiples of their size.
  struct Tiles {
    int low, begin, end, count;
    __device__ __forceinline__ Tiles(const SeenKeys& all) : end(all.any_end) {
      low = lesser(all.any_begin, end);
      begin = low / kKeys * kKeys;
      count = tiles_in(end, kKeys - 1);
    }
    // Of the keys from the beginning up to this one: all tiles that are full, or with `up` those begun as well.
    __device__ __forceinline__ int tiles_in(int key, int up) const {
      return int(unsigned(greater(begin, lesser(key, end)) - begin + unsigned(up)) / kKeys);
    }
  };

  // Where their rows come to lie; if it is one, where its item is.
  template <class Shared>
  static __device__ __forceinline__ PrefillRows* sought_in(Shared& shared, Item& item) {
    if constexpr (kSought > 1)
      return shared.sought;
    else
      return &item.rows;
  }
  template <class Shared>
  static __device__ __forceinline__ const Item& wait_for_item(Shared& shared, int number) {
    arch::mbarrier_wait_in_block(&shared.item_full[number % kItems], number / kItems % 2);
    return shared.items[number % kItems];
  }
  // By the producer: queries have a place wherever an item has one.
  template <class Shared>
  static __device__ __forceinline__ void wait_for_room(Shared&, int) {}
};

// What 227 KB have room for. Where there is none for the next queries, these come when there are the last logits; so
// they do where keys are decoded: there is room for the next queries, but with these 16,384 keys of float8_e4m3 and 128
// columns took 3,850 us instead of 3,590 (H200), though 1,024 and 4,096 keys took 3 % less.
template <int kDim, bool kInEight>
constexpr int hopper_stages = kDim == 64 || kInEight ? 3 : 2;
template <int kDim, bool kDecodes>
constexpr int hopper_query_stages = kDim > 128 || kDecodes ? 1 : 2;
template <bool kDecodes>
constexpr int hopper_items = kDecodes ? 1 : 2;

// What producers and consumers share. Takes heads of up to kDim columns, and values of up to kCols. There are products
// for all columns and, in the same kernel, if these are as many, for fewer; those of queries and keys that are not
// there are zeros. kInEight_: queries, keys and values are float8_e4m3, and so are weights.
template <class P, int kDim_, int kCols_, int kKeys_, int kGroups_, bool kInEight_>
struct HopperPrefillParts
    : HopperItems<P, 64 * kGroups_, kKeys_, hopper_stages<kDim_, kInEight_>,
                  hopper_items<decodes_kv<typename P::Kv> && !kInEight_>, !decodes_kv<typename P::Kv> || kInEight_> {
  using Items = HopperItems<P, 64 * kGroups_, kKeys_, hopper_stages<kDim_, kInEight_>,
                            hopper_items<decodes_kv<typename P::Kv> && !kInEight_>,
                            !decodes_kv<typename P::Kv> || kInEight_>;
  using Items::kRows, Items::kKeys, Items::kStages, Items::kItems, Items::kAligned;
  using typename Items::Item;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kInEight = kInEight_;
  using Kv = typename P::Kv;
  using TK = std::conditional_t<kInEight, float8_e4m3, key_meeting_type<typename P::Q, Kv>>;
  using TV = std::conditional_t<kInEight, float8_e4m3, value_meeting_type<typename P::Q, Kv>>;
  static constexpr int kDim = kDim_, kCols = kCols_;
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  static constexpr bool kDecodes = decodes_kv<Kv> && !kInEight;
  static constexpr int kQueryStages = hopper_query_stages<kDim, kDecodes>;
  // With 64 columns, or 8 bits, exponentials take as long as products: groups that take turns at products keep out of
  // each other's way. With 256 columns a group that leaves out the last tile of keys would be a tile ahead of the other
  // from then on, and with two stages both would wait for keys: H200, causal, 8 heads, 4,096 keys take 428 us, without
  // turns 472, and 434 where groups begin each tile of queries together. With 192 columns and values of 128, 16 heads,
  // 16,384 keys take 3,370 us, without turns 4,210, and with the tiles of 256 columns 3,885. With 128 columns turns
  // gain nothing.
  static constexpr bool kExponentialsBound = kDim == 64 || kInEight, kTurns = kExponentialsBound || kDim > 128;
  static constexpr bool kHasFewer = kDim != 64 && kDim == kCols;
  static constexpr int kFewer = !kHasFewer ? kDim : kInEight ? kDim / 2 : kDim / 4 * 3;
  static constexpr int kFewerCols = !kHasFewer ? kCols : kInEight ? kCols / 2 : kCols == 128 ? 96 : 128;
  static constexpr int kProducers = kDecodes ? 2 : 1;
  static constexpr int max_threads = 128 * (kProducers + kGroups), registers = 512 / (kProducers + kGroups) / 8 * 8;
  // Producers that decode have the codes of a tile in registers; what these leave is the consumers'. H200, queries of
  // half, 16,384 keys of float8_e4m3: heads of 128 columns take 3,590 us with 56 or 64 registers for producers and
  // 5,500 with 72, when consumers have too few; of 256 columns 3,600 with 48 and 7,300 with 56.
  static constexpr int kProducerRegisters = kDecodes ? (kDim == 256 ? 48 : 56) : kGroups == 2 || kInEight ? 56 : 32;
  static constexpr int kConsumerRegisters = kDecodes       ? 256 - kProducerRegisters
                                            : kGroups == 2 ? 224
                                            : kInEight     ? 152
                                                           : 160;
  static_assert(!kDecodes || kGroups == 2, "registers of two warpgroups of either");
  using Queries = TileLayout<kDim* int(sizeof(TK)) / 2, 128, 64>;
  using Keys = KvTiles<TK, Key, in_one_run<Kv>, kKeys, kDim, 128, true>;
  using Values = KvTiles<TV, Value, in_one_run<Kv>, kKeys, kCols, 128, true>;
  // Queries that are computed are read by those who need them.
  static constexpr bool kCopiesQueries = lies_as<typename P::Q, TK>, kBoxesOfValues = true;
  // Whether the TMA unit may take results, by way of their queries' place, which the next tile of queries does not need
  // then. With that a tile of queries ends sooner, but with 128 columns its tiles of keys take longer. H100, in
  // brackets without: causal, 512 keys and 16 heads of 128 columns 105 us (113), 32 of them with 8 of keys 203 (221);
  // 32 heads of 64 columns, causal, 2,048 keys 320 (337), without a mask 1,024 keys 336 (344); but 16 heads of 128
  // columns, 2,048 keys without a mask, 468 (457).
  static constexpr bool kBoxesOfResults = Items::kBoxes && kQueryStages == 2 && !kInEight &&
                                          is_16_bit<result_type<P>> && (kDim == 64 || score_ranges<typename P::S>);

  // Scales of keys, then of values, of each stage: where they begin.
  static constexpr int kKeyScales = 0, kValueScales = Key::scaled ? kStages * kKeys : 0,
                       kScales = kValueScales + (Value::scaled ? kStages * kKeys : 0);
  struct Shared {
    float scales[kScales > 0 ? kScales : 1];
    uint64_t keys_full[kStages], values_full[kStages], keys_empty[kStages], values_empty[kStages],
        item_full[kItems], item_empty[kItems], queries_empty[kQueryStages];
    uint64_t copied_full[kInEight ? kStages : 1];  // of values before they are turned
    Item items[kItems];
    PrefillRows sought[Items::kSought];
  };
  static constexpr int kQueryBytes = Queries::kRuns * Queries::kRunBytes,
                       kStageBytes = Keys::kBytes + (kInEight ? kCols * 128 : Values::kBytes);
  static constexpr int kTilesAt =
      (int(sizeof(Shared)) + kAligned - 1) / kAligned * kAligned;  // behind what threads share
  // Behind the stages: as many tiles of values before they are turned.
  static constexpr int kSharedBytes = kTilesAt + kQueryStages * kGroups * kQueryBytes + kStages * kStageBytes +
                                      (kInEight ? kStages * Values::kBytes : 0);
  static_assert(kSharedBytes <= 227 * 1024, "what a block can have");
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  // Blocks stay for further tiles, so that what comes before and behind these is paid for once, where that shares them
  // out evenly: all have about as many keys; or there are many, and of a head either few or a multiple of 8, as with
  // other numbers some blocks would meet long tiles again and again (up to 88 % more for a block, simulated). Where
  // later tiles have more keys, and a head has more than a few, but not 16, blocks share out sections of heads. 16
  // heads of 128 columns: 2,048 keys take 548 us, a block for each tile 604 (H200); causal, 8,192 keys and a block for
  // each tile 1,040 us, in the order of the sections 992, and with blocks that stay 910; 1,920 keys 241 us in sections,
  // with blocks that stay 266, 1,152 keys 180 and 191, but 1,024 keys 167 and 160, and 2,048 keys of 32 heads on 8 536
  // and 528 (H100).
  //
  // With 64 columns, or 8 bits, and few tiles of a head, blocks do not stay but take tiles in a row, mostly of one
  // head. H200, causal, products of 8 bits: 640 keys 118 us, in blocks of whole heads, which are not as many for each
  // multiprocessor, 141; 768 keys 114 and 119, 512 keys 99 and 99. With more tiles of a head that is slower: 1,536 keys
  // of 32 heads of 64 columns 279 us, in sections 251 (H100).
  static void share_out(PrefillGrid& grid, const P& p) {
    const int64_t all = grid.tiles_in_all, at_once = grid.at_once;
    const unsigned of_head = grid.tiles.divisor, few = kExponentialsBound ? 4 : 8;
    if (kExponentialsBound && of_head <= few) {
      if (kQueryStages > 1 && all >= 2 * at_once) grid.take_in_a_row(16);
      return;
    }
    const KeysOfLater keys = keys_of_later(p.score, p.shape.q_len);
    if (keys == KeysOfLater::more && of_head > few && of_head != 16) {
      const int64_t columns = p.shape.dim + p.shape.value_dim();
      if (all >= 2 * at_once) grid.stay_in_sections(p.shape.q_len * columns * int64_t(sizeof(TK)));
      return;
    }
    const bool even = keys == KeysOfLater::alike || of_head <= 16 || (of_head <= 32 && of_head % 8 == 0);
    if (even && all >= 7 * at_once) grid.stay();
  }

  // By the producer, for the queries of a tile: they may have fewer places than items.
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
