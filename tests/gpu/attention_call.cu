// How attention is called on the GPU: strides of queries and results, the same bits in any batch, and what a plan
// tells.
#include "support/gpu_attention.cuh"
#include "support/heads.h"

using namespace test;

namespace {

// With queries and results in all orders: the same bits as when they stand side by side. call(q, o, options).
template <class T, class Call>
void in_any_order(Tally& t, const AttentionCase& c, const Call& call) {
  const int64_t batch = int64_t(c.q_lens.size()), queries = c.q_lens[0], v_dim = c.value_dim();
  AttentionData<T, T, DeviceMemory> plain(c);
  const k::Status first = call(plain.source(), plain.sink(), plain.shape());
  t.expect(first.ok(), "%s: %s", c.describe().c_str(), first.reason());
  plain.o.download();
  const auto in = head_strides(batch, queries, c.heads, c.dim), out = head_strides(batch, queries, c.heads, v_dim);
  for (size_t i = 0; i < in.size(); ++i) {
    if (t.leaves_out()) continue;
    const size_t j = (i + 2) % out.size();
    SpreadHeads<T, DeviceMemory> q(in[i], batch, queries, c.heads, c.dim, Poison::nan),
        o(out[j], batch, queries, c.heads, v_dim, Poison::garbage);
    q.fill([&](int64_t row, int64_t col) { return plain.q.get(row, col); });
    const k::Status status = call(q.source(), o.sink(), plain.shape());
    t.expect(status.ok(), "%s: %s", c.describe().c_str(), status.reason());
    t.expect(o.download(), "%s, to %s: wrote between heads", c.describe().c_str(), out[j].name);
    bool same = true;
    for (int64_t row = 0; row < batch * queries; ++row) {
      for (int64_t col = 0; col < c.heads * v_dim; ++col)
        same = same && value_of(o.get(row, col)) == value_of(plain.o.get(row, col));
    }
    t.expect(same, "%s, from %s to %s: other results", c.describe().c_str(), in[i].name, out[j].name);
  }
}

template <class T>
void many_and_few_in_any_order(Tally& t, const AttentionCase& c) {
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const DeviceKv<T> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.value_dim(), ScaleOf::head, 1, 0, 8);
  const OnDevice<int32_t> lengths(where.short_lengths);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), lengths.data());
  const Stream stream;
  const k::Exec ex(stream);
  in_any_order<T>(t, c, [&](const auto& q, const auto& o, const k::AttentionShape& shape) {
    const k::Status status = k::attention(ex, q, kv, o, shape, k::causal());
    stream.wait();
    return status;
  });
  if (c.most_queries() > 32 || std::max(c.dim, c.value_dim()) > 64) return;
  in_any_order<T>(t, c, [&](const auto& q, const auto& o, const k::AttentionShape& shape) {
    const int64_t bytes = int64_t(k::decode_workspace_bytes(ex, shape));
    const Device<unsigned char> memory(1, bytes, bytes);
    const k::Status status = k::decode<64>(ex, q, kv, o, shape, k::causal(), {memory.data(), size_t(bytes)});
    stream.wait();
    return status;
  });
}

}  // namespace

TEST_CASE("tokens, heads and sequences may stand any distances apart, on the GPU") {
  Tally t;
  for (const int64_t queries : {1, 5, 140}) {
    many_and_few_in_any_order<k::half>(t, {{queries, queries}, {200, 190}, 4, 2, 64});
    many_and_few_in_any_order<k::half>(t, {{queries, queries}, {200, 190}, 4, 2, 24, 40});
    many_and_few_in_any_order<float>(t, {{queries, queries}, {200, 190}, 4, 2, 40});
  }
  many_and_few_in_any_order<k::half>(t, {{140, 140}, {200, 190}, 4, 2, 128});
  many_and_few_in_any_order<k::half>(t, {{70, 70}, {200, 190}, 4, 2, 192, 128});
  many_and_few_in_any_order<k::half>(t, {{40, 40}, {200, 190}, 4, 2, 576, 512});
  CHECK_TALLY(t);
}

// ---- bits -----------------------------------------------------------------------------------------------------------

namespace {

// Sequences of a ragged batch together, and each alone with q_len as it is: blocks then hold other rows, of one head or
// of several.
template <class T, class S>
void same_bits_alone(Tally& t, const char* what, const AttentionCase& c, const S& score) {
  if (t.leaves_out()) return;
  const Placement where(Layout::ragged, c.kv_lens, c.kv_heads);
  const DeviceKv<T> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
      value(2, where, c.value_dim(), ScaleOf::head, 1, 0, 8);
  const OnDevice<int32_t> kv_offsets(where.offsets);
  AttentionData<T, T, DeviceMemory> together(c), alone(c);
  const OnDevice<int32_t> q_offsets(together.offsets);
  const Stream stream;
  const auto run = [&](AttentionData<T, T, DeviceMemory>& d, int64_t first, int64_t count, int64_t most) {
    const k::AttentionShape shape{count, most, c.heads, c.kv_heads, c.dim, c.v_dim, q_offsets.data() + first};
    const k::Status status =
        k::attention(k::Exec(stream), d.source(), k::ragged_kv(key.tensor(), value.tensor(), kv_offsets.data() + first),
                     d.sink(), shape, score, d.options());
    t.expect(status.ok(), "%s: %s", what, status.reason());
  };
  const int64_t batch = int64_t(c.q_lens.size());
  run(together, 0, batch, c.most_queries());
  for (int64_t b = 0; b < batch; ++b) run(alone, b, 1, c.q_lens[size_t(b)]);
  stream.wait();
  for (auto* d : {&together, &alone}) d->o.download(), d->lse.download();
  const auto& a = together;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t others = 0;
    for (int64_t row = a.offsets[size_t(b)]; row < a.offsets[size_t(b) + 1]; ++row) {
      for (int64_t x = 0; x < a.o.cols(); ++x) others += value_of(a.o.get(row, x)) != value_of(alone.o.get(row, x));
      for (int64_t h = 0; h < c.heads; ++h) others += value_of(a.lse.get(row, h)) != value_of(alone.lse.get(row, h));
    }
    t.expect(others == 0, "%s, %s: sequence %d has %d other results alone", what, c.describe().c_str(), int(b),
             int(others));
  }
}

}  // namespace

TEST_CASE("a sequence has the same bits alone and in any batch") {
  Tally t;
  AttentionCase c{{100, 130, 5, 33, 0, 64, 1, 700}, {1900, 2300, 400, 77, 9, 640, 333, 2000}, 8, 2, 64};
  c.ragged_q = c.aligned = true;
  for (const auto& dims :
       {std::pair<int64_t, int64_t>{64, 64}, {40, 64}, {128, 128}, {256, 256}, {192, 128}, {576, 512}}) {
    c.dim = dims.first, c.v_dim = dims.second;
    same_bits_alone<k::half>(t, "causal", c, k::causal());
    for (const int64_t left : {50, 1000}) same_bits_alone<k::half>(t, "window", c, k::window(left, 0));
    same_bits_alone<k::half>(t, "window, top left", c, k::window(200, 700, k::Align::top_left));
    if (dims.first == 40) same_bits_alone<float>(t, "float, window", c, k::window(50, 0));
  }
  CHECK_TALLY(t);
}

TEST_CASE("heads of a size that is known: the same kernel, alone") {
  Tally t;
  AttentionCase c{{150}, {333}, 4, 2, 128};
  c.aligned = true;
  const Stream stream;
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const DeviceKv<k::half> key(1, where, c.dim, ScaleOf::head, 1, 0, 8), value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
  const OnDevice<int32_t> lengths(where.short_lengths);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), lengths.data());
  AttentionData<k::half, k::half, DeviceMemory> any(c), known(c);
  const auto run = [&](auto& d, const auto& call) {
    const k::Status status = call(d);
    stream.wait();
    d.o.download();
    d.lse.download();
    t.expect(status.ok(), "%s", status.reason());
  };
  run(any, [&](auto& d) {
    return k::attention(k::Exec(stream), d.source(), kv, d.sink(), d.shape(), k::causal(), d.options());
  });
  run(known, [&](auto& d) {
    return k::attention<128>(k::Exec(stream), d.source(), kv, d.sink(), d.shape(), k::causal(), d.options());
  });
  t.expect(any.o.bytes() == known.o.bytes() && any.lse.bytes() == known.lse.bytes(), "other bits");
  k::AttentionPlan plan;
  const k::Status larger =
      k::attention_plan<64>(k::Exec(stream), known.source(), kv, known.sink(), known.shape(), k::causal(), {}, plan);
  t.expect(std::string(larger.reason()).find("larger than attention<...>() says") != std::string::npos,
           "a larger head was taken");
  t.expect(
      k::attention_plan<200>(k::Exec(stream), known.source(), kv, known.sink(), known.shape(), k::causal(), {}, plan)
              .ok() &&
          plan.tile_dim == (plan.warpgroups ? 192 : 256),
      "a plan with a tile of %d", plan.tile_dim);
  CHECK_TALLY(t);
}

// ---- plans ----------------------------------------------------------------------------------------------------------

namespace {

struct Planned {
  k::AttentionPlan plan;
  bool because(const char* words) const {
    const bool right =
        std::string(plan.why_not).find(words) != std::string::npos && (*words != 0 || *plan.why_not == 0);
    if (!right) std::printf("got: %s\n", plan.why_not);
    return right;
  }
};

template <class TQ, class K, class V>
Planned planned(const k::AttentionShape& shape, const K& key, const V& value, const TQ* q, k::half* o, int64_t gap = 0,
                const k::Attention& options = {}) {
  Planned out;
  const k::Status status =
      k::attention_plan(k::Exec{}, k::load(q, shape.heads * shape.dim + gap), k::dense_kv(key, value, 4096),
                        k::store(o, shape.heads * shape.value_dim()), shape, k::causal(), options, out.plan);
  CHECK(status.ok());
  return out;
}

}  // namespace

namespace test {

// Keys and values in memory, but nobody says how they are aligned.
struct OwnView : k::KvView {
  using Codes = k::DirectLoad<k::half>;
  const k::half* p;
  explicit OwnView(const k::half* memory) : p(memory) {}
  KERNELS_HD int64_t length(int64_t) const { return 10; }
  KERNELS_HD k::KvRun<Codes> key(int64_t, int64_t, int64_t pos) const {
    return {Codes(p + pos * 64, 64), 10 - pos, nullptr, 0};
  }
  KERNELS_HD k::KvRun<Codes> value(int64_t b, int64_t head, int64_t pos) const { return key(b, head, pos); }
};

}  // namespace test

TEST_CASE("a plan tells path, tile and packs, and why not the fastest") {
  // A plan reads and writes nothing: results are far behind all that is read.
  const Device<k::half> memory(1, 4096, 4096);
  const k::half* const in = memory.data();
  k::half* const p = memory.data() + (int64_t(1) << 32);
  const float* const floats = reinterpret_cast<const float*>(in);
  const k::AttentionShape shape{4, 1000, 8, 2, 128};
  const auto side = [&](const auto* at, int64_t dim, int64_t gap = 0) {
    return k::strided(at, 1 << 20, 2 * dim + gap, dim);
  };

  const Planned best = planned(shape, side(in, 128), side(in, 128), in, p);
  const bool on_90 = k::Exec{}.device().capability == 90;
  if (on_90 && !best.plan.warpgroups) {  // nothing is graver
    CHECK(best.because("not compiled for sm_90a"));
    return;
  }
  CHECK(best.because(""));
  CHECK(best.plan.warpgroups == on_90);
  CHECK(best.plan.path == k::AttentionPath::tensor);
  const int keys = best.plan.tile_keys;
  CHECK((best.plan.tile_rows == 128 && (keys == 64 || keys == 128) && best.plan.tile_dim == 128 &&
         best.plan.tile_v_dim == 128));
  CHECK((best.plan.query_pack == 8 && best.plan.key_pack == 8 && best.plan.value_pack == 8 &&
         best.plan.result_pack == 8));
  // 1000 queries of 4 heads that share keys fill 32 tiles either way; those of one head alone would not be fewer
  // than 8.
  CHECK((!best.plan.heads_together && best.plan.blocks == 4 * 8 * 8));
  const Planned few = planned({4, 5, 8, 2, 128}, side(in, 128), side(in, 128), in, p);
  CHECK((few.plan.heads_together && few.plan.blocks == 4 * 2));

  const Planned of_float = planned(shape, side(floats, 128), side(floats, 128), floats, p);
  CHECK(of_float.because("more than 16 bits"));
  CHECK((of_float.plan.path == k::AttentionPath::plain && of_float.plan.key_pack == 4 &&
         of_float.plan.tile_rows == 32 && of_float.plan.tile_keys == 32));
  CHECK(planned(shape, side(in, 128), side(floats, 128), in, p).because("more than 16 bits"));

  const Planned keys_shifted = planned(shape, side(in + 1, 128), side(in, 128), in, p);
  CHECK(keys_shifted.because("keys do not begin at multiples of 16 bytes"));
  CHECK((keys_shifted.plan.key_pack == 1 && keys_shifted.plan.value_pack == 8));
  CHECK(planned(shape, side(in, 128, 4), side(in, 128), in, p).because("keys do not begin at multiples of 16 bytes"));
  CHECK(planned(shape, side(in, 128), side(in, 128, 4), in, p).because("values do not begin at multiples of 16 bytes"));
  const Planned q_shifted = planned(shape, side(in, 128), side(in, 128), in, p, 1);
  CHECK(q_shifted.because("queries do not begin at multiples of 16 bytes"));
  CHECK(q_shifted.plan.query_pack == 1);
  const Planned o_shifted = planned(shape, side(in, 128), side(in, 128), in, p + 1);
  CHECK(o_shifted.because("results"));
  CHECK(o_shifted.plan.result_pack == 1);

  const auto* const bytes = reinterpret_cast<const k::float8_e4m3*>(in);
  CHECK(planned(shape, side(bytes, 128), side(bytes, 128), in, p).because("8 or 4 bits"));
  CHECK(planned(shape, side(in, 128), side(bytes, 128), in, p).because(on_90 ? "only one of the two" : "8 or 4 bits"));
  CHECK(planned({4, 1000, 8, 2, 96}, side(in, 96), side(in, 96), in, p).because("filled up"));
  CHECK(planned({4, 1000, 8, 2, 192, 128}, side(in, 192), side(in, 128), in, p).because(on_90 ? "" : "filled up"));
  const char* const apart = on_90 ? "values are not" : "";
  CHECK(planned({4, 1000, 8, 2, 576, 512}, side(in, 576), side(in, 512), in, p).because(apart));
  CHECK(planned({4, 1000, 8, 2, 576, 512}, side(in, 576), side(in, 576), in, p).because(""));
  CHECK(planned(shape, side(in, 128), side(in, 128), in, p, 0, k::Attention{}.scale(-1)).because("scale"));

  k::AttentionPlan plan;
  const auto own = [&](const auto& kv) {
    return k::attention_plan(k::Exec{}, k::load(in, 64), kv, k::store(p, 64), {1, 5, 1, 1, 64}, k::causal(), {}, plan);
  };
  CHECK(own(OwnView{in}).ok());
  CHECK(Planned{plan}.because("does not say its alignment()"));
  CHECK(own(Formula{}).ok());
  CHECK((Planned{plan}.because("computes") && plan.path == k::AttentionPath::plain));
  CHECK(!k::attention_plan(k::Exec{}, k::load(in, 64), Formula{}, k::store(p, 64), {1, 5, 1, 1, 12}, k::causal(), {},
                           plan)
             .ok());

  // What nhd() and hnd() were told is held to the call.
  const auto reason = [&](const auto& kv) { return std::string(own(kv).reason()); };
  const auto one = k::nhd(in, 16, 1, 64), two = k::nhd(in, 16, 2, 64);
  const auto pages = [&](int64_t size) {
    return k::paged_kv(one, one, k::pages(reinterpret_cast<const int32_t*>(in), 4, size), 64);
  };
  CHECK(own(pages(16)).ok());
  CHECK(reason(pages(17)).find("attention: keys: kv: the page size exceeds the positions") == 0);
  CHECK(reason(k::dense_kv(one, two, 16))
            .find("attention: values: kv: nhd() or hnd() was told of more or fewer heads than kv_heads") == 0);
  CHECK(reason(k::dense_kv(one, one, 17)).find("attention: keys: kv: the length exceeds the positions") == 0);
}
