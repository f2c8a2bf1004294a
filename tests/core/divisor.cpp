// Quotients by multiplication, at both ends of what they are for and around every multiple.
#include <kernels/core/divisor.h>

#include "support/random.h"
#include "support/tally.h"

TEST_CASE("a divisor's quotients") {
  test::Tally t;
  test::Random random(1);
  const uint32_t end = uint32_t(1) << 31;
  const auto check = [&](uint32_t d) {
    const kernels::detail::Divisor divisor(d);
    const auto expect = [&](uint32_t n) {
      t.expect(n >= end || divisor.quotient(n) == n / d, "%u / %u: got %u", n, d, divisor.quotient(n));
    };
    for (const uint32_t n : {0u, 1u, d - 1, d, d + 1, end - 1, end - 2, (end - 1) / d * d, (end - 1) / d * d - 1})
      expect(n);
    for (int i = 0; i < 50; ++i) {
      const uint32_t n = uint32_t(random.uniform(0, 1) * double(end)), multiple = n / d * d;
      expect(n), expect(multiple), expect(multiple - 1), expect(multiple + d - 1);
    }
  };
  for (uint32_t d = 1; d < 3000; ++d) check(d);
  for (int log2 = 12; log2 < 31; ++log2) {
    for (int i = -2; i <= 2; ++i) check((uint32_t(1) << log2) + uint32_t(i));
  }
  for (int i = 0; i < 2000; ++i) check(1 + uint32_t(random.uniform(0, 1) * double(end - 2)));
  check(end - 1);
  CHECK_TALLY(t);
  CHECK(kernels::detail::Divisor().quotient(end - 1) == 0);
}
