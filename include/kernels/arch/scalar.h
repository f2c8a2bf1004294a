// PTX instructions without a CUDA intrinsic that functors need, and hints to host compilers that C++ has no words for.
// The only part of arch/ that core/, functor/ and cpu/ include; it depends on nothing.
#pragma once

#include <cstdint>

#include "../core/macros.h"

KERNELS_BEGIN
namespace arch {

// Keeps a vector in a register. The compiler would load it again for each use, but fewer loads than multiplications are
// executed per cycle.
template <class V>
KERNELS_INLINE inline V held(V v) {
#if defined(__GNUC__) && !defined(__CUDACC__) && defined(__AVX__)
  asm("" : "+v"(v));
#endif
  return v;
}

// A result, rounded here. GCC would fuse a product with the next sum, also where a conversion to double and back is
// written between them: it does not change the number, so GCC removes it.
template <class V>
KERNELS_HD V rounded(V v) {
#if defined(__GNUC__) && !defined(__clang__) && defined(__FMA__) && !defined(KERNELS_DEVICE_CODE)
  asm("" : "+x"(v));
#endif
  return v;
}

#if defined(__CUDACC__)

// 2^x to 2 units in the last place; results below 2^-126 are 0. __expf and exp2f spend three more instructions on
// those.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 unit in the last place; subnormal arguments and results become 0. 1.f / x and __fdividef scale those.
__device__ __forceinline__ float reciprocal_flushed(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Conversions of the two 16-bit numbers in a word from and to floats; `low` is the first in memory. Each is a single
// asm string: intrinsics expand to seven, and compile time depends on their number.
__device__ __forceinline__ void halves_to_floats(uint32_t word, float& low, float& high) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(word));
}
__device__ __forceinline__ uint32_t floats_to_halves(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
  return word;
}
__device__ __forceinline__ uint32_t floats_to_bfloats(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
  return word;
}

// Converts two e4m3 in the lower half of a word to halves, on GPUs without an instruction for it. CUDA's headers take
// ten times as long there. A half with the same bits has an exponent that is 8 too small; what would become 480 is NaN
// in e4m3.
__device__ __forceinline__ uint32_t e4m3_to_halves(uint32_t codes) {
  const uint32_t upper = __byte_perm(codes, 0, 0x1404), bits = (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
  uint32_t halves, is_480;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(bits), "r"(0x5c005c00u));
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(is_480) : "r"(halves & 0x7fff7fffu), "r"(0x5f805f80u));
  return halves | is_480;
}

// x, with its origin hidden from the compiler. In a loop over rows, the addresses of a row then are one base with
// constant offsets. Otherwise the compiler would keep one register pair per access alive across rows.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The same for a global address that the compiler would compute again at each use.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  size_t address = __cvta_generic_to_global(p);
  asm volatile("" : "+l"(address));
  return static_cast<T*>(__cvta_global_to_generic(address));
}

// Stores 16 bytes with the streaming (evict-first) hint, or does nothing. It is predicated, not a branch, so that the
// code around it remains one basic block.
__device__ __forceinline__ void store_if(bool there, void* to, ::uint4 value) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.s32 p, %0, 0;\n @p st.global.cs.v4.u32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int(there)),
      "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

// threadIdx.x, read here. Otherwise the compiler would keep it, and all that is computed from it, in registers across
// rows.
__device__ __forceinline__ int thread_here() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

#endif

}  // namespace arch
KERNELS_END
