// Every code of every narrow type, decoded with ldexp and encoded by a search among all values.
#include <kernels/core/dtype.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "support/oracle.h"
#include "support/tally.h"

namespace k = kernels;

namespace {

// What a type can hold, in double.
class Reference {
 public:
  explicit Reference(test::DType type) : type_(type), format_(test::format(type)) {
    for (uint32_t code = 0; std::isfinite(decode(code)); ++code) finite_.push_back(decode(code));
  }

  uint32_t codes() const { return 2u << (format_.exponent_bits + format_.mantissa_bits); }
  uint32_t sign_bit() const { return codes() / 2; }
  uint32_t largest_finite() const { return uint32_t(finite_.size()) - 1; }
  double decode(uint32_t code) const { return test::decode_small(format_, code); }
  uint32_t oracle_encode(double x) const { return test::encode_small(format_, type_, x); }

  // The code nearest to x, an even one from two equally near. x is not NaN.
  uint32_t encode(double x) const {
    const double size = std::fabs(x);
    const uint32_t sign = std::signbit(x) ? sign_bit() : 0;
    const uint32_t last = largest_finite();
    if (size >= finite_[last]) {
      // As if the format went on: the value after the largest is one more step away.
      const bool rounds_down = size < finite_[last] + (finite_[last] - finite_[last - 1]) / 2;
      return sign | (format_.saturates || rounds_down ? last : last + 1);
    }
    const uint32_t above = uint32_t(std::upper_bound(finite_.begin(), finite_.end(), size) - finite_.begin());
    const double down = size - finite_[above - 1], up = finite_[above] - size;
    const bool take_above = up < down || (up == down && above % 2 == 0);
    return sign | (take_above ? above : above - 1);
  }

 private:
  test::DType type_;
  test::Format format_;
  std::vector<double> finite_;
};

// The library's portable conversions, whatever the hardware offers.
template <class T> struct Portable;
template <> struct Portable<k::half> : k::detail::Fp16Format {};
template <> struct Portable<k::float8_e4m3> : k::detail::E4m3Format {};
template <> struct Portable<k::float8_e5m2> : k::detail::E5m2Format {};
template <> struct Portable<k::bfloat16> {
  static float decode(uint32_t code) { return k::detail::decode_bfloat16(code); }
  static uint32_t encode(float x) { return k::detail::encode_bfloat16(x); }
};

template <class T>
using Bits = std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>;

template <class T>
T from_code(uint32_t code) { return k::bit_cast<T>(Bits<T>(code)); }
template <class T>
uint32_t code_of(T x) { return k::bit_cast<Bits<T>>(x); }

float from_bits(uint32_t bits) { return k::bit_cast<float>(bits); }

bool same(double a, double b) { return a == b ? std::signbit(a) == std::signbit(b) : a != a && b != b; }

// Floats where rounding changes its mind: every value, the middle to the next one, and the floats beside both.
std::vector<float> decisive_floats(const Reference& reference) {
  std::vector<float> out;
  const auto add = [&out](double exact) {
    const float x = float(exact);
    for (const float y : {x, std::nextafter(x, INFINITY), std::nextafter(x, -INFINITY)}) {
      out.push_back(y);
      out.push_back(-y);
    }
  };
  for (uint32_t code = 0; code <= reference.largest_finite(); ++code) {
    const double here = reference.decode(code);
    // After the largest comes the value one step on, as if the format had no end.
    const double step =
        code < reference.largest_finite() ? reference.decode(code + 1) - here : here - reference.decode(code - 1);
    add(here);
    add(here + step / 2);
    add(here + step);
  }
  for (const float x : {0.f, 1e-45f, 1.17549435e-38f, 1e-20f, 1e20f, 3.40282347e38f, INFINITY}) add(x);
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("narrow floats decode", "", k::half, k::bfloat16, k::float8_e4m3, k::float8_e5m2) {
  const Reference reference(test::dtype_of<TestType>::value);
  test::Tally t;
  for (uint32_t code = 0; code < reference.codes(); ++code) {
    const double want = reference.decode(code);
    const TestType x = from_code<TestType>(code);
    t.expect(same(k::convert<float>(x), want), "code %x: got %g, want %g", code, double(k::convert<float>(x)), want);
    t.expect(same(k::convert<double>(x), want), "code %x to double: got %g, want %g", code, k::convert<double>(x),
             want);
    const double portable = Portable<TestType>::decode(code);
    t.expect(same(portable, want), "code %x without hardware help: got %g, want %g", code, portable, want);
  }
  CHECK_TALLY(t);
  CHECK(t.checked() == 3 * int64_t(reference.codes()));
}

TEMPLATE_TEST_CASE("narrow floats encode", "", k::half, k::bfloat16, k::float8_e4m3, k::float8_e5m2) {
  const Reference reference(test::dtype_of<TestType>::value);
  test::Tally t;
  const auto check = [&](float x) {
    const uint32_t want = reference.encode(x);
    const uint32_t got = code_of(k::convert<TestType>(x));
    t.expect(got == want, "%.9g: got %x, want %x", x, got, want);
    const uint32_t portable = Portable<TestType>::encode(x);
    t.expect(portable == want, "%.9g without hardware help: got %x, want %x", x, portable, want);
    // The other tests rely on this one.
    t.expect(reference.oracle_encode(x) == want, "%.9g: the oracle gives %x, not %x", x, reference.oracle_encode(x),
             want);
  };
  for (const float x : decisive_floats(reference)) check(x);
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const float x = from_bits(random());
    if (x == x) check(x);
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("narrow floats come back from float unchanged", "", k::half, k::bfloat16, k::float8_e4m3,
                   k::float8_e5m2) {
  const Reference reference(test::dtype_of<TestType>::value);
  test::Tally t;
  for (uint32_t code = 0; code < reference.codes(); ++code) {
    const double value = reference.decode(code);
    const uint32_t got = code_of(k::convert<TestType>(k::convert<float>(from_code<TestType>(code))));
    if (std::isinf(value) && sizeof(TestType) == 1) {  // fp8 saturates
      t.expect(got == (code & reference.sign_bit()) + reference.largest_finite(), "infinity %x became %x", code, got);
    } else if (value != value) {
      t.expect(std::isnan(reference.decode(got)), "NaN %x became %x", code, got);
    } else {
      t.expect(got == code, "%x became %x", code, got);
    }
    t.expect(code_of(k::convert<TestType>(from_code<TestType>(code))) == code, "%x to its own type", code);
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("NaN stays NaN, with either sign and any payload", "", k::half, k::bfloat16, k::float8_e4m3,
                   k::float8_e5m2) {
  const Reference reference(test::dtype_of<TestType>::value);
  test::Tally t;
  for (int bit = 0; bit < 23; ++bit) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      for (const uint32_t bits : {0x7f800000u | 1u << bit, 0x7fffffffu}) {
        const float x = from_bits(sign | bits);
        t.expect(std::isnan(reference.decode(code_of(k::convert<TestType>(x)))), "%x", sign | bits);
        const uint32_t portable = Portable<TestType>::encode(x);
        t.expect(portable < reference.codes() && std::isnan(reference.decode(portable)), "%x without hardware help",
                 sign | bits);
      }
    }
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("double converts by way of float", "", k::half, k::bfloat16, k::float8_e4m3, k::float8_e5m2) {
  const Reference reference(test::dtype_of<TestType>::value);
  test::Tally t;
  const auto check = [&](double x) {
    const uint32_t want = reference.encode(float(x));
    const uint32_t got = code_of(k::convert<TestType>(x));
    t.expect(got == want, "%.17g: got %x, want %x", x, got, want);
  };
  for (const float at : decisive_floats(reference)) check(at);
  std::mt19937_64 random(2);
  for (int i = 0; i < 100000; ++i) {
    const double x = k::bit_cast<double>(uint64_t(random()));
    if (x == x) check(x);
    check(std::ldexp(double(random()), -70 + i % 20));
  }
  for (const double x : {1e300, -1e300, 5e-324, -5e-324, HUGE_VAL, -HUGE_VAL}) check(x);
  CHECK(std::isnan(reference.decode(code_of(k::convert<TestType>(std::nan(""))))));
  CHECK_TALLY(t);
}

TEST_CASE("narrow floats convert into each other through float") {
  CHECK(k::convert<float>(k::convert<k::half>(k::convert<k::bfloat16>(70000.f))) == INFINITY);
  CHECK(k::convert<float>(k::convert<k::float8_e4m3>(k::convert<k::half>(1000.f))) == 448.f);
  CHECK(k::convert<float>(k::convert<k::float8_e5m2>(k::convert<k::half>(INFINITY))) == 57344.f);
  CHECK(k::convert<float>(k::convert<k::half>(k::convert<k::float8_e4m3>(-0.015625f))) == -0.015625f);
  CHECK(k::convert<float>(k::convert<k::bfloat16>(int8_t(-77))) == -77.f);
}

TEST_CASE("int8 rounds to nearest even and saturates") {
  test::Tally t;
  for (int code = -128; code <= 127; ++code) {
    t.expect(k::convert<float>(int8_t(code)) == float(code), "decode %d", code);
    t.expect(k::convert<int8_t>(float(code)) == code, "encode %d", code);
  }
  const auto check = [&t](float x) {
    double want = std::nearbyint(double(x));
    want = want > 127 ? 127 : want < -128 ? -128 : want;
    const int got = k::convert<int8_t>(x);
    t.expect(got == int(want), "%.9g: got %d, want %g", x, got, want);
  };
  for (int half = -300; half <= 300; ++half) {
    const float x = half / 2.f;
    for (const float y : {x, std::nextafter(x, INFINITY), std::nextafter(x, -INFINITY)}) check(y);
  }
  for (const float x : {1e-45f, 1e9f, 2147483648.f, 8388608.f, 12582912.f, 1e30f, 3.4e38f, INFINITY}) {
    check(x);
    check(-x);
  }
  for (const uint32_t nan : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xffc00055u, 0xff8000aau}) {
    t.expect(k::convert<int8_t>(from_bits(nan)) == 0, "NaN %x became %d", nan, k::convert<int8_t>(from_bits(nan)));
  }
  CHECK(k::convert<int8_t>(3.5) == 4);
  CHECK(k::convert<int8_t>(-1e300) == -128);
  CHECK(k::convert<int8_t>(std::nan("")) == 0);
  CHECK_TALLY(t);
}

TEST_CASE("other types are cast") {
  CHECK(k::convert<float>(true) == 1.f);
  CHECK(k::convert<float>(uint8_t(200)) == 200.f);
  CHECK(k::convert<double>(1.25f) == 1.25);
  CHECK(k::convert<float>(1e300) == INFINITY);
  CHECK(k::convert<float>(0.1) == 0.1f);
  CHECK(std::isnan(k::convert<float>(std::nan(""))));
  CHECK(k::convert<double>(0.1) == 0.1);
}

TEST_CASE("storage sizes and compute types") {
  CHECK(sizeof(k::half) == 2);
  CHECK(sizeof(k::bfloat16) == 2);
  CHECK(sizeof(k::float8_e4m3) == 1);
  CHECK(sizeof(k::float8_e5m2) == 1);
  CHECK(std::is_same<k::compute_t<double>, double>::value);
  CHECK(std::is_same<k::compute_t<float>, float>::value);
  CHECK(std::is_same<k::compute_t<k::half>, float>::value);
  CHECK(std::is_same<k::compute_t<k::float8_e5m2>, float>::value);
  CHECK(std::is_same<k::compute_t<int8_t>, float>::value);
  CHECK(std::is_trivially_copyable<k::half>::value);
}

TEST_CASE("the largest values of the quantized types") {
  CHECK(k::detail::Largest<int8_t>::value == 127.f);
  CHECK(double(k::detail::Largest<k::float8_e4m3>::value) == test::decode_small(test::format(test::DType::e4m3), 0x7e));
  CHECK(double(k::detail::Largest<k::float8_e5m2>::value) == test::decode_small(test::format(test::DType::e5m2), 0x7b));
}
