// SoftmaxState: the mergeable state of an online softmax. m is the largest score so far, l the sum of exp(score - m).
// AttentionState adds o, the sum of exp(score - m) * value, so that attention is o / l. docs/attention.md derives both.
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

  // What to subtract from scores: m, or 0 if no score is visible (-inf - -inf would be NaN).
  KERNELS_HD C reference() const { return m == -infinity<C>() ? C(0) : m; }
  KERNELS_HD bool empty() const { return m == -infinity<C>() && l == C(0); }
  KERNELS_HD C logsumexp() const { return m + log(l); }

  // 1 / l, the factor that normalizes sums weighted with exp(score - m); 0 if no score is visible.
  KERNELS_HD C inverse() const { return empty() ? C(0) : divide(C(1), l); }

  // Raises m to this score if it is larger. Sums made under the old m must be multiplied by the returned factor.
  KERNELS_HD C raise(C score) {
    const C before = m;
    m = greater(m, score);
    const C factor = exp(before - reference());
    l = l * factor;
    return factor;
  }

  // The factors by which sums under either m must be multiplied.
  struct Factors {
    C mine, other;
  };
  KERNELS_HD Factors merge(const SoftmaxState& other) {
    Factors factors;
    factors.mine = raise(other.m);
    factors.other = exp(other.m - reference());
    l = l + other.l * factors.other;
    return factors;
  }

  // Takes packs that can be read twice: first for the largest score, then for the sum.
  template <class Packs>
  KERNELS_HD void take(const Packs& packs) {
    raise(packs.fold(m, [](C so_far, const auto& x) { return greater(so_far, max_of(x)); }));
    const C from = reference();
    l = l + packs.fold(C(0), [from](C so_far, const auto& x) { return so_far + sum(exp_minus(x, from)); });
  }

  // Combines the states of all lanes.
  template <class Lanes>
  static KERNELS_HD SoftmaxState gather(const SoftmaxState& s, const Lanes& lanes) {
    SoftmaxState all;
    all.m = (lanes.max)(s.m);
    all.l = lanes.sum(s.l * exp(s.m - all.reference()));
    return all;
  }
};

// For code that keeps m and l elsewhere, in any base.
template <class C>
KERNELS_HD C softmax_reference(C m) { return SoftmaxState<C>{m, C(0)}.reference(); }

// The same with N columns of values. Engines that keep o elsewhere (in the registers of many threads, in a tile) hold a
// SoftmaxState and apply its factors to o themselves; this struct defines what they compute.
template <class C, int N>
struct AttentionState : SoftmaxState<C> {
  Pack<C, N> o = broadcast<N>(C(0));

  AttentionState() = default;
  // The state that stands for a finished part of the keys: its output and logsumexp.
  KERNELS_HD AttentionState(C logsumexp, const Pack<C, N>& output)
      : SoftmaxState<C>{logsumexp, logsumexp == -infinity<C>() ? C(0) : C(1)}, o(output) {}

  // Adds one key.
  KERNELS_HD void take(C score, const Pack<C, N>& value) {
    const C factor = this->raise(score), p = exp(score - this->reference());
    this->l = this->l + p;
    o = o * factor + value * p;
  }
  KERNELS_HD void merge(const AttentionState& other) {
    const auto factors = SoftmaxState<C>::merge(other);
    o = o * factors.mine + other.o * factors.other;
  }
  KERNELS_HD Pack<C, N> output() const { return o * this->inverse(); }
};

KERNELS_END
