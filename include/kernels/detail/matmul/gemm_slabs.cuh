// Epilogue: a tile's sums go through shared memory to the sink, so that whole rows are written.
#pragma once

#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// Which sums of a tile a warp has:
//   warps_2x2    64 rows of weights with half of the tokens; tokens are the rows of its mma
//   transposed   32 rows of weights with all tokens; weights are the rows of its mma
//   by_tokens    all rows of weights with 16 tokens; tokens are the rows of its mma
enum class SlabOrder { warps_2x2, transposed, by_tokens };
constexpr SlabOrder kDefaultOrder = arch::kWarpgroupMma ? SlabOrder::transposed : SlabOrder::warps_2x2;

// A slab is kTokens x kRows sums in shared memory; a warp's slabs follow each other in tokens or, with `by_tokens`, in
// weights.
// - kGroups: groups of four warps that share K, each with sums of the whole tile.
// - kAheadBytes: registers for packs that are read ahead for the sink; there is room for many if all slabs are laid
//   out, so that no sums remain in registers.
// - kWarps: two if a warp has only 16 rows of weights: two warps lay out a slab together, and each passes on half of
//   it.
// - kTileEachFour: each four warps have a tile of their own.
template <class P, int kGroups = 1, SlabOrder kOrder = kDefaultOrder, int kAheadBytes = arch::kWarpgroupMma ? 512 : 64,
          int kWarps = 1, bool kTileEachFour = false>
struct GemmSlabs {
  static constexpr bool kTransposed = kOrder == SlabOrder::transposed, kByTokens = kOrder == SlabOrder::by_tokens;
  static_assert(kWarps == 1 || (kWarps == 2 && kGroups == 1 && kTransposed), "who shares a slab");
  static constexpr int kTokens = kTransposed ? 32 : 16, kRows = 1024 / kTokens;
  static constexpr int kPitch = kRows + (kOrder == SlabOrder::warps_2x2 ? 8 : 0), kFloats = kTokens * kPitch;
  // Whether shared memory has room for all slabs of a tile.
  static constexpr bool all_at_once = arch::kWarpgroupMma;
  static constexpr int kBarrier = 1;  // a named barrier of all groups

  static __device__ __forceinline__ int warp_column() {
    if (kByTokens) return 0;
    const int warp = threadIdx.x / ((kTransposed ? 32 : 64) * kWarps);
    return (kGroups > 1 || kTileEachFour ? warp % 4 : warp) * kRows;
  }
  static __device__ __forceinline__ float* of_warp(float* shared, int slabs) {
    return shared + threadIdx.x / (32 * kWarps) * (slabs * kFloats);
  }

  // Passes `slabs` slabs of this warp to the sink; the first begins at row `row` of the tile. Groups share the work.
  template <class Params>
  static __device__ __forceinline__ void put_slabs(const Params& params, const Tile& tile, const float* mine,
                                                   int slabs, int row, unsigned rank, unsigned splits) {
    if (splits > 1) arch::cluster_arrive(), arch::cluster_wait();
    else if (kGroups > 1 || kWarps > 1) arch::named_barrier_sync(kBarrier, 128 * kGroups);
    else __syncwarp();
    const int64_t token = tile.token + row, col = tile.output + warp_column() / P::matrices;
    if (params.wide_out) put_packs<8>(params.problem, mine, slabs, token, tile.token_end, col, rank, splits);
    else put_packs<outputs_per_store<P>>(params.problem, mine, slabs, token, tile.token_end, col, rank, splits);
    if (splits > 1) arch::cluster_arrive_relaxed(), arch::cluster_wait();
    else __syncwarp();
  }

  // Writes a slab, or this warp's part of one, as rows of tokens.
  static constexpr int kSums = 32 / kWarps;
  static __device__ __forceinline__ void lay_out(float* slab, const float* sums) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    if constexpr (kTransposed) {
      const unsigned first = swizzled_offset(2 * t, threadIdx.x / 32 % kWarps * (kRows / kWarps) + g);
      // The offset of swizzled_offset() for `rows` rows and `eights` times eight columns further.
      const auto put = [&](int rows, int eights, float sum) {
        slab[(first ^ (eights * 4 + rows % 2 * 16)) + rows * kPitch] = sum;
      };
      KERNELS_UNROLL
      for (int j = 0; j < kSums / 4; ++j) {
        KERNELS_UNROLL
        for (int i = 0; i < 4; ++i) put(j % 4 * 8 + i % 2, j / 4 * 2 + i / 2, sums[j * 4 + i]);
      }
    } else {
      KERNELS_UNROLL
      for (int j = 0; j < 8; ++j) {
        const float* const from = sums + j * 4;
        float* const to = slab + swizzled_offset(g, j * 8 + 2 * t);
        *reinterpret_cast<::float2*>(to) = {from[0], from[1]};
        *reinterpret_cast<::float2*>(to + 8 * kPitch) = {from[2], from[3]};
      }
    }
  }

 private:
  // The offset of a sum in a slab. Except with warps_2x2, a row is split into 16-byte chunks, even ones first, so that
  // lanes reading packs of 32 bytes read at least 64 contiguous bytes: from another block of a cluster they would
  // otherwise get half the bandwidth (16 KB in 2,360 cycles instead of 1,350). Swizzled against bank conflicts.
  static __device__ __forceinline__ unsigned swizzled_offset(unsigned row, unsigned col) {
    if constexpr (kOrder == SlabOrder::warps_2x2) return row * kPitch + col;
    const unsigned chunk = col / 4, odd = chunk % 2,
                   swizzle = kByTokens ? row % 4 * 2 + odd : row % 2 * 4 + row / 2 % 2 * 2 + row / 4 % 2;
    return row * kPitch + (((odd * (kRows / 8) + chunk / 2) ^ swizzle) * 4 + col % 4);
  }
  static constexpr int kAlike = kByTokens ? 4 : 8;  // rows after which a column is in the same place again
  // Lanes have adjacent packs, as many rows at a time as that makes, so a lane's column is constant. Sums and the
  // sink's operands are loaded several packs ahead: after each store, which might be to the same address, a lane would
  // wait for its load (2048 x 4096 x 4096, x += ... in floats: 156 us instead of 210).
  template <int N>
  static __device__ __forceinline__ void put_packs(const P& p, const float* mine, int slabs, int64_t row, int64_t end,
                                                   int64_t col, unsigned rank, unsigned splits) {
    using Read = Operands<P, N>;
    constexpr int kPacks = kRows / P::matrices / N, kLanes = kPacks < 32 ? kPacks : 32, kPasses = kPacks / kLanes,
                  kHeight = 32 / kLanes;
    // How many packs are read ahead. With a gate, the joining map fetches its operands itself. Eight packs if the sink
    // reads a matrix of at most floats (128 x 14336 x 4096, x += ... in floats: 54.7 us, with four 60.7), otherwise
    // four (512 x 4096 x 4096 with a bias and a residual of bfloat16: six 31.8, four 30.4). One if the sink takes
    // pairs: it does so much work for each that no load is waited for, and its code would be repeated (QKV with RoPE
    // and a KV cache: 690 KB on sm_90a instead of 1,384; prompts of 2,048 and 16,384 tokens of Mistral-7B take as
    // long).
    constexpr bool kFetches = P::matrices == 1;
    constexpr int bytes = (!kFetches || std::is_empty<Read>::value ? 0 : int(sizeof(Read))) + P::matrices * N * 4,
                  most = kFetches && Traits<typename P::Map>::reads_matrix && sizeof(Read) <= 4 * N ? 8 : 4,
                  fit = outputs_per_store<P> > 1 ? 1 : kAheadBytes / bytes,
                  kAhead = fit < 1 ? 1 : fit < most ? fit : most;
    const auto map = sink_map(p.out);
    const auto& sink = sink_end(p.out);
    const int lane = threadIdx.x & 31, group = kGroups > 1 ? threadIdx.x / 128 : 0;
    const int further = 4 * slabs * kFloats;  // the offset of the next group's sums
    const int sharer = kWarps > 1 ? threadIdx.x / 32 % kWarps : group, sharers = kWarps * kGroups;
    const int rows = int(lesser<int64_t>(end - row, kByTokens ? kTokens : slabs * kTokens)),
              step = int(splits) * sharers;
    const int turns = slabs * (kTokens / kHeight) * kPasses;
    // Opaque: if all lanes have parts of one row, ptxas would count in uniform registers, which takes longer (1024 x
    // 50257 x 768: 262 us instead of 248).
    const int my_row = arch::opaque(lane) / kLanes, my_col = lane % kLanes * N;
    mine -= group * further;
    // Calls f(index among the next turns, row, column among the warp's) for lanes that have a pack.
    const auto visit = [&](int first, const auto& f) {
      KERNELS_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        const int turn = first + j * step, of_slabs = turn / kPasses * kHeight + my_row,
                  r = kByTokens ? of_slabs % kTokens : of_slabs,
                  c = my_col + turn % kPasses * (kLanes * N) +
                      (kByTokens ? of_slabs / kTokens * (kRows / P::matrices) : 0);
        if (turn < turns && r < rows && col + c < p.n) f(j, r, c);
      }
    };
    using Sums = Pack<float, N>[kAhead][P::matrices];
    const auto read_sums = [&](Sums& sums, int first, unsigned source) {
      const float* const from = splits == 1 ? mine : arch::in_block(mine, source);
      visit(first, [&](int j, int r, int c) {
        KERNELS_UNROLL
        for (int i = 0; i < P::matrices; ++i) {
          const int slab = kByTokens ? c / (kRows / P::matrices) : 0, known = kHeight % kAlike == 0 ? my_row : r,
                    of_slab = c - slab * (kRows / P::matrices);
          sums[j][i] = of_groups<N>(from + slab * kFloats + (r - known) * kPitch, known,
                                    of_slab + i * (kRows / P::matrices), further);
        }
      });
    };
#pragma unroll 1
    for (int first = int(rank) * sharers + sharer; first < turns; first += kAhead * step) {
      Read read[kAhead];
      Sums sums;
      if constexpr (kFetches)
        visit(first, [&](int j, int r, int c) { read[j] = fetch_operands<N>(map, row + r, col + c); });
      read_sums(sums, first, 0);
#pragma unroll 1
      for (unsigned source = 1; source < splits; ++source) {
        Sums more;
        read_sums(more, first, source);
        KERNELS_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          KERNELS_UNROLL
          for (int i = 0; i < P::matrices; ++i) sums[j][i] = sums[j][i] + more[j][i];
        }
      }
      visit(first, [&](int j, int r, int c) {
        if constexpr (P::matrices == 2) put_joined(sink, map, sums[j][0], sums[j][1], row + r, col + c);
        else put(sink, apply_map(map, sums[j][0], read[j], row + r, col + c), row + r, col + c);
      });
    }
  }
  // The sum over the groups of a block, in their order.
  template <int N>
  static __device__ __forceinline__ Pack<float, N> of_groups(const float* from, int row, int col, int further) {
    Pack<float, N> sum;
    KERNELS_UNROLL
    for (int i = 0; i < N; i += kChunk<N>) {
      auto chunk = sums_at<kChunk<N>>(from + swizzled_offset(row, col + i));
      KERNELS_UNROLL
      for (int j = 1; j < kGroups; ++j)
        chunk = chunk + sums_at<kChunk<N>>(from + swizzled_offset(row, col + i) + j * further);
      KERNELS_UNROLL
      for (int j = 0; j < kChunk<N>; ++j) sum.v[i + j] = chunk.v[j];
    }
    return sum;
  }
  template <int N>
  static constexpr int kChunk = N < 4 ? N : 4;
};

}  // namespace detail
KERNELS_END
