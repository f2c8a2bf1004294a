// Products with inputs that are normalized on the way in.
#include "support/gpu_products.cuh"
#include "support/rope.h"

using namespace test;

namespace {

// Rows and what RMSNorm and a gamma make of them.
template <class T>
struct Inputs {
  Matrix<T> x;
  Matrix<float> gamma;
  double eps;
  std::vector<Row<>> rows, rstd;

  Inputs(int64_t m, int64_t cols, int64_t gap = 0, int64_t shift = 0, double spread = 1, double e = 1e-6)
      : x(21, m, cols, cols + gap, shift, spread), gamma(22, 1, cols, cols, shift, 2), eps(e) {
    for (int64_t r = 0; r < m; ++r) {
      Row<> row;
      for (int64_t i = 0; i < cols; ++i) row.push_back(Real<>(x.value(r, i)));
      rstd.push_back({rmsnorm(row, eps)});
      for (int64_t i = 0; i < cols; ++i) row[size_t(i)] = row[size_t(i)] * Real<>(gamma.value(0, i));
      rows.push_back(row);
    }
  }
  auto source(float* inverse = nullptr) const {
    return k::normed(k::load(static_cast<const T*>(x.data()), x.ld()), k::RmsNorm{}.eps(eps).rstd(inverse)) |
           k::mul(static_cast<const float*>(gamma.data()));
  }
  Real<> operator()(int64_t r, int64_t i) const { return rows[size_t(r)][size_t(i)]; }
};

// How far tensor cores may round inputs of so many tokens.
double rounding(Path path, int64_t tokens, double to_16_bits = 0x1p-10) {
  return path == Path::gemv || tokens < 2 ? 0 : to_16_bits;
}

template <class T, class W>
void check_normed(const char* what, const Sizes& s, Path path, const Inputs<T>& in, const W& w, double rounded) {
  Device<float> y(s.m, s.n, s.n + 1), rstd(s.m, 1, 1);
  bool ran = false;
  expect(
      what, s, path, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        ran = true;
        return k::matmul(ex, in.source(rstd.data()), w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
      },
      [&](int64_t m, int64_t n) { return product(m, n, s.k, in, w, units(path, s.k), rounded); });
  INFO(describe(what, s, path));
  if (ran) CHECK(compare(rstd, [&](int64_t m) { return in.rstd[size_t(m)]; }) == "");
}

template <class T, class TW>
void shapes(const char* what, double rounded) {
  Shortened shortened;
  for (const int64_t cols : {1, 7, 40, 333, 1000, 4104, 9000}) {
    for (const int64_t n : {1, 5, 67}) {
      for (const bool aligned : {true, false}) {
        const int64_t gap = aligned ? (8 - cols % 8) % 8 : 3, shift = aligned ? 0 : 1;
        const Plain<TW, DeviceMemory> w(n, cols, gap, 0);
        for (const int64_t m : {1, 2, 3, 4, 6}) {
          if (shortened.leaves_out()) continue;
          const Inputs<T> in(m, cols, gap, shift);
          for (const Path path : {Path::automatic, Path::gemv})
            check_normed(what, {m, n, cols}, path, in, w, rounding(path, m, rounded));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("normed: every shape, with the rstd of each row") {
  shapes<float, k::half>("float, half", 0x1p-10);
  shapes<k::bfloat16, k::bfloat16>("bfloat16", 0x1p-8);
  shapes<k::half, float>("half, float", 0);
}

TEST_CASE("normed: weights of 8 and 4 bits") {
  for (const Sizes& s :
       {Sizes{1, 67, 512}, Sizes{2, 40, 1024}, Sizes{4, 40, 512}, Sizes{1, 21, 4128}, Sizes{3, 9, 96}}) {
    for (const bool aligned : {true, false}) {
      const Inputs<float> floats(s.m, s.k, 0, aligned ? 0 : 1);
      const Inputs<k::half> halves(s.m, s.k, 8, aligned ? 0 : 1);
      const double rounded = s.m < 2 ? 0x1p-18 : 0x1p-9;
      const auto both = [&](const char* what, const auto& w) {
        check_normed(what, s, Path::automatic, floats, w, rounded);
        check_normed(what, s, Path::automatic, halves, w, rounded);
        check_normed(what, s, Path::gemv, floats, w, 0);
      };
      both("int8", Scaled<int8_t, float, DeviceMemory>(s.n, s.k, Grain::row, 1, 0, 0));
      both("e4m3", Scaled<k::float8_e4m3, float, DeviceMemory>(s.n, s.k, Grain::row, 1, 0, 0));
      both("int4", FourBit<k::half, false, DeviceMemory>(s.n, s.k, 32, 0, 0));
    }
  }
}

// Inputs that half cannot hold, nor their products with gamma; squares that are as large or as small as floats can be.
TEST_CASE("normed: magnitudes") {
  const int64_t n = 19;
  for (const int64_t cols : {40, 4096}) {
    const Plain<k::half, DeviceMemory> w(n, cols, 0, 0);
    const Plain<float, DeviceMemory> w32(n, cols, 0, 0);
    const Scaled<int8_t, float, DeviceMemory> w8(n, cols, Grain::row, 1, 0, 0);
    for (const int64_t m : {1, 2, 4}) {
      for (const double spread : {0x1p-50, 0x1p-20, 0x1p20, 0x1p55}) {
        for (const double eps : {0., 1e-6}) {
          const Inputs<float> in(m, cols, 0, 0, spread, eps);
          check_normed("half", {m, n, cols}, Path::gemv, in, w, 0);
          check_normed("float", {m, n, cols}, Path::automatic, in, w32, 0);
          if (eps > 0 && spread < 1)
            continue;  // where eps is what counts, the normalized rows are beneath what halves hold
          check_normed("half", {m, n, cols}, Path::automatic, in, w, rounding(Path::automatic, m));
          check_normed("int8", {m, n, cols}, Path::automatic, in, w8, m < 2 ? 0x1p-18 : 0x1p-9);
        }
      }
      const Inputs<k::half> large(m, cols, 0, 0, 1.5e4);
      check_normed("large halves", {m, n, cols}, Path::automatic, large, w, rounding(Path::automatic, m));
    }
  }
}

TEST_CASE("normed: what stands behind a product") {
  for (const Sizes& s : {Sizes{1, 48, 333}, Sizes{1, 64, 2048}, Sizes{2, 48, 72}, Sizes{4, 20, 1032}}) {
    for (const Path path : {Path::automatic, Path::gemv}) {
      const double u = units(Path::gemm, s.k), rounded = rounding(path, s.m);
      const Inputs<float> in(s.m, s.k);
      const Plain<k::half, DeviceMemory> w(s.n, s.k, 0, 0), up(s.n, s.k, 8, 8);
      const Matrix<float> bias(23, 1, s.n, s.n);
      Device<float> y(s.m, s.n, s.n);
      randomize(y, 24);
      std::vector<Row<>> before;
      for (int64_t m = 0; m < s.m; ++m) before.push_back(row_of(y, m));
      expect(
          "bias, gelu, residual", s, path, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(
                ex, in.source(), w.source(),
                k::bias(bias.data()) | k::gelu() | k::add(k::load(y.data(), y.ld())) | k::store(y.data(), y.ld()),
                {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return gelu(product(m, n, s.k, in, w, u, rounded) + Real<>(bias.value(0, n))) +
                   before[size_t(m)][size_t(n)];
          });
      Device<float> h(s.m, s.n, s.n + 1), rstd(s.m, 1, 1);
      bool ran = false;
      expect(
          "swiglu", s, path, h,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            ran = true;
            return k::matmul(ex, in.source(rstd.data()), k::gated(w.source(), up.source()),
                             k::swiglu() | k::store(h.data(), h.ld()), {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return silu(product(m, n, s.k, in, w, u, rounded)) * product(m, n, s.k, in, up, u, rounded);
          });
      if (ran) CHECK(compare(rstd, [&](int64_t m) { return in.rstd[size_t(m)]; }) == "");
    }
  }
}

// Queries and keys turned, as examples/llm has it.
TEST_CASE("normed: stacked weights, turned results apart") {
  const int64_t nq = 128, nk = 64, n = nq + 2 * nk;
  for (const int64_t cols : {264, 2048}) {
    for (const int64_t m : {1, 3}) {
      const Turning turn(64, 64, false, int(m));
      const Numbers<float, DeviceMemory> frequencies(turn.frequencies);
      const Numbers<int32_t, DeviceMemory> positions(turn.positions);
      const k::Rope rope = turn.map(positions.data(), frequencies.data());
      const Inputs<float> in(m, cols);
      const Plain<k::bfloat16, DeviceMemory> a(nq, cols, 0, 0), b(nk, cols, 8, 0), c(nk, cols, 0, 8);
      Device<float> q(m, nq, nq), key(m, nk, nk + 8), v(m, nk, nk);
      for (const Path path : {Path::automatic, Path::gemv}) {
        const auto run = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(
              ex, in.source(),
              k::stacked(k::paired(a.source(), rope), nq, k::paired(b.source(), rope), nk, k::plain(c.source()), nk),
              k::qkv(rope | k::store(q.data(), q.ld()), nq, rope | k::store(key.data(), key.ld()), nk,
                     k::store(v.data(), v.ld()), nk),
              {m, n, cols}, policy);
        };
        const double u = units(Path::gemm, cols), rounded = rounding(path, m, 0x1p-7);
        expect("queries", {m, n, cols}, path, q, run, [&](int64_t r, int64_t i) {
          return turn([&](int64_t at) { return product(r, at, cols, in, a, u, rounded); }, r, i);
        });
        expect("keys", {m, n, cols}, path, key, run, [&](int64_t r, int64_t i) {
          return turn([&](int64_t at) { return product(r, at, cols, in, b, u, rounded); }, r, i);
        });
        expect("values", {m, n, cols}, path, v, run,
               [&](int64_t r, int64_t i) { return product(r, i, cols, in, c, u, rounded); });
      }
    }
  }
}

TEST_CASE("normed: the maps behind the norm") {
  const int64_t n = 21, cols = 1096;
  const Plain<k::half, DeviceMemory> w(n, cols, 0, 0);
  for (const int64_t m : {1, 3}) {
    const Inputs<float> in(m, cols);
    const Matrix<float> factors(25, 1, m, m);
    const float* const gamma = in.gamma.data();
    const auto base = k::normed(k::load(static_cast<const float*>(in.x.data()), cols) | k::scale(2),
                                k::RmsNorm{}.eps(4 * in.eps));  // as without both fours
    const auto g = [&](int64_t i) { return in.gamma.value(0, i); };
    const auto normal = [&](int64_t r, int64_t i) { return Real<>(in(r, i).v / g(i), in(r, i).e / std::fabs(g(i))); };
    const auto one = [&](const char* what, const auto& source, const auto& value, double rounded = 0) {
      Device<float> y(m, n, n);
      expect(
          what, {m, n, cols}, Path::gemv, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, source, w.source(), k::store(y.data(), n), {m, n, cols}, policy);
          },
          [&](int64_t r, int64_t c) { return product(r, c, cols, value, w, units(Path::gemv, cols), rounded); });
    };
    one("none", base, normal);
    one("mul, scale", base | k::mul(gamma) | k::scale(0.5),
        [&](int64_t r, int64_t i) { return in(r, i) * Real<>(0.5); });
    one("scale, affine", base | k::scale(-3) | k::affine(gamma),
        [&](int64_t r, int64_t i) { return in(r, i) * Real<>(-3); });
    one("one plus", base | k::affine(k::one_plus(gamma)),
        [&](int64_t r, int64_t i) { return normal(r, i) * (Real<>(1) + Real<>(g(i))); });
    one("of rows", base | k::mul(k::per_row(static_cast<const float*>(factors.data()))),
        [&](int64_t r, int64_t i) { return normal(r, i) * Real<>(factors.value(0, r)); });
    one("affine with beta", base | k::affine(gamma, gamma),
        [&](int64_t r, int64_t i) { return in(r, i) + Real<>(g(i)); });
    one("relu", base | k::mul(gamma) | k::relu(), [&](int64_t r, int64_t i) {
      const Real<> v = in(r, i);
      return Real<>(v.v > 0 ? v.v : 0, v.e);
    });
    one("rounded", base | k::round_to<k::half>() | k::mul(gamma), in, 0x1p-11);
  }
}

TEST_CASE("normed: NaN and infinity stay in their rows") {
  const int64_t n = 12, cols = 1096;
  const Plain<k::half, DeviceMemory> w(n, cols, 0, 0);
  for (const int64_t m : {1, 2, 4}) {
    for (const double special : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      for (const int64_t at : {int64_t(0), int64_t(517), cols - 1}) {
        Inputs<float> in(m, cols);
        in.x.set(m / 2, at, float(special));
        in.x.upload();
        for (const Path path : {Path::automatic, Path::gemv}) {
          Device<float> y(m, n, n);
          Stream stream;
          REQUIRE(k::matmul(stream, in.source(), w.source(), k::store(y.data(), n), {m, n, cols}, {path}));
          stream.wait();
          y.download();
          CHECK(y.intact());
          int wrong = 0;
          for (int64_t r = 0; r < m; ++r) {
            for (int64_t c = 0; c < n; ++c) wrong += (y.get(r, c) != y.get(r, c)) != (r == m / 2);
          }
          INFO(describe("special", {m, n, cols}, path) << " " << special << " at " << at);
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEST_CASE("normed: no columns, and rows of zeros") {
  const int64_t n = 9;
  Stream stream;
  for (const double eps : {0., 1e-6}) {
    Device<float> y(1, n, n), rstd(1, 1, 1), x(1, 64, 64);
    const float* const none = nullptr;
    REQUIRE(k::matmul(stream, k::normed(k::load(none, 0), k::RmsNorm{}.eps(eps)) | k::mul(none), k::load(none, 0),
                      k::shift(1) | k::store(y.data(), n), {1, n, 0}));
    stream.wait();
    y.download();
    CHECK(y.intact());
    for (int64_t i = 0; i < n; ++i) CHECK(y.get(0, i) == 1.f);
    if (eps == 0) continue;
    for (int64_t i = 0; i < 64; ++i) x.set(0, i, 0.f);
    x.upload();
    const Plain<k::half, DeviceMemory> w(n, 64, 0, 0);
    REQUIRE(k::matmul(
        stream, k::normed(k::load(static_cast<const float*>(x.data()), 64), k::RmsNorm{}.eps(eps).rstd(rstd.data())),
        w.source(), k::shift(1) | k::store(y.data(), n), {1, n, 64}));
    stream.wait();
    y.download(), rstd.download();
    for (int64_t i = 0; i < n; ++i) CHECK(y.get(0, i) == 1.f);
    CHECK(std::fabs(rstd.get(0, 0) - 1e3f) < 1e-3f);
  }
}

TEST_CASE("normed: experts") {
  const int64_t tokens = 3, n = 24, cols = 328, number = 4;
  const int top_k = 2;
  const std::vector<int32_t> chosen = {0, 3, 1, 0, 3, 2};
  const Numbers<int32_t, DeviceMemory> ids(chosen);
  const Inputs<k::half> in(tokens, cols);
  const Plain<k::half, DeviceMemory> w(number * n, cols, 0, 0);
  Device<float> h(tokens * top_k, n, n);
  const auto rows = k::normed(k::repeated(k::load(static_cast<const k::half*>(in.x.data()), in.x.ld()), top_k),
                              k::RmsNorm{}.eps(in.eps)) |
                    k::mul(static_cast<const float*>(in.gamma.data()));
  expect(
      "experts", {tokens * top_k, n, cols}, Path::automatic, h,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, rows, k::experts(w.source(), ids.data(), n, number), k::store(h.data(), n),
                         {tokens * top_k, n, cols}, policy);
      },
      [&](int64_t slot, int64_t i) {
        return product(
            slot, chosen[size_t(slot)] * n + i, cols, [&](int64_t r, int64_t c) { return in(r / top_k, c); }, w);
      });
}

// Each call normalizes what the one before it writes, in one kernel alone and in all.
TEST_CASE("normed: a chain of products that ask for their weights early, and one path that is compiled alone") {
  const int64_t n = 1024;
  const Inputs<float> in(1, n);
  const Plain<k::half, DeviceMemory> w(n, n, 0, 0, 0.04);
  const float* const gamma = in.gamma.data();
  Device<float> a(1, n, n), b(1, n, n);
  const auto chain = [&](const k::Exec& ex, bool ready, bool alone) {
    k::MatmulPolicy policy;
    policy.weights_ready = ready;
    const auto step = [&](const float* from, float* to) {
      const auto row = k::normed(k::load(from, n), k::RmsNorm{}) | k::mul(gamma);
      if (alone) CHECK(k::matmul<Path::gemv>(ex, row, w.source(), k::store(to, n), {1, n, n}, policy).ok());
      else CHECK(k::matmul(ex, row, w.source(), k::store(to, n), {1, n, n}, policy).ok());
    };
    step(in.x.data(), a.data());
    for (int i = 0; i < 10; ++i) step(a.data(), b.data()), step(b.data(), a.data());
  };
  Stream stream;
  chain(k::Exec(stream), false, false);
  stream.wait();
  a.download();
  const auto want = a.bytes();
  for (int i = 0; i < n; ++i) REQUIRE(std::isfinite(a.get(0, i)));
  for (int round = 0; round < 6; ++round) {
    check_cuda(cudaMemsetAsync(a.data(), 0xff, size_t(n) * 4, stream));
    run_in(stream, round % 2 == 1,
           [&] { chain(k::Exec(stream).programmatic(true).constant_weights(round > 2), true, round % 3 == 1); });
    a.download();
    CHECK(a.bytes() == want);
  }
  const k::Status other = k::matmul<Path::gemv>(k::Exec(stream), in.source(), w.source(), k::store(a.data(), n),
                                                {1, n, n}, k::MatmulPolicy{Path::gemm});
  CHECK(std::string(other.reason()) == "matmul: another path than the one that is compiled");
}
