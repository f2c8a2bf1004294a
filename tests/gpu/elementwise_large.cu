// copy() of more elements than 32 bits count: flat, quantized by groups, and with numbers drawn for each element.
#include <kernels/elementwise.cuh>

#include "support/huge.cuh"

#include "support/elementwise.h"

using namespace test;

namespace {

constexpr int64_t kMany = (int64_t(1) << 31) + 4096 + 3;

std::vector<int64_t> places() {
  return {0, (int64_t(1) << 30) - 8, (int64_t(1) << 31) - 8, int64_t(1) << 31, kMany - 11};
}
double hashed(int64_t i) {
  const uint16_t bits = hashed_half(uint64_t(i));
  k::half x;
  std::memcpy(static_cast<void*>(&x), &bits, 2);
  return value_of(x);
}

}  // namespace

TEST_CASE("elementwise: a flat tensor of more than 2^31 elements", "[large]") {
  if (!enough_memory(10)) return skip("needs 10 GB of GPU memory");
  Stream stream;
  Huge in(kMany), out(kMany);
  in.hash();
  Tally t;
  const auto check = [&](const char* what, const auto& source, const auto& want) {
    out.poison();
    const k::Status status = k::copy(stream, source, k::store(out.data()), kMany);
    stream.wait();
    t.expect(status.ok(), "%s: %s", what, status.reason());
    for (const int64_t from : places()) {
      const auto got = out.read(from, 11);
      for (int64_t i = 0; i < 11; ++i)
        t.expect(same(got[size_t(i)], make<k::half>(want(from + i))), "%s: element %lld", what,
                 static_cast<long long>(from + i));
    }
    t.expect(out.intact(), "%s: wrote outside", what);
  };
  const auto x = k::load(static_cast<const k::half*>(in.data()));
  check("scaled", x | k::scale(0.5), [](int64_t i) { return 0.5 * hashed(i); });
  check("dropped", x | k::dropout(0.5, 11, 12),
        [](int64_t i) { return is_dropped(0.5, 11, 12, 0, 0, i) ? 0 : 2 * hashed(i); });
  // No element is left out.
  out.poison();
  check_cuda(cudaMemset(in.data(), 0, size_t(kMany) * 2));
  REQUIRE(k::copy(stream, x | k::shift(1), k::store(out.data()), kMany));
  stream.wait();
  CHECK(out.others(kMany, 0x3c00) == 0);
  CHECK(out.intact());
  CHECK_TALLY(t);
}

TEST_CASE("elementwise: groups and rows of more than 2^31 elements", "[large]") {
  const int64_t rows = 70000, cols = 32768, groups = cols / 128;
  if (!enough_memory(10)) return skip("needs 10 GB of GPU memory");
  Stream stream;
  Huge in(rows * cols), out(rows * cols / 2);
  in.hash();
  const k::half* const x = in.data();
  auto* const codes = reinterpret_cast<int8_t*>(out.data());
  float* scales = nullptr;
  check_cuda(cudaMalloc(&scales, size_t(rows * groups) * sizeof(float)));
  Tally t;
  for (const bool flat : {false, true}) {
    out.poison();
    check_cuda(cudaMemset(scales, 0, size_t(rows * groups) * sizeof(float)));
    const k::Status status =
        flat ? k::copy(stream, k::load(x), k::quantize(codes, 0, scales, 0, 128), rows * cols)
             : k::copy(stream, k::load(x, cols), k::quantize(codes, cols, scales, groups, 128), rows, cols);
    stream.wait();
    t.expect(status.ok(), "%s", status.reason());
    for (const int64_t group : {int64_t(0), (int64_t(1) << 24) - 1, int64_t(1) << 24, rows * groups - 1}) {
      float largest = 0, scale = 0;
      int8_t got[128];
      for (int64_t i = 0; i < 128; ++i) largest = std::fmax(largest, float(std::fabs(hashed(group * 128 + i))));
      DeviceMemory::download(&scale, scales + group, sizeof(scale));
      DeviceMemory::download(got, codes + group * 128, sizeof(got));
      t.expect(scale == largest / 127, "group %lld: scale %g, want %g", static_cast<long long>(group), scale,
               largest / 127);
      for (int64_t i = 0; i < 128; ++i)
        t.expect(got[i] == make<int8_t>(double(float(hashed(group * 128 + i)) * (127 / largest))),
                 "group %lld: code %d", static_cast<long long>(group), int(i));
    }
    t.expect(out.intact(), "wrote outside");
  }
  CHECK_TALLY(t);
  cudaFree(scales);
}
