// What both translation units of a link test do: the same calls of the CUDA operations, checked. All public headers together.
#pragma once

#include <kernels/layernorm.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/softmax.cuh>

#include "calls.h"

namespace {

// 0: everything is right; 77: no GPU.
inline int gpu_calls(const char* unit) {
  namespace k = kernels;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  link::Verdict verdict(unit);
  k::RowPolicy shared;
  shared.residency = k::Residency::shared;
  // Rows for a warp, for a block, and (also told to) for more shared memory than a kernel has without asking.
  for (const int64_t cols : {100, 3000, 20000}) {
    const int64_t rows = 300;
    const std::vector<float> x = link::input(rows, cols);
    std::vector<float> y(x.size());
    const size_t bytes = x.size() * sizeof(float);
    float *from = nullptr, *to = nullptr;
    if (cudaMalloc(&from, bytes) != cudaSuccess || cudaMalloc(&to, bytes) != cudaSuccess) return 1;
    cudaMemcpy(from, x.data(), bytes, cudaMemcpyHostToDevice);
    const k::Exec ex;
    const auto in = k::load(from, cols);
    const auto out = k::store(to, cols);
    const auto check = [&](const char* what, const k::Status& status, const std::vector<double>& want) {
      const bool ok = bool(status) && cudaMemcpy(y.data(), to, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
      verdict.called(what, ok, y, want, 1e-4);
      cudaMemset(to, 0xff, bytes);
    };
    check("softmax", k::softmax(ex, in, out, rows, cols), link::softmax(x, rows, cols));
    check("softmax, shared", k::softmax(ex, in, out, rows, cols, shared), link::softmax(x, rows, cols));
    check("log_softmax", k::log_softmax(ex, in, out, rows, cols), link::log_softmax(x, rows, cols));
    check("layernorm", k::layernorm(ex, in, k::scale(2) | out, rows, cols), link::layernorm(x, rows, cols, 2));
    check("rmsnorm", k::rmsnorm(ex, in, out, rows, cols), link::rmsnorm(x, rows, cols));
    cudaFree(from);
    cudaFree(to);
  }
  return verdict.failures() + cpu_calls(unit);
}

}  // namespace
