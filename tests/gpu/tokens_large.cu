// Logits, heads that are normalized and turned, tables of embeddings, and words of 4-bit codes with more elements than
// 32 bits count.
#include <kernels/embed.h>
#include <kernels/rope.h>
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>
#include <kernels/sampling.cuh>

#include "support/huge.cuh"
#include "support/tally.h"

using namespace test;

namespace {

constexpr int64_t kRows = 70000, kCols = 32768;
// Row 65536 begins at element 2^31.
constexpr int64_t kSamples[] = {0, 1, 65535, 65536, kRows - 2, kRows - 1};

double hashed(int64_t i) {
  const uint16_t bits = hashed_half(uint64_t(i));
  k::half x;
  std::memcpy(static_cast<void*>(&x), &bits, 2);
  return value_of(x);
}
const k::half* read_only(const Huge& x) { return x.data(); }

// want(row, col): each number of the rows, to within `share` of the largest.
template <class Want>
void check_rows(Tally& t, const char* what, const Huge& out, double share, const Want& want) {
  for (const int64_t row : kSamples) {
    const std::vector<k::half> got = out.read(row * kCols, kCols);
    double largest = 0, off = 0;
    for (int64_t c = 0; c < kCols; ++c) {
      const double wanted = want(row, c), difference = std::fabs(value_of(got[size_t(c)]) - wanted);
      largest = std::max(largest, std::fabs(wanted));
      off = difference <= off || off != off ? off : difference;  // NaN stays
    }
    t.expect(off <= share * largest, "%s, row %d: off by %g of %g", what, int(row), off, largest);
  }
  t.expect(out.intact(), "%s: wrote outside", what);
}

}  // namespace

TEST_CASE("sample and log_probs: more than 2^31 logits", "[large]") {
  if (!enough_memory(6)) return skip("needs 6 GB of GPU memory");
  Stream stream;
  Huge logits(kRows * kCols);
  logits.hash();
  // The largest logit of each row that is looked at, 16, stands where no other is above 4.
  const k::half largest = make<k::half>(16);
  const auto place = [](int64_t row) { return (row * 7919 + 4321) % kCols; };
  for (const int64_t row : kSamples)
    check_cuda(cudaMemcpy(logits.data() + row * kCols + place(row), &largest, 2, cudaMemcpyHostToDevice));
  Device<int32_t> tokens(1, kRows, kRows);
  Device<float> values(1, kRows, kRows);
  const auto in = k::load(read_only(logits), kCols);
  REQUIRE(k::sample(stream, in, tokens.data(), kRows, kCols, k::Sampling{}.greedy()));
  REQUIRE(k::log_probs(stream, in, kRows, kCols,
                       k::LogProbs{}.of(static_cast<const int32_t*>(tokens.data()), values.data())));
  stream.wait();
  tokens.download(), values.download();
  for (const int64_t row : kSamples) {
    double sum = 0;
    for (int64_t c = 0; c < kCols; ++c) sum += std::exp((c == place(row) ? 16 : hashed(row * kCols + c)) - 16);
    INFO("row " << row);
    CHECK(tokens.get(0, row) == place(row));
    CHECK(std::fabs(values.get(0, row) + std::log(sum)) <= 1e-4);
  }
  CHECK((tokens.intact() && values.intact() && logits.intact()));
}

TEST_CASE("norm_heads and rope: more than 2^31 elements", "[large]") {
  if (!enough_memory(12)) return skip("needs 12 GB of GPU memory");
  constexpr int64_t dim = 128, heads = kCols / dim;
  Stream stream;
  Tally t;
  Huge in(kRows * kCols), out(kRows * kCols);
  in.hash();
  std::vector<int32_t> at(static_cast<size_t>(kRows));
  for (int64_t row = 0; row < kRows; ++row) at[size_t(row)] = int32_t(row % 1009);
  std::vector<float> frequencies(dim / 2);
  k::rope_frequencies(frequencies.data(), dim, 1e4);
  const Numbers<int32_t, DeviceMemory> positions(at);
  const Numbers<float, DeviceMemory> turns(frequencies);
  const k::Rope rope = k::rope(positions.data(), turns.data(), int(dim));
  const auto wanted = [&](int64_t row, int64_t c, bool normed) {
    const int64_t first = row * kCols + c / dim * dim, pair = c % (dim / 2);
    double squares = 0;
    for (int64_t i = 0; normed && i < dim; ++i) squares += hashed(first + i) * hashed(first + i);
    const double angle = double(float(at[size_t(row)]) * frequencies[size_t(pair)]), a = hashed(first + pair),
                 b = hashed(first + pair + dim / 2);
    const double turned =
        c % dim < dim / 2 ? a * std::cos(angle) - b * std::sin(angle) : b * std::cos(angle) + a * std::sin(angle);
    return normed ? turned / std::sqrt(squares / dim + 1e-5) : turned;
  };
  const auto x = k::load(read_only(in), kCols);
  REQUIRE(k::norm_heads(stream, x, rope | k::store(out.data(), kCols), {kRows, heads, dim, heads}));
  stream.wait();
  check_rows(t, "norm_heads", out, 1e-3, [&](int64_t row, int64_t c) { return wanted(row, c, true); });
  out.poison();
  REQUIRE(k::copy(stream, x | rope, k::store(out.data(), kCols), kRows, kCols));
  stream.wait();
  check_rows(t, "rope", out, 1e-3, [&](int64_t row, int64_t c) { return wanted(row, c, false); });
  CHECK_TALLY(t);
}

TEST_CASE("embed, and words of 4-bit codes: more than 2^31 elements", "[large]") {
  if (!enough_memory(12)) return skip("needs 12 GB of GPU memory");
  constexpr int64_t group = 128, groups = kCols / group;
  Stream stream;
  Tally t;
  Huge table(kRows * kCols), out(kRows * kCols);
  table.hash();
  // Row r is the table's row kRows - 1 - r.
  std::vector<int32_t> back(static_cast<size_t>(kRows));
  for (int64_t row = 0; row < kRows; ++row) back[size_t(row)] = int32_t(kRows - 1 - row);
  const Numbers<int32_t, DeviceMemory> ids(back);
  const auto tokens = k::embed(k::load(read_only(table), kCols), static_cast<const int32_t*>(ids.data()), kRows);
  REQUIRE(k::copy(stream, tokens, k::store(out.data(), kCols), kRows, kCols));
  stream.wait();
  check_rows(t, "embed", out, 0, [](int64_t row, int64_t c) { return hashed((kRows - 1 - row) * kCols + c); });

  // The table's first bytes as codes, eight in two of its numbers; its first numbers as scales too.
  const auto words = reinterpret_cast<const uint32_t*>(table.data());
  const auto codes = k::dequant(k::int4(words, kCols), k::group_scales(read_only(table), groups, int(group)));
  const auto weight = [&](int64_t row, int64_t c) {
    const int64_t first = (row * kCols + c) / 8 * 2;
    const uint32_t word = hashed_half(uint64_t(first)) | uint32_t(hashed_half(uint64_t(first + 1))) << 16;
    return (double(word >> k::int4_shift(int(c % 8)) & 15u) - 8) * hashed(row * groups + c / group);
  };
  out.poison();
  REQUIRE(k::copy(stream, codes, k::store(out.data(), kCols), kRows, kCols));
  const Numbers<float, DeviceMemory> ones(std::vector<float>(size_t(kCols), 1.f));
  Device<float> sums(1, kRows, kRows);
  REQUIRE(k::matmul(stream, k::load(static_cast<const float*>(ones.data()), kCols), codes, k::store(sums.data(), kRows),
                    {1, kRows, kCols}));
  stream.wait();
  check_rows(t, "words", out, 1e-3, weight);
  sums.download();
  for (const int64_t row : kSamples) {
    double sum = 0, size = 0;
    for (int64_t c = 0; c < kCols; ++c) sum += weight(row, c), size += std::fabs(weight(row, c));
    t.expect(std::fabs(sums.get(0, row) - sum) <= 1e-4 * size, "row %d: %g, want %g", int(row), sums.get(0, row), sum);
  }
  CHECK_TALLY(t);
}
