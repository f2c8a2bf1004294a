// budget: 3 kernels, 22 KB
#include <kernels/elementwise.cuh>

namespace k = kernels;

k::Status call_copy(cudaStream_t stream, const __half* x, __half* y, int64_t rows, int64_t cols) {
  return k::copy(stream, k::load(x, cols) | k::scale(2), k::store(y, cols), rows, cols);
}
