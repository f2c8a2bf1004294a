// Decodes weights for tensor cores: the codes in a word become pairs of half or bfloat16, all of them exact.
#pragma once

#include "../arch/sm80.cuh"
#include "../weights.h"

KERNELS_BEGIN
namespace detail {

// The bits, as a T, of a number that T represents exactly; below, two of them in a word.
template <class T>
KERNELS_HD constexpr uint32_t bits_of(float x) {
  constexpr int digits = std::is_same<T, half>::value ? 10 : 7;
  const uint32_t sign = x < 0.f ? 0x8000u : 0u;
  if (x < 0.f) x = -x;
  int exponent = std::is_same<T, half>::value ? 15 : 127;
  for (; x >= 2.f; x /= 2.f) ++exponent;
  for (; x < 1.f; x *= 2.f) --exponent;
  return sign | uint32_t(exponent) << digits | uint32_t((x - 1.f) * float(1 << digits));
}
template <class T>
KERNELS_HD constexpr uint32_t pair_of(float low, float high) { return bits_of<T>(low) | bits_of<T>(high) << 16; }

// x and y, rounded, as a pair of T.
template <class T>
__device__ __forceinline__ uint32_t rounded_pair(float x, float y) {
  return std::is_same<T, half>::value ? arch::floats_to_halves(x, y) : arch::floats_to_bfloats(x, y);
}

template <class T>
__device__ __forceinline__ void floats_of_pair(uint32_t pair, float& low, float& high) {
  if constexpr (std::is_same<T, half>::value) {
    arch::halves_to_floats(pair, low, high);
  } else {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  }
}

// The rounding errors of rounded_pair(x, y), as a pair of T.
template <class T>
__device__ __forceinline__ uint32_t rest_of_pair(float x, float y, uint32_t pair) {
  float low, high;
  floats_of_pair<T>(pair, low, high);
  return rounded_pair<T>(x - low, y - high);
}

// The pair (-base - zero, -base - zero); Nothing stands for a zero point of 0.
template <class T, int kBase>
__device__ __forceinline__ uint32_t without(Nothing) {
  constexpr uint32_t pair = pair_of<T>(-float(kBase), -float(kBase));
  return pair;
}
template <class T, int kBase>
__device__ __forceinline__ uint32_t without(float zero) {
  const float x = -float(kBase) - zero;
  return rounded_pair<T>(x, x);
}
template <class T>
__device__ __forceinline__ uint32_t halves_to(uint32_t pair) {
  if constexpr (std::is_same<T, half>::value) {
    return pair;
  } else {
    float low, high;
    arch::halves_to_floats(pair, low, high);
    return arch::floats_to_bfloats(low, high);
  }
}

// pairs<T>(out, word, zero): decodes the codes of a word, in their order unless noted, and subtracts the zero point, an
// integer. A code placed into the lowest mantissa bits of the half 1024 makes 1024 + code.
template <class Code>
struct Decoder;

template <>
struct Decoder<int8_t> {
  static constexpr int each = 4;
  static constexpr bool takes_zero = true;
  template <class T, class Zero>
  static __device__ __forceinline__ void pairs(uint32_t (&out)[2], uint32_t word, Zero zero) {
    constexpr uint32_t one = pair_of<half>(1, 1);
    const uint32_t plain = word ^ 0x80808080u, shift = without<half, 1024 + 128>(zero);
    out[0] = halves_to<T>(arch::fma_pair<half>(__byte_perm(plain, 0x64646464u, 0x4140), one, shift));
    out[1] = halves_to<T>(arch::fma_pair<half>(__byte_perm(plain, 0x64646464u, 0x4342), one, shift));
  }
};

template <class Code>
struct Float8Decoder {
  static constexpr int each = 4;
  static constexpr bool takes_zero = false;
  // The pair of the two codes in the lower half of a word.
  template <class T>
  static __device__ __forceinline__ uint32_t pair(uint32_t codes) {
    return halves_to<T>(halves_of_float8<Code>(codes));
  }
  template <class T>
  static __device__ __forceinline__ void pairs(uint32_t (&out)[2], uint32_t word, Nothing) {
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) out[i] = pair<T>(word >> (16 * i));
  }
};
template <>
struct Decoder<float8_e4m3> : Float8Decoder<float8_e4m3> {};
template <>
struct Decoder<float8_e5m2> : Float8Decoder<float8_e5m2> {};

template <int kOffset>
struct NibbleDecoder {
  static constexpr int each = 8;
  static constexpr bool takes_zero = true;
  template <class T, class Zero>
  static __device__ __forceinline__ void pairs(uint32_t (&out)[4], uint32_t word, Zero zero) {
    constexpr uint32_t one = pair_of<T>(1, 1);
    if constexpr (std::is_same<T, half>::value) {
      constexpr uint32_t sixteenth = pair_of<half>(0.0625f, 0.0625f);
      const uint32_t shift = without<half, 1024 + kOffset>(zero), shift_16 = without<half, 64 + kOffset>(zero);
      KERNELS_UNROLL
      for (int i = 0; i < 4; i += 2) {
        out[i] = arch::fma_pair<half>(arch::mask_or<0x000f000fu, 0x64006400u>(word), one, shift);
        out[i + 1] = arch::fma_pair<half>(arch::mask_or<0x00f000f0u, 0x64006400u>(word), sixteenth,
                                          shift_16);  // 1024 + 16 * code
        word >>= 8;
      }
    } else {
      const uint32_t shift = without<bfloat16, 128 + kOffset>(zero);
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i)
        out[i] = arch::fma_pair<bfloat16>(arch::mask_or<0x000f000fu, 0x43004300u>(word >> (4 * i)), one, shift);
    }
  }
};
template <>
struct Decoder<Uint4> : NibbleDecoder<0> {};
template <>
struct Decoder<Int4> : NibbleDecoder<8> {};

// A code placed into a 16-bit type's sign, two lowest exponent bits and highest mantissa bit is its value divided by a
// power of 2; this holds for subnormal codes as well. high: codes whose signs are in place.
template <class T>
__device__ __forceinline__ uint32_t fp4_pair(uint32_t high, uint32_t shifted) {
  constexpr bool halves = std::is_same<T, half>::value;
  constexpr uint32_t factor = pair_of<T>(halves ? 0x1p14f : 0x1p126f, halves ? 0x1p14f : 0x1p126f);
  constexpr uint32_t sizes = halves ? 0x0e000e00u : 0x01c001c0u, minus_zero = 0x80008000u;
  return arch::fma_pair<T>((high & 0x80008000u) | (shifted & sizes), factor, minus_zero);
}
template <class T>
constexpr int kFp4Shift = std::is_same<T, half>::value ? 3 : 6;  // for a code in the highest bits
template <>
struct Decoder<Fp4> {
  static constexpr int each = 8;
  static constexpr bool takes_zero = false;
  template <class T>
  static __device__ __forceinline__ void pairs(uint32_t (&out)[4], uint32_t word, Nothing) {
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int up = 12 - 4 * i, by = up - kFp4Shift<T>;
      out[i] = fp4_pair<T>(word << up, by >= 0 ? word << by : word >> -by);
    }
  }
};

template <>
struct Decoder<Gf4> {
  static constexpr int each = 8;
  static constexpr bool takes_zero = false;
  // The pairs have codes 0 and 3, 1 and 4, 2 and 5, 6 and 7.
  template <class T>
  static __device__ __forceinline__ void pairs(uint32_t (&out)[4], uint32_t word, Nothing) {
    // In `six`, codes 0 to 2 are at bits 0, 3, 6 of the lower half and 3 to 5 at bits 1, 4, 7 of the upper; in `two`,
    // code 6 is at bit 2 of the lower half and 7 at bit 5 of the upper.
    const uint32_t six = __byte_perm(word, 0, 0x3221), two = __byte_perm(word, 0, 0x4343);
    // Maps a code to (code - 4) / -4; each slope accounts for the code's place in the mantissa.
    const uint32_t slope_03 = arch::join_halves(bits_of<half>(-0.25f), bits_of<half>(-0.125f));
    const uint32_t slope_14 = arch::join_halves(bits_of<half>(-0.03125f), bits_of<half>(-0.015625f));
    const uint32_t slope_25 = arch::join_halves(bits_of<half>(-0.00390625f), bits_of<half>(-0.001953125f));
    const uint32_t slope_67 = arch::join_halves(bits_of<half>(-0.0625f), bits_of<half>(-0.0078125f));
    constexpr uint32_t shift_03 = pair_of<half>(257, 129), shift_14 = pair_of<half>(33, 17),
                       shift_25 = pair_of<half>(5, 3), shift_67 = pair_of<half>(65, 9);
    constexpr uint32_t minus_zero = 0x80008000u;
    out[0] = arch::fma_pair<half>(arch::mask_or<0x000e0007u, 0x64006400u>(six), slope_03, shift_03);
    out[1] = arch::fma_pair<half>(arch::mask_or<0x00700038u, 0x64006400u>(six), slope_14, shift_14);
    out[2] = arch::fma_pair<half>(arch::mask_or<0x038001c0u, 0x64006400u>(six), slope_25, shift_25);
    out[3] = arch::fma_pair<half>(arch::mask_or<0x00e0001cu, 0x64006400u>(two), slope_67, shift_67);
    const uint32_t scale = __byte_perm(word, 0, 0x0404);  // float8_e5m2 is the upper byte of a half
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = halves_to<T>(arch::fma_pair<half>(out[i], scale, minus_zero));
  }
};

// Permutes inputs to the order of a decoder's pairs.
template <class Code, int kWords>
__device__ __forceinline__ void order_pairs(uint32_t (&x)[kWords]) {
  if constexpr (std::is_same<Code, Gf4>::value) {
    const uint32_t p03 = __byte_perm(x[0], x[1], 0x7610), p14 = __byte_perm(x[0], x[2], 0x5432),
                   p25 = __byte_perm(x[1], x[2], 0x7610);
    x[0] = p03, x[1] = p14, x[2] = p25;
  }
}

// Whether a decoder can subtract zero points of this type: 8-bit integers, or none.
template <class Code, class Zero, class = void>
struct TakesZeros : std::false_type {};
template <class Code, class Zero>
struct TakesZeros<Code, Zero, void_t<decltype(Decoder<Code>::each)>>
    : std::integral_constant<bool,
                             std::is_same<Zero, Nothing>::value ||
                                 (Decoder<Code>::takes_zero && std::is_integral<Zero>::value && sizeof(Zero) == 1)> {};

// The codes that tensor cores get from a source of weights: a 16-bit type, or a type that is decoded; and how many are
// in the 16 bytes that a lane reads at a time. void: the source must be resolved.
template <class W>
struct Coded {
  using Stored = typename Traits<W>::Code;
  static constexpr bool scaled = Traits<W>::scaled;
  static constexpr bool known =
      !std::is_void<Stored>::value && (!scaled || TakesZeros<Stored, typename Traits<W>::Zero>::value);
  using Code = std::conditional_t<known, Stored, void>;
  static constexpr int pack = Traits<W>::pack;
};

// The 16-bit type of weights that are stored as such, or void.
template <class W>
using tensor_type = only_16_bit<typename Coded<W>::Code>;

// The same for weights or inputs whose tiles can be copied from memory, or void.
template <class S>
using copied_type = std::conditional_t<Traits<S>::rows_in_runs, tensor_type<S>, void>;

// Whether a source's scales have zero points.
template <class W>
constexpr bool has_zeros = !std::is_same<typename Traits<W>::Zero, Nothing>::value;

// The 16-bit type of both operands in a product: that of the weights, otherwise that of the inputs in memory, otherwise
// half.
template <class X, class W>
struct MeetingType {
  using First = std::conditional_t<std::is_void<tensor_type<W>>::value, typename Traits<X>::Memory, tensor_type<W>>;
  using type = std::conditional_t<std::is_void<First>::value, half, First>;
};
template <class X, class W>
using meeting_type = typename MeetingType<X, W>::type;

}  // namespace detail
KERNELS_END
