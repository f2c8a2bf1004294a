// The same code asks as on the CPU (arguments.cpp): one case for each call.
//
// FAILS ROWS: a pointer where there must be a source
// FAILS PLANNED_ROWS: a source where there must be a sink
// FAILS RMSNORM_EPS: a number where there must be options: k::RmsNorm{}.eps(1e-6)
// FAILS RMSNORM_OPTIONS: options of LayerNorm where there must be those of RmsNorm
// FAILS COPY: a map where there must be a source
// FAILS COPY_STATE: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS MATMUL: a pointer where there must be a source
// FAILS PLANNED_MATMUL: a source where there must be a sink
// FAILS MATMUL_SCALES: a pointer or a number where there must be scales
// FAILS MATMUL_WORDS: weights are packed words: k::dequant(k::int4(p, ld), scales)
// FAILS ATTENTION: the score of attention is k::causal()
// FAILS ATTENTION_NO_SCORE: there must be a score behind the shape
// FAILS DECODE_NO_SCORE: there must be a score behind the shape
// FAILS DECODE_NO_WORKSPACE: decode: a workspace goes behind the score
// FAILS DECODE_OPTIONS_FIRST: decode: a workspace goes behind the score, and options behind that
// FAILS ATTENTION_OPTIONS_FIRST: attention: options go behind the workspace
// FAILS ATTENTION_PIPE: k::causal() & k::soft_cap(30)
// FAILS DECODE: there must be a score here
// FAILS DECODE_KEYS: there must be a view of keys and values here
// FAILS MERGE: a pointer where there must be a sink
// FAILS EFFECTS: products read inputs and weights more than once
// FAILS ROUTE: a map where there must be a source
// FAILS HEADS: a source where there must be a sink
// FAILS HEADS_EPS: norm_heads: a number where there must be options: k::RmsNorm{}.eps(1e-6)
// FAILS SAMPLE: tokens are numbers of 32 or 64 bits
// FAILS VERIFY: a pointer where there must be a source
// FAILS LOG_PROBS: a pointer where there must be a source
#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>
#include <kernels/rmsnorm.cuh>
#include <kernels/router.cuh>
#include <kernels/sampling.cuh>
#include <kernels/softmax.cuh>

namespace k = kernels;

struct Counting : k::Elementwise<Counting> {
  float count = 0;
  KERNELS_HD float operator()(float x) { return x + count++; }
};

k::Status f(const k::Exec& ex, const k::half* p, k::half* y, float* weights, int32_t* ids,
            const k::AttentionShape& shape, int64_t n) {
  const auto in = k::load(p, n);
  const auto out = k::store(y, n);
  const auto side = k::nhd(p, n, 1, 64);
  const auto kv = k::dense_kv(side, side, n);
  (void)in, (void)out, (void)kv, (void)shape, (void)weights, (void)ids;
#if defined(ROWS)
  return k::softmax(ex, p, out, n, n);
#elif defined(PLANNED_ROWS)
  k::RowPlan plan;
  return k::row_plan(ex, k::Softmax{}, in, in, n, n, k::RowPolicy{}, plan);
#elif defined(RMSNORM_EPS)
  return k::rmsnorm(ex, in, out, n, n, 1e-6);
#elif defined(RMSNORM_OPTIONS)
  return k::rmsnorm(ex, in, out, n, n, k::LayerNorm{});
#elif defined(COPY)
  return k::copy(ex, k::scale(2), out, n, n);
#elif defined(COPY_STATE)
  return k::copy(ex, in | Counting{}, out, n, n);
#elif defined(MATMUL)
  return k::matmul(ex, in, p, out, {n, n, n});
#elif defined(PLANNED_MATMUL)
  k::MatmulPlan plan;
  return k::matmul_plan(ex, in, in, in, {n, n, n}, k::Groups{}, k::MatmulPolicy{}, plan);
#elif defined(MATMUL_SCALES)
  return k::matmul(ex, in, k::dequant(in, p), out, {n, n, n});
#elif defined(MATMUL_WORDS)
  return k::matmul(ex, in, k::load(ids, n), out, {n, n, n});
#elif defined(ATTENTION)
  return k::attention(ex, in, kv, out, shape, k::causal(4, 4));
#elif defined(ATTENTION_NO_SCORE)
  return k::attention<64>(ex, in, kv, out, {1, 1, 1, 1, 64});
#elif defined(DECODE_NO_SCORE)
  return k::decode(ex, in, kv, out, shape, k::Workspace{});
#elif defined(DECODE_NO_WORKSPACE)
  return k::decode(ex, in, kv, out, shape, k::causal());
#elif defined(DECODE_OPTIONS_FIRST)
  return k::decode(ex, in, kv, out, shape, k::causal(), k::Attention{}, k::Workspace{}, k::DecodeMode::plain);
#elif defined(ATTENTION_OPTIONS_FIRST)
  return k::attention<64>(ex, in, kv, out, shape, k::causal(), k::Attention{}.scale(1), k::Workspace{});
#elif defined(ATTENTION_PIPE)
  return k::attention(ex, in, kv, out, shape, k::causal() | k::soft_cap(30));
#elif defined(DECODE)
  return k::decode(ex, in, kv, out, shape, true, k::Workspace{});
#elif defined(DECODE_KEYS)
  return k::decode(ex, in, side, out, shape, k::causal(), k::Workspace{});
#elif defined(MERGE)
  return k::merge_states(ex, in, in, y, {2, n, 1, 64});
#elif defined(EFFECTS)
  return k::matmul(ex, in | k::tee(y, n), in, out, {n, n, n});
#elif defined(ROUTE)
  return k::route(ex, k::scale(2), ids, weights, {n, 8, 2});
#elif defined(HEADS)
  return k::norm_heads(ex, in, in, {n, 1, 64, 1});
#elif defined(HEADS_EPS)
  return k::norm_heads(ex, in, out, {n, 1, 64, 1}, 1e-6);
#elif defined(SAMPLE)
  return k::sample(ex, in, weights, n, n);
#elif defined(VERIFY)
  return k::verify(ex, p, k::drafts(ids, 1), ids, ids, {n, 1, n});
#elif defined(LOG_PROBS)
  return k::log_probs(ex, p, n, n, k::LogProbs{}.of(ids, weights));
#else
  return k::copy(ex, in | k::scale(2), out, n, n);
#endif
}
