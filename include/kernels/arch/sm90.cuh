// One function per sm_90 instruction. On older targets the functions are empty; callers test arch::kClusters first
// where that would change the meaning.
#pragma once

#include <cstdint>

#include "../core/dtype.h"
#include "arch.cuh"

KERNELS_BEGIN
namespace arch {

// Programmatic dependent launch: waits until the preceding kernel in the stream has finished. Returns at once if this
// kernel was not launched that way.
__device__ __forceinline__ void grid_dependency_wait() {
  if constexpr (kCompiledFor >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel in the stream start once all blocks have called this or ended, if it was launched with
// programmatic dependence.
__device__ __forceinline__ void launch_dependents() {
  if constexpr (kCompiledFor >= 90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits, and only then lets the next kernel start. That kernel may read, before its own wait, what the kernel directly
// ahead of it does not write. So all earlier kernels must have finished when it starts; after this block's wait they
// have.
__device__ __forceinline__ void grid_dependency_pass() {
  grid_dependency_wait();
  launch_dependents();
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

// The index of the cluster along x, and the number of clusters. With several blocks per cluster, the compiler derives
// the index by floating point, which is exact below 2^24.
__device__ __forceinline__ unsigned cluster_index() {
  unsigned index = blockIdx.x;
  if constexpr (kClusters) {
    if (cluster_size() > 1) asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  }
  return index;
}
__device__ __forceinline__ unsigned clusters() {
  unsigned count = gridDim.x;
  if constexpr (kClusters) asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kClusters) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kClusters) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives without release semantics.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  if constexpr (kClusters) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The address of the same shared-memory variable in another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(const void* local, unsigned rank) {
  uint32_t there = 0;
  if constexpr (kClusters) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(local)), "r"(rank));
  }
  return there;
}

template <class T>
__device__ __forceinline__ T* in_block(T* local, unsigned rank) {
  if constexpr (kClusters) asm volatile("mapa.u64 %0, %1, %2;" : "=l"(local) : "l"(local), "r"(rank));
  return local;
}

// True in one thread of a warp that is converged. The compiler knows that it is a single thread: instructions that take
// operands from uniform registers, such as copy_box(), are not expanded to a loop over the threads.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected = 1;
  if constexpr (kClusters)
    asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one;}" : "=r"(elected));
  return elected != 0;
}

// The location of an mbarrier: a variable in shared memory, or its shared-memory address.
struct BarrierAddress {
  uint32_t address;
  __device__ __forceinline__ BarrierAddress(const uint64_t* barrier) : address(shared_address(barrier)) {}
  __device__ __forceinline__ BarrierAddress(uint32_t address) : address(address) {}
};
// An mbarrier completes a phase when `count` arrivals and all expected bytes are in.
__device__ __forceinline__ void mbarrier_init(BarrierAddress barrier, int count) {
  if constexpr (kClusters) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.address), "r"(count) : "memory");
  }
}
// Makes initialized mbarriers visible to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  if constexpr (kClusters) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(BarrierAddress barrier) {
  if constexpr (kClusters)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.address) : "memory");
}
// Arrives, as one of the counted arrivals, when all earlier copy_async of this thread have completed.
__device__ __forceinline__ void mbarrier_arrive_copied(BarrierAddress barrier) {
  if constexpr (kClusters)
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(BarrierAddress barrier, int bytes) {
  if constexpr (kClusters) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address), "r"(bytes)
                 : "memory");
  }
}
#define KERNELS_MBARRIER_WAIT(scope)                                                  \
  asm volatile(                                                                        \
      "{\n"                                                                            \
      ".reg .pred done;\n"                                                             \
      "KERNELS_AGAIN_%=:\n"                                                            \
      "mbarrier.try_wait.parity.acquire." scope ".shared::cta.b64 done, [%0], %1;\n"   \
      "@!done bra KERNELS_AGAIN_%=;\n"                                                 \
      "}" ::"r"(barrier.address), "r"(parity) : "memory")
__device__ __forceinline__ void mbarrier_wait(BarrierAddress barrier, int parity) {
  if constexpr (kClusters) KERNELS_MBARRIER_WAIT("cluster");
}
// For barriers on which only threads of this block arrive: it does not invalidate L1.
__device__ __forceinline__ void mbarrier_wait_in_block(BarrierAddress barrier, int parity) {
  if constexpr (kClusters) KERNELS_MBARRIER_WAIT("cta");
}
#undef KERNELS_MBARRIER_WAIT
// Whether the phase has completed; does not wait.
__device__ __forceinline__ bool mbarrier_is_past(BarrierAddress barrier, int parity) {
  uint32_t past = 1;
  if constexpr (kClusters) {
    asm volatile(
        "{.reg .pred past; mbarrier.test_wait.parity.shared::cta.b64 past, [%1], %2; selp.u32 %0, 1, 0, past;}"
        : "=r"(past)
        : "r"(barrier.address), "r"(parity)
        : "memory");
  }
  return past != 0;
}
// An L2 policy for data that is read once: it is evicted first.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy = 0;
  if constexpr (kCompiledFor >= 90)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// A CUtensorMap, made by the driver (detail/tensor_map.cuh). It is read in place: in a kernel's parameters, or in
// global memory.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
// TMA: copies a box of a four-dimensional tensor to shared memory and counts its bytes on a barrier. The box begins at
// these coordinates; elements outside of the tensor are zeros. Only one thread of a warp may call this at a time:
// operands of others would be ignored.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, int x, int y, int z, int w,
                                         BarrierAddress barrier) {
  if constexpr (kClusters) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(barrier.address), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
  }
}
// The same for five dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, int x, int y, int z, int w, int v,
                                         BarrierAddress barrier) {
  if constexpr (kClusters) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier.address), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
  }
}
// The same for four dimensions with a cache policy.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap& map, int x, int y, int z, int w,
                                         BarrierAddress barrier, uint64_t policy) {
  if constexpr (kClusters) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(barrier.address), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
        : "memory");
  }
}
// TMA: copies a box from shared memory to a tensor, clipped at its bounds, of a row at a multiple of 16 bytes: if that
// ends in between, what is behind it is overwritten. Called by one thread of a warp, which then commits its stores, and
// may wait until all but the last kLeft commits have read the shared memory.
__device__ __forceinline__ void store_box(const TensorMap& map, int x, int y, int z, int w, uint32_t from) {
  if constexpr (kClusters) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
  }
}
// The same for contiguous bytes: their number and addresses are multiples of 16.
__device__ __forceinline__ void store_bytes(void* to, uint32_t from, int bytes) {
  if constexpr (kClusters) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
  }
}
__device__ __forceinline__ void stored_boxes_commit() {
  if constexpr (kClusters) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kLeft = 0>
__device__ __forceinline__ void stored_boxes_wait() {
  if constexpr (kClusters) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
// Prefetches a box into L2.
__device__ __forceinline__ void prefetch_box(const TensorMap& map, int x, int y, int z, int w) {
  if constexpr (kClusters) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x), "r"(y),
                 "r"(z), "r"(w));
  }
}
// Prefetches a tensor map from global memory, or a kernel's parameters, for copies that use it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  if constexpr (kClusters) asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Writes 4 bytes (below: 8 or 16) into another block's shared memory and counts them on a barrier of that block.
__device__ __forceinline__ void store_async(uint32_t remote, uint32_t value, uint32_t remote_barrier) {
  if constexpr (kClusters) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote), "r"(value),
                 "r"(remote_barrier)
                 : "memory");
  }
}
__device__ __forceinline__ void store_async(uint32_t remote, uint64_t value, uint32_t remote_barrier) {
  if constexpr (kClusters) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote), "l"(value),
                 "r"(remote_barrier)
                 : "memory");
  }
}
__device__ __forceinline__ void store_async(uint32_t remote, const float (&values)[4], uint32_t remote_barrier) {
  if constexpr (kClusters) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     remote),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(remote_barrier)
                 : "memory");
  }
}
// Arrives on a barrier of another block with release semantics: its threads see what this thread did before.
__device__ __forceinline__ void mbarrier_arrive_there(uint32_t remote_barrier) {
  if constexpr (kClusters) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
  }
}
// Arrives on a barrier of another block and announces `bytes` that come by store_async(). Nothing else is handed over,
// so relaxed semantics suffice; but before PTX 8.6 every arrival is a release.
#if CUDART_VERSION >= 12080
#define KERNELS_ARRIVES "relaxed"
#else
#define KERNELS_ARRIVES "release"
#endif
__device__ __forceinline__ void mbarrier_arrive_expect_there(uint32_t remote_barrier, int bytes) {
  if constexpr (kClusters) {
    asm volatile("mbarrier.arrive.expect_tx." KERNELS_ARRIVES
                 ".cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(remote_barrier),
                 "r"(bytes)
                 : "memory");
  }
}
#undef KERNELS_ARRIVES

// Named barriers, 1 to 15, for some warps of a block. sync() waits until `threads` threads have arrived; arrive() does
// not wait.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// setmaxnreg: how many registers a thread of this warpgroup has from here on. Producers release some that consumers
// take.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  if constexpr (kWarpgroupMma) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  if constexpr (kWarpgroupMma) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The wgmma descriptor of a tile of 16-bit values in shared memory: rows of 128 bytes, contiguous from a multiple of
// 1024 on, with 128-byte swizzle (chunk i of 16 bytes is at i ^ (row % 8)). For the next 16 columns, add 2. For a
// transposed operand, whose rows are k, add 128 for the next 16 rows; the next 64 columns are `run` bytes behind.
__device__ __forceinline__ uint64_t warpgroup_tile(uint32_t at, int run = 16) {
  return uint64_t(at >> 4 & 0x3fffu) | uint64_t(run >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
// The descriptor of the tile that is `sixteens` * 16 bytes further on. Below 256 KB nothing is carried out of the
// address.
__device__ __forceinline__ uint64_t advance_tile(uint64_t tile, int sixteens) {
  return (tile & ~uint64_t(0xffffffffu)) | (uint32_t(tile) + uint32_t(sixteens));
}
// wgmma: half kHalf of d += a * b for a 64 x 16 tile a and a 16 x (32 * kBlocks) tile b, which has a row for each
// column of d. Warp i of the warpgroup has rows 16i to 16i + 15 of d, and of a if that is in registers, in the
// fragments of mma_16816(); columns 32j to 32j + 31 are in block j.
//
// wgmma is asynchronous: call warpgroup_fence(), the products, warpgroup_commit(), and before d is used
// warpgroup_wait() and pin(). Writes to shared memory by ordinary instructions become visible after async_proxy_fence()
// in the thread that wrote, or in one that has waited for it.
#define KERNELS_FLOATS_8(d, i)                                                                                \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define KERNELS_FLOATS(j) KERNELS_FLOATS_8(d[j], 16 * kHalf), KERNELS_FLOATS_8(d[j], 16 * kHalf + 8)
#define KERNELS_FLOATS_32 KERNELS_FLOATS(0)
#define KERNELS_FLOATS_64 KERNELS_FLOATS(0), KERNELS_FLOATS(1)
#define KERNELS_FLOATS_96 KERNELS_FLOATS_64, KERNELS_FLOATS(2)
#define KERNELS_FLOATS_128 KERNELS_FLOATS_96, KERNELS_FLOATS(3)
#define KERNELS_FLOATS_160 KERNELS_FLOATS_128, KERNELS_FLOATS(4)
#define KERNELS_FLOATS_192 KERNELS_FLOATS_160, KERNELS_FLOATS(5)
#define KERNELS_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define KERNELS_NAMES_64 \
  KERNELS_NAMES_32       \
      ", "               \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KERNELS_NAMES_96 \
  KERNELS_NAMES_64       \
      ", "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KERNELS_NAMES_128 \
  KERNELS_NAMES_96        \
      ", "                \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KERNELS_NAMES_160 \
  KERNELS_NAMES_128       \
      ", "                \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KERNELS_NAMES_192 \
  KERNELS_NAMES_160       \
  ", "                    \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KERNELS_WARPGROUP_MMA(n, turns, at_a, at_b, ...)                                                               \
  if constexpr (kBlocks * 32 == n && std::is_same<T, half>::value) {                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" KERNELS_NAMES_##n "}, " at_a ", " at_b     \
                                                                                              ", 1, 1, 1" turns ";"    \
                 : KERNELS_FLOATS_##n                                                                                  \
                 : __VA_ARGS__, "l"(b));                                                                               \
  } else if constexpr (kBlocks * 32 == n) {                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" KERNELS_NAMES_##n "}, " at_a ", " at_b   \
                                                                                                ", 1, 1, 1" turns ";"  \
                 : KERNELS_FLOATS_##n                                                                                  \
                 : __VA_ARGS__, "l"(b));                                                                               \
  }
#define KERNELS_WARPGROUP_MMA_SHARED(n, at_a, at_b) KERNELS_WARPGROUP_MMA(n, ", 0, 0", at_a, at_b, "l"(a))
#define KERNELS_WARPGROUP_MMA_HELD(n, at_a, at_b) \
  KERNELS_WARPGROUP_MMA(n, ", 0", at_a, at_b, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
template <class T, int kHalf, int kBlocks>
__device__ __forceinline__ void warpgroup_mma(float (&d)[kBlocks][32], uint64_t a, uint64_t b) {
  static_assert(kBlocks >= 2 && kBlocks <= 6, "64 to 192 columns");
  static_assert(std::is_same<T, half>::value || std::is_same<T, bfloat16>::value, "half or bfloat16");
  if constexpr (kWarpgroupMma) {
    KERNELS_WARPGROUP_MMA_SHARED(64, "%32", "%33")
    KERNELS_WARPGROUP_MMA_SHARED(96, "%48", "%49")
    KERNELS_WARPGROUP_MMA_SHARED(128, "%64", "%65")
    KERNELS_WARPGROUP_MMA_SHARED(160, "%80", "%81")
    KERNELS_WARPGROUP_MMA_SHARED(192, "%96", "%97")
  }
}
template <class T, int kHalf, int kBlocks>
__device__ __forceinline__ void warpgroup_mma(float (&d)[kBlocks][32], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kBlocks == 1 || kBlocks == 2 || kBlocks == 4, "32, 64 or 128 columns");
  static_assert(std::is_same<T, half>::value || std::is_same<T, bfloat16>::value, "half or bfloat16");
  if constexpr (kWarpgroupMma) {
    KERNELS_WARPGROUP_MMA_HELD(32, "{%16, %17, %18, %19}", "%20")
    KERNELS_WARPGROUP_MMA_HELD(64, "{%32, %33, %34, %35}", "%36")
    KERNELS_WARPGROUP_MMA_HELD(128, "{%64, %65, %66, %67}", "%68")
  }
}
#undef KERNELS_WARPGROUP_MMA_HELD
#undef KERNELS_WARPGROUP_MMA_SHARED
#undef KERNELS_WARPGROUP_MMA
#undef KERNELS_NAMES_192
#undef KERNELS_NAMES_160
#undef KERNELS_NAMES_128
#undef KERNELS_NAMES_96
#undef KERNELS_NAMES_64
#undef KERNELS_NAMES_32
#undef KERNELS_FLOATS_192
#undef KERNELS_FLOATS_160
#undef KERNELS_FLOATS_128
#undef KERNELS_FLOATS_96
#undef KERNELS_FLOATS_64
#undef KERNELS_FLOATS_32
#undef KERNELS_FLOATS
#undef KERNELS_FLOATS_8

// wgmma with d in the fragments of mma_16816(), 8 columns each. adds: accumulate; otherwise d is overwritten. a is a
// tile of 64 rows in shared memory, or fragments of a warp's 16 rows. `turned`: b is transposed, its rows are k.
//
// 8-bit products take 32 columns of a. Lane 4g + t has, of rows g and g + 8, columns 4t to 4t + 3 and the same 16
// columns further.
#define KERNELS_D(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define KERNELS_D_4(j) KERNELS_D(j), KERNELS_D(j + 1), KERNELS_D(j + 2), KERNELS_D(j + 3)
#define KERNELS_D_64 KERNELS_D_4(0), KERNELS_D_4(4)
#define KERNELS_D_80 KERNELS_D_64, KERNELS_D(8), KERNELS_D(9)
#define KERNELS_D_96 KERNELS_D_64, KERNELS_D_4(8)
#define KERNELS_D_128 KERNELS_D_96, KERNELS_D_4(12)
#define KERNELS_NAMES_48  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define KERNELS_NAMES_64 KERNELS_NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define KERNELS_NAMES_80 KERNELS_NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define KERNELS_NAMES_96 KERNELS_NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define KERNELS_NAMES_128 KERNELS_NAMES_96 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KERNELS_D_256 KERNELS_D_128, KERNELS_D_4(16), KERNELS_D_4(20), KERNELS_D_4(24), KERNELS_D_4(28)
#define KERNELS_NAMES_256 KERNELS_NAMES_128 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KERNELS_WARPGROUP_MMA(n, k, type, a_names, b_name, adds_name, turns, ...)                        \
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_name                                          \
               ", 0;"                                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #n "k" k ".f32." type "." type " {" KERNELS_NAMES_##n \
               "}, " a_names ", " b_name ", adds, 1, 1" turns ";}"                                       \
               : KERNELS_D_##n                                                                           \
               : __VA_ARGS__, "l"(b), "r"(int(adds)));
#define KERNELS_WARPGROUP_MMA_SHARED(n, type, a_name, b_name, adds_name) \
  KERNELS_WARPGROUP_MMA(n, "16", type, a_name, b_name, adds_name, ", 0, 0", "l"(a))
#define KERNELS_WARPGROUP_MMA_HELD(n, type, a_names, b_name, adds_name) \
  KERNELS_WARPGROUP_MMA(n, "16", type, a_names, b_name, adds_name, ", 1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))
#define KERNELS_WARPGROUP_MMA_OF(type)                          \
  if constexpr (kEights == 12)                                  \
    KERNELS_WARPGROUP_MMA_SHARED(96, type, "%48", "%49", "%50") \
  else if constexpr (kEights == 8)                              \
    KERNELS_WARPGROUP_MMA_SHARED(64, type, "%32", "%33", "%34") \
  else if constexpr (kEights == 10)                             \
    KERNELS_WARPGROUP_MMA_SHARED(80, type, "%40", "%41", "%42") \
  else                                                          \
    KERNELS_WARPGROUP_MMA_SHARED(128, type, "%64", "%65", "%66")
template <class T, int kEights>
__device__ __forceinline__ void warpgroup_mma(float (&d)[kEights][4], uint64_t a, uint64_t b, bool adds) {
  static_assert(kEights == 8 || kEights == 10 || kEights == 12 || kEights == 16, "64, 80, 96 or 128 columns");
  static_assert(std::is_same<T, half>::value || std::is_same<T, bfloat16>::value || std::is_same<T, float8_e4m3>::value,
                "half, bfloat16 or float8_e4m3");
  if constexpr (kWarpgroupMma) {
    if constexpr (std::is_same<T, float8_e4m3>::value) {
      static_assert(kEights != 10, "64, 96 or 128 columns");
      if constexpr (kEights == 8)
        KERNELS_WARPGROUP_MMA(64, "32", "e4m3", "%32", "%33", "%34", "", "l"(a))
      else if constexpr (kEights == 12)
        KERNELS_WARPGROUP_MMA(96, "32", "e4m3", "%48", "%49", "%50", "", "l"(a))
      else KERNELS_WARPGROUP_MMA(128, "32", "e4m3", "%64", "%65", "%66", "", "l"(a))
    } else if constexpr (std::is_same<T, half>::value) {
      KERNELS_WARPGROUP_MMA_OF("f16")
    } else {
      KERNELS_WARPGROUP_MMA_OF("bf16")
    }
  }
}
// KERNELS_WARPGROUP_MMA_OF for the type T.
#define KERNELS_WARPGROUP_MMA_16_BITS                                                                         \
  static_assert(std::is_same<T, half>::value || std::is_same<T, bfloat16>::value, "half or bfloat16");        \
  if constexpr (kWarpgroupMma) {                                                                              \
    if constexpr (std::is_same<T, half>::value) {                                                             \
      KERNELS_WARPGROUP_MMA_OF("f16")                                                                         \
    } else {                                                                                                  \
      KERNELS_WARPGROUP_MMA_OF("bf16")                                                                        \
    }                                                                                                         \
  }
#undef KERNELS_WARPGROUP_MMA_OF
#define KERNELS_WARPGROUP_MMA_OF(type)                                         \
  if constexpr (kEights == 8)                                                  \
    KERNELS_WARPGROUP_MMA_HELD(64, type, "{%32, %33, %34, %35}", "%36", "%37") \
  else if constexpr (kEights == 12)                                            \
    KERNELS_WARPGROUP_MMA_HELD(96, type, "{%48, %49, %50, %51}", "%52", "%53") \
  else if constexpr (kEights == 16)                                            \
    KERNELS_WARPGROUP_MMA_HELD(128, type, "{%64, %65, %66, %67}", "%68", "%69") \
  else                                                                         \
    KERNELS_WARPGROUP_MMA_HELD(256, type, "{%128, %129, %130, %131}", "%132", "%133")
template <class T, int kEights>
__device__ __forceinline__ void warpgroup_mma_transposed(float (&d)[kEights][4], const uint32_t (&a)[4], uint64_t b,
                                                         bool adds) {
  static_assert(kEights == 8 || kEights == 12 || kEights == 16 || kEights == 32, "64, 96, 128 or 256 columns");
  KERNELS_WARPGROUP_MMA_16_BITS
}
#undef KERNELS_WARPGROUP_MMA_OF
// a in registers, b not transposed.
#define KERNELS_WARPGROUP_MMA_OF(type)                                                                            \
  KERNELS_WARPGROUP_MMA(64, "16", type, "{%32, %33, %34, %35}", "%36", "%37", ", 0", "r"(a[0]), "r"(a[1]), "r"(a[2]), \
                        "r"(a[3]))
template <class T>
__device__ __forceinline__ void warpgroup_mma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  KERNELS_WARPGROUP_MMA_16_BITS
}
#undef KERNELS_WARPGROUP_MMA_OF
// a in shared memory, b transposed.
#define KERNELS_WARPGROUP_MMA_OF(type) \
  KERNELS_WARPGROUP_MMA(256, "16", type, "%128", "%129", "%130", ", 0, 1", "l"(a))
template <class T>
__device__ __forceinline__ void warpgroup_mma_transposed(float (&d)[32][4], uint64_t a, uint64_t b, bool adds) {
  KERNELS_WARPGROUP_MMA_16_BITS
}
#undef KERNELS_WARPGROUP_MMA_OF
// Converts four floats with saturation; a is in the lowest byte.
__device__ __forceinline__ uint32_t floats_to_e4m3(float a, float b, float c, float d) {
  uint32_t four = 0;
  if constexpr (kCompiledFor >= 89) {
    asm("{.reg .b16 low, high;"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return four;
}
template <int kEights>
__device__ __forceinline__ void warpgroup_mma_e4m3(float (&d)[kEights][4], const uint32_t (&a)[4], uint64_t b,
                                                   bool adds) {
  static_assert(kEights == 8 || kEights == 16, "64 or 128 columns");
  if constexpr (kWarpgroupMma) {
    if constexpr (kEights == 8) {
      KERNELS_WARPGROUP_MMA(64, "32", "e4m3", "{%32, %33, %34, %35}", "%36", "%37", "", "r"(a[0]), "r"(a[1]), "r"(a[2]),
                            "r"(a[3]))
    } else {
      KERNELS_WARPGROUP_MMA(128, "32", "e4m3", "{%64, %65, %66, %67}", "%68", "%69", "", "r"(a[0]), "r"(a[1]),
                            "r"(a[2]), "r"(a[3]))
    }
  }
}
// int8 products, exact in int32. (The macros KERNELS_D_n use the current definition of KERNELS_D.)
#undef KERNELS_D
#define KERNELS_D(j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
#define KERNELS_WARPGROUP_MMA_INT8(n, a_name, b_name, adds_name)                                                   \
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, " adds_name                                                    \
               ", 0;"                                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" KERNELS_NAMES_##n "}, " a_name ", " b_name \
                                                                                          ", adds;}"               \
               : KERNELS_D_##n                                                                                     \
               : "l"(a), "l"(b), "r"(int(adds)));
template <class T, int kEights>
__device__ __forceinline__ void warpgroup_mma(int32_t (&d)[kEights][4], uint64_t a, uint64_t b, bool adds) {
  static_assert(std::is_same<T, int8_t>::value && (kEights == 8 || kEights == 12 || kEights == 16),
                "int8_t, and 64, 96 or 128 columns");
  if constexpr (kWarpgroupMma) {
    if constexpr (kEights == 8)
      KERNELS_WARPGROUP_MMA_INT8(64, "%32", "%33", "%34")
    else if constexpr (kEights == 12)
      KERNELS_WARPGROUP_MMA_INT8(96, "%48", "%49", "%50")
    else
      KERNELS_WARPGROUP_MMA_INT8(128, "%64", "%65", "%66")
  }
}
#undef KERNELS_WARPGROUP_MMA_INT8
#undef KERNELS_WARPGROUP_MMA_16_BITS
#undef KERNELS_WARPGROUP_MMA_HELD
#undef KERNELS_WARPGROUP_MMA_SHARED
#undef KERNELS_WARPGROUP_MMA
#undef KERNELS_NAMES_256
#undef KERNELS_NAMES_128
#undef KERNELS_NAMES_96
#undef KERNELS_NAMES_80
#undef KERNELS_NAMES_64
#undef KERNELS_NAMES_48
#undef KERNELS_D_256
#undef KERNELS_D_128
#undef KERNELS_D_96
#undef KERNELS_D_80
#undef KERNELS_D_64
#undef KERNELS_D_4
#undef KERNELS_D
__device__ __forceinline__ void warpgroup_fence() {
  if constexpr (kWarpgroupMma) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit() {
  if constexpr (kWarpgroupMma) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all but the last `kLeft` committed groups have completed.
template <int kLeft>
__device__ __forceinline__ void warpgroup_wait() {
  if constexpr (kWarpgroupMma) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving uses of d across this point.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <class T, int N, class = std::enable_if_t<std::is_integral<T>::value && sizeof(T) == 4>>
__device__ __forceinline__ void pin(T (&d)[N]) {
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <class T, int N>
__device__ __forceinline__ void pin(T (&d)[N][4]) {
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) pin(d[i]);
}
// stmatrix: stores the fragments of a 16 x 16 tile, as mma_16816() has them, to shared memory. Lane i holds the address
// of 8 values of row i % 16: from column 0 on in lanes 0 to 15, from column 8 on in the others.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&fragments)[4]) {
  if constexpr (kCompiledFor >= 90) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(fragments[0]),
                 "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
  }
}
// The same with each 8 x 8 part of the tile transposed: lane i holds the address of row i % 8 of part i / 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, const uint32_t (&fragments)[4]) {
  if constexpr (kCompiledFor >= 90) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(fragments[0]),
                 "r"(fragments[1]), "r"(fragments[2]), "r"(fragments[3])
                 : "memory");
  }
}
__device__ __forceinline__ void async_proxy_fence() {
  if constexpr (kCompiledFor >= 90) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace arch
KERNELS_END
