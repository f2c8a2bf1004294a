// softmax and log_softmax: shapes, layouts and special values. Types: dtype_pairs_*.cu; policies: policy.cu.
#include "support/gpu.cuh"

using namespace test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class Op>
void every_cols() {
  Stream stream;
  Trials<Trial<Op, k::half>> trials;
  for (int64_t cols = 1; cols <= 1100; ++cols) trials.add(Shape{3, cols});
  trials.run(stream);
}

template <class Op, class T>
void large_cols() {
  Stream stream;
  Trials<Trial<Op, T>> trials;
  for (const int64_t cols : kLargeCols) {
    trials.add(Shape{2, cols});
    trials.add(Shape{2, cols, 1, 3, 1, 0});
  }
  trials.run(stream);
}

template <class Op>
void awkward() {
  Stream stream;
  Trials<Trial<Op, k::half>> trials;
  for (const Shape& shape : awkward_shapes()) trials.add(shape);
  trials.run(stream);
}

// Rows that end in NaN, in zeros or in one, in every residency. -300 and -6e4 stand where exp of the distance to 0
// would overflow or vanish.
double special(int64_t row, int64_t col, int64_t cols) {
  switch (row) {
    case 0:
      return -kInfinity;
    case 1:
      return col == cols / 2 ? kInfinity : 0.01 * double(col % 100);
    case 2:
      return col == cols - 1 ? kNaN : 0.01 * double(col % 100);
    case 3:
      return col % 2 ? -6e4 : 6e4;
    case 4:
      return 3.5;
    case 5:
      return col == 0 ? -6e4 : -kInfinity;
    case 6:
      return kNaN;
    case 7:
      return col <= cols / 8 ? -300 : -kInfinity;
    case 8:
      return col == cols - 1 ? 6e4 : -kInfinity;
    case 9:
      return kInfinity;
    case 10:
      return col % 3 == 0 ? kNaN : col % 3 == 1 ? kInfinity : -kInfinity;
    case 11:
      return 65504;
    case 12:
      return col >= cols - cols / 8 - 1 ? -100 : -kInfinity;
    case 13:
      return col == 0 ? kNaN : -kInfinity;
    default:
      return -0.25 * double(col % 64);
  }
}

template <class Op>
void special_values() {
  Stream stream;
  const int64_t rows = 15;
  Workspace workspace(rows);
  Trials<Trial<Op, k::half>> trials;
  for (const int64_t cols : {1, 5, 33, 256, 1000, 5001, 40000}) {
    for (const k::RowPolicy& policy : residencies(cols)) {
      trials.add(Shape{rows, cols}, policy).input([&](int64_t r, int64_t c) { return special(r, c, cols); });
    }
  }
  trials.run(workspace.exec(stream));
  CHECK(workspace.intact());
}

template <class Op>
void row_counts() {
  Stream stream;
  Trials<Trial<Op, k::half>> trials;
  for (const int64_t rows : {0, 1, 2, 31, 127, 128, 129, 4097}) {
    for (const int64_t cols : {1, 8, 40, 264, 1032}) trials.add(Shape{rows, cols});
  }
  trials.add(Shape{65537, 8});
  trials.add(Shape{65537, 3, 1, 2});
  trials.add(Shape{70001, 264});  // more blocks of one row than 65535
  trials.run(stream, /*step*/ 7);
}

}  // namespace

TEST_CASE("softmax: every number of columns up to 1100") { every_cols<Softmax>(); }
TEST_CASE("log_softmax: every number of columns up to 1100") { every_cols<LogSoftmax>(); }

TEST_CASE("softmax: many columns") { large_cols<Softmax, k::half>(); }
TEST_CASE("log_softmax: many columns") { large_cols<LogSoftmax, float>(); }

TEST_CASE("softmax: misaligned pointers and row strides") { awkward<Softmax>(); }
TEST_CASE("log_softmax: misaligned pointers and row strides") { awkward<LogSoftmax>(); }

TEST_CASE("softmax: special values") { special_values<Softmax>(); }
TEST_CASE("log_softmax: special values") { special_values<LogSoftmax>(); }

TEST_CASE("softmax: numbers of rows") { row_counts<Softmax>(); }
TEST_CASE("log_softmax: numbers of rows") { row_counts<LogSoftmax>(); }

TEST_CASE("log_softmax: pairs of types") { some_pairs_of_types<LogSoftmax>(); }

TEST_CASE("log_softmax: double") {
  Stream stream;
  Trials<Trial<LogSoftmax, double>> trials;
  for (const int64_t cols : {1, 7, 64, 255, 1000, 1024, 4100, 33000, 100003})
    trials.add(Shape{6, cols, cols % 3, cols % 2});
  trials.run(stream);
}

// A large common part must not cost the small part of log(sum): -log(cols) exactly, whatever the logits.
TEST_CASE("log_softmax: large equal logits") {
  Stream stream;
  for (const double logit : {0.0, 1e4, -6e4, 65504.0}) {
    Trial<LogSoftmax, float> trial(Shape{2, 1000});
    trial.input([&](int64_t, int64_t) { return logit; });
    REQUIRE(trial.launch(cudaStream_t(stream)));
    stream.wait();
    trial.fetch();
    CHECK(trial.output(1, 999) == Approx(-std::log(1000.0)).epsilon(1e-6));
  }
}

TEST_CASE("softmax: a row stride of 0 repeats one row") {
  Stream stream;
  const int64_t rows = 9, cols = 264;
  Device<k::half> x(1, cols, cols), y(rows, cols, cols);
  randomize(x, 1);
  REQUIRE(k::softmax(stream, k::load(x.data(), 0), k::store(y.data(), cols), rows, cols));
  stream.wait();
  CHECK(compare(y, [&](int64_t) {
          Row<float> row = row_of(x, 0);
          softmax(row);
          return row;
        }) == "");
}
