// budget: 3 kernels, 160 KB
#include <kernels/append.h>
#include <kernels/norm_heads.cuh>
#include <kernels/rope.h>

namespace k = kernels;

// Qwen3's queries and keys, normalized and turned; keys and values to a cache of int8 whose scales are found.
k::Status call_norm_heads_codes(cudaStream_t stream, const __half* qkv, const __half* weight, __half* q, int8_t* keys,
                                int8_t* values, float* key_scales, float* value_scales, const int32_t* positions,
                                const float* frequencies, int64_t tokens, int64_t heads, int64_t kv_heads,
                                int64_t capacity) {
  const int64_t dim = 128, nq = heads * dim, nk = kv_heads * dim;
  const auto norm = k::affine(k::each_head(weight, dim)) | k::rope(positions, frequencies, int(dim));
  const auto side = [&](int8_t* codes, const float* scales) {
    return k::nhd(codes, capacity, kv_heads, dim).scales(scales, capacity * kv_heads, kv_heads, 1);
  };
  const auto kv = k::dense_kv(side(keys, key_scales), side(values, value_scales), capacity);
  const k::AppendAt at(positions);
  return k::norm_heads(stream, k::load(qkv, nq + 2 * nk),
                       k::qkv(norm | k::store(q, nq), nq, norm | k::append_keys(kv, at, dim, key_scales), nk,
                              k::append_values(kv, at, dim, value_scales), nk),
                       {tokens, heads + 2 * kv_heads, dim, heads + kv_heads}, k::RmsNorm{}.eps(1e-6));
}
