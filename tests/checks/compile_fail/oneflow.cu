// FAILS LOAD_WITHOUT_COLUMN: the functor's load does not fit
// FAILS LOAD_IS_NO_TEMPLATE: the functor's load does not fit
// FAILS STORE_WITH_MORE: the functor's store does not fit
// FAILS COMPUTE_IN_HALF: a load of double is computed in double, any other in float
// FAILS COMPUTE_FLOAT_IN_DOUBLE: a load of double is computed in double, any other in float
#include <kernels/oneflow.cuh>

// A functor of each form, with an index helper whose copy constructor is for the host: no warning, and no copy on the
// device.
struct Helper {
  explicit Helper(int n) : divisor(n) {}
  Helper(const Helper& other) : divisor(other.divisor) {}
  __device__ int operator()(int i) const { return i % divisor; }
  int divisor;
};
template <class SRC, class DST>
struct Load {
  template <int N>
  __device__ void load(DST* dst, int row, int col) {
    for (int i = 0; i < N; ++i) dst[i] = static_cast<DST>(src[helper(row) * row_size + col + i]);
  }
  const SRC* src;
  int64_t row_size;
  Helper helper;
};
template <class SRC, class DST>
struct Store {
  template <int N>
  __device__ void store(const SRC* src, int64_t row, int64_t col) {
    for (int i = 0; i < N; ++i) dst[helper(int(row)) * row_size + col + i] = static_cast<DST>(src[i]);
  }
  DST* dst;
  int64_t row_size;
  Helper helper;
};
struct NoColumn {
  template <int N>
  __device__ void load(float* dst, int64_t row) const { dst[0] = float(row); }
};
struct NoTemplate {
  __device__ void load(float* dst, int64_t, int64_t) const { dst[0] = 0; }
};
struct More {
  template <int N>
  __device__ void store(const float* src, int64_t, int64_t, float* dst) { dst[0] = src[0]; }
};

cudaError_t f(cudaStream_t stream, const __half* x, __half* y, int64_t rows, int64_t cols) {
  namespace doors = oneflow::cuda::softmax;
  Load<__half, __half> load{x, cols, Helper(3)};
  Load<__half, float> floats{x, cols, Helper(3)};
  Store<float, __half> store{y, cols, Helper(3)};
#if defined(LOAD_WITHOUT_COLUMN)
  return doors::DispatchSoftmax<NoColumn, decltype(store), float>(stream, {}, store, rows, cols);
#elif defined(LOAD_IS_NO_TEMPLATE)
  return doors::DispatchSoftmax<NoTemplate, decltype(store), float>(stream, {}, store, rows, cols);
#elif defined(STORE_WITH_MORE)
  return doors::DispatchSoftmax<decltype(load), More, float>(stream, load, {}, rows, cols);
#elif defined(COMPUTE_IN_HALF)
  return doors::DispatchSoftmax<decltype(load), decltype(store), __half>(stream, load, store, rows, cols);
#elif defined(COMPUTE_FLOAT_IN_DOUBLE)
  return doors::DispatchSoftmax<decltype(floats), decltype(store), double>(stream, floats, store, rows, cols);
#else
  doors::DispatchSoftmax<decltype(floats), decltype(store), float>(stream, floats, store, rows, cols);
  return doors::DispatchLogSoftmax<decltype(load), decltype(store), float>(stream, load, store, rows, cols);
#endif
}
