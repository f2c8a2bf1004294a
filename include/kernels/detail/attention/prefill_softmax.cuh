// The softmax of attention of many queries, as a warp holds it: logits in fragments of mma become weights, which are
// operands of the product with the values, and outputs are kept under the largest logit so far (online softmax, to the
// base of 2).
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

constexpr float kSmallScale = 1e-30f;  // not above it, products are scaled before they are compared

// What a warp holds, from kFirstWarp of the block on: kTiles of 16 rows. Lane 4g + t has, of tile i, rows g and g + 8;
// of 8 columns of logits or of the output columns 2t and 2t + 1. kSlack: outputs are shrunk only where a logit is
// larger than those before by more than this many bits of its exponential; kShrinks: they are always multiplied, even
// by 1, so that there is no branch.
template <class P, class TV, int kTiles, int kKeys, int kCols, int kFirstWarp = 0, int kSlack = 0,
          bool kShrinks = false>
struct PrefillWork {
  using S = typename P::S;
  using Value = ValueRun<typename P::Kv>;
  // Of 8 bits, weights are up to 256, as 2^-9 is the least that there is; the slack is part of that.
  static constexpr bool kInEight = std::is_same<TV, float8_e4m3>::value;
  static constexpr int kRaise = kInEight ? 8 - kSlack : 0;
  static constexpr float kLower = 1.f / (1 << kRaise);
  static constexpr int kStep = kInEight ? 32 : 16;  // keys of a product
  float logits[kTiles][kKeys / 8][4], outputs[kTiles][kCols / 8][4] = {};
  uint32_t weights[kTiles][kKeys / kStep][4];
  // The largest logit so far, or one not far below it, times log2(e), and the lane's part of the sum of exponentials
  // under it.
  float largest[kTiles][2], sums[kTiles][2] = {};

  __device__ __forceinline__ PrefillWork() {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) largest[i][0] = largest[i][1] = -infinity<float>();
  }

  static __device__ __forceinline__ int first_row() { return (int(threadIdx.x / 32) - kFirstWarp) * (kTiles * 16); }
  static __device__ __forceinline__ int row(int i, int half) {
    return first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // What logits are to be multiplied by, and, if any of the warp's rows has one that is larger than before by more than
  // the slack, or with kShrinks always, the outputs so far.
  struct Look {
    float factor, shrink[kTiles][2];
    bool raised;
  };

  // Of masks that lie in memory: 32 keys of each of a lane's rows. The four lanes that have these rows have other keys.
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
  // The bits of the logits that a lane has of a row, in their order.
  static __device__ __forceinline__ unsigned bits_of(uint32_t mine) {
    unsigned bits = 0;
    KERNELS_UNROLL
    for (int run = 0; run < (kKeys + 31) / 32; ++run) {
      const unsigned word = __shfl_sync(0xffffffffu, mine, (threadIdx.x & 28) + run) >> (threadIdx.x % 4 * 2);
      // Of each byte the two lowest, one behind the other in the highest byte.
      const unsigned eight = (word & 0x03030303u) * 0x01041040u;
      bits = __byte_perm(bits, eight, run == 0 ? 0x3217 : run == 1 ? 0x3270 : run == 2 ? 0x3710 : 0x7210);
    }
    return bits;
  }

  // Logits become weights.
  template <bool kFull>
  __device__ __forceinline__ void weigh(const P& p, const PrefillRows& rows, const RowKeys* row_keys, int pos,
                                        bool whole, const float* scales) {
    const Look look = look_at<kFull>(p, rows, row_keys, pos, whole, fetch_masks(p, rows, pos));
    shrink_outputs(look);
    make_exponentials(look);
    round_weights(scales);
  }

  // Logits are scored and masked, and, unless weigh_ahead() will, the sums so far are brought under the largest.
  // `whole`: the rows see all keys of the tile.
  template <bool kFull, bool kAhead = false, class Masks>
  __device__ __forceinline__ Look look_at(const P& p, const PrefillRows& rows, const RowKeys* row_keys, int pos,
                                          bool whole, [[maybe_unused]] const Masks& masks) {
    Look look{kLog2e, {}, false};
    if constexpr (score_transforms<S> || score_masks_singly<S>) {
      if (whole && HasPairs<S>::value && pairs_at(p.score, pos))
        score_logits<true, HasPairs<S>::value>(p, rows, pos);
      else if (whole)
        score_logits<true, false>(p, rows, pos);
      else
        score_logits<false, false>(p, rows, pos);
    } else {
      look.factor = p.factor;
      // The largest logit is not that of the largest product.
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
    if constexpr (!kAhead) raise_largest(look);
    return look;
  }

  // kWhole: the rows see all keys of the tile. If they do not, logits beyond the last key or row are scored as if they
  // were these, so that nothing is read behind them, and masked afterwards: that takes no branch for each logit.
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
  // Key 0 and this row; of rows behind the last one, that.
  static __device__ __forceinline__ ScoreAt score_at(const PrefillRows& rows, int row) {
    const auto place = rows.place(lesser(row, rows.count - 1));
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
  // A bit for each of the logits of 128 keys that a lane has of a row, in their order: those ahead of key `end`,
  // counted from the lane's first.
  static __device__ __forceinline__ unsigned bits_ahead(int end) {
    const int keys = lesser(greater(end, 0), 128), logits = keys / 8 * 2 + lesser(keys % 8, 2);
    return unsigned((uint64_t(1) << logits) - 1);
  }
  // Bits become predicates seven at a time, which takes a third of the instructions that comparing keys does.
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
  // Of the logits of a row from key `first` of the tile on, up to 128 of them, those whose bit is 0 do not count.
  __device__ __forceinline__ void hide_others(int i, int half, int first, unsigned visible) {
    KERNELS_UNROLL
    for (int j = first / 8; j < lesser(kKeys, first + 128) / 8; ++j) {
      KERNELS_UNROLL
      for (int x = 0; x < 2; ++x) {
        if ((visible >> (j % 16 * 2 + x) & 1) == 0) logits[i][j][half * 2 + x] = -infinity<float>();
      }
    }
  }
  // Finds the largest logit of each row, and brings what was summed up under it.
  __device__ __forceinline__ void raise_largest(Look& look) {
    float found[kTiles][2];
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        float most = logits[i][0][half * 2];
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j)
          most = greater(most, greater(logits[i][j][half * 2], logits[i][j][half * 2 + 1]));
        found[i][half] = largest_of_row(most) * look.factor;
      }
    }
    raise_to(look, found);
  }
  static __device__ __forceinline__ float largest_of_row(float most) {
    most = greater(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return greater(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }
  // Brings what was summed up under these, where they are larger than the largest so far.
  __device__ __forceinline__ void raise_to(Look& look, const float (&found)[kTiles][2]) {
    float before[kTiles][2];
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        before[i][half] = largest[i][half];
        if constexpr (kSlack == 0) largest[i][half] = greater(largest[i][half], found[i][half]);
        else if (found[i][half] - largest[i][half] > kSlack)
          largest[i][half] = found[i][half];
        look.raised = look.raised || largest[i][half] != before[i][half];
      }
    }
    // Most tiles have no larger logit than those before. Slack spares more, but then a row's largest weight need not be
    // 1, which 16 bits have exactly, and is rounded as the others are.
    look.raised = kShrinks || __any_sync(0xffffffffu, look.raised);
    if (look.raised) {
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          look.shrink[i][half] = arch::exp2_flushed(before[i][half] - reference(i, half));
          sums[i][half] = __fmul_rn(
              sums[i][half],
              look.shrink[i][half]);  // never fused with what is added next: the same bits in full tiles and in others
        }
      }
    }
  }

  __device__ __forceinline__ void shrink_outputs(const Look& look) {
    if (!look.raised) return;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kCols / 8; ++j) {
        KERNELS_UNROLL
        for (int x = 0; x < 4; ++x) outputs[i][j][x] *= look.shrink[i][x / 2];
      }
    }
  }

  // Logits become exponentials, which are summed up.
  __device__ __forceinline__ void make_exponentials(const Look& look) {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) make_exponentials<0, kKeys / 8>(look, i, half);
    }
  }
  // Of 8 columns each from kFirst up to kEnd.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void make_exponentials(const Look& look, int i, int half) {
    const float from = reference(i, half) - kRaise;
    KERNELS_UNROLL
    for (int j = kFirst; j < kEnd; ++j) {
      KERNELS_UNROLL
      for (int x = 0; x < 2; ++x) {
        float& logit = logits[i][j][half * 2 + x];
        logit = arch::exp2_flushed(fma(logit, look.factor, -from));
        sums[i][half] += logit;
      }
    }
  }

  // Logits become weights under the largest one of the tiles before, which need not wait for the largest one of this
  // tile: that is found meanwhile, and if it is larger by more than the slack, which is rare, weights are made again
  // (all of that in one branch: with 64 columns 3 % sooner than if only what takes long is there).
  __device__ __forceinline__ void weigh_ahead(Look& look) {
    float found[kTiles][2], sums_of_tile[kTiles][2];
    make_weights(look, found, sums_of_tile);
    const bool larger = found[0][0] - largest[0][0] > kSlack || found[0][1] - largest[0][1] > kSlack;
    if (__any_sync(0xffffffffu, larger)) {
      raise_to(look, found);
      shrink_outputs(look);
      make_weights(look, found, sums_of_tile);
    }
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) sums[0][half] += sums_of_tile[0][half];
  }
  // Logits stay as they are. Rows take turns: one after the other 64 columns and 4,096 keys take 2 % longer (H200).
  __device__ __forceinline__ void make_weights(const Look& look, float (&found)[kTiles][2],
                                               float (&sums_of_tile)[kTiles][2]) {
    static_assert(kTiles == 1 && !kShrinks && !Value::scaled, "16 rows, a slack, and values without scales");
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
          e[x] = arch::exp2_flushed(fma(logit, look.factor, -from[half]));
          sum[half] += e[x];
        }
        if constexpr (kInEight) {
          weights[0][j / 4][j % 4 + half] = arch::floats_to_e4m3(e[0], e[1], e[2], e[3]);
        } else {
          weights[0][j / 2][half] = rounded_pair<TV>(e[0], e[1]);
          weights[0][j / 2][2 + half] = rounded_pair<TV>(e[2], e[3]);
        }
      }
    }
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half)
      found[0][half] = largest_of_row(greater(most[half][0], most[half][1])) * look.factor;
  }

  // Exponentials, times the scales of values, become operands of the product with these.
  __device__ __forceinline__ void round_weights(const float* scales) {
    if constexpr (kInEight) {
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

  // What a row's outputs are to be multiplied with, behind its last key; its logsumexp is written.
  __device__ __forceinline__ float finish_row(const P& p, const PrefillRows& rows, int i, int half) const {
    return finish_state(p, rows, row(i, half), state_of_row(i, half), threadIdx.x % 4 == 0);
  }
  __device__ __forceinline__ SoftmaxState<float> state_of_row(int i, int half) const {
    float sum = sums[i][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return {largest[i][half] * kLn2, sum * kLower};
  }
  // Of row r, by all lanes that have some of it; one of them writes.
  static __device__ __forceinline__ float finish_state(const P& p, const PrefillRows& rows, int r,
                                                       SoftmaxState<float> state, bool writes) {
    if (leaves_part<P>(rows)) {
      if (writes && r < rows.count && rows.part == 0) leave_state(p, rows, r, state.logsumexp());
      return state.inverse() * kLower;
    }
    float inverse = kLower;
    if constexpr (score_sinks<S>) {
      if (r < rows.count) inverse *= state.merge(sink_state(p.score, rows.place(r).head)).mine;
    }
    inverse *= state.inverse();
    if (p.options.writes_lse() && writes && r < rows.count && rows.part == 0) {
      const auto place = rows.place(r);
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
  // Of the tile at `pos`.
  static __device__ __forceinline__ RowKeys seen_of(const RowKeys* row_keys, int row, int pos) {
    return {row_keys[row].begin - pos, row_keys[row].end - pos};
  }
  __device__ __forceinline__ float reference(int i, int half) const {
    return softmax_reference(largest[i][half]);
  }
};

}  // namespace detail
KERNELS_END
