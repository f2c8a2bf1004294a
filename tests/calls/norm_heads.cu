// budget: 3 kernels, 110 KB
#include <kernels/append.h>
#include <kernels/norm_heads.cuh>
#include <kernels/rope.h>

namespace k = kernels;

// Qwen3's queries and keys, normalized and turned; keys and values to a cache.
k::Status call_norm_heads(cudaStream_t stream, const __half* qkv, const __half* weight, __half* q, __half* keys,
                          __half* values, const int32_t* positions, const float* frequencies, int64_t tokens,
                          int64_t heads, int64_t kv_heads, int64_t capacity) {
  const int64_t dim = 128, nq = heads * dim, nk = kv_heads * dim;
  const auto norm = k::affine(k::each_head(weight, dim)) | k::rope(positions, frequencies, int(dim));
  const auto kv = k::dense_kv(k::nhd(keys, capacity, kv_heads, dim), k::nhd(values, capacity, kv_heads, dim), capacity);
  const k::AppendAt at(positions);
  return k::norm_heads(
      stream, k::load(qkv, nq + 2 * nk),
      k::qkv(norm | k::store(q, nq), nq, norm | k::append_keys(kv, at, dim), nk, k::append_values(kv, at, dim), nk),
      {tokens, heads + 2 * kv_heads, dim, heads + kv_heads}, k::RmsNorm{}.eps(1e-6));
}
