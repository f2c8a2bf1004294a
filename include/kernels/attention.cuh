// Attention: o = softmax(score(scale * q k^T)) v, for each head of each query.
//
//   k::AttentionShape shape{batch, q_len, heads, kv_heads, dim};
//   auto kv = k::dense_kv(k::nhd(kp, capacity, kv_heads, dim), k::nhd(vp, capacity, kv_heads, dim), lengths);
//   k::attention(stream, k::load(q, heads * dim), kv, k::store(o, heads * dim), shape, k::causal());
//   k::attention(stream, q, kv, o, shape, k::causal() & k::soft_cap(30.f), k::Attention{}.scale(0.1).lse(p));
//
// attention() is for many queries. kv.h lists the ways in which keys and values may lie, score.h what may happen to the logits,
// core/attention_call.h the shape and the options.
//
// Queries and keys of any number, 0 as well; dim: every multiple of 8 up to 256, 512 and 576; v_dim likewise up to 256, and 512;
// heads a multiple of kv_heads. Keys and values of 16, 8 and 4 bits go through tensor cores: queries are rounded to the 16-bit type
// of the keys, weights to that of the values; all else is float, as is everything with keys or values of float, and with those
// that a view computes. A query that sees no key gives zeros and a logsumexp of -inf; a
// NaN or +inf among its logits makes it NaN. Values of keys that are masked one by one must be finite.
//
// Lengths, offsets, page tables and scales are read on the device alone, nothing is allocated or synchronized: a call can be
// captured in a graph and replayed while sequences grow. The same input gives the same bits.
#pragma once

#include "detail/prefill_engine.cuh"
#include "exec.cuh"

KERNELS_BEGIN

template <class Q, class Kv, class Out, class S>
[[nodiscard]] Status attention(const Exec& ex, const Q& q, const Kv& kv, const Out& out, const AttentionShape& shape, const S& score,
                               const Attention& options = {}) {
  bool empty = false;
  KERNELS_TRY(detail::check_attention(q, kv, out, shape, score, options, std::numeric_limits<int32_t>::max(), empty));
  KERNELS_TRY(ex.status());
  if (empty) return {};
  return detail::prefill(ex, q, kv, out, shape, score, options);
}

KERNELS_END
