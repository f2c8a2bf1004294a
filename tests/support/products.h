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

// Codes of one byte with scales of type S.
template <class T, class S, class Memory = HostMemory>
struct Scaled {
  RandomMatrix<T, Memory> codes;
  Grain grain;
  int64_t size;
  RandomMatrix<S, Memory> scales;
  Scaled(int64_t rows, int64_t cols, Grain g, int64_t n = 1, int64_t gap = 5, int64_t shift = 3)
      : codes(12, rows, cols, cols + gap, shift, std::is_same<T, int8_t>::value ? 40 : 3), grain(g), size(n),
        scales(13, g == Grain::block ? (rows + n - 1) / n : rows, (cols + n - 1) / n, (cols + n - 1) / n + 2, 0, 0.1) {}
  auto source() const {
    const T* p = codes.data();
    const S* s = scales.data();
    const int64_t ld = scales.ld();
    const auto scales_of = grain == Grain::tensor  ? k::tensor_scale(s)
                           : grain == Grain::row   ? k::Scales<S>(s, ld, 0, 62)
                           : grain == Grain::group ? k::group_scales(s, ld, int(size))
                                                   : k::block_scales(s, ld, int(size));
    return k::dequant(k::load(p, codes.ld()), scales_of);
  }
  double operator()(int64_t row, int64_t col) const {
    const int64_t r = grain == Grain::tensor ? 0 : grain == Grain::block ? row / size : row;
    const int64_t c = grain == Grain::tensor || grain == Grain::row ? 0 : col / size;
    return codes.value(row, col) * scales.value(r, c);
  }
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
  int nibble(int64_t row, int64_t col) const { return nibble_of(this->get(row, col / 8), col); }
};

template <class S, bool kZeros, class Memory = HostMemory>
struct FourBit {
  Codes<Memory> codes;
  int64_t group;
  RandomMatrix<S, Memory> scales;
  Guarded<uint8_t, Memory> zeros;
  // in_words: each row's scales and zero points begin with a word.
  FourBit(int64_t rows, int64_t cols, int64_t g, int64_t gap = 1, int64_t shift = 1, bool in_words = false)
      : codes(rows, cols, gap, shift), group(g),
        scales(15, rows, (cols + g - 1) / g, in_words ? (cols + 4 * g - 1) / (4 * g) * 4 : (cols + g - 1) / g + 1,
               in_words ? 0 : 1, 0.1),
        zeros(rows, (cols + g - 1) / g, scales.ld(), 0, Poison::nan) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < zeros.cols(); ++c) zeros.set(r, c, uint8_t(mix(uint64_t(r * 77 + c)) % 16));
    }
    zeros.upload();
  }
  auto source() const {
    const uint32_t* p = codes.data();
    const auto s = k::group_scales(static_cast<const S*>(scales.data()), scales.ld(), int(group));
    if constexpr (kZeros)
      return k::dequant(k::uint4(p, codes.ld() * 8), s.zeros(static_cast<const uint8_t*>(zeros.data())));
    else return k::dequant(k::int4(p, codes.ld() * 8), s);
  }
  double operator()(int64_t row, int64_t col) const {
    const double zero = kZeros ? zeros.get(row, col / group) : 8;
    return (codes.nibble(row, col) - zero) * scales.value(row, col / group);
  }
};

// Codes of float4_e2m1 with scales of 8 bits: float8_e8m0, as in MXFP4, or float8_e4m3.
template <class S, class Memory = HostMemory>
struct FourBitFloats {
  static constexpr bool powers = std::is_same<S, k::float8_e8m0>::value;
  Codes<Memory> codes;
  int64_t group;
  Guarded<uint8_t, Memory> scales;
  FourBitFloats(int64_t rows, int64_t cols, int64_t g, int64_t gap = 1, int64_t shift = 1)
      : codes(rows, cols, gap, shift),
        group(g),
        scales(rows, (cols + g - 1) / g, (cols + g - 1) / g + gap, shift, Poison::nan) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < scales.cols(); ++c) {
        const uint64_t bits = mix(uint64_t(r * 91 + c));
        scales.set(r, c, uint8_t(powers ? 121 + bits % 9 : bits % 256 & 0xf7u));  // without NaN
      }
    }
    scales.upload();
  }
  auto source() const {
    const uint32_t* p = codes.data();
    const auto* s = reinterpret_cast<const S*>(static_cast<const uint8_t*>(scales.data()));
    return k::dequant(k::fp4(p, codes.ld() * 8), k::group_scales(s, scales.ld(), int(group)));
  }
  static double value(int code) {
    static const double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (code & 8 ? -1 : 1) * sizes[code & 7];
  }
  double operator()(int64_t row, int64_t col) const {
    const int scale = scales.get(row, col / group);
    return value(codes.nibble(row, col)) *
           (powers ? std::ldexp(1., scale - 127) : decode_small(format(DType::e4m3), uint32_t(scale)));
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
