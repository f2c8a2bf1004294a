// Exec: where work goes (a stream of the current device) and what that device can do; launch<Body>() starts a kernel.
//
//   k::Exec ex{stream};                        // queries the device once; a bare stream converts to one
//   k::Exec ex = k::Exec{stream}.workspace(p, bytes).programmatic(true);
//
// The stream must belong to the device that was current when the Exec was made. Making one costs a few device
// attribute reads, no allocation and no synchronization, so it is allowed during graph capture.
#pragma once

#include <cuda_runtime.h>

#include "arch/arch.cuh"
#include "arch/sm90.cuh"
#include "core/concepts.h"
#include "core/status.h"
#include "core/workspace.h"

KERNELS_BEGIN

struct DeviceInfo {
  int device = 0;
  int sm_count = 0;
  int shared_per_block = 0;  // with opt-in
  int shared_per_sm = 0;
  int capability = 0;        // 80, 90 ...
};

namespace detail {
// The error goes into the Status and nowhere else: the runtime's own "last error" is cleared.
inline Status from_cuda(cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return {Code::device, cudaGetErrorString(error), static_cast<int>(error)};
}
}  // namespace detail

class Exec {
 public:
  Exec(cudaStream_t stream = nullptr) : stream_(stream) { query(); }

  Exec& workspace(void* ptr, size_t bytes) { workspace_ = {ptr, bytes}; return *this; }
  // Programmatic dependent launch (sm_90): the kernel may be scheduled before its predecessor in the stream ends; it
  // waits for it before reading anything.
  Exec& programmatic(bool on) { programmatic_ = on; return *this; }

  cudaStream_t stream() const { return stream_; }
  const DeviceInfo& device() const { return device_; }
  const Workspace& workspace() const { return workspace_; }
  bool programmatic() const { return programmatic_; }
  const Status& status() const { return status_; }

 private:
  void query() {
    const auto attribute = [this](int& value, cudaDeviceAttr name) {
      if (status_) status_ = detail::from_cuda(cudaDeviceGetAttribute(&value, name, device_.device));
    };
    status_ = detail::from_cuda(cudaGetDevice(&device_.device));
    int major = 0, minor = 0;
    attribute(device_.sm_count, cudaDevAttrMultiProcessorCount);
    attribute(device_.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    attribute(device_.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    attribute(major, cudaDevAttrComputeCapabilityMajor);
    attribute(minor, cudaDevAttrComputeCapabilityMinor);
    device_.capability = 10 * major + minor;
  }

  cudaStream_t stream_;
  DeviceInfo device_;
  Workspace workspace_;
  bool programmatic_ = false;
  Status status_;
};

namespace detail {

// Registers per thread are capped, not blocks: one kernel then serves small and large blocks alike.
#if CUDART_VERSION >= 12040
#define KERNELS_BOUNDS(Body) __maxnreg__(Body::registers)
#else
#define KERNELS_BOUNDS(Body) __launch_bounds__(Body::max_threads, 65536 / Body::registers / Body::max_threads)
#endif

// Bodies that begin before the kernel ahead of them has ended, and wait for it themselves. They also let the next kernel begin as
// soon as there is room. Others do not: blocks of one warp start so often that this alone took 60 us for 49,152 of them.
template <class Body, class = void>
struct begins_early : std::false_type {};
template <class Body>
struct begins_early<Body, void_t<decltype(Body::early)>> : std::true_type {};

// The one kernel: every Body is a struct with Params, max_threads and registers, and a static device function run(Params).
template <class Body>
__global__ void KERNELS_BOUNDS(Body) entry(const __grid_constant__ typename Body::Params params) {
  if constexpr (begins_early<Body>::value) arch::grid_dependency_trigger();
  else arch::grid_dependency_wait();
  Body::run(params);
}

struct Launch {
  dim3 grid = dim3(1, 1, 1);
  int threads = 1;
  size_t shared = 0;
  int cluster = 1;  // blocks along x that form a cluster
};

constexpr size_t kSharedWithoutOptIn = 40 << 10;  // of 48 KB: bodies also have a little static shared memory
constexpr int kPortableCluster = 8;

// The virtual architecture a kernel's loaded image was compiled for: 80 for sm_80 code, also when the driver translated
// it for a newer GPU. Tells whether cluster instructions are in it.
template <class Body>
Status image_architecture(int& capability) {
  cudaFuncAttributes attributes;
  KERNELS_TRY(from_cuda(cudaFuncGetAttributes(&attributes, entry<Body>)));
  capability = attributes.ptxVersion;
  return {};
}

// Fills a launch's configuration; `attributes` must outlive its use. early: before the kernel ahead has ended.
inline cudaLaunchConfig_t configure(const Exec& ex, const Launch& how, bool early, cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = dim3(how.threads, 1, 1);
  config.dynamicSmemBytes = how.shared;
  config.stream = ex.stream();
  config.attrs = attributes;
  if (how.cluster > 1) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = how.cluster;
    a.val.clusterDim.y = 1;
    a.val.clusterDim.z = 1;
  }
  if (early) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

inline Status prepare(const Exec& ex, const Launch& how, const void* kernel) {
  if (how.shared > size_t(ex.device().shared_per_block)) return unsupported("the row needs more shared memory than a block can have");
  if (how.shared > kSharedWithoutOptIn) {
    KERNELS_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(how.shared))));
  }
  if (how.cluster > kPortableCluster) {
    KERNELS_TRY(from_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
  }
  return {};
}

// How many clusters of this kind run at the same time on the device.
template <class Body>
Status resident_clusters(const Exec& ex, const Launch& how, int64_t& clusters) {
  const auto kernel = &entry<Body>;
  KERNELS_TRY(prepare(ex, how, reinterpret_cast<const void*>(kernel)));
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = configure(ex, how, false, attributes);
  int count = 0;
  KERNELS_TRY(from_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &config)));
  clusters = count;
  return {};
}

template <class Body>
Status launch(const Exec& ex, const Launch& how, const typename Body::Params& params) {
  static_assert(sizeof(typename Body::Params) <= 4096, "the functors are larger than a kernel's parameter space");
  KERNELS_TRY(ex.status());
  // Each translation unit has its own entry<Body>: the one that is prepared must be the one that is launched.
  const auto kernel = &entry<Body>;
  KERNELS_TRY(prepare(ex, how, reinterpret_cast<const void*>(kernel)));
  bool early = ex.programmatic() && ex.device().capability >= 90;
  if (early) {  // code for older GPUs does not wait
    int image = 0;
    KERNELS_TRY(image_architecture<Body>(image));
    early = image >= 90;
  }
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = configure(ex, how, early, attributes);
  return from_cuda(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace detail
KERNELS_END
