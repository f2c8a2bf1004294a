// repack(): converts 4-bit matrices of GPTQ and AWQ checkpoints into the layout of uint4(), once, on the host.
//
//   // qweight, qzeros and scales of a layer of N outputs and K inputs, as they are in the file
//   k::GptqMatrix<k::half> file{qweight, qzeros, scales, N, K, 128};  // or AwqMatrix
//   std::vector<uint32_t> words(N * K / 8);
//   std::vector<k::half> s(N * K / 128);
//   std::vector<uint8_t> z(N * K / 128);
//   k::Status status = k::repack(file, {words.data(), s.data(), z.data()});
//
//   // the weights of a product, with these arrays on the device as p_words, p_s and p_z
//   k::dequant(k::uint4(p_words, K), k::group_scales(p_s, K / 128, 128).zeros(p_z))
//
// The conversion is exact: a weight is (code - zero) * scale in both layouts. Rows of the result are contiguous, so
// further matrices can follow in the same memory, as stacked() and experts() expect.
#pragma once

#include "core/quant.h"
#include "core/status.h"

KERNELS_BEGIN

// codes: qweight, [cols / 8, rows], a word has eight columns of an output. zeros: qzeros, [groups, rows / 8], a word
// has eight outputs. scales: [groups, rows]. All are contiguous. group: the number of columns in a group.
template <class S>
struct GptqMatrix {
  const uint32_t *codes, *zeros;
  const S* scales;
  int64_t rows, cols;
  int group;
  // What the file subtracted from each zero: 1, or 0 if the checkpoint_format is gptq_v2.
  int missing = 1;
  // g_idx, if the file has it: the group of each column. Groups whose columns are not adjacent (desc_act) are refused.
  const int32_t* group_of_column = nullptr;
};

// codes: qweight, [cols, rows / 8], a word has eight outputs of a column. zeros: qzeros, [groups, rows / 8], likewise.
// scales: [groups, rows].
template <class S>
struct AwqMatrix {
  const uint32_t *codes, *zeros;
  const S* scales;
  int64_t rows, cols;
  int group;
};

// The result: words with `cols` codes for each row, and scales and zeros of `cols / group` groups for each row.
template <class S>
struct Uint4Matrix {
  uint32_t* words;
  S* scales;
  uint8_t* zeros;
};

namespace detail {
// word(first of eight columns, row) returns a word as word_of_codes() makes it; zero(group, row) returns a zero point.
template <class File, class S, class F, class Zero>
Status repack(const File& from, const Uint4Matrix<S>& to, const F& word, const Zero& zero) {
  const int64_t rows = from.rows, cols = from.cols, group = from.group;
  if (rows < 0) return invalid("rows is negative");
  if (rows % 8 != 0) return invalid("rows is no multiple of 8");
  if (cols < 0) return invalid("cols is negative");
  if (cols % 8 != 0) return invalid("cols is no multiple of 8");
  if (group != cols && !is_group_of_codes(group))
    return invalid("group is neither a power of two, 8 at least, nor all columns");
  if (rows == 0 || cols == 0) return {};
  if (cols % group != 0) return invalid("cols is no multiple of group");
  KERNELS_TRY(check_pointer(from.codes, "codes: the pointer is null", "codes: the pointer is not aligned"));
  KERNELS_TRY(check_pointer(from.zeros, "zeros: the pointer is null", "zeros: the pointer is not aligned"));
  KERNELS_TRY(check_pointer(from.scales, "scales: the pointer is null", "scales: the pointer is not aligned"));
  KERNELS_TRY(check_pointer(to.words, "words: the pointer is null", "words: the pointer is not aligned"));
  KERNELS_TRY(
      check_pointer(to.scales, "scales to write: the pointer is null", "scales to write: the pointer is not aligned"));
  KERNELS_TRY(check_pointer(to.zeros, "zeros to write: the pointer is null", ""));
  constexpr int64_t kTogether = 64;  // rows read together: reads are contiguous, writes scattered
  const int64_t words = cols / 8, groups = cols / group;
  for (int64_t first = 0; first < rows; first += kTogether) {
    const int64_t end = first + kTogether < rows ? first + kTogether : rows;
    for (int64_t w = 0; w < words; ++w) {
      for (int64_t row = first; row < end; ++row) to.words[row * words + w] = word(w, row);
    }
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t row = first; row < end; ++row) {
        to.scales[row * groups + g] = from.scales[g * rows + row];
        to.zeros[row * groups + g] = zero(g, row);
      }
    }
  }
  return {};
}

// The bit position of an output's code in AWQ's word of eight.
constexpr int awq_shift(int64_t row) { return 4 * (int(row % 2) * 4 + int(row % 8) / 2); }
}  // namespace detail

template <class S>
Status repack(const GptqMatrix<S>& from, const Uint4Matrix<S>& to) {
  if (from.missing != 0 && from.missing != 1) return invalid("repack: missing is neither 0 nor 1");
  if (from.group_of_column != nullptr && from.group > 0) {
    for (int64_t c = 0; c < from.cols; ++c) {
      if (from.group_of_column[c] != c / from.group)
        return unsupported("repack: the columns of a group do not stand together (desc_act)");
    }
  }
  return detail::repack(
             from, to, [&](int64_t w, int64_t row) { return word_of_codes(from.codes[w * from.rows + row]); },
             [&](int64_t g, int64_t row) {
               const uint32_t zero = from.zeros[g * (from.rows / 8) + row / 8] >> (4 * (row % 8)) & 15u;
               return uint8_t((zero + uint32_t(from.missing)) & 15u);  // a stored 15 means -1, the zero point 0
             })
      .in("repack");
}

template <class S>
Status repack(const AwqMatrix<S>& from, const Uint4Matrix<S>& to) {
  const int64_t ld = from.rows / 8;
  return detail::repack(
             from, to,
             [&](int64_t w, int64_t row) {
               uint32_t word = 0;
               for (int i = 0; i < 8; ++i)
                 word |= (from.codes[(w * 8 + i) * ld + row / 8] >> detail::awq_shift(row) & 15u) << int4_shift(i);
               return word;
             },
             [&](int64_t g, int64_t row) {
               return uint8_t(from.zeros[g * ld + row / 8] >> detail::awq_shift(row) & 15u);
             })
      .in("repack");
}

KERNELS_END
