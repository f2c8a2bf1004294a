// Copies 16-byte chunks at any alignment to shared memory. TMA needs addresses that are multiples of 16 bytes, cp.async
// multiples of 4, and with copies element by element a thread would wait for memory eight times.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace detail {

template <class Unit, int N>
__device__ __forceinline__ void copy_chunks_by(const void* const (&from)[N], void* const (&to)[N]) {
  Unit units[N][16 / sizeof(Unit)];
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) {
    KERNELS_UNROLL
    for (int j = 0; j < int(16 / sizeof(Unit)); ++j)
      units[i][j] = from[i] == nullptr ? Unit() : static_cast<const Unit*>(from[i])[j];
  }
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) {
    if (to[i] == nullptr) continue;
    ::uint4 bits;
    memcpy(&bits, units[i], 16);
    *static_cast<::uint4*>(to[i]) = bits;
  }
}
// Copies N chunks of values of kSize bytes, all loaded before the first is stored, in the widest accesses that the
// addresses allow; nothing around them is read. A null source gives zeros; a null destination is skipped.
template <int kSize, int N>
__device__ __forceinline__ void copy_chunks(const void* const (&from)[N], void* const (&to)[N]) {
  uintptr_t addresses = 0;
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) addresses |= reinterpret_cast<uintptr_t>(from[i]);
  if (addresses % 16 == 0) copy_chunks_by<::uint4>(from, to);
  else if (addresses % 8 == 0) copy_chunks_by<::uint2>(from, to);
  else if (addresses % 4 == 0) copy_chunks_by<uint32_t>(from, to);
  else copy_chunks_by<std::conditional_t<kSize == 2, uint16_t, uint8_t>>(from, to);
}

}  // namespace detail
KERNELS_END
