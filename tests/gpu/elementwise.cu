// copy() on the GPU: the cases that the CPU passes, and the CPU's own results as a second oracle; wide accesses,
// graphs, and what is scheduled early.
#include <kernels/elementwise.cuh>

#include "support/gpu.cuh"

#include <kernels/cpu/elementwise.h>

#include "support/elementwise.h"

using namespace test;

namespace {

struct GpuDoor {
  template <class In, class Out>
  k::Status copy(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return waited(k::copy(stream, in, out, rows, cols));
  }
  template <class In, class Out>
  k::Status copy(const In& in, const Out& out, int64_t n) const { return waited(k::copy(stream, in, out, n)); }
  template <class In, class Out>
  k::Status rmsnorm(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return waited(k::rmsnorm(stream, in, out, rows, cols));
  }
  k::Status waited(const k::Status& status) const {
    stream.wait();
    return status;
  }
  Stream stream;
};
using D = DeviceMemory;

template <class Check>
void run(const Check& check) {
  Tally t;
  const GpuDoor door;
  check(t, door);
  CHECK_TALLY(t);
}

}  // namespace

TEST_CASE("elementwise: activations of all floats") {
  run([](Tally& t, const GpuDoor& door) { check_activations<D>(t, door); });
}
TEST_CASE("elementwise: flat tensors") { run([](Tally& t, const GpuDoor& door) { check_flat<D>(t, door); }); }
TEST_CASE("elementwise: rows, strided and repeated") {
  run([](Tally& t, const GpuDoor& door) { check_rows<D>(t, door); });
}
TEST_CASE("elementwise: gates of two tensors and of halves") {
  run([](Tally& t, const GpuDoor& door) { check_gates<D>(t, door); });
}
TEST_CASE("elementwise: several results") { run([](Tally& t, const GpuDoor& door) { check_several<D>(t, door); }); }
TEST_CASE("elementwise: dropout, drawn and given") {
  run([](Tally& t, const GpuDoor& door) { check_dropout<D>(t, door); });
}
TEST_CASE("elementwise: codes of given scales") {
  run([](Tally& t, const GpuDoor& door) { check_given_scales<D>(t, door); });
}
TEST_CASE("elementwise: codes of scales found for groups") {
  run([](Tally& t, const GpuDoor& door) {
    check_found_scales<int8_t, float, D>(t, door);
    check_found_scales<int8_t, k::half, D>(t, door);
    check_found_scales<k::float8_e4m3, float, D>(t, door);
    check_found_scales<k::float8_e4m3, k::bfloat16, D>(t, door);
  });
}
TEST_CASE("elementwise: codes of scales found for rows") {
  run([](Tally& t, const GpuDoor& door) {
    check_row_scales<float, D>(t, door);
    check_row_scales<k::half, D>(t, door);
    check_row_scales<k::bfloat16, D>(t, door);
  });
}
TEST_CASE("elementwise: in front of a norm") {
  run([](Tally& t, const GpuDoor& door) { check_in_front_of_a_norm<D>(t, door); });
}
TEST_CASE("elementwise: embeddings") { run([](Tally& t, const GpuDoor& door) { check_embeddings<D>(t, door); }); }

// The most that a launch takes at a time, and a little more and less.
TEST_CASE("elementwise: tiles that are full, and that are not") {
  Tally t;
  const GpuDoor door;
  const int64_t tile = int64_t(sm_count()) * 8 * 4 * 256 * 8;
  for (const int64_t n : {tile - 9, tile, tile + 8 * 1024 + 5}) {
    if (t.leaves_out()) continue;
    const RandomMatrix<k::half, D> x(1, 1, n, n);
    Guarded<k::half, D> y(1, n, n);
    const k::Status status =
        door.copy(k::load(static_cast<const k::half*>(x.data())) | k::scale(2), k::store(y.data()), n);
    t.expect(status.ok(), "%s", status.reason());
    y.download();
    t.expect(y.intact(), "wrote outside");
    for (int64_t i = 0; i < n; ++i)
      t.expect(same(y.get(0, i), make<k::half>(2 * x.value(0, i))), "n %d, element %d", int(n), int(i));
  }
  CHECK_TALLY(t);
}

// The same functor objects, over memory that both reach: the same numbers are drawn, and the same codes found.
TEST_CASE("elementwise: the CPU draws and quantizes the same") {
  const GpuDoor door;
  const int64_t rows = 13, cols = 384;
  float *x = nullptr, *scales = nullptr;
  k::float8_e4m3* codes = nullptr;
  check_cuda(cudaMallocHost(&x, size_t(rows * cols) * sizeof(float)));
  check_cuda(cudaMallocHost(&scales, size_t(rows * 3) * sizeof(float)));
  check_cuda(cudaMallocHost(&codes, size_t(rows * cols)));
  Random random(1);
  for (int64_t i = 0; i < rows * cols; ++i) x[i] = float(random.normal());
  const auto in = k::load(static_cast<const float*>(x), cols) | k::dropout(0.4, 7, 8, cols);
  const auto out = k::quantize(codes, cols, scales, 3, 128);
  const auto taken = [&] {
    std::vector<unsigned char> all(size_t(rows * cols) + size_t(rows * 3) * sizeof(float));
    std::memcpy(all.data(), static_cast<const void*>(codes), size_t(rows * cols));
    std::memcpy(all.data() + rows * cols, scales, size_t(rows * 3) * sizeof(float));
    std::memset(static_cast<void*>(codes), 0x55, size_t(rows * cols));
    std::memset(scales, 0x55, size_t(rows * 3) * sizeof(float));
    return all;
  };
  (void)taken();
  REQUIRE(door.copy(in, out, rows, cols));
  const auto gpu = taken();
  REQUIRE(k::cpu::copy(k::cpu::Exec{}, in, out, rows, cols));
  CHECK(gpu == taken());
  cudaFreeHost(x);
  cudaFreeHost(scales);
  cudaFreeHost(codes);
}

// Captured once, replayed with other ids and another report.
TEST_CASE("elementwise: an embedding in a graph") {
  Stream stream;
  const int64_t d = 256, vocabulary = 9;
  const RandomMatrix<k::half, D> table(1, vocabulary, d, d);
  Numbers<int32_t, D> ids({1, 2, 3});
  Numbers<int64_t, D> wrong({-1});
  Guarded<k::half, D> y(3, d, d);
  const auto in = k::embed(k::load(static_cast<const k::half*>(table.data()), d),
                           static_cast<const int32_t*>(ids.data()), vocabulary)
                      .report(wrong.data());
  k::Status status;
  const Graph graph(stream, [&] { status = k::copy(stream, in, k::store(y.data(), d), 3, d); });
  REQUIRE(status);
  Tally t;
  for (const std::vector<int32_t>& next : {std::vector<int32_t>{1, 2, 3}, {8, 0, 8}, {0, 9, -1}}) {
    ids.assign(next);
    graph.replay();
    y.download();
    wrong.download();
    t.expect(wrong.get(0, 0) == (next[1] == 9 ? 1 : -1), "row %d is reported", int(wrong.get(0, 0)));
    for (int64_t r = 0; r < 3; ++r) {
      const int64_t id = next[size_t(r)];
      for (int64_t c = 0; c < d; ++c)
        t.expect(id < 0 || id > 8 ? std::isnan(value_of(y.get(r, c))) : same(y.get(r, c), table.get(id, c)),
                 "row %d, column %d", int(r), int(c));
    }
  }
  CHECK_TALLY(t);
}
