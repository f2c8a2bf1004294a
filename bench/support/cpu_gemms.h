// The library's blocked product as a plain function, so that one program can hold it compiled for two instruction sets.
#pragma once

#include <cstdint>

namespace bench {

enum class Operand { fp32, fp16, bf16 };

// Rows follow each other without gaps; y is of floats.
struct GemmCall {
  Operand type;
  const void *x, *w;
  float* y;
  int64_t m, n, k;
  int threads;
};

// null, or what went wrong.
const char* gemm_native(const GemmCall& call);
const char* gemm_avx2(const GemmCall& call);

}  // namespace bench
