// Sources for the weights of a product, for its inputs, and sinks for its results.
//
//   k::matmul(ex, k::load(x, K), k::load(w, K), k::bias(b) | k::gelu() | k::store(y, N), {M, N, K});
//   k::matmul(ex, x, k::dequant(k::load(w8, K), k::row_scales(s)), out, {M, N, K});
//   k::matmul(ex, x, k::dequant(k::uint4(codes, K), k::group_scales(s, K / 64, 64).zeros(z)), out, {M, N, K});
//   k::matmul(ex, x, k::gated(k::load(w1, K), k::load(w3, K)), k::swiglu() | k::store(h, F), {M, F, K});
//   k::matmul(ex, x, k::stacked(wq, nq, wk, nk, wv, nk), k::apart(q, nq, kk, nk, v, nk), {M, nq + 2 * nk, K});
//   k::matmul(ex, k::normed(k::load(x, K), k::RmsNorm{}) | k::mul(gamma), w, out, {M, N, K});
//
// Weights       dequant(codes, scales)  int4(p, ld)  uint4(p, ld)  fp4(p, ld)  gf4(p, ld)
//               gated(w1, w3)  stacked(w, n, ...)
// Their scales  tensor_scale(p)  row_scales(p)  group_scales(p, ld, group)  block_scales(p, ld, block), each with
// .zeros(z)
//               experts(w, ids, n, experts)  mixed(w, ids, shares, top_k, n, cols, experts)
// Inputs        normed(source, RmsNorm or LayerNorm)  repeated(source, times)  gathered(source, order, top_k)
// Results       swiglu()  geglu()  reglu()  glu(activation)  apart(sink, n, ...)
//
// Outside of products: gated(g, u) | swiglu() joins two sources, gate_up(x, n) | swiglu() the halves of one.
#pragma once

#include "core/row_op.h"
#include "functor/dequant.h"
#include "functor/experts.h"
#include "functor/matrices.h"

KERNELS_BEGIN

// ---- Inputs --------------------------------------------------------------------------------------------------------

// Normalizes the rows of x while a product reads them, without a pass of its own: normed(load(x, K), RmsNorm{}.eps(e))
// | mul(gamma), or with LayerNorm{} | affine(gamma, beta). The product first computes each row's state, then reads
// through with().
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
  // For engines that do not handle this source, and so would not normalize.
  Status check(int64_t, int64_t) const {
    return unsupported(
        "normed: only products take normalized inputs: normed(gathered(...)), not gathered(normed(...))");
  }
  Status check_input(int64_t rows, int64_t cols) const {
    KERNELS_TRY(checked_);
    return detail::check_of(source_, rows, cols);
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(source_, rows, cols); }
  KERNELS_HD const S& before() const { return source_; }
  KERNELS_HD const Op& op() const { return op_; }
  // The same source for a row whose state is known, with the linear function that remains to be applied.
  KERNELS_HD Normed with(const State& state, const Linear<C>& linear) const {
    Normed out = *this;
    out.state_ = state;
    out.linear_ = linear;
    return out;
  }
  KERNELS_HD Normed with(const State& state, const Count<C>& cols) const {
    return with(state, op_.linear(state, op_.finish(state, cols)));
  }

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
auto normed(S source, Options options) {
  constexpr bool number = std::is_arithmetic<Options>::value;
  static_assert(detail::is_source<S>, "normed() takes a source and RmsNorm or LayerNorm");
  static_assert(!number, "normed(): a number where there must be options: k::RmsNorm{}.eps(1e-6), or k::LayerNorm");
  if constexpr (number) return Normed<S, RmsNorm>(source, RmsNorm{});
  else return Normed<S, Options>(source, options);
}

namespace detail {
template <class S>
struct is_normed : std::false_type {};
template <class S, class Options>
struct is_normed<Normed<S, Options>> : std::true_type {};
template <class S, class Options>
struct Traits<Normed<S, Options>> : ComputedTraits<S> {};
}  // namespace detail

// ---- A product -----------------------------------------------------------------------------------------------------

// result(m, n) = sum over k of x(m, k) * w(n, k); the sink gets it at row m, column n. x has a row for each token, w a
// row for each output; both are read along K.
struct MatmulShape {
  int64_t m, n, k;
};

// Grouped products: `count` products in one call. Product g uses rows g * n to g * n + n - 1 of the weights. Without
// offsets its tokens are rows g * m to g * m + m - 1. With offsets (count + 1 numbers, in the memory space in which the
// call runs) its tokens are rows offsets[g] to offsets[g + 1] - 1, and m is at least the number of rows of all
// products, and at most the number of rows that x has.
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
// Whether rows are in the order of pairs: then parts and heads begin at multiples of 8 rows.
template <class W>
constexpr bool in_heads = is_paired<W>::value;
template <class S, int kParts>
constexpr bool in_heads<Stacked<S, kParts>> = is_paired<S>::value;

template <class W>
struct is_shifted : std::false_type {};
template <class S>
struct is_shifted<Shifted<S>> : std::true_type {};

// Weights that depend on the token.
KERNELS_DETECT(has_for_token, std::declval<const F&>().for_token(kAny))
template <class W>
struct is_gated : std::false_type {};
template <class S>
struct is_gated<Gated<S>> : std::true_type {};
template <class W>
struct wraps_gated : std::false_type {};
template <class S>
struct wraps_gated<Experts<Gated<S>>> : std::true_type {};
template <class S, class T>
struct wraps_gated<Mixed<Gated<S>, T>> : std::true_type {};
template <class W>
constexpr bool by_token = has_for_token<W>::value;
template <class S>
constexpr bool by_token<Gated<S>> = by_token<S>;

// The weights for one token.
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

// The type in which a product is computed: double if an operand is, otherwise float.
template <class X, class W>
struct ProductType {
  using type = std::conditional_t<std::is_same<compute_type<X>, double>::value, double, compute_type<W>>;
};
template <class X, class S>
struct ProductType<X, Gated<S>> : ProductType<X, S> {};
template <class X, class W>
using product_type = typename ProductType<X, W>::type;

// The source at the beginning of a chain of maps.
template <class S>
struct is_mapped_source : std::false_type {};
template <class S, class M>
struct is_mapped_source<MappedSource<S, M>> : std::true_type {};
template <class S>
KERNELS_HD decltype(auto) base_of(const S& source) {
  if constexpr (is_mapped_source<S>::value) return base_of(source.source());
  else return (source);
}
// The same chain with f(source) in place of the source at its beginning.
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

// The map that joins the two results of gated weights into one value, and the sink behind it.
template <class M>
struct is_glu : std::false_type {};
template <class A, class G, class U>
struct is_glu<Glu<A, G, U>> : std::true_type {};
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
// Passes the two results of gated weights through that map and on to the sink; operands are fetched here.
template <class S, class M, class C, int N, class Prepared = Nothing>
KERNELS_HD void put_joined(const S& sink, const M& map, const Pack<C, N>& gate, const Pack<C, N>& up, int64_t row,
                           int64_t col, const Prepared& prepared = {}) {
  put_mapped(sink, later_maps(map), first_map(map).join(gate, up, row, col), row, col, prepared);
}

// 32-bit words that are read as integers: 4-bit codes without int4() or uint4(), a mistake.
template <class W>
struct IsWords : std::false_type {};
template <class T, class C, Cache kCache>
struct IsWords<DirectLoad<T, C, kCache>> : std::integral_constant<bool, std::is_integral<T>::value && sizeof(T) == 4> {
};
template <class S, int kParts>
struct IsWords<Stacked<S, kParts>> : AnyPart<IsWords, S> {};

// Whether matmul accepts these weights; if not, a static_assert says why.
template <class W>
constexpr bool takes_weights() {
  constexpr bool words = AnyPart<IsWords, W>::value;
  static_assert(!words,
                "weights are packed words: k::dequant(k::int4(p, ld), scales), with k::uint4 and k::fp4 likewise, or "
                "k::gf4(p, ld) alone");
  if constexpr (words) return false;
  else if constexpr (is_gated<W>::value || by_token<W>) return true;
  else return takes_source<W>();
}
template <class X, class W, class Out>
constexpr bool takes_product() {
  constexpr bool right = takes_source<X>() && takes_weights<W>() && takes_sink<Out>();
  if constexpr (right) {
    static_assert(!by_head<Out>,
                  "scales of heads are found by norm_heads(), behind a product that stores what qkv() would be given");
    static_assert(by_head<Out> || !is_row_sink<SinkEnd<Out>>,
                  "quantize() needs a whole row of results: give it a scale, k::quantize(q, ld, k::tensor_scale(s)), "
                  "or quantize in the operation that follows");
    static_assert(
        !wraps_gated<W>::value,
        "experts() and mixed() take one matrix, and gated() takes two of these: gated(experts(w1, ...), experts(w3, ...))");
    constexpr bool one_of_two = !wraps_gated<W>::value && is_gated<W>::value != joins<Out>;
    static_assert(!one_of_two || joins<Out>,
                  "gated() weights go with a sink that begins with swiglu(), geglu() or another glu(); maps of either "
                  "before that are swiglu().of(k::bias(b1), k::bias(b3))");
    static_assert(!one_of_two || is_gated<W>::value,
                  "swiglu(), geglu() and other glu() make one result of two, and need k::gated(w1, w3) as weights");
    static_assert(
        !has_effects<X> && !has_effects<W>,
        "products read inputs and weights more than once, and tee() or another effect must happen once: write it in the operation that makes them, or make them before with copy()");
    return !is_row_sink<SinkEnd<Out>> && is_gated<W>::value == joins<Out>;
  } else {
    return false;
  }
}

// For weights whose rows are paired: the row in memory from which row `row` of the product is made.
template <class W>
KERNELS_HD int64_t origin_of(const W& w, int64_t row) {
  if constexpr (is_paired<W>::value) return w.origin(row);
  else return row;
}
template <class S, int kParts>
KERNELS_HD int64_t origin_of(const Stacked<S, kParts>& w, int64_t row) {
  return w.visit(row, [&](const S& part, int64_t begin) { return begin + origin_of(part, row - begin); });
}
// Whether a sink gets the columns that it expects, in pairs or in their usual order. Checked at the first and last
// columns and wherever different head sizes would show.
template <class W, class Out>
bool pairs_agree(const W& w, const Out& out, int64_t n) {
  const auto agree = [&](int64_t col) {
    const ColumnPair taken = pair_at(out, col);
    return col + 1 >= n || (taken.first == origin_of(w, col) && taken.second == origin_of(w, col + 1));
  };
  if (!agree(0)) return false;
  for (int64_t col = 2; col < n; col *= 2) {
    if (!agree(col) || !agree((n - col) / 2 * 2)) return false;
  }
  return true;
}

template <class X, class W, class Out>
Status check_matmul(const X& x, const W& w, const Out& out, const MatmulShape& shape, bool& empty,
                    const Groups& groups = {}) {
  empty = true;
  if (shape.m < 0) return invalid("matmul: M is negative");
  if (shape.n < 0) return invalid("matmul: N is negative");
  if (shape.k < 0) return invalid("matmul: K is negative");
  constexpr int64_t limit = int64_t(1) << 30;
  if (shape.k > limit) return unsupported("matmul: K exceeds 2^30");
  if (shape.n > INT32_MAX) return unsupported("matmul: N exceeds 2^31 - 1");
  if (groups.count < 0) return invalid("matmul: the number of groups is negative");
  if (groups.count > INT32_MAX) return unsupported("matmul: there are more than 2^31 - 1 groups");
  if (shape.m == 0 || shape.n == 0 || groups.count == 0) return {};
  const int64_t most = INT64_MAX / groups.count;
  if (shape.n > most || (groups.offsets == nullptr && shape.m > most))
    return invalid("matmul: groups x M or groups x N exceeds 64 bits");
  const int64_t rows = groups.offsets == nullptr ? groups.count * shape.m : shape.m;
  if (groups.offsets != nullptr && reinterpret_cast<uintptr_t>(groups.offsets) % alignof(int32_t) != 0)
    return invalid("matmul: the pointer to the offsets of groups is not aligned for its elements");
  if constexpr (starts_normed<X>) KERNELS_TRY(base_of(x).check_input(rows, shape.k).of("x").in("matmul"));
  else KERNELS_TRY(check_of(x, rows, shape.k).of("x").in("matmul"));
  KERNELS_TRY(check_of(w, groups.count * shape.n, shape.k).of("w").in("matmul"));
  const Status fits = check_of(out, rows, shape.n);
  if (is_gated<W>::value && fits.code() == Code::invalid && check_of(out, rows, shape.n / 2))
    return invalid(
        "matmul: out: fewer columns than N, which counts the results of a gate: gated(w1, w3) has N rows in each "
        "matrix");
  KERNELS_TRY(fits.of("out").in("matmul"));
  constexpr bool turns = wants_pairs<Out>(), in_order = !turns && !in_heads<W>;
  if constexpr (!in_order && !by_token<W>) {
    if (!pairs_agree(w, out, shape.n))
      return invalid(turns ? "matmul: out turns other pairs than w has side by side: rope | sink goes with paired(w, "
                             "rope) of the same rope"
                           : "matmul: w has pairs side by side, and out does not turn them: paired(w, rope) goes with "
                             "rope | sink of the same rope");
  }
  const Plane results = plane_of(out, rows, shape.n);
  // With offsets, M may exceed the number of rows.
  if (groups.offsets == nullptr && share_bytes(plane_of(x, rows, shape.k), results))
    return invalid("matmul: out overlaps x, which every block of results reads");
  if (groups.offsets == nullptr && share_bytes(plane_of(w, groups.count * shape.n, shape.k), results))
    return invalid("matmul: out overlaps w");
  empty = false;
  return {};
}

}  // namespace detail

KERNELS_END
