// What a call costs the host: microseconds until it returns, of calls one after the other whose kernels are known
// already. What is timed is named  host/<op>/<stream or exec>: with a bare stream, and with an Exec that was made
// before. "empty" is a launch of an empty kernel with as many bytes of parameters: what the runtime takes.
#include <kernels/attention.cuh>
#include <kernels/matmul.cuh>
#include <kernels/softmax.cuh>

#include <chrono>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

struct Parameters {
  char bytes[256];
};
__global__ void empty_kernel(const __grid_constant__ Parameters) {}

// The median over batches. The stream's queue never fills up: launches would wait for the kernels.
template <class Call>
double host_us(cudaStream_t stream, const Call& call) {
  constexpr int kBatch = 64, kBatches = 301;
  const auto batch = [&] {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kBatch; ++i) call();
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
    BENCH_CHECK(cudaStreamSynchronize(stream));
    return us.count() / kBatch;
  };
  std::vector<double> times;
  for (int i = 0; i < 10; ++i) batch();
  for (int i = 0; i < kBatches; ++i) times.push_back(batch());
  std::nth_element(times.begin(), times.begin() + kBatches / 2, times.end());
  return times[kBatches / 2];
}

template <class Call>
void add(const std::string& name, const Call& call) {
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
    cudaStream_t stream;
    BENCH_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const double us = host_us(stream, call(stream));
    BENCH_CHECK(cudaStreamDestroy(stream));
    for (auto _ : state) state.SetIterationTime(us * 1e-6);
  })->Iterations(1)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

// call(exec or stream)
template <class Call>
void add_both(const std::string& op, const Call& call) {
  const auto must = [](const k::Status& status) {
    if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
  };
  add("host/" + op + "/stream", [=](cudaStream_t stream) { return [=] { must(call(stream)); }; });
  add("host/" + op + "/exec", [=](cudaStream_t stream) { return [=, ex = k::Exec(stream)] { must(call(ex)); }; });
  add("host/" + op + "/programmatic",
      [=](cudaStream_t stream) { return [=, ex = k::Exec(stream).programmatic(true)] { must(call(ex)); }; });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t width = 4096, dim = 128, heads = width / dim, length = 256;
  const auto take = [](int64_t count) { return bench::arena().take<k::half>(size_t(count), 1); };
  const k::half *const x = take(512 * width), *const w = take(width * width);
  k::half* const y = take(512 * width);
  add("host/empty/stream",
      [](cudaStream_t stream) { return [=] { empty_kernel<<<1, 32, 0, stream>>>(Parameters{}); }; });
  add_both("softmax_1x4096",
           [=](const k::Exec& ex) { return k::softmax(ex, k::load(x, width), k::store(y, width), 1, width); });
  add_both("softmax_1x131072", [=](const k::Exec& ex) {
    return k::softmax(ex, k::load(x, 32 * width), k::store(y, 32 * width), 1, 32 * width);
  });
  for (const int64_t m : {1, 8, 32, 128}) {
    add_both("matmul_" + std::to_string(m) + "x1024x1024", [=](const k::Exec& ex) {
      return k::matmul(ex, k::load(x, 1024), k::load(w, 1024), k::store(y, 1024), {m, 1024, 1024});
    });
  }
  const auto kv = k::dense_kv(k::nhd(x, length, heads, dim), k::nhd(w, length, heads, dim), length);
  const k::AttentionShape one{1, 1, heads, heads, dim};
  const size_t bytes = k::decode_workspace_bytes(k::Exec{}, one);
  const k::Workspace workspace{bench::arena().reserve<char>(bytes), bytes};
  add_both("decode_1x256", [=](const k::Exec& ex) {
    return k::decode<128>(ex, k::load(x, width), kv, k::store(y, width), one, k::causal(), workspace);
  });
  add_both("prefill_64x256", [=](const k::Exec& ex) {
    return k::attention(ex, k::load(x, width), kv, k::store(y, width), {1, 64, heads, heads, dim}, k::causal());
  });
  return bench::run(argc, argv, {});
}
