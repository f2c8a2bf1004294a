// The instruction sets for which the CPU code was compiled, and how work is distributed among threads.
#pragma once

#include <cstdint>

#if defined(__GNUC__) && defined(__x86_64__)
#include <cpuid.h>
#endif

#include "../../core/status.h"
#if !defined(_OPENMP) && __has_include(<pthread.h>)
#define KERNELS_HAVE_POOL 1
#include "pool.h"
#else
#define KERNELS_HAVE_POOL 0
#endif

KERNELS_BEGIN
namespace detail {
namespace host {

// The instruction sets that the code may use, beyond those of every machine, as bits for machine_has().
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
#if defined(__AVX512BF16__)
    | 1u << 10
#endif
#if defined(__AVX512VNNI__)
    | 1u << 11
#endif
#if defined(__AVX512VBMI__)
    | 1u << 12
#endif
    ;

#if defined(__GNUC__) && defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports() knows these. Queried once: in a virtual machine cpuid takes ten
// microseconds.
KERNELS_OF_THIS_LIBRARY inline bool has_f16c() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  }();
  return has;
}
KERNELS_OF_THIS_LIBRARY inline bool has_avx512bf16() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool has_second = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && a >= 1;
    return has_second && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 5 & 1u) != 0;
  }();
  return has;
}
#endif

inline Status machine_has(unsigned needs) {
#if defined(__GNUC__) && defined(__x86_64__)
  __builtin_cpu_init();
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
  KERNELS_NEEDS(10, "avx512bf16", __builtin_cpu_supports("avx512f") && has_avx512bf16());
  KERNELS_NEEDS(11, "avx512vnni", __builtin_cpu_supports("avx512vnni"));
  KERNELS_NEEDS(12, "avx512vbmi", __builtin_cpu_supports("avx512vbmi"));
#undef KERNELS_NEEDS
#else
  (void)needs;
#endif
  return {};
}

// Calls f(i) for every i in [0, parts), on as many threads.
template <class F>
void parallel(int parts, const F& f) {
#if KERNELS_HAVE_POOL
  run_on_pool(parts, f);
#else
#if defined(_OPENMP)
#pragma omp parallel for schedule(static, 1) num_threads(parts)
#endif
  for (int i = 0; i < parts; ++i) f(i);
#endif
}

// The threads of a call: whose they are, and how many.
struct Team {
  struct Part {
    void (*run)(const void* f, int part);
    const void* f;
    void operator()(int part) const { run(f, part); }
  };

  int threads;
  const void* pool = nullptr;  // the caller's pool, for run; null: OpenMP's threads or the library's own
  void (*run)(const void* pool, int parts, const Part& part) = nullptr;
  // The least number of values, read or written, for a thread. Microseconds of softmax and RMSNorm of floats, 1024
  // columns, in caches, with one thread and with two of the library's own (AVX2, two cores of a Xeon in a virtual
  // machine, medians of 1000 calls):
  //   values in all                         16 K      32 K      64 K      128 K      256 K
  //   threads still spinning, softmax      4.0 3.2   8.0 5.1   16  9.5   34  19     70  36
  //   threads still spinning, RMSNorm      1.2 1.9   2.4 2.3   4.6 3.5   9.2  5.9   18  11
  //   200 us after the last call, softmax  4.1  17   8.1  21   16   29   32   47    64  85
  // 2 x 32 K pays for both ops while threads are awake; if they have to be woken, little is lost.
  double least_work = 32 << 10;

  // At most as many threads as there is work for. A multiplication of values in a cache counts as a sixteenth of a
  // value.
  Team for_work(double values, double products = 0) const {
    const double work = values + products / 16;
    Team team = *this;
    if (work < least_work * threads) team.threads = work < least_work ? 1 : int(work / least_work);
    return team;
  }
};

// Calls f(i) for every i in [0, parts). A single part runs on the calling thread. All calls go through a pointer, so
// that f is compiled once.
template <class F>
void parallel(const Team& team, int parts, const F& f) {
  const Team::Part part{[](const void* call, int i) { (*static_cast<const F*>(call))(i); }, &f};
  if (parts < 1) return;
  if (parts == 1) return part(0);
  if (team.run == nullptr) return parallel(parts, part);
  team.run(team.pool, parts, part);
}

// Where share `part` of `parts` even shares of `count` begins: count * part / parts without overflow.
inline int64_t share_begin(int64_t count, int64_t part, int64_t parts) {
  return count / parts * part + count % parts * part / parts;
}
// Calls f(begin, end) for each thread's share of `count`.
template <class F>
void parallel_shares(const Team& team, int64_t count, const F& f) {
  const int parts = count < team.threads ? int(count) : team.threads;
  parallel(team, parts, [&](int part) { f(share_begin(count, part, parts), share_begin(count, part + 1, parts)); });
}

}  // namespace host
}  // namespace detail
KERNELS_END
