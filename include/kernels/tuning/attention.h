// Tuning of decode(): when it uses the kernel for short sequences, how keys are split, and how much a warp loads at
// once.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// The most tiles of 16 keys that a warp of the kernel for short sequences processes: with clusters of 8 or 16 blocks,
// with two tiles of rows, and otherwise. H200 (CUDA 13.0, 2026-11), bench/decode and, in early chains, bench/step;
// microseconds of a call or of a layer, in brackets those of the kernel for long sequences.
// - 8 heads of 128 columns, clusters of 8: 1,024 keys (one tile) took 6.5 (8.3); 4,096 keys (four tiles) 10.8 (11.7),
//   and a layer of Mistral-7B 115 (119 to 121); 8,192 keys (eight tiles) 15.8 (15.2), but a layer of Mistral-7B 120
//   (123) and of Llama-1B 49.4 (51.1); 16,384 keys (16 tiles) 25.6 (23.2).
// - 128 heads, a block for each: 1,024 keys (eight tiles) 21.8 (20.7).
// - One tile in flight instead of two: 11.3 for 4,096 keys, 17.3 for 8,192. Prefetching keys into the L2 in addition,
//   two to eight tiles ahead or before the kernel ahead has ended, gained nothing: 11.7 to 13.9 for 4,096 keys.
// - Clusters of 16 and of 8: with 2 heads 4,096 keys took 10.2 and 11.5, 8,192 12.7 and 16.6, 16,384 17.5 (the kernel
//   for long sequences 17.1); with 4 heads 4,096 keys 11.0 and 11.8, 8,192 13.8 and 16.6. Clusters of 16 for 8 heads do
//   not all run at the same time.
// - More than 8 rows, in tiles of 8, each with its own clusters, which read the same keys from the L2; 32 heads over 8.
//   Two tiles of rows (4 queries): 1,024 keys (one tile of keys) 7.9 (9.6), 2,048 (two) 10.6 (10.8), 8 sequences of 512
//   (four) 11.6 (9.5). Four tiles of rows (8 queries): 1,024 keys (two) 10.4 (13.4), 4 sequences of 512 (four) 10.7
//   (14.2), 2,048 keys (four) 14.8 (14.7).
constexpr int kShortTilesOfCluster = 8, kShortTilesOfTwo = 2, kShortTiles = 4;

// Up to this number of keys decode() uses two tiles instead of one of twice as many rows, if the caller says that there
// are no more keys (with more than 16 rows of 128 columns also if the caller says nothing) and all tiles run at the
// same time. The two tiles read the same keys at the same time, and more blocks have loads in flight. H200 (CUDA 13.0,
// 2026-11), 32 heads over 8, half, microseconds with two tiles of 8 rows and with one of 16:
// - 4 queries of 128 columns: 1,024 keys 8.8 and 12.1, 2,048 keys of 8 sequences 21.2 and 26.6, 32,768 keys 39.8 and
//   42.2, 131,072 keys 171 and 130. The same with 64 columns: 8.6 and 9.5, 12.8 and 17.2, 23.5 and 25.4, 76 and 70.
// - 8 queries of 64 columns, two tiles of 16 rows and one of 32 with two teams: 8,192 keys 14.8 and 20.5, 131,072 107
//   and 101.
// - Three or four tiles took longer than two.
constexpr int kKeysOfTwoTiles = 32768;

// The most bytes of keys and values that a warp loads at a time, unless 16 keys have more. H200 (CUDA 13.0, 2026-11), 8
// heads of 128 columns, with 16, 32 and 64 keys of int4 at a time: 64 sequences of 4,096 keys 142, 118 and 108 us, one
// sequence 11.6, 10.6 and 11.4; e4m3 with 16 and 32 keys at a time 134 both.
constexpr int kDecodeStageBytes = 8 << 10;

// If two heads of keys share a tile of queries: the most parts into which the keys of a sequence are split, with 4 bits
// and with 8. With more parts, each of them has twice as many rows to write and to merge; and with 8 bits a head fills
// a cache line by itself. Same GPU, two heads and one head at a time: int4, 64 sequences of 4,096 keys 86 and 107 us,
// 16 of 8,192 49 and 55, and (with code that decodes 4 bits in fewer instructions) one of 4,096 13.8 and 12.4;
// e4m3, which now always takes one head at a time, 64 sequences of 4,096 keys 127 and 130, 16 sequences 39.5 and 36.8.
constexpr int kPairParts4 = 4, kPairParts8 = 1;

// Steps by which entries of page tables are prefetched. Same GPU, half in pages of 16: 251.7 us with 2 or 4, 258.0
// without prefetch.
constexpr int kTableStepsAhead = 2;

}  // namespace tuning
KERNELS_END
