// Threads for calls as small as those of tests, which would otherwise run on one.
#pragma once

#include <kernels/cpu/exec.h>

namespace test {

// As many threads as are asked for, however little there is to do.
inline kernels::cpu::Exec on_threads(int threads) { return kernels::cpu::Exec{threads}.least_work(0); }

}  // namespace test
