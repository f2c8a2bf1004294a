// budget: 5 kernels, 115 KB
#include <kernels/router.cuh>

namespace k = kernels;

// DeepSeek-V3's choice of experts, and rows in their order.
k::Status call_router(cudaStream_t stream, const __half* logits, const float* bias, int32_t* ids, float* weights,
                      const k::ExpertOrder& to, const k::RouterShape& shape, k::Workspace workspace) {
  const auto router =
      k::Router{}.sigmoid().bias(bias).groups(8, 4, k::GroupScore::two_largest).renormalize().scale(2.5f);
  const k::Status status = k::route(stream, k::load(logits, shape.experts), ids, weights, shape, router);
  return status ? k::sort_by_expert(stream, ids, to, shape, workspace) : status;
}
