// Products on the CPU: weights of the other types, every code of fp8, and scales.
#include "support/cpu_products.h"

using namespace test;

TEST_CASE("bfloat16 weights") {
  every_shape<k::bfloat16, k::bfloat16>("bf16", [](int64_t n, int64_t c) { return Plain<k::bfloat16>(n, c); });
}
TEST_CASE("e4m3 weights") {
  every_shape<float, float>("e4m3", [](int64_t n, int64_t c) { return Plain<k::float8_e4m3>(n, c); });
}
TEST_CASE("e5m2 weights") {
  every_shape<float, float>("e5m2", [](int64_t n, int64_t c) { return Plain<k::float8_e5m2>(n, c); });
}
TEST_CASE("int8 weights without scales") {
  every_shape<float, float>("int8", [](int64_t n, int64_t c) { return Plain<int8_t>(n, c, 1, 1, 40); });
}
TEST_CASE("int8 weights, a scale for each row") {
  every_shape<float, float>("int8 by row",
                            [](int64_t n, int64_t c) { return Scaled<int8_t, float>(n, c, Grain::tensor); });
}
TEST_CASE("e5m2 weights, scales of groups") {
  every_shape<float, float>("e5m2 by group", [](int64_t n, int64_t c) {
    return Scaled<k::float8_e5m2, k::bfloat16>(n, c, Grain::group, 64);
  });
}

TEST_CASE("misaligned pointers and row strides of bytes") {
  Tally t;
  for (const int64_t shift : {0, 1, 2, 3, 5, 8}) {
    for (const int64_t gap : {0, 1, 2, 4, 8, 16}) {
      for (const int64_t m : {1, 6}) check<float, float>(t, "int8", {m, 6, 130}, Plain<int8_t>(6, 130, gap, shift, 30));
    }
  }
  CHECK_TALLY(t);
}

namespace {

template <class S>
void check_row_scales(Tally& t, const char* what) {
  const int64_t n = 20, cols = 77;
  const Matrix<int8_t> w(1, n, cols, cols, 0, 40);
  const Matrix<S> s(2, 1, n, n);
  const Matrix<float> x(3, 2, cols, cols);
  Guarded<float> y(2, n, n);
  const k::Status status =
      k::cpu::matmul(k::cpu::Exec{1}, k::load(x.data(), cols),
                     k::dequant(k::load(w.data(), cols), k::row_scales(s.data())), k::store(y.data(), n), {2, n, cols});
  const auto value = [&](int64_t m, int64_t i) { return Real<>(x.value(m, i)); };
  const auto weight = [&](int64_t r, int64_t i) { return w.value(r, i) * double(float(s.value(0, r))); };
  check_result(t, what, {2, n, cols}, status, y,
               [&](int64_t m, int64_t r) { return product(m, r, cols, value, weight); });
}

}  // namespace

TEST_CASE("row_scales are read one to a row") {
  Tally t;
  check_row_scales<float>(t, "row scales of float");
  check_row_scales<double>(t, "row scales of double, rounded to float");
  CHECK_TALLY(t);
}

TEST_CASE("double") {
  Tally t;
  const int64_t n = 19, cols = 1037;
  const Matrix<double> x(1, 6, cols, cols + 1), w(2, n, cols, cols);
  for (const int64_t m : {1, 2, 6}) {
    Guarded<double> y(m, n, n + 1);
    REQUIRE(k::cpu::matmul(on_threads(2), k::load(x.data(), cols + 1), k::load(w.data(), cols),
                           k::store(y.data(), n + 1), {m, n, cols}));
    y.download();
    CHECK(y.intact());
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < n; ++c) {
        long double sum = 0, size = 0;
        for (int64_t i = 0; i < cols; ++i)
          sum += static_cast<long double>(x.value(r, i)) * w.value(c, i),
              size += std::fabs(x.value(r, i) * w.value(c, i));
        t.expect(std::fabs(double(sum - y.get(r, c))) <= double(kSum * unit<double> * size), "row %d col %d: got %g",
                 int(r), int(c), y.get(r, c));
      }
    }
  }
  CHECK_TALLY(t);
}

namespace {

// Row c has code c in one place and zeros elsewhere. S: of the scales.
template <class T, class S>
void every_code(Tally& t, const char* what) {
  const int64_t cols = 77;
  for (const int64_t at : {0, 31, 40, 76}) {
    std::vector<T> codes(256 * cols);
    std::memset(static_cast<void*>(codes.data()), 0, codes.size());
    for (int c = 0; c < 256; ++c) {
      const uint8_t code = uint8_t(c);
      std::memcpy(static_cast<void*>(&codes[size_t(c * cols + at)]), &code, 1);
    }
    const std::vector<float> x(size_t(33 * cols), 1.f);
    const std::vector<S> ones(256, make<S>(1)), threes(256, make<S>(3));
    const auto w = k::load(static_cast<const T*>(codes.data()), cols);
    const auto source = k::load(x.data(), cols);
    for (const int64_t m : {1, 2, 6, 33}) {
      std::vector<float> plain(size_t(m * 256)), scaled(plain), centered(plain);
      const k::cpu::Exec cx = on_threads(2);
      REQUIRE(k::cpu::matmul(cx, source, w, k::store(plain.data(), 256), {m, 256, cols}));
      REQUIRE(k::cpu::matmul(cx, source, k::dequant(w, k::row_scales(threes.data())), k::store(scaled.data(), 256),
                             {m, 256, cols}));
      REQUIRE(k::cpu::matmul(cx, source, k::dequant(w, k::row_scales(ones.data()).zeros(ones.data())),
                             k::store(centered.data(), 256), {m, 256, cols}));
      for (size_t i = 0; i < plain.size(); ++i) {
        const float value = k::convert<float>(codes[i % 256 * size_t(cols) + size_t(at)]);
        const auto same = [](float a, float b) { return a == b || (a != a && b != b); };
        t.expect(same(plain[i], value), "%s, M %d, code %d: %g, not %g", what, int(m), int(i % 256), plain[i], value);
        t.expect(same(scaled[i], 3 * value), "%s scaled, M %d, code %d: %g, not %g", what, int(m), int(i % 256),
                 scaled[i], 3 * value);
        const double want = double(value) - double(cols), off = std::fabs(centered[i] - want);
        t.expect(same(centered[i], float(want)) || off <= 1e-4 * (std::fabs(double(value)) + 77),
                 "%s centered, code %d: %g, not %g", what, int(i % 256), centered[i], want);
      }
    }
  }
}

}  // namespace

TEST_CASE("every code of fp8 means what it says") {
  Tally t;
  every_code<k::float8_e4m3, float>(t, "e4m3");
  every_code<k::float8_e5m2, k::bfloat16>(t, "e5m2");
  CHECK_TALLY(t);
}

// A scale for the group beside the one in each word.
TEST_CASE("gf4 with scales") {
  Tally t;
  for (const int64_t cols : {100, 128, 1000}) {
    const EightInAWord<> w(19, cols);
    const Matrix<float> x(1, 33, cols, cols, 0, 1), s(2, 19, (cols + 31) / 32, (cols + 31) / 32, 1, 0.1);
    const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
    for (const int64_t m : {1, 3, 6, 33}) {
      Guarded<float> y(m, 19, 19);
      const auto status = k::cpu::matmul(on_threads(2), k::load(static_cast<const float*>(x.data()), cols),
                                         k::dequant(w.source(), k::group_scales(s.data(), s.ld(), 32)),
                                         k::store(y.data(), 19), {m, 19, cols});
      check_result(t, "gf4 with scales", {m, 19, cols}, status, y, [&](int64_t r, int64_t n) {
        return product(r, n, cols, value, [&](int64_t row, int64_t i) { return w(row, i) * s.value(row, i / 32); });
      });
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("NaN in fp8 weights") {
  Tally t;
  for (const int64_t at : {0, 17, 76}) {
    Plain<k::float8_e4m3> w(20, 77);
    Plain<k::float8_e5m2> w2(20, 77);
    w.set(3, at, make<k::float8_e4m3>(kNaN)), w2.set(3, at, make<k::float8_e5m2>(kNaN)),
        w2.set(4, at, make<k::float8_e5m2>(kNaN));
    const uint8_t infinity = 0x7c;
    k::float8_e5m2 code;
    std::memcpy(static_cast<void*>(&code), &infinity, 1);
    w2.set(5, at, code);
    w.upload(), w2.upload();
    for (const int64_t m : {1, 6, 33}) {
      check<float, float>(t, "e4m3", {m, 20, 77}, w);
      check<float, float>(t, "e5m2", {m, 20, 77}, w2);
    }
  }
  CHECK_TALLY(t);
}
