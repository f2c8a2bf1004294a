// A batch whose sequences begin with the same keys (a system prompt, say) reads these once: decoding of 32 sequences at
// a time as if they were queries of one, decoding of each sequence's own rest, and one merge of the two. Checks the
// result against decoding with the prefix copied into every sequence, then times both. shared_prefix_cpu.cpp does the
// same without a GPU.
#include <kernels/attention.cuh>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace k = kernels;

constexpr int64_t kBatch = 64, kHeads = 32, kKvHeads = 8, kDim = 128, kWidth = kHeads * kDim,
                  kKvWidth = kKvHeads * kDim;
constexpr int64_t kPrefix = 8000, kRest = 200, kWhole = kPrefix + kRest, kTogether = 32;

[[noreturn]] void quit(int code, const char* what, const char* why) {
  std::fprintf(stderr, "shared_prefix: %s: %s\n", what, why);
  std::exit(code);
}
void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) quit(1, what, cudaGetErrorString(error));
}
void must(const k::Status& status, const char* what) {
  if (!status) quit(1, what, status.reason());
}

__global__ void fill(k::half* p, int64_t count, uint64_t first) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  uint64_t x = (first + i + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  p[i] = k::convert<k::half>(float(x >> 40) * 0x1p-23f - 1.f);
}
// Device memory for this program's life.
template <class T>
T* memory(int64_t count) {
  void* p = nullptr;
  must(cudaMalloc(&p, size_t(count) * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(p);
}
k::half* numbers(int64_t count) {
  static uint64_t first = 0;
  k::half* const p = memory<k::half>(count);
  fill<<<unsigned((count + 255) / 256), 256>>>(p, count, first);
  must(cudaGetLastError(), "fill");
  first += uint64_t(count);
  return p;
}

// The median time of a call in microseconds; the first ones do not count.
template <class F>
double microseconds(cudaStream_t stream, const F& call) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "cudaEventCreate");
  must(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> ms(15);
  for (int sample = -3; sample < 15; ++sample) {
    must(cudaEventRecord(begin, stream), "cudaEventRecord");
    call();
    must(cudaEventRecord(end, stream), "cudaEventRecord");
    must(cudaEventSynchronize(end), "cudaEventSynchronize");
    if (sample >= 0) must(cudaEventElapsedTime(&ms[size_t(sample)], begin, end), "cudaEventElapsedTime");
  }
  std::nth_element(ms.begin(), ms.begin() + 7, ms.end());
  return ms[7] * 1e3;
}

// The keys, or the values, of sequences that each have a copy of the prefix.
k::half* copies(const k::half* prefix, const k::half* rest) {
  k::half* const all = memory<k::half>(kBatch * kWhole * kKvWidth);
  for (int64_t b = 0; b < kBatch; ++b) {
    k::half* const to = all + b * kWhole * kKvWidth;
    must(cudaMemcpy(to, prefix, size_t(kPrefix * kKvWidth) * sizeof(k::half), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    must(cudaMemcpy(to + kPrefix * kKvWidth, rest + b * kRest * kKvWidth, size_t(kRest * kKvWidth) * sizeof(k::half),
                    cudaMemcpyDeviceToDevice),
         "cudaMemcpy");
  }
  return all;
}

double largest_difference(const float* one, const float* other) {
  std::vector<float> a(size_t(kBatch * kWidth)), b(a.size());
  must(cudaMemcpy(a.data(), one, a.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  must(cudaMemcpy(b.data(), other, b.size() * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::fabs(double(a[i]) - double(b[i])));
  return most;
}

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) quit(77, "skipped", "no CUDA device");
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "cudaStreamCreate");

  k::half *const q = numbers(kBatch * kWidth), *const prefix_keys = numbers(kPrefix * kKvWidth),
                 *const prefix_values = numbers(kPrefix * kKvWidth);
  k::half *const rest_keys = numbers(kBatch * kRest * kKvWidth), *const rest_values =
                                                                     numbers(kBatch * kRest * kKvWidth);
  const auto queries = k::load(static_cast<const k::half*>(q), kWidth);

  // Sequences of the prefix's part are 32 of the batch each, and all of them have the same keys: a block stride of 0.
  const k::AttentionShape shape{kBatch, 1, kHeads, kKvHeads, kDim},
      as_few{kBatch / kTogether, kTogether, kHeads, kKvHeads, kDim};
  const auto shared = [](const k::half* p) { return k::strided(p, 0, kKvWidth, kDim); };
  const auto prefix = k::dense_kv(shared(prefix_keys), shared(prefix_values), kPrefix);
  const auto own = [](const k::half* keys, const k::half* values, int64_t positions) {
    return k::dense_kv(k::nhd(keys, positions, kKvHeads, kDim), k::nhd(values, positions, kKvHeads, kDim), positions);
  };
  const size_t bytes = std::max(k::decode_workspace_bytes(stream, shape), k::decode_workspace_bytes(stream, as_few));
  const k::Workspace workspace{memory<char>(int64_t(bytes)), bytes};

  // Rows of the prefix's part, then rows of the rest's: the outputs, and the logsumexps that say how much each weighs.
  float *const parts = memory<float>(2 * kBatch * kWidth), *const lse = memory<float>(2 * kBatch * kHeads),
               *const merged = memory<float>(kBatch * kWidth);
  const auto cascade = [&] {
    must(k::decode<kDim>(stream, queries, prefix, k::store(parts, kWidth), as_few, k::no_mask(), workspace,
                         k::Attention{}.lse(lse)),
         "prefix");
    must(k::decode<kDim>(stream, queries, own(rest_keys, rest_values, kRest), k::store(parts + kBatch * kWidth, kWidth),
                         shape, k::no_mask(), workspace, k::Attention{}.lse(lse + kBatch * kHeads)),
         "rest");
    must(k::merge_states(stream, k::load(static_cast<const float*>(parts), kWidth),
                         k::load(static_cast<const float*>(lse), kHeads), k::store(merged, kWidth),
                         {2, kBatch, kHeads, kDim}),
         "merge_states");
  };

  // The same with a copy of the prefix in every sequence.
  k::half *const keys = copies(prefix_keys, rest_keys), *const values = copies(prefix_values, rest_values);
  float* const plain = memory<float>(kBatch * kWidth);
  const auto copied = [&] {
    must(k::decode<kDim>(stream, queries, own(keys, values, kWhole), k::store(plain, kWidth), shape, k::no_mask(),
                         workspace),
         "decode");
  };

  const double cascade_us = microseconds(stream, cascade), copied_us = microseconds(stream, copied);
  const double most = largest_difference(merged, plain);
  std::printf("%d sequences, %d keys in common and %d of their own: %.1f us; %.1f us with copies of the prefix\n",
              int(kBatch), int(kPrefix), int(kRest), cascade_us, copied_us);
  if (!(most < 1e-5)) {
    std::fprintf(stderr, "shared_prefix: results differ by %g\n", most);
    return 1;
  }
  return 0;
}
