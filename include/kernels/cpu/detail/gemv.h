// Products with few rows of inputs on the CPU. Every weight is used a few times only, so that reading it from memory takes
// most of the time: all else must keep out of its way.
//
// Threads take ranges of weight rows. A thread holds a stretch of the inputs as floats on its stack, maps applied, and
// multiplies kRows weight rows at a time with it: weights are decoded in registers, or, where more inputs than a tile has
// share them, into a buffer in the first-level cache. Sums are kept lane by lane for a run of columns, then as totals.
// How a result is summed is fixed by M and K alone, so that it depends neither on the threads nor on the rows beside it.
#pragma once

#include "../exec.h"
#include "inputs.h"

KERNELS_BEGIN
namespace detail {
namespace host {
inline namespace KERNELS_ISA {

// So many inputs at most share a pass over the weights.
constexpr int kMostTokens = 32;
// Inputs and weight rows that are multiplied at a time: one register for each pair of them, and some for what is read.
constexpr int kTileTokens = kVectorBytes == 64 ? 4 : 2;
constexpr int kTileRows = 4;
// Of one input alone, which then is read from afar less often.
constexpr int kRowsForOne = 8;
// Columns that are read at a time, those that share a scale at most, and those that are summed in a register, and decoded,
// before the next ones.
constexpr int kUnit = 32;
constexpr int kStrideCols = 128;
constexpr int64_t kRunCols = 2048;
constexpr int64_t kDecodedCols = 1024;
// The inputs, and the sums, that a thread holds on its stack.
constexpr int kInputBytes = 256 << 10;
constexpr int kSumBytes = 64 << 10;
// Between rows in a buffer, so that they do not all lie in the same lines of a cache.
constexpr int kRowGap = 16;

// a * b + c, rounded once where the machine can, whatever the compiler makes of the expression around it.
template <class C>
KERNELS_INLINE inline Register<C> multiply_add(const Register<C>& a, const Register<C>& b, const Register<C>& c) {
#if KERNELS_VECTORS && defined(__AVX512F__)
  if constexpr (std::is_same<C, float>::value) return _mm512_fmadd_ps(a, b, c);
  else return _mm512_fmadd_pd(a, b, c);
#elif KERNELS_VECTORS && defined(__FMA__)
  if constexpr (std::is_same<C, float>::value) return _mm256_fmadd_ps(a, b, c);
  else return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// f(Width<0>), f(Width<1>) ... f(Width<N - 1>): a loop whose indices are constants.
template <class F, int... I>
KERNELS_INLINE inline void unrolled(const F& f, std::integer_sequence<int, I...>) { (f(Width<I>{}), ...); }
template <int N, class F>
KERNELS_INLINE inline void unrolled(const F& f) { unrolled(f, std::make_integer_sequence<int, N>{}); }

// ---- weights in registers ------------------------------------------------------------------------------------------

// Whether packs as long as a vector may be read at multiples of their length, wherever a row begins.
template <class W>
struct InVectors {
  static bool value(const W&) { return any_width<W>; }
};
template <class Format>
struct InVectors<Words<Format>> {
  static bool value(const Words<Format>&) { return true; }
};
template <class Codes, class S>
struct InVectors<Dequant<Codes, S>> {
  static bool value(const Dequant<Codes, S>& w) { return InVectors<Codes>::value(w.codes()) && w.scales().group() >= kUnit; }
};

// A unit of a row of weights; of quantized ones without their scale.
template <class C>
struct Unit {
  Register<C> values[kUnit / kLanes<C>];
};
template <class C, class W>
KERNELS_INLINE inline Unit<C> unit_at(const W& w, int64_t row, int64_t col) {
  constexpr int N = kLanes<C>;
  Unit<C> out;
  unrolled<kUnit / N>([&](auto i) KERNELS_INLINE {
    const int64_t at = col + i() * N;
    out.values[i()] = in_register(convert<C>(resolve(w, fetch<N>(w, row, at), row, at)));
  });
  return out;
}

// What columns of a row share: nothing, or a scale and a zero point.
template <class W>
KERNELS_INLINE inline int shared_cols(const W&) { return kStrideCols; }
template <class Codes, class S>
KERNELS_INLINE inline int shared_cols(const Dequant<Codes, S>& w) { return w.scales().group(kStrideCols); }

template <class C>
struct Shared {
  Register<C> scale, zero;
};
template <class C, class W>
KERNELS_INLINE inline Shared<C> shared_at(const W& w, int64_t row, int64_t col) {
  constexpr int N = kLanes<C>;
  Shared<C> out{};
  if constexpr (is_dequant<W>::value) {
    const auto scales = w.scales().fetch(row, col);
    out.scale = in_register(broadcast<N>(C(w.scales().scale(scales))));
    out.zero = in_register(broadcast<N>(C(w.scales().zero(scales))));
  }
  return out;
}
template <class C, class W>
KERNELS_INLINE inline Unit<C> unit_at(const W& w, const Shared<C>& shared, int64_t row, int64_t col) {
  if constexpr (is_dequant<W>::value) {
    Unit<C> unit = unit_at<C>(w.codes(), row, col);
    if constexpr (std::decay_t<decltype(w.scales())>::has_zeros) {
      unrolled<kUnit / kLanes<C>>([&](auto i) KERNELS_INLINE { unit.values[i()] = unit.values[i()] - shared.zero; });
    }
    return unit;
  } else {
    return unit_at<C>(w, row, col);
  }
}

// lanes[t * kRows + r] += the products of columns [begin, begin + count) of weight row `row + r` and x + t * stride, lane by
// lane; count is a multiple of kUnit. Meanwhile, the same columns of the rows from `next` on come into the cache.
template <int kRows, int kTokens, class C, class W>
void multiply(const W w, int64_t row, int64_t next, int64_t begin, int64_t count, const C* x, int64_t stride, Register<C>* lanes) {
  constexpr int N = kLanes<C>, vectors = kUnit / N;
  // For one input, sums times the scale; for several, weights times the scale, which then is less work.
  constexpr bool scales_sums = is_dequant<W>::value && kTokens == 1, scales_weights = is_dequant<W>::value && !scales_sums;
  const auto input = [=](int token, int64_t col) KERNELS_INLINE {
    Pack<C, N> v;
    copy_bytes<int(sizeof(v.v))>(v.v, x + token * stride + col);
    return in_register(v);
  };
  const int step = shared_cols(w);
  Register<C> sums[kTokens][kRows] = {};
  for (int64_t col = 0; col < count;) {
    if (col % kStrideCols == 0) {
      unrolled<kRows>([&](auto r) KERNELS_INLINE { prefetch(w, next + r(), begin + col, begin + col + kStrideCols); });
    }
    Shared<C> shared[kRows];
    Register<C> group[kRows] = {};
    unrolled<kRows>([&](auto r) KERNELS_INLINE { shared[r()] = shared_at<C>(w, row + r(), begin + col); });
    const int64_t end = lesser(count, col + step);
    do {
      unrolled<kRows>([&](auto r) KERNELS_INLINE {
        Unit<C> unit = unit_at<C>(w, shared[r()], row + r(), begin + col);
        unrolled<vectors>([&](auto i) KERNELS_INLINE {
          if constexpr (scales_weights) unit.values[i()] = unit.values[i()] * shared[r()].scale;
          unrolled<kTokens>([&](auto t) KERNELS_INLINE {
            Register<C>& sum = scales_sums ? group[r()] : sums[t()][r()];
            sum = multiply_add<C>(unit.values[i()], input(t(), col + i() * N), sum);
          });
        });
      });
    } while ((col += kUnit) < end);
    if constexpr (scales_sums) {
      unrolled<kRows>([&](auto r) KERNELS_INLINE { sums[0][r()] = multiply_add<C>(group[r()], shared[r()].scale, sums[0][r()]); });
    }
  }
  unrolled<kTokens>([&](auto t) KERNELS_INLINE {
    unrolled<kRows>([&](auto r) KERNELS_INLINE { lanes[t() * kRows + r()] = lanes[t() * kRows + r()] + sums[t()][r()]; });
  });
}

// The same for any number of tokens up to a tile.
template <int kRows, class C, class W, int kTokens = (kRows > kTileRows ? 1 : kTileTokens)>
void multiply_tile(int tokens, const W& w, int64_t row, int64_t next, int64_t begin, int64_t count, const C* x, int64_t stride,
                   Register<C>* lanes) {
  if (tokens == kTokens) return multiply<kRows, kTokens>(w, row, next, begin, count, x, stride, lanes);
  if constexpr (kTokens > 1) multiply_tile<kRows, C, W, kTokens - 1>(tokens, w, row, next, begin, count, x, stride, lanes);
}

// A stretch of a row of weights in a buffer; up to the next multiple of kUnit, zeros follow.
template <class W, class C>
void decode(const W w, int64_t row, int64_t begin, int64_t count, C* to) {
  int64_t col = 0;
  if (InVectors<W>::value(w)) {
    for (; col + kUnit <= count; col += kUnit) {
      const Shared<C> shared = shared_at<C>(w, row, begin + col);
      const Unit<C> unit = unit_at<C>(w, shared, row, begin + col);
      unrolled<kUnit / kLanes<C>>([&](auto i) KERNELS_INLINE {
        Pack<C, kLanes<C>> values = as_pack<C>(unit.values[i()]);
        if constexpr (is_dequant<W>::value) values = as_pack<C>(unit.values[i()] * shared.scale);
        copy_bytes<int(sizeof(values.v))>(to + col + i() * kLanes<C>, values.v);
      });
    }
  }
  read_row(w, row, begin + col, count - col, to + col);
  for (; count % kUnit != 0; ++count) to[count] = C(0);
}

// f(matrix, row): the matrix that holds row `row` of the weights, and its number there.
template <class W, class F>
void in_matrix(const W& w, int64_t row, const F& f) {
  if constexpr (is_stacked<W>::value) w.visit(row, [&](const auto& part, int64_t begin) { f(part, row - begin); });
  else f(w, row);
}
template <class W>
bool in_one_matrix(const W& w, int64_t first, int64_t last) {
  int64_t distance = 0;
  in_matrix(w, first, [&](const auto&, int64_t row) { distance -= row; });
  in_matrix(w, last, [&](const auto&, int64_t row) { distance += row; });
  return distance == last - first;
}

// ---- the product ---------------------------------------------------------------------------------------------------

template <class X, class W, class Out>
class Gemv {
 public:
  // For tokens [first, first + shape.m).
  Gemv(const X& x, const W& w, const Out& out, const MatmulShape& shape, int64_t first)
      : x_(x), w_(w), map_(sink_map(out)), end_(sink_end(out)), packs_({nullptr, 0}, out, shape.n), n_(shape.n), k_(shape.k),
        first_(first), tokens_(int(shape.m)) {
    for (int t = 0; t < tokens_; ++t) {
      states_[t] = row_state(x, first + t, k_);
      write_state(x, states_[t], first + t, k_);
    }
  }

  void run(int threads) const {
    const int64_t packs = (n_ + kWidestPack - 1) / kWidestPack;
    const int parts = int(lesser<int64_t>(packs, threads));
    parallel(parts, [&](int part) { rows(packs * part / parts * kWidestPack, lesser(n_, packs * (part + 1) / parts * kWidestPack)); });
  }

 private:
  using C = product_type<X, W>;
  static constexpr bool gated = is_gated<W>::value;
  static constexpr int matrices = gated ? 2 : 1;
  static constexpr int64_t input_values = kInputBytes / sizeof(C), sum_values = kSumBytes / sizeof(C);

  // Rows [first, last) of the weights, those of one thread.
  void rows(int64_t first, int64_t last) const {
    alignas(64) C x[input_values + kMostTokens * (kUnit + kRowGap)];
    alignas(64) C sums[matrices][sum_values];
    const int64_t stretch = input_values / tokens_ / kUnit * kUnit;
    const int64_t block = sum_values / tokens_ / kWidestPack * kWidestPack;
    for (int64_t row = first; row < last; row += block) {
      const int64_t end = lesser(last, row + block), count = end - row;
      for (auto& matrix : sums) std::fill_n(matrix, tokens_ * count, C(0));
      for (int64_t begin = 0; begin < k_; begin += stretch) {
        const int64_t cols = lesser(stretch, k_ - begin), stride = (cols + kUnit - 1) / kUnit * kUnit + kRowGap;
        if (row == first || stretch < k_) read_inputs(begin, cols, x, stride);
        if constexpr (gated) {
          multiply_rows(w_.gate(), row, end, begin, cols, x, stride, sums[0]);
          multiply_rows(w_.up(), row, end, begin, cols, x, stride, sums[1]);
        } else {
          multiply_rows(w_, row, end, begin, cols, x, stride, sums[0]);
        }
      }
      write(row, end, sums);
    }
  }

  void read_inputs(int64_t begin, int64_t cols, C* x, int64_t stride) const {
    for (int t = 0; t < tokens_; ++t) {
      read_row(with_state(x_, states_[t], k_), first_ + t, begin, cols, x + t * stride);
      for (int64_t col = cols; col % kUnit != 0; ++col) x[t * stride + col] = C(0);
    }
  }

  // sums[t * (last - first) + n - first] += the products of a stretch of input t and weight row n.
  template <class M>
  void multiply_rows(const M& w, int64_t first, int64_t last, int64_t begin, int64_t cols, const C* x, int64_t stride, C* sums) const {
    int64_t row = first;
    while (row < last) {
      C* const to = sums + (row - first);
      const auto group = [&](auto rows) {
        in_matrix(w, row, [&](const auto& matrix, int64_t at) { multiply_group<rows()>(matrix, at, row + 2 * rows() <= last ? at + rows() : at, begin, cols, x, stride, to, last - first); });
        row += rows();
      };
      const auto has = [&](int rows) { return row + rows <= last && in_one_matrix(w, row, row + rows - 1); };
      if (tokens_ == 1 && has(kRowsForOne)) group(Width<kRowsForOne>{});
      else if (has(kTileRows)) group(Width<kTileRows>{});
      else group(Width<1>{});
    }
  }
  template <int kRows, class M>
  void multiply_group(const M& w, int64_t row, int64_t next, int64_t begin, int64_t cols, const C* x, int64_t stride, C* sums,
                      int64_t sums_stride) const {
    constexpr int64_t decoded_stride = kDecodedCols + kRowGap;
    alignas(64) C decoded[kRows * decoded_stride];
    Register<C> lanes[kMostTokens * kRows];
    std::fill_n(lanes, tokens_ * kRows, Register<C>{});
    int64_t col = 0;
    if (tokens_ <= kTileTokens && InVectors<M>::value(w)) {
      for (const int64_t end = cols / kUnit * kUnit; col < end;) {
        const int64_t count = lesser(kRunCols, end - col);
        multiply_tile<kRows>(tokens_, w, row, next, begin + col, count, x + col, stride, lanes);
        col += count;
      }
    }
    for (; col < cols; col += kDecodedCols) {
      const int64_t count = lesser(kDecodedCols, cols - col);
      for (int r = 0; r < kRows; ++r) {
        prefetch(w, next + r, begin + col, begin + col + count);
        decode(w, row + r, begin + col, count, decoded + r * decoded_stride);
      }
      const DirectLoad<C> weights(decoded, decoded_stride);
      for (int t = 0; t < tokens_; t += kTileTokens) {
        multiply_tile<kRows>(lesser(kTileTokens, tokens_ - t), weights, 0, 0, 0, (count + kUnit - 1) / kUnit * kUnit, x + t * stride + col,
                             stride, lanes + t * kRows);
      }
    }
    for (int t = 0; t < tokens_; ++t) {
      for (int r = 0; r < kRows; ++r) sums[t * sums_stride + r] += sum(as_pack<C>(lanes[t * kRows + r]));
    }
  }

  // Columns [first, last) of the results.
  void write(int64_t first, int64_t last, const C (*sums)[sum_values]) const {
    for (int t = 0; t < tokens_; ++t) {
      const int64_t row = first_ + t, from = t * (last - first) - first;
      packs_.each(first, last, [=, map = map_, sink = end_](auto width, int64_t col) KERNELS_INLINE {
        constexpr int N = width();
        const auto total = [=](int matrix) KERNELS_INLINE {
          Pack<C, N> v;
          copy_bytes<int(sizeof(v.v))>(v.v, sums[matrix] + from + col);
          return v;
        };
        const auto store = [=](const auto& map, const Pack<C, N>& v) KERNELS_INLINE {
          put(sink, apply_map(map, v, fetch_operands<N>(map, row, col), row, col), row, col);
        };
        if constexpr (gated) store(later_maps(map), first_map(map).join(total(0), total(1)));
        else store(map, total(0));
      });
    }
  }

  const X& x_;
  const W& w_;
  decltype(sink_map(std::declval<const Out&>())) map_;
  decltype(sink_end(std::declval<const Out&>())) end_;
  Packs<DirectLoad<C, C>, Out> packs_;
  int64_t n_, k_, first_;
  int tokens_;
  decltype(row_state(std::declval<const X&>(), 0, 0)) states_[kMostTokens];
};

// What the caller has checked; M is kMostTokens at most.
template <class X, class W, class Out>
Status gemv(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape, int64_t first = 0) {
  Gemv<X, W, Out>(x, w, out, shape, first).run(cx.threads());
  return {};
}

// Weights that differ from token to token: one token after the other.
template <class X, class W, class Out>
Status gemv_by_token(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape) {
  for (int64_t token = 0; token < shape.m; ++token) {
    KERNELS_TRY(gemv(cx, x, for_token(w, token), out, {1, shape.n, shape.k}, token));
  }
  return {};
}

}
}  // namespace host
}  // namespace detail
KERNELS_END
