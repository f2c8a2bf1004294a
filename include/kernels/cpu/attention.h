// Attention on the CPU: o = softmax(score(scale * q k^T)) v, for each head of each query.
//
//   k::cpu::Exec cx{threads};
//   k::AttentionShape shape{batch, q_len, heads, kv_heads, dim};
//   auto kv = k::dense_kv(k::nhd(kp, capacity, kv_heads, dim), k::nhd(vp, capacity, kv_heads, dim), lengths);
//   k::cpu::attention(cx, k::load(q, heads * dim), kv, k::store(o, heads * dim), shape, k::causal());
//   k::cpu::decode   (cx, k::load(q, heads * dim), kv, k::store(o, heads * dim), shape, k::causal(), workspace);
//   k::cpu::attention(cx, q, kv, o, shape, k::causal() & k::soft_cap(30.f), k::Attention{}.scale(0.1).lse(p));
//
// attention() is for many queries, which it distributes among the threads. decode() is for 1 to 32 queries of each
// sequence; it distributes the keys as well, and needs a workspace of decode_workspace_bytes(shape). Related headers:
// kv.h for the layouts of keys and values, score.h for operations on the logits, core/attention_call.h for shape and
// options.
//
// The functors are those of the GPU, with host pointers. Any number of queries and keys, including 0. dim is a multiple
// of 8 up to 256, or 512 or 576; v_dim is a multiple of 8 up to 256, or 512. heads is a multiple of kv_heads.
// Everything is computed in float.
//
// A query that sees no key gives zeros and a logsumexp of -inf. A NaN or +inf among a query's logits makes its output
// NaN; docs/attention.md has the other cases of NaN and infinity.
//
// Aliasing: the output may overwrite the queries in place if a row of both has the same bytes and heads == kv_heads. No
// other overlap is allowed. The same input gives the same bits, whatever the number of threads and the rest of the
// batch.
//
// Threads need 640 KB of stack; nothing is allocated. Compiler flags: as in softmax.h.
#pragma once

#include "detail/attention/engine.h"

KERNELS_BEGIN
namespace cpu {

// kDim: the largest head, as on the GPU; 0: any.
template <int kDim = 0, class Q, class Kv, class Out, class S>
Status attention(const Exec& cx, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
                 const Attention& options = {}) {
  if constexpr (!::kernels::detail::takes_attention<Q, Kv, Out, S>()) {
    return ::kernels::detail::not_compiled();
  } else {
    namespace host = ::kernels::detail::host;
    bool empty = false;
    KERNELS_TRY(
        ::kernels::detail::check_attention(q, kv, out, shape, score, options, INT32_MAX, empty).in("attention"));
    KERNELS_TRY(::kernels::detail::check_largest_head<kDim>(
        shape, "attention: a head is larger than attention<...>() says"));
    KERNELS_TRY(cx.status().in("attention"));
    if (empty) return {};
    KERNELS_TRY(host::check_lengths(kv, shape).in("attention"));
    KERNELS_TRY(host::check_in_place(q, out, shape).in("attention"));
    const host::AttentionCall<Q, Kv, S, Out> call{q, kv, score, out, shape, options};
    host::AttentionRun<host::AttentionCall<Q, Kv, S, Out>>(call).unsplit(cx.team());
    return {};
  }
}

// For code that calls the GPU version too: on the CPU attention() splits nothing and needs no workspace.
inline size_t attention_workspace_bytes(const Exec&, const AttentionShape&, const Attention& = {}) { return 0; }
inline size_t attention_workspace_bytes_up_to(const Exec&, const AttentionShape&, const Attention& = {}) { return 0; }
template <int kDim = 0, class Q, class Kv, class Out, class S>
Status attention(const Exec& cx, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
                 const Workspace&, const Attention& options) {
  return attention<kDim>(cx, q, kv, out, shape, score, options);
}
template <int kDim = 0, class Q, class Kv, class Out, class S, class W,
          class = std::enable_if_t<std::is_same<W, Workspace>::value>>
Status attention(const Exec& cx, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
                 const W&) {
  return attention<kDim>(cx, q, kv, out, shape, score);
}

template <int kDim = 0, class Q, class Kv, class Out>
Status attention(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&) {
  return ::kernels::detail::without_score<Q>();
}
template <int kDim = 0, class Q, class Kv, class Out, class S, class A, class W,
          class = std::enable_if_t<std::is_same<A, Attention>::value && std::is_same<W, Workspace>::value>>
Status attention(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&, const S&, const A&, const W&) {
  return ::kernels::detail::options_before_workspace<S>();
}

inline size_t decode_workspace_bytes(const AttentionShape& shape) {
  const auto count = [](int64_t n) { return n > 0 ? size_t(n) : 0; };
  return count(shape.batch) * count(shape.q_len) * count(shape.heads) * ::kernels::detail::host::kMostSplits *
         (count(shape.value_dim()) + 2) * sizeof(float);
}
// The GPU version's signature.
inline size_t decode_workspace_bytes(const Exec&, const AttentionShape& shape, const Attention& = {}) {
  return decode_workspace_bytes(shape);
}

template <int kDim = 0, class Q, class Kv, class Out, class S>
Status decode(const Exec& cx, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
              const Workspace& workspace, const Attention& options = {}) {
  if constexpr (!::kernels::detail::takes_attention<Q, Kv, Out, S>()) {
    return ::kernels::detail::not_compiled();
  } else {
    namespace host = ::kernels::detail::host;
    bool empty = false;
    KERNELS_TRY(::kernels::detail::check_attention(q, kv, out, shape, score, options,
                                                   ::kernels::detail::kMostDecodeQueries, empty)
                    .in("decode"));
    KERNELS_TRY(
        ::kernels::detail::check_largest_head<kDim>(shape, "decode: a head is larger than decode<...>() says"));
    KERNELS_TRY(cx.status().in("decode"));
    if (empty) return {};
    KERNELS_TRY(host::check_lengths(kv, shape).in("decode"));
    KERNELS_TRY(host::check_in_place(q, out, shape).in("decode"));
    KERNELS_TRY(
        ::kernels::detail::check_workspace(workspace, decode_workspace_bytes(shape), alignof(float)).in("decode"));
    const host::AttentionCall<Q, Kv, S, Out> call{q, kv, score, out, shape, options};
    host::AttentionRun<host::AttentionCall<Q, Kv, S, Out>>(call).split(cx.team(), static_cast<float*>(workspace.ptr));
    return {};
  }
}

template <int kDim = 0, class Q, class Kv, class Out>
Status decode(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&, const Workspace& = {},
              const Attention& = {}) {
  return ::kernels::detail::without_score<Q>();
}
// Nothing behind the score, or options.
template <int kDim = 0, class Q, class Kv, class Out, class S, class... Rest,
          class = std::enable_if_t<::kernels::detail::lacks_workspace<S, Rest...>>>
Status decode(const Exec&, const Q&, const Kv&, const Out&, const AttentionShape&, const S&, const Rest&...) {
  return ::kernels::detail::without_workspace<S>();
}

// Merges attention over several parts of the keys, such as a prefix that the batch shares (cascade). Row p * tokens + t
// of `o` and `lse` is the result of part p for query t: its output (heads side by side) and the logsumexp of each head.
//
//   k::cpu::merge_states(cx, k::stacked(k::load(o1, ld), n, k::load(o2, ld), n),
//                        k::stacked(k::load(lse1, heads), n, k::load(lse2, heads), n),
//                        k::store(o, ld), {2, n, heads, dim});
template <class O, class L, class Out>
Status merge_states(const Exec& cx, const O& o, const L& lse, const Out& out, const MergeShape& shape,
                    const Attention& options = {}) {
  if constexpr (!::kernels::detail::takes_states<O, L, Out>()) {
    return ::kernels::detail::not_compiled();
  } else {
    namespace host = ::kernels::detail::host;
    bool empty = false;
    KERNELS_TRY(::kernels::detail::check_merge(o, lse, out, shape, options, empty).in("merge_states"));
    KERNELS_TRY(cx.status().in("merge_states"));
    if (empty) return {};
    const double values = double(shape.parts) * double(shape.tokens) * double(shape.heads) * double(shape.dim);
    host::merge_states(cx.team().for_work(values), o, lse, out, shape, options);
    return {};
  }
}

}  // namespace cpu
KERNELS_END
