// The library's products with few rows of inputs as plain functions, so that one program can hold them compiled for two
// instruction sets.
#pragma once

#include <cstdint>

namespace bench {

enum class Weights { fp32, fp16, bf16, e4m3, e5m2, int8, int8_g128, int4_g32, int4_g128, uint4_g64, gf4 };

// Rows follow each other without gaps. Scales are halves, one for each row or group; zeros are bytes.
struct GemvCall {
  Weights type;
  const float* x;
  const void *w, *scales, *zeros;
  float* y;
  int64_t m, n, k;
  int threads;
};

// null, or what went wrong.
const char* gemv_native(const GemvCall& call);
const char* gemv_avx2(const GemvCall& call);

}  // namespace bench
