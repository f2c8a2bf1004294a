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
// where inputs count in full. 16-bit weights stream through shared memory from there to 32 tokens (bfloat16, 14336 x 4096 and
// 4096 x 14336: 2 tokens 30.6 and 29.8 us, 3 tokens 29.6 and 30.8, 16 tokens 30.1 and 31.8, 32 tokens 31.3 and 33.2; a tile of
// 64 x 128 took 32.2 to 33.4 and 35.2 to 36.8).
constexpr int kGemvTokens = 4;
constexpr int kSkinnyTokens = 2;

// Where 16-bit weights stream through shared memory: what rows on the busiest multiprocessor cost, compared to the average, as
// others leave it their share of the bandwidth (14336 rows, 8 tokens: 224 blocks of 64 took 30.0 us, 256 blocks of 56 30.1); and
// what inputs cost, compared to weights (4096 x 4096, 32 tokens: pairs of blocks with 64 rows took 13.2 us, blocks with 32 14.7).
// kSharedBesides: bytes that a block needs besides its stages, at most.
constexpr double kCostOfBusiest = 0.8, kCostOfInputs = 0.25;
constexpr int kSharedBesides = 2 << 10;

// What a tile costs, in units of one of 64 tokens x 128 outputs: of 128 x 128 and 128 x 256; and what K shared by blocks costs
// besides.
constexpr double kCostOf128x128 = 1.4, kCostOf128x256 = 2.6, kCostOfSharing = 1.1;

}  // namespace tuning
KERNELS_END
