// Tally: what a loop over many cases checks. One REQUIRE for each element would take minutes; a Tally counts, keeps the
// first failure's words, and is checked once:
//
//   test::Tally t;
//   for (...) t.expect(got == want, "cols %d, col %d: got %g, want %g", cols, col, got, want);
//   CHECK_TALLY(t);
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <string>

#include "catch.h"
#include "shortened.h"

namespace test {

class Tally {
 public:
  template <class... Args>
  bool expect(bool ok, const char* format, Args... args) {
    ++checked_;
    if (!ok && failed_++ == 0) {
      char text[512];
      if constexpr (sizeof...(args) > 0) std::snprintf(text, sizeof(text), format, args...);
      else std::snprintf(text, sizeof(text), "%s", format);
      first_ = text;
    }
    return ok;
  }

  // Whether the next call of a loop is left out of a shortened test.
  bool leaves_out() { return shortened_.leaves_out(); }

  int64_t checked() const { return checked_; }
  int64_t failed() const { return failed_; }
  const std::string& first() const { return first_; }

 private:
  int64_t checked_ = 0, failed_ = 0;
  std::string first_;
  Shortened shortened_;
};

}  // namespace test

// A tally of nothing fails too: a loop that never ran has tested nothing.
#define CHECK_TALLY(tally)                                                                                    \
  do {                                                                                                        \
    INFO("first of " << (tally).failed() << " failures in " << (tally).checked() << ": " << (tally).first()); \
    CHECK((tally).failed() == 0);                                                                             \
    CHECK((tally).checked() > 0);                                                                             \
  } while (false)
