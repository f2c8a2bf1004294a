// Maps: changes to values on their way. Maps that depend on the value only derive from Elementwise.
#pragma once

#include "source.h"

KERNELS_BEGIN

namespace detail {
// The functor must be const: packs are mapped with copies of it, so a state would be lost.
template <class F, class C>
constexpr bool maps_values() {
  constexpr bool right = std::is_invocable_r<C, const F&, C>::value;
  static_assert(
      right || !std::is_floating_point<C>::value,  // for other types ComputeType reports the error
      "a map of k::Elementwise has KERNELS_HD float operator()(float x) const: it must be const, as it keeps no state");
  return right;
}
template <class F, class C>
struct MapsValues : std::integral_constant<bool, maps_values<F, C>()> {};  // device code may not call maps_values()
// Whether f accepts a C without narrowing: braces forbid narrowing.
template <class F, class C, class = void>
struct TakesAll : std::false_type {};
template <class F, class C>
struct TakesAll<F, C, void_t<decltype(std::declval<const F&>()({std::declval<C>()}))>> : std::true_type {};
// In rows of double, a map of floats gets floats. Its result, of any type that converts to C, becomes C.
template <class F, class C, int N>
KERNELS_HD Pack<C, N> map_values(const F& f, const Pack<C, N>& v) {
  if constexpr (std::is_same<std::invoke_result_t<const F&, C>, C>::value)
    return transform(v, f);
  else if constexpr (TakesAll<F, float>::value && !TakesAll<F, C>::value)
    return transform(v, [&f](C x) { return static_cast<C>(f(static_cast<float>(x))); });
  else
    return transform(v, [&f](C x) { return static_cast<C>(f(x)); });
}
}  // namespace detail

template <class F>
struct Elementwise : Functor {
  static constexpr Role role = Role::map;
  static constexpr bool takes_any_column = true;
  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t, int64_t) const {
    if constexpr (detail::MapsValues<F, C>::value) return detail::map_values(static_cast<const F&>(*this), v);
    else return v;
  }
};

struct Scale : Elementwise<Scale> {
  double s;
  float s_float;
  explicit Scale(double value) : s(value), s_float(static_cast<float>(value)) {}
  KERNELS_HD float operator()(float x) const { return x * s_float; }
  KERNELS_HD double operator()(double x) const { return x * s; }
};
inline Scale scale(double s) { return Scale(s); }

struct Shift : Elementwise<Shift> {
  double s;
  float s_float;
  explicit Shift(double value) : s(value), s_float(static_cast<float>(value)) {}
  KERNELS_HD float operator()(float x) const { return x + s_float; }
  KERNELS_HD double operator()(double x) const { return x + s; }
};
inline Shift shift(double s) { return Shift(s); }

struct Relu : Elementwise<Relu> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return x < C(0) ? C(0) : x; }
};
inline Relu relu() { return {}; }

// Values below low become low, those above high become high; NaN stays NaN.
struct Clamp : Elementwise<Clamp> {
  double low, high;
  float low_float, high_float;
  Clamp(double l, double h) : low(l), high(h), low_float(static_cast<float>(l)), high_float(static_cast<float>(h)) {}
  Status check(int64_t, int64_t) const {
    return low <= high ? Status{} : invalid("clamp: low exceeds high, or one of them is NaN");
  }
  KERNELS_HD float operator()(float x) const { return x < low_float ? low_float : x > high_float ? high_float : x; }
  KERNELS_HD double operator()(double x) const { return x < low ? low : x > high ? high : x; }
};
inline Clamp clamp(double low, double high) { return {low, high}; }

struct Relu2 : Elementwise<Relu2> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return Relu()(x) * Relu()(x); }
};
// The square of relu (Primer, Nemotron).
inline Relu2 relu2() { return {}; }

struct Sigmoid : Elementwise<Sigmoid> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return kernels::sigmoid(x); }
};
inline Sigmoid sigmoid() { return {}; }

struct Tanh : Elementwise<Tanh> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return kernels::tanh(x); }
};
inline Tanh tanh() { return {}; }

struct Exp : Elementwise<Exp> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return precise_exp(x); }
};
inline Exp exp() { return {}; }

namespace detail {
// Keeps a factor from being -infinity, as -infinity times 0 would be NaN.
template <class C>
KERNELS_HD C not_minus_infinity(C x) { return greater(x, -largest<C>()); }
}  // namespace detail

// The activations keep their relative precision near 0: none of them subtracts numbers that are nearly equal. Far below
// 0 and at -infinity they are -0. NaN stays NaN.

struct Silu : Elementwise<Silu> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return detail::not_minus_infinity(x) * kernels::sigmoid(x); }
};
inline Silu silu() { return {}; }

// 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2 u).
struct GeluTanh : Elementwise<GeluTanh> {
  template <class C>
  KERNELS_HD C operator()(C x) const {
    const C twice_u = x * fma(x * x, C(0.071354816272600244), C(1.5957691216057307));
    return detail::not_minus_infinity(x) * inverse(C(1) + kernels::exp(-twice_u));
  }
};
inline GeluTanh gelu() { return {}; }

// x Phi(x) with the exact distribution function, as max(x, 0) - |x| Phi(-|x|).
struct GeluErf : Elementwise<GeluErf> {
  template <class C>
  KERNELS_HD C operator()(C x) const {
    const C size = magnitude(x);
    return greater(x, C(0)) + detail::not_minus_infinity(-size) * normal_tail(size);
  }
};
inline GeluErf gelu_erf() { return {}; }

// Rounds to T and continues in the compute type (Hugging Face's RMSNorm casts before it multiplies).
template <class T>
struct RoundTo : Elementwise<RoundTo<T>> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return convert<C>(convert<T>(x)); }
};
template <class T>
RoundTo<T> round_to() { return {}; }

// A map with a source as its second operand. Op is a stateless struct with a static apply(Pack, Pack), and the name
// with which error messages begin.
template <class S, class Op>
class Binary : public Functor {
 public:
  static constexpr Role role = Role::map;
  KERNELS_HD explicit Binary(S source) : source_(source) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const { return detail::check_of(source_, rows, cols).within(Op::name); }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(source_)); }
  template <int N>
  KERNELS_HD auto placed(int64_t row, int64_t col) const { return with(detail::placed<N>(source_, row, col)); }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row, col); }
  KERNELS_HD auto cached() const { return with(detail::cached(source_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(source_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(source_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(source_, row, begin, end);
  }
  template <class C, int N, class Fetched>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, const Fetched& fetched, int64_t row, int64_t col) const {
    return Op::apply(v, convert<C>(detail::resolve(source_, fetched, row, col)));
  }

 private:
  template <class T>
  static KERNELS_HD auto with(const T& source) { return Binary<T, Op>(source); }

  S source_;
};

namespace detail {
template <class S, class Op>
struct Traits<Binary<S, Op>> : NoTraits {
  static constexpr bool reads_matrix = !Traits<S>::same_rows;
};
}  // namespace detail

struct AddOp {
  static constexpr const char* name = "add";
  template <class C, int N>
  static KERNELS_HD Pack<C, N> apply(const Pack<C, N>& v, const Pack<C, N>& w) { return v + w; }
};
struct MulOp {
  static constexpr const char* name = "mul";
  template <class C, int N>
  static KERNELS_HD Pack<C, N> apply(const Pack<C, N>& v, const Pack<C, N>& w) { return v * w; }
};
struct MaskOp {
  static constexpr const char* name = "mask";
  template <class C, int N>
  static KERNELS_HD Pack<C, N> apply(const Pack<C, N>& v, const Pack<C, N>& keep) {
    return transform(v, keep, [](C x, C k) { return k != C(0) ? x : -infinity<C>(); });
  }
};

struct BiasOp : AddOp {
  static constexpr const char* name = "bias";
};
struct GammaOp : MulOp {
  static constexpr const char* name = "affine: gamma";
};

// v + source. A pointer means a row vector.
template <class S>
auto add(S source) { return Binary<detail::source_t<S>, AddOp>(detail::as_source(source)); }
// v * source. A pointer means a row vector.
template <class S>
auto mul(S source) { return Binary<detail::source_t<S>, MulOp>(detail::as_source(source)); }
// v where the source is not zero, -infinity elsewhere: mask(k::load(keep, ld)) with keep of bool.
template <class S>
auto mask(S source) { return Binary<detail::source_t<S>, MaskOp>(detail::as_source(source)); }

template <class T>
auto bias(const T* p) {
  return Binary<decltype(row(p)), BiasOp>(row(p));
}

// gamma * v, and gamma * v + beta. Pointers mean row vectors.
template <class Gamma, class Beta>
class Affine : public Functor {
 public:
  static constexpr Role role = Role::map;
  KERNELS_HD Affine(Gamma gamma, Beta beta) : gamma_(gamma), beta_(beta) {}

  static constexpr int widest =
      detail::widest_of<Gamma>() < detail::widest_of<Beta>() ? detail::widest_of<Gamma>() : detail::widest_of<Beta>();
  int max_pack() const { return lesser(detail::max_pack_of(gamma_), detail::max_pack_of(beta_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(gamma_, rows, cols).within("affine: gamma"));
    return detail::check_of(beta_, rows, cols).within("affine: beta");
  }
  static constexpr bool takes_any_column = detail::takes_any_column<Gamma>() && detail::takes_any_column<Beta>();
  auto any_column() const { return with(detail::any_column(gamma_), detail::any_column(beta_)); }
  template <int N>
  KERNELS_HD auto placed(int64_t row, int64_t col) const {
    return with(detail::placed<N>(gamma_, row, col), detail::placed<N>(beta_, row, col));
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return detail::pair(detail::fetch<N>(gamma_, row, col), detail::fetch<N>(beta_, row, col));
  }
  template <class C, int N, class Fetched>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, const Fetched& fetched, int64_t row, int64_t col) const {
    return v * convert<C>(detail::resolve(gamma_, detail::first_of(fetched), row, col)) +
           convert<C>(detail::resolve(beta_, detail::second_of(fetched), row, col));
  }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(gamma_), detail::second_pass(beta_)); }
  KERNELS_HD auto without_effects() const {
    return with(detail::without_effects(gamma_), detail::without_effects(beta_));
  }

 private:
  template <class G, class B>
  static KERNELS_HD auto with(const G& gamma, const B& beta) { return Affine<G, B>(gamma, beta); }

  Gamma gamma_;
  Beta beta_;
};

template <class Gamma>
auto affine(Gamma gamma) {
  return Binary<detail::source_t<Gamma>, GammaOp>(detail::as_source(gamma));
}
template <class Gamma, class Beta>
auto affine(Gamma gamma, Beta beta) {
  return Affine<detail::source_t<Gamma>, detail::source_t<Beta>>(detail::as_source(gamma), detail::as_source(beta));
}

// Causal mask for rows of scores, (batch x heads, q_len): query i sees key j if j <= i + kv_len - q_len, so the last
// query sees every key.
struct Causal : Functor {
  static constexpr Role role = Role::map;
  static constexpr bool takes_any_column = true;
  int64_t q_len, kv_len;
  Causal(int64_t q, int64_t kv) : q_len(q), kv_len(kv) {}

  Status check(int64_t, int64_t) const {
    if (q_len < 1) return invalid("causal: q_len is less than 1");
    if (kv_len < 0) return invalid("causal: kv_len is negative");
    return {};
  }
  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t row, int64_t col) const {
    const int64_t last = kv_len - (q_len - row % q_len);
    Pack<C, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = col + i <= last ? v.v[i] : -infinity<C>();
    return out;
  }
};
inline Causal causal(int64_t q_len, int64_t kv_len) { return {q_len, kv_len}; }

// Changes nothing.
struct Identity : Functor {
  static constexpr Role role = Role::map;
  static constexpr bool takes_any_column = true;
  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t, int64_t) const { return v; }
};

KERNELS_END
