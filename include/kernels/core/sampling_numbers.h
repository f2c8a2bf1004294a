// Arithmetic of sampling with equal results on the CPU and the GPU: operations that round once, integer keys of logits,
// levels and their weights (sampling.h explains these).
#pragma once

#include "math.h"

KERNELS_BEGIN
namespace detail {

// A sum rounded once, which no compiler fuses with the next operation. Products and quotients are in math.h.
KERNELS_HD float add_once(float a, float b) {
#if defined(KERNELS_DEVICE_CODE)
  return __fadd_rn(a, b);
#else
  return float(double(a) + double(b));
#endif
}

KERNELS_HD uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(KERNELS_DEVICE_CODE)
  return __umulhi(a, b);
#else
  return uint32_t(uint64_t(a) * b >> 32);
#endif
}
KERNELS_HD uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(KERNELS_DEVICE_CODE)
  return __umul64hi(a, b);
#else
  const uint64_t a0 = uint32_t(a), a1 = a >> 32, b0 = uint32_t(b), b1 = b >> 32;
  const uint64_t middle = a1 * b0 + (a0 * b0 >> 32), other = a0 * b1 + uint32_t(middle);
  return a1 * b1 + (middle >> 32) + (other >> 32);
#endif
}

// Keys: integers with the order of the floats. -0 equals 0; a NaN of either sign is above all others.
constexpr uint32_t kNanKey = 0xffffffffu, kLowestKey = 0x007fffffu;  // -infinity
KERNELS_HD uint32_t key_of(float x) {
  const uint32_t bits = x == 0.f ? 0u : bit_cast<uint32_t>(x);
  const uint32_t key = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
  return x != x ? kNanKey : key;
}
KERNELS_HD float logit_of(uint32_t key) {
  return bit_cast<float>(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

constexpr int kLevelBits = 24, kWeightBits = 40;
constexpr uint32_t kNoLevel = uint32_t(kWeightBits) << kLevelBits;  // the largest level, which has no weight
constexpr int64_t kMostVocabulary = int64_t(1) << 22;                   // sums of weights have 62 bits

// 2^(1 - f) - 1 in units of 2^-32, for the fraction f of a level: g (a1 + g (a2 + ...)) with g = 1 - f, accurate to
// 2^-23.
KERNELS_HD uint32_t power_of(uint32_t level) {
  const uint32_t g = ~(level << (32 - kLevelBits));
  uint32_t p = high_product(0x7a5d3fu, g) + 0x24ef0aau;
  p = high_product(p, g) + 0xe48e732u;
  p = high_product(p, g) + 0x3d7b6adbu;
  p = high_product(p, g) + 0xb1725d47u;
  return high_product(p, g);
}
KERNELS_HD uint64_t weight_of(uint32_t level) {
  return (uint64_t(1) << 32 | power_of(level)) << (kWeightBits - 33) >> (level >> kLevelBits);
}

// The last level with at least this weight; level 0 has it.
KERNELS_HD uint32_t last_level_of(uint64_t weight) {
  uint32_t last = 0;
  KERNELS_ROLLED
  for (uint32_t step = 1u << 29; step > 0; step >>= 1) {
    if (last + step <= kNoLevel && weight_of(last + step) >= weight) last += step;
  }
  return last;
}

// The levels of a row whose largest key is top_key.
struct Levels {
  float top, scale;
  KERNELS_HD Levels(uint32_t top_key, float temperature)
      : top(logit_of(top_key)), scale(over_once(24204406.f, temperature)) {}  // 2^24 / ln 2
  KERNELS_HD uint32_t of(float x) const {
    const float below = (top - x) * scale;  // NaN where both are infinite
#if defined(KERNELS_DEVICE_CODE)
    return lesser(__float2uint_rz(below), kNoLevel);  // makes NaN 0, and too large numbers the largest integer
#else
    const float inside = below < float(kNoLevel) ? below : float(kNoLevel);  // NaN becomes kNoLevel as well
    return x == top ? 0u : uint32_t(int32_t(inside));
#endif
  }
  KERNELS_HD uint32_t operator()(uint32_t key) const { return of(logit_of(key)); }
};

// cap * tanh(x / cap), accurate to 2^-24 of the cap.
KERNELS_HD float capped(float x, float cap) {
  const float z = over_once(x, cap), a = magnitude(z);
  if (!(a < 16.f)) return x != x ? x : copy_sign(cap, x);
  const uint32_t level = uint32_t(int32_t(a * 48408812.f));  // exp(-2a), 2 2^24 / ln 2
  const uint32_t one = 1u << 30, power = level == 0 ? one
                                         : level >> kLevelBits > 29
                                             ? 0u
                                             : (one + (power_of(level) >> 2)) >> (1 + (level >> kLevelBits));
  return copy_sign(times_once(cap, over_once(float(one - power), float(one + power))), x);
}

}  // namespace detail
KERNELS_END
