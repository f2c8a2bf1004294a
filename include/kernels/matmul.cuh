// Matrix products of activations with weights, fused with what comes before and after: result(m, n) = sum over k of
// x(m, k) * w(n, k).
//
//   k::matmul(stream, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//
// x has a row for each token and w a row for each output; both are read along K. M and N up to 2^31 - 1, K up to 2^30,
// any stride, any alignment. Sources for weights, gates and normalized inputs: weights.h.
//
// Precision. Sums are made in float (double if x is double).
// - Float and double weights, and 16-bit weights with one token, are multiplied in float or double on CUDA cores.
// - All other products use tensor cores. Weights of 16, 8 and 4 bits are exact there. Inputs are rounded to the
//   weights' 16-bit type; with weights of 8 and 4 bits, to the inputs' own 16-bit type, or to half.
// - The paths that read each row of weights in one go (docs/matmul.md) also multiply what this rounding removes.
// - Maps on weights make the weights round as well.
//
// Nothing is allocated or synchronized: calls can be captured in a graph. The same input gives the same bits.
//
// Workspace. If x or w is not 16-bit numbers in memory, a workspace (Exec::workspace) of matmul_workspace_bytes() makes
// products of several tokens up to ten times faster: a kernel ahead rounds x there once, and decodes w where that pays,
// instead of every block doing it. If the workspace has room for x only, only x is rounded ahead.
#pragma once

#include "core/matmul_plan.h"
#include "detail/matmul/engine.cuh"
#include "exec.cuh"

KERNELS_BEGIN

// kOnly restricts the call to the kernels of one path, which compiles faster: matmul<Path::gemv>(...) if there is only
// ever one token, for example, or matmul<Path::gemm>(...) with groups.
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

// The workspace that such a call can use; 0 where it would gain nothing.
template <class X, class W, class Out>
size_t matmul_workspace_bytes(const Exec& ex, const X& x, const W& w, const Out& out, const MatmulShape& shape,
                              const Groups& groups = {}, const MatmulPolicy& policy = {}) {
  size_t bytes = 0;
  const Status status = detail::with_product<Path::automatic>(
      ex, x, w, out, shape, groups, policy,
      [&](const auto& engine) { return bytes = engine.workspace_bytes(), Status{}; });
  return status ? bytes : 0;
}

// What such a call would do, and why not something faster.
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
