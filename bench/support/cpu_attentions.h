// The library's attention as plain functions, so that one program can hold them compiled for two instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bench {

enum class KvType { fp32, fp16, bf16, e4m3, int8, int4 };

// Queries and outputs are floats, a row for each token with its heads side by side; so are keys and values (NHD), of
// `length` positions for each sequence, in pages of `page` where that is not 0. Quantized ones have a scale for each
// head.
struct AttentionCall {
  KvType type;
  const float* q;
  const void *k, *v;
  const float* scales;
  const int32_t* table;
  float* o;
  int64_t batch, q_len, length, heads, kv_heads, dim, page;
  bool causal;
  void* workspace;
  size_t workspace_bytes;  // 0: attention(), else decode()
  int threads;
};

// null, or what went wrong.
const char* attention_native(const AttentionCall& call);
const char* attention_avx2(const AttentionCall& call);

}  // namespace bench
