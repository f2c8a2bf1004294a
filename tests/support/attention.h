// Attention: what it should give, and keys and values of every type and layout, in the memory of the CPU or of the GPU.
#pragma once

#include <kernels/kv.h>
#include <kernels/score.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "guarded.h"
#include "oracle.h"
#include "random.h"
#include "random_matrix.h"
#include "tally.h"

namespace test {

namespace k = kernels;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// ---- keys and values ------------------------------------------------------------------------------------------------

enum class Layout { nhd, hnd, ragged, paged_nhd, paged_hnd };
enum class ScaleOf { tensor, head, token };

// Where the positions of all sequences are. What no position uses is poison: whoever reads it, notices.
struct Placement {
  Layout layout;
  std::vector<int64_t> lengths;
  int64_t heads, page = 16;
  int64_t capacity = 0, blocks = 0;
  std::vector<int32_t> offsets, table, short_lengths;
  int64_t table_ld = 0;

  Placement(Layout l, const std::vector<int64_t>& lens, int64_t h, int64_t page_size = 16)
      : layout(l), lengths(lens), heads(h), page(page_size) {
    const int64_t most = lens.empty() ? 0 : *std::max_element(lens.begin(), lens.end());
    short_lengths.assign(lens.begin(), lens.end());
    offsets.push_back(3);  // positions need not begin at 0
    for (const int64_t n : lens) offsets.push_back(int32_t(offsets.back() + n));
    if (layout == Layout::ragged) {
      capacity = offsets.back(), blocks = 1;
    } else if (!paged()) {
      capacity = most + 5, blocks = int64_t(lens.size());
    } else {
      capacity = page, table_ld = most / page + 3;
      blocks = int64_t(lens.size()) * (most / page + 1) + 2;
      std::vector<int32_t> all(static_cast<size_t>(blocks));
      std::iota(all.begin(), all.end(), 0);
      for (size_t i = all.size(); i-- > 1;) std::swap(all[i], all[mix(i) % (i + 1)]);
      table.assign(lens.size() * size_t(table_ld), -1000000);
      size_t next = 0;
      for (size_t b = 0; b < lens.size(); ++b) {
        for (int64_t i = 0; i * page < lens[b]; ++i) table[b * size_t(table_ld) + size_t(i)] = all[next++];
      }
    }
  }
  bool paged() const { return layout == Layout::paged_nhd || layout == Layout::paged_hnd; }
  bool heads_first() const { return layout == Layout::hnd || layout == Layout::paged_hnd; }
  int64_t block(int64_t b, int64_t pos) const {
    return layout == Layout::ragged ? 0 : paged() ? table[size_t(b * table_ld + pos / page)] : b;
  }
  int64_t place(int64_t b, int64_t pos) const {
    return layout == Layout::ragged ? offsets[size_t(b)] + pos : paged() ? pos % page : pos;
  }
};

template <class E>
struct Element {
  using Unit = E;
  using Format = k::Nothing;
  static constexpr int per_unit = 1;
};
template <>
struct Element<k::Int4> {
  using Unit = uint32_t;
  using Format = k::Int4;
  static constexpr int per_unit = 8;
};
template <>
struct Element<k::Uint4> {
  using Unit = uint32_t;
  using Format = k::Uint4;
  static constexpr int per_unit = 8;
};

// The keys, or the values, of a placement: elements of E, with scales of S or none.
template <class E, class S = k::Nothing, class Memory = HostMemory>
class KvSide {
  using Unit = typename Element<E>::Unit;
  using Format = typename Element<E>::Format;
  static constexpr int per_unit = Element<E>::per_unit;
  static constexpr bool scaled = !std::is_same<S, k::Nothing>::value;
  using Scale = std::conditional_t<scaled, S, float>;

 public:
  KvSide(uint64_t seed, const Placement& where, int64_t dim, ScaleOf grain = ScaleOf::head, double spread = 1,
         int64_t shift = 1, int64_t gap = per_unit > 1 ? 8 : 3)
      : where_(where),
        dim_(dim),
        gap_(gap),
        grain_(grain),
        units_(1, elements() / per_unit, elements() / per_unit, shift, Poison::nan),
        scales_(1, scale_count(), scale_count(), 1, Poison::nan),
        values_(size_t(elements())) {
    Random random(seed);
    if (scaled && grain != ScaleOf::token) {
      for (int64_t i = 0; i < scale_count(); ++i) scales_.set(0, i, make<Scale>(0.05 + 0.1 * random.uniform()));
    }
    for (int64_t b = 0; b < int64_t(where.lengths.size()); ++b) {
      for (int64_t pos = 0; pos < where.lengths[size_t(b)]; ++pos) {
        for (int64_t h = 0; h < where.heads; ++h) {
          if (grain == ScaleOf::token) set_scale_at(b, h, pos, 0.05 + 0.1 * random.uniform());
          for (int64_t c = 0; c < dim; ++c) set(b, h, pos, c, random.normal() * spread);
        }
      }
    }
    units_.upload();
    scales_.upload();
  }

  void set(int64_t b, int64_t head, int64_t pos, int64_t c, double x) {
    const int64_t at = index(b, head, pos, c);
    if constexpr (per_unit > 1) {
      static const int shifts[] = {0, 16, 4, 20, 8, 24, 12, 28};
      const int code = std::max(0, std::min(15, int(std::lround(8 + 4 * x)))), shift = shifts[at % 8];
      units_.set(0, at / 8, (units_.get(0, at / 8) & ~(15u << shift)) | uint32_t(code) << shift);
      values_[size_t(at)] = code - (std::is_same<E, k::Int4>::value ? 8 : 0);
    } else {
      units_.set(0, at, make<Unit>(std::is_same<E, int8_t>::value ? 40 * x : x));
      values_[size_t(at)] = value_of(units_.get(0, at));
    }
  }
  void set_scale(int64_t i, double x) { scales_.set(0, i, make<Scale>(x)); }
  // Nothing where there are no scales.
  void set_scale_at(int64_t b, int64_t head, int64_t pos, double x) {
    if (scaled) set_scale(scale_index(b, head, pos), x);
  }
  int64_t scale_count() const {
    return !scaled                     ? 0
           : grain_ == ScaleOf::tensor ? 1
           : grain_ == ScaleOf::head   ? where_.heads
                                       : where_.blocks * where_.capacity * where_.heads;
  }
  void upload() { units_.upload(), scales_.upload(); }
  bool unchanged() const { return units_.unchanged() && scales_.unchanged(); }

  double operator()(int64_t b, int64_t head, int64_t pos, int64_t c) const {
    const double code = values_[size_t(index(b, head, pos, c))];
    if constexpr (scaled) return code * value_of(scales_.get(0, scale_index(b, head, pos)));
    else return code;
  }

  auto tensor() const {
    const Unit* p = units_.data();
    const auto plain = [&] {
      if constexpr (per_unit > 1) return k::strided<Format>(p, block_stride(), pos_stride(), head_stride());
      else return k::strided(p, block_stride(), pos_stride(), head_stride());
    }();
    if constexpr (scaled) {
      const S* s = scales_.data();
      if (grain_ == ScaleOf::tensor) return plain.scale(s);
      if (grain_ == ScaleOf::head) return plain.head_scales(s);
      return plain.scales(s, where_.capacity * where_.heads, where_.heads, 1);
    } else {
      return plain;
    }
  }

 private:
  int64_t row() const { return dim_ + gap_; }
  int64_t pos_stride() const { return where_.heads_first() ? row() : row() * where_.heads; }
  int64_t head_stride() const { return where_.heads_first() ? row() * where_.capacity : row(); }
  int64_t block_stride() const { return row() * where_.heads * where_.capacity; }
  int64_t elements() const { return block_stride() * where_.blocks; }
  int64_t index(int64_t b, int64_t head, int64_t pos, int64_t c) const {
    return where_.block(b, pos) * block_stride() + where_.place(b, pos) * pos_stride() + head * head_stride() + c;
  }
  int64_t scale_index(int64_t b, int64_t head, int64_t pos) const {
    if (grain_ == ScaleOf::tensor) return 0;
    if (grain_ == ScaleOf::head) return head;
    return (where_.block(b, pos) * where_.capacity + where_.place(b, pos)) * where_.heads + head;
  }

  const Placement& where_;
  int64_t dim_, gap_;
  ScaleOf grain_;
  Guarded<Unit, Memory> units_;
  Guarded<Scale, Memory> scales_;
  std::vector<double> values_;
};

// A view whose keys and values are computed, of one length.
struct Formula : k::KvView {
  struct Codes : k::Functor {
    int64_t from;
    bool values;
    KERNELS_HD Codes(int64_t begin, bool v) : from(begin), values(v) {}
    template <int N>
    KERNELS_HD k::Pack<float, N> load(int64_t row, int64_t col) const {
      k::Pack<float, N> out;
      for (int i = 0; i < N; ++i) out.v[i] = float(Formula::at(from + row, col + i, values));
      return out;
    }
  };
  static KERNELS_HD double at(int64_t pos, int64_t col, bool values) {
    return double((pos * 7 + col * 3 + (values ? 5 : 0)) % 11) / 8 - 0.5;
  }
  KERNELS_HD int64_t length(int64_t) const { return 333; }
  KERNELS_HD auto key(int64_t, int64_t, int64_t pos) const { return k::KvRun{Codes(pos, false), 5}; }
  KERNELS_HD auto value(int64_t, int64_t, int64_t pos) const { return k::KvRun{Codes(pos, true), 7}; }

  // What they are, for oracles.
  static double expected_key(int64_t, int64_t, int64_t pos, int64_t c) { return at(pos, c, false); }
  static double expected_value(int64_t, int64_t, int64_t pos, int64_t c) { return at(pos, c, true); }
};

// The same with as many keys as there can be, for scores that see the last `seen` of them at most: what oracles are
// told of.
struct FarFormula : Formula {
  static constexpr int64_t keys = 2147482624, seen = 100;
  KERNELS_HD int64_t length(int64_t) const { return keys; }
  static double expected_key(int64_t, int64_t, int64_t pos, int64_t c) { return at(keys - seen + pos, c, false); }
  static double expected_value(int64_t, int64_t, int64_t pos, int64_t c) { return at(keys - seen + pos, c, true); }
};

// ---- oracle ---------------------------------------------------------------------------------------------------------

// A query and a key, as the library's scores see them.
struct Spot {
  int64_t b, head, query, key, q_len, kv_len;
};

// What a score should do, in plain double arithmetic.
struct ScoreModel {
  std::function<Real<>(Real<>, const Spot&)> transform = [](Real<> x, const Spot&) { return x; };
  std::function<bool(const Spot&)> visible = [](const Spot&) { return true; };
  std::function<double(int64_t)> sink = [](int64_t) { return kMinusInfinity; };
};
inline ScoreModel operator&(const ScoreModel& a, const ScoreModel& b) {
  ScoreModel both;
  both.transform = [=](Real<> x, const Spot& s) { return b.transform(a.transform(x, s), s); };
  both.visible = [=](const Spot& s) { return a.visible(s) && b.visible(s); };
  both.sink = [=](int64_t head) {
    const double x = a.sink(head), y = b.sink(head), m = std::max(x, y);
    return m == kMinusInfinity ? m : m + std::log(std::exp(x - m) + std::exp(y - m));
  };
  return both;
}

struct Attended {
  Row<> o;
  Real<> lse;
};

// What a path that does not compute in float throughout rounds on the way. Tensor cores add with an accumulator that is
// cut off: up to two units for every 16 products.
struct Precision {
  double queries = 0, values = 0;  // when they become operands, relative to them
  DType weights = DType::f32;
  bool tensor = false;
  bool scaled = false;  // whether weights are rounded with the scales of values in them
  double least = 0;     // a weight that may become 0, whatever their type

  double of_weights() const {
    return weights == DType::f16 ? 0x1p-11 : weights == DType::bf16 ? 0x1p-8 : weights == DType::e4m3 ? 0x1p-4 : 0;
  }
  // What is smaller may become 0, in float as well. With e4m3 the largest of a row is 32 at least.
  double least_weight() const {
    return std::max(std::max(least, 0x1p-120), weights == DType::f16 ? 0x1p-25 : weights == DType::e4m3 ? 0x1p-15 : 0);
  }
  double units(int64_t terms) const { return tensor ? double(terms) / 8 : 0; }
};

// One head of one query. q(c), key(pos, c), value(pos, c). `plain`: if given, what it would be if nothing but the
// weights under the largest logit was rounded.
template <class Q, class K, class V>
Attended attend(const Q& q, const K& key, const V& value, Spot spot, int64_t dim, int64_t v_dim, double scale,
                const ScoreModel& score, const Precision& precision = {}, std::vector<double>* plain = nullptr) {
  Row<> x;
  std::vector<int64_t> keys;
  for (spot.key = 0; spot.key < spot.kv_len; ++spot.key) {
    if (!score.visible(spot)) continue;
    long double sum = 0, size = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const double a = q(c) * key(spot.key, c);
      sum += a, size += std::fabs(a);
    }
    // q is rounded once more with the scale in it; then as in a product.
    x.push_back(score.transform(
        {double(sum) * scale,
         double(size) * std::fabs(scale) * ((kSum + 6 + precision.units(dim)) * unit<float> + precision.queries)},
        spot));
    keys.push_back(spot.key);
  }
  const double sink = score.sink(spot.head);
  if (sink != kMinusInfinity) x.push_back(Real<>(sink));
  Attended out;
  double largest;
  const Real<> log_sum = log_sum_exp(x, largest);
  out.lse = {largest == kMinusInfinity ? largest : log_sum.v == log_sum.v ? largest + log_sum.v : log_sum.v,
             log_sum.e + 4 * unit<float> * (std::fabs(largest) + std::fabs(log_sum.v))};
  if (largest == kMinusInfinity) {
    out.o.assign(size_t(v_dim), Real<>(0));
    if (plain) plain->assign(size_t(v_dim), 0);
    return out;
  }
  double error = 0;
  std::vector<double> weights;
  if (plain) {
    for (const Real<>& a : x) weights.push_back(round_to(precision.weights, std::exp(a.v - largest)));
    plain->clear();
  }
  for (const Real<>& a : x) error = std::max(error, a.e);
  out.lse.e += error;
  softmax(x);
  for (int64_t c = 0; c < v_dim; ++c) {
    long double sum = 0, size = 0, off = 0, rounded = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const double v = value(keys[i], c);
      sum += x[i].v * v, size += std::fabs(x[i].v * v), off += (x[i].e + precision.least_weight()) * std::fabs(v);
      if (plain) rounded += weights[i] * v;
    }
    const double units =
        (kSum + 8 + precision.units(int64_t(keys.size()))) * unit<float> + precision.of_weights() + precision.values;
    out.o.push_back({double(sum), double(off + size * units) + tiny<float>});
    if (plain) plain->push_back(double(rounded) * std::exp(-log_sum.v));
  }
  return out;
}

// ---- one call and its check -----------------------------------------------------------------------------------------

struct AttentionCase {
  std::vector<int64_t> q_lens, kv_lens;
  int64_t heads, kv_heads, dim;
  int64_t v_dim = 0;
  double scale = 0;  // 0: the default
  bool ragged_q = false;
  int threads = 2;
  bool aligned = false;  // queries and results, at multiples of 16 bytes
  int splits = 0;        // 0: not fixed
  int64_t most_keys = 0; // 0: not said

  int64_t value_dim() const { return v_dim > 0 ? v_dim : dim; }
  double scaling() const { return scale != 0 ? scale : 1 / std::sqrt(double(dim)); }
  int64_t most_queries() const { return *std::max_element(q_lens.begin(), q_lens.end()); }
  std::string describe() const {
    std::ostringstream out;
    const auto list = [&](const std::vector<int64_t>& all) {
      for (size_t i = 0; i < all.size() && i < 8; ++i) out << " " << all[i];
      if (all.size() > 8) out << " ...";
    };
    out << "q", list(q_lens);
    out << ", kv", list(kv_lens);
    out << ", heads " << heads << "/" << kv_heads << ", dim " << dim << "/" << value_dim() << ", " << threads
        << " threads";
    return out.str();
  }
};

// Queries, results and logsumexps of a case. Unless ragged, all sequences have the same number of queries.
template <class TQ = float, class TO = float, class Memory = HostMemory>
struct AttentionData {
  AttentionCase c;
  std::vector<int32_t> offsets{0};
  RandomMatrix<TQ, Memory> q;
  Guarded<TO, Memory> o;
  Guarded<float, Memory> lse;
  std::function<bool(int64_t b, int64_t head, int64_t col)> broken;  // results that must not be finite, if given

  explicit AttentionData(const AttentionCase& a, double spread = 1)
      : c(a),
        q(31, rows(a), a.heads * a.dim, a.heads * a.dim + (a.aligned ? 16 : 3), a.aligned ? 0 : 1, spread),
        o(rows(a), a.heads * a.value_dim(), a.heads * a.value_dim() + (a.aligned ? 16 : 5), a.aligned ? 0 : 1),
        lse(rows(a), a.heads, a.heads + 1) {
    for (const int64_t n : a.q_lens) offsets.push_back(int32_t(offsets.back() + n));
  }
  static int64_t rows(const AttentionCase& a) { return std::accumulate(a.q_lens.begin(), a.q_lens.end(), int64_t(0)); }
  k::AttentionShape shape() const {
    return {int64_t(c.q_lens.size()),
            c.most_queries(),
            c.heads,
            c.kv_heads,
            c.dim,
            c.v_dim,
            c.ragged_q ? offsets.data() : nullptr};
  }
  auto source() const { return k::load(static_cast<const TQ*>(q.data()), q.ld()); }
  auto sink() const { return k::store(o.data(), o.ld()); }
  k::Attention options() const {
    k::Attention all;
    all.lse(lse.data(), lse.ld());
    if (c.scale != 0) all.scale(c.scale);
    if (c.splits != 0) all.splits(c.splits);
    all.most_keys(c.most_keys);
    return all;
  }

  // Every `step`th query against the oracle. key, value: (b, head, pos, c).
  template <class K, class V>
  void check(Tally& t, const std::string& what, const k::Status& status, const K& key, const V& value,
             const ScoreModel& score, int64_t step = 1, const Precision& precision = {}) {
    const std::string name = what + ": " + c.describe();
    if (!t.expect(status.ok(), "%s: %s", name.c_str(), status.reason())) return;
    o.download();
    lse.download();
    t.expect(o.intact() && lse.intact() && q.unchanged(), "%s: wrote outside its rows", name.c_str());
    int64_t count = 0;
    for (size_t b = 0; b < c.q_lens.size(); ++b) {
      for (int64_t i = 0; i < c.q_lens[b]; ++i) {
        for (int64_t h = 0; h < c.heads; ++h) {
          if (count++ % step != 0 && i + 1 < c.q_lens[b]) continue;
          const int64_t row = offsets[b] + i, kv_head = h / (c.heads / c.kv_heads);
          auto want = attend([&](int64_t x) { return q.value(row, h * c.dim + x); },
                             [&](int64_t pos, int64_t x) { return key(int64_t(b), kv_head, pos, x); },
                             [&](int64_t pos, int64_t x) { return value(int64_t(b), kv_head, pos, x); },
                             {int64_t(b), h, i, 0, c.q_lens[b], c.kv_lens[b]}, c.dim, c.value_dim(), c.scaling(), score,
                             precision);
          for (int64_t x = 0; broken && x < c.value_dim(); ++x) {
            const double got = value_of(o.get(row, h * c.value_dim() + x));
            if (broken(int64_t(b), h, x)) want.o[size_t(x)] = std::isfinite(got) ? Real<>(std::nan("")) : Real<>(got);
          }
          const std::string problem =
              mismatch(row, want.o, [&](int64_t x) { return o.get(row, h * c.value_dim() + x); });
          t.expect(problem.empty(), "%s, sequence %d query %d head %d: %s", name.c_str(), int(b), int(i), int(h),
                   problem.c_str());
          t.expect(within(lse.get(row, h), want.lse), "%s, sequence %d query %d head %d: lse %g, want %g +- %g",
                   name.c_str(), int(b), int(i), int(h), lse.get(row, h), want.lse.v, want.lse.e);
        }
      }
    }
  }
};

// ---- scores, with their models --------------------------------------------------------------------------------------

inline ScoreModel causal_model(bool top_left = false) {
  ScoreModel m;
  m.visible = [=](const Spot& s) { return s.key <= s.query + (top_left ? 0 : s.kv_len - s.q_len); };
  return m;
}
inline ScoreModel window_model(int64_t left, int64_t right, bool top_left = false) {
  ScoreModel m;
  m.visible = [=](const Spot& s) {
    const int64_t place = s.query + (top_left ? 0 : s.kv_len - s.q_len);
    return (left < 0 || s.key >= place - left) && (right < 0 || s.key <= place + right);
  };
  return m;
}
inline ScoreModel soft_cap_model(double cap) {
  ScoreModel m;
  m.transform = [=](Real<> x, const Spot&) {
    if (x.v == kMinusInfinity) return Real<>(-cap, cap * 0x1p-22);  // or else the bound is infinite
    return Real<>(cap * std::tanh(x.v / cap), x.e + cap * 0x1p-22 + 2 * unit<float> * std::fabs(x.v));
  };
  return m;
}
inline ScoreModel alibi_model(const std::vector<float>& slopes) {
  ScoreModel m;
  m.transform = [=](Real<> x, const Spot& s) {
    if (x.v == kMinusInfinity) return Real<>(x.v);
    return x + Real<>(-double(slopes[size_t(s.head)]) * std::fabs(double(s.key - (s.query + s.kv_len - s.q_len))))
                   .rounded();
  };
  return m;
}

}  // namespace test
