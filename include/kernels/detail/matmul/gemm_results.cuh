// Epilogue by TMA: results of 16 bits go through shared memory to their matrix, in boxes that are stored while the next
// tile's products run. For store() alone; whatever else stands behind the product gets whole rows from GemmSlabs. Maps
// take as long that way, or longer (H200, CUDA 13.0, 2026-11, ad hoc benchmark): 512 x 14336 x 4096 with bias and gelu
// 99.8 us instead of 95.2, 2048 x 14336 x 4096 with swiglu 642 instead of 634.
#pragma once

#include "../dequantize.cuh"
#include "../tensor_map.cuh"
#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// kByRows: tokens are the rows of the mma, and a warpgroup has 64 tokens with all outputs of a tile. Otherwise it has
// kRows (64 or 128) rows of weights with all tokens.
template <class P, int kRows, bool kByRows>
struct GemmResults {
  using T = typename Traits<SinkEnd<typename P::Out>>::Stored;
  static constexpr bool possible = is_16_bit<T> && std::is_same<typename P::C, float>::value && P::matrices == 1 &&
                                   std::is_same<typename P::Map, Identity>::value;
  // A piece: the results that a warpgroup stages and stores at a time, in boxes of 64 columns (128 bytes).
  static constexpr int kBoxRows = kByRows ? 64 : 32, kBoxes = kByRows ? 1 : kRows / 64,
                       kPieceBytes = kBoxes * kBoxRows * 128;

  arch::TensorMap map;
  bool made = false;

  // Whether there can be a map for tiles of `tokens` tokens. A box would also write the tokens of the group behind, and
  // is clipped at multiples of 16 bytes.
  static bool can_be(const P& p, int tokens) {
    if constexpr (!possible) return false;
    if (p.groups.offsets != nullptr || (p.groups.count > 1 && p.m % tokens != 0)) return false;
    const Plane out = plane(p);
    return out.rows > 0 && out.rows <= INT32_MAX && p.n <= INT32_MAX && p.n % 8 == 0 && out.heads.count <= 1 &&
           out.batches.count <= 1 && out.stride % 16 == 0 && reinterpret_cast<uintptr_t>(out.begin) % 16 == 0;
  }
  void make(const Exec& ex, const P& p) {
    const Plane out = plane(p);
    made = make_tensor_map(ex, {out.begin, 2, p.n, out.rows, 1, 1, out.stride / 2, 0, 0}, kBoxRows, map);
  }

  // Stores the sums of a warpgroup from (row, col) on. four(half, j): four of a lane's sums, as TmaGemmBody::four_of().
  // buffers: kBuffers pieces of shared memory.
  template <int kPieces, int kBuffers, class Four>
  __device__ __forceinline__ void put(const P& p, int row, int col, int end, uint32_t buffers, int barrier,
                                      const Four& four) const {
    const bool stores = threadIdx.x % 128 == 0;
    KERNELS_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = buffers + i % kBuffers * kPieceBytes;
      if (i == 0 || i >= kBuffers) {
        if (stores) i == 0 ? arch::stored_boxes_wait<0>() : arch::stored_boxes_wait<kBuffers - 1>();
        __syncwarp();  // a barrier counts a warp whose threads diverged as arrived with the first of them
        arch::named_barrier_sync(barrier, 128);
      }
      stage(i, piece, four);
      arch::async_proxy_fence();
      arch::named_barrier_sync(barrier, 128);
      if (stores) {
        const int first = row + (kByRows ? 0 : i * kBoxRows);
        KERNELS_UNROLL
        for (int box = 0; box < kBoxes; ++box) {
          const int column = col + (kByRows ? i : box) * 64;
          if (first < end && column < p.n) arch::store_box(map, column, first, 0, 0, piece + box * (kBoxRows * 128));
        }
        arch::stored_boxes_commit();
      }
      __syncwarp();
    }
  }

 private:
  static Plane plane(const P& p) { return plane_of(p.out, p.m * p.groups.count, p.n); }
  // Stages piece i, in rows of 128 bytes with the 128-byte swizzle, 16 x 16 results at a time, or 8 tokens x 32 outputs
  // if a warp has 32.
  template <class Four>
  static __device__ __forceinline__ void stage(int i, uint32_t piece, const Four& four) {
    constexpr bool kWide = !kByRows && kRows == 128;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    KERNELS_UNROLL
    for (int part = 0; part < (kByRows || kWide ? 4 : 2); ++part) {
      uint32_t words[4];
      KERNELS_UNROLL
      for (int k = 0; k < 4; ++k) {
        const float* const sums = kWide ? four(k / 2, i * 4 + part) : four(0, i * (kByRows ? 8 : 4) + part * 2 + k / 2);
        words[k] = rounded_pair<T>(sums[k % 2 * 2], sums[k % 2 * 2 + 1]);
      }
      if constexpr (kByRows) {
        const int row = warp * 16 + lane % 16, chunk = part * 2 + lane / 16;
        arch::store_matrices(piece + row * 128 + (chunk ^ row % 8) * 16, words);
      } else {  // weights are the rows of sums, and become columns
        const int chunk = kWide ? warp * 4 + lane / 8 : warp * 2 + lane / 8 % 2,
                  row = (kWide ? part : part * 2 + lane / 16) * 8 + lane % 8;
        arch::store_matrices_transposed(piece + chunk / 8 * (kBoxRows * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16,
                                        words);
      }
    }
  }
};

}  // namespace detail
KERNELS_END
