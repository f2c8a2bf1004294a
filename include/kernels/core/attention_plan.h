// DecodeMode: which arithmetic decode() uses. AttentionPlan: how an attention call would run, and why not faster;
// attention_plan() and decode_plan() fill it in.
#pragma once

#include <cstdint>

#include "macros.h"

KERNELS_BEGIN

// Which arithmetic decode() uses.
enum class DecodeMode {
  automatic,  // precise if possible, otherwise plain; with more than 8 rows over latents (docs/decode.md): tensor
  plain,  // CUDA cores, all in float
  tensor,  // tensor cores, weights rounded to 16 bits
  precise,  // tensor cores, weights (and queries that are not of the keys' type) in two parts of 16 bits: as good as
            // float
};

// How logits are made, and how weights meet values.
enum class AttentionPath {
  tensor,   // tensor cores, weights rounded to 16 bits
  precise,  // tensor cores, weights in two parts of 16 bits; decode() alone
  plain,    // CUDA cores, all in float
};

inline const char* to_string(AttentionPath path) {
  switch (path) {
    case AttentionPath::tensor: return "tensor";
    case AttentionPath::precise: return "precise";
    case AttentionPath::plain: return "plain";
  }
  return "?";
}

struct AttentionPlan {
  AttentionPath path = AttentionPath::plain;
  bool warpgroups = false;             // whether the kernel is one for sm_90a, whose products are wgmma's
  int tile_rows = 0, tile_keys = 0;    // of a block, and of a step of its loop
  int tile_dim = 0, tile_v_dim = 0;    // columns of heads that the kernel is made for
  bool heads_together = false;         // whether the rows of a tile are queries of all heads that share keys
  int key_heads = 1;                   // of decode(): heads of keys whose rows of queries stand in one tile
  int64_t blocks = 0;
  int splits =
      0;  // parts that the keys of a sequence are cut in, in attention() at most; 0: decode() finds out on the device
  // Columns in one access to memory. 1: as few as there must be.
  int query_pack = 0, key_pack = 0, value_pack = 0, result_pack = 0;
  int box_rows = 0;                    // rows of keys and values in one access of the TMA unit; 0: it is not used
  int result_box_rows = 0;             // the same of results
  const char* why_not = "";            // why this is not the fastest there is, or ""
};

namespace detail {
// What why_not says, in the words of both calls, the gravest first.
namespace why_not {
inline constexpr const char* mode = "the mode asks for CUDA cores";
inline constexpr const char* wide = "keys or values have more than 16 bits, which tensor cores would round";
inline constexpr const char* computed = "the view computes its keys or values";
inline constexpr const char* keys_begin = "keys do not begin at multiples of 16 bytes";
inline constexpr const char* values_begin = "values do not begin at multiples of 16 bytes";
inline constexpr const char* alignment = "the view does not say its alignment(): see kv.h";
inline constexpr const char* keys_end = "keys do not end at multiples of 16 bytes";
inline constexpr const char* values_end = "values do not end at multiples of 16 bytes";
inline constexpr const char* shared = "the code was compiled for a GPU with more shared memory";
inline constexpr const char* target =
    "the code was not compiled for sm_90a without -rdc=true, for which there are faster kernels";
inline constexpr const char* mixed =
    "keys or values of 16 bits have scales, or only one of the two has codes: there is no kernel for sm_90a";
inline constexpr const char* queries = "queries do not begin at multiples of 16 bytes";
inline constexpr const char* results = "results cannot be written in packs of 8 columns";
inline constexpr const char* codes = "keys or values of 8 or 4 bits are decoded on their way";
inline constexpr const char* scale = "the scale is negative, or next to nothing";
inline constexpr const char* boxes =
    "pages do not have a multiple of 8 positions, or blocks or heads are at a distance of 0: the TMA unit does not copy "
    "them";
inline constexpr const char* latents = "values are not the keys' columns from 0 or 64 on";
}  // namespace why_not
}  // namespace detail

KERNELS_END
