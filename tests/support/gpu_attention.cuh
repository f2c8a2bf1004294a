// Attention of many queries on the GPU, checked against the oracle of attention.h.
#pragma once

#include "gpu.cuh"

#include <kernels/attention.cuh>

#include "attention.h"

namespace test {

template <class T, class S = k::Nothing>
using DeviceKv = KvSide<T, S, DeviceMemory>;

template <class T>
using OnDevice = Numbers<T, DeviceMemory>;

// What attention() rounds, as it is documented: float throughout where keys or values are float, and for those that a
// view computes. Otherwise queries become the 16-bit type of the keys, or with codes keep their own, or become half;
// weights become that of the values, or with codes half; with scales of values, bfloat16, to which values of half are
// then rounded as well.
struct Types {
  DType queries, keys, values;
  bool scaled_values = false;

  static bool has_16_bits(DType type) { return type == DType::f16 || type == DType::bf16; }
  static double rounding(DType type) { return type == DType::f16 ? 0x1p-11 : 0x1p-8; }

  Precision precision() const {
    Precision p;
    if (keys == DType::f32 || values == DType::f32) return p;
    const DType own = has_16_bits(queries) ? queries : DType::f16, first = has_16_bits(keys) ? keys : own;
    const DType second = scaled_values ? DType::bf16 : has_16_bits(values) ? values : DType::f16;
    if (queries != first) p.queries = rounding(first);
    if (scaled_values && values == DType::f16) p.values = rounding(DType::bf16);
    p.weights = second;
    p.tensor = true;
    p.scaled = scaled_values;
    return p;
  }
};

// What lies in memory; codes of 4 bits are as those of 8.
template <class E>
constexpr DType stored = dtype_of<E>::value;
template <>
constexpr DType stored<k::Int4> = DType::i8;
template <>
constexpr DType stored<k::Uint4> = DType::i8;
template <class Side>
struct SideOf {  // of a view that computes
  static constexpr DType type = DType::f32;
  static constexpr bool scaled = false;
};
template <class E, class S, class Memory>
struct SideOf<KvSide<E, S, Memory>> {
  static constexpr DType type = stored<E>;
  static constexpr bool scaled = !std::is_same<S, k::Nothing>::value;
};
template <class TQ, class K, class V>
Precision precision_of(const K&, const V&) {
  return Types{dtype_of<TQ>::value, SideOf<K>::type, SideOf<V>::type, SideOf<V>::scaled}.precision();
}

// The error over all results of a case, and that of a plain computation with the same weights.
struct Errors {
  double ours = 0, plain = 0;
};

// Every `step`th result of a case, and those of each sequence's last query. Where nothing but weights is rounded to 16
// bits, and logits are not so large that float is what limits them, the error over all must not be more than twice as
// large as when they are rounded under the row's largest logit, whose weight, 1 there, may be rounded as well.
template <class TQ, class TO, class Query, class K, class V>
void check(Tally& t, const std::string& what, AttentionData<TQ, TO, DeviceMemory>& d, const Query& query, const K& key,
           const V& value, const ScoreModel& score, const Precision& precision, int64_t step = 1) {
  const AttentionCase& c = d.c;
  const std::string name = what + ": " + c.describe();
  d.o.download();
  d.lse.download();
  t.expect(d.o.intact() && d.lse.intact() && d.q.unchanged(), "%s: wrote outside its rows", name.c_str());
  struct Spots {
    int64_t b, i, h;
  };
  std::vector<Spots> spots;
  int64_t count = 0;
  for (size_t b = 0; b < c.q_lens.size(); ++b) {
    for (int64_t i = 0; i < c.q_lens[b]; ++i) {
      for (int64_t h = 0; h < c.heads; ++h) {
        if (count++ % step == 0 || i + 1 == c.q_lens[b]) spots.push_back({int64_t(b), i, h});
      }
    }
  }
  std::vector<std::string> problems(spots.size());
  std::vector<Errors> errors(spots.size());
  const bool compare =
      precision.weights != DType::f32 && precision.queries == 0 && precision.values == 0 && !precision.scaled;
  in_parallel(spots.size(), [&](size_t n) {
    const auto [b, i, h] = spots[n];
    const int64_t row = d.offsets[size_t(b)] + i, kv_head = h / (c.heads / c.kv_heads), sequence = b, head = h;
    std::vector<double> plain;
    const auto want = attend([&](int64_t x) { return query(row, head * c.dim + x); },
                             [&](int64_t pos, int64_t x) { return key(sequence, kv_head, pos, x); },
                             [&](int64_t pos, int64_t x) { return value(sequence, kv_head, pos, x); },
                             {b, h, i, 0, c.q_lens[size_t(b)], c.kv_lens[size_t(b)]}, c.dim, c.value_dim(), c.scaling(),
                             score, precision, compare ? &plain : nullptr);
    std::ostringstream out;
    const std::string problem =
        mismatch(row, want.o, [&](int64_t x) { return d.o.get(row, head * c.value_dim() + x); });
    if (!problem.empty()) out << "sequence " << b << " query " << i << " head " << h << ": " << problem;
    else if (const float lse = d.lse.get(row, h); !within(lse, want.lse))
      out << "sequence " << b << " query " << i << " head " << h << ": lse " << lse << ", want " << want.lse.v << " +- "
          << want.lse.e;
    problems[n] = out.str();
    for (size_t x = 0; compare && x < plain.size(); ++x) {
      if (!std::isfinite(want.o[x].v) || want.lse.e > 1e-3) continue;
      const double got = value_of(d.o.get(row, head * c.value_dim() + int64_t(x))) - want.o[x].v,
                   like = round_to(dtype_of<TO>::value, plain[x]) - want.o[x].v,
                   of_largest = precision.of_weights() * want.o[x].v;
      errors[n].ours += got * got;
      errors[n].plain += like * like + of_largest * of_largest;
    }
  });
  Errors all;
  for (size_t n = 0; n < spots.size(); ++n) {
    t.expect(problems[n].empty(), "%s, %s", name.c_str(), problems[n].c_str());
    all.ours += errors[n].ours, all.plain += errors[n].plain;
  }
  t.expect(all.ours <= 4 * all.plain + 1e-12 * double(spots.size()), "%s: error %g, a plain computation has %g",
           name.c_str(), std::sqrt(all.ours), std::sqrt(all.plain));
}

// One call and its check. Maps may stand behind the queries and before the sink.
template <class TQ, class TO, class Kv, class K, class V, class S>
void attends(Tally& t, const std::string& what, const AttentionCase& c, const Kv& kv, const K& key, const V& value,
             const S& score, const ScoreModel& model, const Precision& precision, int64_t step = 1, double spread = 1) {
  if (t.leaves_out()) return;
  AttentionData<TQ, TO, DeviceMemory> d(c, spread);
  const OnDevice<int32_t> offsets(d.offsets);
  k::AttentionShape shape = d.shape();
  if (c.ragged_q) shape.q_offsets = offsets.data();
  const Stream stream;
  const k::Status status = k::attention(k::Exec(stream), d.source(), kv, d.sink(), shape, score, d.options());
  if (!t.expect(status.ok(), "%s: %s: %s", what.c_str(), c.describe().c_str(), status.reason())) return;
  stream.wait();
  check(t, what, d, [&](int64_t row, int64_t x) { return d.q.value(row, x); }, key, value, model, precision, step);
}
template <class TQ, class TO, class Kv, class K, class V, class S>
void attends(Tally& t, const std::string& what, const AttentionCase& c, const Kv& kv, const K& key, const V& value,
             const S& score, const ScoreModel& model, int64_t step = 1, double spread = 1) {
  attends<TQ, TO>(t, what, c, kv, key, value, score, model, precision_of<TQ>(key, value), step, spread);
}

// f(view) for the view of a placement.
template <class K, class V, class F>
void with_view(const Placement& where, const K& key, const V& value, const F& f) {
  const OnDevice<int32_t> lengths(where.short_lengths);
  if (where.layout == Layout::ragged) {
    const OnDevice<int32_t> offsets(where.offsets);
    f(k::ragged_kv(key.tensor(), value.tensor(), offsets.data()));
  } else if (where.paged()) {
    const OnDevice<int32_t> table(where.table);
    f(k::paged_kv(key.tensor(), value.tensor(), k::pages(table.data(), where.table_ld, where.page), lengths.data()));
  } else {
    f(k::dense_kv(key.tensor(), value.tensor(), lengths.data()));
  }
}

}  // namespace test
