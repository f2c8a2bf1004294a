// What the parts of walk.cu share: constants, shared memory, the workspace in global memory, and which rows and keys
// belong to a block.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <kernels/core/divisor.h>
#include <kernels/arch/sm90.cuh>
#include <kernels/detail/dequantize.cuh>

#include "device/elements.h"

namespace llm {
namespace arch = kernels::arch;

namespace {

using A = Element<Type::UNIT>;  // of activations, keys and values
constexpr Type kWeights = Type::WEIGHTS;
using Code = Element<kWeights>;

constexpr int kBits = bits_of(kWeights), kEach = 128 / kBits;  // kEach: weights in 16 bytes
constexpr bool kRowScales = kBits == 8, kGroupScales = kBits == 4;
// Consumer warps and threads, rows of a tile, and tiles whose sums are kept until their results are made.
constexpr int kWarps = 8, kThreads = 32 * kWarps, kTile = 16, kSlots = 16;
constexpr int kChunk = 1024;  // bytes of a row in a stage
// At most kInFlight stages are on their way from memory, and kFewInFlight while blocks soon wait for each other: from
// the last kRest stages of a product until the next product begins. The reason is that in the L2 what blocks send each
// other waits behind copies. On an H100, by KB on their way to each multiprocessor:
//
//   KB                                16     24     32     48     96
//   a read that hits the L2, cycles  570    800  1,400  2,200  4,200
//   bandwidth of memory, TB/s       2.70   2.97   3.10   3.14   3.12
//
// For 12 layers of Mistral-7B and the head after 120 tokens that gives, by kInFlight and kFewInFlight, on an H100: in
// fp16 1,761 us with 4 and 2, 1,774 with 3 and 2, 1,787 with 4 and 3; in int8 867 us and 869 with 3 and 2; in int4 547
// us with 3 and 1, 561 with 3 and 2, 579 with 4 and 1, 551 with 2 and 1. Llama-3.2-1B in bf16: 817, 824, 833. On an
// H200 in int4: 527 us with 3 and 1, 526 with 4 and 1, 554 with 3 and 2.
constexpr int kInFlight = kBits == 4 ? 3 : 4, kFewInFlight = kBits == 4 ? 1 : 2, kRest = kBits == 4 ? 2 : 3;
// Stages that are prefetched into the L2 while the ring is full. Layers and head on an H100, in us, with 8 and 0:
// Llama-3.2-1B in bf16 870 and 884, 16 layers of Mistral-7B 2,424 and 2,469, in int8 1,270 and 1,286. On an
// H200, 12 layers of Mistral-7B and the head in fp16 after 4,000 tokens take 1,392 us with 16 and 1,400 with 8; but
// Llama-3.2-1B after 16,000 tokens makes 1,142 tokens/s with 8 and 1,092 with 16, probably because keys need room in
// the L2. In int4 after 120 tokens it is 526 us with 0, 527 with 8, 528 with 16.
constexpr int kAhead = kBits == 4 ? 0 : 8;
constexpr int kAheadKeys = 512;    // cache lines of keys, and of values, that a block prefetches of its part
constexpr int kBlock = 4 * kEach;  // columns that four lanes read at once, 16 bytes each
// A copy has the rows of half a tile. A stage holds, for either half, kChunk / 128 boxes of kHalf rows of 128 bytes,
// and after both their scales.
constexpr int kHalf = kTile / 2;
constexpr int kScalesAt = kTile * kChunk, kStage = kTile * (kChunk + (kGroupScales ? kChunk / 8 : 0));
constexpr int kMostStages = 16, kMostAngles = 64;
// Scales rows down before they are rounded to half, which ends at 65,504; a model's residual stream may be larger.
constexpr float kShrink = std::is_same<A, k::half>::value ? 1 / 16.f : 1;
constexpr int kShared = 4, kKeysAtOnce = 16 * kWarps;  // query heads with the same keys in a block; keys read at once
// Up to this many keys are not split, because partial results would go through memory once more. Split, the 12 layers
// after 190 tokens take 3 % longer on an H200, in int4 11 %, and Llama-3.2-1B 4 %. On an H100, in us (Mistral-7B in
// fp16 and int4, Llama-3.2-1B): after 380 tokens 1,863, 664, 874 with 2 * kKeysAtOnce and 1,850, 639, 874 with 3; after
// 420 tokens 1,849, 650, 868 with 3 and 1,866, 650, 891 with 4.
constexpr int kAloneKeys = 3 * kKeysAtOnce;
constexpr int kStatesAt = 4096;  // in attention, `inputs` holds queries, and from this byte on the states of the warps
constexpr int kAllConsumers = 1, kAllCopiers = 2;  // named barriers
constexpr int kCopiers = 4;                        // warps of the producer

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  float sums[2][kSlots][kWarps][kTile];
  float cosines[2][kMostAngles], sines[2][kMostAngles];
  float parts[kWarps];
  volatile bool soon_waiting;         // consumers will soon wait for other blocks
  alignas(16) WalkLayer layers[2];    // the consumers' layer and the next one
  alignas(16) WalkLayer streamed[3];  // the producer's; one of its warps may still be in the layer before
};

// Prefetches a layer's pointers to shared memory. Reading them when they are needed would cost a microsecond.
struct LayerOnItsWay {
  static constexpr int kPieces = sizeof(WalkLayer) / 16;
  static_assert(sizeof(WalkLayer) % 16 == 0 && kPieces <= 32, "one piece for a lane");
  ::uint4 piece;
  __device__ __forceinline__ void fetch(const Walk& w, int64_t layer) {
    const int lane = threadIdx.x & 31;
    if (lane < kPieces && layer < w.count) piece = __ldg(reinterpret_cast<const ::uint4*>(w.layers + layer) + lane);
  }
  __device__ __forceinline__ void put(WalkLayer& to) const {
    const int lane = threadIdx.x & 31;
    if (lane < kPieces) reinterpret_cast<::uint4*>(&to)[lane] = piece;
  }
};

using Word = unsigned long long;

// Matrices of a layer. Each has a tensor map, and with 4 bits another one for its scales; the head's follow all
// layers'.
enum Which : int { kQueries, kKeys, kValues, kOutput, kGate, kUp, kDown, kMatrices };
constexpr int kMaps = kGroupScales ? 2 : 1;

// The arrays in Walk::room, one after the other at multiples of 256 bytes.
struct Room {
  arch::TensorMap* maps;       // of all matrices
  unsigned *launches, *begun;  // how many launches have ended; how many blocks have read this number, in all launches
  Word *x, *qkv, *o, *h;       // x (the residual stream) and qkv: a float in each word; o and h: a pair of A
  Word* states;                // split attention: sums, largest logits and sums of weights of each part

  size_t bytes;
  __host__ __device__ Room(const Walk& w, void* at, int blocks) {
    char* p = static_cast<char*>(at);
    const auto take = [&](int64_t size) {
      char* const out = p;
      p += (size + 255) / 256 * 256;
      return out;
    };
    const int64_t dim = w.shape.dim;
    maps = reinterpret_cast<arch::TensorMap*>(take((w.count * kMatrices + 1) * kMaps * sizeof(arch::TensorMap)));
    launches = reinterpret_cast<unsigned*>(take(256));
    begun = reinterpret_cast<unsigned*>(take(256));
    x = reinterpret_cast<Word*>(take(w.hidden * 8));
    qkv = reinterpret_cast<Word*>(take((w.shape.heads + 2 * w.shape.kv_heads) * dim * 8));
    o = reinterpret_cast<Word*>(take(w.shape.heads * dim * 4));
    h = reinterpret_cast<Word*>(take(w.inner * 4));
    states = reinterpret_cast<Word*>(take(int64_t(blocks) * kShared * (dim + 2) * 8));
    bytes = size_t(p - static_cast<char*>(at));
  }
};

enum class Kind { qkv, output, up, down, head };
constexpr int kKinds = 5;

// A product's columns and tiles, how many tiles each block has, and how many blocks have one more.
struct Sizes {
  int cols, tiles, of_each, more;
};

// The last members precompute divisions: dividing by a number that the compiler does not know would be some 40
// instructions between a product and the next one.
struct Params {
  Walk walk;
  Tokens tokens;
  Cache cache;
  int stages, inputs;   // stages of the ring; bytes of a product's inputs in shared memory
  unsigned pace;        // cycles between two stages that are prefetched into the L2
  Sizes sizes[kKinds];  // by Kind
  int share, most_parts;      // query heads with the same keys; parts into which keys are split at most
  k::detail::Divisor pages;   // by the positions of a page
  k::detail::Divisor sets;    // by the number of sets of up to kShared heads
  k::detail::Divisor groups;  // by the number of sets with the same keys
};

__host__ __device__ __forceinline__ int64_t row_bytes(int64_t cols) { return cols * kBits / 8; }

// ---- which rows of which matrices a product has ---------------------------------------------------------------------

// The rows of a tile: kHalf rows of a matrix from `first` on, then as many from `second` on.
struct TileRows {
  int of_first, of_second;  // their matrices, as Which
  int first, second;
  int angle;  // rows first + i and second + i are rotated as a pair by angle + i; -1: they are not rotated
};

// ---- steps ---------------------------------------------------------------------------------------------------------

// One of the four products of a layer, or the head's. All have one body of code, so that the instructions of a layer
// stay in the instruction cache.
struct Step {
  Kind kind;
  bool last;  // of the layers
  const WalkLayer& layer;
  const Sizes& sizes;

  __device__ __forceinline__ Step(const Params& p, int number, const WalkLayer& of)
      : kind(number < 4 * int(p.walk.count) ? Kind(number % 4) : Kind::head),
        last(number + 1 == 4 * int(p.walk.count)),
        layer(of),
        sizes(p.sizes[int(kind)]) {}
  static __device__ __forceinline__ int count(const Walk& w) {
    return 4 * int(w.count) + (w.head.data != nullptr ? 1 : 0);
  }
  // The first of this block's tiles; the others follow at distances of gridDim.x. The first product counts blocks from
  // the other end, so that the blocks with one tile more are not the same as in the third product.
  __device__ __forceinline__ int first_tile() const {
    return kind == Kind::qkv ? int(gridDim.x - 1 - blockIdx.x) : int(blockIdx.x);
  }
  __device__ __forceinline__ int count_of_tiles() const { return sizes.of_each + (first_tile() < sizes.more ? 1 : 0); }
  __device__ __forceinline__ bool normed() const { return kind != Kind::output && kind != Kind::down; }
};

__device__ __forceinline__ TileRows rows_of(const Walk& w, const Step& step, int tile) {
  const int row = tile * kTile;
  if (step.kind == Kind::up) return {kGate, kUp, row / 2, row / 2, -1};
  if (step.kind != Kind::qkv) {
    const int which = step.kind == Kind::output ? kOutput : step.kind == Kind::down ? kDown : 0;  // 0: the head
    return {which, which, row, row + kHalf, -1};
  }
  const int dim = int(w.shape.dim), nq = int(w.shape.heads) * dim, nk = int(w.shape.kv_heads) * dim;
  const int rotary = w.ropes[step.layer.rope].rotary_dim;
  const int which = row < nq ? kQueries : row < nq + nk ? kKeys : kValues;
  const int local = row - (which == kQueries ? 0 : which == kKeys ? nq : nq + nk);
  const int at = local & (dim - 1);  // dim is a power of two
  if (which == kValues || at >= rotary) return {which, which, local, local + kHalf, -1};
  const int first = local - at + at / 2;
  return {which, which, first, first + rotary / 2, at / 2};
}

// This block's part of a layer's attention: up to kShared query heads with the same keys, and a part of these keys.
// Some blocks have none.
struct Part {
  int first_head, heads, kv_head;
  int set, number, count;  // the set of heads; which part of their keys, of how many
  int begin, end;

  __device__ __forceinline__ Part(const Params& p, const WalkLayer& layer, int keys) {
    const int first = layer.window > 0 && layer.window < keys ? keys - int(layer.window) : 0, here = keys - first;
    number = int(p.sets.quotient(blockIdx.x)), set = int(p.sets.remainder(blockIdx.x));
    kv_head = int(p.groups.quotient(unsigned(set)));
    const int skipped = int(p.groups.remainder(unsigned(set))) * kShared;
    first_head = kv_head * p.share + skipped, heads = min(kShared, p.share - skipped);
    count = 1, begin = first, end = keys;
    if (here > kAloneKeys) {
      count = max(1, min(p.most_parts, int(unsigned(here + kKeysAtOnce - 1) / kKeysAtOnce)));
      const int size = (here + count - 1) / count;
      begin += number * size, end = min(begin + size, keys);
    }
    if (number >= count) end = begin;
  }
  __device__ __forceinline__ bool is_there() const { return number < count; }
};

// The index of a position in the cache.
__device__ __forceinline__ int slot_of(const Params& p, int pos) {
  const int page = int(p.pages.quotient(unsigned(pos))), size = int(p.cache.page);
  return __ldg(p.cache.table + page) * size + (pos - page * size);
}

}  // namespace
}  // namespace llm
