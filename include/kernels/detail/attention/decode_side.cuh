// Keys, or values, of decoding on tensor cores: how they lie in a slot of a warp's ring, how they come there,
// and how mma's operands are made of them.
#pragma once

#include "flash_decode.cuh"

KERNELS_BEGIN
namespace detail {

// Where a row of codes begins.
template <class Source>
__device__ __forceinline__ const char* row_address(const Source& source, int64_t row) {
  return reinterpret_cast<const char*>(source.at(row, 0));
}
template <class Format>
__device__ __forceinline__ const char* row_address(const Words<Format>& source, int64_t row) {
  return reinterpret_cast<const char*>(source.at(row));
}

// Whether codes are finite, all of them.
template <class Code>
constexpr bool is_finite_code =
    std::is_same<Code, int8_t>::value || std::is_same<Code, Int4>::value || std::is_same<Code, Uint4>::value;

// Keys, or values, of up to kCols columns on their way: 16 rows of shared memory. Chunks of 16 bytes are permuted
// within 128 bytes, so that ldmatrix meets no bank conflict. Rows that are shifted by 16 bytes instead make cp.async
// ask for half as many sectors again: on an H200 a kernel that did nothing but bring 1 GB took 260 us with these, and
// 240 with rows at multiples of 128 bytes. Of kHeads heads a row has the columns side by side.
template <class Run_, int kCols, int kHeads = 1>
struct DecodeSide {
  using Run = Run_;
  using Code = typename Coded<typename Run::Codes>::Code;
  static constexpr bool coded = !is_16_bit<Code>, scaled = Run::scaled;
  static constexpr int kPack = Coded<typename Run::Codes>::pack;  // codes in 16 bytes
  static constexpr int kOperands = kPack / 8;                     // of mma, 16 columns each, in 32 bytes of each row
  static constexpr int kHeadBytes = kCols / kPack * 16, kSteps = kHeads * kHeadBytes / 32;  // of ldmatrix
  static constexpr int kSpan = kSteps * 32 < 128 ? kSteps * 32 : 128;
  static constexpr int kRowBytes = (kSteps * 32 + kSpan - 1) / kSpan * kSpan, kBytes = kDecodeKeys * kRowBytes;
  static constexpr int kSharers = kRowBytes >= 512   ? 32
                                  : kRowBytes >= 256 ? 16
                                  : kRowBytes >= 128 ? 8
                                                     : 4;  // lanes to a row
  static constexpr int kRows = 32 / kSharers;                    // that are brought at once
  static_assert(kHeads == 1 || kSteps * 32 == kSharers * 16, "a lane brings something of one head");

  static __host__ __device__ constexpr int bytes_of(int cols) { return cols / 8 * 128 / kPack; }
  static __device__ __forceinline__ int place(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row * kSpan / 128) % (kSpan / 16)) * 16;
  }

  // The first row of which a lane brings something, the chunk, and the head.
  static __device__ __forceinline__ int lane_chunk() { return (threadIdx.x & 31) % kSharers; }
  static __device__ __forceinline__ int lane_row() { return (threadIdx.x & 31) / kSharers; }
  static __device__ __forceinline__ int lane_head() { return kHeads == 1 ? 0 : lane_chunk() * 16 / kHeadBytes; }
  // Brings 16 rows of a multiple of 16 bytes, of each head: row i of the lane's head comes from at(i), asked for in
  // order. `rows` of them are there, and the others, as columns that are not there, are zeros. kOnce: what runs once
  // has to be short. kAll: all rows and columns are there.
  template <bool kOnce, bool kAll, class At>
  static __device__ __forceinline__ void copy(uint32_t to, int bytes, int rows, const At& at) {
    const int mine = lane_row(), chunk = lane_chunk(), begin = kHeads == 1 ? chunk * 16 : chunk * 16 % kHeadBytes;
    to += place(mine, chunk);
#pragma unroll kOnce ? 1 : kDecodeKeys
    for (int row = 0; row < kDecodeKeys; row += kRows) {
      const char* const from = at(row + mine) + begin;
      // Bits of `row` and of `mine` do not overlap, and rows begin at multiples of what is permuted.
      const uint32_t lane_to = (to ^ place(row, 0) % kRowBytes) + row * kRowBytes;
      KERNELS_UNROLL
      for (int first = 0; first < kSteps * 32; first += kSharers * 16) {
        if (kSteps * 2 % kSharers != 0 && first / 16 + chunk >= kSteps * 2) break;
        arch::copy_async_16_or_zeros(lane_to + first, from + first,
                                     kAll || (row + mine < rows && first + begin < bytes));
      }
    }
  }
  // The address of a lane's row of 32 bytes number `step`, from its first one.
  static __device__ __forceinline__ uint32_t at_step(uint32_t first, int step) {
    return (first ^ (step * 32 % kSpan)) + step * 32 / kSpan * kSpan;
  }
  static __device__ __forceinline__ uint32_t key_lane() { return place(threadIdx.x & 15, threadIdx.x / 16 & 1); }
  static __device__ __forceinline__ uint32_t value_lane() {
    return place((threadIdx.x & 7) + (threadIdx.x & 16) / 2, threadIdx.x / 8 & 1);
  }

  // Operands of 16 keys x 16 columns from 32 bytes of each row; if coded, k is in the order of query_word().
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
  // The words, pairs of columns, in which thread t of a row finds what stands beside number `operand`, from there on
  // and `apart`.
  static constexpr int apart = coded ? 1 : 4;
  static __device__ __forceinline__ int query_word(int operand, int t) {
    if constexpr (kPack == 32) return operand / 2 * 16 + 4 * t + operand % 2 * 2;
    else return operand * 8 + (coded ? 2 * t : t);
  }
  // The same of 16 columns x 16 keys; rows stand for the columns of value_column().
  template <class T>
  static __device__ __forceinline__ void values(uint32_t (&a)[kOperands][4], uint32_t at) {
    if constexpr (coded) {
      uint32_t words[4];
      arch::load_matrix_x4_turned(words, at);
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
      arch::load_matrix_x4_turned(a[0], at);
    }
  }
  // A scale of 16 or 32 bits as it is in memory, and as a number.
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
  // The column that row g, and g + 8 as second = 1, of operand number m stands for. Of 4 bits two codes of a word that
  // follow each other are 16 bits apart.
  static __device__ __forceinline__ int value_column(int m, int g, int second) {
    if constexpr (kPack == 32) return m / 2 * 32 + g / 2 * 8 + m % 2 * 4 + second * 2 + g % 2;
    else return m * 16 + (coded ? 2 * g + second : g + 8 * second);
  }
};

}  // namespace detail
KERNELS_END
