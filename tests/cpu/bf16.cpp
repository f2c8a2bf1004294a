// Products of bfloat16 by the machine's own dot products: which take them, shapes, layouts, types of sources, special
// values, and that neither threads nor the tokens beside it change a bit of a result.
#include <kernels/cpu/matmul.h>

#include <algorithm>

#include "support/guarded.h"
#include "support/oracle.h"
#include "support/random.h"
#include "support/tally.h"
#include "support/threads.h"

namespace k = kernels;
namespace host = kernels::detail::host;
using k::bfloat16;
using namespace test;

namespace {

using Load = k::DirectLoad<bfloat16>;
template <class X, class W>
constexpr bool in_pairs = std::is_same<host::panel_type<X, W>, bfloat16>::value;

constexpr bool has_dots = KERNELS_BF16_DOTS;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kSmallestNormal = 0x1p-126;

// A guarded matrix of bfloat16. gap: row stride - columns; shift: elements behind an aligned address.
struct Matrix : Guarded<bfloat16> {
  Matrix(int64_t rows, int64_t cols, int64_t gap = 0, int64_t shift = 0)
      : Guarded<bfloat16>(rows, cols, cols + gap, shift, Poison::nan), values_(size_t(rows * cols)) {}
  void put(int64_t row, int64_t col, double value) {
    const bfloat16 rounded = make<bfloat16>(value);
    set(row, col, rounded);
    values_[size_t(row * cols() + col)] = value_of(rounded);
  }
  template <class F>
  Matrix& fill(const F& f) {
    for (int64_t r = 0; r < rows(); ++r) {
      for (int64_t c = 0; c < cols(); ++c) put(r, c, f(r, c));
    }
    upload();
    return *this;
  }
  Matrix& fill_normal(uint64_t seed) {
    Random random(seed);
    return fill([&](int64_t, int64_t) { return random.normal(); });
  }
  // Sums of thousands of products of these are exact in any order.
  Matrix& fill_whole(uint64_t seed) {
    return fill([&](int64_t r, int64_t c) { return double(int(mix(seed + uint64_t(r * cols() + c)) % 31) - 15); });
  }
  double operator()(int64_t row, int64_t col) const { return values_[size_t(row * cols() + col)]; }
  Load source() const { return k::load(static_cast<const bfloat16*>(data()), ld()); }

 private:
  std::vector<double> values_;
};

// What a sum should be. A stretch of at most 384 columns is summed with at most one rounding for each, and what is
// below the smallest normal number may be lost in every one; then the stretches' sums are added. Subnormal numbers may
// count as 0.
template <class X, class W>
Real<> product(int64_t count, const X& x, const W& w) {
  long double sum = 0, size = 0, lost = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double a = x(i), b = w(i);
    const long double p = static_cast<long double>(a) * b;
    sum += p;
    size += std::fabs(p);
    if ((a != 0 && std::fabs(a) < kSmallestNormal) || (b != 0 && std::fabs(b) < kSmallestNormal)) lost += std::fabs(p);
  }
  const double roundings = double(std::min<int64_t>(count, 384) + count / 384 + 1);
  return {double(sum), double(lost) + roundings * (unit<float> * double(size) + kSmallestNormal)};
}
Real<> product(const Matrix& x, int64_t m, const Matrix& w, int64_t n) {
  return product(
      x.cols(), [&](int64_t i) { return x(m, i); }, [&](int64_t i) { return w(n, i); });
}

template <class D, class Expect>
void check(Tally& t, const char* what, const k::MatmulShape& s, const k::Status& status, Guarded<D>& y,
           const Expect& expect) {
  t.expect(status.ok(), "%s: %s", what, status.reason());
  y.download();
  t.expect(y.intact(), "%s: wrote outside its rows", what);
  for (int64_t m = 0; m < y.rows(); ++m) {
    for (int64_t n = 0; n < y.cols(); ++n) {
      const auto want = expect(m, n);
      t.expect(within(y.get(m, n), want), "%s, %d x %d x %d, (%d, %d): got %g, want %g +- %g", what, int(s.m), int(s.n),
               int(s.k), int(m), int(n), double(value_of(y.get(m, n))), want.v, want.e);
    }
  }
}

template <class X, class W, class Out>
k::Status tiles(int threads, const X& x, const W& w, const Out& out, const k::MatmulShape& shape) {
  return host::gemm(on_threads(threads), x, w, out, shape);
}

struct Layout {
  int64_t gap = 0, shift = 0;
};
// Of whole numbers, whose sums are exact.
void exact(Tally& t, const k::MatmulShape& s, int threads = 1, Layout x_at = {}, Layout w_at = {}, Layout y_at = {}) {
  Matrix x(s.m, s.k, x_at.gap, x_at.shift), w(s.n, s.k, w_at.gap, w_at.shift);
  x.fill_whole(1), w.fill_whole(2);
  Guarded<float> y(s.m, s.n, s.n + y_at.gap, y_at.shift);
  const k::Status status = tiles(threads, x.source(), w.source(), k::store(y.data(), y.ld()), s);
  check(t, "whole numbers", s, status, y, [&](int64_t m, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < s.k; ++i) sum += x(m, i) * w(n, i);
    return Real<>(sum, 0.0);
  });
}

}  // namespace

TEST_CASE("bf16: pairs are taken for what is nothing but bfloat16 in memory, and for nothing else") {
  using Gated = decltype(k::gated(std::declval<Load>(), std::declval<Load>()));
  using Stacked = decltype(k::stacked(std::declval<Load>(), 1, std::declval<Load>(), 1));
  using Gathered = decltype(k::gathered(std::declval<Load>(), nullptr, 1));
  using Mapped = decltype(std::declval<Load>() | k::relu());
  using Normed = decltype(k::normed(std::declval<Load>(), k::RmsNorm{}));
  using Scaled = decltype(k::dequant(std::declval<Load>(), k::row_scales(static_cast<const float*>(nullptr))));
  STATIC_REQUIRE(in_pairs<Load, Load> == has_dots);
  STATIC_REQUIRE(in_pairs<Load, Gated> == has_dots);
  STATIC_REQUIRE(in_pairs<Gathered, Stacked> == has_dots);
  STATIC_REQUIRE_FALSE(in_pairs<Mapped, Load>);
  STATIC_REQUIRE_FALSE(in_pairs<Load, Mapped>);
  STATIC_REQUIRE_FALSE(in_pairs<Normed, Load>);
  STATIC_REQUIRE_FALSE(in_pairs<Load, Scaled>);
  STATIC_REQUIRE_FALSE(in_pairs<Load, k::DirectLoad<float>>);
  STATIC_REQUIRE_FALSE(in_pairs<k::DirectLoad<k::half>, Load>);
  STATIC_REQUIRE_FALSE(in_pairs<k::DirectLoad<k::half>, k::DirectLoad<k::half>>);
  STATIC_REQUIRE_FALSE(in_pairs<k::DirectLoad<double>, Load>);
#if defined(BF16_MUST_HAVE_DOTS)
  STATIC_REQUIRE(has_dots);
#endif
  // A machine without them refuses calls that may use them.
  STATIC_REQUIRE((!has_dots || (k::cpu::kNeeds >> 10 & 1u) == 1));
}

TEST_CASE("bf16: every small M and N, and all K among them") {
  Tally t;
  for (int64_t m = 1; m <= 40; ++m) {
    for (int64_t n = 1; n <= 40; ++n) {
      for (int64_t i = 0; i < 2; ++i) exact(t, {m, n, 1 + (7 * m + 11 * n + 34 * i) % 70}, 1, {i, 0}, {0, i}, {i, 1});
    }
  }
  for (int64_t count = 1; count <= 130; ++count) exact(t, {5, 33, count}, 1, {1, 1}, {1, 0});
  for (const int64_t count : {383, 384, 385, 386, 447, 449, 767, 768, 769}) exact(t, {15, 34, count}, 1, {0, 1});
  CHECK_TALLY(t);
}

TEST_CASE("bf16: odd shapes of several blocks") {
  Tally t;
  const k::MatmulShape shapes[] = {{61, 517, 401},  {1, 999, 333}, {999, 1, 333},  {29, 31, 4097},
                                   {267, 57, 385}, {561, 67, 17}, {15, 1030, 97}, {2, 3, 4001}};
  for (const auto& s : shapes) {
    exact(t, s, 1);
    exact(t, s, 3, {3, 1}, {1, 3}, {5, 1});
    Matrix x(s.m, s.k, 1, 1), w(s.n, s.k, 0, 1);
    x.fill_normal(3), w.fill_normal(4);
    Guarded<float> y(s.m, s.n, s.n);
    check(t, "normal numbers", s, tiles(2, x.source(), w.source(), k::store(y.data(), y.ld()), s), y,
          [&](int64_t m, int64_t n) { return product(x, m, w, n); });
  }
  CHECK_TALLY(t);
}

TEST_CASE("bf16: misaligned pointers and row strides") {
  Tally t;
  const Layout layouts[] = {{0, 0}, {1, 0}, {0, 1}, {3, 5}, {16, 4}};
  for (const Layout& x : layouts) {
    for (const Layout& w : layouts) {
      for (const Layout& y : layouts) exact(t, {15, 34, 65}, 1, x, w, y);
    }
  }
  CHECK_TALLY(t);
}

// Rows and columns a million times larger and smaller than those beside them, each right to its own size.
TEST_CASE("bf16: outliers do not reach other rows") {
  const k::MatmulShape s{33, 70, 801};
  Matrix x(s.m, s.k), w(s.n, s.k);
  Random random(5);
  const auto size = [](int64_t r) { return r % 7 == 3 ? 1e6 : r % 7 == 5 ? 1e-6 : 1.0; };
  x.fill([&](int64_t r, int64_t c) { return random.normal() * size(r) * (c == 100 ? 1e4 : 1); });
  w.fill([&](int64_t r, int64_t) { return random.normal() * size(r); });
  Guarded<bfloat16> y(s.m, s.n, s.n);
  Tally t;
  check(t, "outliers", s, tiles(2, x.source(), w.source(), k::store(y.data(), y.ld()), s), y,
        [&](int64_t m, int64_t n) { return product(x, m, w, n); });
  CHECK_TALLY(t);
}

TEST_CASE("bf16: gated, stacked, paired, gathered, and in groups") {
  Tally t;
  for (const k::MatmulShape& s : {k::MatmulShape{7, 8, 9}, {33, 72, 100}, {60, 264, 399}}) {
    Matrix x(s.m, s.k, 1), w(s.n, s.k, 0, 1), up(s.n, s.k, 3);
    x.fill_normal(6), w.fill_normal(7), up.fill_normal(8);
    Guarded<float> y(s.m, s.n, s.n + 1);
    const auto out = k::store(y.data(), y.ld());
    check(t, "gated", s, tiles(2, x.source(), k::gated(w.source(), up.source()), k::swiglu() | out, s), y,
          [&](int64_t m, int64_t n) { return silu(product(x, m, w, n)) * product(x, m, up, n); });

    const int64_t first = s.n / 2 + 1;
    check(t, "stacked", s, tiles(2, x.source(), k::stacked(w.source(), first, up.source(), s.n - first), out, s), y,
          [&](int64_t m, int64_t n) { return n < first ? product(x, m, w, n) : product(x, m, up, n - first); });

    const k::Paired<Load> paired(w.source(), 8, 4);
    check(t, "paired", s, tiles(2, x.source(), paired, out, s), y,
          [&](int64_t m, int64_t n) { return product(x, m, w, n / 8 * 8 + n % 8 / 2 + n % 2 * 4); });

    std::vector<int32_t> order(size_t(s.m));
    for (int64_t m = 0; m < s.m; ++m) order[size_t(m)] = int32_t(m % 5 == 4 ? -1 : 2 * s.m - 1 - m);
    const auto origin = [&](int64_t m) { return m % 5 == 4 ? 0 : (2 * s.m - 1 - m) / 2; };
    check(t, "gathered", s, tiles(2, k::gathered(x.source(), order.data(), 2), w.source(), out, s), y,
          [&](int64_t m, int64_t n) { return product(x, origin(m), w, n); });

    const int64_t half = s.n / 2;
    Guarded<float> z(s.m, half, half);
    const int32_t offsets[] = {0, int32_t(s.m / 3), int32_t(s.m)};
    check(t, "groups", s,
          k::cpu::matmul(on_threads(2), x.source(), w.source(), k::store(z.data(), half), {s.m, half, s.k},
                         k::Groups{2, offsets}),
          z, [&](int64_t m, int64_t n) { return product(x, m, w, n + (m < offsets[1] ? 0 : half)); });
  }
  CHECK_TALLY(t);
}

TEST_CASE("bf16: no columns give sums of zero") {
  Matrix x(20, 0), w(50, 0);
  Guarded<float> y(20, 50, 53);
  Tally t;
  check(t, "no columns", {20, 50, 0},
        tiles(2, x.source(), w.source(), k::shift(1) | k::store(y.data(), y.ld()), {20, 50, 0}), y,
        [](int64_t, int64_t) { return Real<>(1.0, 0.0); });
  CHECK_TALLY(t);
}

// ---- special values -------------------------------------------------------------------------------------------------

TEST_CASE("bf16: a NaN or an infinity reaches its row or column and no other") {
  Tally t;
  for (const int64_t cols : {205, 801}) {
    const k::MatmulShape s{31, 67, cols};
    for (const double special : {kNaN, kInfinity, -kInfinity}) {
      for (const int64_t at : {int64_t(0), int64_t(1), int64_t(13), int64_t(192), cols - 2, cols - 1}) {
        Matrix x(s.m, s.k), w(s.n, s.k);
        x.fill_normal(9), w.fill_normal(10);
        x.put(30, at, special);
        w.put(66, at, special);
        w.put(5, at, 0);
        x.upload(), w.upload();
        Guarded<float> y(s.m, s.n, s.n);
        check(t, "special", s, tiles(2, x.source(), w.source(), k::store(y.data(), y.ld()), s), y,
              [&](int64_t m, int64_t n) { return product(x, m, w, n); });
        t.expect(std::isnan(y.get(30, 5)) && std::isfinite(y.get(29, 65)), "infinity times 0 at %d", int(at));
      }
    }
  }
  CHECK_TALLY(t);
}

// The same frame of the stack, first full of NaN.
TEST_CASE("bf16: what fills the last pair, square and tile of a product is not what a call before left there") {
  Tally t;
  for (const int64_t cols : {1, 17, 31, 33, 383, 385}) {
    for (const int64_t n : {31, 32, 64}) {
      Matrix bad_x(14, 384), bad_w(63, 384);
      for (Matrix* const bad : {&bad_x, &bad_w}) bad->fill([](int64_t, int64_t) { return kNaN; });
      Guarded<float> y(14, 63, 63);
      REQUIRE(tiles(1, bad_x.source(), bad_w.source(), k::store(y.data(), 63), {14, 63, 384}));
      exact(t, {13, n, cols});
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("bf16: the largest and smallest numbers") {
  Tally t;
  const k::MatmulShape s{15, 34, 98};
  // Subnormal numbers beside others, with sums large enough to show what is lost of them, and too small to be kept.
  for (const double size : {1.0, 0x1p100, 0x1p-20, 0x1p-126}) {
    Matrix x(s.m, s.k), w(s.n, s.k);
    Random random(11);
    x.fill([&](int64_t r, int64_t c) { return random.normal() * (r % 3 == 1 || c % 5 == 2 ? 0x1p-128 : 0x1p-40); });
    w.fill([&](int64_t, int64_t) { return random.normal() * size; });
    Guarded<float> y(s.m, s.n, s.n);
    check(t, "subnormal inputs", s, tiles(1, x.source(), w.source(), k::store(y.data(), y.ld()), s), y,
          [&](int64_t m, int64_t n) { return product(x, m, w, n); });
    Guarded<float> z(s.n, s.m, s.m);
    check(t, "subnormal weights", s,
          tiles(1, w.source(), x.source(), k::store(z.data(), z.ld()), k::MatmulShape{s.n, s.m, s.k}), z,
          [&](int64_t m, int64_t n) { return product(w, m, x, n); });
  }
  // Sums that leave the range of a float, and those that return to it before they do.
  Matrix x(s.m, s.k), w(s.n, s.k);
  x.fill([&](int64_t r, int64_t c) { return c % 4 < 2 ? (r % 2 && c % 2 ? -0x1p126 : 0x1p126) : 0.0; });
  w.fill([](int64_t, int64_t) { return 1.0; });
  Guarded<float> y(s.m, s.n, s.n);
  check(t, "large", s, tiles(1, x.source(), w.source(), k::store(y.data(), y.ld()), s), y,
        [&](int64_t m, int64_t) { return m % 2 ? Real<>(0.0, 0.0) : Real<>(kInfinity, 0.0); });
  CHECK_TALLY(t);
}

// ---- the same bits --------------------------------------------------------------------------------------------------

TEST_CASE("bf16: any number of threads gives the same bits") {
  Tally t;
  for (const k::MatmulShape& s : {k::MatmulShape{100, 301, 401}, {601, 37, 300}, {13, 1500, 70}, {1, 1, 500}}) {
    Matrix x(s.m, s.k, 1), w(s.n, s.k);
    x.fill_normal(12), w.fill_normal(13);
    std::vector<unsigned char> bits;
    for (const int threads : {1, 2, 3, 7, 64}) {
      Guarded<float> y(s.m, s.n, s.n);
      REQUIRE(k::cpu::matmul(on_threads(threads), x.source(), w.source(), k::store(y.data(), y.ld()), s));
      y.download();
      if (threads == 1) bits = y.bytes();
      t.expect(y.bytes() == bits, "M = %d: %d threads give other bits", int(s.m), threads);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("bf16: batch_invariant gives a token the same bits whatever M is, and its place") {
  Tally t;
  k::cpu::MatmulPolicy policy;
  policy.batch_invariant = true;
  for (const int64_t cols : {63, 385, 1001}) {
    const int64_t most = 290, n = 45;
    Matrix x(most, cols, 1), w(n, cols);
    x.fill_normal(14), w.fill_normal(15);
    Guarded<float> all(most, n, n);
    REQUIRE(k::cpu::matmul(on_threads(2), x.source(), w.source(), k::store(all.data(), n), {most, n, cols}, policy));
    all.download();
    for (const int64_t m : {1, 2, 4, 5, 6, 7, 13, 14, 15, 32, 33, 267}) {
      for (const int64_t first : {int64_t(0), most - m}) {
        Guarded<float> y(m, n, n);
        REQUIRE(k::cpu::matmul(on_threads(2), k::load(x.data() + first * x.ld(), x.ld()), w.source(),
                               k::store(y.data(), n), {m, n, cols}, policy));
        y.download();
        bool same = true;
        for (int64_t r = 0; r < m; ++r) {
          for (int64_t c = 0; c < n; ++c) same = same && y.get(r, c) == all.get(first + r, c);
        }
        t.expect(same, "K = %d, M = %d from token %d on: other bits", int(cols), int(m), int(first));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("bf16: few tokens and many, through the door") {
  Tally t;
  for (int64_t m = 1; m <= 40; ++m) {
    const k::MatmulShape s{m, 35, 130 + m};
    Matrix x(s.m, s.k), w(s.n, s.k);
    x.fill_normal(16), w.fill_normal(17);
    Guarded<bfloat16> y(s.m, s.n, s.n);
    check(t, "matmul", s, k::cpu::matmul(on_threads(2), x.source(), w.source(), k::store(y.data(), s.n), s), y,
          [&](int64_t r, int64_t c) { return product(x, r, w, c); });
  }
  CHECK_TALLY(t);
}

// Which way a call took shows in what becomes of subnormal inputs.
TEST_CASE("bf16: up to 4 tokens keep subnormal numbers") {
  for (const int64_t m : {1, 4, 5, 40}) {
    Matrix x(m, 64), w(3, 64);
    for (int64_t c = 0; c < 64; ++c) {
      for (int64_t r = 0; r < m; ++r) x.set(r, c, k::convert<bfloat16>(std::ldexp(1.f, -130)));
      for (int64_t r = 0; r < 3; ++r) w.set(r, c, k::convert<bfloat16>(1024.f));
    }
    x.upload(), w.upload();
    Guarded<float> y(m, 3, 3);
    REQUIRE(k::cpu::matmul(on_threads(1), x.source(), w.source(), k::store(y.data(), 3), {m, 3, 64}));
    y.download();
    CHECK(y.get(m - 1, 2) == (has_dots && m > 4 ? 0.f : std::ldexp(1.f, -114)));
  }
}
