// LayerNorm with gamma and beta, mean and rstd written; and bias + residual + LayerNorm, the residual updated in place.
// Against the copy kernel and a CUB kernel.
#include "support/row_bench.cuh"

namespace k = kernels;

namespace {

template <class T>
void layernorm(int64_t rows, int64_t cols) {
  const auto c = bench::make_case("layernorm", bench::type_name<T>, rows, cols, 2.0 * rows * cols * sizeof(T));
  const auto x = c->template input<T>(), y = c->template output<T>();
  const T *gamma = c->template vector<T>(cols), *beta = c->template vector<T>(cols);
  float *mean = c->template vector<float>(rows), *rstd = c->template vector<float>(rows);
  const auto options = k::LayerNorm{}.mean(mean).rstd(rstd);
  c->library(options, [=](int i) { return k::load(x[i], cols); },
             [=](int i) { return k::affine(gamma, beta) | k::store(y[i], cols); },
             [=](const k::Exec& ex, auto in, auto out) { return k::layernorm(ex, in, out, rows, cols, options); });
  if constexpr (sizeof(T) >= 2) {
    const bench::CubLayerNorm<T> op{gamma, beta, mean, rstd};
    c->peer("cub", [=](cudaStream_t s, int i) { return bench::cub_rows(s, x[i], y[i], rows, cols, op); });
  }
}

// Two matrices read, two written.
template <class T>
void with_residual(int64_t rows, int64_t cols) {
  const double bytes = 4.0 * rows * cols * sizeof(T);
  const auto c = bench::make_case("layernorm_residual", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->template input<T>(), residual = c->template input<T>(), y = c->template output<T>();
  const T* bias = c->template vector<T>(cols);
  const T *gamma = c->template vector<T>(cols), *beta = c->template vector<T>(cols);
  c->library(k::LayerNorm{},
             [=](int i) {
               const auto sum = k::load(x[i], cols) | k::add(bias) | k::add(k::load(residual[i], cols));
               return sum | k::tee(residual[i], cols);
             },
             [=](int i) { return k::affine(gamma, beta) | k::store(y[i], cols); },
             [=](const k::Exec& ex, auto in, auto out) { return k::layernorm(ex, in, out, rows, cols); });
}

template <class T>
void long_rows() {
  for (const int64_t cols : {65536, 131072, 262144}) layernorm<T>(8192 * 65536 / cols, cols);
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t cols : bench::kCols) layernorm<k::half>(bench::kRows, cols);
  long_rows<k::half>();
  for (const int64_t cols : {1000, 1023, 1024, 1025, 4096, 4097, 50256, 50257}) layernorm<k::half>(4096, cols);
  for (const int64_t cols : bench::kCols) layernorm<k::bfloat16>(bench::kRows, cols);
  long_rows<k::bfloat16>();
  for (const int64_t cols : {1024, 4096, 16384}) layernorm<float>(bench::kRows, cols);
  for (const int64_t cols : {1024, 4096, 16384}) layernorm<k::float8_e4m3>(bench::kRows, cols);
  for (const int64_t cols : bench::kCols) with_residual<k::half>(bench::kRows, cols);
  for (const int64_t cols : bench::kCols) with_residual<k::bfloat16>(bench::kRows, cols);
  return bench::run(argc, argv);
}
