#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <kernels/core/philox.h>

#include "text.h"

namespace llm {

int32_t Sampler::operator()(const float* logits, int64_t count, const std::vector<int32_t>& text, int64_t sequence) const {
  std::vector<float> penalized;
  if (options_.repetition_penalty != 1) {
    penalized.assign(logits, logits + count);
    std::vector<int32_t> seen(text);
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    for (const int32_t id : seen) {
      if (id < 0 || id >= count) continue;
      float& x = penalized[size_t(id)];
      x = float(x > 0 ? double(x) / options_.repetition_penalty : double(x) * options_.repetition_penalty);
    }
    logits = penalized.data();
  }
  const int64_t best = std::max_element(logits, logits + count) - logits;
  const double top = double(logits[best]);
  for (int64_t i = 0; i < count; ++i) {
    if (logits[i] != logits[i]) throw Error("the logits of token " + std::to_string(text.size()) + " are not numbers: the model has overflowed");
  }
  if (options_.temperature <= 0 || !std::isfinite(top)) return int32_t(best);

  struct Candidate {
    double share;
    int32_t id;
  };
  std::vector<Candidate> candidates;
  const double least = options_.min_p > 0 ? top + std::log(options_.min_p) * options_.temperature : -INFINITY;
  for (int64_t i = 0; i < count; ++i) {
    if (double(logits[i]) >= least) candidates.push_back({std::exp((double(logits[i]) - top) / options_.temperature), int32_t(i)});
  }
  const auto order = [](const Candidate& a, const Candidate& b) { return a.share != b.share ? a.share > b.share : a.id < b.id; };
  if (options_.top_k > 0 && options_.top_k < int64_t(candidates.size())) {
    std::nth_element(candidates.begin(), candidates.begin() + options_.top_k - 1, candidates.end(), order);
    candidates.resize(size_t(options_.top_k));
  }
  double sum = 0;
  for (const Candidate& c : candidates) sum += c.share;
  if (options_.top_p < 1) {
    std::sort(candidates.begin(), candidates.end(), order);
    double kept = 0;
    size_t n = 0;
    while (n < candidates.size() && (n == 0 || kept < options_.top_p * sum)) kept += candidates[n++].share;
    candidates.resize(n);
    sum = kept;
  }
  const auto random = kernels::philox(options_.seed, uint64_t(sequence), uint64_t(text.size()));
  double left = (double(random.v[0]) + 0.5) * 0x1p-32 * sum;
  for (const Candidate& c : candidates) {
    if ((left -= c.share) < 0) return c.id;
  }
  return candidates.back().id;
}

double negative_log_likelihood(const float* logits, int64_t count, int32_t id) {
  const double top = double(*std::max_element(logits, logits + count));
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(double(logits[i]) - top);
  return top + std::log(sum) - double(logits[id]);
}

}  // namespace llm
