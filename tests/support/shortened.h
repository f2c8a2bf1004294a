// KERNELS_SHORT=n in the environment shortens tests: of the calls that one makes in a loop, every nth is made, the first always.
// For sanitizers, under which a call takes a hundred times as long.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace test {

class Shortened {
 public:
  bool leaves_out() {
    static const int64_t every = std::getenv("KERNELS_SHORT") ? std::atoll(std::getenv("KERNELS_SHORT")) : 1;
    return every > 1 && count_++ % every != 0;
  }

 private:
  int64_t count_ = 0;
};

}  // namespace test
