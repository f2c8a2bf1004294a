// The CPU twin of fused_row.cu: h = x + bias + res is written back to res, y = layernorm(h), in half, one pass.
// Checks rows against a computation in double, then times the call against memcpy on as many threads and bytes.
//   fused_row_cpu [threads]
#include <kernels/cpu/layernorm.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace k = kernels;

constexpr int64_t kRows = 4096, kCols = 4096, kCount = kRows * kCols;
constexpr double kEps = 1e-5;

// The i-th of a fixed sequence of numbers in [-1, 1), already rounded to half.
k::half number(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15u;
  i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9u;
  i = (i ^ (i >> 27)) * 0x94d049bb133111ebu;
  return k::convert<k::half>(float(i >> 40) * 0x1p-23f - 1.f);
}

// f(part) for every part, each on its own thread.
template <class F>
void on_threads(int parts, const F& f) {
  std::vector<std::thread> team;
  for (int part = 1; part < parts; ++part) team.emplace_back(f, part);
  f(0);
  for (std::thread& t : team) t.join();
}

// The median time of a call in seconds; the first one does not count.
template <class F>
double seconds(const F& call) {
  std::vector<double> s;
  for (int sample = -1; sample < 9; ++sample) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (sample >= 0) s.push_back(elapsed.count());
  }
  std::nth_element(s.begin(), s.begin() + 4, s.end());
  return s[4];
}

bool near(k::half got, double want) {  // half a unit of half, and a little for the float in between
  return std::fabs(double(k::convert<float>(got)) - want) <= std::fabs(want) / 2048 + 1e-5;
}

// Compares one row of res and y with what they should be.
bool row_is_right(const k::half* res, const k::half* y, int64_t row) {
  const auto value = [](int64_t i) { return double(k::convert<float>(number(uint64_t(i)))); };
  // The row that is normalized is the one that was written to res, rounded to half.
  std::vector<double> h(kCols);
  double mean = 0, variance = 0;
  for (int64_t c = 0; c < kCols; ++c) {
    const k::half written = res[row * kCols + c];
    if (!near(written, value(row * kCols + c) + value(2 * kCount + c) + value(kCount + row * kCols + c))) return false;
    h[c] = k::convert<float>(written);
    mean += h[c] / kCols;
  }
  for (const double v : h) variance += (v - mean) * (v - mean) / kCols;
  for (int64_t c = 0; c < kCols; ++c) {
    const double gamma = value(2 * kCount + kCols + c), beta = value(2 * kCount + 2 * kCols + c);
    if (!near(y[row * kCols + c], (h[c] - mean) / std::sqrt(variance + kEps) * gamma + beta)) return false;
  }
  return true;
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : int(std::max(1u, std::thread::hardware_concurrency()));
  const k::cpu::Exec cx{threads};
  if (!cx.status()) {
    std::fprintf(stderr, "fused_row_cpu: %s\n", cx.status().reason());
    return 1;
  }

  // x, res, y, and one more for memcpy to write to; then bias, gamma, beta.
  std::vector<k::half> memory(4 * kCount + 3 * kCols);
  k::half *x = memory.data(), *res = x + kCount, *y = res + kCount, *bias = y + 2 * kCount;
  k::half *gamma = bias + kCols, *beta = gamma + kCols;
  on_threads(threads, [&](int part) {
    const int64_t end = 2 * kCount * (part + 1) / threads;
    for (int64_t i = 2 * kCount * part / threads; i < end; ++i) x[i] = number(uint64_t(i));
  });
  for (int64_t i = 0; i < 3 * kCols; ++i) bias[i] = number(uint64_t(2 * kCount + i));

  k::Status status;
  const auto fused = [&] {
    auto h = k::load(x, kCols) | k::add(k::row(bias)) | k::add(k::load(res, kCols)) | k::tee(res, kCols);
    auto out = k::affine(gamma, beta) | k::store(y, kCols);
    status = k::cpu::layernorm(cx, h, out, kRows, kCols, k::LayerNorm{}.eps(kEps));
  };
  fused();
  if (!status) {
    std::fprintf(stderr, "fused_row_cpu: layernorm: %s\n", status.reason());
    return 1;
  }
  for (const int64_t row : {int64_t(0), kRows / 2 + 1, kRows - 1}) {
    if (row_is_right(res, y, row)) continue;
    std::fprintf(stderr, "fused_row_cpu: wrong result in row %lld\n", static_cast<long long>(row));
    return 1;
  }

  // Both read two matrices and write two. res grows with every call, which a half can hold here.
  const double bytes = 4.0 * kCount * sizeof(k::half);
  const double fused_s = seconds(fused);
  const double copy_s = seconds([&] {
    on_threads(threads, [&](int part) {
      const int64_t begin = 2 * kCount * part / threads, end = 2 * kCount * (part + 1) / threads;
      std::memcpy(static_cast<void*>(y + begin), x + begin, size_t(end - begin) * sizeof(k::half));
    });
  });

  std::printf("bias + residual + layernorm, half, %lld x %lld, CPU, %d threads: correct\n",
              static_cast<long long>(kRows), static_cast<long long>(kCols), threads);
  std::printf("  fused   %7.2f ms  %6.1f GB/s\n", fused_s * 1e3, bytes / fused_s * 1e-9);
  std::printf("  memcpy  %7.2f ms  %6.1f GB/s\n", copy_s * 1e3, bytes / copy_s * 1e-9);
  std::printf("  %.0f %% of the speed of memcpy\n", 100 * copy_s / fused_s);
}
