// Rotary positions, and what makes queries, keys and values in one product: what they should give, in the memory of the
// CPU or the GPU.
#pragma once

#include <kernels/append.h>
#include <kernels/core/row_call.h>
#include <kernels/rope.h>

#include "guarded.h"
#include "oracle.h"
#include "random_matrix.h"
#include "tally.h"

namespace test {

namespace k = kernels;

struct Turning {
  int head_dim, rotary_dim;
  bool neighbours;
  float amplitude;
  std::vector<float> frequencies;
  std::vector<int32_t> positions;

  Turning(int dim, int rotary, bool n, int rows, float a = 1)
      : head_dim(dim), rotary_dim(rotary), neighbours(n), amplitude(a), frequencies(size_t(rotary / 2) + 1) {
    k::rope_frequencies(frequencies.data(), rotary, 1e4);
    for (int i = 0; i < rows; ++i) positions.push_back(int32_t(mix(uint64_t(i)) % 100000));
  }
  k::Rope map() const { return map(positions.data(), frequencies.data()); }
  k::Rope map(const int32_t* where, const float* how_fast) const {
    const k::Rope r = k::rope(where, how_fast, head_dim).rotary_dim(rotary_dim).amplitude(amplitude);
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

inline std::vector<Turning> turnings(int rows) {
  return {{8, 8, false, rows},          {64, 64, false, rows}, {64, 64, true, rows}, {40, 40, false, rows},
          {48, 32, false, rows, 1.25f}, {48, 12, true, rows},  {16, 6, false, rows}, {24, 0, false, rows}};
}

// Rows that are copied and turned on the way. run(source, sink, rows, cols) copies them, and returns when it is done.
template <class Memory, class Run>
void check_turned(Tally& t, int64_t gap_x, int64_t gap_y, const Run& run) {
  const int rows = 5, heads = 3;
  for (const Turning& turn : turnings(rows)) {
    for (const int64_t shift : {0, 1}) {
      const int64_t cols = heads * turn.head_dim;
      const RandomMatrix<float, Memory> x(1, rows, cols, cols + gap_x, shift);
      const Numbers<int32_t, Memory> positions(turn.positions);
      const Numbers<float, Memory> frequencies(turn.frequencies);
      Guarded<float, Memory> y(rows, cols, cols + gap_y, shift);
      const k::Status status = run(k::load(static_cast<const float*>(x.data()), x.ld()) | k::scale(0.5) |
                                       turn.map(positions.data(), frequencies.data()),
                                   k::scale(2) | k::store(y.data(), y.ld()), rows, cols);
      t.expect(status.ok(), "%s", status.reason());
      y.download();
      t.expect(y.intact(), "wrote outside");
      for (int64_t r = 0; r < rows; ++r) {
        Row<> want;
        for (int64_t c = 0; c < cols; ++c)
          want.push_back(turn([&](int64_t at) { return Real<>(x.value(r, at)); }, r, c));
        const std::string problem = mismatch(r, want, [&](int64_t c) { return y.get(r, c); });
        t.expect(problem.empty(), "head %d, rotary %d: %s", turn.head_dim, turn.rotary_dim, problem.c_str());
      }
    }
  }
}

// The product of x with the weights of queries, keys and values, with a bias on queries; keys and values go to pages.
// run(source, weights, sink, shape) makes it, of numbers of TX, and returns when it is done.
template <class Memory, class TX, class T, class S, class Run>
void check_qkv(Tally& t, const Turning& turn, int tokens, bool scaled, bool ring, const Run& run_product) {
  const int64_t dim = turn.head_dim, heads = 4, kv_heads = 2, depth = 40, nq = heads * dim, nk = kv_heads * dim,
                page = 7, capacity = 35;
  const RandomMatrix<TX, Memory> x(1, tokens, depth, depth), w(2, nq + 2 * nk, depth, depth, 0, 0.3);
  const RandomMatrix<float, Memory> bias(3, 1, nq, nq);
  const TX* const weights = w.data();
  const auto part = [&](int64_t row) { return k::load(weights + row * depth, depth); };
  const Numbers<int32_t, Memory> table({3, 0, 4, 1, 2, 9, 7, 8, 5, 6});  // 2 sequences of 5 pages
  Guarded<T, Memory> keys(1, 10 * page * nk, 10 * page * nk), values(1, 10 * page * nk, 10 * page * nk);
  const Numbers<S, Memory> scales({make<S>(0.05), make<S>(0.0625)});
  std::vector<int32_t> positions, sequences;
  for (int i = 0; i < tokens; ++i) {
    positions.push_back(i == 1 ? -1 : ring ? 1000 + i / 2 : 30 - i / 2);
    sequences.push_back(i % 2);
  }
  Turning turned = turn;
  turned.positions = positions;
  const Numbers<int32_t, Memory> where(positions), whose(sequences);
  const Numbers<float, Memory> frequencies(turn.frequencies);
  const k::Rope map = turned.map(where.data(), frequencies.data());
  k::AppendAt at(where.data(), whose.data());
  const Numbers<int32_t, Memory> lengths({1000 + (tokens + 1) / 2, 1000 + tokens / 2});
  if (ring) at = at.ring(capacity, 4, lengths.data());

  Guarded<float, Memory> q(tokens, nq, nq + 1, 1);
  const auto run = [&](const auto& kt, const auto& vt) {
    const auto kv = k::paged_kv(kt, vt, k::pages(table.data(), 5, page), capacity);
    const k::Status status = run_product(
        k::load(static_cast<const TX*>(x.data()), depth),
        k::stacked(k::paired(part(0), map), nq, k::paired(part(nq), map), nk, k::plain(part(nq + nk)), nk),
        k::qkv(k::bias(static_cast<const float*>(bias.data())) | map | k::scale(2) | k::store(q.data(), q.ld()), nq,
               map | k::append_keys(kv, at, dim), nk, k::append_values(kv, at, dim), nk),
        k::MatmulShape{tokens, nq + 2 * nk, depth});
    t.expect(status.ok(), "%s", status.reason());
  };
  const auto kt = k::nhd(keys.data(), page, kv_heads, dim), vt = k::nhd(values.data(), page, kv_heads, dim);
  if (scaled) run(kt.head_scales(scales.data()), vt.head_scales(scales.data()));
  else run(kt, vt);

  q.download();
  keys.download();
  values.download();
  t.expect(q.intact() && keys.intact() && values.intact(), "wrote outside");
  const auto result = [&](int64_t token, int64_t n) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < depth; ++i)
      sum += x.value(token, i) * w.value(n, i), size += std::fabs(x.value(token, i) * w.value(n, i));
    return Real<>(sum, size * 200 * unit<float>);
  };
  for (int64_t m = 0; m < tokens; ++m) {
    Row<> want;
    for (int64_t c = 0; c < nq; ++c)
      want.push_back(turned([&](int64_t n) { return result(m, n) + Real<>(bias.value(0, n)); }, m, c) * Real<>(2));
    const std::string problem = mismatch(m, want, [&](int64_t c) { return q.get(m, c); });
    t.expect(problem.empty(), "queries, %d tokens, dim %d: %s", tokens, int(dim), problem.c_str());
    if (positions[size_t(m)] < 0) continue;
    const int64_t pos = ring ? 4 + (positions[size_t(m)] - 4) % 31 : positions[size_t(m)];
    const int64_t slot = table.get(0, sequences[size_t(m)] * 5 + pos / page) * page + pos % page;
    for (int64_t c = 0; c < nk; ++c) {
      const Real<> inverse(scaled ? 1 / value_of(scales.get(0, c / dim)) : 1.0, scaled ? 32 * unit<float> : 0);
      const Real<> key = turned([&](int64_t n) { return result(m, nq + n); }, m, c) * inverse,
                   value = result(m, nq + nk + c) * inverse;
      t.expect(within(keys.get(0, slot * nk + c), key), "key %d of token %d: %g, want %g", int(c), int(m),
               value_of(keys.get(0, slot * nk + c)), key.v);
      t.expect(within(values.get(0, slot * nk + c), value), "value %d of token %d: %g, want %g", int(c), int(m),
               value_of(values.get(0, slot * nk + c)), value.v);
    }
  }
}

// The same where nothing is turned: no sink wants pairs.
template <class Memory, class Run>
void check_plain_qkv(Tally& t, int tokens, const Run& run_product) {
  const int64_t dim = 8, nq = 4 * dim, nk = 2 * dim, depth = 40;
  const RandomMatrix<k::half, Memory> x(1, tokens, depth, depth), w(2, nq + 2 * nk, depth, depth, 0, 0.3);
  const k::half* const weights = w.data();
  const auto part = [&](int64_t row) { return k::load(weights + row * depth, depth); };
  std::vector<int32_t> positions;
  for (int i = 0; i < tokens; ++i) positions.push_back(i);
  const Numbers<int32_t, Memory> where(positions), whose(std::vector<int32_t>(size_t(tokens), 0));
  const k::AppendAt at(where.data(), whose.data());
  Guarded<float, Memory> q(tokens, nq, nq + 1, 1), keys(tokens, nk, nk), values(tokens, nk, nk);
  const auto kv = k::dense_kv(k::nhd(keys.data(), tokens, 2, dim), k::nhd(values.data(), tokens, 2, dim), tokens);
  const k::Status status = run_product(
      k::load(static_cast<const k::half*>(x.data()), depth), k::stacked(part(0), nq, part(nq), nk, part(nq + nk), nk),
      k::qkv(k::store(q.data(), q.ld()), nq, k::append_keys(kv, at, dim), nk, k::append_values(kv, at, dim), nk),
      k::MatmulShape{tokens, nq + 2 * nk, depth});
  t.expect(status.ok(), "%s", status.reason());
  q.download(), keys.download(), values.download();
  t.expect(q.intact() && keys.intact() && values.intact(), "wrote outside");
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < nq + 2 * nk; ++n) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < depth; ++i)
        sum += x.value(m, i) * w.value(n, i), size += std::fabs(x.value(m, i) * w.value(n, i));
      const float got = n < nq ? q.get(m, n) : n < nq + nk ? keys.get(m, n - nq) : values.get(m, n - nq - nk);
      t.expect(within(got, Real<>(sum, size * 200 * unit<float>)), "token %d, column %d: %g, want %g", int(m), int(n),
               got, sum);
    }
  }
}

// Keys of three sequences to rings of 11 positions, of which 3 stay; up to 40 new ones at a time, the last first.
// run(source, sink, rows, columns) copies, and returns when it is done.
template <class Memory, class Run>
void check_ring(Tally& t, const Run& run) {
  const int64_t capacity = 11, kept = 3, heads = 2, dim = 8, width = heads * dim;
  const std::vector<int64_t> first = {0, 5, 100}, count = {40, 4, 25};
  std::vector<int32_t> positions, sequences;
  for (int64_t i = 39; i >= 0; --i) {
    for (size_t b = 0; b < 3; ++b) {
      if (i < count[b]) positions.push_back(int32_t(first[b] + i)), sequences.push_back(int32_t(b));
    }
  }
  const int64_t rows = int64_t(positions.size());
  const RandomMatrix<float, Memory> x(1, rows, width, width);
  const Numbers<int32_t, Memory> where(positions), whose(sequences), lengths({40, 9, 125});
  Guarded<float, Memory> cache(3 * capacity, width, width);
  const auto side = k::nhd(cache.data(), capacity, heads, dim);
  const k::Status status =
      run(k::load(static_cast<const float*>(x.data()), width),
          k::append_keys(k::dense_kv(side, side, capacity),
                         k::AppendAt(where.data(), whose.data()).ring(capacity, kept, lengths.data()), dim),
          rows, width);
  t.expect(status.ok(), "%s", status.reason());
  cache.download();
  t.expect(cache.intact(), "wrote outside");
  const Guarded<float, Memory> untouched(3 * capacity, width, width);
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t slot = 0; slot < capacity; ++slot) {
      // The newest of the tokens that belong there.
      int64_t newest = -1, row = -1;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t pos = positions[size_t(r)];
        if (sequences[size_t(r)] == b && (pos < kept ? pos : kept + (pos - kept) % (capacity - kept)) == slot &&
            pos > newest)
          newest = pos, row = r;
      }
      for (int64_t c = 0; c < width; ++c) {
        const float got = cache.get(b * capacity + slot, c),
                    want = row < 0 ? untouched.get(b * capacity + slot, c) : float(x.value(row, c));
        t.expect(std::memcmp(&got, &want, sizeof(got)) == 0,
                 "sequence %d, slot %d, column %d: %g, want %g of position %d", int(b), int(slot), int(c), got, want,
                 int(newest));
      }
    }
  }
}

}  // namespace test
