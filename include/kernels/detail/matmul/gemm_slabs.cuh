// The way of a tile's sums to the sink, through shared memory.
#pragma once

#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// A tile's sums on their way to the sink through shared memory, so that whole rows are written. Each warp has slabs, of
// kTokens x kRows. kGroups: groups of four warps that share K, each with sums of the whole tile. kTurned: the rows of
// an mma are those of weights, as with wgmma. kAheadBytes: of registers for what the sink reads ahead, which
// have room where all slabs are laid out and no sums are left in them.
template <class P, int kGroups = 1, bool kTurned = arch::kWarpgroupMma,
          int kAheadBytes = arch::kWarpgroupMma ? 512 : 64>
struct GemmSlabs {
  static constexpr int kTokens = kTurned ? 32 : 16, kRows = 1024 / kTokens;
  static constexpr int kPitch = kRows + (kTurned ? 4 : 8), kFloats = kTokens * kPitch;
  // Whether shared memory has room for all slabs of a tile.
  static constexpr bool all_at_once = arch::kWarpgroupMma;
  static constexpr int kBarrier = 1;  // named, of all groups

  static __device__ __forceinline__ int warp_column() {
    const int warp = threadIdx.x / (kTurned ? 32 : 64);
    return (kGroups > 1 ? warp % 4 : warp) * kRows;
  }
  static __device__ __forceinline__ float* of_warp(float* shared, int slabs) {
    return shared + threadIdx.x / 32 * (slabs * kFloats);
  }

  // Hands `slabs` of this warp to the sink, the first of them with the tile's row `row`. Groups share the work.
  template <class Params>
  static __device__ __forceinline__ void put_slabs(const Params& params, const Tile& tile, const float* mine,
                                                   int slabs, int row, unsigned rank, unsigned splits) {
    if (splits > 1) arch::cluster_arrive(), arch::cluster_wait();
    else if (kGroups > 1) arch::named_barrier_sync(kBarrier, 128 * kGroups);
    else __syncwarp();
    const int64_t token = tile.token + row, col = tile.output + warp_column() / P::matrices;
    if (params.wide_out) put_packs<8>(params.problem, mine, slabs, token, tile.token_end, col, rank, splits);
    else put_packs<outputs_per_store<P>>(params.problem, mine, slabs, token, tile.token_end, col, rank, splits);
    if (splits > 1) arch::cluster_arrive_relaxed(), arch::cluster_wait();
    else __syncwarp();
  }

  // A slab as rows of tokens.
  static __device__ __forceinline__ void lay_out(float* slab, const float (&sums)[32]) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    KERNELS_UNROLL
    for (int j = 0; j < 8; ++j) {
      const float* from = sums + j * 4;
      if constexpr (kTurned) {
        float* to = slab + (j % 4 * 8 + 2 * t) * kPitch + j / 4 * 16 + g;
        to[0] = from[0], to[kPitch] = from[1], to[8] = from[2], to[kPitch + 8] = from[3];
      } else {
        float* to = slab + g * kPitch + j * 8 + 2 * t;
        *reinterpret_cast<::float2*>(to) = {from[0], from[1]};
        *reinterpret_cast<::float2*>(to + 8 * kPitch) = {from[2], from[3]};
      }
    }
  }

 private:
  // What the sink reads for each result is prefetched several packs ahead: behind each store, which might be to the
  // same place, a lane would wait for memory anew (2048 x 4096 x 4096, x += ... in floats: 156 us instead of 210).
  template <int N>
  static __device__ __forceinline__ void put_packs(const P& p, const float* mine, int slabs, int64_t row, int64_t end,
                                                   int64_t col, unsigned rank, unsigned splits) {
    constexpr int kCols = kRows / P::matrices, kPacks = kCols / N, kEach = kTokens * kPacks;
    using Read = Operands<P, N>;
    constexpr int fit = kAheadBytes / int(sizeof(Read)),
                  kAhead = !Traits<typename P::Map>::reads_matrix || P::matrices == 2 || fit < 1 ? 1
                           : fit < 8                                                     ? fit
                                                                                         : 8;
    const auto map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    const int step = 32 * int(splits) * kGroups, count = slabs * kEach;
    const int group = kGroups > 1 ? threadIdx.x / 128 : 0, further = 4 * slabs * kFloats;  // where the next group's are
    mine -= group * further;
    const auto at = [&](int i, const auto& f) {
      const int64_t r = row + i / kPacks, c = col + i % kPacks * N;
      if (i < count && r < end && c < p.n) f(r, c);
    };
#pragma unroll 1
    for (int first = int((threadIdx.x & 31) + 32 * (rank * kGroups + group)); first < count; first += kAhead * step) {
      Read read[kAhead];
      KERNELS_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        if constexpr (P::matrices == 1)
          at(first + j * step, [&](int64_t r, int64_t c) { read[j] = fetch_operands<N>(map, r, c); });
      }
      KERNELS_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        const int i = first + j * step;
        const float* from = mine + i / kEach * kFloats + i % kEach / kPacks * kPitch + i % kPacks * N;
        at(i, [&](int64_t r, int64_t c) {
          if constexpr (P::matrices == 2) {
            put_joined(sink, map, total<N>(from, further, splits), total<N>(from + kCols, further, splits), r, c);
          } else {
            put(sink, apply_map(map, total<N>(from, further, splits), read[j], r, c), r, c);
          }
        });
      }
    }
  }
  // Over the first `splits` blocks of the cluster, and the groups of each, in their order. Reading more at a time was
  // not faster: with eight packs asked for at once pairs of blocks took 3 % longer and four blocks 24, with packs of
  // four floats pairs 4 % longer and four 8 % less, with a block's own sums first four 3.5 % less (33 to 512 tokens of
  // bfloat16, H200, 2026-11, by a program that was not kept).
  template <int N>
  static __device__ __forceinline__ Pack<float, N> total(const float* at, int further, unsigned splits) {
    if (splits == 1) return of_groups<N>(at, further);
    Pack<float, N> sum = of_groups<N>(arch::in_block(at, 0), further);
    for (unsigned i = 1; i < splits; ++i) sum = sum + of_groups<N>(arch::in_block(at, i), further);
    return sum;
  }
  template <int N>
  static __device__ __forceinline__ Pack<float, N> of_groups(const float* at, int further) {
    Pack<float, N> sum = sums_at<N>(at);
    KERNELS_UNROLL
    for (int i = 1; i < kGroups; ++i) sum = sum + sums_at<N>(at + i * further);
    return sum;
  }
};

}  // namespace detail
KERNELS_END
