// The calls beside products and attention: embedding, norms, quantization, rotation of normalized heads, routing,
// sampling. cpu.cpp and gpu.cu include it, and say what `on` is (the CPU's or the GPU's calls) and which type
// activations have.

namespace {

const char* embed(const Place& place, const Tokens& tokens, const Matrix& table, float factor, const Matrix& places, float* x) {
  const auto copy = [&](auto* words) {
    const auto rows = k::embed(k::load(words, table.cols), tokens.ids, table.rows) | k::scale(factor);
    const auto out = k::store(x, table.cols);
    if (!places) return reason(on::copy(exec(place), rows, out, tokens.rows(), table.cols));
    const auto where = k::embed(k::load(static_cast<decltype(words)>(places.data), table.cols), tokens.positions, places.rows);
    return reason(on::copy(exec(place), rows | k::add(where), out, tokens.rows(), table.cols));
  };
  switch (table.type) {
    case Type::f32: return copy(static_cast<const float*>(table.data));
    case Type::f16: return copy(static_cast<const k::half*>(table.data));
    case Type::bf16: return copy(static_cast<const k::bfloat16*>(table.data));
    default: return "the embedding is not fp32, fp16 or bf16";
  }
}

const char* norm(const Place& place, const float* x, const Norm& by, void* y, int64_t rows, int64_t cols) {
  const auto out = k::store(static_cast<A*>(y), cols);
  if (by.layer_norm) return reason(normalize(place, k::load(x, cols), k::affine(by.gamma, by.beta) | out, rows, cols, k::LayerNorm{}.eps(by.eps)));
  return reason(normalize(place, k::load(x, cols), k::affine(by.gamma) | out, rows, cols, k::RmsNorm{}.eps(by.eps)));
}

const char* add_norm(const Place& place, const float* t, const Norm& by, float* x, int64_t rows, int64_t cols) {
  const auto out = k::affine(by.gamma) | k::add(k::load(static_cast<const float*>(x), cols)) | k::store(x, cols);
  return reason(normalize(place, k::load(t, cols), out, rows, cols, k::RmsNorm{}.eps(by.eps)));
}

const char* encode(const Place& place, const Inputs& y, Type type, void* codes, float* scales, int64_t rows,
                   int64_t cols) {
  const auto write = [&](auto* to) {
    const auto out = k::quantize(to, cols, scales);
    if (y.norm == nullptr)
      return reason(on::copy(exec(place), k::load(static_cast<const A*>(y.rows), cols), out, rows, cols));
    return reason(normalize(place, k::load(static_cast<const float*>(y.rows), cols),
                            k::affine(y.norm->gamma) | out, rows, cols, k::RmsNorm{}.eps(y.norm->eps)));
  };
  return type == Type::i8 ? write(static_cast<int8_t*>(codes)) : write(static_cast<k::float8_e4m3*>(codes));
}

const char* rotate(const Place& place, const Tokens& tokens, const Heads& heads, float* raw, const Norm& q_norm, const Norm& k_norm, const Rope& by, const Cache& cache, void* queries) {
  const on::Exec ex = exec(place, tokens.rows());
  const int64_t rows = tokens.rows(), nq = heads.heads * heads.dim, nk = heads.kv_heads * heads.dim, ld = nq + 2 * nk;
  const auto in = k::load(static_cast<const float*>(raw), ld);
  return with_cache(cache, heads, tokens, [&](const auto& kv) {
    const auto rope = rope_of(tokens, heads, by);
    const auto q = rope | k::store(static_cast<A*>(queries), nq);
    const k::AppendAt at = append_at(tokens, cache);
    const auto put = [&](const auto& keys, const auto& values) {
      const k::HeadShape shape{rows, heads.heads + 2 * heads.kv_heads, heads.dim,
                               q_norm ? heads.heads + heads.kv_heads : 0};
      if (!q_norm) return reason(on::norm_heads(ex, in, k::qkv(q, nq, keys, nk, values, nk), shape));
      const auto weight = [&](const Norm& norm) { return k::affine(k::each_head(norm.gamma, heads.dim)); };
      return reason(on::norm_heads(ex, in, k::qkv(weight(q_norm) | q, nq, weight(k_norm) | keys, nk, values, nk), shape,
                                   k::RmsNorm{}.eps(q_norm.eps)));
    };
    if constexpr (std::decay_t<decltype(kv.keys())>::scaled)
      return put(rope | k::append_keys(kv, at, heads.dim, cache.key_scales),
                 k::append_values(kv, at, heads.dim, cache.value_scales));
    else
      return put(rope | k::append_keys(kv, at, heads.dim), k::append_values(kv, at, heads.dim));
  });
}

const char* route(const Place& place, const Experts& e, int64_t rows) {
  const k::RouterShape shape{rows, e.count, e.per_token};
  const k::Status routed = on::route(exec(place), k::load(static_cast<const float*>(e.logits), e.count), e.ids, e.shares, shape, k::Router{}.renormalize(e.shares_add_to_one));
  return reason(routed ? on::sort_by_expert(exec(place), e.ids, {e.offsets, e.order, e.places}, shape) : routed);
}

const char* combine(const Place& place, const Experts& e, const float* made, float* x, int64_t rows, int64_t cols) {
  const auto sum = k::combined(k::load(made, cols), e.places, e.shares, e.per_token);
  return reason(on::copy(exec(place), sum | k::add(k::load(static_cast<const float*>(x), cols)), k::store(x, cols), rows, cols));
}

const char* add_gated(const Place& place, const float* gate, const float* t, float* x, int64_t rows, int64_t cols) {
  const auto made = k::load(t, cols) | k::mul(k::per_row(gate) | k::sigmoid());
  return reason(on::copy(exec(place), made | k::add(k::load(static_cast<const float*>(x), cols)), k::store(x, cols), rows, cols));
}

const char* cap(const Place& place, float* t, float limit, int64_t rows, int64_t cols) {
  const auto capped = k::load(static_cast<const float*>(t), cols) | k::scale(1 / limit) | k::tanh() | k::scale(limit);
  return reason(on::copy(exec(place), capped, k::store(t, cols), rows, cols));
}

// A sink of one column that appends the sampled token to each text, so that this needs no kernel of its own. A text
// that fills the context stays as it is, unless texts are endless.
struct Behind : k::Functor {
  static constexpr int widest = 1;
  Texts texts;
  int64_t first;
  Behind(const Texts& t, int64_t from) : texts(t), first(from) {}
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>& v, int64_t row, int64_t) const { put(first + row, int32_t(v.v[0])); }  // exact: below 2^22
  KERNELS_HD void put(int64_t s, int32_t token) const {
    const int64_t n = texts.lengths[s];
    texts.out[n % texts.ring * texts.sequences + s] = uint64_t(n) << 32 | uint32_t(token);
    if ((n >= texts.context && !texts.endless) || token < 0) return;
    texts.history[s * texts.context + n % texts.context] = token;
    texts.ids[s] = token;
    texts.positions[s] = int32_t(n);
    texts.lengths[s] = int32_t(n + 1);
    texts.kept[s] = int32_t(n + 1 < texts.context ? n + 1 : texts.context);
    texts.steps[s] = uint64_t(n + 1);
  }
};

// A source of the sampled tokens, or -1 if the logit of the token is infinite: then the model has overflowed, and would
// give this token for ever.
struct Drawn : k::Functor {
  static constexpr int widest = 1;
  const int32_t* tokens;
  const float* logits;
  int64_t vocabulary;
  Drawn(const int32_t* p, const float* by, int64_t n) : tokens(p), logits(by), vocabulary(n) {}
  KERNELS_HD int32_t at(int64_t row) const {
    const int32_t token = tokens[row];
    return token >= 0 && logits[row * vocabulary + token] == k::infinity<float>() ? -1 : token;
  }
  template <int N>
  KERNELS_HD k::Pack<float, N> load(int64_t row, int64_t) const { return k::broadcast<N>(float(at(row))); }
};

// A sink that sets up the rows of a step with guesses from the state of the text, which only Verified changes.
struct Guessed : k::Functor {
  static constexpr int widest = 1;
  Texts texts;
  Guesses guesses;
  Guessed(const Texts& t, const Guesses& g) : texts(t), guesses(g) {}
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>& v, int64_t row, int64_t) const {
    const int64_t n = texts.lengths[0] + row;
    guesses.ids[row] = texts.history[n - 1] = int32_t(v.v[0]);
    guesses.positions[row] = int32_t(n - 1);
    guesses.lengths[row] = int32_t(n);
    guesses.seeds[row] = texts.seeds[0];
    guesses.steps[row] = uint64_t(n);
  }
};

// A sink that appends tokens to the text. Every row has sampled the token that follows its own one without guesses, so
// the text goes on up to the first guess that differs.
struct Verified : k::Functor {
  static constexpr int widest = 1;
  Behind behind;
  Guesses guesses;
  Drawn drawn;
  Verified(const Texts& t, const Guesses& g, const Drawn& d) : behind(t, 0), guesses(g), drawn(d) {}
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>&, int64_t, int64_t) const {
    for (int64_t i = 0; i < guesses.rows; ++i) {
      const int32_t token = drawn.at(i);
      behind.put(0, token);
      if (i + 1 == guesses.rows || token != guesses.ids[i + 1]) return;
    }
  }
};

k::Status draw(const Place& place, const Choice& how, const float* logits, int64_t vocabulary, int64_t tokens, int32_t* chosen, int64_t count, const uint64_t* seeds, const uint64_t* steps,
               const int32_t* history, int64_t ld, const int32_t* lengths) {
  auto options = k::Sampling{}.temperature(how.temperature).top_k(how.top_k).top_p(how.top_p).min_p(how.min_p).seed(seeds, 1).step(steps, 1);
  if (how.repetition_penalty != 1) options.repetition_penalty(how.repetition_penalty).previous(history, ld, lengths);
  return on::sample(exec(place), k::load(logits, vocabulary), chosen, count, tokens, options);
}

const char* choose(const Place& place, const Choice& how, const float* logits, int64_t vocabulary, int64_t tokens, const Texts& texts, int64_t first, int64_t count) {
  const k::Status drawn = draw(place, how, logits, vocabulary, tokens, texts.chosen + first, count, texts.seeds + first, texts.steps + first, texts.history + first * texts.context, texts.context,
                               texts.kept + first);
  return reason(drawn ? on::copy(exec(place), Drawn(texts.chosen + first, logits, vocabulary), Behind(texts, first), count, 1) : drawn);
}

const char* guess(const Place& place, const Texts& texts, const Guesses& guesses) {
  return reason(on::copy(exec(place), k::per_row(guesses.given), Guessed(texts, guesses), guesses.rows, 1));
}

const char* verify(const Place& place, const Choice& how, const float* logits, int64_t vocabulary, int64_t tokens, const Texts& texts, const Guesses& guesses) {
  const k::Status sampled = draw(place, how, logits, vocabulary, tokens, texts.chosen, guesses.rows, guesses.seeds, guesses.steps, texts.history, 0, guesses.lengths);
  const Drawn drawn(texts.chosen, logits, vocabulary);
  return reason(sampled ? on::copy(exec(place), drawn, Verified(texts, guesses, drawn), 1, 1) : sampled);
}

}  // namespace

extern const RowCalls CALLS;
const RowCalls CALLS = {TEXT(UNIT), kNeeds, kActivations, embed,     norm, add_norm, encode, rotate,
                        read_all,   route,  combine,      add_gated, cap,  choose,   guess,  verify};
