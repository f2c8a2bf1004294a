// Operands that a workspace holds, rounded once. That results are right with one, every test of products sees that
// calls expect(), for inputs.
#include "support/gpu_products.cuh"

using namespace test;

namespace {

using Weights = Plain<k::half, DeviceMemory>;

template <class X>
k::MatmulPlan plan_of(const k::Exec& ex, const X& x, const Weights& w, const Sizes& s, k::MatmulPolicy policy = {},
                      const k::Groups& groups = {}) {
  k::MatmulPlan plan;
  Device<float> y(1, 1, 1);
  const k::Status status =
      k::matmul_plan(ex, x, w.source(), k::store(y.data(), s.n), {s.m, s.n, s.k}, groups, policy, plan);
  INFO(status.reason());
  REQUIRE(status.ok());
  return plan;
}

template <class X>
size_t bytes_of(const X& x, const Weights& w, const Sizes& s, const k::MatmulPolicy& policy = {},
                const k::Groups& groups = {}) {
  Device<float> y(1, 1, 1);
  return k::matmul_workspace_bytes(k::Exec{}, x, w.source(), k::store(y.data(), s.n), {s.m, s.n, s.k}, groups, policy);
}

// x is a source of what `value` says, and rounded for three tokens or more.
template <class X, class Value>
void expect_rounded(const char* what, const Sizes& s, const X& x, const Value& value, const Weights& w,
                    const k::Groups& groups = {}, const std::vector<int32_t>& offsets = {}) {
  INFO(describe(what, s, Path::automatic));
  const int64_t rows = groups.offsets != nullptr ? s.m : s.m * groups.count, ld = (s.k + 7) / 8 * 8;
  const bool rounds = s.m > 2 || groups.several();
  const size_t bytes = bytes_of(x, w, s, {}, groups);
  REQUIRE(bytes == (rounds ? size_t(rows * ld) * sizeof(k::half) : 0));
  Device<k::half> memory(rows, ld, ld);
  Device<float> y(rows, s.n, s.n + 3, 1);
  for (int64_t r = 0; r < rows; ++r) for (int64_t i = 0; i < s.n; ++i) y.set(r, i, -7.f);
  y.upload();
  const auto before = memory.bytes();
  Stream stream;
  const k::Exec ex = k::Exec(stream).workspace(memory.data(), bytes);
  CHECK(plan_of(ex, x, w, s, {}, groups).inputs_rounded == rounds);
  CHECK(plan_of(stream, x, w, s, {}, groups).inputs_rounded == false);
  const std::string why = plan_of(stream, x, w, s, {}, groups).why_not;
  CHECK((why.find("workspace") != std::string::npos) == rounds);
  REQUIRE(k::matmul(ex, x, w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, groups).ok());
  stream.wait();
  CHECK(compare(y, [&](int64_t r) {
          int64_t group = offsets.empty() ? r / s.m : 0;
          while (group < int64_t(offsets.size()) - 1 && r >= offsets[size_t(group + 1)]) ++group;
          Row<> row(size_t(s.n), Real<>(-7));
          if (group == groups.count) return row;
          for (int64_t i = 0; i < s.n; ++i)
            row[size_t(i)] = product(r, group * s.n + i, s.k, value, w, units(Path::gemm, s.k), 0x1p-10);
          return row;
        }) == "");
  memory.download();
  CHECK(memory.intact());
  CHECK((memory.bytes() != before) == (rounds && (offsets.empty() || offsets.back() > 0)));
}

}  // namespace

TEST_CASE("rounded inputs: sources of every width, tokens and columns of every number") {
  Shortened shortened;
  for (const int64_t cols : {1, 40, 333, 2200}) {
    const Weights w(67, cols, (8 - cols % 8) % 8, 0);
    for (const int64_t m : {1, 2, 3, 33, 130, 300}) {
      if (shortened.leaves_out()) continue;
      const Matrix<float> floats(21, m, cols, cols + 1, 1, 1);
      const Matrix<k::half> halves(22, m, cols, (cols + 15) / 8 * 8, 0, 1), between(23, m, cols, cols + 3, 1, 1);
      const Matrix<float> gamma(24, 1, cols, cols, 0, 1);
      const auto value = [](const auto& x) {
        return [&x](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      };
      const auto load = [](const auto& x) {
        return k::load(static_cast<const std::decay_t<decltype(*x.data())>*>(x.data()), x.ld());
      };
      const Sizes s{m, 67, cols};
      expect_rounded("float", s, load(floats), value(floats), w);
      // Their rows begin anywhere, those of the weights do not.
      expect_rounded("half between", s, load(between), value(between), w);
      expect_rounded("with a map", s, load(halves) | k::mul(static_cast<const float*>(gamma.data())),
                     [&](int64_t r, int64_t i) { return Real<>(halves.value(r, i)) * Real<>(gamma.value(0, i)); }, w);
    }
  }
}

TEST_CASE("rounded inputs: groups, some empty, and rows that are not there") {
  const int64_t n = 40;
  for (const int64_t cols : {72, 1000}) {
    for (const std::vector<int32_t>& offsets :
         {std::vector<int32_t>{0, 5, 5, 140, 141, 300}, std::vector<int32_t>{0, 0, 0}, std::vector<int32_t>{0, 129}}) {
      const int64_t groups = int64_t(offsets.size()) - 1, rows = offsets.back() + 7;
      // Rows behind the last group are NaN.
      const Numbers<int32_t, DeviceMemory> ends(offsets);
      const Weights w(groups * n, cols, 0, 0);
      Device<float> x(rows, cols, cols, 0, Poison::nan);
      const Matrix<float> values(25, rows, cols, cols, 0, 1);
      for (int64_t r = 0; r < offsets.back(); ++r) for (int64_t c = 0; c < cols; ++c) x.set(r, c, values.get(r, c));
      x.upload();
      expect_rounded("ragged", {rows, n, cols}, k::load(static_cast<const float*>(x.data()), cols),
                     [&](int64_t r, int64_t i) { return Real<>(x.get(r, i)); }, w, {groups, ends.data()}, offsets);
    }
    const int64_t batch = 3;
    for (const int64_t m : {1, 37}) {
      const Matrix<float> x(26, batch * m, cols, cols, 0, 1);
      expect_rounded("batch", {m, n, cols}, k::load(static_cast<const float*>(x.data()), cols),
                     [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, Weights(batch * n, cols, 0, 0),
                     {batch});
    }
  }
}

namespace {

// Weights that are rounded for `from` tokens, and not for one fewer. source: as a call takes them.
template <class W, class Source>
void expect_weights(const char* what, int64_t from, const W& w, int64_t n, int64_t cols, const Source& source) {
  const int64_t ld = (cols + 7) / 8 * 8;
  const auto in = [](const auto& x) { return k::load(static_cast<const k::half*>(x.data()), x.ld()); };
  for (const int64_t m : {from - 1, from}) {
    INFO(what << ", " << m << " tokens");
    const bool rounds = m == from;
    const Matrix<k::half> x(31, m, cols, cols + 8 - cols % 8, 0, 1);
    Device<float> y(m, n, n + 3, 1);
    const k::MatmulShape shape{m, n, cols};
    const auto sink = k::store(y.data(), y.ld());
    Stream stream;
    const size_t bytes = k::matmul_workspace_bytes(stream, in(x), source, sink, shape);
    REQUIRE(bytes == (rounds ? size_t(n * ld) * sizeof(k::half) : 0));
    Device<k::half> memory(n, ld, ld);
    const auto before = memory.bytes();
    const k::Exec ex = k::Exec(stream).workspace(memory.data(), size_t(n * ld) * sizeof(k::half));
    k::MatmulPlan plan, without;
    REQUIRE(k::matmul_plan(ex, in(x), source, sink, shape, {}, {}, plan).ok());
    REQUIRE(k::matmul_plan(stream, in(x), source, sink, shape, {}, {}, without).ok());
    CHECK(plan.weights_rounded == rounds);
    CHECK(!without.weights_rounded);
    if (rounds) CHECK(std::string(without.why_not).substr(0, 8) == "weights:");
    REQUIRE(k::matmul(ex, in(x), source, sink, shape).ok());
    stream.wait();
    CHECK(compare(y, [&](int64_t r) {
            Row<> row;
            for (int64_t i = 0; i < n; ++i)
              row.push_back(product(
                  r, i, cols, [&](int64_t a, int64_t c) { return Real<>(x.value(a, c)); }, w, units(Path::gemm, cols),
                  0x1p-10));
            return row;
          }) == "");
    memory.download();
    CHECK(memory.intact());
    CHECK((memory.bytes() != before) == rounds);
  }
}

}  // namespace

TEST_CASE("rounded weights: codes of 8 and 4 bits, and maps") {
  const int64_t n = 41, cols = 128;
  const auto expect_codes = [&](const char* what, int64_t from, const auto& w) {
    expect_weights(what, from, w, n, cols, w.source());
  };
  expect_codes("int8, a scale for a row", 768, Scaled<int8_t, float, DeviceMemory>(n, cols, Grain::row, 1, 0, 0));
  expect_codes("int8, a scale for 32", 768, Scaled<int8_t, k::half, DeviceMemory>(n, cols, Grain::group, 32, 0, 0));
  expect_codes("e4m3, a scale for a row", 4096,
               Scaled<k::float8_e4m3, float, DeviceMemory>(n, cols, Grain::row, 1, 0, 0));
  expect_codes("e4m3, a scale for a block", 768,
               Scaled<k::float8_e4m3, float, DeviceMemory>(n, cols, Grain::block, 16, 0, 0));
  expect_codes("int4 with zeros", 768, FourBit<k::half, true, DeviceMemory>(n, cols, 32, 0, 0));
  expect_codes("gf4", 768, EightInAWord<DeviceMemory>(n, cols, 0, 0));
  expect_codes("fp4", 768, FourBitFloats<k::float8_e8m0, DeviceMemory>(n, cols, 32, 0, 0));
  expect_codes("codes between multiples of 16 bytes", 3, EightInAWord<DeviceMemory>(n, cols, 1, 1));
  for (const int64_t odd : {1, 77, 1000}) {
    const Weights w(n, odd, 3, 1);
    expect_weights(
        "half times a number", 5, [&](int64_t r, int64_t c) { return 0.5 * w(r, c); }, n, odd,
        w.source() | k::scale(0.5));
  }
}

TEST_CASE("rounded weights: those of a gate, stacked, and inputs besides") {
  const int64_t m = 770, n = 40, cols = 96, ld = cols;
  const Matrix<float> x(33, m, cols, cols, 0, 1);
  const auto in = k::load(static_cast<const float*>(x.data()), cols);
  const auto value = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); };
  const FourBit<k::half, false, DeviceMemory> w(2 * n, cols, 32, 0, 0);
  const auto rows = [&](int64_t first) {
    return k::dequant(k::int4(static_cast<const uint32_t*>(w.codes.data()) + first * w.codes.ld(), w.codes.ld() * 8),
                      k::group_scales(static_cast<const k::half*>(w.scales.data()) + first * w.scales.ld(),
                                      w.scales.ld(), 32));
  };
  const auto want = [&](int64_t r, int64_t i) {
    return product(r, i, cols, value, w, units(Path::gemm, cols), 0x1p-9);
  };
  Stream stream;
  Device<float> y(m, 2 * n, 2 * n);
  // First with room for the inputs alone.
  for (const bool all : {false, true}) {
    const size_t of_inputs = size_t(m * ld) * sizeof(k::half), bytes = of_inputs + size_t(2 * n * ld) * sizeof(k::half);
    Device<k::half> memory(m + 2 * n, ld, ld);
    const k::Exec ex = k::Exec(stream).workspace(memory.data(), all ? bytes : bytes - 1);
    const auto run = [&](const auto& weights, const auto& sink, int64_t outputs) {
      const k::MatmulShape shape{m, outputs, cols};
      CHECK(k::matmul_workspace_bytes(ex, in, weights, sink, shape) == bytes);
      k::MatmulPlan plan;
      REQUIRE(k::matmul_plan(ex, in, weights, sink, shape, {}, {}, plan).ok());
      CHECK(plan.inputs_rounded);
      CHECK(plan.weights_rounded == all);
      REQUIRE(k::matmul(ex, in, weights, sink, shape).ok());
      stream.wait();
    };
    run(k::gated(rows(0), rows(n)), k::glu() | k::store(y.data(), y.ld()), n);
    y.download();
    for (int64_t r = 0; r < m; r += 7) {
      for (int64_t i = 0; i < n; ++i) {
        const Real<> gate = want(r, i), up = want(r, n + i);
        const double sigmoid = 1 / (1 + std::exp(-gate.v));
        const double error = up.e + std::fabs(up.v) * gate.e + gate.e * up.e + 1e-4;
        if (std::fabs(y.get(r, i) - sigmoid * up.v) > error) FAIL_CHECK("gate, row " << r << ", column " << i);
      }
    }
    run(k::stacked(rows(0), n, rows(n), n), k::store(y.data(), y.ld()), 2 * n);
    CHECK(compare(y, [&](int64_t r) {
            Row<> row;
            for (int64_t i = 0; i < 2 * n; ++i) row.push_back(want(r, i));
            return row;
          }) == "");
    memory.download();
    CHECK(memory.intact());
  }
}

TEST_CASE("rounded inputs: only a workspace that is large enough is used") {
  const Sizes s{40, 64, 512};
  const Matrix<float> x(27, s.m, s.k, s.k, 0, 1);
  const Matrix<k::half> halves(28, s.m, s.k, s.k, 0, 1);
  const Weights w(s.n, s.k, 0, 0);
  const auto floats = k::load(static_cast<const float*>(x.data()), s.k);
  const auto plain = k::load(static_cast<const k::half*>(halves.data()), s.k);
  Device<k::half> memory(1, s.m * s.k + 8, s.m * s.k + 8);
  Device<float> y(s.m, s.n, s.n);
  Stream stream;
  const size_t bytes = bytes_of(floats, w, s);
  const auto with = [&](size_t less, int shift = 0) {
    return k::Exec(stream).workspace(memory.data() + shift, bytes - less);
  };
  CHECK(plan_of(with(0), floats, w, s).inputs_rounded);
  CHECK(std::string(plan_of(with(0), floats, w, s).why_not) == "");
  CHECK(!plan_of(with(1), floats, w, s).inputs_rounded);
  CHECK(!plan_of(with(0), plain, w, s).inputs_rounded);
  CHECK(bytes_of(plain, w, s) == 0);
  CHECK(bytes_of(floats, w, s, {Path::gemv}) == 0);
  CHECK(!plan_of(with(0), floats, w, s, {Path::gemv}).inputs_rounded);

  const auto run = [&](const k::Exec& ex, bool invariant) {
    k::MatmulPolicy policy;
    policy.batch_invariant = invariant;
    return k::matmul(ex, floats, w.source(), k::store(y.data(), s.n), {s.m, s.n, s.k}, policy);
  };
  CHECK(run(with(1), false).ok());
  CHECK(!run(with(0, 1), false).ok());
  CHECK(!run(with(1), true).ok());
  CHECK(run(with(0), true).ok());
  CHECK(run(stream, true).ok());
  stream.wait();
}

TEST_CASE("rounded inputs: a row's bits do not depend on its batch") {
  const int64_t most = 300, n = 203, cols = 1032;
  const Matrix<float> x(29, most, cols, cols, 0, 1);
  const Weights w(n, cols, 8, 0);
  k::MatmulPolicy policy;
  policy.batch_invariant = true;
  Stream stream;
  Device<k::half> memory(most, cols, cols);
  const auto run = [&](Device<float>& y, int64_t first) {
    const auto in = k::normed(k::load(x.data() + first * cols, cols), k::RmsNorm{});
    const int64_t m = most - first;
    REQUIRE(bytes_of(in, w, {m, n, cols}, policy) == size_t(m * cols) * sizeof(k::half));
    REQUIRE(k::matmul(k::Exec(stream).workspace(memory.data(), size_t(most * cols) * sizeof(k::half)), in, w.source(),
                      k::store(y.data(), n), {m, n, cols}, policy)
                .ok());
    stream.wait();
    y.download();
  };
  Device<float> whole(most, n, n);
  run(whole, 0);
  for (const int64_t m : {1, 2, 5, 33, 161}) {
    Device<float> y(m, n, n);
    run(y, most - m);
    int different = 0;
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < n; ++c) different += !(y.get(r, c) == whole.get(most - m + r, c));
    }
    INFO(m << " tokens");
    CHECK(different == 0);
  }
}

// The kernel ahead writes x late, and the one behind may begin early: nothing is read or rounded before.
TEST_CASE("rounded inputs: in a chain, launched early, and in a graph") {
  const int64_t n = 512, m = 20;
  const Matrix<float> from(30, m, n, n, 0, 1);
  const Weights w(n, n, 0, 0, 0.04);
  Device<float> a(m, n, n), b(m, n, n), c(m, n, n), last(m, m, m), mapped(m, m, m);
  Device<k::half> memory(2 * m, n, n), written(m, n, n);
  Stream stream;
  const auto chain = [&](bool early, bool constant) {
    k::MatmulPolicy policy;
    policy.weights_ready = early;
    const k::Exec ex = k::Exec(stream)
                           .programmatic(early)
                           .constant_weights(constant)
                           .workspace(memory.data(), size_t(2 * m * n) * sizeof(k::half));
    slow_copy<<<4, 128, 0, stream>>>(static_cast<const float*>(from.data()), a.data(), m * n, 200000);
    const auto step = [&](const float* in, float* out) {
      CHECK(k::matmul(ex, k::normed(k::load(in, n), k::RmsNorm{}), w.source(), k::store(out, n), {m, n, n}, policy)
                .ok());
    };
    step(a.data(), b.data());
    for (int i = 0; i < 6; ++i) step(b.data(), c.data()), step(c.data(), b.data());
    // Weights that the kernel ahead of this call writes.
    const auto in = k::load(static_cast<const float*>(b.data()), n);
    CHECK(k::matmul(ex, in, w.source(), k::store(written.data(), n), {m, n, n}, policy).ok());
    const auto rows = k::load(static_cast<const k::half*>(written.data()), n);
    CHECK(k::matmul(ex, in, rows, k::store(last.data(), m), {m, m, n}).ok());
    // Those that a kernel of the call itself makes, of what this one writes.
    CHECK(k::matmul(ex, k::load(static_cast<const float*>(c.data()), n), w.source(), k::store(written.data(), n),
                    {m, n, n}, policy)
              .ok());
    CHECK(k::matmul(ex, in, rows | k::scale(0.5), k::store(mapped.data(), m), {m, m, n}).ok());
  };
  chain(false, false);
  stream.wait();
  b.download(), last.download(), mapped.download();
  const auto want = b.bytes(), want_last = last.bytes(), want_mapped = mapped.bytes();
  for (int64_t i = 0; i < n; ++i) REQUIRE(std::isfinite(b.get(m - 1, i)));
  for (int64_t i = 0; i < m; ++i) REQUIRE((std::isfinite(last.get(m - 1, i)) && std::isfinite(mapped.get(m - 1, i))));
  for (int round = 0; round < 6; ++round) {
    for (Device<float>* y : {&a, &b, &c}) check_cuda(cudaMemsetAsync(y->data(), 0xff, size_t(m * n) * 4, stream));
    check_cuda(cudaMemsetAsync(written.data(), 0xff, size_t(m * n) * 2, stream));
    check_cuda(cudaMemsetAsync(memory.data(), 0xff, size_t(2 * m * n) * 2, stream));
    run_in(stream, round % 2 == 1, [&] { chain(true, round > 2); });
    b.download(), last.download(), mapped.download();
    CHECK(b.bytes() == want);
    CHECK(last.bytes() == want_last);
    CHECK(mapped.bytes() == want_mapped);
  }
}
