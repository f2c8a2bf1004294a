// WelfordState: mergeable mean and sum of squared deviations, joined by Chan's form of Welford's recurrence.
//
// The mean is kept as origin + offset. The origin is a value of the row or a mean of some: deviations are taken from it
// first, so values that share a large common part (mean 1e6, spread 1e-3) lose nothing, and a constant row has variance
// 0 exactly. Before anything is added the origin moves to the mean of what is there: an outlier among the first values
// of a row then costs no digits of what follows, and the result is as good as if the row were read twice. The empty
// state is neutral.
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
    // An empty side has an arbitrary origin, which must not count.
    const C base = n > C(0) ? mean() : other.origin;
    const C mine = n > C(0) ? offset_from(base) : other.offset;
    const C delta = other.n > C(0) ? (other.origin - base) + (other.offset - mine) : C(0);
    join(base, mine, delta, other.n, other.m2);
  }

  // Takes in a few packs (row_op.h). Around a poor origin squares and what is taken out of them are large. That of the
  // very first packs is the mean of a quarter of their values: however far out some of these lie, that costs a factor
  // of 5 at most.
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

  // The states of all lanes in one.
  template <class Lanes>
  static KERNELS_HD WelfordState gather(const WelfordState& s, const Lanes& lanes) {
    // The first lane's origin may be a poor one: it serves to find the mean, from which then all others are taken. A
    // lane without values has weight 0.
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

  // The mean seen from elsewhere. Near the mean, this is exact but for the rounding of what is left.
  KERNELS_HD C offset_from(C base) const { return (origin - base) + offset; }
  KERNELS_HD C mean_from(C base) const { return n > C(0) ? offset_from(base) : C(0); }

  // With `count` values whose mean lies `delta` from base + mine, where this state's own is.
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
