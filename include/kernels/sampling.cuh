// Sampling: draws the next token from rows of logits, verifies drafts (speculative decoding), and gives
// log-probabilities.
//
//   k::sample(stream, k::load(logits, ld), tokens, rows, vocabulary,
//             k::Sampling{}.temperature(0.8f).top_k(50).top_p(0.9f).seed(s).step(t));
//
// core/sampling.h lists the options and the order in which they apply. logits: a source of any type, with or without
// maps, read as float. tokens: int32_t or int64_t, one for each row. rows >= 0; vocabularies from 1 to 2^22; any
// alignment.
//
// Equal logits are ordered by token id, the lowest first. A logit of -infinity hides its token. Tokens with +infinity
// are equally likely and hide all others. A row gets token -1, and a status that says why, if it has a NaN, if it has
// no allowed token, or if one of its parameters is out of range.
//
// The same seed, step and row give the same token on every GPU and on the CPU (cpu/sampling.h), whatever else is in the
// batch. With maps on the source this holds if the maps give the same bits; plain loads always do. Do not compile with
// -use_fast_math.
//
// A row is read from memory once for top_k up to 256 and for greedy(). Otherwise it is read three to seven more times,
// mostly from the cache. There is no workspace, nothing is allocated or synchronized, and parameters, seed and step may
// be on the device: a call can be captured in a graph and replayed.
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

// verify(): speculative decoding. Decides which drafted tokens of each sequence are accepted, and draws the next token.
//
//   k::verify(stream, k::load(logits, ld), k::drafts(drafted, drafts), tokens, accepted,
//             {sequences, drafts, vocabulary}, options);
//   k::verify(stream, k::load(logits, ld), k::drafts(drafted, drafts, k::load(q, ld)), tokens, accepted,
//             {sequences, drafts, vocabulary}, options);       // with the drafter's probabilities
//
// The logits have drafts + 1 rows for each sequence: row sequence * (drafts + 1) + i holds the model's logits after i
// drafted tokens. Draft i is accepted with probability min(1, p / q), where p is its probability after the options are
// applied to the row and q the drafter's; at temperature 0 it is accepted if its logit is the largest. The first
// rejected draft is replaced by a token drawn from the positive part of p - q; if all drafts are accepted, one more
// token is drawn from the last row. Tokens thus have the same distribution as without drafts.
//
// accepted[sequence] is the number of accepted drafts. tokens has drafts + 1 entries for each sequence: the accepted
// drafts, the drawn token, then -1. Parameters, seed and step are given for each sequence; the draw at row i uses step
// + i. Row arrays (bias, allowed, counts, previous, status) have an entry for each of the sequences * (drafts + 1)
// rows.
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

// log_probs(): logarithms of probabilities, the log_softmax() of the rows, of one token of each row and of the largest.
//
//   k::log_probs(stream, k::load(logits, ld), rows, vocabulary,
//                k::LogProbs{}.of(tokens, chosen).top(5, ids, values, 5));
//
// Accurate to 2^-20 plus one unit in the last place. A row with a NaN gives NaN and ids of -1; so does a token that is
// not in the vocabulary. If fewer than n tokens are above -infinity, ids of -1 and values of -infinity fill the rest.
// +infinity is treated as in sample().
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
