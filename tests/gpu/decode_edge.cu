// Decoding on the GPU: plans, views of one's own that say their alignment, what is not finite, and shapes at the edge.
#include "support/gpu_decode.cuh"
#include "support/heads.h"
#include "support/not_finite.h"

using namespace test;

namespace {

const k::DecodeMode kModes[] = {k::DecodeMode::precise, k::DecodeMode::tensor, k::DecodeMode::plain};

// Runs of positions that lie side by side, the last run first in memory.
template <class T>
struct Runs : k::KvView {
  using Codes = k::DirectLoad<T>;
  const T *keys, *values;
  int64_t run, count, dim;
  Runs(const T* k, const T* v, int64_t r, int64_t c, int64_t d) : keys(k), values(v), run(r), count(c), dim(d) {}

  KERNELS_HD int64_t runs() const { return (count + run - 1) / run; }
  KERNELS_HD int64_t row(int64_t head, int64_t pos) const {
    return (head * runs() + runs() - 1 - pos / run) * run + pos % run;
  }
  KERNELS_HD int64_t length(int64_t) const { return count; }
  KERNELS_HD k::KvRun<Codes> at(const T* p, int64_t head, int64_t pos) const {
    return {Codes(p + row(head, pos) * dim, dim), run - pos % run, nullptr, 0};
  }
  KERNELS_HD k::KvRun<Codes> key(int64_t, int64_t head, int64_t pos) const { return at(keys, head, pos); }
  KERNELS_HD k::KvRun<Codes> value(int64_t, int64_t head, int64_t pos) const { return at(values, head, pos); }
};
template <class T>
struct AlignedRuns : Runs<T> {
  int bytes = 16;
  using Runs<T>::Runs;
  int alignment() const { return bytes; }
};

bool same(const char* got, const char* want) {
  const bool yes = std::string(got) == want;
  if (!yes) std::printf("got \"%s\", want \"%s\"\n", got, want);
  return yes;
}

}  // namespace

// ---- plans ---------------------------------------------------------------------------------------------------------

namespace {

struct Plans {
  Stream stream;
  Device<k::half> memory{1, 1 << 16, 1 << 16}, results{1, 1 << 16, 1 << 16};
  const k::half* p = memory.data();
  k::Status status;

  template <class Kv, class Q>
  k::AttentionPlan of(const Kv& kv, const Q& q, k::half* o, const k::AttentionShape& shape,
                      k::DecodeMode mode = k::DecodeMode::automatic, const k::Attention& options = {}) {
    k::AttentionPlan plan;
    status = k::decode_plan<64>(stream, q, kv, k::store(o, 4096), shape, k::no_mask(), options, mode, plan);
    return plan;
  }
  template <class Kv>
  k::AttentionPlan of(const Kv& kv, int64_t dim = 64, k::DecodeMode mode = k::DecodeMode::automatic) {
    return of(kv, k::load(p, 4096), results.data(), {2, 1, 4, 2, dim}, mode);
  }
  template <class T>
  static auto dense(const T* keys, int64_t dim = 64) {
    return k::dense_kv(k::nhd(keys, 32, 2, dim), k::nhd(keys, 32, 2, dim), 32);
  }
};

}  // namespace

TEST_CASE("decode_plan: tensor cores, and what is asked of them") {
  Plans plans;
  const auto kv = plans.dense(plans.p);
  k::AttentionPlan plan = plans.of(kv);
  CHECK(plans.status);
  CHECK(plan.path == k::AttentionPath::precise);
  CHECK((plan.tile_rows == 8 && (plan.tile_keys == 128 || plan.tile_keys == 256) && plan.tile_dim == 64 &&
         plan.tile_v_dim == 64 && plan.heads_together));
  CHECK((plan.query_pack == 8 && plan.key_pack == 8 && plan.value_pack == 8 && plan.result_pack == 4));
  CHECK((plan.splits == 0 && plan.blocks >= 1 && plan.blocks <= sm_count()));
  CHECK(same(plan.why_not, ""));
  plan = plans.of(kv, 64, k::DecodeMode::tensor);
  CHECK((plan.path == k::AttentionPath::tensor && same(plan.why_not, "")));
  plan = plans.of(kv, 64, k::DecodeMode::plain);
  CHECK((plan.path == k::AttentionPath::plain && plan.key_pack == 8 && plan.value_pack == 4 &&
         same(plan.why_not, "the mode asks for CUDA cores")));
  // Twelve rows are more than a tile of eight.
  plan = plans.of(kv, k::load(plans.p, 4096), plans.results.data(), {2, 6, 4, 2, 64});
  CHECK((plan.path == k::AttentionPath::precise && plan.tile_rows == 16));
  plan = plans.of(kv, k::load(plans.p, 4096), plans.results.data(), {2, 9, 4, 2, 64});
  CHECK((plan.path == k::AttentionPath::precise && plan.tile_rows == 32));
  // Two tiles of half as many rows, where all run at once and there are few keys; with 128 columns and more than 16
  // rows also if nothing is known of them.
  const auto rows_of = [&](auto dim, int sms, int64_t queries, const k::Attention& options) {
    k::DeviceInfo device = k::Exec{}.device();
    device.sm_count = sms;
    const k::Status status = k::decode_plan<dim()>(
        k::Exec(plans.stream, device), k::load(plans.p, 4 * dim()), plans.dense(plans.p, dim()),
        k::store(plans.results.data(), 4 * dim()), {2, queries, 4, 2, dim()}, k::no_mask(), options, plan);
    INFO(status.reason());
    CHECK(status.ok());
    return plan.tile_rows;
  };
  const std::integral_constant<int, 64> narrow{};
  const std::integral_constant<int, 128> usual{};
  const std::integral_constant<int, 256> wide{};
  const auto few = k::Attention{}.most_keys(32768), many = k::Attention{}.most_keys(32769);
  CHECK((rows_of(usual, 8, 9, few) == 16 && rows_of(usual, 7, 9, few) == 32 && rows_of(usual, 8, 9, many) == 32));
  CHECK(rows_of(usual, 8, 9, {}) == 16);
  CHECK((rows_of(narrow, 8, 6, few) == 8 && rows_of(narrow, 8, 9, few) == 16 && rows_of(narrow, 80, 17, few) == 32));
  CHECK((rows_of(narrow, 7, 6, few) == 16 && rows_of(narrow, 7, 9, few) == 32));
  CHECK((rows_of(narrow, 8, 6, many) == 16 && rows_of(narrow, 8, 9, many) == 32));
  CHECK((rows_of(narrow, 8, 6, k::Attention{few}.splits(5)) == 16 && rows_of(narrow, 8, 6, {}) == 16));
  CHECK((rows_of(wide, 8, 6, few) == 8 && rows_of(wide, 7, 6, few) == 16 && rows_of(wide, 12, 9, many) == 16));
  CHECK(rows_of(wide, 8, 6, k::Attention{}.splits(5)) == 16);
  plan = plans.of(kv, k::load(plans.p, 4096), plans.results.data(), {2, 1, 4, 2, 64}, k::DecodeMode::automatic,
                  k::Attention{}.splits(5));
  CHECK(plan.splits == 5);
  // Codes of two heads together: where there are many sequences, and few rows.
  const auto key_heads = [&](int64_t sequences, int64_t heads, int64_t kv_heads, int splits = 0) {
    const auto tensor = k::nhd(reinterpret_cast<const int8_t*>(plans.p), 32, kv_heads, 64);
    plan = plans.of(k::dense_kv(tensor, tensor, 32), k::load(plans.p, 4096), plans.results.data(),
                    {sequences, 1, heads, kv_heads, 64}, k::DecodeMode::automatic,
                    splits > 0 ? k::Attention{}.splits(splits) : k::Attention{});
    CHECK(plans.status);
    CHECK(plan.path == k::AttentionPath::precise);
    return plan.key_heads;
  };
  CHECK(key_heads(16, 48, 24) == (sm_count() <= 16 * 12 ? 2 : 1));
  CHECK((key_heads(1, 48, 24) == 1 && key_heads(16, 48, 24, 5) == 1));
  CHECK((key_heads(16, 24, 24) == 1 && key_heads(16, 50, 25) == 1 && key_heads(16, 60, 10) == 1));
  const auto said = [&](int64_t most, int64_t sequences = 2, int64_t queries = 1) {
    return plans.of(kv, k::load(plans.p, 4096), plans.results.data(), {sequences, queries, 4, 2, 64},
                    k::DecodeMode::automatic, k::Attention{}.most_keys(most));
  };
  // Four items: a block of 128 keys each, then clusters of up to 8, or 16 where these all run at once, in which warps
  // take 8 tiles at most.
  CHECK((said(100).blocks == 4 && said(100).splits == 1 && said(100).tile_keys == 128 &&
         said(100).path == k::AttentionPath::precise));
  if (have_clusters()) {
    CHECK((said(200).splits == 2 && said(1000).splits == 8 && said(1000).blocks == 32));
    const int largest = said(2048).splits;
    CHECK((largest == 8 || largest == 16));
    CHECK((said(1024 * largest).splits == largest && said(1024 * largest + 1).splits == 0));
    CHECK((said(1, 10000).splits == 0 && said(0).splits == 0));
    // Each 8 rows have a cluster of their own; in two of them warps take 2 tiles of keys at most, in more of them 4.
    CHECK((said(128, 2, 5).splits == 1 && said(128, 2, 5).blocks == 8 && said(128, 2, 5).tile_rows == 8));
    CHECK((said(1000, 2, 5).splits == 8 && said(1000, 2, 9).splits == 8 && said(1000, 2, 9).blocks == 96));
    const int two = said(2000, 2, 5).splits, three = said(2000, 2, 9).splits;
    CHECK((two >= 8 && said(256 * two, 2, 5).splits == two && said(256 * two + 1, 2, 5).splits == 0));
    CHECK((three == 8 && said(512 * three, 2, 9).splits == 8 && said(512 * three + 1, 2, 9).splits == 0));
    // Fewer multiprocessors than clusters of two would take.
    k::DeviceInfo small = k::Exec{}.device();
    small.sm_count = 7;
    k::AttentionPlan less;
    REQUIRE(k::decode_plan<64>(k::Exec(plans.stream, small), k::load(plans.p, 4096), kv,
                               k::store(plans.results.data(), 4096), {2, 1, 4, 2, 64}, k::no_mask(),
                               k::Attention{}.most_keys(400), k::DecodeMode::automatic, less));
    CHECK((less.splits == 1 && less.blocks == 4));
  } else {
    CHECK((said(512).splits == 1 && said(513).splits == 0));
  }
  // So many items that no two blocks can have one together, and warps take 4 tiles; one more than run at a time.
  const int64_t most = sm_count() / 2;
  CHECK((said(512, most).splits == 1 && said(512, most).blocks == 2 * most && said(513, most).splits == 0));
  CHECK(said(100, most + 1).splits == 0);
  plan = plans.of(kv, k::load(plans.p + 1, 4096), plans.results.data() + 1, {2, 1, 4, 2, 64});
  CHECK((plan.path == k::AttentionPath::precise && plan.query_pack == 1 && plan.result_pack == 1));
  plan = plans.of(kv, k::load(plans.p, 4096), plans.results.data(), {0, 1, 4, 2, 64});
  CHECK((plans.status && plan.blocks == 0));
  (void)plans.of(kv, k::load(plans.p, 4096), plans.results.data(), {2, 33, 4, 2, 64});
  CHECK(!plans.status);
}

TEST_CASE("decode_plan: why not on tensor cores") {
  Plans plans;
  const auto expect_plain = [&](const k::AttentionPlan& plan, int key_pack, int value_pack, const char* why) {
    CHECK(plans.status);
    CHECK(plan.path == k::AttentionPath::plain);
    CHECK((plan.tile_rows == 8 && plan.query_pack == 1 && plan.key_pack == key_pack && plan.value_pack == value_pack));
    CHECK(same(plan.why_not, why));
  };
  const char *begin = "keys do not begin at multiples of 16 bytes",
             *wide = "keys or values have more than 16 bits, which tensor cores would round";
  expect_plain(plans.of(plans.dense(plans.p + 1)), 1, 1, begin);
  expect_plain(plans.of(k::dense_kv(k::nhd(plans.p, 32, 2, 64), k::nhd(plans.p + 4, 32, 2, 64), 32)), 8, 4,
               "values do not begin at multiples of 16 bytes");
  (void)plans.of(plans.dense(plans.p + 1), 64, k::DecodeMode::precise);
  CHECK(plans.status.code() == k::Code::unsupported);
  const auto* const codes = reinterpret_cast<const int8_t*>(plans.p);
  const auto sixteen = k::strided(codes, 32 * 64, 64, 32);  // 24 codes of 32
  expect_plain(plans.of(k::dense_kv(sixteen, sixteen, 32), 24), 8, 4, "keys do not end at multiples of 16 bytes");
  const auto* const floats = reinterpret_cast<const float*>(plans.p);
  expect_plain(plans.of(plans.dense(floats)), 4, 4, wide);
  expect_plain(plans.of(plans.dense(floats + 1)), 1, 1, wide);
  expect_plain(plans.of(k::dense_kv(k::nhd(plans.p, 32, 2, 64), k::nhd(floats, 32, 2, 64), 32)), 8, 4, wide);
  expect_plain(plans.of(Formula{}), 8, 4, "the view computes its keys or values");
  expect_plain(plans.of(Runs<k::half>(plans.p, plans.p, 16, 32, 64)), 1, 1,
               "the view does not say its alignment(): see kv.h");
  AlignedRuns<k::half> runs(plans.p, plans.p, 16, 32, 64);
  CHECK(plans.of(runs).path == k::AttentionPath::precise);
  runs.bytes = 8;
  expect_plain(plans.of(runs), 1, 1, begin);
  runs.bytes = 48;
  CHECK(plans.of(runs).path == k::AttentionPath::precise);
}

// ---- views and accesses --------------------------------------------------------------------------------------------

TEST_CASE("decode: a view that says its alignment") {
  Tally t;
  const int64_t dim = 64, count = 333;
  for (const int64_t run : {1, 5, 16, 100, 1000}) {
    const int64_t rows = 2 * ((count + run - 1) / run) * run;
    const RandomMatrix<k::half, DeviceMemory> key(1, rows, dim, dim, 0, 1), value(2, rows, dim, dim, 0, 1);
    const RandomMatrix<float, DeviceMemory> key32(3, rows, dim, dim, 0, 1), value32(4, rows, dim, dim, 0, 1);
    const AlignedRuns<k::half> runs(key.data(), value.data(), run, count, dim);
    const AlignedRuns<float> runs32(key32.data(), value32.data(), run, count, dim);
    const auto of = [&](const auto& m) {
      return [&](int64_t, int64_t head, int64_t pos, int64_t c) { return m.value(runs.row(head, pos), c); };
    };
    const std::string name = "runs of " + std::to_string(run);
    AttentionCase in_one_part{{1}, {count}, 4, 2, dim};
    in_one_part.splits = 1;
    for (const AttentionCase& c :
         {AttentionCase{{1}, {count}, 4, 2, dim}, in_one_part, AttentionCase{{7}, {count}, 8, 2, dim}}) {
      for (const auto mode : kModes) {
        check_decode<64, k::half, float>(t, name, c, runs, of(key), of(value), k::causal(), causal_model(), mode,
                                         precision_of(mode, DType::f16, DType::f16, false), 1);
      }
      check_decode<64, float, float>(t, name + ", float", c, runs32, of(key32), of(value32), k::causal(),
                                     causal_model(), k::DecodeMode::automatic, {}, 1);
    }
    attends<k::half, k::half>(t, name, {{70}, {count}, 4, 2, dim}, runs, of(key), of(value), k::causal(),
                              causal_model(), Types{DType::f16, DType::f16, DType::f16}.precision(), 3);
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: keys and values of float at any address") {
  Tally t;
  const AttentionCase c{{1, 3}, {170, 60}, 4, 2, 40};
  for (const int64_t shift : {0, 1, 2, 4}) {
    for (const int64_t gap : {0, 3, 4}) {
      AttentionCase ragged = c;
      ragged.ragged_q = true;
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const KvSide<float, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, shift, gap),
          value(2, where, c.dim, ScaleOf::head, 1, 0, gap);
      const OnDevice<int32_t> lengths(where.short_lengths);
      check_decode<64, k::half, float>(
          t, "float", ragged, k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data())),
          key, value, k::causal(), causal_model(), k::DecodeMode::automatic, {}, 1);
    }
  }
  CHECK_TALLY(t);
}

// ---- shapes --------------------------------------------------------------------------------------------------------

TEST_CASE("decode: a batch without any keys") {
  Tally t;
  for (const int splits : {0, 4}) {
    AttentionCase c{{2, 2, 2}, {0, 0, 0}, 4, 2, 64};
    c.splits = splits;
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    const OnDevice<int32_t> lengths(where.short_lengths);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
    for (const auto mode : kModes)
      check_decode<64, k::half, float>(t, "empty", c, kv, key, value, k::causal(), causal_model(), mode, {}, 1);
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: sinks with keys cut in a fixed number of parts") {
  Tally t;
  const std::vector<float> sinks = {0.3f, -2.f, 5.f, -std::numeric_limits<float>::infinity()};
  const OnDevice<float> there(sinks);
  ScoreModel model;
  model.sink = [&](int64_t head) { return double(sinks[size_t(head)]); };
  for (const int splits : {1, 7, 64}) {
    AttentionCase c{{1, 1, 1}, {2000, 0, 300}, 4, 2, 64};
    c.splits = splits;
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    const OnDevice<int32_t> lengths(where.short_lengths);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
    for (const auto mode : kModes) {
      check_decode<64, k::half, float>(t, std::to_string(splits) + " parts", c, kv, key, value,
                                       k::sinks(static_cast<const float*>(there.data())), model, mode,
                                       precision_of(mode, DType::f16, DType::f16, false), 1);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: latent attention, whose values are the first columns of keys in pages") {
  Tally t;
  for (const int64_t heads : {16, 128}) {
    for (const int64_t page : {1, 64}) {
      const AttentionCase c{{1, 1, 1}, {130, 0, 300}, heads, 1, 576, 512};
      const Placement where(Layout::paged_nhd, c.kv_lens, 1, page);
      const KvSide<k::bfloat16, k::Nothing, DeviceMemory> cache(1, where, 576, ScaleOf::head, 1, 0, 8);
      const OnDevice<int32_t> lengths(where.short_lengths), table(where.table);
      const auto kv = k::paged_kv(cache.tensor(), cache.tensor(), k::pages(table.data(), where.table_ld, page),
                                  static_cast<const int32_t*>(lengths.data()));
      for (const auto mode : kModes) {
        check_decode<576, k::bfloat16, float>(t, "pages of " + std::to_string(page), c, kv, cache, cache, k::causal(),
                                              causal_model(), mode, precision_of(mode, DType::bf16, DType::bf16, false),
                                              heads / 8 + 1);
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("decode: tokens, heads and sequences may stand any distances apart") {
  Tally t;
  Stream stream;
  const int64_t batch = 2, queries = 3, heads = 4, dim = 64;
  const AttentionCase c{std::vector<int64_t>(size_t(batch), queries), {50, 610}, heads, 2, dim};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::head, 1, 0, 8),
      value(2, where, dim, ScaleOf::head, 1, 0, 8);
  const OnDevice<int32_t> lengths(where.short_lengths);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data()));
  for (const auto mode : kModes) {
    AttentionData<k::half, k::half, DeviceMemory> plain(c);
    const int64_t bytes = int64_t(k::decode_workspace_bytes(stream, plain.shape()));
    Device<unsigned char> memory(1, bytes, bytes);
    const auto run = [&](const auto& from, const auto& to) {
      const k::Status status =
          k::decode<64>(stream, from, kv, to, plain.shape(), k::no_mask(), {memory.data(), size_t(bytes)}, {}, mode);
      stream.wait();
      t.expect(status.ok(), "%s", status.reason());
    };
    run(plain.source(), plain.sink());
    plain.o.download();
    const auto in = head_strides(batch, queries, heads, dim);
    for (size_t i = 0; i < in.size(); ++i) {
      const HeadStrides& out = in[(i + 2) % in.size()];
      SpreadHeads<k::half, DeviceMemory> q(in[i], batch, queries, heads, dim, Poison::nan),
          o(out, batch, queries, heads, dim, Poison::garbage);
      q.fill([&](int64_t row, int64_t col) { return plain.q.get(row, col); });
      run(q.source(), o.sink());
      t.expect(o.download(), "%s: wrote between heads", out.name);
      bool same = true;
      for (int64_t row = 0; row < batch * queries; ++row) {
        for (int64_t col = 0; col < heads * dim; ++col)
          same = same && value_of(o.get(row, col)) == value_of(plain.o.get(row, col));
      }
      t.expect(same, "%s, from %s to %s: other results", name_of(mode), in[i].name, out.name);
    }
  }
  CHECK_TALLY(t);
}

// ---- what is not finite --------------------------------------------------------------------------------------------

namespace {

struct Calls {
  Tally& t;

  template <class Kv, class K, class V, class S, class Broken>
  void run(const std::string& what, const AttentionCase& c, const Kv& kv, const K& key, const V& value, const S& score,
           const ScoreModel& model, const Broken& broken) const {
    Stream stream;
    for (const auto mode : kModes) {
      AttentionData<k::half, float, DeviceMemory> data(c);
      data.broken = broken;
      const int64_t bytes = int64_t(k::decode_workspace_bytes(stream, data.shape(), data.options()));
      Device<unsigned char> memory(1, bytes, bytes);
      const k::Status status = k::decode<64>(stream, data.source(), kv, data.sink(), data.shape(), score,
                                             {memory.data(), size_t(bytes)}, data.options(), mode);
      stream.wait();
      data.check(t, what + ", " + name_of(mode), status, key, value, model, 1,
                 precision_of(mode, DType::f16, DType::f16, false));
    }
  }
  template <class K, class V, class S, class Broken>
  void operator()(const std::string& what, const AttentionCase& c, const Placement& where, const K& key, const V& value,
                  const S& score, const ScoreModel& model, const Broken& broken) const {
    const OnDevice<int32_t> lengths(where.short_lengths);
    if (where.paged()) {
      const OnDevice<int32_t> table(where.table);
      run(what + ", pages", c,
          k::paged_kv(key.tensor(), value.tensor(), k::pages(table.data(), where.table_ld, where.page),
                      static_cast<const int32_t*>(lengths.data())),
          key, value, score, model, broken);
    } else {
      run(what, c, k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data())), key, value,
          score, model, broken);
    }
  }
};

}  // namespace

TEST_CASE("decode: keys, values and scales that are not finite") {
  Tally t;
  check_not_finite_kv<DeviceMemory, k::half, k::Nothing>(Layout::nhd, Calls{t});
  check_not_finite_kv<DeviceMemory, k::half, k::Nothing>(Layout::paged_nhd, Calls{t});
  check_not_finite_kv<DeviceMemory, k::float8_e4m3, float>(Layout::paged_nhd, Calls{t});
  CHECK_TALLY(t);
}

TEST_CASE("decode: logits that are not finite") {
  Tally t;
  check_not_finite_logits<DeviceMemory>(Calls{t});
  CHECK_TALLY(t);
}

TEST_CASE("parts whose logsumexp is NaN or infinite, on the GPU") {
  Tally t;
  Stream stream;
  check_not_finite_parts<DeviceMemory>(t, [&](const auto& o, const auto& lse, const auto& sink,
                                              const k::MergeShape& shape, const k::Attention& options) {
    const k::Status status = k::merge_states(stream, o, lse, sink, shape, options);
    stream.wait();
    return status;
  });
  CHECK_TALLY(t);
}
