// Draws the next token from rows of logits, on the CPU.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::sample(cx, k::load(logits, ld), tokens, rows, vocabulary,
//                  k::Sampling{}.temperature(0.8f).top_k(50).top_p(0.9f).seed(s).step(t));
//
// Options, limits and results are those of the GPU (sampling.cuh), with host pointers. The same seed draws the same
// tokens on both.
#pragma once

#include "detail/sampling.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Token>
Status sample(const Exec& cx, const Load& logits, Token* tokens, int64_t rows, int64_t vocabulary,
              const Sampling& options = {}) {
  if constexpr (!::kernels::detail::takes_logits<Load>()) {
    return ::kernels::detail::not_compiled();
  } else {
    const ::kernels::detail::TokenOutput out(tokens);
    KERNELS_TRY(::kernels::detail::check_sample(logits, out, rows, vocabulary, options).in("sample"));
    KERNELS_TRY(cx.status().in("sample"));
    ::kernels::detail::host::run_samples(
        cx.team(), ::kernels::detail::SampleProblem<Load>{logits, rows, vocabulary, out, options.options()});
    return {};
  }
}

template <class Load, class Q, class Token>
Status verify(const Exec& cx, const Load& logits, const Drafts<Q>& drafts, Token* tokens, int32_t* accepted,
              const VerifyShape& shape, const Sampling& options = {}) {
  if constexpr (!::kernels::detail::takes_logits<Load>()) {
    return ::kernels::detail::not_compiled();
  } else {
    const ::kernels::detail::VerifyProblem<Load, Q> problem{logits,       options.options(), tokens,   drafts.tokens,
                                                            drafts.ld,    shape.drafts,      drafts.q, accepted,
                                                            shape.rows(), shape.vocabulary};
    KERNELS_TRY(::kernels::detail::check_verify(problem, shape, options).in("verify"));
    KERNELS_TRY(cx.status().in("verify"));
    ::kernels::detail::host::run_samples(cx.team(), problem);
    for (int64_t i = 0; i < shape.sequences; ++i) problem.finish(i);
    return {};
  }
}

template <class Load>
Status log_probs(const Exec& cx, const Load& logits, int64_t rows, int64_t vocabulary, const LogProbs& outputs) {
  if constexpr (!::kernels::detail::takes_logits<Load>()) {
    return ::kernels::detail::not_compiled();
  } else {
    KERNELS_TRY(::kernels::detail::check_score(logits, outputs, rows, vocabulary).in("log_probs"));
    KERNELS_TRY(cx.status().in("log_probs"));
    ::kernels::detail::host::run_samples(
        cx.team(), ::kernels::detail::ScoreProblem<Load>{logits, {}, outputs.outputs(), rows, vocabulary});
    return {};
  }
}

}  // namespace cpu
KERNELS_END
