// Results of attention for sm_90a on their way to the sink.
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

// Results in shared memory: rounded to what a sink of 16 bits stores, if it does nothing else, or floats. H200, 16
// heads of 128 columns, 512 keys: 140 us, with floats, and with where rows go found only after the last product, 146.
template <class P>
using slab_type = std::conditional_t<!P::kSplits && is_16_bit<typename Traits<typename P::Out>::Stored>,
                                     typename Traits<typename P::Out>::Stored, float>;

// A warp's 16 rows of kAtOnce columns in shared memory, 128 bytes of each in a run of kRunBytes for 64 rows.
template <class T, int kAtOnce, int kRunBytes>
struct ResultSlab {
  static constexpr bool kFloats = sizeof(T) == 4;
  static constexpr int kPack = 16 / int(sizeof(T));
  // How many lanes read a row, 8 columns at a time, and how many rows apart those of a lane are.
  static constexpr int kLanes = kFloats ? kAtOnce / 8 : 4, kApart = 32 / kLanes;
  unsigned char* memory;

  // Columns of a row, kPack of them: neither pairs that are written nor packs that are read have bank conflicts.
  __device__ __forceinline__ unsigned char* place(int row, int col) const {
    const int turned = kFloats ? row % 4 * 2 | row % 2 : row % 2 * 4 | row / 2 % 4;
    return memory + col / (8 * kPack) * kRunBytes + row * 128 + (col / kPack % 8 ^ turned) * 16;
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
        const float first = from[half * 2] * factor[half], second = from[half * 2 + 1] * factor[half];
        const int row = half * 8 + lane / 4;
        if constexpr (kFloats)
          *reinterpret_cast<::float2*>(place(row, j * 8 + lane % 4 / 2 * 4) + lane % 2 * 8) = {first, second};
        else *reinterpret_cast<uint32_t*>(place(row, j * 8) + lane % 4 * 4) = rounded_pair<T>(first, second);
      }
    }
  }
  __device__ __forceinline__ Pack<T, 8> eight(int row, int col) const {
    Pack<T, 8> values;
    KERNELS_UNROLL
    for (int i = 0; i < 8; i += kPack) memcpy(values.v + i, __builtin_assume_aligned(place(row, col + i), 16), 16);
    return values;
  }
  // What a part of the keys gives goes to the workspace, to columns of a head from `first` on: lanes side by side write
  // whole lines.
  template <class P>
  __device__ __forceinline__ void leave_part(const P& p, const PrefillRows& rows, int first_row, int first) const {
    static_assert(kFloats, "parts are not rounded");
    constexpr int kOfRow = kAtOnce / 4;
    const int lane = threadIdx.x % 32, col = lane % kOfRow * 4;
    if (first + col >= int(p.shape.value_dim())) return;
    for (int row = lane / kOfRow; row < 16 && first_row + row < rows.count; row += 32 / kOfRow)
      leave_outputs(p, rows, first_row + row, floats_at<4>(reinterpret_cast<const float*>(place(row, col))),
                    first + col);
  }
};

// Where a warp's 16 rows of results go, from `first_row` on of the block's: kCols columns of a head, from `first_col`
// on. They go by way of shared memory that all products have read, which has room for so many floats of a row.
template <int kCols, int kRoom, int kRunBytes, class P>
class ResultRows {
  using T = slab_type<P>;
  static constexpr int kAtOnce = kRoom * 4 / int(sizeof(T));
  using Slab = ResultSlab<T, kAtOnce, kRunBytes>;
  static constexpr int kLanes = Slab::kLanes, kApart = Slab::kApart, kEach = 16 / kApart, kPacks = kAtOnce / 8 / kLanes;

 public:
  __device__ __forceinline__ ResultRows(const P& p, const PrefillRows& rows, int first_row, int first_col)
      : first_row_(first_row), first_col_(first_col) {
    if (kFindsAhead) find(p, rows);
  }

  // Outputs in the fragments of mma, each half of them times a factor.
  __device__ __forceinline__ void put(const P& p, const PrefillRows& rows, const float (&outputs)[kCols / 8][4],
                                      const float (&factor)[2], unsigned char* memory) {
    if (!kFindsAhead) find(p, rows);
    const Slab slab{memory + first_row_ % 64 * 128};
    const bool splits = leaves_part<P>(rows), wide = !splits && p.out_pack == 8 && first_row_ + 16 <= rows.count;
    const int cols = int(p.shape.value_dim()) - first_col_;
    const auto map = sink_map(p.out);
    const auto& end = sink_end(p.out);
#pragma unroll 1
    for (int first = 0; first < kCols; first += kAtOnce) {
      __syncwarp();
      leave(slab, outputs, factor, first);
      __syncwarp();
      if (splits) {
        if constexpr (P::kSplits) slab.leave_part(p, rows, first_row_, first_col_ + first);
      } else if (wide) {
        // All are read before one is written, so that one wait for shared memory serves all.
        Pack<T, 8> values[kEach][kPacks];
        KERNELS_UNROLL
        for (int i = 0; i < kEach; ++i) {
          KERNELS_UNROLL
          for (int k = 0; k < kPacks; ++k) values[i][k] = slab.eight(slab_row(i), col_of(k));
        }
        KERNELS_UNROLL
        for (int i = 0; i < kEach; ++i) {
          KERNELS_UNROLL
          for (int k = 0; k < kPacks; ++k) {
            const int col = first + col_of(k);
            if (col < cols) put_mapped(end, map, values[i][k], to_[i], head_col_[i] + col);
          }
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < kEach && row_of(i) < rows.count; ++i) {
          const auto at = rows.place(row_of(i));
#pragma unroll 1
          for (int k = 0; k < kPacks && first + col_of(k) < cols; ++k)
            in_packs(p.out_pack, slab.eight(slab_row(i), col_of(k)),
                     int64_t(at.head) * p.shape.value_dim() + first_col_ + first + col_of(k),
                     [&](const auto& some, int64_t from) { put_mapped(end, map, some, rows.token + at.query, from); });
        }
      }
    }
  }

 private:
  // Where floats go is found behind the last product: they take more rows of a lane, for which it leaves no registers.
  static constexpr bool kFindsAhead = sizeof(T) == 2;
  __device__ __forceinline__ void find(const P& p, const PrefillRows& rows) {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const auto at = rows.place(row_of(i));
      to_[i] = rows.token + at.query, head_col_[i] = int64_t(at.head) * p.shape.value_dim() + first_col_;
    }
  }

  // A lane's rows and columns.
  static __device__ __forceinline__ int slab_row(int i) { return int(threadIdx.x % 32) / kLanes + i * kApart; }
  static __device__ __forceinline__ int col_of(int k) { return (k * kLanes + int(threadIdx.x % 32) % kLanes) * 8; }
  __device__ __forceinline__ int row_of(int i) const { return first_row_ + slab_row(i); }

  static __device__ __forceinline__ void leave(const Slab& slab, const float (&outputs)[kCols / 8][4],
                                               const float (&factor)[2], int first) {
    if (kCols == kAtOnce || first == 0)
      slab.template leave<0>(outputs, factor);
    else if (kCols == 2 * kAtOnce || first == kAtOnce)
      slab.template leave<kAtOnce>(outputs, factor);
    else if (first == 2 * kAtOnce)
      slab.template leave<2 * kAtOnce>(outputs, factor);
    else
      slab.template leave<3 * kAtOnce>(outputs, factor);
  }

  int first_row_, first_col_;
  int64_t to_[kEach], head_col_[kEach];  // of whole rows, in the widest packs
};

}  // namespace detail
KERNELS_END
