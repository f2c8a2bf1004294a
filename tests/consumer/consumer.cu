#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/layernorm.cuh>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>
#include <kernels/oneflow.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/router.cuh>
#include <kernels/sampling.cuh>
#include <kernels/softmax.cuh>

#include <cmath>

int main() {
  float *x = nullptr, *y = nullptr, result = 0;
  if (cudaMalloc(&x, 4 * sizeof(float)) != cudaSuccess) return 77;  // no device
  cudaMalloc(&y, 4 * sizeof(float));
  cudaMemset(x, 0, 4 * sizeof(float));
  const kernels::Status status =
      kernels::softmax(cudaStream_t{}, kernels::load(x, 4), kernels::store(y, 4), 1, 4);
  cudaMemcpy(&result, y + 3, sizeof(float), cudaMemcpyDeviceToHost);
  cudaFree(x);
  cudaFree(y);
  return status.ok() && std::fabs(result - 0.25f) < 1e-6f ? 0 : 1;
}
