// Tuning of the row engine: the first entry that a row fits into is taken.
#pragma once

#include "../core/row_policy.h"

KERNELS_BEGIN
namespace tuning {

struct RowTuning {
  int64_t max_cols;
  Residency residency;
  int elements;        // of a row per thread
  int cluster;
  int rows_per_group;
  int walk;            // rows that a block stays for
  int long_walk;       // the same for ops that say so (LayerNorm)
};

// Measured on an H200 (CUDA 13.0, driver 580) with bench_row_sweep: softmax and LayerNorm with weights of halves, 49,152
// rows, cold cache. What decided: below 768 columns 32 values a lane beat smaller tiles by 5 to 10 % of the copy bandwidth;
// above, one block of up to 768 threads beats clusters until the row no longer fits it; LayerNorm gains 1 to 5 % when a
// small block stays for several rows. Without clusters the entries that ask for them are passed over. Elements are counted in
// 4-byte compute values; double rows count twice.
constexpr RowTuning kRows[] = {
    {32, Residency::group, 8, 1, 1, 1, 1},
    {64, Residency::group, 8, 1, 1, 2, 2},
    {512, Residency::group, 32, 1, 1, 1, 2},
    {768, Residency::registers, 32, 1, 1, 2, 2},
    {1024, Residency::registers, 32, 1, 1, 1, 2},
    {1536, Residency::registers, 32, 1, 1, 2, 4},
    {16384, Residency::registers, 32, 1, 1, 1, 1},
    {24576, Residency::registers, 32, 1, 1, 1, 2},
    {32768, Residency::registers, 32, 4, 1, 16, 16},
    {65536, Residency::registers, 32, 8, 1, 16, 16},
};

// Threads per group block and per block of the paths that stream.
constexpr int kGroupBlock = 128;
constexpr int kStreamThreads = 192;
constexpr int kStreamThreadsLong = 256;  // for more than kStreamLong columns a block
constexpr int kStreamLong = 16384;

// Few rows: a row is shared by more blocks, but none gets fewer than kFewRowsElements of it.
constexpr int kFewRowsElements = 2048;
constexpr int kFewRowsPerThread = 32;
constexpr int kMaxChunks = 256;

}  // namespace tuning
KERNELS_END
