// Products with weights of 8 and 4 bits that are copied to shared memory as they lie, and decoded when they are
// multiplied: every tile, and every way of their codes, scales and inputs to it.
#include "support/gpu_products.cuh"

#include <kernels/rope.h>

using namespace test;

namespace {

// A tile, or, with no rows, a block that weights stream through.
Path path_of(const TileSize& way) { return way.rows > 0 ? Path::gemm : Path::skinny; }

// Those that the GPU's code has: with wgmma, or without.
const std::vector<TileSize>& ways() {
  static const std::vector<TileSize> all = [] {
    const Matrix<k::half> x(1, 40, 64, 64, 0, 1);
    const Scaled<int8_t, float, DeviceMemory> w(64, 64, Grain::row, 1, 0, 0);
    Device<float> y(40, 64, 64);
    k::MatmulPlan plan;
    const bool wgmma =
        k::matmul_plan(Stream(), k::load(static_cast<const k::half*>(x.data()), 64), w.source(),
                       k::store(y.data(), 64), {40, 64, 64}, {}, TileSize{32, 128}.in({Path::gemm}), plan)
            .ok();
    return wgmma ? std::vector<TileSize>{{32, 128}, {64, 128}, {128, 256}, {0, 0}}
                 : std::vector<TileSize>{{64, 128}, {128, 128}, {0, 0}};
  }();
  return all;
}

// Every way with this product: f(exec, policy) makes it. Groups do not stream.
template <class T, class Run, class Want>
void every_way(const char* what, const Sizes& s, Device<T>& y, const Run& run, const Want& want, bool streams = true) {
  for (const TileSize& way : ways()) {
    if (way.rows == 0 && !streams) continue;
    const std::string name = std::string(what) + ", tile of " + std::to_string(way.tokens);
    expect(
        name.c_str(), s, path_of(way), y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) { return run(ex, way.in(policy)); }, want);
  }
}

constexpr Sizes kSizes[] = {{1, 3, 8},       {33, 300, 96},   {130, 70, 1064}, {64, 128, 4128},
                            {31, 257, 2080}, {5, 24, 8448}, {7, 40, 72},     {40, 16, 40},  {20, 9000, 32}};

template <class TX>
constexpr double kRounded = std::is_same<TX, k::bfloat16>::value ? 0x1p-7 : 0x1p-9;  // a scale, and what it gives

int streamed = 0;  // products of all_sizes() that weights could stream through

// make(n, k): weights.
template <class TX = k::half, class Make>
void all_sizes(const char* what, const Make& make) {
  for (const Sizes& s : kSizes) {
    const auto w = make(s.n, s.k);
    const Matrix<TX> x(21, s.m, s.k, s.k + 8, 8, 1);
    Device<float> y(s.m, s.n, s.n + 3, 1);
    const auto copies = [&](const k::MatmulPolicy& policy) {
      k::MatmulPlan plan;
      return k::matmul_plan(Stream(), k::load(static_cast<const TX*>(x.data()), x.ld()), w.source(),
                            k::store(y.data(), y.ld()), {s.m, s.n, s.k}, {}, policy, plan)
                 .ok() &&
             plan.weights_copied;
    };
    const bool streams = copies({Path::skinny});
    streamed += streams;
    for (const TileSize& way : ways()) CHECK((!streams || copies(way.in({path_of(way)}))));
    every_way(
        what, s, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(ex, k::load(static_cast<const TX*>(x.data()), x.ld()), w.source(),
                           k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k),
              kRounded<TX>);
        },
        streams);
  }
}

// Codes of one byte with a scale and a zero point for each group, whose rows begin with a word, or somewhere.
template <class S>
struct WithZeros {
  Matrix<int8_t> codes;
  int64_t group;
  Matrix<S> scales;
  Guarded<uint8_t, DeviceMemory> zeros;
  WithZeros(int64_t rows, int64_t cols, int64_t g, bool in_words = false)
      : codes(12, rows, cols, (cols + 31) / 16 * 16, 0, 40), group(g),
        scales(13, rows, (cols + g - 1) / g, (cols + g - 1) / g / 4 * 4 + (in_words ? 4 : 5), in_words ? 0 : 1, 0.1),
        zeros(rows, (cols + g - 1) / g, scales.ld(), in_words ? 0 : 3, Poison::nan) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < zeros.cols(); ++c) zeros.set(r, c, uint8_t(mix(uint64_t(r * 77 + c))));
    }
    zeros.upload();
  }
  auto source() const {
    return k::dequant(k::load(static_cast<const int8_t*>(codes.data()), codes.ld()),
                      k::group_scales(static_cast<const S*>(scales.data()), scales.ld(), int(group))
                          .zeros(static_cast<const uint8_t*>(zeros.data())));
  }
  double operator()(int64_t row, int64_t col) const {
    return (codes.value(row, col) - double(zeros.get(row, col / group))) * scales.value(row, col / group);
  }
};

// A product with a scale for each row.
using ByRow = Scaled<int8_t, float, DeviceMemory>;
void expect_int8(const char* what, const Sizes& s, Path path, const Matrix<k::half>& x, const ByRow& w,
                 Device<float>& y) {
  expect(
      what, s, path, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), s.k), w.source(), k::store(y.data(), s.n),
                         {s.m, s.n, s.k}, policy);
      },
      [&](int64_t m, int64_t n) {
        return product(
            m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k),
            kRounded<k::half>);
      });
}

int64_t to_multiple(int64_t cols, int64_t of) { return (of - cols % of) % of; }

}  // namespace

TEST_CASE("matmul tiles: 8 bits") {
  streamed = 0;
  const auto gap = [](int64_t c) { return to_multiple(c, 16) + 16; };
  all_sizes("e5m2", [&](int64_t n, int64_t c) { return Plain<k::float8_e5m2, DeviceMemory>(n, c, gap(c), 16); });
  all_sizes("int8 by row", [&](int64_t n, int64_t c) {
    return Scaled<int8_t, float, DeviceMemory>(n, c, Grain::row, 1, gap(c), 0);
  });
  all_sizes<k::bfloat16>("e4m3, one scale", [&](int64_t n, int64_t c) {
    return Scaled<k::float8_e4m3, float, DeviceMemory>(n, c, Grain::tensor, 1, gap(c), 16);
  });
  all_sizes<k::bfloat16>("e4m3 by block", [&](int64_t n, int64_t c) {
    return Scaled<k::float8_e4m3, float, DeviceMemory>(n, c, Grain::block, 128, gap(c), 0);
  });
  for (const int group : {16, 32, 64, 256}) {
    all_sizes("int8 by group, half", [&](int64_t n, int64_t c) {
      return Scaled<int8_t, k::half, DeviceMemory>(n, c, Grain::group, group, gap(c), 0);
    });
  }
  for (const int group : {16, 64, 1 << 14}) {
    all_sizes("int8 with zero points", [&](int64_t n, int64_t c) { return WithZeros<k::half>(n, c, group); });
    all_sizes<k::bfloat16>("int8 with zero points", [&](int64_t n, int64_t c) {
      return WithZeros<float>(n, c, group);
    });
    all_sizes("int8 with zero points", [&](int64_t n, int64_t c) { return WithZeros<k::half>(n, c, group, true); });
  }
  all_sizes("e4m3 with scales of one byte", [&](int64_t n, int64_t c) {
    return Scaled<k::float8_e4m3, k::float8_e5m2, DeviceMemory>(n, c, Grain::group, 32, gap(c), 0);
  });
  all_sizes("e4m3 by group, float", [&](int64_t n, int64_t c) {
    return Scaled<k::float8_e4m3, float, DeviceMemory>(n, c, Grain::group, 16, gap(c), 0);
  });
  CHECK(streamed >= 20);
}

TEST_CASE("matmul tiles: 4 bits") {
  streamed = 0;
  const auto gap = [](int64_t c) { return to_multiple(c, 32) / 8 + 4; };
  for (const int group : {32, 64, 128, 1024}) {
    for (const bool in_words : {false, true}) {
      all_sizes("int4", [&](int64_t n, int64_t c) {
        return FourBit<k::half, false, DeviceMemory>(n, c, group, gap(c), 0, in_words);
      });
      all_sizes<k::bfloat16>("uint4", [&](int64_t n, int64_t c) {
        return FourBit<float, true, DeviceMemory>(n, c, group, gap(c), 4, in_words);
      });
    }
  }
  all_sizes<k::bfloat16>("int4 and bfloat16", [&](int64_t n, int64_t c) {
    return FourBit<k::bfloat16, false, DeviceMemory>(n, c, 32, gap(c), 0, true);
  });
  all_sizes("uint4 and half", [&](int64_t n, int64_t c) {
    return FourBit<k::half, true, DeviceMemory>(n, c, 128, gap(c), 0, true);
  });
  all_sizes("gf4", [&](int64_t n, int64_t c) { return EightInAWord<DeviceMemory>(n, c, gap(c), 0); });
  all_sizes<k::bfloat16>("gf4", [&](int64_t n, int64_t c) { return EightInAWord<DeviceMemory>(n, c, gap(c), 4); });
  all_sizes<k::bfloat16>("fp4, scales of e8m0", [&](int64_t n, int64_t c) {
    return FourBitFloats<k::float8_e8m0, DeviceMemory>(n, c, 32, gap(c), 4);
  });
  CHECK(streamed >= 20);
}

TEST_CASE("matmul tiles: one to eight blocks share K") {
  const bool wgmma = ways().front().tokens == 32;
  const TileSize tile{64, 128};
  constexpr int kStepsFor[] = {8, 25, 43, 77, 121, 174, 237, 309};  // as tuning::cost_of_codes() has it
  for (int splits = 1; splits <= 8; ++splits) {
    const Sizes s{40, 24, 64 * kStepsFor[splits - 1] - 24};
    const ByRow w(s.n, s.k, Grain::row, 1, to_multiple(s.k, 16) + 16, 0);
    const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 1);
    Device<float> y(s.m, s.n, s.n);
    k::MatmulPlan plan;
    REQUIRE(k::matmul_plan(Stream(), k::load(static_cast<const k::half*>(x.data()), s.k), w.source(),
                           k::store(y.data(), s.n), {s.m, s.n, s.k}, {}, tile.in({Path::gemm}), plan));
    CHECK(plan.splits == (wgmma ? splits : 1));
    expect_always((std::to_string(splits) + " blocks").c_str(), s, Path::gemm, y,
                  [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
                    return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), s.k), w.source(),
                                     k::store(y.data(), s.n), {s.m, s.n, s.k}, tile.in(policy));
                  },
                  [&](int64_t m, int64_t n) {
                    return product(
                        m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w,
                        units(Path::gemm, s.k), kRounded<k::half>);
                  });
  }
}

// Rows that no tensor map finds, and inputs that are read through their functors.
TEST_CASE("matmul tiles: gates, stacked and paired weights, normalized inputs") {
  for (const Sizes s : {Sizes{35, 64, 288}, Sizes{130, 192, 1056}, Sizes{9, 64, 8448}}) {
    const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 0.3);
    const FourBit<k::half, false, DeviceMemory> four(s.n, s.k, 32, 4, 4, true), up(s.n, s.k, 32, 0, 0, true);
    const Scaled<int8_t, float, DeviceMemory> eight(s.n, s.k, Grain::row, 1, to_multiple(s.k, 16), 0),
        other(s.n, s.k, Grain::row, 1, to_multiple(s.k, 16) + 16, 16);
    const auto in = k::load(static_cast<const k::half*>(x.data()), s.k);
    const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
    const double u = units(Path::gemm, s.k), rounded = kRounded<k::half>;
    Device<float> y(s.m, s.n, s.n + 1), both(s.m, 2 * s.n, 2 * s.n);
    const auto weights = [&](const char* what, const auto& w, const auto& more) {
      every_way(
          (std::string("swiglu, ") + what).c_str(), s, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, k::gated(w.source(), more.source()), k::swiglu() | k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return silu(product(m, n, s.k, value, w, u, rounded)) * product(m, n, s.k, value, more, u, rounded);
          });
      every_way(
          (std::string("stacked, ") + what).c_str(), {s.m, 2 * s.n, s.k}, both,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, k::stacked(w.source(), s.n, more.source(), s.n), k::store(both.data(), both.ld()),
                             {s.m, 2 * s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return n < s.n ? product(m, n, s.k, value, w, u, rounded)
                           : product(m, n - s.n, s.k, value, more, u, rounded);
          });
      k::MatmulPlan plan;
      REQUIRE(k::matmul_plan(Stream(), in, w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, {}, {Path::skinny},
                             plan));
      CHECK(plan.weights_copied);
      // Heads of 64, of which rows i and 32 + i are neighbours.
      const auto paired = k::Paired<std::decay_t<decltype(w.source())>>(w.source(), 64, 32);
      every_way(
          (std::string("paired, ") + what).c_str(), s, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, paired, StoreOfPairs(y, paired), {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) { return product(m, paired.origin(n), s.k, value, w, u, rounded); });
      const std::vector<Row<>> normal = rmsnorm_rows(s, 1e-6, value);
      every_way(
          (std::string("rmsnorm, ") + what).c_str(), s, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, k::normed(in, k::RmsNorm{}.eps(1e-6f)), w.source(), k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return product(
                m, n, s.k, [&](int64_t r, int64_t i) { return normal[size_t(r)][size_t(i)]; }, w, u, 2 * rounded);
          });
    };
    weights("4 bits", four, up);
    weights("8 bits", eight, other);
  }
}

TEST_CASE("matmul tiles: experts") {
  const int64_t n = 72, cols = 320, groups = 4, rows = 260;
  const std::vector<int32_t> offsets{0, 5, 5, 140, 250};
  Device<int32_t> ends(1, groups + 1, groups + 1);
  for (size_t i = 0; i < offsets.size(); ++i) ends.set(0, int64_t(i), offsets[i]);
  ends.upload();
  const Matrix<k::half> x(1, rows, cols, cols, 0, 1);
  const FourBit<k::half, false, DeviceMemory> w(groups * n, cols, 64, 0, 0, true);
  const auto value = [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); };
  const auto in = k::load(static_cast<const k::half*>(x.data()), cols);
  Device<float> y(rows, n, n);
  for (int64_t r = 0; r < rows; ++r) for (int64_t i = 0; i < n; ++i) y.set(r, i, -7.f);
  y.upload();
  every_way(
      "ragged", {rows, n, cols}, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, in, w.source(), k::store(y.data(), n), {rows, n, cols}, k::Groups{groups, ends.data()},
                         policy);
      },
      [&](int64_t m, int64_t i) {
        int64_t g = 0;
        while (g < groups && m >= offsets[size_t(g + 1)]) ++g;
        if (g == groups) return Real<>(-7);
        return product(m, g * n + i, cols, value, w, units(Path::gemm, cols), kRounded<k::half>);
      },
      false);
  // Rows in another order, some of them twice.
  std::vector<int32_t> order;
  for (int64_t r = 0; r < rows; ++r) order.push_back(int32_t(r * 7 % rows));
  Device<int32_t> orders(1, rows, rows);
  for (int64_t r = 0; r < rows; ++r) orders.set(0, r, order[size_t(r)]);
  orders.upload();
  every_way(
      "gathered", {rows, n, cols}, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::gathered(in, static_cast<const int32_t*>(orders.data()), 2), w.source(),
                         k::store(y.data(), n), {rows, n, cols}, policy);
      },
      [&](int64_t r, int64_t i) {
        return product(order[size_t(r)] / 2, i, cols, value, w, units(Path::gemm, cols), kRounded<k::half>);
      });
  const int64_t m = rows / groups;
  every_way(
      "batch", {m, n, cols}, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, in, w.source(), k::store(y.data(), n), {m, n, cols}, k::Groups{groups}, policy);
      },
      [&](int64_t r, int64_t i) {
        return product(r, r / m * n + i, cols, value, w, units(Path::gemm, cols), kRounded<k::half>);
      },
      false);
}

// Inputs and offsets of the kernel ahead, which lets this one begin early; with it come the weights. A token's bits,
// whatever tokens are beside it.
TEST_CASE("matmul tiles: early weights and batch_invariant") {
  const Sizes s{140, 264, 4224};
  const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 1);
  const Device<k::half> late(s.m, s.k, s.k);
  const FourBit<k::half, true, DeviceMemory> w(s.n, s.k, 128, 0, 0, true);
  Device<int32_t> ends(1, 2, 2), late_ends(1, 2, 2);
  ends.set(0, 0, 0), ends.set(0, 1, int32_t(s.m));
  ends.upload();
  Device<float> y(s.m, s.n, s.n), few(s.m, s.n, s.n);
  constexpr int64_t kLate = 4000000;  // cycles: milliseconds
  for (const bool offsets : {false, true}) {
    every_way(
        offsets ? "early, offsets" : "early", s, y,
        [&](const k::Exec& ex, k::MatmulPolicy policy) {
          policy.weights_ready = true;
          const int64_t n = s.m * s.k;
          check_cuda(cudaMemsetAsync(late.data(), 0xff, size_t(n) * 2, ex.stream()));
          check_cuda(cudaMemsetAsync(late_ends.data(), 0, 8, ex.stream()));
          if (offsets) {
            check_cuda(cudaMemcpyAsync(late.data(), x.data(), size_t(n) * 2, cudaMemcpyDeviceToDevice, ex.stream()));
            slow_copy<<<1, 32, 0, ex.stream()>>>(static_cast<const int32_t*>(ends.data()), late_ends.data(), 2, kLate);
          } else {
            slow_copy<<<1, 1024, 0, ex.stream()>>>(static_cast<const k::half*>(x.data()), late.data(), n, kLate);
          }
          check_cuda(cudaGetLastError());
          return k::matmul(k::Exec(ex.stream()).programmatic(true),
                           k::load(static_cast<const k::half*>(late.data()), s.k), w.source(),
                           k::store(y.data(), s.n), {s.m, s.n, s.k},
                           offsets ? k::Groups{1, late_ends.data()} : k::Groups{}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k),
              kRounded<k::half>);
        },
        !offsets);
  }
  const auto run = [&](const k::Exec& ex, int64_t tokens, const k::MatmulPolicy& policy, Device<float>& to) {
    return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), s.k), w.source(), k::store(to.data(), s.n),
                     {tokens, s.n, s.k}, policy);
  };
  Stream stream;
  k::MatmulPolicy policy;
  policy.batch_invariant = true;
  REQUIRE(run(k::Exec(stream), s.m, ways()[1].in(policy), y).ok());
  REQUIRE(run(k::Exec(stream), 33, ways()[0].in(policy), few).ok());
  CHECK(!run(k::Exec(stream), s.m, TileSize{128, 256}.in(policy), y));  // another order, or no such tile
  stream.wait();
  y.download(), few.download();
  for (int64_t m = 0; m < 33; ++m) {
    for (int64_t n = 0; n < s.n; ++n) REQUIRE(y.get(m, n) == few.get(m, n));
  }
}

// Without wgmma two blocks of 32 tokens and few rows are faster than tiles, as blocks cannot share K before sm_90.
TEST_CASE("matmul tiles: streams that share weights are chosen") {
  const Sizes s{40, 64, 4096};
  const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 1);
  const Scaled<int8_t, float, DeviceMemory> w(s.n, s.k, Grain::row, 1, 0, 0);
  Device<float> y(s.m, s.n, s.n);
  const auto path_of = [&](int64_t m) {
    k::MatmulPlan plan;
    REQUIRE(k::matmul_plan(Stream(), k::load(static_cast<const k::half*>(x.data()), s.k), w.source(),
                           k::store(y.data(), s.n), {m, s.n, s.k}, {}, {}, plan));
    CHECK(plan.weights_copied);
    CHECK(std::string(plan.why_not) == "");
    return plan.path;
  };
  CHECK(path_of(2) == Path::skinny);
  CHECK(path_of(32) == Path::skinny);
  if (ways().size() == 4) CHECK(path_of(33) == Path::gemm);
  expect_int8("chosen", s, Path::automatic, x, w, y);
}

// More token tiles than multiprocessors could hold alone.
TEST_CASE("matmul tiles: many blocks of few tokens") {
  const Sizes s{2113, 70, 64};
  const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 1);
  const Scaled<int8_t, float, DeviceMemory> w(s.n, s.k, Grain::row, 1, 0, 0);
  Device<float> y(s.m, s.n, s.n);
  expect_int8("many", s, Path::skinny, x, w, y);
}

TEST_CASE("matmul tiles: no columns") {
  const Sizes s{70, 40, 0};
  const Matrix<k::half> x(1, s.m, 8, 8, 0, 1);
  const Scaled<int8_t, float, DeviceMemory> w(s.n, 16, Grain::row, 1, 0, 0);
  Device<float> y(s.m, s.n, s.n + 1);
  expect(
      "no columns", s, Path::automatic, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), 8), w.source(), k::store(y.data(), y.ld()),
                         {s.m, s.n, s.k}, policy);
      },
      [](int64_t, int64_t) { return Real<>(0); });
}
