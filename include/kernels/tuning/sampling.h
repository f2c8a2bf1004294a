// How many blocks share a row of logits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Measured on an H200 (bench_sampling, 128,256 floats, CUDA 13.0, 2026-11; 1, 8, 64 and 256 rows): a read takes 1.5, 2.3, 8.6 and 29.8 us,
// greedy 3.5, 4.9, 10.9 and 34.5, top-k 50 and top-p 0.9 8.0, 10.7, 16.3 and 41.6, a plain draw 13.4, 18.7, 34.7 and 104, top-p 0.9 alone
// 18.4, 26.4, 69.7 and 222. All rows run at once: of blocks that keep their rows 30 clusters of 8 are resident (Nsight Compute), and with
// clusters of 4 or 8 that took turns a plain draw from 256 rows took 149 or 184. With clusters of 3 for 64 rows top-k took 18.5.
// More blocks for a row than these give a block less to read than it takes them to meet.
constexpr int64_t kSampleBlocksPerMultiprocessor = 2, kSampleTokensPerBlock = 4096;
// What a block keeps of a row that is read again: with more only one block is resident on a multiprocessor.
constexpr size_t kSampleKeptBytes = 65536;

}  // namespace tuning
KERNELS_END
