// Storage types and their conversions.
//
// half, bfloat16, float8_e4m3 and float8_e5m2 are CUDA's types if the CUDA headers can be found, otherwise the
// library's own with the same bits. convert<To>(x) rounds to nearest even; a double is rounded to float first, and then
// to the narrower type. fp8 and int8 saturate. NaN stays NaN, but becomes 0 as int8. Other integers and bool can only
// be read: conversion to them would truncate, so store() refuses them. float8_e8m0 is for scales: powers of 2, to which
// convert() rounds up. compute_t<T> is the type in which kernels calculate: double for double, float for all else.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "macros.h"

#if KERNELS_CUDA_TYPES
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif
#if defined(__AVX__)
#include <immintrin.h>
#endif

KERNELS_SHARED_BEGIN
#if KERNELS_CUDA_TYPES
using half = __half;
using bfloat16 = __nv_bfloat16;
using float8_e4m3 = __nv_fp8_e4m3;
using float8_e5m2 = __nv_fp8_e5m2;
#else
struct half { uint16_t bits; };
struct bfloat16 { uint16_t bits; };
struct float8_e4m3 { uint8_t bits; };
struct float8_e5m2 { uint8_t bits; };
#endif
struct float8_e8m0 { uint8_t bits; };
KERNELS_SHARED_END

KERNELS_BEGIN

template <class T>
using compute_t = std::conditional_t<std::is_same<T, double>::value, double, float>;

template <class To, class From>
KERNELS_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(static_cast<void*>(&to), static_cast<const void*>(&from), sizeof(To));
  return to;
}

namespace detail {

// The layout of a float narrower than 32 bits. `top` is the largest code: infinity if there is one, otherwise the
// largest finite value. decode and encode are branch-free, so that loops over them vectorize.
template <int kExponentBits, int kMantissaBits, bool kInfinity, bool kSaturate>
struct SmallFloat {
  static constexpr int bias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t sign = 1u << (kExponentBits + kMantissaBits);
  static constexpr uint32_t exponent_ones = ((1u << kExponentBits) - 1) << kMantissaBits;
  static constexpr uint32_t max_finite = kInfinity ? exponent_ones - 1 : sign - 2;
  static constexpr uint32_t nan = kInfinity ? exponent_ones | (1u << (kMantissaBits - 1)) : sign - 1;
  static constexpr uint32_t overflow = kSaturate ? max_finite : exponent_ones;
  static constexpr int shift = 23 - kMantissaBits;
  static constexpr uint32_t rebias = uint32_t(127 - bias) << 23;
  static constexpr uint32_t smallest_normal = rebias + (1u << 23);

  static KERNELS_HD float decode(uint32_t code) { return decode<float>(code); }
  static KERNELS_HD uint32_t encode(float value) { return encode(value, uint32_t{}); }

  // Decodes a code, or a vector of codes.
  template <class Float, class Bits>
  static KERNELS_HD Float decode(Bits code) {
    const Bits magnitude = code & (sign - 1);
    const Bits normal = (magnitude << shift) + rebias;
    // A subnormal's mantissa under the smallest normal's exponent is too large by exactly that smallest normal.
    const Float subnormal = bit_cast<Float>((magnitude << shift) + smallest_normal) - bit_cast<float>(smallest_normal);
    Bits bits = magnitude < (1u << kMantissaBits) ? bit_cast<Bits>(subnormal) : normal;
    const Bits special = kInfinity ? (magnitude << shift) | 0x7f800000u : all<Bits>(0x7fc00000u);
    bits = magnitude >= (kInfinity ? exponent_ones : nan) ? special : bits;
    return bit_cast<Float>(bits | (code & sign) << (31 - kExponentBits - kMantissaBits));
  }
  // Encodes a float, or a vector of floats, of the width of Bits.
  template <class Float, class Bits>
  static KERNELS_HD Bits encode(Float value, Bits) {
    const Bits bits = bit_cast<Bits>(value);
    const Bits magnitude = bits & 0x7fffffffu;
    // Adding a power of two whose last place is one subnormal step makes the addition round.
    constexpr uint32_t anchor = rebias + (uint32_t(shift + 1) << 23);
    const Bits subnormal = bit_cast<Bits>(bit_cast<Float>(magnitude) + bit_cast<float>(anchor)) - anchor;
    const Bits odd = (magnitude >> shift) & 1u;
    Bits normal = (magnitude - rebias + ((1u << (shift - 1)) - 1) + odd) >> shift;
    normal = normal > max_finite ? all<Bits>(overflow) : normal;
    Bits code = magnitude < smallest_normal ? subnormal : normal;
    code = magnitude > 0x7f800000u ? all<Bits>(nan) : code;
    return code | (bits >> 31) * sign;
  }

 private:
  template <class Bits>
  static KERNELS_HD Bits all(uint32_t x) { return Bits{} + x; }
};

using Fp16Format = SmallFloat<5, 10, true, false>;
using E4m3Format = SmallFloat<4, 3, false, true>;
using E5m2Format = SmallFloat<5, 2, true, true>;

KERNELS_HD float decode_bfloat16(uint32_t code) { return bit_cast<float>(code << 16); }

// Encodes the bits of a float, or of a vector of floats. Branch-free: `nan` is a mask of all ones for a NaN, which
// keeps its bits and is made quiet.
template <class Signed, class Bits>
KERNELS_HD Bits encode_bfloat16(Bits bits) {
  const Bits nan = (Bits)((Signed)(0x7f800000u - (bits & 0x7fffffffu)) >> 31);
  const Bits round_up = (0x7fffu + ((bits >> 16) & 1u)) & ~nan;
  return (bits + round_up) >> 16 | (nan & 0x40u);
}
KERNELS_HD uint32_t encode_bfloat16(float value) { return encode_bfloat16<int32_t>(bit_cast<uint32_t>(value)); }

// The largest finite value of a quantized type.
template <class T> struct Largest;
template <> struct Largest<int8_t> { static constexpr float value = 127.f; };
template <> struct Largest<float8_e4m3> { static constexpr float value = 448.f; };
template <> struct Largest<float8_e5m2> { static constexpr float value = 57344.f; };

// Scalar conversion to float and from float; the general case is a plain cast.
template <class T>
struct Convert {
  static KERNELS_HD float decode(T x) { return static_cast<float>(x); }
  static KERNELS_HD T encode(float x) { return static_cast<T>(x); }
};

template <>
struct Convert<half> {
  static KERNELS_HD float decode(half x) {
#if defined(KERNELS_DEVICE_CODE)
    return __half2float(x);
#elif defined(__F16C__)
    return _cvtsh_ss(bit_cast<uint16_t>(x));
#else
    return Fp16Format::decode(bit_cast<uint16_t>(x));
#endif
  }
  static KERNELS_HD half encode(float x) {
#if defined(KERNELS_DEVICE_CODE)
    return __float2half_rn(x);
#elif defined(__F16C__)
    return bit_cast<half>(
        static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT), 0)));
#else
    return bit_cast<half>(static_cast<uint16_t>(Fp16Format::encode(x)));
#endif
  }
};

template <>
struct Convert<bfloat16> {
  static KERNELS_HD float decode(bfloat16 x) { return decode_bfloat16(bit_cast<uint16_t>(x)); }
  static KERNELS_HD bfloat16 encode(float x) {
#if defined(KERNELS_DEVICE_CODE)
    return __float2bfloat16_rn(x);
#else
    return bit_cast<bfloat16>(static_cast<uint16_t>(encode_bfloat16(x)));
#endif
  }
};

template <class T, class Format>
struct ConvertFp8 {
  static KERNELS_HD float decode(T x) {
#if defined(KERNELS_DEVICE_CODE)
    return static_cast<float>(x);
#else
    return Format::decode(bit_cast<uint8_t>(x));
#endif
  }
  static KERNELS_HD T encode(float x) {
#if defined(KERNELS_DEVICE_CODE)
    return static_cast<T>(x);
#else
    return bit_cast<T>(static_cast<uint8_t>(Format::encode(x)));
#endif
  }
};
template <> struct Convert<float8_e4m3> : ConvertFp8<float8_e4m3, E4m3Format> {};
template <> struct Convert<float8_e5m2> : ConvertFp8<float8_e5m2, E5m2Format> {};

template <>
struct Convert<float8_e8m0> {
  static KERNELS_HD float decode(float8_e8m0 x) {
    const uint32_t code = x.bits;
    return bit_cast<float>(code == 255 ? 0x7fc00000u : code == 0 ? 0x00400000u : code << 23);
  }
  static KERNELS_HD float8_e8m0 encode(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x) & 0x7fffffffu;
    const uint32_t up = (bits + 0x7fffffu) >> 23;
    return {uint8_t(bits > 0x7f800000u ? 255u : bits <= 0x00400000u ? 0u : up < 254u ? up : 254u)};
  }
};

template <>
struct Convert<int8_t> {
  static KERNELS_HD float decode(int8_t x) { return static_cast<float>(x); }
  static KERNELS_HD int8_t encode(float x) {
    // Clamped first; then adding and subtracting 1.5 * 2^23 rounds to nearest even. NaN becomes 0.
    x = x > 127.f ? 127.f : x;
    x = x < -128.f ? -128.f : x;
    const int32_t rounded = bit_cast<int32_t>((x == x ? x : 0.f) + 12582912.f) - 0x4b400000;
    return static_cast<int8_t>(rounded);
  }
};

}  // namespace detail

template <class To, class From>
KERNELS_HD To convert(From x) {
  if constexpr (std::is_same<To, From>::value) {
    return x;
  } else if constexpr (std::is_same<To, double>::value) {
    return static_cast<double>(detail::Convert<From>::decode(x));
  } else if constexpr (std::is_same<From, double>::value) {
    return detail::Convert<To>::encode(static_cast<float>(x));
  } else if constexpr (std::is_same<To, float>::value) {
    return detail::Convert<From>::decode(x);
  } else {
    return detail::Convert<To>::encode(detail::Convert<From>::decode(x));
  }
}

KERNELS_END
