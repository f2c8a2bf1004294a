// Products of which inputs and weights are both codes of 8 bits, against cuBLASLt with the same codes, and against the
// same product of bfloat16.  in_eight/codes and scales/MxNxK/who
//
// e4m3, int8: without scales. e4m3_fast: with MatmulPolicy::fast_sums, and cuBLASLt's fast accumulation. row: a scale
// for each token and each output, behind the product. block128: of dequant(), for 128 columns of a token and for 128 x
// 128 weights. cuBLASLt's products of int8 are int32; all others are bfloat16.
#include "support/product_case.cuh"

namespace k = kernels;
using bench::must;

namespace {

struct Shape {
  int64_t m, n, k;
};

// Operands of a case and what is read by it besides: f(exec, set, policy) is made by make(x, w of a set, y, scales).
template <class T, class Make>
std::shared_ptr<bench::ProductCase> kernels_of(const char* type, const Shape& s, const Make& make) {
  const auto c = bench::make_case("in_eight", type, s.m, s.n, s.k, double(s.n) * double(s.k) * sizeof(T));
  const auto w = c->weights<T>(size_t(s.n * s.k));
  const T* x = c->buffer<T>(size_t(s.m * s.k));
  const float* scales = c->buffer<float>(size_t((s.m + s.n) * (s.k / 128 + 1)));
  k::bfloat16* y = c->buffer<k::bfloat16>(size_t(s.m * s.n));
  c->read();
  c->kernels([=](const k::Exec& ex, int i, const k::MatmulPolicy& policy) {
    return make(ex, x, static_cast<const T*>(w[size_t(i)]), y, scales, policy);
  });
  return c;
}
template <class T, class TY = k::bfloat16>
void cublaslt(const std::shared_ptr<bench::ProductCase>& c, const Shape& s, bool fast = false) {
  const auto w = c->weights<T>(size_t(s.n * s.k));
  const T* x = c->buffer<T>(size_t(s.m * s.k));
  TY* y = c->buffer<TY>(size_t(s.m * s.n));
  const bench::CublasLt<T, TY> lt(s.m, s.n, s.k, fast);
  c->best("cublaslt", lt.choices(),
          [=](cudaStream_t stream, int choice, int i) { lt(stream, choice, x, w[size_t(i)], y); });
}

template <class T, class TY = k::bfloat16>
void plain(const char* type, const Shape& s, bool fast = false) {
  const auto c = kernels_of<T>(type, s, [=](const k::Exec& ex, auto x, auto w, auto y, auto, k::MatmulPolicy policy) {
    policy.fast_sums = fast;
    return k::matmul(ex, k::load(x, s.k), k::load(w, s.k), k::store(y, s.n), {s.m, s.n, s.k}, policy);
  });
  cublaslt<T, TY>(c, s, fast);
}
template <class T>
void scaled(const char* type, const Shape& s) {
  kernels_of<T>(type, s, [=](const k::Exec& ex, auto x, auto w, auto y, auto scales, const k::MatmulPolicy& policy) {
    return k::matmul(ex, k::load(x, s.k), k::load(w, s.k),
                     k::mul(k::per_row(scales)) | k::mul(k::row(scales + s.m)) | k::store(y, s.n), {s.m, s.n, s.k},
                     policy);
  });
}

void all(const Shape& s) {
  using E4m3 = k::float8_e4m3;
  plain<k::bfloat16>("bf16", s);
  plain<E4m3>("e4m3", s);
  plain<E4m3>("e4m3_fast", s, true);
  scaled<E4m3>("e4m3_row", s);
  kernels_of<E4m3>("e4m3_block128", s,
                   [=](const k::Exec& ex, auto x, auto w, auto y, auto scales, const k::MatmulPolicy& policy) {
                     const auto in = k::dequant(k::load(x, s.k), k::group_scales(scales, s.k / 128, 128)),
                                weights = k::dequant(k::load(w, s.k), k::block_scales(scales, s.k / 128, 128));
                     return k::matmul(ex, in, weights, k::store(y, s.n), {s.m, s.n, s.k}, policy);
                   });
  plain<int8_t, int32_t>("int8", s);
  scaled<int8_t>("int8_row", s);
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t m : {64, 128, 256, 512, 1024, 2048, 4096}) all({m, 14336, 4096});
  for (const int64_t m : {64, 512, 2048, 4096}) all({m, 4096, 14336});
  for (const int64_t n : {4096, 8192}) all({n, n, n});
  return bench::run(argc, argv, {{"cublas", std::to_string(cublasLtGetVersion())}});
}
