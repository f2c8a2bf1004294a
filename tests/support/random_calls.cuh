// Random calls: tests that draw whole calls at random, each from a seed of its own, and check them like any other.
//
// KERNELS_RANDOM_CALLS=n in the environment makes n calls in each test, KERNELS_SEED=s begins with seed s instead of 1.
// Without them the calls are the same every time. A failure names its seed: KERNELS_SEED=that KERNELS_RANDOM_CALLS=1
// makes this call alone. If a seed is given, each call is named before it is made, so that one that hangs or ends the
// program is known.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "gpu.cuh"

namespace test {

inline int64_t number_from(const char* variable, int64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text && *text ? std::atoll(text) : otherwise;
}
inline bool seed_is_given() {
  const char* const text = std::getenv("KERNELS_SEED");
  return text && *text;
}
inline uint64_t first_seed() { return uint64_t(number_from("KERNELS_SEED", 1)); }
// How many calls: `usual` ones, fewer where tests are shortened.
inline int64_t number_of_calls(int64_t usual) {
  return std::max<int64_t>(1, number_from("KERNELS_RANDOM_CALLS", (usual + one_of() - 1) / one_of()));
}

// Memory of a workspace, which may be so much that the host keeps no copy: a guarded end on either side.
class Scratch {
 public:
  Scratch(size_t bytes, int fill) : bytes_(bytes) {
    check_cuda(cudaMalloc(&base_, bytes + 2 * kGuard));
    check_cuda(cudaMemset(base_, kMark, kGuard));
    check_cuda(cudaMemset(data(), fill, bytes));
    check_cuda(cudaMemset(data() + bytes, kMark, kGuard));
    check_cuda(cudaStreamSynchronize(nullptr));
  }
  ~Scratch() { cudaFree(base_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  unsigned char* data() const { return base_ + kGuard; }
  size_t bytes() const { return bytes_; }
  bool intact() const {
    unsigned char ends[2 * kGuard];
    check_cuda(cudaMemcpy(ends, base_, kGuard, cudaMemcpyDeviceToHost));
    check_cuda(cudaMemcpy(ends + kGuard, data() + bytes_, kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(ends, ends + 2 * kGuard, [](unsigned char x) { return x == kMark; });
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr int kMark = 0x5a;
  size_t bytes_;
  unsigned char* base_ = nullptr;
};

// draw(seed) gives something with describe(); run(drawn) says what was wrong with it, or "", and does not use Catch's
// macros. side_by_side: several calls at the same time.
template <class Draw, class Run>
void each_random_call(int64_t usual, const Draw& draw, const Run& run, bool side_by_side = false) {
  const uint64_t first = first_seed();
  const bool tells = seed_is_given();
  std::vector<std::string> problems(size_t(number_of_calls(usual)));
  std::atomic<bool> stopped{false};
  std::mutex telling;
  const auto tell = [&](const std::string& text) {
    if (!tells) return;
    const std::lock_guard<std::mutex> lock(telling);
    std::fprintf(stderr, "%s\n", text.c_str());
  };
  const auto make = [&](size_t i) {
    if (stopped) return;
    const auto drawn = draw(first + i);
    const std::string name = "KERNELS_SEED=" + std::to_string(first + i) + ": " + drawn.describe();
    tell(name);
    try {
      problems[i] = run(drawn);
    } catch (const std::exception& error) {
      // After a fault no call on the GPU works: this one, or one that was made at the same time, is at fault.
      stopped = true;
      problems[i] = error.what();
    }
    if (problems[i].empty()) return;
    problems[i] = name + ": " + problems[i];
    tell(problems[i]);
  };
  if (side_by_side) {
    in_parallel(problems.size(), make);
  } else {
    for (size_t i = 0; i < problems.size(); ++i) make(i);
  }
  report(problems);
}

}  // namespace test
