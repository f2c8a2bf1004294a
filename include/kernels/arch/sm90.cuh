// One function per sm_90 instruction. On older targets they are empty: callers ask arch::kClusters first where the
// meaning would change.
#pragma once

#include <cstdint>

#include "arch.cuh"

KERNELS_BEGIN
namespace arch {

// Waits until the kernel before this one in the stream has finished, when launched with programmatic dependence;
// otherwise returns at once.
__device__ __forceinline__ void grid_dependency_wait() {
  if constexpr (kCompiledFor >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel in the stream start being scheduled.
__device__ __forceinline__ void grid_dependency_trigger() {
  if constexpr (kCompiledFor >= 90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
  if constexpr (kClusters) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ unsigned cluster_size() {
  unsigned size = 1;
  if constexpr (kClusters) asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Arrive without ordering memory: "this block is running".
__device__ __forceinline__ void cluster_arrive_relaxed() {
  if constexpr (kClusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kClusters) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kClusters) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes 4 bytes to the same shared-memory variable of another block of the cluster.
__device__ __forceinline__ void store_remote(void* local, unsigned rank, uint32_t value) {
  if constexpr (kClusters) {
    uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(local)), there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
  }
}

}  // namespace arch
KERNELS_END
