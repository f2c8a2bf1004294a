// One function per scalar PTX instruction that CUDA has no intrinsic for. The only part of arch/ that core/ sees; it
// depends on nothing and is empty for the host.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace arch {

#if defined(KERNELS_DEVICE_CODE)

// 2^x to 2 units of the last place; results below 2^-126 are 0. __expf and exp2f spend three more instructions on
// those.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#endif

}  // namespace arch
KERNELS_END
