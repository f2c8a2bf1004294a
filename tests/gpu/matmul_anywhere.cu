// Products of 16-bit operands of which one or both do not lie at multiples of 16 bytes: alone, with gates, stacked,
// gathered (in every tile, and then anywhere), and in groups.
#include "support/gpu_products.cuh"

using namespace test;

namespace {

using T = k::bfloat16;

// Rows of a matrix begin at multiples of `unit` elements and, every other one, of no more.
struct Places {
  int64_t x, w;
};
const Places kPlaces[] = {{8, 4}, {4, 8}, {8, 1}, {1, 8}, {2, 4}};
int64_t ld_of(int64_t cols, int64_t unit) {
  const int64_t units = (cols + unit - 1) / unit;
  return unit * (unit < 8 && units % 2 == 0 ? units + 1 : units);
}
Matrix<T> inputs(int64_t rows, int64_t cols, int64_t unit) {
  return Matrix<T>(1, rows, cols, ld_of(cols, unit), unit % 8, 1);
}
Plain<T, DeviceMemory> weights(int64_t rows, int64_t cols, int64_t unit) {
  return Plain<T, DeviceMemory>(rows, cols, ld_of(cols, unit) - cols, unit % 8);
}
auto source(const Matrix<T>& x) { return k::load(static_cast<const T*>(x.data()), x.ld()); }

// The paths for so many tokens.
std::vector<Path> paths(int64_t m) {
  if (m > 5) return {Path::automatic, Path::gemm};
  return {Path::automatic, Path::gemv, Path::gemm};
}
std::string name_of(const char* what, const Places& places) {
  return std::string(what) + ", inputs at multiples of " + std::to_string(places.x) + ", weights of " +
         std::to_string(places.w);
}

}  // namespace

TEST_CASE("anywhere: products") {
  for (const Places& places : kPlaces) {
    for (const Sizes s :
         {Sizes{1, 67, 500}, Sizes{2, 67, 2056}, Sizes{3, 67, 264}, Sizes{40, 72, 500}, Sizes{130, 64, 264}}) {
      const Matrix<T> x = inputs(s.m, s.k, places.x);
      const auto w = weights(s.n, s.k, places.w);
      for (const Path path : paths(s.m)) {
        Device<T> y(s.m, s.n, s.n + 3, 1);
        expect(
            name_of("plain", places).c_str(), s, path, y,
            [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
              return k::matmul(ex, source(x), w.source(), k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
            },
            [&](int64_t m, int64_t n) {
              return product(
                  m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(path, s.k));
            });
      }
    }
  }
}

// Matrices of a gate that do not lie alike.
TEST_CASE("anywhere: gates") {
  for (const Places& places : kPlaces) {
    for (const Sizes s : {Sizes{1, 40, 500}, Sizes{3, 48, 264}, Sizes{40, 72, 264}}) {
      const auto x = inputs(s.m, s.k, places.x);
      const auto gate = weights(s.n, s.k, places.w), up = weights(s.n, s.k, 8);
      const auto value = [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); };
      for (const Path path : paths(s.m)) {
        Device<float> y(s.m, s.n, s.n + 1);
        expect(
            name_of("gated", places).c_str(), s, path, y,
            [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
              return k::matmul(ex, source(x), k::gated(gate.source(), up.source()),
                               k::swiglu() | k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
            },
            [&](int64_t m, int64_t n) {
              const double u = units(Path::gemm, s.k);
              return silu(product(m, n, s.k, value, gate, u)) * product(m, n, s.k, value, up, u);
            });
      }
    }
  }
}

TEST_CASE("anywhere: stacked weights") {
  const int64_t first = 40, second = 24, cols = 264;
  for (const Places& places : kPlaces) {
    for (const int64_t m : {1, 3, 40}) {
      const auto x = inputs(m, cols, places.x);
      const auto a = weights(first, cols, places.w), b = weights(second, cols, 8);
      Device<float> y(m, first + second, first + second);
      expect(
          name_of("stacked", places).c_str(), {m, first + second, cols}, Path::automatic, y,
          [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
            return k::matmul(ex, source(x), k::stacked(a.source(), first, b.source(), second),
                             k::store(y.data(), y.ld()), {m, first + second, cols}, policy);
          },
          [&](int64_t r, int64_t i) {
            const auto value = [&](int64_t q, int64_t c) { return Real<>(x.value(q, c)); };
            const double u = units(Path::gemm, cols);
            return i < first ? product(r, i, cols, value, a, u) : product(r, i - first, cols, value, b, u);
          });
    }
  }
}

// Tokens in an order, those of each group side by side.
TEST_CASE("anywhere: gathered inputs, and groups") {
  const int64_t tokens = 70, n = 40;
  const std::vector<int32_t> offsets{0, 5, 5, 69, 140};
  const int64_t groups = int64_t(offsets.size()) - 1, rows = offsets.back();
  Device<int32_t> ends(1, groups + 1, groups + 1), order(1, rows, rows);
  filled(ends, offsets);
  std::vector<int32_t> slots;
  for (int64_t r = 0; r < rows; ++r) slots.push_back(int32_t(r * 37 % rows));
  filled(order, slots);
  const auto gathered = [&](const Places& places, int64_t cols, const TileSize& tile) {
    const auto x = inputs(tokens, cols, places.x);
    const auto w = weights(groups * n, cols, places.w);
    Device<float> y(rows, n, n);
    const auto run = [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
      return k::matmul(ex, k::gathered(source(x), static_cast<const int32_t*>(order.data()), 2), w.source(),
                       k::store(y.data(), n), {rows, n, cols}, k::Groups{groups, ends.data()}, tile.in(policy));
    };
    if (tile.tokens != 0 && !tile.is_there(run)) return;
    expect(
        tile.name(name_of("gathered", places)).c_str(), {rows, n, cols}, Path::gemm, y, run,
        [&](int64_t m, int64_t i) {
          int64_t g = 0;
          while (m >= offsets[size_t(g + 1)]) ++g;
          return product(
              m, g * n + i, cols, [&](int64_t r, int64_t c) { return Real<>(x.value(slots[size_t(r)] / 2, c)); }, w,
              units(Path::gemm, cols));
        });
  };
  for (const TileSize& tile : kTileSizes) gathered({8, 8}, 1096, tile);
  for (const Places& places : kPlaces) {
    const int64_t cols = 72, batch = 3, m = 23;
    gathered(places, cols, kAnyTile);
    const auto each = inputs(batch * m, cols, places.x);
    const auto of_each = weights(batch * n, cols, places.w);
    Device<float> z(batch * m, n, n);
    expect(
        name_of("a batch", places).c_str(), {m, n, cols}, Path::gemm, z,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(ex, source(each), of_each.source(), k::store(z.data(), n), {m, n, cols}, k::Groups{batch},
                           policy);
        },
        [&](int64_t r, int64_t i) {
          return product(
              r, r / m * n + i, cols, [&](int64_t a, int64_t c) { return Real<>(each.value(a, c)); }, of_each,
              units(Path::gemm, cols));
        });
  }
}
