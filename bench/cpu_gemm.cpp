// Products of matrices on the CPU: the library against OpenBLAS and oneDNN. What is timed is named gemm/type/MxNxK/who.
// As in cpu_row.cpp, all that is compared takes turns, and ratios are taken within each round.
//
// With ONEDNN_MAX_CPU_ISA=AVX2 the library compiled for AVX2 is measured, under the name gemm_avx2. OpenBLAS takes its
// instruction set from OPENBLAS_CORETYPE (Haswell, SkylakeX), or guesses: see run_cpu.sh.
#include <cmath>
#if KERNELS_HAVE_OPENBLAS
#include <cblas.h>
extern "C" char* openblas_get_corename(void);
#endif

#include "support/cpu_bench.h"
#include "support/cpu_gemms.h"
#include "support/onednn.h"

using namespace bench;

namespace {

constexpr int kRounds = 21;
constexpr int64_t kShapes[][3] = {
    {1024, 1024, 1024}, {2048, 2048, 2048}, {999, 999, 999}, {128, 4096, 4096}, {512, 4096, 4096}};
constexpr size_t kMost = size_t(4096) * 4096;  // elements of a matrix
constexpr const char* kContenders[] = {
    "kernels",
#if KERNELS_HAVE_OPENBLAS
    "openblas",
#endif
#if KERNELS_HAVE_ONEDNN
    "onednn",
#endif
};

const char* name(Operand type) { return type == Operand::fp32 ? "fp32" : type == Operand::fp16 ? "fp16" : "bf16"; }

bool only_avx2() {
  const char* const isa = std::getenv("ONEDNN_MAX_CPU_ISA");
  return KERNELS_HAVE_AVX2 && isa && std::string(isa) == "AVX2";
}

#if KERNELS_HAVE_ONEDNN
std::function<void()> onednn(const GemmCall& c) {
  using Type = dnnl::memory::data_type;
  const Type type = c.type == Operand::fp32 ? Type::f32 : c.type == Operand::fp16 ? Type::f16 : Type::bf16;
  return onednn_product(type, c.x, c.w, c.y, c.m, c.n, c.k);
}
#endif

// One type and shape. All contenders are timed in turn when the first of them is asked for.
class Case {
 public:
  Case(Operand type, const int64_t (&shape)[3])
      : call_{type, nullptr, nullptr, nullptr, shape[0], shape[1], shape[2], threads()} {
    name_ = std::string(only_avx2() ? "gemm_avx2/" : "gemm/") + name(type) + "/" + std::to_string(shape[0]) + "x" +
            std::to_string(shape[1]) + "x" + std::to_string(shape[2]) + "/";
  }

  static void add(Operand type, const int64_t (&shape)[3]) {
    const auto c = std::make_shared<Case>(type, shape);
    for (const char* who : kContenders) {
      if (who == std::string("openblas") && type != Operand::fp32) continue;
      benchmark::RegisterBenchmark((c->name_ + who).c_str(),
                                   [c, who](benchmark::State& state) { c->report(state, who); })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }

 private:
  template <class T>
  static void fill_operands(void* x, void* w) {
    fill<T>(x, kMost, 0.f, 1.f);
    fill<T>(w, kMost, 0.f, 1.f);
  }

  void measure() {
    static void* const x = allocate<void>(kMost * sizeof(float));
    static void* const w = allocate<void>(kMost * sizeof(float));
    static float* const y = allocate<float>(kMost * sizeof(float));
    if (call_.type == Operand::fp32) fill_operands<float>(x, w);
    else if (call_.type == Operand::fp16) fill_operands<k::half>(x, w);
    else fill_operands<k::bfloat16>(x, w);
    call_.x = x;
    call_.w = w;
    call_.y = y;

    const GemmCall call = call_;
    auto* run = gemm_native;
#if KERNELS_HAVE_AVX2
    if (only_avx2()) run = gemm_avx2;
#endif
    contenders_ = {{"kernels", [=] { run(call); }, {}}};
#if KERNELS_HAVE_OPENBLAS
    if (call.type == Operand::fp32) {
      contenders_.push_back({"openblas", [=] {
        const int m = int(call.m), n = int(call.n), depth = int(call.k);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, depth, 1.f, static_cast<const float*>(call.x), depth,
                    static_cast<const float*>(call.w), depth, 0.f, call.y, n);
      }, {}});
    }
#endif
#if KERNELS_HAVE_ONEDNN
    if (const auto peer = onednn(call)) contenders_.push_back({"onednn", peer, {}});
#endif
    error_ = run(call);
    expected_.assign(y, y + call.m * call.n);
    for (int round = -1; round < kRounds; ++round) {
      for (Contender& c : contenders_) {
        const double time = seconds(c.call);
        if (round >= 0) c.times.push_back(time);
        else if (differs()) error_ = "results differ";
      }
    }
  }

  bool differs() const {
    double squares = 0;
    for (const float v : expected_) squares += double(v) * v;
    const double typical = std::sqrt(squares / double(expected_.size()));
    for (size_t i = 0; i < expected_.size(); ++i) {
      if (!(std::fabs(call_.y[i] - expected_[i]) <= 1e-3 * typical)) return true;
    }
    return false;
  }

  void report(benchmark::State& state, const std::string& who) {
    if (contenders_.empty()) measure();
    const auto c =
        std::find_if(contenders_.begin(), contenders_.end(), [&](const auto& one) { return one.who == who; });
    if (c == contenders_.end()) return state.SkipWithError("does not have this type on this CPU");
    if (error_) return state.SkipWithError(error_);
    const double time = median(c->times);
    for (auto _ : state) state.SetIterationTime(time);
    state.counters["GFLOP/s"] = 2e-9 * double(call_.m) * double(call_.n) * double(call_.k) / time;
    state.counters["over_kernels"] = ratio(*c, contenders_.front());
  }

  std::string name_;
  GemmCall call_;
  const char* error_ = nullptr;
  std::vector<float> expected_;
  std::vector<Contender> contenders_;
};

}  // namespace

int main(int argc, char** argv) {
  for (const Operand type : {Operand::fp32, Operand::fp16, Operand::bf16}) {
    for (const auto& shape : kShapes) Case::add(type, shape);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_context();
#if KERNELS_HAVE_OPENBLAS
  benchmark::AddCustomContext("openblas", std::string(OPENBLAS_VERSION) + " for " + openblas_get_corename());
#endif
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
