// What the program can be told to do. Each returns its exit code; errors are thrown.
#pragma once

#include "session.h"

namespace llm {

struct Prompts {
  std::vector<std::string> texts;
  std::vector<int64_t> lines;  // of a file, where each stands, if they are of one
};
int generate(const Settings& settings, const Prompts& prompts);
int info(const Settings& settings, int64_t texts);
struct TextFile {
  std::string name, text;
};
// stride: 0: half of the context. halves: as llama.cpp counts.
int perplexity(const Settings& settings, const TextFile& file, int64_t stride, bool halves);

// before: what an earlier run printed as JSON, to compare with.
int bench(const Settings& settings, const std::vector<int64_t>& contexts, int64_t prompt, int64_t steps, int64_t texts,
          const std::optional<Json>& before);
int passkey(const Settings& settings, int64_t length, double depth);

}  // namespace llm
