// Attention of many queries for sm_90a over latents (MLA): keys of 576 columns, of which 512 are the values as well, so
// that both are read once.
//
//   warpgroup 0      the producer: copies queries, and tiles of 48 keys to three stages, by cp.async
//   warpgroup 1      logits by wgmma, and their softmax; leaves the weights in shared memory
//   warpgroups 2, 3  weights times values by wgmma, half of the 512 columns each
//
//   shared memory:   | queries 64 x 448 | keys 48 x 576 | keys 48 x 576 | keys 48 x 576 |
//                                       | values 48 x 512 | weights |
//
//   tensor cores:    | K0 |      | K1 | V0   | K2 | V1   | K3 | V2   |
//   softmax:              |  0   |    |  1   |    |  2   |    |  3   |
//
// Outputs of 64 rows take the registers of two warpgroups, and weights those of a third. Values of a tile wait until
// the logits of the next are there, so that their product runs beside that one's softmax. Three stages have room
// because weights take the place of the 64 columns that are no values, and 128 columns of queries lie in the registers
// of those who multiply them. Results go out by way of the other queries' place.
//
// In decode() the two blocks of a cluster may have a tile of queries together, each half of its keys:
//
//   block 0:   | keys | outputs 0-255 | outputs 256-511 |     sums of both rows' exponentials go both ways; then block
//   block 1:   | keys | outputs 0-255 | outputs 256-511 |     0 gets and finishes 0-255 of both, block 1 the others
#pragma once

#include "prefill_hopper_producer.cuh"
#include "prefill_hopper_results.cuh"

KERNELS_BEGIN
namespace detail {

// The column of keys at which values begin, where these are columns of the keys; otherwise -1.
template <class K, class V, class Where>
KERNELS_HD int64_t value_column(const KvCache<K, V, Where>& kv) {
  if constexpr (std::is_same<typename K::Element, typename V::Element>::value) {
    const typename K::Element *const key = kv.keys().at({0, 0, 0}, 0), *const value = kv.values().at({0, 0, 0}, 0);
    const bool alike = kv.keys().at({1, 0, 0}, 0) - key == kv.values().at({1, 0, 0}, 0) - value &&
                       kv.keys().at({0, 1, 0}, 0) - key == kv.values().at({0, 1, 0}, 0) - value &&
                       kv.keys().at({0, 0, 0}, 1) - key == kv.values().at({0, 0, 0}, 1) - value;
    return alike && value >= key && value - key < kv.keys().at({0, 1, 0}, 0) - key ? value - key : -1;
  } else {
    return -1;
  }
}

// Three stages of 48 keys: 64 sequences of 4,096 keys with 128 heads took 140 us; with two of 64 keys, and all queries
// in shared memory, 145 (H200, CUDA 13.0, bench_decode's shape in a program of its own).
template <class P>
struct LatentParts : HopperItems<P, 64, 48, 3, 1, P::kSplits> {
  using Items = HopperItems<P, 64, 48, 3, 1, P::kSplits>;
  using Items::kRows, Items::kKeys, Items::kStages, Items::kQueryStages, Items::kAligned;
  using typename Items::Item;
  using Kv = typename P::Kv;
  using TK = key_meeting_type<typename P::Q, Kv>;
  static constexpr int kGroups = 1, kDim = kLatentDim, kCols = kLatentCols, kRuns = kDim / 64;
  static constexpr int max_threads = 512, registers = 128;
  static constexpr int kProducerRegisters = 40, kLogitRegisters = 152, kOutputRegisters = 160;
  static constexpr int kHeldRuns = 2;  // of queries, in registers
  using Queries = TileLayout<kDim - kHeldRuns * 64, 128, kRows>;
  using Keys = KvTiles<TK, KeyRun<Kv>, in_one_run<Kv>, kKeys, kDim, 128, true>;
  static constexpr bool kCopiesQueries = lies_as<typename P::Q, TK>;
  static constexpr int kRunBytes = Keys::Layout::kRunBytes, kStageBytes = Keys::kBytes,
                       kQueryBytes = Queries::kRuns * Queries::kRunBytes;
  static constexpr int kWeightTile = kRows * 32;  // bytes of 16 keys' weights

  struct Shared {
    float shrink[kStages][kRows], inverse[kRows];
    uint64_t states[kRows];  // of the other block's rows
    uint64_t keys_full[kStages], keys_empty[kStages], keys_read, weights_full[kStages], sums_full,
        item_full[kQueryStages], item_empty[kQueryStages];
    uint64_t states_full, outputs_full, other_done;  // of what the other block of a pair does
    Item items[kQueryStages];
  };
  static constexpr int kTilesAt = (int(sizeof(Shared)) + kAligned - 1) / kAligned * kAligned;
  static constexpr int kSharedBytes = kTilesAt + kQueryBytes + kStages * kStageBytes;
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  static void share_out(PrefillGrid&) {}

  static __device__ __forceinline__ unsigned char* queries_of(unsigned char* memory, int, int) { return memory; }
  static __device__ __forceinline__ unsigned char* stage_of(unsigned char* memory, int stage) {
    return memory + kQueryBytes + stage * kStageBytes;
  }
  // Of a tile's runs of 64 columns the first of values, and the one that has no values.
  static __device__ __forceinline__ int value_run(const P& p) { return value_column(p.kv) == 0 ? 0 : 1; }
  static __device__ __forceinline__ int weight_run(const P& p) { return value_column(p.kv) == 0 ? kRuns - 1 : 0; }

  // Two blocks that have a tile of queries together. The second has the second half of the keys, and each gets half of
  // the columns of the results.
  static __device__ __forceinline__ bool paired() { return P::kSplits && arch::cluster_size() > 1; }
  static __device__ __forceinline__ void take_half(PrefillRows& rows) {
    if (!paired()) return;
    const int tiles = (rows.key_end - rows.key_begin + kKeys - 1) / kKeys,
              middle = rows.key_begin + (tiles + 1) / 2 * kKeys;
    (arch::cluster_rank() == 0 ? rows.key_end : rows.key_begin) = lesser(middle, rows.key_end);
  }
  static __device__ __forceinline__ uint32_t in_other(const void* here) {
    return arch::remote_address(here, arch::cluster_rank() ^ 1);
  }
};

template <class Parts>
struct LatentProducer : HopperItemProducer<Parts> {
  using P = typename Parts::Problem;
  using Keys = typename Parts::Keys;
  using Shared = typename Parts::Shared;
  using Parities = typename Parts::Parities;
  using Tiles = typename Parts::Tiles;
  using Parts::kKeys;

  static __device__ __forceinline__ void produce(const typename Parts::Params& params, Shared& shared,
                                                 unsigned char* memory) {
    arch::fewer_registers<Parts::kProducerRegisters>();
    const P& p = params.problem;
    if (!PrefillGrid::even(p) && blockIdx.x == 0 && threadIdx.x / 32 == 1) params.grid.template count_rows<Parts>(p);
    Parities keys_to;
    Parts::each_item(params.grid, [&](int number, unsigned wanted) {
      PrefillRows rows;
      SeenKeys all;
      if (!HopperItemProducer<Parts>::bring_item(params, shared, memory, number, wanted, rows, all)) return false;
      copy_keys(p, shared, memory, rows, Tiles(all), keys_to);
      return true;
    });
    arch::copy_async_commit();
    arch::copy_async_wait<0>();
  }

  static __device__ __forceinline__ void copy_keys(const P& p, Shared& shared, unsigned char* memory,
                                                   const PrefillRows& rows, const Tiles& tiles, Parities& keys_to) {
    const auto at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    Keys keys(at, tiles.begin, 0, Parts::kDim, true);
    const void* addresses[Keys::kFound] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int pos = tiles.begin + tile * kKeys, low = tiles.low - pos, end = tiles.end - pos,
                stage = Parities::stage(tile);
      if constexpr (!in_one_run<typename P::Kv>) {
        const int row = Keys::tile_row(lesser(int(threadIdx.x % 16), Keys::kWarpRows - 1));
        addresses[0] = keys.address(at(int64_t(pos) + greater(low, lesser(row, end - 1))));
      }
      arch::mbarrier_wait_in_block(&shared.keys_empty[stage], keys_to.at(tile) ^ 1);
      keys.template bring<false>(Parts::stage_of(memory, stage), at, pos, low, end, addresses, 0);
      arch::mbarrier_arrive_copied(&shared.keys_full[stage]);
      keys_to.next(tile);
    }
  }
};

// The warpgroup that makes weights.
template <class Parts>
struct LatentWeights : Parts {
  using P = typename Parts::Problem;
  using TK = typename Parts::TK;
  using Shared = typename Parts::Shared;
  using Item = typename Parts::Item;
  using Parities = typename Parts::Parities;
  using Tiles = typename Parts::Tiles;
  using Parts::kKeys, Parts::kRunBytes, Parts::kProducerBarrier;
  using Work = PrefillWork<P, TK, 1, kKeys, 8 /* no outputs */, 4>;
  static constexpr int kOwnBarrier = kProducerBarrier + 1;
  static constexpr int kFirstHeld = Parts::Queries::kRuns * 4;  // of the products of 16 columns
  using Logits = float[kKeys / 8][4];

  // The columns of queries behind those in shared memory, in the fragments of mma.
  struct HeldQueries {
    uint32_t fragments[Parts::kHeldRuns * 4][4];
    __device__ __forceinline__ HeldQueries(const P& p, const PrefillRows& rows) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = Work::row(0, half);
        const bool there = row < rows.count;
        const auto place = rows.place(there ? row : 0);
        const int64_t first = int64_t(place.head) * Parts::kDim + kFirstHeld * 16 + threadIdx.x % 4 * 2;
        KERNELS_UNROLL
        for (int i = 0; i < Parts::kHeldRuns * 8; ++i) {
          const Pack<float, 2> pair = query_pair(p, rows.token + place.query, first + i * 8);
          fragments[i / 2][i % 2 * 2 + half] = there ? rounded_pair<TK>(pair.v[0], pair.v[1]) : 0;
        }
      }
    }
    static __device__ __forceinline__ Pack<float, 2> query_pair(const P& p, int64_t row, int64_t col) {
      using Q = typename P::Q;
      if constexpr (wide_pack<Q> >= 2) {
        if (p.wide_queries) return convert<float>(resolve(p.q, fetch<2>(p.q, row, col), row, col));
      }
      Pack<float, 2> pair;
      KERNELS_UNROLL
      for (int i = 0; i < 2; ++i)
        pair.v[i] = convert<float>(resolve(p.q, fetch<1>(p.q, row, col + i), row, col + i)).v[0];
      return pair;
    }
  };

  static __device__ __forceinline__ void weigh(const typename Parts::Params& params, Shared& shared,
                                               unsigned char* memory) {
    arch::more_registers<Parts::kLogitRegisters>();
    const P& p = params.problem;
    unsigned char* const weights = memory + Parts::weight_run(p) * kRunBytes;
    Parities keys_at;
    int read_parity = 0;
    Parts::each_item(params.grid, [&](int number, unsigned) {
      const Item& item = Parts::wait_for_item(shared, number);
      if (item.rows.count == 0) return false;
      if constexpr (!Parts::kCopiesQueries) {
        arch::named_barrier_sync(kOwnBarrier, 128);
        bring_queries<TK, 64, typename Parts::Queries>(p, item.rows, 0, memory, Parts::kDim);
        arch::copy_async_commit();
        arch::copy_async_wait<0>();
        arch::async_proxy_fence();
        arch::named_barrier_sync(kOwnBarrier, 128);
      }
      const PrefillRows rows = item.rows;
      const Tiles tiles(item.all);
      const SeenKeys seen = Parts::seen_by_rows(item, Work::first_row(), 16);
      const int first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);
      const HeldQueries held(p, rows);
      Work state;
      const auto make_logits = [&](int tile) {
        const int stage = Parities::stage(tile);
        arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
        keys_at.next(tile);
        arch::async_proxy_fence();
        multiply_keys(state.logits[0], arch::shared_address(memory), held,
                      arch::shared_address(Parts::stage_of(memory, stage)));
        if (threadIdx.x % 32 == 0) arch::mbarrier_arrive(&shared.keys_read);
      };
      if (tiles.count > 0) make_logits(0);
#pragma unroll 1
      for (int tile = 0; tile < tiles.count; ++tile) {
        const int stage = Parities::stage(tile);
        const auto look = state.template look_at<false>(p, rows, item.row_keys, tiles.begin + tile * kKeys,
                                                        tile >= first_whole && tile < last_whole);
        if (threadIdx.x % 4 == 0) {
          for (int half = 0; half < 2; ++half)
            shared.shrink[stage][Work::row(0, half)] = look.raised ? look.shrink[0][half] : 1.f;
        }
        state.make_exponentials(look);
        state.round_weights(nullptr);
        arch::mbarrier_wait_in_block(&shared.keys_read, read_parity);  // by all of the group's products
        read_parity ^= 1;
        leave_weights(state, Parts::stage_of(weights, stage));
        arch::async_proxy_fence();
        // The others begin when these products are done, so that tensor cores have work during the next softmax.
        if (tile + 1 < tiles.count) make_logits(tile + 1);
        arch::mbarrier_arrive(&shared.weights_full[stage]);
      }
      leave_inverses(p, shared, rows, state, number);
      arch::mbarrier_arrive(&shared.sums_full);
      arch::mbarrier_arrive(&shared.item_empty[0]);
      return true;
    });
  }

  // What outputs are to be multiplied with, behind the last key. Blocks of a pair tell each other of their sums.
  static __device__ __forceinline__ void leave_inverses(const P& p, Shared& shared, const PrefillRows& rows,
                                                        const Work& work, int number) {
    const bool paired = Parts::paired(), writes = threadIdx.x % 4 == 0;
    SoftmaxState<float> states[2] = {work.state_of_row(0, 0), work.state_of_row(0, 1)};
    if (paired) {
      if (threadIdx.x % 128 == 0) arch::mbarrier_arrive_expect(&shared.states_full, int(sizeof(shared.states)));
      for (int half = 0; half < 2 && writes; ++half)
        arch::store_async(Parts::in_other(&shared.states[Work::row(0, half)]), bit_cast<uint64_t>(states[half]),
                          Parts::in_other(&shared.states_full));
      arch::mbarrier_wait(&shared.states_full, number % 2);
    }
    for (int half = 0; half < 2; ++half) {
      const int row = Work::row(0, half);
      float factor = 1;
      if (paired) factor = states[half].merge(bit_cast<SoftmaxState<float>>(shared.states[row])).mine;
      factor *= Work::finish_state(p, rows, row, states[half], writes && (!paired || arch::cluster_rank() == 0));
      if (writes) shared.inverse[row] = factor;
    }
  }

  // Logits of a tile.
  static __device__ __forceinline__ void multiply_keys(Logits& logits, uint32_t queries_at, const HeldQueries& held,
                                                       uint32_t keys_at) {
    constexpr int kQueryRun = Parts::Queries::kRunBytes / 16, kKeyRun = kRunBytes / 16;
    const uint64_t queries = arch::warpgroup_tile(queries_at), keys = arch::warpgroup_tile(keys_at);
    arch::pin(logits);
    arch::warpgroup_fence();
    KERNELS_UNROLL
    for (int i = 0; i < Parts::kRuns * 4; ++i) {
      const uint64_t some = keys + i / 4 * kKeyRun + i % 4 * 2;
      if (i < kFirstHeld)
        arch::warpgroup_mma<TK>(logits, queries + i / 4 * kQueryRun + i % 4 * 2, some, i > 0);
      else
        arch::warpgroup_mma<TK>(logits, held.fragments[i - kFirstHeld], some, true);
    }
    arch::warpgroup_commit();
    arch::warpgroup_wait<0>();
    arch::pin(logits);
  }

  // To a run of the stage, as an operand of the product with the values: tiles of 16 keys, whose rows are those of
  // outputs.
  static __device__ __forceinline__ void leave_weights(const Work& state, unsigned char* run) {
    const int lane = threadIdx.x % 32;
    KERNELS_UNROLL
    for (int j = 0; j < kKeys / 8; ++j) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = Work::row(0, half);
        *reinterpret_cast<uint32_t*>(run + j / 2 * Parts::kWeightTile + row * 32 + (j % 2 ^ row / 4 % 2) * 16 +
                                     lane % 4 * 4) = state.weights[0][j / 2][j % 2 * 2 + half];
      }
    }
  }
};

// The two warpgroups that make outputs.
template <class Parts>
struct LatentOutputs : Parts {
  using P = typename Parts::Problem;
  using TV = typename Parts::TK;
  using Shared = typename Parts::Shared;
  using Item = typename Parts::Item;
  using Parities = typename Parts::Parities;
  using Tiles = typename Parts::Tiles;
  using Parts::kKeys, Parts::kRunBytes;
  static constexpr int kCols = Parts::kCols / 2;

  static __device__ __forceinline__ void add(const typename Parts::Params& params, Shared& shared,
                                             unsigned char* memory) {
    arch::more_registers<Parts::kOutputRegisters>();
    const P& p = params.problem;
    const int lane = threadIdx.x % 32, group = __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0) - 2,
              first_row = int(threadIdx.x / 32) % 4 * 16;
    const uint32_t weights = arch::shared_address(memory) + Parts::weight_run(p) * kRunBytes,
                   values = arch::shared_address(memory) + (Parts::value_run(p) + group * (kCols / 64)) * kRunBytes;
    Parities keys_at;
    Parts::each_item(params.grid, [&](int number, unsigned) {
      const Item& item = Parts::wait_for_item(shared, number);
      if (item.rows.count == 0) return false;
      const int tiles = Tiles(item.all).count;
      float outputs[kCols / 8][4] = {};
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        const int stage = Parities::stage(tile);
        arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
        arch::mbarrier_wait_in_block(&shared.weights_full[stage], keys_at.at(tile));
        keys_at.next(tile);
        arch::async_proxy_fence();
        const float* const shrink = shared.shrink[stage] + first_row + lane / 4;
        shrink_outputs(outputs, shrink[0], shrink[8]);
        const uint32_t at = Parts::kQueryBytes + stage * Parts::kStageBytes;
        arch::pin(outputs);
        arch::warpgroup_fence();
        multiply_values<0>(outputs, weights + at, values + at);
        multiply_values<128>(outputs, weights + at, values + at);
        arch::warpgroup_commit();
        arch::warpgroup_wait<0>();
        arch::pin(outputs);
        arch::mbarrier_arrive(&shared.keys_empty[stage]);  // each thread, as each has read what shrinks outputs
      }
      if (Parts::paired() && lane == 0) arch::mbarrier_arrive_there(Parts::in_other(&shared.other_done));
      arch::mbarrier_wait_in_block(&shared.sums_full, number % 2);
      const float* const sums = shared.inverse + first_row + lane / 4;
      float inverse[2] = {sums[0], sums[8]};
      bool mine = true;
      if (Parts::paired()) {
        shrink_outputs(outputs, inverse[0], inverse[1]);
        inverse[0] = inverse[1] = 1;
        mine = group == int(arch::cluster_rank());
        if (mine) add_others(shared, outputs, memory + Parts::kQueryBytes, number);
        else send_outputs(shared, outputs, memory + Parts::kQueryBytes, number);
      }
      // By way of half of the queries' place.
      if (mine)
        ResultRows<kCols, kCols / 4, Parts::Queries::kRunBytes, P>(p, item.rows, first_row, group * kCols)
            .put(p, item.rows, outputs, inverse, memory + group * 2 * Parts::Queries::kRunBytes);
      arch::mbarrier_arrive(&shared.item_empty[0]);
      return true;
    });
  }

  // Outputs of these columns of the other block of a pair come to the place of the keys, in the order of the threads.
  static __device__ __forceinline__ void send_outputs(Shared& shared, const float (&outputs)[kCols / 8][4],
                                                      const unsigned char* keys, int number) {
    const uint32_t to = Parts::in_other(keys) + threadIdx.x % 128 * 16, full = Parts::in_other(&shared.outputs_full);
    arch::mbarrier_wait(&shared.other_done, number % 2);
    KERNELS_UNROLL
    for (int j = 0; j < kCols / 8; ++j) arch::store_async(to + j * 128 * 16, outputs[j], full);
  }
  static __device__ __forceinline__ void add_others(Shared& shared, float (&outputs)[kCols / 8][4],
                                                    const unsigned char* keys, int number) {
    if (threadIdx.x % 128 == 0) arch::mbarrier_arrive_expect(&shared.outputs_full, kCols / 8 * 128 * 16);
    arch::mbarrier_wait(&shared.outputs_full, number % 2);
    KERNELS_UNROLL
    for (int j = 0; j < kCols / 8; ++j) {
      const auto others = floats_at<4>(reinterpret_cast<const float*>(keys) + (j * 128 + threadIdx.x % 128) * 4);
      KERNELS_UNROLL
      for (int x = 0; x < 4; ++x) outputs[j][x] += others.v[x];
    }
  }

  static __device__ __forceinline__ void shrink_outputs(float (&outputs)[kCols / 8][4], float upper, float lower) {
    if (!__any_sync(0xffffffffu, upper != 1.f || lower != 1.f)) return;
    KERNELS_UNROLL
    for (auto& some : outputs) some[0] *= upper, some[1] *= upper, some[2] *= lower, some[3] *= lower;
  }
  // 128 columns of the outputs, from kFirst on.
  template <int kFirst>
  static __device__ __forceinline__ void multiply_values(float (&outputs)[kCols / 8][4], uint32_t weights_at,
                                                         uint32_t values_at) {
    auto& some = reinterpret_cast<float(&)[16][4]>(outputs[kFirst / 8]);
    const uint64_t weights = arch::warpgroup_tile_32(weights_at),
                   values = arch::warpgroup_tile(values_at + kFirst / 64 * kRunBytes, kRunBytes);
    KERNELS_UNROLL
    for (int i = 0; i < kKeys / 16; ++i)
      arch::warpgroup_mma_turned<TV>(some, weights + i * (Parts::kWeightTile / 16), values + i * (16 * 128 / 16), true);
  }
};

// kDim is there for calls to depend on.
template <class P, int kDim>
struct LatentPrefillBody : LatentParts<P> {
  using Parts = LatentParts<P>;
  using Shared = typename Parts::Shared;

  static __device__ __forceinline__ void run(const typename Parts::Params& params) {
    if constexpr (arch::kWarpgroupMma) {
      extern __shared__ __align__(1024) unsigned char whole_memory[];
      Shared& shared = *reinterpret_cast<Shared*>(whole_memory);
      if (arch::shared_address(whole_memory) % Parts::kAligned != 0) __trap();
      unsigned char* const memory = whole_memory + Parts::kTilesAt;
      if (threadIdx.x == 0) {
        KERNELS_UNROLL
        for (int i = 0; i < Parts::kStages; ++i) {
          arch::mbarrier_init(&shared.keys_full[i], 128), arch::mbarrier_init(&shared.keys_empty[i], 2 * 128);
          arch::mbarrier_init(&shared.weights_full[i], 128);
        }
        arch::mbarrier_init(&shared.keys_read, 4), arch::mbarrier_init(&shared.sums_full, 128);
        arch::mbarrier_init(&shared.item_full[0], 2 * 128), arch::mbarrier_init(&shared.item_empty[0], 3 * 128);
        arch::mbarrier_init(&shared.states_full, 1), arch::mbarrier_init(&shared.outputs_full, 1);
        arch::mbarrier_init(&shared.other_done, 8);
        arch::mbarrier_init_fence();
      }
      __syncthreads();
      if (Parts::paired()) {  // nothing is sent to a block whose barriers are not there
        arch::cluster_arrive();
        arch::cluster_wait();
      }
      if (threadIdx.x < 128)
        LatentProducer<Parts>::produce(params, shared, memory);
      else if (threadIdx.x < 256)
        LatentWeights<Parts>::weigh(params, shared, memory);
      else
        LatentOutputs<Parts>::add(params, shared, memory);
    }
  }
};

}  // namespace detail
KERNELS_END
