// The softmax of each row of a matrix, start to end.
#include <kernels/softmax.cuh>

#include <cmath>
#include <cstdio>

namespace k = kernels;

int main() {
  const int64_t rows = 1000, cols = 1001;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "softmax: no CUDA device\n");
    return 77;
  }
  float *x = nullptr, *y = nullptr;  // memory that host and device both see
  if (cudaMallocManaged(&x, rows * cols * sizeof(float)) != cudaSuccess ||
      cudaMallocManaged(&y, rows * cols * sizeof(float)) != cudaSuccess) {
    std::fprintf(stderr, "softmax: cannot allocate: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  for (int64_t i = 0; i < rows * cols; ++i) x[i] = float(i * 7919 % 2003) * 0.005f - 5.f;

  cudaStream_t stream = nullptr;
  k::Status status = k::softmax(stream, k::load(x, cols), k::store(y, cols), rows, cols);
  if (!status) {
    std::fprintf(stderr, "softmax: %s\n", status.reason());
    return 1;
  }
  if (cudaError_t error = cudaStreamSynchronize(stream); error != cudaSuccess) {
    std::fprintf(stderr, "softmax: %s\n", cudaGetErrorString(error));
    return 1;
  }

  double largest_error = 0;
  for (int64_t r = 0; r < rows; r += 37) {
    double sum = 0;
    for (int64_t c = 0; c < cols; ++c) sum += std::exp(double(x[r * cols + c]));
    for (int64_t c = 0; c < cols; ++c) {
      const double want = std::exp(double(x[r * cols + c])) / sum;
      largest_error = std::fmax(largest_error, std::fabs(y[r * cols + c] - want) / want);
    }
  }
  if (!(largest_error < 1e-5)) {
    std::fprintf(stderr, "softmax: wrong result, relative error %g\n", largest_error);
    return 1;
  }
  std::printf("softmax of %lld rows of %lld: correct, largest relative error %.1e\n", (long long)rows, (long long)cols,
              largest_error);
  cudaFree(x);
  cudaFree(y);
}
