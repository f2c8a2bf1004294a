// KERNELS_SHORT=n in the environment shortens tests: of the calls that one makes in a loop, every nth is made, the
// first always. For sanitizers, under which a call takes a hundred times as long.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace test {

inline int64_t one_of() {
  static const int64_t every = std::getenv("KERNELS_SHORT") ? std::atoll(std::getenv("KERNELS_SHORT")) : 1;
  return every;
}
inline bool is_shortened() { return one_of() > 1; }

class Shortened {
 public:
  bool leaves_out() { return is_shortened() && count_++ % one_of() != 0; }

 private:
  int64_t count_ = 0;
};

}  // namespace test
