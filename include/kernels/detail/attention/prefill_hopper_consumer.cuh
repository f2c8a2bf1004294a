// Consumer warpgroups of the prefill kernels for sm_90a: logits, online softmax, product with the values, and the
// epilogue that hands results to the sink. prefill_hopper_parts.cuh describes the whole kernel.
//
// A consumer warpgroup (here: group) issues the logits of key tile i + 1 and the product with the values of key tile i,
// and computes the softmax of tile i + 1 while the latter product runs. Two or three groups fill the gaps of each
// other. (With kUsesStaleMax, a group waits for both products, and only the other groups' work overlaps its softmax.)
//
// The rest of this comment is notes for tuning. "A for B" means A where the present code takes B.
//
// Where the time goes. H100, 16 heads of 128 columns, clock cycles of a group (ad hoc benchmark):
// - A tile of 128 keys takes 2,390 cycles; the products of both groups alone would take 2,048.
// - In a variant that took 2,700, a group needed 810 to 1,170 to issue its products, as products with weights in
//   registers wait for each other; 340 to 490 from the first logit to the row maximum; and 980 to 1,110 for
//   exponentials, multiplications and roundings.
// - Prologue and epilogue of a query tile take 5,800 (2,048 keys, causal): 770 until the item is known, 1,210 for the
//   first logits, 1,290 for their softmax, 1,210 for the last product, 1,320 for the results.
//
// Keep the units for exponentials busy, as they are the bottleneck of the softmax:
// - Outputs are always rescaled, even by 1, so that there is no branch between the exponentials.
// - The compiler is made to place the first half of the first rows' exponentials ahead of the wait for the product with
//   the values. It then searches the second rows' maxima beside them and places the other exponentials behind the wait.
//   4,096 keys: 836 us; a quarter of the first rows' exponentials ahead of the wait 857, all of the first rows' 932, a
//   quarter of both rows' 880, everything 925.
// - A separate loop for tiles without masks, fences and rarer products gains nothing by itself.
//
// Keep the groups apart: if one group starts its products while those of the other have started, both wait and then
// compute exponentials at the same time.
// - Small changes, even of the producer, change the order of instructions and the time by up to 8 %. In a profile, the
//   first products of a loop show whether groups collide.
// - With 128 columns, turns at the products do not help (2,048 keys: 463 us for 433; with the turn passed on behind the
//   row maxima 495), nor does a first tile for which one group waits for the other (460).
//
// FlashAttention-3 (fa3_fwd 0.0.3) takes as long without masks. It has the same order of products and softmax, turns
// with 128 columns, a separate loop for tiles without masks, 176 keys per tile if there is no mask, a producer of one
// warp, and a dynamic tile scheduler for masks. Tried here on an H100, in alternation with the present code:
// - TMA copies issued by a single warp of the producer: 8 % slower, as the groups collide;
// - keys and values awaited as soon as the product before is done: 505 us for 443;
// - results stored by TMA row by row, not in boxes: 454 us for 432;
// - tiles with masks, which take 1,000 cycles longer, in the loop of those without (causal, 512 keys 4 % faster, 16,384
//   keys 1 % slower), or in a loop of their own (up to 1 % faster, but slower with results stored by TMA);
// - mask bits fetched ahead of the wait for logits: no difference.
//
// Tried on an H200, causal, 32 heads on 8 KV heads, 1,024 keys, 275 us:
// - the first logits of the next query tile beside the results of this one: 285;
// - products that leave out the half of a key tile that no row of a group sees: 271, 4,096 keys the same;
// - three groups and 96 or 80 keys per tile: 330, 295.
//
// Tried when all exponentials were ahead of the wait:
// - tiles of 160 keys: 4,096 keys 848 us for 833, 512 keys 181 for 144;
// - the next query tile's first weights beside this one's last product: 512 keys 171 us for 146;
// - turns at exponentials: 3 to 7 % slower with 64 columns and with 8 bits;
// - fences in the producer, more independent chains of maxima and sums: no difference;
// - results stored while the next tile's first logits are made: 512 keys 159 us for 142;
// - exponents that are only tested for one above the running maximum: with 64 columns 1,180 us for 1,150;
// - groups that begin each query tile together: 512 keys 143 us for 134;
// - results stored by 8 bytes per lane: 140 us for 134.
//
// Products of 8 bits, H200, 16 heads of 128 columns, 16,384 keys. Before weights were made ahead (kUsesStaleMax), a
// tile of 192 queries and 96 keys took 2,200 cycles; products and exponentials would take 1,150 each, and all traffic
// of shared memory as long. Without exponentials it was 10 % less, without maxima 8, without products 23, without the
// transposition of values 5.
// - Tried with weights made ahead (2,346 us): two groups, and 128 keys per tile (2,494), 192 (2,311; 1,024 keys 213 us
//   for 207) or 224 (2,323; 1,024 keys 209, causal 152 for 136).
// - Tried before that (2,408): no turns (2,611), turns at exponentials (2,424), more chains of maxima (no difference).
#pragma once

#include "prefill_hopper_parts.cuh"
#include "prefill_hopper_results.cuh"

KERNELS_BEGIN
namespace detail {

template <class Parts>
struct HopperConsumer : Parts {
  using P = typename Parts::Problem;
  using TK = typename Parts::TK;
  using TV = typename Parts::TV;
  using Key = typename Parts::Key;
  using Value = typename Parts::Value;
  using Queries = typename Parts::Queries;
  using Keys = typename Parts::Keys;
  using Params = typename Parts::Params;
  using Item = typename Parts::Item;
  using Shared = typename Parts::Shared;
  using StagePhases = typename Parts::StagePhases;
  using Tiles = typename Parts::Tiles;
  using Parts::k8Bit, Parts::kTmaResults, Parts::each_item, Parts::seen_by_rows, Parts::queries_of;
  using Parts::kDim, Parts::kCols, Parts::kKeys, Parts::kItems, Parts::kQueryStages, Parts::kTurns, Parts::kReducedDim;
  using Parts::kKeyScales, Parts::kValueScales, Parts::kStageBytes, Parts::kProducerBarrier;
  using Parts::kReducedCols, Parts::kProducers, Parts::kGroups, Parts::kConsumerRegisters, Parts::kCopiesQueries;
  using Parts::stages_of, Parts::scales_of, Parts::wait_for_item;

  // Where exponentials are the bottleneck, weights are computed from the running maximum of earlier tiles, before that
  // of this tile is known (weigh_with_stale_max()). H200, 32 heads of 64 columns, 4,096 keys: 967 us, without it 1,005;
  // causal 544 and 561; products of 8 bits 628 and 656, causal 344 and 361. With 128 columns products would wait for
  // weights: 956 us for 795.
  static constexpr bool kUsesStaleMax = Parts::kExponentialsBound && kProducers == 1 && !Value::scaled;
  // Lazy rescaling: weights may grow to 2^kSlack before outputs are rescaled to a new maximum. e4m3 weights end at 256.
  // H100, bfloat16, 16,384 tokens, 4,096 keys: 32 heads of 64 columns, 16 of 128 and 8 of 256 take 1,060, 815 and 722
  // us, and without slack 1,097, 842 and 757.
  //
  // kAlwaysRescales: rescale always, without a branch. Up to 128 columns of 16 bits this is faster still, with 16 heads
  // of 128 columns by 6 %. It is not with keys and values of 8 bits that are decoded: 16,384 keys 4,294 us, without
  // 4,468.
  static constexpr bool kAlwaysRescales = kCols <= 128 && !kUsesStaleMax && kProducers == 1;
  static constexpr int kSlack = k8Bit ? 3 : kAlwaysRescales ? 0 : 8;
  // Fragments of 16 rows per warp, 64 rows per warpgroup.
  using Work = SoftmaxAccumulator<P, TV, 1, kKeys, kCols, 4 * kProducers, kSlack, kAlwaysRescales>;
  // Whether plain tiles have a separate loop. With 256 columns, which have fewer tiles and more instructions, short
  // calls would take longer (512 keys 150 us for 143), and with 8 bits all calls would (16,384 keys up to 10 %).
  static constexpr bool kPlainLoop = Parts::kUsesTma && kCols <= 128 && !k8Bit;

  // Uniform in a warp, in a form that the compiler knows to be so.
  static __device__ __forceinline__ int group_of_warp() {
    return __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0) - kProducers;
  }
  // Named barriers: for each group the one that gives it its turn at the tensor cores, and one for its own threads.
  static __device__ __forceinline__ int turn(int group) { return kProducerBarrier + 1 + group; }
  static __device__ __forceinline__ int own(int group) { return kProducerBarrier + 1 + kGroups + group; }
  static __device__ __forceinline__ void wait_for_turn(int group) {
    if constexpr (kTurns) arch::named_barrier_sync(turn(group), 256);
  }
  static __device__ __forceinline__ void pass_turn(int group) {
    if constexpr (kTurns) arch::named_barrier_arrive(turn(group + 1 < kGroups ? group + 1 : 0), 256);
  }
  // Releases keys, values or queries. wgmma reads these for a whole warp, so one lane arrives; but scales are read by
  // each lane for itself.
  template <bool kScaled>
  static __device__ __forceinline__ void release(uint64_t* barrier) {
    if (kScaled || threadIdx.x % 32 == 0) arch::mbarrier_arrive(barrier);
  }

  static __device__ __forceinline__ void consume(const Params& params, Shared& shared, unsigned char* memory) {
    arch::claim_registers<kConsumerRegisters>();
    const P& p = params.problem;
    const int group = group_of_warp();
    StagePhases keys_at, values_at;
    if (group == kGroups - 1) pass_turn(group);
    each_item(params.grid, [&](int number, unsigned, unsigned) {
      const Item& item = wait_for_item(shared, number);
      if (item.rows.count == 0) return false;
      unsigned char* const queries = queries_of(memory, number, group);
      uint64_t* const queries_empty = &shared.queries_empty[number % kQueryStages];
      if (results_by_tma(params) && number > 0) {
        if (threadIdx.x % 128 == 0) arch::stored_boxes_wait();
        release<false>(&shared.queries_empty[(number - 1) % kQueryStages]);
      }
      if constexpr (!kCopiesQueries) {
        arch::named_barrier_sync(own(group), 128);
        load_query_tile<TK, 64, Queries>(p, item.rows, group * 64, queries, int(p.shape.dim));
        arch::copy_async_commit();
        arch::copy_async_wait<0>();
        arch::async_proxy_fence();
        arch::named_barrier_sync(own(group), 128);
      }
      if (group * 64 < item.rows.count) {
        ConsumerLoop attending(params, shared, item, group, queries, stages_of(memory), keys_at, values_at);
        attending.run(queries_empty);
        // Computed while the last product runs.
        const Work& state = attending.state;
        const float inverse[2] = {state.finish_row(p, item.rows, 0, 0), state.finish_row(p, item.rows, 0, 1)};
        if (stores_by_tma(params, item.rows, group)) {
          attending.end();
          put_box(params, item, group, arch::shared_address(queries), state, inverse);
        } else {
          const ResultRows<kCols, P> results(p, item.rows, Work::first_row(), 0);
          attending.end();
          results.put(p, item.rows, state.outputs[0], inverse);
        }
      } else {
        if (kCopiesQueries && !results_by_tma(params)) release<false>(queries_empty);
        skip_tiles(shared, group, 0, Tiles(item.all).count, keys_at, values_at);
      }
      arch::mbarrier_arrive(&shared.item_empty[number % kItems]);
      return true;
    });
    if (results_by_tma(params) && threadIdx.x % 128 == 0) arch::stored_boxes_wait();
    if (group == 0) wait_for_turn(group);  // matches the last group's last pass_turn()
  }

  // Whether results are staged where the queries of their tile were and stored by TMA. A group then releases that place
  // when it gets its next query tile.
  static __device__ __forceinline__ bool results_by_tma(const Params& params) {
    if constexpr (kTmaResults)
      return params.boxes.result_rows > 0;
    else return false;
  }
  // Whether a group's results do: queries of one head, all 64, as a box would write other rows to the next sequence.
  static __device__ __forceinline__ bool stores_by_tma(const Params& params, const PrefillRows& rows, int group) {
    return results_by_tma(params) && rows.pack.divisor == 1 && rows.count - group * 64 >= 64 && !is_split<P>(rows);
  }
  static __device__ __forceinline__ void put_box(const Params& params, const Item& item, int group, uint32_t tile,
                                                 const Work& state, const float (&factor)[2]) {
    if constexpr (kTmaResults) {
      arch::named_barrier_sync(own(group), 128);  // all threads have finished with the queries
      stage_results<result_type<P>, kCols>(tile, state.outputs[0], factor);
      arch::async_proxy_fence();
      arch::named_barrier_sync(own(group), 128);
      if (threadIdx.x % 128 != 0) return;
      const PrefillRows& rows = item.rows;
      const int first = int(rows.token) + rows.first + group * 64;
      KERNELS_UNROLL
      for (int col = 0; col < kCols; col += 64)
        arch::store_box(params.boxes.results, rows.first_head * kCols + col, first, 0, 0, tile + col * 128);
      arch::stored_boxes_commit();
    }
  }

  // Releases the keys and values of tiles that none of the group's rows sees.
  static __device__ __forceinline__ void skip_tiles(Shared& shared, int group, int first, int end, StagePhases& keys_at,
                                                    StagePhases& values_at) {
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      const int stage = StagePhases::stage(tile);
      if (tile > 0) wait_for_turn(group), pass_turn(group);
      arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
      release<Key::scaled>(&shared.keys_empty[stage]);
      arch::mbarrier_wait_in_block(&shared.values_full[stage], values_at.at(tile));
      release<Value::scaled>(&shared.values_empty[stage]);
      keys_at.next(tile), values_at.next(tile);
    }
  }

  // The main loop of a group over the key tiles that its rows see.
  struct ConsumerLoop {
    const P& p;
    Shared& shared;
    const Item& item;
    const int group;
    const bool keeps_place;  // the place of the queries is reused for results
    const bool keys_by_tma;  // TMA copies key tiles that exist completely
    // Descriptors for wgmma: of the queries, and of the keys and values in the first stage.
    const uint64_t query_tile, keys_tile, values_tile;
    StagePhases &keys_at, &values_at;
    const PrefillRows rows = item.rows;
    const Tiles tiles = Tiles(item.all);
    const int dim = int(p.shape.dim), cols = int(p.shape.value_dim());
    int last = tiles.count - 1;   // the last key tile that any row of the group sees, or the first tile
    int first_whole, last_whole;  // key tiles that all of the warp's rows see completely
    // The end of the key tiles that exist completely.
    const int end_by_tma = keys_by_tma ? tiles.tiles_in(tiles.end, 0) : 0;
    int first_plain, last_plain;  // key tiles without masks, fences and rarer products
    Work state;

    __device__ __forceinline__ ConsumerLoop(const Params& params, Shared& memory, const Item& of, int group_,
                                            const unsigned char* queries, const unsigned char* stages,
                                            StagePhases& keys, StagePhases& values)
        : p(params.problem),
          shared(memory),
          item(of),
          group(group_),
          keeps_place(results_by_tma(params)),
          keys_by_tma(by_tma(params)),
          query_tile(arch::warpgroup_tile(arch::shared_address(queries))),
          keys_tile(arch::warpgroup_tile(arch::shared_address(stages))),
          values_tile(arch::warpgroup_tile(arch::shared_address(stages) + Keys::kBytes, k8Bit ? 16 : kKeys * 128)),
          keys_at(keys),
          values_at(values) {}

    // The group releases the queries as soon as it has the last logits, unless it reuses their place. Nobody waits for
    // queries that the group has read itself.
    __device__ __forceinline__ void run(uint64_t* queries_empty) {
      if (last < 0) return release_queries(queries_empty);
      arch::pin(state.logits[0]);
      begin_logits<false>(0);
      const SeenKeys of_group = seen_by_rows(item, group * 64, 64), seen = seen_by_rows(item, Work::first_row(), 16);
      last = greater(0, tiles.tiles_in(of_group.any_end, kKeys - 1) - 1);
      first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);
      first_plain = tiles.tiles_in(of_group.all_begin, kKeys - 1);
      last_plain = keys_by_tma && all_columns() && p.scale > kSmallScale ? tiles.tiles_in(of_group.all_end, 0) - 1 : -1;
      const auto masks = fetch_masks(0);
      arch::warpgroup_wait<0>();
      arch::pin(state.logits[0]);
      if (last == 0) release_queries(queries_empty);
      scale_logits(0);
      release<Key::scaled>(&shared.keys_empty[0]);
      state.make_exponentials(mask_and_update_max<false>(0, masks));
      round_weights(0);
#pragma unroll 1
      for (int tile = 0; tile < last; ++tile) {
        if constexpr (kPlainLoop) {
#pragma unroll 1
          for (; tile >= first_plain && tile < lesser(last, last_plain); ++tile) step<true>(tile, queries_empty);
          if (tile == last) break;
        }
        step<false>(tile, queries_empty);
      }
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs<false>(last);
    }
    // Waits for the last product, which run() has issued, and releases key tiles that only other groups see.
    __device__ __forceinline__ void end() {
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]);
      if (last >= 0) release<Value::scaled>(&shared.values_empty[StagePhases::stage(last)]);
      skip_tiles(shared, group, last + 1, tiles.count, keys_at, values_at);
    }

   private:
    static __device__ __forceinline__ bool by_tma(const Params& params) {
      if constexpr (Parts::kUsesTma)
        return params.boxes.rows > 0;
      else return false;
    }
    __device__ __forceinline__ void release_queries(uint64_t* queries_empty) const {
      if (kCopiesQueries && !keeps_place) release<false>(queries_empty);
    }
    // Whether TMA has surely copied the whole tile. Of the first tile, threads may have copied or zeroed some rows.
    __device__ __forceinline__ bool is_by_tma(int tile) const { return tile > 0 && tile < end_by_tma; }
    __device__ __forceinline__ bool all_columns() const {
      return (kDim == kReducedDim || dim > kReducedDim) && (kCols == kReducedCols || cols > kReducedCols);
    }
    // An iteration: the product with the values of a tile, and the logits and weights of the next one. kPlain: both are
    // plain.
    template <bool kPlain>
    __device__ __forceinline__ void step(int tile, uint64_t* queries_empty) {
      if constexpr (kUsesStaleMax)
        step_with_stale_max<kPlain>(tile, queries_empty);
      else overlapped_step<kPlain>(tile, queries_empty);
    }
    // No overlap within a group: the new weights take the registers of those that the product reads.
    template <bool kPlain>
    __device__ __forceinline__ void step_with_stale_max(int tile, uint64_t* queries_empty) {
      wait_for_turn(group);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs<kPlain>(tile);
      arch::pin(state.logits[0]);
      begin_logits<kPlain>(tile + 1);
      pass_turn(group);
      const auto masks = fetch_masks(tile + 1);
      arch::warpgroup_wait<0>();
      arch::pin(state.logits[0]), arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      release<Value::scaled>(&shared.values_empty[StagePhases::stage(tile)]);
      if (tile + 1 == last) release_queries(queries_empty);
      scale_logits(tile + 1);
      release<Key::scaled>(&shared.keys_empty[StagePhases::stage(tile + 1)]);
      typename Work::MaxUpdate update = mask_and_update_max<kPlain, true>(tile + 1, masks);
      state.weigh_with_stale_max(update);
    }
    // Exponentials overlap the product with the values.
    template <bool kPlain>
    __device__ __forceinline__ void overlapped_step(int tile, uint64_t* queries_empty) {
      wait_for_turn(group);
      arch::pin(state.logits[0]);
      begin_logits<kPlain>(tile + 1);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs<kPlain>(tile);
      pass_turn(group);
      const auto masks = fetch_masks(tile + 1);
      arch::warpgroup_wait<1>();
      arch::pin(state.logits[0]);
      if (tile + 1 == last) release_queries(queries_empty);
      scale_logits(tile + 1);
      release<Key::scaled>(&shared.keys_empty[StagePhases::stage(tile + 1)]);
      const typename Work::MaxUpdate update = mask_and_update_max<kPlain>(tile + 1, masks);
      // Makes the compiler place these exponentials ahead of the wait: it has to believe that the release below needs
      // their sum.
      constexpr int kEights = kKeys / 8, kAhead = kEights / 2;
      state.template make_exponentials<0, kAhead>(update, 0, 0);
      const unsigned none = unsigned(p.shape.heads >> 32);  // always 0, but the compiler does not know
      if ((__float_as_uint(state.sums[0][0]) & none) != 0) release<Key::scaled>(&shared.keys_empty[0]);
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      release<Value::scaled>(&shared.values_empty[StagePhases::stage(tile)]);
      if constexpr (kAlwaysRescales) state.rescale_outputs(update);
      state.template make_exponentials<kAhead, kEights>(update, 0, 0);
      state.template make_exponentials<0, kEights>(update, 0, 1);
      if constexpr (!kAlwaysRescales) state.rescale_outputs(update);
      round_weights(tile + 1);
    }

    __device__ __forceinline__ void scale_logits(int tile) {
      if constexpr (Key::scaled) {
        const float* const scales =
            scales_of<kKeyScales>(shared) + StagePhases::stage(tile) * kKeys + threadIdx.x % 4 * 2;
        state.each([&](int, int j, int x, float& logit) { logit *= scales[j * 8 + x % 2]; });
      }
    }
    // Scales of values arrive together with the values.
    __device__ __forceinline__ void round_weights(int tile) {
      if constexpr (Value::scaled)
        arch::mbarrier_wait_in_block(&shared.values_full[StagePhases::stage(tile)], values_at.at(tile));
      state.round_weights(scales_of<kValueScales>(shared) + StagePhases::stage(tile) * kKeys);
    }
    __device__ __forceinline__ auto fetch_masks(int tile) const {
      return state.fetch_masks(p, rows, tiles.begin + tile * kKeys);
    }
    template <bool kPlain, bool kAhead = false, class Masks>
    __device__ __forceinline__ typename Work::MaxUpdate mask_and_update_max(int tile, const Masks& masks) {
      return state.template mask_and_update_max<kPlain, kAhead>(p, rows, item.row_keys, tiles.begin + tile * kKeys,
                                                                kPlain || (tile >= first_whole && tile < last_whole),
                                                                masks);
    }

    // Both issue a product without waiting for it: queries times the keys of a tile, and weights times the values of a
    // tile.
    template <bool kPlain>
    __device__ __forceinline__ void begin_logits(int tile) {
      const int stage = StagePhases::stage(tile);
      arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
      keys_at.next(tile);
      if (!kPlain && !(k8Bit && is_by_tma(tile))) arch::async_proxy_fence();
      const uint64_t keys = arch::advance_tile(keys_tile, stage * (kStageBytes / 16));
      if (kPlain || kDim == kReducedDim || dim > kReducedDim)
        multiply_keys<kDim>(keys);
      else
        multiply_keys<kReducedDim>(keys);
    }
    template <bool kPlain>
    __device__ __forceinline__ void begin_outputs(int tile) {
      const int stage = StagePhases::stage(tile);
      arch::mbarrier_wait_in_block(&shared.values_full[stage], values_at.at(tile));
      values_at.next(tile);
      // 8-bit values are transposed by the producer, which has the fence
      if constexpr (!kPlain && !k8Bit) arch::async_proxy_fence();
      const uint64_t values = arch::advance_tile(values_tile, stage * (kStageBytes / 16));
      // Products and their commit are in one branch. Otherwise the compiler moves the commit to another product.
      constexpr int kMost = kCols < 128 ? kCols : 128;
      if (!kPlain && kCols > kReducedCols && cols <= kReducedCols) {
        arch::warpgroup_fence();
        multiply_values<0, kReducedCols>(values);
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
        arch::warpgroup_mma<TK>(state.logits[0], arch::advance_tile(query_tile, run * (64 * 128 / 16) + step),
                                arch::advance_tile(keys, run * (kKeys * 128 / 16) + step), i > 0);
      }
      arch::warpgroup_commit();
    }
    // Accumulates columns [kFirst, kFirst + kCount) of the outputs.
    template <int kFirst, int kCount>
    __device__ __forceinline__ void multiply_values(uint64_t values) {
      auto& outputs = reinterpret_cast<float(&)[kCount / 8][4]>(state.outputs[0][kFirst / 8]);
      KERNELS_UNROLL
      for (int i = 0; i < kKeys / Work::kStep; ++i) {
        if constexpr (k8Bit)
          arch::warpgroup_mma_e4m3(outputs, state.weights[0][i], arch::advance_tile(values, i * 2), true);
        else
          arch::warpgroup_mma_transposed<TV>(
              outputs, state.weights[0][i],
              arch::advance_tile(values, kFirst / 64 * (kKeys * 128 / 16) + i * (16 * 128 / 16)), true);
      }
    }
  };
};

}  // namespace detail
KERNELS_END
