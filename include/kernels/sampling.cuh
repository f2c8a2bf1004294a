// The next token from rows of logits.
//
//   k::sample(stream, k::load(logits, ld), tokens, rows, vocabulary,
//             k::Sampling{}.temperature(0.8f).top_k(50).top_p(0.9f).seed(s).step(t));
//
// core/sampling.h lists the options and their order. logits: a source of any type, with maps or without, which is read
// as floats; tokens: int32_t or int64_t, one for each row. rows >= 0; vocabularies from 1 to 2^22; any alignment.
// Logits that are equal are in the order of their ids, the lowest first. -infinity hides a token, +infinity is as
// likely as all others of it and hides the rest. A row with a NaN, without an allowed token, or with a parameter
// outside its limits gets token -1, and a status that says so.
//
// The same seed, step and row give the same token on every GPU and on the CPU (cpu/sampling.h), whatever else is in the
// batch. Sources with maps do so where the maps give the same bits: plain loads always do. Code must not be compiled
// with -use_fast_math.
//
// A row is read from memory once for top_k up to 256, and for greedy(); else it is read again three to seven times,
// mostly from the cache. No workspace; nothing is allocated or synchronized, and parameters, seed and step may lie on
// the device: a call can be captured in a graph and replayed.
#pragma once

#include "detail/sampling/engine.cuh"

KERNELS_BEGIN

template <class Load, class Token>
[[nodiscard]] Status sample(const Exec& ex, const Load& logits, Token* tokens, int64_t rows, int64_t vocabulary,
                            const Sampling& options = {}) {
  if constexpr (!detail::takes_logits<Load>()) {
    return detail::not_compiled();
  } else {
    const detail::TokenOutput out(tokens);
    KERNELS_TRY(detail::check_sample(logits, out, rows, vocabulary, options).in("sample"));
    KERNELS_TRY(ex.status().in("sample"));
    if (rows == 0) return {};
    const auto make = [&](const auto& source) {
      return detail::SampleProblem<std::decay_t<decltype(source)>>{source, rows, vocabulary, out, options.options()};
    };
    return detail::run_samples(ex, logits, vocabulary, make).in("sample");
  }
}

// Speculative decoding: which of a sequence's drafted tokens are accepted, and the token behind them.
//
//   k::verify(stream, k::load(logits, ld), k::drafts(drafted, drafts), tokens, accepted,
//             {sequences, drafts, vocabulary}, options);
//   k::verify(stream, k::load(logits, ld), k::drafts(drafted, drafts, k::load(q, ld)), tokens, accepted,
//             {sequences, drafts, vocabulary}, options);       // with the drafter's probabilities
//
// Row sequence * (drafts + 1) + i of the logits is the model's behind i of the drafted tokens. Draft i is accepted with
// probability min(1, p / q), where p is what the options leave of the row and q the drafter's; at temperature 0 where
// it is the largest logit's. The first one that is not is replaced by a token drawn by what p has more than q; if all
// are accepted, one more is drawn from the last row. So tokens come as often as without drafts. accepted[sequence] is
// their number, and tokens, rows of drafts + 1, has them, the token behind, and -1 from there on. Parameters, seed and
// step are those of the sequence; the draw at row i is that of step + i. What lies in rows (bias, allowed, counts,
// previous, status) is of all sequences * (drafts + 1) rows.
template <class Load, class Q, class Token>
[[nodiscard]] Status verify(const Exec& ex, const Load& logits, const Drafts<Q>& drafts, Token* tokens,
                            int32_t* accepted, const VerifyShape& shape, const Sampling& options = {}) {
  if constexpr (!detail::takes_logits<Load>()) {
    return detail::not_compiled();
  } else {
    const auto make = [&](const auto& source) {
      return detail::VerifyProblem<std::decay_t<decltype(source)>, Q>{
          source,       options.options(), tokens,   drafts.tokens, drafts.ld,
          shape.drafts, drafts.q,          accepted, shape.rows(),  shape.vocabulary};
    };
    KERNELS_TRY(detail::check_verify(make(logits), shape, options).in("verify"));
    KERNELS_TRY(ex.status().in("verify"));
    if (shape.sequences == 0) return {};
    KERNELS_TRY(detail::run_samples(ex, logits, shape.vocabulary, make).in("verify"));
    return detail::finish_sequences(ex, make(logits)).in("verify");
  }
}

// Logarithms of probabilities: log_softmax() of the rows, of one token of each and of the largest.
//
//   k::log_probs(stream, k::load(logits, ld), rows, vocabulary,
//                k::LogProbs{}.of(tokens, chosen).top(5, ids, values, 5));
//
// Good to 2^-20 and the last place of a float. A row with a NaN gives NaN and ids of -1; so does a token that is none.
// Where fewer than n tokens are above -infinity, ids of -1 and -infinity follow. +infinity is as in sample().
template <class Load>
[[nodiscard]] Status log_probs(const Exec& ex, const Load& logits, int64_t rows, int64_t vocabulary,
                               const LogProbs& outputs) {
  if constexpr (!detail::takes_logits<Load>()) {
    return detail::not_compiled();
  } else {
    KERNELS_TRY(detail::check_score(logits, outputs, rows, vocabulary).in("log_probs"));
    KERNELS_TRY(ex.status().in("log_probs"));
    if (rows == 0) return {};
    const auto make = [&](const auto& source) {
      return detail::ScoreProblem<std::decay_t<decltype(source)>>{source, {}, outputs.outputs(), rows, vocabulary};
    };
    return detail::run_samples(ex, logits, vocabulary, make).in("log_probs");
  }
}

KERNELS_END
