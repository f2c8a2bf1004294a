// What the bodies of attention share: the types in which operands meet, and rows of queries, keys and values on their way to a
// tile in shared memory.
#pragma once

#include "../kv.h"
#include "../rope.h"
#include "../score.h"
#include "decode.cuh"

KERNELS_BEGIN
namespace detail {

template <class S>
struct MemoryType<RotatedSource<S>> : MemoryType<S> {};

template <class Kv>
using KeyRun = std::decay_t<decltype(std::declval<const Kv&>().key(kAny, kAny, kAny))>;
template <class Kv>
using ValueRun = std::decay_t<decltype(std::declval<const Kv&>().value(kAny, kAny, kAny))>;

// Whether tensor cores may stand in: keys and values of 16, 8 or 4 bits.
template <class Kv>
constexpr bool narrow_kv = Coded<typename KeyRun<Kv>::Codes>::known && Coded<typename ValueRun<Kv>::Codes>::known;

// The 16-bit types of the two products. Queries are rounded to that of the keys. Weights with the scales of values in them
// need bfloat16's range.
template <class... T>
struct FirstType {
  using type = half;
};
template <class T, class... Others>
struct FirstType<T, Others...> {
  using type = T;
};
template <class... Others>
struct FirstType<void, Others...> : FirstType<Others...> {};
template <class Q, class Kv>
using key_meeting_type = typename FirstType<tensor_type<typename KeyRun<Kv>::Codes>, typename MemoryType<Q>::type>::type;
template <class Q, class Kv>
using value_meeting_type = std::conditional_t<ValueRun<Kv>::scaled, bfloat16,
                                              typename FirstType<tensor_type<typename ValueRun<Kv>::Codes>, typename MemoryType<Q>::type>::type>;

// Whether the positions of a sequence stand at equal distances, all of them.
template <class Kv>
constexpr bool in_one_run = false;
template <class K, class V>
constexpr bool in_one_run<KvCache<K, V, Dense>> = true;
template <class K, class V>
constexpr bool in_one_run<KvCache<K, V, Ragged>> = true;

// The widest packs in which keys and values may be read. Of addresses in a view of the user's own nothing is known.
template <class K, class V, class Where>
int key_pack(const KvCache<K, V, Where>& kv) { return kv.keys().max_pack(); }
template <class K, class V, class Where>
int value_pack(const KvCache<K, V, Where>& kv) { return kv.values().max_pack(); }
template <class Codes>
constexpr int pack_of_codes() { return has_max_pack<Codes>::value ? 1 : widest_of<Codes>(); }
template <class Kv>
int key_pack(const Kv&) { return pack_of_codes<typename KeyRun<Kv>::Codes>(); }
template <class Kv>
int value_pack(const Kv&) { return pack_of_codes<typename ValueRun<Kv>::Codes>(); }

// Packs of what a source gives at most, up to 8: whether they may be read decides between these and single elements.
template <class Source>
constexpr int wide_pack = widest_of<Source>() < 8 ? widest_of<Source>() : 8;

// Columns [col, col + kCount) of a row as T.
template <class T, int kCount, class Source>
__device__ __forceinline__ Pack<T, kCount> read_wide(const Source& source, int64_t row, int64_t col) {
  constexpr int N = wide_pack<Source> < kCount ? wide_pack<Source> : kCount;
  Pack<T, kCount> out;
  KERNELS_UNROLL
  for (int i = 0; i < kCount; i += N) {
    const Pack<T, N> some = convert<T>(convert<float>(resolve(source, fetch<N>(source, row, col + i), row, col + i)));
    KERNELS_UNROLL
    for (int j = 0; j < N; ++j) out.v[i + j] = some.v[j];
  }
  return out;
}
// The same to shared memory, at a multiple of their size.
template <class T, int kCount, class Source>
__device__ __forceinline__ void bring_columns(T* to, const Source& source, int64_t row, int64_t col, bool wide) {
  if constexpr (wide_pack<Source> > 1) {
    if (wide) {
      const Pack<T, kCount> values = read_wide<T, kCount>(source, row, col);
      static_assert(sizeof(values) == 16, "one access");
      ::uint4 bits;
      memcpy(&bits, values.v, 16);
      *reinterpret_cast<::uint4*>(to) = bits;
      return;
    }
  }
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) to[i] = convert<T>(convert<float>(resolve(source, fetch<1>(source, row, col + i), row, col + i))).v[0];
}

}  // namespace detail
KERNELS_END
