// Decoding on the GPU: keys and values of every type, scores, and views of one's own.
#include "support/gpu_decode.cuh"

using namespace test;

namespace {

template <class E>
constexpr int bits_of = Element<E>::per_unit > 1 ? 4 : 8 * int(std::min(sizeof(E), sizeof(k::half)));

template <class TQ, class K, class KS, class V, class VS>
void check_types(Tally& t, const char* what, ScaleOf grain, DType keys, DType values, bool rounds_queries,
                 const std::vector<k::DecodeMode>& modes) {
  // Rows of codes have to end at a multiple of 16 bytes.
  constexpr int bits = std::min(bits_of<K>, bits_of<V>);
  for (const AttentionCase& c : {AttentionCase{{1, 1, 1}, {130, 0, 700}, 4, 2, bits == 4 ? 32 : 48},
                                 AttentionCase{{4, 4}, {90, 300}, 6, 2, bits == 16 ? 56 : 64},
                                 AttentionCase{std::vector<int64_t>(kMany, 2), many_lengths(), 8, 4, 64}}) {
    const int64_t dim = c.dim, gap = bits == 4 ? 32 : dim % 16 == 0 ? 16 : 8;
    const Placement where(Layout::hnd, c.kv_lens, c.kv_heads);
    const KvSide<K, KS, DeviceMemory> key(1, where, dim, grain, 1, 0, gap);
    const KvSide<V, VS, DeviceMemory> value(2, where, dim, grain, 1, 0, gap);
    const OnDevice<int32_t> lengths(where.short_lengths);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
    for (const auto mode : modes)
      check_decode<64, TQ, float>(t, what, c, kv, key, value, k::causal(), causal_model(), mode,
                                  precision_of(mode, keys, values, rounds_queries));
  }
}
const std::vector<k::DecodeMode> kAll = {k::DecodeMode::precise, k::DecodeMode::tensor, k::DecodeMode::plain},
                                 kPlain = {k::DecodeMode::plain, k::DecodeMode::automatic};

}  // namespace

TEST_CASE("decode: 16-bit types") {
  Tally t;
  check_types<k::bfloat16, k::bfloat16, k::Nothing, k::bfloat16, k::Nothing>(t, "bfloat16", ScaleOf::head, DType::bf16,
                                                                             DType::bf16, false, kAll);
  check_types<float, k::half, k::Nothing, k::bfloat16, k::Nothing>(t, "half and bfloat16", ScaleOf::head, DType::f16,
                                                                   DType::bf16, true, kAll);
  CHECK_TALLY(t);
}

TEST_CASE("decode: 8-bit types") {
  Tally t;
  check_types<k::half, k::float8_e4m3, k::Nothing, k::float8_e4m3, k::Nothing>(
      t, "e4m3", ScaleOf::head, DType::f16, DType::f16, false, {k::DecodeMode::precise, k::DecodeMode::tensor});
  for (const ScaleOf grain : {ScaleOf::tensor, ScaleOf::head, ScaleOf::token}) {
    check_types<k::half, k::float8_e4m3, float, k::float8_e4m3, k::half>(
        t, "e4m3 with scales", grain, DType::f16, DType::f16, false, {k::DecodeMode::precise, k::DecodeMode::tensor});
    check_types<k::bfloat16, int8_t, float, int8_t, float>(t, "int8", grain, DType::bf16, DType::f16, false,
                                                           {k::DecodeMode::precise, k::DecodeMode::tensor});
  }
  check_types<k::half, k::float8_e5m2, k::half, k::half, k::Nothing>(t, "e5m2 and half", ScaleOf::token, DType::f16,
                                                                     DType::f16, false, {k::DecodeMode::precise});
  CHECK_TALLY(t);
}

TEST_CASE("decode: codes whose rows end elsewhere") {
  Tally t;
  const AttentionCase c{{2}, {90}, 4, 2, 40};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<int8_t, float, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  const OnDevice<int32_t> lengths(where.short_lengths);
  check_decode<64, k::bfloat16, float>(
      t, "int8 x 40", c, k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data())), key,
      value, k::causal(), causal_model(), k::DecodeMode::automatic, {});
  const KvSide<k::Int4, float, DeviceMemory> key4(1, where, c.dim, ScaleOf::token, 1, 0, 8);
  const KvSide<k::Uint4, k::half, DeviceMemory> value4(2, where, c.dim, ScaleOf::token, 1, 0, 8);
  for (const auto mode : kPlain) {
    check_decode<64, float, float>(
        t, "4 bits x 40", c, k::dense_kv(key4.tensor(), value4.tensor(), static_cast<const int32_t*>(lengths.data())),
        key4, value4, k::causal(), causal_model(), mode, {});
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: other types, on CUDA cores") {
  Tally t;
  check_types<float, float, k::Nothing, float, k::Nothing>(t, "float", ScaleOf::head, DType::f32, DType::f32, false,
                                                           kPlain);
  CHECK_TALLY(t);
}

TEST_CASE("decode: 4-bit types") {
  Tally t;
  for (const ScaleOf grain : {ScaleOf::head, ScaleOf::token}) {
    check_types<k::half, k::Int4, float, k::Uint4, k::half>(t, "int4 and uint4", grain, DType::f16, DType::f16, false,
                                                            kAll);
  }
  check_types<k::bfloat16, k::Uint4, k::half, k::half, k::Nothing>(t, "uint4 and half", ScaleOf::token, DType::bf16,
                                                                   DType::f16, false, {k::DecodeMode::precise});
  check_types<k::half, k::float8_e4m3, k::Nothing, k::Int4, float>(t, "e4m3 and int4", ScaleOf::head, DType::f16,
                                                                   DType::f16, false, {k::DecodeMode::precise});
  check_types<k::bfloat16, int8_t, float, k::Int4, float>(t, "int8 and int4", ScaleOf::token, DType::bf16, DType::f16,
                                                          false, {k::DecodeMode::precise});
  check_types<float, k::Int4, float, k::Int4, float>(t, "int4 with queries of float", ScaleOf::token, DType::f16,
                                                     DType::f16, true, kAll);
  CHECK_TALLY(t);
}

namespace {

struct Scores {
  Tally& t;
  double spread = 1;

  template <class S>
  void operator()(const char* what, const S& score, const ScoreModel& model) const {
    for (const AttentionCase& c :
         {AttentionCase{{1, 1}, {730, 45}, 4, 2, 24}, AttentionCase{{6, 6}, {600, 3}, 4, 2, 24},
          AttentionCase{{19, 19}, {75, 4}, 4, 2, 24}}) {
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, spread, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
      const OnDevice<int32_t> lengths(where.short_lengths);
      const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
      for (const auto mode : {k::DecodeMode::precise, k::DecodeMode::plain}) {
        check_decode<64, k::half, float>(t, what, c, kv, key, value, score, model, mode,
                                         precision_of(mode, DType::f16, DType::f16, false), 3, spread);
      }
    }
  }
};

// Adds the same to all logits.
struct Shift : k::Score {
  float by;
  explicit Shift(float x) : by(x) {}
  template <int N>
  KERNELS_HD k::Pack<float, N> transform(const k::Pack<float, N>& logits, const k::ScoreAt&) const {
    return logits + by;
  }
};

}  // namespace

TEST_CASE("decode: masks, caps and biases") {
  Tally t;
  const Scores check{t};
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f},
                           sinks = {0.3f, -2.f, 5.f, -std::numeric_limits<float>::infinity()};
  const OnDevice<float> device_slopes(slopes), device_sinks(sinks);
  std::vector<k::half> biases(2 * 4 * 19 * 800);
  Random random(5);
  for (auto& x : biases) x = make<k::half>(random.below(9) == 0 ? kMinusInfinity : 2 * random.normal());
  const OnDevice<k::half> device_biases(biases);
  std::vector<uint32_t> bits(2 * 19 * 24);
  for (auto& x : bits) x = uint32_t(random.bits());
  const OnDevice<uint32_t> device_bits(bits);

  check("everything", k::no_mask(), {});
  check("window", k::window(40, 3), window_model(40, 3));
  check("top left", k::causal(k::Align::top_left), causal_model(true));
  check("cap and causal", k::causal() & k::soft_cap(3.f), causal_model() & soft_cap_model(3));
  ScoreModel sink_model;
  sink_model.sink = [&](int64_t head) { return double(sinks[size_t(head)]); };
  check("sinks and alibi", k::sinks(static_cast<const float*>(device_sinks.data())) & k::alibi(device_slopes.data()),
        sink_model & alibi_model(slopes));
  ScoreModel bias_model;
  bias_model.transform = [&](Real<> x, const Spot& s) {
    const double b = value_of(biases[size_t(s.b * 4 * 19 * 800 + s.head * 19 * 800 + s.query * 800 + s.key)]);
    return b == kMinusInfinity ? Real<>(b) : x + Real<>(b);
  };
  check("bias", k::score_bias(static_cast<const k::half*>(device_biases.data()), 4 * 19 * 800, 19 * 800, 800),
        bias_model);
  ScoreModel tree_model;
  tree_model.visible = [&](const Spot& s) {
    const int64_t bit = s.key - (s.kv_len - s.q_len);
    return bit < 0 || (bits[size_t(s.b * 19 * 24 + s.query * 24 + bit / 32)] >> (bit % 32) & 1u) != 0;
  };
  check("tree", k::tree_mask(device_bits.data(), 24, 19 * 24), tree_model);
  CHECK_TALLY(t);
}

TEST_CASE("decode: huge logits") {
  Tally t;
  const Scores check{t, 300};
  int64_t low = 0, high = 0;
  ScoreModel model;
  model.transform = [&](Real<> x, const Spot&) {
    low += x.v < -5e4, high += x.v > 5e4;
    return x;
  };
  check("huge", k::no_mask(), model);
  if (!is_shortened()) CHECK((low > 1000 && high > 1000));
  // Ordinary ones, all of them far from 0.
  const Scores beside{t};
  for (const float far : {-1e5f, 1e5f}) {
    ScoreModel shifted;
    shifted.transform = [=](Real<> x, const Spot&) { return Real<>(x.v + far, x.e + 4 * unit<float> * 1e5); };
    beside("shifted", Shift(far), shifted);
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: a view of one's own") {
  Tally t;
  check_decode<64, float, k::half>(t, "formula", {{3}, {333}, 2, 1, 40}, Formula{}, Formula::expected_key,
                                   Formula::expected_value, k::causal(), causal_model(), k::DecodeMode::automatic, {});
  CHECK_TALLY(t);
}
