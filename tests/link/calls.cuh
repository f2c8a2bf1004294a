// What both translation units of a link test do: the same calls of the CUDA operations, checked. All public headers
// together.
#pragma once

#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/layernorm.cuh>
#include <kernels/matmul.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/softmax.cuh>

#include "doors.h"

namespace {
namespace link {

// Memory on the device, with a copy of the values that it begins with, or poison.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : bytes_(values.size() * sizeof(T)) {
    if (cudaMalloc(&p_, bytes_) == cudaSuccess) cudaMemcpy(p_, values.data(), bytes_, cudaMemcpyHostToDevice);
  }
  explicit OnDevice(size_t count) : bytes_(count * sizeof(T)) {
    if (cudaMalloc(&p_, bytes_) == cudaSuccess) cudaMemset(p_, 0xff, bytes_);
  }
  ~OnDevice() { cudaFree(p_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* get() const { return static_cast<T*>(p_); }
  const T* read() const { return get(); }
  size_t bytes() const { return bytes_; }
  bool download(std::vector<T>& to) const {
    to.resize(bytes_ / sizeof(T));
    return p_ != nullptr && cudaMemcpy(to.data(), p_, bytes_, cudaMemcpyDeviceToHost) == cudaSuccess;
  }

 private:
  void* p_ = nullptr;
  size_t bytes_;
};

inline bool accepted(const kernels::Status& status) {
  if (!status) std::printf("%s (%d)\n", status.reason(), status.native());
  return bool(status);
}

inline void check_gpu_products(Verdict& verdict) {
  namespace k = kernels;
  const int64_t n = 72, depth = 256;
  std::vector<float> w = input(n, depth), bias, y;
  const OnDevice<k::half> weights(rounded<k::half>(w));
  for (int64_t j = 0; j < n; ++j) bias.push_back(float(j) / 8);
  const OnDevice<float> b(bias);
  for (const int64_t m : {1, 8, 200}) {  // few tokens, some, many: the paths of products
    std::vector<float> x = input(m, depth);
    const OnDevice<k::half> tokens(rounded<k::half>(x));
    const OnDevice<float> out(size_t(m * n));
    const k::Status status = k::matmul(k::Exec{}, k::load(tokens.read(), depth), k::load(weights.read(), depth),
                                       k::bias(b.read()) | k::store(out.get(), n), {m, n, depth});
    const bool downloaded = out.download(y);
    verdict.called("matmul", accepted(status) && downloaded, y, product(x, w, m, n, depth), 1e-4);
  }
}

// Every key of a head has the same value, so that it is the result whatever the logits are.
inline void check_gpu_attention(Verdict& verdict) {
  namespace k = kernels;
  const int64_t batch = 2, queries = 3, heads = 4, kv_heads = 2, dim = 64, keys = 70, width = heads * dim;
  std::vector<float> q = input(batch * queries, width), as_floats = input(batch * keys, kv_heads * dim), values, o;
  std::vector<double> want;
  for (int64_t i = 0; i < batch * keys * kv_heads * dim; ++i) values.push_back(float(i % (kv_heads * dim)) / 16 - 3);
  for (int64_t i = 0; i < batch * queries * width; ++i) {
    const int64_t head = i / dim % heads / (heads / kv_heads);
    want.push_back(double(head * dim + i % dim) / 16 - 3);
  }
  const OnDevice<k::half> on_q(rounded<k::half>(q)), on_k(rounded<k::half>(as_floats)), on_v(rounded<k::half>(values));
  const OnDevice<float> out(q.size()), again(q.size());
  const k::Exec ex;
  const k::AttentionShape shape{batch, queries, heads, kv_heads, dim};
  const auto kv = k::dense_kv(k::nhd(on_k.read(), keys, kv_heads, dim), k::nhd(on_v.read(), keys, kv_heads, dim), keys);
  const auto in = k::load(on_q.read(), width);
  k::Status status = k::attention(ex, in, kv, k::store(out.get(), width), shape, k::causal());
  bool downloaded = out.download(o);
  verdict.called("attention", accepted(status) && downloaded, o, want, 1e-3);
  const OnDevice<char> memory(k::decode_workspace_bytes(ex, shape));
  status = k::decode<64>(ex, in, kv, k::store(again.get(), width), shape, k::causal(),
                         k::Workspace{memory.get(), memory.bytes()});
  downloaded = again.download(o);
  verdict.called("decode", accepted(status) && downloaded, o, want, 1e-3);
}

}  // namespace link

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
      const bool ok = link::accepted(status) && cudaMemcpy(y.data(), to, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
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
  link::check_gpu_products(verdict);
  link::check_gpu_attention(verdict);
  return verdict.failures() + cpu_calls(unit);
}

}  // namespace
