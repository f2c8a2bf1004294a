// Products on the CPU: result(m, n) = sum over k of x(m, k) * w(n, k).
//
// Each thread makes a rectangle of the result, block by block. The sums of a block stay on the stack, as tiles, while
// all of K goes by in stretches: of each stretch, the inputs of the block's rows are copied out of their source as they
// lie, and the weights are copied a panel of columns at a time and turned around, so that a vector holds one k of many
// columns. A tile of sums then lives in registers for the length of a stretch. Sources are read only to be copied, and
// the sink gets each tile once, when its last stretch is done.
//
// Every sum is made of the same stretches in the same order, whichever tile, block or thread it falls to: K alone
// decides.
#pragma once

#include "../../exec.h"
#include "inputs.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// ---- vectors -------------------------------------------------------------------------------------------------------

// Turns a square around: each round moves one bit of the row's number behind the column's, and one of the column's
// behind the row's.
template <int kRound = 1, class C, int... i>
inline KERNELS_INLINE void transpose(Register<C> (&rows)[sizeof...(i)], std::integer_sequence<int, i...> lanes) {
  if constexpr (kRound < int(sizeof...(i))) {
    constexpr int half = int(sizeof...(i)) / 2;
    Register<C> next[] = {zip<i % 2, C>(rows[i / 2], rows[i / 2 + half], lanes)...};
    transpose<2 * kRound, C>(next, lanes);
    (void(rows[i] = next[i]), ...);
  }
}

// ---- tiles ---------------------------------------------------------------------------------------------------------

// Sizes in elements. What a thread has on its stack stays below 512 KB, and so in the second-level cache.
template <class C>
struct Tiles {
  static constexpr int lanes = kLanes<C>;
  // As many sums as there are registers for, next to two vectors of weights and an input.
  static constexpr int rows = kVectorBytes == 64 ? 14 : 6, cols = 2 * lanes;
  static constexpr int size = rows * cols;
  // A stretch of K: a panel of weights and one of inputs fit the first-level cache.
  static constexpr int depth = 768 / int(sizeof(C));
  static constexpr int block_rows = 266 / rows * rows, block_cols = 1024 / int(sizeof(C));
};

// For a function that needs every register there is: inlined, it would have to share them.
#if defined(__GNUC__)
#define KERNELS_NOINLINE __attribute__((noinline))
#else
#define KERNELS_NOINLINE
#endif

// The sums of a tile's first rows over a stretch of K. x: rows of `depth`; w: a row of `cols` for each k. ahead(i) is
// called now and then, with 0, 1, 2 ...: it has the time to prefetch what will be needed next.
constexpr int kAhead = 16;
template <class C, class Ahead, int... row>
KERNELS_NOINLINE void multiply(const C* x, const C* w, int depth, bool first, C* tile, const Ahead& ahead,
                               std::integer_sequence<int, row...>) {
  using T = Tiles<C>;
  Register<C> left[] = {(void(row), Register<C>{})...}, right[] = {(void(row), Register<C>{})...};
  for (int begin = 0; begin < depth; begin += kAhead) {
    ahead(begin / kAhead);
    const int end = lesser(depth, begin + kAhead);
    for (int k = begin; k < end; ++k) {
      const Register<C> w0 = vector_at(w + k * T::cols), w1 = vector_at(w + k * T::cols + T::lanes);
      const auto add = [&](Register<C>& l, Register<C>& r, const C* value) KERNELS_INLINE {
        const Register<C> v = in_register(broadcast<T::lanes>(*value));
        l = multiply_add<C>(v, w0, l), r = multiply_add<C>(v, w1, r);
      };
      (add(left[row], right[row], x + row * T::depth + k), ...);
    }
  }
  const auto add = [&](C* to, const Register<C>& sums)
                       KERNELS_INLINE { put_vector<C>(to, first ? sums : vector_at(to) + sums); };
  ((add(tile + row * T::cols, left[row]), add(tile + row * T::cols + T::lanes, right[row])), ...);
}
// Few rows cost less than a whole tile.
template <int kRows, class C, class Ahead>
inline void multiply_rows(int rows, const C* x, const C* w, int depth, bool first, C* tile, const Ahead& ahead) {
  constexpr int fewer = kRows - 4;
  if constexpr (fewer > 0) {
    if (rows <= fewer) return multiply_rows<fewer>(rows, x, w, depth, first, tile, ahead);
  }
  multiply(x, w, depth, first, tile, ahead, std::make_integer_sequence<int, kRows>());
}

// ---- the product ---------------------------------------------------------------------------------------------------

// f(source, number) for a source of weights, or the two of gated().
template <class W, class F>
void each_matrix(const W& w, const F& f) {
  if constexpr (is_gated<W>::value) f(w.gate(), 0), f(w.up(), 1);
  else f(w, 0);
}

template <class X, class W, class Out>
class Gemm {
  using C = product_type<X, W>;
  using T = Tiles<C>;
  using State = decltype(row_state(std::declval<const X&>(), 0, 0));
  static constexpr int kMatrices = is_gated<W>::value ? 2 : 1, kBlockCols = T::block_cols / kMatrices;

 public:
  // The tokens are rows from `token` on of x and of the result, the weights those from `weights` on of w.
  Gemm(const X& x, const W& w, const Out& out, const MatmulShape& shape, int64_t token = 0, int64_t weights = 0)
      : x_(x), w_(w), results_(out, shape.n), shape_(shape), token_(token), weights_(weights) {}

  // Each thread gets a rectangle of whole tiles. Of all grids of as many rectangles, the one with the smallest is
  // taken; of equals the one with the most columns of them, because inputs are cheaper to copy than weights.
  void run(const Team& all) const {
    const Team team = all.for_work(0, double(shape_.m) * double(shape_.n) * double(shape_.k) * kMatrices);
    const int64_t tile_rows = tiles(shape_.m, T::rows), tile_cols = tiles(shape_.n, T::cols);
    int across = 1;
    int64_t least = std::numeric_limits<int64_t>::max();
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
  // Part i of `parts` of a number of tiles, in rows or columns.
  static Range share(int i, int parts, int64_t tiles, int size, int64_t limit) {
    const auto at = [&](int part) { return lesser(share_begin(tiles, part, parts) * size, limit); };
    return {at(i), at(i + 1)};
  }
  // As few blocks as `most` allows, all of nearly the same size.
  static int64_t block(int64_t count, int64_t most, int64_t unit) {
    return count == 0 ? unit : tiles(tiles(count, tiles(count, most)), unit) * unit;
  }

  void rectangle(int64_t m_begin, int64_t m_end, int64_t n_begin, int64_t n_end) const {
    alignas(64) C inputs[T::block_rows * T::depth], weights[T::depth * T::cols], sums[T::block_rows * T::block_cols];
    State states[T::block_rows];
    const int64_t rows = block(m_end - m_begin, T::block_rows, T::rows),
                  cols = block(n_end - n_begin, kBlockCols, T::cols);
    const int64_t depth = block(shape_.k, T::depth, kWidestPack);
    for (int64_t m = m_begin; m < m_end; m += rows) {
      const int height = int(lesser(rows, m_end - m));
      for (int r = 0; r < height; ++r) {
        states[r] = row_state(x_, m + r, shape_.k);
        if (n_begin == 0) write_state(x_, states[r], m + r, shape_.k);
      }
      for (int64_t n = n_begin; n < n_end; n += cols) {
        const int64_t cols_end = lesser(n + cols, n_end);
        // Where there is no K, the tiles are still filled with zeros.
        int64_t k = 0;
        do {
          const int stretch = int(lesser(depth, shape_.k - k));
          const int64_t next_k = k + stretch < shape_.k ? k + stretch : 0;
          C* tile = sums;
          for (int64_t col = n; col < cols_end; col += T::cols) {
            const int width = int(lesser<int64_t>(T::cols, n_end - col));
            const bool last = col + T::cols >= cols_end;
            each_matrix(w_, [&](const auto& source, int matrix) {
              turn_weights(source, weights_ + col, width, k, stretch, weights);
              for (int row = 0; row < height; row += T::rows, tile += T::size) {
                const int few = lesser(T::rows, height - row);
                C* const x = inputs + row * T::depth;
                if (col == n && matrix == 0) copy_inputs(states + row, m + row, few, k, stretch, x);
                // What is copied next comes into the cache meanwhile: the next tile's inputs, and a share of the next
                // weights.
                const int64_t x_row = m + row + T::rows,
                              x_end = col == n && matrix == 0 ? lesser(x_row + T::rows, m + height) : 0;
                const int64_t w_from = last ? n : col + T::cols, w_row = w_from + T::cols * row / height;
                const int64_t w_end = lesser(w_from + T::cols * (row + few) / height, n_end), w_k = last ? next_k : k;
                const auto ahead = [&, k](int i) KERNELS_INLINE {
                  for (int64_t r = x_row + 2 * i; r < lesser(x_end, x_row + 2 * i + 2); ++r)
                    prefetch(x_, r, k, k + stretch);
                  if (w_row + i < w_end) prefetch(source, weights_ + w_row + i, w_k, lesser(w_k + stretch, shape_.k));
                };
                multiply_rows<T::rows>(few, x, weights, stretch, k == 0, tile, ahead);
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

  void copy_inputs(const State* states, int64_t m, int height, int64_t k, int stretch, C* to) const {
    for (int r = 0; r < height; ++r)
      read_row(with_state(x_, states[r], shape_.k), m + r, k, stretch, to + r * T::depth);
    // Rows that only fill up the tile; what comes of them is not looked at.
    for (int r = height; r < T::rows; ++r) {
      for (int i = 0; i < stretch; ++i) to[r * T::depth + i] = C(0);
    }
  }

  // A panel: the weights of `width` results, side by side for each k.
  template <class Source>
  void turn_weights(const Source& source, int64_t n, int width, int64_t k, int stretch, C* to) const {
    for (int left = 0; left < T::cols; left += T::lanes) {
      int done = 0;
      if constexpr (any_width<Source>) {
        if (left + T::lanes <= width) {
          for (; done + T::lanes <= stretch; done += T::lanes) {
            turn([&](int i) KERNELS_INLINE {
              const auto fetched = fetch<T::lanes>(source, n + left + i, k + done);
              return in_register(convert<C>(resolve(source, fetched, n + left + i, k + done)));
            }, to + done * T::cols + left);
          }
        }
      }
      if (done == stretch) continue;
      // What cannot be read by the square is copied first, with zeros around it.
      alignas(64) C rows[T::lanes * T::depth];
      for (int i = 0; i < T::lanes; ++i) {
        int filled = done;
        if (left + i < width) {
          read_row(source, n + left + i, k + done, stretch - done, rows + i * T::depth + done);
          filled = stretch;
        }
        for (; filled < stretch || filled % T::lanes != 0; ++filled) rows[i * T::depth + filled] = C(0);
      }
      for (; done < stretch; done += T::lanes) {
        turn([&](int i) KERNELS_INLINE { return vector_at(rows + i * T::depth + done); }, to + done * T::cols + left);
      }
    }
  }
  template <class Row, int... i>
  static KERNELS_INLINE void turn(const Row& row, C* to, std::integer_sequence<int, i...> lanes) {
    Register<C> square[] = {row(i)...};
    transpose<1, C>(square, lanes);
    (put_vector<C>(to + i * T::cols, square[i]), ...);
  }
  template <class Row>
  static KERNELS_INLINE void turn(const Row& row, C* to) { turn(row, to, std::make_integer_sequence<int, T::lanes>()); }

  const X& x_;
  const W& w_;
  Results<C, W, Out> results_;
  MatmulShape shape_;
  int64_t token_, weights_;
};

// What the caller has checked.
template <class X, class W, class Out>
Status gemm(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape) {
  Gemm<X, W, Out>(x, w, out, shape).run(cx.team());
  return {};
}

// Each product on its own, by all threads.
template <class X, class W, class Out>
Status gemm(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape,
            const Groups& groups) {
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
