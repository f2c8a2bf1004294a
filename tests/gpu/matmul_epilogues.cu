// What stands behind a product, on every path and for every kind of weights: bias, an activation and a residual in
// place, all together.
#include "support/gpu_products.cuh"

using namespace test;

namespace {

template <class T>
std::vector<Row<>> rows_of(const Device<T>& y) {
  std::vector<Row<>> rows;
  for (int64_t m = 0; m < y.rows(); ++m) rows.push_back(row_of(y, m));
  return rows;
}

// `rounded`: how far the path rounds the weights.
template <class TX, class TY, class Weights>
void epilogue(const char* what, const Sizes& s, Path path, const Weights& w, double rounded = 0) {
  const Matrix<TX> x(21, s.m, s.k, s.k, 0, 1);
  const Matrix<float> bias(22, 1, s.n, s.n);
  for (const int64_t gap : {8, 3}) {  // results in packs, and one by one
    Device<TY> y(s.m, s.n, s.n + gap, gap == 3 ? 1 : 0);
    randomize(y, 23);
    const std::vector<Row<>> before = rows_of(y);
    const auto in = k::load(static_cast<const TX*>(x.data()), s.k);
    expect(
        what, s, path, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul(
              ex, in, w.source(),
              k::bias(bias.data()) | k::gelu() | k::add(k::load(y.data(), y.ld())) | k::store(y.data(), y.ld()),
              {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          const Real<> sum = product(
              m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(path, s.k),
              rounded);
          return gelu(sum + Real<>(bias.value(0, n))) + before[size_t(m)][size_t(n)];
        });
  }
}

// A bias alone, which tiles read beside sums as they read residuals.
template <class Weights>
void biased_tiles(const char* what, const Sizes& s, const Weights& w, double rounded) {
  const Matrix<k::half> x(21, s.m, s.k, s.k, 0, 1);
  const Matrix<float> bias(22, 1, s.n, s.n);
  for (const int64_t gap : {8, 3}) {
    Device<float> y(s.m, s.n, s.n + gap, gap == 3 ? 1 : 0);
    expect(
        what, s, Path::gemm, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) {
          return k::matmul<Path::gemm>(ex, k::load(static_cast<const k::half*>(x.data()), s.k), w.source(),
                                       k::bias(bias.data()) | k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
        },
        [&](int64_t m, int64_t n) {
          return product(
                     m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w, units(Path::gemm, s.k),
                     rounded) +
                 Real<>(bias.value(0, n));
        });
  }
}

template <class T>
void plain_weights(const char* what, std::initializer_list<Path> paths) {
  const Sizes sizes[] = {{1, 67, 264}, {2, 136, 72}, {5, 72, 1032}, {19, 130, 136}, {70, 203, 1032}, {200, 264, 72}};
  for (const Sizes& s : sizes) {
    const Plain<T, DeviceMemory> w(s.n, s.k, 8, 0);
    for (const Path path : paths) epilogue<T, T>(what, s, path, w);
  }
}

// make(n, k): weights that tensor cores decode, of which `rounded` says how far those are rounded that stream.
template <class Make>
void coded_weights(const char* what, const Make& make, double rounded = 0) {
  for (const Sizes& s : {Sizes{1, 67, 512}, Sizes{3, 72, 1024}, Sizes{40, 130, 512}}) {
    const auto w = make(s.n, s.k);
    epilogue<k::half, k::half>(what, s, Path::skinny, w, s.m > 1 ? rounded : 0);
    epilogue<k::half, k::half>(what, s, Path::gemm, w, 0x1p-10);
  }
}

}  // namespace

TEST_CASE("epilogue: weights of half on every path") {
  plain_weights<k::half>("half", {Path::gemv, Path::skinny, Path::gemm});
}
TEST_CASE("epilogue: weights of bfloat16 on every path") {
  plain_weights<k::bfloat16>("bfloat16", {Path::gemv, Path::gemm});
}
TEST_CASE("epilogue: weights of float on every path") { plain_weights<float>("float", {Path::gemv, Path::simt}); }
TEST_CASE("epilogue: weights of 8 bits") {
  coded_weights("int8",
                [](int64_t n, int64_t c) { return Scaled<int8_t, k::half, DeviceMemory>(n, c, Grain::row, 1, 0, 0); });
  coded_weights(
      "e4m3",
      [](int64_t n, int64_t c) {
        return Scaled<k::float8_e4m3, float, DeviceMemory>(n, c, Grain::block, 128, 0, 0);
      },
      0x1p-10);
}
TEST_CASE("epilogue: weights of 4 bits, a scale for each row") {
  coded_weights("int4", [](int64_t n, int64_t c) { return FourBit<k::half, false, DeviceMemory>(n, c, c, 0, 0); });
}
TEST_CASE("epilogue: weights of 4 bits, a scale for 32") {
  coded_weights("uint4", [](int64_t n, int64_t c) { return FourBit<float, true, DeviceMemory>(n, c, 32, 0, 0); });
}

TEST_CASE("epilogue: a bias alone behind tiles") {
  for (const Sizes& s : {Sizes{40, 130, 512}, Sizes{200, 264, 64}, Sizes{33, 48, 1024}}) {
    biased_tiles("half", s, Plain<k::half, DeviceMemory>(s.n, s.k, 8, 0), 0);
    biased_tiles("half, anywhere", s, Plain<k::half, DeviceMemory>(s.n, s.k, 3, 1), 0);
    biased_tiles("int8", s, Scaled<int8_t, k::half, DeviceMemory>(s.n, s.k, Grain::row, 1, 0, 0), 0x1p-10);
  }
}

TEST_CASE("epilogue: groups and experts") {
  const int64_t groups = 3, m = 37, n = 40, cols = 72, tokens = groups * m;
  const Matrix<k::half> x(21, tokens, cols, cols, 0, 1);
  const Matrix<float> bias(22, 1, n, n);
  const Plain<k::half, DeviceMemory> w(groups * n, cols, 0, 0);
  std::vector<int32_t> chosen;
  for (int64_t t = 0; t < tokens; ++t) chosen.push_back(int32_t(mix(uint64_t(t)) % groups));
  const Numbers<int32_t, DeviceMemory> ids(chosen);
  const auto in = k::load(static_cast<const k::half*>(x.data()), cols);
  const auto check_with = [&](const char* what, Path path, const auto& call, const auto& group_of) {
    Device<k::half> y(tokens, n, n + 8);
    randomize(y, 23);
    const std::vector<Row<>> before = rows_of(y);
    const auto out = k::bias(bias.data()) | k::gelu() | k::add(k::load(y.data(), y.ld())) | k::store(y.data(), y.ld());
    expect(
        what, {tokens, n, cols}, path, y,
        [&](const k::Exec& ex, const k::MatmulPolicy& policy) { return call(ex, policy, out); },
        [&](int64_t r, int64_t i) {
          const Real<> sum = product(
              r, group_of(r) * n + i, cols, [&](int64_t a, int64_t c) { return Real<>(x.value(a, c)); }, w,
              units(path, cols));
          return gelu(sum + Real<>(bias.value(0, i))) + before[size_t(r)][size_t(i)];
        });
  };
  check_with(
      "groups", Path::gemm,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy, const auto& out) {
        return k::matmul(ex, in, w.source(), out, {m, n, cols}, k::Groups{groups}, policy);
      },
      [&](int64_t r) { return r / m; });
  check_with(
      "experts", Path::gemv,
      [&](const k::Exec& ex, const k::MatmulPolicy& policy, const auto& out) {
        return k::matmul(ex, in, k::experts(w.source(), static_cast<const int32_t*>(ids.data()), n, groups), out,
                         {tokens, n, cols}, policy);
      },
      [&](int64_t r) { return int64_t(chosen[size_t(r)]); });
}
