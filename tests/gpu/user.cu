// Functors that a user writes: maps, sources and sinks of one's own, and those written for OneFlow.
#include "support/gpu.cuh"

using namespace test;

namespace {

constexpr int64_t kCols[] = {1, 48, 257, 1000, 5000, 20001};

struct Clamp : k::Functor {
  float hi;
  explicit Clamp(float limit) : hi(limit) {}
  template <int N>
  KERNELS_HD auto map(k::Pack<float, N> v, int64_t, int64_t) const {
    return k::min(v, hi);
  }
};

}  // namespace

TEST_CASE("user: a map before and after softmax") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<k::half> x(rows, cols, cols);
    randomize(x, 1, /*holes*/ true);
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      for (Real<float>& a : row) a.v = std::fmin(a.v, 0.5);
      softmax(row);
      for (Real<float>& a : row) a.v = std::fmin(a.v, 1e-3f);
      return row;
    });
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<float> y(rows, cols, cols);
      REQUIRE(k::softmax(ex, k::load(x.data(), cols) | Clamp(0.5f), Clamp(1e-3f) | k::store(y.data(), cols), rows, cols,
                         policy));
      wait(ex);
      CHECK(compare(y, want) == "");
    });
  }
}

namespace {

// Rows of a table chosen by an index: an embedding lookup.
template <class T>
struct Gather : k::Functor {
  const T* table;
  const int32_t* index;
  int64_t ld;
  Gather(const T* t, const int32_t* i, int64_t stride) : table(t), index(i), ld(stride) {}

  int max_pack() const { return 1; }
  template <int N>
  __device__ k::Pack<float, N> load(int64_t row, int64_t col) const {
    k::Pack<float, N> out;
    for (int i = 0; i < N; ++i) out[i] = k::convert<float>(table[index[row] * ld + col + i]);
    return out;
  }
};

}  // namespace

TEST_CASE("user: a source") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 9, entries = 5;
    Device<k::bfloat16> table(entries, cols, cols + 1);
    Device<float> gamma(1, cols, cols);
    int32_t* index = nullptr;
    check_cuda(cudaMalloc(&index, rows * sizeof(int32_t)));
    int32_t chosen[9];
    for (int i = 0; i < 9; ++i) chosen[i] = (i * 3 + 1) % 5;
    check_cuda(cudaMemcpy(index, chosen, sizeof(chosen), cudaMemcpyHostToDevice));
    randomize(table, 1);
    randomize(gamma, 2);
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(table, chosen[r]);
      rmsnorm(row, 1e-5);
      for (size_t c = 0; c < row.size(); ++c) row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c)));
      return row;
    });
    each_residency(rows, cols, Needs{4, /*wide*/ false}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<k::half> y(rows, cols, cols);
      REQUIRE(k::rmsnorm(ex, Gather<k::bfloat16>(table.data(), index, table.ld()),
                         k::affine(gamma.data()) | k::store(y.data(), cols), rows, cols, k::RmsNorm{}, policy));
      wait(ex);
      CHECK(compare(y, want) == "");
    });
    cudaFree(index);
  }
}

namespace {

// Adds to an accumulator as it loads. A second load would add twice, so it says how to read again.
struct Accumulate : k::Functor {
  const float* x;
  float* total;
  int64_t ld;
  Accumulate(const float* in, float* sum, int64_t stride) : x(in), total(sum), ld(stride) {}

  template <int N>
  __device__ k::Pack<float, N> load(int64_t row, int64_t col) const {
    k::Pack<float, N> out;
    for (int i = 0; i < N; ++i) out[i] = total[row * ld + col + i] += x[row * ld + col + i];
    return out;
  }
  template <int N>
  __device__ k::Pack<float, N> reload(int64_t row, int64_t col) const {
    k::Pack<float, N> out;
    for (int i = 0; i < N; ++i) out[i] = total[row * ld + col + i];
    return out;
  }
};

}  // namespace

TEST_CASE("user: a source with its own reload") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<float> x(rows, cols, cols), before(rows, cols, cols);
    randomize(x, 1);
    randomize(before, 2);
    const auto sum = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r), old = row_of(before, r);
      for (size_t c = 0; c < row.size(); ++c) row[c] = row[c] + old[c];
      return row;
    });
    auto want = sum;
    for (Row<float>& row : want) layernorm(row, 1e-5);
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<float> total(rows, cols, cols), y(rows, cols, cols);
      randomize(total, 2);
      REQUIRE(k::layernorm(ex, Accumulate(x.data(), total.data(), cols), k::store(y.data(), cols), rows, cols,
                           k::LayerNorm{}, policy));
      wait(ex);
      CHECK(compare(total, sum) == "");
      CHECK(compare(y, want) == "");
    });
  }
}

namespace {

// A sink of one's own that looks at the whole row first: writes how far every value is above the row's smallest. Counts
// the values, too.
struct AboveSmallest : k::Functor {
  float *y, *smallest, *largest;
  int32_t* counts;
  int64_t ld;
  AboveSmallest(float* to, float* low, float* high, int32_t* n, int64_t stride)
      : y(to), smallest(low), largest(high), counts(n), ld(stride) {}

  struct State {
    float low = k::infinity<float>(), high = -k::infinity<float>();
    int32_t count = 0;
  };
  template <int N>
  __device__ void accumulate(State& s, const k::Pack<float, N>& v, int valid) const {
    for (int i = 0; i < N; ++i) {
      if (i < valid) merge(s, State{v[i], v[i], 1});
    }
  }
  __device__ void merge(State& a, const State& b) const {
    a.low = fminf(a.low, b.low);
    a.high = fmaxf(a.high, b.high);
    a.count += b.count;
  }
  template <class Lanes>
  __device__ State gather(const State& s, const Lanes& lanes) const {
    return {-lanes.max(-s.low), lanes.max(s.high), lanes.sum(s.count)};
  }
  __device__ float finish(const State& s) const { return s.low; }
  __device__ void write_row(const State& s, int64_t row) const {
    smallest[row] = s.low;
    largest[row] = s.high;
    counts[row] += s.count;
  }
  template <int N>
  __device__ void store(const k::Pack<float, N>& v, float low, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) y[row * ld + col + i] = v[i] - low;
  }
};

}  // namespace

TEST_CASE("user: a sink that looks at the row first") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 9;
    Device<k::half> x(rows, cols, cols);
    randomize(x, 1);
    const auto normed = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      layernorm(row, 1e-5);
      return row;
    });
    std::vector<Row<float>> want = normed, low, high;
    for (Row<float>& row : want) {
      Real<float> least = row[0], most = row[0];
      for (const Real<float>& a : row) {
        least = {std::fmin(least.v, a.v), std::fmax(least.e, a.e)};
        most = {std::fmax(most.v, a.v), std::fmax(most.e, a.e)};
      }
      for (Real<float>& a : row) a = a - least;
      low.push_back({least});
      high.push_back({most});
    }
    int32_t* counts = nullptr;
    check_cuda(cudaMalloc(&counts, rows * sizeof(int32_t)));
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      if (policy.residency == k::Residency::split) return;
      Device<float> y(rows, cols, cols + 3), smallest(rows, 1, 1), largest(rows, 1, 1);
      check_cuda(cudaMemset(counts, 0, rows * sizeof(int32_t)));
      check_cuda(cudaDeviceSynchronize());
      REQUIRE(k::layernorm(ex, k::load(x.data(), cols),
                           AboveSmallest(y.data(), smallest.data(), largest.data(), counts, y.ld()), rows, cols,
                           k::LayerNorm{}, policy));
      wait(ex);
      CHECK(compare(y, want) == "");
      CHECK(compare(smallest, low) == "");
      CHECK(compare(largest, high) == "");
      int32_t counted[9];
      check_cuda(cudaMemcpy(counted, counts, sizeof(counted), cudaMemcpyDeviceToHost));
      for (const int32_t n : counted) CHECK(n == cols);
    });
    cudaFree(counts);
  }
}

namespace {

// Reads 128 bytes for every value.
struct Bulky : k::Functor {
  static constexpr int widest = 1;
  const float* x;
  int64_t ld;
  Bulky(const float* from, int64_t stride) : x(from), ld(stride) {}

  struct Words {
    float v[32];
  };
  template <int N>
  __device__ Words fetch(int64_t row, int64_t col) const {
    static_assert(N == 1, "single values only");
    Words words;
    for (float& word : words.v) word = x[row * ld + col];
    return words;
  }
  __device__ k::Pack<float, 1> resolve(const Words& words, int64_t, int64_t) const { return {{words.v[31]}}; }
};

}  // namespace

// Then shared memory has little room or none. That is no reason for the automatic choice to refuse.
TEST_CASE("user: a source that reads very much for every value") {
  Stream stream;
  const int64_t rows = 2;
  for (const int64_t cols : {100, 2100, 40000, 300000}) {
    Device<float> x(rows, cols, cols);
    randomize(x, 1);
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      rmsnorm(row, 1e-5);
      return row;
    });
    const auto call = [&](const k::RowPolicy& p, bool must_be_served) {
      INFO(cols << " columns, " << text(p));
      Device<float> y(rows, cols, cols);
      const k::Status status =
          k::rmsnorm(stream, Bulky(x.data(), cols), k::store(y.data(), cols), rows, cols, k::RmsNorm{}, p);
      INFO(text(status));
      stream.wait();
      if (status) {
        CHECK(compare(y, want) == "");
      } else {
        CHECK(!must_be_served);
        CHECK(status.code() == k::Code::unsupported);
        CHECK(y.unchanged());
      }
    };
    call(k::RowPolicy{}, true);
    for (const int threads : {32, 128, 256, 512}) {
      call(policy(k::Residency::streamed, threads), true);
      call(policy(k::Residency::shared, threads), false);
    }
    k::RowPlan plan;
    CHECK(k::row_plan(stream, k::RmsNorm{}, Bulky(x.data(), 0), k::store(x.data(), cols), 100000, cols, {}, plan));
    CHECK(k::row_plan(stream, k::RmsNorm{}, Bulky(x.data(), 0), k::store(x.data(), cols), sm_count() / 2, cols, {},
                      plan));
    if (cols > 40000)
      CHECK(!k::row_plan(stream, k::RmsNorm{}, Bulky(x.data(), cols), k::store(x.data(), cols), rows, cols,
                         policy(k::Residency::shared, 512), plan));
  }
}

// ---- OneFlow's form
// ----------------------------------------------------------------------------------------------------

namespace {

template <class T, int N>
union Elements {
  __device__ Elements() {}
  std::aligned_storage_t<N * sizeof(T), N * sizeof(T)> storage;
  T elem[N];
};

// Scale and mask while loading. The pointer is taken to be aligned for every pack that divides the columns.
template <typename SRC, typename DST>
struct ScaleMaskLoad {
  ScaleMaskLoad(const SRC* src, const bool* mask, int64_t row_size, float fill, float scale)
      : src(src), mask(mask), row_size(row_size), fill(fill), scale(scale) {}
  template <int N>
  __device__ void load(DST* dst, int64_t row, int64_t col) const {
    Elements<SRC, N> pack;
    Elements<bool, N> keep;
    const int64_t offset = (row * row_size + col) / N;
    pack.storage = *(reinterpret_cast<const decltype(pack.storage)*>(src) + offset);
    keep.storage = *(reinterpret_cast<const decltype(keep.storage)*>(mask) + offset);
#pragma unroll
    for (int i = 0; i < N; ++i) dst[i] = keep.elem[i] ? static_cast<DST>(pack.elem[i]) * scale : fill;
  }
  const SRC* src;
  const bool* mask;
  int64_t row_size;
  float fill, scale;
};

// Not const, as in OneFlow.
template <typename SRC, typename DST>
struct ScaleStore {
  ScaleStore(DST* dst, int64_t row_size, float scale) : dst(dst), row_size(row_size), scale(scale) {}
  template <int N>
  __device__ void store(const SRC* src, int64_t row, int64_t col) {
    Elements<DST, N> pack;
    const int64_t offset = (row * row_size + col) / N;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.elem[i] = static_cast<DST>(src[i] * scale);
    *(reinterpret_cast<decltype(pack.storage)*>(dst) + offset) = pack.storage;
  }
  DST* dst;
  int64_t row_size;
  float scale;
};

}  // namespace

TEST_CASE("user: OneFlow's functors, as they are") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<k::half> x(rows, cols, cols);
    Device<bool> mask(rows, cols, cols);
    randomize(x, 1);
    Random random{3};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) mask.set(r, c, random.below(4) != 0);
    }
    mask.upload();
    const auto want = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      for (int64_t c = 0; c < cols; ++c) {
        Real<float>& a = row[size_t(c)];
        a = mask.get(r, c) ? a * constant(0.125) : Real<float>(-10000.0);
      }
      softmax(row);
      for (Real<float>& a : row) a = a * Real<float>(8.0);
      return row;
    });
    each_residency(rows, cols, Needs{}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      Device<k::half> y(rows, cols, cols);
      ScaleMaskLoad<k::half, float> load(x.data(), mask.data(), cols, -10000.f, 0.125f);
      ScaleStore<float, k::half> store(y.data(), cols, 8.f);
      REQUIRE(k::softmax<decltype(load), decltype(store), float>(ex, load, store, rows, cols, policy));
      wait(ex);
      CHECK(compare(y, want) == "");
    });
  }
}

TEST_CASE("user: calls as they are written for OneFlow") {
  Stream owner;
  const cudaStream_t stream = owner;
  const int64_t rows = 6, cols = 1000;
  Device<k::half> in(rows, cols, cols), out(rows, cols, cols);
  randomize(in, 1);
  k::DirectLoad<k::half, float> load(in.data(), cols);
  k::DirectStore<float, k::half> store(out.data(), cols);
  REQUIRE(k::softmax<decltype(load), decltype(store), float>(stream, load, store, rows, cols));
  owner.wait();
  CHECK(compare(out, [&](int64_t r) {
          Row<float> row = row_of(in, r);
          softmax(row);
          return row;
        }) == "");
}
