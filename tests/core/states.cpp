// The mergeable states: a row cut anywhere, taken in by packs of any width and merged in any order gives the same
// result.
#include <kernels/core/row_op.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/oracle.h"
#include "support/random.h"
#include "support/tally.h"
#include "support/two_pass.h"

namespace k = kernels;

namespace {

template <class C> constexpr C kInf = std::numeric_limits<C>::infinity();
template <class C> constexpr C kNaN = std::numeric_limits<C>::quiet_NaN();

// K packs of N values, `stride` values from one to the next, as an engine hands them to take(); or only the first few
// of them.
template <class C, int N, int K>
struct Packs {
  const C* x;
  int64_t stride = N;
  int have = K;

  template <class A, class F>
  A fold(A folded, F f) const {
    for (int k = 0; k < have; ++k) {
      k::Pack<C, N> pack;
      for (int i = 0; i < N; ++i) pack[i] = x[k * stride + i];
      folded = f(folded, pack);
    }
    return folded;
  }
  // Of so many values that a mean of equal ones is exact.
  C typical() const {
    constexpr int most = N * K, few = most >= 32 ? 16 : most >= 16 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
    k::Pack<C, few> some;
    for (int i = 0; i < few; ++i)
      some[i] = have == 0 ? C(0) : x[i / N < have ? i / N * stride + i % N : 0] * C(1.0 / few);
    return k::sum(some);
  }
  k::Count<C> count() const { return k::Count<C>(N * have); }
};

// Takes in what is left of n values from x on, K packs at a time and then K / 2 ..., packs of one value at the end.
template <int N, int K, class Op, class C>
void take_all(const Op& op, typename Op::State& running, const C* x, int64_t n) {
  for (; n >= N * K; x += N * K, n -= N * K) op.take(running, Packs<C, N, K>{x});
  if constexpr (K > 1) take_all<N, K / 2>(op, running, x, n);
  else if constexpr (N > 1) take_all<1, 16>(op, running, x, n);
}

// The state of the values of a pack.
template <class Op, class C, int N>
typename Op::State state_of(const Op& op, const k::Pack<C, N>& x) {
  typename Op::State running;
  op.take(running, Packs<C, N, 1>{x.v});
  return running;
}

// What a thread has taken in of n values, in one of many ways. As in the engine, narrow packs come one at a time only
// where the thread has few: deviations are then taken from the mean of one or two values, which may lie far out.
template <class Op, class C>
typename Op::State taken_somehow(const Op& op, const C* x, int64_t n, test::Random& random) {
  typename Op::State running;
  switch (random.below(7)) {
    case 0: n <= 8 ? take_all<1, 1>(op, running, x, n) : take_all<1, 16>(op, running, x, n); break;
    case 1: n <= 16 ? take_all<2, 1>(op, running, x, n) : take_all<2, 8>(op, running, x, n); break;
    case 2: n <= 16 ? take_all<3, 1>(op, running, x, n) : take_all<3, 4>(op, running, x, n); break;
    case 3: take_all<4, 4>(op, running, x, n); break;
    case 4: take_all<8, 1>(op, running, x, n); break;
    case 5: take_all<16, 2>(op, running, x, n); break;
    default: take_all<32, 1>(op, running, x, n);
  }
  return running;
}

// The state of a row that is cut into at most `pieces` random pieces, some empty, each taken in somehow; the pieces are
// merged two by two in random order.
template <class Op, class C>
typename Op::State cut_and_merged(const Op& op, const std::vector<C>& x, int pieces, test::Random& random) {
  std::vector<int64_t> cuts = {0, int64_t(x.size())};
  for (int i = 1; i < pieces; ++i) cuts.push_back(random.below(int64_t(x.size()) + 1));
  std::sort(cuts.begin(), cuts.end());
  std::vector<typename Op::State> states(1);  // and one that saw nothing
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    states.push_back(taken_somehow(op, x.data() + cuts[i], cuts[i + 1] - cuts[i], random));
  }
  while (states.size() > 1) {
    const size_t a = size_t(random.below(int64_t(states.size())));
    std::swap(states[a], states.back());
    const auto last = states.back();
    states.pop_back();
    op.merge(states[size_t(random.below(int64_t(states.size())))], last);
  }
  return states[0];
}

template <class C>
test::Row<C> exact(const std::vector<C>& x) {
  test::Row<C> row;
  for (const C a : x) row.push_back(test::Real<C>(double(a)));
  return row;
}

// Rows of every kind, short and long, with many different cuts: f(row, state, pieces).
template <class C, class Op, class Check>
void for_cut_rows(const Op& op, bool holes, Check check) {
  test::Random random(7);
  test::RandomRows rows(8, holes);
  int64_t index = 0;
  for (const int64_t cols : {1, 2, 3, 5, 8, 31, 33, 100, 257, 1000}) {
    for (int round = 0; round < 12; ++round, ++index) {
      std::vector<C> x(size_t(cols), C(0));
      rows.row(index, cols, [&](int64_t c, double value) { x[size_t(c)] = C(value); });
      for (const int pieces : {1, 2, 5, 40}) check(x, cut_and_merged(op, x, pieces, random), pieces);
    }
  }
}

}  // namespace

// ---- softmax -------------------------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("a softmax state does not depend on how its row was cut", "", float, double) {
  using C = TestType;
  test::Tally t;
  for_cut_rows<C>(k::SoftmaxOp<C>{}, true, [&t](const std::vector<C>& x, const k::SoftmaxState<C>& s, int pieces) {
    double largest;
    const test::Real<C> want = test::log_sum_exp(exact(x), largest);
    t.expect(double(s.m) == largest, "%zu cols, %d pieces: m %g, want %g", x.size(), pieces, double(s.m), largest);
    if (largest == -HUGE_VAL) {
      t.expect(s.l == C(0) && s.empty(), "%zu cols, %d pieces: l %g of a row without scores", x.size(), pieces,
               double(s.l));
      return;
    }
    // Each merge multiplies by two rounded exponentials; a path through the tree has at most `pieces` of them.
    const double limit = want.e + 4 * test::unit<C> * pieces;
    const double got = std::log(double(s.l));
    t.expect(std::fabs(got - want.v) <= limit, "%zu cols, %d pieces: log l %.17g, want %.17g", x.size(), pieces, got,
             want.v);
    const double lse = double(s.logsumexp()), lse_want = largest + want.v;
    t.expect(std::fabs(lse - lse_want) <= limit + 2 * test::unit<C> * (std::fabs(want.v) + std::fabs(lse_want)),
             "%zu cols, %d pieces: logsumexp %.17g, want %.17g", x.size(), pieces, lse, lse_want);
  });
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("the empty softmax state is neutral", "", float, double) {
  using C = TestType;
  using State = k::SoftmaxState<C>;
  const k::SoftmaxOp<C> op;
  State empty, other;
  CHECK(typename k::SoftmaxOp<C>::State{}.empty());
  CHECK(empty.empty());
  CHECK(empty.logsumexp() == -kInf<C>);
  empty.merge(other);
  CHECK(empty.empty());
  CHECK(empty.m == -kInf<C>);
  CHECK(empty.l == C(0));

  for (const C value : {C(0), C(-1e30), C(1e30), C(60000), C(-60000), C(3.3)}) {
    State s = state_of(op, k::Pack<C, 2>{{value, value - C(1)}});
    const State before = s;
    s.merge(State{});
    CHECK(s.m == before.m);
    CHECK(s.l == before.l);
    State from_empty;
    from_empty.merge(before);
    CHECK(from_empty.m == before.m);
    CHECK(from_empty.l == before.l);
    const std::vector<C> hidden(8, -kInf<C>);
    take_all<4, 2>(op, s, hidden.data(), 8);
    CHECK(s.m == before.m);
    CHECK(s.l == before.l);
    s.merge(state_of(op, k::broadcast<8>(-kInf<C>)));
    CHECK(s.m == before.m);
    CHECK(s.l == before.l);
  }
}

TEMPLATE_TEST_CASE("softmax scores of -inf, +inf and NaN", "", float, double) {
  using C = TestType;
  using State = k::SoftmaxState<C>;
  const k::SoftmaxOp<C> softmax;
  const k::LogSoftmaxOp<C> log_softmax;

  const State hidden = state_of(softmax, k::broadcast<4>(-kInf<C>));
  CHECK(hidden.empty());
  CHECK(hidden.logsumexp() == -kInf<C>);
  CHECK(softmax.finish(hidden, k::Count<C>(4)).scale == C(0));
  CHECK(log_softmax.finish(hidden, k::Count<C>(4)).log_sum == C(0));

  // One bad score anywhere, then merged with good ones on either side: the row stays bad.
  test::Tally t;
  for (const C bad : {kInf<C>, kNaN<C>, -kNaN<C>}) {
    for (int at = 0; at < 8; ++at) {
      for (const C other : {C(1), -kInf<C>, C(-1e30)}) {
        auto x = k::broadcast<8>(other);
        x[at] = bad;
        const State s = state_of(softmax, x), good = state_of(softmax, k::broadcast<4>(C(5)));
        t.expect(s.l != s.l && !s.empty(), "%g at %d among %g: l %g", double(bad), at, double(other), double(s.l));
        State left = s, right = good;
        left.merge(good);
        right.merge(s);
        t.expect(left.l != left.l, "%g at %d: lost by a merge with good scores", double(bad), at);
        t.expect(right.l != right.l, "%g at %d: lost by a merge into good scores", double(bad), at);
        State with_empty;
        with_empty.merge(s);
        t.expect(with_empty.l != with_empty.l, "%g at %d: lost by a merge into nothing", double(bad), at);
        const C scale = softmax.finish(s, k::Count<C>(8)).scale;
        const C log_sum = log_softmax.finish(s, k::Count<C>(8)).log_sum;
        t.expect(scale != scale, "%g at %d: the scale is a number", double(bad), at);
        t.expect(log_sum != log_sum, "%g at %d: the log of the sum is a number", double(bad), at);
      }
    }
  }
  CHECK_TALLY(t);
}

// What is hidden has no reference of its own: it must not be scaled by its distance to the others.
TEST_CASE("a hidden part of a row whose scores are far from zero") {
  const k::SoftmaxOp<float> op;
  for (const float score : {-6e4f, -3e38f, 6e4f, 3e38f}) {
    const auto hidden = state_of(op, k::broadcast<4>(-kInf<float>));
    auto row = state_of(op, k::broadcast<4>(score));
    row.merge(hidden);
    const auto result = op.finish(row, k::Count<float>(8));
    CHECK(op.linear(hidden, result)(op.center(k::broadcast<4>(-kInf<float>), hidden))[3] == 0.f);
    CHECK(op.linear(row, result)(op.center(k::broadcast<4>(score), row))[3] == 0.25f);
  }
}

TEST_CASE("softmax states far apart: the small one vanishes, and nothing overflows") {
  const k::SoftmaxOp<float> op;
  const auto high = state_of(op, k::broadcast<2>(3e38f));
  auto low = state_of(op, k::broadcast<4>(-3e38f)), taken = low;
  low.merge(high);
  CHECK(low.m == 3e38f);
  CHECK(low.l == 2.f);
  const float scores[2] = {3e38f, 3e38f};
  op.take(taken, Packs<float, 2, 1>{scores});
  CHECK(taken.m == 3e38f);
  CHECK(taken.l == 2.f);
}

// ---- Welford -------------------------------------------------------------------------------------------------------

namespace {

template <class C>
struct Moments {
  double base, shift, m2, largest;  // the mean is base + shift; largest deviation
};

// Relative to one of the values: what they have in common would take digits from a long double, too.
template <class C>
Moments<C> moments(const std::vector<C>& x) {
  const long double base = x[0];
  long double sum = 0, m2 = 0, largest = 0;
  for (const C a : x) sum += a - base;
  const long double shift = sum / x.size();
  for (const C a : x) {
    const long double d = (a - base) - shift;
    m2 += d * d;
    largest = std::fmax(largest, std::fabs(d));
  }
  return {double(base), double(shift), double(m2), double(largest)};
}

// What a state's mean is off.
template <class C>
double mean_error(const k::WelfordState<C>& s, const Moments<C>& want) {
  return (double(s.origin) - want.base) + (double(s.offset) - want.shift);
}

template <class C>
void check_moments(test::Tally& t, const std::vector<C>& x, const k::WelfordState<C>& s, int pieces) {
  const Moments<C> want = moments(x);
  const double n = double(x.size());
  t.expect(s.n == C(n), "%zu cols, %d pieces: n is %g", x.size(), pieces, double(s.n));
  // origin + offset is the mean to within a few roundings of the offsets, which are no larger than the deviations; one
  // more rounding for each merge on the way.
  const double units = 16 + 4 * pieces;
  const double off = mean_error(s, want), mean_limit = units * test::unit<C> * 2 * want.largest;
  t.expect(std::fabs(off) <= mean_limit, "%zu cols, %d pieces: mean off by %g, not %g", x.size(), pieces, off,
           mean_limit);
  // Each square is off by two roundings and what the mean is off; the sum by its chain, and by the more the further the
  // origin is from the mean.
  const double limit =
      (64 + 4 * pieces) * test::unit<C> * want.m2 + std::pow(units * test::unit<C> * 2 * want.largest, 2) * n;
  t.expect(std::fabs(double(s.m2) - want.m2) <= limit, "%zu cols, %d pieces: m2 %.17g, want %.17g", x.size(), pieces,
           double(s.m2), want.m2);
}

template <class C>
k::LayerNormOp<C> layernorm_op() { return k::LayerNorm{}.eps(0).op<C>(); }

}  // namespace

TEMPLATE_TEST_CASE("a Welford state does not depend on how its row was cut", "", float, double) {
  using C = TestType;
  test::Tally t;
  for_cut_rows<C>(layernorm_op<C>(), false, [&t](const std::vector<C>& x, const k::WelfordState<C>& s, int pieces) {
    check_moments(t, x, s, pieces);
  });
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("Welford under a mean of 1e6 with a spread of 1e-3", "", float, double) {
  using C = TestType;
  test::Tally t;
  test::Random random(3);
  for (const double spread : {1e-3, 1.0}) {
    for (const int64_t cols : {2, 7, 100, 1000, 5000}) {
      std::vector<C> x(static_cast<size_t>(cols));
      for (C& a : x) a = C(1e6 + spread * random.normal());
      for (const int pieces : {1, 2, 5, 40})
        check_moments(t, x, cut_and_merged(layernorm_op<C>(), x, pieces, random), pieces);
    }
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("a constant row has m2 of 0 and its own mean, exactly", "", float, double) {
  using C = TestType;
  test::Tally t;
  test::Random random(4);
  for (const double value : {0.0, 1.0, 0.1, -3.3e-30, 1e6 + 1.0 / 3, -6e4, 3e38, 1e-45}) {
    for (const int64_t cols : {1, 2, 3, 7, 31, 100, 1001}) {
      const std::vector<C> x(static_cast<size_t>(cols), C(value));
      for (const int pieces : {1, 2, 5, 40}) {
        const auto s = cut_and_merged(layernorm_op<C>(), x, pieces, random);
        t.expect(s.m2 == C(0), "%g, %d cols, %d pieces: m2 %g", value, int(cols), pieces, double(s.m2));
        t.expect(s.mean() == C(value), "%g, %d cols, %d pieces: mean %g", value, int(cols), pieces, double(s.mean()));
      }
    }
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("the empty Welford state is neutral", "", float, double) {
  using C = TestType;
  using State = k::WelfordState<C>;
  const auto op = layernorm_op<C>();
  const C x[] = {C(1), C(2), C(4), C(8), C(16)};
  typename k::LayerNormOp<C>::State running;
  const State nothing = running;
  CHECK(nothing.n == C(0));
  CHECK(nothing.m2 == C(0));
  take_all<2, 2>(op, running, x, 5);
  State s = nothing;
  s.merge(running);
  CHECK(s.n == C(5));
  CHECK(double(s.mean()) == Approx(6.2));
  CHECK(double(s.m2) == Approx(148.8));

  const State before = s;
  for (const State& empty : {State{}, nothing}) {
    s.merge(empty);
    CHECK(s.mean() == before.mean());
    CHECK(s.m2 == before.m2);
    CHECK(s.n == before.n);
  }
  State from_empty;
  from_empty.merge(before);
  CHECK(from_empty.mean() == before.mean());
  CHECK(from_empty.m2 == before.m2);
  CHECK(from_empty.n == before.n);
  // An empty state may come with any origin.
  State odd;
  odd.origin = kNaN<C>;
  odd.offset = kInf<C>;
  from_empty.merge(odd);
  CHECK(from_empty.mean() == before.mean());
  CHECK(from_empty.m2 == before.m2);
  odd.merge(before);
  CHECK(odd.mean() == before.mean());
  CHECK(odd.m2 == before.m2);
  State both;
  both.merge(State{});
  CHECK(both.n == C(0));
  CHECK(both.m2 == C(0));
}

TEMPLATE_TEST_CASE("Welford shows NaN and infinity", "", float, double) {
  using C = TestType;
  test::Tally t;
  for (const C bad : {kNaN<C>, kInf<C>, -kInf<C>}) {
    for (int at = 0; at < 20; ++at) {
      std::vector<C> x(20, C(1));
      x[size_t(at)] = bad;
      test::Random random(static_cast<uint64_t>(at));
      for (const int pieces : {1, 3, 8}) {
        const auto s = cut_and_merged(layernorm_op<C>(), x, pieces, random);
        t.expect(s.m2 != s.m2, "%g at %d, %d pieces: m2 %g", double(bad), at, pieces, double(s.m2));
        t.expect(!std::isfinite(double(s.mean())), "%g at %d, %d pieces: mean %g", double(bad), at, pieces,
                 double(s.mean()));
      }
    }
  }
  CHECK_TALLY(t);
}

// ---- RMS -----------------------------------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("a sum of squares does not depend on how its row was cut", "", float, double) {
  using C = TestType;
  test::Tally t;
  const k::RmsNormOp<C> op = k::RmsNorm{}.eps(1e-5).op<C>();
  for_cut_rows<C>(op, false, [&](const std::vector<C>& x, const typename k::RmsNormOp<C>::State& s, int pieces) {
    test::Row<C> row = exact(x);
    const test::Real<C> want = test::rmsnorm(row, 1e-5);
    const double got = double(op.finish(s, k::Count<C>(int(x.size()))).rstd);
    const double limit = want.e + 4 * pieces * test::unit<C> * want.v;
    t.expect(std::fabs(got - want.v) <= limit, "%zu cols, %d pieces: rstd %.17g, want %.17g", x.size(), pieces, got,
             want.v);
  });
  CHECK_TALLY(t);

  typename k::RmsNormOp<C>::State s = state_of(op, k::broadcast<4>(C(3))), empty;
  CHECK(typename k::RmsNormOp<C>::State{}.squares == C(0));
  op.merge(s, empty);
  CHECK(s.squares == C(36));
  op.merge(empty, s);
  CHECK(empty.squares == C(36));
  const C bad[] = {C(0), kNaN<C>};
  op.take(s, Packs<C, 2, 1>{bad});
  CHECK(std::isnan(double(op.finish(s, k::Count<C>(6)).rstd)));
}

// ---- what a GPU thread does: many packs at a time, then the states of lanes -----------------------------------------

namespace {

// f(name, state) for all ways to take a row in.
template <class Op, class C, class F>
void each_taken(const Op& op, const std::vector<C>& x, F f) {
  const auto way = [&](const char* name, auto n, auto k) {
    typename Op::State running;
    take_all<decltype(n)::value, decltype(k)::value>(op, running, x.data(), int64_t(x.size()));
    const typename Op::State state = running;
    f(name, state);
  };
  using std::integral_constant;
  if (x.size() <= 32)
    way("1 x 1", integral_constant<int, 1>{}, integral_constant<int, 1>{});  // what is held in registers
  if (x.size() <= 1000)
    way("1 x 4", integral_constant<int, 1>{}, integral_constant<int, 4>{});  // or the chain would be too long
  way("1 x 16", integral_constant<int, 1>{}, integral_constant<int, 16>{});
  way("2 x 8", integral_constant<int, 2>{}, integral_constant<int, 8>{});
  way("4 x 4", integral_constant<int, 4>{}, integral_constant<int, 4>{});
  way("8 x 4", integral_constant<int, 8>{}, integral_constant<int, 4>{});
  way("16 x 2", integral_constant<int, 16>{}, integral_constant<int, 2>{});
  way("16 x 16", integral_constant<int, 16>{}, integral_constant<int, 16>{});  // more than a run at once
}

// Lanes in lockstep, one after the other: a lane stops at the first exchange to which not all have brought their values
// yet, and is started again when they have.
template <class Op>
class Lockstep {
  using State = typename Op::State;

 public:
  Lockstep(const Op& op, const std::vector<State>& states) : op_(op), states_(states) {}

  std::vector<State> run() {
    for (;;) {
      std::vector<State> results;
      brought_.clear();
      for (const State& state : states_) {
        at_ = 0;
        try {
          results.push_back(op_.gather(state, *this));
        } catch (const NotYet&) {
        }
      }
      if (results.size() == states_.size()) return results;
      REQUIRE((results.empty() && brought_.size() == states_.size()));
      known_.push_back(brought_);
    }
  }

  // What gather() asks for.
  template <class V>
  V sum(const V& mine) const {
    return over(mine, [](V a, V b) { return a + b; });
  }
  template <class V, int N>
  k::Pack<V, N> sum(const k::Pack<V, N>& mine) const {
    return k::transform(mine, [this](V x) { return sum(x); });
  }
  template <class V>
  V max(const V& mine) const {
    return over(mine, [](V a, V b) { return k::greater(a, b); });
  }
  template <class V>
  V first(const V& mine) const { return V(exchange(mine)[0]); }
  template <class C>
  k::Count<C> total(C mine) const {
    int n = 0;
    for (const long double count : exchange(mine)) n += int(count);
    return k::Count<C>(n);
  }

 private:
  struct NotYet {};

  const std::vector<long double>& exchange(long double mine) const {
    if (at_ < known_.size()) return known_[at_++];
    brought_.push_back(mine);
    throw NotYet{};
  }
  template <class V, class F>
  V over(V mine, F f) const {
    std::vector<long double> all = exchange(static_cast<long double>(mine));
    for (size_t distance = 1; distance < all.size();
         distance *= 2) {  // what lane 0 gets of a butterfly: the others get the same
      for (size_t i = 0; i < all.size(); i += 2 * distance) all[i] = f(V(all[i]), V(all[i + distance]));
    }
    return V(all[0]);
  }

  const Op& op_;
  const std::vector<State>& states_;
  std::vector<std::vector<long double>> known_;
  mutable std::vector<long double> brought_;
  mutable size_t at_ = 0;
};

// f(lanes, state) for rows that are dealt out to lanes, of which some may get nothing.
template <class Op, class C, class F>
void each_gathered(const Op& op, const std::vector<C>& x, F f) {
  for (const int lanes : {1, 2, 8, 32}) {
    for (const int64_t each : {(int64_t(x.size()) + lanes - 1) / lanes, int64_t(x.size())}) {
      std::vector<typename Op::State> states;
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t from = std::min(int64_t(x.size()), lane * each), to = std::min(int64_t(x.size()), from + each);
        states.emplace_back();
        take_all<4, 4>(op, states.back(), x.data() + from, to - from);
      }
      const auto agreed = [&](const std::vector<typename Op::State>& all) {
        for (const auto& state : all) CHECK(std::memcmp(&state, &all[0], sizeof(state)) == 0);
        f(lanes, all[0]);
      };
      agreed(Lockstep<Op>(op, states).run());
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("softmax states take in many packs at a time and are gathered over lanes", "", float, double) {
  using C = TestType;
  test::Tally t;
  const k::SoftmaxOp<C> op;
  test::RandomRows rows(21, /*holes*/ true);
  int64_t index = 0;
  for (const int64_t cols : {1, 5, 16, 33, 128, 257, 1000, 3000}) {
    for (int round = 0; round < 12; ++round, ++index) {
      std::vector<C> x(static_cast<size_t>(cols));
      rows.row(index, cols, [&](int64_t c, double value) { x[size_t(c)] = C(value); });
      double largest;
      const test::Real<C> want = test::log_sum_exp(exact(x), largest);
      const auto check = [&](const std::string& how, const k::SoftmaxState<C>& s) {
        t.expect(double(s.m) == largest, "%d cols, %s: m %g, want %g", int(cols), how.c_str(), double(s.m), largest);
        if (largest == -HUGE_VAL) {
          t.expect(s.empty(), "%d cols, %s: l %g of a row without scores", int(cols), how.c_str(), double(s.l));
          return;
        }
        // A running maximum is raised about log(cols) times, by two rounded exponentials each. Under a score far above
        // the others every addition of a chain, up to `cols` long, may lose up to a unit of it.
        const double limit = want.e + (32 + double(cols)) * test::unit<C>;
        const double got = std::log(double(s.l));
        t.expect(std::fabs(got - want.v) <= limit, "%d cols, %s: log l %.17g, want %.17g", int(cols), how.c_str(), got,
                 want.v);
      };
      each_taken(op, x, check);
      each_gathered(op, x, [&](int lanes, const auto& s) { check(std::to_string(lanes) + " lanes", s); });
    }
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("softmax states take in -inf, +inf and NaN", "", float, double) {
  using C = TestType;
  test::Tally t;
  const k::SoftmaxOp<C> op;
  for (const int cols : {1, 16, 40, 300}) {
    const std::vector<C> hidden(size_t(cols), -kInf<C>);
    const auto is_empty = [&](auto how, const k::SoftmaxState<C>& s) {
      t.expect(s.m == -kInf<C> && s.l == C(0) && s.empty(), "%d hidden scores: m %g, l %g", cols, double(s.m),
               double(s.l));
      (void)how;
    };
    each_taken(op, hidden, is_empty);
    each_gathered(op, hidden, is_empty);
    for (int at = 0; at < cols; at += 1 + cols / 20) {
      // One visible score among hidden ones, however far from 0.
      for (const C score : {C(0), C(-300), C(-3e38), C(3e38)}) {
        auto x = hidden;
        x[size_t(at)] = score;
        const auto is_one = [&](auto how, const k::SoftmaxState<C>& s) {
          t.expect(s.m == score && s.l == C(1), "%g at %d of %d: m %g, l %g", double(score), at, cols, double(s.m),
                   double(s.l));
          (void)how;
        };
        each_taken(op, x, is_one);
        each_gathered(op, x, is_one);
      }
      for (const C bad : {kNaN<C>, -kNaN<C>, kInf<C>}) {
        for (const C other : {-kInf<C>, C(2), C(-1e30)}) {
          std::vector<C> x(size_t(cols), other);
          x[size_t(at)] = bad;
          const auto is_bad = [&](auto how, const k::SoftmaxState<C>& s) {
            t.expect(s.l != s.l && !s.empty(), "%g at %d of %d, others %g: l %g", double(bad), at, cols, double(other),
                     double(s.l));
            (void)how;
          };
          each_taken(op, x, is_bad);
          each_gathered(op, x, is_bad);
        }
      }
    }
  }
  CHECK_TALLY(t);
}

namespace {

// All ways to take in a row and to gather it, against its moments. `units` as in the oracle's layernorm, of m2: what
// the sums and a far-out origin may cost.
template <class C>
void check_taken_moments(test::Tally& t, const std::vector<C>& x) {
  const Moments<C> want = moments(x);
  const auto op = layernorm_op<C>();
  const double n = double(x.size());
  const auto check = [&](const std::string& how, const k::WelfordState<C>& s) {
    t.expect(s.n == C(n), "%zu cols, %s: n is %g", x.size(), how.c_str(), double(s.n));
    const double off = mean_error(s, want), mean_limit = 16 * test::unit<C> * 2 * want.largest;
    t.expect(std::fabs(off) <= mean_limit, "%zu cols, %s: mean off by %g, not %g, largest %g", x.size(), how.c_str(),
             off, mean_limit, want.largest);
    const double limit = 128 * test::unit<C> * want.m2;
    t.expect(std::fabs(double(s.m2) - want.m2) <= limit, "%zu cols, %s: m2 %.17g, want %.17g, off by %.0f units",
             x.size(), how.c_str(), double(s.m2), want.m2, std::fabs(double(s.m2) - want.m2) / want.m2 / test::unit<C>);
  };
  each_taken(op, x, check);
  each_gathered(op, x, [&](int lanes, const auto& s) { check(std::to_string(lanes) + " lanes", s); });
}

constexpr int64_t kTakenCols[] = {1, 2, 16, 33, 127, 128, 129, 256, 1000, 5000};

}  // namespace

TEMPLATE_TEST_CASE("Welford states take in many packs at a time and are gathered over lanes", "", float, double) {
  using C = TestType;
  test::Tally t;
  test::RandomRows rows(22, /*holes*/ false);
  int64_t index = 0;
  for (const int64_t cols : kTakenCols) {
    for (int round = 0; round < 10; ++round, ++index) {
      std::vector<C> x(static_cast<size_t>(cols));
      rows.row(index, cols, [&](int64_t c, double value) { x[size_t(c)] = C(value); });
      check_taken_moments(t, x);
    }
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("Welford states taken in under a mean of 1e6 with a spread of 1e-3", "", float, double) {
  using C = TestType;
  test::Tally t;
  test::Random random(23);
  for (const double spread : {1e-3, 1.0}) {
    for (const int64_t cols : kTakenCols) {
      std::vector<C> x(static_cast<size_t>(cols));
      for (C& a : x) a = C(1e6 + spread * random.normal());
      check_taken_moments(t, x);
    }
  }
  CHECK_TALLY(t);
}

// The first value of all is what deviations are taken from at first.
TEMPLATE_TEST_CASE("Welford states taken in after an outlier", "", float, double) {
  using C = TestType;
  test::Tally t;
  test::Random random(24);
  for (const double outlier : {3.0, 10.0, -100.0, 1e4, 1e9}) {
    for (const int64_t cols : {16, 64, 128, 500, 5000}) {
      for (int round = 0; round < 5; ++round) {
        std::vector<C> x(static_cast<size_t>(cols));
        for (C& a : x) a = C(random.normal());
        x[0] = C(outlier * random.uniform(1, 2));
        check_taken_moments(t, x);
      }
    }
  }
  CHECK_TALLY(t);
}

namespace {

// A row as a GPU takes it in: blocks side by side, in them warps, whose lanes take packs of N in turn, K at a time.
struct Team {
  int blocks, warps;
  bool held;  // in registers: whatever a lane has at once
  int lanes = 32;
};
template <class Op, class C>
typename Op::State gathered(const Op& op, const std::vector<typename Op::State>& states) {
  return Lockstep<Op>(op, states).run()[0];
}
int64_t share(int64_t of, int64_t parts, int64_t unit) { return (of + parts * unit - 1) / (parts * unit) * unit; }
template <int N, int K, class Op, class C>
typename Op::State taken_by(const Team& team, const Op& op, const std::vector<C>& x) {
  const int64_t cols = int64_t(x.size()), stride = team.lanes * N;
  const int64_t width = share(cols, team.blocks, 16), warp_width = share(width, team.warps, stride);
  std::vector<typename Op::State> blocks;
  for (int64_t block = 0; block < cols; block += width) {
    std::vector<typename Op::State> warps;
    const int64_t block_end = std::min(cols, block + width);
    for (int64_t warp = block; warp < block_end; warp += warp_width) {
      const int64_t end = std::min(block_end, warp + warp_width);
      std::vector<typename Op::State> lanes(static_cast<size_t>(team.lanes));
      for (int64_t lane = 0; lane < team.lanes; ++lane) {
        int64_t col = warp + lane * N;
        const auto step = [&](auto k) {
          constexpr int kPacks = decltype(k)::value;
          for (; col + (kPacks - 1) * stride < end; col += kPacks * stride) {
            op.take(lanes[size_t(lane)], Packs<C, N, kPacks>{x.data() + col, stride});
          }
        };
        const int have = col >= end ? 0 : int((end - col + stride - 1) / stride);
        if (team.held) {
          REQUIRE(have <= K);
          op.take(lanes[size_t(lane)], Packs<C, N, K>{x.data() + col, stride, have});
        } else {
          step(std::integral_constant<int, K>{});
          step(std::integral_constant<int, (K > 4 ? K / 2 : K)>{});
          step(std::integral_constant<int, (K > 2 ? K / 4 : 1)>{});
          step(std::integral_constant<int, 1>{});
        }
      }
      warps.push_back(gathered<Op, C>(op, lanes));
    }
    warps.resize(warps.size() > 4 ? 32 : 4);
    blocks.push_back(gathered<Op, C>(op, warps));
  }
  blocks.resize(blocks.size() > 4 ? 32 : 4);
  return team.blocks == 1 ? blocks[0] : gathered<Op, C>(op, blocks);
}

void compare_with_two_passes(test::Tally& t, const char* what, const std::vector<float>& x,
                             const test::NormErrors& theirs, const k::WelfordState<float>& s) {
  const auto op = k::LayerNorm{}.eps(1e-5).op<float>();
  const auto result = op.finish(s, k::Count<float>(int(x.size())));
  const auto linear = op.linear(s, result);
  const auto y = [&](size_t i) { return double(linear(op.center(k::Pack<float, 1>{{x[i]}}, s))[0]); };
  const auto ours = test::norm_errors(x, 1e-5, y, double(result.rstd));
  t.expect(ours.within_four_of(theirs),
           "%s, %zu columns: rstd off by %.1f units, in two passes %.1f; values by %.1f and %.1f", what, x.size(),
           ours.rstd, theirs.rstd, ours.values, theirs.values);
}

}  // namespace

TEST_CASE("layernorm is as good as in two passes, to a factor of 4, wherever outliers lie") {
  test::Tally t;
  test::Random random(31);
  const auto op = layernorm_op<float>();
  const auto each = [&](int64_t cols, auto check) {
    for (const double outlier : test::kOutliers) {
      test::each_place_of_outliers(cols, [&](auto is_outlier) {
        std::vector<float> x;
        for (int64_t c = 0; c < cols; ++c) x.push_back(float(test::with_outliers(random, c, outlier, is_outlier)));
        check(x, test::two_pass_errors(x, 1e-5));
      });
    }
  };
  for (int64_t cols = 1; cols <= 129; ++cols) {
    const int lanes = cols <= 16 ? 1 : cols <= 32 ? 2 : cols <= 64 ? 4 : cols <= 128 ? 8 : 16;
    each(cols, [&](const auto& x, const auto& theirs) {
      compare_with_two_passes(t, "held, 1 x 16", x, theirs, taken_by<1, 16>(Team{1, 1, true, lanes}, op, x));
    });
  }
  for (const int64_t cols : {256, 1000, 4096, 16384, 65536}) {
    const int warps = int(std::min<int64_t>(32, share(cols, 1, 1024) / 1024));
    each(cols, [&](const auto& x, const auto& theirs) {
      compare_with_two_passes(t, "streamed, 8 x 4", x, theirs, taken_by<8, 4>(Team{1, warps, false}, op, x));
      compare_with_two_passes(t, "streamed, 4 x 8", x, theirs, taken_by<4, 8>(Team{8, 8, false}, op, x));
      compare_with_two_passes(t, "streamed, 1 x 8", x, theirs, taken_by<1, 8>(Team{1, 16, false}, op, x));
      if (cols <= 16384) compare_with_two_passes(t, "held, 4 x 4", x, theirs, taken_by<4, 4>(Team{2, 16, true}, op, x));
    });
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("equal values are taken in as m2 of 0 and their own mean, exactly", "", float, double) {
  using C = TestType;
  test::Tally t;
  for (const double value : {0.0, 1.0, 0.1, -3.3e-30, 1e6 + 1.0 / 3, -6e4, 3e38, 1e-45}) {
    for (const int64_t cols : kTakenCols) {
      const std::vector<C> x(static_cast<size_t>(cols), C(value));
      const auto check = [&](auto how, const k::WelfordState<C>& s) {
        t.expect(s.m2 == C(0), "%g, %d cols: m2 %g", value, int(cols), double(s.m2));
        t.expect(s.mean() == C(value) && s.n == C(cols), "%g, %d cols: mean %g of %g", value, int(cols),
                 double(s.mean()), double(s.n));
        (void)how;
      };
      each_taken(layernorm_op<C>(), x, check);
      each_gathered(layernorm_op<C>(), x, check);
    }
  }
  CHECK_TALLY(t);
}

TEMPLATE_TEST_CASE("Welford states take in NaN and infinity, and nothing at all", "", float, double) {
  using C = TestType;
  test::Tally t;
  const auto op = layernorm_op<C>();
  for (const C bad : {kNaN<C>, kInf<C>, -kInf<C>}) {
    for (const int cols : {1, 20, 128, 300}) {
      for (int at = 0; at < cols; at += 1 + cols / 20) {
        std::vector<C> x(size_t(cols), C(1));
        x[size_t(at)] = bad;
        const auto check = [&](auto how, const k::WelfordState<C>& s) {
          t.expect(s.m2 != s.m2, "%g at %d of %d: m2 %g", double(bad), at, cols, double(s.m2));
          t.expect(!std::isfinite(double(s.mean())), "%g at %d of %d: mean %g", double(bad), at, cols,
                   double(s.mean()));
          (void)how;
        };
        each_taken(op, x, check);
        each_gathered(op, x, check);
      }
    }
  }
  CHECK_TALLY(t);
  const auto nothing = typename k::LayerNormOp<C>::State{};
  CHECK(nothing.n == C(0));
  CHECK(nothing.m2 == C(0));
}

TEMPLATE_TEST_CASE("sums of squares take in many packs at a time and are gathered over lanes", "", float, double) {
  using C = TestType;
  test::Tally t;
  const k::RmsNormOp<C> op = k::RmsNorm{}.eps(1e-5).op<C>();
  test::RandomRows rows(25, /*holes*/ false);
  int64_t index = 0;
  for (const int64_t cols : kTakenCols) {
    for (int round = 0; round < 10; ++round, ++index) {
      std::vector<C> x(static_cast<size_t>(cols));
      rows.row(index, cols, [&](int64_t c, double value) { x[size_t(c)] = C(value); });
      test::Row<C> row = exact(x);
      const test::Real<C> want = test::rmsnorm(row, 1e-5);
      const auto check = [&](auto how, const typename k::RmsNormOp<C>::State& s) {
        const double got = double(op.finish(s, k::Count<C>(int(cols))).rstd);
        const double limit = want.e + std::sqrt(double(cols)) * test::unit<C> * want.v;  // chains are up to `cols` long
        t.expect(std::fabs(got - want.v) <= limit, "%d cols: rstd %.17g, want %.17g", int(cols), got, want.v);
        (void)how;
      };
      each_taken(op, x, check);
      each_gathered(op, x, check);
    }
  }
  CHECK_TALLY(t);
}

// ---- the ops over a state ------------------------------------------------------------------------------------------

namespace {

// With anything behind x.
template <class C>
k::Pack<C, 32> in_a_pack(const std::vector<C>& x) {
  auto pack = k::broadcast<32>(C(0));
  for (size_t i = 0; i < x.size(); ++i) pack[int(i)] = x[i];
  return pack;
}

// All ways to a row's values against the oracle: centered on the state of the whole row or of a part, or on what a
// thread has taken in of it.
template <class C, class Op, class Oracle>
void check_op(const char* name, const Op& op, bool holes, Oracle oracle) {
  test::Tally t;
  test::Random random(11);
  test::RandomRows rows(12, holes);
  for (int64_t index = 0; index < 300; ++index) {
    const int cols = 1 + int(index % 32);
    std::vector<C> x(static_cast<size_t>(cols));
    rows.row(index, cols, [&](int64_t c, double value) { x[size_t(c)] = C(value); });
    test::Row<C> want = exact(x);
    oracle(want);
    const auto check = [&](const char* way, const k::Pack<C, 32>& got, int from, int to) {
      for (int c = from; c < to; ++c) {
        t.expect(test::within(got[c], want[size_t(c)]), "%s %s, %d cols, col %d: got %.9g, want %.9g +- %g", name, way,
                 cols, c, double(got[c]), want[size_t(c)].v, want[size_t(c)].e);
      }
    };
    const auto pack = in_a_pack(x);
    const auto whole = cut_and_merged(op, x, 4, random);
    const auto result = op.finish(whole, k::Count<C>(cols));
    check("merged", op.linear(whole, result)(op.center(pack, whole)), 0, cols);

    // Each part centered on its own state, and finished with the whole row's.
    const int middle = int(random.below(cols + 1));
    const std::vector<C> front(x.begin(), x.begin() + middle), back(x.begin() + middle, x.end());
    const auto front_state = cut_and_merged(op, front, 1, random), back_state = cut_and_merged(op, back, 1, random);
    check("front", op.linear(front_state, result)(op.center(pack, front_state)), 0, middle);
    check("back", op.linear(back_state, result)(op.center(pack, back_state)), middle, cols);

    // Each thread's part centered on what it has taken in itself, alone or beside another one.
    const auto alone = taken_somehow(op, x.data(), cols, random);
    const auto own = op.finish(alone, k::Count<C>(cols));
    check("alone", op.linear(alone, own)(op.center(pack, alone)), 0, cols);
    const auto left = taken_somehow(op, x.data(), middle, random);
    const auto right = taken_somehow(op, x.data() + middle, cols - middle, random);
    auto both = left;
    op.merge(both, right);
    const auto joined = op.finish(both, k::Count<C>(cols));
    check("left", op.linear(left, joined)(op.center(pack, left)), 0, middle);
    check("right", op.linear(right, joined)(op.center(pack, right)), middle, cols);
  }
  CHECK_TALLY(t);
}

}  // namespace

TEMPLATE_TEST_CASE("the row ops against the oracle", "", float, double) {
  using C = TestType;
  check_op<C>("softmax", k::SoftmaxOp<C>{}, true, [](test::Row<C>& row) { test::softmax(row); });
  check_op<C>("log_softmax", k::LogSoftmaxOp<C>{}, true, [](test::Row<C>& row) { test::log_softmax(row); });
  check_op<C>("layernorm", k::LayerNorm{}.eps(1e-5).op<C>(), false,
              [](test::Row<C>& row) { test::layernorm(row, 1e-5); });
  check_op<C>("rmsnorm", k::RmsNorm{}.eps(1e-5).op<C>(), false, [](test::Row<C>& row) { test::rmsnorm(row, 1e-5); });
}

TEST_CASE("options refuse a negative eps and NaN") {
  CHECK(k::LayerNorm{}.check().ok());
  CHECK(k::LayerNorm{}.eps(0).check().ok());
  CHECK(k::LayerNorm{}.eps(-1e-5).check().code() == k::Code::invalid);
  CHECK(k::LayerNorm{}.eps(kNaN<double>).check().code() == k::Code::invalid);
  CHECK(k::RmsNorm{}.check().ok());
  CHECK(k::RmsNorm{}.eps(0).check().ok());
  CHECK(k::RmsNorm{}.eps(-1).check().code() == k::Code::invalid);
  CHECK(k::RmsNorm{}.eps(kNaN<double>).check().code() == k::Code::invalid);
  CHECK(k::Softmax{}.check().ok());
  CHECK(k::LogSoftmax{}.check().ok());
}

TEST_CASE("per-row outputs go where they were asked to, as float or double") {
  float mean = 0, rstd = 0;
  double mean2 = 0, rstd2 = 0;
  const auto op = k::LayerNorm{}.mean(&mean).rstd(&rstd).op<float>();
  op.write_row({2.5f, 0.f, 0.25f}, 0);
  CHECK(mean == 2.5f);
  CHECK(rstd == 0.25f);
  const auto op2 = k::LayerNorm{}.mean(&mean2).rstd(&rstd2).op<double>();
  op2.write_row({0.1, 0., 0.7}, 0);
  CHECK(mean2 == 0.1);
  CHECK(rstd2 == 0.7);
  k::RmsNorm{}.rstd(&rstd).op<double>().write_row({0.125}, 0);
  CHECK(rstd == 0.125f);
  k::LayerNorm{}.op<float>().write_row({1.f, 0.f, 1.f}, 0);  // nothing asked for: nothing written
}
