// Products on the GPU: every path, shapes that fill no tile, what is fused, special values, graphs.
#include "support/gpu_products.cuh"
#include "support/rope.h"

using namespace test;

namespace {

template <class T>
void every_path(Path path, bool narrow) {
  const auto name = narrow ? "aligned" : "misaligned";
  const int64_t gap = narrow ? 8 : 3, shift = narrow ? 0 : 1;
  for (const int64_t cols : {8, 40, 64, 136, 1000, 4104}) {
    for (const int64_t n : {1, 5, 16, 67, 300}) {
      const Plain<T, DeviceMemory> w(n, cols, gap, shift);
      for (const int64_t m : {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 130}) {
        if (m * n * cols > 4000000) continue;
        check<T, T>(name, {m, n, cols}, path, w, 0, gap, shift);
      }
    }
  }
}

}  // namespace

TEST_CASE("matmul: half on every path") {
  for (const Path path : {Path::automatic, Path::gemv, Path::skinny, Path::gemm}) every_path<k::half>(path, true);
  for (const Path path : {Path::automatic, Path::gemv, Path::gemm}) every_path<k::half>(path, false);
}
// Rows that lie at multiples of 8, 4 and 2 bytes, of columns that end there.
TEST_CASE("matmul: half anywhere") {
  for (const int64_t unit : {4, 2, 1}) {
    for (const int64_t cols : {4, 36, 500, 2052, 2054, 2049}) {
      if (cols % unit != 0) continue;
      const int64_t gap = (cols + unit) % (2 * unit);  // so that rows are at odd multiples of the unit as well
      const Plain<k::half, DeviceMemory> w(67, cols, gap, unit);
      for (const int64_t m : {1, 2, 3, 40, 130}) {
        for (const Path path : {Path::automatic, Path::gemv, Path::gemm})
          check<k::half, k::half>("anywhere", {m, 67, cols}, path, w, 0, gap, unit);
      }
    }
  }
}
TEST_CASE("matmul: bfloat16") { every_path<k::bfloat16>(Path::automatic, true); }
TEST_CASE("matmul: float on every path") {
  for (const Path path : {Path::automatic, Path::gemv, Path::simt}) {
    every_path<float>(path, true);
    every_path<float>(path, false);
  }
}

// Blocks of few rows and of many, alone on their multiprocessors or not, that share columns or not.
TEST_CASE("matmul: a few tokens with weights of every height") {
  for (const Sizes s :
       {Sizes{3, 1100, 136}, Sizes{5, 6103, 264}, Sizes{8, 9000, 72}, Sizes{17, 9504, 40}, Sizes{3, 14336, 136},
        Sizes{4, 35000, 48}, Sizes{32, 2040, 128}, Sizes{7, 520, 2056}, Sizes{32, 203, 4096}, Sizes{24, 90, 8200},
        Sizes{17, 8200, 2056}, Sizes{9, 96, 8200}, Sizes{6, 22000, 136}, Sizes{30, 19000, 264}}) {
    const Plain<k::half, DeviceMemory> w(s.n, s.k, 8, 8);
    for (const Path path : {Path::automatic, Path::skinny}) check<k::half, k::half>("height", s, path, w);
  }
}

// Tells for which architecture this file's kernels that are loaded were compiled.
struct AnyKernel {
  struct Params {};
  static constexpr int max_threads = 32, registers = 32;
  static __device__ void run(const Params&) {}
};

// Alone, with a K that blocks share, and with gates; rows and columns that fill no tile.
TEST_CASE("matmul: every tile of the gemm path") {
  int refused = 0;
  Shortened shortened;
  for (const TileSize& tile : kTileSizes) {
    for (const Sizes s : {Sizes{1, 8, 40}, Sizes{tile.tokens + 1, 300, 264}, Sizes{2 * tile.tokens - 3, 259, 72},
                          Sizes{tile.tokens, 256, 4104}, Sizes{70, 4096, 136}, Sizes{2 * tile.tokens - 3, 288, 72},
                          Sizes{33, 64, 40}, Sizes{tile.tokens, 401, 1096}}) {
      if (shortened.leaves_out()) continue;
      const Matrix<k::bfloat16> x(1, s.m, s.k, s.k + 8, 0, 1);
      const Matrix<k::half> other(1, s.m, s.k, s.k + 8, 0, 1);
      const Plain<k::bfloat16, DeviceMemory> w(s.n, s.k, 8, 0), up(s.n, s.k, 0, 8);
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      const double u = units(Path::gemm, s.k);
      const std::string name = tile.name("plain");
      Device<float> y(s.m, s.n, s.n + 1);
      const auto plain = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(tile.on(ex), k::load(static_cast<const k::bfloat16*>(x.data()), x.ld()), w.source(),
                         k::store(y.data(), y.ld()), {s.m, s.n, s.k}, tile.in(policy));
      };
      if (!tile.is_there(plain)) {
        ++refused;
        continue;
      }
      expect(name.c_str(), s, Path::gemm, y, plain,
             [&](int64_t m, int64_t n) { return product(m, n, s.k, value, w, u); });
      const auto with_gate = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(tile.on(ex), k::load(static_cast<const k::bfloat16*>(x.data()), x.ld()),
                         k::gated(w.source(), up.source()), k::swiglu() | k::store(y.data(), y.ld()), {s.m, s.n, s.k},
                         tile.in(policy));
      };
      if (tile.rows == 64) CHECK(!with_gate(Stream(), {Path::gemm}));  // of weights of one matrix
      else
        expect((name + ", gated").c_str(), s, Path::gemm, y, with_gate, [&](int64_t m, int64_t n) {
          return silu(product(m, n, s.k, value, w, u)) * product(m, n, s.k, value, up, u);
        });
      if (tile.rows == 256 || tile.tokens == 192 || tile.at_once > 1) continue;  // inputs of the weights' type
      expect((name + ", inputs of another type").c_str(), s, Path::gemm, y,
             [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
               return k::matmul(ex, k::load(static_cast<const k::half*>(other.data()), other.ld()), w.source(),
                                k::store(y.data(), y.ld()), {s.m, s.n, s.k}, tile.in(policy));
             },
             [&](int64_t m, int64_t n) {
               return product(
                   m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(other.value(r, i)); }, w, u, 0x1p-7);
             });
    }
  }
  int image = 0;
  REQUIRE(k::detail::image_architecture<AnyKernel>(k::Exec{}, image));
  // 64 and 96 x 256, 128 and 160 x 64; without wgmma all of 64 rows, of 96, 160 and 192 tokens, and in turns.
  if (!is_shortened()) CHECK(refused == (image == 90 ? 4 * 8 : 13 * 8));
  Device<float> y(64, 64, 64);
  const Matrix<k::bfloat16> x(1, 64, 64, 64, 0, 1);
  const auto in = k::load(static_cast<const k::bfloat16*>(x.data()), 64);
  CHECK(!k::matmul(Stream(), in, in, k::store(y.data(), 64), {64, 64, 64},
                   TileSize{32, 0}.in({Path::gemm})));
  CHECK(!k::matmul(Stream(), in, in, k::store(y.data(), 64), {64, 64, 64},
                   TileSize{64, 0}.in({Path::skinny})));
  CHECK(!k::matmul(Stream(), in, in, k::store(y.data(), 64), {64, 64, 64}, TileSize{0, 0, 2}.in({Path::skinny})));
}

TEST_CASE("matmul: one to eight blocks share K") {
  int image = 0;
  REQUIRE(k::detail::image_architecture<AnyKernel>(k::Exec{}, image));
  for (int splits = 1; splits <= 8; ++splits) {
    // Eight steps of 64 columns for each. Two pay where there are many blocks, and more would not run at once.
    const Sizes s = splits == 2 ? Sizes{40, 3008, 4072} : Sizes{40, 256, 512 * splits - 24};
    const Matrix<k::bfloat16> x(1, s.m, s.k, s.k, 0, 1);
    const Plain<k::bfloat16, DeviceMemory> w(s.n, s.k, 0, 0);
    Device<float> y(s.m, s.n, s.n);
    const auto in = k::load(static_cast<const k::bfloat16*>(x.data()), x.ld());
    const auto fast = [](const k::Exec& ex) {
      k::DeviceInfo device = ex.device();
      device.memory_gbs = 1 << 20;  // or reading weights would decide
      return k::Exec(ex.stream(), device);
    };
    k::MatmulPolicy policy{Path::gemm};
    if (image == 90) policy.tile_tokens = policy.tile_rows = 64;
    k::MatmulPlan plan;
    REQUIRE(k::matmul_plan(fast(Stream()), in, w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, {}, policy,
                           plan));
    CHECK(plan.splits == (image == 90 ? splits : 1));  // where the TMA unit copies them
    expect_always(
        (std::to_string(splits) + " blocks").c_str(), s, Path::gemm, y,
        [&](const k::Exec& ex, const k::MatmulPolicy&) {
          return k::matmul(fast(ex), in, w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k));
        });
  }
}

namespace {

// Inputs of a type that the TMA unit copies, as weights are, or of another, which threads round; as one group, whose
// size is known or not, and as four, of which two are empty.
template <class TX>
void same_bits_in_every_tile(size_t tiles) {
  const Sizes s{130, 259, 4104};
  const Matrix<TX> x(1, s.m, s.k, s.k, 0, 1);
  const Plain<k::bfloat16, DeviceMemory> w(4 * s.n, s.k, 0, 0);
  Device<int32_t> one(1, 2, 2), four(1, 5, 5);
  filled(one, {0, int32_t(s.m)}), filled(four, {0, 0, 57, 57, int32_t(s.m)});
  const auto bits = [&](const TileSize& tile, const k::Groups& groups, std::vector<std::vector<unsigned char>>& all) {
    k::MatmulPolicy policy = tile.in({Path::gemm});
    policy.batch_invariant = true;
    Device<float> y(s.m, s.n, s.n);
    Stream stream;
    if (!k::matmul(tile.on(stream), k::load(static_cast<const TX*>(x.data()), x.ld()), w.source(),
                   k::store(y.data(), y.ld()), {s.m, s.n, s.k}, groups, policy))
      return;
    stream.wait();
    y.download();
    all.push_back(y.bytes());
  };
  std::vector<std::vector<unsigned char>> of_one, of_four;
  for (const TileSize& tile : kTileSizes) {
    bits(tile, {}, of_one), bits(tile, {1, one.data()}, of_one);
    bits(tile, {4, four.data()}, of_four);
  }
  CHECK(of_one.size() == 2 * tiles);
  CHECK(of_four.size() == tiles);
  for (const auto& bytes : of_one) CHECK((bytes == of_one.front()));
  for (const auto& bytes : of_four) CHECK((bytes == of_four.front()));
}

// Inputs, or the offsets of their group, are written while weights are on their way.
template <class TX>
void late_in_every_tile() {
  const Sizes s{140, 264, 1096};
  const Matrix<TX> x(1, s.m, s.k, s.k, 0, 1);
  const Device<TX> late(s.m, s.k, s.k);
  const Plain<k::bfloat16, DeviceMemory> w(s.n, s.k, 0, 0);
  Device<int32_t> ends(1, 2, 2), late_ends(1, 2, 2);
  filled(ends, {0, int32_t(s.m)});
  Device<float> y(s.m, s.n, s.n);
  constexpr int64_t kLate = 4000000;  // cycles: milliseconds
  for (const TileSize& tile : kTileSizes) {
    for (const bool offsets : {false, true}) {
      const auto run = [&](const k::Exec& ex, const k::MatmulPolicy& given) {
        k::MatmulPolicy policy = tile.in(given);
        policy.weights_ready = true;
        const int64_t n = s.m * s.k;
        check_cuda(cudaMemsetAsync(late.data(), 0xff, size_t(n) * sizeof(TX), ex.stream()));
        check_cuda(cudaMemsetAsync(late_ends.data(), 0, 8, ex.stream()));
        slow_copy<<<1, 1024, 0, ex.stream()>>>(static_cast<const TX*>(x.data()), late.data(), n, offsets ? 0 : kLate);
        if (offsets)
          slow_copy<<<1, 32, 0, ex.stream()>>>(static_cast<const int32_t*>(ends.data()), late_ends.data(), 2, kLate);
        check_cuda(cudaGetLastError());
        return k::matmul(tile.on(k::Exec(ex.stream()).programmatic(true)),
                         k::load(static_cast<const TX*>(late.data()), s.k), w.source(), k::store(y.data(), s.n),
                         {s.m, s.n, s.k}, offsets ? k::Groups{1, late_ends.data()} : k::Groups{}, policy);
      };
      if (!tile.is_there(run)) continue;
      expect(tile.name(offsets ? "late offsets" : "late inputs").c_str(), s, Path::gemm, y, run,
             [&](int64_t m, int64_t n) {
               return product(
                   m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w,
                   units(Path::gemm, s.k), std::is_same<TX, k::bfloat16>::value ? 0 : 0x1p-7);
             });
    }
  }
}

}  // namespace

// Or a row's would depend on its batch, where that decides on the tile.
TEST_CASE("matmul: every tile makes the same bits") {
  int image = 0;
  REQUIRE(k::detail::image_architecture<AnyKernel>(k::Exec{}, image));
  same_bits_in_every_tile<k::bfloat16>(image == 90 ? 12 : 3);
  same_bits_in_every_tile<k::half>(image == 90 ? 6 : 2);
}
TEST_CASE("matmul: weights come before late inputs and offsets in every tile") {
  late_in_every_tile<k::bfloat16>();
  late_in_every_tile<k::half>();
}

// Reading weights from slow memory takes as long with any number of blocks.
TEST_CASE("matmul: blocks share K where memory is fast, and do not where it is slow") {
  const Sizes s{40, 256, 4096};
  const Matrix<k::bfloat16> x(1, s.m, s.k, s.k, 0, 1);
  const Plain<k::bfloat16, DeviceMemory> w(s.n, s.k, 0, 0);
  const auto bytes_with = [&](int memory_gbs) {
    Device<float> y(s.m, s.n, s.n);
    expect_always(
        ("memory of " + std::to_string(memory_gbs) + " GB/s").c_str(), s, Path::gemm, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          k::DeviceInfo device = ex.device();
          device.memory_gbs = memory_gbs;
          return k::matmul(k::Exec(ex.stream(), device), k::load(static_cast<const k::bfloat16*>(x.data()), x.ld()),
                           w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k));
        });
    return y.bytes();
  };
  bytes_with(0);  // the driver does not tell
  int image = 0;
  REQUIRE(k::detail::image_architecture<AnyKernel>(k::Exec{}, image));
  CHECK((bytes_with(1) != bytes_with(1 << 20)) == (image == 90));  // where the TMA unit copies them
}

// With one multiprocessor waves are as many as tiles, which then are large for the first of these sizes.
TEST_CASE("matmul: floats in tiles of either size, alone, with gates, and normalized") {
  for (const Sizes s : {Sizes{250, 251, 72}, Sizes{40, 70, 132}}) {
    const Matrix<float> x(1, s.m, s.k, s.k, 0, 1);
    const Plain<float, DeviceMemory> w(s.n, s.k, 0, 0), up(s.n, s.k, 4, 0);
    const auto in = k::load(static_cast<const float*>(x.data()), x.ld());
    const auto on_one = [](const k::Exec& ex) { return with_multiprocessors(ex, 1); };
    const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
    Device<float> y(s.m, s.n, s.n + 1);
    expect(
        "alone", s, Path::simt, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(on_one(ex), in, w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) { return product(m, n, s.k, value, w); });
    expect(
        "gated", s, Path::simt, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(on_one(ex), in, k::gated(w.source(), up.source()), k::swiglu() | k::store(y.data(), y.ld()),
                           {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return silu(product(m, n, s.k, value, w)) * product(m, n, s.k, value, up);
        });
    const auto rows = rmsnorm_rows(s, 1e-6, value);
    expect(
        "normalized", s, Path::simt, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(on_one(ex), k::normed(in, k::RmsNorm{}.eps(1e-6)), w.source(),
                           k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
              m, n, s.k, [&](int64_t r, int64_t i) { return rows[size_t(r)][size_t(i)]; }, w);
        });
  }
}

TEST_CASE("matmul: odd numbers of columns") {
  for (const int64_t cols : {1, 3, 7, 33, 100, 1001}) {
    const Plain<k::half, DeviceMemory> w(35, cols, (8 - cols % 8) % 8, 0);
    const Plain<float, DeviceMemory> w32(35, cols, (8 - cols % 8) % 8, 0);
    for (const int64_t m : {1, 3, 6, 40}) {
      for (const Path path : {Path::automatic, Path::gemv, Path::gemm})
        check<k::half, float>("odd", {m, 35, cols}, path, w, 0, (8 - cols % 8) % 8);
      check<k::half, float>("odd", {m, 35, cols}, Path::simt, w32, 0, (8 - cols % 8) % 8);
    }
  }
}

TEST_CASE("matmul: no columns, no rows, no tokens") {
  Stream stream;
  Device<float> y(40, 20, 21), bias(1, 20, 20);
  randomize(bias, 1);
  const float* none = bias.data();
  for (const int64_t m : {1, 40}) {
    REQUIRE(k::matmul(stream, k::load(none, 0), k::load(none, 0), k::bias(none) | k::store(y.data(), 21), {m, 20, 0}));
    stream.wait();
  }
  y.download();
  CHECK(y.intact());
  for (int64_t m = 0; m < 40; ++m) {
    for (int64_t n = 0; n < 20; ++n) REQUIRE(y.get(m, n) == bias.get(0, n));
  }
  CHECK(k::matmul(stream, k::load(none, 0), k::load(none, 0), k::store(y.data(), 21), {0, 20, 5}).ok());
  CHECK(k::matmul(stream, k::load(none, 0), k::load(none, 0), k::store(y.data(), 21), {3, 0, 5}).ok());
  CHECK(!k::matmul(stream, k::load(none, 0), k::load(none, 0), k::store(y.data(), 21), {3, -1, 5}));
}

TEST_CASE("matmul: 65536 columns with a large common part") {
  const int64_t cols = 65536, n = 6;
  Device<k::half> x(40, cols, cols), w(n, cols, cols);
  Random random(3);
  for (int64_t i = 0; i < cols; ++i) {
    for (int64_t r = 0; r < 40; ++r) x.set(r, i, make<k::half>(1e3 + random.normal()));
    for (int64_t r = 0; r < n; ++r) w.set(r, i, make<k::half>(0.01 + 0.001 * random.uniform()));
  }
  x.upload(), w.upload();
  for (const Sizes s : {Sizes{1, n, cols}, Sizes{3, n, cols}, Sizes{8, n, cols}, Sizes{40, n, cols}}) {
    Device<float> y(s.m, n, n);
    const Path path = s.m < 5 ? Path::gemv : s.m == 8 ? Path::skinny : Path::gemm;
    expect(
        "common part", s, path, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(ex, k::load(x.data(), cols), k::load(w.data(), cols), k::store(y.data(), n), {s.m, n, cols},
                           policy);
        },
        [&](int64_t m, int64_t r) {
          return product(
              m, r, cols, [&](int64_t a, int64_t i) { return Real<>(value_of(x.get(a, i))); },
              [&](int64_t a, int64_t i) { return value_of(w.get(a, i)); }, units(path, cols));
        });
  }
}

// ---- what stands around it ------------------------------------------------------------------------------------------

TEST_CASE("matmul: bias, gelu, a residual in place, and integers") {
  for (const Sizes s : {Sizes{1, 50, 333}, Sizes{3, 48, 64}, Sizes{6, 96, 72}, Sizes{70, 136, 40}}) {
    const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 1);
    const Plain<k::half, DeviceMemory> w(s.n, s.k, 0, 0);
    const Matrix<float> bias(2, 1, s.n, s.n);
    const auto sum = [&](int64_t m, int64_t n) {
      return product(
                 m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k)) +
             Real<>(bias.value(0, n));
    };
    const auto in = k::load(static_cast<const k::half*>(x.data()), s.k);
    {
      Device<k::half> y(s.m, s.n, s.n + 8);
      expect(
          "bias, gelu", s, Path::automatic, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, w.source(), k::bias(bias.data()) | k::gelu() | k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) { return gelu(sum(m, n)); });
    }
    {
      Device<float> y(s.m, s.n, s.n);
      randomize(y, 5);
      std::vector<Row<>> before;
      for (int64_t m = 0; m < s.m; ++m) before.push_back(row_of(y, m));
      expect(
          "residual", s, Path::automatic, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, w.source(),
                             k::bias(bias.data()) | k::add(k::load(y.data(), y.ld())) | k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) { return sum(m, n) + before[size_t(m)][size_t(n)]; });
    }
    {
      Device<int8_t> y(s.m, s.n, s.n + 8);
      expect(
          "int8", s, Path::automatic, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, w.source(), k::bias(bias.data()) | k::scale(4) | k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) { return sum(m, n) * Real<>(4); });
    }
  }
}

namespace {

template <class T>
void gates(std::initializer_list<Path> paths) {
  for (const Sizes s :
       {Sizes{1, 50, 336}, Sizes{3, 48, 64}, Sizes{7, 33, 1104}, Sizes{18, 90, 2064}, Sizes{18, 92, 4104},
        Sizes{70, 140, 40}}) {
    const Matrix<T> x(1, s.m, s.k, s.k, 0, 0.3);
    const Plain<T, DeviceMemory> gate(s.n, s.k, 0, 0), up(s.n, s.k, 8, 8);
    const Matrix<float> gate_bias(2, 1, s.n, s.n);
    const Matrix<T> up_bias(3, 1, s.n, s.n, 1);
    const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
    const auto swiglu = k::swiglu().of(k::bias(static_cast<const float*>(gate_bias.data())),
                                       k::bias(static_cast<const T*>(up_bias.data())));
    for (const Path path : paths) {
      Device<float> y(s.m, s.n, s.n + 1);
      expect(
          "swiglu", s, path, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, k::load(static_cast<const T*>(x.data()), s.k), k::gated(gate.source(), up.source()),
                             swiglu | k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return silu(product(m, n, s.k, value, gate, units(Path::gemm, s.k)) + Real<>(gate_bias.value(0, n))) *
                   (product(m, n, s.k, value, up, units(Path::gemm, s.k)) + Real<>(up_bias.value(0, n)));
          });
    }
  }
}

}  // namespace

TEST_CASE("matmul: gates") {
  gates<k::half>({Path::automatic, Path::gemv, Path::skinny, Path::gemm});
  gates<float>({Path::automatic, Path::gemv, Path::simt});
}

TEST_CASE("matmul: stacked weights, results apart") {
  const int64_t ns[] = {40, 16, 16}, n = 72, cols = 264;
  const Plain<k::half, DeviceMemory> a(ns[0], cols, 0, 0), b(ns[1], cols, 8, 0), c(ns[2], cols, 0, 8);
  for (const int64_t m : {1, 3, 7, 21, 40}) {
    const Matrix<k::half> x(1, m, cols, cols, 0, 1);
    const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
    Device<float> q(m, ns[0], ns[0]), key(m, ns[1], ns[1] + 8), v(m, ns[2], ns[2]);
    const auto run = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
      return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), cols),
                       k::stacked(a.source(), ns[0], b.source(), ns[1], c.source(), ns[2]),
                       k::clamp(-5, 9) | k::apart(k::store(q.data(), q.ld()), ns[0], k::store(key.data(), key.ld()),
                                                  ns[1], k::store(v.data(), v.ld()), ns[2]),
                       {m, n, cols}, policy);
    };
    const double u = units(Path::gemm, cols);
    const auto clamped = [](Real<> sum) { return Real<>(std::fmin(std::fmax(sum.v, -5.), 9.), sum.e); };
    expect("first", {m, n, cols}, Path::automatic, q, run,
           [&](int64_t r, int64_t i) { return clamped(product(r, i, cols, value, a, u)); });
    expect("second", {m, n, cols}, Path::automatic, key, run,
           [&](int64_t r, int64_t i) { return clamped(product(r, i, cols, value, b, u)); });
    expect("third", {m, n, cols}, Path::automatic, v, run,
           [&](int64_t r, int64_t i) { return clamped(product(r, i, cols, value, c, u)); });
  }
}

// The TMA unit copies parts of a multiple of 128 rows, in pairs if heads are whole slabs of 32 rows and all of it
// turns.
TEST_CASE("matmul: stacked rows in pairs, in every tile") {
  struct Pairs {
    int head_dim, half;
  };
  int image = 0;
  REQUIRE(k::detail::image_architecture<AnyKernel>(k::Exec{}, image));
  for (const Pairs& pairs :
       {Pairs{32, 16}, Pairs{64, 32}, Pairs{96, 48}, Pairs{128, 64}, Pairs{128, 48}, Pairs{256, 128}}) {
    const bool fits = pairs.head_dim == 2 * pairs.half && pairs.head_dim != 96;
    const int64_t ns[] = {pairs.head_dim == 96 ? 384 : 512, pairs.head_dim == 96 ? 384 : 256, 128},
                  n = ns[0] + ns[1] + ns[2], cols = 1096;
    const Plain<k::half, DeviceMemory> a(ns[0], cols, 0, 0), b(ns[1], cols, 8, 0), c(ns[2], cols, 0, 8);
    using Rows = k::Paired<std::decay_t<decltype(a.source())>>;
    const Rows qs(a.source(), pairs.head_dim, pairs.half), ks(b.source(), pairs.head_dim, pairs.half),
        vs(c.source(), 1, 0);
    const auto w = k::stacked(qs, ns[0], ks, ns[1], vs, ns[2]);
    for (const TileSize& tile : kTileSizes) {
      const int64_t m = tile.tokens + 5;
      const Matrix<k::half> x(1, m, cols, cols, 0, 1);
      Device<float> y(m, n, n);
      const auto run = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(tile.on(ex), k::load(static_cast<const k::half*>(x.data()), cols), w, StoreOfPairs(y, w),
                         {m, n, cols}, tile.in(policy));
      };
      const bool is_there = tile.is_there(run);
      const bool fits_tile = tile.rows == 64 ? tile.tokens <= 96 : tile.rows == 128 || tile.tokens >= 128;
      if (image == 90 && fits) CHECK(is_there == fits_tile);
      if (!is_there) continue;
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      const double u = units(Path::gemm, cols);
      expect(tile.name("heads of " + std::to_string(pairs.head_dim)).c_str(), {m, n, cols}, Path::gemm, y, run,
             [&](int64_t r, int64_t i) {
               if (i < ns[0]) return product(r, qs.origin(i), cols, value, a, u);
               if (i < ns[0] + ns[1]) return product(r, ks.origin(i - ns[0]), cols, value, b, u);
               return product(r, i - ns[0] - ns[1], cols, value, c, u);
             });
    }
  }
}

TEST_CASE("matmul: normalized inputs") {
  for (const Sizes s : {Sizes{1, 20, 40}, Sizes{1, 20, 5000}, Sizes{3, 9, 336}, Sizes{8, 24, 72}, Sizes{20, 20, 5000},
                        Sizes{32, 9, 1096}, Sizes{40, 20, 200}}) {
    const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 1);
    const Matrix<float> gamma(2, 1, s.k, s.k), beta(3, 1, s.k, s.k);
    const Plain<k::half, DeviceMemory> w(s.n, s.k, 0, 0);
    std::vector<Row<>> rms, normal;
    for (int64_t m = 0; m < s.m; ++m) {
      Row<> row;
      for (int64_t i = 0; i < s.k; ++i) row.push_back(Real<>(x.value(m, i)));
      Row<> other = row;
      rmsnorm(row, 1e-6);
      layernorm(other, 1e-5);
      for (int64_t i = 0; i < s.k; ++i) {
        row[size_t(i)] = row[size_t(i)] * Real<>(gamma.value(0, i));
        other[size_t(i)] = other[size_t(i)] * Real<>(gamma.value(0, i)) + Real<>(beta.value(0, i));
      }
      rms.push_back(row);
      normal.push_back(other);
    }
    const auto in = k::load(static_cast<const k::half*>(x.data()), s.k);
    // From three tokens on, inputs are rounded to half.
    const auto want = [&](const std::vector<Row<>>& rows) {
      return [&](int64_t m, int64_t n) {
        return product(
            m, n, s.k, [&](int64_t r, int64_t i) { return rows[size_t(r)][size_t(i)]; }, w, units(Path::gemm, s.k),
            s.m > 2 ? 0x1p-10 : 0);
      };
    };
    Device<float> y(s.m, s.n, s.n), y2(s.m, s.n, s.n);
    const auto with = [&](const TileSize& tile) {
      return [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::normed(in, k::RmsNorm{}.eps(1e-6)) | k::mul(gamma.data()), w.source(),
                         k::store(y.data(), s.n), {s.m, s.n, s.k}, tile.in(policy));
      };
    };
    expect("rmsnorm", s, Path::automatic, y, with(kAnyTile), want(rms));
    for (const TileSize& tile : kTileSizes) {
      if (s.m > 2 && tile.is_there(with(tile)))
        expect(tile.name("rmsnorm").c_str(), s, Path::gemm, y, with(tile), want(rms));
    }
    const auto without_mean = [&](const TileSize& tile) {
      return [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::normed(in, k::LayerNorm{}) | k::affine(gamma.data(), beta.data()), w.source(),
                         k::store(y2.data(), s.n), {s.m, s.n, s.k}, tile.in(policy));
      };
    };
    expect("layernorm", s, Path::automatic, y2, without_mean(kAnyTile), want(normal));
    for (const TileSize& tile : kTileSizes) {
      if (s.m > 2 && tile.is_there(without_mean(tile)))
        expect(tile.name("layernorm").c_str(), s, Path::gemm, y2, without_mean(tile), want(normal));
    }
  }
}

// ---- groups and experts ---------------------------------------------------------------------------------------------

namespace {

template <class T>
void groups_of_tokens(Path path, int64_t n = 40, int64_t cols = 72, const TileSize& tile = kAnyTile) {
  for (const std::vector<int32_t>& offsets :
       {std::vector<int32_t>{0, 5, 5, 140, 141, 300}, std::vector<int32_t>{0, 0, 0}, std::vector<int32_t>{0, 129}}) {
    const int64_t groups = int64_t(offsets.size()) - 1,
                  rows = offsets.back() + 7;  // more than there are: those stay as they were
    const Matrix<T> x(1, rows, cols, cols, 0, 1);
    const Plain<T, DeviceMemory> w(groups * n, cols, 0, 0);
    Device<int32_t> ends(1, groups + 1, groups + 1);
    filled(ends, offsets);
    Device<float> y(rows, n, n);
    std::vector<Row<>> before;
    for (int64_t r = 0; r < rows; ++r) before.push_back(Row<>(size_t(n), Real<>(-7)));
    for (int64_t r = 0; r < rows; ++r) for (int64_t i = 0; i < n; ++i) y.set(r, i, -7.f);
    y.upload();
    const auto ragged = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
      return k::matmul(ex, k::load(static_cast<const T*>(x.data()), cols), w.source(), k::store(y.data(), n),
                       {rows, n, cols}, k::Groups{groups, ends.data()}, tile.in(policy));
    };
    if (tile.tokens != 0 && !tile.is_there(ragged)) return;
    expect(
        tile.name("ragged").c_str(), {rows, n, cols}, path, y, ragged,
        [&](int64_t m, int64_t i) {
          int64_t g = 0;
          while (g < groups && m >= offsets[size_t(g + 1)]) ++g;
          if (g == groups) return before[size_t(m)][size_t(i)];
          return product(
              m, g * n + i, cols, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); }, w, units(path, cols));
        });
  }
  const int64_t batch = 3, m = 37;
  const Matrix<T> x(1, batch * m, cols, cols, 0, 1);
  const Plain<T, DeviceMemory> w(batch * n, cols, 0, 0);
  Device<float> y(batch * m, n, n);
  expect(
      tile.name("batch").c_str(), {m, n, cols}, path, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(static_cast<const T*>(x.data()), cols), w.source(), k::store(y.data(), n),
                         {m, n, cols}, k::Groups{batch}, tile.in(policy));
      },
      [&](int64_t r, int64_t i) {
        return product(
            r, r / m * n + i, cols, [&](int64_t a, int64_t c) { return Real<>(x.value(a, c)); }, w, units(path, cols));
      });
}

}  // namespace

TEST_CASE("matmul: groups of tokens, some empty") {
  groups_of_tokens<k::half>(Path::gemm);
  groups_of_tokens<float>(Path::simt);
  for (const TileSize& tile : kTileSizes) {
    for (const int64_t n : {40, 64}) groups_of_tokens<k::half>(Path::gemm, n, 1096, tile);
  }
}

TEST_CASE("matmul: groups by a path that the caller names in the code") {
  const int64_t batch = 3, m = 7, n = 40, cols = 72;
  const Matrix<float> x(1, batch * m, cols, cols, 0, 1);
  const Plain<float, DeviceMemory> w(batch * n, cols, 0, 0);
  Device<float> asked(batch * m, n, n), named(batch * m, n, n);
  Stream stream;
  const auto in = k::load(static_cast<const float*>(x.data()), cols);
  const k::MatmulShape shape{m, n, cols};
  const k::Groups groups{batch};
  CHECK(k::matmul(stream, in, w.source(), k::store(asked.data(), n), shape, groups, {Path::simt}).ok());
  CHECK(k::matmul<Path::simt>(stream, in, w.source(), k::store(named.data(), n), shape, groups).ok());
  stream.wait();
  asked.download(), named.download();
  CHECK(asked.bytes() == named.bytes());
  const k::Status alone = k::matmul<Path::gemv>(stream, in, w.source(), k::store(named.data(), n), shape, groups);
  CHECK(!alone);
}

TEST_CASE("matmul: a mixture of experts, there and back") {
  const int64_t tokens = 5, n = 24, cols = 72, number = 6;
  const int top_k = 2;
  const std::vector<int32_t> chosen = {0, 3, 5, 0, 3, 3, 1, 5, 0, 1};  // nobody chooses 2 and 4
  Device<int32_t> ids(1, tokens * top_k, tokens * top_k);
  filled(ids, chosen);
  const Matrix<float> shares(4, 1, tokens * top_k, tokens * top_k, 0, 1);
  const Matrix<k::half> x(1, tokens, cols, cols, 0, 1);
  const Plain<k::half, DeviceMemory> w(number * n, cols, 0, 0);
  const FourBit<float, false, DeviceMemory> back(number * 16, n, 8);
  const auto value = [&](int64_t r, int64_t c) { return Real<>(x.value(r / top_k, c)); };
  Device<float> h(tokens * top_k, n, n);
  expect(
      "there", {tokens * top_k, n, cols}, Path::automatic, h,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::repeated(k::load(static_cast<const k::half*>(x.data()), cols), top_k),
                         k::experts(w.source(), ids.data(), n, number), k::store(h.data(), n),
                         {tokens * top_k, n, cols}, policy);
      },
      [&](int64_t slot, int64_t i) { return product(slot, chosen[size_t(slot)] * n + i, cols, value, w); });
  Device<float> y(tokens, 16, 16);
  expect(
      "back", {tokens, 16, top_k * n}, Path::automatic, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(h.data(), top_k * n),
                         k::mixed(back.source(), ids.data(), shares.data(), top_k, 16, n, number),
                         k::store(y.data(), 16), {tokens, 16, top_k * n}, policy);
      },
      [&](int64_t m, int64_t i) {
        return product(
            m, i, top_k * n, [&](int64_t r, int64_t c) { return Real<>(value_of(h.get(r * top_k + c / n, c % n))); },
            [&](int64_t r, int64_t c) {
              return shares.value(0, m * top_k + c / n) * back(chosen[size_t(m * top_k + c / n)] * 16 + r, c % n);
            });
      });
}

// A grid has 65535 blocks along y.
TEST_CASE("matmul: experts of more tokens than a grid is high") {
  const int64_t tokens = 131075, n = 3, cols = 16, number = 5;
  Device<int32_t> ids(1, tokens, tokens);
  for (int64_t t = 0; t < tokens; ++t) ids.set(0, t, int32_t(t * 7 % number));
  ids.upload();
  const Matrix<k::half> x(1, tokens, cols, cols, 0, 1);
  const Plain<k::half, DeviceMemory> w(number * n, cols, 0, 0);
  Device<float> y(tokens, n, n);
  expect(
      "tall", {tokens, n, cols}, Path::automatic, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), cols),
                         k::experts(w.source(), ids.data(), n, number), k::store(y.data(), n), {tokens, n, cols},
                         policy);
      },
      [&](int64_t m, int64_t i) {
        return product(
            m, m * 7 % number * n + i, cols, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); }, w);
      });
}

TEST_CASE("matmul: what a call will do can be asked") {
  Stream stream;
  Device<k::half> memory(512, 512, 512);
  Device<float> floats(2000, 512, 512), results(2000, 512, 512);
  const auto ask = [&](auto* p, int64_t m, k::MatmulPolicy policy = {}) {
    const auto in = k::load(static_cast<const std::decay_t<decltype(*p)>*>(p), 512);
    k::MatmulPlan plan;
    REQUIRE(k::matmul_plan(stream, in, in, k::store(results.data(), 512), {m, 512, 512}, {}, policy, plan));
    CHECK((plan.tile_tokens > 0) == (plan.path == Path::gemm));
    CHECK((plan.tile_rows > 0) == (plan.path == Path::gemm));
    return plan;
  };
  CHECK(ask(memory.data(), 1).path == Path::gemv);
  CHECK(ask(memory.data(), 2).path == Path::skinny);
  CHECK(ask(memory.data(), 32).path == Path::skinny);
  CHECK(ask(memory.data(), 200).path == Path::gemm);
  CHECK(ask(floats.data(), 2000).path == Path::simt);
  CHECK(ask(floats.data(), 64).path == Path::gemv);  // tiles would be few
  CHECK(ask(memory.data(), 200, {Path::gemv}).path == Path::gemv);
  CHECK(ask(memory.data(), 200, {Path::gemm, 128, 128}).tile_tokens == 128);
  k::MatmulPlan plan;
  const auto in = k::load(static_cast<const k::half*>(memory.data()), 512);
  CHECK(!k::matmul_plan(stream, in, in, k::store(memory.data(), 512), {200, 512, 512}, {}, {Path::simt}, plan));
  CHECK(!k::matmul_plan(stream, in, in, k::store(memory.data(), 512), {-1, 512, 512}, {}, {}, plan));
  memory.download();
  CHECK(memory.intact());
}

// Twenty tiles of 192 x 128 for each of four multiprocessors; of 64 x 64 half a one for each of 1,000.
TEST_CASE("matmul: blocks stay where there are many tiles") {
  int image = 0;
  REQUIRE(k::detail::image_architecture<AnyKernel>(k::Exec{}, image));
  Stream stream;
  const int64_t m = 3840, n = 512, cols = 4096;
  const Device<k::half> memory(m, cols, cols);
  const Device<float> results(m, n, n);
  const auto ask_with = [&](const auto& sink, int sms, k::MatmulPolicy policy) {
    k::DeviceInfo device = k::Exec(stream).device();
    device.sm_count = sms;
    const auto in = k::load(static_cast<const k::half*>(memory.data()), cols);
    k::MatmulPlan plan;
    REQUIRE(k::matmul_plan(k::Exec(stream, device), in, in, sink, {m, n, cols}, {}, policy, plan));
    return plan;
  };
  const auto ask = [&](int sms, k::MatmulPolicy policy) { return ask_with(k::store(results.data(), n), sms, policy); };
  const k::MatmulPlan few = ask(4, {});
  CHECK(few.tiles_at_once == (image == 90 ? 2 : 1));
  if (image == 90) CHECK((few.tile_tokens == 192 && few.tile_rows == 128));
  CHECK(ask(4, {Path::gemm, 128, 256}).tiles_at_once == 1);
  CHECK(ask(1000, {}).tiles_at_once == 1);
  // Not by themselves where the sink reads a matrix.
  const auto residual = k::add(k::load(results.data(), n)) | k::store(results.data(), n);
  k::MatmulPolicy turns;
  turns.tiles_at_once = 2;
  CHECK(ask_with(residual, 4, {}).tiles_at_once == 1);
  if (image == 90) CHECK(ask_with(residual, 4, turns).tiles_at_once == 2);
}

TEST_CASE("matmul: a plan says why it is not the fastest") {
  Stream stream;
  Device<k::half> memory(520, 520, 520);
  Device<float> floats(2000, 512, 512), results(2000, 256, 256);
  const k::half* const p = memory.data();
  const auto half_rows = k::load(p, 512);
  const auto ask = [&](const auto& x, const auto& w, int64_t m, int64_t cols, k::MatmulPolicy policy = {}) {
    k::MatmulPlan plan;
    REQUIRE(k::matmul_plan(stream, x, w, k::store(results.data(), 256), {m, 256, cols}, {}, policy, plan));
    return plan;
  };
  const auto says = [](const k::MatmulPlan& plan, const char* start) {
    return std::string(plan.why_not).compare(0, std::strlen(start), start) == 0;
  };

  for (const int64_t m : {1, 2, 20, 200}) {
    const k::MatmulPlan plan = ask(half_rows, half_rows, m, 512);
    CHECK(std::string(plan.why_not) == "");
    CHECK(plan.weight_pack == 8);
    CHECK(plan.input_pack == 8);
  }
  for (const int64_t m : {1, 2, 20, 200}) {
    const k::MatmulPlan weights = ask(half_rows, k::load(p + 1, 512), m, 504),
                        inputs = ask(k::load(p, 505), half_rows, m, 504), cut = ask(half_rows, half_rows, m, 500);
    CHECK(says(weights, "weights: pointer"));
    for (const k::MatmulPlan& plan : {weights, inputs}) CHECK(plan.path == (m <= 2 ? Path::gemv : Path::gemm));
    CHECK((m > 2 || cut.path == (m == 1 ? Path::gemv : Path::gemm)));
    CHECK(weights.weight_pack == 1);
    CHECK(says(inputs, "x: pointer"));
    CHECK(inputs.input_pack == 1);
    // Tiles are copied with their ends cut off.
    CHECK(says(cut, "K is not") == (m < 200));
    CHECK(cut.weight_pack == (cut.path == Path::gemv ? 4 : cut.path == Path::gemm ? 8 : 1));
    CHECK(says(ask(half_rows, half_rows | k::scale(2), m, 512), m < 3 ? "weights: a map" : "weights: each block"));
  }
  for (const int64_t m : {20, 200}) {
    CHECK(says(ask(k::load(static_cast<const float*>(floats.data()), 512), half_rows, m, 512), "x: each block"));
    CHECK(says(ask(half_rows | k::scale(2), half_rows, m, 512), "x: each block"));
  }
  const auto float_rows = k::load(static_cast<const float*>(floats.data()), 512);
  for (const int64_t m : {64, 2000})  // on CUDA cores without and with tiles
    CHECK(says(ask(float_rows, float_rows, m, 512), "weights: tensor cores would round"));
  k::MatmulPolicy invariant;
  invariant.batch_invariant = true;
  CHECK(says(ask(half_rows, half_rows, 2, 512, invariant), "policy: batch_invariant"));
  CHECK(ask(half_rows, half_rows, 2, 512, invariant).path == Path::gemm);
  CHECK(ask(float_rows, float_rows, 2, 512, invariant).path == Path::simt);
  invariant.path = Path::skinny;
  k::MatmulPlan plan;
  CHECK(
      !k::matmul_plan(stream, half_rows, half_rows, k::store(results.data(), 256), {2, 256, 512}, {}, invariant, plan));
}

namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// The rows of a product of 300 tokens, each again in products of few and of many, from different places on.
template <class TX, class X, class W>
void same_bits(const char* what, const X& inputs_from, const W& w, int64_t n, int64_t cols) {
  INFO(what);
  const int64_t most = 300;
  const Matrix<TX> x(31, most, cols, cols + 8, 0, 1);
  k::MatmulPolicy policy;
  policy.batch_invariant = true;
  Stream stream;
  const auto run = [&](Device<float>& y, int64_t first, int64_t m) {
    const TX* from = x.data() + first * x.ld();
    REQUIRE(k::matmul(stream, inputs_from(k::load(from, x.ld())), w.source(), k::store(y.data(), y.ld()), {m, n, cols},
                      policy));
    stream.wait();
    y.download();
    CHECK(y.intact());
  };
  Device<float> whole(most, n, n + 1);
  run(whole, 0, most);
  Shortened shortened;
  for (const int64_t m : {1, 2, 5, 17, 33, 64, 65, 100, 130, 161, 299}) {
    if (shortened.leaves_out()) continue;
    const int64_t first = most - m;
    Device<float> y(m, n, n + 3, 1);
    run(y, first, m);
    int64_t different = 0;
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < n; ++c) different += bits_of(y.get(r, c)) != bits_of(whole.get(first + r, c));
    }
    INFO(m << " tokens");
    CHECK(different == 0);
  }
}

}  // namespace

TEST_CASE("matmul: a row's bits do not depend on its batch") {
  const auto as_they_are = [](const auto& source) { return source; };
  const int64_t n = 203, cols = 4104;
  same_bits<k::bfloat16>("bfloat16", as_they_are, Plain<k::bfloat16, DeviceMemory>(n, cols, 8, 0), n, cols);
  same_bits<k::bfloat16>("bfloat16 in whole slabs", as_they_are, Plain<k::bfloat16, DeviceMemory>(224, cols, 8, 0), 224,
                         cols);
  same_bits<k::half>("misaligned weights", as_they_are, Plain<k::half, DeviceMemory>(n, 520, 1, 1), n, 520);
  same_bits<k::half>(
      "normalized inputs", [](const auto& source) { return k::normed(source, k::RmsNorm{}); },
      Plain<k::half, DeviceMemory>(n, cols, 8, 0), n, cols);
  for (const bool in_words : {false, true})
    same_bits<k::half>("4 bits", as_they_are, FourBit<k::half, true, DeviceMemory>(n, 4096, 64, 0, 0, in_words), n,
                       4096);
  same_bits<float>("float", as_they_are, Plain<float, DeviceMemory>(n, 1032, 8, 0), n, 1032);
}

namespace {

// Tiles take weights rounded to 16 bits: by `rounded`.
template <class W>
void turned_products(const char* what, const W& w, const Turning& turn, int64_t n, int64_t cols,
                     std::initializer_list<Path> paths, double rounded = 0x1p-10) {
  const Numbers<float, DeviceMemory> frequencies(turn.frequencies);
  const Numbers<int32_t, DeviceMemory> positions(turn.positions);
  const k::Rope map = turn.map(positions.data(), frequencies.data());
  for (const int64_t m : {1, 2, 7, 33, 130}) {
    const Matrix<k::half> x(33, m, cols, cols + 8, 0, 1);
    const auto in = k::load(static_cast<const k::half*>(x.data()), x.ld());
    Device<float> y(m, n, n + 2);
    Stream stream;
    k::MatmulPlan paired, alone;
    REQUIRE(k::matmul_plan(stream, in, k::paired(w.source(), map), map | k::store(y.data(), y.ld()), {m, n, cols}, {},
                           {}, paired));
    REQUIRE(k::matmul_plan(stream, in, w.source(), k::store(y.data(), y.ld()), {m, n, cols}, {}, {}, alone));
    for (const Path path : paths) {
      expect(
          what, {m, n, cols}, path, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, k::paired(w.source(), map), map | k::store(y.data(), y.ld()), {m, n, cols},
                             policy);
          },
          [&](int64_t row, int64_t col) {
            return turn(
                [&](int64_t at) {
                  return product(
                      row, at, cols, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(path, cols),
                      alone.weights_copied || path == Path::gemm ? rounded : 0);
                },
                row, col);
          });
    }
    CHECK(paired.path == alone.path);
    CHECK(paired.weight_pack == alone.weight_pack);
    CHECK(std::string(paired.why_not) == "");
  }
}

}  // namespace

TEST_CASE("matmul: paired weights keep the fast paths") {
  const int64_t n = 3 * 64, cols = 512;
  for (const Turning& turn : {Turning(64, 64, false, 130), Turning(64, 48, false, 130), Turning(64, 64, true, 130)}) {
    turned_products("paired half", Plain<k::half, DeviceMemory>(n, cols, 8, 0), turn, n, cols,
                    {Path::automatic, Path::gemv, Path::skinny, Path::gemm}, 0);
    turned_products("paired int4, groups of 32", FourBit<k::half, true, DeviceMemory>(n, cols, 32, 0, 0, true), turn, n,
                    cols, {Path::automatic, Path::gemm});
    turned_products("paired int4, groups of 128", FourBit<k::half, false, DeviceMemory>(n, cols, 128, 0, 0, true), turn,
                    n, cols, {Path::automatic, Path::gemm});
    turned_products("paired int8", Scaled<int8_t, k::half, DeviceMemory>(n, cols, Grain::row, 1, 16, 0), turn, n, cols,
                    {Path::automatic, Path::gemm});
  }
}

// ---- calls ----------------------------------------------------------------------------------------------------------

TEST_CASE("matmul: NaN and infinity reach the results they belong to, and no others") {
  const int64_t n = 40, cols = 136;
  for (const int64_t m : {1, 3, 8, 20, 40}) {
    Device<k::half> x(m, cols, cols), w(n, cols, cols);
    randomize(x, 1);
    randomize(w, 2);
    x.set(m / 2, 5, make<k::half>(std::nan("")));
    w.set(7, 9, make<k::half>(HUGE_VAL));
    x.upload(), w.upload();
    for (const Path path : {Path::automatic, Path::gemv, Path::skinny, Path::gemm}) {
      Device<float> y(m, n, n);
      Stream stream;
      REQUIRE(k::matmul(stream, k::load(x.data(), cols), k::load(w.data(), cols), k::store(y.data(), n), {m, n, cols},
                        {path}));
      stream.wait();
      y.download();
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          INFO(describe("special", {m, n, cols}, path) << " " << r << " " << c);
          const float got = y.get(r, c);
          REQUIRE((got != got) == (r == m / 2));
          REQUIRE((std::fabs(got) == HUGE_VALF) == (r != m / 2 && c == 7));
        }
      }
    }
  }
}

TEST_CASE("matmul: the same bits every time, and in a graph") {
  const int64_t n = 300, cols = 4096;
  const Matrix<k::half> x(1, 40, cols, cols, 0, 1);
  const Plain<k::half, DeviceMemory> w(n, cols, 0, 0);
  for (const int64_t m : {1, 3, 8, 20, 40}) {
    std::vector<unsigned char> first;
    for (int round = 0; round < 4; ++round) {
      Device<float> y(m, n, n);
      Stream stream;
      const auto call = [&] {
        return k::matmul(stream, k::load(static_cast<const k::half*>(x.data()), cols), w.source(),
                         k::store(y.data(), n), {m, n, cols});
      };
      k::Status status;
      run_in(stream, round % 2 == 1, [&] { status = call(); });
      REQUIRE(status);
      y.download();
      if (round == 0) first = y.bytes();
      CHECK(y.bytes() == first);
    }
  }
}

// Each call reads what the one before it writes, and nothing but the weights before that has ended.
TEST_CASE("matmul: a chain of products that ask for their weights early") {
  for (const auto& size : {std::pair<int64_t, int64_t>{1, 512}, {2, 512}, {3, 512}, {20, 512}, {40, 512}, {8, 2048}}) {
    if (is_shortened() && size.first != 20) continue;
    const int64_t m = size.first, n = size.second;
    const Matrix<k::half> x(1, m, n, n, 0, 1);
    const Plain<k::half, DeviceMemory> w(n, n, 0, 0, 0.04);
    Device<k::half> a(m, n, n), b(m, n, n);
    const auto chain = [&](const k::Exec& ex, bool ready) {
      k::MatmulPolicy policy;
      policy.weights_ready = ready;
      REQUIRE(k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), n), w.source(), k::store(a.data(), n),
                        {m, n, n}, policy));
      for (int i = 0; i < 20; ++i) {
        Device<k::half>&from = i % 2 ? b : a, &to = i % 2 ? a : b;
        REQUIRE(k::matmul(ex, k::load(static_cast<const k::half*>(from.data()), n), w.source(), k::store(to.data(), n),
                          {m, n, n}, policy));
      }
    };
    Stream stream;
    chain(k::Exec(stream), false);
    stream.wait();
    a.download();
    const auto want = a.bytes();
    for (int round = 0; round < (is_shortened() ? 1 : 5); ++round) {
      chain(k::Exec(stream).programmatic(true), true);
      stream.wait();
      a.download();
      CHECK(a.bytes() == want);
    }
  }
}

TEST_CASE("matmul: experts chosen by the kernel ahead") {
  const int64_t n = 24, cols = 72, number = 6;
  const std::vector<int32_t> chosen = {3, 5, 1, 4};
  const int64_t tokens = int64_t(chosen.size());
  const Matrix<k::half> x(1, tokens, cols, cols, 0, 1);
  const Plain<k::half, DeviceMemory> w(number * n, cols, 0, 0);
  Device<int32_t> source(1, tokens, tokens), ids(1, tokens, tokens);
  filled(source, chosen);
  Device<float> y(tokens, n, n);
  for (int round = 0; round < 5; ++round) {
    expect(
        "late", {tokens, n, cols}, Path::automatic, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          check_cuda(cudaMemsetAsync(ids.data(), 0, size_t(tokens) * sizeof(int32_t), ex.stream()));
          slow_copy<<<1, 32, 0, ex.stream()>>>(source.data(), ids.data(), tokens, 200000);
          check_cuda(cudaGetLastError());
          return k::matmul(k::Exec(ex).programmatic(true), k::load(static_cast<const k::half*>(x.data()), cols),
                           k::experts(w.source(), ids.data(), n, number), k::store(y.data(), n), {tokens, n, cols},
                           policy);
        },
        [&](int64_t m, int64_t i) {
          return product(
              m, chosen[size_t(m)] * n + i, cols, [&](int64_t r, int64_t c) { return Real<>(x.value(r, c)); }, w);
        });
  }
}

TEST_CASE("matmul: what cannot be done is refused") {
  Stream stream;
  Device<float> memory(8, 8, 8);
  const float* p = memory.data();
  const auto in = k::load(p, 8);
  const auto out = k::store(memory.data(), 8);
  CHECK(!k::matmul(stream, in, k::load(static_cast<const float*>(nullptr), 8), out, {1, 8, 8}));
  CHECK(!k::matmul(stream, in, k::load(p, 8), out, {1, 8, -8}));
  CHECK(!k::matmul(stream, in, k::load(p, 8), out, {1, 8, (int64_t(1) << 30) + 1}));
  CHECK(!k::matmul(stream, in, k::load(p, 8), out, {1, 8, 8}, {Path::gemm}));
  CHECK(!k::matmul(stream, in, k::load(p, 8), out, {1, 8, 8}, {Path::skinny}));
  CHECK(!k::matmul(stream, in, k::load(p, 8), out, {1, 8, 8}, k::Groups{2}, {Path::gemv}));
  CHECK(!k::matmul(stream, in, k::load(p, 8), out, {1, 8, 8}, k::Groups{-1}));
  CHECK(!k::matmul(stream, in, k::experts(k::load(p, 8), nullptr, 8, 2), out, {1, 8, 8}));
}
