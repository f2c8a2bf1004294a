// Norms of heads on the CPU.
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/norm_heads.h>

#include "support/attention.h"
#include "support/norm_heads.h"
#include "support/threads.h"

using namespace test;

namespace {
const auto run = [](const auto& in, const auto& out, const k::HeadShape& shape, const auto& options) {
  return k::cpu::norm_heads(on_threads(2), in, out, shape, options);
};
}  // namespace

TEST_CASE("queries, keys and values of one buffer") {
  Tally t;
  for (const HeadCase& c : head_cases()) {
    check_norm_heads<k::bfloat16, HostMemory>(t, c, c.turn.head_dim == 256, run);
    check_norm_heads<float, HostMemory>(t, c, false, run);
  }
  CHECK_TALLY(t);
}

TEST_CASE("codes of heads, with the scales that are found for them") {
  Tally t;
  for (const HeadCase& c : head_cases()) {
    if (c.in_place) continue;
    check_found_heads<k::bfloat16, int8_t, float, HostMemory>(t, c, run);
    check_found_heads<float, k::float8_e4m3, k::half, HostMemory>(t, c, run);
  }
  CHECK_TALLY(t);
}

TEST_CASE("heads normalized as they are read") {
  Tally t;
  for (const HeadCase& c : head_cases()) {
    check_normed_heads<k::half, HostMemory>(t, c, [](const auto& in, const auto& out, int64_t rows, int64_t cols) {
      return k::cpu::copy(on_threads(2), in, out, rows, cols);
    });
  }
  CHECK_TALLY(t);
  // As queries of attention: the bits of those that were normalized ahead.
  const AttentionCase c{{12}, {50}, 4, 2, 32};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
  const Turning turn(32, 32, false, 12);
  const RandomMatrix<float> weight(3, 1, 32, 32);
  AttentionData<> ahead(c), fused(c);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), 50);
  const auto queries = [&](const AttentionData<>& data) {
    return k::normed_heads(data.source(), 32, 1e-6) |
           k::affine(k::each_head(static_cast<const float*>(weight.data()), 32)) | turn.map();
  };
  std::vector<float> made(12 * 128);
  CHECK(k::cpu::copy(k::cpu::Exec{1}, queries(ahead), k::store(made.data(), 128), 12, 128));
  CHECK(k::cpu::attention(on_threads(2), k::load(made.data(), 128), kv, ahead.sink(), ahead.shape(), k::causal()));
  CHECK(k::cpu::attention(on_threads(2), queries(fused), kv, fused.sink(), fused.shape(), k::causal()));
  ahead.o.download();
  fused.o.download();
  CHECK(ahead.o.bytes() == fused.o.bytes());
}

TEST_CASE("heads without rope, and LayerNorm") {
  Tally t;
  check_plain_heads<float, HostMemory>(t, run);
  CHECK_TALLY(t);
}

TEST_CASE("rows that are no numbers, and a head of zeros") {
  const int64_t dim = 8;
  std::vector<float> x(4 * dim, 0.f), y(x.size());
  x[dim + 3] = NAN, x[2 * dim] = INFINITY, x[3 * dim + 1] = 1e-40f;
  CHECK(k::cpu::norm_heads(k::cpu::Exec{1}, k::load(x.data(), 4 * dim), k::store(y.data(), 4 * dim), {1, 4, dim, 4}));
  for (int64_t i = 0; i < dim; ++i) {
    const size_t at = size_t(i);
    CHECK(y[at] == 0.f);
    CHECK(y[dim + at] != y[dim + at]);
    CHECK((i == 0 ? y[2 * dim + at] != y[2 * dim + at] : y[2 * dim + at] == 0.f));
    CHECK(std::fabs(y[3 * dim + at]) < 1e-36f);
  }
  // Heads that are not normed pass as they are, the sign of zero included.
  x[0] = -0.f;
  CHECK(k::cpu::norm_heads(k::cpu::Exec{1}, k::load(x.data(), 4 * dim), k::store(y.data(), 4 * dim), {1, 4, dim, 0}));
  CHECK(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

TEST_CASE("what norm_heads refuses, and why") {
  std::vector<float> memory(4096);
  float* const p = memory.data();
  const int32_t positions[] = {0, 1, 2};
  const auto reason = [&](const k::HeadShape& shape, const auto& out, const k::RmsNorm& options = {}) {
    const k::Status status =
        k::cpu::norm_heads(k::cpu::Exec{1}, k::load(static_cast<const float*>(p), 64), out, shape, options);
    return std::string(status.reason());
  };
  const auto out = k::store(p + 2048, 64);
  CHECK(reason({2, 4, 16, 3}, out) == "ok");
  CHECK(reason({0, 4, 16, 3}, out) == "ok");
  CHECK(reason({2, 0, 16, 0}, out) == "ok");
  CHECK(reason({-1, 4, 16, 3}, out) == "norm_heads: tokens is negative");
  CHECK(reason({2, -4, 16, 3}, out) == "norm_heads: heads is negative");
  CHECK(reason({2, 4, 16, -1}, out) == "norm_heads: normed is negative");
  CHECK(reason({2, 4, 15, 3}, out) == "norm_heads: dim is odd, or less than 2");
  CHECK(reason({2, 4, 258, 3}, out) == "norm_heads: dim exceeds 256");
  CHECK(reason({2, 4, 16, 5}, out) == "norm_heads: normed exceeds heads");
  CHECK(reason({2, int64_t(1) << 29, 16, 5}, out) == "norm_heads: heads x dim exceeds 2^30");
  CHECK(reason({2, 4, 16, 3}, out, k::RmsNorm{}.eps(-1)) == "norm_heads: eps is negative or NaN");
  CHECK(reason({2, 4, 16, 3}, k::store(static_cast<float*>(nullptr), 64)) ==
        "norm_heads: out: store: the pointer is null");
  CHECK(reason({2, 4, 16, 3}, k::store(p + 8, 64)) == "norm_heads: out overlaps in, and not element for element");
  CHECK(reason({2, 4, 16, 3}, k::affine(k::each_head(p, 24)) | out) ==
        "norm_heads: out: affine: gamma: each_head: the columns are no whole heads of dim");
  CHECK(reason({2, 4, 16, 3}, k::affine(k::each_head(static_cast<const float*>(nullptr), 16)) | out) ==
        "norm_heads: out: affine: gamma: the pointer to a vector is null");
  const auto turned = [&](int dim) { return k::rope(positions, p, dim) | out; };
  CHECK(reason({2, 4, 16, 3}, turned(16)) == "ok");
  CHECK(reason({2, 4, 16, 3}, turned(8)) == "ok");
  CHECK(reason({2, 4, 16, 3}, turned(32)) ==
        "norm_heads: out: the columns of qkv(), or the heads of rope(), are no whole heads of dim");
  const auto read = [&](int64_t dim, double eps) {
    return std::string(
        k::cpu::copy(k::cpu::Exec{1}, k::normed_heads(k::load(static_cast<const float*>(p), 64), dim, eps), out, 2, 64)
            .reason());
  };
  CHECK(read(16, 0) == "ok");
  CHECK(read(24, 0) == "copy: in: normed_heads: the columns are no whole heads of dim");
  CHECK(read(0, 0) == "copy: in: normed_heads: the columns are no whole heads of dim");
  CHECK(read(16, -1) == "copy: in: normed_heads: eps is negative or NaN");
  CHECK(std::string(k::cpu::copy(k::cpu::Exec{1}, k::normed_heads(k::load(static_cast<const float*>(p), 64), 16),
                                 k::store(p, 64), 2, 64)
                        .reason()) == "copy: out overlaps in, and not element for element");
  const auto split = [&](int64_t q) { return k::qkv(turned(8), q, turned(8), 56 - q, k::store(p + 2048, 64), 8); };
  CHECK(reason({2, 4, 16, 3}, split(24)) ==
        "norm_heads: out: the columns of qkv(), or the heads of rope(), are no whole heads of dim");
}
