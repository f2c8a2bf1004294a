// Attention on the CPU: where keys and values lie.
#include "support/cpu_attention.h"
#include "support/threads.h"

using namespace test;

TEST_CASE("layouts") {
  Tally t;
  for (const AttentionCase& c : few_and_many()) {
    for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::ragged, Layout::paged_nhd, Layout::paged_hnd}) {
      const Placement where(layout, c.kv_lens, c.kv_heads);
      const KvSide<k::half> key(1, where, c.dim), value(2, where, c.dim, ScaleOf::head, 1, 2);
      check_kv(t, "layout " + std::to_string(int(layout)), c, where, key, value);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("pages of any size, scattered") {
  Tally t;
  for (const int64_t page : {1, 7, 16, 64, 128, 1000}) {
    for (const AttentionCase& c : few_and_many()) {
      const Placement where(Layout::paged_hnd, c.kv_lens, c.kv_heads, page);
      const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
      check_kv(t, "pages of " + std::to_string(page), c, where, key, value);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("results apart") {
  Tally t;
  const k::cpu::Exec cx = on_threads(2);
  for (const int64_t queries : {1, 30}) {
    const AttentionCase c{{queries}, {90}, 4, 2, 24};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<k::half> key(1, where, c.dim), value(2, where, c.dim);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
    AttentionData<> d(c);
    for (const int64_t first : {48, 8, 31}) {
      const int64_t cols = d.o.cols();
      std::vector<float> memory(k::cpu::decode_workspace_bytes(d.shape()) / sizeof(float));
      const auto expect = [&](const char* name, const auto& run) {
        Guarded<float> a(queries, first, first + 1), b(queries, cols - first, cols);
        const k::Status plain = run(d.sink());
        const k::Status apart = run(
            k::clamp(-99, 99) | k::apart(k::store(a.data(), a.ld()), first, k::store(b.data(), b.ld()), cols - first));
        t.expect(plain.ok() && apart.ok(), "%s: %s%s", name, plain.reason(), apart.reason());
        d.o.download(), a.download(), b.download();
        t.expect(a.intact() && b.intact(), "%s: wrote outside its rows", name);
        for (int64_t r = 0; r < queries; ++r) {
          for (int64_t x = 0; x < cols; ++x)
            t.expect((x < first ? a.get(r, x) : b.get(r, x - first)) == d.o.get(r, x), "%s: row %d col %d", name,
                     int(r), int(x));
        }
      };
      expect("attention", [&](const auto& sink) {
        return k::cpu::attention(cx, d.source(), kv, sink, d.shape(), k::causal(), d.options());
      });
      expect("decode", [&](const auto& sink) {
        return k::cpu::decode(cx, d.source(), kv, sink, d.shape(), k::causal(),
                              {memory.data(), memory.size() * sizeof(float)}, d.options());
      });
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("a view of one's own") {
  Tally t;
  for (const int64_t queries : {1, 30}) {
    check_kv(t, "formula", {{queries}, {333}, 2, 1, 40}, Formula{}, Formula::expected_key, Formula::expected_value);
  }
  CHECK_TALLY(t);
}

namespace {

// What dense_kv() is of nhd() tensors, for one sequence; values have scales.
struct ByHand : k::KvView {
  const k::half* keys;
  const int8_t* values;
  const float* scales;
  int64_t count, heads, dim;
  int64_t length(int64_t) const { return count; }
  auto key(int64_t, int64_t head, int64_t pos) const {
    return k::KvRun{k::load(keys + (pos * heads + head) * dim, heads * dim), count - pos};
  }
  auto value(int64_t, int64_t head, int64_t pos) const {
    return k::KvRun{k::load(values + (pos * heads + head) * dim, heads * dim), count - pos, scales + pos * heads + head,
                    heads};
  }
};

}  // namespace

TEST_CASE("a view of one's own over tensors in memory") {
  const int64_t queries = 3, count = 70, heads = 2, dim = 16, cols = heads * dim;
  std::vector<k::half> keys(size_t(count * cols));
  std::vector<int8_t> values(keys.size());
  std::vector<float> scales(size_t(count * heads)), q(size_t(queries * cols));
  Random random(1);
  for (k::half& x : keys) x = make<k::half>(random.normal());
  for (int8_t& x : values) x = int8_t(random.uniform(-127, 127));
  for (float& x : scales) x = float(random.uniform(0.1, 1));
  for (float& x : q) x = float(random.normal());
  ByHand own;
  own.keys = keys.data(), own.values = values.data(), own.scales = scales.data();
  own.count = count, own.heads = heads, own.dim = dim;
  const float* const by = scales.data();
  const auto kv = k::dense_kv(k::nhd(keys.data(), count, heads, dim),
                              k::nhd(values.data(), count, heads, dim).scales(by, 0, heads, 1), count);
  const auto run = [&](const auto& view) {
    std::vector<float> o(q.size());
    CHECK(k::cpu::attention(on_threads(2), k::load(q.data(), cols), view, k::store(o.data(), cols),
                            {1, queries, heads, heads, dim}, k::causal()));
    return o;
  };
  CHECK(run(own) == run(kv));
}

// Another view, whose runs end elsewhere for each head.
template <class Kv>
struct CutRuns : k::KvView {
  Kv kv;
  explicit CutRuns(const Kv& all) : kv(all) {}
  int64_t length(int64_t b) const { return kv.length(b); }
  auto key(int64_t b, int64_t head, int64_t pos) const { return cut(kv.key(b, head, pos), head); }
  auto value(int64_t b, int64_t head, int64_t pos) const { return cut(kv.value(b, head, pos), 2 - head); }
  template <class Run>
  static Run cut(Run run, int64_t head) {
    run.count = k::lesser<int64_t>(run.count, 1 + 20 * head);
    return run;
  }
};

TEST_CASE("runs that end elsewhere for each head") {
  Tally t;
  const AttentionCase c{{2, 2}, {333, 70}, 6, 3, 40};
  const Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 64);
  const KvSide<k::half> key(1, where, c.dim);
  const KvSide<int8_t, float> value(2, where, c.dim, ScaleOf::token);
  const auto kv = k::paged_kv(key.tensor(), value.tensor(), k::pages(where.table.data(), where.table_ld, where.page),
                              where.short_lengths.data());
  check_kv(t, "cut", c, CutRuns<std::decay_t<decltype(kv)>>(kv), key, value);
  CHECK_TALLY(t);
}

TEST_CASE("ragged queries, with pages of keys") {
  Tally t;
  for (AttentionCase c : {AttentionCase{{5, 0, 1, 32, 9}, {700, 20, 0, 40, 9}, 4, 2, 40},
                          AttentionCase{{70, 1, 0, 130}, {333, 20, 5, 90}, 4, 2, 40}}) {
    c.ragged_q = true;
    for (const int64_t page : {7, 16}) {
      const Placement where(page == 7 ? Layout::paged_nhd : Layout::paged_hnd, c.kv_lens, c.kv_heads, page);
      const KvSide<k::half> key(1, where, c.dim), value(2, where, c.dim);
      check_kv(t, "page " + std::to_string(page), c, where, key, value);
    }
  }
  CHECK_TALLY(t);
}

// Pages that no query's window reaches have numbers that lie nowhere in memory.
TEST_CASE("keys outside a window are not touched") {
  Tally t;
  for (const int64_t queries : {5, 40}) {
    const AttentionCase c{{queries, queries}, {700, 1333}, 4, 2, 40};
    const int64_t left = 37;
    const Placement where(Layout::paged_nhd, c.kv_lens, c.kv_heads, 16);
    const KvSide<k::half> key(1, where, c.dim), value(2, where, c.dim);
    std::vector<int32_t> table = where.table;
    for (size_t b = 0; b < c.kv_lens.size(); ++b) {
      for (int64_t page = 0; (page + 1) * 16 <= c.kv_lens[b] - c.q_lens[b] - left; ++page)
        table[b * size_t(where.table_ld) + size_t(page)] = -1000000000;
    }
    const auto kv = k::paged_kv(key.tensor(), value.tensor(), k::pages(table.data(), where.table_ld, 16),
                                where.short_lengths.data());
    AttentionData<> whole(c), split(c);
    whole.check(t, "window",
                k::cpu::attention(on_threads(2), whole.source(), kv, whole.sink(), whole.shape(), k::window(left, 0),
                                  whole.options()),
                key, value, window_model(left, 0), 3);
    if (queries > 32) continue;
    std::vector<float> memory(k::cpu::decode_workspace_bytes(split.shape()) / sizeof(float));
    split.check(t, "window, split",
                k::cpu::decode(on_threads(2), split.source(), kv, split.sink(), split.shape(), k::window(left, 0),
                               {memory.data(), memory.size() * sizeof(float)}, split.options()),
                key, value, window_model(left, 0), 3);
  }
  CHECK_TALLY(t);
}

TEST_CASE("as many keys as there can be") {
  Tally t;
  for (const int64_t queries : {3, 30}) {
    const AttentionCase c{{queries}, {FarFormula::seen}, 2, 1, 40};
    AttentionData<> whole(c), split(c);
    std::vector<float> memory(k::cpu::decode_workspace_bytes(split.shape()) / sizeof(float));
    whole.check(t, "far",
                k::cpu::attention(on_threads(2), whole.source(), FarFormula{}, whole.sink(), whole.shape(),
                                  k::window(50, 0), whole.options()),
                FarFormula::expected_key, FarFormula::expected_value, window_model(50, 0));
    split.check(t, "far, split",
                k::cpu::decode(on_threads(2), split.source(), FarFormula{}, split.sink(), split.shape(),
                               k::window(50, 0), {memory.data(), memory.size() * sizeof(float)}, split.options()),
                FarFormula::expected_key, FarFormula::expected_value, window_model(50, 0));
  }
  CHECK_TALLY(t);
}

TEST_CASE("offsets beyond 2^31 elements") {
  // One sequence at the far end of a tensor of which nothing else is ever touched.
  const int64_t heads = 2, dim = 64, capacity = int64_t(1) << 25, pos_stride = heads * dim;
  const size_t bytes = size_t(capacity) * size_t(pos_stride) * sizeof(k::half);
  auto* const p = static_cast<k::half*>(std::calloc(bytes, 1));
  if (!p) return skip("needs 8 GB of address space");
  Tally t;
  const AttentionCase c{{2}, {40}, 4, 2, dim};
  const Placement where(Layout::nhd, c.kv_lens, heads);
  const KvSide<k::half> key(1, where, dim), value(2, where, dim);
  const int64_t first = capacity - 128;
  for (int64_t pos = 0; pos < 40; ++pos) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t x = 0; x < dim; ++x) {
        p[(first + pos) * pos_stride + h * dim + x] = make<k::half>(key(0, h, pos, x));
        p[(first + 64 + pos) * pos_stride + h * dim + x] = make<k::half>(value(0, h, pos, x));
      }
    }
  }
  const int32_t offsets[] = {int32_t(first), int32_t(first + 40)};
  const auto tensor = [&](int64_t shift) {
    return k::strided(static_cast<const k::half*>(p + shift * pos_stride), 0, pos_stride, dim);
  };
  check_kv(t, "far away", c, k::ragged_kv(tensor(0), tensor(64), offsets), key, value);
  CHECK_TALLY(t);
  std::free(p);
}
