#include <kernels/cpu/sampling.h>

#include "../link/doors.h"

// Sampling takes as long to compile as half of the others: where it is only looked at.
#if defined(WITHOUT_CODE)
kernels::Status every_draw(const float* logits, const int32_t* drafted, int32_t* tokens, float* logs, int64_t rows,
                           int64_t n) {
  namespace k = kernels;
  const k::cpu::Exec cx{2};
  const auto in = k::load(logits, n);
  KERNELS_TRY(k::cpu::sample(cx, in, tokens, rows, n, k::Sampling{}.top_k(50).top_p(0.9f)));
  KERNELS_TRY(k::cpu::log_probs(cx, in, rows, n, k::LogProbs{}.of(drafted, logs)));
  return k::cpu::verify(cx, in, k::drafts(drafted, 1), tokens, tokens + 2 * rows, {rows, 1, n});
}
#endif

int main() { return every_door("doors") + every_weight("doors") == 0 ? 0 : 1; }
