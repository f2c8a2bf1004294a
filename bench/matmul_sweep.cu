// Times products beside a kernel that only reads the weights, and cuBLAS, to fill in tuning/matmul.h:
//   matmul_sweep [gemv|types|fused|skinny|gemm]...
#include <cublas_v2.h>

#include <cstring>

#include <kernels/matmul.cuh>

#include "support/gpu_bench.cuh"

namespace k = kernels;

namespace {

#define BLAS_CHECK(call)                                              \
  do {                                                                \
    const cublasStatus_t status = (call);                             \
    if (status != CUBLAS_STATUS_SUCCESS) {                            \
      std::fprintf(stderr, "%s: cuBLAS error %d\n", #call, int(status)); \
      std::exit(1);                                                   \
    }                                                                 \
  } while (false)

// Reads `n` units of 16 bytes and keeps nothing of them.
template <int kUnroll>
__global__ void __launch_bounds__(256) read_kernel(const uint4* from, size_t n, unsigned* never) {
  const size_t first = size_t(blockIdx.x) * blockDim.x * kUnroll + threadIdx.x;
  uint4 values[kUnroll] = {};
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (first + i * blockDim.x < n) values[i] = __ldcs(from + first + i * blockDim.x);
  }
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  if (sum == 0x12345678u) *never = sum;
}
double read_us(int sets, const std::function<const void*(int)>& buffer, size_t bytes, unsigned* never) {
  const size_t n = bytes / 16;
  const auto run = [&](auto unroll) {
    constexpr int kUnroll = decltype(unroll)::value;
    return bench::time_us(sets, [&](cudaStream_t s, int i) {
      read_kernel<kUnroll><<<unsigned((n + 256 * kUnroll - 1) / (256 * kUnroll)), 256, 0, s>>>(static_cast<const uint4*>(buffer(i)), n, never);
    });
  };
  return std::min({run(std::integral_constant<int, 2>()), run(std::integral_constant<int, 4>()), run(std::integral_constant<int, 8>())});
}

template <class T> constexpr cudaDataType kBlasType = CUDA_R_32F;
template <> constexpr cudaDataType kBlasType<k::half> = CUDA_R_16F;
template <> constexpr cudaDataType kBlasType<k::bfloat16> = CUDA_R_16BF;

cublasHandle_t blas() {
  static cublasHandle_t handle = nullptr;
  static void* workspace = nullptr;
  if (handle == nullptr) {
    BLAS_CHECK(cublasCreate(&handle));
    BENCH_CHECK(cudaMalloc(&workspace, 64 << 20));
    BLAS_CHECK(cublasSetWorkspace(handle, workspace, 64 << 20));
  }
  return handle;
}
// y (m x n) = x (m x k) w (n x k)^T, row-major.
template <class T>
void blas_product(cudaStream_t s, const T* x, const T* w, T* y, int64_t m, int64_t n, int64_t kk) {
  const float one = 1, zero = 0;
  BLAS_CHECK(cublasSetStream(blas(), s));
  BLAS_CHECK(cublasGemmEx(blas(), CUBLAS_OP_T, CUBLAS_OP_N, int(n), int(m), int(kk), &one, w, kBlasType<T>, int(kk), x, kBlasType<T>, int(kk), &zero, y, kBlasType<T>, int(n),
                          CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

void must(const k::Status& status) {
  if (status) return;
  std::fprintf(stderr, "matmul: %s\n", status.reason());
  std::exit(1);
}

struct Bench {
  bench::Arena arena{size_t(24) << 30};
  unsigned* never = nullptr;
  Bench() { BENCH_CHECK(cudaMalloc(&never, 4)); }

  template <class T>
  std::vector<T*> rotate(int sets, size_t count, uint64_t seed) {
    std::vector<T*> all;
    for (int i = 0; i < sets; ++i) all.push_back(arena.take<T>(count, seed + i));
    return all;
  }
  void line(const char* what, int64_t m, int64_t n, int64_t kk, double bytes, double read, double ours, double theirs) {
    std::printf("%s m%lld n%lld k%lld: read %.2f us %.0f GB/s; ours %.2f us %.1f%%", what, (long long)m, (long long)n, (long long)kk, read, bytes / read / 1e3, ours, 100 * read / ours);
    if (theirs > 0) std::printf("; cuBLAS %.2f us %.2fx", theirs, theirs / ours);
    std::printf("; %.0f TFLOP/s\n", 2e-6 * double(m) * double(n) * double(kk) / ours);
    std::fflush(stdout);
  }

  template <class T>
  void product(const char* what, int64_t m, int64_t n, int64_t kk, k::Path path = k::Path::automatic) {
    arena.reset();
    const double bytes = double(n) * kk * sizeof(T);
    const int sets = bench::sets_for(bytes);
    const auto w = rotate<T>(sets, size_t(n * kk), 1);
    T* x = arena.take<T>(size_t(m * kk), 99);
    T* y = arena.reserve<T>(size_t(m * n));
    T* z = arena.reserve<T>(size_t(m * n));
    const double read = read_us(sets, [&](int i) { return w[size_t(i)]; }, size_t(bytes), never);
    const double ours = bench::time_us(sets, [&](cudaStream_t s, int i) { must(k::matmul(s, k::load(x, kk), k::load(w[size_t(i)], kk), k::store(y, n), {m, n, kk}, {path})); });
    const double theirs = sizeof(T) == 2 || m > 1 ? bench::time_us(sets, [&](cudaStream_t s, int i) { blas_product(s, x, w[size_t(i)], z, m, n, kk); }) : 0;
    line(what, m, n, kk, bytes, read, ours, theirs);
  }

  // One row of tokens by weights of `bytes_per` bytes that make(pointer) reads; extra bytes are not counted.
  template <class Word, class Make>
  void coded(const char* what, int64_t n, int64_t kk, double bytes_per, const Make& make) {
    arena.reset();
    const double bytes = double(n) * kk * bytes_per;
    const int sets = bench::sets_for(bytes);
    const auto w = rotate<Word>(sets, size_t(bytes / sizeof(Word)), 1);
    k::half* x = arena.take<k::half>(size_t(kk), 99);
    k::half* y = arena.reserve<k::half>(size_t(n));
    const k::half* scales = arena.take<k::half>(size_t(n * kk / 32), 7);
    const double read = read_us(sets, [&](int i) { return w[size_t(i)]; }, size_t(bytes), never);
    const double ours = bench::time_us(sets, [&](cudaStream_t s, int i) { must(k::matmul(s, k::load(x, kk), make(w[size_t(i)], scales), k::store(y, n), {1, n, kk})); });
    line(what, 1, n, kk, bytes, read, ours, 0);
  }
  template <class Make>
  void fused(const char* what, int64_t n, int64_t kk, int matrices, const Make& make) {
    arena.reset();
    const double bytes = double(matrices) * n * kk * 2;
    const int sets = bench::sets_for(bytes);
    const auto w = rotate<k::half>(sets, size_t(matrices * n * kk), 1);
    k::half* x = arena.take<k::half>(size_t(kk), 99);
    k::half* v = arena.take<k::half>(size_t(std::max(n, kk)), 98);
    k::half* y = arena.reserve<k::half>(size_t(matrices * n));
    const double read = read_us(sets, [&](int i) { return w[size_t(i)]; }, size_t(bytes), never);
    const double ours = bench::time_us(sets, [&](cudaStream_t s, int i) { must(make(k::Exec(s), x, w[size_t(i)], v, y)); });
    line(what, 1, n, kk, bytes, read, ours, 0);
  }
};

constexpr int64_t kShapes[][2] = {{2048, 2048}, {4096, 4096}, {8192, 2048}, {2048, 8192}, {6144, 4096}, {14336, 4096}, {4096, 14336}, {28672, 4096}, {32000, 4096}, {128256, 4096}};

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const char* what) {
    for (int i = 1; i < argc; ++i) {
      if (!std::strcmp(argv[i], what)) return true;
    }
    return argc == 1;
  };
  Bench b;
  if (wanted("gemv")) {
    for (const auto& s : kShapes) b.product<k::half>("gemv fp16", 1, s[0], s[1]);
    for (const auto& s : kShapes) b.product<k::bfloat16>("gemv bf16", 1, s[0], s[1]);
    b.product<float>("gemv fp32", 1, 14336, 4096);
  }
  if (wanted("types")) {
    for (const auto& s : {kShapes[5], kShapes[6], kShapes[7]}) {
      const int64_t n = s[0], kk = s[1];
      b.coded<k::float8_e4m3>("e4m3 row", n, kk, 1, [&](auto w, auto scales) { return k::dequant(k::load(w, kk), k::row_scales(scales)); });
      b.coded<k::float8_e4m3>("e4m3 block", n, kk, 1, [&](auto w, auto scales) { return k::dequant(k::load(w, kk), k::block_scales(scales, kk / 128, 128)); });
      b.coded<int8_t>("int8 row", n, kk, 1, [&](auto w, auto scales) { return k::dequant(k::load(w, kk), k::row_scales(scales)); });
      b.coded<int8_t>("int8 group", n, kk, 1, [&](auto w, auto scales) { return k::dequant(k::load(w, kk), k::group_scales(scales, kk / 64, 64)); });
      b.coded<uint32_t>("int4 128", n, kk, 0.5, [&](auto w, auto scales) { return k::dequant(k::int4(w, kk), k::group_scales(scales, kk / 128, 128)); });
      b.coded<uint32_t>("int4 32", n, kk, 0.5, [&](auto w, auto scales) { return k::dequant(k::int4(w, kk), k::group_scales(scales, kk / 32, 32)); });
      b.coded<uint32_t>("gf4", n, kk, 0.5, [&](auto w, auto) { return k::gf4(w, kk); });
    }
  }
  if (wanted("fused")) {
    const int64_t n = 14336, kk = 4096;
    const auto x_of = [](const k::half* x, int64_t c) { return k::load(x, c); };
    b.fused("plain", n, kk, 1, [&](const k::Exec& ex, auto x, auto w, auto, auto y) { return k::matmul(ex, x_of(x, kk), k::load(w, kk), k::store(y, n), {1, n, kk}); });
    b.fused("residual", n, kk, 1, [&](const k::Exec& ex, auto x, auto w, auto v, auto y) { return k::matmul(ex, x_of(x, kk), k::load(w, kk), k::add(k::load(v, n)) | k::store(y, n), {1, n, kk}); });
    b.fused("bias gelu", n, kk, 1, [&](const k::Exec& ex, auto x, auto w, auto v, auto y) { return k::matmul(ex, x_of(x, kk), k::load(w, kk), k::bias(v) | k::gelu() | k::store(y, n), {1, n, kk}); });
    b.fused("rmsnorm", n, kk, 1, [&](const k::Exec& ex, auto x, auto w, auto v, auto y) { return k::matmul(ex, k::normed(x_of(x, kk), k::RmsNorm{}) | k::mul(v), k::load(w, kk), k::store(y, n), {1, n, kk}); });
    b.fused("swiglu", n, kk, 2, [&](const k::Exec& ex, auto x, auto w, auto, auto y) { return k::matmul(ex, x_of(x, kk), k::gated(k::load(w, kk), k::load(w + n * kk, kk)), k::swiglu() | k::store(y, n), {1, n, kk}); });
    b.fused("qkv", 6144, kk, 1, [&](const k::Exec& ex, auto x, auto w, auto, auto y) {
      return k::matmul(ex, x_of(x, kk), k::stacked(k::load(w, kk), 4096, k::load(w + 4096 * kk, kk), 1024, k::load(w + 5120 * kk, kk), 1024),
                       k::apart(k::store(y, 4096), 4096, k::store(y + 4096, 1024), 1024, k::store(y + 5120, 1024), 1024), {1, 6144, kk});
    });
  }
  if (wanted("skinny")) {
    for (const auto& s : {kShapes[5], kShapes[6]}) {
      for (const int64_t m : {2, 3, 4, 5, 8, 9, 16, 17, 24, 32, 33, 64}) b.product<k::bfloat16>("skinny bf16", m, s[0], s[1]);
      for (const int64_t m : {2, 4, 8}) b.product<k::bfloat16>("gemv path", m, s[0], s[1], k::Path::gemv);
      for (const int64_t m : {1, 2, 4}) b.product<k::bfloat16>("skinny path", m, s[0], s[1], k::Path::skinny);
    }
  }
  if (wanted("gemm")) {
    for (const int64_t n : {1024, 2048, 4096, 8192}) b.product<k::bfloat16>("gemm bf16", n, n, n);
    b.product<k::half>("gemm fp16", 4096, 4096, 4096);
    b.product<float>("gemm fp32", 2048, 2048, 2048);
  }
}
