// budget: 2 kernels, 155 KB
#include <kernels/attention.cuh>

namespace k = kernels;

k::Status call_attention_128(cudaStream_t stream, const __half* q, const __half* keys, const __half* values,
                             const int32_t* table, const int32_t* lengths, __half* o, const k::AttentionShape& shape) {
  const auto tensor = [&](const __half* p) { return k::nhd(p, 16, shape.kv_heads, shape.dim); };
  const auto kv = k::paged_kv(tensor(keys), tensor(values), k::pages(table, 1024, 16), lengths);
  const int64_t ld = shape.heads * shape.dim;
  return k::attention<128>(stream, k::load(q, ld), kv, k::store(o, ld), shape, k::causal());
}
