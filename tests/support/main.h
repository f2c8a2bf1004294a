// What the two main programs share. Exit status: 0 passed, 1 failed, 77 skipped. Catch2 would return the number of
// failed checks, and 77 of those must not read as a skipped test.
#pragma once

#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#endif
#include "catch.h"

#include <cstring>

namespace test {

// Listing the tests needs no device and keeps Catch2's own exit status: CMake lists them while building, on any
// machine.
inline bool only_lists(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (!std::strncmp(argv[i], "--list", 6) || !std::strcmp(argv[i], "--help")) return true;
  }
  return false;
}

// cannot_run: why nothing can run on this machine, or null.
inline int run(int argc, char** argv, const char* cannot_run) {
  const bool listing = only_lists(argc, argv);
  if (cannot_run && !listing) {
    skip(cannot_run);
    return 77;
  }
  const int result = Catch::Session().run(argc, argv);
  if (listing) return result;
  if (result != 0) return 1;
  return skipped ? 77 : 0;
}

}  // namespace test
