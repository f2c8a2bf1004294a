// How walk.cu multiplies 16 rows of weights, and how it has the inputs for that in shared memory. Lane 4g + t has 16
// bytes of row g, and 16 of row g + 8, at a time: they are A of products on tensor cores. B are the inputs beside them:
//
//     even columns of B     inputs, rounded to 16 bits
//     odd columns           their residuals: what that leaves of them, rounded to 16 bits
//
// Groups of 4-bit weights have scales of their own, and a lane's 16 bytes are one group. So there each lane has a
// column of the sums to itself:
//     column t of B         the rounded inputs beside lane t, zeros elsewhere
//     column 4 + t          their residuals
//
// Tried beside integers: inputs as integers of 16 bits, in two digits with a factor for 64 columns, and products of
// bytes. A KB of int4 then takes 45 instructions for 110, but all blocks have to make such inputs while they wait: 12
// layers of Mistral-7B take 572 us for 582 in int4 and 888 for 892 in int8 on an H100, and 529 for 527 and 720 for 712
// on an H200.
#pragma once

#include "walk_parts.cuh"

namespace llm {
namespace {

__device__ __forceinline__ ::uint4 words_at(const unsigned char* p) { return *reinterpret_cast<const ::uint4*>(p); }

// A product's inputs, and a lane's sums of it.
struct Product {
  // Where residuals lie behind the inputs: in other banks than the inputs that are read at the same time, by lanes t 16
  // bytes at every 16 or, beside 8-bit weights, 32.
  static __host__ __device__ __forceinline__ int64_t residuals_at(int64_t cols) {
    return 2 * cols + (kBits == 8 ? 16 : 64);
  }
  // Of so many inputs, with residuals or without.
  static int64_t bytes(int64_t cols, bool residuals) { return residuals ? residuals_at(cols) + 2 * cols : 2 * cols; }

  // Puts inputs there: of each lane two neighbours, from column(i) on.
  template <int kCount, class Column>
  static __device__ __forceinline__ void put(unsigned char* inputs, int64_t cols, const Column& column,
                                             const float (&x)[kCount][2]) {
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (column(i) >= cols) continue;
      const uint32_t pair = k::detail::rounded_pair<A>(x[i][0], x[i][1]);
      *reinterpret_cast<uint32_t*>(inputs + column(i) * 2) = pair;
      *reinterpret_cast<uint32_t*>(inputs + residuals_at(cols) + column(i) * 2) =
          k::detail::rest_of_pair<A>(x[i][0], x[i][1], pair);
    }
  }
  // Four neighbours, pairs of A already, which have no residuals.
  template <int kCount, class Column>
  static __device__ __forceinline__ void put_pairs(unsigned char* inputs, int64_t cols, const Column& column,
                                                   const Word (&pairs)[kCount][2]) {
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const ::uint2 both = {uint32_t(pairs[i][0]), uint32_t(pairs[i][1])};
      if (column(i) < cols) *reinterpret_cast<::uint2*>(inputs + column(i) * 2) = both;
    }
  }

  // What a lane reads of the inputs.
  struct Inputs {
    const unsigned char* at;
    bool mine;  // else zeros
    __device__ __forceinline__ Inputs(const unsigned char* inputs, int64_t cols, bool residuals, int g, int t) {
      const bool second = kGroupScales ? g / 4 != 0 : g % 2 != 0;
      at = inputs + t * kEach * 2 + (residuals && second ? residuals_at(cols) : 0);
      mine = !kGroupScales || (g % 4 == t && (residuals || !second));
    }
    __device__ __forceinline__ void skip(int blocks) { at += blocks * kBlock * 2; }
  };

  // What a lane has of the sums of a tile's rows.
  class Sums {
   public:
    // Adds what a block of 64 bytes of the rows gives, of a stage.
    __device__ __forceinline__ void add(const unsigned char* stage, int block, const Inputs& x, int g, int t) {
      const unsigned char* const from = stage + g * kPitch + block * 64 + t * 16;
      const ::uint4 upper = words_at(from), lower = words_at(from + 8 * kPitch);
      uint32_t b[kEach / 2];
      KERNELS_UNROLL
      for (int j = 0; j < kEach / 8; ++j) {
        ::uint4 some = {0, 0, 0, 0};
        if (x.mine) some = words_at(x.at + block * kBlock * 2 + j * 16);
        memcpy(b + 4 * j, &some, 16);
      }
      float of_groups[2][4] = {};
      auto& to = kGroupScales ? of_groups : sums_;
      const uint32_t up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
      KERNELS_UNROLL
      for (int i = 0; i < 4; i += kWords) {
        uint32_t a_up[kPairs], a_low[kPairs];
        decode<Code>(a_up, up + i);
        decode<Code>(a_low, low + i);
        KERNELS_UNROLL
        for (int j = 0; j < kPairs; j += 2) {
          const uint32_t* const beside = b + i * kEach / 8 + j;
          arch::mma_16816<A>(to[(i / kWords + j / 2) % 2], {a_up[j], a_low[j], a_up[j + 1], a_low[j + 1]},
                             {beside[0], beside[1]});
        }
      }
      if constexpr (kGroupScales) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const unsigned char* const scales =
              stage + kTile * kPitch + (g + 8 * half) * kScalePitch + block * 8 + t % 2 * 4;
          const uint32_t word = *reinterpret_cast<const uint32_t*>(scales);
          k::half two[2];
          memcpy(two, &word, 4);
          const float even = of_groups[0][2 * half] + of_groups[1][2 * half];
          const float odd = of_groups[0][2 * half + 1] + of_groups[1][2 * half + 1];
          sums_[0][half] = fmaf(even, k::convert<float>(two[0]), fmaf(odd, k::convert<float>(two[1]), sums_[0][half]));
        }
      }
    }

    // Of row g, or g + 8, in all lanes t.
    __device__ __forceinline__ float row(bool lower, bool residuals) const {
      if constexpr (kGroupScales) {
        const float pair = sums_[0][lower] + __shfl_xor_sync(0xffffffffu, sums_[0][lower], 1);
        return pair + __shfl_xor_sync(0xffffffffu, pair, 2);
      } else {
        const int i = lower ? 2 : 0;
        const float sum = sums_[0][i] + sums_[1][i];
        return residuals ? sum + (sums_[0][i + 1] + sums_[1][i + 1]) : sum;
      }
    }

   private:
    // Pairs of A: those of a word of codes, or two words that are such pairs already.
    static constexpr int kWords = kBits == 16 ? 2 : 1, kPairs = kBits == 4 ? 4 : 2;
    template <class Of>
    static __device__ __forceinline__ void decode(uint32_t (&pairs)[kPairs], const uint32_t* words) {
      if constexpr (kBits == 16)
        memcpy(pairs, words, 8);
      else
        k::detail::Decoder<Of>::template pairs<A>(pairs, *words, k::Nothing{});
    }

    float sums_[2][4] = {};
  };
};

}  // namespace
}  // namespace llm
