// RMSNorm or LayerNorm of each head of new tokens on the CPU, then rotary positions (RoPE), then the KV cache, in one
// pass.
//
//   const auto q = k::affine(k::each_head(q_weight, dim)) | rope | k::store(qp, nq);
//   const auto keys = k::affine(k::each_head(k_weight, dim)) | rope | k::append_keys(kv, at, dim);
//   k::cpu::norm_heads(cx, k::load(qkv, nq + 2 * nk), k::qkv(q, nq, keys, nk, k::append_values(kv, at, dim), nk),
//                      {tokens, heads + 2 * kv_heads, dim, heads + kv_heads}, k::RmsNorm{}.eps(1e-6));
//
// The contract is that of norm_heads.cuh. Compiler flags: as in softmax.h.
#pragma once

#include "../heads.h"
#include "detail/matmul/inputs.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Writes a head, whose values are in their true order in a buffer, to columns from `begin` on, N at a time and in the
// order in which `out` takes columns. `sink` is `out` with other ends.
template <int N, class Out, class Sink, class C>
void write_head(const Out& out, const Sink& sink, int64_t row, int64_t begin, int dim, const C* values) {
  for (int64_t col = begin; col < begin + dim; col += N) {
    const ColumnPair pair = pair_at(out, col);
    const bool apart = pair.second != pair.first + 1;
    Pack<C, N> v;
    for (int j = 0; j < N; ++j)
      v.v[j] = values[apart ? (j % 2 == 0 ? pair.first : pair.second) + j / 2 - begin : pair.first + j - begin];
    put(sink, v, row, col);
  }
}

template <class Options, class Source, class Sink>
Status norm_heads(const cpu::Exec& cx, const Options& options, const Source& in, const Sink& out,
                  const HeadShape& shape) {
  using C = compute_type<Source>;
  using Op = decltype(options.template op<C>());
  using None = DirectStore<C, C>;
  const Op op = options.template op<C>();
  const int dim = int(shape.dim);
  const Count<C> columns(dim);
  const int most = max_pack_of(out);
  const Team team = cx.team().for_work(double(shape.tokens) * double(shape.heads) * double(dim));
  parallel_shares(team, shape.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        alignas(64) C values[kMaxHeadDim];
        read_row(in, row, head * dim, dim, values);
        if (head < shape.normed) {
          const DirectLoad<C, C> whole(values, 0);
          const None none(nullptr, 0);
          const RowProblem<Op, DirectLoad<C, C>, None> problem{op, whole, none, 1, dim, {whole, none, dim}};
          const auto state = RowEngine<RowProblem<Op, DirectLoad<C, C>, None>>(problem).state(0);
          const auto result = op.finish(state, columns);
          const auto linear = op.linear(state, result);
          for (int i = 0; i < dim; i += 2) put_pack(values + i, linear(op.center(pack_at<2>(values + i), state)));
          op.write_row(result, row * shape.normed + head);
        }
        const auto write = [&](const auto& sink) {
          if (most >= 8 && dim % 8 == 0)
            write_head<8>(out, sink, row, head * dim, dim, values);
          else if (most >= 2)
            write_head<2>(out, sink, row, head * dim, dim, values);
          else if constexpr (!wants_pairs<Sink>())
            write_head<1>(out, sink, row, head * dim, dim, values);
        };
        HeadScales<Sink> scales;
        if constexpr (HeadScales<Sink>::computes_scales) {
          write(scales.collecting(out));
          scales.write(out, row, head * dim, dim);
        }
        write(scales.writing(out));
      }
    }
  });
  return {};
}

}  // namespace host
}  // namespace detail

namespace cpu {

template <class Load, class Store, class Options = RmsNorm>
Status norm_heads(const Exec& cx, const Load& in, const Store& out, const HeadShape& shape,
                  const Options& options = {}) {
  if constexpr (!::kernels::detail::takes_heads<Load, Store, Options>()) {
    return ::kernels::detail::not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(::kernels::detail::check_norm_heads(options, in, out, shape, empty));
    KERNELS_TRY(cx.status().in("norm_heads"));
    return empty ? Status{} : ::kernels::detail::host::norm_heads(cx, options, in, out, shape);
  }
}

}  // namespace cpu
KERNELS_END
