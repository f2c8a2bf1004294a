// quantize() with scales that are given, behind any operation on the CPU and on the GPU: its codes are the results that
// the same call stores, over their scales.
#pragma once

#include <kernels/quantize.h>

#include <algorithm>
#include <cmath>

#include "guarded.h"
#include "tally.h"

namespace test {

namespace k = kernels;

// call(sink) makes rows x cols results, and returns its Status when it is done.
template <class Memory, class Call>
void check_given_scales(Tally& t, const char* what, int64_t rows, int64_t cols, const Call& call) {
  constexpr int kGroup = 8;
  const int64_t groups = (cols + kGroup - 1) / kGroup;
  Guarded<float, Memory> y(rows, cols, cols + 3);
  Guarded<int8_t, Memory> q(rows, cols, cols + 5);
  Guarded<float, Memory> scales(rows, groups, groups, 0, Poison::nan);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t g = 0; g < groups; ++g) scales.set(r, g, 0.01f * float(1 + (r * groups + g) % 5));
  }
  scales.upload();
  const float* const p = scales.data();
  const auto must = [&](const k::Status& status) { t.expect(status.ok(), "%s: %s", what, status.reason()); };
  must(call(k::store(y.data(), y.ld())));
  y.download();
  // scale_at(row, col): where the scale of a result stands in p.
  const auto check = [&](const char* kind, const auto& given, const auto& scale_at) {
    must(call(k::quantize(q.data(), q.ld(), given)));
    q.download();
    t.expect(q.intact(), "%s, %s: wrote outside its rows", what, kind);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t at = scale_at(r, c);
        const double value = double(y.get(r, c)) / double(scales.get(at / groups, at % groups));
        const double want = std::max(-128., std::min(127., value));
        t.expect(std::fabs(q.get(r, c) - want) <= 0.501, "%s, %s, row %d, column %d: code %d of %g", what, kind, int(r),
                 int(c), int(q.get(r, c)), value);
      }
    }
  };
  check("one scale", k::tensor_scale(p), [](int64_t, int64_t) { return 0; });
  check("scales of rows", k::row_scales(p), [](int64_t r, int64_t) { return r; });
  check("scales of groups", k::group_scales(p, groups, kGroup),
        [&](int64_t r, int64_t c) { return r * groups + c / kGroup; });
}

}  // namespace test
