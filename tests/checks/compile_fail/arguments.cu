// The same code asks as on the CPU (arguments.cpp): one case for each call.
//
// FAILS ROWS: a pointer where there must be a source
// FAILS PLANNED_ROWS: a source where there must be a sink
// FAILS COPY: a map where there must be a source
// FAILS MATMUL: a pointer where there must be a source
// FAILS PLANNED_MATMUL: a source where there must be a sink
// FAILS ATTENTION: the score of attention is k::causal()
// FAILS ATTENTION_PIPE: k::causal() & k::soft_cap(30)
// FAILS DECODE: there must be a score here
// FAILS DECODE_KEYS: there must be a view of keys and values here
// FAILS MERGE: a pointer where there must be a sink
// FAILS EFFECTS: products read inputs and weights more than once
#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>
#include <kernels/softmax.cuh>

namespace k = kernels;

k::Status f(const k::Exec& ex, const k::half* p, k::half* y, const k::AttentionShape& shape, int64_t n) {
  const auto in = k::load(p, n);
  const auto out = k::store(y, n);
  const auto side = k::nhd(p, n, 1, 64);
  const auto kv = k::dense_kv(side, side, n);
  (void)in, (void)out, (void)kv, (void)shape;
#if defined(ROWS)
  return k::softmax(ex, p, out, n, n);
#elif defined(PLANNED_ROWS)
  k::RowPlan plan;
  return k::row_plan(ex, k::Softmax{}, in, in, n, n, k::RowPolicy{}, plan);
#elif defined(COPY)
  return k::copy(ex, k::scale(2), out, n, n);
#elif defined(MATMUL)
  return k::matmul(ex, in, p, out, {n, n, n});
#elif defined(PLANNED_MATMUL)
  k::MatmulPlan plan;
  return k::matmul_plan(ex, in, in, in, {n, n, n}, k::Groups{}, k::MatmulPolicy{}, plan);
#elif defined(ATTENTION)
  return k::attention(ex, in, kv, out, shape, k::causal(4, 4));
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
#else
  return k::copy(ex, in | k::scale(2), out, n, n);
#endif
}
