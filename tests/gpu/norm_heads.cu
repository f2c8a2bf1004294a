// Norms of heads on the GPU: against double, and from the functors that the CPU takes.
#include "support/gpu.cuh"

#include <kernels/cpu/norm_heads.h>
#include <kernels/elementwise.cuh>
#include <kernels/norm_heads.cuh>

#include "support/norm_heads.h"

using namespace test;

namespace {
const auto run = [](const auto& in, const auto& out, const k::HeadShape& shape, const auto& options) {
  Stream stream;
  const k::Status status = k::norm_heads(k::Exec(stream), in, out, shape, options);
  stream.wait();
  return status;
};
}  // namespace

TEST_CASE("norm_heads: queries, keys and values of one buffer") {
  Tally t;
  for (const HeadCase& c : head_cases()) {
    check_norm_heads<k::bfloat16, DeviceMemory>(t, c, c.turn.head_dim == 256, run);
    check_norm_heads<float, DeviceMemory>(t, c, false, run);
  }
  CHECK_TALLY(t);
}

// More heads than all blocks take at once.
TEST_CASE("norm_heads: blocks that take heads one after the other") {
  Tally t;
  const HeadCase c{Turning(256, 256, false, 7000), 7000, 3, 1};
  check_norm_heads<k::half, DeviceMemory>(t, c, false, run);
  CHECK_TALLY(t);
}

TEST_CASE("norm_heads: codes of heads, with the scales that are found for them") {
  Tally t;
  for (const HeadCase& c : head_cases()) {
    if (c.in_place) continue;
    check_found_heads<k::bfloat16, int8_t, float, DeviceMemory>(t, c, run);
    check_found_heads<float, k::float8_e4m3, k::half, DeviceMemory>(t, c, run);
  }
  CHECK_TALLY(t);
}

TEST_CASE("norm_heads: heads normalized as they are read") {
  Tally t;
  Stream stream;
  for (const HeadCase& c : head_cases()) {
    check_normed_heads<k::half, DeviceMemory>(t, c, [&](const auto& in, const auto& out, int64_t rows, int64_t cols) {
      const k::Status status = k::copy(k::Exec(stream), in, out, rows, cols);
      stream.wait();
      return status;
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("norm_heads: without rope, and LayerNorm") {
  Tally t;
  check_plain_heads<float, DeviceMemory>(t, run);
  CHECK_TALLY(t);
}

// More heads than a grid's blocks take at once are the same loop; here more than one block takes, of a number that no
// block divides.
TEST_CASE("norm_heads: the CPU's results from the same numbers, in a graph too") {
  const int64_t tokens = 1001, heads = 7, dim = 64, cols = heads * dim;
  const RandomMatrix<k::half, DeviceMemory> x(1, tokens, cols, cols);
  const RandomMatrix<k::half> same(1, tokens, cols, cols);
  const RandomMatrix<float, DeviceMemory> weight(2, 1, dim, dim);
  const RandomMatrix<float> same_weight(2, 1, dim, dim);
  std::vector<int32_t> positions;
  for (int64_t r = 0; r < tokens; ++r) positions.push_back(int32_t(r * 37));
  std::vector<float> frequencies(dim / 2);
  k::rope_frequencies(frequencies.data(), int(dim), 1e6);
  const Numbers<int32_t, DeviceMemory> where(positions);
  const Numbers<float, DeviceMemory> how_fast(frequencies);
  Device<float> y(tokens, cols, cols), again(tokens, cols, cols);
  std::vector<float> host(size_t(tokens * cols));
  const k::HeadShape shape{tokens, heads, dim, 5};
  const auto call = [&](const auto& run, const k::half* in, const float* w, const int32_t* at, const float* f,
                        float* out) {
    return run(k::load(in, cols),
               k::affine(k::each_head(w, dim)) | k::rope(at, f, int(dim)).rotary_dim(32) | k::store(out, cols));
  };
  Stream stream;
  const auto on_gpu = [&](const auto& in, const auto& out) {
    return k::norm_heads(k::Exec(stream).programmatic(true), in, out, shape);
  };
  CHECK(call(on_gpu, x.data(), weight.data(), where.data(), how_fast.data(), y.data()));
  k::Status captured;
  run_in(stream, /*graph*/ true,
         [&] { captured = call(on_gpu, x.data(), weight.data(), where.data(), how_fast.data(), again.data()); });
  CHECK(captured.ok());
  y.download(), again.download();
  CHECK(y.intact());
  CHECK(again.intact());
  CHECK(call([&](const auto& in, const auto& out) { return k::cpu::norm_heads(k::cpu::Exec{2}, in, out, shape); },
             same.data(), same_weight.data(), positions.data(), frequencies.data(), host.data()));
  Tally t;
  for (int64_t r = 0; r < tokens; ++r) {
    for (int64_t i = 0; i < cols; ++i) {
      const float a = y.get(r, i), b = host[size_t(r * cols + i)];
      t.expect(k::bit_cast<uint32_t>(a) == k::bit_cast<uint32_t>(again.get(r, i)),
               "row %d, column %d: %g in a graph, %g without", int(r), int(i), double(again.get(r, i)), double(a));
      t.expect(std::fabs(a - b) <= 3e-5f, "row %d, column %d: %g, on the CPU %g", int(r), int(i), double(a), double(b));
    }
  }
  CHECK_TALLY(t);
}
