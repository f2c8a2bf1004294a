// Pack<T, N>: N elements that move together: one memory transaction on the GPU, one or a few SIMD registers on the CPU.
// Arithmetic is elementwise. Loops have constant trip counts, so nvcc keeps packs in registers, and g++ and clang++
// vectorize them.
#pragma once

#include "../arch/scalar.h"
#include "dtype.h"

KERNELS_BEGIN

template <class T, int N>
struct Pack {
  using value_type = T;
  static constexpr int size = N;

  T v[N];

  KERNELS_HD T& operator[](int i) { return v[i]; }
  KERNELS_HD const T& operator[](int i) const { return v[i]; }
};

template <int N, class T>
KERNELS_HD Pack<T, N> broadcast(T value) {
  Pack<T, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) out.v[i] = value;
  return out;
}

// f applied to every element.
template <class T, int N, class F>
KERNELS_HD auto transform(const Pack<T, N>& a, F f) {
  Pack<decltype(f(a.v[0])), N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) out.v[i] = f(a.v[i]);
  return out;
}

template <class T, class U, int N, class F>
KERNELS_HD auto transform(const Pack<T, N>& a, const Pack<U, N>& b, F f) {
  Pack<decltype(f(a.v[0], b.v[0])), N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) out.v[i] = f(a.v[i], b.v[i]);
  return out;
}

#define KERNELS_PACK_OPERATOR(op)                                                                    \
  template <class T, int N>                                                                          \
  KERNELS_HD Pack<T, N> operator op(const Pack<T, N>& a, const Pack<T, N>& b) {                      \
    Pack<T, N> out;                                                                                  \
    KERNELS_UNROLL                                                                                   \
    for (int i = 0; i < N; ++i) out.v[i] = a.v[i] op b.v[i];                                         \
    return out;                                                                                      \
  }                                                                                                  \
  template <class T, int N>                                                                          \
  KERNELS_HD Pack<T, N> operator op(const Pack<T, N>& a, typename Pack<T, N>::value_type b) {        \
    Pack<T, N> out;                                                                                  \
    KERNELS_UNROLL                                                                                   \
    for (int i = 0; i < N; ++i) out.v[i] = a.v[i] op b;                                              \
    return out;                                                                                      \
  }
KERNELS_PACK_OPERATOR(+)
KERNELS_PACK_OPERATOR(-)
KERNELS_PACK_OPERATOR(*)
KERNELS_PACK_OPERATOR(/)
#undef KERNELS_PACK_OPERATOR

// The smaller (below: the larger) of two numbers. If one is NaN, either may be returned: callers must not rely on it.
template <class T>
KERNELS_HD T lesser(T a, T b) {
#if defined(KERNELS_DEVICE_CODE)
  if constexpr (std::is_same<T, float>::value) return ::fminf(a, b);
#endif
  return b < a ? b : a;
}
template <class T>
KERNELS_HD T greater(T a, T b) {
#if defined(KERNELS_DEVICE_CODE)
  if constexpr (std::is_same<T, float>::value) return ::fmaxf(a, b);
#endif
  return b > a ? b : a;
}

// In parentheses because windows.h defines macros of these names.
template <class T, int N>
KERNELS_HD Pack<T, N>(min)(const Pack<T, N>& a, typename Pack<T, N>::value_type b) {
  return transform(a, [b](T x) { return lesser(x, b); });
}
template <class T, int N>
KERNELS_HD Pack<T, N>(max)(const Pack<T, N>& a, typename Pack<T, N>::value_type b) {
  return transform(a, [b](T x) { return greater(x, b); });
}

// Reductions keep several partial results (on the host as many as a vector register holds) and combine them pairwise:
// short dependency chains, few registers, and a shape that vectorizes.
template <class T, int N, class F>
KERNELS_HD T fold(const Pack<T, N>& a, F f) {
#if defined(KERNELS_DEVICE_CODE)
  constexpr int lanes = 4;
#else
  constexpr int lanes = 16;
#endif
  if constexpr (N == 1) {
    return a.v[0];
  } else if constexpr (N > lanes && N % lanes == 0) {
    Pack<T, lanes> part;
    KERNELS_UNROLL
    for (int i = 0; i < lanes; ++i) part.v[i] = a.v[i];
    KERNELS_UNROLL
    for (int j = lanes; j < N; j += lanes) {
      KERNELS_UNROLL
      for (int i = 0; i < lanes; ++i) part.v[i] = f(part.v[i], a.v[j + i]);
    }
    return fold(part, f);
  } else if constexpr (N % 2 == 0) {
    Pack<T, N / 2> part;
    KERNELS_UNROLL
    for (int i = 0; i < N / 2; ++i) part.v[i] = f(a.v[i], a.v[i + N / 2]);
    return fold(part, f);
  } else {
    T out = a.v[0];
    KERNELS_UNROLL
    for (int i = 1; i < N; ++i) out = f(out, a.v[i]);
    return out;
  }
}

template <class T, int N>
KERNELS_HD T sum(const Pack<T, N>& a) {
  return fold(a, [](T x, T y) { return x + y; });
}
template <class T, int N>
KERNELS_HD T max_of(const Pack<T, N>& a) {
  return fold(a, [](T x, T y) { return greater(x, y); });
}
template <class T, int N>
KERNELS_HD T dot(const Pack<T, N>& a, const Pack<T, N>& b) {
  return sum(a * b);
}

// Vector extensions of g++ and clang, for loops that these do not vectorize themselves. nvcc does not allow them in
// functions for host and device.
#if defined(__GNUC__) && !defined(__CUDACC__)
#define KERNELS_VECTORS 1
#else
#define KERNELS_VECTORS 0
#endif

namespace detail {
// The width of the host's vector registers.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#if KERNELS_VECTORS
template <class T, int N>
struct VectorType {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using VectorOf = typename VectorType<T, N>::type;
// Whether to use vector extensions for packs of this type.
template <class C, int N>
constexpr bool in_vectors = std::is_same<C, float>::value&& N > 1 &&
                            (N & (N - 1)) == 0 && N * sizeof(C) <= kVectorBytes;

// Widens integers, signed or unsigned. Left to themselves, compilers do it piecewise.
template <class T, int N>
KERNELS_HD VectorOf<int32_t, N> signed_bytes(const Pack<T, N>& in) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return (VectorOf<int32_t, N>)_mm512_maskz_cvtepi8_epi32(0xffff, bit_cast<__m128i>(in));
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) return (VectorOf<int32_t, N>)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(in)));
#endif
  return __builtin_convertvector(bit_cast<VectorOf<int8_t, N>>(in), VectorOf<int32_t, N>);
}
template <class T, int N>
KERNELS_HD VectorOf<uint32_t, N> widened_shorts(const Pack<T, N>& in) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return (VectorOf<uint32_t, N>)_mm512_maskz_cvtepu16_epi32(0xffff, bit_cast<__m256i>(in));
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) return (VectorOf<uint32_t, N>)_mm256_cvtepu16_epi32(bit_cast<__m128i>(in));
#endif
  return __builtin_convertvector(bit_cast<VectorOf<uint16_t, N>>(in), VectorOf<uint32_t, N>);
}
template <class T, int N>
KERNELS_HD VectorOf<uint16_t, N> widened_bytes(const Pack<T, N>& in) {
#if defined(__AVX2__)
  if constexpr (N == 16) return (VectorOf<uint16_t, N>)_mm256_cvtepu8_epi16(bit_cast<__m128i>(in));
  if constexpr (N == 8) return (VectorOf<uint16_t, N>)_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bit_cast<int64_t>(in)));
#endif
  return __builtin_convertvector(bit_cast<VectorOf<uint8_t, N>>(in), VectorOf<uint16_t, N>);
}
// Widens float8_e4m3 to halves of 2^-8 times their value: the code's bits in the fields of a half, valid for subnormals
// as well. NaN, all ones below the sign, stays NaN.
template <int N>
KERNELS_HD VectorOf<uint16_t, N> e4m3_as_halves(const Pack<float8_e4m3, N>& in) {
  using Halves = VectorOf<uint16_t, N>;
  Halves codes;
#if defined(__AVX512BW__)
  if constexpr (N == 32) codes = (Halves)_mm512_cvtepi8_epi16(bit_cast<__m256i>(in));
  else
#endif
#if defined(__AVX2__)
  if constexpr (N == 16) codes = (Halves)_mm256_cvtepi8_epi16(bit_cast<__m128i>(in));
  else
#endif
  codes = (Halves)__builtin_convertvector(bit_cast<VectorOf<int8_t, N>>(in), VectorOf<int16_t, N>);
#if defined(__AVX512BW__)
  if constexpr (N == 32) {
    // Bit 14, the top of a half's exponent, is the sign in `shifted`. In `carried` it is flipped if the code is NaN,
    // whose ones carry into it. The XOR of both is 0, or 1 for a NaN, which completes an exponent of all ones.
    const Halves shifted = codes << 7, carried = shifted + uint16_t(0x80);
    const __m512i sign = _mm512_set1_epi16(0x4000);
    return (Halves)_mm512_ternarylogic_epi32((__m512i)shifted, (__m512i)carried, sign, 0x78);
  }
#endif
  const Halves placed = codes << 7 & uint16_t(0xbf80);
  return placed | (Halves)((placed & uint16_t(0x3f80)) == uint16_t(0x3f80));
}
// The code is the upper byte of a half.
template <int N>
KERNELS_HD VectorOf<uint16_t, N> e5m2_as_halves(const Pack<float8_e5m2, N>& in) {
#if defined(__AVX512BW__)
  if constexpr (N == 32) return (VectorOf<uint16_t, N>)_mm512_cvtepu8_epi16(bit_cast<__m256i>(in)) << 8;
#endif
  return widened_bytes(in) << 8;
}
#endif

#if defined(__CUDACC__)
// Two fp8 codes in the lower half of a word, as halves.
template <class T>
__device__ __forceinline__ uint32_t halves_of_float8(uint32_t codes) {
#if !KERNELS_HAS_FP8
  if constexpr (std::is_same<T, float8_e4m3>::value) return arch::e4m3_to_halves(codes);
  else return __byte_perm(codes, 0, 0x1404);  // e5m2 is the upper half of a half
#else
  const auto kind = std::is_same<T, float8_e4m3>::value ? __NV_E4M3 : __NV_E5M2;
  const __half2_raw two = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), kind);
  return two.x | uint32_t(two.y) << 16;
#endif
}
#endif

#if defined(KERNELS_DEVICE_CODE)
// Pairs of half, bfloat16 or fp8 to floats, and back: one instruction converts two.
template <class T, int N>
KERNELS_HD Pack<float, N> floats_of_pairs(const Pack<T, N>& in) {
  Pack<float, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; i += 2) {
    if constexpr (sizeof(T) == 2) {
      uint32_t two;
      memcpy(&two, in.v + i, sizeof(two));
      if constexpr (std::is_same<T, half>::value) {
        arch::halves_to_floats(two, out.v[i], out.v[i + 1]);
      } else {
        out.v[i] = bit_cast<float>(two << 16);
        out.v[i + 1] = bit_cast<float>(two & 0xffff0000u);
      }
    } else {
      const uint32_t codes = in.v[i].__x | uint32_t(in.v[i + 1].__x) << 8;
      arch::halves_to_floats(halves_of_float8<T>(codes), out.v[i], out.v[i + 1]);
    }
  }
  return out;
}
template <class T, int N>
KERNELS_HD Pack<T, N> pairs_of_floats(const Pack<float, N>& in) {
  Pack<T, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; i += 2) {
    if constexpr (sizeof(T) == 2) {
      constexpr auto pair = std::is_same<T, half>::value ? arch::floats_to_halves : arch::floats_to_bfloats;
      const uint32_t two = pair(in.v[i], in.v[i + 1]);
      memcpy(out.v + i, &two, sizeof(two));
    } else {
      const auto kind = std::is_same<T, float8_e4m3>::value ? __NV_E4M3 : __NV_E5M2;
      const auto two = __nv_cvt_float2_to_fp8x2(make_float2(in.v[i], in.v[i + 1]), __NV_SATFINITE, kind);
      out.v[i].__x = static_cast<__nv_fp8_storage_t>(two & 0xff);
      out.v[i + 1].__x = static_cast<__nv_fp8_storage_t>(two >> 8);
    }
  }
  return out;
}
#elif defined(__F16C__)
// Eight halves, or with AVX-512 sixteen, in one instruction. Vectors have the width of those in the loops around: a
// value stored in two parts would have to wait for both in the cache. Masked with all ones because g++ 12 warns about
// the unmasked forms.
template <int N>
KERNELS_HD Pack<float, N> floats_of_halves(const Pack<half, N>& in) {
  Pack<float, N> out;
#if defined(__AVX512F__)
  if constexpr (N % 16 == 0) {
    for (int i = 0; i < N; i += 16) {
      const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in.v + i));
      _mm512_storeu_ps(out.v + i, _mm512_maskz_cvtph_ps(0xffff, codes));
    }
    return out;
  }
#endif
  for (int i = 0; i < N; i += 8) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in.v + i));
    _mm256_storeu_ps(out.v + i, _mm256_cvtph_ps(codes));
  }
  return out;
}
template <int N>
KERNELS_HD Pack<half, N> halves_of_floats(const Pack<float, N>& in) {
  Pack<half, N> out;
#if defined(__AVX512F__)
  if constexpr (N % 16 == 0) {
    for (int i = 0; i < N; i += 16) {
      const __m256i codes = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(in.v + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.v + i), codes);
    }
    return out;
  }
#endif
  for (int i = 0; i < N; i += 8) {
    const __m128i codes = _mm256_cvtps_ph(_mm256_loadu_ps(in.v + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.v + i), codes);
  }
  return out;
}
#endif
}  // namespace detail

// Elementwise conversion; pairs and groups of eight use the hardware's vector conversions.
template <class To, class From, int N>
KERNELS_HD Pack<To, N> convert(const Pack<From, N>& in) {
#if defined(KERNELS_DEVICE_CODE)
  if constexpr (std::is_same<To, From>::value) {
    return in;
  } else if constexpr (N % 2 == 0 && std::is_same<To, float>::value && sizeof(From) <= 2 &&
                       !std::is_integral<From>::value) {
    return detail::floats_of_pairs(in);
  } else if constexpr (N % 2 == 0 && std::is_same<From, float>::value && sizeof(To) <= 2 &&
                       !std::is_integral<To>::value) {
    return detail::pairs_of_floats<To>(in);
  } else
#else
  if constexpr (std::is_same<To, From>::value) {
    return in;
  } else
#if defined(__F16C__)
  if constexpr (N % 8 == 0 && std::is_same<From, half>::value && std::is_same<To, float>::value) {
    return detail::floats_of_halves(in);
  } else if constexpr (N % 8 == 0 && std::is_same<From, float>::value && std::is_same<To, half>::value) {
    return detail::halves_of_floats(in);
  } else
#endif
#if KERNELS_VECTORS && !defined(__F16C__)
  if constexpr (detail::in_vectors<To, N> && std::is_same<From, half>::value) {
    return bit_cast<Pack<To, N>>(detail::Fp16Format::decode<detail::VectorOf<float, N>>(detail::widened_shorts(in)));
  } else if constexpr (detail::in_vectors<From, N> && std::is_same<To, half>::value) {
    const auto codes =
        detail::Fp16Format::encode(bit_cast<detail::VectorOf<float, N>>(in), detail::VectorOf<uint32_t, N>{});
    return bit_cast<Pack<To, N>>(__builtin_convertvector(codes, detail::VectorOf<uint16_t, N>));
  } else
#endif
#if KERNELS_VECTORS
  if constexpr (detail::in_vectors<To, N> && std::is_same<From, bfloat16>::value) {
    return bit_cast<Pack<To, N>>(detail::widened_shorts(in) << 16);
  } else if constexpr (detail::in_vectors<To, N> && std::is_same<From, int8_t>::value) {
    return bit_cast<Pack<To, N>>(__builtin_convertvector(detail::signed_bytes(in), detail::VectorOf<float, N>));
  } else if constexpr (detail::in_vectors<To, N> && std::is_same<From, float8_e4m3>::value) {
    // The code's bits in the top of a float are the value times 2^-120, for subnormals as well.
    const auto codes = detail::signed_bytes(in);
    const auto placed = bit_cast<detail::VectorOf<float, N>>(codes << 20 & int32_t(0x87f00000));
    return bit_cast<Pack<To, N>>(bit_cast<detail::VectorOf<int32_t, N>>(placed * 0x1p120f) | ((codes & 0x7f) == 0x7f));
  } else if constexpr (detail::in_vectors<To, N> && N >= 8 && std::is_same<From, float8_e5m2>::value) {
    return convert<To>(bit_cast<Pack<half, N>>(detail::e5m2_as_halves(in)));
  } else if constexpr (detail::in_vectors<From, N> && std::is_same<To, bfloat16>::value) {
    const auto codes =
        detail::encode_bfloat16<detail::VectorOf<int32_t, N>>(bit_cast<detail::VectorOf<uint32_t, N>>(in));
    return bit_cast<Pack<To, N>>(__builtin_convertvector(codes, detail::VectorOf<uint16_t, N>));
  } else
#endif
#endif
  {
    Pack<To, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = convert<To>(in.v[i]);
    return out;
  }
}

KERNELS_END
