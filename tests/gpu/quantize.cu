// Rows quantized with a scale each, behind the operation, in every residency but split, which refuses.
#include "support/gpu.cuh"

#include <kernels/cpu/rmsnorm.h>
#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>

#include "support/given_scales.h"
#include "support/row_groups.h"

using namespace test;

namespace {

constexpr int64_t kCols[] = {1, 48, 257, 1000, 5000, 20001};

// The wanted codes and scales of rows of values.
template <class T>
struct Quantized {
  std::vector<Row<float>> codes;
  std::vector<Real<float>> scales;
  explicit Quantized(const std::vector<Row<float>>& values) : codes(values) {
    for (Row<float>& row : codes) scales.push_back(quantize<T>(row));
  }
  std::string check(Device<T>& q, Device<float>& scale) const {
    const std::string problem = compare(scale, [&](int64_t r) { return Row<float>{scales[size_t(r)]}; });
    return problem.empty() ? compare(q, codes) : "scale: " + problem;
  }
};

template <class F>
void each_quantizing_residency(int64_t rows, int64_t cols, F f, bool wide = true) {
  each_residency(rows, cols, Needs{4, wide}, [&](const k::Exec& ex, const k::RowPolicy& policy) {
    if (policy.residency != k::Residency::split) f(ex, policy);
  });
}

}  // namespace

TEST_CASE("quantize: rmsnorm to int8, with rows of zeros and of NaN") {
  for (const double size : {1.0, 1e-39, 1e30}) {
    for (const int64_t cols : kCols) {
      const int64_t rows = 7;
      Device<k::half> x(rows, cols, cols, 0, Poison::nan);
      Device<float> gamma(1, cols, cols);
      randomize(x, 1);
      randomize(gamma, 2);
      for (int64_t c = 0; c < cols; ++c) {
        gamma.set(0, c, float(size * gamma.get(0, c)));
        x.set(5, c, make<k::half>(0));
        if (c == cols / 2) x.set(6, c, make<k::half>(std::nan("")));
      }
      x.upload();
      gamma.upload();
      const Quantized<int8_t> want(all_rows(rows, [&](int64_t r) {
        Row<float> row = row_of(x, r);
        rmsnorm(row, 1e-5);
        for (size_t c = 0; c < row.size(); ++c) row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c)));
        return row;
      }));
      each_quantizing_residency(rows, cols, [&](const k::Exec& ex, const k::RowPolicy& policy) {
        INFO("gamma of size " << size);
        Device<int8_t> q(rows, cols, cols + 16);
        Device<float> scales(rows, 1, 1);
        REQUIRE(k::rmsnorm(ex, k::load(x.data(), x.ld()),
                           k::affine(gamma.data()) | k::quantize(q.data(), q.ld(), scales.data()), rows, cols,
                           k::RmsNorm{}, policy));
        wait(ex);
        CHECK(want.check(q, scales) == "");
      });
    }
  }
}

TEST_CASE("quantize: residual in place and layernorm to e4m3") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6;
    Device<k::bfloat16> x(rows, cols, cols, 0, Poison::nan);
    Device<float> res(rows, cols, cols + 4), gamma(1, cols, cols), beta(1, cols, cols);
    randomize(x, 1);
    randomize(res, 2);
    randomize(gamma, 3);
    randomize(beta, 4);
    const auto sum = all_rows(rows, [&](int64_t r) {
      Row<float> h = row_of(x, r), added = row_of(res, r);
      for (size_t c = 0; c < h.size(); ++c) h[c] = h[c] + added[c];
      return h;
    });
    auto normed = sum;
    for (Row<float>& row : normed) {
      layernorm(row, 1e-5);
      for (size_t c = 0; c < row.size(); ++c) {
        row[c] = row[c] * Real<float>(gamma.get(0, int64_t(c))) + Real<float>(beta.get(0, int64_t(c)));
      }
    }
    const Quantized<k::float8_e4m3> want(normed);
    each_quantizing_residency(rows, cols, [&](const k::Exec& ex, const k::RowPolicy& policy) {
      randomize(res, 2);
      Device<k::float8_e4m3> q(rows, cols, cols);
      Device<float> scales(rows, 1, 1);
      const auto h = k::load(x.data(), x.ld()) | k::add(k::load(res.data(), res.ld())) | k::tee(res.data(), res.ld());
      REQUIRE(k::layernorm(ex, h, k::affine(gamma.data(), beta.data()) | k::quantize(q.data(), q.ld(), scales.data()),
                           rows, cols, k::LayerNorm{}, policy));
      wait(ex);
      CHECK(compare(res, sum) == "");
      CHECK(want.check(q, scales) == "");
    });
  }
}

// The plain copy is written once, also where the row is read twice.
TEST_CASE("quantize: rmsnorm to e5m2, with a plain copy in front") {
  for (const int64_t cols : kCols) {
    const int64_t rows = 6, off = cols == 1000 ? 1 : 0;
    Device<float> x(rows, cols, cols, 0, Poison::nan);
    randomize(x, 1);
    const auto normed = all_rows(rows, [&](int64_t r) {
      Row<float> row = row_of(x, r);
      rmsnorm(row, 1e-5);
      return row;
    });
    auto stored = normed;  // what the copy holds is what is quantized
    for (Row<float>& row : stored) {
      for (Real<float>& a : row) a = rounded_to<k::half>(a);
    }
    const Quantized<k::float8_e5m2> want(stored);
    each_quantizing_residency(
        rows, cols,
        [&](const k::Exec& ex, const k::RowPolicy& policy) {
          Device<k::half> copy(rows, cols, cols + off);
          Device<k::float8_e5m2> q(rows, cols, cols + 5 * off, off);
          Device<float> scales(rows, 1, 1);
          REQUIRE(k::rmsnorm(ex, k::load(x.data(), x.ld()),
                             k::tee(copy.data(), copy.ld()) | k::quantize(q.data(), q.ld(), scales.data()), rows, cols,
                             k::RmsNorm{}, policy));
          wait(ex);
          CHECK(compare(copy, normed) == "");
          CHECK(want.check(q, scales) == "");
        },
        off == 0);
  }
}

// Few threads and narrow packs, and every residency where warps hold groups.
struct ByGroup {
  std::vector<k::RowPolicy> ways(int64_t cols, int64_t group) const {
    using R = k::Residency;
    std::vector<k::RowPolicy> all = {
        {}, policy(R::streamed, 32), policy(R::streamed, 96), policy(R::automatic, 0, 1, 1)};
    all.back().max_blocks = 2;
    if (cols % 256 != 0 || group < 16 || group > 128) return all;
    for (const k::RowPolicy& p : residencies(cols)) {
      if (p.residency != R::split && p.max_pack == 0) all.push_back(p);
    }
    return all;
  }
  template <class In, class Out>
  k::Status run(const k::RmsNorm& options, const In& in, const Out& out, int64_t rows, int64_t cols,
                const k::RowPolicy& policy) const {
    return waited(k::rmsnorm(stream, in, out, rows, cols, options, policy));
  }
  template <class In, class Out>
  k::Status run(const k::LayerNorm& options, const In& in, const Out& out, int64_t rows, int64_t cols,
                const k::RowPolicy& policy) const {
    return waited(k::layernorm(stream, in, out, rows, cols, options, policy));
  }
  template <class In, class Out>
  k::Status run(const k::Softmax&, const In& in, const Out& out, int64_t rows, int64_t cols,
                const k::RowPolicy& policy) const {
    return waited(k::softmax(stream, in, out, rows, cols, policy));
  }
  k::Status waited(const k::Status& status) const {
    stream.wait();
    return status;
  }
  Stream stream;
};

template <class T>
__global__ void count_other_quotients(unsigned long long* count) {
  const float most = k::detail::Largest<T>::value;
  const auto differ = [](float a, float b) { return __float_as_uint(a) != __float_as_uint(b) && (a == a || b == b); };
  for (uint64_t bits = blockIdx.x * 256ull + threadIdx.x; bits < 1ull << 31; bits += gridDim.x * 256ull) {
    const k::detail::LargestSeen<T> seen{uint32_t(bits)};
    const float factor = bits == 0 ? 0.f : __fdiv_rn(most, seen.value());
    if (differ(seen.scale(), __fdiv_rn(seen.value(), most)) || differ(seen.finish(), factor))
      atomicAdd(count, 1ull);
  }
}

TEST_CASE("quantize: scales and their reciprocals of all largest values") {
  unsigned long long* count = nullptr;
  check_cuda(cudaMallocManaged(&count, sizeof *count));
  *count = 0;
  count_other_quotients<int8_t><<<2048, 256>>>(count);
  count_other_quotients<k::float8_e4m3><<<2048, 256>>>(count);
  count_other_quotients<k::float8_e5m2><<<2048, 256>>>(count);
  check_cuda(cudaDeviceSynchronize());
  CHECK(*count == 0);
  cudaFree(count);
}

TEST_CASE("quantize: groups of columns behind an operation") {
  Tally t;
  check_quantized_by_groups<DeviceMemory>(t, ByGroup());
  CHECK_TALLY(t);
}

TEST_CASE("quantize: what holds groups behind an operation") {
  Stream stream;
  Device<k::half> x(300, 4096, 4096);
  Device<int8_t> q(300, 4096, 4096);
  Device<float> scales(300, 4096, 4096);
  const auto plan_of = [&](int64_t cols, int group, const k::RowPolicy& policy, k::RowPlan& plan) {
    return k::row_plan(stream, k::RmsNorm{}, k::load(x.data(), 4096),
                       k::quantize(q.data(), 4096, scales.data(), 4096, group), 300, cols, policy, plan);
  };
  const auto says = [&](int64_t cols, int group, const k::RowPolicy& policy) {
    k::RowPlan plan;
    return std::string(plan_of(cols, group, policy, plan).reason());
  };
  using R = k::Residency;
  k::RowPlan plan;
  REQUIRE(plan_of(4096, 128, {}, plan));
  CHECK(plan.policy.residency == R::registers);
  CHECK(plan.pack == 8);
  REQUIRE(plan_of(256, 128, {}, plan));
  CHECK(plan.policy.residency == R::group);
  CHECK(plan.policy.threads == 32);
  for (const int group : {96, 512}) {
    REQUIRE(plan_of(4096, group, {}, plan));
    CHECK(plan.policy.residency == R::streamed);
    CHECK(plan.policy.threads == 256);
  }
  CHECK(says(256, 128, policy(R::group, 16)) == "policy: rows whose groups are quantized need groups of 32 threads");
  CHECK(says(4095, 128, policy(R::registers)) ==
        "policy: such groups as are quantized here are streamed, a row by each block");
  CHECK(says(4095, 128, policy(R::streamed, 0, 2)) ==
        "policy: such groups as are quantized here are streamed, a row by each block");
  CHECK(says(4095, 128, policy(R::automatic, 64)) == "policy: threads and cluster go with a residency");
  CHECK(says(4095, 128, policy(R::streamed, 48)) == "policy: threads of a block is not a multiple of 32 up to 256");
}

// The same functor objects, over memory that both reach.
TEST_CASE("quantize: groups behind an operation as on the CPU") {
  const int64_t rows = 9, cols = 1536, groups = cols / 128;
  k::half* x = nullptr;
  float* scales = nullptr;
  int8_t* codes = nullptr;
  check_cuda(cudaMallocHost(&x, size_t(rows * cols) * sizeof(k::half)));
  check_cuda(cudaMallocHost(&scales, size_t(rows * groups) * sizeof(float)));
  check_cuda(cudaMallocHost(&codes, size_t(rows * cols)));
  Random random(1);
  for (int64_t i = 0; i < rows * cols; ++i) x[i] = make<k::half>(random.normal());
  const auto in = k::load(static_cast<const k::half*>(x), cols);
  const auto out = k::quantize(codes, cols, scales, groups, 128);
  Stream stream;
  REQUIRE(k::rmsnorm(stream, in, out, rows, cols));
  stream.wait();
  const std::vector<float> found(scales, scales + rows * groups);
  const std::vector<int8_t> written(codes, codes + rows * cols);
  REQUIRE(k::cpu::rmsnorm(k::cpu::Exec{2}, in, out, rows, cols));
  for (int64_t i = 0; i < rows * groups; ++i) CHECK(std::fabs(found[size_t(i)] / scales[i] - 1) < 1e-6);
  for (int64_t i = 0; i < rows * cols; ++i) {
    if (std::abs(int(written[size_t(i)]) - int(codes[i])) > 1) FAIL("code " << i);
  }
  for (void* p : {static_cast<void*>(x), static_cast<void*>(scales), static_cast<void*>(codes)}) cudaFreeHost(p);
}

TEST_CASE("quantize: scales that are given, behind every operation") {
  Tally t;
  const Stream stream;
  const int64_t tokens = 6, heads = 4, dim = 64, cols = heads * dim;
  const RandomMatrix<k::half, DeviceMemory> x(1, tokens, cols, cols), w(2, 40, cols, cols);
  const RandomMatrix<float, DeviceMemory> lse(5, tokens, heads, heads);
  const RandomMatrix<k::half, DeviceMemory> keys(3, 20, 2 * dim, 2 * dim), values(4, 20, 2 * dim, 2 * dim);
  const auto in = k::load(x.data(), cols);
  const auto kv = k::dense_kv(k::nhd(keys.data(), 10, 2, dim), k::nhd(values.data(), 10, 2, dim), 10);
  const k::AttentionShape shape{2, tokens / 2, heads, 2, dim};
  const int64_t bytes = int64_t(k::decode_workspace_bytes(stream, shape));
  const Device<unsigned char> room(1, bytes, bytes);
  // call(sink) begins the work.
  const auto check = [&](const char* what, int64_t rows, int64_t width, const auto& call) {
    check_given_scales<DeviceMemory>(t, what, rows, width, [&](const auto& out) {
      const k::Status status = call(out);
      stream.wait();
      return status;
    });
  };
  check("copy", tokens, cols, [&](const auto& out) { return k::copy(stream, in, out, tokens, cols); });
  check("softmax", tokens, cols, [&](const auto& out) { return k::softmax(stream, in, out, tokens, cols); });
  check("rmsnorm", tokens, cols,
        [&](const auto& out) { return k::rmsnorm(stream, in, k::relu() | out, tokens, cols); });
  const auto product = [&](auto only, const auto& out) {
    return k::matmul<decltype(only)::value>(stream, in, k::load(w.data(), cols), k::scale(0.1) | out,
                                            {tokens, 40, cols});
  };
  check("product", tokens, 40,
        [&](const auto& out) { return product(std::integral_constant<k::Path, k::Path::gemm>(), out); });
  check("product of few tokens", tokens, 40,
        [&](const auto& out) { return product(std::integral_constant<k::Path, k::Path::skinny>(), out); });
  check("attention", tokens, cols,
        [&](const auto& out) { return k::attention<64>(stream, in, kv, out, shape, k::causal()); });
  check("decode", tokens, cols, [&](const auto& out) {
    return k::decode<64>(stream, in, kv, out, shape, k::causal(), k::Workspace{room.data(), size_t(bytes)});
  });
  check("merge_states", tokens / 2, cols, [&](const auto& out) {
    return k::merge_states(stream, in, k::load(lse.data(), heads), out, {2, tokens / 2, heads, dim});
  });
  check("norm_heads", tokens, cols, [&](const auto& out) {
    return k::norm_heads(stream, in, out, {tokens, heads, dim, heads});
  });
  CHECK_TALLY(t);
}

TEST_CASE("quantize: a split row is refused") {
  Stream stream;
  const int64_t rows = 2, cols = 4096;
  Workspace workspace(rows);
  Device<float> x(rows, cols, cols), scales(rows, 1, 1);
  Device<k::half> copy(rows, cols, cols);
  Device<k::float8_e5m2> q(rows, cols, cols);
  const k::Status status = k::rmsnorm(workspace.exec(stream), k::load(x.data(), cols),
                                      k::tee(copy.data(), cols) | k::quantize(q.data(), cols, scales.data()), rows,
                                      cols, k::RmsNorm{}, policy(k::Residency::split));
  CHECK(status.code() == k::Code::unsupported);
  stream.wait();
  CHECK((q.unchanged() && copy.unchanged() && scales.unchanged()));
}
