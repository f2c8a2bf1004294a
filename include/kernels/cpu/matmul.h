// Products on the CPU, fused with whatever comes before and after: result(m, n) = sum over k of x(m, k) * w(n, k).
//
//   k::cpu::Exec cx{threads};
//   k::cpu::matmul(cx, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//
// x has a row for each token and w one for each output; both are read along K. weights.h lists the sources for
// quantized, gated and stacked weights and for normalized inputs, functor.h the rest. The same functors as on the GPU,
// with host pointers. M, N >= 0, 0 <= K <= 2^30, any alignment, any row stride; K = 0 gives sums of 0. Computed in
// float (double when x is double), in many partial sums. Each result reaches the sink once: a residual may be added in
// place. What x reads must not be written. The same input gives the same bits, whatever the number of threads.
//
// Compiled for AVX512-BF16, products of more than 4 tokens, of groups and with batch_invariant whose inputs and weights
// are nothing but bfloat16 in memory take its dot products: subnormal inputs and weights then count as 0, and so does a
// sum below 2^-126.
//
// Groups are made one after the other, as tiles of many tokens: those with few read their weights several times slower.
// Offsets are the host's.
//
// Threads need 640 KB of stack; nothing is allocated. Flags: as in softmax.h.
#pragma once

#include "detail/matmul/gemm.h"
#include "detail/matmul/gemv.h"

KERNELS_BEGIN
namespace detail {
namespace host {
// More tokens are made by tiles. Those of pairs of bfloat16 are nearly as fast as reading the weights is: on an EPYC
// with AVX-512, one thread, 14336 x 4096 out of memory, 5 tokens take 8.5 ms by tiles and 10.3 as few, 8 tokens 9.1 and
// 11.9, 32 tokens 14.9 and 25.4; 4 tokens 8.3 and 6.1.
template <class X, class W>
constexpr int kFewTokens = std::is_same<panel_type<X, W>, bfloat16>::value ? kTileTokens : kMostTokens;

// What only the CPU can check, as it sees offsets.
inline Status check_offsets(const Groups& groups, int64_t rows) {
  if (groups.offsets == nullptr) return {};
  for (int64_t g = 0; g < groups.count; ++g) {
    if (groups.offsets[g] < 0 || groups.offsets[g + 1] < groups.offsets[g])
      return invalid("matmul: the offsets of groups are negative or fall");
  }
  return groups.offsets[groups.count] > rows ? invalid("matmul: the last offset of groups exceeds M") : Status{};
}
}  // namespace host
}  // namespace detail

namespace cpu {

struct MatmulPolicy {
  // A token's results have the same bits whatever M is and whichever row the token has: few tokens are made like many.
  // That reads their weights several times slower.
  bool batch_invariant = false;
};

template <class X, class W, class Out>
Status matmul(const Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape, const Groups& groups,
              const MatmulPolicy& policy = {}) {
  if constexpr (!::kernels::detail::takes_product<X, W, Out>()) {
    return ::kernels::detail::not_compiled();
  } else {
    bool empty = false;
    KERNELS_TRY(::kernels::detail::check_matmul(x, w, out, shape, empty, groups));
    KERNELS_TRY(cx.status().in("matmul"));
    if (empty) return {};
    KERNELS_TRY(::kernels::detail::host::check_offsets(groups, shape.m));
    if constexpr (::kernels::detail::by_token<W>)
      return groups.several() ? unsupported("matmul: weights that differ from token to token go without groups")
                              : ::kernels::detail::host::gemv_by_token(cx, x, w, out, shape);
    else if (shape.m <= ::kernels::detail::host::kFewTokens<X, W> && !groups.several() && !policy.batch_invariant)
      return ::kernels::detail::host::gemv(cx, x, w, out, shape);
    else return ::kernels::detail::host::gemm(cx, x, w, out, shape, groups);
  }
}
template <class X, class W, class Out>
Status matmul(const Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape,
              const MatmulPolicy& policy = {}) {
  return matmul(cx, x, w, out, shape, Groups{}, policy);
}

}  // namespace cpu
KERNELS_END
