// An operator of PyTorch: adds x to the residual stream in place, and returns its RMSNorm times a weight, in one pass.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <kernels/rmsnorm.cuh>
#include <torch/library.h>

namespace k = kernels;

template <class T>
k::Status add_rmsnorm_of(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& y,
                         double eps) {
  const int64_t d = x.size(-1);
  const auto pointer = [](const at::Tensor& tensor) { return static_cast<T*>(tensor.data_ptr()); };
  const auto in = k::load(pointer(x), d) | k::add(k::load(pointer(residual), d)) | k::tee(pointer(residual), d);
  const auto out = k::affine(pointer(weight)) | k::store(pointer(y), d);
  return k::rmsnorm(c10::cuda::getCurrentCUDAStream().stream(), in, out, x.numel() / d, d, k::RmsNorm{}.eps(eps));
}

at::Tensor add_rmsnorm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) > 0 && x.sizes() == residual.sizes(), "x and residual: not of one shape");
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == x.size(-1), "weight: not one number for each column");
  for (const at::Tensor& tensor : {x, residual, weight})
    TORCH_CHECK(tensor.device() == x.device() && tensor.scalar_type() == x.scalar_type() && tensor.is_contiguous(),
                "tensors are not contiguous, or not of one device and type");
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor y = at::empty_like(x);
  const bool is_half = x.scalar_type() == at::kHalf;
  TORCH_CHECK(is_half || x.scalar_type() == at::kBFloat16, "neither float16 nor bfloat16");
  const k::Status status = is_half ? add_rmsnorm_of<k::half>(x, residual, weight, y, eps)
                                   : add_rmsnorm_of<k::bfloat16>(x, residual, weight, y, eps);
  TORCH_CHECK(status, status.reason());
  return y;
}

TORCH_LIBRARY(kernels_example, library) {
  library.def("add_rmsnorm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(kernels_example, CUDA, library) { library.impl("add_rmsnorm", &add_rmsnorm); }
