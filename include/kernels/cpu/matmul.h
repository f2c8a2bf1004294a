// Matrix products on the CPU, fused with what comes before and after: result(m, n) = sum over k of x(m, k) * w(n, k).
//
//   k::cpu::Exec cx{threads};
//   k::cpu::matmul(cx, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//
// x has a row for each token and w a row for each output; both are read along K. weights.h lists the sources for
// quantized, gated and stacked weights and for normalized inputs; functor.h lists the others. They are those of the
// GPU, with host pointers. M, N >= 0, 0 <= K <= 2^30, any alignment, any row stride; K = 0 gives sums of 0. Sums are
// made in float (double if x is double), in many partial sums.
//
// Each result reaches the sink exactly once, so a residual may be added in place. What x reads must not be written. The
// same input gives the same bits, whatever the number of threads.
//
// AVX512-BF16: if compiled for it, the library uses its dot products where inputs and weights are plain bfloat16 in
// memory and the product has more than 4 tokens, has groups, or is batch_invariant. Subnormal inputs and weights then
// count as 0, and so does a sum below 2^-126.
//
// Groups are computed one after the other, with the kernel for many tokens: groups of few tokens read their weights
// several times slower. Offsets are read on the host.
//
// Threads need 640 KB of stack; nothing is allocated. Compiler flags: as in softmax.h.
#pragma once

#include "detail/matmul/gemm.h"
#include "detail/matmul/gemv.h"

KERNELS_BEGIN
namespace detail {
namespace host {
// Products of more tokens than this are computed in tiles. With pairs of bfloat16, tiles run nearly as fast as the
// weights can be read. On an EPYC with AVX-512, one thread, 14336 x 4096 read from memory: 5 tokens take 8.5 ms in
// tiles and 10.3 as few, 8 tokens 9.1 and 11.9, 32 tokens 14.9 and 25.4; 4 tokens 8.3 and 6.1.
// One thread of a Xeon, 2048 x 4096 halves, likewise: 16 tokens 3.0 and 2.9, 20 tokens 3.3 and 3.7, with AVX2 6.2 and
// 4.5, 7.0 and 7.2; int4: 24 tokens 4.9 and 4.2, 32 tokens 6.1 and 5.5.
template <class X, class W>
constexpr int kMostGemvTokens = std::is_same<panel_type<X, W>, bfloat16>::value ? kTileTokens<W>
                                : has_codes<W>                                  ? kMostTokens
                                                                                : 16;

// Only the CPU can check the offsets, as the host does not see those of the GPU.
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
  // A token's results have the same bits whatever M is and whichever row the token is in: few tokens are computed like
  // many, which reads their weights several times slower.
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
    else if (shape.m <= ::kernels::detail::host::kMostGemvTokens<X, W> && !groups.several() && !policy.batch_invariant)
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
