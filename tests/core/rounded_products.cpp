// Products that are rounded before the next sum, as the CPU and the GPU are to give the same numbers. A compiler that
// optimizes would fuse the two.
#include <kernels/core/sampling_numbers.h>
#include <kernels/quantize.h>

#include <cmath>

#include "support/tally.h"

namespace k = kernels;

TEST_CASE("a product is rounded before a sum") {
  test::Tally t;
  for (int i = 1; i < 1000; ++i) {
    const volatile float a = 1 + float(i) * 0x1p-20f, b = 3 - float(i % 977) * 0x1.23p-13f;
    const volatile float product = a * b;  // volatile: computed once for each use, as if nothing else needed it
    const float c = float(i % 31) * 0x1p-12f - product;
    const volatile float sum = product + c;
    t.expect(k::detail::add_once(k::times_once(a, b), c) == sum, "%.9g x %.9g + %.9g", a, b, c);
    t.expect(k::times_once(a, b) + c == sum, "%.9g x %.9g + %.9g, a plain sum", a, b, c);
    const volatile double d = 1 + i * 0x1p-50, e = 3 - i * 0x1.23p-40;
    const volatile double wide = d * e;
    const double f = (i % 31) * 0x1p-40 - wide;
    const volatile double wide_sum = wide + f;
    t.expect(k::times_once(d, e) + f == wide_sum, "%.17g x %.17g + %.17g", d, e, f);
  }
  CHECK_TALLY(t);
}

TEST_CASE("a value over its scale is rounded before the zero point is added") {
  test::Tally t;
  constexpr int N = 8;
  for (int i = 0; i < 60; ++i) {
    const float scale = 0.25f + 0.0131f * float(i);
    const int8_t zero = int8_t(37 * i % 200 - 100);
    int8_t q[N] = {};
    const auto out = k::quantize(q, N, k::tensor_scale(&scale).zeros(&zero));
    const volatile float reciprocal = 1.f / scale;
    for (int half = -120; half < 120; ++half) {
      // Numbers next to one that lies between two codes.
      k::Pack<float, N> x;
      x[0] = float((half + 0.5) / double(reciprocal)) * (1 - 4 * 0x1p-23f);
      for (int j = 1; j < N; ++j) x[j] = std::nextafter(x[j - 1], half < 0 ? -1e9f : 1e9f);
      out.store<N>(x, 0, 0);
      for (int j = 0; j < N; ++j) {
        const volatile float product = x[j] * reciprocal, sum = product + float(zero);
        const int want = k::convert<int8_t>(float(sum));
        t.expect(q[j] == want, "%.9g / %.9g + %d: code %d instead of %d", x[j], scale, zero, q[j], want);
      }
    }
  }
  CHECK_TALLY(t);
}
