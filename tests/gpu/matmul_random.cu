// Random calls of matmul() (support/random_products.cuh): weights of 16 bits and of float.
#include "support/random_products.cuh"

using namespace test;

namespace {

using H = k::half;
using B = k::bfloat16;

}  // namespace

TEST_CASE("random calls: half, with a bias and an activation") {
  random_products<H, PlainX<H, H>, Single<PlainW<H>>, Biased<H>>({"half"});
}
TEST_CASE("random calls: bfloat16, gated") {
  random_products<B, PlainX<B, B>, Gates<PlainW<B>>, Joined<B>>({"bfloat16, gated"});
}
TEST_CASE("random calls: bfloat16, stacked, and results apart") {
  Operands stacked{"bfloat16, stacked"};
  stacked.groups = false, stacked.parts = 3;
  random_products<B, PlainX<B, B>, Stack<PlainW<B>>, Distributed<float>>(stacked);
}
TEST_CASE("random calls: bfloat16, gathered, added to a residual") {
  random_products<B, GatheredX<B, B>, Single<PlainW<B>>, Residual<B>>({"bfloat16, gathered"});
}
TEST_CASE("random calls: inputs of float, weights of half") {
  random_products<H, PlainX<float, H>, Single<PlainW<H>>, Residual<H>>({"float x half"});
}
TEST_CASE("random calls: float") {
  Operands floats{"float"};
  floats.floats = true;
  random_products<float, PlainX<float, float>, Single<PlainW<float>>, Residual<float>>(floats);
}
TEST_CASE("random calls: normalized inputs of float") {
  random_products<B, NormedX<PlainX<float, B>, RmsNorm>, Single<PlainW<B>>, Biased<B>>({"rmsnorm, bfloat16"});
}
TEST_CASE("random calls: normalized queries, keys and values, with rope") {
  Operands rope{"layernorm, rope"};
  rope.groups = false, rope.parts = 3, rope.rope = true;
  random_products<H, NormedX<PlainX<H, H>, LayerNorm>, RopeWeights<PlainW<H>>, RopeQkv<H>>(rope);
}
TEST_CASE("random calls: experts of each token") {
  Operands experts{"experts"};
  experts.groups = false, experts.by_token = true, experts.top_k = 2;
  random_products<H, RepeatedX<H, H>, OfExperts<PlainW<H>>, Residual<float>>(experts);
}
