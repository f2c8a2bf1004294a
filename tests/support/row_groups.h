// What the tests of row operations behind which groups of columns are quantized share, on the CPU and on the GPU. A
// Door says how a call is made: run(options, in, out, rows, cols, way) returns a Status when it is done, for each way
// of ways(cols, group).
#pragma once

#include <kernels/quantize.h>

#include <algorithm>
#include <vector>

#include "guarded.h"
#include "oracle.h"
#include "random_matrix.h"
#include "tally.h"

namespace test {

namespace k = kernels;

inline void expect_row(const k::RmsNorm&, Row<>& row) { rmsnorm(row, 1e-5); }
inline void expect_row(const k::LayerNorm&, Row<>& row) { layernorm(row, 1e-5); }
inline void expect_row(const k::Softmax&, Row<>& row) { softmax(row); }

// Scales of groups of `row`, and its codes, which take its place.
template <class T>
Row<> quantize_groups(Row<>& row, int64_t group) {
  Row<> scales;
  for (size_t begin = 0; begin < row.size(); begin += size_t(group)) {
    const size_t end = std::min(row.size(), begin + size_t(group));
    Row<> part(row.begin() + int64_t(begin), row.begin() + int64_t(end));
    scales.push_back(quantize<T>(part));
    std::copy(part.begin(), part.end(), row.begin() + int64_t(begin));
  }
  return scales;
}

// Rows for all that can happen to one: zeros, a NaN, an infinity, numbers as large as they get, an outlier.
template <class Memory>
void spoil_rows(RandomMatrix<k::half, Memory>& x) {
  const int64_t cols = x.cols();
  for (int64_t c = 0; c < cols; ++c) {
    x.set(1, c, make<k::half>(0));
    x.set(4, c, make<k::half>(c % 3 == 0 ? 60000 : -50000));
  }
  x.set(2, cols / 2, make<k::half>(std::nan("")));
  x.set(3, cols / 3, make<k::half>(INFINITY));
  x.set(5, cols - 1, make<k::half>(5000));
  x.upload();
}

// x + residual, kept in place of the residual; the operation; weights; a copy; codes. What is kept and copied is
// written once, and read again as it was rounded.
template <class T, class Kept, class Options, class Memory, class Door, class Way>
void check_quantized_by_group(Tally& t, const Door& door, const Way& way, int number, int64_t rows, int64_t cols,
                              int64_t group, int64_t gap) {
  const int64_t groups = (cols + group - 1) / group;
  RandomMatrix<k::half, Memory> x(1, rows, cols, cols + gap, gap);
  spoil_rows(x);
  const RandomMatrix<float, Memory> gamma(2, 1, cols, cols);
  RandomMatrix<Kept, Memory> kept(3, rows, cols, cols + 2 * gap);
  std::vector<Row<>> sums;
  for (int64_t r = 0; r < rows; ++r) {
    sums.emplace_back();
    for (int64_t c = 0; c < cols; ++c) sums.back().push_back(Real<>(x.value(r, c)) + Real<>(kept.value(r, c)));
  }
  Guarded<T, Memory> q(rows, cols, cols + gap);
  Guarded<float, Memory> scales(rows, groups, groups + gap);
  Guarded<k::half, Memory> copy(rows, cols, cols);
  const auto in = k::load(static_cast<const k::half*>(x.data()), x.ld()) |
                  k::add(k::load(static_cast<const Kept*>(kept.data()), kept.ld())) | k::tee(kept.data(), kept.ld());
  const auto out = k::mul(static_cast<const float*>(gamma.data())) | k::tee(copy.data(), copy.ld()) |
                   k::quantize(q.data(), q.ld(), scales.data(), scales.ld(), int(group));
  const k::Status status = door.run(Options{}, in, out, rows, cols, way);
  const auto where = [&](const char* what) {
    return std::string(what) + ", " + std::to_string(cols) + " columns in groups of " + std::to_string(group) +
           ", way " + std::to_string(number) + ": ";
  };
  t.expect(status.ok(), "%s%s", where("call").c_str(), status.reason());
  kept.download();
  q.download();
  scales.download();
  copy.download();
  t.expect(kept.intact() && q.intact() && scales.intact() && copy.intact(), "%s", where("wrote outside").c_str());
  for (int64_t r = 0; r < rows; ++r) {
    const auto expect = [&](const char* what, const Row<>& want, const auto& got) {
      const std::string problem = mismatch(r, want, got);
      t.expect(problem.empty(), "%s%s", where(what).c_str(), problem.c_str());
    };
    Row<> row = sums[size_t(r)];
    expect("tee of the sum", row, [&](int64_t c) { return kept.get(r, c); });
    for (Real<>& v : row) v = rounded_to<Kept>(v);
    expect_row(Options{}, row);
    for (int64_t c = 0; c < cols; ++c) row[size_t(c)] = row[size_t(c)] * Real<>(gamma.value(0, c));
    expect("tee of the result", row, [&](int64_t c) { return copy.get(r, c); });
    for (Real<>& v : row) v = rounded_to<k::half>(v);
    const Row<> found = quantize_groups<T>(row, group);
    expect("scales", found, [&](int64_t g) { return scales.get(r, g); });
    expect("codes", row, [&](int64_t c) { return q.get(r, c); });
  }
}

// Groups that a warp's lanes hold, that they do not, and that end before the row does; rows of one tile and of several.
template <class Memory, class Door>
void check_quantized_by_groups(Tally& t, const Door& door) {
  using k::half;
  for (const int64_t cols : {16, 200, 256, 512, 1024, 4096, 5003, 20000}) {
    for (const int64_t group : {1, 5, 16, 64, 128, 1024}) {
      int number = 0;
      for (const auto& way : door.ways(cols, group)) {
        ++number;
        if (t.leaves_out()) continue;
        const int64_t rows = 7, gap = group == 64 ? 16 : group == 5 ? 1 : 0;
        check_quantized_by_group<int8_t, half, k::RmsNorm, Memory>(t, door, way, number, rows, cols, group, gap);
        if (group % 64 == 0) {
          check_quantized_by_group<k::float8_e4m3, half, k::LayerNorm, Memory>(t, door, way, number, rows, cols, group,
                                                                               gap);
          check_quantized_by_group<k::float8_e4m3, float, k::Softmax, Memory>(t, door, way, number, rows, cols, group,
                                                                              gap);
        }
      }
    }
  }
}

}  // namespace test
