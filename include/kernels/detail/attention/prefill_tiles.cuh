// Copies of queries, keys and values to tiles in shared memory, and the layout of these tiles. A tile consists of runs:
// 64 columns of 16 bits, or 128 columns of 8 bits, which is 128 bytes of each row. Chunk i of 16 bytes of a row is at
// chunk i ^ (row % 8) of its run (128-byte swizzle), so that neither writes nor reads have bank conflicts.
#pragma once

#include "../../arch/sm80.cuh"
#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

// Layout of a tile of kCols columns of 16 bits, or twice as many of 8. For copies, eight threads share a row; each
// takes the chunk of its number in every run. A thread's rows are kRowsPerPass apart. kWgmmaRows: the layout for wgmma,
// in which a run of all kWgmmaRows rows is contiguous; 0: the runs of a row are adjacent.
template <int kCols, int kThreads, int kWgmmaRows = 0>
struct TileLayout {
  static constexpr int kRuns = kCols / 64, kRowsPerPass = kThreads / 8;
  static constexpr int kRowBytes = kWgmmaRows > 0 ? 128 : kCols * 2,
                       kRunBytes = kWgmmaRows > 0 ? kWgmmaRows * 128 : 128;
  static __device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ row % 8) * 16;
  }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % 8; }
  static __device__ __forceinline__ int row() { return threadIdx.x % kThreads / 8; }
  static __device__ __forceinline__ uint32_t thread_offset() { return swizzled_offset(row(), chunk()); }

  // Zeros the chunks from column `cols` on.
  static __device__ __forceinline__ void clear_behind(unsigned char* tile, int rows, int cols) {
    if (cols >= kCols) return;
    KERNELS_ROLLED
    for (int i = row(); i < rows; i += kRowsPerPass) {
      KERNELS_ROLLED
      for (int run = 0; run < kRuns; ++run) {
        if (run * 64 + chunk() * 8 >= cols) clear_shared(tile + swizzled_offset(i, chunk()) + run * kRunBytes);
      }
    }
  }
};

// Copies queries to a tile: kRows rows of a block, from row `first` on.
template <class T, int kRows, class Layout, class P>
__device__ __forceinline__ void load_query_tile(const P& p, const PrefillRows& rows, int first, unsigned char* tile,
                                                int dim) {
  using Q = typename P::Q;
  constexpr int kEach = kRows / Layout::kRowsPerPass, kBatch = kEach < 4 ? kEach : 4, kChunk = 16 / int(sizeof(T)),
                kRun = 8 * kChunk;
  const int left = dim - Layout::chunk() * kChunk;
  const auto row_of = [&](int i) { return Layout::row() + i * Layout::kRowsPerPass; };
  if constexpr (is_stored_as<Q, T>) {
    if (p.wide_queries) {
#pragma unroll 4
      for (int i = 0; i < kEach; ++i) {
        const bool there = first + row_of(i) < rows.count;
        const auto place = rows.query_head(there ? first + row_of(i) : 0);
        const T* const from = p.q.at(rows.token + place.query, place.head * dim + Layout::chunk() * kChunk);
        KERNELS_UNROLL
        for (int run = 0; run < Layout::kRuns; ++run) {
          arch::copy_async_16_if(arch::shared_address(tile) + Layout::thread_offset() +
                                     i * (Layout::kRowsPerPass * Layout::kRowBytes) + run * Layout::kRunBytes,
                                 from + run * kRun, true, !there || run * kRun >= left);
        }
      }
      return;
    }
  }
#pragma unroll 1
  for (int some = 0; some < kEach; some += kBatch) {
#pragma unroll 1
    for (int run = 0; run < Layout::kRuns; ++run) {
      load_rows<T, kChunk, kBatch, 1, !is_stored_as<Q, T>, Q>(
          [&](int i, const auto& there, const auto& missing) {
            const int row = row_of(some + i);
            unsigned char* const to = tile + Layout::swizzled_offset(row, Layout::chunk()) + run * Layout::kRunBytes;
            const auto place = rows.query_head(first + row);
            if (first + row < rows.count && run * kRun < left)
              there(p.q, rows.token + place.query, int64_t(place.head) * dim + run * kRun + Layout::chunk() * kChunk,
                    to);
            else
              missing(to);
          },
          p.wide_queries);
    }
  }
}

// The address of the codes of 8 columns.
template <class Codes>
__device__ __forceinline__ const void* codes_at(const Codes& codes, int64_t row, int64_t col) {
  return codes.at(row, col);
}
template <class Format>
__device__ __forceinline__ const void* codes_at(const Words<Format>& codes, int64_t row, int64_t col) {
  return codes.at(row) + (col >> 3);
}

// Copies the keys, or the values, of a sequence to tiles of kKeys positions. at(pos): where they are, as a KvRun. Plain
// values of T are copied by cp.async. Quantized ones are either read through their functor, or a thread holds its codes
// in registers until it decodes them: through shared memory they would take as much of its bandwidth as the products
// do.
template <class T, class Run, bool kConstantStride, int kKeys, int kCols, int kThreads, bool kForWgmma = false>
class KvTiles {
 public:
  static constexpr int kChunk = 16 / int(sizeof(T)), kRun = 8 * kChunk;
  using Layout = TileLayout<kCols* int(sizeof(T)) / 2, kThreads, kForWgmma ? kKeys : 0>;
  using Code = typename Coded<typename Run::Codes>::Code;
  static constexpr int kBytes = kKeys * kCols * int(sizeof(T)), kEach = kKeys / Layout::kRowsPerPass;
  static constexpr bool copied = is_stored_as<typename Run::Codes, T>,
                        decoded = kForWgmma && !copied && lies_coded<typename Run::Codes>, scaled = Run::scaled;
  static constexpr int kUnit = copied ? 16 : 128 / Coded<typename Run::Codes>::pack;  // bytes of 8 columns
  // Rows of a tile that a warp copies, and how many of their addresses each lane of half a warp looks up.
  static constexpr int kWarpRows = kEach * 4, kLaneAddresses = (kWarpRows + 15) / 16;
  static_assert(kKeys % Layout::kRowsPerPass == 0, "all threads have as many rows");
  static_assert(kLaneAddresses <= 2, "copy() chooses between two");

  // For `cols` columns from `col` on.
  template <class At>
  __device__ __forceinline__ KvTiles(const At& at, int pos, int64_t col, int cols, bool wide)
      : col_(col), cols_(cols), wide_(wide) {
    if constexpr ((copied || decoded) && kConstantStride) {
      const Run first = at(pos);
      from_ = bytes_at(first, Layout::row(), col) + Layout::chunk() * kUnit;
      stride_ = bytes_at(first, 1, 0) - bytes_at(first, 0, 0);
    }
  }

  // The row in the tile that is number `row` of the warp's rows.
  static __device__ __forceinline__ int tile_row(int row) {
    return row / 4 * Layout::kRowsPerPass + threadIdx.x % kThreads / 32 * 4 + row % 4;
  }

  // Copies the tile at `pos`, of which rows [first, end) exist. rows[j]: in lane i + half * 16 the address() of the
  // warp's row i + j * 16. kFull: all rows exist, and full() holds.
  template <bool kFull, class At>
  __device__ __forceinline__ void load(unsigned char* tile, const At& at, int pos, int first, int end,
                                       const void* const (&rows)[kLaneAddresses], int half) {
    if constexpr (copied) {
      if (!kFull && !wide_) {
        read(tile, at, pos, first, end);
        if constexpr (kConstantStride) from_ += kKeys * stride_;
      } else {
        copy_rows<kFull>(arch::shared_address(tile) + Layout::thread_offset(), first, end, rows, half);
      }
    } else {
      read(tile, at, pos, first, end);
    }
  }
  // A thread's codes of a tile: 8 columns of each row and run.
  struct Codes {
    uint32_t words[kEach * Layout::kRuns][kUnit / 4];
  };
  // Loads the codes of the tile at `pos`, with rows as in load(). The loads are asynchronous.
  __device__ __forceinline__ void read_codes(Codes& codes, int first, int end,
                                             const void* const (&rows)[kLaneAddresses]) {
    const auto read_if = [&](const auto& there) {
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const unsigned char* const row = from(i, rows, 0);
        KERNELS_UNROLL
        for (int run = 0; run < Layout::kRuns; ++run)
          arch::begin_load_if(codes.words[i * Layout::kRuns + run], row + run * 8 * kUnit, there(i, run));
      }
    };
    if (full() && first <= 0 && end >= kKeys) {
      read_if([](int, int) { return true; });
    } else {
      read_if([&](int i, int run) {
        const int at = Layout::row() + i * Layout::kRowsPerPass;
        return at >= first && at < end && run * kRun < left();
      });
    }
    if constexpr (kConstantStride) from_ += kKeys * stride_;
  }
  // Decodes codes to values of T in the tile.
  __device__ __forceinline__ void decode(unsigned char* tile, const Codes& codes) const {
    if (cols_ == kCols) decode_runs<true>(tile, codes);
    else decode_runs<false>(tile, codes);
  }
  // Whether rows are as wide as the tile, and may be copied.
  __device__ __forceinline__ bool full() const { return wide_ && cols_ == kCols; }
  __device__ __forceinline__ const void* address(const Run& run) const {
    if constexpr (copied || decoded) return codes_at(run.codes, 0, col_);
    else return nullptr;
  }

 private:
  static constexpr int kStep = Layout::kRowsPerPass * Layout::kRowBytes;
  static __device__ __forceinline__ const unsigned char* bytes_at(const Run& run, int64_t row, int64_t col) {
    return static_cast<const unsigned char*>(codes_at(run.codes, row, col));
  }
  // Columns from the thread's first one on.
  __device__ __forceinline__ int left() const { return cols_ - Layout::chunk() * kChunk; }
  __device__ __forceinline__ const unsigned char* from(int i, const void* const (&rows)[kLaneAddresses],
                                                       int half) const {
    if constexpr (kConstantStride) {
      return from_ + i * Layout::kRowsPerPass * stride_;
    } else {
      const int lane = i % 4 * 4 + threadIdx.x % 32 / 8 + half * 16;
      const void* const row = kLaneAddresses == 1 || i < 4 ? rows[0] : rows[kLaneAddresses - 1];
      return reinterpret_cast<const unsigned char*>(
                 __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), lane)) +
             Layout::chunk() * kUnit;
    }
  }
  template <bool kFull>
  __device__ __forceinline__ void copy_rows(uint32_t to, int first, int end, const void* const (&rows)[kLaneAddresses],
                                            int half) {
    if (kFull || (full() && first <= 0 && end >= kKeys)) {
      KERNELS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const unsigned char* const row = from(i, rows, half);
        KERNELS_UNROLL
        for (int run = 0; run < Layout::kRuns; ++run)
          arch::copy_async_16(to + i * kStep + run * Layout::kRunBytes, row + run * 128);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const int at = Layout::row() + i * Layout::kRowsPerPass;
        const bool there = at >= first && at < end;
        const unsigned char* const row = there || !kConstantStride ? from(i, rows, half) : from_;
        KERNELS_UNROLL
        for (int run = 0; run < Layout::kRuns; ++run)
          arch::copy_async_16_if(to + i * kStep + run * Layout::kRunBytes, row + run * 128, run * kRun < left(),
                                 !there);
      }
    }
    if constexpr (kConstantStride) from_ += kKeys * stride_;
  }
  // kAll: all columns exist.
  template <bool kAll>
  __device__ __forceinline__ void decode_runs(unsigned char* tile, const Codes& codes) const {
    constexpr int kPairs = Decoder<Code>::each / 2;
    KERNELS_UNROLL
    for (int i = 0; i < kEach * Layout::kRuns; ++i) {
      const int run = i % Layout::kRuns, row = i / Layout::kRuns;
      uint32_t pairs[4];
      KERNELS_UNROLL
      for (int j = 0; j < kUnit / 4; ++j)
        Decoder<Code>::template pairs<T>(reinterpret_cast<uint32_t(&)[kPairs]>(pairs[j * kPairs]), codes.words[i][j],
                                         Nothing{});
      if (kAll || run * kRun < left())
        *reinterpret_cast<::uint4*>(tile + Layout::thread_offset() + row * kStep + run * Layout::kRunBytes) = {
            pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
  template <class At>
  __device__ __forceinline__ void read(unsigned char* tile, const At& at, int pos, int first, int end) const {
    KERNELS_ROLLED
    for (int run = 0; run * kRun < left(); ++run) {
      load_rows<T, kChunk, kEach, (kEach < 4 ? kEach : 4), !copied, std::decay_t<decltype(cached(at(pos).codes))>>(
          [&](int i, const auto& there, const auto& missing) {
            const int row = Layout::row() + i * Layout::kRowsPerPass;
            unsigned char* const to = tile + Layout::thread_offset() + i * kStep + run * Layout::kRunBytes;
            if (row >= first && row < end)
              there(cached(at(pos + row).codes), 0, col_ + run * kRun + Layout::chunk() * kChunk, to);
            else
              missing(to);
          },
          wide_);
    }
  }

  const unsigned char* from_ = nullptr;
  int64_t stride_ = 0, col_;
  int cols_;
  bool wide_;
};

// Transposes a tile of kKeys values of 8 bits, as the producer has copied it, for wgmma: row c of the result, of 128
// bytes, is column c. Word 4i + t of a row has, of the 16 keys from 16i on, numbers 2t, 2t + 1, 2t + 8 and 2t + 9, in
// the order in which a lane holds its weights.
//
// Called by a warpgroup; each warp transposes two chunks of 16 columns. ldmatrix.trans loads pairs of columns, from
// which a lane makes one column each. stmatrix writes 16 bytes of 8 of these columns, four even and four odd ones, as
// these do not share banks.
template <int kKeys>
__device__ __forceinline__ void transpose_tile(uint32_t to, uint32_t from, int cols) {
  static_assert(kKeys % 32 == 0 && kKeys <= 128, "keys of an ldmatrix, and of a row");
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2;
  const int row = lane % 8, column = row * 2 + (row / 4 ^ lane / 8 % 2);
  from += lane * 128 + (chunk ^ lane % 8) * 16;
  to += (chunk * 16 + column) * 128 + (lane / 16 ^ column % 8) * 16;
  KERNELS_UNROLL
  for (int x = 0; x < 2; ++x) {
    if ((chunk + x) * 16 >= cols) return;
    KERNELS_UNROLL
    for (int i = 0; i < kKeys / 32; ++i) {
      uint32_t pairs[4], words[4];
      arch::load_matrix_x4_trans(pairs, (from ^ x * 16) + i * 32 * 128);
      KERNELS_UNROLL
      for (int j = 0; j < 4; ++j)
        words[j] = __byte_perm(pairs[j / 2 * 2], pairs[j / 2 * 2 + 1], j % 2 == lane / 16 ? 0x6420 : 0x7531);
      arch::store_matrices((to ^ i * 32) + x * 16 * 128, words);
    }
  }
}

}  // namespace detail
KERNELS_END
