// Tuning of products. Measured on an H200 (CUDA 13.0, 2026-11) by graph replay with rotated weights, as in
// bench/matmul; figures of what was not chosen are those of the run that decided.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// Rows of weights that a block of the gemv path makes, and its threads at most, or where these take a row in one go.
// 16-bit weights: 1 to 8 rows and 32 to 512 threads with 1 to 8 packs of each in flight differ by up to 10 %: 14336 x
// 4096 took 27.2 us with 512 threads and 27.6 with 256, 4096 x 14336 28.0 and 27.7. What is done before the first load
// is issued and after the last one arrives counts: 400 cycles more in every block took 0.9 us. A normalized input costs
// every block its statistics and every multiplication its scale, so that more rows share them: 4 with RMSNorm took 29.1
// us (2: 31.2), 8 with LayerNorm 31.5 (4: 33.5). Values kept in shared memory for the rows of a whole wave took 29.7
// and 30.2. Multiplying by gamma on the way and by the factor at the end, so that nothing waits for the statistics,
// took longer: gates of a 1B model 23 to 31 us (now 21.2, with a norm in front 21.0), of 8B 86 to 106 (65.8 and 69.1),
// a head 160 to 200 (150 and 125). Gamma and the squares cost as many instructions a column as two rows of weights, and
// instructions are the limit. Blocks that stay, find the statistics once, keep the inputs in shared memory and let a
// warp of their own end rows: QKV of 8B alone 16.2 us (now 17.1), but between its neighbours a layer of 8B took 113 us
// and of 1B 44.7 (110 and 41.1; bench/step), as they leave no room for the blocks of the next kernel to begin. 40
// registers took 142 and 51.4, 64 110 and 42.9, 8 rows 112 and 43.0, what the sink prepares before the statistics or
// behind the products 110 to 111 and 41.4 to 41.9. Inputs x * gamma that the residual ahead leaves, and the factor of
// the row multiplied at the end: if it cost nothing, a layer would take 38.5 us at 1B and 110 at 8B; with the squares
// of x added up by every block 48.9 and 146; with whole numbers that blocks of the residual add to in one place 42.8
// and 132, in eight places that a warp reads 42.9.
constexpr int kGemvRows = 2, kGemvThreads = 256, kGemvThreadsAtOnce = 512;
constexpr int kGemvRowsNormed = 4;
constexpr int kGemvRowsHeavy = 8, kGemvThreadsHeavy = 128;
// The same with tensor cores, and weights of 8 or 4 bits. 2 to 8 rows, 32 to 512 threads. Weights of 8 bits: 128
// threads took 15.8 us, 64 took 16.3 (14336 x 4096, e4m3; 4096 x 14336: 15.8 and 17.3). Of 4 bits, 4096 x 14336: 128
// threads 10.3, 64 11.2, 32 15.8; 14336 x 4096: 10.9, 10.9 and 10.0 (int4 with a scale for 128).
constexpr int kSkinnyRows = 4, kSkinnyThreads = 128;
// And with several scales in 64 bytes: 4 steps for each warp, with two blocks of 14 warps on a multiprocessor where
// rows are that long. 4096 x 14336, int4 with a scale for 32: 14 warps took 11.2 us, 8 14.2, 4 18.1; 14336 x 4096: 4
// warps 11.3, 8 12.3, 14 16.1. Gates of 14336 x 4096 among themselves take 20.3 us, a read of their bytes 15.7: 17.7
// without scales (a ninth of the bytes), 19.4 without inputs, 17.2 without both, 16.0 if nothing is decoded
// either, 18.5 if codes and scales are read and no more. 128 bytes of a row by eight lanes took 21.4 to 23.3, codes
// copied to shared memory 21.7 with as many in flight and 22.5 to 27.9 with two or three times as many (e4m3: 29.3
// and 29.7 to 32.7, now 27.7), an L1 of the least size 30.5, 80 registers 22.9. Weights that the kernel ahead brings
// into the L2: a layer of 7B with int4 took 52.2 to 57.1 us (now 52.0 to 52.6), with e4m3 65.4 to 70.6 (65.7 to 66.2),
// with half 111.0 to 121.1 (111.6).
constexpr int kFineThreads = 448;

// From how many tokens on weights are decoded to a workspace ahead of the product, if there is one: those that pass
// through their functors otherwise, codes of 8 and 4 bits, and codes of fp8 with one scale for a row. 14336 x 4096 and
// 4096 x 14336 on an H200 (CUDA 13.0, 2026-11, by a program that was not kept), microseconds without and with it: half
// times a number 269 and 99 with 8 tokens, 6952 and 671 with 4096; int8 with a scale for 64 columns 146 and 144 with
// 512 tokens, 216 and 190 with 768, 954 and 681 with 4096; int4 with one for 32 135 and 136, 199 and 181, 915 and 685;
// e4m3 with one for a row 110 and 139, 362 and 358 with 2048, 756 and 691 with 4096.
constexpr int kMappedOnce = 3, kCodesOnce = 768, kFloatCodesOnce = 4096;

// Up to how many tokens: on CUDA cores, weights that tensor cores would round, of float where tiles are not so few
// (kSumsOfGemv) that more do; on tensor cores, each row of weights in one go, where inputs count in full. 16-bit
// weights stream through shared memory from there to 32 tokens (bfloat16, 14336 x 4096 and 4096 x 14336: 2 tokens 30.6
// and 29.8 us, 3 tokens 29.6 and 30.8, 16 tokens 30.1 and 31.8, 32 tokens 31.3 and 33.2; a tile of 64 x 128 took 32.2
// to 33.4 and 35.2 to 36.8).
constexpr int kGemvTokens = 4;
constexpr int kSkinnyTokens = 2;

// Weights of 8 and 4 bits stream as well, from 2 to 32 tokens, to groups of two warps with a ring each. Instructions
// bound them, and how many warps a scheduler has to choose from. So a block has four groups, or kCodeGroups of 4
// bits if two blocks share a multiprocessor; with three stages for 8 bits and two for 4, of which a third took 3 %
// longer. 8, 16 and 32 tokens (H200, CUDA 13.0, 2026-11, by a program that was not kept, microseconds; in brackets
// the code before, one or two groups of four warps with a quarter of the columns each): int4 with a scale for 32
// columns 14.3, 16.5, 21.8 (18.0, 20.1, 25.0) for 14336 x 4096 and 14.3, 16.0, 20.1 (19.4, 21.3, 25.2) for 4096 x
// 14336, of which a read takes 8.9; with one for 128 columns 14.0, 16.2, 21.1 (14.2, 16.5, 21.6) for 14336 x 4096;
// int8 with one for a row 17.2, 18.1, 19.7. Groups of one warp took 18.1, 18.7, 25.8 for the first of these. Scales
// that come by way of the L1 (FewBody::kScalesByL1) took 4 % less time with 8 tokens, but 8 % more with 32, when
// rings leave the L1 little. In tiles with wgmma 8 to 32 tokens took 20.6 to 22.9 and 31 to 38. Code for sm_80 on
// the same GPU, with the code before: with 64 tokens, where blocks cannot share K, two blocks of 32 took 37 us for
// the 117 of tiles (int8, 4096 x 14336; half 50 and 113), but 44 for 38 with 14336 x 4096 (half 61 and 41). Where 64
// bytes of codes have several scales, two tokens are faster with each row in one go (int4 with a scale for 32: 13.3
// and 12.8 us).
constexpr int kCodeGroups = 2;
// What a block of such codes costs besides its rows, in rows, if a multiprocessor has several, one after the other: its
// beginning and end, and products with rows that are not there, as warps have 32. 12 layers of Mistral-7B with 3 and 8
// texts (H200, CUDA 13.0, 2026-11, examples/llm): int8 1,015 and 1,120 us with 448 blocks of 64 rows for gates, 1,174
// and 1,227 with 896 of 32; int4 927 and 1,012, and 1,140 and 1,087 with 598 of 48.
constexpr int kCodeRowsBesides = 64;

// Where weights stream through shared memory: what rows on the busiest multiprocessor cost, compared to the
// average, if it has several blocks, as others leave it their share of the bandwidth (14336 rows, 8 tokens: 224 blocks
// of 64 took 30.0 us, 256 blocks of 56 30.1); a block that is alone cannot take more (6144 rows, 8 tokens: 128 blocks
// of 48 took 14.8, 110 of 56 15.4). And what inputs cost, compared to weights (4096 x 4096, 32 tokens: pairs of blocks
// with 64 rows took 13.2 us, blocks with 32 14.7). kSharedBesides: bytes that a block needs besides its stages, at
// most.
constexpr double kCostOfBusiest = 0.8, kCostOfInputs = 0.25;
constexpr int kSharedBesides = 2 << 10;
// And from how many steps of 128 columns on a block that is alone has two groups of warps; fewer were not measured. A
// layer of Mistral-7B with 8 and with 32 texts of 1,000 tokens (H200, bench/step, 2026-11): 129 and 166 us, with one
// group 133 and 177; three to six stages, each group's own, are the same. Nor does it help to bring weights sooner: 12
// layers with 8 texts and the head took 1,647 us (examples/llm), 1,696 and 1,857 if a block that waits for the kernel
// ahead also prefetches 4 or 16 more steps into the L2, 1,787 with room for a block of the kernel behind beside each
// block; 1,617 to 1,636 for 1,625 with one or two stages in flight until the kernel ahead has ended.
constexpr int kStepsOfGroups = 16;

// What a step of a tile takes; of 64 tokens x 128 rows it is 1. 4096^3 and 14336 x 4096, microseconds for a wave of
// blocks: 64 x 128 26 and 27, 128 x 128 39 and 35, 128 x 256 53 and 52. And how many steps the beginning and the end of
// a block are worth, with blocks that share K: 1024^3, 64 x 128, a block each, took 10.7 us, 128 x 128 with pairs 12.1;
// 4096 x 4096, 512 tokens: 128 x 128 35.3, 128 x 256 with pairs 31.6.
constexpr double cost_of_step(int tokens, int rows) { return 0.65 + 0.35 / 8192 * tokens * rows; }
constexpr double kStepsBesides = 16;

// On CUDA cores, what a wave of tiles of 64 x 64 takes, of floats, compared to one of 128 x 128; and how many sums of
// eight tokens at a time (gemv) a multiprocessor adds up as long as one of the latter. H200 (CUDA 13.0, 2026-11, by a
// program that was not kept), microseconds with 64 x 64 and 128 x 128: 512^3 24 and 62, 100 x 4096 x 4096 187 and 430,
// 1024^3 79 and 117, 2048^3 588 and 456; gemv and the faster one: 8, 32 and 64 x 4096 x 4096 23, 82 and 156, and 183 to
// 192, 64 x 1024 x 1024 13 and 46, 32 x 14336 x 4096 266 and 285. Four tokens of two rows at a time took 37, 133 and
// 263 for the first three.
constexpr double kCostOfSmallTile = 0.37, kSumsOfGemv = 5500;

// Tiles of which the TMA unit copies weights, and mostly inputs: what a call takes, in microseconds. Steps take as long
// as their products; with 64 rows and few tokens what is done between products counts. All blocks together get so many
// bytes from the L2: more where they are in step, so that several ask for the same ones at a time, that is in one wave;
// less where some share K. Weights come from memory at 79 % of its nominal speed (memory_gbs), or more slowly to few
// blocks. Beginning and end of a block take 3.5 us or a little more, and blocks that share K wait for each other and
// add up the tile's sums. Inputs that threads copy cost each step a little, and those that go through functors have a
// pace of their own; results that leave one by one, as N is no multiple of 8, take as long as many steps.
//
// By 78 products of 33 to 1024 tokens (and squares) with every tile, and 1 to 8 blocks that share K (H200, CUDA 13.0,
// 2026-11, by a program that was not kept): what this chooses takes 0.6 % longer than the fastest of them on average,
// and at most 9 %. There were 39 clusters of three on that device at a time, 30 of four, 15 of eight: others differ.
// What threads bring, and results of their own, by 64 to 1024 tokens with 4096, 14336 and 50272 x 768 to 4096 (the
// same): of bfloat16 times a number a step of 64 tokens took 0.36 us, of 128 0.57; normalized ones, or floats, half as
// long again.
//
// Tried, without a gain: pairs of blocks with the same weights that copy half of them to both (multicast: 0 to 4 %
// longer; twice as long where a block frees the other one's stages with a release of the cluster, which takes 0.4 us);
// blocks of other rows that get each other's inputs (0 to 15 % longer); tiles of 32 and 128 tokens x 64 rows (the
// latter up to 4 % faster, and 23 % slower for 1024 x 1024 x 4096); bands of 2 to 32 tiles (TileOrder).
constexpr int kMemoryGbs = 3350;  // where the driver does not tell
enum class InputsBy { tma_unit, copies_of_threads, functors };
constexpr double cost_of_boxes(double waves, double steps, int sharers, bool few_blocks, InputsBy by, double longer,
                               bool narrow, int tokens, int rows, double weight_bytes, double copied_bytes,
                               int memory_gbs) {
  const double size = tokens * rows / 8192.,
               products = longer * (rows == 64 ? 0.068 + 0.00088 * tokens : 0.013 + 0.159 * size),
               inputs = by == InputsBy::functors                          ? 0.14 + 0.0036 * tokens
                        : by == InputsBy::copies_of_threads && rows < 256 ? products + 0.06
                                                                          : 0,
               working = waves * steps * (products > inputs ? products : inputs),
               reading = (few_blocks ? 1.12 : 1) * weight_bytes / (0.79e3 * (memory_gbs > 0 ? memory_gbs : kMemoryGbs)),
               copying = copied_bytes / (sharers > 1 ? 12e6
                                         : waves > 1 ? 14e6
                                                     : 19e6),
               longest = working > reading ? working : reading, others = sharers - 1;
  const double each = (rows == 64 ? 3.5 : 3.9) + (narrow ? 2.5 * size : 0) + (sharers > 1 ? 0.6 : 0) + others * 0.11 +
                      others / sharers * 1.3 * size;
  return (longest > copying ? longest : copying) + waves * each;
}

// Blocks that stay, whose groups of warps take turns at tiles of 128 rows: what is before and behind products counts
// once. The power that the GPU may draw decides how long products take. H200 (CUDA 13.0, 2026-11, by a program that was
// not kept), bfloat16, microseconds with tiles of 128 and 192 tokens, and with the best of those of one block each:
// 4096 x 14336 x 4096 628, 616 and 637, without pauses between calls 739, 741 and 746; 1024 x 14336 x 4096 162, 195 and
// 170; 768 x 28672 x 4096 266, 250 and 270; 8192^3 1,442, 1,351 and 1,380; 2048 x 4096 x 4096, two tiles for a block,
// 97, 106 and 94. Tensor cores alone, on numbers in shared memory, make 850 TFLOP/s without pauses, 650 with all that
// is copied. Tried, without a gain: inputs that pairs of blocks copy for each other (4096 x 14336 x 4096 629 us, 8192^3
// 1,377), two groups with a tile of 192 x 256 together (671, 1,408).
constexpr double cost_of_ping_pong(double waves, double steps, bool narrow, int tokens, double copied_bytes) {
  const double size = tokens * 128 / 8192., products = steps * (0.026 + 0.159 * size),
               handing_over = (narrow ? 5.1 : 2.6) * size;
  // A group cannot begin its next tile before it has handed over its sums.
  const double each = products > handing_over ? products : (products + handing_over) / 2, working = waves * each,
               copying = copied_bytes / (waves > 1 ? 14e6 : 19e6);
  return (working > copying ? working : copying) + 8;
}

// Operands of 8 bits: steps have twice as many columns, and take as long as those of 16 bits where the tensor cores add
// up all of K; where their sums are added to others so much longer, in tiles with 256 rows of weights or with fewer,
// without and with factors. H200 (CUDA 13.0, 2026-11, by a program that was not kept), 4096 x 14336 x 4096 in tiles of
// 128 x 256, microseconds: int8 332, e4m3 388, with factors 454. What is added does not overlap: with turns of the two
// warpgroups, one adding while the other multiplies, 399 and, with a factor for each two sums, 566 (523 without). Two
// blocks of 128 x 128 on a multiprocessor took 391 (bfloat16: 690, and 641 in tiles of 128 x 256); two steps between
// additions 383, with twice the error.
//
// Blocks that stay, whose groups have a tile of 256 rows together, with the next one's operands on their way while sums
// are handed over slab by slab: bfloat16 628 us for 640, 8192^3 1,386 for 1,405, 1024 x 4096 x 4096 48.1 for 47.2; one
// warpgroup three steps ahead of the other the same. Tokens as the rows of mma of 64 x 256, which read less shared
// memory: the same.
constexpr double kLongerByAdding = 1.15, kLongerByAddingNarrow = 1.35, kLongerWithFactors = 1.4,
                 kLongerWithFactorsNarrow = 1.75;

// Weights of 8 and 4 bits in tiles: what a call takes, in steps of 64 tokens x 128 rows (0.49 us). H100 (CUDA 13.0,
// 2026-11), 54 products of 8 to 2048 tokens, by a program that was not kept: int8 with a scale for a row and int4 with
// one for 128 columns, with every tile and every cluster of up to 8 blocks. What this chooses takes 0.2 % longer than
// the fastest of them on average, and at most 10 %. Decoding takes as long for few tokens as for many.
constexpr double cost_of_codes(double waves, double steps, int doublings, int tokens, int rows) {
  return waves * (steps * (0.45 + 0.55 / 64 * tokens) * (rows == 256 ? 1.75 : 1) + 8.5 * doublings + 0.1 * tokens);
}

}  // namespace tuning
KERNELS_END
