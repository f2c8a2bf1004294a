// budget: 15 kernels, 520 KB
#include <kernels/matmul.cuh>

namespace k = kernels;

k::Status call_experts(cudaStream_t stream, const __half* x, const __half* gate, const __half* up, const int32_t* order,
                       __half* h, const k::MatmulShape& s, int64_t top_k, const k::Groups& groups) {
  return k::matmul<k::Path::gemm>(stream, k::gathered(k::load(x, s.k), order, top_k),
                                  k::gated(k::load(gate, s.k), k::load(up, s.k)), k::swiglu() | k::store(h, s.n), s,
                                  groups);
}
