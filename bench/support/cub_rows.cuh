// Softmax, LayerNorm and RMSNorm as a user of CUB would write them: a block per row, cub::BlockReduce, 16-byte loads.
// The row stays in registers where 1,024 threads can hold it, and is read again in every pass otherwise.
#pragma once

#include <cub/block/block_reduce.cuh>

#include <cstdint>

namespace bench {

struct CubMax { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct CubSum { __device__ float operator()(float a, float b) const { return a + b; } };

template <class T, int N>
struct alignas(N * sizeof(T)) CubVector {
  T v[N];
};

// A row in the hands of a block: kHeld vectors of N elements in the registers of each thread; 0: none.
template <class T, int N, int kThreads, int kHeld>
struct CubRow {
  using Vector = CubVector<T, N>;
  using Reduce = cub::BlockReduce<float, kThreads>;
  struct Shared {
    typename Reduce::TempStorage reduce;
    float result;
  };

  const T* x;
  T* y;
  int cols;
  Shared& shared;
  Vector held[kHeld > 0 ? kHeld : 1];

  static __device__ Vector read(const T* p, int col) { return *reinterpret_cast<const Vector*>(p + col); }

  __device__ void load() {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int col = (i * kThreads + int(threadIdx.x)) * N;
        if (col < cols) held[i] = read(x, col);
      }
    }
  }

  // f(vector, column) for every vector of this thread.
  template <class F>
  __device__ void each(F f) {
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int col = (i * kThreads + int(threadIdx.x)) * N;
        if (col < cols) f(held[i], col);
      }
    } else {
      for (int col = int(threadIdx.x) * N; col < cols; col += kThreads * N) f(read(x, col), col);
    }
  }

  // f(value) over the row, combined with op.
  template <class Op, class F>
  __device__ float reduce(float start, Op op, F f) {
    float partial = start;
    each([&](const Vector& vector, int) {
#pragma unroll
      for (int k = 0; k < N; ++k) partial = op(partial, f(float(vector.v[k])));
    });
    const float total = Reduce(shared.reduce).Reduce(partial, op);
    if (threadIdx.x == 0) shared.result = total;
    __syncthreads();
    const float result = shared.result;
    __syncthreads();
    return result;
  }

  // f(value, gamma, beta) into y; a missing gamma or beta is passed as 1 or 0.
  template <class F>
  __device__ void write(const T* gamma, const T* beta, F f) {
    each([&](const Vector& vector, int col) {
      Vector g, b, out;
      if (gamma) g = read(gamma, col);
      if (beta) b = read(beta, col);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        out.v[k] = T(f(float(vector.v[k]), gamma ? float(g.v[k]) : 1.f, beta ? float(b.v[k]) : 0.f));
      }
      *reinterpret_cast<Vector*>(y + col) = out;
    });
  }
};

struct CubSoftmax {
  template <class Row>
  __device__ void operator()(Row& row, int64_t) const {
    const float top = row.reduce(-INFINITY, CubMax(), [](float x) { return x; });
    const float sum = row.reduce(0.f, CubSum(), [=](float x) { return __expf(x - top); });
    const float scale = 1.f / sum;
    row.write(nullptr, nullptr, [=](float x, float, float) { return __expf(x - top) * scale; });
  }
};

template <class T>
struct CubLayerNorm {
  const T *gamma, *beta;
  float *mean, *rstd;

  template <class Row>
  __device__ void operator()(Row& row, int64_t index) const {
    const float m = row.reduce(0.f, CubSum(), [](float x) { return x; }) / float(row.cols);
    const float squares = row.reduce(0.f, CubSum(), [=](float x) { return (x - m) * (x - m); });
    const float r = rsqrtf(squares / float(row.cols) + 1e-5f);
    if (threadIdx.x == 0) {
      mean[index] = m;
      rstd[index] = r;
    }
    row.write(gamma, beta, [=](float x, float g, float b) { return (x - m) * r * g + b; });
  }
};

template <class T>
struct CubRmsNorm {
  const T* gamma;

  template <class Row>
  __device__ void operator()(Row& row, int64_t) const {
    const float squares = row.reduce(0.f, CubSum(), [](float x) { return x * x; });
    const float r = rsqrtf(squares / float(row.cols) + 1e-5f);
    row.write(gamma, nullptr, [=](float x, float g, float) { return x * r * g; });
  }
};

template <class T, int N, int kThreads, int kHeld, class Op>
__global__ void __launch_bounds__(kThreads) cub_rows_kernel(const T* x, T* y, int cols, Op op) {
  using Row = CubRow<T, N, kThreads, kHeld>;
  __shared__ typename Row::Shared shared;
  const int64_t offset = int64_t(blockIdx.x) * cols;
  Row row{x + offset, y + offset, cols, shared, {}};
  row.load();
  op(row, blockIdx.x);
}

// x and y are aligned to 16 bytes, rows are packed. Returns null, or what went wrong.
template <class T, class Op>
const char* cub_rows(cudaStream_t stream, const T* x, T* y, int64_t rows, int64_t cols, const Op& op) {
  constexpr int N = 16 / int(sizeof(T));
  constexpr int kHeld = 4;
  const int n = int(cols);
  const unsigned grid = unsigned(rows);
  if (cols % N != 0) cub_rows_kernel<T, 1, 512, 0><<<grid, 512, 0, stream>>>(x, y, n, op);
  else if (cols <= 32 * kHeld * N) cub_rows_kernel<T, N, 32, kHeld><<<grid, 32, 0, stream>>>(x, y, n, op);
  else if (cols <= 64 * kHeld * N) cub_rows_kernel<T, N, 64, kHeld><<<grid, 64, 0, stream>>>(x, y, n, op);
  else if (cols <= 128 * kHeld * N) cub_rows_kernel<T, N, 128, kHeld><<<grid, 128, 0, stream>>>(x, y, n, op);
  else if (cols <= 256 * kHeld * N) cub_rows_kernel<T, N, 256, kHeld><<<grid, 256, 0, stream>>>(x, y, n, op);
  else if (cols <= 512 * kHeld * N) cub_rows_kernel<T, N, 512, kHeld><<<grid, 512, 0, stream>>>(x, y, n, op);
  else if (cols <= 1024 * kHeld * N) cub_rows_kernel<T, N, 1024, kHeld><<<grid, 1024, 0, stream>>>(x, y, n, op);
  else cub_rows_kernel<T, N, 1024, 0><<<grid, 1024, 0, stream>>>(x, y, n, op);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace bench
