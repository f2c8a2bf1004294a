// operator|: composes sources, maps and sinks.
#pragma once

#include "sink.h"

KERNELS_BEGIN

template <class S, class M>
class MappedSource : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD MappedSource(S source, M map) : source_(source), map_(map) {}

  static constexpr int widest =
      detail::widest_of<S>() < detail::widest_of<M>() ? detail::widest_of<S>() : detail::widest_of<M>();
  int max_pack() const { return lesser(detail::max_pack_of(source_), detail::max_pack_of(map_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_of(source_, rows, cols));
    return detail::check_of(map_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>() && detail::takes_any_column<M>(),
                        leads = detail::leads<S>();
  auto any_column() const { return with(detail::any_column(source_), detail::any_column(map_)); }
  auto leading() const { return with(detail::leading(source_), detail::any_column(map_)); }
  template <int N>
  KERNELS_HD auto placed(int64_t row, int64_t col) const {
    return with(detail::placed<N>(source_, row, col), detail::placed<N>(map_, row, col));
  }

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
    return detail::apply_map(map_, detail::resolve(source_, detail::first_of(fetched), row, col),
                             detail::second_of(fetched), row, col);
  }
  KERNELS_HD auto second_pass() const {
    if constexpr (detail::is_tee<M>::value) return map_.template read_back<compute_type<S>>();
    else return with(detail::second_pass(source_), detail::second_pass(map_));
  }
  KERNELS_HD auto without_effects() const {
    return with(detail::without_effects(source_), detail::without_effects(map_));
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(source_, rows, cols); }
  KERNELS_HD const S& source() const { return source_; }
  KERNELS_HD const M& map() const { return map_; }

 private:
  template <class T, class Map>
  static KERNELS_HD auto with(const T& source, const Map& map) { return MappedSource<T, Map>(source, map); }

  S source_;
  M map_;
};

namespace detail {
template <class S, class M>
struct Traits<MappedSource<S, M>> : ComputedTraits<S> {};
}  // namespace detail

template <class A, class B>
class MapChain : public Functor {
 public:
  static constexpr Role role = Role::map;
  KERNELS_HD MapChain(A first, B second) : first_(first), second_(second) {}

  static constexpr int widest =
      detail::widest_of<A>() < detail::widest_of<B>() ? detail::widest_of<A>() : detail::widest_of<B>();
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
  KERNELS_HD MapChain placed(int64_t row, int64_t col) const {
    return {detail::placed<N>(first_, row, col), detail::placed<N>(second_, row, col)};
  }
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
    return detail::apply_map(second_, detail::apply_map(first_, v, detail::first_of(fetched), row, col),
                             detail::second_of(fetched), row, col);
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

namespace detail {
template <class A, class B>
struct Traits<MapChain<A, B>> : NoTraits {
  static constexpr bool reads_matrix = Traits<A>::reads_matrix || Traits<B>::reads_matrix;
};
}  // namespace detail

template <class M, class S>
class MappedSink : public Functor {
 public:
  static constexpr Role role = detail::role_of<S>();
  KERNELS_HD MappedSink(M map, S sink) : map_(map), sink_(sink) {}

  static constexpr int widest =
      detail::widest_of<M>() < detail::widest_of<S>() ? detail::widest_of<M>() : detail::widest_of<S>();
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
  KERNELS_HD MappedSink placed(int64_t row, int64_t col) const {
    return {detail::placed<N>(map_, row, col), detail::placed<N>(sink_, row, col)};
  }
  void set_past_cache(bool past) {
    detail::set_past_cache(map_, past);
    detail::set_past_cache(sink_, past);
  }

  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    detail::put(sink_, detail::apply_map(map_, v, detail::fetch_operands<N>(map_, row, col), row, col), row, col);
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(sink_, rows, cols); }

  // Engines take a sink apart, to fetch the maps' operands early and to see mapped values before they are stored.
  KERNELS_HD const M& map() const { return map_; }
  KERNELS_HD const S& end() const { return sink_; }
  template <class Map, class End>
  KERNELS_HD MappedSink<Map, End> with(const Map& map, const End& end) const {
    return {map, end};
  }

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

// The maps in front of a sink, and (below) the sink without them.
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

// The widest pack, of at most `most` columns, that may begin at this column.
KERNELS_HD int pack_at(int64_t col, int most) {
  while (most > 1 && col % most != 0) most /= 2;
  return most;
}

// Calls f(pack, col) for the columns of v, in packs of at most `most`. f is instantiated once for each width: v is
// shifted down instead.
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

// A map that needs other columns than those it changes defines source | map and map | sink itself: on_source(source),
// on_sink(sink). A sink in front of which columns are in another order defines map | sink: after(map).
template <class M, class S, class = void>
struct has_on_source : std::false_type {};
template <class M, class S>
struct has_on_source<M, S, void_t<decltype(std::declval<const M&>().on_source(std::declval<const S&>()))>>
    : std::true_type {};
template <class M, class S, class = void>
struct has_on_sink : std::false_type {};
template <class M, class S>
struct has_on_sink<M, S, void_t<decltype(std::declval<const M&>().on_sink(std::declval<const S&>()))>>
    : std::true_type {};
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
    // The maps of a chain are attached one by one, so that each tee in it is found.
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
    static_assert(
        !wants_pairs<B>(),
        "a map before qkv(), which is given columns in another order: give each of its sinks its maps, qkv(map | rope | sink, ...)");
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
// A function of values, such as a lambda, that is no functor.
template <class F>
constexpr bool is_callable = std::is_invocable<F&, float>::value&& role_of<F>() == Role::none;
}  // namespace detail

// Anything else on either side of | is a mistake; a static_assert says what was expected.
template <class A, class B,
          class = std::enable_if_t<!detail::goes_before<A, B> &&
                                   (std::is_base_of<Functor, A>::value || std::is_base_of<Functor, B>::value)>,
          class = void>
A operator|(const A& a, const B&) {
  using namespace detail;
  constexpr bool scores = is_score<A> || is_score<B>, call = is_source<A> && is_sink<B>,
                 callable = is_callable<A> || is_callable<B>;
  static_assert(!scores,
                "operator| does not compose scores, & does: k::causal() & k::soft_cap(30). The soft cap of values is "
                "k::scale(1 / cap) | k::tanh() | k::scale(cap)");
  static_assert(
      !call,
      "operator| between a source and a sink: they are two arguments of a call, as in k::softmax(stream, source, sink, rows, cols)");
  static_assert(!is_sink<A>,
                "operator| behind a sink: maps stand before it, map | sink; k::both(sink, sink) writes twice");
  static_assert(scores || is_sink<A> || !is_source<B>,
                "operator| before a source: maps stand behind it, source | map; k::add(source) adds one to another");
  static_assert(scores || call || is_sink<A> || is_source<B> || !callable,
                "operator| takes a function of values, such as a lambda, as a map that derives from k::Elementwise: "
                "struct S : k::Elementwise<S> { KERNELS_HD float operator()(float x) const; }");
  static_assert(
      scores || call || is_sink<A> || is_source<B> || callable,
      "operator| takes source | map, map | map and map | sink: one of these is none of them. A map of your own "
      "derives from k::Functor and has template <int N> KERNELS_HD auto map(k::Pack<float, N> values, int64_t "
      "row, int64_t col) const; a source has template <int N> KERNELS_HD k::Pack<float, N> load(int64_t row, "
      "int64_t col) const; a sink has template <int N> KERNELS_HD void store(k::Pack<float, N> values, int64_t "
      "row, int64_t col) const");
  return a;
}

// 1 + p[col], for models that store their norm weight minus one: affine(one_plus(weight)).
template <class T>
auto one_plus(const T* p) { return row(p) | shift(1.0); }

KERNELS_END
