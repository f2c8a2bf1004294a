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

// Every code, where several vectors of codes are decoded together.
template <class T>
void every_code() {
  namespace host = k::detail::host;
  using Codes = k::DirectLoad<T>;
  using Stretch = host::DecodedStretch<Codes>;
  if constexpr (Stretch::vectors > 0) {
    constexpr int N = host::kLanes<float>, count = 256;
    std::vector<T> codes;
    for (int i = 0; i < count; ++i) codes.push_back(k::bit_cast<T>(uint8_t(i)));
    const host::RowAt<Codes> row(Codes(codes.data(), 0), 0);
    int wrong = 0;
    for (int begin = 0; begin < count; begin += Stretch::cols) {
      host::unrolled<Stretch::vectors>([&](auto i) {
        float values[N];
        host::put_vector<float>(values, Stretch::template vector<i()>(row, begin));
        for (int lane = 0; lane < N; ++lane) {
          const float value = values[lane] * Stretch::worth,
                      number = k::convert<float>(codes[size_t(begin + Stretch::column(i() * N + lane))]);
          wrong += !(value == number || (value != value && number != number));
        }
      });
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("codes that are decoded together are the numbers that they are alone") {
  every_code<k::float8_e4m3>();
  every_code<k::float8_e5m2>();
}
#if defined(ATTENTION_TYPES_MUST_LOOK_UP)
TEST_CASE("float8_e4m3 is looked up in tables of bytes") {
  STATIC_REQUIRE(k::detail::host::DecodedStretch<k::DirectLoad<k::float8_e4m3>>::worth == 1.f);
  STATIC_REQUIRE((k::cpu::kNeeds >> 12 & 1u) == 1);
}
TEST_CASE("fp8 with scales") { types<k::float8_e4m3, k::float8_e5m2, float, k::half>("e4m3, e5m2"); }
#else  // other types are decoded as in the other builds of this file
TEST_CASE("half and bfloat16") { types<k::half, k::bfloat16>("half, bfloat16"); }
TEST_CASE("fp8 with scales") { types<k::float8_e4m3, k::float8_e5m2, float, k::half>("e4m3, e5m2"); }
TEST_CASE("int8") { types<int8_t, int8_t, float, float>("int8"); }
TEST_CASE("int4") { types<k::Int4, k::Int4, k::half, float>("int4"); }
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)  // other pairs of these types, compiled once
TEST_CASE("bfloat16 and half") { types<k::bfloat16, k::half>("bfloat16, half"); }
TEST_CASE("fp8 keys without scales, float values") { types<k::float8_e4m3, float>("e4m3, float"); }
TEST_CASE("int8 keys and uint4 values") { types<int8_t, k::Uint4, float, float>("int8, uint4"); }
#endif
