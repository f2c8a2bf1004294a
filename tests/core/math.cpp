// The float functions against those of the C library in double, over sweeps of bit patterns; the values that need care.
#include <kernels/core/divisor.h>
#include <kernels/core/math.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/tally.h"
#include "support/ulp.h"

namespace k = kernels;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

// Every 4001st float of both signs within [low, high], and the ends: about a million for the whole line.
template <class Function>
void for_floats(float low, float high, Function f) {
  f(low);
  f(high);
  for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += 4001) {
    const float x = k::bit_cast<float>(uint32_t(bits));
    if (x >= low && x <= high) f(x);
  }
}

template <class Function, class Exact>
void check_ulps(const char* name, float low, float high, double limit, Function function, Exact exact) {
  test::Tally t;
  for_floats(low, high, [&](float x) {
    const float got = function(x);
    const double want = exact(double(x));
    const double error = test::ulp_error(got, want);
    t.expect(error <= limit, "%s(%.9g): got %.9g, want %.17g, %.3f units of the last place", name, x, got, want, error);
  });
  CHECK_TALLY(t);
}

}  // namespace

// The limits are the promises of core/math.h for the host.

TEST_CASE("exp within 2 ulp everywhere") {
  check_ulps("exp", -kInf, kInf, 2, [](float x) { return k::exp(x); }, [](double x) { return std::exp(x); });
}

TEST_CASE("exp of packs within 2 ulp") {
  check_ulps(
      "exp", -kInf, kInf, 2, [](float x) { return k::exp(k::broadcast<8>(x))[5]; },
      [](double x) { return std::exp(x); });
  check_ulps(
      "exp", -1.f, 1.f, 2, [](float x) { return k::exp(k::broadcast<3>(x))[2]; }, [](double x) { return std::exp(x); });
}

TEST_CASE("exp at the values softmax relies on") {
  CHECK(k::exp(0.f) == 1.f);
  CHECK(k::exp(-0.f) == 1.f);
  CHECK(k::exp(-kInf) == 0.f);
  CHECK(k::exp(-kLargest) == 0.f);
  CHECK(k::exp(-104.f) == 0.f);
  CHECK(k::exp(-103.f) > 0.f);
  CHECK(k::exp(88.7f) < kInf);
  CHECK(k::exp(88.8f) == kInf);
  CHECK(k::exp(kLargest) == kInf);
  CHECK(k::exp(kInf) == kInf);
  CHECK(std::isnan(k::exp(kNaN)));
  CHECK(std::isnan(k::exp(-kNaN)));
  CHECK(k::exp(kSmallest) == 1.f);
}

TEST_CASE("exp never exceeds 1 at or below 0") {
  test::Tally t;
  for_floats(-kInf, 0.f,
             [&t](float x) { t.expect(k::exp(x) >= 0.f && k::exp(x) <= 1.f, "exp(%.9g) = %.9g", x, k::exp(x)); });
  CHECK_TALLY(t);
}

TEST_CASE("erf within 2 ulp everywhere") {
  check_ulps("erf", -kInf, kInf, 2, [](float x) { return k::erf(x); }, [](double x) { return std::erf(x); });
  // Dense where the two polynomials meet and where erf reaches 1.
  for (const float at : {1.f, 4.f}) {
    test::Tally t;
    for (int i = -2000; i <= 2000; ++i) {
      const float x = k::bit_cast<float>(k::bit_cast<int32_t>(at) + i);
      t.expect(test::ulp_error(k::erf(x), std::erf(double(x))) <= 2, "erf(%.9g) = %.9g", x, k::erf(x));
    }
    CHECK_TALLY(t);
  }
}

TEST_CASE("tanh within 3 ulp everywhere") {
  check_ulps("tanh", -kInf, kInf, 3, [](float x) { return k::tanh(x); }, [](double x) { return std::tanh(x); });
  test::Tally t;
  for (int i = -2000; i <= 2000; ++i) {
    const float x = k::bit_cast<float>(k::bit_cast<int32_t>(0.3f) + i);
    t.expect(test::ulp_error(k::tanh(x), std::tanh(double(x))) <= 3, "tanh(%.9g) = %.9g", x, k::tanh(x));
  }
  CHECK_TALLY(t);
}

TEST_CASE("fast_tanh within 2^-22") {
  test::Tally t;
  for_floats(-kInf, kInf, [&](float x) {
    const float y = k::fast_tanh(x);
    t.expect(std::fabs(y - std::tanh(double(x))) <= 0x1p-22, "fast_tanh(%.9g) = %.9g", x, y);
  });
  CHECK_TALLY(t);
  CHECK(k::fast_tanh(-kInf) == -1.f);
  CHECK(k::fast_tanh(kInf) == 1.f);
  CHECK(std::isnan(k::fast_tanh(kNaN)));
}

TEST_CASE("sigmoid within 3 ulp, and below 1e-38 absolutely") {
  const auto exact = [](double x) { return 1 / (1 + std::exp(-x)); };
  check_ulps("sigmoid", -87.f, kInf, 3, [](float x) { return k::sigmoid(x); }, exact);
  test::Tally t;
  for_floats(-kInf, -87.f, [&](float x) {  // exp(-x) overflows before 1 / exp(-x) does: 0 instead of a subnormal
    t.expect(std::fabs(k::sigmoid(x) - exact(x)) < 1e-38, "sigmoid(%.9g) = %.9g", x, k::sigmoid(x));
  });
  CHECK_TALLY(t);
  CHECK(k::sigmoid(0.f) == 0.5f);
  CHECK(k::sigmoid(-kInf) == 0.f);
  CHECK(k::sigmoid(kInf) == 1.f);
  CHECK(std::isnan(k::sigmoid(kNaN)));
}

TEST_CASE("odd functions: zero keeps its sign, infinity gives one, NaN stays") {
  for (const auto f : {+[](float x) { return k::erf(x); }, +[](float x) { return k::tanh(x); }}) {
    CHECK(f(0.f) == 0.f);
    CHECK(!std::signbit(f(0.f)));
    CHECK(std::signbit(f(-0.f)));
    CHECK(f(kInf) == 1.f);
    CHECK(f(-kInf) == -1.f);
    CHECK(f(kLargest) == 1.f);
    CHECK(f(-20.f) == -1.f);
    CHECK(std::isnan(f(kNaN)));
    test::Tally t;
    for_floats(0.f, kInf, [&](float x) { t.expect(f(-x) == -f(x) && f(x) <= 1.f, "f(%.9g) = %.9g", x, f(x)); });
    CHECK_TALLY(t);
  }
}

TEST_CASE("log and reciprocal root") {
  check_ulps("log", 0.f, kInf, 2, [](float x) { return k::log(x); }, [](double x) { return std::log(x); });
  check_ulps("rsqrt", 0.f, kInf, 2, [](float x) { return k::rsqrt(x); }, [](double x) { return 1 / std::sqrt(x); });
  CHECK(k::log(1.f) == 0.f);
  CHECK(std::isnan(k::log(-1.f)));
  CHECK(std::isnan(k::log(kNaN)));
  CHECK(k::rsqrt(4.f) == 0.5f);
  CHECK(k::rsqrt(0.f) == kInf);
  CHECK(k::rsqrt(kInf) == 0.f);
  CHECK(std::isnan(k::rsqrt(kNaN)));
}

TEST_CASE("quotients, magnitudes, signs, fma") {
  CHECK(k::divide(1.f, 3.f) == 1.f / 3.f);
  CHECK(k::divide(1.0, 3.0) == 1.0 / 3.0);
  CHECK(k::magnitude(-2.5f) == 2.5f);
  CHECK(k::magnitude(-kInf) == kInf);
  CHECK(!std::signbit(k::magnitude(-0.f)));
  CHECK(std::isnan(k::magnitude(-kNaN)));
  CHECK(k::magnitude(-2.5) == 2.5);
  CHECK(k::copy_sign(2.f, -0.f) == -2.f);
  CHECK(k::copy_sign(-2.f, 3.f) == 2.f);
  CHECK(k::fma(3.f, 5.f, -7.f) == 8.f);
  CHECK(k::infinity<float>() == kInf);
  CHECK(k::infinity<double>() == HUGE_VAL);
}

TEST_CASE("double goes to the C library") {
  test::Tally t;
  for (double x = -30; x <= 30; x += 0.0137) {
    t.expect(k::exp(x) == std::exp(x) && k::erf(x) == std::erf(x) && k::tanh(x) == std::tanh(x), "%g", x);
    t.expect(k::log(x * x) == std::log(x * x), "log(%g)", x * x);
    t.expect(std::fabs(k::rsqrt(x * x) * std::fabs(x) - 1) < 1e-15, "rsqrt(%g)", x * x);
    t.expect(std::fabs(k::sigmoid(x) * (1 + std::exp(-x)) - 1) < 1e-15, "sigmoid(%g)", x);
  }
  CHECK_TALLY(t);
  CHECK(k::exp(-HUGE_VAL) == 0.0);
}

TEST_CASE("quotients by a divisor that is known ahead") {
  std::vector<int64_t> divisors = {1, 2, 3, 5, 7, 64, 80, 96, 128, 641, 6700417, 0x7ffffffe, 0x7fffffff};
  for (int shift = 2; shift < 31; ++shift)
    divisors.insert(divisors.end(), {(int64_t(1) << shift) - 1, int64_t(1) << shift, (int64_t(1) << shift) + 1});
  int wrong = 0;
  for (const int64_t d : divisors) {
    const k::detail::Divisor divisor(d);
    const auto check = [&](int64_t n) {
      if (n < 0 || n > 0x7fffffff) return;
      wrong += divisor.quotient(uint32_t(n)) != uint32_t(n / d) || divisor.remainder(uint32_t(n)) != uint32_t(n % d);
    };
    const int64_t step = std::max<int64_t>(d, 0x7fffffff / 5000 / d * d);
    for (int64_t n = 0; n <= 0x7fffffff; n += step) check(n - 1), check(n), check(n + 1), check(n + d / 2);
    for (int64_t n = 0x7fffffff; n > 0x7fffffff - 100; --n) check(n);
  }
  CHECK(wrong == 0);
  // What cannot be divided by is refused by others, who must be able to say so.
  CHECK(k::detail::Divisor(0).quotient(5) == 5);
  CHECK(k::detail::Divisor(-3).remainder(5) == 0);
}
