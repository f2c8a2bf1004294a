// The kernel of attention for sm_90a beside the one for all architectures: which is taken, and that both say the same.
// What is right is checked in attention.cu, where calls take the one for sm_90a wherever they can.
#include <thread>

#include "support/gpu_attention.cuh"

using namespace test;

namespace {

// A device with too little shared memory for the kernel of sm_90a, which has room for the other one.
k::Exec with_less(cudaStream_t stream, int64_t dim) {
  k::DeviceInfo device = k::Exec(stream).device();
  device.shared_per_block = (dim <= 64 ? 84 : 100) << 10;
  return {stream, device};
}
// Whether the kernels that run here are compiled for sm_90a, and have room: plans tell.
template <int kDim, class T, class K = T>
bool takes_hopper(const k::Exec& ex, int64_t dim, int shift = 0, int64_t v_dim = 0) {
  if (v_dim == 0) v_dim = dim;
  const T* q = reinterpret_cast<const T*>(uintptr_t(1) << 20);  // planned with, never read
  const K* p = reinterpret_cast<const K*>(q);
  k::AttentionPlan plan;
  REQUIRE(k::attention_plan<kDim>(
      ex, k::load(q, dim), k::dense_kv(k::nhd(p + shift, 256, 1, dim), k::nhd(p, 256, 1, v_dim), 256),
      k::store(reinterpret_cast<T*>(uintptr_t(1) << 30), v_dim), {1, 256, 1, 1, dim, v_dim}, k::causal(), {}, plan));
  return plan.warpgroups;
}

// Elements of K between rows of so many that begin at multiples of 16 bytes.
template <class K>
int64_t gap_behind(int64_t dim) {
  constexpr int64_t of_16_bytes = std::is_same<K, k::Int4>::value ? 32 : 16 / int64_t(sizeof(K));
  return of_16_bytes + (of_16_bytes - dim % of_16_bytes) % of_16_bytes;
}

// K: the type of keys and values, with a scale for each head of each position if Scale says so.
template <int kDim, class T, class TO = float, class K = T, class Scale = k::Nothing, class S>
void both_say_the_same(Tally& t, const char* what, const AttentionCase& c, Layout layout, const S& score,
                       int multiprocessors = 0) {
  if (t.leaves_out()) return;
  const std::string name = std::string(what) + ", " + c.describe();  // once: there are many results
  const Placement where(layout, c.kv_lens, c.kv_heads, 16);
  const KvSide<K, Scale, DeviceMemory> key(1, where, c.dim, ScaleOf::token, 1, 0, gap_behind<K>(c.dim)),
      value(2, where, c.value_dim(), ScaleOf::token, 1, 0, gap_behind<K>(c.value_dim()));
  AttentionData<T, float, DeviceMemory> data(c);
  const OnDevice<int32_t> offsets(data.offsets);
  k::AttentionShape shape = data.shape();
  if (c.ragged_q) shape.q_offsets = offsets.data();
  const int64_t rows = data.o.rows(), width = c.heads * c.value_dim();
  Device<TO> one(rows, width, width), other(rows, width, width);
  Device<float> one_lse(rows, c.heads, c.heads), other_lse(rows, c.heads, c.heads);
  Stream stream;
  with_view(where, key, value, [&](const auto& kv) {
    k::AttentionPlan plan;
    t.expect(k::attention_plan<kDim>(k::Exec(stream), data.source(), kv, k::store(one.data(), width), shape, score, {},
                                     plan).ok() && plan.key_pack > 1 && plan.value_pack > 1,
             "%s: keys or values do not lie as the kernel for sm_90a wants them", name.c_str());
    const auto run = [&](const k::Exec& ex, Device<TO>& o, Device<float>& lse) {
      const k::Status status = k::attention<kDim>(ex, data.source(), kv, k::store(o.data(), width), shape, score,
                                                  k::Attention{}.lse(lse.data()));
      t.expect(status.ok(), "%s: %s", what, status.reason());
      stream.wait();
      o.download(), lse.download();
      t.expect(o.intact() && lse.intact(), "%s: wrote outside", name.c_str());
    };
    k::DeviceInfo device = k::Exec(stream).device();
    if (multiprocessors > 0) device.sm_count = multiprocessors;
    run(k::Exec(stream, device), one, one_lse);
    run(with_less(stream, kDim), other, other_lse);
  });
  // The largest weights are rounded by one of the two alone; with scales values are larger.
  const float most = std::is_same<Scale, k::Nothing>::value ? 0.03f : 0.05f;
  const auto alike = [](float a, float b, float bound) {
    return (std::isnan(a) && std::isnan(b)) || a == b || std::fabs(a - b) <= bound * std::max(1.f, std::fabs(b));
  };
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t h = 0; h < c.heads; ++h)
      t.expect(alike(one_lse.get(r, h), other_lse.get(r, h), 1e-3f), "%s: logsumexp of row %d, head %d: %g and %g",
               name.c_str(), int(r), int(h), one_lse.get(r, h), other_lse.get(r, h));
    int64_t x = 0;
    while (x < width && alike(float(one.get(r, x)), float(other.get(r, x)), most)) ++x;
    t.expect(x == width, "%s: row %d, column %d: %g and %g", name.c_str(), int(r), int(x),
             x < width ? double(float(one.get(r, x))) : 0, x < width ? double(float(other.get(r, x))) : 0);
  }
}

template <int kDim, class T>
void some_cases(Tally& t, int64_t dim, int64_t v_dim) {
  AttentionCase ragged{{3, 0, 200, 131, 1}, {500, 64, 200, 40, 0}, 4, 4, dim, v_dim};
  ragged.ragged_q = true;
  both_say_the_same<kDim, T>(t, "ragged", ragged, Layout::paged_nhd, k::window(100, 30) & k::soft_cap(20.f));
  both_say_the_same<kDim, T>(t, "ragged", ragged, Layout::nhd, k::causal());
}

template <int kDim, class T>
void many_cases(Tally& t, int64_t dim = kDim, int64_t v_dim = kDim) {
  const int64_t tile = v_dim > 128 ? 80 : 128;  // keys of one
  for (const int64_t queries : {1, 63, 64, 65, 128, 129, 193, 700}) {
    for (const int64_t keys : {int64_t(0), int64_t(1), tile - 1, tile, tile + 1, 2 * tile, int64_t(1000)}) {
      AttentionCase c{{queries, queries / 2}, {keys, keys / 3 * 2}, 6, queries % 2 == 0 ? 2 : 6, dim, v_dim};
      c.ragged_q = true, c.aligned = queries % 3 == 0;
      both_say_the_same<kDim, T>(t, "causal", c, Layout::nhd, k::causal());
      both_say_the_same<kDim, T>(t, "window and cap, in pages", c, Layout::paged_nhd,
                                 k::window(100, 30) & k::soft_cap(20.f));
    }
  }
  some_cases<kDim, T>(t, dim, v_dim);
}

// So many short sequences of one length that blocks take several tiles of queries each: of sequences with many keys,
// few and none, with heads that go together, and with a last tile that leaves some warps without rows. As many columns
// as there can be results of T in one access.
template <int kDim, class T>
void short_ones(Tally& t, int64_t dim = kDim, int64_t v_dim = kDim) {
  const auto many = [=](int64_t queries, int64_t heads, int64_t kv_heads, std::initializer_list<int64_t> keys) {
    AttentionCase c{{}, {}, heads, kv_heads, dim, v_dim};
    for (int64_t i = 0; i < 70; ++i)
      c.q_lens.push_back(queries), c.kv_lens.push_back(*(keys.begin() + i % int64_t(keys.size())));
    c.aligned = true;
    return c;
  };
  both_say_the_same<kDim, T, T>(t, "short", many(130, 8, 8, {130, 0, 400, 257, 1}), Layout::nhd, k::causal());
  both_say_the_same<kDim, T, T>(t, "short", many(33, 16, 4, {33, 1000, 0, 129, 500, 700}), Layout::paged_nhd,
                                k::window(100, 30) & k::soft_cap(20.f));
  both_say_the_same<kDim, T>(t, "short", many(200, 8, 8, {200}), Layout::nhd, k::no_mask());
}
// Results that the TMA unit writes: tiles and warpgroups that are full, begun and empty, in front of other sequences.
template <int kDim, class T>
void results_in_boxes(Tally& t) {
  for (const int64_t queries : {60, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 321, 640}) {
    AttentionCase c{{queries, queries, queries}, {queries, 700, 3}, 3, 3, kDim};
    c.aligned = true;
    both_say_the_same<kDim, T, T>(t, "results in boxes", c, Layout::nhd, k::causal());
    AttentionCase ragged{{queries, 0, 64, queries / 2 + 1, 128, queries}, {queries, 5, 700, 300, 90, 0}, 3, 3, kDim};
    ragged.aligned = ragged.ragged_q = true;
    both_say_the_same<kDim, T, T>(t, "results in boxes", ragged, Layout::nhd, k::causal());
    ragged.kv_heads = 1;
    both_say_the_same<kDim, T, T>(t, "results in boxes", ragged, Layout::paged_nhd, k::causal(), 2);
    if (queries % 64 != 0) continue;
    c.kv_heads = 1;
    both_say_the_same<kDim, T, T>(t, "results in boxes", c, Layout::paged_nhd, k::window(100, 0) & k::soft_cap(20.f));
  }
}
// Tiles of queries that few blocks share out: 1 to 17 of a head, some in a row, one behind the other, or in sections.
template <int kDim, class T>
void few_blocks(Tally& t, int64_t dim = kDim, int64_t v_dim = kDim) {
  const int rows = kDim == 64 ? 192 : 128;
  for (const int tiles : {1, 3, 4, 5, 9, 16, 17}) {
    const int64_t queries = int64_t(tiles) * rows - 70;
    AttentionCase c{{queries, queries}, {queries, 300}, 2, 2, dim, v_dim};
    c.aligned = true;
    both_say_the_same<kDim, T, T>(t, "few blocks", c, Layout::nhd, k::causal(), 4);
    if (tiles <= 5) both_say_the_same<kDim, T, T>(t, "few blocks", c, Layout::nhd, k::no_mask(), 3);
  }
}
// How many rows of results, of v_dim columns of each head from element `shift` on, are written in one go.
template <int kDim, class TO, class S>
int result_box_rows_of(const k::Exec& ex, const S& score, int64_t queries = 256, int64_t v_dim = kDim,
                       int64_t shift = 0, const int32_t* offsets = nullptr, int64_t heads = 1) {
  const k::half* const p = reinterpret_cast<const k::half*>(uintptr_t(1) << 20);  // planned with, never read
  TO* const out = reinterpret_cast<TO*>(uintptr_t(1) << 30) + shift;
  k::AttentionShape shape{2, queries, heads, 1, kDim, v_dim};
  shape.q_offsets = offsets;
  k::AttentionPlan plan;
  REQUIRE(k::attention_plan<kDim>(ex, k::load(p, heads * kDim),
                                  k::dense_kv(k::nhd(p, 256, 1, kDim), k::nhd(p, 256, 1, v_dim), 256),
                                  k::store(out, heads * v_dim), shape, score, {}, plan));
  return plan.result_box_rows;
}
// Keys and values of 8 and 4 bits, which are decoded.
template <int kDim, class T, class K, class Scale>
void coded_cases(Tally& t, const char* what, std::initializer_list<std::pair<int64_t, int64_t>> dims) {
  for (const auto& [dim, v_dim] : dims) {
    for (const int64_t queries : {1, 129, 300}) {
      for (const int64_t keys : {0, 1, 129, 1000}) {
        AttentionCase c{{queries, queries / 2}, {keys, keys / 3 * 2}, 6, queries % 2 == 0 ? 2 : 6, dim, v_dim};
        c.ragged_q = true, c.aligned = queries % 3 == 0;
        both_say_the_same<kDim, T, float, K, Scale>(t, what, c, Layout::nhd, k::causal());
        both_say_the_same<kDim, T, float, K, Scale>(t, what, c, Layout::paged_nhd,
                                                    k::window(100, 30) & k::soft_cap(20.f));
      }
    }
    AttentionCase even{{200, 200, 200}, {333, 200, 0}, 6, 2, dim, v_dim};
    both_say_the_same<kDim, T, float, K, Scale>(t, what, even, Layout::nhd, k::causal());
  }
}
// So many tiles of sequences of one length that blocks stay for several, there and back: what comes out is right, and
// each sequence alone has the same bits. Keys are as many as queries, more, or fewer by one.
template <int kDim, class T, class K = T, class Scale = k::Nothing>
void stays(Tally& t, int64_t queries, int64_t heads, int64_t kv_heads, int64_t dim = kDim, int64_t v_dim = kDim) {
  if (t.leaves_out()) return;
  AttentionCase c{{}, {}, heads, kv_heads, dim, v_dim};
  for (const int64_t beside : {0, 64, -1})
    for (int i = 0; i < 8; ++i) c.q_lens.push_back(queries), c.kv_lens.push_back(queries + beside);
  c.aligned = true;
  const int64_t batch = int64_t(c.q_lens.size());
  const Placement where(Layout::ragged, c.kv_lens, kv_heads);
  const DeviceKv<K, Scale> key(1, where, dim, ScaleOf::head, 1, 0, gap_behind<K>(dim)),
      value(2, where, v_dim, ScaleOf::head, 1, 0, gap_behind<K>(v_dim));
  const OnDevice<int32_t> offsets(where.offsets);
  AttentionData<T, T, DeviceMemory> together(c), alone(c);
  const Stream stream;
  const k::Exec ex(stream);
  // f of all arguments for so many sequences from the first on.
  const auto with_call = [&](AttentionData<T, T, DeviceMemory>& d, int64_t first, int64_t count, const auto& f) {
    const int64_t row = first * queries;
    return f(k::load(static_cast<const T*>(d.q.data()) + row * d.q.ld(), d.q.ld()),
             k::ragged_kv(key.tensor(), value.tensor(), offsets.data() + first),
             k::store(d.o.data() + row * d.o.ld(), d.o.ld()),
             k::AttentionShape{count, queries, heads, kv_heads, dim, v_dim}, k::causal(),
             k::Attention{}.lse(d.lse.data() + row * d.lse.ld(), d.lse.ld()));
  };
  const auto run = [&](AttentionData<T, T, DeviceMemory>& d, int64_t first, int64_t count) {
    const k::Status status =
        with_call(d, first, count, [&](const auto&... call) { return k::attention<kDim>(ex, call...); });
    t.expect(status.ok(), "stays: %s", status.reason());
  };
  k::AttentionPlan plan;
  const k::Status planned = with_call(
      together, 0, batch, [&](const auto&... call) { return k::attention_plan<kDim>(ex, call..., plan); });
  t.expect(planned.ok() && plan.blocks == sm_count(), "stays: %d blocks", int(plan.blocks));
  run(together, 0, batch);
  for (int64_t b = 0; b < batch; ++b) run(alone, b, 1);
  stream.wait();
  check(t, "stays", together, [&](int64_t row, int64_t x) { return together.q.value(row, x); }, key, value,
        causal_model(), precision_of<T>(key, value), 1997);
  alone.o.download(), alone.lse.download();
  int64_t others = 0;
  for (int64_t row = 0; row < together.o.rows(); ++row) {
    for (int64_t x = 0; x < together.o.cols(); ++x)
      others += value_of(together.o.get(row, x)) != value_of(alone.o.get(row, x));
    for (int64_t h = 0; h < heads; ++h) others += together.lse.get(row, h) != alone.lse.get(row, h);
  }
  t.expect(others == 0, "stays, %s: alone there are %d other results", c.describe().c_str(), int(others));
}
// So many sequences that blocks go on to further ones.
template <int kDim, class T, class K = T>
void many_sequences(Tally& t, int64_t dim = kDim, int64_t v_dim = kDim) {
  AttentionCase c{{}, {}, 16, 4, dim, v_dim};
  for (int i = 0; i < 600; ++i) c.q_lens.push_back(i % 7 * 11), c.kv_lens.push_back(i % 5 * 20 + i % 3);
  c.ragged_q = true;
  both_say_the_same<kDim, T, float, K>(t, "many sequences", c, Layout::nhd, k::causal());
}
// Keys and values come in boxes of the TMA unit where a box has 8 rows of a page or more, and otherwise by cp.async:
// the same bits.
template <int kDim, class T>
void boxes(Tally& t, int64_t dim, int64_t v_dim) {
  AttentionCase c{{300, 77, 1}, {700, 333, 0}, 6, 2, dim, v_dim};
  c.ragged_q = true;
  std::vector<float> first;
  const int keys = v_dim > 128 ? 80 : 128;
  const auto run = [&](Layout layout, int64_t page, int box_rows) {
    if (t.leaves_out()) return;
    const std::string name = c.describe() + ", pages of " + std::to_string(page);
    const Placement where(layout, c.kv_lens, c.kv_heads, page);
    const KvSide<T, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::token, 1, 0, gap_behind<T>(dim)),
        value(2, where, v_dim, ScaleOf::token, 1, 0, gap_behind<T>(v_dim));
    AttentionData<T, float, DeviceMemory> data(c);
    const OnDevice<int32_t> offsets(data.offsets);
    k::AttentionShape shape = data.shape();
    shape.q_offsets = offsets.data();
    const int64_t width = c.heads * v_dim;
    Device<float> o(data.o.rows(), width, width);
    const Stream stream;
    with_view(where, key, value, [&](const auto& kv) {
      k::AttentionPlan plan;
      t.expect(k::attention_plan<kDim>(k::Exec(stream), data.source(), kv, k::store(o.data(), width), shape,
                                       k::window(400, 0), {}, plan).ok() && plan.box_rows == box_rows,
               "%s: boxes have %d rows, not %d", name.c_str(), plan.box_rows, box_rows);
      const k::Status status = k::attention<kDim>(stream, data.source(), kv, k::store(o.data(), width), shape,
                                                  k::window(400, 0));
      t.expect(status.ok(), "%s: %s", name.c_str(), status.reason());
    });
    stream.wait();
    o.download();
    std::vector<float> results;
    for (int64_t r = 0; r < o.rows(); ++r)
      for (int64_t x = 0; x < width; ++x) results.push_back(o.get(r, x));
    if (first.empty()) first = results;
    t.expect(o.intact() && first.size() == results.size() &&
                 std::memcmp(first.data(), results.data(), first.size() * sizeof(float)) == 0,
             "%s: other results", name.c_str());
  };
  for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::ragged}) run(layout, 16, keys);
  for (const Layout layout : {Layout::paged_nhd, Layout::paged_hnd})
    for (const int64_t page : {1, 4, 8, 12, 16, 24, 64, 80, 128, 256}) {
      const int rows = int(std::gcd(page, int64_t(keys)));
      run(layout, page, rows % 8 == 0 ? rows : 0);
    }
}
// Masks in memory, whole tiles of which are denied, behind every second head as well.
template <int kDim, class T>
void masks(Tally& t) {
  const int64_t queries = 300, words = 25, rows = 8 * queries;
  std::vector<uint32_t> bits(size_t(rows * words));
  Random random(6);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t w = 0; w < words; ++w)
      bits[size_t(r * words + w)] = r % 7 == 0 && w % 9 < 5 ? 0 : r % 5 == 0 ? 0xffffffffu : uint32_t(random.bits());
  }
  const OnDevice<uint32_t> there(bits);
  AttentionCase c{{300, 77}, {777, 333}, 8, 2, kDim};
  c.ragged_q = true, c.aligned = true;
  const k::Bitmask mask = k::bitmask(there.data(), words, 0).head_stride(queries * words);
  both_say_the_same<kDim, T>(t, "mask", c, Layout::nhd, mask);
  both_say_the_same<kDim, T>(t, "mask, causal", c, Layout::paged_nhd, k::causal() & mask);
  both_say_the_same<kDim, T>(t, "tree", c, Layout::nhd, k::tree_mask(there.data(), words, 0));
  both_say_the_same<kDim, T>(t, "mask, window", c, Layout::nhd, k::window(100, 20) & mask & k::soft_cap(20.f));
}

// Logits that rise from tile to tile by less than outputs are brought under a larger one for, by about as much, and by
// far more; and that fall.
template <int kDim, class T, class K = T, class Scale = k::Nothing>
void slopes(Tally& t, int64_t dim = kDim, int64_t v_dim = kDim) {
  for (const float slope : {-0.02f, -0.05f, -2.f, 0.3f}) {
    const std::vector<float> all(8, slope);
    const OnDevice<float> on_device(all);
    AttentionCase c{{300, 77}, {700, 333}, 8, 2, dim, v_dim};
    c.ragged_q = true, c.aligned = true;
    both_say_the_same<kDim, T, float, K, Scale>(t, "slope", c, Layout::nhd, k::alibi(on_device.data()) & k::causal());
    both_say_the_same<kDim, T, float, K, Scale>(t, "slope", c, Layout::paged_nhd, k::alibi(on_device.data()));
  }
}
// Blocks that several sequences share, and heads at a distance of 0, are copied without the TMA unit.
template <int kDim, class T>
int box_rows_of(const k::Exec& ex, int64_t batch, int64_t block_stride, int64_t head_stride, int64_t kv_heads) {
  const T* p = reinterpret_cast<const T*>(uintptr_t(1) << 20);  // planned with, never read
  const auto tensor = k::strided(p, block_stride, 1024, head_stride);
  k::AttentionPlan plan;
  REQUIRE(k::attention_plan<kDim>(ex, k::load(p, 8 * kDim), k::dense_kv(tensor, tensor, 200),
                                  k::store(reinterpret_cast<T*>(uintptr_t(1) << 40), 8 * kDim),
                                  {batch, 200, 8, kv_heads, kDim}, k::causal(), {}, plan));
  CHECK(plan.warpgroups);
  CHECK((*plan.why_not == '\0') == (plan.box_rows > 0));
  return plan.box_rows;
}
// Whether blocks of so many sequences take several tiles each, there and back.
template <int kDim, class T>
bool takes_several(const k::Exec& ex) {
  const T* p = reinterpret_cast<const T*>(uintptr_t(1) << 20);
  k::AttentionPlan plan;
  REQUIRE(k::attention_plan<kDim>(ex, k::load(p, 8 * kDim),
                                  k::dense_kv(k::nhd(p, 130, 8, kDim), k::nhd(p, 130, 8, kDim), 130),
                                  k::store(reinterpret_cast<T*>(uintptr_t(1) << 40), 8 * kDim),
                                  {70, 130, 8, 8, kDim, kDim}, k::causal(), {}, plan));
  return 2 * plan.blocks < 70 * 8 * ((130 + plan.tile_rows - 1) / plan.tile_rows);
}

}  // namespace

TEST_CASE("attention for sm_90a: taken where it can be, and what it says is what the other kernel says") {
  Stream stream;
  const k::Exec ex(stream);
  if (!takes_hopper<128, k::bfloat16>(ex, 128)) return skip("needs kernels compiled for sm_90a, and such a GPU");
  CHECK(takes_hopper<64, k::half>(ex, 64));
  CHECK(takes_hopper<256, k::bfloat16>(ex, 256));
  CHECK(takes_hopper<256, k::bfloat16>(ex, 192, 0, 128));
  CHECK(!takes_hopper<256, k::bfloat16>(with_less(stream, 256), 192, 0, 128));
  CHECK(takes_hopper<128, k::half>(ex, 96));
  CHECK(takes_hopper<64, k::half>(ex, 56));
  CHECK(takes_hopper<128, k::bfloat16>(ex, 120));
  CHECK(!takes_hopper<256, k::bfloat16>(with_less(stream, 256), 256));
  CHECK(!takes_hopper<128, k::bfloat16>(ex, 128, 1));
  CHECK(!takes_hopper<128, k::bfloat16>(with_less(stream, 128), 128));
  CHECK(!takes_hopper<64, k::half>(with_less(stream, 64), 64));
  CHECK(takes_hopper<64, k::half, int8_t>(ex, 64));
  CHECK(takes_hopper<128, k::bfloat16, k::float8_e4m3>(ex, 128));
  CHECK(takes_hopper<256, k::half, k::float8_e5m2>(ex, 248));
  CHECK(!takes_hopper<128, k::half, int8_t>(ex, 128, 4));
  const auto why_not_with_less = [&] {
    const k::half* const p = reinterpret_cast<const k::half*>(uintptr_t(1) << 20);  // planned with, never read
    k::AttentionPlan plan;
    REQUIRE(k::attention_plan<128>(with_less(stream, 128), k::load(p, 128),
                                   k::dense_kv(k::nhd(p, 256, 1, 128), k::nhd(p, 256, 1, 128), 256),
                                   k::store(const_cast<k::half*>(p) + (1 << 29), 128), {1, 256, 1, 1, 128},
                                   k::causal(), {}, plan));
    return std::string(plan.why_not);
  };
  CHECK(why_not_with_less().find("more shared memory") != std::string::npos);
  CHECK(takes_several<64, k::half>(ex));
  CHECK(takes_several<128, k::bfloat16>(ex));
  CHECK(takes_several<256, k::bfloat16>(ex));
  Tally t;
  short_ones<64, k::half>(t);
  short_ones<128, k::bfloat16>(t);
  short_ones<256, k::bfloat16>(t), short_ones<256, k::bfloat16>(t, 192, 128);
  stays<128, k::bfloat16>(t, 3 * 128 - 1, 16, 16);
  stays<256, k::bfloat16>(t, 2 * 128 + 1, 16, 8), stays<256, k::bfloat16>(t, 2 * 128 + 1, 16, 8, 192, 128);
  stays<256, k::half, k::float8_e5m2>(t, 2 * 128 + 1, 16, 8);
  // In sections of heads.
  stays<64, k::half>(t, 8 * 192 + 1, 8, 8);
  stays<64, k::half, int8_t, k::half>(t, 8 * 128 + 1, 8, 8);
  stays<64, k::half>(t, 16 * 192 + 1, 2, 2);
  stays<128, k::bfloat16>(t, 17 * 128 + 1, 2, 1);
  stays<256, k::bfloat16>(t, 17 * 128 - 1, 2, 2), stays<256, k::bfloat16>(t, 17 * 128 - 1, 2, 2, 192, 128);
  many_cases<64, k::half>(t);
  many_cases<128, k::bfloat16>(t);
  many_cases<256, k::bfloat16>(t), many_cases<256, k::bfloat16>(t, 192, 128);
  // With products for fewer columns, and columns that are filled up with zeros.
  for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{8, 8}, {40, 56}, {56, 24}})
    some_cases<64, k::half>(t, dim, v_dim);
  for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{96, 96}, {72, 128}, {104, 8}, {64, 88}})
    some_cases<128, k::half>(t, dim, v_dim);
  for (const auto& [dim, v_dim] : {std::pair<int64_t, int64_t>{136, 40}, {136, 136}, {200, 128}, {64, 256}, {160, 120}})
    some_cases<256, k::bfloat16>(t, dim, v_dim);
  coded_cases<64, k::half, int8_t, k::half>(t, "int8", {{64, 64}, {40, 56}});
  coded_cases<128, k::bfloat16, k::float8_e4m3, k::Nothing>(t, "float8", {{128, 128}, {72, 104}});
  coded_cases<128, k::bfloat16, k::Int4, k::half>(t, "4 bits", {{128, 96}});
  coded_cases<256, k::half, k::float8_e5m2, float>(t, "float8", {{256, 256}, {200, 136}});
  CHECK(box_rows_of<128, k::half>(ex, 2, 1 << 20, 128, 4) == 128);
  CHECK(box_rows_of<128, k::half>(ex, 2, 0, 128, 4) == 0);
  CHECK(box_rows_of<128, k::half>(ex, 1, 0, 128, 4) == 128);
  CHECK(box_rows_of<128, k::half>(ex, 2, 1 << 20, 0, 4) == 0);
  CHECK(box_rows_of<128, k::half>(ex, 2, 1 << 20, 0, 1) == 128);
  CHECK(result_box_rows_of<128, k::half>(ex, k::causal()) == 64);
  CHECK(result_box_rows_of<64, k::half>(ex, k::no_mask()) == 64);
  CHECK(result_box_rows_of<128, k::half>(ex, k::no_mask()) == 0);
  CHECK(result_box_rows_of<256, k::half>(ex, k::causal()) == 0);
  CHECK(result_box_rows_of<128, float>(ex, k::causal()) == 0);
  CHECK(result_box_rows_of<128, k::half>(ex, k::causal(), 256, 120) == 0);
  CHECK(result_box_rows_of<128, k::half>(ex, k::causal(), 256, 128, 4) == 0);
  CHECK(result_box_rows_of<128, k::half>(ex, k::causal(), 33, 128, 0, nullptr, 8) == 0);  // of heads together
  const int32_t* const offsets = reinterpret_cast<const int32_t*>(64);
  CHECK(result_box_rows_of<128, k::half>(ex, k::causal(), 33, 128, 0, offsets, 8) == 64);  // long ones may be apart
  results_in_boxes<64, k::half>(t);
  results_in_boxes<128, k::bfloat16>(t);
  few_blocks<64, k::half>(t), few_blocks<128, k::bfloat16>(t), few_blocks<256, k::bfloat16>(t);
  few_blocks<256, k::bfloat16>(t, 192, 128);
  int in_a_thread = 0;  // that has not called the runtime before
  std::thread([&] { in_a_thread = box_rows_of<128, k::half>(ex, 2, 1 << 20, 128, 4); }).join();
  CHECK(in_a_thread == 128);
  masks<128, k::half>(t), masks<64, k::bfloat16>(t);
  slopes<64, k::half>(t), slopes<128, k::bfloat16>(t), slopes<256, k::half>(t);
  slopes<256, k::bfloat16>(t, 192, 128);
  slopes<128, k::bfloat16, k::float8_e4m3>(t);
  boxes<64, k::half>(t, 64, 64), boxes<64, k::half>(t, 40, 56);
  boxes<128, k::bfloat16>(t, 128, 128), boxes<128, k::half>(t, 72, 104);
  boxes<256, k::bfloat16>(t, 256, 256), boxes<256, k::bfloat16>(t, 192, 128);
  boxes<256, k::bfloat16>(t, 144, 72);
  many_sequences<64, k::half>(t);
  many_sequences<128, k::bfloat16>(t);
  many_sequences<256, k::bfloat16>(t), many_sequences<256, k::bfloat16>(t, 192, 128);
  many_sequences<128, k::bfloat16, k::float8_e4m3>(t);
  CHECK_TALLY(t);
}
