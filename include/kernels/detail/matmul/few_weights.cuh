// The weights of a step of few.cuh's kernel: how threads copy them to shared memory, and how lanes read them as
// operands of mma. 16-bit weights are stored as they are multiplied; codes of 8 and 4 bits are decoded when a lane
// reads them.
#pragma once

#include "codes.cuh"
#include "product.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

// The most tokens and rows of a block.
constexpr int kStreamedTokens = 32, kStreamedRows = 64;

// Calls f(matrix, row in it) for row i of a block whose outputs begin at `output`. With a gate, runs of 8 rows of the
// two matrices alternate. Rows beyond the end are replaced by the last one.
template <class P, class F>
__device__ __forceinline__ auto visit_streamed_row(const P& p, int64_t output, int i, const F& f) {
  const int64_t n = lesser<int64_t>(output + i / 8 / P::matrices * 8 + i % 8, p.n - 1);
  return i / 8 % P::matrices == 0 ? f(p.template weights<0>(), n) : f(p.template weights<P::matrices - 1>(), n);
}

// The weights of a step of kStep columns, for a group of kThreads threads. Columns beyond the end become zeros; rows
// after the first `rows` are not written, and their sums are not used. A lane reads rows 8j + lane / 4, eight columns
// at a time: eight columns of a token and of a row are four pairs, which two mma take. A run is what the lanes of a
// warp read together: 32 columns. With 16 bits each warp has its own runs of all rows; tokens are the rows of an mma,
// rows of weights its columns.
constexpr int kRunCols = 32;
// What is multiplied by the scales of codes. A row's scale: its results. One of so many columns or more: their sums.
// One of fewer: each weight, in 16 bits.
enum class Scaling { results, sums_of_128, sums_of_32, weights };
template <class P, class T, bool kCoded, int kThreads, int kStep>
struct StreamedWeights {
  using Gate = FirstWeights<P>;
  using Code = T;
  using Tile = TileOperand<T, Gate, kStreamedRows, kThreads, 8, kStep>;
  static_assert(Tile::copied, "weights that lie in memory as tensor cores take them");
  static_assert(kStep == kRunCols * (kThreads / 32), "a run for each warp");
  static constexpr bool scaled = false;
  static constexpr int kWarps = kThreads / 32, kRuns = kStep / kRunCols / kWarps, kParts = kWarps;
  static constexpr int kTileBytes = 8 * kStep * 2;
  static __device__ __forceinline__ int warp() { return threadIdx.x % kThreads / 32; }
  // chunk_of(run): the chunk of 8 columns that a lane reads in a run. part(): which of the group's sums its warp has.
  static __device__ __forceinline__ int chunk_of(int run) { return (run * kWarps + warp()) * 4 + threadIdx.x % 4; }
  static __device__ __forceinline__ int part() { return warp(); }
  static KERNELS_HD int bytes(int) { return Tile::kBytes; }

  // A thread copies a chunk of 8 columns of every eighth row.
  class Copies {
   public:
    __device__ __forceinline__ Copies(const P& p, int rows, int64_t output, int, int) : row_tiles_(rows / 8) {
      KERNELS_UNROLL
      for (int j = 0; j < kStreamedRows / 8; ++j)
        rows_[j] = opaque(visit_streamed_row(p, output, j * 8 + row(),
                                             [](const Gate& source, int64_t n) { return address_of(source, n, 0); }) +
                          chunk() * 8);
    }
    template <bool>
    __device__ __forceinline__ void load(uint32_t stage, int col, int columns, bool more) const {
      const bool zeros = col + chunk() * 8 >= columns;
      KERNELS_UNROLL
      for (int j = 0; j < kStreamedRows / 8; ++j)
        arch::copy_async_16_if(stage + Tile::swizzled_offset(row(), chunk()) + j * kTileBytes, rows_[j] + col,
                               more && j < row_tiles_, zeros);
    }

   private:
    static __device__ __forceinline__ int chunk() { return threadIdx.x % (kStep / 8); }
    static __device__ __forceinline__ int row() { return threadIdx.x % kThreads / (kStep / 8); }
    static_assert(kThreads == 8 * (kStep / 8), "threads copy eight rows at a time");

    const T* rows_[kStreamedRows / 8];
    int row_tiles_;
  };

  template <Scaling, int>
  class Lane {
   public:
    static constexpr bool by_group = false;
    __device__ __forceinline__ explicit Lane(int) {}
    // For a step that begins at column `col`.
    __device__ __forceinline__ void read(const unsigned char* stage, int, int) {
      stage += Tile::swizzled_offset((threadIdx.x & 31) / 4, chunk_of(0));
      KERNELS_UNROLL
      for (int j = 0; j < kStreamedRows / 8; ++j)
        memcpy(weights_[j], __builtin_assume_aligned(stage + j * kTileBytes, 16), 16);
    }
    __device__ __forceinline__ void multiply(const uint32_t (&inputs)[kStreamedTokens / 8][4], int tokens) {
      multiply_16(sums_[0], inputs[0], inputs[1]);
      if (tokens > 16) multiply_16(sums_[1], inputs[2], inputs[3]);
    }
    // Stores the sums: sums[token * kPitch + row].
    template <int kPitch>
    __device__ __forceinline__ void keep(float* sums, const float*, int tokens) const {
      float* const to = sums + (threadIdx.x & 31) / 4 * kPitch + 2 * (threadIdx.x % 4);
      KERNELS_UNROLL
      for (int i = 0; i < kStreamedTokens / 16; ++i) {
        if (16 * i >= tokens) break;
        KERNELS_UNROLL
        for (int j = 0; j < kStreamedRows / 8; ++j) {
          *reinterpret_cast<::float2*>(to + i * (16 * kPitch) + j * 8) = {sums_[i][j][0], sums_[i][j][1]};
          *reinterpret_cast<::float2*>(to + (i * 16 + 8) * kPitch + j * 8) = {sums_[i][j][2], sums_[i][j][3]};
        }
      }
    }

   private:
    // Dependent products are kept apart.
    __device__ __forceinline__ void multiply_16(float (&sums)[kStreamedRows / 8][4], const uint32_t (&upper)[4],
                                                const uint32_t (&lower)[4]) const {
      KERNELS_UNROLL
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
        KERNELS_UNROLL
        for (int j = 0; j < kStreamedRows / 8; ++j) {
          const uint32_t b[2] = {weights_[j][i], weights_[j][i + 1]};
          arch::mma_16816<T>(sums[j], a, b);
        }
      }
    }

    uint32_t weights_[kStreamedRows / 8][4];
    float sums_[kStreamedTokens / 16][kStreamedRows / 8][4] = {};
  };
};

// Codes: each warp has its own rows with all columns, so each code is decoded once. These rows are the rows of an mma,
// as decoded values may be in any register; tokens are its columns. Behind the codes are the scales of all rows, and
// then their zero points.
template <class P, class T, int kThreads, int kStep>
struct StreamedWeights<P, T, true, kThreads, kStep> {
  using Gate = FirstWeights<P>;
  using Code = typename Coded<Gate>::Code;
  static constexpr bool possible = Coded<Gate>::known && CodesInMemory<Gate>::value;
  using Types = CodedTypes<Gate>;
  using Row = typename Types::Row;
  using Scale = typename Types::Scale;
  using Zero = typename Types::Zero;
  static constexpr bool scaled = Types::scaled, zeroed = Types::zeroed;
  static constexpr int kWarpRows = kStreamedRows / (kThreads / 32), kRuns = kStep / kRunCols, kParts = 1;
  static constexpr int kPack = Coded<Gate>::pack, kRowBytes = kStep * 16 / kPack,
                       kCodeBytes = kStreamedRows * kRowBytes;
  static __device__ __forceinline__ int chunk_of(int run) { return run * 4 + threadIdx.x % 4; }
  static __device__ __forceinline__ int part() { return 0; }
  // The first of a lane's rows.
  static __device__ __forceinline__ int row() {
    return threadIdx.x % kThreads / 32 * kWarpRows + (threadIdx.x & 31) / 4;
  }
  // Bytes between the scales (and zero points) of two rows: for as many groups as a step can have.
  static constexpr int kGroups = kStep / kPack, kScaleRow = kGroups * int(sizeof(Scale)),
                       kZeroRow = kGroups * int(sizeof(Zero));
  static KERNELS_HD int scale_bytes(int group_log2) {
    return scaled && group_log2 != kOneForAll ? kStreamedRows * kScaleRow : 0;
  }
  static KERNELS_HD int bytes(int group_log2) {
    return kCodeBytes + scale_bytes(group_log2) + (zeroed ? kStreamedRows * kZeroRow : 0);
  }

  // A thread copies a chunk of several rows, and the scales and zero points of one row.
  class Copies {
   public:
    __device__ __forceinline__ Copies(const P& p, int rows, int64_t output, int columns, int group_log2)
        : row_tiles_(rows / 8), group_log2_(group_log2) {
      const auto find = [](const Gate& source, int64_t n) { return coded_row(source, n); };
      const int last = int(lesser<int64_t>(p.n - 1 - output, kStreamedRows));
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const int at = i * kRowsPerPass + row();
        if (i < kAlike || !CodesInMemory<Gate>::in_rows) {
          codes_[i] = opaque(visit_streamed_row(p, output, at, find).codes + chunk() * 16);
        } else {  // one addition: setup before the first copy counts, as blocks may have few steps
          const int64_t distance = visit_streamed_row(p, output, at, [](const Gate& source, int64_t) {
            return coded_row(source, 1).codes - coded_row(source, 0).codes;
          });
          const bool there = at / (8 * P::matrices) * 8 + at % 8 <= last;
          codes_[i] = opaque(codes_[i - kAlike] + (there ? kAlike * kRowsPerPass / P::matrices * distance : 0));
        }
      }
      if constexpr (scaled) {
        const Row own = visit_streamed_row(p, output, thread(), find);
        if (group_log2 == kOneForAll) factor_ = *own.scales;
        scales_ = {own.scales, columns, group_log2};
        if constexpr (zeroed) zeros_ = {own.zeros, columns, group_log2};
      }
    }
    template <bool kByGroup>
    __device__ __forceinline__ void load(uint32_t stage, int col, int columns, bool more) const {
      const bool past_end = col + chunk() * kPack >= columns;
      const uint32_t to = stage + row() * kRowBytes + swizzled(row(), chunk()) * 16;
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i)
        arch::copy_async_16_if(to + i * (kRowsPerPass * kRowBytes), codes_[i] + col / kPack * 16,
                               more && i * (kRowsPerPass / 8) + row() / 8 < row_tiles_, past_end);
      const uint32_t groups = stage + kCodeBytes;
      if constexpr (kByGroup) scales_.load(groups + thread() * kScaleRow, col, more);
      if constexpr (zeroed) zeros_.load(groups + scale_bytes(group_log2_) + thread() * kZeroRow, col, more);
    }
    static_assert(kThreads == kStreamedRows, "a thread for the scales of each row");
    // The scale of the row with this thread's number, if it is for all columns, otherwise 1.
    __device__ __forceinline__ float factor() const { return group_log2_ == kOneForAll ? convert<float>(factor_) : 1; }

   private:
    static constexpr int kChunks = kRowBytes / 16, kRowsPerPass = kThreads / kChunks,
                         kEach = kStreamedRows / kRowsPerPass;
    // The number of passes until a thread has a row of the same matrix again.
    static constexpr int kAlike = 8 * P::matrices > kRowsPerPass ? 8 * P::matrices / kRowsPerPass : 1;
    static_assert(kRowsPerPass % 8 == 0, "all chunks of a thread are swizzled alike");
    static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunks; }
    static __device__ __forceinline__ int row() { return thread() / kChunks; }

    const unsigned char* codes_[kEach];
    Scale factor_;
    GroupCopy<kStep, Scale> scales_;
    GroupCopy<kStep, Zero> zeros_;
    int row_tiles_, group_log2_;
  };

  // For kTiles times 8 tokens.
  template <Scaling kScaling, int kTiles>
  class Lane {
   public:
    static constexpr bool by_group = kScaling != Scaling::results;
    static constexpr bool scales_sums = kScaling == Scaling::sums_of_128 || kScaling == Scaling::sums_of_32;
    __device__ __forceinline__ explicit Lane(int group_log2) : log2_(lesser(group_log2, 30)) {
      const int lane = threadIdx.x & 31, first = row() - lane / 4 + lane % 16, byte = lane % 4 * kLaneBytes<kPack>;
      codes_at_ = opaque(kWords == 1 ? first * kRowBytes + swizzled(first, lane / 16) * 16
                                     : row() * kRowBytes + swizzled(row(), byte / 16) * 16 + byte % 16);
      const int group = lane % 4 * 8 >> log2_;
      scales_at_ = opaque(kCodeBytes + row() * kScaleRow + group * int(sizeof(Scale)));
      zeros_at_ = opaque(kCodeBytes + (by_group ? kStreamedRows * kScaleRow : 0) + row() * kZeroRow +
                         group * int(sizeof(Zero)));
    }
    // Reads run `run` of a step that begins at column `col`. Runs are read in order: an odd one may use what was read
    // with the one before.
    __device__ __forceinline__ void read(const unsigned char* stage, int col, int run) {
      read_codes(stage, run);
      if (scales_sums && run % kScaledRuns != (zeroed ? 0 : kScaledRuns - 1)) return;
      const int first = col >> log2_, group = run * kRunCols >> log2_;
      KERNELS_UNROLL
      for (int i = 0; i < kTilesOfRows; ++i) {
        if constexpr (by_group) {
          const Scale* const scale = reinterpret_cast<const Scale*>(stage + scales_at_ + i * (8 * kScaleRow) +
                                                                    offset_of_group<Scale>(first, first + group));
          if constexpr (scales_sums) factors_[i] = *scale;
          else factors_[i] = pair_of_scale<T>(*scale);
        }
        if constexpr (zeroed)
          zeros_[i] =
              zero_at<Zero>(stage + zeros_at_ + i * (8 * kZeroRow) + offset_of_group<Zero>(first, first + group));
      }
    }
    __device__ __forceinline__ void multiply(const uint32_t (&inputs)[kTiles][4], int) {
      KERNELS_UNROLL
      for (int i = 0; i < kTilesOfRows; i += 2) {
        uint32_t upper[4], lower[4];
        decode(upper, i), decode(lower, i + 1);
        KERNELS_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          KERNELS_UNROLL
          for (int k = 0; k < 4; k += 2) {
            const uint32_t a[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]},
                           b[2] = {inputs[j][k], inputs[j][k + 1]};
            arch::mma_16816<T>(sums_[i / 2][j], a, b);
          }
        }
      }
      if (scales_sums && run_ % kScaledRuns == kScaledRuns - 1) scale_sums();
    }
    template <int kPitch>
    __device__ __forceinline__ void keep(float* sums, const float* factors, int tokens) const {
      const auto& results = scales_sums ? scaled_ : sums_;
      float* const to = sums + 2 * (threadIdx.x % 4) * kPitch + row();
      KERNELS_UNROLL
      for (int i = 0; i < kWarpRows / 8; ++i) {
        const float factor = scaled ? factors[row() + 8 * i] : 1.f;
        KERNELS_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          if (8 * j >= tokens) break;
          float* const there = to + 8 * j * kPitch + 8 * i;
          there[0] = results[i / 2][j][i % 2 * 2] * factor, there[kPitch] = results[i / 2][j][i % 2 * 2 + 1] * factor;
        }
      }
    }

   private:
    static constexpr int kTilesOfRows = kWarpRows / 8, kWords = kLaneBytes<kPack> / 4,
                         kScaledRuns = (kScaling == Scaling::sums_of_128 ? 128 : 32) / kRunCols;
    static_assert(kRuns % kScaledRuns == 0, "a step has all columns of a scale, or some whole ones");

    // Chunks of a row are permuted by XOR, and so is a run. 4-bit codes are read for two runs at a time, as ldmatrix
    // reads four tiles of 8 rows x 16 bytes.
    __device__ __forceinline__ void read_codes(const unsigned char* stage, int run) {
      KERNELS_UNROLL
      for (int i = 0; i < kTilesOfRows; i += 2) {
        const unsigned char* const from = stage + i * 8 * kRowBytes + (codes_at_ ^ run * kRunCols * 16 / kPack);
        if constexpr (kWords == 1) {
          if (run % 2 == 0) arch::load_matrix_x4(words_[i / 2], arch::shared_address(from));
        } else {
          memcpy(words_[i / 2], __builtin_assume_aligned(from, 8), 8);
          memcpy(words_[i / 2] + 2, __builtin_assume_aligned(from + 8 * kRowBytes, 8), 8);
        }
      }
      run_ = run;
    }
    // Decodes row 8i.
    __device__ __forceinline__ void decode(uint32_t (&weights)[4], int i) const {
      uint32_t words[kWords];
      KERNELS_UNROLL
      for (int j = 0; j < kWords; ++j) words[j] = words_[i / 2][kWords == 1 ? run_ % 2 * 2 + i % 2 : i % 2 * 2 + j];
      decode_eight<T, Code>(weights, words, zeros_[i]);
      if constexpr (kScaling == Scaling::weights) scale_eight<T>(weights, factors_[i]);
    }
    // Adds the sums of kScaledRuns runs, times their scales, to those of the columns before.
    __device__ __forceinline__ void scale_sums() {
      KERNELS_UNROLL
      for (int i = 0; i < kTilesOfRows; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < 2 * kTiles; ++j) {
          float& sum = sums_[i / 2][j / 2][i % 2 * 2 + j % 2];
          scaled_[i / 2][j / 2][i % 2 * 2 + j % 2] += sum * convert<float>(factors_[i]);
          sum = 0;
        }
      }
    }

    int log2_, codes_at_, scales_at_, zeros_at_;  // offsets in a stage of this lane's row, in the step's first run
    int run_;
    uint32_t words_[kTilesOfRows / 2][4];  // of 16 rows: two runs (4 bits), or one (8 bits)
    std::conditional_t<scales_sums, Scale, uint32_t> factors_[kTilesOfRows];  // uint32_t: pairs
    std::conditional_t<zeroed, float, Nothing> zeros_[kTilesOfRows];
    float sums_[kTilesOfRows / 2][kTiles][4] = {}, scaled_[kTilesOfRows / 2][kTiles][4] = {};
  };

 private:
  // The swizzle: the lanes of a warp, or of half a warp if they read 8 bytes, read from all banks.
  static __device__ __forceinline__ int swizzled(int row, int chunk) {
    return chunk ^ (kPack == 16 ? row % 4 * 2 : row % 8);
  }
  static_assert(kRowBytes >= 128, "chunks of a row change places with each other");
};

}  // namespace detail
KERNELS_END
