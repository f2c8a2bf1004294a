// Codes of 8 and 4 bits multiplied as integers, on machines with VNNI: one instruction multiplies a vector of bytes by
// another and adds four products in each lane.
//
// Inputs become integers of 22 bits and a sign, scaled so that the largest one of a block of columns fills the range,
// and split into three digits of 8 bits.
//
//   block of inputs, in place of the floats:
//   | digits 0 (the highest) | digits 1 | digits 2 | sums, or initial values, of lanes | scale |
#pragma once

#include "units.h"

#if KERNELS_VECTORS && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define KERNELS_BYTE_DOTS 1
#else
#define KERNELS_BYTE_DOTS 0
#endif

KERNELS_BEGIN
namespace detail {
namespace host {

// The columns of the largest block. Stretches of inputs begin at multiples of this, so a block never spans two groups
// of columns with different scales.
constexpr int kDigitCols = 256;

// Whether and how a matrix can be multiplied this way.
template <class M>
struct Digits {
  static constexpr bool possible = false;
};

#if KERNELS_BYTE_DOTS

template <class Codes>
KERNELS_INLINE inline const Codes& codes_of(const Codes& codes) { return codes; }
template <class Codes, class S>
KERNELS_INLINE inline const Codes& codes_of(const Dequant<Codes, S>& w) { return w.codes(); }

using DotSums = VectorOf<int32_t, 16>;
using DotBytes = VectorOf<uint8_t, 64>;

// sums[i] += the products of four unsigned bytes and four signed ones.
KERNELS_INLINE inline DotSums add_dots(const DotSums& sums, const DotBytes& bytes, const void* digits) {
  return (DotSums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, _mm512_loadu_si512(digits));
}
KERNELS_INLINE inline Register<float> as_floats(const DotSums& sums) {
  return __builtin_convertvector(sums, Register<float>);
}

// The bits of the number of largest magnitude, without the sign: they have the order of the magnitudes, including
// infinity and NaN.
inline uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = greater(most, bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return most;
}
inline bool finite_numbers(const float* x, int64_t count) { return largest_bits(x, count) < 0x7f800000u; }

// A block, stored where its floats were.
template <class Block>
KERNELS_INLINE inline const Block& block_at(const float* x) { return *reinterpret_cast<const Block*>(x); }

// The inputs of a block of kCols columns as digits, from the highest on, and the factors of these.
template <int kCols>
class InDigits {
 public:
  explicit InDigits(const float* x) {
    int exponent = 0;
    (void)std::frexp(bit_cast<float>(largest_bits(x, kCols)), &exponent);
    exponent = exponent < -100 ? -100 : exponent;
    const float inverse = std::ldexp(1.f, 22 - exponent);
    scale = std::ldexp(1.f, exponent - 22);
    for (int i = 0; i < kCols; ++i) {
      const int32_t number = int32_t(std::nearbyint(x[i] * inverse)), low = int8_t(number), rest = (number - low) >> 8,
                    middle = int8_t(rest);
      digits[0][i] = int8_t((rest - middle) >> 8), digits[1][i] = int8_t(middle), digits[2][i] = int8_t(low);
    }
  }

  int8_t digits[3][kCols];
  float scale;
};

// 8 bits: 256 columns, four vectors, summed in integers over a block. Codes are read as unsigned bytes, so they are too
// large by 128: each lane begins with minus what this adds.
template <>
struct Digits<DirectLoad<int8_t>> {
  static constexpr bool possible = true, sums_inputs = false;
  static constexpr int cols = kDigitCols, vectors = cols / 64, least_group = cols;

  struct Block {
    InDigits<cols> x;
    int32_t starts[3][16];
  };
  static void put(float* x) {
    Block block{InDigits<cols>(x), {}};
    for (int d = 0; d < 3; ++d) {
      DotSums sums{};
      for (int v = 0; v < vectors; ++v) sums = add_dots(sums, DotBytes{} + 128, block.x.digits[d] + v * 64);
      sums = -sums;
      copy_bytes<64>(block.starts[d], &sums);
    }
    copy_bytes<sizeof(Block)>(x, &block);
  }
  // products[t][r]: of a block at column `col`, for weight row row_of[r] and inputs x + t * stride, lane by lane.
  template <int kRows, int kTokens, class M>
  static KERNELS_INLINE void multiply(const M& w, const int64_t* row_of, int64_t col, const float* x, int64_t stride,
                                      Register<float> (&products)[kTokens][kRows]) {
    const auto block = [&](int t) KERNELS_INLINE -> const Block& { return block_at<Block>(x + t * stride); };
    // As many tokens at a time as there are registers for.
    constexpr int most = kRows > 4 ? 1 : 2;
    unrolled<(kTokens + most - 1) / most>([&](auto part) KERNELS_INLINE {
      constexpr int first = part() * most, tokens = kTokens - first < most ? kTokens - first : most;
      DotSums sums[tokens][kRows][3];
      unrolled<tokens>([&](auto t) KERNELS_INLINE {
        unrolled<3>([&](auto d) KERNELS_INLINE {
          DotSums start;
          copy_bytes<64>(&start, block(first + t()).starts[d()]);
          unrolled<kRows>([&](auto r) KERNELS_INLINE { sums[t()][r()][d()] = start; });
        });
      });
      unrolled<vectors>([&](auto v) KERNELS_INLINE {
        unrolled<kRows>([&](auto r) KERNELS_INLINE {
          DotBytes bytes;
          copy_bytes<64>(&bytes, codes_of(w).at(row_of[r()], col + v() * 64));
          bytes ^= DotBytes{} + 128;
          unrolled<tokens>([&](auto t) KERNELS_INLINE {
            unrolled<3>([&](auto d) KERNELS_INLINE {
              sums[t()][r()][d()] = add_dots(sums[t()][r()][d()], bytes, block(first + t()).x.digits[d()] + v() * 64);
            });
          });
        });
      });
      unrolled<tokens>([&](auto t) KERNELS_INLINE {
        const Register<float> scale = in_register(broadcast<16>(block(first + t()).x.scale));
        unrolled<kRows>([&](auto r) KERNELS_INLINE {
          const auto& s = sums[t()][r()];
          const Register<float> lower = as_floats(s[1]) * 256.f + as_floats(s[2]);
          products[first + t()][r()] = (as_floats(s[0]) * 65536.f + lower) * scale;
        });
      });
    });
  }
};

// 4 bits: 128 columns, a vector of words. The low codes of all bytes are in one vector, the high codes in another. Each
// lane has its own scale and its own offset that is subtracted from codes.
template <class Format>
struct DigitsOfWords {
  static constexpr bool possible = true, sums_inputs = true;
  static constexpr int cols = 128, least_group = 8;

  struct Block {
    int8_t digits[3][2][64];
    float sums[16];  // minus the sum of each lane's inputs
    float scale;
  };
  // Code i of a word is in this byte of it, in the vector of high codes or of low codes.
  static constexpr int byte_of(int i) { return int(Format::shift(i)) / 8; }
  static constexpr int half_of(int i) { return int(Format::shift(i)) / 4 % 2; }

  static void put(float* x) {
    const InDigits<cols> all(x);
    Block block;
    block.scale = all.scale;
    for (int lane = 0; lane < 16; ++lane) {
      float sum = 0;
      for (int i = 0; i < 8; ++i) sum += x[8 * lane + i];
      block.sums[lane] = -sum;
    }
    for (int d = 0; d < 3; ++d) {
      for (int lane = 0; lane < 16; ++lane) {
        unrolled<8>([&](auto i) KERNELS_INLINE {
          block.digits[d][half_of(i())][4 * lane + byte_of(i())] = all.digits[d][8 * lane + i()];
        });
      }
    }
    copy_bytes<sizeof(Block)>(x, &block);
  }
  template <int kRows, int kTokens, class M>
  static KERNELS_INLINE void multiply(const M& w, const int64_t* row_of, int64_t col, const float* x, int64_t stride,
                                      Register<float> (&products)[kTokens][kRows]) {
    const auto block = [&](int t) KERNELS_INLINE -> const Block& { return block_at<Block>(x + t * stride); };
    DotBytes low[kRows], high[kRows];
    unrolled<kRows>([&](auto r) KERNELS_INLINE {
      VectorOf<uint32_t, 16> words;
      copy_bytes<64>(&words, codes_of(w).at(row_of[r()]) + (col >> 3));
      low[r()] = (DotBytes)(words & 0x0f0f0f0fu), high[r()] = (DotBytes)(words >> 4 & 0x0f0f0f0fu);
    });
    unrolled<kTokens>([&](auto t) KERNELS_INLINE {
      DotSums sums[kRows] = {};
      unrolled<3>([&](auto d) KERNELS_INLINE {
        unrolled<kRows>([&](auto r) KERNELS_INLINE {
          if constexpr (d() > 0) sums[r()] <<= 8;
          sums[r()] = add_dots(sums[r()], low[r()], block(t()).digits[d()][0]);
          sums[r()] = add_dots(sums[r()], high[r()], block(t()).digits[d()][1]);
        });
      });
      const Register<float> scale = in_register(broadcast<16>(block(t()).scale));
      unrolled<kRows>([&](auto r) KERNELS_INLINE { products[t()][r()] = as_floats(sums[r()]) * scale; });
    });
  }
  static KERNELS_INLINE Register<float> input_sums(const float* x) {
    return vector_at(block_at<Block>(x).sums);
  }
};
template <>
struct Digits<Words<Int4>> : DigitsOfWords<Int4> {};
template <>
struct Digits<Words<Uint4>> : DigitsOfWords<Uint4> {};

#endif

// Codes with scales. Zero points are subtracted for whole lanes, which 8-bit codes do not support.
template <class Codes, class S>
struct Digits<Dequant<Codes, S>> : Digits<Codes> {
  static constexpr bool possible = [] {
    if constexpr (!Digits<Codes>::possible) return false;
    else return !S::has_zeros || Digits<Codes>::sums_inputs;
  }();
};
template <class S, int kParts>
struct Digits<Stacked<S, kParts>> : Digits<S> {};
template <class S>
struct Digits<Shifted<S>> : Digits<S> {};
template <class S>
struct Digits<Paired<S>> : Digits<S> {};

// Whether a matrix with these scales can be multiplied this way.
template <class M>
bool in_digits(const M& w) {
  if constexpr (!Digits<M>::possible) return false;
  else if constexpr (is_dequant<M>::value) return w.scales().group(Digits<M>::least_group) == Digits<M>::least_group;
  else return true;
}

}  // namespace host
}  // namespace detail
KERNELS_END
