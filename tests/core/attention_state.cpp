// The steps of docs/attention.md, each equal to the one before, and the state they end in.
#include <kernels/core/softmax_state.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "support/random.h"
#include "support/tally.h"

using namespace test;
namespace k = kernels;

namespace {

constexpr int kDim = 4;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Keys {
  std::vector<double> scores;
  std::vector<k::Pack<double, kDim>> values;
  int size() const { return int(scores.size()); }
};
struct Result {
  double o[kDim], lse;
};

// Some scores are masked, sometimes all of them, and some are far apart.
Keys random_keys(Random& random, int size) {
  Keys keys;
  const int kind = int(random.below(4));
  for (int i = 0; i < size; ++i) {
    const bool masked = kind == 0 || random.below(4) == 0;
    keys.scores.push_back(masked ? -kInfinity : kind == 1 ? 1e5 * random.normal() : random.normal());
    k::Pack<double, kDim> v;
    for (double& x : v.v) x = random.normal();
    keys.values.push_back(v);
  }
  return keys;
}

// 1. As it is written down: all exponentials, then their sum, then the mean.
Result naive(const Keys& keys) {
  double most = -kInfinity, sum = 0;
  for (const double s : keys.scores) most = std::max(most, s);
  Result out = {};
  out.lse = -kInfinity;
  if (most == -kInfinity) return out;
  for (const double s : keys.scores) sum += std::exp(s - most);
  for (int i = 0; i < keys.size(); ++i) {
    for (int c = 0; c < kDim; ++c)
      out.o[c] += std::exp(keys.scores[size_t(i)] - most) / sum * keys.values[size_t(i)].v[c];
  }
  out.lse = most + std::log(sum);
  return out;
}

template <class State>
Result result(const State& s) {
  Result out;
  const auto o = s.output();
  std::copy_n(o.v, kDim, out.o);
  out.lse = s.logsumexp();
  return out;
}

// 2. Online: the maximum and the sum in one pass, and a second one for the mean.
Result online(const Keys& keys) {
  k::SoftmaxState<double> s;
  for (const double x : keys.scores) s.merge({x, x == -kInfinity ? 0.0 : 1.0});
  Result out = {};
  for (int i = 0; i < keys.size(); ++i) {
    const double p = k::exp(keys.scores[size_t(i)] - s.reference()) * s.inverse();
    for (int c = 0; c < kDim; ++c) out.o[c] += p * keys.values[size_t(i)].v[c];
  }
  out.lse = s.logsumexp();
  return out;
}

// 3. The mean as well in one pass: key by key.
Result key_by_key(const Keys& keys) {
  k::AttentionState<double, kDim> s;
  for (int i = 0; i < keys.size(); ++i) s.take(keys.scores[size_t(i)], keys.values[size_t(i)]);
  return result(s);
}

// 4. FlashAttention-1: block by block, with an output that is finished after each block.
Result finished_blocks(const Keys& keys, const std::vector<int>& cuts) {
  k::AttentionState<double, kDim> all;
  for (size_t b = 0; b + 1 < cuts.size(); ++b) {
    k::AttentionState<double, kDim> block;
    for (int i = cuts[b]; i < cuts[b + 1]; ++i) block.take(keys.scores[size_t(i)], keys.values[size_t(i)]);
    all.merge({block.logsumexp(), block.output()});
    all = {all.logsumexp(), all.output()};
  }
  return result(all);
}

// 5. FlashAttention-2: block by block, one maximum for each, and nothing divided before the end.
Result running_blocks(const Keys& keys, const std::vector<int>& cuts) {
  k::AttentionState<double, kDim> s;
  for (size_t b = 0; b + 1 < cuts.size(); ++b) {
    double most = -kInfinity;
    for (int i = cuts[b]; i < cuts[b + 1]; ++i) most = std::max(most, keys.scores[size_t(i)]);
    s.o = s.o * s.raise(most);
    for (int i = cuts[b]; i < cuts[b + 1]; ++i) {
      const double p = k::exp(keys.scores[size_t(i)] - s.reference());
      s.l += p;
      s.o = s.o + keys.values[size_t(i)] * p;
    }
  }
  return result(s);
}

// 6. Split keys: blocks apart from each other, merged in any order.
Result any_order(const Keys& keys, const std::vector<int>& cuts, Random& random) {
  std::vector<k::AttentionState<double, kDim>> states;
  for (size_t b = 0; b + 1 < cuts.size(); ++b) {
    states.emplace_back();
    for (int i = cuts[b]; i < cuts[b + 1]; ++i) states.back().take(keys.scores[size_t(i)], keys.values[size_t(i)]);
  }
  while (states.size() > 1) {
    const size_t a = size_t(random.below(int64_t(states.size())));
    std::swap(states[a], states.back());
    const auto one = states.back();
    states.pop_back();
    states[size_t(random.below(int64_t(states.size())))].merge(one);
  }
  return result(states.front());
}

void expect_same(Tally& t, const char* what, const Result& got, const Result& want) {
  t.expect(got.lse == want.lse || std::fabs(got.lse - want.lse) <= 1e-12 * (1 + std::fabs(want.lse)),
           "%s: lse %g, want %g", what, got.lse, want.lse);
  // A masked score far away costs digits of the exponent's argument.
  for (int c = 0; c < kDim; ++c)
    t.expect(std::fabs(got.o[c] - want.o[c]) <= 1e-9, "%s: %.17g, want %.17g", what, got.o[c], want.o[c]);
}

}  // namespace

TEST_CASE("each step gives what the one before gives, however the keys are cut") {
  Tally t;
  Random random(1);
  for (int size = 0; size <= 60; ++size) {
    for (int round = 0; round < 20; ++round) {
      const Keys keys = random_keys(random, size);
      std::vector<int> cuts = {0, size};
      for (int64_t i = random.below(8); i > 0; --i)
        cuts.push_back(int(random.below(size + 1)));  // empty blocks as well
      std::sort(cuts.begin(), cuts.end());
      const Result want = naive(keys);
      expect_same(t, "online", online(keys), want);
      expect_same(t, "key by key", key_by_key(keys), want);
      expect_same(t, "finished blocks", finished_blocks(keys, cuts), want);
      expect_same(t, "running blocks", running_blocks(keys, cuts), want);
      expect_same(t, "any order", any_order(keys, cuts, random), want);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("merging is commutative, associative, and nothing changes nothing") {
  Tally t;
  Random random(2);
  const auto state = [&] {
    k::AttentionState<double, kDim> s;
    const Keys keys = random_keys(random, int(random.below(5)));
    for (int i = 0; i < keys.size(); ++i) s.take(keys.scores[size_t(i)], keys.values[size_t(i)]);
    return s;
  };
  using State = k::AttentionState<double, kDim>;
  const auto merged = [](State a, const State& b) {
    a.merge(b);
    return a;
  };
  for (int round = 0; round < 2000; ++round) {
    const auto a = state(), b = state(), c = state();
    expect_same(t, "commutative", result(merged(a, b)), result(merged(b, a)));
    expect_same(t, "associative", result(merged(merged(a, b), c)), result(merged(a, merged(b, c))));
    const auto same = merged(a, {});
    t.expect(same.m == a.m && same.l == a.l && std::equal(a.o.v, a.o.v + kDim, same.o.v), "neutral on the right");
    expect_same(t, "neutral on the left", result(merged({}, a)), result(a));
  }
  CHECK_TALLY(t);
}

TEST_CASE("an empty state, a NaN, an infinity") {
  k::AttentionState<float, 1> none;
  CHECK(none.output().v[0] == 0.f);
  CHECK(none.logsumexp() == -k::infinity<float>());
  none.merge({});
  CHECK(none.output().v[0] == 0.f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), k::infinity<float>()}) {
    k::AttentionState<float, 1> s;
    s.take(1.f, {{2.f}});
    s.take(bad, {{2.f}});
    CHECK(s.output().v[0] != s.output().v[0]);
    k::AttentionState<float, 1> fine;
    fine.take(1.f, {{2.f}});
    fine.merge(s);
    CHECK(fine.output().v[0] != fine.output().v[0]);
  }
}
