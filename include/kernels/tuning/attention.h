// Decoding: when decode() takes its kernel for short sequences, and how much a warp takes at a time.
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

// Up to how many keys, if the caller says that there are no more (with more than 16 rows of 128 columns also if nothing
// is said), decode() has two tiles instead of one of twice as many rows, where all tiles run at once: they read keys
// together, and more blocks wait for memory. H200 (CUDA 13.0, 2026-11, by a program that was not kept), 32 heads over
// 8, half, two tiles of 8 rows and one of 16: 4 queries on 1,024 keys 8.8 and 12.1 us, 2,048 of 8 sequences 21.2 and
// 26.6, 32,768 39.8 and 42.2, 131,072 171 and 130; of 64 columns 8.6 and 9.5, 12.8 and 17.2, 23.5 and 25.4, 76 and 70.
// With 8 queries of 64 columns two tiles of 16 rows and one of 32, of two teams: 8,192 keys 14.8 and 20.5, 131,072 107
// and 101. Three or four tiles instead of two took longer.
constexpr int kKeysOfTwoTiles = 32768;

// Bytes of keys and values that a warp takes at a time, at most, unless 16 keys have more. On an H200 (CUDA 13.0,
// 2026-11, a program that was not kept), 64 sequences of 4,096 keys, 8 heads of 128 columns, with 16, 32 and 64 keys of
// int4 at a time: 142, 118 and 108 us, and with one sequence 11.6, 10.6 and 11.4; 16 and 32 of e4m3 134 both.
constexpr int kDecodeStageBytes = 8 << 10;

// Where two heads of keys share a tile of queries: parts that the keys of a sequence are cut into, at most, with 4 bits
// and with 8. In more parts each has twice as many rows to leave and to merge, and with 8 bits a head fills a line of
// memory by itself. The same as above, two heads and one head at a time: int4, 64 sequences of 4,096 keys 86 and 107
// us, 16 of 8,192 49 and 55, and, by code that decoded 4 bits in fewer instructions, one of 4,096 13.8 and 12.4; e4m3,
// which is always taken one head at a time by now, 64 sequences of 4,096 keys 127 and 130, 16 39.5 and 36.8.
constexpr int kPairParts4 = 4, kPairParts8 = 1;

// Steps by which entries of page tables are prefetched. The same, half in pages of 16: 251.7 us with 2 or 4, 258.0
// without.
constexpr int kTableStepsAhead = 2;

}  // namespace tuning
KERNELS_END
