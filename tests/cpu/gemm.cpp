// The blocked product on the CPU: shapes, layouts, types, epilogues, kinds of weights and inputs, special values,
// threads.
#include <kernels/cpu/detail/matmul/gemm.h>

#include <algorithm>
#include <functional>

#include "support/guarded.h"
#include "support/oracle.h"
#include "support/random.h"
#include "support/small_stack.h"
#include "support/tally.h"
#include "support/threads.h"

namespace k = kernels;
using namespace test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class X, class W>
using Compute = std::conditional_t<std::is_same<X, double>::value || std::is_same<W, double>::value, double, float>;

template <class X, class W, class Out>
k::Status gemm(int threads, const X& x, const W& w, const Out& out, const k::MatmulShape& shape) {
  return k::detail::host::gemm(on_threads(threads), x, w, out, shape);
}

// Values as numbers with bounds, row by row, for the oracle.
template <class C>
using Matrix = std::vector<Row<C>>;

// What a product in C of two matrices should be.
//
// In a stretch of L columns, L roundings (twice as many where a product and a sum are rounded apart), each of at most
// one unit of the sum so far, so of the sum of |x w|. The sums of the stretches are added one by one: one more rounding
// for each. Stretches have at most 192 columns, and no fewer than 48 unless there is only one.
template <class C>
Real<C> product(const Row<C>& x, const Row<C>& w) {
  long double sum = 0, size = 0, error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const long double p = static_cast<long double>(x[i].v) * w[i].v;
    sum += p;
    size += std::fabs(p);
    error += std::fabs(x[i].v) * w[i].e + std::fabs(w[i].v) * x[i].e + x[i].e * w[i].e;
  }
  const double count = double(x.size()), roundings = 2 * std::min(count, 192.0) + count / 48 + 1;
  return {double(sum), double(error) + roundings * (unit<C> * double(size) + tiny<C>)};
}

template <class T>
void fill(Guarded<T>& to, uint64_t seed, double mean = 0, double deviation = 1) {
  Random random(seed);
  for (int64_t r = 0; r < to.rows(); ++r) {
    for (int64_t c = 0; c < to.cols(); ++c) to.set(r, c, make<T>(mean + deviation * random.normal()));
  }
  to.upload();
}
template <class C, class T>
Matrix<C> values(const Guarded<T>& from) {
  Matrix<C> out(size_t(from.rows()), Row<C>(size_t(from.cols())));
  for (int64_t r = 0; r < from.rows(); ++r) {
    for (int64_t c = 0; c < from.cols(); ++c) out[size_t(r)][size_t(c)] = value_of(from.get(r, c));
  }
  return out;
}

struct Layout {
  int64_t gap = 0, shift = 0;  // row stride - columns, elements past an aligned address
};

// Random operands on guarded memory.
template <class X, class W = X>
struct Operands {
  using C = Compute<X, W>;
  k::MatmulShape shape;
  Guarded<X> x_data;
  Guarded<W> w_data;

  explicit Operands(const k::MatmulShape& s, Layout x_at = {}, Layout w_at = {})
      : shape(s),
        x_data(s.m, s.k, s.k + x_at.gap, x_at.shift, Poison::nan),
        w_data(s.n, s.k, s.k + w_at.gap, w_at.shift, Poison::nan) {
    fill(x_data, mix(uint64_t(s.m * 1000003 + s.k)));
    fill(w_data, mix(uint64_t(s.n * 1000033 + s.k)), 0, 0.5);
  }
  auto x() const { return k::load(static_cast<const X*>(x_data.data()), x_data.ld()); }
  auto w() const { return k::load(static_cast<const W*>(w_data.data()), w_data.ld()); }
};

// "" or what is wrong with a result: expect(m, n) says what it should be.
template <class D, class Expect>
std::string verify(const k::Status& status, Guarded<D>& y, const Expect& expect) {
  if (!status) return status.reason();
  y.download();
  if (!y.intact()) return "wrote outside its rows";
  for (int64_t m = 0; m < y.rows(); ++m) {
    for (int64_t n = 0; n < y.cols(); ++n) {
      const auto want = expect(m, n);
      if (within(y.get(m, n), want)) continue;
      std::ostringstream text;
      text << "(" << m << ", " << n << ") of " << y.rows() << " x " << y.cols() << ": got " << value_of(y.get(m, n))
           << ", want " << want.v << " +- " << want.e;
      return text.str();
    }
  }
  return "";
}
void expect_none(Tally& t, const std::string& problem) { t.expect(problem.empty(), "%s", problem.c_str()); }

// The plain product of two types into a third.
template <class X, class W, class D>
std::string plain(const k::MatmulShape& shape, int threads = 1, Layout x_at = {}, Layout w_at = {}, Layout y_at = {}) {
  using C = Compute<X, W>;
  const Operands<X, W> in(shape, x_at, w_at);
  Guarded<D> y(shape.m, shape.n, shape.n + y_at.gap, y_at.shift);
  const k::Status status = gemm(threads, in.x(), in.w(), k::store(y.data(), y.ld()), shape);
  const auto x = values<C>(in.x_data), w = values<C>(in.w_data);
  const std::string problem =
      verify(status, y, [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); });
  if (problem.empty()) return problem;
  return std::string(name(dtype_of<X>::value)) + " x " + name(dtype_of<W>::value) + ", K = " + std::to_string(shape.k) +
         ", " + problem;
}

}  // namespace

TEST_CASE("gemm: every small M and N, and all K among them") {
  Tally t;
  for (int64_t m = 1; m <= 40; ++m) {
    for (int64_t n = 1; n <= 40; ++n) {
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t count = 1 + (7 * m + 11 * n + 17 * i) % 40;
        expect_none(t, plain<float, float, float>({m, n, count}, 1, {i, 0}, {0, i}, {i, 1}));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("gemm: odd shapes of several blocks") {
  Tally t;
  const k::MatmulShape shapes[] = {{301, 517, 401}, {1, 999, 333},  {999, 1, 333}, {29, 31, 4097},
                                   {267, 257, 193}, {561, 67, 17},  {15, 33, 192}, {14, 32, 193},
                                   {14, 32, 1},     {43, 1030, 97}, {2, 3, 20001}};
  for (const auto& shape : shapes) {
    expect_none(t, plain<float, float, float>(shape, 1));
    expect_none(t, plain<float, float, float>(shape, 3, {3, 1}, {1, 3}, {5, 1}));
    expect_none(t, plain<double, double, double>(shape, 2));
  }
  CHECK_TALLY(t);
}

// Inputs, weights and results are each read or written by their own type. Halves by halves, and all that follows the
// product, are below.
TEST_CASE("gemm: types") {
  using k::bfloat16;
  using k::half;
  Tally t;
  const k::MatmulShape shapes[] = {{17, 33, 200}, {31, 65, 577}, {16, 64, 64}};
  for (const auto& shape : shapes) {
    expect_none(t, plain<bfloat16, bfloat16, bfloat16>(shape));
    expect_none(t, plain<half, float, half>(shape));
    expect_none(t, plain<float, bfloat16, float>(shape));
    expect_none(t, plain<half, bfloat16, k::float8_e4m3>(shape));
    expect_none(t, plain<k::float8_e4m3, k::float8_e4m3, bfloat16>(shape));
    expect_none(t, plain<k::float8_e5m2, half, float>(shape));
    expect_none(t, plain<int8_t, int8_t, float>(shape));
    expect_none(t, plain<double, double, double>(shape));
    expect_none(t, plain<double, float, double>(shape));
    expect_none(t, plain<half, double, float>(shape));
  }
  CHECK_TALLY(t);
}

TEST_CASE("gemm: misaligned pointers and row strides") {
  Tally t;
  const Layout layouts[] = {{0, 0}, {1, 0}, {0, 1}, {3, 5}, {16, 4}};
  for (const Layout& x : layouts) {
    for (const Layout& w : layouts) {
      for (const Layout& y : layouts) {
        expect_none(t, plain<k::half, float, k::half>({15, 34, 65}, 1, x, w, y));
        expect_none(t, plain<float, k::bfloat16, float>({17, 48, 64}, 1, x, w, y));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("gemm: a repeated row of inputs, and of weights") {
  Operands<float> in({33, 40, 70});
  Guarded<float> y(33, 40, 40);
  const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
  k::Status status = gemm(2, k::load(in.x_data.data(), 0), in.w(), k::store(y.data(), 40), in.shape);
  CHECK(verify(status, y, [&](int64_t, int64_t n) { return product(x[0], w[size_t(n)]); }) == "");
  status = gemm(2, in.x(), k::load(in.w_data.data(), 0), k::store(y.data(), 40), in.shape);
  CHECK(verify(status, y, [&](int64_t m, int64_t) { return product(x[size_t(m)], w[0]); }) == "");
}

// The rounding errors of a stretch, and those of the sums of stretches, differ in sign: sqrt(192 + 65536 / 192) = 23
// units would be far out for them, and twice that is what is allowed. One chain of 65536 sums drifts by more.
TEST_CASE("gemm: a long K under a large mean") {
  constexpr int64_t count = 65536;
  for (const double mean : {1e3, -1e3}) {
    Operands<float> in({15, 33, count});
    fill(in.x_data, 1, mean);
    fill(in.w_data, 2, 1, 0.01);
    Guarded<float> y(15, 33, 33);
    const k::Status status = gemm(2, in.x(), in.w(), k::store(y.data(), 33), in.shape);
    const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
    CHECK(verify(status, y, [&](int64_t m, int64_t n) {
      const Real<> exact = product(x[size_t(m)], w[size_t(n)]);
      return Real<>(exact.v, 46 * unit<float> * std::fabs(exact.v));
    }) == "");
  }
  // Where the large parts cancel, the error is one of their sum.
  Operands<float> in({3, 5, count});
  Random random(3);
  for (int64_t m = 0; m < 3; ++m) {
    for (int64_t i = 0; i < count; ++i) in.x_data.set(m, i, float((i % 2 ? 1e3 : -1e3) + random.normal()));
  }
  in.x_data.upload();
  fill(in.w_data, 4, 1, 0.01);
  Guarded<float> y(3, 5, 5);
  const k::Status status = gemm(2, in.x(), in.w(), k::store(y.data(), 5), in.shape);
  const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
  CHECK(verify(status, y, [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); }) == "");
}

TEST_CASE("gemm: nothing to sum, and nothing to do") {
  Guarded<float> b(1, 50, 50), y(20, 50, 53);
  fill(b, 1);
  Operands<float> in({20, 50, 0});
  k::Status status = gemm(2, in.x(), in.w(), k::bias(b.data()) | k::relu() | k::store(y.data(), y.ld()), in.shape);
  CHECK(verify(status, y, [&](int64_t, int64_t n) { return relu(Real<>(double(b.get(0, n)))); }) == "");
  status = gemm(2, k::normed(in.x(), k::LayerNorm{}), in.w(), k::store(y.data(), y.ld()), in.shape);
  CHECK(verify(status, y, [&](int64_t, int64_t) { return Real<>(0.0); }) == "");

  Guarded<float> untouched(20, 50, 50);
  CHECK(gemm(2, in.x(), in.w(), k::store(untouched.data(), 50), {0, 50, 7}));
  CHECK(gemm(2, in.x(), in.w(), k::store(untouched.data(), 50), {20, 0, 7}));
  CHECK(untouched.unchanged());
}

// ---- epilogues ------------------------------------------------------------------------------------------------------

TEST_CASE("gemm: what follows the product is applied to each result once") {
  for (const k::MatmulShape& shape : {k::MatmulShape{37, 71, 45}, {300, 272, 410}, {9, 1040, 33}}) {
    const auto [rows, cols, count] = shape;
    const Operands<k::half> in(shape);
    const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
    const auto sum = [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); };
    Guarded<float> b(1, cols, cols, 1);
    fill(b, 5);
    const auto biased = [&](int64_t m, int64_t n) { return sum(m, n) + Real<>(double(b.get(0, n))); };

    Guarded<float> y(rows, cols, cols + 3);
    k::Status status = gemm(2, in.x(), in.w(), k::bias(b.data()) | k::gelu() | k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, [&](int64_t m, int64_t n) { return gelu(biased(m, n)); }) == "");

    // A residual that the result replaces: a value that was handed over twice would show.
    Guarded<float> residual(rows, cols, cols + 1, 1), given(rows, cols, cols + 1, 1);
    fill(residual, 6);
    fill(given, 6);
    status = gemm(2, in.x(), in.w(),
                  k::add(k::load(residual.data(), residual.ld())) | k::store(residual.data(), residual.ld()), shape);
    CHECK(verify(status, residual, [&](int64_t m, int64_t n) { return sum(m, n) + Real<>(double(given.get(m, n))); }) ==
          "");

    Guarded<k::bfloat16> y16(rows, cols, cols);
    status = gemm(2, in.x(), in.w(),
                  k::bias(b.data()) | k::both(k::store(y.data(), y.ld()), k::relu() | k::store(y16.data(), y16.ld())),
                  shape);
    CHECK(verify(status, y, biased) == "");
    CHECK(verify(status, y16, [&](int64_t m, int64_t n) { return relu(biased(m, n)); }) == "");

    Guarded<int8_t> y8(rows, cols, cols + 5, 3);
    status = gemm(2, in.x(), in.w(), k::scale(4.0) | k::store(y8.data(), y8.ld()), shape);
    CHECK(verify(status, y8, [&](int64_t m, int64_t n) { return sum(m, n) * Real<>(4.0); }) == "");

    Guarded<k::half> first(rows, 5, 7), second(rows, 32, 32), third(rows, cols - 37, cols);
    status = gemm(2, in.x(), in.w(),
                  k::apart(k::store(first.data(), first.ld()), 5, k::store(second.data(), second.ld()), 32,
                           k::store(third.data(), third.ld()), cols - 37), shape);
    CHECK(verify(status, first, sum) == "");
    CHECK(verify(status, second, [&](int64_t m, int64_t n) { return sum(m, n + 5); }) == "");
    CHECK(verify(status, third, [&](int64_t m, int64_t n) { return sum(m, n + 37); }) == "");
  }
}

namespace {

// A user's sink that counts on what a GPU promises: whole packs at multiples of their width.
struct AlignedSink : k::Functor {
  static constexpr int widest = 4;
  float* to;
  int64_t ld;
  bool* misplaced;
  template <int N>
  void store(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    if (col % N != 0) *misplaced = true;
    for (int i = 0; i < N; ++i) to[row * ld + col + i] = v.v[i];
  }
};

}  // namespace

TEST_CASE("gemm: a user's map and sink") {
  for (const int64_t cols : {44, 47}) {
    const Operands<float> in({20, cols, 30});
    const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
    Guarded<float> y(20, cols, cols);
    bool misplaced = false;
    AlignedSink sink;
    sink.to = y.data(), sink.ld = cols, sink.misplaced = &misplaced;
    const k::Status status = gemm(1, in.x(), in.w(), k::relu() | sink, in.shape);
    CHECK(verify(status, y, [&](int64_t m, int64_t n) { return relu(product(x[size_t(m)], w[size_t(n)])); }) == "");
    CHECK_FALSE(misplaced);
  }
}

// ---- weights and inputs of other kinds ------------------------------------------------------------------------------

TEST_CASE("gemm: gated weights") {
  for (const k::MatmulShape& shape : {k::MatmulShape{7, 5, 9}, {33, 70, 100}, {281, 259, 399}}) {
    const Operands<float, k::half> in(shape);
    Guarded<k::half> up(shape.n, shape.k, shape.k + 1, 1, Poison::nan);
    fill(up, 7, 0, 0.5);
    Guarded<float> b(1, shape.n, shape.n), y(shape.m, shape.n, shape.n + 1);
    fill(b, 8);
    const auto x = values<float>(in.x_data), w1 = values<float>(in.w_data), w3 = values<float>(up);
    const auto both = k::gated(in.w(), k::load(static_cast<const k::half*>(up.data()), up.ld()));

    k::Status status = gemm(2, in.x(), both, k::swiglu() | k::store(y.data(), y.ld()), shape);
    const auto joined = [&](int64_t m, int64_t n) {
      return silu(product(x[size_t(m)], w1[size_t(n)])) * product(x[size_t(m)], w3[size_t(n)]);
    };
    CHECK(verify(status, y, joined) == "");
    status = gemm(2, in.x(), both, k::swiglu() | k::bias(b.data()) | k::relu() | k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, [&](int64_t m, int64_t n) { return relu(joined(m, n) + Real<>(double(b.get(0, n)))); }) ==
          "");
    Guarded<k::half> c(1, shape.n, shape.n, 1);
    fill(c, 9);
    const auto biased =
        k::swiglu().of(k::bias(b.data()), k::bias(static_cast<const k::half*>(c.data())) | k::clamp(-1, 2));
    status = gemm(2, in.x(), both, biased | k::relu() | k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, [&](int64_t m, int64_t n) {
            const Real<> gate = product(x[size_t(m)], w1[size_t(n)]) + Real<>(double(b.get(0, n))),
                         other = product(x[size_t(m)], w3[size_t(n)]) + Real<>(value_of(c.get(0, n)));
            const Real<> clamped(std::min(2.0, std::max(-1.0, other.v)), other.e);
            return relu(silu(gate) * clamped);
          }) == "");
    status = gemm(2, in.x(), both, k::geglu() | k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, [&](int64_t m, int64_t n) {
      return gelu(product(x[size_t(m)], w1[size_t(n)])) * product(x[size_t(m)], w3[size_t(n)]);
    }) == "");
  }
}

TEST_CASE("gemm: stacked weights") {
  const int64_t counts[] = {37, 5, 70};
  const k::MatmulShape shape{21, 112, 210};
  const Operands<float> in(shape);
  const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
  Guarded<float> y(shape.m, shape.n, shape.n);
  const auto part = [&](int64_t row) { return k::load(in.w_data.data() + row * in.w_data.ld(), in.w_data.ld()); };
  const auto all = k::stacked(part(0), counts[0], part(counts[0]), counts[1], part(counts[0] + counts[1]), counts[2]);
  const k::Status status = gemm(2, in.x(), all, k::store(y.data(), y.ld()), shape);
  CHECK(verify(status, y, [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); }) == "");
}

TEST_CASE("gemm: quantized weights") {
  for (const k::MatmulShape& shape : {k::MatmulShape{15, 33, 64}, {40, 70, 448}}) {
    const Operands<k::half, int8_t> in(shape);
    const auto x = values<float>(in.x_data);
    Guarded<float> y(shape.m, shape.n, shape.n), scales(shape.n, shape.k / 64, shape.k / 64);
    for (int64_t n = 0; n < shape.n; ++n) {
      for (int64_t i = 0; i < shape.k; ++i)
        in.w_data.data()[n * shape.k + i] = int8_t(mix(uint64_t(n * shape.k + i)) % 255 - 127);
      for (int64_t g = 0; g < shape.k / 64; ++g) scales.set(n, g, float(1 + n % 5 + g) / 256);
    }
    scales.upload();
    Matrix<float> w(size_t(shape.n), Row<>(size_t(shape.k)));
    const auto weigh = [&](const std::function<double(int64_t, int64_t)>& weight) {
      for (int64_t n = 0; n < shape.n; ++n) {
        for (int64_t i = 0; i < shape.k; ++i) w[size_t(n)][size_t(i)] = Real<>(weight(n, i)).rounded();
      }
    };
    const auto sum = [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); };
    weigh([&](int64_t n, int64_t i) { return in.w_data.data()[n * shape.k + i] * double(scales.get(n, i / 64)); });
    const auto grouped = k::dequant(in.w(), k::group_scales(scales.data(), scales.ld(), 64));
    CHECK(verify(gemm(2, in.x(), grouped, k::store(y.data(), y.ld()), shape), y, sum) == "");

    // Words of eight codes, of which any bits are right.
    std::vector<uint32_t> words(size_t(shape.n * shape.k / 8));
    for (size_t i = 0; i < words.size(); ++i) words[i] = uint32_t(mix(i));
    weigh([&](int64_t n, int64_t i) {
      const uint32_t word = words[size_t((n * shape.k + i) / 8)];
      return (double((word >> (i % 8 / 2 * 4 + i % 2 * 16)) & 15u) - 8) * double(scales.get(n, i / 64));
    });
    const auto four_bits = k::dequant(k::int4(words.data(), shape.k), k::group_scales(scales.data(), scales.ld(), 64));
    CHECK(verify(gemm(2, in.x(), four_bits, k::store(y.data(), y.ld()), shape), y, sum) == "");
  }
}

TEST_CASE("gemm: inputs normalized and changed on the way in") {
  for (const k::MatmulShape& shape : {k::MatmulShape{15, 33, 45}, {290, 40, 1030}, {3, 17, 20000}}) {
    const Operands<k::half, float> in(shape);
    const auto w = values<float>(in.w_data);
    Guarded<float> gamma(1, shape.k, shape.k), beta(1, shape.k, shape.k), y(shape.m, shape.n, shape.n);
    fill(gamma, 9, 1, 0.1);
    fill(beta, 10);
    const auto at = [](const Guarded<float>& v, size_t i) { return Real<>(double(v.get(0, int64_t(i)))); };

    auto x = values<float>(in.x_data);
    for (auto& row : x) {
      rmsnorm(row, 1e-6);
      for (size_t i = 0; i < row.size(); ++i) row[i] = row[i] * at(gamma, i);
    }
    const auto sum = [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); };
    k::Status status = gemm(2, k::normed(in.x(), k::RmsNorm{}.eps(1e-6)) | k::mul(gamma.data()), in.w(),
                            k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, sum) == "");

    x = values<float>(in.x_data);
    for (auto& row : x) {
      layernorm(row, 1e-5);
      for (size_t i = 0; i < row.size(); ++i) row[i] = row[i] * at(gamma, i) + at(beta, i);
    }
    status = gemm(2, k::normed(in.x(), k::LayerNorm{}) | k::affine(gamma.data(), beta.data()), in.w(),
                  k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, sum) == "");

    x = values<float>(in.x_data);
    for (auto& row : x) {
      for (size_t i = 0; i < row.size(); ++i) row[i] = relu(row[i] + at(beta, i));
    }
    status = gemm(2, in.x() | k::add(beta.data()) | k::relu(), in.w(), k::store(y.data(), y.ld()), shape);
    CHECK(verify(status, y, sum) == "");
  }
}

TEST_CASE("gemm: a thread needs no more stack than is said") {
  const Operands<float> in({300, 300, 205});
  Guarded<float> y(300, 300, 300), z(300, 300, 300);
  const auto call = [&](Guarded<float>& to) {
    return gemm(1, k::normed(in.x(), k::LayerNorm{}), in.w(), k::store(to.data(), to.ld()), in.shape);
  };
  REQUIRE(call(y));
  k::Status status = k::invalid("it was not called");
  on_stack(kStackBytes, [&] { status = call(z); });
  REQUIRE(status);
  y.download();
  z.download();
  CHECK(z.bytes() == y.bytes());
}

// ---- special values -------------------------------------------------------------------------------------------------

TEST_CASE("gemm: a NaN or an infinity reaches its row or column and no other") {
  const k::MatmulShape shape{31, 67, 205};
  for (const double special : {kNaN, kInfinity, -kInfinity}) {
    for (const int64_t at : {0, 13, 192, 204}) {
      Operands<float> in(shape);
      in.x_data.set(30, at, float(special));
      in.w_data.set(66, at, float(special));
      in.w_data.set(5, at, 0.f);
      in.x_data.upload();
      in.w_data.upload();
      Guarded<float> y(shape.m, shape.n, shape.n);
      const k::Status status = gemm(2, in.x(), in.w(), k::store(y.data(), y.ld()), shape);
      const auto x = values<float>(in.x_data), w = values<float>(in.w_data);
      CHECK(verify(status, y, [&](int64_t m, int64_t n) { return product(x[size_t(m)], w[size_t(n)]); }) == "");
      y.download();
      CHECK(std::isnan(y.get(30, 5)));
      CHECK(std::isfinite(y.get(29, 65)));
    }
  }
}

// ---- threads --------------------------------------------------------------------------------------------------------

TEST_CASE("gemm: any number of threads gives the same bits") {
  Tally t;
  for (const k::MatmulShape& shape :
       {k::MatmulShape{100, 301, 401}, {601, 37, 300}, {13, 1500, 70}, {300, 300, 17}, {1, 1, 500}}) {
    const Operands<k::half, float> in(shape);
    Guarded<float> b(1, shape.n, shape.n);
    fill(b, 11);
    std::vector<unsigned char> plain_bits, gated_bits;
    for (const int threads : {1, 2, 3, 7, 64}) {
      Guarded<float> y(shape.m, shape.n, shape.n), z(shape.m, shape.n, shape.n);
      REQUIRE(gemm(threads, k::normed(in.x(), k::LayerNorm{}), in.w(),
                   k::bias(b.data()) | k::gelu() | k::store(y.data(), y.ld()), shape));
      REQUIRE(gemm(threads, in.x(), k::gated(in.w() | k::scale(1), in.w() | k::scale(0.7)),
                   k::swiglu() | k::store(z.data(), z.ld()), shape));
      y.download();
      z.download();
      t.expect(y.intact() && z.intact(), "%d threads wrote outside the result", threads);
      if (threads == 1) plain_bits = y.bytes(), gated_bits = z.bytes();
      t.expect(y.bytes() == plain_bits && z.bytes() == gated_bits, "M = %d: %d threads give other bits", int(shape.m),
               threads);
    }
  }
  CHECK_TALLY(t);
}
