// Epilogue by TMA: results of 16 bits go through shared memory to their matrix, in boxes that are stored while the next
// tile's products run. For sinks that only store, behind maps that compute each result from its sum and perhaps what
// they read for its column; all others get whole rows from GemmSlabs.
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
  using Map = typename P::Map;
  static constexpr bool possible =
      is_16_bit<T> && std::is_same<typename P::C, float>::value && (kByRows ? by_values<Map> : by_columns<Map>);
  static constexpr bool kWide = kRows / P::matrices == 128;
  // A piece: the results that a warpgroup stages and stores at a time, in boxes of 64 columns (128 bytes).
  static constexpr int kOutputs = kRows / P::matrices, kBoxRows = kByRows ? 64 : 32,
                       kBoxes = kByRows ? 1 : kOutputs / 64, kPieceBytes = kBoxes * kBoxRows * 128;

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

  // Maps the sums of a warpgroup, and stores them from (row, col) on. four(half, j): four of a lane's sums, as
  // TmaGemmBody::four_of(). buffers: kBuffers pieces of shared memory.
  template <int kPieces, int kBuffers, class Four>
  __device__ __forceinline__ void put(const P& p, int row, int col, int end, uint32_t buffers, int barrier,
                                      const Four& four) const {
    const int mine = col + threadIdx.x / 32 % 4 * (kOutputs / 4) + threadIdx.x % 32 / 4;
    const Operand operands[2][2] = {{operand(p, mine), operand(p, mine + 8)},
                                    {operand(p, mine + 16), operand(p, mine + 24)}};
    // With the parts of all pieces numbered.
    const auto put_part = [&](int number, const auto& four_of_part) {
      const int i = number / kParts;
      const bool stores = threadIdx.x % 128 == 0;
      const uint32_t piece = buffers + i % kBuffers * kPieceBytes;
      if (number % kParts == 0 && (i == 0 || i >= kBuffers)) {
        if (stores) i == 0 ? arch::stored_boxes_wait<0>() : arch::stored_boxes_wait<kBuffers - 1>();
        __syncwarp();  // a barrier counts a warp whose threads diverged as arrived with the first of them
        arch::named_barrier_sync(barrier, 128);
      }
      stage(p, piece, number % kParts, operands, four_of_part);
      if (number % kParts != kParts - 1) return;
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
    };
    if constexpr (P::matrices == 1 && std::is_same<Map, Identity>::value) {
      KERNELS_UNROLL
      for (int number = 0; number < kPieces * kParts; ++number)
        put_part(number, [&](int k) -> const float* { return four_of_part(four, number, k); });
    } else {
      // A loop, so that the maps' code is compiled once and not for each part.
#pragma unroll 1
      for (int number = 0; number < kPieces * kParts; ++number) {
        float sums[kFours][4];
        KERNELS_UNROLL
        for (int other = 0; other < kPieces * kParts; ++other) {
          if (other != number) continue;
          KERNELS_UNROLL
          for (int k = 0; k < kFours * 4; ++k) sums[k / 4][k % 4] = four_of_part(four, other, k / 4)[k % 4];
        }
        put_part(number, [&](int k) -> const float* { return sums[k]; });
      }
    }
  }

 private:
  static Plane plane(const P& p) { return plane_of(p.out, p.m * p.groups.count, p.n); }
  // The maps behind that of a gate.
  using LastMaps = std::conditional_t<P::matrices == 1, Map, decltype(later_maps(std::declval<const Map&>()))>;
  static __device__ __forceinline__ LastMaps last_maps(const P& p) {
    if constexpr (P::matrices == 1)
      return sink_map(p.out);
    else
      return later_maps(sink_map(p.out));
  }
  // What they read for a column.
  using Operand = decltype(fetch_operands<1>(std::declval<const LastMaps&>(), kAny, kAny));
  static __device__ __forceinline__ Operand operand(const P& p, int64_t col) {
    return fetch_operands<1>(last_maps(p), 0, lesser<int64_t>(col, p.n - 1));
  }

  // A part of a piece is what stmatrix stores: 16 x 16 results, or 8 tokens x 32 outputs if a warp has 32. Its sums are
  // kFours times four of each lane; those of a gate's other matrix are behind the first two.
  static constexpr int kParts = kByRows || kWide ? 4 : 2, kFours = 2 * P::matrices;
  template <class Four>
  static __device__ __forceinline__ const float* four_of_part(const Four& four, int number, int k) {
    const int i = number / kParts, part = number % kParts;
    if constexpr (kByRows) {  // with a gate, 32 sums of either matrix alternate
      const int eight = part * 2 + k % 2;
      return four(0, P::matrices == 1 ? i * 8 + eight : i * 16 + eight / 4 * 8 + eight % 4 + k / 2 * 4);
    } else if constexpr (kWide) {
      return four(k, i * 4 + part);
    } else {
      return four(k / 2, i * 4 + part * 2 + k % 2);
    }
  }
  // Stages a part, in rows of 128 bytes with the 128-byte swizzle. operands: for the columns of the sums.
  template <class Four>
  static __device__ __forceinline__ void stage(const P& p, uint32_t piece, int part, const Operand (&operands)[2][2],
                                               const Four& four) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    uint32_t words[4];
    KERNELS_UNROLL
    for (int k = 0; k < 4; ++k)
      words[k] = pair(p, operands[kWide && !kByRows ? k / 2 : 0][kByRows ? 0 : k % 2], four(k / 2) + k % 2 * 2,
                      P::matrices == 1 ? nullptr : four(kFours / 2 + k / 2) + k % 2 * 2);
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
  // Two results; up: the sums of a gate's other matrix.
  static __device__ __forceinline__ uint32_t pair(const P& p, const Operand& operand, const float* sums,
                                                  const float* up) {
    return rounded_pair<T>(result(p, operand, sums, up, 0), result(p, operand, sums, up, 1));
  }
  static __device__ __forceinline__ float result(const P& p, const Operand& operand, const float* sums, const float* up,
                                                 int i) {
    Pack<float, 1> sum{{sums[i]}};
    if constexpr (P::matrices == 2) sum = first_map(sink_map(p.out)).join(sum, Pack<float, 1>{{up[i]}}, 0, 0);
    return apply_map(last_maps(p), sum, operand, 0, 0).v[0];
  }
};

}  // namespace detail
KERNELS_END
