// Attention over latents: values are 512 of the keys' 576 columns, for which there is a kernel of its own for sm_90a.
#include "support/gpu_decode.cuh"

using namespace test;

namespace {

// Values that are columns of keys, from `column` on.
template <class T>
struct ColumnsOf {
  const DeviceKv<T>& key;
  int64_t column;

  auto tensor() const {
    const auto keys = key.tensor();
    const T* const p = keys.at({0, 0, 0}, 0);
    return k::strided(p + column, keys.at({1, 0, 0}, 0) - p, keys.at({0, 1, 0}, 0) - p, keys.at({0, 0, 0}, 1) - p);
  }
  double operator()(int64_t b, int64_t head, int64_t pos, int64_t c) const { return key(b, head, pos, column + c); }
};

// Whether the kernel is taken for keys and values that begin at these elements, in pages.
template <class T>
bool takes_latents(const k::Exec& ex, int64_t key_at, int64_t value_at, int64_t value_stride = 576,
                   int64_t v_dim = 512) {
  const T* const p = reinterpret_cast<const T*>(uintptr_t(1) << 20);  // planned with, never read
  const int32_t* const numbers = reinterpret_cast<const int32_t*>(p);
  k::AttentionPlan plan;
  REQUIRE(k::attention_plan<576>(
      ex, k::load(p, 16 * 576),
      k::paged_kv(k::nhd(p + key_at, 64, 1, 576), k::strided(p + value_at, 64 * value_stride, value_stride, 576),
                  k::pages(numbers, 4, 64), numbers),
      k::store(reinterpret_cast<T*>(uintptr_t(1) << 40), 16 * v_dim), {1, 4, 16, 1, 576, v_dim}, k::causal(), {},
      plan));
  const bool taken = plan.warpgroups;
  CHECK((plan.why_not == std::string()) == taken);
  return taken;
}

enum class With { nothing, workspace };

// Against the oracle. multiprocessors: as many as the call is told that there are, or 0.
template <class T, class TO, class TQ = T, class S>
void attends_to_latents(Tally& t, const std::string& what, const AttentionCase& c, Layout layout, int64_t column,
                        With with, const S& score, const ScoreModel& model, int64_t step = 1, double spread = 1,
                        int64_t page = 16, int multiprocessors = 0) {
  if (t.leaves_out()) return;
  const Placement where(layout, c.kv_lens, c.kv_heads, page);
  const DeviceKv<T> key(1, where, 576, ScaleOf::head, 1, 0, 8);
  const ColumnsOf<T> value{key, column};
  AttentionData<TQ, TO, DeviceMemory> d(c, spread);
  const OnDevice<int32_t> offsets(d.offsets);
  k::AttentionShape shape = d.shape();
  if (c.ragged_q) shape.q_offsets = offsets.data();
  const Stream stream;
  k::DeviceInfo device = k::Exec(stream).device();
  if (multiprocessors > 0) device.sm_count = multiprocessors;
  const k::Exec ex(stream, device);
  const int64_t floats = int64_t(k::attention_workspace_bytes(ex, shape, d.options()) + 3) / 4;
  Device<float> memory(1, floats, floats, 0, Poison::nan);
  with_view(where, key, value, [&](const auto& kv) {
    const k::Status status = with == With::workspace
                                 ? k::attention<576>(ex, d.source(), kv, d.sink(), shape, score,
                                                     k::Workspace{memory.data(), size_t(floats) * 4}, d.options())
                                 : k::attention<576>(ex, d.source(), kv, d.sink(), shape, score, d.options());
    t.expect(status.ok(), "%s: %s", what.c_str(), status.reason());
    stream.wait();
  });
  memory.download();
  t.expect(memory.intact(), "%s: wrote outside the workspace", what.c_str());
  check(
      t, what, d, [&](int64_t row, int64_t x) { return d.q.value(row, x); }, key, value, model,
      precision_of<TQ>(key, key), step);
}

AttentionCase latents(const std::vector<int64_t>& queries, const std::vector<int64_t>& keys, int64_t heads) {
  AttentionCase c{queries, keys, heads, 1, 576, 512};
  c.ragged_q = true, c.aligned = true;
  return c;
}

}  // namespace

TEST_CASE("attention over latents: taken where values are columns of keys") {
  Stream stream;
  const k::Exec ex(stream);
  if (!takes_latents<k::bfloat16>(ex, 0, 0)) return skip("needs kernels compiled for sm_90a, and such a GPU");
  CHECK(takes_latents<k::half>(ex, 0, 64));
  CHECK(takes_latents<k::bfloat16>(ex, 64, 64));
  CHECK(!takes_latents<k::bfloat16>(ex, 64, 0));
  CHECK(!takes_latents<k::bfloat16>(ex, 0, 8));
  CHECK(!takes_latents<k::bfloat16>(ex, 0, 576 * 64));
  CHECK(!takes_latents<k::bfloat16>(ex, 0, 0, 512));
  CHECK(!takes_latents<k::bfloat16>(ex, 0, 0, 576, 256));
  CHECK(!takes_latents<k::bfloat16>(ex, 4, 4));
}

TEST_CASE("attention over latents: every length of tiles, heads and layouts") {
  Tally t;
  using T = k::bfloat16;
  for (const int64_t keys : {0, 1, 15, 63, 64, 65, 127, 128, 129, 192, 193, 257, 300}) {
    attends_to_latents<T, T>(t, "one query", latents({1, 1}, {keys, keys / 2}, 16), Layout::nhd, 0, With::nothing,
                             k::causal(), causal_model(), 3);
    attends_to_latents<T, float>(t, "columns behind others", latents({3, 0, 1}, {keys, 70, keys / 3}, 24),
                                 Layout::paged_nhd, 64, With::nothing, k::causal(), causal_model(), 5);
  }
  for (const int64_t heads : {1, 7, 64, 128}) {
    for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::ragged, Layout::paged_nhd}) {
      attends_to_latents<k::half, k::half>(t, "heads", latents({1, 2, 5}, {200, 33, 64}, heads), layout, 0,
                                           With::nothing, k::causal(), causal_model(), heads / 4 + 1);
    }
  }
  for (const int64_t page : {1, 7, 64, 100})
    attends_to_latents<T, T>(t, "pages of " + std::to_string(page), latents({1, 40}, {333, 150}, 16), Layout::paged_nhd,
                             0, With::nothing, k::causal(), causal_model(), 17, 1, page);
  CHECK_TALLY(t);
}

TEST_CASE("attention over latents: scores, large logits, results of any alignment, even sequences") {
  Tally t;
  using T = k::bfloat16;
  attends_to_latents<T, T>(t, "window and cap", latents({70, 1, 9}, {200, 500, 9}, 16), Layout::paged_nhd, 0,
                           With::nothing, k::window(100, 30) & k::soft_cap(20.f),
                           soft_cap_model(20) & window_model(100, 30), 29);
  attends_to_latents<k::half, float>(t, "large logits", latents({2, 33}, {700, 300}, 16), Layout::nhd, 0, With::nothing,
                                     k::causal(), causal_model(), 19, 12);
  // From tile to tile by less than outputs are shrunk for, by about as much, and by far more; and falling.
  for (const float slope : {-0.02f, -0.087f, -2.f, 0.3f}) {
    const std::vector<float> slopes(16, slope);
    const OnDevice<float> on_device(slopes);
    attends_to_latents<k::half, float>(t, "logits that rise or fall", latents({1, 3}, {900, 450}, 16),
                                       Layout::paged_nhd, 0, With::nothing, k::alibi(on_device.data()) & k::causal(),
                                       alibi_model(slopes) & causal_model(), 3);
  }
  AttentionCase odd = latents({2, 5}, {150, 70}, 12);
  odd.aligned = false;
  attends_to_latents<T, T>(t, "odd", odd, Layout::nhd, 0, With::nothing, k::causal(), causal_model(), 3);
  for (const int64_t queries : {1, 5, 64}) {
    AttentionCase even = latents({queries, queries, queries}, {130, 64, 0}, 32);
    even.ragged_q = false;
    attends_to_latents<T, T>(t, "even", even, Layout::nhd, 64, With::nothing, k::no_mask(), {}, queries * 4 + 1);
  }
  AttentionCase many = latents({}, {}, 16);
  for (int i = 0; i < 900; ++i) many.q_lens.push_back(i % 7), many.kv_lens.push_back(i % 5 * 30 + i % 3);
  attends_to_latents<T, T>(t, "many sequences", many, Layout::paged_nhd, 0, With::nothing, k::causal(), causal_model(),
                           1009);
  // A block takes many tiles of queries, one behind the other, with none, one or two tiles of keys.
  attends_to_latents<T, T>(t, "few blocks", many, Layout::paged_nhd, 0, With::nothing, k::causal(), causal_model(),
                           1009, 1, 16, 1);
  attends_to_latents<k::half, float, float>(t, "few blocks, queries of float", many, Layout::nhd, 64, With::nothing,
                                            k::causal(), causal_model(), 1009, 1, 16, 1);
  attends_to_latents<k::half, k::half, float>(t, "queries of float", latents({3, 40}, {200, 333}, 16),
                                              Layout::paged_nhd, 0, With::nothing, k::causal(), causal_model(), 13);
  CHECK_TALLY(t);
}

TEST_CASE("attention over latents: split keys") {
  Tally t;
  using T = k::bfloat16;
  for (const int splits : {0, 1, 2, 5}) {
    AttentionCase c = latents({1, 1, 3, 0}, {3000, 130, 1000, 5}, 128);
    c.splits = splits;
    attends_to_latents<T, T>(t, "in parts", c, Layout::paged_nhd, 0, With::workspace, k::causal(), causal_model(), 61,
                             1, 64);
    // Few blocks, so that each has several tiles of queries, and keys come to where outputs have been left.
    for (const int64_t page : {64, 24})
      attends_to_latents<T, T>(t, "in parts, few blocks", c, Layout::paged_nhd, 0, With::workspace, k::causal(),
                               causal_model(), 61, 1, page, 1);
    c.heads = 16;
    attends_to_latents<T, float>(t, "in parts", c, Layout::nhd, 64, With::workspace, k::window(900, 0),
                                 window_model(900, 0), 11);
  }
  CHECK_TALLY(t);
}

namespace {

template <class T, class TO>
void decodes_latents(Tally& t, const std::string& what, const AttentionCase& c, Layout layout, int64_t column,
                     k::DecodeMode mode, int64_t step) {
  if (t.leaves_out()) return;
  const Placement where(layout, c.kv_lens, c.kv_heads, 64);
  const DeviceKv<T> key(1, where, 576, ScaleOf::head, 1, 0, 8);
  const ColumnsOf<T> value{key, column};
  with_view(where, key, value, [&](const auto& kv) {
    check_one_decode<576, T, TO>(t, what + ", " + c.describe(), c, kv, key, value, k::causal(), causal_model(), mode,
                                 precision_of<T>(key, key), step, 1);
  });
}

}  // namespace

TEST_CASE("decode over latents: blocks are shared out among all sequences") {
  Tally t;
  using T = k::bfloat16;
  const auto automatic = k::DecodeMode::automatic;
  for (const int64_t heads : {9, 16, 128}) {
    const int64_t step = heads == 128 ? 41 : 7;
    decodes_latents<T, T>(t, "even", latents({1, 1, 1, 1}, {1000, 1000, 1000, 1000}, heads), Layout::paged_nhd, 0,
                          automatic, step);
    decodes_latents<T, float>(t, "one long", latents({1, 1, 1, 1, 0, 1}, {5000, 0, 48, 191, 30, 193}, heads),
                              Layout::nhd, 64, automatic, step);
    AttentionCase cut = latents({1, 1}, {700, 100}, heads);
    cut.splits = 3;
    decodes_latents<T, T>(t, "in three parts", cut, Layout::nhd, 0, automatic, step);
  }
  decodes_latents<k::half, k::half>(t, "few rows", latents({1, 1}, {1500, 70}, 4), Layout::paged_nhd, 0,
                                    k::DecodeMode::tensor, 1);
  AttentionCase several = latents({3, 1, 32, 7}, {900, 300, 40, 2000}, 16);
  decodes_latents<T, T>(t, "several queries", several, Layout::paged_nhd, 0, automatic, 23);
  AttentionCase many = latents({}, {}, 128);  // more tiles of rows than multiprocessors
  for (int i = 0; i < 100; ++i) many.q_lens.push_back(1), many.kv_lens.push_back(i % 9 * 37);
  decodes_latents<T, T>(t, "many", many, Layout::paged_nhd, 0, automatic, 1013);
  many.ragged_q = false;  // nothing is cut, which the host knows
  decodes_latents<T, T>(t, "many, even", many, Layout::paged_nhd, 0, automatic, 1009);
  CHECK_TALLY(t);
}

TEST_CASE("decode over latents: cut in a fixed number of parts, a sequence has the same bits alone and in any batch") {
  using T = k::bfloat16;
  const int64_t batch = 40, heads = 16, capacity = 2100, width = heads * 576, made = heads * 512;
  std::vector<int32_t> lens;
  for (int64_t b = 0; b < batch; ++b) lens.push_back(b == 0 ? int32_t(capacity) : int32_t(b * 997 % capacity));
  const RandomMatrix<T, DeviceMemory> keys(1, batch * capacity, 576, 576), q(2, batch, width, width);
  Device<float> all(batch, made, made), alone(batch, made, made);
  Stream stream;
  Tally t;
  for (const int splits : {3, 16}) {
    const auto run = [&](Device<float>& o, int64_t first, int64_t count) {
      const OnDevice<int32_t> lengths(std::vector<int32_t>(lens.begin() + first, lens.begin() + first + count));
      const auto cache = k::nhd(static_cast<const T*>(keys.data()) + first * capacity * 576, capacity, 1, 576);
      const k::AttentionShape shape{count, 1, heads, 1, 576, 512};
      const k::Attention options = k::Attention{}.splits(splits);
      const int64_t room = int64_t(k::decode_workspace_bytes(stream, shape, options));
      Device<unsigned char> memory(1, room, room);
      REQUIRE(k::decode<576>(stream, k::load(static_cast<const T*>(q.data()) + first * width, width),
                             k::dense_kv(cache, cache, static_cast<const int32_t*>(lengths.data())),
                             k::store(o.data() + first * made, made), shape, k::no_mask(),
                             {memory.data(), size_t(room)}, options));
      stream.wait();
    };
    run(all, 0, batch);
    for (int64_t b = 0; b < batch; b += 9) run(alone, b, 1);
    all.download();
    alone.download();
    for (int64_t b = 0; b < batch; b += 9) {
      for (int64_t c = 0; c < made; ++c)
        t.expect(all.get(b, c) == alone.get(b, c), "%d parts, sequence %d, column %d: %g, alone %g", splits, int(b),
                 int(c), all.get(b, c), alone.get(b, c));
    }
  }
  CHECK_TALLY(t);
}

// Two tiles of rows for each sequence, and two to three multiprocessors for each tile: a cluster of two blocks has it.
TEST_CASE("decode over latents: two blocks have a tile of queries together") {
  Tally t;
  using T = k::bfloat16;
  const Stream stream;
  const int sequences = k::Exec(stream).device().sm_count / 5;
  for (const int64_t longest : {40, 300, 700}) {  // the second block has no keys; some; in parts as well
    AttentionCase c = latents({}, {}, 128);
    for (int i = 0; i < sequences; ++i) c.q_lens.push_back(1), c.kv_lens.push_back(i % 7 * longest / 6);
    decodes_latents<T, T>(t, "pairs", c, Layout::paged_nhd, 0, k::DecodeMode::automatic, 211);
    c.ragged_q = false;
    decodes_latents<T, float>(t, "pairs of even queries", c, Layout::nhd, 64, k::DecodeMode::automatic, 307);
  }
  CHECK_TALLY(t);
}
