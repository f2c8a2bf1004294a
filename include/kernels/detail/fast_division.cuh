// Division by a number that the host knows, as a multiplication and a shift.
#pragma once

#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace detail {

// n / divisor for n < 2^31.
struct FastDivision {
  unsigned divisor, multiplier;
  int shift;

  FastDivision() = default;
  explicit FastDivision(int64_t by) : divisor(unsigned(by)), shift(0) {
    while ((uint64_t(1) << shift) < divisor) ++shift;
    multiplier = unsigned(((uint64_t(1) << (31 + shift)) + divisor - 1) / divisor);
    --shift;
  }
  // Returns the quotient and leaves the remainder in n.
  __device__ __forceinline__ unsigned operator()(unsigned& n) const {
    const unsigned quotient = divisor == 1 ? n : __umulhi(n, multiplier) >> shift;
    n -= quotient * divisor;
    return quotient;
  }
};

}  // namespace detail
KERNELS_END
