// How many blocks share a row of logits.
#pragma once

#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Not measured yet. Expected on an H200 with a clock of 1.7 GHz, where a multiprocessor has room for two blocks of 512 threads with 8
// loads of 16 bytes each under way:
//   1 row of 128,256 floats, top-k 50 and top-p 0.9, 16 blocks: launch 2, reading 2, three meetings of the cluster 1, list and filters 2: 7 us
//   64 rows, 4 blocks each: a read of 33 MB is 9 us; 3 us more
//   256 rows, a block each: a read of 131 MB is 31 us; 4 us more
// More blocks for a row than these give a block less to read than it takes them to meet.
constexpr int64_t kSampleBlocksPerMultiprocessor = 2, kSampleTokensPerBlock = 4096;

}  // namespace tuning
KERNELS_END
