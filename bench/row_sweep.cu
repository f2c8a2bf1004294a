// Times every policy that can serve a row, to fill in tuning/row.h:
//   row_sweep [softmax|layernorm|rmsnorm|fused] [few|small|large|odd]
#include <cmath>
#include <cstring>

#include <kernels/layernorm.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/softmax.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

struct Candidate {
  k::RowPolicy policy;
  double us;
};

template <class Run>
void sweep(const char* op, int64_t rows, int64_t cols, double bytes, int sets, double copy,
           const std::vector<k::RowPolicy>& policies, Run run) {
  std::vector<Candidate> results;
  for (const k::RowPolicy& policy : policies) {
    if (!run(nullptr, 0, policy)) continue;
    BENCH_CHECK(cudaDeviceSynchronize());
    results.push_back({policy, bench::time_us(
                                   sets, [&](cudaStream_t s, int i) { (void)!run(s, i, policy).ok(); }, 6, 5)});
  }
  const double automatic = results.empty() ? 0 : results[0].us;
  std::sort(results.begin() + (results.empty() ? 0 : 1), results.end(),
            [](const Candidate& a, const Candidate& b) { return a.us < b.us; });
  std::printf("%s %lld x %lld: copy %.2f us %.0f GB/s; auto %.2f us %.1f%%;", op, (long long)rows, (long long)cols,
              copy, bytes / copy / 1e3, automatic, 100 * copy / automatic);
  for (size_t i = 1; i < results.size(); ++i) {
    const k::RowPolicy& p = results[i].policy;
    std::printf(" [%s t%d c%d %.1f%%]", k::to_string(p.residency), p.threads, p.cluster, 100 * copy / results[i].us);
  }
  std::printf("\n");
  std::fflush(stdout);
}

std::vector<k::RowPolicy> candidates(int64_t rows, int64_t cols) {
  using R = k::Residency;
  std::vector<k::RowPolicy> out{{}};
  if (cols <= 1024) {
    for (int lanes = 1; lanes <= 32; lanes *= 2) out.push_back({R::group, lanes});
  }
  for (int cluster : {1, 2, 4, 8, 16}) {
    if (cluster > 1 && (cluster == 16 || cols < 65536) && rows > 200) continue;
    for (int threads : {32, 64, 96, 128, 192, 256, 384, 416, 512, 768, 832, 1024}) {
      const double each = double(cols) / cluster / threads;
      if (each < (rows < 200 ? 3 : 12)) continue;
      if (each <= 32) out.push_back({R::registers, threads, cluster});
      if (each <= 300 && each >= 12) out.push_back({R::streamed, threads, cluster});
      if (each <= 300 && each >= 24 && cols >= 16384) out.push_back({R::shared, threads, cluster});
    }
    if (rows < 200) for (int threads : {128, 256, 512}) out.push_back({R::split, threads, 1});
  }
  return out;
}

template <class T>
void run_case(bench::Arena& arena, const std::string& op, int64_t rows, int64_t cols) {
  arena.reset();
  const double bytes = 2.0 * rows * cols * sizeof(T) * (op == "fused" ? 2 : 1);
  const int sets = bench::sets_for(bytes);
  std::vector<T*> in, out, res;
  for (int i = 0; i < sets; ++i) {
    in.push_back(arena.take<T>(rows * cols, i));
    out.push_back(arena.take<T>(rows * cols, 1000 + i));
    if (op == "fused") res.push_back(arena.take<T>(rows * cols, 2000 + i));
  }
  T* gamma = arena.take<T>(cols, 1);
  T* beta = arena.take<T>(cols, 2);
  float* mean = arena.take<float>(rows, 3);
  float* rstd = arena.take<float>(rows, 4);
  void* space = arena.take<char>(k::row_workspace_bytes(rows < 200 ? rows : 1), 5);
  const size_t space_bytes = rows < 200 ? k::row_workspace_bytes(rows) : 0;
  const double copy =
      (op == "fused" ? 2 : 1) * bench::copy_us(
                                    sets, [&](int i) { return (const void*)in[i]; },
                                    [&](int i) { return (void*)out[i]; }, size_t(rows) * cols * sizeof(T));
  const auto exec = [&](cudaStream_t s) { return k::Exec(s).workspace(space, space_bytes); };
  const auto policies = candidates(rows, cols);
  if (op == "softmax") {
    sweep("softmax", rows, cols, bytes, sets, copy, policies, [&](cudaStream_t s, int i, k::RowPolicy p) {
      return k::softmax(exec(s), k::load(in[i], cols), k::store(out[i], cols), rows, cols, p);
    });
  } else if (op == "layernorm") {
    sweep("layernorm", rows, cols, bytes, sets, copy, policies, [&](cudaStream_t s, int i, k::RowPolicy p) {
      return k::layernorm(exec(s), k::load(in[i], cols), k::affine(gamma, beta) | k::store(out[i], cols), rows, cols,
                          k::LayerNorm{}.mean(mean).rstd(rstd), p);
    });
  } else if (op == "rmsnorm") {
    sweep("rmsnorm", rows, cols, bytes, sets, copy, policies, [&](cudaStream_t s, int i, k::RowPolicy p) {
      return k::rmsnorm(exec(s), k::load(in[i], cols), k::affine(gamma) | k::store(out[i], cols), rows, cols, {}, p);
    });
  } else {
    sweep("fused", rows, cols, bytes, sets, copy, policies, [&](cudaStream_t s, int i, k::RowPolicy p) {
      auto h = k::load(in[i], cols) | k::add(k::row(gamma)) | k::add(k::load(res[i], cols)) | k::tee(res[i], cols);
      return k::layernorm(exec(s), h, k::affine(gamma, beta) | k::store(out[i], cols), rows, cols, {}, p);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string op = argc > 1 ? argv[1] : "softmax";
  bench::Arena arena(size_t(14) << 30);
  if (argc > 2 && !std::strcmp(argv[2], "few")) {
    for (int64_t rows : {1, 16, 128}) for (int64_t cols : {32000, 128256}) run_case<float>(arena, op, rows, cols);
    return 0;
  }
  const std::string part = argc > 2 ? argv[2] : "";
  if (part == "odd") {
    for (int64_t cols : {1023, 1025, 4097, 50257}) run_case<__half>(arena, op, 4096, cols);
    return 0;
  }
  for (int64_t cols :
       {32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768}) {
    if (part == "" || (part == "small") == (cols <= 1536)) run_case<__half>(arena, op, 49152, cols);
  }
  if (part != "small")
    for (int64_t cols : {65536, 131072, 262144}) run_case<__half>(arena, op, 8192 * 65536 / cols, cols);
  return 0;
}
