// Which kernel attends for many queries.
#pragma once

#include "prefill_simt.cuh"

KERNELS_BEGIN
namespace detail {

// The smallest tile that the head fits into.
template <class Q, class Kv, class Out, class S>
Status prefill(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score, const Attention& options) {
  using P = PrefillProblem<Q, Kv, Out, S>;
  const P problem{q, kv, out, score, shape, options, options.scale_for(shape.dim), max_pack_of(q) >= wide_pack<Q>,
                  key_pack(kv) >= wide_pack<typename KeyRun<Kv>::Codes>, value_pack(kv) >= wide_pack<typename ValueRun<Kv>::Codes>, lesser(8, max_pack_of(out))};
  if constexpr (narrow_kv<Kv>) {
    const int64_t dim = greater(shape.dim, shape.value_dim());
    if (dim <= 64) return start_prefill<PrefillBody<P, 4, 2, 128, 64, 64, 2, 255>>(ex, problem);
    if (dim <= 128) return start_prefill<PrefillBody<P, 4, 2, 64, 128, 128, 2, 255>>(ex, problem);
    if (dim <= 256) return start_prefill<PrefillBody<P, 4, 1, 64, 256, 256, 1, 255>>(ex, problem);
    return start_prefill<PrefillBody<P, 2, 1, 32, 576, 256, 1, 255>>(ex, problem);
  } else {
    return start_prefill<SimtPrefillBody<P>>(ex, problem);
  }
}

}  // namespace detail
KERNELS_END
