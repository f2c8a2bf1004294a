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
  int walk;            // rows that a block stays for
  int rows_per_group;
};

// Elements are counted in 4-byte compute values; double rows count twice.
constexpr RowTuning kRows[] = {
    {64, Residency::group, 8, 1, 1, 1},
    {512, Residency::group, 32, 1, 1, 1},
    {1024, Residency::group, 32, 1, 1, 1},
    {8192, Residency::registers, 32, 1, 1, 1},
    {16384, Residency::registers, 32, 1, 4, 1},
    {32768, Residency::registers, 32, 2, 4, 1},
    {65536, Residency::registers, 32, 4, 4, 1},
    {131072, Residency::registers, 32, 8, 4, 1},
};

// The same for GPUs without clusters.
constexpr RowTuning kRowsWithoutClusters[] = {
    {64, Residency::group, 8, 1, 1, 1},
    {1024, Residency::group, 32, 1, 1, 1},
    {8192, Residency::registers, 32, 1, 1, 1},
    {16384, Residency::registers, 32, 1, 4, 1},
};

// Threads per group block and per block of the paths that stream.
constexpr int kGroupBlock = 128;
constexpr int kStreamThreads = 256;

// Few rows: below this many blocks per multiprocessor a row is shared by more blocks, but not by so many that one has
// fewer than kFewRowsElements of it.
constexpr int kFewRowsElements = 2048;
constexpr int kFewRowsPerThread = 8;
constexpr int kMaxChunks = 256;

}  // namespace tuning
KERNELS_END
