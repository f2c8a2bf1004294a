// Exec: how CPU calls run. The number of threads is the caller's; results do not depend on it.
//
//   k::cpu::Exec cx{8};      // 8 threads
//   k::cpu::Exec all;        // all that the hardware has
//
// Threads are OpenMP's where the code is compiled with it (-fopenmp), and std::thread's otherwise; a call that needs one
// thread starts none.
#pragma once

#include <thread>

#include "../core/status.h"
#include "detail/threads.h"

KERNELS_BEGIN
namespace cpu {

// For programs that choose between instruction sets as they run (examples/dispatch_cpu.cpp): the bits of what a file was compiled
// for, which it can export as a constant, and whether the machine has that. Every call also checks for itself.
using ::kernels::detail::host::kNeeds;
using ::kernels::detail::host::machine_has;

class Exec {
 public:
  Exec() : Exec(hardware_threads()) {}
  explicit Exec(int threads) : threads_(threads), status_(check(threads)) {}

  int threads() const { return threads_; }
  // What every call with this Exec begins with.
  Status status() const { return status_; }

 private:
  static int hardware_threads() {
    const unsigned n = std::thread::hardware_concurrency();
    return n > 0 ? int(n) : 1;
  }

  static Status check(int threads) {
    if (threads < 1) return invalid("Exec: threads is less than 1");
    return machine_has(kNeeds);
  }

  int threads_;
  Status status_;
};

}  // namespace cpu
KERNELS_END
