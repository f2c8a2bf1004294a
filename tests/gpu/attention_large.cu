// Attention, copies, appended keys and merged parts with more positions and elements than 32 bits hold.
#include <kernels/append.h>
#include <kernels/elementwise.cuh>

#include "support/gpu_decode.cuh"
#include "support/huge.cuh"

using namespace test;

namespace {

const k::DecodeMode kModes[] = {k::DecodeMode::precise, k::DecodeMode::tensor, k::DecodeMode::plain};
constexpr int64_t kMost = 2147482624;  // the most keys of a sequence

// kMost positions of 16 codes, every one 1, but for the last hundred, which are random numbers.
class FarKeys {
 public:
  static constexpr int64_t dim = 16, seen = 100;
  using Code = k::float8_e4m3;

  FarKeys() : p_(static_cast<Code*>(DeviceMemory::allocate(size_t(kMost * dim)))), last_(size_t(seen * dim)) {
    check_cuda(cudaMemset(p_, 0x38, size_t(kMost * dim)));
    Random random(9);
    for (Code& x : last_) x = make<Code>(random.normal());
  }
  ~FarKeys() { DeviceMemory::release(p_); }
  void put_last() { DeviceMemory::upload(p_ + (kMost - seen) * dim, last_.data(), last_.size()); }

  const Code* data() const { return p_; }
  Code* writable() const { return p_; }
  // As the oracle is told of the last ones.
  double operator()(int64_t, int64_t, int64_t pos, int64_t c) const { return value_of(last_[size_t(pos * dim + c)]); }

 private:
  Code* p_;
  std::vector<Code> last_;
};

// f(name, view) for every way in which they may lie; keys are values as well.
template <class F>
void each_view(const FarKeys& keys, const F& f) {
  const int64_t page = int64_t(1) << 20, pages = (kMost + page - 1) / page;
  const OnDevice<int32_t> offsets({0, int32_t(kMost)}), lengths({int32_t(kMost)});
  std::vector<int32_t> numbers(static_cast<size_t>(pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  const OnDevice<int32_t> table(numbers);
  const auto side = [&](int64_t positions) { return k::nhd(keys.data(), positions, 1, FarKeys::dim); };
  f("dense", k::dense_kv(side(kMost), side(kMost), kMost));
  f("ragged", k::ragged_kv(side(kMost), side(kMost), static_cast<const int32_t*>(offsets.data())));
  f("pages", k::paged_kv(side(page), side(page), k::pages(table.data(), pages, page),
                         static_cast<const int32_t*>(lengths.data())));
}

}  // namespace

TEST_CASE("attention: as many keys as there can be, computed") {
  Tally t;
  const AttentionCase c{{3}, {FarFormula::seen}, 2, 1, 40};
  attends<float, float>(t, "far", c, FarFormula{}, FarFormula::expected_key, FarFormula::expected_value,
                        k::window(50, 0), window_model(50, 0));
  check_decode<64, float, float>(t, "far", c, FarFormula{}, FarFormula::expected_key, FarFormula::expected_value,
                                 k::window(50, 0), window_model(50, 0), k::DecodeMode::automatic, {}, 1);
  CHECK_TALLY(t);
}

TEST_CASE("attention: as many keys as there can be, in memory", "[large]") {
  if (!enough_memory(36)) return skip("needs 36 GB of GPU memory");
  FarKeys keys;
  Stream stream;
  Tally t;
  // All of them: the weights are equal, and the logsumexp counts them.
  const k::AttentionShape shape{1, 1, 2, 1, FarKeys::dim};
  const OnDevice<k::half> q(std::vector<k::half>(2 * FarKeys::dim, make<k::half>(0.25)));
  const int64_t room = int64_t(k::decode_workspace_bytes(stream, shape));
  Device<unsigned char> memory(1, room, room);
  const auto expect_all = [&](const std::string& what, const auto& run) {
    Device<float> o(1, 2 * FarKeys::dim, 2 * FarKeys::dim), lse(1, 2, 2);
    const k::Status status = run(k::load(static_cast<const k::half*>(q.data()), 2 * FarKeys::dim),
                                 k::store(o.data(), 2 * FarKeys::dim), k::Attention{}.lse(lse.data()));
    stream.wait();
    if (!t.expect(status.ok(), "%s: %s", what.c_str(), status.reason())) return;
    o.download();
    lse.download();
    for (int64_t i = 0; i < 2 * FarKeys::dim; ++i)
      t.expect(std::fabs(o.get(0, i) - 1) < 1e-3, "%s: column %d: %g, want 1", what.c_str(), int(i), o.get(0, i));
    for (int64_t h = 0; h < 2; ++h)
      t.expect(std::fabs(lse.get(0, h) - (1 + std::log(double(kMost)))) < 1e-3, "%s: lse %g", what.c_str(),
               lse.get(0, h));
  };
  each_view(keys, [&](const char* name, const auto& kv) {
    for (const auto mode : kModes) {
      expect_all(std::string(name) + ", " + name_of(mode), [&](const auto& from, const auto& to,
                                                               const k::Attention& options) {
        return k::decode<64>(stream, from, kv, to, shape, k::no_mask(), {memory.data(), size_t(room)}, options, mode);
      });
    }
  });
  // The last of them.
  keys.put_last();
  const AttentionCase c{{3}, {FarKeys::seen}, 2, 1, FarKeys::dim};
  each_view(keys, [&](const char* name, const auto& kv) {
    for (const auto mode : kModes) {
      check_decode<64, k::half, float>(t, name, c, kv, keys, keys, k::window(50, 0), window_model(50, 0), mode,
                                       precision_of(mode, DType::f16, DType::f16, false), 1);
    }
    attends<k::half, k::half>(t, name, c, kv, keys, keys, k::window(50, 0), window_model(50, 0),
                              Types{DType::f16, DType::e4m3, DType::e4m3}.precision());
  });
  CHECK_TALLY(t);
}

TEST_CASE("attention: more than 2^31 elements of queries and of results", "[large]") {
  const int64_t tokens = 70000, heads = 256, dim = 128, width = heads * dim;
  if (!enough_memory(12)) return skip("needs 12 GB of GPU memory");
  Stream stream;
  Tally t;
  Huge q(tokens * width), out(tokens * width);
  q.hash();
  // With one key the result is its value, and the logsumexp its logit.
  const Placement where(Layout::nhd, {1}, heads);
  const DeviceKv<k::half> key(1, where, dim, ScaleOf::head, 1, 0, 8), value(2, where, dim, ScaleOf::head, 1, 0, 8);
  Device<float> lse(tokens, heads, heads);
  const k::Status status =
      k::attention(stream, k::load(static_cast<const k::half*>(q.data()), width),
                   k::dense_kv(key.tensor(), value.tensor(), 1), k::store(out.data(), width),
                   {1, tokens, heads, heads, dim}, k::no_mask(), k::Attention{}.scale(0.125).lse(lse.data()));
  t.expect(status.ok(), "%s", status.reason());
  stream.wait();
  lse.download();
  for (const int64_t row : {int64_t(0), int64_t(65535), int64_t(65536), tokens - 1}) {
    const std::vector<k::half> from = q.read(row * width, width), got = out.read(row * width, width);
    for (int64_t h = 0; h < heads; ++h) {
      double logit = 0, size = 0;
      int others = 0;
      for (int64_t c = 0; c < dim; ++c) {
        const double product = 0.125 * value_of(from[size_t(h * dim + c)]) * key(0, h, 0, c);
        logit += product, size += std::fabs(product);
        others += value_of(got[size_t(h * dim + c)]) != value(0, h, 0, c);
      }
      t.expect(others == 0, "row %d, head %d: %d other results", int(row), int(h), others);
      t.expect(std::fabs(lse.get(row, h) - logit) <= 1e-5 * size, "row %d, head %d: lse %g, want %g", int(row), int(h),
               lse.get(row, h), logit);
    }
  }
  t.expect(out.intact(), "wrote outside");
  CHECK_TALLY(t);
}

TEST_CASE("attention: biases beyond 2^31 elements", "[large]") {
  const int64_t head_stride = (int64_t(1) << 31) + 8, query_stride = 50, queries = 5;
  if (!enough_memory(10)) return skip("needs 10 GB of GPU memory");
  Tally t;
  Huge bias(2 * head_stride);
  std::vector<k::half> rows(size_t(2 * queries * query_stride));
  Random random(6);
  for (auto& x : rows) x = make<k::half>(random.normal());
  for (int64_t h = 0; h < 2; ++h)
    DeviceMemory::upload(bias.data() + h * head_stride, rows.data() + h * queries * query_stride,
                         size_t(queries * query_stride) * sizeof(k::half));
  ScoreModel model;
  model.transform = [&](Real<> x, const Spot& s) {
    return x + Real<>(value_of(rows[size_t((s.head * queries + s.query) * query_stride + s.key)]));
  };
  for (const int64_t dim : {64, 128}) {
    const AttentionCase c{{queries}, {query_stride}, 2, 1, dim};
    const Placement where(Layout::nhd, c.kv_lens, 1);
    const DeviceKv<k::half> key(1, where, dim), value(2, where, dim);
    attends<k::half, k::half>(t, "bias", c, k::dense_kv(key.tensor(), value.tensor(), query_stride), key, value,
                              k::score_bias(static_cast<const k::half*>(bias.data()), 0, head_stride, query_stride),
                              model);
  }
  CHECK_TALLY(t);
}

TEST_CASE("append: positions and pages beyond 2^31 elements", "[large]") {
  if (!enough_memory(36)) return skip("needs 36 GB of GPU memory");
  FarKeys keys;
  Stream stream;
  Tally t;
  const int64_t dim = FarKeys::dim, page = int64_t(1) << 20, pages = (kMost + page - 1) / page;
  const std::vector<int32_t> positions = {0, 134217727, 134217728, 1 << 30, -1, int32_t(kMost - 1)};
  const OnDevice<int32_t> where(positions), sequences({0, 0, 0, 0, 0, 0});
  std::vector<int32_t> numbers(static_cast<size_t>(pages));
  std::iota(numbers.begin(), numbers.end(), 0);
  const OnDevice<int32_t> table(numbers);
  const RandomMatrix<k::half, DeviceMemory> x(4, 6, dim, dim);
  const auto in = k::load(static_cast<const k::half*>(x.data()), dim);
  const k::AppendAt at(where.data(), sequences.data());
  const auto expect = [&](const char* what, const k::Status& status) {
    stream.wait();
    t.expect(status.ok(), "%s: %s", what, status.reason());
    for (size_t i = 0; i < positions.size(); ++i) {
      if (positions[i] < 0) continue;
      FarKeys::Code got[16], beside[16];
      const auto* const from = keys.data() + int64_t(positions[i]) * dim;
      DeviceMemory::download(got, from, sizeof(got));
      for (int c = 0; c < 16; ++c) {
        const double want = value_of(make<FarKeys::Code>(x.value(int64_t(i), c)));
        t.expect(value_of(got[c]) == want, "%s: position %d, column %d: %g, want %g", what, positions[i], c,
                 value_of(got[c]), want);
      }
      if (positions[i] == 0 || positions[i] == 134217728) continue;
      DeviceMemory::download(beside, from - dim, sizeof(beside));
      for (const auto& code : beside) t.expect(value_of(code) == 1, "%s: wrote beside position %d", what, positions[i]);
    }
  };
  const auto side = [&](int64_t count) { return k::nhd(keys.writable(), count, 1, dim); };
  expect("dense", k::copy(stream, in, k::append_keys(k::dense_kv(side(kMost), side(kMost), 0), at, dim), 6, dim));
  check_cuda(cudaMemset(keys.writable(), 0x38, size_t(kMost * dim)));
  expect("pages",
         k::copy(stream, in,
                 k::append_values(k::paged_kv(side(page), side(page), k::pages(table.data(), pages, page), 0), at, dim),
                 6, dim));
  CHECK_TALLY(t);
}

TEST_CASE("copy and append: more than 2^31 elements", "[large]") {
  const int64_t rows = 70000, ld = 32768, dim = 128;
  if (!enough_memory(12)) return skip("needs 12 GB of GPU memory");
  Stream stream;
  Huge in(rows * ld), out(rows * ld);
  in.hash();
  const auto expect = [&](int64_t cols) {
    int wrong = 0;
    for (const int64_t row : {int64_t(0), int64_t(65535), int64_t(65536), rows - 1}) {
      const std::vector<k::half> got = out.read(row * ld, ld);
      for (int64_t c = 0; c < cols; ++c) {
        uint16_t bits;
        std::memcpy(&bits, static_cast<const void*>(&got[size_t(c)]), 2);
        wrong += bits != hashed_half(uint64_t(row * ld + c));
      }
      if (cols < ld) CHECK(out.poisoned(row * ld + cols, ld - cols));
    }
    CHECK(wrong == 0);
    CHECK(out.intact());
  };
  for (const int64_t cols : {ld, ld - 1}) {
    out.poison();
    REQUIRE(k::copy(stream, k::load(static_cast<const k::half*>(in.data()), ld), k::store(out.data(), ld), rows, cols));
    stream.wait();
    expect(cols);
  }
  // Each row a position of one sequence.
  std::vector<int32_t> numbers(static_cast<size_t>(rows));
  std::iota(numbers.begin(), numbers.end(), 0);
  const OnDevice<int32_t> positions(numbers), sequences(std::vector<int32_t>(size_t(rows), 0));
  const auto side = k::nhd(out.data(), rows, ld / dim, dim);
  out.poison();
  REQUIRE(k::copy(stream, k::load(static_cast<const k::half*>(in.data()), ld),
                  k::append_keys(k::dense_kv(side, side, rows), k::AppendAt(positions.data(), sequences.data()), dim),
                  rows, ld));
  stream.wait();
  expect(ld);
}

TEST_CASE("merge_states: more than 2^31 elements", "[large]") {
  const int64_t tokens = 70000, heads = 256, dim = 128, width = heads * dim;
  if (!enough_memory(16)) return skip("needs 16 GB of GPU memory");
  Stream stream;
  Huge parts(2 * tokens * width), out(tokens * width);
  parts.hash();
  // The first part alone has seen keys of even heads, the second those of odd heads.
  std::vector<float> lse(size_t(2 * tokens * heads));
  for (size_t i = 0; i < lse.size(); ++i)
    lse[i] = (i % 2 == 0) == (i < lse.size() / 2) ? 3.f : -std::numeric_limits<float>::infinity();
  const OnDevice<float> logsumexps(lse);
  REQUIRE(k::merge_states(stream, k::load(static_cast<const k::half*>(parts.data()), width),
                          k::load(static_cast<const float*>(logsumexps.data()), heads), k::store(out.data(), width),
                          {2, tokens, heads, dim}));
  stream.wait();
  int wrong = 0;
  for (const int64_t row : {int64_t(0), int64_t(65535), int64_t(65536), tokens - 1}) {
    const std::vector<k::half> got = out.read(row * width, width);
    for (int64_t c = 0; c < width; ++c) {
      const int64_t part = c / dim % 2;
      uint16_t bits;
      std::memcpy(&bits, static_cast<const void*>(&got[size_t(c)]), 2);
      wrong += bits != hashed_half(uint64_t((part * tokens + row) * width + c));
    }
  }
  CHECK(wrong == 0);
  CHECK(out.intact());
}
