// Tuning of copy(): how its work is distributed among threads and blocks.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Bytes that a thread loads before it uses the first. H200 (CUDA 13.0, 2026-11), bench_elementwise, 16,384 x 16,384
// halves: GELU took 256 us with 64 bytes, 284 with 32, 312 with 16; SwiGLU, with two operands, 367 us with 64 bytes,
// 436 with 32, 400 with 128.
constexpr int kBytesInFlight = 64;
// If there is too little work for this number of blocks on each multiprocessor, threads take fewer packs at a time.
constexpr int kBlocksEach = 8;

}  // namespace tuning
KERNELS_END
