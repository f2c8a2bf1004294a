// Keys split among blocks, for calls of attention() with a workspace: cuts that are asked for, and those that sequences
// get by themselves.
#include "support/gpu_attention.cuh"

using namespace test;

namespace {

// Holds NaN, and so counts and states that no call has left.
using Memory = Device<float>;
k::Workspace workspace_of(const k::Exec& ex, const k::AttentionShape& shape, const k::Attention& options,
                          std::unique_ptr<Memory>& memory) {
  const size_t bytes = k::attention_workspace_bytes(ex, shape, options);
  const int64_t floats = int64_t(bytes + 3) / 4;
  memory = std::make_unique<Memory>(1, floats, floats, 0, Poison::nan);
  return {memory->data(), bytes};
}

// A device with too little shared memory for the kernel of sm_90a, which has room for the other one.
k::Exec with_less(const Stream& stream) {
  k::DeviceInfo device = k::Exec(stream).device();
  device.shared_per_block = 100 << 10;
  return {stream, device};
}

const std::vector<float> kSinks{0.3f, -2.f, 5.f, -std::numeric_limits<float>::infinity()};
ScoreModel sink_model() {
  ScoreModel m;
  m.sink = [](int64_t head) { return double(kSinks[size_t(head)]); };
  return m;
}

// With a window and sinks, which stand for causal attention as well: against the oracle.
template <int kDim, class T>
void attends_in_parts(Tally& t, const std::string& what, const AttentionCase& c, Layout layout, int left, int right,
                      bool less, int64_t step) {
  if (t.leaves_out()) return;
  const Placement where(layout, c.kv_lens, c.kv_heads, 16);
  const DeviceKv<T> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.value_dim(), ScaleOf::head, 1, 0, 8);
  const OnDevice<float> sinks(kSinks);
  AttentionData<T, T, DeviceMemory> d(c);
  const OnDevice<int32_t> offsets(d.offsets);
  k::AttentionShape shape = d.shape();
  if (c.ragged_q) shape.q_offsets = offsets.data(), shape.tokens = d.offsets.back();
  const k::Attention options = c.splits > 0 ? d.options().splits(c.splits) : d.options();
  const Stream stream;
  const k::Exec ex = less ? with_less(stream) : k::Exec(stream);
  std::unique_ptr<Memory> memory;
  const k::Workspace workspace = workspace_of(ex, shape, options, memory);
  const std::string name = what + ", " + std::to_string(c.splits) + " parts" + (less ? ", not for sm_90a" : "");
  with_view(where, key, value, [&](const auto& kv) {
    const k::Status status = k::attention<kDim>(ex, d.source(), kv, d.sink(), shape,
                                                k::window(left, right) & k::sinks(sinks.data()), workspace, options);
    t.expect(status.ok(), "%s: %s", name.c_str(), status.reason());
    stream.wait();
  });
  memory->download();
  t.expect(memory->intact(), "%s: wrote outside the workspace", name.c_str());
  check(
      t, name, d, [&](int64_t row, int64_t x) { return d.q.value(row, x); }, key, value,
      window_model(left, right) & sink_model(), precision_of<T>(key, value), step);
}

}  // namespace

TEST_CASE("attention in parts, cut as it is asked") {
  Tally t;
  AttentionCase c{{5, 0, 1, 140, 9, 3}, {700, 20, 0, 430, 9, 257}, 4, 2, 128};
  c.ragged_q = c.aligned = true;
  for (const int splits : {1, 2, 3, 256}) {
    c.splits = splits;
    for (const bool less : {false, true}) {
      attends_in_parts<128, k::half>(t, "causal", c, Layout::paged_nhd, -1, 0, less, 7);
      attends_in_parts<128, k::half>(t, "window", c, Layout::paged_nhd, 200, 0, less, 7);
    }
    attends_in_parts<128, k::half>(t, "all", c, Layout::ragged, -1, -1, false, 7);
  }
  c.splits = 3;
  AttentionCase one_length{{130, 130, 130}, {2000, 90, 0}, 4, 4, 128};
  one_length.aligned = true, one_length.splits = 3;
  attends_in_parts<128, k::half>(t, "queries of one length", one_length, Layout::nhd, -1, 0, false, 7);
  c.dim = 64;
  attends_in_parts<64, k::bfloat16>(t, "causal", c, Layout::paged_nhd, -1, 0, false, 7);
  attends_in_parts<64, k::bfloat16>(t, "causal", c, Layout::paged_nhd, -1, 0, true, 7);
  c.dim = 192, c.v_dim = 128;
  attends_in_parts<192, k::bfloat16>(t, "fewer values", c, Layout::paged_nhd, -1, 0, false, 7);
  c.dim = 40, c.v_dim = 136;
  attends_in_parts<136, float>(t, "float", c, Layout::paged_nhd, 300, 0, false, 7);
  c.dim = 576, c.v_dim = 512;
  attends_in_parts<576, k::half>(t, "large heads", c, Layout::paged_nhd, -1, 0, false, 11);
  CHECK_TALLY(t);
}

TEST_CASE("attention in parts: sequences cut themselves, and have the same bits alone and in any batch") {
  Tally t;
  AttentionCase c{{64, 1, 300, 0, 40}, {5000, 9000, 300, 77, 2600}, 4, 2, 128};
  c.ragged_q = c.aligned = true;
  attends_in_parts<128, k::half>(t, "causal", c, Layout::paged_nhd, -1, 0, false, 41);
  attends_in_parts<128, k::half>(t, "causal", c, Layout::paged_nhd, -1, 0, true, 41);

  const Placement where(Layout::ragged, c.kv_lens, c.kv_heads);
  const DeviceKv<k::half> key(1, where, c.dim, ScaleOf::head, 1, 0, 8), value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  const OnDevice<int32_t> kv_offsets(where.offsets);
  const OnDevice<float> sinks(kSinks);
  AttentionData<k::half, k::half, DeviceMemory> together(c), alone(c), whole(c);
  const OnDevice<int32_t> q_offsets(together.offsets);
  const Stream stream;
  const k::Exec ex(stream);
  const auto score = k::window(-1, 0) & k::sinks(sinks.data());
  // The tokens that a shape tells of, and the most keys, change what is launched and nothing else.
  const auto run = [&](auto& d, int64_t first, int64_t count, int64_t most, int64_t tokens, int64_t most_keys) {
    const k::AttentionShape shape{count, most, c.heads, c.kv_heads, c.dim, c.v_dim, q_offsets.data() + first, tokens};
    const k::Attention options = d.options().most_keys(most_keys);
    std::unique_ptr<Memory> memory;
    const k::Status status =
        k::attention<128>(ex, d.source(), k::ragged_kv(key.tensor(), value.tensor(), kv_offsets.data() + first),
                          d.sink(), shape, score, workspace_of(ex, shape, options, memory), options);
    t.expect(status.ok(), "%s", status.reason());
    stream.wait();
    d.o.download(), d.lse.download();
  };
  run(together, 0, 5, 300, 405, 0);
  for (int64_t b = 0; b < 5; ++b) run(alone, b, 1, 300, 0, b % 2 == 0 ? 0 : c.kv_lens[size_t(b)]);
  t.expect(together.o.bytes() == alone.o.bytes() && together.lse.bytes() == alone.lse.bytes(), "other bits alone");

  // The third sequence has too few keys for more than one part, the others do not: so much tells that they were cut.
  const k::Status status =
      k::attention<128>(ex, whole.source(), k::ragged_kv(key.tensor(), value.tensor(), kv_offsets.data()), whole.sink(),
                        {5, 300, c.heads, c.kv_heads, c.dim, c.v_dim, q_offsets.data()}, score, whole.options());
  t.expect(status.ok(), "%s", status.reason());
  stream.wait();
  whole.o.download();
  for (size_t b = 0; b < c.q_lens.size(); ++b) {
    int64_t others = 0;
    for (int64_t row = whole.offsets[b]; row < whole.offsets[b + 1]; ++row) {
      for (int64_t x = 0; x < whole.o.cols(); ++x)
        others += value_of(whole.o.get(row, x)) != value_of(together.o.get(row, x));
    }
    t.expect((others > 0) == (c.kv_lens[b] > 2500), "sequence %d has %d other results in parts", int(b), int(others));
  }
  CHECK_TALLY(t);
}

// Blocks go on to further sequences, many of each lane that looks for them, of which a few are cut.
TEST_CASE("attention in parts: many sequences") {
  Tally t;
  AttentionCase c{{}, {}, 4, 2, 128};
  for (int i = 0; i < 600; ++i) {
    const bool is_long = i % 97 == 5;
    c.q_lens.push_back(is_long ? 3 : i % 7 * 11), c.kv_lens.push_back(is_long ? 5000 : i % 5 * 20 + i % 3);
  }
  c.ragged_q = c.aligned = true;
  for (const bool less : {false, true})
    attends_in_parts<128, k::half>(t, "many", c, Layout::paged_nhd, -1, 0, less, 499);
  CHECK_TALLY(t);
}

// Sequences of one length that have blocks enough: the same blocks as without a workspace, and the same bits, as they
// have in a ragged batch, whose blocks look for them.
void check_nothing_is_cut(Tally& t, int64_t queries, int64_t keys) {
  AttentionCase c{{queries, queries, queries}, {keys, keys + 200, 0}, 32, 8, 128};
  c.aligned = true;
  const Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 16);
  const DeviceKv<k::half> key(1, where, c.dim, ScaleOf::head, 1, 0, 8), value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  AttentionData<k::half, k::half, DeviceMemory> with(c), without(c), ragged(c);
  const OnDevice<int32_t> offsets(with.offsets);
  k::AttentionShape ragged_shape = ragged.shape();
  ragged_shape.q_offsets = offsets.data();
  const Stream stream;
  for (const bool less : {false, true}) {
    if (t.leaves_out()) continue;
    const k::Exec ex = less ? with_less(stream) : k::Exec(stream);
    std::unique_ptr<Memory> memory;
    const k::Workspace workspace = workspace_of(ex, with.shape(), {}, memory);
    std::unique_ptr<Memory> of_ragged;
    const k::Workspace ragged_workspace = workspace_of(ex, ragged_shape, {}, of_ragged);
    with_view(where, key, value, [&](const auto& kv) {
      k::AttentionPlan plan, plan_without;
      const bool planned = k::attention_plan<128>(ex, with.source(), kv, with.sink(), with.shape(), k::causal(),
                                                  workspace, with.options(), plan)
                               .ok() &&
                           k::attention_plan<128>(ex, without.source(), kv, without.sink(), without.shape(),
                                                  k::causal(), without.options(), plan_without)
                               .ok();
      t.expect(planned && plan.splits == 1 && plan.blocks == plan_without.blocks,
               "%d parts, %d blocks with a workspace, %d without", plan.splits, int(plan.blocks),
               int(plan_without.blocks));
      t.expect(
          k::attention<128>(ex, with.source(), kv, with.sink(), with.shape(), k::causal(), workspace, with.options())
                  .ok() &&
              k::attention<128>(ex, ragged.source(), kv, ragged.sink(), ragged_shape, k::causal(), ragged_workspace,
                                ragged.options())
                  .ok() &&
              k::attention<128>(ex, without.source(), kv, without.sink(), without.shape(), k::causal(),
                                without.options())
                  .ok(),
          "not attended");
      stream.wait();
    });
    memory->download();
    check(
        t, "nothing is cut", with, [&](int64_t row, int64_t x) { return with.q.value(row, x); }, key, value,
        causal_model(), precision_of<k::half>(key, value), 601);
    without.o.download(), without.lse.download(), ragged.o.download(), ragged.lse.download();
    t.expect(with.o.bytes() == ragged.o.bytes() && with.lse.bytes() == ragged.lse.bytes(),
             "other bits in a ragged batch");
    t.expect(with.o.bytes() == without.o.bytes() && with.lse.bytes() == without.lse.bytes(),
             "other bits without a workspace");
    t.expect(memory->intact(), "wrote outside the workspace");
  }
}

TEST_CASE("attention with a workspace where nothing is cut") {
  Tally t;
  check_nothing_is_cut(t, 1100, 1000);  // each sequence has more blocks than run at a time
  check_nothing_is_cut(t, 70, 400);     // few, but the page table has no room for keys that are worth it
  CHECK_TALLY(t);
}

TEST_CASE("attention in parts: a captured graph follows the lengths") {
  Tally t;
  AttentionCase most{{70, 70}, {4500, 4500}, 4, 2, 128};
  most.ragged_q = most.aligned = true;
  const Placement where(Layout::ragged, most.kv_lens, most.kv_heads);
  const DeviceKv<k::half> key(1, where, 128, ScaleOf::head, 1, 0, 8), value(2, where, 128, ScaleOf::head, 1, 0, 8);
  const OnDevice<float> sinks(kSinks);
  const int32_t begin = where.offsets[0];
  OnDevice<int32_t> kv_offsets(std::vector<int32_t>{begin, begin, begin}), offsets(std::vector<int32_t>{0, 0, 0});
  AttentionData<k::half, k::half, DeviceMemory> d(most);
  k::AttentionShape shape = d.shape();
  shape.q_offsets = offsets.data();
  const Stream stream;
  const k::Exec ex(stream);
  std::unique_ptr<Memory> memory;
  const k::Workspace workspace = workspace_of(ex, shape, d.options(), memory);
  const auto call = [&] {
    return k::attention<128>(ex, d.source(), k::ragged_kv(key.tensor(), value.tensor(), kv_offsets.data()), d.sink(),
                             shape, k::window(-1, 0) & k::sinks(sinks.data()), workspace, d.options());
  };
  k::Status status;
  const Graph graph(stream, [&] { status = call(); });
  t.expect(status.ok(), "%s", status.reason());
  for (const auto& lens :
       std::vector<std::vector<int64_t>>{{3, 64, 2100, 4500}, {0, 33, 5, 4400}, {64, 70, 64, 0}, {70, 1, 4500, 3000}}) {
    d.c.q_lens = {lens[0], lens[1]};
    d.c.kv_lens = {lens[2], lens[3]};
    d.offsets = {0, int32_t(lens[0]), int32_t(lens[0] + lens[1])};
    offsets.assign(d.offsets);
    kv_offsets.assign({begin, int32_t(begin + lens[2]), int32_t(begin + lens[2] + lens[3])});
    graph.replay();
    const auto at = [&](const auto& side) {
      return [&, moved = lens[2] - 4500](int64_t b, int64_t head, int64_t pos, int64_t x) {
        return b == 0 || pos + moved >= 0 ? side(b, head, pos + (b == 0 ? 0 : moved), x)
                                          : side(0, head, pos + lens[2], x);
      };
    };
    check(
        t, "replayed", d, [&](int64_t row, int64_t x) { return d.q.value(row, x); }, at(key), at(value),
        window_model(-1, 0) & sink_model(), precision_of<k::half>(key, value), 41);
    const std::vector<unsigned char> bits = d.o.bytes(), lse = d.lse.bytes();
    t.expect(call().ok(), "again");
    stream.wait();
    d.o.download(), d.lse.download();
    t.expect(d.o.bytes() == bits && d.lse.bytes() == lse, "other bits the second time");
  }
  CHECK_TALLY(t);
}

TEST_CASE("attention in parts: a workspace that will not do, and plans") {
  const k::half* const p = reinterpret_cast<const k::half*>(uintptr_t(1) << 20);
  k::half* const to = reinterpret_cast<k::half*>(uintptr_t(1) << 40);
  k::DeviceInfo device;
  device.sm_count = 132, device.shared_per_block = 227 << 10, device.capability = 90;
  const k::Exec ex(nullptr, device);
  const float* const sinks = reinterpret_cast<const float*>(p);
  const int64_t keys = 100000;
  const auto kv = k::ragged_kv(k::nhd(p, keys, 8, 128), k::nhd(p, keys, 8, 128), reinterpret_cast<const int32_t*>(p));
  const auto score = k::window(-1, 0) & k::sinks(sinks);
  const k::AttentionShape chunk{1, 64, 32, 8, 128}, prompt{1, 16384, 32, 8, 128};
  const auto reason = [&](const k::AttentionShape& shape, k::Workspace workspace, const k::Attention& options = {}) {
    return std::string(
        k::attention<128>(ex, k::load(p, 4096), kv, k::store(to, 4096), shape, score, workspace, options).reason());
  };
  const size_t bytes = k::attention_workspace_bytes(ex, chunk);
  CHECK(bytes == 16 + 264 * 128 * (16 + 512));
  CHECK(k::attention_workspace_bytes(ex, chunk, k::Attention{}.splits(2)) == 16 + 64 * 32 * 2 * (16 + 512));
  CHECK(k::attention_workspace_bytes(ex, chunk, k::Attention{}.splits(1)) == 16);
  CHECK(k::attention_workspace_bytes(ex, chunk, k::Attention{}.most_keys(400)) == 16);
  CHECK(k::attention_workspace_bytes(ex, prompt) == 16);
  CHECK(k::attention_workspace_bytes(ex, {0, 64, 32, 8, 128}) == 0);
  // One workspace for all of them.
  CHECK(k::attention_workspace_bytes_up_to(ex, {0, 64, 32, 8, 128}) == 0);
  CHECK(k::attention_workspace_bytes_up_to(ex, prompt) == bytes);
  for (const k::Attention& options : {k::Attention{}, k::Attention{}.splits(3), k::Attention{}.most_keys(9000)}) {
    for (const int64_t queries : {1, 31, 64, 300, 1056, 1057, 5000, 16384}) {
      for (const int64_t batch : {1, 3, 8}) {
        CHECK(k::attention_workspace_bytes(ex, {batch, queries, 32, 8, 128}, options) <=
              k::attention_workspace_bytes_up_to(ex, {8, 16384, 32, 8, 128}, options));
        CHECK(k::decode_workspace_bytes(ex, {batch, queries % 33, 32, 8, 128}, options) <=
              k::decode_workspace_bytes(ex, {8, 32, 32, 8, 128}, options));
      }
    }
  }
  // As many tokens as there can be, and as there are.
  CHECK(k::attention_workspace_bytes(ex, {64, 64, 32, 8, 128, 0, reinterpret_cast<const int32_t*>(p)}) ==
        16 + 64 * size_t(264) * 128 * (16 + 512));
  CHECK(k::attention_workspace_bytes(ex, {64, 64, 32, 8, 128, 0, reinterpret_cast<const int32_t*>(p), 64}) ==
        16 + 64 * size_t(32) * 32 * (16 + 512));
  char* const memory = reinterpret_cast<char*>(uintptr_t(1) << 41);
  const std::string needed = " bytes, and " + std::to_string(bytes) + " are needed";
  CHECK(reason(chunk, {}) == "attention: the workspace has 0" + needed);
  CHECK(std::string(
            k::attention<128>(ex, k::load(p, 4096), kv, k::store(to, 4096), chunk, score, k::Workspace{}).reason()) ==
        "attention: the workspace has 0" + needed);
  CHECK(reason(chunk, {memory, bytes - 1}) == "attention: the workspace has " + std::to_string(bytes - 1) + needed);
  CHECK(reason(chunk, {memory + 8, bytes}) == "attention: the workspace is not at a multiple of 16 bytes");

  if (!k::Exec().status().ok()) return skip("needs a GPU");
  const k::Exec here(nullptr);
  k::AttentionPlan plan;
  const auto planned = [&](const k::AttentionShape& shape, const k::Attention& options = {}) {
    CHECK(k::attention_plan<128>(here, k::load(p, 4096), kv, k::store(to, 4096), shape, score, k::Workspace{}, options,
                                 plan)
              .ok());
    return plan.splits;
  };
  const int parts = planned(chunk), on_each = plan.tile_keys == 128 ? 1 : 2;
  CHECK(parts == here.device().sm_count * on_each / 16);
  CHECK(plan.blocks == 16 * parts);
  CHECK(planned(prompt) == 1);
  CHECK(planned(chunk, k::Attention{}.splits(5)) == 5);
  // One of 4,096 queries, and 62 of one: tiles of as many as there are.
  CHECK(k::attention_plan<128>(here, k::load(p, 4096), kv, k::store(to, 4096),
                               {64, 4096, 32, 8, 128, 0, reinterpret_cast<const int32_t*>(p), 2 * 4096 + 62}, score, {},
                               plan)
            .ok());
  // Those for sm_90a go on to further ones.
  CHECK(plan.blocks == (plan.warpgroups ? 4 * here.device().sm_count : ((2 * 4096 + 62) * 4 / 128 + 64) * 8));
}
