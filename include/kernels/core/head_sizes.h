// Head sizes that attention has kernels for, and their tiles. Add another size here first. A head between two sizes is
// padded with zeros.
#pragma once

#include <type_traits>

#include "status.h"

KERNELS_BEGIN
namespace detail {

struct HeadSize {
  int dim, v_dim;  // columns of keys, and of values in decode()
  // attention() with mma.sync: warps of a block, tiles of 16 rows for each warp, keys of a tile, value columns that a
  // block computes, and stages of keys and values in shared memory.
  int warps, tiles, keys, cols, stages;
  // attention() in code for sm_90a: keys of a tile and groups of 64 rows, if keys and values are copied by TMA, and if
  // the producer decodes them.
  struct Hopper {
    int keys, groups;
  } copied, decoded;
  // decode() with tensor cores: rows processed together, the teams of warps that process them (each with as many rows
  // as registers allow), and the most warps with keys of their own.
  int decode_rows, decode_teams, decode_warps;
};

// With 64 columns there is room for a third group on sm_90a, and exponentials take the longest; not if the producer
// needs registers to decode. With 256 columns shared memory holds 80 keys, but a producer has registers for the codes
// of 64 only.
inline constexpr HeadSize kHeadSizes[] = {
    {64, 64, 4, 2, 128, 64, 2, {128, 3}, {128, 2}, 32, 2, 8},
    {128, 128, 4, 2, 64, 128, 2, {128, 2}, {128, 2}, 32, 2, 8},
    {256, 256, 4, 1, 64, 256, 1, {80, 2}, {64, 2}, 16, 2, 4},
    {576, 512, 2, 1, 32, 256, 1, {}, {}, 8, 1, 2},
};
// Latent attention (MLA): keys that contain their values, with a kernel of its own (prefill_latent.cuh).
constexpr int kLatentDim = 576, kLatentCols = 512;
// The largest head of any kernel, of kernels for sm_90a except latents, and of those for short sequences.
constexpr int kMostDim = 576, kMostHopperDim = 256, kMostShortDim = 128;

// The smallest size with room for `dim` columns, or else the largest.
constexpr const HeadSize& head_size(int64_t dim) {
  const HeadSize* size = kHeadSizes;
  while (size->dim < dim && size->dim < kMostDim) ++size;
  return *size;
}

// Calls f(size) with the first size, up to kMost, with room for `dim` columns, or else with kMost. If kLargest > 0, dim
// does not exceed it, and sizes beyond the one for kLargest are not compiled.
template <int kLargest, int kMost = kMostDim, int kIndex = 0, class F>
Status with_head_size(int64_t dim, const F& f) {
  constexpr std::integral_constant<int, kHeadSizes[kIndex].dim> size{};
  if constexpr (size() == kMost || (kLargest > 0 && kLargest <= size())) {
    return f(size);
  } else {
    if constexpr (kLargest == 0) {
      if (dim <= size()) return f(size);
    }
    return with_head_size<kLargest, kMost, kIndex + 1>(dim, f);
  }
}

// kDim: N of attention<N>() and decode<N>().
template <int kDim>
constexpr void check_largest_head() {
  static_assert(kDim >= 0 && kDim <= kMostDim,
                "attention<N>() and decode<N>(): N is the largest head that is called with, from 1 to 576, or 0 for "
                "heads of any size");
}
// Multiples of 8 up to 256, for which there are tiles, and the larger sizes of existing models.
inline Status check_head_dims(int64_t dim, int64_t v_dim) {
  const auto ordinary = [](int64_t d) { return d > 0 && d <= 256 && d % 8 == 0; };
  if (dim < 1) return invalid("dim is less than 1");
  if (v_dim < 1) return invalid("v_dim is less than 1");
  if (!ordinary(dim) && dim != 512 && dim != 576)
    return unsupported("dim is no multiple of 8 up to 256, nor 512 or 576");
  if (!ordinary(v_dim) && v_dim != 512) return unsupported("v_dim is no multiple of 8 up to 256, nor 512");
  return {};
}
namespace why_not {
inline constexpr const char* filled =
    "heads are filled up with zeros: there are kernels for 64, 128, 256 and 576 columns";
}  // namespace why_not

}  // namespace detail
KERNELS_END
