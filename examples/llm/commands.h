// The commands of the program. Each returns its exit code; errors are thrown.
#pragma once

#include "session.h"

namespace llm {

struct Prompts {
  std::vector<std::string> texts;
  std::vector<int64_t> lines;  // their line numbers, if they come from a file
};
int generate(const Settings& settings, const Prompts& prompts);
int info(const Settings& settings, int64_t texts);
// file: the name of the text. stride: of the windows; 0: half of the context. halves: score the second half of each
// window, as llama.cpp does.
int perplexity(const Settings& settings, const std::string& file, const std::string& text, int64_t stride, bool halves);
// before: the JSON of an earlier run, to compare with.
int bench(const Settings& settings, const std::vector<int64_t>& contexts, int64_t prompt, int64_t steps, int64_t texts,
          const std::optional<Json>& before);
int passkey(const Settings& settings, int64_t length, double depth);

}  // namespace llm
