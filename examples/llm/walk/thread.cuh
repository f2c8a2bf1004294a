// A thread of the consumers in walk.cu: its place in the block, and how it gets results of other blocks.
#pragma once

#include "walk/product.cuh"

namespace llm {
namespace {

struct Thread {
  const Params& p;
  const Walk& w;
  Shared& shared;
  const Room room;
  unsigned char* const inputs;  // of a product, in shared memory
  int tid, lane, warp, g, t;    // lane 4g + t
  unsigned tag = 0;             // of the results that are read next
  int keys = 0, newest = 0;     // in the cache, and the place of the newest

  __device__ __forceinline__ Thread(const Params& params, Shared& s, unsigned char* in)
      : p(params), w(params.walk), shared(s), room(params.walk, params.walk.room, gridDim.x), inputs(in) {
    begin_part();
  }

  // What depends on the thread is found anew: the compiler would otherwise keep it all for the next layer, in memory.
  __device__ __forceinline__ void begin_part() {
    uint32_t index[1] = {threadIdx.x};
    arch::pin(index);
    tid = int(index[0]), lane = tid & 31, warp = tid / 32, g = lane / 4, t = lane & 3;
  }

  __device__ __forceinline__ void sync() const { arch::named_barrier_sync(kAllConsumers, kThreads); }

  static __device__ __forceinline__ Word word(uint32_t bits, unsigned tag) { return Word(tag) << 32 | bits; }
  static __device__ __forceinline__ Word word(float x, unsigned tag) { return word(__float_as_uint(x), tag); }
  static __device__ __forceinline__ float value(Word x) { return __uint_as_float(uint32_t(x)); }
  // 0 if a word is one of the results that are read next.
  __device__ __forceinline__ unsigned other_than_tag(Word x) const { return unsigned(x >> 32) ^ tag; }

  // Pairs of words, at(i) for number i, until all of the first `here` are there; the others are zeros. Only those that
  // are not there are read again: all blocks wait for the last one, and what they read meanwhile delays it.
  template <int kCount, class At>
  __device__ __forceinline__ void await(Word (&words)[kCount][2], int here, const At& at) const {
    uint32_t missing = (1u << here) - 1;
    KERNELS_UNROLL
    for (int i = 0; i < kCount; ++i) words[i][0] = words[i][1] = word(0u, tag);
    for (;;) {
      KERNELS_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (missing >> i & 1) arch::load_words(words[i], at(i));
      }
      unsigned late = 0;  // whether any of them is
      KERNELS_UNROLL
      for (int i = 0; i < kCount; ++i) late |= other_than_tag(words[i][0]) | other_than_tag(words[i][1]);
      if (late == 0) return;
      KERNELS_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if ((other_than_tag(words[i][0]) | other_than_tag(words[i][1])) == 0) missing &= ~(1u << i);
      }
    }
  }

  // Neighbours of a warp have neighbouring values, from an even one on.
  __device__ __forceinline__ void put_pair(Word* to, int at, float x, unsigned tag_of_it) const {
    const float other = __shfl_down_sync(__activemask(), x, 1);
    if (at % 2 == 0) arch::store_word(to + at / 2, word(k::detail::rounded_pair<A>(x, other), tag_of_it));
  }
};

}  // namespace
}  // namespace llm
