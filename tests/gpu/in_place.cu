// What may stand where (docs/memory.md): results over what they are made of have the bits that they have elsewhere, and
// overlaps that pointers tell are refused.
#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>
#include <kernels/rope.h>

#include "support/gpu.cuh"

using namespace test;

namespace {

template <class T>
bool same_bits(Device<T>& a, Device<T>& b) {
  a.download();
  b.download();
  return a.bytes() == b.bytes();
}

void refused(const k::Status& status, const char* words) {
  INFO(text(status));
  CHECK(status.code() == k::Code::invalid);
  CHECK(std::string(status.reason()).find(words) != std::string::npos);
}

}  // namespace

TEST_CASE("in place: the result of a row operation over what its tee wrote") {
  for (const int64_t cols : {int64_t(48), int64_t(1000), int64_t(12288), int64_t(20001)}) {
    const int64_t rows = 5;
    Device<float> x(rows, cols, cols);
    randomize(x, 1);
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<float> copy(rows, cols, cols), apart(rows, cols, cols), over(rows, cols, cols);
      const auto in = k::load(x.data(), cols) | k::scale(2);
      REQUIRE(k::layernorm(ex, in | k::tee(copy.data(), cols), k::store(apart.data(), cols), rows, cols, k::LayerNorm{},
                           policy));
      REQUIRE(k::layernorm(ex, in | k::tee(over.data(), cols), k::store(over.data(), cols), rows, cols, k::LayerNorm{},
                           policy));
      wait(ex);
      CHECK(same_bits(apart, over));
    });
  }
}

TEST_CASE("in place: rows and copies that overlap otherwise are refused") {
  Stream stream;
  Device<float> x(8, 64, 64);
  Device<int32_t> positions(1, 8, 8);
  Device<float> frequencies(1, 16, 16);
  float* const p = x.data();
  const auto in = k::load(p, 64);
  refused(k::softmax(stream, in, k::store(p + 4, 64), 8, 32), "out overlaps in");
  refused(k::softmax(stream, in, k::store(p, 32), 8, 32), "out overlaps in");
  refused(k::layernorm(stream, in, k::scale(2) | k::store(reinterpret_cast<k::half*>(p), 128), 8, 32),
          "out overlaps in");
  refused(k::copy(stream, k::load(p, 0), k::store(p, 64), 8, 32), "out overlaps in");
  refused(k::copy(stream, in | k::rope(positions.data(), frequencies.data(), 32), k::store(p, 64), 8, 32),
          "out overlaps in");
  CHECK(k::copy(stream, in | k::scale(2), k::store(p, 64), 8, 32));
  CHECK(k::copy(stream, in, k::store(p + 32, 64), 8, 32));
  stream.wait();
}

TEST_CASE("in place: products do not write what they read, and take null operands where K is 0") {
  Stream stream;
  const int64_t n = 72;
  Device<k::half> memory(400, 256, 256);
  k::half* const p = memory.data();
  const auto x = k::load(p, 256), w = k::load(p + 128 * 256, 256);
  refused(k::matmul(stream, x, w, k::store(p + 8, 256), {16, n, 64}), "matmul: out overlaps x");
  refused(k::matmul(stream, x, w, k::store(p + 130 * 256, n), {16, n, 64}), "matmul: out overlaps w");
  const k::half* const none = nullptr;
  const float* const no_floats = nullptr;
  const uint32_t* const no_words = nullptr;
  for (const int64_t m : {1, 2, 5, 40, 300}) {
    INFO("M = " << m);
    Device<float> a(m, n, n), b(m, n, n), c(m, n, n), d(m, n, n);
    REQUIRE(k::matmul(stream, k::load(none, 0), k::load(none, 0), k::shift(1) | k::store(a.data(), n), {m, n, 0}));
    REQUIRE(k::matmul(stream, k::load(no_floats, 0), k::load(no_floats, 0), k::shift(1) | k::store(b.data(), n),
                      {m, n, 0}));
    REQUIRE(k::matmul(stream, k::load(none, 0), k::int4(no_words, 0), k::shift(1) | k::store(c.data(), n), {m, n, 0}));
    REQUIRE(k::matmul(stream, k::normed(k::load(none, 0), k::RmsNorm{}), k::load(none, 0),
                      k::shift(1) | k::store(d.data(), n), {m, n, 0}));
    stream.wait();
    for (Device<float>* y : {&a, &b, &c, &d}) {
      y->download();
      bool ones = y->intact();
      for (int64_t i = 0; i < m * n; ++i) ones = ones && y->get(i / n, i % n) == 1.f;
      CHECK(ones);
    }
  }
}

namespace {

template <class T>
void attention_in_place(int64_t heads, int64_t kv_heads, int64_t dim, int64_t q_len) {
  Stream stream;
  const int64_t batch = 2, keys = 190, cols = heads * dim;
  INFO(heads << " heads of " << dim << ", " << kv_heads << " of keys, " << q_len << " queries");
  Device<T> q(batch * q_len, cols, cols + 8), apart(batch * q_len, cols, cols + 8),
      key(batch * keys, kv_heads * dim, kv_heads * dim), value(batch * keys, kv_heads * dim, kv_heads * dim);
  randomize(q, 1);
  randomize(key, 2);
  randomize(value, 3);
  const auto kv = k::dense_kv(k::nhd(key.data(), keys, kv_heads, dim), k::nhd(value.data(), keys, kv_heads, dim), keys);
  const k::AttentionShape shape{batch, q_len, heads, kv_heads, dim};
  const auto in = k::load(q.data(), q.ld());
  const k::Exec ex{stream};
  if (q_len > 32) {
    REQUIRE(k::attention(ex, in, kv, k::store(apart.data(), apart.ld()), shape, k::causal()));
    REQUIRE(k::attention(ex, in, kv, k::store(q.data(), q.ld()), shape, k::causal()));
  } else {
    const size_t bytes = k::decode_workspace_bytes(ex, shape);
    Device<float> memory(1, int64_t(bytes / 4), int64_t(bytes / 4));
    const k::Workspace workspace{memory.data(), bytes};
    REQUIRE(k::decode<256>(ex, in, kv, k::store(apart.data(), apart.ld()), shape, k::causal(), workspace));
    REQUIRE(k::decode<256>(ex, in, kv, k::store(q.data(), q.ld()), shape, k::causal(), workspace));
    stream.wait();
  }
  stream.wait();
  CHECK(same_bits(q, apart));
  refused(k::attention(ex, in, kv, k::store(q.data() + 8, q.ld()), shape, k::causal()), "attention: out overlaps q");
  stream.wait();
}

}  // namespace

TEST_CASE("in place: results of attention over the queries") {
  attention_in_place<k::half>(4, 4, 64, 150);
  attention_in_place<k::half>(4, 2, 128, 70);
  attention_in_place<k::half>(4, 1, 256, 40);
  attention_in_place<float>(4, 2, 128, 70);
  attention_in_place<k::half>(8, 2, 128, 1);
  attention_in_place<k::half>(4, 1, 256, 5);
  attention_in_place<float>(4, 2, 128, 3);
}

TEST_CASE("in place: results of attention over queries whose blocks read them again are refused") {
  Stream stream;
  Device<k::half> q(8, 512, 512), kv_rows(16, 512, 512);
  const auto kv = k::dense_kv(k::nhd(kv_rows.data(), 16, 1, 512), k::nhd(kv_rows.data(), 16, 1, 512), 16);
  refused(k::attention(stream, k::load(q.data(), 512), kv, k::store(q.data(), 512), {1, 4, 1, 1, 512}, k::no_mask()),
          "256 columns");
  const auto apart = k::heads(512, 512, 4 * 512).batches(4, 8 * 512);  // (batch, heads, length, dim)
  refused(
      k::attention(stream, k::load(q.data(), apart), kv, k::store(q.data(), apart), {1, 4, 2, 1, 512}, k::no_mask()),
      "256 columns");
  refused(k::attention(stream, k::load(q.data(), apart), kv, k::store(q.data(), k::heads(512, 1024, 512)),
                       {1, 4, 2, 1, 512}, k::no_mask()),
          "not element for element");
}

TEST_CASE("in place: merged states over the first part") {
  Stream stream;
  const int64_t parts = 3, tokens = 40, heads = 2, dim = 64, width = heads * dim;
  Device<float> o(parts * tokens, width, width + 8), lse(parts * tokens, heads, heads), apart(tokens, width, width);
  randomize(o, 1);
  randomize(lse, 2);
  const k::MergeShape shape{parts, tokens, heads, dim};
  const auto merge = [&](const auto& sink) {
    return k::merge_states(stream, k::load(o.data(), o.ld()), k::load(lse.data(), heads), sink, shape);
  };
  refused(merge(k::store(o.data() + tokens * o.ld(), o.ld())), "merge_states: out overlaps o");
  refused(merge(k::store(lse.data(), width)), "merge_states: out overlaps lse");
  REQUIRE(merge(k::store(apart.data(), width)));
  REQUIRE(merge(k::store(o.data(), o.ld())));
  stream.wait();
  o.download();
  apart.download();
  bool same = o.intact() && apart.intact();
  for (int64_t i = 0; i < tokens * width; ++i)
    same = same && o.get(i / width, i % width) == apart.get(i / width, i % width);
  CHECK(same);
}
