// Epilogue of the prefill kernels for sm_90a: results go from registers to the sink, or to the workspace as partial
// results.
#pragma once

#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

// The type of results before they go to the sink: its 16-bit type, if it does no more than store that, or float.
template <class P>
using result_type = std::conditional_t<is_16_bit<typename Traits<typename P::Out>::Stored>,
                                       typename Traits<typename P::Out>::Stored, float>;

// Transposes 4 x 4 words among four adjacent lanes: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void transpose_words(uint32_t (&words)[4]) {
  constexpr unsigned all = 0xffffffffu;
  KERNELS_UNROLL
  for (int apart = 1; apart <= 2; ++apart) {
    const bool second = (threadIdx.x & unsigned(apart)) != 0;
    KERNELS_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t &low = words[i * (3 - apart)], &high = words[i * (3 - apart) + apart];
      const uint32_t other = __shfl_xor_sync(all, second ? low : high, apart);
      if (second) low = other;
      else high = other;
    }
  }
}

// Destination of a warp's 16 rows, from first_row of the block on: kCols columns of a head from first_col on. Lanes
// exchange fragments until each has 8 adjacent columns, so that four lanes write 64 bytes of a row.
template <int kCols, class P>
class ResultRows {
  using T = result_type<P>;
  static constexpr int kBlocks = kCols / 32;  // blocks of 32 columns, 8 of them in each lane
  static constexpr int kPack =
      std::is_same<typename Traits<typename P::Out>::Stored, float>::value ? 4 : 8;  // up to 16 bytes

 public:
  __device__ __forceinline__ ResultRows(const P& p, const PrefillRows& rows, int first_row, int first_col)
      : first_row_(first_row), first_col_(first_col + int(threadIdx.x % 4) * 8) {
    KERNELS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto at = rows.query_head(row(half));
      to_[half] = rows.token + at.query, col_[half] = int64_t(at.head) * p.shape.value_dim() + first_col_;
    }
  }

  // Writes outputs (accumulator fragments), multiplied by the factor of their half of the rows.
  __device__ __forceinline__ void put(const P& p, const PrefillRows& rows, const float (&outputs)[kCols / 8][4],
                                      const float (&factor)[2]) const {
    if (is_split<P>(rows)) return store_partials(p, rows, outputs, factor);
    Pack<T, 8> packs[kBlocks][2];
    KERNELS_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) packs[i][half] = gather<T>(outputs, i * 4, half, factor[half]);
    }
    const int cols = int(p.shape.value_dim()) - first_col_;
    const auto map = sink_map(p.out);
    const auto& end = sink_end(p.out);
    if (p.out_pack >= kPack) {
      KERNELS_UNROLL
      for (int i = 0; i < kBlocks * 2; ++i) {
        if (row(i % 2) >= rows.count || i / 2 * 32 >= cols) continue;
        KERNELS_UNROLL
        for (int first = 0; first < 8; first += kPack) {
          Pack<T, kPack> some;
          KERNELS_UNROLL
          for (int x = 0; x < kPack; ++x) some.v[x] = packs[i / 2][i % 2].v[first + x];
          put_mapped(end, map, some, to_[i % 2], col_[i % 2] + i / 2 * 32 + first);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kBlocks * 2; ++i) {
        Pack<T, 8> values = packs[0][0];
        KERNELS_UNROLL
        for (int j = 1; j < kBlocks * 2; ++j) {
          if (i == j) values = packs[j / 2][j % 2];
        }
        const bool second = i % 2 != 0;
        if (row(i % 2) < rows.count && i / 2 * 32 < cols)
          in_packs(p.out_pack, values, (second ? col_[1] : col_[0]) + i / 2 * 32,
                   [&](const auto& some, int64_t from) { put_mapped(end, map, some, second ? to_[1] : to_[0], from); });
      }
    }
  }

 private:
  __device__ __forceinline__ int row(int half) const { return first_row_ + half * 8 + int(threadIdx.x % 32) / 4; }

  // Writes partial results.
  __device__ __forceinline__ void store_partials(const P& p, const PrefillRows& rows,
                                                 const float (&outputs)[kCols / 8][4], const float (&factor)[2]) const {
    const int cols = int(p.shape.value_dim()) - first_col_;
    KERNELS_UNROLL
    for (int i = 0; i < kBlocks * 2; ++i) {
      const Pack<float, 8> some = gather<float>(outputs, i / 2 * 4, i % 2, factor[i % 2]);
      if (row(i % 2) < rows.count && i / 2 * 32 < cols)
        store_partial_outputs(p, rows, row(i % 2), some, first_col_ + i / 2 * 32);
    }
  }

  // The lane's 8 columns of the 32 columns that begin at fragment `first`.
  template <class As>
  static __device__ __forceinline__ Pack<As, 8> gather(const float (&outputs)[kCols / 8][4], int first, int half,
                                                       float factor) {
    Pack<As, 8> values;
    constexpr int kWords = sizeof(As) == 2 ? 1 : 2;  // words of two columns
    KERNELS_UNROLL
    for (int word = 0; word < kWords; ++word) {
      uint32_t words[4];
      KERNELS_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float low = outputs[first + j][half * 2] * factor, high = outputs[first + j][half * 2 + 1] * factor;
        if constexpr (kWords == 1)
          words[j] = rounded_pair<As>(low, high);
        else words[j] = __float_as_uint(word == 0 ? low : high);
      }
      transpose_words(words);
      KERNELS_UNROLL
      for (int j = 0; j < 4; ++j) memcpy(values.v + j * 2 + word, &words[j], 4);  // two of 16 bits, or one of 32
    }
    return values;
  }

  int first_row_, first_col_;
  int64_t to_[2], col_[2];
};

// Writes a warpgroup's partial results, kCols columns of 64 rows: they are staged in shared memory, from where TMA
// stores them row by row. H200, latents: 2 us longer if each lane writes its 8 bytes of many rows, and 4 us longer if
// lanes exchange all columns as above.
template <int kCols>
struct PartialRows {
  // Padded so that the 4 rows that half a warp writes at a time are in different banks.
  static constexpr int kPitch = kCols * 4 + 32;
  static constexpr int kBytes = 64 * kPitch;

  // Called by all threads of a warpgroup; first_row: of the warp. Once all have returned, the tile may be overwritten.
  template <class P>
  static __device__ __forceinline__ void store_partials(const P& p, const PrefillRows& rows, unsigned char* tile,
                                                        int first_row, int first_col,
                                                        const float (&outputs)[kCols / 8][4], const float (&factor)[2],
                                                        int barrier) {
    if constexpr (P::kSplits) {
      const int lane = int(threadIdx.x % 32), thread = int(threadIdx.x % 128);
      unsigned char* const mine = tile + (first_row + lane / 4) * kPitch + lane % 4 * 8;
      arch::named_barrier_sync(barrier, 128);  // others may still read what was there
      KERNELS_UNROLL
      for (int i = 0; i < kCols / 8 * 2; ++i) {
        const int half = i % 2;
        const float* const pair = outputs[i / 2] + half * 2;
        *reinterpret_cast<::float2*>(mine + half * 8 * kPitch + i / 2 * 32) =
            make_float2(pair[0] * factor[half], pair[1] * factor[half]);
      }
      arch::async_proxy_fence();
      arch::named_barrier_sync(barrier, 128);
      if (thread < rows.count && thread < 64)
        arch::store_bytes(
            p.parts.outputs + (int64_t(rows.first_partial_row) + thread) * p.shape.value_dim() + first_col,
            arch::shared_address(tile) + thread * kPitch, kCols * 4);
      arch::stored_boxes_commit();
      arch::stored_boxes_wait();
    }
  }
};

// Stages a warp's 16 rows of results in the tile of its warpgroup, in the layout that TMA expects.
template <class T, int kCols>
__device__ __forceinline__ void stage_results(uint32_t tile, const float (&outputs)[kCols / 8][4],
                                              const float (&factor)[2]) {
  const int lane = int(threadIdx.x % 32), row = int(threadIdx.x / 32 % 4) * 16 + lane % 16;
  KERNELS_UNROLL
  for (int i = 0; i < kCols / 16; ++i) {
    uint32_t words[4];
    KERNELS_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float* const pair = outputs[i * 2 + j / 2] + j % 2 * 2;
      words[j] = rounded_pair<T>(pair[0] * factor[j % 2], pair[1] * factor[j % 2]);
    }
    const int run = i / 4, chunk = i % 4 * 2 + lane / 16;
    arch::store_matrices(tile + (run * 64 + row) * 128 + (chunk ^ row % 8) * 16, words);
  }
}

}  // namespace detail
KERNELS_END
