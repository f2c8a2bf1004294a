// Row operations with sources, maps and sinks around them, on the CPU: everything a functor can do, in rows that fit a
// cache and rows that do not.
#include "support/cpu.h"
#include "support/families.h"
#include "support/given_scales.h"
#include "support/random_matrix.h"
#include "support/row_groups.h"
#include "support/threads.h"

#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/norm_heads.h>

#include <atomic>
#include <memory>

using namespace test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kRows = 6;
constexpr int64_t kCols[] = {1, 7, 16, 64, 100, 333, 1000, 5003};
constexpr int64_t kFewCols[] = {7, 64, 1000, 300007};  // the last one fits no cache of first or second level

template <class T>
using Matrix = RandomMatrix<T>;

// Rows before(row, col), through the operation, then after(row, col, value): compared with `got`.
template <class Op, class T, class Before, class After>
void check_matrix(Tally& t, const char* what, const Op& op, Guarded<T>& got, Before before, After after) {
  got.download();
  t.expect(got.intact(), "%s, %d cols: wrote outside its rows", what, int(got.cols()));
  for (int64_t r = 0; r < got.rows(); ++r) {
    Row<> x(static_cast<size_t>(got.cols()));
    for (int64_t c = 0; c < got.cols(); ++c) x[size_t(c)] = before(r, c);
    op.expect(x);
    for (int64_t c = 0; c < got.cols(); ++c) x[size_t(c)] = after(r, c, x[size_t(c)]);
    const std::string problem = mismatch(r, x, [&](int64_t c) { return got.get(r, c); });
    t.expect(problem.empty(), "%s, %s, %d cols, %s", Op::name, what, int(got.cols()), problem.c_str());
  }
}

// No operation: what a tee must hold.
struct Plain {
  static constexpr const char* name = "plain";
  template <class C>
  void expect(Row<C>&) const {}
};

template <class Op, class In, class Out>
void run(Tally& t, const In& in, const Out& out, int64_t rows, int64_t cols) {
  const k::Status status =
      Op{}.run(on_threads(2), in, out, rows, cols, static_cast<float*>(nullptr), static_cast<float*>(nullptr));
  t.expect(status.ok(), "%s, %d cols: %s", Op::name, int(cols), status.reason());
}

constexpr auto unchanged = [](int64_t, int64_t, Real<> x) { return x; };

}  // namespace

TEST_CASE("softmax of scaled, biased and masked scores") {
  Tally t;
  for (const int64_t cols : kCols) {
    const Matrix<k::half> x(1, kRows, cols, cols + 1);
    const Matrix<float> bias(2, 3, cols, cols), temperature(3, 1, kRows, kRows);
    Guarded<bool> keep(kRows, cols, cols + 5);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < cols; ++c) keep.set(r, c, mix(uint64_t(r * cols + c)) % 4 != 0);
    }
    keep.upload();
    Guarded<k::half> y(kRows, cols, cols + 2);
    const int64_t q_len = 3;
    run<Softmax>(t,
                 k::load(x.data(), x.ld()) | k::scale(0.125) | k::mul(k::per_row(temperature.data())) |
                     k::add(k::cycle(k::load(bias.data(), bias.ld()), 3)) | k::mask(k::load(keep.data(), keep.ld())) |
                     k::causal(q_len, cols),
                 k::store(y.data(), y.ld()), kRows, cols);
    check_matrix(t, "masked", Softmax{}, y, [&](int64_t r, int64_t c) {
      if (!keep.get(r, c) || c > r % q_len + cols - q_len) return Real<>(-kInfinity);
      return Real<>(x.value(r, c)) * Real<>(0.125) * Real<>(temperature.value(0, r)) + Real<>(bias.value(r % 3, c));
    }, unchanged);
  }
  CHECK_TALLY(t);
}

TEST_CASE("log_softmax under a mask of -inf, with maps behind it") {
  Tally t;
  for (const int64_t cols : kCols) {
    const Matrix<float> x(4, kRows, cols, cols);
    Guarded<k::bfloat16> mask(1, cols, cols);
    for (int64_t c = 0; c < cols; ++c) mask.set(0, c, make<k::bfloat16>(c % 3 == 1 ? -kInfinity : 0.0));
    mask.upload();
    Guarded<float> y(kRows, cols, cols);
    run<LogSoftmax>(t, k::load(x.data(), x.ld()) | k::add(mask.data()),
                    k::scale(0.5) | k::shift(1) | k::store(y.data(), y.ld()), kRows, cols);
    check_matrix(t, "row mask", LogSoftmax{}, y,
                 [&](int64_t r, int64_t c) { return c % 3 == 1 ? Real<>(-kInfinity) : Real<>(x.value(r, c)); },
                 [](int64_t, int64_t, Real<> v) { return std::isinf(v.v) ? v : v * Real<>(0.5) + Real<>(1.0); });
  }
  CHECK_TALLY(t);
}

TEST_CASE("rows that overlap, and one row over and over") {
  Tally t;
  for (const int64_t cols : kCols) {
    const Matrix<float> x(23, 1, cols + kRows, cols + kRows);
    Guarded<float> y(kRows, cols, cols);
    for (const int64_t ld : {0, 1}) {
      run<RmsNorm>(t, k::load(x.data(), ld), k::store(y.data(), y.ld()), kRows, cols);
      check_matrix(
          t, "row stride below cols", RmsNorm{}, y,
          [&](int64_t r, int64_t c) { return Real<>(x.value(0, r * ld + c)); }, unchanged);
    }
  }
  CHECK_TALLY(t);
}

// bias + residual + layernorm, updating the residual stream in place.
TEST_CASE("layernorm of a residual stream that is updated in place") {
  Tally t;
  for (const int64_t cols : kFewCols) {
    const Matrix<k::half> x(5, kRows, cols, cols + 3, 1);
    const Matrix<float> bias(6, 1, cols, cols), gamma(7, 1, cols, cols), beta(8, 1, cols, cols);
    Matrix<float> residual(9, kRows, cols, cols + 1);
    const Matrix<float> before(9, kRows, cols, cols + 1);
    Guarded<float> mean(kRows, 1, 1), rstd(kRows, 1, 1);
    Guarded<k::bfloat16> y(kRows, cols, cols);
    const auto h = k::load(x.data(), x.ld()) | k::add(k::row(bias.data())) |
                   k::add(k::load(residual.data(), residual.ld())) | k::tee(residual.data(), residual.ld());
    const k::Status status =
        k::cpu::layernorm(on_threads(2), h, k::affine(gamma.data(), beta.data()) | k::store(y.data(), y.ld()), kRows,
                          cols, k::LayerNorm{}.mean(mean.data()).rstd(rstd.data()));
    t.expect(status.ok(), "%d cols: %s", int(cols), status.reason());
    const auto sum = [&](int64_t r, int64_t c) {
      return Real<>(x.value(r, c)) + Real<>(bias.value(0, c)) + Real<>(before.value(r, c));
    };
    check_matrix(t, "the residual", Plain{}, residual, sum, unchanged);
    check_matrix(t, "the output", LayerNorm{}, y, sum, [&](int64_t, int64_t c, Real<> v) {
      return v * Real<>(gamma.value(0, c)) + Real<>(beta.value(0, c));
    });
    mean.download();
    rstd.download();
    for (int64_t r = 0; r < kRows; ++r) {
      Row<> row;
      for (int64_t c = 0; c < cols; ++c) row.push_back(sum(r, c));
      const RowStatistics<float> want = LayerNorm{}.expect(row);
      t.expect(within(mean.get(r, 0), want.mean) && within(rstd.get(r, 0), want.rstd),
               "%d cols, row %d: mean %g, rstd %g", int(cols), int(r), mean.get(r, 0), rstd.get(r, 0));
    }
  }
  CHECK_TALLY(t);
}

// A second pass over the row may read the copy, and with it the rounding to half: both values are right.
TEST_CASE("a tee to a narrower type") {
  Tally t;
  for (const int64_t cols : kFewCols) {
    const Matrix<float> x(10, kRows, cols, cols);
    Guarded<k::half> copy(kRows, cols, cols + 1);
    Guarded<float> y(kRows, cols, cols);
    run<RmsNorm>(t, k::load(x.data(), x.ld()) | k::scale(2) | k::tee(copy.data(), copy.ld()) | k::shift(0.5),
                 k::store(y.data(), y.ld()), kRows, cols);
    const auto twice = [&](int64_t r, int64_t c) { return Real<>(2 * x.value(r, c)); };
    check_matrix(t, "the copy", Plain{}, copy, twice, unchanged);
    check_matrix(t, "behind the tee", RmsNorm{}, y, [&](int64_t r, int64_t c) {
      const Real<> v = twice(r, c);
      return Real<>(v.v, std::fabs(v.v) * 0x1p-11 + 0x1p-25) + Real<>(0.5);
    }, unchanged);
  }
  CHECK_TALLY(t);
}

TEST_CASE("rmsnorm rounds where a model family does, to the bit") {
  Tally t;
  for (const int64_t cols : kCols) {
    const Matrix<k::half> x(21, kRows, cols, cols), weight(22, 1, cols, cols);
    Guarded<k::half> y(kRows, cols, cols);
    Guarded<float> rstd(1, kRows, kRows);
    each_family(weight.data(), [&](const char* name, const auto& maps, const auto& model) {
      const k::Status status = k::cpu::rmsnorm(on_threads(2), k::load(x.data(), cols), maps | k::store(y.data(), cols),
                                               kRows, cols, k::RmsNorm{}.eps(1e-6).rstd(rstd.data()));
      t.expect(status.ok(), "%s: %s", name, status.reason());
      y.download();
      rstd.download();
      check_family(t, name, x, weight, y, rstd, model);
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("maps behind a norm") {
  Tally t;
  for (const int64_t cols : kCols) {
    const Matrix<float> x(11, kRows, cols, cols), other(12, kRows, cols, cols + 1);
    const Matrix<k::half> gamma(13, 1, cols, cols), beta(14, 1, cols, cols);
    Guarded<k::half> y(kRows, cols, cols), z(kRows, cols, cols);
    Guarded<k::float8_e4m3> y8(kRows, cols, cols + 7);
    const auto before = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); };
    const auto in = k::load(x.data(), x.ld());

    run<RmsNorm>(t, in,
                 k::round_to<k::half>() | k::affine(k::one_plus(gamma.data())) | k::gelu() | k::store(y.data(), y.ld()),
                 kRows, cols);
    check_matrix(t, "round_to | affine | gelu", RmsNorm{}, y, before, [&](int64_t, int64_t c, Real<> v) {
      return gelu(rounded_to<k::half>(v) * (Real<>(1.0) + Real<>(gamma.value(0, c))));
    });

    run<LayerNorm>(t, in,
                   k::affine(gamma.data(), beta.data()) |
                       k::both(k::silu() | k::tee(y.data(), y.ld()) | k::mul(k::load(other.data(), other.ld())) |
                                   k::store(z.data(), z.ld()),
                               k::gelu_erf() | k::store(y8.data(), y8.ld())),
                   kRows, cols);
    const auto affine = [&](int64_t c, Real<> v) { return v * Real<>(gamma.value(0, c)) + Real<>(beta.value(0, c)); };
    check_matrix(t, "both, tee", LayerNorm{}, y, before,
                 [&](int64_t, int64_t c, Real<> v) { return silu(affine(c, v)); });
    check_matrix(t, "both, first", LayerNorm{}, z, before, [&](int64_t r, int64_t c, Real<> v) {
      return rounded_to<k::half>(silu(affine(c, v))) * Real<>(other.value(r, c));
    });
    check_matrix(t, "both, second", LayerNorm{}, y8, before,
                 [&](int64_t, int64_t c, Real<> v) { return gelu_erf(affine(c, v)); });
  }
  CHECK_TALLY(t);
}

// ---- quantize -------------------------------------------------------------------------------------------------------

namespace {

template <class T, class Op>
void check_quantize(Tally& t, int64_t cols) {
  const Matrix<float> x(15, kRows, cols, cols), gamma(16, 1, cols, cols);
  Guarded<T> q(kRows, cols, cols + 3);
  Guarded<float> scales(kRows, 1, 1);
  Guarded<float> copy(kRows, cols, cols);
  run<Op>(
      t, k::load(x.data(), x.ld()),
      k::affine(gamma.data()) | k::tee(copy.data(), cols) | k::relu() | k::quantize(q.data(), q.ld(), scales.data()),
      kRows, cols);
  q.download();
  scales.download();
  copy.download();
  t.expect(q.intact() && scales.intact() && copy.intact(), "%s, %d cols: wrote outside its rows", Op::name, int(cols));
  for (int64_t r = 0; r < kRows; ++r) {
    Row<> row;
    for (int64_t c = 0; c < cols; ++c) row.push_back(Real<>(x.value(r, c)));
    Op{}.expect(row);
    for (int64_t c = 0; c < cols; ++c) row[size_t(c)] = row[size_t(c)] * Real<>(gamma.value(0, c));
    std::string problem = mismatch(r, row, [&](int64_t c) { return copy.get(r, c); });
    t.expect(problem.empty(), "%s, tee before quantize, %d cols, %s", Op::name, int(cols), problem.c_str());
    for (Real<>& v : row) v = relu(v);
    const Real<> scale = quantize<T>(row);
    t.expect(within(scales.get(r, 0), scale), "%s, %d cols, row %d: scale %g, want %g", Op::name, int(cols), int(r),
             scales.get(r, 0), scale.v);
    problem = mismatch(r, row, [&](int64_t c) { return q.get(r, c); });
    t.expect(problem.empty(), "%s, codes, %d cols, %s", Op::name, int(cols), problem.c_str());
  }
}

}  // namespace

TEST_CASE("quantize behind an operation") {
  Tally t;
  for (const int64_t cols : kCols) {
    check_quantize<int8_t, RmsNorm>(t, cols);
    check_quantize<k::float8_e4m3, LayerNorm>(t, cols);
    check_quantize<k::float8_e5m2, Softmax>(t, cols);
  }
  check_quantize<int8_t, RmsNorm>(t, 300007);
  CHECK_TALLY(t);
}

namespace {
struct ByGroup {
  // Threads share rows, or groups of rows, where there are fewer rows than threads.
  std::vector<k::cpu::Exec> ways(int64_t, int64_t) const { return {on_threads(2), on_threads(9)}; }
  template <class In, class Out>
  k::Status run(const k::RmsNorm& options, const In& in, const Out& out, int64_t rows, int64_t cols,
                const k::cpu::Exec& cx) const {
    return k::cpu::rmsnorm(cx, in, out, rows, cols, options);
  }
  template <class In, class Out>
  k::Status run(const k::LayerNorm& options, const In& in, const Out& out, int64_t rows, int64_t cols,
                const k::cpu::Exec& cx) const {
    return k::cpu::layernorm(cx, in, out, rows, cols, options);
  }
  template <class In, class Out>
  k::Status run(const k::Softmax&, const In& in, const Out& out, int64_t rows, int64_t cols,
                const k::cpu::Exec& cx) const {
    return k::cpu::softmax(cx, in, out, rows, cols);
  }
};
}  // namespace

TEST_CASE("quantize: groups of columns behind an operation") {
  Tally t;
  check_quantized_by_groups<HostMemory>(t, ByGroup());
  CHECK_TALLY(t);
}

TEST_CASE("quantize: scales that are given, behind every operation") {
  Tally t;
  const k::cpu::Exec cx = on_threads(2);
  const int64_t tokens = 6, heads = 4, dim = 16, cols = heads * dim;
  const Matrix<float> x(1, tokens, cols, cols), w(2, 37, cols, cols);
  const Matrix<k::half> keys(3, 20, 2 * dim, 2 * dim), values(4, 20, 2 * dim, 2 * dim);
  const auto in = k::load(x.data(), cols);
  const auto kv = k::dense_kv(k::nhd(keys.data(), 10, 2, dim), k::nhd(values.data(), 10, 2, dim), 10);
  const k::AttentionShape shape{2, tokens / 2, heads, 2, dim};
  std::vector<float> room(k::cpu::decode_workspace_bytes(shape) / sizeof(float) + 1);
  const k::Workspace workspace{room.data(), room.size() * sizeof(float)};
  const auto check = [&](const char* what, int64_t rows, int64_t width, const auto& call) {
    check_given_scales<HostMemory>(t, what, rows, width, call);
  };
  check("copy", tokens, cols, [&](const auto& out) { return k::cpu::copy(cx, in, out, tokens, cols); });
  check("softmax", tokens, cols, [&](const auto& out) { return k::cpu::softmax(cx, in, out, tokens, cols); });
  check("rmsnorm", tokens, cols,
        [&](const auto& out) { return k::cpu::rmsnorm(cx, in, k::relu() | out, tokens, cols); });
  check("product", tokens, 37, [&](const auto& out) {
    return k::cpu::matmul(cx, in, k::load(w.data(), cols), k::scale(0.1) | out, {tokens, 37, cols});
  });
  check("attention", tokens, cols,
        [&](const auto& out) { return k::cpu::attention(cx, in, kv, out, shape, k::causal()); });
  check("decode", tokens, cols,
        [&](const auto& out) { return k::cpu::decode(cx, in, kv, out, shape, k::causal(), workspace); });
  check("merge_states", tokens / 2, cols, [&](const auto& out) {
    return k::cpu::merge_states(cx, in, k::load(x.data(), cols), out, {2, tokens / 2, heads, dim});
  });
  check("norm_heads", tokens, cols, [&](const auto& out) {
    return k::cpu::norm_heads(cx, in, out, {tokens, heads, dim, heads});
  });
  CHECK_TALLY(t);
}

namespace {

// Users' sinks that look at rows, and at groups of columns, first. Their states say nothing of how they begin.
struct LargestFirst : k::Functor {
  float *y, *most;
  int64_t ld;
  LargestFirst(float* to, float* largest, int64_t stride) : y(to), most(largest), ld(stride) {}

  struct State {
    float m;
  };
  float padding() const { return 0; }
  template <int N>
  void accumulate(State& s, const k::Pack<float, N>& v, int) const {
    for (int i = 0; i < N; ++i) s.m = k::greater(s.m, k::magnitude(v.v[i]));
  }
  void merge(State& a, const State& b) const { a.m = k::greater(a.m, b.m); }
  template <class Lanes>
  State gather(const State& s, const Lanes& lanes) const {
    return {lanes.max(s.m)};
  }
  float finish(const State& s) const { return 1 / s.m; }
  void write_row(const State& s, int64_t row) const { most[row] = s.m; }
  template <int N>
  void store(const k::Pack<float, N>& v, float factor, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) y[row * ld + col + i] = v.v[i] * factor;
  }
};
struct LargestOfGroups : k::Functor {
  static constexpr bool by_group = true;
  float *y, *most;
  int64_t ld, most_ld;
  LargestOfGroups(float* to, int64_t stride, float* largest, int64_t largest_stride)
      : y(to), most(largest), ld(stride), most_ld(largest_stride) {}

  struct State {
    float largest;
    template <int N>
    void take(const k::Pack<float, N>& v, int64_t) {
      for (int i = 0; i < N; ++i) largest = k::greater(largest, k::magnitude(v.v[i]));
    }
    float finish() const { return 1 / largest; }
  };
  int group() const { return 100; }
  void write_scale(const State& s, int64_t row, int64_t index) const { most[row * most_ld + index] = s.largest; }
  template <int N>
  void store(const k::Pack<float, N>& v, float factor, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) y[row * ld + col + i] = v.v[i] * factor;
  }
};

// Leaves numbers behind on the stack of each thread, where states will lie.
void litter() {
  k::detail::host::parallel(2, [](int) {
    volatile float numbers[1 << 14];
    for (volatile float& x : numbers) x = 1e30f;
  });
}

}  // namespace

TEST_CASE("users' row sinks begin with states of zeros") {
  struct {
    int64_t rows, cols;
  } const shapes[] = {{1, 1}, {1, 5003}, {1, 300000}, {7, 1001}, {3, 300000}, {500, 33}};
  for (const auto& [rows, cols] : shapes) {
    for (const int64_t group : {cols, int64_t(100)}) {
      const int64_t groups = (cols + group - 1) / group;
      std::vector<float> x(size_t(rows * cols)), y(x.size()), most(size_t(rows * groups)), want(most.size());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          const float value = float((r * 31 + c * 7919) % 4093 - 2000) / 4096;
          x[size_t(r * cols + c)] = value;
          float& largest = want[size_t(r * groups + c / group)];
          largest = k::greater(largest, k::magnitude(value));
        }
      }
      const auto in = k::load(x.data(), cols);
      const auto copied = [&](const auto& sink) {
        litter();
        return k::cpu::copy(on_threads(2), in, sink, rows, cols);
      };
      const k::Status status = group == cols ? copied(LargestFirst(y.data(), most.data(), cols))
                                             : copied(LargestOfGroups(y.data(), cols, most.data(), groups));
      INFO(rows << " x " << cols << ", groups of " << group);
      REQUIRE(status.ok());
      CHECK(most == want);
      bool right = true;
      for (size_t i = 0; i < x.size(); ++i) {
        const size_t row = i / size_t(cols), col = i % size_t(cols);
        right = right && y[i] == x[i] * (1 / want[row * size_t(groups) + col / size_t(group)]);
      }
      CHECK(right);
    }
  }
}

TEST_CASE("quantize: a row of zeros, and one with a NaN") {
  const int64_t cols = 100;
  Guarded<float> x(2, cols, cols), scales(2, 1, 1);
  Guarded<int8_t> q(2, cols, cols);
  for (int64_t c = 0; c < cols; ++c) {
    x.set(0, c, 0.f);
    x.set(1, c, c == 57 ? std::nanf("") : 1.f);
  }
  x.upload();
  REQUIRE(
      k::cpu::rmsnorm(k::cpu::Exec{1}, k::load(x.data(), cols), k::quantize(q.data(), cols, scales.data()), 2, cols));
  q.download();
  scales.download();
  CHECK(scales.get(0, 0) == 0.f);
  CHECK(std::isnan(scales.get(1, 0)));
  bool zeros = true;
  for (int64_t c = 0; c < cols; ++c) zeros = zeros && q.get(0, c) == 0;
  CHECK(zeros);
}

// ---- users' functors ------------------------------------------------------------------------------------------------

namespace {

struct Clamp : k::Functor {
  float hi;
  explicit Clamp(float h) : hi(h) {}
  template <int N>
  KERNELS_HD auto map(k::Pack<float, N> v, int64_t, int64_t) const { return k::min(v, hi); }
};

template <class T>
struct OneFlowLoad {
  const T* src;
  int64_t row_size;
  template <int N>
  void load(float* dst, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) dst[i] = k::convert<float>(src[row * row_size + col + i]);
  }
};

template <class T>
struct OneFlowStore {
  T* dst;
  int64_t row_size;
  template <int N>
  void store(const float* src, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) dst[row * row_size + col + i] = k::convert<T>(src[i]);
  }
};

// A source and a sink that move vectors: they say how wide with `widest` and max_pack(), and note when they were not
// heeded.
struct Picky : k::Functor {
  const float* p;
  int64_t ld;
  std::atomic<int64_t>* broken;
  Picky(const float* pointer, int64_t stride, std::atomic<int64_t>* count) : p(pointer), ld(stride), broken(count) {}

  static constexpr int widest = 8;
  int max_pack() const {
    int n = widest;
    while (n > 1 && (reinterpret_cast<uintptr_t>(p) % (size_t(n) * 4) != 0 || ld % n != 0)) n /= 2;
    return n;
  }
  template <int N>
  void note(int64_t row, int64_t col) const {
    if (N > widest || reinterpret_cast<uintptr_t>(p + row * ld + col) % (size_t(N) * 4) != 0) ++*broken;
  }
};
struct PickyLoad : Picky {
  using Picky::Picky;
  template <int N>
  k::Pack<float, N> load(int64_t row, int64_t col) const {
    note<N>(row, col);
    return k::read<N, k::Cache::stream>(p + row * ld + col).unpack();
  }
};
struct PickyStore : Picky {
  using Picky::Picky;
  template <int N>
  void store(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    note<N>(row, col);
    k::write<N>(const_cast<float*>(p) + row * ld + col, v);
  }
};

// Counts how often each element is loaded and stored.
struct Counts {
  explicit Counts(int64_t n) : loads(static_cast<size_t>(n)), stores(static_cast<size_t>(n)) {}
  std::vector<std::atomic<int>> loads, stores;
};

struct CountingLoad : k::Functor {
  Counts* counts;
  int64_t cols;
  CountingLoad(Counts* n, int64_t c) : counts(n), cols(c) {}
  template <int N>
  k::Pack<float, N> reload(int64_t row, int64_t col) const {
    k::Pack<float, N> out;
    for (int i = 0; i < N; ++i) out[i] = float(double(mix(uint64_t(row * cols + col + i)) % 1000) / 100);
    return out;
  }
  template <int N>
  k::Pack<float, N> load(int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) ++counts->loads[size_t(row * cols + col + i)];
    return reload<N>(row, col);
  }
};

struct CountingStore : k::Functor {
  Counts* counts;
  int64_t cols;
  CountingStore(Counts* n, int64_t c) : counts(n), cols(c) {}
  template <int N>
  void store(const k::Pack<float, N>&, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) ++counts->stores[size_t(row * cols + col + i)];
  }
};

}  // namespace

TEST_CASE("users' maps, and functors in OneFlow's form") {
  Tally t;
  for (const int64_t cols : kCols) {
    const Matrix<k::half> x(17, kRows, cols, cols);
    Guarded<float> y(kRows, cols, cols);
    const OneFlowLoad<k::half> in{x.data(), cols};
    const OneFlowStore<float> out{y.data(), cols};
    const auto value = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); };
    run<Softmax>(t, in, out, kRows, cols);
    check_matrix(t, "OneFlow's forms", Softmax{}, y, value, unchanged);
    const k::Status status =
        k::cpu::log_softmax<OneFlowLoad<k::half>, OneFlowStore<float>, float>(k::cpu::Exec{1}, in, out, kRows, cols);
    t.expect(status.ok(), "OneFlow's template arguments: %s", status.reason());
    check_matrix(t, "OneFlow's template arguments", LogSoftmax{}, y, value, unchanged);
    run<Softmax>(t, in | Clamp(1), k::scale(2) | out, kRows, cols);
    check_matrix(
        t, "with maps", Softmax{}, y, [&](int64_t r, int64_t c) { return Real<>(std::fmin(x.value(r, c), 1)); },
        [](int64_t, int64_t, Real<> v) { return v * Real<>(2.0); });
  }
  CHECK_TALLY(t);
}

TEST_CASE("a user's functor gets packs no wider than it allows") {
  Tally t;
  for (const int64_t cols : {1, 7, 8, 12, 30, 64, 1001, 20000}) {
    for (const int64_t gap : {0, 1, 2, 4}) {
      for (const int64_t shift : {0, 1, 2, 4}) {
        const Matrix<float> x(24, kRows, cols, cols + gap, shift);
        Guarded<float> y(kRows, cols, cols + 4 - gap, 4 - shift);
        std::atomic<int64_t> broken{0};
        run<RmsNorm>(t, PickyLoad(x.data(), x.ld(), &broken), k::store(y.data(), y.ld()), kRows, cols);
        check_matrix(
            t, "a picky source", RmsNorm{}, y, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); }, unchanged);
        run<RmsNorm>(t, k::load(x.data(), x.ld()) | k::scale(2), k::scale(0.5) | PickyStore(y.data(), y.ld(), &broken),
                     kRows, cols);
        check_matrix(t, "a picky sink", RmsNorm{}, y, [&](int64_t r, int64_t c) { return Real<>(2 * x.value(r, c)); },
                     [](int64_t, int64_t, Real<> v) { return v * Real<>(0.5); });
        t.expect(broken == 0, "%d cols, gap %d, shift %d: %d packs too wide", int(cols), int(gap), int(shift),
                 int(broken));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("every element is loaded once and stored once") {
  Tally t;
  for (const int64_t cols : {1, 5, 16, 33, 1000, 5003, 300007}) {
    for (const int threads : {1, 3}) {
      const int64_t rows = 4;
      Counts counts(rows * cols);
      const k::Status status =
          k::cpu::layernorm(on_threads(threads), CountingLoad(&counts, cols), CountingStore(&counts, cols), rows, cols);
      t.expect(status.ok(), "%s", status.reason());
      for (size_t i = 0; i < counts.loads.size(); ++i) {
        t.expect(counts.loads[i] == 1 && counts.stores[i] == 1, "%d cols, %d threads, element %zu: %d loads, %d stores",
                 int(cols), threads, i, counts.loads[i].load(), counts.stores[i].load());
      }
    }
  }
  CHECK_TALLY(t);
}

// ---- effects: once for each element, wherever they stand ------------------------------------------------------------

TEST_CASE("a tee in place, inside of add, mul and affine, runs once, however often its row is read") {
  Tally t;
  for (const int64_t cols : {7, 64, 20000, 300007}) {
    const Matrix<float> x(25, kRows, cols, cols), before(26, kRows, cols, cols), beta(27, 1, cols, cols);
    Guarded<float> y(kRows, cols, cols);
    Guarded<int8_t> codes(kRows, cols, cols);
    Guarded<float> scales(kRows, 1, 1);
    const auto value = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); };
    const auto doubled = [&](int64_t r, int64_t c) { return Real<>(2 * before.value(r, c)); };
    // f(a source that doubles `res` where it lies) runs; then the doubled ones must lie there.
    const auto twice_in_place = [&](const char* what, const auto& f) {
      Matrix<float> res(26, kRows, cols, cols + 1);
      f(k::load(res.data(), res.ld()) | k::scale(2) | k::tee(res.data(), res.ld()));
      check_matrix(t, what, Plain{}, res, doubled, unchanged);
    };
    const auto in = k::load(x.data(), x.ld());
    const auto out = k::store(y.data(), y.ld());
    twice_in_place("add", [&](const auto& both) { run<LayerNorm>(t, in | k::add(both), out, kRows, cols); });
    check_matrix(
        t, "the sum", LayerNorm{}, y, [&](int64_t r, int64_t c) { return value(r, c) + doubled(r, c); }, unchanged);
    twice_in_place("mul",
                   [&](const auto& both) { run<RmsNorm>(t, in | k::mul(both) | k::shift(1), out, kRows, cols); });
    check_matrix(
        t, "the product", RmsNorm{}, y, [&](int64_t r, int64_t c) { return value(r, c) * doubled(r, c) + Real<>(1.0); },
        unchanged);
    twice_in_place("affine",
                   [&](const auto& both) { run<RmsNorm>(t, in | k::affine(both, beta.data()), out, kRows, cols); });
    check_matrix(
        t, "both", RmsNorm{}, y,
        [&](int64_t r, int64_t c) { return value(r, c) * doubled(r, c) + Real<>(beta.value(0, c)); }, unchanged);
    twice_in_place("add in add",
                   [&](const auto& both) { run<RmsNorm>(t, in | k::add(in | k::add(both)), out, kRows, cols); });
    check_matrix(
        t, "the sum of three", RmsNorm{}, y,
        [&](int64_t r, int64_t c) { return value(r, c) + value(r, c) + doubled(r, c); }, unchanged);
    twice_in_place("add in a sink", [&](const auto& both) { run<RmsNorm>(t, in, k::add(both) | out, kRows, cols); });
    check_matrix(t, "the sum behind", RmsNorm{}, y, value,
                 [&](int64_t r, int64_t c, Real<> v) { return v + doubled(r, c); });
    // A quantizing sink applies its maps twice: to find the scale, and to store.
    twice_in_place("add in front of quantize", [&](const auto& both) {
      run<RmsNorm>(t, in, k::add(both) | k::quantize(codes.data(), codes.ld(), scales.data()), kRows, cols);
    });
    twice_in_place("mul in what is quantized", [&](const auto& both) {
      run<RmsNorm>(t, in | k::mul(both), k::quantize(codes.data(), codes.ld(), scales.data()), kRows, cols);
    });
    twice_in_place("a copy", [&](const auto& both) {
      t.expect(k::cpu::copy(on_threads(2), in | k::add(both), out, kRows, cols).ok(), "copy");
    });
    check_matrix(
        t, "the copied sum", Plain{}, y, [&](int64_t r, int64_t c) { return value(r, c) + doubled(r, c); }, unchanged);
  }
  CHECK_TALLY(t);
}

TEST_CASE("the result may stand over what a tee wrote") {
  Tally t;
  for (const int64_t cols : {7, 64, 20000, 300007}) {
    const Matrix<float> x(29, kRows, cols, cols);
    Guarded<float> over(kRows, cols, cols + 2);
    run<LayerNorm>(t, k::load(x.data(), x.ld()) | k::scale(2) | k::tee(over.data(), over.ld()),
                   k::store(over.data(), over.ld()), kRows, cols);
    check_matrix(
        t, "over the tee", LayerNorm{}, over, [&](int64_t r, int64_t c) { return Real<>(2 * x.value(r, c)); },
        unchanged);
  }
  CHECK_TALLY(t);
}

namespace {

// A map with an effect of its own: it counts.
struct Counted : k::Functor {
  static constexpr bool has_effects = true;
  Counts* counts;
  int64_t cols;
  Counted(Counts* n, int64_t c) : counts(n), cols(c) {}
  template <int N>
  k::Pack<float, N> map(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) ++counts->loads[size_t(row * cols + col + i)];
    return v;
  }
  k::Identity without_effects() const { return {}; }
};

}  // namespace

TEST_CASE("effects of users' sources and maps happen once, also inside of others") {
  Tally t;
  for (const int64_t cols : {5, 1000, 20000}) {
    const int64_t rows = 3;
    const Matrix<float> x(28, rows, cols, cols);
    Guarded<int8_t> codes(rows, cols, cols);
    Guarded<float> scales(rows, 1, 1);
    const auto in = k::load(x.data(), x.ld());
    const auto once = [&](const char* what, const auto& f) {
      Counts counts(rows * cols);
      f(&counts);
      for (size_t i = 0; i < counts.loads.size(); ++i)
        t.expect(counts.loads[i] == 1, "%s, %d cols, element %zu: %d times", what, int(cols), i,
                 counts.loads[i].load());
    };
    const auto quantize = k::quantize(codes.data(), codes.ld(), scales.data());
    once("a reload in add",
         [&](Counts* n) { run<RmsNorm>(t, in | k::add(CountingLoad(n, cols) | k::scale(2)), quantize, rows, cols); });
    once("a map of a source",
         [&](Counts* n) { run<LayerNorm>(t, in | Counted(n, cols) | k::scale(2), quantize, rows, cols); });
    once("a map in mul",
         [&](Counts* n) { run<LayerNorm>(t, in | k::mul(in | Counted(n, cols)), quantize, rows, cols); });
    once("a map of a sink",
         [&](Counts* n) { run<LayerNorm>(t, in, k::scale(2) | Counted(n, cols) | quantize, rows, cols); });
  }
  CHECK_TALLY(t);
}

// ---- double ---------------------------------------------------------------------------------------------------------

TEST_CASE("a source in double is computed in double, also through float maps' constants and a tee") {
  const int64_t cols = 500;
  const RandomMatrix<double> x(18, kRows, cols, cols), gamma(19, 1, cols, cols);
  Guarded<double> y(kRows, cols, cols), copy(kRows, cols, cols);
  REQUIRE(k::cpu::layernorm(k::cpu::Exec{1}, k::load(x.data(), cols) | k::scale(0.1) | k::tee(copy.data(), cols),
                            k::affine(gamma.data()) | k::store(y.data(), cols), kRows, cols));
  y.download();
  copy.download();
  Tally t;
  for (int64_t r = 0; r < kRows; ++r) {
    Row<double> row;
    for (int64_t c = 0; c < cols; ++c) {
      row.push_back(Real<double>(x.value(r, c)) * constant<double>(0.1));
      t.expect(within(copy.get(r, c), row.back()), "tee, row %d, col %d: %.17g", int(r), int(c), copy.get(r, c));
    }
    LayerNorm{}.expect(row);
    for (int64_t c = 0; c < cols; ++c) row[size_t(c)] = row[size_t(c)] * Real<double>(gamma.value(0, c));
    const std::string problem = mismatch(r, row, [&](int64_t c) { return y.get(r, c); });
    t.expect(problem.empty(), "%s", problem.c_str());
  }
  CHECK_TALLY(t);
}
