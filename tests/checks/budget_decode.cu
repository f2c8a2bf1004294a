// budget: 3 kernels, 4 seconds
#include <kernels/attention.cuh>

kernels::Status budget_decode(cudaStream_t stream, const __half* q, const __half* k, const __half* v, const int32_t* table, const int32_t* lengths, __half* o, const kernels::AttentionShape& shape, kernels::Workspace workspace) {
  namespace k_ = kernels;
  const auto tensor = [&](const __half* p) { return k_::nhd(p, 16, shape.kv_heads, shape.dim); };
  return k_::decode<128>(stream, k_::load(q, shape.heads * shape.dim), k_::paged_kv(tensor(k), tensor(v), k_::pages(table, 1024, 16), lengths),
                         k_::store(o, shape.heads * shape.dim), shape, k_::causal(), workspace);
}
