// Kernels that begin before those ahead of them have ended: what they may read then, and what they must wait for.
#include <kernels/append.h>
#include <kernels/elementwise.cuh>

#include "support/gpu_attention.cuh"
#include "support/gpu_products.cuh"

using namespace test;

namespace {

// Milliseconds late. What does not arrive in time is NaN, or a number of no expert.
template <class T>
void write_late(cudaStream_t stream, const Device<T>& from, const Device<T>& to) {
  const int64_t n = (from.rows() - 1) * from.ld() + from.cols();
  check_cuda(cudaMemsetAsync(to.data(), std::is_integral<T>::value ? 0 : 0xff, size_t(n) * sizeof(T), stream));
  slow_copy<<<1, 256, 0, stream>>>(static_cast<const T*>(from.data()), to.data(), n, 4000000);
  check_cuda(cudaGetLastError());
}

constexpr int64_t kWidth = 256, kOutputs = 64;

// A product of so many tokens with weights that are said to be ready.
struct Early {
  const char* name;
  int64_t tokens;
  k::Path path;
};
constexpr Early kEarly[] = {{"gemv", 1, k::Path::gemv},
                            {"skinny", 4, k::Path::skinny},
                            {"few", 24, k::Path::skinny},
                            {"gemm", 48, k::Path::gemm}};

k::Status product(const Stream& stream, const Early& which, const k::half* x, const k::half* w, float* y,
                  bool programmatic) {
  k::MatmulPolicy policy{which.path};
  policy.weights_ready = programmatic;
  return k::matmul(k::Exec(stream).programmatic(programmatic), k::load(x, kWidth), k::load(w, kWidth),
                   k::store(y, kOutputs), {which.tokens, kOutputs, kWidth}, policy);
}

}  // namespace

// The first kernel writes the weights of the third, late; the second does not. A kernel that lets its successor begin
// before it has waited itself gives NaN here.
TEST_CASE("early: weights that the kernel before the one ahead writes") {
  Stream stream;
  const int64_t most = 48;
  const Matrix<k::half> x(1, most, kWidth, kWidth, 0, 1), other(2, kOutputs, kWidth, kWidth, 0, 1);
  const Plain<k::half, DeviceMemory> w(kOutputs, kWidth, 0, 0);
  Device<k::half> late(kOutputs, kWidth, kWidth), rows(4, kWidth, kWidth);
  Device<float> between(most, kOutputs, kOutputs);
  for (const Early& behind : kEarly) {
    Device<float> y(behind.tokens, kOutputs, kOutputs);
    REQUIRE(product(stream, behind, x.data(), w.data(), y.data(), false));
    stream.wait();
    CHECK(compare(y, [&](int64_t m) {
            Row<> row;
            for (int64_t n = 0; n < kOutputs; ++n)
              row.push_back(test::product(
                  m, n, kWidth, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w,
                  units(behind.path, kWidth)));
            return row;
          }) == "");
    const std::vector<unsigned char> want = y.bytes();
    for (int ahead = 0; ahead <= 4; ++ahead) {  // after the products, rows
      for (const bool graph : {false, true}) {
        INFO(behind.name << " behind " << (ahead < 4 ? kEarly[ahead].name : "softmax")
                         << (graph ? ", in a graph" : ""));
        check_cuda(cudaMemsetAsync(y.data(), 0xff, size_t(behind.tokens * kOutputs) * sizeof(float), stream));
        run_in(stream, graph, [&] {
          write_late(stream, w, late);
          if (ahead < 4) CHECK(product(stream, kEarly[ahead], x.data(), other.data(), between.data(), true));
          else
            CHECK(k::softmax(k::Exec(stream).programmatic(true), k::load(static_cast<const k::half*>(x.data()), kWidth),
                             k::store(rows.data(), kWidth), 4, kWidth));
          CHECK(product(stream, behind, x.data(), late.data(), y.data(), true));
        });
        y.download();
        CHECK(y.bytes() == want);
      }
    }
  }
}

TEST_CASE("early: experts that the kernel before the one ahead chooses") {
  Stream stream;
  const int64_t tokens = 4, number = 6;
  const Matrix<k::half> x(1, tokens, kWidth, kWidth, 0, 1), other(2, kOutputs, kWidth, kWidth, 0, 1);
  const Plain<k::half, DeviceMemory> w(number * kOutputs, kWidth, 0, 0);
  const std::vector<int32_t> chosen = {3, 5, 1, 4};
  Device<int32_t> source(1, tokens, tokens), ids(1, tokens, tokens);
  for (int64_t t = 0; t < tokens; ++t) source.set(0, t, chosen[size_t(t)]);
  source.upload();
  Device<float> y(tokens, kOutputs, kOutputs), between(tokens, kOutputs, kOutputs);
  for (const bool graph : {false, true}) {
    INFO((graph ? "in a graph" : "in a stream"));
    check_cuda(cudaMemsetAsync(y.data(), 0xff, size_t(tokens * kOutputs) * sizeof(float), stream));
    run_in(stream, graph, [&] {
      write_late(stream, source, ids);
      CHECK(product(stream, kEarly[1], x.data(), other.data(), between.data(), true));
      k::MatmulPolicy policy;
      policy.weights_ready = true;
      CHECK(k::matmul(k::Exec(stream).programmatic(true), k::load(static_cast<const k::half*>(x.data()), kWidth),
                      k::experts(w.source(), ids.data(), kOutputs, number), k::store(y.data(), kOutputs),
                      {tokens, kOutputs, kWidth}, policy));
    });
    CHECK(compare(y, [&](int64_t m) {
            Row<> row;
            for (int64_t n = 0; n < kOutputs; ++n) {
              row.push_back(test::product(
                  m, chosen[size_t(m)] * kOutputs + n, kWidth,
                  [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w));
            }
            return row;
          }) == "");
  }
}

namespace {

// A chain of every operation, in which each reads what one ahead has written, and the last product has weights that
// were written seven kernels before.
class Chain {
 public:
  static constexpr int64_t kTokens = 2, kHeads = 4, kDim = 64, kCapacity = 300, kRow = kHeads * kDim;
  static_assert(kRow == kWidth, "a row holds all heads");

  explicit Chain(const Stream& stream)
      : stream_(stream),
        source_(3, kTokens, kRow, kRow, 0, 1),
        w_(4, kRow, kRow, kRow, 0, 0.1),
        past_(5, kTokens * kCapacity, kRow, kRow, 0, 1),
        positions_(std::vector<int32_t>{250, 40}),
        lengths_(std::vector<int32_t>{251, 41}),
        shape_{kTokens, 1, kHeads, kHeads, kDim},
        memory_(1, int64_t(k::decode_workspace_bytes(stream, shape_)),
                int64_t(k::decode_workspace_bytes(stream, shape_))) {}

  // Everything that will be written becomes NaN, but for the past in the cache.
  void forget() {
    for (Device<k::half>* m : {&x_, &h_, &r_, &q_, &o_, &merged_, &a_, &s_}) clear(*m);
    clear(lse_), clear(z_);
    for (Device<k::half>* m : {&keys_, &values_}) {
      check_cuda(cudaMemcpyAsync(m->data(), past_.data(), size_t(past_.rows() * kRow) * sizeof(k::half),
                                 cudaMemcpyDeviceToDevice, stream_));
      for (int64_t t = 0; t < kTokens; ++t) {
        check_cuda(cudaMemsetAsync(m->data() + (t * kCapacity + (t == 0 ? 250 : 40)) * kRow, 0xff,
                                   kRow * sizeof(k::half), stream_));
      }
    }
    check_cuda(cudaStreamSynchronize(stream_));
  }

  // `after` is called behind each launch.
  template <class After>
  void launch(bool programmatic, const After& after, bool constant = false) {
    const k::Exec ex = k::Exec(stream_).programmatic(programmatic).constant_weights(constant);
    const auto check = [&](const k::Status& status) {
      INFO(text(status));
      CHECK(status);
      after();
    };
    const auto in = [](const Device<k::half>& m) { return k::load(static_cast<const k::half*>(m.data()), kRow); };
    const auto out = [](Device<k::half>& m, int64_t row = 0) { return k::store(m.data() + row * kRow, kRow); };
    const auto kv = k::dense_kv(k::nhd(keys_.data(), kCapacity, kHeads, kDim),
                                k::nhd(values_.data(), kCapacity, kHeads, kDim), lengths_.data());
    const k::AppendAt at(positions_.data());
    const k::Workspace workspace{memory_.data(), size_t(memory_.cols())};
    k::MatmulPolicy ready, written_here;  // the last product's weights are written by the chain
    ready.weights_ready = programmatic;
    written_here.weights_ready = programmatic && !constant;

    write_late(stream_, source_, x_);
    after();
    check(k::layernorm(ex, in(x_), out(h_), kTokens, kRow));
    check(k::copy(ex, in(h_), k::append_keys(kv, at, kDim), kTokens, kRow));
    check(k::rmsnorm(ex, in(h_), out(r_), kTokens, kRow));
    check(k::copy(ex, in(r_), k::append_values(kv, at, kDim), kTokens, kRow));
    check(k::matmul(ex, in(r_), in(w_), out(q_), {kTokens, kRow, kRow}, ready));
    check(k::decode<kDim>(ex, in(q_), kv, out(o_), shape_, k::causal(), workspace, k::Attention{}.lse(lse_.data())));
    check(k::decode<kDim>(ex, in(o_), kv, out(o_, kTokens), shape_, k::causal(), workspace,
                          k::Attention{}.lse(lse_.data() + kTokens * kHeads)));
    check(k::merge_states(ex, in(o_), k::load(static_cast<const float*>(lse_.data()), kHeads), out(merged_),
                          {2, kTokens, kHeads, kDim}));
    check(k::attention(ex, in(merged_), kv, out(a_), shape_, k::causal()));
    check(k::softmax(ex, in(a_), out(s_), kTokens, kRow));
    check(k::matmul(ex, in(s_), in(r_), k::store(z_.data(), kTokens), {kTokens, kTokens, kRow}, written_here));
  }

  // All that was written, in the order of the chain.
  std::vector<std::vector<unsigned char>> results() {
    std::vector<std::vector<unsigned char>> all;
    for (Device<k::half>* m : {&x_, &h_, &keys_, &r_, &values_, &q_, &o_, &merged_, &a_, &s_})
      m->download(), all.push_back(m->bytes());
    lse_.download(), z_.download();
    all.push_back(lse_.bytes());
    all.push_back(z_.bytes());
    return all;
  }
  bool finite() {
    for (int64_t r = 0; r < kTokens; ++r) {
      for (int64_t c = 0; c < kTokens; ++c) {
        if (!std::isfinite(z_.get(r, c))) return false;
      }
    }
    return true;
  }

 private:
  template <class T>
  void clear(Device<T>& m) {
    check_cuda(cudaMemsetAsync(m.data(), 0xff, size_t(m.rows() * m.ld()) * sizeof(T), stream_));
  }

  const Stream& stream_;
  Matrix<k::half> source_, w_, past_;
  OnDevice<int32_t> positions_, lengths_;
  k::AttentionShape shape_;
  Device<unsigned char> memory_;
  Device<k::half> x_{kTokens, kRow, kRow}, h_{kTokens, kRow, kRow}, r_{kTokens, kRow, kRow}, q_{kTokens, kRow, kRow},
      o_{2 * kTokens, kRow, kRow}, merged_{kTokens, kRow, kRow}, a_{kTokens, kRow, kRow}, s_{kTokens, kRow, kRow},
      keys_{kTokens * kCapacity, kRow, kRow}, values_{kTokens * kCapacity, kRow, kRow};
  Device<float> lse_{2 * kTokens, kHeads, kHeads}, z_{kTokens, kTokens, kTokens};
};

}  // namespace

// What each gives when all before it has ended is what it gives when all begin early.
TEST_CASE("early: a chain of every operation, append, decode and decode on one workspace among them") {
  Stream stream;
  Chain chain(stream);
  chain.forget();
  chain.launch(false, [&] { stream.wait(); });
  const auto want = chain.results();
  CHECK(chain.finite());
  for (const int run : {0, 1, 2, 3, 4, 5, 6, 7}) {
    const bool graph = run % 2 == 1, constant = run >= 4;
    INFO((graph ? "in a graph" : "in a stream") << (constant ? ", constant weights" : ""));
    chain.forget();
    run_in(stream, graph, [&] { chain.launch(true, [] {}, constant); });
    const auto got = chain.results();
    for (size_t i = 0; i < want.size(); ++i) {
      INFO("result " << i);
      CHECK(got[i] == want[i]);
    }
  }
}

// The same without programmatic launches: copies, appends and merged states, too, can be captured.
TEST_CASE("early: the chain in a graph, one kernel after the other") {
  Stream stream;
  Chain chain(stream);
  chain.forget();
  chain.launch(false, [&] { stream.wait(); });
  const auto want = chain.results();
  chain.forget();
  run_in(stream, true, [&] { chain.launch(false, [] {}); });
  CHECK(chain.results() == want);
  CHECK(chain.finite());
}
