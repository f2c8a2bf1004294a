// Results of attention for sm_90a on their way to the sink.
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

// Of a warp's 16 rows, from `first_row` on of the block's, outputs in the fragments of mma, each half of these times
// inverse_of(rows, half): kCols columns of a head, from `first_col` on. They go by way of shared memory that all
// products have read, kAtOnce columns at a time, as floats, 32 of them in each run of kRunBytes for 64 rows.
template <int kCols, int kAtOnce, int kRunBytes, class P, class Inverse>
__device__ __forceinline__ void put_results(const P& p, PrefillRows rows, int first_row,
                                            const float (&outputs)[kCols / 8][4], const Inverse& inverse_of,
                                            unsigned char* memory, int first_col) {
  const int lane = threadIdx.x % 32, cols = int(p.shape.value_dim());
  const auto map = sink_map(p.out);
  const auto& end = sink_end(p.out);
  unsigned char* const slab = memory + first_row % 64 * 128;
  // Four columns of a row of the slab: neither pairs that are written nor packs that are read have bank conflicts.
  const auto place = [&](int row, int col) {
    return slab + col / 32 * kRunBytes + row * 128 + (col / 4 % 8 ^ (row % 4 * 2 | row % 2)) * 16;
  };
  const float inverse[2] = {inverse_of(rows, 0), inverse_of(rows, 1)};
  const auto leave = [&](auto first) {
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      KERNELS_UNROLL
      for (int j = 0; j < kAtOnce / 8; ++j) {
        const float(&from)[4] = outputs[decltype(first)::value / 8 + j];
        *reinterpret_cast<::float2*>(place(half * 8 + lane / 4, j * 8 + lane % 4 / 2 * 4) + lane % 2 * 8) = {
            from[half * 2] * inverse[half], from[half * 2 + 1] * inverse[half]};
      }
    }
  };
  // A lane has the same 8 columns of some rows.
  constexpr int kPacks = kAtOnce / 8, kApart = 32 / kPacks, kEach = 16 / kApart;
  const int col = lane % kPacks * 8;
  int64_t to[kEach], head_col[kEach];
  KERNELS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const auto at = rows.place(first_row + lane / kPacks + i * kApart);
    to[i] = rows.token + at.query, head_col[i] = int64_t(at.head) * cols + first_col;
  }
  const auto values_of = [&](int i) {
    const int row = lane / kPacks + i * kApart;
    Pack<float, 8> values;
    memcpy(values.v, __builtin_assume_aligned(place(row, col), 16), 16);
    memcpy(values.v + 4, __builtin_assume_aligned(place(row, col + 4), 16), 16);
    return values;
  };
  // What a part of the keys gives goes to the workspace: lanes side by side write whole lines.
  const auto leave_part = [&](int first) {
    constexpr int kLanes = kAtOnce / 4;
    const int col4 = lane % kLanes * 4;
    if (first_col + first + col4 >= cols) return;
    for (int row = lane / kLanes; row < 16 && first_row + row < rows.count; row += 32 / kLanes)
      leave_outputs(p, rows, first_row + row, floats_at<4>(reinterpret_cast<const float*>(place(row, col4))),
                    first_col + first + col4);
  };
  const bool splits = leaves_part<P>(rows), wide = !splits && p.out_pack == 8 && first_row + 16 <= rows.count;
#pragma unroll 1
  for (int first = 0; first < kCols; first += kAtOnce) {
    __syncwarp();
    if (first == 0)
      leave(std::integral_constant<int, 0>{});
    else if (kCols == 2 * kAtOnce || first == kAtOnce)
      leave(std::integral_constant<int, kAtOnce>{});
    else if (first == 2 * kAtOnce)
      leave(std::integral_constant<int, (kCols > 2 * kAtOnce ? 2 * kAtOnce : 0)>{});
    else
      leave(std::integral_constant<int, (kCols > 3 * kAtOnce ? 3 * kAtOnce : 0)>{});
    __syncwarp();
    if (splits) leave_part(first);
    if (splits || first_col + first + col >= cols) continue;
    const auto put_some = [&](int64_t row, const auto& some, int64_t at) {
      constexpr int N = std::decay_t<decltype(some)>::size;
      put(end, apply_map(map, some, fetch_operands<N>(map, row, at), row, at), row, at);
    };
    if (wide) {
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i) put_some(to[i], values_of(i), head_col[i] + first + col);
    } else {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const int row = first_row + lane / kPacks + i * kApart;
        if (row >= rows.count) break;
        const auto at = rows.place(row);
        in_packs(p.out_pack, values_of(i), int64_t(at.head) * cols + first_col + first + col,
                 [&](const auto& some, int64_t from) { put_some(rows.token + at.query, some, from); });
      }
    }
  }
}

}  // namespace detail
KERNELS_END
