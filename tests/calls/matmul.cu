// budget: 14 kernels, 335 KB
#include <kernels/matmul.cuh>

namespace k = kernels;

k::Status call_matmul(cudaStream_t stream, const __half* x, const __half* w, const float* bias, __half* y, int64_t m,
                      int64_t n, int64_t d) {
  return k::matmul(stream, k::load(x, d), k::load(w, d), k::bias(bias) | k::gelu() | k::store(y, n), {m, n, d});
}
