// budget: 14 kernels, 790 KB
#include <kernels/append.h>
#include <kernels/matmul.cuh>
#include <kernels/rope.h>

namespace k = kernels;

// Queries, keys and values of one product, turned; keys and values to a cache.
k::Status call_qkv(cudaStream_t stream, const __half* x, const __half* wq, const __half* wk, const __half* wv,
                   __half* q, __half* keys, __half* values, const int32_t* positions, const float* frequencies,
                   const k::AttentionShape& s, int64_t d) {
  const int64_t nq = s.heads * s.dim, nk = s.kv_heads * s.dim;
  const auto turn = k::rope(positions, frequencies, int(s.dim));
  const auto kv = k::dense_kv(k::nhd(keys, 1, s.kv_heads, s.dim), k::nhd(values, 1, s.kv_heads, s.dim), 1);
  const k::AppendAt at(positions);
  return k::matmul(
      stream, k::load(x, d),
      k::stacked(k::paired(k::load(wq, d), turn), nq, k::paired(k::load(wk, d), turn), nk, k::plain(k::load(wv, d)),
                 nk),
      k::qkv(turn | k::store(q, nq), nq, turn | k::append_keys(kv, at, s.dim), nk, k::append_values(kv, at, s.dim), nk),
      {s.batch, nq + 2 * nk, d});
}
