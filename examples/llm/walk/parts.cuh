// What the parts of walk.cu share: sizes, shared memory, the room in global memory, and which rows and keys a block
// has.
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

constexpr int kBits = bits_of(kWeights), kEach = 128 / kBits;  // codes in 16 bytes
constexpr bool kRowScales = kBits == 8, kGroupScales = kBits == 4;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kTile = 16, kSlots = 16;  // tiles whose sums wait for their results
constexpr int kChunk = 1024;                                                // bytes of a row in a stage
// Stages on their way from memory at most, and where blocks soon wait for each other: from the last kRest stages of a
// product until the next one begins. What blocks send each other waits in the L2 behind what that waits for: on an H100
// a read of something that it has takes 570 cycles beside 16 KB on their way to each multiprocessor, 800 beside 24,
// 1,400 beside 32, 2,200 beside 48, 4,200 beside 96, while memory gives 2.70, 2.97, 3.10, 3.14, 3.12 TB/s. There 12
// layers of Mistral-7B behind 120 tokens and the head take 1,761 us in fp16, 1,774 with 3 and 2, 1,787 with 4 and 3, in
// int8 867, 869; Llama-3.2-1B in bf16 817, 824, 833; int4 takes 547, 561 with 3 and 2, 579 with 4 and 1, 551 with 2 and
// 1 (programs that were not kept, which launch this alone). On an H200 an earlier version of this made, of Mistral-7B,
// 302 tokens a second in fp16, 294 with 3 and 2, 299 with 6 and 2; in int8 521, 516, 517; in int4 695, 692 with 4 and
// 1, 676 with 4 and 2. With the present one 12 layers and the head take 527 us behind 120 tokens in int4, 526 with 4
// and 1, 554 with 3 and 2.
constexpr int kInFlight = kBits == 4 ? 3 : 4, kFewInFlight = kBits == 4 ? 1 : 2, kRest = kBits == 4 ? 2 : 3;
// Stages that are prefetched into the L2 where the ring is full. Layers and head on an H100, in us, with 8 and 0:
// Llama-3.2-1B in bf16 870 and 884, 16 layers of Mistral-7B 2,424 and 2,469, in int8 1,270 and 1,286. On an H200 12
// layers of Mistral-7B and the head take, in fp16 behind 4,000 tokens, 1,392 with 16 and 1,400 with 8; but behind
// 16,000 Llama-3.2-1B makes 1,142 tokens a second with 8 and 1,092 with 16, probably as keys want room in the L2. In
// int4, behind 120 tokens, it is 526 us with 0, 527 with 8, 528 with 16.
constexpr int kAhead = kBits == 4 ? 0 : 8;
constexpr int kAheadKeys = 512;    // lines of keys, and of values, that a block prefetches of its part
constexpr int kBlock = 4 * kEach;  // columns of which each of four lanes has 16 bytes
// Rows of half a tile are copied at once. A stage has kChunk / 128 times kHalf rows of 128 bytes of either half, then
// their scales.
constexpr int kHalf = kTile / 2;
constexpr int kScalesAt = kTile * kChunk, kStage = kTile * (kChunk + (kGroupScales ? kChunk / 8 : 0));
constexpr int kMostStages = 16, kMostAngles = 64;
// Of what is normalized, before it is rounded: halves end at 65,504, and a model's row may be larger.
constexpr float kShrink = std::is_same<A, k::half>::value ? 1 / 16.f : 1;
constexpr int kShared = 4, kKeysAtOnce = 16 * kWarps;  // heads of queries that share keys; keys that are read at once
// So many keys are not shared out: what parts give would have to go through memory once more. The same layers behind
// 190 tokens take 3 % longer with parts on an H200, in int4 11 %, Llama-3.2-1B 4 %. On an H100, in us, behind 380
// tokens 1,863, 664, 874 with two of these, 1,850, 639, 874 with three; behind 420 1,849, 650, 868 with three, 1,866,
// 650, 891 with four.
constexpr int kAloneKeys = 3 * kKeysAtOnce;
constexpr int kStatesAt = 4096;  // bytes of inputs that attention has queries in, before the states of its warps
constexpr int kAllConsumers = 1, kAllCopiers = 2;  // named barriers
constexpr int kCopiers = 4;                        // warps of the producer

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  float sums[2][kSlots][kWarps][kTile];
  float cosines[2][kMostAngles], sines[2][kMostAngles];
  float parts[kWarps];
  volatile bool soon_waiting;         // consumers, for other blocks
  alignas(16) WalkLayer layers[2];    // this one and the next, of the consumers
  alignas(16) WalkLayer streamed[3];  // of the producer, of which a warp may still be in the layer ahead
};

// A layer's pointers on their way to shared memory: what is read from memory when it is needed costs a microsecond.
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

// Matrices of a layer, each of which has a tensor map, and one of its scales. The head's comes behind all layers'.
enum Which : int { kQueries, kKeys, kValues, kOutput, kGate, kUp, kDown, kMatrices };
constexpr int kMaps = kGroupScales ? 2 : 1;

// In `room`: one behind the other, at multiples of 256 bytes.
struct Room {
  arch::TensorMap* maps;       // of all matrices
  unsigned *launches, *begun;  // launches that have ended, and blocks that have read this number
  Word *x, *qkv, *o, *h;       // the residual stream and queries, keys, values: floats; o and h: pairs of A
  Word* states;                // of the parts of all heads: sums, largest logits, sums of weights

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

// A product's columns, its tiles, how many of these each block has, and how many blocks have one more.
struct Sizes {
  int cols, tiles, of_each, more;
};

// The last of these are for what all blocks would have to divide for: a division by a number that the compiler does not
// know is some 40 instructions between a product and the next one.
struct Params {
  Walk walk;
  Tokens tokens;
  Cache cache;
  int stages, inputs;  // of the ring; bytes of inputs in shared memory
  unsigned pace;       // cycles between stages that are prefetched into the L2
  Sizes sizes[kKinds];  // by Kind
  int share, most_parts;      // heads of queries that share keys; parts of keys, at most
  k::detail::Divisor pages;   // by the positions of a page
  k::detail::Divisor sets;    // by how many sets of up to kShared heads there are
  k::detail::Divisor groups;  // by how many of these share keys
};

__host__ __device__ __forceinline__ int64_t row_bytes(int64_t cols) { return cols * kBits / 8; }

// ---- which rows of which matrices a product has ---------------------------------------------------------------------

// Of a tile: kHalf rows of a matrix from `first` on, then as many from `second` on.
struct TileRows {
  int of_first, of_second;  // matrices of the layer
  int first, second;
  int angle;  // by which the first of both are turned as a pair, the next ones by the next; -1: not turned
};

// ---- steps ---------------------------------------------------------------------------------------------------------

// One of four products of a layer, or the head's. There is one body for all of them: the instructions of a layer have
// to stay near, too.
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
  // The first of this block's tiles; the others are as many apart as there are blocks. Blocks that have more tiles than
  // others of the first product are not those that have more of the third.
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
    const int which = step.kind == Kind::output ? kOutput : step.kind == Kind::down ? kDown : 0;  // or the head's
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

// What this block has of a layer's attention: up to kShared heads of queries that share keys, and a part of these keys.
// There may be nothing.
struct Part {
  int first_head, heads, kv_head;
  int set, number, count;  // of such heads; which of so many parts of their keys
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

// Where a position lies in the cache.
__device__ __forceinline__ int slot_of(const Params& p, int pos) {
  const int page = int(p.pages.quotient(unsigned(pos))), size = int(p.cache.page);
  return __ldg(p.cache.table + page) * size + (pos - page * size);
}

}  // namespace
}  // namespace llm
