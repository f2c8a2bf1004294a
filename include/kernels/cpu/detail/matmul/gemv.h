// Products with few rows of inputs on the CPU. Each weight is used only a few times, so reading the weights takes most
// of the time, and everything else must not slow that down.
//
// Threads take ranges of weight rows. A thread keeps a stretch of the inputs on its stack, as floats with maps applied,
// and multiplies kRows weight rows at a time with it. Weights are decoded in registers; if many inputs share them, into
// a buffer in the first-level cache. Sums are kept lane by lane for a run of columns, then as totals.
// The order of a sum depends on M and K only, not on threads or on other rows.
#pragma once

#include "../../exec.h"
#include "digits.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// The most inputs that share a pass over the weights.
constexpr int kMostTokens = 32;
// Inputs and weight rows that are multiplied at a time, and how many pairs of them: a register for each, and some for
// what is read. So more inputs are multiplied with fewer rows. Codes are decoded again for each tile of inputs.
constexpr int kTileRows = 4;
constexpr int kTilePairs = kVectorBytes == 64 ? 16 : 8;
template <class M>
constexpr int kTileTokens = kVectorBytes == 64 || !has_codes<M> ? 4 : 2;
constexpr int rows_of_tile(int rows, int tokens) {
  while (rows * tokens > kTilePairs) rows /= 2;
  return rows;
}
// The rows for which inputs are read once from beyond the first-level cache: kTileRows where a tile has several inputs
// and as many rows, otherwise this.
constexpr int kMostWeightRows = 8;
template <class M>
constexpr bool takes_most_weight_rows(int tokens) {
  return tokens == 1 || tokens > kTileTokens<M> || rows_of_tile(kTileRows, tokens) < kTileRows;
}
// Rows, and columns of them, that are decoded at a time for more inputs than a tile. With a tile of inputs they stay in
// the first-level cache. EPYC with AVX-512, one thread, 192 x 3584 floats, 32 tokens: 148 GFLOP/s; 16 rows 135, 16 x
// 1024 124, 32 x 256 115.
constexpr int kDecodedRows = 8;
constexpr int64_t kDecodedCols = 512;
// The prefetch distance in a row of weights. Same machine, one thread, 4096 x 14336, speed relative to a plain read:
// halves 1.08 with 1024 bytes, 1.06 with 2048, 1.12 with 4096; int8 1.06, 1.00, 1.07. Xeon with AMX, two threads:
// TinyLlama's shape in halves decodes at 12.8 to 13.2 tokens/s with 512 and 1024 bytes, at 11.7 to 12.1 with 2048.
constexpr int kAheadBytes = 1024;
// Rows that are read at the same time are taken from different pages if there are enough: hardware prefetchers follow
// one stream in a page. On that Xeon two threads that read eight adjacent rows of 2 KB reach 20 GB/s, every second row
// 28.
constexpr int64_t kPageBytes = 4096;
// The inputs and sums that a thread keeps on its stack.
constexpr int kInputBytes = 256 << 10;
constexpr int kSumBytes = 64 << 10;

// The most inputs for which weights are decoded in registers, once for each tile of inputs, rather than into a buffer.
// EPYC without AVX-512, one thread, 2048 x 4096 halves, 8 tokens: 2.0 ms instead of 3.3; 16 tokens: 4.0 instead of 5.4.
template <class M>
constexpr int kMostInRegisters = kVectorBytes < 64 && Addressable<M>::bits == 16 ? 16 : kTileTokens<M>;

// A place in weight rows, `apart` rows from each other, whose columns [begin, end) are read, and what follows after the
// end: the same columns of the rows from `next` on.
struct Stretch {
  int64_t row, next, begin, end, apart = 1;
};

// Scales are elsewhere than the codes that are read continuously, so without a prefetch their loads would stall.
template <int kRows, class W>
KERNELS_INLINE inline void prefetch_scales(const W& rows, int64_t row, int64_t apart, int64_t begin, int64_t count) {
  using Of = MatrixOf<W>;
  if constexpr (is_dequant<typename Of::type>::value) {
    const auto& scales = Of::of(rows).scales();
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = Of::row(rows, row + r * apart);
      prefetch_lines(scales.scale_at(at, begin), scales.scale_at(at, begin + count));
    }
  }
}

// How many rows are summed by groups side by side: as many as there are registers for.
constexpr int rows_at_once(int rows, int tokens) {
  const int most = kVectorBytes < 64 ? (tokens == 1 ? 2 : 1) : tokens == 1 ? 8 : tokens == 2 ? 4 : 2;
  return rows < most ? rows : most;
}

// Prefetches what is kAheadBytes behind `col` in these rows; past the end of their stretch, the beginning of the next
// rows.
template <int kCols, int kRows, class M>
KERNELS_INLINE inline void prefetch_ahead(const M& w, const int64_t (&row_of)[kRows], int64_t next_row,
                                          const Stretch& at, int64_t col) {
  constexpr int bits = Addressable<M>::bits;
  // Weights of 32 bits and more are prefetched by the hardware, as their rows are long.
  if constexpr (bits > 0 && bits < 32) {
    // The prefetch has the same distance from the current position in every row.
    constexpr int64_t ahead_cols = kAheadBytes * 8 / bits;
    const int64_t ahead = col + ahead_cols, from = ahead < at.end ? ahead : at.begin + (ahead - at.end);
    const int64_t distance =
        Addressable<M>::of(w, ahead < at.end ? row_of[0] : next_row, from) - Addressable<M>::of(w, row_of[0], col);
    unrolled<kRows>([&](auto r) KERNELS_INLINE {
      const char* const p = Addressable<M>::of(w, row_of[r()], col) + distance;
      unrolled<(kCols * bits / 8 + kLineBytes - 1) / kLineBytes>([&](auto line) KERNELS_INLINE {
        prefetch_lines(p + line() * kLineBytes, p + line() * kLineBytes + 1);
      });
    });
  }
}

// For units in planes: minus the sums of the inputs in each lane.
template <class U, int kTokens, int kUnits, class C>
KERNELS_INLINE inline void sum_inputs(const C* x, int64_t stride, int64_t count,
                                      Register<C> (&inputs)[kTokens][kUnits]) {
  constexpr int N = kLanes<C>;
  for (int64_t col = 0; col < count; col += U::cols) {
    unrolled<kTokens>([&](auto t) KERNELS_INLINE {
      Register<C> sum{};
      unrolled<U::cols / N>([&](auto i) KERNELS_INLINE {
        sum = multiply_add<C>(vector_at(x + t() * stride + col + i() * N), in_register(broadcast<N>(C(-U::unity(i())))),
                              sum);
      });
      inputs[t()][col / U::cols] = sum;
    });
  }
}

// The common data of the products of a run of columns: weight rows row_of[r], inputs x + t * stride, and columns from
// `begin` on of the weights.
template <class C, class M, int kRows, int kTokens>
struct TileRun {
  using U = Unit<C, M>;
  using Scales = Shared<C, M, kRows>;
  static constexpr int N = kLanes<C>;
  static constexpr bool sums_inputs = U::in_planes && Scales::has_centers;
  using InputSums = Register<C>[kTokens][sums_inputs ? kRunCols / U::cols : 1];

  const M& w;
  const int64_t (&row_of)[kRows];
  const Scales& shared;
  int64_t begin;
  const C* x;
  int64_t stride;
  const InputSums& inputs;

  // sums[t][r] += the products of a unit of rows first + r, without their scales.
  template <int first, int rows>
  KERNELS_INLINE void add_unit(int64_t col, int64_t index, Register<C> (&sums)[kTokens][rows]) const {
    unrolled<U::cols / N>([&](auto i) KERNELS_INLINE {
      Register<C> in[kTokens];
      unrolled<kTokens>([&](auto t) KERNELS_INLINE {
        const Register<C> v = vector_at(x + t() * stride + col + i() * N);
        // Loads limit this otherwise. Xeon with AVX-512, one thread, 2048 x 4096 floats, 16 tokens: 2.7 ms for 3.0.
        in[t()] = kTokens > 1 && rows > 1 ? arch::held(v) : v;
      });
      unrolled<rows>([&](auto r) KERNELS_INLINE {
        const U unit(w, row_of[first + r()], begin + col);
        Register<C> v = unit.template vector<i()>();
        if constexpr (Scales::has_centers && !U::in_planes) v = v - shared.center(first + r(), index);
        unrolled<kTokens>([&](auto t) KERNELS_INLINE {
          if constexpr (sums_inputs && i() == 0) {
            sums[t()][r()] =
                multiply_add<C>(shared.center(first + r(), index), inputs[t()][col / U::cols], sums[t()][r()]);
          }
          sums[t()][r()] = multiply_add<C>(v, in[t()], sums[t()][r()]);
        });
      });
    });
  }

  // sums[t][first + r] += the products of columns [col, end) of `rows` rows; the scale is applied to the sum of a whole
  // group.
  template <int first, int rows>
  KERNELS_INLINE void add_groups(int64_t col, int64_t end, Register<C> (&sums)[kTokens][kRows]) const {
    for (int64_t c = col; c < end;) {
      const int64_t index = shared.index(c), from = c;
      Register<C> group[kTokens][rows] = {};
      if constexpr (U::in_planes) {
        add_unit<first>(c, index, group);
        c += U::cols;
      } else {
        const int64_t group_end = lesser(end, c + shared.group);
        do add_unit<first>(c, index, group);
        while ((c += U::cols) < group_end);
      }
      unrolled<rows>([&](auto r) KERNELS_INLINE {
        const Register<C> scale = shared.scale(U(w, row_of[first + r()], begin + from), first + r(), index);
        unrolled<kTokens>([&](auto t) KERNELS_INLINE {
          sums[t()][first + r()] = multiply_add<C>(group[t()][r()], scale, sums[t()][first + r()]);
        });
      });
    }
  }
};

// Rows of weights for a run of columns: where they are and their scales. Prefetches the scales of the next run.
template <class C, class W, int kRows>
struct RowsOfRun {
  using Of = MatrixOf<W>;
  using M = typename Of::type;
  using Scales = Shared<C, M, kRows>;

  const M w;
  int64_t row_of[kRows], next_row;
  const Scales shared;

  KERNELS_INLINE RowsOfRun(const W& rows, const Stretch& at, int64_t begin, int64_t count)
      : w(Of::of(rows)),
        next_row(Of::row(rows, at.next)),
        shared(w, [&](int r) KERNELS_INLINE { return Of::row(rows, at.row + r * at.apart); }, begin, count) {
    unrolled<kRows>([&](auto r) KERNELS_INLINE { row_of[r()] = Of::row(rows, at.row + r() * at.apart); });
    const bool last_run = begin + count >= at.end;
    const int64_t next_begin = last_run ? at.begin : begin + count;
    prefetch_scales<kRows>(rows, last_run ? at.next : at.row, at.apart, next_begin,
                           lesser(kRunCols, at.end - next_begin));
  }
};

template <int kTokens, int kRows, class C>
KERNELS_INLINE inline void add_sums(const Register<C> (&sums)[kTokens][kRows], Register<C>* lanes, int lanes_stride) {
  unrolled<kTokens>([&](auto t) KERNELS_INLINE {
    unrolled<kRows>([&](auto r) KERNELS_INLINE {
      lanes[t() * lanes_stride + r()] = lanes[t() * lanes_stride + r()] + sums[t()][r()];
    });
  });
}

// lanes[t * lanes_stride + r] += the products of columns [begin, begin + count) of weight row `row + r` and x + t *
// stride, lane by lane. count is a multiple of a unit, at most kRunCols.
template <int kRows, int kTokens, class C, class W>
void multiply(const W rows, const Stretch& at, int64_t begin, int64_t count, const C* x, int64_t stride,
              Register<C>* lanes, int lanes_stride) {
  using M = typename MatrixOf<W>::type;
  using U = Unit<C, M>;
  using Run = TileRun<C, M, kRows, kTokens>;
  constexpr int step = U::in_planes ? U::cols : kStrideCols;
  const RowsOfRun<C, W, kRows> of(rows, at, begin, count);
  typename Run::InputSums inputs;
  if constexpr (Run::sums_inputs) sum_inputs<U>(x, stride, count, inputs);
  const Run run{of.w, of.row_of, of.shared, begin, x, stride, inputs};
  Register<C> sums[kTokens][kRows] = {};
  for (int64_t col = 0; col < count; col += step) {
    prefetch_ahead<step>(of.w, of.row_of, of.next_row, at, begin + col);
    const int64_t end = lesser(count, col + step);
    if constexpr (!U::scaled) {
      for (int64_t c = col; c < end; c += U::cols) run.template add_unit<0>(c, 0, sums);
    } else {
      constexpr int at_once = rows_at_once(kRows, kTokens);
      unrolled<kRows / at_once>([&](auto block) KERNELS_INLINE {
        run.template add_groups<block() * at_once, at_once>(col, end, sums);
      });
    }
  }
  add_sums<kTokens, kRows, C>(sums, lanes, lanes_stride);
}

// The same with inputs as digits; count is a multiple of a block of digits.
template <int kRows, int kTokens, class W>
void multiply_digits(const W rows, const Stretch& at, int64_t begin, int64_t count, const float* x, int64_t stride,
                     Register<float>* lanes, int lanes_stride) {
  using Rows = RowsOfRun<float, W, kRows>;
  using Scales = typename Rows::Scales;
  using U = Unit<float, typename Rows::M>;
  using D = Digits<typename Rows::M>;
  const Rows of(rows, at, begin, count);
  Register<float> sums[kTokens][kRows] = {};
  for (int64_t col = 0; col < count; col += D::cols) {
    prefetch_ahead<D::cols>(of.w, of.row_of, of.next_row, at, begin + col);
    const int64_t index = of.shared.index(col);
    Register<float> products[kTokens][kRows];
    D::multiply(of.w, of.row_of, begin + col, x + col, stride, products);
    unrolled<kRows>([&](auto r) KERNELS_INLINE {
      [[maybe_unused]] Register<float> center{}, scale{};
      if constexpr (Scales::has_centers) center = of.shared.center(r(), index);
      if constexpr (U::scaled) scale = of.shared.scale(U(of.w, of.row_of[r()], begin + col), r(), index);
      unrolled<kTokens>([&](auto t) KERNELS_INLINE {
        Register<float>& product = products[t()][r()];
        if constexpr (Scales::has_centers)
          product = multiply_add<float>(center, D::input_sums(x + t() * stride + col), product);
        if constexpr (U::scaled) sums[t()][r()] = multiply_add<float>(product, scale, sums[t()][r()]);
        else sums[t()][r()] = sums[t()][r()] + product;
      });
    });
  }
  add_sums<kTokens, kRows, float>(sums, lanes, lanes_stride);
}

template <int kRows, class M>
constexpr int tokens_at_once = kRows == 1 || (kRows > kTileRows && !takes_most_weight_rows<M>(kTileTokens<M>))
                                   ? 1
                                   : kTileTokens<M>;

// Either of these, for any number of tokens up to a tile, with as many rows at a time as there are registers for.
// Rows that are left over take one token at a time.
template <int kRows, class C, class W, int kTokens = tokens_at_once<kRows, typename MatrixOf<W>::type>>
void multiply_tile(int tokens, bool in_digits, const W& w, const Stretch& at, int64_t begin, int64_t count, const C* x,
                   int64_t stride, Register<C>* lanes, int lanes_stride) {
  if (tokens == kTokens) {
    if constexpr (std::is_same<C, float>::value && Digits<typename MatrixOf<W>::type>::possible) {
      if (in_digits)
        return multiply_digits<kRows, kTokens>(w, at, begin, count, x, stride, lanes, lanes_stride);
    }
    constexpr int at_once = rows_of_tile(kRows, kTokens);
    for (int r = 0; r < kRows; r += at_once) {
      const Stretch part{at.row + r * at.apart, at.next + r * at.apart, at.begin, at.end, at.apart};
      multiply<at_once, kTokens>(w, part, begin, count, x, stride, lanes + r, lanes_stride);
    }
    return;
  }
  if constexpr (kTokens > 1) {
    multiply_tile<kRows, C, W, kTokens - 1>(tokens, in_digits, w, at, begin, count, x, stride, lanes, lanes_stride);
  } else {
    for (int t = 0; t < tokens; ++t)
      multiply_tile<kRows>(1, in_digits, w, at, begin, count, x + t * stride, stride, lanes + t * lanes_stride,
                           lanes_stride);
  }
}

// Whether f(part) holds for all matrices of stacked weights.
template <class W, class F>
bool all_parts(const W& w, const F& f) {
  if constexpr (is_stacked<W>::value) return !w.any([&](const auto& part) { return !all_parts(part, f); });
  else if constexpr (is_shifted<W>::value || is_paired<W>::value) return all_parts(w.source(), f);
  else return f(w);
}

// ---- the product ---------------------------------------------------------------------------------------------------

template <class X, class W, class Out>
class Gemv {
 public:
  // For tokens [first, first + shape.m).
  Gemv(const X& x, const W& w, const Out& out, const MatmulShape& shape, int64_t first)
      : x_(x), w_(w), results_(out, shape.n), n_(shape.n), k_(shape.k), first_(first), tokens_(int(shape.m)) {
    for (int t = 0; t < tokens_; ++t) {
      states_[t] = row_state(x, first + t, k_);
      write_state(x, states_[t], first + t, k_);
    }
    digits_ = tokens_ <= kTileTokens<W>;
    each_matrix(w, [this](const auto& matrix, int) {
      digits_ &= all_parts(matrix, [](const auto& part) { return in_units<C>(part) && in_digits(part); });
    });
  }

  void run(const Team& all) const {
    const Team team = all.for_work(double(n_) * double(k_), double(n_) * double(k_) * tokens_);
    const int64_t packs = (n_ + kWidestPack - 1) / kWidestPack;
    parallel_shares(team, packs, [&](int64_t begin, int64_t end) {
      rows(begin * kWidestPack, lesser(n_, end * kWidestPack));
    });
  }

 private:
  using C = product_type<X, W>;
  static constexpr int matrices = is_gated<W>::value ? 2 : 1;
  // The columns of a stretch, and how many of them have inputs as digits.
  struct Columns {
    int64_t begin, count, in_digits;
  };
  static constexpr int64_t input_values = kInputBytes / sizeof(C), sum_values = kSumBytes / sizeof(C);

  // Computes the results of rows [first, last) of the weights, on one thread.
  void rows(int64_t first, int64_t last) const {
    alignas(64) C x[input_values + kMostTokens * (kPadding + kRowGap)];
    alignas(64) C sums[matrices][sum_values];
    const int64_t stretch = input_values / tokens_ / kDigitCols * kDigitCols;
    const int64_t block = sum_values / tokens_ / kWidestPack * kWidestPack;
    int64_t in_digits = 0;
    for (int64_t row = first; row < last; row += block) {
      const int64_t end = lesser(last, row + block), count = end - row;
      for (auto& matrix : sums) fill(matrix, tokens_ * count, C(0));
      for (int64_t begin = 0; begin < k_; begin += stretch) {
        const int64_t cols = lesser(stretch, k_ - begin),
                      stride = (cols + kPadding - 1) / kPadding * kPadding + kRowGap;
        const bool others = row == first || stretch < k_;
        each_matrix(w_, [&](const auto& matrix, int number) {
          if (others && number == 0) {
            read_inputs(begin, cols, x, stride);
            in_digits = prepare_inputs<std::decay_t<decltype(matrix)>>(cols, x, stride);
          }
          multiply_rows(matrix, row, end, {begin, cols, in_digits}, x, stride, sums[number]);
        });
      }
      for (int t = 0; t < tokens_; ++t)
        results_.write(first_ + t, row, end, sums[0] + t * count, sums[matrices - 1] + t * count);
    }
  }

  void read_inputs(int64_t begin, int64_t cols, C* x, int64_t stride) const {
    for (int t = 0; t < tokens_; ++t, x += stride) {
      read_row(with_state(x_, states_[t], k_), first_ + t, begin, cols, x);
      for (int64_t col = cols; col % kPadding != 0; ++col) x[col] = C(0);
    }
  }
  // Brings inputs into the order, and into digits, that a matrix of type M expects; returns the number of columns in
  // digits. It is 0 if any input is not finite, as that would spoil the scale of its block.
  template <class M>
  int64_t prepare_inputs(int64_t cols, C* x, int64_t stride) const {
    int64_t in_blocks = 0;
    if constexpr (std::is_same<C, float>::value && Digits<M>::possible) {
      if (digits_) {
        in_blocks = cols / Digits<M>::cols * Digits<M>::cols;
        for (int t = 0; t < tokens_; ++t) {
          if (!finite_numbers(x + t * stride, in_blocks)) in_blocks = 0;
        }
        for (int t = 0; t < tokens_; ++t) {
          for (int64_t col = 0; col < in_blocks; col += Digits<M>::cols) Digits<M>::put(x + t * stride + col);
        }
      }
    }
    if constexpr (Unit<C, M>::in_planes) {
      for (int t = 0; t < tokens_; ++t) put_in_planes<Unit<C, M>>(x + t * stride + in_blocks, cols - in_blocks, false);
    }
    return in_blocks;
  }

  // sums[t * (last - first) + n - first] += the products of a stretch of input t and weight row n.
  template <class M>
  void multiply_rows(const M& w, int64_t first, int64_t last, const Columns& columns, const C* x, int64_t stride,
                     C* sums) const {
    int64_t row = first;
    while (row < last) {
      // `apart` times `rows` rows, so that none is left out.
      const auto group = [&](auto rows, int64_t apart) {
        const int64_t reach = (rows() - 1) * apart;  // from the first to the last
        for (int64_t i = 0; i < apart; ++i, ++row) {
          in_matrix(w, row, [&](const auto& matrix, int64_t at) {
            const int64_t further = i + 1 < apart ? 1 : reach + 1,
                          next = row + further + reach < last ? at + further : at;
            multiply_group<rows()>(matrix, {at, next, columns.begin, columns.begin + columns.count, apart},
                                   columns.in_digits, x, stride, sums + (row - first), last - first);
          });
        }
        row += reach;
      };
      const auto has = [&](int64_t rows) { return row + rows <= last && in_one_matrix(w, row, row + rows - 1); };
      static_assert(kMostWeightRows == kDecodedRows, "both have the same body");
      if (takes_most_weight_rows<M>(tokens_) && has(kMostWeightRows)) {
        const int64_t apart = tokens_ == 1 ? rows_in_page(w, row) : 1;
        group(Width<kMostWeightRows>{}, has(kMostWeightRows * apart) ? apart : 1);
      } else if (has(kTileRows)) {
        group(Width<kTileRows>{}, 1);
      } else {
        group(Width<1>{}, 1);
      }
    }
  }
  // The rows in a page, for weights of less than 32 bits, from `row` on; a partial row counts.
  template <class M>
  static int64_t rows_in_page(const M& w, int64_t row) {
    int64_t rows = 1;
    in_matrix(w, row, [&](const auto& matrix, int64_t at) {
      using Of = MatrixOf<std::decay_t<decltype(matrix)>>;
      using In = Addressable<typename Of::type>;
      if constexpr (In::bits > 0 && In::bits < 32) {
        const int64_t bytes = In::of(Of::of(matrix), Of::row(matrix, at + 1), 0) -
                              In::of(Of::of(matrix), Of::row(matrix, at), 0);
        if (bytes > 0) rows = (kPageBytes + bytes - 1) / bytes;
      }
    });
    return rows;
  }
  template <int kRows, class M>
  void multiply_group(const M& w, const Stretch& at, int64_t in_digits, const C* x, int64_t stride, C* sums,
                      int64_t sums_stride) const {
    using Of = MatrixOf<M>;
    using Matrix = typename Of::type;
    constexpr int64_t decoded_stride = kDecodedCols + kRowGap;
    alignas(64) C decoded[kRows * decoded_stride];
    Register<C> lanes[kMostTokens * kRows];
    fill(lanes, tokens_ * kRows, Register<C>{});
    int64_t col = at.begin;
    if constexpr (kRows <= kTileRows || kMostWeightRows == kRows) {
      const auto multiply_up_to = [&](int64_t end, bool digits) {
        while (col < end) {
          // The inputs of a run stay in the first-level cache while the rows take turns.
          const int64_t run = tokens_ > 1 && takes_most_weight_rows<Matrix>(tokens_) ? kRunCols / 2 : kRunCols;
          const int64_t count = lesser(run, end - col);
          for (int t = 0; t < tokens_; t += kTileTokens<Matrix>) {
            multiply_tile<kRows>(lesser(kTileTokens<Matrix>, tokens_ - t), digits, w, at, col, count,
                                 x + t * stride + (col - at.begin), stride, lanes + t * kRows, kRows);
          }
          col += count;
        }
      };
      multiply_up_to(at.begin + in_digits, true);
      constexpr int unit = Unit<C, Matrix>::cols;
      if (tokens_ <= kMostInRegisters<Matrix> && in_units<C>(Of::of(w)))
        multiply_up_to(at.end - (at.end - col) % unit, false);
    }
    for (; col < at.end; col += kDecodedCols) {
      const int64_t count = lesser(kDecodedCols, at.end - col), padded = (count + kPadding - 1) / kPadding * kPadding;
      const int64_t from = col + count < at.end ? col + count : at.begin,
                    first = col + count < at.end ? at.row : at.next;
      const auto multiply_all = [&](const auto& weights, int64_t row, int64_t begin) {
        constexpr int most = kTileTokens<DirectLoad<C>>;
        for (int t = 0; t < tokens_; t += most) {
          const C* const inputs = x + t * stride + (col - at.begin);
          const auto tile = [&](auto rows, int r) {
            multiply_tile<rows()>(lesser(most, tokens_ - t), false, weights, {row + r, row + r, begin, begin + padded},
                                  begin, padded, inputs, stride, lanes + t * kRows + r, kRows);
          };
          for (int r = 0; r < kRows; r += lesser(kRows, kTileRows))
            tile(Width<(kRows < kTileRows ? kRows : kTileRows)>{}, r);
        }
      };
      if constexpr (std::is_same<M, DirectLoad<C>>::value) {
        // There is nothing to decode. Only the first tile of inputs reads the weights from memory, the others from the
        // cache.
        if (padded == count) {
          multiply_all(w, at.row, col);
          continue;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        decode(Of::of(w), Of::row(w, at.row + r * at.apart), col, count, decoded + r * decoded_stride);
        prefetch(Of::of(w), Of::row(w, first + r * at.apart), from, lesser(from + kDecodedCols, at.end));
      }
      multiply_all(DirectLoad<C>(decoded, decoded_stride), 0, 0);
    }
    for (int t = 0; t < tokens_; ++t) {
      // sums_of() adds lanes in the same order for half as many registers as lanes and for as many. So fewer rows are
      // filled up with zeros, and more are summed in several turns: a row's bits do not depend on the rows beside it.
      constexpr int most = kLanes<C>, fewest = most / 2, each = kRows < fewest ? fewest : kRows < most ? kRows : most;
      for (int r = 0; r < kRows; r += each) {
        Register<C> of_rows[each] = {};
        for (int i = 0; i < lesser(each, kRows - r); ++i) of_rows[i] = lanes[t * kRows + r + i];
        const Pack<C, each> all = sums_of<C>(of_rows);
        for (int i = 0; i < lesser(each, kRows - r); ++i) sums[t * sums_stride + (r + i) * at.apart] += all.v[i];
      }
    }
  }

  const X& x_;
  const W& w_;
  Results<C, W, Out> results_;
  int64_t n_, k_, first_;
  int tokens_;
  bool digits_;  // whether weights can be multiplied with inputs as digits
  decltype(row_state(std::declval<const X&>(), 0, 0)) states_[kMostTokens];
};

// Arguments are checked by the caller; M is at most kMostTokens.
template <class X, class W, class Out>
Status gemv(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape, int64_t first = 0) {
  Gemv<X, W, Out>(x, w, out, shape, first).run(cx.team());
  return {};
}

// Weights that depend on the token: one token after the other.
template <class X, class W, class Out>
Status gemv_by_token(const cpu::Exec& cx, const X& x, const W& w, const Out& out, const MatmulShape& shape) {
  for (int64_t token = 0; token < shape.m; ++token) {
    KERNELS_TRY(gemv(cx, x, for_token(w, token), out, {1, shape.n, shape.k}, token));
  }
  return {};
}

}  // namespace host
}  // namespace detail
KERNELS_END
