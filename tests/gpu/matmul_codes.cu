// Products on the GPU with weights of 8 and 4 bits.
#include "support/gpu_products.cuh"

using namespace test;

namespace {

// Whether a product with these weights on the skinny path copies them to shared memory as they lie.
template <class TX, class Weights>
bool streams(int64_t m, int64_t n, int64_t cols, const Weights& w) {
  const Device<TX> x(m, cols, cols + 8);
  Device<float> y(m, n, n);
  k::MatmulPlan plan;
  REQUIRE(k::matmul_plan(Stream(), k::load(static_cast<const TX*>(x.data()), x.ld()), w.source(),
                         k::store(y.data(), n), {m, n, cols}, {}, {Path::skinny}, plan));
  return plan.weights_copied;
}

// Weights that are decoded, with few tokens and with many. make(n, k, gap, shift): gap and shift in weights; without
// them the rows are aligned and tensor cores take the codes as they are.
template <class TX = k::half, class Make>
void decoded(const char* what, int64_t unit, const Make& make) {
  for (const bool aligned : {true, false}) {
    for (const int64_t cols :
         aligned ? std::vector<int64_t>{32, 64, 96, 512, 1024, 2240, 4128} : std::vector<int64_t>{64, 200, 1024}) {
      for (const int64_t n : {3, 70}) {
        const auto w = aligned ? make(n, cols, (unit - cols % unit) % unit, 0) : make(n, cols, unit / 4, unit / 4);
        for (const int64_t m : {1, 3, 7, 16, 40}) {
          check<TX, float>(what, {m, n, cols}, Path::gemv, w);
          // The weights are rounded, and their scales.
          constexpr double rounded = std::is_same<TX, k::bfloat16>::value ? 0x1p-8 : 0x1p-10;
          check<TX, float>(what, {m, n, cols}, Path::gemm, w, rounded);
          // The inputs are exact. Where codes do not stream, the sums of a pack of them are scaled as a whole.
          if (aligned) check<TX, float>(what, {m, n, cols}, Path::skinny, w, streams<TX>(m, n, cols, w) ? rounded : 0);
        }
      }
    }
  }
}

// Two codes of fp8 at a time, as halves.
template <class T>
__global__ void halves_of_codes(uint32_t* out) {
  out[threadIdx.x] = k::detail::halves_of_float8<T>(threadIdx.x | (255 - threadIdx.x) << 8);
}
template <class T>
void every_code() {
  Device<uint32_t> out(1, 256, 256);
  halves_of_codes<T><<<1, 256>>>(out.data());
  check_cuda(cudaDeviceSynchronize());
  out.download();
  for (int i = 0; i < 256; ++i) {
    for (int j = 0; j < 2; ++j) {
      const uint8_t byte = uint8_t(j == 0 ? i : 255 - i);
      const uint16_t bits = uint16_t(out.get(0, i) >> (16 * j));
      T code;
      k::half half;
      memcpy(&code, &byte, 1), memcpy(&half, &bits, 2);
      const float want = k::convert<float>(code), got = k::convert<float>(half);
      INFO(int(byte));
      CHECK((got == want || (got != got && want != want)));
    }
  }
}

}  // namespace

TEST_CASE("matmul: every code of fp8 as a half") {
  every_code<k::float8_e4m3>();
  every_code<k::float8_e5m2>();
}
TEST_CASE("matmul: weights of 8 bits") {
  decoded("e4m3 by block", 16, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return Scaled<k::float8_e4m3, float, DeviceMemory>(n, c, Grain::block, 128, gap, shift);
  });
  decoded("e5m2 by row", 16, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return Scaled<k::float8_e5m2, float, DeviceMemory>(n, c, Grain::row, 1, gap, shift);
  });
  decoded("e5m2", 16, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return Plain<k::float8_e5m2, DeviceMemory>(n, c, gap, shift);
  });
  for (const int group : {32, 64, 256}) {
    decoded("int8 by group", 16, [&](int64_t n, int64_t c, int64_t gap, int64_t shift) {
      return Scaled<int8_t, k::half, DeviceMemory>(n, c, Grain::group, group, gap, shift);
    });
  }
}
TEST_CASE("matmul: weights of 8 bits and bfloat16") {
  decoded<k::bfloat16>("e4m3 by block", 16, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return Scaled<k::float8_e4m3, float, DeviceMemory>(n, c, Grain::block, 128, gap, shift);
  });
  decoded<k::bfloat16>("int8 by group", 16, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return Scaled<int8_t, k::half, DeviceMemory>(n, c, Grain::group, 64, gap, shift);
  });
}
TEST_CASE("matmul: weights of 4 bits") {
  for (const bool in_words : {false, true}) {  // scales: codes with those of half stream only then
    for (const int group : {32, 64, 128}) {
      decoded("int4", 32, [&](int64_t n, int64_t c, int64_t gap, int64_t shift) {
        return FourBit<k::half, false, DeviceMemory>(n, c, group, gap / 8, shift / 8, in_words);
      });
    }
    for (const int group : {32, 128, 256}) {
      decoded("uint4", 32, [&](int64_t n, int64_t c, int64_t gap, int64_t shift) {
        return FourBit<float, true, DeviceMemory>(n, c, group, gap / 8, shift / 8, in_words);
      });
    }
  }
  decoded("gf4", 32, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return EightInAWord<DeviceMemory>(n, c, gap / 8, shift / 8);
  });
  decoded("fp4, scales of e4m3", 32, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return FourBitFloats<k::float8_e4m3, DeviceMemory>(n, c, 32, gap / 8, shift / 8);
  });
}
TEST_CASE("matmul: groups of 16 weights of 4 bits") {
  for (const int64_t cols : {32, 200, 1024}) {
    const FourBitFloats<k::float8_e4m3, DeviceMemory> w(70, cols, 16, 0, 0);
    for (const int64_t m : {1, 3, 16, 40, 300}) {
      check<k::half, float>("fp4", {m, 70, cols}, Path::automatic, w, 0x1p-10);
      check<k::bfloat16, float>("fp4", {m, 70, cols}, Path::automatic, w, 0x1p-8);
    }
  }
}
TEST_CASE("matmul: weights of 4 bits and bfloat16") {
  for (const bool in_words : {false, true}) {
    decoded<k::bfloat16>("int4", 32, [&](int64_t n, int64_t c, int64_t gap, int64_t shift) {
      return FourBit<k::half, false, DeviceMemory>(n, c, 64, gap / 8, shift / 8, in_words);
    });
    decoded<k::bfloat16>("uint4", 32, [&](int64_t n, int64_t c, int64_t gap, int64_t shift) {
      return FourBit<float, true, DeviceMemory>(n, c, 32, gap / 8, shift / 8, in_words);
    });
  }
  decoded<k::bfloat16>("gf4", 32, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return EightInAWord<DeviceMemory>(n, c, gap / 8, shift / 8);
  });
  decoded<k::bfloat16>("fp4, scales of e8m0", 32, [](int64_t n, int64_t c, int64_t gap, int64_t shift) {
    return FourBitFloats<k::float8_e8m0, DeviceMemory>(n, c, 32, gap / 8, shift / 8);
  });
}
TEST_CASE("matmul: quantized weights and inputs of float") {
  for (const int64_t m : {1, 2}) {  // so few that they keep all their digits
    const Sizes s{m, 40, 544};
    const FourBit<float, false, DeviceMemory> w(s.n, s.k, 32, 0, 0);
    check<float, float>("int4", s, Path::skinny, w, 0x1p-21, 4);
    for (const Path path : {Path::skinny, Path::automatic})
      check<float, float>("int8", s, path, Scaled<int8_t, float, DeviceMemory>(s.n, s.k, Grain::row, 1, 0, 0), 0x1p-21,
                          4);
  }
}
TEST_CASE("matmul: inputs and weights of 8 bits") {
  for (const Sizes s : {Sizes{1, 40, 544}, Sizes{5, 40, 544}, Sizes{70, 130, 544}}) {
    const Scaled<k::float8_e4m3, float, DeviceMemory> w(s.n, s.k, Grain::block, 128, 0, 0);
    const Matrix<k::float8_e4m3> x(21, s.m, s.k, s.k, 0, 1);
    const Matrix<float> row_scales(5, 1, s.m, s.m, 0, 1);
    Device<float> y(s.m, s.n, s.n + 3);
    expect(
        "e4m3 x e4m3", s, Path::automatic, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(
              ex, k::load(static_cast<const k::float8_e4m3*>(x.data()), s.k), w.source(),
              k::mul(k::per_row(static_cast<const float*>(row_scales.data()))) | k::store(y.data(), y.ld()),
              {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
                     m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k),
                     0x1p-10) *
                 Real<>(row_scales.value(0, m));
        });
  }
}

// Blocks that share a multiprocessor, with several steps for each group of warps.
TEST_CASE("matmul: codes of more rows than multiprocessors take at once") {
  const int64_t n = 64 * k::Exec(Stream()).device().sm_count + 70, cols = 2240;
  const FourBit<k::half, false, DeviceMemory> int4(n, cols, 32, 0, 0, true);
  const FourBit<float, true, DeviceMemory> uint4(n, cols, 32, 0, 0, true);
  const Scaled<int8_t, k::half, DeviceMemory> int8(n, cols, Grain::group, 32, 0, 0);
  for (const int64_t m : {3, 20}) {
    REQUIRE(streams<k::half>(m, n, cols, int4));
    check<k::half, float>("int4", {m, n, cols}, Path::skinny, int4, 0x1p-10);
    check<k::half, float>("uint4", {m, n, cols}, Path::skinny, uint4, 0x1p-10);
    check<k::half, float>("int8", {m, n, cols}, Path::skinny, int8, 0x1p-10);
    const Matrix<k::half> x(1, m, cols, cols, 0, 0.3);
    const auto in = k::load(static_cast<const k::half*>(x.data()), cols);
    const std::vector<Row<>> normal =
        rmsnorm_rows({m, n, cols}, 1e-6, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); });
    Device<float> y(m, n, n);
    expect(
        "rmsnorm", {m, n, cols}, Path::skinny, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(ex, k::normed(in, k::RmsNorm{}.eps(1e-6f)), int4.source(), k::store(y.data(), n),
                           {m, n, cols}, policy);
        },
        [&](int64_t r, int64_t c) {
          return product(
              r, c, cols, [&](int64_t a, int64_t i) { return normal[size_t(a)][size_t(i)]; }, int4,
              units(Path::skinny, cols), 0x1p-10);
        });
  }
}

// Two to seven blocks for each multiprocessor, of which up to four run at a time.
TEST_CASE("matmul: codes of many more rows than multiprocessors take at once") {
  const int64_t cols = 800;
  const int sms = 2;
  for (const int each : {2, 3, 4, 7}) {
    const int64_t n = 64 * sms * (each - 1) + 6;
    const FourBit<k::half, false, DeviceMemory> by_32(n, cols, 32, 0, 0, true), by_128(n, cols, 128, 0, 0, true);
    const FourBit<float, true, DeviceMemory> uint4(n, cols, 128, 0, 0, true);
    const Scaled<int8_t, k::half, DeviceMemory> int8(n, cols, Grain::group, 128, 0, 0);
    const Scaled<k::float8_e5m2, float, DeviceMemory> by_row(n, cols, Grain::row, 1, 0, 0);
    for (const int64_t m : {2, 7, 12, 30}) {
      const auto check_few = [&](const char* what, const auto& w) {
        check<k::half, float>(what, {m, n, cols}, Path::skinny, w, 0x1p-10, 8, 0, sms);
      };
      check_few("int4 by 32", by_32), check_few("int4 by 128", by_128), check_few("uint4", uint4);
      check_few("int8", int8), check_few("e5m2", by_row);
    }
  }
}

TEST_CASE("matmul: gates, stacked weights and normalized inputs, with weights of 4 bits") {
  for (const bool in_words : {false, true}) for (const int group : {32, 128}) {
    for (const Sizes s : {Sizes{1, 21, 4128}, Sizes{2, 40, 1056}, Sizes{5, 7, 288}, Sizes{12, 70, 4352},
                          Sizes{27, 40, 2304}}) {
      const Matrix<k::half> x(1, s.m, s.k, s.k, 0, 0.3);
      const FourBit<k::half, false, DeviceMemory> gate(s.n, s.k, group, 0, 0, in_words),
          up(s.n, s.k, group, 4, 4, in_words);
      const auto in = k::load(static_cast<const k::half*>(x.data()), s.k);
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      const double u = units(Path::skinny, s.k), rounded = streams<k::half>(s.m, s.n, s.k, up) ? 0x1p-10 : 0;
      Device<float> y(s.m, s.n, s.n + 1), both(s.m, 2 * s.n, 2 * s.n);
      expect(
          "swiglu", s, Path::skinny, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, k::gated(gate.source(), up.source()), k::swiglu() | k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return silu(product(m, n, s.k, value, gate, u, rounded)) * product(m, n, s.k, value, up, u, rounded);
          });
      expect(
          "stacked", s, Path::skinny, both,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, in, k::stacked(gate.source(), s.n, up.source(), s.n), k::store(both.data(), both.ld()),
                             {s.m, 2 * s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return n < s.n ? product(m, n, s.k, value, gate, u, rounded)
                           : product(m, n - s.n, s.k, value, up, u, rounded);
          });
      const std::vector<Row<>> normal = rmsnorm_rows(s, 1e-6, value);
      expect(
          "rmsnorm", s, Path::skinny, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, k::normed(in, k::RmsNorm{}.eps(1e-6f)), up.source(), k::store(y.data(), y.ld()),
                             {s.m, s.n, s.k}, policy);
          },
          [&](int64_t m, int64_t n) {
            return product(
                m, n, s.k, [&](int64_t r, int64_t i) { return normal[size_t(r)][size_t(i)]; }, up, u, rounded);
          });
    }
  }
}
