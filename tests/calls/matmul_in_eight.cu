// budget: 25 kernels, 1360 KB
#include <kernels/matmul.cuh>

namespace k = kernels;

k::Status call_matmul_in_eight(cudaStream_t stream, const k::float8_e4m3* x, const float* x_scales,
                               const k::float8_e4m3* w, const float* w_scales, __half* y, int64_t m, int64_t n,
                               int64_t d) {
  const auto in = k::dequant(k::load(x, d), k::group_scales(x_scales, d / 128, 128));
  const auto weights = k::dequant(k::load(w, d), k::block_scales(w_scales, d / 128, 128));
  return k::matmul<k::Path::gemm>(stream, in, weights, k::store(y, n), {m, n, d});
}
