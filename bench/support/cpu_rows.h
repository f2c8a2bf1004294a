// The library's row ops as plain functions, so that one program can hold them compiled for two instruction sets.
#pragma once

#include <cstdint>

namespace bench {

enum class RowOp { softmax, layernorm, rmsnorm };
enum class Type { fp32, fp16, bf16 };

struct RowCall {
  RowOp op;
  Type type;
  const void* x;
  void* y;
  const float *gamma, *beta;
  float *mean, *rstd;
  int64_t rows, cols;
  int threads;
};

// null, or what went wrong.
const char* row_native(const RowCall& call);
const char* row_avx2(const RowCall& call);

}  // namespace bench
