// Tuning of decode(): when it uses the kernel for short sequences, how keys are split, and how much a warp loads at
// once.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Tiles of 16 keys that a warp of that kernel goes through, at most: in clusters of 8 or 16 blocks, and in smaller
// ones. Measured on an H200 (CUDA 13.0, 2026-11), bench/decode and, in early chains, bench/step, in microseconds of a
// call or of a layer; with the kernel for long sequences in brackets. 8 heads of 128 columns, clusters of 8: 1,024
// keys, one tile, took 6.5 (8.3); 4,096 keys, four tiles, 10.8 (11.7), and a layer of Mistral-7B 115 (119 to 121);
// 8,192 keys, eight tiles, 15.8 (15.2), but a layer of Mistral-7B 120 (123) and of Llama-1B 49.4 (51.1); 16,384 keys,
// 16 tiles, 25.6 (23.2). A block for each of 128 heads: 1,024 keys, eight tiles, 21.8 (20.7). One tile on its way
// instead of two: 11.3 for 4,096 keys, 17.3 for 8,192. Keys that are prefetched into the L2 besides, and not to
// registers, two to eight tiles ahead or before the kernel ahead has ended, gained nothing: 11.7 to 13.9 for 4,096
// keys. 2 heads, clusters of 16 and of 8: 4,096 keys 10.2 and 11.5, 8,192 12.7 and 16.6, 16,384 17.5 (the kernel for
// long sequences 17.1); 4 heads 11.0 and 11.8, 13.8 and 16.6. Clusters of 16 for 8 heads do not all run at once.
//
// With more than 8 rows (queries times heads that share keys) each 8 rows are a tile with clusters of its own, which
// read the same keys from the L2. The same chip, 32 heads over 8, in brackets the kernel for long sequences: two tiles,
// 4 queries, 1,024 keys, one tile of keys 7.9 us (9.6); 2,048, two, 10.6 (10.8); 8 sequences of 512, four, 11.6 (9.5).
// More, 8 queries, 1,024 keys, two 10.4 (13.4); 4 sequences of 512, four, 10.7 (14.2); 2,048, four, 14.8 (14.7).
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
