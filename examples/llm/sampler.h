// The next token out of logits.
#pragma once

#include <cstdint>
#include <vector>

namespace llm {

struct Sampling {
  double temperature = 0;         // 0: the most likely token
  int64_t top_k = 0;              // of so many; 0: of all
  double top_p = 1, min_p = 0;    // of the most likely that together have this share; of those with this share of the most likely one's
  double repetition_penalty = 1;  // for tokens that the text has already
  uint64_t seed = 0;
};

class Sampler {
 public:
  explicit Sampler(const Sampling& options) : options_(options) {}

  // `count` logits of a sequence, whose tokens so far are `text`. The same seed, sequence and position give the same token, alone and in
  // a batch.
  int32_t operator()(const float* logits, int64_t count, const std::vector<int32_t>& text, int64_t sequence) const;

 private:
  Sampling options_;
};

// -log(softmax(logits)[id])
double negative_log_likelihood(const float* logits, int64_t count, int32_t id);

}  // namespace llm
