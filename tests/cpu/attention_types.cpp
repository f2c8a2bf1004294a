// Attention on the CPU: keys and values of every type, plain and quantized.
#include "support/cpu_attention.h"

using namespace test;

namespace {

template <class EK, class EV, class SK = k::Nothing, class SV = k::Nothing>
void types(const char* what) {
  Tally t;
  std::vector<AttentionCase> cases = few_and_many();
  cases.push_back({{1, 1}, {170, 40}, 4, 2, 200});  // columns that are decoded in stretches of any length, and others
  for (const AttentionCase& c : cases) {
    for (const ScaleOf grain : {ScaleOf::tensor, ScaleOf::head, ScaleOf::token}) {
      const Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 16);
      const KvSide<EK, SK> key(1, where, c.dim, grain);
      const KvSide<EV, SV> value(2, where, c.dim, grain);
      check_kv(t, what, c,
               k::paged_kv(key.tensor(), value.tensor(), k::pages(where.table.data(), where.table_ld, where.page),
                           where.short_lengths.data()),
               key, value);
    }
  }
  CHECK_TALLY(t);
}

}  // namespace

TEST_CASE("half and bfloat16") { types<k::half, k::bfloat16>("half, bfloat16"); }
TEST_CASE("fp8 with scales") { types<k::float8_e4m3, k::float8_e5m2, float, k::half>("e4m3, e5m2"); }
TEST_CASE("fp8 keys without scales, float values") { types<k::float8_e4m3, float>("e4m3, float"); }
TEST_CASE("int8") { types<int8_t, int8_t, float, float>("int8"); }
TEST_CASE("int4") { types<k::Int4, k::Int4, k::half, float>("int4"); }
TEST_CASE("int8 keys and uint4 values") { types<int8_t, k::Uint4, float, float>("int8, uint4"); }
