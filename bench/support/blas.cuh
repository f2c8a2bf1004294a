// cuBLAS and cuBLASLt as peers: y (m x n) = x (m x k) w (n x k)^T, all row-major and contiguous, summed up in float.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include <kernels/matmul.cuh>

#include "gpu_bench.cuh"

namespace bench {

#define BLAS_CHECK(call)                                                                         \
  do {                                                                                           \
    const cublasStatus_t blas_status = (call);                                                   \
    if (blas_status != CUBLAS_STATUS_SUCCESS) {                                                  \
      std::fprintf(stderr, "%s:%d: cuBLAS error %d\n", __FILE__, __LINE__, int(blas_status));    \
      std::exit(1);                                                                              \
    }                                                                                            \
  } while (false)

template <class T> constexpr cudaDataType blas_type = CUDA_R_32F;
template <> constexpr cudaDataType blas_type<kernels::half> = CUDA_R_16F;
template <> constexpr cudaDataType blas_type<kernels::bfloat16> = CUDA_R_16BF;
template <>
constexpr cudaDataType blas_type<kernels::float8_e4m3> = CUDA_R_8F_E4M3;
template <>
constexpr cudaDataType blas_type<int8_t> = CUDA_R_8I;
template <>
constexpr cudaDataType blas_type<int32_t> = CUDA_R_32I;

constexpr size_t kBlasWorkspace = size_t(64) << 20;
inline void* blas_workspace() {
  static void* memory = [] {
    void* p = nullptr;
    BENCH_CHECK(cudaMalloc(&p, kBlasWorkspace));
    return p;
  }();
  return memory;
}

// cublasGemmEx, with the kernel that it takes itself.
template <class T>
class Cublas {
 public:
  Cublas(int64_t m, int64_t n, int64_t k) : m_(int(m)), n_(int(n)), k_(int(k)) {}

  void operator()(cudaStream_t stream, const T* x, const T* w, T* y) const {
    const float one = 1, zero = 0;
    BLAS_CHECK(cublasSetStream(handle(), stream));
    BLAS_CHECK(cublasSetWorkspace(handle(), blas_workspace(), kBlasWorkspace));
    BLAS_CHECK(cublasGemmEx(handle(), CUBLAS_OP_T, CUBLAS_OP_N, n_, m_, k_, &one, w, blas_type<T>, k_, x, blas_type<T>,
                            k_, &zero, y, blas_type<T>, n_, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

 private:
  static cublasHandle_t handle() {
    static cublasHandle_t handle = [] {
      cublasHandle_t h;
      BLAS_CHECK(cublasCreate(&h));
      return h;
    }();
    return handle;
  }
  int m_, n_, k_;
};

// cublasLtMatmul with the number `choice` of the kernels that its heuristic proposes; to TY, int32_t from int8_t.
// fast: with fast accumulation, of e4m3.
template <class T, class TY = T>
class CublasLt {
 public:
  CublasLt(int64_t m, int64_t n, int64_t k, bool fast = false) {
    BLAS_CHECK(cublasLtMatmulDescCreate(&product_, kWhole ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                                        kWhole ? CUDA_R_32I : CUDA_R_32F));
    const int8_t fast_sums = fast;
    if (fast) BLAS_CHECK(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_sums, 1));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    BLAS_CHECK(cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)));
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&w_, blas_type<T>, k, n, k));
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&x_, blas_type<T>, k, m, k));
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&y_, blas_type<TY>, n, m, n));
    cublasLtMatmulPreference_t preference;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &kBlasWorkspace, sizeof(kBlasWorkspace)));
    choices_.resize(8);
    int found = 0;
    BLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(handle(), product_, w_, x_, y_, y_, preference, int(choices_.size()),
                                              choices_.data(), &found));
    choices_.resize(size_t(found));
    BLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  }
  int choices() const { return int(choices_.size()); }

  void operator()(cudaStream_t stream, int choice, const T* x, const T* w, TY* y) const {
    const std::conditional_t<kWhole, int32_t, float> one = 1, zero = 0;
    BLAS_CHECK(cublasLtMatmul(handle(), product_, &one, w, w_, x, x_, &zero, y, y_, y, y_,
                              &choices_[size_t(choice)].algo, blas_workspace(), kBlasWorkspace, stream));
  }

 private:
  static constexpr bool kWhole = std::is_same<TY, int32_t>::value;
  static cublasLtHandle_t handle() {
    static cublasLtHandle_t handle = [] {
      cublasLtHandle_t h;
      BLAS_CHECK(cublasLtCreate(&h));
      return h;
    }();
    return handle;
  }
  cublasLtMatmulDesc_t product_;
  cublasLtMatrixLayout_t x_, w_, y_;
  std::vector<cublasLtMatmulHeuristicResult_t> choices_;
};

}  // namespace bench
