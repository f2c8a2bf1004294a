// What the tests of sampling on the CPU and the GPU share: cases, and an oracle that sorts each row. The oracle takes the weight of a
// logit from the library, as it must have the same bits; that weights are what they should be is tested by itself.
#pragma once

#include <kernels/core/sampling.h>
#include <kernels/functor.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "guarded.h"
#include "random.h"
#include "tally.h"

namespace k = kernels;

namespace test {

struct SampleRulesOf {
  const char* name;
  float temperature = 1;
  int top_k = 0;
  float top_p = 1, min_p = 0, typical = 1;
  float repetition = 1, presence = 0, frequency = 0, soft_cap = 0;
  bool bias = false, allowed = false, listed = false, counted = false;
};

inline SampleRulesOf rules_of(const char* name, float temperature, int top_k, float top_p = 1, float min_p = 0, float typical = 1) {
  SampleRulesOf r;
  r.name = name, r.temperature = temperature, r.top_k = top_k, r.top_p = top_p, r.min_p = min_p, r.typical = typical;
  return r;
}

inline std::vector<SampleRulesOf> sample_rules() {
  std::vector<SampleRulesOf> all = {
      rules_of("plain", 1, 0),          rules_of("greedy", 0, 0),       rules_of("greedy with filters", 0, 50, 0.9f),
      rules_of("hot", 3, 0),            rules_of("cold", 0.05f, 0),     rules_of("nearly greedy", 1e-30f, 0),
      rules_of("top_k", 1, 50),         rules_of("top_k 1", 1, 1),      rules_of("top_k 256", 1.3f, 256),
      rules_of("top_k 300", 2, 300),    rules_of("top_k 5000", 3, 5000), rules_of("top_p", 1, 0, 0.9f),
      rules_of("top_p 0", 1, 0, 0.f),   rules_of("top_k, top_p", 0.8f, 50, 0.9f), rules_of("min_p", 1, 0, 1, 0.05f),
      rules_of("typical", 1, 0, 1, 0, 0.6f), rules_of("top_k, typical", 1, 100, 1, 0, 0.5f),
      rules_of("all", 1.2f, 200, 0.95f, 0.01f, 0.9f), rules_of("all but top_k", 1.2f, 0, 0.95f, 0.001f, 0.7f),
      rules_of("top_k 2000 and all", 1.2f, 2000, 0.98f, 0.001f, 0.7f)};
  SampleRulesOf r = rules_of("adjusted", 0.9f, 40, 0.95f);
  r.soft_cap = 30, r.bias = true, r.allowed = true;
  all.push_back(r);
  r.listed = r.counted = true, r.repetition = 1.3f, r.presence = 0.4f, r.frequency = -0.2f;
  r.name = "adjusted and penalized";
  all.push_back(r);
  r = rules_of("penalized, plain", 1, 0);
  r.listed = true, r.repetition = 1.5f, r.frequency = 0.3f;
  all.push_back(r);
  return all;
}

struct SampleExpected {
  k::Sampled status = k::Sampled::ok;
  int64_t token = -1;
  std::vector<int32_t> kept;  // by logit
};

// One operation of floats that no compiler makes one of with the next.
inline float rounded(double x) { return float(x); }

// What one row gives. bits: the random number of the draw. x: the logits, changed here by what comes before the temperature.
inline SampleExpected sample_oracle(std::vector<float>& x, const SampleRulesOf& r, uint64_t bits, const float* bias, const uint32_t* allowed, const std::vector<int>& seen) {
  const int64_t n = int64_t(x.size());
  SampleExpected out;
  for (int64_t i = 0; i < n; ++i) {
    float& v = x[size_t(i)];
    if (r.allowed && (allowed[i / 32] >> (i % 32) & 1u) == 0) {
      v = -std::numeric_limits<float>::infinity();
      continue;
    }
    if (r.soft_cap > 0) v = k::detail::capped(v, r.soft_cap);
    if (r.bias) v = rounded(double(v) + double(bias[i]));
    if (const int count = seen[size_t(i)]; count > 0) {
      v = v < 0 ? rounded(double(v) * double(r.repetition)) : rounded(double(v) / double(r.repetition));
      v = rounded(double(v) - double(rounded(double(r.frequency) * count)));
      v = rounded(double(v) - double(r.presence));
    }
    if (std::isnan(v)) out.status = k::Sampled::nan;
  }
  if (out.status != k::Sampled::ok) return out;
  std::vector<int32_t>& ids = out.kept;
  for (int64_t i = 0; i < n; ++i) {
    if (x[size_t(i)] > -std::numeric_limits<float>::infinity()) ids.push_back(int32_t(i));
  }
  if (ids.empty()) {
    out.status = k::Sampled::none;
    return out;
  }
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
  const k::detail::Levels levels(k::detail::key_of(x[size_t(ids[0])]), r.temperature);
  const auto level = [&](int32_t id) { return levels(k::detail::key_of(x[size_t(id)])); };
  const auto weight = [&](int32_t id) { return k::detail::weight_of(level(id)); };
  const auto total = [&](const std::vector<int32_t>& some) {
    uint64_t sum = 0;
    for (const int32_t id : some) sum += weight(id);
    return sum;
  };
  // The first ones, until they have a share of the weight.
  const auto share = [&](std::vector<int32_t>& some, float p) {
    const double budget = std::max(1.0, std::floor(double(p) * double(total(some))));
    uint64_t before = 0;
    size_t count = 0;
    while (count < some.size() && double(before) < budget) before += weight(some[count++]);
    some.resize(count);
  };
  const size_t most = r.temperature == 0 ? 1 : r.top_k > 0 ? size_t(r.top_k) : ids.size();
  if (ids.size() > most) ids.resize(most);
  if (r.top_p < 1) share(ids, r.top_p);
  if (r.min_p > 0) {
    const double least = std::max(1.0, std::floor(double(r.min_p) * 0x1p40));
    while (double(weight(ids.back())) < least) ids.pop_back();
  }
  if (r.typical < 1) {
    __extension__ unsigned __int128 sum = 0;
    for (const int32_t id : ids) sum += weight(id) * uint64_t(level(id));
    const int64_t mean = int64_t(sum / total(ids));
    std::vector<int32_t> nearest = ids;
    const auto distance = [&](int32_t id) { return std::abs(int64_t(level(id)) - mean); };
    std::sort(nearest.begin(), nearest.end(), [&](int32_t a, int32_t b) { return distance(a) != distance(b) ? distance(a) < distance(b) : a < b; });
    share(nearest, r.typical);
    std::sort(nearest.begin(), nearest.end());
    ids.erase(std::remove_if(ids.begin(), ids.end(), [&](int32_t id) { return !std::binary_search(nearest.begin(), nearest.end(), id); }), ids.end());
  }
  __extension__ const unsigned __int128 product = (unsigned __int128)(bits)*total(ids);
  uint64_t target = uint64_t(product >> 64);
  for (const int32_t id : ids) {
    if (target < weight(id)) {
      out.token = id;
      break;
    }
    target -= weight(id);
  }
  return out;
}

// The random number that a row's draw takes.
inline uint64_t draw_of(uint64_t seed, uint64_t row, uint64_t step) {
  const auto four = k::philox(seed, row, step);
  return uint64_t(four[1]) << 32 | four[0];
}

enum class Logits { normal, wide, few_values, constant, holes, peaked, nothing, infinite };

inline float logit(Logits kind, Random& random, int64_t i) {
  const double x = random.normal();
  switch (kind) {
    case Logits::normal: return float(3 * x);
    case Logits::wide: return float(40 * x);
    case Logits::few_values: return float(std::floor(2 * x) / 2);
    case Logits::constant: return -1.5f;
    case Logits::holes: return random.below(3) == 0 ? -std::numeric_limits<float>::infinity() : float(2 * x);
    case Logits::peaked: return float(x) + (i % 997 == 5 ? 12.f : 0.f);
    case Logits::nothing: return -std::numeric_limits<float>::infinity();
    case Logits::infinite: return i % 50 == 7 ? std::numeric_limits<float>::infinity() : float(x);
  }
  return 0;
}

struct SampleShape {
  int64_t rows, vocabulary;
  int64_t gap = 0, shift = 0;
};

// Calls run(source, tokens, rows, vocabulary, options) for rows of every kind, and compares tokens and statuses with the oracle's.
template <class Memory, class T, class Run>
void check_samples(Tally& t, const SampleShape& shape, const std::vector<SampleRulesOf>& rules, const Run& run) {
  const int64_t rows = shape.rows, n = shape.vocabulary, words = (n + 31) / 32 + 1, most = 70;
  Random random(mix(uint64_t(n)) + uint64_t(rows * 8 + shape.shift));
  Guarded<T, Memory> logits(rows, n, n + shape.gap, shape.shift, Poison::nan);
  Guarded<float, Memory> bias(1, n, n, 1, Poison::nan);
  Guarded<uint32_t, Memory> allowed(rows, words, words, 1, Poison::nan);
  Guarded<int32_t, Memory> counts(rows, n, n + 3, 1, Poison::garbage), previous(rows, most, most, 1, Poison::nan), lengths(1, rows, rows, 1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) logits.set(r, i, k::convert<T>(logit(Logits((r + n) % 8), random, i)));
    for (int64_t i = 0; i < words; ++i) allowed.set(r, i, uint32_t(random.bits()) | (r % 2 == 0 ? uint32_t(random.bits()) : 0u));
    for (int64_t i = 0; i < n; ++i) counts.set(r, i, random.below(10) == 0 ? int32_t(random.below(4)) : 0);
    for (int64_t i = 0; i < most; ++i) previous.set(r, i, int32_t(random.below(i % 3 == 0 ? n : 1 + n / 8)));
    if (r % 2 == 0) previous.set(r, 3, -1), previous.set(r, 5, int32_t(n));  // no tokens
    lengths.set(0, r, int32_t(r % 4 == 3 ? 0 : most - r % 5));
  }
  for (int64_t i = 0; i < n; ++i) bias.set(0, i, random.below(4) == 0 ? float(random.normal()) : 0.f);
  logits.upload(), bias.upload(), allowed.upload(), counts.upload(), previous.upload(), lengths.upload();

  uint64_t step = 0;
  for (const SampleRulesOf& rule : rules) {
    if (t.leaves_out()) continue;
    SampleRulesOf r = rule;
    if (r.top_k > n) r.top_k = int(n);
    const uint64_t seed = mix(++step);
    Guarded<int32_t, Memory> tokens(1, rows, rows), status(1, rows, rows);
    k::Sampling s = k::Sampling{}.temperature(r.temperature).top_k(r.top_k).top_p(r.top_p).min_p(r.min_p).typical(r.typical).soft_cap(r.soft_cap);
    s.seed(seed).step(step).status(status.data());
    if (r.listed) s.previous(previous.data(), previous.ld(), lengths.data());
    if (r.counted) s.counts(counts.data(), counts.ld());
    if (r.listed || r.counted) s.repetition_penalty(r.repetition).presence_penalty(r.presence).frequency_penalty(r.frequency);
    if (r.bias) s.bias(bias.data(), 0);
    if (r.allowed) s.allowed(allowed.data(), allowed.ld());
    const k::Status called = run(k::load(static_cast<const T*>(logits.data()), logits.ld()), tokens.data(), rows, n, s);
    if (!t.expect(called.ok(), "%s, %d tokens: %s", r.name, int(n), called.reason())) continue;
    tokens.download(), status.download();
    t.expect(tokens.intact() && status.intact(), "%s, %d tokens: wrote outside", r.name, int(n));
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<float> x(static_cast<size_t>(n));
      std::vector<uint32_t> mask(static_cast<size_t>(words));
      std::vector<float> added(static_cast<size_t>(n));
      std::vector<int> seen(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {
        x[size_t(i)] = k::convert<float>(logits.get(row, i)), added[size_t(i)] = bias.get(0, i);
        seen[size_t(i)] = r.counted ? counts.get(row, i) : 0;
      }
      for (int64_t i = 0; i < words; ++i) mask[size_t(i)] = allowed.get(row, i);
      for (int64_t i = 0; r.listed && i < lengths.get(0, row); ++i) {
        const int32_t token = previous.get(row, i);
        if (token >= 0 && token < n) ++seen[size_t(token)];
      }
      const SampleExpected want = sample_oracle(x, r, draw_of(seed, uint64_t(row), step), added.data(), mask.data(), seen);
      t.expect(tokens.get(0, row) == want.token && status.get(0, row) == int32_t(want.status), "%s, %d tokens, row %d of kind %d: token %d, status %d, want %d, %d of %d that are left",
               r.name, int(n), int(row), int((row + n) % 8), int(tokens.get(0, row)), int(status.get(0, row)), int(want.token), int(want.status), int(want.kept.size()));
    }
  }
  t.expect(logits.unchanged(), "the logits were changed");
}

}  // namespace test
