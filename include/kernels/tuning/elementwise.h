// How copy() shares out its work.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// So many bytes a thread has in flight before it uses the first. Measured on an H200 (CUDA 13.0, 2026-11) by
// bench_elementwise, 16,384 x 16,384 halves: GELU with 64 bytes 256 us, 32 284, 16 312; SwiGLU, of two operands, with
// 64 bytes 367 us, 32 436, 128 400.
constexpr int kBytesInFlight = 64;
// Where there is not enough work for so many blocks on each multiprocessor, threads take fewer packs at a time.
constexpr int kBlocksEach = 8;

}  // namespace tuning
KERNELS_END
