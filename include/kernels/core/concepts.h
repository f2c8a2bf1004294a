// The members that engines use of functors (sources, maps, sinks), required and optional.
//
//   Source   reads:   Pack<C,N> load<N>(row, col)                 this library's form
//                     void load<N>(Dst* dst, row, col)            OneFlow's form, see below
//                     fetch<N>(row, col) + resolve(fetched, row, col)   split form, see below
//   Map      changes: Pack map(Pack, row, col)                    or map(Pack, fetched, row, col)
//                                                                 with fetch<N>(row, col)
//   Sink     writes:  store<N>(Pack, row, col)                    this library's form
//                     void store<N>(const Src* src, row, col)     OneFlow's form, see below
//   RowSink  a Sink that first needs one value of the whole row (an absolute maximum, say). Packs are float or double:
//              struct State                            State{}: empty; members without an initializer are zero
//              float padding() const                   a value that does not change a state; for the CPU
//              void accumulate<N>(State&, Pack<float, N>, int valid) const   `valid` values, with padding behind them
//              void merge(State& into, const State& from) const
//              State gather(const State&, const Lanes& lanes) const   of all lanes: lanes.sum(v), lanes.max(v)
//              R finish(const State&) const            any type, once per row
//              void write_row(const State&, int64_t row) const
//              void store<N>(Pack<float, N>, R, int64_t row, int64_t col) const
//            core/row_op.h explains these; docs/elementwise.md has an example. With `static constexpr bool by_group =
//            true` it needs a value of each group of columns instead; quantize.h has an example:
//              int group() const                       the number of columns in a group
//              void write_scale(const State&, int64_t row, int64_t index) const   index: of the group in its row
//              void store<N>(Pack<float, N>, float, int64_t row, int64_t col) const
//              State::take<N>(Pack<float, N>, int64_t col); float State::largest, where the larger one of two states
//              is that of both; and float State::finish() const, whose result store() gets
//
// The split form separates reading from computing. Engines issue every fetch of a row before the first resolve, so many
// loads are in flight at once, even if one of the maps also writes memory (tee).
//
// OneFlow's forms:
// - They name their own element type, any that converts to and from float (a double type is computed in double), and
//   take rows and columns of 32 or 64 bits.
// - They need not be const. Each thread of the GPU then has its own copy, which may keep a state from one call of it to
//   the next; the caller does not get it back. CPU threads, copy(), products and attention may share or copy functors.
// - Packs have 1 or 2 elements, as in OneFlow; if the number of columns is even, the functor's pointers must be aligned
//   for 2. `bool CanPackAs(size_t n)` may allow 4 or forbid 2.
// - As a load may have an effect (residual_out = x + residual), engines run it once for each element if the row can be
//   kept; docs/row_ops.md says when. Such functors are not copied on the device, unless they have a `reload`.
//
// Optional members, all const. A function with one of these names but another signature does not compile, nor does a
// max_pack that is a number, or private data with such a name: ignoring it would allow too wide packs, or leave
// arguments unchecked.
//
//   static constexpr Role role      what the functor is; by default deduced from its members
//   static constexpr int widest     the widest pack that makes sense (16 bytes of the narrowest type it moves)
//   int max_pack()                  the widest pack that pointer and stride allow
//   static constexpr int narrowest  of a RowSink for groups whose size is a multiple of this: it gets no narrower
//                                   packs, as these fill only parts of a word. At most 16
//   static constexpr bool takes_any_column   packs may begin at any column, not only at multiples of their width, in
//                                   rows that begin at any element. True of functors that compute on values alone, and
//                                   of those that access single elements. A functor made of others has it if they do
//   any_column()                    the same functor for such packs, which are never among the first or last N - 1
//                                   columns of a row; by default the functor itself. A class with this member also has
//                                   `using Itself = ...`, its own name, as a derived class may behave differently
//   placed<N>(row, col)             the same functor for one row, and for packs of N at columns col + i N and single
//                                   elements: computes what these accesses have in common once. By default the functor
//                                   itself
//   whole(), is_whole()             of a Sink: if is_whole(), whole() is the same sink for packs that it writes without
//                                   splitting them
//   store_if(there, v, row, col)    of a Sink: store() if `there`, without a branch
//   Status check(rows, cols)        what is wrong with the arguments
//   static constexpr bool wants_pairs   a Sink in front of which the columns of a pair are adjacent: it takes packs
//                                   of 2 or more at even columns. Only for products and norm_heads() (rope.h)
//   pair_at(col)                    of a Sink that wants pairs: the columns that it takes at col (even) and col + 1
//   pairs_within(dim)               of such a Sink: whether all pairs are inside heads of dim columns
//   static constexpr bool has_effects   it changes memory when it is read or applied, as tee() does. A functor made of
//                                   others has their effects. Effects happen exactly once for each element, or the
//                                   call does not compile
//   prepare<N>(row, col)            of a Sink with store(pack, prepared, row, col): what it can compute or load before
//                                   the values are known
//   reload<N>(row, col)             a Source with effects has this for engines that read a row a second time
//   without_effects()               a Map with effects has this for engines that apply it again: the same map without
//                                   effects; likewise a Source whose resolve() has effects
#pragma once

#include "forms.h"
#include "status.h"

KERNELS_BEGIN

// The base of every functor, by which operator| is found. Derive your own maps, sources and sinks from it.
struct Functor {};

struct Nothing {};

// What two functors fetch, side by side. Nothing takes no room: each Slot is a distinct empty base.
namespace detail {
template <int kIndex, class T, class Owner>
struct Slot {
  T item;
  KERNELS_HD const T& get() const { return item; }
};
template <int kIndex, class Owner>
struct Slot<kIndex, Nothing, Owner> {
  KERNELS_HD Nothing get() const { return {}; }
};
}  // namespace detail

template <class A, class B>
struct Pair : detail::Slot<0, A, Pair<A, B>>, detail::Slot<1, B, Pair<A, B>> {
  using First = detail::Slot<0, A, Pair>;
  using Second = detail::Slot<1, B, Pair>;
};

namespace detail {

template <class A, class B>
KERNELS_HD Pair<A, B> pair(const A& a, const B& b) {
  Pair<A, B> out;
  // Through a reference to the base: g++ 11 does not find a base by an alias of its name.
  typename Pair<A, B>::First& first = out;
  typename Pair<A, B>::Second& second = out;
  if constexpr (!std::is_same<A, Nothing>::value) first.item = a;
  if constexpr (!std::is_same<B, Nothing>::value) second.item = b;
  return out;
}
template <class P>
KERNELS_HD decltype(auto) first_of(const P& p) {
  const typename P::First& first = p;
  return first.get();
}
template <class P>
KERNELS_HD decltype(auto) second_of(const P& p) {
  const typename P::Second& second = p;
  return second.get();
}

// ---- fetch: everything a functor reads from memory at (row, col) ---------------------------------------------------

// The buffers that OneFlow's functors read into and write from, aligned for access as a whole.
template <class T, int N>
struct alignas(N * sizeof(T) <= 16 && (N & (N - 1)) == 0 ? N * sizeof(T) : alignof(T)) OneFlowPack {
  Pack<T, N> pack;
};

template <int N, class F>
KERNELS_HD auto fetch(const F& f, int64_t row, int64_t col) {
  if constexpr (has_fetch<F>::value) {
    return f.template fetch<N>(row, col);
  } else if constexpr (has_load<F>::value) {
    return f.template load<N>(row, col);
  } else if constexpr (oneflow_load<F>) {
    using Form = load_form<F>;
    OneFlowPack<typename Form::element, N> out;
    const_cast<F&>(f).template load<N>(out.pack.v, static_cast<typename Form::row>(row),
                                       static_cast<typename Form::col>(col));
    return out;
  } else {
    return Nothing{};
  }
}

// ---- Source --------------------------------------------------------------------------------------------------------

template <class S, class Fetched>
KERNELS_HD auto resolve(const S& source, const Fetched& fetched, int64_t row, int64_t col) {
  if constexpr (has_fetch<S>::value) return source.resolve(fetched, row, col);
  else if constexpr (oneflow_load<S>) return convert<compute_t<typename load_form<S>::element>>(fetched.pack);
  else return fetched;
}

template <class C>
constexpr bool computes_in() {
  constexpr bool right = std::is_same<C, float>::value || std::is_same<C, double>::value;
  static_assert(right,
                "values are computed in float or double: load gives Pack<float, N> or Pack<double, N>, made of other "
                "types by k::convert<float>(pack)");
  return right;
}

// The element type in which a source computes. A OneFlow functor names it, and may be device-only.
template <class S, bool = oneflow_load<S>>
struct ComputeType {
  using type = compute_t<typename load_form<S>::element>;
  static constexpr bool right = true;
};
template <class S>
struct ComputeType<S, false> {
  using type = typename decltype(resolve(std::declval<const S&>(), fetch<1>(std::declval<const S&>(), kAny, kAny), kAny,
                                         kAny))::value_type;
  static constexpr bool right = computes_in<type>();
};
template <class S>
using compute_type = typename ComputeType<S>::type;

// Reads again through the user's own `reload`.
template <class S>
struct Reloaded : Functor {
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;
  S source;
  template <int N>
  KERNELS_HD auto load(int64_t row, int64_t col) const { return source.template reload<N>(row, col); }
};

// The same source or map without effects, for an engine that applies it again to what it has fetched.
template <class F>
KERNELS_HD decltype(auto) without_effects(const F& f) {
  if constexpr (!has_effects<F>) {
    return (f);
  } else if constexpr (has_without_effects<F>::value) {
    return f.without_effects();
  } else {
    // A source with load() only has done its effects when it has been fetched.
    static_assert((is_source<F> && !has_fetch<F>::value) || names_without_effects<F>::value,
                  "what has effects would be applied twice: give it without_effects() const, which returns the same "
                  "functor without them");
    return (f);
  }
}

// The source or map for reading a row a second time: it gives the same values, and has no effects.
template <class F>
KERNELS_HD decltype(auto) second_pass(const F& f) {
  if constexpr (!has_effects<F>) {
    return (f);
  } else if constexpr (has_second_pass<F>::value) {
    return f.second_pass();
  } else if constexpr (has_reload<F>::value) {
    return Reloaded<F>{{}, f};
  } else if constexpr (is_source<F>) {
    static_assert(names_reload<F>::value,
                  "a source with effects would be read twice: give it reload<N>(row, col) const, or make its values "
                  "without them and write these with tee()");
    return f;
  } else {
    return without_effects(f);
  }
}

// The source or map for the first of two passes: its reads should stay in the cache. The second pass uses the source
// itself, whose reads are marked for early eviction, so that they do not displace data that others will read again.
template <class F>
KERNELS_HD decltype(auto) cached(const F& f) {
  if constexpr (loaded_once<F>) return (f);  // must not be copied
  else if constexpr (has_cached<F>::value) return f.cached();
  else return (f);
}

// ---- Map -----------------------------------------------------------------------------------------------------------

// What a map reads from memory; by default nothing.
template <int N, class M>
KERNELS_HD auto fetch_operands(const M& map, int64_t row, int64_t col) {
  if constexpr (has_fetch<M>::value) return map.template fetch<N>(row, col);
  else return Nothing{};
}

template <class M, class C, int N, class Fetched>
KERNELS_HD auto apply_map(const M& map, const Pack<C, N>& v, const Fetched& fetched, int64_t row, int64_t col) {
  if constexpr (has_fetch<M>::value) return map.map(v, fetched, row, col);
  else return map.map(v, row, col);
}

// ---- Sink ----------------------------------------------------------------------------------------------------------

template <class S, class C, int N>
KERNELS_HD void put(const S& sink, const Pack<C, N>& v, int64_t row, int64_t col) {
  if constexpr (oneflow_store<S>) {
    using Form = store_form<S>;
    using Src = std::conditional_t<std::is_void<typename Form::element>::value, C, typename Form::element>;
    const OneFlowPack<Src, N> taken{convert<Src>(v)};
    const_cast<S&>(sink).template store<N>(taken.pack.v, static_cast<typename Form::row>(row),
                                           static_cast<typename Form::col>(col));
  } else {
    sink.template store<N>(v, row, col);
  }
}

// put(), or nothing: for engines without a branch around each pack.
template <class S, class C, int N>
KERNELS_HD void put_if(std::true_type, const S& sink, const Pack<C, N>& v, int64_t row, int64_t col) {
  put(sink, v, row, col);
}
template <class S, class C, int N>
KERNELS_HD void put_if(bool there, const S& sink, const Pack<C, N>& v, int64_t row, int64_t col) {
  if constexpr (has_store_if<S>::value) {
    sink.store_if(there, v, row, col);
  } else {
    static_assert(!names_store_if<S>::value || stores_doubles_if<S>::value,
                  KERNELS_NOT_AS_ASKED("store_if",
                                       "template <int N> KERNELS_HD void store_if(bool there, k::Pack<float, N> "
                                       "values, int64_t row, int64_t col) const"));
    if (there) put(sink, v, row, col);
  }
}

// What a sink can compute or load before the values are known: addresses, angles, scales. Engines that have time before
// their values are ready call it then.
template <int N, class S>
KERNELS_HD auto prepare(const S& sink, int64_t row, int64_t col) {
  if constexpr (has_prepare<S>::value) return sink.template prepare<N>(row, col);
  else return Nothing{};
}
template <class S, class Prepared, class C, int N>
KERNELS_HD void put_prepared(const S& sink, const Prepared& prepared, const Pack<C, N>& v, int64_t row, int64_t col) {
  if constexpr (std::is_same<Prepared, Nothing>::value) put(sink, v, row, col);
  else sink.store(v, prepared, row, col);
}

// Stores a result after applying the maps in front of the sink.
template <class S, class M, class C, int N, class Prepared = Nothing>
KERNELS_HD void put_mapped(const S& sink, const M& map, const Pack<C, N>& v, int64_t row, int64_t col,
                           const Prepared& prepared = {}) {
  put_prepared(sink, prepared, apply_map(map, v, fetch_operands<N>(map, row, col), row, col), row, col);
}

// ---- what a functor allows -----------------------------------------------------------------------------------------

constexpr int kWidestPack = 16;

template <class F>
constexpr bool says_pack = has_can_pack_as<F>::value || has_can_pack_row<F>::value;

template <class F>
constexpr int widest_of() {
  if constexpr (has_widest<F>::value) return F::widest;
  else if constexpr (oneflow_load<F> || oneflow_store<F>) return says_pack<F> ? 4 : 2;
  else return kWidestPack;
}

template <class F>
constexpr int narrowest_of() {
  if constexpr (has_narrowest<F>::value) return F::narrowest;
  else return 1;
}

// The elements in one access to N values of a source: N, or as many as it can read at once.
template <class S, int N>
constexpr int pack_within = N < widest_of<S>() ? N : widest_of<S>();

// Whether CanPackAs, which is not declared const, allows packs of `n` in rows of `cols` columns.
template <int kWidth, class F>
bool can_pack_row(F& f, int n, int64_t cols) {
  if (n == kWidth) return f.template CanPackAs<kWidth>(cols);
  if constexpr (kWidth > 1) return can_pack_row<kWidth / 2>(f, n, cols);
  else return true;
}
// cols: the columns of a row, if known.
template <class F>
int max_pack_of(const F& f, int64_t cols = 1) {
  int n = widest_of<F>();
  if constexpr (has_max_pack<F>::value) {
    n = f.max_pack();
  } else if constexpr (has_can_pack_as<F>::value) {
    F own = f;
    while (n > 1 && !own.CanPackAs(static_cast<size_t>(n))) n /= 2;
  } else if constexpr (has_can_pack_row<F>::value) {
    F own = f;
    while (n > 1 && !can_pack_row<widest_of<F>()>(own, n, cols)) n /= 2;
  } else {
    static_assert(!names_CanPackAs<F>::value,
                  KERNELS_NOT_AS_ASKED("CanPackAs", "bool CanPackAs(size_t n), as in OneFlow"));
  }
  return n;
}

// Whether its packs may begin at any column.
template <class F>
constexpr bool takes_any_column() {
  if constexpr (!has_takes_any_column<F>::value) return false;
  else if constexpr (has_itself<F>::value) return F::takes_any_column && std::is_same<F, typename F::Itself>::value;
  else return F::takes_any_column;
}
template <class F>
auto any_column(const F& f) {
  if constexpr (has_any_column<F>::value) return f.any_column();
  else return f;
}
template <int N, class F>
KERNELS_HD F placed(const F& f, int64_t row, int64_t col) {
  if constexpr (has_placed<F>::value) return f.template placed<N>(row, col);
  else return f;
}
// Whether rows can be split where this source's packs are aligned: then it is read in aligned packs, and other functors
// adapt.
template <class F>
constexpr bool leads() {
  if constexpr (has_leading<F>::value) return F::leads;
  else return false;
}
template <class F>
auto leading(const F& f) {
  if constexpr (has_leading<F>::value) return f.leading();
  else return any_column(f);
}

template <class F>
constexpr bool wants_pairs() {
  if constexpr (has_wants_pairs<F>::value) return F::wants_pairs;
  else return false;
}

// The columns that a sink which wants pairs takes at columns `col` and `col` + 1.
struct ColumnPair {
  int64_t first, second;
};
// Whether all pairs are inside heads of `dim` columns.
template <class F>
bool pairs_within(const F& f, int64_t dim) {
  if constexpr (has_pairs_within<F>::value) return f.pairs_within(dim);
  else return true;
}
template <class F>
KERNELS_HD ColumnPair pair_at(const F& f, int64_t col) {
  if constexpr (has_pair_at<F>::value) return f.pair_at(col);
  else return {col, col + 1};
}

template <class F>
void set_past_cache(F& f, bool past) {
  if constexpr (has_past_cache<F>::value) f.set_past_cache(past);
}

// On the host: prefetches the columns [begin, end) of a row.
template <class F>
KERNELS_INLINE inline void prefetch(const F& f, int64_t row, int64_t begin, int64_t end) {
  if constexpr (has_prefetch<F>::value) f.prefetch(row, begin, end);
}

// On the host: how many columns at the beginning of a row are stored separately, so that whole cache lines follow.
template <class F>
int lead_of(const F& f, int64_t row) {
  if constexpr (has_lead<F>::value) return f.lead(row);
  else return 0;
}

// Whether the number of rows (below: of columns) fits the functor's index type.
template <class Form>
bool counts_rows(int64_t rows) { return sizeof(typename Form::row) >= sizeof(rows) || rows <= 0x7fffffff; }
template <class Form>
bool counts_cols(int64_t cols) { return sizeof(typename Form::col) >= sizeof(cols) || cols <= 0x7fffffff; }

template <class F>
Status check_of(const F& f, int64_t rows, int64_t cols) {
  if constexpr (oneflow_load<F>) {
    if (!counts_rows<load_form<F>>(rows))
      return unsupported("the functor's load takes rows of 32 bits: fewer than 2^31");
    if (!counts_cols<load_form<F>>(cols))
      return unsupported("the functor's load takes columns of 32 bits: fewer than 2^31");
  }
  if constexpr (oneflow_store<F>) {
    if (!counts_rows<store_form<F>>(rows))
      return unsupported("the functor's store takes rows of 32 bits: fewer than 2^31");
    if (!counts_cols<store_form<F>>(cols))
      return unsupported("the functor's store takes columns of 32 bits: fewer than 2^31");
  }
  if constexpr (has_check<F>::value) return f.check(rows, cols);
  else return {};
}

}  // namespace detail

template <class Source>
using compute_type = detail::compute_type<Source>;

KERNELS_END
