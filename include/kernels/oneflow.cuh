// OneFlow's interface to softmax, LayerNorm and RMSNorm: a file written for oneflow/core/cuda/softmax.cuh,
// layer_norm.cuh or rms_norm.cuh compiles with this include instead. The functors of such a file are accepted unchanged
// (core/concepts.h).
//
//   namespace softmax = oneflow::cuda::softmax;
//   softmax::DirectLoad<half, float> load(x, cols);
//   softmax::DirectStore<float, half> store(y, cols);
//   softmax::DispatchSoftmax<decltype(load), decltype(store), float>(stream, load, store, rows, cols);
//
// Effects. A load or store that is not const may change itself. On the GPU each thread then has its own bitwise copy,
// which keeps its state from row to row and is not returned to the caller. A load runs once for each element if the row
// fits into the shared memory of a block (on sm_90, of eight blocks). With longer rows it runs twice, unless it has a
// `reload` (docs/from_oneflow.md).
//
// Results are cudaError_t. Only forward passes are supported, and only the helpers that functors use: Pack, PackType,
// kWarpSize, DefaultComputeType. A file must not include OneFlow's own header of the same name as well; other files of
// the program may.
#pragma once

#include "layernorm.cuh"
#include "rmsnorm.cuh"
#include "softmax.cuh"

namespace oneflow {
namespace cuda {
namespace doors {
inline namespace KERNELS_ABI { inline namespace KERNELS_ISA {

inline cudaError_t to_cuda(const ::kernels::Status& status) {
  switch (status.code()) {
    case ::kernels::Code::ok: return cudaSuccess;
    case ::kernels::Code::invalid: return cudaErrorInvalidValue;
    case ::kernels::Code::unsupported: return cudaErrorNotSupported;
    case ::kernels::Code::device: break;
  }
  return static_cast<cudaError_t>(status.native());
}

constexpr int kWarpSize = 32;

template <typename T>
struct DefaultComputeType {
  using type = T;
};
template <>
struct DefaultComputeType<__half> {
  using type = float;
};
template <>
struct DefaultComputeType<__nv_bfloat16> {
  using type = float;
};

template <typename T, int N>
struct GetPackType {
  using type = typename std::aligned_storage<N * sizeof(T), N * sizeof(T)>::type;
};
template <typename T, int N>
using PackType = typename GetPackType<T, N>::type;

// N elements that can be accessed as one word.
template <typename T, int N>
union Pack {
  __device__ Pack() {}
  PackType<T, N> storage;
  T elem[N];
};

// As wide as pointer and stride allow. DST is the element type that the functor gives to its user.
template <typename SRC, typename DST>
struct DirectLoad : ::kernels::DirectLoad<SRC, ::kernels::compute_t<DST>> {
  static_assert(std::is_same<SRC, DST>::value || std::is_same<DST, ::kernels::compute_t<DST>>::value,
                "DirectLoad<SRC, DST> hands out SRC itself, float or double");
  using LoadType = DST;
  using Itself = DirectLoad;
  using ::kernels::DirectLoad<SRC, ::kernels::compute_t<DST>>::DirectLoad;

  // For functors that wrap this one.
  template <int N>
  __device__ void load(DST* dst, int64_t row, int64_t col) const {
    const auto values = this->template fetch<N>(row, col).unpack();
    for (int i = 0; i < N; ++i) dst[i] = ::kernels::convert<DST>(values.v[i]);
  }
};

template <typename SRC, typename DST>
struct DirectStore : ::kernels::DirectStore<SRC, DST> {
  using Itself = DirectStore;
  using ::kernels::DirectStore<SRC, DST>::DirectStore;
  using ::kernels::DirectStore<SRC, DST>::store;

  template <int N>
  __device__ void store(const SRC* src, int64_t row, int64_t col) const {
    ::kernels::Pack<SRC, N> values;
    for (int i = 0; i < N; ++i) values.v[i] = src[i];
    this->template store<N>(values, row, col);
  }
};

}}
}  // namespace doors

namespace softmax {
inline namespace KERNELS_ABI { inline namespace KERNELS_ISA {
using doors::DefaultComputeType;
using doors::DirectLoad;
using doors::DirectStore;
using doors::GetPackType;
using doors::kWarpSize;
using doors::Pack;
using doors::PackType;

template <typename LOAD, typename STORE, typename ComputeType>
cudaError_t DispatchSoftmax(cudaStream_t stream, LOAD load, STORE store, const int64_t rows, const int64_t cols) {
  return doors::to_cuda(::kernels::softmax<LOAD, STORE, ComputeType>(stream, load, store, rows, cols));
}
template <typename LOAD, typename STORE, typename ComputeType>
cudaError_t DispatchLogSoftmax(cudaStream_t stream, LOAD load, STORE store, const int64_t rows, const int64_t cols) {
  return doors::to_cuda(::kernels::log_softmax<LOAD, STORE, ComputeType>(stream, load, store, rows, cols));
}
}}
}  // namespace softmax

namespace layer_norm {
inline namespace KERNELS_ABI { inline namespace KERNELS_ISA {
using doors::DefaultComputeType;
using doors::DirectLoad;
using doors::DirectStore;
using doors::GetPackType;
using doors::kWarpSize;
using doors::Pack;
using doors::PackType;

// inv_variance receives 1 / sqrt(variance + epsilon). A null pointer means that the result is not wanted.
template <typename LOAD, typename STORE, typename ComputeType>
cudaError_t DispatchLayerNorm(cudaStream_t stream, LOAD load, STORE store, const int64_t rows, const int64_t cols,
                              const double epsilon, ComputeType* mean, ComputeType* inv_variance) {
  return doors::to_cuda(
      ::kernels::layernorm<LOAD, STORE, ComputeType>(stream, load, store, rows, cols, epsilon, mean, inv_variance));
}
}}
}  // namespace layer_norm

namespace rms_norm {
inline namespace KERNELS_ABI { inline namespace KERNELS_ISA {
using doors::DefaultComputeType;
using doors::DirectLoad;
using doors::DirectStore;
using doors::GetPackType;
using doors::kWarpSize;
using doors::Pack;
using doors::PackType;

// inv_rms receives 1 / sqrt(mean of squares + epsilon). A null pointer means that the result is not wanted.
template <typename LOAD, typename STORE, typename ComputeType>
cudaError_t DispatchRmsNorm(cudaStream_t stream, LOAD load, STORE store, const int64_t rows, const int64_t cols,
                            const double epsilon, ComputeType* inv_rms = nullptr) {
  return doors::to_cuda(
      ::kernels::rmsnorm<LOAD, STORE, ComputeType>(stream, load, store, rows, cols, epsilon, inv_rms));
}
// OneFlow's name for it.
template <typename LOAD, typename STORE, typename ComputeType>
cudaError_t LaunchRmsNorm(cudaStream_t stream, LOAD load, STORE store, const int64_t rows, const int64_t cols,
                          const double epsilon, ComputeType* inv_rms) {
  return DispatchRmsNorm<LOAD, STORE, ComputeType>(stream, load, store, rows, cols, epsilon, inv_rms);
}
}}
}  // namespace rms_norm

}  // namespace cuda
}  // namespace oneflow
