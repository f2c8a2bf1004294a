// Products of few rows of inputs with weights far larger than the cache, on the CPU: the library compiled for this
// machine and for AVX2, against a plain read of the same bytes, OpenBLAS and oneDNN. What is timed is named
// gemv/type/MxNxK/who; `hot` is the time that the library would need were all weights in the cache. As in cpu_row.cpp,
// all that is compared takes turns, and ratios are taken within each round.
#include <cmath>
#if KERNELS_HAVE_OPENBLAS
#include <cblas.h>
#endif

#include "support/cpu_bench.h"
#include "support/cpu_gemvs.h"
#include "support/onednn.h"

using namespace bench;

namespace {

constexpr size_t kBytes = size_t(235) << 20;  // what each call reads: as many matrices as fill it, one after the other
constexpr size_t kHotBytes = size_t(512) << 10;
constexpr int kRounds = 15;
constexpr int64_t kShapes[][2] = {{4096, 14336}, {14336, 4096}, {4096, 4096}};
constexpr const char* kContenders[] = {
    "read", "kernels", "hot",
#if KERNELS_HAVE_AVX2
    "kernels_avx2",
#endif
#if KERNELS_HAVE_OPENBLAS
    "openblas",
#endif
#if KERNELS_HAVE_ONEDNN
    "onednn",
#endif
};

struct Type {
  Weights type;
  const char* name;
  int bits;
  int group;  // columns that share a scale; 0: those of a row, -1: none
  bool zeros;
};
constexpr Type kTypes[] = {
    {Weights::fp32, "fp32", 32, -1, false},         {Weights::fp16, "fp16", 16, -1, false},
    {Weights::bf16, "bf16", 16, -1, false},         {Weights::e4m3, "e4m3", 8, 0, false},
    {Weights::e5m2, "e5m2", 8, 0, false},           {Weights::int8, "int8", 8, 0, false},
    {Weights::int8_g128, "int8_g128", 8, 128, false}, {Weights::int4_g32, "int4_g32", 4, 32, false},
    {Weights::int4_g128, "int4_g128", 4, 128, false}, {Weights::uint4_g64, "uint4_g64", 4, 64, true},
    {Weights::gf4, "gf4", 4, -1, false},
};

// A sum of all bytes' floats, on all threads, each of which reads in kStreams places.
template <int kStreams>
void read_plain(const char* from, size_t bytes) {
  const int parts = threads();
  constexpr size_t unit = 4096;
  k::detail::host::parallel(parts, [&](int i) {
    const char* const p = from + bytes / unit * i / parts * unit;
    const size_t count = (bytes / unit * (i + 1) / parts * unit - size_t(p - from)) / kStreams;
    typedef float Vector __attribute__((vector_size(64)));
    Vector sums[8] = {};
    for (size_t at = 0; at + sizeof(sums) / kStreams <= count; at += sizeof(sums) / kStreams) {
      for (int j = 0; j < 8; ++j) {
        const char* const line = p + j % kStreams * count + at + j / kStreams * sizeof(Vector);
        if (kStreams == 1) __builtin_prefetch(line + 2048, 0, 0);
        Vector v;
        std::memcpy(&v, line, sizeof(v));
        sums[j] += v;
      }
    }
    for (int j = 1; j < 8; ++j) sums[0] += sums[j];
    benchmark::DoNotOptimize(sums[0]);
  });
}

#if KERNELS_HAVE_OPENBLAS
void openblas(const GemvCall& c) {
  const auto* w = static_cast<const float*>(c.w);
  const int n = int(c.n), cols = int(c.k);
  if (c.m == 1) cblas_sgemv(CblasRowMajor, CblasNoTrans, n, cols, 1.f, w, cols, c.x, 1, 0.f, c.y, 1);
  else cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, int(c.m), n, cols, 1.f, c.x, cols, w, cols, 0.f, c.y, n);
}
#endif

#if KERNELS_HAVE_ONEDNN
// None where oneDNN does not have the type. It wants x of the type of w: what is in it does not change the time.
std::function<void()> onednn(const GemvCall& c) {
  if (c.type != Weights::fp32 && c.type != Weights::bf16) return {};
  const auto type = c.type == Weights::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  return onednn_product(type, c.x, c.w, c.y, c.m, c.n, c.k);
}
#endif

// One type and shape. All contenders are timed in turn when the first of them is asked for.
class Case {
 public:
  Case(const Type& type, int64_t m, int64_t n, int64_t cols) : type_(type), m_(m), n_(n), k_(cols) {
    name_ = std::string("gemv/") + type.name + "/" + std::to_string(m) + "x" + std::to_string(n) + "x" +
            std::to_string(cols) + "/";
  }

  static void add(const Type& type, int64_t m, int64_t n, int64_t cols) {
    const auto c = std::make_shared<Case>(type, m, n, cols);
    for (const char* who : kContenders) {
      const std::string peer = who;
      if (peer == "hot" && m != 1) continue;
      if (peer == "openblas" && type.type != Weights::fp32) continue;
      if (peer == "onednn" && type.type != Weights::fp32 && type.type != Weights::bf16) continue;
      benchmark::RegisterBenchmark((c->name_ + who).c_str(),
                                   [c, who](benchmark::State& state) { c->report(state, who); })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }

 private:
  size_t matrix_bytes() const { return size_t(n_ * k_) * size_t(type_.bits) / 8; }
  size_t scale_count() const {
    return type_.group < 0 ? 0 : size_t(n_) * size_t(type_.group == 0 ? 1 : k_ / type_.group);
  }
  size_t copies() const { return (kBytes + matrix_bytes() - 1) / matrix_bytes(); }
  // Scales and zero points count as well.
  double bytes() const { return double(copies()) * double(matrix_bytes() + scale_count() * (type_.zeros ? 3 : 2)); }

  // Of all cases, as large as the largest of them needs.
  struct Buffers {
    char* weights = allocate<char>(kBytes + (size_t(256) << 20));
    k::half* scales = allocate<k::half>(size_t(64) << 20);
    float* x = allocate<float>(size_t(32) * 16384 * sizeof(float));
    float* y = allocate<float>(size_t(32) * 16384 * sizeof(float));
  };
  static const Buffers& buffers() {
    static const Buffers all;
    return all;
  }

  void measure() {
    fill_buffers();
    const Buffers& b = buffers();
    const GemvCall call{type_.type, b.x, b.weights, b.scales, b.scales, b.y, m_, n_, k_, threads()};
    add_contenders(call);
    error_ = gemv_native(call);
    take_turns();
    // The yardstick is the better of two ways to read.
    if (median(contenders_[1].times) < median(contenders_[0].times)) contenders_[0].times = contenders_[1].times;
  }

  void fill_buffers() const {
    char* const weights = buffers().weights;
    const size_t count = copies() * matrix_bytes();
    fill<float>(buffers().x, size_t(m_ * k_), 0.f, 1.f);
    if (type_.type == Weights::fp32) fill<float>(weights, count / 4, 0.f, 1.f);
    else if (type_.type == Weights::fp16) fill<k::half>(weights, count / 2, 0.f, 1.f);
    else if (type_.type == Weights::bf16) fill<k::bfloat16>(weights, count / 2, 0.f, 1.f);
    else fill<int8_t>(weights, count, 0.f, 30.f);
    // fp8 codes, and scales of gf4, that are finite and of modest size.
    if (type_.type == Weights::e4m3 || type_.type == Weights::e5m2 || type_.type == Weights::gf4) {
      for (size_t i = 0; i < count; ++i) weights[i] = char(weights[i] & 0xbf);
    }
    fill<k::half>(buffers().scales, scale_count(), 0.01f, 0.001f);
  }

  void add_contenders(const GemvCall& call) {
    const auto all = [=](const auto& run) {
      return [=] {
        for (size_t i = 0; i < copies(); ++i) run(of_copy(call, i));
      };
    };
    const char* const weights = buffers().weights;
    const size_t read = size_t(bytes());
    contenders_ = {{"read", [=] { read_plain<1>(weights, read); }, {}},
                   {"read_two", [=] { read_plain<2>(weights, read); }, {}},
                   {"kernels", all(gemv_native), {}}};
#if KERNELS_HAVE_AVX2
    contenders_.push_back({"kernels_avx2", all(gemv_avx2), {}});
#endif
#if KERNELS_HAVE_OPENBLAS
    if (type_.type == Weights::fp32) contenders_.push_back({"openblas", all(openblas), {}});
#endif
#if KERNELS_HAVE_ONEDNN
    if (onednn(call)) {
      std::vector<std::function<void()>> calls;
      for (size_t i = 0; i < copies(); ++i) calls.push_back(onednn(of_copy(call, i)));
      contenders_.push_back({"onednn", [calls] { for (const auto& run : calls) run(); }, {}});
    }
#endif
    if (m_ == 1) add_hot(call);
  }
  GemvCall of_copy(GemvCall call, size_t i) const {
    call.w = static_cast<const char*>(call.w) + i * matrix_bytes();
    return call;
  }
  // On one thread, and as often as makes that thread's share.
  void add_hot(GemvCall call) {
    call.threads = 1;
    call.n = std::max<int64_t>(8, int64_t(kHotBytes * 8 / size_t(type_.bits * k_)) / 8 * 8);
    const int64_t calls = int64_t(copies()) * n_ / (call.n * threads());
    contenders_.push_back({"hot", [=] { for (int64_t i = 0; i < calls; ++i) gemv_native(call); }, {}});
  }

  // In the first round, which is not timed, results are compared.
  void take_turns() {
    const float* const y = buffers().y;
    for (int round = -1; round < kRounds; ++round) {
      for (Contender& c : contenders_) {
        const double time = seconds(c.call);
        if (round >= 0) c.times.push_back(time);
        else if (c.who == "kernels") expected_.assign(y, y + m_ * n_);
        else if (c.who.rfind("read", 0) != 0 && c.who != "hot" && (c.who != "onednn" || type_.type == Weights::fp32) &&
                 differs(y))
          error_ = "results differ";
      }
    }
  }

  bool differs(const float* got) const {
    double squares = 0;
    for (const float v : expected_) squares += double(v) * v;
    const double typical = std::sqrt(squares / double(expected_.size()));
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (!(std::fabs(got[i] - expected_[i]) <= 1e-3 * typical)) return true;
    }
    return false;
  }

  void report(benchmark::State& state, const std::string& who) {
    if (contenders_.empty()) measure();
    const auto find = [&](const std::string& name) {
      return std::find_if(contenders_.begin(), contenders_.end(), [&](const auto& c) { return c.who == name; });
    };
    const auto c = find(who);
    if (c == contenders_.end()) return state.SkipWithError("does not have this type on this CPU");
    if (error_) return state.SkipWithError(error_);
    const double time = median(c->times);
    for (auto _ : state) state.SetIterationTime(time);
    state.counters["GB/s"] = bytes() / time * 1e-9;
    state.counters["share_of_read"] = ratio(*find("read"), *c);
    state.counters["over_kernels"] = ratio(*c, *find("kernels"));
  }

  Type type_;
  int64_t m_, n_, k_;
  std::string name_;
  const char* error_ = nullptr;
  std::vector<float> expected_;
  std::vector<Contender> contenders_;
};

}  // namespace

int main(int argc, char** argv) {
  for (const Type& type : kTypes) {
    for (const auto& shape : kShapes) Case::add(type, 1, shape[0], shape[1]);
    for (const int64_t m : {2, 4, 8, 16, 32}) Case::add(type, m, kShapes[0][0], kShapes[0][1]);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_context();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
