// budget: 8 kernels, 6 seconds
#include <kernels/matmul.cuh>

kernels::Status budget_matmul(cudaStream_t stream, const __half* x, const __half* w, const float* bias, __half* y, int64_t m, int64_t n, int64_t k) {
  return kernels::matmul(stream, kernels::load(x, k), kernels::load(w, k), kernels::bias(bias) | kernels::gelu() | kernels::store(y, n), {m, n, k});
}
