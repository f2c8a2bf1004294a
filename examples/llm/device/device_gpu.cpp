// The GPU as a device: memory, copies and graphs of the CUDA runtime. CMake lists the calls that are compiled in in
// LLM_GPU_UNITS as CALLS(type, name).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device/device.h"

namespace llm {

#define CALLS(type, name) extern const type name;
LLM_GPU_UNITS
#undef CALLS

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error("CUDA: ", cudaGetErrorString(error));
}

class Gpu : public Device {
 public:
  Gpu(Type activations, int threads) {
    check(cudaGetDevice(&device_));
    check(cudaGetDeviceProperties(&about_, device_));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaMalloc(&between_, 1));
    place_.stream = stream_;
    place_.threads = threads_of(threads);  // converts weights
    // For measurements: LLM_EARLY=0 turns programmatic dependent launch off, LLM_GRAPH=0 graph capture, and LLM_WALK=0
    // the persistent kernel of walk.cu.
    const auto on = [](const char* name) {
      const char* const value = std::getenv(name);
      return value == nullptr || std::strcmp(value, "0") != 0;
    };
    place_.early = on("LLM_EARLY");
    graphs_ = on("LLM_GRAPH");
    Units units;
#define CALLS(type, name) units.add(name);
    LLM_GPU_UNITS
#undef CALLS
    for (const Calls& unit : units) {
      if (calls_.rows == nullptr || unit.rows->activations == activations) calls_ = unit;
    }
    if (!on("LLM_WALK")) std::fill_n(calls_.walk, kTypes, nullptr);
  }
  ~Gpu() override {
    (void)cudaFree(between_);
    (void)cudaStreamDestroy(stream_);
  }

  std::string name() const override {
    return std::string(about_.name) + ", activations in " + name_of(rows().activations);
  }
  bool is_host() const override { return false; }
  // Eight layers of Mistral-7B on an H200: 142,900 tokens/s; in chunks of 1,024 140,400, of 512 116,100.
  int64_t chunk() const override { return 2048; }
  int ahead() const override { return 4; }
  size_t free_bytes(size_t) const override {
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all));
    return free;
  }
  std::shared_ptr<void> allocate(size_t bytes, bool shared) override {
    void* p = nullptr;
    if ((shared ? cudaHostAlloc(&p, bytes, cudaHostAllocMapped) : cudaMalloc(&p, bytes)) != cudaSuccess)
      return (void)cudaGetLastError(), nullptr;
    if (shared) std::memset(p, 0, bytes);
    else check(cudaMemsetAsync(p, 0, bytes, stream_));
    return {p, shared ? cudaFreeHost : cudaFree};
  }
  void upload(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
    synchronize();
  }
  void download(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    synchronize();
  }
  void synchronize() override { check(cudaStreamSynchronize(stream_)); }
  bool idle() override {
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaErrorNotReady) return (void)cudaGetLastError(), false;
    check(error);
    return true;
  }
  std::function<void()> record(const std::function<void()>& calls) override {
    // The kernels of a step must not begin before the step before has ended. Graphs wait for each other; without graphs
    // a memset, which is not launched programmatically, waits.
    if (!graphs_) return [this, calls] { check(cudaMemsetAsync(between_, 0, 1, stream_)), calls(); };
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    try {
      calls();
    } catch (...) {
      (void)cudaStreamEndCapture(stream_, &graph);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph));
    cudaGraphExec_t made = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&made, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(error);
    const std::shared_ptr<CUgraphExec_st> kept(made, cudaGraphExecDestroy);
    return [this, kept] { check(cudaGraphLaunch(kept.get(), stream_)); };
  }

 private:
  int device_ = 0;
  cudaDeviceProp about_{};
  cudaStream_t stream_ = nullptr;
  void* between_ = nullptr;
  bool graphs_ = true;
};

}  // namespace

std::unique_ptr<Device> make_gpu(Type activations, int threads, std::string& why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    why = error != cudaSuccess ? cudaGetErrorString(error) : "no GPU found";
    return nullptr;
  }
  return std::make_unique<Gpu>(activations, threads);
}

}  // namespace llm
