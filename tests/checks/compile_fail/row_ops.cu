// FAILS POINTER_AS_SOURCE: must be a source
// FAILS SOURCE_AS_SINK: must be a sink
// FAILS NUMBER_AS_SOURCE: as_source
#include <kernels/softmax.cuh>

namespace k = kernels;

k::Status f(cudaStream_t stream, const float* x, float* y, int64_t rows, int64_t cols) {
  auto in = k::load(x, cols);
  auto out = k::store(y, cols);
#if defined(POINTER_AS_SOURCE)
  return k::softmax(stream, x, out, rows, cols);
#elif defined(SOURCE_AS_SINK)
  return k::softmax(stream, in, in, rows, cols);
#elif defined(NUMBER_AS_SOURCE)
  return k::softmax(stream, in | k::add(1.0f), out, rows, cols);
#else
  return k::softmax(stream, in, out, rows, cols);
#endif
}
