// Products of inputs and weights that are both codes of 8 bits, multiplied as they are where the GPU can: every tile,
// every kind of scales on either side, and what makes a call decode them instead.
#include "support/gpu_products.cuh"

using namespace test;

namespace {

template <class T>
constexpr bool kExact = std::is_same<T, int8_t>::value;
// Tensor cores cut products of e4m3, and their sum so far, off at some 13 bits below the largest of those that they add
// at a time. Here inputs and weights are the same numbers in part, so that there are sums of one sign.
template <class T>
constexpr double kCut = kExact<T> ? 0 : 0x1p-9;
constexpr double kCutFast = 0x1p-6, kDecoded = 0x1p-9;

// Where each operand's rows begin at a multiple of 16 bytes, as they must.
int64_t gap(int64_t cols) { return (16 - cols % 16) % 16 + 16; }
template <class T>
struct Bare : Plain<T, DeviceMemory> {
  Bare(int64_t rows, int64_t cols) : Plain<T, DeviceMemory>(rows, cols, gap(cols), 16, kExact<T> ? 40 : 3) {}
};
template <class T>
struct Codes8 : Scaled<T, float, DeviceMemory> {
  Codes8(int64_t rows, int64_t cols, Grain grain, int64_t size = 1)
      : Scaled<T, float, DeviceMemory>(rows, cols, grain, size, gap(cols), 16) {}
};

// The kernels of this path alone, for the compiler's sake.
template <class X, class W, class Out>
k::Status product_of(const k::Exec& ex, const X& x, const W& w, const Out& out, const k::MatmulShape& shape,
                     const k::MatmulPolicy& policy) {
  return k::matmul<Path::gemm>(ex, x, w, out, shape, policy);
}
template <class X, class W, class Out>
k::Status product_of(const k::Exec& ex, const X& x, const W& w, const Out& out, const k::MatmulShape& shape,
                     const k::Groups& groups, const k::MatmulPolicy& policy) {
  return k::matmul<Path::gemm>(ex, x, w, out, shape, groups, policy);
}

// Whether a call multiplies in 8 bits.
template <class X, class W, class Out>
bool in_eight(const X& x, const W& w, const Out& out, const k::MatmulShape& shape, const k::Groups& groups = {}) {
  k::MatmulPlan plan;
  const k::Status status = k::matmul_plan(Stream(), x, w, out, shape, groups, {Path::gemm}, plan);
  INFO(status.reason());
  REQUIRE(status.ok());
  CHECK((!plan.in_eight || (plan.weights_copied && *plan.why_not == 0)));
  return plan.in_eight;
}
bool gpu_has_it() {
  static const bool has = [] {
    const Bare<int8_t> x(40, 64), w(64, 64);
    Device<float> y(40, 64, 64);
    return in_eight(x.source(), w.source(), k::store(y.data(), 64), {40, 64, 64});
  }();
  return has;
}

constexpr Sizes kSizes[] = {{33, 40, 100},    {64, 128, 128},  {1, 3, 8},        {70, 130, 544},
                            {130, 515, 1056}, {257, 96, 4224}, {100, 1000, 304}, {40, 17, 0}};

// x and w: of rows and columns, to operands.
template <class T, class MakeX, class MakeW>
void every_tile(const char* what, const MakeX& make_x, const MakeW& make_w) {
  for (const Sizes& s : kSizes) {
    const auto x = make_x(s.m, s.k);
    const auto w = make_w(s.n, s.k);
    Device<float> y(s.m, s.n, s.n + 3, 1);
    const k::MatmulShape shape{s.m, s.n, s.k};
    if (s.k > 0 && gpu_has_it()) CHECK(in_eight(x.source(), w.source(), k::store(y.data(), y.ld()), shape));
    const auto want = [&](double cut) {
      return [&, cut](int64_t m, int64_t n) {
        return product(
            m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x(r, i)); }, w, units(Path::gemm, s.k), cut);
      };
    };
    const auto run = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
      return product_of(ex, x.source(), w.source(), k::store(y.data(), y.ld()), shape, policy);
    };
    const auto fast = [&](const k::Exec& ex, k::MatmulPolicy policy) {
      policy.fast_sums = true;
      return run(ex, policy);
    };
    const auto in_tile = [&](const TileSize& tile, const std::string& name, const auto& call, double cut) {
      if (tile.tokens != 0 && !tile.is_there(call)) return;
      expect(
          tile.name(name).c_str(), s, Path::gemm, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) { return call(tile.on(ex), tile.in(policy)); },
          want(gpu_has_it() ? cut : kDecoded));
    };
    // Blocks that do not share K make longer sums, of which tensor cores keep what is above some 2^-13 of the largest.
    const double cut_fast = kExact<T> ? 0 : kCutFast, cut_long = s.k > 2000 ? 4 * cut_fast : cut_fast;
    const std::string name = what;
    for (const TileSize& tile : kTileSizes) {
      in_tile(tile, name, run, kCut<T>);
      if (tile.at_once > 1) in_tile(tile, name + ", fast", fast, cut_long);
    }
    in_tile(kAnyTile, name + ", fast", fast, cut_fast);
  }
}

template <class T>
void every_scale() {
  const auto bare = [](int64_t rows, int64_t cols) { return Bare<T>(rows, cols); };
  const auto by = [](Grain grain, int64_t size = 1) {
    return [=](int64_t rows, int64_t cols) { return Codes8<T>(rows, cols, grain, size); };
  };
  every_tile<T>("codes x codes", bare, bare);
  every_tile<T>("codes x rows", bare, by(Grain::row));
  every_tile<T>("codes x blocks", bare, by(Grain::block, 128));
  every_tile<T>("tokens x codes", by(Grain::row), bare);
  every_tile<T>("groups x codes", by(Grain::group, 128), bare);
  every_tile<T>("tokens x rows", by(Grain::row), by(Grain::row));
  every_tile<T>("tensor x tensor", by(Grain::tensor), by(Grain::tensor));
  every_tile<T>("groups x blocks", by(Grain::group, 128), by(Grain::block, 128));
  every_tile<T>("long groups x large blocks", by(Grain::group, 256), by(Grain::block, 512));
  every_tile<T>("tokens x blocks", by(Grain::row), by(Grain::block, 128));
  every_tile<T>("groups x rows", by(Grain::group, 128), by(Grain::row));
}

}  // namespace

TEST_CASE("matmul in 8 bits: e4m3, with every kind of scales") { every_scale<k::float8_e4m3>(); }
TEST_CASE("matmul in 8 bits: int8, with every kind of scales") { every_scale<int8_t>(); }

TEST_CASE("matmul in 8 bits: the largest and smallest codes, NaN, and scales that are not finite") {
  const int64_t m = 70, n = 140, cols = 1040;
  Device<k::float8_e4m3> x(m, cols, cols), w(n, cols, cols);
  Device<int8_t> xi(m, cols, cols), wi(n, cols, cols);
  Device<float> y(m, n, n), scales(1, n, n);
  Random random(3);
  const float large = 448, small = 0x1p-9f;
  for (int64_t i = 0; i < cols; ++i) {
    for (int64_t r = 0; r < m; ++r) {
      const double u = random.normal();
      x.set(r, i, k::convert<k::float8_e4m3>(r == 3 ? large : r == 4 ? small : float(u)));
      xi.set(r, i, int8_t(r == 3 ? -128 : r == 4 ? 127 : int(40 * u) % 128));
    }
    for (int64_t r = 0; r < n; ++r) {
      const double u = random.normal();
      w.set(r, i, k::convert<k::float8_e4m3>(r == 5 ? large : r == 6 ? small : float(u)));
      wi.set(r, i, int8_t(r == 5 ? -128 : r == 6 ? 127 : int(40 * u) % 128));
    }
  }
  x.set(9, 1033, k::convert<k::float8_e4m3>(NAN));
  w.set(100, 7, k::convert<k::float8_e4m3>(NAN));
  for (int64_t i = 0; i < n; ++i) scales.set(0, i, i == 20 ? INFINITY : i == 21 ? NAN : i == 22 ? 0.f : 0x1p-20f);
  x.upload(), w.upload(), xi.upload(), wi.upload(), scales.upload();
  const auto of = [&](const auto& a, const auto& b, double cut) {
    const auto in = k::load(a.data(), cols);
    const auto weights = k::dequant(k::load(b.data(), cols), k::row_scales(static_cast<const float*>(scales.data())));
    expect(
        "extremes", {m, n, cols}, Path::gemm, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return product_of(ex, in, weights, k::store(y.data(), n), {m, n, cols}, policy);
        },
        [&](int64_t r, int64_t c) {
          // The sum is finite before its scale is applied.
          const Real<> sum = product(
              r, c, cols, [&](int64_t t, int64_t i) { return Real<>(double(k::convert<float>(a.get(t, i)))); },
              [&](int64_t o, int64_t i) { return double(k::convert<float>(b.get(o, i))); }, units(Path::gemm, cols),
              cut);
          return sum * Real<>(double(scales.get(0, c)));
        });
  };
  if (!gpu_has_it()) return;  // elsewhere scales are multiplied first
  of(x, w, kCut<k::float8_e4m3>);
  of(xi, wi, 0);
}

// Were sums of all of K left to the tensor cores, they would come out too small.
TEST_CASE("matmul in 8 bits: long sums of one sign") {
  const Sizes s{64, 256, 32768};
  Device<k::float8_e4m3> x(s.m, s.k, s.k), w(s.n, s.k, s.k);
  Device<int8_t> xi(s.m, s.k, s.k), wi(s.n, s.k, s.k);
  Random random(4);
  for (int64_t i = 0; i < s.k; ++i) {
    for (int64_t r = 0; r < s.m; ++r) {
      const float u = std::fabs(float(random.normal()));
      x.set(r, i, k::convert<k::float8_e4m3>(u)), xi.set(r, i, int8_t(127 - int(u)));
    }
    for (int64_t r = 0; r < s.n; ++r) {
      const float u = std::fabs(float(random.normal()));
      w.set(r, i, k::convert<k::float8_e4m3>(u)), wi.set(r, i, int8_t(127 - int(u)));
    }
  }
  x.upload(), w.upload(), xi.upload(), wi.upload();
  Device<float> y(s.m, s.n, s.n);
  const auto of = [&](const char* what, const auto& a, const auto& b, double cut) {
    expect_always(
        what, s, Path::gemm, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return product_of(ex, k::load(a.data(), s.k), k::load(b.data(), s.k), k::store(y.data(), s.n),
                            {s.m, s.n, s.k}, policy);
        },
        [&](int64_t r, int64_t c) {
          return product(
              r, c, s.k, [&](int64_t t, int64_t i) { return Real<>(double(k::convert<float>(a.get(t, i)))); },
              [&](int64_t o, int64_t i) { return double(k::convert<float>(b.get(o, i))); }, 0, cut);
        });
  };
  of("e4m3", x, w, 0x1p-10);
  of("int8", xi, wi, 0x1p-20);
}

// Those whose sums the tensor cores add up alone.
TEST_CASE("matmul in 8 bits: which products take turns at tiles") {
  const auto takes_turns = [](const auto& x, const auto& w, bool fast) {
    Device<float> y(40, 64, 64);
    k::MatmulPolicy policy = TileSize{128, 128, 2}.in({Path::gemm});
    policy.fast_sums = fast;
    k::MatmulPlan plan;
    return k::matmul_plan(Stream(), x.source(), w.source(), k::store(y.data(), 64), {40, 64, 256}, {}, policy, plan)
               .ok() &&
           plan.in_eight && plan.tiles_at_once == 2;
  };
  const Bare<int8_t> x(40, 256), w(64, 256);
  const Bare<k::float8_e4m3> small_x(40, 256), small_w(64, 256);
  CHECK(takes_turns(x, w, false) == gpu_has_it());
  CHECK(takes_turns(x, Codes8<int8_t>(64, 256, Grain::row), false) == gpu_has_it());
  CHECK(takes_turns(small_x, small_w, true) == gpu_has_it());
  CHECK(!takes_turns(x, Codes8<int8_t>(64, 256, Grain::block, 128), false));
  CHECK(!takes_turns(small_x, small_w, false));
}

TEST_CASE("matmul in 8 bits: gates, stacked and paired weights, and sinks of any type") {
  for (const Sizes s : {Sizes{70, 256, 1056}, Sizes{150, 384, 400}}) {
    const auto with = [&](const char* what, const auto& x, const auto& w, const auto& other, bool stacks) {
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x(r, i)); };
      const double u = units(Path::gemm, s.k), cut = 0x1p-9;
      Device<float> y(s.m, s.n, s.n + 1), both(s.m, 2 * s.n, 2 * s.n);
      Device<k::bfloat16> rounded(s.m, s.n, s.n);
      const auto gates = k::gated(w.source(), other.source());
      if (gpu_has_it()) CHECK(in_eight(x.source(), gates, k::swiglu() | k::store(y.data(), y.ld()), {s.m, s.n, s.k}));
      for (const TileSize& tile : kTileSizes) {
        const auto gated = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return product_of(tile.on(ex), x.source(), gates, k::swiglu() | k::store(y.data(), y.ld()), {s.m, s.n, s.k},
                            tile.in(policy));
        };
        if (!tile.is_there(gated)) continue;
        expect(tile.name(std::string("swiglu, ") + what).c_str(), s, Path::gemm, y, gated, [&](int64_t m, int64_t n) {
          return silu(product(m, n, s.k, value, w, u, cut)) * product(m, n, s.k, value, other, u, cut);
        });
      }
      expect((std::string("bias to bfloat16, ") + what).c_str(), s, Path::gemm, rounded,
             [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
               return product_of(ex, x.source(), w.source(), k::scale(0.5) | k::store(rounded.data(), s.n),
                                 {s.m, s.n, s.k}, policy);
             },
             [&](int64_t m, int64_t n) { return product(m, n, s.k, value, w, u, cut) * Real<>(0.5); });
      if (!stacks) return;
      const auto stacked = k::stacked(w.source(), s.n, other.source(), s.n);
      const auto paired = k::Paired<std::decay_t<decltype(w.source())>>(w.source(), 64, 32);
      if (gpu_has_it()) {
        CHECK(in_eight(x.source(), stacked, k::store(both.data(), both.ld()), {s.m, 2 * s.n, s.k}));
        CHECK(in_eight(x.source(), paired, StoreOfPairs(y, paired), {s.m, s.n, s.k}));
      }
      expect(
          (std::string("stacked, ") + what).c_str(), {s.m, 2 * s.n, s.k}, Path::gemm, both,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return product_of(ex, x.source(), stacked, k::store(both.data(), both.ld()), {s.m, 2 * s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return n < s.n ? product(m, n, s.k, value, w, u, cut) : product(m, n - s.n, s.k, value, other, u, cut);
          });
      expect((std::string("paired, ") + what).c_str(), s, Path::gemm, y,
             [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
               return product_of(ex, x.source(), paired, StoreOfPairs(y, paired), {s.m, s.n, s.k}, policy);
             },
             [&](int64_t m, int64_t n) { return product(m, paired.origin(n), s.k, value, w, u, cut); });
    };
    using T = k::float8_e4m3;
    with("rows", Codes8<T>(s.m, s.k, Grain::row), Codes8<T>(s.n, s.k, Grain::row), Codes8<T>(s.n + 5, s.k, Grain::row),
         true);
    with("blocks", Codes8<T>(s.m, s.k, Grain::group, 128), Codes8<T>(s.n, s.k, Grain::block, 128),
         Codes8<T>(s.n + 5, s.k, Grain::block, 128), false);
    with("int8", Bare<int8_t>(s.m, s.k), Codes8<int8_t>(s.n, s.k, Grain::row), Codes8<int8_t>(s.n + 5, s.k, Grain::row),
         true);
  }
}

TEST_CASE("matmul in 8 bits: groups") {
  using T = k::float8_e4m3;
  const int64_t cols = 400, groups = 4, rows = 260;
  const std::vector<int32_t> offsets{0, 5, 5, 140, 250};
  Device<int32_t> ends(1, groups + 1, groups + 1);
  filled(ends, offsets);
  for (const int64_t n : {128, 72}) {
    const auto with = [&](const char* what, const auto& x, const auto& w, bool multiplied) {
      const auto value = [&](int64_t r, int64_t c) { return Real<>(x(r, c)); };
      Device<float> y(rows, n, n);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) y.set(r, i, -7.f);
      y.upload();
      const double cut = gpu_has_it() && multiplied ? kCut<T> : kDecoded;
      const k::Groups ragged{groups, ends.data()};
      if (gpu_has_it())
        CHECK(in_eight(x.source(), w.source(), k::store(y.data(), n), {rows, n, cols}, ragged) == multiplied);
      expect((std::string("ragged, ") + what).c_str(), {rows, n, cols}, Path::gemm, y,
             [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
               return product_of(ex, x.source(), w.source(), k::store(y.data(), n), {rows, n, cols}, ragged, policy);
             },
             [&](int64_t m, int64_t i) {
               int64_t g = 0;
               while (g < groups && m >= offsets[size_t(g + 1)]) ++g;
               if (g == groups) return Real<>(-7);
               return product(m, g * n + i, cols, value, w, units(Path::gemm, cols), cut);
             });
      const int64_t m = rows / groups;
      expect((std::string("batch, ") + what).c_str(), {m, n, cols}, Path::gemm, y,
             [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
               return product_of(ex, x.source(), w.source(), k::store(y.data(), n), {m, n, cols}, k::Groups{groups},
                                 policy);
             },
             [&](int64_t r, int64_t i) {
               return product(r, r / m * n + i, cols, value, w, units(Path::gemm, cols), cut);
             });
    };
    with("rows", Codes8<T>(rows, cols, Grain::row), Codes8<T>(groups * n, cols, Grain::row), true);
    // Blocks of 128 rows would be shared by groups of 72.
    with("blocks", Codes8<T>(rows, cols, Grain::group, 128), Codes8<T>(groups * n, cols, Grain::block, 128), n == 128);
  }
}

TEST_CASE("matmul in 8 bits: what is decoded instead") {
  using T = k::float8_e4m3;
  const Sizes s{70, 130, 544};
  Device<float> y(s.m, s.n, s.n);
  const auto decoded = [&](const char* what, const auto& x, const auto& w) {
    INFO(what);
    CHECK(!in_eight(x.source(), w.source(), k::store(y.data(), s.n), {s.m, s.n, s.k}));
    expect_always(
        what, s, Path::gemm, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return product_of(ex, x.source(), w.source(), k::store(y.data(), s.n), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x(r, i)); }, w, units(Path::gemm, s.k), kDecoded);
        });
  };
  const Bare<T> x(s.m, s.k), w(s.n, s.k);
  decoded("misaligned inputs", Plain<T, DeviceMemory>(s.m, s.k, 16, 3), w);
  decoded("misaligned weights", x, Plain<T, DeviceMemory>(s.n, s.k, 3, 16));
  decoded("groups of 64 columns of weights", x, Codes8<T>(s.n, s.k, Grain::group, 64));
  decoded("groups of a row of weights", x, Codes8<T>(s.n, s.k, Grain::group, 128));
  decoded("groups of 64 columns of inputs", Codes8<T>(s.m, s.k, Grain::group, 64), w);
  decoded("other codes", x, Bare<int8_t>(s.n, s.k));
  decoded("e5m2", Bare<k::float8_e5m2>(s.m, s.k), Bare<k::float8_e5m2>(s.n, s.k));
}

TEST_CASE("matmul in 8 bits: inputs of the kernel ahead, and batch_invariant") {
  using T = k::float8_e4m3;
  const Sizes s{140, 264, 4224};
  const Bare<T> x(s.m, s.k);
  const Codes8<T> w(s.n, s.k, Grain::block, 128);
  const Matrix<float> scales(5, s.m, s.k / 128, s.k / 128, 0, 1);
  const Device<T> late(s.m, s.k, s.k);
  const Device<float> late_scales(s.m, s.k / 128, s.k / 128);
  Device<float> y(s.m, s.n, s.n), few(s.m, s.n, s.n);
  const auto copy = [&](const k::Exec& ex) {
    check_cuda(cudaMemsetAsync(late.data(), 0x7f, size_t(s.m * s.k), ex.stream()));
    check_cuda(cudaMemsetAsync(late_scales.data(), 0xff, size_t(s.m * s.k / 128) * 4, ex.stream()));
    check_cuda(cudaMemcpy2DAsync(late.data(), size_t(s.k), x.data(), size_t(x.ld()), size_t(s.k), size_t(s.m),
                                 cudaMemcpyDeviceToDevice, ex.stream()));
    slow_copy<<<1, 1024, 0, ex.stream()>>>(static_cast<const float*>(scales.data()), late_scales.data(),
                                           s.m * s.k / 128, int64_t(4000000));
    check_cuda(cudaGetLastError());
  };
  const auto in = k::dequant(k::load(static_cast<const T*>(late.data()), s.k),
                             k::group_scales(static_cast<const float*>(late_scales.data()), s.k / 128, 128));
  expect_always(
      "early", s, Path::gemm, y,
      [&](const k::Exec& ex, k::MatmulPolicy policy) {
        policy.weights_ready = true;
        copy(ex);
        return product_of(k::Exec(ex.stream()).programmatic(true), in, w.source(), k::store(y.data(), s.n),
                          {s.m, s.n, s.k}, policy);
      },
      [&](int64_t m, int64_t n) {
        return product(
            m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i) * scales.value(r, i / 128)); }, w,
            units(Path::gemm, s.k), gpu_has_it() ? kCut<T> : kDecoded);
      });
  k::MatmulPolicy policy;
  policy.batch_invariant = true;
  Stream stream;
  REQUIRE(product_of(stream, in, w.source(), k::store(y.data(), s.n), {s.m, s.n, s.k}, policy));
  for (const int64_t m : {1, 5, 70, 139}) {
    REQUIRE(product_of(stream, in, w.source(), k::store(few.data(), s.n), {m, s.n, s.k}, policy));
    stream.wait();
    y.download(), few.download();
    int64_t other = 0;
    for (int64_t r = 0; r < m; ++r)
      for (int64_t i = 0; i < s.n; ++i) other += y.get(r, i) != few.get(r, i);
    CHECK(other == 0);
  }
}
