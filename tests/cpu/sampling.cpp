// Sampling on the CPU: against an oracle that sorts.
#include <kernels/cpu/sampling.h>

#include "support/sampling.h"
#include "support/threads.h"

using namespace test;

namespace {

const auto on_two = [](const auto& logits, auto* tokens, int64_t rows, int64_t vocabulary, const k::Sampling& options) {
  return k::cpu::sample(on_threads(2), logits, tokens, rows, vocabulary, options);
};

}  // namespace

TEST_CASE("tokens of every kind of row, by every rule") {
  Tally t;
  for (const int64_t n : {1, 2, 31, 33, 200, 1000}) check_samples<HostMemory, float>(t, {8, n, n % 3, n % 2}, sample_rules(), on_two);
  check_samples<HostMemory, float>(t, {8, 32000, 5, 1}, sample_rules(), on_two);
  CHECK_TALLY(t);
}

TEST_CASE("vocabularies as large as they get") {
  Tally t;
  const std::vector<SampleRulesOf> some = {rules_of("top_k, top_p", 0.8f, 50, 0.9f), rules_of("plain", 1, 0), sample_rules()[21]};
  check_samples<HostMemory, float>(t, {8, 50257, 1, 1}, some, on_two);
  check_samples<HostMemory, float>(t, {3, 128256, 0, 0}, some, on_two);
  check_samples<HostMemory, float>(t, {2, 1000000, 0, 0}, some, on_two);
  CHECK_TALLY(t);
}

TEST_CASE("logits of 16 bits") {
  Tally t;
  check_samples<HostMemory, k::bfloat16>(t, {8, 5000, 1, 1}, sample_rules(), on_two);
  CHECK_TALLY(t);
}
