// Attention on the CPU. Decoding, of keys and values far larger than the cache, against a plain read of the same bytes;
// many queries against two products by OpenBLAS with the library's softmax between them. What is timed is named
// decode/type/layout/batchxlength/heads/who  and  prefill/length/heads/dim/mask/who.  As in cpu_row.cpp, all that is
// compared takes turns, and ratios are taken within each round.
#include <cmath>
#include <numeric>
#if defined(__AVX__)
#include <immintrin.h>
#endif
#if KERNELS_HAVE_OPENBLAS
#include <cblas.h>
#endif

#include <kernels/core/quant.h>
#include <kernels/cpu/softmax.h>

#include "support/cpu_attentions.h"
#include "support/cpu_bench.h"

using namespace bench;

namespace {

constexpr int kRounds = 15;
constexpr int64_t kDim = 128;

struct Type {
  KvType type;
  const char* name;
  int bits;
};
constexpr Type kTypes[] = {{KvType::fp32, "fp32", 32}, {KvType::fp16, "fp16", 16}, {KvType::bf16, "bf16", 16},
                           {KvType::e4m3, "e4m3", 8},  {KvType::int8, "int8", 8},  {KvType::int4, "int4", 4}};

// A sum of all bytes' floats, on all threads.
void read_plain(const char* from, size_t bytes) {
  const int parts = threads();
  k::detail::host::parallel(parts, [&](int i) {
    const char* const p = from + bytes / 512 * i / parts * 512;
    const size_t count = bytes / 512 * (i + 1) / parts * 512 - size_t(p - from);
#if defined(__AVX__)
    __m256 sums[8] = {};
    for (size_t at = 0; at < count; at += sizeof(sums)) {
      for (int j = 0; j < 8; ++j)
        sums[j] = _mm256_add_ps(sums[j], _mm256_loadu_ps(reinterpret_cast<const float*>(p + at) + 8 * j));
    }
    for (int j = 1; j < 8; ++j) sums[0] = _mm256_add_ps(sums[0], sums[j]);
    benchmark::DoNotOptimize(sums[0]);
#else
    float sum = 0;
    for (size_t at = 0; at < count; at += sizeof(float)) sum += *reinterpret_cast<const float*>(p + at);
    benchmark::DoNotOptimize(sum);
#endif
  });
}

using Run = const char* (*)(const AttentionCall&);

// Contenders that take turns. All are timed when the first of them is asked for.
class Case {
 public:
  virtual ~Case() = default;
  static void add(const std::shared_ptr<Case>& c, const std::vector<const char*>& who) {
    for (const char* one : who) {
      benchmark::RegisterBenchmark((c->name_ + one).c_str(),
                                   [c, one](benchmark::State& state) { c->report(state, one); })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }

 protected:
  virtual void prepare() = 0;
  virtual void count(benchmark::State& state, double time) const = 0;

  void report(benchmark::State& state, const std::string& who) {
    if (contenders_.empty()) {
      prepare();
      for (int round = -1; round < kRounds && !error_; ++round) {
        for (Contender& c : contenders_) {
          const double time = seconds(c.call);
          if (round >= 0) c.times.push_back(time);
        }
      }
    }
    if (error_) return state.SkipWithError(error_);
    const auto find = [&](const std::string& name) {
      return std::find_if(contenders_.begin(), contenders_.end(), [&](const auto& c) { return c.who == name; });
    };
    const auto c = find(who), read = find("read");
    const double time = median(c->times);
    for (auto _ : state) state.SetIterationTime(time);
    count(state, time);
    if (read != contenders_.end()) state.counters["share_of_read"] = ratio(*read, *c);
    state.counters["over_kernels"] = ratio(*c, *find("kernels"));
  }

  std::string name_;
  const char* error_ = nullptr;
  std::vector<Contender> contenders_;
};

class Decode : public Case {
 public:
  Decode(const Type& type, int64_t batch, int64_t length, int64_t heads, int64_t kv_heads, int64_t page)
      : type_(type), page_(page) {
    call_ = {type.type, nullptr, nullptr,  nullptr, nullptr, nullptr, nullptr, batch, 1,
             length,    heads,   kv_heads, kDim,    page,    false,   nullptr, 0,     threads()};
    name_ = std::string("decode/") + type.name + (page ? "/pages of " + std::to_string(page) : "/dense") + "/" +
            std::to_string(batch) + "x" + std::to_string(length) + "/" + std::to_string(heads) + ":" +
            std::to_string(kv_heads) + "/";
  }

 private:
  size_t elements() const { return size_t(call_.batch * call_.length * call_.kv_heads * kDim); }
  size_t bytes() const { return 2 * elements() * size_t(type_.bits) / 8; }

  void prepare() override {
    constexpr size_t most = size_t(512) << 20;
    static char* const memory = allocate<char>(most);
    static float* const q = allocate<float>(size_t(1) << 20);
    static float* const o = allocate<float>(size_t(1) << 20);
    static float* const scales = allocate<float>(4096);
    static char* const workspace = allocate<char>(size_t(64) << 20);
    const size_t count = 2 * elements();
    if (type_.type == KvType::fp32) fill<float>(memory, count, 0.f, 1.f);
    else if (type_.type == KvType::fp16) fill<k::half>(memory, count, 0.f, 1.f);
    else if (type_.type == KvType::bf16) fill<k::bfloat16>(memory, count, 0.f, 1.f);
    else if (type_.type == KvType::e4m3) fill<k::float8_e4m3>(memory, count, 0.f, 1.f);
    else fill<int8_t>(memory, bytes(), 0.f, 40.f);
    fill<float>(q, size_t(call_.batch * call_.heads * kDim), 0.f, 1.f);
    std::fill_n(scales, 1024, 0.03f);
    table_.resize(page_ ? size_t(call_.batch * call_.length / page_) : 0);
    std::iota(table_.begin(), table_.end(), 0);
    uint64_t random = 1;
    for (size_t i = table_.size(); i-- > 1;) {
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(table_[i], table_[(random >> 33) % (i + 1)]);
    }
    call_.q = q, call_.o = o, call_.k = memory, call_.v = memory + bytes() / 2, call_.scales = scales,
    call_.table = table_.data();
    call_.workspace = workspace, call_.workspace_bytes = size_t(64) << 20;
    const auto contender = [this](const char* who, Run run) {
      contenders_.push_back({who, [this, run] { error_ = run(call_); }, {}});
    };
    contenders_.push_back({"read", [this] { read_plain(static_cast<const char*>(call_.k), bytes()); }, {}});
    contender("kernels", attention_native);
#if KERNELS_HAVE_AVX2
    contender("kernels_avx2", attention_avx2);
#endif
  }
  void count(benchmark::State& state, double time) const override {
    state.counters["GB/s"] = double(bytes()) / time * 1e-9;
  }

  Type type_;
  int64_t page_;
  std::vector<int32_t> table_;
  AttentionCall call_;
};

class Prefill : public Case {
 public:
  Prefill(int64_t length, int64_t heads, int64_t kv_heads, int64_t dim, bool causal) {
    call_ = {KvType::fp32, nullptr, nullptr,  nullptr, nullptr, nullptr, nullptr, 1, length,
             length,       heads,   kv_heads, dim,     0,       causal,  nullptr, 0, threads()};
    name_ = "prefill/" + std::to_string(length) + "/" + std::to_string(heads) + ":" + std::to_string(kv_heads) + "/" +
            std::to_string(dim) + (causal ? "/causal/" : "/full/");
  }

 private:
  void prepare() override {
    const size_t queries = size_t(call_.length * call_.heads * call_.dim),
                 keys = size_t(call_.length * call_.kv_heads * call_.dim);
    q_.resize(queries), k_.resize(keys), v_.resize(keys), o_.resize(queries), unfused_.resize(queries),
        scores_.resize(size_t(call_.length * call_.length));
    fill<float>(q_.data(), queries, 0.f, 1.f);
    fill<float>(k_.data(), keys, 0.f, 1.f);
    fill<float>(v_.data(), keys, 0.f, 1.f);
    call_.q = q_.data(), call_.k = k_.data(), call_.v = v_.data(), call_.o = o_.data();
    contenders_.push_back({"kernels", [this] { error_ = attention_native(call_); }, {}});
#if KERNELS_HAVE_AVX2
    contenders_.push_back({"kernels_avx2", [this] { error_ = attention_avx2(call_); }, {}});
#endif
#if KERNELS_HAVE_OPENBLAS
    contenders_.push_back({"unfused", [this] { unfused(); }, {}});
    error_ = attention_native(call_);
    unfused();
    for (size_t i = 0; i < queries && !error_; ++i) {
      if (!(std::fabs(o_[i] - unfused_[i]) <= 1e-4f)) error_ = "results differ";
    }
#endif
  }
#if KERNELS_HAVE_OPENBLAS
  void unfused() {
    const int n = int(call_.length), d = int(call_.dim), q_ld = int(call_.heads * call_.dim),
              kv_ld = int(call_.kv_heads * call_.dim);
    for (int64_t head = 0; head < call_.heads; ++head) {
      const int64_t from = head * d, kv_from = head / (call_.heads / call_.kv_heads) * d;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, d, 1.f / std::sqrt(float(d)), q_.data() + from, q_ld,
                  k_.data() + kv_from, kv_ld, 0.f, scores_.data(), n);
      const k::cpu::Exec cx{call_.threads};
      const auto scores = k::load(scores_.data(), n);
      const k::Status status = call_.causal
                                   ? k::cpu::softmax(cx, scores | k::causal(n, n), k::store(scores_.data(), n), n, n)
                                   : k::cpu::softmax(cx, scores, k::store(scores_.data(), n), n, n);
      if (!status) error_ = status.reason();
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, d, n, 1.f, scores_.data(), n, v_.data() + kv_from,
                  kv_ld, 0.f, unfused_.data() + from, q_ld);
    }
  }
#endif
  // Half of the products are masked under a causal mask, and not counted.
  void count(benchmark::State& state, double time) const override {
    state.counters["GFLOP/s"] = 4e-9 * double(call_.length) * double(call_.length) * double(call_.heads * call_.dim) *
                                (call_.causal ? 0.5 : 1) / time;
  }

  AttentionCall call_;
  std::vector<float> q_, k_, v_, o_, unfused_, scores_;
};

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> decoders = {"read", "kernels"}, prefillers = {"kernels"};
#if KERNELS_HAVE_AVX2
  decoders.push_back("kernels_avx2");
  prefillers.push_back("kernels_avx2");
#endif
#if KERNELS_HAVE_OPENBLAS
  prefillers.push_back("unfused");
#endif
  // As many sequences as make 256 MB or more.
  for (const Type& type : kTypes) {
    const int64_t batch = 4 * 32 / type.bits;
    Case::add(std::make_shared<Decode>(type, batch, 8192, 32, 8, 0), decoders);
    if (type.type != KvType::fp16) continue;
    Case::add(std::make_shared<Decode>(type, 1, 65536, 32, 8, 0), decoders);
    for (const int64_t heads : {8, 16, 64})
      Case::add(std::make_shared<Decode>(type, batch, 8192, heads, 8, 0), decoders);
    for (const int64_t page : {1, 16, 64})
      Case::add(std::make_shared<Decode>(type, batch, 8192, 32, 8, page), decoders);
  }
  for (const bool causal : {true, false}) {
    for (const int64_t dim : {64, 128, 256}) Case::add(std::make_shared<Prefill>(2048, 8, 2, dim, causal), prefillers);
    for (const int64_t length : {512, 8192})
      Case::add(std::make_shared<Prefill>(length, 8, 2, 128, causal), prefillers);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  add_context();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
