// What stands before the operation, fused into it, in every residency. What stands behind it: fused_after.cu.
#include "support/gpu.cuh"

using namespace test;

namespace {

constexpr int64_t kCols[] = {1, 48, 257, 1000, 5000, 20001};

}  // namespace

TEST_CASE("fused: scale, shift, add and mul before softmax") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6, off = cols == 1000 ? 1 : 0;  // once without wide packs
    Device<k::half> x(rows, cols, cols + 8, off, Poison::nan), other(rows, cols, cols + off, 0, Poison::nan);
    Device<float> bias(1, cols, cols, off), weight(1, cols, cols);
    Device<k::bfloat16> per_row(rows, 1, 1);
    randomize(x, 1, /*holes*/ true);
    randomize(other, 2);
    randomize(bias, 3);
    randomize(weight, 4);
    randomize(per_row, 5);
    const auto in = k::load(x.data(), x.ld()) | k::scale(0.3) | k::shift(-1.1) | k::add(k::row(bias.data())) |
                    k::add(k::per_row(per_row.data())) | k::add(k::load(other.data(), other.ld())) |
                    k::mul(weight.data());
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r), added = row_of(other, r);
      for (size_t c = 0; c < row.size(); ++c) {
        const Real<float> b = value_of(bias.get(0, int64_t(c))), w = value_of(weight.get(0, int64_t(c)));
        const Real<float> p = value_of(per_row.get(r, 0));
        row[c] = (row[c] * constant(0.3) + constant(-1.1) + b + p + added[c]) * w;
      }
      softmax(row);
      return row;
    });
    each_residency(rows, cols, Needs{4, off == 0}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<float> y(rows, cols, cols + 4);
      REQUIRE(k::softmax(ex, in, k::store(y.data(), y.ld()), rows, cols, policy));
      wait(ex);
      CHECK(compare(y, want) == "");
    });
    CHECK((x.unchanged() && other.unchanged() && bias.unchanged() && weight.unchanged() && per_row.unchanged()));
  }
}

TEST_CASE("fused: a mask of bool that the batch shares") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 10, period = 4;
    Device<k::half> x(rows, cols, cols, 0, Poison::nan);
    Device<bool> keep(period, cols, cols + (cols == 257 ? 1 : 0));
    randomize(x, 1);
    Random random{uint64_t(cols)};
    for (int64_t r = 0; r < period; ++r) {
      // Row 0 is masked throughout; row 1 but for its last column.
      for (int64_t c = 0; c < cols; ++c) keep.set(r, c, r == 0 ? false : r == 1 ? c == cols - 1 : random.below(2) == 1);
    }
    keep.upload();
    const auto in = k::load(x.data(), x.ld()) | k::mask(k::cycle(k::load(keep.data(), keep.ld()), period));
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      for (size_t c = 0; c < row.size(); ++c) {
        if (!keep.get(r % period, int64_t(c))) row[c] = -std::numeric_limits<double>::infinity();
      }
      softmax(row);
      return row;
    });
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<k::half> y(rows, cols, cols);
      REQUIRE(k::softmax(ex, in, k::store(y.data(), y.ld()), rows, cols, policy));
      wait(ex);
      CHECK(compare(y, want) == "");
      CHECK(value_of(y.get(0, cols / 2)) == 0);
      CHECK(value_of(y.get(1, cols - 1)) == 1);
    });
  }
}

// Rows are (batch x heads, q_len); the last query sees every key. With more queries than keys the first see none.
TEST_CASE("fused: causal") {
  for (const int64_t cols : {1, 48, 257, 1000, 5000}) {
    for (const int64_t q_len : {int64_t(1), int64_t(5), cols + 3}) {
      const int64_t rows = q_len > 5 ? 7 : 3 * q_len;
      Device<float> x(rows, cols, cols, 0, Poison::nan);
      randomize(x, 1);
      const auto in = k::load(x.data(), x.ld()) | k::causal(q_len, cols);
      const auto want = all_rows(rows, [&](int64_t r) {
        Row<float> row = row_of(x, r);
        for (int64_t c = 0; c < cols; ++c) {
          if (c > r % q_len + cols - q_len) row[size_t(c)] = -std::numeric_limits<double>::infinity();
        }
        log_softmax(row);
        return row;
      });
      each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
        Device<float> y(rows, cols, cols);
        REQUIRE(k::log_softmax(ex, in, k::store(y.data(), y.ld()), rows, cols, policy));
        wait(ex);
        CHECK(compare(y, want) == "");
      });
    }
  }
}

namespace {

// bias + residual + layernorm, the residual stream updated in place. X: the input's type, R: the residual's.
template <class X, class R>
void residual_layernorm() {
  for (const int64_t cols : kCols) {
    for (const int64_t shift : {0, 1}) {
      const int64_t rows = 6;
      Device<X> x(rows, cols, cols + 16 - 2 * shift, 0, Poison::nan);
      Device<R> res(rows, cols, cols + 3 * shift, shift);
      Device<float> bias(1, cols, cols, shift), gamma(1, cols, cols, shift);
      Device<k::half> beta(1, cols, cols, shift);
      randomize(x, 1);
      randomize(res, 2);
      randomize(bias, 3);
      randomize(gamma, 4);
      randomize(beta, 5);
      const auto sum = all_rows(rows, [&](int64_t r) {
        Row<float> h = row_of(x, r), added = row_of(res, r);
        for (size_t c = 0; c < h.size(); ++c) h[c] = h[c] + Real<float>(value_of(bias.get(0, int64_t(c)))) + added[c];
        return h;
      });
      // What goes on is what was stored, wherever the row waits.
      std::vector<Row<float>> want = sum;
      std::vector<RowStatistics<float>> statistics;
      for (Row<float>& row : want) {
        for (Real<float>& a : row) a = rounded_to<R>(a);
        statistics.push_back(layernorm(row, 1e-5));
        for (size_t c = 0; c < row.size(); ++c) {
          row[c] =
              row[c] * Real<float>(value_of(gamma.get(0, int64_t(c)))) + Real<float>(value_of(beta.get(0, int64_t(c))));
        }
      }
      const Device<R>& before = res;
      each_residency(rows, cols, Needs{4, shift == 0}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
        Device<R> stream(rows, cols, before.ld(), shift);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) stream.set(r, c, before.get(r, c));
        }
        stream.upload();
        Device<k::half> y(rows, cols, cols);
        Device<float> mean(rows, 1, 1), rstd(rows, 1, 1);
        const auto h = k::load(x.data(), x.ld()) | k::add(k::row(bias.data())) |
                       k::add(k::load(stream.data(), stream.ld())) | k::tee(stream.data(), stream.ld());
        const auto out = k::affine(gamma.data(), beta.data()) | k::store(y.data(), y.ld());
        const auto options = k::LayerNorm{}.mean(mean.data()).rstd(rstd.data());
        REQUIRE(k::layernorm(ex, h, out, rows, cols, options, policy));
        wait(ex);
        CHECK(compare(stream, sum) == "");
        CHECK(compare(y, want) == "");
        CHECK(compare(mean, [&](int64_t r) { return Row<float>{statistics[size_t(r)].mean}; }) == "");
        CHECK(compare(rstd, [&](int64_t r) { return Row<float>{statistics[size_t(r)].rstd}; }) == "");
      });
      CHECK((x.unchanged() && bias.unchanged() && gamma.unchanged() && beta.unchanged()));
    }
  }
}

}  // namespace

TEST_CASE("fused: bias, residual, tee in place and layernorm, all half") { residual_layernorm<k::half, k::half>(); }
TEST_CASE("fused: bias, residual, tee in place and layernorm, bfloat16 into a float residual") {
  residual_layernorm<k::bfloat16, float>();
}

// Where a row is read twice the tee runs in the first pass alone: in place a second time would double what is doubled.
TEST_CASE("fused: a tee in place inside of add and affine runs once") {
  for (const int64_t cols : {int64_t(48), int64_t(1000), int64_t(12288), int64_t(20001)}) {
    const int64_t rows = 6;
    Device<k::half> x(rows, cols, cols, 0, Poison::nan), before(rows, cols, cols);
    Device<float> beta(1, cols, cols);
    randomize(x, 1);
    randomize(before, 2);
    randomize(beta, 3);
    const auto doubled = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(before, r);
      for (Real<float>& a : row) a = a * constant(2);  // exact in half
      return row;
    });
    const auto combined = [&](const auto& op) {
      return all_rows(rows, [&](int64_t r) {
        Row<float> row = row_of(x, r);
        for (size_t c = 0; c < row.size(); ++c)
          row[c] = op(row[c], doubled[size_t(r)][c], Real<float>(beta.get(0, int64_t(c))));
        layernorm(row, 1e-5);
        return row;
      });
    };
    const auto sum = combined([](const auto& a, const auto& b, const auto&) { return a + b; });
    const auto both = combined([](const auto& a, const auto& b, const auto& c) { return a * b + c; });
    const auto in = k::load(x.data(), x.ld());
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      const auto run = [&](const auto& combine, const auto& want) {
        Device<k::half> res(rows, cols, cols);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) res.set(r, c, before.get(r, c));
        }
        res.upload();
        Device<k::half> y(rows, cols, cols);
        const auto twice = k::load(res.data(), cols) | k::scale(2) | k::tee(res.data(), cols);
        REQUIRE(k::layernorm(ex, in | combine(twice), k::store(y.data(), cols), rows, cols, k::LayerNorm{}, policy));
        wait(ex);
        CHECK(compare(res, doubled) == "");
        CHECK(compare(y, want) == "");
      };
      run([](const auto& twice) { return k::add(twice); }, sum);
      run([&](const auto& twice) { return k::affine(twice, beta.data()); }, both);
    });
  }
}

// A quantizing sink applies its maps twice, and what they do to memory once.
TEST_CASE("fused: a tee in place inside of a quantizing sink's add runs once") {
  for (const int64_t cols : {int64_t(48), int64_t(1000), int64_t(12288), int64_t(20001)}) {
    const int64_t rows = 6;
    Device<float> x(rows, cols, cols), before(rows, cols, cols);
    randomize(x, 1);
    randomize(before, 2);
    const auto doubled = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(before, r);
      for (Real<float>& a : row) a = a * constant(2);
      return row;
    });
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      if (policy.residency == k::Residency::split) return;  // refused with a scale for each row
      Device<float> res(rows, cols, cols);
      randomize(res, 2);
      Device<int8_t> codes(rows, cols, cols);
      Device<float> scales(rows, 1, 1);
      const auto twice = k::load(res.data(), cols) | k::scale(2) | k::tee(res.data(), cols);
      REQUIRE(k::layernorm(ex, k::load(x.data(), cols), k::add(twice) | k::quantize(codes.data(), cols, scales.data()),
                           rows, cols, k::LayerNorm{}, policy));
      wait(ex);
      CHECK(compare(res, doubled) == "");
    });
  }
}
