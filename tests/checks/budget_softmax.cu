// budget: 16 kernels, 3 seconds
#include <kernels/softmax.cuh>

kernels::Status budget_softmax(cudaStream_t stream, const __half* x, __half* y, int64_t rows, int64_t cols) {
  return kernels::softmax(stream, kernels::load(x, cols), kernels::store(y, cols), rows, cols);
}
