// What the GPU tests share: guarded device memory, the operations with their oracles, and Trial, one call with its
// check.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include <kernels/layernorm.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/softmax.cuh>

#include "catch.h"
#include "guarded.h"
#include "oracle.h"
#include "random.h"
#include "shortened.h"

namespace k = kernels;

namespace test {

// ---- device
// ----------------------------------------------------------------------------------------------------------

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

struct DeviceMemory {
  static void* allocate(size_t bytes) {
    void* p = nullptr;
    check_cuda(cudaMalloc(&p, bytes));
    return p;
  }
  static void release(void* p) { cudaFree(p); }
  // Back only when the bytes are there: streams need not wait for the default one.
  static void upload(void* to, const void* from, size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    check_cuda(cudaStreamSynchronize(nullptr));
  }
  static void download(void* to, const void* from, size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }
};

template <class T>
using Device = Guarded<T, DeviceMemory>;

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  operator k::Exec() const { return k::Exec(stream_); }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Lets its successor start at once, and writes so many cycles later.
template <class T>
__global__ void slow_copy(const T* from, T* to, int64_t n, int64_t cycles) {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] = from[i];
}

// What this program's device code was compiled for; it may run on a newer GPU.
template <class>
__global__ void image_kernel() {}
inline int compiled_for() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, image_kernel<void>));
  return attributes.ptxVersion;
}
inline bool have_clusters() { return k::Exec{}.device().capability >= 90 && compiled_for() >= 90; }

inline int sm_count() { return k::Exec{}.device().sm_count; }

// Memory that the GPU and the CPU both see.
struct PinnedMemory {
  static void* allocate(size_t bytes) {
    void* p = nullptr;
    check_cuda(cudaMallocHost(&p, bytes));
    return p;
  }
  static void release(void* p) { cudaFreeHost(p); }
  static void upload(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  static void download(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
};
template <class T>
using Pinned = Guarded<T, PinnedMemory>;

// What `launch` launches into a stream, recorded.
class Graph {
 public:
  template <class Launch>
  Graph(const Stream& stream, const Launch& launch, cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal)
      : stream_(stream) {
    check_cuda(cudaStreamBeginCapture(stream, mode));
    launch();
    check_cuda(cudaStreamEndCapture(stream, &graph_));
    check_cuda(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  operator cudaGraph_t() const { return graph_; }

  void replay() const {
    check_cuda(cudaGraphLaunch(exec_, stream_));
    stream_.wait();
  }

 private:
  const Stream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

// Runs what `launch` launches, as it is or captured.
template <class Launch>
void run_in(const Stream& stream, bool graph, const Launch& launch) {
  if (graph) return Graph(stream, launch).replay();
  launch();
  stream.wait();
}

// Memory for split rows, guarded.
class Workspace {
 public:
  explicit Workspace(int64_t rows)
      : bytes_(1, int64_t(k::row_workspace_bytes(rows)), int64_t(k::row_workspace_bytes(rows))) {}
  k::Exec exec(cudaStream_t stream) const { return k::Exec{stream}.workspace(bytes_.data(), size_t(bytes_.cols())); }
  bool intact() {
    bytes_.download();
    return bytes_.intact();
  }

 private:
  Device<unsigned char> bytes_;
};

// ---- host
// ------------------------------------------------------------------------------------------------------------

inline bool& is_in_parallel() {
  static thread_local bool is = false;
  return is;
}
// f(0) ... f(n - 1), on all cores. f must not use Catch's macros. Within another in_parallel() on this thread alone.
template <class F>
void in_parallel(size_t n, F f) {
  if (n < 2 || is_in_parallel()) {
    for (size_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    is_in_parallel() = true;
    for (size_t i; (i = next++) < n;) f(i);
    is_in_parallel() = false;
  };
  std::vector<std::thread> threads;
  for (unsigned t = 1; t < std::thread::hardware_concurrency() && t < n; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

// Problems are texts; "" is none.
inline void report(const std::vector<std::string>& problems) {
  int wrong = 0;
  for (const std::string& problem : problems) {
    if (!problem.empty() && ++wrong <= 8) FAIL_CHECK(problem);
  }
  INFO(wrong << " of " << problems.size() << " wrong");
  CHECK(wrong == 0);
}

template <class T>
void randomize(Device<T>& m, uint64_t seed, bool holes = false) {
  RandomRows rows(seed, holes);
  for (int64_t r = 0; r < m.rows(); ++r) {
    rows.row(r, m.cols(), [&](int64_t c, double x) { m.set(r, c, make<T>(x)); });
  }
  m.upload();
}

inline void wait(const k::Exec& ex) { check_cuda(cudaStreamSynchronize(ex.stream())); }

template <class C = float, class T>
Row<C> row_of(const Device<T>& m, int64_t row) {
  Row<C> x(static_cast<size_t>(m.cols()));
  for (int64_t c = 0; c < m.cols(); ++c) x[size_t(c)] = value_of(m.get(row, c));
  return x;
}

// want(r) for every row, computed once.
template <class Want>
auto all_rows(int64_t rows, Want want) {
  std::vector<decltype(want(0))> all(static_cast<size_t>(rows));
  in_parallel(all.size(), [&](size_t r) { all[r] = want(static_cast<int64_t>(r)); });
  return all;
}

// Downloads `got` and compares every row with want(row), a Row.
template <class T, class Want>
std::string compare(Device<T>& got, Want want) {
  got.download();
  if (!got.intact()) return "wrote outside its rows";
  std::vector<std::string> problems(static_cast<size_t>(got.rows()));
  in_parallel(problems.size(), [&](size_t row) {
    const int64_t r = static_cast<int64_t>(row);
    problems[row] = mismatch(r, want(r), [&](int64_t c) { return got.get(r, c); });
  });
  for (const std::string& problem : problems) {
    if (!problem.empty()) return problem;
  }
  return "";
}
template <class T, class C>
std::string compare(Device<T>& got, const std::vector<Row<C>>& want) {
  return compare(got, [&](int64_t r) -> const Row<C>& { return want[size_t(r)]; });
}

inline std::string text(const k::RowPolicy& p) {
  std::ostringstream out;
  out << k::to_string(p.residency) << " threads " << p.threads << " cluster " << p.cluster << " max_pack " << p.max_pack
      << " max_blocks " << p.max_blocks << (p.batch_invariant ? " batch_invariant" : "");
  return out.str();
}
inline std::string text(const k::Status& status) { return status ? "ok" : std::string("refused: ") + status.reason(); }

// ---- operations, with their oracles
// ------------------------------------------------------------------------------------

struct Softmax {
  static constexpr const char* name = "softmax";
  static constexpr bool holes = true, has_mean = false, has_rstd = false;

  template <class In, class Out, class C>
  k::Status run(const k::Exec& ex, const In& in, const Out& out, int64_t rows, int64_t cols, const k::RowPolicy& policy,
                C*, C*) const {
    return k::softmax(ex, in, out, rows, cols, policy);
  }
  k::Softmax options() const { return {}; }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const {
    softmax(x);
    return {};
  }
};

struct LogSoftmax {
  static constexpr const char* name = "log_softmax";
  static constexpr bool holes = true, has_mean = false, has_rstd = false;

  template <class In, class Out, class C>
  k::Status run(const k::Exec& ex, const In& in, const Out& out, int64_t rows, int64_t cols, const k::RowPolicy& policy,
                C*, C*) const {
    return k::log_softmax(ex, in, out, rows, cols, policy);
  }
  k::LogSoftmax options() const { return {}; }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const {
    log_softmax(x);
    return {};
  }
};

struct LayerNorm {
  static constexpr const char* name = "layernorm";
  static constexpr bool holes = false, has_mean = true, has_rstd = true;
  double eps = 1e-5;

  template <class In, class Out, class C>
  k::Status run(const k::Exec& ex, const In& in, const Out& out, int64_t rows, int64_t cols, const k::RowPolicy& policy,
                C* mean, C* rstd) const {
    return k::layernorm(ex, in, out, rows, cols, options().mean(mean).rstd(rstd), policy);
  }
  k::LayerNorm options() const { return k::LayerNorm{}.eps(eps); }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const {
    return layernorm(x, eps);
  }
};

struct RmsNorm {
  static constexpr const char* name = "rmsnorm";
  static constexpr bool holes = false, has_mean = false, has_rstd = true;
  double eps = 1e-5;

  template <class In, class Out, class C>
  k::Status run(const k::Exec& ex, const In& in, const Out& out, int64_t rows, int64_t cols, const k::RowPolicy& policy,
                C*, C* rstd) const {
    return k::rmsnorm(ex, in, out, rows, cols, options().rstd(rstd), policy);
  }
  k::RmsNorm options() const { return k::RmsNorm{}.eps(eps); }
  template <class C>
  RowStatistics<C> expect(Row<C>& x) const {
    return {{}, rmsnorm(x, eps)};
  }
};

// ---- sources and sinks
// -------------------------------------------------------------------------------------------------

// The widest pack of at most `widest` elements of `size` bytes that an address and a row stride allow.
inline int allowed_pack(const void* p, int64_t ld, int64_t size, int widest) {
  const uint64_t misaligned = reinterpret_cast<uintptr_t>(p) | uint64_t(ld * size);
  int n = widest;
  while (n > 1 && misaligned % uint64_t(n * size < 16 ? n * size : 16) != 0) n /= 2;
  return n;
}
inline int64_t size_of(DType type) {
  return type == DType::f64 ? 8 : type == DType::f32 ? 4 : type == DType::f16 || type == DType::bf16 ? 2 : 1;
}

// What is moved at once.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Chunk {
  T v[N];
};

// A user's own source and sink whose element type is known at run time: one instantiation for all pairs of types.
struct AnyLoad : k::Functor {
  const void* p;
  int64_t ld;
  DType type;
  AnyLoad(const void* pointer, int64_t stride, DType t) : p(pointer), ld(stride), type(t) {}

  static constexpr int widest = 8;
  int max_pack() const { return allowed_pack(p, ld, size_of(type), widest); }
  template <class T, int N>
  __device__ k::Pack<float, N> as(int64_t row, int64_t col) const {
    const auto chunk = *reinterpret_cast<const Chunk<T, N>*>(static_cast<const T*>(p) + row * ld + col);
    k::Pack<float, N> out;
    for (int i = 0; i < N; ++i) out.v[i] = static_cast<float>(chunk.v[i]);
    return out;
  }
  template <int N>
  __device__ k::Pack<float, N> load(int64_t row, int64_t col) const {
    switch (type) {
      case DType::f16:
        return as<k::half, N>(row, col);
      case DType::bf16:
        return as<k::bfloat16, N>(row, col);
      case DType::e4m3:
        return as<k::float8_e4m3, N>(row, col);
      case DType::e5m2:
        return as<k::float8_e5m2, N>(row, col);
      default:
        return as<float, N>(row, col);
    }
  }
};

struct AnyStore : k::Functor {
  void* p;
  int64_t ld;
  DType type;
  AnyStore(void* pointer, int64_t stride, DType t) : p(pointer), ld(stride), type(t) {}

  static constexpr int widest = 8;
  int max_pack() const { return allowed_pack(p, ld, size_of(type), widest); }
  template <class T, int N>
  __device__ void as(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    Chunk<T, N> chunk;
    for (int i = 0; i < N; ++i) chunk.v[i] = static_cast<T>(v.v[i]);
    *reinterpret_cast<Chunk<T, N>*>(static_cast<T*>(p) + row * ld + col) = chunk;
  }
  template <int N>
  __device__ void store(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    switch (type) {
      case DType::f16:
        return as<k::half, N>(v, row, col);
      case DType::bf16:
        return as<k::bfloat16, N>(v, row, col);
      case DType::e4m3:
        return as<k::float8_e4m3, N>(v, row, col);
      case DType::e5m2:
        return as<k::float8_e5m2, N>(v, row, col);
      default:
        return as<float, N>(v, row, col);
    }
  }
};

// How a Trial reads and writes.
struct Direct {
  template <class T>
  static auto load(const T* p, int64_t ld) {
    return k::load(p, ld);
  }
  template <class T>
  static auto store(T* p, int64_t ld) {
    return k::store(p, ld);
  }
};
struct Any {
  template <class T>
  static auto load(const T* p, int64_t ld) {
    return AnyLoad(p, ld, dtype_of<T>::value);
  }
  template <class T>
  static auto store(T* p, int64_t ld) {
    return AnyStore(p, ld, dtype_of<T>::value);
  }
};

// ---- shapes and policies
// -----------------------------------------------------------------------------------------------

struct Shape {
  int64_t rows, cols;
  int64_t in_gap = 0, out_gap = 0;      // row stride - cols
  int64_t in_shift = 0, out_shift = 0;  // elements past an aligned address
  bool in_place = false;
};

// Misaligned pointers and row strides above cols, odd and even, below and above every change of path up to 5000
// columns.
inline std::vector<Shape> awkward_shapes() {
  std::vector<Shape> shapes;
  const int64_t gaps[][2] = {{0, 0}, {1, 0}, {0, 1}, {3, 6}, {8, 24}, {16, 16}};
  const int64_t shifts[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {4, 2}};
  for (const int64_t cols : {1, 2, 3, 8, 17, 64, 100, 255, 256, 258, 1000, 1023, 1024, 1025, 2048, 4095, 5000}) {
    for (const auto& gap : gaps) {
      for (const auto& shift : shifts) shapes.push_back({5, cols, gap[0], gap[1], shift[0], shift[1]});
    }
  }
  const int64_t by_one[][2] = {{1, 0}, {0, 1}, {1, 1}};
  // By one element alone, around every number of packs that a thread, a warp or a block may have.
  for (const int64_t cols : {4,   5,   7,   9,   12,  15,  16,   31,   32,   33,   63,   65,   96,   127, 128,
                             129, 257, 511, 512, 513, 768, 1001, 2047, 2049, 3000, 4096, 4097, 4104, 8191}) {
    for (const auto& shift : by_one) shapes.push_back({5, cols, 0, 0, shift[0], shift[1]});
  }
  return shapes;
}

constexpr int64_t kLargeCols[] = {2049,   4097,   12289,  32769,  65537,   100003,
                                  131072, 262144, 262151, 524289, 1048575, 1048576};

inline k::RowPolicy policy(k::Residency residency, int threads = 0, int cluster = 1, int max_pack = 0) {
  k::RowPolicy p;
  p.residency = residency;
  p.threads = threads;
  p.cluster = cluster;
  p.max_pack = max_pack;
  return p;
}

// The engine of a call, for how much its threads hold.
template <class Options, class Source, class Sink>
using EngineOf = k::detail::RowEngine<k::detail::RowProblem<
    decltype(std::declval<const Options&>().template op<k::compute_type<Source>>()), Source, Sink>>;

// Whether a block of any size has shared memory for what the tests' functors read in one step. Elsewhere it may refuse.
inline bool much_shared_memory() { return k::Exec{}.device().shared_per_sm >= 200 * 1024; }

// What a row needs of a residency.
struct Needs {
  int64_t held = 4;  // bytes of a value in registers
  bool wide = true;  // all pointers and row strides allow the widest packs
};

// A policy for every residency, with clusters where the GPU has them, that can hold rows of `cols` columns.
inline std::vector<k::RowPolicy> residencies(int64_t cols, const Needs& needs = {}) {
  using R = k::Residency;
  const int64_t words = cols * needs.held / 4;
  const bool wide = needs.wide && cols % 16 == 0, shared = much_shared_memory();
  const int64_t block_words = (wide ? 16 : 8) * 512;  // what functors that need many registers leave
  std::vector<k::RowPolicy> all = {k::RowPolicy{}, policy(R::streamed), policy(R::streamed, 96)};
  if (!have_clusters()) all.push_back(policy(R::split));
  if (words <= 512) all.push_back(policy(R::group, 32, 1, /*max_pack*/ 1));
  if (words <= 256 && wide) all.push_back(policy(R::group, 32));
  if (words <= block_words) all.push_back(policy(R::registers));
  // 32 threads keep short rows and the beginning of long ones.
  if (shared) all.push_back(policy(R::shared));
  if (shared) all.push_back(policy(R::shared, 32));
  if (!have_clusters()) return all;
  if (words <= 2 * block_words) all.push_back(policy(R::registers, 0, 2));
  if (words <= 8 * block_words) all.push_back(policy(R::registers, 0, 8));
  if (shared) all.push_back(policy(R::shared, 0, 4));
  if (shared) all.push_back(policy(R::shared, 32, 2));
  all.push_back(policy(R::streamed, 0, 2));
  return all;
}

// Whether shared memory keeps all of a row.
template <class Engine>
bool kept_wholly(const k::RowPlan& plan) {
  return int64_t(plan.kept) * 32 * plan.pack * Engine::packs(plan.pack) >= plan.warp_width;
}

// f(exec, policy) for every residency; f launches and checks.
template <class F>
void each_residency(int64_t rows, int64_t cols, const Needs& needs, F f) {
  Stream stream;
  Workspace workspace(rows);
  for (const k::RowPolicy& p : residencies(cols, needs)) {
    INFO(rows << " x " << cols << ", " << text(p));
    f(workspace.exec(stream), p);
  }
  CHECK(workspace.intact());
}

// ---- Trial
// -------------------------------------------------------------------------------------------------------------

// One call on random rows: made, launched, and after the stream was waited for, fetched and checked.
template <class Op, class S, class D = S, class Io = Direct>
class Trial {
 public:
  using C = k::compute_t<S>;

  explicit Trial(const Shape& shape, const k::RowPolicy& policy = {}, const Op& op = {})
      : shape_(shape),
        policy_(policy),
        op_(op),
        in_(shape.rows, shape.cols, shape.cols + shape.in_gap, shape.in_shift,
            shape.in_place ? Poison::garbage : Poison::nan),
        out_(shape.in_place ? 0 : shape.rows, shape.cols, shape.cols + shape.out_gap, shape.out_shift),
        mean_(Op::has_mean ? shape.rows : 0, 1, 1),
        rstd_(Op::has_rstd ? shape.rows : 0, 1, 1) {
    randomize(in_, mix(uint64_t(shape.cols)) + uint64_t(shape.rows), Op::holes);
    remember();
  }

  // Other inputs: value(row, col).
  template <class F>
  void input(F value) {
    for (int64_t r = 0; r < in_.rows(); ++r) {
      for (int64_t c = 0; c < in_.cols(); ++c) in_.set(r, c, make<S>(value(r, c)));
    }
    in_.upload();
    remember();
  }

  k::Status launch(const k::Exec& ex) {
    return op_.run(ex, source(), sink(), shape_.rows, shape_.cols, policy_, Op::has_mean ? mean_.data() : nullptr,
                   Op::has_rstd ? rstd_.data() : nullptr);
  }
  k::Status plan(const k::Exec& ex, k::RowPlan& plan) const {
    return k::row_plan(ex, op_.options(), source(), sink(), shape_.rows, shape_.cols, policy_, plan);
  }

  void fetch() {
    in_.download();
    out_.download();
    mean_.download();
    rstd_.download();
  }

  // "" or what is wrong first. Only every `step`th row is compared with the oracle, and the last.
  std::string verify(int64_t step = 1) const {
    if (!in_.intact() || !out_.intact()) return describe() + ": wrote outside its rows";
    if (!mean_.intact() || !rstd_.intact()) return describe() + ": wrote outside mean or rstd";
    for (int64_t r = 0; r < shape_.rows; ++r) {
      if (r % step != 0 && r != shape_.rows - 1) continue;
      if (const std::string problem = verify_row(r); !problem.empty()) return describe() + ", " + problem;
    }
    return "";
  }

  // After a refused call.
  std::string untouched() {
    if (in_.unchanged() && out_.unchanged() && mean_.unchanged() && rstd_.unchanged()) return "";
    return describe() + ": something was written though the call was refused";
  }

  // The bits of all outputs.
  std::vector<unsigned char> bits() const {
    std::vector<unsigned char> all;
    const auto append = [&all](const auto& m) {
      for (int64_t r = 0; r < m.rows(); ++r) {
        for (int64_t c = 0; c < m.cols(); ++c) {
          const auto value = m.get(r, c);
          const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
          all.insert(all.end(), bytes, bytes + sizeof(value));
        }
      }
    };
    if (shape_.in_place)
      append(in_);
    else
      append(out_);
    append(mean_);
    append(rstd_);
    return all;
  }

  using Engine = EngineOf<decltype(std::declval<const Op&>().options()),
                          decltype(Io::load(std::declval<const S*>(), 0)), decltype(Io::store(std::declval<D*>(), 0))>;

  k::RowPolicy& policy() { return policy_; }
  const Shape& shape() const { return shape_; }
  double output(int64_t row, int64_t col) const {
    return shape_.in_place ? value_of(in_.get(row, col)) : value_of(out_.get(row, col));
  }
  C mean(int64_t row) const { return mean_.get(row, 0); }
  C rstd(int64_t row) const { return rstd_.get(row, 0); }

  std::string describe() const {
    std::ostringstream out;
    out << Op::name << " " << name(dtype_of<S>::value) << " to " << name(dtype_of<D>::value) << " " << shape_.rows
        << " x " << shape_.cols << ", gaps " << shape_.in_gap << " " << shape_.out_gap << ", shifts " << shape_.in_shift
        << " " << shape_.out_shift << (shape_.in_place ? ", in place, " : ", ") << text(policy_);
    return out.str();
  }

 private:
  auto source() const { return Io::load(static_cast<const S*>(in_.data()), in_.ld()); }
  auto sink() const {
    if (shape_.in_place) return Io::store(reinterpret_cast<D*>(in_.data()), in_.ld());
    return Io::store(out_.data(), out_.ld());
  }
  void remember() {
    given_.clear();
    for (int64_t r = 0; r < in_.rows(); ++r) {
      for (int64_t c = 0; c < in_.cols(); ++c) given_.push_back(in_.get(r, c));
    }
  }

  std::string verify_row(int64_t r) const {
    Row<C> x(static_cast<size_t>(shape_.cols));
    const S* given = given_.data() + r * shape_.cols;
    for (int64_t c = 0; c < shape_.cols; ++c) {
      x[size_t(c)] = value_of(given[c]);
      const S now = in_.get(r, c);
      if (!shape_.in_place && std::memcmp(&now, given + c, sizeof(S)) != 0) return "the input was changed";
    }
    const RowStatistics<C> statistics = op_.expect(x);
    const std::string problem = shape_.in_place ? mismatch(r, x, [&](int64_t c) { return in_.get(r, c); })
                                                : mismatch(r, x, [&](int64_t c) { return out_.get(r, c); });
    if (!problem.empty()) return problem;
    if (Op::has_mean && std::isfinite(statistics.mean.v) && !within(mean(r), statistics.mean))
      return wrong("mean", r, mean(r), statistics.mean);
    if (Op::has_rstd && !within(rstd(r), statistics.rstd)) return wrong("rstd", r, rstd(r), statistics.rstd);
    return "";
  }
  static std::string wrong(const char* what, int64_t row, C got, Real<C> want) {
    std::ostringstream out;
    out.precision(17);
    out << what << " of row " << row << ": got " << got << ", want " << want.v << " +- " << want.e;
    return out.str();
  }

  Shape shape_;
  k::RowPolicy policy_;
  Op op_;
  Device<S> in_;
  Device<D> out_;
  Device<C> mean_, rstd_;
  std::vector<S> given_;
};

// Many trials on one stream, with one synchronization.
template <class T>
class Trials {
 public:
  // A trial, or none where it is left out of a shortened test: making one takes longer than what it launches.
  struct Added {
    T* trial;
    template <class F>
    void input(const F& f) const {
      if (trial) trial->input(f);
    }
  };
  template <class... Args>
  Added add(const Args&... args) {
    if (shortened_.leaves_out()) return {nullptr};
    all_.push_back(std::make_unique<T>(args...));
    return {all_.back().get()};
  }

  // Every call must be accepted and give the right result.
  void run(const k::Exec& ex, int64_t step = 1) {
    std::vector<std::string> problems(all_.size());
    for (size_t i = 0; i < all_.size(); ++i) {
      if (const k::Status status = all_[i]->launch(ex); !status)
        problems[i] = all_[i]->describe() + ": " + text(status);
    }
    check_cuda(cudaStreamSynchronize(ex.stream()));
    for (auto& trial : all_) trial->fetch();
    in_parallel(all_.size(), [&](size_t i) {
      if (problems[i].empty()) problems[i] = all_[i]->verify(step);
    });
    report(problems);
    all_.clear();
  }

 private:
  std::vector<std::unique_ptr<T>> all_;
  Shortened shortened_;
};

// The diagonal and a few more pairs of types, through AnyLoad and AnyStore.
template <class Op>
void some_pairs_of_types() {
  Stream stream;
  const auto pair = [&stream](auto s, auto d) {
    Trials<Trial<Op, decltype(s), decltype(d), Any>> trials;
    for (const int64_t cols : {7, 64, 258, 1000, 4104}) trials.add(Shape{6, cols, 0, 8, cols % 2, 0});
    trials.run(stream);
  };
  pair(k::half{}, k::half{});
  pair(k::bfloat16{}, k::bfloat16{});
  pair(float{}, float{});
  pair(k::float8_e4m3{}, k::float8_e4m3{});
  pair(k::float8_e5m2{}, k::float8_e5m2{});
  pair(k::half{}, float{});
  pair(float{}, k::bfloat16{});
  pair(k::bfloat16{}, k::float8_e4m3{});
  pair(k::float8_e4m3{}, k::half{});
  pair(k::float8_e5m2{}, k::bfloat16{});
}

}  // namespace test
