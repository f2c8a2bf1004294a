// Divisor: quotients by a number that is known ahead, by a multiplication and a shift.
#pragma once

#include <cstdint>

#include "macros.h"

KERNELS_BEGIN
namespace detail {

// Of numbers below 2^31. Divisor() stands for a divisor that is larger than all of them.
class Divisor {
 public:
  Divisor() = default;
  // d: 1 to 2^31 - 1.
  explicit Divisor(uint32_t d) {
    int log2 = 0;
    while (uint32_t(1) << log2 < d) ++log2;
    // factor d exceeds 2^shift by at most d, and so n factor / 2^shift exceeds n / d by less than 1 / d.
    shift_ = 31 + log2;
    factor_ = uint32_t((uint64_t(1) << shift_) / d + 1);
  }
  KERNELS_HD uint32_t quotient(uint32_t n) const { return uint32_t(uint64_t(n) * factor_ >> shift_); }

 private:
  uint32_t factor_ = 0;
  int shift_ = 0;
};

}  // namespace detail
KERNELS_END
