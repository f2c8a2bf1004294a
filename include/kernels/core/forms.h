// Deduces the form of a functor from its members: source, map or sink, in this library's form or OneFlow's, with or
// without effects. core/concepts.h lists the members and calls them.
#pragma once

#include <utility>

#include "math.h"

KERNELS_BEGIN

enum class Role { none, source, map, sink, row_sink };

namespace detail {

template <class... > using void_t = void;

// In this library's namespace. name<F>::value: whether the expression compiles for the type F.
#define KERNELS_DETECT(name, expression)                                              \
  template <class F, class = void>                                                    \
  struct name : std::false_type {};                                                   \
  template <class F>                                                                  \
  struct name<F, void_t<decltype(expression)>> : std::true_type {};

// An optional member with another signature (not const, or with other parameters) must not be ignored as if it were
// missing: results would be wrong. So its name is looked up as well. In a class that inherits the name once more it is
// ambiguous, whether it is private, overloaded or a template. A final class cannot be tested this way.
struct Names {
  int max_pack, check, reload, without_effects, widest, narrowest, takes_any_column, has_effects, wants_pairs;
  int any_column, placed, whole, store_if, pair_at, pairs_within, CanPackAs, gather;
  int transform, visible, visible_keys, kv_range, sink, alignment;
};
template <class F, class = void>
struct WithNames : Names {};
template <class F>
struct WithNames<F, void_t<decltype(sizeof(F)), std::enable_if_t<std::is_class<F>::value && !std::is_final<F>::value>>>
    : F, Names {};

// names_MEMBER<F>::value: whether F has any member of that name.
#define KERNELS_NAME(member)                 \
  template <class F, class = void>           \
  struct names_##member : std::true_type {}; \
  template <class F>                         \
  struct names_##member<F, void_t<decltype(&WithNames<F>::member)>> : std::false_type {};
// Whether F has a function of that name; for names that cannot be meant by data.
#define KERNELS_NAME_OF_FUNCTION(member)                                                                             \
  KERNELS_NAME(member)                                                                                               \
  template <class F>                                                                                                 \
  struct names_##member<                                                                                             \
      F, std::enable_if_t<!std::is_function<std::remove_reference_t<decltype((std::declval<F&>().member))>>::value>> \
      : std::false_type {};

// name<F>::value: whether F has the member with the signature of the expression. If F has the name with another
// signature, a static_assert fails.
#define KERNELS_OPTIONAL(name, member, expression, form)                           \
  KERNELS_DETECT(name##_as_asked, expression)                                      \
  template <class F>                                                               \
  constexpr bool name##_is_missing() {                                             \
    static_assert(!names_##member<F>::value, KERNELS_NOT_AS_ASKED(#member, form)); \
    return true;                                                                   \
  }                                                                                \
  template <class F, bool = name##_as_asked<F>::value>                             \
  struct name : std::true_type {};                                                 \
  template <class F>                                                               \
  struct name<F, false> : std::integral_constant<bool, !name##_is_missing<F>()> {};
#define KERNELS_NOT_AS_ASKED(member, form) \
  "the functor's " member " does not fit, and would be left out: it must be public, and declared as " form

KERNELS_NAME(has_effects)
KERNELS_NAME(widest)
KERNELS_NAME(narrowest)
KERNELS_NAME(max_pack)
KERNELS_NAME(takes_any_column)
KERNELS_NAME(wants_pairs)
KERNELS_NAME_OF_FUNCTION(reload)
KERNELS_NAME_OF_FUNCTION(without_effects)
KERNELS_NAME_OF_FUNCTION(any_column)
KERNELS_NAME_OF_FUNCTION(placed)
KERNELS_NAME_OF_FUNCTION(whole)
KERNELS_NAME_OF_FUNCTION(check)
KERNELS_NAME_OF_FUNCTION(pair_at)
KERNELS_NAME_OF_FUNCTION(pairs_within)
KERNELS_NAME_OF_FUNCTION(store_if)
KERNELS_NAME_OF_FUNCTION(CanPackAs)
constexpr int64_t kAny = 0;
template <int kValue>
struct Number {};
template <bool kValue>
struct Flag {};
KERNELS_DETECT(has_role, F::role)
KERNELS_DETECT(has_fetch, std::declval<const F&>().template fetch<1>(kAny, kAny))
KERNELS_DETECT(has_load, std::declval<const F&>().template load<1>(kAny, kAny))
KERNELS_OPTIONAL(declares_effects, has_effects, Flag<F::has_effects>(), "static constexpr bool has_effects")
KERNELS_OPTIONAL(has_reload, reload, std::declval<const F&>().template reload<1>(kAny, kAny),
                 "template <int N> KERNELS_HD k::Pack<float, N> reload(int64_t row, int64_t col) const")
KERNELS_DETECT(has_second_pass, std::declval<const F&>().second_pass())
KERNELS_DETECT(has_cached, std::declval<const F&>().cached())
KERNELS_OPTIONAL(has_without_effects, without_effects, std::declval<const F&>().without_effects(),
                 "KERNELS_HD auto without_effects() const")
KERNELS_OPTIONAL(has_widest, widest, Number<F::widest>(), "static constexpr int widest")
KERNELS_OPTIONAL(has_narrowest, narrowest, Number<F::narrowest>(), "static constexpr int narrowest")
KERNELS_OPTIONAL(has_max_pack, max_pack, std::declval<const F&>().max_pack(), "int max_pack() const")
KERNELS_OPTIONAL(has_takes_any_column, takes_any_column, Flag<F::takes_any_column>(),
                 "static constexpr bool takes_any_column")
KERNELS_OPTIONAL(has_any_column, any_column, std::declval<const F&>().any_column(), "auto any_column() const")
KERNELS_OPTIONAL(has_placed, placed, std::declval<const F&>().template placed<1>(kAny, kAny),
                 "template <int N> KERNELS_HD auto placed(int64_t row, int64_t col) const")
KERNELS_OPTIONAL(has_whole, whole, std::declval<const F&>().whole(), "KERNELS_HD auto whole() const")
KERNELS_DETECT(has_store_if, std::declval<const F&>().store_if(true, Pack<float, 1>(), kAny, kAny))
KERNELS_DETECT(stores_doubles_if, std::declval<const F&>().store_if(true, Pack<double, 1>(), kAny, kAny))
KERNELS_DETECT(has_leading, std::declval<const F&>().leading())
KERNELS_DETECT(has_itself, std::declval<typename F::Itself>())
KERNELS_OPTIONAL(has_check, check, std::declval<const F&>().check(kAny, kAny),
                 "k::Status check(int64_t rows, int64_t cols) const")
KERNELS_DETECT(has_at_row, std::declval<const F&>().at_row(kAny))
KERNELS_DETECT(has_row_state, std::declval<typename F::State>())
KERNELS_DETECT(has_prefetch, std::declval<const F&>().prefetch(kAny, kAny, kAny))
KERNELS_DETECT(has_lead, std::declval<const F&>().lead(kAny))
KERNELS_DETECT(has_past_cache, std::declval<F&>().set_past_cache(true))
KERNELS_OPTIONAL(has_wants_pairs, wants_pairs, Flag<F::wants_pairs>(), "static constexpr bool wants_pairs")
KERNELS_OPTIONAL(has_pair_at, pair_at, std::declval<const F&>().pair_at(kAny),
                 "KERNELS_HD k::detail::ColumnPair pair_at(int64_t col) const")
KERNELS_OPTIONAL(has_pairs_within, pairs_within, std::declval<const F&>().pairs_within(kAny),
                 "bool pairs_within(int64_t dim) const")
// Not looked up by name: a sink may have it conditionally, and writes the same without it.
KERNELS_DETECT(has_prepare, std::declval<const F&>().template prepare<2>(kAny, kAny))
KERNELS_DETECT(has_can_pack_as, std::declval<F&>().CanPackAs(size_t(2)))
KERNELS_DETECT(has_can_pack_row, std::declval<F&>().template CanPackAs<2>(kAny))

// The parameters of a member in OneFlow's form, deduced from its declaration. Element: void if it accepts any type.
template <class Element, class Row, class Col, bool kConst>
struct OneFlowForm {
  using element = std::remove_const_t<Element>;
  using row = Row;
  using col = Col;
  static constexpr bool changes_itself = !kConst;
};
template <class F, class E, class Row, class Col>
OneFlowForm<E, Row, Col, false> form_of(void (F::*)(E*, Row, Col));
template <class F, class E, class Row, class Col>
OneFlowForm<E, Row, Col, true> form_of(void (F::*)(E*, Row, Col) const);
template <class E, class Row, class Col>
OneFlowForm<E, Row, Col, true> form_of(void (*)(E*, Row, Col));

template <class F, class C, class = void>
struct loads_into : std::false_type {};
template <class F, class C>
struct loads_into<F, C, void_t<decltype(std::declval<F&>().template load<1>(std::declval<C*>(), kAny, kAny))>>
    : std::true_type {};

template <class F, class C, class = void>
struct stores_from : std::false_type {};
template <class F, class C>
struct stores_from<F, C, void_t<decltype(std::declval<F&>().template store<1>(std::declval<const C*>(), kAny, kAny))>>
    : std::true_type {};

// The form of load<N> or store<N>, or void. If the declaration leaves the element type open, it cannot be deduced.
template <class F, class = void>
struct LoadForm {
  template <class C>
  using of = OneFlowForm<C, int64_t, int64_t, false>;
  using type = std::conditional_t<loads_into<F, float>::value, of<float>,
                                  std::conditional_t<loads_into<F, double>::value, of<double>, void>>;
};
template <class F>
struct LoadForm<F, void_t<decltype(form_of(&F::template load<1>))>> {
  using type = decltype(form_of(&F::template load<1>));
};
template <class F, class = void>
struct StoreForm {
  static constexpr bool any = stores_from<F, float>::value || stores_from<F, double>::value;
  using type = std::conditional_t<any, OneFlowForm<void, int64_t, int64_t, false>, void>;
};
template <class F>
struct StoreForm<F, void_t<decltype(form_of(&F::template store<1>))>> {
  using type = decltype(form_of(&F::template store<1>));
};
template <class F>
using load_form = typename LoadForm<F>::type;
template <class F>
using store_form = typename StoreForm<F>::type;

template <class F, class C, class = void>
struct stores_pack : std::false_type {};
template <class F, class C>
struct stores_pack<
    F, C, void_t<decltype(std::declval<const F&>().template store<1>(std::declval<Pack<C, 1>>(), kAny, kAny))>>
    : std::true_type {};

template <class F, class C, class = void>
struct maps : std::false_type {};
template <class F, class C>
struct maps<F, C, void_t<decltype(std::declval<const F&>().map(std::declval<Pack<C, 1>>(), kAny, kAny))>>
    : std::true_type {};

template <class F, class C, class = void>
struct maps_fetched : std::false_type {};
template <class F, class C>
struct maps_fetched<
    F, C,
    void_t<decltype(std::declval<const F&>().map(std::declval<Pack<C, 1>>(),
                                                 std::declval<const F&>().template fetch<1>(kAny, kAny), kAny, kAny))>>
    : std::true_type {};

template <class F, bool = has_fetch<F>::value || has_load<F>::value>
constexpr bool oneflow_load = !std::is_void<load_form<F>>::value;
template <class F>
constexpr bool oneflow_load<F, true> = false;
template <class F, bool = stores_pack<F, float>::value || stores_pack<F, double>::value>
constexpr bool oneflow_store = !std::is_void<store_form<F>>::value;
template <class F>
constexpr bool oneflow_store<F, true> = false;

// Whether there is a member of that name at all, for error messages.
KERNELS_DETECT(has_plain_load, &F::load)
KERNELS_DETECT(has_template_load, &F::template load<1>)
KERNELS_DETECT(has_plain_store, &F::store)
KERNELS_DETECT(has_template_store, &F::template store<1>)

// Whether something holds for a functor, or for one of the functors of which it is composed.
template <template <class> class Is, class F>
struct AnyPart : Is<F> {};
template <template <class> class Is, template <class...> class Composed, class... Parts>
struct AnyPart<Is, Composed<Parts...>>
    : std::integral_constant<bool, Is<Composed<Parts...>>::value || (AnyPart<Is, Parts>::value || ...)> {};

// Whether a load should run only once for each element: OneFlow's may have an effect. One with a `reload` provides for
// a second read.
template <class F>
struct IsLoadedOnce : std::integral_constant<bool, oneflow_load<F> && !has_reload_as_asked<F>::value> {};
template <class F>
constexpr bool loaded_once = AnyPart<IsLoadedOnce, F>::value;

// Whether a functor may change itself when it loads or stores (its member is not const).
template <class F>
struct IsChanging {
  template <class Form, bool kThere>
  static constexpr bool of() {
    if constexpr (kThere) return Form::changes_itself;
    else return false;
  }
  static constexpr bool value = of<load_form<F>, oneflow_load<F>>() || of<store_form<F>, oneflow_store<F>>();
};
template <class F>
constexpr bool changes_itself = AnyPart<IsChanging, F>::value;

// Sinks that need whole heads, which only norm_heads() provides: rope and qkv() in front of ends that compute scales.
KERNELS_DETECT(declares_by_head, F::by_head)
template <class F>
struct IsByHead {
  static constexpr bool of() {
    if constexpr (declares_by_head<F>::value)
      return F::by_head;
    else
      return false;
  }
  static constexpr bool value = of();
};
template <class F>
constexpr bool by_head = AnyPart<IsByHead, F>::value;

// The role of a functor: declared (`static constexpr Role role`), or deduced from its members.
template <class F>
constexpr Role role_of() {
  if constexpr (has_role<F>::value) return F::role;
  else if constexpr (has_row_state<F>::value) return Role::row_sink;
  else if constexpr (maps<F, float>::value || maps<F, double>::value) return Role::map;
  else if constexpr (maps_fetched<F, float>::value || maps_fetched<F, double>::value) return Role::map;
  else if constexpr (has_load<F>::value || oneflow_load<F> || has_fetch<F>::value) return Role::source;
  else if constexpr (stores_pack<F, float>::value || stores_pack<F, double>::value || oneflow_store<F>)
    return Role::sink;
  else return Role::none;
}
template <class F>
constexpr bool is_source = role_of<F>() == Role::source;
template <class F>
constexpr bool is_map = role_of<F>() == Role::map;
template <class F>
constexpr bool is_row_sink = role_of<F>() == Role::row_sink;
template <class F>
constexpr bool is_sink = role_of<F>() == Role::sink || is_row_sink<F>;

// Whether reading or applying a functor changes memory: it declares so, it has a reload(), or one of its parts does.
template <class F, bool = role_of<F>() != Role::none>
struct OwnEffects : std::integral_constant<bool, declares_effects<F>::value || has_reload<F>::value> {};
// Some template arguments of functors are not functors.
template <class F>
struct OwnEffects<F, false> : has_reload_as_asked<F> {};
template <class F, bool = declares_effects_as_asked<F>::value>
struct Effects : OwnEffects<F> {};
template <class F>
struct Effects<F, true> : std::integral_constant<bool, F::has_effects> {};
template <template <class...> class F, class... Parts>
struct Effects<F<Parts...>, false>
    : std::integral_constant<bool, OwnEffects<F<Parts...>>::value || (Effects<Parts>::value || ...)> {};
template <class F>
constexpr bool has_effects = Effects<F>::value;

}  // namespace detail
KERNELS_END
