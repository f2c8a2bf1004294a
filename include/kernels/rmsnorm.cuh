// RMSNorm over rows: x / sqrt(mean(x^2) + eps), fused with whatever comes before and after.
//
//   k::rmsnorm(stream, k::load(x, ld), k::affine(gamma) | k::store(y, ld), rows, cols, k::RmsNorm{}.eps(1e-6));
//
// The model families differ in what follows the normalization; each is a composition:
//   Llama, Mistral         k::affine(weight) | ...
//   Hugging Face's Llama   k::round_to<half>() | k::affine(weight) | ...      (casts before it multiplies)
//   Gemma                  k::affine(k::one_plus(weight)) | ...
//
// Squares are summed in float: |x| above about 1e19 overflows. Shapes, types, aliasing, determinism: as in softmax.cuh.
#pragma once

#include "detail/row/engine.cuh"

KERNELS_BEGIN

template <class Load, class Store, class Compute = void>
Status rmsnorm(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols,
               const RmsNorm& options = {}, const RowPolicy& policy = {}) {
  detail::check_compute<Load, Compute>();
  return detail::run_rows(ex, options, in, out, rows, cols, policy).in("rmsnorm");
}

// OneFlow's signature: rmsnorm<Load, Store, float>(stream, load, store, rows, cols, eps, inv_rms), where inv_rms
// receives 1 / sqrt(mean of squares + eps). A null pointer means that the result is not wanted.
template <class Load, class Store, class Compute>
Status rmsnorm(const Exec& ex, const Load& in, const Store& out, int64_t rows, int64_t cols, double eps,
               Compute* inv_rms) {
  return rmsnorm<Load, Store, Compute>(ex, in, out, rows, cols, RmsNorm{}.eps(eps).rstd(inv_rms));
}

KERNELS_END
