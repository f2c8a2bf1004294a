// SoftmaxState: the mergeable state of an online softmax. m is the largest score so far, l the sum of exp(score - m).
//
// merge() is associative and commutative up to rounding, and the empty state is its neutral element, so a row may be
// cut into any pieces. A row without any visible score has m = -inf, l = 0: its probabilities are 0 and its logsumexp
// is -inf. A NaN, or a +inf, makes l NaN and with it the whole row.
#pragma once

#include "math.h"

KERNELS_BEGIN

template <class C>
struct SoftmaxState {
  C m = -infinity<C>();
  C l = C(0);

  // What to subtract from scores: m, or 0 while nothing is visible (-inf - -inf would be NaN).
  KERNELS_HD C reference() const { return m == -infinity<C>() ? C(0) : m; }
  KERNELS_HD bool empty() const { return m == -infinity<C>() && l == C(0); }
  KERNELS_HD C logsumexp() const { return m + log(l); }

  KERNELS_HD void merge(const SoftmaxState& other) {
    SoftmaxState both;
    both.m = greater(m, other.m);
    const C reference = both.reference();
    both.l = l * exp(m - reference) + other.l * exp(other.m - reference);
    *this = both;
  }

  // Takes in packs that can be looked at twice: first the largest score, then the sum under it.
  template <class Packs>
  KERNELS_HD void take(const Packs& packs) {
    SoftmaxState both;
    both.m = packs.fold(m, [](C so_far, const auto& x) { return greater(so_far, max_of(x)); });
    const C reference = both.reference();
    const C more = packs.fold(C(0), [reference](C so_far, const auto& x) { return so_far + sum(exp_minus(x, reference)); });
    both.l = l * exp(m - reference) + more;
    *this = both;
  }

  // The states of all lanes in one.
  template <class Lanes>
  static KERNELS_HD SoftmaxState gather(const SoftmaxState& s, const Lanes& lanes) {
    SoftmaxState all;
    all.m = lanes.max(s.m);
    all.l = lanes.sum(s.l * exp(s.m - all.reference()));
    return all;
  }
};

KERNELS_END
