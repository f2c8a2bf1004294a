// copy(): activations, gates, casts, codes and dropout of large tensors, against the copy kernel and a simple kernel;
// and embeddings with the first norm, against the norm alone.
#include "support/row_bench.cuh"

namespace k = kernels;

namespace {

// What is written without a library: one element of 32 bits' worth of work each, as many programs have it.
template <class T, class F>
__global__ void simple_kernel(const T* x, const T* up, T* y, size_t n, F f) {
  const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = k::convert<T>(f(k::convert<float>(x[i]), up == nullptr ? 1.f : k::convert<float>(up[i])));
}
template <class T, class F>
bench::Call simple(std::vector<T*> x, std::vector<T*> up, std::vector<T*> y, int64_t n, F f) {
  return [=](cudaStream_t s, int i) -> const char* {
    simple_kernel<<<unsigned((n + 255) / 256), 256, 0, s>>>(x[i], up.empty() ? nullptr : up[i], y[i], size_t(n), f);
    return nullptr;
  };
}
struct PlainGelu {
  __device__ float operator()(float x, float) const {
    return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  }
};
struct PlainSwiglu {
  __device__ float operator()(float x, float up) const { return x / (1.f + expf(-x)) * up; }
};

// How much a thread asks for before it begins to compute: what tuning/elementwise.h chooses among.
template <int kBytes, class Source, class Sink>
void in_flight(bench::Case& c, const Source& source, const Sink& sink, int64_t rows, int64_t cols) {
  using In = decltype(source(0));
  using Out = decltype(sink(0));
  using Widths = k::detail::PackWidths<In, Out>;
  c.peer(("kernels " + std::to_string(kBytes) + " B").c_str(), [=](cudaStream_t s, int i) -> const char* {
    const auto in = source(i);
    const auto out = sink(i);
    const k::Status status = k::detail::each_pack<Widths::wide, Widths::middle, kBytes>(
        s, k::detail::CopyOf<In, Out>{in, out}, rows, cols, Widths::wide);
    return status ? nullptr : status.reason();
  });
}

// source(i) and sink(i) of a set, as a matrix or flat.
template <class Source, class Sink>
void copies(bench::Case& c, const Source& source, const Sink& sink, int64_t rows, int64_t cols) {
  c.library([=](cudaStream_t s, int i) -> const char* {
    const k::Status status =
        rows == 1 ? k::copy(s, source(i), sink(i), cols) : k::copy(s, source(i), sink(i), rows, cols);
    return status ? nullptr : status.reason();
  });
}

template <class T, class Map>
void activation(const char* op, int64_t rows, int64_t cols, const Map& map, bool sweep = false) {
  const auto c = bench::make_case(op, bench::type_name<T>, rows, cols, 2.0 * rows * cols * sizeof(T));
  const auto x = c->template input<T>(), y = c->template output<T>();
  const auto source = [=](int i) { return k::load(static_cast<const T*>(x[i]), cols) | map; };
  const auto sink = [=](int i) { return k::store(y[i], cols); };
  copies(*c, source, sink, rows, cols);
  if constexpr (std::is_same<Map, k::GeluTanh>::value) c->peer("simple", simple<T>(x, {}, y, rows * cols, PlainGelu()));
  if (sweep) in_flight<16>(*c, source, sink, rows, cols), in_flight<32>(*c, source, sink, rows, cols);
}

template <class T>
void swiglu(int64_t rows, int64_t cols, bool sweep = false) {
  const auto c = bench::make_case("swiglu", bench::type_name<T>, rows, cols, 3.0 * rows * cols * sizeof(T));
  const auto x = c->template input<T>(), up = c->template input<T>(), y = c->template output<T>();
  const auto source = [=](int i) {
    return k::gated(k::load(static_cast<const T*>(x[i]), cols), k::load(static_cast<const T*>(up[i]), cols)) |
           k::swiglu();
  };
  const auto sink = [=](int i) { return k::store(y[i], cols); };
  copies(*c, source, sink, rows, cols);
  c->peer("simple", simple<T>(x, up, y, rows * cols, PlainSwiglu()));
  if (sweep) in_flight<32>(*c, source, sink, rows, cols), in_flight<128>(*c, source, sink, rows, cols);
}

// The halves of one tensor, as a product with both weights leaves them.
template <class T>
void gate_up(int64_t rows, int64_t cols) {
  const auto c = bench::make_case("swiglu_halves", bench::type_name<T>, rows, cols, 3.0 * rows * cols * sizeof(T));
  const auto x = c->template input<T>(2 * rows * cols), y = c->template output<T>();
  copies(
      *c, [=](int i) { return k::gate_up(k::load(static_cast<const T*>(x[i]), 2 * cols), cols) | k::swiglu(); },
      [=](int i) { return k::store(y[i], cols); }, rows, cols);
}

template <class From, class To>
void cast(const char* op, int64_t rows, int64_t cols) {
  const auto c =
      bench::make_case(op, bench::type_name<From>, rows, cols, double(rows * cols) * (sizeof(From) + sizeof(To)));
  const auto x = c->template input<From>();
  const auto y = c->template output<To>();
  copies(
      *c, [=](int i) { return k::load(static_cast<const From*>(x[i]), cols); },
      [=](int i) { return k::store(y[i], cols); }, rows, cols);
}

// A scale for each 128 columns, found; and codes back to halves.
template <class T, class Code>
void groups(int64_t rows, int64_t cols) {
  const double bytes = double(rows * cols) * (sizeof(T) + sizeof(Code)) + rows * cols / 128 * 4.0;
  const auto c = bench::make_case("quantize_groups", bench::type_name<T>, rows, cols, bytes);
  const auto x = c->template input<T>();
  const auto q = c->template output<Code>();
  float* scales = c->template vector<float>(rows * cols / 128);
  copies(
      *c, [=](int i) { return k::load(static_cast<const T*>(x[i]), cols); },
      [=](int i) { return k::quantize(q[i], cols, scales, cols / 128, 128); }, rows, cols);

  const auto back = bench::make_case("dequantize_groups", bench::type_name<T>, rows, cols, bytes);
  const auto codes = back->template input<Code>();
  const auto y = back->template output<T>();
  const float* from = back->template vector<float>(rows * cols / 128);
  copies(
      *back,
      [=](int i) {
        return k::dequant(k::load(static_cast<const Code*>(codes[i]), cols), k::group_scales(from, cols / 128, 128));
      },
      [=](int i) { return k::store(y[i], cols); }, rows, cols);
}

template <class T>
void flat(int64_t n) {
  const auto c = bench::make_case("gelu_flat", bench::type_name<T>, 1, n, 2.0 * n * sizeof(T));
  const auto x = c->template input<T>(), y = c->template output<T>();
  copies(
      *c, [=](int i) { return k::load(static_cast<const T*>(x[i])) | k::gelu(); },
      [=](int i) { return k::store(y[i]); }, 1, n);
}

// Rows of a table that no cache holds, other rows in each set, and numbers of rows that lie apart; beside them the norm
// of rows that lie in memory already, and the two launches that one replaces.
template <class T>
void embedding(int64_t rows, int64_t cols) {
  constexpr int64_t vocabulary = 128256, apart = 64;
  const auto c = bench::make_case("embed_rmsnorm", bench::type_name<T>, rows, cols, 2.0 * rows * cols * sizeof(T));
  const auto x = c->template input<T>(), y = c->template output<T>();
  const T* table = c->template vector<T>(vocabulary * cols);
  const T* gamma = c->template vector<T>(cols);
  T* residual = c->template vector<T>(rows * cols);
  const auto numbers = bench::shuffled(size_t(vocabulary));
  static std::vector<std::shared_ptr<int32_t>> kept;
  int32_t* ids = nullptr;
  const size_t count = size_t(bench::sets_for(2.0 * rows * cols * sizeof(T)) * apart);
  std::vector<int32_t> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = numbers[i % numbers.size()];
  BENCH_CHECK(cudaMalloc(&ids, count * sizeof(int32_t)));
  BENCH_CHECK(cudaMemcpy(ids, all.data(), count * sizeof(int32_t), cudaMemcpyHostToDevice));
  kept.emplace_back(ids, [](int32_t* p) { cudaFree(p); });
  const auto tokens = [=](int i) {
    return k::embed(k::load(table, cols), static_cast<const int32_t*>(ids) + i * apart, vocabulary);
  };
  const auto sink = [=](int i) { return k::affine(gamma) | k::store(y[i], cols); };
  const auto said = [](const k::Status& status) { return status ? nullptr : status.reason(); };
  c->library([=](cudaStream_t s, int i) { return said(k::rmsnorm(s, tokens(i), sink(i), rows, cols)); });
  c->peer("two launches", [=](cudaStream_t s, int i) {
    const char* error = said(k::copy(s, tokens(i), k::store(residual, cols), rows, cols));
    return error ? error : said(k::rmsnorm(s, k::load(static_cast<const T*>(residual), cols), sink(i), rows, cols));
  });
  c->other("norm alone", [=](cudaStream_t s, int i) {
    return said(k::rmsnorm(s, k::load(static_cast<const T*>(x[i]), cols), sink(i), rows, cols));
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = 16384;
  activation<k::half>("gelu", n, n, k::gelu(), true);
  swiglu<k::half>(n, n, true);
  gate_up<k::half>(n, n);
  flat<k::half>(n * n - 3);
  activation<k::half>("gelu_erf", n, n, k::gelu_erf());
  activation<k::half>("silu", n, n, k::silu());
  activation<k::half>("tanh", n, n, k::tanh());
  activation<k::half>("relu2", n, n, k::relu2());
  activation<k::half>("dropout", n, n, k::dropout(0.1, 1, 2, n));
  for (const int64_t rows : {1, 16, 128, 1024, 8192})
    activation<k::half>("gelu", rows, n, k::gelu()), swiglu<k::half>(rows, 14336);
  activation<k::bfloat16>("gelu", n, n, k::gelu());
  swiglu<k::bfloat16>(n, n);
  activation<float>("gelu", n, n, k::gelu(), true);
  activation<float>("gelu_erf", n, n, k::gelu_erf());
  cast<k::half, float>("cast_to_fp32", n, n);
  cast<float, k::bfloat16>("cast_to_bf16", n, n);
  cast<k::half, k::float8_e4m3>("cast_to_fp8", n, n);
  groups<k::half, k::float8_e4m3>(n, n);
  groups<k::half, int8_t>(4096, 4096);
  for (const int64_t rows : {1, 4, 16, 64}) embedding<k::half>(rows, 4096);
  return bench::run(argc, argv);
}
