// Decoding on the GPU: codes of 8 and 4 bits, their scales, and how warps take tiles of them.
#include "support/gpu_decode.cuh"

using namespace test;

TEST_CASE("decode: scales of values that grow, fall, vanish and change sign") {
  Tally t;
  for (const AttentionCase& c : {AttentionCase{{1, 1}, {700, 333}, 8, 2, 64},
                                 AttentionCase{std::vector<int64_t>(kMany, 1), many_lengths(), 8, 4, 64}}) {
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const OnDevice<int32_t> lengths(where.short_lengths);
    const auto with = [&](const char* what, auto scale) {
      const KvSide<int8_t, float, DeviceMemory> key(1, where, c.dim, ScaleOf::token, 1, 0, 16);
      KvSide<int8_t, float, DeviceMemory> value(2, where, c.dim, ScaleOf::token, 1, 0, 16);
      for (int64_t i = 0; i < value.scale_count(); ++i) value.set_scale(i, scale(i));
      value.upload();
      check_decode<64, k::half, float>(
          t, what, c, k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data())), key,
          value, k::causal(), causal_model(), k::DecodeMode::precise,
          precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false));
    };
    with("growing", [](int64_t i) { return std::ldexp(1.0, int(std::min<int64_t>(i / 100, 20)) - 7); });
    with("falling", [](int64_t i) { return std::ldexp(1.0, 7 - int(std::min<int64_t>(i / 100, 20))); });
    with("of both signs, some zero", [](int64_t i) { return (double(i * 37 % 11) - 5) * 0.01; });
    with("zero", [](int64_t) { return 0.0; });
    with("tiny", [](int64_t) { return 1e-42; });
    with("huge", [](int64_t) { return 1e33; });
    with("growing beside a head with zeros", [&](int64_t i) {
      return i % c.kv_heads % 2 == 0 ? std::ldexp(1.0, int(i / 100 % 40)) : double(i / 300 % 2);
    });
  }
  CHECK_TALLY(t);
}

// Rows that are no multiple of 128 bytes, and rows of 32.
TEST_CASE("decode: codes of 8 and 4 bits in heads of every size") {
  Tally t;
  for (const auto& dims : {std::pair<int64_t, int64_t>{576, 512}, {192, 128}, {128, 128}, {256, 64}, {96, 224}}) {
    for (const AttentionCase& c : {AttentionCase{{1, 1}, {333, 70}, 8, 1, dims.first, dims.second},
                                   AttentionCase{{5}, {150}, 4, 1, dims.first, dims.second}}) {
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const OnDevice<int32_t> lengths(where.short_lengths);
      const auto both = [&](const char* what, const auto& key, const auto& value) {
        check_decode<0, k::half, float>(
            t, what, c, k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data())), key,
            value, k::causal(), causal_model(), k::DecodeMode::precise,
            precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false));
      };
      both("8 bits", KvSide<int8_t, float, DeviceMemory>(1, where, dims.first, ScaleOf::head, 1, 0, 16),
           KvSide<int8_t, float, DeviceMemory>(2, where, dims.second, ScaleOf::head, 1, 0, 16));
      both("4 bits", KvSide<k::Int4, float, DeviceMemory>(1, where, dims.first, ScaleOf::head, 1, 0, 32),
           KvSide<k::Int4, float, DeviceMemory>(2, where, dims.second, ScaleOf::head, 1, 0, 32));
    }
  }
  CHECK_TALLY(t);
}

// Warps take up to four tiles of codes at a time: with one or two parts of the keys, as many as each length leaves for
// the last step. Tiles are in a page, in two, in many; windows begin anywhere. Of many sequences two heads are worked
// on together; of five queries a warp has one tile of keys for half of the rows.
TEST_CASE("decode: several tiles of codes") {
  Tally t;
  for (const int64_t page : {0, 1, 7, 16, 24, 64}) {
    for (AttentionCase c : {AttentionCase{{1, 1, 1, 1, 1}, {170, 3, 2300, 850, 530}, 8, 2, 64},
                            AttentionCase{{1, 1, 1, 1, 1}, {170, 3, 2300, 850, 530}, 8, 2, 128},
                            AttentionCase{{5, 5, 5, 5, 5}, {170, 7, 2300, 850, 530}, 8, 2, 128},
                            AttentionCase{std::vector<int64_t>(kMany, 1), many_lengths(), 16, 4, 128},
                            AttentionCase{std::vector<int64_t>(kMany, 1), many_lengths(), 8, 4, 96}}) {
      // Or else tiles of fewer rows take those of five queries.
      if (c.q_lens[0] > 1) c.most_keys = k::tuning::kKeysOfTwoTiles + 1;
      const int64_t dim = c.dim;
      const Layout layout = page == 0 ? Layout::nhd : page == 24 ? Layout::paged_hnd : Layout::paged_nhd;
      const Placement where(layout, c.kv_lens, c.kv_heads, std::max<int64_t>(1, page));
      const auto both = [&](const std::string& what, const auto& key, const auto& value) {
        with_view(where, key, value, [&](const auto& kv) {
          for (c.splits = 0; c.splits < (c.q_lens.size() == kMany ? 1 : 3); ++c.splits) {
            for (const int64_t left : {100000, 1037}) {
              if (t.leaves_out()) continue;
              check_one_decode<128, k::half, float>(
                  t, what + " in pages of " + std::to_string(page) + ", window " + std::to_string(left), c, kv, key,
                  value, k::window(left, 0), window_model(left, 0), k::DecodeMode::precise,
                  precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false), 3, 1);
            }
          }
        });
      };
      const KvSide<k::float8_e4m3, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::head, 1, 0, 16);
      both("8 bits", key, KvSide<int8_t, float, DeviceMemory>(2, where, dim, ScaleOf::token, 1, 0, 16));
      both("8 bits without scales", key,
           KvSide<k::float8_e4m3, k::Nothing, DeviceMemory>(2, where, dim, ScaleOf::head, 1, 0, 16));
      both("4 bits", KvSide<k::Int4, k::half, DeviceMemory>(1, where, dim, ScaleOf::token, 1, 0, 32),
           KvSide<k::Int4, k::half, DeviceMemory>(2, where, dim, ScaleOf::token, 1, 0, 32));
    }
  }
  CHECK_TALLY(t);
}

// A ring with room for a single stage, in code for GPUs with less shared memory.
TEST_CASE("decode: wide heads of codes beside half") {
  Tally t;
  const AttentionCase c{{1, 1}, {333, 70}, 8, 1, 256, 256};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const OnDevice<int32_t> lengths(where.short_lengths);
  const KvSide<int8_t, float, DeviceMemory> key(1, where, c.dim, ScaleOf::token, 1, 0, 16);
  const KvSide<k::half, k::Nothing, DeviceMemory> value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
  check_decode<256, k::half, float>(t, "int8 and half", c, kv, key, value, k::causal(), causal_model(),
                                    k::DecodeMode::precise,
                                    precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false));
  CHECK_TALLY(t);
}

// ---- scores --------------------------------------------------------------------------------------------------------
