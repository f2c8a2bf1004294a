// The weights of a step of few.cuh's kernel: how threads copy them to shared memory, and how lanes read them there as
// operands of mma. Those of 16 bits are there as they are multiplied; codes of 8 and 4 bits are decoded when they are
// read.
#pragma once

#include "codes.cuh"
#include "product.cuh"
#include "tile_operand.cuh"

KERNELS_BEGIN
namespace detail {

// Of a block, at most; and threads of a group, and columns that they share.
constexpr int kFewTokens = 32, kFewRows = 64, kFewThreads = 128, kFewRun = 128;

// f(its matrix, its number there) for row i of a block whose outputs begin with `output`: with a gate, runs of 8 rows
// of either matrix take turns. Rows that are not there are the last one.
template <class P, class F>
__device__ __forceinline__ auto visit_few_row(const P& p, int64_t output, int i, const F& f) {
  const int64_t n = lesser<int64_t>(output + i / 8 / P::matrices * 8 + i % 8, p.n - 1);
  return i / 8 % P::matrices == 0 ? f(p.template weights<0>(), n) : f(p.template weights<P::matrices - 1>(), n);
}

// The number of a lane's columns in its run.
__device__ __forceinline__ int few_number() { return threadIdx.x % kFewThreads / 32 * 4 + threadIdx.x % 4; }

// Columns that are not there become zeros; rows behind the first `rows` are left as they are, and nobody uses their
// sums. A step is one run of 128 columns, or several. A lane reads rows 8j + lane / 4, and of a run the eight columns
// with its number among 16 lanes: those of a token and of a row are four pairs, and two mma take them. Of 16 bits
// tokens are the rows of an mma, and rows of weights its columns.
template <class P, class T, bool kCoded>
struct FewWeights {
  using Gate = std::decay_t<decltype(std::declval<const P&>().template weights<0>())>;
  using Code = T;
  using Tile = TileOperand<T, Gate, kFewRows, kFewThreads, 8, kFewRun>;
  static_assert(Tile::copied, "weights that lie in memory as tensor cores take them");
  static constexpr bool coded = false, scaled = false;
  static constexpr int kRuns = 1, kTileBytes = 8 * kFewRun * 2;
  static KERNELS_HD int bytes(int) { return Tile::kBytes; }

  // What a thread copies of a step: a chunk of 8 columns of every eighth row.
  class Copies {
   public:
    __device__ __forceinline__ Copies(const P& p, int rows, int64_t output, int) : row_tiles_(rows / 8) {
      KERNELS_UNROLL
      for (int j = 0; j < kFewRows / 8; ++j)
        rows_[j] = opaque(visit_few_row(p, output, j * 8 + row(),
                                        [](const Gate& source, int64_t n) { return address_of(source, n, 0); }) +
                          chunk() * 8);
    }
    template <bool>
    __device__ __forceinline__ void bring(uint32_t stage, int col, int columns, bool more) const {
      const bool zeros = col + chunk() * 8 >= columns;
      KERNELS_UNROLL
      for (int j = 0; j < kFewRows / 8; ++j)
        arch::copy_async_16_if(stage + Tile::place(row(), chunk()) + j * kTileBytes, rows_[j] + col,
                               more && j < row_tiles_, zeros);
    }

   private:
    static __device__ __forceinline__ int chunk() { return threadIdx.x % (kFewRun / 8); }
    static __device__ __forceinline__ int row() { return threadIdx.x % kFewThreads / (kFewRun / 8); }
    static_assert(kFewThreads == 8 * (kFewRun / 8), "threads copy eight rows at a time");

    const T* rows_[kFewRows / 8];
    int row_tiles_;
  };

  template <bool, int>
  class Lane {
   public:
    static constexpr bool by_group = false;
    __device__ __forceinline__ explicit Lane(int) {}
    // Of a step that begins with column `col`.
    __device__ __forceinline__ void read(const unsigned char* stage, int, int) {
      stage += Tile::place((threadIdx.x & 31) / 4, few_number());
      KERNELS_UNROLL
      for (int j = 0; j < kFewRows / 8; ++j)
        memcpy(weights_[j], __builtin_assume_aligned(stage + j * kTileBytes, 16), 16);
    }
    __device__ __forceinline__ void multiply(const uint32_t (&inputs)[kFewTokens / 8][4], int tokens) {
      multiply_16(sums_[0], inputs[0], inputs[1]);
      if (tokens > 16) multiply_16(sums_[1], inputs[2], inputs[3]);
    }
    // Leaves the sums, sums[token * kPitch + row].
    template <int kPitch>
    __device__ __forceinline__ void keep(float* sums, const float*, int tokens) const {
      float* const to = sums + (threadIdx.x & 31) / 4 * kPitch + 2 * (threadIdx.x % 4);
      KERNELS_UNROLL
      for (int i = 0; i < kFewTokens / 16; ++i) {
        if (16 * i >= tokens) break;
        KERNELS_UNROLL
        for (int j = 0; j < kFewRows / 8; ++j) {
          *reinterpret_cast<::float2*>(to + i * (16 * kPitch) + j * 8) = {sums_[i][j][0], sums_[i][j][1]};
          *reinterpret_cast<::float2*>(to + (i * 16 + 8) * kPitch + j * 8) = {sums_[i][j][2], sums_[i][j][3]};
        }
      }
    }

   private:
    // Products that depend on each other are apart.
    __device__ __forceinline__ void multiply_16(float (&sums)[kFewRows / 8][4], const uint32_t (&upper)[4],
                                                const uint32_t (&lower)[4]) const {
      KERNELS_UNROLL
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]};
        KERNELS_UNROLL
        for (int j = 0; j < kFewRows / 8; ++j) {
          const uint32_t b[2] = {weights_[j][i], weights_[j][i + 1]};
          arch::mma_16816<T>(sums[j], a, b);
        }
      }
    }

    uint32_t weights_[kFewRows / 8][4];
    float sums_[kFewTokens / 16][kFewRows / 8][4] = {};
  };
};

// A step is two runs. Of a row, 16-byte chunk i is at i ^ row % 8, or at i ^ row % 4 * 2 where a lane reads 8 bytes.
// Behind the codes are the scales of all rows, and then their zero points. Rows of weights are those of an mma, as what
// is decoded may be in any register, and tokens its columns.
template <class P, class T>
struct FewWeights<P, T, true> {
  using Gate = std::decay_t<decltype(std::declval<const P&>().template weights<0>())>;
  using Code = typename Coded<Gate>::Code;
  static constexpr bool coded = true, possible = Coded<Gate>::known && CodesInMemory<Gate>::value;
  using Types = CodedTypes<Gate>;
  using Row = typename Types::Row;
  using Scale = typename Types::Scale;
  using Zero = typename Types::Zero;
  static constexpr bool scaled = Types::scaled, zeroed = Types::zeroed;
  static constexpr int kPack = Coded<Gate>::pack, kRuns = 2, kStep = kRuns * kFewRun, kRowBytes = kStep * 16 / kPack,
                       kCodeBytes = kFewRows * kRowBytes;
  static KERNELS_HD int scale_bytes(int group_log2) {
    return scaled && group_log2 != kOneForAll ? kFewRows * bytes_of_groups<kStep, Scale>(group_log2) : 0;
  }
  static KERNELS_HD int bytes(int group_log2) {
    return kCodeBytes + scale_bytes(group_log2) + (zeroed ? kFewRows * bytes_of_groups<kStep, Zero>(group_log2) : 0);
  }

  // A chunk of several rows, and the scales of one or its zero points.
  class Copies {
   public:
    __device__ __forceinline__ Copies(const P& p, int rows, int64_t output, int group_log2)
        : row_tiles_(rows / 8), group_log2_(group_log2) {
      const auto find = [](const Gate& source, int64_t n) { return coded_row(source, n); };
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i)
        codes_[i] = opaque(visit_few_row(p, output, i * kRowsPerPass + row(), find).codes + chunk() * 16);
      if constexpr (scaled) groups_ = visit_few_row(p, output, thread() % kFewRows, find);
    }
    template <bool kByGroup>
    __device__ __forceinline__ void bring(uint32_t stage, int col, int columns, bool more) const {
      const bool zeros = col + chunk() * kPack >= columns;
      const uint32_t to = stage + row() * kRowBytes + swizzled(row(), chunk()) * 16;
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i)
        arch::copy_async_16_if(to + i * (kRowsPerPass * kRowBytes), codes_[i] + col / kPack * 16,
                               more && i * (kRowsPerPass / 8) + row() / 8 < row_tiles_, zeros);
      if constexpr (kByGroup || zeroed) {
        const int log2 = lesser(group_log2_, 30), i = thread() % kFewRows;
        const uint32_t groups = stage + kCodeBytes;
        if constexpr (kByGroup)
          copy_words_of_groups<kStep>(groups + i * bytes_of_groups<kStep, Scale>(log2), groups_.scales, col, columns,
                                      log2, more && thread() < kFewRows);
        if constexpr (zeroed)
          copy_words_of_groups<kStep>(groups + scale_bytes(group_log2_) + i * bytes_of_groups<kStep, Zero>(log2),
                                      groups_.zeros, col, columns, log2, more && thread() >= kFewRows);
      }
    }
    // The scale of row number thread().
    __device__ __forceinline__ float factor() const { return convert<float>(*groups_.scales); }

   private:
    static constexpr int kChunks = kRowBytes / 16, kRowsPerPass = kFewThreads / kChunks,
                         kEach = kFewRows / kRowsPerPass;
    static __device__ __forceinline__ int thread() { return threadIdx.x % kFewThreads; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunks; }
    static __device__ __forceinline__ int row() { return thread() / kChunks; }

    const unsigned char* codes_[kEach];
    Row groups_;
    int row_tiles_, group_log2_;
  };
  static_assert(kFewThreads == 2 * kFewRows, "a thread for each row's scales, and one for its zero points");

  // kByGroup: whether weights are multiplied by their scales, in 16 bits. With kTiles times 8 tokens.
  template <bool kByGroup, int kTiles>
  class Lane {
   public:
    static constexpr bool by_group = kByGroup;
    __device__ __forceinline__ explicit Lane(int group_log2)
        : group_log2_(lesser(group_log2, 30)),
          scale_row_(bytes_of_groups<kStep, Scale>(group_log2_)),
          zero_row_(bytes_of_groups<kStep, Zero>(group_log2_)) {}
    __device__ __forceinline__ void read(const unsigned char* stage, int col, int run) {
      const int row = (threadIdx.x & 31) / 4, mine = run * 16 + few_number(), byte = mine * kLaneBytes<kPack>;
      const int first = col >> group_log2_, group = col + mine * 8 >> group_log2_;
      codes_ = stage + row * kRowBytes + swizzled(row, byte / 16) * 16 + byte % 16;
      scales_ = stage + kCodeBytes + row * scale_row_ + place_of_group<Scale>(first, group);
      zeros_ = stage + kCodeBytes + (kByGroup ? kFewRows * scale_row_ : 0) + row * zero_row_ +
               place_of_group<Zero>(first, group);
    }
    __device__ __forceinline__ void multiply(const uint32_t (&inputs)[kFewTokens / 8][4], int) {
      KERNELS_UNROLL
      for (int i = 0; i < kFewRows / 16; ++i) {
        uint32_t upper[4], lower[4];
        decode(upper, 2 * i), decode(lower, 2 * i + 1);
        KERNELS_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          KERNELS_UNROLL
          for (int k = 0; k < 4; k += 2) {
            const uint32_t a[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]},
                           b[2] = {inputs[j][k], inputs[j][k + 1]};
            arch::mma_16816<T>(sums_[i][j], a, b);
          }
        }
      }
    }
    template <int kPitch>
    __device__ __forceinline__ void keep(float* sums, const float* factors, int tokens) const {
      const int row = (threadIdx.x & 31) / 4;
      float* const to = sums + 2 * (threadIdx.x % 4) * kPitch + row;
      KERNELS_UNROLL
      for (int i = 0; i < kFewRows / 8; ++i) {
        const float factor = scaled ? factors[row + 8 * i] : 1.f;
        KERNELS_UNROLL
        for (int j = 0; j < kTiles; ++j) {
          if (8 * j >= tokens) break;
          float* const there = to + 8 * j * kPitch + 8 * i;
          there[0] = sums_[i / 2][j][i % 2 * 2] * factor, there[kPitch] = sums_[i / 2][j][i % 2 * 2 + 1] * factor;
        }
      }
    }

   private:
    // Of row 8j.
    __device__ __forceinline__ void decode(uint32_t (&weights)[4], int j) const {
      decode_eight<T, Code, kByGroup>(weights, codes_ + j * (8 * kRowBytes),
                                      reinterpret_cast<const Scale*>(scales_ + j * 8 * scale_row_),
                                      reinterpret_cast<const Zero*>(zeros_ + j * 8 * zero_row_));
    }

    const int group_log2_, scale_row_, zero_row_;
    const unsigned char *codes_, *scales_, *zeros_;  // of this lane, in the step's stage
    float sums_[kFewRows / 16][kTiles][4] = {};
  };

 private:
  static __device__ __forceinline__ int swizzled(int row, int chunk) {
    return chunk ^ (kPack == 16 ? row % 4 * 2 : row % 8);
  }
};

}  // namespace detail
KERNELS_END
