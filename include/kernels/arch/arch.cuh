// What the architecture being compiled for can do. The one place in device code that tests __CUDA_ARCH__.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace arch {

#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 10;  // 80, 90 ...
#else
constexpr int kCompiledFor = 0;  // the host pass
#endif

constexpr bool kClusters = kCompiledFor >= 90;

// Products of whole warpgroups: code for sm_90a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kWarpgroupMma = true;
#else
constexpr bool kWarpgroupMma = false;
#endif

}  // namespace arch
KERNELS_END
