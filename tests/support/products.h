// Products: what they should give, and weights of every type, in the memory of the CPU or of the GPU.
#pragma once

#include <kernels/weights.h>

#include "guarded.h"
#include "oracle.h"
#include "random.h"
#include "random_matrix.h"

namespace test {

namespace k = kernels;

// ---- oracle ---------------------------------------------------------------------------------------------------------

// The sum over k of x(m, k) * w(n, k). A sum of K values is made lane by lane, in runs of at most 2048 columns: chains
// of up to 512 additions, whose errors differ in sign. kSum units of the sum of magnitudes cover them; a dequantized
// weight is rounded twice more, and so is what it is multiplied by. `rounded`: how far operands are rounded besides,
// relative to each product. `by_chance`: the same where errors of many products do not agree in sign, relative to the
// root of the sum of their squares.
template <class X, class W>
Real<> product(int64_t m, int64_t n, int64_t cols, const X& x, const W& w, double units = kSum + 4,
               double rounded = 0, double by_chance = 0) {
  long double sum = 0, size = 0, error = 0, squares = 0;
  for (int64_t i = 0; i < cols; ++i) {
    const Real<> a = x(m, i);
    const double b = w(n, i);
    sum += static_cast<long double>(a.v) * b;
    size += std::fabs(a.v * b);
    squares += a.v * b * (a.v * b);
    error += a.e * std::fabs(b);
  }
  return {double(sum),
          double(error + (units * unit<float> + rounded) * size + by_chance * std::sqrt(squares)) + tiny<float>};
}

// ---- weights: each has a source and the value that it should give ---------------------------------------------------

template <class T, class Memory = HostMemory>
struct Plain : RandomMatrix<T, Memory> {
  Plain(int64_t rows, int64_t cols, int64_t gap = 3, int64_t shift = 1, double spread = 1)
      : RandomMatrix<T, Memory>(11, rows, cols, cols + gap, shift, spread) {}
  auto source() const { return k::load(static_cast<const T*>(this->data()), this->ld()); }
  double operator()(int64_t row, int64_t col) const { return this->value(row, col); }
};

enum class Grain { tensor, row, group, block };
constexpr int64_t kWholeRow = int64_t(1) << 40;  // columns of a scale that its row or matrix shares
constexpr int64_t groups_of(int64_t cols, int64_t size) { return (cols + size - 1) / size; }

template <class S>
k::Scales<S> scales_of(Grain grain, const S* p, int64_t ld, int64_t size) {
  return grain == Grain::tensor  ? k::tensor_scale(p)
         : grain == Grain::row   ? k::Scales<S>(p, ld, 0, 62)
         : grain == Grain::group ? k::group_scales(p, ld, int(size))
                                 : k::block_scales(p, ld, int(size));
}

// Codes of one byte and their scales, whatever matrices they are in.
template <class Codes, class Scales>
struct ScaledBytes {
  Codes codes;
  Grain grain;
  int64_t size;  // columns of a scale
  Scales scales;
  static int64_t size_of(Grain grain, int64_t size) {
    return grain == Grain::tensor || grain == Grain::row ? kWholeRow : size;
  }
  auto source() const {
    const auto* const p = codes.data();
    return k::dequant(k::load(p, codes.ld()), scales_of(grain, scales.data(), scales.ld(), size));
  }
  bool unchanged() const { return codes.unchanged() && scales.unchanged(); }
  double operator()(int64_t row, int64_t col) const {
    const int64_t r = grain == Grain::tensor ? 0 : grain == Grain::block ? row / size : row;
    return codes.value(row, col) * scales.value(r, col / size);
  }
};
template <class T, class S, class Memory = HostMemory>
struct Scaled : ScaledBytes<RandomMatrix<T, Memory>, RandomMatrix<S, Memory>> {
  using Base = ScaledBytes<RandomMatrix<T, Memory>, RandomMatrix<S, Memory>>;
  Scaled(int64_t rows, int64_t cols, Grain g, int64_t n = 1, int64_t gap = 5, int64_t shift = 3)
      : Base{{12, rows, cols, cols + gap, shift, std::is_same<T, int8_t>::value ? 40. : 3.},
             g,
             Base::size_of(g, n),
             {13, g == Grain::block ? groups_of(rows, n) : rows, groups_of(cols, n), groups_of(cols, n) + 2, 0, 0.1}} {}
};

// The code of 4 bits that a column has in its word.
inline int nibble_of(uint32_t word, int64_t col) {
  static const int shifts[] = {0, 16, 4, 20, 8, 24, 12, 28};
  return int(word >> shifts[col % 8] & 15);
}

// Any bits are eight codes. What lies behind the last column must not count.
template <class Memory = HostMemory>
struct Codes : Guarded<uint32_t, Memory> {
  Codes(int64_t rows, int64_t cols, int64_t gap = 1, int64_t shift = 1)
      : Guarded<uint32_t, Memory>(rows, (cols + 7) / 8, (cols + 7) / 8 + gap, shift, Poison::nan) {
    Random random(14);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < this->cols(); ++c) this->set(r, c, tame(uint32_t(random.bits())));
    }
    this->upload();
  }
  // Without the scales of gf4 that are NaN, infinite or huge.
  static uint32_t tame(uint32_t word) { return word & 0xffffffbfu; }
};

// Codes of 4 bits in words, and their scales and zero points.
template <bool kZeros, class Codes, class Scales, class Zeros>
struct FourBitWords {
  Codes codes;
  int64_t group;
  Scales scales;
  Zeros zeros;
  auto source() const {
    const uint32_t* p = codes.data();
    const auto s = scales_of(group == kWholeRow ? Grain::row : Grain::group, scales.data(), scales.ld(), group);
    if constexpr (kZeros)
      return k::dequant(k::uint4(p, codes.ld() * 8), s.zeros(static_cast<const uint8_t*>(zeros.data())));
    else
      return k::dequant(k::int4(p, codes.ld() * 8), s);
  }
  bool unchanged() const { return codes.unchanged() && scales.unchanged() && zeros.unchanged(); }
  double operator()(int64_t row, int64_t col) const {
    const double zero = kZeros ? zeros.get(row, col / group) : 8;
    return (nibble_of(codes.get(row, col / 8), col) - zero) * scales.value(row, col / group);
  }
};
template <class S, bool kZeros, class Memory = HostMemory>
struct FourBit : FourBitWords<kZeros, Codes<Memory>, RandomMatrix<S, Memory>, Guarded<uint8_t, Memory>> {
  using Base = FourBitWords<kZeros, Codes<Memory>, RandomMatrix<S, Memory>, Guarded<uint8_t, Memory>>;
  // in_words: each row's scales and zero points begin with a word.
  FourBit(int64_t rows, int64_t cols, int64_t g, int64_t gap = 1, int64_t shift = 1, bool in_words = false)
      : Base{{rows, cols, gap, shift},
             g,
             {15, rows, groups_of(cols, g), ld_of(cols, g, in_words), in_words ? 0 : 1, 0.1},
             {rows, groups_of(cols, g), ld_of(cols, g, in_words), 0, Poison::nan}} {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < this->zeros.cols(); ++c) this->zeros.set(r, c, uint8_t(mix(uint64_t(r * 77 + c)) % 16));
    }
    this->zeros.upload();
  }
  static int64_t ld_of(int64_t cols, int64_t g, bool in_words) {
    return in_words ? groups_of(cols, 4 * g) * 4 : groups_of(cols, g) + 1;
  }
};

// Codes of float4_e2m1 in words, with scales of 8 bits: float8_e8m0, as in MXFP4, or float8_e4m3.
template <class S, class Codes, class Scales>
struct FourBitFloatWords {
  static constexpr bool powers = std::is_same<S, k::float8_e8m0>::value;
  Codes codes;
  int64_t group;
  Scales scales;
  auto source() const {
    const uint32_t* p = codes.data();
    const auto* s = reinterpret_cast<const S*>(static_cast<const uint8_t*>(scales.data()));
    return k::dequant(k::fp4(p, codes.ld() * 8), k::group_scales(s, scales.ld(), int(group)));
  }
  bool unchanged() const { return codes.unchanged() && scales.unchanged(); }
  static double value(int code) {
    static const double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (code & 8 ? -1 : 1) * sizes[code & 7];
  }
  double operator()(int64_t row, int64_t col) const {
    const int scale = scales.get(row, col / group);
    return value(nibble_of(codes.get(row, col / 8), col)) *
           (powers ? std::ldexp(1., scale - 127) : decode_small(format(DType::e4m3), uint32_t(scale)));
  }
};
template <class S, class Memory = HostMemory>
struct FourBitFloats : FourBitFloatWords<S, Codes<Memory>, Guarded<uint8_t, Memory>> {
  using Base = FourBitFloatWords<S, Codes<Memory>, Guarded<uint8_t, Memory>>;
  FourBitFloats(int64_t rows, int64_t cols, int64_t g, int64_t gap = 1, int64_t shift = 1)
      : Base{{rows, cols, gap, shift}, g, {rows, groups_of(cols, g), groups_of(cols, g) + gap, shift, Poison::nan}} {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < this->scales.cols(); ++c) {
        const uint64_t bits = mix(uint64_t(r * 91 + c));
        this->scales.set(r, c, uint8_t(Base::powers ? 121 + bits % 9 : bits % 256 & 0xf7u));  // without NaN
      }
    }
    this->scales.upload();
  }
};

template <class Memory = HostMemory>
struct EightInAWord {
  Codes<Memory> codes;
  EightInAWord(int64_t rows, int64_t cols, int64_t gap = 1, int64_t shift = 1) : codes(rows, cols, gap, shift) {}
  auto source() const { return k::gf4(static_cast<const uint32_t*>(codes.data()), codes.ld() * 8); }
  double operator()(int64_t row, int64_t col) const {
    const uint32_t word = codes.get(row, col / 8);
    const double scale = decode_small(format(DType::e5m2), word & 0xff);
    return (double(word >> (8 + 3 * (col % 8)) & 7) - 4) * scale / -4;
  }
};

}  // namespace test
