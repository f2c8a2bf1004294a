// Measuring on the GPU: random buffers rotated beyond the L2 cache, CUDA-graph replay, medians, the copy kernel that
// rows are held against, the read kernel for what is read once, and what the cases of a benchmark share.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <kernels/core/dtype.h>
#include <kernels/core/quant.h>

#define BENCH_CHECK(call)                                                                          \
  do {                                                                                             \
    const cudaError_t bench_error = (call);                                                        \
    if (bench_error != cudaSuccess) {                                                              \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(bench_error));    \
      std::exit(1);                                                                                \
    }                                                                                              \
  } while (false)

namespace bench {

// Buffers of this many times the cache in all: no replay finds its input there.
constexpr double kRotation = 4.0;

inline size_t l2_bytes() {
  int device = 0, bytes = 0;
  BENCH_CHECK(cudaGetDevice(&device));
  BENCH_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device));
  return size_t(bytes);
}

__device__ inline uint32_t hash(uint64_t x) {
  x ^= x >> 33; x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ull;
  return uint32_t(x >> 32);
}

// Roughly normal, standard deviation 1: the sum of four uniforms. A bool is true seven times in eight, integers are
// any.
template <class T>
__global__ void fill_random(T* p, size_t n, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    float sum = 0.f;
    for (int k = 0; k < 4; ++k) sum += float(hash((i * 4 + k) ^ (seed << 40))) * (1.f / 4294967296.f) - 0.5f;
    if constexpr (std::is_same<T, bool>::value) p[i] = sum > -0.664f;
    else if constexpr (std::is_integral<T>::value) p[i] = T(hash(i ^ (seed << 40)));
    else p[i] = T(sum * 1.7320508f);
  }
}

template <class T>
void fill(T* p, size_t n, uint64_t seed) {
  fill_random<<<1024, 256>>>(p, n, seed);
  BENCH_CHECK(cudaGetLastError());
}

// One large allocation from which each case takes its rotating buffers.
class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes) { BENCH_CHECK(cudaMalloc(&base_, bytes)); }
  ~Arena() { cudaFree(base_); }
  Arena(const Arena&) = delete;

  void reset() { used_ = 0; }
  size_t left() const { return bytes_ - used_; }

  template <class T>
  T* reserve(size_t count) {
    const size_t bytes = (count * sizeof(T) + 255) / 256 * 256;
    if (used_ + bytes > bytes_) {
      std::fprintf(stderr, "the benchmark's memory (%zu bytes) is too small\n", bytes_);
      std::exit(1);
    }
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += bytes;
    return p;
  }

  template <class T>
  T* take(size_t count, uint64_t seed) {
    T* p = reserve<T>(count);
    fill(p, count, seed);
    return p;
  }

 private:
  char* base_ = nullptr;
  size_t bytes_, used_ = 0;
};

// 0 to count - 1 in any order.
inline std::vector<int32_t> shuffled(size_t count) {
  std::vector<int32_t> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = int32_t(i);
  uint64_t x = 1;
  for (size_t i = count; i-- > 1;)
    x = x * 6364136223846793005u + 1442695040888963407u, std::swap(all[i], all[(x >> 33) % (i + 1)]);
  return all;
}

// How many buffer sets of `bytes` each keep every replay out of the cache.
inline int sets_for(double bytes) {
  return int(std::min(1024.0, std::max(1.0, std::ceil(kRotation * double(l2_bytes()) / bytes))));
}

// How many calls of `bytes` each make a replay of some 2 ms at 4 TB/s: at least 4, at most 20.
inline int calls_for(double bytes) { return int(std::min(20.0, std::max(4.0, 8e9 / bytes))); }

// The clock of the multiprocessors at this moment, in MHz, from the driver's management library; 0 where it does not
// say.
inline double clock_mhz() {
  struct Driver {
    void* device = nullptr;
    int (*clock)(void*, int, unsigned*) = nullptr;
    Driver() {
      void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
      if (library == nullptr) return;
      const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
      const auto find =
          reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
      int current = 0;
      char bus[32] = "";
      BENCH_CHECK(cudaGetDevice(&current));
      BENCH_CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), current));
      if (init == nullptr || find == nullptr || init() != 0 || find(bus, &device) != 0) return;
      clock = reinterpret_cast<int (*)(void*, int, unsigned*)>(dlsym(library, "nvmlDeviceGetClockInfo"));
    }
  };
  static const Driver driver;
  constexpr int kMultiprocessors = 1;  // NVML_CLOCK_SM
  unsigned mhz = 0;
  return driver.clock != nullptr && driver.clock(driver.device, kMultiprocessors, &mhz) == 0 ? double(mhz) : 0.0;
}

// Median microseconds of one call, and how far from it the replays lie: the median distance, over the median. clock:
// the median of those that were sampled while the replays ran, 0 if unknown; dropped: replays that do not count, as the
// clock was below kHeldBack of that.
struct Timing {
  double us, spread, clock = 0;
  int dropped = 0;
  Timing(double median, double distance = 0) : us(median), spread(distance) {}
  operator double() const { return us; }
};
constexpr double kHeldBack = 0.97;
inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}
// What every case reports.
inline void put(benchmark::State& state, const Timing& time) {
  for (auto _ : state) state.SetIterationTime(time.us * 1e-6);
  if (time.spread > 0) state.counters["spread"] = time.spread;
  if (time.clock > 0) state.counters["sm_mhz"] = time.clock, state.counters["dropped"] = time.dropped;
}

// `call(stream, i)` for i = 0 .. sets - 1 is captured into a graph, which is replayed.
// The graph holds at least `calls` calls, so that its launch is not what is timed.
//
// pauses: what draws more power than the GPU may, products of many tokens, would be measured at whatever clock is left
// (bench_matmul on one H200, CUDA 13.0, 2026-11: bfloat16, 4096^3, 183 to 209 us). So behind each replay, and one ahead
// of it that does not count, the GPU rests.
inline Timing time_us(int sets, const std::function<void(cudaStream_t, int)>& call, int calls = 20, int replays = 15,
                      bool pauses = false) {
  cudaStream_t stream;
  BENCH_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  BENCH_CHECK(cudaDeviceSynchronize());
  call(stream, 0);
  BENCH_CHECK(cudaStreamSynchronize(stream));
  constexpr int kWarmups = 2;  // replays that do not count
  const int rounds = (calls + sets - 1) / sets;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  BENCH_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < sets; ++i) call(stream, i);
  }
  BENCH_CHECK(cudaStreamEndCapture(stream, &graph));
  BENCH_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<cudaEvent_t> events(replays + kWarmups + 1);
  for (cudaEvent_t& event : events) BENCH_CHECK(cudaEventCreate(&event));
  const auto replay = [&](cudaEvent_t end) {
    BENCH_CHECK(cudaGraphLaunch(exec, stream));
    BENCH_CHECK(cudaEventRecord(end, stream));
  };
  const auto elapsed = [&](size_t i) {
    float ms = 0;
    BENCH_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
    return ms * 1e3;
  };
  // Without pauses all replays are queued at once: between two events lies one graph, and no wait for the host. The
  // clock of each is asked for as it begins.
  std::vector<double> clocks, all;
  if (!pauses) {
    BENCH_CHECK(cudaEventRecord(events[0], stream));
    for (size_t i = 1; i < events.size(); ++i) replay(events[i]);
  }
  for (size_t i = kWarmups; i + 1 < events.size(); ++i) {
    if (pauses) replay(events[i]), replay(events[i + 1]);
    BENCH_CHECK(cudaEventSynchronize(events[i]));
    clocks.push_back(clock_mhz());
    BENCH_CHECK(cudaEventSynchronize(events[i + 1]));
    all.push_back(elapsed(i));
    if (pauses) std::this_thread::sleep_for(std::chrono::microseconds(int64_t(8 * all.back())));
  }
  const double clock = median(clocks);
  std::vector<double> times;
  for (size_t i = 0; i < clocks.size(); ++i) {
    if (clocks[i] >= kHeldBack * clock) times.push_back(all[i] / (rounds * sets));
  }
  for (cudaEvent_t event : events) BENCH_CHECK(cudaEventDestroy(event));
  BENCH_CHECK(cudaGraphExecDestroy(exec));
  BENCH_CHECK(cudaGraphDestroy(graph));
  BENCH_CHECK(cudaStreamDestroy(stream));
  Timing timing(median(times));
  for (double& t : times) t = std::fabs(t - timing.us) / timing.us;
  timing.spread = median(times), timing.clock = clock, timing.dropped = int(clocks.size() - times.size());
  return timing;
}

// The yardstick: copies `n` units of 16 bytes, kUnroll of them per thread in flight.
template <int kUnroll>
__global__ void __launch_bounds__(256) copy_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, size_t n) {
  const size_t first = size_t(blockIdx.x) * blockDim.x * kUnroll + threadIdx.x;
  uint4 values[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const size_t i = first + size_t(k) * blockDim.x;
    if (i < n) values[k] = __ldcs(from + i);
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const size_t i = first + size_t(k) * blockDim.x;
    if (i < n) __stcs(to + i, values[k]);
  }
}

template <int kUnroll>
void copy(cudaStream_t stream, const void* from, void* to, size_t bytes) {
  const size_t n = bytes / 16;
  const size_t per_block = 256 * size_t(kUnroll);
  copy_kernel<kUnroll><<<unsigned((n + per_block - 1) / per_block), 256, 0, stream>>>(
      static_cast<const uint4*>(from), static_cast<uint4*>(to), n);
}

// The best of three unrollings: what a kernel that reads and writes these buffers once can hope for.
inline Timing copy_us(int sets, const std::function<const void*(int)>& from, const std::function<void*(int)>& to,
                      size_t bytes, int calls = 20) {
  const Timing one = time_us(sets, [&](cudaStream_t s, int i) { copy<1>(s, from(i), to(i), bytes); }, calls);
  const Timing two = time_us(sets, [&](cudaStream_t s, int i) { copy<2>(s, from(i), to(i), bytes); }, calls);
  const Timing four = time_us(sets, [&](cudaStream_t s, int i) { copy<4>(s, from(i), to(i), bytes); }, calls);
  return std::min(one, std::min(two, four));
}

// The other yardstick: reads `n` units of 16 bytes and keeps nothing of them.
template <int kUnroll>
__global__ void __launch_bounds__(256) read_kernel(const uint4* from, size_t n, unsigned* never) {
  const size_t first = size_t(blockIdx.x) * blockDim.x * kUnroll + threadIdx.x;
  uint4 values[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * blockDim.x < n) values[i] = __ldcs(from + first + i * blockDim.x);
  }
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  if (sum == 0x12345678u) *never = sum;
}

// The best of four unrollings.
inline Timing read_us(int sets, const std::function<const void*(int)>& from, size_t bytes, int calls = 20) {
  static unsigned* never = nullptr;
  if (never == nullptr) BENCH_CHECK(cudaMalloc(&never, 4));
  const size_t n = bytes / 16;
  const auto run = [&](auto unroll) {
    constexpr int kUnroll = decltype(unroll)::value;
    return time_us(
        sets,
        [&](cudaStream_t s, int i) {
          read_kernel<kUnroll><<<unsigned((n + 256 * kUnroll - 1) / (256 * kUnroll)), 256, 0, s>>>(
              static_cast<const uint4*>(from(i)), n, never);
        },
        calls);
  };
  return std::min({run(std::integral_constant<int, 1>()), run(std::integral_constant<int, 2>()),
                   run(std::integral_constant<int, 4>()), run(std::integral_constant<int, 8>())});
}

template <class T> constexpr const char* type_name = "?";
template <> constexpr const char* type_name<float> = "fp32";
template <> constexpr const char* type_name<kernels::half> = "fp16";
template <> constexpr const char* type_name<kernels::bfloat16> = "bf16";
template <> constexpr const char* type_name<kernels::float8_e4m3> = "fp8";
template <> constexpr const char* type_name<int8_t> = "int8";
template <> constexpr const char* type_name<kernels::Int4> = "int4";

// What all cases of a program take their buffers from.
inline Arena& arena() {
  static Arena memory(size_t(18) << 30);
  return memory;
}

// One op at one shape, with rotating sets of buffers, held against a yardstick that is measured on them. What is timed
// is named  op/type/shape/who.
class CaseBase : public std::enable_shared_from_this<CaseBase> {
 public:
  virtual ~CaseBase() = default;

 protected:
  // A call must move `bytes`. `share` is what the counter of the yardstick's share of the time is called.
  CaseBase(const std::string& op, const std::string& type, const std::string& shape, double bytes, const char* share)
      : bytes_(bytes), sets_(sets_for(bytes)), name_(op + "/" + type + "/" + shape + "/"), share_(share) {
    arena().reset();
  }

  virtual Timing measure_yardstick() const = 0;

  // Memory is set aside now and filled when the case runs.
  template <class T>
  T* buffer(size_t count) {
    T* p = arena().reserve<T>(count);
    fills_.push_back([p, count, seed = fills_.size() + 1] { fill(p, count, seed); });
    return p;
  }

  template <class Body>
  void add(const std::string& who, Body body) {
    benchmark::RegisterBenchmark((name_ + who).c_str(), [self = shared_from_this(), body](benchmark::State& state) {
      self->prepare();
      body(state);
    })->Iterations(1)->UseManualTime()->Unit(benchmark::kMicrosecond);
  }

  void report(benchmark::State& state, const Timing& time) const {
    put(state, time);
    state.counters["GB/s"] = bytes_ / time.us * 1e-3;
    state.counters[share_] = yardstick_.us / time.us;
  }

  double bytes_;
  int sets_;
  Timing yardstick_ = 0;

 private:
  // Cases share the memory: whichever runs fills it.
  void prepare() {
    static const CaseBase* current = nullptr;
    if (current == this) return;
    current = this;
    for (const auto& fill : fills_) fill();
    yardstick_ = measure_yardstick();
  }

  std::string name_;
  const char* share_;
  std::vector<std::function<void()>> fills_;
};

// The main function, once the cases are registered. libraries: names and versions of what takes part.
inline int run(int argc, char** argv, const std::vector<std::pair<std::string, std::string>>& libraries) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  int device = 0, driver = 0, runtime = 0;
  cudaDeviceProp properties;
  BENCH_CHECK(cudaGetDevice(&device));
  BENCH_CHECK(cudaGetDeviceProperties(&properties, device));
  BENCH_CHECK(cudaDriverGetVersion(&driver));
  BENCH_CHECK(cudaRuntimeGetVersion(&runtime));
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("cuda", version(runtime) + ", driver for " + version(driver));
  for (const auto& library : libraries) benchmark::AddCustomContext(library.first, library.second);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace bench
