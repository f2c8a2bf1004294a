// One function per PTX instruction that functors need and CUDA has no intrinsic for. The only part of arch/ that core/
// and functor.h see; it depends on nothing and is empty for the host.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace arch {

#if defined(__CUDACC__)

// 2^x to 2 units of the last place; results below 2^-126 are 0. __expf and exp2f spend three more instructions on
// those.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, with its origin hidden from the compiler. In a loop over rows it keeps the addresses of a row together, as one base
// with constant offsets, where the compiler would keep one register pair per access alive across rows.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Copies kBytes (4, 8 or 16, aligned so) from global to shared memory while the thread goes on. wait_async<n>: all but the
// n latest groups that this thread closed have arrived, for itself to read.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(kBytes) : "memory");
  }
}
__device__ __forceinline__ void close_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void wait_async() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

#endif

}  // namespace arch
KERNELS_END
