// Attention of many queries on the GPU: types of keys and values, their scales, and views of one's own.
#include "support/gpu_attention.cuh"

using namespace test;

namespace {

const AttentionCase kCases[] = {{{75, 75}, {130, 260}, 4, 2, 40},
                                {{20, 20}, {70, 0}, 4, 1, 128},
                                {{40}, {200}, 2, 2, 192, 128},
                                {{40}, {100}, 2, 1, 512}};

// Dense and paged.
template <class TQ, class TO, class K, class V, class SK = k::Nothing, class SV = k::Nothing>
void types(Tally& t, const std::string& what, ScaleOf grain = ScaleOf::head, bool aligned = true) {
  for (AttentionCase c : kCases) {
    c.aligned = aligned;
    const int64_t gap = aligned ? 16 : std::is_same<K, k::Int4>::value || std::is_same<K, k::Uint4>::value ? 8 : 3;
    for (const Layout layout : {Layout::paged_hnd}) {
      const Placement where(layout, c.kv_lens, c.kv_heads, 20);
      const DeviceKv<K, SK> key(1, where, c.dim, grain, 1, aligned ? 0 : 1, gap);
      const DeviceKv<V, SV> value(2, where, c.value_dim(), grain, 1, aligned ? 0 : 1, gap);
      with_view(where, key, value,
                [&](const auto& kv) { attends<TQ, TO>(t, what, c, kv, key, value, k::causal(), causal_model(), 7); });
    }
  }
}

}  // namespace

TEST_CASE("float, in float throughout") {
  Tally t;
  for (const bool aligned : {true, false}) {
    types<float, float, float, float>(t, "float", ScaleOf::head, aligned);
    types<k::half, k::half, float, k::half>(t, "keys of float", ScaleOf::head, aligned);
  }
  CHECK_TALLY(t);
}

TEST_CASE("16 bits, mixed") {
  Tally t;
  types<float, float, k::bfloat16, k::half>(t, "queries of float, bfloat16 and half");
  types<k::bfloat16, k::half, k::half, k::half, float, float>(t, "scaled", ScaleOf::token);
  types<k::half, k::half, k::half, k::half, float, float>(t, "scaled", ScaleOf::head);
  CHECK_TALLY(t);
}

TEST_CASE("codes of 8 and 4 bits") {
  Tally t;
  for (const bool aligned : {true, false}) {
    types<k::half, k::half, k::float8_e4m3, k::float8_e5m2>(t, "float8", ScaleOf::head, aligned);
    for (const ScaleOf grain : {ScaleOf::tensor, ScaleOf::head, ScaleOf::token}) {
      types<k::half, k::half, int8_t, int8_t, float, k::half>(t, "int8", grain, aligned);
      types<k::bfloat16, k::bfloat16, k::Int4, k::Uint4, k::half, k::half>(t, "4 bits", grain, aligned);
    }
  }
  CHECK_TALLY(t);
}

// ---- views ----------------------------------------------------------------------------------------------------------

namespace {

// Positions that go around in a ring, the newest first.
struct Ring : k::KvView {
  const k::half *keys, *values;
  int64_t capacity, count, dim;
  KERNELS_HD int64_t length(int64_t) const { return count; }
  KERNELS_HD auto at(const k::half* p, int64_t head, int64_t pos) const {
    return k::KvRun{k::load(p + ((head * capacity) + (capacity - 1 - pos)) * dim, 0), 1};
  }
  KERNELS_HD auto key(int64_t, int64_t head, int64_t pos) const { return at(keys, head, pos); }
  KERNELS_HD auto value(int64_t, int64_t head, int64_t pos) const { return at(values, head, pos); }
};

}  // namespace

TEST_CASE("a view of one's own") {
  Tally t;
  for (const int64_t queries : {1, 70}) {
    attends<float, float>(t, "formula", {{queries}, {333}, 2, 1, 40}, Formula{}, Formula::expected_key,
                          Formula::expected_value, k::causal(), causal_model(), 3);
    const int64_t dim = 64, capacity = 200;
    const RandomMatrix<k::half, DeviceMemory> key(1, 2 * capacity, dim, dim), value(2, 2 * capacity, dim, dim);
    Ring ring;
    ring.keys = key.data(), ring.values = value.data(), ring.capacity = capacity, ring.count = 150, ring.dim = dim;
    const auto of = [&](const auto& m) {
      return [&](int64_t, int64_t head, int64_t pos, int64_t c) {
        return m.value(head * capacity + capacity - 1 - pos, c);
      };
    };
    attends<k::half, k::half>(t, "ring", {{queries}, {150}, 4, 2, dim}, ring, of(key), of(value), k::causal(),
                              causal_model(), Types{DType::f16, DType::f16, DType::f16}.precision(), 3);
  }
  CHECK_TALLY(t);
}

TEST_CASE("offsets beyond 2^31 elements") {
  // One sequence at the far end of a tensor of which nothing else is ever touched.
  const int64_t heads = 2, dim = 64, capacity = int64_t(1) << 25, pos_stride = heads * dim;
  const size_t bytes = size_t(capacity) * size_t(pos_stride) * sizeof(k::half);
  size_t free_bytes = 0, all_bytes = 0;
  check_cuda(cudaMemGetInfo(&free_bytes, &all_bytes));
  if (free_bytes < bytes + (size_t(1) << 30)) return skip("needs 9 GB of GPU memory");
  k::half* p = nullptr;
  check_cuda(cudaMalloc(reinterpret_cast<void**>(&p), bytes));
  Tally t;
  const AttentionCase c{{90}, {100}, 4, 2, dim};
  const Placement where(Layout::nhd, c.kv_lens, heads);
  const KvSide<k::half> key(1, where, dim), value(2, where, dim);
  const int64_t first = capacity - 256;
  std::vector<k::half> rows(size_t(256 * pos_stride));
  for (int64_t pos = 0; pos < 100; ++pos) {
    for (int64_t x = 0; x < pos_stride; ++x) {
      rows[size_t(pos * pos_stride + x)] = make<k::half>(key(0, x / dim, pos, x % dim));
      rows[size_t((128 + pos) * pos_stride + x)] = make<k::half>(value(0, x / dim, pos, x % dim));
    }
  }
  DeviceMemory::upload(p + first * pos_stride, rows.data(), rows.size() * sizeof(k::half));
  const OnDevice<int32_t> offsets({int32_t(first), int32_t(first + 100)});
  const auto tensor = [&](int64_t shift) {
    return k::strided(static_cast<const k::half*>(p + shift * pos_stride), 0, pos_stride, dim);
  };
  attends<k::half, k::half>(t, "far away", c, k::ragged_kv(tensor(0), tensor(128), offsets.data()), key, value,
                            k::causal(), causal_model(), 3);
  CHECK_TALLY(t);
  cudaFree(p);
}
