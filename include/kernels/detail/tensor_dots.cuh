// Dot products on tensor cores, for products with few tokens: weights of 16, 8 or 4 bits are decoded to pairs of 16 bits, and
// what CUDA cores would multiply one by one is done by mma.
//
// Memory likes whole rows, mma wants operands of 16 rows. So the rows of an mma are made of one: lanes 4g to 4g + 3 read the
// piece number g of a row and call it row g, and of what they multiply with, the inputs beside that piece, they make column g.
// Then the sums on the diagonal are those of the pieces, and nobody looks at the others. Rows g + 8 are those of a second row of
// weights. mma has time for that: it waits for memory.
//
// A fragment's k may be in any order that weights and inputs share: a lane's 16 bytes are operands for several mma, without
// shuffles. Only where these bytes have scales of their own, the four lanes of a piece exchange words first, so that the k of an
// mma are neighbours: a scale is applied to its sums. What rounding the inputs to 16 bits leaves is multiplied as well.
#pragma once

#include "decode.cuh"
#include "gemv.cuh"

KERNELS_BEGIN
namespace detail {

// N values of a row as pairs of T: as they lie in memory when they are of type T there, otherwise rounded to it. Or, as
// `rest`, what that rounding leaves, where it is finite.
template <class T, int N, class S>
__device__ __forceinline__ void read_pairs(uint32_t (&words)[N / 2], const S& source, int64_t row, int col, bool rest) {
  constexpr int width = pack_within<S, N>;
  KERNELS_UNROLL
  for (int i = 0; i < N; i += width) {
    const auto fetched = fetch<width>(source, row, col + i);
    if constexpr (std::is_same<tensor_type<S>, T>::value) {
      memcpy(words + i / 2, &fetched, width * 2);
    } else {
      const auto values = convert<float>(resolve(source, fetched, row, col + i));
      Pack<T, width> rounded = convert<T>(values);
      if (rest) rounded = convert<T>(transform(values - convert<float>(rounded), [](float x) { return x - x == 0.f ? x : 0.f; }));
      memcpy(words + i / 2, rounded.v, width * 2);
    }
  }
}

// Four lanes side by side exchange words: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void exchange_words(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const auto swap = [](uint32_t& low, uint32_t& high, bool second, int mask) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, second ? low : high, mask);
    (second ? low : high) = got;
  };
  swap(words[0], words[1], odd, 1);
  swap(words[2], words[3], odd, 1);
  swap(words[0], words[2], upper, 2);
  swap(words[1], words[3], upper, 2);
}

// Whether 64 bytes of codes have several scales.
template <class W>
bool has_fine_scales(const W& w) {
  if constexpr (is_stacked<W>::value) return w.any([](const auto& part) { return has_fine_scales(part); });
  else return w.scales().group(4 * Coded<W>::pack) < 4 * Coded<W>::pack;
}

// The dot products of R rows, of each matrix, with M tokens. kFine: pieces have several scales.
template <class P, int R, int M, bool kFine>
struct TensorDots {
  using X = typename P::X;
  using W = typename P::W;
  using T = meeting_type<X, W>;
  using Code = typename Coded<W>::Code;
  static constexpr int pack = Coded<W>::pack, rows = R, tokens = M;
  static constexpr bool zeros = true;
  static constexpr int registers = M == 1 && !kFine ? 80 : 128;
  static constexpr bool coded = !is_16_bit<Code>, scaled = Coded<W>::scaled;
  static constexpr bool exact = std::is_same<tensor_type<X>, T>::value;  // inputs need no rounding
  static constexpr int kEach = coded ? pack / 4 : 8;  // codes that are decoded together: those of a word
  static constexpr int kBlocks = pack / kEach;
  static constexpr int kAll = P::matrices * R, kPairs = kAll / 2;
  static_assert(kAll % 2 == 0, "rows go in pairs");
  float sums[M][kPairs][4] = {};

  template <class First, class Second>
  __device__ __forceinline__ void add(const First& first, const Second& second, int u, const GemvTokens<P, M>& of, int col) {
    const int t = threadIdx.x & 3, cols = int(of.p.k);
    uint32_t codes[kAll][4];
    float scales[kAll], zeros[kAll];
    KERNELS_UNROLL
    for (int i = 0; i < kAll; ++i) {
      const auto& row = i < R ? first.rows[i % R] : second.rows[i % R];
      const auto& fetched = i < R ? first.fetched[u][i % R] : second.fetched[u][i % R];
      read_codes(codes[i], fetched);
      if constexpr (kFine) exchange_words(codes[i]);
      if constexpr (scaled) {
        scales[i] = row.source.scale_of(fetched);
        if constexpr (has_zeros<typename First::Source>) zeros[i] = row.source.scales().zero(fetched.scales);
      }
    }
    // Lanes beyond the end have read no scale: the first of the piece has it, too.
    const auto from_lane = [&](float x, int block) { return __shfl_sync(0xffffffffu, x, (threadIdx.x & 28) + (kFine ? block : 0)); };
    float some[M][kPairs][4] = {};  // sums that wait for their scale
    KERNELS_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t weights[kAll][kEach / 2];
      KERNELS_UNROLL
      for (int i = 0; i < kAll; ++i) {
        if constexpr (!coded) memcpy(weights[i], codes[i], sizeof(weights[i]));
        else if constexpr (has_zeros<typename First::Source>) Decoder<Code>::template pairs<T>(weights[i], codes[i][block], from_lane(zeros[i], block));
        else Decoder<Code>::template pairs<T>(weights[i], codes[i][block], Nothing{});
      }
      const int at = kFine ? col - t * pack + (block * 4 + t) * kEach : col + block * kEach;
      KERNELS_UNROLL
      for (int m = 0; m < M; ++m) {
        KERNELS_UNROLL
        for (int rest = 0; rest < (exact ? 1 : 2); ++rest) {
          uint32_t x[kEach / 2] = {};
          if ((kFine ? at : col) < cols) read_pairs<T, kEach>(x, of.source(m), of.row(m), at, rest == 1);
          order_pairs<Code>(x);
          multiply(scaled ? some[m] : sums[m], weights, x);
        }
      }
      if constexpr (scaled && (kFine || kBlocks == 1)) take(some, [&](int i) { return from_lane(scales[i], block); });
    }
    if constexpr (scaled && !kFine && kBlocks > 1) take(some, [&](int i) { return from_lane(scales[i], 0); });
  }
  __device__ __forceinline__ float part(int matrix, int m, int r) const {
    const int i = matrix * R + r, g = (threadIdx.x & 31) / 4, t = threadIdx.x & 3;
    const float (&mine)[4] = sums[m][i / 2];
    return g / 2 != t ? 0.f : g % 2 == 0 ? mine[i % 2 * 2] : mine[i % 2 * 2 + 1];
  }

 private:
  template <class Fetched>
  static __device__ __forceinline__ void read_codes(uint32_t (&words)[4], const Fetched& fetched) {
    if constexpr (scaled) memcpy(words, &fetched.codes, sizeof(words));
    else memcpy(words, &fetched, sizeof(words));
  }

  static __device__ __forceinline__ void multiply(float (&to)[kPairs][4], const uint32_t (&weights)[kAll][kEach / 2], const uint32_t (&x)[kEach / 2]) {
    KERNELS_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto& upper = weights[2 * pair];
      const auto& lower = weights[2 * pair + 1];
      KERNELS_UNROLL
      for (int i = 0; i < kEach / 2; i += 2) {
        const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]}, b[2] = {x[i], x[i + 1]};
        arch::mma_16816<T>(to[pair], a, b);
      }
    }
  }
  // Adds up sums times the scales of their rows, and starts them anew.
  template <class Scale>
  __device__ __forceinline__ void take(float (&some)[M][kPairs][4], const Scale& scale_of) {
    KERNELS_UNROLL
    for (int i = 0; i < kAll; ++i) {
      const float scale = scale_of(i);
      KERNELS_UNROLL
      for (int m = 0; m < M; ++m) {
        KERNELS_UNROLL
        for (int j = i % 2 * 2; j < i % 2 * 2 + 2; ++j) {
          sums[m][i / 2][j] = fma(some[m][i / 2][j], scale, sums[m][i / 2][j]);
          some[m][i / 2][j] = 0.f;
        }
      }
    }
  }
};

}  // namespace detail
KERNELS_END
