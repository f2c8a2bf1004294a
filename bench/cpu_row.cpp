// Softmax, LayerNorm and RMSNorm on the CPU: the library compiled for this machine and for AVX2, against a copy of as
// many bytes and oneDNN. What is timed is named  op/type/rowsxcols/who.
//
// The memory bandwidth of a machine drifts, above all of a shared one. So all that is compared takes turns, on the same
// buffers; times are medians, and so are ratios, which are taken within each round.
#include <cmath>
#include <map>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "support/cpu_bench.h"
#include "support/cpu_rows.h"
#include "support/onednn.h"

namespace k = kernels;
using namespace bench;

namespace {

constexpr size_t kMatrixBytes = size_t(128) << 20;  // what is read, and as much is written: far beyond any cache
constexpr int kRounds = 21;
constexpr int64_t kCols[] = {1023, 1024, 4096, 16384, 50257, 65536};
constexpr int64_t kMostCols = 65536;
constexpr const char* kContenders[] = {
    "copy", "kernels",
#if KERNELS_HAVE_AVX2
    "kernels_avx2",
#endif
#if KERNELS_HAVE_ONEDNN
    "onednn",
#endif
};

const char* name(RowOp op) {
  return op == RowOp::softmax ? "softmax" : op == RowOp::layernorm ? "layernorm" : "rmsnorm";
}
const char* name(Type type) { return type == Type::fp32 ? "fp32" : type == Type::fp16 ? "fp16" : "bf16"; }
int64_t size_of(Type type) { return type == Type::fp32 ? 4 : 2; }

// ---- memory --------------------------------------------------------------------------------------------------------

// f(a null pointer to the type).
template <class F>
auto with_type(Type type, const F& f) {
  if (type == Type::fp32) return f(static_cast<float*>(nullptr));
  if (type == Type::fp16) return f(static_cast<k::half*>(nullptr));
  return f(static_cast<k::bfloat16*>(nullptr));
}

// The input of a type, the same for all shapes.
const void* input(Type type) {
  static std::map<Type, void*> inputs;
  void*& x = inputs[type];
  if (!x) {
    x = allocate<void>(kMatrixBytes);
    with_type(type, [&](auto* t) { fill<std::remove_pointer_t<decltype(t)>>(x, kMatrixBytes / sizeof(*t), 0.f, 1.f); });
  }
  return x;
}

// ---- copies --------------------------------------------------------------------------------------------------------

// part(from, to, bytes) for an equal part of the bytes on each thread.
template <class Part>
void copy_in_parts(const void* from, void* to, size_t bytes, const Part& part) {
  const int parts = threads();
  k::detail::host::parallel(parts, [&](int i) {
    const size_t begin = bytes / 64 * i / parts * 64, end = i + 1 == parts ? bytes : bytes / 64 * (i + 1) / parts * 64;
    part(static_cast<const char*>(from) + begin, static_cast<char*>(to) + begin, end - begin);
  });
}

void copy_plain(const void* from, void* to, size_t bytes) {
  copy_in_parts(from, to, bytes, [](const char* f, char* t, size_t n) { std::memcpy(t, f, n); });
}

// Whole lines, written around the cache. Addresses are multiples of 64.
void copy_streaming(const void* from, void* to, size_t bytes) {
#if defined(__AVX__)
  copy_in_parts(from, to, bytes, [](const char* f, char* t, size_t n) {
    size_t i = 0;
    for (; i + 128 <= n; i += 128) {
      __m256i part[4];
      for (int j = 0; j < 4; ++j) part[j] = _mm256_load_si256(reinterpret_cast<const __m256i*>(f + i) + j);
      for (int j = 0; j < 4; ++j) _mm256_stream_si256(reinterpret_cast<__m256i*>(t + i) + j, part[j]);
    }
    std::memcpy(t + i, f + i, n - i);
    _mm_sfence();
  });
#else
  copy_plain(from, to, bytes);
#endif
}

// ---- oneDNN --------------------------------------------------------------------------------------------------------

#if KERNELS_HAVE_ONEDNN
// The call in oneDNN, or none where it does not have it. LayerNorm writes the variance where the library writes rstd.
std::function<void()> onednn(const RowCall& c) {
  using dnnl::memory;
  const auto type = c.type == Type::fp32   ? memory::data_type::f32
                    : c.type == Type::fp16 ? memory::data_type::f16
                                           : memory::data_type::bf16;
  const memory::desc matrix({c.rows, c.cols}, type, memory::format_tag::ab);
  const memory::desc weights({c.cols}, memory::data_type::f32, memory::format_tag::a);
  const memory::desc statistics({c.rows}, memory::data_type::f32, memory::format_tag::a);
  OnednnArguments arguments{{DNNL_ARG_SRC, onednn_memory(matrix, c.x)}, {DNNL_ARG_DST, onednn_memory(matrix, c.y)}};
  if (c.op == RowOp::softmax) {
    using dnnl::softmax_forward;
    return onednn_call([&] {
      const softmax_forward::desc op(dnnl::prop_kind::forward_inference, matrix, 1);
      return softmax_forward({op, onednn_cpu()});
    }, arguments);
  }
  if (c.op == RowOp::rmsnorm) return {};
  using dnnl::layer_normalization_forward;
  const auto flags = dnnl::normalization_flags::use_scale | dnnl::normalization_flags::use_shift;
  arguments.insert({{DNNL_ARG_SCALE, onednn_memory(weights, c.gamma)},
                    {DNNL_ARG_SHIFT, onednn_memory(weights, c.beta)},
                    {DNNL_ARG_MEAN, onednn_memory(statistics, c.mean)},
                    {DNNL_ARG_VARIANCE, onednn_memory(statistics, c.rstd)}});
  return onednn_call([&] {
    const layer_normalization_forward::desc op(dnnl::prop_kind::forward_training, matrix, statistics, 1e-5f, flags);
    return layer_normalization_forward({op, onednn_cpu()});
  }, arguments);
}
#endif

// ---- cases ---------------------------------------------------------------------------------------------------------

// One op at one shape. All contenders are timed in turn when the first of them is asked for.
class Case {
 public:
  Case(RowOp op, Type type, int64_t cols) : rows_(int64_t(kMatrixBytes) / size_of(type) / cols), cols_(cols) {
    call_ = {op, type, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, rows_, cols, threads()};
    name_ = std::string(name(op)) + "/" + name(type) + "/" + std::to_string(rows_) + "x" + std::to_string(cols) + "/";
  }

  static void add(RowOp op, Type type, int64_t cols) {
    const auto c = std::make_shared<Case>(op, type, cols);
    for (const char* who : kContenders) {
      if (op == RowOp::rmsnorm && who == std::string("onednn")) continue;  // oneDNN has no RMSNorm
      benchmark::RegisterBenchmark((c->name_ + who).c_str(),
                                   [c, who](benchmark::State& state) { c->report(state, who); })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }

 private:
  double bytes() const { return 2.0 * double(rows_ * cols_ * size_of(call_.type)); }

  void measure() {
    static void* const y = allocate<void>(kMatrixBytes);
    constexpr size_t most_rows = kMatrixBytes / sizeof(k::half) / size_t(kCols[0]);
    static float* const statistics = allocate<float>(2 * most_rows * sizeof(float));
    static float* const weights = [] {
      float* const w = allocate<float>(2 * kMostCols * sizeof(float));
      fill<float>(w, 2 * kMostCols, 1.f, 0.1f);
      return w;
    }();
    call_.x = input(call_.type);
    call_.y = y;
    call_.gamma = weights;
    call_.beta = weights + kMostCols;
    call_.mean = statistics;
    call_.rstd = statistics + most_rows;

    const RowCall call = call_;
    const size_t half = size_t(bytes() / 2);
    contenders_ = {{"copy", [=] { copy_streaming(call.x, call.y, half); }, {}},
                   {"copy_plain", [=] { copy_plain(call.x, call.y, half); }, {}},
                   {"kernels", [=] { row_native(call); }, {}}};
#if KERNELS_HAVE_AVX2
    contenders_.push_back({"kernels_avx2", [=] { row_avx2(call); }, {}});
#endif
#if KERNELS_HAVE_ONEDNN
    if (const auto peer = onednn(call)) contenders_.push_back({"onednn", peer, {}});
#endif
    error_ = row_native(call);
    expected_ = sample();
    for (int round = -1; round < kRounds; ++round) {
      for (Contender& c : contenders_) {
        const double time = seconds(c.call);
        if (round >= 0) c.times.push_back(time);
        else if (c.who != "copy" && c.who != "copy_plain" && differs()) error_ = "results differ";
      }
    }
    // The copy is the better of the two.
    Contender &streaming = contenders_[0], &plain = contenders_[1];
    if (median(plain.times) < median(streaming.times)) streaming.times = plain.times;
  }

  const Contender* find(const std::string& who) const {
    const auto found =
        std::find_if(contenders_.begin(), contenders_.end(), [&](const auto& c) { return c.who == who; });
    return found == contenders_.end() ? nullptr : &*found;
  }

  void report(benchmark::State& state, const std::string& who) {
    if (contenders_.empty()) measure();
    const Contender* c = find(who);
    if (!c) return state.SkipWithError("does not have this type on this CPU");
    if (error_) return state.SkipWithError(error_);
    const double time = median(c->times);
    for (auto _ : state) state.SetIterationTime(time);
    state.counters["GB/s"] = bytes() / time * 1e-9;
    state.counters["share_of_copy"] = ratio(*find("copy"), *c);
    state.counters["over_kernels"] = ratio(*c, *find("kernels"));
  }

  // The first and the last row of the result.
  std::vector<float> sample() const {
    std::vector<float> values;
    with_type(call_.type, [&](auto* t) {
      const auto* y = static_cast<decltype(t)>(call_.y);
      for (const int64_t row : {int64_t(0), rows_ - 1}) {
        for (int64_t i = row * cols_; i < (row + 1) * cols_; ++i) values.push_back(k::convert<float>(y[i]));
      }
    });
    return values;
  }
  bool differs() const {
    const std::vector<float> got = sample();
    double squares = 0;
    for (const float x : expected_) squares += double(x) * x;
    const double typical = std::sqrt(squares / double(expected_.size()));
    for (size_t i = 0; i < got.size(); ++i) {
      if (!(std::fabs(got[i] - expected_[i]) <= 0.02 * (std::fabs(expected_[i]) + typical))) return true;
    }
    return false;
  }

  std::string name_;
  RowCall call_;
  int64_t rows_, cols_;
  const char* error_ = nullptr;
  std::vector<float> expected_;
  std::vector<Contender> contenders_;
};

}  // namespace

int main(int argc, char** argv) {
  for (const RowOp op : {RowOp::softmax, RowOp::layernorm, RowOp::rmsnorm}) {
    for (const Type type : {Type::fp32, Type::fp16, Type::bf16}) {
      for (const int64_t cols : kCols) Case::add(op, type, cols);
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_context();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
