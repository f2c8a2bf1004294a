// Attention of many queries for sm_90a: the schedule of Hopper's fastest kernels, for heads whose keys and values are copied.
//
//   warpgroup 0      the producer: copies queries, and keys and values to a ring of stages, by cp.async, from wherever they lie
//   warpgroup 1      where keys and values have 8 or 4 bits: each of the two decodes the one or the other
//   the others       consumers, with 64 of a tile's rows each: logits by wgmma from shared memory, their softmax in registers, and from there
//                    the product with the values by wgmma
//
//   shared memory:   | queries of a tile, of the next | K0 | V0 | K1 | V1 | ...      results go out by way of the queries' place
//
//   tensor cores:    | K1 ... | V0 ... | K2 ... | V1 ... |      of one group; the other's products fill the gaps
//   softmax:                  |   1    |        |   2    |
//
// A thread block takes some tiles of queries, one behind the other: while the results of one go out, the first keys and values of the next
// come in. What is done with logits is that of prefill_softmax.cuh, which rows a block has and which keys these see that of prefill_rows.cuh.
#pragma once

#include "../../arch/sm90.cuh"
#include "prefill_softmax.cuh"
#include "prefill_tiles.cuh"

KERNELS_BEGIN
namespace detail {

// Takes heads of up to kDim columns, and values of as many or fewer. There are products for all columns and, in the same kernel, for fewer; those
// of queries and keys that are not there are zeros.
// kInEight: queries, keys and values are float8_e4m3, and so are weights.
template <class P, int kDim_, int kKeys_, int kGroups, bool kInEight = false>
struct HopperPrefillBody {
  using Kv = typename P::Kv;
  using TK = std::conditional_t<kInEight, float8_e4m3, key_meeting_type<typename P::Q, Kv>>;
  using TV = std::conditional_t<kInEight, float8_e4m3, value_meeting_type<typename P::Q, Kv>>;
  static constexpr int kDim = kDim_, kCols = kDim_, kKeys = kKeys_, kRows = 64 * kGroups, kResultPack = 8, kOnEach = 1;
  static constexpr int kWalking = 32;  // blocks for each multiprocessor, where sequences differ
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  static constexpr bool kDecodes = decodes_kv<Kv> && !kInEight;
  // What 227 KB have room for. Where there is none for the next queries, a block takes one tile of them.
  static constexpr int kStages = kDim == 64 || kInEight ? 3 : 2, kQueryStages = kDim == 256 || kDecodes ? 1 : 2;
  // With 64 columns, or 8 bits, exponentials take as long as products: groups that take turns keep out of each other's way.
  static constexpr bool kTurns = kDim == 64 || kInEight;
  static constexpr int kFewer = kDim == 64 || kInEight ? kDim : kDim / 4 * 3, kFewerCols = kCols == 64 || kInEight ? kCols : kCols == 128 ? 96 : 128;
  static constexpr int kProducers = kDecodes ? 2 : 1;
  static constexpr int max_threads = 128 * (kProducers + kGroups), registers = 512 / (kProducers + kGroups) / 8 * 8;
  static constexpr int kProducerRegisters = kDecodes ? (kDim == 256 ? 40 : 48) : kGroups == 2 || kInEight ? 56 : 32;
  static constexpr int kConsumerRegisters = kDecodes ? (kDim == 256 ? 216 : 208) : kGroups == 2 ? 224 : kInEight ? 152 : 160;
  using Queries = TileLayout<kDim * int(sizeof(TK)) / 2, 128, 64>;
  using Keys = KvTiles<TK, Key, in_one_run<Kv>, kKeys, kDim, 128, true>;
  using Values = KvTiles<TV, Value, in_one_run<Kv>, kKeys, kCols, 128, true>;
  // Queries that are computed are read by those who need them.
  static constexpr bool kCopiesQueries = lies_as<typename P::Q, TK>;

  struct Params {
    P problem;
    PrefillGrid grid;
  };

  // A tile of queries, as the producer found it: which keys its rows see, each of them and all.
  struct Item {
    PrefillRows rows;
    SeenKeys all;
    RowKeys row_keys[kRows];
  };
  // Scales of keys, then of values, of each stage: where they begin.
  static constexpr int kKeyScales = 0, kValueScales = Key::scaled ? kStages * kKeys : 0, kScales = kValueScales + (Value::scaled ? kStages * kKeys : 0);
  struct Shared {
    float scales[kScales > 0 ? kScales : 1];
    uint64_t keys_full[kStages], values_full[kStages], keys_empty[kStages], values_empty[kStages], item_full[kQueryStages], item_empty[kQueryStages];
    Item items[kQueryStages];
  };
  static constexpr int kQueryBytes = 64 * kDim * 2 /* results need so many as well */, kStageBytes = Keys::kBytes + (kInEight ? kCols * 128 : Values::kBytes), kAligned = 1024;
  static constexpr int kTilesAt = (int(sizeof(Shared)) + kAligned - 1) / kAligned * kAligned;  // behind what threads share
  // Behind the stages: codes of keys and values, or three tiles of values before they are turned.
  static constexpr int kSharedBytes = kTilesAt + kQueryStages * kGroups * kQueryBytes + kStages * kStageBytes + (kInEight ? 3 * Values::kBytes : Keys::kCodeBytes + Values::kCodeBytes);
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  // Where sequences are short, all tiles of a head, or of several, so that what comes before and behind them is paid for once. A tile of
  // queries is taken to have as many keys; the rest of the costs is in tiles of keys. H200, bench_prefill.
  static unsigned tiles_of_block(const PrefillGrid& grid) {
    const unsigned of_head = grid.tiles.divisor, most = kQueryStages == 1 || of_head > 8 ? 0 : 16;
    const auto cost = [&](unsigned each) {
      const int64_t blocks = (grid.tiles_in_all + each - 1) / each, waves = (blocks + grid.at_once - 1) / grid.at_once;
      return double(waves) * (each * (of_head * double(kRows) / kKeys + 1.3) + 2.2);
    };
    unsigned best = 1;
    for (unsigned each = of_head; each <= most; each += of_head) {
      if (cost(each) < cost(best)) best = each;
    }
    return best;
  }

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (arch::kWarpgroupMma) {
      extern __shared__ __align__(1024) unsigned char whole_memory[];
      Shared& shared = *reinterpret_cast<Shared*>(whole_memory);
      if (arch::shared_address(whole_memory) % kAligned != 0) __trap();
      unsigned char* const memory = whole_memory + kTilesAt;
      if (threadIdx.x == 0) {
        constexpr int producers = 128, consumers = 4 * kGroups;  // threads; warps, of which the first lane arrives
        KERNELS_UNROLL
        for (int i = 0; i < kStages; ++i) {
          arch::mbarrier_init(&shared.keys_full[i], producers), arch::mbarrier_init(&shared.values_full[i], producers);
          arch::mbarrier_init(&shared.keys_empty[i], consumers), arch::mbarrier_init(&shared.values_empty[i], consumers);
        }
        KERNELS_UNROLL
        for (int i = 0; i < kQueryStages; ++i) arch::mbarrier_init(&shared.item_full[i], 2 * producers), arch::mbarrier_init(&shared.item_empty[i], 128 * (kGroups + kProducers - 1));
        arch::mbarrier_init_fence();
      }
      __syncthreads();
      if (threadIdx.x < 128) {
        produce(params, shared, memory);
      } else if (threadIdx.x < 128 * kProducers) {
        if constexpr (kProducers == 2) produce_values(params, shared, memory);
      } else {
        consume(params, shared, memory);
      }
    }
  }

 private:
  // Stages of a tile of keys, or of values: each tile of queries begins with the first, so that the compiler knows that all threads are at
  // the same. Whether it is an even or an odd time that a stage is used.
  struct Parities {
    unsigned bits = 0;
    static __device__ __forceinline__ int stage(int tile) { return tile % kStages; }
    __device__ __forceinline__ int at(int tile) const { return int(bits >> stage(tile) & 1); }
    __device__ __forceinline__ void next(int tile) { bits ^= 1u << stage(tile); }
  };
  static __device__ __forceinline__ unsigned char* queries_of(unsigned char* memory, int item, int group) { return memory + (item % kQueryStages * kGroups + group) * kQueryBytes; }
  static __device__ __forceinline__ unsigned char* stages_of(unsigned char* memory) { return memory + kQueryStages * kGroups * kQueryBytes; }
  static __device__ __forceinline__ unsigned char* codes_of(unsigned char* memory) { return stages_of(memory) + kStages * kStageBytes; }
  template <int kOf>
  static __device__ __forceinline__ float* scales_of(Shared& shared) { return shared.scales + kOf; }
  // Calls f for each of the block's tiles with its number, of the block and in all, until it says that there are no more.
  template <class F>
  static __device__ __forceinline__ void each_item(const P& p, const PrefillGrid& grid, const F& f) {
    const bool even = PrefillGrid::even(p);
    const unsigned step = even ? 1 : gridDim.x, first = even ? blockIdx.x * grid.of_block : blockIdx.x;
    const unsigned all = unsigned(grid.tiles_in_all), end = even ? lesser(all, first + grid.of_block) : all;
    int number = 0;
#pragma unroll 1
    for (unsigned tile = first; tile < end && f(number, tile); tile += step) ++number;
  }

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
    __device__ __forceinline__ int tiles_in(int key, int up) const { return int(unsigned(greater(begin, lesser(key, end)) - begin + unsigned(up)) / kKeys); }
  };

  static constexpr int kProducerBarrier = 1;  // of the producer's threads

  static __device__ __forceinline__ void produce(const Params& params, Shared& shared, unsigned char* memory) {
    arch::fewer_registers<kProducerRegisters>();
    const P& p = params.problem;
    const int warp = threadIdx.x / 32, dim = int(p.shape.dim);
    if (dim != kDim && dim != kFewer) {
      KERNELS_ROLLED
      for (int i = 0; i < kStages; ++i) Keys::Layout::clear_behind(stages_of(memory) + i * kStageBytes, kKeys, dim);
    }
    if (!PrefillGrid::even(p) && blockIdx.x == 0 && warp == 1) params.grid.template count_rows<HopperPrefillBody>(p);
    Parities keys_to, values_to;
    each_item(p, params.grid, [&](int number, unsigned wanted) {
      Item& item = shared.items[number % kQueryStages];
      uint64_t* const full = &shared.item_full[number % kQueryStages];
      arch::mbarrier_wait_in_block(&shared.item_empty[number % kQueryStages], number / kQueryStages % 2 ^ 1);
      PrefillRows rows;
      if (PrefillGrid::even(p)) {
        rows = params.grid.even_rows(p, kRows, wanted);
        if (threadIdx.x == 0) item.rows = rows;
      } else {
        if (warp == 0) params.grid.template search<HopperPrefillBody>(p, wanted, item.rows);
        arch::named_barrier_sync(kProducerBarrier, 128);
        rows = same_in_lanes(item.rows);
        if (rows.count == 0) {
          arch::mbarrier_arrive(full), arch::mbarrier_arrive(full);
          return false;
        }
      }
      if constexpr (kCopiesQueries) {
#pragma unroll 1
        for (int i = 0; i < kGroups; ++i) bring_queries<TK, 64, Queries>(p, rows, i * 64, queries_of(memory, number, i), dim);
      }
      arch::mbarrier_arrive_copied(full);
      for (int row = int(threadIdx.x); row < kRows; row += 128) item.row_keys[row] = keys_seen(p, rows, row);
      arch::named_barrier_sync(kProducerBarrier, 128);
      const SeenKeys all = seen_by_rows(item, 0, kRows);
      if (threadIdx.x == 0) item.all = all;
      arch::mbarrier_arrive(full);  // behind what was written to the item
      if constexpr (kDecodes) {
        const auto at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
        decode_tiles<Keys>(at, dim, Tiles(all), stages_of(memory), codes_of(memory), scales_of<kKeyScales>(shared), shared.keys_full, shared.keys_empty, keys_to);
      } else if constexpr (kInEight) {
        copy_and_turn(p, shared, stages_of(memory), rows, Tiles(all), keys_to, values_to);
      } else {
        copy_keys(p, shared, stages_of(memory), rows, Tiles(all), keys_to, values_to);
      }
      return true;
    });
    arch::copy_async_commit();
    arch::copy_async_wait<0>();
  }

  // A sequence's keys and values.
  static __device__ __forceinline__ void copy_keys(const P& p, Shared& shared, unsigned char* stages, const PrefillRows& rows, const Tiles& tiles, Parities& keys_to, Parities& values_to) {
    const int lane = threadIdx.x % 32, dim = int(p.shape.dim);
    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    Keys keys(key_at, tiles.begin, 0, dim, true);
    Values values(value_at, tiles.begin, 0, int(p.shape.value_dim()), true);
    const void* addresses[Keys::kFound] = {};
    // In the order of the products: keys of a tile ahead of the values of the one before.
#pragma unroll 1
    for (int tile = 0; tile <= tiles.count; ++tile) {
      const int pos = tiles.begin + tile * kKeys;
      if constexpr (!in_one_run<Kv>) {
        if (tiles.count > 0 && lane % 16 < Keys::kWarpRows) {
          const int first = lane < 16 ? pos : pos - kKeys;
          KERNELS_UNROLL
          for (int j = 0; j < Keys::kFound; ++j) {
            const int at = greater(tiles.low, first + lesser(Keys::tile_row(lane % 16 + j * 16), tiles.end - 1 - first));
            addresses[j] = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
          }
        }
      }
      if (tile < tiles.count) {
        const int stage = Parities::stage(tile);
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage], keys_to.at(tile) ^ 1);
        keys.template bring<false>(stages + stage * kStageBytes, key_at, pos, tiles.low - pos, tiles.end - pos, addresses, 0);
        arch::mbarrier_arrive_copied(&shared.keys_full[stage]);
        keys_to.next(tile);
      }
      if (tile > 0) {
        const int before = pos - kKeys, stage = Parities::stage(tile - 1);
        arch::mbarrier_wait_in_block(&shared.values_empty[stage], values_to.at(tile - 1) ^ 1);
        values.template bring<false>(stages + stage * kStageBytes + Keys::kBytes, value_at, before, tiles.low - before, tiles.end - before, addresses, 1);
        arch::mbarrier_arrive_copied(&shared.values_full[stage]);
        values_to.next(tile - 1);
      }
    }
  }

  // Where the rows of a tile are, in the lanes that KvTiles wants to have them.
  template <class Some, class At>
  static __device__ __forceinline__ void find_rows(const void* (&addresses)[Some::kFound], const Some& some, const At& at, int pos, int low, int end) {
    if constexpr (!in_one_run<Kv>) {
      KERNELS_UNROLL
      for (int j = 0; j < Some::kFound; ++j) {
        const int row = Some::tile_row(lesser(int(threadIdx.x % 16), Some::kWarpRows - 1) + j * 16);
        addresses[j] = some.address(at(int64_t(pos) + greater(low, lesser(row, end - 1))));
      }
    }
  }

  // Keys of 8 bits, and values, of which a product wants rows that are columns: those of a tile are turned while the next tile is on its way.
  static __device__ __forceinline__ void copy_and_turn(const P& p, Shared& shared, unsigned char* stages, const PrefillRows& rows, const Tiles& tiles, Parities& keys_to, Parities& values_to) {
    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    const int thread = int(threadIdx.x), cols = int(p.shape.value_dim());
    unsigned char* const copied = stages + kStages * kStageBytes;
    Keys keys(key_at, tiles.begin, 0, int(p.shape.dim), true);
    Values values(value_at, tiles.begin, 0, cols, true);
    const void* addresses[Keys::kFound] = {};
    const auto scale_of = [&](int tile) {
      const int key = tiles.begin + tile * kKeys + thread;
      return Key::scaled && thread < kKeys && key >= tiles.low && key < tiles.end ? key_at(key).scale(0) : 0.f;
    };
    float scale = scale_of(0);
    int copy = 0;  // which of three places values are copied to
#pragma unroll 1
    for (int tile = 0; tile <= tiles.count; ++tile) {
      if (tile < tiles.count) {
        const int pos = tiles.begin + tile * kKeys, low = tiles.low - pos, end = tiles.end - pos, stage = Parities::stage(tile);
        find_rows(addresses, values, value_at, pos, low, end);
        values.template bring<false>(copied + copy * Values::kBytes, value_at, pos, low, end, addresses, 0);
        arch::copy_async_commit();
        find_rows(addresses, keys, key_at, pos, low, end);
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage], keys_to.at(tile) ^ 1);
        if constexpr (Key::scaled) {
          if (thread < kKeys) scales_of<kKeyScales>(shared)[stage * kKeys + thread] = scale;
          scale = scale_of(tile + 1);
        }
        keys.template bring<false>(stages + stage * kStageBytes, key_at, pos, low, end, addresses, 0);
        arch::mbarrier_arrive_copied(&shared.keys_full[stage]);
        keys_to.next(tile);
      }
      arch::copy_async_commit();
      if (tile > 0) {
        const int stage = Parities::stage(tile - 1);
        if (tile < tiles.count) arch::copy_async_wait<2>();  // keys of this tile, and its values, may be on their way
        else arch::copy_async_wait<0>();
        arch::named_barrier_sync(kProducerBarrier, 128);  // by all; and all have turned the tile before
        arch::mbarrier_wait_in_block(&shared.values_empty[stage], values_to.at(tile - 1) ^ 1);
        turn_tile<kKeys>(stages + stage * kStageBytes + Keys::kBytes, copied + (copy + 2) % 3 * Values::kBytes, cols);
        arch::mbarrier_arrive(&shared.values_full[stage]);
        values_to.next(tile - 1);
      }
      copy = copy < 2 ? copy + 1 : 0;
    }
    arch::named_barrier_sync(kProducerBarrier, 128);  // before the next tile of queries
  }

  // The producer of values, where they are decoded: by then the other one has found the tiles of queries.
  static __device__ __forceinline__ void produce_values(const Params& params, Shared& shared, unsigned char* memory) {
    arch::fewer_registers<kProducerRegisters>();
    const P& p = params.problem;
    Parities values_to;
    each_item(p, params.grid, [&](int number, unsigned) {
      const Item& item = wait_for_item(shared, number);
      const PrefillRows rows = same_in_lanes(item.rows);
      if (rows.count == 0) return false;
      const auto at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
      decode_tiles<Values>(at, int(p.shape.value_dim()), Tiles(item.all), stages_of(memory) + Keys::kBytes, codes_of(memory) + Keys::kCodeBytes, scales_of<kValueScales>(shared),
                           shared.values_full, shared.values_empty, values_to);
      arch::mbarrier_arrive(&shared.item_empty[number % kQueryStages]);
      return true;
    });
  }

  // A sequence's keys, or its values, of 8 or 4 bits: while codes of a tile are decoded, the next are on their way.
  template <class KvTiles, class At>
  static __device__ __forceinline__ void decode_tiles(const At& at, int cols, const Tiles& tiles, unsigned char* stages, unsigned char* codes, float* scales, uint64_t* full, uint64_t* empty, Parities& to) {
    if (tiles.count == 0) return;
    const int thread = int(threadIdx.x % 128);
    KvTiles some(at, tiles.begin, 0, cols, true);
    const void* addresses[KvTiles::kFound] = {};
    float scale = 0.f;
    const auto ask = [&](int tile) {
      const int pos = tiles.begin + tile * kKeys, low = tiles.low - pos, end = tiles.end - pos;
      if (KvTiles::scaled) scale = thread < kKeys && thread >= low && thread < end ? at(int64_t(pos) + thread).scale(0) : 0.f;
      find_rows(addresses, some, at, pos, low, end);
      some.bring_codes(codes, low, end, addresses);
      arch::copy_async_commit();
    };
    ask(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int stage = Parities::stage(tile);
      arch::mbarrier_wait_in_block(&empty[stage], to.at(tile) ^ 1);
      if (KvTiles::scaled && thread < kKeys) scales[stage * kKeys + thread] = scale;
      arch::copy_async_wait<0>();
      some.decode(stages + stage * kStageBytes, codes);
      arch::mbarrier_arrive(&full[stage]);
      to.next(tile);
      if (tile + 1 < tiles.count) ask(tile + 1);
    }
  }

  // The fragments of 16 rows for each warp, of 64 for a warpgroup.
  using Work = PrefillWork<P, TV, 1, kKeys, kCols, 4 * kProducers>;
  template <int kValue>
  using Int = std::integral_constant<int, kValue>;

  // The compiler knows that all lanes have it.
  static __device__ __forceinline__ int group() { return __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0) - kProducers; }
  // Named barriers: the turn of each group at its products, and one for each group's own threads.
  static __device__ __forceinline__ int turn(int group) { return kProducerBarrier + 1 + group; }
  static __device__ __forceinline__ int own(int group) { return kProducerBarrier + 1 + kGroups + group; }
  static __device__ __forceinline__ void wait_for_turn(int group) {
    if constexpr (kTurns) arch::named_barrier_sync(turn(group), 256);
  }
  static __device__ __forceinline__ void pass_turn(int group) {
    if constexpr (kTurns) arch::named_barrier_arrive(turn(group + 1 < kGroups ? group + 1 : 0), 256);
  }
  static __device__ __forceinline__ const Item& wait_for_item(Shared& shared, int number) {
    arch::mbarrier_wait_in_block(&shared.item_full[number % kQueryStages], number / kQueryStages % 2);
    return shared.items[number % kQueryStages];
  }
  static __device__ __forceinline__ void release(uint64_t* barrier) {
    if (threadIdx.x % 32 == 0) arch::mbarrier_arrive(barrier);
  }

  static __device__ __forceinline__ void consume(const Params& params, Shared& shared, unsigned char* memory) {
    arch::more_registers<kConsumerRegisters>();
    const P& p = params.problem;
    const int group = HopperPrefillBody::group();
    Parities keys_at, values_at;
    if (group == kGroups - 1) pass_turn(group);
    each_item(p, params.grid, [&](int number, unsigned) {
      const Item& item = wait_for_item(shared, number);
      if (item.rows.count == 0) return false;
      unsigned char* const queries = queries_of(memory, number, group);
      if constexpr (!kCopiesQueries) {
        arch::named_barrier_sync(own(group), 128);
        bring_queries<TK, 64, Queries>(p, item.rows, group * 64, queries, int(p.shape.dim));
        arch::copy_async_commit();
        arch::copy_async_wait<0>();
        arch::async_proxy_fence();
        arch::named_barrier_sync(own(group), 128);
      }
      if (group * 64 < item.rows.count) {
        Attending attending(p, shared, item, group, queries, stages_of(memory), keys_at, values_at);
        attending.run();
        arch::named_barrier_sync(own(group), 128);
        finish(p, item.rows, attending.state, queries);
      } else {
        pass_by(shared, group, Tiles(item.all).count, keys_at, values_at);
      }
      arch::mbarrier_arrive(&shared.item_empty[number % kQueryStages]);
      return true;
    });
    if (group == 0) wait_for_turn(group);  // that of the last group's last product
  }

  // A group that has no rows lets go of all keys and values.
  static __device__ __forceinline__ void pass_by(Shared& shared, int group, int tiles, Parities& keys_at, Parities& values_at) {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = Parities::stage(tile);
      if (tile > 0) wait_for_turn(group), pass_turn(group);
      arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
      release(&shared.keys_empty[stage]);
      arch::mbarrier_wait_in_block(&shared.values_full[stage], values_at.at(tile));
      release(&shared.values_empty[stage]);
      keys_at.next(tile), values_at.next(tile);
    }
  }

  // A group on its way through the tiles of keys that its rows see. Stages are at `stages` in shared memory.
  struct Attending {
    const P& p;
    Shared& shared;
    const Item& item;
    const int group;
    const uint32_t stages;
    const uint64_t query_tile;
    Parities &keys_at, &values_at;
    const PrefillRows rows = item.rows;
    const Tiles tiles = Tiles(item.all);
    const int last = tiles.count - 1, dim = int(p.shape.dim), cols = int(p.shape.value_dim());
    int first_whole, last_whole;  // tiles that the warp's rows see as a whole
    Work state;

    __device__ __forceinline__ Attending(const P& problem, Shared& memory, const Item& of, int group_, const unsigned char* queries, const unsigned char* stages_memory, Parities& keys, Parities& values)
        : p(problem), shared(memory), item(of), group(group_), stages(arch::shared_address(stages_memory)), query_tile(arch::warpgroup_tile(arch::shared_address(queries))), keys_at(keys), values_at(values) {
      const SeenKeys seen = seen_by_rows(item, Work::first_row(), 16);
      first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);
    }

    __device__ __forceinline__ void run() {
      if (last < 0) return;
      arch::pin(state.logits[0]);
      begin_logits(0);
      arch::warpgroup_wait<0>();
      arch::pin(state.logits[0]);
      scale_logits(0);
      release(&shared.keys_empty[0]);
      state.make_exponentials(look_at(0));
      round_weights(0);
#pragma unroll 1
      for (int tile = 0; tile < last; ++tile) step(tile);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs(last);
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]);
      if constexpr (Value::scaled) __syncwarp();
      release(&shared.values_empty[Parities::stage(last)]);
    }

   private:
    // The product with the values of a tile, and meanwhile the next tile's logits and exponentials.
    __device__ __forceinline__ void step(int tile) {
      wait_for_turn(group);
      arch::pin(state.logits[0]);
      begin_logits(tile + 1);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs(tile);
      pass_turn(group);
      arch::warpgroup_wait<1>();
      arch::pin(state.logits[0]);
      scale_logits(tile + 1);
      release(&shared.keys_empty[Parities::stage(tile + 1)]);
      const typename Work::Look look = look_at(tile + 1);
      state.make_exponentials(look);
      // All exponentials come ahead of the wait: what the compiler sees to be ahead of it seems to need their sums.
      const unsigned none = unsigned(p.shape.heads >> 32);  // 0, which the compiler does not know
      if (((__float_as_uint(state.sums[0][0]) | __float_as_uint(state.sums[0][1])) & none) != 0) release(&shared.keys_empty[0]);
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      if constexpr (Value::scaled) __syncwarp();  // all lanes have read the scales
      release(&shared.values_empty[Parities::stage(tile)]);
      state.shrink_outputs(look);
      round_weights(tile + 1);
    }

    __device__ __forceinline__ void scale_logits(int tile) {
      if constexpr (Key::scaled) {
        const float* const scales = scales_of<kKeyScales>(shared) + Parities::stage(tile) * kKeys + threadIdx.x % 4 * 2;
        state.each([&](int, int j, int x, float& logit) { logit *= scales[j * 8 + x % 2]; });
        __syncwarp();
      }
    }
    // Scales of values come with these.
    __device__ __forceinline__ void round_weights(int tile) {
      if constexpr (Value::scaled) arch::mbarrier_wait_in_block(&shared.values_full[Parities::stage(tile)], values_at.at(tile));
      state.round_weights(scales_of<kValueScales>(shared) + Parities::stage(tile) * kKeys);
    }
    __device__ __forceinline__ typename Work::Look look_at(int tile) {
      return state.template look_at<false>(p, rows, item.row_keys, tiles.begin + tile * kKeys, tile >= first_whole && tile < last_whole);
    }

    // Queries times the keys of a tile, and weights times its values: what is begun here runs on.
    __device__ __forceinline__ void begin_logits(int tile) {
      const int stage = Parities::stage(tile);
      arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
      keys_at.next(tile);
      arch::async_proxy_fence();
      const uint64_t keys = arch::warpgroup_tile(stages + stage * kStageBytes);
      if (kDim == kFewer || dim > kFewer) multiply_keys<kDim>(keys);
      else multiply_keys<kFewer>(keys);
    }
    __device__ __forceinline__ void begin_outputs(int tile) {
      const int stage = Parities::stage(tile);
      arch::mbarrier_wait_in_block(&shared.values_full[stage], values_at.at(tile));
      values_at.next(tile);
      arch::async_proxy_fence();
      const uint64_t values = arch::warpgroup_tile(stages + stage * kStageBytes + Keys::kBytes, kInEight ? 16 : kKeys * 128);
      // Products and their commit stand in one branch, or the compiler commits with another product.
      constexpr int kMost = kCols < 128 ? kCols : 128;
      if (kCols > kFewerCols && cols <= kFewerCols) {
        arch::warpgroup_fence();
        multiply_values<0, kFewerCols>(values);
        arch::warpgroup_commit();
      } else {
        arch::warpgroup_fence();
        multiply_values<0, kMost>(values);
        if constexpr (kCols > kMost) multiply_values<kMost, kCols - kMost>(values);
        arch::warpgroup_commit();
      }
    }
    template <int kColumns>
    __device__ __forceinline__ void multiply_keys(uint64_t keys) {
      arch::warpgroup_fence();
      KERNELS_UNROLL
      for (int i = 0; i < kColumns * int(sizeof(TK)) / 32; ++i) {
        const int run = i / 4, step = i % 4 * 2;
        arch::warpgroup_mma<TK>(state.logits[0], query_tile + run * (64 * 128 / 16) + step, keys + run * (kKeys * 128 / 16) + step, i > 0);
      }
      arch::warpgroup_commit();
    }
    // Columns [kFirst, kFirst + kCount) of the outputs.
    template <int kFirst, int kCount>
    __device__ __forceinline__ void multiply_values(uint64_t values) {
      auto& outputs = reinterpret_cast<float(&)[kCount / 8][4]>(state.outputs[0][kFirst / 8]);
      KERNELS_UNROLL
      for (int i = 0; i < kKeys / Work::kStep; ++i) {
        if constexpr (kInEight) arch::warpgroup_mma_e4m3(outputs, state.weights[0][i], values + i * 2, true);
        else arch::warpgroup_mma_turned<TV>(outputs, state.weights[0][i], values + kFirst / 64 * (kKeys * 128 / 16) + i * (16 * 128 / 16), true);
      }
    }
  };

  // A warp's results go to the sink by way of its queries' place, which all products have read: half of the columns at a time, as floats, 32 of
  // them for each run of queries.
  static __device__ __forceinline__ void finish(const P& p, PrefillRows rows, Work& state, unsigned char* queries) {
    const int lane = threadIdx.x % 32, cols = int(p.shape.value_dim());
    const auto map = sink_map(p.out);
    const auto& end = sink_end(p.out);
    const int first_row = Work::first_row();
    unsigned char* const slab = queries + first_row % 64 * 128;
    // Four columns of a row of the slab: neither pairs that are written nor packs that are read have bank conflicts.
    const auto place = [&](int row, int col) { return slab + col / 32 * Queries::kRunBytes + row * 128 + (col / 4 % 8 ^ (row % 4 * 2 | row % 2)) * 16; };
    const float inverse[2] = {state.finish_row(p, rows, 0, 0), state.finish_row(p, rows, 0, 1)};
    const auto leave = [&](auto first) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        KERNELS_UNROLL
        for (int j = 0; j < kCols / 16; ++j) {
          const float(&from)[4] = state.outputs[0][decltype(first)::value / 8 + j];
          *reinterpret_cast<::float2*>(place(half * 8 + lane / 4, j * 8 + lane % 4 / 2 * 4) + lane % 2 * 8) = {from[half * 2] * inverse[half], from[half * 2 + 1] * inverse[half]};
        }
      }
    };
    // A lane has the same 8 columns of some rows.
    constexpr int kPacks = kCols / 16, kApart = 32 / kPacks, kEach = 16 / kApart;
    const int col = lane % kPacks * 8;
    int64_t to[kEach], head_col[kEach];
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const auto at = rows.place(first_row + lane / kPacks + i * kApart);
      to[i] = rows.token + at.query, head_col[i] = int64_t(at.head) * cols;
    }
    const auto values_of = [&](int i) {
      const int row = lane / kPacks + i * kApart;
      Pack<float, 8> values;
      memcpy(values.v, __builtin_assume_aligned(place(row, col), 16), 16);
      memcpy(values.v + 4, __builtin_assume_aligned(place(row, col + 4), 16), 16);
      return values;
    };
    const bool splits = leaves_part<P>(rows), wide = !splits && p.out_pack == 8 && first_row + 16 <= rows.count;
#pragma unroll 1
    for (int first = 0; first < kCols; first += kCols / 2) {
      __syncwarp();
      if (first == 0) leave(Int<0>{});
      else leave(Int<kCols / 2>{});
      __syncwarp();
      if (first + col >= cols) continue;
      const auto put_some = [&](int64_t row, const auto& some, int64_t at) {
        constexpr int N = std::decay_t<decltype(some)>::size;
        put(end, apply_map(map, some, fetch_operands<N>(map, row, at), row, at), row, at);
      };
      if (wide) {
        KERNELS_UNROLL
        for (int i = 0; i < kEach; ++i) put_some(to[i], values_of(i), head_col[i] + first + col);
      } else {
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) {
          const int row = first_row + lane / kPacks + i * kApart;
          if (row >= rows.count) break;
          if (splits) {
            leave_outputs(p, rows, row, values_of(i), first + col);
            continue;
          }
          const auto at = rows.place(row);
          in_packs(p.out_pack, values_of(i), int64_t(at.head) * cols + first + col, [&](const auto& some, int64_t from) { put_some(rows.token + at.query, some, from); });
        }
      }
    }
  }
};

}  // namespace detail
KERNELS_END
