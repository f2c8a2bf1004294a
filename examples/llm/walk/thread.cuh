// A consumer thread of walk.cu: its indices in the block, and how it waits for results of other blocks.
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
  int tid, lane, warp, g, t;    // lane == 4 * g + t
  unsigned tag = 0;             // of the results that are read next
  int keys = 0, newest = 0;     // keys in the cache, and the index of the newest

  __device__ __forceinline__ Thread(const Params& params, Shared& s, unsigned char* in)
      : p(params), w(params.walk), shared(s), room(params.walk, params.walk.room, gridDim.x), inputs(in) {
    begin_part();
  }

  // Computes the indices again, behind an opaque read: otherwise the compiler keeps values that depend on them for the
  // next layer, and spills them.
  __device__ __forceinline__ void begin_part() {
    uint32_t index[1] = {threadIdx.x};
    arch::pin(index);
    tid = int(index[0]), lane = tid & 31, warp = tid / 32, g = lane / 4, t = lane & 3;
  }

  __device__ __forceinline__ void sync() const { arch::named_barrier_sync(kAllConsumers, kThreads); }

  static __device__ __forceinline__ Word word(uint32_t bits, unsigned tag) { return Word(tag) << 32 | bits; }
  static __device__ __forceinline__ Word word(float x, unsigned tag) { return word(__float_as_uint(x), tag); }
  static __device__ __forceinline__ float value(Word x) { return __uint_as_float(uint32_t(x)); }
  // 0 if the word is one of the results that are read next.
  __device__ __forceinline__ unsigned other_than_tag(Word x) const { return unsigned(x >> 32) ^ tag; }

  // Polls pairs of words, pair i at at(i), until the first `here` have arrived; the others become zeros. Only pairs
  // that have not arrived are read again: all blocks wait for the last one, and their reads delay it.
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
      unsigned late = 0;  // other than 0 if a word has not arrived
      KERNELS_UNROLL
      for (int i = 0; i < kCount; ++i) late |= other_than_tag(words[i][0]) | other_than_tag(words[i][1]);
      if (late == 0) return;
      KERNELS_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if ((other_than_tag(words[i][0]) | other_than_tag(words[i][1])) == 0) missing &= ~(1u << i);
      }
    }
  }

  // Stores two values as a pair of A. Neighbouring lanes have neighbouring values; the even one stores both.
  __device__ __forceinline__ void put_pair(Word* to, int at, float x, unsigned tag_of_it) const {
    const float other = __shfl_down_sync(__activemask(), x, 1);
    if (at % 2 == 0) arch::store_word(to + at / 2, word(k::detail::rounded_pair<A>(x, other), tag_of_it));
  }
};

}  // namespace
}  // namespace llm
