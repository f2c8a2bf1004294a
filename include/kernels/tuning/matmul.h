// Tuning of products. Measured on an H200 (CUDA 13.0, 2026-11) by graph replay with rotated weights, as in
// bench/matmul. Figures of rejected variants are from the run in which they were compared.
#pragma once

#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Path gemv: rows of weights for each block, and the most threads of a block, in general and where they load a row at
// once.
//
// 16-bit weights: 1 to 8 rows, 32 to 512 threads, and 1 to 8 packs of each in flight differ by up to 10 %. 14336 x 4096
// took 27.2 us with 512 threads and 27.6 with 256, 4096 x 14336 28.0 and 27.7. Work before the first load and after the
// last one counts: 400 cycles more in every block took 0.9 us.
//
// A normalized input costs every block its statistics and every multiplication its scale, so more rows share them: 4
// rows with RMSNorm took 29.1 us (2: 31.2), 8 with LayerNorm 31.5 (4: 33.5). Alternatives that took longer:
// - Values kept in shared memory for the rows of a whole wave: 29.7 and 30.2 us.
// - Multiplying by gamma on the way and by the row's factor at the end, so that nothing waits for the statistics: gates
//   of a 1B model 23 to 31 us (now 21.2, with a norm in front 21.0), of 8B 86 to 106 (65.8 and 69.1), a head 160 to 200
//   (150 and 125). Gamma and the squares cost as many instructions for each column as two rows of weights, and
//   instructions are the limit.
// - A persistent kernel that computes the statistics once, keeps the inputs in shared memory and finishes rows in a
//   warp of its own: QKV of 8B alone 16.2 us (now 17.1), but between its neighbours a layer of 8B 113 us and of 1B 44.7
//   (110 and 41.1; bench/step), as it leaves no room for blocks of the next kernel to start. 40 registers took 142 and
//   51.4, 64 registers 110 and 42.9, 8 rows 112 and 43.0; what the sink prepares, placed before the statistics or after
//   the products, 110 to 111 and 41.4 to 41.9.
// - Inputs x * gamma written by the residual ahead, with the row's factor multiplied at the end: if this cost nothing,
//   a layer would take 38.5 us at 1B and 110 at 8B. With the squares of x summed by every block it takes 48.9 and 146;
//   with integers that the residual's blocks add up at one address 42.8 and 132, at eight addresses that a warp reads
//   42.9 (1B).
constexpr int kGemvRows = 2, kGemvThreads = 256, kGemvThreadsAtOnce = 512;
constexpr int kGemvRowsNormed = 4;
constexpr int kGemvRowsHeavy = 8, kGemvThreadsHeavy = 128;
// Path skinny (tensor cores), and weights of 8 or 4 bits: 2 to 8 rows, 32 to 512 threads. 8 bits (e4m3): 128 threads
// took 15.8 us, 64 threads 16.3 (14336 x 4096); 15.8 and 17.3 (4096 x 14336). 4 bits (int4 with a scale for 128
// columns), with 128, 64 and 32 threads: 10.3, 11.2 and 15.8 (4096 x 14336); 10.9, 10.9 and 10.0 (14336 x 4096).
constexpr int kSkinnyRows = 4, kSkinnyThreads = 128;
// The same with several scales in 64 bytes of codes: 4 steps for each warp, and two blocks of 14 warps on a
// multiprocessor where rows are that long. int4 with a scale for 32 columns: 4096 x 14336 took 11.2 us with 14 warps,
// 14.2 with 8, 18.1 with 4; 14336 x 4096 11.3 with 4 warps, 12.3 with 8, 16.1 with 14.
//
// What bounds it: gates of 14336 x 4096 among themselves take 20.3 us, reading their bytes 15.7. Without scales (a
// ninth of the bytes) it is 17.7, without inputs 19.4, without both 17.2, without decoding as well 16.0; only reading
// codes and scales takes 18.5. Alternatives: 128 bytes of a row by eight lanes 21.4 to 23.3; codes copied to shared
// memory 21.7 with as many in flight, 22.5 to 27.9 with two or three times as many (e4m3: 29.3 and 29.7 to 32.7, now
// 27.7); the smallest L1 30.5; 80 registers 22.9. Weights that the kernel ahead prefetches into the L2: a layer of 7B
// took 52.2 to 57.1 us with int4 (now 52.0 to 52.6), 65.4 to 70.6 with e4m3 (65.7 to 66.2), 111.0 to 121.1 with half
// (111.6).
constexpr int kFineThreads = 448;

// From this number of tokens on, weights are decoded into a workspace ahead of the product, if there is one: weights
// that would otherwise pass through their functors; codes of 8 and 4 bits; and codes of fp8 with one scale for each
// row. H200 (CUDA 13.0, 2026-11), 14336 x 4096 and 4096 x 14336, microseconds without and with decoding ahead: half
// times a number 269 and 99 with 8 tokens, 6952 and 671 with 4096; int8 with a scale for 64 columns 146 and 144 with
// 512 tokens, 216 and 190 with 768, 954 and 681 with 4096; int4 with a scale for 32 columns 135 and 136, 199 and 181,
// 915 and 685; e4m3 with a scale for each row 110 and 139, 362 and 358 with 2048, 756 and 691 with 4096.
constexpr int kDecodeAheadMappedTokens = 3, kDecodeAheadTokens = 768, kDecodeAheadFloatTokens = 4096;

// kGemvTokens: up to this number of tokens, products run on CUDA cores if tensor cores would round their weights; more,
// with float weights, where tiles would be so few that kSumsOfGemv favours it. kSkinnyTokens: up to this number, tensor
// cores read each row of weights in one go, and inputs count in full. From there to 32 tokens, 16-bit weights stream
// through shared memory: bfloat16, 14336 x 4096 and 4096 x 14336, 2 tokens took 30.6 and 29.8 us, 3 tokens 29.6 and
// 30.8, 16 tokens 30.1 and 31.8, 32 tokens 31.3 and 33.2; a tile of 64 x 128 took 32.2 to 33.4 and 35.2 to 36.8.
constexpr int kGemvTokens = 4;
constexpr int kSkinnyTokens = 2;

// Weights of 8 and 4 bits stream as well, from 2 to 32 tokens, to groups of two warps, each with a ring of its own.
// They are bound by instructions, and by how many warps a scheduler can choose from. So a block has four groups; with 4
// bits it has kCodeGroups if several blocks share a multiprocessor. A ring has three stages with 8 bits and two with 4,
// where a third took 3 % longer.
//
// H200 (CUDA 13.0, 2026-11), microseconds with 8, 16 and 32 tokens, in brackets with one or two groups of four warps
// that had a quarter of the columns each:
// - int4 with a scale for 32 columns: 14336 x 4096 14.3, 16.5, 21.8 (18.0, 20.1, 25.0); 4096 x 14336 14.3, 16.0, 20.1
//   (19.4, 21.3, 25.2), of which a read takes 8.9. Groups of one warp took 18.1, 18.7, 25.8 for the first. Up to 8
//   tokens, sums of 32 columns are multiplied: 12.3, now 14.5 and 18.8 with more.
// - int4 with a scale for 128 columns: 14336 x 4096 14.0, 16.2, 21.1 (14.2, 16.5, 21.6). Up to 16 tokens, scales are
//   now multiplied with sums of 128 columns (Scaling): 11.8, 14.3.
// - int8 with a scale for each row: 17.2, 18.1, 19.7.
//
// Scales do not pass through the L1, as the rings leave little of it (with a scale for 32 columns, 8 tokens: 14336 x
// 4096 12.2 us if they do, now 12.4, but 28672 x 4096 22.6, now 20.1). With six or eight groups instead of four, 4096 x
// 4096 took 6.8 and 6.6 us (5.9), 6144 x 4096 8.0 and 8.4 (7.6), 4096 x 14336 13.4 and 14.2 (12.4). wgmma tiles took
// 18.5 to 19.8 and 22 to 25 with int4. Code for sm_80 on the same GPU, with 64 tokens, where blocks cannot share K
// (earlier code): two blocks of 32 tokens took 37 us and tiles 117 with int8, 4096 x 14336 (half 50 and 113), but 44
// and 38 with 14336 x 4096 (half 61 and 41). With several scales in 64 bytes of codes, two tokens are faster with each
// row in one go (int4 with a scale for 32: 13.3 and 12.8 us).
constexpr int kCodeGroups = 2;
// The time of blocks of such codes, in rows of weights, if each multiprocessor has several: `each` in all, of which
// `together` run at a time, so that there are some rounds. A block and a round begin and end, and warps multiply 32
// rows whether they exist or not. That counts in full where products bound the time (`multiplying`: 4 bits, more than 8
// tokens).
//
// H200 (CUDA 13.0, 2026-12), microseconds for K of 4096, 4 tokens: up to four blocks at a time, and at most two.
//   rows                            14336           20480           28672           37888 (K of 3584)
//   int4, a scale for 128 columns   11.7            14.6 and 20.6   18.6 and 22.4   24.6 and 28.4
//   e4m3, a scale for each row      16.9            23.1 and 27.0   31.0 and 32.8   36.7 and 38.7
//   half (three at a time)          29.9            41.1 and 50.5   57.3            66.1 and 73.2
// Blocks of 40, 48, 56 and 64 rows of int4: 20480 rows, 8 tokens 17.6, 17.6, 14.7, 14.8; 37888 rows, three at a time,
// 8 tokens 30.4, 24.5, 25.0, 25.7, and 16 tokens 40.2, 32.0, 31.7, 28.0.
constexpr double cost_of_rounds(int64_t rounds, int64_t together, int64_t each, int rows, bool multiplying) {
  return multiplying ? double(each) * (64 + 32) + double(rounds) * 64
                     : double(rounds) * (double(together) * (rows + 32) + 64);
}

// Weights that stream through shared memory. kCostOfBusiest: what rows on the busiest multiprocessor cost compared to
// the average, if it has several blocks, as the others leave it their share of the bandwidth (14336 rows, 8 tokens: 224
// blocks of 64 took 30.0 us, 256 blocks of 56 30.1); a block that is alone cannot use more (6144 rows, 8 tokens: 128
// blocks of 48 took 14.8, 110 blocks of 56 15.4). kCostOfInputs: what inputs cost compared to weights (4096 x 4096, 32
// tokens: pairs of blocks with 64 rows took 13.2 us, blocks with 32 rows 14.7). kSharedOverheadBytes: the most bytes
// that a block needs besides its stages.
constexpr double kCostOfBusiest = 0.8, kCostOfInputs = 0.25;
constexpr int kSharedOverheadBytes = 2 << 10;
// From this number of steps of 128 columns on, a block that is alone on its multiprocessor has two groups of warps;
// fewer steps were not measured. A layer of Mistral-7B with 8 and with 32 texts of 1,000 tokens (H200, bench/step,
// 2026-11): 129 and 166 us, with one group 133 and 177; three to six stages for each group take the same. Loading
// weights sooner does not help: 12 layers with 8 texts and the head took 1,647 us (examples/llm); 1,696 and 1,857 if a
// block that waits for the kernel ahead also prefetches 4 or 16 more steps into the L2; 1,787 with room for a block of
// the next kernel beside each block; 1,617 to 1,636 instead of 1,625 with one or two stages in flight until the kernel
// ahead has ended.
constexpr int kStepsOfGroups = 16;

// cost_of_step: the time of a step of a tile, relative to one of 64 tokens x 128 rows. 4096^3 and 14336 x 4096,
// microseconds for a wave of blocks: 64 x 128 26 and 27, 128 x 128 39 and 35, 128 x 256 53 and 52. kBlockOverheadSteps:
// the beginning and end of a block, in steps, if blocks share K. 1024^3 took 10.7 us with 64 x 128 and a block for each
// tile, 12.1 with 128 x 128 and pairs; 4096 x 4096 with 512 tokens 35.3 with 128 x 128, 31.6 with 128 x 256 and pairs.
constexpr double cost_of_step(int tokens, int rows) { return 0.65 + 0.35 / 8192 * tokens * rows; }
constexpr double kBlockOverheadSteps = 16;

// CUDA cores, floats. kCostOfSmallTile: the time of a wave of tiles of 64 x 64 relative to 128 x 128. kSumsOfGemv: sums
// of eight tokens at a time (gemv) that a multiprocessor makes in the time of a wave of 128 x 128. H200 (CUDA 13.0,
// 2026-11), microseconds with 64 x 64 and 128 x 128: 512^3 24 and 62, 100 x 4096 x 4096 187 and 430, 1024^3 79 and 117,
// 2048^3 588 and 456. With gemv and the faster tile: 8, 32 and 64 x 4096 x 4096 23, 82 and 156, tiles 183 to 192;
// 64 x 1024 x 1024 13 and 46; 32 x 14336 x 4096 266 and 285. Four tokens of two rows at a time took 37, 133 and 263 for
// the first three.
constexpr double kCostOfSmallTile = 0.37, kSumsOfGemv = 5500;

// cost_of_tma: a model of a call's time, in microseconds, for tiles whose weights, and mostly inputs, are copied by
// TMA.
// - Steps take as long as their products; with 64 rows and few tokens, the work between products counts.
// - All blocks together get a fixed bandwidth from the L2: more if they run in step, in one wave, so that several ask
//   for the same bytes at a time; less if some share K.
// - Weights come from memory at 79 % of its nominal speed (memory_gbs), or more slowly if blocks are few.
// - The beginning and end of a block take 3.5 us or a little more. Blocks that share K also wait for each other and add
//   up the tile's sums.
// - Inputs that threads copy slow each step a little; inputs that pass through functors have a speed of their own.
//   Results that are stored one by one, as N is not a multiple of 8, take as long as many steps.
//
// Fitted to 78 products of 33 to 1024 tokens (and squares) with every tile, and 1 to 8 blocks that share K (H200, CUDA
// 13.0, 2026-11): the choice takes 0.6 % longer than the fastest on average, and at most 9 %. That device ran 39
// clusters of three at a time, 30 of four, 15 of eight; others differ. The costs of inputs by threads and of single
// results are fitted to 64 to 1024 tokens with 4096, 14336 and 50272 x 768 to 4096: bfloat16 times a number took 0.36
// us for a step of 64 tokens and 0.57 for 128; normalized inputs, or floats, half as long again.
//
// Tiles of 192 x 256 came later, with the same model (H200, CUDA 13.0, 2026-11; in brackets the fastest of the others):
// 14336 x 4096 with 321 tokens 65.7 us (68.6), 384 66.7 (71.8), 512 102 (106), 768 147 (150); 6144 x 4096 with 1152 96
// (98).
//
// Rejected: TMA multicast, where pairs of blocks with the same weights copy half of them to both (0 to 4 % longer;
// twice as long if a block frees the other's stages with a cluster release, which takes 0.4 us); the same with inputs,
// for blocks of different rows (0 to 15 % longer); tiles of 32 and 128 tokens x 64 rows (the latter up to 4 % faster,
// and 23 % slower for 1024 x 1024 x 4096); bands of 2 to 32 tiles (TileOrder).
constexpr int kMemoryGbs = 3350;  // where the driver does not report it
constexpr double us_of_reading(double weight_bytes, int memory_gbs) {
  return weight_bytes / (0.79e3 * (memory_gbs > 0 ? memory_gbs : kMemoryGbs));
}
enum class InputsBy { tma_unit, copies_of_threads, functors };
enum class Results { in_boxes, in_packs, one_by_one };
constexpr double cost_of_tma(double waves, double steps, int sharers, bool few_blocks, InputsBy by, double longer,
                             Results leave, int tokens, int rows, double weight_bytes, double copied_bytes,
                             int memory_gbs) {
  const double size = tokens * rows / 8192.,
               products = longer * (rows == 64 ? 0.068 + 0.00088 * tokens : 0.013 + 0.159 * size),
               inputs = by == InputsBy::functors                          ? 0.14 + 0.0036 * tokens
                        : by == InputsBy::copies_of_threads && rows < 256 ? products + 0.06
                                                                          : 0,
               working = waves * steps * (products > inputs ? products : inputs),
               reading = (few_blocks ? 1.12 : 1) * us_of_reading(weight_bytes, memory_gbs),
               copying = copied_bytes / (sharers > 1 ? 12e6
                                         : waves > 1 ? 14e6
                                                     : 19e6),
               longest = working > reading ? working : reading, others = sharers - 1;
  const double each = (rows == 64 ? 3.5 : 3.9) + (leave == Results::one_by_one ? 2.5 * size : 0) +
                      (sharers > 1 ? 0.6 : 0) + others * 0.11 + others / sharers * 1.3 * size,
               around = rows == 256 && leave == Results::in_boxes ? 2.3 + waves * 1.65 : waves * each;
  return (longest > copying ? longest : copying) + around;
}

// cost_of_ping_pong: a persistent kernel whose groups of warps take turns at tiles of 128 rows, so that the work before
// and after products counts once. The power limit of the GPU decides how long products take. H200 (CUDA 13.0, 2026-11),
// bfloat16, microseconds with tiles of 128 and of 192 tokens, and with the best non-persistent tile: 4096 x 14336 x
// 4096 628, 616 and 637, without pauses between calls 739, 741 and 746; 1024 x 14336 x 4096 162, 195 and 170; 768 x
// 28672 x 4096 266, 250 and 270; 8192^3 1,442, 1,351 and 1,380; 2048 x 4096 x 4096, two tiles for each block, 97, 106
// and 94. Tensor cores alone, on data in shared memory, reach 850 TFLOP/s without pauses, and 650 with all copies.
// With few tokens the weights decide: 64 x 14336 x 4096 takes 34.0 in turns, and 31.7 in tiles of 64 x 128.
// Rejected: inputs that pairs of blocks copy for each other (4096 x 14336 x 4096 629 us, 8192^3 1,377). Tokens as the
// rows of the mma in tiles of 128 x 256, which read a sixth less shared memory: level (4096^3 182 us).
//
// Results that leave by TMA (gemm_results.cuh): a persistent block of 128 x 256 takes 1.65 us for each tile besides its
// products, and 1.3 for the launch. The same tiles handed over in packs, a block for each, with pauses between calls
// (ad hoc benchmark, in brackets cuBLAS in the same run): 2048^3 25.2 instead of 26.0 us (26.3), 4096^3 181 instead of
// 188 (181), 8192^3 1,391 instead of 1,423 (1,434), 512 x 14336 x 4096 86.8 instead of 92.0 (89.1). Persistent blocks
// that hand over in packs, slab by slab, took longer: 4096^3 197, 8192^3 1,498.
constexpr double cost_of_ping_pong(double waves, double steps, Results leave, int tokens, double weight_bytes,
                                   double copied_bytes, int memory_gbs) {
  const double size = tokens * 128 / 8192., products = steps * (0.026 + 0.159 * size),
               handing_over = (leave == Results::in_boxes   ? 0.8
                               : leave == Results::in_packs ? 2.6
                                                            : 5.1) *
                              size;
  // A group cannot start its next tile before it has handed over its sums.
  const double each = products > handing_over ? products : (products + handing_over) / 2, working = waves * each,
               reading = us_of_reading(weight_bytes, memory_gbs), copying = copied_bytes / (waves > 1 ? 14e6 : 19e6),
               longest = working > reading ? working : reading;
  return (longest > copying ? longest : copying) + (leave == Results::in_boxes ? 4 : 8);
}

// Operands of 8 bits. A step has twice as many columns. It takes as long as a 16-bit step if the tensor cores sum all
// of K; if their partial sums are added to others it takes longer by these factors, in tiles with 256 rows of weights
// or narrower ones, without and with scale factors. H200 (CUDA 13.0, 2026-11), 4096 x 14336 x 4096 in tiles of 128 x
// 256, microseconds: int8 332, e4m3 388, with factors 454. The additions do not overlap with products. With the two
// warpgroups taking turns, one adding while the other multiplies, it took 399, and 566 with a factor for each two sums
// (523 without turns). Two blocks of 128 x 128 on a multiprocessor took 391 (bfloat16: 690, and 641 in tiles of 128 x
// 256); two steps between additions 383, with twice the error.
//
// Not adopted: tokens as the rows of mma, 64 x 256, which read less shared memory, took the same.
constexpr double kLongerByAdding = 1.15, kLongerByAddingNarrow = 1.35, kLongerWithFactors = 1.4,
                 kLongerWithFactorsNarrow = 1.75;

// Weights of 8 and 4 bits in tiles: a model of a call's time in microseconds. Fitted to 154 products of 32 to 512
// tokens (H200, CUDA 13.0, 2026-12), int8 with a scale for each row and int4 with a scale for 128 columns, with every
// tile and 1 to 8 blocks that share K: the choice takes 0.3 % longer than the fastest on average, and at most 7 %; with
// powers of two alone 1.2 and 22 %. Decoding takes as long for few tokens as for many.
//
// A stage of inputs, two steps, at a time, and all that is the same for a warp in uniform registers, took
// 14336 x 4096 from 27.6 to 24.1 us with 64 tokens (int4; int8 24.9 to 23.3) and from 61.4 to 56.3 with 256 (60.1 to
// 54.1), 4096 x 14336 from 38.2 to 32.0 and from 77.6 to 65.7 (33.0 to 29.3, 68.7 to 58.5).
constexpr double cost_of_codes(double waves, double steps, int cluster, int tokens, int rows) {
  const double step = rows == 256 ? 0.72 : 0.154 + 0.0014 * tokens, sharing = cluster > 1 ? 0.6 + 0.009 * tokens : 0;
  return waves * (6 + 0.008 * tokens + steps * step + sharing * cluster);
}

}  // namespace tuning
KERNELS_END
