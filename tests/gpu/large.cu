// More rows, columns and elements than 32 bits or a grid's limits hold. Data stays on the GPU: made there by a hash
// that the host can repeat, checked there as a whole, and row by row on the host for some.
#include "support/huge.cuh"

using namespace test;

namespace {

// Hashed inputs, softmax, some rows compared with the oracle and all sums with 1.
void check_softmax(Huge& out, int64_t rows, int64_t cols, int64_t ld, const std::vector<int64_t>& samples) {
  for (const int64_t row : samples) {
    Row<float> want(static_cast<size_t>(cols));
    for (int64_t c = 0; c < cols; ++c) {
      const uint16_t bits = hashed_half(uint64_t(row * ld + c));
      k::half x;
      std::memcpy(static_cast<void*>(&x), &bits, 2);
      want[size_t(c)] = value_of(x);
    }
    softmax(want);
    const std::vector<k::half> got = out.read(row * ld, cols);
    CHECK(mismatch(row, want, [&](int64_t c) { return got[size_t(c)]; }) == "");
    if (ld > cols) CHECK(out.poisoned(row * ld + cols, ld - cols));
  }
  CHECK(out.bad_sums(rows, cols, ld) == 0);
  CHECK(out.intact());
}

}  // namespace

TEST_CASE("large: ten million rows", "[large]") {
  Stream stream;
  const int64_t rows = 10000000;
  std::vector<int64_t> samples;
  for (int64_t row = 0; row < rows; row += row < 300 || row > rows - 300 ? 1 : 99991) samples.push_back(row);
  samples.push_back(rows - 1);
  Huge in(rows * 8), out(rows * 8);
  in.hash();
  for (const int64_t cols : {3, 8}) {
    for (const k::RowPolicy& p :
         {k::RowPolicy{}, policy(k::Residency::registers, 32), policy(k::Residency::streamed, 32)}) {
      INFO(cols << " columns, " << text(p));
      out.poison();
      REQUIRE(k::softmax(stream, k::load(in.data(), cols), k::store(out.data(), cols), rows, cols, p));
      stream.wait();
      check_softmax(out, rows, cols, cols, samples);
    }
  }
}

TEST_CASE("large: more than 2^31 elements", "[large]") {
  const int64_t rows = 70000, ld = 32768;
  if (!enough_memory(12)) return skip("needs 12 GB of GPU memory");
  Stream stream;
  // Row 65536 begins at element 2^31.
  const std::vector<int64_t> samples = {0, 1, 65535, 65536, rows - 2, rows - 1};
  Huge in(rows * ld), out(rows * ld);
  in.hash();
  const auto run = [&](int64_t cols, const k::RowPolicy& p) {
    INFO(cols << " columns, " << text(p));
    out.poison();
    REQUIRE(k::softmax(stream, k::load(in.data(), ld), k::store(out.data(), ld), rows, cols, p));
    stream.wait();
    check_softmax(out, rows, cols, ld, samples);
  };
  run(ld, {});
  run(ld, policy(k::Residency::shared, 256));  // a part of the row is kept, the rest read again
  run(ld, policy(k::Residency::streamed));
  run(5000, policy(k::Residency::registers));
  run(100, {});
  run(96, policy(k::Residency::group, 16));

  // In place, and rows of one column, more than 2^31 of them.
  REQUIRE(k::softmax(stream, k::load(in.data(), ld), k::store(in.data(), ld), rows, ld));
  stream.wait();
  check_softmax(in, rows, ld, ld, samples);
  const int64_t many = (int64_t(1) << 31) + 7;
  out.poison();
  REQUIRE(k::softmax(stream, k::load(in.data(), 1), k::store(out.data(), 1), many, 1));
  stream.wait();
  CHECK(out.others(many, 0x3c00) == 0);
  CHECK(out.poisoned(many, 4096));
}

// Zeros, and 24 in the last column: log(sum) shows whether each was counted.
TEST_CASE("large: 2^30 columns", "[large]") {
  const int64_t most = int64_t(1) << 30;
  if (!enough_memory(6)) return skip("needs 6 GB of GPU memory");
  Stream stream;
  Workspace workspace(1);
  Huge in(most), out(most);
  const k::half last = make<k::half>(24);
  for (const int64_t cols : {most, most - 1}) {
    for (const k::RowPolicy& p :
         {k::RowPolicy{}, policy(k::Residency::shared), policy(k::Residency::streamed), policy(k::Residency::split)}) {
      if (p.residency == k::Residency::shared && !much_shared_memory()) continue;
      if (p.residency == k::Residency::split && have_clusters()) continue;
      INFO(cols << " columns, " << text(p));
      check_cuda(cudaMemset(in.data(), 0, size_t(cols) * 2));
      check_cuda(cudaMemcpy(in.data() + cols - 1, &last, 2, cudaMemcpyHostToDevice));
      out.poison();
      REQUIRE(k::log_softmax(workspace.exec(stream), k::load(in.data(), cols), k::store(out.data(), cols), 1, cols, p));
      stream.wait();
      const double above = std::log1p(double(cols - 1) * std::exp(-24.0));
      const k::half others = make<k::half>(-24 - above), own = make<k::half>(-above);
      uint16_t bits;
      std::memcpy(&bits, static_cast<const void*>(&others), 2);
      CHECK(out.others(cols - 1, bits) == 0);
      CHECK(value_of(out.read(cols - 1, 1)[0]) == Approx(value_of(own)).epsilon(2e-3));
      CHECK(out.intact());
      if (cols < most) CHECK(out.poisoned(cols, 1));
    }
  }
}
