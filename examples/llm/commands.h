// What the program can be told to do. Each returns its exit code; errors are thrown.
#pragma once

#include "session.h"

namespace llm {

int generate(const Settings& settings, const std::vector<std::string>& prompts);
int info(const Settings& settings, int64_t texts);
int perplexity(const Settings& settings, const std::string& file, int64_t stride);

int bench(const Settings& settings, const std::vector<int64_t>& contexts, int64_t prompt, int64_t steps, int64_t texts);
int passkey(const Settings& settings, int64_t length, double depth);

}  // namespace llm
