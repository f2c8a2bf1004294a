// Scalar mathematics for float and double, host and device.
//
// The device uses the hardware's fast instructions; the host uses branch-free polynomials that vectorize in a loop over
// a pack. Errors in float, in units of the last place: exp 2 near 0, on the GPU growing to 80 near -88, where the
// result is below 1e-37; precise_exp 2, sigmoid 4 (below 2^-126 the result is 0), tanh 4, erf 2. fast_tanh has an
// absolute error of 2^-22. NaN in gives NaN out.
#pragma once

#include <cmath>

#include "../arch/scalar.h"
#include "pack.h"

KERNELS_BEGIN

template <class C>
KERNELS_HD C infinity() {
  if constexpr (std::is_same<C, double>::value) return bit_cast<double>(uint64_t(0x7ff) << 52);
  else return bit_cast<float>(uint32_t(0xff) << 23);
}

// The largest finite value.
template <class C>
KERNELS_HD C largest() {
  if constexpr (std::is_same<C, double>::value) return 0x1.fffffffffffffp1023;
  else return 0x1.fffffep127f;
}

KERNELS_HD float fma(float a, float b, float c) {
#if defined(KERNELS_DEVICE_CODE) || defined(__FMA__)
  return ::fmaf(a, b, c);
#else
  return a * b + c;  // std::fma is a library call on machines without the instruction
#endif
}

KERNELS_HD double fma(double a, double b, double c) {
#if defined(KERNELS_DEVICE_CODE) || defined(__FMA__)
  return ::fma(a, b, c);
#else
  return a * b + c;
#endif
}

namespace detail {

// shifted - shift, where shifted is a sum with shift in [power, 2 power), in which all floats are integers. With
// -ffast-math a compiler that reorders sums would simplify this to the unrounded addend. It cannot here, as it does not
// know that shifted contains all bits of power.
template <class Code, class T>
KERNELS_HD T without_shift(T shifted, T shift, [[maybe_unused]] T power) {
  KERNELS_SUMS_IN_ORDER
#if KERNELS_REORDERS_SUMS && !defined(KERNELS_DEVICE_CODE)
  shifted = bit_cast<T>(bit_cast<Code>(shifted) | bit_cast<Code>(power));
#endif
  return shifted - shift;
}

// For the host. T is float and Code uint32_t, or both are vectors of these; comparisons let NaN pass through. exp(x) =
// 2^n exp(r), |r| <= ln2 / 2. Returns exp(r) - 1; code becomes the bits of 1.5 2^23 + n.
template <class T, class Code>
KERNELS_HD T exp_reduced(T x, Code& code) {
  KERNELS_SUMS_IN_ORDER
  const T shift = T{} + 12582912.f, shifted = x * 1.44269504f + shift;
  code = bit_cast<Code>(shifted);
  const T n = without_shift<Code>(shifted, shift, T{} + 0x1p23f);
  T r = n * -0.693359375f + x;
  r = n * 2.12194440e-4f + r;
  T p = r * 1.99076145e-4f + 1.39336793e-3f;
  p = p * r + 8.33328597e-3f;
  p = p * r + 4.16664646e-2f;
  p = p * r + 1.66666668e-1f;
  p = p * r + 0.5f;
  return p * (r * r) + r;
}

template <class T, class Code>
KERNELS_HD T exp_host(T x) {
  const T lowest = T{} - 104.f, highest = T{} + 89.f;
  x = x > highest ? highest : x;
  x = x < lowest ? lowest : x;
  Code code;
  const T p = exp_reduced(x, code) + 1.f;
  // 2^n as two factors, so that n = 128 and subnormal results are correct. 1024 keeps the halved number positive.
  const Code exponent = code - (0x4b400000u - 1024u), first = exponent >> 1;
  const T low = bit_cast<T>((first - (512u - 127u)) << 23);
  const T high = bit_cast<T>((exponent - first - (512u - 127u)) << 23);
  return p * low * high;
}

// The same for x <= 0.
template <class T, class Code>
KERNELS_HD T exp_host_falling(T x) {
  const T lowest = T{} - 104.f;
  x = x < lowest ? lowest : x;
  Code code;
  const T p = exp_reduced(x, code);
  // 2^(n + 64) is normal; the last multiplication rounds subnormal results.
  const T power = bit_cast<T>((code << 23) + (uint32_t(127 + 64) << 23));
  return (p * power + power) * 0x1p-64f;
}

}  // namespace detail

KERNELS_HD float exp(float x) {
#if defined(KERNELS_DEVICE_CODE)
  return arch::exp2_flushed(x * 1.44269504f);
#else
  return detail::exp_host<float, uint32_t>(x);
#endif
}
KERNELS_HD double exp(double x) { return ::exp(x); }

// Accurate to 2 units of the last place for every x, on the GPU too, at four times the cost of exp.
KERNELS_HD float precise_exp(float x) {
#if defined(KERNELS_DEVICE_CODE)
  return ::expf(x);
#else
  return exp(x);
#endif
}
KERNELS_HD double precise_exp(double x) { return ::exp(x); }

KERNELS_HD float log(float x) { return ::logf(x); }
KERNELS_HD double log(double x) { return ::log(x); }

KERNELS_HD float rsqrt(float x) {
#if defined(KERNELS_DEVICE_CODE)
  return ::rsqrtf(x);
#else
  return 1.f / std::sqrt(x);
#endif
}
KERNELS_HD double rsqrt(double x) {
#if defined(KERNELS_DEVICE_CODE)
  return ::rsqrt(x);
#else
  return 1.0 / std::sqrt(x);
#endif
}

// A quotient accurate to 2 units of the last place: enough for softmax weights, at half the cost of IEEE division on
// the GPU.
KERNELS_HD float divide(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
KERNELS_HD double divide(double a, double b) { return a / b; }
// A correctly rounded IEEE quotient, whatever the compiler's flags say about divisions on the GPU.
KERNELS_HD float over_once(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// A product rounded once, which no compiler fuses with the next sum.
KERNELS_HD float times_once(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fmul_rn(a, b);
#else
  return arch::rounded(a * b);
#endif
}
KERNELS_HD double times_once(double a, double b) {
#if defined(KERNELS_DEVICE_CODE)
  return __dmul_rn(a, b);
#else
  return arch::rounded(a * b);
#endif
}
template <int N>
KERNELS_HD Pack<float, N> times_once(const Pack<float, N>& v, float factor) {
#if KERNELS_VECTORS && !defined(KERNELS_DEVICE_CODE)
  if constexpr (detail::in_vectors<float, N>)
    return bit_cast<Pack<float, N>>(arch::rounded(bit_cast<detail::VectorOf<float, N>>(v) * factor));
#endif
  return transform(v, [factor](float x) { return times_once(x, factor); });
}

// 1 / x for x >= 1; 0 where that would be subnormal.
KERNELS_HD float inverse(float x) {
#if defined(KERNELS_DEVICE_CODE)
  return arch::reciprocal_flushed(x);
#else
  return 1.f / x;
#endif
}
KERNELS_HD double inverse(double x) { return 1.0 / x; }

KERNELS_HD float magnitude(float x) { return bit_cast<float>(bit_cast<uint32_t>(x) & 0x7fffffffu); }
KERNELS_HD double magnitude(double x) { return ::fabs(x); }

KERNELS_HD float copy_sign(float size, float sign) {
  return bit_cast<float>((bit_cast<uint32_t>(size) & 0x7fffffffu) | (bit_cast<uint32_t>(sign) & 0x80000000u));
}

template <class C>
KERNELS_HD C sigmoid(C x) { return inverse(C(1) + precise_exp(-x)); }

KERNELS_HD float tanh(float x) {
  // Near zero the exponential form cancels; there a polynomial in x^2, fitted on [0, 0.3], is used.
  const float a = magnitude(x);
  const float s = a * a;
  float inner = fma(s, 2.03540121e-2f, -5.38845679e-2f);
  inner = fma(s, inner, 1.33331843e-1f);
  inner = fma(s, inner, -3.33333329e-1f);
  inner = fma(s * a, inner, a);
  const float e = exp(-2.f * a);
  const float outer = (1.f - e) * inverse(1.f + e);
  return copy_sign(a < 0.3f ? inner : outer, x);
}
KERNELS_HD double tanh(double x) { return ::tanh(x); }

// For sums in which 1 is a small term: absolute error 2^-22, at less than half the cost of tanh on the GPU.
KERNELS_HD float fast_tanh(float x) { return fma(-2.f, inverse(1.f + exp(2.f * x)), 1.f); }
KERNELS_HD double fast_tanh(double x) { return ::tanh(x); }

KERNELS_HD float erf(float x) {
#if defined(KERNELS_DEVICE_CODE)
  return ::erff(x);
#else
  // Below 1 a polynomial in x^2; up to 4, where erf rounds to 1, 1 - exp(-polynomial). Both are minimax fits.
  const float a = magnitude(x);
  const float s = a * a;
  float inner = 7.88911952e-5f;
  inner = fma(inner, s, -8.02084128e-4f);
  inner = fma(inner, s, 5.18953534e-3f);
  inner = fma(inner, s, -2.68544446e-2f);
  inner = fma(inner, s, 1.12836002e-1f);
  inner = fma(inner, s, -3.76126271e-1f);
  inner = fma(inner, s, 1.28379166e-1f);
  inner = fma(inner, a, a);
  const float t = a > 4.f ? 4.f : a;
  float outer = 1.69746007e-7f;
  outer = fma(outer, t, 1.92627331e-5f);
  outer = fma(outer, t, -4.26505389e-4f);
  outer = fma(outer, t, 4.15377613e-3f);
  outer = fma(outer, t, -2.51017614e-2f);
  outer = fma(outer, t, 1.08278485e-1f);
  outer = fma(outer, t, 6.33332848e-1f);
  outer = fma(outer, t, 1.12952736f);
  outer = fma(outer, t, -1.78124154e-4f);
  return copy_sign(a < 1.f ? inner : 1.f - exp(-outer), x);
#endif
}
KERNELS_HD double erf(double x) { return ::erf(x); }

// The tail of the normal distribution beyond a >= 0: exp(-a^2 / 2) times a polynomial in 1 / (1 + 0.3 a), a minimax fit
// of the quotient on [0, 13.5]. Accurate to 7 + 1.5 a^2 units of the last place; below 2^-126 the GPU gives 0.
KERNELS_HD float normal_tail(float a) {
  const float t = inverse(fma(a, 0.3f, 1.f));
  float p = 3.83336361e-2f;
  p = fma(p, t, -1.68949200e-1f);
  p = fma(p, t, 2.28212266e-1f);
  p = fma(p, t, -7.59945959e-2f);
  p = fma(p, t, 1.42182136e-1f);
  p = fma(p, t, 9.48340027e-2f);
  p = fma(p, t, 1.21881845e-1f);
  p = fma(p, t, 1.19493086e-1f);
  p = fma(p, t, 6.85191838e-6f);
  return p * exp(-0.5f * a * a);
}
KERNELS_HD double normal_tail(double a) { return 0.5 * ::erfc(a * 0.70710678118654752); }

// Sine and cosine with an error of 2^-23 for |x| up to 2^30: multiples of pi / 2 are subtracted in double.
KERNELS_HD void sin_cos(float x, float& sine, float& cosine) {
  KERNELS_SUMS_IN_ORDER
  constexpr double shift = 6755399441055744.0;  // 1.5 2^52
  const double shifted = double(x) * 0.63661977236758134 + shift;
  const uint32_t quarter = static_cast<uint32_t>(bit_cast<uint64_t>(shifted));
  const double turns = detail::without_shift<uint64_t>(shifted, shift, 0x1p52);
  const float r = static_cast<float>(double(x) - turns * 1.5707963267948966), s = r * r;
  const float odd = ((-1.9515295891e-4f * s + 8.3321608736e-3f) * s - 1.6666654611e-1f) * s * r + r;
  const float even =
      ((2.443315711809948e-5f * s - 1.388731625493765e-3f) * s + 4.166664568298827e-2f) * (s * s) - 0.5f * s + 1.f;
  const bool swapped = (quarter & 1u) != 0;
  const float a = swapped ? even : odd, b = swapped ? odd : even;
  sine = bit_cast<float>(bit_cast<uint32_t>(a) ^ (quarter & 2u) << 30);
  cosine = bit_cast<float>(bit_cast<uint32_t>(b) ^ ((quarter + 1u) & 2u) << 30);
}

template <class C, int N>
KERNELS_HD Pack<C, N> exp(const Pack<C, N>& x) {
#if KERNELS_VECTORS
  if constexpr (detail::in_vectors<C, N>) {
    using V = detail::VectorOf<float, N>;
    return bit_cast<Pack<C, N>>(detail::exp_host<V, detail::VectorOf<uint32_t, N>>(bit_cast<V>(x)));
  } else
#endif
  {
    return transform(x, [](C a) { return exp(a); });
  }
}
// exp(x - reference) for a reference that no x exceeds.
template <class C, int N>
KERNELS_HD Pack<C, N> exp_minus(const Pack<C, N>& x, C reference) {
#if KERNELS_VECTORS
  if constexpr (detail::in_vectors<C, N>) {
    using V = detail::VectorOf<float, N>;
    return bit_cast<Pack<C, N>>(detail::exp_host_falling<V, detail::VectorOf<uint32_t, N>>(bit_cast<V>(x) - reference));
  } else
#endif
  {
    return transform(x, [reference](C a) { return exp(a - reference); });
  }
}

KERNELS_END
