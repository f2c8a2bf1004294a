// What dispatch_cpu.cpp and its units share: plain types only, so that it means the same whatever the flags are.
#pragma once

#include <cstdint>

struct Kernels {
  const char* name;
  unsigned needs;  // of the machine: data, so that asking runs none of the unit's code
  // Null, or why not.
  const char* (*softmax)(int threads, const float* x, float* y, int64_t rows, int64_t cols);
  // y(m, n) = sum over k of x(m, k) * w(n, k), the weights in eight bits with one scale for each row.
  const char* (*matmul)(int threads, const float* x, const int8_t* w, const float* scales, float* y, int64_t m,
                        int64_t n, int64_t k);
};

extern "C" const Kernels kernels_scalar, kernels_avx2, kernels_avx512;
