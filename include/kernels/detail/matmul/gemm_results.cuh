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
    const bool stores = threadIdx.x % 128 == 0;
    const int mine = col + threadIdx.x / 32 % 4 * (kOutputs / 4) + threadIdx.x % 32 / 4;
    const Operand operands[2][2] = {{operand(p, mine), operand(p, mine + 8)},
                                    {operand(p, mine + 16), operand(p, mine + 24)}};
    KERNELS_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = buffers + i % kBuffers * kPieceBytes;
      if (i == 0 || i >= kBuffers) {
        if (stores) i == 0 ? arch::stored_boxes_wait<0>() : arch::stored_boxes_wait<kBuffers - 1>();
        __syncwarp();  // a barrier counts a warp whose threads diverged as arrived with the first of them
        arch::named_barrier_sync(barrier, 128);
      }
      stage(p, i, piece, operands, four);
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

  // Stages piece i, in rows of 128 bytes with the 128-byte swizzle. operands: for the columns of four(half, j), first
  // those of its first two sums.
  template <class Four>
  static __device__ __forceinline__ void stage(const P& p, int i, uint32_t piece, const Operand (&operands)[2][2],
                                               const Four& four) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    uint32_t words[4];
    if constexpr (kByRows) {
      // 16 x 16 results at a time. With a gate, 32 sums of either matrix alternate.
      const uint32_t to = piece + (warp * 16 + lane % 16) * 128;
      KERNELS_UNROLL
      for (int j = 0; j < 8; j += 2) {
        KERNELS_UNROLL
        for (int k = 0; k < 4; ++k) {
          const int eight = i * 8 + j + k / 2, of_gate = P::matrices == 1 ? eight : eight / 4 * 8 + eight % 4;
          words[k] = pair(p, operands[0][0], four(0, of_gate) + k % 2 * 2,
                          P::matrices == 1 ? nullptr : four(0, of_gate + 4) + k % 2 * 2);
        }
        arch::store_matrices(to + ((j + lane / 16) ^ lane % 8) * 16, words);
      }
    } else {
      // Weights are the rows of sums, and become columns: 8 x 32 results at a time, or 16 x 16 if a warp has only 16.
      const int column = kWide ? warp * 4 + lane / 8 : warp * 2 + lane / 8 % 2;
      const uint32_t to = piece + column / 8 * (kBoxRows * 128) + lane % 8 * 128 + (column ^ lane) % 8 * 16 +
                          (kWide ? 0 : lane / 16 * (8 * 128));
      KERNELS_UNROLL
      for (int j = 0; j < 4; j += kWide ? 1 : 2) {
        KERNELS_UNROLL
        for (int k = 0; k < 4; ++k) {
          const int half = kWide ? k / 2 : 0, eight = i * 4 + j + (kWide ? 0 : k / 2);
          words[k] = pair(p, operands[half][k % 2], four(half, eight) + k % 2 * 2,
                          P::matrices == 1 ? nullptr : four(1, eight) + k % 2 * 2);
        }
        arch::store_matrices_transposed(to + j * (8 * 128), words);
      }
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
