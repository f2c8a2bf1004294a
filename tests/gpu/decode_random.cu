// Random calls of decode(): all that a caller may combine, in combination. support/random_calls.cuh says how one of
// them is made again.
#include "support/random_attention.cuh"

using namespace test;

namespace {

using k::bfloat16;
using k::float8_e4m3;
using k::float8_e5m2;
using k::half;

template <int kDim, ViewKind kView, class TQ, class TO, class Kv, class Score, unsigned kFlags = 0>
RandomFamily family(const char* name) {
  return test::family<kDim, kView, TQ, TO, Kv, Score, kFlags | kDecodes>(name);
}

std::vector<RandomFamily> families() {
  return {
      family<128, ViewKind::paged, half, float, KvTypes<half>, MapsInWindow>("half in pages"),
      family<0, ViewKind::dense, bfloat16, bfloat16, KvTypes<bfloat16>, k::Window, kLatents>("bfloat16"),
      family<64, ViewKind::ragged, half, half, KvTypes<half>, MapsAndBias, kAnyOrder>("half, ragged"),
      family<256, ViewKind::paged, float, half, KvTypes<bfloat16, half>, k::Window, kAnyOrder>("bfloat16 and half"),
      family<128, ViewKind::paged, bfloat16, bfloat16, KvTypes<int8_t, int8_t, float>, k::Window>("int8"),
      family<64, ViewKind::dense, half, half, KvTypes<k::Int4, k::Int4, half>, RangesInWindow>("int4"),
      family<128, ViewKind::ragged, half, float, KvTypes<float8_e4m3, float8_e5m2>, k::Window>("e4m3 and e5m2"),
      family<0, ViewKind::dense, float, float, KvTypes<float>, RangesInWindow>("float"),
      family<64, ViewKind::ragged, half, half, KvTypes<half, half, float>, MapsInWindow>("half with scales"),
      family<64, ViewKind::paged, float, float, KvTypes<bfloat16, k::Int4, k::Nothing, half>, k::Window>(
          "bfloat16 and int4"),
      family<64, ViewKind::dense, half, half, KvTypes<int8_t, half, float, k::Nothing>, k::NoMask>("int8 and half"),
      family<576, ViewKind::paged, bfloat16, bfloat16, KvTypes<bfloat16>, k::Window, kLatents>("latents"),
  };
}

}  // namespace

TEST_CASE("decode: random calls") { random_attention(families(), 600); }
