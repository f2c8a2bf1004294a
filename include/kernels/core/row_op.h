// Row ops: what softmax, LayerNorm and RMSNorm compute, independent of where a row is kept and how it is read and
// written. The GPU and CPU engines use the same structs.
//
// A RowOp<C> (C: float or double) reduces a row to a State and then maps every element:
//
//   State                                default-constructed: empty
//   merge(State& into, State from)       any order, any split of the row
//   Result finish(State, Count)          once per row, with the number of columns
//   write_row(Result, row)               once per row, by one thread: per-row outputs
//
//   Pack center(Pack x, State)           x relative to a state: the row's, or that of the part of the row that has x
//   Linear linear(State, Result)         the value from a centered value: value * a + b
//   cheap_center                         whether center() is cheap: then it runs only when the row's state is known
//
// The CPU engine computes the State of a block itself, in vectors: it centers the block on a state that covers only
// some of it, and sums the results. InLanes in cpu/detail/row/lanes.h says how for each op.
//
// A GPU thread takes several packs at once, and then combines its state with those of the neighbouring threads:
//   take(State&, packs)                  packs.fold(start, f) is f(... f(start, pack) ..., pack), callable more than
//                                        once; packs.typical() is the mean of a quarter of the values (at least 4,
//                                        if there are 4), packs.count() the Count of all
//   takes_two_passes                     whether take() calls fold() more than once
//   State gather(State, lanes)           combines the states of all lanes. lanes.sum(v), lanes.max(v) reduce over them,
//                                        lanes.first(v) is the first lane's v, lanes.total(n) the Count of all values
//
// Row sinks (concepts.h) have a State as well, which takes finished values by
//   accumulate(State&, Pack, valid)      the first `valid` values of a pack, with padding behind them
//   padding()                            a value that does not change a state; only the CPU has partial packs
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

// The common part of softmax and log-softmax.
template <class C>
struct SoftmaxBase {
  using State = SoftmaxState<C>;
  static constexpr bool takes_two_passes = true, cheap_center = true;

  KERNELS_HD void merge(State& a, const State& b) const { a.merge(b); }
  template <class Packs>
  KERNELS_HD void take(State& s, const Packs& packs) const { s.take(packs); }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes) const { return State::gather(s, lanes); }
};

}  // namespace detail

template <class C>
struct SoftmaxOp : detail::SoftmaxBase<C> {
  using State = SoftmaxState<C>;
  static constexpr bool cheap_center = false;
  struct Result {
    C reference;
    C scale;
  };

  KERNELS_HD Result finish(const State& s, const Count<C>&) const { return {s.reference(), s.inverse()}; }
  KERNELS_HD void write_row(const Result&, int64_t) const {}

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State& s) const { return exp_minus(x, s.reference()); }
  KERNELS_HD Linear<C> linear(const State& s, const Result& r) const {
    // This part of the row may be hidden while the rest is far below 0: then there is nothing to scale, and exp must
    // not overflow.
    return {exp(lesser(s.reference() - r.reference, C(0))) * r.scale, C(0)};
  }
};

template <class C>
struct LogSoftmaxOp : detail::SoftmaxBase<C> {
  using State = SoftmaxState<C>;
  // log l is kept apart from m: the sum m + log l would lose the low bits of log l under a large m.
  struct Result {
    C reference;
    C log_sum;
  };

  KERNELS_HD Result finish(const State& s, const Count<C>&) const {
    return {s.reference(), s.empty() ? C(0) : log(s.l)};
  }
  KERNELS_HD void write_row(const Result&, int64_t) const {}

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State& s) const { return x - s.reference(); }
  KERNELS_HD Linear<C> linear(const State& s, const Result& r) const {
    return {C(1), (s.reference() - r.reference) - r.log_sum};
  }
};

// Per-row outputs are float, or double for double rows. A null pointer means that the output is not wanted.
namespace detail {
class RowOutput {
 public:
  RowOutput() = default;
  explicit RowOutput(float* p) : to_(p) {}
  explicit RowOutput(double* p) : to_(p), twofold_(true) {}

  Status check(const char* misaligned) const {
    const size_t size = twofold_ ? alignof(double) : alignof(float);
    return reinterpret_cast<uintptr_t>(to_) % size == 0 ? Status{} : invalid(misaligned);
  }

  template <class C>
  KERNELS_HD void write(int64_t row, C value) const {
    if (to_ == nullptr) return;
    if (twofold_) static_cast<double*>(to_)[row] = static_cast<double>(value);
    else static_cast<float*>(to_)[row] = static_cast<float>(value);
  }

 private:
  void* to_ = nullptr;
  bool twofold_ = false;
};
}  // namespace detail

// (x - mean) * rstd with rstd = 1 / sqrt(variance + eps); the variance is the biased one (divided by cols).
template <class C>
struct LayerNormOp {
  using State = WelfordState<C>;
  static constexpr bool takes_two_passes = false, cheap_center = true;
  struct Result {
    C mean;
    C mean_low;  // the rounding error of the mean
    C rstd;
  };

  C eps;
  detail::RowOutput mean_out, rstd_out;

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

  template <class Packs>
  KERNELS_HD void take(State& s, const Packs& packs) const { s.take(packs); }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes) const { return State::gather(s, lanes); }
};

// x * rstd with rstd = 1 / sqrt(mean of squares + eps).
template <class C>
struct RmsNormOp {
  struct State {
    C squares = C(0);
  };
  static constexpr bool takes_two_passes = false, cheap_center = true;
  struct Result {
    C rstd;
  };

  C eps;
  detail::RowOutput rstd_out;

  KERNELS_HD void merge(State& a, const State& b) const { a.squares = a.squares + b.squares; }
  template <class Packs>
  KERNELS_HD void take(State& s, const Packs& packs) const {
    s.squares = s.squares + packs.fold(C(0), [](C so_far, const auto& x) { return so_far + dot(x, x); });
  }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes) const { return {lanes.sum(s.squares)}; }
  KERNELS_HD Result finish(const State& s, const Count<C>& cols) const {
    return {rsqrt(s.squares * cols.inverse + eps)};
  }
  KERNELS_HD void write_row(const Result& r, int64_t row) const { rstd_out.write(row, r.rstd); }

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State&) const { return x; }
  KERNELS_HD Linear<C> linear(const State&, const Result& r) const { return {r.rstd, C(0)}; }
};

// Leaves rows unchanged, for a sink that needs a value of the whole row first.
template <class C>
struct AsItIsOp {
  struct State {
    C none = C(0);
  };
  static constexpr bool takes_two_passes = false, cheap_center = true;
  struct Result {};

  KERNELS_HD void merge(State&, const State&) const {}
  template <class Packs>
  KERNELS_HD void take(State&, const Packs&) const {}
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes&) const { return s; }
  KERNELS_HD Result finish(const State&, const Count<C>&) const { return {}; }
  KERNELS_HD void write_row(const Result&, int64_t) const {}

  template <int N>
  KERNELS_HD Pack<C, N> center(const Pack<C, N>& x, const State&) const { return x; }
  KERNELS_HD Linear<C> linear(const State&, const Result&) const { return {C(1), C(0)}; }
};

// ---- Options, as the caller writes them ----------------------------------------------------------------------------

class RmsNorm;

// k::LayerNorm{}.eps(1e-5).mean(mean).rstd(rstd): mean and rstd receive one value for each row. rstd is OneFlow's
// inv_variance, 1 / sqrt(variance + eps).
class LayerNorm {
 public:
  LayerNorm() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value || std::is_same<N, RmsNorm>::value>>
  LayerNorm(N) {
    static_assert(!std::is_arithmetic<N>::value,
                  "layernorm: a number where there must be options: k::LayerNorm{}.eps(1e-5)");
    static_assert(!std::is_same<N, RmsNorm>::value,
                  "layernorm: options of RmsNorm where there must be those of LayerNorm: k::LayerNorm{}.eps(1e-5)");
  }

  LayerNorm& eps(double value) { eps_ = value; return *this; }
  LayerNorm& mean(float* p) { mean_ = detail::RowOutput(p); return *this; }
  LayerNorm& mean(double* p) { mean_ = detail::RowOutput(p); return *this; }
  LayerNorm& rstd(float* p) { rstd_ = detail::RowOutput(p); return *this; }
  LayerNorm& rstd(double* p) { rstd_ = detail::RowOutput(p); return *this; }
  LayerNorm& inv_variance(float* p) { return rstd(p); }
  LayerNorm& inv_variance(double* p) { return rstd(p); }

  template <class C>
  LayerNormOp<C> op() const { return {static_cast<C>(eps_), mean_, rstd_}; }
  Status check() const {
    if (!(eps_ >= 0)) return invalid("eps is negative or NaN");
    KERNELS_TRY(mean_.check("the pointer to mean is not aligned for its elements"));
    return rstd_.check("the pointer to rstd is not aligned for its elements");
  }

 private:
  double eps_ = 1e-5;
  detail::RowOutput mean_, rstd_;
};

// k::RmsNorm{}.eps(1e-6).rstd(rstd): rstd receives one value for each row. For a weight stored minus one:
// affine(one_plus(weight)); for Hugging Face's cast before the multiplication: round_to<half>() | affine(weight).
class RmsNorm {
 public:
  RmsNorm() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic<N>::value || std::is_same<N, LayerNorm>::value>>
  RmsNorm(N) {
    static_assert(!std::is_arithmetic<N>::value,
                  "rmsnorm: a number where there must be options: k::RmsNorm{}.eps(1e-6)");
    static_assert(!std::is_same<N, LayerNorm>::value,
                  "rmsnorm: options of LayerNorm where there must be those of RmsNorm: k::RmsNorm{}.eps(1e-6)");
  }

  RmsNorm& eps(double value) { eps_ = value; return *this; }
  RmsNorm& rstd(float* p) { rstd_ = detail::RowOutput(p); return *this; }
  RmsNorm& rstd(double* p) { rstd_ = detail::RowOutput(p); return *this; }

  template <class C>
  RmsNormOp<C> op() const { return {static_cast<C>(eps_), rstd_}; }
  Status check() const {
    if (!(eps_ >= 0)) return invalid("eps is negative or NaN");
    return rstd_.check("the pointer to rstd is not aligned for its elements");
  }

 private:
  double eps_ = 1e-5;
  detail::RowOutput rstd_;
};

// Softmax has no options; the struct passes the op to the engine like the others.
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

namespace detail {
// For copy(), if the sink needs values of the whole row.
struct AsItIs {
  template <class C>
  AsItIsOp<C> op() const { return {}; }
  Status check() const { return {}; }
};
}  // namespace detail

KERNELS_END
