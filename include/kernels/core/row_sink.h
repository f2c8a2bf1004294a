// Checks that a sink which needs values of a row, or of a group of columns, before it writes has all the members that
// concepts.h lists. CPU and GPU engines need nearly the same ones, so one check serves both.
#pragma once

#include "concepts.h"

KERNELS_BEGIN
namespace detail {

// A sink for groups of columns.
KERNELS_DETECT(SinksGroups, F::by_group)

// Converts from any value, but not from void.
struct AnyValue {
  template <class V>
  AnyValue(const V&);
};
template <class F>
typename F::State& its_state();
template <class F>
const typename F::State& its_const_state();

// Packs are of float or of double, whichever the member accepts.
#define KERNELS_DETECT_PACKS(name, expression)                              \
  template <class F, class C, class = void>                                 \
  struct name##_of : std::false_type {};                                    \
  template <class F, class C>                                               \
  struct name##_of<F, C, void_t<decltype(expression)>> : std::true_type {}; \
  template <class F>                                                        \
  struct name : std::disjunction<name##_of<F, float>, name##_of<F, double>> {};

KERNELS_DETECT(begins_state, (typename F::State{}))
KERNELS_DETECT(has_padding, double(std::declval<const F&>().padding()))
KERNELS_DETECT_PACKS(accumulates, std::declval<const F&>().accumulate(its_state<F>(), std::declval<Pack<C, 1>>(), 1))
KERNELS_DETECT(merges, std::declval<const F&>().merge(its_state<F>(), its_const_state<F>()))
// A merge() that changes neither argument and returns the result: a mistake.
KERNELS_DETECT(returns_merged, AnyValue(std::declval<const F&>().merge(its_const_state<F>(), its_const_state<F>())))
// Tested by name only: for a sink in an unnamed namespace nvcc would warn that functions are never called which were
// only tested with another type of lanes. padding() is not tested on the GPU, as only the CPU needs it.
KERNELS_NAME_OF_FUNCTION(gather)
template <class F>
struct gathers : std::integral_constant<bool, names_gather<F>::value || std::is_final<F>::value> {};
KERNELS_DETECT(finishes, AnyValue(std::declval<const F&>().finish(its_const_state<F>())))
KERNELS_DETECT(writes_row, std::declval<const F&>().write_row(its_const_state<F>(), kAny))
KERNELS_DETECT_PACKS(stores_finished,
                     std::declval<const F&>().store(std::declval<Pack<C, 1>>(),
                                                    std::declval<const F&>().finish(its_const_state<F>()), kAny, kAny))

KERNELS_DETECT(has_group, int(std::declval<const F&>().group()))
KERNELS_DETECT_PACKS(state_takes, its_state<F>().take(std::declval<Pack<C, 1>>(), kAny))
KERNELS_DETECT(state_has_largest, its_state<F>().largest = its_const_state<F>().largest)
KERNELS_DETECT(state_finishes, float(its_const_state<F>().finish()))
KERNELS_DETECT(writes_scale, std::declval<const F&>().write_scale(its_const_state<F>(), kAny, kAny))
KERNELS_DETECT_PACKS(stores_scaled, std::declval<const F&>().store(std::declval<Pack<C, 1>>(), 1.f, kAny, kAny))

#define KERNELS_LACKS_OF_ROW "a sink with a State, which looks at a row before it writes it, lacks "
#define KERNELS_LACKS_OF_GROUP "a sink by_group, which looks at a group of columns before it writes it, lacks "

// If several members are missing, the message names the first one.
template <class F>
constexpr bool row_sink_fits() {
  constexpr bool state = begins_state<F>::value, accumulate = state && accumulates<F>::value,
                 merge = accumulate && merges<F>::value && !returns_merged<F>::value,
                 gather = merge && gathers<F>::value, finish = gather && finishes<F>::value,
                 write = finish && writes_row<F>::value, store = write && stores_finished<F>::value;
  static_assert(state, KERNELS_LACKS_OF_ROW "a State that State{} makes: nothing seen yet");
  static_assert(!state || accumulate, KERNELS_LACKS_OF_ROW
                "template <int N> KERNELS_HD void accumulate(State& state, k::Pack<float, N> values, int valid) const");
  static_assert(!accumulate || merge,
                KERNELS_LACKS_OF_ROW "KERNELS_HD void merge(State& into, const State& from) const");
  static_assert(!merge || gather, KERNELS_LACKS_OF_ROW
                "template <class Lanes> KERNELS_HD State gather(const State& state, const Lanes& lanes) const: on the "
                "GPU, the state of all lanes, by lanes.sum(value) and lanes.max(value)");
  static_assert(!gather || finish, KERNELS_LACKS_OF_ROW
                "KERNELS_HD float finish(const State& state) const, or of another type: what store() is given");
  static_assert(!finish || write,
                KERNELS_LACKS_OF_ROW "KERNELS_HD void write_row(const State& state, int64_t row) const");
  static_assert(!write || store, KERNELS_LACKS_OF_ROW
                "template <int N> KERNELS_HD void store(k::Pack<float, N> values, float finished, int64_t row, int64_t "
                "col) const, finished being what finish() returns");
  return store;
}
template <class F>
constexpr bool group_sink_fits() {
  constexpr bool state = begins_state<F>::value, group = state && has_group<F>::value,
                 take = group && state_takes<F>::value, largest = take && state_has_largest<F>::value,
                 finish = largest && state_finishes<F>::value, write = finish && writes_scale<F>::value,
                 store = write && stores_scaled<F>::value;
  static_assert(state, KERNELS_LACKS_OF_GROUP "a State that State{} makes: nothing seen yet");
  static_assert(!state || group, KERNELS_LACKS_OF_GROUP "KERNELS_HD int group() const: how many columns a group has");
  static_assert(!group || take, KERNELS_LACKS_OF_GROUP
                "in its State template <int N> KERNELS_HD void take(k::Pack<float, N> values, int64_t col)");
  static_assert(!take || largest,
                KERNELS_LACKS_OF_GROUP "in its State float largest: the larger of two is that of both");
  static_assert(!largest || finish,
                KERNELS_LACKS_OF_GROUP "in its State KERNELS_HD float finish() const: what store() is given");
  static_assert(!finish || write, KERNELS_LACKS_OF_GROUP
                "KERNELS_HD void write_scale(const State& state, int64_t row, int64_t index) const");
  static_assert(!write || store, KERNELS_LACKS_OF_GROUP
                "template <int N> KERNELS_HD void store(k::Pack<float, N> values, float finished, int64_t row, int64_t "
                "col) const");
  return store;
}
template <class F>
constexpr bool row_or_group_sink_fits() {
  if constexpr (!is_row_sink<F> || !has_row_state<F>::value)
    return true;  // or one of its parts has the state
  else if constexpr (SinksGroups<F>::value)
    return group_sink_fits<F>();
  else
    return row_sink_fits<F>();
}
template <class F>
struct RowSinkFits : std::integral_constant<bool, row_or_group_sink_fits<F>()> {};
template <template <class...> class Composed, class... Parts>
struct RowSinkFits<Composed<Parts...>>
    : std::integral_constant<bool, row_or_group_sink_fits<Composed<Parts...>>() && (RowSinkFits<Parts>::value && ...)> {
};

// F: the end of a sink, without its maps.
template <class F>
constexpr bool takes_padding() {
  constexpr bool padding = !is_row_sink<F> || SinksGroups<F>::value || has_padding<F>::value;
  static_assert(padding, KERNELS_LACKS_OF_ROW "KERNELS_HD float padding() const: a value that does not change a state");
  return padding;
}

#undef KERNELS_LACKS_OF_GROUP
#undef KERNELS_LACKS_OF_ROW
#undef KERNELS_DETECT_PACKS

}  // namespace detail
KERNELS_END
