// WelfordState: a mergeable mean and sum of squared deviations, by Chan's form of Welford's recurrence.
//
// The mean is kept as origin + offset. The origin is a value of the row, or a mean of some values, and deviations are
// taken from it first. So values with a large common part (mean 1e6, spread 1e-3) lose no precision, and a constant row
// has variance exactly 0. Before values are added, the origin moves to the mean so far: an outlier among the first
// values then costs no precision later, and the result is as good as that of two passes. The empty state is neutral.
#pragma once

#include "math.h"

KERNELS_BEGIN

// The number of values and its reciprocal (0 for none): one division serves all rows.
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
    // An empty side has an arbitrary origin, which must not count.
    const C base = n > C(0) ? mean() : other.origin;
    const C mine = n > C(0) ? offset_from(base) : other.offset;
    const C delta = other.n > C(0) ? (other.origin - base) + (other.offset - mine) : C(0);
    join(base, mine, delta, other.n, other.m2);
  }

  // Takes a few packs (row_op.h). Around a poor origin, squares and the terms subtracted from them are large. The
  // origin for the very first packs is the mean of a quarter of their values: outliers among them cost a factor of 5 at
  // most.
  template <class Packs>
  KERNELS_HD void take(const Packs& packs) {
    const C typical = packs.typical();  // a branch would cost more
    const C from = n > C(0) ? mean() : typical;
    const C mine = n > C(0) ? offset_from(from) : C(0);
    const auto sums = packs.fold(Pack<C, 2>{{C(0), C(0)}}, [from](const Pack<C, 2>& so_far, const auto& x) {
      const auto d = x - from;
      return Pack<C, 2>{{so_far.v[0] + sum(d), so_far.v[1] + dot(d, d)}};
    });
    const Count<C> count = packs.count();
    const C theirs = sums.v[0] * count.inverse;
    join(from, mine, theirs - mine, count.n, not_negative(sums.v[1] - sums.v[0] * theirs));
  }

  // Combines the states of all lanes.
  template <class Lanes>
  static KERNELS_HD WelfordState gather(const WelfordState& s, const Lanes& lanes) {
    // The first lane's origin may be poor: it only serves to compute the mean, from which all deviations are then
    // taken. A lane without values has weight 0.
    const auto total = lanes.total(s.n);
    const C base = lanes.first(s.origin);
    WelfordState all;
    all.origin = base + lanes.sum(s.n * s.mean_from(base)) * total.inverse;
    all.n = total.n;
    const C delta = s.mean_from(all.origin), weighted = s.n * delta;
    const auto sums = lanes.sum(Pack<C, 2>{{weighted, s.m2 + weighted * delta}});
    all.offset = sums.v[0] * total.inverse;
    all.m2 = not_negative(sums.v[1] - sums.v[0] * all.offset);
    return all;
  }

 private:
  static KERNELS_HD C not_negative(C x) { return x < C(0) ? C(0) : x; }

  // The mean relative to `base`. Near the mean this is exact except for the rounding of the small remainder.
  KERNELS_HD C offset_from(C base) const { return (origin - base) + offset; }
  KERNELS_HD C mean_from(C base) const { return n > C(0) ? offset_from(base) : C(0); }

  // Adds `count` values with sum of squared deviations their_m2, whose mean is `delta` from base + mine, this state's
  // mean.
  KERNELS_HD void join(C base, C mine, C delta, C count, C their_m2) {
    const C total = n + count;
    const C weight = n > C(0) ? divide(count, total) : C(1);
    origin = base;
    offset = mine + delta * weight;
    m2 = m2 + their_m2 + delta * delta * (n * weight);
    n = total;
  }
};

KERNELS_END
