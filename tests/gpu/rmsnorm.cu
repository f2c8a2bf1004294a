// rmsnorm: shapes, layouts, types and special values. Policies: policy.cu; fused: fused_*.cu.
#include "support/gpu.cuh"

using namespace test;

TEST_CASE("rmsnorm: every number of columns up to 1100") {
  Stream stream;
  Trials<Trial<RmsNorm, k::half>> trials;
  for (int64_t cols = 1; cols <= 1100; ++cols) trials.add(Shape{3, cols});
  trials.run(stream);
}

TEST_CASE("rmsnorm: many columns") {
  Stream stream;
  Trials<Trial<RmsNorm, k::half>> trials;
  for (const int64_t cols : kLargeCols) {
    trials.add(Shape{2, cols});
    trials.add(Shape{2, cols, 1, 3, 1, 0});
  }
  trials.run(stream);
}

TEST_CASE("rmsnorm: misaligned pointers and row strides") {
  Stream stream;
  Trials<Trial<RmsNorm, float>> trials;
  for (const Shape& shape : awkward_shapes()) trials.add(shape);
  trials.run(stream);
}

TEST_CASE("rmsnorm: numbers of rows") {
  Stream stream;
  Trials<Trial<RmsNorm, k::half>> trials;
  for (const int64_t rows : {0, 1, 2, 31, 127, 128, 129, 4097}) {
    for (const int64_t cols : {1, 8, 40, 264, 1032}) trials.add(Shape{rows, cols});
  }
  trials.add(Shape{65537, 8});
  trials.add(Shape{70001, 264});
  trials.run(stream, /*step*/ 7);
}

TEST_CASE("rmsnorm: pairs of types") { some_pairs_of_types<RmsNorm>(); }

TEST_CASE("rmsnorm: int8") {
  Stream stream;
  Trials<Trial<RmsNorm, int8_t>> trials;
  for (const int64_t cols : {1, 7, 64, 1000, 4112}) {
    Random random{uint64_t(cols)};
    trials.add(Shape{6, cols}).input([&](int64_t, int64_t) { return 50 * random.normal(); });
  }
  trials.run(stream);
}

TEST_CASE("rmsnorm: double") {
  Stream stream;
  Trials<Trial<RmsNorm, double>> trials;
  for (const int64_t cols : {1, 7, 64, 255, 1000, 1024, 4100, 33000, 100003})
    trials.add(Shape{6, cols, cols % 3, cols % 2});
  trials.run(stream);
}

TEST_CASE("rmsnorm: eps, zeros and extreme magnitudes") {
  Stream stream;
  for (const double eps : {1e-12, 1e-3, 10.0}) {
    for (const double size : {0.0, 1e-20, 1e-6, 1e6, 1e15}) {
      Random random{42};
      Trials<Trial<RmsNorm, float>> trials;
      for (const int64_t cols : {7, 1000, 20000}) {
        trials.add(Shape{4, cols}, k::RowPolicy{}, RmsNorm{eps}).input([&](int64_t, int64_t) {
          return size * random.normal();
        });
      }
      trials.run(stream);
    }
  }
}

// An infinity makes rstd 0: the others become 0, and it NaN.
TEST_CASE("rmsnorm: NaN and infinity stay in their row") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  Stream stream;
  Workspace workspace(6);
  Trials<Trial<RmsNorm, k::half>> trials;
  for (const int64_t cols : {1, 5, 33, 256, 1000, 5001, 40000}) {
    for (const k::RowPolicy& policy : residencies(cols)) {
      trials.add(Shape{6, cols}, policy).input([&](int64_t r, int64_t c) {
        if (r == 1 && c == cols - 1) return std::numeric_limits<double>::quiet_NaN();
        if (r == 3 && c == cols / 2) return infinity;
        if (r == 4 && c == 0) return -infinity;
        return 0.25 * double((c * 7 + r) % 64) - 4.0;
      });
    }
  }
  trials.run(workspace.exec(stream));
  CHECK(workspace.intact());
}
