// merge_states(): merges normalized partial results (output, logsumexp) of several parts of the keys. Such a pair is
// the softmax state m = logsumexp, l = 1.
//
//   part 0:  o (tokens x heads x dim), lse (tokens x heads)    a thread has a pack of columns of one head of
//   part 1:  o, lse                                            one token, and merges all parts in order
#pragma once

#include "../../core/attention_call.h"
#include "../../functor.h"
#include "../pointwise.cuh"

KERNELS_BEGIN
namespace detail {

// Merges states in their order. part(i) reads one of them; kAtOnce reads are issued before the first of them is merged.
template <int N, int kAtOnce, class Part>
KERNELS_HD AttentionState<float, N> merged_states(int64_t parts, const Part& part) {
  AttentionState<float, N> all;
  for (int64_t first = 0; first < parts; first += kAtOnce) {
    AttentionState<float, N> some[kAtOnce];
    KERNELS_UNROLL
    for (int i = 0; i < kAtOnce; ++i) some[i] = part(kAtOnce == 1 ? first : lesser(first + i, parts - 1));
    KERNELS_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (kAtOnce == 1 || first + i < parts) all.merge(some[i]);
    }
  }
  return all;
}

template <class O, class L, class Out>
struct StatesMerger {
  static constexpr bool takes_rest = false;
  O o;
  L lse;
  Out out;
  MergeShape shape;
  Attention options;

  template <int N>
  __device__ __forceinline__ Nothing fetch(int64_t, int64_t) const { return {}; }
  template <int N>
  __device__ __forceinline__ void finish(Nothing, int64_t token, int64_t col) const {
    const int64_t head = quotient(col, shape.dim);
    const auto all = merged_states<N, 1>(shape.parts, [&](int64_t part) {
      const int64_t row = part * shape.tokens + token;
      const float logsumexp = convert<float>(resolve(lse, detail::fetch<1>(lse, row, head), row, head)).v[0];
      return AttentionState<float, N>(logsumexp, convert<float>(resolve(o, detail::fetch<N>(o, row, col), row, col)));
    });
    put_mapped(sink_end(out), sink_map(out), all.output(), token, col);
    if (head * shape.dim == col) options.write_lse(all.logsumexp(), token, head, shape.heads);
  }
};

template <class O, class L, class Out>
Status start_merge(const Exec& ex, const O& o, const L& lse, const Out& out, const MergeShape& shape,
                   const Attention& options) {
  constexpr int o_wide = widest_of<O>(), out_wide = widest_of<Out>(), both = o_wide < out_wide ? o_wide : out_wide,
                wide = both < 8 ? both : 8;
  // a pack has columns of one head only
  const int pack = shape.dim % wide == 0 ? lesser(max_pack_of(o), max_pack_of(out)) : 1;
  return each_pack<wide>(ex, StatesMerger<O, L, Out>{o, lse, out, shape, options}, shape.tokens,
                         shape.heads * shape.dim, pack);
}

}  // namespace detail
KERNELS_END
