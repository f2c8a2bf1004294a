// The frame of the row benchmarks. A case is one op at one shape: it owns rotating buffers, measures the copy kernel on
// them, and times the library and its peers. What is timed is named  op/dtype/rowsxcols/who.
#pragma once

#include <kernels/elementwise.cuh>
#include <kernels/layernorm.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/softmax.cuh>

#include "cub_rows.cuh"
#include "cudnn_softmax.cuh"
#include "gpu_bench.cuh"

namespace bench {
namespace k = kernels;

constexpr int64_t kRows = 49152;
constexpr int64_t kCols[] = {32,   64,   128,  256,  512,  768,   1024,  1536, 2048,
                             3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768};

// Starts one call on the buffers of a set. Returns null, or what went wrong.
using Call = std::function<const char*(cudaStream_t, int set)>;

class Case : public CaseBase {
 public:
  // `bytes` is what the op must move: every input read once, every output written once.
  Case(const char* op, const char* type, int64_t rows, int64_t cols, double bytes)
      : CaseBase(op, type, std::to_string(rows) + "x" + std::to_string(cols), bytes, "share_of_copy"),
        rows_(rows), cols_(cols), calls_(calls_for(bytes)) {}

  // One matrix for each set. The first input and the output have room for the copy kernel, which moves half the bytes
  // from the one to the other. elements: of a matrix of another size.
  template <class T>
  std::vector<T*> input(int64_t elements = 0) {
    std::vector<T*> all = matrices<T>(std::max(from_.empty() ? copy_bytes() : 0, size_t(elements) * sizeof(T)));
    if (from_.empty()) from_.assign(all.begin(), all.end());
    return all;
  }
  template <class T>
  std::vector<T*> output() {
    std::vector<T*> all = matrices<T>(copy_bytes());
    to_.assign(all.begin(), all.end());
    sample_ = [this, y = all[0]] { return sample(y); };
    return all;
  }
  // A vector that all sets share.
  template <class T>
  T* vector(int64_t count) { return buffer<T>(size_t(count)); }

  // The library. source(i) and sink(i) make the functors of a set; start(ex, source, sink) makes the call.
  template <class Options, class Source, class Sink, class Start>
  void library(const Options& options, Source source, Sink sink, Start start) {
    const size_t space_bytes = rows_ < 200 ? k::row_workspace_bytes(rows_) : 0;
    char* space = space_bytes ? vector<char>(space_bytes) : nullptr;
    k::RowPlan plan;
    const k::Status planned =
        k::row_plan(k::Exec().workspace(space, space_bytes), options, source(0), sink(0), rows_, cols_, {}, plan);
    library_ = [=](cudaStream_t stream, int i) -> const char* {
      const k::Status status = start(k::Exec(stream).workspace(space, space_bytes), source(i), sink(i));
      return status ? nullptr : status.reason();
    };
    const std::string label = planned ? describe(plan) : planned.reason();
    add("copy", [this](benchmark::State& state) { report(state, yardstick_); });
    add("kernels", [this, label](benchmark::State& state) {
      state.SetLabel(label);
      time(state, library_, library_(nullptr, 0));
    });
  }

  // What has no plan.
  void library(const Call& call) {
    library_ = call;
    add("copy", [this](benchmark::State& state) { report(state, yardstick_); });
    add("kernels", [this](benchmark::State& state) { time(state, library_, library_(nullptr, 0)); });
  }

  // What gives something else, for comparison.
  void other(const char* who, const Call& call) {
    add(who, [this, call](benchmark::State& state) { time(state, call, call(nullptr, 0)); });
  }

  // A peer must give what the library gives, else it is an error.
  void peer(const char* who, const Call& call) {
    add(who, [this, call](benchmark::State& state) { time(state, call, differs(call)); });
  }

 private:
  size_t copy_bytes() const { return size_t(bytes_ / 2); }

  template <class T>
  std::vector<T*> matrices(size_t least_bytes) {
    const size_t count = std::max(size_t(rows_ * cols_), (least_bytes + sizeof(T) - 1) / sizeof(T));
    std::vector<T*> all;
    for (int i = 0; i < sets_; ++i) all.push_back(buffer<T>(count));
    return all;
  }

  Timing measure_yardstick() const override {
    const auto from = [this](int i) { return from_[i]; };
    const auto to = [this](int i) { return to_[i]; };
    return copy_us(sets_, from, to, copy_bytes(), calls_);
  }

  void time(benchmark::State& state, const Call& call, const char* error) {
    if (error) return state.SkipWithError(error);
    report(state, time_us(sets_, [&](cudaStream_t s, int i) { call(s, i); }, calls_));
  }

  // Residency, t: threads, c: blocks in a cluster, x: blocks of a split row, p: elements per
  // transaction; ends: and what is left on both sides of these in single elements.
  static std::string describe(const k::RowPlan& plan) {
    const k::RowPolicy& p = plan.policy;
    std::string text = std::string(k::to_string(p.residency)) + " t" + std::to_string(p.threads);
    if (p.cluster > 1) text += " c" + std::to_string(p.cluster);
    if (plan.chunks > 1) text += " x" + std::to_string(plan.chunks);
    return text + " p" + std::to_string(plan.pack) + (plan.ends ? " ends" : "");
  }

  // The first and the last row.
  template <class T>
  std::vector<float> sample(const T* y) const {
    std::vector<T> rows(2 * cols_);
    BENCH_CHECK(cudaMemcpy(rows.data(), y, cols_ * sizeof(T), cudaMemcpyDeviceToHost));
    BENCH_CHECK(cudaMemcpy(rows.data() + cols_, y + (rows_ - 1) * cols_, cols_ * sizeof(T), cudaMemcpyDeviceToHost));
    std::vector<float> values;
    for (const T& x : rows) values.push_back(k::convert<float>(x));
    return values;
  }
  const char* run(const Call& call, std::vector<float>& result) const {
    BENCH_CHECK(cudaMemset(to_[0], 0xff, copy_bytes()));  // NaN in every type
    if (const char* error = call(nullptr, 0)) return error;
    BENCH_CHECK(cudaDeviceSynchronize());
    result = sample_();
    return nullptr;
  }
  const char* differs(const Call& call) const {
    std::vector<float> expected, got;
    if (const char* error = run(library_, expected)) return error;
    if (const char* error = run(call, got)) return error;
    double squares = 0;
    for (const float x : expected) squares += double(x) * x;
    const double typical = std::sqrt(squares / double(expected.size()));
    for (size_t i = 0; i < got.size(); ++i) {
      const double error = std::fabs(double(got[i]) - expected[i]);
      if (!(error <= 0.02 * (std::fabs(expected[i]) + typical))) return "its result differs from the library's";
    }
    return nullptr;
  }

  int64_t rows_, cols_;
  int calls_;
  std::vector<const void*> from_;
  std::vector<void*> to_;
  std::function<std::vector<float>()> sample_;
  Call library_;
};

inline std::shared_ptr<Case> make_case(const char* op, const char* type, int64_t rows, int64_t cols, double bytes) {
  return std::make_shared<Case>(op, type, rows, cols, bytes);
}

// The main function, once the cases are registered.
inline int run(int argc, char** argv) {
  const int major = CUB_VERSION / 100000, minor = CUB_VERSION / 100 % 1000;
  std::vector<std::pair<std::string, std::string>> libraries;
  libraries.emplace_back("cub", std::to_string(major) + "." + std::to_string(minor));
  if (const std::string cudnn = cudnn_version(); !cudnn.empty()) libraries.emplace_back("cudnn", cudnn);
  return run(argc, argv, libraries);
}

}  // namespace bench
