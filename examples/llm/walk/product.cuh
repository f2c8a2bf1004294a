// How walk.cu multiplies a tile of 16 rows of weights, and how the inputs lie in shared memory. Lane 4g + t reads 16
// bytes of a row in each half of the tile at a time. They are the operand A of mma instructions, as rows g and g + 8;
// the inputs of the same columns are the operand B.
#pragma once

#include "walk/parts.cuh"

namespace llm {
namespace {

__device__ __forceinline__ ::uint4 words_at(const unsigned char* p) { return *reinterpret_cast<const ::uint4*>(p); }

// The row that lanes 4g + t have in each half of a tile. Copies swizzle: chunk i of 16 bytes of a row lies at i ^ row,
// so that lanes t read rows k and k + 4 from different banks.
__device__ __forceinline__ int row_of_lanes(int g) { return g % 2 * 4 + g / 2; }

// A lane's codes of a stage: in both halves, 16 of the 64 bytes that four lanes read.
struct Codes {
  uint32_t upper[4], lower[4];
  __device__ __forceinline__ Codes(const unsigned char* stage, int block, int g, int t) {
    const int row = row_of_lanes(g), chunk = (block % 2 * 4 + t) ^ row;
    const unsigned char* const from = stage + block / 2 * kHalf * 128 + row * 128 + chunk * 16;
    const ::uint4 first = words_at(from), second = words_at(from + kHalf * kChunk);
    memcpy(upper, &first, 16), memcpy(lower, &second, 16);
  }
};

// A product in numbers of 16 bits. To keep nearly the precision of floats, B holds each input in two parts:
//
//     even columns of B     inputs, rounded
//     odd columns           their residuals: the rounded rest
template <class Of>
struct PairProduct {
  // The offset of the residuals after the inputs. It puts them in other banks than the inputs that are read at the same
  // time: lanes t read 16 bytes at every 16, or with 8-bit weights at every 32.
  static __host__ __device__ __forceinline__ int residuals_at(int cols) { return 2 * cols + (kBits == 8 ? 16 : 64); }
  // The bytes of this many inputs, with residuals or without.
  static int64_t bytes(int cols, bool residuals) { return residuals ? residuals_at(cols) + 2 * cols : 2 * cols; }

  // Stores inputs: of each lane two neighbours from column `first` on, and more of them at distances of kStep columns,
  // of which the first `here` are within the row.
  template <int kStep, int kCount>
  static __device__ __forceinline__ void put(unsigned char* inputs, int cols, int first, int here,
                                             const float (&x)[kCount][2]) {
    unsigned char* const to = inputs + first * 2;
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uint32_t pair = k::detail::rounded_pair<A>(x[i][0], x[i][1]),
                     rest = k::detail::rest_of_pair<A>(x[i][0], x[i][1], pair);
      if (i >= here) continue;
      *reinterpret_cast<uint32_t*>(to + i * kStep * 2) = pair;
      *reinterpret_cast<uint32_t*>(to + i * kStep * 2 + residuals_at(cols)) = rest;
    }
  }
  // Stores four neighbours that are pairs of A already, and have no residuals.
  template <int kStep, int kCount>
  static __device__ __forceinline__ void put_pairs(unsigned char* inputs, int, int first, int here,
                                                   const Word (&pairs)[kCount][2]) {
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const ::uint2 both = {uint32_t(pairs[i][0]), uint32_t(pairs[i][1])};
      if (i < here) *reinterpret_cast<::uint2*>(inputs + first * 2 + i * kStep * 2) = both;
    }
  }

  // Where a lane reads inputs.
  struct Inputs {
    const unsigned char* at;
    __device__ __forceinline__ Inputs(const unsigned char* inputs, int cols, bool residuals, int g, int t)
        : at(inputs + t * kEach * 2 + (residuals && g % 2 != 0 ? residuals_at(cols) : 0)) {}
    __device__ __forceinline__ void skip(int blocks) { at += blocks * kBlock * 2; }
  };

  // A lane's part of the sums of a tile's rows.
  class Sums {
   public:
    // Adds the product of 64 bytes of each row of a stage.
    __device__ __forceinline__ void add(const unsigned char* stage, int block, const Inputs& x, int g, int t) {
      const Codes codes(stage, block, g, t);
      uint32_t b[kEach / 2];
      KERNELS_UNROLL
      for (int j = 0; j < kEach / 8; ++j) {
        const ::uint4 some = words_at(x.at + block * kBlock * 2 + j * 16);
        memcpy(b + 4 * j, &some, 16);
      }
      KERNELS_UNROLL
      for (int i = 0; i < 4; i += kWords) {
        uint32_t upper[2], lower[2];
        decode(upper, codes.upper + i);
        decode(lower, codes.lower + i);
        const uint32_t* const beside = b + i * kEach / 8;
        arch::mma_16816<A>(sums_[i / kWords % 2], {upper[0], lower[0], upper[1], lower[1]}, {beside[0], beside[1]});
      }
    }

    // The sum of the row in the upper or the lower half, in all lanes t.
    __device__ __forceinline__ float row(bool lower, bool residuals) const {
      const int i = lower ? 2 : 0;
      const float sum = sums_[0][i] + sums_[1][i];
      return residuals ? sum + (sums_[0][i + 1] + sums_[1][i + 1]) : sum;
    }

   private:
    // Pairs of A: decoded from a word of codes, or two words that are such pairs already.
    static constexpr int kWords = kBits == 16 ? 2 : 1;
    static __device__ __forceinline__ void decode(uint32_t (&pairs)[2], const uint32_t* words) {
      if constexpr (kBits == 16)
        memcpy(pairs, words, 8);
      else
        k::detail::Decoder<Of>::template pairs<A>(pairs, *words, k::Nothing{});
    }

    float sums_[2][4] = {};
  };
};

// The same for 4-bit weights, in integers, so that codes need no decoding. Inputs become integers of 16 bits, as two
// digits of 8 bits, with a factor for kTogether columns or twice as many. A lane's 16 bytes are one group of weights
// with a scale of its own, so each lane needs a column of the sums to itself:
//
//     column t of B         the upper digits of lane t's columns, zeros elsewhere
//     column 4 + t          the lower digits
struct IntegerProduct {
  static constexpr int kTogether = 64;

  static __host__ __device__ __forceinline__ int factors_at(int cols) { return 2 * cols; }
  static int64_t bytes(int cols, bool) { return factors_at(cols) + cols / kTogether * 4; }

  // The offset of the upper digits of 8 columns. The digits that lanes t read at the same time lie side by side; the
  // lower ones follow after kLowerAt bytes. A word of codes has columns 0, 4, 1, 5 in the lower halves of its bytes and
  // 2, 6, 3, 7 in the upper ones, and digits have the same order.
  static constexpr int kLowerAt = 64;
  static __device__ __forceinline__ int at_column(unsigned column) {
    return column / 128 * 256 + column / 16 % 2 * 128 + column / 32 % 4 * 16 + column / 8 % 2 * 8;
  }
  // digits: of two columns, both upper and then both lower ones. upper, lower: of columns 0, 4, 1, 5 or 2, 6, 3, 7.
  static __device__ __forceinline__ uint32_t digits(float x, float y, float factor) {
    // Adding 3 * 2^22 rounds to an integer in the lowest bits of the float; 128 more makes digits from -128 to 127.
    const uint32_t even = __float_as_uint(fmaf(x, factor, 12582912.f + 128)),
                   odd = __float_as_uint(fmaf(y, factor, 12582912.f + 128));
    return __byte_perm(even, odd, 0x4051) ^ 0x80800000u;
  }
  static __device__ __forceinline__ uint32_t upper(uint32_t early, uint32_t late) {
    return __byte_perm(early, late, 0x5140);
  }
  static __device__ __forceinline__ uint32_t lower(uint32_t early, uint32_t late) {
    return __byte_perm(early, late, 0x7362);
  }

  // Stores two or four neighbours of a lane. All lanes of a warp share a factor. A lane and the one whose columns are 4
  // further combine their digits.
  template <int kStep, int kCount, int kColumns>
  static __device__ __forceinline__ void put(unsigned char* inputs, int cols, int first, int here,
                                             const float (&x)[kCount][kColumns]) {
    constexpr uint32_t kAll = 0xffffffffu;
    constexpr float kMost = 32000;
    uint32_t largest[kCount];
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      largest[i] = __float_as_uint(1e-30f);
      KERNELS_UNROLL
      for (float each : x[i]) largest[i] = max(largest[i], __float_as_uint(each) & 0x7fffffffu);
    }
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) largest[i] = __reduce_max_sync(kAll, largest[i]);
    const bool later = (first & 4) != 0, first_together = first % kTogether == 0;
    unsigned char* const place = inputs + at_column(first);
    float* const factors = reinterpret_cast<float*>(inputs + factors_at(cols)) + first / kTogether;
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const float inverse = kMost * arch::reciprocal_flushed(__uint_as_float(largest[i]));
      unsigned char* const to = place + i * kStep * 2;
      const uint32_t mine = digits(x[i][0], x[i][1], inverse);
      if constexpr (kColumns == 2) {
        const uint32_t others = __shfl_xor_sync(kAll, mine, 2);
        const uint32_t word = later ? lower(others, mine) : upper(mine, others);
        if (i < here) *reinterpret_cast<uint32_t*>(to + first % 4 * 2 + (later ? kLowerAt : 0)) = word;
      } else {
        const uint32_t rest = digits(x[i][2], x[i][3], inverse);
        const uint32_t others = __shfl_xor_sync(kAll, later ? mine : rest, 1);
        const uint32_t early = later ? others : mine, late = later ? rest : others;
        uint32_t* const words = reinterpret_cast<uint32_t*>(to + (later ? 4 : 0));
        if (i < here) words[0] = upper(early, late), words[kLowerAt / 4] = lower(early, late);
      }
      if (i < here && first_together) factors[i * kStep / kTogether] = __uint_as_float(largest[i]) * (1 / kMost);
    }
  }
  template <int kStep, int kCount>
  static __device__ __forceinline__ void put_pairs(unsigned char* inputs, int cols, int first, int here,
                                                   const Word (&pairs)[kCount][2]) {
    float x[kCount][4];
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      k::detail::floats_of_pair<A>(uint32_t(pairs[i][0]), x[i][0], x[i][1]);
      k::detail::floats_of_pair<A>(uint32_t(pairs[i][1]), x[i][2], x[i][3]);
    }
    put<kStep>(inputs, cols, first, here, x);
  }

  struct Inputs {
    const unsigned char* at;
    const float* factors;
    bool mine;  // whether this lane has digits in B, and not zeros
    __device__ __forceinline__ Inputs(const unsigned char* inputs, int cols, bool, int g, int t)
        : at(inputs + t * 16 + g / 4 * kLowerAt),
          factors(reinterpret_cast<const float*>(inputs + factors_at(cols)) + t % 2),
          mine(g % 4 == t) {}
    __device__ __forceinline__ void skip(int blocks) {
      at += blocks * kBlock * 2, factors += blocks * (kBlock / kTogether);
    }
  };

  class Sums {
   public:
    __device__ __forceinline__ void add(const unsigned char* stage, int block, const Inputs& x, int g, int t) {
      const Codes codes(stage, block, g, t);
      uint32_t b[8];
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        ::uint4 some = {0, 0, 0, 0};
        if (x.mine) some = words_at(x.at + block * kBlock * 2 + j * 128);
        memcpy(b + 4 * j, &some, 16);
      }
      int32_t sums[4] = {};
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t upper = codes.upper[i], lower = codes.lower[i];
        arch::mma_16832(sums,
                        {signed_codes(upper << 4), signed_codes(lower << 4), signed_codes(upper), signed_codes(lower)},
                        {b[2 * i], b[2 * i + 1]});
      }
      const float factor = x.factors[block * (kBlock / kTogether)];
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = row_of_lanes(g), chunk = (block / 2) ^ row;
        const unsigned char* const scales =
            stage + kScalesAt + (row + kHalf * half) * (kChunk / 8) + chunk * 16 + block % 2 * 8 + t % 2 * 4;
        float even, odd;
        arch::halves_to_floats(*reinterpret_cast<const uint32_t*>(scales), even, odd);
        sums_[half] = fmaf(fmaf(float(sums[2 * half]), even, float(sums[2 * half + 1]) * odd), factor, sums_[half]);
      }
    }

    __device__ __forceinline__ float row(bool lower, bool) const {
      float sum = sums_[lower] * ((threadIdx.x & 2) == 0 ? 256 / 16.f : 1 / 16.f);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }

   private:
    // 16 times the values of the codes in the upper halves of bytes; a code is its value plus 8.
    static __device__ __forceinline__ uint32_t signed_codes(uint32_t word) {
      return arch::mask_xor<0xf0f0f0f0u, 0x80808080u>(word);
    }

    float sums_[2] = {};
  };
};

using Product = std::conditional_t<kGroupScales, IntegerProduct, PairProduct<Code>>;

}  // namespace
}  // namespace llm
