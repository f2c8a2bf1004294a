// Attention of many queries on the GPU: shapes, lengths, heads, layouts, scores, graphs.
#include "support/gpu_attention.cuh"
#include "support/heads.h"

#include <kernels/rope.h>

using namespace test;

namespace {

// One case on dense keys and values of T, which begin and whose rows lie at multiples of so many columns.
template <class T, class S>
void dense(Tally& t, AttentionCase c, const S& score, const ScoreModel& model, int64_t step = 1, int64_t unit = 8,
           double spread = 1) {
  c.aligned = unit == 8;
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const int64_t shift = unit % 8, gap = unit == 1 ? 3 : unit;
  const DeviceKv<T> key(1, where, c.dim, ScaleOf::head, spread, shift, gap),
      value(2, where, c.value_dim(), ScaleOf::head, 1, shift, gap);
  const OnDevice<int32_t> lengths(where.short_lengths);
  attends<T, T>(t, c.aligned ? "aligned" : "not aligned", c, k::dense_kv(key.tensor(), value.tensor(), lengths.data()),
                key, value, score, model, step, spread);
}

const std::pair<int64_t, int64_t> kOtherDims[] = {{512, 512}, {192, 128}, {576, 512}, {64, 256}, {8, 512},
                                                  {256, 8},   {72, 200},  {128, 64},  {40, 128}, {104, 192}};

}  // namespace

TEST_CASE("every head dimension") {
  Tally t;
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    dense<k::half>(t, {{39}, {75}, 2, 1, dim}, k::causal(), causal_model(), 7);
    for (const int64_t unit : {1, 2, 4})
      if (dim % 56 == 0) dense<k::half>(t, {{39}, {75}, 2, 1, dim}, k::causal(), causal_model(), 7, unit);
  }
  for (const auto& dims : kOtherDims) {
    dense<k::half>(t, {{140}, {150}, 1, 1, dims.first, dims.second}, k::causal(), causal_model(), 7);
    dense<k::half>(t, {{30}, {70}, 2, 1, dims.first, dims.second}, k::causal(), causal_model(), 7, 1);
  }
  CHECK_TALLY(t);
}

TEST_CASE("every group of heads") {
  Tally t;
  for (const int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16, 64}) {
    for (const int64_t queries : {1, 3, 20, 150})
      dense<k::bfloat16>(t, {{queries, queries}, {150, 40}, 2 * group, 2, 24}, k::causal(), causal_model(), group);
  }
  CHECK_TALLY(t);
}

TEST_CASE("every length") {
  Tally t;
  for (int64_t length = 0; length <= 400; length += length < 70 ? 3 : length % 64 >= 62 || length % 64 == 0 ? 1 : 17) {
    dense<k::half>(t, {{130}, {length}, 2, 1, 16}, k::causal(), causal_model(), 5);
    dense<k::half>(t, {{length}, {130}, 2, 1, 128}, k::no_mask(), {}, 13);
    dense<k::half>(t, {{70}, {length}, 1, 1, 136}, k::causal(k::Align::top_left), causal_model(true), 11);
  }
  dense<k::bfloat16>(t, {{1000}, {1500}, 2, 1, 64}, k::causal(), causal_model(), 41);
  dense<k::bfloat16>(t, {{777}, {2050}, 1, 1, 128}, k::causal(), causal_model(), 41);
  dense<k::bfloat16>(t, {{300}, {1100}, 1, 1, 256}, k::causal(), causal_model(), 41);
  CHECK_TALLY(t);
}

namespace {

// Of a sequence of its own: its first, middle and last query against the oracle, and that all others are written.
struct AnyLength {
  int64_t queries, keys, dim;
  bool causal;
  Device<k::half> o;
  AnyLength(int64_t q, int64_t kv, int64_t d, bool masks)
      : queries(q), keys(kv), dim(d), causal(masks), o(q, 2 * d, 2 * d + 8, 0, Poison::nan) {}

  template <class Q, class K>
  std::string problem(const Q& q, const K& key, const K& value) const {
    const std::string name =
        std::to_string(queries) + " queries, " + std::to_string(keys) + " keys, dim " + std::to_string(dim) + ": ";
    if (!o.intact()) return name + "wrote outside its rows";
    for (int64_t row = 0; row < queries; ++row) {
      for (int64_t x = 0; x < 2 * dim; ++x) {
        if (!std::isfinite(value_of(o.get(row, x)))) return name + "row " + std::to_string(row) + " has no result";
      }
    }
    const Precision precision = Types{DType::f16, DType::f16, DType::f16}.precision();
    for (const int64_t row : {int64_t(0), queries / 2, queries - 1}) {
      if (row < 0 || row >= queries) continue;
      for (int64_t h = 0; h < 2; ++h) {
        const auto want =
            attend([&](int64_t x) { return q.value(row, h * dim + x); },
                   [&](int64_t pos, int64_t x) { return key(0, 0, pos, x); },
                   [&](int64_t pos, int64_t x) { return value(0, 0, pos, x); }, {0, h, row, 0, queries, keys}, dim, dim,
                   1 / std::sqrt(double(dim)), causal ? causal_model() : ScoreModel{}, precision);
        const std::string wrong = mismatch(row, want.o, [&](int64_t x) { return o.get(row, h * dim + x); });
        if (!wrong.empty()) return name + wrong;
      }
    }
    return "";
  }
};

}  // namespace

TEST_CASE("every length of queries and keys up to 1,100") {
  const int64_t most = 1100;
  for (const int64_t dim : {16, 64, 72, 128, 136, 256}) {
    const Placement where(Layout::nhd, {most}, 1);
    const DeviceKv<k::half> key(1, where, dim, ScaleOf::head, 1, 0, 8), value(2, where, dim, ScaleOf::head, 1, 0, 8);
    const RandomMatrix<k::half, DeviceMemory> q(31, most, 2 * dim, 2 * dim + 8, 0, 1);
    const Stream stream;
    const k::Exec ex(stream);
    std::vector<std::unique_ptr<AnyLength>> all;
    Shortened shortened;
    for (int64_t length = 0; length <= most; ++length) {
      if (length % 100 != 0 && shortened.leaves_out()) continue;
      for (const auto& sizes : {std::pair<int64_t, int64_t>{length, length}, {3, length}, {length, 37}}) {
        if (shortened.leaves_out()) continue;
        const bool causal = (length + length / 64 + sizes.second % 2) % 2 == 0;  // of any length of tiles both
        all.push_back(std::make_unique<AnyLength>(sizes.first, sizes.second, dim, causal));
        const auto attend = [&](const auto& score) {
          return k::attention(ex, k::load(static_cast<const k::half*>(q.data()), q.ld()),
                              k::dense_kv(key.tensor(), value.tensor(), sizes.second),
                              k::store(all.back()->o.data(), all.back()->o.ld()), {1, sizes.first, 2, 1, dim}, score);
        };
        const k::Status status = causal ? attend(k::causal()) : attend(k::no_mask());
        if (!status.ok()) report({all.back()->problem(q, key, value) + status.reason()});
      }
      if (length % 100 != 0) continue;
      stream.wait();
      for (auto& one : all) one->o.download();
      std::vector<std::string> problems(all.size());
      in_parallel(all.size(), [&](size_t i) { problems[i] = all[i]->problem(q, key, value); });
      report(problems);
      all.clear();
    }
  }
}

// Tiles of which all rows see all keys, between others.
TEST_CASE("long sequences, in every layout") {
  Tally t;
  const std::vector<AttentionCase> cases{
      {{150}, {1700}, 2, 1, 64}, {{150}, {700}, 2, 1, 128}, {{80}, {500}, 1, 1, 256}, {{40}, {300}, 1, 1, 576, 512}};
  for (AttentionCase c : cases) {
    c.aligned = true;
    const int keys = int(c.kv_lens[0]);
    for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::ragged, Layout::paged_nhd}) {
      const Placement where(layout, c.kv_lens, c.kv_heads, 16);
      const DeviceKv<k::bfloat16> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.value_dim(), ScaleOf::head, 1, 0, 8);
      with_view(where, key, value, [&](const auto& kv) {
        const auto scored = [&](const char* name, const auto& score, const ScoreModel& model) {
          attends<k::bfloat16, k::bfloat16>(t, name + (", layout " + std::to_string(int(layout))), c, kv, key, value,
                                            score, model, 17);
        };
        scored("all", k::no_mask(), {});
        scored("causal", k::causal(), causal_model());
        scored("window", k::window(keys * 9 / 10, 0), window_model(keys * 9 / 10, 0));
        scored("window, top left", k::window(-1, keys * 3 / 4, k::Align::top_left),
               window_model(-1, keys * 3 / 4, true));
        if (layout == Layout::nhd)
          scored("soft cap", k::causal() & k::soft_cap(2.f), causal_model() & soft_cap_model(2));
      });
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("ragged batches, with empty sequences") {
  Tally t;
  AttentionCase c{{5, 0, 1, 300, 9}, {700, 20, 0, 40, 9}, 4, 2, 40};
  c.ragged_q = true;
  dense<k::half>(t, c, k::causal(), causal_model(), 3);
  c.q_lens = {100, 1, 0, 200, 3};
  c.kv_lens = {30, 1, 0, 900, 0};
  c.dim = 128;
  dense<k::half>(t, c, k::no_mask(), {}, 7);
  c.scale = -0.2;
  dense<k::half>(t, c, k::causal(), causal_model(), 7);
  c.scale = 0.7;
  dense<k::half>(t, c, k::causal(), causal_model(), 7);
  CHECK_TALLY(t);
}

TEST_CASE("ragged queries, with pages of keys") {
  Tally t;
  AttentionCase c{{5, 0, 1, 200, 9, 70}, {700, 20, 0, 240, 9, 333}, 4, 2, 40};
  c.ragged_q = true;
  for (const int64_t dim : {40, 128, 256}) {
    c.dim = dim;
    for (const int64_t page : {7, 16, 64}) {
      const Placement where(page == 7 ? Layout::paged_nhd : Layout::paged_hnd, c.kv_lens, c.kv_heads, page);
      const DeviceKv<k::half> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
      with_view(where, key, value, [&](const auto& kv) {
        attends<k::half, k::half>(t, "page " + std::to_string(page), c, kv, key, value, k::causal(), causal_model(), 5);
      });
    }
  }
  CHECK_TALLY(t);
}

// Pages that no query's window reaches have numbers that lie nowhere in memory.
TEST_CASE("keys outside a window are not touched") {
  Tally t;
  const auto windowed = [&](auto of_type, int64_t dim) {
    using T = decltype(of_type);
    AttentionCase c{{5, 40}, {700, 1333}, 4, 2, dim};
    c.ragged_q = true;
    for (const int64_t left : {0, 37, 200}) {
      Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 16);
      const DeviceKv<T> key(1, where, dim, ScaleOf::head, 1, 0, 8), value(2, where, dim, ScaleOf::head, 1, 0, 8);
      std::vector<int32_t> table = where.table;
      for (size_t b = 0; b < c.kv_lens.size(); ++b) {
        for (int64_t page = 0; (page + 1) * 16 <= c.kv_lens[b] - c.q_lens[b] - left; ++page)
          table[b * size_t(where.table_ld) + size_t(page)] = -1000000;
      }
      const OnDevice<int32_t> there(table), lengths(where.short_lengths);
      attends<T, T>(
          t, "window", c,
          k::paged_kv(key.tensor(), value.tensor(), k::pages(there.data(), where.table_ld, 16), lengths.data()), key,
          value, k::window(left, 0), window_model(left, 0), 3);
    }
  };
  for (const int64_t dim : {64, 128, 256}) windowed(k::half{}, dim);
  windowed(float{}, 40);
  // Those behind the last that any query of the sequence sees.
  const auto top_left = [&](auto of_type, int64_t dim) {
    using T = decltype(of_type);
    AttentionCase c{{90, 300}, {700, 1333}, 4, 2, dim};
    c.ragged_q = true;
    for (const int64_t right : {0, 41}) {
      Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 16);
      DeviceKv<T> key(1, where, dim, ScaleOf::head, 1, 0, 8), value(2, where, dim, ScaleOf::head, 1, 0, 8);
      std::vector<int32_t> table = where.table;
      for (size_t b = 0; b < c.kv_lens.size(); ++b) {
        const int64_t end = c.q_lens[b] + right;
        for (int64_t pos = end; pos < c.kv_lens[b]; ++pos) {
          if (pos % 16 == 0) table[b * size_t(where.table_ld) + size_t(pos / 16)] = -1000000;
          for (int64_t x = 0; x < c.kv_heads * dim; ++x)
            for (DeviceKv<T>* side : {&key, &value}) side->set(int64_t(b), x / dim, pos, x % dim, std::nan(""));
        }
      }
      key.upload(), value.upload();
      const OnDevice<int32_t> there(table), lengths(where.short_lengths);
      attends<T, T>(
          t, "window, top left", c,
          k::paged_kv(key.tensor(), value.tensor(), k::pages(there.data(), where.table_ld, 16), lengths.data()), key,
          value, k::window(-1, right, k::Align::top_left), window_model(-1, right, true), 3);
    }
  };
  for (const int64_t dim : {64, 128, 256}) top_left(k::half{}, dim);
  top_left(float{}, 40);
  CHECK_TALLY(t);
}

TEST_CASE("layouts, and pages of any size") {
  Tally t;
  const auto layout = [&](Layout how, int64_t page, bool aligned, const AttentionCase& given) {
    AttentionCase c = given;
    c.aligned = aligned;
    const Placement where(how, c.kv_lens, c.kv_heads, page);
    const DeviceKv<k::half> key(1, where, c.dim, ScaleOf::head, 1, aligned ? 0 : 1, aligned ? 8 : 3),
        value(2, where, c.value_dim(), ScaleOf::head, 1, aligned ? 0 : 1, aligned ? 16 : 5);
    with_view(where, key, value, [&](const auto& kv) {
      attends<k::half, k::half>(t, "layout " + std::to_string(int(how)) + ", page " + std::to_string(page), c, kv, key,
                                value, k::causal(), causal_model(), 17);
    });
  };
  for (const AttentionCase& c :
       {AttentionCase{{150, 150}, {170, 300}, 4, 2, 64}, AttentionCase{{33, 33}, {300, 0}, 4, 2, 128},
        AttentionCase{{70}, {290}, 2, 2, 192, 128}, AttentionCase{{40}, {290}, 2, 2, 576, 512}}) {
    for (const bool aligned : {true, false}) {
      layout(Layout::nhd, 16, aligned, c);
      layout(Layout::hnd, 16, aligned, c);
      layout(Layout::ragged, 16, aligned, c);
      for (const int64_t page : {1, 7, 16, 64, 128, 1000})
        layout(page % 2 ? Layout::paged_nhd : Layout::paged_hnd, page, aligned, c);
    }
  }
  CHECK_TALLY(t);
}

// ---- scores ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kQueries = 70, kKeys = 300;  // at most, in tests of scores

// Memory of the scores, once for the device and once for their models.
struct Tables {
  std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f},
                     sinks = {0.3f, -2.f, 5.f, -std::numeric_limits<float>::infinity()};
  std::vector<k::half> biases = std::vector<k::half>(2 * 4 * kQueries * kKeys);
  std::vector<uint32_t> bits = std::vector<uint32_t>(2 * kQueries * 10);
  OnDevice<float> slopes_there{slopes}, sinks_there{sinks};
  std::unique_ptr<OnDevice<k::half>> biases_there;
  std::unique_ptr<OnDevice<uint32_t>> bits_there;

  Tables() {
    Random random(5);
    for (auto& x : biases) x = make<k::half>(random.below(9) == 0 ? kMinusInfinity : 2 * random.normal());
    for (auto& x : bits) x = uint32_t(random.bits());
    biases_there = std::make_unique<OnDevice<k::half>>(biases);
    bits_there = std::make_unique<OnDevice<uint32_t>>(bits);
  }
};
Tables& tables() {
  static Tables all;
  return all;
}

// One of one's own: every third key is denied to odd heads, and logits are halved.
struct Own : k::Score {
  template <int N>
  KERNELS_HD k::Pack<float, N> transform(const k::Pack<float, N>& logits, const k::ScoreAt&) const {
    return logits * 0.5f;
  }
  KERNELS_HD bool visible(const k::ScoreAt& at) const { return at.head % 2 == 0 || at.key % 3 != 0; }
};

const char* const kNames[] = {
    "causal", "causal, top left", "window", "soft cap", "alibi", "bias", "bits", "tree", "sinks", "own"};
constexpr int kScores = 10;

ScoreModel model_of(int kind) {
  ScoreModel m;
  switch (kind) {
    case 0: return causal_model();
    case 1: return causal_model(true);
    case 2: return window_model(20, 3);
    case 3: return soft_cap_model(2);
    case 4: return alibi_model(tables().slopes);
    case 5:
      m.transform = [](Real<> x, const Spot& s) {
        const double b = value_of(tables().biases[size_t(((s.b * 4 + s.head) * kQueries + s.query) * kKeys + s.key)]);
        return b == kMinusInfinity ? Real<>(b) : x + Real<>(b);
      };
      return m;
    case 6:
    case 7:
      m.visible = [=](const Spot& s) {
        const int64_t bit = kind == 7 ? s.key - (s.kv_len - s.q_len) : s.key;
        return bit < 0 || (tables().bits[size_t((s.b * kQueries + s.query) * 10 + bit / 32)] >> (bit % 32) & 1) != 0;
      };
      return m;
    case 8: m.sink = [](int64_t head) { return double(tables().sinks[size_t(head)]); }; return m;
    default:
      m.transform = [](Real<> x, const Spot&) { return Real<>(x.v * 0.5, x.e * 0.5); };
      m.visible = [](const Spot& s) { return s.head % 2 == 0 || s.key % 3 != 0; };
      return m;
  }
}

// One of them, chosen at run time, so that all pairs are one type.
struct AnyScore : k::Score {
  int kind;
  k::Window causal = k::causal(), top_left = k::causal(k::Align::top_left), window = k::window(20, 3);
  k::SoftCap cap = k::soft_cap(2.f);
  k::Alibi alibi = k::alibi(tables().slopes_there.data());
  k::ScoreBias<k::half> bias =
      k::score_bias(tables().biases_there->data(), 4 * kQueries * kKeys, kQueries* kKeys, kKeys);
  k::Bitmask bits = k::bitmask(tables().bits_there->data(), 10, kQueries * 10),
             tree = k::tree_mask(tables().bits_there->data(), 10, kQueries * 10);
  k::Sinks<float> sinks = k::sinks(tables().sinks_there.data());
  Own own;
  explicit AnyScore(int i) : kind(i) {}

  template <int N>
  KERNELS_HD k::Pack<float, N> transform(const k::Pack<float, N>& logits, const k::ScoreAt& at) const {
    switch (kind) {
      case 3: return cap.transform(logits, at);
      case 4: return alibi.transform(logits, at);
      case 5: return bias.transform(logits, at);
      case 9: return own.transform(logits, at);
      default: return logits;
    }
  }
  KERNELS_HD bool visible(const k::ScoreAt& at) const {
    return kind == 6 ? bits.visible(at) : kind == 7 ? tree.visible(at) : kind != 9 || own.visible(at);
  }
  KERNELS_HD k::KeyRange kv_range(const k::ScoreQueries& q) const {
    return kind == 0   ? causal.kv_range(q)
           : kind == 1 ? top_left.kv_range(q)
           : kind == 2 ? window.kv_range(q)
                       : k::KeyRange{0, q.kv_len};
  }
  KERNELS_HD float sink(int64_t head) const { return kind == 8 ? sinks.sink(head) : -k::infinity<float>(); }
};

template <class S>
void scored(Tally& t, const std::string& what, const S& score, const ScoreModel& model, int64_t step = 3,
            double spread = 1) {
  for (AttentionCase c : {AttentionCase{{70, 70}, {300, 45}, 4, 2, 24}, AttentionCase{{6, 6}, {290, 3}, 4, 1, 128},
                          AttentionCase{{40}, {200}, 4, 4, 192}, AttentionCase{{37}, {120}, 4, 2, 512}}) {
    c.aligned = true;
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const DeviceKv<k::bfloat16> key(1, where, c.dim, ScaleOf::head, spread, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    const OnDevice<int32_t> lengths(where.short_lengths);
    attends<k::bfloat16, float>(t, what, c, k::dense_kv(key.tensor(), value.tensor(), lengths.data()), key, value,
                                score, model, step, spread);
  }
}

}  // namespace

TEST_CASE("each score alone") {
  Tally t;
  for (int kind = 0; kind < kScores; ++kind)
    scored(t, kNames[kind], AnyScore(kind) & AnyScore(0), model_of(kind) & model_of(0), 5);
  AnyScore of_heads(6);
  of_heads.bits = k::bitmask(tables().bits_there->data(), 10, 0).head_stride(150);
  ScoreModel bits_of_heads;
  bits_of_heads.visible = [](const Spot& s) {
    return (tables().bits[size_t(s.head * 150 + s.query * 10 + s.key / 32)] >> (s.key % 32) & 1) != 0;
  };
  scored(t, "bits of heads", of_heads & AnyScore(0), bits_of_heads & causal_model(), 5);
  // Masks of which prefill reads 32 bits at once, alone and beside what is asked key by key.
  const k::Bitmask bits = of_heads.bits, rows = AnyScore(6).bits;
  scored(t, "words of heads", bits, bits_of_heads, 5);
  scored(t, "words", rows, model_of(6), 5);
  scored(t, "words of a tree", AnyScore(7).tree, model_of(7), 5);
  for (const int kind : {0, 4, 9})
    scored(t, std::string("words & ") + kNames[kind], rows & AnyScore(kind), model_of(6) & model_of(kind), 5);
  // Biases of which prefill reads two at once where all of them lie at even places, and windows that begin at any.
  const k::ScoreBias<k::half> biases = AnyScore(5).bias;
  scored(t, "biases", biases, model_of(5), 5);
  const auto odd = [&t](int64_t head_stride, int64_t query_stride, int64_t first) {
    ScoreModel m;
    m.transform = [=](Real<> x, const Spot& s) {
      const int64_t at = s.b * 4 * kQueries * kKeys + s.head * head_stride + s.query * query_stride + s.key + first;
      const double b = value_of(tables().biases[size_t(at)]);
      return b == kMinusInfinity ? Real<>(b) : x + Real<>(b);
    };
    scored(t, "biases at odd places",
           k::score_bias(tables().biases_there->data() + first, 4 * kQueries * kKeys, head_stride, query_stride), m, 5);
  };
  odd(kQueries * kKeys - 1, kKeys, 0), odd(kQueries * kKeys, kKeys - 3, 0), odd(kQueries * kKeys, kKeys - 2, 1);
  for (const int64_t left : {220, 221})
    scored(t, "biases in a window", k::window(left, -1) & biases, window_model(left, -1) & model_of(5), 5);
  scored(t, "no mask", k::no_mask(), {});
  scored(t, "causal", k::causal(), causal_model());
  scored(t, "causal, top left", k::causal(k::Align::top_left), causal_model(true));
  scored(t, "window", k::window(20, 3), window_model(20, 3));
  scored(t, "window to the left", k::window(7, -1), window_model(7, -1));
  scored(t, "window to the right", k::window(-1, 2), window_model(-1, 2));
  scored(t, "window, top left", k::window(5, 9, k::Align::top_left), window_model(5, 9, true));
  scored(t, "one key", k::window(0, 0), window_model(0, 0));
  scored(t, "sinks", k::causal() & k::sinks(tables().sinks_there.data()), causal_model() & model_of(8));
  CHECK_TALLY(t);
}

TEST_CASE("all pairs of scores, in either order") {
  Tally t;
  for (int a = 0; a < kScores; ++a) {
    for (int b = 0; b < kScores; ++b)
      scored(t, std::string(kNames[a]) + " & " + kNames[b], AnyScore(a) & AnyScore(b), model_of(a) & model_of(b), 41);
  }
  CHECK_TALLY(t);
}

TEST_CASE("logits beyond 5e4") {
  Tally t;
  for (const double spread : {150.0, 1e4}) {
    scored(t, "huge", k::causal(), causal_model(), 3, spread);
    scored(t, "huge, sinks", k::causal() & k::sinks(tables().sinks_there.data()), causal_model() & model_of(8), 3,
           spread);
  }
  CHECK_TALLY(t);
}

// Of as many keys as there are for decode(): what is not relative to the largest logit overflows, or becomes 0.
TEST_CASE("all of many keys with a bias of 1e3 or -1e3") {
  Tally t;
  const int64_t keys = is_shortened() ? 6000 : 65536;
  for (AttentionCase c : {AttentionCase{{70}, {keys}, 2, 1, 64}, AttentionCase{{3}, {keys}, 2, 1, 128}}) {
    c.aligned = true;
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const DeviceKv<k::bfloat16> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    const OnDevice<int32_t> lengths(where.short_lengths);
    // All high, all low, and the second half high.
    for (const int64_t high_from : {int64_t(0), keys, keys / 2}) {
      std::vector<k::half> biases;
      for (int64_t i = 0; i < keys; ++i) biases.push_back(make<k::half>(i >= high_from ? 1e3 : -1e3));
      const OnDevice<k::half> there(biases);
      const k::ScoreBias<k::half> score = k::score_bias(static_cast<const k::half*>(there.data()), 0, 0, 0);
      ScoreModel model;
      model.transform = [&](Real<> x, const Spot& s) { return x + constant(value_of(biases[size_t(s.key)])); };
      attends<k::bfloat16, float>(t, "1e3 from key " + std::to_string(high_from), c,
                                  k::dense_kv(key.tensor(), value.tensor(), lengths.data()), key, value, score, model,
                                  17);
    }
  }
  CHECK_TALLY(t);
}

namespace {

// Keys of T.
template <class T>
void not_finite(Tally& t) {
  const k::half zero = make<k::half>(0);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (const int64_t queries : {1, 3, 30, 70}) {
      const AttentionCase c{{queries}, {100}, 4, 1, 16};
      const Placement where(Layout::nhd, c.kv_lens, 1);
      const DeviceKv<T> key(1, where, c.dim), value(2, where, c.dim);
      AttentionData<T, float, DeviceMemory> d(c);
      AnyScore score(5);
      std::vector<k::half> bias(4 * kQueries * kKeys, zero);
      for (int h = 0; h < 4; ++h) bias[size_t((h * kQueries + queries - 1) * kKeys + 50)] = make<k::half>(bad);
      const OnDevice<k::half> there(bias);
      score.bias = k::score_bias(there.data(), 4 * kQueries * kKeys, kQueries * kKeys, kKeys);
      const OnDevice<int32_t> lengths(where.short_lengths);
      const Stream stream;
      const k::Status status =
          k::attention(k::Exec(stream), d.source(), k::dense_kv(key.tensor(), value.tensor(), lengths.data()), d.sink(),
                       d.shape(), score & AnyScore(3), d.options());
      t.expect(status.ok(), "%s", status.reason());
      stream.wait();
      d.o.download();
      for (int64_t i = 0; i < queries; ++i) {
        for (int64_t x = 0; x < d.o.cols(); ++x) {
          // The cap makes a number of an infinity.
          const bool nan = i == queries - 1 && bad != bad;
          t.expect((d.o.get(i, x) != d.o.get(i, x)) == nan, "row %d col %d: %g", int(i), int(x), d.o.get(i, x));
        }
      }
      const k::Status uncapped =
          k::attention(k::Exec(stream), d.source(), k::dense_kv(key.tensor(), value.tensor(), lengths.data()), d.sink(),
                       d.shape(), AnyScore(0) & score, d.options());
      t.expect(uncapped.ok(), "%s", uncapped.reason());
      stream.wait();
      d.o.download();
      const int64_t last = queries - 1;
      for (int64_t i = 0; i < queries; ++i) {
        for (int64_t x = 0; x < d.o.cols(); ++x)
          t.expect((d.o.get(i, x) != d.o.get(i, x)) == (i == last), "row %d col %d: %g", int(i), int(x), d.o.get(i, x));
      }
    }
  }
}

}  // namespace

TEST_CASE("a NaN or an infinity among the logits makes its row NaN, and no other") {
  Tally t;
  not_finite<k::bfloat16>(t);
  not_finite<float>(t);
  CHECK_TALLY(t);
}

// ---- fusion, graphs, bits -------------------------------------------------------------------------------------------

TEST_CASE("queries turned and scaled on their way, results mapped") {
  Tally t;
  for (const int64_t dim : {64, 128}) {
    AttentionCase c{{90, 90}, {90, 200}, 4, 2, dim};
    c.aligned = dim == 128;
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const DeviceKv<k::half> key(1, where, dim, ScaleOf::head, 1, 0, 8), value(2, where, dim, ScaleOf::head, 1, 0, 8);
    const OnDevice<int32_t> lengths(where.short_lengths);
    std::vector<int32_t> positions;
    for (int i = 0; i < 180; ++i) positions.push_back(i % 90 + (i >= 90 ? 110 : 0));
    const OnDevice<int32_t> at(positions);
    std::vector<float> frequencies(size_t(dim / 2));
    k::rope_frequencies(frequencies.data(), int(dim), 1e4);
    const OnDevice<float> there(frequencies);
    AttentionData<k::half, k::half, DeviceMemory> d(c);
    const Stream stream;
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), lengths.data());
    const k::Status status =
        k::attention(k::Exec(stream), d.source() | k::rope(at.data(), there.data(), int(dim)) | k::scale(2), kv,
                     k::scale(0.5) | d.sink(), d.shape(), k::causal(), d.options());
    t.expect(status.ok(), "%s", status.reason());
    stream.wait();
    const auto turned = [&](int64_t row, int64_t col) {
      const int64_t in_head = col % dim, pair = in_head % (dim / 2), first = col - in_head + pair;
      const double angle = double(float(positions[size_t(row)]) * frequencies[size_t(pair)]), x = d.q.value(row, first),
                   y = d.q.value(row, first + dim / 2);
      return 2 * (in_head < dim / 2 ? x * std::cos(angle) - y * std::sin(angle)
                                    : y * std::cos(angle) + x * std::sin(angle));
    };
    Precision precision = precision_of<k::half>(key, value);
    precision.queries = 0x1p-11;
    check(
        t, "rope", d, turned, key,
        [&](int64_t b, int64_t h, int64_t pos, int64_t x) { return 0.5 * value(b, h, pos, x); }, causal_model(),
        precision, 7);
  }
  CHECK_TALLY(t);
}

namespace {

template <class T>
void results_apart(Tally& t, int64_t first_cols) {
  const AttentionCase c{{60, 60}, {200, 45}, 4, 2, 72};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const DeviceKv<T> key(1, where, c.dim), value(2, where, c.dim);
  const OnDevice<int32_t> lengths(where.short_lengths);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), lengths.data());
  AttentionData<T, T, DeviceMemory> d(c);
  const int64_t rows = d.o.rows(), cols = d.o.cols();
  Device<T> first(rows, first_cols, first_cols + 1), second(rows, cols - first_cols, cols);
  const Stream stream;
  const auto run = [&](const auto& out) {
    const k::Status status = k::attention(k::Exec(stream), d.source(), kv, out, d.shape(), k::causal(), d.options());
    t.expect(status.ok(), "%s", status.reason());
    stream.wait();
  };
  run(d.sink());
  run(k::clamp(-99, 99) | k::apart(k::store(first.data(), first.ld()), first_cols, k::store(second.data(), second.ld()),
                                   cols - first_cols));
  d.o.download(), first.download(), second.download();
  t.expect(first.intact() && second.intact(), "wrote outside its rows");
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t x = 0; x < cols; ++x) {
      const double got = value_of(x < first_cols ? first.get(r, x) : second.get(r, x - first_cols)),
                   want = value_of(d.o.get(r, x));
      t.expect(got == want, "row %d col %d: %g, want %g", int(r), int(x), got, want);
    }
  }
}

}  // namespace

TEST_CASE("results apart") {
  Tally t;
  for (const int64_t first : {144, 8, 101}) {
    results_apart<k::half>(t, first);
    results_apart<float>(t, first);
  }
  CHECK_TALLY(t);
}

// Half as wide: what is read for one of attention does not lie in one run.
TEST_CASE("queries whose heads are not those of attention") {
  Tally t;
  const Stream stream;
  for (const int64_t dim : {24, 64, 128}) {
    const AttentionCase c{{39}, {75}, 2, 1, dim};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const DeviceKv<k::half> key(1, where, dim, ScaleOf::head, 1, 0, 8), value(2, where, dim, ScaleOf::head, 1, 0, 8);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), 75);
    AttentionData<k::half, k::half, DeviceMemory> whole(c), halves(c);
    for (const HeadStrides& strides : head_strides(1, 39, 4, dim / 2)) {
      SpreadHeads<k::half, DeviceMemory> q(strides, 1, 39, 4, dim / 2, Poison::nan);
      q.fill([&](int64_t row, int64_t col) { return whole.q.get(row, col); });
      const auto run = [&](const auto& from, auto& data) {
        const k::Status status = k::attention(stream, from, kv, data.sink(), data.shape(), k::causal());
        stream.wait();
        t.expect(status.ok(), "%s", status.reason());
        data.o.download();
      };
      run(whole.source(), whole);
      run(q.source(), halves);
      bool same = true;
      for (int64_t row = 0; row < 39; ++row) {
        for (int64_t col = 0; col < 2 * dim; ++col)
          same = same && std::abs(value_of(whole.o.get(row, col)) - value_of(halves.o.get(row, col))) < 0x1p-8;
      }
      t.expect(same, "%lld columns, %s: other results", (long long)dim, strides.name);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("a captured graph follows the lengths, and the same input gives the same bits") {
  Tally t;
  AttentionCase most{{200, 200}, {500, 500}, 4, 2, 64};
  most.ragged_q = most.aligned = true;
  const Placement where(Layout::nhd, most.kv_lens, most.kv_heads);
  const DeviceKv<k::half> key(1, where, 64, ScaleOf::head, 1, 0, 8), value(2, where, 64, ScaleOf::head, 1, 0, 8);
  OnDevice<int32_t> lengths(std::vector<int32_t>{0, 0}), offsets(std::vector<int32_t>{0, 0, 0});
  AttentionData<k::half, k::half, DeviceMemory> d(most);
  k::AttentionShape shape = d.shape();
  shape.q_offsets = offsets.data();
  const Stream stream;
  const auto call = [&] {
    return k::attention(k::Exec(stream), d.source(), k::dense_kv(key.tensor(), value.tensor(), lengths.data()),
                        d.sink(), shape, k::causal(), d.options());
  };
  k::Status status;
  const Graph graph(stream, [&] { status = call(); });
  t.expect(status.ok(), "%s", status.reason());
  for (const auto& lens :
       std::vector<std::vector<int64_t>>{{200, 1, 300, 20}, {0, 133, 5, 500}, {64, 200, 64, 0}, {200, 200, 500, 499}}) {
    d.c.q_lens = {lens[0], lens[1]};
    d.c.kv_lens = {lens[2], lens[3]};
    d.offsets = {0, int32_t(lens[0]), int32_t(lens[0] + lens[1])};
    offsets.assign(d.offsets);
    lengths.assign({int32_t(lens[2]), int32_t(lens[3])});
    graph.replay();
    check(
        t, "replayed", d, [&](int64_t row, int64_t x) { return d.q.value(row, x); }, key, value, causal_model(),
        precision_of<k::half>(key, value), 11);
    const std::vector<unsigned char> bits = d.o.bytes(), lse = d.lse.bytes();
    t.expect(call().ok(), "again");
    stream.wait();
    d.o.download();
    d.lse.download();
    t.expect(d.o.bytes() == bits && d.lse.bytes() == lse, "other bits the second time");
  }
  CHECK_TALLY(t);
}

TEST_CASE("more heads than a grid has rows") {
  Tally t;
  const int64_t batch = is_shortened() ? 90 : 9000;
  const AttentionCase c{std::vector<int64_t>(size_t(batch), 1), std::vector<int64_t>(size_t(batch), 2), 8, 8, 8};
  dense<k::half>(t, c, k::causal(), causal_model(), 97);
  CHECK_TALLY(t);
}

TEST_CASE("more tiles of large heads than run at the same time") {
  Tally t;
  AttentionCase c{{}, {}, 2, 1, 192};
  for (int64_t i = 0; i < 500; ++i) c.q_lens.push_back(i * 7 % 5), c.kv_lens.push_back(i * 11 % 13);
  c.ragged_q = true;
  for (const int64_t dim : {192, 256, 576}) {
    c.dim = dim, c.v_dim = dim == 576 ? 512 : dim;
    dense<k::half>(t, c, k::causal(), causal_model(), 29);
    dense<k::half>(t, c, k::causal(), causal_model(), 29, 1);
  }
  CHECK_TALLY(t);
}

TEST_CASE("what is refused, and what is nothing to do") {
  const Device<k::half> memory(1, 4096, 4096);
  const k::half* const p = memory.data();
  const auto kv = k::dense_kv(k::nhd(p, 10, 2, 16), k::nhd(p, 10, 2, 16), 10);
  const auto run = [&](const k::AttentionShape& shape) {
    return k::attention(k::Exec{}, k::load(p, 64), kv, k::store(memory.data(), 64), shape, k::causal());
  };
  CHECK(run({0, 3, 4, 2, 16}).ok());
  CHECK(run({2, 0, 4, 2, 16}).ok());
  CHECK(run({2, 3, 4, 2, 12}).code() == k::Code::unsupported);
  CHECK(run({2, 3, 4, 2, 264}).code() == k::Code::unsupported);
  CHECK(run({2, 3, 4, 2, 16, 576}).code() == k::Code::unsupported);
  CHECK(run({2, 3, 4, 3, 16}).code() == k::Code::invalid);
  CHECK(run({70000, 2147483647, 4, 2, 16}).code() == k::Code::unsupported);
}
