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
