// Weights of 8 and 4 bits as an operand of gemm.cuh's tiles without wgmma: cp.async copies the codes to shared memory,
// and each lane decodes the codes that it multiplies.
#pragma once

#include "codes.cuh"

KERNELS_BEGIN
namespace detail {

// One thread's share of a tile of kRows rows of weights, in steps of 64 columns: copies codes and scales to a stage,
// like TileOperand. In a stage 16-byte chunk i of a row is at i ^ row / 2 % 2 * 2 (8 bits) or at i ^ row / 4 % 2 (4
// bits), so that the lanes of a warp read from all banks. Behind the codes are 16 bytes of scales for each row, and as
// many of zero points. which(i, f) is as in TileOperand.
template <class T, class Source, int kRows, int kThreads>
class CodedOperand {
 public:
  using Code = typename Coded<Source>::Code;
  using Types = CodedTypes<Source>;
  using Row = typename Types::Row;
  using Scale = typename Types::Scale;
  using Zero = typename Types::Zero;
  static constexpr bool scaled = Types::scaled, zeroed = Types::zeroed;
  static constexpr int kStep = 64, kPack = Coded<Source>::pack, kRowBytes = kStep * 16 / kPack, kScaleRow = 16,
                       kCodeBytes = kRows * kRowBytes, kScaleBytes = scaled ? kRows * kScaleRow : 0,
                       kBytes = kCodeBytes + (zeroed ? 2 : 1) * kScaleBytes;
  static constexpr int kChunks = kRowBytes / 16, kRowsPerPass = kThreads / kChunks, kCodes = kRows / kRowsPerPass;
  static constexpr bool copied = true;
  struct Waiting {};
  static constexpr int kEach = kCodes + (scaled ? 1 : 0);
  static_assert(kThreads == kRows, "a thread for the scales of each row");

  template <class Which>
  __device__ __forceinline__ CodedOperand(const Which& which, int first_col, int cols, int group_log2)
      : col_(first_col), group_log2_(group_log2) {
    KERNELS_UNROLL
    for (int i = 0; i < kCodes; ++i) {
      which(row() + i * kRowsPerPass, [&](const Source& source, int64_t at, bool is_there) {
        there_ |= unsigned(is_there) << i;
        codes_[i] = coded_row(source, at).codes + first_col / kPack * 16 + chunk() * 16;
      });
    }
    if constexpr (scaled)
      which(int(threadIdx.x), [&](const Source& source, int64_t at, bool) {
        const Row row = coded_row(source, at);
        scales_ = {row.scales, cols, group_log2};
        if constexpr (zeroed) zeros_ = {row.zeros, cols, group_log2};
      });
  }

  __device__ __forceinline__ void copy(int i, uint32_t stage, bool more) {
    if (i < kCodes) {
      arch::copy_async_16_if(stage + thread_offset() + i * (kRowsPerPass * kRowBytes), codes_[i],
                             more && (there_ >> i & 1) != 0);
      codes_[i] += kRowBytes;
    } else if constexpr (scaled) {
      copy_groups_of(stage, col_, more);
      col_ += kStep;
    }
  }
  __device__ __forceinline__ void copy_cut(uint32_t stage, int ahead, int cols) const {
    const bool zeros = chunk() * kPack >= cols;
    KERNELS_UNROLL
    for (int i = 0; i < kCodes; ++i)
      arch::copy_async_16_if(stage + thread_offset() + i * (kRowsPerPass * kRowBytes),
                             codes_[i] + (zeros ? 0 : ahead / kPack * 16), (there_ >> i & 1) != 0, zeros);
    if constexpr (scaled) copy_groups_of(stage, col_ + ahead, true);
  }

  // The weights of a lane in a step: of rows row + 8j of the tile, 8 columns of each half.
  template <bool kByGroup>
  class Lane {
   public:
    __device__ __forceinline__ Lane(int row, int group_log2) : row_(row), group_log2_(lesser(group_log2, 30)) {}
    // Begins half of a step; the step begins at column `col`.
    __device__ __forceinline__ void begin(const unsigned char* stage, int col, int half) {
      const int t = threadIdx.x % 4, byte = (half * 4 + t) * kLaneBytes<kPack>;
      codes_ = stage + row_ * kRowBytes + swizzled(row_, byte / 16) * 16 + byte % 16;
      const int group = col + (half * 4 + t) * 8 >> group_log2_, first = col >> group_log2_;
      scales_ = stage + kCodeBytes + row_ * kScaleRow + offset_of_group<Scale>(first, group);
      zeros_ = stage + kCodeBytes + kScaleBytes + row_ * kScaleRow + offset_of_group<Zero>(first, group);
    }
    __device__ __forceinline__ void decode(uint32_t (&weights)[4], int j) const {
      uint32_t words[kLaneBytes<kPack> / 4];
      memcpy(words, __builtin_assume_aligned(codes_ + j * (8 * kRowBytes), sizeof(words)), sizeof(words));
      decode_eight<T, Code>(weights, words, zero_at<Zero>(zeros_ + j * (8 * kScaleRow)));
      if constexpr (kByGroup)
        scale_eight<T>(weights, pair_of_scale<T>(*reinterpret_cast<const Scale*>(scales_ + j * (8 * kScaleRow))));
    }

   private:
    const int row_, group_log2_;
    const unsigned char *codes_, *scales_, *zeros_;
  };

 private:
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunks; }
  static __device__ __forceinline__ int row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int swizzled(int row, int chunk) {
    return chunk ^ (kChunks == 4 ? row / 2 % 2 * 2 : row / 4 % 2);
  }
  static __device__ __forceinline__ uint32_t thread_offset() {
    return row() * kRowBytes + swizzled(row(), chunk()) * 16;
  }
  __device__ __forceinline__ void copy_groups_of(uint32_t stage, int col, bool more) const {
    const uint32_t to = stage + kCodeBytes + threadIdx.x * kScaleRow;
    scales_.load(to, col, more && group_log2_ != kOneForAll);
    if constexpr (zeroed) zeros_.load(to + kScaleBytes, col, more);
  }

  const unsigned char* codes_[kCodes];
  unsigned there_ = 0;
  GroupCopy<kStep, Scale> scales_;
  GroupCopy<kStep, Zero> zeros_;
  int col_, group_log2_;
};

}  // namespace detail
KERNELS_END
