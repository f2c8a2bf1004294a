// Products with many rows of inputs on the CPU: result(m, n) = sum over k of x(m, k) * w(n, k).
//
// Each thread computes a rectangle of the result, block by block. The sums of a block stay on the stack, as tiles,
// while K is processed in stretches. For each stretch, the inputs of the block's rows are copied out of their source,
// and the weights are copied and transposed a panel of columns at a time, so that a vector holds one k of many columns.
// A tile of sums stays in registers during a stretch. Sources are read only for these copies, and the sink gets each
// tile once, after its last stretch.
//
// Every sum is made from the same stretches in the same order, in whichever tile, block or thread: it depends on K
// only.
//
// If both operands are plain bfloat16 in memory and the machine has dot products of these (AVX512-BF16), panels keep
// them as they are, with two adjacent k in each lane: one instruction multiplies and adds both. (AMX is not used: its
// tile registers must be requested from the operating system.)
#pragma once

#include "../../exec.h"
#include "units.h"

#if KERNELS_VECTORS && defined(__AVX512F__) && defined(__AVX512BF16__)
#define KERNELS_BF16_DOTS 1
#else
#define KERNELS_BF16_DOTS 0
#endif

KERNELS_BEGIN
namespace detail {
namespace host {

// ---- vectors -------------------------------------------------------------------------------------------------------

// Transposes a square: each round exchanges one bit of the row index and one bit of the column index.
template <int kRound = 1, class C, int... i>
inline KERNELS_INLINE void transpose(Register<C> (&rows)[sizeof...(i)], std::integer_sequence<int, i...> lanes) {
  if constexpr (kRound < int(sizeof...(i))) {
    constexpr int half = int(sizeof...(i)) / 2;
    Register<C> next[] = {zip<i % 2, C>(rows[i / 2], rows[i / 2 + half], lanes)...};
    transpose<2 * kRound, C>(next, lanes);
    (void(rows[i] = next[i]), ...);
  }
}

// ---- operands ------------------------------------------------------------------------------------------------------

// How panels hold numbers of type T: the adjacent k of a row in each lane of a vector, and the type of the sums.
template <class T>
struct Operand {
  using Sum = T;
  using Lane = T;
  static constexpr int together = 1;
};
template <>
struct Operand<bfloat16> {
  using Sum = float;
  using Lane = uint32_t;
  static constexpr int together = 2;
};
template <class T>
using Sum = typename Operand<T>::Sum;
template <class T>
using LanesOf = Register<typename Operand<T>::Lane>;

template <class T>
inline KERNELS_INLINE LanesOf<T> lanes_at(const T* from) {
  LanesOf<T> v;
  copy_bytes<int(sizeof(v))>(&v, from);
  return v;
}
// Broadcasts the numbers of one lane to all lanes.
template <class T>
inline KERNELS_INLINE LanesOf<T> in_all_lanes(const T* from) {
  typename Operand<T>::Lane lane;
  memcpy(&lane, from, sizeof(lane));
  return in_register(broadcast<kLanes<Sum<T>>>(lane));
}

// sums + the products of all numbers of a lane.
template <class T>
inline KERNELS_INLINE Register<Sum<T>> add_products(const LanesOf<T>& a, const LanesOf<T>& b,
                                                    const Register<Sum<T>>& sums) {
#if KERNELS_BF16_DOTS
  if constexpr (std::is_same<T, bfloat16>::value) return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
  else return multiply_add<T>(a, b, sums);
#else
  return multiply_add<T>(a, b, sums);
#endif
}

// The type of the numbers in a product's panels.
template <class X, class W>
using panel_type = std::conditional_t<KERNELS_BF16_DOTS && is_plain_bfloat16<X> && is_plain_bfloat16<W>, bfloat16,
                                      product_type<X, W>>;

// ---- tiles ---------------------------------------------------------------------------------------------------------

// Sizes in elements, for panels of T. A thread uses about 512 KB of stack, so its buffers stay in the second-level
// cache.
template <class T>
struct Tiles {
  using C = Sum<T>;
  static constexpr int lanes = kLanes<C>, together = Operand<T>::together;
  // The rows and k that are transposed at a time: a square of lanes.
  static constexpr int square = lanes * together;
  // As many sums as there are registers for, besides two vectors of weights and an input.
  static constexpr int rows = kVectorBytes == 64 ? 14 : 6, cols = 2 * lanes;
  static constexpr int size = rows * cols;
  // A stretch of K: a panel of weights and one of inputs fit into the first-level cache.
  static constexpr int depth = 768 / int(sizeof(T));
  static constexpr int block_rows = 266 / rows * rows, block_cols = 1024 / int(sizeof(C));
};

// For functions that need every register: if inlined, they would have to share them.
#if defined(__GNUC__)
#define KERNELS_NOINLINE __attribute__((noinline))
#else
#define KERNELS_NOINLINE
#endif

// Computes the sums of a tile's first rows over a stretch of K; a step is as many k as a lane holds. x: rows of
// `depth`. w: `cols` lanes for each step. ahead(i) is called at intervals with 0, 1, 2 ..., to prefetch what is needed
// next.
constexpr int kAhead = 16;
template <class T, class Ahead, int... row>
KERNELS_NOINLINE void multiply(const T* x, const T* w, int steps, bool first, Sum<T>* tile, const Ahead& ahead,
                               std::integer_sequence<int, row...>) {
  using Tile = Tiles<T>;
  using C = Sum<T>;
  Register<C> left[] = {(void(row), Register<C>{})...}, right[] = {(void(row), Register<C>{})...};
  for (int begin = 0; begin < steps; begin += kAhead) {
    ahead(begin / kAhead);
    const int end = lesser(steps, begin + kAhead);
    for (int step = begin; step < end; ++step) {
      const T* const at = w + step * Tile::cols * Tile::together;
      const LanesOf<T> w0 = lanes_at(at), w1 = lanes_at(at + Tile::square);
      const auto add = [&](Register<C>& l, Register<C>& r, const T* values) KERNELS_INLINE {
        const LanesOf<T> v = in_all_lanes(values);
        l = add_products<T>(v, w0, l), r = add_products<T>(v, w1, r);
      };
      (add(left[row], right[row], x + row * Tile::depth + step * Tile::together), ...);
    }
  }
  const auto add = [&](C* to, const Register<C>& sums)
                       KERNELS_INLINE { put_vector<C>(to, first ? sums : vector_at(to) + sums); };
  ((add(tile + row * Tile::cols, left[row]), add(tile + row * Tile::cols + Tile::lanes, right[row])), ...);
}
// With few rows, computes less than a whole tile.
template <int kRows, class T, class Ahead>
inline void multiply_rows(int rows, const T* x, const T* w, int steps, bool first, Sum<T>* tile, const Ahead& ahead) {
  constexpr int fewer = kRows - 4;
  if constexpr (fewer > 0) {
    if (rows <= fewer) return multiply_rows<fewer>(rows, x, w, steps, first, tile, ahead);
  }
  multiply(x, w, steps, first, tile, ahead, std::make_integer_sequence<int, kRows>());
}

// ---- the product ---------------------------------------------------------------------------------------------------

template <class X, class W, class Out>
class Gemm {
  using Number = panel_type<X, W>;
  using C = Sum<Number>;
  using T = Tiles<Number>;
  using State = decltype(row_state(std::declval<const X&>(), 0, 0));
  static constexpr int kMatrices = is_gated<W>::value ? 2 : 1, kBlockCols = T::block_cols / kMatrices;

 public:
  // The tokens are rows from `token` on of x and of the result; the weights are rows from `weights` on of w.
  Gemm(const X& x, const W& w, const Out& out, const MatmulShape& shape, int64_t token, int64_t weights)
      : x_(x), w_(w), results_(out, shape.n), shape_(shape), token_(token), weights_(weights) {}

  // Each thread gets a rectangle of whole tiles. Of all grids with that many rectangles, the one with the smallest
  // rectangle is used; of equal ones the one with the most columns of rectangles, as inputs are cheaper to copy than
  // weights.
  void run(const Team& all) const {
    const Team team = all.for_work(0, double(shape_.m) * double(shape_.n) * double(shape_.k) * kMatrices);
    const int64_t tile_rows = tiles(shape_.m, T::rows), tile_cols = tiles(shape_.n, T::cols);
    int across = 1;
    int64_t least = INT64_MAX;
    for (int i = 1; i <= lesser<int64_t>(team.threads, tile_cols); ++i) {
      const int64_t largest = tiles(tile_cols, i) * tiles(tile_rows, team.threads / i);
      if (largest <= least) least = largest, across = i;
    }
    const int down = int(lesser<int64_t>(team.threads / across, tile_rows));
    parallel(team, across * down, [&](int part) {
      const auto [m, m_end] = share(part / across, down, tile_rows, T::rows, shape_.m);
      const auto [n, n_end] = share(part % across, across, tile_cols, T::cols, shape_.n);
      rectangle(token_ + m, token_ + m_end, n, n_end);
    });
  }

 private:
  struct Range {
    int64_t begin, end;
  };
  static int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }
  // Part i of `parts` of `tiles` tiles, in rows or columns.
  static Range share(int i, int parts, int64_t tiles, int size, int64_t limit) {
    const auto at = [&](int part) { return lesser(share_begin(tiles, part, parts) * size, limit); };
    return {at(i), at(i + 1)};
  }
  // As few blocks as `most` allows, of nearly equal size.
  static int64_t block(int64_t count, int64_t most, int64_t unit) {
    return count == 0 ? unit : tiles(tiles(count, tiles(count, most)), unit) * unit;
  }

  void rectangle(int64_t m_begin, int64_t m_end, int64_t n_begin, int64_t n_end) const {
    alignas(64) Number inputs[T::block_rows * T::depth], weights[T::depth * T::cols];
    alignas(64) C sums[T::block_rows * T::block_cols];
    State states[T::block_rows];
    const int64_t rows = block(m_end - m_begin, T::block_rows, T::rows),
                  cols = block(n_end - n_begin, kBlockCols, T::cols);
    int unit = greater(kWidestPack, T::square);
    each_matrix(w_, [&unit](const auto& source, int) {
      if constexpr (has_codes<std::decay_t<decltype(source)>>)
        unit = greater(unit, Unit<Number, std::decay_t<decltype(source)>>::cols);
    });
    const int64_t depth = block(shape_.k, T::depth / unit * unit, unit);
    for (int64_t m = m_begin; m < m_end; m += rows) {
      const int height = int(lesser(rows, m_end - m));
      for (int r = 0; r < height; ++r) {
        states[r] = row_state(x_, m + r, shape_.k);
        if (n_begin == 0) write_state(x_, states[r], m + r, shape_.k);
      }
      for (int64_t n = n_begin; n < n_end; n += cols) {
        const int64_t cols_end = lesser(n + cols, n_end);
        // With K = 0 the tiles still have to be filled with zeros.
        int64_t k = 0;
        do {
          const int stretch = int(lesser(depth, shape_.k - k)), steps = (stretch + T::together - 1) / T::together;
          const int64_t next_k = k + stretch < shape_.k ? k + stretch : 0;
          C* tile = sums;
          for (int64_t col = n; col < cols_end; col += T::cols) {
            const int width = int(lesser<int64_t>(T::cols, n_end - col));
            const bool last = col + T::cols >= cols_end;
            each_matrix(w_, [&](const auto& source, int matrix) {
              transpose_weights(source, weights_ + col, width, k, stretch, weights);
              for (int row = 0; row < height; row += T::rows, tile += T::size) {
                const int few = lesser(T::rows, height - row);
                Number* const x = inputs + row * T::depth;
                if (col == n && matrix == 0) copy_inputs(states + row, m + row, few, k, stretch, x);
                // Prefetches what is copied next: the next tile's inputs, and a part of the next weights.
                const int64_t x_row = m + row + T::rows,
                              x_end = col == n && matrix == 0 ? lesser(x_row + T::rows, m + height) : 0;
                const int64_t w_from = last ? n : col + T::cols, w_row = w_from + T::cols * row / height;
                const int64_t w_end = lesser(w_from + T::cols * (row + few) / height, n_end), w_k = last ? next_k : k;
                const auto ahead = [&, k](int i) KERNELS_INLINE {
                  for (int64_t r = x_row + 2 * i; r < lesser(x_end, x_row + 2 * i + 2); ++r)
                    prefetch(x_, r, k, k + stretch);
                  if (w_row + i < w_end) prefetch(source, weights_ + w_row + i, w_k, lesser(w_k + stretch, shape_.k));
                };
                multiply_rows<T::rows>(few, x, weights, steps, k == 0, tile, ahead);
                if (matrix + 1 == kMatrices && k + stretch == shape_.k) {
                  const C* const first = tile - matrix * tiles(height, T::rows) * T::size;
                  for (int r = 0; r < few; ++r)
                    results_.write(m + row + r, col, col + width, first + r * T::cols, tile + r * T::cols);
                }
              }
            });
          }
          k += stretch;
        } while (k < shape_.k);
      }
    }
  }

  // Fills up the last lane of a stretch with zeros, as do the weights.
  void copy_inputs(const State* states, int64_t m, int height, int64_t k, int stretch, Number* to) const {
    const auto clear = [&](int r, int from) {
      for (int i = from; i < stretch || i % T::together != 0; ++i) to[r * T::depth + i] = convert<Number>(0.f);
    };
    for (int r = 0; r < height; ++r) {
      read_row(with_state(x_, states[r], shape_.k), m + r, k, stretch, to + r * T::depth);
      clear(r, stretch);
    }
    // Rows that only fill up the tile; their results are not used.
    for (int r = height; r < T::rows; ++r) clear(r, 0);
  }

  // Copies a panel: the weights of `width` results, side by side for each step.
  template <class Source>
  void transpose_weights(const Source& source, int64_t n, int width, int64_t k, int stretch, Number* to) const {
    for (int left = 0; left < T::cols; left += T::lanes) {
      Number* const panel = to + left * T::together;
      int done = 0;
      alignas(64) Number rows[T::lanes * T::depth];
      if constexpr (has_codes<Source>) {
        for (int i = 0; i < T::lanes; ++i) {
          Number* const row = rows + i * T::depth;
          if (left + i < width) {
            in_matrix(source, n + left + i, [&](const auto& matrix, int64_t at) {
              using Of = MatrixOf<std::decay_t<decltype(matrix)>>;
              decode(Of::of(matrix), Of::row(matrix, at), k, stretch, row);
            });
          } else {
            fill(row, T::depth, Number(0));
          }
        }
        using U = Unit<Number, Source>;
        if constexpr (U::in_planes) {  // vector i has every eighth column
          for (; done + U::cols <= stretch; done += U::cols) {
            for (int i = 0; i < 8; ++i) {
              const Register<Number> factor = in_register(broadcast<T::lanes>(Number(1 / U::unity(i))));
              const Number* const from = rows + done + i * T::lanes;
              turn([&](int r) KERNELS_INLINE { return vector_at(from + r * T::depth) * factor; },
                   panel + (done + i) * T::cols, 8);
            }
          }
        }
      } else {
        if constexpr (any_width<Source>) {
          if (left + T::lanes <= width) {
            for (; done + T::square <= stretch; done += T::square) {
              turn(
                  [&](int i) KERNELS_INLINE {
                    const auto fetched = fetch<T::square>(source, n + left + i, k + done);
                    return bit_cast<LanesOf<Number>>(values<Number>(source, fetched, n + left + i, k + done));
                  },
                  panel + done * T::cols);
            }
          }
        }
        if (done == stretch) continue;
        // Rows that cannot be read in whole squares are copied first, padded with zeros.
        for (int i = 0; i < T::lanes; ++i) {
          int filled = done;
          if (left + i < width) {
            read_row(source, n + left + i, k + done, stretch - done, rows + i * T::depth + done);
            filled = stretch;
          }
          for (; filled < stretch || filled % T::square != 0; ++filled)
            rows[i * T::depth + filled] = convert<Number>(0.f);
        }
      }
      for (; done < stretch; done += T::square) {
        turn([&](int i) KERNELS_INLINE { return lanes_at(rows + i * T::depth + done); }, panel + done * T::cols);
      }
    }
  }
  // Writes a square of rows to each `apart` columns of a panel.
  template <class Row, int... i>
  static KERNELS_INLINE void turn(const Row& row, Number* to, int apart, std::integer_sequence<int, i...> lanes) {
    LanesOf<Number> square[] = {row(i)...};
    transpose<1, typename Operand<Number>::Lane>(square, lanes);
    (copy_bytes<int(sizeof(square[i]))>(to + i * apart * T::cols * T::together, &square[i]), ...);
  }
  template <class Row>
  static KERNELS_INLINE void turn(const Row& row, Number* to, int apart = 1) {
    turn(row, to, apart, std::make_integer_sequence<int, T::lanes>());
  }

  const X& x_;
  const W& w_;
  Results<C, W, Out> results_;
  MatmulShape shape_;
  int64_t token_, weights_;
};

// Arguments are checked by the caller. All threads work on one group at a time.
template <class X, class W, class Out>
Status gemm(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape,
            const Groups& groups = {}) {
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t begin = groups.offsets != nullptr ? groups.offsets[g] : g * shape.m,
                  end = groups.offsets != nullptr ? groups.offsets[g + 1] : begin + shape.m;
    if (begin < end) Gemm<X, W, Out>(x, w, out, {end - begin, shape.n, shape.k}, begin, g * shape.n).run(cx.team());
  }
  return {};
}

}  // namespace host
}  // namespace detail
KERNELS_END
