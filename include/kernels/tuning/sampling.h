// How many blocks share a row of logits.
#pragma once

#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Measured on an H200 (bench_sampling, 128,256 floats, CUDA 13.0, 2026-11; 1, 8, 64 and 256 rows): a read takes 1.5, 2.4, 8.7 and 29.6 us,
// greedy 4.0, 4.8, 12.2 and 34.6, top-k 50 and top-p 0.9 8.2, 10.7, 16.4 and 41.2. All rows run at once: 62 clusters of 4 blocks are
// resident (Nsight Compute). With clusters of 4 for 64 rows, and more passes, greedy took 36.6; what each change saved was not measured
// alone.
// More blocks for a row than these give a block less to read than it takes them to meet.
constexpr int64_t kSampleBlocksPerMultiprocessor = 2, kSampleTokensPerBlock = 4096;
// What a block keeps of a row that is read again: with more only one block is resident on a multiprocessor. Plain draws from 256 rows took
// 149 us with clusters of 4, which keep half of a row, and 184 with clusters of 8, which keep all; each row costs a warp about 1,000
// instructions beside its tokens' (Nsight Compute).
constexpr size_t kSampleKeptBytes = 65536;

}  // namespace tuning
KERNELS_END
