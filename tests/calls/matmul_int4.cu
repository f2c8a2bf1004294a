// budget: 23 kernels, 935 KB
#include <kernels/matmul.cuh>

namespace k = kernels;

k::Status call_matmul_int4(cudaStream_t stream, const __half* x, const uint32_t* w, const __half* scales, __half* y,
                           int64_t m, int64_t n, int64_t d) {
  const auto weights = k::dequant(k::int4(w, d), k::group_scales(scales, d / 128, 128));
  return k::matmul(stream, k::load(x, d), weights, k::store(y, n), {m, n, d});
}
