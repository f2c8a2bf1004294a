// Products with more weights than 32 bits count.
#include "support/huge.cuh"

#include "support/gpu_products.cuh"

using namespace test;

TEST_CASE("matmul: more than 2^31 weights") {
  const int64_t cols = 4104, n = (int64_t(1) << 31) / cols + 300;
  if (!enough_memory(6)) return skip("needs 6 GB of GPU memory");
  Huge w(n * cols);
  w.hash();
  const auto weight = [&](int64_t r, int64_t i) {
    const uint16_t bits = hashed_half(uint64_t(r * cols + i));
    k::half x;
    std::memcpy(static_cast<void*>(&x), &bits, 2);
    return value_of(x);
  };
  for (const int64_t m : {1, 2, 70}) {
    const Matrix<k::half> x(21, m, cols, cols, 0, 1);
    Huge y(m * n);
    Stream stream;
    REQUIRE(k::matmul(stream, k::load(static_cast<const k::half*>(x.data()), cols),
                      k::load(static_cast<const k::half*>(w.data()), cols), k::store(y.data(), n), {m, n, cols}));
    stream.wait();
    CHECK(y.intact());
    for (const int64_t row : {int64_t(0), m - 1}) {
      for (const int64_t first : {int64_t(0), n / 2, n - 8}) {
        const std::vector<k::half> got = y.read(row * n + first, 8);
        for (int64_t i = 0; i < 8; ++i) {
          const Real<> want = product(
              row, first + i, cols, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); }, weight,
              units(Path::gemm, cols));
          INFO(m << " tokens, row " << row << ", column " << first + i);
          const double error = std::fabs(value_of(got[size_t(i)]) - want.v);
          REQUIRE(error <= want.e + 0x1p-11 * std::fabs(want.v));
        }
      }
    }
  }
}

// Few columns and many tokens, or many results for each.
TEST_CASE("matmul: more than 2^31 inputs, and results") {
  if (!enough_memory(14)) return skip("needs 14 GB of GPU memory");
  const auto half_at = [](int64_t i) {
    const uint16_t bits = hashed_half(uint64_t(i));
    k::half x;
    std::memcpy(static_cast<void*>(&x), &bits, 2);
    return value_of(x);
  };
  const auto check_at = [&](const Huge& y, int64_t m, int64_t n, int64_t cols, int64_t row, int64_t first) {
    const std::vector<k::half> got = y.read(row * n + first, 8);
    for (int64_t i = 0; i < 8; ++i) {
      const Real<> want = product(
          row, first + i, cols, [&](int64_t r, int64_t c) { return Real<>(half_at(r * cols + c)); },
          [&](int64_t r, int64_t c) { return half_at(r * cols + c); }, units(Path::gemm, cols));
      INFO(m << " tokens, row " << row << ", column " << first + i);
      REQUIRE(std::fabs(value_of(got[size_t(i)]) - want.v) <= want.e + 0x1p-11 * std::fabs(want.v));
    }
  };
  const auto call = [&](const Huge& x, const Huge& w, Huge& y, int64_t m, int64_t n, int64_t cols) {
    Stream stream;
    REQUIRE(k::matmul(stream, k::load(static_cast<const k::half*>(x.data()), cols),
                      k::load(static_cast<const k::half*>(w.data()), cols), k::store(y.data(), n), {m, n, cols}));
    stream.wait();
    CHECK(y.intact());
    for (const int64_t row : {int64_t(0), m / 2, m - 1}) {
      for (const int64_t first : {int64_t(0), n - 8}) check_at(y, m, n, cols, row, first);
    }
  };
  {
    const int64_t cols = 4104, m = (int64_t(1) << 31) / cols + 300, n = 16;
    Huge x(m * cols), w(n * cols), y(m * n);
    x.hash(), w.hash();
    call(x, w, y, m, n, cols);
  }
  {
    const int64_t n = 40008, m = (int64_t(1) << 31) / n + 300, cols = 64;
    Huge x(m * cols), w(n * cols), y(m * n);
    x.hash(), w.hash();
    call(x, w, y, m, n, cols);
  }
}
