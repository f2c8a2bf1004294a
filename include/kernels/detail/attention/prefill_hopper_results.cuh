// Results of attention for sm_90a on their way to the sink.
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

// A warp's 16 rows of kAtOnce columns in shared memory, as floats, 32 of them in each run of kRunBytes for 64 rows.
template <int kAtOnce, int kRunBytes>
struct ResultSlab {
  unsigned char* memory;

  // Four columns of a row: neither pairs that are written nor packs that are read have bank conflicts.
  __device__ __forceinline__ unsigned char* place(int row, int col) const {
    return memory + col / 32 * kRunBytes + row * 128 + (col / 4 % 8 ^ (row % 4 * 2 | row % 2)) * 16;
  }
  // Outputs of these columns, in the fragments of mma, each half of them times a factor.
  template <int kFirst, int kTiles>
  __device__ __forceinline__ void leave(const float (&outputs)[kTiles][4], const float (&factor)[2]) const {
    const int lane = threadIdx.x % 32;
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      KERNELS_UNROLL
      for (int j = 0; j < kAtOnce / 8; ++j) {
        const float(&from)[4] = outputs[(kFirst < kTiles * 8 ? kFirst : 0) / 8 + j];
        *reinterpret_cast<::float2*>(place(half * 8 + lane / 4, j * 8 + lane % 4 / 2 * 4) + lane % 2 * 8) = {
            from[half * 2] * factor[half], from[half * 2 + 1] * factor[half]};
      }
    }
  }
  __device__ __forceinline__ Pack<float, 8> eight(int row, int col) const {
    Pack<float, 8> values;
    memcpy(values.v, __builtin_assume_aligned(place(row, col), 16), 16);
    memcpy(values.v + 4, __builtin_assume_aligned(place(row, col + 4), 16), 16);
    return values;
  }
  // What a part of the keys gives goes to the workspace, to columns of a head from `first` on: lanes side by side write
  // whole lines.
  template <class P>
  __device__ __forceinline__ void leave_part(const P& p, const PrefillRows& rows, int first_row, int first) const {
    constexpr int kLanes = kAtOnce / 4;
    const int lane = threadIdx.x % 32, col = lane % kLanes * 4;
    if (first + col >= int(p.shape.value_dim())) return;
    for (int row = lane / kLanes; row < 16 && first_row + row < rows.count; row += 32 / kLanes)
      leave_outputs(p, rows, first_row + row, floats_at<4>(reinterpret_cast<const float*>(place(row, col))),
                    first + col);
  }
};

// Of a warp's 16 rows, from `first_row` on of the block's, outputs in the fragments of mma, each half of these times
// inverse_of(rows, half): kCols columns of a head, from `first_col` on. They go by way of shared memory that all
// products have read, kAtOnce columns at a time.
template <int kCols, int kAtOnce, int kRunBytes, class P, class Inverse>
__device__ __forceinline__ void put_results(const P& p, PrefillRows rows, int first_row,
                                            const float (&outputs)[kCols / 8][4], const Inverse& inverse_of,
                                            unsigned char* memory, int first_col) {
  const int lane = threadIdx.x % 32, cols = int(p.shape.value_dim());
  const auto map = sink_map(p.out);
  const auto& end = sink_end(p.out);
  const ResultSlab<kAtOnce, kRunBytes> slab{memory + first_row % 64 * 128};
  const float inverse[2] = {inverse_of(rows, 0), inverse_of(rows, 1)};
  // A lane has the same 8 columns of some rows.
  constexpr int kPacks = kAtOnce / 8, kApart = 32 / kPacks, kEach = 16 / kApart;
  const int col = lane % kPacks * 8;
  int64_t to[kEach], head_col[kEach];
  KERNELS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const auto at = rows.place(first_row + lane / kPacks + i * kApart);
    to[i] = rows.token + at.query, head_col[i] = int64_t(at.head) * cols + first_col;
  }
  const auto values_of = [&](int i) { return slab.eight(lane / kPacks + i * kApart, col); };
  const bool splits = leaves_part<P>(rows), wide = !splits && p.out_pack == 8 && first_row + 16 <= rows.count;
#pragma unroll 1
  for (int first = 0; first < kCols; first += kAtOnce) {
    __syncwarp();
    if (first == 0)
      slab.template leave<0>(outputs, inverse);
    else if (kCols == 2 * kAtOnce || first == kAtOnce)
      slab.template leave<kAtOnce>(outputs, inverse);
    else if (first == 2 * kAtOnce)
      slab.template leave<2 * kAtOnce>(outputs, inverse);
    else
      slab.template leave<3 * kAtOnce>(outputs, inverse);
    __syncwarp();
    if (splits) slab.leave_part(p, rows, first_row, first_col + first);
    if (splits || first_col + first + col >= cols) continue;
    if (wide) {
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i) put_mapped(end, map, values_of(i), to[i], head_col[i] + first + col);
    } else {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const int row = first_row + lane / kPacks + i * kApart;
        if (row >= rows.count) break;
        const auto at = rows.place(row);
        in_packs(p.out_pack, values_of(i), int64_t(at.head) * cols + first_col + first + col,
                 [&](const auto& some, int64_t from) { put_mapped(end, map, some, rows.token + at.query, from); });
      }
    }
  }
}

}  // namespace detail
KERNELS_END
