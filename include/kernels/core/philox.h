// Philox4x32-10, the counter-based random generator of Salmon, Moraes, Dror and Shaw (Parallel Random Numbers: As Easy
// as 1, 2, 3, SC 2011): 128 random bits for each key and counter. It has no state and uses integers only, so the CPU
// and the GPU draw the same numbers.
//
//   k::Pack<uint32_t, 4> four = k::philox(seed, index, step);
//   float u = k::unit_interval(four[0]);              // in [0, 1)
//
// The seed is the key. The two words of the counter distinguish draws, such as a row and a step, or the index of four
// elements and that of a call. cuRAND's generator of that name gives the same words with subsequence `high` and offset
// 4 low.
#pragma once

#include "pack.h"

KERNELS_BEGIN

KERNELS_HD Pack<uint32_t, 4> philox(uint64_t key, uint64_t low, uint64_t high) {
  uint32_t c0 = uint32_t(low), c1 = uint32_t(low >> 32), c2 = uint32_t(high), c3 = uint32_t(high >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  KERNELS_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xd2511f53u) * c0, b = uint64_t(0xcd9e8d57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// The upper 24 of 32 bits as a multiple of 2^-24 in [0, 1): exact, so equal on every machine.
KERNELS_HD float unit_interval(uint32_t bits) { return float(int32_t(bits >> 8)) * 0x1p-24f; }

KERNELS_END
