#include "support/pairs.cuh"

TEST_CASE("softmax: from float") { test::softmax_pairs<float>(); }
TEST_CASE("softmax: from double") { test::softmax_pairs<double>(); }
