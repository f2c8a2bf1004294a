// Rotary positions and appending on the CPU: alone, in front of attention, and behind the product that makes queries,
// keys and values.
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>

#include <random>

#include "support/attention.h"
#include "support/rope.h"
#include "support/threads.h"

using namespace test;

TEST_CASE("sine and cosine") {
  Tally t;
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = float(random.normal() * std::pow(10.0, random.uniform(-6, 8)));
    float s, c;
    k::sin_cos(x, s, c);
    t.expect(
        std::fabs(s - std::sin(double(x))) <= 3 * unit<float> && std::fabs(c - std::cos(double(x))) <= 3 * unit<float>,
        "%.9g: %.9g %.9g", x, s, c);
  }
  CHECK_TALLY(t);
}

TEST_CASE("frequencies") {
  // From Hugging Face's modeling_rope_utils: Llama 3.1 (factor 8, low 1, high 4, context 8192, theta 5e5), which keeps
  // the fast pairs and divides the slow ones.
  float f[64], plain[64];
  k::rope_frequencies(plain, 128, 5e5);
  k::rope_frequencies_llama3(f, 128, 5e5, 8, 1, 4, 8192);
  CHECK(f[0] == 1.f);
  CHECK(f[20] == plain[20]);
  CHECK(f[63] == Approx(plain[63] / 8));
  k::rope_frequencies_linear(f, 128, 5e5, 4);
  CHECK(f[10] == Approx(plain[10] / 4));
  k::rope_frequencies_ntk(f, 128, 5e5, 4);
  CHECK(f[0] == 1.f);
  CHECK(f[63] == Approx(plain[63] / 4));
  CHECK(k::rope_frequencies_yarn(f, 128, 5e5, 4, 8192) == Approx(0.1 * std::log(4.0) + 1));
  CHECK(f[0] == 1.f);
  CHECK(f[63] == Approx(plain[63] / 4));
  // Pair 25 is in the ramp, which begins and ends within pairs if these are not truncated.
  const double pairs = 64 / std::log(5e5), first = pairs * std::log(8192 / (32 * 6.283185307179586)),
               last = pairs * std::log(8192 / 6.283185307179586), share = (25 - first) / (last - first);
  k::rope_frequencies_yarn(f, 128, 5e5, 4, 8192, 32, 1, false);
  CHECK(f[25] == Approx(plain[25] * (1 - share + share / 4)));
}

TEST_CASE("on a source") {
  Tally t;
  check_turned<HostMemory>(t, 3, 1, [](const auto& in, const auto& out, int64_t rows, int64_t cols) {
    return k::cpu::copy(on_threads(2), in, out, rows, cols);
  });
  CHECK_TALLY(t);
}

namespace {

template <class T, class S>
void product(Tally& t, const Turning& turn, int tokens, bool scaled, bool ring) {
  check_qkv<HostMemory, float, T, S>(t, turn, tokens, scaled, ring,
                                     [](const auto& x, const auto& w, const auto& sink, const k::MatmulShape& shape) {
                                       return k::cpu::matmul(on_threads(2), x, w, sink, shape);
                                     });
}

}  // namespace

TEST_CASE("behind the product of queries, keys and values, into pages") {
  Tally t;
  for (const Turning& turn : turnings(40)) {
    for (const int tokens : {1, 3, 40}) {
      product<k::half, float>(t, turn, tokens, false, false);
      product<int8_t, float>(t, turn, tokens, true, tokens == 3);
    }
  }
  product<float, float>(t, turnings(40)[1], 20, false, true);
  product<k::float8_e4m3, k::half>(t, turnings(40)[1], 20, true, false);
  for (const int tokens : {1, 3, 40}) {
    check_plain_qkv<HostMemory>(t, tokens,
                                [](const auto& x, const auto& w, const auto& sink, const k::MatmulShape& shape) {
                                  return k::cpu::matmul(on_threads(2), x, w, sink, shape);
                                });
  }
  CHECK_TALLY(t);
}

// They take the path of weights as they are: in the order of pairs, vector by vector.
TEST_CASE("weights in the order of pairs give the same bits") {
  const int64_t dim = 24, rotary = 20, n = 3 * dim, cols = 288;
  Random random(1);
  std::vector<float> x(size_t(40 * cols)), scales(size_t(n * cols / 32), 0.5f), paired(size_t(40 * n)),
      plain(size_t(40 * n));
  const std::vector<float> frequencies(size_t(rotary / 2));  // by 0 nothing turns
  const std::vector<int32_t> positions(40);
  std::vector<uint32_t> codes(size_t(n * cols / 8));
  for (float& v : x) v = float(random.normal());
  for (uint32_t& word : codes) word = uint32_t(random.uniform(0, 4294967295.0));
  const auto map = k::rope(positions.data(), frequencies.data(), int(dim)).rotary_dim(int(rotary));
  const auto w = k::dequant(k::int4(codes.data(), cols), k::group_scales(scales.data(), cols / 32, 32));
  for (const int64_t m : {1, 3, 7, 40}) {
    const auto run = [&](const auto& weights, const auto& sink) {
      return k::cpu::matmul(on_threads(2), k::load(x.data(), cols), weights, sink, {m, n, cols});
    };
    REQUIRE(run(k::paired(w, map), map | k::store(paired.data(), n)));
    REQUIRE(run(w, k::store(plain.data(), n)));
    CHECK(paired == plain);
  }
}

namespace {

// Remembers the widest pack that it was given.
struct NarrowSink : k::Functor {
  static constexpr k::Role role = k::Role::sink;
  static constexpr int widest = 16;
  int* seen;
  NarrowSink(int* widest_seen) : seen(widest_seen) {}
  int max_pack() const { return 2; }
  template <int N, class C>
  KERNELS_HD void store(const k::Pack<C, N>&, int64_t, int64_t) const { *seen = std::max(*seen, N); }
};

}  // namespace

TEST_CASE("rope in front of a sink gives it no more at once than it takes") {
  const float frequency[8] = {};
  const int32_t position = 0;
  for (const int rotary : {16, 8}) {
    int seen = 0;
    const auto sink = k::rope(&position, frequency, 16).rotary_dim(rotary) | NarrowSink(&seen);
    REQUIRE(sink.max_pack() == 4);
    for (int64_t col = 0; col < 16; col += 4) sink.store(k::Pack<float, 4>{}, 0, col);
    CHECK(seen == 2);
  }
}

TEST_CASE("a ring that new tokens go around more than once") {
  Tally t;
  for (const int threads : {1, 2}) {
    check_ring<HostMemory>(t, [&](const auto& in, const auto& out, int64_t rows, int64_t cols) {
      return k::cpu::copy(on_threads(threads), in, out, rows, cols);
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("queries are turned on their way into attention") {
  Tally t;
  const AttentionCase c{{12}, {50}, 4, 2, 32};
  const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
  const KvSide<float> key(1, where, c.dim), value(2, where, c.dim);
  const Turning turn(32, 32, false, 12);
  AttentionData<> ahead(c), fused(c);
  const auto kv = k::dense_kv(key.tensor(), value.tensor(), 50);
  std::vector<float> turned(12 * 128);
  CHECK(k::cpu::copy(k::cpu::Exec{1}, ahead.source() | turn.map(), k::store(turned.data(), 128), 12, 128));
  CHECK(k::cpu::attention(on_threads(2), k::load(turned.data(), 128), kv, ahead.sink(), ahead.shape(), k::causal()));
  CHECK(k::cpu::attention(on_threads(2), fused.source() | turn.map(), kv, fused.sink(), fused.shape(), k::causal()));
  ahead.o.download();
  fused.o.download();
  CHECK(ahead.o.bytes() == fused.o.bytes());
}

// Which a product could not tell from others by what it makes.
TEST_CASE("rope in front of a sink wants weights in its own pairs") {
  const int64_t cols = 16;
  std::vector<float> memory(8192);
  float* const p = memory.data();
  const int32_t positions[] = {0, 1};
  const auto turn = k::rope(positions, p, 32), smaller = k::rope(positions, p, 16);
  const auto w = k::load(p, cols);
  const auto run = [&](const auto& weights, const auto& sink, int64_t n) {
    return k::cpu::matmul(k::cpu::Exec{1}, k::load(p, cols), weights, sink, {2, n, cols});
  };
  const auto to = k::store(p + 4096, 160);
  for (const int64_t n : {32, 96, 160}) {
    INFO(n);
    CHECK(run(k::paired(w, turn), turn | to, n));
    CHECK(std::string(run(w, turn | to, n).reason()).substr(0, 39) == "matmul: out turns other pairs than w ha");
    CHECK(run(k::plain(w), turn | to, n).code() == k::Code::invalid);
    CHECK(run(k::paired(w, smaller), turn | to, n).code() == k::Code::invalid);
    CHECK(run(k::paired(w, turn), smaller | to, n).code() == k::Code::invalid);
    CHECK(run(k::paired(w, turn), turn.rotary_dim(16) | to, n).code() == k::Code::invalid);
    CHECK(run(w, turn.interleaved() | to, n));
    CHECK(run(k::paired(w, turn.interleaved()), turn.interleaved() | to, n));
    CHECK(std::string(run(k::paired(w, turn), to, n).reason()).substr(0, 33) == "matmul: w has pairs side by side,");
    CHECK(run(k::paired(w, turn.interleaved()), to, n));
    CHECK(run(k::plain(w), to, n));
  }
  const auto out = k::qkv(turn | to, 64, turn | to, 32, to, 32);
  const auto q = k::paired(w, turn);
  CHECK(run(k::stacked(q, 64, q, 32, k::plain(w), 32), out, 128));
  CHECK(run(k::stacked(q, 64, q, 32, q, 32), out, 128).code() == k::Code::invalid);
  CHECK(run(k::stacked(q, 64, k::plain(w), 32, k::plain(w), 32), out, 128).code() == k::Code::invalid);
  CHECK(run(k::stacked(w, 64, w, 32, w, 32), out, 128).code() == k::Code::invalid);
  CHECK(run(k::stacked(k::plain(w), 64, q, 64), to, 128).code() == k::Code::invalid);
  CHECK(run(k::stacked(k::plain(w), 64, k::plain(w), 64), to, 128));
}

TEST_CASE("what rope and append refuse") {
  std::vector<float> memory(4096);
  float* const p = memory.data();
  const int32_t positions[] = {0, 1};
  const auto copy = [&](const k::Rope& rope, int64_t cols) {
    return k::cpu::copy(k::cpu::Exec{1}, k::load(p, 64) | rope, k::store(p + 2048, 64), 2, cols);
  };
  CHECK(copy(k::rope(positions, p, 16), 64));
  CHECK(copy(k::rope(nullptr, p, 16), 64).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, nullptr, 16), 64).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 12), 48).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 16), 40).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 16).rotary_dim(18), 64).code() == k::Code::invalid);
  CHECK(copy(k::rope(positions, p, 16).rotary_dim(3), 64).code() == k::Code::invalid);

  const auto append = [&](const auto& tensor, const k::AppendAt& at, int64_t cols) {
    return k::cpu::copy(k::cpu::Exec{1}, k::load(p, 64), k::append_keys(k::dense_kv(tensor, tensor, 8), at, 16), 2,
                        cols);
  };
  const auto tensor = k::nhd(p + 2048, 8, 2, 16);
  CHECK(append(tensor, k::AppendAt(positions), 32));
  CHECK(append(tensor, k::AppendAt(nullptr), 32).code() == k::Code::invalid);
  const int32_t* const between = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(positions) + 2);
  CHECK(std::string(append(tensor, k::AppendAt(positions, between), 32).reason()) ==
        "copy: out: append: the pointer to the sequences is not aligned for 32-bit numbers");
  CHECK(append(tensor, k::AppendAt(positions).ring(8, 4, 2), 32));
  CHECK(append(tensor, k::AppendAt(positions).ring(4, 4, 2), 32).code() == k::Code::invalid);
  CHECK(append(tensor, k::AppendAt(positions).ring(8, 4, -1), 32).code() == k::Code::invalid);
  CHECK(append(tensor, k::AppendAt(positions).ring(8, 4, static_cast<const int32_t*>(nullptr)), 32).code() ==
        k::Code::invalid);
  CHECK(append(tensor, k::AppendAt(positions), 24).code() == k::Code::invalid);
  CHECK(std::string(append(tensor, k::AppendAt(positions), 48).reason()) ==
        "copy: out: append: the columns are more or fewer heads of head_dim than nhd() or hnd() was told of");
  CHECK(std::string(append(tensor, k::AppendAt(positions).ring(9, 4, 2), 32).reason()) ==
        "copy: out: append: the ring has more positions than nhd() or hnd() was told of");
  CHECK(std::string(append(k::nhd(p + 2048, 7, 2, 16), k::AppendAt(positions), 32).reason()) ==
        "copy: out: kv: the length exceeds the positions that nhd() or hnd() was told of");
  CHECK(append(tensor.scales(p, 16, 2, 1), k::AppendAt(positions), 32).code() == k::Code::unsupported);
}

TEST_CASE("a token behind the end of its cache is left out") {
  const int64_t capacity = 4, heads = 2, dim = 16, cols = heads * dim, tokens = 4;
  const int32_t positions[] = {4, 3, 7, -1}, sequences[] = {0, 1, 1, 0}, table[] = {1, 0};
  std::vector<float> in(size_t(tokens * cols));
  for (size_t i = 0; i < in.size(); ++i) in[i] = float(i + 1);
  const auto from = k::load(static_cast<const float*>(in.data()), cols);
  const k::AppendAt at(positions, sequences);
  for (const bool paged : {false, true}) {
    std::vector<float> cache(size_t((2 * capacity + tokens) * cols), -1), want = cache;  // with room behind its end
    const auto tensor = k::nhd(cache.data(), capacity, heads, dim);
    const auto append = [&](const auto& kv) {
      return k::cpu::copy(k::cpu::Exec{1}, from, k::append_keys(kv, at, dim), tokens, cols);
    };
    CHECK((paged ? append(k::paged_kv(tensor, tensor, k::pages(table, 1, capacity), 0))
                 : append(k::dense_kv(tensor, tensor, 0))));
    const int64_t last_of_second = (paged ? 0 : capacity) + 3;
    std::copy_n(in.begin() + cols, cols, want.begin() + last_of_second * cols);
    CHECK(cache == want);
  }
  // A cache without any position takes none.
  std::vector<float> behind(size_t(8 * tokens * cols), -1), want = behind;
  const auto none = k::nhd(behind.data(), 0, heads, dim);
  CHECK(k::cpu::copy(k::cpu::Exec{1}, from, k::append_keys(k::dense_kv(none, none, 0), at, dim), tokens, cols));
  CHECK(behind == want);
}

TEST_CASE("appended heads get the scales that are found for them") {
  const int64_t tokens = 5, heads = 3, dim = 20, page = 4, pages = 3, blocks = 7, size = page * heads;
  const std::vector<int32_t> positions = {0, 3, -1, 4, 9}, sequences = {0, 1, 0, 1, 0}, table = {6, 1, 3, 0, 5, 2};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> in(static_cast<size_t>(tokens * heads * dim));
  for (float& x : in) x = normal(random);
  for (int64_t i = 0; i < dim; ++i)
    in[size_t(dim + i)] *= 1e4f, in[size_t(2 * dim + i)] = 0;  // token 0: a large head, and one of zeros
  std::vector<int8_t> codes(static_cast<size_t>(blocks * size * dim), int8_t(99));
  std::vector<float> scales(static_cast<size_t>(blocks * size), -7.f);
  const auto side = k::nhd(codes.data(), page, heads, dim).scales(scales.data(), size, heads, 1);
  const auto kv = k::paged_kv(side, side, k::pages(table.data(), pages, page), 10);
  const k::AppendAt at(positions.data(), sequences.data());
  REQUIRE(k::cpu::copy(k::cpu::Exec{1}, k::load(static_cast<const float*>(in.data()), heads * dim),
                       k::append_keys(kv, at, dim, scales.data()), tokens, heads * dim));
  std::vector<int8_t> codes_left = codes;
  std::vector<float> scales_left = scales;
  for (int64_t t = 0; t < tokens; ++t) {
    if (positions[size_t(t)] < 0) continue;
    for (int64_t h = 0; h < heads; ++h) {
      INFO("token " << t << ", head " << h);
      const int64_t block = table[size_t(sequences[size_t(t)] * pages + positions[size_t(t)] / page)],
                    place = (block * page + positions[size_t(t)] % page) * heads + h;
      double most = 0;
      for (int64_t i = 0; i < dim; ++i) most = std::max(most, std::fabs(double(in[size_t((t * heads + h) * dim + i)])));
      CHECK(std::fabs(double(scales[size_t(place)]) - most / 127) <= most / 127 * 1e-6);
      scales_left[size_t(place)] = -7.f;
      for (int64_t i = 0; i < dim; ++i) {
        CHECK(std::fabs(codes[size_t(place * dim + i)] * (most / 127) -
                        double(in[size_t((t * heads + h) * dim + i)])) <= most / 127 * 0.501);
        codes_left[size_t(place * dim + i)] = 99;
      }
    }
  }
  CHECK(
      std::all_of(codes_left.begin(), codes_left.end(), [](int8_t x) { return x == 99; }));  // nothing else was written
  CHECK(std::all_of(scales_left.begin(), scales_left.end(), [](float x) { return x == -7.f; }));

  const auto refused = [&](const auto& view, float* to) {
    return k::cpu::copy(k::cpu::Exec{1}, k::load(static_cast<const float*>(in.data()), heads * dim),
                        k::append_values(view, at, dim, to), tokens, heads * dim)
        .code();
  };
  CHECK(refused(kv, scales.data() + 1) == k::Code::invalid);
  const auto one = k::nhd(codes.data(), page, heads, dim).scale(static_cast<const float*>(scales.data()));
  CHECK(refused(k::paged_kv(one, one, k::pages(table.data(), pages, page), 10), scales.data()) == k::Code::invalid);
}
