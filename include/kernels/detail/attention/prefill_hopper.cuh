// Attention of many queries for sm_90a: the schedule of Hopper's fastest kernels, for heads whose keys and values are copied.
//
//   warpgroup 0      copies tiles of keys and of values to a ring of two stages each, by cp.async, from wherever they lie
//   the others       64 of the block's rows each: logits by wgmma from shared memory, their softmax in registers, and from there
//                    the product with the values by wgmma
//
//   shared memory:   | queries 64 x dim | queries 64 x dim | K0 | V0 | K1 | V1 |    results go out by way of the queries' place
//
//   group 1:   K0 | softmax 0 | V0 K1 |  ...      | softmax 1 | V1 K2 |
//   group 2:   K0 |           | softmax 0 | V0 K1 |           | softmax 1 | V1 K2
//
// The groups that compute take turns at the softmax, but for those with 256 columns: while one makes exponentials the tensor cores work for
// the other. What is done with logits, which keys a row sees, and how rows are shared out is that of prefill.cuh. Thread blocks that stay for
// several tiles of queries, which were shared out beforehand, took 2 to 30 % longer with 128 columns (H200, bench_prefill).
#pragma once

#include "prefill.cuh"

KERNELS_BEGIN
namespace detail {

// Takes heads of up to kDim columns, and values of as many or fewer. There are products for all columns and, in the same kernel, for fewer; those
// of queries and keys that are not there are zeros.
template <class P, int kDim_, int kKeys_, int kGroups>
struct HopperPrefillBody {
  using Kv = typename P::Kv;
  using TK = key_meeting_type<typename P::Q, Kv>;
  using TV = value_meeting_type<typename P::Q, Kv>;
  static constexpr int kDim = kDim_, kCols = kDim_, kKeys = kKeys_, kStages = kDim == 256 ? 2 : 3, kRows = 64 * kGroups, kResultPack = 8, kOnEach = 1;
  // With 256 columns products take so much longer than exponentials that turns are only waited for: a tenth slower (H200, bench_prefill).
  static constexpr bool kTurns = kDim <= 128;
  static constexpr int kFewer = kDim == 64 ? 64 : kDim / 4 * 3, kFewerCols = kCols == 64 ? 64 : kCols == 128 ? 96 : 128;
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
          arch::mbarrier_init(&shared.keys_full[i], 4), arch::mbarrier_init(&shared.values_full[i], 4);  // warps that copy
          arch::mbarrier_init(&shared.keys_empty[i], 4 * groups), arch::mbarrier_init(&shared.values_empty[i], 4 * groups);
        }
        arch::mbarrier_init_fence();
      }
      unsigned char* const memory = tiles_memory + (-arch::shared_address(tiles_memory) & (kAligned - 1));
      // On their way while the block finds out which keys they see.
      const int dim = int(p.shape.dim);
      if (threadIdx.x >= 128) {
        if (group() < groups) bring_queries<TK, 64, Queries>(p, rows, group() * 64, memory + group() * kQueryBytes, dim);
        arch::copy_async_commit();
      } else if (dim != kDim && dim != kFewer) {
        KERNELS_ROLLED
        for (int i = 0; i < kStages; ++i) Keys::Layout::clear_behind(memory + kGroups * kQueryBytes + i * kStageBytes, kKeys, dim);
      }
      static_assert(kRows <= max_threads, "a thread for each row");
      if (threadIdx.x < kRows) shared.row_keys[threadIdx.x] = keys_seen(p, rows, int(threadIdx.x));
      __syncthreads();
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
    Keys keys(key_at, tiles.begin, 0, int(p.shape.dim), true);
    Values values(value_at, tiles.begin, 0, int(p.shape.value_dim()), true);
    const int lane = threadIdx.x % 32;
    const void* addresses[Keys::kFound] = {};
    // What has been asked for last is announced behind the next. wgmma sees it by the fences of those who copied.
    uint64_t* asked = nullptr;
    const auto announce = [&] {
      arch::async_proxy_fence();
      __syncwarp();
      if (lane == 0) arch::mbarrier_arrive(asked);
    };
    const auto ask = [&](uint64_t* full) {
      arch::copy_async_commit();
      arch::copy_async_wait<1>();
      if (asked != nullptr) announce();
      asked = full;
    };
    // In the order of the products: keys of a tile ahead of the values of the one before.
#pragma unroll 1
    for (int tile = 0; tile <= tiles.count; ++tile) {
      const int pos = tiles.begin + tile * kKeys;
      if constexpr (!in_one_run<Kv>) {
        if (lane % 16 < Keys::kWarpRows) {
          const int first = lane < 16 ? pos : pos - kKeys;
          KERNELS_UNROLL
          for (int j = 0; j < Keys::kFound; ++j) {
            const int at = greater(tiles.low, first + lesser(Keys::tile_row(lane % 16 + j * 16), tiles.end - 1 - first));
            addresses[j] = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
          }
        }
      }
      const auto stage_of = [](int tile) { return tile % kStages; };
      const auto free_of = [](int tile) { return tile / kStages % 2 ^ 1; };
      if (tile < tiles.count) {
        const int stage = stage_of(tile);
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage], free_of(tile));
        keys.template bring<false>(stages + stage * kStageBytes, key_at, pos, tiles.low - pos, tiles.end - pos, addresses, 0);
        ask(&shared.keys_full[stage]);
      }
      if (tile > 0) {
        const int stage = stage_of(tile - 1), before = pos - kKeys;
        arch::mbarrier_wait_in_block(&shared.values_empty[stage], free_of(tile - 1));
        values.template bring<false>(stages + stage * kStageBytes + Keys::kBytes, value_at, before, tiles.low - before, tiles.end - before, addresses, 1);
        ask(&shared.values_full[stage]);
      }
    }
    arch::copy_async_wait<0>();
    if (asked != nullptr) announce();
  }

  // The fragments of 16 rows for each warp, of 64 for a warpgroup.
  using Work = PrefillWork<P, TV, 1, kKeys, kCols, 4>;
  template <int kValue>
  using Int = std::integral_constant<int, kValue>;

  static __device__ __forceinline__ int group() { return int(threadIdx.x / 128) - 1; }
  // Named barriers: the turn of each group at the softmax, and one for each group's own threads.
  static __device__ __forceinline__ int turn(int group) { return 1 + group; }
  static __device__ __forceinline__ int own(int group) { return 1 + kGroups + group; }

  static __device__ __forceinline__ void work(const Params& params, Shared& shared, const PrefillRows& rows, const SeenKeys& all, unsigned char* memory, int groups) {
    arch::more_registers<kWorkerRegisters>();
    const P& p = params.problem;
    const int group = HopperPrefillBody::group(), next_group = group + 1 < groups ? group + 1 : 0;
    if (group >= groups) return;
    unsigned char* const queries = memory + group * kQueryBytes;
    arch::copy_async_wait<0>();
    arch::async_proxy_fence();
    arch::named_barrier_sync(own(group), 128);

    const Tiles tiles(all);
    // Tiles that the warp's rows see as a whole.
    const SeenKeys seen = seen_by_rows(shared, rows, Work::first_row(), 16);
    const int first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);

    const uint32_t stages = arch::shared_address(memory) + kGroups * kQueryBytes;
    const uint64_t query_tile = arch::warpgroup_tile(arch::shared_address(queries));
    const int dim = int(p.shape.dim), cols = int(p.shape.value_dim());
    Work state;
    const auto release = [&](uint64_t* barrier) {
      if (threadIdx.x % 32 == 0) arch::mbarrier_arrive(barrier);
    };
    const auto parity = [](int tile) { return tile / kStages % 2; };
    // Queries times the keys of a tile, and weights times its values: what is begun here runs on.
    const auto begin_logits = [&](int tile) {
      const int stage = tile % kStages;
      arch::mbarrier_wait_in_block(&shared.keys_full[stage], parity(tile));
      const uint64_t keys = arch::warpgroup_tile(stages + stage * kStageBytes);
      const auto multiply = [&](auto columns) {
        arch::warpgroup_fence();
        KERNELS_UNROLL
        for (int i = 0; i < decltype(columns)::value / 16; ++i) {
          const int run = i / 4, step = i % 4 * 2;
          arch::warpgroup_mma<TK>(state.logits[0], query_tile + run * (64 * 128 / 16) + step, keys + run * (kKeys * 128 / 16) + step, i > 0);
        }
        arch::warpgroup_commit();
      };
      if (kDim == kFewer || dim > kFewer) multiply(Int<kDim>{});
      else multiply(Int<kFewer>{});
    };
    const auto begin_outputs = [&](int tile) {
      const int stage = tile % kStages;
      arch::mbarrier_wait_in_block(&shared.values_full[stage], parity(tile));
      const uint64_t values = arch::warpgroup_tile(stages + stage * kStageBytes + Keys::kBytes, kKeys * 128);
      // Columns [kFirst, kFirst + kCount) of the results.
      const auto multiply = [&](auto first, auto count) {
        constexpr int kFirst = decltype(first)::value, kCount = decltype(count)::value;
        KERNELS_UNROLL
        for (int i = 0; i < kKeys / 16; ++i) {
          arch::warpgroup_mma_turned<TV>(reinterpret_cast<float(&)[kCount / 8][4]>(state.outputs[0][kFirst / 8]), state.weights[0][i],
                                         values + kFirst / 64 * (kKeys * 128 / 16) + i * (16 * 128 / 16), true);
        }
      };
      constexpr int kMost = kCols < 128 ? kCols : 128;
      if (kCols > kFewerCols && cols <= kFewerCols) {
        arch::warpgroup_fence();
        multiply(Int<0>{}, Int<kFewerCols>{});
        arch::warpgroup_commit();
      } else {
        arch::warpgroup_fence();
        multiply(Int<0>{}, Int<kMost>{});
        if constexpr (kCols > kMost) multiply(Int<kMost>{}, Int<kCols - kMost>{});
        arch::warpgroup_commit();
      }
    };
    const int last = tiles.count - 1;
    const unsigned none = unsigned(p.shape.heads >> 32);  // 0, which the compiler does not know
    const auto look_at = [&](int tile) {
      return state.template look_at<false>(p, rows, shared.row_keys, tiles.begin + tile * kKeys, tile >= first_whole && tile < last_whole);
    };
    if (last >= 0) {
      arch::pin(state.logits[0]);
      begin_logits(0);
      if (kTurns && next_group == 0 && last > 0) arch::named_barrier_arrive(turn(0), 256);
      arch::warpgroup_wait<0>();
      arch::pin(state.logits[0]);
      release(&shared.keys_empty[0]);
      state.make_exponentials(look_at(0));
      state.round_weights(nullptr);
#pragma unroll 1
      for (int tile = 0; tile < last; ++tile) {
        if constexpr (kTurns) arch::named_barrier_sync(turn(group), 256);
        arch::pin(state.logits[0]);
        begin_logits(tile + 1);
        arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
        begin_outputs(tile);
        if (kTurns && (next_group > 0 || tile + 1 < last)) arch::named_barrier_arrive(turn(next_group), 256);
        arch::warpgroup_wait<1>();
        arch::pin(state.logits[0]);
        release(&shared.keys_empty[(tile + 1) % kStages]);
        const typename Work::Look look = look_at(tile + 1);
        state.make_exponentials(look);
        // All exponentials come ahead of the wait: what the compiler sees to be ahead of it seems to need their sums.
        if (((__float_as_uint(state.sums[0][0]) | __float_as_uint(state.sums[0][1])) & none) != 0) release(&shared.keys_empty[0]);
        arch::warpgroup_wait<0>();
        arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
        release(&shared.values_empty[tile % kStages]);
        state.shrink_outputs(look);
        state.round_weights(nullptr);
      }
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs(last);
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]);
    }
    arch::named_barrier_sync(own(group), 128);
    finish(params, shared, state, queries);
  }

  // A warp's results go to the sink by way of its queries' place, which all products have read: half of the columns at a time, as floats, 32 of
  // them for each run of queries.
  static __device__ __forceinline__ void finish(const Params& params, const Shared& shared, Work& state, unsigned char* queries) {
    const P& p = params.problem;
    const int lane = threadIdx.x % 32, cols = int(p.shape.value_dim());
    PrefillRows rows = shared.rows;  // which took no registers until here
    rows.part = 0;
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
#pragma unroll 1
    for (int first = 0; first < kCols; first += kCols / 2) {
      __syncwarp();
      if (first == 0) leave(Int<0>{});
      else leave(Int<kCols / 2>{});
      __syncwarp();
      constexpr int kPacks = kCols / 16;
#pragma unroll 1
      for (int i = lane; i < 16 * kPacks; i += 32) {
        const int row = i / kPacks, col = i % kPacks * 8;
        if (first_row + row >= rows.count || first + col >= cols) continue;
        Pack<float, 8> values;
        memcpy(values.v, __builtin_assume_aligned(place(row, col), 16), 16);
        memcpy(values.v + 4, __builtin_assume_aligned(place(row, col + 4), 16), 16);
        if (leaves_part<P>(rows)) {
          leave_outputs(p, rows, first_row + row, values, first + col);
          continue;
        }
        const auto at = rows.place(first_row + row);
        const int64_t to = rows.token + at.query;
        in_packs(p.out_pack, values, int64_t(at.head) * cols + first + col, [&](const auto& some, int64_t from) {
          constexpr int N = std::decay_t<decltype(some)>::size;
          put(end, apply_map(map, some, fetch_operands<N>(map, to, from), to, from), to, from);
        });
      }
    }
  }
};

}  // namespace detail
KERNELS_END
