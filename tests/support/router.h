// Routing: what it should give, and a whole layer of experts, in the memory of the CPU or the GPU.
#pragma once

#include <kernels/router.h>

#include <algorithm>
#include <functional>

#include "guarded.h"
#include "oracle.h"
#include "random_matrix.h"
#include "tally.h"

namespace test {

namespace k = kernels;

// The same options twice: for the oracle, and for the call.
struct Routing {
  const char* name;
  int64_t tokens, experts, top_k;
  char scores = 's';  // s: softmax, g: sigmoid, c: softmax of the chosen
  bool renormalize = false, biased = false;
  int groups = 1, kept = 1;
  bool two = false;
  float scale = 1;
  int first = 0, count = -1;
  double step = 0;  // logits are multiples of it, so that there are ties; 0: any

  k::RouterShape shape() const { return {tokens, experts, top_k}; }
  k::Router options(const float* bias) const {
    k::Router r;
    if (scores == 'g') r.sigmoid();
    if (scores == 'c') r.softmax_of_chosen();
    r.renormalize(renormalize)
        .scale(scale)
        .groups(groups, kept, two ? k::GroupScore::two_largest : k::GroupScore::largest);
    if (biased) r.bias(bias);
    if (count >= 0) r.local(first, count);
    return r;
  }
};

inline std::vector<Routing> routings() {
  return {{"mixtral", 5, 8, 2, 's', true},
          {"mixtral, ties", 33, 8, 2, 's', true, false, 1, 1, false, 1, 0, -1, 1.0},
          {"qwen", 9, 128, 8, 's', true},
          {"qwen, ties", 9, 60, 4, 's', false, false, 1, 1, false, 1, 0, -1, 2.0},
          {"gpt-oss", 7, 32, 4, 'c'},
          {"gpt-oss, a bias and renormalized", 7, 33, 32, 'c', true, true},
          {"deepseek-v2", 6, 160, 6, 's', false, false, 8, 3, false, 16},
          {"deepseek-v2, ties", 31, 160, 6, 's', false, false, 8, 3, false, 16, 0, -1, 2.0},
          {"deepseek-v3", 6, 256, 8, 'g', true, true, 8, 4, true, 2.5f},
          {"deepseek-v3, ties", 13, 256, 8, 'g', true, true, 8, 4, true, 2.5f, 0, -1, 1.0},
          {"deepseek-v3 without a bias", 6, 256, 8, 'g', true, false, 8, 4, true, 2.5f},
          {"many", 3, 512, 32, 's', true},
          {"many groups", 4, 512, 32, 'g', false, false, 32, 2, true, -1},
          {"llama 4", 5, 16, 1, 'g'},
          {"one", 3, 1, 1, 's', true},
          {"all", 3, 17, 17, 's', true, true},
          {"a device's own", 9, 64, 6, 's', true, false, 1, 1, false, 1, 16, 16},
          {"a device without experts", 3, 64, 6, 's', true, false, 1, 1, false, 1, 64, 0}};
}

struct Choice {
  int id;
  double weight;
};

// What a token chooses, in double.
inline std::vector<Choice> choices_of(const Routing& c, const std::vector<double>& logits,
                                      const std::vector<double>& bias) {
  const size_t n = logits.size();
  const double none = -std::numeric_limits<double>::infinity();
  double largest = none, sum = 0;
  bool nan = false;
  for (const double x : logits) nan = nan || x != x || x == -none, largest = std::max(largest, x == x ? x : none);
  for (const double x : logits) sum += x == none ? 0 : std::exp(x - largest);
  const auto score = [&](double x) {
    if (c.scores == 'g') return 1 / (1 + std::exp(-x));
    if (c.scores == 'c') return x;
    return nan ? std::nan("") : x == none ? 0 : std::exp(x - largest) / sum;
  };
  std::vector<double> merit(n);
  const bool scored = c.biased || (c.two && c.kept < c.groups);
  for (size_t e = 0; e < n; ++e) merit[e] = scored ? score(logits[e]) + (c.biased ? bias[e] : 0) : logits[e];
  const auto more = [](double a, double b) { return a == a && (b != b || a > b); };  // NaN is the least
  const auto better = [&](size_t a, size_t b) {
    return more(merit[a], merit[b]) || (!more(merit[b], merit[a]) && a < b);
  };
  std::vector<size_t> order(n);
  for (size_t e = 0; e < n; ++e) order[e] = e;
  std::sort(order.begin(), order.end(), better);
  if (c.kept < c.groups) {
    const size_t size = n / size_t(c.groups);
    std::vector<double> of_group;
    for (size_t g = 0; g < size_t(c.groups); ++g) {
      std::vector<double> best;
      for (const size_t e : order) {
        if (e / size == g) best.push_back(merit[e]);
      }
      of_group.push_back(c.two ? double(float(best[0]) + float(best[1])) : best[0]);
    }
    std::vector<size_t> groups(size_t(c.groups), 0);
    for (size_t g = 0; g < groups.size(); ++g) groups[g] = g;
    std::sort(groups.begin(), groups.end(), [&](size_t a, size_t b) {
      return more(of_group[a], of_group[b]) || (!more(of_group[b], of_group[a]) && a < b);
    });
    groups.resize(size_t(c.kept));
    order.erase(std::remove_if(order.begin(), order.end(),
                               [&](size_t e) { return std::count(groups.begin(), groups.end(), e / size) == 0; }),
                order.end());
  }
  order.resize(size_t(c.top_k));
  std::vector<double> weights;
  for (const size_t e : order) weights.push_back(score(logits[e]));
  if (c.scores == 'c') {
    double highest = none, all = 0;
    for (const double w : weights) highest = std::max(highest, w == w ? w : none);
    for (double& w : weights) w = w == none ? 0 : std::exp(w - highest), all += w;
    for (double& w : weights) w = all == 0 ? 0 : w / all;
  }
  double total = 0;
  for (const double w : weights) total += w;
  std::vector<Choice> out;
  for (size_t i = 0; i < order.size(); ++i) {
    int id = int(order[i]);
    double w = weights[i] * c.scale;
    if (c.renormalize) w = total == 0 ? 0 : weights[i] / total * c.scale;
    if (c.count >= 0) id = id >= c.first && id < c.first + c.count ? id - c.first : -1;
    out.push_back({id, id < 0 ? 0 : w});
  }
  return out;
}

// run(logits, ids, weights, shape, options) routes, and returns when it is done. value(token, expert): the logits, or
// rather what they are rounded to.
template <class T, class Memory, class Value, class Run>
void check_routing(Tally& t, const Routing& c, const Value& value, const Run& run, int64_t gap = 3, int64_t shift = 1) {
  Guarded<T, Memory> logits(c.tokens, c.experts, c.experts + gap, shift, Poison::nan);
  for (int64_t r = 0; r < c.tokens; ++r) {
    for (int64_t e = 0; e < c.experts; ++e) logits.set(r, e, make<T>(value(r, e)));
  }
  logits.upload();
  std::vector<float> corrections;
  Random random(5);
  for (int64_t e = 0; e < c.experts; ++e)
    corrections.push_back(c.step > 0 ? float(e % 3) * 0.25f : float(0.2 * random.normal()));
  const Numbers<float, Memory> bias(corrections);
  Guarded<int32_t, Memory> ids(c.tokens, c.top_k, c.top_k);
  Guarded<float, Memory> weights(c.tokens, c.top_k, c.top_k);
  const k::Status status = run(k::load(static_cast<const T*>(logits.data()), logits.ld()), ids.data(), weights.data(),
                               c.shape(), c.options(bias.data()));
  t.expect(status.ok(), "%s: %s", c.name, status.reason());
  ids.download();
  weights.download();
  t.expect(ids.intact() && weights.intact() && logits.unchanged(), "%s: wrote outside", c.name);
  for (int64_t r = 0; r < c.tokens; ++r) {
    std::vector<double> row;
    for (int64_t e = 0; e < c.experts; ++e) row.push_back(value_of(logits.get(r, e)));
    const std::vector<Choice> want = choices_of(c, row, std::vector<double>(corrections.begin(), corrections.end()));
    for (int64_t i = 0; i < c.top_k; ++i) {
      const Choice w = want[size_t(i)];
      const double got = weights.get(r, i);
      t.expect(ids.get(r, i) == w.id, "%s, token %d, choice %d: expert %d, want %d", c.name, int(r), int(i),
               ids.get(r, i), w.id);
      // exp is good to 2 units and more far from 0; sums and quotients make a few more.
      t.expect((got != got && w.weight != w.weight) || std::fabs(got - w.weight) <= 2e-5 * std::fabs(w.weight) + 1e-37,
               "%s, token %d, choice %d: weight %.9g, want %.9g", c.name, int(r), int(i), got, w.weight);
    }
  }
}

// Random logits, and some that are masked, infinite or NaN.
template <class Memory, class Run>
void check_routings(Tally& t, const Run& run) {
  for (const Routing& c : routings()) {
    Random random(mix(uint64_t(c.experts * 100 + c.top_k)));
    const auto value = [&](int64_t, int64_t) {
      return c.step > 0 ? c.step * std::round(random.normal()) : 2 * random.normal();
    };
    check_routing<float, Memory>(t, c, value, run);
    if (c.step > 0) check_routing<k::bfloat16, Memory>(t, c, value, run, 0, 0);
    const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
    // Whole rows of one kind, and kinds mixed; large ones, of which the softmax does not overflow. Ties among scores
    // that round to the same number are for those alone that are chosen by their logits.
    if (c.biased || (c.two && c.kept < c.groups)) continue;
    check_routing<float, Memory>(t, c, [&](int64_t r, int64_t e) {
      const double some = double((e * 7 + r) % 11);
      switch (r % 9) {
        case 0: return -inf;
        case 1: return nan;
        case 2: return e % 3 == 0 ? -inf : some;
        case 3: return e == 2 ? nan : some;
        case 4: return e % 2 == 0 ? 0.0 : -0.0;
        case 5: return 1e4 + some;
        case 6: return -1e30 * (1 + some);
        case 7: return e == 1 ? inf : some;
        default: return e % 5 == 4 ? nan : -inf;
      }
    }, run);
  }
}

// sort(ids, order, shape) sorts choices, and returns when it is done.
template <class Memory, class Sort>
void check_sorting(Tally& t, const k::RouterShape& shape, const std::function<int32_t(int64_t)>& id_of,
                   const Sort& sort) {
  const int64_t all = shape.tokens * shape.top_k;
  std::vector<int32_t> chosen;
  for (int64_t i = 0; i < all; ++i) chosen.push_back(id_of(i));
  const Numbers<int32_t, Memory> ids(chosen);
  Guarded<int32_t, Memory> offsets(1, shape.experts + 1, shape.experts + 1), order(1, all, all), places(1, all, all);
  const k::Status status = sort(ids.data(), k::ExpertOrder{offsets.data(), order.data(), places.data()}, shape);
  t.expect(status.ok(), "%s", status.reason());
  offsets.download(), order.download(), places.download();
  t.expect(offsets.intact() && order.intact() && places.intact() && ids.unchanged(), "wrote outside");
  std::vector<int32_t> sorted;
  for (int64_t e = 0; e <= shape.experts; ++e) {
    t.expect(offsets.get(0, e) == int32_t(sorted.size()), "%d choices: offset %d is %d, want %d", int(all), int(e),
             offsets.get(0, e), int(sorted.size()));
    for (int64_t i = 0; i < all && e < shape.experts; ++i) {
      if (chosen[size_t(i)] == e) sorted.push_back(int32_t(i));
    }
  }
  std::vector<int32_t> where(size_t(all), -1);
  for (size_t i = 0; i < sorted.size(); ++i) where[size_t(sorted[i])] = int32_t(i);
  sorted.resize(size_t(all), -1);
  for (int64_t i = 0; i < all; ++i) {
    t.expect(order.get(0, i) == sorted[size_t(i)], "%d choices: row %d is of choice %d, want %d", int(all), int(i),
             order.get(0, i), sorted[size_t(i)]);
    t.expect(places.get(0, i) == where[size_t(i)], "%d choices: choice %d has row %d, want %d", int(all), int(i),
             places.get(0, i), where[size_t(i)]);
  }
}

template <class Memory, class Sort>
void check_sortings(Tally& t, const Sort& sort) {
  // Around the numbers that a warp, a block and one launch take.
  for (const k::RouterShape shape : {k::RouterShape{0, 4, 2},
                                     {1, 1, 1},
                                     {1, 512, 1},
                                     {5, 8, 2},
                                     {31, 60, 4},
                                     {33, 64, 1},
                                     {1000, 256, 8},
                                     {4096, 32, 4},
                                     {4097, 512, 4},
                                     {8192, 128, 6},
                                     {70001, 100, 8}}) {
    check_sorting<Memory>(
        t, shape, [&](int64_t i) { return int32_t(mix(uint64_t(i)) % uint64_t(shape.experts)); }, sort);
    if (shape.tokens > 20000) continue;
    // Some of nobody's; all of one expert; none at all; numbers that no expert has.
    check_sorting<Memory>(
        t, shape, [&](int64_t i) { return int32_t(mix(uint64_t(i)) % uint64_t(shape.experts + 2)) - 1; }, sort);
    check_sorting<Memory>(t, shape, [&](int64_t) { return int32_t(shape.experts - 1); }, sort);
    check_sorting<Memory>(t, shape, [](int64_t) { return -1; }, sort);
    check_sorting<Memory>(
        t, shape,
        [&](int64_t i) {
          return i % 3 == 0   ? std::numeric_limits<int32_t>::min()
                 : i % 3 == 1 ? int32_t(shape.experts)
                              : std::numeric_limits<int32_t>::max();
        },
        sort);
  }
}

// A layer of experts on tokens of T: router, sort, gate and up, down, and what the experts give added to a residual;
// against the same in double. calls has route, sort, matmul and copy, each of which returns when it is done.
template <class T, class Memory, class Calls>
void check_layer(Tally& t, const Routing& c, int64_t cols, int64_t hidden, const Calls& calls) {
  const int64_t rows = c.tokens * c.top_k, mine = c.count < 0 ? c.experts : c.count;
  const RandomMatrix<float, Memory> logits(1, c.tokens, c.experts, c.experts), residual(2, c.tokens, cols, cols);
  const RandomMatrix<T, Memory> x(3, c.tokens, cols, cols, 0, 1), w1(4, mine * hidden, cols, cols, 0, 0.3),
      w3(5, mine * hidden, cols, cols, 0, 0.3), w2(6, mine * cols, hidden, hidden, 0, 0.3);
  Guarded<int32_t, Memory> ids(1, rows, rows), offsets(1, mine + 1, mine + 1), order(1, rows, rows),
      places(1, rows, rows);
  Guarded<float, Memory> weights(1, rows, rows), out(c.tokens, cols, cols);
  Guarded<T, Memory> h(rows, hidden, hidden), y(rows, cols, cols);  // poison where no expert writes
  const auto expect = [&](const k::Status& status) { t.expect(status.ok(), "%s: %s", c.name, status.reason()); };
  const auto in = [](const auto& m) {
    using E = std::remove_pointer_t<decltype(m.data())>;
    return k::load(static_cast<const E*>(m.data()), m.ld());
  };
  const k::Groups groups{mine, offsets.data()};
  expect(calls.route(in(logits), ids.data(), weights.data(), c.shape(), c.options(nullptr)));
  expect(calls.sort(ids.data(), k::ExpertOrder{offsets.data(), order.data(), places.data()},
                    k::RouterShape{c.tokens, mine, c.top_k}));
  expect(calls.matmul(k::gathered(in(x), order.data(), c.top_k), k::gated(in(w1), in(w3)),
                      k::swiglu() | k::store(h.data(), hidden), k::MatmulShape{rows, hidden, cols}, groups));
  expect(calls.matmul(in(h), in(w2), k::store(y.data(), cols), k::MatmulShape{rows, cols, hidden}, groups));
  expect(calls.copy(k::combined(in(y), places.data(), weights.data(), c.top_k) | k::add(in(residual)),
                    k::store(out.data(), cols), c.tokens, cols));
  out.download();
  t.expect(out.intact() && h.unchanged() == false, "%s: wrote outside, or nothing", c.name);
  // Values of T on the way.
  const double rounding = std::is_same<T, float>::value ? 1e-5 : 4e-3;
  for (int64_t r = 0; r < c.tokens; ++r) {
    std::vector<double> row;
    for (int64_t e = 0; e < c.experts; ++e) row.push_back(logits.value(r, e));
    std::vector<double> sum(size_t(cols), 0), size(size_t(cols), 0);
    for (const Choice& choice : choices_of(c, row, {})) {
      if (choice.id < 0) continue;
      std::vector<double> inner;
      for (int64_t f = 0; f < hidden; ++f) {
        double gate = 0, up = 0;
        for (int64_t i = 0; i < cols; ++i) {
          gate += x.value(r, i) * w1.value(choice.id * hidden + f, i);
          up += x.value(r, i) * w3.value(choice.id * hidden + f, i);
        }
        inner.push_back(gate / (1 + std::exp(-gate)) * up);
      }
      for (int64_t n = 0; n < cols; ++n) {
        for (int64_t f = 0; f < hidden; ++f) {
          const double part = choice.weight * inner[size_t(f)] * w2.value(choice.id * cols + n, f);
          sum[size_t(n)] += part, size[size_t(n)] += std::fabs(part);
        }
      }
    }
    for (int64_t n = 0; n < cols; ++n) {
      const double want = sum[size_t(n)] + residual.value(r, n);
      t.expect(std::fabs(out.get(r, n) - want) <= rounding * (size[size_t(n)] + std::fabs(residual.value(r, n))),
               "%s, token %d, column %d: %g, want %g", c.name, int(r), int(n), double(out.get(r, n)), want);
    }
  }
}

inline std::vector<Routing> layers() {
  return {{"8 experts", 37, 8, 2, 's', true},
          {"more choices than are under way at a time", 6, 11, 7, 's', true},
          {"grouped", 5, 16, 3, 'g', true, false, 4, 2, true, 2.5f},
          {"a device's own", 21, 12, 4, 's', true, false, 1, 1, false, 1, 4, 5}};
}

}  // namespace test
