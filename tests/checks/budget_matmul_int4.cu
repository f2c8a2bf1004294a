// budget: 8 kernels, 4 seconds
#include <kernels/matmul.cuh>

kernels::Status budget_matmul_int4(cudaStream_t stream, const __half* x, const uint32_t* w, const __half* scales, __half* y, int64_t m, int64_t n, int64_t k) {
  return kernels::matmul(stream, kernels::load(x, k), kernels::dequant(kernels::int4(w, k), kernels::group_scales(scales, k / 128, 128)), kernels::store(y, n), {m, n, k});
}
