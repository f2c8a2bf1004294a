// Attention of many queries: bf16, 16,384 tokens in all, as many heads as make 2,048 columns. What is timed is named
// attention/bf16/d<dim>x<heads>x<length>/<full or causal>/kernels; causal attention counts half of the operations. Cases of 32 heads
// of queries to 8 of keys are named d128x32/8x<length>. bench/attention_peers.py times PyTorch's kernels on the same shapes.
#include <kernels/attention.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

using T = k::bfloat16;
constexpr int64_t kTokens = 16384;

template <class S>
void run(benchmark::State& state, int64_t dim, int64_t heads, int64_t kv_heads, int64_t length, const S& score, double share) {
  const int64_t width = heads * dim, kv_width = kv_heads * dim;
  const int sets = bench::sets_for(double(2 * (width + kv_width) * kTokens) * sizeof(T));
  bench::arena().reset();
  std::vector<T*> q, key, value, o;
  for (int i = 0; i < sets; ++i) {
    q.push_back(bench::arena().take<T>(size_t(kTokens * width), 4 * i + 1));
    key.push_back(bench::arena().take<T>(size_t(kTokens * kv_width), 4 * i + 2));
    value.push_back(bench::arena().take<T>(size_t(kTokens * kv_width), 4 * i + 3));
    o.push_back(bench::arena().reserve<T>(size_t(kTokens * width)));
  }
  const double operations = 4.0 * kTokens * double(length) * double(width) * share;
  const double us = bench::time_us(sets, [&](cudaStream_t stream, int i) {
    const auto tensor = [&](const T* p) { return k::nhd(p, length, kv_heads, dim); };
    const k::Status status = k::attention(stream, k::load(static_cast<const T*>(q[size_t(i)]), width), k::dense_kv(tensor(key[size_t(i)]), tensor(value[size_t(i)]), length),
                                          k::store(o[size_t(i)], width), {kTokens / length, length, heads, kv_heads, dim}, score);
    if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
  }, operations > 1e12 ? 3 : 10, 9);
  for (auto _ : state) state.SetIterationTime(us * 1e-6);
  state.counters["TFLOP/s"] = operations / us * 1e-6;
}

void add(int64_t dim, int64_t heads, int64_t kv_heads) {
  for (const bool causal : {false, true}) {
    for (int64_t length = 512; length <= kTokens; length *= 2) {
      const std::string grouped = heads == kv_heads ? std::to_string(heads) : std::to_string(heads) + "/" + std::to_string(kv_heads);
      const std::string name = "attention/bf16/d" + std::to_string(dim) + "x" + grouped + "x" + std::to_string(length) + (causal ? "/causal" : "/full") + "/kernels";
      benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
        if (causal) run(state, dim, heads, kv_heads, length, k::causal(), 0.5);
        else run(state, dim, heads, kv_heads, length, k::no_mask(), 1);
      })->Iterations(1)->UseManualTime()->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t dim : {64, 128, 256}) add(dim, 2048 / dim, 2048 / dim);
  add(128, 32, 8);
  return bench::run(argc, argv, {});
}
