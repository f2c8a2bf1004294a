// FAILS MATMUL_INPUTS: products read inputs and weights more than once
// FAILS MATMUL_NESTED: products read inputs and weights more than once
// FAILS MATMUL_NORMED: products read inputs and weights more than once
// FAILS MATMUL_WEIGHTS: products read inputs and weights more than once
// FAILS QUERIES: attention reads queries more than once
// FAILS DECODED_QUERIES: attention reads queries more than once
// FAILS MERGED: merge_states reads logsumexps more than once
// FAILS CYCLED: cycle() reads its rows more than once
// FAILS REPEATED: repeated() reads its rows more than once
// FAILS ROTATED: rope reads each element twice
// FAILS ROTATED_IN_ADD: rope reads each element twice
// FAILS SOURCE_OF_ONES_OWN: give it reload<N>(row, col)
// FAILS MAP_OF_ONES_OWN: give it without_effects()
// FAILS MAP_BEFORE_QUANTIZE: give it without_effects()
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/rope.h>

namespace k = kernels;

struct Logged : k::Functor {
  static constexpr bool has_effects = true;
  float* log;
  explicit Logged(float* p) : log(p) {}
  template <int N>
  k::Pack<float, N> map(const k::Pack<float, N>& v, int64_t row, int64_t) const { return log[row] = v.v[0], v; }
};
struct Counting : k::Functor {
  static constexpr bool has_effects = true;
  float* count;
  explicit Counting(float* p) : count(p) {}
  template <int N>
  k::Pack<float, N> load(int64_t, int64_t) const { return k::broadcast<N>(++*count); }
};

void f(const float* p, float* y, int8_t* codes, const int32_t* positions, const k::AttentionShape& shape, int64_t n) {
  const k::cpu::Exec cx{1};
  const auto in = k::load(p, n);
  const auto tee = in | k::tee(y, n);
  const auto out = k::store(y, n);
  const auto kv = k::dense_kv(k::nhd(p, n, 1, 64), k::nhd(p, n, 1, 64), n);
  const auto use = [](const k::Status& status) { return status.ok(); };
  use(k::cpu::rmsnorm(cx, tee | k::add(tee), Logged(y) | out, n, n));
  use(k::cpu::copy(cx, Counting(y) | Logged(y), k::add(tee) | Logged(y) | out, n, n));
  use(k::cpu::copy(cx, in | k::rope(positions, p, 64) | k::tee(y, n), out, n, n));
  use(k::cpu::matmul(cx, in, in, k::add(in) | k::tee(y, n) | out, {n, n, n}));
#if defined(MATMUL_INPUTS)
  use(k::cpu::matmul(cx, tee, in, out, {n, n, n}));
#elif defined(MATMUL_NESTED)
  use(k::cpu::matmul(cx, in | k::add(tee) | k::scale(2), in, out, {n, n, n}));
#elif defined(MATMUL_NORMED)
  use(k::cpu::matmul(cx, k::normed(tee, k::RmsNorm{}) | k::mul(p), in, out, {n, n, n}));
#elif defined(MATMUL_WEIGHTS)
  use(k::cpu::matmul(cx, in, k::stacked(tee, n, tee, n), out, {n, 2 * n, n}));
#elif defined(QUERIES)
  use(k::cpu::attention(cx, tee, kv, out, shape, k::causal()));
#elif defined(DECODED_QUERIES)
  use(k::cpu::decode(cx, in | k::mul(tee), kv, out, shape, k::causal(), k::Workspace{}));
#elif defined(MERGED)
  use(k::cpu::merge_states(cx, tee, in, out, {2, n, 1, 64}));
#elif defined(CYCLED)
  use(k::cpu::rmsnorm(cx, in | k::add(k::cycle(tee, 4)), out, n, n));
#elif defined(REPEATED)
  use(k::cpu::copy(cx, k::repeated(tee, 4), out, n, n));
#elif defined(ROTATED)
  use(k::cpu::copy(cx, tee | k::rope(positions, p, 64), out, n, n));
#elif defined(ROTATED_IN_ADD)
  use(k::cpu::copy(cx, in | k::add(in | k::add(tee) | k::rope(positions, p, 64)), out, n, n));
#elif defined(SOURCE_OF_ONES_OWN)
  use(k::cpu::rmsnorm(cx, Counting(y), out, n, n));
#elif defined(MAP_OF_ONES_OWN)
  use(k::cpu::rmsnorm(cx, in | Logged(y), out, n, n));
#elif defined(MAP_BEFORE_QUANTIZE)
  use(k::cpu::rmsnorm(cx, in, Logged(y) | k::quantize(codes, n, y), n, n));
#endif
  (void)kv, (void)shape, (void)codes;
}
