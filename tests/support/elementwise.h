// What the tests of copy() on the CPU and on the GPU share: the cases, and what they should give. A Door says how a
// call is made:
//
//   copy(in, out, rows, cols), copy(in, out, n) and rmsnorm(in, out, rows, cols) return a Status when the call is done.
#pragma once

#include <kernels/dropout.h>
#include <kernels/embed.h>
#include <kernels/quantize.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "guarded.h"
#include "oracle.h"
#include "random_matrix.h"
#include "tally.h"
#include "ulp.h"

namespace test {

namespace k = kernels;

// ---- activations: one type for all, so that each call is compiled once ---------------------------------------------

enum class Curve { gelu, gelu_erf, silu, relu, relu2, sigmoid, tanh, exp };
constexpr Curve kCurves[] = {Curve::gelu,  Curve::gelu_erf, Curve::silu, Curve::relu,
                             Curve::relu2, Curve::sigmoid,  Curve::tanh, Curve::exp};
inline const char* name(Curve curve) {
  static const char* const names[] = {"gelu", "gelu_erf", "silu", "relu", "relu2", "sigmoid", "tanh", "exp"};
  return names[int(curve)];
}

struct AnyActivation : k::Elementwise<AnyActivation> {
  Curve curve;
  AnyActivation(Curve which = Curve::gelu) : curve(which) {}
  template <class C>
  KERNELS_HD C operator()(C x) const {
    switch (curve) {
      case Curve::gelu: return k::GeluTanh()(x);
      case Curve::gelu_erf: return k::GeluErf()(x);
      case Curve::silu: return k::Silu()(x);
      case Curve::relu: return k::Relu()(x);
      case Curve::relu2: return k::Relu2()(x);
      case Curve::sigmoid: return k::Sigmoid()(x);
      case Curve::tanh: return k::Tanh()(x);
      default: return k::Exp()(x);
    }
  }
};

inline double twice_u(double x) { return 1.5957691216057308 * (x + 0.044715 * x * x * x); }

// Exactly, with the limits at both ends.
inline double exact(Curve curve, double x) {
  switch (curve) {
    case Curve::gelu: return std::isinf(x) && x < 0 ? -0.0 : x / (1 + std::exp(-twice_u(x)));
    case Curve::gelu_erf: return std::isinf(x) && x < 0 ? -0.0 : 0.5 * x * std::erfc(-x * 0.70710678118654752);
    case Curve::silu: return std::isinf(x) && x < 0 ? -0.0 : x / (1 + std::exp(-x));
    case Curve::relu: return x < 0 ? 0 : x;
    case Curve::relu2: return x < 0 ? 0 : x * x;
    case Curve::sigmoid: return 1 / (1 + std::exp(-x));
    case Curve::tanh: return std::tanh(x);
    default: return std::exp(x);
  }
}
// Units of the last place that docs/elementwise.md promises for floats.
inline double units(Curve curve, double x) {
  switch (curve) {
    case Curve::gelu: return x < 0 ? 6 + 4 * std::fabs(twice_u(x)) : 5;
    case Curve::gelu_erf: return x < 0 ? 8 + 1.5 * x * x : 8;
    case Curve::silu: return 6;
    case Curve::sigmoid: return 5;
    case Curve::tanh: return 4;
    case Curve::exp: return 2;
    default: return 0.5;
  }
}
inline bool is_right(Curve curve, float got, float x) {
  const double want = exact(curve, x);
  if (ulp_error(got, want) <= units(curve, x)) return true;
  // Factors below 2^-126 may be 0.
  return std::fabs(want) <= 0x1p-125 * std::fmax(1, std::fabs(double(x))) && std::fabs(got - want) <= std::fabs(want);
}
inline Real<> applied(Curve curve, double x) {
  const double y = exact(curve, x);
  return {y, units(curve, x) * 2 * unit<float> * std::fabs(y) + 0x1p-125 * std::fmax(1, std::fabs(x))};
}

// Floats of all sizes, and those that need care.
inline std::vector<float> all_floats(uint32_t step) {
  std::vector<float> all = {0.f,
                            -0.f,
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::nanf(""),
                            0x1p-149f,
                            -0x1p-149f,
                            0x1p-126f,
                            3.4028235e38f,
                            -3.4028235e38f,
                            0.3f,
                            -0.3f,
                            88.72f,
                            -87.34f,
                            1e19f,
                            -1e19f};
  for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += step) all.push_back(k::bit_cast<float>(uint32_t(bits)));
  for (int i = -3000; i <= 3000; ++i) all.push_back(float(i) * 0.005f);
  return all;
}

template <class Memory, class Door>
void check_activations(Tally& t, const Door& door) {
  const std::vector<float> values = all_floats(is_shortened() ? 400001 : 40001);
  const int64_t n = int64_t(values.size());
  const Numbers<float, Memory> x(values);
  for (const Curve curve : kCurves) {
    Guarded<float, Memory> y(1, n, n);
    const k::Status status =
        door.copy(k::load(static_cast<const float*>(x.data())) | AnyActivation(curve), k::store(y.data()), n);
    t.expect(status.ok(), "%s", status.reason());
    y.download();
    t.expect(y.intact(), "wrote outside");
    for (int64_t i = 0; i < n; ++i) {
      const float got = y.get(0, i), from = values[size_t(i)];
      t.expect(is_right(curve, got, from), "%s(%.9g): got %.9g, want %.17g", name(curve), from, got,
               exact(curve, from));
    }
  }
}

// ---- shapes ---------------------------------------------------------------------------------------------------------

// Whether two values are the same bits, or both NaN.
template <class T>
bool same(T a, T b) {
  const double x = value_of(a), y = value_of(b);
  return x != x ? y != y : std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(T)) == 0;
}

// Flat tensors of any size and alignment, and in place.
template <class Memory, class Door>
void check_flat(Tally& t, const Door& door) {
  for (const int64_t n : {0, 1, 2, 7, 8, 9, 63, 64, 2047, 2048, 2049, 100003}) {
    for (const int64_t shift : {0, 1, 2}) {
      const RandomMatrix<k::half, Memory> x(1, 1, n, n, shift);
      Guarded<k::half, Memory> y(1, n, n, shift == 2 ? 4 : shift), own(1, n, n, shift);
      for (int64_t i = 0; i < n; ++i) own.set(0, i, x.get(0, i));
      own.upload();
      const auto run = [&](const k::half* from, Guarded<k::half, Memory>& to) {
        const k::Status status = door.copy(k::load(from) | k::scale(0.5), k::store(to.data()), n);
        t.expect(status.ok(), "n %d: %s", int(n), status.reason());
        to.download();
        t.expect(to.intact(), "n %d, shift %d: wrote outside", int(n), int(shift));
        for (int64_t i = 0; i < n; ++i)
          t.expect(same(to.get(0, i), make<k::half>(0.5 * x.value(0, i))), "n %d, shift %d: element %d", int(n),
                   int(shift), int(i));
      };
      run(x.data(), y);
      run(own.data(), own);
    }
  }
}

// Rows at any distance, those that repeat, a vector, and a number for each row.
template <class Memory, class Door>
void check_rows(Tally& t, const Door& door) {
  for (const int64_t cols : {1, 2, 6, 8, 50, 64, 257, 4100}) {
    for (const int64_t rows : {1, 3, 70}) {
      for (const int64_t gap : {0, 1, 8}) {
        const RandomMatrix<k::half, Memory> x(1, rows, cols, cols + gap, gap == 1), again(2, 1, cols, cols),
            table(3, 3, cols, cols);
        const RandomMatrix<float, Memory> factors(4, rows, 1, 1);
        Guarded<k::half, Memory> y(rows, cols, cols + 2 * gap, gap == 1);
        const k::Status status =
            door.copy(k::load(static_cast<const k::half*>(x.data()), x.ld()) |
                          k::add(k::load(static_cast<const k::half*>(again.data()), 0)) |
                          k::add(k::cycle(k::load(static_cast<const k::half*>(table.data()), cols), 3)) |
                          k::mul(k::per_row(static_cast<const float*>(factors.data()))),
                      k::store(y.data(), y.ld()), rows, cols);
        t.expect(status.ok(), "%s", status.reason());
        y.download();
        t.expect(y.intact(), "%d x %d: wrote outside", int(rows), int(cols));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            const float sum = float(x.value(r, c)) + float(again.value(0, c)), all = sum + float(table.value(r % 3, c));
            t.expect(same(y.get(r, c), make<k::half>(double(all * factors.get(r, 0)))),
                     "%d x %d, gap %d: row %d, column %d", int(rows), int(cols), int(gap), int(r), int(c));
          }
        }
      }
    }
  }
}

// ---- gates ----------------------------------------------------------------------------------------------------------

template <class T, class Memory, class Want>
void expect_matrix(Tally& t, const char* what, const k::Status& status, Guarded<T, Memory>& got, Want want) {
  t.expect(status.ok(), "%s: %s", what, status.reason());
  got.download();
  t.expect(got.intact(), "%s: wrote outside", what);
  for (int64_t r = 0; r < got.rows(); ++r) {
    Row<> row;
    for (int64_t c = 0; c < got.cols(); ++c) row.push_back(want(r, c));
    const std::string problem = mismatch(r, row, [&](int64_t c) { return got.get(r, c); });
    t.expect(problem.empty(), "%s, %d columns: %s", what, int(got.cols()), problem.c_str());
  }
}

template <class Memory, class Door>
void check_gates(Tally& t, const Door& door) {
  const int64_t rows = 5;
  for (const int64_t n : {1, 33, 48, 1024}) {
    const RandomMatrix<k::half, Memory> x(1, rows, 2 * n, 2 * n + 8);
    const k::half* const p = x.data();
    const auto both = k::load(p, x.ld());
    for (const Curve curve : {Curve::silu, Curve::gelu, Curve::gelu_erf, Curve::relu, Curve::relu2, Curve::sigmoid}) {
      Guarded<k::half, Memory> y(rows, n, n);
      const auto want = [&](int64_t gate, int64_t up) {
        return
            [=, &x](int64_t r, int64_t c) { return applied(curve, x.value(r, gate + c)) * Real<>(x.value(r, up + c)); };
      };
      const auto glu = k::glu(AnyActivation(curve));
      const auto out = k::store(y.data(), n);
      expect_matrix(t, "gated", door.copy(k::gated(both, k::load(p + n, x.ld())) | glu, out, rows, n), y, want(0, n));
      expect_matrix(t, "gate_up", door.copy(k::gate_up(both, n) | glu, out, rows, n), y, want(0, n));
      expect_matrix(t, "up_gate", door.copy(k::up_gate(both, n) | glu, out, rows, n), y, want(n, 0));
    }
    // Operands of different types, over one of them.
    RandomMatrix<k::bfloat16, Memory> up(2, rows, n, n);
    std::vector<double> before;
    for (int64_t i = 0; i < rows * n; ++i) before.push_back(up.value(i / n, i % n));
    expect_matrix(
        t, "composed, in place",
        door.copy(k::load(p, x.ld()) | k::silu() | k::mul(k::load(static_cast<const k::bfloat16*>(up.data()), n)),
                  k::store(up.data(), n), rows, n),
        up,
        [&](int64_t r, int64_t c) { return applied(Curve::silu, x.value(r, c)) * Real<>(before[size_t(r * n + c)]); });
  }
}

// Three results of one pass, each with maps of its own.
template <class Memory, class Door>
void check_several(Tally& t, const Door& door) {
  const int64_t rows = 7;
  for (const int64_t cols : {1, 64, 99}) {
    const RandomMatrix<k::half, Memory> x(1, rows, cols, cols);
    const Numbers<float, Memory> scale({0.03f});
    Guarded<k::half, Memory> plain(rows, cols, cols);
    Guarded<float, Memory> active(rows, cols, cols + 3);
    Guarded<int8_t, Memory> codes(rows, cols, cols);
    const auto sinks = k::both(
        k::store(plain.data(), plain.ld()), k::gelu() | k::store(active.data(), active.ld()),
        k::relu() | k::quantize(codes.data(), codes.ld(), k::tensor_scale(static_cast<const float*>(scale.data()))));
    const k::Status status = door.copy(k::load(static_cast<const k::half*>(x.data()), cols), sinks, rows, cols);
    expect_matrix(t, "plain", status, plain, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); });
    expect_matrix(t, "gelu", status, active, [&](int64_t r, int64_t c) { return applied(Curve::gelu, x.value(r, c)); });
    expect_matrix(t, "codes", status, codes, [&](int64_t r, int64_t c) {
      return Real<>(double(float(std::fmax(0, x.value(r, c))) * (1.f / 0.03f)));
    });
  }
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Philox4x32-10 as its paper has it, word by word.
inline uint32_t philox_word(uint64_t seed, uint64_t low, uint64_t high, int which) {
  uint32_t c[4] = {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)},
           key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round, key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
    const uint32_t next[4] = {uint32_t(p1 >> 32) ^ c[1] ^ key[0], uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ key[1],
                              uint32_t(p0)};
    std::copy(next, next + 4, c);
  }
  return c[which];
}
inline bool is_dropped(double p, uint64_t seed, uint64_t offset, uint64_t row_blocks, int64_t row, int64_t col) {
  return double(philox_word(seed, uint64_t(row) * row_blocks + uint64_t(col) / 4, offset, int(col % 4)) >> 1) <
         std::nearbyint(p * 0x1p31);
}

template <class Memory, class Door>
void check_dropout(Tally& t, const Door& door) {
  const uint64_t seed = 0x123456789abcdef0u, offset = 0xfedcba9876543210u;
  const auto expect = [&](const char* what, float got, float from, bool dropped, double p) {
    const float want = dropped ? 0.f : from * float(p < 1 ? 1 / (1 - p) : 0.0);
    t.expect(same(got, want), "%s, p %g: %.9g became %.9g, want %.9g", what, p, from, got, want);
  };
  for (const double p : {0.0, 0.25, 0.3, 1.0}) {
    for (const int64_t cols : {1, 3, 8, 50, 1021, 1024}) {
      const int64_t rows = 9, ld = cols == 50 ? 61 : cols;
      RandomMatrix<float, Memory> x(1, rows, cols, cols, cols == 8);
      for (int64_t r = 0; r < rows; ++r) x.set(r, cols - 1, std::nanf(""));
      x.upload();
      const auto in = k::load(static_cast<const float*>(x.data()), cols);
      Guarded<float, Memory> y(rows, cols, cols);
      const auto run = [&](const char* what, const auto& map, const auto& dropped) {
        const k::Status status = door.copy(in | map, k::store(y.data(), cols), rows, cols);
        t.expect(status.ok(), "%s", status.reason());
        y.download();
        t.expect(y.intact(), "%s: wrote outside", what);
        int64_t count = 0;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c)
            expect(what, y.get(r, c), x.get(r, c), dropped(r, c), p), count += dropped(r, c);
        }
        if (cols > 1000)
          t.expect(std::fabs(double(count) / double(rows * cols) - p) < 0.03, "%s: %d of %d dropped", what, int(count),
                   int(rows * cols));
      };
      run("drawn", k::dropout(p, seed, offset, ld),
          [&](int64_t r, int64_t c) { return is_dropped(p, seed, offset, uint64_t(ld + 3) / 4, r, c); });
      Guarded<bool, Memory> keep(rows, cols, cols);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) keep.set(r, c, !is_dropped(p, seed, 1, 300, r, c));
      }
      keep.upload();
      run("given", k::dropout(p, k::load(static_cast<const bool*>(keep.data()), cols)),
          [&](int64_t r, int64_t c) { return p == 1 || !keep.get(r, c); });
    }
  }
  // A flat tensor, of a number of elements that no pack divides.
  const int64_t n = 10007;
  const RandomMatrix<float, Memory> x(2, 1, n, n);
  Guarded<float, Memory> y(1, n, n);
  const k::Status status =
      door.copy(k::load(static_cast<const float*>(x.data())) | k::dropout(0.5, seed, 3), k::store(y.data()), n);
  t.expect(status.ok(), "%s", status.reason());
  y.download();
  for (int64_t i = 0; i < n; ++i) expect("flat", y.get(0, i), x.get(0, i), is_dropped(0.5, seed, 3, 0, 0, i), 0.5);
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// Given scales: codes of a matrix, and what they are read back as.
template <class T, class Memory, class Door, class ScaleOf, class Scales>
void check_codes(Tally& t, const Door& door, const char* what, int64_t rows, int64_t cols, const Scales& scales,
                 const ScaleOf& scale_of) {
  RandomMatrix<k::half, Memory> x(1, rows, cols, cols);
  x.set(0, 0, make<k::half>(std::nan("")));
  x.set(rows - 1, cols - 1, make<k::half>(60000));
  x.upload();
  Guarded<T, Memory> q(rows, cols, cols + 1);
  expect_matrix(t, what,
                door.copy(k::load(static_cast<const k::half*>(x.data()), cols), k::quantize(q.data(), q.ld(), scales),
                          rows, cols),
                q, [&](int64_t r, int64_t c) {
                  const float scale = scale_of(r, c);
                  return Real<>(scale != 0 ? double(float(x.value(r, c)) * (1.f / scale)) : x.value(r, c) * 0);
                });
  Guarded<float, Memory> y(rows, cols, cols);
  expect_matrix(t, what,
                door.copy(k::dequant(k::load(static_cast<const T*>(q.data()), q.ld()), scales),
                          k::store(y.data(), cols), rows, cols),
                y, [&](int64_t r, int64_t c) { return Real<>(double(float(value_of(q.get(r, c))) * scale_of(r, c))); });
}

template <class Memory, class Door>
void check_given_scales(Tally& t, const Door& door) {
  const int64_t rows = 6;
  for (const int64_t cols : {64, 100, 1}) {
    const int64_t groups = (cols + 31) / 32;
    const RandomMatrix<float, Memory> drawn(1, rows, groups, groups);
    Guarded<float, Memory> s(rows, groups, groups);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) s.set(r, g, r == 2 ? 0.f : 0.01f + 0.01f * std::fabs(drawn.get(r, g)));
    }
    s.upload();
    const float* const p = s.data();
    check_codes<int8_t, Memory>(t, door, "tensor", rows, cols, k::tensor_scale(p),
                                [&](int64_t, int64_t) { return s.get(0, 0); });
    check_codes<k::float8_e5m2, Memory>(t, door, "row", rows, cols, k::row_scales(p),
                                        [&](int64_t r, int64_t) { return s.get(r / groups, r % groups); });
    check_codes<k::float8_e4m3, Memory>(t, door, "group", rows, cols, k::group_scales(p, groups, 32),
                                        [&](int64_t r, int64_t c) { return s.get(r, c / 32); });
  }
  // The middle of codes of -128 to 127 lies at the zero point.
  const RandomMatrix<float, Memory> x(2, rows, 40, 40);
  const Numbers<float, Memory> scale({0.05f});
  const Numbers<int8_t, Memory> zero({-20});
  Guarded<int8_t, Memory> q(rows, 40, 40);
  expect_matrix(
      t, "zero point",
      door.copy(
          k::load(static_cast<const float*>(x.data()), 40),
          k::quantize(
              q.data(), 40,
              k::tensor_scale(static_cast<const float*>(scale.data())).zeros(static_cast<const int8_t*>(zero.data()))),
          rows, 40),
      q, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c) * double(1.f / 0.05f) - 20, 20 * 0x1p-22); });
}

// What is written as the scale of a group, and what makes codes of its values.
template <class T, class S>
S found_scale(float largest) {
  const float most = k::detail::Largest<T>::value, scale = largest / most;
  return make<S>(std::is_same<S, k::half>::value && scale > 0 ? std::fmax(scale, 0x1p-24f) : scale);
}
template <class T, class S>
float found_factor(float largest) {
  if (largest == 0) return 0;
  if (std::is_same<S, float>::value) return k::detail::Largest<T>::value / largest;
  return 1 / float(value_of(found_scale<T, S>(largest)));
}

// Found scales. A group's values are read again where the lanes of a warp cannot hold them.
template <class T, class S, class Memory, class Door>
void check_found_scales(Tally& t, const Door& door) {
  for (const int64_t cols : {256, 130, 3000}) {
    for (const int64_t group : {1, 5, 16, 64, 128, 1024, 5000}) {
      const int64_t rows = 5, groups = (cols + group - 1) / group, ld = cols + (group == 64 ? 16 : 0);
      RandomMatrix<k::half, Memory> x(1, rows, cols, cols, group == 16);
      for (int64_t c = 0; c < cols; ++c)
        x.set(1, c, make<k::half>(0)), x.set(4, c, make<k::half>(1e-6 * x.value(4, c)));
      x.set(2, cols / 2, make<k::half>(std::nan("")));
      x.set(3, cols / 2, make<k::half>(INFINITY));
      x.upload();
      Guarded<T, Memory> q(rows, cols, ld);
      Guarded<S, Memory> scales(rows, groups, groups + 2);
      Guarded<k::half, Memory> doubled(rows, cols, cols);  // a map with an effect, once for each element
      const k::Status status = door.copy(k::load(static_cast<const k::half*>(x.data()), cols),
                                         k::scale(2) | k::tee(doubled.data(), cols) |
                                             k::quantize(q.data(), ld, scales.data(), scales.ld(), int(group)),
                                         rows, cols);
      t.expect(status.ok(), "%s", status.reason());
      q.download();
      scales.download();
      doubled.download();
      t.expect(q.intact() && scales.intact() && doubled.intact(), "groups of %d: wrote outside", int(group));
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t g = 0; g < groups; ++g) {
          float largest = 0;
          bool nan = false;
          for (int64_t c = g * group; c < std::min(cols, (g + 1) * group); ++c) {
            const float v = float(2 * x.value(r, c));
            nan = nan || v != v;
            largest = std::fmax(largest, std::fabs(v));
          }
          if (nan) largest = std::nanf("");
          t.expect(same(scales.get(r, g), found_scale<T, S>(largest)), "groups of %d, row %d: scale %g of %g",
                   int(group), int(r), value_of(scales.get(r, g)), largest);
          for (int64_t c = g * group; c < std::min(cols, (g + 1) * group); ++c) {
            const double v = 2 * x.value(r, c), code = double(float(v) * found_factor<T, S>(largest));
            t.expect(same(doubled.get(r, c), make<k::half>(v)), "groups of %d, row %d, column %d: tee", int(group),
                     int(r), int(c));
            t.expect(same(q.get(r, c), make<T>(code)),
                     "groups of %d of %d columns, row %d, column %d: code %g, want %g", int(group), int(cols), int(r),
                     int(c), value_of(q.get(r, c)), code);
          }
        }
      }
    }
  }
}

// A scale for each row, and for all of a flat tensor, through the engine of row operations.
template <class S, class Memory, class Door>
void check_row_scales(Tally& t, const Door& door) {
  for (const int64_t cols : {1, 96, 1000, 20001}) {
    const int64_t rows = 3;
    const RandomMatrix<k::half, Memory> x(1, rows, cols, cols);
    Guarded<int8_t, Memory> q(rows, cols, cols);
    Guarded<S, Memory> scales(rows, 1, 1);
    const auto check = [&](const char* what, const k::Status& status, int64_t count) {
      t.expect(status.ok(), "%s: %s", what, status.reason());
      q.download();
      scales.download();
      t.expect(q.intact() && scales.intact(), "%s: wrote outside", what);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t n = rows * cols / count;
        const auto at = [&](int64_t i) { return float(x.value((r * n + i) / cols, (r * n + i) % cols)); };
        float largest = 0;
        for (int64_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(at(i)));
        t.expect(same(scales.get(r, 0), found_scale<int8_t, S>(largest)), "%s, %d columns: scale", what, int(cols));
        for (int64_t i = 0; i < n; ++i)
          t.expect(same(q.get((r * n + i) / cols, (r * n + i) % cols),
                        make<int8_t>(double(at(i) * found_factor<int8_t, S>(largest)))),
                   "%s, %d columns: code %d", what, int(cols), int(i));
      }
    };
    const auto in = k::load(static_cast<const k::half*>(x.data()), cols);
    check("rows", door.copy(in, k::quantize(q.data(), cols, scales.data()), rows, cols), rows);
    check("flat", door.copy(in, k::quantize(q.data(), cols, scales.data()), rows * cols), 1);
  }
}

// ---- embeddings -----------------------------------------------------------------------------------------------------

template <class Memory, class Id, class Door, class Table, class Value>
void check_table(Tally& t, const Door& door, const char* what, const Table& table, int64_t vocabulary, int64_t cols,
                 const Value& value) {
  const int64_t far = sizeof(Id) == 8 ? (int64_t(1) << 40) : 2000000000;
  const std::vector<int64_t> right = {3, 0, vocabulary - 1, 3, 3, 7},
                             some = {3, 0, vocabulary - 1, 7, vocabulary, 5, -1, far, 0, -far};
  for (const auto& ids : {right, some}) {
    std::vector<Id> narrow(ids.begin(), ids.end());
    const Numbers<Id, Memory> there(narrow);
    const int64_t rows = int64_t(ids.size());
    Guarded<float, Memory> x(rows, cols, cols + 4);
    Numbers<int64_t, Memory> wrong({-1});
    const auto source = k::embed(table, static_cast<const Id*>(there.data()), vocabulary);
    const auto expect = [&](int64_t report) {
      wrong.download();
      t.expect(wrong.intact() && wrong.get(0, 0) == report, "%s: row %d is reported", what, int(wrong.get(0, 0)));
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t id = ids[size_t(r)];
        for (int64_t c = 0; c < cols; ++c) {
          const float want = id < 0 || id >= vocabulary ? std::nanf("") : float(value(id, c));
          t.expect(same(x.get(r, c), want), "%s, %d columns: row %d, column %d: %g, want %g", what, int(cols), int(r),
                   int(c), x.get(r, c), want);
        }
      }
    };
    const k::Status status = door.copy(source.report(wrong.data()), k::store(x.data(), x.ld()), rows, cols);
    t.expect(status.ok(), "%s: %s", what, status.reason());
    x.download();
    t.expect(x.intact(), "%s: wrote outside", what);
    expect(ids == right ? -1 : 4);
  }
}

template <class Memory, class Door>
void check_embeddings(Tally& t, const Door& door) {
  const int64_t vocabulary = 11;
  for (const int64_t cols : {64, 7, 1000}) {
    const RandomMatrix<k::half, Memory> halves(1, vocabulary, cols, cols + 1),
        aligned(2, vocabulary, cols, (cols + 7) / 8 * 8);
    check_table<Memory, int32_t>(t, door, "halves", k::load(static_cast<const k::half*>(halves.data()), halves.ld()),
                                 vocabulary, cols, [&](int64_t r, int64_t c) { return halves.value(r, c); });
    check_table<Memory, int64_t>(t, door, "aligned", k::load(static_cast<const k::half*>(aligned.data()), aligned.ld()),
                                 vocabulary, cols, [&](int64_t r, int64_t c) { return aligned.value(r, c); });
    Guarded<int8_t, Memory> codes(vocabulary, cols, cols);
    const RandomMatrix<float, Memory> scales(3, vocabulary, 1, 1);
    for (int64_t i = 0; i < vocabulary * cols; ++i) codes.set(i / cols, i % cols, int8_t(i * 37 % 251 - 125));
    codes.upload();
    check_table<Memory, int32_t>(
        t, door, "int8",
        k::dequant(k::load(static_cast<const int8_t*>(codes.data()), cols),
                   k::row_scales(static_cast<const float*>(scales.data()))),
        vocabulary, cols, [&](int64_t r, int64_t c) { return double(float(codes.get(r, c)) * scales.get(r, 0)); });
  }
  const int64_t cols = 64;
  Guarded<uint32_t, Memory> words(vocabulary, cols / 8, cols / 8);
  const RandomMatrix<k::half, Memory> scales(4, vocabulary, 2, 2);
  for (int64_t i = 0; i < vocabulary * cols / 8; ++i) words.set(i / 8, i % 8, uint32_t(i * 2654435761u));
  words.upload();
  check_table<Memory, int64_t>(
      t, door, "int4",
      k::dequant(k::int4(words.data(), cols), k::group_scales(static_cast<const k::half*>(scales.data()), 2, 32)),
      vocabulary, cols, [&](int64_t r, int64_t c) {
        const int code = int(words.get(r, c / 8) >> k::int4_shift(int(c % 8)) & 15) - 8;
        return double(float(code) * float(scales.value(r, c / 32)));
      });

  // With a scale, the residual and the first norm in one launch; the lowest of several reports stays.
  for (const int64_t d : {64, 4096, 515}) {
    const RandomMatrix<k::half, Memory> table(5, vocabulary, d, d), gamma(6, 1, d, d);
    const Numbers<int32_t, Memory> ids({3, 10, -5, 0, 11, 3});
    Numbers<int64_t, Memory> wrong({-1});
    Guarded<k::half, Memory> residual(6, d, d), y(6, d, d), apart(6, d, d);
    const auto tokens = k::embed(k::load(static_cast<const k::half*>(table.data()), d),
                                 static_cast<const int32_t*>(ids.data()), vocabulary)
                            .report(wrong.data());
    const auto sink = [&](auto& to) {
      return k::affine(static_cast<const k::half*>(gamma.data())) | k::store(to.data(), d);
    };
    const k::Status status = door.rmsnorm(tokens | k::scale(8) | k::tee(residual.data(), d), sink(y), 6, d);
    expect_matrix(t, "residual", status, residual, [&](int64_t r, int64_t c) {
      const int64_t id = ids.get(0, r);
      return Real<>(id < 0 || id >= vocabulary ? std::nan("") : 8 * table.value(id, c));
    });
    wrong.download();
    t.expect(wrong.get(0, 0) == 2, "row %d is reported", int(wrong.get(0, 0)));
    const k::Status again = door.rmsnorm(k::load(static_cast<const k::half*>(residual.data()), d), sink(apart), 6, d);
    apart.download();
    expect_matrix(t, "norm", again, y, [&](int64_t r, int64_t c) {
      const double want = value_of(apart.get(r, c));
      return Real<>(want, 0x1p-10 * std::fabs(want));
    });
    // Rows of a later call come before the reported one.
    t.expect(door.copy(k::embed(k::load(static_cast<const k::half*>(table.data()), d),
                                static_cast<const int32_t*>(ids.data()) + 1, vocabulary)
                           .report(wrong.data()),
                       k::store(y.data(), d), 5, d)
                 .ok(),
             "again");
    wrong.download();
    t.expect(wrong.get(0, 0) == 1, "row %d is reported", int(wrong.get(0, 0)));
  }
}

// All of it in front of a norm, in rows that are aligned, and in rows of which none is: the same as a copy and the norm
// of that.
template <class Memory, class Door>
void check_in_front_of_a_norm(Tally& t, const Door& door) {
  const int64_t rows = 6, vocabulary = 11;
  for (const int64_t d : {256, 1025, 3001}) {
    const RandomMatrix<k::half, Memory> x(1, rows, 2 * d, 2 * d + d % 2), table(2, vocabulary, d, d);
    const Numbers<int32_t, Memory> ids({3, 10, 5, 0, 10, 3});
    Guarded<bool, Memory> keep(rows, d, d);
    for (int64_t i = 0; i < rows * d; ++i) keep.set(i / d, i % d, i % 7 != 2);
    keep.upload();
    Guarded<float, Memory> between(rows, d, d), apart(rows, d, d), at_once(rows, d, d + 1);
    const auto check = [&](const char* what, const auto& in) {
      t.expect(
          door.copy(in, k::store(between.data(), d), rows, d).ok() &&
              door.rmsnorm(k::load(static_cast<const float*>(between.data()), d), k::store(apart.data(), d), rows, d)
                  .ok(),
          "%s", what);
      apart.download();
      expect_matrix(t, what, door.rmsnorm(in, k::store(at_once.data(), at_once.ld()), rows, d), at_once,
                    [&](int64_t r, int64_t c) {
                      const double want = value_of(apart.get(r, c));
                      return Real<>(want, 0x1p-19 * std::fabs(want));
                    });
    };
    const auto whole = k::load(static_cast<const k::half*>(x.data()), x.ld());
    const auto tokens = k::embed(k::load(static_cast<const k::half*>(table.data()), d),
                                 static_cast<const int32_t*>(ids.data()), vocabulary);
    check("gate, embedding, dropout",
          (k::gate_up(whole, d) | k::swiglu()) | k::add(tokens) | k::dropout(0.25, 5, 6, d));
    check("embedding, given dropout",
          whole | k::add(tokens) | k::dropout(0.25, k::load(static_cast<const bool*>(keep.data()), d)));
  }
}

}  // namespace test
