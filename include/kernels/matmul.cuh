// Products of activations with weights: result(m, n) = sum over k of x(m, k) * w(n, k), fused with whatever comes
// before and after.
//
//   k::matmul(stream, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//
// x has a row for each token, w one for each output; both are read along K. Any M, N up to 2^31 - 1, K up to 2^30, any
// stride, any alignment. Sources of weights, gates and normalized inputs: weights.h. Sums are made in float (double
// when x is).
//
// With float and double weights, and with one token where weights have 16 bits, all is multiplied in float or double.
// Other products go through tensor cores: weights of 16, 8 and 4 bits are exact there. Inputs are rounded to the
// weights' 16-bit type, or for weights of 8 and 4 bits to the inputs' own or to half; where rows of weights are read in
// one go (docs/matmul.md), what that leaves is multiplied as well. Maps on weights round them, too. Nothing is
// allocated or synchronized: calls can be captured in a graph. The same input gives the same bits.
//
// Where x or w is not 16-bit numbers in memory, a workspace (Exec::workspace) of matmul_workspace_bytes() makes
// products of several tokens faster, up to ten times: a kernel ahead rounds x there once, and where it pays decodes w,
// instead of every block that multiplies them. With room for x alone, x is.
#pragma once

#include "core/matmul_plan.h"
#include "detail/matmul/engine.cuh"
#include "exec.cuh"

KERNELS_BEGIN

// With kOnly, the kernels of one path alone, which take less time to compile: matmul<Path::gemv>(...) where there is
// only ever one token, say, or matmul<Path::gemm>(...) with groups.
template <Path kOnly = Path::automatic, class X, class W, class Out>
Status matmul(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape, const Groups& groups,
              const MatmulPolicy& policy = {}) {
  return detail::with_product<kOnly>(ex, x, w, out, shape, groups, policy,
                                     [](const auto& engine) { return engine.run(); })
      .in("matmul");
}
template <Path kOnly = Path::automatic, class X, class W, class Out>
Status matmul(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape,
              const MatmulPolicy& policy = {}) {
  return matmul<kOnly>(ex, x, w, out, shape, Groups{}, policy);
}

// 0 where a workspace gains nothing.
template <class X, class W, class Out>
size_t matmul_workspace_bytes(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape,
                              const Groups& groups = {}, const MatmulPolicy& policy = {}) {
  size_t bytes = 0;
  const Status status = detail::with_product<Path::automatic>(
      ex, x, w, out, shape, groups, policy,
      [&](const auto& engine) { return bytes = engine.workspace_bytes(), Status{}; });
  return status ? bytes : 0;
}

// What such a call does, and why not a faster way.
template <class X, class W, class Out>
Status matmul_plan(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape,
                   const Groups& groups, const MatmulPolicy& policy, MatmulPlan& plan) {
  plan = {};
  static_cast<MatmulPolicy&>(plan) = policy;
  return detail::with_product<Path::automatic>(ex, x, w, out, shape, groups, policy,
                                               [&](const auto& engine) { return engine.plan(plan); })
      .in("matmul");
}

KERNELS_END
