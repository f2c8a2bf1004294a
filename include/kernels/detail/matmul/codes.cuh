// Weights of 8 and 4 bits as they are in memory, for kernels that copy codes and scales to shared memory without
// decoding.
#pragma once

#include "../dequantize.cuh"

KERNELS_BEGIN
namespace detail {

// The addresses of a row's codes, scales and zero points, from its first column on.
template <class S, class Z>
struct CodedRow {
  const unsigned char* codes;
  const S* scales;
  const Z* zeros;
};
template <class Src, Cache kCache>
KERNELS_HD auto coded_row(const DirectLoad<Src, float, kCache>& source, int64_t row) {
  return CodedRow<Nothing, Nothing>{reinterpret_cast<const unsigned char*>(source.at(row, 0)), nullptr, nullptr};
}
template <class Format>
KERNELS_HD auto coded_row(const Words<Format>& source, int64_t row) {
  return CodedRow<Nothing, Nothing>{reinterpret_cast<const unsigned char*>(source.at(row)), nullptr, nullptr};
}
template <class Codes, class S, class Z>
KERNELS_HD auto coded_row(const Dequant<Codes, Scales<S, Z>>& source, int64_t row) {
  return CodedRow<S, Z>{coded_row(source.codes(), row).codes, source.scales().scale_at(row, 0),
                        source.scales().zero_at(row, 0)};
}
template <class S>
KERNELS_HD auto coded_row(const Paired<S>& source, int64_t row) {
  return coded_row(source.source(), source.origin(row));
}
template <class S, int kParts>
KERNELS_HD auto coded_row(const Stacked<S, kParts>& source, int64_t row) {
  return source.visit(row, [&](const S& part, int64_t begin) { return coded_row(part, row - begin); });
}

// The number of columns that share a scale, as a power of two: kOneForAll for whole rows, 0 without scales, -1 if
// stages cannot hold them. It must be the same for all matrices of a product.
template <class W>
int group_log2_of(const W& w, int64_t cols) {
  if constexpr (is_stacked<W>::value) {
    int log2 = 0;
    bool first = true;
    w.any([&](const auto& part) {
      const int other = group_log2_of(part, cols);
      log2 = first || log2 == other ? other : -1;
      first = false;
      return log2 < 0;
    });
    return log2;
  } else if constexpr (is_paired<W>::value) {
    return group_log2_of(w.source(), cols);
  } else if constexpr (!Coded<W>::scaled) {
    return max_pack_of(w) >= Coded<W>::pack ? 0 : -1;
  } else {
    const auto& scales = w.scales();
    if (max_pack_of(w.codes()) < Coded<W>::pack) return -1;
    if (scales.col_log2() >= 31 || int64_t(1) << scales.col_log2() >= cols) return kOneForAll;
    const bool fits = 1 << scales.col_log2() >= Coded<W>::pack && sizeof(*scales.scale_at(0, 0)) <= 4;
    return fits ? scales.col_log2() : -1;
  }
}

// Whether coded_row() supports a source, and whether its rows have a constant stride.
template <class S>
struct CodesInMemory : std::false_type {
  static constexpr bool in_rows = false;
};
struct CodesInRows : std::true_type {
  static constexpr bool in_rows = true;
};
template <class Src, Cache kCache>
struct CodesInMemory<DirectLoad<Src, float, kCache>> : CodesInRows {};
template <class Format>
struct CodesInMemory<Words<Format>> : CodesInRows {};
template <class Codes, class S>
struct CodesInMemory<Dequant<Codes, S>> : std::integral_constant<bool, CodesInMemory<Codes>::in_rows> {
  static constexpr bool in_rows = CodesInMemory<Codes>::in_rows;
};
template <class S>
struct CodesInMemory<Paired<S>> : std::integral_constant<bool, CodesInMemory<S>::in_rows> {
  static constexpr bool in_rows = false;
};
template <class S, int kParts>
struct CodesInMemory<Stacked<S, kParts>> : CodesInMemory<S> {
  static constexpr bool in_rows = false;
};

// The types of a source's scales and zero points, or Nothing.
template <class Source>
struct CodedTypes {
  using Row = decltype(coded_row(
      std::declval<const std::conditional_t<CodesInMemory<Source>::value, Source, DirectLoad<half>>&>(), 0));
  using Scale = std::remove_const_t<std::remove_pointer_t<decltype(Row::scales)>>;
  using Zero = std::remove_const_t<std::remove_pointer_t<decltype(Row::zeros)>>;
  static constexpr bool scaled = !std::is_same<Scale, Nothing>::value, zeroed = !std::is_same<Zero, Nothing>::value;
};

// Whether each row's scales begin at a 32-bit word, and its zero points, too. A single scale for a whole row may be
// anywhere.
template <class W>
bool scales_in_words(const W& w, int group_log2) {
  if constexpr (is_stacked<W>::value) {
    return !w.any([&](const auto& part) { return !scales_in_words(part, group_log2); });
  } else if constexpr (is_paired<W>::value) {
    return scales_in_words(w.source(), group_log2);
  } else if constexpr (Coded<W>::scaled) {
    const auto& scales = w.scales();
    const auto begins = [&](int64_t row) {
      const auto zeros = has_zeros<W> ? reinterpret_cast<uintptr_t>(scales.zero_at(row, 0)) : 0,
                 factors = group_log2 == kOneForAll ? 0 : reinterpret_cast<uintptr_t>(scales.scale_at(row, 0));
      return (factors | zeros) % 4 == 0;
    };
    return begins(0) && begins(int64_t(1) << scales.row_log2());
  } else {
    return true;
  }
}

// The bytes of a 16-byte chunk that has `codes` codes, at most kPack.
template <int kPack>
__device__ __forceinline__ int bytes_there(int codes) {
  return codes <= 0 ? 0 : lesser(16, (codes * 16 + kPack - 1) / kPack);
}

// Copies the scales (or zero points) of a row's groups in kCols columns from `col` on, as whole 32-bit words: the first
// one keeps its distance from a word boundary. Words beyond the row become zeros.
template <int kCols, class Of>
__device__ __forceinline__ void copy_groups(uint32_t to, const Of* row, int col, int cols, int group_log2) {
  const int first = col >> group_log2, groups = greater(1, kCols >> group_log2), all = (cols - 1 >> group_log2) + 1;
  const uintptr_t at = reinterpret_cast<uintptr_t>(row + first), words = at & ~uintptr_t(3);
  const int wanted = int(at & 3) + groups * int(sizeof(Of)),
            there = int(at & 3) + lesser(groups, all - first) * int(sizeof(Of));
  const unsigned char* const from = reinterpret_cast<const unsigned char*>(words);
  if (wanted % 16 == 0 && words % 16 == 0) {
#pragma unroll 1
    for (int i = 0; i < wanted; i += 16)
      arch::copy_async_16(to + i, i < there ? from + i : from, greater(0, lesser(16, there - i)));
  } else {
#pragma unroll 1
    for (int i = 0; i < wanted; i += 4)
      arch::copy_async_4(to + i, i < there ? from + i : from, greater(0, lesser(4, there - i)));
  }
}

// A scale, twice, as a pair of T.
template <class T, class Scale>
__device__ __forceinline__ uint32_t pair_of_scale(Scale scale) {
  if constexpr (std::is_same<Scale, T>::value) {
    uint16_t bits;
    memcpy(&bits, &scale, 2);
    return bits * 0x10001u;
  } else {
    const float value = convert<float>(scale);
    return rounded_pair<T>(value, value);
  }
}

// The bytes of a row's scales (or zero points) in kCols columns, if each row's begin at a word.
template <int kCols, class Of>
KERNELS_HD int bytes_of_groups(int group_log2) {
  return greater((kCols >> lesser(group_log2, 30)) * int(sizeof(Of)), 4);
}
// Copies the scales (or zero points) of one row to shared memory, kCols columns at a time, as whole words, several of
// them in one access if alignment allows. Groups beyond the row become zeros. The row begins at a word; the destination
// is aligned to the copied bytes, or to 16.
template <int kCols, class Of>
class GroupCopy {
 public:
  GroupCopy() = default;
  __device__ __forceinline__ GroupCopy(const Of* row, int columns, int group_log2)
      : row_(opaque(reinterpret_cast<const unsigned char*>(row))), log2_(lesser(group_log2, 30)) {
    all_ = opaque(((columns - 1 >> log2_) + 1) * int(sizeof(Of)));
    bytes_ = opaque(bytes_of_groups<kCols, Of>(log2_));
    const unsigned alignment = unsigned(reinterpret_cast<uintptr_t>(row)) | unsigned(all_) | unsigned(bytes_);
    width_ = opaque(alignment % 16 == 0 ? 16 : alignment % 8 == 0 ? 8 : alignment % 4 == 0 ? 4 : 0);
  }
  // col: a multiple of kCols.
  __device__ __forceinline__ void load(uint32_t to, int col, bool wanted) const {
    const int first = (col >> log2_) * int(sizeof(Of)) & ~3;
    const unsigned char* const from = row_ + first;
    const auto copy = [&](int i) {
      const bool past_end = first + i >= all_;
      arch::copy_async_16_if(to + i, from + i, wanted && width_ == 16, past_end);
      arch::copy_async_if<8>(to + i, from + i, wanted && width_ == 8, past_end);
      arch::copy_async_if<4>(to + i, from + i, wanted && width_ == 4, past_end);
    };
    // Usually this is all, and has no branch.
    copy(0);
    if (width_ == bytes_) return;
#pragma unroll 1
    for (int i = width_; i < bytes_ && wanted; i += greater(width_, 4)) {
      if (width_ > 0) copy(i);
      else arch::copy_async_4(to + i, first + i < all_ ? from + i : row_, greater(0, lesser(4, all_ - first - i)));
    }
  }

 private:
  const unsigned char* row_;
  // bytes_: of kCols columns; all_: of the row; width_: copied at a time, 0 if the row's last word is partial
  int log2_, all_, bytes_, width_;
};
// The offset of a group's entry in these bytes. first: the group of the first column.
template <class Of>
__device__ __forceinline__ int offset_of_group(int first, int group) {
  return (first * int(sizeof(Of)) & 3) + (group - first) * int(sizeof(Of));
}

// The bytes of eight codes.
template <int kPack>
constexpr int kLaneBytes = 128 / kPack;
// The four pairs of T of eight codes, in the order of their decoder. zero: the zero point as a float, or Nothing.
template <class T, class Code, int kWords, class Zero>
__device__ __forceinline__ void decode_eight(uint32_t (&weights)[4], const uint32_t (&words)[kWords],
                                             const Zero& zero) {
  if constexpr (kWords == 1) {
    Decoder<Code>::template pairs<T>(weights, words[0], zero);
  } else {
    uint32_t halves[2][2];
    Decoder<Code>::template pairs<T>(halves[0], words[0], zero);
    Decoder<Code>::template pairs<T>(halves[1], words[1], zero);
    memcpy(weights, halves, sizeof(weights));
  }
}
// Multiplies them by their scale, in 16 bits.
template <class T>
__device__ __forceinline__ void scale_eight(uint32_t (&weights)[4], uint32_t factor) {
  KERNELS_UNROLL
  for (int i = 0; i < 4; ++i) weights[i] = arch::fma_pair<T>(weights[i], factor, 0x80008000u);
}
// The zero point at an address, in the form that a decoder takes.
template <class Zero>
__device__ __forceinline__ auto zero_at(const unsigned char* at) {
  if constexpr (std::is_same<Zero, Nothing>::value) return Nothing();
  else return convert<float>(*reinterpret_cast<const Zero*>(at));
}

}  // namespace detail
KERNELS_END
