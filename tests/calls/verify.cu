// budget: 3 kernels, 370 KB
#include <kernels/sampling.cuh>

namespace k = kernels;

k::Status call_verify(cudaStream_t stream, const float* logits, const int32_t* drafts, const float* q, int32_t* tokens,
                      int32_t* accepted, const k::VerifyShape& shape) {
  return k::verify(stream, k::load(logits, shape.vocabulary),
                   k::drafts(drafts, shape.drafts, k::load(q, shape.vocabulary)), tokens, accepted, shape,
                   k::Sampling{}.top_k(4));
}
