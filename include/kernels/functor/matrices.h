// Several matrices in one product: gated, joined, stacked, paired and shifted weights, and apart(), which distributes
// their results.
#pragma once

#include <cstdio>
#include <tuple>
#include <utility>

#include "../core/arguments.h"
#include "../core/divisor.h"
#include "dequant.h"

KERNELS_BEGIN

namespace detail {
KERNELS_DETECT(has_check_halves, std::declval<const F&>().check_halves(std::declval<const F&>(), kAny))
template <class S>
Status check_gated(const S& gate, const S& up, int64_t rows, int64_t cols) {
  if constexpr (has_check_halves<S>::value) KERNELS_TRY(gate.check_halves(up, cols));
  KERNELS_TRY(check_of(gate, rows, cols));
  return check_of(up, rows, cols);
}
}  // namespace detail

// Two matrices of one shape and type; each result is made of the products with both (swiglu(), geglu()).
template <class S>
class Gated : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Gated(S gate, S up) : gate_(gate), up_(up) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return lesser(detail::max_pack_of(gate_), detail::max_pack_of(up_)); }
  Status check(int64_t rows, int64_t cols) const { return detail::check_gated(gate_, up_, rows, cols); }
  KERNELS_HD const S& gate() const { return gate_; }
  KERNELS_HD const S& up() const { return up_; }

 private:
  S gate_, up_;
};

namespace detail {
template <class S>
struct Traits<Gated<S>> : PlacedTraits<S> {};
}  // namespace detail

template <class A, class B>
Gated<A> gated(A gate, B up) {
  constexpr bool same = std::is_same<A, B>::value;
  static_assert(detail::is_source<A> && detail::is_source<B>, "gated() takes two sources of weights");
  static_assert(same, "gated() takes two matrices of one type, in the same form: each tile has rows of both");
  if constexpr (same) return {gate, up};
  else return {gate, gate};
}

// The columns of a source from column `first` on.
template <class S>
class ColumnsFrom : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD ColumnsFrom(S source, int64_t first) : source_(source), first_(first) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::pack_at(first_, detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    if (first_ < 0) return invalid("columns: the first column is negative");
    if (cols > INT64_MAX - first_) return invalid("columns: the first column and cols exceed 64 bits together");
    return detail::check_of(source_, rows, first_ + cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row, first_ + col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, row, first_ + col);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(source_)); }
  KERNELS_HD auto cached() const { return with(detail::cached(source_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(source_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(source_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(source_, row, first_ + begin, first_ + end);
  }

 protected:
  S source_;
  int64_t first_;

 private:
  template <class T>
  KERNELS_HD auto with(const T& source) const { return ColumnsFrom<T>(source, first_); }
};

template <class S>
ColumnsFrom<S> columns(S source, int64_t first) {
  static_assert(detail::is_source<S>, "columns() takes a source");
  return {source, first};
}

// One half of a source of 2 n columns: from column 0 or from column n on.
template <class S>
class HalfOf : public ColumnsFrom<S> {
 public:
  using ColumnsFrom<S>::ColumnsFrom;

  Status check_halves(const HalfOf& other, int64_t cols) const {
    static thread_local char text[128];
    const long long n = this->first_ + other.first_;
    if (n == cols) return {};
    std::snprintf(text, sizeof(text), "gate_up, up_gate: a half has %lld columns, and the call %lld", n,
                  static_cast<long long>(cols));
    return invalid(text);
  }
};

// The halves of a source of 2 n columns: the first n columns are the gate and the next n the other operand, or in the
// other order.
template <class S>
Gated<HalfOf<S>> gate_up(S source, int64_t n) {
  static_assert(
      !detail::has_effects<S>,
      "gate_up() reads a row in two places: put tee() behind the gate's activation, swiglu() | tee(), or make its input before with copy()");
  return {{source, 0}, {source, n}};
}
template <class S>
Gated<HalfOf<S>> up_gate(S source, int64_t n) {
  static_assert(
      !detail::has_effects<S>,
      "up_gate() reads a row in two places: put tee() behind the gate's activation, swiglu() | tee(), or make its input before with copy()");
  return {{source, n}, {source, 0}};
}

// gated() sources with an activation behind them: activation(gate) * up.
template <class S, class G>
class Joined;

// Joins the two values that gated() weights or sources give into one: activation(gate) * up, each after a map of its
// own.
template <class Activation, class GateMap = Identity, class UpMap = Identity>
struct Glu : Functor {
  static constexpr Role role = Role::map;
  static constexpr bool joins_two = true;
  Activation activation;
  GateMap gate_map;
  UpMap up_map;
  KERNELS_HD Glu(Activation a = {}, GateMap g = {}, UpMap u = {}) : activation(a), gate_map(g), up_map(u) {}

  // Biases, clamps and other maps of gate and up, before they are joined:
  //   k::swiglu().of(k::bias(gate_bias), k::bias(up_bias))
  template <class A, class B>
  auto of(A gate, B up) const {
    constexpr bool maps = detail::is_map<A> && detail::is_map<B>,
                   once = detail::has_effects<A> || detail::has_effects<B>;
    static_assert(
        maps, "of() takes a map of the gate and one of the other operand: k::swiglu().of(k::bias(b1), k::bias(b3))");
    static_assert(!once, "of() takes maps without effects: put tee() behind the gate, swiglu() | tee()");
    if constexpr (maps && !once)
      return Glu<Activation, A, B>(activation, gate, up);
    else
      return *this;
  }

  static constexpr int widest = detail::widest_of<GateMap>() < detail::widest_of<UpMap>() ? detail::widest_of<GateMap>()
                                                                                          : detail::widest_of<UpMap>();
  int max_pack() const { return lesser(detail::max_pack_of(gate_map), detail::max_pack_of(up_map)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(gate_map, rows, cols));
    KERNELS_TRY(detail::check_of(up_map, rows, cols));
    return detail::check_of(activation, rows, cols);
  }

  template <class C, int N>
  KERNELS_HD Pack<C, N> join(const Pack<C, N>& gate, const Pack<C, N>& up, int64_t row, int64_t col) const {
    if constexpr (detail::MapsValues<Activation, C>::value)
      return detail::map_values(activation, mapped(gate_map, gate, row, col)) * mapped(up_map, up, row, col);
    else return up;
  }
  template <class S>
  Joined<S, Glu> on_source(const Gated<S>& both) const {
    return {both.gate(), both.up(), *this};
  }
  template <class S>
  S on_source(const S& source) const {
    static_assert(
        !detail::is_source<S>,
        "swiglu() and other glu() behind one source: k::gated(gate, up) | k::swiglu() has two, k::gate_up(source, n) | k::swiglu() two halves");
    return source;
  }

  static constexpr bool takes_any_column = detail::takes_any_column<GateMap>() && detail::takes_any_column<UpMap>();
  auto any_column() const {
    const auto gate = detail::any_column(gate_map);
    const auto up = detail::any_column(up_map);
    return Glu<Activation, std::decay_t<decltype(gate)>, std::decay_t<decltype(up)>>(activation, gate, up);
  }

 private:
  template <class M, class C, int N>
  static KERNELS_HD Pack<C, N> mapped(const M& map, const Pack<C, N>& v, int64_t row, int64_t col) {
    return detail::apply_map(map, v, detail::fetch_operands<N>(map, row, col), row, col);
  }
};

template <class S, class G>
class Joined : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Joined(S gate, S up, G glu) : gate_(gate), up_(up), glu_(glu) {}

  static constexpr int widest =
      detail::widest_of<S>() < detail::widest_of<G>() ? detail::widest_of<S>() : detail::widest_of<G>();
  int max_pack() const {
    return lesser(detail::max_pack_of(glu_), lesser(detail::max_pack_of(gate_), detail::max_pack_of(up_)));
  }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(glu_.check(rows, cols));
    return detail::check_gated(gate_, up_, rows, cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return detail::pair(detail::fetch<N>(gate_, row, col), detail::fetch<N>(up_, row, col));
  }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return glu_.join(detail::resolve(gate_, detail::first_of(fetched), row, col),
                     detail::resolve(up_, detail::second_of(fetched), row, col), row, col);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>() && detail::takes_any_column<G>();
  auto any_column() const {
    const auto gate = detail::any_column(gate_);
    const auto up = detail::any_column(up_);
    const auto glu = detail::any_column(glu_);
    return Joined<std::decay_t<decltype(gate)>, std::decay_t<decltype(glu)>>(gate, up, glu);
  }
  KERNELS_HD auto cached() const { return with(detail::cached(gate_), detail::cached(up_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(gate_), detail::second_pass(up_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(gate_), detail::without_effects(up_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(gate_, row, begin, end);
    detail::prefetch(up_, row, begin, end);
  }

 private:
  template <class T>
  KERNELS_HD auto with(const T& gate, const T& up) const {
    return Joined<T, G>(gate, up, glu_);
  }

  S gate_, up_;
  G glu_;
};

// silu(gate) * up, gelu(gate) * up (tanh form), relu(gate) * up, and sigmoid(gate) * up. `gate` is the first matrix.
inline Glu<Silu> swiglu() { return {}; }
inline Glu<GeluTanh> geglu() { return {}; }
inline Glu<Relu> reglu() { return {}; }
inline Glu<Sigmoid> glu() { return {}; }
// With another elementwise map as activation: glu(gelu_erf()), glu(relu2()).
template <class Activation>
auto glu(Activation activation) {
  constexpr bool elementwise = std::is_base_of<Elementwise<Activation>, Activation>::value;
  static_assert(
      elementwise,
      "glu() takes a map of single values: silu(), gelu(), gelu_erf(), relu(), relu2(), sigmoid(), tanh(), or one derived from k::Elementwise");
  if constexpr (elementwise) return Glu<Activation>(activation);
  else return Glu<Silu>();
}

namespace detail {

template <class W>
struct is_paired;

// Where each part of a row, or of a column, is: part i covers [bounds[i], bounds[i + 1]).
template <class Part, int kParts>
struct Sections {
  Part parts[kParts];
  int64_t bounds[kParts + 1];

  // Calls f(part, its beginning) for the part that contains `at`. Parts are compared one by one, so that the compiler
  // knows the address of each part's members.
  template <int i = 0, class F>
  KERNELS_HD auto visit(int64_t at, const F& f) const {
    if constexpr (i + 1 < kParts) {
      if (at >= bounds[i + 1]) return visit<i + 1>(at, f);
    }
    return f(parts[i], i == 0 ? int64_t(0) : bounds[i]);
  }
  int64_t size(int i) const { return int64_t(uint64_t(bounds[i + 1]) - uint64_t(bounds[i])); }
  // Whether the parts together are that large. A sum of sizes that exceeds 64 bits is less than one of its parts.
  bool add_up_to(int64_t n) const {
    for (int i = 0; i < kParts; ++i) {
      if (bounds[i + 1] < bounds[i]) return false;
    }
    return bounds[kParts] == n;
  }
  Status check(const char* negative) const {
    for (int i = 0; i < kParts; ++i) {
      if (size(i) < 0) return invalid(negative);
    }
    return {};
  }
};

// From arguments (part, count, part, count, ...).
template <class Part, size_t... kIndex, class... All>
Sections<Part, int(sizeof...(kIndex))> sections_of(std::index_sequence<kIndex...>, const std::tuple<All...>& all) {
  Sections<Part, int(sizeof...(kIndex))> out{{std::get<2 * kIndex>(all)...},
                                             {0, static_cast<int64_t>(std::get<2 * kIndex + 1>(all))...}};
  for (size_t i = 1; i <= sizeof...(kIndex); ++i)
    out.bounds[i] = int64_t(uint64_t(out.bounds[i]) + uint64_t(out.bounds[i - 1]));
  return out;
}
template <class... All>
auto sections_of(const All&... all) {
  using Part = std::tuple_element_t<0, std::tuple<All...>>;
  return sections_of<Part>(std::make_index_sequence<sizeof...(All) / 2>(), std::tuple<All...>(all...));
}

// Whether all parts in (part, count, part, count, ...) convert to one type.
template <class Part, class... All, size_t... kIndex>
constexpr bool of_one_type(std::index_sequence<kIndex...>) {
  return (std::is_convertible<std::tuple_element_t<2 * kIndex, std::tuple<All...>>, Part>::value && ...);
}
template <class Part, class... All>
constexpr bool of_one_type() {
  return of_one_type<Part, All...>(std::make_index_sequence<sizeof...(All) / 2>());
}

}  // namespace detail

// The rows of several matrices in sequence: stacked(wq, nq, wk, nk, wv, nv). All sources have one type.
template <class S, int kParts>
class Stacked : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = detail::has_effects<S>;
  explicit Stacked(const detail::Sections<S, kParts>& sections) : sections_(sections) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const {
    int most = widest;
    for (const S& part : sections_.parts) most = lesser(most, detail::max_pack_of(part));
    return most;
  }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(sections_.check("stacked: a number of rows is negative"));
    if (!sections_.add_up_to(rows)) return invalid("stacked: the numbers of rows do not add up to N");
    for (int i = 0; i < kParts; ++i) KERNELS_TRY(detail::check_of(sections_.parts[i], sections_.size(i), cols));
    for (int i = 1; i < kParts && detail::is_paired<S>::value; ++i) {
      if (sections_.bounds[i] % 8 != 0)
        return invalid("stacked: a part of paired() or plain() begins at no multiple of 8 rows");
    }
    return {};
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return sections_.visit(row, [&](const S& part, int64_t begin) { return detail::fetch<N>(part, row - begin, col); });
  }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return sections_.visit(
        row, [&](const S& part, int64_t begin) { return detail::resolve(part, fetched, row - begin, col); });
  }
  template <class F>
  bool any(const F& f) const {
    for (const S& part : sections_.parts) {
      if (f(part)) return true;
    }
    return false;
  }
  // Calls f with the matrix that contains a row, and the matrix's first row.
  template <class F>
  KERNELS_HD auto visit(int64_t row, const F& f) const { return sections_.visit(row, f); }
  const detail::Sections<S, kParts>& sections() const { return sections_; }

 private:
  detail::Sections<S, kParts> sections_;
};

namespace detail {
template <class S, int kParts>
struct Traits<Stacked<S, kParts>> : PlacedTraits<S> {};
}  // namespace detail

template <class S, class... Rest>
auto stacked(S first, int64_t rows, Rest... rest) {
  static_assert(detail::is_source<S> && sizeof...(Rest) % 2 == 0,
                "stacked() takes sources, each with its number of rows");
  constexpr bool of_one_type = detail::of_one_type<S, Rest...>();
  static_assert(of_one_type, "stacked() takes sources of one type: plain(w) beside paired(w, rope), say");
  if constexpr (of_one_type)
    return Stacked<S, 1 + int(sizeof...(Rest)) / 2>(detail::sections_of(first, rows, rest...));
  else return Stacked<S, 1>(detail::sections_of(first, rows));
}

// Rows of weights in the order that rope | sink expects, with the two rows of a pair adjacent. In each head of head_dim
// rows, rows i and half + i form pair i; half = 0: no change. Made by paired() and plain() in rope.h.
template <class S>
class Paired : public Functor {
 public:
  static constexpr Role role = Role::source;
  Paired(S source, int head_dim, int half) : source_(source), heads_(head_dim), head_dim_(head_dim), half_(half) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const {
    if (half_ > 0 && (head_dim_ < 1 || rows % head_dim_ != 0)) return invalid("paired: the rows are no whole heads");
    return detail::check_of(source_, rows, cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, origin(row), col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, origin(row), col);
  }
  template <class Of = S>
  KERNELS_HD auto at_row(int64_t row, uint32_t behind = 0) const -> decltype(std::declval<const Of&>().at_row(row)) {
    return source_.at_row(origin(row, behind));
  }
  void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch(source_, origin(row), begin, end); }

  KERNELS_HD const S& source() const { return source_; }
  // The source row for this row, or for the row `behind` it in the same head. In 32 bits, as every thread of a product
  // computes it.
  KERNELS_HD int64_t origin(int64_t row, uint32_t behind = 0) const {
    const uint32_t first = static_cast<uint32_t>(row), begin = first - heads_.remainder(first),
                   at = first - begin + behind;
    return at >= 2 * uint32_t(half_) ? first + behind : begin + at / 2 + (at % 2 != 0 ? uint32_t(half_) : 0);
  }
  // The place in its head of a row that belongs to a pair; otherwise -1.
  int64_t place_in_pairs(int64_t row) const {
    const int64_t at = half_ == 0 ? 0 : row % head_dim_;
    return at < 2 * half_ ? at : -1;
  }
  int64_t half() const { return half_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t head_of(int64_t row) const { return half_ == 0 ? 0 : row / head_dim_; }

 private:
  S source_;
  detail::Divisor heads_;
  int head_dim_, half_;
};

namespace detail {
template <class S>
struct Traits<Paired<S>> : PlacedTraits<S> {};
}  // namespace detail

// Distributes the columns of a result among several sinks: apart(q_sink, nq, k_sink, nk, v_sink, nv). All have one
// type.
template <class S, int kParts>
class Apart : public Functor {
 public:
  static constexpr Role role = Role::sink;
  explicit Apart(const detail::Sections<S, kParts>& sections) : sections_(sections) {}

  static constexpr int widest = detail::widest_of<S>();
  // A pack must not span two parts.
  int max_pack() const {
    int most = widest;
    for (const S& part : sections_.parts) most = lesser(most, detail::max_pack_of(part));
    for (const int64_t bound : sections_.bounds) most = detail::pack_at(bound, most);
    return most;
  }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(sections_.check("apart: a number of columns is negative"));
    if (!sections_.add_up_to(cols)) return invalid("apart: the numbers of columns do not add up to N");
    for (int i = 0; i < kParts; ++i) KERNELS_TRY(detail::check_of(sections_.parts[i], rows, sections_.size(i)));
    return {};
  }

  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    sections_.visit(col, [&](const S& part, int64_t begin) { detail::put(part, v, row, col - begin); });
  }

 private:
  detail::Sections<S, kParts> sections_;
};

template <class S, class... Rest>
auto apart(S first, int64_t cols, Rest... rest) {
  static_assert(detail::is_sink<S> && !detail::is_row_sink<S> && sizeof...(Rest) % 2 == 0,
                "apart() takes sinks, each with its number of columns");
  static_assert(!detail::wants_pairs<S>(), "apart() of rope | sink: use qkv()");
  constexpr bool of_one_type = detail::of_one_type<S, Rest...>();
  static_assert(of_one_type, "apart() takes sinks of one type: qkv() takes three of any");
  if constexpr (of_one_type) return Apart<S, 1 + int(sizeof...(Rest)) / 2>(detail::sections_of(first, cols, rest...));
  else return Apart<S, 1>(detail::sections_of(first, cols));
}

// Rows of weights from row `shift` on.
template <class S>
class Shifted : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Shifted(const S& source, int64_t shift) : source_(source), shift_(shift) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row + shift_, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, row + shift_, col);
  }
  template <class Fetched, class Of = S>
  KERNELS_HD auto unscaled(const Fetched& fetched, int64_t row, int64_t col) const
      -> decltype(std::declval<const Of&>().unscaled(fetched, row, col)) {
    return source_.unscaled(fetched, row + shift_, col);
  }
  template <class Fetched, class Of = S>
  KERNELS_HD auto scale_of(const Fetched& fetched) const -> decltype(std::declval<const Of&>().scale_of(fetched)) {
    return source_.scale_of(fetched);
  }
  KERNELS_HD const S& source() const { return source_; }
  KERNELS_HD int64_t shift() const { return shift_; }

 private:
  S source_;
  int64_t shift_;
};

KERNELS_END
