// Random calls of matmul() (support/random_products.cuh): inputs and weights that are both codes of 8 bits,
// with maps, or of float and int8.
#include "support/random_products.cuh"

using namespace test;

namespace {

using H = k::half;
using B = k::bfloat16;
using E = k::float8_e4m3;

Operands eight_bit(const char* name) {
  Operands operands{name};
  operands.eight_bit = true;
  return operands;
}

}  // namespace

TEST_CASE("random calls: inputs and weights of e4m3") {
  random_products<E, CodesX<E>, Single<ScaledW<E, float>>, Biased<B>>(eight_bit("e4m3 x e4m3"));
}
TEST_CASE("random calls: inputs and weights of int8, with scales behind the product") {
  random_products<int8_t, PlainX<int8_t, H>, Single<PlainW<int8_t>>, ScaledBehind<H>>(eight_bit("int8 x int8"));
}
TEST_CASE("random calls: inputs and weights with maps") {
  random_products<H, MappedX<H>, Single<MappedW<H>>, StoreOnly<H>>({"maps"});
}
TEST_CASE("random calls: inputs of float, weights of int8") {
  random_products<H, PlainX<float, H>, Single<ScaledW<int8_t, float>>, StoreOnly<float>>({"float x int8"});
}
