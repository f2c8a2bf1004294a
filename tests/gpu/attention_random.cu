// Random calls of attention(): all that a caller may combine, in combination. support/random_calls.cuh says how one of
// them is made again; attention_random_codes.cu has keys and values of 8 and 4 bits.
#include "support/random_attention.cuh"

using namespace test;

namespace {

using k::bfloat16;
using k::half;

// Layouts, scores and sizes of heads, each with several of the others.
std::vector<RandomFamily> families() {
  return {
      family<256, ViewKind::paged, half, half, KvTypes<half>, MapsInWindow>("half in pages"),
      family<0, ViewKind::dense, bfloat16, bfloat16, KvTypes<bfloat16>, k::Window, kLatents | kWorkspace>("bfloat16"),
      family<128, ViewKind::ragged, half, half, KvTypes<half>, MapsAndBias, kAnyOrder | kWorkspace>("half, ragged"),
      family<128, ViewKind::dense, float, half, KvTypes<half, bfloat16>, RangesInWindow>("half and bfloat16"),
      family<64, ViewKind::paged, bfloat16, float, KvTypes<bfloat16>, RangesInWindow, kAnyOrder | kWorkspace>(
          "bfloat16 in pages"),
      family<128, ViewKind::dense, half, half, KvTypes<half>, k::NoMask>("half without a mask"),
      family<0, ViewKind::dense, float, float, KvTypes<float>, RangesInWindow, kWorkspace>("float"),
      family<0, ViewKind::paged, half, half, KvTypes<half, float>, MapsAndBias, kAnyOrder>("half and float"),
      family<576, ViewKind::paged, bfloat16, float, KvTypes<bfloat16>, MapsInWindow, kLatents | kWorkspace>("latents"),
  };
}

}  // namespace

TEST_CASE("attention: random calls") { random_attention(families(), 600); }
