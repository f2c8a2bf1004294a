// Where a sum has to be rounded before the next one, as 1.5 2^23 is added and taken off again. With -ffast-math as
// well, which allows to calculate (x + y) - y as x. Results are then less exact by some units of the last place, not
// wrong.
#include <kernels/core/math.h>

#include <cmath>

#include "support/catch.h"

namespace k = kernels;

namespace {

struct Worst {
  double error = 0, x = 0;
  void add(double at, double got, double want, double unit) {
    const double off = std::fabs(got - want) / unit;
    if (!(off <= error)) error = off, x = at;
  }
};

}  // namespace

TEST_CASE("exp of reordered sums") {
  Worst one, packs;
  for (int i = -7900; i <= 7900; ++i) {
    const float x = float(i) * 0.011f;
    one.add(x, k::exp(x), std::exp(double(x)), std::exp(double(x)));
    k::Pack<float, 16> pack;
    for (int j = 0; j < 16; ++j) pack[j] = x;
    packs.add(x, k::exp(pack)[9], std::exp(double(x)), std::exp(double(x)));
  }
  INFO("x = " << one.x << ", and in a pack " << packs.x);
  CHECK(one.error < 1e-5);
  CHECK(packs.error < 1e-5);
}

TEST_CASE("sine and cosine of reordered sums") {
  Worst sines, cosines;
  for (int i = -10000; i <= 10000; ++i) {
    const float x = float(i) * float(i) * float(i) * 1e-6f;
    float sine, cosine;
    k::sin_cos(x, sine, cosine);
    sines.add(x, sine, std::sin(double(x)), 1);
    cosines.add(x, cosine, std::cos(double(x)), 1);
  }
  INFO("x = " << sines.x << " and " << cosines.x);
  CHECK(sines.error < 1e-6);
  CHECK(cosines.error < 1e-6);
}
