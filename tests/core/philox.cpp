// Philox against the answers that its authors publish with it (Random123, kat_vectors), and how even its bits are.
#include <kernels/core/philox.h>

#include <cmath>

#include "support/catch.h"
#include "support/tally.h"

namespace k = kernels;
using namespace test;

namespace {
bool is(const k::Pack<uint32_t, 4>& got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return got[0] == a && got[1] == b && got[2] == c && got[3] == d;
}
}  // namespace

TEST_CASE("Philox's published answers") {
  CHECK(is(k::philox(0, 0, 0), 0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u));
  CHECK(is(k::philox(~0ull, ~0ull, ~0ull), 0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu));
  CHECK(is(k::philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull), 0xd16cfe09u, 0x94fdccebu,
           0x5001e420u, 0x24126ea1u));
}

TEST_CASE("Philox's bits are even, also from one counter and from one seed to the next") {
  constexpr int draws = 200000;
  for (int counted = 0; counted < 3; ++counted) {
    int64_t ones[128] = {}, bins[256] = {};
    for (int i = 0; i < draws; ++i) {
      const auto four = k::philox(counted == 0 ? i : 1, counted == 1 ? i : 2, counted == 2 ? i : 3);
      for (int bit = 0; bit < 128; ++bit) ones[bit] += four[bit / 32] >> bit % 32 & 1u;
      ++bins[int(k::unit_interval(four[0]) * 256.f)];
    }
    Tally t;
    for (int bit = 0; bit < 128; ++bit)
      t.expect(std::fabs(double(ones[bit]) - draws / 2) < 5 * std::sqrt(draws / 4.0), "counter %d, bit %d: %g ones",
               counted, bit, double(ones[bit]));
    double squares = 0;
    for (const int64_t n : bins) squares += (double(n) - draws / 256.0) * (double(n) - draws / 256.0) / (draws / 256.0);
    t.expect(std::fabs(squares - 255) < 5 * std::sqrt(2 * 255.0),
             "counter %d: chi-square of %g with 255 degrees of freedom", counted, squares);
    CHECK_TALLY(t);
  }
}

TEST_CASE("the interval ends before 1") {
  CHECK(k::unit_interval(0) == 0.f);
  CHECK(k::unit_interval(0xffffffffu) < 1.f);
  CHECK(k::unit_interval(0x80000000u) == 0.5f);
}
