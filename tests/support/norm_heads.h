// norm_heads(): queries, keys and values of one buffer, normalized by heads, turned and appended; against double, in
// the memory of the CPU or the GPU.
#pragma once

#include <kernels/append.h>
#include <kernels/core/row_op.h>
#include <kernels/heads.h>
#include <kernels/quantize.h>
#include <kernels/rope.h>

#include "rope.h"

namespace test {

struct HeadCase {
  Turning turn;
  int tokens, heads, kv_heads;
  bool in_place = false;  // queries go where they were
  int shift = 0;          // elements past an aligned address
};

constexpr double kHeadEps = 0.5;  // large, so that it shows

inline std::vector<HeadCase> head_cases() {
  const auto turn = [](int dim, int rotary, bool neighbours, int rows, float amplitude = 1) {
    return Turning(dim, rotary, neighbours, rows, amplitude);
  };
  return {{turn(128, 128, false, 5), 5, 16, 8},                 // Qwen3
          {turn(256, 256, false, 3), 3, 4, 1},                  // Gemma-3
          {turn(64, 64, false, 7), 7, 3, 3, true},
          {turn(128, 128, true, 2), 2, 2, 1, true},
          {turn(128, 64, false, 4, 1.25f), 4, 5, 2},            // partial rotary
          {turn(80, 32, true, 3), 3, 4, 2},
          {turn(96, 96, false, 3), 3, 2, 1, false, 1},
          {turn(72, 12, false, 3), 3, 2, 1},                    // runs that no wide pack holds
          {turn(8, 8, false, 37), 37, 2, 2},
          {turn(256, 0, false, 2), 2, 1, 1}};
}

// run(source, sink, shape, options) normalizes, and returns when it is done.
template <class T, class Memory, class Run>
void check_norm_heads(Tally& t, const HeadCase& c, bool one_plus, const Run& run) {
  const int64_t dim = c.turn.head_dim, nq = c.heads * dim, nk = c.kv_heads * dim, cols = nq + 2 * nk, ld = cols + 8,
                capacity = 3;
  const char* const what = c.in_place ? "in place" : "apart";
  RandomMatrix<T, Memory> x(1, c.tokens, cols, ld, c.shift);
  const RandomMatrix<float, Memory> q_weight(2, 1, dim, dim), k_weight(3, 1, dim, dim);
  const Numbers<int32_t, Memory> positions(c.turn.positions);
  const Numbers<float, Memory> frequencies(c.turn.frequencies);
  std::vector<int32_t> slots;
  for (int r = 0; r < c.tokens; ++r) slots.push_back(r == 1 ? -1 : r % int(capacity));
  const Numbers<int32_t, Memory> where(slots);
  Guarded<T, Memory> q(c.tokens, nq, nq + 8, c.shift), keys(c.tokens * capacity, nk, nk),
      values(c.tokens * capacity, nk, nk);
  const Guarded<T, Memory> untouched(c.tokens * capacity, nk, nk);
  const int64_t normed = c.heads + c.kv_heads;
  Guarded<float, Memory> rstd(c.tokens, normed, normed);
  std::vector<std::vector<double>> before;
  for (int64_t r = 0; r < c.tokens; ++r) {
    before.emplace_back();
    for (int64_t i = 0; i < cols; ++i) before.back().push_back(x.value(r, i));
  }
  const k::Rope rope = c.turn.map(positions.data(), frequencies.data());
  const auto kv = k::dense_kv(k::nhd(keys.data(), capacity, c.kv_heads, dim),
                              k::nhd(values.data(), capacity, c.kv_heads, dim), capacity);
  const k::AppendAt at(where.data());
  const k::HeadShape shape{c.tokens, c.heads + 2 * c.kv_heads, dim, normed};
  const auto options = k::RmsNorm{}.eps(kHeadEps).rstd(rstd.data());
  T* const to = c.in_place ? x.data() : q.data();
  const int64_t to_ld = c.in_place ? ld : q.ld();
  const auto call = [&](const auto& qw, const auto& kw) {
    const k::Status status = run(k::load(static_cast<const T*>(x.data()), ld),
                                 k::qkv(k::affine(k::each_head(qw, dim)) | rope | k::store(to, to_ld), nq,
                                        k::affine(k::each_head(kw, dim)) | rope | k::append_keys(kv, at, dim), nk,
                                        k::append_values(kv, at, dim), nk),
                                 shape, options);
    t.expect(status.ok(), "dim %d: %s", int(dim), status.reason());
  };
  const float *qw = q_weight.data(), *kw = k_weight.data();
  if (one_plus) call(k::one_plus(qw), k::one_plus(kw));
  else call(qw, kw);
  x.download(), q.download(), keys.download(), values.download(), rstd.download();
  t.expect(x.intact() && q.intact() && keys.intact() && values.intact() && rstd.intact(), "dim %d: wrote outside",
           int(dim));

  for (int64_t r = 0; r < c.tokens; ++r) {
    Row<> want;
    for (int64_t head = 0; head < normed; ++head) {
      Row<> row;
      for (int64_t i = 0; i < dim; ++i) row.push_back(before[size_t(r)][size_t(head * dim + i)]);
      const Real<> inverse = rmsnorm(row, kHeadEps);
      t.expect(within(rstd.get(r, head), inverse), "dim %d, rstd of head %d", int(dim), int(head));
      const auto& weight = head < c.heads ? q_weight : k_weight;
      for (int64_t i = 0; i < dim; ++i)
        row[size_t(i)] =
            row[size_t(i)] * (one_plus ? Real<>(weight.value(0, i)) + Real<>(1) : Real<>(weight.value(0, i)));
      for (int64_t i = 0; i < dim; ++i) want.push_back(c.turn([&](int64_t col) { return row[size_t(col)]; }, r, i));
    }
    for (int64_t i = 0; i < nq; ++i) {
      const T got = c.in_place ? x.get(r, i) : q.get(r, i);
      t.expect(within(got, want[size_t(i)]), "%s, dim %d, rotary %d, query %d of token %d: %g, want %g", what, int(dim),
               c.turn.rotary_dim, int(i), int(r), value_of(got), want[size_t(i)].v);
    }
    for (int64_t i = nq; i < cols; ++i)
      t.expect(value_of(x.get(r, i)) == before[size_t(r)][size_t(i)], "the buffer's keys and values changed");
    for (int64_t slot = 0; slot < capacity; ++slot) {
      for (int64_t i = 0; i < nk; ++i) {
        const T key = keys.get(r * capacity + slot, i), value = values.get(r * capacity + slot, i),
                old = untouched.get(r * capacity + slot, i);
        if (slot == slots[size_t(r)]) {
          t.expect(within(key, want[size_t(nq + i)]), "%s, dim %d, rotary %d, key %d of token %d: %g, want %g", what,
                   int(dim), c.turn.rotary_dim, int(i), int(r), value_of(key), want[size_t(nq + i)].v);
          t.expect(value_of(value) == before[size_t(r)][size_t(nq + nk + i)], "value %d of token %d changed", int(i),
                   int(r));
        } else {
          t.expect(std::memcmp(&key, &old, sizeof(T)) == 0 && std::memcmp(&value, &old, sizeof(T)) == 0,
                   "another position was written");
        }
      }
    }
  }
}

// The first `heads` heads of token r in double, normalized, times weight(head, column) and turned. value(i): the input.
template <class Value, class Weight>
Row<> turned_heads(const HeadCase& c, int64_t r, int64_t heads, const Value& value, const Weight& weight) {
  const int64_t dim = c.turn.head_dim;
  Row<> out;
  for (int64_t head = 0; head < heads; ++head) {
    Row<> row;
    for (int64_t i = 0; i < dim; ++i) row.push_back(Real<>(value(head * dim + i)));
    rmsnorm(row, kHeadEps);
    for (int64_t i = 0; i < dim; ++i) row[size_t(i)] = row[size_t(i)] * Real<>(weight(head, i));
    for (int64_t i = 0; i < dim; ++i) out.push_back(c.turn([&](int64_t col) { return row[size_t(col)]; }, r, i));
  }
  return out;
}

// Codes of heads, and the scales that are found for them: of queries in groups of columns, of keys and values in a
// cache. run(source, sink, shape, options) as above.
template <class T, class Code, class Scale, class Memory, class Run>
void check_found_heads(Tally& t, const HeadCase& c, const Run& run) {
  const int64_t dim = c.turn.head_dim, nq = c.heads * dim, nk = c.kv_heads * dim, cols = nq + 2 * nk, capacity = 3,
                normed = c.heads + c.kv_heads, places = c.tokens * capacity;
  RandomMatrix<T, Memory> x(1, c.tokens, cols, cols + 8, c.shift);
  for (int64_t i = 0; i < dim; ++i) x.set(0, cols - dim + i, make<T>(0));  // a head of zeros
  x.set(c.tokens - 1, nq + dim / 2, make<T>(500));
  x.upload();
  const RandomMatrix<float, Memory> weight(2, 1, dim, dim);
  const Numbers<int32_t, Memory> positions(c.turn.positions);
  const Numbers<float, Memory> frequencies(c.turn.frequencies);
  std::vector<int32_t> slots;
  for (int r = 0; r < c.tokens; ++r) slots.push_back(r == 1 ? -1 : r % int(capacity));
  const Numbers<int32_t, Memory> where(slots);
  Guarded<Code, Memory> q(c.tokens, nq, nq + 8, c.shift), keys(places, nk, nk), values(places, nk, nk);
  Guarded<Scale, Memory> q_scales(c.tokens, c.heads, c.heads + 1), key_scales(places, c.kv_heads, c.kv_heads),
      value_scales(places, c.kv_heads, c.kv_heads);
  const auto side = [&](const Guarded<Code, Memory>& codes, const Guarded<Scale, Memory>& scales) {
    return k::nhd(codes.data(), capacity, c.kv_heads, dim)
        .scales(static_cast<const Scale*>(scales.data()), capacity * c.kv_heads, c.kv_heads, 1);
  };
  const auto kv = k::dense_kv(side(keys, key_scales), side(values, value_scales), capacity);
  const k::Rope rope = c.turn.map(positions.data(), frequencies.data());
  const auto turned = k::affine(k::each_head(static_cast<const float*>(weight.data()), dim)) | rope;
  const k::AppendAt at(where.data());
  const k::Status status =
      run(k::load(static_cast<const T*>(x.data()), x.ld()),
          k::qkv(turned | k::quantize(q.data(), q.ld(), q_scales.data(), q_scales.ld(), int(dim)), nq,
                 turned | k::append_keys(kv, at, dim, key_scales.data()), nk,
                 k::append_values(kv, at, dim, value_scales.data()), nk),
          k::HeadShape{c.tokens, c.heads + 2 * c.kv_heads, dim, normed}, k::RmsNorm{}.eps(kHeadEps));
  t.expect(status.ok(), "dim %d: %s", int(dim), status.reason());
  q.download(), keys.download(), values.download(), q_scales.download(), key_scales.download(), value_scales.download();
  t.expect(q.intact() && keys.intact() && values.intact() && q_scales.intact() && key_scales.intact() &&
               value_scales.intact(),
           "dim %d: wrote outside", int(dim));

  // A step between two codes, in scales: of integers 1, of floats in proportion to the code.
  constexpr double largest = double(k::detail::Largest<Code>::value);
  const auto step = [](double code) {
    return std::is_same<Code, int8_t>::value ? 1.0 : std::max(std::fabs(code) / 8, std::ldexp(1.0, -9));
  };
  const auto compare = [&](const char* what, int64_t r, int64_t head, const Row<>& want, int64_t begin, double scale,
                           const auto& code) {
    double most = 0;
    for (int64_t i = 0; i < dim; ++i) most = std::max(most, std::fabs(want[size_t(begin + i)].v));
    const double rounding = std::is_same<Scale, float>::value ? 1e-4 : 1e-2;
    t.expect(std::fabs(scale - most / largest) <= rounding * (most / largest),
             "dim %d, %s, head %d of token %d: the scale is %g, want %g", int(dim), what, int(head), int(r), scale,
             most / largest);
    for (int64_t i = 0; i < dim; ++i) {
      const double got = code(i), exact = scale > 0 ? want[size_t(begin + i)].v / scale : 0;
      t.expect(std::fabs(got - exact) <= 0.51 * step(exact) + 1e-3 * std::fabs(exact),
               "dim %d, %s, head %d of token %d: code %g, want %g", int(dim), what, int(head), int(r), got, exact);
    }
  };
  const Guarded<Code, Memory> untouched(places, nk, nk);
  const Guarded<Scale, Memory> no_scale(places, c.kv_heads, c.kv_heads);
  for (int64_t r = 0; r < c.tokens; ++r) {
    const auto value = [&](int64_t i) { return x.value(r, i); };
    Row<> want = turned_heads(c, r, normed, value, [&](int64_t, int64_t i) { return weight.value(0, i); });
    for (int64_t i = nq + nk; i < cols; ++i) want.push_back(Real<>(value(i)));
    for (int64_t head = 0; head < c.heads; ++head)
      compare("queries", r, head, want, head * dim, value_of(q_scales.get(r, head)),
              [&](int64_t i) { return value_of(q.get(r, head * dim + i)); });
    for (int64_t slot = 0; slot < capacity; ++slot) {
      const int64_t place = r * capacity + slot;
      for (int64_t head = 0; head < c.kv_heads; ++head) {
        if (slot == slots[size_t(r)]) {
          compare("keys", r, head, want, nq + head * dim, value_of(key_scales.get(place, head)),
                  [&](int64_t i) { return value_of(keys.get(place, head * dim + i)); });
          compare("values", r, head, want, nq + nk + head * dim, value_of(value_scales.get(place, head)),
                  [&](int64_t i) { return value_of(values.get(place, head * dim + i)); });
          continue;
        }
        const auto same = [](const auto& a, const auto& b) { return std::memcmp(&a, &b, sizeof a) == 0; };
        t.expect(same(key_scales.get(place, head), no_scale.get(place, head)) &&
                     same(value_scales.get(place, head), no_scale.get(place, head)),
                 "the scales of another position were written");
        for (int64_t i = head * dim; i < (head + 1) * dim; ++i)
          t.expect(
              same(keys.get(place, i), untouched.get(place, i)) && same(values.get(place, i), untouched.get(place, i)),
              "another position was written");
      }
    }
  }
}

// Heads that are normalized and turned as they are read. run(source, sink, rows, cols) copies, and returns when it is
// done.
template <class T, class Memory, class Run>
void check_normed_heads(Tally& t, const HeadCase& c, const Run& run) {
  const int64_t dim = c.turn.head_dim, cols = c.heads * dim;
  const RandomMatrix<T, Memory> x(1, c.tokens, cols, cols + 8, c.shift);
  const RandomMatrix<float, Memory> weight(2, 1, dim, dim);
  const Numbers<int32_t, Memory> positions(c.turn.positions);
  const Numbers<float, Memory> frequencies(c.turn.frequencies);
  Guarded<float, Memory> y(c.tokens, cols, cols + 4);
  const k::Status status = run(k::normed_heads(k::load(static_cast<const T*>(x.data()), x.ld()), dim, kHeadEps) |
                                   k::affine(k::each_head(static_cast<const float*>(weight.data()), dim)) |
                                   c.turn.map(positions.data(), frequencies.data()),
                               k::store(y.data(), y.ld()), c.tokens, cols);
  t.expect(status.ok(), "dim %d: %s", int(dim), status.reason());
  y.download();
  t.expect(y.intact(), "dim %d: wrote outside", int(dim));
  for (int64_t r = 0; r < c.tokens; ++r) {
    const Row<> want = turned_heads(
        c, r, c.heads, [&](int64_t i) { return x.value(r, i); },
        [&](int64_t, int64_t i) { return weight.value(0, i); });
    const std::string problem = mismatch(r, want, [&](int64_t i) { return y.get(r, i); });
    t.expect(problem.empty(), "as read, dim %d, rotary %d: %s", int(dim), c.turn.rotary_dim, problem.c_str());
  }
}

// Without rope, and LayerNorm: any number of heads, an even number of columns, one of them masked.
template <class T, class Memory, class Run>
void check_plain_heads(Tally& t, const Run& run) {
  for (const int64_t dim : {2, 6, 34, 64, 130, 256}) {
    for (const int64_t normed : {0, 1, 3}) {
      const int64_t tokens = 5, heads = 3, cols = heads * dim;
      const RandomMatrix<T, Memory> x(1, tokens, cols, cols + 1, 1);
      Guarded<float, Memory> y(tokens, cols, cols + 3, 1), mean(tokens, normed, normed), rstd(tokens, normed, normed);
      const k::Status status = run(k::load(static_cast<const T*>(x.data()), x.ld()) | k::scale(2),
                                   k::shift(1) | k::store(y.data(), y.ld()), k::HeadShape{tokens, heads, dim, normed},
                                   k::LayerNorm{}
                                       .eps(1e-5)
                                       .mean(normed > 0 ? mean.data() : static_cast<float*>(nullptr))
                                       .rstd(normed > 0 ? rstd.data() : static_cast<float*>(nullptr)));
      t.expect(status.ok(), "%s", status.reason());
      y.download(), mean.download(), rstd.download();
      t.expect(y.intact() && mean.intact() && rstd.intact(), "wrote outside");
      for (int64_t r = 0; r < tokens; ++r) {
        for (int64_t head = 0; head < heads; ++head) {
          Row<> row;
          for (int64_t i = 0; i < dim; ++i) row.push_back(Real<>(2 * x.value(r, head * dim + i)));
          if (head < normed) {
            const auto statistics = layernorm(row, 1e-5);
            t.expect(within(mean.get(r, head), statistics.mean) && within(rstd.get(r, head), statistics.rstd),
                     "dim %d: mean or rstd of head %d", int(dim), int(head));
          }
          for (Real<>& v : row) v = v + Real<>(1);
          const std::string problem = mismatch(r, row, [&](int64_t i) { return y.get(r, head * dim + i); });
          t.expect(problem.empty(), "dim %d, head %d of %d normed: %s", int(dim), int(head), int(normed),
                   problem.c_str());
        }
      }
    }
  }
}

}  // namespace test
