// Tuning of products. Measured on an H200 (CUDA 13.0, 2026-11) with bench/matmul: bench/results/h200/matmul.json.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Rows of weights that a block of the gemv path makes, and its threads at most. 16-bit weights: 1 to 8 rows and 32 to 512 threads
// with 1 to 8 packs of each under way differ by up to 10 %. A normalized input costs every block its statistics, so that
// more rows share them: 4 with RMSNorm took 28.8 instead of 30.1 us (14336 x 4096), 8 with LayerNorm 31.6 instead of 32.4.
constexpr int kGemvRows = 2, kGemvThreads = 256;
constexpr int kGemvRowsNormed = 4;
constexpr int kGemvRowsHeavy = 8, kGemvThreadsHeavy = 128;
// The same with tensor cores, and weights of 8 or 4 bits. 2 to 8 rows, 32 to 512 threads.
constexpr int kSkinnyRows = 4, kSkinnyThreads = 128;

// Up to how many tokens: on CUDA cores, weights that tensor cores would round; on tensor cores, each row of weights in one go,
// before tiles take over (14336 x 4096 bfloat16: 2 tokens 29.3 us, 4 tokens 32.3, a tile of 64 x 128 32.5).
constexpr int kGemvTokens = 4;
constexpr int kSkinnyTokens = 2;

// What a tile costs, in units of one of 64 tokens x 128 outputs: of 128 x 128 and 128 x 256; and what K shared by blocks costs
// besides.
constexpr double kCostOf128x128 = 1.4, kCostOf128x256 = 2.6, kCostOfSharing = 1.1;

}  // namespace tuning
KERNELS_END
