// WelfordState: mergeable mean and sum of squared deviations (Chan's formula over packs).
//
// The mean is kept as origin + offset, where origin is one of the row's own values: deviations are taken from it first,
// so values that share a large common part (mean 1e6, spread 1e-3) lose nothing, and a constant row has variance 0
// exactly. The empty state is neutral.
#pragma once

#include "math.h"

KERNELS_BEGIN

template <class C>
struct WelfordState {
  C origin = C(0);
  C offset = C(0);
  C m2 = C(0);
  C n = C(0);

  KERNELS_HD C mean() const { return origin + offset; }

  // Takes in the first `valid` values of a pack; what stands behind them is passed over.
  template <int N>
  KERNELS_HD void accumulate(const Pack<C, N>& x, int valid = N) {
    WelfordState part;
    part.origin = x.v[0];
    part.n = static_cast<C>(valid);
    Pack<C, N> d;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) d.v[i] = i < valid ? x.v[i] - part.origin : C(0);
    part.offset = valid == N ? sum(d) * C(1.0 / N) : divide(sum(d), greater(part.n, C(1)));
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) d.v[i] = i < valid ? d.v[i] - part.offset : C(0);
    part.m2 = dot(d, d);
    merge(part);
  }

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
};

KERNELS_END
