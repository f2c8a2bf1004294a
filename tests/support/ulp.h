// How far a float is from the exact value, in units of the last place of the exact value.
#pragma once

#include <cmath>

namespace test {

// Infinite where one is NaN and the other is not, or one infinite and the other not.
inline double ulp_error(float got, double want) {
  if (std::isnan(got) || std::isnan(want)) return std::isnan(got) && std::isnan(want) ? 0 : HUGE_VAL;
  if (std::isinf(got) || std::isinf(float(want))) return got == float(want) ? 0 : HUGE_VAL;
  int exponent = 0;
  std::frexp(want, &exponent);  // want = f * 2^exponent, f in [0.5, 1); 2^-149 is the smallest float
  return std::fabs(double(got) - want) / std::ldexp(1.0, exponent - 24 < -149 || want == 0 ? -149 : exponent - 24);
}

}  // namespace test
