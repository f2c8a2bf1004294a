// budget: 3 kernels, 670 KB
#include <kernels/sampling.cuh>

namespace k = kernels;

k::Status call_sample(cudaStream_t stream, const float* logits, int32_t* tokens, int64_t rows, int64_t vocabulary,
                      const k::Sampling& options) {
  return k::sample(stream, k::load(logits, vocabulary), tokens, rows, vocabulary, options);
}
