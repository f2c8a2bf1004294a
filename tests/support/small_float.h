// An independent description of the narrow floating-point formats, in double: decoding with ldexp, encoding by search in
// the table of everything that the format can hold.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace test {

class SmallFloatReference {
 public:
  // infinity: the largest exponent means infinity and NaN (otherwise only the largest code is NaN).
  // saturate: what is too large becomes the largest finite value instead of infinity.
  SmallFloatReference(int exponent_bits, int mantissa_bits, bool infinity, bool saturate)
      : exponent_bits_(exponent_bits), mantissa_bits_(mantissa_bits), infinity_(infinity), saturate_(saturate) {
    for (uint32_t code = 0; std::isfinite(decode(code)); ++code) finite_.push_back(decode(code));
  }

  int bits() const { return 1 + exponent_bits_ + mantissa_bits_; }
  uint32_t codes() const { return 1u << bits(); }
  uint32_t sign_bit() const { return 1u << (bits() - 1); }
  uint32_t largest_finite() const { return uint32_t(finite_.size()) - 1; }

  double decode(uint32_t code) const {
    const double sign = code & sign_bit() ? -1 : 1;
    const uint32_t magnitude = code & (sign_bit() - 1);
    const int exponent = int(magnitude >> mantissa_bits_);
    const int mantissa = int(magnitude & ((1u << mantissa_bits_) - 1));
    const int bias = (1 << (exponent_bits_ - 1)) - 1;
    const bool top = exponent == (1 << exponent_bits_) - 1;
    if (infinity_ && top) return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    if (!infinity_ && magnitude == sign_bit() - 1) return std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits_);
    return sign * std::ldexp((1 << mantissa_bits_) + mantissa, exponent - bias - mantissa_bits_);
  }

  // The code nearest to x, an even one from two equally near. x is not NaN.
  uint32_t encode(double x) const {
    const double size = std::fabs(x);
    const uint32_t sign = std::signbit(x) ? sign_bit() : 0;
    const uint32_t last = largest_finite();
    if (size >= finite_[last]) {
      // As if the format went on: the value after the largest is one more step away.
      const double half_step = (finite_[last] - finite_[last - 1]) / 2;
      const bool rounds_down = size < finite_[last] + half_step;
      return sign | (saturate_ || rounds_down ? last : last + 1);
    }
    const uint32_t above = uint32_t(std::upper_bound(finite_.begin(), finite_.end(), size) - finite_.begin());
    const double down = size - finite_[above - 1], up = finite_[above] - size;
    const bool take_above = up < down || (up == down && above % 2 == 0);
    return sign | (take_above ? above : above - 1);
  }

 private:
  int exponent_bits_, mantissa_bits_;
  bool infinity_, saturate_;
  std::vector<double> finite_;
};

}  // namespace test
