// When decode() takes its kernel for short sequences.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Tiles of 16 keys that a warp of that kernel goes through, at most: it waits for memory once for each. Measured on an
// H200 (CUDA 13.0, 2026-11), bench/decode and, in early chains, bench/step, in microseconds of a call or of a layer.
// 8 heads of 128 columns, clusters of 8: 1,024 keys, one tile, took 6.4 (with the kernel for long sequences 8.3), 4,096
// keys, four tiles, 11.3 (11.7) and a layer of Mistral-7B 117 (121); 8,192 keys, eight tiles, 17.3 (15.2) and 123
// (124). 16 sequences of 1,024 keys, a block for each of their heads and eight tiles, took 22.4 (20.9). Keys that are
// prefetched into the L2 two to eight tiles ahead, or before the kernel ahead has ended, gained nothing: 11.7 to 13.9
// for 4,096 keys, and layers of 117 to 119.
constexpr int kShortTiles = 4;

}  // namespace tuning
KERNELS_END
