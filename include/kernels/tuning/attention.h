// When decode() takes its kernel for short sequences.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Tiles of 16 keys that a warp of that kernel goes through, at most: it waits for memory once for each.
constexpr int kShortTiles = 4;

}  // namespace tuning
KERNELS_END
