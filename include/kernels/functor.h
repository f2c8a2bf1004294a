// Sources, maps and sinks: what every kernel reads through, passes through and writes through.
//
//   auto in  = k::load(x, ld) | k::add(k::row(bias)) | k::add(k::load(res, ld)) | k::tee(res, ld);
//   auto out = k::affine(gamma, beta) | k::gelu() | k::store(y, ld);
//   k::layernorm(stream, in, out, rows, cols);            // one pass over memory
//
// The same objects drive the CPU versions, with host pointers. All are plain values: copy them, build them anywhere.
//
// Sources      load(p, ld)  row(p)  per_row(p)  one_plus(p)  cycle(source, period)
// Maps         scale(s)  shift(s)  add(source)  mul(source)  bias(p)  affine(gamma[, beta])
//              gelu()  gelu_erf()  silu()  relu()  relu2()  sigmoid()  tanh()  exp()  clamp(low, high)
//              mask(source)  causal(q_len, kv_len)  round_to<T>()  tee(p, ld)
// Sinks        store(p, ld)  both(sink, sink ...)  quantize(p, ld, scales)
//
// Rows may be any distance apart: ld counts elements from one row to the next (ld >= cols for what is written; 0 in a
// load repeats one row). load(p), store(p) and tee(p) are of a single row: a flat tensor. What may be written in place:
// docs/memory.md.
//
// To fuse your own, derive from k::Functor and give it one member (core/concepts.h lists all forms):
//
//   struct Clamp : k::Functor {
//     float hi;
//     template <int N> KERNELS_HD auto map(k::Pack<float, N> v, int64_t row, int64_t col) const { return k::min(v, hi); }
//   };
#pragma once

#include <limits>

#include "core/concepts.h"
#include "core/memory.h"
#include "core/overlap.h"

KERNELS_BEGIN

namespace detail {

// The widest pack that an address and a row stride allow, in elements.
template <class T>
int aligned_pack(const T* p, int64_t ld, int widest) {
  int n = widest;
  for (; n > 1; n /= 2) {
    const uintptr_t unit = n * sizeof(T) < 16 ? n * sizeof(T) : 16;
    if (reinterpret_cast<uintptr_t>(p) % unit == 0 && (uint64_t(ld) * sizeof(T)) % unit == 0) break;
  }
  return n;
}

// The row stride of what has one row only. No part of an address depends on it, nor any alignment.
constexpr int64_t kOneRow = -(int64_t(1) << 56);

// rows and cols are not negative here.
template <class T>
bool rows_overflow(int64_t rows, int64_t ld) {
  const int64_t limit = std::numeric_limits<int64_t>::max() / int64_t(sizeof(T));
  return ld > 0 && rows > limit / ld;
}

}  // namespace detail

// ---- Sources -------------------------------------------------------------------------------------------------------

// A matrix whose packs begin at any column of its rows, but the first and the last. Placed, it is one row, from a few bytes before its
// first column on: then packs, and the words that they lie in, are as far apart in all of it.
template <class Src, class Dst>
class LoadAnywhere : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD LoadAnywhere(const Src* src, int64_t row_stride) : src_(src), ld_(row_stride) {}

  template <int N>
  KERNELS_HD LoadAnywhere placed(int64_t row, int64_t col) const {
    LoadAnywhere out(src_ + row * ld_, 0);
    out.behind_ = opaque(detail::bytes_behind<N>(out.src_ + col)) & 15;
    out.src_ = opaque(out.src_ - out.behind_ / int(sizeof(Src)));
    return out;
  }
  template <int N>
  KERNELS_HD Packed<Src, N> fetch(int64_t row, int64_t col) const {
    if (behind_ < 0) return read_anywhere<N>(src_ + row * ld_ + col);
    if constexpr (N == 1) return read<1, Cache::keep>(src_ + behind_ / int(sizeof(Src)) + col);
    else return read_behind<N>(src_ + col, behind_);
  }
  template <int N>
  KERNELS_HD Pack<Dst, N> resolve(const Packed<Src, N>& fetched, int64_t, int64_t) const {
    return convert<Dst>(fetched.unpack());
  }

 private:
  const Src* src_;
  int64_t ld_;
  int behind_ = -1;  // where packs lie between multiples of their unit, if that is known
};

// A matrix of Src, computed on as Dst.
template <class Src, class Dst = compute_t<Src>, Cache kCache = Cache::stream>
class DirectLoad : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD DirectLoad(const Src* src, int64_t row_stride) : src_(src), ld_(row_stride) {}

  static constexpr int widest = 16 / int(sizeof(Src));
  int max_pack() const { return detail::aligned_pack(src_, ld_, widest); }
  Status check(int64_t rows, int64_t cols) const {
    if (rows == 0 || cols == 0) return {};
    KERNELS_TRY(detail::check_pointer(src_, "load: the pointer is null", "load: the pointer is not aligned for its elements"));
    if (ld_ == detail::kOneRow) return rows == 1 ? Status{} : invalid("load: load(p) has one row, load(p, ld) several");
    if (ld_ < 0) return invalid("load: the row stride is negative");
    if (detail::rows_overflow<Src>(rows, ld_)) return invalid("load: rows x row stride exceeds 64 bits");
    return {};
  }

  template <int N>
  KERNELS_HD Packed<Src, N> fetch(int64_t row, int64_t col) const {
    return read<N, kCache>(at(row, col));
  }
  KERNELS_HD const Src* at(int64_t row, int64_t col) const { return src_ + row * ld_ + col; }
  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane(src_, ld_ == detail::kOneRow ? cols : ld_, rows, cols); }
  using Itself = DirectLoad;
  static constexpr bool takes_any_column = true, leads = true;
  LoadAnywhere<Src, Dst> any_column() const { return {src_, ld_}; }
  DirectLoad leading() const { return {src_, ld_}; }
  KERNELS_HD DirectLoad<Src, Dst, Cache::keep> cached() const { return {src_, ld_}; }
  template <int N>
  KERNELS_HD DirectLoad placed(int64_t row, int64_t) const { return {opaque(at(row, 0)), 0}; }
  KERNELS_HD DirectLoad at_row(int64_t row) const { return {opaque(at(row, 0)), ld_}; }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    prefetch_lines(src_ + row * ld_ + begin, src_ + row * ld_ + end);
  }
  template <int N>
  KERNELS_HD Pack<Dst, N> resolve(const Packed<Src, N>& fetched, int64_t, int64_t) const {
    return convert<Dst>(fetched.unpack());
  }

 private:
  const Src* src_;
  int64_t ld_;
};

template <class T>
DirectLoad<T> load(const T* p, int64_t ld) { return {p, ld}; }
template <class T>
DirectLoad<T> load(const T* p) { return {p, detail::kOneRow}; }

// One vector, the same for every row: value(row, col) = p[col].
template <class T>
class RowVector : public Functor {
 public:
  static constexpr Role role = Role::source;
  explicit RowVector(const T* p) : p_(p) {}

  // Two transactions are fine here: the vector stays in the cache.
  static constexpr int widest = 32 / int(sizeof(T)) < 16 ? 32 / int(sizeof(T)) : 16;
  int max_pack() const { return detail::aligned_pack(p_, 0, widest); }
  Status check(int64_t, int64_t cols) const {
    return cols == 0 ? Status{} : detail::check_pointer(p_, "row: the vector's pointer is null", "row: the vector's pointer is not aligned for its elements");
  }

  using Itself = RowVector;
  static constexpr bool takes_any_column = true;
  LoadAnywhere<T, compute_t<T>> any_column() const { return {p_, 0}; }

  template <int N>
  KERNELS_HD Packed<T, N> fetch(int64_t, int64_t col) const { return read<N, Cache::keep>(p_ + col); }
  template <int N>
  KERNELS_HD auto resolve(const Packed<T, N>& fetched, int64_t, int64_t) const {
    return convert<compute_t<T>>(fetched.unpack());
  }

 private:
  const T* p_;
};

template <class T>
RowVector<T> row(const T* p) { return RowVector<T>(p); }

// One value per row: value(row, col) = p[row].
template <class T>
class PerRow : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool takes_any_column = true;
  explicit PerRow(const T* p) : p_(p) {}

  Status check(int64_t, int64_t) const {
    return detail::check_pointer(p_, "per_row: the vector's pointer is null", "per_row: the vector's pointer is not aligned for its elements");
  }

  // A pack of N equal values: what is read is one element.
  template <int N>
  struct One {
    Packed<T, 1> value;
  };
  template <int N>
  KERNELS_HD One<N> fetch(int64_t row, int64_t) const { return {read<1, Cache::keep>(p_ + row)}; }
  template <int N>
  KERNELS_HD auto resolve(const One<N>& fetched, int64_t, int64_t) const {
    return broadcast<N>(convert<compute_t<T>>(fetched.value.unpack().v[0]));
  }

 private:
  const T* p_;
};

template <class T>
PerRow<T> per_row(const T* p) { return PerRow<T>(p); }

// A source whose rows repeat: row r reads row r % period. For a mask shared by the batch, say.
template <class S>
class Cycle : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // cycle() does not take a source with any
  Cycle(S source, int64_t period) : source_(source), period_(period) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const {
    if (period_ < 1) return invalid("cycle: the period is less than 1");
    return detail::check_of(source_, rows < period_ ? rows : period_, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const {
    const auto source = detail::any_column(source_);
    return Cycle<std::decay_t<decltype(source)>>(source, period_);
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row % period_, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, row % period_, col);
  }

 private:
  S source_;
  int64_t period_;
};

template <class S>
Cycle<S> cycle(S source, int64_t period) {
  static_assert(!detail::has_effects<S>, "cycle() reads its rows more than once, and tee() or another effect must happen once: put it behind add(cycle(...)), or make these rows before with copy()");
  return {source, period};
}

namespace detail {

// A pointer given where a source is expected means a row vector.
template <class T>
RowVector<T> as_source(const T* p) { return RowVector<T>(p); }
template <class T>
RowVector<T> as_source(T* p) { return RowVector<T>(p); }
template <class S>
auto as_source(S source) {
  constexpr bool number = std::is_arithmetic<S>::value;
  static_assert(!number, "as_source: a number where there must be a source: k::shift(s) adds one to all values, k::scale(s) multiplies them by it");
  static_assert(number || is_source<S>, "as_source: expected a source (k::load, k::row, k::per_row ...) or a pointer");
  if constexpr (is_source<S>) return source;
  else return RowVector<float>(nullptr);
}
template <class S>
using source_t = decltype(as_source(std::declval<S>()));

}  // namespace detail

// ---- Maps ----------------------------------------------------------------------------------------------------------

template <class F>
struct Elementwise : Functor {
  static constexpr Role role = Role::map;
  static constexpr bool takes_any_column = true;
  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t, int64_t) const {
    return transform(v, static_cast<const F&>(*this));
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
// The factor of a share that vanishes: -infinity times 0 would be NaN.
template <class C>
KERNELS_HD C not_minus_infinity(C x) { return greater(x, -largest<C>()); }
}  // namespace detail

// The activations keep their relative precision where they are small: none of them subtracts numbers that are nearly equal. Far below 0
// they are -0, at -infinity as well; NaN stays.

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

// x Phi(x), with the exact distribution function: what is left of x, or of 0, without |x| Phi(-|x|).
struct GeluErf : Elementwise<GeluErf> {
  template <class C>
  KERNELS_HD C operator()(C x) const {
    const C size = magnitude(x);
    return greater(x, C(0)) + detail::not_minus_infinity(-size) * normal_tail(size);
  }
};
inline GeluErf gelu_erf() { return {}; }

// Rounds to what T can hold, and goes on in the compute type (Hugging Face's RMSNorm casts before it multiplies).
template <class T>
struct RoundTo : Elementwise<RoundTo<T>> {
  template <class C>
  KERNELS_HD C operator()(C x) const { return convert<C>(convert<T>(x)); }
};
template <class T>
RoundTo<T> round_to() { return {}; }

// A map with one source as its second operand. Op is a stateless struct with a static apply(Pack, Pack).
template <class S, class Op>
class Binary : public Functor {
 public:
  static constexpr Role role = Role::map;
  KERNELS_HD explicit Binary(S source) : source_(source) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const { return detail::check_of(source_, rows, cols); }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(source_)); }
  template <int N>
  KERNELS_HD auto placed(int64_t row, int64_t col) const { return with(detail::placed<N>(source_, row, col)); }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row, col); }
  KERNELS_HD auto cached() const { return with(detail::cached(source_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(source_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(source_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch(source_, row, begin, end); }
  template <class C, int N, class Fetched>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, const Fetched& fetched, int64_t row, int64_t col) const {
    return Op::apply(v, convert<C>(detail::resolve(source_, fetched, row, col)));
  }

 private:
  template <class T>
  static KERNELS_HD auto with(const T& source) { return Binary<T, Op>(source); }

  S source_;
};

struct AddOp {
  template <class C, int N>
  static KERNELS_HD Pack<C, N> apply(const Pack<C, N>& v, const Pack<C, N>& w) { return v + w; }
};
struct MulOp {
  template <class C, int N>
  static KERNELS_HD Pack<C, N> apply(const Pack<C, N>& v, const Pack<C, N>& w) { return v * w; }
};
struct MaskOp {
  template <class C, int N>
  static KERNELS_HD Pack<C, N> apply(const Pack<C, N>& v, const Pack<C, N>& keep) {
    return transform(v, keep, [](C x, C k) { return k != C(0) ? x : -infinity<C>(); });
  }
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
auto bias(const T* p) { return add(row(p)); }

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
    KERNELS_TRY(detail::check_of(gamma_, rows, cols));
    return detail::check_of(beta_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<Gamma>() && detail::takes_any_column<Beta>();
  auto any_column() const { return with(detail::any_column(gamma_), detail::any_column(beta_)); }
  template <int N>
  KERNELS_HD auto placed(int64_t row, int64_t col) const { return with(detail::placed<N>(gamma_, row, col), detail::placed<N>(beta_, row, col)); }

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
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(gamma_), detail::without_effects(beta_)); }

 private:
  template <class G, class B>
  static KERNELS_HD auto with(const G& gamma, const B& beta) { return Affine<G, B>(gamma, beta); }

  Gamma gamma_;
  Beta beta_;
};

template <class Gamma>
auto affine(Gamma gamma) { return mul(gamma); }
template <class Gamma, class Beta>
auto affine(Gamma gamma, Beta beta) {
  return Affine<detail::source_t<Gamma>, detail::source_t<Beta>>(detail::as_source(gamma), detail::as_source(beta));
}

// Causal mask for score rows laid out as (batch x heads, q_len): query i sees key j when j <= i + kv_len - q_len,
// that is, the last query sees every key.
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
    const int64_t last = row % q_len + kv_len - q_len;
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

// ---- Sinks, and tee ------------------------------------------------------------------------------------------------

template <class Src, class Dst>
class DirectStore;

// A matrix whose packs begin at any column.
template <class Dst>
class StoreAnywhere : public Functor {
 public:
  static constexpr Role role = Role::sink;
  KERNELS_HD StoreAnywhere(Dst* dst, int64_t row_stride) : dst_(dst), ld_(row_stride) {}

  template <int N>
  KERNELS_HD StoreAnywhere placed(int64_t row, int64_t col) const {
    StoreAnywhere out(opaque(dst_ + row * ld_), 0);
    out.behind_ = opaque(detail::bytes_behind<N>(out.dst_ + col)) & 15;
    return out;
  }
  // Whether packs need not be cut, and the same functor for those.
  KERNELS_HD bool is_whole() const { return behind_ == 0; }
  KERNELS_HD DirectStore<compute_t<Dst>, Dst> whole() const { return {dst_, ld_}; }
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    Dst* to = dst_ + row * ld_ + col;
    if (behind_ < 0) write_anywhere(to, convert<Dst>(v));
    else write_behind(to, convert<Dst>(v), behind_);
  }

 private:
  Dst* dst_;
  int64_t ld_;
  int behind_ = -1;  // as in LoadAnywhere
};

// A matrix of Dst, given values of Src.
template <class Src, class Dst>
class DirectStore : public Functor {
 public:
  static constexpr Role role = Role::sink;
  KERNELS_HD DirectStore(Dst* dst, int64_t row_stride) : dst_(dst), ld_(row_stride) {}

  static constexpr int widest = 16 / int(sizeof(Dst));
  int max_pack() const { return detail::aligned_pack(dst_, ld_, widest); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(dst_, "store: the pointer is null", "store: the pointer is not aligned for its elements"));
    if (ld_ == detail::kOneRow && rows > 1) return invalid("store: store(p) has one row, store(p, ld) several");
    if (ld_ < cols && rows > 1) return invalid("store: the row stride is smaller than cols");
    if (detail::rows_overflow<Dst>(rows, ld_)) return invalid("store: rows x row stride exceeds 64 bits");
    return {};
  }
  // Around the cache only where rows are whole lines: a part of one costs more than it saves.
  void set_past_cache(bool past) { past_cache_ = past && whole_lines<Dst>(ld_); }
  int lead(int64_t row) const { return until_line(dst_ + row * ld_); }
  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane(dst_, ld_ == detail::kOneRow ? cols : ld_, rows, cols); }
  using Itself = DirectStore;
  static constexpr bool takes_any_column = true;
  StoreAnywhere<Dst> any_column() const { return {dst_, ld_}; }

  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    write<N>(dst_ + row * ld_ + col, convert<Dst>(v), past_cache_);
  }
  template <int N, class C>
  KERNELS_HD void store_if(bool there, const Pack<C, N>& v, int64_t row, int64_t col) const {
    write_if(there, dst_ + row * ld_ + col, convert<Dst>(v));
  }

 protected:
  Dst* dst_;
  int64_t ld_;
  bool past_cache_ = false;
};

template <class T>
DirectStore<compute_t<T>, T> store(T* p, int64_t ld) {
  static_assert(!std::is_const<T>::value, "store: the pointer is to const elements");
  return {p, ld};
}
template <class T>
DirectStore<compute_t<T>, T> store(T* p) { return kernels::store(p, detail::kOneRow); }

// A tee whose packs begin at any column.
template <class T>
class TeeAnywhere : public Functor {
 public:
  static constexpr Role role = Role::map;
  static constexpr bool has_effects = true;
  TeeAnywhere(T* p, int64_t row_stride) : p_(p), ld_(row_stride) {}

  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t row, int64_t col) const {
    const Pack<T, N> rounded = convert<T>(v);
    write_anywhere(p_ + row * ld_ + col, rounded);
    return convert<C>(rounded);
  }
  template <class C>
  KERNELS_HD LoadAnywhere<T, C> read_back() const { return {p_, ld_}; }
  KERNELS_HD RoundTo<T> without_effects() const { return {}; }

 private:
  T* p_;
  int64_t ld_;
};

// A map that also writes: stores the value, and passes on what was stored, rounded to T. Each element is written once: an engine
// that reads a row a second time reads what was written here instead of evaluating what came before, and what must be read more
// often (inputs of products, queries, columns in front of rope) does not take a tee at all.
template <class T>
class Tee : public DirectStore<compute_t<T>, T> {
 public:
  static constexpr Role role = Role::map;
  static constexpr bool has_effects = true;
  using DirectStore<compute_t<T>, T>::DirectStore;

  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(this->dst_, "tee: the pointer is null", "tee: the pointer is not aligned for its elements"));
    if (this->ld_ == detail::kOneRow && rows > 1) return invalid("tee: tee(p) has one row, tee(p, ld) several");
    if (this->ld_ < cols && rows > 1) return invalid("tee: the row stride is smaller than cols");
    if (detail::rows_overflow<T>(rows, this->ld_)) return invalid("tee: rows x row stride exceeds 64 bits");
    return {};
  }

  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t row, int64_t col) const {
    const Pack<T, N> rounded = convert<T>(v);
    write<N>(this->dst_ + row * this->ld_ + col, rounded, this->past_cache_);
    return convert<C>(rounded);
  }
  template <class C>
  KERNELS_HD DirectLoad<T, C> read_back() const { return {this->dst_, this->ld_}; }
  using Itself = Tee;
  TeeAnywhere<T> any_column() const { return {this->dst_, this->ld_}; }
  KERNELS_HD RoundTo<T> without_effects() const { return {}; }

 private:
  using DirectStore<compute_t<T>, T>::store;
};

template <class T>
Tee<T> tee(T* p, int64_t ld) {
  static_assert(!std::is_const<T>::value, "tee: the pointer is to const elements");
  return {p, ld};
}
template <class T>
Tee<T> tee(T* p) { return kernels::tee(p, detail::kOneRow); }

namespace detail {
template <class M>
struct is_tee : std::false_type {};
template <class T>
struct is_tee<Tee<T>> : std::true_type {};
template <class T>
struct is_tee<TeeAnywhere<T>> : std::true_type {};
}  // namespace detail

// Two sinks or more, each with its own maps: both(k::store(y16, ld), k::gelu() | k::store(y8, ld)).
template <class A, class B>
class Both : public Functor {
 public:
  static constexpr Role role = Role::sink;
  Both(A a, B b) : a_(a), b_(b) {
    static_assert(detail::is_sink<A> && detail::is_sink<B>, "both() takes two sinks");
    static_assert(!detail::is_row_sink<A> && !detail::is_row_sink<B>,
                  "quantize() cannot be one of both(): write the plain copy with tee() in front of it");
    static_assert(!detail::wants_pairs<A>() && !detail::wants_pairs<B>(), "rope | sink and qkv() cannot be one of both(): use rope | both(sink, sink)");
  }

  static constexpr int widest = detail::widest_of<A>() < detail::widest_of<B>() ? detail::widest_of<A>() : detail::widest_of<B>();
  int max_pack() const { return lesser(detail::max_pack_of(a_), detail::max_pack_of(b_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(a_, rows, cols));
    return detail::check_of(b_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<A>() && detail::takes_any_column<B>();
  auto any_column() const {
    const auto a = detail::any_column(a_);
    const auto b = detail::any_column(b_);
    return Both<std::decay_t<decltype(a)>, std::decay_t<decltype(b)>>(a, b);
  }
  void set_past_cache(bool past) {
    detail::set_past_cache(a_, past);
    detail::set_past_cache(b_, past);
  }

  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    detail::put(a_, v, row, col);
    detail::put(b_, v, row, col);
  }

 private:
  A a_;
  B b_;
};

template <class A, class B>
Both<A, B> both(A a, B b) { return {a, b}; }
// Three sinks and more.
template <class A, class B, class... More>
auto both(A a, B b, More... more) { return both(a, both(b, more...)); }

namespace detail {

// What quantizing to T has to find out: the largest |value|, as the bits of a float. They order as the values do, with NaN above all,
// so that a NaN shows in the scale and with it in all that shares it.
template <class T>
struct LargestSeen {
  uint32_t largest = 0;
  // At least 2^-126 largest T, unless 0: the reciprocal of the scale must not overflow.
  KERNELS_HD float value() const {
    constexpr float least = Largest<T>::value * 0x1p-126f;
    const float x = bit_cast<float>(largest);
    return x > 0.f && x < least ? least : x;
  }
  KERNELS_HD float scale() const { return value() / Largest<T>::value; }
  // What values are multiplied by: the reciprocal of the scale.
  KERNELS_HD float reciprocal() const { return largest > 0 ? Largest<T>::value / value() : 0.f; }

  KERNELS_HD void merge(const LargestSeen& other) { largest = largest > other.largest ? largest : other.largest; }
  template <class C, int N>
  KERNELS_HD void take(const Pack<C, N>& v) {
    const auto bits = transform(v, [](C x) { return bit_cast<uint32_t>(convert<float>(x)) & 0x7fffffffu; });
    merge({fold(bits, [](uint32_t a, uint32_t b) { return a > b ? a : b; })});
  }
};

}  // namespace detail

// Dynamic quantization: each row is divided by its scale, largest |value| / largest T, rounded and stored;
// scales[row] receives the scale, 2^-126 at the least. A row of zeros has scale 0 and codes 0. T: int8_t, float8_e4m3,
// float8_e5m2. Scales for groups of columns, and scales that are given: quantize.h.
// kAnywhere: its packs begin at any column.
template <class T, bool kAnywhere = false>
class Quantize : public Functor {
 public:
  static constexpr Role role = Role::row_sink;
  Quantize(T* q, int64_t ld, float* scales) : q_(q), ld_(ld), scales_(scales) {}

  static constexpr int widest = 16 / int(sizeof(T));
  int max_pack() const { return detail::aligned_pack(q_, ld_, widest); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(q_, "quantize: the pointer is null", "quantize: the pointer is not aligned for its elements"));
    KERNELS_TRY(detail::check_pointer(scales_, "quantize: the pointer to the scales is null", "quantize: the pointer to the scales is not aligned for floats"));
    if (ld_ < cols && rows > 1) return invalid("quantize: the row stride is smaller than cols");
    if (detail::rows_overflow<T>(rows, ld_)) return invalid("quantize: rows x row stride exceeds 64 bits");
    return {};
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane(q_, ld_, rows, cols); }
  using Itself = Quantize;
  static constexpr bool takes_any_column = true;
  Quantize<T, true> any_column() const { return {q_, ld_, scales_}; }

  using State = detail::LargestSeen<T>;
  KERNELS_HD float padding() const { return 0.f; }
  template <class C, int N>
  KERNELS_HD void accumulate(State& s, const Pack<C, N>& v, int) const { s.take(v); }
  KERNELS_HD void merge(State& a, const State& b) const { a.merge(b); }
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes) const { return {lanes.max(s.largest)}; }

  KERNELS_HD float finish(const State& s) const { return s.reciprocal(); }
  KERNELS_HD void write_row(const State& s, int64_t row) const { scales_[row] = s.scale(); }
  template <class C, int N>
  KERNELS_HD void store(const Pack<C, N>& v, float reciprocal, int64_t row, int64_t col) const {
    const auto codes = convert<T>(convert<float>(v) * reciprocal);
    if constexpr (kAnywhere) write_anywhere(q_ + row * ld_ + col, codes);
    else write<N>(q_ + row * ld_ + col, codes);
  }

 private:
  T* q_;
  int64_t ld_;
  float* scales_;
};

template <class T>
Quantize<T> quantize(T* q, int64_t ld, float* scales) { return {q, ld, scales}; }

// ---- Composition: source | maps | sink -----------------------------------------------------------------------------

template <class S, class M>
class MappedSource : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD MappedSource(S source, M map) : source_(source), map_(map) {}

  static constexpr int widest = detail::widest_of<S>() < detail::widest_of<M>() ? detail::widest_of<S>() : detail::widest_of<M>();
  int max_pack() const { return lesser(detail::max_pack_of(source_), detail::max_pack_of(map_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(source_, rows, cols));
    return detail::check_of(map_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>() && detail::takes_any_column<M>(), leads = detail::leads<S>();
  auto any_column() const { return with(detail::any_column(source_), detail::any_column(map_)); }
  auto leading() const { return with(detail::leading(source_), detail::any_column(map_)); }
  template <int N>
  KERNELS_HD auto placed(int64_t row, int64_t col) const { return with(detail::placed<N>(source_, row, col), detail::placed<N>(map_, row, col)); }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return detail::pair(detail::fetch<N>(source_, row, col), detail::fetch_operands<N>(map_, row, col));
  }
  KERNELS_HD auto cached() const { return with(detail::cached(source_), detail::cached(map_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(source_, row, begin, end);
    detail::prefetch(map_, row, begin, end);
  }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::apply_map(map_, detail::resolve(source_, detail::first_of(fetched), row, col), detail::second_of(fetched), row, col);
  }
  KERNELS_HD auto second_pass() const {
    if constexpr (detail::is_tee<M>::value) return map_.template read_back<compute_type<S>>();
    else return with(detail::second_pass(source_), detail::second_pass(map_));
  }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(source_), detail::without_effects(map_)); }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(source_, rows, cols); }
  KERNELS_HD const S& source() const { return source_; }
  KERNELS_HD const M& map() const { return map_; }

 private:
  template <class T, class Map>
  static KERNELS_HD auto with(const T& source, const Map& map) { return MappedSource<T, Map>(source, map); }

  S source_;
  M map_;
};

template <class A, class B>
class MapChain : public Functor {
 public:
  static constexpr Role role = Role::map;
  KERNELS_HD MapChain(A first, B second) : first_(first), second_(second) {}

  static constexpr int widest = detail::widest_of<A>() < detail::widest_of<B>() ? detail::widest_of<A>() : detail::widest_of<B>();
  int max_pack() const { return lesser(detail::max_pack_of(first_), detail::max_pack_of(second_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(first_, rows, cols));
    return detail::check_of(second_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<A>() && detail::takes_any_column<B>();
  auto any_column() const {
    const auto first = detail::any_column(first_);
    const auto second = detail::any_column(second_);
    return MapChain<std::decay_t<decltype(first)>, std::decay_t<decltype(second)>>(first, second);
  }
  template <int N>
  KERNELS_HD MapChain placed(int64_t row, int64_t col) const { return {detail::placed<N>(first_, row, col), detail::placed<N>(second_, row, col)}; }
  void set_past_cache(bool past) {
    detail::set_past_cache(first_, past);
    detail::set_past_cache(second_, past);
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return detail::pair(detail::fetch_operands<N>(first_, row, col), detail::fetch_operands<N>(second_, row, col));
  }
  template <class C, int N, class Fetched>
  KERNELS_HD auto map(const Pack<C, N>& v, const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::apply_map(second_, detail::apply_map(first_, v, detail::first_of(fetched), row, col), detail::second_of(fetched), row, col);
  }
  KERNELS_HD auto without_effects() const {
    auto first = detail::without_effects(first_);
    auto second = detail::without_effects(second_);
    return MapChain<decltype(first), decltype(second)>(first, second);
  }

  KERNELS_HD const A& first() const { return first_; }
  KERNELS_HD const B& second() const { return second_; }

 private:
  A first_;
  B second_;
};

template <class M, class S>
class MappedSink : public Functor {
 public:
  static constexpr Role role = detail::role_of<S>();
  KERNELS_HD MappedSink(M map, S sink) : map_(map), sink_(sink) {}

  static constexpr int widest = detail::widest_of<M>() < detail::widest_of<S>() ? detail::widest_of<M>() : detail::widest_of<S>();
  int max_pack() const { return lesser(detail::max_pack_of(map_), detail::max_pack_of(sink_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(map_, rows, cols));
    return detail::check_of(sink_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<M>() && detail::takes_any_column<S>();
  auto any_column() const {
    const auto map = detail::any_column(map_);
    const auto sink = detail::any_column(sink_);
    return MappedSink<std::decay_t<decltype(map)>, std::decay_t<decltype(sink)>>(map, sink);
  }
  template <int N>
  KERNELS_HD MappedSink placed(int64_t row, int64_t col) const { return {detail::placed<N>(map_, row, col), detail::placed<N>(sink_, row, col)}; }
  void set_past_cache(bool past) {
    detail::set_past_cache(map_, past);
    detail::set_past_cache(sink_, past);
  }

  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    detail::put(sink_, detail::apply_map(map_, v, detail::fetch_operands<N>(map_, row, col), row, col), row, col);
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(sink_, rows, cols); }

  // Engines take a sink apart, to fetch the maps' operands early and to look at mapped values before they are stored.
  KERNELS_HD const M& map() const { return map_; }
  KERNELS_HD const S& end() const { return sink_; }

 private:
  M map_;
  S sink_;
};

namespace detail {

template <class T>
struct is_chain : std::false_type {};
template <class A, class B>
struct is_chain<MapChain<A, B>> : std::true_type {};
template <class T>
struct is_mapped_sink : std::false_type {};
template <class M, class S>
struct is_mapped_sink<MappedSink<M, S>> : std::true_type {};

// The maps in front of a sink, and the sink behind them.
template <class S>
KERNELS_HD decltype(auto) sink_map(const S& sink) {
  if constexpr (is_mapped_sink<S>::value) return sink.map();
  else return Identity{};
}
template <class S>
KERNELS_HD const auto& sink_end(const S& sink) {
  if constexpr (is_mapped_sink<S>::value) return sink.end();
  else return sink;
}
template <class S>
using SinkEnd = std::decay_t<decltype(sink_end(std::declval<const S&>()))>;

// The widest pack of at most `most` that may begin at a column.
KERNELS_HD int pack_at(int64_t col, int most) {
  while (most > 1 && col % most != 0) most /= 2;
  return most;
}

// f(pack, col) for the columns of v, in packs of at most `most`. What f does is compiled once for each width: v is moved down instead.
template <int kWidth = 0, int N, class C, class F>
KERNELS_HD void in_packs(int most, Pack<C, N> v, int64_t col, const F& f) {
  constexpr int width = kWidth > 0 ? kWidth : N;
  if constexpr (width > 1) {
    if (most < width) return in_packs<width / 2>(most, v, col, f);
  }
  KERNELS_ROLLED
  for (int first = 0; first < N; first += width) {
    Pack<C, width> some;
    KERNELS_UNROLL
    for (int i = 0; i < width; ++i) some.v[i] = v.v[i];
    f(some, col + first);
    KERNELS_UNROLL
    for (int i = 0; i + width < N; ++i) v.v[i] = v.v[i + width];
  }
}

// A map that needs other columns than those it changes says itself what source | map and map | sink are: on_source(source),
// on_sink(sink). A sink in front of which columns are in another order says what map | sink is: after(map).
template <class M, class S, class = void>
struct has_on_source : std::false_type {};
template <class M, class S>
struct has_on_source<M, S, void_t<decltype(std::declval<const M&>().on_source(std::declval<const S&>()))>> : std::true_type {};
template <class M, class S, class = void>
struct has_on_sink : std::false_type {};
template <class M, class S>
struct has_on_sink<M, S, void_t<decltype(std::declval<const M&>().on_sink(std::declval<const S&>()))>> : std::true_type {};
template <class A, class B, class S>
struct has_on_sink<MapChain<A, B>, S> {
  static constexpr bool value = has_on_sink<A, S>::value || has_on_sink<B, S>::value;
};
template <class S, class M, class = void>
struct has_after : std::false_type {};
template <class S, class M>
struct has_after<S, M, void_t<decltype(std::declval<const S&>().after(std::declval<const M&>()))>> : std::true_type {};

template <class A, class B>
auto compose(const A& a, const B& b) {
  if constexpr (is_source<A>) {
    // A source takes a chain's links one by one, so that each tee in it is found.
    if constexpr (is_chain<B>::value) return compose(compose(a, b.first()), b.second());
    else if constexpr (has_on_source<B, A>::value) return b.on_source(a);
    else return MappedSource<A, B>(a, b);
  } else if constexpr (is_map<B>) {
    return MapChain<A, B>(a, b);
  } else if constexpr (has_on_sink<A, B>::value) {
    if constexpr (is_chain<A>::value) return compose(a.first(), compose(a.second(), b));
    else return a.on_sink(b);
  } else if constexpr (has_after<B, A>::value) {
    return b.after(a);
  } else if constexpr (is_mapped_sink<B>::value) {
    return compose(compose(a, b.map()), b.end());
  } else {
    static_assert(!wants_pairs<B>(), "a map before qkv(), which is given columns in another order: give each of its sinks its maps, qkv(map | rope | sink, ...)");
    return MappedSink<A, B>(a, b);
  }
}

template <class A, class B>
constexpr bool goes_before = is_map<B> ? is_source<A> || is_map<A> : is_sink<B> && is_map<A>;

}  // namespace detail

// source | map, map | map, map | sink.
template <class A, class B, class = std::enable_if_t<detail::goes_before<A, B>>>
auto operator|(const A& a, const B& b) {
  return detail::compose(a, b);
}

struct Score;

namespace detail {
template <class F>
constexpr bool is_score = std::is_base_of<Score, F>::value;
}  // namespace detail

// Anything else on either side of | is a mistake, and the message says what was meant.
template <class A, class B,
          class = std::enable_if_t<!detail::goes_before<A, B> && (std::is_base_of<Functor, A>::value || std::is_base_of<Functor, B>::value)>,
          class = void>
A operator|(const A& a, const B&) {
  using namespace detail;
  constexpr bool scores = is_score<A> || is_score<B>, call = is_source<A> && is_sink<B>;
  static_assert(!scores, "operator| does not compose scores, & does: k::causal() & k::soft_cap(30)");
  static_assert(!call, "operator| between a source and a sink: they are two arguments of a call, as in k::softmax(stream, source, sink, rows, cols)");
  static_assert(!is_sink<A>, "operator| behind a sink: maps stand before it, map | sink; k::both(sink, sink) writes twice");
  static_assert(scores || is_sink<A> || !is_source<B>, "operator| before a source: maps stand behind it, source | map; k::add(source) adds one to another");
  static_assert(scores || call || is_sink<A> || is_source<B>, "operator| takes source | map, map | map and map | sink: one of these is none of them");
  return a;
}

// 1 + p[col], for models that store their norm weight minus one: affine(one_plus(weight)).
template <class T>
auto one_plus(const T* p) { return row(p) | shift(1.0); }

KERNELS_END
