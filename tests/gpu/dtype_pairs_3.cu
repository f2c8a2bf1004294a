#include "support/pairs.cuh"

TEST_CASE("softmax: from e4m3") { test::softmax_pairs<k::float8_e4m3>(); }
TEST_CASE("softmax: from e5m2") { test::softmax_pairs<k::float8_e5m2>(); }
