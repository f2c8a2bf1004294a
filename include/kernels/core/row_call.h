// What every row call, on the GPU and on the CPU, checks before it does anything.
#pragma once

#include "concepts.h"

KERNELS_BEGIN
namespace detail {

constexpr int64_t kMaxCols = 1ll << 30;

inline Status check_shape(int64_t rows, int64_t cols) {
  if (rows < 0) return invalid("rows is negative");
  if (cols < 0) return invalid("cols is negative");
  if (cols > kMaxCols) return unsupported("cols is larger than 2^30");
  return {};
}

// The explicit compute type of a OneFlow call, if there is one, is the one that the load produces.
template <class Source, class Compute>
constexpr void check_compute() {
  static_assert(is_source<Source>, "the second argument must be a source: k::load(p, ld), with maps behind it if wanted");
  if constexpr (is_source<Source> && !std::is_void<Compute>::value) {
    static_assert(std::is_same<Compute, compute_type<Source>>::value, "the compute type is the one the load produces");
  }
}

// `empty` is set when there is nothing to do.
template <class Options, class Source, class Sink>
Status check_rows(const Options& options, const Source& source, const Sink& sink, int64_t rows, int64_t cols, bool& empty) {
  static_assert(is_source<Source>, "the second argument must be a source: k::load(p, ld), with maps behind it if wanted");
  static_assert(is_sink<Sink>, "the third argument must be a sink: k::store(p, ld), with maps before it if wanted");
  static_assert(!wants_pairs<Sink>(), "rope | sink is for products; elsewhere rotate what is read: source | rope");
  KERNELS_TRY(check_shape(rows, cols));
  KERNELS_TRY(options.check());
  empty = rows == 0 || cols == 0;
  if (empty) return {};
  KERNELS_TRY(check_of(source, rows, cols));
  return check_of(sink, rows, cols);
}

}  // namespace detail
KERNELS_END
