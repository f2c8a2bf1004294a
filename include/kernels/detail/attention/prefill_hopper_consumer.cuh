// The consumers of attention for sm_90a: logits, their softmax, the product with the values, and results on their way
// to the sink.
//
// Where the time of a tile goes (H200, 16 heads of 128 columns, 2,048 keys; cycles of a group, from the samples of
// Nsight Compute, which holds the clock at 1,350 MHz): waits for keys and values and their fences 360, products 730,
// the largest logits 670, exponentials 1,010, rounding and shrinking 290. That is 3,060, while the products of both
// groups would take 2,048: instructions of wgmma wait for those ahead of them before they are issued, so that hardly
// any of a group's own softmax runs beside its own products; the other group's does. Tried, in thousands of cycles for
// the whole call, which takes 765: groups that take turns at exponentials 791 (at products: no difference in time);
// fences in the producer 762, more chains of maxima and sums 762; no product beside the group's own softmax, which
// then is one sequence of instructions and takes two thirds of the cycles, 773 to 888. From 2,048 keys on the clock
// falls under the load, too: 4,096 keys take 1,000 us, with inputs of zeros 805.
//
// The same on an H100, with 4,096 keys that the TMA unit copies: 2,836 cycles for a tile, of which 570 until the
// instructions of products have been issued, 440 of waits for keys, values and fences, 530 to the largest logits, and
// 1,040 for exponentials, of which both groups together need 1,024. Tried there, before there was slack (below): tiles
// of 160 keys (4,096 keys take 848 us for 833, 512 keys 181 for 144); the next tile of queries' first weights beside
// this one's last product (512 keys 171 us for 146); groups that take turns at exponentials instead of products, with
// 64 columns and with 8 bits (3 to 7 % slower).
//
// Tried on an H200, in turns with what is here, 16 heads of 128 columns: results that go out while the next tile's
// first logits are made (512 keys 159 us for 142, 4,096 keys 940 for 916); exponents that are only looked at for one
// above the largest so far, by their signs, which spares the search for the largest logit (4,096 keys 892 us for 900,
// but with 64 columns 1,180 for 1,150); a fence only for tiles that threads have copied (885 us for 891, causal and
// 1,024 keys 165 for 164); groups that begin each tile of queries together (512 keys 143 us for 134); results by 8
// bytes a lane (140 us for 134).
//
// FlashAttention-3 (fa3_fwd 0.0.3), 128 columns and causal masks, takes 13 to 18 % fewer cycles from 4,096 keys on. By
// its machine code, a tile without a mask is 469 instructions, here about 480 are executed of 806: there a loop of its
// own has the masks. What stands there between one tile's last exponential and the next tile's first product is a wait
// for keys, that of one group alone, a turn, and some 15 instructions for addresses; here it is a wait, four loads from
// shared memory, a fence of all of a thread's memory (MEMBAR.ALL.CTA), a branch for fewer columns and some 25 for
// addresses, most of which wait for each other; and so once more ahead of the second product. And there three quarters
// of the exponentials come behind the wait for the product with values, beside the other group's products, whose turn
// it is.
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
  using Parities = typename Parts::Parities;
  using Tiles = typename Parts::Tiles;
  using Parts::kDim, Parts::kCols, Parts::kKeys, Parts::kItems, Parts::kQueryStages, Parts::kTurns, Parts::kFewer;
  using Parts::kFewerCols, Parts::kProducers, Parts::kGroups, Parts::kConsumerRegisters, Parts::kCopiesQueries;
  using Parts::kKeyScales, Parts::kValueScales, Parts::kStageBytes, Parts::kProducerBarrier;
  using Parts::kInEight, Parts::each_item, Parts::seen_by_rows, Parts::queries_of, Parts::stages_of;
  using Parts::scales_of, Parts::wait_for_item;

  // Weights may be up to 2^kSlack before outputs are brought under a larger logit; those of 8 bits, which are 256
  // already, leave no room for that. H100, bfloat16, 16,384 tokens, 4,096 keys: 32 heads of 64 columns, 16 of 128 and 8
  // of 256 take 1,060, 815 and 722 us, and without slack 1,097, 842 and 757.
  static constexpr int kSlack = kInEight ? 0 : 8;
  // The fragments of 16 rows for each warp, of 64 for a warpgroup.
  using Work = PrefillWork<P, TV, 1, kKeys, kCols, 4 * kProducers, kSlack>;
  template <int kValue>
  using Int = std::integral_constant<int, kValue>;

  // The compiler knows that all lanes have it.
  static __device__ __forceinline__ int group_of_warp() {
    return __shfl_sync(0xffffffffu, int(threadIdx.x / 128), 0) - kProducers;
  }
  // Named barriers: the turn of each group at its products, and one for each group's own threads.
  static __device__ __forceinline__ int turn(int group) { return kProducerBarrier + 1 + group; }
  static __device__ __forceinline__ int own(int group) { return kProducerBarrier + 1 + kGroups + group; }
  static __device__ __forceinline__ void wait_for_turn(int group) {
    if constexpr (kTurns) arch::named_barrier_sync(turn(group), 256);
  }
  static __device__ __forceinline__ void pass_turn(int group) {
    if constexpr (kTurns) arch::named_barrier_arrive(turn(group + 1 < kGroups ? group + 1 : 0), 256);
  }
  // Lets go of keys, values or queries. Products have read these for a whole warp, but scales each lane for itself.
  template <bool kScaled>
  static __device__ __forceinline__ void release(uint64_t* barrier) {
    if (kScaled || threadIdx.x % 32 == 0) arch::mbarrier_arrive(barrier);
  }

  static __device__ __forceinline__ void consume(const Params& params, Shared& shared, unsigned char* memory) {
    arch::more_registers<kConsumerRegisters>();
    const P& p = params.problem;
    const int group = group_of_warp();
    Parities keys_at, values_at;
    if (group == kGroups - 1) pass_turn(group);
    each_item(params.grid, [&](int number, unsigned) {
      const Item& item = wait_for_item(shared, number);
      if (item.rows.count == 0) return false;
      unsigned char* const queries = queries_of(memory, number, group);
      uint64_t* const queries_empty = &shared.queries_empty[number % kQueryStages];
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
        attending.run(queries_empty);
        // While the last product runs.
        const Work& state = attending.state;
        const float inverse[2] = {state.finish_row(p, item.rows, 0, 0), state.finish_row(p, item.rows, 0, 1)};
        const ResultRows<kCols, P> results(p, item.rows, Work::first_row(), 0);
        attending.end();
        results.put(p, item.rows, state.outputs[0], inverse);
      } else {
        release<false>(queries_empty);
        pass_by(shared, group, 0, Tiles(item.all).count, keys_at, values_at);
      }
      arch::mbarrier_arrive(&shared.item_empty[number % kItems]);
      return true;
    });
    if (group == 0) wait_for_turn(group);  // that of the last group's last product
  }

  // A group lets go of keys and values of tiles that none of its rows sees.
  static __device__ __forceinline__ void pass_by(Shared& shared, int group, int first, int end, Parities& keys_at,
                                                 Parities& values_at) {
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      const int stage = Parities::stage(tile);
      if (tile > 0) wait_for_turn(group), pass_turn(group);
      arch::mbarrier_wait_in_block(&shared.keys_full[stage], keys_at.at(tile));
      release<Key::scaled>(&shared.keys_empty[stage]);
      arch::mbarrier_wait_in_block(&shared.values_full[stage], values_at.at(tile));
      release<Value::scaled>(&shared.values_empty[stage]);
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
    const int dim = int(p.shape.dim), cols = int(p.shape.value_dim());
    int last = tiles.count - 1;   // that any of the group's rows sees, or the first
    int first_whole, last_whole;  // tiles that the warp's rows see as a whole
    Work state;

    __device__ __forceinline__ Attending(const P& problem, Shared& memory, const Item& of, int group_,
                                         const unsigned char* queries, const unsigned char* stages_memory,
                                         Parities& keys, Parities& values)
        : p(problem),
          shared(memory),
          item(of),
          group(group_),
          stages(arch::shared_address(stages_memory)),
          query_tile(arch::warpgroup_tile(arch::shared_address(queries))),
          keys_at(keys),
          values_at(values) {}

    // The group lets go of the queries as soon as it has the last logits.
    __device__ __forceinline__ void run(uint64_t* queries_empty) {
      if (last < 0) return release<false>(queries_empty);
      arch::pin(state.logits[0]);
      begin_logits(0);
      last = greater(0, tiles.tiles_in(seen_by_rows(item, group * 64, 64).any_end, kKeys - 1) - 1);
      const SeenKeys seen = seen_by_rows(item, Work::first_row(), 16);
      first_whole = tiles.tiles_in(seen.all_begin, kKeys - 1), last_whole = tiles.tiles_in(seen.all_end, 0);
      arch::warpgroup_wait<0>();
      arch::pin(state.logits[0]);
      if (last == 0) release<false>(queries_empty);
      scale_logits(0);
      release<Key::scaled>(&shared.keys_empty[0]);
      state.make_exponentials(look_at(0));
      round_weights(0);
#pragma unroll 1
      for (int tile = 0; tile < last; ++tile) step(tile, queries_empty);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs(last);
    }
    // Waits for the last product, which run() has begun, and lets go of tiles that other groups see.
    __device__ __forceinline__ void end() {
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]);
      if (last >= 0) release<Value::scaled>(&shared.values_empty[Parities::stage(last)]);
      pass_by(shared, group, last + 1, tiles.count, keys_at, values_at);
    }

   private:
    // The product with the values of a tile, and meanwhile the next tile's logits and exponentials.
    __device__ __forceinline__ void step(int tile, uint64_t* queries_empty) {
      wait_for_turn(group);
      arch::pin(state.logits[0]);
      begin_logits(tile + 1);
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      begin_outputs(tile);
      pass_turn(group);
      arch::warpgroup_wait<1>();
      arch::pin(state.logits[0]);
      if (tile + 1 == last) release<false>(queries_empty);
      scale_logits(tile + 1);
      release<Key::scaled>(&shared.keys_empty[Parities::stage(tile + 1)]);
      const typename Work::Look look = look_at(tile + 1);
      state.make_exponentials(look);
      // All exponentials come ahead of the wait: what the compiler sees to be ahead of it seems to need their sums.
      const unsigned none = unsigned(p.shape.heads >> 32);  // 0, which the compiler does not know
      if (((__float_as_uint(state.sums[0][0]) | __float_as_uint(state.sums[0][1])) & none) != 0)
        release<Key::scaled>(&shared.keys_empty[0]);
      arch::warpgroup_wait<0>();
      arch::pin(state.outputs[0]), arch::pin(state.weights[0]);
      release<Value::scaled>(&shared.values_empty[Parities::stage(tile)]);
      state.shrink_outputs(look);
      round_weights(tile + 1);
    }

    __device__ __forceinline__ void scale_logits(int tile) {
      if constexpr (Key::scaled) {
        const float* const scales = scales_of<kKeyScales>(shared) + Parities::stage(tile) * kKeys + threadIdx.x % 4 * 2;
        state.each([&](int, int j, int x, float& logit) { logit *= scales[j * 8 + x % 2]; });
      }
    }
    // Scales of values come with these.
    __device__ __forceinline__ void round_weights(int tile) {
      if constexpr (Value::scaled)
        arch::mbarrier_wait_in_block(&shared.values_full[Parities::stage(tile)], values_at.at(tile));
      state.round_weights(scales_of<kValueScales>(shared) + Parities::stage(tile) * kKeys);
    }
    __device__ __forceinline__ typename Work::Look look_at(int tile) {
      return state.template look_at<false>(p, rows, item.row_keys, tiles.begin + tile * kKeys,
                                           tile >= first_whole && tile < last_whole);
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
      const uint64_t values =
          arch::warpgroup_tile(stages + stage * kStageBytes + Keys::kBytes, kInEight ? 16 : kKeys * 128);
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
        arch::warpgroup_mma<TK>(state.logits[0], query_tile + run * (64 * 128 / 16) + step,
                                keys + run * (kKeys * 128 / 16) + step, i > 0);
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
        else
          arch::warpgroup_mma_turned<TV>(outputs, state.weights[0][i],
                                         values + kFirst / 64 * (kKeys * 128 / 16) + i * (16 * 128 / 16), true);
      }
    }
  };
};

}  // namespace detail
KERNELS_END
