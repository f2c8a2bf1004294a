// softmax and log_softmax on the CPU: shapes, layouts, threads and special values.
#include "support/row_tests.h"

using namespace test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Rows that end in NaN, in zeros or in one. -300 and -6e4 stand where exp of the distance to 0 would vanish.
double special(int64_t row, int64_t col, int64_t cols) {
  switch (row) {
    case 0: return -kInfinity;
    case 1: return col == cols / 2 ? kInfinity : 0.01 * double(col % 100);
    case 2: return col == cols - 1 ? kNaN : 0.01 * double(col % 100);
    case 3: return col % 2 ? -6e4 : 6e4;
    case 4: return 3.5;
    case 5: return col == 0 ? -6e4 : -kInfinity;
    case 6: return kNaN;
    case 7: return col <= cols / 8 ? -300 : -kInfinity;
    case 8: return col == cols - 1 ? 6e4 : -kInfinity;
    case 9: return kInfinity;
    case 10: return col % 3 == 0 ? kNaN : col % 3 == 1 ? kInfinity : -kInfinity;
    case 11: return 65504;
    case 12: return col >= cols - cols / 8 - 1 ? -100 : -kInfinity;
    case 13: return col == 0 ? kNaN : -kInfinity;
    default: return -0.25 * double(col % 64);
  }
}

// What only float and double can hold.
double extreme(int64_t row, int64_t col, int64_t cols) {
  switch (row) {
    case 0: return col % 2 ? 3e38 : -3e38;
    case 1: return -3e38;
    case 2: return col == cols - 1 ? 1e38 : 1e-40;
    case 3: return 1e30 * double(col % 3);
    default: return 1e-38 * double(col % 5 - 2);
  }
}

}  // namespace

TEST_CASE("softmax: every number of columns up to 1100") { every_cols<Softmax, k::half>(); }
TEST_CASE("log_softmax: every number of columns up to 1100") { every_cols<LogSoftmax, float>(); }

TEST_CASE("softmax: many columns") { many_cols<Softmax, float>(); }
TEST_CASE("log_softmax: many columns") { many_cols<LogSoftmax, k::half>(); }

TEST_CASE("softmax: misaligned pointers and row strides") { awkward<Softmax, k::half>(); }
TEST_CASE("log_softmax: misaligned pointers and row strides") { awkward<LogSoftmax, float>(); }

TEST_CASE("softmax: in place") {
  in_place<Softmax, float>();
  in_place<Softmax, k::half, k::bfloat16>();
}
TEST_CASE("log_softmax: in place") { in_place<LogSoftmax, float>(); }

TEST_CASE("softmax: numbers of rows") { row_counts<Softmax, k::half>(); }
TEST_CASE("log_softmax: numbers of rows") { row_counts<LogSoftmax, float>(); }

TEST_CASE("softmax: any number of threads gives the same bits") { thread_counts<Softmax, k::half>(); }
TEST_CASE("log_softmax: any number of threads gives the same bits") { thread_counts<LogSoftmax, float>(); }

TEST_CASE("softmax: several calls at once") { concurrent_calls<Softmax, float>(); }

TEST_CASE("softmax: special values") {
  special_rows<Softmax, k::half>(15, special);
  special_rows<Softmax, float>(15, special);
  special_rows<Softmax, float>(5, extreme);
}
TEST_CASE("log_softmax: special values") {
  special_rows<LogSoftmax, k::half>(15, special);
  special_rows<LogSoftmax, float>(15, special);
  special_rows<LogSoftmax, float>(5, extreme);
}

TEST_CASE("softmax: a hidden row is zeros exactly, a lone score is one exactly") {
  Trial<Softmax, float> trial(Shape{2, 1000});
  trial.input([](int64_t r, int64_t c) { return r == 1 && c == 777 ? -12.0 : -kInfinity; });
  REQUIRE(trial.run() == "");
  for (int64_t c = 0; c < 1000; ++c) {
    REQUIRE(trial.output(0, c) == 0.0);
    REQUIRE(trial.output(1, c) == (c == 777 ? 1.0 : 0.0));
  }
}

// A large common part must not cost the small part of log(sum): -log(cols), whatever the logits.
TEST_CASE("log_softmax: large equal logits") {
  for (const double logit : {0.0, 1e4, -6e4, 65504.0, 1e30}) {
    Trial<LogSoftmax, float> trial(Shape{2, 1000});
    REQUIRE(trial.input([&](int64_t, int64_t) { return logit; }).run() == "");
    CHECK(trial.output(1, 999) == Approx(-std::log(1000.0)).epsilon(1e-6));
  }
}

TEST_CASE("softmax and log_softmax: double") {
  Tally t;
  for (const int64_t cols : {1, 7, 64, 255, 1000, 33000}) {
    Trial<Softmax, double> softmax(Shape{6, cols, cols % 3, cols % 2});
    expect_none(t, softmax.run());
    Trial<LogSoftmax, double> log_softmax(Shape{6, cols, cols % 3, cols % 2});
    expect_none(t, log_softmax.run());
  }
  CHECK_TALLY(t);
}
