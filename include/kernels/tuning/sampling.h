// How many blocks share a row of logits.
#pragma once

#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Expected on an H200 (128,256 floats, top-k 50 and top-p 0.9): 1 row 7 us, 64 rows 12 us, 256 rows 35 us. Measured (bench_sampling, CUDA 13.0,
// 2026-11): 16.3, 42.7 and 78.1 us, greedy 11.0, 36.6 and 63.1, where a read takes 1.5, 8.7 and 29.6. Time that grows with rows and not with
// the vocabulary (64 rows of 32,000: greedy 22.5 us, read 3.5) is not what more blocks or more loads would save; other numbers of blocks
// were not tried.
// More blocks for a row than these give a block less to read than it takes them to meet.
constexpr int64_t kSampleBlocksPerMultiprocessor = 2, kSampleTokensPerBlock = 4096;

}  // namespace tuning
KERNELS_END
