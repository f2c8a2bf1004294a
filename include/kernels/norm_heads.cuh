// norm_heads(): RMSNorm or LayerNorm of each head of new tokens, then rotary positions (RoPE), then the KV cache, in
// one launch.
//
//   const auto q = k::affine(k::each_head(q_weight, dim)) | rope | k::store(qp, nq);
//   const auto keys = k::affine(k::each_head(k_weight, dim)) | rope | k::append_keys(kv, at, dim);
//   k::norm_heads(stream, k::load(qkv, nq + 2 * nk), k::qkv(q, nq, keys, nk, k::append_values(kv, at, dim), nk),
//                 {tokens, heads + 2 * kv_heads, dim, heads + kv_heads}, k::RmsNorm{}.eps(1e-6));
//   // as in Qwen3; Gemma 3 has one_plus(q_weight)
//
// The source's rows are tokens; its columns are adjacent heads of dim columns. The first `normed` heads are normalized,
// the others (values) are not. All heads pass through the sink's maps to the sink: qkv(), or any other sink that could
// follow a product of queries, keys and values. rope | sink rotates pairs of either kind; maps in front of it (a norm's
// weight) see the true columns. The weights of the preceding product do not need paired().
//
// Scales of heads in 8-bit codes are computed here: append_keys(kv, at, dim, scales), and quantize(q, ld, scales,
// scales_ld, dim). The maps and rope of such a sink run twice for each head. RmsNorm{}.rstd(p) writes tokens x normed
// numbers.
//
// dim is even, up to 256. In-place use is allowed. Each head is read once, into registers. Computed in the source's
// compute type, float or double; rope in float. Nothing is allocated or synchronized: calls can be captured in a graph.
// The same input gives the same bits.
#pragma once

#include "core/row_op.h"
#include "detail/heads.cuh"
#include "heads.h"

KERNELS_BEGIN

template <class Load, class Store, class Options = RmsNorm>
[[nodiscard]] Status norm_heads(const Exec& ex, const Load& in, const Store& out, const HeadShape& shape,
                                const Options& options = {}) {
  if constexpr (!detail::takes_heads<Load, Store, Options>()) {
    return detail::not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(detail::check_norm_heads(options, in, out, shape, empty));
    KERNELS_TRY(ex.status().in("norm_heads"));
    if (empty) return {};
    using C = compute_type<Load>;
    using Op = decltype(options.template op<C>());
    const detail::HeadProblem<Op, Load, Store> problem{options.template op<C>(), in, out, shape,
                                                       Count<C>(int(shape.dim))};
    const int pack = lesser(detail::max_pack_of(in), detail::max_pack_of(out));
    if (pack >= 8 && shape.dim % 8 == 0) return detail::start_heads<8>(ex, problem).in("norm_heads");
    if (pack >= 4 && shape.dim % 4 == 0) return detail::start_heads<4>(ex, problem).in("norm_heads");
    return detail::start_heads<2>(ex, problem).in("norm_heads");
  }
}

KERNELS_END
