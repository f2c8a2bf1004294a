// FAILS ROUTE_POINTER: a pointer where there must be a source
// FAILS ROUTE_SINK: a sink where there must be a source
// FAILS GATHERED_TEE: gathered() reads its rows more than once
// FAILS EXPERTS_OF_GATED: gated(experts(w1, ...), experts(w3, ...))
// FAILS COMBINED_TEE: combined() may read a row several times
// FAILS HEADS_QUANTIZE: norm_heads: scales are found for heads, of codes of 8 bits
// FAILS HEADS_MAP_OUTSIDE: give each of its sinks its maps
// FAILS BOTH_WITH_ROPE: cannot be one of both()
// FAILS APART_WITH_ROPE: use qkv()
// FAILS APART_OF_TWO_TYPES: apart() takes sinks of one type
// FAILS STACKED_OF_TWO_TYPES: stacked() takes sources of one type: plain(w) beside paired(w, rope)
// FAILS HEADS_TEE: put tee() into the operation that makes these rows
// FAILS HEADS_SOURCE_LAST: a source where there must be a sink
// FAILS HEADS_EPS: norm_heads: a number where there must be options: k::RmsNorm{}.eps(1e-6)
// FAILS NORMED_EPS: normed(): a number where there must be options: k::RmsNorm{}.eps(1e-6)
// FAILS EACH_HEAD_TEE: each_head() reads its columns more than once
// FAILS NORMED_HEADS_TEE: normed_heads() reads a head more than once
// FAILS APPEND_TO_CONST: append: the view is made of pointers to const
// FAILS APPEND_WORDS: append: 4-bit codes are written where scales are found, by copy() and row operations
// FAILS APPEND_UINT4: append: Uint4 has no codes for what is below 0
// FAILS APPEND_FOUND_FLOATS: append: scales are found for int8_t, float8_e4m3, float8_e5m2 and k::Int4
// FAILS APPEND_NO_SCALES: append: the view has no scales
// FAILS APPEND_OTHER_SCALES: append: the scales to be written are of another type than those that the view reads
#include <kernels/append.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/norm_heads.h>
#include <kernels/cpu/router.h>
#include <kernels/rope.h>

namespace k = kernels;

k::Status call(const k::cpu::Exec& cx, const float* p, float* y, int8_t* codes, int32_t* numbers, uint32_t* words,
               int64_t n) {
  const auto in = k::load(p, n);
  const auto teed = in | k::tee(y, n);
  const auto out = k::store(y, n);
  const auto turned = k::rope(numbers, p, 16) | out;
  const k::HeadShape shape{n, 3, 16, 2};
  const auto int4 = k::nhd<k::Int4>(words, 1, 2, 16).scales(p, 2, 2, 1);
  const auto append = [&](const auto& side, const auto&... scales) {
    return k::append_keys(k::dense_kv(side, side, 1), k::AppendAt(numbers), 16, scales...);
  };
  (void)in, (void)teed, (void)turned, (void)codes, (void)shape, (void)int4, (void)append;
#if defined(ROUTE_POINTER)
  return k::cpu::route(cx, p, numbers, y, {n, 8, 2});
#elif defined(ROUTE_SINK)
  return k::cpu::route(cx, out, numbers, y, {n, 8, 2});
#elif defined(GATHERED_TEE)
  return k::cpu::norm_heads(cx, k::gathered(teed, numbers, 2), out, shape);
#elif defined(EXPERTS_OF_GATED)
  return k::cpu::matmul(cx, in, k::experts(k::gated(in, in), numbers, n, 4), k::swiglu() | out, {n, n, n});
#elif defined(COMBINED_TEE)
  return k::cpu::norm_heads(cx, k::combined(teed, numbers, p, 2), out, shape);
#elif defined(HEADS_QUANTIZE)
  return k::cpu::norm_heads(cx, in, k::quantize(codes, n, y), shape);
#elif defined(HEADS_MAP_OUTSIDE)
  return k::cpu::norm_heads(cx, in, k::scale(2) | k::qkv(turned, 16, turned, 16, out, 16), shape);
#elif defined(BOTH_WITH_ROPE)
  return k::cpu::norm_heads(cx, in, k::both(turned, out), shape);
#elif defined(APART_WITH_ROPE)
  return k::cpu::norm_heads(cx, in, k::apart(turned, n, turned, n), shape);
#elif defined(APART_OF_TWO_TYPES)
  return k::cpu::matmul(cx, in, in, k::apart(out, n, k::store(codes, n), n), {n, n, n});
#elif defined(STACKED_OF_TWO_TYPES)
  return k::cpu::matmul(cx, in, k::stacked(k::paired(in, k::rope(numbers, p, 16)), n, in, n), out, {n, n, n});
#elif defined(HEADS_TEE)
  return k::cpu::norm_heads(cx, teed, out, shape);
#elif defined(HEADS_SOURCE_LAST)
  return k::cpu::norm_heads(cx, in, in, shape);
#elif defined(HEADS_EPS)
  return k::cpu::norm_heads(cx, in, out, shape, 1e-6);
#elif defined(NORMED_EPS)
  return k::cpu::matmul(cx, k::normed(in, 1e-6f), in, out, {n, n, n});
#elif defined(EACH_HEAD_TEE)
  return k::cpu::norm_heads(cx, in, k::mul(k::each_head(teed, 16)) | out, shape);
#elif defined(NORMED_HEADS_TEE)
  return k::cpu::norm_heads(cx, k::normed_heads(teed, 16), out, shape);
#elif defined(APPEND_TO_CONST)
  const auto kv = k::dense_kv(k::nhd(p, 1, 2, 16), k::nhd(y, 1, 2, 16), 1);
  return k::cpu::norm_heads(cx, in, k::append_keys(kv, k::AppendAt(numbers), 16), shape);
#elif defined(APPEND_WORDS)
  return k::cpu::norm_heads(cx, in, append(int4), shape);
#elif defined(APPEND_UINT4)
  return k::cpu::copy(cx, in, append(k::nhd<k::Uint4>(words, 1, 2, 16).scales(p, 2, 2, 1), y), n, n);
#elif defined(APPEND_FOUND_FLOATS)
  return k::cpu::copy(cx, in, append(k::nhd(y, 1, 2, 16).scales(p, 2, 2, 1), y), n, n);
#elif defined(APPEND_NO_SCALES)
  return k::cpu::copy(cx, in, append(k::nhd(codes, 1, 2, 16), y), n, n);
#elif defined(APPEND_OTHER_SCALES)
  return k::cpu::copy(cx, in, append(k::nhd(codes, 1, 2, 16).scales(p, 2, 2, 1), static_cast<k::half*>(nullptr)), n, n);
#else
  KERNELS_TRY(k::cpu::copy(cx, in, append(int4, y), n, n));
  KERNELS_TRY(k::cpu::route(cx, in, numbers, y, {n, 8, 2}));
  return k::cpu::norm_heads(cx, k::combined(in, numbers, p, 2), k::qkv(k::scale(2) | turned, 16, turned, 16, out, 16),
                            shape);
#endif
}
