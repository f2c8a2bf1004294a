// Attention: o = softmax(score(scale * q k^T)) v, for each head of each query.
//
//   k::AttentionShape shape{batch, q_len, heads, kv_heads, dim};
//   auto kv = k::dense_kv(k::nhd(kp, capacity, kv_heads, dim), k::nhd(vp, capacity, kv_heads, dim), lengths);
//   k::attention(stream, k::load(q, heads * dim), kv, k::store(o, heads * dim), shape, k::causal());
//   k::attention(stream, q, kv, o, shape, k::causal() & k::soft_cap(30.f), k::Attention{}.scale(0.1).lse(p));
//
// attention() is for many queries; attention<128>() compiles those of the kernels that heads of up to 128 take. kv.h
// lists the ways in which keys and values may lie, score.h what may happen to the logits, core/attention_call.h the
// shape and the options.
//
// Queries and keys of any number, 0 as well; dim: every multiple of 8 up to 256, 512 and 576; v_dim likewise up to 256,
// and 512; heads a multiple of kv_heads. Keys and values of 16, 8 and 4 bits go through tensor cores: queries are
// rounded to the 16-bit type of the keys, weights to that of the values, with codes to half (with scales of values to
// bfloat16, and values of half with them), or, if Attention{}.in_8_bits() asks for it, all three operands are
// float8_e4m3; all else is float, as is everything with keys or values of float, and with those that a view computes. A
// query that sees no key gives zeros and a logsumexp of -inf; a NaN or +inf among its logits makes it NaN;
// docs/attention.md has the rest of what NaN and infinities do. The output may stand where the queries were, if a head
// of both takes the same bytes and has at most 256 columns, of float 128; other overlaps are not fine.
//
// Lengths, offsets, page tables and scales are read on the device alone, nothing is allocated or synchronized: a call
// can be captured in a graph and replayed while sequences grow. The same input gives the same bits, in attention() a
// sequence those that it has alone, whatever else is in the batch; in decode() with Attention{}.splits(n).
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

// With a workspace the keys of sequences that have few queries are split, so that a chunk of a long prompt takes all
// multiprocessors: blocks leave what they made of their part of the keys, and a second kernel merges it, in the order
// of keys. In how many parts is decided on the device, by the sequence's own queries and keys: the same bits alone and
// in any batch. `workspace` has attention_workspace_bytes(ex, shape, options) at a multiple of 16, holds anything
// before, and belongs to one call at a time. It may become much less where shape.tokens and options.most_keys(n) say
// how many queries and keys there are; options.splits(n) cuts in n parts. docs/attention.md has more.
//
// Fewer queries may need more, as long prompts are not split. Who allocates once asks for the most of all shapes with
// these heads and no more sequences, queries of one and tokens, attention_workspace_bytes_up_to(ex, shape, options).
// decode_workspace_bytes() is that by itself.
inline size_t attention_workspace_bytes(const Exec& ex, const AttentionShape& shape, const Attention& options = {}) {
  if (shape.batch < 1 || shape.heads < 1 || shape.kv_heads < 1 || shape.q_len < 1) return 0;
  return detail::PrefillRoom(ex.device(), shape, options).bytes();
}
inline size_t attention_workspace_bytes_up_to(const Exec& ex, const AttentionShape& shape,
                                              const Attention& options = {}) {
  if (shape.batch < 1 || shape.heads < 1 || shape.kv_heads < 1 || shape.q_len < 1) return 0;
  return detail::PrefillRoom(ex.device(), detail::PrefillRoom::Largest{shape}, options).bytes();
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
// A template, so that {} means options.
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

// How such a call would run, without a workspace or with one, and why it does not run faster: core/attention_plan.h.
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

// For 1 to 32 queries of each sequence. Keys and values are read once for up to 32 rows, queries times heads of a
// group; for 16 with heads above 128 columns, for 8 above 256, and for 64 over latents (docs/decode.md). The keys are
// shared out among all multiprocessors, by the lengths that the device finds when the kernel runs; `workspace` has
// decode_workspace_bytes(ex, shape, options) at a multiple of 16, holds anything before, and belongs to one call at a
// time. Engines that know how large their heads are say so, decode<128>(...), and compile a quarter of the kernels.
inline size_t decode_workspace_bytes(const Exec& ex, const AttentionShape& shape, const Attention& options = {}) {
  if (shape.batch < 1 || shape.heads < 1 || shape.kv_heads < 1 || shape.q_len < 1) return 0;
  return greater(detail::DecodeRoom(detail::decode_blocks(ex), shape, options.fixed_splits()).bytes(),
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

template <int kDim = 0, class Q, class Kv, class Out, class S>
[[nodiscard]] Status decode(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape,
                            const S& score, const Workspace& workspace, const Attention& options = {}) {
  return detail::run_decode<kDim, false>(ex, q, kv, out, shape, score, workspace, options, DecodeMode::automatic)
      .in("decode");
}
// With a mode, which costs decode<N>() four more kernels.
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

// How such a call would run. Where plan.path is plain, plan.why_not says why it does not take tensor cores; an empty
// call has a plan of 0 blocks.
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

// Attention over several parts of the keys (a prefix that the batch shares, say), made one: rows p * tokens + t of `o`
// and `lse` are what part p gave for query t, its output (heads side by side) and the logsumexp of each head.
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
