// MatmulPolicy: which kernel makes a product, and how; MatmulPlan: what a call does. Leave the policy out and the sizes
// and types of the operands decide. A policy that cannot serve the call is refused with the reason, never replaced.
#pragma once

#include "macros.h"

KERNELS_BEGIN

// Which kernel makes a product.
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
  // The tile of the gemm path: 64 or 128 tokens x 128 rows of weights, half as many outputs with a gate, or 128 x 256,
  // for inputs and weights of the same 16-bit type in memory; 0: as it is best. Where the TMA unit copies weights, in
  // code for sm_90a, 96, 160 and 192 tokens x 128 (192 for inputs that it copies, too, 160 not with functors that read
  // much), 160 x 256, and, without a gate, 64 and 96 x 64 as well (docs/matmul.md).
  // Weights of 8 and 4 bits that code for sm_90a decodes on their way have 32 or 64 tokens x 128 rows, or 128 x 256.
  int tile_tokens = 0, tile_rows = 0;
  // With Exec::programmatic(): that the kernel ahead in the stream does not write the weights (or scales, or the ids of
  // experts). Then they are prefetched while it is still running. Kernels ahead of that one have ended, and may have
  // written them.
  bool weights_ready = false;
  // Of inputs and weights of e4m3: the tensor cores add up all of K by themselves, and keep some 14 bits of such sums,
  // which takes less time. Otherwise they add up 128 columns, and what comes of these is added up in floats.
  // Changes nothing of other products, nor with scales that are for fewer columns than K.
  bool fast_sums = false;
  // A token's results have the same bits whatever M is and whichever row the token has: tiles for any number of tokens,
  // blocks never share K. Takes the gemm or the simt path (gemv for weights that differ from token to token), which
  // read few tokens' weights slower.
  bool batch_invariant = false;
  // Of the gemm path. 1: a tile has blocks of its own; 2: blocks stay, and their two groups of warps take turns at
  // tiles, one multiplying while the other's sums go to the sink: in code for sm_90a, where the TMA unit copies inputs
  // and weights, 128 or 192 tokens x 128 of 16 bits, 128 x 128 of int8, or of e4m3 with fast_sums; 0: as it is best.
  int tiles_at_once = 0;
};

// What a call does: the policy with all that it leaves open filled in.
struct MatmulPlan : MatmulPolicy {
  int input_pack = 0, weight_pack = 0;  // columns in one access to memory; 1: as few as there must be
  bool inputs_rounded = false, weights_rounded = false;  // to 16 bits, in the workspace, by a kernel ahead
  int splits = 1;                       // of K, among the blocks that share a tile of the gemm path
  bool weights_copied = false;          // to shared memory as they lie, several steps ahead
  bool in_eight = false;                // x and w are multiplied as codes of 8 bits
  const char* why_not = "";             // why this is not the fastest path for this M, or ""
};

KERNELS_END
