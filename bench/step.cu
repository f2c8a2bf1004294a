// A step of a language model as an engine takes it: all calls of several layers in one graph, each layer with weights
// and a cache of its own, beside a kernel that reads the same bytes. A product that is chained with itself hides what
// stands between different kernels: their beginnings and ends, and the multiprocessors' division of shared memory and
// L1. Times are of one layer. What is timed is named
//   step/<model>/<texts>x<keys>/<who>        a token of each text, with so many keys before it
//   step/<model>-<codes>/<texts>x<keys>/<who>  the same with weights of fewer bits: e4m3 and int8 with a scale for each
//                                              row, int4 for 32
//   prompt/<model>/<tokens>x<keys>/<who>     so many tokens of one text, the last of which has so many keys before it
// who: read, the yardstick (of weights, and of keys and values); kernels, one after the other; kernels_early, launched
// programmatically with weights asked for early; and the latter without a part, which says what that part takes in such
// company: without_qkv and so on. The calls are those of examples/llm: with one token [norm + QKV + RoPE + append],
// [attention], [output + residual], [norm + gate and up], [down + residual]; with more of them, or weights that are
// decoded, norms are calls of their own.
#include <kernels/append.h>
#include <kernels/attention.cuh>
#include <kernels/matmul.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/rope.h>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

using Half = k::half;

struct Shape {
  const char* name;
  int64_t hidden, inner, heads, kv_heads, dim;

  int64_t nq() const { return heads * dim; }
  int64_t nk() const { return kv_heads * dim; }
  // Weights of a layer.
  int64_t weights() const { return hidden * (2 * nq() + 2 * nk() + 3 * inner); }
};

constexpr Shape kLlama1b = {"llama-1b", 2048, 8192, 32, 8, 64}, kMistral7b = {"mistral-7b", 4096, 14336, 32, 8, 128};

// How weights lie in memory: bytes() of n rows of d, and the source of them from a pointer on.
struct Halves {
  static constexpr const char* suffix = "";
  static constexpr bool folds = true;  // a norm into the product of one token
  static constexpr double bits = 16;
  static auto source(const char* p, int64_t, int64_t d) { return k::load(reinterpret_cast<const Half*>(p), d); }
};
template <class T>
struct RowScaled {
  static constexpr const char* suffix = std::is_same<T, int8_t>::value ? "-int8" : "-e4m3";
  static constexpr bool folds = false;
  static constexpr double bits = 8;
  static auto source(const char* p, int64_t n, int64_t d) {
    return k::dequant(k::load(reinterpret_cast<const T*>(p), d),
                      k::row_scales(reinterpret_cast<const Half*>(p + n * d)));
  }
};
struct Grouped {
  static constexpr const char* suffix = "-int4";
  static constexpr bool folds = false;
  static constexpr double bits = 4.5;
  static auto source(const char* p, int64_t n, int64_t d) {
    return k::dequant(k::int4(reinterpret_cast<const uint32_t*>(p), d),
                      k::group_scales(reinterpret_cast<const Half*>(p + n * d / 2), d / 32, 32));
  }
};

enum Part { kQkv = 1, kAttention = 2, kOutput = 4, kUp = 8, kDown = 16, kAll = 31 };

void must(const k::Status& status) {
  if (status) return;
  std::fprintf(stderr, "%s\n", status.reason());
  std::exit(1);
}

// kDim: columns of a head.
template <int kDim, class Weights = Halves>
class Case : public bench::CaseBase {
 public:
  // `each` tokens of each text.
  Case(const char* op, const Shape& s, int64_t texts, int64_t each, int64_t keys)
      : CaseBase(op, s.name + std::string(Weights::suffix), std::to_string(texts * each) + "x" + std::to_string(keys),
                 bytes_of(s.weights()) + 4.0 * double(texts * keys * s.nk()), "share_of_read"),
        s_(s),
        texts_(texts),
        each_(each),
        keys_(keys) {
    sets_ = std::max(sets_, kLayers);
    for (int i = 0; i < sets_; ++i) {
      weights_.push_back(
          reinterpret_cast<char*>(buffer<Half>(size_t(bytes_of(s.weights()) / 2) + 8 * 65536)));  // and scales of rows
      cache_.push_back(buffer<Half>(size_t(2 * texts * capacity() * s.nk())));
    }
    const int64_t rows = texts * each;
    x_ = buffer<float>(size_t(rows * s.hidden));
    gamma_ = buffer<float>(size_t(s.hidden));
    y_ = buffer<Half>(size_t(rows * s.hidden)), q_ = buffer<Half>(size_t(rows * s.nq())),
    o_ = buffer<Half>(size_t(rows * s.nq())), h_ = buffer<Half>(size_t(rows * s.inner));
    frequencies_ = bench::arena().reserve<float>(kDim / 2);
    positions_ = bench::arena().reserve<int32_t>(size_t(rows)), owners_ = bench::arena().reserve<int32_t>(size_t(rows)),
    lengths_ = bench::arena().reserve<int32_t>(size_t(texts));
    const size_t room = each == 1 ? k::decode_workspace_bytes(k::Exec{}, attention_shape()) : 0;
    workspace_ = {bench::arena().reserve<char>(room), room};
  }
  void start() {
    add("read", [this](benchmark::State& state) { report(state, measure_yardstick()); });
    who("kernels", kAll, false);
    who("kernels_early", kAll, true);
    who("without_qkv", kAll & ~kQkv, true);
    who("without_attention", kAll & ~kAttention, true);
    who("without_output", kAll & ~kOutput, true);
    who("without_up", kAll & ~kUp, true);
    who("without_down", kAll & ~kDown, true);
  }

 private:
  static constexpr int kLayers = 8;  // at least

  static double bytes_of(int64_t weights) { return double(weights) * Weights::bits / 8; }
  int64_t capacity() const { return keys_ + each_; }
  k::AttentionShape attention_shape() const { return {texts_, each_, s_.heads, s_.kv_heads, kDim}; }
  bench::Timing measure_yardstick() const override {
    return bench::read_us(
        sets_, [&](int i) { return weights_[size_t(i)]; }, size_t(bytes_),
        sets_);  // what lies behind a layer's weights stands for its keys
  }
  void who(const char* name, int parts, bool early) {
    add(name, [this, parts, early](benchmark::State& state) {
      place();
      const bench::Timing time = bench::time_us(
          sets_,
          [&](cudaStream_t stream, int i) {
            layer(k::Exec(stream).programmatic(early).constant_weights(early), early, i, parts);
          },
          sets_);
      report(state, time);
      if (each_ > 1) state.counters["TFLOP/s"] = 2e-6 * double(each_ * texts_) * double(s_.weights()) / time.us;
    });
  }
  // Angles, and where the tokens stand: the last ones of their texts.
  void place() {
    std::vector<float> frequencies(kDim / 2);
    k::rope_frequencies(frequencies.data(), kDim, 1e6);
    const std::vector<int32_t> lengths(static_cast<size_t>(texts_), int32_t(capacity()));
    const std::vector<float> gamma(static_cast<size_t>(s_.hidden), 0.01f);  // so that numbers stay in the range of half
    std::vector<int32_t> positions, owners;
    for (int64_t text = 0; text < texts_; ++text) {
      for (int64_t i = 0; i < each_; ++i) positions.push_back(int32_t(keys_ + i)), owners.push_back(int32_t(text));
    }
    BENCH_CHECK(cudaMemcpy(gamma_, gamma.data(), gamma.size() * sizeof(float), cudaMemcpyHostToDevice));
    BENCH_CHECK(
        cudaMemcpy(frequencies_, frequencies.data(), frequencies.size() * sizeof(float), cudaMemcpyHostToDevice));
    BENCH_CHECK(cudaMemcpy(positions_, positions.data(), positions.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    BENCH_CHECK(cudaMemcpy(owners_, owners.data(), owners.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    BENCH_CHECK(cudaMemcpy(lengths_, lengths.data(), lengths.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
  }

  // norm(x) as inputs of a product: applied by the product to a single token, or made before.
  template <class F>
  void with_norm(const k::Exec& ex, const F& f) const {
    const int64_t rows = texts_ * each_, d = s_.hidden;
    const auto x = k::load(static_cast<const float*>(x_), d);
    if constexpr (Weights::folds) if (rows == 1) return f(k::normed(x, k::RmsNorm{}) | k::mul(gamma_));
    must(k::rmsnorm(ex, x, k::affine(gamma_) | k::store(y_, d), rows, d));
    f(k::load(static_cast<const Half*>(y_), d));
  }

  void layer(const k::Exec& ex, bool early, int set, int parts) const {
    const int64_t rows = texts_ * each_, d = s_.hidden, nq = s_.nq(), nk = s_.nk(), inner = s_.inner;
    k::MatmulPolicy policy;
    policy.weights_ready = early;
    // As in examples/llm.
    const k::Exec products = k::Exec(ex).constant_weights(early && rows == 1),
                  attention = k::Exec(ex).constant_weights(early && (rows == 1 || Weights::bits == 16));
    const char* next = weights_[size_t(set)];
    const auto matrix = [&](int64_t n, int64_t cols) {
      const auto w = Weights::source(next, n, cols);
      next += (int64_t(bytes_of(n * cols)) + (Weights::bits == 8 ? n * int64_t(sizeof(Half)) : 0) + 255) / 256 * 256;
      return w;
    };
    const auto wq = matrix(nq, d), wk = matrix(nk, d), wv = matrix(nk, d), wo = matrix(d, nq), gate = matrix(inner, d),
               up = matrix(inner, d), down = matrix(d, inner);
    Half* const keys = cache_[size_t(set)];
    const auto view = [&](Half* p) { return k::nhd(p, capacity(), s_.kv_heads, int64_t(kDim)); };
    const auto kv =
        k::dense_kv(view(keys), view(keys + texts_ * capacity() * nk), static_cast<const int32_t*>(lengths_));
    const auto residual = k::add(k::load(static_cast<const float*>(x_), d)) | k::store(x_, d);

    if (parts & kQkv) {
      with_norm(ex, [&](const auto& y) {
        const k::Rope rope = k::rope(positions_, frequencies_, kDim);
        const k::AppendAt at(positions_, owners_);
        const auto w = k::stacked(k::paired(wq, rope), nq, k::paired(wk, rope), nk, k::plain(wv), nk);
        const auto out = k::qkv(rope | k::store(q_, nq), nq, rope | k::append_keys(kv, at, kDim), nk,
                                k::append_values(kv, at, kDim), nk);
        must(k::matmul(products, y, w, out, {rows, nq + 2 * nk, d}, policy));
      });
    }
    if (parts & kAttention) {
      const auto q = k::load(static_cast<const Half*>(q_), nq);
      const auto o = k::store(o_, nq);
      auto options = k::Attention{}.most_keys(capacity());
      if (early) options.new_keys(each_);
      if (each_ == 1) must(k::decode<kDim>(attention, q, kv, o, attention_shape(), k::causal(), workspace_, options));
      else must(k::attention<kDim>(attention, q, kv, o, attention_shape(), k::causal(), options));
    }
    if (parts & kOutput)
      must(k::matmul(products, k::load(static_cast<const Half*>(o_), nq), wo, residual, {rows, d, nq}, policy));
    if (parts & kUp) {
      with_norm(ex, [&](const auto& y) {
        must(k::matmul(products, y, k::gated(gate, up), k::swiglu() | k::store(h_, inner), {rows, inner, d}, policy));
      });
    }
    if (parts & kDown)
      must(k::matmul(products, k::load(static_cast<const Half*>(h_), inner), down, residual, {rows, d, inner}, policy));
  }

  Shape s_;
  int64_t texts_, each_, keys_;
  std::vector<char*> weights_;
  std::vector<Half*> cache_;
  float *x_, *gamma_, *frequencies_;
  Half *y_, *q_, *o_, *h_;
  int32_t *positions_, *owners_, *lengths_;
  k::Workspace workspace_;
};

template <int kDim>
void measure(const Shape& s) {
  for (const int64_t keys : {120, 4000, 16000}) std::make_shared<Case<kDim>>("step", s, 1, 1, keys)->start();
  for (const int64_t texts : {8, 32}) std::make_shared<Case<kDim>>("step", s, texts, 1, 1000)->start();
  for (const int64_t tokens : {512, 2048}) std::make_shared<Case<kDim>>("prompt", s, 1, tokens, 0)->start();
}

template <class Weights>
void measure_codes(const Shape& s) {
  std::make_shared<Case<128, Weights>>("step", s, 1, 1, 120)->start();
  for (const int64_t texts : {8, 32}) std::make_shared<Case<128, Weights>>("step", s, texts, 1, 1000)->start();
}

}  // namespace

int main(int argc, char** argv) {
  measure<64>(kLlama1b);
  measure<128>(kMistral7b);
  measure_codes<RowScaled<k::float8_e4m3>>(kMistral7b);
  measure_codes<RowScaled<int8_t>>(kMistral7b);
  measure_codes<Grouped>(kMistral7b);
  return bench::run(argc, argv, {});
}
