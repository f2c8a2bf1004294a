// Exec: how CPU calls run. The number of threads is the caller's, or less where there is little to do; results do not
// depend on it.
//
//   k::cpu::Exec cx{8};                // 8 threads at most
//   k::cpu::Exec all;                  // as many as it may use: by affinity, and by its container's quota
//   k::cpu::Exec mine{8, pool};        // at most 8 parts, run by the caller's own pool (below)
//   k::cpu::Exec{8}.least_work(0)      // 8 threads however little there is to do
//
// Otherwise a thread is used only for at least 32 K values, or sixteen times as many multiplications: a call with less
// than 64 K values runs on the calling thread alone, and one of a million on at most 32 threads, whatever the Exec
// says.
//
// pool(parts, f) calls f(i) once for each i in [0, parts), in any order and on any threads, and returns when all have
// returned. It must not throw, and outlives the Exec.
//
// Without a pool, threads are OpenMP's where the code is compiled with it (-fopenmp): within a parallel region a call
// then runs on the thread that makes it, unless nesting is switched on, and in a child of fork() GNU's OpenMP hangs if
// the parent has used it, so that such a child needs a pool or Exec{1}. Compiled without OpenMP a call takes threads of
// the library's own, which the first such call starts and which stay until the program ends or the library that holds
// the code is unloaded; they keep the affinity of the thread that started them. Calls from several threads at once
// share them, and so do those within somebody else's parallel region; a child of fork() starts its own. Where there are
// neither OpenMP nor POSIX threads, calls run alone.
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

// How many CPUs a quota of so much time in each period is, rounded up; 0 where there is none.
inline int quota_cpus(double quota, double period) {
  const double cpus = quota > 0 && period > 0 ? quota / period : 0;
  return cpus < 1e6 ? int(cpus) + (cpus > int(cpus)) : 0;
}

// The quota of the control group at this path: version 2 has quota and period in one file, version 1 has a file for
// each.
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

// What the calling thread and those that it starts may use.
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

// For programs that choose between instruction sets as they run (examples/dispatch_cpu.cpp): the bits of what a file
// was compiled for, which it can export as a constant, and whether the machine has that. Every call also checks for
// itself.
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

  // Values (those that are read or written, or a sixteenth of the multiplications of values) for each thread: a call
  // runs on values / least_work threads, rounded down, on one at least and on `threads` at most. 32 K unless given.
  Exec& least_work(int64_t values) { team_.least_work = double(values); return *this; }

  int threads() const { return team_.threads; }
  const ::kernels::detail::host::Team& team() const { return team_; }
  // What every call with this Exec begins with.
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
