// RMSNorm with gamma, plain and quantized to int8 with a scale per row, against the copy kernel and a CUB kernel.
#include "support/row_bench.cuh"

namespace k = kernels;

namespace {

template <class T>
void rmsnorm(int64_t rows, int64_t cols) {
  const auto c = bench::make_case("rmsnorm", bench::type_name<T>, rows, cols, 2.0 * rows * cols * sizeof(T));
  const auto x = c->template input<T>(), y = c->template output<T>();
  const T* gamma = c->template vector<T>(cols);
  c->library(k::RmsNorm{}, [=](int i) { return k::load(x[i], cols); },
             [=](int i) { return k::affine(gamma) | k::store(y[i], cols); },
             [=](const k::Exec& ex, auto in, auto out) { return k::rmsnorm(ex, in, out, rows, cols); });
  if constexpr (sizeof(T) >= 2) {
    const bench::CubRmsNorm<T> op{gamma};
    c->peer("cub", [=](cudaStream_t s, int i) { return bench::cub_rows(s, x[i], y[i], rows, cols, op); });
  }
}

template <class T>
void quantized(int64_t rows, int64_t cols) {
  const double bytes = rows * (cols * (sizeof(T) + 1.0) + sizeof(float));
  const auto c = bench::make_case("rmsnorm_int8", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->template input<T>();
  const auto q = c->template output<int8_t>();
  const T* gamma = c->template vector<T>(cols);
  float* scales = c->template vector<float>(rows);
  c->library(k::RmsNorm{}, [=](int i) { return k::load(x[i], cols); },
             [=](int i) { return k::affine(gamma) | k::quantize(q[i], cols, scales); },
             [=](const k::Exec& ex, auto in, auto out) { return k::rmsnorm(ex, in, out, rows, cols); });
}

// README's line, but that the residual stream goes to a tensor of its own: its norm goes through an activation of
// one's own, and codes come out.
struct QuickGelu : k::Elementwise<QuickGelu> {
  KERNELS_HD float operator()(float x) const { return x * k::sigmoid(1.702f * x); }
};
template <class T>
void block_input(int64_t rows, int64_t cols) {
  const double bytes = rows * (cols * (3 * sizeof(T) + 1.0) + sizeof(float));
  const auto c = bench::make_case("rmsnorm_block_int8", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->template input<T>(), res = c->template input<T>(), h = c->template output<T>();
  const auto q = c->template output<int8_t>();
  const T* gamma = c->template vector<T>(cols);
  float* scales = c->template vector<float>(rows);
  c->library(k::RmsNorm{},
             [=](int i) { return k::load(x[i], cols) | k::add(k::load(res[i], cols)) | k::tee(h[i], cols); },
             [=](int i) { return k::affine(gamma) | QuickGelu() | k::quantize(q[i], cols, scales); },
             [=](const k::Exec& ex, auto in, auto out) { return k::rmsnorm(ex, in, out, rows, cols); });
}

template <class T>
void long_rows() {
  for (const int64_t cols : {65536, 131072, 262144}) rmsnorm<T>(8192 * 65536 / cols, cols);
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t cols : bench::kCols) rmsnorm<k::half>(bench::kRows, cols);
  long_rows<k::half>();
  for (const int64_t cols : {1000, 1023, 1024, 1025, 4096, 4097, 50256, 50257}) rmsnorm<k::half>(4096, cols);
  for (const int64_t cols : bench::kCols) rmsnorm<k::bfloat16>(bench::kRows, cols);
  long_rows<k::bfloat16>();
  for (const int64_t cols : {1024, 4096, 16384}) rmsnorm<float>(bench::kRows, cols);
  for (const int64_t cols : {1024, 4096, 16384}) rmsnorm<k::float8_e4m3>(bench::kRows, cols);
  for (const int64_t cols : {1024, 4096, 16384}) quantized<k::half>(bench::kRows, cols);
  for (const int64_t cols : {1024, 4096, 16384}) block_input<k::bfloat16>(8192, cols);
  return bench::run(argc, argv);
}
