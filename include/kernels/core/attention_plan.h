// AttentionPlan: how a call of attention would run, and why it does not run faster. attention_plan() and decode_plan() fill it in.
#pragma once

#include <cstdint>

#include "macros.h"

KERNELS_BEGIN

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
  int tile_rows = 0, tile_keys = 0;    // of a block, and of a step of its loop
  int tile_dim = 0, tile_v_dim = 0;    // columns of heads that the kernel is made for
  bool heads_together = false;         // whether the rows of a tile are queries of all heads that share keys
  int64_t blocks = 0;
  int splits = 0;                      // parts that the keys of a sequence are cut in; 0: decode() finds out on the device; attention() has one
  // Columns in one access to memory. 1: element by element.
  int query_pack = 0, key_pack = 0, value_pack = 0, result_pack = 0;
  const char* why_not = "";            // why this is not the fastest there is, or ""
};

KERNELS_END
