// Attention of many queries for sm_90a: the schedule of Hopper's fastest kernels, for heads whose keys and values are copied.
//
//   warpgroup 0      copies tiles of keys and of values to a ring of two stages each, by cp.async, from wherever they lie
//   the others       64 of the block's rows each: logits by wgmma from shared memory, their softmax in registers, and from there
//                    the product with the values by wgmma
//
//   shared memory:   | queries 64 x dim | queries 64 x dim | K0 | V0 | K1 | V1 |
//
//   group 1:   K0 | softmax 0 | V0 K1 |  ...      | softmax 1 | V1 K2 |
//   group 2:   K0 |           | softmax 0 | V0 K1 |           | softmax 1 | V1 K2
//
// The groups that compute take turns at the softmax: while one makes exponentials the tensor cores work for the other. What is done
// with logits, which keys a row sees, and how rows are shared out is that of prefill.cuh. Thread blocks that stay for several tiles of
// queries, which were shared out beforehand, took 2 to 30 % longer with 128 columns (H200, bench_prefill).
#pragma once

#include "prefill.cuh"

KERNELS_BEGIN
namespace detail {

template <class P, int kDim_, int kKeys_, int kGroups>
struct HopperPrefillBody {
  using Kv = typename P::Kv;
  using TK = key_meeting_type<typename P::Q, Kv>;
  using TV = value_meeting_type<typename P::Q, Kv>;
  static constexpr int kDim = kDim_, kCols = kDim_, kKeys = kKeys_, kStages = 2, kRows = 64 * kGroups, kResultPack = 8, kOnEach = 1;
  static constexpr int max_threads = 128 * (1 + kGroups), registers = 512 / (1 + kGroups) / 8 * 8;
  static constexpr int kCopierRegisters = kGroups == 2 ? 40 : 32, kWorkerRegisters = kGroups == 2 ? 232 : 160;
  using Queries = TileLayout<kDim, 128, 64>;
  using Keys = KvTiles<TK, KeyRun<Kv>, in_one_run<Kv>, kKeys, kDim, 128, true>;
  using Values = KvTiles<TV, ValueRun<Kv>, in_one_run<Kv>, kKeys, kCols, 128, true>;
  static constexpr int kQueryBytes = 64 * kDim * 2, kStageBytes = Keys::kBytes + Values::kBytes, kAligned = 1024;
  static constexpr int kSharedBytes = kGroups * kQueryBytes + kStages * kStageBytes + kAligned;
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }

  struct Params {
    P problem;
    PrefillGrid grid;
  };

  struct Shared {
    uint64_t keys_full[kStages], values_full[kStages], keys_empty[kStages], values_empty[kStages];
    RowKeys row_keys[kRows];
    PrefillRows rows;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (arch::kWarpgroupMma) {
      extern __shared__ __align__(128) unsigned char tiles_memory[];
      __shared__ Shared shared;
      const P& p = params.problem;
      PrefillRows rows = params.grid.template rows<HopperPrefillBody>(p, shared.rows);
      if (rows.count == 0) return;
      rows.part = 0;
      const int groups = (rows.count + 63) / 64;  // that have rows
      if (threadIdx.x == 0) {
        KERNELS_UNROLL
        for (int i = 0; i < kStages; ++i) {
          arch::mbarrier_init(&shared.keys_full[i], 128), arch::mbarrier_init(&shared.values_full[i], 128);
          arch::mbarrier_init(&shared.keys_empty[i], 4 * groups), arch::mbarrier_init(&shared.values_empty[i], 4 * groups);
        }
        arch::mbarrier_init_fence();
      }
      static_assert(kRows <= max_threads, "a thread for each row");
      if (threadIdx.x < kRows) shared.row_keys[threadIdx.x] = keys_seen(p, rows, int(threadIdx.x));
      __syncthreads();
      unsigned char* const memory = tiles_memory + (-arch::shared_address(tiles_memory) & (kAligned - 1));
      const SeenKeys all = seen_by_rows(shared, rows, 0, kRows);
      if (threadIdx.x < 128) copy(params.problem, shared, rows, all, memory + kGroups * kQueryBytes);
      else work(params, shared, rows, all, memory, groups);
    }
  }

 private:
  // By a whole warp, for all of its lanes.
  static __device__ __forceinline__ SeenKeys seen_by_rows(const Shared& shared, const PrefillRows& rows, int first, int count) {
    const int lane = threadIdx.x % 32;
    const auto of = [&](int row) { return seen_by(rows, row, shared.row_keys[row]); };
    SeenKeys seen = of(first + lane % count);
    for (int i = 32; i < count; i += 32) seen = join(seen, of(first + i + lane));
    return join_lanes(seen);
  }

  // Tiles of keys that a block goes through; those begin at multiples of their size.
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

  static __device__ __forceinline__ void copy(const P& p, Shared& shared, const PrefillRows& rows, const SeenKeys& all, unsigned char* stages) {
    arch::fewer_registers<kCopierRegisters>();
    const Tiles tiles(all);
    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    Keys keys(key_at, tiles.begin, 0, kDim, true);
    Values values(value_at, tiles.begin, 0, kCols, true);
    const int lane = threadIdx.x % 32;
    const void* addresses[Keys::kFound] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int stage = tile % kStages, free = tile / kStages % 2 ^ 1, pos = tiles.begin + tile * kKeys;
      if constexpr (!in_one_run<Kv>) {
        if (lane % 16 < Keys::kWarpRows) {
          KERNELS_UNROLL
          for (int j = 0; j < Keys::kFound; ++j) {
            const int at = greater(tiles.low, pos + lesser(Keys::tile_row(lane % 16 + j * 16), tiles.end - 1 - pos));
            addresses[j] = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
          }
        }
      }
      unsigned char* const at = stages + stage * kStageBytes;
      arch::mbarrier_wait(&shared.keys_empty[stage], free);
      keys.template bring<false>(at, key_at, pos, tiles.low - pos, tiles.end - pos, addresses, 0);
      arch::mbarrier_arrive_copied(&shared.keys_full[stage]);
      arch::mbarrier_wait(&shared.values_empty[stage], free);
      values.template bring<false>(at + Keys::kBytes, value_at, pos, tiles.low - pos, tiles.end - pos, addresses, 1);
      arch::mbarrier_arrive_copied(&shared.values_full[stage]);
    }
    arch::copy_async_commit();
    arch::copy_async_wait<0>();
  }

  // The fragments of 16 rows for each warp, of 64 for a warpgroup.
  using Work = PrefillWork<P, TV, 1, kKeys, kCols, 4>;

  // Named barriers: the turn of each group at the softmax, and one for each group's own threads.
  static __device__ __forceinline__ int turn(int group) { return 1 + group; }
  static __device__ __forceinline__ int own(int group) { return 1 + kGroups + group; }

  static __device__ __forceinline__ void work(const Params& params, Shared& shared, const PrefillRows& rows, const SeenKeys& all, unsigned char* memory, int groups) {
    arch::more_registers<kWorkerRegisters>();
    const P& p = params.problem;
    const int group = int(threadIdx.x / 128) - 1, first_row = group * 64, next_group = group + 1 < groups ? group + 1 : 0;
    if (group >= groups) return;
    unsigned char* const queries = memory + group * kQueryBytes;
    bring_queries<TK, 64, Queries>(p, rows, first_row, queries, kDim);
    arch::copy_async_commit();
    arch::copy_async_wait<0>();
    arch::async_proxy_fence();
    arch::named_barrier_sync(own(group), 128);

    const Tiles tiles(all);
    // Tiles that the warp's rows see as a whole.
    const SeenKeys seen = seen_by_rows(shared, rows, Work::first_row(), 16);
    const int first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);

    const uint32_t stages = arch::shared_address(memory) + kGroups * kQueryBytes;
    const uint64_t query_tile = arch::warpgroup_tile(arch::shared_address(queries));
    Work state;
    const auto release = [&](uint64_t* barrier) {
      if (threadIdx.x % 32 == 0) arch::mbarrier_arrive(barrier);
    };
    const auto parity = [](int tile) { return tile / kStages % 2; };
    // Queries times the keys of a tile, and weights times its values: what is begun here runs on.
    const auto begin_logits = [&](int tile) {
      const int stage = tile % kStages;
      arch::mbarrier_wait(&shared.keys_full[stage], parity(tile));
      arch::async_proxy_fence();
      const uint64_t keys = arch::warpgroup_tile(stages + stage * kStageBytes);
      arch::warpgroup_fence();
      KERNELS_UNROLL
      for (int i = 0; i < kDim / 16; ++i) {
        const int run = i / 4, step = i % 4 * 2;
        arch::warpgroup_mma<TK>(state.logits[0], query_tile + run * (64 * 128 / 16) + step, keys + run * (kKeys * 128 / 16) + step, i > 0);
      }
      arch::warpgroup_commit();
    };
    const auto begin_outputs = [&](int tile) {
      const int stage = tile % kStages;
      arch::mbarrier_wait(&shared.values_full[stage], parity(tile));
      arch::async_proxy_fence();
      const uint64_t values = arch::warpgroup_tile(stages + stage * kStageBytes + Keys::kBytes, kKeys * 128);
      arch::warpgroup_fence();
      KERNELS_UNROLL
      for (int i = 0; i < kKeys / 16; ++i) arch::warpgroup_mma_turned<TV>(state.outputs[0], state.weights[0][i], values + i * (16 * 128 / 16), true);
      arch::warpgroup_commit();
    };
    const int last = tiles.count - 1;
    const unsigned none = unsigned(p.shape.heads >> 32);  // 0, which the compiler does not know
    // All of a tile's exponentials, and nothing else that could be made before or behind, while it is the group's turn.
    const auto weigh = [&](int tile) {
      const float factor = state.template look_at<false>(p, rows, shared.row_keys, tiles.begin + tile * kKeys, tile >= first_whole && tile < last_whole);
      arch::pin(state.logits[0]);
      arch::named_barrier_sync(turn(group), 256);
      state.make_weights(factor, nullptr);
      // Not before the last exponential has been added: the barrier's number seems to depend on the sums.
      const unsigned sums = __float_as_uint(state.sums[0][0]) | __float_as_uint(state.sums[0][1]);
      if (next_group > 0 || tile < last) arch::named_barrier_arrive(turn(next_group) + int(sums & none), 256);
    };
    const auto pin = [&] { arch::pin(state.outputs[0]), arch::pin(state.logits[0]); };

    if (next_group == 0 && last >= 0) arch::named_barrier_arrive(turn(0), 256);
    if (last >= 0) {
      pin();
      begin_logits(0);
      arch::warpgroup_wait<0>();
      pin();
      release(&shared.keys_empty[0]);
#pragma unroll 1
      for (int tile = 0; tile <= last; ++tile) {
        weigh(tile);
        pin();
        begin_outputs(tile);
        if (tile < last) {
          begin_logits(tile + 1);
          arch::warpgroup_wait<1>();
          release(&shared.values_empty[tile % kStages]);
        }
        arch::warpgroup_wait<0>();
        pin();
        if (tile < last) release(&shared.keys_empty[(tile + 1) % kStages]);
      }
    }
    finish(params, shared, state);
  }

  // Results go to the sink from registers: four lanes that have the pairs of 8 columns each exchange them, so that each has 8 columns.
  static __device__ __forceinline__ void finish(const Params& params, const Shared& shared, Work& state) {
    const P& p = params.problem;
    const int lane = threadIdx.x % 32;
    PrefillRows rows = shared.rows;  // which took no registers until here
    rows.part = 0;
    const auto map = sink_map(p.out);
    const auto& end = sink_end(p.out);
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float inverse = state.finish_row(p, rows, 0, half);
      const int row = Work::row(0, half);
      const auto place = rows.place(row);
      const int64_t to = rows.token + place.query;
      KERNELS_UNROLL
      for (int j = 0; j < kCols / 8; j += 4) {
        float pairs[4][2];
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) pairs[i][0] = state.outputs[0][j + i][half * 2] * inverse, pairs[i][1] = state.outputs[0][j + i][half * 2 + 1] * inverse;
        KERNELS_UNROLL
        for (int distance = 1; distance < 4; distance *= 2) {
          KERNELS_UNROLL
          for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            KERNELS_UNROLL
            for (int x = 0; x < 2; ++x) {
              const bool upper = lane & distance;
              float &low = pairs[i][x], &high = pairs[i | distance][x];
              const float other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
              low = upper ? other : low, high = upper ? high : other;
            }
          }
        }
        Pack<float, 8> values;
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) values.v[2 * i] = pairs[i][0], values.v[2 * i + 1] = pairs[i][1];
        if (row >= rows.count) continue;
        if (leaves_part<P>(rows)) {
          leave_outputs(p, rows, row, values, (j + lane % 4) * 8);
          continue;
        }
        in_packs(p.out_pack, values, int64_t(place.head) * kCols + (j + lane % 4) * 8, [&](const auto& some, int64_t at) {
          constexpr int N = std::decay_t<decltype(some)>::size;
          put(end, apply_map(map, some, fetch_operands<N>(map, to, at), to, at), to, at);
        });
      }
    }
  }
};

}  // namespace detail
KERNELS_END
