// Results of products that leave by TMA: every tile, with blocks that have one tile and several, against the oracle,
// and the same bits as where they leave in packs.
#include "support/gpu_products.cuh"

using namespace test;

namespace {

k::Exec with_blocks(const k::Exec& ex, int blocks) {
  k::DeviceInfo device = ex.device();
  device.sm_count = blocks;
  return k::Exec(ex.stream(), device);
}

// Tiles of every_tile(): those that only code with TMA has, and those whose results left by it.
int tma_tiles = 0, left_by_tma = 0;

// call(exec, to, policy, plan): the product with results at a place for packs of 8, or for single ones. Without a plan,
// it is made.
template <class T, class Call, class Want>
void every_tile(const char* what, const Sizes& s, const Call& call, const Want& want, bool can_leave = true) {
  static Shortened shortened;
  if (shortened.leaves_out()) return;
  const auto rows = all_rows(s.m, [&](int64_t m) {
    Row<> row;
    for (int64_t n = 0; n < s.n; ++n) row.push_back(want(m, n));
    return row;
  });
  for (const TileSize& tile : kTileSizes) {
    const k::MatmulPolicy policy = tile.in({Path::gemm});
    const Stream stream;
    Device<T> by_tma(s.m, s.n, (s.n + 15) / 8 * 8), in_packs(s.m, s.n, s.n + 3, 1);
    const auto before = by_tma.bytes(), before_packs = in_packs.bytes();
    k::MatmulPlan plan, other;
    if (!call(k::Exec(stream), by_tma, policy, &plan).ok()) continue;  // a tile that this product does not have
    REQUIRE(call(k::Exec(stream), in_packs, policy, &other).ok());
    // Without wgmma, or if blocks share K, results leave in packs.
    CHECK((!plan.results_by_tma || can_leave));
    CHECK(!other.results_by_tma);
    tma_tiles += tile.tokens == 192 || plan.in_eight, left_by_tma += plan.results_by_tma;
    std::vector<float> first;
    for (const int blocks : {k::Exec(stream).device().sm_count, 1, 3}) {
      for (Device<T>* y : {&by_tma, &in_packs}) {
        INFO(describe(tile.name(what).c_str(), s, Path::gemm)
             << ", " << blocks << " blocks, " << (y == &by_tma ? "aligned" : "misaligned"));
        y->restore(y == &by_tma ? before : before_packs);
        const k::Exec ex = with_blocks(k::Exec(stream), blocks);
        REQUIRE(call(ex, *y, policy, nullptr).ok());
        stream.wait();
        CHECK(compare(*y, rows) == "");
        k::MatmulPlan mine;
        REQUIRE(call(ex, *y, policy, &mine).ok());
        if (mine.splits > 1) continue;  // adds in another order
        std::vector<float> values;
        for (int64_t m = 0; m < s.m; ++m) {
          for (int64_t n = 0; n < s.n; ++n) values.push_back(float(y->get(m, n)));
        }
        if (first.empty()) first = values;
        CHECK((values == first));
      }
    }
  }
}

template <class X, class W, class Out>
k::Status call_of(const k::Exec& ex, const X& x, const W& w, const Out& out, const Sizes& s,
                  const k::MatmulPolicy& policy, k::MatmulPlan* plan, const k::Groups& groups = {}) {
  return plan == nullptr ? k::matmul<Path::gemm>(ex, x, w, out, {s.m, s.n, s.k}, groups, policy)
                         : k::matmul_plan(ex, x, w, out, {s.m, s.n, s.k}, groups, policy, *plan);
}

constexpr Sizes kSizes[] = {{300, 600, 200}, {129, 776, 64},  {40, 264, 1096},
                            {577, 72, 136},  {200, 1025, 72}, {1, 8, 8}};

template <class T>
Real<> dot(const Matrix<T>& x, const Plain<T, DeviceMemory>& w, const Sizes& s, int64_t m, int64_t n) {
  return product(
      m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k));
}

template <class T>
void plain() {
  tma_tiles = left_by_tma = 0;
  for (const Sizes& s : kSizes) {
    const Matrix<T> x(21, s.m, s.k, s.k, 0, 1);
    const Plain<T, DeviceMemory> w(s.n, s.k, 8, 0);
    const Matrix<float> bias(22, 1, s.n, s.n);
    const auto in = k::load(static_cast<const T*>(x.data()), s.k);
    every_tile<T>(
        "plain", s,
        [&](const k::Exec& ex, Device<T>& y, const k::MatmulPolicy& policy, k::MatmulPlan* plan) {
          return call_of(ex, in, w.source(), k::store(y.data(), y.ld()), s, policy, plan);
        },
        [&](int64_t m, int64_t n) { return dot(x, w, s, m, n); });
    every_tile<T>(
        "bias and activation", s,
        [&](const k::Exec& ex, Device<T>& y, const k::MatmulPolicy& policy, k::MatmulPlan* plan) {
          return call_of(ex, in, w.source(), k::bias(bias.data()) | k::gelu() | k::store(y.data(), y.ld()), s, policy,
                         plan);
        },
        [&](int64_t m, int64_t n) { return gelu(dot(x, w, s, m, n) + Real<>(bias.value(0, n))); });
  }
  CHECK((left_by_tma > 0) == (tma_tiles > 0));
}

}  // namespace

TEST_CASE("results of products: half") { plain<k::half>(); }
TEST_CASE("results of products: bfloat16") { plain<k::bfloat16>(); }

TEST_CASE("results of products: gates") {
  for (const Sizes& s : kSizes) {
    const Matrix<k::half> x(21, s.m, s.k, s.k, 0, 1);
    const Plain<k::half, DeviceMemory> gate(s.n, s.k, 8, 0), up(s.n, s.k, 16, 0);
    const Matrix<float> bias(22, 1, s.n, s.n);
    every_tile<k::half>(
        "gates", s,
        [&](const k::Exec& ex, Device<k::half>& y, const k::MatmulPolicy& policy, k::MatmulPlan* plan) {
          return call_of(ex, k::load(static_cast<const k::half*>(x.data()), s.k), k::gated(gate.source(), up.source()),
                         k::reglu() | k::bias(bias.data()) | k::scale(0.5) | k::store(y.data(), y.ld()), s, policy,
                         plan);
        },
        [&](int64_t m, int64_t n) {
          const Real<> g = dot(x, gate, s, m, n), u = dot(x, up, s, m, n);
          return (relu(g) * u + Real<>(bias.value(0, n))) * Real<>(0.5);
        });
  }
}

TEST_CASE("results of products: batches") {
  // Boxes would write the next group's tokens, unless tiles end where groups do.
  for (const int64_t m : {384, 100}) {
    const int64_t batch = 3, n = 328, cols = 72;
    const Matrix<k::half> x(1, batch * m, cols, cols, 0, 1);
    const Plain<k::half, DeviceMemory> w(batch * n, cols, 0, 0);
    every_tile<k::half>(
        "batch", {batch * m, n, cols},
        [&](const k::Exec& ex, Device<k::half>& y, const k::MatmulPolicy& policy, k::MatmulPlan* plan) {
          return call_of(ex, k::load(static_cast<const k::half*>(x.data()), cols), w.source(),
                         k::store(y.data(), y.ld()), {m, n, cols}, policy, plan, k::Groups{batch});
        },
        [&](int64_t r, int64_t c) {
          return product(
              r, c + r / m * n, cols, [&](int64_t row, int64_t i) { return Real<>(x.value(row, i)); }, w,
              units(Path::gemm, cols));
        },
        m == 384);
  }
}

namespace {

constexpr Sizes kSizes8Bit[] = {{300, 600, 208}, {129, 776, 64}, {577, 72, 1104}};

template <class W>
Real<> dot_8bit(const W& x, const W& w, const Sizes& s, int64_t m, int64_t n, double cut = 0) {
  return product(
      m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x(r, i)); }, w, units(Path::gemm, s.k), cut);
}
// make(rows, columns): inputs and weights of 8 bits. cut: how far tensor cores cut off their sums of a step.
template <class Make>
void eight_bit(const char* what, double cut, const Make& make) {
  for (const Sizes& s : kSizes8Bit) {
    const auto x = make(s.m, s.k), w = make(s.n, s.k);
    every_tile<k::half>(
        what, s,
        [&](const k::Exec& ex, Device<k::half>& y, const k::MatmulPolicy& policy, k::MatmulPlan* plan) {
          return call_of(ex, x.source(), w.source(), k::store(y.data(), y.ld()), s, policy, plan);
        },
        [&](int64_t m, int64_t n) { return dot_8bit(x, w, s, m, n, cut); });
  }
}

}  // namespace

TEST_CASE("results of products: 8 bits") {
  tma_tiles = left_by_tma = 0;
  eight_bit("e4m3", 0x1p-9, [](int64_t n, int64_t c) { return Plain<k::float8_e4m3, DeviceMemory>(n, c, 16, 0); });
  eight_bit("int8 by row", 0,
            [](int64_t n, int64_t c) { return Scaled<int8_t, float, DeviceMemory>(n, c, Grain::row, 1, 16, 0); });
  CHECK((left_by_tma > 0) == (tma_tiles > 0));
}

TEST_CASE("results of products: gates of 8 bits") {
  for (const Sizes& s : kSizes8Bit) {
    const Scaled<int8_t, float, DeviceMemory> x(s.m, s.k, Grain::row, 1, 16, 0), gate(s.n, s.k, Grain::row, 1, 16, 0),
        up(s.n, s.k, Grain::row, 1, 32, 0);
    every_tile<k::half>(
        "gates of int8", s,
        [&](const k::Exec& ex, Device<k::half>& y, const k::MatmulPolicy& policy, k::MatmulPlan* plan) {
          return call_of(ex, x.source(), k::gated(gate.source(), up.source()),
                         k::reglu() | k::scale(0.01) | k::store(y.data(), y.ld()), s, policy, plan);
        },
        [&](int64_t m, int64_t n) {
          return relu(dot_8bit(x, gate, s, m, n)) * dot_8bit(x, up, s, m, n) * Real<>(0.01);
        });
  }
}

TEST_CASE("results of products: behind maps, and to other sinks, they leave in packs") {
  const Sizes s{130, 264, 72};
  const Matrix<k::half> x(21, s.m, s.k, s.k, 0, 1);
  const Plain<k::half, DeviceMemory> w(s.n, s.k, 8, 0);
  const auto in = k::load(static_cast<const k::half*>(x.data()), s.k);
  Device<k::half> y(s.m, s.n, s.n), other(s.m, s.n, s.n);
  Device<float> wide(s.m, s.n, s.n);
  const auto leaves = [&](const auto& out) {
    k::MatmulPlan plan;
    REQUIRE(call_of(k::Exec(Stream()), in, w.source(), out, s, {Path::gemm}, &plan).ok());
    return plan.results_by_tma;
  };
  const auto to = k::store(y.data(), y.ld());
  CHECK(!leaves(k::add(k::load(static_cast<const k::half*>(other.data()), s.n)) | to));
  CHECK(!leaves(k::tee(other.data(), s.n) | to));
  CHECK(!leaves(k::causal(s.m, s.n) | to));
  CHECK(!leaves(k::gelu() | to));
  CHECK(!leaves(k::store(wide.data(), s.n)));
}
