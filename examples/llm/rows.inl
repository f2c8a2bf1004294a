// What a model does beside products with weights: embedding, norms, rotation of normalized heads, attention. Included by cpu.cpp and
// gpu.cu, which say what `on` is (the CPU's or the GPU's calls) and which type activations have.
//
// A functor of our own is all that the library lacks here: rows of a table by number.

namespace {

template <class T>
class RowsOf : public k::Functor {
 public:
  static constexpr k::Role role = k::Role::source;
  RowsOf(const T* table, const int32_t* ids, int64_t cols) : table_(table), ids_(ids), cols_(cols) {}

  static constexpr int widest = 16 / int(sizeof(T));
  int max_pack() const { return k::detail::aligned_pack(table_, cols_, widest); }
  template <int N>
  KERNELS_HD auto load(int64_t row, int64_t col) const {
    return k::convert<float>(k::read<N, k::Cache::stream>(table_ + ids_[row] * cols_ + col).unpack());
  }

 private:
  const T* table_;
  const int32_t* ids_;
  int64_t cols_;
};

// f(pointer to the table's elements), for the types that embeddings may have.
template <class F>
const char* with_table(const Matrix& table, const F& f) {
  switch (table.type) {
    case Type::f32: return f(static_cast<const float*>(table.data));
    case Type::f16: return f(static_cast<const k::half*>(table.data));
    case Type::bf16: return f(static_cast<const k::bfloat16*>(table.data));
    default: return "embeddings are fp32, fp16 or bf16";
  }
}

const char* embed(const Place& place, const Tokens& tokens, const Matrix& table, float factor, const Matrix& places, float* x) {
  return with_table(table, [&](auto* words) {
    const auto out = k::store(x, table.cols);
    if (!places) return reason(on::copy(exec(place), RowsOf(words, tokens.ids, table.cols) | k::scale(factor), out, tokens.rows(), table.cols));
    const RowsOf where(static_cast<const std::remove_reference_t<decltype(*words)>*>(places.data), tokens.positions, table.cols);
    return reason(on::copy(exec(place), RowsOf(words, tokens.ids, table.cols) | k::scale(factor) | k::add(where), out, tokens.rows(), table.cols));
  });
}

const char* norm(const Place& place, const float* x, const Norm& by, void* y, int64_t rows, int64_t cols) {
  const auto out = k::store(static_cast<A*>(y), cols);
  if (by.layer_norm) return reason(on::layernorm(exec(place), k::load(x, cols), k::affine(by.gamma, by.beta) | out, rows, cols, k::LayerNorm{}.eps(by.eps)));
  return reason(on::rmsnorm(exec(place), k::load(x, cols), k::affine(by.gamma) | out, rows, cols, k::RmsNorm{}.eps(by.eps)));
}

const char* add_norm(const Place& place, const float* t, const Norm& by, float* x, int64_t rows, int64_t cols) {
  const auto out = k::affine(by.gamma) | k::add(k::load(static_cast<const float*>(x), cols)) | k::store(x, cols);
  return reason(on::rmsnorm(exec(place), k::load(t, cols), out, rows, cols, k::RmsNorm{}.eps(by.eps)));
}

const char* normalize_heads(const Place& place, float* q, const Norm& by, int64_t rows, int64_t dim) {
  const auto out = k::affine(by.gamma) | k::store(q, dim);
  return reason(on::rmsnorm(exec(place), k::load(static_cast<const float*>(q), dim), out, rows, dim, k::RmsNorm{}.eps(by.eps)));
}

const char* rotate(const Place& place, const Tokens& tokens, const Heads& heads, float* q, float* k_, const float* v, const Norm& q_norm,
                   const Norm& k_norm, const Rope& by, const Cache& cache, void* queries) {
  const int64_t rows = tokens.rows(), nq = heads.heads * heads.dim, nk = heads.kv_heads * heads.dim;
  if (q_norm) LLM_TRY(normalize_heads(place, q, q_norm, rows * heads.heads, heads.dim));
  if (k_norm) LLM_TRY(normalize_heads(place, k_, k_norm, rows * heads.kv_heads, heads.dim));
  return with_cache(cache, heads, tokens, [&](const auto& kv) -> const char* {
    const auto rope = rope_of(tokens, heads, by);
    const k::AppendAt at(tokens.positions, tokens.owners);
    LLM_TRY(reason(on::copy(exec(place), k::load(static_cast<const float*>(q), nq) | rope, k::store(static_cast<A*>(queries), nq), rows, nq)));
    LLM_TRY(reason(on::copy(exec(place), k::load(static_cast<const float*>(k_), nk) | rope, k::append_keys(kv, at, heads.dim), rows, nk)));
    return reason(on::copy(exec(place), k::load(v, nk), k::append_values(kv, at, heads.dim), rows, nk));
  });
}

struct Capped : k::Elementwise<Capped> {
  float limit, inverse;
  explicit Capped(float cap) : limit(cap), inverse(1 / cap) {}
  template <class C>
  KERNELS_HD C operator()(C x) const { return C(limit) * k::tanh(x * C(inverse)); }
};

const char* cap(const Place& place, float* t, float limit, int64_t rows, int64_t cols) {
  return reason(on::copy(exec(place), k::load(static_cast<const float*>(t), cols) | Capped(limit), k::store(t, cols), rows, cols));
}

k::AttentionShape shape_of(const Tokens& tokens, const Heads& heads) { return {tokens.sequences, tokens.each, heads.heads, heads.kv_heads, heads.dim}; }

// Few queries of each sequence share the keys out among all threads or blocks; many are shared out themselves.
bool is_decode(const Tokens& tokens) { return tokens.each <= 4; }

size_t attend_bytes(const Place& place, const Tokens& tokens, const Heads& heads) {
  return is_decode(tokens) ? decode_bytes(place, shape_of(tokens, heads)) : 0;
}

const char* attend(const Place& place, const Tokens& tokens, const Attend& how, const void* q, const Cache& cache, void* o, void* room, size_t bytes) {
  const int64_t cols = how.shape.heads * how.shape.dim;
  const auto queries = k::load(static_cast<const A*>(q), cols);
  const auto out = k::store(static_cast<A*>(o), cols);
  const auto options = k::Attention{}.scale(how.scale);
  const k::Window mask = k::window(how.window > 0 ? how.window - 1 : -1, 0);
  const k::AttentionShape shape = shape_of(tokens, how.shape);
  return with_cache(cache, how.shape, tokens, [&](const auto& kv) {
    const auto with = [&](const auto& score) {
      if (is_decode(tokens)) return reason(on::decode(exec(place), queries, kv, out, shape, score, k::Workspace{room, bytes}, options));
      return reason(on::attention(exec(place), queries, kv, out, shape, score, options));
    };
    return how.cap > 0 ? with(mask & k::soft_cap(how.cap)) : with(mask);
  });
}

}  // namespace
