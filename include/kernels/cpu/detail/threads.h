// What the CPU code was compiled for: the instruction set and the threads, which both become part of its symbols' names.
// Two files compiled with different flags then keep their own code, whatever the linker does with inline functions.
#pragma once

#include <cstdint>
#if !defined(_OPENMP)
#include <thread>
#endif

#include "../../core/status.h"

#if defined(__AVX512F__)
#define KERNELS_ISA_NAME avx512
#elif defined(__AVX2__)
#define KERNELS_ISA_NAME avx2
#elif defined(__AVX__)
#define KERNELS_ISA_NAME avx
#else
#define KERNELS_ISA_NAME base
#endif
#if defined(_OPENMP)
#define KERNELS_THREADS_NAME omp
#else
#define KERNELS_THREADS_NAME std
#endif
#define KERNELS_JOIN2(a, b) a##_##b
#define KERNELS_JOIN(a, b) KERNELS_JOIN2(a, b)
#define KERNELS_ISA KERNELS_JOIN(KERNELS_ISA_NAME, KERNELS_THREADS_NAME)

KERNELS_BEGIN
namespace detail {
namespace host {
inline namespace KERNELS_ISA {

// Whether this machine has the instructions that the code was compiled for.
inline Status check_cpu() {
#if defined(__GNUC__) && defined(__x86_64__)
  __builtin_cpu_init();
#define KERNELS_NEEDS(name) \
  if (!__builtin_cpu_supports(name)) return unsupported("compiled for " name ", which this CPU does not have")
#if defined(__AVX__)
  KERNELS_NEEDS("avx");
#endif
#if defined(__AVX2__)
  KERNELS_NEEDS("avx2");
#endif
#if defined(__FMA__)
  KERNELS_NEEDS("fma");
#endif
#if defined(__AVX512F__)
  KERNELS_NEEDS("avx512f");
#endif
#if defined(__AVX512BW__)
  KERNELS_NEEDS("avx512bw");
#endif
#if defined(__AVX512DQ__)
  KERNELS_NEEDS("avx512dq");
#endif
#if defined(__AVX512VL__)
  KERNELS_NEEDS("avx512vl");
#endif
#undef KERNELS_NEEDS
#endif
  return {};
}

#if defined(_OPENMP)

// f(i) for every i in [0, parts), on as many threads.
template <class F>
void parallel(int parts, const F& f) {
  if (parts == 1) return f(0);
#pragma omp parallel for schedule(static, 1) num_threads(parts)
  for (int i = 0; i < parts; ++i) f(i);
}

#else

// f(i) for every i in [begin, end): half of them on a new thread, or on this one where the system has no more.
template <class F>
void fork(int begin, int end, const F& f) {
  if (end - begin == 1) return f(begin);
  const int middle = begin + (end - begin) / 2;
  std::thread other;
  const auto half = [&f, middle, end] { fork(middle, end, f); };
#if defined(__cpp_exceptions)
  try {
    other = std::thread(half);
  } catch (...) {
  }
#else
  other = std::thread(half);
#endif
  fork(begin, middle, f);
  if (other.joinable()) other.join();
  else half();
}

// f(i) for every i in [0, parts), on as many threads.
template <class F>
void parallel(int parts, const F& f) {
  fork(0, parts, f);
}

#endif

}
}  // namespace host
}  // namespace detail
KERNELS_END
