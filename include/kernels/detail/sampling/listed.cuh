// The tokens of a row's list of previous tokens in shared memory, for adjusting logits when they are read: a bitmap of
// tokens that may be listed, which is empty for most packs of logits, and a hash table of their occurrences.
#pragma once

#include "../../core/sampling_search.h"

KERNELS_BEGIN
namespace detail {

// Occurrences::with() for concurrent threads.
__device__ __forceinline__ void add_occurrence(int32_t* count, bool in_prompt) {
  if (in_prompt)
    atomicOr(count, Occurrences::kInPrompt);
  else
    atomicAdd(count, 1);
}

struct ListedTokens {
  // kMost: different tokens. With these sizes two blocks fit on an H200's multiprocessor, with 832 bytes left.
  static constexpr int kBits = 1 << 15, kLogSlots = 12, kSlots = 1 << kLogSlots, kMost = kSlots / 4 * 3;
  uint32_t bits[kBits / 32];  // bit token % kBits
  int32_t tokens[kSlots];     // or -1
  int32_t times[kSlots];      // their Occurrences
  int32_t different;
  Adjust adjust;

  // Fills the table, by all threads of a block; false if there are too many tokens. Called, not inlined, as few calls
  // need it.
  __device__ KERNELS_CALLED bool take(const SampleOptions& o, int64_t row, int64_t vocabulary) {
    const int32_t* const previous = o.previous.at(row);
    const int listed = o.lengths[row], prompt = o.prompts == nullptr ? 0 : o.prompts[row], thread = int(threadIdx.x),
              threads = int(blockDim.x);
    for (int i = thread; i < kBits / 32; i += threads) bits[i] = 0;
    for (int i = thread; i < kSlots; i += threads) tokens[i] = -1, times[i] = 0;
    if (thread == 0) different = 0, adjust = Adjust(o, SampleRules(o, row), row);
    __syncthreads();
    // Each thread that has not yet seen the limit exceeded adds at most one more: there is always a free slot.
    for (int i = thread; i < listed && *static_cast<volatile int32_t*>(&different) <= kMost; i += threads) {
      const int32_t token = previous[i];
      if (token < 0 || token >= vocabulary) continue;
      atomicOr(&bits[token % kBits / 32], 1u << token % 32);
      int slot = first_slot(token), there;
      while ((there = atomicCAS(&tokens[slot], -1, token)) != -1 && there != token) slot = (slot + 1) % kSlots;
      if (there == -1) atomicAdd(&different, 1);
      add_occurrence(&times[slot], i < prompt);
    }
    __syncthreads();
    return different <= kMost;
  }

  // Adjusts the logits of tokens from `col` on, a multiple of N.
  template <int N>
  __device__ __forceinline__ void change(Pack<float, N>& x, int col) const {
    const uint32_t some = bits[col % kBits / 32] >> col % 32 & ((1u << N) - 1);
    if (some != 0) x = changed(x, col, some);
  }

 private:
  static __device__ __forceinline__ int first_slot(int32_t token) {
    return int(uint32_t(token) * 2654435769u >> (32 - kLogSlots));
  }
  // Called, not inlined, as few packs need them.
  template <int N>
  __device__ KERNELS_CALLED Pack<float, N> changed(Pack<float, N> x, int col, uint32_t some) const {
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) {
      if ((some >> i & 1) != 0) x.v[i] = changed(x.v[i], col + i);
    }
    return x;
  }
  __device__ KERNELS_CALLED float changed(float x, int token) const {
    int slot = first_slot(token);
    while (tokens[slot] != token) {
      if (tokens[slot] == -1) return x;
      slot = (slot + 1) % kSlots;
    }
    return adjust(x, token, times[slot]);
  }
};

}  // namespace detail
KERNELS_END
