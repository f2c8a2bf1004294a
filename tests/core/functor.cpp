// What every source, map and sink gives, on the host, in packs of several widths; against the same in double precision.
#include <kernels/weights.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/random_matrix.h"
#include "support/tally.h"

namespace k = kernels;
using test::Guarded;
using test::Real;

namespace {

constexpr int64_t kRows = 5, kCols = 48;
constexpr double kInf = std::numeric_limits<double>::infinity();

template <class T>
struct Data : test::RandomMatrix<T> {
  explicit Data(uint64_t seed, int64_t ld = kCols + 3, int64_t shift = 1, int64_t rows = kRows, int64_t cols = kCols)
      : test::RandomMatrix<T>(seed, rows, cols, ld, shift) {}
};

// Reads every element of a source in packs of N and compares with want(row, col), a Real.
template <int N, class S, class Want>
void check_source_with(test::Tally& t, const char* what, const S& source, Want want) {
  static_assert(k::detail::is_source<S>, "");
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; c += N) {
      const auto got = k::detail::resolve(source, k::detail::fetch<N>(source, r, c), r, c);
      static_assert(got.size == N, "");
      for (int i = 0; i < N; ++i) {
        const auto w = want(r, c + i);
        t.expect(test::within(got[i], w), "%s, packs of %d, row %d, col %d: got %.17g, want %.17g", what, N, int(r),
                 int(c) + i, double(got[i]), w.v);
      }
    }
  }
}

template <class C = float, class S, class Want>
void check_source(const char* what, const S& source, Want want) {
  static_assert(std::is_same<k::compute_type<S>, C>::value, "");
  test::Tally t;
  const auto real = [&](int64_t r, int64_t c) { return Real<C>(want(r, c)); };
  check_source_with<1>(t, what, source, real);
  check_source_with<8>(t, what, source, real);
  CHECK_TALLY(t);
}

// Writes f(row, col) through a sink in packs of N, as an engine does: the maps taken apart from the end.
template <int N, class C, class S>
void write_through(const S& sink, C (*value)(int64_t, int64_t)) {
  static_assert(k::detail::is_sink<S>, "");
  const auto map = k::detail::sink_map(sink);
  const auto end = k::detail::sink_end(sink);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; c += N) {
      k::Pack<C, N> v;
      for (int i = 0; i < N; ++i) v[i] = value(r, c + i);
      const auto operands = k::detail::fetch_operands<N>(map, r, c);
      k::detail::put(end, k::detail::apply_map(map, v, operands, r, c), r, c);
    }
  }
}

template <class C>
C some(int64_t row, int64_t col) { return C(double((row * 131 + col * 17) % 97) / 8 - 6); }

template <class T, class Want>
void check_matrix(const char* what, Guarded<T>& got, Want want) {
  got.download();
  CHECK(got.intact());
  test::Tally t;
  for (int64_t r = 0; r < got.rows(); ++r) {
    for (int64_t c = 0; c < got.cols(); ++c) {
      const auto w = want(r, c);
      t.expect(test::within(got.get(r, c), w), "%s, row %d, col %d: got %.9g, want %.9g", what, int(r), int(c),
               test::value_of(got.get(r, c)), w.v);
    }
  }
  CHECK_TALLY(t);
}

}  // namespace

// ---- sources -------------------------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("load reads every type from any stride", "", k::half, k::bfloat16, float, double, k::float8_e4m3,
                   k::float8_e5m2, int8_t, bool) {
  using C = k::compute_t<TestType>;
  for (const int64_t ld : {kCols, kCols + 1, 2 * kCols}) {
    const Data<TestType> x(1, ld);
    check_source<C>("load", k::load(x.data(), ld), [&](int64_t r, int64_t c) { return x.value(r, c); });
  }
  const Data<TestType> one(2, kCols, 0, 1);
  check_source<C>("load, stride 0", k::load(one.data(), 0), [&](int64_t, int64_t c) { return one.value(0, c); });
  check_source<C>("row", k::row(one.data()), [&](int64_t, int64_t c) { return one.value(0, c); });
  const Data<TestType> column(3, 1, 0, kRows, 1);
  check_source<C>("per_row", k::per_row(column.data()), [&](int64_t r, int64_t) { return column.value(r, 0); });
}

TEST_CASE("cycle and one_plus") {
  const Data<float> x(4);
  for (const int64_t period : {1, 2, 3, 5, 100}) {
    check_source("cycle", k::cycle(k::load(x.data(), x.ld()), period),
                 [&](int64_t r, int64_t c) { return x.value(r % period, c); });
  }
  check_source("cycle of maps", k::cycle(k::load(x.data(), x.ld()) | k::add(k::load(x.data(), x.ld())), 2),
               [&](int64_t r, int64_t c) { return 2 * x.value(r % 2, c); });
  const Data<k::half> w(5, kCols, 0, 1);
  check_source("one_plus", k::one_plus(w.data()),
               [&](int64_t, int64_t c) { return Real<>(1.0) + Real<>(w.value(0, c)); });
}

// ---- maps ----------------------------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("elementwise maps", "", float, double) {
  using C = TestType;
  using R = Real<C>;
  const Data<C> x(6);
  const auto in = k::load(x.data(), x.ld());
  const auto at = [&](int64_t r, int64_t c) { return R(x.value(r, c)); };
  check_source<C>("scale", in | k::scale(0.1), [&](int64_t r, int64_t c) { return at(r, c) * test::constant<C>(0.1); });
  check_source<C>("shift", in | k::shift(-0.3),
                  [&](int64_t r, int64_t c) { return at(r, c) + test::constant<C>(-0.3); });
  check_source<C>("relu", in | k::relu(), [&](int64_t r, int64_t c) { return test::relu(at(r, c)); });
  check_source<C>("silu", in | k::silu(), [&](int64_t r, int64_t c) { return test::silu(at(r, c)); });
  check_source<C>("gelu", in | k::gelu(), [&](int64_t r, int64_t c) { return test::gelu(at(r, c)); });
  check_source<C>("gelu_erf", in | k::gelu_erf(), [&](int64_t r, int64_t c) { return test::gelu_erf(at(r, c)); });
  check_source<C>("identity", in | k::Identity{}, at);
  check_source<C>("round_to half", in | k::round_to<k::half>(),
                  [&](int64_t r, int64_t c) { return test::rounded_to<k::half>(at(r, c)); });
  check_source<C>("round_to e4m3", in | k::round_to<k::float8_e4m3>(),
                  [&](int64_t r, int64_t c) { return test::rounded_to<k::float8_e4m3>(at(r, c)); });
}

TEST_CASE("activations over the whole range") {
  test::Tally t;
  const auto check = [&t](const char* what, float x, float got, Real<> want) {
    t.expect(test::within(got, want), "%s(%.9g): got %.9g, want %.9g +- %g", what, x, got, want.v, want.e);
  };
  const auto check_all = [&](float x) {
    check("silu", x, k::silu()(x), test::silu(Real<>(x)));
    check("gelu", x, k::gelu()(x), test::gelu(Real<>(x)));
    check("gelu_erf", x, k::gelu_erf()(x), test::gelu_erf(Real<>(x)));
    check("relu", x, k::relu()(x), test::relu(Real<>(x)));
  };
  for (int i = -200000; i <= 200000; ++i) check_all(float(i) * 1e-4f);
  for (float x = 1e-30f; x < 80.f; x *= 1.01f) {
    check_all(x);
    check_all(-x);
  }
  CHECK_TALLY(t);
  // Far out they are 0 or x, and NaN stays.
  for (const float x : {100.f, 1e4f, 1e12f, 3e38f, std::numeric_limits<float>::infinity()}) {
    CHECK(k::silu()(x) == x);
    CHECK(k::gelu()(x) == x);
    CHECK(k::gelu_erf()(x) == x);
    CHECK(k::relu()(x) == x);
    CHECK(k::relu()(-x) == 0.f);
    if (std::isinf(x)) continue;
    CHECK(std::fabs(k::silu()(-x)) < 1e-36f);
    CHECK(k::gelu()(-x) == 0.f);
    CHECK(k::gelu_erf()(-x) == 0.f);
  }
  const float nan = std::nanf("");
  CHECK(std::isnan(k::silu()(nan)));
  CHECK(std::isnan(k::gelu()(nan)));
  CHECK(std::isnan(k::gelu_erf()(nan)));
  CHECK(std::isnan(k::relu()(nan)));
  CHECK(std::isnan(k::round_to<k::half>()(nan)));
}

TEMPLATE_TEST_CASE("maps with a second operand of another type", "", k::half, double) {
  const Data<float> x(7);
  const Data<TestType> y(8, kCols + 5);
  const Data<TestType> v(9, kCols, 2, 1), w(10, kCols, 0, 1);
  const Data<TestType> column(11, 1, 0, kRows, 1);
  const auto in = k::load(x.data(), x.ld());
  const auto a = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); };
  // An operand in double is rounded to float first.
  const auto operand = [](double value) {
    return Real<>(value, std::is_same<TestType, double>::value ? test::unit<float> * std::fabs(value) : 0);
  };
  const auto b = [&](int64_t r, int64_t c) { return operand(y.value(r, c)); };
  const auto row = [&](int64_t c) { return operand(v.value(0, c)); };
  const auto row2 = [&](int64_t c) { return operand(w.value(0, c)); };

  check_source("add(load)", in | k::add(k::load(y.data(), y.ld())),
               [&](int64_t r, int64_t c) { return a(r, c) + b(r, c); });
  check_source("mul(load)", in | k::mul(k::load(y.data(), y.ld())),
               [&](int64_t r, int64_t c) { return a(r, c) * b(r, c); });
  check_source("add(row)", in | k::add(k::row(v.data())), [&](int64_t r, int64_t c) { return a(r, c) + row(c); });
  check_source("add(pointer)", in | k::add(v.data()), [&](int64_t r, int64_t c) { return a(r, c) + row(c); });
  check_source("bias", in | k::bias(v.data()), [&](int64_t r, int64_t c) { return a(r, c) + row(c); });
  check_source("mul(per_row)", in | k::mul(k::per_row(column.data())),
               [&](int64_t r, int64_t c) { return a(r, c) * operand(column.value(r, 0)); });
  check_source("affine(gamma)", in | k::affine(v.data()), [&](int64_t r, int64_t c) { return a(r, c) * row(c); });
  check_source("affine(gamma, beta)", in | k::affine(v.data(), w.data()),
               [&](int64_t r, int64_t c) { return a(r, c) * row(c) + row2(c); });
  check_source("affine(one_plus, per_row)", in | k::affine(k::one_plus(v.data()), k::per_row(column.data())),
               [&](int64_t r, int64_t c) { return a(r, c) * (Real<>(1.0) + row(c)) + operand(column.value(r, 0)); });
  check_source("add(source | map)", in | k::add(k::load(y.data(), y.ld()) | k::scale(0.5)),
               [&](int64_t r, int64_t c) { return a(r, c) + b(r, c) * Real<>(0.5); });
}

TEST_CASE("a chain of maps keeps its order") {
  const Data<float> x(12);
  const Data<float> g(13, kCols, 0, 1), h(14, kCols, 0, 1);
  const auto in = k::load(x.data(), x.ld());
  const auto want = [&](int64_t r, int64_t c) {
    return test::relu((Real<>(x.value(r, c)) + Real<>(g.value(0, c))) * Real<>(h.value(0, c)) * Real<>(2.0) +
                      Real<>(-1.0));
  };
  check_source("from the left", in | k::add(g.data()) | k::mul(h.data()) | k::scale(2) | k::shift(-1) | k::relu(),
               want);
  const auto chain = k::add(g.data()) | k::mul(h.data()) | (k::scale(2) | (k::shift(-1) | k::relu()));
  check_source("as one map", in | chain, want);

  Guarded<float> y(kRows, kCols, kCols + 2);
  write_through<4, float>(chain | k::store(y.data(), y.ld()), some<float>);
  check_matrix("before a sink", y, [&](int64_t r, int64_t c) {
    return test::relu((Real<>(some<float>(r, c)) + Real<>(g.value(0, c))) * Real<>(h.value(0, c)) * Real<>(2.0) +
                      Real<>(-1.0));
  });
}

TEST_CASE("mask keeps what its source does not call zero") {
  const Data<float> x(15);
  Guarded<bool> keep(kRows, kCols, kCols);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kCols; ++c) keep.set(r, c, (r + c) % 3 != 0);
  }
  keep.upload();
  check_source("mask", k::load(x.data(), x.ld()) | k::mask(k::load(keep.data(), keep.ld())),
               [&](int64_t r, int64_t c) { return (r + c) % 3 != 0 ? x.value(r, c) : -kInf; });
  Guarded<float> weight(1, kCols, kCols);  // anything but a zero of either sign keeps
  const float weights[] = {0.f, 1.f, -0.f, -2.f, 1e-45f, std::nanf("")};
  for (int64_t c = 0; c < kCols; ++c) weight.set(0, c, weights[c % 6]);
  weight.upload();
  check_source("mask by numbers", k::load(x.data(), x.ld()) | k::mask(weight.data()),
               [&](int64_t r, int64_t c) { return c % 6 == 0 || c % 6 == 2 ? -kInf : x.value(r, c); });
  check_source("mask by a row", k::load(x.data(), x.ld()) | k::mask(keep.data()),
               [&](int64_t r, int64_t c) { return c % 3 != 0 ? x.value(r, c) : -kInf; });
}

TEST_CASE("causal: the last query sees every key") {
  const Data<float> x(16);
  for (const int64_t q_len : {1, 2, 3, 5}) {
    for (const int64_t kv_len : {0, 1, 4, 16, 48, 60}) {
      check_source("causal", k::load(x.data(), x.ld()) | k::causal(q_len, kv_len),
                   [&](int64_t r, int64_t c) { return c <= r % q_len + kv_len - q_len ? x.value(r, c) : -kInf; });
    }
  }
  // Numbers whose sum would exceed 64 bits.
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  check_source("causal: more keys than there can be", k::load(x.data(), x.ld()) | k::causal(3, most),
               [&](int64_t r, int64_t c) { return x.value(r, c); });
  check_source("causal: more queries than there can be", k::load(x.data(), x.ld()) | k::causal(most, 0),
               [&](int64_t, int64_t) { return -kInf; });
}

// ---- sinks and tee -------------------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("store writes every type, rounded, and nothing else", "", k::half, k::bfloat16, float, double,
                   k::float8_e4m3, k::float8_e5m2, int8_t) {
  using C = k::compute_t<TestType>;
  for (const bool past_cache : {false, true}) {
    Guarded<TestType> y(kRows, kCols, kCols + 16), z(kRows, kCols, kCols, 1);
    auto sink = k::store(y.data(), y.ld());
    sink.set_past_cache(past_cache);
    write_through<16, C>(sink, some<C>);
    check_matrix("store, packs of 16", y, [](int64_t r, int64_t c) { return Real<C>(some<C>(r, c)); });
    auto narrow = k::store(z.data(), z.ld());
    narrow.set_past_cache(past_cache);
    write_through<1, C>(narrow, some<C>);
    check_matrix("store, packs of 1", z, [](int64_t r, int64_t c) { return Real<C>(some<C>(r, c)); });
  }
}

TEST_CASE("maps before a store, both() and tee") {
  const Data<float> g(17, kCols, 0, 1);
  Guarded<k::half> a(kRows, kCols, kCols + 1), b(kRows, kCols, kCols);
  Guarded<k::float8_e5m2> c8(kRows, kCols, kCols + 3);
  const auto scaled = [&](int64_t r, int64_t c) { return Real<>(some<float>(r, c)) * Real<>(g.value(0, c)); };
  const auto sink =
      k::affine(g.data()) | k::both(k::store(a.data(), a.ld()),
                                    k::relu() | k::tee(b.data(), b.ld()) | k::gelu() | k::store(c8.data(), c8.ld()));
  write_through<8, float>(sink, some<float>);
  check_matrix("both, first", a, scaled);
  check_matrix("both, tee", b, [&](int64_t r, int64_t c) { return test::relu(scaled(r, c)); });
  check_matrix("both, second", c8, [&](int64_t r, int64_t c) { return test::gelu(test::relu(scaled(r, c))); });
}

TEST_CASE("tee writes rounded values and passes them on") {
  const Data<float> x(18);
  Guarded<k::bfloat16> copy(kRows, kCols, kCols + 2);
  const auto source = k::load(x.data(), x.ld()) | k::tee(copy.data(), copy.ld()) | k::scale(2);
  const auto stored = [&](int64_t r, int64_t c) { return test::round_to(test::DType::bf16, x.value(r, c)); };
  check_source("behind a tee", source, [&](int64_t r, int64_t c) { return 2 * stored(r, c); });
  check_source("without effects", k::detail::without_effects(source),
               [&](int64_t r, int64_t c) { return 2 * stored(r, c); });
  check_matrix("the tee's copy", copy, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); });

  // The second pass reads the copy, and does not write it again.
  copy.set(1, 2, k::convert<k::bfloat16>(512.f));
  copy.upload();
  const auto again = k::detail::second_pass(source);
  check_source("the second pass", again, [&](int64_t r, int64_t c) { return 2 * test::value_of(copy.get(r, c)); });
  CHECK(copy.unchanged());
}

TEST_CASE("the second pass starts behind the last tee") {
  const Data<float> x(19), y(20);
  Guarded<float> first(kRows, kCols, kCols), second(kRows, kCols, kCols);
  const auto tail = k::tee(second.data(), kCols) | k::shift(1);
  const auto source = k::load(x.data(), x.ld()) | k::tee(first.data(), kCols) | k::scale(3) |
                      (k::add(k::load(y.data(), y.ld())) | tail);
  const auto sum = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)) * Real<>(3.0) + Real<>(y.value(r, c)); };
  check_source("two tees", source, [&](int64_t r, int64_t c) { return sum(r, c) + Real<>(1.0); });
  check_matrix("the first tee", first, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); });
  check_matrix("the second tee", second, sum);
  second.set(0, 0, 77.f);
  second.upload();
  const auto again = k::detail::second_pass(source);
  check_source("the second pass", again, [&](int64_t r, int64_t c) { return Real<>(second.get(r, c)) + Real<>(1.0); });
  CHECK(first.unchanged());
  CHECK(second.unchanged());
}

TEST_CASE("a double row keeps its precision through a tee of doubles") {
  const Data<double> x(21);
  Guarded<double> copy(kRows, kCols, kCols);
  const auto source = k::load(x.data(), x.ld()) | k::tee(copy.data(), kCols);
  check_source<double>("tee", source, [&](int64_t r, int64_t c) { return x.value(r, c); });
  check_source<double>("second pass", k::detail::second_pass(source),
                       [&](int64_t r, int64_t c) { return x.value(r, c); });
  // Copied to a narrower type it is read back as doubles all the same.
  Guarded<k::half> narrow(kRows, kCols, kCols);
  const auto rounded = k::load(x.data(), x.ld()) | k::tee(narrow.data(), kCols);
  const auto stored = [&](int64_t r, int64_t c) { return test::round_to(test::DType::f16, x.value(r, c)); };
  check_source<double>("tee to half", rounded, stored);
  check_source<double>("second pass", k::detail::second_pass(rounded), stored);
}

TEST_CASE("without_effects: the same map, and no writes") {
  Guarded<float> copy(kRows, kCols, kCols);
  const auto map = k::scale(2) | (k::tee(copy.data(), kCols) | k::shift(1));
  const auto pure = k::detail::without_effects(map);
  const auto v = k::broadcast<4>(3.f);
  CHECK(k::detail::apply_map(pure, v, k::detail::fetch_operands<4>(pure, 0, 0), 0, 0)[3] == 7.f);
  CHECK(copy.unchanged());
  CHECK(k::detail::apply_map(map, v, k::detail::fetch_operands<4>(map, 0, 0), 0, 0)[3] == 7.f);
  CHECK(!copy.unchanged());
}

TEST_CASE("whether two matrices share bytes, against every byte of them") {
  test::Random random(5);
  char memory[4096];
  int shared = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto any = [&](int64_t stride) {
      return k::detail::Plane{memory + random.below(60), 1 + int64_t(random.below(4)), 1 + int64_t(random.below(12)),
                              stride, 1};
    };
    const int64_t stride = 1 + int64_t(random.below(20));
    const k::detail::Plane a = any(stride), b = any(stride);
    std::vector<char> bytes(sizeof(memory));
    bool want = false;
    for (int64_t r = 0; r < a.rows; ++r) {
      for (int64_t i = 0; i < a.bytes; ++i) bytes[size_t(a.begin - memory + r * stride + i)] = 1;
    }
    for (int64_t r = 0; r < b.rows; ++r) {
      for (int64_t i = 0; i < b.bytes; ++i) want = want || bytes[size_t(b.begin - memory + r * stride + i)];
    }
    REQUIRE(k::detail::share_bytes(a, b) == want);
    shared += want;
    // With other strides it may be missed, and is never made up.
    const k::detail::Plane c = any(stride + 1);
    bool real = false;
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t i = 0; i < c.bytes; ++i) real = real || bytes[size_t(c.begin - memory + r * c.stride + i)];
    }
    REQUIRE((real || !k::detail::share_bytes(a, c)));
  }
  CHECK((shared > 1000 && shared < 19000));
}

TEST_CASE("a functor has effects if one of its parts has") {
  float* p = nullptr;
  const auto plain = k::load(p, 1) | k::scale(2) | k::add(k::row(p));
  const auto tee = plain | k::tee(p, 1);
  const auto effects = [](const auto& f) { return k::detail::has_effects<std::decay_t<decltype(f)>>; };
  CHECK(!effects(plain));
  CHECK(!effects(k::affine(p, p) | k::gelu()));
  CHECK(effects(k::tee(p, 1)));
  CHECK(effects(tee));
  CHECK(effects(tee | k::scale(2)));
  CHECK(effects(plain | k::add(tee)));
  CHECK(effects(plain | k::affine(p, tee)));
  CHECK(effects(k::scale(2) | k::mul(k::load(p, 1) | k::add(tee))));
  CHECK(effects(k::stacked(tee, 1, tee, 1)));
  CHECK(effects(k::normed(tee, k::RmsNorm{})));
  CHECK(effects(k::gated(tee, tee)));
  // A second pass has none.
  CHECK(!effects(k::detail::second_pass(tee)));
  CHECK(!effects(k::detail::second_pass(plain | k::add(tee) | k::scale(2))));
  CHECK(!effects(k::detail::without_effects(k::affine(p, tee))));
}

// ---- quantize ------------------------------------------------------------------------------------------------------

namespace {

// A row through a row sink, cut into two states, the way an engine does it.
template <class C, int N, class Sink>
void quantize_row(const Sink& sink, const std::vector<C>& x, int64_t row) {
  const auto value = [&](size_t c) {
    auto pack = k::broadcast<N>(C(sink.padding()));
    for (int i = 0; i < N && c + i < x.size(); ++i) pack[i] = x[c + i];
    return pack;
  };
  typename Sink::State front, back;
  for (size_t c = 0; c < x.size(); c += N) {
    const int valid = int(x.size() - c < size_t(N) ? x.size() - c : N);
    sink.accumulate(c < x.size() / 2 ? front : back, value(c), valid);
  }
  sink.merge(front, back);
  sink.write_row(front, row);
  const auto result = sink.finish(front);
  for (size_t c = 0; c + N <= x.size(); c += N) sink.store(value(c), result, row, int64_t(c));
}

}  // namespace

TEMPLATE_TEST_CASE("quantize: codes and scales", "", int8_t, k::float8_e4m3, k::float8_e5m2) {
  const Data<float> x(22);
  Guarded<TestType> q(kRows, kCols, kCols + 5);
  Guarded<float> scales(kRows, 1, 1);
  const auto sink = k::quantize(q.data(), q.ld(), scales.data());
  std::vector<test::Row<float>> want;
  std::vector<Real<>> want_scales;
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<float> row;
    test::Row<float> exact;
    for (int64_t c = 0; c < kCols; ++c) {
      // Rows of very different size, the largest value first, last or negative; one row of zeros.
      double v = x.value(r, c) * std::pow(10.0, 6 * double(r) - 12);
      if (r == 1 && c == 0) v *= 50;
      if (r == 2 && c == kCols - 1) v *= -50;
      if (r == 3) v = 0;
      row.push_back(float(v));
      exact.push_back(Real<>(float(v)));
    }
    want_scales.push_back(test::quantize<TestType>(exact));
    want.push_back(exact);
    if (r % 2) quantize_row<float, 8>(sink, row, r);
    else quantize_row<float, 1>(sink, row, r);
  }
  check_matrix("codes", q, [&](int64_t r, int64_t c) { return want[size_t(r)][size_t(c)]; });
  check_matrix("scales", scales, [&](int64_t r, int64_t) { return want_scales[size_t(r)]; });
  CHECK(scales.get(3, 0) == 0.f);
}

TEST_CASE("quantize: NaN and infinity show in the scale") {
  Guarded<k::float8_e4m3> q(3, 4, 4);
  Guarded<float> scales(3, 1, 1);
  const auto sink = k::quantize(q.data(), 4, scales.data());
  const float nan = std::nanf("");
  quantize_row<float, 4>(sink, {1.f, -nan, 3.f, 4.f}, 0);
  quantize_row<float, 1>(sink, {nan, 2.f, 3.f, 4.f}, 1);
  quantize_row<double, 2>(sink, {1, -kInf, 3, 4}, 2);
  scales.download();
  CHECK(std::isnan(scales.get(0, 0)));
  CHECK(std::isnan(scales.get(1, 0)));
  CHECK(scales.get(2, 0) == float(kInf));
}

// largest T / largest value would overflow here: no code may become NaN, and none be wrong by more than a float's
// smallest.
TEMPLATE_TEST_CASE("quantize: rows of tiny values", "", int8_t, k::float8_e4m3, k::float8_e5m2) {
  Guarded<TestType> q(1, 4, 4);
  Guarded<float> scales(1, 1, 1);
  for (const float tiny : {1e-34f, 1e-37f, 1e-38f, 1e-40f, 1e-45f}) {
    quantize_row<float, 4>(k::quantize(q.data(), 4, scales.data()), {tiny, 0.f, -tiny, tiny / 2}, 0);
    q.download();
    scales.download();
    CHECK(scales.get(0, 0) >= std::numeric_limits<float>::min());
    CHECK(scales.get(0, 0) < 1e-36f);
    for (int c = 0; c < 4; ++c) {
      const double values[] = {tiny, 0, -tiny, tiny / 2};
      const double back = test::value_of(q.get(0, c)) * scales.get(0, 0);
      // Half a step of e5m2 is an eighth; int8 and fp8 lose what is below half of their smallest code.
      CHECK(std::fabs(back - values[c]) <= 0.125 * std::fabs(values[c]) + 0x1p-127);
    }
  }
}
