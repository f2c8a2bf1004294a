// Attention on the CPU: shapes, lengths, heads, threads, splits.
#include <kernels/cpu/attention.h>

#include "support/attention.h"
#include "support/small_stack.h"
#include "support/threads.h"

using namespace test;

namespace {

// One case on dense keys and values of floats, by attention() and, with few queries, by decode().
template <class S>
void check(Tally& t, const AttentionCase& c, const S& score, const ScoreModel& model, int64_t step = 1) {
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<float> key(1, where, c.dim), value(2, where, c.value_dim());
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
  AttentionData<> whole(c);
  const k::cpu::Exec cx = on_threads(c.threads);
  whole.check(t, "attention",
              k::cpu::attention(cx, whole.source(), kv, whole.sink(), whole.shape(), score, whole.options()), key,
              value, model, step);
  if (c.most_queries() > 32) return;
  AttentionData<> split(c);
  std::vector<float> memory(k::cpu::decode_workspace_bytes(split.shape()) / sizeof(float));
  const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
  split.check(t, "decode",
              k::cpu::decode(cx, split.source(), kv, split.sink(), split.shape(), score, workspace, split.options()),
              key, value, model, step);
}

}  // namespace

TEST_CASE("every head dimension") {
  Tally t;
  for (int64_t dim = 8; dim <= 256; dim += 8) {
    check(t, {{3}, {37}, 2, 1, dim}, k::causal(), causal_model());
    if (dim % 24 == 0) check(t, {{40}, {37}, 1, 1, dim}, k::causal(), causal_model(), 7);
  }
  for (const auto& dims :
       {std::pair<int64_t, int64_t>{512, 512}, {192, 128}, {576, 512}, {64, 256}, {8, 512}, {256, 8}}) {
    check(t, {{2}, {70}, 3, 1, dims.first, dims.second}, k::causal(), causal_model());
    check(t, {{30}, {70}, 1, 1, dims.first, dims.second}, k::causal(), causal_model(), 7);
  }
  CHECK_TALLY(t);
}

TEST_CASE("every group of heads") {
  Tally t;
  for (const int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16, 64}) {
    for (const int64_t queries : {1, 3, 20})
      check(t, {{queries}, {150}, 2 * group, 2, 24}, k::causal(), causal_model(), group);
    if (group > 8) continue;
    AttentionCase turns{{1}, {150}, 9 * group, 9, 24};  // on one thread up to 8 heads of keys take turns
    turns.threads = 1;
    check(t, turns, k::causal(), causal_model());
  }
  CHECK_TALLY(t);
}

TEST_CASE("every length") {
  Tally t;
  for (int64_t length = 0; length <= 1100; length += length < 70         ? 1
                                                     : length % 64 == 62 ? 1
                                                     : length % 64 == 63 ? 1
                                                     : length % 64 == 0  ? 1
                                                                         : 61) {
    check(t, {{1}, {length}, 2, 1, 16}, k::no_mask(), {});
    if (length % 5 == 0) check(t, {{19}, {length}, 1, 1, 16}, k::causal(), causal_model(), 5);
  }
  CHECK_TALLY(t);
}

TEST_CASE("any number of queries") {
  Tally t;
  for (const int64_t queries : {1, 2, 7, 8, 9, 13, 14, 15, 31, 32, 33, 63, 127, 128, 200, 400}) {
    check(t, {{queries}, {130}, 3, 1, 32}, k::causal(), causal_model(), queries > 33 ? 41 : 3);
    check(t, {{queries}, {130}, 1, 1, 32}, k::no_mask(), {}, queries > 33 ? 41 : 3);
  }
  CHECK_TALLY(t);
}

TEST_CASE("a thread needs no more stack than is said, for many queries and few") {
  Tally t;
  for (const int64_t queries : {1, 200}) {
    const AttentionCase c{{queries}, {300}, 8, 8, 128};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
    AttentionData<> data(c);
    k::Status status = k::invalid("it was not called");
    on_stack(kStackBytes, [&] {
      status = k::cpu::attention(k::cpu::Exec{1}, data.source(), kv, data.sink(), data.shape(), k::causal(),
                                 data.options());
    });
    data.check(t, "attention", status, key, value, causal_model(), 41);
  }
  CHECK_TALLY(t);
}

TEST_CASE("ragged batches, with empty sequences") {
  Tally t;
  AttentionCase c{{5, 0, 1, 32, 9}, {700, 20, 0, 40, 9}, 4, 2, 40};
  c.ragged_q = true;
  check(t, c, k::causal(), causal_model(), 3);
  check(t, c, k::no_mask(), {}, 3);
  c.q_lens = {100, 1, 0, 50, 3};
  c.kv_lens = {30, 1, 0, 900, 0};
  check(t, c, k::causal(), causal_model(), 7);
  c.q_lens = {0, 0};
  c.kv_lens = {0, 5};
  AttentionData<> none(c);
  const auto kv = k::dense_kv(k::nhd(none.q.data(), 5, 2, 40), k::nhd(none.q.data(), 5, 2, 40), 5);
  CHECK(k::cpu::attention(on_threads(2), none.source(), kv, none.sink(), none.shape(), k::causal()));
  CHECK_TALLY(t);
}

TEST_CASE("a scale of one's own") {
  Tally t;
  AttentionCase c{{3, 3}, {50, 60}, 4, 4, 32};
  c.scale = 0.7;
  check(t, c, k::causal(), causal_model());
  c.scale = -0.2;
  check(t, c, k::causal(), causal_model());
  CHECK_TALLY(t);
}

TEST_CASE("the output may stand where the queries were") {
  Tally t;
  for (const int64_t queries : {3, 200}) {
    const AttentionCase c{{queries, queries}, {250, 60}, 4, 4, 32};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
    const k::cpu::Exec cx = on_threads(3);
    AttentionData<> apart(c);
    apart.check(t, "apart",
                k::cpu::attention(cx, apart.source(), kv, apart.sink(), apart.shape(), k::causal(), apart.options()),
                key, value, causal_model(), 5);
    for (const bool split : {false, true}) {
      if (split && queries > 32) continue;
      AttentionData<> d(c);
      std::vector<float> memory(k::cpu::decode_workspace_bytes(d.shape()) / sizeof(float));
      const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
      const auto sink = k::store(d.q.data(), d.q.ld());
      const k::Status status = split ? k::cpu::decode(cx, d.source(), kv, sink, d.shape(), k::causal(), workspace)
                                     : k::cpu::attention(cx, d.source(), kv, sink, d.shape(), k::causal());
      t.expect(status.ok(), "%s", status.reason());
      d.q.download();
      t.expect(d.q.intact(), "wrote between rows");
      bool same = true;
      for (int64_t row = 0; row < d.q.rows(); ++row) {
        for (int64_t col = 0; col < d.q.cols(); ++col) same = same && d.q.get(row, col) == apart.o.get(row, col);
      }
      t.expect(same, "%s of %d queries in place gives other results", split ? "decode" : "attention", int(queries));
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("maps on queries and results, and other types of them") {
  Tally t;
  const AttentionCase c{{4, 4}, {90, 33}, 4, 2, 48};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half> key(1, where, c.dim);
  const KvSide<k::bfloat16> value(2, where, c.dim);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
  AttentionData<k::half, k::bfloat16> plain(c);
  plain.check(
      t, "half to bfloat16",
      k::cpu::attention(on_threads(2), plain.source(), kv, plain.sink(), plain.shape(), k::causal(), plain.options()),
      key, value, causal_model());
  AttentionData<k::half, float> mapped(c);
  const k::Status status =
      k::cpu::attention(k::cpu::Exec{1}, mapped.source() | k::scale(0.5), kv, k::scale(4) | mapped.sink(),
                        mapped.shape(), k::causal(), mapped.options().scale(2 / std::sqrt(48.0)));
  mapped.check(
      t, "maps", status, key, [&](int64_t b, int64_t h, int64_t pos, int64_t x) { return 4 * value(b, h, pos, x); },
      causal_model());
  CHECK_TALLY(t);
}

TEST_CASE("threads and the rest of the batch change nothing; many queries are as many decodes") {
  Tally t;
  const AttentionCase c{{3, 3, 3}, {2500, 77, 9000}, 4, 2, 32};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half> key(1, where, c.dim), value(2, where, c.dim);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
  const auto run = [&](AttentionData<>& d, int threads, bool split) {
    std::vector<float> memory(k::cpu::decode_workspace_bytes(d.shape()) / sizeof(float), 7.f);
    const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
    const k::cpu::Exec cx = on_threads(threads);
    const k::Status status =
        split ? k::cpu::decode(cx, d.source(), kv, d.sink(), d.shape(), k::causal(), workspace, d.options())
              : k::cpu::attention(cx, d.source(), kv, d.sink(), d.shape(), k::causal(), d.options());
    t.expect(status.ok(), "%s", status.reason());
    d.o.download();
    d.lse.download();
  };
  for (const bool split : {false, true}) {
    AttentionData<> one(c);
    run(one, 1, split);
    one.check(t, "one thread", {}, key, value, causal_model(), 5);
    for (const int threads : {2, 3, 16}) {
      AttentionData<> more(c);
      run(more, threads, split);
      t.expect(more.o.bytes() == one.o.bytes() && more.lse.bytes() == one.lse.bytes(), "%d threads give other bits",
               threads);
    }
    // The first sequence alone.
    AttentionCase alone = c;
    alone.q_lens.resize(1);
    alone.kv_lens.resize(1);
    AttentionData<> first(alone);
    for (int64_t r = 0; r < first.q.rows(); ++r) {
      for (int64_t i = 0; i < first.q.cols(); ++i) first.q.set(r, i, one.q.get(r, i));
    }
    first.q.upload();
    run(first, 2, split);
    for (int64_t r = 0; r < first.o.rows(); ++r) {
      for (int64_t i = 0; i < first.o.cols(); ++i)
        t.expect(first.o.get(r, i) == one.o.get(r, i), "alone: other bits in row %d", int(r));
    }
  }
  CHECK_TALLY(t);
}
