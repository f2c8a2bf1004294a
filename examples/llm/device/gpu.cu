// The calls on the GPU. CMake compiles this file for each type of activations, UNIT=f16 or bf16: once for rows, once
// for the products of each type of weights (WEIGHTS=f16 and so on), and once for the attention of each type of keys and
// values (CACHE=f16).
#include <kernels/append.h>
#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/embed.h>
#include <kernels/layernorm.cuh>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/rope.h>
#include <kernels/router.cuh>
#include <kernels/sampling.cuh>

#include "device/elements.h"

namespace llm {
namespace k = kernels;
namespace on = kernels;

namespace {
constexpr Type kActivations = Type::UNIT;
[[maybe_unused]] constexpr unsigned kNeeds = 0;
// With rows of several tokens, products wait for the kernel before them before they let the next one begin. Otherwise
// attention begins while the product before it still reads, and takes 54 instead of 41 us (32 texts of 1,000 tokens of
// a 7B model on an H200), while products gain nothing, or lose 1 % (int4). Norms do not wait.
on::Exec exec(const Place& place, int64_t rows = 1) {
  return on::Exec{static_cast<cudaStream_t>(place.stream)}
      .programmatic(place.early)
      .constant_weights(place.early && rows == 1);
}
[[maybe_unused]] on::Exec for_product(const Place& place, int64_t rows) {
  return place.invariant ? exec(place, rows) : exec(place, rows).workspace(place.room, place.room_bytes);
}
// With weights of fewer than 16 bits attention waits in the same way. A layer with those 32 texts takes 159 us if it
// waits and 157 if not; with int4 145 and 151.
[[maybe_unused]] on::Exec for_attention(const Place& place, int64_t rows) { return exec(place, place.wide ? 1 : rows); }
[[maybe_unused]] size_t decode_bytes(const Place& place, const k::AttentionShape& shape, const k::Attention& options) {
  return on::decode_workspace_bytes(exec(place), shape, options);
}
[[maybe_unused]] constexpr bool kSplitsChunks = true;
[[maybe_unused]] size_t chunk_bytes(const Place& place, const k::AttentionShape& shape, const k::Attention& options) {
  return on::attention_workspace_bytes(exec(place), shape, options);
}
[[maybe_unused]] on::MatmulPolicy policy(const Place& place) {
  on::MatmulPolicy out;
  out.weights_ready = place.early, out.batch_invariant = place.invariant;
  return out;
}
// Calls layernorm() or rmsnorm(), according to the type of the options.
template <class In, class Out, class Options>
k::Status normalize(const Place& place, const In& in, const Out& out, int64_t rows, int64_t cols, const Options& norm) {
  k::RowPolicy policy;
  policy.batch_invariant = place.invariant;
  if constexpr (std::is_same<Options, k::LayerNorm>::value)
    return k::layernorm(exec(place), in, out, rows, cols, norm, policy);
  else
    return k::rmsnorm(exec(place), in, out, rows, cols, norm, policy);
}
#if defined(WEIGHTS)
bool takes_codes(const Place& place);
constexpr Type kWeights = Type::WEIGHTS, kCaches[] = {Type::UNIT};
// One token's product with weights of 16 bits runs on CUDA cores (gemv), where each block computes the norm of the row
// while its weights are on their way.
constexpr bool kFolds = bits_of(kWeights) == 16;
constexpr int64_t kDecodesFrom = bits_of(kWeights) == 16 ? 0
                                 : kWeights == Type::f8  ? k::tuning::kDecodeAheadFloatTokens
                                                         : k::tuning::kDecodeAheadTokens;
template <class X, class W, class Out>
k::Status one_row(const Place& place, const X& x, const W& w, const Out& out, const k::MatmulShape& shape) {
  return k::matmul<k::Path::gemv>(exec(place), x, w, out, shape, policy(place));
}
template <class X, class W, class Out>
k::Status many_rows(const Place& place, const X& x, const W& w, const Out& out, const k::MatmulShape& shape) {
  return k::matmul<k::Path::gemm>(for_product(place, shape.m), x, w, out, shape, policy(place));
}
#elif defined(CACHE)
constexpr Type kCaches[] = {Type::CACHE};
#else
constexpr Type kCaches[] = {Type::UNIT, Type::f8, Type::i8};
#endif
}  // namespace

#include "device/calls.inl"

#if defined(WEIGHTS)
#include "device/products.inl"
namespace {
bool takes_codes(const Place& place) {
  if constexpr (bits_of(kWeights) == 8) {
    constexpr int64_t n = 128;
    float* out = nullptr;  // then inputs and weights: only for planning, neither read nor written
    if (cudaMalloc(&out, 2 * n * n * sizeof(float)) != cudaSuccess) return false;
    float* const in = out + n * n;
    k::MatmulPlan plan;
    const k::Status planned = k::matmul_plan(exec(place), codes({in, nullptr, in}, n),
                                             weights({in, in, n, n, kWeights}),
                                             k::bias(static_cast<const float*>(in)) | k::store(out, n),
                                             {kManyRows, n, n}, {}, policy(place), plan);
    cudaFree(out);
    return planned.ok() && plan.in_eight;
  }
  return false;
}
}  // namespace
#elif defined(CACHE)
#include "device/attend.inl"
#else
namespace {
__global__ void read_words(const uint4* p, size_t n, uint32_t* out) {
  uint32_t sum = 0;
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i + 3 * step < n; i += 4 * step) {
    uint4 v[4];
    for (int j = 0; j < 4; ++j) v[j] = __ldcs(p + i + j * step);
    for (int j = 0; j < 4; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678) *out = 1;  // so that the compiler keeps the reads
}
const char* read_all(const Place& place, const void* from, size_t bytes, uint32_t* out) {
  read_words<<<1056, 256, 0, static_cast<cudaStream_t>(place.stream)>>>(static_cast<const uint4*>(from), bytes / 16,
                                                                        out);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
}  // namespace
#include "device/rows.inl"
#endif

}  // namespace llm
