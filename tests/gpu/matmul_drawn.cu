// Calls of matmul() drawn at random (support/drawn_products.cuh): weights of 16 bits and of float.
#include "support/drawn_products.cuh"

using namespace test;

namespace {

using H = k::half;
using B = k::bfloat16;

}  // namespace

TEST_CASE("drawn: half, with a bias and an activation") {
  drawn_products<H, PlainX<H, H>, Single<PlainW<H>>, Biased<H>>({"half"});
}
TEST_CASE("drawn: bfloat16, gated") {
  drawn_products<B, PlainX<B, B>, Gates<PlainW<B>>, Joined<B>>({"bfloat16, gated"});
}
TEST_CASE("drawn: bfloat16, stacked, and results apart") {
  Operands stacked{"bfloat16, stacked"};
  stacked.groups = false, stacked.parts = 3;
  drawn_products<B, PlainX<B, B>, Stack<PlainW<B>>, Distributed<float>>(stacked);
}
TEST_CASE("drawn: bfloat16, gathered, added to a residual") {
  drawn_products<B, GatheredX<B, B>, Single<PlainW<B>>, Residual<B>>({"bfloat16, gathered"});
}
TEST_CASE("drawn: inputs of float, weights of half") {
  drawn_products<H, PlainX<float, H>, Single<PlainW<H>>, Residual<H>>({"float x half"});
}
TEST_CASE("drawn: float") {
  Operands floats{"float"};
  floats.floats = true;
  drawn_products<float, PlainX<float, float>, Single<PlainW<float>>, Residual<float>>(floats);
}
TEST_CASE("drawn: normalized inputs of float") {
  drawn_products<B, NormedX<PlainX<float, B>, k::RmsNorm>, Single<PlainW<B>>, Biased<B>>({"rmsnorm, bfloat16"});
}
TEST_CASE("drawn: normalized queries, keys and values, turned") {
  Operands turned{"layernorm, turned"};
  turned.groups = false, turned.parts = 3, turned.turned = true;
  drawn_products<H, NormedX<PlainX<H, H>, k::LayerNorm>, Heads<PlainW<H>>, Turned<H>>(turned);
}
TEST_CASE("drawn: experts of each token") {
  Operands experts{"experts"};
  experts.groups = false, experts.by_token = true, experts.top_k = 2;
  drawn_products<H, RepeatedX<H, H>, OfExperts<PlainW<H>>, Residual<float>>(experts);
}
