// The kernel for operations that treat each pack of a matrix independently.
//
//   packs of all rows, one row after the other:  | block 0 | block 1 | ...    a thread has a few packs, a block apart,
//                                                                             and fetches all before it finishes one
//
// F has
//
//   fetch<N>(row, col)               everything that it reads for a pack
//   finish<N>(fetched, row, col)     the rest
//   takes_rest                       whether the last columns of a single row may be fewer than a pack
#pragma once

#include "../core/divisor.h"
#include "../exec.cuh"
#include "../tuning/elementwise.h"

KERNELS_BEGIN
namespace detail {

// Usually both numbers fit 32 bits, and dividing those takes a fraction of the time.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

// Units that are adjacent in rows, processed in tiles.
struct Tiles {
  Divisor in_rows;  // by row_units
  int64_t row_units, units;

  Tiles(int64_t rows, int64_t in_row) : units(rows * in_row) {
    // A single row has no end that a unit could cross.
    if (rows > 1) in_rows = Divisor(uint32_t(in_row)), row_units = in_row;
    else row_units = int64_t(1) << 62;
  }

  struct Tile {
    int64_t row, begin;  // of the first unit
    int count;
  };
  // The tile of at most `most` units from unit `first` on.
  __device__ __forceinline__ Tile tile(int64_t first, int64_t most) const {
    const int64_t row = first >> 31 == 0 ? int64_t(in_rows.quotient(uint32_t(first))) : first / row_units;
    return {row, first - row * row_units, int(lesser(most, units - first))};
  }
  // Calls f(row, index in the row) for unit `at` of a tile.
  template <class F>
  __device__ __forceinline__ auto place(const Tile& tile, int at, const F& f) const {
    const uint32_t rows = in_rows.quotient(uint32_t(tile.begin) + at);
    return f(tile.row + rows, tile.begin + (at - int(rows * uint32_t(row_units))));
  }
};

template <class F, int N>
using FetchedBy = decltype(std::declval<const F&>().template fetch<N>(kAny, kAny));

template <class F, int N, int kBytes = tuning::kBytesInFlight>
struct PointwiseBody {
  using Fetched = FetchedBy<F, N>;
  static constexpr int wanted = std::is_same<Fetched, Nothing>::value ? 1 : kBytes / int(sizeof(Fetched)),
                       most = wanted < 1   ? 1
                              : wanted < 4 ? wanted
                                           : 4;
  static constexpr int max_threads = 256, registers = 128;
  struct Params {
    F f;
    Tiles packs;
    int each;  // packs that a thread takes at a time, at most `most`
    int rest;  // columns after the last pack, if there is one row
  };

  static __device__ __forceinline__ void run(const Params& p) {
    const int64_t size = max_threads * p.each;
    for (int64_t first = blockIdx.x * size; first < p.packs.units; first += gridDim.x * size) {
      const Tiles::Tile tile = p.packs.tile(first, size);
      const auto visit = [&](int k, const auto& f) {
        const int at = k * max_threads + int(threadIdx.x);
        if (at < tile.count) p.packs.place(tile, at, [&](int64_t row, int64_t pack) { f(row, pack * N); });
      };
      Fetched fetched[most];
      KERNELS_UNROLL
      for (int k = 0; k < most; ++k)
        visit(k, [&](int64_t row, int64_t col) { fetched[k] = p.f.template fetch<N>(row, col); });
      KERNELS_UNROLL
      for (int k = 0; k < most; ++k)
        visit(k, [&](int64_t row, int64_t col) { p.f.template finish<N>(fetched[k], row, col); });
    }
    if constexpr (N > 1 && F::takes_rest) {
      if (blockIdx.x == 0 && int(threadIdx.x) < p.rest) {
        const int64_t col = p.packs.units * N + threadIdx.x;
        p.f.template finish<1>(p.f.template fetch<1>(0, col), 0, col);
      }
    }
  }
};

// Calls start(N) with the first of kWide, kMiddle and 1 that fits.
template <int kWide, int kMiddle, class Fits, class Start>
Status with_widest(const Fits& fits, const Start& start) {
  if (fits(kWide)) return start(std::integral_constant<int, kWide>());
  if constexpr (kMiddle > 1 && kMiddle < kWide) {
    if (fits(kMiddle)) return start(std::integral_constant<int, kMiddle>());
  }
  return start(std::integral_constant<int, 1>());
}

// In packs of N; the remaining columns of a single row one by one.
template <int N, int kBytes = tuning::kBytesInFlight, class F>
Status start_packs(const Exec& ex, const F& f, int64_t rows, int64_t cols) {
  using Body = PointwiseBody<F, N, kBytes>;
  const int64_t row_packs = cols / N, packs = rows * row_packs;
  const auto blocks = [&](int each) { return (packs + Body::max_threads * each - 1) / (Body::max_threads * each); };
  typename Body::Params params{f, Tiles(rows, row_packs), Body::most, int(cols - row_packs * N)};
  while (params.each > 1 && blocks(params.each) < int64_t(tuning::kBlocksEach) * ex.device().sm_count) params.each /= 2;
  Launch how;
  how.threads = Body::max_threads;
  how.grid.x = unsigned(greater<int64_t>(1, lesser<int64_t>(blocks(params.each), int64_t(1) << 30)));
  return launch<Body>(ex, how, params);
}
// In packs of kWide, of kMiddle or of single elements: the widest that `pack` allows and that divides the columns.
template <int kWide, int kMiddle = 1, int kBytes = tuning::kBytesInFlight, class F>
Status each_pack(const Exec& ex, const F& f, int64_t rows, int64_t cols, int pack) {
  const auto fits = [&](int width) { return pack >= width && (cols % width == 0 || (F::takes_rest && rows == 1)); };
  return with_widest<kWide, kMiddle>(fits, [&](auto width) { return start_packs<width(), kBytes>(ex, f, rows, cols); });
}

}  // namespace detail
KERNELS_END
