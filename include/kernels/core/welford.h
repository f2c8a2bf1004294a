// WelfordState: mergeable mean and sum of squared deviations, joined by Chan's form of Welford's recurrence.
//
// The mean is kept as origin + offset, where origin is the mean of a few of the row's own values: deviations are taken
// from it first, so values that share a large common part (mean 1e6, spread 1e-3) lose nothing, and a constant row has
// variance 0 exactly. The empty state is neutral.
#pragma once

#include "math.h"

KERNELS_BEGIN

// How many values, and one over it (0 for none), for a division that is made once and used for every row.
template <class C>
struct Count {
  C n, inverse;
  KERNELS_HD constexpr Count(C count, C one_over) : n(count), inverse(one_over) {}
  KERNELS_HD explicit Count(int count) : n(static_cast<C>(count)), inverse(count > 0 ? divide(C(1), n) : C(0)) {}
};

template <class C>
struct WelfordState {
  C origin = C(0);
  C offset = C(0);
  C m2 = C(0);
  C n = C(0);

  KERNELS_HD C mean() const { return origin + offset; }

  KERNELS_HD void merge(const WelfordState& other) {
    const C total = n + other.n;
    const C weight = total > C(0) ? divide(other.n, total) : C(0);
    // An empty side has an arbitrary origin, which must not count.
    const C base = n > C(0) ? origin : other.origin;
    const C mine = n > C(0) ? offset : other.offset;
    const C delta = other.n > C(0) ? (other.origin - base) + (other.offset - mine) : C(0);
    origin = base;
    offset = mine + delta * weight;
    m2 = m2 + other.m2 + delta * delta * (n * weight);
    n = total;
  }

  // The states of all lanes in one.
  template <class Lanes>
  static KERNELS_HD WelfordState gather(const WelfordState& s, const Lanes& lanes) {
    // Every mean is taken relative to the first lane's origin; a lane without values has weight 0.
    const auto total = lanes.total(s.n);
    WelfordState all;
    all.origin = lanes.first(s.origin);
    all.n = total.n;
    const C delta = s.n > C(0) ? (s.origin - all.origin) + s.offset : C(0);
    all.offset = lanes.sum(s.n * delta) * total.inverse;
    const C off = delta - all.offset;
    all.m2 = lanes.sum(s.m2 + s.n * (off * off));
    return all;
  }
};

// What one thread has seen of a row: sums of deviations from an origin and of their squares, with no division on the way.
// The origin is the mean of the first few values: even a huge outlier among them lies within a few of its own sizes of it.
// After every kRun values a new origin is taken and the old sums become a state.
template <class C>
struct WelfordRun {
  static constexpr int kRun = 128;

  WelfordState<C> before;
  C origin = C(0), total = C(0), squares = C(0);
  int count = 0;

  template <class Packs>
  KERNELS_HD void take(const Packs& packs) {
    if (count + Packs::most > kRun) *this = WelfordRun{state()};
    const C typical = packs.typical();  // a branch would cost more
    origin = count == 0 ? typical : origin;
    const C from = origin;
    const auto sums = packs.fold(Pack<C, 2>{{C(0), C(0)}}, [from](const Pack<C, 2>& so_far, const auto& x) {
      const auto d = x - from;
      return Pack<C, 2>{{so_far.v[0] + sum(d), so_far.v[1] + dot(d, d)}};
    });
    total = total + sums.v[0];
    squares = squares + sums.v[1];
    count += packs.count();
  }

  KERNELS_HD WelfordState<C> state() const {
    WelfordState<C> s;
    s.origin = origin;
    s.n = static_cast<C>(count);
    s.offset = divide(total, greater(s.n, C(1)));
    s.m2 = squares - total * s.offset;
    s.m2 = s.m2 < C(0) ? C(0) : s.m2;
    if (before.n > C(0)) s.merge(before);
    return s;
  }

  // The states of all lanes in one, when none has seen more than kRun values: without a division for each.
  template <class Lanes>
  KERNELS_HD WelfordState<C> gather(const Lanes& lanes) const {
    const C n = static_cast<C>(count);
    const auto all_values = lanes.total(n);
    WelfordState<C> all;
    all.origin = lanes.first(origin);
    all.n = all_values.n;
    const C delta = count > 0 ? origin - all.origin : C(0);
    all.offset = lanes.sum(fma(n, delta, total)) * all_values.inverse;
    const C off = all.offset - delta;  // of the mean from this lane's origin
    all.m2 = lanes.sum(fma(fma(n, off, C(-2) * total), off, squares));
    all.m2 = all.m2 < C(0) ? C(0) : all.m2;
    return all;
  }
};

KERNELS_END
