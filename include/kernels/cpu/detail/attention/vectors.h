// Rows of keys and values in vectors: dot products of keys with queries, and values times weights, as they lie in
// memory.
#pragma once

#include "../../../kv.h"
#include "../matmul/units.h"

KERNELS_BEGIN
namespace detail {
namespace host {

template <class Codes>
struct RowAt {
  Codes codes;
  int64_t row;
};

// Whether vectors may be read at multiples of 8 columns, wherever a row begins.
template <class Codes>
struct InVectors {
  static bool value(const Codes&) { return any_width<Codes>; }
};
template <class Format>
struct InVectors<Words<Format>> {
  static bool value(const Words<Format>&) { return true; }
};

// Rows from anywhere, as one source; they are `stride` apart.
template <class Codes>
class Gathered : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr int widest = widest_of<Codes>();
  explicit Gathered(const RowAt<Codes>* rows, int stride = 1) : rows_(rows), stride_(stride) {}

  int max_pack() const { return max_pack_of(rows_->codes); }
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    return detail::fetch<N>((*this)[row].codes, (*this)[row].row, col);
  }
  template <class Fetched>
  KERNELS_HD auto resolve(const Fetched& fetched, int64_t row, int64_t col) const {
    return detail::resolve((*this)[row].codes, fetched, (*this)[row].row, col);
  }
  void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch((*this)[row].codes, (*this)[row].row, begin, end);
  }
  bool in_vectors() const { return InVectors<Codes>::value(rows_->codes); }
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

// A vector of a row; of the last columns, kWidth of them and zeros.
template <int kWidth, class Codes>
KERNELS_INLINE inline Register<float> vector_of(const RowAt<Codes>& at, int64_t col) {
  constexpr int N = kLanes<float>;
  const auto some = convert<float>(resolve(at.codes, fetch<kWidth>(at.codes, at.row, col), at.row, col));
  if constexpr (kWidth == N) {
    return in_register(some);
  } else {
    Pack<float, N> all = broadcast<N>(0.f);
    for (int i = 0; i < kWidth; ++i) all.v[i] = some.v[i];
    return in_register(all);
  }
}
// Heads are multiples of 8 columns.
constexpr int kTail = kLanes<float> < 8 ? kLanes<float> : 8;

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

// The products of kKeys rows, `apart` from each other, and kTokens of q, `stride` apart: sums[token * kKeys + key],
// lane by lane.
template <int kKeys, int kTokens, class Codes>
KERNELS_INLINE inline void dots(const RowAt<Codes>* rows, int apart, int64_t cols, const float* q, int64_t stride,
                                Register<float>* sums) {
  constexpr int N = kLanes<float>;
  Register<float> so_far[kTokens][kKeys] = {};
  const auto step = [&](auto width, int64_t col) KERNELS_INLINE {
    Register<float> x[kTokens];
    unrolled<kTokens>([&](auto t) KERNELS_INLINE { x[t()] = vector_at(q + t() * stride + col); });
    unrolled<kKeys>([&](auto j) KERNELS_INLINE {
      const Register<float> y = vector_of<width()>(rows[j() * apart], col);
      unrolled<kTokens>([&](auto t)
                            KERNELS_INLINE { so_far[t()][j()] = multiply_add<float>(x[t()], y, so_far[t()][j()]); });
    });
  };
  int64_t col = 0;
  for (; col + N <= cols; col += N) step(Width<N>{}, col);
  if (col < cols) step(Width<kTail>{}, col);
  unrolled<kTokens>([&](auto t) KERNELS_INLINE {
    unrolled<kKeys>([&](auto j) KERNELS_INLINE { sums[t() * kKeys + j()] = so_far[t()][j()]; });
  });
}

// o + row * stride, kVectors of them, += the sum over keys, `apart` from each other, of p[row * p_stride + key] * the
// key's columns from `col` on.
template <int kRows, int kVectors, int kWidth, class Codes, class Ahead>
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
      const Register<float> values = vector_of<kWidth>(row, col + i() * N);
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
