// Threads for calls as small as those of tests, which would otherwise run on one.
#pragma once

#include <kernels/cpu/exec.h>

// ThreadSanitizer cannot follow a child of fork() that starts threads when its parent has some.
#if defined(__SANITIZE_THREAD__)
#define TEST_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_THREAD_SANITIZER 1
#endif
#endif
#if !defined(TEST_THREAD_SANITIZER)
#define TEST_THREAD_SANITIZER 0
#endif

namespace test {

// As many threads as are asked for, however little there is to do.
inline kernels::cpu::Exec on_threads(int threads) { return kernels::cpu::Exec{threads}.least_work(0); }

}  // namespace test
