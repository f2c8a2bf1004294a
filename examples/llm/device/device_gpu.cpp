// The GPU as a device: memory, copies and graphs of the CUDA runtime. LLM_GPU_UNITS lists the calls that are compiled
// in: ROWS(unit), PRODUCTS(unit, weights), ATTEND(unit, cache) and WALK(unit, weights), from CMake.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device/device.h"

namespace llm {

#define ROWS(unit) extern const RowCalls gpu_rows_##unit##_calls;
#define PRODUCTS(unit, weights) extern const ProductCalls gpu_products_##unit##_##weights;
#define ATTEND(unit, cache) extern const AttendCalls gpu_attend_##unit##_##cache;
#define WALK(unit, weights) extern const WalkCalls gpu_walk_##unit##_##weights;
LLM_GPU_UNITS
#undef WALK
#undef ROWS
#undef PRODUCTS
#undef ATTEND

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(std::string("the GPU: ") + cudaGetErrorString(error));
}

class Graph : public Recording {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& calls) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      calls();
    } catch (...) {
      (void)cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph));
    const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(error);
  }
  ~Graph() override { (void)cudaGraphExecDestroy(graph_); }
  void replay() override { check(cudaGraphLaunch(graph_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_ = nullptr;
};

class Gpu : public Device {
 public:
  Gpu(const std::vector<Type>& activations, int threads) {
    check(cudaGetDevice(&device_));
    check(cudaGetDeviceProperties(&about_, device_));
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    check(cudaMalloc(&between_, 1));
    place_.stream = stream_;
    place_.threads = threads_of(threads);  // converts weights
    // For measurements: LLM_EARLY=0 launches kernels one after the other, LLM_GRAPH=0 without a graph, and LLM_WALK=0
    // makes each call of a step a launch.
    const auto on = [](const char* name) {
      const char* const value = std::getenv(name);
      return value == nullptr || std::strcmp(value, "0") != 0;
    };
    place_.early = on("LLM_EARLY");
    graphs_ = on("LLM_GRAPH");
    const bool walks = on("LLM_WALK");
    const auto place_of = [&](const RowCalls& rows) {
      return std::find(activations.begin(), activations.end(), rows.activations);
    };
    const auto take = [&](const RowCalls& rows) {
      if (rows_ == nullptr || place_of(rows) < place_of(*rows_)) rows_ = &rows;
    };
    const auto take_products = [&](const ProductCalls& products) {
      if (std::strcmp(products.name, rows_->name) == 0) products_[int(products.weights)] = &products;
    };
    const auto take_attend = [&](const AttendCalls& attend) {
      if (std::strcmp(attend.name, rows_->name) == 0) attend_[int(attend.cache)] = &attend;
    };
    const auto take_walk = [&](const WalkCalls& walk) {
      if (walks && std::strcmp(walk.name, rows_->name) == 0) walks_[int(walk.weights)] = &walk;
    };
#define ROWS(unit) take(gpu_rows_##unit##_calls);
#define PRODUCTS(unit, weights)
#define ATTEND(unit, cache)
#define WALK(unit, weights)
    LLM_GPU_UNITS
#undef WALK
#undef ROWS
#undef PRODUCTS
#undef ATTEND
#define ROWS(unit)
#define PRODUCTS(unit, weights) take_products(gpu_products_##unit##_##weights);
#define ATTEND(unit, cache) take_attend(gpu_attend_##unit##_##cache);
#define WALK(unit, weights) take_walk(gpu_walk_##unit##_##weights);
    LLM_GPU_UNITS
#undef WALK
#undef ROWS
#undef PRODUCTS
#undef ATTEND
  }
  ~Gpu() override {
    release(between_);
    (void)cudaStreamDestroy(stream_);
  }

  std::string name() const override {
    return std::string(about_.name) + ", activations in " + name_of(rows_->activations);
  }
  bool is_host() const override { return false; }
  int64_t chunk() const override {
    return 2048;
  }  // eight layers of Mistral-7B on an H200: 142,900 tokens/s; chunks of 1,024: 140,400, of 512: 116,100
  int ahead() const override { return 4; }
  size_t free_bytes() const override {
    size_t free = 0, all = 0;
    check(cudaMemGetInfo(&free, &all));
    return free;
  }
  void* allocate(size_t bytes) override {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) != cudaSuccess) return (void)cudaGetLastError(), nullptr;
    check(cudaMemsetAsync(p, 0, bytes, stream_));
    return p;
  }
  void release(void* p) override { (void)cudaFree(p); }
  void* allocate_shared(size_t bytes) override {
    void* p = nullptr;
    if (cudaHostAlloc(&p, bytes, cudaHostAllocMapped) != cudaSuccess) return (void)cudaGetLastError(), nullptr;
    std::memset(p, 0, bytes);
    return p;
  }
  void release_shared(void* p) override { (void)cudaFreeHost(p); }
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
  std::unique_ptr<Recording> record(const std::function<void()>& calls) override {
    // A step's kernels must not begin before the step ahead has ended: graphs wait for each other, and so does a
    // memset.
    if (!graphs_)
      return std::make_unique<Again>([this, calls] { check(cudaMemsetAsync(between_, 0, 1, stream_)), calls(); });
    return std::make_unique<Graph>(stream_, calls);
  }
  const RowCalls& rows() const override { return *rows_; }
  const ProductCalls* products(Type weights) const override { return products_[int(weights)]; }
  const AttendCalls* attend(Type cache) const override { return attend_[int(cache)]; }
  const WalkCalls* walk(Type weights) const override { return walks_[int(weights)]; }

 private:
  int device_ = 0;
  cudaDeviceProp about_{};
  cudaStream_t stream_ = nullptr;
  void* between_ = nullptr;
  bool graphs_ = true;
  const RowCalls* rows_ = nullptr;
  const ProductCalls* products_[kTypes] = {};
  const AttendCalls* attend_[kTypes] = {};
  const WalkCalls* walks_[kTypes] = {};
};

}  // namespace

std::unique_ptr<Device> make_gpu(const std::vector<Type>& activations, int threads, std::string& why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    why = error != cudaSuccess ? cudaGetErrorString(error) : "there is no GPU";
    return nullptr;
  }
  return std::make_unique<Gpu>(activations, threads);
}

}  // namespace llm
