// What the CPU's benchmarks share: memory, random values, times, and what a result must say about the machine.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <kernels/core/dtype.h>
#include <kernels/cpu/exec.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if KERNELS_HAVE_ONEDNN
#include <dnnl.hpp>
#endif

namespace bench {

namespace k = kernels;

inline int threads() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return k::cpu::Exec().threads();
#endif
}

#define KERNELS_BENCH_STRING2(name) #name
#define KERNELS_BENCH_STRING(name) KERNELS_BENCH_STRING2(name)

inline std::string cpu_name() {
  std::ifstream facts("/proc/cpuinfo");
  for (std::string line; std::getline(facts, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(": ") + 2);
  }
  return "unknown";
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

template <class T>
T* allocate(size_t bytes) {
  static std::vector<std::unique_ptr<void, Free>> all;
  all.emplace_back(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(all.back().get(), 1, bytes);
  return static_cast<T*>(all.back().get());
}

template <class T>
void fill(void* to, size_t count, float mean, float deviation) {
  uint64_t state = 0;
  for (size_t i = 0; i < count; ++i) {
    // Roughly normal: the sum of the four 16-bit parts of a random number.
    uint64_t bits = state += 0x9e3779b97f4a7c15ull;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    float sum = -2.f;
    for (int part = 0; part < 4; ++part) sum += float(bits >> 16 * part & 0xffff) / 65536.f;
    static_cast<T*>(to)[i] = k::convert<T>(mean + deviation * 1.7320508f * sum);
  }
}

inline double seconds(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Contender {
  std::string who;
  std::function<void()> call;
  std::vector<double> times;
};

// Ratios are taken within a round, when the memory was as fast for the one as for the other.
inline double ratio(const Contender& a, const Contender& b) {
  std::vector<double> ratios;
  for (size_t round = 0; round < a.times.size(); ++round) ratios.push_back(a.times[round] / b.times[round]);
  return median(ratios);
}

// The machine and what the program was compiled with.
inline void add_context() {
  benchmark::AddCustomContext("cpu", cpu_name());
  benchmark::AddCustomContext("isa", KERNELS_BENCH_STRING(KERNELS_ISA_NAME));
  benchmark::AddCustomContext("compiler", __VERSION__);
  benchmark::AddCustomContext("threads", std::to_string(threads()));
#if KERNELS_HAVE_ONEDNN
  const dnnl_version_t* v = dnnl_version();
  benchmark::AddCustomContext(
      "onednn", std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch));
#endif
}

}  // namespace bench
