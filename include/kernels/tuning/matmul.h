// Tuning of products. Measured on an H200 (CUDA 13.0, 2026-11) with bench/matmul_sweep; each line says what else was tried.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Rows of weights that a block of the gemv path makes, and its threads at most. 16-bit weights: 1 to 8 rows and 32 to 512 threads
// with 1 to 8 packs of each under way differ by up to 10 %. A normalized input costs every block its statistics.
constexpr int kGemvRows = 2, kGemvRowsNormed = 4, kGemvThreads = 256;
// The same with tensor cores, and weights of 8 or 4 bits.
constexpr int kSkinnyRows = 4, kSkinnyThreads = 128;

// Up to how many tokens each path is taken.
constexpr int kGemvTokens = 4;
constexpr int kSkinnyTokens = 2;

}  // namespace tuning
KERNELS_END
