// Sources: where values are read. load(p, ld)  row(p)  per_row(p)  cycle(source, period)
#pragma once

#include <cstdint>

#include "../core/concepts.h"
#include "../core/memory.h"
#include "../core/overlap.h"
#include "traits.h"

KERNELS_BEGIN

namespace detail {

// The widest pack that an address and a row stride allow, in elements.
template <class T>
int aligned_pack(const T* p, int64_t ld, int widest) {
  int n = widest;
  for (; n > 1; n /= 2) {
    const uintptr_t bytes = uintptr_t(n) * sizeof(T), unit = bytes < 16 ? bytes : 16;
    if (reinterpret_cast<uintptr_t>(p) % unit == 0 && (uint64_t(ld) * sizeof(T)) % unit == 0) break;
  }
  return n;
}

// The row stride of single-row functors. No address depends on it, and no alignment.
constexpr int64_t kOneRow = -(int64_t(1) << 56);

// How many rows give `rows` rows if each gives `times`.
constexpr int64_t rows_for(int64_t rows, int64_t times) { return rows / times + (rows % times != 0); }

}  // namespace detail

// For a max_pack() of your own: the widest pack that an address and a row stride allow, in elements, up to 16 bytes by
// default. A stride of 0 allows any.
template <class T>
int aligned_pack(const T* p, int64_t ld, int widest = 16 / int(sizeof(T))) {
  return detail::aligned_pack(p, ld, widest);
}

// A matrix whose packs may begin at any column, except the first and last columns of a row. A placed functor is for one
// row: all its packs have the same distance from the aligned words that contain them.
template <class Src, class Dst>
class LoadAnywhere : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD LoadAnywhere(const Src* src, int64_t row_stride) : src_(src), ld_(row_stride) {}

  template <int N>
  KERNELS_HD LoadAnywhere placed(int64_t row, int64_t col) const {
    LoadAnywhere out(src_ + row * ld_, 0);
    out.behind_ = opaque(detail::bytes_behind<N>(out.src_ + col)) & 15;
    out.src_ = opaque(out.src_ - out.behind_ / int(sizeof(Src)));
    return out;
  }
  template <int N>
  KERNELS_HD Packed<Src, N> fetch(int64_t row, int64_t col) const {
    if (behind_ < 0) return read_anywhere<N>(src_ + row * ld_ + col);
    if constexpr (N == 1) return read<1, Cache::keep>(src_ + behind_ / int(sizeof(Src)) + col);
    else return read_behind<N>(src_ + col, behind_);
  }
  template <int N>
  KERNELS_HD Pack<Dst, N> resolve(const Packed<Src, N>& fetched, int64_t, int64_t) const {
    return convert<Dst>(fetched.unpack());
  }

 private:
  const Src* src_;
  int64_t ld_;
  int behind_ = -1;  // the distance of packs from multiples of their width, if known; -1: unknown
};

// A matrix of Src, read as Dst.
template <class Src, class Dst = compute_t<Src>, Cache kCache = Cache::stream>
class DirectLoad : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD DirectLoad(const Src* src, int64_t row_stride) : src_(src), ld_(row_stride) {}

  static constexpr int widest = 16 / int(sizeof(Src));
  int max_pack() const { return detail::aligned_pack(src_, ld_, widest); }
  Status check(int64_t rows, int64_t cols) const {
    if (rows == 0 || cols == 0) return {};
    KERNELS_TRY(
        detail::check_pointer(src_, "load: the pointer is null", "load: the pointer is not aligned for its elements"));
    if (ld_ == detail::kOneRow) return rows == 1 ? Status{} : invalid("load: load(p) has one row, load(p, ld) several");
    if (ld_ < 0) return invalid("load: the row stride is negative");
    if (detail::rows_overflow<Src>(rows, ld_)) return invalid("load: rows x row stride exceeds 64 bits");
    return {};
  }

  template <int N>
  KERNELS_HD Packed<Src, N> fetch(int64_t row, int64_t col) const {
    return read<N, kCache>(at(row, col));
  }
  KERNELS_HD const Src* at(int64_t row, int64_t col) const { return src_ + row * ld_ + col; }
  detail::Plane plane(int64_t rows, int64_t cols) const {
    return detail::plane(src_, ld_ == detail::kOneRow ? cols : ld_, rows, cols);
  }
  using Itself = DirectLoad;
  static constexpr bool takes_any_column = true, leads = true;
  LoadAnywhere<Src, Dst> any_column() const { return {src_, ld_}; }
  DirectLoad leading() const { return {src_, ld_}; }
  KERNELS_HD DirectLoad<Src, Dst, Cache::keep> cached() const { return {src_, ld_}; }
  template <int N>
  KERNELS_HD DirectLoad placed(int64_t row, int64_t) const { return {opaque(at(row, 0)), 0}; }
  KERNELS_HD DirectLoad at_row(int64_t row) const { return {opaque(at(row, 0)), ld_}; }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    prefetch_lines(src_ + row * ld_ + begin, src_ + row * ld_ + end);
  }
  template <int N>
  KERNELS_HD Pack<Dst, N> resolve(const Packed<Src, N>& fetched, int64_t, int64_t) const {
    return convert<Dst>(fetched.unpack());
  }

 private:
  const Src* src_;
  int64_t ld_;
};

namespace detail {
// Codes are what tensor cores multiply, or what a decoder turns into pairs of 16-bit numbers.
template <class T>
constexpr bool holds_codes = is_16_bit<T> || std::is_same<T, int8_t>::value || std::is_same<T, float8_e4m3>::value ||
                             std::is_same<T, float8_e5m2>::value;
template <class T, Cache kCache>
struct Traits<DirectLoad<T, float, kCache>> : std::conditional_t<holds_codes<T>, CodeTraits<T>, NoTraits> {
  using Copied = T;
  static constexpr bool lies_flat = true;
};
}  // namespace detail

namespace detail {
// Whether the pointer has an element type.
template <class T>
KERNELS_HD constexpr bool has_elements() {
  static_assert(
      !std::is_void<T>::value,
      "load, row, per_row: a pointer to void: cast it to the type of its elements, static_cast<const k::half*>(p) for example");
  return !std::is_void<T>::value;
}
}  // namespace detail

// A matrix: value(row, col) = p[row * ld + col].
template <class T>
KERNELS_HD auto load(const T* p, int64_t ld) {
  static_assert(!std::is_same<T, uint16_t>::value,
                "load: 16 bits that may be anything: reinterpret_cast the pointer to k::half* or k::bfloat16*");
  if constexpr (detail::has_elements<T>()) return DirectLoad<T>(p, ld);
  else return DirectLoad<float>(nullptr, ld);
}
template <class T>
auto load(const T* p) { return kernels::load(p, detail::kOneRow); }

// One vector, the same for every row: value(row, col) = p[col].
template <class T>
class RowVector : public Functor {
 public:
  static constexpr Role role = Role::source;
  explicit RowVector(const T* p) : p_(p) {}

  // Two transactions are fine here: the vector stays in the cache.
  static constexpr int widest = 32 / int(sizeof(T)) < 16 ? 32 / int(sizeof(T)) : 16;
  int max_pack() const { return detail::aligned_pack(p_, 0, widest); }
  Status check(int64_t, int64_t cols) const {
    return cols == 0 ? Status{}
                     : detail::check_pointer(p_, "the pointer to a vector is null",
                                             "the pointer to a vector is not aligned for its elements");
  }

  using Itself = RowVector;
  static constexpr bool takes_any_column = true;
  LoadAnywhere<T, compute_t<T>> any_column() const { return {p_, 0}; }

  template <int N>
  KERNELS_HD Packed<T, N> fetch(int64_t, int64_t col) const { return read<N, Cache::keep>(p_ + col); }
  template <int N>
  KERNELS_HD auto resolve(const Packed<T, N>& fetched, int64_t, int64_t) const {
    return convert<compute_t<T>>(fetched.unpack());
  }

 private:
  const T* p_;
};

namespace detail {
template <class T>
struct Traits<RowVector<T>> : NoTraits {
  static constexpr bool same_rows = true;
};
}  // namespace detail

template <class T>
auto row(const T* p) {
  if constexpr (detail::has_elements<T>()) return RowVector<T>(p);
  else return RowVector<float>(nullptr);
}

// One value per row: value(row, col) = p[row].
template <class T>
class PerRow : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool takes_any_column = true;
  explicit PerRow(const T* p) : p_(p) {}

  Status check(int64_t, int64_t) const {
    return detail::check_pointer(p_, "per_row: the vector's pointer is null",
                                 "per_row: the vector's pointer is not aligned for its elements");
  }

  // A pack of N equal values: what is read is one element.
  template <int N>
  struct One {
    Packed<T, 1> value;
  };
  template <int N>
  KERNELS_HD One<N> fetch(int64_t row, int64_t) const { return {read<1, Cache::keep>(p_ + row)}; }
  template <int N>
  KERNELS_HD auto resolve(const One<N>& fetched, int64_t, int64_t) const {
    return broadcast<N>(convert<compute_t<T>>(fetched.value.unpack().v[0]));
  }

 private:
  const T* p_;
};

template <class T>
auto per_row(const T* p) {
  if constexpr (detail::has_elements<T>()) return PerRow<T>(p);
  else return PerRow<float>(nullptr);
}

// A source whose rows repeat: row r reads row r % period. For a mask that the batch shares, for example.
template <class S>
class Cycle : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // cycle() does not take a source with any
  Cycle(S source, int64_t period) : source_(source), period_(period) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(source_); }
  Status check(int64_t rows, int64_t cols) const {
    if (period_ < 1) return invalid("cycle: the period is less than 1");
    return detail::check_of(source_, rows < period_ ? rows : period_, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const {
    const auto source = detail::any_column(source_);
    return Cycle<std::decay_t<decltype(source)>>(source, period_);
  }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(source_, row % period_, col); }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve(source_, fetched, row % period_, col);
  }

 private:
  S source_;
  int64_t period_;
};

template <class S>
Cycle<S> cycle(S source, int64_t period) {
  static_assert(
      !detail::has_effects<S>,
      "cycle() reads its rows more than once, and tee() or another effect must happen once: put it behind add(cycle(...)), or make these rows before with copy()");
  return {source, period};
}

namespace detail {

// A pointer given where a source is expected means a row vector.
template <class T>
auto as_source(const T* p) { return row(p); }
template <class T>
auto as_source(T* p) { return row(p); }
template <class S>
auto as_source(S source) {
  constexpr bool number = std::is_arithmetic<S>::value;
  static_assert(
      !number,
      "as_source: a number where there must be a source: k::shift(s) adds one to all values, k::scale(s) multiplies them by it");
  static_assert(number || is_source<S>, "as_source: expected a source (k::load, k::row, k::per_row ...) or a pointer");
  if constexpr (is_source<S>) return source;
  else return RowVector<float>(nullptr);
}
template <class S>
using source_t = decltype(as_source(std::declval<S>()));

}  // namespace detail

KERNELS_END
