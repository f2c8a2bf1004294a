// Calls of matmul() drawn at random (support/drawn_products.cuh): weights of 8 and 4 bits.
#include "support/drawn_products.cuh"

using namespace test;

namespace {

using H = k::half;
using B = k::bfloat16;
using E = k::float8_e4m3;

}  // namespace

TEST_CASE("drawn: weights of int8") {
  drawn_products<H, PlainX<H, H>, Single<ScaledW<int8_t, H>>, Biased<H>>({"int8"});
}
TEST_CASE("drawn: weights of e4m3") {
  drawn_products<B, PlainX<B, B>, Single<ScaledW<E, float>>, Residual<B>>({"e4m3"});
}
TEST_CASE("drawn: weights of 4 bits, gathered and normalized inputs") {
  drawn_products<H, NormedX<GatheredX<H, H>, k::RmsNorm>, Single<FourW<H, false>>, Residual<H>>({"int4, rmsnorm"});
}
TEST_CASE("drawn: weights of 4 bits with zero points, gated") {
  drawn_products<B, PlainX<B, B>, Gates<FourW<float, true>>, Joined<B>>({"uint4, gated"});
}
TEST_CASE("drawn: float4_e2m1 with powers of two, stacked") {
  Operands stacked{"fp4, stacked"};
  stacked.groups = false, stacked.parts = 3;
  drawn_products<B, PlainX<B, B>, Stack<PowersW>, Distributed<B>>(stacked);
}
