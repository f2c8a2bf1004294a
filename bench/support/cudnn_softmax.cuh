// cuDNN's softmax, where cuDNN was found.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#if KERNELS_HAVE_CUDNN
#include <cudnn.h>

namespace bench {

inline std::string cudnn_version() {
  const size_t v = cudnnGetVersion();
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

// T: __half, __nv_bfloat16 or float.
template <class T>
class CudnnSoftmax {
 public:
  CudnnSoftmax(int64_t rows, int64_t cols) {
    cudnnTensorDescriptor_t descriptor = nullptr;
    status_ = cudnnCreateTensorDescriptor(&descriptor);
    tensor_ = {descriptor, cudnnDestroyTensorDescriptor};
    if (status_ == CUDNN_STATUS_SUCCESS) {
      status_ = cudnnSetTensor4dDescriptor(descriptor, CUDNN_TENSOR_NCHW, type(), int(rows), int(cols), 1, 1);
    }
  }

  const char* operator()(cudaStream_t stream, const T* x, T* y) const {
    static const cudnnHandle_t handle = [] {
      cudnnHandle_t made = nullptr;
      (void)cudnnCreate(&made);
      return made;
    }();
    const float one = 1.f, zero = 0.f;
    cudnnStatus_t status = status_;
    if (status == CUDNN_STATUS_SUCCESS) status = cudnnSetStream(handle, stream);
    if (status == CUDNN_STATUS_SUCCESS) {
      status = cudnnSoftmaxForward(handle, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_MODE_CHANNEL, &one, tensor_.get(), x,
                                   &zero, tensor_.get(), y);
    }
    return status == CUDNN_STATUS_SUCCESS ? nullptr : cudnnGetErrorString(status);
  }

 private:
  static cudnnDataType_t type() {
    if (std::is_same<T, __half>::value) return CUDNN_DATA_HALF;
    if (std::is_same<T, __nv_bfloat16>::value) return CUDNN_DATA_BFLOAT16;
    return CUDNN_DATA_FLOAT;
  }

  std::shared_ptr<cudnnTensorStruct> tensor_;
  cudnnStatus_t status_;
};

}  // namespace bench

#else

namespace bench {
inline std::string cudnn_version() { return {}; }
}  // namespace bench

#endif
