// Routing: how long a launch takes that chooses experts, and one that sorts. What is timed is named
//   router/<tokens>x<experts>,<choices>/<who>
// in microseconds of a call within a graph, everything in the cache, as behind the product that makes the logits. who:
// empty, a kernel that does nothing, the yardstick; softmax, as in Qwen; deepseek, with a sigmoid, a bias and 4 of 8
// groups; sort; combine, the weighted sum of the rows of 2048 bfloat16 that experts give, and copy, which copies as
// many rows as it reads.
#include <kernels/elementwise.cuh>
#include <kernels/router.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

__global__ void empty_kernel() {}

void must(const k::Status& status) {
  if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
}

// call(stream) on what start() has made.
template <class Call>
void add(const std::string& name, const Call& call) {
  benchmark::RegisterBenchmark(name.c_str(), [call](benchmark::State& state) {
    bench::put(state, bench::time_us(1, [&](cudaStream_t stream, int) { call(stream); }));
  })->Iterations(1)->UseManualTime()->Unit(benchmark::kMicrosecond);
}

void measure(int64_t tokens, int64_t experts, int64_t top_k) {
  const int64_t choices = tokens * top_k, width = 2048;
  const k::RouterShape shape{tokens, experts, top_k};
  const std::string name =
      "router/" + std::to_string(tokens) + "x" + std::to_string(experts) + "," + std::to_string(top_k) + "/";
  bench::Arena& arena = bench::arena();
  const k::bfloat16* const logits = arena.take<k::bfloat16>(size_t(tokens * experts), 1);
  const float* const bias = arena.take<float>(size_t(experts), 2);
  const k::bfloat16* const rows = arena.take<k::bfloat16>(size_t(choices * width), 3);
  k::bfloat16* const out = arena.reserve<k::bfloat16>(size_t(choices * width));
  const auto numbers = [&](int64_t count) { return arena.reserve<int32_t>(size_t(count)); };
  int32_t* const ids = numbers(choices);
  float* const weights = arena.reserve<float>(size_t(choices));
  const k::ExpertOrder order{numbers(experts + 1), numbers(choices), numbers(choices)};
  const size_t bytes = k::sort_workspace_bytes(shape);
  const k::Workspace workspace{arena.reserve<char>(bytes + 1), bytes};
  const auto in = k::load(logits, experts);
  const auto softmax = k::Router{}.renormalize();
  const auto deepseek =
      k::Router{}.sigmoid().bias(bias).groups(8, 4, k::GroupScore::two_largest).renormalize().scale(2.5f);
  // What the others read.
  must(k::route(nullptr, in, ids, weights, shape, softmax));
  must(k::sort_by_expert(nullptr, ids, order, shape, workspace));
  BENCH_CHECK(cudaDeviceSynchronize());

  add(name + "empty", [](cudaStream_t stream) { empty_kernel<<<1, 32, 0, stream>>>(); });
  add(name + "softmax", [=](cudaStream_t stream) { must(k::route(stream, in, ids, weights, shape, softmax)); });
  // In place of the softmax's choices: of any valid ones the others take as long.
  add(name + "deepseek", [=](cudaStream_t stream) { must(k::route(stream, in, ids, weights, shape, deepseek)); });
  add(name + "sort", [=](cudaStream_t stream) { must(k::sort_by_expert(stream, ids, order, shape, workspace)); });
  add(name + "combine", [=](cudaStream_t stream) {
    must(k::copy(stream, k::combined(k::load(rows, width), order.places, weights, top_k), k::store(out, width), tokens,
                 width));
  });
  add(name + "copy",
      [=](cudaStream_t stream) { must(k::copy(stream, k::load(rows, width), k::store(out, width), choices, width)); });
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t experts : {64, 128, 256}) {
    for (const int64_t tokens : {1, 32, 1024, 8192}) measure(tokens, experts, 8);
  }
  return bench::run(argc, argv, {});
}
