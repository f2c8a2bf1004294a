// Bias + residual + LayerNorm in one pass, in half: h = x + bias + res is written back to res, y = layernorm(h).
// Checks rows against a computation in double on the host, then times the call against a copy that moves as many bytes.
#include <kernels/layernorm.cuh>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace k = kernels;

constexpr int64_t kRows = 16384, kCols = 4096, kCount = kRows * kCols;
constexpr double kEps = 1e-5;

// The i-th of a fixed sequence of numbers in [-1, 1), already rounded to half.
KERNELS_HD k::half number(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15u;
  i = (i ^ (i >> 30)) * 0xbf58476d1ce4e5b9u;
  i = (i ^ (i >> 27)) * 0x94d049bb133111ebu;
  return k::convert<k::half>(float(i >> 40) * 0x1p-23f - 1.f);
}

__global__ void fill(k::half* p, int64_t n, uint64_t first) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) p[i] = number(first + i);
}

// The grid covers the data exactly: 256 threads, kUnroll packs each.
template <int kUnroll>
__global__ void copy(float4* to, const float4* from) {
  const int64_t first = blockIdx.x * int64_t(256 * kUnroll) + threadIdx.x;
  float4 v[kUnroll];
  for (int i = 0; i < kUnroll; ++i) v[i] = from[first + 256 * i];
  for (int i = 0; i < kUnroll; ++i) to[first + 256 * i] = v[i];
}

[[noreturn]] void quit(int code, const char* what, const char* why) {
  std::fprintf(stderr, "fused_row: %s: %s\n", what, why);
  std::exit(code);
}
void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) quit(1, what, cudaGetErrorString(error));
}

// The median time of one call in seconds: 15 times 8 calls back to back.
template <class F>
double seconds(cudaStream_t stream, const F& call) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "cudaEventCreate");
  must(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> ms;
  for (int sample = -2; sample < 15; ++sample) {  // the first two do not count
    must(cudaEventRecord(begin, stream), "cudaEventRecord");
    for (int i = 0; i < 8; ++i) call();
    must(cudaEventRecord(end, stream), "cudaEventRecord");
    must(cudaEventSynchronize(end), "cudaEventSynchronize");
    float elapsed = 0;
    must(cudaEventElapsedTime(&elapsed, begin, end), "cudaEventElapsedTime");
    if (sample >= 0) ms.push_back(elapsed / 8);
  }
  must(cudaEventDestroy(begin), "cudaEventDestroy");
  must(cudaEventDestroy(end), "cudaEventDestroy");
  std::nth_element(ms.begin(), ms.begin() + 7, ms.end());
  return ms[7] * 1e-3;
}

bool near(k::half got, double want) {  // half a unit of half, and a little for the float in between
  return std::fabs(k::convert<float>(got) - want) <= std::fabs(want) / 2048 + 1e-5;
}

// Compares one row of res and y with what they should be.
void check_row(const k::half* res, const k::half* y, int64_t row) {
  std::vector<k::half> got_res(kCols), got_y(kCols);
  must(cudaMemcpy(got_res.data(), res + row * kCols, kCols * sizeof(k::half), cudaMemcpyDeviceToHost), "cudaMemcpy");
  must(cudaMemcpy(got_y.data(), y + row * kCols, kCols * sizeof(k::half), cudaMemcpyDeviceToHost), "cudaMemcpy");
  const auto value = [](int64_t i) { return double(k::convert<float>(number(i))); };
  // The row that is normalized is the one that was written to res, rounded to half.
  std::vector<double> h(kCols);
  double mean = 0, variance = 0;
  bool right = true;
  for (int64_t c = 0; c < kCols; ++c) {
    h[c] = k::convert<float>(got_res[c]);
    mean += h[c] / kCols;
    right = right && near(got_res[c], value(row * kCols + c) + value(2 * kCount + c) + value(kCount + row * kCols + c));
  }
  for (const double v : h) variance += (v - mean) * (v - mean) / kCols;
  for (int64_t c = 0; c < kCols; ++c) {
    const double gamma = value(2 * kCount + kCols + c), beta = value(2 * kCount + 2 * kCols + c);
    if (right && near(got_y[c], (h[c] - mean) / std::sqrt(variance + kEps) * gamma + beta)) continue;
    std::fprintf(stderr, "fused_row: wrong result in row %lld\n", (long long)row);
    std::exit(1);
  }
}

int main() {
  int devices = 0;
  const cudaError_t counted = cudaGetDeviceCount(&devices);
  if (counted != cudaSuccess) quit(77, "no CUDA device", cudaGetErrorString(counted));
  if (devices == 0) quit(77, "no CUDA device", "none found");

  // x, res, y, and one more for the copy to write to; then bias, gamma, beta.
  k::half* memory = nullptr;
  const cudaError_t allocated = cudaMalloc(&memory, (4 * kCount + 3 * kCols) * sizeof(k::half));
  if (allocated == cudaErrorMemoryAllocation) quit(77, "512 MiB of GPU memory", cudaGetErrorString(allocated));
  must(allocated, "cudaMalloc");
  k::half *x = memory, *res = x + kCount, *y = res + kCount, *bias = y + 2 * kCount;
  k::half *gamma = bias + kCols, *beta = gamma + kCols;

  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "cudaStreamCreate");
  fill<<<unsigned(2 * kCount / 256), 256, 0, stream>>>(x, 2 * kCount, 0);
  fill<<<unsigned(3 * kCols / 256), 256, 0, stream>>>(bias, 3 * kCols, 2 * kCount);
  must(cudaGetLastError(), "fill");

  const k::Exec ex{stream};
  const auto fused = [&] {
    auto h = k::load(x, kCols) | k::add(k::row(bias)) | k::add(k::load(res, kCols)) | k::tee(res, kCols);
    auto out = k::affine(gamma, beta) | k::store(y, kCols);
    const k::Status status = k::layernorm(ex, h, out, kRows, kCols, k::LayerNorm{}.eps(kEps));
    if (!status) quit(1, "layernorm", status.reason());
  };
  fused();
  must(cudaStreamSynchronize(stream), "layernorm");
  for (const int64_t row : {int64_t(0), kRows / 2 + 1, kRows - 1}) check_row(res, y, row);

  // Both read two matrices and write two. res grows with every call, which a half can hold here.
  const double bytes = 4.0 * kCount * sizeof(k::half);
  const double fused_s = seconds(stream, fused);
  const auto* from = reinterpret_cast<const float4*>(x);
  auto* to = reinterpret_cast<float4*>(y);
  const unsigned blocks = unsigned(2 * kCount * sizeof(k::half) / sizeof(float4) / 256);
  const double copy_s = std::min({seconds(stream, [&] { copy<1><<<blocks, 256, 0, stream>>>(to, from); }),
                                  seconds(stream, [&] { copy<2><<<blocks / 2, 256, 0, stream>>>(to, from); }),
                                  seconds(stream, [&] { copy<4><<<blocks / 4, 256, 0, stream>>>(to, from); })});
  must(cudaGetLastError(), "copy");

  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  std::printf("bias + residual + layernorm, half, %lld x %lld, %s: correct\n", (long long)kRows,
              (long long)kCols, device.name);
  std::printf("  fused  %8.1f us  %7.0f GB/s\n", fused_s * 1e6, bytes / fused_s * 1e-9);
  std::printf("  copy   %8.1f us  %7.0f GB/s\n", copy_s * 1e6, bytes / copy_s * 1e-9);
  std::printf("  %.0f %% of the speed of copying\n", 100 * copy_s / fused_s);
  must(cudaStreamDestroy(stream), "cudaStreamDestroy");
  must(cudaFree(memory), "cudaFree");
}
