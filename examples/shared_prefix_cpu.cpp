// A batch whose sequences begin with the same keys (a system prompt, say) reads these once: attention of all queries to
// the prefix, decoding of each sequence's own rest, and one merge of the two. Checks the result against decoding with
// the prefix copied into every sequence, then times both.
//   shared_prefix_cpu [threads]
#include <kernels/cpu/attention.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace k = kernels;

constexpr int64_t kBatch = 16, kHeads = 8, kKvHeads = 2, kDim = 64, kWidth = kHeads * kDim, kKvWidth = kKvHeads * kDim;
constexpr int64_t kPrefix = 2000, kRest = 100, kWhole = kPrefix + kRest;

// The i-th of a fixed sequence of numbers in [-1, 1).
float number(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15u;
  i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9u;
  return float(i >> 40) * 0x1p-23f - 1.f;
}
std::vector<float> numbers(int64_t count, uint64_t first) {
  std::vector<float> all(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) all[size_t(i)] = number(first + uint64_t(i));
  return all;
}

void require(const k::Status& status) {
  if (status) return;
  std::fprintf(stderr, "shared_prefix_cpu: %s\n", status.reason());
  std::exit(1);
}

// The median time of a call in milliseconds; the first one does not count.
template <class F>
double milliseconds(const F& call) {
  std::vector<double> ms;
  for (int sample = -1; sample < 9; ++sample) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - begin;
    if (sample >= 0) ms.push_back(elapsed.count());
  }
  std::nth_element(ms.begin(), ms.begin() + 4, ms.end());
  return ms[4];
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : int(std::max(1u, std::thread::hardware_concurrency()));
  if (argc > 2 || threads < 1) {
    std::fprintf(stderr, "usage: shared_prefix_cpu [threads]\n");
    return 2;
  }
  const k::cpu::Exec cx{threads};
  const k::AttentionShape shape{kBatch, 1, kHeads, kKvHeads, kDim}, as_one{1, kBatch, kHeads, kKvHeads, kDim};

  const std::vector<float> q = numbers(kBatch * kWidth, 0);
  const std::vector<float> prefix_keys = numbers(kPrefix * kKvWidth, 1 << 20),
                           prefix_values = numbers(kPrefix * kKvWidth, 2 << 20);
  const std::vector<float> rest_keys = numbers(kBatch * kRest * kKvWidth, 3 << 20),
                           rest_values = numbers(kBatch * kRest * kKvWidth, 4 << 20);
  const auto view = [](const std::vector<float>& keys, const std::vector<float>& values, int64_t positions) {
    return k::dense_kv(k::nhd(keys.data(), positions, kKvHeads, kDim), k::nhd(values.data(), positions, kKvHeads, kDim),
                       positions);
  };
  const auto queries = k::load(q.data(), kWidth);
  std::vector<char> memory(k::cpu::decode_workspace_bytes(shape));
  const k::Workspace workspace{memory.data(), memory.size()};

  // Rows of the prefix's part, then rows of the rest's: the outputs, and the logsumexps that say how much each weighs.
  std::vector<float> parts(2 * kBatch * kWidth), lse(2 * kBatch * kHeads), merged(kBatch * kWidth);
  const auto cascade = [&] {
    require(k::cpu::attention(cx, queries, view(prefix_keys, prefix_values, kPrefix), k::store(parts.data(), kWidth),
                              as_one, k::no_mask(), k::Attention{}.lse(lse.data())));
    require(k::cpu::decode(cx, queries, view(rest_keys, rest_values, kRest),
                           k::store(parts.data() + kBatch * kWidth, kWidth), shape, k::no_mask(), workspace,
                           k::Attention{}.lse(lse.data() + kBatch * kHeads)));
    require(k::cpu::merge_states(cx, k::load(static_cast<const float*>(parts.data()), kWidth),
                                 k::load(static_cast<const float*>(lse.data()), kHeads),
                                 k::store(merged.data(), kWidth), {2, kBatch, kHeads, kDim}));
  };

  // The same with a copy of the prefix in every sequence.
  std::vector<float> keys, values, plain(kBatch * kWidth);
  for (int64_t b = 0; b < kBatch; ++b) {
    const auto append = [b](std::vector<float>& to, const std::vector<float>& prefix, const std::vector<float>& rest) {
      to.insert(to.end(), prefix.begin(), prefix.end());
      to.insert(to.end(), rest.begin() + b * kRest * kKvWidth, rest.begin() + (b + 1) * kRest * kKvWidth);
    };
    append(keys, prefix_keys, rest_keys);
    append(values, prefix_values, rest_values);
  }
  const auto copied = [&] {
    require(k::cpu::decode(cx, queries, view(keys, values, kWhole), k::store(plain.data(), kWidth), shape, k::no_mask(),
                           workspace));
  };

  const double cascade_ms = milliseconds(cascade), copied_ms = milliseconds(copied);
  double most = 0;
  for (size_t i = 0; i < plain.size(); ++i) most = std::max(most, std::fabs(double(plain[i]) - double(merged[i])));
  std::printf(
      "%d sequences, %d keys in common and %d of their own, %d threads: %.2f ms; %.2f ms with copies of the prefix\n",
      int(kBatch), int(kPrefix), int(kRest), threads, cascade_ms, copied_ms);
  if (!(most < 1e-5)) {
    std::fprintf(stderr, "shared_prefix_cpu: results differ by %g\n", most);
    return 1;
  }
  return 0;
}
