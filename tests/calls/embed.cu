// budget: 3 kernels, 30 KB
#include <kernels/elementwise.cuh>

namespace k = kernels;

k::Status call_embed(cudaStream_t stream, const __half* table, const int32_t* ids, int64_t vocabulary, __half* x,
                     int64_t* wrong, int64_t rows, int64_t cols) {
  return k::copy(stream, k::embed(k::load(table, cols), ids, vocabulary).report(wrong), k::store(x, cols), rows, cols);
}
