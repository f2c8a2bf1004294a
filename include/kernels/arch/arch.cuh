// Capabilities of the architecture that is being compiled for. The only place in device code that tests __CUDA_ARCH__.
#pragma once

#include "../core/macros.h"

#if !defined(__CUDACC__)
#error "kernels: .cuh headers are for .cu files; what .cpp files call in them takes a cudaStream_t and plain pointers"
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "kernels: code is for sm_80 and newer: nvcc -arch=sm_80, or CMAKE_CUDA_ARCHITECTURES=80"
#endif

KERNELS_BEGIN
namespace arch {

#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 10;  // 80, 90 ...
#else
constexpr int kCompiledFor = 0;  // the host pass
#endif

constexpr bool kClusters = kCompiledFor >= 90;

// Whether wgmma and setmaxnreg are used: in code for sm_90a only, and not with -rdc=true, where warps cannot reallocate
// registers and the compiler serializes wgmma.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(__CUDACC_RDC__)
constexpr bool kWarpgroupMma = true;
#else
constexpr bool kWarpgroupMma = false;
#endif

}  // namespace arch
KERNELS_END
