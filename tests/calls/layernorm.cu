// budget: 13 kernels, 375 KB
#include <kernels/layernorm.cuh>

namespace k = kernels;

// bias + residual + layernorm, updating the residual stream in place: with its five tensors twice what softmax costs.
k::Status call_layernorm(cudaStream_t stream, const __half* x, const __half* bias, __half* res, const __half* gamma,
                         const __half* beta, __half* y, int64_t rows, int64_t d) {
  auto h = k::load(x, d) | k::add(k::row(bias)) | k::add(k::load(res, d)) | k::tee(res, d);
  return k::layernorm(stream, h, k::affine(gamma, beta) | k::store(y, d), rows, d);
}
