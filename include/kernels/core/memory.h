// Reading and writing packs. On the device: one access of up to 16 bytes, or several of 16 bytes; the address must be a
// multiple of min(16, bytes). On the host no alignment is needed.
#pragma once

#include "pack.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

KERNELS_BEGIN

// The cache policy of an access.
enum class Cache {
  stream,  // read or written once: not kept
  keep,    // shared by many rows, like a weight vector
};

namespace detail {

#if defined(KERNELS_DEVICE_CODE)
template <int kBytes> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = ::uint4; };
#endif

// memcpy of kBytes. On the host it uses registers as wide as those of the computation: the compiler would use narrower
// ones, and a load must not wait for several stores.
template <int kBytes>
KERNELS_HD void copy_bytes(void* to, const void* from) {
#if !defined(KERNELS_DEVICE_CODE) && defined(__AVX512F__)
  if constexpr (kBytes == 64) {  // without a loop
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
    return;
  } else if constexpr (kBytes % 64 == 0) {
    for (int i = 0; i < kBytes; i += 64) {
      _mm512_storeu_si512(static_cast<char*>(to) + i, _mm512_loadu_si512(static_cast<const char*>(from) + i));
    }
    return;
  }
#endif
#if !defined(KERNELS_DEVICE_CODE) && defined(__AVX__)
  if constexpr (kBytes == 32) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_loadu_si256(static_cast<const __m256i*>(from)));
    return;
  } else if constexpr (kBytes % 32 == 0) {
    for (int i = 0; i < kBytes; i += 32) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<char*>(to) + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + i)));
    }
    return;
  }
#endif
  memcpy(to, from, kBytes);
}

#if defined(__AVX__)
// Stores that bypass the cache; the address is a multiple of the size, or of 64.
template <int kBytes>
void stream_bytes(void* to, const void* from) {
  char* address = static_cast<char*>(to);
  const char* value = static_cast<const char*>(from);
#if defined(__AVX512F__)
  if constexpr (kBytes % 64 == 0) {
    for (int i = 0; i < kBytes; i += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(address + i), _mm512_loadu_si512(value + i));
    }
    return;
  }
#endif
  if constexpr (kBytes % 32 == 0) {
    for (int i = 0; i < kBytes; i += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(address + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + i)));
    }
  } else {
    for (int i = 0; i < kBytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(address + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(value + i)));
    }
  }
}
#endif

}  // namespace detail

// A pack as it is in memory, kept in whole words, so that carrying it through a loop needs no repacking.
template <class T, int N>
class alignas(N * sizeof(T) % 16 == 0  ? 16
              : N * sizeof(T) % 8 == 0 ? 8
              : N * sizeof(T) % 4 == 0 ? 4
              : N * sizeof(T) % 2 == 0 ? 2
                                       : 1) Packed {
 public:
  using Word = std::conditional_t<(N * sizeof(T)) % 4 == 0, uint32_t,
                                  std::conditional_t<(N * sizeof(T)) % 2 == 0, uint16_t, uint8_t>>;

  KERNELS_HD Pack<T, N> unpack() const {
    Pack<T, N> out;
    detail::copy_bytes<int(sizeof(words))>(out.v, words);
    return out;
  }

  Word words[N * sizeof(T) / sizeof(Word)];
};

// Makes the compiler compute an address or number here, once, instead of at each use.
template <class T>
KERNELS_HD T opaque(T p) {
#if defined(KERNELS_DEVICE_CODE)
  return arch::opaque(p);
#else
  return p;
#endif
}

template <int N, Cache kCache = Cache::keep, class T>
KERNELS_HD Packed<T, N> read(const T* from) {
  Packed<T, N> out;
#if defined(KERNELS_DEVICE_CODE)
  constexpr int bytes = N * int(sizeof(T));
  constexpr int step = bytes < 16 ? bytes : 16;
  using Word = typename detail::Word<step>::type;
  KERNELS_UNROLL
  for (int i = 0; i < bytes / step; ++i) {
    const Word* word = reinterpret_cast<const Word*>(from) + i;
    Word value;
    // Neither uses the read-only path: the same launch may write what it reads (in place, tee), and the compiler must
    // not gather all weights of a row in registers before the first result is stored.
    if constexpr (kCache == Cache::stream) value = __ldcs(word);
    else value = *word;
    memcpy(reinterpret_cast<char*>(out.words) + i * step, &value, step);
  }
#else
  detail::copy_bytes<int(sizeof(out.words))>(out.words, from);
#endif
  return out;
}

// `past_cache`: on the host, bypass the cache if the address allows (for outputs larger than the cache: it saves
// reading the line first). The GPU ignores it: its caches write partial lines without reading them.
template <int N, class T>
KERNELS_HD void write(T* to, const Pack<T, N>& pack, bool past_cache = false) {
#if defined(KERNELS_DEVICE_CODE)
  constexpr int bytes = N * int(sizeof(T));
  constexpr int step = bytes < 16 ? bytes : 16;
  using Word = typename detail::Word<step>::type;
  KERNELS_UNROLL
  for (int i = 0; i < bytes / step; ++i) {
    Word value;
    memcpy(&value, reinterpret_cast<const char*>(pack.v) + i * step, step);
    __stcs(reinterpret_cast<Word*>(to) + i, value);
  }
#else
  constexpr int bytes = N * int(sizeof(T));
#if defined(__AVX__)
  if constexpr (bytes % 16 == 0) {
    if (past_cache && reinterpret_cast<uintptr_t>(to) % uintptr_t(lesser(bytes & -bytes, 64)) == 0)
      return detail::stream_bytes<bytes>(to, pack.v);
  }
#endif
  (void)past_cache;
  detail::copy_bytes<bytes>(to, pack.v);
#endif
}

// Writes a pack, or nothing.
template <int N, class T>
KERNELS_HD void write_if(bool there, T* to, const Pack<T, N>& pack) {
#if defined(KERNELS_DEVICE_CODE)
  if constexpr (N * sizeof(T) == 16) {
    ::uint4 value;
    memcpy(&value, pack.v, sizeof(value));
    return arch::store_if(there, to, value);
  }
#endif
  if (there) write<N>(to, pack);
}

namespace detail {

// Removes the first `bytes` bytes, fewer than 16, from an array of words. Whole words move by selection, as `bytes` is
// only known at run time.
template <int kWords>
KERNELS_HD void drop_bytes(uint32_t (&words)[kWords], int bytes) {
  KERNELS_UNROLL
  for (int i = 0; i + 2 < kWords; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
  KERNELS_UNROLL
  for (int i = 0; i + 1 < kWords; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
  KERNELS_UNROLL
  for (int i = 0; i + 1 < kWords; ++i) {
#if defined(KERNELS_DEVICE_CODE)
    words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (bytes & 3));
#else
    words[i] = uint32_t((uint64_t(words[i + 1]) << 32 | words[i]) >> (8 * (bytes & 3)));
#endif
  }
}

// The access width for a pack of N elements of T.
template <int N, class T>
constexpr int unit_bytes = N * int(sizeof(T)) < 16 ? N * int(sizeof(T)) : 16;

// The distance in bytes of an address from the previous multiple of the access width.
template <int N, class T>
KERNELS_HD int bytes_behind(const T* p) { return int(reinterpret_cast<uintptr_t>(p) % unit_bytes<N, T>); }

}  // namespace detail

// Reads a pack that is `behind` bytes after the aligned address, fewer than the access width. Reads every aligned word
// that contains a part of it.
template <int N, class T>
KERNELS_HD Packed<T, N> read_behind(const T* aligned, int behind) {
  constexpr int bytes = N * int(sizeof(T)), unit = detail::unit_bytes<N, T>, step = unit / int(sizeof(T));
  Packed<T, N> out;
  if constexpr (N > 1 && unit >= 4) {
    constexpr int words = (bytes + unit) / 4, mine = bytes / 4;
    uint32_t all[words];
    const auto low = read<N, Cache::keep>(aligned);
    const auto high =
        read<step, Cache::keep>(aligned + (behind != 0 ? N : N - step));  // at 0 the next word need not be readable
    KERNELS_UNROLL
    for (int i = 0; i < words; ++i)
      all[i] = i < mine ? low.words[i < mine ? i : 0] : high.words[i < mine ? 0 : i - mine];
    detail::drop_bytes(all, behind);
    KERNELS_UNROLL
    for (int i = 0; i < mine; ++i) out.words[i] = all[i];
  } else {
    Pack<T, N> single;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) single.v[i] = read<1, Cache::keep>(aligned + behind / int(sizeof(T)) + i).unpack().v[0];
    detail::copy_bytes<bytes>(out.words, single.v);
  }
  return out;
}

// Writes a pack `behind` bytes after an aligned address, in pieces of at most kUnit bytes.
template <int N, int kUnit = 0, class T>
KERNELS_HD void write_behind(T* to, const Pack<T, N>& pack, int behind) {
  constexpr int unit = kUnit > 0 ? kUnit : detail::unit_bytes<N, T>;
  if constexpr (unit > int(sizeof(T))) {
    if (behind % unit != 0) return write_behind<N, unit / 2>(to, pack, behind);
  }
  constexpr int step = unit / int(sizeof(T));
  KERNELS_UNROLL
  for (int i = 0; i < N; i += step) {
    Pack<T, step> piece;
    KERNELS_UNROLL
    for (int j = 0; j < step; ++j) piece.v[j] = pack.v[i + j];
    write<step>(to + i, piece);
  }
}

// The same for any address: up to N - 1 elements on either side must be readable, too.
template <int N, class T>
KERNELS_HD Packed<T, N> read_anywhere(const T* from) {
  const int behind = detail::bytes_behind<N>(from);
  return read_behind<N>(from - behind / int(sizeof(T)), behind);
}
template <int N, class T>
KERNELS_HD void write_anywhere(T* to, const Pack<T, N>& pack) { write_behind(to, pack, detail::bytes_behind<N>(to)); }

// On the host: whether `count` elements fill whole cache lines; below, the number of elements from an address to the
// next line.
constexpr int kLineBytes = 64;
template <class T>
bool whole_lines(int64_t count) { return count * int64_t(sizeof(T)) % kLineBytes == 0; }
template <class T>
int until_line(const T* p) {
  return int((kLineBytes - reinterpret_cast<uintptr_t>(p) % kLineBytes) % kLineBytes / sizeof(T));
}

// On the host: prefetches [begin, end) into the second-level cache. The first level tracks few lines in flight and
// stalls beyond that; the second drops such requests. On an EPYC with AVX-512, one thread, speed relative
// to a plain read with prefetch into the first level and into the second: products with halves 0.66 and 1.09, with int8
// 0.75 and 1.05; RMSNorm of 4096 floats 0.31 and, in two runs, 0.42 and 0.56. Always inlined, as are its callers: g++
// 12 considers a function that only prefetches to be without effect, and drops the call.
template <class T>
KERNELS_INLINE inline void prefetch_lines(const T* begin, const T* end) {
#if defined(__GNUC__)
  auto p = reinterpret_cast<const char*>(begin);
  const auto last = reinterpret_cast<const char*>(end);
  for (; p + 3 * kLineBytes < last; p += 4 * kLineBytes) {
    __builtin_prefetch(p, 0, 2);
    __builtin_prefetch(p + kLineBytes, 0, 2);
    __builtin_prefetch(p + 2 * kLineBytes, 0, 2);
    __builtin_prefetch(p + 3 * kLineBytes, 0, 2);
  }
  for (; p < last; p += kLineBytes) __builtin_prefetch(p, 0, 2);
#else
  (void)begin, (void)end;
#endif
}

// On the host: orders this thread's cache-bypassing stores before what it does next. Needed before a call returns, or a
// thread ends, after such stores.
inline void fence_past_cache() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

KERNELS_END
