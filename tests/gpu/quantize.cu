// Rows quantized with a scale each, behind the operation, in every residency but split, which refuses.
#include "support/gpu.cuh"

using namespace test;

namespace {

constexpr int64_t kCols[] = {1, 48, 257, 1000, 5000, 20001};

// The wanted codes and scales of rows of values.
template <class T>
struct Quantized {
  std::vector<Row<float>> codes;
  std::vector<Real<float>> scales;
  explicit Quantized(const std::vector<Row<float>>& values) : codes(values) {
    for (Row<float>& row : codes) scales.push_back(quantize<T>(row));
  }
  std::string check(Device<T>& q, Device<float>& scale) const {
    const std::string problem = compare(scale, [&](int64_t r) { return Row<float>{scales[size_t(r)]}; });
    return problem.empty() ? compare(q, codes) : "scale: " + problem;
  }
};

template <class F>
void each_quantizing_residency(int64_t rows, int64_t cols, F f, bool wide = true) {
  each_residency(rows, cols, Needs{4, wide}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
    if (policy.residency != k::Residency::split) f(ex, policy);
  });
}

}  // namespace

TEST_CASE("quantize: rmsnorm to int8, with rows of zeros and of NaN") {
  for (const double size : {1.0, 1e-39, 1e30}) {
    for (const int64_t cols : kCols) {
      const int64_t rows = 7;
      Device<k::half> x(rows, cols, cols, 0, Poison::nan);
      Device<float> gamma(1, cols, cols);
      randomize(x, 1);
      randomize(gamma, 2);
      for (int64_t c = 0; c < cols; ++c) {
        gamma.set(0, c, float(size * gamma.get(0, c)));
        x.set(5, c, make<k::half>(0));
        if (c == cols / 2) x.set(6, c, make<k::half>(std::nan("")));
      }
      x.upload();
      gamma.upload();
      const Quantized<int8_t> want(all_rows(rows, [&](int64_t r) {
        Row<float> row = row_of(x, r);
        rmsnorm(row, 1e-5);
        for (size_t c = 0; c < row.size(); ++c) row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c)));
        return row;
      }));
      each_quantizing_residency(rows, cols, [&](const k::Exec& ex, const k::RowPolicy& policy) {
        INFO("gamma of size " << size);
        Device<int8_t> q(rows, cols, cols + 16);
        Device<float> scales(rows, 1, 1);
        REQUIRE(k::rmsnorm(ex, k::load(x.data(), x.ld()),
                           k::affine(gamma.data()) | k::quantize(q.data(), q.ld(), scales.data()), rows, cols,
                           k::RmsNorm{}, policy));
        wait(ex);
        CHECK(want.check(q, scales) == "");
      });
    }
  }
}

TEST_CASE("quantize: residual in place and layernorm to e4m3") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<k::bfloat16> x(rows, cols, cols, 0, Poison::nan);
    Device<float> res(rows, cols, cols + 4), gamma(1, cols, cols), beta(1, cols, cols);
    randomize(x, 1);
    randomize(res, 2);
    randomize(gamma, 3);
    randomize(beta, 4);
    const auto sum = all_rows(rows, [&](int64_t r) {
      Row<float> h = row_of(x, r), added = row_of(res, r);
      for (size_t c = 0; c < h.size(); ++c) h[c] = h[c] + added[c];
      return h;
    });
    auto normed = sum;
    for (Row<float>& row : normed) {
      layernorm(row, 1e-5);
      for (size_t c = 0; c < row.size(); ++c) {
        row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c))) + Real<float>(beta.get(0, int64_t(c)));
      }
    }
    const Quantized<k::float8_e4m3> want(normed);
    each_quantizing_residency(rows, cols, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      randomize(res, 2);
      Device<k::float8_e4m3> q(rows, cols, cols);
      Device<float> scales(rows, 1, 1);
      const auto h = k::load(x.data(), x.ld()) | k::add(k::load(res.data(), res.ld())) | k::tee(res.data(), res.ld());
      REQUIRE(k::layernorm(ex, h, k::affine(gamma.data(), beta.data()) | k::quantize(q.data(), q.ld(), scales.data()),
                           rows, cols, k::LayerNorm{}, policy));
      wait(ex);
      CHECK(compare(res, sum) == "");
      CHECK(want.check(q, scales) == "");
    });
  }
}

// The plain copy is written once, also where the row is read twice.
TEST_CASE("quantize: rmsnorm to e5m2, with a plain copy in front") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6, off = cols == 1000 ? 1 : 0;
    Device<float> x(rows, cols, cols, 0, Poison::nan);
    randomize(x, 1);
    const auto normed = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      rmsnorm(row, 1e-5);
      return row;
    });
    auto stored = normed;  // what the copy holds is what is quantized
    for (Row<float>& row : stored) {
      for (Real<float>& a : row) a = rounded_to<k::half>(a);
    }
    const Quantized<k::float8_e5m2> want(stored);
    each_quantizing_residency(
        rows, cols,
        [&](const k::Exec& ex, const k::RowPolicy& policy) {
          Device<k::half> copy(rows, cols, cols + off);
          Device<k::float8_e5m2> q(rows, cols, cols + 5 * off, off);
          Device<float> scales(rows, 1, 1);
          REQUIRE(k::rmsnorm(ex, k::load(x.data(), x.ld()),
                             k::tee(copy.data(), copy.ld()) | k::quantize(q.data(), q.ld(), scales.data()), rows, cols,
                             k::RmsNorm{}, policy));
          wait(ex);
          CHECK(compare(copy, normed) == "");
          CHECK(want.check(q, scales) == "");
        },
        off == 0);
  }
}

TEST_CASE("quantize: a split row is refused") {
  Stream stream;
  const int64_t rows = 2, cols = 4096;
  Workspace workspace(rows);
  Device<float> x(rows, cols, cols), scales(rows, 1, 1);
  Device<k::half> copy(rows, cols, cols);
  Device<k::float8_e5m2> q(rows, cols, cols);
  const k::Status status = k::rmsnorm(workspace.exec(stream), k::load(x.data(), cols),
                                      k::tee(copy.data(), cols) | k::quantize(q.data(), cols, scales.data()), rows,
                                      cols, k::RmsNorm{}, policy(k::Residency::split));
  CHECK(status.code() == k::Code::unsupported);
  stream.wait();
  CHECK((q.unchanged() && copy.unchanged() && scales.unchanged()));
}
