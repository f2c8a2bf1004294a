// Tuning of the row engine: the first entry that a row fits into is taken.
//
// Measured on an H200 (132 multiprocessors, CUDA 13) with bench/row_sweep.cu: softmax, LayerNorm and RMSNorm of halves,
// 49,152 rows of 32 to 32,768 columns and fewer of up to 262,144, and of few rows of floats;
// bench/results/h200/row_sweep.txt has the timings. A row is held in registers where one warp can hold it, or where
// every thread of a block can have the same number of packs; other rows are streamed.
#pragma once

#include "../core/row_policy.h"

KERNELS_BEGIN
namespace tuning {

constexpr int64_t kAnyLength = int64_t(1) << 62;

struct RowTuning {
  int64_t max_packs;  // 16-byte packs in a row
  Residency residency;
  int packs;          // per thread
  int packs_once;     // the same for ops that look at a value once before they know the row (core/row_op.h)
  int cluster;
};

constexpr RowTuning kRows[] = {
    {64, Residency::group, 2, 2, 1},
    {1024, Residency::registers, 4, 4, 1},
    {1536, Residency::streamed, 8, 6, 1},
    {2048, Residency::registers, 4, 4, 1},
    {4096, Residency::streamed, 8, 8, 1},
    {8192, Residency::streamed, 16, 8, 1},
    {16384, Residency::shared, 16, 16, 1},
    {kAnyLength, Residency::shared, 16, 16, 8},
    {kAnyLength, Residency::streamed, 16, 16, 1},  // without clusters
};

// Rows that do not begin or end at multiples of 16 bytes are moved in wide packs from so many of these on, and in
// single elements below. Estimated from what either takes in instructions.
constexpr int kEndsPacks = 32;

// Of those, rows with no more packs for each lane of a warp are held in its registers, longer ones streamed; and ops
// that look at a value once take so many packs of a row of more than kEndsWarp to a thread. On an H200 (the policies of
// bench/row_sweep.cu's `odd`), 4,096 rows of halves, us in groups and streamed by a warp: 1,023 columns, softmax 6.97
// and 6.81, RMSNorm 7.17 and 7.13, LayerNorm 9.83 and 8.64; and of 4,097 columns by threads of 4 and of 8 packs,
// RMSNorm 21.8 and 21.2, LayerNorm 26.4 and 25.1.
constexpr int kEndsHeld = 3, kEndsWarp = 128, kEndsOnce = 8;

// Threads per group block.
constexpr int kGroupBlock = 128;

// Few rows: a row of more than twice as many is shared by more blocks, but none gets fewer than kFewRowsElements of it.
// One row of 4,096 floats between products, a layer of 7B with e4m3 (bench/step): 65.4 us by one block of 256
// threads, 65.8 of 512, 66.5 of 1,024; 67.0 by two of 128.
constexpr int kFewRowsElements = 2048;
constexpr int kFewRowsThreads = 768;  // per multiprocessor
constexpr int kMaxChunks = 256;

}  // namespace tuning
KERNELS_END
