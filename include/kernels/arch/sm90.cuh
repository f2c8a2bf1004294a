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

__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kClusters) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kClusters) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The same shared-memory variable in another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* local, unsigned rank) {
  uint32_t there = 0;
  if constexpr (kClusters) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(local)), "r"(rank));
  }
  return there;
}

// mbarrier: completes a phase when `count` arrivals and all expected bytes are in.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
  if constexpr (kClusters) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
  }
}
// Makes initialized barriers visible to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  if constexpr (kClusters) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  if constexpr (kClusters) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  if constexpr (kClusters) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "KERNELS_AGAIN_%=:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra KERNELS_AGAIN_%=;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
  }
}
// Writes 4 bytes into another block's shared memory and counts them on a barrier of that block.
__device__ __forceinline__ void store_async(uint32_t remote, uint32_t value, uint32_t remote_barrier) {
  if constexpr (kClusters) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote), "r"(value),
                 "r"(remote_barrier)
                 : "memory");
  }
}

}  // namespace arch
KERNELS_END
