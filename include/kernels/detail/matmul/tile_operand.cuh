// How a tile of inputs or weights gets to shared memory in the layout that tensor cores read: 16-bit elements are
// copied; others are read through their functors, rounded to 16 bits and stored.
#pragma once

#include "../dequantize.cuh"
#include "../row/packs.cuh"
#include "../unaligned.cuh"
#include "product.cuh"

KERNELS_BEGIN
namespace detail {

// The address of a 16-bit operand.
template <class Src, Cache kCache>
__device__ __forceinline__ const Src* address_of(const DirectLoad<Src, float, kCache>& source, int64_t row,
                                                 int64_t col) {
  return source.at(row, col);
}
template <class S>
__device__ __forceinline__ auto address_of(const Paired<S>& source, int64_t row, int64_t col) {
  return address_of(source.source(), source.origin(row), col);
}
template <class S>
__device__ __forceinline__ auto address_of(const Gathered<S>& source, int64_t row, int64_t col) {
  return address_of(source.source(), source.origin(row), col);
}
template <class S, int kParts>
__device__ __forceinline__ auto address_of(const Stacked<S, kParts>& source, int64_t row, int64_t col) {
  return source.visit(row, [&](const S& part, int64_t begin) { return address_of(part, row - begin, col); });
}

// Whether tensor cores multiply this 8-bit type directly.
template <class T>
constexpr bool is_multiplied_in_8 = std::is_same<T, int8_t>::value || std::is_same<T, float8_e4m3>::value;

// Whether an operand is in memory as tensor cores take it, of type T in rows of constant stride. Scales are read
// separately.
template <class S, class T>
constexpr bool in_rows = false;
template <class T, Cache kCache>
constexpr bool in_rows<DirectLoad<T, float, kCache>, T> = is_16_bit<T> || is_multiplied_in_8<T>;
template <class Codes, class Scale, class T>
constexpr bool in_rows<Dequant<Codes, Scales<Scale>>, T> = is_multiplied_in_8<T>&& in_rows<Codes, T>;

// The source without its scales.
template <class S>
const S& without_scales(const S& source) {
  return source;
}
template <class Codes, class Scale>
const Codes& without_scales(const Dequant<Codes, Scale>& source) {
  return source.codes();
}

// Whether the weights of a product are: one matrix, or both of a gate.
template <class P, class T>
constexpr bool weights_in_rows = in_rows<FirstWeights<P>, T>&&
    in_rows<std::decay_t<decltype(std::declval<const P&>().template weights<P::matrices - 1>())>, T>;

// One thread's share of an operand of its block's tile, kRows rows.
// - which(i, f) calls f(source, its row, whether it exists) for row i of the tile. Shared memory of rows that do not
//   exist may hold anything.
// - kWidth: elements that are read together if the operand is not copied: 1, or the 8 of a chunk, in as many accesses
//   as the source needs.
// - A block may have several groups of kThreads, each with its own tiles.
// - kByLanes: lanes read eight columns each, instead of ldmatrix.
template <class T, class Source, int kRows, int kThreads, int kWidth, int kStep = 64, bool kByLanes = (kStep > 64)>
class TileOperand {
 public:
  static constexpr int kBytes = kRows * kStep * 2;
  static constexpr int kChunks = kStep / 8, kRowsPerPass = kThreads / kChunks, kEach = kRows / kRowsPerPass;
  static constexpr int kPass = kRowsPerPass * kStep * 2;  // bytes between a thread's chunks
  static constexpr int kPart = pack_within<Source, kWidth>, kParts = kWidth / kPart;
  static constexpr bool as_it_lies = std::is_same<copied_type<Source>, T>::value, copied = kWidth == 8 && as_it_lies;

  // The swizzle: ldmatrix reads eight rows at a time, lanes read four chunks of two rows.
  static __device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
    return row * (kStep * 2) + (chunk ^ (kByLanes ? row % 2 * 4 : row % 8)) * 16;
  }

  template <class Which>
  __device__ __forceinline__ TileOperand(const Which& which, int first_col) {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      which(tile_row(i), [&](const Source& source, int64_t row, bool is_there) {
        there_ |= unsigned(is_there) << i;
        if constexpr (as_it_lies) from_[i] = address_of(source, row, 0) + (copied ? first_col : 0) + chunk() * 8;
      });
    }
  }

  // Copies chunk i of the next step to the stage, if there are more steps. `further`: the distance to the step after
  // it.
  __device__ __forceinline__ void copy(int i, uint32_t stage, bool more, int further = kStep) {
    arch::copy_async_16_if(stage + thread_offset() + i * kPass, from_[i], more && (there_ >> i & 1) != 0);
    from_[i] += further;
  }
  // Copies a step that is `ahead` columns after the next one and ends at `cols` columns.
  __device__ __forceinline__ void copy_cut(uint32_t stage, int ahead, int cols) const {
    const int left = cols - chunk() * 8;
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      if (there_ >> i & 1)
        arch::copy_async_16(stage + thread_offset() + i * kPass, from_[i] + (left > 0 ? ahead : 0),
                            left <= 0  ? 0
                            : left < 8 ? 2 * left
                                       : 16);
    }
  }

  // Operands that are not copied are loaded first and stored later, chunks [begin, end) of a thread's kEach at a time.
  // Rows that do not exist are replaced by another row, as a branch for each chunk would keep loads from overlapping.
  // With kWidth 1 they are loaded only when they are stored, as registers would not suffice.
  struct Waiting {
    Fetched<Source, kPart> chunks[copied || kWidth < 8 ? 1 : kEach][kParts];
  };
  template <class Which>
  __device__ __forceinline__ void prefetch(Waiting& waiting, const Which& which, int begin, int end, int col,
                                           int cols) const {
    if constexpr (kWidth == 8) {
      if (col + chunk() * 8 >= cols) return;
      KERNELS_UNROLL
      for (int i = begin; i < end; ++i) fetch_chunk(waiting.chunks[i], which, i, col);
    }
  }
  template <class Which>
  __device__ __forceinline__ void store(const Waiting& waiting, unsigned char* stage, const Which& which, int begin,
                                        int end, int col, int cols) const {
    if constexpr (kWidth == 8) {
      if (col + chunk() * 8 >= cols) return write_zeros(stage, begin, end);
      KERNELS_UNROLL
      for (int i = begin; i < end; ++i) put_chunk(waiting.chunks[i], stage, which, i, col);
    } else if constexpr (as_it_lies) {
      constexpr int kSome = kEach < 8 ? kEach : 8;  // chunks in flight
      const int left = cols - col - chunk() * 8;
      KERNELS_UNROLL
      for (int first = begin; first < end; first += kSome) {
        const void* from[kSome];
        void* to[kSome];
        KERNELS_UNROLL
        for (int j = 0; j < kSome; ++j) {
          const int i = first + j;
          from[j] = i < end && left >= 8 && (there_ >> i & 1) != 0 ? from_[i] + col : nullptr;
          to[j] = i < end ? stage + thread_offset() + i * kPass : nullptr;
        }
        copy_chunks<2>(from, to);
      }
      if (left > 0 && left < 8) store_cut(stage, begin, end, col, left);
    } else {
#pragma unroll 2
      for (int i = begin; i < end; ++i) {
        which(tile_row(i), [&](const Source& source, int64_t row, bool is_there) {
          Pack<T, 8> values;
          KERNELS_UNROLL
          for (int j = 0; j < 8; ++j) {
            const int at = col + chunk() * 8 + j;
            values.v[j] =
                convert<T>(is_there && at < cols ? resolve(source, fetch<1>(source, row, at), row, at).v[0] : 0.f);
          }
          write(stage, i, values);
        });
      }
    }
  }

  // Loads and stores, with at most kBytes in flight.
  template <int kBytes, class Which>
  __device__ __forceinline__ void load_and_store(unsigned char* stage, const Which& which, int begin, int end, int col,
                                                 int cols) const {
    static_assert(kWidth == 8 && !copied, "what waits in registers");
    constexpr int fit = kBytes / int(sizeof(Fetched<Source, kPart>[kParts])), kMost = fit < 1 ? 1 : fit,
                  kSome = kMost < kEach ? kMost : kEach;
    if (col + chunk() * 8 >= cols) return write_zeros(stage, begin, end);
#pragma unroll 1
    for (int first = begin; first < end; first += kSome) {
      Fetched<Source, kPart> chunks[kSome][kParts];
      KERNELS_UNROLL
      for (int i = 0; i < kSome; ++i) {
        if (first + i < end) fetch_chunk(chunks[i], which, first + i, col);
      }
      KERNELS_UNROLL
      for (int i = 0; i < kSome; ++i) {
        if (first + i < end) put_chunk(chunks[i], stage, which, first + i, col);
      }
    }
  }

 private:
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunks; }
  static __device__ __forceinline__ int tile_row(int i) { return i * kRowsPerPass + threadIdx.x % kThreads / kChunks; }
  static __device__ __forceinline__ uint32_t thread_offset() {
    return swizzled_offset(threadIdx.x % kThreads / kChunks, chunk());
  }

  // Chunks of which `left` columns exist.
  __device__ __forceinline__ void store_cut(unsigned char* stage, int begin, int end, int col, int left) const {
    KERNELS_UNROLL
    for (int i = begin; i < end; ++i) {
      Pack<T, 8> values;
      KERNELS_UNROLL
      for (int j = 0; j < 8; ++j)
        values.v[j] = (there_ >> i & 1) != 0 && j < left ? from_[i][col + j] : convert<T>(0.f);
      write(stage, i, values);
    }
  }
  template <class Which>
  __device__ __forceinline__ void fetch_chunk(Fetched<Source, kPart> (&parts)[kParts], const Which& which, int i,
                                              int col) const {
    which(tile_row(i), [&](const Source& source, int64_t row, bool) {
      KERNELS_UNROLL
      for (int part = 0; part < kParts; ++part)
        parts[part] = fetch<kPart>(source, row, col + chunk() * 8 + part * kPart);
    });
  }
  template <class Which>
  __device__ __forceinline__ void put_chunk(const Fetched<Source, kPart> (&parts)[kParts], unsigned char* stage,
                                            const Which& which, int i, int col) const {
    which(tile_row(i), [&](const Source& source, int64_t row, bool) {
      Pack<T, 8> values;
      KERNELS_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const int at = part * kPart;
        const auto some = convert<T>(resolve(source, parts[part], row, col + chunk() * 8 + at));
        KERNELS_UNROLL
        for (int j = 0; j < kPart; ++j) values.v[at + j] = some.v[j];
      }
      write(stage, i, values);
    });
  }
  static __device__ __forceinline__ void write_zeros(unsigned char* stage, int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) write(stage, i, broadcast<8>(convert<T>(0.f)));
  }
  static __device__ __forceinline__ void write(unsigned char* stage, int i, const Pack<T, 8>& values) {
    ::uint4 bits;
    memcpy(&bits, values.v, 16);
    *reinterpret_cast<::uint4*>(stage + thread_offset() + i * kPass) = bits;
  }

  unsigned there_ = 0;
  const T* from_[as_it_lies ? kEach : 1];
};

}  // namespace detail
KERNELS_END
