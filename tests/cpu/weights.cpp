// Products on the CPU: shapes, threads, and the kinds of weights that vectors decode, which each instruction set does
// in its own way.
#include "support/cpu_products.h"

using namespace test;

// ---- weights of int8, int4 and uint4 --------------------------------------------------------------------------------

// Each kind has inputs and results of one type in all of these tests, as every combination is compiled for itself.
TEST_CASE("int8 weights, scales of groups") {
  for (const int group : {8, 16, 32, 64, 128}) {
    every_shape<float, float>("int8 by group",
                              [&](int64_t n, int64_t c) { return Scaled<int8_t, k::half>(n, c, Grain::group, group); });
  }
}
TEST_CASE("int4 weights") {
  for (const int group : {4, 16, 32, 64, 128, 256}) {
    every_shape<float, float>("int4", [&](int64_t n, int64_t c) { return FourBit<k::half, false>(n, c, group); });
  }
}
TEST_CASE("uint4 weights with zero points") {
  for (const int group : {8, 16, 32, 64, 128}) {
    every_shape<float, float>("uint4", [&](int64_t n, int64_t c) { return FourBit<float, true>(n, c, group); });
  }
}
TEST_CASE("codes: every number of tokens up to 40") {
  Tally t;
  const FourBit<k::half, false> w(19, 203, 32);
  for (int64_t m = 1; m <= 40; ++m) check<float, float>(t, "int4", {m, 19, 203, int(m % 3) + 1}, w);
  CHECK_TALLY(t);
}

TEST_CASE("codes: many rows") {
  Tally t;
  for (const int64_t n : {333, 1501}) {  // of which one token takes some that lie a page apart
    check<float, float>(t, "int8", {1, n, 203, 2}, Scaled<int8_t, k::half>(n, 203, Grain::group, 64));
    check<float, float>(t, "int4", {1, n, 1203, 2}, FourBit<k::half, false>(n, 1203, 32));
  }
  CHECK_TALLY(t);
}

namespace {

// Inputs of so many tokens, some of them far from the others, that value(token, column) gives.
template <class Weights, class Value>
void unlike_inputs(Tally& t, const char* what, int64_t m, const Weights& w, int64_t n, int64_t cols,
                   const Value& value) {
  Guarded<float> x(m, cols, cols), y(m, n, n);
  for (int64_t r = 0; r < m; ++r) for (int64_t i = 0; i < cols; ++i) x.set(r, i, float(value(r, i)));
  x.upload();
  const k::Status status = k::cpu::matmul(on_threads(2), k::load(static_cast<const float*>(x.data()), cols), w.source(),
                                          k::store(y.data(), n), {m, n, cols});
  // Where integers are multiplied, an input has 23 bits beside the largest of 256 columns.
  const int64_t blocks = (cols + 255) / 256;
  std::vector<double> most(static_cast<size_t>(m * blocks));
  const auto largest = [&](int64_t r, int64_t i) -> double& { return most[size_t(r * blocks + i / 256)]; };
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t i = 0; i < cols; ++i) {
      const double size = std::fabs(double(x.get(r, i)));
      if (std::isfinite(size)) largest(r, i) = std::max(largest(r, i), size);
    }
  }
  check_result(t, what, {m, n, cols}, status, y, [&](int64_t r, int64_t c) {
    return product(
        r, c, cols, [&](int64_t a, int64_t i) { return Real<>(x.get(a, i), largest(a, i) * 0x1p-23 + 0x1p-122); }, w);
  });
}
template <class Weights>
void unlike_inputs(Tally& t, const char* what, const Weights& w, int64_t n, int64_t cols, bool words = false) {
  for (const int64_t m : {1, 2, 3, 4}) {
    const auto some = [](int64_t r, int64_t i) {
      return double(int64_t(mix(uint64_t(r * 7919 + i)) % 2001) - 1000) / 1000;
    };
    const auto check_with = [&](double number, int64_t row, int64_t col) {
      unlike_inputs(t, what, m, w, n, cols,
                    [&](int64_t r, int64_t i) { return r == row && i == col ? number : some(r, i); });
    };
    for (const double number : {0x1p20, -0x1p60, kInfinity, -kInfinity, kNaN}) {
      // What is subtracted from all codes of 4 bits is as infinite as what they give.
      if (std::isinf(number) && words) continue;
      check_with(number, m - 1, 0);
      check_with(number, 0, cols - 1);
    }
    for (const double factor : {0., 0x1p-140, 0x1p-126, 0x1p-80, 0x1p100}) {
      unlike_inputs(t, what, m, w, n, cols,
                    [&](int64_t r, int64_t i) { return (r == 0 ? factor : 1) * some(r, i); });
    }
  }
}

}  // namespace

TEST_CASE("weights of 8 and 4 bits, and inputs unlike each other") {
  Tally t;
  for (const int64_t cols : {300, 1100}) {
    unlike_inputs(t, "int8, a scale for a row", Scaled<int8_t, float>(13, cols, Grain::row), 13, cols);
    unlike_inputs(t, "int8, a scale for 256", Scaled<int8_t, float>(13, cols, Grain::group, 256), 13, cols);
    unlike_inputs(t, "int8, a scale for 64", Scaled<int8_t, float>(13, cols, Grain::group, 64), 13, cols);
    unlike_inputs(t, "int4", FourBit<k::half, false>(13, cols, 32), 13, cols, true);
    unlike_inputs(t, "uint4", FourBit<float, true>(13, cols, 128), 13, cols, true);
  }
  CHECK_TALLY(t);
}

TEST_CASE("weights of 8 and 4 bits, stacked and gated") {
  Tally t;
  const int64_t cols = 900, n = 21;
  const auto all = [&](const char* what, const auto& w) {
    for (const int64_t m : {1, 2, 4, 5, 33}) {
      const Matrix<float> x(7, m, cols, cols, 0, 1);
      const auto in = k::load(static_cast<const float*>(x.data()), cols);
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      Guarded<float> y(m, 2 * n, 2 * n), both(m, n, n);
      check_result(t, what, {m, 2 * n, cols},
                   k::cpu::matmul(on_threads(2), in, k::stacked(w.source(), n, w.source(), n),
                                  k::store(y.data(), 2 * n), {m, 2 * n, cols}),
                   y, [&](int64_t r, int64_t c) { return product(r, c % n, cols, value, w); });
      check_result(t, what, {m, n, cols},
                   k::cpu::matmul(on_threads(2), in, k::gated(w.source(), w.source()),
                                  k::reglu() | k::store(both.data(), n), {m, n, cols}),
                   both, [&](int64_t r, int64_t c) {
                     const Real<> up = product(r, c, cols, value, w);
                     return (up.v > 0 ? up : Real<>(0, up.v + up.e > 0 ? up.e : 0)) * up;
                   });
    }
  };
  all("int8", Scaled<int8_t, float>(n, cols, Grain::row));
  all("int4", FourBit<k::half, false>(n, cols, 32));
  CHECK_TALLY(t);
}

#if defined(WEIGHTS_MUST_HAVE_DOTS)
TEST_CASE("weights of 8 and 4 bits are multiplied as integers") {
  using k::detail::host::Digits;
  const Scaled<int8_t, float> by_row(3, 256, Grain::row), by_group(3, 256, Grain::group, 64);
  const FourBit<k::half, true> words(3, 256, 32);
  const auto source = by_row.source();
  STATIC_REQUIRE(Digits<std::decay_t<decltype(source)>>::possible);
  CHECK(k::detail::host::in_digits(source));
  CHECK(!k::detail::host::in_digits(by_group.source()));
  CHECK(k::detail::host::in_digits(words.source()));
  CHECK((k::cpu::kNeeds >> 11 & 1u) == 1);
}
#endif

namespace {

template <class TY, class Weights>
void same_bits(Tally& t, const char* what, int64_t m, int64_t n, int64_t cols, const Weights& w) {
  const Matrix<float> x(1, m, cols, cols, 0, 1);
  std::vector<unsigned char> first;
  for (const int threads : {1, 2, 3, 7}) {
    Guarded<TY> y(m, n, n);
    const k::Status status =
        k::cpu::matmul(on_threads(threads), k::load(x.data(), cols), w.source(), k::store(y.data(), n), {m, n, cols});
    y.download();
    if (threads == 1) first = y.bytes();
    t.expect(status.ok() && y.bytes() == first, "%s, M %d: %d threads give other bits than one", what, int(m), threads);
  }
}

}  // namespace

TEST_CASE("codes: any number of threads gives the same bits") {
  Tally t;
  for (const int64_t m : {1, 2, 3, 4, 7, 32, 40}) {
    for (const int64_t n : {1, 15, 61, 133}) {
      same_bits<float>(t, "int8", m, n, 1003, Scaled<int8_t, k::half>(n, 1003, Grain::group, 64));
      same_bits<float>(t, "uint4", m, n, 1003, FourBit<float, true>(n, 1003, 32));
    }
  }
  CHECK_TALLY(t);
}

namespace {

// The rows of a product of 40 tokens, each again in products of fewer, from different places on.
template <class TY, class Weights>
void same_bits_in_any_batch(Tally& t, const char* what, int64_t n, int64_t cols, const Weights& w) {
  const int64_t most = 40;
  const Matrix<float> x(1, most, cols, cols, 0, 1);
  k::cpu::MatmulPolicy policy;
  policy.batch_invariant = true;
  const auto run = [&](Guarded<TY>& y, int64_t first, int threads) {
    const k::Status status = k::cpu::matmul(on_threads(threads), k::load(x.data() + first * cols, cols), w.source(),
                                            k::store(y.data(), n), {y.rows(), n, cols}, policy);
    t.expect(status.ok(), "%s", status.reason());
    y.download();
  };
  Guarded<TY> whole(most, n, n);
  run(whole, 0, 1);
  for (const int64_t m : {1, 2, 3, 5, 8, 13, 39}) {
    Guarded<TY> y(m, n, n);
    run(y, most - m, 2);
    const auto of = [&](const Guarded<TY>& from, int64_t row, int64_t col) {
      const TY v = from.get(row, col);
      uint32_t bits = 0;
      std::memcpy(&bits, &v, sizeof(v));
      return bits;
    };
    int different = 0;
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < n; ++c) different += of(y, r, c) != of(whole, most - m + r, c);
    }
    t.expect(different == 0, "%s: %d of the results of %d tokens have other bits than among 40", what, different,
             int(m));
  }
}

}  // namespace

TEST_CASE("codes: batch_invariant gives a row the same bits in every batch") {
  Tally t;
  same_bits_in_any_batch<float>(t, "uint4", 61, 1003, FourBit<float, true>(61, 1003, 32));
  CHECK_TALLY(t);
}

// ---- other weights, for which the dot products of bytes are not used ------------------------------------------------

#if !defined(WEIGHTS_MUST_HAVE_DOTS)
TEST_CASE("float weights") {
  every_shape<float, float>("float", [](int64_t n, int64_t c) { return Plain<float>(n, c); });
}
TEST_CASE("half weights") {
  every_shape<float, k::half>("half", [](int64_t n, int64_t c) { return Plain<k::half>(n, c); });
}
TEST_CASE("fp8 weights with scales") {
  every_shape<float, float>("e4m3 by tensor",
                            [](int64_t n, int64_t c) { return Scaled<k::float8_e4m3, float>(n, c, Grain::tensor); });
  every_shape<float, float>(
      "e4m3 by block", [](int64_t n, int64_t c) { return Scaled<k::float8_e4m3, float>(n, c, Grain::block, 128); });
  every_shape<float, float>("e4m3 by small block",
                            [](int64_t n, int64_t c) { return Scaled<k::float8_e4m3, float>(n, c, Grain::block, 4); });
}
TEST_CASE("gf4 weights") {
  every_shape<k::half, float>("gf4", [](int64_t n, int64_t c) { return EightInAWord<>(n, c); });
}

TEST_CASE("fp4 weights, scales that are powers of 2") {
  every_shape<float, float>("fp4", [](int64_t n, int64_t c) { return FourBitFloats<k::float8_e8m0>(n, c, 32); });
}
TEST_CASE("every number of tokens up to 40") {
  Tally t;
  const Plain<float> w(19, 203);
  const Plain<k::half> halves(19, 203);
  for (int64_t m = 1; m <= 40; ++m) {
    check<float, float>(t, "float", {m, 19, 203, int(m % 3) + 1}, w);
    check<float, float>(t, "half", {m, 19, 203, int(m % 3) + 1}, halves);
  }
  CHECK_TALLY(t);
}

TEST_CASE("many rows") {
  Tally t;
  for (const int64_t m : {1, 4, 17})
    check<float, float>(t, "float", {m, 40000 / m + 5, 33, 3}, Plain<float>(40000 / m + 5, 33));
  for (const int64_t n : {333, 1501}) check<float, float>(t, "half", {1, n, 203, 2}, Plain<k::half>(n, 203));
  CHECK_TALLY(t);
}

// All products have one sign: nothing cancels, and each partial sum is as large as it can be. Chains of up to 512
// additions in 4 lanes or more, then 32 totals: errors that differ in sign leave about 8 units; one chain would leave
// ten times as many.
TEST_CASE("65536 columns with a large common part") {
  Tally t;
  const int64_t cols = 65536, n = 6;
  for (const double sign : {1.0, -1.0}) {
    Guarded<float> x(5, cols, cols), w(n, cols, cols);
    Random random(3);
    for (int64_t i = 0; i < cols; ++i) {
      for (int64_t r = 0; r < 5; ++r) x.set(r, i, float(1e3 * sign + random.normal()));
      for (int64_t r = 0; r < n; ++r) w.set(r, i, float(1 + 0.1 * random.uniform()));
    }
    x.upload(), w.upload();
    for (const int64_t m : {1, 2, 5}) {
      Guarded<float> y(m, n, n);
      REQUIRE(k::cpu::matmul(on_threads(2), k::load(x.data(), cols), k::load(w.data(), cols), k::store(y.data(), n),
                             {m, n, cols}));
      y.download();
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          long double sum = 0;
          for (int64_t i = 0; i < cols; ++i) sum += static_cast<long double>(x.get(r, i)) * w.get(c, i);
          const double units = std::fabs(double(y.get(r, c) - sum)) / std::fabs(double(sum)) / unit<float>;
          t.expect(units <= 16, "M %d: %g units", int(m), units);
        }
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("misaligned pointers and row strides") {
  Tally t;
  for (const int64_t shift : {0, 1, 2, 3, 5, 8}) {
    for (const int64_t gap : {0, 1, 2, 4, 8, 16}) {
      for (const int64_t m : {1, 6}) {
        check<float, float>(t, "float", {m, 6, 130}, Plain<float>(6, 130, gap, shift));
        check<float, k::half>(t, "half", {m, 6, 130}, Plain<k::half>(6, 130, gap, shift));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("any number of threads gives the same bits") {
  Tally t;
  for (const int64_t m : {1, 2, 3, 4, 7, 32, 40}) {
    for (const int64_t n : {1, 15, 61, 133}) {
      same_bits<float>(t, "float", m, n, 4403, Plain<float>(n, 4403));
      same_bits<k::half>(t, "half", m, n, 1003, Plain<k::half>(n, 1003));
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("batch_invariant gives a row the same bits in every batch") {
  Tally t;
  same_bits_in_any_batch<float>(t, "float", 61, 4403, Plain<float>(61, 4403));
  same_bits_in_any_batch<k::half>(t, "half", 61, 1003, Plain<k::half>(61, 1003));
  CHECK_TALLY(t);
}
#endif
