// Decoding on tensor cores. Rows of queries take the side of mma.sync that has 8 columns; keys, and columns of values,
// take the side that has 16 rows. So a few rows waste little of an instruction. The kernel around it, and how the work
// is split, is in flash_decode.cuh.
//
//   logits:  A = 16 keys x 16 columns of a head,         B = those columns of 8 rows of queries
//   output:  A = 16 columns of the values x 16 keys,     B = the weights of 8 rows
//
//   pipeline of a warp:  | keys 16 x dim, values 16 x v_dim | next 16 | ... |     1 to 6 stages, by cp.async. The warps
//                                                                                 of two teams that have the same keys
//                                                                                 share a pipeline
//
// With short rows, as those of quantized keys are, a stage has two or four tiles of 16 keys. The compiler interleaves
// their instructions, and what a step costs besides its products is paid once for all of them.
//
// Keys and values of 8 and 4 bits stay quantized in shared memory and are decoded on the way to mma (decode_side.cuh).
// Weights are rounded to 16 bits. With kParts = 2 the rounding error is multiplied as a second 16-bit number, and so is
// that of queries whose type is not the keys': results are then as good as in float.
#pragma once

#include "../../core/attention_plan.h"
#include "../../tuning/attention.h"
#include "decode_ring.cuh"

KERNELS_BEGIN
namespace detail {

// Tiles of 16 keys in a stage, if `room` tiles have room. With several tiles of rows, registers suffice for one only.
constexpr int key_tiles(int room, int row_tiles) { return row_tiles > 1 || room < 2 ? 1 : room < 4 ? 2 : 4; }

// kTiles * 8 rows for each of kTeams teams, and heads of up to kDim columns for keys and kVDim for values. kHeads = 2:
// an item has two KV heads, whose columns are side by side, so that rows of both heads share a tile. Queries are zero
// for the columns of the other head's keys, and weights are zero for those of the other head's values.
template <class P, int kDim, int kVDim, int kTiles, int kParts, int kHeads = 1, int kTeams = 1>
class TensorRows {
 public:
  using Keys = DecodeSide<KeyRun<typename P::Kv>, kDim, kHeads>;
  using Values = DecodeSide<ValueRun<typename P::Kv>, kVDim, kHeads>;
  // Whether a block has 227 KB of shared memory, not 99.
  static constexpr bool has_much(int architecture) { return architecture >= 90 && architecture < 120; }
  static constexpr int warps_of(int architecture) {
    constexpr int all = kTeams * head_size(kDim).decode_warps, most = all < 8 ? all : 8;
    return most > 4 && !has_much(architecture) ? 4 : most;
  }
  static constexpr int warps = warps_of(arch::kCompiledFor), rows = 8 * kTiles * kTeams, parts = kParts, heads = kHeads,
                       registers = 255;
  static_assert(kHeads == 1 || kTeams == 1, "rows of two heads stand in one tile");
  static constexpr bool fills_shared = true;
  static constexpr bool short_of_registers = kTeams > 1 || kHeads > 1;
  static constexpr bool kScaled = Keys::scaled || Values::scaled;
  // Whether there is a variant that copies old keys before the preceding kernel has ended. With scales, or more rows,
  // registers are short: int4 in pages took 171 us instead of 140 (H200, 64 sequences of 4,096 keys).
  static constexpr bool fills_early = rows == 8 && is_kv_cache<typename P::Kv> && !kScaled;
  using Schedule = DecodeSchedule<P, warps / kTeams * kDecodeKeys>;
  using Cursor = typename Schedule::Cursor;
  // Tiles of 16 keys in a stage.
  static constexpr int kKeyTiles = key_tiles(tuning::kDecodeStageBytes / (Keys::kBytes + Values::kBytes), kTiles);
  using Steps = WarpKeys<warps / kTeams, kKeyTiles, kTeams>;
  using KeyType = key_meeting_type<typename P::Q, typename P::Kv>;
  // Codes of 8 and 4 bits are exact in half. Weights fit the range of half, as the value scales that are multiplied
  // into them are divided by the largest one so far.
  using ValueType = std::conditional_t<Values::coded, half, typename Values::Code>;
  static constexpr int kQueryParts = std::is_same<tensor_type<typename P::Q>, KeyType>::value ? 1 : kParts;

  static constexpr int kStageBytes = kKeyTiles * (Keys::kBytes + Values::kBytes);
  // In floats; padded against bank conflicts where there is room. The sums of 8 rows of each team reuse the memory of a
  // stage.
  static constexpr bool kPadded = !Keys::coded && !Values::coded;
  static constexpr int kSumsPitch = kVDim + (kPadded || kTeams > 1 || 8 * (kVDim + 4) * 4 <= kStageBytes ? 4 : 0);
  static constexpr int kSumsBytes = kTeams * 8 * kSumsPitch * 4,
                       kSlot = kStageBytes > kSumsBytes ? kStageBytes : kSumsBytes;
  static constexpr int kQueryCols = kHeads * kDim, kQueryPitch = kQueryCols * 2 + 16,
                       kQueries = kQueryParts * rows * kQueryPitch;
  // Static shared memory, an upper bound in bytes. Without scales DecodeRing prefetches page tables to some of it.
  static constexpr int kStatic = (6 << 10) + (kScaled ? 0 : 256);
  static constexpr int kTileScales = 2 * kHeads * kDecodeKeys;
  static constexpr int kSlotScales = kScaled ? kKeyTiles * kTileScales : 0;  // floats
  static constexpr int stages(int architecture) {
    const int room = (has_much(architecture) ? 227 << 10 : 99 << 10) - kStatic - kQueries,
              most = room / (warps_of(architecture) / kTeams * (kSlot + 4 * kSlotScales));
    return most < 1 ? 1 : most > 6 ? 6 : most;
  }
  static void describe(const P& p, AttentionPlan& plan) {
    plan.tile_dim = kDim, plan.tile_v_dim = kVDim, plan.key_heads = kHeads;
    plan.query_pack = p.q_pack >= kQueryPack ? kQueryPack : 1, plan.key_pack = Keys::kPack,
    plan.value_pack = Values::kPack;
  }
  static constexpr int shared_bytes(int architecture) {
    return stages(architecture) * (warps_of(architecture) / kTeams) * (kSlot + 4 * kSlotScales) + kQueries;
  }

  __device__ __forceinline__ TensorRows(const P& p, unsigned char* shared, const Cursor& cursor)
      : p_(p),
        shared_(shared),
        ring_(p, slot_at(Steps::number(), 0), scales_at(0), cursor),
        lane_head_(head_of(lane() % 4 * 2)),
        operand_head_(head_of(lane() / 4)) {}

  // Prefetches the queries of the next part, if registers can hold them during the current one.
  __device__ __forceinline__ void prefetch(const DecodePart& part) {
    if constexpr (kQueryPacks == 1) prefetch_queries(part);
  }
  // Fill the pipeline: see DecodeRing.
  __device__ __forceinline__ int fill_ready() { return ring_.fill_ready(); }
  __device__ __forceinline__ void fill(int already) { ring_.fill(already); }
  // Called by all threads of the block, when all have finished the part before.
  __device__ __forceinline__ void begin(const DecodePart& part) {
    if constexpr (kQueryPacks > 1) prefetch_queries(part);
    if (wide()) {
      each_query(part, [&](int i, int row, int col, const QueryPlace& place) {
        Pack<float, 8> v = broadcast<8>(0.f);
        KERNELS_UNROLL
        for (int j = 0; j < 8 / kQueryPack; ++j) {
          if (!place.there) break;
          const Pack<float, kQueryPack> some =
              resolve(p_.q, prefetched_[i][j], place.token, place.col + j * kQueryPack);
          KERNELS_UNROLL
          for (int x = 0; x < kQueryPack; ++x) v.v[j * kQueryPack + x] = some.v[x];
        }
        put_query(v, row, col);
      });
    } else {
      KERNELS_ROLLED
      for (int i = threadIdx.x; i < rows * kQueryCols; i += warps * 32) {
        const int row = i / kQueryCols, col = i % kQueryCols;
        const QueryPlace place = query_place(part, row, col);
        put_query(place.there ? resolve(p_.q, fetch<1>(p_.q, place.token, place.col), place.token, place.col)
                              : broadcast<1>(0.f),
                  row, col);
      }
    }
    weights_.begin(p_, part);
    max_scale_ = inverse_max_scale_ = 0.f;
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int m = 0; m < kVDim / 16; ++m) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) sums_[n][m][i] = 0.f;
      }
    }
    __syncthreads();
    if constexpr (kHeld) {
      KERNELS_UNROLL
      for (int part_of = 0; part_of < kQueryParts; ++part_of) {
        KERNELS_UNROLL
        for (int step = 0; step < kQueryCols / 16; ++step) query_operand(held_[part_of][step], part_of, 0, step);
      }
    }
  }

  __device__ __forceinline__ void take(const DecodePart& part, uint32_t key, uint32_t count) {
    if constexpr (kTeams == 1) {
      ring_.load();
      arch::copy_async_wait<kStages - 1>();
      __syncwarp();
    } else {  // each team has copied half of the stage; the slot to refill is free when all have read it
      arch::copy_async_wait<kStages - 2>();
      wait_for_teams();
      ring_.load();
    }
    if (kKeyTiles > 1 && count <= kDecodeKeys) work<1>(part, key, count);  // end of a part
    else work<kKeyTiles>(part, key, count);
    if constexpr (kTeams == 1) __syncwarp();
    slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
  }

  // Makes all warps of the block pass the same number of barriers. compute-sanitizer's racecheck counts them, and
  // otherwise reports hazards across the block's next __syncthreads().
  __device__ __forceinline__ void end_keys(bool had_fewer) {
    if (kTeams > 1 && had_fewer) wait_for_teams();
  }
  __device__ __forceinline__ void write_states(float2* states) {
    weights_.write(states);
    if (lane() == 0 && Steps::team() == 0) *sums_slot(Steps::number()) = free_slot();
  }
  template <class States>
  __device__ __forceinline__ void write_sums(int n, const States& states) {
    float* const to = sums_at(Steps::number()) + Steps::team() * (8 * kSumsPitch);
    KERNELS_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile != n) continue;
      const float scale = Values::scaled ? max_scale_ : 1.f;
      const float factors[2] = {weights_.factor(states, tile, 0) * scale, weights_.factor(states, tile, 1) * scale};
      KERNELS_UNROLL
      for (int m = 0; m < kVDim / 16; ++m) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = lane() % 4 * 2 + i % 2, col = Values::value_column(m, lane() / 4, i / 2);
          to[row * kSumsPitch + col] = sums_[tile][m][i] * factors[i % 2];
        }
      }
    }
  }
  __device__ __forceinline__ Pack<float, 4> sums_of(int warp, int row, int col) const {
    return floats_at<4>(sums_at(warp) + row * kSumsPitch + col);
  }

 private:
  static constexpr int kStages = stages(arch::kCompiledFor);
  static_assert(kTeams == 1 || kStages > 1, "where teams share a stage it is copied a step before it is read");
  using Ring = DecodeRing<P, Cursor, Steps, Keys, Values, kHeads, kKeyTiles, kStages, kSlot, short_of_registers>;
  static constexpr int kQueryPack = wide_pack<typename P::Q>,
                       kQueryPacks = (rows * (kQueryCols / 8) + warps * 32 - 1) / (warps * 32);
  using QueryPack = decltype(fetch<kQueryPack>(std::declval<const typename P::Q&>(), kAny, kAny));
  // Query fragments stay in registers if there is room. Otherwise each step loads them once for all of its key tiles.
  static constexpr bool kHeld = kTiles == 1 && kKeyTiles == 1 && kQueryCols <= 128;
  using Weights = DecodeWeights<P, kTiles, kTeams>;

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  // Synchronizes the warps that have the same keys.
  static __device__ __forceinline__ void wait_for_teams() {
    arch::named_barrier_sync(1 + Steps::number(), 32 * kTeams);
  }
  __device__ __forceinline__ unsigned char* queries() const { return shared_ + Steps::warps * kStages * kSlot; }
  __device__ __forceinline__ float* scales_at(int slot) const {
    return reinterpret_cast<float*>(queries() + kQueries) + (Steps::number() * kStages + slot) * kSlotScales;
  }
  __device__ __forceinline__ unsigned char* slot_at(int warp, int slot) const {
    return shared_ + (warp * kStages + slot) * kSlot;
  }
  // The slot that was processed last is free until the next copy: the warp's sums go there.
  __device__ __forceinline__ int free_slot() const { return slot_ == 0 ? kStages - 1 : slot_ - 1; }
  static __device__ __forceinline__ int* sums_slot(int warp) {
    __shared__ int of_warps[Steps::warps];
    return of_warps + warp;
  }
  __device__ __forceinline__ float* sums_at(int warp) const {
    return reinterpret_cast<float*>(slot_at(warp, *sums_slot(warp)));
  }

  // Both products for the keys of a slot, kN tiles.
  template <int kN>
  __device__ __forceinline__ void work(const DecodePart& part, uint32_t key, uint32_t count) {
    const uint32_t keys = ring_.at(slot_);
    const float* const scales = scales_at(slot_);
    float x[kTiles * kN][4] = {};
    multiply_keys<kN>(keys, x);
    if constexpr (Keys::scaled) scale_logits<kN>(scales, x);
    weights_.weigh(p_, part, x, key, count, [&](const typename Weights::Factors& factors) { scale_sums(factors); });
    uint32_t weights[kTiles * kN][kParts][2];
    round_weights<kN>(x, scales + kHeads * kDecodeKeys, weights);
    multiply_values<kN>(keys + Ring::kKeysBytes, weights);
  }
  // Logits: products of the keys in a slot and the queries of the part.
  template <int kN>
  __device__ __forceinline__ void multiply_keys(uint32_t keys, float (&x)[kTiles * kN][4]) const {
    KERNELS_UNROLL
    for (int step = 0; step < Keys::kSteps; ++step) {
      uint32_t b[Keys::kOperands][kTiles][kQueryParts][2];
      KERNELS_UNROLL
      for (int i = 0; i < Keys::kOperands; ++i) {
        const int at = step * Keys::kOperands + i;
        KERNELS_UNROLL
        for (int n = 0; n < kTiles; ++n) {
          KERNELS_UNROLL
          for (int part_of = 0; part_of < kQueryParts; ++part_of) {
            uint32_t(&words)[2] = b[i][n][part_of];
            if constexpr (kHeld) words[0] = held_[part_of][at][0], words[1] = held_[part_of][at][1];
            else query_operand(words, part_of, n, at);
          }
        }
      }
      KERNELS_UNROLL
      for (int tile = 0; tile < kN; ++tile) {
        uint32_t a[Keys::kOperands][4];
        Keys::template keys<KeyType>(a, Keys::at_step(keys + tile * Keys::kBytes + Keys::key_lane(), step));
        KERNELS_UNROLL
        for (int i = 0; i < Keys::kOperands; ++i) {
          KERNELS_UNROLL
          for (int n = 0; n < kTiles; ++n) {
            KERNELS_UNROLL
            for (int part_of = 0; part_of < kQueryParts; ++part_of)
              arch::mma_16816<KeyType>(x[n * kN + tile], a[i], b[i][n][part_of]);
          }
        }
      }
    }
  }
  template <int kN>
  __device__ __forceinline__ void scale_logits(const float* scales, float (&x)[kTiles * kN][4]) const {
    KERNELS_UNROLL
    for (int n = 0; n < kTiles * kN; ++n) {
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) x[n][i] *= scales[n % kN * kTileScales + lane_scale() + i / 2 * 8];
    }
  }
  // With several KV heads: the one that a row of the tile belongs to. lane_scale(): where the scales of a lane's keys
  // begin; its two rows belong to the same head.
  __device__ __forceinline__ int head_of(int row) const {
    return kHeads == 1 ? 0 : int(unsigned(row) % unsigned(p_.group) / unsigned(p_.group / kHeads));
  }
  __device__ __forceinline__ int lane_scale() const { return lane() / 4 + lane_head_ * kDecodeKeys; }
  // Weights, times the scales of the values, as 16-bit numbers, and with kParts = 2 their rounding errors.
  template <int kN>
  __device__ __forceinline__ void round_weights(const float (&x)[kTiles * kN][4], const float* scales,
                                                uint32_t (&b)[kTiles * kN][kParts][2]) {
    float value_scales[kN][2];
    if constexpr (Values::scaled) find_value_scales<kN>(scales, value_scales);
    KERNELS_UNROLL
    for (int n = 0; n < kTiles * kN; ++n) {
      KERNELS_UNROLL
      for (int i = 0; i < 2; ++i) {
        float low = x[n][2 * i], high = x[n][2 * i + 1];
        if constexpr (Values::scaled) low *= value_scales[n % kN][i], high *= value_scales[n % kN][i];
        const uint32_t pair = rounded_pair<ValueType>(low, high);
        b[n][0][i] = arch::transpose_matrix(pair);
        if constexpr (kParts == 2) b[n][1][i] = arch::transpose_matrix(rest_of_pair<ValueType>(low, high, pair));
      }
    }
  }
  template <int kN>
  __device__ __forceinline__ void multiply_values(uint32_t values, const uint32_t (&b)[kTiles * kN][kParts][2]) {
    KERNELS_UNROLL
    for (int tile = 0; tile < kN; ++tile) {
      const uint32_t first = values + tile * Values::kBytes + Values::value_lane();
      KERNELS_UNROLL
      for (int step = 0; step < Values::kSteps; ++step) {
        uint32_t a[Values::kOperands][4];
        Values::template values<ValueType>(a, Values::at_step(first, step));
        KERNELS_UNROLL
        for (int n = 0; n < kTiles; ++n) {
          KERNELS_UNROLL
          for (int part_of = 0; part_of < kParts; ++part_of) {
            const uint32_t(&all)[2] = b[n * kN + tile][part_of];
            const bool mine = kHeads == 1 || step / (Values::kSteps / kHeads) == operand_head_;
            const uint32_t own[2] = {mine ? all[0] : 0u, mine ? all[1] : 0u};
            KERNELS_UNROLL
            for (int i = 0; i < Values::kOperands; ++i)
              arch::mma_16816<ValueType>(sums_[n][(step * Values::kOperands + i) % (kVDim / 16)], a[i], own);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void scale_sums(const typename Weights::Factors& factors) {
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int m = 0; m < kVDim / 16; ++m) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) sums_[n][m][i] *= factors[n][i % 2];
      }
    }
  }
  // The scales of values g and g + 8 of each tile, divided by the largest scale so far. If that grows, the sums are
  // rescaled.
  template <int kN>
  __device__ __forceinline__ void find_value_scales(const float* scales, float (&out)[kN][2]) {
    float most = max_scale_;
    KERNELS_UNROLL
    for (int i = 0; i < 2 * kN; ++i) {
      out[i / 2][i % 2] = scales[i / 2 * kTileScales + lane_scale() + i % 2 * 8];
      most = fmaxf(most, fabsf(out[i / 2][i % 2]));
    }
    if (__any_sync(0xffffffffu, most > max_scale_)) {
      KERNELS_UNROLL
      for (int apart = 4; apart < 32; apart *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, apart));
      most = fmaxf(most, 0x1p-100f);
      typename Weights::Factors factors;
      KERNELS_UNROLL
      for (int n = 0; n < kTiles; ++n) factors[n][0] = factors[n][1] = max_scale_ / most;
      scale_sums(factors);
      max_scale_ = most, inverse_max_scale_ = 1.f / most;
    }
    KERNELS_UNROLL
    for (int i = 0; i < 2 * kN; ++i) out[i / 2][i % 2] *= inverse_max_scale_;
  }

  __device__ __forceinline__ void prefetch_queries(const DecodePart& part) {
    if (!wide()) return;
    each_query(part, [&](int i, int, int, const QueryPlace& place) {
      KERNELS_UNROLL
      for (int j = 0; j < 8 / kQueryPack; ++j) {
        if (place.there) prefetched_[i][j] = fetch<kQueryPack>(p_.q, place.token, place.col + j * kQueryPack);
      }
    });
  }

  struct QueryPlace {
    bool there;
    int64_t token, col;
  };
  __device__ __forceinline__ QueryPlace query_place(const DecodePart& part, int row, int col) const {
    const int number = part.tile * rows + row, token = p_.query_of(number), in_head = col % kDim;
    return {row < part.rows && in_head < p_.dim && col / kDim == head_of(row), p_.shape.first_query(part.b) + token,
            (int64_t(part.head) * p_.group + (number - token * p_.group)) * p_.dim + in_head};
  }
  __device__ __forceinline__ bool wide() const { return p_.q_pack >= kQueryPack; }
  // Each thread takes packs of eight columns: f(number of the pack, row, column, where the query is).
  template <class F>
  __device__ __forceinline__ void each_query(const DecodePart& part, const F& f) const {
    KERNELS_UNROLL
    for (int i = 0; i < kQueryPacks; ++i) {
      const int at = i * warps * 32 + threadIdx.x, row = at / (kQueryCols / 8), col = at % (kQueryCols / 8) * 8;
      if (rows * (kQueryCols / 8) % (warps * 32) != 0 && row >= rows) return;
      f(i, row, col, query_place(part, row, col));
    }
  }
  // Stores queries as 16-bit numbers, and with kQueryParts = 2 their rounding errors.
  template <int N>
  __device__ __forceinline__ void put_query(Pack<float, N> v, int row, int col) const {
    KERNELS_UNROLL
    for (int part_of = 0; part_of < kQueryParts; ++part_of) {
      const Pack<KeyType, N> rounded = convert<KeyType>(v);
      memcpy(__builtin_assume_aligned(queries() + (part_of * rows + row) * kQueryPitch + col * 2, 2 * N), rounded.v,
             2 * N);
      v = transform(v - convert<float>(rounded), [](float x) { return x - x == 0.f ? x : 0.f; });
    }
  }
  // The B fragment of a tile of rows for 16 columns, in the order of k that the keys have.
  __device__ __forceinline__ void query_operand(uint32_t (&b)[2], int part_of, int tile, int step) const {
    const auto* const words =
        reinterpret_cast<const uint32_t*>(queries() + (part_of * rows + Weights::first_row() + tile * 8 + lane() / 4) *
                                                          kQueryPitch) +
        Keys::query_word(step, lane() % 4);
    b[0] = words[0], b[1] = words[Keys::apart];
  }

  const P& p_;
  unsigned char* shared_;
  Ring ring_;
  int lane_head_, operand_head_;  // KV heads of the lane's rows in the sums, and in the B operand
  int slot_ = 0;                  // the slot to process next
  float max_scale_, inverse_max_scale_;  // the largest value scale so far, which sums are in units of; its inverse
  QueryPack prefetched_[kQueryPacks][8 / kQueryPack];
  Weights weights_;
  uint32_t held_[kQueryParts][kHeld ? kQueryCols / 16 : 1][2];
  float sums_[kTiles][kVDim / 16][4];
};

}  // namespace detail
KERNELS_END
