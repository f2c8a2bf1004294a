// Functors in OneFlow's form on the CPU: the cases of tests/gpu/oneflow.cu, and how often a load runs.
#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/softmax.h>
#include <kernels/quantize.h>

#include "support/oneflow_cases.h"
#include "support/tally.h"
#include "support/threads.h"

using namespace test;
namespace k = kernels;

namespace {

struct Cpu {
  using Memory = HostMemory;
  template <class S, class D>
  using DirectLoad = k::DirectLoad<S, k::compute_t<D>>;
  template <class S, class D>
  using DirectStore = k::DirectStore<S, D>;
  k::cpu::Exec cx = on_threads(2);

  template <class C, class L, class S>
  bool softmax(const L& load, const S& store, int64_t rows, int64_t cols) {
    return k::cpu::softmax<L, S, C>(cx, load, store, rows, cols).ok();
  }
  template <class C, class L, class S>
  bool log_softmax(const L& load, const S& store, int64_t rows, int64_t cols) {
    return k::cpu::log_softmax<L, S, C>(cx, load, store, rows, cols).ok();
  }
  template <class C, class L, class S>
  bool layernorm(const L& load, const S& store, int64_t rows, int64_t cols, double eps, C* mean, C* inverse) {
    return k::cpu::layernorm<L, S, C>(cx, load, store, rows, cols, eps, mean, inverse).ok();
  }
  template <class C, class L, class S>
  bool rmsnorm(const L& load, const S& store, int64_t rows, int64_t cols, double eps, C* inverse) {
    return k::cpu::rmsnorm<L, S, C>(cx, load, store, rows, cols, eps, inverse).ok();
  }
};

template <class F>
void in_every_type(F f) {
  flow::misaligned() = 0;
  f(k::half{});  // those of bfloat16 are compiled for the GPU
  f(float{});
  f(double{});
  CHECK(flow::misaligned() == 0);
}

Cpu cpu;

}  // namespace

TEST_CASE("OneFlow's forms: scale and mask, dropout and add") {
  in_every_type([](auto t) { flow::scale_mask_dropout<decltype(t)>(cpu); });
}
TEST_CASE("OneFlow's forms: bias and mask, broadcast") {
  in_every_type([](auto t) { flow::bias_mask_broadcast<decltype(t)>(cpu); });
}
TEST_CASE("OneFlow's forms: tril") {
  in_every_type([](auto t) { flow::tril<decltype(t)>(cpu); });
}
TEST_CASE("OneFlow's forms: bias, residual in place, affine") {
  // Rows that are kept: 64 KB of what they are computed in.
  in_every_type(
      [](auto t) { flow::skip_in_place<decltype(t)>(cpu, int64_t(65536 / sizeof(k::compute_t<decltype(t)>))); });
}
TEST_CASE("OneFlow's forms: group norm, channels first") {
  in_every_type([](auto t) { flow::group_norm_first<decltype(t)>(cpu); });
}
TEST_CASE("OneFlow's forms: group norm, channels last") {
  in_every_type([](auto t) { flow::group_norm_last<decltype(t)>(cpu); });
}
TEST_CASE("OneFlow's forms: a quantizing store") {
  in_every_type([](auto t) { flow::quantizing_store<decltype(t)>(cpu); });
}

namespace {

// Counts how often each element is loaded, and the packs of more than `most`.
struct CountingLoad {
  using LoadType = k::half;
  std::vector<std::atomic<int>>* loads;
  std::atomic<int>* wide;
  int64_t row_size;
  size_t most;
  template <int N>
  void load(k::half* dst, int row, int col) {
    if (size_t(N) > most) ++*wide;
    for (int i = 0; i < N; ++i) {
      ++(*loads)[size_t(row * row_size + col + i)];
      dst[i] = k::convert<k::half>(float((row + col + i) % 10));
    }
  }
};
struct LimitedLoad : CountingLoad {
  bool CanPackAs(size_t n) { return n <= most; }
};
struct LimitedByRowLoad : CountingLoad {
  template <int N>
  bool CanPackAs(int64_t cols) { return size_t(N) <= most && cols == row_size; }
};
struct HighRows {
  template <int N>
  void load(float* dst, int32_t, int64_t) const {
    for (int i = 0; i < N; ++i) dst[i] = 0;
  }
};

template <class Load>
void count(size_t widest, std::initializer_list<int64_t> all_cols) {
  Tally t;
  for (const int64_t cols : all_cols) {
    const int64_t rows = 5;
    const auto into = [&](const auto& out) {
      std::vector<std::atomic<int>> loads(static_cast<size_t>(rows * cols));
      std::atomic<int> wide{0};
      Load load;
      load.loads = &loads, load.wide = &wide, load.row_size = cols, load.most = widest;
      const k::Status status = k::cpu::softmax(cpu.cx, load, out, rows, cols);
      t.expect(status.ok(), "%s", status.reason());
      t.expect(wide == 0, "%d cols: %d packs of more than %zu", int(cols), wide.load(), widest);
      for (const auto& n : loads) t.expect(n == 1, "%d cols: an element is loaded %d times", int(cols), n.load());
    };
    Guarded<float> y(rows, cols, cols), scales(rows, cols, cols);
    Guarded<int8_t> codes(rows, cols, cols);
    into(k::store(y.data(), cols));
    into(k::quantize(codes.data(), cols, scales.data()));
    into(k::quantize(codes.data(), cols, scales.data(), cols, 16));
  }
  CHECK_TALLY(t);
}

}  // namespace

TEST_CASE(
    "OneFlow's forms: a load runs once in rows of up to 16384 columns, in packs as OneFlow's or as CanPackAs says") {
  count<CountingLoad>(2, {1, 2, 5, 48, 1000, 1001, 5120, 16384});
  count<LimitedLoad>(1, {1, 2, 48, 1000, 5120});
  count<LimitedLoad>(4, {1, 2, 48, 1000, 1001, 5120});
  count<LimitedByRowLoad>(1, {1, 2, 48, 1000, 5120});
  count<LimitedByRowLoad>(2, {1, 2, 48, 1000, 1001});
}

TEST_CASE("OneFlow's forms: more rows than a load's type can count are refused") {
  float y = 0;
  const k::Status status =
      k::cpu::softmax(cpu.cx, HighRows{}, k::DirectStore<float, float>(&y, 1), int64_t(1) << 31, 1);
  CHECK(status.code() == k::Code::unsupported);
  CHECK(std::string(status.reason()).find("rows of 32 bits") != std::string::npos);
}
