// Tuning of the row engine: the first entry of the table into which a row fits applies.
//
// Measured on an H200 (132 multiprocessors, CUDA 13) with bench/row_sweep.cu: softmax, LayerNorm and RMSNorm of halves,
// 49,152 rows of 32 to 32,768 columns and fewer rows of up to 262,144, and of few rows of floats. Timings:
// bench/results/h200/row_sweep.txt. A row is held in registers if one warp can hold it, or if all threads of a block
// get the same number of packs; other rows are streamed.
#pragma once

#include "../core/row_policy.h"

KERNELS_BEGIN
namespace tuning {

constexpr int64_t kAnyLength = int64_t(1) << 62;

struct RowTuning {
  int64_t max_packs;  // 16-byte packs in a row
  Residency residency;
  int packs;          // per thread
  int packs_once;     // the same for ops that read a value once before they know the row (core/row_op.h)
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

// From this number of packs on, rows that do not begin or end at multiples of 16 bytes are moved in wide packs, with
// single elements at both ends; shorter ones are moved in single elements. Estimated from the instructions of either.
constexpr int kEndsPacks = 32;

// Of these rows, those with at most kEndsHeld packs for each lane are held in a warp's registers, and longer ones are
// streamed. Ops that read a value once take kEndsOnce packs of a row of more than kEndsWarp packs for each thread. H200
// (the policies of `odd` in bench/row_sweep.cu), 4,096 rows of halves, us held by groups and streamed by a warp: 1,023
// columns, softmax 6.97 and 6.81, RMSNorm 7.17 and 7.13, LayerNorm 9.83 and 8.64. 4,097 columns with 4 and with 8 packs
// for each thread: RMSNorm 21.8 and 21.2, LayerNorm 26.4 and 25.1.
constexpr int kEndsHeld = 3, kEndsWarp = 128, kEndsOnce = 8;

// Threads in a block of group rows.
constexpr int kGroupBlock = 128;

// Few rows: more blocks share a row of more than twice kFewRowsElements, but each gets at least kFewRowsElements of it.
// One row of 4,096 floats between products, a layer of 7B with e4m3 (bench/step): 65.4 us with one block of 256
// threads, 65.8 with 512, 66.5 with 1,024; 67.0 with two blocks of 128.
constexpr int kFewRowsElements = 2048;
constexpr int kFewRowsThreads = 768;  // per multiprocessor
constexpr int kMaxChunks = 256;

}  // namespace tuning
KERNELS_END
