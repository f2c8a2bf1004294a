// Products of two operands of the same 8-bit type, int8 or e4m3, which wgmma multiplies without decoding, at twice the
// rate of 16 bits. This file has what differs from 16 bits in gemm_boxes.cuh.
//
// A step has 128 columns. Tensor cores keep only some 14 bits in long sums of e4m3, so they accumulate over one step,
// and its result is added to float sums; sums of int8 are exact over all of K. Scales of dequant() are applied at the
// end if they are for whole rows, otherwise (for 128 columns or more) when a step's sums are added.
#pragma once

#include "codes.cuh"
#include "product.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

// The 8-bit type of both operands of a product, or void.
template <class X, class W>
using mma_8bit_type =
    std::conditional_t<std::is_same<typename Coded<X>::Code, typename Coded<W>::Code>::value &&
                           is_multiplied_in_8<typename Coded<X>::Code> && !has_zeros<X> && !has_zeros<W>,
                       typename Coded<X>::Code, void>;
// Whether tokens, and not weights, are the rows of the mma, in tiles of 256 rows of weights. A lane then has two tokens
// and all weights, so a step's sums have few factors, which are not read for each four sums (4096 x 14336 x 4096, e4m3
// with scales for 128 x 1 and 128 x 128: 448 us instead of 508; int8 without scales 340 instead of 332; H200, CUDA
// 13.0, 2026-11).
template <class P, class T, int kRows>
constexpr bool tokens_are_rows = kRows == 256 && sizeof(T) == 1 &&
                                 (Coded<typename P::X>::scaled || Coded<FirstWeights<P>>::scaled);
// The most columns for which sums of int8 fit 32 bits.
constexpr int64_t kMost8BitColumns = (int64_t(1) << 17) - 1;

// Whether a source has scales for groups of columns, and not for whole rows.
template <class S>
KERNELS_HD bool scaled_by_steps(const S& source, int64_t cols) {
  if constexpr (is_dequant<S>::value)
    return source.scales().col_log2() < 31 && source.scales().col_log2() >= 0 &&
           int64_t(1) << source.scales().col_log2() < cols;
  else
    return false;
}
// Whether these kernels can read the scales: those of inputs; below, those of weights, of which each group has `rows`
// rows.
template <class S>
bool scales_suit_inputs(const S& source, int64_t cols) {
  if constexpr (is_dequant<S>::value)
    return !scaled_by_steps(source, cols) || source.scales().col_log2() >= 7;
  else
    return true;
}
template <class S>
bool scales_suit_weights(const S& source, int64_t cols, int64_t rows, bool groups) {
  const bool by_blocks = scaled_by_steps(source, cols);
  if constexpr (is_dequant<S>::value) {
    if (by_blocks)
      return source.scales().col_log2() >= 7 && source.scales().row_log2() >= 7 && (!groups || rows % 128 == 0);
  }
  if constexpr (Coded<S>::scaled && !is_dequant<S>::value) return group_log2_of(source, cols) == kOneForAll;
  return true;
}

// The factors of a step's sums, in shared memory: for each part of a tile's weights and each token, the weights' scale
// times the inputs' scale. kThreads threads load them. A part is 64 rows of weights; if tokens are rows of the mma, a
// half of one matrix, or one matrix of a gate.
template <class P, class T, int kRows, int kThreads>
class StepFactors {
 public:
  using X = typename P::X;
  using Gate = FirstWeights<P>;
  static constexpr bool possible = is_dequant<X>::value || is_dequant<Gate>::value;
  static constexpr bool by_rows = tokens_are_rows<P, T, kRows>;
  static constexpr int kTokens = 128, kParts = by_rows ? 2 : kRows / 64, kFloats = possible ? kTokens * kParts : 0;

  static __device__ __forceinline__ bool are_there(const P& p) {
    return possible && (scaled_by_steps(p.x, p.k) || scaled_by_steps(p.template weights<0>(), p.k));
  }
  __device__ __forceinline__ StepFactors(const P& p, const Tile& tile, int thread)
      : p_(p),
        tile_(tile),
        thread_(thread),
        of_inputs_(scaled_by_steps(p.x, p.k)),
        of_weights_(scaled_by_steps(p.template weights<0>(), p.k)) {}

  // Issues the loads for the step that begins at column `col`.
  __device__ __forceinline__ void fetch(int col) {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int64_t token = tile_.token + thread_ + i * kThreads;
      inputs_[i] = 1;
      if constexpr (is_dequant<X>::value)
        if (of_inputs_ && token < tile_.token_end) inputs_[i] = convert<float>(*p_.x.scales().scale_at(token, col));
    }
    KERNELS_UNROLL
    for (int i = 0; i < kParts; ++i) {
      weights_[i] = 1;
      if constexpr (is_dequant<Gate>::value) {
        // These rows share one scale: that of the first.
        const int64_t output = tile_.output + i / (by_rows ? P::matrices : 2) * (128 / P::matrices);
        const auto& scales =
            i % P::matrices == 0 ? p_.template weights<0>().scales() : p_.template weights<P::matrices - 1>().scales();
        if (of_weights_ && output < p_.n) weights_[i] = convert<float>(*scales.scale_at(tile_.weights + output, col));
      }
    }
  }
  __device__ __forceinline__ void put(float* to) const {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int token = thread_ + i * kThreads;
      KERNELS_UNROLL
      for (int j = 0; j < kParts; ++j)
        if (token < kTokens) to[j * kTokens + token] = inputs_[i] * weights_[j];
    }
  }

 private:
  static constexpr int kEach = (kTokens + kThreads - 1) / kThreads;
  const P& p_;
  const Tile& tile_;
  int thread_;
  bool of_inputs_, of_weights_;
  float inputs_[kEach], weights_[kParts];
};

// The sums of an mma with kColumns columns, in wgmma's layout.
template <class T, int kColumns>
struct Sums8Bit {
  std::conditional_t<std::is_same<T, int8_t>::value, int32_t, float> sums[kColumns / 8][4] = {};

  // Adds them to to(j), the four sums of columns 8j + 2t and 8j + 2t + 1 of row g, then of row g + 8, each times its
  // factor of factors(j), if there are factors.
  template <class To, class Factors>
  __device__ __forceinline__ void add_to(const To& to, const Factors& factors) const {
    KERNELS_UNROLL
    for (int j = 0; j < kColumns / 8; ++j) {
      float* const into = to(j);
      if constexpr (std::is_same<Factors, Nothing>::value) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) into[i] += float(sums[j][i]);
      } else {
        const ::float4 factor = factors(j);
        into[0] = fmaf(float(sums[j][0]), factor.x, into[0]), into[1] = fmaf(float(sums[j][1]), factor.y, into[1]);
        into[2] = fmaf(float(sums[j][2]), factor.z, into[2]), into[3] = fmaf(float(sums[j][3]), factor.w, into[3]);
      }
    }
  }
};

}  // namespace detail
KERNELS_END
