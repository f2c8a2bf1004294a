// layernorm and rmsnorm on the CPU: shapes, layouts, threads, special values; mean and rstd as outputs.
#include "support/row_tests.h"
#include "support/threads.h"
#include "support/two_pass.h"

using namespace test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double special(int64_t row, int64_t col, int64_t cols) {
  switch (row) {
    case 0: return 0;
    case 1: return col == cols / 2 ? kInfinity : 0.01 * double(col % 100);
    case 2: return col == cols - 1 ? kNaN : 0.01 * double(col % 100);
    case 3: return col % 2 ? -6e4 : 6e4;
    case 4: return 3.5;
    case 5: return col == 0 ? -kInfinity : 1;
    case 6: return kNaN;
    case 7: return col == cols - 1 ? 6e4 : 0;
    case 8: return 65504;
    case 9: return 1e-4 * double(col % 7 - 3);
    case 10: return 1000 + double(col % 2);
    default: return -0.25 * double(col % 64);
  }
}

}  // namespace

TEST_CASE("layernorm: every number of columns up to 1100") { every_cols<LayerNorm, k::half>(); }
TEST_CASE("rmsnorm: every number of columns up to 1100") { every_cols<RmsNorm, float>(); }

TEST_CASE("layernorm: many columns") { many_cols<LayerNorm, float>(); }
TEST_CASE("rmsnorm: many columns") { many_cols<RmsNorm, k::half>(); }

TEST_CASE("layernorm: misaligned pointers and row strides") { awkward<LayerNorm, k::half>(); }
TEST_CASE("rmsnorm: misaligned pointers and row strides") { awkward<RmsNorm, float>(); }

TEST_CASE("layernorm: in place") { in_place<LayerNorm, float>(); }
TEST_CASE("rmsnorm: in place") { in_place<RmsNorm, k::half>(); }

TEST_CASE("layernorm: numbers of rows") { row_counts<LayerNorm, k::half>(); }
TEST_CASE("rmsnorm: numbers of rows") { row_counts<RmsNorm, float>(); }

TEST_CASE("layernorm: any number of threads gives the same bits") { thread_counts<LayerNorm, float>(); }
TEST_CASE("rmsnorm: any number of threads gives the same bits") { thread_counts<RmsNorm, k::half>(); }

// Results of more than 32 MB, which are written around the cache; every other row begins at no multiple of 32 bytes.
TEST_CASE("rmsnorm: large results") {
  Tally t;
  Trial<RmsNorm, float> trial(Shape{1100, 8192, 0, 4});
  expect_none(t, trial.run(on_threads(3), /*step*/ 9));
  Trial<RmsNorm, float> again(Shape{1100, 8192, 0, 4});
  expect_none(t, again.run(k::cpu::Exec{1}, /*step*/ 1099));
  t.expect(trial.bits() == again.bits(), "one thread and three give different bits");
  CHECK_TALLY(t);
}

TEST_CASE("layernorm: special values") {
  special_rows<LayerNorm, k::half>(12, special);
  special_rows<LayerNorm, float>(12, special);
}
TEST_CASE("rmsnorm: special values") {
  special_rows<RmsNorm, k::half>(12, special);
  special_rows<RmsNorm, float>(12, special);
}

TEST_CASE("layernorm: a mean of 1e6 with a spread of 1e-3") {
  Tally t;
  for (const int64_t cols : {2, 7, 100, 1000, 40000}) {
    const auto value = [](int64_t r, int64_t c) {
      const double spread = r == 0 ? 1e-3 : r == 1 ? 0.1 : 10;
      return 1e6 + spread * (double(mix(uint64_t(c)) % 2001) / 1000 - 1);
    };
    Trial<LayerNorm, float> single(Shape{3, cols});
    expect_none(t, single.input(value).run());
    Trial<LayerNorm, double> twofold(Shape{3, cols});
    expect_none(t, twofold.input(value).run());
  }
  CHECK_TALLY(t);
}

// Rows that are read again, that wait on the stack, and that are too long for it, by one thread and by three.
TEST_CASE("layernorm: as good as in two passes, to a factor of 4, wherever outliers lie") {
  Tally t;
  Random random(31);
  for (const int64_t cols : {1, 7, 31, 33, 100, 129, 1000, 4097, 16384, 20001, 65536}) {
    for (const double outlier : kOutliers) {
      each_place_of_outliers(cols, [&](auto is_outlier) {
        std::vector<float> x, zero(size_t(cols), 0.f), y(size_t(cols), NAN);
        float rstd = NAN;
        for (int64_t c = 0; c < cols; ++c) x.push_back(float(with_outliers(random, c, outlier, is_outlier)));
        const NormErrors theirs = two_pass_errors(x, 1e-5);
        const auto check = [&](const char* how, const k::Status& status) {
          const NormErrors ours = norm_errors(x, 1e-5, [&](size_t i) { return double(y[i]); }, double(rstd));
          t.expect(status && ours.within_four_of(theirs),
                   "%d columns, outliers %g, %s: rstd off by %.1f units, in two passes %.1f; values by %.1f and %.1f",
                   int(cols), outlier, how, ours.rstd, theirs.rstd, ours.values, theirs.values);
        };
        const auto options = k::LayerNorm{}.eps(1e-5).rstd(&rstd);
        const auto out = k::store(y.data(), cols);
        check("read again", k::cpu::layernorm(k::cpu::Exec{1}, k::load(x.data(), cols), out, 1, cols, options));
        const auto sum = k::load(x.data(), cols) | k::add(k::row(zero.data()));
        check("kept", k::cpu::layernorm(k::cpu::Exec{1}, sum, out, 1, cols, options));
        check("three threads", k::cpu::layernorm(on_threads(3), sum, out, 1, cols, options));
      });
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("layernorm: a constant row gives zeros exactly") {
  for (const double value : {1e6 + 0.125, -3.3, 0.1, 1e30, 1e-30}) {
    for (const int64_t cols : {1, 5, 100, 1001, 40001}) {
      Trial<LayerNorm, float> trial(Shape{1, cols});
      REQUIRE(trial.input([&](int64_t, int64_t) { return value; }).run() == "");
      bool all_zero = true;
      for (int64_t c = 0; c < cols; ++c) all_zero = all_zero && trial.output(0, c) == 0.0;
      REQUIRE(all_zero);
    }
  }
}

TEST_CASE("eps: none, small and large") {
  Tally t;
  for (const double eps : {0.0, 1e-12, 1e-6, 1.0, 1e6}) {
    for (const int64_t cols : {5, 64, 1000}) {
      LayerNorm layernorm;
      layernorm.eps = eps;
      Trial<LayerNorm, float> first(Shape{5, cols}, layernorm);
      expect_none(t, first.run());
      RmsNorm rmsnorm;
      rmsnorm.eps = eps;
      Trial<RmsNorm, float> second(Shape{5, cols}, rmsnorm);
      expect_none(t, second.run());
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("layernorm and rmsnorm: double") {
  Tally t;
  for (const int64_t cols : {1, 7, 64, 255, 1000, 33000}) {
    Trial<LayerNorm, double> layernorm(Shape{6, cols, cols % 3, cols % 2});
    expect_none(t, layernorm.run());
    Trial<RmsNorm, double> rmsnorm(Shape{6, cols, cols % 3, cols % 2});
    expect_none(t, rmsnorm.run());
  }
  CHECK_TALLY(t);
}

TEST_CASE("without mean and rstd, with one of them, and as doubles of float rows") {
  const int64_t cols = 100;
  Guarded<float> x(3, cols, cols), y(3, cols, cols), mean(3, 1, 1), rstd(3, 1, 1);
  Guarded<double> mean2(3, 1, 1), rstd2(3, 1, 1);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < cols; ++c) x.set(r, c, float(double(mix(uint64_t(r * cols + c)) % 1000) / 100));
  }
  x.upload();
  const auto run = [&](const k::LayerNorm& options) {
    return k::cpu::layernorm(k::cpu::Exec{1}, k::load(x.data(), cols), k::store(y.data(), cols), 3, cols, options);
  };
  REQUIRE(run(k::LayerNorm{}));
  CHECK((mean.unchanged() && rstd.unchanged()));
  REQUIRE(run(k::LayerNorm{}.mean(mean.data())));
  CHECK((!mean.unchanged() && rstd.unchanged()));
  REQUIRE(run(k::LayerNorm{}.rstd(rstd.data()).mean(mean2.data())));
  REQUIRE(run(k::LayerNorm{}.rstd(rstd2.data())));
  mean.download();
  rstd.download();
  mean2.download();
  rstd2.download();
  CHECK((mean.intact() && rstd.intact() && mean2.intact() && rstd2.intact()));
  for (int64_t r = 0; r < 3; ++r) {
    CHECK(double(mean.get(r, 0)) == mean2.get(r, 0));
    CHECK(double(rstd.get(r, 0)) == rstd2.get(r, 0));
  }
}
