// Which instructions the CPU code was compiled for, and how it is shared among threads.
#pragma once

#include <cstdint>
#if !defined(_OPENMP)
#include <thread>
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#include <cpuid.h>
#endif

#include "../../core/status.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// The instructions that the code may use, beyond those that every machine has, as bits for machine_has().
constexpr unsigned kNeeds = 0
#if defined(__SSE4_1__)
    | 1u << 0
#endif
#if defined(__AVX__)
    | 1u << 1
#endif
#if defined(__AVX2__)
    | 1u << 2
#endif
#if defined(__FMA__)
    | 1u << 3
#endif
#if defined(__F16C__)
    | 1u << 4
#endif
#if defined(__BMI2__)
    | 1u << 5
#endif
#if defined(__AVX512F__)
    | 1u << 6
#endif
#if defined(__AVX512BW__)
    | 1u << 7
#endif
#if defined(__AVX512DQ__)
    | 1u << 8
#endif
#if defined(__AVX512VL__)
    | 1u << 9
#endif
    ;

inline Status machine_has(unsigned needs) {
#if defined(__GNUC__) && defined(__x86_64__)
  __builtin_cpu_init();
  // Not every compiler's __builtin_cpu_supports() knows f16c.
  const auto has_f16c = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  };
#define KERNELS_NEEDS(bit, name, has) \
  if ((needs >> bit & 1u) != 0 && !(has)) return unsupported("compiled for " name ", which this CPU does not have")
  KERNELS_NEEDS(0, "sse4.1", __builtin_cpu_supports("sse4.1"));
  KERNELS_NEEDS(1, "avx", __builtin_cpu_supports("avx"));
  KERNELS_NEEDS(2, "avx2", __builtin_cpu_supports("avx2"));
  KERNELS_NEEDS(3, "fma", __builtin_cpu_supports("fma"));
  KERNELS_NEEDS(4, "f16c", __builtin_cpu_supports("avx") && has_f16c());
  KERNELS_NEEDS(5, "bmi2", __builtin_cpu_supports("bmi2"));
  KERNELS_NEEDS(6, "avx512f", __builtin_cpu_supports("avx512f"));
  KERNELS_NEEDS(7, "avx512bw", __builtin_cpu_supports("avx512bw"));
  KERNELS_NEEDS(8, "avx512dq", __builtin_cpu_supports("avx512dq"));
  KERNELS_NEEDS(9, "avx512vl", __builtin_cpu_supports("avx512vl"));
#undef KERNELS_NEEDS
#else
  (void)needs;
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

// Whose threads a call runs on, and how many.
struct Team {
  struct Part {
    void (*run)(const void* f, int part);
    const void* f;
    void operator()(int part) const { run(f, part); }
  };

  int threads;
  const void* pool = nullptr;  // the caller's, for run; without it threads are OpenMP's or new ones
  void (*run)(const void* pool, int parts, const Part& part) = nullptr;
  // How many values that are read or written are worth a thread: to start one takes about as long.
  double least_work = 32 << 10;

  // With no more threads than there is work for. A multiplication of values that lie in a cache counts as a sixteenth of a value.
  Team for_work(double values, double products = 0) const {
    const double work = values + products / 16;
    Team team = *this;
    if (work < least_work * threads) team.threads = work < least_work ? 1 : int(work / least_work);
    return team;
  }
};

// f(i) for every i in [0, parts). A single part runs on the caller's own thread.
template <class F>
void parallel(const Team& team, int parts, const F& f) {
  if (parts < 1) return;
  if (parts == 1) return f(0);
  if (team.run == nullptr) return parallel(parts, f);
  team.run(team.pool, parts, {[](const void* call, int part) { (*static_cast<const F*>(call))(part); }, &f});
}

}  // namespace host
}  // namespace detail
KERNELS_END
