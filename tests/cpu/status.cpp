// What the CPU operations refuse, with which words, and that a refused call writes nothing.
#include "support/cpu.h"

#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/norm_heads.h>
#include <kernels/cpu/router.h>
#include <kernels/cpu/sampling.h>

#if defined(__linux__)
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>

#include "support/threads.h"

using namespace test;

namespace {

constexpr int64_t kCols = 8;

struct Operation {
  const char* name;
  // (in, out, rows, cols)
  std::function<k::Status(const k::DirectLoad<float>&, const k::DirectStore<float, float>&, int64_t, int64_t)> run;
};

const Operation kOperations[] = {
    {"softmax", [](auto& in, auto& out, int64_t rows,
                   int64_t cols) { return k::cpu::softmax(k::cpu::Exec{2}, in, out, rows, cols); }},
    {"log_softmax", [](auto& in, auto& out, int64_t rows,
                       int64_t cols) { return k::cpu::log_softmax(k::cpu::Exec{2}, in, out, rows, cols); }},
    {"layernorm", [](auto& in, auto& out, int64_t rows,
                     int64_t cols) { return k::cpu::layernorm(k::cpu::Exec{2}, in, out, rows, cols); }},
    {"rmsnorm", [](auto& in, auto& out, int64_t rows,
                   int64_t cols) { return k::cpu::rmsnorm(k::cpu::Exec{2}, in, out, rows, cols); }},
};

}  // namespace

TEST_CASE("wrong arguments are refused with their reason") {
  Guarded<float> x(4, kCols, kCols), y(4, kCols, kCols);
  float* none = nullptr;
  for (const Operation& op : kOperations) {
    INFO(op.name);
    const std::string name = std::string(op.name) + ": ";
    const auto reason = [&](const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t rows, int64_t cols) {
      const k::Status status = op.run(k::load(from, from_ld), k::store(to, to_ld), rows, cols);
      CHECK(status.code() == (status.ok() ? k::Code::ok : k::Code::invalid));
      return std::string(status.reason());
    };
    CHECK(reason(x.data(), 8, y.data(), 8, -1, 8) == name + "rows is negative");
    CHECK(reason(x.data(), 8, y.data(), 8, 4, -8) == name + "cols is negative");
    CHECK(reason(none, 8, y.data(), 8, 4, 8) == name + "in: load: the pointer is null");
    CHECK(reason(x.data(), 8, none, 8, 4, 8) == name + "out: store: the pointer is null");
    CHECK(reason(x.data(), -8, y.data(), 8, 4, 8) == name + "in: load: the row stride is negative");
    CHECK(reason(x.data(), 8, y.data(), 7, 4, 8) == name + "out: store: the row stride is smaller than a row");
    CHECK(reason(x.data(), int64_t(1) << 61, y.data(), 8, 4, 8) ==
          name + "in: load: rows x row stride exceeds 64 bits");
    CHECK(reason(x.data(), 8, y.data(), int64_t(1) << 61, 4, 8) ==
          name + "out: store: rows x row stride exceeds 64 bits");
    CHECK(y.unchanged());
    // Nothing to do: nothing is read, whatever the pointers.
    CHECK(reason(none, 8, none, 8, 0, 8) == "ok");
    CHECK(reason(none, 8, none, 8, 4, 0) == "ok");
    CHECK(reason(none, 8, none, 8, 0, 0) == "ok");
    CHECK(reason(none, 8, none, 8, 0, -1) == name + "cols is negative");
    CHECK(y.unchanged());
  }
}

TEST_CASE("wrong parts of compositions are refused") {
  Guarded<float> x(4, kCols, kCols), y(4, kCols, kCols);
  Guarded<int8_t> q(4, kCols, kCols);
  float* none = nullptr;
  const k::cpu::Exec cx{1};
  const auto in = k::load(x.data(), kCols);
  const auto out = k::store(y.data(), kCols);
  const auto reason = [&](const auto& from, const auto& to) {
    return std::string(k::cpu::softmax(cx, from, to, 4, kCols).reason());
  };
  CHECK(reason(in | k::add(none), out) == "softmax: in: add: the pointer to a vector is null");
  CHECK(reason(in, k::affine(x.data(), none) | out) == "softmax: out: affine: beta: the pointer to a vector is null");
  CHECK(reason(in | k::tee(none, kCols), out) == "softmax: in: tee: the pointer is null");
  CHECK(reason(in, k::both(out, k::store(none, kCols))) == "softmax: out: store: the pointer is null");
  CHECK(reason(in, k::quantize(q.data(), kCols, none)) == "softmax: out: quantize: the pointer to the scales is null");
  CHECK(reason(in | k::causal(0, 1), out) == "softmax: in: causal: q_len is less than 1");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::string limits = "clamp: low exceeds high, or one of them is NaN";
  CHECK(reason(in | k::scale(2) | k::clamp(1, -1), out) == "softmax: in: " + limits);
  CHECK(reason(in, k::clamp(nan, 1) | out) == "softmax: out: " + limits);
  CHECK(reason(in, k::clamp(0, nan) | out) == "softmax: out: " + limits);
  CHECK(reason(k::gated(in, in) | k::glu(k::clamp(1, 0)), out) == "softmax: in: " + limits);
  CHECK(std::string(k::cpu::matmul(cx, in, k::gated(in, in), k::glu(k::clamp(1, 0)) | out, {4, 4, kCols}).reason()) ==
        "matmul: out: " + limits);
  CHECK(reason(k::gate_up(k::load(x.data(), kCols), kCols / 2) | k::swiglu(), out) ==
        "softmax: in: gate_up, up_gate: a half has 4 columns, and the call 8");
  CHECK(reason(k::up_gate(k::load(x.data(), kCols), kCols + 1) | k::swiglu(), out) ==
        "softmax: in: gate_up, up_gate: a half has 9 columns, and the call 8");
  CHECK((y.unchanged() && q.unchanged()));
}

TEST_CASE("a pointer at which its elements cannot stand is refused") {
  Guarded<float> x(4, kCols, kCols), y(4, kCols, kCols);
  Guarded<int8_t> q(4, kCols, kCols);
  const auto off = [](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<char*>(p) + 1); };
  const k::cpu::Exec cx{1};
  const auto in = k::load(x.data(), kCols);
  const auto out = k::store(y.data(), kCols);
  const auto refused = [&](const auto& from, const auto& to, const char* words) {
    const k::Status status = k::cpu::softmax(cx, from, to, 4, kCols);
    CHECK(status.code() == k::Code::invalid);
    CHECK(std::string(status.reason()) == words);
  };
  refused(k::load(off(x.data()), kCols), out, "softmax: in: load: the pointer is not aligned for its elements");
  refused(k::load(reinterpret_cast<const k::half*>(off(x.data())), kCols), out,
          "softmax: in: load: the pointer is not aligned for its elements");
  refused(in, k::store(off(y.data()), kCols), "softmax: out: store: the pointer is not aligned for its elements");
  refused(in | k::tee(off(y.data()), kCols), out, "softmax: in: tee: the pointer is not aligned for its elements");
  refused(in | k::add(off(x.data())), out, "softmax: in: add: the pointer to a vector is not aligned for its elements");
  refused(in, k::mul(k::per_row(off(x.data()))) | out,
          "softmax: out: mul: per_row: the vector's pointer is not aligned for its elements");
  refused(in, k::quantize(q.data(), kCols, off(y.data())),
          "softmax: out: quantize: the pointer to the scales is not aligned for its elements");
  CHECK((y.unchanged() && q.unchanged()));
  const auto misaligned = [](const k::Status& status, const char* words) {
    CHECK(status.code() == k::Code::invalid);
    CHECK(std::string(status.reason()) == words);
  };
  double numbers[kCols] = {};
  double* const half_way = reinterpret_cast<double*>(reinterpret_cast<float*>(numbers) + 1);
  const auto layernorm = [&](const k::LayerNorm& norm) { return k::cpu::layernorm(cx, in, out, 4, kCols, norm); };
  const auto rmsnorm = [&](const k::RmsNorm& norm) { return k::cpu::rmsnorm(cx, in, out, 4, kCols, norm); };
  misaligned(layernorm(k::LayerNorm{}.mean(off(y.data()))),
             "layernorm: the pointer to mean is not aligned for its elements");
  misaligned(layernorm(k::LayerNorm{}.rstd(off(y.data()))),
             "layernorm: the pointer to rstd is not aligned for its elements");
  misaligned(layernorm(k::LayerNorm{}.mean(half_way)),
             "layernorm: the pointer to mean is not aligned for its elements");
  misaligned(layernorm(k::LayerNorm{}.inv_variance(half_way)),
             "layernorm: the pointer to rstd is not aligned for its elements");
  misaligned(rmsnorm(k::RmsNorm{}.rstd(off(y.data()))), "rmsnorm: the pointer to rstd is not aligned for its elements");
  misaligned(rmsnorm(k::RmsNorm{}.rstd(half_way)), "rmsnorm: the pointer to rstd is not aligned for its elements");
  CHECK((y.unchanged() && q.unchanged()));
  // Four bytes are enough for a float, where a double could not stand.
  CHECK(k::cpu::rmsnorm(cx, in, out, 4, kCols, k::RmsNorm{}.rstd(reinterpret_cast<float*>(numbers) + 1)));
  // Two bytes are enough for elements of two, one for those of one.
  CHECK(k::cpu::softmax(cx, k::load(reinterpret_cast<const k::half*>(x.data()) + 1, kCols), out, 4, kCols));
  CHECK(k::cpu::softmax(cx, k::load(off(q.data()), kCols), out, 3, kCols));
}

TEST_CASE("results that overlap what is read, and not element for element, are refused") {
  std::vector<float> memory(4096, 0.5f);
  float* const p = memory.data();
  const auto run = [&](const auto& in, const auto& out, int64_t rows) {
    return std::string(k::cpu::softmax(k::cpu::Exec{2}, in, out, rows, kCols).reason());
  };
  const std::string refused = "softmax: out overlaps in, and not element for element";
  CHECK(run(k::load(p, 8), k::store(p, 8), 4) == "ok");
  CHECK(run(k::load(p, 20) | k::scale(2), k::shift(1) | k::store(p, 20), 4) == "ok");
  CHECK(run(k::load(p, 16), k::store(p + 8, 16), 4) == "ok");  // side by side
  CHECK(run(k::load(p, 8), k::store(p + 32, 8), 4) == "ok");   // one after the other
  CHECK(run(k::load(p, 8), k::store(p, 9), 1) == "ok");        // one row
  CHECK(run(k::load(p, 8), k::store(p + 1, 8), 4) == refused);
  CHECK(run(k::load(p + 1, 8), k::store(p, 8), 4) == refused);
  CHECK(run(k::load(p, 16), k::store(p + 7, 16), 4) == refused);
  CHECK(run(k::load(p, 16), k::store(p + 16 + 7, 16), 4) == refused);
  CHECK(run(k::load(p, 8), k::store(p + 31, 8), 4) == refused);
  CHECK(run(k::load(p, 8), k::store(p, 9), 4) == refused);
  CHECK(run(k::load(p, 0), k::store(p, 8), 4) == refused);
  CHECK(run(k::load(p, 8), k::store(reinterpret_cast<k::half*>(p), 16), 4) == refused);
  CHECK(run(k::load(reinterpret_cast<const k::half*>(p), 16) | k::scale(2), k::scale(2) | k::store(p, 8), 4) ==
        refused);
}

TEST_CASE("a negative eps is refused, also where there is nothing to do") {
  Guarded<float> x(4, kCols, kCols), y(4, kCols, kCols);
  const k::cpu::Exec cx{1};
  const auto in = k::load(x.data(), kCols);
  const auto out = k::store(y.data(), kCols);
  for (const double eps : {-1e-5, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    for (const int64_t rows : {0, 4}) {
      CHECK(std::string(k::cpu::layernorm(cx, in, out, rows, kCols, k::LayerNorm{}.eps(eps)).reason()) ==
            "layernorm: eps is negative or NaN");
      CHECK(std::string(k::cpu::rmsnorm(cx, in, out, rows, kCols, k::RmsNorm{}.eps(eps)).reason()) ==
            "rmsnorm: eps is negative or NaN");
    }
  }
  CHECK(y.unchanged());
}

TEST_CASE("a row of more than 2^30 columns is refused") {
  Guarded<float> x(1, kCols, kCols), y(1, kCols, kCols);
  for (const Operation& op : kOperations) {
    INFO(op.name);
    const k::Status status = op.run(k::load(x.data(), 0), k::store(y.data(), 0), 1, (int64_t(1) << 30) + 1);
    CHECK(status.code() == k::Code::unsupported);
    CHECK(std::string(status.reason()) == std::string(op.name) + ": cols is larger than 2^30");
  }
  CHECK(y.unchanged());
}

TEST_CASE("Exec: at least one thread, and as many as the machine has unless told otherwise") {
  Guarded<float> x(1, kCols, kCols), y(1, kCols, kCols);
  for (int64_t c = 0; c < kCols; ++c) x.set(0, c, 1.f);
  x.upload();
  const auto run = [&](const k::cpu::Exec& cx, int64_t rows) {
    return k::cpu::softmax(cx, k::load(x.data(), kCols), k::store(y.data(), kCols), rows, kCols);
  };
  for (const int threads : {0, -1, std::numeric_limits<int>::min()}) {
    for (const int64_t rows : {0, 1}) {
      const k::Status status = run(k::cpu::Exec{threads}, rows);
      CHECK(status.code() == k::Code::invalid);
      CHECK(std::string(status.reason()) == "softmax: Exec: threads is less than 1");
    }
    const k::cpu::Exec none{threads};
    const auto in = k::load(x.data(), kCols);
    const auto out = k::store(y.data(), kCols);
    int32_t ids[8] = {}, others[8] = {};
    float number = 0;
    const auto named = [](const k::Status& status, const char* call) {
      CHECK(std::string(status.reason()) == std::string(call) + ": Exec: threads is less than 1");
    };
    named(k::cpu::copy(none, in, out, 1, kCols), "copy");
    named(k::cpu::matmul(none, in, in, k::store(&number), {1, 1, kCols}), "matmul");
    named(k::cpu::sample(none, in, ids, 1, kCols), "sample");
    named(k::cpu::log_probs(none, in, 1, kCols, k::LogProbs{}.of(ids, &number)), "log_probs");
    named(k::cpu::verify(none, in, k::drafts(ids, 0), others, ids, {1, 0, kCols}), "verify");
    named(k::cpu::route(none, in, ids, y.data(), {1, kCols, 2}), "route");
    named(k::cpu::sort_by_expert(none, ids, {others, others, others}, {1, 8, 2}), "sort_by_expert");
    named(k::cpu::norm_heads(none, in, out, {1, 1, kCols, 1}), "norm_heads");
    const auto kv = k::dense_kv(k::nhd(x.data(), 1, 1, kCols), k::nhd(x.data(), 1, 1, kCols), 1);
    const k::AttentionShape one{1, 1, 1, 1, kCols};
    named(k::cpu::attention(none, in, kv, out, one, k::causal()), "attention");
    named(k::cpu::decode(none, in, kv, out, one, k::causal(), k::Workspace{}), "decode");
    named(k::cpu::merge_states(none, in, k::load(&number), out, {1, 1, 1, kCols}), "merge_states");
  }
  CHECK(y.unchanged());
  CHECK(k::cpu::Exec{}.threads() >= 1);
  CHECK(k::cpu::Exec{5}.threads() == 5);
  REQUIRE(run(k::cpu::Exec{}, 1));
  y.download();
  CHECK(y.get(0, 7) == 1.f / kCols);
}

TEST_CASE("machine_has() knows each extension that the code is compiled for") {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && line.rfind("flags", 0) != 0) {}
  if (line.empty()) return test::skip("no flags in /proc/cpuinfo");
  line += ' ';
  const char* const names[] = {"sse4_1",   "avx",      "avx2",     "fma",         "f16c",        "bmi2",      "avx512f",
                               "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512vbmi"};
  CHECK(k::cpu::machine_has(0).ok());
  for (unsigned bit = 0; bit < 13; ++bit) {
    INFO(names[bit]);
    const k::Status status = k::cpu::machine_has(1u << bit);
    CHECK(status.ok() == (line.find(std::string(" ") + names[bit] + ' ') != std::string::npos));
    const std::string name = bit == 0 ? "sse4.1" : bit == 10 ? "avx512bf16" : bit == 11 ? "avx512vnni" : names[bit];
    if (!status) CHECK(status.reason() == "compiled for " + name + ", which this CPU does not have");
  }
  unsigned needs = 0;
#if defined(__SSE4_1__)
  needs |= 1;
#endif
#if defined(__AVX2__)
  needs |= 6;
#endif
#if defined(__FMA__)
  needs |= 8;
#endif
#if defined(__F16C__)
  needs |= 16;
#endif
  CHECK((k::cpu::kNeeds & 31u) == needs);
  CHECK(k::cpu::Exec{1}.status().ok() == k::cpu::machine_has(k::cpu::kNeeds).ok());
}

TEST_CASE("a quota of CPU time counts as whole CPUs, rounded up") {
  using k::detail::host::quota_cpus;
  CHECK(quota_cpus(150000, 100000) == 2);
  CHECK(quota_cpus(200000, 100000) == 2);
  CHECK(quota_cpus(1000, 100000) == 1);
  CHECK(quota_cpus(-1, 100000) == 0);
  CHECK(quota_cpus(0, 0) == 0);
}

#if defined(__linux__)
TEST_CASE("a container's quota is read from control groups of both versions") {
  std::string folder = "/tmp/kernels_quota_XXXXXX";
  REQUIRE(mkdtemp(&folder[0]) != nullptr);
  const std::string files[] = {"/cpu.max", "/cpu/cpu.cfs_quota_us", "/cpu/cpu.cfs_period_us"};
  const auto cpus = [&] { return k::detail::host::container_cpus(folder.c_str()); };
  const auto say = [&](int file, const char* text) { std::ofstream(folder + files[file]) << text << '\n'; };
  CHECK(cpus() == 0);
  say(0, "max 100000");
  CHECK(cpus() == 0);
  say(0, "250000 100000");
  CHECK(cpus() == 3);
  REQUIRE(std::remove((folder + files[0]).c_str()) == 0);
  REQUIRE(mkdir((folder + "/cpu").c_str(), 0700) == 0);
  say(1, "-1"), say(2, "100000");
  CHECK(cpus() == 0);
  say(1, "400000");
  CHECK(cpus() == 4);
  for (int file : {1, 2}) std::remove((folder + files[file]).c_str());
  rmdir((folder + "/cpu").c_str()), rmdir(folder.c_str());
}

TEST_CASE("a child of fork() can call: with a pool, and without OpenMP with threads as well") {
  const int64_t rows = 6, cols = 1000;
  std::vector<float> x(size_t(rows * cols), 1.f), y(x.size(), -1.f);
#if defined(_OPENMP) || TEST_THREAD_SANITIZER
  auto one_by_one = [](int parts, const auto& f) {
    for (int i = 0; i < parts; ++i) f(i);
  };
  const k::cpu::Exec child{3, one_by_one};
#else
  const k::cpu::Exec child{3};
#endif
  const auto right = [&](k::cpu::Exec cx) {
    std::fill(y.begin(), y.end(), -1.f);
    return bool(k::cpu::softmax(cx.least_work(0), k::load(x.data(), cols), k::store(y.data(), cols), rows, cols)) &&
           std::all_of(y.begin(), y.end(), [](float v) { return v == 1.f / 1000; });
  };
  REQUIRE(right(k::cpu::Exec{3}));
  const pid_t pid = fork();
  REQUIRE(pid >= 0);
  if (pid == 0) _exit(right(child) ? 0 : 1);
  int status = -1;
  REQUIRE(waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
}
#endif

TEST_CASE("a caller's pool runs all parts of a call, and small calls have one") {
  const int64_t rows = 64, cols = 8192;
  std::vector<float> x(size_t(rows * cols), 1.f), y(x.size(), -1.f);
  std::vector<int> calls;
  // From the last part to the first: any order will do.
  auto pool = [&](int parts, const auto& f) {
    calls.push_back(parts);
    for (int i = parts - 1; i >= 0; --i) f(i);
  };
  const k::cpu::Exec cx{7, pool};
  CHECK(cx.threads() == 7);
  REQUIRE(k::cpu::softmax(cx, k::load(x.data(), cols), k::store(y.data(), cols), rows, cols));
  CHECK(calls == std::vector<int>{7});
  CHECK(std::all_of(y.begin(), y.end(), [&](float v) { return v == 1.f / float(cols); }));
  // One row of many columns is shared as well.
  calls.clear(), std::fill(y.begin(), y.end(), -1.f);
  REQUIRE(k::cpu::softmax(cx, k::load(x.data(), 0), k::store(y.data(), 0), 1, rows * cols));
  CHECK(!calls.empty());
  CHECK(std::all_of(y.begin(), y.end(), [&](float v) { return v == 1.f / float(rows * cols); }));
  // Little work is done where it is.
  calls.clear();
  for (const int64_t few : {1, 2, 8})
    REQUIRE(k::cpu::softmax(cx, k::load(x.data(), few), k::store(y.data(), few), few, few));
  CHECK(calls.empty());
  // Unless it is asked for otherwise.
  REQUIRE(k::cpu::softmax(k::cpu::Exec(cx).least_work(0), k::load(x.data(), 8), k::store(y.data(), 8), 9, 8));
  CHECK(calls == std::vector<int>{7});
}

TEST_CASE("a product has no more parts than tiles") {
  const int64_t m = 40, n = 24, depth = 16384;
  std::vector<float> x(size_t(m * depth), 1.f), w(size_t(n * depth), 0.5f), y(size_t(m * n), -1.f);
  int most = 0;
  auto pool = [&](int parts, const auto& f) {
    most = std::max(most, parts);
    for (int i = 0; i < parts; ++i) f(i);
  };
  REQUIRE(k::cpu::matmul(k::cpu::Exec{63, pool}, k::load(x.data(), depth), k::load(w.data(), depth),
                         k::store(y.data(), n), {m, n, depth}));
  // Tiles have 8 to 32 columns and 6 or 14 rows.
  CHECK(most <= 3 * 7);
  CHECK(std::all_of(y.begin(), y.end(), [&](float v) { return v == float(depth) / 2; }));
}
