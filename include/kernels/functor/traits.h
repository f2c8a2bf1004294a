// Traits: what engines know of a functor at compile time. A source or map that differs from the defaults specializes
// Traits in the header that defines it.
#pragma once

#include "../core/concepts.h"

KERNELS_BEGIN
namespace detail {

// A 16-bit type that tensor cores multiply.
template <class T>
constexpr bool is_16_bit = std::is_same<T, half>::value || std::is_same<T, bfloat16>::value;
template <class T>
using only_16_bit = std::conditional_t<is_16_bit<T>, T, void>;

// The defaults: engines know nothing, and call resolve(). Every functor of the user's own has these.
struct NoTraits {
  // Of a source: the codes that it reads as they are in memory (a number type, or a format of core/quant.h), and how
  // many of them are in the 16 bytes that a lane reads at a time. void: the source has to be resolved.
  using Code = void;
  static constexpr int pack = 0;
  // Whether a row's codes are contiguous, so that products may copy them from address_of() the first column on.
  static constexpr bool rows_in_runs = false;
  // The element type, if the source is nothing but numbers in memory at the address that at() gives; these may be
  // copied.
  using Copied = void;
  // Whether it is nothing but codes at the address that at() gives.
  static constexpr bool lies_flat = false;
  // Whether fetch() also reads scales, and the type of the zero points beside them, or Nothing.
  static constexpr bool scaled = false;
  using Zero = Nothing;
  // The 16-bit type in memory on which the source computes, or void.
  using Memory = void;
  // Whether all rows are the same.
  static constexpr bool same_rows = false;
  // Of a map: whether it reads something for each result (x, for x += ...), and not only for each column.
  static constexpr bool reads_matrix = false;
  // Of a sink: the type that it stores, if it only rounds values to that type.
  using Stored = void;
};

// A specialization is not inherited: a class derived from a source may behave differently.
template <class F>
struct Traits : NoTraits {};

// For sources of codes.
template <class T, int kPack = 16 / int(sizeof(T))>
struct CodeTraits : NoTraits {
  using Code = T;
  static constexpr int pack = kPack;
  static constexpr bool rows_in_runs = true;
  using Memory = only_16_bit<T>;
};

// For sources that read the rows of S at other addresses: the same codes.
template <class S>
struct PlacedTraits : NoTraits {
  using Code = typename Traits<S>::Code;
  static constexpr int pack = Traits<S>::pack;
  static constexpr bool rows_in_runs = Traits<S>::rows_in_runs;
  static constexpr bool scaled = Traits<S>::scaled;
  using Zero = typename Traits<S>::Zero;
  using Memory = std::conditional_t<scaled, void, only_16_bit<Code>>;
};

// For sources that compute with the values of S.
template <class S>
struct ComputedTraits : NoTraits {
  using Memory = typename Traits<S>::Memory;
};

}  // namespace detail
KERNELS_END
