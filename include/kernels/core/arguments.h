// Checks that a call's arguments are a source and a sink. Each wrong argument gets one message that says what was
// expected. Calls make these checks before they name any member of such an argument, and compile nothing behind a
// failed one:
//
//   if constexpr (!takes_source<In>() || !takes_sink<Out>()) return not_compiled();
//   else ...
#pragma once

#include <cstdio>

#include "row_sink.h"
#include "workspace.h"

KERNELS_BEGIN
namespace detail {

// The reason states the size that there is and the size that is needed.
inline Status check_workspace(const Workspace& workspace, size_t needed, size_t alignment = 16) {
  static thread_local char text[128];
  const size_t there = workspace.ptr != nullptr ? workspace.bytes : 0;
  if (there < needed) {
    std::snprintf(text, sizeof(text), "the workspace has %zu bytes, and %zu are needed", there, needed);
    return invalid(text);
  }
  if (needed == 0 || reinterpret_cast<uintptr_t>(workspace.ptr) % alignment == 0) return {};
  std::snprintf(text, sizeof(text), "the workspace is not at a multiple of %zu bytes", alignment);
  return invalid(text);
}

// For code that never runs: a static_assert has failed.
inline Status not_compiled() { return unsupported("a call with arguments that do not compile"); }

template <class F>
constexpr bool takes_source() {
  constexpr bool pointer = std::is_pointer<std::decay_t<F>>::value,
                 read = has_fetch<F>::value || has_load<F>::value || oneflow_load<F>;
  static_assert(!pointer, "a pointer where there must be a source: k::load(p, ld), whose rows are ld elements apart");
  static_assert(!is_map<F>, "a map where there must be a source: k::load(p, ld) | map");
  static_assert(!is_sink<F>, "a sink where there must be a source: k::load(p, ld) reads, k::store(p, ld) writes");
  static_assert(
      !is_source<F> || read,
      "weights where there must be a source: gated() becomes one with swiglu() or another glu() behind it, experts() and mixed() go with matmul alone");
  constexpr bool none = role_of<F>() == Role::none,
                 other_load = none && (has_plain_load<F>::value || has_template_load<F>::value);
  static_assert(
      !other_load,
      "the functor's load does not fit: it must be template <int N> KERNELS_HD k::Pack<float, N> load(int64_t row, int64_t col) const, or with double, or as in OneFlow template <int N> void load(Dst* dst, int64_t row, int64_t col)");
  static_assert(pointer || other_load || !none,
                "there must be a source here: k::load(p, ld), with maps behind it if wanted");
  if constexpr (is_source<F> && read) return ComputeType<F>::right;
  else return false;
}

template <class F>
constexpr bool takes_sink() {
  constexpr bool pointer = std::is_pointer<std::decay_t<F>>::value;
  static_assert(!pointer, "a pointer where there must be a sink: k::store(p, ld), whose rows are ld elements apart");
  static_assert(!is_map<F>, "a map where there must be a sink: map | k::store(p, ld)");
  static_assert(!is_source<F>, "a source where there must be a sink: k::store(p, ld) writes, k::load(p, ld) reads");
  constexpr bool none = role_of<F>() == Role::none,
                 other_store = none && (has_plain_store<F>::value || has_template_store<F>::value);
  static_assert(
      !other_store,
      "the functor's store does not fit: it must be template <int N> KERNELS_HD void store(k::Pack<float, N> values, int64_t row, int64_t col) const, or with double, or as in OneFlow template <int N> void store(const Src* src, int64_t row, int64_t col)");
  static_assert(pointer || other_store || !none,
                "there must be a sink here: k::store(p, ld), with maps before it if wanted");
  return is_sink<F> && RowSinkFits<F>::value;
}

}  // namespace detail
KERNELS_END
