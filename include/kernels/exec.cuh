// Exec: where a call runs (a stream and its device), and with what (workspace, programmatic launch). Calls also accept
// a bare stream. In detail: launch<Body>(), which starts a kernel.
//
//   k::Exec ex{stream};                        // a bare stream converts to one
//   k::Exec ex = k::Exec{stream}.workspace(p, bytes).programmatic(true);
//
// The stream must belong to the device that was current when the Exec was made. Calls run on that device; if another
// one is current on the calling thread, they switch to it for the duration of the call. A bare stream must belong to
// the current device. The library does not check this, as a stream that is being captured cannot be queried.
//
// Making an Exec and calling with it allocate nothing on the device and do not synchronize, so both are allowed during
// graph capture. Queries to the CUDA runtime are made once for each kernel and device, and cached.
#pragma once

#include <cuda_runtime.h>

#include "arch/arch.cuh"
#include "arch/sm90.cuh"
#include "core/concepts.h"
#include "core/facts.h"
#include "core/status.h"
#include "core/workspace.h"

KERNELS_BEGIN

struct DeviceInfo {
  int device = 0;
  int sm_count = 0;
  int shared_per_block = 0;  // with opt-in
  int shared_per_sm = 0;
  int capability = 0;        // 80, 90 ...
  int memory_gbs = 0;        // GB/s by the data sheet; 0 where the driver does not report it
};

namespace detail {
// The error goes into the Status only: the runtime's own "last error" is cleared.
KERNELS_OF_THIS_LIBRARY inline Status from_cuda(cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return {Code::device, cudaGetErrorString(error), static_cast<int>(error)};
}

KERNELS_OF_THIS_LIBRARY inline Facts<int, DeviceInfo> known_devices;

KERNELS_OF_THIS_LIBRARY inline Status find_device(int device, DeviceInfo& info) {
  if (const DeviceInfo* known = known_devices.find(device)) return info = *known, Status{};
  Status status;
  const auto attribute = [&](int& value, cudaDeviceAttr name) {
    if (status) status = from_cuda(cudaDeviceGetAttribute(&value, name, device));
  };
  info.device = device;
  int major = 0, minor = 0;
  attribute(info.sm_count, cudaDevAttrMultiProcessorCount);
  attribute(info.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  attribute(info.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  attribute(major, cudaDevAttrComputeCapabilityMajor);
  attribute(minor, cudaDevAttrComputeCapabilityMinor);
  info.capability = 10 * major + minor;
  int kilohertz = 0, bits = 0;
  const bool told = from_cuda(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device)).ok() &&
                    from_cuda(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device)).ok();
  info.memory_gbs = told ? int(2. * kilohertz * bits / 8e6) : 0;
  if (status) info = known_devices.keep(device, info);
  return status;
}
KERNELS_OF_THIS_LIBRARY inline Status find_current_device(DeviceInfo& info) {
  int device = 0;
  KERNELS_TRY(from_cuda(cudaGetDevice(&device)));
  return find_device(device, info);
}
}  // namespace detail

class Exec {
 public:
  Exec(cudaStream_t stream = nullptr) : stream_(stream), status_(detail::find_current_device(device_)) {}
  // Uses only part of a device, as if it had fewer multiprocessors or less shared memory. On sm_90, tiles of products
  // are refused if this device has less shared memory than every sm_90 GPU has.
  Exec(cudaStream_t stream, const DeviceInfo& device) : stream_(stream), device_(device) {}

  Exec& workspace(void* ptr, size_t bytes) { workspace_ = {ptr, bytes}; return *this; }
  // Programmatic dependent launch (sm_90): a kernel may start before its predecessor in the stream has ended. It waits
  // for the predecessor before it reads anything except data that the caller declared ready: weights
  // (MatmulPolicy::weights_ready), and old keys with lengths and page tables (Attention::new_keys). If a kernel that is
  // not of this library runs ahead, it must call cudaTriggerProgrammaticLaunchCompletion only after its own wait, as
  // this library's kernels do: then all kernels before it have ended.
  Exec& programmatic(bool on) { programmatic_ = on; return *this; }
  // With programmatic(true): promises that no kernel that may still be running, however far ahead, writes the data
  // declared ready, such as weights that do not change while this stream has work. The promise also holds for old keys
  // and lengths if a node that is not launched programmatically separates their writer from the readers, as the
  // beginning of a graph does. Then a kernel that starts early lets its successor start at once, not only after its own
  // wait.
  Exec& constant_weights(bool yes) { constant_weights_ = yes; return *this; }

  cudaStream_t stream() const { return stream_; }
  const DeviceInfo& device() const { return device_; }
  const Workspace& workspace() const { return workspace_; }
  bool programmatic() const { return programmatic_; }
  bool constant_weights() const { return constant_weights_; }
  const Status& status() const { return status_; }

 private:
  cudaStream_t stream_;
  DeviceInfo device_;
  Workspace workspace_;
  bool programmatic_ = false, constant_weights_ = false;
  Status status_;
};

namespace detail {

// The registers of a thread are limited, not the blocks of a multiprocessor: one kernel then serves small and large
// blocks.
#if CUDART_VERSION >= 12040
#define KERNELS_BOUNDS(Body) __maxnreg__(Body::registers)
#else
#define KERNELS_BOUNDS(Body) __launch_bounds__(Body::max_threads, 65536 / Body::registers / Body::max_threads)
#endif

// waits_for_predecessor_itself: the body starts before the kernel ahead has ended (programmatic dependent launch), and
// waits for that kernel itself, in every block that does any work. It waits with grid_dependency_pass(), which also
// lets the next kernel start as soon as there is room, or without letting it start (Launch::holds_dependents).
//
// For other bodies entry() waits before they run. It then also lets the next kernel start, but only if all blocks run
// at the same time: with 49,152 blocks of one warp, the trigger alone took 60 us. With constant weights the next kernel
// may start even earlier.
KERNELS_DETECT(waits_for_predecessor_itself, F::waits_for_predecessor_itself)

// When a kernel lets a programmatically launched successor start: where its body says so (or at its end), after the
// wait for its own predecessor, or at once.
enum class DependentLaunch : uint8_t { by_body, after_wait, at_start };

// The only __global__ function. A Body is a struct with Params, max_threads, registers, and a static device function
// run(Params).
template <class Body>
__global__ void KERNELS_BOUNDS(Body) entry(const __grid_constant__ typename Body::Params params, DependentLaunch next) {
  if (next == DependentLaunch::at_start) arch::launch_dependents();
  if constexpr (!waits_for_predecessor_itself<Body>::value) arch::grid_dependency_wait();
  if (next == DependentLaunch::after_wait) arch::launch_dependents();
  Body::run(params);
}

struct Launch {
  dim3 grid = dim3(1, 1, 1);
  int threads = 1;
  size_t shared = 0;
  int cluster = 1;  // blocks along x that form a cluster
  bool secondary = false;  // the secondary kernel of a call (programmatic dependent launch)
  // Lets the next kernel start only when this one ends. For kernels that take nearly all shared memory and are followed
  // by one that reads through the L1. A multiprocessor keeps its split between shared memory and L1 while any block is
  // resident, so in a chain that never drains the following kernels run with a small L1. H200, Mistral-7B, 16,000 keys:
  // the product behind decode() took 72 us instead of 54, and a layer 154 instead of 132 (bench/step).
  bool holds_dependents = false;
};

constexpr size_t kSharedWithoutOptIn = 40 << 10;  // of 48 KB: bodies also have a little static shared memory
constexpr int kPortableCluster = 8;
constexpr bool kCapturesEarly = CUDART_VERSION >= 12030;  // whether graph capture supports programmatic launches

// Makes a device current while this object lives.
class KERNELS_OF_THIS_LIBRARY CurrentDevice {
 public:
  explicit CurrentDevice(int device) : status_(from_cuda(cudaGetDevice(&before_))) {
    if (!status_ || before_ == device) return;
    status_ = from_cuda(cudaSetDevice(device));
    switched_ = status_.ok();
  }
  ~CurrentDevice() {
    if (switched_) (void)from_cuda(cudaSetDevice(before_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  int before_ = 0;
  bool switched_ = false;
  Status status_;
};

// Identifies a kernel on a device, prepared for one kind of launch. The kernel's address is part of the key, as each
// translation unit may have its own entry<Body>, while all share one list.
struct KernelKey {
  const void* kernel;
  int device;
  bool much_shared, large_cluster;
  bool operator==(const KernelKey& other) const {
    return kernel == other.kernel && device == other.device && much_shared == other.much_shared &&
           large_cluster == other.large_cluster;
  }
};
// Cached facts of the loaded image: its virtual architecture, its static shared memory in bytes, and the registers of a
// thread.
struct KernelImage {
  int capability = 0, declared_shared = 0, registers = 0;
};
using PreparedKernels = Facts<KernelKey, KernelImage>;
// Attributes are set once to the maximum that any launch may need, as all threads share them. The device must be
// current.
KERNELS_OF_THIS_LIBRARY inline Status ask_and_prepare(const KernelKey& key, KernelImage& image) {
  cudaFuncAttributes attributes;
  KERNELS_TRY(from_cuda(cudaFuncGetAttributes(&attributes, key.kernel)));
  image = {attributes.ptxVersion, int(attributes.sharedSizeBytes), attributes.numRegs};
  if (key.much_shared) {
    DeviceInfo whole;  // the device itself, not the part of it that an Exec may be limited to
    KERNELS_TRY(find_device(key.device, whole));
    const int most = whole.shared_per_block - image.declared_shared;
    KERNELS_TRY(from_cuda(cudaFuncSetAttribute(key.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most)));
  }
  if (key.large_cluster)
    KERNELS_TRY(from_cuda(cudaFuncSetAttribute(key.kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)));
  return {};
}
KERNELS_OF_THIS_LIBRARY inline Status prepare(PreparedKernels& prepared, const KernelKey& key, KernelImage& image) {
  if (const KernelImage* known = prepared.find(key)) return image = *known, Status{};
  const CurrentDevice current(key.device);
  KERNELS_TRY(current.status());
  KERNELS_TRY(ask_and_prepare(key, image));
  image = prepared.keep(key, image);
  return {};
}

// Fills a launch's configuration; `attributes` must outlive its use. early: programmatic launch, before the kernel
// ahead has ended.
KERNELS_OF_THIS_LIBRARY inline cudaLaunchConfig_t configure(const Exec& ex, const Launch& how, bool early,
                                                            cudaLaunchAttribute (&attributes)[2]) {
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

// Key for the number of clusters of this kind that the device runs at the same time.
struct ClusterKey {
  const void* kernel;
  int device, threads, cluster;
  size_t shared;
  bool operator==(const ClusterKey& other) const {
    return kernel == other.kernel && device == other.device && threads == other.threads && cluster == other.cluster &&
           shared == other.shared;
  }
};

// Everything that is asked of the runtime about a body's kernel. It is a class because functions and variables whose
// type depends on a functor with internal linkage cannot have hidden visibility themselves.
template <class Body>
struct KERNELS_OF_THIS_LIBRARY KernelOf {
  static inline PreparedKernels prepared;
  static inline Facts<ClusterKey, int64_t> clusters_of;

  static const void* address() { return reinterpret_cast<const void*>(&entry<Body>); }
  static Status image(const Exec& ex, KernelImage& image) {
    return prepare(prepared, {address(), ex.device().device, false, false}, image);
  }
  static Status prepare_launch(const Exec& ex, const Launch& how, KernelImage& image) {
    if (how.shared > size_t(ex.device().shared_per_block))
      return unsupported("the call needs more shared memory than a block of this device can have");
    return prepare(prepared,
                   {address(), ex.device().device, how.shared > kSharedWithoutOptIn, how.cluster > kPortableCluster},
                   image);
  }

  static Status clusters(const Exec& ex, const Launch& how, int64_t& count) {
    const ClusterKey key{address(), ex.device().device, how.threads, how.cluster, how.shared};
    if (const int64_t* known = clusters_of.find(key)) return count = *known, Status{};
    KernelImage image;
    KERNELS_TRY(prepare_launch(ex, how, image));
    const CurrentDevice current(key.device);
    KERNELS_TRY(current.status());
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = configure(ex, how, false, attributes);
    int found = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&found, &entry<Body>, &config);
    const Status counted = from_cuda(error);
    if (!counted && error != cudaErrorInvalidClusterSize) return counted;  // otherwise none fit
    count = clusters_of.keep(key, found);
    return {};
  }

  static Status launch(const Exec& ex, const Launch& how, const typename Body::Params& params) {
    static_assert(sizeof(typename Body::Params) <= 4096 - sizeof(DependentLaunch),
                  "the functors are larger than a kernel's parameter space");
    KERNELS_TRY(ex.status());
    KernelImage image;
    KERNELS_TRY(prepare_launch(ex, how, image));
    const CurrentDevice current(ex.device().device);
    KERNELS_TRY(current.status());
    const bool early = (ex.programmatic() || (how.secondary && kCapturesEarly)) && ex.device().capability >= 90 &&
                       image.capability >= 90;  // code for older GPUs does not wait
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = configure(ex, how, early, attributes);
    const bool all_at_a_time = int64_t(how.grid.x) * how.grid.y * how.grid.z <= ex.device().sm_count;
    DependentLaunch next = DependentLaunch::by_body;
    if (early && !how.holds_dependents && (waits_for_predecessor_itself<Body>::value || all_at_a_time)) {
      if (ex.constant_weights())
        next = DependentLaunch::at_start;
      else if (!waits_for_predecessor_itself<Body>::value)
        next = DependentLaunch::after_wait;
    }
    return from_cuda(cudaLaunchKernelEx(&config, &entry<Body>, params, next));
  }
};

// The virtual architecture of the kernel's loaded image: 80 for sm_80 code, even if the driver compiled it for a newer
// GPU. Tells whether the image contains cluster instructions.
template <class Body>
Status image_architecture(const Exec& ex, int& capability) {
  KernelImage image;
  KERNELS_TRY(KernelOf<Body>::image(ex, image));
  capability = image.capability;
  return {};
}

// Whether the loaded image has code for a body that only some architectures implement. An empty body uses few
// registers, a real one most of its limit; the virtual architecture does not distinguish sm_90a from sm_90.
template <class Body>
Status has_code(const Exec& ex, bool& yes) {
  KernelImage image;
  KERNELS_TRY(KernelOf<Body>::image(ex, image));
  yes = image.registers > Body::registers / 2;
  return {};
}

template <class Body>
Status resident_clusters(const Exec& ex, const Launch& how, int64_t& clusters) {
  return KernelOf<Body>::clusters(ex, how, clusters);
}

template <class Body>
Status launch(const Exec& ex, const Launch& how, const typename Body::Params& params) {
  return KernelOf<Body>::launch(ex, how, params);
}

}  // namespace detail
KERNELS_END
