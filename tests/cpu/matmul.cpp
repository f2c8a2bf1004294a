// Products on the CPU: what stands before and behind them, weights that are put together, special values, packing,
// errors.
#include "support/cpu_products.h"
#include <kernels/rope.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

using namespace test;

// ---- what stands behind the product ---------------------------------------------------------------------------------

namespace {

struct Clip : k::Functor {
  float most;
  template <int N>
  KERNELS_HD auto map(k::Pack<float, N> v, int64_t, int64_t) const { return k::max(k::min(v, most), -most); }
};

// A store in OneFlow's form, whose packs must be aligned.
struct OneFlowStore {
  float* p;
  int64_t ld;
  template <int N>
  void store(const float* from, int64_t row, int64_t col) {
    for (int i = 0; i < N; ++i) p[row * ld + col + i] = 2 * from[i];
  }
};

// Epilogues on a product whose results are sums(m, n).
template <class Run, class Sums>
void every_epilogue(Tally& t, const Case& c, const Run& run, const Sums& sums) {
  const int64_t n = c.n, ld = n + 2;
  const Matrix<float> bias(31, 1, n, n);
  const Matrix<k::half> residual(32, c.m, n, ld, 1);
  const Matrix<float> per_row(33, 1, c.m, c.m);
  std::vector<Real<>> all;
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t i = 0; i < n; ++i) all.push_back(sums(m, i));
  }
  const auto at = [&](int64_t m, int64_t i) { return all[size_t(m * n + i)]; };
  const auto biased = [&](int64_t m, int64_t i) { return at(m, i) + Real<>(bias.value(0, i)); };
  {
    Guarded<float> y(c.m, n, ld, 1);
    check_result(t, "bias, gelu", c, run(k::bias(bias.data()) | k::gelu() | k::store(y.data(), ld)), y,
                 [&](int64_t m, int64_t i) { return gelu(biased(m, i)); });
  }
  {
    Guarded<k::bfloat16> y(c.m, n, ld);
    check_result(t, "bias, silu, bfloat16", c, run(k::bias(bias.data()) | k::silu() | k::store(y.data(), ld)), y,
                 [&](int64_t m, int64_t i) { return silu(biased(m, i)); });
  }
  {
    Guarded<k::half> y(c.m, n, ld, 1);
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t i = 0; i < n; ++i) y.set(m, i, residual.get(m, i));
    }
    y.upload();
    check_result(t, "residual in place", c,
                 run(k::bias(bias.data()) | k::add(k::load(y.data(), ld)) | k::store(y.data(), ld)), y,
                 [&](int64_t m, int64_t i) { return biased(m, i) + Real<>(residual.value(m, i)); });
  }
  {
    Guarded<int8_t> y(c.m, n, ld, 1);
    check_result(t, "clip, int8", c, run(Clip{{}, 20.f} | k::scale(4) | k::store(y.data(), ld)), y,
                 [&](int64_t m, int64_t i) {
                   const Real<> x = at(m, i);
                   return Real<>(std::fmax(-20, std::fmin(20, x.v)), x.e) * Real<>(4);
                 });
  }
  {
    Guarded<float> y(c.m, n, ld), relu_too(c.m, n, n, 1);
    Guarded<k::half> before(c.m, n, n);
    const auto status = run(k::mul(k::per_row(per_row.data())) | k::tee(before.data(), n) |
                            k::both(k::store(y.data(), ld), k::relu() | k::store(relu_too.data(), n)));
    const auto scaled = [&](int64_t m, int64_t i) { return at(m, i) * Real<>(per_row.value(0, m)); };
    check_result(t, "tee", c, status, before, scaled);
    check_result(t, "behind a tee", c, status, y,
                 [&](int64_t m, int64_t i) { return rounded_to<k::half>(scaled(m, i)); });
    check_result(t, "both", c, status, relu_too,
                 [&](int64_t m, int64_t i) { return relu(rounded_to<k::half>(scaled(m, i))); });
  }
  {
    Guarded<float> y(c.m, n, n);
    check_result(t, "OneFlow's store", c, run(OneFlowStore{y.data(), n}), y,
                 [&](int64_t m, int64_t i) { return at(m, i) * Real<>(2); });
  }
  if (n >= 3) {
    const int64_t first = n / 3, second = n - first;
    Guarded<float> a(c.m, first, first + 1), b(c.m, second, second, 1);
    const auto status =
        run(k::bias(bias.data()) | k::apart(k::store(a.data(), first + 1), first, k::store(b.data(), second), second));
    check_result(t, "apart, first", c, status, a, biased);
    check_result(t, "apart, second", c, status, b, [&](int64_t m, int64_t i) { return biased(m, i + first); });
  }
}

}  // namespace

TEST_CASE("every epilogue") {
  Tally t;
  for (const Case c : {Case{1, 1, 40}, Case{1, 50, 333}, Case{2, 48, 64}, Case{5, 7, 100}, Case{6, 96, 70},
                       Case{33, 21, 65}, Case{70, 40, 33}}) {
    const Matrix<float> x(1, c.m, c.k, c.k, 0, 1);
    const Plain<k::half> w(c.n, c.k);
    every_epilogue(
        t, c,
        [&](const auto& out) {
          return k::cpu::matmul(on_threads(2), k::load(x.data(), c.k), w.source(), out, {c.m, c.n, c.k});
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, c.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w);
        });
  }
  CHECK_TALLY(t);
}

TEST_CASE("gated weights") {
  Tally t;
  for (const Case c : {Case{1, 1, 40}, Case{1, 50, 333}, Case{2, 48, 64}, Case{5, 7, 1100}, Case{33, 21, 65},
                       Case{1, 9000, 3}, Case{70, 40, 33}}) {
    const Matrix<float> x(1, c.m, c.k, c.k, 0, 0.3), bias(2, 1, c.n, c.n);
    const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
    const auto in = k::load(static_cast<const float*>(x.data()), c.k);
    const k::cpu::Exec cx = on_threads(3);
    const auto check = [&](const auto& gate, const auto& up) {
      const auto w = k::gated(gate.source(), up.source());
      Guarded<float> y(c.m, c.n, c.n + 1), y2(c.m, c.n, c.n);
      check_result(
          t, "swiglu", c, k::cpu::matmul(cx, in, w, k::swiglu() | k::store(y.data(), c.n + 1), {c.m, c.n, c.k}), y,
          [&](int64_t m, int64_t n) { return silu(product(m, n, c.k, value, gate)) * product(m, n, c.k, value, up); });
      check_result(t, "geglu, bias, relu", c,
                   k::cpu::matmul(cx, in, w, k::geglu() | k::bias(bias.data()) | k::relu() | k::store(y2.data(), c.n),
                                  {c.m, c.n, c.k}),
                   y2, [&](int64_t m, int64_t n) {
                     return relu(gelu(product(m, n, c.k, value, gate)) * product(m, n, c.k, value, up) +
                                 Real<>(bias.value(0, n)));
                   });
    };
    check(Plain<k::half>(c.n, c.k), Plain<k::half>(c.n, c.k, 7));
    check(FourBit<float, false>(c.n, c.k, 32), FourBit<float, false>(c.n, c.k, 64));
  }
  CHECK_TALLY(t);
}

TEST_CASE("stacked weights, apart") {
  Tally t;
  for (const int64_t m : {1, 3, 7, 40}) {
    for (const int64_t cols : {33, 100, 1024}) {
      const int64_t ns[] = {13, 32, 5}, n = 50;
      const Plain<k::half> a(ns[0], cols), b(ns[1], cols, 7, 0), c(ns[2], cols, 0, 1);
      const Matrix<float> x(1, m, cols, cols, 0, 1);
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      const auto w = k::stacked(a.source(), ns[0], b.source(), ns[1], c.source(), ns[2]);
      Guarded<float> q(m, ns[0], ns[0], 1), kk(m, ns[1], ns[1] + 1), v(m, ns[2], ns[2]);
      const Case shape{m, n, cols};
      const auto status = k::cpu::matmul(on_threads(2), k::load(x.data(), cols), w,
                                         k::apart(k::store(q.data(), q.ld()), ns[0], k::store(kk.data(), kk.ld()),
                                                  ns[1], k::store(v.data(), v.ld()), ns[2]),
                                         {m, n, cols});
      check_result(t, "first", shape, status, q, [&](int64_t r, int64_t i) { return product(r, i, cols, value, a); });
      check_result(t, "second", shape, status, kk, [&](int64_t r, int64_t i) { return product(r, i, cols, value, b); });
      check_result(t, "third", shape, status, v, [&](int64_t r, int64_t i) { return product(r, i, cols, value, c); });
    }
  }
  CHECK_TALLY(t);
}

// Threads take rows in multiples of 16, and rows are summed in groups: neither may show where matrices begin elsewhere.
TEST_CASE("a row of weights gives the same bits wherever it stands, on any number of threads") {
  Tally t;
  constexpr int64_t n = 64, first = 5;
  for (const int64_t m : {1, 2, 3, 9}) {
    for (const int64_t cols : {100, 1003}) {
      const Plain<k::half> w(n, cols);
      const Matrix<float> x(1, m, cols, cols, 0, 1);
      const auto rows_from = [&](int64_t row) { return k::load(std::as_const(w).data() + row * w.ld(), w.ld()); };
      const auto make = [&](int threads, const auto& weights, int64_t rows) {
        std::vector<float> y(size_t(m * rows));
        const k::Status status = k::cpu::matmul(on_threads(threads), k::load(x.data(), cols), weights,
                                                k::store(y.data(), rows), {m, rows, cols});
        t.expect(status.ok(), "%s", status.reason());
        return y;
      };
      const std::vector<float> whole = make(1, w.source(), n);
      const auto same = [&](float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; };
      for (const int threads : {1, 2, 3, 5}) {
        const auto y = make(threads, k::stacked(rows_from(0), first, rows_from(first), n - first), n);
        t.expect(std::equal(y.begin(), y.end(), whole.begin(), same), "M %d, K %d: %d threads give other bits", int(m),
                 int(cols), threads);
      }
      for (int64_t row = 0; row < n; ++row) {
        const auto y = make(1, rows_from(row), 1);
        for (int64_t i = 0; i < m; ++i)
          t.expect(same(y[size_t(i)], whole[size_t(i * n + row)]), "M %d, K %d: row %d alone has other bits", int(m),
                   int(cols), int(row));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("a mixture of experts, there and back") {
  Tally t;
  const int64_t tokens = 5, n = 24, cols = 72, number = 6;
  const int top_k = 2;
  const int32_t ids[] = {0, 3, 5, 0, 3, 3, 1, 5, 0, 1};  // nobody chooses 2 and 4
  const Matrix<float> shares(4, 1, tokens * top_k, tokens * top_k, 0, 1), x(1, tokens, cols, cols, 0, 1);
  const Plain<k::half> gate(number * n, cols), up(number * n, cols, 5, 0);
  const FourBit<float, false> back(number * 16, n, 8);
  const auto value = [&](int64_t r, int64_t c) { return Real<>(x.value(r / top_k, c)); };
  Guarded<float> h(tokens * top_k, n, n), y(tokens, 16, 17);
  const auto there =
      k::cpu::matmul(on_threads(2), k::repeated(k::load(x.data(), cols), top_k),
                     k::gated(k::experts(gate.source(), ids, n, number), k::experts(up.source(), ids, n, number)),
                     k::swiglu() | k::store(h.data(), n), {tokens * top_k, n, cols});
  check_result(t, "there", {tokens * top_k, n, cols}, there, h, [&](int64_t slot, int64_t i) {
    return silu(product(slot, ids[slot] * n + i, cols, value, gate)) *
           product(slot, ids[slot] * n + i, cols, value, up);
  });
  const auto status = k::cpu::matmul(on_threads(2), k::load(h.data(), top_k * n),
                                     k::mixed(back.source(), ids, shares.data(), top_k, 16, n, number),
                                     k::store(y.data(), 17), {tokens, 16, top_k * n});
  check_result(t, "back", {tokens, 16, top_k * n}, status, y, [&](int64_t m, int64_t i) {
    return product(
        m, i, top_k * n, [&](int64_t r, int64_t c) { return Real<>(h.get(r * top_k + c / n, c % n)); },
        [&](int64_t r, int64_t c) {
          const int64_t slot = m * top_k + c / n;
          return shares.value(0, slot) * back(ids[slot] * 16 + r, c % n);
        });
  });
  CHECK_TALLY(t);
}

// ---- what stands before it ------------------------------------------------------------------------------------------

TEST_CASE("inputs with maps before the product") {
  Tally t;
  for (const Case c : {Case{1, 20, 333}, Case{3, 20, 4200}, Case{6, 9, 100}, Case{33, 5, 70}}) {
    const Matrix<k::half> x(1, c.m, c.k, c.k + 1, 1, 1);
    const Matrix<float> bias(2, 1, c.k, c.k, 1);
    const Plain<float> w(c.n, c.k);
    Guarded<float> y(c.m, c.n, c.n);
    const auto in = k::load(static_cast<const k::half*>(x.data()), c.k + 1) | k::bias(bias.data()) | k::silu();
    check_result(t, "bias, silu before", c,
                 k::cpu::matmul(on_threads(2), in, w.source(), k::store(y.data(), c.n), {c.m, c.n, c.k}), y,
                 [&](int64_t m, int64_t n) {
                   return product(
                       m, n, c.k,
                       [&](int64_t r, int64_t i) { return silu(Real<>(x.value(r, i)) + Real<>(bias.value(0, i))); }, w);
                 });
  }
  CHECK_TALLY(t);
}

TEST_CASE("normalized inputs") {
  Tally t;
  for (const Case c : {Case{1, 20, 1}, Case{1, 20, 333}, Case{2, 7, 5000}, Case{1, 3, 70000}, Case{5, 9, 100},
                       Case{33, 5, 70}, Case{32, 5, 2500}}) {
    const Matrix<k::half> x(1, c.m, c.k, c.k + 1, 1, 1);
    const Matrix<float> gamma(2, 1, c.k, c.k), beta(3, 1, c.k, c.k);
    const Plain<float> w(c.n, c.k);
    std::vector<Row<>> rows[2];
    for (int64_t m = 0; m < c.m; ++m) {
      for (auto& which : rows) {
        Row<> row;
        for (int64_t i = 0; i < c.k; ++i) row.push_back(Real<>(x.value(m, i)));
        if (&which == &rows[0]) rmsnorm(row, 1e-6);
        else layernorm(row, 1e-5);
        for (int64_t i = 0; i < c.k; ++i) row[size_t(i)] = row[size_t(i)] * Real<>(gamma.value(0, i));
        if (&which == &rows[1])
          for (int64_t i = 0; i < c.k; ++i) row[size_t(i)] = row[size_t(i)] + Real<>(beta.value(0, i));
        which.push_back(row);
      }
    }
    const auto want = [&](int which) {
      return [&, which](int64_t m, int64_t n) {
        return product(
            m, n, c.k, [&](int64_t r, int64_t i) { return rows[which][size_t(r)][size_t(i)]; }, w);
      };
    };
    const k::cpu::Exec cx = on_threads(2);
    const auto in = k::load(static_cast<const k::half*>(x.data()), c.k + 1);
    Guarded<float> y(c.m, c.n, c.n), y2(c.m, c.n, c.n), rstd(c.m, 1, 1);
    check_result(t, "rmsnorm", c,
                 k::cpu::matmul(cx, k::normed(in, k::RmsNorm{}.eps(1e-6).rstd(rstd.data())) | k::mul(gamma.data()),
                                w.source(), k::store(y.data(), c.n), {c.m, c.n, c.k}),
                 y, want(0));
    check_result(t, "layernorm", c,
                 k::cpu::matmul(cx, k::normed(in, k::LayerNorm{}) | k::affine(gamma.data(), beta.data()), w.source(),
                                k::store(y2.data(), c.n), {c.m, c.n, c.k}),
                 y2, want(1));
    rstd.download();
    t.expect(rstd.intact(), "wrote outside rstd");
    for (int64_t m = 0; m < c.m; ++m) {
      double squares = 0;
      for (int64_t i = 0; i < c.k; ++i) squares += x.value(m, i) * x.value(m, i);
      const double expected = 1 / std::sqrt(squares / double(c.k) + 1e-6);
      t.expect(std::fabs(rstd.get(m, 0) - expected) <= 64 * unit<float> * expected, "rstd: got %g, want %g",
               double(rstd.get(m, 0)), expected);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("one row of inputs, or of weights, for all") {
  const int64_t cols = 99;
  const Matrix<float> x(1, 1, cols, cols), w(2, 8, cols, cols);
  Guarded<float> y(3, 8, 8), z(3, 8, 8);
  REQUIRE(k::cpu::matmul(on_threads(2), k::load(x.data(), 0), k::load(w.data(), cols), k::store(y.data(), 8),
                         {3, 8, cols}));
  REQUIRE(
      k::cpu::matmul(on_threads(2), k::load(x.data(), 0), k::load(w.data(), 0), k::store(z.data(), 8), {3, 8, cols}));
  y.download(), z.download();
  bool same = true;
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 8; ++c) same = same && y.get(r, c) == y.get(0, c) && z.get(r, c) == y.get(0, 0);
  }
  CHECK(same);
}

TEST_CASE("no columns: sums of zero") {
  const Matrix<float> bias(1, 1, 20, 20);
  float x = 0;
  for (const int64_t m : {1, 5, 40}) {
    Guarded<float> y(m, 20, 21);
    REQUIRE(k::cpu::matmul(on_threads(2), k::load(&x, 0), k::load(&x, 0), k::bias(bias.data()) | k::store(y.data(), 21),
                           {m, 20, 0}));
    y.download();
    CHECK(y.intact());
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < 20; ++c) REQUIRE(y.get(r, c) == bias.get(0, c));
    }
  }
}

TEST_CASE("NaN and infinities reach exactly the results that they are part of") {
  Tally t;
  const int64_t n = 21;
  for (const int64_t cols : {40, 1000}) {
    for (const int64_t m : {1, 3, 6, 40}) {
      for (const double bad : {kNaN, kInfinity, -kInfinity}) {
        for (const int64_t at : {int64_t(0), cols / 2, cols - 1}) {
          Plain<float> w(n, cols);
          Matrix<float> x(1, m, cols, cols, 0, 1);
          w.set(7, at, float(bad));
          x.set(m - 1, at, float(1.5));
          w.upload(), x.upload();
          const auto run = [&](const char* what) {
            Guarded<float> y(m, n, n);
            const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
            const k::Status status = k::cpu::matmul(k::cpu::Exec{1}, k::load(x.data(), cols), w.source(),
                                                    k::store(y.data(), n), {m, n, cols});
            check_result(t, what, {m, n, cols, 1}, status, y,
                         [&](int64_t r, int64_t i) { return product(r, i, cols, value, w); });
          };
          run("a weight");
          x.set(m - 1, at, float(bad));
          x.upload();
          run("a weight and an input");
        }
      }
    }
  }
  CHECK_TALLY(t);
}

// ---- packing --------------------------------------------------------------------------------------------------------

// A code is the nearest one to the weight over the scale, or what is at the end of the range: off by half a scale at
// most, and by one where the largest weight of the other sign is cut off.
TEST_CASE("int4, uint4 and gf4 weights come back as packed") {
  Tally t;
  for (const int64_t cols : {8, 64, 100, 257}) {
    for (const int group : {32, 64, 128}) {
      const int64_t rows = 5, words = (cols + 7) / 8, groups = (cols + group - 1) / group;
      Matrix<float> w(1, rows, cols, cols, 0, 1);
      for (int64_t i = 0; i < std::min<int64_t>(cols, group); ++i) w.set(4, i, 0.f);
      w.upload();
      std::vector<uint32_t> int4(size_t(rows * words)), uint4(int4), gf4(int4);
      std::vector<float> scales(size_t(rows * groups)), scales2(scales);
      std::vector<uint8_t> zeros(scales.size());
      REQUIRE(k::pack_int4(w.data(), cols, rows, cols, group, int4.data(), scales.data()).ok());
      REQUIRE(k::pack_uint4(w.data(), cols, rows, cols, group, uint4.data(), scales2.data(), zeros.data()).ok());
      REQUIRE(k::pack_gf4(w.data(), cols, rows, cols, gf4.data()).ok());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          double largest = 0, low = 0, high = 0, eight = 0;
          for (int64_t i = c / group * group; i < c / group * group + group && i < cols; ++i) {
            if (std::fabs(w.value(r, i)) > std::fabs(largest)) largest = w.value(r, i);
            low = std::fmin(low, w.value(r, i)), high = std::fmax(high, w.value(r, i));
          }
          for (int64_t i = c / 8 * 8; i < c / 8 * 8 + 8 && i < cols; ++i) {
            if (std::fabs(w.value(r, i)) > std::fabs(eight)) eight = w.value(r, i);
          }
          const size_t word = size_t(r * words + c / 8), g = size_t(r * groups + c / group);
          const double value = w.value(r, c), tolerance = 1e-5 * std::fabs(largest);
          const double back = (nibble_of(int4[word], c) - 8.0) * scales[g];
          t.expect(std::fabs(scales[g] + largest / 8) <= tolerance, "int4: scale %g for %g", double(scales[g]),
                   largest);
          const bool cut = value * largest < 0 && std::fabs(value) > 7.5 / 8 * std::fabs(largest);
          t.expect(std::fabs(back - value) <= (cut ? 1 : 0.5) * std::fabs(largest / 8) + tolerance,
                   "int4: %g came back as %g", value, back);
          const double back2 = (double(nibble_of(uint4[word], c)) - zeros[g]) * scales2[g];
          // The zero point is rounded too: at the ends of the range that adds half a scale.
          t.expect(std::fabs(scales2[g] - (high - low) / 15) <= tolerance, "uint4: scale %g", double(scales2[g]));
          t.expect(std::fabs(back2 - value) <= (high - low) / 15 + tolerance, "uint4: %g came back as %g", value,
                   back2);
          if (value == 0) t.expect(back == 0 && back2 == 0, "0 came back as %g and %g", back, back2);
          const double scale = decode_small(format(DType::e5m2), gf4[word] & 0xff);
          const double back3 = (double(gf4[word] >> (8 + 3 * (c % 8)) & 7) - 4) * scale / -4;
          t.expect(scale == round_to(DType::e5m2, eight), "gf4: scale %g for %g", scale, eight);
          // The scale is rounded to 3 bits: up to an eighth of it is cut off besides.
          t.expect(std::fabs(back3 - value) <= std::fabs(scale) * 0.251 + std::fabs(eight) * 0.126,
                   "gf4: %g came back as %g", value, back3);
        }
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("scales in powers of 2 of 8 bits") {
  using Power = k::float8_e8m0;
  for (int code = 0; code < 255; ++code) {
    const float value = k::convert<float>(Power{uint8_t(code)});
    INFO(code);
    CHECK(double(value) == std::ldexp(1., code - 127));
    CHECK(k::convert<Power>(value).bits == code);
    CHECK(k::convert<Power>(std::nextafter(value, 0.f)).bits == code);  // up
    CHECK(k::convert<Power>(value * 1.5f).bits == std::min(code + 1, 254));
  }
  CHECK(std::isnan(k::convert<float>(Power{255})));
  CHECK(k::convert<Power>(std::numeric_limits<float>::quiet_NaN()).bits == 255);
  CHECK(k::convert<Power>(std::numeric_limits<float>::infinity()).bits == 254);
  CHECK(k::convert<Power>(0.f).bits == 0);
}
TEST_CASE("fp4 weights come back as packed") {
  Tally t;
  using Fours = FourBitFloats<k::float8_e8m0>;
  for (const int64_t cols : {8, 64, 100, 257}) {
    const int64_t rows = 5, words = (cols + 7) / 8, groups = (cols + 31) / 32;
    Matrix<float> w(1, rows, cols, cols, 0, 1);
    for (int64_t i = 0; i < std::min<int64_t>(cols, 32); ++i) w.set(4, i, 0.f);
    w.upload();
    std::vector<uint32_t> by_power(size_t(rows * words)), by_float(by_power);
    std::vector<k::float8_e8m0> powers(size_t(rows * groups));
    std::vector<float> scales(powers.size());
    REQUIRE(k::pack_fp4(w.data(), cols, rows, cols, 32, by_power.data(), powers.data()).ok());
    REQUIRE(k::pack_fp4(w.data(), cols, rows, cols, 32, by_float.data(), scales.data()).ok());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        double largest = 0;
        for (int64_t i = c / 32 * 32; i < c / 32 * 32 + 32 && i < cols; ++i)
          largest = std::fmax(largest, std::fabs(w.value(r, i)));
        const size_t word = size_t(r * words + c / 8), g = size_t(r * groups + c / 32);
        const double power = std::ldexp(1., powers[g].bits - 127);
        // The least power of 2 under which the largest weight is not above 6.
        t.expect(largest == 0 || (largest <= 6 * power * (1 + 1e-6) && largest > 3 * power), "fp4: scale %g for %g",
                 power, largest);
        t.expect(std::fabs(scales[g] * 6 - largest) <= 1e-5 * largest, "fp4: scale %g for %g", double(scales[g]),
                 largest);
        const auto nearest = [&](uint32_t from, double scale) {
          const double value = w.value(r, c), back = Fours::value(nibble_of(from, c)) * scale;
          double least = std::fabs(value);
          for (int code = 0; code < 16; ++code) least = std::fmin(least, std::fabs(value - Fours::value(code) * scale));
          t.expect(std::fabs(back - value) <= least + 1e-6 * largest, "fp4: %g came back as %g", value, back);
        };
        nearest(by_power[word], power), nearest(by_float[word], scales[g]);
      }
    }
  }
  CHECK_TALLY(t);
  for (int code = 0; code < 16; ++code) {
    CHECK(double(k::Fp4::value(uint32_t(code))) == Fours::value(code));
    CHECK(k::Fp4::code(k::Fp4::value(uint32_t(code))) == uint32_t(code));
  }
  CHECK(k::Fp4::code(0.25f) == 0u);  // of two that are as near the even one
  CHECK(k::Fp4::code(0.75f) == 2u);
  CHECK(k::Fp4::code(-2.5f) == 12u);
  CHECK(k::Fp4::code(3.5f) == 6u);
  CHECK(k::Fp4::code(5.f) == 6u);
  CHECK(k::Fp4::code(std::numeric_limits<float>::infinity()) == 7u);
  CHECK((k::Fp4::code(std::numeric_limits<float>::quiet_NaN()) & 7u) == 0u);
  CHECK(k::word_of_codes(0x76543210u) == 0x75316420u);
}

// As if there were a 0 in its place, but for its own code.
TEST_CASE("a NaN among int4, uint4 and gf4 weights leaves the codes beside it as they are") {
  const auto packed = [](const std::vector<float>& w) {
    const int64_t cols = int64_t(w.size());
    std::vector<uint32_t> words(3);
    float scales[2] = {};
    uint8_t zero = 0;
    REQUIRE(k::pack_int4(w.data(), cols, 1, cols, 32, &words[0], &scales[0]).ok());
    REQUIRE(k::pack_uint4(w.data(), cols, 1, cols, 32, &words[1], &scales[1], &zero).ok());
    REQUIRE(k::pack_gf4(w.data(), cols, 1, cols, &words[2]).ok());
    return words;
  };
  for (int i = 0; i < 8; ++i) {
    std::vector<float> w = {1.f, -2.f, 3.f, 4.f, -5.f, 6.f, 7.f, -8.f};
    w[size_t(i)] = 0.f;
    const std::vector<uint32_t> expected = packed(w);
    w[size_t(i)] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<uint32_t> words = packed(w);
    INFO("NaN at " << i);
    CHECK(((words[0] ^ expected[0]) & ~(15u << k::int4_shift(i))) == 0u);
    CHECK(((words[1] ^ expected[1]) & ~(15u << k::int4_shift(i))) == 0u);
    CHECK(((words[2] ^ expected[2]) & ~(7u << (8 + 3 * i))) == 0u);
  }
}

// ---- errors ---------------------------------------------------------------------------------------------------------

TEST_CASE("what cannot be packed is refused, with its reason and nothing written") {
  const int64_t rows = 2, cols = 32;
  const std::vector<float> w(size_t(rows * cols), 1.f);
  std::vector<uint32_t> words(size_t(rows * cols / 8), 7u);
  std::vector<float> scales(size_t(rows * cols / 8), 7.f);
  std::vector<uint8_t> zeros(scales.size(), uint8_t(7));
  // Of all that have groups: the same reason behind their names.
  const auto said = [&](const float* from, int64_t ld, int64_t n, int64_t width, int group, uint32_t* to, float* by) {
    const k::Status int4 = k::pack_int4(from, ld, n, width, group, to, by);
    const std::string reason = int4.reason();
    const k::Status uint4 = k::pack_uint4(from, ld, n, width, group, to, by, zeros.data());
    CHECK((int4.ok() ? reason : reason.substr(reason.find(':'))) ==
          (int4.ok() ? "ok" : std::string(uint4.reason()).substr(std::string("pack_uint4").size())));
    const k::Status fp4 = k::pack_fp4(from, ld, n, width, group, to, by);
    CHECK((int4.ok() ? reason : reason.substr(reason.find(':'))) ==
          (int4.ok() ? "ok" : std::string(fp4.reason()).substr(std::string("pack_fp4").size())));
    return reason;
  };
  float* const none = nullptr;
  const auto misaligned = reinterpret_cast<uint32_t*>(reinterpret_cast<uintptr_t>(words.data()) + 1);
  for (const int group : {0, -8, 4, 12, 24, 40})
    CHECK(said(w.data(), cols, rows, cols, group, words.data(), scales.data()) ==
          "pack_int4: group is neither a power of two, 8 at least, nor all columns");
  CHECK(said(w.data(), cols, rows, 0, 0, words.data(), scales.data()) ==
        "pack_int4: group is neither a power of two, 8 at least, nor all columns");
  CHECK(said(w.data(), cols, -1, cols, 8, words.data(), scales.data()) == "pack_int4: rows is negative");
  CHECK(said(w.data(), cols, rows, -1, 8, words.data(), scales.data()) == "pack_int4: cols is negative");
  CHECK(said(w.data(), -1, rows, cols, 8, words.data(), scales.data()) == "pack_int4: ld is negative");
  CHECK(said(w.data(), int64_t(1) << 61, 4, cols, 8, words.data(), scales.data()) ==
        "pack_int4: rows x ld exceeds 64 bits");
  CHECK(said(none, cols, rows, cols, 8, words.data(), scales.data()) == "pack_int4: w: the pointer is null");
  CHECK(said(w.data(), cols, rows, cols, 8, nullptr, scales.data()) == "pack_int4: words: the pointer is null");
  CHECK(said(w.data(), cols, rows, cols, 8, misaligned, scales.data()) ==
        "pack_int4: words: the pointer is not aligned for its elements");
  CHECK(said(w.data(), cols, rows, cols, 8, words.data(), none) == "pack_int4: scales: the pointer is null");
  CHECK(std::string(k::pack_uint4(w.data(), cols, rows, cols, 8, words.data(), scales.data(), nullptr).reason()) ==
        "pack_uint4: zeros: the pointer is null");
  CHECK(std::string(k::pack_gf4(w.data(), cols, -1, cols, words.data()).reason()) == "pack_gf4: rows is negative");
  CHECK(std::string(k::pack_gf4(none, cols, rows, cols, words.data()).reason()) == "pack_gf4: w: the pointer is null");
  CHECK(said(none, cols, 0, cols, 8, nullptr, none) == "ok");
  CHECK(words == std::vector<uint32_t>(words.size(), 7u));
  CHECK(scales == std::vector<float>(scales.size(), 7.f));
  CHECK(zeros == std::vector<uint8_t>(zeros.size(), uint8_t(7)));
  // One scale for each row needs no power of two: row_scales().
  CHECK(said(w.data(), cols, rows, 24, 24, words.data(), scales.data()) == "ok");
  CHECK(said(w.data(), cols, rows, 20, 20, words.data(), scales.data()) == "ok");
  CHECK(said(w.data(), cols, rows, 20, 32, words.data(), scales.data()) == "ok");
}

TEST_CASE("wrong arguments are refused with their reason, and nothing is written") {
  const int64_t n = 8, cols = 64;
  const Matrix<float> x(1, 2, cols, cols), w(2, n, cols, cols);
  const Codes codes(n, cols, 0);
  const float* none = nullptr;
  const uint32_t* no_words = nullptr;
  float scale = 1;
  Guarded<float> y(2, n, n);
  const auto in = k::load(static_cast<const float*>(x.data()), cols);
  const auto weights = k::load(static_cast<const float*>(w.data()), cols);
  const auto four = k::int4(static_cast<const uint32_t*>(codes.data()), cols);
  const auto out = k::store(y.data(), n);
  // What a product asks of its arguments first, and that it does: of plain types, as products of all of these take long
  // to compile.
  const auto reason = [&](const auto& a, const auto& b, const auto& c, k::MatmulShape shape,
                          k::Code code = k::Code::invalid) {
    bool empty = false;
    const k::Status status = k::detail::check_matmul(a, b, c, shape, empty);
    CHECK(status.code() == code);
    const std::string words = status.reason();
    if constexpr (std::is_same<decltype(std::tie(a, b, c)), decltype(std::tie(in, weights, out))>::value)
      CHECK(k::cpu::matmul(on_threads(2), a, b, c, shape).reason() == words);
    return words;
  };
  CHECK(reason(in, weights, out, {-1, n, cols}) == "matmul: M is negative");
  CHECK(reason(in, weights, out, {2, -1, cols}) == "matmul: N is negative");
  CHECK(reason(in, weights, out, {2, n, -1}) == "matmul: K is negative");
  CHECK(reason(in, weights, out, {2, n, (int64_t(1) << 30) + 1}, k::Code::unsupported) == "matmul: K exceeds 2^30");
  CHECK(reason(in, weights, out, {2, int64_t(1) << 31, cols}, k::Code::unsupported) == "matmul: N exceeds 2^31 - 1");
  CHECK(reason(k::load(none, cols), weights, out, {2, n, cols}) == "matmul: x: load: the pointer is null");
  CHECK(reason(in, k::load(none, cols), out, {2, n, cols}) == "matmul: w: load: the pointer is null");
  CHECK(reason(in, weights, k::store(static_cast<float*>(nullptr), n), {2, n, cols}) ==
        "matmul: out: store: the pointer is null");
  CHECK(reason(in, weights, k::bias(none) | out, {2, n, cols}) == "matmul: out: bias: the pointer to a vector is null");
  CHECK(reason(k::load(x.data(), -1), weights, out, {2, n, cols}) == "matmul: x: load: the row stride is negative");
  CHECK(reason(in, k::load(w.data(), -1), out, {2, n, cols}) == "matmul: w: load: the row stride is negative");
  CHECK(reason(in, weights, k::store(y.data(), n - 1), {2, n, cols}) ==
        "matmul: out: store: the row stride is smaller than a row");
  CHECK(
      reason(in, k::gated(weights, weights), k::swiglu() | k::store(y.data(), n / 2), {2, n, cols}) ==
      "matmul: out: fewer columns than N, which counts the results of a gate: gated(w1, w3) has N rows in each matrix");
  CHECK(reason(in, k::gated(weights, weights), k::swiglu() | k::store(static_cast<float*>(nullptr), n), {2, n, cols}) ==
        "matmul: out: store: the pointer is null");
  CHECK(reason(in, k::load(w.data(), int64_t(1) << 61), out, {2, n, cols}) ==
        "matmul: w: load: rows x row stride exceeds 64 bits");
  CHECK(reason(in, k::dequant(weights, k::row_scales(none)), out, {2, n, cols}) ==
        "matmul: w: dequant: the pointer to scales is null");
  CHECK(reason(in, k::dequant(weights, k::group_scales(&scale, 1, 48)), out, {2, n, cols}) ==
        "matmul: w: dequant: the group or block size is not a power of two");
  CHECK(reason(in, k::dequant(weights, k::group_scales(&scale, -1, 64)), out, {2, n, cols}) ==
        "matmul: w: dequant: the row stride of the scales is negative");
  CHECK(reason(in, k::dequant(weights, k::group_scales(&scale, (cols - 1) / 8, 8)), out, {2, n, cols}) ==
        "matmul: w: dequant: the row stride of the scales is smaller than the number of groups in a row");
  CHECK(reason(in, k::dequant(four, k::group_scales(&scale, 0, 64).zeros(static_cast<const uint8_t*>(nullptr))), out,
               {2, n, cols}) == "matmul: w: dequant: the pointer to zeros is null");
  CHECK(reason(in, k::int4(no_words, cols), out, {2, n, cols}) == "matmul: w: 4-bit weights: the pointer is null");
  const std::string stride = "matmul: w: 4-bit weights: the row stride (counted in codes) is ";
  CHECK(reason(in, k::uint4(codes.data(), cols + 4), out, {2, n, cols}) == stride + "not a multiple of 8");
  CHECK(reason(in, k::gf4(codes.data(), cols - 8), out, {2, n, cols}) == stride + "smaller than a row");
  CHECK(reason(in, k::gated(weights, k::load(none, cols)), k::swiglu() | out, {2, n, cols}) ==
        "matmul: w: load: the pointer is null");
  CHECK(reason(in, k::stacked(weights, 3, weights, 4), out, {2, n, cols}) ==
        "matmul: w: stacked: the numbers of rows do not add up to N");
  CHECK(reason(in, k::stacked(k::plain(weights), 3, k::plain(weights), n - 3), out, {2, n, cols}) ==
        "matmul: w: stacked: a part of paired() or plain() begins at no multiple of 8 rows");
  CHECK(reason(in, k::stacked(weights, -1, weights, 9), out, {2, n, cols}) ==
        "matmul: w: stacked: a number of rows is negative");
  CHECK(reason(in, weights, k::apart(out, 3, out, 4), {2, n, cols}) ==
        "matmul: out: apart: the numbers of columns do not add up to N");
  CHECK(reason(in, weights, k::apart(out, -1, out, 9), {2, n, cols}) ==
        "matmul: out: apart: a number of columns is negative");
  CHECK(reason(k::normed(in, k::RmsNorm{}.eps(-1)), weights, out, {2, n, cols}) == "matmul: x: eps is negative or NaN");
  CHECK(reason(k::normed(k::load(none, cols), k::LayerNorm{}), weights, out, {2, n, cols}) ==
        "matmul: x: load: the pointer is null");
  CHECK(reason(in, k::normed(weights, k::RmsNorm{}), out, {2, n, cols}, k::Code::unsupported) ==
        "matmul: w: normed: only products take normalized inputs: normed(gathered(...)), not gathered(normed(...))");
  CHECK(!k::cpu::matmul(k::cpu::Exec{0}, in, weights, out, {2, n, cols}));
  // Results must not stand where inputs or weights do: every block of them reads these.
  CHECK(reason(in, weights, k::store(x.data(), cols), {2, n, cols}) ==
        "matmul: out overlaps x, which every block of results reads");
  CHECK(reason(k::normed(in, k::RmsNorm{}) | k::mul(x.data()), weights, k::gelu() | k::store(x.data() + 3, cols),
               {2, n, cols}) == "matmul: out overlaps x, which every block of results reads");
  CHECK(reason(in, weights, k::store(const_cast<float*>(w.data()) + cols + 1, n), {2, n, cols}) ==
        "matmul: out overlaps w");
  CHECK(reason(in, k::dequant(weights, k::row_scales(&scale)), k::store(const_cast<float*>(w.data()), n),
               {2, n, cols}) == "matmul: out overlaps w");
  CHECK(y.unchanged());
  // Nothing to do: nothing is read, whatever the pointers.
  CHECK(k::cpu::matmul(on_threads(2), k::load(none, cols), k::load(none, cols), out, {0, n, cols}));
  CHECK(k::cpu::matmul(on_threads(2), k::load(none, cols), k::load(none, cols), out, {2, 0, cols}));
  CHECK(y.unchanged());
  // Nothing to sum up: nothing is read, and the results are sums of nothing.
  const auto nothing = [&](const auto& a, const auto& b, int64_t m) {
    Guarded<float> zeros(m, n, n);
    CHECK(k::cpu::matmul(on_threads(2), a, b, k::shift(1) | k::store(zeros.data(), n), {m, n, 0}));
    zeros.download();
    CHECK(zeros.intact());
    for (int64_t i = 0; i < m * n; ++i) CHECK(zeros.get(i / n, i % n) == 1.f);
  };
  for (const int64_t m : {1, 2, 5, 40}) {
    nothing(k::load(none, 0), k::load(none, 0), m);
    nothing(k::load(none, 0) | k::mul(none), k::int4(no_words, 0), m);
    nothing(k::normed(k::load(none, 0), k::RmsNorm{}), k::load(static_cast<const k::half*>(nullptr), 0), m);
  }
}
