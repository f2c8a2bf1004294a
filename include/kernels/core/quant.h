// 4-bit weights: their layout in memory, and functions that pack them on the host.
//
// int4, uint4: eight codes of 0 to 15 in a 32-bit word. Code i of a word is at bit int4_shift(i): even codes in the
// lower half-word, odd ones in the upper, so that one AND isolates codes 2j and 2j + 1 at the same place of both
// halves, where a GPU converts them as a pair. An int4 code means code - 8, a uint4 code itself, for use with zero
// points:
//
//   std::vector<uint32_t> codes(n * k / 8);
//   std::vector<float> scales(n * k / 64);
//   std::vector<uint8_t> zeros(n * k / 64);
//   status = k::pack_int4(w, k, n, k, 64, codes.data(), scales.data());                 // groups of 64
//   status = k::pack_uint4(w, k, n, k, 64, codes.data(), scales.data(), zeros.data());  // and zero points
//   status = k::pack_gf4(w, k, n, k, codes.data());
//
//   std::vector<k::float8_e8m0> powers(n * k / 32);
//   status = k::pack_fp4(w, k, n, k, 32, codes.data(), powers.data());                  // MXFP4
//
// Read them by dequant(int4(...), group_scales(...)), dequant(uint4(...), group_scales(...).zeros(...)), gf4(...) and
// dequant(fp4(...), group_scales(...)). A group is a power of two of at least 8 columns, as group_scales() requires, or
// the whole row, whose scales are row_scales(). A call that fails writes nothing.
//
// fp4: eight float4_e2m1 codes, a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6, in the same bit layout.
//
// gf4: eight weights in a word, with their scale. The low byte is the scale in float8_e5m2; above it are eight 3-bit
// codes. The weight is (code - 4) * scale / -4: the one of largest magnitude is exactly the scale.
#pragma once

#include <cmath>
#include <utility>

#include "math.h"
#include "status.h"

KERNELS_BEGIN

KERNELS_HD constexpr int int4_shift(int i) { return i / 2 * 4 + i % 2 * 16; }

// A word from eight codes in sequential order, code i at bit 4 i, as many file formats have it.
KERNELS_HD constexpr uint32_t word_of_codes(uint32_t in_order) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= (in_order >> (4 * i) & 15u) << int4_shift(i);
  return word;
}

namespace detail {
// Rounded to nearest even, by adding 1.5 * 2^23. NaN becomes `low`: its bits would not fit a code.
KERNELS_HD int clamped(float x, int low, int high) {
  const float kept = x > float(low) ? (x < float(high) ? x : float(high)) : float(low);
  return bit_cast<int32_t>(kept + 12582912.f) - 0x4b400000;
}
}  // namespace detail

struct Uint4 {
  static constexpr uint32_t mask = 15;
  static constexpr float offset = 0, slope = 1;
  static constexpr uint32_t shift(int i) { return uint32_t(int4_shift(i)); }
  static KERNELS_HD constexpr float value(uint32_t code) { return float(code); }
  static KERNELS_HD float at(uint32_t word, int i) { return value((word >> int4_shift(i)) & 15u); }
  static KERNELS_HD Pack<float, 8> all(uint32_t word) {
    Pack<float, 8> out;
    KERNELS_UNROLL
    for (int i = 0; i < 8; ++i) out.v[i] = at(word, i);
    return out;
  }
};

struct Int4 : Uint4 {
  static constexpr float offset = 8;
  static KERNELS_HD constexpr float value(uint32_t code) { return float(code) - 8.f; }
  static KERNELS_HD float at(uint32_t word, int i) { return Uint4::at(word, i) - 8.f; }
  static KERNELS_HD Pack<float, 8> all(uint32_t word) { return Uint4::all(word) - 8.f; }
  // The code of a number as pack_int4() computes it; with a scale of 0, the code of 0.
  static KERNELS_HD uint32_t code(float x, float scale) {
    return uint32_t(8 + detail::clamped(scale != 0.f ? over_once(x, scale) : 0.f, -8, 7));
  }
};

struct Fp4 : Uint4 {
  static constexpr float largest = 6;
  static KERNELS_HD constexpr float value(uint32_t code) {
    const float size = (code & 7u) < 4 ? float(code & 7u) * 0.5f : float(2 + (code & 1u)) * ((code & 2u) != 0 ? 2 : 1);
    return (code & 8u) != 0 ? -size : size;
  }
  static KERNELS_HD float at(uint32_t word, int i) { return value(word >> int4_shift(i)); }
  static KERNELS_HD Pack<float, 8> all(uint32_t word) {
    Pack<float, 8> out;
    KERNELS_UNROLL
    for (int i = 0; i < 8; ++i) out.v[i] = at(word, i);
    return out;
  }
  // The nearest code, of two equally near ones the even one. NaN becomes 0, with its sign.
  static KERNELS_HD uint32_t code(float x) {
    const float size = x < 0 ? -x : x;
    const int of_size = size >= 4   ? 4 + detail::clamped(size / 2, 2, 3)
                        : size >= 2 ? 2 + detail::clamped(size, 2, 4)
                                    : detail::clamped(size * 2, 0, 4);
    return uint32_t(of_size) | bit_cast<uint32_t>(x) >> 31 << 3;
  }
};

struct Gf4 {
  static constexpr uint32_t mask = 7;
  static constexpr float offset = 4, slope = -0.25f;
  static constexpr uint32_t shift(int i) { return uint32_t(8 + 3 * i); }
  // The value of a code without the scale.
  static KERNELS_HD constexpr float value(uint32_t code) { return (float(code) - offset) * slope; }
  static KERNELS_HD float scale(uint32_t word) {
    return convert<float>(bit_cast<float8_e5m2>(static_cast<uint8_t>(word & 0xffu))) * -0.25f;
  }
  static KERNELS_HD float code(uint32_t word, int i) { return float(int((word >> (8 + 3 * i)) & 7u) - 4); }
  static KERNELS_HD float at(uint32_t word, int i) { return code(word, i) * scale(word); }
  static KERNELS_HD Pack<float, 8> all(uint32_t word) {
    Pack<float, 8> out;
    KERNELS_UNROLL
    for (int i = 0; i < 8; ++i) out.v[i] = code(word, i);
    return out * scale(word);
  }
};

namespace detail {

#if KERNELS_VECTORS
// Decodes the codes in the low bits of each lane, without the scale of gf4; higher bits are ignored.
template <class Format, int... i>
KERNELS_HD VectorOf<float, int(sizeof...(i))> decode_lanes(VectorOf<uint32_t, int(sizeof...(i))> codes,
                                                           std::integer_sequence<int, i...>) {
  constexpr int N = sizeof...(i);
  using Floats = VectorOf<float, N>;
  // A table look-up: it uses only as many bits of a lane as the table needs.
  [[maybe_unused]] const Floats table{Format::value(uint32_t(i) & Format::mask)...};
#if defined(__AVX512F__)
  if constexpr (N == 16) return _mm512_maskz_permutexvar_ps(0xffff, (__m512i)codes, table);
#endif
#if defined(__AVX2__)
  if constexpr (N == 8 && Format::mask == 7) return _mm256_permutevar8x32_ps(table, (__m256i)codes);
#endif
  if constexpr (std::is_same<Format, Fp4>::value) {
    using Bits = VectorOf<uint32_t, N>;
    const Bits sizes = codes & 7u, sign = (codes & 8u) << 28;
#if defined(__AVX2__)
    if constexpr (N == 8)
      return bit_cast<Floats>(bit_cast<Bits>(_mm256_permutevar8x32_ps(table, (__m256i)codes)) ^ sign);
#endif
    const Bits normal = (sizes << 22) + (126u << 23);
    const Bits subnormal = bit_cast<Bits>(__builtin_convertvector((VectorOf<int32_t, N>)sizes, Floats) * 0.5f);
    return bit_cast<Floats>((sizes < 2u ? subnormal : normal) | sign);
  }
  const Floats values = __builtin_convertvector((VectorOf<int32_t, N>)(codes & Format::mask), Floats);
  if constexpr (Format::offset != 0) return (values - Format::offset) * Format::slope;
  else return values;
}
template <class Format, int N>
KERNELS_HD VectorOf<float, N> decode_lanes(const VectorOf<uint32_t, N>& codes) {
  return decode_lanes<Format>(codes, std::make_integer_sequence<int, N>());
}
// The scales in gf4 words.
template <int N>
KERNELS_HD VectorOf<float, N> gf4_scales(const VectorOf<uint32_t, N>& words) {
  const auto scales = __builtin_convertvector(words, VectorOf<uint16_t, N>)
                      << 8;  // float8_e5m2 is the upper half of a half
  return bit_cast<VectorOf<float, N>>(convert<float>(bit_cast<Pack<half, N>>(scales)));
}

// A vector of weights from whole words: each lane gets the word with its code and shifts the code down.
template <class Format, int... i>
KERNELS_HD Pack<float, int(sizeof...(i))> decode_words(const uint32_t* words, std::integer_sequence<int, i...>) {
  constexpr int N = sizeof...(i);
  using Whole = VectorOf<uint32_t, N>;
  const Whole spread = {words[i / 8]...};
  auto values = decode_lanes<Format, N>(spread >> Whole{Format::shift(i % 8)...});
  if constexpr (std::is_same<Format, Gf4>::value) values *= gf4_scales<N>(spread);
  return bit_cast<Pack<float, N>>(values);
}
#endif

// N weights from whole words.
template <class Format, int N>
KERNELS_HD Pack<float, N> decode_words(const uint32_t* words) {
#if KERNELS_VECTORS
  if constexpr (in_vectors<float, N>) {
    return decode_words<Format>(words, std::make_integer_sequence<int, N>());
  } else
#endif
  {
    Pack<float, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; i += 8) {
      const Pack<float, 8> eight = Format::all(words[i / 8]);
      KERNELS_UNROLL
      for (int j = 0; j < 8; ++j) out.v[i + j] = eight.v[j];
    }
    return out;
  }
}

// The weight of largest magnitude in columns [begin, end), with its sign; NaN counts as 0.
template <class T>
float largest_weight(const T* row, int64_t begin, int64_t end) {
  float largest = 0.f;
  for (int64_t c = begin; c < end; ++c) {
    const float x = convert<float>(row[c]);
    if (std::fabs(x) > std::fabs(largest)) largest = x;
  }
  return largest;
}

// Whether groups of this size may have their own scales, as group_scales() requires.
constexpr bool is_group_of_codes(int64_t group) { return group >= 8 && (group & (group - 1)) == 0; }

// Argument checks of packing functions. `none`: there is nothing to pack, so pointers do not matter.
template <class T>
Status check_packing(const T* w, int64_t ld, int64_t rows, int64_t cols, int group, const uint32_t* words, bool& none) {
  if (rows < 0) return invalid("rows is negative");
  if (cols < 0) return invalid("cols is negative");
  if (ld < 0) return invalid("ld is negative");
  if (!is_group_of_codes(group) && (group < 1 || group != cols))
    return invalid("group is neither a power of two, 8 at least, nor all columns");
  none = rows == 0 || cols == 0;
  if (none) return {};
  if (ld > 0 && rows > INT64_MAX / int64_t(sizeof(T)) / ld) return invalid("rows x ld exceeds 64 bits");
  KERNELS_TRY(check_pointer(w, "w: the pointer is null", "w: the pointer is not aligned for its elements"));
  return check_pointer(words, "words: the pointer is null", "words: the pointer is not aligned for its elements");
}
template <class S>
Status check_packing(const S* scales, bool none) {
  return none ? Status{}
              : check_pointer(scales, "scales: the pointer is null",
                              "scales: the pointer is not aligned for its elements");
}

// Calls f(row, index of the group in its row, index among all groups, first column, end column) for all groups of a
// matrix.
template <class F>
void each_group(int64_t rows, int64_t cols, int64_t group, const F& f) {
  const int64_t groups = (cols + group - 1) / group;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t g = 0; g < groups; ++g)
      f(row, g, row * groups + g, g * group, (g + 1) * group < cols ? (g + 1) * group : cols);
  }
}

}  // namespace detail

// int4: rows of `cols` weights, ld apart, in groups of `group` columns. A row takes (cols + 7) / 8 words, and a scale
// for each group that begins in it; codes behind the last column are those of 0.
template <class T, class S>
Status pack_int4(const T* w, int64_t ld, int64_t rows, int64_t cols, int group, uint32_t* words, S* scales) {
  bool none = false;
  KERNELS_TRY(detail::check_packing(w, ld, rows, cols, group, words, none).in("pack_int4"));
  KERNELS_TRY(detail::check_packing(scales, none).in("pack_int4"));
  const int64_t row_words = (cols + 7) / 8;
  for (int64_t i = 0; i < rows * row_words; ++i) words[i] = 0x88888888u;
  detail::each_group(rows, cols, group, [&](int64_t row, int64_t, int64_t index, int64_t begin, int64_t end) {
    // This weight becomes code -8, which has no positive counterpart.
    scales[index] = convert<S>(detail::largest_weight(w + row * ld, begin, end) / -8.f);
    const float scale = convert<float>(scales[index]);
    for (int64_t c = begin; c < end; ++c) {
      const float x = convert<float>(w[row * ld + c]);
      const uint32_t code = Int4::code(x, scale);
      uint32_t& word = words[row * row_words + c / 8];
      word = (word & ~(15u << int4_shift(int(c % 8)))) | code << int4_shift(int(c % 8));
    }
  });
  return {};
}

// uint4: the same with a zero point for each group, the code of 0 to 15 that means 0.
template <class T, class S>
Status pack_uint4(const T* w, int64_t ld, int64_t rows, int64_t cols, int group, uint32_t* words, S* scales,
                  uint8_t* zeros) {
  bool none = false;
  KERNELS_TRY(detail::check_packing(w, ld, rows, cols, group, words, none).in("pack_uint4"));
  KERNELS_TRY(detail::check_packing(scales, none).in("pack_uint4"));
  if (!none && zeros == nullptr) return invalid("pack_uint4: zeros: the pointer is null");
  const int64_t row_words = (cols + 7) / 8;
  for (int64_t i = 0; i < rows * row_words; ++i) words[i] = 0;
  detail::each_group(rows, cols, group, [&](int64_t row, int64_t, int64_t index, int64_t begin, int64_t end) {
    float low = 0.f, high = 0.f;  // 0 must have an exact code
    for (int64_t c = begin; c < end; ++c) {
      const float x = convert<float>(w[row * ld + c]);
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    scales[index] = convert<S>((high - low) / 15.f);
    const float scale = convert<float>(scales[index]);
    zeros[index] = uint8_t(detail::clamped(scale != 0.f ? -low / scale : 0.f, 0, 15));
    for (int64_t c = begin; c < end; ++c) {
      const float x = convert<float>(w[row * ld + c]);
      const uint32_t code = uint32_t(detail::clamped((scale != 0.f ? x / scale : 0.f) + float(zeros[index]), 0, 15));
      words[row * row_words + c / 8] |= code << int4_shift(int(c % 8));
    }
  });
  return {};
}

// fp4: codes of float4_e2m1, scaled so that the largest is at most 6. MXFP4 has scales of float8_e8m0 and groups of 32
// columns.
template <class T, class S>
Status pack_fp4(const T* w, int64_t ld, int64_t rows, int64_t cols, int group, uint32_t* words, S* scales) {
  bool none = false;
  KERNELS_TRY(detail::check_packing(w, ld, rows, cols, group, words, none).in("pack_fp4"));
  KERNELS_TRY(detail::check_packing(scales, none).in("pack_fp4"));
  const int64_t row_words = (cols + 7) / 8;
  for (int64_t i = 0; i < rows * row_words; ++i) words[i] = 0;
  detail::each_group(rows, cols, group, [&](int64_t row, int64_t, int64_t index, int64_t begin, int64_t end) {
    scales[index] = convert<S>(std::fabs(detail::largest_weight(w + row * ld, begin, end)) / Fp4::largest);
    const float scale = convert<float>(scales[index]);
    for (int64_t c = begin; c < end; ++c) {
      const float x = convert<float>(w[row * ld + c]);
      words[row * row_words + c / 8] |= Fp4::code(scale != 0.f ? x / scale : 0.f) << int4_shift(int(c % 8));
    }
  });
  return {};
}

// gf4: eight weights in a word, (cols + 7) / 8 words in a row.
template <class T>
Status pack_gf4(const T* w, int64_t ld, int64_t rows, int64_t cols, uint32_t* words) {
  bool none = false;
  KERNELS_TRY(detail::check_packing(w, ld, rows, cols, 8, words, none).in("pack_gf4"));
  detail::each_group(rows, cols, 8, [&](int64_t row, int64_t, int64_t index, int64_t begin, int64_t end) {
    uint32_t word = bit_cast<uint8_t>(convert<float8_e5m2>(detail::largest_weight(w + row * ld, begin, end)));
    const float scale = Gf4::scale(word);
    for (int i = 0; i < 8; ++i) {
      const float x = begin + i < end ? convert<float>(w[row * ld + begin + i]) : 0.f;
      word |= uint32_t(4 + detail::clamped(scale != 0.f ? x / scale : 0.f, -4, 3)) << (8 + 3 * i);
    }
    words[index] = word;
  });
  return {};
}

KERNELS_END
