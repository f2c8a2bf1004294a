// Decoding on the GPU: shapes, layouts, head sizes, lengths, and calls in graphs.
#include <kernels/elementwise.cuh>

#include "support/gpu_decode.cuh"

using namespace test;

namespace {

const k::DecodeMode kModes[] = {k::DecodeMode::precise, k::DecodeMode::tensor, k::DecodeMode::plain};

template <int kDim>
void check_half(Tally& t, const std::string& what, const AttentionCase& c, const Placement& where,
                const KvSide<k::half, k::Nothing, DeviceMemory>& key,
                const KvSide<k::half, k::Nothing, DeviceMemory>& value, k::DecodeMode mode, int64_t step = 3) {
  with_view(where, key, value, [&](const auto& kv) {
    check_decode<kDim, k::half, float>(t, what, c, kv, key, value, k::causal(), causal_model(), mode,
                                       precision_of(mode, DType::f16, DType::f16, false), step);
  });
}

AttentionCase aligned(AttentionCase c) {
  c.aligned = true;
  return c;
}

}  // namespace

TEST_CASE("decode: layouts") {
  Tally t;
  const AttentionCase cases[] = {{{1, 1, 1}, {170, 0, 600}, 4, 2, 32},
                                 {{2, 2, 2}, {65, 1, 300}, 3, 1, 40},
                                 {{21, 21, 21}, {70, 5, 0}, 4, 2, 48},
                                 {{1}, {5000}, 8, 1, 64}};
  for (const AttentionCase& c : cases) {
    for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::ragged, Layout::paged_nhd, Layout::paged_hnd}) {
      const Placement where(layout, c.kv_lens, c.kv_heads);
      const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 8, 16);
      for (const auto mode : kModes)
        check_half<64>(t, "layout " + std::to_string(int(layout)), c, where, key, value, mode);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: pages of any size, scattered") {
  Tally t;
  for (const int64_t page : {1, 7, 16, 64, 128, 1000}) {
    AttentionCase c{{1, 1, 1}, {170, 3, 1300}, 8, 2, 64};
    const Placement where(Layout::paged_hnd, c.kv_lens, c.kv_heads, page);
    const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    for (c.splits = 0; c.splits < 2; ++c.splits) {
      for (const auto mode : kModes) check_half<64>(t, "pages of " + std::to_string(page), c, where, key, value, mode);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: heads of any size") {
  Tally t;
  std::vector<std::pair<int64_t, int64_t>> dims = {{192, 128}, {512, 512}, {576, 512}, {64, 256}};
  for (int64_t dim = 8; dim <= 256; dim += dim < 72 || dim == 120 || dim == 248 ? 8 : 24) dims.push_back({dim, dim});
  for (const auto& [dim, v_dim] : dims) {
    AttentionCase c{{2, 2}, {130, 700}, 4, 2, dim, v_dim};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::head, 1, 0, 8),
        value(2, where, v_dim, ScaleOf::head, 1, 0, 8);
    for (const auto mode : kModes)
      check_half<0>(t, "heads", dim % 16 == 0 ? aligned(c) : c, where, key, value, mode, 5);
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: heads that share keys, and several queries") {
  Tally t;
  for (const int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64}) {
    for (const int64_t queries : {1, 3, 8, 32}) {
      AttentionCase c{{queries, queries}, {333, queries + 1}, group * 2, 2, 64};
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
      check_half<64>(t, "group of " + std::to_string(group), c, where, key, value, k::DecodeMode::precise, 29);
      if (queries == 3)
        check_half<64>(t, "group of " + std::to_string(group), c, where, key, value, k::DecodeMode::plain, 29);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: larger heads with several queries") {
  Tally t;
  for (const int64_t dim : {128, 256, 512}) {
    AttentionCase c{{3, 0, 5}, {400, 7, 90}, 24, 2, dim};
    c.ragged_q = true;
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    for (const auto mode : kModes) check_half<0>(t, "several queries", c, where, key, value, mode, 11);
  }
  CHECK_TALLY(t);
}

// More rows than a warp has registers for are those of two teams, which share what they bring.
TEST_CASE("decode: rows of two teams") {
  Tally t;
  for (const int64_t dim : {72, 128, 256}) {
    for (const int64_t page : {0, 7, 16, 64}) {
      AttentionCase c{{8, 5, 6, 1, 3, 11}, {700, 5, 1300, 70, 2, 333}, 8, 2, dim};
      c.ragged_q = true;
      c.most_keys = k::tuning::kKeysOfTwoTiles + 1;  // or else tiles of fewer rows take 128 columns
      const Placement where(page == 0 ? Layout::nhd : Layout::paged_nhd, c.kv_lens, c.kv_heads,
                            std::max<int64_t>(1, page));
      const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
      for (c.splits = 0; c.splits < 4; c.splits += 3) {
        for (const auto mode : {k::DecodeMode::precise, k::DecodeMode::tensor})
          check_half<0>(t, "pages of " + std::to_string(page), c, where, key, value, mode, 7);
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: kernels for larger heads than are given") {
  Tally t;
  for (const int64_t dim : {64, 128, 192}) {
    for (const int64_t group : {3, 12, 20}) {
      const AttentionCase c{{1, 1}, {400, 90}, 2 * group, 2, dim};
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
      for (const auto mode : kModes) {
        check_half<256>(t, "for 256 columns", c, where, key, value, mode, 1);
        check_half<576>(t, "for 576 columns", c, where, key, value, mode, 1);
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: every length") {
  Tally t;
  std::vector<int64_t> lens;
  for (int64_t n = 0; n <= 1100; n += is_shortened() ? 97 : 1) lens.push_back(n);
  AttentionCase c{std::vector<int64_t>(lens.size(), 1), lens, 2, 1, 16};
  const Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 32);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  for (const auto mode : kModes) check_half<64>(t, "lengths", c, where, key, value, mode, 1);
  CHECK_TALLY(t);
}

// Heads of 64 columns in a call that is told of at most so many keys.
void check_told_of(int64_t most, Tally& t, AttentionCase c, const Placement& where) {
  c.most_keys = most;
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  with_view(where, key, value, [&](const auto& kv) {
    check_one_decode<64, k::half, float>(t, "said to have " + std::to_string(most) + " keys", c, kv, key, value,
                                         k::causal(), causal_model(), k::DecodeMode::precise,
                                         precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false), 3, 1);
  });
}

TEST_CASE("decode: every length that is short") {
  Tally t;
  for (const int64_t most :
       {1, 100, 200, 400, 1000, 2000}) {  // clusters of 1 to 16 blocks, the largest of few sequences
    for (int64_t first = 0; first <= 1100; first += 55) {
      if (t.leaves_out()) continue;
      AttentionCase c{std::vector<int64_t>(most == 2000 ? 3 : 11, 1), {}, 8, 1, 64};
      for (size_t n = 0; n < c.q_lens.size(); ++n)
        c.kv_lens.push_back((most == 2000 ? 2 : 1) * first + (int64_t(n) * 5 + most) % 55);
      check_told_of(most, t, c, Placement(Layout::paged_nhd, c.kv_lens, c.kv_heads, 32));
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: several queries on short sequences") {
  struct Heads {
    int64_t all, kv, most_queries;
  };
  Tally t;
  for (const Heads& heads : {Heads{8, 1, 2}, Heads{6, 2, 5}, Heads{4, 4, 32}, Heads{10, 2, 8}, Heads{1, 1, 9}}) {
    for (const int64_t most : {100, 250, 1000}) {
      if (t.leaves_out()) continue;
      AttentionCase c{
          {heads.most_queries, 1, 0, heads.most_queries - 1}, {most, 1, most / 2, most - 3}, heads.all, heads.kv, 64};
      c.ragged_q = true;
      check_told_of(most, t, c, Placement(Layout::nhd, c.kv_lens, c.kv_heads));
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: very long sequences beside short ones") {
  Tally t;
  AttentionCase c{{1, 1, 1, 1}, {is_shortened() ? 10000 : 100000, 1, 0, 33333}, 4, 1, 32};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  for (const auto mode : kModes) check_half<64>(t, "long", c, where, key, value, mode, 1);
  CHECK_TALLY(t);
}

// Logits of about 1,000: what is not relative to the largest one overflows, or becomes 0.
TEST_CASE("decode: all of many keys with a bias of 1e3 or -1e3") {
  Tally t;
  const int64_t keys = is_shortened() ? 6000 : 65536;
  const AttentionCase c{{1}, {keys}, 4, 1, 64};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  struct Biases {
    const char* name;
    std::function<bool(int64_t)> high;
  };
  const Biases all[] = {{"1e3", [](int64_t) { return true; }},
                        {"-1e3", [](int64_t) { return false; }},
                        {"1e3 behind half of the keys", [keys](int64_t i) { return i >= keys / 2; }},
                        {"1e3 at the last key", [keys](int64_t i) { return i == keys - 1; }}};
  for (const Biases& b : all) {
    std::vector<k::half> biases;
    for (int64_t i = 0; i < keys; ++i) biases.push_back(make<k::half>(b.high(i) ? 1e3 : -1e3));
    const OnDevice<k::half> there(biases);
    ScoreModel model;
    model.transform = [&](Real<> x, const Spot& s) { return x + constant(value_of(biases[size_t(s.key)])); };
    with_view(where, key, value, [&](const auto& kv) {
      for (const auto mode : kModes)
        check_decode<64, k::half, float>(t, b.name, c, kv, key, value,
                                         k::score_bias(static_cast<const k::half*>(there.data()), 0, 0, 0), model, mode,
                                         precision_of(mode, DType::f16, DType::f16, false), 1);
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: cut in a fixed number of parts") {
  Tally t;
  for (const int splits : {1, 2, 7, 16, 17, 256}) {
    for (AttentionCase c : {AttentionCase{{1, 1, 1, 1}, {9000, 0, 1, 700}, 4, 1, 64},
                            AttentionCase{{5, 5}, {2000, 130}, 12, 2, 128}, AttentionCase{{1}, {3000}, 4, 2, 512}}) {
      c.splits = splits;
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
          value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
      for (const auto mode : kModes) check_half<0>(t, std::to_string(splits) + " parts", c, where, key, value, mode, 3);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: cut in a fixed number of parts, a sequence has the same bits alone and in any batch") {
  const int64_t kv_heads = 2, heads = 8, dim = 128, capacity = 5000, width = heads * dim, row = kv_heads * dim;
  const std::vector<int32_t> lens = {5000, 17, 0, 1300, 4999, 64, 2048};
  const int64_t batch = int64_t(lens.size());
  const RandomMatrix<k::half, DeviceMemory> keys(1, batch * capacity, row, row), values(2, batch * capacity, row, row),
      q(3, batch, width, width);
  Device<float> all(batch, width, width), alone(batch, width, width);
  Stream stream;
  Tally t;
  for (const auto mode : kModes) {
    for (const int splits : {1, 5, 32}) {
      if (t.leaves_out()) continue;
      const auto run = [&](Device<float>& o, int64_t first, int64_t count) {
        const OnDevice<int32_t> lengths(std::vector<int32_t>(lens.begin() + first, lens.begin() + first + count));
        const auto side = [&](const RandomMatrix<k::half, DeviceMemory>& m) {
          return k::nhd(static_cast<const k::half*>(m.data()) + first * capacity * row, capacity, kv_heads, dim);
        };
        const k::AttentionShape shape{count, 1, heads, kv_heads, dim};
        const k::Attention options = k::Attention{}.splits(splits);
        const int64_t room = int64_t(k::decode_workspace_bytes(stream, shape, options));
        Device<unsigned char> memory(1, room, room);
        REQUIRE(k::decode<128>(stream, k::load(static_cast<const k::half*>(q.data()) + first * width, width),
                               k::dense_kv(side(keys), side(values), static_cast<const int32_t*>(lengths.data())),
                               k::store(o.data() + first * width, width), shape, k::no_mask(),
                               {memory.data(), size_t(room)}, options, mode));
        stream.wait();
      };
      run(all, 0, batch);
      for (int64_t b = 0; b < batch; ++b) run(alone, b, 1);
      all.download();
      alone.download();
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t c = 0; c < width; ++c)
          t.expect(all.get(b, c) == alone.get(b, c), "%d parts, %s, sequence %d, column %d: %g, alone %g", splits,
                   name_of(mode), int(b), int(c), all.get(b, c), alone.get(b, c));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: one workspace for calls of any shape") {
  // What one call leaves must not be taken for a count by the next.
  Tally t;
  Stream stream;
  const AttentionCase cases[] = {
      {{1}, {20000}, 4, 1, 64}, {{1, 1, 1}, {3000, 10, 5000}, 8, 2, 64}, {{4}, {9000}, 8, 1, 128}};
  size_t most = 0;
  for (const AttentionCase& c : cases) {
    for (const int splits : {0, 16}) {
      AttentionData<k::half, float, DeviceMemory> data(c);
      most = std::max(most, k::decode_workspace_bytes(stream, data.shape(),
                                                      splits > 0 ? data.options().splits(splits) : data.options()));
    }
  }
  Device<unsigned char> memory(1, int64_t(most), int64_t(most));
  for (int round = 0; round < (is_shortened() ? 1 : 3); ++round) {
    for (AttentionCase c : cases) {
      for (const int splits : {0, 16}) {
        c.splits = splits;
        const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
        const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
            value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
        AttentionData<k::half, float, DeviceMemory> data(c);
        with_view(where, key, value, [&](const auto& kv) {
          const k::Status status = k::decode(stream, data.source(), kv, data.sink(), data.shape(), k::causal(),
                                             {memory.data(), most}, data.options());
          stream.wait();
          data.check(t, "shared workspace", status, key, value, causal_model(), 1,
                     precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false));
        });
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: addresses that tensor cores cannot take") {
  Tally t;
  const AttentionCase c{{1, 1}, {170, 60}, 4, 2, 40};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim), value(2, where, c.dim);
  check_half<64>(t, "misaligned", c, where, key, value, k::DecodeMode::plain);
  with_view(where, key, value, [&](const auto& kv) {
    check_decode<64, k::half, float>(t, "misaligned", c, kv, key, value, k::causal(), causal_model(),
                                     k::DecodeMode::automatic, {}, 3);
  });
  CHECK_TALLY(t);
  Stream stream;
  Device<k::half> memory(1, 4096, 4096);
  Device<unsigned char> workspace(1, 1 << 22, 1 << 22);
  const k::half* p = memory.data();
  const k::AttentionShape shape{1, 1, 2, 1, 64};
  const k::Workspace room{workspace.data(), size_t(1 << 22)};
  const auto run = [&](const k::half* keys, const k::AttentionShape& s, const k::Workspace& w, k::DecodeMode mode) {
    return k::decode<64>(stream, k::load(p, 128), k::dense_kv(k::nhd(keys, 8, 1, 64), k::nhd(p, 8, 1, 64), 8),
                         k::store(memory.data() + 1024, 128), s, k::causal(), w, {}, mode);
  };
  CHECK(run(p, shape, room, k::DecodeMode::precise));
  CHECK(!run(p + 1, shape, room, k::DecodeMode::precise));
  CHECK(!run(p + 1, shape, room, k::DecodeMode::tensor));
  CHECK(run(p + 1, shape, room, k::DecodeMode::automatic));
  CHECK(!run(nullptr, shape, room, k::DecodeMode::automatic));
  CHECK(!run(p, {1, 33, 2, 1, 64}, room, k::DecodeMode::automatic));
  CHECK(!run(p, {1, 1, 2, 1, 128}, room, k::DecodeMode::automatic));
  CHECK(!run(p, {1, 1, 3, 2, 64}, room, k::DecodeMode::automatic));
  CHECK(!run(p, {1, 1, 2, 1, 60}, room, k::DecodeMode::automatic));
  CHECK(!run(p, shape, {workspace.data(), 100}, k::DecodeMode::automatic));
  CHECK(!run(p, shape, {workspace.data() + 1, size_t(1 << 22) - 1}, k::DecodeMode::automatic));
  CHECK(run(p, {0, 1, 2, 1, 64}, room, k::DecodeMode::automatic));
  for (const int splits : {0, -1, 257, 256}) {
    const auto kv = k::dense_kv(k::nhd(p, 8, 1, 64), k::nhd(p, 8, 1, 64), 8);
    CHECK(bool(k::decode<64>(stream, k::load(p, 128), kv, k::store(memory.data() + 1024, 128), shape, k::causal(), room,
                             k::Attention{}.splits(splits))) == (splits == 256));
  }
  stream.wait();
}

TEST_CASE("decode: a graph captured at one length is right at another") {
  Tally t;
  const AttentionCase c{{1, 1}, {40000, 300}, 8, 2, 64};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  AttentionData<k::half, float, DeviceMemory> data(c);
  OnDevice<int32_t> lengths({1, 2});
  Stream stream;
  const int64_t bytes = int64_t(k::decode_workspace_bytes(stream, data.shape()));
  Device<unsigned char> memory(1, bytes, bytes);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
  for (const bool programmatic : {false, true}) {
    k::Status status;
    const Graph graph(stream, [&] {
      status = k::decode<64>(k::Exec(stream).programmatic(programmatic), data.source(), kv, data.sink(), data.shape(),
                             k::causal(), {memory.data(), size_t(bytes)}, data.options());
    });
    for (const std::vector<int64_t>& lens : {std::vector<int64_t>{1000, 0}, {40000, 300}, {17, 299}}) {
      if (t.leaves_out()) continue;
      lengths.assign({int32_t(lens[0]), int32_t(lens[1])});
      graph.replay();
      data.c.kv_lens = lens;
      data.check(t, "replayed", status, key, value, causal_model(), 1,
                 precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false));
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: more sequences and heads than a grid has rows") {
  Tally t;
  const int64_t batch = is_shortened() ? 400 : 40000;
  std::vector<int64_t> lens;
  for (int64_t b = 0; b < batch; ++b) lens.push_back(b % 5);
  const AttentionCase c{std::vector<int64_t>(size_t(batch), 1), lens, 4, 2, 8};
  const Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 4);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  for (const auto mode : {k::DecodeMode::precise, k::DecodeMode::plain})
    check_half<64>(t, "many", c, where, key, value, mode, 97);
  CHECK_TALLY(t);
}

TEST_CASE("decode: offsets beyond 2^31 elements") {
  // One sequence at the far end of a tensor of which nothing else is ever touched.
  const int64_t heads = 2, dim = 64, capacity = int64_t(1) << 25, pos_stride = heads * dim, first = capacity - 128;
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  const size_t bytes = size_t(capacity) * size_t(pos_stride) * sizeof(k::half);
  if (free < bytes + (size_t(1) << 30)) return skip("needs 10 GB of GPU memory");
  Tally t;
  const AttentionCase c{{2}, {40}, 4, 2, dim};
  const Placement where(Layout::nhd, c.kv_lens, heads);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::head, 1, 0, 8),
      value(2, where, dim, ScaleOf::head, 1, 0, 8);
  std::vector<k::half> rows(size_t(128 * pos_stride));
  for (int64_t pos = 0; pos < 40; ++pos) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t x = 0; x < dim; ++x) {
        rows[size_t(pos * pos_stride + h * dim + x)] = make<k::half>(key(0, h, pos, x));
        rows[size_t((64 + pos) * pos_stride + h * dim + x)] = make<k::half>(value(0, h, pos, x));
      }
    }
  }
  auto* const p = static_cast<k::half*>(DeviceMemory::allocate(bytes));
  DeviceMemory::upload(p + first * pos_stride, rows.data(), rows.size() * sizeof(k::half));
  const OnDevice<int32_t> offsets({int32_t(first), int32_t(first + 40)});
  const auto tensor = [&](int64_t shift) {
    return k::strided(static_cast<const k::half*>(p + shift * pos_stride), 0, pos_stride, dim);
  };
  for (const auto mode : kModes) {
    check_decode<64, k::half, float>(
        t, "far away", c, k::ragged_kv(tensor(0), tensor(64), static_cast<const int32_t*>(offsets.data())), key, value,
        k::causal(), causal_model(), mode, precision_of(mode, DType::f16, DType::f16, false), 1);
  }
  CHECK_TALLY(t);
  DeviceMemory::release(p);
}

TEST_CASE("decode: what follows in the stream sees all results") {
  // As many items as blocks: none is cut, and the kernel that merges has nothing to do.
  const int64_t kv_heads = 8, batch = 2 * sm_count() / kv_heads, dim = 64, length = 4096, width = kv_heads * dim;
  const size_t bytes = size_t(batch * length * width) * sizeof(k::half);
  auto* const p = static_cast<k::half*>(DeviceMemory::allocate(bytes));
  Stream stream;
  check_cuda(cudaMemsetAsync(p, 0x31, bytes, stream));
  const RandomMatrix<k::half, DeviceMemory> q(1, batch, width, width);
  Device<float> o(batch, width, width), after(batch, width, width);
  const k::AttentionShape shape{batch, 1, kv_heads, kv_heads, dim};
  const int64_t room = int64_t(k::decode_workspace_bytes(stream, shape));
  Device<unsigned char> memory(1, room, room);
  const auto kv = k::dense_kv(k::nhd(static_cast<const k::half*>(p), length, kv_heads, dim),
                              k::nhd(static_cast<const k::half*>(p), length, kv_heads, dim), length);
  for (int round = 0; round < (is_shortened() ? 1 : 5); ++round) {
    check_cuda(cudaMemsetAsync(o.data(), 0xff, size_t(batch * width) * sizeof(float), stream));
    REQUIRE(k::decode<64>(stream, k::load(static_cast<const k::half*>(q.data()), width), kv, k::store(o.data(), width),
                          shape, k::no_mask(), {memory.data(), size_t(room)}));
    REQUIRE(k::copy(stream, k::load(static_cast<const float*>(o.data()), width), k::store(after.data(), width), batch,
                    width));
    stream.wait();
    o.download();
    after.download();
    Tally t;
    for (int64_t r = 0; r < batch; ++r) {
      for (int64_t c = 0; c < width; ++c)
        t.expect(after.get(r, c) == o.get(r, c) && o.get(r, c) > 0, "round %d, row %d, column %d: %g, then %g", round,
                 int(r), int(c), after.get(r, c), o.get(r, c));
    }
    CHECK_TALLY(t);
  }
  DeviceMemory::release(p);
}
