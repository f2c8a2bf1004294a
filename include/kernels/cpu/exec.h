// Exec: how many threads a CPU call uses, and where they come from.
//
//   k::cpu::Exec cx{8};                // 8 threads at most
//   k::cpu::Exec all;                  // as many as the process may use: by affinity and by its container's CPU quota
//   k::cpu::Exec mine{8, pool};        // at most 8 parts, run by the caller's own pool (below)
//   k::cpu::Exec{8}.least_work(0)      // 8 threads, however little there is to do
//
// Results do not depend on the number of threads. Small calls use fewer threads than allowed: each thread gets at least
// 32 K values, or sixteen times as many multiplications. So a call with less than 64 K values runs on the calling
// thread, and one with a million values on at most 32 threads.
//
// A pool of your own: pool(parts, f) calls f(i) once for each i in [0, parts), in any order and on any threads, and
// returns when all calls have returned. It must not throw, and must outlive the Exec.
//
// Without a pool, threads come from:
// - OpenMP, if the code is compiled with -fopenmp. Inside a parallel region a call then runs on the calling thread,
//   unless nesting is enabled. GNU's OpenMP hangs in a child of fork() if the parent has used it: such a child needs a
//   pool or Exec{1}.
// - Threads of the library, if compiled without OpenMP. The first call that needs them starts them; they run until the
//   program ends, or until the shared library that holds this code is unloaded, and keep the affinity of the thread
//   that started them. Concurrent calls share them, also calls inside a parallel region of somebody else. A child of
//   fork() starts its own.
// - Neither, where there are no POSIX threads either: calls run on the calling thread.
#pragma once

#include <cstdio>
#include <thread>
#include <type_traits>
#if defined(__linux__)
#include <sched.h>
#endif

#include "../core/status.h"
#include "detail/threads.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// The number of CPUs that a quota of so much time per period amounts to, rounded up; 0: no quota.
inline int quota_cpus(double quota, double period) {
  const double cpus = quota > 0 && period > 0 ? quota / period : 0;
  return cpus < 1e6 ? int(cpus) + (cpus > int(cpus)) : 0;
}

// The quota of the control group at this path. Version 2 has quota and period in one file, version 1 in two.
inline int container_cpus(const char* group) {
  double quota = 0, period = 0, none = 0;
  const auto scan = [group](const char* name, double& first, double& second) {
    char path[256];
    std::snprintf(path, sizeof(path), "%s/%s", group, name);
    std::FILE* const file = std::fopen(path, "r");
    if (file == nullptr) return;
    if (std::fscanf(file, "%lf %lf", &first, &second) < 1) first = 0;  // "max": no quota
    std::fclose(file);
  };
  scan("cpu.max", quota, period);
  if (period <= 0) {
    scan("cpu/cpu.cfs_quota_us", quota, none);
    scan("cpu/cpu.cfs_period_us", period, none);
  }
  return quota_cpus(quota, period);
}

// The number of threads that the calling thread and its children may run on.
inline int usable_threads() {
  int threads = int(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) threads = CPU_COUNT(&allowed);
  static const int quota = container_cpus("/sys/fs/cgroup");
  if (quota > 0 && quota < threads) threads = quota;
#endif
  return threads > 0 ? threads : 1;
}

}  // namespace host
}  // namespace detail

namespace cpu {

// For programs that choose between instruction sets at run time (examples/dispatch_cpu.cpp): the bits of the
// instruction sets that a file was compiled for, which it can export as a constant, and whether the machine has them.
// Every call checks this as well.
using ::kernels::detail::host::kNeeds;
using ::kernels::detail::host::machine_has;

class Exec {
 public:
  Exec() : Exec(::kernels::detail::host::usable_threads()) {}
  explicit Exec(int threads) : team_{threads}, status_(check(threads)) {}
  template <class Pool>
  Exec(int threads, Pool& pool) : Exec(threads) {
    using ::kernels::detail::host::Team;
    static_assert(std::is_invocable<Pool&, int, const Team::Part&>::value,
                  "Exec: a pool is called as pool(parts, f), and calls f(i) for each i below parts");
    team_.pool = &pool;
    team_.run = [](const void* p, int parts, const Team::Part& part) {
      (*static_cast<Pool*>(const_cast<void*>(p)))(parts, part);
    };
  }

  // The least number of values per thread, 32 K by default: a call runs on values / least_work threads, rounded down,
  // at least 1 and at most `threads`. Values are those read or written, or a sixteenth of the multiplications.
  Exec& least_work(int64_t values) { team_.least_work = double(values); return *this; }

  int threads() const { return team_.threads; }
  const ::kernels::detail::host::Team& team() const { return team_; }
  // Checked at the beginning of every call with this Exec.
  Status status() const { return status_; }

 private:
  static Status check(int threads) {
    if (threads < 1) return invalid("Exec: threads is less than 1");
    return machine_has(kNeeds);
  }

  ::kernels::detail::host::Team team_;
  Status status_;
};

}  // namespace cpu
KERNELS_END
