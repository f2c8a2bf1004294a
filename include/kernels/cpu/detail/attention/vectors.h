// Rows of keys and values in vectors: dot products of keys with queries, and values times weights, read in the layout
// that they have in memory.
#pragma once

#include "../../../kv.h"
#include "../matmul/units.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// A row of codes, at any address.
template <class Codes_>
class RowAt {
 public:
  using Codes = Codes_;
  KERNELS_INLINE RowAt(const Codes& codes, int64_t row) : codes_(codes), row_(row) {}
  KERNELS_INLINE const Codes& codes() const { return codes_; }
  KERNELS_INLINE int64_t row() const { return row_; }

 private:
  Codes codes_;
  int64_t row_;
};
// A row in plain memory: its address is computed once, so reading it needs no multiplication.
template <class Codes_, class T>
class PlacedRow {
 public:
  using Codes = Codes_;
  KERNELS_INLINE Codes codes() const { return {at_, 0}; }
  KERNELS_INLINE int64_t row() const { return 0; }

 protected:
  KERNELS_INLINE explicit PlacedRow(const T* at) : at_(at) {}

 private:
  const T* at_;
};
template <class T, class C>
class RowAt<DirectLoad<T, C>> : public PlacedRow<DirectLoad<T, C>, T> {
 public:
  KERNELS_INLINE RowAt(const DirectLoad<T, C>& codes, int64_t row)
      : PlacedRow<DirectLoad<T, C>, T>(codes.at(row, 0)) {}
};
template <class Format>
class RowAt<Words<Format>> : public PlacedRow<Words<Format>, uint32_t> {
 public:
  KERNELS_INLINE RowAt(const Words<Format>& codes, int64_t row)
      : PlacedRow<Words<Format>, uint32_t>(codes.at(row)) {}
};

// Whether vectors can be read at multiples of 8 columns, wherever a row begins.
template <class Codes>
struct InVectors {
  static bool value(const Codes&) { return any_width<Codes>; }
};
template <class Format>
struct InVectors<Words<Format>> {
  static bool value(const Words<Format>&) { return true; }
};

// Rows at any addresses, as one source; `stride` rows apart.
template <class Codes>
class Gathered : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr int widest = widest_of<Codes>();
  explicit Gathered(const RowAt<Codes>* rows, int stride = 1) : rows_(rows), stride_(stride) {}

  int max_pack() const { return max_pack_of(rows_->codes()); }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return detail::fetch<N>((*this)[row].codes(), (*this)[row].row(), col);
  }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve((*this)[row].codes(), fetched, (*this)[row].row(), col);
  }
  void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch((*this)[row].codes(), (*this)[row].row(), begin, end);
  }
  bool in_vectors() const { return InVectors<Codes>::value(rows_->codes()); }
  KERNELS_HD const RowAt<Codes>& operator[](int64_t row) const { return rows_[row * stride_]; }
  int stride() const { return stride_; }

 private:
  const RowAt<Codes>* rows_;
  int stride_;
};
template <class Codes>
struct AnyWidth<Gathered<Codes>> {
  static constexpr bool value = any_width<Codes>;
};

// A vector of a row; of the last columns, kWidth of them followed by zeros.
template <int kWidth, class Codes>
KERNELS_INLINE inline Register<float> vector_of(const RowAt<Codes>& at, int64_t col) {
  constexpr int N = kLanes<float>;
  const auto& codes = at.codes();
  const auto some = convert<float>(resolve(codes, fetch<kWidth>(codes, at.row(), col), at.row(), col));
  if constexpr (kWidth == N) {
    return in_register(some);
  } else {
    Pack<float, N> all = broadcast<N>(0.f);
    for (int i = 0; i < kWidth; ++i) all.v[i] = some.v[i];
    return in_register(all);
  }
}
// Head sizes are multiples of 8 columns.
constexpr int kTail = kLanes<float> < 8 ? kLanes<float> : 8;

// Stretches of columns that are cheaper to decode together, in another order or without a factor: vector i holds
// columns column(i * N), column(i * N + 1) ..., multiplied by 1 / worth. Queries, which are few, are permuted into that
// order, and outputs back from it.
template <class Codes>
struct DecodedStretch {
  static constexpr int vectors = 0, cols = 1;
  static constexpr float worth = 1.f;
  static constexpr int column(int i) { return i; }
  template <int i>
  static KERNELS_INLINE Register<float> vector(const RowAt<Codes>& at, int64_t col) {
    return vector_of<kLanes<float>>(at, col + i * kLanes<float>);
  }
};
#if KERNELS_VECTORS
#if defined(__F16C__)
template <class T>
struct SmallFloatStretch {
  using U = Unit<float, DirectLoad<T>>;
  static constexpr int N = kLanes<float>, vectors = 4, cols = vectors * N;
  static constexpr float worth = std::is_same<T, float8_e4m3>::value ? 256.f : 1.f;
  static constexpr int column(int i) { return i; }
  template <int i>
  static KERNELS_INLINE Register<float> vector(const RowAt<DirectLoad<T>>& at, int64_t col) {
    constexpr int of_unit = U::cols / N;
    return U(at.codes(), at.row(), col + i / of_unit * U::cols).template vector<i % of_unit>();
  }
};
template <>
struct DecodedStretch<DirectLoad<float8_e5m2>> : SmallFloatStretch<float8_e5m2> {};
#if !defined(__AVX512VBMI__)
template <>
struct DecodedStretch<DirectLoad<float8_e4m3>> : SmallFloatStretch<float8_e4m3> {};
#endif
#endif
#if defined(__AVX512VBMI__)
// What float8_e4m3 without a sign are as bfloat16, or the upper halves of floats: their lower bytes and their higher.
struct E4m3Bytes {
  alignas(64) uint8_t low[128], high[128];
  constexpr E4m3Bytes() : low(), high() {
    for (int code = 1; code < 128; ++code) {
      int exponent = code >> 3, fraction = code & 7;
      if (exponent == 0) {
        for (exponent = 1; fraction < 8; fraction *= 2) --exponent;
      }
      const int bits = code == 127 ? 0x7fc0 : (exponent + 120) << 7 | (fraction & 7) << 4;
      low[code] = uint8_t(bits & 0xff), high[code] = uint8_t(bits >> 8);
    }
  }
};
inline constexpr E4m3Bytes kE4m3Bytes;
// Both bytes are looked up and put side by side, and then the two beside zeros, within 16 bytes each time. On an EPYC
// with AVX-512, one thread, 32 heads over 8 of 128 columns, decode() takes 0.88 of its time by way of halves.
template <>
struct DecodedStretch<DirectLoad<float8_e4m3>> {
  static constexpr int N = 16, vectors = 4, cols = vectors * N;
  static constexpr float worth = 1.f;
  static constexpr int column(int i) { return i % N / 4 * 16 + i / N * 4 + i % 4; }
  template <int i>
  static KERNELS_INLINE Register<float> vector(const RowAt<DirectLoad<float8_e4m3>>& at, int64_t col) {
    const __m512i codes = bit_cast<__m512i>(at.codes().template fetch<cols>(at.row(), col).unpack()),
                  sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128)), low = looked_up(kE4m3Bytes.low, codes),
                  high = _mm512_or_si512(looked_up(kE4m3Bytes.high, codes), sign),
                  pairs = i < 2 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high);
    return (Register<float>)(i % 2 == 0 ? _mm512_unpacklo_epi16(__m512i{}, pairs)
                                        : _mm512_unpackhi_epi16(__m512i{}, pairs));
  }

 private:
  static KERNELS_INLINE __m512i looked_up(const uint8_t* table, const __m512i& codes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
  }
};
#endif
// Vector i has code i of adjacent words.
template <class Format>
struct DecodedStretch<Words<Format>> {
  static constexpr int N = kLanes<float>, vectors = 8, cols = vectors * N;
  static constexpr float worth = 1.f;
  static constexpr int column(int i) { return i % N * 8 + i / N; }
  template <int i>
  static KERNELS_INLINE Register<float> vector(const RowAt<Words<Format>>& at, int64_t col) {
    const auto words = bit_cast<VectorOf<uint32_t, N>>(at.codes().template fetch<cols>(at.row(), col));
    const Register<float> codes = decode_lanes<Format, N>(words >> Format::shift(i));
    if constexpr (std::is_same<Format, Gf4>::value) return codes * gf4_scales<N>(words);
    else return codes;
  }
};
#endif
// Calls f(col) for each stretch of a row.
template <class Stretch, class F>
KERNELS_INLINE inline void each_stretch(int64_t cols, const F& f) {
  if constexpr (Stretch::vectors > 0) {
    for (int64_t col = 0; col + Stretch::cols <= cols; col += Stretch::cols) f(col);
  }
}

// v in lanes [low, high), -inf in the others.
template <int... i>
KERNELS_INLINE inline Register<float> only_lanes(const Register<float>& v, int low, int high,
                                                 std::integer_sequence<int, i...>) {
#if KERNELS_VECTORS
  using Ints = VectorOf<int32_t, kLanes<float>>;
  const Ints lanes = {i...};
  return ((lanes >= low) & (lanes < high)) ? v : Register<float>{} - infinity<float>();
#else
  return {{(i >= low && i < high ? v.v[i] : -infinity<float>())...}};
#endif
}

// Dot products of kKeys rows, `apart` rows from each other, with kTokens rows of q, `stride` floats apart: sums[token *
// kKeys + key], lane by lane. between(col) is called in between.
template <int kKeys, int kTokens, class Codes, class Between>
KERNELS_INLINE inline void dots(const RowAt<Codes>* rows, int apart, int64_t cols, const float* q, int64_t stride,
                                Register<float>* sums, const Between& between) {
  constexpr int N = kLanes<float>;
  Register<float> so_far[kTokens][kKeys] = {};
  const auto step = [&](int64_t col, const auto& of_key) KERNELS_INLINE {
    Register<float> x[kTokens];
    unrolled<kTokens>([&](auto t) KERNELS_INLINE { x[t()] = arch::held(vector_at(q + t() * stride + col)); });
    unrolled<kKeys>([&](auto j) KERNELS_INLINE {
      const Register<float> y = of_key(rows[j() * apart]);
      unrolled<kTokens>([&](auto t)
                            KERNELS_INLINE { so_far[t()][j()] = multiply_add<float>(x[t()], y, so_far[t()][j()]); });
    });
  };
  using KeyStretch = DecodedStretch<Codes>;
  int64_t col = 0;
  each_stretch<KeyStretch>(cols, [&](int64_t begin) KERNELS_INLINE {
    unrolled<KeyStretch::vectors>([&](auto i) KERNELS_INLINE {
      between(begin + i() * N);
      step(begin + i() * N,
           [&](const auto& row) KERNELS_INLINE { return KeyStretch::template vector<i()>(row, begin); });
    });
    col = begin + KeyStretch::cols;
  });
  for (; col + N <= cols; col += N) {
    between(col);
    step(col, [&](const auto& row) KERNELS_INLINE { return vector_of<N>(row, col); });
  }
  if (col < cols) step(col, [&](const auto& row) KERNELS_INLINE { return vector_of<kTail>(row, col); });
  unrolled<kTokens>([&](auto t) KERNELS_INLINE {
    unrolled<kKeys>([&](auto j) KERNELS_INLINE { sums[t() * kKeys + j()] = so_far[t()][j()]; });
  });
}

// Adds values: kVectors vectors at o + row * stride += the sum over keys of p[row * p_stride + key] * the key's columns
// from `col` on; keys are `apart` rows from each other. If kOfStretch is not negative, the vectors are kOfStretch,
// kOfStretch + 1 ... of a stretch.
template <int kRows, int kVectors, int kWidth, int kOfStretch, class Codes, class Ahead>
void add_values(const RowAt<Codes>* v, int apart, int keys, int64_t col, const float* p, int p_stride,
                float* const (&o)[kVectors], int stride, const Ahead& ahead) {
  constexpr int N = kLanes<float>;
  Register<float> sums[kRows][kVectors];
  unrolled<kRows>([&](auto r) KERNELS_INLINE {
    unrolled<kVectors>([&](auto i) KERNELS_INLINE { sums[r()][i()] = vector_at(o[i()] + r() * stride); });
  });
  for (int key = 0; key < keys; ++key) {
    ahead(key);
    const auto& row = v[key * apart];
    unrolled<kVectors>([&](auto i) KERNELS_INLINE {
      Register<float> values;
      if constexpr (kOfStretch < 0) values = vector_of<kWidth>(row, col + i() * N);
      else values = DecodedStretch<Codes>::template vector<kOfStretch + i()>(row, col - kOfStretch * N);
      unrolled<kRows>([&](auto r) KERNELS_INLINE {
        sums[r()][i()] =
            multiply_add<float>(in_register(broadcast<N>(p[r() * p_stride + key])), values, sums[r()][i()]);
      });
    });
  }
  unrolled<kRows>([&](auto r) KERNELS_INLINE {
    unrolled<kVectors>([&](auto i) KERNELS_INLINE { put_vector<float>(o[i()] + r() * stride, sums[r()][i()]); });
  });
}

}  // namespace host
}  // namespace detail
KERNELS_END
