// The next token from rows of logits.
//
//   k::sample(stream, k::load(logits, ld), tokens, rows, vocabulary, k::Sampling{}.temperature(0.8f).top_k(50).top_p(0.9f).seed(s).step(t));
//
// core/sampling.h lists the options and their order. logits: a source of any type, with maps or without, which is read as floats;
// tokens: int32_t or int64_t, one for each row. rows >= 0; vocabularies from 1 to 2^22; any alignment. Logits that are equal are in the
// order of their ids, the lowest first. -infinity hides a token, +infinity is as likely as all others of it and hides the rest.
// A row with a NaN, without an allowed token, or with a parameter outside its limits gets token -1, and a status that says so.
//
// The same seed, step and row give the same token on every GPU and on the CPU (cpu/sampling.h), whatever else is in the batch. Sources
// with maps do so where the maps give the same bits: plain loads always do. Code must not be compiled with -use_fast_math.
//
// A row is read from memory once for top_k up to 256, and for greedy(); else it is read again two to five times, mostly from the
// cache. No workspace; nothing is allocated or synchronized, and parameters, seed and step may lie on the device: a call can be
// captured in a graph and replayed.
#pragma once

#include "detail/sampling.cuh"

KERNELS_BEGIN

template <class Load, class Token>
[[nodiscard]] Status sample(const Exec& ex, const Load& logits, Token* tokens, int64_t rows, int64_t vocabulary, const Sampling& options = {}) {
  if constexpr (!detail::takes_logits<Load>()) {
    return detail::not_compiled();
  } else {
    const detail::TokenOutput out(tokens);
    KERNELS_TRY(detail::check_sample(logits, out, rows, vocabulary, options).in("sample"));
    KERNELS_TRY(ex.status());
    if (rows == 0) return {};
    const auto source = detail::read_twice(logits);
    using Source = std::decay_t<decltype(source)>;
    const detail::SampleProblem<Source> problem{source, options.options(), out, rows, vocabulary};
    constexpr int wide = detail::widest_of<Source>() < 8 ? detail::widest_of<Source>() : 8;
    if (detail::max_pack_of(source, vocabulary) >= wide && vocabulary % wide == 0) return detail::start_sample<detail::SampleProblem<Source>, wide>(ex, problem);
    return detail::start_sample<detail::SampleProblem<Source>, 1>(ex, problem);
  }
}

KERNELS_END
