// Quantizing sinks: they write codes with scales that are given, or that they compute for groups of columns.
// quantize(p, ld, scales), which computes one scale for each row, is in functor.h.
//
//   k::copy(ex, in, k::quantize(q, ld, k::tensor_scale(s)), rows, cols);                    // one scale, given
//   // one for each 128 columns, given
//   k::copy(ex, in, k::quantize(q, ld, k::group_scales(s, cols / 128, 128)), rows, cols);
//   // one for each 128 columns, computed and written to s
//   k::copy(ex, in, k::quantize(q, ld, s, cols / 128, 128), rows, cols);
//   // one for each row, computed and written to s
//   k::copy(ex, in, k::quantize(q, ld, s), rows, cols);
//   // behind a row operation, with scales of any of these kinds
//   k::rmsnorm(ex, in, k::affine(gamma) | k::quantize(q, ld, s, cols / 128, 128), rows, cols);
//
// Codes: int8_t, float8_e4m3, float8_e5m2.
//
// Given scales are those of dequant() in weights.h, which reads such codes back; they are read from the memory space in
// which the call runs. A code is value * (1 / scale), plus the zero point if there is one, rounded to nearest even.
// Values beyond the codes become the largest code. With a scale of 0, finite values count as 0.
//
// A computed scale is largest |value| / largest code. It is at least 2^-126, or 0 if all values are 0. It is written as
// float, half or bfloat16, the type that s points to, and codes are computed with the rounded scale. As half it is at
// least 2^-24 and at most 65504; values too large for that become the largest code. A NaN or an infinity makes the
// scale NaN or infinite, so that no code of the group dequantizes to a finite number.
#pragma once

#include "weights.h"

KERNELS_BEGIN
namespace detail {

// The reciprocal of a given scale, which is infinite if the scale is subnormal: 0 times it would be NaN.
KERNELS_HD float bounded(float x) {
  const float most = largest<float>();
  return x > most ? most : x < -most ? -most : x;
}

template <class T>
Status check_codes(const T* q, int64_t ld, int64_t rows, int64_t cols) {
  KERNELS_TRY(
      check_pointer(q, "quantize: the pointer is null", "quantize: the pointer is not aligned for its elements"));
  if (ld < cols && rows > 1) return invalid("quantize: the row stride is smaller than a row");
  if (rows_overflow<T>(rows, ld)) return invalid("quantize: rows x row stride exceeds 64 bits");
  return {};
}

}  // namespace detail

template <class T, class S>
class QuantizeBy : public Functor {
 public:
  static constexpr Role role = Role::sink;
  QuantizeBy(T* q, int64_t ld, S scales) : q_(q), ld_(ld), scales_(scales) {}

  static constexpr int widest = 16;
  int max_pack() const { return lesser(detail::aligned_pack(q_, ld_, widest), scales_.group()); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_codes(q_, ld_, rows, cols));
    KERNELS_TRY(scales_.check(
        "quantize: the pointer to scales is null", "quantize: the pointer to scales is not aligned for its elements",
        "quantize: the pointer to zeros is null", "quantize: the pointer to zeros is not aligned for its elements",
        "quantize: the group or block size is not a power of two",
        "quantize: the row stride of the scales is negative"));
    return scales_.overflow(rows) ? invalid("quantize: rows x row stride of the scales exceeds 64 bits") : Status{};
  }
  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane(q_, ld_, rows, cols); }

  template <int N>
  KERNELS_HD typename S::Fetched prepare(int64_t row, int64_t col) const { return scales_.fetch(row, col); }
  template <class C, int N>
  KERNELS_HD void store(const Pack<C, N>& v, const typename S::Fetched& given, int64_t row, int64_t col) const {
    const float scale = S::scale(given), factor = scale != 0.f ? detail::bounded(1.f / scale) : 0.f;
    if constexpr (S::has_zeros) {
      write<N>(q_ + row * ld_ + col, convert<T>(times_once(convert<float>(v), factor) + S::zero(given)));
    } else {
      write<N>(q_ + row * ld_ + col, convert<T>(convert<float>(v) * factor));
    }
  }
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    store(v, prepare<N>(row, col), row, col);
  }

 private:
  T* q_;
  int64_t ld_;
  S scales_;
};

template <class T, class U, class Zero>
auto quantize(T* q, int64_t ld, Scales<U, Zero> scales) {
  if constexpr (detail::takes_codes<T>()) return QuantizeBy<T, Scales<U, Zero>>(q, ld, scales);
  else return QuantizeBy<int8_t, Scales<U, Zero>>(nullptr, ld, scales);
}

// Computes a scale for each group of columns and writes it to scales[row * scales_ld + col / group]. copy() and row
// operations show this sink the values of a group before it writes their codes.
template <class T, class S>
class QuantizeGroups : public Functor {
 public:
  static constexpr Role role = Role::row_sink;
  static constexpr bool by_group = true;
  QuantizeGroups(T* q, int64_t ld, S* scales, int64_t scales_ld, int group)
      : q_(q), scales_(scales), ld_(ld), scales_ld_(scales_ld), group_(group) {}

  static constexpr int widest = 16;
  int max_pack() const { return detail::pack_at(group_, detail::aligned_pack(q_, ld_, widest)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_codes(q_, ld_, rows, cols));
    KERNELS_TRY(detail::check_pointer(scales_, "quantize: the pointer to the scales is null",
                                      "quantize: the pointer to the scales is not aligned for its elements"));
    if (group_ < 1) return invalid("quantize: the group size is less than 1");
    if (rows > 1 && scales_ld_ < cols / group_ + (cols % group_ != 0))
      return invalid("quantize: the row stride of the scales is smaller than the number of groups");
    if (detail::rows_overflow<S>(rows, scales_ld_))
      return invalid("quantize: rows x row stride of the scales exceeds 64 bits");
    return {};
  }
  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane(q_, ld_, rows, cols); }

  using State = detail::LargestSeen<T, S>;
  KERNELS_HD int group() const { return group_; }
  KERNELS_HD void write_scale(const State& s, int64_t row, int64_t index) const {
    scales_[row * scales_ld_ + index] = s.scale();
  }
  template <class C, int N>
  KERNELS_HD void store(const Pack<C, N>& v, float reciprocal, int64_t row, int64_t col) const {
    write<N>(q_ + row * ld_ + col, State::codes(convert<float>(v), reciprocal));
  }

 private:
  T* q_;
  S* scales_;
  int64_t ld_, scales_ld_;
  int group_;
};

// A group has any number of columns; the last of a row may have fewer. Powers of two from 16 on are fastest.
template <class T, class S>
auto quantize(T* q, int64_t ld, S* scales, int64_t scales_ld, int group) {
  if constexpr (detail::takes_codes<T>() && detail::takes_found_scales<S>())
    return QuantizeGroups<T, S>(q, ld, scales, scales_ld, group);
  else return QuantizeGroups<int8_t, float>(nullptr, ld, nullptr, scales_ld, group);
}
template <class T>
auto quantize(T* q, int64_t ld, std::nullptr_t, int64_t scales_ld, int group) {
  return kernels::quantize(q, ld, static_cast<float*>(nullptr), scales_ld, group);
}

KERNELS_END
