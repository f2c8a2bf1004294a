// Quantized weights: dequant(codes, scales), and words of 4-bit codes.
#pragma once

#include "../core/divisor.h"
#include "../core/quant.h"
#include "../functor.h"

KERNELS_BEGIN

// A scale for each tile of 2^row_log2 x 2^col_log2 codes, and optionally a zero point: weight = (code - zero) * scale.
// Both may be of any type.
template <class T, class Zero = Nothing>
class Scales {
 public:
  KERNELS_HD Scales(const T* scales, int64_t ld, int row_log2, int col_log2, const Zero* zeros = nullptr)
      : scales_(scales), zeros_(zeros), ld_(ld), row_log2_(row_log2), col_log2_(col_log2) {}

  // Adds a zero point to each scale.
  template <class Z>
  Scales<T, Z> zeros(const Z* p) const { return {scales_, ld_, row_log2_, col_log2_, p}; }

  static constexpr bool has_zeros = !std::is_same<Zero, Nothing>::value;
  // The number of adjacent columns that share a scale, at most `most`.
  int group(int most = 32) const { return col_log2_ < 31 ? lesser(1 << col_log2_, most) : most; }

  // The scales from this row on; if a tile has several rows, for this row only.
  KERNELS_HD Scales at_row(int64_t row) const {
    const int64_t at = (row >> row_log2_) * ld_;
    return {opaque(scales_ + at), ld_, row_log2_, col_log2_, has_zeros ? opaque(zeros_ + at) : nullptr};
  }
  KERNELS_HD int row_log2() const { return row_log2_; }
  KERNELS_HD int col_log2() const { return col_log2_; }
  KERNELS_HD const T* scale_at(int64_t row, int64_t col) const { return scales_ + index(row, col); }
  KERNELS_HD const Zero* zero_at(int64_t row, int64_t col) const { return zeros_ + index(row, col); }

  // Whether the scales or zero points of so many rows span more than 63 bits of bytes.
  bool overflow(int64_t rows) const {
    const int64_t of_scales = rows > 0 ? ((rows - 1) >> row_log2_) + 1 : 0;
    return detail::rows_overflow<T>(of_scales, ld_) || (has_zeros && detail::rows_overflow<Zero>(of_scales, ld_));
  }
  // Overlapping rows of scales are taken for a mistake, except a single row for all.
  Status check_rows(int64_t rows, int64_t cols) const {
    if (overflow(rows)) return invalid("dequant: rows x row stride of the scales exceeds 64 bits");
    if (ld_ == 0 || (rows - 1) >> row_log2_ < 1 || cols < 1 || ld_ > (cols - 1) >> col_log2_) return {};
    return invalid("dequant: the row stride of the scales is smaller than the number of groups in a row");
  }

  struct Fetched {
    Packed<T, 1> scale;
    std::conditional_t<has_zeros, Packed<std::conditional_t<has_zeros, Zero, uint8_t>, 1>, Nothing> zero;
  };
  KERNELS_HD Fetched fetch(int64_t row, int64_t col) const {
    Fetched out;
    const int64_t at = index(row, col);
    out.scale = read<1, Cache::keep>(scales_ + at);
    if constexpr (has_zeros) out.zero = read<1, Cache::keep>(zeros_ + at);
    return out;
  }
  static KERNELS_HD float scale(const Fetched& f) { return convert<float>(f.scale.unpack().v[0]); }
  static KERNELS_HD float zero(const Fetched& f) {
    if constexpr (has_zeros) return convert<float>(f.zero.unpack().v[0]);
    else return 0.f;
  }

  Status check(const char* null = "dequant: the pointer to scales is null",
               const char* misaligned = "dequant: the pointer to scales is not aligned for its elements",
               const char* no_zeros = "dequant: the pointer to zeros is null",
               const char* misaligned_zeros = "dequant: the pointer to zeros is not aligned for its elements",
               const char* size = "dequant: the group or block size is not a power of two",
               const char* stride = "dequant: the row stride of the scales is negative") const {
    KERNELS_TRY(detail::check_pointer(scales_, null, misaligned));
    if constexpr (has_zeros) KERNELS_TRY(detail::check_pointer(zeros_, no_zeros, misaligned_zeros));
    if (row_log2_ < 0 || col_log2_ < 0) return invalid(size);
    if (ld_ < 0) return invalid(stride);
    return {};
  }

 private:
  KERNELS_HD int64_t index(int64_t row, int64_t col) const { return (row >> row_log2_) * ld_ + (col >> col_log2_); }

  const T* scales_;
  const Zero* zeros_;
  int64_t ld_;
  int row_log2_, col_log2_;
};

namespace detail {
constexpr int kOneForAll = 62;
constexpr int log2_of(int64_t n) {
  for (int log2 = 0; log2 < 31; ++log2) {
    if (int64_t(1) << log2 == n) return log2;
  }
  return -1;
}
}  // namespace detail

template <class T>
Scales<T> tensor_scale(const T* p) { return {p, 0, detail::kOneForAll, detail::kOneForAll}; }
template <class T>
Scales<T> row_scales(const T* p) { return {p, 1, 0, detail::kOneForAll}; }
// The scale of (row, col) is p[row * ld + col / group]. group: a power of two.
template <class T>
Scales<T> group_scales(const T* p, int64_t ld, int group) { return {p, ld, 0, detail::log2_of(group)}; }
// The scale of (row, col) is p[row / block * ld + col / block]. block: a power of two.
template <class T>
Scales<T> block_scales(const T* p, int64_t ld, int block) {
  return {p, ld, detail::log2_of(block), detail::log2_of(block)};
}

// Codes with their scales. Engines that sum over columns use unscaled() and scale_of(), and multiply by the scale once
// for each pack; all others read it as an ordinary source.
template <class Codes, class S>
class Dequant : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Dequant(Codes codes, S scales) : codes_(codes), scales_(scales) {}

  static constexpr int widest = detail::widest_of<Codes>();
  int max_pack() const { return lesser(detail::max_pack_of(codes_), scales_.group()); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(scales_.check());
    KERNELS_TRY(scales_.check_rows(rows, cols));
    return detail::check_of(codes_, rows, cols);
  }

  template <class CodesFetched>
  struct Both {
    CodesFetched codes;
    typename S::Fetched scales;
  };
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    const auto codes = detail::fetch<N>(codes_, row, col);
    return Both<std::decay_t<decltype(codes)>>{codes, scales_.fetch(row, col)};
  }
  template <class F>
  KERNELS_HD auto unscaled(const F& fetched, int64_t row, int64_t col) const {
    const auto codes = detail::resolve(codes_, fetched.codes, row, col);
    if constexpr (S::has_zeros) return codes - S::zero(fetched.scales);
    else return codes;
  }
  template <class F>
  KERNELS_HD float scale_of(const F& fetched) const { return S::scale(fetched.scales); }
  template <class F>
  KERNELS_HD auto resolve(const F& fetched, int64_t row, int64_t col) const {
    return unscaled(fetched, row, col) * scale_of(fetched);
  }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(codes_, row, begin, end);
  }
  template <class Of = Codes>
  KERNELS_HD auto at_row(int64_t row) const -> decltype(Dequant<decltype(std::declval<const Of&>().at_row(row)), S>{
      std::declval<const Of&>().at_row(row), std::declval<const S&>()}) {
    return {codes_.at_row(row), scales_.at_row(row)};
  }

  detail::Plane plane(int64_t rows, int64_t cols) const { return detail::plane_of(codes_, rows, cols); }
  KERNELS_HD const Codes& codes() const { return codes_; }
  KERNELS_HD const S& scales() const { return scales_; }

 private:
  Codes codes_;
  S scales_;
};

namespace detail {
template <class Codes, class T, class ZeroPoint>
struct Traits<Dequant<Codes, Scales<T, ZeroPoint>>> : PlacedTraits<Codes> {
  static constexpr bool scaled = true;
  using Zero = ZeroPoint;
  using Memory = void;
};
}  // namespace detail

// weight = (code - zero) * scale. codes: load() of 8-bit codes, or int4(), uint4(), fp4(); gf4() has its own scales.
template <class Codes, class S>
auto dequant(Codes codes, S scales) {
  constexpr bool bare = std::is_pointer<S>::value || std::is_arithmetic<S>::value;
  static_assert(detail::is_source<Codes>, "dequant() takes a source of codes (k::load, k::int4 ...) and scales");
  static_assert(
      !bare,
      "dequant(): a pointer or a number where there must be scales: k::tensor_scale(p), k::row_scales(p), k::group_scales(p, ld, group) or k::block_scales(p, ld, block), of float, half or bfloat16");
  if constexpr (bare) return Dequant<Codes, Scales<float>>(codes, tensor_scale<float>(nullptr));
  else return Dequant<Codes, S>(codes, scales);
}

// Weights, eight in a 32-bit word, in the layout of Format (core/quant.h). ld counts weights and is a multiple of 8.
template <class Format>
class Words : public Functor {
 public:
  static constexpr Role role = Role::source;
  KERNELS_HD Words(const uint32_t* words, int64_t ld) : words_(words), ld_(ld) {}

  static constexpr int widest = 32;
  int max_pack() const {
    const int words = detail::aligned_pack(words_, ld_ / 8, 4);
    return 8 * words;
  }
  Status check(int64_t rows, int64_t cols) const {
    if (rows == 0 || cols == 0) return {};
    KERNELS_TRY(detail::check_pointer(words_, "4-bit weights: the pointer is null",
                                      "4-bit weights: the pointer is not aligned for words of 32 bits"));
    if (ld_ % 8 != 0) return invalid("4-bit weights: the row stride (counted in codes) is not a multiple of 8");
    if (ld_ < cols && rows > 1)
      return invalid("4-bit weights: the row stride (counted in codes) is smaller than a row");
    if (detail::rows_overflow<uint32_t>(rows, ld_)) return invalid("4-bit weights: rows x row stride exceeds 64 bits");
    return {};
  }

  template <int N>
  struct Some {
    Packed<uint32_t, (N + 7) / 8> words;
  };
  template <int N>
  KERNELS_HD Some<N> fetch(int64_t row, int64_t col) const {
    static_assert(N < 8 || N % 8 == 0, "whole words, or part of one");
    return {read<(N + 7) / 8, Cache::stream>(at(row) + (col >> 3))};
  }
  KERNELS_HD Words at_row(int64_t row) const { return {opaque(at(row)), ld_}; }
  KERNELS_HD const uint32_t* at(int64_t row) const { return words_ + row * (ld_ / 8); }
  template <int N>
  KERNELS_HD Pack<float, N> resolve(const Some<N>& fetched, int64_t, int64_t col) const {
    if constexpr (N < 8) {
      Pack<float, N> out;
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) out.v[i] = Format::at(fetched.words.words[0], int(col % 8) + i);
      return out;
    } else {
      return detail::decode_words<Format, N>(fetched.words.words);
    }
  }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    prefetch_lines(at(row) + (begin >> 3), at(row) + (end >> 3));
  }

 private:
  const uint32_t* words_;
  int64_t ld_;
};

namespace detail {
template <class Format>
struct Traits<Words<Format>> : CodeTraits<Format, 32> {
  static constexpr bool lies_flat = true;
};
}  // namespace detail

inline Words<Int4> int4(const uint32_t* words, int64_t ld) { return {words, ld}; }
inline Words<Uint4> uint4(const uint32_t* words, int64_t ld) { return {words, ld}; }
inline Words<Fp4> fp4(const uint32_t* words, int64_t ld) { return {words, ld}; }
inline Words<Gf4> gf4(const uint32_t* words, int64_t ld) { return {words, ld}; }

KERNELS_END
