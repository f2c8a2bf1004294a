// Every operation once, as a user's program has them: one file for each call, all in one program, for every
// architecture that the library knows. Inputs are ones, so that every result is known.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <kernels/core/attention_call.h>
#include <kernels/core/sampling.h>
#include <kernels/core/status.h>
#include <kernels/router.h>

namespace k = kernels;

k::Status call_softmax(cudaStream_t, const __half* x, __half* y, int64_t rows, int64_t cols);
k::Status call_rmsnorm(cudaStream_t, const __half* x, const __half* gamma, __half* y, int64_t rows, int64_t cols);
k::Status call_layernorm(cudaStream_t, const __half* x, const __half* bias, __half* res, const __half* gamma,
                         const __half* beta, __half* y, int64_t rows, int64_t d);
k::Status call_copy(cudaStream_t, const __half* x, __half* y, int64_t rows, int64_t cols);
k::Status call_copy_groups(cudaStream_t, const __half* x, int8_t* q, float* scales, int64_t rows, int64_t cols);
k::Status call_embed(cudaStream_t, const __half* table, const int32_t* ids, int64_t vocabulary, __half* x,
                     int64_t* wrong, int64_t rows, int64_t cols);
k::Status call_matmul(cudaStream_t, const __half* x, const __half* w, const float* bias, __half* y, int64_t m,
                      int64_t n, int64_t d);
k::Status call_matmul_int4(cudaStream_t, const __half* x, const uint32_t* w, const __half* scales, __half* y, int64_t m,
                           int64_t n, int64_t d);
k::Status call_matmul_in_eight(cudaStream_t, const k::float8_e4m3* x, const float* x_scales, const k::float8_e4m3* w,
                               const float* w_scales, __half* y, int64_t m, int64_t n, int64_t d);
k::Status call_experts(cudaStream_t, const __half* x, const __half* gate, const __half* up, const int32_t* order,
                       __half* h, const k::MatmulShape&, int64_t top_k, const k::Groups&);
k::Status call_qkv(cudaStream_t, const __half* x, const __half* wq, const __half* wk, const __half* wv, __half* q,
                   __half* keys, __half* values, const int32_t* positions, const float* frequencies,
                   const k::AttentionShape&, int64_t d);
k::Status call_attention(cudaStream_t, const __half* q, const __half* keys, const __half* values, const int32_t* table,
                         const int32_t* lengths, __half* o, const k::AttentionShape&);
k::Status call_attention_128(cudaStream_t, const __half* q, const __half* keys, const __half* values,
                             const int32_t* table, const int32_t* lengths, __half* o, const k::AttentionShape&);
k::Status call_decode(cudaStream_t, const __half* q, const __half* keys, const __half* values, const int32_t* table,
                      const int32_t* lengths, __half* o, const k::AttentionShape&, k::Workspace);
k::Status call_norm_heads(cudaStream_t, const __half* qkv, const __half* weight, __half* q, __half* keys,
                          __half* values, const int32_t* positions, const float* frequencies, int64_t tokens,
                          int64_t heads, int64_t kv_heads, int64_t capacity);
k::Status call_router(cudaStream_t, const __half* logits, const float* bias, int32_t* ids, float* weights,
                      const k::ExpertOrder&, const k::RouterShape&, k::Workspace);
k::Status call_sample(cudaStream_t, const float* logits, int32_t* tokens, int64_t rows, int64_t vocabulary,
                      const k::Sampling& options);
k::Status call_verify(cudaStream_t, const float* logits, const int32_t* drafts, const float* q, int32_t* tokens,
                      int32_t* accepted, const k::VerifyShape&);
k::Status call_log_probs(cudaStream_t, const float* logits, const int32_t* tokens, float* log_probs, int64_t rows,
                         int64_t vocabulary);
k::Status call_merge_states(cudaStream_t, const float* parts, const float* lse, __half* o, const k::MergeShape&);

namespace {

int failures = 0;

template <class T>
T* filled(size_t count, T value) {
  const std::vector<T> host(count, value);
  T* p = nullptr;
  if (cudaMalloc(reinterpret_cast<void**>(&p), count * sizeof(T)) != cudaSuccess) std::exit(1);
  if (cudaMemcpy(p, host.data(), count * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) std::exit(1);
  return p;
}

// Every element of the result is `want`.
void check(const char* call, const k::Status& status, const __half* result, size_t count, double want) {
  std::vector<__half> got(count);
  const cudaError_t error = cudaMemcpy(got.data(), result, count * sizeof(__half), cudaMemcpyDeviceToHost);
  size_t wrong = 0;
  for (const __half value : got) wrong += !(std::fabs(double(__half2float(value)) - want) <= 1e-3 * want);
  if (status && error == cudaSuccess && wrong == 0) return;
  ++failures;
  std::printf("%s: %s, %s, %zu of %zu are not %g\n", call, status ? "ok" : status.reason(), cudaGetErrorString(error),
              wrong, count, want);
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  const int64_t m = 64, n = 256, d = 128, most = 1024 * 1024;
  const __half one = __float2half(1.f);
  const __half* const x = filled(most, one);
  __half* const res = filled(most, one);
  const float* const ones = filled(most, 1.f);
  const uint32_t* const codes = filled(size_t(n * d / 8), 0x99999999u);  // 9 - 8 each
  const int32_t* const page = filled(2 * 1024, int32_t{0});
  const int32_t* const length = filled(4, int32_t{13});
  const k::Workspace workspace{filled(64 << 20, char{0}), 64 << 20};
  const auto poisoned = [&](int64_t count) { return filled(size_t(count), __float2half(NAN)); };

  // Rows that a warp, a block, and a cluster or several blocks hold.
  for (const int64_t cols : {256, 8192, 131072}) {
    __half* y = poisoned(8 * cols);
    check("softmax", call_softmax(nullptr, x, y, 8, cols), y, size_t(8 * cols), 1.0 / double(cols));
    y = poisoned(8 * cols);
    check("rmsnorm", call_rmsnorm(nullptr, x, x, y, 8, cols), y, size_t(8 * cols), 1);
  }
  __half* y = poisoned(m * n);
  check("layernorm", call_layernorm(nullptr, x, x, res, x, x, y, m, n), y, size_t(m * n), 1);
  check("layernorm, the residual", {}, res, size_t(m * n), 3);
  y = poisoned(m * n);
  check("copy", call_copy(nullptr, x, y, m, n), y, size_t(m * n), 2);
  // Groups of ones have scales of 1 / 127.
  float* const scales = filled(size_t(m * n / 128), 0.f);
  const k::Status grouped = call_copy_groups(nullptr, x, filled(size_t(m * n), int8_t{0}), scales, m, n);
  std::vector<float> found(size_t(m * n / 128));
  if (!grouped ||
      cudaMemcpy(found.data(), scales, found.size() * sizeof(float), cudaMemcpyDeviceToHost) != cudaSuccess ||
      found != std::vector<float>(found.size(), 1.f / 127)) {
    ++failures;
    std::printf("copy, groups: %s, or wrong scales\n", grouped.reason());
  }
  y = poisoned(m * n);
  check("embed", call_embed(nullptr, x, page, 1, y, filled(1, int64_t{-1}), m, n), y, size_t(m * n), 1);
  for (const int64_t tokens : {int64_t(1), int64_t(8), m}) {
    y = poisoned(m * n);
    check("matmul", call_matmul(nullptr, x, x, ones, y, tokens, n, d), y, size_t(tokens * n), double(d + 1));
    y = poisoned(m * n);
    check("matmul, int4", call_matmul_int4(nullptr, x, codes, x, y, tokens, n, d), y, size_t(tokens * n), double(d));
  }
  const k::float8_e4m3* const eights = filled(size_t(n * d), k::convert<k::float8_e4m3>(1.f));
  y = poisoned(m * n);
  check("matmul, in 8 bits", call_matmul_in_eight(nullptr, eights, ones, eights, ones, y, m, n, d), y, size_t(m * n),
        double(d));
  // The second of two experts has all rows; the first one's weights are no numbers.
  int32_t* const ends = filled(3, int32_t(m));
  __half* const gate = poisoned(2 * n * d);
  if (cudaMemset(ends, 0, 2 * sizeof(int32_t)) != cudaSuccess) std::exit(1);
  if (cudaMemcpy(gate + n * d, x, size_t(n * d) * sizeof(__half), cudaMemcpyDeviceToDevice) != cudaSuccess)
    std::exit(1);
  y = poisoned(m * n);
  check("experts", call_experts(nullptr, x, gate, x, page, y, {m, n, d}, 2, {2, ends}), y, size_t(m * n),
        double(d * d));
  const int64_t heads = 4, kv_heads = 2, width = heads * d;
  y = poisoned(2 * 5 * width);
  check("attention", call_attention(nullptr, x, x, x, page, length, y, {2, 5, heads, kv_heads, d}), y,
        size_t(2 * 5 * width), 1);
  y = poisoned(2 * 5 * width);
  check("attention<128>", call_attention_128(nullptr, x, x, x, page, length, y, {2, 5, heads, kv_heads, d}), y,
        size_t(2 * 5 * width), 1);
  y = poisoned(2 * width);
  check("decode", call_decode(nullptr, x, x, x, page, length, y, {2, 1, heads, kv_heads, d}, workspace), y,
        size_t(2 * width), 1);
  // At position 0 nothing turns.
  for (const int64_t tokens : {int64_t(1), int64_t(50)}) {
    y = poisoned(tokens * width);
    __half *const keys = poisoned(tokens * width / 2), *const values = poisoned(tokens * width / 2);
    check("queries, keys and values of a product",
          call_qkv(nullptr, x, x, x, x, y, keys, values, page, ones, {tokens, 1, heads, kv_heads, d}, d), y,
          size_t(tokens * width), double(d));
    check("keys of a product", {}, keys, size_t(tokens * width / 2), double(d));
    check("values of a product", {}, values, size_t(tokens * width / 2), double(d));
    y = poisoned(tokens * width);
    check("norm_heads, queries",
          call_norm_heads(nullptr, x, x, y, keys, values, page, ones, tokens, heads, kv_heads, 1), y,
          size_t(tokens * width), 1);
    check("norm_heads, keys", {}, keys, size_t(tokens * width / 2), 1);
    check("norm_heads, values", {}, values, size_t(tokens * width / 2), 1);
  }
  y = poisoned(5 * width);
  check("merge_states", call_merge_states(nullptr, ones, ones, y, {2, 5, heads, d}), y, size_t(5 * width), 1);
  // Equal logits: each token's choices are the first experts, so row e * tokens + t is choice e of token t.
  for (const int64_t tokens : {int64_t(2), int64_t(4096)}) {
    const int64_t chosen = 8, choices = tokens * chosen;
    int32_t *ids = filled(size_t(choices), -7), *offsets = filled(257, -7), *order = filled(size_t(choices), -7),
            *places = filled(size_t(choices), -7);
    float* const weights = filled(size_t(choices), NAN);
    const k::Status routed =
        call_router(nullptr, x, ones, ids, weights, {offsets, order, places}, {tokens, 256, chosen}, workspace);
    std::vector<int32_t> got(static_cast<size_t>(choices));
    const cudaError_t error = cudaMemcpy(got.data(), order, size_t(choices) * sizeof(int32_t), cudaMemcpyDeviceToHost);
    size_t wrong = 0;
    for (int64_t i = 0; i < choices; ++i) wrong += got[size_t(i)] != i % tokens * chosen + i / tokens;
    if (!routed || error != cudaSuccess || wrong > 0) {
      ++failures;
      std::printf("router: %s, %s, %zu of %d rows are wrong\n", routed ? "ok" : routed.reason(),
                  cudaGetErrorString(error), wrong, int(choices));
    }
  }
  // Equal logits: the first tokens are the largest, and a draft that is one of them is accepted by a drafter that gives
  // it 1/8.
  const auto expect = [](const char* call, const k::Status& status, bool right) {
    if (status && right) return;
    ++failures;
    std::printf("%s: %s\n", call, status ? "ok, but not what it should give" : status.reason());
  };
  const auto read = [](auto* p, int64_t at) {
    std::decay_t<decltype(*p)> value{};
    return cudaMemcpy(&value, p + at, sizeof(value), cudaMemcpyDeviceToHost) == cudaSuccess ? double(value) : NAN;
  };
  int32_t *const tokens = filled(16, int32_t{-7}), *const accepted = filled(8, int32_t{-7}),
                 *const drafted = filled(8, int32_t{3});
  float *const eighths = filled(size_t(8 * 131072), 0.125f), *const logs = filled(8, float(NAN));
  const k::Status sampled = call_sample(nullptr, ones, tokens, 8, 131072, k::Sampling{}.greedy());
  expect("sample", sampled, read(tokens, 0) == 0 && read(tokens, 7) == 0);
  const k::Status verified = call_verify(nullptr, ones, drafted, eighths, tokens, accepted, {4, 1, 131072});
  expect("verify", verified,
         read(accepted, 3) == 1 && read(tokens, 6) == 3 && read(tokens, 7) >= 0 && read(tokens, 7) < 4);
  const k::Status scored = call_log_probs(nullptr, ones, drafted, logs, 8, 131072);
  expect("log_probs", scored, std::fabs(read(logs, 7) + std::log(131072.0)) < 1e-4);
  if (failures == 0) std::puts("every call gives the right result");
  return failures == 0 ? 0 : 1;
}
