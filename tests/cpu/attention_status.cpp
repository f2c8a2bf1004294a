// Attention on the CPU: what is refused, and parts that are merged.
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/rope.h>

#include "support/attention.h"
#include "support/heads.h"

using namespace test;

namespace {

struct Fixture {
  std::vector<float> memory = std::vector<float>(1 << 16, 0.5f);
  float* p = memory.data();
  k::AttentionShape shape{2, 3, 4, 2, 16};
  k::Workspace workspace{p + (1 << 15), size_t(1 << 17)};

  using View = k::KvCache<k::KvTensor<float>, k::KvTensor<float>, k::Dense>;
  View kv() const { return k::dense_kv(k::nhd(p, 10, 2, 16), k::nhd(p, 10, 2, 16), 10); }
  // What attention() asks of its arguments first. The doors are asked as well, of one kind of scores and of views, as
  // all of these take long to compile.
  template <class Kv, class S>
  k::Status asked(const Kv& view, const k::AttentionShape& s, const S& score, const k::Attention& options) const {
    bool empty = false;
    return k::detail::check_attention(k::load(p, 64), view, k::store(p + 8192, 64), s, score, options,
                                      std::numeric_limits<int32_t>::max(), empty)
        .in("attention");
  }
  template <class S>
  k::Status run(const k::AttentionShape& s, const S& score, const k::Attention& options = {}) const {
    return asked(kv(), s, score, options);
  }
  k::Status run(const k::AttentionShape& s, const k::NoMask& score = {}, const k::Attention& options = {}) const {
    const k::Status whole =
        k::cpu::attention(k::cpu::Exec{1}, k::load(p, 64), kv(), k::store(p + 8192, 64), s, score, options);
    const k::Status split =
        k::cpu::decode(k::cpu::Exec{1}, k::load(p, 64), kv(), k::store(p + 8192, 64), s, score, workspace, options);
    // The same words, each under its own name.
    const std::string first = whole.reason(), second = split.reason();
    CHECK((whole.ok() ? second == "ok"
                      : first == "attention: " + second.substr(std::string("decode: ").size()) &&
                            second.rfind("decode: ", 0) == 0));
    return whole;
  }
  template <class Kv>
  k::Status with(const Kv& view) const { return asked(view, shape, k::no_mask(), {}); }
  k::Status with(const View& view) const {
    return k::cpu::attention(k::cpu::Exec{1}, k::load(p, 64), view, k::store(p + 8192, 64), shape, k::no_mask());
  }
};

bool is(const k::Status& status, k::Code code, const char* words) {
  const bool right = status.code() == code && std::string(status.reason()).find(words) != std::string::npos;
  if (!right) std::printf("got: %s\n", status.reason());
  return right;
}

}  // namespace

TEST_CASE("page tables that are too short, and heads that are too large") {
  Fixture f;
  const int32_t pages[] = {0, 1, 2, 3, 4, 5}, lengths[] = {9, 12};
  const auto run = [&](int64_t ld, int64_t size) {
    const auto tensor = k::nhd(f.p, size, 2, 16);
    const auto view = k::paged_kv(tensor, tensor, k::pages(pages, ld, size), lengths);
    const k::Status whole =
        k::cpu::attention(k::cpu::Exec{1}, k::load(f.p, 64), view, k::store(f.p + 8192, 64), f.shape, k::no_mask());
    const k::Status split = k::cpu::decode(k::cpu::Exec{1}, k::load(f.p, 64), view, k::store(f.p + 8192, 64), f.shape,
                                           k::no_mask(), f.workspace);
    CHECK(whole.ok() == split.ok());
    return whole;
  };
  CHECK(run(3, 4));
  CHECK(is(run(2, 4), k::Code::invalid, "attention: a sequence has more keys than its row of the page table"));
  CHECK(is(run(3, 3), k::Code::invalid, "more keys"));
  // One row of the table for all sequences, of as many pages as it takes.
  CHECK(run(0, 4));

  const k::cpu::Exec one{1};
  CHECK(k::cpu::attention<16>(one, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), f.shape, k::no_mask()));
  CHECK(is(k::cpu::attention<8>(one, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), f.shape, k::no_mask()),
           k::Code::invalid, "attention: a head is larger"));
  CHECK(
      k::cpu::decode<20>(one, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), f.shape, k::no_mask(), f.workspace));
  CHECK(is(
      k::cpu::decode<15>(one, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), f.shape, k::no_mask(), f.workspace),
      k::Code::invalid, "decode: a head is larger"));
  CHECK(k::cpu::decode_workspace_bytes(one, f.shape) == k::cpu::decode_workspace_bytes(f.shape));
}

TEST_CASE("what is refused, and why") {
  using k::Code;
  Fixture f;
  CHECK(f.run(f.shape));
  const auto shape = [&](auto change) {
    k::AttentionShape s = f.shape;
    change(s);
    return s;
  };
  CHECK(is(f.run(shape([](auto& s) { s.batch = -1; })), Code::invalid, ": batch is negative"));
  CHECK(is(f.run(shape([](auto& s) { s.q_len = -1; })), Code::invalid, ": q_len is negative"));
  CHECK(is(f.run(shape([](auto& s) { s.tokens = -1; })), Code::invalid, ": tokens is negative"));
  const int64_t most = INT32_MAX;
  CHECK(is(f.run(shape([=](auto& s) { s.batch = most + 1; })), Code::unsupported, ": batch exceeds 2^31 - 1"));
  CHECK(is(f.run(shape([](auto& s) { s.heads = 131072; })), Code::unsupported, ": heads exceeds 65536"));
  CHECK(is(f.run(shape([](auto& s) { s.heads = 0; })), Code::invalid, ": heads is less than 1"));
  CHECK(is(f.run(shape([](auto& s) { s.kv_heads = 0; })), Code::invalid, ": kv_heads is less than 1"));
  CHECK(is(f.run(shape([](auto& s) { s.kv_heads = 3; })), Code::invalid, "multiple of kv_heads"));
  CHECK(is(f.run(shape([](auto& s) { s.dim = 0; })), Code::invalid, ": dim is less than 1"));
  CHECK(is(f.run(shape([](auto& s) { s.dim = 12; })), Code::unsupported, "dim"));
  CHECK(is(f.run(shape([](auto& s) { s.dim = 264; })), Code::unsupported, "dim"));
  CHECK(is(f.run(shape([](auto& s) { s.v_dim = 576; })), Code::unsupported, "v_dim"));
  CHECK(is(f.run(shape([](auto& s) { s.v_dim = -8; })), Code::invalid, "v_dim"));
  CHECK(f.run(shape([](auto& s) { s.batch = 0; })));
  CHECK(f.run(shape([](auto& s) { s.q_len = 0; })));

  CHECK(is(f.run(f.shape, k::NoMask{}, k::Attention{}.scale(std::nan(""))), Code::invalid, "scale"));
  CHECK(is(f.run(f.shape, k::NoMask{}, k::Attention{}.scale(1e39)), Code::invalid, "scale"));  // infinite as a float
  CHECK(f.run(f.shape, k::NoMask{}, k::Attention{}.scale(1e38)));
  CHECK(is(f.run(f.shape, k::NoMask{}, k::Attention{}.new_keys(-1)), Code::invalid, "new_keys"));
  CHECK(is(f.run(f.shape, k::NoMask{}, k::Attention{}.lse(nullptr)), Code::invalid, "logsumexp"));
  CHECK(is(f.run(f.shape, k::NoMask{}, k::Attention{}.lse(f.p, 3)), Code::invalid, "logsumexp"));

  CHECK(is(f.run(f.shape, k::window(-2, 0)), Code::invalid, "window"));
  CHECK(is(f.run(f.shape, k::soft_cap(0.f)), Code::invalid, "soft_cap"));
  CHECK(is(f.run(f.shape, k::causal() & k::soft_cap(-1.f)), Code::invalid, "soft_cap"));
  CHECK(is(f.run(f.shape, k::alibi(nullptr)), Code::invalid, "alibi"));
  CHECK(is(f.run(f.shape, k::bitmask(nullptr, 1, 1)), Code::invalid, "bitmask"));
  CHECK(is(f.run(f.shape, k::bitmask(reinterpret_cast<const uint32_t*>(f.p), 1, 1).head_stride(-1)), Code::invalid,
           "bitmask"));
  CHECK(is(f.run(f.shape, k::score_bias(f.p, -1, 0, 0)), Code::invalid, "score_bias"));
  CHECK(is(f.run(f.shape, k::sinks(static_cast<const float*>(nullptr))), Code::invalid, "sinks"));

  const auto side = k::nhd(f.p, 10, 2, 16);
  const int32_t lengths[] = {3, 4, 5};
  float* const none = nullptr;
  CHECK(is(f.with(k::dense_kv(k::nhd(none, 10, 2, 16), side, 10)), Code::invalid, "null"));
  CHECK(is(f.with(k::dense_kv(side, k::strided(f.p, 0, -1, 0), 10)), Code::invalid, "negative"));
  CHECK(is(f.with(k::dense_kv(side, k::strided(f.p, 320, 8, 160), 10)), Code::invalid, "smaller than a head"));
  CHECK(is(f.with(k::dense_kv(side, side, static_cast<const int32_t*>(nullptr))), Code::invalid, "lengths"));
  CHECK(is(f.with(k::dense_kv(side, side, -1)), Code::invalid, "length"));
  CHECK(is(f.with(k::dense_kv(side, side, int64_t(3000000000))), Code::unsupported, "2^31 - 1024"));
  CHECK(is(f.with(k::dense_kv(side, side, 3000000000u)), Code::unsupported, "2^31 - 1024"));
  CHECK(is(f.with(k::dense_kv(side, side, 2147483647)), Code::unsupported, "2^31 - 1024"));
  CHECK(is(f.with(k::dense_kv(side, side, ~size_t(0))), Code::invalid, "length"));
  CHECK(is(f.with(k::paged_kv(side, side, k::pages(lengths, 1, 16), int64_t(1) << 31)), Code::unsupported,
           "2^31 - 1024"));
  for (const int64_t size : {int64_t(1) << 31, int64_t(1) << 40})
    CHECK(is(f.with(k::paged_kv(side, side, k::pages(lengths, 1, size), lengths)), Code::invalid,
             "kv: the page size exceeds 2^31 - 1"));
  CHECK(is(f.with(k::dense_kv(side.scale(static_cast<const float*>(nullptr)), side, 10)), Code::invalid, "scales"));
  CHECK(is(f.with(k::ragged_kv(side, side, nullptr)), Code::invalid, "offsets"));
  CHECK(is(f.with(k::paged_kv(side, side, k::pages(nullptr, 1, 16), lengths)), Code::invalid, "page table"));
  CHECK(is(f.with(k::paged_kv(side, side, k::pages(lengths, 1, 0), lengths)), Code::invalid,
           "kv: the page size is less than 1"));
  CHECK(is(f.with(k::paged_kv(side, side, k::pages(lengths, -1, 16), lengths)), Code::invalid, "page table"));
  const int32_t too_long[] = {3, 11, 5};
  CHECK(f.with(k::dense_kv(side, side, lengths)));
  CHECK(is(f.with(k::dense_kv(side, side, too_long)), Code::invalid, "more keys than the positions"));
  // What nhd() and hnd() were told is held to the call: pages, one length for all, heads and their columns.
  CHECK(f.with(k::paged_kv(side, side, k::pages(lengths, 1, 10), 1)));
  CHECK(f.with(k::paged_kv(side, side, k::pages(lengths, 2, 10), 20)));
  CHECK(f.with(k::paged_kv(side, side, k::pages(lengths, 0, 10), 30)));
  CHECK(f.with(k::paged_kv(side, side, k::pages(lengths, int64_t(1) << 62, 8), 30)));
  CHECK(is(f.with(k::paged_kv(side, side, k::pages(lengths, 2, 10), 21)), Code::invalid,
           "attention: kv: the length exceeds the positions of a row of the page table"));
  CHECK(is(f.with(k::paged_kv(side, side, k::pages(lengths, 1, 11), lengths)), Code::invalid,
           "attention: keys: kv: the page size exceeds the positions"));
  CHECK(is(f.with(k::paged_kv(k::hnd(f.p, 11, 2, 16), side, k::pages(lengths, 1, 11), lengths)), Code::invalid,
           "attention: values: kv: the page size exceeds the positions"));
  CHECK(
      is(f.with(k::dense_kv(side, side, 11)), Code::invalid, "attention: keys: kv: the length exceeds the positions"));
  for (const int64_t heads : {0, 1, 3, 4}) {
    CHECK(is(f.with(k::dense_kv(k::nhd(f.p, 10, heads, 16), side, 10)), Code::invalid,
             "attention: keys: kv: nhd() or hnd() was told of more or fewer heads than kv_heads"));
    CHECK(is(f.with(k::dense_kv(side, k::hnd(f.p, 10, heads, 16).scale(f.p), 10)), Code::invalid,
             "attention: values: kv: nhd() or hnd() was told of more or fewer heads than kv_heads"));
  }
  // No position at all is also something to be told.
  const auto none_there = k::hnd(f.p, 0, 2, 16);
  CHECK(f.with(k::dense_kv(none_there, none_there, 0)));
  CHECK(is(f.with(k::dense_kv(side, none_there, 1)), Code::invalid,
           "attention: values: kv: the length exceeds the positions"));
  CHECK(is(f.with(k::dense_kv(side, none_there, lengths)), Code::invalid, "more keys than the positions"));
  CHECK(is(f.with(k::paged_kv(none_there, side, k::pages(lengths, 1, 1), lengths)), Code::invalid,
           "attention: keys: kv: the page size exceeds the positions"));
  CHECK(is(f.with(k::dense_kv(side, k::nhd(f.p, 10, 2, 8), 10)), Code::invalid,
           "attention: values: kv: nhd() or hnd() was told of heads with fewer columns"));
  CHECK(f.with(k::dense_kv(k::strided(f.p, 320, 32, 16), k::hnd(f.p, 10, 2, 24), 10)));
  const auto words = k::strided<k::Int4>(reinterpret_cast<const uint32_t*>(f.p), 320, 32, 12);
  CHECK(is(f.with(k::dense_kv(words, side, 10)), Code::invalid, "multiple of 8"));

  const auto call = [&](const auto& q, const auto& o) {
    return k::cpu::attention(k::cpu::Exec{1}, q, f.kv(), o, f.shape, k::no_mask());
  };
  CHECK(is(call(k::load(none, 64), k::store(f.p, 64)), Code::invalid, "attention: q: load: the pointer is null"));
  CHECK(is(f.with(k::dense_kv(k::nhd(none, 10, 2, 16), side, 10)), Code::invalid, "attention: keys: kv"));
  CHECK(is(f.with(k::dense_kv(side, k::nhd(none, 10, 2, 16), 10)), Code::invalid, "attention: values: kv"));
  float* const off = reinterpret_cast<float*>(reinterpret_cast<char*>(f.p) + 2);
  CHECK(is(call(k::load(off, 64), k::store(f.p, 64)), Code::invalid, "attention: q: load: the pointer is not aligned"));
  CHECK(is(f.with(k::dense_kv(side, k::nhd(off, 10, 2, 16), 10)), Code::invalid,
           "attention: values: kv: the pointer to keys or values is not aligned"));
  CHECK(is(f.run(f.shape, k::alibi(off)), Code::invalid, "alibi: the pointer is not aligned"));
  CHECK(is(f.run(f.shape, k::NoMask{}, k::Attention{}.lse(off)), Code::invalid, "logsumexp is not aligned"));
  CHECK(is(call(k::load(f.p, 64), k::store(none, 64)), Code::invalid, "store"));
  CHECK(is(call(k::load(f.p, 64), k::store(f.p, 63)), Code::invalid, "store"));
  CHECK(is(k::cpu::attention(k::cpu::Exec{0}, k::load(f.p, 64), f.kv(), k::store(f.p, 64), f.shape, k::no_mask()),
           Code::invalid, "threads"));

  // In place: element for element, with as many kv_heads as heads.
  const auto at = [&](const auto& o, k::AttentionShape s) {
    return k::cpu::attention(k::cpu::Exec{1}, k::load(f.p + 16384, 64), f.kv(), o, s, k::no_mask());
  };
  const auto square = shape([](auto& s) { s.heads = 2; });
  CHECK(at(k::store(f.p + 16384, 64), square));
  CHECK(is(at(k::store(f.p + 16384, 64), f.shape), Code::invalid,
           "attention: out overlaps q: in place needs as many kv_heads as heads"));
  CHECK(at(k::store(f.p + 16384, 64), shape([](auto& s) { s.batch = 0; })));  // nothing overlaps
  CHECK(is(at(k::store(f.p + 16385, 64), square), Code::invalid,
           "attention: out overlaps q, and not element for element"));
  CHECK(
      is(at(k::store(reinterpret_cast<k::half*>(f.p + 16384), 128), square), Code::invalid, "not element for element"));

  const int32_t falling[] = {0, 3, 2}, many[] = {0, 4, 5};
  CHECK(is(f.run(shape([&](auto& s) { s.q_offsets = falling; })), Code::invalid, "fall"));
  CHECK(is(f.run(shape([&](auto& s) { s.q_offsets = many; })), Code::invalid, "more than q_len"));
  const int32_t two[] = {0, 1, 2};
  CHECK(is(f.run(shape([&](auto& s) { s.q_offsets = two, s.tokens = 1; })), Code::invalid, "more queries than"));

  const int32_t* const odd = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(falling) + 1);
  CHECK(is(f.run(shape([&](auto& s) { s.q_offsets = odd; })), Code::invalid, "q_offsets is not aligned"));

  const auto decode = [&](const k::AttentionShape& s, k::Workspace w) {
    return k::cpu::decode(k::cpu::Exec{1}, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), s, k::no_mask(), w);
  };
  // As the GPU's are called, whose {} is options.
  const auto again = [&](const auto&... last) {
    return bool(k::cpu::attention<16>(k::cpu::Exec{1}, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), f.shape,
                                      k::no_mask(), last...));
  };
  CHECK((again(k::Workspace{}) && again(k::Workspace{}, k::Attention{})));
  CHECK(k::cpu::attention<16>(k::cpu::Exec{1}, k::load(f.p, 64), f.kv(), k::store(f.p + 8192, 64), f.shape,
                              k::no_mask(), {}));
  CHECK(is(decode(f.shape, {}), Code::invalid, "decode: the workspace has 0 bytes, and "));
  CHECK(is(decode(f.shape, {f.p, k::cpu::decode_workspace_bytes(f.shape) - 1}), Code::invalid, "workspace"));
  CHECK(is(decode(f.shape, {reinterpret_cast<char*>(f.p) + 1, size_t(1) << 17}), Code::invalid,
           "not at a multiple of 4"));
  CHECK(is(decode(shape([](auto& s) { s.q_len = 33; }), f.workspace), Code::unsupported, "32"));
}

TEST_CASE("tokens, heads and sequences may stand any distances apart") {
  Tally t;
  for (const int64_t queries : {3, 40}) {
    const int64_t batch = 2, heads = 4, dim = 24, v_dim = 40;
    const AttentionCase c{std::vector<int64_t>(size_t(batch), queries), {50, 61}, heads, 2, dim, v_dim};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<float> key(1, where, dim), value(2, where, v_dim);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), where.short_lengths.data());
    AttentionData<k::half, k::half> plain(c);
    const k::cpu::Exec cx{2};
    plain.check(t, "side by side",
                k::cpu::attention(cx, plain.source(), kv, plain.sink(), plain.shape(), k::no_mask(), plain.options()),
                key, value, {}, 7);
    const auto in = head_strides(batch, queries, heads, dim), out = head_strides(batch, queries, heads, v_dim);
    for (size_t i = 0; i < in.size(); ++i) {
      for (const bool split : {false, true}) {
        if (split && queries > 32) continue;
        const size_t j = (i + 2) % out.size();
        SpreadHeads<k::half> q(in[i], batch, queries, heads, dim, Poison::nan),
            o(out[j], batch, queries, heads, v_dim, Poison::garbage);
        q.fill([&](int64_t row, int64_t col) { return plain.q.get(row, col); });
        std::vector<float> memory(k::cpu::decode_workspace_bytes(plain.shape()) / sizeof(float));
        const k::Workspace workspace{memory.data(), memory.size() * sizeof(float)};
        const k::Status status =
            split ? k::cpu::decode(cx, q.source(), kv, o.sink(), plain.shape(), k::no_mask(), workspace)
                  : k::cpu::attention(cx, q.source(), kv, o.sink(), plain.shape(), k::no_mask());
        t.expect(status.ok(), "%s", status.reason());
        t.expect(o.download(), "%s: wrote between heads", out[j].name);
        bool same = true;
        for (int64_t row = 0; row < batch * queries; ++row) {
          for (int64_t col = 0; col < heads * v_dim; ++col)
            same = same && value_of(o.get(row, col)) == value_of(plain.o.get(row, col));
        }
        t.expect(same, "from %s to %s: other results", in[i].name, out[j].name);
      }
    }
  }
  CHECK_TALLY(t);

  Fixture f;
  const auto call = [&](const k::Heads& from, const k::Heads& to) {
    return k::cpu::attention(k::cpu::Exec{1}, k::load(f.p, from), f.kv(), k::store(f.p + 8192, to), f.shape,
                             k::no_mask());
  };
  const k::Heads good = k::heads(16, 64, 16);
  using k::Code;
  CHECK(call(good, good));
  CHECK(call(k::heads(16, 0, 0), good));
  CHECK(is(call(k::heads(24, 64, 16), good), Code::invalid, "whole heads"));
  CHECK(is(call(k::heads(0, 64, 16), good), Code::invalid, "whole heads"));
  CHECK(is(call(k::heads(16, -64, 16), good), Code::invalid, "negative"));
  CHECK(is(call(good.batches(4, 256), good), Code::invalid, "whole batches"));
  CHECK(is(call(good.batches(0, 256), good), Code::invalid, "whole batches"));
  CHECK(is(call(k::heads(16, int64_t(1) << 62, 16), good), Code::invalid, "64 bits"));
  CHECK(is(call(good, k::heads(16, 63, 16)), Code::invalid, "same place"));
  CHECK(is(call(good, k::heads(16, 64, 8)), Code::invalid, "same place"));
  CHECK(is(call(good, k::heads(16, 16, 48).batches(3, 191)), Code::invalid, "same place"));
  CHECK(call(good, k::heads(16, 16, 48).batches(3, 192)));
  CHECK(call(good, k::heads(16, 32, 96).batches(3, 16)));
}

TEST_CASE("results over queries whose heads stand apart") {
  using k::Code;
  Fixture f;
  f.shape.kv_heads = 4;
  float* const p = f.p + 16384;
  const auto run = [&](const auto& q, const auto& o) {
    return k::cpu::attention(k::cpu::Exec{1}, q, k::dense_kv(k::nhd(f.p, 10, 4, 16), k::nhd(f.p, 10, 4, 16), 10), o,
                             f.shape, k::no_mask());
  };
  const auto at = [&](const k::Heads& from, const k::Heads& to, int64_t shift = 0) {
    return run(k::load(p, from), k::store(p + shift, to));
  };
  // 2 sequences of 3 queries with 4 heads of 16: (batch, heads, length, dim), with room for 5 queries, and (batch,
  // length, heads, dim).
  const k::Heads by_heads = k::heads(16, 16, 48).batches(3, 192), roomy = k::heads(16, 16, 80).batches(3, 320),
                 by_tokens = k::heads(16, 64, 16);
  const char* const words = "attention: out overlaps q, and not element for element";
  for (const k::Heads& same : {by_heads, roomy, by_tokens, by_tokens.batches(3, 192), by_tokens.batches(3, 256),
                               k::heads(16, 192, 24).batches(3, 600)}) {
    CHECK(at(same, same));
    CHECK(is(at(same, same, 1), Code::invalid, words));
    CHECK(is(at(same, same, -1), Code::invalid, words));
  }
  // The same places, said otherwise.
  CHECK(at(by_tokens, by_tokens.batches(3, 192)));
  CHECK(run(k::load(p, 64), k::store(p, by_tokens)));
  CHECK(run(k::load(p, by_tokens.batches(3, 192)), k::store(p, 64)));
  // Others.
  CHECK(is(at(by_heads, by_tokens), Code::invalid, words));
  CHECK(is(at(by_tokens, by_heads), Code::invalid, words));
  CHECK(is(at(by_heads, roomy), Code::invalid, words));
  CHECK(is(at(by_tokens, by_tokens.batches(3, 256)), Code::invalid, words));
  CHECK(is(run(k::load(p, by_heads), k::store(p, 64)), Code::invalid, words));
  CHECK(is(run(k::load(p, 64), k::store(reinterpret_cast<k::half*>(p), k::heads(16, 128, 16))), Code::invalid, words));
  // The second sequence, its last head, the last element of all; and what lies between and behind.
  for (const int64_t inside : {320, 320 + 3 * 80, 320 + 3 * 80 + 47})
    CHECK(is(at(roomy, by_tokens, inside), Code::invalid, words));
  CHECK(at(roomy, roomy, 640));
  CHECK(at(k::heads(16, 128, 32), k::heads(16, 128, 32), 16));

  // In place is for as many kv_heads as heads, and rows and products keep to the same.
  CHECK(is(k::cpu::attention(k::cpu::Exec{1}, k::load(p, by_heads), f.kv(), k::store(p, by_heads), {2, 3, 4, 2, 16},
                             k::no_mask()),
           Code::invalid, "as many kv_heads as heads"));
  CHECK(k::cpu::copy(k::cpu::Exec{1}, k::load(p, by_heads), k::store(p, by_heads), 6, 64));
  CHECK(is(k::cpu::copy(k::cpu::Exec{1}, k::load(p, by_heads), k::store(p, 64), 6, 64), Code::invalid,
           "out overlaps in"));
}

TEST_CASE("heads that stand apart are turned and copied like any others") {
  Tally t;
  const int64_t batch = 2, length = 7, heads = 3, dim = 16, width = heads * dim;
  const RandomMatrix<k::half> x(3, batch * length, width, width);
  std::vector<int32_t> positions(size_t(batch * length));
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = int32_t(i % 7 * 5);
  float frequencies[8];
  k::rope_frequencies(frequencies, 16, 1e4);
  const auto rope = k::rope(positions.data(), frequencies, 16);
  Guarded<k::half> want(batch * length, width, width);
  const k::cpu::Exec cx{1};
  CHECK(k::cpu::copy(cx, k::load(static_cast<const k::half*>(x.data()), width) | rope, k::store(want.data(), width),
                     batch * length, width));
  want.download();
  const auto orders = head_strides(batch, length, heads, dim);
  for (size_t i = 0; i < orders.size(); ++i) {
    SpreadHeads<k::half> from(orders[i], batch, length, heads, dim, Poison::nan),
        to(orders[(i + 1) % orders.size()], batch, length, heads, dim, Poison::garbage);
    from.fill([&](int64_t row, int64_t col) { return x.get(row, col); });
    const k::Status status = k::cpu::copy(cx, from.source() | rope, to.sink(), batch * length, width);
    t.expect(status.ok(), "%s", status.reason());
    t.expect(to.download(), "%s: wrote between heads", orders[i].name);
    for (int64_t row = 0; row < batch * length; ++row) {
      for (int64_t col = 0; col < width; ++col)
        t.expect(value_of(to.get(row, col)) == value_of(want.get(row, col)), "%s: row %d, column %d", orders[i].name,
                 int(row), int(col));
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("parts of the keys, merged, are the whole") {
  Tally t;
  for (const int64_t dim : {8, 40, 128}) {
    const AttentionCase c{{5}, {300}, 3, 1, dim};
    const Placement where(Layout::nhd, c.kv_lens, 1);
    const KvSide<float> key(1, where, dim), value(2, where, dim);
    const int64_t tokens = 5, heads = 3, parts = 4, cuts[] = {0, 128, 128, 299, 300};  // one part has no keys
    AttentionData<> d(c);
    std::vector<float> o(size_t(parts * tokens * heads * dim), 7.f), lse(size_t(parts * tokens * heads), 7.f);
    for (int64_t part = 0; part < parts; ++part) {
      const auto shift = [&](const auto& tensor) {
        return k::strided(tensor.at({0, cuts[part], 1}, 0), 0, dim + 3, 0);
      };
      const auto kv = k::dense_kv(shift(key.tensor()), shift(value.tensor()), cuts[part + 1] - cuts[part]);
      const k::Status status = k::cpu::attention(
          k::cpu::Exec{1}, d.source(), kv, k::store(o.data() + part * tokens * heads * dim, heads * dim), d.shape(),
          k::no_mask(), k::Attention{}.lse(lse.data() + part * tokens * heads));
      t.expect(status.ok(), "%s", status.reason());
    }
    for (const int threads : {1, 3}) {
      AttentionData<> whole(c);
      whole.check(
          t, "merged",
          k::cpu::merge_states(k::cpu::Exec{threads}, k::load(o.data(), heads * dim), k::load(lse.data(), heads),
                               whole.sink(), {parts, tokens, heads, dim}, whole.options()),
          key, value, {});
    }
  }
  CHECK_TALLY(t);

  float some[16] = {};
  const auto merge = [&](const k::MergeShape& shape, const k::Attention& options = {}) {
    return k::cpu::merge_states(k::cpu::Exec{1}, k::load(some, 8), k::load(some, 1), k::store(some, 8), shape, options);
  };
  CHECK(is(merge({-1, 1, 1, 8}), k::Code::invalid, "merge_states: parts is negative"));
  CHECK(is(merge({1, -1, 1, 8}), k::Code::invalid, "merge_states: tokens is negative"));
  CHECK(is(merge({1, 1, 0, 8}), k::Code::invalid, "merge_states: heads is less than 1"));
  CHECK(is(merge({1, 1, 1, 0}), k::Code::invalid, "merge_states: dim is less than 1"));
  CHECK(is(merge({1, 1, 1, 65537}), k::Code::unsupported, "merge_states: dim exceeds 65536"));
  CHECK(is(merge({1, 1, 1, 8}, k::Attention{}.scale(2)), k::Code::invalid, "scaled"));
  // No part at all sees nothing.
  some[3] = 5;
  float lse = 1;
  CHECK(merge({0, 1, 1, 8}, k::Attention{}.lse(&lse)));
  CHECK((some[3] == 0 && lse == -std::numeric_limits<float>::infinity()));
}

TEST_CASE("merged states over the first part") {
  const int64_t parts = 3, tokens = 4, heads = 2, dim = 16, width = heads * dim;
  Guarded<float> o(parts * tokens, width, width + 8), lse(parts * tokens, heads, heads), apart(tokens, width, width);
  for (int64_t row = 0; row < parts * tokens; ++row) {
    for (int64_t col = 0; col < width; ++col) o.set(row, col, float((row * 37 + col * 11) % 29) - 14);
    for (int64_t head = 0; head < heads; ++head) lse.set(row, head, float((row * 5 + head * 3) % 7) - 3);
  }
  o.upload();
  lse.upload();
  const int64_t ld = o.ld();
  const k::MergeShape shape{parts, tokens, heads, dim};
  const auto merge = [&](const auto& sink) {
    return k::cpu::merge_states(k::cpu::Exec{2}, k::load(o.data(), ld), k::load(lse.data(), heads), sink, shape);
  };
  REQUIRE(merge(k::store(apart.data(), width)));
  REQUIRE(o.unchanged());
  // Elsewhere over the parts, or over the logsumexps: refused, and nothing is written.
  const char* const words = "merge_states: out overlaps o, and not the first part element for element";
  CHECK(is(merge(k::store(o.data() + 1, ld)), k::Code::invalid, words));
  CHECK(is(merge(k::store(o.data() + tokens * ld, ld)), k::Code::invalid, words));
  CHECK(is(merge(k::store(o.data(), width)), k::Code::invalid, words));
  CHECK(is(merge(k::store(reinterpret_cast<k::half*>(o.data()), 2 * ld)), k::Code::invalid, words));
  CHECK(is(merge(k::store(lse.data() - 3, width)), k::Code::invalid, "merge_states: out overlaps lse"));
  CHECK((o.unchanged() && lse.unchanged()));
  REQUIRE(merge(k::store(o.data(), ld)));
  CHECK((o.download(), apart.download(), o.intact() && apart.intact()));
  bool same = true;
  for (int64_t row = 0; row < parts * tokens; ++row) {
    for (int64_t col = 0; col < width; ++col) {
      const float want = row < tokens ? apart.get(row, col) : float((row * 37 + col * 11) % 29) - 14;
      same = same && o.get(row, col) == want;
    }
  }
  CHECK(same);
}
