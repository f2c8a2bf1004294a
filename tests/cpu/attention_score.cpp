// Attention on the CPU: masks, windows, caps, biases and sinks, alone and in pairs; rows without keys; huge logits.
#include <kernels/cpu/attention.h>

#include "support/attention.h"
#include "support/threads.h"

using namespace test;

namespace {

struct Calls {
  Tally& t;
  double spread = 1;
  int64_t step = 3;

  template <class S>
  void operator()(const char* what, const S& score, const ScoreModel& model) const {
    for (AttentionCase c : {AttentionCase{{1, 1}, {130, 45}, 4, 2, 24}, AttentionCase{{6, 6}, {600, 3}, 4, 2, 24},
                            AttentionCase{{19, 19}, {75, 4}, 4, 2, 24}}) {
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const KvSide<float> key(1, where, c.dim, ScaleOf::head, spread), value(2, where, c.dim);
      const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
      AttentionData<> whole(c, spread);
      whole.check(
          t, what,
          k::cpu::attention(on_threads(2), whole.source(), kv, whole.sink(), whole.shape(), score, whole.options()),
          key, value, model, step);
      AttentionData<> split(c, spread);
      std::vector<float> memory(k::cpu::decode_workspace_bytes(split.shape()) / sizeof(float));
      const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
      split.check(t, what,
                  k::cpu::decode(on_threads(2), split.source(), kv, split.sink(), split.shape(), score, workspace,
                                 split.options()),
                  key, value, model, step);
    }
  }
};

const std::vector<float> kSlopes = {0.5f, 0.25f, 0.125f, 0.0625f};
const std::vector<float> kSinks = {0.3f, -2.f, 5.f, -std::numeric_limits<float>::infinity()};

// Biases for 2 sequences, 4 heads, 19 queries and 600 keys; some mask.
const std::vector<k::half>& biases() {
  static const std::vector<k::half> all = [] {
    std::vector<k::half> v(2 * 4 * 19 * 600);
    Random random(5);
    for (auto& x : v) x = make<k::half>(random.below(9) == 0 ? kMinusInfinity : 2 * random.normal());
    return v;
  }();
  return all;
}
ScoreModel bias_model(int64_t batch, int64_t head, int64_t query) {
  ScoreModel m;
  m.transform = [=](Real<> x, const Spot& s) {
    const double b = value_of(biases()[size_t(s.b * batch + s.head * head + s.query * query + s.key)]);
    return b == kMinusInfinity ? Real<>(b) : x + Real<>(b);
  };
  return m;
}
const std::vector<uint32_t>& bits() {
  static const std::vector<uint32_t> all = [] {
    std::vector<uint32_t> v(2 * 19 * 19);
    Random random(6);
    for (auto& x : v) x = uint32_t(random.bits());
    return v;
  }();
  return all;
}
ScoreModel bits_model(bool tree) {
  ScoreModel m;
  m.visible = [=](const Spot& s) {
    const int64_t bit = tree ? s.key - (s.kv_len - s.q_len) : s.key;
    return bit < 0 || (bits()[size_t(s.b * 361 + s.query * 19 + bit / 32)] >> (bit % 32) & 1) != 0;
  };
  return m;
}
ScoreModel sinks_model() {
  ScoreModel m;
  m.sink = [](int64_t head) { return double(kSinks[size_t(head)]); };
  return m;
}

// One of one's own: every third key is denied to odd heads, and logits are halved.
struct Own : k::Score {
  template <int N>
  k::Pack<float, N> transform(const k::Pack<float, N>& logits, const k::ScoreAt&) const { return logits * 0.5f; }
  bool visible(const k::ScoreAt& at) const { return at.head % 2 == 0 || at.key % 3 != 0; }
};
ScoreModel own_model() {
  ScoreModel m;
  m.transform = [](Real<> x, const Spot&) { return Real<>(x.v * 0.5, x.e * 0.5); };
  m.visible = [](const Spot& s) { return s.head % 2 == 0 || s.key % 3 != 0; };
  return m;
}

// All there are, f(name, score, model) for each.
template <class F>
void each_score(const F& f) {
  f("causal", k::causal(), causal_model());
  f("causal, top left", k::causal(k::Align::top_left), causal_model(true));
  f("window", k::window(20, 3), window_model(20, 3));
  f("soft cap", k::soft_cap(2.f), soft_cap_model(2));
  f("alibi", k::alibi(kSlopes.data()), alibi_model(kSlopes));
  f("bias", k::score_bias(biases().data(), 4 * 19 * 600, 19 * 600, 600), bias_model(4 * 19 * 600, 19 * 600, 600));
  f("bits", k::bitmask(bits().data(), 19, 361), bits_model(false));
  f("tree", k::tree_mask(bits().data(), 19, 361), bits_model(true));
  f("sinks", k::sinks(kSinks.data()), sinks_model());
  f("own", Own{}, own_model());
}

// One of them, chosen at run time, so that all pairs are one type.
struct Any : k::Score {
  int kind;
  explicit Any(int i) : kind(i) {}
  template <class F>
  void visit(const F& f) const {
    int i = 0;
    each_score([&](const char* name, const auto& score, const ScoreModel& model) {
      if (i++ == kind) f(name, score, model);
    });
  }
  template <int N>
  k::Pack<float, N> transform(k::Pack<float, N> logits, const k::ScoreAt& at) const {
    visit([&](auto&&, const auto& score, auto&&) { logits = k::detail::transform_logits(score, logits, at); });
    return logits;
  }
  bool visible(const k::ScoreAt& at) const {
    bool seen = true;
    visit([&](auto&&, const auto& score, auto&&) { seen = k::detail::key_visible(score, at); });
    return seen;
  }
  k::KeyRange kv_range(const k::ScoreQueries& q) const {
    k::KeyRange range{};
    visit([&](auto&&, const auto& score, auto&&) { range = k::detail::key_range(score, q); });
    return range;
  }
  float sink(int64_t head) const {
    k::SoftmaxState<float> state;
    visit([&](auto&&, const auto& score, auto&&) { state = k::detail::sink_state(score, head); });
    return state.logsumexp();
  }
};

}  // namespace

TEST_CASE("whether later queries see more keys") {
  using k::detail::keys_of_later;
  using Keys = k::detail::KeysOfLater;
  struct Own : k::Score {
    k::KeyRange kv_range(const k::ScoreQueries& q) const { return {0, q.last + 1}; }
  };
  CHECK(keys_of_later(k::no_mask(), 4096) == Keys::alike);
  CHECK(keys_of_later(k::soft_cap(2.f), 4096) == Keys::alike);
  CHECK(keys_of_later(k::causal(), 4096) == Keys::more);
  CHECK(keys_of_later(k::causal() & k::soft_cap(2.f), 4096) == Keys::more);
  CHECK(keys_of_later(k::window(1000, 0), 4096) == Keys::alike);
  CHECK(keys_of_later(k::window(4000, 0), 4096) == Keys::more);
  CHECK(keys_of_later(k::window(0, -1), 4096) == Keys::unknown);
  CHECK(keys_of_later(Own{}, 4096) == Keys::unknown);
  CHECK(keys_of_later(k::causal() & Own{}, 4096) == Keys::unknown);
  CHECK(keys_of_later(k::causal(), 1) == Keys::alike);
}

TEST_CASE("each score alone") {
  Tally t;
  each_score(Calls{t});
  const Calls check{t};
  check("no mask", k::no_mask(), {});
  check("window to the left", k::window(7, -1), window_model(7, -1));
  check("window to the right", k::window(-1, 2), window_model(-1, 2));
  check("window, top left", k::window(5, 9, k::Align::top_left), window_model(5, 9, true));
  check("one key", k::window(0, 0), window_model(0, 0));
  constexpr int64_t far = std::numeric_limits<int64_t>::max();
  check("window without an end", k::window(far, far), {});
  check("window without an end, to the left", k::window(far, 0), causal_model());
  check("window without an end, to the right", k::window(3, far, k::Align::top_left), window_model(3, -1, true));
  ScoreModel of_heads;
  of_heads.visible = [](const Spot& s) {
    return (bits()[size_t(s.head * 100 + s.query * 19 + s.key / 32)] >> (s.key % 32) & 1) != 0;
  };
  check("bits of heads", k::bitmask(bits().data(), 19, 0).head_stride(100), of_heads);
  check("bias, broadcast", k::score_bias(biases().data(), 0, 0, 600), bias_model(0, 0, 600));
  check("bias, by head", k::score_bias(biases().data(), 0, 600, 0), bias_model(0, 600, 0));
  CHECK_TALLY(t);
}

TEST_CASE("an empty range of keys may begin anywhere") {
  struct OddQueries : k::Score {
    int64_t none;
    explicit OddQueries(int64_t begin) : none(begin) {}
    k::KeyRange kv_range(const k::ScoreQueries& q) const {
      return q.first == q.last && q.first % 2 == 0 ? k::KeyRange{none, none} : k::KeyRange{0, q.kv_len};
    }
  };
  ScoreModel odd;
  odd.visible = [](const Spot& s) { return s.query % 2 != 0; };
  Tally t;
  for (const int64_t none : {int64_t(0), int64_t(1) << 31, int64_t(1) << 32, std::numeric_limits<int64_t>::max()})
    Calls{t}("odd queries", OddQueries(none), odd);
  CHECK_TALLY(t);
}

TEST_CASE("all pairs of scores, in either order") {
  Tally t;
  for (int a = 0; a < 10; ++a) {
    for (int b = 0; b < 10; ++b) {
      Any(a).visit([&](const std::string& first, auto&&, const ScoreModel& one) {
        Any(b).visit([&](const std::string& second, auto&&, const ScoreModel& other) {
          Calls{t, 1, 20}((first + " & " + second).c_str(), Any(a) & Any(b), one & other);
        });
      });
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("three and more") {
  Tally t;
  const Calls check{t};
  check("four", k::causal() & k::soft_cap(2.f) & k::score_bias(biases().data(), 0, 0, 600) & k::sinks(kSinks.data()),
        causal_model() & soft_cap_model(2) & bias_model(0, 0, 600) & sinks_model());
  check("grouped", k::tree_mask(bits().data(), 19, 361) & (k::alibi(kSlopes.data()) & Own{}),
        bits_model(true) & alibi_model(kSlopes) & own_model());
  CHECK_TALLY(t);
}

TEST_CASE("logits beyond 5e4") {
  Tally t;
  for (const double spread : {150.0, 1e4}) {
    const Calls check{t, spread};
    check("huge", k::causal(), causal_model());
    check("huge, sinks", k::sinks(kSinks.data()), sinks_model());
  }
  CHECK_TALLY(t);
}

TEST_CASE("a NaN or an infinity among the logits makes its row NaN, and no other") {
  Tally t;
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (const int64_t queries : {1, 3, 30}) {
      const AttentionCase c{{queries}, {100}, 2, 1, 16};
      const Placement where(Layout::nhd, c.kv_lens, 1);
      const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
      AttentionData<> d(c);
      std::vector<float> bias(size_t(queries) * 100, 0.f);
      bias[size_t(queries - 1) * 100 + 50] = float(bad);
      const auto kv = k::dense_kv(key.tensor(), value.tensor(), 100);
      const k::Status status = k::cpu::attention(k::cpu::Exec{1}, d.source(), kv, d.sink(), d.shape(),
                                                 k::score_bias(bias.data(), 0, 0, 100), d.options());
      t.expect(status.ok(), "%s", status.reason());
      d.o.download();
      for (int64_t i = 0; i < queries; ++i) {
        for (int64_t x = 0; x < d.o.cols(); ++x)
          t.expect((d.o.get(i, x) != d.o.get(i, x)) == (i == queries - 1), "row %d col %d: %g", int(i), int(x),
                   d.o.get(i, x));
      }
    }
  }
  CHECK_TALLY(t);
}

// Rows of words end with the word of the last key, the last of them at the end of the memory.
TEST_CASE("bits of 32 keys at once are those of one key after the other") {
  Tally t;
  Random random(4);
  for (int64_t kv_len = 1; kv_len < 140; ++kv_len) {
    const int64_t q_len = 1 + random.below(kv_len), query = random.below(q_len);
    for (const bool of_tree : {false, true}) {
      const int64_t words = ((of_tree ? q_len : kv_len) + 31) / 32;
      std::vector<uint32_t> bits(size_t(q_len * words));
      for (uint32_t& word : bits) word = uint32_t(random.bits());
      const k::Bitmask mask = of_tree ? k::tree_mask(bits.data(), words, 0) : k::bitmask(bits.data(), words, 0);
      for (int64_t first = 0; first < kv_len + 40; ++first) {
        k::ScoreAt at{0, 0, query, first, q_len, kv_len};
        const uint32_t found = mask.visible_keys(at);
        for (; at.key < std::min(first + 32, kv_len); ++at.key)
          t.expect((found >> (at.key - first) & 1) == uint32_t(mask.visible(at)),
                   "%s of %d words, key %d of %d, from %d on", of_tree ? "tree" : "mask", int(words), int(at.key),
                   int(kv_len), int(first));
      }
    }
  }
  CHECK_TALLY(t);
}
