// decode() over MLA latents: the rows of many heads share one key of 576 columns. They go to the kernel of
// prefill_latent.cuh, which reads keys and values once for 64 rows, with the work of all sequences shared out among
// blocks.
#pragma once

#include "../../core/attention_plan.h"
#include "prefill_engine.cuh"

KERNELS_BEGIN
namespace detail {

template <int kLargest, class Q, class Kv, class Out, class S>
constexpr bool has_latent_decode =
    (kLargest == 0 || head_size(kLargest).dim == kLatentDim) &&
    has_latent_prefill<PrefillProblem<Q, Kv, Out, S, true>, kLatentDim>;

// Independent of the mode, as the workspace is asked for before the call.
inline size_t latent_workspace_bytes(const Exec& ex, const AttentionShape& shape, const Attention& options) {
  return shape.dim == kLatentDim && shape.value_dim() == kLatentCols
             ? PrefillWorkspace(ex.device(), shape, options, true).bytes()
             : 0;
}

template <class Q, class Kv, class Out, class S>
class LatentDecode {
  using P = PrefillProblem<Q, Kv, Out, S, true>;
  using Body = LatentPrefillBody<P, kLatentDim>;
  static constexpr int kMostPrecise = 8;  // rows for which the precise kernel reads keys once

 public:
  LatentDecode(const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
               const Attention& options)
      : problem_(prefill_problem<true>(q, kv, out, shape, score, options)) {}

  // This kernel rounds weights to 16 bits. So it takes a call if DecodeMode::tensor asks for that, or if the precise
  // kernel would read keys more than once.
  Status fits(const Exec& ex, DecodeMode mode, bool& fits) const {
    const AttentionShape& shape = problem_.shape;
    fits = false;
    return mode == DecodeMode::tensor || (mode == DecodeMode::automatic && shape.q_len * shape.group() > kMostPrecise)
               ? fits_latent<Body>(ex, problem_, fits)
               : Status{};
  }
  Status start(const Exec& ex, const Workspace& workspace) {
    problem_.parts = parts_in(workspace, PrefillWorkspace(ex.device(), problem_.shape, problem_.options, true));
    return start_prefill<Body, true>(ex, problem_);
  }
  Status describe(const Exec& ex, AttentionPlan& plan) const {
    return describe_prefill<Body>(ex, problem_, plan, true);
  }

 private:
  P problem_;
};

}  // namespace detail
KERNELS_END
