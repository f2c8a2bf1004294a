// What stands around attention on the GPU: parts of the keys made one, rotary positions, and new keys and values on
// their way to the cache.
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>

#include "support/gpu_attention.cuh"
#include "support/heads.h"
#include "support/rope.h"

using namespace test;

TEST_CASE("parts of the keys, merged, are the whole") {
  Tally t;
  for (const int64_t dim : {8, 40, 128}) {
    const AttentionCase c{{5}, {300}, 3, 1, dim};
    const Placement where(Layout::nhd, c.kv_lens, 1);
    const DeviceKv<float> key(1, where, dim), value(2, where, dim);
    const int64_t tokens = 5, heads = 3, parts = 4, cuts[] = {0, 128, 128, 299, 300};  // one part has no keys
    AttentionData<float, float, DeviceMemory> d(c);
    Device<float> o(parts * tokens, heads * dim, heads * dim), lse(parts * tokens, heads, heads);
    Stream stream;
    for (int64_t part = 0; part < parts; ++part) {
      const auto shift = [&](const auto& tensor) {
        return k::strided(tensor.at({0, cuts[part], 1}, 0), 0, dim + 3, 0);
      };
      const auto kv = k::dense_kv(shift(key.tensor()), shift(value.tensor()), cuts[part + 1] - cuts[part]);
      const k::Status status =
          k::attention(stream, d.source(), kv, k::store(o.data() + part * tokens * heads * dim, heads * dim), d.shape(),
                       k::no_mask(), k::Attention{}.lse(lse.data() + part * tokens * heads));
      t.expect(status.ok(), "%s", status.reason());
    }
    AttentionData<float, float, DeviceMemory> whole(c);
    const k::Status status = k::merge_states(stream, k::load(static_cast<const float*>(o.data()), heads * dim),
                                             k::load(static_cast<const float*>(lse.data()), heads), whole.sink(),
                                             {parts, tokens, heads, dim}, whole.options());
    stream.wait();
    t.expect(status.ok(), "%s", status.reason());
    check(t, "merged", whole, [&](int64_t row, int64_t x) { return whole.q.value(row, x); }, key, value, {}, {});
  }
  CHECK_TALLY(t);

  Stream stream;
  Device<float> memory(4, 8, 8);
  const float* const p = memory.data();
  const auto merge = [&](const k::MergeShape& shape, const k::Attention& options = {}) {
    return k::merge_states(stream, k::load(p, 8), k::load(p, 1), k::store(memory.data() + 8, 8), shape, options);
  };
  CHECK(!merge({-1, 1, 1, 8}));
  CHECK(!merge({1, 1, 0, 8}));
  CHECK(!merge({1, 1, 1, 8}, k::Attention{}.scale(2)));
  // No part at all sees nothing.
  CHECK(merge({0, 1, 1, 8}, k::Attention{}.lse(memory.data() + 16)));
  stream.wait();
  memory.download();
  CHECK((memory.get(1, 3) == 0 && memory.get(2, 0) == -std::numeric_limits<float>::infinity()));
}

TEST_CASE("parts merged in a graph, replayed with others") {
  Tally t;
  const double hidden = -std::numeric_limits<double>::infinity();
  for (const int64_t dim : {40, 128}) {
    const int64_t parts = 3, tokens = 5, heads = 3, width = heads * dim;
    Device<float> o(parts * tokens, width, width), lse(parts * tokens, heads, heads), merged(tokens, width, width + 4),
        merged_lse(tokens, heads, heads);
    Stream stream;
    for (const bool programmatic : {false, true}) {
      k::Status status;
      const Graph graph(stream, [&] {
        status = k::merge_states(
            k::Exec(stream).programmatic(programmatic), k::load(static_cast<const float*>(o.data()), width),
            k::load(static_cast<const float*>(lse.data()), heads), k::store(merged.data(), merged.ld()),
            {parts, tokens, heads, dim}, k::Attention{}.lse(merged_lse.data()));
      });
      t.expect(status.ok(), "%s", status.reason());
      for (const int replay : {1, 2, 3}) {
        Random random{uint64_t(replay)};
        for (int64_t r = 0; r < parts * tokens; ++r) {
          for (int64_t i = 0; i < width; ++i) o.set(r, i, float(random.normal()));
          // Parts that see nothing, and one head of a token of which no part does.
          for (int64_t h = 0; h < heads; ++h) {
            const bool sees = (r + h) % 4 != replay && (r % tokens != replay || h != 1);
            lse.set(r, h, sees ? float(5 * replay * random.normal()) : float(hidden));
          }
        }
        o.upload(), lse.upload();
        graph.replay();
        merged.download(), merged_lse.download();
        t.expect(merged.intact() && merged_lse.intact(), "wrote outside its rows");
        for (int64_t token = 0; token < tokens; ++token) {
          for (int64_t h = 0; h < heads; ++h) {
            Row<> shares, want;
            for (int64_t p = 0; p < parts; ++p) shares.push_back(Real<>(lse.get(p * tokens + token, h)));
            double largest = 0;
            const Real<> log_sum = log_sum_exp(shares, largest);
            if (largest != hidden) softmax(shares);
            for (int64_t i = 0; i < dim; ++i) {
              Real<> sum(0);
              for (int64_t p = 0; p < parts && largest != hidden; ++p)
                sum = sum + shares[size_t(p)] * Real<>(o.get(p * tokens + token, h * dim + i));
              want.push_back(sum);
            }
            const std::string problem =
                mismatch(token, want, [&](int64_t i) { return merged.get(token, h * dim + i); });
            t.expect(problem.empty(), "dim %d, replay %d, head %d: %s", int(dim), replay, int(h), problem.c_str());
            const Real<> total =
                largest == hidden ? Real<>(hidden)
                                  : Real<>(largest + log_sum.v,
                                           log_sum.e + 4 * unit<float> * (std::fabs(largest) + std::fabs(log_sum.v)));
            const float got = merged_lse.get(token, h);
            t.expect(within(got, total), "dim %d, replay %d, token %d head %d: lse %g, want %g", int(dim), replay,
                     int(token), int(h), got, total.v);
          }
        }
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("a prefix that the batch shares is read once") {
  Tally t;
  const int64_t batch = 6, prefix = 500, dim = 64, heads = 4, kv_heads = 2, width = heads * dim;
  const AttentionCase c{std::vector<int64_t>(size_t(batch), 1), {510, 560, 501, 500, 777, 600}, heads, kv_heads, dim};
  AttentionCase cut = c;
  for (int64_t& n : cut.kv_lens) n -= prefix;
  const Placement whole(Layout::nhd, c.kv_lens, kv_heads);
  const DeviceKv<k::half> key(1, whole, dim, ScaleOf::head, 1, 0, 8), value(2, whole, dim, ScaleOf::head, 1, 0, 8);
  // All sequences have the first one's prefix.
  const auto of = [&](const auto& tensor) {
    return [&](int64_t b, int64_t head, int64_t pos, int64_t x) { return tensor(pos < prefix ? 0 : b, head, pos, x); };
  };
  AttentionData<k::half, float, DeviceMemory> d(c);
  const OnDevice<int32_t> rest(std::vector<int32_t>(cut.kv_lens.begin(), cut.kv_lens.end()));
  Device<float> o(2 * batch, width, width), lse(2 * batch, heads, heads);
  Stream stream;
  const int64_t bytes = int64_t(k::decode_workspace_bytes(stream, d.shape()));
  Device<unsigned char> memory(1, bytes, bytes);
  const auto at = [&](const auto& tensor, int64_t pos) {
    return k::strided(tensor.at({0, pos, 1}, 0), whole.capacity * kv_heads * (dim + 8), kv_heads * (dim + 8), dim + 8);
  };
  const k::Status first = k::attention(
      stream, d.source(), k::dense_kv(at(key.tensor(), 0), at(value.tensor(), 0), prefix), k::store(o.data(), width),
      {1, batch, heads, kv_heads, dim}, k::no_mask(), k::Attention{}.lse(lse.data()));
  const k::Status second = k::decode<64>(
      stream, d.source(),
      k::dense_kv(at(key.tensor(), prefix), at(value.tensor(), prefix), static_cast<const int32_t*>(rest.data())),
      k::store(o.data() + batch * width, width), d.shape(), k::no_mask(), {memory.data(), size_t(bytes)},
      k::Attention{}.lse(lse.data() + batch * heads));
  const k::Status third = k::merge_states(stream, k::load(static_cast<const float*>(o.data()), width),
                                          k::load(static_cast<const float*>(lse.data()), heads), d.sink(),
                                          {2, batch, heads, dim}, d.options());
  stream.wait();
  t.expect(first.ok() && second.ok() && third.ok(), "%s %s %s", first.reason(), second.reason(), third.reason());
  Precision precision;
  precision.weights = DType::f16;
  precision.tensor = true;
  check(t, "cascade", d, [&](int64_t row, int64_t x) { return d.q.value(row, x); }, of(key), of(value), {}, precision);
  CHECK_TALLY(t);
}

TEST_CASE("queries are turned on their way, and alone") {
  Tally t;
  Stream stream;
  check_turned<DeviceMemory>(t, 4, 4, [&](const auto& in, const auto& out, int64_t rows, int64_t cols) {
    const k::Status status = k::copy(stream, in, out, rows, cols);
    stream.wait();
    return status;
  });
  CHECK_TALLY(t);
}

TEST_CASE("a ring that new tokens go around more than once, on the GPU") {
  Tally t;
  Stream stream;
  for (int round = 0; round < (is_shortened() ? 2 : 20); ++round) {
    check_ring<DeviceMemory>(t, [&](const auto& in, const auto& out, int64_t rows, int64_t cols) {
      const k::Status status = k::copy(stream, in, out, rows, cols);
      stream.wait();
      return status;
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("copies of any type and alignment") {
  Tally t;
  for (const int64_t shift : {0, 1}) {
    for (const int64_t cols : {1, 7, 64, 1000}) {
      const RandomMatrix<float, DeviceMemory> x(1, 37, cols, cols + 8, shift);
      Device<k::half> y(37, cols, cols + 8, shift);
      Stream stream;
      const k::Status status =
          k::copy(stream, k::load(static_cast<const float*>(x.data()), x.ld()), k::store(y.data(), y.ld()), 37, cols);
      stream.wait();
      y.download();
      t.expect(status.ok() && y.intact(), "%s", status.reason());
      for (int64_t r = 0; r < 37; ++r) {
        for (int64_t c = 0; c < cols; ++c)
          t.expect(value_of(y.get(r, c)) == value_of(make<k::half>(x.value(r, c))), "row %d, column %d", int(r),
                   int(c));
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("behind the product of queries, keys and values, into pages, on the GPU") {
  Tally t;
  Stream stream;
  const auto run = [&](const auto& x, const auto& w, const auto& sink, const k::MatmulShape& shape) {
    const k::Status status = k::matmul(stream, x, w, sink, shape);
    stream.wait();
    return status;
  };
  for (const Turning& turn : turnings(70)) {
    for (const int tokens : {3, 1, 20, 70}) {
      if (t.leaves_out()) continue;
      check_qkv<DeviceMemory, k::half, k::half, float>(t, turn, tokens, false, false, run);
      check_qkv<DeviceMemory, float, int8_t, float>(t, turn, tokens, true, tokens == 3, run);
    }
  }
  for (const int tokens : {1, 3, 20, 70}) {
    if (!t.leaves_out()) check_plain_qkv<DeviceMemory>(t, tokens, run);
  }
  CHECK_TALLY(t);
}

namespace {

// Inputs and weights of small whole numbers, whose products have sums that are exact in any order: with heads that are
// apart the same results as with heads side by side.
template <class T, class W>
void product_of_heads(Tally& t, int64_t length, size_t order) {
  const int64_t batch = 2, heads = 2, dim = 64, cols = heads * dim, rows = batch * length, n = 36;
  const auto x_at = [](int64_t row, int64_t col) { return double((row * 5 + col * 3 + col / 64) % 7 - 3); };
  const auto w_at = [](int64_t row, int64_t col) { return double((row * 2 + col * 5 + col / 64) % 5 - 2); };
  const HeadStrides strides = head_strides(batch, length, heads, dim)[order],
                    of_weights = head_strides(1, n, heads, dim)[order];
  SpreadHeads<T, DeviceMemory> x(strides, batch, length, heads, dim, Poison::nan);
  SpreadHeads<W, DeviceMemory> w(of_weights, 1, n, heads, dim, Poison::nan);
  Device<T> plain_x(rows, cols, cols);
  Device<W> plain_w(n, cols, cols);
  x.fill([&](int64_t row, int64_t col) { return make<T>(x_at(row, col)); });
  w.fill([&](int64_t row, int64_t col) { return make<W>(w_at(row, col)); });
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = 0; r < rows; ++r) plain_x.set(r, c, make<T>(x_at(r, c)));
    for (int64_t r = 0; r < n; ++r) plain_w.set(r, c, make<W>(w_at(r, c)));
  }
  plain_x.upload();
  plain_w.upload();
  const auto expect = [&](const char* what, const auto& in, const auto& weights) {
    Device<float> y(rows, n, n);
    Stream stream;
    const k::Status status = k::matmul(stream, in, weights, k::store(y.data(), n), {rows, n, cols});
    stream.wait();
    y.download();
    int64_t wrong = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < n; ++o) {
        double sum = 0;
        for (int64_t c = 0; c < cols; ++c) sum += x_at(r, c) * w_at(o, c);
        wrong += y.get(r, o) != sum;
      }
    }
    t.expect(status.ok() && wrong == 0, "%s, %s, %d rows: %d wrong results %s", strides.name, what, int(rows),
             int(wrong), status.reason());
  };
  expect("inputs", x.source(), k::load(static_cast<const W*>(plain_w.data()), cols));
  expect("weights", k::load(static_cast<const T*>(plain_x.data()), cols), w.source());
}

}  // namespace

TEST_CASE("products read heads that are apart, beside attention") {
  Tally t;
  for (const int64_t length : {1, 2, 10, 70}) {
    for (size_t order = 0; order < 6; ++order) {
      if (t.leaves_out()) continue;
      product_of_heads<k::half, k::half>(t, length, order);
      product_of_heads<k::bfloat16, int8_t>(t, length, order);
    }
  }
  CHECK_TALLY(t);
}
