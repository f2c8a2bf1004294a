// Online softmax of the prefill kernels, in the registers of a warp. Logits (accumulator fragments of mma) become
// weights (A fragments of the product with the values), and the outputs are rescaled when the running maximum grows.
// Exponentials are to the base of 2.
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

constexpr float kSmallScale = 1e-30f;  // unless scale is larger, products are scaled before their maximum is found

// A warp's kTiles tiles of 16 rows, where kFirstWarp is the first warp of the block that has rows. Lane 4g + t has rows
// g and g + 8 of a tile (`half` 0 and 1), and of each 8 columns of logits or outputs columns 2t and 2t + 1.
//
// kSlack: lazy rescaling, only if the maximum grows by more than kSlack (to the base of 2). kAlwaysRescales: outputs
// are always rescaled, even by 1, so that there is no branch.
template <class P, class TV, int kTiles, int kKeys, int kCols, int kFirstWarp = 0, int kSlack = 0,
          bool kAlwaysRescales = false>
struct SoftmaxAccumulator {
  using S = typename P::S;
  using Value = ValueRun<typename P::Kv>;
  // With weights in e4m3, whose smallest value is 2^-9, weights are scaled up so that they reach 256; the slack is part
  // of that range.
  static constexpr bool k8Bit = std::is_same<TV, float8_e4m3>::value;
  static constexpr int kRaise = k8Bit ? 8 - kSlack : 0;
  static constexpr float kLower = 1.f / (1 << kRaise);
  static constexpr int kStep = k8Bit ? 32 : 16;  // keys of one mma
  float logits[kTiles][kKeys / 8][4], outputs[kTiles][kCols / 8][4] = {};
  uint32_t weights[kTiles][kKeys / kStep][4];
  // largest: the running maximum of the logits times log2(e), or with a slack a value not far below it. sums: this
  // lane's share of the sum of exponentials relative to `largest`.
  float largest[kTiles][2], sums[kTiles][2] = {};

  __device__ __forceinline__ SoftmaxAccumulator() {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) largest[i][0] = largest[i][1] = -infinity<float>();
  }

  static __device__ __forceinline__ int first_row() { return (int(threadIdx.x / 32) - kFirstWarp) * (kTiles * 16); }
  static __device__ __forceinline__ int row(int i, int half) {
    return first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // factor: what logits are multiplied by before exp2. raised: whether the maximum of any of the warp's rows has grown
  // by more than the slack (with kAlwaysRescales: always); only then shrink is set, the factors that rescale the
  // outputs.
  struct MaxUpdate {
    float factor, shrink[kTiles][2];
    bool raised;
  };

  // For masks that are bits in memory: 32 keys of each of the lane's rows. The four lanes of a row hold different keys.
  struct MaskWords {
    uint32_t mine[kTiles][2];
  };
  __device__ __forceinline__ auto fetch_masks([[maybe_unused]] const P& p, [[maybe_unused]] const PrefillRows& rows,
                                              [[maybe_unused]] int pos) const {
    if constexpr (!score_masks_runs<S>) {
      return Nothing();
    } else {
      static_assert(kKeys <= 128, "32 for each of four lanes");
      MaskWords masks;
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          ScoreAt at = score_at(rows, row(i, half));
          at.key = pos + int(threadIdx.x % 4) * 32;
          masks.mine[i][half] = keys_visible(p.score, at);
        }
      }
      return masks;
    }
  }
  // The mask bits of the logits that this lane holds of a row, in the order of the logits.
  static __device__ __forceinline__ unsigned bits_of(uint32_t mine) {
    unsigned bits = 0;
    KERNELS_UNROLL
    for (int run = 0; run < (kKeys + 31) / 32; ++run) {
      const unsigned word = __shfl_sync(0xffffffffu, mine, (threadIdx.x & 28) + run) >> (threadIdx.x % 4 * 2);
      // Gathers the two lowest bits of each byte in the highest byte.
      const unsigned eight = (word & 0x03030303u) * 0x01041040u;
      bits = __byte_perm(bits, eight, run == 0 ? 0x3217 : run == 1 ? 0x3270 : run == 2 ? 0x3710 : 0x7210);
    }
    return bits;
  }

  // The whole softmax of a key tile, without overlap: logits become weights.
  template <bool kFull>
  __device__ __forceinline__ void weigh(const P& p, const PrefillRows& rows, const RowKeys* row_keys, int pos,
                                        bool whole, const float* scales) {
    const MaxUpdate update = mask_and_update_max<kFull>(p, rows, row_keys, pos, whole, fetch_masks(p, rows, pos));
    rescale_outputs(update);
    make_exponentials(update);
    round_weights(scales);
  }

  // Applies scores and masks to the logits. Unless kAhead, it also updates the running maximum and rescales the sums.
  // `whole`: the rows see all keys of the tile.
  template <bool kFull, bool kAhead = false, class Masks>
  __device__ __forceinline__ MaxUpdate mask_and_update_max(const P& p, const PrefillRows& rows, const RowKeys* row_keys,
                                                           int pos, bool whole, [[maybe_unused]] const Masks& masks) {
    MaxUpdate update{kLog2e, {}, false};
    if constexpr (score_transforms<S> || score_masks_singly<S>) {
      if (whole && HasPairs<S>::value && pairs_at(p.score, pos))
        score_logits<true, HasPairs<S>::value>(p, rows, pos);
      else if (whole)
        score_logits<true, false>(p, rows, pos);
      else
        score_logits<false, false>(p, rows, pos);
    } else {
      update.factor = p.factor;
      // The maximum of the products is not that of the logits if the scale is negative or tiny.
      if (!kFull && !(p.scale > kSmallScale)) each([&](int, int, int, float& logit) { logit *= p.scale; });
    }
    if constexpr (score_masks_runs<S>) {
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) hide_others(i, half, 0, bits_of(masks.mine[i][half]));
      }
    }
    if (!whole) mask_logits(row_keys, pos);
    if constexpr (!kAhead) update_row_max(update);
    return update;
  }

  // kWhole: the rows see all keys of the tile. Otherwise logits beyond the last key or row are scored at the position
  // of the last one, so that nothing is read out of bounds, and masked afterwards. This avoids a branch for each logit.
  template <bool kWhole, bool kPairs>
  __device__ __forceinline__ void score_logits(const P& p, const PrefillRows& rows, int pos) {
    constexpr int kPack = kWhole ? 2 : 1;
    const int first_key = pos + int(threadIdx.x % 4) * 2;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        ScoreAt at = score_at(rows, row(i, half));
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) {
          KERNELS_UNROLL
          for (int x = 0; x < 2; x += kPack) {
            const int key = first_key + j * 8 + x;
            at.key = kWhole ? key : lesser(key, rows.keys - 1);
            score_pack<kPairs, kPack>(p, at, &logits[i][j][half * 2 + x]);
          }
        }
      }
    }
  }
  // The row at key 0; rows beyond the last one are clamped to it.
  static __device__ __forceinline__ ScoreAt score_at(const PrefillRows& rows, int row) {
    const auto place = rows.query_head(lesser(row, rows.count - 1));
    return {rows.b, place.head, place.query, 0, rows.queries, rows.keys};
  }
  template <bool kPairs, int N>
  static __device__ __forceinline__ void score_pack(const P& p, ScoreAt at, float* these) {
    Pack<float, N> pack;
    KERNELS_UNROLL
    for (int x = 0; x < N; ++x) pack.v[x] = these[x] * p.scale;
    pack = transform_logits<kPairs>(p.score, pack, at);
    KERNELS_UNROLL
    for (int x = 0; x < N; ++x, ++at.key) these[x] = key_visible_singly(p.score, at) ? pack.v[x] : -infinity<float>();
  }
  // One bit for each logit that a lane holds of 128 keys of a row, in their order: set if its key is before `end`,
  // which is relative to the lane's first key.
  static __device__ __forceinline__ unsigned bits_ahead(int end) {
    const int keys = lesser(greater(end, 0), 128), logits = keys / 8 * 2 + lesser(keys % 8, 2);
    return unsigned((uint64_t(1) << logits) - 1);
  }
  // Bits become predicates seven at a time, which takes a third of the instructions that comparing keys would.
  __device__ __forceinline__ void mask_logits(const RowKeys* row_keys, int pos) {
    const int lane = threadIdx.x % 32;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const RowKeys seen = seen_of(row_keys, row(i, half), pos + lane % 4 * 2);
        KERNELS_UNROLL
        for (int first = 0; first < kKeys; first += 128) {
          hide_others(i, half, first, bits_ahead(seen.end - first) & ~bits_ahead(seen.begin - first));
        }
      }
    }
  }
  // Masks the logits of a row whose bit is 0: those from key `first` of the tile on, up to 128 keys.
  __device__ __forceinline__ void hide_others(int i, int half, int first, unsigned visible) {
    KERNELS_UNROLL
    for (int j = first / 8; j < lesser(kKeys, first + 128) / 8; ++j) {
      KERNELS_UNROLL
      for (int x = 0; x < 2; ++x) {
        if ((visible >> (j % 16 * 2 + x) & 1) == 0) logits[i][j][half * 2 + x] = -infinity<float>();
      }
    }
  }
  // Finds the maximum of each row in the tile, and rescales the sums to it.
  __device__ __forceinline__ void update_row_max(MaxUpdate& update) {
    float found[kTiles][2];
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        float most = logits[i][0][half * 2];
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j)
          most = greater(most, greater(logits[i][j][half * 2], logits[i][j][half * 2 + 1]));
        found[i][half] = largest_of_row(most) * update.factor;
      }
    }
    raise_max(update, found);
  }
  static __device__ __forceinline__ float largest_of_row(float most) {
    most = greater(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return greater(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }
  // Raises the running maximum to `found` where that is larger, and rescales the sums.
  __device__ __forceinline__ void raise_max(MaxUpdate& update, const float (&found)[kTiles][2]) {
    float before[kTiles][2];
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        before[i][half] = largest[i][half];
        if constexpr (kSlack == 0) largest[i][half] = greater(largest[i][half], found[i][half]);
        else if (found[i][half] - largest[i][half] > kSlack)
          largest[i][half] = found[i][half];
        update.raised = update.raised || largest[i][half] != before[i][half];
      }
    }
    // Most tiles do not raise the maximum, so the branch is worth while. A slack makes it rarer still; but then the
    // largest weight of a row need not be 1, which 16 bits represent exactly, and is rounded like the others.
    update.raised = kAlwaysRescales || __any_sync(0xffffffffu, update.raised);
    if (update.raised) {
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          update.shrink[i][half] = arch::exp2_flushed(before[i][half] - reference(i, half));
          // __fmul_rn is never fused with the next addition, so that full tiles (kFull) and others give the same bits.
          sums[i][half] = __fmul_rn(sums[i][half], update.shrink[i][half]);
        }
      }
    }
  }

  __device__ __forceinline__ void rescale_outputs(const MaxUpdate& update) {
    if (!update.raised) return;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kCols / 8; ++j) {
        KERNELS_UNROLL
        for (int x = 0; x < 4; ++x) outputs[i][j][x] *= update.shrink[i][x / 2];
      }
    }
  }

  // Logits become exponentials, which are added to the sums.
  __device__ __forceinline__ void make_exponentials(const MaxUpdate& update) {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) make_exponentials<0, kKeys / 8>(update, i, half);
    }
  }
  // For groups of 8 columns from kFirst up to kEnd.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void make_exponentials(const MaxUpdate& update, int i, int half) {
    const float from = reference(i, half) - kRaise;
    KERNELS_UNROLL
    for (int j = kFirst; j < kEnd; ++j) {
      KERNELS_UNROLL
      for (int x = 0; x < 2; ++x) {
        float& logit = logits[i][j][half * 2 + x];
        logit = arch::exp2_flushed(fma(logit, update.factor, -from));
        sums[i][half] += logit;
      }
    }
  }

  // Makes weights relative to the running maximum of earlier tiles, without waiting for the maximum of this tile, which
  // is found meanwhile. If it exceeds the former by more than the slack, which is rare, weights are made again. The
  // branch contains all of that work: with 64 columns this is 3 % faster than a branch with only its expensive part.
  __device__ __forceinline__ void weigh_with_stale_max(MaxUpdate& update) {
    float found[kTiles][2], sums_of_tile[kTiles][2];
    make_weights(update, found, sums_of_tile);
    const bool larger = found[0][0] - largest[0][0] > kSlack || found[0][1] - largest[0][1] > kSlack;
    if (__any_sync(0xffffffffu, larger)) {
      raise_max(update, found);
      rescale_outputs(update);
      make_weights(update, found, sums_of_tile);
    }
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) sums[0][half] += sums_of_tile[0][half];
  }
  // Does not change the logits. The two rows are interleaved: one after the other, 64 columns and 4,096 keys take 2 %
  // longer (H200).
  __device__ __forceinline__ void make_weights(const MaxUpdate& update, float (&found)[kTiles][2],
                                               float (&sums_of_tile)[kTiles][2]) {
    static_assert(kTiles == 1 && !kAlwaysRescales && !Value::scaled, "16 rows, a slack, and values without scales");
    float most[2][2], (&sum)[2] = sums_of_tile[0];
    const float from[2] = {reference(0, 0) - kRaise, reference(0, 1) - kRaise};
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) sum[half] = 0.f, most[half][0] = most[half][1] = -infinity<float>();
    KERNELS_UNROLL
    for (int j = 0; j < kKeys / 8; j += 2) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        float e[4];
        KERNELS_UNROLL
        for (int x = 0; x < 4; ++x) {
          const float logit = logits[0][j + x / 2][half * 2 + x % 2];
          most[half][x % 2] = greater(most[half][x % 2], logit);
          e[x] = arch::exp2_flushed(fma(logit, update.factor, -from[half]));
          sum[half] += e[x];
        }
        if constexpr (k8Bit) {
          weights[0][j / 4][j % 4 + half] = arch::floats_to_e4m3(e[0], e[1], e[2], e[3]);
        } else {
          weights[0][j / 2][half] = rounded_pair<TV>(e[0], e[1]);
          weights[0][j / 2][2 + half] = rounded_pair<TV>(e[2], e[3]);
        }
      }
    }
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half)
      found[0][half] = largest_of_row(greater(most[half][0], most[half][1])) * update.factor;
  }

  // Rounds exponentials, multiplied by the scales of the values, to operands of the product with the values.
  __device__ __forceinline__ void round_weights(const float* scales) {
    if constexpr (k8Bit) {
      KERNELS_UNROLL
      for (int j = 0; j < kKeys / 8; j += 2) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          weights[0][j / 4][j % 4 + half] =
              arch::floats_to_e4m3(logits[0][j][half * 2], logits[0][j][half * 2 + 1], logits[0][j + 1][half * 2],
                                   logits[0][j + 1][half * 2 + 1]);
        }
      }
      return;
    }
    const int lane = threadIdx.x % 32;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          float w[2];
          KERNELS_UNROLL
          for (int x = 0; x < 2; ++x) {
            w[x] = logits[i][j][half * 2 + x];
            if constexpr (Value::scaled) w[x] *= scales[j * 8 + lane % 4 * 2 + x];
          }
          weights[i][j / 2][j % 2 * 2 + half] = rounded_pair<TV>(w[0], w[1]);
        }
      }
    }
  }

  // Epilogue of a row: writes its logsumexp, and returns the factor that normalizes its outputs.
  __device__ __forceinline__ float finish_row(const P& p, const PrefillRows& rows, int i, int half) const {
    return finish_state(p, rows, row(i, half), state_of_row(i, half), threadIdx.x % 4 == 0);
  }
  __device__ __forceinline__ SoftmaxState<float> state_of_row(int i, int half) const {
    float sum = sums[i][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return {largest[i][half] * kLn2, sum * kLower};
  }
  // Called by all lanes that hold some of row r; one of them writes.
  static __device__ __forceinline__ float finish_state(const P& p, const PrefillRows& rows, int r,
                                                       SoftmaxState<float> state, bool writes) {
    if (is_split<P>(rows)) {
      if (writes && r < rows.count && rows.part == 0) store_partial_state(p, rows, r, state.logsumexp());
      return state.inverse() * kLower;
    }
    float inverse = kLower;
    if constexpr (score_sinks<S>) {
      if (r < rows.count) inverse *= state.merge(sink_state(p.score, rows.query_head(r).head)).mine;
    }
    inverse *= state.inverse();
    if (p.options.writes_lse() && writes && r < rows.count && rows.part == 0) {
      const auto place = rows.query_head(r);
      p.options.write_lse(state.logsumexp(), rows.token + place.query, place.head, p.shape.heads);
    }
    return inverse;
  }
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        KERNELS_UNROLL
        for (int x = 0; x < 4; ++x) f(i, j, x, logits[i][j][x]);
      }
    }
  }

 private:
  // Relative to the tile at `pos`.
  static __device__ __forceinline__ RowKeys seen_of(const RowKeys* row_keys, int row, int pos) {
    return {row_keys[row].begin - pos, row_keys[row].end - pos};
  }
  __device__ __forceinline__ float reference(int i, int half) const {
    return softmax_reference(largest[i][half]);
  }
};

}  // namespace detail
KERNELS_END
