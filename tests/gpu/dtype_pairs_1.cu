#include "support/pairs.cuh"

TEST_CASE("softmax: from half") { test::softmax_pairs<k::half>(); }
TEST_CASE("softmax: from bfloat16") { test::softmax_pairs<k::bfloat16>(); }
