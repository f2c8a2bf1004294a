// MatmulPolicy: which kernel computes a product, and how. MatmulPlan: what a call does. Without a policy the sizes and
// types of the operands decide. A policy that cannot serve the call is refused with the reason, never replaced.
#pragma once

#include "macros.h"

KERNELS_BEGIN

// Which kernel computes a product.
enum class Path {
  automatic,
  gemv,    // CUDA cores, each row of weights in one go: one token; a few with float and double weights
  skinny,  // tensor cores, a few tokens: weights of 16, 8 and 4 bits
  gemm,    // tensor cores, tiles: wgmma in code for sm_90a, mma.sync otherwise
  simt,    // CUDA cores, tiles: float and double weights
};

inline const char* to_string(Path path) {
  switch (path) {
    case Path::automatic: return "automatic";
    case Path::gemv: return "gemv";
    case Path::skinny: return "skinny";
    case Path::gemm: return "gemm";
    case Path::simt: return "simt";
  }
  return "?";
}

struct MatmulPolicy {
  Path path = Path::automatic;
  // The tile of the gemm path, in tokens x rows of weights (with a gate, half as many outputs). 0: chosen by the
  // library.
  // - Inputs and weights of the same 16-bit type in memory: 64 or 128 x 128, or 128 x 256.
  // - If TMA copies the weights (code for sm_90a), also 96, 160 and 192 x 128, 160 and 192 x 256, and without a gate 64
  //   and 96 x 64. 192 needs inputs that TMA copies as well; 160 does not combine with functors that read much
  //   (docs/matmul.md).
  // - Weights of 8 and 4 bits that code for sm_90a decodes on the way: 32 or 64 x 128, or 128 x 256.
  int tile_tokens = 0, tile_rows = 0;
  // With Exec::programmatic(): promises that the kernel ahead in the stream does not write the weights (or scales, or
  // ids of experts), so they can be prefetched while it runs. Earlier kernels have ended by then and may have written
  // them.
  bool weights_ready = false;
  // For inputs and weights of e4m3: the tensor cores accumulate over all of K, with some 14 bits of precision, which
  // takes less time. By default they accumulate over 128 columns, and these partial sums are added in float. No effect
  // on other products, or with scales for fewer columns than K.
  bool fast_sums = false;
  // A token's results have the same bits whatever M is and whichever row the token is in: the same tiles for any number
  // of tokens, and no split-K. Takes the gemm or the simt path (gemv if weights differ from token to token), which
  // reads the weights of few tokens slower.
  bool batch_invariant = false;
  // For the gemm path. 1: a block multiplies one tile at a time. 2: a persistent kernel whose two groups of warps take
  // turns at tiles: one multiplies while the other passes its sums to the sink. It needs code for sm_90a, inputs and
  // weights copied by TMA, and tiles of 128 or 192 tokens x 128 with 16 bits, or 128 x 128 with int8, or with e4m3 and
  // fast_sums. 0: chosen by the library.
  int tiles_at_once = 0;
};

// What a call does: the policy with every field set.
struct MatmulPlan : MatmulPolicy {
  int input_pack = 0, weight_pack = 0;  // columns in one access to memory; 1: as few as possible
  bool inputs_rounded = false, weights_rounded = false;  // to 16 bits, in the workspace, by a kernel ahead
  int splits = 1;                       // split-K: blocks that share a tile of the gemm path
  bool weights_copied = false;          // to shared memory as they are stored, several steps ahead
  bool in_eight = false;                // x and w are multiplied as 8-bit codes
  bool results_by_tma = false;          // from shared memory, while the next tile is multiplied
  const char* why_not = "";             // why this is not the fastest path for this M, or ""
};

KERNELS_END
