// Random calls of attention(), as in attention_random.cu: keys and values of 8 and 4 bits, and with scales.
#include "support/random_attention.cuh"

using namespace test;

namespace {

using k::bfloat16;
using k::float8_e4m3;
using k::float8_e5m2;
using k::half;

std::vector<RandomFamily> families() {
  return {
      family<256, ViewKind::dense, half, half, KvTypes<int8_t, int8_t, float>, MapsInWindow, kWorkspace>("int8"),
      family<128, ViewKind::paged, bfloat16, bfloat16, KvTypes<k::Int4, k::Int4, half>, RangesInWindow>("int4"),
      family<128, ViewKind::paged, float8_e4m3, half, KvTypes<float8_e4m3>, MapsInWindow, kWorkspace>("e4m3"),
      family<128, ViewKind::ragged, bfloat16, bfloat16, KvTypes<float8_e4m3, float8_e5m2, float, k::Nothing>, k::Window,
             kAnyOrder>("e4m3 and e5m2"),
      family<128, ViewKind::ragged, half, half, KvTypes<half, half, float>, MapsInWindow, kWorkspace>(
          "half with scales"),
      family<128, ViewKind::dense, bfloat16, float, KvTypes<bfloat16, int8_t, k::Nothing, half>, RangesInWindow>(
          "bfloat16 and int8"),
  };
}

}  // namespace

TEST_CASE("attention: random calls with codes and scales") { random_attention(families(), 400); }
