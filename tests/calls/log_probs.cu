// budget: 2 kernels, 210 KB
#include <kernels/sampling.cuh>

namespace k = kernels;

k::Status call_log_probs(cudaStream_t stream, const float* logits, const int32_t* tokens, float* log_probs,
                         int64_t rows, int64_t vocabulary) {
  return k::log_probs(stream, k::load(logits, vocabulary), rows, vocabulary, k::LogProbs{}.of(tokens, log_probs));
}
