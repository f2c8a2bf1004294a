// NaN and infinities among keys, values, scales and logits, and behind what is seen: what docs/attention.md says of
// them.
#pragma once

#include "attention.h"

namespace test {

// With element type E and scales of S for each position, or Nothing. run(what, case, where, key, value, score, model,
// broken) makes calls and checks them; `broken` tells which results must not be finite.
template <class Memory, class E, class S, class Run>
void check_not_finite_kv(Layout layout, const Run& run) {
  using Side = KvSide<E, S, Memory>;
  const double nan = std::nan(""), infinity = -kMinusInfinity;
  const AttentionCase one{{1, 1}, {40, 700}, 4, 2, 64}, three{{3, 3}, {40, 333}, 4, 2, 64};
  const auto with = [&](const char* what, const AttentionCase& c, int left, const auto& change, const auto& broken) {
    Placement where(layout, c.kv_lens, c.kv_heads);
    Side key(1, where, c.dim, ScaleOf::token, 1, 0, 16), value(2, where, c.dim, ScaleOf::token, 1, 0, 16);
    change(where, key, value);
    key.upload();
    value.upload();
    run(what, c, where, key, value, k::window(left, 0), window_model(left, 0), broken);
  };
  const auto nothing = [](int64_t, int64_t, int64_t) { return false; };
  const auto group = [](int64_t b, int64_t head, int64_t) { return b == 1 && head / 2 == 1; };
  const auto element = [](int64_t b, int64_t head, int64_t col) { return b == 1 && head / 2 == 1 && col == 7; };
  const auto all_of = [&](Side& side, const AttentionCase& c, int64_t b, int64_t pos, double code, double scale) {
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      for (int64_t x = 0; x < c.dim; ++x) side.set(b, h, pos, x, code);
      side.set_scale_at(b, h, pos, scale);
    }
  };
  // Pages that no query sees need not be there.
  with("outside the window", three, 20, [&](Placement& where, Side& key, Side& value) {
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t seen = three.kv_lens[size_t(b)] - 3 - 20;
      for (int64_t pos = 0; pos < seen; ++pos)
        all_of(key, three, b, pos, nan, nan), all_of(value, three, b, pos, nan, nan);
      for (int64_t i = 0; where.paged() && (i + 1) * where.page <= seen; ++i)
        where.table[size_t(b * where.table_ld + i)] = -1000000;
    }
  }, nothing);
  // The last query alone sees the last key.
  with(
      "a key that is masked", three, -1, [&](Placement&, Side& key, Side&) { all_of(key, three, 1, 332, nan, 1); },
      nothing);
  with(
      "a NaN scale of a key that is masked", three, -1,
      [&](Placement&, Side& key, Side&) { key.set_scale_at(1, 0, 332, nan); }, nothing);
  with(
      "an infinite scale of a key that is masked", three, -1,
      [&](Placement&, Side& key, Side&) { all_of(key, three, 1, 332, 0, infinity); }, nothing);
  with("a NaN key", one, -1, [&](Placement&, Side& key, Side&) { key.set(1, 1, 33, 7, nan); }, nothing);
  with("a NaN value", one, -1, [&](Placement&, Side&, Side& value) { value.set(1, 1, 33, 7, nan); }, nothing);
  if constexpr (std::is_same<S, k::Nothing>::value) {
    with(
        "an infinite value", one, -1, [&](Placement&, Side&, Side& value) { value.set(1, 1, 33, 7, infinity); },
        element);
  } else {
    with(
        "a NaN scale of a key", one, -1, [&](Placement&, Side& key, Side&) { key.set_scale_at(1, 1, 33, nan); },
        nothing);
    with(
        "a NaN scale of a value", one, -1, [&](Placement&, Side&, Side& value) { value.set_scale_at(1, 1, 33, nan); },
        nothing);
    with(
        "an infinite scale of a value", one, -1,
        [&](Placement&, Side&, Side& value) { value.set_scale_at(1, 1, 33, infinity); }, group);
  }
}

// Of logits: run as above.
template <class Memory, class Run>
void check_not_finite_logits(const Run& run) {
  const AttentionCase c{{3, 3}, {40, 700}, 4, 2, 64};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half, k::Nothing, Memory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  for (const double bad : {std::nan(""), -kMinusInfinity, kMinusInfinity}) {
    for (const int64_t at : {0, 650, 699}) {
      std::vector<float> bias(2 * 4 * 3 * 700, 0.5f);
      const auto index = [](int64_t b, int64_t head, int64_t query, int64_t pos) {
        return size_t(((b * 4 + head) * 3 + query) * 700 + pos);
      };
      bias[index(1, 2, 1, at)] = float(bad);
      const Numbers<float, Memory> there(bias);
      ScoreModel model;
      model.transform = [&](Real<> x, const Spot& s) {
        const double b = bias[index(s.b, s.head, s.query, s.key)];
        return std::isfinite(b) ? (x + Real<>(b)).rounded() : Real<>(b);
      };
      run("a logit", c, where, key, value,
          k::score_bias(static_cast<const float*>(there.data()), 4 * 3 * 700, 3 * 700, 700), model,
          [](int64_t, int64_t, int64_t) { return false; });
    }
  }
}

// Of parts that are merged: run(o, lse, sink, shape, options) makes the call, and returns when it is done.
template <class Memory, class Run>
void check_not_finite_parts(Tally& t, const Run& run) {
  const int64_t tokens = 5, heads = 3, dim = 8, width = heads * dim;
  const RandomMatrix<float, Memory> o(1, 2 * tokens, width, width);
  for (const double bad : {std::nan(""), -kMinusInfinity}) {
    for (const int64_t part : {0, 1}) {
      std::vector<float> logsumexps(size_t(2 * tokens * heads), 0.25f);
      logsumexps[size_t((part * tokens + 2) * heads + 1)] = float(bad);
      const Numbers<float, Memory> lse(logsumexps);
      Guarded<float, Memory> out(tokens, width, width), merged(tokens, heads, heads);
      const k::Status status = run(k::load(static_cast<const float*>(o.data()), width),
                                   k::load(static_cast<const float*>(lse.data()), heads), k::store(out.data(), width),
                                   k::MergeShape{2, tokens, heads, dim}, k::Attention{}.lse(merged.data()));
      t.expect(status.ok(), "%s", status.reason());
      out.download();
      merged.download();
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t col = 0; col < width; ++col) {
          const float got = out.get(token, col), sum = merged.get(token, col / dim);
          if (token == 2 && col / dim == 1)
            t.expect(got != got && sum != sum, "%g in part %d: %g, logsumexp %g", bad, int(part), got, sum);
          else
            t.expect(std::fabs(got - (o.value(token, col) + o.value(tokens + token, col)) / 2) < 1e-5,
                     "token %d, column %d: %g", int(token), int(col), got);
        }
      }
    }
  }
}

}  // namespace test
