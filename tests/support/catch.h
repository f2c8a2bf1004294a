// Catch2 2.13 or 3, whichever is installed; tests include this and nothing of Catch2 themselves.
#pragma once

#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include <cstdio>

namespace test {

inline bool skipped = false;

// For a test that cannot run on this machine (too little memory, an older GPU): say why, then return from the test.
//   if (bytes > free) return test::skip("needs 20 GB of GPU memory");
inline void skip(const char* why) {
  skipped = true;
  std::printf("skipped: %s\n", why);
}

}  // namespace test
