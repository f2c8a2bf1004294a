// How the weights of a tile get to shared memory by TMA: boxes of 128 bytes of each row.
//
// Row order in shared memory. The slabs of the epilogue determine it:
// - Tiles of more than 64 rows of one matrix: permuted. wgmma gives a warp 16 rows of each 64, and those of two 64s are
//   adjacent outputs: half h of slab s (32 rows) is behind the halves h of four slabs.
// - With a gate: a slab has 16 rows of either matrix, and 64 rows of one matrix are in memory order.
// - Tiles of 64 rows: memory order.
// - Weights as the columns of wgmma (tokens are rows): memory order; with a gate a slab has 32 rows of either matrix.
#pragma once

#include <cstdint>

#include "../tensor_map.cuh"
#include "gemm_in_eight.cuh"
#include "product.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

// Weights in rows of constant stride: one matrix, or both of a gate.
template <class P, class T, int kRows>
struct RowMaps {
  static constexpr bool single = P::matrices == 1, columns = tokens_are_rows<P, T, kRows>,
                        woven = kRows > 64 && single && !columns, parts = kRows > 64 && single;
  static constexpr int kBox = columns ? (single ? kRows : 32) : woven ? 128 : 64;  // rows of a box of whole slabs
  arch::TensorMap maps[2];  // of a gate's matrices; or of one matrix in whole slabs, and in smaller boxes
  int whole_slabs;          // rows of weights in the maps of whole slabs, for each group

  bool make(const Exec& ex, const P& p) {
    whole_slabs = int(p.groups.count == 1 ? p.n / 32 * 32 : p.n % 32 == 0 ? p.n : 0);
    if (!make(ex, p, p.template weights<0>(), true, maps[0])) return false;
    if (P::matrices == 2 || (parts && p.n % kRows != 0))
      return make(ex, p, p.template weights<P::matrices - 1>(), false, maps[1]);
    maps[1] = maps[0];  // unused: no tile needs it
    return true;
  }

  // The boxes of a tile's step. In whole slabs, a map describes the order of their halves; elsewhere, as behind the
  // last whole slab, or if groups begin at any row, each half slab has a box of its own. Without that order, so have
  // the rows of a partial tile. Rows that do not exist are skipped: filling them with zeros takes longer than copying.
  struct Boxes {
    const arch::TensorMap* maps;
    int row, left, whole;  // its first row, how many rows exist, and how many of them are in boxes of whole slabs

    __device__ __forceinline__ bool parted() const { return parts && whole < kRows; }
    template <bool kParted>
    __device__ __forceinline__ int bytes() const {
      if (!parts || !kParted) return kRows * 128;
      return (woven ? whole + (left - whole + 15) / 16 * 16 : left) * 128;
    }
    // By one thread.
    template <bool kParted>
    __device__ __forceinline__ void copy(uint32_t to, int col, arch::BarrierAddress full) const {
      if constexpr (parts && kParted && !woven) {
        arch::copy_box(to, maps[whole < kRows], col, row, 0, 0, full);
      } else if constexpr (parts && kParted) {
#pragma unroll 1
        for (int i = 0; i < whole; i += kBox) arch::copy_box(to + i * 128, maps[0], col, 0, (row + i) / 32, 0, full);
          // Not unrolled: a copy that is skipped takes nearly as long as one that is not.
#pragma unroll 1
        for (int i = whole; i < left; i += 16) {
          const int place = i / 128 * 128 + i / 16 % 2 * 64 + i / 32 % 4 * 16;
          arch::copy_box(to + place * 128, maps[1], col, row + i, 0, 0, full);
        }
      } else {
        KERNELS_UNROLL
        for (int i = 0; i < kRows / kBox; ++i) {
          if (woven)
            arch::copy_box(to + i * (kBox * 128), maps[0], col, 0, row / 32 + i * 4, 0, full);
          else
            arch::copy_box(to + i * (kBox * 128), maps[i % P::matrices], col, row + i / P::matrices * kBox, 0, 0, full);
        }
      }
    }
  };
  __device__ __forceinline__ Boxes of_tile(const P& p, const Tile& tile) const {
    const int left = int(lesser<int64_t>(p.n - tile.output, kRows)),
              slabs = woven ? greater(lesser(whole_slabs - int(tile.output), kRows), 0) : left;
    return {maps, int(tile.weights + tile.output), left, parts ? slabs / kBox * kBox : kRows};
  }

 private:
  template <class S>
  static bool make(const Exec& ex, const P& p, const S& source, bool whole, arch::TensorMap& map) {
    const auto& weights = without_scales(source);
    const int64_t ld = weights.at(1, 0) - weights.at(0, 0), rows = p.groups.count * p.n;
    const int bytes = sizeof(T);
    if (rows > INT32_MAX) return false;
    if (woven && whole && rows >= 32)
      return make_tensor_map(ex, {weights.at(0, 0), bytes, p.k, 16, rows / 32, 2, ld, 32 * ld, 16 * ld}, 16, map, 4, 2);
    return make_tensor_map(ex, {weights.at(0, 0), bytes, p.k, rows, 1, 1, ld, 0, 0},
                           !parts || whole ? kBox
                           : woven         ? 16
                                           : int(p.n % kRows),
                           map);
  }
};

// A part of stacked weights. Its rows may be paired: i and half + i of each head of head_dim rows.
struct PartOfRows {
  const void* from;
  int64_t rows, ld, half, head_dim;
};
template <class S, class T>
constexpr int parts_in_rows = in_rows<S, T> ? 1 : 0;
template <class S, class T>
constexpr int parts_in_rows<Paired<S>, T> = parts_in_rows<S, T>;
template <class S, int kParts, class T>
constexpr int parts_in_rows<Stacked<S, kParts>, T> = kParts * parts_in_rows<S, T>;

template <class S>
PartOfRows part_of(const S& source, int, int64_t rows) {
  const auto& weights = without_scales(source);
  return {weights.at(0, 0), rows, weights.at(1, 0) - weights.at(0, 0), 0, 0};
}
template <class S>
PartOfRows part_of(const Paired<S>& source, int i, int64_t rows) {
  PartOfRows part = part_of(source.source(), i, rows);
  part.half = source.half(), part.head_dim = source.head_dim();
  return part;
}
template <class S, int kParts>
PartOfRows part_of(const Stacked<S, kParts>& source, int i, int64_t) {
  return part_of(source.sections().parts[i], 0, source.sections().size(i));
}

// Stacked matrices, each with a multiple of 128 rows, paired or not. A slab has 16 pairs of one head, with the two rows
// of each pair adjacent, whether or not they are in memory.
template <class P, class T, int kRows>
struct StackMaps {
  static constexpr int kParts = parts_in_rows<typename P::W, T> < 1 ? 1 : parts_in_rows<typename P::W, T>,
                       kRun = kRows > 64 ? 128 : 64,                  // rows that are in one part
      kHalves = kRows > 64 && !tokens_are_rows<P, T, kRows> ? 2 : 1;  // of slabs, one after the other
  arch::TensorMap maps[kParts];
  int begins[kParts], slabs[kParts];  // a part's first row, and the slabs in each of its heads

  bool make(const Exec& ex, const P& p) {
    if (p.groups.several() || p.n > INT32_MAX) return false;
    int64_t begin = 0;
    for (int i = 0; i < kParts; ++i) {
      const PartOfRows part = part_of(p.w, i, p.n);
      const bool paired = part.half > 0;
      if (part.rows % 128 != 0 || part.rows == 0) return false;
      if (paired && (2 * part.half != part.head_dim || part.head_dim % 32 != 0)) return false;
      const int64_t ld = part.ld, of_head = (paired ? part.head_dim : part.rows) / 32, run = kRun / 32;
      // Independent of the tile: tiles add up in the same order, but kernels for weights that cannot be mapped do not.
      if (of_head % 4 != 0 && 4 % of_head != 0) return false;
      const int box = int(lesser(of_head, run));
      const MappedTensor<5> tensor{
          part.from,
          int(sizeof(T)),
          p.k,
          {2, 16, of_head, part.rows / 32 / of_head},
          {paired ? part.half * ld : ld, paired ? ld : 2 * ld, (paired ? 16 : 32) * ld, part.head_dim * ld}};
      if (!make_tensor_map<5>(ex, tensor, {2, 16 / kHalves, box, int(run) / box}, maps[i])) return false;
      begins[i] = int(begin), slabs[i] = int(of_head);
      begin += part.rows;
    }
    return true;
  }

  // The boxes of a tile's step.
  struct Boxes {
    struct Run {
      const arch::TensorMap* map;
      int slab, head;
    };
    Run runs[kRows / kRun];
    int count;  // runs that exist

    __device__ __forceinline__ bool parted() const { return false; }
    template <bool kParted>
    __device__ __forceinline__ int bytes() const { return count * kRun * 128; }
    // By one thread.
    template <bool kParted>
    __device__ __forceinline__ void copy(uint32_t to, int col, arch::BarrierAddress full) const {
      KERNELS_UNROLL
      for (int i = 0; i < kRows / kRun; ++i) {
        if (i >= count) break;
        const Run& run = runs[i];
        KERNELS_UNROLL
        for (int half = 0; half < kHalves; ++half)
          arch::copy_box(to + (i * kRun + half * 64) * 128, *run.map, col, 0, half * 8, run.slab, run.head, full);
      }
    }
  };
  __device__ __forceinline__ Boxes of_tile(const P& p, const Tile& tile) const {
    Boxes boxes;
    const int first = int(tile.output);
    KERNELS_UNROLL
    for (int i = 0; i < kRows / kRun; ++i) {
      const int row = first + i * kRun;
      int part = 0;
      KERNELS_UNROLL
      for (int j = 1; j < kParts; ++j) part = row >= begins[j] ? j : part;
      const int slab = (row - begins[part]) / 32, head = slab / slabs[part];
      boxes.runs[i] = {&maps[part], slab - head * slabs[part], head};
    }
    boxes.count = lesser(kRows / kRun, (int(p.n) - first + kRun - 1) / kRun);
    return boxes;
  }
};

// Maps for weights that TMA can copy if they are aligned.
template <class P, class T, int kRows>
struct WeightMaps : std::conditional_t<weights_in_rows<P, T>, RowMaps<P, T, kRows>, StackMaps<P, T, kRows>> {
  static constexpr bool possible = weights_in_rows<P, T> || (P::matrices == 1 && parts_in_rows<typename P::W, T> > 0);
};

}  // namespace detail
KERNELS_END
