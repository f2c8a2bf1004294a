// What stands behind the operation, fused into it, in every residency. What stands before it: fused_before.cu.
#include "support/families.h"
#include "support/gpu.cuh"

using namespace test;

namespace {

constexpr int64_t kCols[] = {1, 48, 257, 1000, 5000, 20001};

// All maps without operands, chosen at run time: one instantiation.
struct AnyMap : k::Functor {
  enum Which { gelu, gelu_erf, silu, relu, scale, shift, to_half, to_bfloat16, to_e4m3, to_e5m2, count };
  Which which;
  k::GeluTanh gelu_tanh;
  k::GeluErf gelu_exact;
  k::Silu silu_map;
  k::Relu relu_map;
  k::Scale scale_map{-0.7};
  k::Shift shift_map{2.3};
  k::RoundTo<k::half> half_map;
  k::RoundTo<k::bfloat16> bfloat16_map;
  k::RoundTo<k::float8_e4m3> e4m3_map;
  k::RoundTo<k::float8_e5m2> e5m2_map;

  explicit AnyMap(Which w) : which(w) {}
  template <int N>
  __device__ __noinline__ k::Pack<float, N> map(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    switch (which) {
      case gelu:
        return gelu_tanh.map(v, row, col);
      case gelu_erf:
        return gelu_exact.map(v, row, col);
      case silu:
        return silu_map.map(v, row, col);
      case relu:
        return relu_map.map(v, row, col);
      case scale:
        return scale_map.map(v, row, col);
      case shift:
        return shift_map.map(v, row, col);
      case to_half:
        return half_map.map(v, row, col);
      case to_bfloat16:
        return bfloat16_map.map(v, row, col);
      case to_e4m3:
        return e4m3_map.map(v, row, col);
      default:
        return e5m2_map.map(v, row, col);
    }
  }
  static Real<float> expect(Which w, Real<float> x) {
    switch (w) {
      case gelu:
        return test::gelu(x);
      case gelu_erf:
        return test::gelu_erf(x);
      case silu:
        return test::silu(x);
      case relu:
        return test::relu(x);
      case scale:
        return x * constant(-0.7);
      case shift:
        return x + constant(2.3);
      case to_half:
        return rounded_to<k::half>(x);
      case to_bfloat16:
        return rounded_to<k::bfloat16>(x);
      case to_e4m3:
        return rounded_to<k::float8_e4m3>(x);
      default:
        return rounded_to<k::float8_e5m2>(x);
    }
  }
};

}  // namespace

TEST_CASE("fused: activations and roundings after layernorm") {
  Stream stream;
  const int64_t rows = 12;
  for (const int64_t cols : {3, 48, 1000, 5001}) {
    Device<float> x(rows, cols, cols);
    randomize(x, 7);
    for (int64_t r = 0; r < rows; r += 2) {
      for (int64_t c = 0; c < cols; ++c) x.set(r, c, -x.get(r, c));  // outliers of both signs
    }
    x.upload();
    for (int which = 0; which < AnyMap::count; ++which) {
      Device<float> y(rows, cols, cols);
      const AnyMap map(static_cast<AnyMap::Which>(which));
      REQUIRE(k::layernorm(stream, k::load(x.data(), x.ld()), map | k::store(y.data(), y.ld()), rows, cols));
      stream.wait();
      INFO("map " << which << ", " << cols << " columns");
      CHECK(compare(y, [&](int64_t r) {
              Row<float> row = row_of(x, r);
              layernorm(row, 1e-5);
              for (Real<float>& a : row) a = AnyMap::expect(map.which, a);
              return row;
            }) == "");
    }
  }
}

TEST_CASE("fused: a tee behind the operation") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<k::bfloat16> x(rows, cols, cols);
    Device<float> gamma(1, cols, cols), beta(1, cols, cols);
    randomize(x, 1);
    randomize(gamma, 2);
    randomize(beta, 3);
    const auto normed = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      layernorm(row, 1e-5);
      for (size_t c = 0; c < row.size(); ++c) {
        row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c))) + Real<float>(beta.get(0, int64_t(c)));
      }
      return row;
    });
    auto want = normed;
    for (Row<float>& row : want) {
      for (Real<float>& a : row) a = gelu(a);
    }
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<float> h(rows, cols, cols + 4), y(rows, cols, cols);
      REQUIRE(k::layernorm(ex, k::load(x.data(), x.ld()),
                           k::affine(k::row(gamma.data()), k::row(beta.data())) | k::tee(h.data(), h.ld()) | k::gelu() |
                               k::store(y.data(), y.ld()),
                           rows, cols, k::LayerNorm{}, policy));
      wait(ex);
      CHECK(compare(h, normed) == "");
      CHECK(compare(y, want) == "");
    });
  }
}

TEST_CASE("fused: both") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<k::half> x(rows, cols, cols);
    Device<float> gamma(1, cols, cols);
    randomize(x, 1);
    randomize(gamma, 2);
    const auto normed = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      rmsnorm(row, 1e-5);
      for (size_t c = 0; c < row.size(); ++c) row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c)));
      return row;
    });
    auto want = normed;
    for (Row<float>& row : want) {
      for (Real<float>& a : row) a = gelu_erf(a);
    }
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<k::half> plain(rows, cols, cols);
      Device<k::float8_e4m3> active(rows, cols, cols + 16);
      const auto out = k::affine(gamma.data()) | k::both(k::store(plain.data(), plain.ld()),
                                                         k::gelu_erf() | k::store(active.data(), active.ld()));
      REQUIRE(k::rmsnorm(ex, k::load(x.data(), x.ld()), out, rows, cols, k::RmsNorm{}, policy));
      wait(ex);
      CHECK(compare(plain, normed) == "");
      CHECK(compare(active, want) == "");
    });
  }
}

namespace {

// rmsnorm with what a model family puts behind it: out(weight, y) is the sink, finish(value, weight) the oracle.
template <class Out, class Finish>
void rms_family(Out out, Finish finish) {
  for (const int64_t cols : {1, 48, 257, 1000, 5000}) {
    const int64_t rows = 6;
    Device<k::half> x(rows, cols, cols), weight(1, cols, cols);
    randomize(x, 1);
    randomize(weight, 2);
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      rmsnorm(row, 1e-6);
      for (size_t c = 0; c < row.size(); ++c) row[c] = finish(row[c], Real<float>(value_of(weight.get(0, int64_t(c)))));
      return row;
    });
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<float> y(rows, cols, cols);
      REQUIRE(k::rmsnorm(ex, k::load(x.data(), x.ld()), out(weight, y), rows, cols, k::RmsNorm{}.eps(1e-6), policy));
      wait(ex);
      CHECK(compare(y, want) == "");
    });
  }
}

}  // namespace

TEST_CASE("fused: rmsnorm with a weight stored minus one") {
  rms_family([](auto& w, auto& y) { return k::affine(k::one_plus(w.data())) | k::store(y.data(), y.ld()); },
             [](Real<float> a, Real<float> w) { return a * (w + Real<float>(1.0)); });
}

TEST_CASE("fused: rmsnorm that casts before it multiplies") {
  rms_family([](auto& w, auto& y) { return k::round_to<k::half>() | k::affine(w.data()) | k::store(y.data(), y.ld()); },
             [](Real<float> a, Real<float> w) { return rounded_to<k::half>(a) * w; });
}

TEST_CASE("fused: rmsnorm rounds where a model family does, to the bit") {
  Tally t;
  const int64_t rows = 6;
  Stream stream;
  for (const int64_t cols : {1, 48, 257, 1000, 5000}) {
    Device<k::half> x(rows, cols, cols), weight(1, cols, cols), y(rows, cols, cols);
    Device<float> rstd(1, rows, rows);
    randomize(x, 1);
    randomize(weight, 2);
    each_family(weight.data(), [&](const char* name, const auto& maps, const auto& model) {
      const k::Status status = k::rmsnorm(stream, k::load(x.data(), x.ld()), maps | k::store(y.data(), y.ld()), rows,
                                          cols, k::RmsNorm{}.eps(1e-6).rstd(rstd.data()));
      t.expect(status.ok(), "%s: %s", name, status.reason());
      stream.wait();
      y.download();
      rstd.download();
      check_family(t, name, x, weight, y, rstd, model);
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("fused: bias and silu after rmsnorm") {
  rms_family([](auto& w, auto& y) { return k::bias(w.data()) | k::silu() | k::store(y.data(), y.ld()); },
             [](Real<float> a, Real<float> w) { return silu(a + w); });
}
