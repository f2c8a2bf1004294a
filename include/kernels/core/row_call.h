// Argument checks that all row calls share, on the GPU and the CPU.
#pragma once

#include "arguments.h"
#include "overlap.h"

KERNELS_BEGIN
namespace detail {

constexpr int64_t kMaxCols = 1ll << 30;

inline Status check_shape(int64_t rows, int64_t cols) {
  if (rows < 0) return invalid("rows is negative");
  if (cols < 0) return invalid("cols is negative");
  if (cols > kMaxCols) return unsupported("cols is larger than 2^30");
  return {};
}

// The explicit compute type of a OneFlow call, if given, must be the one that the load produces.
template <class Source, class Compute>
constexpr void check_compute() {
  if constexpr (is_source<Source> && !std::is_void<Compute>::value) {
    static_assert(std::is_same<Compute, compute_type<Source>>::value,
                  "the compute type does not fit the load: a load of double is computed in double, any other in float");
  }
}

// Sinks that need all values of a group of columns before they write it.
template <class F>
struct IsByGroup : SinksGroups<F> {};
template <class F>
constexpr bool by_group = AnyPart<IsByGroup, F>::value;

// Maps that join two values into one; only products hand their sinks two values.
KERNELS_DETECT(declares_joining, F::joins_two)
template <class F>
struct JoinsTwo : declares_joining<F> {};

// Whether copy() and row operations accept these types; if not, a static_assert says why.
template <class Source, class Sink>
constexpr bool takes_values() {
  constexpr bool joins = AnyPart<JoinsTwo, Sink>::value, right = takes_source<Source>() && takes_sink<Sink>();
  if constexpr (right) {
    static_assert(wants_pairs<Sink>() || !by_head<Sink>,
                  "qkv() of sinks that find scales is for norm_heads(), which normalizes as many heads as it is told: "
                  "none, if that is 0");
    static_assert(!wants_pairs<Sink>(),
                  "rope | sink is for products and norm_heads(); elsewhere rotate what is read: source | rope");
    static_assert(
        !joins,
        "swiglu() and other glu() before a sink are for products; elsewhere they join what is read: k::gated(gate, up) | k::swiglu(), k::gate_up(source, n) | k::swiglu()");
  }
  return right && !joins && !by_head<Sink>;
}
// `empty` is set if there is nothing to do.
template <class Source, class Sink>
Status check_operands(const Source& source, const Sink& sink, int64_t rows, int64_t cols, bool& empty) {
  empty = rows == 0 || cols == 0;
  if (empty) return {};
  KERNELS_TRY(check_of(source, rows, cols).of("in"));
  KERNELS_TRY(check_of(sink, rows, cols).of("out"));
  const Plane read = plane_of(source, rows, cols), written = plane_of(sink, rows, cols);
  if (share_bytes(read, written) && !in_place(read, written))
    return invalid("out overlaps in, and not element for element");
  return {};
}
template <class Options, class Source, class Sink>
Status check_rows(const Options& options, const Source& source, const Sink& sink, int64_t rows, int64_t cols,
                  bool& empty) {
  KERNELS_TRY(check_shape(rows, cols));
  KERNELS_TRY(options.check());
  return check_operands(source, sink, rows, cols, empty);
}

}  // namespace detail
KERNELS_END
