// Products with weights of one type, kWeights, and everything that is fused with them. cpu.cpp and gpu.cu include it.

namespace {

auto weights(const Matrix& w) {
  using Codes = Element<kWeights>;
  if constexpr (kWeights == Type::i4) return k::dequant(k::int4(static_cast<const uint32_t*>(w.data), w.cols), k::group_scales(static_cast<const k::half*>(w.scales), w.cols / kGroup, kGroup));
  else if constexpr (bits_of(kWeights) == 8) return k::dequant(k::load(static_cast<const Codes*>(w.data), w.cols), k::row_scales(static_cast<const float*>(w.scales)));
  else return k::load(static_cast<const Codes*>(w.data), w.cols);
}

auto inputs(const void* y, int64_t cols) { return k::load(static_cast<const A*>(y), cols); }

auto codes(const Inputs& y, int64_t cols) {
  return k::dequant(k::load(static_cast<const Element<kWeights>*>(y.rows), cols), k::row_scales(y.scales));
}

// A product of normalized rows, or of quantized ones, of which there are always many.
template <class W, class Out>
const char* multiply(const Place& place, const Inputs& y, const W& w, const Out& out, const k::MatmulShape& shape) {
  if constexpr (bits_of(kWeights) == 8) {
    if (y.scales != nullptr) return reason(many_rows(place, codes(y, shape.k), w, out, shape));
  }
  return reason(on::matmul(for_product(place, shape.m), inputs(y.rows, shape.k), w, out, shape, policy(place)));
}

// The same, or a product of one row that it normalizes itself.
template <class W, class Out>
const char* product(const Place& place, const Inputs& y, const W& w, const Out& out, const k::MatmulShape& shape) {
  if constexpr (kFolds) {
    if (y.norm != nullptr) {
      const auto row = k::normed(k::load(static_cast<const float*>(y.rows), shape.k), k::RmsNorm{}.eps(y.norm->eps)) | k::mul(y.norm->gamma);
      return reason(one_row(place, row, w, out, shape));
    }
  }
  return multiply(place, y, w, out, shape);
}

template <size_t i = 0>
bool makes(Type cache) {
  if constexpr (i < sizeof(kCaches) / sizeof(Type)) return cache == kCaches[i] || makes<i + 1>(cache);
  else return false;
}

const char* qkv(const Place& place, const Tokens& tokens, const Heads& heads, const Inputs& y, const QkvWeights& w, const Rope& by, const Cache& cache, void* q) {
  const int64_t nq = heads.heads * heads.dim, nk = heads.kv_heads * heads.dim, rows = tokens.rows();
  const auto rope = rope_of(tokens, heads, by);
  const k::AppendAt at = append_at(tokens, cache);
  const auto stacked = k::stacked(k::paired(weights(w.q), rope), nq, k::paired(weights(w.k), rope), nk, k::plain(weights(w.v)), nk);
  return with_cache(cache, heads, tokens, [&](const auto& kv) {
    const auto out = k::qkv(k::bias(w.q_bias) | rope | k::store(static_cast<A*>(q), nq), nq,
                            k::bias(w.k_bias) | rope | k::append_keys(kv, at, heads.dim), nk,
                            k::bias(w.v_bias) | k::append_values(kv, at, heads.dim), nk);
    return product(place, y, stacked, out, {rows, nq + 2 * nk, w.q.cols});
  });
}

const char* three(const Place& place, const Inputs& y, const QkvWeights& w, float* raw, int64_t rows) {
  const int64_t nq = w.q.rows, nk = w.k.rows, ld = nq + 2 * nk;
  const auto out = k::qkv(k::bias(w.q_bias) | k::store(raw, ld), nq, k::bias(w.k_bias) | k::store(raw + nq, ld), nk, k::bias(w.v_bias) | k::store(raw + nq + nk, ld), nk);
  return product(place, y, k::stacked(weights(w.q), nq, weights(w.k), nk, weights(w.v), nk), out, {rows, ld, w.q.cols});
}

const char* plain(const Place& place, const Inputs& y, const Matrix& w, const float* bias, float* t, int64_t rows) {
  return multiply(place, y, weights(w), k::bias(bias) | k::store(t, w.rows), {rows, w.rows, w.cols});
}

const char* residual(const Place& place, const Inputs& y, const Matrix& w, const float* bias, float* x, int64_t rows) {
  const auto out = k::bias(bias) | k::add(k::load(static_cast<const float*>(x), w.rows)) | k::store(x, w.rows);
  return multiply(place, y, weights(w), out, {rows, w.rows, w.cols});
}

const char* up(const Place& place, Activation activation, const Inputs& y, const Matrix& gate, const Matrix& w, const float* bias, void* h, int64_t rows) {
  const auto out = k::store(static_cast<A*>(h), w.rows);
  const k::MatmulShape shape{rows, w.rows, w.cols};
  if (gate && activation == Activation::silu) return product(place, y, k::gated(weights(gate), weights(w)), k::swiglu() | out, shape);
  if (gate && activation == Activation::gelu_tanh) return product(place, y, k::gated(weights(gate), weights(w)), k::geglu() | out, shape);
  if (!gate && activation == Activation::gelu_tanh) return product(place, y, weights(w), k::bias(bias) | k::gelu() | out, shape);
  return "this activation function is not compiled in";
}

const char* expert_up(const Place& place, const Experts& e, const void* y, const Matrix& gate, const Matrix& w, void* h, int64_t rows) {
  const int64_t inner = w.rows / e.count;
  return reason(on::matmul(for_product(place, rows), k::gathered(inputs(y, w.cols), e.order, e.per_token), k::gated(weights(gate), weights(w)), k::swiglu() | k::store(static_cast<A*>(h), inner),
                           {rows * e.per_token, inner, w.cols}, k::Groups{e.count, e.offsets}, policy(place)));
}

const char* expert_down(const Place& place, const Experts& e, const void* h, const Matrix& w, const float* zeros, float* made, int64_t rows) {
  const int64_t hidden = w.rows / e.count;
  return reason(on::matmul(for_product(place, rows), inputs(h, w.cols), weights(w), k::bias(zeros) | k::store(made, hidden), {rows * e.per_token, hidden, w.cols}, k::Groups{e.count, e.offsets}, policy(place)));
}

}  // namespace

extern const ProductCalls CALLS;
const ProductCalls CALLS = {kWeights, makes<0>, kFolds,   kDecodesFrom, takes_codes, qkv,
                            three,    plain,    residual, up,           expert_up,   expert_down};
