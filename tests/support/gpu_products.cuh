// Products on the GPU, checked against the oracle of products.h.
#pragma once

#include "gpu.cuh"

#include <kernels/matmul.cuh>

#include "products.h"

namespace test {

using k::Path;

template <class T>
using Matrix = RandomMatrix<T, DeviceMemory>;

struct Sizes {
  int64_t m, n, k;
};

// Tensor cores add with an accumulator that is cut off, not rounded: up to two units for every 16 columns.
inline double units(Path path, int64_t cols) {
  return kSum + 4 + (path == Path::gemv || path == Path::simt ? 0.0 : double(cols) / 8);
}

inline std::string describe(const char* what, const Sizes& s, Path path) {
  std::ostringstream out;
  out << what << ", " << s.m << " x " << s.n << " x " << s.k << ", " << k::to_string(path);
  return out.str();
}

// Rows of value(row, column), normalized.
template <class Value>
std::vector<Row<>> rmsnorm_rows(const Sizes& s, double eps, const Value& value) {
  std::vector<Row<>> rows;
  for (int64_t m = 0; m < s.m; ++m) {
    Row<> row;
    for (int64_t i = 0; i < s.k; ++i) row.push_back(value(m, i));
    rmsnorm(row, eps);
    rows.push_back(row);
  }
  return rows;
}

// run(exec, policy) is a call with this shape whose result goes to y; want(m, n) what it should be, also where a
// workspace holds inputs that are rounded once.
template <class T, class Run, class Want>
void expect_always(const char* what, const Sizes& s, Path path, Device<T>& y, const Run& run, const Want& want) {
  INFO(describe(what, s, path));
  Stream stream;
  const auto before = y.bytes();
  const auto rows = all_rows(y.rows(), [&](int64_t m) {
    Row<> row;
    for (int64_t n = 0; n < y.cols(); ++n) row.push_back(want(m, n));
    return row;
  });
  const auto check = [&](const k::Exec& ex) {
    y.restore(before);
    const k::Status status = run(ex, k::MatmulPolicy{path});
    INFO(status.reason());
    REQUIRE(status.ok());
    stream.wait();
    CHECK(compare(y, rows) == "");
  };
  check(k::Exec(stream));
  if (s.m <= 2 || s.k == 0) return;
  Device<k::half> rounded(s.m, (s.k + 7) / 8 * 8, (s.k + 7) / 8 * 8);
  INFO("with a workspace");
  check(k::Exec(stream).workspace(rounded.data(), size_t(rounded.rows() * rounded.ld()) * sizeof(k::half)));
  rounded.download();
  CHECK(rounded.intact());
}

// The same, but for what a shortened test leaves out.
template <class T, class Run, class Want>
void expect(const char* what, const Sizes& s, Path path, Device<T>& y, const Run& run, const Want& want) {
  static Shortened shortened;
  if (!shortened.leaves_out()) expect_always(what, s, path, y, run, want);
}

// A tile of the gemm path, or, of 0, the one that the call chooses.
struct TileSize {
  int tokens, rows, at_once = tokens > 0 ? 1 : 0;
  k::MatmulPolicy in(k::MatmulPolicy policy) const {
    policy.tile_tokens = tokens, policy.tile_rows = rows, policy.tiles_at_once = at_once;
    return policy;
  }
  // Where blocks stay, only three of them, so that they have several tiles each.
  k::Exec on(const k::Exec& ex) const {
    if (at_once < 2) return ex;
    k::DeviceInfo device = ex.device();
    device.sm_count = 3;
    return k::Exec(ex.stream(), device).programmatic(ex.programmatic());
  }
  std::string name(const std::string& what) const {
    return tokens == 0 ? what
                       : what + ", tile of " + std::to_string(tokens) + " x " + std::to_string(rows) +
                             (at_once > 1 ? ", in turns" : "");
  }
  // Whether code for this GPU has it for a product that run(exec, policy) makes.
  template <class Run>
  bool is_there(const Run& run) const { return run(k::Exec(Stream()), in({Path::gemm})).ok(); }
};
const TileSize kAnyTile{0, 0};
const TileSize kTileSizes[] = {{64, 64},   {96, 64},   {128, 64},     {160, 64},    {64, 128}, {96, 128},
                               {128, 128}, {160, 128}, {192, 128},    {64, 256},    {96, 256}, {128, 256},
                               {160, 256}, {192, 256}, {128, 128, 2}, {192, 128, 2}};

// A store() behind weights in pairs (rope.h) that leaves the results in pairs.
template <class T, class W>
struct StoreOfPairs : k::DirectStore<T, T> {
  W w;
  StoreOfPairs(Device<T>& to, const W& weights) : k::DirectStore<T, T>(to.data(), to.ld()), w(weights) {}
  KERNELS_HD k::detail::ColumnPair pair_at(int64_t col) const {
    return {k::detail::origin_of(w, col), k::detail::origin_of(w, col + 1)};
  }
};

// A row of these.
template <class T>
Device<T>& filled(Device<T>& to, const std::vector<T>& values) {
  for (size_t i = 0; i < values.size(); ++i) to.set(0, int64_t(i), values[i]);
  to.upload();
  return to;
}

// As if the GPU had so few multiprocessors.
inline k::Exec with_multiprocessors(const k::Exec& ex, int count) {
  k::DeviceInfo device = ex.device();
  device.sm_count = count;
  return k::Exec(ex.stream(), device);
}

// Weights w, of which `rounded` says how far tensor cores round them. multiprocessors: as many, or those that there
// are.
template <class TX, class TY, class Weights>
void check(const char* what, const Sizes& s, Path path, const Weights& w, double rounded = 0, int64_t gap = 8,
           int64_t shift = 0, int multiprocessors = 0) {
  static Shortened shortened;
  if (shortened.leaves_out()) return;
  const Matrix<TX> x(21, s.m, s.k, s.k + gap, shift, 1);
  Device<TY> y(s.m, s.n, s.n + 3, 1);
  const bool tensor = path == Path::gemm || path == Path::skinny;
  expect_always(
      what, s, path, y,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
        return k::matmul(multiprocessors > 0 ? with_multiprocessors(ex, multiprocessors) : ex,
                         k::load(static_cast<const TX*>(x.data()), x.ld()), w.source(), k::store(y.data(), y.ld()),
                         {s.m, s.n, s.k}, policy);
      },
      [&](int64_t m, int64_t n) {
        return product(
            m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(path, s.k),
            tensor ? rounded : 0);
      });
}

}  // namespace test
