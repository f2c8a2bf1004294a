// What makes each pack of a matrix on its own. F has
//
//   fetch<N>(row, col)               all that it reads for a pack
//   finish<N>(fetched, row, col)     the rest
//   takes_rest                       whether columns of a single row may be left that fill no pack
//
// and a thread asks for several packs before it finishes the first.
#pragma once

#include "../core/divisor.h"
#include "../exec.cuh"
#include "../tuning/elementwise.h"

KERNELS_BEGIN
namespace detail {

// Most numbers are small, and dividing those takes a fraction of the time.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

template <class F, int N>
using FetchedBy = decltype(std::declval<const F&>().template fetch<N>(kAny, kAny));

template <class F, int N, int kBytes = tuning::kBytesInFlight>
struct PointwiseBody {
  using Fetched = FetchedBy<F, N>;
  static constexpr int wanted = std::is_same<Fetched, Nothing>::value ? 1 : kBytes / int(sizeof(Fetched)), most = wanted < 1 ? 1 : wanted < 4 ? wanted : 4;
  static constexpr int max_threads = 256, registers = 128;
  struct Params {
    F f;
    Divisor in_rows;  // by row_packs
    int64_t row_packs, packs;
    int each;  // packs that a thread takes at a time, `most` at most
    int rest;  // columns behind the packs, where there is one row
  };

  static __device__ __forceinline__ void run(const Params& p) {
    const int64_t tile = max_threads * p.each, all = gridDim.x * tile;
    for (int64_t first = blockIdx.x * tile; first < p.packs; first += all) {
      // A tile's packs lie side by side, in a row or in several.
      const int64_t first_row = first >> 31 == 0 ? int64_t(p.in_rows.quotient(uint32_t(first))) : first / p.row_packs;
      const int64_t begin = first - first_row * p.row_packs;
      const int count = int(lesser(tile, p.packs - first));
      const auto visit = [&](int k, const auto& f) {
        const int at = k * max_threads + int(threadIdx.x);
        if (at >= count) return;
        const uint32_t rows = p.in_rows.quotient(uint32_t(begin) + at);
        f(first_row + rows, (begin + (at - int(rows * uint32_t(p.row_packs)))) * N);
      };
      Fetched fetched[most];
      KERNELS_UNROLL
      for (int k = 0; k < most; ++k) visit(k, [&](int64_t row, int64_t col) { fetched[k] = p.f.template fetch<N>(row, col); });
      KERNELS_UNROLL
      for (int k = 0; k < most; ++k) visit(k, [&](int64_t row, int64_t col) { p.f.template finish<N>(fetched[k], row, col); });
    }
    if constexpr (N > 1 && F::takes_rest) {
      if (blockIdx.x == 0 && int(threadIdx.x) < p.rest) {
        const int64_t col = p.packs * N + threadIdx.x;
        p.f.template finish<1>(p.f.template fetch<1>(0, col), 0, col);
      }
    }
  }
};

// In packs of kWide, of kMiddle or of single elements: the widest that `pack` allows and that divide the columns. Of a single row
// the columns that are left come one by one.
template <int kWide, int kMiddle = 1, int kBytes = tuning::kBytesInFlight, class F>
Status each_pack(const Exec& ex, const F& f, int64_t rows, int64_t cols, int pack) {
  const auto start = [&](auto width) {
    constexpr int N = decltype(width)::value;
    using Body = PointwiseBody<F, N, kBytes>;
    const int64_t row_packs = cols / N, packs = rows * row_packs;
    const auto blocks = [&](int each) { return (packs + Body::max_threads * each - 1) / (Body::max_threads * each); };
    const bool several = rows > 1;  // or else there is no end that a pack comes to
    typename Body::Params params{f, several ? Divisor(uint32_t(row_packs)) : Divisor(), several ? row_packs : int64_t(1) << 62, packs, Body::most,
                                 int(cols - row_packs * N)};
    while (params.each > 1 && blocks(params.each) < int64_t(tuning::kBlocksEach) * ex.device().sm_count) params.each /= 2;
    Launch how;
    how.threads = Body::max_threads;
    how.grid.x = unsigned(greater<int64_t>(1, lesser<int64_t>(blocks(params.each), int64_t(1) << 30)));
    return launch<Body>(ex, how, params);
  };
  const auto fits = [&](int width) { return pack >= width && (cols % width == 0 || (F::takes_rest && rows == 1)); };
  if (fits(kWide)) return start(std::integral_constant<int, kWide>());
  if constexpr (kMiddle > 1 && kMiddle < kWide) {
    if (fits(kMiddle)) return start(std::integral_constant<int, kMiddle>());
  }
  return start(std::integral_constant<int, 1>());
}

}  // namespace detail
KERNELS_END
