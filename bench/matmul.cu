// Products: one token, a few and many, against a kernel that only reads the weights, cuBLAS and cuBLASLt; weights of 8
// and 4 bits; and what is fused against its pieces. What is timed is named  op/weights/MxNxK/who.
//
// kernels: launches one after the other. kernels_early: with programmatic launches and MatmulPolicy::weights_ready, as
// in an engine that knows its weights: they are asked for while the kernel ahead is still running.
#include <kernels/append.h>
#include <kernels/elementwise.cuh>
#include <kernels/layernorm.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/rope.h>

#include "support/product_case.cuh"

namespace k = kernels;
using bench::make_case;
using bench::must;
using bench::ProductCase;

namespace {

// y = map(y), element by element: what stands after a product when it is not fused.
template <class Source, class Sink>
__global__ void pointwise_kernel(Source source, Sink sink, int64_t cols) {
  const int64_t col = 8 * (blockIdx.x * int64_t(blockDim.x) + threadIdx.x);
  if (col >= cols) return;
  const auto values = k::detail::resolve(source, k::detail::fetch<8>(source, blockIdx.y, col), blockIdx.y, col);
  const auto map = k::detail::sink_map(sink);
  k::detail::put(k::detail::sink_end(sink),
                 k::detail::apply_map(map, values, k::detail::fetch_operands<8>(map, blockIdx.y, col), blockIdx.y, col),
                 blockIdx.y, col);
}
template <class Source, class Sink>
void pointwise(cudaStream_t stream, Source source, Sink sink, int64_t rows, int64_t cols) {
  pointwise_kernel<<<dim3(unsigned((cols / 8 + 127) / 128), unsigned(rows)), 128, 0, stream>>>(source, sink, cols);
}

// A copy on the device, for as long as the program runs.
template <class T>
const T* on_device(const std::vector<T>& values) {
  void* p = nullptr;
  if (cudaMalloc(&p, values.size() * sizeof(T)) != cudaSuccess ||
      cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) {
    std::fprintf(stderr, "out of GPU memory\n");
    std::exit(1);
  }
  return static_cast<const T*>(p);
}

template <class T>
void product(const char* op, int64_t m, int64_t n, int64_t kk) {
  const std::shared_ptr<ProductCase> c = make_case(op, bench::type_name<T>, m, n, kk, double(n) * kk * sizeof(T));
  const auto w = c->weights<T>(size_t(n * kk));
  T* x = c->buffer<T>(size_t(m * kk));
  T* y = c->buffer<T>(size_t(m * n));
  c->read();
  c->kernels([=](const k::Exec& ex, int i, const k::MatmulPolicy& policy) {
    return k::matmul(ex, k::load(x, kk), k::load(w[size_t(i)], kk), k::store(y, n), {m, n, kk}, policy);
  });
  const bench::Cublas<T> cublas(m, n, kk);
  c->other("cublas", [=](cudaStream_t s, int i) { cublas(s, x, w[size_t(i)], y); });
  const bench::CublasLt<T> lt(m, n, kk);
  c->best("cublaslt", lt.choices(), [=](cudaStream_t s, int choice, int i) { lt(s, choice, x, w[size_t(i)], y); });
}

// Weights of codes of so many bits: make(pointer, scales) is their source, scale_bytes those of all scales. Many tokens
// have a workspace, where weights are decoded once, and none.
template <class Word, class Make>
void coded(const char* type, int64_t m, int64_t n, int64_t kk, int bits, double scale_bytes, const Make& make) {
  const double bytes = double(n) * kk * bits / 8;
  const auto c = make_case(m == 1 ? "gemv" : "skinny", type, m, n, kk, bytes + scale_bytes);
  const auto w = c->weights<Word>(size_t((bytes + scale_bytes) / sizeof(Word)));
  k::half* x = c->buffer<k::half>(size_t(m * kk));
  k::half* y = c->buffer<k::half>(size_t(m * n));
  k::half* decoded = m > 512 ? c->buffer<k::half>(size_t(n * kk)) : nullptr;
  const auto call = [=](const k::Exec& ex, int i, const k::MatmulPolicy& policy) {
    const auto* scales = reinterpret_cast<const k::half*>(reinterpret_cast<const char*>(w[size_t(i)]) + size_t(bytes));
    return k::matmul(ex, k::load(x, kk), make(w[size_t(i)], scales), k::store(y, n), {m, n, kk}, policy);
  };
  c->read();
  c->kernels([=](k::Exec ex, int i, const k::MatmulPolicy& policy) {
    return call(ex.workspace(decoded, decoded == nullptr ? 0 : size_t(n * kk) * sizeof(k::half)), i, policy);
  });
  if (decoded != nullptr) c->other("without_workspace", [=](cudaStream_t s, int i) { must(call(k::Exec(s), i, {})); });
}
void all_codes(int64_t m, int64_t n, int64_t kk) {
  coded<k::float8_e4m3>("e4m3_row", m, n, kk, 8, 2.0 * n,
                        [=](auto w, auto s) { return k::dequant(k::load(w, kk), k::row_scales(s)); });
  coded<k::float8_e4m3>("e4m3_block128", m, n, kk, 8, 2.0 * n * kk / 16384,
                        [=](auto w, auto s) { return k::dequant(k::load(w, kk), k::block_scales(s, kk / 128, 128)); });
  coded<k::float8_e5m2>("e5m2", m, n, kk, 8, 0, [=](auto w, auto) { return k::load(w, kk); });
  coded<int8_t>("int8_row", m, n, kk, 8, 2.0 * n,
                [=](auto w, auto s) { return k::dequant(k::load(w, kk), k::row_scales(s)); });
  coded<int8_t>("int8_group64", m, n, kk, 8, 2.0 * n * kk / 64,
                [=](auto w, auto s) { return k::dequant(k::load(w, kk), k::group_scales(s, kk / 64, 64)); });
  coded<uint32_t>("int4_group128", m, n, kk, 4, 2.0 * n * kk / 128,
                  [=](auto w, auto s) { return k::dequant(k::int4(w, kk), k::group_scales(s, kk / 128, 128)); });
  coded<uint32_t>("int4_group32", m, n, kk, 4, 2.0 * n * kk / 32,
                  [=](auto w, auto s) { return k::dequant(k::int4(w, kk), k::group_scales(s, kk / 32, 32)); });
  coded<uint32_t>("mxfp4", m, n, kk, 4, 1.0 * n * kk / 32, [=](auto w, auto s) {
    return k::dequant(k::fp4(w, kk), k::group_scales(reinterpret_cast<const k::float8_e8m0*>(s), kk / 32, 32));
  });
  coded<uint32_t>("gf4", m, n, kk, 4, 0, [=](auto w, auto) { return k::gf4(w, kk); });
}

// What is fused with a product of one token, and the same in pieces. `matrices` of n x k.
struct Fused {
  const char* op;
  int64_t n, kk;
  int matrices;
  template <class Whole, class Pieces>
  void operator()(const Whole& whole, const Pieces& pieces) const {
    const auto c = make_case(op, "fp16", 1, n, kk, 2.0 * matrices * n * kk);
    const auto w = c->weights<k::half>(size_t(matrices * n * kk));
    k::half* x = c->buffer<k::half>(size_t(kk));
    k::half* v = c->buffer<k::half>(size_t(std::max(n, kk)));
    k::half* y = c->buffer<k::half>(size_t(4 * n));
    k::half* t = c->buffer<k::half>(size_t(4 * std::max(n, kk)));
    c->read();
    c->kernels([=](const k::Exec& ex, int i, const k::MatmulPolicy& policy) {
      return whole(ex, x, w[size_t(i)], v, y, policy);
    });
    c->other("pieces", [=](cudaStream_t s, int i) { pieces(s, x, w[size_t(i)], v, y, t); });
  }
};

// Inputs of type T that are not taken as they lie in memory, of m tokens: with a workspace that holds them rounded,
// without one, and in pieces. source(pointer, factors) is what they are, round(exec, pointer, factors, to) a call that
// makes them so.
template <class T, class Source, class Round>
void inputs(const char* type, int64_t m, int64_t n, int64_t kk, const Source& source, const Round& round) {
  using k::half;
  const auto c = make_case("inputs", type, m, n, kk, 2.0 * n * kk);
  const auto w = c->weights<half>(size_t(n * kk));
  T* x = c->buffer<T>(size_t(m * kk));
  float* factors = c->buffer<float>(size_t(kk));
  half *y = c->buffer<half>(size_t(m * n)), *rounded = c->buffer<half>(size_t(m * kk));
  const size_t bytes = size_t(m * kk) * sizeof(half);
  const auto call = [=](const k::Exec& ex, int i, const k::MatmulPolicy& policy) {
    return k::matmul(ex, source(x, factors), k::load(w[size_t(i)], kk), k::store(y, n), {m, n, kk}, policy);
  };
  c->read();
  c->kernels([=](k::Exec ex, int i, const k::MatmulPolicy& policy) {
    return call(ex.workspace(rounded, bytes), i, policy);
  });
  c->other("without_workspace", [=](cudaStream_t s, int i) { must(call(k::Exec(s), i, {})); });
  c->other("pieces", [=](cudaStream_t s, int i) {
    must(round(k::Exec(s), x, factors, rounded));
    must(k::matmul(s, k::load(static_cast<const half*>(rounded), kk), k::load(w[size_t(i)], kk), k::store(y, n),
                   {m, n, kk}));
  });
}
void all_inputs(int64_t m, int64_t n, int64_t kk) {
  const auto copied = [=](const auto& source) {
    return [=](const k::Exec& ex, const auto* x, const float* factors, k::half* to) {
      return k::copy(ex, source(x, factors), k::store(to, kk), m, kk);
    };
  };
  const auto floats = [=](const float* x, const float*) { return k::load(x, kk); };
  const auto mapped = [=](const k::half* x, const float* factors) { return k::load(x, kk) | k::mul(factors); };
  inputs<float>("float", m, n, kk, floats, copied(floats));
  inputs<k::half>("mapped", m, n, kk, mapped, copied(mapped));
  inputs<float>(
      "normed", m, n, kk,
      [=](const float* x, const float* factors) {
        return k::normed(k::load(x, kk), k::RmsNorm{}) | k::mul(factors);
      },
      [=](const k::Exec& ex, const float* x, const float* factors, k::half* to) {
        return k::rmsnorm(ex, k::load(x, kk), k::affine(factors) | k::store(to, kk), m, kk);
      });
}

// The products of a layer: kOut x kIn, and those of its queries, keys and values.
constexpr int64_t kOut = 14336, kIn = 4096, kQueries = 4096, kKeys = 1024;
using Half = k::half;

k::Status plain(const k::Exec& ex, const Half* x, const Half* w, Half* y, int64_t rows,
                const k::MatmulPolicy& policy = {}) {
  return k::matmul(ex, k::load(x, kIn), k::load(w, kIn), k::store(y, rows), {1, rows, kIn}, policy);
}

void fused_maps() {
  Fused{"residual", kOut, kIn, 1}(
      [=](const k::Exec& ex, const Half* x, const Half* w, const Half*, Half* y, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(x, kIn), k::load(w, kIn), k::add(k::load(y, kOut)) | k::store(y, kOut),
                         {1, kOut, kIn}, policy);
      },
      [=](cudaStream_t s, const Half* x, const Half* w, const Half*, Half* y, Half* t) {
        must(plain(s, x, w, t, kOut));
        pointwise(s, k::load(static_cast<const Half*>(t), kOut) | k::add(k::load(y, kOut)), k::store(y, kOut), 1, kOut);
      });
  Fused{"bias_gelu", kOut, kIn, 1}(
      [=](const k::Exec& ex, const Half* x, const Half* w, const Half* v, Half* y, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(x, kIn), k::load(w, kIn), k::bias(v) | k::gelu() | k::store(y, kOut),
                         {1, kOut, kIn}, policy);
      },
      [=](cudaStream_t s, const Half* x, const Half* w, const Half* v, Half* y, Half* t) {
        must(plain(s, x, w, t, kOut));
        pointwise(s, k::load(static_cast<const Half*>(t), kOut), k::bias(v) | k::gelu() | k::store(y, kOut), 1, kOut);
      });
  Fused{"to_int8", kOut, kIn, 1}(
      [=](const k::Exec& ex, const Half* x, const Half* w, const Half*, Half* y, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(x, kIn), k::load(w, kIn),
                         k::scale(0.5) | k::store(reinterpret_cast<int8_t*>(y), kOut), {1, kOut, kIn}, policy);
      },
      [=](cudaStream_t s, const Half* x, const Half* w, const Half*, Half* y, Half* t) {
        must(plain(s, x, w, t, kOut));
        pointwise(s, k::load(static_cast<const Half*>(t), kOut),
                  k::scale(0.5) | k::store(reinterpret_cast<int8_t*>(y), kOut), 1, kOut);
      });
}

void fused_norms() {
  for (const int64_t rows : {kOut, kIn}) {
    Fused{"rmsnorm", rows, kIn, 1}(
        [=](const k::Exec& ex, const Half* x, const Half* w, const Half* v, Half* y, const k::MatmulPolicy& policy) {
          return k::matmul(ex, k::normed(k::load(x, kIn), k::RmsNorm{}) | k::mul(v), k::load(w, kIn), k::store(y, rows),
                           {1, rows, kIn}, policy);
        },
        [=](cudaStream_t s, const Half* x, const Half* w, const Half* v, Half* y, Half* t) {
          must(k::rmsnorm(s, k::load(x, kIn), k::affine(v) | k::store(t, kIn), 1, kIn));
          must(plain(s, t, w, y, rows));
        });
    Fused{"layernorm", rows, kIn, 1}(
        [=](const k::Exec& ex, const Half* x, const Half* w, const Half* v, Half* y, const k::MatmulPolicy& policy) {
          return k::matmul(ex, k::normed(k::load(x, kIn), k::LayerNorm{}) | k::affine(v, v), k::load(w, kIn),
                           k::store(y, rows), {1, rows, kIn}, policy);
        },
        [=](cudaStream_t s, const Half* x, const Half* w, const Half* v, Half* y, Half* t) {
          must(k::layernorm(s, k::load(x, kIn), k::affine(v, v) | k::store(t, kIn), 1, kIn));
          must(plain(s, t, w, y, rows));
        });
  }
}

template <class Join, class Activation>
void fused_glu(const char* op, const Join& join, const Activation& activation) {
  Fused{op, kOut, kIn, 2}(
      [=](const k::Exec& ex, const Half* x, const Half* w, const Half*, Half* y, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(x, kIn), k::gated(k::load(w, kIn), k::load(w + kOut * kIn, kIn)),
                         join | k::store(y, kOut), {1, kOut, kIn}, policy);
      },
      [=](cudaStream_t s, const Half* x, const Half* w, const Half*, Half* y, Half* t) {
        must(plain(s, x, w, t, kOut));
        must(plain(s, x, w + kOut * kIn, t + kOut, kOut));
        pointwise(s,
                  k::load(static_cast<const Half*>(t), kOut) | activation |
                      k::mul(k::load(static_cast<const Half*>(t + kOut), kOut)),
                  k::store(y, kOut), 1, kOut);
      });
}

void fused_qkv() {
  Fused{"qkv", kQueries + 2 * kKeys, kIn, 1}(
      [=](const k::Exec& ex, const Half* x, const Half* w, const Half*, Half* y, const k::MatmulPolicy& policy) {
        return k::matmul(ex, k::load(x, kIn),
                         k::stacked(k::load(w, kIn), kQueries, k::load(w + kQueries * kIn, kIn), kKeys,
                                    k::load(w + (kQueries + kKeys) * kIn, kIn), kKeys),
                         k::clamp(-8, 8) | k::apart(k::store(y, kQueries), kQueries, k::store(y + kQueries, kKeys),
                                                    kKeys, k::store(y + kQueries + kKeys, kKeys), kKeys),
                         {1, kQueries + 2 * kKeys, kIn}, policy);
      },
      [=](cudaStream_t s, const Half* x, const Half* w, const Half*, Half* y, Half*) {
        must(plain(s, x, w, y, kQueries));
        must(plain(s, x, w + kQueries * kIn, y + kQueries, kKeys));
        must(plain(s, x, w + (kQueries + kKeys) * kIn, y + kQueries + kKeys, kKeys));
        pointwise(s, k::load(static_cast<const Half*>(y), kQueries + 2 * kKeys),
                  k::clamp(-8, 8) | k::store(y, kQueries + 2 * kKeys), 1, kQueries + 2 * kKeys);
      });
}

// The same with queries and keys turned by their position on the way out.
void fused_qkv_rope() {
  std::vector<float> frequencies(64);
  k::rope_frequencies(frequencies.data(), 128, 5e5);
  const k::Rope rope = k::rope(on_device(std::vector<int32_t>{1000}), on_device(frequencies), 128);
  Fused{"qkv_rope", kQueries + 2 * kKeys, kIn, 1}(
      [=](const k::Exec& ex, const Half* x, const Half* w, const Half*, Half* y, const k::MatmulPolicy& policy) {
        const auto rows = [=](int64_t first) { return k::load(w + first * kIn, kIn); };
        const auto turned = [=](Half* to) { return rope | k::store(to, kQueries + 2 * kKeys); };
        return k::matmul(ex, k::load(x, kIn),
                         k::stacked(k::paired(rows(0), rope), kQueries, k::paired(rows(kQueries), rope), kKeys,
                                    k::plain(rows(kQueries + kKeys)), kKeys),
                         k::qkv(turned(y), kQueries, turned(y + kQueries), kKeys,
                                k::store(y + kQueries + kKeys, kQueries + 2 * kKeys), kKeys),
                         {1, kQueries + 2 * kKeys, kIn}, policy);
      },
      [=](cudaStream_t s, const Half* x, const Half* w, const Half*, Half* y, Half* t) {
        must(plain(s, x, w, t, kQueries + 2 * kKeys));
        pointwise(s, k::load(static_cast<const Half*>(t), kQueries + kKeys) | rope, k::store(y, kQueries + kKeys), 1,
                  kQueries + kKeys);
        pointwise(s, k::load(static_cast<const Half*>(t + kQueries + kKeys), kKeys),
                  k::store(y + kQueries + kKeys, kKeys), 1, kKeys);
      });
}

void all_fused() {
  fused_maps();
  fused_norms();
  fused_glu("swiglu", k::swiglu(), k::silu());
  fused_glu("geglu", k::geglu(), k::gelu());
  fused_qkv();
  fused_qkv_rope();
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int64_t shapes[][2] = {{2048, 2048},  {4096, 4096},  {8192, 2048},  {2048, 8192},  {6144, 4096},
                                   {14336, 4096}, {4096, 14336}, {28672, 4096}, {32000, 4096}, {128256, 4096}};
  for (const auto& s : shapes) product<k::half>("gemv", 1, s[0], s[1]);
  for (const auto& s : shapes) product<k::bfloat16>("gemv", 1, s[0], s[1]);
  for (const int64_t n : {14336, 28672}) all_codes(1, n, 4096);
  all_codes(1, 4096, 14336);
  all_fused();
  for (const auto& s : {shapes[1], shapes[5], shapes[6]}) {
    for (const int64_t m : {2, 3, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 512})
      product<k::bfloat16>("skinny", m, s[0], s[1]);
  }
  for (const int64_t m : {1024, 4096}) product<k::bfloat16>("skinny", m, 14336, 4096);
  for (const int64_t m : {2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096}) all_codes(m, 14336, 4096);
  for (const int64_t m : {4, 8, 32, 128, 512, 2048}) all_inputs(m, 14336, 4096);
  for (const int64_t n : {1024, 2048, 4096, 8192}) product<k::bfloat16>("gemm", n, n, n);
  product<k::half>("gemm", 4096, 4096, 4096);
  product<float>("gemm", 2048, 2048, 2048);
  return bench::run(argc, argv, {{"cublas", std::to_string(cublasLtGetVersion())}});
}
