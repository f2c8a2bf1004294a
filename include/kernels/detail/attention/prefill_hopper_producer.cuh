// Producer warpgroups of the prefill kernels for sm_90a. They find the block's query tiles and the keys that these see,
// and copy queries, keys and values to the pipeline in shared memory.
#pragma once

#include "prefill_hopper_parts.cuh"

KERNELS_BEGIN
namespace detail {

// Finds query tiles, publishes each as an Item, and copies its queries.
template <class Parts>
struct HopperItemProducer : Parts {
  using Item = typename Parts::Item;
  using Parts::kRows, Parts::kGroups, Parts::kItems, Parts::kItemsPerSearch, Parts::kProducerBarrier;

  // Called by all producer threads for tile `wanted`, which the block takes in a round; false if there is none.
  // `number` counts the block's query tiles. When item_full completes, consumers may read the item and its queries.
  template <class Params, class Shared>
  static __device__ __forceinline__ bool load_item(const Params& params, Shared& shared, unsigned char* memory,
                                                   int number, unsigned wanted, unsigned round, PrefillRows& rows,
                                                   SeenKeys& all) {
    const auto& p = params.problem;
    Item& item = shared.items[number % kItems];
    uint64_t* const full = &shared.item_full[number % kItems];
    arch::mbarrier_wait_in_block(&shared.item_empty[number % kItems], number / kItems % 2 ^ 1);
    // Kernels with splits lack the registers for both branches; search() also handles even grids.
    if (!Parts::Problem::kSplits && params.grid.even) {
      rows = params.grid.even_rows(p, kRows, wanted);
      if (threadIdx.x == 0) item.rows = rows;
    } else {
      PrefillRows* const found_items = Parts::search_results(shared, item);
      if (number % kItemsPerSearch == 0) {
        if (threadIdx.x < 32)
          params.grid.template search<Parts, kItemsPerSearch>(p, wanted, round, Parts::index(), Parts::count(),
                                                              found_items);
        arch::named_barrier_sync(kProducerBarrier, 128);
      }
      rows = same_in_lanes(found_items[number % kItemsPerSearch]);
      if (found_items != &item.rows && threadIdx.x == 0) item.rows = rows;
      if (rows.count == 0) {
        arch::mbarrier_arrive(full), arch::mbarrier_arrive(full);
        return false;
      }
    }
    if constexpr (Parts::kPairs) Parts::take_half(rows);
    if constexpr (Parts::kCopiesQueries) {
      Parts::wait_for_room(shared, number);
#pragma unroll 1
      for (int i = 0; i < kGroups; ++i)
        load_query_tile<typename Parts::TK, 64, typename Parts::Queries>(
            p, rows, i * 64, Parts::queries_of(memory, number, i), int(p.shape.dim));
    }
    arch::mbarrier_arrive_copied(full);
    for (int row = int(threadIdx.x); row < kRows; row += 128) item.row_keys[row] = keys_seen(p, rows, row);
    arch::named_barrier_sync(kProducerBarrier, 128);
    all = Parts::seen_by_rows(item, 0, kRows);
    if (threadIdx.x == 0) item.all = all;
    arch::mbarrier_arrive(full);  // after all writes to the item
    return true;
  }
};

// The producer's loop over query tiles and their key tiles. Keys and values are copied (copy_keys()), copied and
// transposed for products of 8 bits (copy_and_transpose()), or decoded (decode_tiles()).
template <class Parts>
struct HopperProducer : HopperItemProducer<Parts> {
  using P = typename Parts::Problem;
  using Kv = typename Parts::Kv;
  using TK = typename Parts::TK;
  using Key = typename Parts::Key;
  using Queries = typename Parts::Queries;
  using Keys = typename Parts::Keys;
  using Values = typename Parts::Values;
  using Params = typename Parts::Params;
  using Item = typename Parts::Item;
  using Shared = typename Parts::Shared;
  using StagePhases = typename Parts::StagePhases;
  using Tiles = typename Parts::Tiles;
  using Parts::each_item, Parts::stages_of, Parts::scales_of, Parts::wait_for_item;
  using Parts::kDim, Parts::kKeys, Parts::kDecodes, Parts::kStages, Parts::kItems;
  using Parts::kReducedDim, Parts::kProducerRegisters, Parts::kKeyScales;
  using Parts::kValueScales, Parts::kStageBytes, Parts::kProducerBarrier, Parts::k8Bit;
  using HopperItemProducer<Parts>::load_item;
  // Whether the next query tile is found and its queries are copied during the keys of this one: with 128 columns and
  // room for the next queries. H200, in alternation, causal: 1,024 keys of 16 heads take 146 us (150 without), of 32
  // heads on 8 KV heads 275 (283), 2,048 keys 454 (462); 16,384 keys, and all calls without a mask, take the same. With
  // 64 columns, where producers have few registers, causal 1,024 keys would take 225 us (210 without).
  static constexpr bool kPreparesNext = kDim == 128 && Parts::kQueryStages > 1 && !k8Bit;
  using BoxesOfTile = std::conditional_t<Parts::kUsesTma, TileBox<TK, kKeys, Keys::Layout::kRuns>, NoBox>;

  static __device__ __forceinline__ void produce(const Params& params, Shared& shared, unsigned char* memory) {
    arch::release_registers<kProducerRegisters>();
    const P& p = params.problem;
    const int dim = int(p.shape.dim);
    if (dim != kDim && dim != kReducedDim) {
      KERNELS_ROLLED
      for (int i = 0; i < kStages; ++i)
        Keys::Layout::clear_behind(stages_of(memory) + i * kStageBytes, kKeys, dim * int(sizeof(TK)) / 2);
    }
    StagePhases keys_to, values_to;
    if constexpr (kPreparesNext) {
      copy_ahead(params, shared, memory, keys_to, values_to);
    } else
      each_item(params.grid, [&](int number, unsigned wanted, unsigned round) {
        PrefillRows rows;
        SeenKeys all;
        if (!load_item(params, shared, memory, number, wanted, round, rows, all)) return false;
        if constexpr (kDecodes) {
          const auto at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
          decode_tiles<Keys>(at, dim, Tiles(all), stages_of(memory), scales_of<kKeyScales>(shared), shared.keys_full,
                             shared.keys_empty, keys_to);
        } else if constexpr (k8Bit) {
          copy_and_transpose(params, shared, stages_of(memory), rows, Tiles(all), keys_to, values_to);
        } else {
          copy_keys(params, shared, stages_of(memory), rows, Tiles(all), keys_to, values_to, [] {});
        }
        return true;
      });
    arch::copy_async_commit();
    arch::copy_async_wait<0>();
  }

  // The producer's loop with kPreparesNext.
  static __device__ __forceinline__ void copy_ahead(const Params& params, Shared& shared, unsigned char* memory,
                                                    StagePhases& keys_to, StagePhases& values_to) {
    typename Parts::ItemIterator items;
    PrefillRows rows{};
    SeenKeys all{};  // no keys before the first query tile
#pragma unroll 1
    for (;;) {
      bool there = false;
      copy_keys(params, shared, stages_of(memory), rows, Tiles(all), keys_to, values_to, [&] {
        PrefillRows next_rows;
        SeenKeys seen;
        unsigned wanted;
        there = items.next(params.grid, wanted) &&
                load_item(params, shared, memory, items.number, wanted, items.round - 1, next_rows, seen);
      });
      if (!there) return;
      arch::named_barrier_sync(kProducerBarrier, 128);
      const Item& item = shared.items[items.number % kItems];  // reread, as registers have no room for two items
      rows = same_in_lanes(item.rows), all = from_lane(item.all, 0);
    }
  }

  // Copies the keys and values of a query tile. Calls prepare_next() once, when the first two key tiles have been
  // issued.
  template <class F>
  static __device__ __forceinline__ void copy_keys(const Params& params, Shared& shared, unsigned char* stages,
                                                   const PrefillRows& rows, const Tiles& tiles, StagePhases& keys_to,
                                                   StagePhases& values_to, const F& prepare_next) {
    const P& p = params.problem;
    const int lane = threadIdx.x % 32, dim = int(p.shape.dim), cols = int(p.shape.value_dim());
    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    const BoxesOfTile boxes(params.boxes, tiles.low, end_of_keys(p, rows));
    const void* addresses[Keys::kLaneAddresses] = {};
    BoxCoordinates keys_box{}, values_box{};
    // In the order of the products: the keys of a tile, then the values of the tile before it.
#pragma unroll 1
    for (int tile = 0; tile <= tiles.count; ++tile) {
      const int pos = tiles.begin + tile * kKeys, before = pos - kKeys;
      values_box = keys_box;
      if (tile < tiles.count && boxes.have(pos)) keys_box = boxes.find(p.kv, rows.b, pos);
      if constexpr (!constant_stride<Kv>) {
        const bool copies = (tile < tiles.count && !boxes.have(pos)) || (tile > 0 && !boxes.have(before));
        if (copies && lane % 16 < Keys::kWarpRows) {
          const Keys keys(key_at, pos, 0, dim, true);
          const Values values(value_at, pos, 0, cols, true);
          const int first = lane < 16 ? pos : before;
          KERNELS_UNROLL
          for (int j = 0; j < Keys::kLaneAddresses; ++j) {
            const int at =
                greater(tiles.low, first + lesser(Keys::tile_row(lane % 16 + j * 16), tiles.end - 1 - first));
            addresses[j] = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
          }
        }
      }
      if (tile < tiles.count) {
        const int stage = StagePhases::stage(tile);
        unsigned char* const to = stages + stage * kStageBytes;
        uint64_t* const full = &shared.keys_full[stage];
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage], keys_to.at(tile) ^ 1);
        if (boxes.have(pos)) {
          boxes.template load<false>(keys_box, rows.kv_head, dim, to, full);
        } else {
          Keys keys(key_at, pos, 0, dim, true);
          keys.template load<false>(to, key_at, pos, tiles.low - pos, tiles.end - pos, addresses, 0);
          arch::mbarrier_arrive_copied(full);
        }
        keys_to.next(tile);
      }
      if (tile > 0) {
        const int stage = StagePhases::stage(tile - 1);
        unsigned char* const to = stages + stage * kStageBytes + Keys::kBytes;
        uint64_t* const full = &shared.values_full[stage];
        arch::mbarrier_wait_in_block(&shared.values_empty[stage], values_to.at(tile - 1) ^ 1);
        if (boxes.have(before)) {
          boxes.template load<true>(values_box, rows.kv_head, cols, to, full);
        } else {
          Values values(value_at, before, 0, cols, true);
          values.template load<false>(to, value_at, before, tiles.low - before, tiles.end - before, addresses, 1);
          arch::mbarrier_arrive_copied(full);
        }
        values_to.next(tile - 1);
      }
      if (tile == lesser(1, tiles.count)) prepare_next();
    }
  }

  // Looks up the addresses of a key tile's rows, in the lanes where KvTiles expects them.
  template <class Some, class At>
  static __device__ __forceinline__ void find_rows(const void* (&addresses)[Some::kLaneAddresses], const Some& some,
                                                   const At& at, int pos, int low, int end) {
    if constexpr (!constant_stride<Kv>) {
      KERNELS_UNROLL
      for (int j = 0; j < Some::kLaneAddresses; ++j) {
        const int row = Some::tile_row(lesser(int(threadIdx.x % 16), Some::kWarpRows - 1) + j * 16);
        addresses[j] = some.address(at(int64_t(pos) + greater(low, lesser(row, end - 1))));
      }
    }
  }

  // Keys and values for products of 8 bits. wgmma needs such values with the keys of a column contiguous, so the
  // producer transposes each tile while the next one is copied.
  static __device__ __forceinline__ void copy_and_transpose(const Params& params, Shared& shared, unsigned char* stages,
                                                            const PrefillRows& rows, const Tiles& tiles,
                                                            StagePhases& keys_to, StagePhases& values_to) {
    const P& p = params.problem;
    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    const int thread = int(threadIdx.x), dim = int(p.shape.dim), cols = int(p.shape.value_dim());
    unsigned char* const copied = stages + kStages * kStageBytes;
    const BoxesOfTile boxes(params.boxes, tiles.low, end_of_keys(p, rows));
    const void* addresses[Keys::kLaneAddresses] = {};
    const auto scale_of = [&](int tile) {
      const int key = tiles.begin + tile * kKeys + thread;
      return Key::scaled && thread < kKeys && key >= tiles.low && key < tiles.end ? key_at(key).scale(0) : 0.f;
    };
    float scale = scale_of(0);
#pragma unroll 1
    for (int tile = 0; tile <= tiles.count; ++tile) {
      if (tile < tiles.count) {
        const int pos = tiles.begin + tile * kKeys, low = tiles.low - pos, end = tiles.end - pos,
                  stage = StagePhases::stage(tile);
        uint64_t *const full = &shared.keys_full[stage], *const values_copied = &shared.copied_full[stage];
        unsigned char *const to = stages + stage * kStageBytes, *const values_to_copy = copied + stage * Values::kBytes;
        const bool by_tma = boxes.have(pos);
        BoxCoordinates box{};
        if (by_tma) {
          box = boxes.find(p.kv, rows.b, pos);
          boxes.template load<true>(box, rows.kv_head, cols, values_to_copy, values_copied);
        } else {
          Values values(value_at, pos, 0, cols, true);
          find_rows(addresses, values, value_at, pos, low, end);
          values.template load<false>(values_to_copy, value_at, pos, low, end, addresses, 0);
          arch::mbarrier_arrive_copied(values_copied);
        }
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage], keys_to.at(tile) ^ 1);
        if constexpr (Key::scaled) {
          if (thread < kKeys) scales_of<kKeyScales>(shared)[stage * kKeys + thread] = scale;
          scale = scale_of(tile + 1);
        }
        if (by_tma) {
          boxes.template load<false>(box, rows.kv_head, dim, to, full);
        } else {
          Keys keys(key_at, pos, 0, dim, true);
          find_rows(addresses, keys, key_at, pos, low, end);
          keys.template load<false>(to, key_at, pos, low, end, addresses, 0);
          arch::mbarrier_arrive_copied(full);
        }
        keys_to.next(tile);
      }
      if (tile > 0) {
        const int stage = StagePhases::stage(tile - 1);
        arch::mbarrier_wait_in_block(&shared.copied_full[stage], values_to.at(tile - 1));
        arch::async_proxy_fence();  // TMA may write next where threads have read and written
        arch::named_barrier_sync(kProducerBarrier, 128);  // all threads have transposed the tile before
        arch::mbarrier_wait_in_block(&shared.values_empty[stage], values_to.at(tile - 1) ^ 1);
        transpose_tile<kKeys>(arch::shared_address(stages) + stage * kStageBytes + Keys::kBytes,
                              arch::shared_address(copied) + stage * Values::kBytes, cols);
        arch::async_proxy_fence();
        arch::mbarrier_arrive(&shared.values_full[stage]);
        values_to.next(tile - 1);
      }
    }
    arch::named_barrier_sync(kProducerBarrier, 128);  // before the next query tile
  }

  // The second producer, for values that are decoded. The first one finds the query tiles for both.
  static __device__ __forceinline__ void produce_values(const Params& params, Shared& shared, unsigned char* memory) {
    arch::release_registers<kProducerRegisters>();
    const P& p = params.problem;
    StagePhases values_to;
    each_item(params.grid, [&](int number, unsigned, unsigned) {
      const Item& item = wait_for_item(shared, number);
      const PrefillRows rows = same_in_lanes(item.rows);
      if (rows.count == 0) return false;
      const auto at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
      decode_tiles<Values>(at, int(p.shape.value_dim()), Tiles(item.all), stages_of(memory) + Keys::kBytes,
                           scales_of<kValueScales>(shared), shared.values_full, shared.values_empty, values_to);
      arch::mbarrier_arrive(&shared.item_empty[number % kItems]);
      return true;
    });
  }

  // Keys or values of 8 or 4 bits: the codes of a tile are loaded to registers, and decoded to shared memory when the
  // stage is free.
  template <class KvTiles, class At>
  static __device__ __forceinline__ void decode_tiles(const At& at, int cols, const Tiles& tiles, unsigned char* stages,
                                                      float* scales, uint64_t* full, uint64_t* empty, StagePhases& to) {
    if (tiles.count == 0) return;
    const int thread = int(threadIdx.x % 128);
    KvTiles some(at, tiles.begin, 0, cols, true);
    typename KvTiles::Codes codes;
    float scale = 0.f;
    const auto issue_loads = [&](int tile) {
      const int pos = tiles.begin + tile * kKeys, low = tiles.low - pos, end = tiles.end - pos;
      if (KvTiles::scaled)
        scale = thread < kKeys && thread >= low && thread < end ? at(int64_t(pos) + thread).scale(0) : 0.f;
      const void* addresses[KvTiles::kLaneAddresses] = {};
      find_rows(addresses, some, at, pos, low, end);
      some.read_codes(codes, low, end, addresses);
    };
    issue_loads(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int stage = StagePhases::stage(tile);
      arch::mbarrier_wait_in_block(&empty[stage], to.at(tile) ^ 1);
      if (KvTiles::scaled && thread < kKeys) scales[stage * kKeys + thread] = scale;
      some.decode(stages + stage * kStageBytes, codes);
      arch::mbarrier_arrive(&full[stage]);
      to.next(tile);
      if (tile + 1 < tiles.count) issue_loads(tile + 1);
    }
  }
};

}  // namespace detail
KERNELS_END
