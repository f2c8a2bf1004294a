// embed(): rows of a table by their ids, as a source with which any row operation can begin.
//
//   auto tokens = k::embed(k::load(table, d), ids, vocabulary);
//   k::copy(ex, tokens, k::store(x, d), rows, d);                                                       // a gather
//   k::rmsnorm(ex, tokens | k::scale(s) | k::tee(x, d), k::affine(gamma) | k::store(y, d), rows, d);    // and a norm
//   auto small = k::embed(k::dequant(k::int4(codes, d), k::group_scales(scales, d / 64, 64)), ids, vocabulary);
//
// Row r is row ids[r] of the table, which is a source with `vocabulary` rows. ids are signed integers of 32 or 64 bits
// in the memory space in which the call runs. An id outside [0, vocabulary) reads no memory: all values of its row are
// NaN (0 as int8). Such ids can be reported:
//
//   cudaMemsetAsync(wrong, 0xff, sizeof(int64_t), stream);     // int64_t* wrong, on the device: -1
//   k::embed(table, ids, vocabulary).report(wrong);            // the first row whose id is outside, or -1 as before
//
// Several calls may report to the same address: the lowest row of all calls remains, in whichever order they run.
#pragma once

#include <atomic>

#include "functor.h"

KERNELS_BEGIN
namespace detail {

static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t), "a number of 64 bits can be exchanged where it stands");

// Atomic minimum as unsigned numbers, of which -1 is the largest.
KERNELS_HD void report_lowest(int64_t* to, int64_t value) {
#if defined(KERNELS_DEVICE_CODE)
  atomicMin(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
#else
  auto& lowest = *reinterpret_cast<std::atomic<int64_t>*>(to);  // as std::atomic_ref of C++20 would do
  int64_t seen = lowest.load(std::memory_order_relaxed);
  while (uint64_t(value) < uint64_t(seen) && !lowest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
#endif
}

}  // namespace detail

template <class S, class Id>
class Embed : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // the table has none, and a report may be repeated
  KERNELS_HD Embed(S table, const Id* ids, int64_t vocabulary, int64_t* wrong)
      : table_(table), ids_(ids), vocabulary_(vocabulary), wrong_(wrong) {}

  // wrong receives the lowest row whose id is outside the table; it must be -1 before.
  Embed report(int64_t* wrong) const {
    Embed out = *this;
    out.wrong_ = wrong;
    return out;
  }

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(table_); }
  Status check(int64_t, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(ids_, "embed: the pointer to the ids is null",
                                      "embed: the pointer to the ids is not aligned for its elements"));
    if (reinterpret_cast<uintptr_t>(wrong_) % alignof(int64_t) != 0)
      return invalid("embed: the pointer to the report is not aligned for a number of 64 bits");
    if (vocabulary_ < 1) return invalid("embed: the vocabulary has less than one row");
    return detail::check_of(table_, vocabulary_, cols);
  }
  // The table's memory, with element 0: an element is read for several rows.
  detail::Plane plane(int64_t, int64_t cols) const {
    detail::Plane out = detail::plane_of(table_, vocabulary_, cols);
    out.element = 0;
    return out;
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    const int64_t id = ids_[row];
    if (!inside(id) && wrong_ != nullptr) detail::report_lowest(wrong_, row);
    return detail::fetch<N>(table_, inside(id) ? id : 0, col);
  }
  // The id is read again instead of being kept: it is in the cache, and this saves registers.
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    const int64_t id = ids_[row];
    auto values = detail::resolve(table_, fetched, inside(id) ? id : 0, col);
    using C = typename decltype(values)::value_type;
    const C nan = infinity<C>() - infinity<C>();
    KERNELS_UNROLL
    for (int i = 0; i < values.size; ++i) values.v[i] = inside(id) ? values.v[i] : nan;
    return values;
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(table_)); }
  KERNELS_HD auto cached() const { return with(detail::cached(table_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    if (inside(ids_[row])) detail::prefetch(table_, ids_[row], begin, end);
  }

 private:
  KERNELS_HD bool inside(int64_t id) const { return uint64_t(id) < uint64_t(vocabulary_); }
  template <class T>
  KERNELS_HD auto with(const T& table) const { return Embed<T, Id>(table, ids_, vocabulary_, wrong_); }

  S table_;
  const Id* ids_;
  int64_t vocabulary_;
  int64_t* wrong_;
};

template <class S, class Id>
auto embed(S table, const Id* ids, int64_t vocabulary) {
  constexpr bool source = detail::is_source<S>,
                 number = std::is_integral<Id>::value && std::is_signed<Id>::value && sizeof(Id) >= 4;
  static_assert(source,
                "embed() takes a source with the rows of the table: k::load(table, ld), k::dequant(codes, scales)");
  static_assert(
      !detail::has_effects<S>,
      "embed() may read a row of its table any number of times, and tee() or another effect must happen once: put it behind, embed(...) | tee(p, ld)");
  static_assert(number, "embed: ids are numbers of 32 or 64 bits with a sign");
  if constexpr (source && number) return Embed<S, Id>(table, ids, vocabulary, nullptr);
  else return RowVector<float>(nullptr);
}

KERNELS_END
