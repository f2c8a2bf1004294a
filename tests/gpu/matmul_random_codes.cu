// Random calls of matmul() (support/random_products.cuh): weights of 8 and 4 bits.
#include "support/random_products.cuh"

using namespace test;

namespace {

using H = k::half;
using B = k::bfloat16;
using E = k::float8_e4m3;

}  // namespace

TEST_CASE("random calls: weights of int8") {
  random_products<H, PlainX<H, H>, Single<ScaledW<int8_t, H>>, Biased<H>>({"int8"});
}
TEST_CASE("random calls: weights of e4m3") {
  random_products<B, PlainX<B, B>, Single<ScaledW<E, float>>, Residual<B>>({"e4m3"});
}
TEST_CASE("random calls: weights of 4 bits, gathered and normalized inputs") {
  random_products<H, NormedX<GatheredX<H, H>, RmsNorm>, Single<FourW<H, false>>, Residual<H>>({"int4, rmsnorm"});
}
TEST_CASE("random calls: weights of 4 bits with zero points, gated") {
  random_products<B, PlainX<B, B>, Gates<FourW<float, true>>, Joined<B>>({"uint4, gated"});
}
TEST_CASE("random calls: float4_e2m1 with powers of two, stacked") {
  Operands stacked{"fp4, stacked"};
  stacked.groups = false, stacked.parts = 3;
  random_products<B, PlainX<B, B>, Stack<PowersW>, Distributed<B>>(stacked);
}
