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

namespace {

// Lets the next kernel begin, and copies 300 us later.
__global__ void copy_behind_next(const uint4* from, uint4* to, int64_t n) {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  uint64_t begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begun < 300000);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}

// Caches of four sequences, in one piece of memory: keys, values and, if there are any, their scales.
template <class T>
struct Caches {
  int64_t dim, heads = 2, capacity = 320;
  bool pages = false;
  std::vector<int32_t> lengths = {300, 41, 17, 1};
  int64_t sequences() const { return int64_t(lengths.size()); }
  int64_t codes() const { return sequences() * capacity * heads * dim * int64_t(sizeof(T)); }
  int64_t scales() const { return sequences() * capacity * heads * int64_t(sizeof(float)); }
  int64_t bytes() const { return 2 * (codes() + scales()); }

  // f(view) of what lies at p, whose pages, if it has any, are those of the table.
  template <class F>
  auto with(unsigned char* p, const int32_t* at, const int32_t* table, const F& f) const {
    const int64_t each = pages ? 16 : capacity;
    const auto side = [&](int64_t i) {
      const auto tensor = k::nhd(reinterpret_cast<T*>(p + i * codes()), each, heads, dim);
      auto* const factors = reinterpret_cast<float*>(p + 2 * codes() + i * scales());
      if constexpr (std::is_same<T, int8_t>::value) return tensor.scales(factors, each * heads, heads, 1);
      else return (void)factors, tensor;
    };
    if (pages) return f(k::paged_kv(side(0), side(1), k::pages(table, capacity / 16, 16), at));
    return f(k::dense_kv(side(0), side(1), at));
  }
  // Of a sequence's pages number i: they lie apart, and backwards.
  int32_t page(int64_t sequence, int64_t i) const {
    return int32_t((capacity / 16 - 1 - i) * sequences() + sequence);
  }
  // Where key number i of a sequence lies.
  int64_t place(int64_t sequence, int64_t i) const {
    return pages ? page(sequence, i / 16) * 16 + i % 16 : sequence * capacity + i;
  }
  // Numbers of the type, and scales.
  void fill(Device<unsigned char>& m) const {
    for (int64_t i = 0; i < bytes(); ++i) {
      const uint32_t random = uint32_t(i) * 2654435761u;
      m.set(0, i, (unsigned char)(i < 2 * codes() ? random >> 24 & (sizeof(T) == 2 && i % 2 == 1 ? 0xbb : 0xbf) : 0));
    }
    for (int64_t i = 0; i < 2 * sequences() * capacity * heads; ++i) {
      const float scale = 0.01f + 0.001f * float(i % 7);
      for (int64_t j = 0; j < 4; ++j)
        m.set(0, 2 * codes() + i * 4 + j, reinterpret_cast<const unsigned char*>(&scale)[j]);
    }
  }
  // The last n of each sequence become NaN: of int8 their scales.
  void forget(Device<unsigned char>& m, int64_t n) const {
    const int64_t row = heads * dim * int64_t(sizeof(T)), row_scales = heads * 4;
    for (int64_t b = 0; b < sequences(); ++b) {
      const int64_t length = lengths[size_t(b)];
      for (int64_t key = std::max<int64_t>(0, length - n); key < length; ++key) {
        for (int64_t side = 0; side < 2; ++side) {
          const int64_t codes_at = side * codes() + place(b, key) * row,
                        scales_at = 2 * codes() + side * scales() + place(b, key) * row_scales;
          for (int64_t i = 0; i < row; ++i) m.set(0, codes_at + i, 0xff);
          for (int64_t i = 0; i < row_scales; ++i) m.set(0, scales_at + i, 0xff);
        }
      }
    }
  }
};

// Decodes while the kernel ahead is still to bring the last n keys.
template <class T>
void check_new_keys(const char* name, int64_t dim, bool pages) {
  Stream stream;
  Caches<T> caches{dim};
  caches.pages = pages;
  const OnDevice<int32_t> lengths(caches.lengths);
  std::vector<int32_t> entries;
  const int64_t of_each = caches.capacity / 16, count = caches.sequences() * of_each;
  for (int64_t i = 0; i < count; ++i) entries.push_back(caches.page(i / of_each, i % of_each));
  const OnDevice<int32_t> table(entries);
  const int64_t bytes = caches.bytes();
  Device<unsigned char> whole(1, bytes, bytes), stale(1, bytes, bytes), used(1, bytes, bytes);
  caches.fill(whole), whole.upload();
  for (const int64_t n : {1, 3}) {
    const int64_t heads = 8, width = heads * dim, rows = caches.sequences() * n;
    const k::AttentionShape shape{caches.sequences(), n, heads, caches.heads, dim};
    const Matrix<k::half> q(6, rows, width, width, 0, 1);
    const int64_t room = int64_t(k::decode_workspace_bytes(stream, shape));
    Device<unsigned char> memory(1, room, room);
    caches.fill(stale), caches.forget(stale, n), stale.upload();
    for (const int64_t most : {0, 300}) {
      Device<float> out(rows, width, width);
      const auto decode = [&](Device<unsigned char>& from, bool early, bool constant, int64_t said = 0) {
        caches.with(from.data(), lengths.data(), table.data(), [&](const auto& kv) {
          auto options = k::Attention{}.most_keys(most);
          if (early) options.new_keys(said);
          CHECK(k::decode<128>(k::Exec(stream).programmatic(early).constant_weights(constant),
                               k::load(static_cast<const k::half*>(q.data()), width), kv, k::store(out.data(), width),
                               shape, k::window(250, 0), k::Workspace{memory.data(), size_t(room)}, options));
        });
      };
      decode(whole, false, false);
      stream.wait();
      out.download();
      const auto want = out.bytes();
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < width; ++c) REQUIRE(std::isfinite(out.get(r, c)));
      }
      // No more keys are new than were said to be.
      for (const int64_t said : {n, n + 20, int64_t(1) << 32, std::numeric_limits<int64_t>::max()}) {
        for (const int how : {0, 1, 2, 3}) {
          const bool constant = how / 2 == 1, graph = how % 2 == 1;
          INFO(name << ", heads of " << dim << ", " << n << " new keys (" << said << "), at most " << most
                    << (graph ? ", in a graph" : "") << (constant ? ", constant weights" : ""));
          check_cuda(cudaMemcpyAsync(used.data(), stale.data(), size_t(bytes), cudaMemcpyDeviceToDevice, stream));
          check_cuda(cudaMemsetAsync(out.data(), 0xff, size_t(rows * width) * sizeof(float), stream));
          run_in(stream, graph, [&] {
            copy_behind_next<<<1, 256, 0, stream>>>(reinterpret_cast<const uint4*>(whole.data()),
                                                    reinterpret_cast<uint4*>(used.data()), bytes / 16);
            check_cuda(cudaGetLastError());
            decode(used, true, constant, said);
          });
          out.download();
          CHECK(out.bytes() == want);
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("early: keys and values that the kernel ahead brings, beside old ones that are read before") {
  check_new_keys<k::half>("half", 64, false);
  check_new_keys<k::half>("half", 72, false);
  check_new_keys<k::half>("half in pages", 128, true);
  check_new_keys<k::float8_e4m3>("e4m3", 128, false);
  check_new_keys<int8_t>("int8", 64, false);
  check_new_keys<int8_t>("int8 in pages", 72, true);
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
