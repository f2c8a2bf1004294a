// When decode() takes its kernel for short sequences.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Tiles of 16 keys that a warp of that kernel goes through, at most: it waits for memory once for each. Measured on an
// H200 (CUDA 13.0, 2026-11), a token in five launches a layer, 8 heads of keys and clusters of 8: 4,000 keys, which are
// 4 tiles, took Llama-1B 883 us (with the kernel for long sequences 919), Mistral-7B 3,823 (4,336); 120 keys, one tile,
// 793 (833) and 3,782 (4,242). More were not tried.
constexpr int kShortTiles = 4;

}  // namespace tuning
KERNELS_END
