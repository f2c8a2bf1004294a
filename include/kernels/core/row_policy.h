// RowPolicy: where softmax, layernorm or rmsnorm keeps a row between its two passes.
//
// Without a policy the tuning table chooses. Set the fields that matter and leave the others 0:
//
//   k::softmax(ex, in, out, rows, cols, k::RowPolicy{k::Residency::registers, /*threads*/ 256, /*cluster*/ 2});
//
// A policy that cannot serve the row is refused with the reason, never replaced.
#pragma once

#include <cstdint>

#include "status.h"

KERNELS_BEGIN

enum class Residency {
  automatic,
  group,  // registers of 1 to 32 lanes of a warp
  registers,  // registers of a block, or of the blocks of a cluster
  shared,  // shared memory of a block, or of the blocks of a cluster; what does not fit is read twice
  streamed,  // nowhere: the row is read twice
  split,  // nowhere, and many blocks share a row: two launches, needs a workspace; for code without clusters
};

struct RowPolicy {
  Residency residency = Residency::automatic;
  int threads = 0;         // per row in a group (a power of two up to 32), per block otherwise (a multiple of 32)
  int cluster = 1;         // blocks that share a row through distributed shared memory (sm_90): 1, 2, 4, 8 or 16
  int max_pack = 0;        // an upper limit on the pack width; 0: none
  int64_t max_blocks = 0;  // an upper limit on the grid; 0: none. Results do not depend on it
  // A row's results have the same bits however many rows there are and whichever row it is, for equal columns, types,
  // strides, alignment and GPU. Few long rows, which more blocks would otherwise share, take longer; and rows that
  // begin at different offsets from multiples of 16 bytes are moved element by element. Not with split.
  bool batch_invariant = false;
};

// What a call does: the policy with every field set.
struct RowPlan {
  RowPolicy policy;
  int pack = 0;       // elements per memory transaction
  int chunks = 1;     // blocks per row when split
  int width = 0;      // columns per block
  int warp_width = 0; // columns per warp
  int count = 0;      // group, registers, streamed: packs per thread, where all have the same number
  int kept = 0;  // of the steps of a thread through its part of the row: those kept in shared memory
  bool ends =
      false;  // whether packs begin at each row's first aligned address, with single elements at both ends
  const char* why_not = "";  // why packs are not the widest, or are split when written; or ""
};

namespace detail {
namespace why_not {
inline constexpr const char* limited = "the policy limits the width of packs";
inline constexpr const char* narrow = "one of the functors takes single elements only";
inline constexpr const char* unknown =
    "rows or columns are no multiples of 16 bytes, and one of the functors does not say that it takes packs at any column: see takes_any_column in core/concepts.h";
inline constexpr const char* whole_only =
    "rows or columns are no multiples of 16 bytes, and where the policy wants a row packs would have to be";
inline constexpr const char* short_rows =
    "rows or columns are no multiples of 16 bytes, and rows are too short to cut them where they are";
inline constexpr const char* by_place =
    "rows begin differently between multiples of 16 bytes, and with batch_invariant all are cut alike";
inline constexpr const char* apart =
    "rows of in and out lie so differently between multiples of 16 bytes that not even 4 bytes of them could be written at once";
inline constexpr const char* pieces =
    "rows of in and out lie differently between multiples of 16 bytes: they are written in narrower pieces";
}  // namespace why_not
}  // namespace detail

inline const char* to_string(Residency residency) {
  switch (residency) {
    case Residency::automatic: return "automatic";
    case Residency::group: return "group";
    case Residency::registers: return "registers";
    case Residency::shared: return "shared";
    case Residency::streamed: return "streamed";
    case Residency::split: return "split";
  }
  return "?";
}

KERNELS_END
