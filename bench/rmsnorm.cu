// RMSNorm with gamma, plain and quantized to int8 with a scale per row, or to e4m3 with one for each 128 columns,
// against the copy kernel and a CUB kernel.
#include <kernels/elementwise.cuh>

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

// Behind the residual stream, whose norm goes to products of 8 bits. twice: the norm written as T, and quantized by a
// call of its own.
template <class T>
void grouped(int64_t rows, int64_t cols) {
  const double bytes = double(rows) * (cols * (3 * sizeof(T) + 1.0) + cols / 128 * sizeof(float));
  const auto c = bench::make_case("rmsnorm_block_e4m3_groups", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->template input<T>(), res = c->template input<T>(), h = c->template output<T>(),
             y = c->template output<T>();
  const auto q = c->template output<k::float8_e4m3>();
  const T* gamma = c->template vector<T>(cols);
  float* scales = c->template vector<float>(rows * cols / 128);
  const auto in = [=](int i) { return k::load(x[i], cols) | k::add(k::load(res[i], cols)) | k::tee(h[i], cols); };
  const auto out = [=](int i) { return k::quantize(q[i], cols, scales, cols / 128, 128); };
  c->library(
      k::RmsNorm{}, in, [=](int i) { return k::affine(gamma) | out(i); },
      [=](const k::Exec& ex, auto from, auto to) { return k::rmsnorm(ex, from, to, rows, cols); });
  c->other("twice", [=](cudaStream_t s, int i) -> const char* {
    const k::Status norm = k::rmsnorm(s, in(i), k::affine(gamma) | k::store(y[i], cols), rows, cols);
    if (!norm) return norm.reason();
    const k::Status codes = k::copy(s, k::load(static_cast<const T*>(y[i]), cols), out(i), rows, cols);
    return codes ? nullptr : codes.reason();
  });
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
  for (const int64_t cols : {1024, 4096, 16384}) grouped<k::bfloat16>(8192, cols);
  for (const int64_t rows : {1, 32, 256}) grouped<k::bfloat16>(rows, 4096);
  return bench::run(argc, argv);
}
