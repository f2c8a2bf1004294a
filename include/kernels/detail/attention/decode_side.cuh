// Keys, or values, of decoding on tensor cores: their layout in a slot of a warp's pipeline, their copies to it, and
// how operands of mma are made of them.
#pragma once

#include "flash_decode.cuh"

KERNELS_BEGIN
namespace detail {

// The address of a row of codes.
template <class Source>
__device__ __forceinline__ const char* row_address(const Source& source, int64_t row) {
  return reinterpret_cast<const char*>(source.at(row, 0));
}
template <class Format>
__device__ __forceinline__ const char* row_address(const Words<Format>& source, int64_t row) {
  return reinterpret_cast<const char*>(source.at(row));
}

// Whether a code type has no infinities and no NaN.
template <class Code>
constexpr bool is_finite_code =
    std::is_same<Code, int8_t>::value || std::is_same<Code, Int4>::value || std::is_same<Code, Uint4>::value;

// Keys, or values, of up to kCols columns in a tile of 16 rows of shared memory. With kHeads heads, a row has their
// columns side by side. Chunks of 16 bytes are swizzled within 128 bytes, so that ldmatrix has no bank conflicts. Rows
// that are padded by 16 bytes instead make cp.async ask for half as many sectors again: on an H200, a kernel that only
// copied 1 GB took 260 us with padding, and 240 us with rows at multiples of 128 bytes.
template <class Run_, int kCols, int kHeads = 1>
struct DecodeSide {
  using Run = Run_;
  using Code = typename Coded<typename Run::Codes>::Code;
  static constexpr bool coded = !is_16_bit<Code>, scaled = Run::scaled;
  static constexpr int kPack = Coded<typename Run::Codes>::pack;  // codes in 16 bytes
  static constexpr int kOperands = kPack / 8;  // operands of mma, 16 columns each, in 32 bytes of each row
  static constexpr int kHeadBytes = kCols / kPack * 16, kSteps = kHeads * kHeadBytes / 32;  // steps of ldmatrix
  static constexpr int kSpan = kSteps * 32 < 128 ? kSteps * 32 : 128;
  static constexpr int kRowBytes = (kSteps * 32 + kSpan - 1) / kSpan * kSpan, kBytes = kDecodeKeys * kRowBytes;
  static constexpr int kSharers = kRowBytes >= 512   ? 32
                                  : kRowBytes >= 256 ? 16
                                  : kRowBytes >= 128 ? 8
                                                     : 4;  // lanes that share a row
  static constexpr int kRows = 32 / kSharers;                    // rows that are copied at once
  static_assert(kHeads == 1 || kSteps * 32 == kSharers * 16, "a lane copies something of one head");

  static __host__ __device__ constexpr int bytes_of(int cols) { return cols / 8 * 128 / kPack; }
  static __device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row * kSpan / 128) % (kSpan / 16)) * 16;
  }

  // The first row that a lane copies from, its chunk, and its head.
  static __device__ __forceinline__ int lane_chunk() { return (threadIdx.x & 31) % kSharers; }
  static __device__ __forceinline__ int lane_row() { return (threadIdx.x & 31) / kSharers; }
  static __device__ __forceinline__ int lane_head() { return kHeads == 1 ? 0 : lane_chunk() * 16 / kHeadBytes; }
  // Copies 16 rows of each head, whose length `bytes` is a multiple of 16: row i of the lane's head is at at(i), which
  // is called in order. The first `rows` rows exist; other rows, and columns that do not exist, are zeroed. kCold: for
  // code that runs once, which must be short. kAll: all rows and columns exist.
  template <bool kCold, bool kAll, class At>
  static __device__ __forceinline__ void copy(uint32_t to, int bytes, int rows, const At& at) {
    const int mine = lane_row(), chunk = lane_chunk(), begin = kHeads == 1 ? chunk * 16 : chunk * 16 % kHeadBytes;
    to += swizzled_offset(mine, chunk);
#pragma unroll kCold ? 1 : kDecodeKeys
    for (int row = 0; row < kDecodeKeys; row += kRows) {
      const char* const from = at(row + mine) + begin;
      // `row` and `mine` have no bits in common, and rows begin at multiples of the swizzle's span.
      const uint32_t lane_to = (to ^ swizzled_offset(row, 0) % kRowBytes) + row * kRowBytes;
      KERNELS_UNROLL
      for (int first = 0; first < kSteps * 32; first += kSharers * 16) {
        if (kSteps * 2 % kSharers != 0 && first / 16 + chunk >= kSteps * 2) break;
        arch::copy_async_16_or_zeros(lane_to + first, from + first,
                                     kAll || (row + mine < rows && first + begin < bytes));
      }
    }
  }
  // The address of 32-byte step `step` of a lane's row, from that of its first step.
  static __device__ __forceinline__ uint32_t at_step(uint32_t first, int step) {
    return (first ^ (step * 32 % kSpan)) + step * 32 / kSpan * kSpan;
  }
  static __device__ __forceinline__ uint32_t key_lane() {
    return swizzled_offset(threadIdx.x & 15, threadIdx.x / 16 & 1);
  }
  static __device__ __forceinline__ uint32_t value_lane() {
    return swizzled_offset((threadIdx.x & 7) + (threadIdx.x & 16) / 2, threadIdx.x / 8 & 1);
  }

  // A operands of 16 keys x 16 columns, from 32 bytes of each row. If quantized, k is in the order of query_word().
  template <class T>
  static __device__ __forceinline__ void keys(uint32_t (&a)[kOperands][4], uint32_t at) {
    if constexpr (coded) {
      uint32_t words[4];
      arch::load_matrix_x4(words, at);
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t pairs[kOperands];
        Decoder<Code>::template pairs<T>(pairs, words[i], Nothing{});
        KERNELS_UNROLL
        for (int j = 0; j < kOperands / 2; ++j) {
          uint32_t* const operand = a[i / 2 * (kOperands / 2) + j];
          operand[i % 2] = pairs[2 * j], operand[2 + i % 2] = pairs[2 * j + 1];
        }
      }
    } else {
      arch::load_matrix_x4(a[0], at);
    }
  }
  // The B operand that goes with operand `operand` of the keys: thread t finds its words, which are pairs of columns of
  // a query, at this index and `apart` words further.
  static constexpr int apart = coded ? 1 : 4;
  static __device__ __forceinline__ int query_word(int operand, int t) {
    if constexpr (kPack == 32) return operand / 2 * 16 + 4 * t + operand % 2 * 2;
    else return operand * 8 + (coded ? 2 * t : t);
  }
  // A operands of 16 columns x 16 keys, transposed. value_column() says which columns the rows stand for.
  template <class T>
  static __device__ __forceinline__ void values(uint32_t (&a)[kOperands][4], uint32_t at) {
    if constexpr (coded) {
      uint32_t words[4];
      arch::load_matrix_x4_trans(words, at);
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t pairs[kOperands];
        Decoder<Code>::template pairs<T>(pairs, kPack == 16 ? __byte_perm(words[i], 0, 0x3120) : words[i], Nothing{});
        KERNELS_UNROLL
        for (int j = 0; j < kOperands / 2; ++j) {
          uint32_t* const operand = a[i % 2 * (kOperands / 2) + j];
          operand[i / 2 * 2] = pairs[2 * j], operand[i / 2 * 2 + 1] = pairs[2 * j + 1];
        }
      }
    } else {
      arch::load_matrix_x4_trans(a[0], at);
    }
  }
  // A scale of 16 or 32 bits: its bits, and their value.
  static __device__ __forceinline__ uint32_t scale_bits(const char* at) {
    if constexpr (!scaled) return 0;
    else if constexpr (sizeof(*Run::scales) == 2) return *reinterpret_cast<const uint16_t*>(at);
    else return *reinterpret_cast<const uint32_t*>(at);
  }
  static __device__ __forceinline__ float scale_of(uint32_t bits) {
    if constexpr (scaled) {
      std::remove_const_t<std::remove_reference_t<decltype(*Run::scales)>> scale;
      memcpy(&scale, &bits, sizeof(scale));
      return convert<float>(scale);
    }
    return 1.f;
  }
  // The column that row g (second = 0) or g + 8 (second = 1) of operand m stands for. With 4 bits, two
  // consecutive codes of a word are 16 bits apart.
  static __device__ __forceinline__ int value_column(int m, int g, int second) {
    if constexpr (kPack == 32) return m / 2 * 32 + g / 2 * 8 + m % 2 * 4 + second * 2 + g % 2;
    else return m * 16 + (coded ? 2 * g + second : g + 8 * second);
  }
};

}  // namespace detail
KERNELS_END
