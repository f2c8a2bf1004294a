// What all attention kernels share: the types that keys and values are multiplied in, traits of views, and copies of
// rows to shared memory.
#pragma once

#include "../../core/attention_plan.h"
#include "../../core/head_sizes.h"
#include "../../heads.h"
#include "../../kv.h"
#include "../../rope.h"
#include "../../score.h"
#include "../dequantize.cuh"
#include "../unaligned.cuh"

KERNELS_BEGIN
namespace detail {

// Exponentials are computed by exp2, so logits are multiplied by log2(e).
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

template <class Kv>
using KeyRun = std::decay_t<decltype(std::declval<const Kv&>().key(kAny, kAny, kAny))>;
template <class Kv>
using ValueRun = std::decay_t<decltype(std::declval<const Kv&>().value(kAny, kAny, kAny))>;

// Whether tensor cores can be used: keys and values of 16, 8 or 4 bits.
template <class Kv>
constexpr bool narrow_kv = Coded<typename KeyRun<Kv>::Codes>::known && Coded<typename ValueRun<Kv>::Codes>::known;

// Whether a source is no more than codes in memory that a Decoder takes.
template <class Source>
constexpr bool lies_coded = Traits<Source>::lies_flat && TakesZeros<typename Traits<Source>::Code, Nothing>::value;

// Whether both keys and values are such codes.
template <class Kv>
constexpr bool decodes_kv = lies_coded<typename KeyRun<Kv>::Codes> && lies_coded<typename ValueRun<Kv>::Codes>;

// The 16-bit types of the two products. Queries are rounded to the type of the keys. Weights that are multiplied by the
// scales of values need the range of bfloat16. Without scales, half represents all codes exactly, and weights more
// precisely.
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
using key_meeting_type =
    typename FirstType<tensor_type<typename KeyRun<Kv>::Codes>, typename Traits<Q>::Memory>::type;
template <class Q, class Kv>
using value_meeting_type =
    std::conditional_t<ValueRun<Kv>::scaled, bfloat16,
                       typename FirstType<tensor_type<typename ValueRun<Kv>::Codes>,
                                          std::conditional_t<lies_coded<typename ValueRun<Kv>::Codes>, half,
                                                             typename Traits<Q>::Memory>>::type>;

// Whether a view is one of kv.h, whose addresses are known.
template <class Kv>
constexpr bool is_kv_cache = false;
template <class K, class V, class Where>
constexpr bool is_kv_cache<KvCache<K, V, Where>> = true;

// Whether all positions of a sequence are at equal distances.
template <class Kv>
constexpr bool constant_stride = false;
template <class K, class V>
constexpr bool constant_stride<KvCache<K, V, Dense>> = true;
template <class K, class V>
constexpr bool constant_stride<KvCache<K, V, Ragged>> = true;

// Whether keys and values are in pages.
template <class Kv>
constexpr bool in_pages = false;
template <class K, class V>
constexpr bool in_pages<KvCache<K, V, Paged>> = true;

// The widest packs in which keys and values may be read. Of a user-defined view only its alignment() is known.
template <class K, class V, class Where>
int key_pack(const KvCache<K, V, Where>& kv) { return kv.keys().max_pack(); }
template <class K, class V, class Where>
int value_pack(const KvCache<K, V, Where>& kv) { return kv.values().max_pack(); }
KERNELS_DETECT(has_alignment, std::declval<const F&>().alignment())
template <class Codes, class Kv>
int pack_of_codes(const Kv& kv) {
  if constexpr (!has_max_pack<Codes>::value) {  // the view computes its keys or values
    return widest_of<Codes>();
  } else if constexpr (has_alignment<Kv>::value) {
    if (kv.alignment() < 1) return 1;  // unknown
    const int up_to_16 = kv.alignment() | 16, bytes = up_to_16 & -up_to_16;
    return greater(1, widest_of<Codes>() * bytes / 16);
  } else {
    return 1;
  }
}
template <class Kv>
int key_pack(const Kv& kv) { return pack_of_codes<typename KeyRun<Kv>::Codes>(kv); }
template <class Kv>
int value_pack(const Kv& kv) { return pack_of_codes<typename ValueRun<Kv>::Codes>(kv); }

// The most keys that a sequence can have, as far as the host knows.
template <class K, class V, class Where>
int64_t most_keys(const KvCache<K, V, Where>& kv) {
  return kv.where().most_keys(kv.keys().positions());
}
template <class Kv>
int64_t most_keys(const Kv&) {
  return kMostKeys;
}

// The pack width for vector accesses: the widest that a source has, 8 at most. A call reads either such packs or single
// elements.
template <class Source>
constexpr int wide_pack = widest_of<Source>() < 8 ? widest_of<Source>() : 8;

// The property of keys and values that keeps a call from the fastest path, or "". wide_keys, wide_values: whether they
// may be read in packs that are wide enough.
template <class Kv>
const char* kv_misfit(bool wide_keys, bool wide_values) {
  using K = typename KeyRun<Kv>::Codes;
  using V = typename ValueRun<Kv>::Codes;
  if constexpr (!narrow_kv<Kv>) {
    return has_max_pack<K>::value && has_max_pack<V>::value ? why_not::wide : why_not::computed;
  } else {
    constexpr bool told = is_kv_cache<Kv> || has_alignment<Kv>::value;
    if (!wide_keys) return told ? why_not::keys_begin : why_not::alignment;
    if (!wide_values) return told ? why_not::values_begin : why_not::alignment;
    return "";
  }
}

// Whether a source is no more than values of T in memory, which may be copied.
template <class Source, class T>
constexpr bool is_stored_as = std::is_same<typename Traits<Source>::Copied, T>::value;

// Whether the `dim` columns of each head are contiguous. They are, unless the source has heads of another size.
template <class Q>
bool heads_in_runs(const Q&, int64_t) {
  return true;
}
template <class T>
bool heads_in_runs(const HeadsLoad<T>& q, int64_t dim) {
  return q.head_dim() % dim == 0;
}

// A read of columns [col, col + kCount) of a row in two steps: asynchronous loads, and then values of T.
template <class Source, int kCount>
class WideRead {
  static constexpr int N = wide_pack<Source> < kCount ? wide_pack<Source> : kCount;

 public:
  __device__ __forceinline__ void prefetch(const Source& source, int64_t row, int64_t col) {
    KERNELS_UNROLL
    for (int i = 0; i < kCount / N; ++i) fetched_[i] = fetch<N>(source, row, col + i * N);
  }
  template <class T>
  __device__ __forceinline__ Pack<T, kCount> values(const Source& source, int64_t row, int64_t col) const {
    Pack<T, kCount> out;
    KERNELS_UNROLL
    for (int i = 0; i < kCount / N; ++i) {
      const Pack<T, N> some = convert<T>(convert<float>(resolve(source, fetched_[i], row, col + i * N)));
      KERNELS_UNROLL
      for (int j = 0; j < N; ++j) out.v[i * N + j] = some.v[j];
    }
    return out;
  }

 private:
  decltype(fetch<N>(std::declval<const Source&>(), kAny, kAny)) fetched_[kCount / N];
};
// The same columns, one load per element.
template <class T, int kCount, class Source>
__device__ __forceinline__ Pack<T, kCount> read_singly(const Source& source, int64_t row, int64_t col) {
  Pack<T, kCount> out;
  KERNELS_UNROLL
  for (int i = 0; i < kCount; ++i)
    out.v[i] = convert<T>(convert<float>(resolve(source, fetch<1>(source, row, col + i), row, col + i))).v[0];
  return out;
}

// p must be at a multiple of 16 bytes.
template <int N>
__device__ __forceinline__ Pack<float, N> floats_at(const float* p) {
  Pack<float, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; i += 4) {
    const ::float4 some = *reinterpret_cast<const ::float4*>(p + i);
    out.v[i] = some.x, out.v[i + 1] = some.y, out.v[i + 2] = some.z, out.v[i + 3] = some.w;
  }
  return out;
}
template <int N>
__device__ __forceinline__ void put_floats(float* p, const Pack<float, N>& v) {
  KERNELS_UNROLL
  for (int i = 0; i < N; i += 4)
    *reinterpret_cast<::float4*>(p + i) = make_float4(v.v[i], v.v[i + 1], v.v[i + 2], v.v[i + 3]);
}

// Stores 16 bytes to shared memory.
template <class T, int N>
__device__ __forceinline__ void put_shared(void* to, const Pack<T, N>& values) {
  static_assert(sizeof(values) == 16, "one access");
  ::uint4 bits;
  memcpy(&bits, values.v, 16);
  *static_cast<::uint4*>(to) = bits;
}
__device__ __forceinline__ void clear_shared(void* to) { *static_cast<::uint4*>(to) = ::uint4{0, 0, 0, 0}; }

// Copies kRows pieces of kWide columns of a source to shared memory as values of T. visit(i, there, missing) calls
// there(source, row, col, destination) for piece i, or missing(destination), which zeros it.
//
// wide: if wide reads are allowed, all loads are issued before the first store. kMayBeWide: whether code for that is
// compiled. Unaligned values of T have kSome loads in flight.
template <class T, int kWide, int kRows, int kSome, bool kMayBeWide, class Source, class Visit>
__device__ __forceinline__ void load_rows(const Visit& visit, bool wide) {
  static_assert(kWide * sizeof(T) == 16, "one access");
  if constexpr (kMayBeWide && wide_pack<Source> > 1) {
    if (wide) {
      WideRead<Source, kWide> reads[kRows];
      KERNELS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        visit(
            i, [&](const Source& source, int64_t row, int64_t col, void*) { reads[i].prefetch(source, row, col); },
            [](void*) {});
      }
      KERNELS_UNROLL
      for (int i = 0; i < kRows; ++i) {
        visit(
            i,
            [&](const Source& source, int64_t row, int64_t col, void* to) {
              put_shared(to, reads[i].template values<T>(source, row, col));
            },
            [](void* to) { clear_shared(to); });
      }
      return;
    }
  }
  if constexpr (is_stored_as<Source, T> && Traits<Source>::rows_in_runs) {
#pragma unroll 1
    for (int first = 0; first < kRows; first += kSome) {
      const void* from[kSome];
      void* into[kSome];
      KERNELS_UNROLL
      for (int i = 0; i < kSome; ++i) {
        visit(
            lesser(first + i, kRows - 1),
            [&](const Source& source, int64_t row, int64_t col, void* to) {
              from[i] = source.at(row, col), into[i] = to;
            },
            [&](void* to) { from[i] = nullptr, into[i] = to; });
      }
      copy_chunks<sizeof(T)>(from, into);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      visit(
          i,
          [&](const Source& source, int64_t row, int64_t col, void* to) {
            put_shared(to, read_singly<T, kWide>(source, row, col));
          },
          [](void* to) { clear_shared(to); });
    }
  }
}

}  // namespace detail
KERNELS_END
