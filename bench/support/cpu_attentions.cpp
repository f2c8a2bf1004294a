// Compiled once for each instruction set; BENCH_RUN names the function.
#include "cpu_attentions.h"

#include <kernels/cpu/attention.h>

namespace k = kernels;

namespace bench {
namespace {

template <class Kv, class S>
k::Status run(const AttentionCall& c, const Kv& kv, const S& score) {
  const k::AttentionShape shape{c.batch, c.q_len, c.heads, c.kv_heads, c.dim};
  const auto q = k::load(c.q, c.heads * c.dim);
  const auto o = k::store(c.o, c.heads * c.dim);
  const k::cpu::Exec cx{c.threads};
  if (c.workspace_bytes == 0) return k::cpu::attention(cx, q, kv, o, shape, score);
  return k::cpu::decode(cx, q, kv, o, shape, score, k::Workspace{c.workspace, c.workspace_bytes});
}

template <class Tensor>
k::Status run(const AttentionCall& c, const Tensor& keys, const Tensor& values) {
  if (c.page > 0) {
    return run(c, k::paged_kv(keys, values, k::pages(c.table, c.length / c.page, c.page), c.length), k::no_mask());
  }
  const auto kv = k::dense_kv(keys, values, c.length);
  return c.causal ? run(c, kv, k::causal()) : run(c, kv, k::no_mask());
}

template <class T>
k::Status run(const AttentionCall& c) {
  const int64_t positions = c.page > 0 ? c.page : c.length;
  const auto tensor = [&](const void* p) { return k::nhd(static_cast<const T*>(p), positions, c.kv_heads, c.dim); };
  if constexpr (sizeof(T) == 1) return run(c, tensor(c.k).head_scales(c.scales), tensor(c.v).head_scales(c.scales));
  else return run(c, tensor(c.k), tensor(c.v));
}

k::Status run(const AttentionCall& c) {
  switch (c.type) {
    case KvType::fp32: return run<float>(c);
    case KvType::fp16: return run<k::half>(c);
    case KvType::bf16: return run<k::bfloat16>(c);
    case KvType::e4m3: return run<k::float8_e4m3>(c);
    case KvType::int8: return run<int8_t>(c);
    case KvType::int4: {
      const auto tensor = [&](const void* p) {
        return k::nhd<k::Int4>(static_cast<const uint32_t*>(p), c.page > 0 ? c.page : c.length, c.kv_heads, c.dim)
            .head_scales(c.scales);
      };
      return run(c, tensor(c.k), tensor(c.v));
    }
  }
  return k::Status{};
}

}  // namespace

const char* BENCH_RUN(const AttentionCall& c) {
  const k::Status status = run(c);
  return status ? nullptr : status.reason();
}

}  // namespace bench
