// Random calls: tests that draw whole calls at random, each from a seed of its own, and check them like any other.
//
// KERNELS_RANDOM_CALLS=n in the environment makes n calls of each kind, KERNELS_SEED=s begins with seed s instead of 1.
// Without them the calls are the same every time. A failure names its seed: KERNELS_SEED=that KERNELS_RANDOM_CALLS=1
// makes this call alone. If a seed is given, each call is named before it is made, so that one that hangs or ends the
// program is known.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "catch.h"
#include "shortened.h"

namespace test {

inline int64_t number_from(const char* variable, int64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text && *text ? std::atoll(text) : otherwise;
}
inline bool seed_is_given() {
  const char* const text = std::getenv("KERNELS_SEED");
  return text && *text;
}
inline uint64_t first_seed() { return uint64_t(number_from("KERNELS_SEED", 1)); }
// How many calls: `usual` ones, fewer where tests are shortened.
inline int64_t number_of_calls(int64_t usual) {
  return number_from("KERNELS_RANDOM_CALLS", (usual + one_of() - 1) / one_of());
}

// draw(seed) gives something with describe(); run(drawn) says what was wrong with it, or "".
template <class Draw, class Run>
void each_random_call(int64_t usual, const Draw& draw, const Run& run) {
  const uint64_t first = first_seed();
  const int64_t count = number_of_calls(usual);
  int64_t wrong = 0, reported = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto drawn = draw(first + uint64_t(i));
    const std::string name = "KERNELS_SEED=" + std::to_string(first + uint64_t(i)) + ": " + drawn.describe();
    if (seed_is_given()) std::fprintf(stderr, "%s\n", name.c_str());
    std::string problem;
    try {
      problem = run(drawn);
    } catch (const std::exception& error) {
      FAIL(name << ": " << error.what());  // of no use to go on, if it was the GPU
    }
    if (problem.empty()) continue;
    ++wrong;
    if (++reported <= 16) FAIL_CHECK(name << ": " << problem);
  }
  INFO(wrong << " of " << count << " wrong");
  CHECK(wrong == 0);
}

}  // namespace test
