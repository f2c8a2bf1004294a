// Functors in OneFlow's form, of every kind that its kernels use, in every type, through the doors of
// kernels/oneflow.cuh; how often a load runs; and stores with a state of their own.
#include <kernels/oneflow.cuh>

#include "support/gpu.cuh"
#include "support/oneflow_cases.h"

using namespace test;

namespace {

namespace softmax_doors = oneflow::cuda::softmax;
namespace norm_doors = oneflow::cuda::layer_norm;
namespace rms_doors = oneflow::cuda::rms_norm;

struct Gpu {
  using Memory = DeviceMemory;
  template <class S, class D>
  using DirectLoad = norm_doors::DirectLoad<S, D>;
  template <class S, class D>
  using DirectStore = softmax_doors::DirectStore<S, D>;
  Stream stream;

  bool done(cudaError_t launched) {
    stream.wait();
    return launched == cudaSuccess;
  }
  template <class C, class L, class S>
  bool softmax(const L& load, const S& store, int64_t rows, int64_t cols) {
    return done(softmax_doors::DispatchSoftmax<L, S, C>(stream, load, store, rows, cols));
  }
  template <class C, class L, class S>
  bool log_softmax(const L& load, const S& store, int64_t rows, int64_t cols) {
    return done(softmax_doors::DispatchLogSoftmax<L, S, C>(stream, load, store, rows, cols));
  }
  template <class C, class L, class S>
  bool layernorm(const L& load, const S& store, int64_t rows, int64_t cols, double eps, C* mean, C* inverse) {
    return done(norm_doors::DispatchLayerNorm<L, S, C>(stream, load, store, rows, cols, eps, mean, inverse));
  }
  template <class C, class L, class S>
  bool rmsnorm(const L& load, const S& store, int64_t rows, int64_t cols, double eps, C* inverse) {
    return done(rms_doors::DispatchRmsNorm<L, S, C>(stream, load, store, rows, cols, eps, inverse));
  }
};

}  // namespace

#define WITH(type, call) \
  {                      \
    using T = type;      \
    call;                \
  }
#define IN_EVERY_TYPE(call) \
  Gpu gpu;                  \
  WITH(k::half, call)       \
  WITH(k::bfloat16, call)   \
  WITH(float, call)         \
  WITH(double, call)

TEST_CASE("oneflow: scale and mask, dropout and add") { IN_EVERY_TYPE(flow::scale_mask_dropout<T>(gpu)) }
TEST_CASE("oneflow: bias and mask, broadcast with an index helper") { IN_EVERY_TYPE(flow::bias_mask_broadcast<T>(gpu)) }
TEST_CASE("oneflow: tril") { IN_EVERY_TYPE(flow::tril<T>(gpu)) }
TEST_CASE("oneflow: bias, residual in place, affine") { IN_EVERY_TYPE(flow::skip_in_place<T>(gpu, 1 << 20)) }
TEST_CASE("oneflow: group norm, channels first") { IN_EVERY_TYPE(flow::group_norm_first<T>(gpu)) }
TEST_CASE("oneflow: group norm, channels last") { IN_EVERY_TYPE(flow::group_norm_last<T>(gpu)) }
TEST_CASE("oneflow: a quantizing store") { IN_EVERY_TYPE(flow::quantizing_store<T>(gpu)) }

namespace test {
namespace flow {

// Counts how often each element is loaded, into halves as LayerNorm's do.
struct CountingLoad {
  using LoadType = k::half;
  int32_t* loads;
  int64_t row_size;
  template <int N>
  __device__ void load(k::half* dst, int row, int col) {
    for (int i = 0; i < N; ++i) {
      atomicAdd(loads + row * row_size + col + i, 1);
      dst[i] = k::convert<k::half>(float((row + col + i) % 10));
    }
  }
};

}  // namespace flow
}  // namespace test

// Also in rows that a group or a block shares with others, at the end, and in those too long for registers.
TEST_CASE("oneflow: a load runs once for each element") {
  Gpu gpu;
  // The shared memory of one block of any GPU holds 40,000 columns of halves; clusters hold more.
  const bool clusters = have_clusters();
  for (const int64_t cols : {1, 31, 50, 129, 1000, 1001, 5120, 5121, 8192, 8194, 9001, 20000, 40001, 150000, 300002}) {
    if (cols > 41000 && !clusters) continue;
    for (const int64_t rows : {1, 5, 200}) {
      if (rows * cols > 10000000) continue;
      INFO(rows << " x " << cols);
      Device<int32_t> loads(rows, cols, cols);
      Device<k::half> y(rows, cols, cols);
      check_cuda(cudaMemset(loads.data(), 0, size_t(rows * cols) * sizeof(int32_t)));
      check_cuda(cudaDeviceSynchronize());
      const norm_doors::DirectStore<float, k::half> store(y.data(), cols);
      CHECK(gpu.layernorm<float>(flow::CountingLoad{loads.data(), cols}, store, rows, cols, 1e-5, nullptr, nullptr));
      loads.download();
      int64_t wrong = 0;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) wrong += loads.get(r, c) != 1;
      }
      CHECK(wrong == 0);
      CHECK(loads.intact());
      CHECK(compare(y, [&](int64_t r) {
        Row<float> row(static_cast<size_t>(cols));
        for (int64_t c = 0; c < cols; ++c) row[size_t(c)] = double((r + c) % 10);
        layernorm(row, 1e-5);
        return row;
      }) == "");
    }
  }
}

// Each thread has its own: the numbers that one thread gives out are 0, 1, 2 ..., so none is given out more often than
// the one before, and a row that is longer than a block gets more than one from some thread.
TEST_CASE("oneflow: a store keeps its state from one pack to the next") {
  Gpu gpu;
  for (const int64_t cols : {7, 1000, 20001}) {
    INFO(cols << " columns");
    const int64_t rows = 2;
    Device<int32_t> order(rows, cols, cols);
    Device<float> x(rows, cols, cols);
    randomize(x, 1);
    const softmax_doors::DirectLoad<float, float> load(x.data(), cols);
    CHECK(gpu.softmax<float>(load, flow::NumberingStore(order.data(), cols), rows, cols));
    order.download();
    REQUIRE(order.intact());
    std::vector<int64_t> given(static_cast<size_t>(rows * cols));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const int32_t number = order.get(r, c);
        REQUIRE((number >= 0 && number < int32_t(rows * cols)));
        ++given[size_t(number)];
      }
    }
    for (size_t i = 1; i < given.size(); ++i) REQUIRE(given[i] <= given[i - 1]);
    if (cols > 8 * 1024) CHECK(given[1] > 0);
  }
}

TEST_CASE("oneflow: results as errors, or thrown away") {
  Gpu gpu;
  const int64_t rows = 3, cols = 100;
  Device<k::half> x(rows, cols, cols), y(rows, cols, cols);
  randomize(x, 1);
  const softmax_doors::DirectLoad<k::half, float> load(x.data(), cols), none(nullptr, cols);
  const softmax_doors::DirectStore<float, k::half> store(y.data(), cols);
  using L = softmax_doors::DirectLoad<k::half, float>;
  using S = softmax_doors::DirectStore<float, k::half>;
  softmax_doors::DispatchSoftmax<L, S, float>(gpu.stream, load, store, rows, cols);
  gpu.stream.wait();
  CHECK(compare(y, [&](int64_t r) {
          Row<float> row = row_of(x, r);
          softmax(row);
          return row;
        }) == "");
  CHECK(softmax_doors::DispatchSoftmax<L, S, float>(gpu.stream, none, store, rows, cols) == cudaErrorInvalidValue);
  CHECK(softmax_doors::DispatchSoftmax<L, S, float>(gpu.stream, load, store, -1, cols) == cudaErrorInvalidValue);
  CHECK(softmax_doors::DispatchSoftmax<L, S, float>(gpu.stream, load, store, rows, int64_t(1) << 31) ==
        cudaErrorNotSupported);
  CHECK(cudaGetLastError() == cudaSuccess);
}
