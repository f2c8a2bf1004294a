// Prefill kernel for MLA latents on sm_90a: keys have 576 columns, and 512 of these columns are also the values, so
// that a key tile is read once and serves both products. decode() uses the same kernel (decode_latent.cuh).
//
//   warpgroup 0      producer: copies queries, and tiles of 64 keys to a pipeline of two stages
//   warpgroups 1, 2  consumers: each makes the logits (wgmma) and the softmax of every other key tile, and multiplies
//                    the weights of all key tiles by its half of the 512 value columns
//
//   shared memory:   | queries 64 x 512 | keys 64 x 576 | keys 64 x 576 | weights 64 x 64 | weights |
//                                       | values 64 x 512 |   the same memory as the keys
//
//   warpgroup 1:     | K0 | softmax 0 | V0 | V1    | K2 | softmax 2 | V2 | V3    |
//   warpgroup 2:          | K1        | V0 | softmax 1 | V1 | K3    | V2 | softmax 3 | V3 |
//
//   Ki: the product of the queries and key tile i.   Vi: the product of the weights and the values of key tile i.
//
// The accumulator of 64 rows by 512 columns takes the registers of two warpgroups. A warpgroup publishes the running
// maximum and the weights of its key tiles in shared memory, and the other one continues from that maximum. So key
// tiles are accumulated in their order. While the second key tile of a pair is multiplied by its weights, the producer
// already copies the first key tile of the next pair. The last 64 columns of the queries are kept in registers.
//
// With split keys (decode()), the two blocks of a cluster may share a query tile; each of them takes half of the keys:
//
//   block 0:   | keys | outputs 0-255 | outputs 256-511 |     the blocks exchange maxima and sums through distributed
//   block 1:   | keys | outputs 0-255 | outputs 256-511 |     shared memory. Then block 0 receives the other's outputs
//                                                           0-255 and finishes these columns, block 1 columns 256-511
#pragma once

#include "prefill_hopper_producer.cuh"
#include "prefill_hopper_results.cuh"

KERNELS_BEGIN
namespace detail {

// The column of the keys at which the values begin, if the values are columns of the keys; -1 if they are not.
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

// H100, bfloat16, 128 heads, 4,096 keys: 32 sequences take 81 us, 64 sequences take 137 us. Alternatives that were
// slower:
//
// With cp.async, when the present design took 82 us (32 sequences) and 141 us (64 sequences):
// - three stages of 48 keys, whose weights overwrite the 64 columns that are no values: 89 and 148 us;
// - the same stages, and one warpgroup that makes all weights for two that accumulate outputs: 87 and 150 us.
//
// With TMA, 64 sequences:
// - multicast to both blocks of a cluster, which have two query tiles of a sequence: 217 us, as each stage waits for
//   both blocks.
//
// H200 (CUDA 13.0, 2026-11, ad hoc benchmark), 64 sequences: 137 us, or 122 us if only the first keys are copied.
// Variants:
// - multicast, with producers that tell each other only of free stages: 142 us;
// - logits of odd key tiles issued behind those of even ones, so that a softmax overlaps a product: 135 us, or 112 us
//   without copies; together with multicast 140 us;
// - values of even key tiles ahead of the logits of odd ones: 148 us;
// - 128 columns of the queries in registers: 139 us.
template <class P>
struct LatentParts : HopperItems<P, 64, 64, 2, 1, true, P::kSplits> {
  using Items = HopperItems<P, 64, 64, 2, 1, true, P::kSplits>;
  using Items::kRows, Items::kKeys, Items::kStages, Items::kItems, Items::kAligned;
  using typename Items::Item;
  using Kv = typename P::Kv;
  using TK = key_meeting_type<typename P::Q, Kv>;
  static constexpr int kGroups = 1, kDim = kLatentDim, kCols = kLatentCols, kRuns = kDim / 64;
  static constexpr int max_threads = 384, registers = 168;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kHeldRuns = 1;  // runs of 64 query columns that are kept in registers
  using Queries = TileLayout<kDim - kHeldRuns * 64, 128, kRows>;
  // A stage is two halves of its columns with a pair of barriers each: columns [0, kMiddle), and the rest.
  static constexpr int kMiddle = kCols / 2;
  using Keys = KvTiles<TK, KeyRun<Kv>, constant_stride<Kv>, kKeys, kMiddle, 128, true>;
  using Others = KvTiles<TK, KeyRun<Kv>, constant_stride<Kv>, kKeys, kDim - kMiddle, 128, true>;
  static constexpr bool kCopiesQueries = is_stored_as<typename P::Q, TK>, kTmaValues = false, kTmaResults = false;
  static constexpr int kRunBytes = Keys::Layout::kRunBytes, kStageBytes = Keys::kBytes + Others::kBytes,
                       kQueryBytes = Queries::kRuns * Queries::kRunBytes, kWeightBytes = kRows * kKeys * 2;

  struct Shared {
    // Of the key tile in a stage: the running maximum (of logits times log2(e)). sums: of the exponentials of each
    // consumer's own key tiles.
    float largest[kStages][kRows], sums[2][kRows];
    uint64_t states[kRows];  // running maximum and sum of the paired block's rows
    // mbarriers. The producer completes keys_full and item_full, consumers the others: group 0 alone releases
    // keys_empty[stage][0], both groups keys_empty[stage][1], and the group that made the weights completes
    // weights_full.
    uint64_t keys_full[kStages][2], keys_empty[kStages][2], weights_full[kStages], queries_full, sums_full,
        item_full[kItems], item_empty[kItems];
    uint64_t states_full, outputs_full, other_done;  // signalled by the paired block
    Item items[kItems];
    PrefillRows found_items[Items::kItemsPerSearch];
  };
  static constexpr int kTilesAt = (int(sizeof(Shared)) + kAligned - 1) / kAligned * kAligned;
  static constexpr int kSharedBytes = kTilesAt + kQueryBytes + kStages * (kStageBytes + kWeightBytes);
  static_assert(kSharedBytes <= 227 << 10, "what a block can have");
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  static void choose_schedule(PrefillGrid&, const P&) {}

  static __device__ __forceinline__ unsigned char* queries_of(unsigned char* memory, int, int) { return memory; }
  static __device__ __forceinline__ unsigned char* stage_of(unsigned char* memory, int stage) {
    return memory + kQueryBytes + stage * kStageBytes;
  }
  static __device__ __forceinline__ unsigned char* weights_of(unsigned char* memory, int stage) {
    return stage_of(memory, kStages) + stage * kWeightBytes;
  }
  // The first run of 64 columns in a key tile that belongs to the values: 0 or 1.
  static __device__ __forceinline__ int value_run(const P& p) { return value_column(p.kv) == 0 ? 0 : 1; }

  // Whether the two blocks of this cluster share a query tile. The block of rank 1 takes the second half of the keys,
  // and each block finishes half of the output columns.
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

// The producer warpgroup: copies each key tile as two halves of its columns.
template <class Parts>
struct LatentProducer : HopperItemProducer<Parts> {
  using P = typename Parts::Problem;
  using TK = typename Parts::TK;
  using Keys = typename Parts::Keys;
  using Others = typename Parts::Others;
  using Shared = typename Parts::Shared;
  using StagePhases = typename Parts::StagePhases;
  using Tiles = typename Parts::Tiles;
  using Parts::kKeys;

  static __device__ __forceinline__ void produce(const typename Parts::Params& params, Shared& shared,
                                                 unsigned char* memory) {
    arch::release_registers<Parts::kProducerRegisters>();
    const P& p = params.problem;
    StagePhases keys_to;
    Parts::each_item(params.grid, [&](int number, unsigned wanted, unsigned round) {
      PrefillRows rows;
      SeenKeys all;
      if (!HopperItemProducer<Parts>::load_item(params, shared, memory, number, wanted, round, rows, all)) return false;
      copy_keys(params, shared, memory, rows, Tiles(all), keys_to);
      return true;
    });
    arch::copy_async_commit();
    arch::copy_async_wait<0>();
  }

  static __device__ __forceinline__ void copy_keys(const typename Parts::Params& params, Shared& shared,
                                                   unsigned char* memory, const PrefillRows& rows, const Tiles& tiles,
                                                   StagePhases& keys_to) {
    const P& p = params.problem;
    const auto at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const int end_of_all = end_of_keys(p, rows);
    const TileBox<TK, kKeys, Keys::Layout::kRuns> boxes(params.boxes, tiles.low, end_of_all);
    const TileBox<TK, kKeys, Others::Layout::kRuns, Keys::Layout::kRuns> other_boxes(params.boxes, tiles.low,
                                                                                     end_of_all);
    const void *addresses[Keys::kLaneAddresses] = {}, *other_addresses[Keys::kLaneAddresses] = {};
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
      const int pos = tiles.begin + tile * kKeys, low = tiles.low - pos, end = tiles.end - pos,
                stage = StagePhases::stage(tile), parity = keys_to.at(tile);
      unsigned char* const to = Parts::stage_of(memory, stage);
      uint64_t(&full)[2] = shared.keys_full[stage];
      if (boxes.have(pos)) {
        const BoxCoordinates box = boxes.find(p.kv, rows.b, pos), other_box = other_boxes.find(p.kv, rows.b, pos);
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage][0], parity ^ 1);
        boxes.template load<false>(box, rows.kv_head, Parts::kDim, to, &full[0]);
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage][1], parity ^ 1);
        other_boxes.template load<false>(other_box, rows.kv_head, Parts::kDim, to + Keys::kBytes, &full[1]);
      } else {
        Keys keys(at, pos, 0, Parts::kMiddle, true);
        Others others(at, pos, Parts::kMiddle, Parts::kDim - Parts::kMiddle, true);
        if constexpr (!constant_stride<typename P::Kv>) {
          const int row = Keys::tile_row(lesser(int(threadIdx.x % 16), Keys::kWarpRows - 1));
          const auto run = at(int64_t(pos) + greater(low, lesser(row, end - 1)));
          addresses[0] = keys.address(run), other_addresses[0] = others.address(run);
        }
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage][0], parity ^ 1);
        keys.template load<false>(to, at, pos, low, end, addresses, 0);
        arch::mbarrier_arrive_copied(&full[0]);
        arch::mbarrier_wait_in_block(&shared.keys_empty[stage][1], parity ^ 1);
        others.template load<false>(to + Keys::kBytes, at, pos, low, end, other_addresses, 0);
        arch::mbarrier_arrive_copied(&full[1]);
      }
      keys_to.next(tile);
    }
  }
};

// A consumer warpgroup. Group 0 makes the weights of even key tiles and accumulates the first half of the output
// columns; group 1 makes the weights of odd key tiles and accumulates the second half.
template <class Parts, int kGroup>
struct LatentConsumer : Parts {
  using P = typename Parts::Problem;
  using TK = typename Parts::TK;
  using Shared = typename Parts::Shared;
  using Item = typename Parts::Item;
  using StagePhases = typename Parts::StagePhases;
  using Tiles = typename Parts::Tiles;
  using Parts::kKeys, Parts::kRunBytes;
  static constexpr int kCols = Parts::kCols / 2;
  // Lazy rescaling: outputs of 256 columns are rescaled only when the running maximum grows by more than kSlack (to the
  // base of 2). H100, 32 sequences of 4,096 keys, 128 heads: 82 us, and 84 us if every new maximum rescales.
  static constexpr int kSlack = 8;
  using Work = SoftmaxAccumulator<P, TK, 1, kKeys, kCols, 4 + 4 * kGroup, kSlack>;
  // the first wgmma step (16 columns) whose queries are in registers
  static constexpr int kFirstHeld = Parts::Queries::kRuns * 4;
  static constexpr int kOwnBarrier = Parts::kProducerBarrier + 1 + kGroup;
  // Partial results are staged where the keys were. This is safe as kItems is 1: the producer does not start the next
  // query tile before this one is finished.
  using Partials = PartialRows<kCols>;
  static_assert(2 * Partials::kBytes <= Parts::kStages * Parts::kStageBytes && Parts::kItems == 1, "room for results");

  // The query columns that are not in shared memory, as A fragments of wgmma.
  struct HeldQueries {
    uint32_t fragments[Parts::kHeldRuns * 4][4];
    __device__ __forceinline__ HeldQueries(const P& p, const PrefillRows& rows) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = Work::row(0, half);
        const bool there = row < rows.count;
        const auto place = rows.query_head(there ? row : 0);
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

  static __device__ __forceinline__ void consume(const typename Parts::Params& params, Shared& shared,
                                                 unsigned char* memory) {
    arch::claim_registers<Parts::kConsumerRegisters>();
    const P& p = params.problem;
    const int value_run = Parts::value_run(p) + kGroup * (kCols / 64);
    StagePhases at;
    Parts::each_item(params.grid, [&](int number, unsigned, unsigned) {
      const Item& item = Parts::wait_for_item(shared, number);
      if (item.rows.count == 0) return false;
      if constexpr (!Parts::kCopiesQueries) {
        if constexpr (kGroup == 0) {
          load_query_tile<TK, 64, typename Parts::Queries>(p, item.rows, 0, memory, Parts::kDim);
          arch::copy_async_commit();
          arch::copy_async_wait<0>();
          arch::async_proxy_fence();
          arch::mbarrier_arrive(&shared.queries_full);
        }
        arch::mbarrier_wait_in_block(&shared.queries_full, number % 2);
      }
      ConsumerLoop attending(p, shared, item, memory, at, value_run);
      attending.run();
      finish(p, shared, item.rows, memory, attending.state, number);
      arch::mbarrier_arrive(&shared.item_empty[0]);
      return true;
    });
  }

  // The loop over the key tiles that the rows see.
  struct ConsumerLoop {
    const P& p;
    Shared& shared;
    const Item& item;
    unsigned char* const memory;
    StagePhases& at;  // barrier phases of the stages
    const int first_value_run;
    const PrefillRows rows = item.rows;
    const Tiles tiles = Tiles(item.all);
    const HeldQueries held;
    int first_whole, last_whole;  // key tiles that all of the warp's rows see completely
    Work state;

    __device__ __forceinline__ ConsumerLoop(const P& problem, Shared& all, const Item& of, unsigned char* tiles_memory,
                                            StagePhases& stages_at, int value_run)
        : p(problem),
          shared(all),
          item(of),
          memory(tiles_memory),
          at(stages_at),
          first_value_run(value_run),
          held(problem, rows) {
      const SeenKeys seen = Parts::seen_by_rows(item, Work::first_row(), 16);
      first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);
    }

    __device__ __forceinline__ void run() {
      int tile = 0;
#pragma unroll 1
      for (; tile + 1 < tiles.count; tile += 2) pair(tile);
      if (tile == tiles.count) return;
      if constexpr (kGroup == 0) {
        add_own(tile);
      } else {
        begin_others(tile);
        end(tile);
      }
    }

   private:
    // Two key tiles, in the order that the picture at the head of this file shows.
    __device__ __forceinline__ void pair(int tile) {
      if constexpr (kGroup == 0) {
        add_own(tile);
        begin_others(tile + 1);
        end(tile + 1);
      } else {
        make_logits(tile + 1);
        begin_others(tile);
        const typename Work::MaxUpdate update = mask_and_update_max(tile + 1);
        end(tile);  // first, so that the producer can refill its stage
        weigh(tile + 1, update);
        begin_own(tile + 1, update);
        end(tile + 1);
      }
    }
    __device__ __forceinline__ void add_own(int tile) {
      make_logits(tile);
      const typename Work::MaxUpdate update = mask_and_update_max(tile);
      weigh(tile, update);
      begin_own(tile, update);
      end(tile);
    }

    __device__ __forceinline__ void make_logits(int tile) {
      const int stage = StagePhases::stage(tile), parity = at.at(tile);
      arch::mbarrier_wait_in_block(&shared.keys_full[stage][0], parity);
      arch::async_proxy_fence();
      constexpr int kQueryRun = Parts::Queries::kRunBytes / 16, kKeyRun = kRunBytes / 16;
      const uint64_t queries = arch::warpgroup_tile(arch::shared_address(memory)),
                     keys = arch::warpgroup_tile(arch::shared_address(Parts::stage_of(memory, stage)));
      auto& logits = state.logits[0];
      arch::pin(logits);
      arch::warpgroup_fence();
      KERNELS_UNROLL
      for (int i = 0; i < Parts::kRuns * 4; ++i) {
        if (i == Parts::kMiddle / 16) {
          arch::mbarrier_wait_in_block(&shared.keys_full[stage][1], parity);
          arch::async_proxy_fence();
          arch::warpgroup_fence();
        }
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
    // Masks the logits, and updates the running maximum.
    __device__ __forceinline__ typename Work::MaxUpdate mask_and_update_max(int tile) {
      const int pos = tiles.begin + tile * kKeys;
      return state.template mask_and_update_max<false>(
          p, rows, item.row_keys, pos, tile >= first_whole && tile < last_whole, state.fetch_masks(p, rows, pos));
    }
    // Makes the weights, and publishes them and the running maximum for the other group.
    __device__ __forceinline__ void weigh(int tile, const typename Work::MaxUpdate& update) {
      const int stage = StagePhases::stage(tile), lane = threadIdx.x % 32;
      for (int half = 0; half < 2 && lane % 4 == 0; ++half)
        shared.largest[stage][Work::row(0, half)] = state.largest[0][half];
      state.make_exponentials(update);
      state.round_weights(nullptr);
      __syncwarp();
      leave_weights(Parts::weights_of(memory, stage));
      arch::async_proxy_fence();
      arch::mbarrier_arrive(&shared.weights_full[stage]);
    }
    // Writes the weights to shared memory, where the other consumer uses them as the A operand of its product.
    __device__ __forceinline__ void leave_weights(unsigned char* to) const {
      const int lane = threadIdx.x % 32;
      const uint32_t first =
          arch::shared_address(to) + (Work::first_row() + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
      KERNELS_UNROLL
      for (int i = 0; i < kKeys / 16; ++i) arch::store_matrices(first ^ i * 32, state.weights[0][i]);
    }

    // begin_own() and begin_others() issue the product of the weights and values of a key tile: weights that this
    // warpgroup has made, or those of the other one. Earlier products must have completed, as both rescale the outputs
    // first.
    __device__ __forceinline__ void begin_own(int tile, const typename Work::MaxUpdate& update) {
      state.rescale_outputs(update);
      multiply(tile, [&](int i) -> const uint32_t(&)[4] { return state.weights[0][i]; });
    }
    __device__ __forceinline__ void begin_others(int tile) {
      const int stage = StagePhases::stage(tile);
      // Only group 0 releases the first half of the columns. Once it has, the producer may refill that half and its
      // barrier may be a phase ahead; so only group 0 may wait for it.
      if (kGroup == 0) arch::mbarrier_wait_in_block(&shared.keys_full[stage][0], at.at(tile));
      arch::mbarrier_wait_in_block(&shared.keys_full[stage][1], at.at(tile));
      arch::mbarrier_wait_in_block(&shared.weights_full[stage], at.at(tile));
      arch::async_proxy_fence();
      typename Work::MaxUpdate update{1, {}, false};
      const float* const largest = shared.largest[stage] + Work::row(0, 0);
      const float found[1][2] = {{largest[0], largest[8]}};
      state.raise_max(update, found);
      state.rescale_outputs(update);
      const uint64_t weights = arch::warpgroup_tile(arch::shared_address(Parts::weights_of(memory, stage)));
      multiply(tile, [&](int i) { return weights + i * 2; });
    }
    template <class Weights>
    __device__ __forceinline__ void multiply(int tile, const Weights& weights) {
      const uint64_t values = arch::warpgroup_tile(
          arch::shared_address(Parts::stage_of(memory, StagePhases::stage(tile))) + first_value_run * kRunBytes,
          kRunBytes);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      arch::warpgroup_fence();
      KERNELS_UNROLL
      for (int i = 0; i < kKeys / 16; ++i)
        arch::warpgroup_mma_transposed<TK>(state.outputs[0], weights(i), values + i * (16 * 128 / 16), true);
      arch::warpgroup_commit();
    }
    __device__ __forceinline__ void end(int tile) {
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      uint64_t(&empty)[2] = shared.keys_empty[StagePhases::stage(tile)];
      if (kGroup == 0 && threadIdx.x % 32 == 0) arch::mbarrier_arrive(&empty[0]);
      arch::mbarrier_arrive(&empty[1]);  // every thread, as each has read the running maxima
      at.next(tile);
    }
  };

  // The epilogue. Paired blocks exchange sums and half of their outputs.
  static __device__ __forceinline__ void finish(const P& p, Shared& shared, const PrefillRows& rows,
                                                unsigned char* memory, Work& work, int number) {
    const bool paired = Parts::paired();
    auto& outputs = work.outputs[0];
    // Tells the paired block that our stages are free. A pair gets a single query tile: with a second one, the states
    // that are read below could be overwritten too early.
    if (paired && threadIdx.x % 32 == 0) arch::mbarrier_arrive_there(Parts::in_other(&shared.other_done));
    float inverse[2];
    find_inverses(p, shared, rows, work, number, inverse);
    bool mine = true;
    if (paired) {
      work.rescale_outputs({1, {{inverse[0], inverse[1]}}, true});
      inverse[0] = inverse[1] = 1;
      mine = kGroup == int(arch::cluster_rank());
      if (mine)
        add_others(shared, outputs, memory + Parts::kQueryBytes, number);
      else
        send_outputs(shared, outputs, memory + Parts::kQueryBytes, number);
    }
    if (!mine) return;
    if (is_split<P>(rows)) {
      unsigned char* const tile = memory + Parts::kQueryBytes + kGroup * Partials::kBytes;
      return Partials::store_partials(p, rows, tile, Work::first_row(), kGroup * kCols, outputs, inverse, kOwnBarrier);
    }
    ResultRows<kCols, P>(p, rows, Work::first_row(), kGroup * kCols).put(p, rows, outputs, inverse);
  }

  // Computes the factors that normalize the outputs.
  static __device__ __forceinline__ void find_inverses(const P& p, Shared& shared, const PrefillRows& rows,
                                                       const Work& work, int number, float (&inverse)[2]) {
    const bool paired = Parts::paired(), writes = threadIdx.x % 4 == 0;
    SoftmaxState<float> states[2] = {work.state_of_row(0, 0), work.state_of_row(0, 1)};
    for (int half = 0; half < 2 && writes; ++half) shared.sums[kGroup][Work::row(0, half)] = states[half].l;
    arch::mbarrier_arrive(&shared.sums_full);
    arch::mbarrier_wait_in_block(&shared.sums_full, number % 2);
    for (int half = 0; half < 2; ++half)
      states[half].l = shared.sums[0][Work::row(0, half)] + shared.sums[1][Work::row(0, half)];
    if (paired) {
      if (kGroup == 0) {
        if (threadIdx.x % 128 == 0) arch::mbarrier_arrive_expect(&shared.states_full, int(sizeof(shared.states)));
        for (int half = 0; half < 2 && writes; ++half)
          arch::store_async(Parts::in_other(&shared.states[Work::row(0, half)]), bit_cast<uint64_t>(states[half]),
                            Parts::in_other(&shared.states_full));
      }
      arch::mbarrier_wait(&shared.states_full, number % 2);
    }
    for (int half = 0; half < 2; ++half) {
      const int row = Work::row(0, half);
      inverse[half] = 1;
      if (paired) inverse[half] = states[half].merge(bit_cast<SoftmaxState<float>>(shared.states[row])).mine;
      inverse[half] *= Work::finish_state(p, rows, row, states[half],
                                          kGroup == 0 && writes && (!paired || arch::cluster_rank() == 0));
    }
  }

  // send_outputs() writes outputs into the stages of the paired block, in thread order; add_others() of that block adds
  // them.
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
};

// kDim is always kLatentDim. It makes the type dependent in generic code, so that it is instantiated only where it is
// used.
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
          arch::mbarrier_init(&shared.keys_full[i][0], 128), arch::mbarrier_init(&shared.keys_full[i][1], 128);
          arch::mbarrier_init(&shared.keys_empty[i][0], 4), arch::mbarrier_init(&shared.keys_empty[i][1], 2 * 128);
          arch::mbarrier_init(&shared.weights_full[i], 128);
        }
        arch::mbarrier_init(&shared.queries_full, 128), arch::mbarrier_init(&shared.sums_full, 2 * 128);
        arch::mbarrier_init(&shared.item_full[0], 2 * 128), arch::mbarrier_init(&shared.item_empty[0], 2 * 128);
        arch::mbarrier_init(&shared.states_full, 1), arch::mbarrier_init(&shared.outputs_full, 1);
        arch::mbarrier_init(&shared.other_done, 8);
        arch::mbarrier_init_fence();
      }
      __syncthreads();
      if (Parts::paired()) {  // remote barriers must be initialized before anything is sent to them
        arch::cluster_arrive();
        arch::cluster_wait();
      }
      if (threadIdx.x < 128)
        LatentProducer<Parts>::produce(params, shared, memory);
      else if (threadIdx.x < 256)
        LatentConsumer<Parts, 0>::consume(params, shared, memory);
      else
        LatentConsumer<Parts, 1>::consume(params, shared, memory);
    }
  }
};

}  // namespace detail
KERNELS_END
