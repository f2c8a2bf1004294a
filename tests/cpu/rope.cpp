// Rotary positions and appending on the CPU: alone, in front of attention, and behind the product that makes queries, keys and
// values.
#include <kernels/append.h>
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/rope.h>

#include "support/attention.h"

using namespace test;

namespace {

struct Turning {
  int head_dim, rotary_dim;
  bool neighbours;
  float amplitude;
  std::vector<float> frequencies;
  std::vector<int32_t> positions;

  Turning(int dim, int rotary, bool n, int rows, float a = 1) : head_dim(dim), rotary_dim(rotary), neighbours(n), amplitude(a), frequencies(size_t(rotary / 2) + 1) {
    k::rope_frequencies(frequencies.data(), rotary, 1e4);
    for (int i = 0; i < rows; ++i) positions.push_back(int32_t(mix(uint64_t(i)) % 100000));
  }
  k::Rope map() const {
    const k::Rope r = k::rope(positions.data(), frequencies.data(), head_dim).rotary_dim(rotary_dim).amplitude(amplitude);
    return neighbours ? r.interleaved() : r;
  }
  // x(col) for a row, turned.
  template <class X>
  Real<> operator()(const X& x, int64_t row, int64_t col) const {
    const int64_t at = col % head_dim, head = col - at, half = rotary_dim / 2;
    if (at >= rotary_dim) return x(col);
    const int64_t pair = neighbours ? at / 2 : at % half;
    const Real<> a = x(head + (neighbours ? 2 * pair : pair)), b = x(head + (neighbours ? 2 * pair + 1 : pair + half));
    const double angle = double(float(positions[size_t(row)]) * frequencies[size_t(pair)]);
    const Real<> c(std::cos(angle), 4 * unit<float>), s(std::sin(angle), 4 * unit<float>);
    const bool first = neighbours ? at % 2 == 0 : at < half;
    return (first ? a * c - b * s : b * c + a * s) * Real<>(amplitude);
  }
};

std::vector<Turning> turnings(int rows) {
  return {{8, 8, false, rows}, {64, 64, false, rows}, {64, 64, true, rows}, {40, 40, false, rows}, {48, 32, false, rows, 1.25f}, {48, 12, true, rows}, {16, 6, false, rows}, {24, 0, false, rows}};
}

}  // namespace

TEST_CASE("sine and cosine") {
  Tally t;
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = float(random.normal() * std::pow(10.0, random.uniform(-6, 8)));
    float s, c;
    k::sin_cos(x, s, c);
    t.expect(std::fabs(s - std::sin(double(x))) <= 3 * unit<float> && std::fabs(c - std::cos(double(x))) <= 3 * unit<float>, "%.9g: %.9g %.9g", x, s, c);
  }
  CHECK_TALLY(t);
}

TEST_CASE("frequencies") {
  // From Hugging Face's modeling_rope_utils: Llama 3.1 (factor 8, low 1, high 4, context 8192, theta 5e5), which keeps the fast
  // pairs and divides the slow ones.
  float f[64], plain[64];
  k::rope_frequencies(plain, 128, 5e5);
  k::rope_frequencies_llama3(f, 128, 5e5, 8, 1, 4, 8192);
  CHECK(f[0] == 1.f);
  CHECK(f[20] == plain[20]);
  CHECK(f[63] == Approx(plain[63] / 8));
  k::rope_frequencies_linear(f, 128, 5e5, 4);
  CHECK(f[10] == Approx(plain[10] / 4));
  k::rope_frequencies_ntk(f, 128, 5e5, 4);
  CHECK(f[0] == 1.f);
  CHECK(f[63] == Approx(plain[63] / 4));
  CHECK(k::rope_frequencies_yarn(f, 128, 5e5, 4, 8192) == Approx(0.1 * std::log(4.0) + 1));
  CHECK(f[0] == 1.f);
  CHECK(f[63] == Approx(plain[63] / 4));
}

TEST_CASE("on a source") {
  Tally t;
  const int rows = 5, heads = 3;
  for (const Turning& turn : turnings(rows)) {
    for (const int64_t shift : {0, 1}) {
      const int64_t cols = heads * turn.head_dim;
      const RandomMatrix<float> x(1, rows, cols, cols + 3, shift);
      Guarded<float> y(rows, cols, cols + 1, shift);
      const k::Status status = k::cpu::copy(k::cpu::Exec{2}, k::load(static_cast<const float*>(x.data()), x.ld()) | k::scale(0.5) | turn.map(),
                                            k::scale(2) | k::store(y.data(), y.ld()), rows, cols);
      t.expect(status.ok(), "%s", status.reason());
      y.download();
      t.expect(y.intact(), "wrote outside");
      for (int64_t r = 0; r < rows; ++r) {
        Row<> want;
        for (int64_t c = 0; c < cols; ++c) want.push_back(turn([&](int64_t at) { return Real<>(x.value(r, at)); }, r, c));
        const std::string problem = mismatch(r, want, [&](int64_t c) { return y.get(r, c); });
        t.expect(problem.empty(), "head %d, rotary %d: %s", turn.head_dim, turn.rotary_dim, problem.c_str());
      }
    }
  }
  CHECK_TALLY(t);
}

namespace {

// The product of x with the weights of queries, keys and values, with a bias on queries; keys and values go to pages.
template <class T, class S>
void product(Tally& t, const Turning& turn, int tokens, bool scaled, bool ring) {
  const int64_t dim = turn.head_dim, heads = 4, kv_heads = 2, depth = 40, nq = heads * dim, nk = kv_heads * dim, page = 7, capacity = 35;
  const RandomMatrix<float> x(1, tokens, depth, depth), w(2, nq + 2 * nk, depth, depth, 0, 0.3), bias(3, 1, nq, nq);
  const float* const weights = w.data();
  const auto part = [&](int64_t row) { return k::load(weights + row * depth, depth); };
  const std::vector<int32_t> table = {3, 0, 4, 1, 2, 9, 7, 8, 5, 6};  // 2 sequences of 5 pages
  std::vector<T> keys(size_t(10 * page * nk)), values(keys.size());
  const std::vector<S> scales = {make<S>(0.05), make<S>(0.0625)};
  std::vector<int32_t> positions, sequences;
  for (int i = 0; i < tokens; ++i) {
    positions.push_back(i == 1 ? -1 : ring ? 1000 + i / 2 : 30 - i / 2);
    sequences.push_back(i % 2);
  }
  Turning turned = turn;
  turned.positions = positions;
  k::AppendAt at(positions.data(), sequences.data());
  if (ring) at = at.ring(capacity, 4);

  Guarded<float> q(tokens, nq, nq + 1, 1);
  const auto run = [&](const auto& kt, const auto& vt) {
    const auto kv = k::paged_kv(kt, vt, k::pages(table.data(), 5, page), capacity);
    const k::Status status = k::cpu::matmul(
        k::cpu::Exec{2}, k::load(x.data(), depth),
        k::stacked(k::paired(part(0), turned.map()), nq, k::paired(part(nq), turned.map()), nk, k::plain(part(nq + nk)), nk),
        k::qkv(k::bias(bias.data()) | turned.map() | k::scale(2) | k::store(q.data(), q.ld()), nq, turned.map() | k::append_keys(kv, at, dim), nk,
               k::append_values(kv, at, dim), nk),
        {tokens, nq + 2 * nk, depth});
    t.expect(status.ok(), "%s", status.reason());
  };
  const auto kt = k::nhd(keys.data(), page, kv_heads, dim), vt = k::nhd(values.data(), page, kv_heads, dim);
  if (scaled) run(kt.head_scales(scales.data()), vt.head_scales(scales.data()));
  else run(kt, vt);

  q.download();
  t.expect(q.intact(), "wrote outside");
  const auto result = [&](int64_t token, int64_t n) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < depth; ++i) sum += x.value(token, i) * w.value(n, i), size += std::fabs(x.value(token, i) * w.value(n, i));
    return Real<>(sum, size * 72 * unit<float>);
  };
  for (int64_t m = 0; m < tokens; ++m) {
    Row<> want;
    for (int64_t c = 0; c < nq; ++c) want.push_back(turned([&](int64_t n) { return result(m, n) + Real<>(bias.value(0, n)); }, m, c) * Real<>(2));
    const std::string problem = mismatch(m, want, [&](int64_t c) { return q.get(m, c); });
    t.expect(problem.empty(), "queries, %d tokens, dim %d: %s", tokens, int(dim), problem.c_str());
    if (positions[size_t(m)] < 0) continue;
    const int64_t pos = ring ? 4 + (positions[size_t(m)] - 4) % 31 : positions[size_t(m)];
    const int64_t slot = table[size_t(sequences[size_t(m)] * 5 + pos / page)] * page + pos % page;
    for (int64_t c = 0; c < nk; ++c) {
      const Real<> inverse(scaled ? 1 / value_of(scales[size_t(c / dim)]) : 1.0, scaled ? 32 * unit<float> : 0);
      const Real<> key = turned([&](int64_t n) { return result(m, nq + n); }, m, c) * inverse, value = result(m, nq + nk + c) * inverse;
      t.expect(within(keys[size_t(slot * nk + c)], key), "key %d of token %d: %g, want %g", int(c), int(m), value_of(keys[size_t(slot * nk + c)]), key.v);
      t.expect(within(values[size_t(slot * nk + c)], value), "value %d of token %d: %g, want %g", int(c), int(m), value_of(values[size_t(slot * nk + c)]), value.v);
    }
  }
}

}  // namespace

TEST_CASE("behind the product of queries, keys and values, into pages") {
  Tally t;
  for (const Turning& turn : turnings(40)) {
    for (const int tokens : {1, 3, 40}) {
      product<k::half, float>(t, turn, tokens, false, false);
      product<int8_t, float>(t, turn, tokens, true, tokens == 3);
    }
  }
  product<float, float>(t, turnings(40)[1], 20, false, true);
  product<k::float8_e4m3, k::half>(t, turnings(40)[1], 20, true, false);
  CHECK_TALLY(t);
}

TEST_CASE("queries are turned on their way into attention") {
  Tally t;
  const AttentionCase c{{12}, {50}, 4, 2, 32};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
  const Turning turn(32, 32, false, 12);
  AttentionData<> ahead(c), fused(c);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), 50);
  std::vector<float> turned(12 * 128);
  CHECK(k::cpu::copy(k::cpu::Exec{1}, ahead.source() | turn.map(), k::store(turned.data(), 128), 12, 128));
  CHECK(k::cpu::attention(k::cpu::Exec{2}, k::load(turned.data(), 128), kv, ahead.sink(), ahead.shape(), k::causal()));
  CHECK(k::cpu::attention(k::cpu::Exec{2}, fused.source() | turn.map(), kv, fused.sink(), fused.shape(), k::causal()));
  ahead.o.download();
  fused.o.download();
  CHECK(ahead.o.bytes() == fused.o.bytes());
}

TEST_CASE("what rope and append refuse") {
  std::vector<float> memory(4096);
  float* const p = memory.data();
  const int32_t positions[] = {0, 1};
  const auto copy = [&](const k::Rope& rope, int64_t cols) { return k::cpu::copy(k::cpu::Exec{1}, k::load(p, 64) | rope, k::store(p + 2048, 64), 2, cols); };
  CHECK(copy(k::rope(positions, p, 16), 64));
  CHECK(copy(k::rope(nullptr, p, 16), 64).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, nullptr, 16), 64).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 12), 48).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 16), 40).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 16).rotary_dim(18), 64).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 16).rotary_dim(3), 64).code() == k::Code::invalid);

  const auto append = [&](const auto& tensor, const k::AppendAt& at, int64_t cols) {
    return k::cpu::copy(k::cpu::Exec{1}, k::load(p, 64), k::append_keys(k::dense_kv(tensor, tensor, 8), at, 16), 2, cols);
  };
  const auto tensor = k::nhd(p + 2048, 8, 2, 16);
  CHECK(append(tensor, k::AppendAt(positions), 32));
  CHECK(append(tensor, k::AppendAt(nullptr), 32).code() == k::Code::invalid);
  CHECK(append(tensor, k::AppendAt(positions).ring(4, 4), 32).code() == k::Code::invalid);
  CHECK(append(tensor, k::AppendAt(positions), 24).code() == k::Code::invalid);
  CHECK(append(tensor.scales(p, 16, 2, 1), k::AppendAt(positions), 32).code() == k::Code::unsupported);
}
