// Devices that have less shared memory for a block than the GPU that code was compiled for: 99 KB (sm_86, sm_89,
// sm_120) and 163 KB (sm_80), as an Exec that speaks of so much.
#include "support/gpu_decode.cuh"
#include "support/gpu_products.cuh"

#include <kernels/sampling.cuh>

#include "support/sampling.h"

using namespace test;

namespace {

// Of a block, and of a multiprocessor, which has a KB more.
constexpr int kSizes[] = {99 << 10, 163 << 10};

k::Exec exec_with(const Stream& stream, int shared) {
  k::DeviceInfo device = k::Exec{}.device();
  device.shared_per_block = std::min(device.shared_per_block, shared);
  device.shared_per_sm = std::min(device.shared_per_sm, shared + 1024);
  return k::Exec(stream, device);
}

__global__ void ask_for_wgmma(bool* has_it) { *has_it = k::arch::kWarpgroupMma; }

// Code for sm_90a, which no other GPU runs: it counts on the shared memory of an sm_90.
bool has_wgmma() {
  static const bool has_it = [] {
    bool answer = false, *on_device = nullptr;
    check_cuda(cudaMalloc(&on_device, sizeof(bool)));
    ask_for_wgmma<<<1, 1>>>(on_device);
    check_cuda(cudaMemcpy(&answer, on_device, sizeof(bool), cudaMemcpyDeviceToHost));
    check_cuda(cudaFree(on_device));
    return answer;
  }();
  return has_it;
}

// Records what `launch` launches and runs it. Returns the most shared memory that a block of any kernel had.
template <class Launch>
size_t shared_of(const Stream& stream, const Launch& launch) {
  const Graph graph(stream, launch);
  cudaGraphNode_t nodes[8];
  size_t count = 8, most = 0;
  check_cuda(cudaGraphGetNodes(graph, nodes, &count));
  for (size_t i = 0; i < count; ++i) {
    cudaGraphNodeType type;
    check_cuda(cudaGraphNodeGetType(nodes[i], &type));
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params;
    cudaFuncAttributes attributes;
    check_cuda(cudaGraphKernelNodeGetParams(nodes[i], &params));
    check_cuda(cudaFuncGetAttributes(&attributes, params.func));
    most = std::max(most, params.sharedMemBytes + attributes.sharedSizeBytes);
  }
  graph.replay();
  return most;
}

// A product in so much shared memory, against the oracle.
template <class T, class Inputs, class Weights>
void multiplies(int shared, const Sizes& s, const k::MatmulPolicy& policy, const Inputs& x, const Weights& w,
                double rounded = 0) {
  INFO((shared >> 10) << " KB, " << s.m << " x " << s.n << " x " << s.k << ", " << k::to_string(policy.path)
                      << ", tile of " << policy.tile_tokens);
  Stream stream;
  Device<T> y(s.m, s.n, s.n + 8);
  k::Status status;
  const bool wgmma = has_wgmma(), refuses = wgmma && (policy.path == k::Path::gemm || s.m > 32);
  const size_t took = shared_of(stream, [&] {
    k::DeviceInfo device = exec_with(stream, shared).device();
    if (!wgmma) device.capability = std::max(device.capability, 120);
    status = k::matmul(k::Exec(stream, device), k::load(static_cast<const T*>(x.data()), x.ld()), w.source(),
                       k::store(y.data(), y.ld()), {s.m, s.n, s.k}, policy);
  });
  INFO(text(status));
  CHECK(status.ok() == !refuses);
  if (!status) return;
  CHECK(took > 0);
  CHECK(took <= size_t(shared));
  CHECK(compare(y, [&](int64_t m) {
          Row<> row;
          for (int64_t n = 0; n < s.n; ++n) {
            row.push_back(product(
                m, n, s.k, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w,
                units(policy.path == k::Path::automatic ? k::Path::gemm : policy.path, s.k), rounded));
          }
          return row;
        }) == "");
}

}  // namespace

TEST_CASE("small shared memory: tiles of products") {
  for (const int shared : kSizes) {
    for (const int64_t kk : {8, 64, 136, 192, 200, 1000}) {
      for (const int64_t m : {40, 170}) {
        const Sizes s{m, 136, kk};
        const Matrix<k::half> x(21, s.m, s.k, s.k + 8, 0, 1);
        const Plain<k::half, DeviceMemory> w(s.n, s.k, 8, 0);
        multiplies<k::half>(shared, s, {k::Path::gemm}, x, w);
        for (const int tokens : {64, 128}) multiplies<k::half>(shared, s, {k::Path::gemm, tokens, 128}, x, w);
      }
    }
  }
}

// Weights that are decoded on the way, and operands that are read in single elements.
TEST_CASE("small shared memory: products whose operands are not copied") {
  for (const int shared : kSizes) {
    const Sizes s{170, 136, 576};
    const Matrix<k::half> x(21, s.m, s.k, s.k + 8, 0, 1), odd(22, s.m, s.k, s.k + 3, 1, 1);
    const FourBit<k::half, false, DeviceMemory> codes(s.n, s.k, 64);
    const Plain<k::half, DeviceMemory> w(s.n, s.k, 3, 1);
    multiplies<k::half>(shared, s, {k::Path::gemm}, x, codes, 0x1p-11);
    multiplies<k::half>(shared, s, {k::Path::gemm}, odd, w);
  }
}

TEST_CASE("small shared memory: few tokens, and the automatic choice") {
  for (const int shared : kSizes) {
    for (const Sizes s : {Sizes{1, 512, 1000}, Sizes{4, 512, 1000}, Sizes{20, 512, 1000}, Sizes{32, 512, 1000},
                          Sizes{48, 512, 1000}, Sizes{300, 512, 1000}, Sizes{4, 512, 2056}, Sizes{32, 512, 2056},
                          Sizes{4, 512, 4104}, Sizes{20, 512, 4104}, Sizes{32, 512, 4104}}) {
      const Matrix<k::half> x(21, s.m, s.k, s.k + 8, 0, 1);
      const Plain<k::half, DeviceMemory> w(s.n, s.k, 8, 0);
      multiplies<k::half>(shared, s, {}, x, w);
    }
  }
}

TEST_CASE("small shared memory: decode") {
  Tally t;
  for (const int shared : kSizes) {
    for (const int64_t dim : {64, 128, 256, 512}) {
      for (const int64_t queries : {1, 5}) {
        const AttentionCase c{{queries, queries}, {130, 700}, 8, 2, dim};
        const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
        const KvSide<k::half, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::head, 1, 0, 8),
            value(2, where, dim, ScaleOf::head, 1, 0, 8);
        with_view(where, key, value, [&](const auto& kv) {
          Stream stream;
          const k::Exec ex = exec_with(stream, shared);
          AttentionData<k::half, float, DeviceMemory> data(c);
          const int64_t bytes = int64_t(k::decode_workspace_bytes(ex, data.shape(), data.options()));
          Device<unsigned char> memory(1, bytes, bytes);
          k::Status status;
          const size_t took = shared_of(stream, [&] {
            status = k::decode(ex, data.source(), kv, data.sink(), data.shape(), k::causal(),
                               k::Workspace{memory.data(), size_t(bytes)}, data.options());
          });
          t.expect(took > 0 && took <= size_t(shared), "dim %d took %d bytes of %d", int(dim), int(took), shared);
          data.check(t, "decode", status, key, value, causal_model(), 3,
                     precision_of(k::DecodeMode::automatic, DType::f16, DType::f16, false));
        });
      }
    }
  }
  CHECK_TALLY(t);
}

// So many that two heads of keys would share a tile, if there were shared memory for the tensor cores' kernel.
TEST_CASE("small shared memory: decode, codes of many heads") {
  Tally t;
  for (const int shared : kSizes) {
    const AttentionCase c{std::vector<int64_t>(16, 1), std::vector<int64_t>(16, 70), 48, 24, 64};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const KvSide<int8_t, float, DeviceMemory> key(1, where, c.dim, ScaleOf::head, 1, 0, 16),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 16);
    Stream stream;
    const k::Exec ex = exec_with(stream, shared);
    AttentionData<k::half, float, DeviceMemory> data(c);
    const int64_t bytes = int64_t(k::decode_workspace_bytes(ex, data.shape(), data.options()));
    Device<unsigned char> memory(1, bytes, bytes);
    const OnDevice<int32_t> lengths(where.short_lengths);
    const k::Status status = k::decode<64>(
        ex, data.source(), k::dense_kv(key.tensor(), value.tensor(), static_cast<const int32_t*>(lengths.data())),
        data.sink(), data.shape(), k::causal(), k::Workspace{memory.data(), size_t(bytes)}, data.options());
    stream.wait();
    data.check(t, "decode of codes", status, key, value, causal_model(), 3,
               precision_of(k::DecodeMode::automatic, DType::f16, DType::f16, false));
  }
  CHECK_TALLY(t);
}

TEST_CASE("small shared memory: attention") {
  Tally t;
  for (const int shared : kSizes) {
    for (const int64_t dim : {64, 128, 256, 512, 576}) {
      AttentionCase c{{40, 40}, {90, 300}, 4, 2, dim};
      if (dim > 256) c.v_dim = 512;
      const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
      const auto attend_with = [&](auto type) {
        using T = decltype(type);
        const KvSide<T, k::Nothing, DeviceMemory> key(1, where, dim, ScaleOf::head, 1, 0, 8),
            value(2, where, c.value_dim(), ScaleOf::head, 1, 0, 8);
        with_view(where, key, value, [&](const auto& kv) {
          Stream stream;
          AttentionData<T, float, DeviceMemory> data(c);
          k::Status status;
          const size_t took = shared_of(stream, [&] {
            status = k::attention(exec_with(stream, shared), data.source(), kv, data.sink(), data.shape(), k::causal(),
                                  data.options());
          });
          t.expect(status.ok(), "dim %d: %s", int(dim), status.reason());
          t.expect(took > 0 && took <= size_t(shared), "dim %d took %d bytes of %d", int(dim), int(took), shared);
          check(
              t, "attention", data, [&](int64_t row, int64_t x) { return data.q.value(row, x); }, key, value,
              causal_model(), precision_of<T>(key, value), 7);
        });
      };
      attend_with(k::half());
      attend_with(float());
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("small shared memory: rows") {
  for (const int shared : kSizes) {
    for (const int64_t cols : {300, 5000, 20000, 100000, 300000}) {
      for (const int64_t rows : {1, 300}) {
        if (rows * cols > 10000000) continue;
        Stream stream;
        Trial<Softmax, k::half> half(Shape{rows, cols});
        Trial<LayerNorm, float> full(Shape{rows, cols});
        const size_t took = shared_of(stream, [&] {
          CHECK(half.launch(exec_with(stream, shared)));
          CHECK(full.launch(exec_with(stream, shared)));
        });
        INFO((shared >> 10) << " KB, " << rows << " x " << cols);
        CHECK(took <= size_t(shared));
        half.fetch(), full.fetch();
        CHECK(half.verify(37) == "");
        CHECK(full.verify(37) == "");
      }
    }
  }
}

TEST_CASE("small shared memory: sampling") {
  Tally t;
  for (const int shared : kSizes) {
    Stream stream;
    for (const int64_t n : {1000, 32000, 128256}) {
      check_samples<DeviceMemory, float>(
          t, {8, n}, sample_rules(),
          [&](const auto& logits, auto* tokens, int64_t rows, int64_t vocabulary, const k::Sampling& options) {
            k::Status status;
            const size_t took = shared_of(stream, [&] {
              status = k::sample(exec_with(stream, shared), logits, tokens, rows, vocabulary, options);
            });
            t.expect(took > 0 && took <= size_t(shared), "%d tokens took %d bytes of %d", int(n), int(took), shared);
            return status;
          });
    }
  }
  CHECK_TALLY(t);
}
