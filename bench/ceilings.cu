// What this GPU can do at most, measured first: a copy and a read of 1 GiB, the fastest product of cuBLASLt, and the
// launch of an empty kernel. What is timed is named  ceiling/<copy, read, matrix or launch>/<how much>/<who>; the best
// one of each is the machine's.
#include "support/blas.cuh"

namespace {

constexpr size_t kBytes = size_t(1) << 30;
constexpr int kSets = 4;

__global__ void empty_kernel() {}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(("ceiling/" + name).c_str(), body)
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

std::vector<char*> blocks() {
  bench::arena().reset();
  std::vector<char*> all;
  for (int i = 0; i < kSets; ++i)
    all.push_back(reinterpret_cast<char*>(bench::arena().take<float>(kBytes / 4, uint64_t(i) + 1)));
  return all;
}

template <int kUnroll>
void copies() {
  add("copy/1GiB/" + std::to_string(16 * kUnroll) + " bytes a thread", [](benchmark::State& state) {
    const auto all = blocks();
    const auto run = [&](cudaStream_t s, int i) {
      bench::copy<kUnroll>(s, all[size_t(i)], all[size_t(i + 1) % kSets], kBytes);
    };
    const bench::Timing time = bench::time_us(kSets, run, kSets);
    bench::put(state, time);
    state.counters["GB/s"] = 2e-3 * double(kBytes) / time.us;
  });
}

template <class T>
void products(int64_t n) {
  add(std::string(sizeof(T) == 2 ? "matrix" : "matrix_fp32") + "/" + bench::type_name<T> + " " + std::to_string(n) +
          "x" + std::to_string(n) + "x" + std::to_string(n) + "/cublaslt",
      [n](benchmark::State& state) {
        bench::arena().reset();
        const size_t count = size_t(n * n);
        T *x = bench::arena().take<T>(count, 1), *w = bench::arena().take<T>(count, 2),
          *y = bench::arena().reserve<T>(count);
        const bench::CublasLt<T> lt(n, n, n);
        bench::Timing best = HUGE_VAL;
        for (int choice = 0; choice < lt.choices(); ++choice) {
          const bench::Timing time = bench::time_us(
              1, [&](cudaStream_t s, int) { lt(s, choice, x, w, y); }, 4, 7);
          if (time.us < best.us) best = time;
        }
        bench::put(state, best);
        state.counters["TFLOP/s"] = 2e-6 * double(n) * double(n) * double(n) / best.us;
      });
}

}  // namespace

int main(int argc, char** argv) {
  copies<1>(), copies<2>(), copies<4>();
  add("read/1GiB/read", [](benchmark::State& state) {
    const auto all = blocks();
    const bench::Timing time = bench::read_us(
        kSets, [&](int i) { return static_cast<const void*>(all[size_t(i)]); }, kBytes, kSets);
    bench::put(state, time);
    state.counters["GB/s"] = 1e-3 * double(kBytes) / time.us;
  });
  for (const int64_t n : {4096, 8192}) products<kernels::bfloat16>(n), products<kernels::half>(n);
  products<float>(4096);
  add("launch/in a graph/empty", [](benchmark::State& state) {
    bench::put(state, bench::time_us(1, [](cudaStream_t s, int) { empty_kernel<<<1, 32, 0, s>>>(); }, 1000));
  });
  return bench::run(argc, argv, {{"cublas", std::to_string(cublasLtGetVersion())}});
}
