// The row ops: what is computed, apart from where a row lives and how it is read and written. GPU and CPU engines
// drive these same structs.
//
// A RowOp<C> (C: float or double) reduces a row to a State and then maps every element:
//
//   State                                default-constructed: nothing seen yet
//   long_walks                           tuning: a GPU block should stay for several rows
//   padding()                            a value that does not change a state, for the end of a partly filled pack
//   accumulate(State&, Pack, valid)      takes in the first `valid` values of a pack, with padding behind them; any N
//   merge(State& into, State from)       any order, any split of the row
//   Result finish(State, Count)          once per row, with the number of columns
//   write_row(Result, row)               once per row, by one thread: per-row outputs
//
//   Pack center(Pack x, State)           x relative to a state: the row's, or that of the part of the row it is in
//   Linear linear(State, Result)         what is left to do to a centered value: value * a + b
//
//   State absorb(Pack& x, valid)         accumulate for the first pack of all, which leaves x centered on the state
//   State scan(packs)                    the state of the packs that packs.each(f(col, pack)) shows, looked at as often as
//                                        needed; packs.first() is one of their values, packs.count() how many there are
//   State gather(State, lanes, Count)    the states of threads side by side in one, Count values in all. lanes.sum(v) and
//                                        lanes.max(v) reduce over them, lanes.first(v) is what the first one has
#pragma once

#include "softmax_state.h"
#include "status.h"
#include "welford.h"

KERNELS_BEGIN

template <class C>
struct Linear {
  C a, b;

  template <int N>
  KERNELS_HD Pack<C, N> operator()(const Pack<C, N>& v) const {
    const Linear self = *this;
    return transform(v, [self](C x) { return fma(x, self.a, self.b); });
  }
};

namespace detail {

// What softmax and log-softmax share.
template <class C>
struct SoftmaxBase {
  using State = SoftmaxState<C>;
  static constexpr bool long_walks = false;

  KERNELS_HD C padding() const { return -infinity<C>(); }
  template <int N>
  KERNELS_HD void accumulate(State& s, const Pack<C, N>& x, int) const { s.accumulate(x); }
  KERNELS_HD void merge(State& a, const State& b) const { a.merge(b); }
  template <class Packs>
  KERNELS_HD State scan(const Packs& packs) const { return State::scan(packs); }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes, const Count<C>&) const { return State::gather(s, lanes); }
};

}  // namespace detail

template <class C>
struct SoftmaxOp : detail::SoftmaxBase<C> {
  using State = SoftmaxState<C>;
  struct Result {
    C reference;
    C scale;
  };

  KERNELS_HD Result finish(const State& s, const Count<C>&) const { return {s.reference(), s.empty() ? C(0) : C(1) / s.l}; }
  KERNELS_HD void write_row(const Result&, int64_t) const {}

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State& s) const { return exp_minus(x, s.reference()); }
  KERNELS_HD Linear<C> linear(const State& s, const Result& r) const {
    // The part of s may be hidden while the rest lies far below 0: then there is nothing to scale, but exp would overflow.
    return {exp(lesser(s.reference() - r.reference, C(0))) * r.scale, C(0)};
  }

  template <int N>
  KERNELS_HD State absorb(Pack<C, N>& x, int) const { return State::absorb(x); }
};

template <class C>
struct LogSoftmaxOp : detail::SoftmaxBase<C> {
  using State = SoftmaxState<C>;
  // log l is kept apart from m: m + log l would round away the small part of it under a large m.
  struct Result {
    C reference;
    C log_sum;
  };

  KERNELS_HD Result finish(const State& s, const Count<C>&) const { return {s.reference(), s.empty() ? C(0) : log(s.l)}; }
  KERNELS_HD void write_row(const Result&, int64_t) const {}

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State& s) const { return x - s.reference(); }
  KERNELS_HD Linear<C> linear(const State& s, const Result& r) const {
    return {C(1), (s.reference() - r.reference) - r.log_sum};
  }

  template <int N>
  KERNELS_HD State absorb(Pack<C, N>& x, int) const {
    State s;
    s.m = max_of(x);
    x = center(x, s);
    s.l = sum(exp(x));
    return s;
  }
};

// Per-row outputs are float, or double for double rows; a null pointer means not wanted.
namespace detail {
struct RowOutput {
  float* single = nullptr;
  double* twofold = nullptr;

  template <class C>
  KERNELS_HD void write(int64_t row, C value) const {
    if (single) single[row] = static_cast<float>(value);
    if (twofold) twofold[row] = static_cast<double>(value);
  }
};
}  // namespace detail

// (x - mean) * rstd with rstd = 1 / sqrt(variance + eps); the variance is the biased one (divided by cols).
template <class C>
struct LayerNormOp {
  using State = WelfordState<C>;
  struct Result {
    C mean;
    C mean_low;  // what rounding took from the mean
    C rstd;
  };

  static constexpr bool long_walks = true;

  C eps;
  detail::RowOutput mean_out, rstd_out;

  KERNELS_HD C padding() const { return C(0); }
  template <int N>
  KERNELS_HD void accumulate(State& s, const Pack<C, N>& x, int valid) const { s.accumulate(x, valid); }
  KERNELS_HD void merge(State& a, const State& b) const { a.merge(b); }
  KERNELS_HD Result finish(const State& s, const Count<C>& cols) const {
    const C mean = s.mean();
    return {mean, s.offset - (mean - s.origin), rsqrt(s.m2 * cols.inverse + eps)};
  }
  KERNELS_HD void write_row(const Result& r, int64_t row) const {
    mean_out.write(row, r.mean);
    rstd_out.write(row, r.rstd);
  }

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State& s) const { return x - s.origin; }
  KERNELS_HD Linear<C> linear(const State& s, const Result& r) const {
    return {r.rstd, ((s.origin - r.mean) - r.mean_low) * r.rstd};
  }

  template <int N>
  KERNELS_HD State absorb(Pack<C, N>& x, int valid) const { return State::absorb(x, valid); }
  template <class Packs>
  KERNELS_HD State scan(const Packs& packs) const { return State::scan(packs); }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes, const Count<C>& total) const { return State::gather(s, lanes, total); }
};

// x * rstd with rstd = 1 / sqrt(mean of squares + eps).
template <class C>
struct RmsNormOp {
  struct State {
    C squares = C(0);
  };
  struct Result {
    C rstd;
  };

  static constexpr bool long_walks = false;

  C eps;
  detail::RowOutput rstd_out;

  KERNELS_HD C padding() const { return C(0); }
  template <int N>
  KERNELS_HD void accumulate(State& s, const Pack<C, N>& x, int) const { s.squares = s.squares + dot(x, x); }
  KERNELS_HD void merge(State& a, const State& b) const { a.squares = a.squares + b.squares; }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes, const Count<C>&) const { return {lanes.sum(s.squares)}; }
  template <class Packs>
  KERNELS_HD State scan(const Packs& packs) const {
    State s;
    packs.each([&](int, const auto& x) { s.squares = s.squares + dot(x, x); });
    return s;
  }
  KERNELS_HD Result finish(const State& s, const Count<C>& cols) const {
    return {rsqrt(s.squares * cols.inverse + eps)};
  }
  KERNELS_HD void write_row(const Result& r, int64_t row) const { rstd_out.write(row, r.rstd); }

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State&) const { return x; }
  KERNELS_HD Linear<C> linear(const State&, const Result& r) const { return {r.rstd, C(0)}; }

  template <int N>
  KERNELS_HD State absorb(Pack<C, N>& x, int) const { return {dot(x, x)}; }
};

// ---- Options, as the caller writes them ----------------------------------------------------------------------------

// k::LayerNorm{}.eps(1e-5).mean(mean).rstd(rstd): mean and rstd receive one value per row.
class LayerNorm {
 public:
  LayerNorm& eps(double value) { eps_ = value; return *this; }
  LayerNorm& mean(float* p) { mean_.single = p; return *this; }
  LayerNorm& mean(double* p) { mean_.twofold = p; return *this; }
  LayerNorm& rstd(float* p) { rstd_.single = p; return *this; }
  LayerNorm& rstd(double* p) { rstd_.twofold = p; return *this; }

  template <class C>
  LayerNormOp<C> op() const { return {static_cast<C>(eps_), mean_, rstd_}; }
  Status check() const { return eps_ >= 0 ? Status{} : invalid("layernorm: eps is negative or NaN"); }

 private:
  double eps_ = 1e-5;
  detail::RowOutput mean_, rstd_;
};

// k::RmsNorm{}.eps(1e-6).rstd(rstd). For a weight stored minus one: affine(one_plus(weight)); for Hugging Face's cast
// before the multiplication: round_to<half>() | affine(weight).
class RmsNorm {
 public:
  RmsNorm& eps(double value) { eps_ = value; return *this; }
  RmsNorm& rstd(float* p) { rstd_.single = p; return *this; }
  RmsNorm& rstd(double* p) { rstd_.twofold = p; return *this; }

  template <class C>
  RmsNormOp<C> op() const { return {static_cast<C>(eps_), rstd_}; }
  Status check() const { return eps_ >= 0 ? Status{} : invalid("rmsnorm: eps is negative or NaN"); }

 private:
  double eps_ = 1e-5;
  detail::RowOutput rstd_;
};

// Softmax has no options; the struct carries the op through the same door as the others.
struct Softmax {
  template <class C>
  SoftmaxOp<C> op() const { return {}; }
  Status check() const { return {}; }
};
struct LogSoftmax {
  template <class C>
  LogSoftmaxOp<C> op() const { return {}; }
  Status check() const { return {}; }
};

KERNELS_END
