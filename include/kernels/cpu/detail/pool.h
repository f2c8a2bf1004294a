// The thread pool for code compiled without OpenMP. Threads stay between calls, as starting one takes as long as a
// small call.
//
//   run_on_pool(parts, f)     f(i) for every i in [0, parts), on the calling thread and on idle threads of the pool
//
// A call takes threads that no other call uses. If there are too few, it starts new ones, up to the number of CPUs or
// of its own parts. So concurrent and nested calls share the CPUs and never wait for one another. Waiting threads spin
// for a moment, then sleep. The caller runs every part that no other thread has begun, and does not wait for sleeping
// threads to wake.
//
// Each program or shared library has one pool for all instruction sets that it is compiled for: the pool's data has
// plain types in the shared namespace, its code does not. Threads end when the program ends or the library is unloaded;
// later calls, by destructors or by threads that still run, run on their callers only. A child of fork() begins with an
// empty pool.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#if !defined(__SSE__)
#include <cfenv>
#endif

#include "../../core/macros.h"

KERNELS_SHARED_BEGIN
namespace host_threads {  // which the namespaces of the instruction sets do not have: in `detail` it would be theirs

// A call, on its caller's stack.
struct Job {
  void (*run)(const void* f, int part);
  const void* f;
  int parts;
  // The caller's rounding mode and treatment of denormals: a part has the same bits on every thread.
#if defined(__SSE__)
  unsigned rounding;
#else
  std::fenv_t rounding;
#endif
  std::atomic<int> next;  // the first part that has not been begun
};

struct alignas(64) Worker {
  std::atomic<const Job*> owner{nullptr};  // the call for which it works, until that returns
  std::atomic<Job*> job{nullptr};          // that call's job for it; taken: begun; null: none, or done
  std::atomic<int> sleepers{0};            // how many may sleep on it: the worker, or the caller that waits for it
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
  pthread_t thread{};
};

struct Pool {
  static constexpr int kMost = 511;
  std::atomic<int> started{0};
  std::atomic<bool> growing{false}, closed{false};
  std::atomic<int> cpus{0};  // 0: not known yet, and the pool has never been used
  Job taken{};
  Worker workers[kMost];
};

KERNELS_OF_THIS_LIBRARY inline Pool pool;

}  // namespace host_threads
KERNELS_SHARED_END

KERNELS_BEGIN
namespace detail {
namespace host {

using host_threads::Job;
using host_threads::pool;
using host_threads::Pool;
using host_threads::Worker;

// How long a thread spins before it sleeps: about the time that it takes to wake one. Of that, 12 to 24 microseconds
// are the caller's, the rest passes until the thread runs (two cores of a virtual machine). So spinning never costs
// more than twice the optimum.
constexpr int64_t kSpinNanoseconds = 50000;

inline int64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Waits until done(); wake() must follow the change. With more threads than CPUs it does not spin, which would keep
// others from working.
template <class Done>
void wait(Worker& worker, const Done& done) {
  if (pool.started.load(std::memory_order_relaxed) < pool.cpus.load(std::memory_order_relaxed)) {
    const int64_t end = nanoseconds() + kSpinNanoseconds;
    do {
      for (int i = 0; i < 32; ++i) {
        if (done()) return;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
      }
    } while (nanoseconds() < end);
  }
  pthread_mutex_lock(&worker.mutex);
  ++worker.sleepers;
  while (!done()) pthread_cond_wait(&worker.changed, &worker.mutex);
  --worker.sleepers;
  pthread_mutex_unlock(&worker.mutex);
}

// Call after a change that done() sees. Either the waiting thread sees the change, or its number of sleepers is seen
// here.
inline void wake(Worker& worker) {
  if (worker.sleepers == 0) return;
  pthread_mutex_lock(&worker.mutex);
  pthread_cond_broadcast(&worker.changed);
  pthread_mutex_unlock(&worker.mutex);
}

inline void run_parts(Job& job) {
  for (int i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.parts;) job.run(job.f, i);
}

// The main function of a pool thread.
inline void* work(void* of_worker) {
  Worker& worker = *static_cast<Worker*>(of_worker);
  for (;;) {
    wait(worker, [&worker] { return worker.job != nullptr || pool.closed; });
    Job* job = worker.job;
    if (job == nullptr && pool.closed) return nullptr;
    if (job == nullptr || !worker.job.compare_exchange_strong(job, &pool.taken)) continue;  // the caller took it back
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(job->rounding);
#else
    std::fesetenv(&job->rounding);
#endif
    run_parts(*job);
    worker.job = nullptr;
    wake(worker);
  }
}

// Runs when the program ends or the library is unloaded.
inline void close_pool() {
  while (pool.growing.exchange(true)) sched_yield();  // for good
  pool.closed = true;
  for (int i = 0; i < pool.started; ++i) {
    Worker& worker = pool.workers[i];
    wake(worker);
    if (!pthread_equal(worker.thread, pthread_self())) pthread_join(worker.thread, nullptr);
  }
}

// Runs in a child of fork(), which has none of the threads.
inline void empty_pool() {
  pool.started = 0;
  pool.growing = false;
}

// Starts threads for a call, which owns them and whose job they already have; returns the number of threads.
inline int grow_pool(Job& job, int missing) {
  int started = pool.started;
  if (pool.growing.exchange(true)) return started;
  if (pool.cpus == 0 && !pool.closed) {
    if (pthread_atfork(nullptr, nullptr, empty_pool) != 0 || std::atexit(close_pool) != 0) pool.closed = true;
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    pool.cpus = cpus > 1 ? int(cpus < Pool::kMost ? cpus : Pool::kMost) : 1;
  }
  int most = (job.parts > pool.cpus ? job.parts : pool.cpus.load()) - 1;
  if (most > Pool::kMost) most = Pool::kMost;
  // Signals are handled by the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (started = pool.started; missing > 0 && started < most && !pool.closed; --missing) {
    Worker& worker = pool.workers[started];
    worker.owner = &job, worker.job = &job, worker.sleepers = 0;
    worker.mutex = PTHREAD_MUTEX_INITIALIZER, worker.changed = PTHREAD_COND_INITIALIZER;
    if (pthread_create(&worker.thread, nullptr, work, &worker) != 0) break;
    pool.started = ++started;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pool.growing = false;
  return started;
}

inline void run_on_pool(Job& job) {
#if defined(__SSE__)
  job.rounding = __builtin_ia32_stmxcsr();
#else
  std::fegetenv(&job.rounding);
#endif
  int missing = job.parts - 1, end = 0;
  for (const int started = pool.started; missing > 0 && end < started; ++end) {
    Worker& worker = pool.workers[end];
    const Job* free = nullptr;
    if (worker.owner.load(std::memory_order_relaxed) != nullptr || !worker.owner.compare_exchange_strong(free, &job))
      continue;
    worker.job = &job;
    wake(worker);
    --missing;
  }
  if (missing > 0) end = grow_pool(job, missing);
  run_parts(job);
  for (int i = 0; i < end; ++i) {
    Worker& worker = pool.workers[i];
    if (worker.owner.load(std::memory_order_relaxed) != &job) continue;
    Job* not_begun = &job;
    if (!worker.job.compare_exchange_strong(not_begun, nullptr))
      wait(worker, [&worker] { return worker.job == nullptr; });
    worker.owner = nullptr;
  }
}
template <class F>
void run_on_pool(int parts, const F& f) {
  Job job{[](const void* call, int part) { (*static_cast<const F*>(call))(part); }, &f, parts, {}, {0}};
  run_on_pool(job);
}

}  // namespace host
}  // namespace detail
KERNELS_END
