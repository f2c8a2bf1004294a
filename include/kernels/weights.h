// Sources for the weights of a product, and what goes with them on either side of it.
//
//   k::matmul(ex, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//   k::matmul(ex, x, k::dequant(k::load(w8, K), k::row_scales(s)), out, {M, N, K});
//   k::matmul(ex, x, k::dequant(k::uint4(codes, K), k::group_scales(s, K / 64, 64).zeros(z)), out, {M, N, K});
//   k::matmul(ex, x, k::gated(k::load(w1, K), k::load(w3, K)), k::swiglu() | k::store(h, F), {M, F, K});
//   k::matmul(ex, x, k::stacked(wq, nq, wk, nk, wv, nk), k::apart(q, nq, kk, nk, v, nk), {M, nq + 2 * nk, K});
//   k::matmul(ex, k::normed(k::load(x, K), k::RmsNorm{}) | k::mul(gamma), w, out, {M, N, K});
//
// Weights       dequant(codes, scales)  int4(p, ld)  uint4(p, ld)  gf4(p, ld)  gated(w1, w3)  stacked(w, n, ...)
// Their scales  tensor_scale(p)  row_scales(p)  group_scales(p, ld, group)  block_scales(p, ld, block), each with .zeros(z)
//               experts(w, ids, n, experts)  mixed(w, ids, shares, top_k, n, cols, experts)
// Inputs        normed(source, RmsNorm or LayerNorm)  repeated(source, times)  gathered(source, order, top_k)
// Results       swiglu()  geglu()  reglu()  glu(activation)  apart(sink, n, ...)
//
// The same gates elsewhere, of two sources or of the halves of one: gated(g, u) | swiglu(), gate_up(x, n) | swiglu().
#pragma once

#include <limits>
#include <tuple>
#include <utility>

#include "core/arguments.h"
#include "core/divisor.h"
#include "core/quant.h"
#include "core/row_op.h"
#include "functor.h"

KERNELS_BEGIN

// ---- Quantized weights ---------------------------------------------------------------------------------------------

// One scale for each tile of 2^row_log2 x 2^col_log2 codes, and with it a zero point, if the codes have one:
// weight = (code - zero) * scale. Both may be of any type.
template <class T, class Zero = Nothing>
class Scales {
 public:
  KERNELS_HD Scales(const T* scales, int64_t ld, int row_log2, int col_log2, const Zero* zeros = nullptr)
      : scales_(scales), zeros_(zeros), ld_(ld), row_log2_(row_log2), col_log2_(col_log2) {}

  // A zero point beside each scale.
  template <class Z>
  Scales<T, Z> zeros(const Z* p) const { return {scales_, ld_, row_log2_, col_log2_, p}; }

  static constexpr bool has_zeros = !std::is_same<Zero, Nothing>::value;
  // How many neighbouring columns share a scale, as far as anyone asks: `most` at most.
  int group(int most = 32) const { return col_log2_ < 31 ? lesser(1 << col_log2_, most) : most; }

  // Those of the rows from this one on. In a tile of several rows, of this row only.
  KERNELS_HD Scales at_row(int64_t row) const {
    const int64_t at = (row >> row_log2_) * ld_;
    return {opaque(scales_ + at), ld_, row_log2_, col_log2_, has_zeros ? opaque(zeros_ + at) : nullptr};
  }
  int col_log2() const { return col_log2_; }
  const T* scale_at(int64_t row, int64_t col) const { return scales_ + index(row, col); }
  const Zero* zero_at(int64_t row, int64_t col) const { return zeros_ + index(row, col); }

  struct Fetched {
    Packed<T, 1> scale;
    std::conditional_t<has_zeros, Packed<std::conditional_t<has_zeros, Zero, uint8_t>, 1>, Nothing> zero;
  };
  KERNELS_HD Fetched fetch(int64_t row, int64_t col) const {
    Fetched out;
    const int64_t at = index(row, col);
    out.scale = read<1, Cache::keep>(scales_ + at);
    if constexpr (has_zeros) out.zero = read<1, Cache::keep>(zeros_ + at);
    return out;
  }
  static KERNELS_HD float scale(const Fetched& f) { return convert<float>(f.scale.unpack().v[0]); }
  static KERNELS_HD float zero(const Fetched& f) {
    if constexpr (has_zeros) return convert<float>(f.zero.unpack().v[0]);
    else return 0.f;
  }

  Status check(const char* null = "dequant: a pointer to scales or zeros is null",
               const char* misaligned = "dequant: a pointer to scales or zeros is not aligned for its elements",
               const char* size = "dequant: the group or block size is not a power of two",
               const char* stride = "dequant: the row stride of the scales is negative") const {
    KERNELS_TRY(detail::check_pointer(scales_, null, misaligned));
    if constexpr (has_zeros) KERNELS_TRY(detail::check_pointer(zeros_, null, misaligned));
    if (row_log2_ < 0 || col_log2_ < 0) return invalid(size);
    if (ld_ < 0) return invalid(stride);
    return {};
  }

 private:
  KERNELS_HD int64_t index(int64_t row, int64_t col) const { return (row >> row_log2_) * ld_ + (col >> col_log2_); }

  const T* scales_;
  const Zero* zeros_;
  int64_t ld_;
  int row_log2_, col_log2_;
};

namespace detail {
constexpr int kOneForAll = 62;
constexpr int log2_of(int64_t n) {
  for (int log2 = 0; log2 < 31; ++log2) {
    if (int64_t(1) << log2 == n) return log2;
  }
  return -1;
}
}  // namespace detail

template <class T>
Scales<T> tensor_scale(const T* p) { return {p, 0, detail::kOneForAll, detail::kOneForAll}; }
template <class T>
Scales<T> row_scales(const T* p) { return {p, 1, 0, detail::kOneForAll}; }
// p[row * ld + col / group]; group: a power of two.
template <class T>
Scales<T> group_scales(const T* p, int64_t ld, int group) { return {p, ld, 0, detail::log2_of(group)}; }
// p[row / block * ld + col / block]; block: a power of two.
template <class T>
Scales<T> block_scales(const T* p, int64_t ld, int block) { return {p, ld, detail::log2_of(block), detail::log2_of(block)}; }

// Codes and their scales. Engines that sum over columns multiply by the scale once per pack: they ask for unscaled() and
// scale_of(); everyone else sees an ordinary source.
template <class Codes, class S>
class Dequant : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Dequant(Codes codes, S scales) : codes_(codes), scales_(scales) {}

  static constexpr int widest = detail::widest_of<Codes>();
  int max_pack() const { return lesser(detail::max_pack_of(codes_), scales_.group()); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(scales_.check());
    return detail::check_of(codes_, rows, cols);
  }

  template <class CodesFetched>
  struct Both {
    CodesFetched codes;
    typename S::Fetched scales;
  };
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    const auto codes = detail::fetch<N>(codes_, row, col);
    return Both<std::decay_t<decltype(codes)>>{codes, scales_.fetch(row, col)};
  }
  template <class F>
  KERNELS_HD auto unscaled(const F& fetched, int64_t row, int64_t col) const {
    const auto codes = detail::resolve(codes_, fetched.codes, row, col);
    if constexpr (S::has_zeros) return codes - S::zero(fetched.scales);
    else return codes;
  }
  template <class F>
  KERNELS_HD float scale_of(const F& fetched) const { return S::scale(fetched.scales); }
  template <class F>
  KERNELS_HD auto resolve(const F& fetched, int64_t row, int64_t col) const {
    return unscaled(fetched, row, col) * scale_of(fetched);
  }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch(codes_, row, begin, end); }
  template <class Of = Codes>
  KERNELS_HD auto at_row(int64_t row) const -> decltype(Dequant<decltype(std::declval<const Of&>().at_row(row)), S>{std::declval<const Of&>().at_row(row), std::declval<const S&>()}) {
    return {codes_.at_row(row), scales_.at_row(row)};
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(codes_, rows, cols); }
  KERNELS_HD const Codes& codes() const { return codes_; }
  KERNELS_HD const S& scales() const { return scales_; }

 private:
  Codes codes_;
  S scales_;
};

template <class Codes, class S>
Dequant<Codes, S> dequant(Codes codes, S scales) {
  static_assert(detail::is_source<Codes>, "dequant() takes a source of codes (k::load, k::int4 ...) and scales");
  return {codes, scales};
}

// Weights of which eight lie in a 32-bit word; Format (core/quant.h) says how. ld counts weights and is a multiple of 8.
template <class Format>
class Words : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Words(const uint32_t* words, int64_t ld) : words_(words), ld_(ld) {}

  static constexpr int widest = 32;
  int max_pack() const {
    const int words = detail::aligned_pack(words_, ld_ / 8, 4);
    return 8 * words;
  }
  Status check(int64_t rows, int64_t cols) const {
    if (rows == 0 || cols == 0) return {};
    KERNELS_TRY(detail::check_pointer(words_, "4-bit weights: the pointer is null", "4-bit weights: the pointer is not aligned for words of 32 bits"));
    if (ld_ % 8 != 0 || (ld_ < cols && rows > 1)) return invalid("4-bit weights: the row stride is not a multiple of 8, or is smaller than cols");
    if (detail::rows_overflow<uint32_t>(rows, ld_)) return invalid("4-bit weights: rows x row stride exceeds 64 bits");
    return {};
  }

  template <int N>
  struct Some {
    Packed<uint32_t, (N + 7) / 8> words;
  };
  template <int N>
  KERNELS_HD Some<N> fetch(int64_t row, int64_t col) const {
    static_assert(N < 8 || N % 8 == 0, "whole words, or part of one");
    return {read<(N + 7) / 8, Cache::stream>(at(row) + (col >> 3))};
  }
  KERNELS_HD Words at_row(int64_t row) const { return {opaque(at(row)), ld_}; }
  KERNELS_HD const uint32_t* at(int64_t row) const { return words_ + row * (ld_ / 8); }
  template <int N>
  KERNELS_HD Pack<float, N> resolve(const Some<N>& fetched, int64_t, int64_t col) const {
    if constexpr (N < 8) {
      Pack<float, N> out;
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) out.v[i] = Format::at(fetched.words.words[0], int(col % 8) + i);
      return out;
    } else {
      return detail::decode_words<Format, N>(fetched.words.words);
    }
  }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    prefetch_lines(at(row) + (begin >> 3), at(row) + (end >> 3));
  }

 private:
  const uint32_t* words_;
  int64_t ld_;
};

inline Words<Int4> int4(const uint32_t* words, int64_t ld) { return {words, ld}; }
inline Words<Uint4> uint4(const uint32_t* words, int64_t ld) { return {words, ld}; }
inline Words<Gf4> gf4(const uint32_t* words, int64_t ld) { return {words, ld}; }

// ---- Several matrices at once --------------------------------------------------------------------------------------

// Two matrices of one shape and type: each result is made of a product with either (swiglu(), geglu()).
template <class S>
class Gated : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Gated(S gate, S up) : gate_(gate), up_(up) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return lesser(detail::max_pack_of(gate_), detail::max_pack_of(up_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(gate_, rows, cols));
    return detail::check_of(up_, rows, cols);
  }
  KERNELS_HD const S& gate() const { return gate_; }
  KERNELS_HD const S& up() const { return up_; }

 private:
  S gate_, up_;
};

template <class A, class B>
Gated<A> gated(A gate, B up) {
  constexpr bool same = std::is_same<A, B>::value;
  static_assert(detail::is_source<A> && detail::is_source<B>, "gated() takes two sources of weights");
  static_assert(same, "gated() takes two matrices of one type, in the same form: each tile has rows of both");
  if constexpr (same) return {gate, up};
  else return {gate, gate};
}

// The columns of a source from `first` on.
template <class S>
class ColumnsFrom : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD ColumnsFrom(S source, int64_t first) : source_(source), first_(first) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::pack_at(first_, detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    if (first_ < 0 || cols > std::numeric_limits<int64_t>::max() - first_) return invalid("columns: the first column is negative, or too large");
    return detail::check_of(source_, rows, first_ + cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row, first_ + col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const { return detail::resolve(source_, fetched, row, first_ + col); }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(source_)); }
  KERNELS_HD auto cached() const { return with(detail::cached(source_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(source_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(source_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch(source_, row, first_ + begin, first_ + end); }

 private:
  template <class T>
  KERNELS_HD auto with(const T& source) const { return ColumnsFrom<T>(source, first_); }

  S source_;
  int64_t first_;
};

template <class S>
ColumnsFrom<S> columns(S source, int64_t first) {
  static_assert(detail::is_source<S>, "columns() takes a source");
  return {source, first};
}

// The halves of a source of 2 n columns: the first n columns are the gate's and the next n the other operand's, or the other way around.
template <class S>
Gated<ColumnsFrom<S>> gate_up(S source, int64_t n) {
  static_assert(!detail::has_effects<S>, "gate_up() reads a row in two places: put tee() behind the gate's activation, swiglu() | tee(), or make its input before with copy()");
  return gated(columns(source, 0), columns(source, n));
}
template <class S>
Gated<ColumnsFrom<S>> up_gate(S source, int64_t n) {
  static_assert(!detail::has_effects<S>, "up_gate() reads a row in two places: put tee() behind the gate's activation, swiglu() | tee(), or make its input before with copy()");
  return gated(columns(source, n), columns(source, 0));
}

// What gated() sources become with a gate's activation behind them: activation(gate) * up.
template <class S, class Activation>
class Joined;

// Makes one value of the two that gated() weights, or sources, give: join(gate, up).
template <class Activation>
struct Glu : Functor {
  static constexpr Role role = Role::map;
  Activation activation;
  Glu(Activation a = {}) : activation(a) {}

  template <class C, int N>
  KERNELS_HD Pack<C, N> join(const Pack<C, N>& gate, const Pack<C, N>& up) const { return transform(gate, activation) * up; }
  template <class S>
  Joined<S, Activation> on_source(const Gated<S>& both) const { return {both.gate(), both.up(), *this}; }
};

template <class S, class Activation>
class Joined : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Joined(S gate, S up, Glu<Activation> glu) : gate_(gate), up_(up), glu_(glu) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return lesser(detail::max_pack_of(gate_), detail::max_pack_of(up_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(gate_, rows, cols));
    return detail::check_of(up_, rows, cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::pair(detail::fetch<N>(gate_, row, col), detail::fetch<N>(up_, row, col)); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return glu_.join(detail::resolve(gate_, detail::first_of(fetched), row, col), detail::resolve(up_, detail::second_of(fetched), row, col));
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(gate_), detail::any_column(up_)); }
  KERNELS_HD auto cached() const { return with(detail::cached(gate_), detail::cached(up_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(gate_), detail::second_pass(up_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(gate_), detail::without_effects(up_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(gate_, row, begin, end);
    detail::prefetch(up_, row, begin, end);
  }

 private:
  template <class T>
  KERNELS_HD auto with(const T& gate, const T& up) const { return Joined<T, Activation>(gate, up, glu_); }

  S gate_, up_;
  Glu<Activation> glu_;
};

// silu(gate) * up, gelu(gate) * up with tanh's gelu, relu(gate) * up, and sigmoid(gate) * up, the first of them.
inline Glu<Silu> swiglu() { return {}; }
inline Glu<GeluTanh> geglu() { return {}; }
inline Glu<Relu> reglu() { return {}; }
inline Glu<Sigmoid> glu() { return {}; }
// With another map of single values: glu(gelu_erf()), glu(relu2()).
template <class Activation>
auto glu(Activation activation) {
  constexpr bool elementwise = std::is_base_of<Elementwise<Activation>, Activation>::value;
  static_assert(elementwise, "glu() takes a map of single values: silu(), gelu(), gelu_erf(), relu(), relu2(), sigmoid(), tanh(), or one derived from k::Elementwise");
  if constexpr (elementwise) return Glu<Activation>(activation);
  else return Glu<Silu>();
}

namespace detail {

template <class W>
struct is_paired;

// Where each part of a row, or of a column, lies: part i covers [bounds[i], bounds[i + 1]).
template <class Part, int kParts>
struct Sections {
  Part parts[kParts];
  int64_t bounds[kParts + 1];

  // f(part, where it begins), for the part that `at` lies in. One part is tried after the other: what is known of each then lies at an address
  // that the compiler knows.
  template <int i = 0, class F>
  KERNELS_HD auto visit(int64_t at, const F& f) const {
    if constexpr (i + 1 < kParts) {
      if (at >= bounds[i + 1]) return visit<i + 1>(at, f);
    }
    return f(parts[i], i == 0 ? int64_t(0) : bounds[i]);
  }
  int64_t size(int i) const { return bounds[i + 1] - bounds[i]; }
  Status check(const char* negative) const {
    for (int i = 0; i < kParts; ++i) {
      if (size(i) < 0) return invalid(negative);
    }
    return {};
  }
};

// From part, count, part, count ...
template <class Part, size_t... I, class... All>
Sections<Part, int(sizeof...(I))> sections_of(std::index_sequence<I...>, const std::tuple<All...>& all) {
  Sections<Part, int(sizeof...(I))> out{{std::get<2 * I>(all)...}, {0, static_cast<int64_t>(std::get<2 * I + 1>(all))...}};
  for (size_t i = 1; i <= sizeof...(I); ++i) out.bounds[i] += out.bounds[i - 1];
  return out;
}
template <class... All>
auto sections_of(const All&... all) {
  using Part = std::tuple_element_t<0, std::tuple<All...>>;
  return sections_of<Part>(std::make_index_sequence<sizeof...(All) / 2>(), std::tuple<All...>(all...));
}

}  // namespace detail

// The rows of several matrices, one after the other: stacked(wq, nq, wk, nk, wv, nv). All sources are of one type.
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
    if (rows != sections_.bounds[kParts]) return invalid("stacked: the numbers of rows do not add up to N");
    for (int i = 0; i < kParts; ++i) KERNELS_TRY(detail::check_of(sections_.parts[i], sections_.size(i), cols));
    for (int i = 1; i < kParts && detail::is_paired<S>::value; ++i) {
      if (sections_.bounds[i] % 8 != 0) return invalid("stacked: a part of paired() or plain() begins at no multiple of 8 rows");
    }
    return {};
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return sections_.visit(row, [&](const S& part, int64_t begin) { return detail::fetch<N>(part, row - begin, col); });
  }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return sections_.visit(row, [&](const S& part, int64_t begin) { return detail::resolve(part, fetched, row - begin, col); });
  }
  template <class F>
  bool any(const F& f) const {
    for (const S& part : sections_.parts) {
      if (f(part)) return true;
    }
    return false;
  }
  // The matrix that a row lies in, and its number there.
  template <class F>
  KERNELS_HD auto visit(int64_t row, const F& f) const { return sections_.visit(row, f); }

 private:
  detail::Sections<S, kParts> sections_;
};

template <class S, class... Rest>
auto stacked(S first, int64_t rows, Rest... rest) {
  static_assert(detail::is_source<S> && sizeof...(Rest) % 2 == 0, "stacked() takes sources, each with its number of rows");
  return Stacked<S, 1 + int(sizeof...(Rest)) / 2>(detail::sections_of(first, rows, rest...));
}

// Rows of weights in the order in which rope | sink takes results: those of a pair side by side. In each head of head_dim rows, rows i
// and half + i are pair i; half = 0: as they are. paired() and plain() in rope.h make it.
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
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const { return detail::resolve(source_, fetched, origin(row), col); }
  template <class Of = S>
  KERNELS_HD auto at_row(int64_t row, uint32_t behind = 0) const -> decltype(std::declval<const Of&>().at_row(row)) { return source_.at_row(origin(row, behind)); }
  void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch(source_, origin(row), begin, end); }

  KERNELS_HD const S& source() const { return source_; }
  // The row of the source that is at this one's place, or `behind` it in the same head. In 32 bits, as products find it in every thread.
  KERNELS_HD int64_t origin(int64_t row, uint32_t behind = 0) const {
    const uint32_t first = static_cast<uint32_t>(row), begin = first - heads_.remainder(first), at = first - begin + behind;
    return at >= 2 * uint32_t(half_) ? first + behind : begin + at / 2 + (at % 2 != 0 ? uint32_t(half_) : 0);
  }
  // Of a row: its place in its head if it is one of a pair, otherwise -1.
  int64_t place_in_pairs(int64_t row) const {
    const int64_t at = half_ == 0 ? 0 : row % head_dim_;
    return at < 2 * half_ ? at : -1;
  }
  int64_t half() const { return half_; }
  int64_t head_of(int64_t row) const { return half_ == 0 ? 0 : row / head_dim_; }

 private:
  S source_;
  detail::Divisor heads_;
  int head_dim_, half_;
};

// The columns of a result to several sinks: apart(q_sink, nq, k_sink, nk, v_sink, nv). All sinks are of one type.
template <class S, int kParts>
class Apart : public Functor {
 public:
  static constexpr Role role = Role::sink;
  explicit Apart(const detail::Sections<S, kParts>& sections) : sections_(sections) {}

  static constexpr int widest = detail::widest_of<S>();
  // A pack must not lie in two parts.
  int max_pack() const {
    int most = widest;
    for (const S& part : sections_.parts) most = lesser(most, detail::max_pack_of(part));
    for (const int64_t bound : sections_.bounds) most = detail::pack_at(bound, most);
    return most;
  }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(sections_.check("apart: a number of columns is negative"));
    if (cols != sections_.bounds[kParts]) return invalid("apart: the numbers of columns do not add up to N");
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
  static_assert(detail::is_sink<S> && !detail::is_row_sink<S> && sizeof...(Rest) % 2 == 0, "apart() takes sinks, each with its number of columns");
  static_assert(!detail::wants_pairs<S>(), "apart() of rope | sink: use qkv()");
  return Apart<S, 1 + int(sizeof...(Rest)) / 2>(detail::sections_of(first, cols, rest...));
}

// Rows of weights from `shift` on.
template <class S>
class Shifted : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Shifted(const S& source, int64_t shift) : source_(source), shift_(shift) {}

  static constexpr int widest = detail::widest_of<S>();
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row + shift_, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const { return detail::resolve(source_, fetched, row + shift_, col); }
  template <class Fetched, class Of = S>
  KERNELS_HD auto unscaled(const Fetched& fetched, int64_t row, int64_t col) const -> decltype(std::declval<const Of&>().unscaled(fetched, row, col)) {
    return source_.unscaled(fetched, row + shift_, col);
  }
  template <class Fetched, class Of = S>
  KERNELS_HD auto scale_of(const Fetched& fetched) const -> decltype(std::declval<const Of&>().scale_of(fetched)) { return source_.scale_of(fetched); }
  KERNELS_HD const S& source() const { return source_; }
  KERNELS_HD int64_t shift() const { return shift_; }

 private:
  S source_;
  int64_t shift_;
};

// A mixture of experts, for tokens of which each goes to experts of its own: token m is multiplied with rows ids[m] * n and so
// on of all experts' weights. ids, in the memory that the call computes in, are in [0, experts), or -1: the result
// of such a token is made with the first expert's weights, and is not to be used.
template <class S>
class Experts : public Functor {
 public:
  static constexpr Role role = Role::source;
  Experts(S source, const int32_t* ids, int64_t n, int64_t experts) : source_(source), ids_(ids), n_(n), experts_(experts) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(ids_, "experts: the pointer to the ids is null", "experts: the pointer to the ids is not aligned for its elements"));
    if (experts_ < 1 || rows != n_) return invalid("experts: the number of experts is less than 1, or an expert's rows are not N");
    return detail::check_of(source_, n_ * experts_, cols);
  }
  KERNELS_HD Shifted<S> for_token(int64_t token) const { return {source_, greater<int64_t>(ids_[token], 0) * n_}; }

 private:
  S source_;
  const int32_t* ids_;
  int64_t n_, experts_;
};

// As rows of inputs go to several experts each, token m of the call is row m / top_k of the inputs: repeated(x, top_k).
template <class S>
Experts<S> experts(S source, const int32_t* ids, int64_t n, int64_t experts) {
  static_assert(detail::is_source<S>, "experts() takes a source with the weights of all experts, one after the other");
  return {source, ids, n, experts};
}

// A source of which each row counts `times` times.
template <class S>
class Repeated : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // repeated() does not take a source with any
  KERNELS_HD Repeated(S source, int64_t times) : source_(source), times_(times) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  KERNELS_HD auto cached() const {
    const auto source = detail::cached(source_);
    return Repeated<std::decay_t<decltype(source)>>(source, times_);
  }
  Status check(int64_t rows, int64_t cols) const {
    if (times_ < 1) return invalid("repeated: the number of times is less than 1");
    return detail::check_of(source_, (rows + times_ - 1) / times_, cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row / times_, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const { return detail::resolve(source_, fetched, row / times_, col); }

 private:
  S source_;
  int64_t times_;
};

template <class S>
Repeated<S> repeated(S source, int64_t times) {
  static_assert(!detail::has_effects<S>, "repeated() reads its rows more than once, and tee() or another effect must happen once: make these rows before with copy()");
  return {source, times};
}

// Rows in the order of their experts, which is known on the device alone (sort_by_expert() in router.h): row r is row order[r] / top_k of the source; row 0 where order[r] is negative.
template <class S>
class Gathered : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // gathered() does not take a source with any
  KERNELS_HD Gathered(S source, const int32_t* order, int64_t top_k) : source_(source), order_(order), top_k_(top_k) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  KERNELS_HD auto cached() const {
    const auto source = detail::cached(source_);
    return Gathered<std::decay_t<decltype(source)>>(source, order_, top_k_);
  }
  Status check(int64_t rows, int64_t cols) const {
    if (top_k_ < 1) return invalid("gathered: top_k is less than 1");
    if (top_k_ > std::numeric_limits<int32_t>::max()) return invalid("gathered: top_k exceeds 2^31 - 1");
    KERNELS_TRY(detail::check_pointer(order_, "gathered: the pointer to the order is null", "gathered: the pointer to the order is not aligned for 32-bit numbers"));
    return detail::check_of(source_, (rows + top_k_ - 1) / top_k_, cols);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, origin(row), col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const { return detail::resolve(source_, fetched, origin(row), col); }

  KERNELS_HD const S& source() const { return source_; }
  // The row of the source that is at this one's place.
  KERNELS_HD int64_t origin(int64_t row) const {
    const int32_t at = order_[row];
    return at < 0 ? 0 : static_cast<uint32_t>(at) / static_cast<uint32_t>(top_k_);
  }

 private:
  S source_;
  const int32_t* order_;
  int64_t top_k_;
};

namespace detail {
template <class S>
struct is_gathered : std::false_type {};
template <class S>
struct is_gathered<Gathered<S>> : std::true_type {};
}  // namespace detail

// order: of sort_by_expert(); the source has a row for each token.
template <class S>
Gathered<S> gathered(S source, const int32_t* order, int64_t top_k) {
  static_assert(detail::is_source<S>, "gathered() takes a source, the order of its rows and top_k");
  static_assert(!detail::has_effects<S>, "gathered() reads its rows more than once, and tee() or another effect must happen once: make these rows before with copy()");
  return {source, order, top_k};
}

// The way back from a mixture: a token's result is the sum over its top_k experts of shares[m * top_k + j] times the product of
// its j-th row of inputs with the weights of expert ids[m * top_k + j]. All top_k rows of inputs are one row to the call, and
// K is top_k * cols: mixed(w, ids, shares, top_k, n, cols, experts). An expert -1 has share 0; its row of inputs must be finite.
template <class S, class T>
class Mixed : public Functor {
 public:
  static constexpr Role role = Role::source;
  Mixed(S source, const int32_t* ids, const T* shares, int top_k, int64_t n, int64_t cols, int64_t experts)
      : source_(source), ids_(ids), shares_(shares), top_k_(top_k), n_(n), cols_(cols), experts_(experts) {}

  static constexpr int widest = detail::widest_of<S>();
  // A pack must not belong to two experts.
  int max_pack() const { return detail::pack_at(cols_, detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    const char* const null = "mixed: the pointer to the ids or the shares is null";
    const char* const misaligned = "mixed: the pointer to the ids or the shares is not aligned for its elements";
    KERNELS_TRY(detail::check_pointer(ids_, null, misaligned));
    KERNELS_TRY(detail::check_pointer(shares_, null, misaligned));
    if (experts_ < 1 || top_k_ < 1 || cols_ < 0) return invalid("mixed: top_k or the number of experts is less than 1, or cols is negative");
    if (rows != n_ || cols != top_k_ * cols_) return invalid("mixed: an expert's rows are not N, or K is not top_k x cols");
    return detail::check_of(source_, n_ * experts_, cols_);
  }

  class ForToken : public Functor {
   public:
    static constexpr Role role = Role::source;
    static constexpr int widest = Mixed::widest;
    KERNELS_HD ForToken(const Mixed& all, int64_t token) : all_(all), first_(token * all.top_k_) {}

    template <class F>
    struct Some {
      F weights;
      Packed<T, 1> share;
      bool counts;
    };
    template <int N>
    KERNELS_HD auto fetch(int64_t row, int64_t col) const {
      const int64_t slot = first_ + part(col);
      const int64_t id = all_.ids_[slot];
      const auto weights = detail::fetch<N>(all_.source_, greater<int64_t>(id, 0) * all_.n_ + row, col - part(col) * all_.cols_);
      return Some<std::decay_t<decltype(weights)>>{weights, read<1, Cache::keep>(all_.shares_ + slot), id >= 0};
    }
    template <class F>
    KERNELS_HD auto unscaled(const F& fetched, int64_t row, int64_t col) const {
      return detail::resolve(all_.source_, fetched.weights, row, col - part(col) * all_.cols_);
    }
    template <class F>
    KERNELS_HD float scale_of(const F& fetched) const { return fetched.counts ? convert<float>(fetched.share.unpack().v[0]) : 0.f; }
    template <class F>
    KERNELS_HD auto resolve(const F& fetched, int64_t row, int64_t col) const { return unscaled(fetched, row, col) * scale_of(fetched); }

   private:
    KERNELS_HD int part(int64_t col) const { return int(static_cast<uint32_t>(col) / static_cast<uint32_t>(all_.cols_)); }

    const Mixed& all_;
    int64_t first_;
  };
  KERNELS_HD ForToken for_token(int64_t token) const { return {*this, token}; }

 private:
  S source_;
  const int32_t* ids_;
  const T* shares_;
  int top_k_;
  int64_t n_, cols_, experts_;
};

template <class S, class T>
Mixed<S, T> mixed(S source, const int32_t* ids, const T* shares, int top_k, int64_t n, int64_t cols, int64_t experts) {
  static_assert(detail::is_source<S>, "mixed() takes a source with the weights of all experts, one after the other");
  return {source, ids, shares, top_k, n, cols, experts};
}

// ---- Inputs --------------------------------------------------------------------------------------------------------

// A row normalized on the way in, without a pass of its own: normed(load(x, K), RmsNorm{}.eps(e)) | mul(gamma), or with
// LayerNorm{} | affine(gamma, beta). Products find out the row's state before they multiply, and then read through with().
template <class S, class Options>
class Normed : public Functor {
 public:
  static constexpr Role role = Role::source;
  using C = compute_type<S>;
  using Op = decltype(std::declval<const Options&>().template op<C>());
  using State = typename Op::State;
  Normed(S source, Options options) : Normed(source, options.template op<C>(), options.check()) {}
  KERNELS_HD Normed(S source, Op op, Status checked) : source_(source), op_(op), checked_(checked) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  // For engines that do not know of it, and would not normalize.
  Status check(int64_t, int64_t) const { return unsupported("normed: only products take normalized inputs"); }
  Status check_input(int64_t rows, int64_t cols) const {
    KERNELS_TRY(checked_);
    return detail::check_of(source_, rows, cols);
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(source_, rows, cols); }
  KERNELS_HD const S& before() const { return source_; }
  KERNELS_HD const Op& op() const { return op_; }
  // The same source for a row of which the state is known, and what is then left to do to its values.
  KERNELS_HD Normed with(const State& state, const Linear<C>& linear) const {
    Normed out = *this;
    out.state_ = state;
    out.linear_ = linear;
    return out;
  }
  KERNELS_HD Normed with(const State& state, const Count<C>& cols) const { return with(state, op_.linear(state, op_.finish(state, cols))); }

  KERNELS_HD auto cached() const {
    const auto source = detail::cached(source_);
    return Normed<std::decay_t<decltype(source)>, Options>(source, op_, checked_);
  }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return linear_(op_.center(detail::resolve(source_, fetched, row, col), state_));
  }

 private:
  S source_;
  Op op_;
  Status checked_;
  State state_;
  Linear<C> linear_{C(1), C(0)};
};

template <class S, class Options>
Normed<S, Options> normed(S source, Options options) {
  static_assert(detail::is_source<S>, "normed() takes a source and RmsNorm or LayerNorm");
  return {source, options};
}

namespace detail {
template <class S>
struct is_normed : std::false_type {};
template <class S, class Options>
struct is_normed<Normed<S, Options>> : std::true_type {};
}  // namespace detail

// ---- A product -----------------------------------------------------------------------------------------------------

// result(m, n) = sum over k of x(m, k) * w(n, k), which the sink gets as row m, column n. x has a row for each token, w one
// for each output: both are read along K.
struct MatmulShape {
  int64_t m, n, k;
};

// Several products in one call, each with n rows of weights of its own: product g has those from g * n on. Its tokens are the m
// rows from g * m on, or, with offsets (count + 1 of them, in the memory that the call computes in), the rows
// offsets[g] to offsets[g + 1] - 1; m is then the number of rows of all products, or more.
struct Groups {
  int64_t count = 1;
  const int32_t* offsets = nullptr;

  bool several() const { return count != 1 || offsets != nullptr; }
};

namespace detail {

template <class W>
struct is_dequant : std::false_type {};
template <class Codes, class S>
struct is_dequant<Dequant<Codes, S>> : std::true_type {};

template <class W>
struct is_stacked : std::false_type {};
template <class S, int kParts>
struct is_stacked<Stacked<S, kParts>> : std::true_type {};

template <class W>
struct is_paired : std::false_type {};
template <class S>
struct is_paired<Paired<S>> : std::true_type {};

template <class W>
struct is_shifted : std::false_type {};
template <class S>
struct is_shifted<Shifted<S>> : std::true_type {};

// Weights that differ from token to token.
template <class W, class = void>
struct has_for_token : std::false_type {};
template <class W>
struct has_for_token<W, void_t<decltype(std::declval<const W&>().for_token(kAny))>> : std::true_type {};
template <class W>
struct is_gated : std::false_type {};
template <class S>
struct is_gated<Gated<S>> : std::true_type {};
template <class W>
constexpr bool by_token = has_for_token<W>::value;
template <class S>
constexpr bool by_token<Gated<S>> = by_token<S>;

// The weights of one token.
template <class W>
KERNELS_HD decltype(auto) for_token(const W& w, int64_t token) {
  if constexpr (!by_token<W>) {
    return (w);
  } else if constexpr (is_gated<W>::value) {
    using One = std::decay_t<decltype(for_token(w.gate(), token))>;
    return Gated<One>(for_token(w.gate(), token), for_token(w.up(), token));
  } else {
    return w.for_token(token);
  }
}

// What a product is computed in: double where an operand is, float otherwise.
template <class X, class W>
struct ProductType {
  using type = std::conditional_t<std::is_same<compute_type<X>, double>::value, double, compute_type<W>>;
};
template <class X, class S>
struct ProductType<X, Gated<S>> : ProductType<X, S> {};
template <class X, class W>
using product_type = typename ProductType<X, W>::type;

// The source at the bottom of a chain of maps.
template <class S>
struct is_mapped_source : std::false_type {};
template <class S, class M>
struct is_mapped_source<MappedSource<S, M>> : std::true_type {};
template <class S>
KERNELS_HD decltype(auto) base_of(const S& source) {
  if constexpr (is_mapped_source<S>::value) return base_of(source.source());
  else return (source);
}
// The same chain on f(the source at its bottom).
template <class S, class F>
KERNELS_HD auto on_base(const S& source, const F& f) {
  if constexpr (is_mapped_source<S>::value) {
    auto before = on_base(source.source(), f);
    return MappedSource<decltype(before), std::decay_t<decltype(source.map())>>(before, source.map());
  } else {
    return f(source);
  }
}
template <class S>
constexpr bool starts_normed = is_normed<std::decay_t<decltype(base_of(std::declval<const S&>()))>>::value;

// The map that makes one value of the two that gated weights give, and the sink behind it.
template <class M>
struct is_glu : std::false_type {};
template <class A>
struct is_glu<Glu<A>> : std::true_type {};
template <class M>
KERNELS_HD decltype(auto) first_map(const M& map) {
  if constexpr (is_chain<M>::value) return first_map(map.first());
  else return (map);
}
template <class M>
KERNELS_HD auto later_maps(const M& map) {
  if constexpr (is_chain<M>::value) {
    if constexpr (is_chain<std::decay_t<decltype(map.first())>>::value) {
      auto before = later_maps(map.first());
      return MapChain<decltype(before), std::decay_t<decltype(map.second())>>(before, map.second());
    } else {
      return map.second();
    }
  } else {
    return Identity{};
  }
}
template <class Out>
constexpr bool joins = is_glu<std::decay_t<decltype(first_map(sink_map(std::declval<const Out&>())))>>::value;

// Whether matmul takes them.
template <class W>
constexpr bool takes_weights() {
  if constexpr (is_gated<W>::value || by_token<W>) return true;
  else return takes_source<W>();
}
template <class X, class W, class Out>
constexpr bool takes_product() {
  constexpr bool right = takes_source<X>() && takes_weights<W>() && takes_sink<Out>();
  if constexpr (right) {
    static_assert(!is_row_sink<SinkEnd<Out>>, "quantize() needs a whole row of results: give it a scale, k::quantize(q, ld, k::tensor_scale(s)), or quantize in the operation that follows");
    static_assert(is_gated<W>::value == joins<Out>, "gated() weights go with a sink that begins with swiglu(), geglu() or another glu()");
    static_assert(!has_effects<X> && !has_effects<W>, "products read inputs and weights more than once, and tee() or another effect must happen once: write it in the operation that makes them, or make them before with copy()");
    return !is_row_sink<SinkEnd<Out>> && is_gated<W>::value == joins<Out>;
  } else {
    return false;
  }
}

template <class X, class W, class Out>
Status check_matmul(const X& x, const W& w, const Out& out, const MatmulShape& shape, bool& empty, const Groups& groups = {}) {
  empty = true;
  if (shape.m < 0 || shape.n < 0 || shape.k < 0) return invalid("matmul: M, N or K is negative");
  constexpr int64_t limit = int64_t(1) << 30;
  if (shape.k > limit) return unsupported("matmul: K exceeds 2^30");
  if (shape.n > std::numeric_limits<int32_t>::max()) return unsupported("matmul: N exceeds 2^31 - 1");
  if (groups.count < 0) return invalid("matmul: the number of groups is negative");
  if (groups.count > std::numeric_limits<int32_t>::max()) return unsupported("matmul: there are more than 2^31 - 1 groups");
  if (shape.m == 0 || shape.n == 0 || groups.count == 0) return {};
  const int64_t most = std::numeric_limits<int64_t>::max() / groups.count;
  if (shape.n > most || (groups.offsets == nullptr && shape.m > most)) return invalid("matmul: groups x M or groups x N exceeds 64 bits");
  const int64_t rows = groups.offsets == nullptr ? groups.count * shape.m : shape.m;
  if (groups.offsets != nullptr && reinterpret_cast<uintptr_t>(groups.offsets) % alignof(int32_t) != 0) return invalid("matmul: the pointer to the offsets of groups is not aligned for its elements");
  if constexpr (starts_normed<X>) KERNELS_TRY(base_of(x).check_input(rows, shape.k).of("x").in("matmul"));
  else KERNELS_TRY(check_of(x, rows, shape.k).of("x").in("matmul"));
  KERNELS_TRY(check_of(w, groups.count * shape.n, shape.k).of("w").in("matmul"));
  KERNELS_TRY(check_of(out, rows, shape.n).of("out").in("matmul"));
  const Plane results = plane_of(out, rows, shape.n);
  // With offsets M may be more than there are.
  if (groups.offsets == nullptr && share_bytes(plane_of(x, rows, shape.k), results)) return invalid("matmul: out overlaps x, which every block of results reads");
  if (groups.offsets == nullptr && share_bytes(plane_of(w, groups.count * shape.n, shape.k), results)) return invalid("matmul: out overlaps w");
  empty = false;
  return {};
}

}  // namespace detail

KERNELS_END
