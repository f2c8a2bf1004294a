// Norms of heads, rotary positions and appending behind the product of queries, keys and values. What is timed is named
//   norm_heads/<tokens>x<heads>/<heads of keys>x<columns of a head>/<who>
// for bfloat16, in microseconds of a call within a graph. who: copy, which copies the same bytes, the yardstick;
// kernels, norm_heads() in one launch; pieces, the same in five: a norm for queries and one for keys, rope for either,
// and a copy of values; codes, one launch into caches of int8 whose scales it finds, and codes_pieces, three copies for
// that, which normalize what they read; for one token also product, that of a model with 4096 columns, and
// product_kernels, product_pieces, both together. Buffers are rotated beyond the L2, results stay in it.
#include <kernels/append.h>
#include <kernels/elementwise.cuh>
#include <kernels/heads.h>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/rope.h>

#include "support/gpu_bench.cuh"

namespace k = kernels;
using T = k::bfloat16;

namespace {

constexpr int64_t kModel = 4096, kPositions = 64;

class Case : public bench::CaseBase {
 public:
  Case(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim)
      : CaseBase("norm_heads", std::to_string(tokens) + "x" + std::to_string(heads),
                 std::to_string(kv_heads) + "x" + std::to_string(dim),
                 2.0 * double(tokens) * double((heads + 2 * kv_heads) * dim * int64_t(sizeof(T))), "share_of_copy"),
        tokens_(tokens),
        heads_(heads),
        kv_heads_(kv_heads),
        dim_(dim),
        nq_(heads * dim),
        nk_(kv_heads * dim),
        cols_(nq_ + 2 * nk_) {
    sets_ = std::min(sets_, 64);
    for (int i = 0; i < sets_; ++i) qkv_.push_back(buffer<T>(size_t(tokens * cols_)));
    weight_ = buffer<T>(size_t(dim));
    q_ = bench::arena().reserve<T>(size_t(tokens * nq_));
    turned_ = bench::arena().reserve<T>(size_t(tokens * cols_));
    keys_ = bench::arena().reserve<T>(size_t(tokens * kPositions * nk_));
    values_ = bench::arena().reserve<T>(size_t(tokens * kPositions * nk_));
    for (int i = 0; i < 2; ++i) {
      codes_[i] = bench::arena().reserve<int8_t>(size_t(tokens * kPositions * nk_));
      scales_[i] = bench::arena().reserve<float>(size_t(tokens * kPositions * kv_heads));
    }
    positions_ = bench::arena().reserve<int32_t>(size_t(tokens));
    frequencies_ = bench::arena().reserve<float>(size_t(dim / 2));
    if (tokens == 1) {
      x_ = buffer<T>(size_t(kModel));
      for (int i = 0; i < 8; ++i) w_.push_back(buffer<T>(size_t(cols_ * kModel)));
    }
  }
  void start() {
    add("copy", [this](benchmark::State& state) { report(state, yardstick_); });
    add("kernels", [this](benchmark::State& state) {
      measure(state, sets_, [this](cudaStream_t s, int i) { fused(s, qkv_[size_t(i)]); });
    });
    add("pieces", [this](benchmark::State& state) {
      measure(state, sets_, [this](cudaStream_t s, int i) { pieces(s, qkv_[size_t(i)]); });
    });
    add("codes", [this](benchmark::State& state) {
      measure(state, sets_, [this](cudaStream_t s, int i) { codes(s, qkv_[size_t(i)]); });
    });
    add("codes_pieces", [this](benchmark::State& state) {
      measure(state, sets_, [this](cudaStream_t s, int i) { codes_pieces(s, qkv_[size_t(i)]); });
    });
    if (tokens_ > 1) return;
    const int weights = int(w_.size());
    add("product",
        [=](benchmark::State& state) { measure(state, weights, [this](cudaStream_t s, int i) { product(s, i); }); });
    add("product_kernels", [=](benchmark::State& state) {
      measure(state, weights, [this](cudaStream_t s, int i) { product(s, i), fused(s, qkv_[0]); });
    });
    add("product_pieces", [=](benchmark::State& state) {
      measure(state, weights, [this](cudaStream_t s, int i) { product(s, i), pieces(s, qkv_[0]); });
    });
  }

 private:
  static void must(const k::Status& status) {
    if (!status) std::fprintf(stderr, "%s\n", status.reason()), std::exit(1);
  }
  bench::Timing measure_yardstick() const override {
    return bench::copy_us(
        sets_, [this](int i) { return qkv_[size_t(i)]; }, [this](int) { return turned_; }, size_t(bytes_ / 2),
        bench::calls_for(bytes_));
  }
  template <class Call>
  void measure(benchmark::State& state, int sets, const Call& call) {
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < tokens_; ++i) positions.push_back(int32_t(i % kPositions));
    std::vector<float> frequencies(size_t(dim_ / 2));
    k::rope_frequencies(frequencies.data(), int(dim_), 1e6);
    BENCH_CHECK(cudaMemcpy(positions_, positions.data(), positions.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    BENCH_CHECK(
        cudaMemcpy(frequencies_, frequencies.data(), frequencies.size() * sizeof(float), cudaMemcpyHostToDevice));
    const bench::Timing time = bench::time_us(sets, call, bench::calls_for(bytes_));
    if (sets == sets_) return report(state, time);
    bench::put(state, time);  // weights are no part of the yardstick
  }

  k::Rope rope() const { return k::rope(positions_, frequencies_, int(dim_)); }
  auto kv() const {
    return k::dense_kv(k::nhd(keys_, kPositions, kv_heads_, dim_), k::nhd(values_, kPositions, kv_heads_, dim_),
                       kPositions);
  }
  void product(cudaStream_t s, int i) const {
    must(k::matmul(s, k::load(static_cast<const T*>(x_), kModel), k::load(static_cast<const T*>(w_[size_t(i)]), kModel),
                   k::store(qkv_[0], cols_), {1, cols_, kModel}));
  }
  void fused(cudaStream_t s, const T* qkv) const {
    const auto norm = k::affine(k::each_head(static_cast<const T*>(weight_), dim_)) | rope();
    const k::AppendAt at(positions_);
    must(k::norm_heads(s, k::load(qkv, cols_),
                       k::qkv(norm | k::store(q_, nq_), nq_, norm | k::append_keys(kv(), at, dim_), nk_,
                              k::append_values(kv(), at, dim_), nk_),
                       {tokens_, heads_ + 2 * kv_heads_, dim_, heads_ + kv_heads_}));
  }
  auto side_of_codes(int i) const {
    return k::nhd(codes_[i], kPositions, kv_heads_, dim_)
        .scales(static_cast<const float*>(scales_[i]), kPositions * kv_heads_, kv_heads_, 1);
  }
  void codes(cudaStream_t s, const T* qkv) const {
    const auto norm = k::affine(k::each_head(static_cast<const T*>(weight_), dim_)) | rope();
    const auto cache = k::dense_kv(side_of_codes(0), side_of_codes(1), kPositions);
    const k::AppendAt at(positions_);
    must(k::norm_heads(s, k::load(qkv, cols_),
                       k::qkv(norm | k::store(q_, nq_), nq_, norm | k::append_keys(cache, at, dim_, scales_[0]), nk_,
                              k::append_values(cache, at, dim_, scales_[1]), nk_),
                       {tokens_, heads_ + 2 * kv_heads_, dim_, heads_ + kv_heads_}));
  }
  void codes_pieces(cudaStream_t s, const T* qkv) const {
    const auto cache = k::dense_kv(side_of_codes(0), side_of_codes(1), kPositions);
    const k::AppendAt at(positions_);
    const auto normed = [&](const T* from) {
      return k::normed_heads(k::load(from, cols_), dim_) |
             k::affine(k::each_head(static_cast<const T*>(weight_), dim_)) | rope();
    };
    must(k::copy(s, normed(qkv), k::store(q_, nq_), tokens_, nq_));
    must(k::copy(s, normed(qkv + nq_), k::append_keys(cache, at, dim_, scales_[0]), tokens_, nk_));
    must(k::copy(s, k::load(qkv + nq_ + nk_, cols_), k::append_values(cache, at, dim_, scales_[1]), tokens_, nk_));
  }
  void pieces(cudaStream_t s, const T* qkv) const {
    const k::AppendAt at(positions_);
    const auto norm = [&](const T* from, T* to, int64_t heads) {
      // Rows are heads here.
      must(k::rmsnorm(s, k::load(from, k::heads(dim_, dim_, 0).batches(heads, cols_)),
                      k::affine(static_cast<const T*>(weight_)) | k::store(to, dim_), tokens_ * heads, dim_));
    };
    T* const keys = turned_ + tokens_ * nq_;
    norm(qkv, turned_, heads_);
    norm(qkv + nq_, keys, kv_heads_);
    must(k::copy(s, k::load(static_cast<const T*>(turned_), nq_) | rope(), k::store(q_, nq_), tokens_, nq_));
    must(k::copy(s, k::load(static_cast<const T*>(keys), nk_) | rope(), k::append_keys(kv(), at, dim_), tokens_, nk_));
    must(k::copy(s, k::load(qkv + nq_ + nk_, cols_), k::append_values(kv(), at, dim_), tokens_, nk_));
  }

  int64_t tokens_, heads_, kv_heads_, dim_, nq_, nk_, cols_;
  std::vector<T*> qkv_, w_;
  T *weight_, *x_ = nullptr, *q_, *turned_, *keys_, *values_;
  int32_t* positions_;
  float* frequencies_;
  int8_t* codes_[2];
  float* scales_[2];
};

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t tokens : {1, 32, 1024, 8192}) {
    std::make_shared<Case>(tokens, 32, 8, 128)->start();                 // Qwen3-8B
    if (tokens <= 1024) std::make_shared<Case>(tokens, 8, 4, 256)->start();  // Gemma-3-4B
  }
  return bench::run(argc, argv, {});
}
