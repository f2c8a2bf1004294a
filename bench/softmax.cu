// Softmax: plain, and fused with a scale and a mask, against the copy kernel, cuDNN and a CUB kernel.
#include "support/row_bench.cuh"

namespace k = kernels;

namespace {

using CasePtr = std::shared_ptr<bench::Case>;

template <class Source, class Sink>
void time_library(const CasePtr& c, int64_t rows, int64_t cols, Source source, Sink sink) {
  c->library(k::Softmax{}, source, sink,
             [=](const k::Exec& ex, auto in, auto out) { return k::softmax(ex, in, out, rows, cols); });
}

template <class T>
void softmax(int64_t rows, int64_t cols) {
  const double bytes = 2.0 * rows * cols * sizeof(T);
  const CasePtr c = bench::make_case("softmax", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->input<T>(), y = c->output<T>();
  time_library(c, rows, cols, [=](int i) { return k::load(x[i], cols); }, [=](int i) { return k::store(y[i], cols); });
  if constexpr (sizeof(T) >= 2) {
#if KERNELS_HAVE_CUDNN
    const bench::CudnnSoftmax<T> cudnn(rows, cols);
    c->peer("cudnn", [=](cudaStream_t s, int i) { return cudnn(s, x[i], y[i]); });
#endif
    const bench::CubSoftmax op;
    c->peer("cub", [=](cudaStream_t s, int i) { return bench::cub_rows(s, x[i], y[i], rows, cols, op); });
  }
}

// scale, one additive vector for all rows, softmax. The vector stays in the cache and is not counted.
template <class T>
void with_vector_mask(int64_t rows, int64_t cols) {
  const double bytes = 2.0 * rows * cols * sizeof(T);
  const CasePtr c = bench::make_case("softmax_scale_add", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->input<T>(), y = c->output<T>();
  const T* mask = c->vector<T>(cols);
  time_library(c, rows, cols, [=](int i) { return k::load(x[i], cols) | k::scale(0.125) | k::add(mask); },
               [=](int i) { return k::store(y[i], cols); });
}

// scale, a mask of bools for every element, softmax: one byte more to read for each element.
template <class T>
void with_bool_mask(int64_t rows, int64_t cols) {
  const double bytes = rows * cols * (2.0 * sizeof(T) + 1);
  const CasePtr c = bench::make_case("softmax_scale_mask", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->input<T>(), y = c->output<T>();
  const auto keep = c->input<bool>();
  time_library(c, rows, cols,
               [=](int i) { return k::load(x[i], cols) | k::scale(0.125) | k::mask(k::load(keep[i], cols)); },
               [=](int i) { return k::store(y[i], cols); });
}

template <class T>
void long_rows() {
  for (const int64_t cols : {65536, 131072, 262144}) softmax<T>(8192 * 65536 / cols, cols);
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t cols : bench::kCols) softmax<k::half>(bench::kRows, cols);
  long_rows<k::half>();
  for (const int64_t cols : {1000, 1023, 1024, 1025, 4096, 4097, 50256, 50257}) softmax<k::half>(4096, cols);
  for (const int64_t cols : bench::kCols) softmax<k::bfloat16>(bench::kRows, cols);
  long_rows<k::bfloat16>();
  for (const int64_t cols : {1024, 4096, 16384}) softmax<float>(bench::kRows, cols);
  for (const int64_t rows : {1, 16, 128}) {
    for (const int64_t cols : {32000, 128256}) softmax<float>(rows, cols);
  }
  for (const int64_t cols : {1024, 4096, 16384}) softmax<k::float8_e4m3>(bench::kRows, cols);
  for (const int64_t cols : bench::kCols) with_vector_mask<k::half>(bench::kRows, cols);
  for (const int64_t cols : bench::kCols) with_bool_mask<k::half>(bench::kRows, cols);
  return bench::run(argc, argv);
}
