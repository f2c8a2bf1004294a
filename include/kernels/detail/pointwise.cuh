// What makes each pack of a matrix on its own: f.at<N>(row, col) for all of them.
#pragma once

#include "../exec.cuh"

KERNELS_BEGIN
namespace detail {

// Most numbers are small, and dividing those takes a fraction of the time.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

template <class F, int N>
struct PointwiseBody {
  static constexpr int max_threads = 256, registers = 128;
  struct Params {
    F f;
    int64_t row_packs, packs;
  };
  static __device__ __forceinline__ void run(const Params& p) {
    const int64_t all = int64_t(gridDim.x) * max_threads;
    for (int64_t i = int64_t(blockIdx.x) * max_threads + threadIdx.x; i < p.packs; i += all) {
      const int64_t row = quotient(i, p.row_packs);
      p.f.template at<N>(row, (i - row * p.row_packs) * N);
    }
  }
};

// In packs of kWide, if `pack` and the number of columns allow, or else of single elements.
template <int kWide, class F>
Status each_pack(const Exec& ex, const F& f, int64_t rows, int64_t cols, int pack) {
  const auto start = [&](auto width) {
    using Body = PointwiseBody<F, decltype(width)::value>;
    const int64_t row_packs = cols / decltype(width)::value, blocks = (rows * row_packs + Body::max_threads - 1) / Body::max_threads;
    Launch how;
    how.threads = Body::max_threads;
    how.grid.x = unsigned(lesser<int64_t>(blocks, int64_t(1) << 30));
    return launch<Body>(ex, how, {f, row_packs, rows * row_packs});
  };
  if (pack >= kWide && cols % kWide == 0) return start(std::integral_constant<int, kWide>());
  return start(std::integral_constant<int, 1>());
}

}  // namespace detail
KERNELS_END
