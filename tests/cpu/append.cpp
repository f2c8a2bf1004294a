// Keys and values appended to caches of codes, with the scales that are found for them; and what reads them.
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/rmsnorm.h>

#include "support/append.h"
#include "support/cpu_attention.h"
#include "support/threads.h"

using namespace test;
using H = HostMemory;

namespace {

struct Copy {
  template <class In, class Out>
  k::Status operator()(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return k::cpu::copy(on_threads(2), in, out, rows, cols);
  }
};

// The keys, or the values, of all positions of a case, appended to pages of int4: what attention should read there.
template <class S>
struct Appended {
  static constexpr int64_t page = 16;
  int64_t heads, dim, table_ld;
  std::vector<int32_t> table;
  RandomMatrix<k::half> x;
  Guarded<uint32_t> words;
  Guarded<S> scales;

  Appended(uint64_t seed, const AttentionCase& c, const std::vector<int32_t>& pages, int64_t ld)
      : heads(c.kv_heads),
        dim(c.dim),
        table_ld(ld),
        table(pages),
        x(seed, std::accumulate(c.kv_lens.begin(), c.kv_lens.end(), int64_t(0)), heads * dim, heads * dim, 0, 1),
        words(int64_t(pages.size()), page * heads * dim / 8, page * heads * dim / 8, 1),
        scales(int64_t(pages.size()), page * heads, page * heads) {}
  auto tensor() const {
    const S* const read = scales.data();
    return k::nhd<k::Int4>(words.data(), page, heads, dim).scales(read, page * heads, heads, 1);
  }
  double operator()(int64_t b, int64_t head, int64_t pos, int64_t c) const {
    static const int shifts[] = {0, 16, 4, 20, 8, 24, 12, 28};
    const int64_t block = table[size_t(b * table_ld + pos / page)], at = pos % page * heads + head;
    const uint32_t word = words.get(block, (at * dim + c) / 8);
    return (double(word >> shifts[c % 8] & 15u) - 8) * value_of(scales.get(block, at));
  }
};

template <class Code, class S, class T>
void check_found() {
  Tally t;
  check_append_found<Code, S, T, H>(t, Copy());
  CHECK_TALLY(t);
}

}  // namespace

TEST_CASE("int4, with scales of float") { check_found<k::Int4, float, float>(); }
TEST_CASE("int4, with scales of half") {
  check_found<k::Int4, k::half, float>();
  check_found<k::Int4, k::half, k::half>();
}
TEST_CASE("int4, with scales of bfloat16") {
  check_found<k::Int4, k::bfloat16, k::bfloat16>();
  check_found<k::Int4, k::bfloat16, int8_t>();
}
TEST_CASE("int8, with scales of all types") {
  check_found<int8_t, float, float>();
  check_found<int8_t, k::half, float>();
  check_found<int8_t, k::bfloat16, float>();
}
TEST_CASE("8-bit floats, with scales of all types") {
  check_found<k::float8_e4m3, k::half, float>();
  check_found<k::float8_e4m3, k::bfloat16, float>();
  check_found<k::float8_e5m2, float, float>();
}
TEST_CASE("keys that are turned, with a plain copy") {
  Tally t;
  check_append_turned<H>(t, Copy());
  CHECK_TALLY(t);
}

TEST_CASE("behind an operation on whole rows") {
  Tally t;
  const auto norm = [](const auto& in, const auto& out, int64_t rows, int64_t cols) {
    return k::cpu::rmsnorm(on_threads(2), in, out, rows, cols);
  };
  check_append_normed<float, H>(t, norm);
  check_append_normed<k::half, H>(t, norm);
  CHECK_TALLY(t);
}

TEST_CASE("attention reads what was appended") {
  Tally t;
  std::vector<AttentionCase> cases = few_and_many();
  cases.push_back({{1, 1}, {200, 33}, 4, 2, 72});
  cases.push_back({{3, 3}, {40, 129}, 2, 1, 128});
  for (const AttentionCase& c : cases) {
    const int64_t pages = *std::max_element(c.kv_lens.begin(), c.kv_lens.end()) / 16 + 1,
                  batch = int64_t(c.kv_lens.size());
    std::vector<int32_t> table, positions, sequences, lengths;
    for (size_t b = 0; b < c.kv_lens.size(); ++b) {
      for (int64_t i = 0; i < pages; ++i) table.push_back(int32_t(batch * (pages - 1 - i) + int64_t(b)));
      for (int64_t i = 0; i < c.kv_lens[b]; ++i) positions.push_back(int32_t(i)), sequences.push_back(int32_t(b));
      lengths.push_back(int32_t(c.kv_lens[b]));
    }
    Appended<k::half> keys(1, c, table, pages);
    Appended<float> values(2, c, table, pages);
    const auto kv = k::paged_kv(keys.tensor(), values.tensor(), k::pages(table.data(), pages, 16), lengths.data());
    const k::AppendAt at(positions.data(), sequences.data());
    const int64_t tokens = keys.x.rows(), cols = keys.x.cols();
    t.expect(Copy()(k::load(static_cast<const k::half*>(keys.x.data()), cols),
                    k::append_keys(kv, at, c.dim, keys.scales.data()), tokens, cols)
                     .ok() &&
                 Copy()(k::load(static_cast<const k::half*>(values.x.data()), cols),
                        k::append_values(kv, at, c.dim, values.scales.data()), tokens, cols)
                     .ok(),
             "append");
    keys.words.download(), keys.scales.download(), values.words.download(), values.scales.download();
    for (int64_t r = 0; r < tokens; ++r) {
      for (int64_t i = 0; i < cols; ++i) {
        const double want = keys.x.value(r, i),
                     got = keys(sequences[size_t(r)], i / c.dim, positions[size_t(r)], i % c.dim);
        t.expect(std::fabs(got - want) < 0.6, "token %d, column %d: %g became %g", int(r), int(i), want, got);
      }
    }
    check_kv(t, "appended", c, kv, keys, values);
  }
  CHECK_TALLY(t);
}

TEST_CASE("finite values count as 0 with a given scale of 0, and as codes with a subnormal one") {
  const int32_t position = 0;
  const float in[] = {0, -1, 1e30f, 0, 0, -1, 1e30f, 0, 0, -1, 1e30f, 0}, scales[] = {0, 1e-40f, -1e-40f};
  k::float8_e4m3 codes[12] = {};
  const auto side = k::nhd(codes, 1, 3, 4).head_scales(scales);
  REQUIRE(Copy()(k::load(in, 12), k::append_keys(k::dense_kv(side, side, 1), k::AppendAt(&position), 4), 1, 12));
  const double want[] = {0, 0, 0, 0, 0, -448, 448, 0, 0, 448, -448, 0};
  for (int i = 0; i < 12; ++i) CHECK(value_of(codes[i]) == want[i]);
}

TEST_CASE("what is refused of found scales") {
  const int32_t positions[] = {0, 1}, sequences[] = {0, 0};
  std::vector<float> in(2 * 64), scales(8);
  std::vector<uint32_t> words(64, 7u);
  const k::AppendAt at(positions, sequences);
  const auto reason = [&](const auto& side, int64_t dim, float* to) {
    const k::Status status =
        Copy()(k::load(static_cast<const float*>(in.data()), 64),
               k::append_keys(k::dense_kv(side, side, 2), at, dim, to), 2, 64);
    return std::string(status.ok() ? "" : status.reason());
  };
  const float* const read = scales.data();
  const auto side = k::nhd<k::Int4>(words.data(), 4, 2, 32);
  CHECK(reason(side.scales(read, 8, 2, 1), 32, scales.data() + 1) ==
        "copy: out: append: the scales to be written are not those that the view reads");
  CHECK(reason(side.head_scales(read), 32, scales.data()) ==
        "copy: out: append: the view has no scale for each position to be found");
  CHECK(reason(side.scales(read, 8, 1, 0), 32, scales.data()) ==
        "copy: out: append: the heads share a scale, where each is to have its own");
  CHECK(reason(side.scales(read, 2, 0, 1), 32, scales.data()) ==
        "copy: out: append: the positions of a block share a scale, where each is to have its own");
  const int32_t table[] = {0};
  const auto shared = side.scales(read, 0, 2, 1);
  const k::Status pages =
      Copy()(k::load(static_cast<const float*>(in.data()), 64),
             k::append_keys(k::paged_kv(shared, shared, k::pages(table, 1, 4), 2), at, 32, scales.data()), 2, 64);
  CHECK(std::string(pages.reason()) == "copy: out: append: the pages share scales, where each is to have its own");
  const auto narrow = k::strided<k::Int4>(words.data(), 64, 64, 8).scales(read, 64, 16, 1);
  CHECK(reason(narrow, 4, scales.data()) == "copy: out: append: heads of 4-bit codes are no whole words");
  CHECK(std::all_of(words.begin(), words.end(), [](uint32_t x) { return x == 7u; }));
  CHECK(reason(side.scales(read, 8, 2, 1), 32, scales.data()) == "");
  const int32_t offsets[] = {0, 2};  // a ragged view has one block, whose distance from the next means nothing
  CHECK(Copy()(k::load(static_cast<const float*>(in.data()), 64),
               k::append_keys(k::ragged_kv(shared, shared, offsets), at, 32, scales.data()), 2, 64));
}
