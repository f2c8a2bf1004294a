// Weights in registers on the CPU. A unit is kPadding columns of a row, read and decoded vector by vector; Shared holds
// the scales and zero points that columns of a group share.
//
//   row:   | unit: vector 0 | vector 1 | ... | next unit ...      16-bit and 8-bit weights: each vector has
//                                                                 adjacent columns
//          | word 0 | word 1 | ... | word n |                     4-bit ("in planes"): vector i has code i of each word
#pragma once

#include "inputs.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Columns that are multiplied between two prefetches; and columns that are summed in a register before the sum is added
// to the total.
constexpr int kStrideCols = 128;
constexpr int64_t kRunCols = 2048;
// Rows in a buffer are padded with zeros to a multiple of this number of columns.
constexpr int kPadding = 32;
// A gap between rows in a buffer, so that they do not all map to the same cache sets.
constexpr int kRowGap = 16;

// Calls f(Width<0>) ... f(Width<N - 1>): a loop whose indices are constants. Written out, because compilers copy
// everything inlined once more for each intermediate function.
template <int N, int kFirst = 0, class F>
KERNELS_INLINE inline void unrolled(const F& f) {
  if constexpr (N > kFirst) f(Width<kFirst>{});
  if constexpr (N > kFirst + 1) f(Width<kFirst + 1>{});
  if constexpr (N > kFirst + 2) f(Width<kFirst + 2>{});
  if constexpr (N > kFirst + 3) f(Width<kFirst + 3>{});
  if constexpr (N > kFirst + 4) f(Width<kFirst + 4>{});
  if constexpr (N > kFirst + 5) f(Width<kFirst + 5>{});
  if constexpr (N > kFirst + 6) f(Width<kFirst + 6>{});
  if constexpr (N > kFirst + 7) f(Width<kFirst + 7>{});
  if constexpr (N > kFirst + 8) unrolled<N, kFirst + 8>(f);
}

// `cols` columns of a row of weights, as vectors. Quantized weights are without their scale and zero point.
template <class C, class W>
class Unit {
 public:
  static constexpr int cols = kPadding;
  static constexpr bool in_planes = false, scaled = false;

  KERNELS_INLINE Unit(const W& w, int64_t row, int64_t col) : w_(w), row_(row), col_(col) {}
  template <int i>
  KERNELS_INLINE Register<C> vector() const {
    constexpr int N = kLanes<C>;
    const int64_t at = col_ + i * N;
    return in_register(convert<C>(resolve(w_, fetch<N>(w_, row_, at), row_, at)));
  }

 private:
  const W& w_;
  int64_t row_, col_;
};

#if KERNELS_VECTORS
// 4-bit weights are decoded word by word in each lane: vector i of a unit holds code i of adjacent words, at its place
// in the word, as an unsigned number. So a code takes two instructions. The rest is applied to the inputs by
// put_in_planes(): their order, and the factor of each code. The offset of all codes is multiplied with the sum of
// their inputs.
template <class Format>
class Unit<float, Words<Format>> {
  static constexpr int N = kLanes<float>;
  static constexpr uint32_t mask(int i) { return Format::mask << Format::shift(i); }
  // The highest bit of a word would be a sign bit.
  static constexpr bool highest(int i) { return mask(i) >> 31 != 0; }

 public:
  static constexpr int cols = 8 * N;
  static constexpr bool in_planes = true, scaled = std::is_same<Format, Gf4>::value;
  static constexpr bool looked_up = std::is_same<Format, Fp4>::value;  // codes that are table indices, not numbers
  static constexpr float offset = Format::offset * Format::slope;
  // The factor by which vector i is larger than the weight.
  static constexpr float unity(int i) {
    return (looked_up || highest(i) ? 1.f : float(uint32_t(1) << Format::shift(i))) / Format::slope;
  }

  KERNELS_INLINE Unit(const Words<Format>& w, int64_t row, int64_t col)
      : words_(bit_cast<VectorOf<uint32_t, N>>(w.template fetch<cols>(row, col))) {}
  template <int i>
  KERNELS_INLINE Register<float> vector() const {
    using Ints = VectorOf<int32_t, N>;
    if constexpr (looked_up) return decode_lanes<Format, N>(words_ >> Format::shift(i));
    return __builtin_convertvector(Ints(highest(i) ? words_ >> Format::shift(i) : words_ & mask(i)), Register<float>);
  }
  KERNELS_INLINE Register<float> scale() const { return gf4_scales<N>(words_); }

 private:
  VectorOf<uint32_t, N> words_;
};

#if defined(__F16C__)
// float8 through halves, two vectors at a time.
template <class T>
class SmallFloats {
  static constexpr int N = kLanes<float>;

 public:
  static constexpr int cols = kPadding;
  static constexpr bool in_planes = false, scaled = std::is_same<T, float8_e4m3>::value;

  KERNELS_INLINE SmallFloats(const DirectLoad<T>& w, int64_t row, int64_t col) {
    unrolled<cols / (2 * N)>([&](auto i) KERNELS_INLINE {
      const auto codes = w.template fetch<2 * N>(row, col + i() * 2 * N).unpack();
      if constexpr (scaled) halves_[i()] = e4m3_as_halves(codes);
      else halves_[i()] = e5m2_as_halves(codes);
    });
  }
  template <int i>
  KERNELS_INLINE Register<float> vector() const {
    return in_register(convert<float>(bit_cast<Pack<half, N>>(part<i % 2>(halves_[i / 2]))));
  }
  KERNELS_INLINE Register<float> scale() const { return in_register(broadcast<N>(256.f)); }

 private:
  template <int kHalf>
  static KERNELS_INLINE auto part(const VectorOf<uint16_t, 2 * N>& halves) {
#if defined(__AVX512F__)
    return _mm512_maskz_extracti64x4_epi64(0xf, (__m512i)halves, kHalf);
#else
    return _mm256_extractf128_si256((__m256i)halves, kHalf);
#endif
  }

  VectorOf<uint16_t, 2 * N> halves_[cols / (2 * N)];
};
template <>
class Unit<float, DirectLoad<float8_e4m3>> : public SmallFloats<float8_e4m3> {
 public:
  using SmallFloats::SmallFloats;
};
template <>
class Unit<float, DirectLoad<float8_e5m2>> : public SmallFloats<float8_e5m2> {
 public:
  using SmallFloats::SmallFloats;
};
#endif
#endif

template <class C, class Codes, class S>
class Unit<C, Dequant<Codes, S>> : public Unit<C, Codes> {
  using OfCodes = Unit<C, Codes>;

 public:
  static constexpr bool scaled = true;
  // A zero point is in units of the codes' own scale, if they have one.
  static constexpr bool scales_codes = OfCodes::scaled && S::has_zeros;
  KERNELS_INLINE Unit(const Dequant<Codes, S>& w, int64_t row, int64_t col) : OfCodes(w.codes(), row, col) {}
  template <int i>
  KERNELS_INLINE Register<C> vector() const {
    if constexpr (scales_codes) return OfCodes::template vector<i>() * OfCodes::scale();
    else return OfCodes::template vector<i>();
  }
  // The scale of the group, times the unit's own scale if it has one.
  KERNELS_INLINE Register<C> scaled_by(const Register<C>& scale) const {
    if constexpr (OfCodes::scaled && !scales_codes) return scale * OfCodes::scale();
    else return scale;
  }
};
template <class C, class S, int kParts>
class Unit<C, Stacked<S, kParts>> : public Unit<C, S> {};
template <class C, class S>
class Unit<C, Shifted<S>> : public Unit<C, S> {};
template <class C, class S>
class Unit<C, Paired<S>> : public Unit<C, S> {};

// A matrix whose consecutive rows alternate between two runs: row v is base + v / 2 * step, or for odd v `odd` rows
// further.
template <class S>
struct TwoLines {
  S source;
  int64_t base, step, odd;
};
template <class W>
struct MatrixOf {
  using type = W;
  static KERNELS_INLINE const W& of(const W& w) { return w; }
  static KERNELS_INLINE int64_t row(const W&, int64_t row) { return row; }
};
template <class S>
struct MatrixOf<TwoLines<S>> {
  using type = S;
  static KERNELS_INLINE const S& of(const TwoLines<S>& w) { return w.source; }
  static KERNELS_INLINE int64_t row(const TwoLines<S>& w, int64_t row) {
    return w.base + (row >> 1) * w.step + (row & 1) * w.odd;
  }
};

// Paired rows are in two runs; unpaired rows get indices far from those of pairs and of other heads.
template <class S, class F>
void in_lines(const Paired<S>& w, int64_t row, const F& f) {
  const int64_t pair = w.place_in_pairs(row), alone = (1 + w.head_of(row)) << 20;
  if (pair >= 0)
    f(TwoLines<S>{w.source(), row - pair, 1, w.half()}, pair);
  else
    f(TwoLines<S>{w.source(), -alone, 2, 1}, row + alone);
}
// Calls f(matrix, row) with the matrix that contains row `row` of the weights, and its index there.
template <class W, class F>
void in_matrix(const W& w, int64_t row, const F& f) {
  if constexpr (is_stacked<W>::value)
    w.visit(row, [&](const auto& part, int64_t begin) { in_matrix(part, row - begin, f); });
  else if constexpr (is_shifted<W>::value)
    in_matrix(w.source(), row + w.shift(), f);
  else if constexpr (is_paired<W>::value)
    in_lines(w, row, f);
  else
    f(w, row);
}
template <class W>
bool in_one_matrix(const W& w, int64_t first, int64_t last) {
  int64_t distance = 0;
  in_matrix(w, first, [&](const auto&, int64_t row) { distance -= row; });
  in_matrix(w, last, [&](const auto&, int64_t row) { distance += row; });
  return distance == last - first;
}

// Weights in plain memory: their bits, and the address of one.
template <class W>
struct Addressable {
  static constexpr int bits = 0;
};
template <class T, class C>
struct Addressable<DirectLoad<T, C>> {
  static constexpr int bits = 8 * int(sizeof(T));
  static KERNELS_INLINE const char* of(const DirectLoad<T, C>& w, int64_t row, int64_t col) {
    return reinterpret_cast<const char*>(w.at(row, col));
  }
};
template <class Format>
struct Addressable<Words<Format>> {
  static constexpr int bits = 4;
  static KERNELS_INLINE const char* of(const Words<Format>& w, int64_t row, int64_t col) {
    return reinterpret_cast<const char*>(w.at(row) + (col >> 3));
  }
};
template <class Codes, class S>
struct Addressable<Dequant<Codes, S>> {
  static constexpr int bits = Addressable<Codes>::bits;
  static KERNELS_INLINE const char* of(const Dequant<Codes, S>& w, int64_t row, int64_t col) {
    return Addressable<Codes>::of(w.codes(), row, col);
  }
};

// Whether a matrix has codes of 8 or 4 bits, in whatever parts.
template <class W>
constexpr bool has_codes = Addressable<W>::bits > 0 && Addressable<W>::bits < 16;
template <class S, int kParts>
constexpr bool has_codes<Stacked<S, kParts>> = has_codes<S>;
template <class S>
constexpr bool has_codes<Shifted<S>> = has_codes<S>;
template <class S>
constexpr bool has_codes<Paired<S>> = has_codes<S>;
template <class S>
constexpr bool has_codes<Gated<S>> = has_codes<S>;

// Whether units can be read at multiples of their length, wherever a row begins.
template <class C, class W>
bool in_units(const W& w) {
  if constexpr (is_dequant<W>::value) {
    // There is a scale for each word, for each unit, or for more.
    using U = Unit<C, W>;
    constexpr int least = U::in_planes ? 8 : U::cols;
    return !(U::in_planes && U::scales_codes) && in_units<C>(w.codes()) && w.scales().group() >= least;
  } else {
    return Unit<C, W>::in_planes || any_width<W>;
  }
}

// Column 8 i + j of each unit moves to i + j * lanes. Inputs are divided by the factor by which the unit's vector j is
// too large, weights multiplied by it. All factors are powers of two, or their negatives.
template <class U, class C>
void put_in_planes(C* values, int64_t count, bool weights) {
  constexpr int N = kLanes<C>, cols = 8 * N;
  for (int64_t col = 0; col + cols <= count; col += cols) {
    C unit[cols];
    copy_bytes<int(sizeof(unit))>(unit, values + col);
    for (int j = 0; j < 8; ++j) {
      const C factor = weights ? U::unity(j) : 1 / U::unity(j);
      for (int i = 0; i < N; ++i) values[col + j * N + i] = unit[8 * i + j] * factor;
    }
  }
}

template <class U>
constexpr bool has_offset() {
  if constexpr (U::in_planes) return U::offset != 0;
  else return false;
}

// What the columns of a unit share: scales and zero points of a run of columns, for several rows.
template <class C, class W, int kRows>
class Shared {
 public:
  template <class RowOf>
  KERNELS_INLINE Shared(const W&, const RowOf&, int64_t, int64_t) {}
  static constexpr int64_t group = kStrideCols;
  static constexpr bool has_centers = has_offset<Unit<C, W>>();
  KERNELS_INLINE int64_t index(int64_t) const { return 0; }
  KERNELS_INLINE Register<C> scale(const Unit<C, W>& unit, int, int64_t) const { return unit.scale(); }
  KERNELS_INLINE Register<C> center(int, int64_t) const {
    return in_register(broadcast<kLanes<C>>(Unit<C, W>::offset));
  }
};
template <class C, class Codes, class S, int kRows>
class Shared<C, Dequant<Codes, S>, kRows> {
  using W = Dequant<Codes, S>;
  using U = Unit<C, W>;
  static constexpr int N = kLanes<C>, most = kRunCols / (U::in_planes ? 8 : U::cols) + 1;

 public:
  static constexpr bool has_centers = S::has_zeros || has_offset<U>();
  // Columns [begin, begin + count), at most kRunCols, of rows row_of(0), row_of(1) ...
  template <class RowOf>
  KERNELS_INLINE Shared(const W& w, const RowOf& row_of, int64_t begin, int64_t count)
      : log2_(w.scales().col_log2()), begin_(begin), first_(begin >> log2_), group(w.scales().group(kStrideCols)) {
    const int64_t number = ((begin + count - 1) >> log2_) - first_ + 1;
    for (int r = 0; r < kRows; ++r) {
      read_row(load(w.scales().scale_at(row_of(r), begin), 0), 0, 0, number, scales_[r]);
      if constexpr (S::has_zeros) read_row(load(w.scales().zero_at(row_of(r), begin), 0), 0, 0, number, zeros_[r]);
    }
    if constexpr (U::in_planes) {
      for (int i = 0; i < N; ++i) lanes_[i] = int32_t(8 * i >> lesser(log2_, 30));
    }
  }

  // The index of a column's group.
  KERNELS_INLINE int64_t index(int64_t col) const { return ((begin_ + col) >> log2_) - first_; }
  KERNELS_INLINE Register<C> scale(const U& unit, int r, int64_t index) const {
    return unit.scaled_by(of_unit(scales_[r] + index));
  }
  // What is subtracted from codes.
  KERNELS_INLINE Register<C> center(int r, int64_t index) const {
    if constexpr (!has_offset<U>()) return of_unit(zeros_[r] + index);
    else if constexpr (S::has_zeros) return of_unit(zeros_[r] + index) + in_register(broadcast<N>(C(U::offset)));
    else return in_register(broadcast<N>(C(U::offset)));
  }

 private:
  // In planes, each lane has its own group.
  KERNELS_INLINE Register<C> of_unit(const C* at) const {
    if constexpr (!U::in_planes) {
      return in_register(broadcast<N>(*at));
    } else {
#if KERNELS_VECTORS && defined(__AVX512F__)
      return _mm512_maskz_permutexvar_ps(0xffff, (__m512i)lanes_, vector_at(at));
#elif KERNELS_VECTORS && defined(__AVX2__)
      return _mm256_permutevar8x32_ps(vector_at(at), (__m256i)lanes_);
#elif KERNELS_VECTORS
      Register<C> out;
      for (int i = 0; i < N; ++i) out[i] = at[lanes_[i]];
      return out;
#endif
    }
  }

  int log2_;
  int64_t begin_, first_;
  // Padded, as a whole vector may be read from the last entry on.
  C scales_[kRows][most + N], zeros_[S::has_zeros ? kRows : 1][most + N];
#if KERNELS_VECTORS
  VectorOf<int32_t, N> lanes_;
#else
  int32_t lanes_[N];
#endif

 public:
  const int64_t group;
};

// Decodes a stretch of a row of weights into a buffer, in planes if its type is read in planes, with zeros behind it.
template <class W, class C>
void decode(const W w, int64_t row, int64_t begin, int64_t count, C* to) {
  using U = Unit<C, W>;
  constexpr int N = kLanes<C>;
  constexpr bool has_centers = Shared<C, W, 1>::has_centers;
  int64_t col = 0;
  if (in_units<C>(w)) {
    const Shared<C, W, 1> shared(
        w, [row](int) KERNELS_INLINE { return row; }, begin, count);
    for (; col + U::cols <= count; col += U::cols) {
      const U unit(w, row, begin + col);
      const int64_t index = shared.index(col);
      Register<C> scale{};
      if constexpr (U::scaled) scale = shared.scale(unit, 0, index);
      unrolled<U::cols / N>([&](auto i) KERNELS_INLINE {
        Register<C> v = unit.template vector<i()>();
        if constexpr (U::in_planes && has_centers)
          v = v - shared.center(0, index) * in_register(broadcast<N>(C(U::unity(i()))));
        else if constexpr (has_centers)
          v = v - shared.center(0, index);
        if constexpr (U::scaled) v = v * scale;
        put_vector<C>(to + col + i() * N, v);
      });
    }
    read_row(w, row, begin + col, count - col, to + col);
  } else {
    read_row(w, row, begin, count, to);
    if constexpr (U::in_planes) put_in_planes<U>(to, count, true);
  }
  for (; count % kPadding != 0; ++count) to[count] = C(0);
}

}  // namespace host
}  // namespace detail
KERNELS_END
