// Attention: o = softmax(score(scale * q k^T)) v, for each head of each query.
//
//   k::AttentionShape shape{batch, q_len, heads, kv_heads, dim};
//   auto kv = k::dense_kv(k::nhd(kp, capacity, kv_heads, dim), k::nhd(vp, capacity, kv_heads, dim), lengths);
//   k::attention(stream, k::load(q, heads * dim), kv, k::store(o, heads * dim), shape, k::causal());
//   k::attention(stream, q, kv, o, shape, k::causal() & k::soft_cap(30.f), k::Attention{}.scale(0.1).lse(p));
//
// attention() is for many queries (prompts), decode() for 1 to 32 queries of each sequence. attention<128>() compiles
// only the kernels for heads of up to 128 columns. Related headers: kv.h for the layouts of keys and values, score.h
// for masks and other operations on the logits, core/attention_call.h for the shape and the options.
//
// Sizes: any number of queries and keys, including 0. dim is a multiple of 8 up to 256, or 512 or 576; v_dim is a
// multiple of 8 up to 256, or 512. heads is a multiple of kv_heads.
//
// Precision: keys and values of 16, 8 and 4 bits go through tensor cores, with float accumulation.
// - Queries are rounded to the 16-bit type of the keys; if keys are 8- or 4-bit codes, queries keep their own 16-bit
//   type, or are rounded to half.
// - Softmax weights are rounded to the 16-bit type of the values; if values are codes, to half; if values have scales,
//   to bfloat16, and values of half are rounded to bfloat16 as well.
// - With Attention{}.in_8_bits() all three operands are float8_e4m3.
// - Everything else is float. Keys or values of float, and views that compute them, are multiplied in float throughout.
//
// A query that sees no key gives zeros and a logsumexp of -inf. A NaN or +inf among a query's logits makes its output
// NaN; docs/attention.md has the other cases of NaN and infinity.
//
// Aliasing: the output may overwrite the queries in place if a head of both has the same bytes and at most 256 columns
// (128 with keys or values of float). No other overlap is allowed.
//
// Lengths, offsets, page tables and scales are read on the device only, and nothing is allocated or synchronized: a
// call can be captured in a graph and replayed while sequences grow. The same input gives the same bits. In
// attention(), and in decode() with Attention{}.splits(n) and the same shape.q_len, a sequence's bits also do not
// depend on the rest of the batch.
#pragma once

#include "detail/attention/decode_engine.cuh"
#include "detail/attention/decode_latent.cuh"
#include "detail/attention/merge_states.cuh"
#include "detail/attention/prefill_engine.cuh"
#include "exec.cuh"

KERNELS_BEGIN
namespace detail {

template <class Kv, class Q, class Out>
Status check_in_place(const Q& q, const Out& out, const AttentionShape& shape) {
  return check_in_place(q, out, shape, shape.dim <= (narrow_kv<Kv> ? 256 : 128),
                        "out overlaps q, which takes heads of at most 256 columns, with keys or values of float 128");
}

template <int kDim, class Q, class Kv, class Out, class S>
Status check_prefill(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                     const S& score, const Attention& options, bool& empty) {
  KERNELS_TRY(check_attention(q, kv, out, shape, score, options, INT32_MAX, empty).in("attention"));
  KERNELS_TRY(check_in_place<Kv>(q, out, shape).in("attention"));
  KERNELS_TRY(ex.status());
  return check_largest_head<kDim>(shape, "attention: a head is larger than attention<...>() says");
}

}  // namespace detail

// attention() with a workspace splits the keys of sequences that have few queries, so that a chunk of a long prompt
// occupies all multiprocessors. Blocks write partial results to the workspace, and a second kernel merges them in the
// order of the keys. The device chooses the number of parts from the sequence's own queries and keys, so its bits are
// the same alone and in any batch; options.splits(n) sets it to n.
//
// `workspace` has attention_workspace_bytes(ex, shape, options) bytes, is aligned to 16 bytes, needs no initialization,
// and belongs to one call at a time. It may be much smaller where shape.tokens and options.most_keys(n) bound the
// number of queries and keys. docs/attention.md has more.
//
// A shape with fewer queries may need more bytes, as long prompts are not split. To allocate once, use
// attention_workspace_bytes_up_to(ex, shape, options): the maximum over all shapes with these heads whose batch,
// queries of a sequence and tokens are not larger. decode_workspace_bytes() already is such a maximum.
inline size_t attention_workspace_bytes(const Exec& ex, const AttentionShape& shape, const Attention& options = {}) {
  if (shape.batch < 1 || shape.heads < 1 || shape.kv_heads < 1 || shape.q_len < 1) return 0;
  return detail::PrefillWorkspace(ex.device(), shape, options).bytes();
}
inline size_t attention_workspace_bytes_up_to(const Exec& ex, const AttentionShape& shape,
                                              const Attention& options = {}) {
  if (shape.batch < 1 || shape.heads < 1 || shape.kv_heads < 1 || shape.q_len < 1) return 0;
  return detail::PrefillWorkspace(ex.device(), detail::PrefillWorkspace::Largest{shape}, options).bytes();
}

namespace detail {

// kSplits: whether there is a workspace.
template <int kDim, bool kSplits, class Q, class Kv, class Out, class S>
Status run_prefill(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                   const S& score, const Workspace& workspace, const Attention& options) {
  if constexpr (!takes_attention<Q, Kv, Out, S>()) {
    return not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(check_prefill<kDim>(ex, q, kv, out, shape, score, options, empty));
    if (empty) return {};
    if constexpr (kSplits)
      KERNELS_TRY(check_workspace(workspace, attention_workspace_bytes(ex, shape, options)).in("attention"));
    return prefill<kDim, kSplits>(ex, q, kv, out, shape, score, workspace, options);
  }
}

template <int kDim, bool kSplits, class Q, class Kv, class Out, class S>
Status plan_prefill(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                    const S& score, const Attention& options, AttentionPlan& plan) {
  if constexpr (!takes_attention<Q, Kv, Out, S>()) {
    return not_compiled();
  } else {
    bool empty = false;
    plan = {};
    KERNELS_TRY(check_prefill<kDim>(ex, q, kv, out, shape, score, options, empty));
    return empty ? Status{} : prefill_plan<kDim, kSplits>(ex, q, kv, out, shape, score, options, plan);
  }
}

}  // namespace detail

// For many queries. Without a workspace keys are not split. kDim: the largest head of any call, 0: any; see the top.
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status attention(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                               const S& score, const Attention& options = {}) {
  return detail::run_prefill<kDim, false>(ex, q, kv, out, shape, score, {}, options).in("attention");
}
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status attention(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                               const S& score, const Workspace& workspace, const Attention& options) {
  return detail::run_prefill<kDim, true>(ex, q, kv, out, shape, score, workspace, options).in("attention");
}
// A template, so that a call with {} in this place means the options.
template <int kDim = 0, class Q, class Kv, class Out, class S, class W,
          class = std::enable_if_t<std::is_same<W, Workspace>::value>>
[[nodiscard]] Status attention(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                               const S& score, const W& workspace) {
  return attention<kDim>(ex, q, kv, out, shape, score, workspace, Attention{});
}

template <int kDim = 0, class Q, class Kv, class Out>
[[nodiscard]] Status attention(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&) {
  return detail::without_score<Q>();
}
template <int kDim = 0, class Q, class Kv, class Out, class S, class A, class W,
          class = std::enable_if_t<std::is_same<A, Attention>::value && std::is_same<W, Workspace>::value>>
[[nodiscard]] Status attention(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&, const S&, const A&,
                               const W&) {
  return detail::options_before_workspace<S>();
}

// How such a call, without a workspace or with one, would run, and why not faster: core/attention_plan.h.
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status attention_plan(const Exec& ex, const Q& q, const Kv& kv, const Out& out,
                                    const AttentionShape& shape, const S& score, const Attention& options,
                                    AttentionPlan& plan) {
  return detail::plan_prefill<kDim, false>(ex, q, kv, out, shape, score, options, plan).in("attention");
}
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status attention_plan(const Exec& ex, const Q& q, const Kv& kv, const Out& out,
                                    const AttentionShape& shape, const S& score, const Workspace&,
                                    const Attention& options, AttentionPlan& plan) {
  return detail::plan_prefill<kDim, true>(ex, q, kv, out, shape, score, options, plan).in("attention");
}

// decode(): 1 to 32 queries of each sequence. Keys and values are read once for up to 32 rows (queries times the heads
// of a group): 16 rows with heads above 128 columns, 8 above 256, and 64 over latents (docs/decode.md). The keys are
// distributed among all multiprocessors by the lengths that the device reads when the kernel runs.
//
// `workspace` has decode_workspace_bytes(ex, shape, options) bytes, is aligned to 16 bytes, needs no initialization,
// and belongs to one call at a time. decode<128>(...) compiles only the kernels for heads of up to 128 columns, a
// quarter of all.
inline size_t decode_workspace_bytes(const Exec& ex, const AttentionShape& shape, const Attention& options = {}) {
  if (shape.batch < 1 || shape.heads < 1 || shape.kv_heads < 1 || shape.q_len < 1) return 0;
  return greater(detail::DecodeWorkspace(detail::decode_blocks(ex), shape, options.fixed_splits()).bytes(),
                 detail::latent_workspace_bytes(ex, shape, options));
}

namespace detail {

template <int kDim, class Q, class Kv, class Out, class S>
Status check_decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                    const S& score, const Attention& options, bool& empty) {
  KERNELS_TRY(check_attention(q, kv, out, shape, score, options, kMostDecodeQueries, empty).in("decode"));
  KERNELS_TRY(check_in_place<Kv>(q, out, shape).in("decode"));
  KERNELS_TRY(ex.status());
  return check_largest_head<kDim>(shape, "decode: a head is larger than decode<...>() says");
}

template <int kDim, bool kAnyMode, class Q, class Kv, class Out, class S>
Status run_decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
                  const Workspace& workspace, const Attention& options, DecodeMode mode) {
  if constexpr (!takes_attention<Q, Kv, Out, S>()) {
    return not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(check_decode<kDim>(ex, q, kv, out, shape, score, options, empty));
    if (empty) return {};
    KERNELS_TRY(check_workspace(workspace, decode_workspace_bytes(ex, shape, options)).in("decode"));
    if constexpr (has_latent_decode<kDim, Q, Kv, Out, S>) {
      LatentDecode<Q, Kv, Out, S> latent(q, kv, out, shape, score, options);
      bool fits = false;
      KERNELS_TRY(latent.fits(ex, mode, fits));
      if (fits) return latent.start(ex, workspace);
    }
    return start_decode<kDim, kAnyMode>(ex, q, kv, out, shape, score, workspace, options, mode);
  }
}

template <int kDim, bool kAnyMode, class Q, class Kv, class Out, class S>
Status plan_decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                   const S& score, const Attention& options, DecodeMode mode, AttentionPlan& plan) {
  if constexpr (!takes_attention<Q, Kv, Out, S>()) {
    return not_compiled();
  } else {
    bool empty = false;
    plan = {};
    KERNELS_TRY(check_decode<kDim>(ex, q, kv, out, shape, score, options, empty));
    if (empty) return {};
    if constexpr (has_latent_decode<kDim, Q, Kv, Out, S>) {
      LatentDecode<Q, Kv, Out, S> latent(q, kv, out, shape, score, options);
      bool fits = false;
      KERNELS_TRY(latent.fits(ex, mode, fits));
      if (fits) return latent.describe(ex, plan);
    }
    return start_decode<kDim, kAnyMode>(ex, q, kv, out, shape, score, {}, options, mode, &plan);
  }
}

}  // namespace detail

// For 1 to 32 queries of each sequence, with the workspace described above.
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                            const S& score, const Workspace& workspace, const Attention& options = {}) {
  return detail::run_decode<kDim, false>(ex, q, kv, out, shape, score, workspace, options, DecodeMode::automatic)
      .in("decode");
}
// With a mode; this compiles four more kernels for decode<N>().
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                            const S& score, const Workspace& workspace, const Attention& options, DecodeMode mode) {
  return detail::run_decode<kDim, true>(ex, q, kv, out, shape, score, workspace, options, mode).in("decode");
}

template <int kDim = 0, class Q, class Kv, class Out>
[[nodiscard]] Status decode(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&, const Workspace& = {},
                            const Attention& = {}) {
  return detail::without_score<Q>();
}
// Nothing behind the score, or options.
template <int kDim = 0, class Q, class Kv, class Out, class S, class... Rest,
          class = std::enable_if_t<detail::lacks_workspace<S, Rest...>>>
[[nodiscard]] Status decode(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&, const S&,
                            const Rest&...) {
  return detail::without_workspace<S>();
}

// How such a call would run. If plan.path is plain, plan.why_not says why tensor cores are not used. An empty call gets
// a plan of 0 blocks.
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status decode_plan(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                                 const S& score, const Attention& options, AttentionPlan& plan) {
  return detail::plan_decode<kDim, false>(ex, q, kv, out, shape, score, options, DecodeMode::automatic, plan)
      .in("decode");
}
template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status decode_plan(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                                 const S& score, const Attention& options, DecodeMode mode, AttentionPlan& plan) {
  return detail::plan_decode<kDim, true>(ex, q, kv, out, shape, score, options, mode, plan).in("decode");
}

// Merges attention over several parts of the keys, such as a prefix that the batch shares (cascade). Row p * tokens + t
// of `o` and `lse` is the result of part p for query t: its output (heads side by side) and the logsumexp of each head.
//
//   k::merge_states(stream, k::load(o, ld), k::load(lse, heads), k::store(r, ld), {2, tokens, heads, dim});
template <class O, class L, class Out>
[[nodiscard]] Status merge_states(const Exec& ex, const O& o, const L& lse, const Out& out, const MergeShape& shape,
                                  const Attention& options = {}) {
  if constexpr (!detail::takes_states<O, L, Out>()) {
    return detail::not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(detail::check_merge(o, lse, out, shape, options, empty).in("merge_states"));
    KERNELS_TRY(ex.status().in("merge_states"));
    if (empty) return {};
    return detail::start_merge(ex, o, lse, out, shape, options).in("merge_states");
  }
}

KERNELS_END
