// oneDNN as a peer on the CPU, where it was found.
#pragma once

#if KERNELS_HAVE_ONEDNN
#include <cstdint>
#include <dnnl.hpp>
#include <functional>
#include <unordered_map>

namespace bench {

inline const dnnl::engine& onednn_cpu() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

inline dnnl::memory onednn_memory(const dnnl::memory::desc& description, const void* p) {
  return {description, onednn_cpu(), const_cast<void*>(p)};
}

using OnednnArguments = std::unordered_map<int, dnnl::memory>;

// A call of the primitive that make() returns, or none where oneDNN does not have it.
template <class Make>
std::function<void()> onednn_call(const Make& make, const OnednnArguments& arguments) {
  dnnl::primitive primitive;
  try {
    primitive = make();
  } catch (const dnnl::error&) {
    return {};
  }
  return [primitive, arguments, stream = dnnl::stream(onednn_cpu())]() mutable {
    primitive.execute(stream, arguments);
    stream.wait();
  };
}

// y (m x n, floats) = x (m x k) w (n x k)^T.
inline std::function<void()> onednn_product(dnnl::memory::data_type type, const void* x, const void* w, float* y,
                                            int64_t m, int64_t n, int64_t k) {
  using dnnl::memory;
  const memory::desc inputs({m, k}, type, memory::format_tag::ab), weights({k, n}, type, memory::format_tag::ba);
  const memory::desc outputs({m, n}, memory::data_type::f32, memory::format_tag::ab);
  return onednn_call([&] { return dnnl::matmul({dnnl::matmul::desc(inputs, weights, outputs), onednn_cpu()}); },
                     {{DNNL_ARG_SRC, onednn_memory(inputs, x)},
                      {DNNL_ARG_WEIGHTS, onednn_memory(weights, w)},
                      {DNNL_ARG_DST, onednn_memory(outputs, y)}});
}

}  // namespace bench
#endif
