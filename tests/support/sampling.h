// What the tests of sampling on the CPU and the GPU share: cases, and an oracle that sorts each row. The oracle takes
// the weight of a logit from the library, as it must have the same bits; that weights are what they should be is tested
// by itself.
#pragma once

#include <kernels/core/sampling.h>
#include <kernels/functor.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "golden/sampling.h"
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
  bool prompted = false;  // the first of what is listed are the prompt's
};

inline SampleRulesOf rules_of(const char* name, float temperature, int top_k, float top_p = 1, float min_p = 0,
                              float typical = 1) {
  SampleRulesOf r;
  r.name = name, r.temperature = temperature, r.top_k = top_k, r.top_p = top_p, r.min_p = min_p, r.typical = typical;
  return r;
}

inline std::vector<SampleRulesOf> sample_rules() {
  std::vector<SampleRulesOf> all = {rules_of("plain", 1, 0),
                                    rules_of("greedy", 0, 0),
                                    rules_of("greedy with filters", 0, 50, 0.9f),
                                    rules_of("hot", 3, 0),
                                    rules_of("cold", 0.05f, 0),
                                    rules_of("nearly greedy", 1e-30f, 0),
                                    rules_of("top_k", 1, 50),
                                    rules_of("top_k 1", 1, 1),
                                    rules_of("top_k 256", 1.3f, 256),
                                    rules_of("top_k 300", 2, 300),
                                    rules_of("top_k 5000", 3, 5000),
                                    rules_of("top_k of all", 0.9f, -1),
                                    rules_of("top_k of all, top_p", 0.9f, 1 << 30, 0.9f),
                                    rules_of("top_p", 1, 0, 0.9f),
                                    rules_of("top_p 0", 1, 0, 0.f),
                                    rules_of("top_k, top_p", 0.8f, 50, 0.9f),
                                    rules_of("min_p", 1, 0, 1, 0.05f),
                                    rules_of("top_p, min_p", 1.5f, 0, 0.6f, 0.02f),
                                    rules_of("typical", 1, 0, 1, 0, 0.6f),
                                    rules_of("top_k, typical", 1, 100, 1, 0, 0.5f),
                                    rules_of("all", 1.2f, 200, 0.95f, 0.01f, 0.9f),
                                    rules_of("all but top_k", 1.2f, 0, 0.95f, 0.001f, 0.7f),
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
  // Penalties of listed tokens alone.
  for (SampleRulesOf one : {rules_of("penalized, greedy", 0, 0), rules_of("penalized, top_k, top_p", 0.8f, 50, 0.9f),
                            rules_of("penalized, top_k 200", 2, 200), rules_of("penalized, top_p", 1, 0, 0.9f)}) {
    one.listed = true, one.repetition = 1.3f, one.presence = -0.5f, one.frequency = 0.2f;
    all.push_back(one);
  }
  r = rules_of("of a prompt and of what follows it", 0.9f, 60, 0.95f);
  r.listed = r.prompted = true, r.repetition = 1.3f, r.presence = 0.6f, r.frequency = 0.4f;
  all.push_back(r);
  r.name = "the same, and counted", r.counted = r.bias = true;
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

// The random numbers of a row: that of its draw, that of its draft, and those of a further try.
struct RandomNumbers {
  uint64_t seed, draw, draft;
  RandomNumbers(uint64_t key, uint64_t low, uint64_t high) : seed(key) {
    const auto four = k::philox(key, low, high);
    draw = uint64_t(four[1]) << 32 | four[0], draft = uint64_t(four[3]) << 32 | four[2];
  }
  RandomNumbers next() const { return RandomNumbers(seed, draw, draft); }
};
inline uint64_t share_of_range(uint64_t random, uint64_t range) {
  __extension__ const unsigned __int128 product = (unsigned __int128)(random)*range;
  return uint64_t(product >> 64);
}

// What one row gives. x: the logits, changed here by what comes before the temperature. drafted: as a row with a draft
// draws. in_prompt: the tokens of a prompt, which `seen` does not have.
inline SampleExpected sample_oracle(std::vector<float>& x, const SampleRulesOf& r, RandomNumbers random,
                                    const float* bias, const uint32_t* allowed, const std::vector<int>& seen,
                                    bool drafted = false, const std::vector<char>* in_prompt = nullptr) {
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
    const int count = seen[size_t(i)];
    if (count > 0 || (in_prompt != nullptr && (*in_prompt)[size_t(i)]))
      v = v < 0 ? rounded(double(v) * double(r.repetition)) : rounded(double(v) / double(r.repetition));
    if (count > 0) {
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
  const auto keep_likely = [&](std::vector<int32_t>& some) {
    const double least = r.min_p > 0 ? std::max(1.0, std::floor(double(r.min_p) * double(k::detail::weight_of(0)))) : 0;
    while (double(weight(some.back())) < least) some.pop_back();
  };
  std::vector<int32_t> from = ids;  // by logit, as kept is
  if (r.top_p < 1) share(ids, r.top_p);
  keep_likely(ids);
  if (r.typical < 1) {
    __extension__ unsigned __int128 sum = 0;
    for (const int32_t id : ids) sum += weight(id) * uint64_t(level(id));
    const int64_t mean = int64_t(sum / total(ids));
    std::vector<int32_t> nearest = ids;
    const auto distance = [&](int32_t id) { return std::abs(int64_t(level(id)) - mean); };
    std::sort(nearest.begin(), nearest.end(),
              [&](int32_t a, int32_t b) { return distance(a) != distance(b) ? distance(a) < distance(b) : a < b; });
    share(nearest, r.typical);
    std::sort(nearest.begin(), nearest.end());
    ids.erase(std::remove_if(ids.begin(), ids.end(),
                             [&](int32_t id) { return !std::binary_search(nearest.begin(), nearest.end(), id); }),
              ids.end());
  }
  // By logit if there is a top_k of up to 1024, and else by id. Without typical() and drafts top_p is not asked before,
  // but of each token that is drawn; if it does not keep it, one of those ahead of it is drawn.
  const bool by_logit = r.temperature == 0 || (r.top_k > 0 && r.top_k < n && r.top_k <= 1024);
  if (by_logit || r.typical < 1 || drafted || r.top_p >= 1) from = ids;
  else keep_likely(from);
  for (;; random = random.next()) {
    std::vector<int32_t> order = from;
    if (!by_logit) std::sort(order.begin(), order.end());
    uint64_t target = share_of_range(random.draw, total(order));
    size_t at = 0;
    for (; target >= weight(order[at]); ++at) target -= weight(order[at]);
    out.token = order[at];
    if (std::find(ids.begin(), ids.end(), out.token) != ids.end()) return out;
    from.erase(std::find(from.begin(), from.end(), out.token), from.end());
  }
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
  int64_t gap = 0, shift = 0, listed = 70;  // tokens that occurred, at most
  // So many different ones of them in each list that is not empty; at least 10 less than are listed. Or any number.
  int64_t different = 0;
};

// Calls run(source, tokens, rows, vocabulary, options) for rows of every kind, and compares tokens and statuses with
// the oracle's.
template <class Memory, class T, class Run>
void check_samples(Tally& t, const SampleShape& shape, const std::vector<SampleRulesOf>& rules, const Run& run) {
  const int64_t rows = shape.rows, n = shape.vocabulary, words = (n + 31) / 32 + 1, most = shape.listed;
  Random random(mix(uint64_t(n)) + uint64_t(rows * 8 + shape.shift));
  Guarded<T, Memory> logits(rows, n, n + shape.gap, shape.shift, Poison::nan);
  Guarded<float, Memory> bias(1, n, n, 1, Poison::nan);
  Guarded<uint32_t, Memory> allowed(rows, words, words, 1, Poison::nan);
  Guarded<int32_t, Memory> counts(rows, n, n + 3, 1, Poison::garbage), previous(rows, most, most, 1, Poison::nan),
      lengths(1, rows, rows, 1), prompts(1, rows, rows, 1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) logits.set(r, i, k::convert<T>(logit(Logits((r + n) % 8), random, i)));
    for (int64_t i = 0; i < words; ++i)
      allowed.set(r, i, uint32_t(random.bits()) | (r % 2 == 0 ? uint32_t(random.bits()) : 0u));
    for (int64_t i = 0; i < n; ++i) counts.set(r, i, random.below(10) == 0 ? int32_t(random.below(4)) : 0);
    for (int64_t i = 0; i < most; ++i) {
      previous.set(r, i,
                   int32_t(shape.different > 0 ? (i % shape.different * 7919 + r) % n  // of a prime's multiples
                                               : random.below(i % 3 == 0 ? n : 1 + n / 8)));
    }
    if (r % 2 == 0) previous.set(r, 3, -1), previous.set(r, 5, int32_t(n));  // no tokens
    lengths.set(0, r, int32_t(r % 4 == 3 ? 0 : most - r % 5));
    prompts.set(0, r, int32_t(r % 7 == 0 ? -1 : r % 7 == 1 ? most + 9 : most * (r % 7) / 8));
  }
  for (int64_t i = 0; i < n; ++i) bias.set(0, i, random.below(4) == 0 ? float(random.normal()) : 0.f);
  logits.upload(), bias.upload(), allowed.upload(), counts.upload(), previous.upload(), lengths.upload();
  prompts.upload();

  uint64_t step = 0;
  for (const SampleRulesOf& rule : rules) {
    if (t.leaves_out()) continue;
    const SampleRulesOf& r = rule;
    const uint64_t seed = mix(++step);
    Guarded<int32_t, Memory> tokens(1, rows, rows), status(1, rows, rows);
    k::Sampling s = k::Sampling{}
                        .temperature(r.temperature)
                        .top_k(r.top_k)
                        .top_p(r.top_p)
                        .min_p(r.min_p)
                        .typical(r.typical)
                        .soft_cap(r.soft_cap);
    s.seed(seed).step(step).status(status.data());
    if (r.listed) s.previous(previous.data(), previous.ld(), lengths.data());
    if (r.prompted) s.prompts(prompts.data());
    if (r.counted) s.counts(counts.data(), counts.ld());
    if (r.listed || r.counted)
      s.repetition_penalty(r.repetition).presence_penalty(r.presence).frequency_penalty(r.frequency);
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
      std::vector<char> in_prompt(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {
        x[size_t(i)] = k::convert<float>(logits.get(row, i)), added[size_t(i)] = bias.get(0, i);
        seen[size_t(i)] = r.counted ? counts.get(row, i) : 0;
      }
      for (int64_t i = 0; i < words; ++i) mask[size_t(i)] = allowed.get(row, i);
      for (int64_t i = 0; r.listed && i < lengths.get(0, row); ++i) {
        const int32_t token = previous.get(row, i);
        if (token < 0 || token >= n) continue;
        if (r.prompted && i < prompts.get(0, row))
          in_prompt[size_t(token)] = 1;
        else
          ++seen[size_t(token)];
      }
      const SampleExpected want = sample_oracle(x, r, RandomNumbers(seed, uint64_t(row), step), added.data(),
                                                mask.data(), seen, false, &in_prompt);
      t.expect(tokens.get(0, row) == want.token && status.get(0, row) == int32_t(want.status),
               "%s, %d tokens, row %d of kind %d: token %d, status %d, want %d, %d of %d that are left", r.name, int(n),
               int(row), int((row + n) % 8), int(tokens.get(0, row)), int(status.get(0, row)), int(want.token),
               int(want.status), int(want.kept.size()));
    }
  }
  t.expect(logits.unchanged(), "the logits were changed");
}


// Rows with parameters, seeds and steps of their own, some of them wrong, and rows from which nothing can be drawn.
template <class Memory, class Run>
void check_sample_rows(Tally& t, const Run& run) {
  const int64_t rows = 12, n = 3000;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<SampleRulesOf> rules(size_t(rows), rules_of("row", 1, 0));
  for (int64_t r = 0; r < rows; ++r) rules[size_t(r)].top_k = int(r), rules[size_t(r)].top_p = r % 2 == 0 ? 1.f : 0.8f;
  rules[1].temperature = 0, rules[2].temperature = -1, rules[3].top_p = nan, rules[4].top_k = -2, rules[5].min_p = 1.5f;
  rules[6].typical = -0.1f, rules[7].repetition = 0, rules[8].presence = inf, rules[9].temperature = inf,
  rules[10].top_k = std::numeric_limits<int32_t>::min(), rules[0].top_k = -1;
  // Rows from which something is drawn have penalties of their own, of lists of their own.
  rules[0].repetition = 1.7f, rules[1].presence = 1.5f, rules[11].frequency = 0.75f;
  const auto all = [&](auto SampleRulesOf::*what) {
    std::vector<std::decay_t<decltype(rules[0].*what)>> numbers;
    for (const SampleRulesOf& r : rules) numbers.push_back(r.*what);
    return numbers;
  };
  const Numbers<float, Memory> temperature(all(&SampleRulesOf::temperature)), top_p(all(&SampleRulesOf::top_p)),
      min_p(all(&SampleRulesOf::min_p)), typical(all(&SampleRulesOf::typical)),
      repetition(all(&SampleRulesOf::repetition)), presence(all(&SampleRulesOf::presence)),
      frequency(all(&SampleRulesOf::frequency));
  const Numbers<int32_t, Memory> top_k(all(&SampleRulesOf::top_k));
  const int64_t listed = 400;
  Guarded<int32_t, Memory> previous(rows, listed, listed);
  const Numbers<int32_t, Memory> lengths{std::vector<int32_t>(size_t(rows), int32_t(listed))};
  std::vector<uint64_t> seeds, steps;
  for (int64_t r = 0; r < rows; ++r)
    seeds.push_back(r == 11 ? 77 : uint64_t(r)), steps.push_back(uint64_t(r == 11 ? 5 : 100 + r));
  seeds[0] = 77, steps[0] = 5;
  Numbers<uint64_t, Memory> seed(seeds), step(steps);
  const Numbers<uint64_t, Memory> one_step(std::vector<uint64_t>{9});
  Guarded<float, Memory> logits(rows, n, n, 0, Poison::nan);
  Random random(3);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < listed; ++i) previous.set(r, i, int32_t(random.below(n)));
  }
  previous.upload();
  for (int64_t i = 0; i < n; ++i) {
    const float x = float(random.normal());
    for (int64_t r = 0; r < rows; ++r) logits.set(r, i, x);
  }
  logits.upload();
  const auto expect = [&](const char* what, const k::Sampling& options, bool own_seeds, bool own_rules) {
    Guarded<int64_t, Memory> tokens(1, rows, rows);
    Guarded<int32_t, Memory> status(1, rows, rows);
    k::Sampling s = options;
    const k::Status called =
        run(k::load(static_cast<const float*>(logits.data()), n), tokens.data(), rows, n, s.status(status.data()));
    t.expect(called.ok(), "%s: %s", what, called.reason());
    tokens.download(), status.download();
    t.expect(tokens.intact() && status.intact(), "%s: wrote outside", what);
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<float> x(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) x[size_t(i)] = logits.get(r, i);
      const SampleRulesOf rule = own_rules ? rules[size_t(r)] : rules_of("one", 1, 0);
      const RandomNumbers numbers =
          own_seeds ? RandomNumbers(seeds[size_t(r)], 0, steps[size_t(r)]) : RandomNumbers(3, uint64_t(r), 9);
      std::vector<int> seen(static_cast<size_t>(n));
      for (int64_t i = 0; own_rules && i < listed; ++i) ++seen[size_t(previous.get(r, i))];
      SampleExpected want;
      want.status = k::Sampled::parameter;
      if (!own_rules || r < 2 || r > 10) want = sample_oracle(x, rule, numbers, nullptr, nullptr, seen);
      t.expect(tokens.get(0, r) == want.token && status.get(0, r) == int32_t(want.status),
               "%s, row %d: token %d, status %d, want %d, %d", what, int(r), int(tokens.get(0, r)),
               int(status.get(0, r)), int(want.token), int(want.status));
    }
    return tokens.get(0, 0) == tokens.get(0, 11);
  };
  k::Sampling own = k::Sampling{}
                        .temperature(temperature.data())
                        .top_k(top_k.data())
                        .top_p(top_p.data())
                        .min_p(min_p.data())
                        .typical(typical.data());
  own.repetition_penalty(repetition.data()).presence_penalty(presence.data()).frequency_penalty(frequency.data());
  own.previous(previous.data(), listed, lengths.data());
  expect("parameters of each row", k::Sampling(own).seed(3).step(9), false, true);
  expect("seeds of each row as well", k::Sampling(own).seed(seed.data()).step(step.data()), true, true);
  t.expect(expect("seeds of each row", k::Sampling{}.seed(seed.data()).step(step.data()), true, false),
           "rows with equal seeds and steps have other tokens");
  expect("one step for all", k::Sampling{}.seed(3).step(one_step.data(), 0), false, false);
  seed.assign(std::vector<uint64_t>(size_t(rows), 3));
  logits.set(4, n - 1, nan), logits.set(5, 0, -nan), logits.set(6, 17, inf);
  for (int64_t i = 0; i < n; ++i) logits.set(7, i, -inf);
  logits.upload();
  expect("NaN and infinities", k::Sampling{}.seed(3).step(9), false, false);
  expect("NaN and infinities, top_k", k::Sampling{}.seed(3).step(9).top_k(int32_t(n)), false, false);

  // A NaN that is hidden does not count.
  Guarded<uint32_t, Memory> allowed(1, (n + 31) / 32, (n + 31) / 32);
  for (int64_t i = 0; i < (n + 31) / 32; ++i) allowed.set(0, i, i == 0 ? 6u : 0u);
  allowed.upload();
  Guarded<int32_t, Memory> tokens(1, rows, rows), status(1, rows, rows);
  const k::Status called = run(k::load(static_cast<const float*>(logits.data()), n), tokens.data(), rows, n,
                               k::Sampling{}.allowed(allowed.data(), 0).status(status.data()));
  tokens.download(), status.download();
  t.expect(called.ok() && status.get(0, 4) == 0 && (tokens.get(0, 4) == 1 || tokens.get(0, 4) == 2),
           "two allowed tokens: token %d, status %d", int(tokens.get(0, 4)), int(status.get(0, 4)));
}

// A million draws of each rule against the probabilities of a textbook, in double.
inline std::vector<double> sample_probabilities(const std::vector<float>& logits, const SampleRulesOf& r) {
  const size_t n = logits.size();
  std::vector<double> p(n);
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  for (size_t i = 0; i < n; ++i) p[i] = std::exp((double(logits[i]) - logits[order[0]]) / r.temperature);
  const auto normalize = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
  };
  const auto keep = [&](const std::vector<size_t>& in_order, double share) {
    normalize();
    double before = 0;
    for (const size_t i : in_order) {
      const double own = p[i];
      if (before >= share) p[i] = 0;
      before += own;
    }
  };
  for (size_t i = 0; i < n; ++i) {
    if (r.top_k > 0 && i >= size_t(r.top_k)) p[order[i]] = 0;
  }
  if (r.top_p < 1) keep(order, r.top_p);
  for (size_t i = 0; i < n; ++i) {
    if (p[i] < r.min_p * p[order[0]]) p[i] = 0;
  }
  normalize();
  if (r.typical < 1) {
    double entropy = 0;
    for (const double x : p) entropy -= x > 0 ? x * std::log(x) : 0;
    const auto distance = [&](size_t i) { return p[i] > 0 ? std::fabs(-std::log(p[i]) - entropy) : 1e300; };
    std::vector<double> far(n);
    for (size_t i = 0; i < n; ++i) far[i] = distance(i);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return far[a] < far[b]; });
    keep(order, r.typical);
  }
  normalize();
  return p;
}

template <class Memory, class Run>
void check_draws(Tally& t, int64_t n, int64_t draws, const Run& run) {
  Guarded<float, Memory> logits(1, n, n);
  Random random(mix(uint64_t(n)));
  std::vector<float> x;
  for (int64_t i = 0; i < n; ++i) x.push_back(float(1.5 * random.normal())), logits.set(0, i, x.back());
  logits.upload();
  for (const SampleRulesOf& r :
       {rules_of("plain", 1, 0), rules_of("hot", 1.7f, 0), rules_of("top_k", 1, 7), rules_of("top_p", 1, 0, 0.7f),
        rules_of("min_p", 1, 0, 1, 0.1f), rules_of("typical", 1, 0, 1, 0, 0.6f),
        rules_of("all", 1.3f, 15, 0.95f, 0.03f, 0.8f)}) {
    Guarded<int32_t, Memory> tokens(1, draws, draws);
    k::Sampling s = k::Sampling{}
                        .temperature(r.temperature)
                        .top_k(r.top_k)
                        .top_p(r.top_p)
                        .min_p(r.min_p)
                        .typical(r.typical)
                        .seed(123);
    const k::Status called = run(k::load(static_cast<const float*>(logits.data()), 0), tokens.data(), draws, n, s);
    t.expect(called.ok(), "%s: %s", r.name, called.reason());
    tokens.download();
    std::vector<int64_t> seen(static_cast<size_t>(n));
    for (int64_t i = 0; i < draws; ++i) {
      const int32_t token = tokens.get(0, i);
      if (t.expect(token >= 0 && token < n, "%s: token %d", r.name, int(token))) ++seen[size_t(token)];
    }
    const std::vector<double> p = sample_probabilities(x, r);
    double squares = 0, freedom = -1;
    for (int64_t i = 0; i < n; ++i) {
      const double want = p[size_t(i)] * double(draws), got = double(seen[size_t(i)]);
      if (want == 0) t.expect(got == 0, "%s: token %d was drawn, which is not left", r.name, int(i));
      else squares += (got - want) * (got - want) / want, ++freedom;
    }
    if (draws < 20000) continue;  // too few for statistics
    t.expect(freedom > 0 && squares < freedom + 5 * std::sqrt(2 * freedom) + 5,
             "%s: chi-square of %g with %g degrees of freedom", r.name, squares, freedom);
  }
}

// Tokens that every processor draws.
template <class Memory, class Run>
void check_known(Tally& t, const Run& run) {
  const int64_t rows = 6, n = 2000;
  Guarded<float, Memory> logits(rows, n, n);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) logits.set(r, i, float((i * 7919 + r * 31) % 1009) / 64.f);
  }
  logits.upload();
  Numbers<int32_t, Memory> previous({1, 2, 3, 1, 500, 501}), lengths(std::vector<int32_t>(size_t(rows), 6));
  const k::Sampling plain = k::Sampling{}.seed(2024).step(7);
  const k::Sampling all[] = {plain, k::Sampling(plain).temperature(3.7f), k::Sampling(plain).top_k(50).top_p(0.9f),
                             k::Sampling(plain)
                                 .temperature(2.3f)
                                 .soft_cap(11)
                                 .previous(previous.data(), 0, lengths.data())
                                 .repetition_penalty(1.7f)
                                 .frequency_penalty(0.3f)
                                 .typical(0.8f),
                             k::Sampling(plain).temperature(3.7f).top_p(0.6f).min_p(0.2f)};
  const int32_t want[][rows] = {{686, 614, 1102, 1069, 575, 1076},
                                {691, 627, 1101, 1074, 576, 1084},
                                {1319, 818, 106, 614, 1577, 621},
                                {694, 636, 1103, 1078, 582, 1090},
                                {693, 627, 1102, 1221, 1439, 1974}};
  for (int i = 0; i < 5; ++i) {
    Guarded<int32_t, Memory> tokens(1, rows, rows);
    const k::Status called = run(k::load(static_cast<const float*>(logits.data()), n), tokens.data(), rows, n, all[i]);
    t.expect(called.ok(), "%s", called.reason());
    tokens.download();
    for (int64_t r = 0; r < rows; ++r)
      t.expect(tokens.get(0, r) == want[i][r], "known tokens %d, row %d: %d, want %d", i, int(r), int(tokens.get(0, r)),
               int(want[i][r]));
  }
}

// What Hugging Face's logits processors keep is what the oracle keeps, and nothing else is ever drawn.
template <class Memory, class Run>
void check_golden(Tally& t, const Run& run) {
  const int64_t draws = 3000;
  int row = 0;
  for (const GoldenRow& golden : golden_rows()) {
    if (t.leaves_out()) continue;
    const int64_t n = int64_t(golden.logits.size());
    SampleRulesOf r = rules_of("golden", golden.temperature, golden.top_k, golden.top_p, golden.min_p, golden.typical);
    r.repetition = golden.repetition, r.bias = r.allowed = true;
    std::vector<float> x, bias(static_cast<size_t>(n));
    std::vector<int> seen(static_cast<size_t>(n));
    for (const int v : golden.logits) x.push_back(float(v) / 1024);
    for (size_t i = 0; i < golden.biased.size(); i += 2)
      bias[size_t(golden.biased[i])] = float(golden.biased[i + 1]) / 1024;
    for (const int token : golden.previous) ++seen[size_t(token)];
    std::vector<uint32_t> allowed(size_t(n + 31) / 32, ~0u);
    for (const int token : golden.hidden) allowed[size_t(token) / 32] &= ~(1u << token % 32);
    const Numbers<float, Memory> logits(x), added(bias);
    const Numbers<uint32_t, Memory> mask(allowed);
    const Numbers<int32_t, Memory> previous(std::vector<int32_t>(golden.previous.begin(), golden.previous.end())),
        lengths(std::vector<int32_t>(size_t(draws), int32_t(golden.previous.size())));
    Guarded<int32_t, Memory> tokens(1, draws, draws);
    k::Sampling s = k::Sampling{}
                        .temperature(r.temperature)
                        .top_k(r.top_k)
                        .top_p(r.top_p)
                        .min_p(r.min_p)
                        .typical(r.typical)
                        .repetition_penalty(r.repetition);
    s.previous(previous.data(), 0, lengths.data()).bias(added.data(), 0).allowed(mask.data(), 0).seed(uint64_t(row));
    const k::Status called = run(k::load(static_cast<const float*>(logits.data()), 0), tokens.data(), draws, n, s);
    t.expect(called.ok(), "golden row %d: %s", row, called.reason());
    tokens.download();
    SampleExpected want = sample_oracle(x, r, RandomNumbers(0, 0, 0), bias.data(), allowed.data(), seen);
    std::sort(want.kept.begin(), want.kept.end());
    t.expect(std::vector<int>(want.kept.begin(), want.kept.end()) == golden.kept,
             "golden row %d: %d tokens are left, of Hugging Face's %d", row, int(want.kept.size()),
             int(golden.kept.size()));
    std::vector<int> drawn(static_cast<size_t>(n));
    for (int64_t i = 0; i < draws; ++i) {
      const int32_t token = tokens.get(0, i);
      if (t.expect(token >= 0 && token < n, "golden row %d: token %d", row, int(token))) ++drawn[size_t(token)];
    }
    double sum = 0, greatest = -1e30;
    for (const int token : golden.kept) greatest = std::max(greatest, double(x[size_t(token)]));
    for (const int token : golden.kept) sum += std::exp((x[size_t(token)] - greatest) / r.temperature);
    for (int token = 0; token < n; ++token) {
      const bool left = std::binary_search(golden.kept.begin(), golden.kept.end(), token);
      const double share = left ? std::exp((x[size_t(token)] - greatest) / r.temperature) / sum : 0;
      t.expect(left || drawn[size_t(token)] == 0, "golden row %d: token %d was drawn", row, token);
      t.expect(std::fabs(drawn[size_t(token)] - share * double(draws)) <= 6 * std::sqrt(share * double(draws)) + 6,
               "golden row %d: token %d was drawn %d times", row, token, drawn[size_t(token)]);
    }
    ++row;
  }
}

// ---- speculative decoding -------------------------------------------------------------------------------------------

// What one row says about a draft: -2 for accepted, or the token in its place. q: the drafter's probabilities; empty:
// it was certain.
inline int64_t verify_oracle(std::vector<float> x, const SampleRulesOf& r, const std::vector<float>& q, int64_t drafted,
                             const RandomNumbers& random) {
  const bool none = drafted < 0 || drafted >= int64_t(x.size());
  const SampleExpected plain = sample_oracle(x, r, random, nullptr, nullptr, std::vector<int>(x.size()), !none);
  if (plain.status != k::Sampled::ok || none) return plain.token;
  const k::detail::Levels levels(k::detail::key_of(x[size_t(plain.kept[0])]), r.temperature);
  std::vector<uint64_t> weights;
  uint64_t total = 0, own = 0;
  for (const int32_t id : plain.kept)
    weights.push_back(k::detail::weight_of(levels(k::detail::key_of(x[size_t(id)])))), total += weights.back();
  const auto share = [&](int64_t id) {
    return q.empty() ? (id == drafted ? total : 0) : uint64_t(double(q[size_t(id)]) * double(total));
  };
  uint64_t rest = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (plain.kept[i] == drafted) own = weights[i];
  }
  if (share_of_range(random.draft, share(drafted)) < own) return -2;
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] -= std::min(weights[i], share(plain.kept[i]));
    rest += weights[i];
  }
  if (rest == 0) return plain.token;
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t(0));
  const bool by_logit = r.temperature == 0 || (r.top_k > 0 && r.top_k <= 1024 && r.top_k < int(x.size()));
  if (!by_logit)
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return plain.kept[a] < plain.kept[b]; });
  uint64_t target = share_of_range(random.draw, rest);
  for (const size_t i : order) {
    if (target < weights[i]) return plain.kept[i];
    target -= weights[i];
  }
  return -3;
}

// run(logits, drafts, tokens, accepted, shape, options)
template <class Memory, class Run>
void check_verify(Tally& t, int64_t n, const Run& run) {
  const int64_t sequences = 9, drafts = 3, rows = sequences * (drafts + 1);
  Random random(mix(uint64_t(n)));
  Guarded<float, Memory> logits(rows, n, n, 0, Poison::nan), q(sequences * drafts, n, n + 1, 1, Poison::nan);
  Guarded<int64_t, Memory> drafted(sequences, drafts, drafts + 2, 1, Poison::nan);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < n; ++i) logits.set(row, i, float(2.5 * random.normal()));
  }
  logits.set(4, n / 2, std::numeric_limits<float>::quiet_NaN());  // sequence 1, before its first draft
  for (int64_t s = 0; s < sequences; ++s) {
    for (int64_t j = 0; j < drafts; ++j) {
      const int64_t row = s * (drafts + 1) + j;
      double sum = 0, share = random.uniform();
      int64_t token = 0, best = 0;
      for (int64_t i = 0; i < n; ++i)
        sum += std::exp(logits.get(row, i) * 0.9), best = logits.get(row, i) > logits.get(row, best) ? i : best;
      for (int64_t i = 0; i < n; ++i) {
        const double p = std::exp(logits.get(row, i) * 0.9) / sum;
        q.set(s * drafts + j, i, float(p));
        if (share >= 0) token = i;
        share -= p;
      }
      drafted.set(s, j, s == 2 && j == 1 ? -1 : s == 3 ? best : s == 4 && j == 2 ? n : token);
    }
  }
  logits.upload(), q.upload(), drafted.upload();
  for (const SampleRulesOf& r : {rules_of("greedy", 0, 0), rules_of("plain", 1, 0), rules_of("hot", 5, 0),
                                 rules_of("top_k, top_p", 0.8f, 50, 0.9f), rules_of("typical", 1, 0, 1, 0, 0.7f),
                                 rules_of("top_k 600", 1.5f, 600)}) {
    for (const bool certain : {false, true}) {
      if (t.leaves_out()) continue;
      Guarded<int64_t, Memory> tokens(1, rows, rows, 1);
      Guarded<int32_t, Memory> accepted(1, sequences, sequences, 1), status(1, rows, rows, 1);
      const int top_k = int(std::min<int64_t>(r.top_k, n));
      const k::Sampling s = k::Sampling{}
                                .temperature(r.temperature)
                                .top_k(top_k)
                                .top_p(r.top_p)
                                .typical(r.typical)
                                .seed(8)
                                .step(40)
                                .status(status.data());
      const auto in = k::load(static_cast<const float*>(logits.data()), n);
      const k::VerifyShape shape{sequences, drafts, n};
      const k::Status called =
          certain
              ? run(in, k::drafts(drafted.data(), drafted.ld()), tokens.data(), accepted.data(), shape, s)
              : run(in, k::drafts(drafted.data(), drafted.ld(), k::load(static_cast<const float*>(q.data()), q.ld())),
                    tokens.data(), accepted.data(), shape, s);
      t.expect(called.ok(), "%s: %s", r.name, called.reason());
      tokens.download(), accepted.download(), status.download();
      t.expect(tokens.intact() && accepted.intact() && status.intact(), "%s: wrote outside", r.name);
      SampleRulesOf rule = r;
      rule.top_k = top_k;
      for (int64_t b = 0; b < sequences; ++b) {
        int64_t count = 0;
        bool open = true;
        for (int64_t j = 0; j <= drafts; ++j) {
          const int64_t row = b * (drafts + 1) + j;
          std::vector<float> x, other;
          for (int64_t i = 0; i < n; ++i) x.push_back(logits.get(row, i));
          for (int64_t i = 0; i < n && j < drafts && !certain; ++i) other.push_back(q.get(b * drafts + j, i));
          const int64_t draft = j < drafts ? drafted.get(b, j) : -1;
          int64_t want = -1;
          if (open) want = verify_oracle(x, rule, other, draft, RandomNumbers(8, uint64_t(b), uint64_t(40 + j)));
          if (want == -2) want = draft, ++count;
          else open = false;
          t.expect(tokens.get(0, row) == want, "%s, %d tokens, certain %d, sequence %d, draft %d: %d, want %d", r.name,
                   int(n), int(certain), int(b), int(j), int(tokens.get(0, row)), int(want));
          t.expect(status.get(0, row) == (row == 4 ? 1 : 0), "%s, row %d: status %d", r.name, int(row),
                   int(status.get(0, row)));
        }
        t.expect(accepted.get(0, b) == count, "%s, %d tokens, sequence %d: %d accepted, want %d", r.name, int(n),
                 int(b), int(accepted.get(0, b)), int(count));
      }
    }
  }
}

// Tokens come as often as without drafts.
template <class Memory, class Run>
void check_verified_draws(Tally& t, int64_t sequences, const Run& run) {
  const int64_t n = 20;
  Guarded<float, Memory> logits(1, n, n), q(1, n, n);
  Guarded<int32_t, Memory> drafted(sequences, 1, 1), tokens(sequences, 2, 2), accepted(1, sequences, sequences);
  Random random(11);
  std::vector<float> x;
  std::vector<double> p;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    x.push_back(float(1.5 * random.normal())), logits.set(0, i, x.back());
    p.push_back(std::exp(1.2 * random.normal())), sum += p.back();
  }
  for (int64_t i = 0; i < n; ++i) q.set(0, i, float(p[size_t(i)] / sum));
  for (int64_t s = 0; s < sequences; ++s) {
    double share = random.uniform() * sum;
    int32_t token = 0;
    while (token + 1 < n && share >= p[size_t(token)]) share -= p[size_t(token++)];
    drafted.set(s, 0, token);
  }
  logits.upload(), q.upload(), drafted.upload();
  for (const SampleRulesOf& r : {rules_of("plain", 1, 0), rules_of("top_p", 0.8f, 0, 0.9f)}) {
    const k::Status called = run(k::load(static_cast<const float*>(logits.data()), 0),
                                 k::drafts(drafted.data(), 1, k::load(static_cast<const float*>(q.data()), 0)),
                                 tokens.data(), accepted.data(), k::VerifyShape{sequences, 1, n},
                                 k::Sampling{}.temperature(r.temperature).top_p(r.top_p).seed(77));
    t.expect(called.ok(), "%s", called.reason());
    tokens.download(), accepted.download();
    const std::vector<double> want = sample_probabilities(x, r);
    for (int place = 0; place < 2; ++place) {
      std::vector<int64_t> seen(static_cast<size_t>(n));
      double draws = 0, squares = 0, freedom = -1;
      for (int64_t s = 0; s < sequences; ++s) {
        if (place == 1 && accepted.get(0, s) == 0) continue;
        ++draws;
        const int32_t token = tokens.get(s, place);
        if (t.expect(token >= 0 && token < n, "%s: token %d", r.name, int(token))) ++seen[size_t(token)];
      }
      for (int64_t i = 0; i < n; ++i) {
        const double often = want[size_t(i)] * draws, got = double(seen[size_t(i)]);
        if (often == 0) t.expect(got == 0, "%s: token %d was drawn, which is not left", r.name, int(i));
        else squares += (got - often) * (got - often) / often, ++freedom;
      }
      if (sequences < 20000) continue;  // too few for statistics
      t.expect(squares < freedom + 5 * std::sqrt(2 * freedom) + 5,
               "%s, token %d: chi-square of %g with %g degrees of freedom", r.name, place, squares, freedom);
    }
  }
}

// ---- logarithms of probabilities ------------------------------------------------------------------------------------

// run(logits, rows, vocabulary, outputs)
template <class Memory, class Run>
void check_log_probs(Tally& t, int64_t n, int64_t shift, const Run& run) {
  const int64_t rows = 9, ld = 260;
  const float inf = std::numeric_limits<float>::infinity();
  Random random(mix(uint64_t(n)));
  Guarded<float, Memory> logits(rows, n, n + shift, shift, Poison::nan);
  std::vector<int64_t> chosen;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) logits.set(r, i, logit(Logits(r % 8), random, i));
    chosen.push_back(r == 3 ? -1 : r == 4 ? n : random.below(n));
  }
  logits.set(8, n - 1, std::nanf(""));
  logits.upload();
  const Numbers<int64_t, Memory> of(chosen);
  for (const int64_t count : {0, 1, 5, 256}) {
    Guarded<float, Memory> own(1, rows, rows, 1), values(rows, count, ld, 1);
    Guarded<int32_t, Memory> ids(rows, count, ld, 1);
    const k::Status called = run(k::load(static_cast<const float*>(logits.data()), logits.ld()), rows, n,
                                 k::LogProbs{}.of(of.data(), own.data()).top(count, ids.data(), values.data(), ld));
    t.expect(called.ok(), "%s", called.reason());
    own.download(), values.download(), ids.download();
    t.expect(own.intact() && values.intact() && ids.intact(), "%d tokens, top %d: wrote outside", int(n), int(count));
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<int32_t> order;
      for (int64_t i = 0; i < n; ++i) {
        if (logits.get(r, i) > -inf) order.push_back(int32_t(i));
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return logits.get(r, a) > logits.get(r, b); });
      double sum = 0;
      const double most = order.empty() ? 0 : logits.get(r, order[0]);
      for (const int32_t id : order) sum += logits.get(r, id) == most ? 1 : std::exp(logits.get(r, id) - most);
      const auto is = [&](float got, int64_t id, const char* what) {
        double want = r == 8 || id >= n || (id < 0 && what[0] == 'c') ? std::nan("")
                      : id < 0 || logits.get(r, id) == -inf           ? -inf
                      : logits.get(r, id) == most                     ? -std::log(sum)
                                                                      : logits.get(r, id) - most - std::log(sum);
        t.expect(std::isnan(want)   ? std::isnan(got)
                 : std::isinf(want) ? got == float(want)
                                    : std::fabs(got - want) <= 1e-6 + std::fabs(want) * 2e-7,
                 "%d tokens, top %d, row %d, %s: %g, want %g", int(n), int(count), int(r), what, got, want);
      };
      is(own.get(0, r), chosen[size_t(r)], "chosen");
      for (int64_t i = 0; i < count; ++i) {
        const int64_t id = r == 8 || i >= int64_t(order.size()) ? -1 : order[size_t(i)];
        t.expect(ids.get(r, i) == id, "%d tokens, top %d, row %d: id %d of place %d, want %d", int(n), int(count),
                 int(r), int(ids.get(r, i)), int(i), int(id));
        is(values.get(r, i), id, "top");
      }
    }
  }
}
}  // namespace test
