// Tuning of sampling: how many blocks share a row of logits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// H200 (bench_sampling, 128,256 floats, CUDA 13.0, 2026-11), microseconds with 1, 8, 64 and 256 rows: a read takes 1.5,
// 2.5, 8.8 and 30.0, greedy 3.1, 4.4, 10.8 and 34.7, top-k 50 with top-p 0.9 7.3, 9.3, 15.6 and 40.7, a plain draw
// 13.6, 18.9, 34.7 and 103, top-p 0.9 alone 18.6, 26.7, 69.3 and 220. All rows run at the same time: 132 clusters of 2
// are resident, 79 of 3, 62 of 4, 30 of 8 and 14 of 16; with clusters of 4 or 8, which do not all fit, a plain draw
// from 256 rows took 149 or 184. With 64 rows, which get clusters of 2, top-k took 18.5 with clusters of 3, and greedy
// 13.4 with the row prefetched into the L2. More blocks for a row would spend more time synchronizing than they save in
// reading.
constexpr int64_t kSampleBlocksPerMultiprocessor = 2, kSampleTokensPerBlock = 4096;
// The bytes of a row that a block keeps in shared memory if it reads the row again. With more, only one block is
// resident on a multiprocessor.
constexpr size_t kSampleKeptBytes = 65536;

}  // namespace tuning
KERNELS_END
