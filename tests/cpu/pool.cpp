// The library's own threads, as code has them that is compiled without OpenMP: this file is, and once more for
// ThreadSanitizer.
#include <kernels/cpu/softmax.h>

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.h"
#include "support/threads.h"

namespace k = kernels;
using k::detail::host::run_on_pool;

namespace {

// How many threads the process has; 0: this system does not say.
int threads_of_process() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
  }
  return 0;
}

// Parts that wait for each other: each has a thread of its own. f runs in each when all have come.
template <class F>
void together(int parts, const F& f) {
  std::atomic<int> here{0};
  run_on_pool(parts, [&](int i) {
    ++here;
    while (here < parts) std::this_thread::yield();
    f(i);
  });
}

// A call of `threads` threads, checked.
bool softmax_is_right(int threads) {
  const int64_t rows = 7, cols = 100;
  const std::vector<float> x(size_t(rows * cols), 1.f);
  std::vector<float> y(x.size(), -1.f);
  const k::Status status =
      k::cpu::softmax(test::on_threads(threads), k::load(x.data(), cols), k::store(y.data(), cols), rows, cols);
  return status.ok() && std::all_of(y.begin(), y.end(), [](float v) { return v == 1.f / 100; });
}

#if !TEST_THREAD_SANITIZER
// How a child ends that does this.
template <class F>
int status_of_child(const F& f) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) f();
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}
#endif

}  // namespace

TEST_CASE("pool: every part runs once, whatever their number") {
  for (int round = 0; round < 50; ++round) {
    for (const int parts : {1, 2, 3, 7, 40}) {
      std::vector<int> runs(static_cast<size_t>(parts));
      run_on_pool(parts, [&](int i) { ++runs[size_t(i)]; });
      CHECK(runs == std::vector<int>(size_t(parts), 1));
    }
  }
}

TEST_CASE("pool: threads stay, and more come only for calls of more parts") {
  if (threads_of_process() == 0) return test::skip("/proc/self/status does not say how many threads there are");
  together(5, [](int) {});
  const int threads = threads_of_process();
  CHECK(threads >= 5);
  for (int i = 0; i < 100; ++i) together(5, [](int) {});
  CHECK(threads_of_process() == threads);
  CHECK(softmax_is_right(4));
  CHECK(threads_of_process() == threads);
}

TEST_CASE("pool: sleeping threads wake up") {
  for (int i = 0; i < 10; ++i) {
    together(4, [](int) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // after which they sleep, and if not, nothing is tested
  }
}

TEST_CASE("pool: calls from many threads at once, and within each other") {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int round = 0; round < 100; ++round) {
        const int outer = 1 + (caller + round) % 5;
        std::vector<std::atomic<int>> runs(size_t(outer) * 3);
        run_on_pool(outer, [&](int i) { run_on_pool(3, [&](int j) { ++runs[size_t(i * 3 + j)]; }); });
        for (const auto& each : runs) wrong += each != 1;
        wrong += !softmax_is_right(outer);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

// Two calls hold as many threads as there may be for calls of so many parts; a third is done while they wait for it.
TEST_CASE("pool: a call does not wait for threads that others have") {
  const int parts = std::max(2, int(std::thread::hardware_concurrency()));
  std::atomic<int> begun{0};
  std::atomic<bool> done{false};
  const auto hold = [&] {
    run_on_pool(parts, [&](int) {
      ++begun;
      while (!done) std::this_thread::yield();
    });
  };
  std::thread first(hold), second(hold);
  while (begun < 2) std::this_thread::yield();
  CHECK(softmax_is_right(parts));
  done = true;
  first.join(), second.join();
  CHECK(begun == 2 * parts);
}

TEST_CASE("pool: signals are left to the program's threads") {
  std::atomic<int> blocked{0};
  const auto blocks = [] {
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    return sigismember(&now, SIGUSR1) == 1;
  };
  together(4, [&](int) { blocked += blocks(); });
  CHECK(blocked == 3);
  CHECK(!blocks());
}

#if defined(__SSE__)
TEST_CASE("pool: every part treats denormals as its caller does") {
  const unsigned usual = __builtin_ia32_stmxcsr();
  for (const unsigned flush : {0u, 0x8040u, 0u}) {
    __builtin_ia32_ldmxcsr(usual | flush);
    std::atomic<int> same{0};
    together(3, [&](int) { same += (__builtin_ia32_stmxcsr() & 0x8040u) == flush; });
    CHECK(same == 3);
  }
  __builtin_ia32_ldmxcsr(usual);
}
#endif

#if !TEST_THREAD_SANITIZER
TEST_CASE("pool: a child of fork() has threads of its own") {
  REQUIRE(softmax_is_right(4));
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      if (!softmax_is_right(3)) std::abort();
    }
  });
  for (int i = 0; i < 5; ++i) {
    CHECK(status_of_child([] {
      together(3, [](int) {});
      _exit(softmax_is_right(4) ? 0 : 1);
    }) == 0);
  }
  stop = true;
  busy.join();
  CHECK(softmax_is_right(4));
}

namespace {

struct CallsAtTheEnd {
  ~CallsAtTheEnd() {
    if (!softmax_is_right(4)) _exit(3);
  }
};

}  // namespace

TEST_CASE("pool: a program ends while it has threads, also from a part and with calls to come") {
  const auto ends_with = [](int status, int code) { return WIFEXITED(status) && WEXITSTATUS(status) == code; };
  CHECK(ends_with(status_of_child([] {
    std::atexit([] {  // runs after the pool has been closed
      if (!softmax_is_right(4)) _exit(3);
    });
    std::exit(softmax_is_right(4) ? 0 : 1);
  }), 0));
  CHECK(ends_with(status_of_child([] {
    static const CallsAtTheEnd last;
    std::exit(softmax_is_right(4) ? 0 : 1);
  }), 0));
  CHECK(ends_with(status_of_child([] {
    together(3, [](int) {});
    run_on_pool(3, [](int i) {
      if (i == 0) std::exit(5);
    });
    _exit(1);
  }), 5));
}
#endif

#if defined(KERNELS_POOL_LIBRARY)
// The library holds the same calls for two instruction sets.
TEST_CASE("pool: a library has one for all its instruction sets, and takes it along when it is unloaded") {
  if (threads_of_process() == 0) return test::skip("/proc/self/status does not say how many threads there are");
  for (int round = 0; round < 3; ++round) {
    const int before = threads_of_process();
    void* const library = dlopen(KERNELS_POOL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    for (const char* name : {"pool_base", "pool_wide", "pool_base"}) {
      void* const symbol = dlsym(library, name);
      REQUIRE(symbol != nullptr);
      int (*call)(int) = nullptr;
      std::memcpy(&call, &symbol, sizeof(call));
      CHECK(call(4) == 0);
      CHECK(threads_of_process() == before + 3);
    }
    CHECK(dlclose(library) == 0);
    CHECK(dlopen(KERNELS_POOL_LIBRARY, RTLD_NOW | RTLD_NOLOAD) == nullptr);
    CHECK(threads_of_process() == before);
  }
  CHECK(softmax_is_right(4));
}
#endif
