// The next token from rows of logits, on the CPU.
//
//   k::cpu::Exec cx{threads};
//   k::cpu::sample(cx, k::load(logits, ld), tokens, rows, vocabulary, k::Sampling{}.temperature(0.8f).top_k(50).top_p(0.9f).seed(s).step(t));
//
// Options, limits and results are those of the GPU (sampling.cuh), with host pointers, and the same seed draws the same tokens there.
#pragma once

#include "detail/sampling.h"

KERNELS_BEGIN
namespace cpu {

template <class Load, class Token>
Status sample(const Exec& cx, const Load& logits, Token* tokens, int64_t rows, int64_t vocabulary, const Sampling& options = {}) {
  if constexpr (!::kernels::detail::takes_logits<Load>()) {
    return ::kernels::detail::not_compiled();
  } else {
    namespace host = ::kernels::detail::host;
    const ::kernels::detail::TokenOutput out(tokens);
    KERNELS_TRY(::kernels::detail::check_sample(logits, out, rows, vocabulary, options).in("sample"));
    KERNELS_TRY(cx.status());
    const host::Team team = cx.team().for_work(double(rows) * double(vocabulary));
    const int parts = int(lesser<int64_t>(team.threads, rows));
    const auto share = [&](int part) { return rows / parts * part + rows % parts * part / parts; };
    host::parallel(team, parts, [&](int part) {
      host::SampleRoom room;
      for (int64_t row = share(part); row < share(part + 1); ++row) {
        const ::kernels::detail::SampleRules rules(options.options(), row);
        host::SampleRow<Load> one(logits, options.options(), rules, row, vocabulary, room);
        ::kernels::detail::sample_row(one, options.options(), rules, row, vocabulary, out);
      }
    });
    return {};
  }
}

}  // namespace cpu
KERNELS_END
