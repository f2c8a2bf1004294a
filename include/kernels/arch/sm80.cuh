// One function per sm_80 instruction.
#pragma once

#include <cstdint>

#include "../core/dtype.h"
#include "arch.cuh"

KERNELS_BEGIN
namespace arch {

// mma.m16n8k16: d += a * b for a 16 x 16 tile a and a 16 x 8 tile b of T. Fragments of lane 4g + t: of a the pairs (row
// g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8); of b the pairs (k 2t, column g), (k 2t + 8,
// column g); of d (row g, columns 2t and 2t + 1) and (row g + 8, the same columns).
template <class T>
__device__ __forceinline__ void mma_16816(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kCompiledFor >= 80) {
    if constexpr (std::is_same<T, half>::value) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      static_assert(std::is_same<T, bfloat16>::value, "half or bfloat16");
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
}

// mma.m16n8k32 for int8: a 16 x 32 tile a and a 32 x 8 tile b. Fragments of lane 4g + t: of a the words of four
// elements (row g, k from 4t), (row g + 8, k from 4t), (row g, k from 4t + 16), (row g + 8, k from 4t + 16); of b (k
// from 4t, column g), (k from 4t + 16, column g).
__device__ __forceinline__ void mma_16832(int32_t* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kCompiledFor >= 80) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// The dynamic shared memory of the launch, in bytes.
__device__ __forceinline__ uint32_t dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

// The larger of two numbers, or NaN if one is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// (word & mask) | bits in one instruction: the compiler makes two if both are constants.
template <uint32_t mask, uint32_t bits>
__device__ __forceinline__ uint32_t mask_or(uint32_t word) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "n"(mask), "r"(bits));
  return out;
}

// (word & mask) ^ bits in one instruction.
template <uint32_t mask, uint32_t bits>
__device__ __forceinline__ uint32_t mask_xor(uint32_t word) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(word), "n"(mask), "r"(bits));
  return out;
}

// Two halves as a word. This is opaque to the compiler, so that a constant stays in its register instead of being
// rebuilt for each use.
__device__ __forceinline__ uint32_t join_halves(uint32_t low, uint32_t high) {
  uint32_t pair;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(pair) : "r"(low), "r"(high));
  return pair;
}

// a * b + c for the two T of a word.
template <class T>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  if constexpr (kCompiledFor >= 80) {
    if constexpr (std::is_same<T, half>::value) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// ldmatrix: four 8 x 8 tiles of 16-bit values from shared memory. Lanes 8i to 8i + 7 hold the addresses of the rows of
// tile i, 16 bytes each.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&tiles)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row_address)
               : "memory");
}

// The same, transposed: lane 4g + t gets rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&tiles)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row_address)
               : "memory");
}
// Transposes an 8 x 8 tile of 16-bit values in registers: before and after, lane 4g + t has the pair 2t, 2t + 1 of row
// g.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// cp.async of 16 bytes from global to shared memory, bypassing registers and L1. Only `bytes` bytes are read; the rest
// are zeros.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, int bytes) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
  }
}
// Copies 16 bytes, or zeros. Much cheaper than a variable number of bytes, from which the compiler computes an address.
__device__ __forceinline__ void copy_async_16_or_zeros(uint32_t to, const void* from, bool there) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile(
        "{.reg .pred zeros; setp.eq.b32 zeros, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, zeros;}" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(int(there))
        : "memory");
  }
}
// The same as copy_async_16() with a number of bytes, but for 4 bytes and through L1.
__device__ __forceinline__ void copy_async_4(uint32_t to, const void* from, int bytes) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
  }
}
// Copies kBytes (4, 8 or 16) through L1 if `wanted`, or zeros if also `zeros`. Predicated, not a branch, so that the
// compiler can schedule other instructions around it.
template <int kBytes>
__device__ __forceinline__ void copy_async_if(uint32_t to, const void* from, bool wanted, bool zeros) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile(
        "{.reg .pred wanted, zeros; setp.ne.b32 wanted, %2, 0; setp.ne.b32 zeros, %3, 0;"
        "@wanted cp.async.ca.shared.global [%0], [%1], %4, zeros;}" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(int(wanted)), "r"(int(zeros)), "n"(kBytes)
        : "memory");
  }
}
// Copies 16 bytes, and prefetches the 128 bytes around them into L2.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                 : "memory");
  }
}
// Copies 16 bytes if `wanted`. Predicated, not a branch, so that the compiler can schedule other instructions around
// it.
__device__ __forceinline__ void copy_async_16_if(uint32_t to, const void* from, bool wanted) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile(
        "{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16;}" ::
            "r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(int(wanted))
        : "memory");
  }
}
// Copies 16 bytes if `wanted`, or zeros if also `zeros`.
__device__ __forceinline__ void copy_async_16_if(uint32_t to, const void* from, bool wanted, bool zeros) {
  if constexpr (kCompiledFor >= 80) {
    asm volatile(
        "{.reg .pred wanted, zeros; setp.ne.b32 wanted, %2, 0; setp.ne.b32 zeros, %3, 0;"
        "@wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;}" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(int(wanted)), "r"(int(zeros))
        : "memory");
  }
}
__device__ __forceinline__ void copy_async_commit() {
  if constexpr (kCompiledFor >= 80) asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all but the last `kLeft` committed groups have arrived.
template <int kLeft>
__device__ __forceinline__ void copy_async_wait() {
  if constexpr (kCompiledFor >= 80) asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Prefetches the 128 bytes around an address into L2.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// Atomic addition with acquire and release semantics at GPU scope; returns the previous value.
__device__ __forceinline__ unsigned long long atomic_add_released(unsigned long long* p, unsigned long long x) {
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(p)), "l"(x)
               : "memory");
  return before;
}
// The same with release semantics only, and without a result.
__device__ __forceinline__ void add_released(unsigned* p, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(x) : "memory");
}
__device__ __forceinline__ unsigned load_acquired(const unsigned* p) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory");
  return x;
}
// Loads words if `wanted`, or sets zeros, without waiting. The compiler does not move the load across other volatile
// asm.
__device__ __forceinline__ void begin_load_if(uint32_t (&words)[1], const void* p, bool wanted) {
  words[0] = 0;
  if constexpr (kCompiledFor >= 80)
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted ld.global.b32 %0, [%1];}"
                 : "+r"(words[0])
                 : "l"(__cvta_generic_to_global(p)), "r"(int(wanted)));
}
__device__ __forceinline__ void begin_load_if(uint32_t (&words)[2], const void* p, bool wanted) {
  words[0] = words[1] = 0;
  if constexpr (kCompiledFor >= 80)
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %3, 0; @wanted ld.global.v2.b32 {%0, %1}, [%2];}"
                 : "+r"(words[0]), "+r"(words[1])
                 : "l"(__cvta_generic_to_global(p)), "r"(int(wanted)));
}
// Loads two floats that are read-only during the kernel. The compiler does not move the load across other volatile asm,
// and waits for it where the floats are used.
__device__ __forceinline__ void begin_load(float (&x)[2], const float* p) {
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "l"(__cvta_generic_to_global(p)));
}
// 64-bit words that other blocks write or read concurrently: each word is loaded or stored as a whole.
__device__ __forceinline__ void load_words(unsigned long long (&x)[2], const unsigned long long* p) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(x[0]), "=l"(x[1])
               : "l"(__cvta_generic_to_global(p))
               : "memory");
}
__device__ __forceinline__ void store_word(unsigned long long* p, unsigned long long x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(x) : "memory");
}
__device__ __forceinline__ void store_words(unsigned long long* p, unsigned long long x, unsigned long long y) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "l"(x), "l"(y)
               : "memory");
}

}  // namespace arch
KERNELS_END
