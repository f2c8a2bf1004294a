// Queries, keys and values on their way to tiles in shared memory: runs of 64 columns of 16 bits, each eight chunks of 16 bytes, of which
// chunk i of a row is at i ^ (row % 8), so that neither writes nor reads have bank conflicts.
#pragma once

#include "../../arch/sm80.cuh"
#include "prefill_rows.cuh"

KERNELS_BEGIN
namespace detail {

// Of kCols columns of 16 bits. Threads take chunks of 16 bytes: eight threads a row, each the chunk of its number in each run of 64
// columns; a thread's rows are kRowsPerPass apart. kApart: for wgmma, which wants the runs of kApart rows one behind the other; 0: the runs
// of a row are side by side.
template <int kCols, int kThreads, int kApart = 0>
struct TileLayout {
  static constexpr int kRuns = kCols / 64, kRowsPerPass = kThreads / 8;
  static constexpr int kRowBytes = kApart > 0 ? 128 : kCols * 2, kRunBytes = kApart > 0 ? kApart * 128 : 128;
  static __device__ __forceinline__ uint32_t place(int row, int chunk) { return row * kRowBytes + (chunk ^ row % 8) * 16; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % 8; }
  static __device__ __forceinline__ int row() { return threadIdx.x % kThreads / 8; }
  static __device__ __forceinline__ uint32_t mine() { return place(row(), chunk()); }

  // Zeros in the chunks from `cols` on.
  static __device__ __forceinline__ void clear_behind(unsigned char* tile, int rows, int cols) {
    if (cols >= kCols) return;
    KERNELS_ROLLED
    for (int i = row(); i < rows; i += kRowsPerPass) {
      KERNELS_ROLLED
      for (int run = 0; run < kRuns; ++run) {
        if (run * 64 + chunk() * 8 >= cols) clear_shared(tile + place(i, chunk()) + run * kRunBytes);
      }
    }
  }
};

// Queries of kRows of a block's rows, from row `first` on, to a tile.
template <class T, int kRows, class Layout, class P>
__device__ __forceinline__ void bring_queries(const P& p, const PrefillRows& rows, int first, unsigned char* tile, int dim) {
  using Q = typename P::Q;
  constexpr int kEach = kRows / Layout::kRowsPerPass, kBatch = kEach < 4 ? kEach : 4;
  const int left = dim - Layout::chunk() * 8;
  const auto row_of = [&](int i) { return Layout::row() + i * Layout::kRowsPerPass; };
  if constexpr (lies_as<Q, T>) {
    if (p.wide_queries) {
#pragma unroll 4
      for (int i = 0; i < kEach; ++i) {
        const bool there = first + row_of(i) < rows.count;
        const auto place = rows.place(there ? first + row_of(i) : 0);
        const T* const from = p.q.at(rows.token + place.query, place.head * dim + Layout::chunk() * 8);
        KERNELS_UNROLL
        for (int run = 0; run < Layout::kRuns; ++run) {
          arch::copy_async_16_if(arch::shared_address(tile) + Layout::mine() + i * (Layout::kRowsPerPass * Layout::kRowBytes) + run * Layout::kRunBytes, from + run * 64, true, !there || run * 64 >= left);
        }
      }
      return;
    }
  }
#pragma unroll 1
  for (int some = 0; some < kEach; some += kBatch) {
#pragma unroll 1
    for (int run = 0; run < Layout::kRuns; ++run) {
      bring_rows<T, 8, kBatch, !lies_as<Q, T>, Q>([&](int i, const auto& there, const auto& missing) {
        const int row = row_of(some + i);
        unsigned char* const to = tile + Layout::place(row, Layout::chunk()) + run * Layout::kRunBytes;
        const auto place = rows.place(first + row);
        if (first + row < rows.count && run * 64 < left) there(p.q, rows.token + place.query, int64_t(place.head) * dim + run * 64 + Layout::chunk() * 8, to);
        else missing(to);
      }, p.wide_queries);
    }
  }
}

// The keys, or the values, of a sequence on their way to tiles of kKeys of them. at(pos): where they are, as a KvRun.
template <class T, class Run, bool kStraight, int kKeys, int kCols, int kThreads, bool kApart = false>
class KvTiles {
 public:
  using Layout = TileLayout<kCols, kThreads, kApart ? kKeys : 0>;
  static constexpr int kBytes = kKeys * kCols * 2, kEach = kKeys / Layout::kRowsPerPass;
  static constexpr bool copied = lies_as<typename Run::Codes, T>;
  // A warp's rows, and how many of them each lane of half a warp finds.
  static constexpr int kWarpRows = kEach * 4, kFound = (kWarpRows + 15) / 16;
  static_assert(kKeys % Layout::kRowsPerPass == 0, "all threads have as many rows");
  static_assert(kFound <= 2, "copy() chooses between two");

  // Columns from `col` on, so many of them.
  template <class At>
  __device__ __forceinline__ KvTiles(const At& at, int pos, int64_t col, int cols, bool wide) : col_(col), cols_(cols), wide_(wide) {
    if constexpr (copied && kStraight) {
      const Run first = at(pos);
      from_ = first.codes.at(Layout::row(), col) + Layout::chunk() * 8;
      stride_ = first.codes.at(1, 0) - first.codes.at(0, 0);
    }
  }

  // Number `row` of the warp's rows of a tile, in the tile.
  static __device__ __forceinline__ int tile_row(int row) { return row / 4 * Layout::kRowsPerPass + threadIdx.x / 32 * 4 + row % 4; }

  // Rows of the tile from `pos` on, of which those from `first` up to `end` are there. rows[j]: in lane i + half * 16 where the
  // warp's row i + j * 16 is, as address() said. kFull: all of them are there, and full() holds.
  template <bool kFull, class At>
  __device__ __forceinline__ void bring(unsigned char* tile, const At& at, int pos, int first, int end, const void* const (&rows)[kFound], int half) {
    if constexpr (copied) {
      const uint32_t to = arch::shared_address(tile) + Layout::mine();
      if constexpr (kFull) {
        copy_all(to, rows, half);
      } else {
        if (full() && first <= 0 && end >= kKeys) copy_all(to, rows, half);
        else if (wide_) copy(to, first, end, rows, half);
        else read(tile, at, pos, first, end);
      }
      if constexpr (kStraight) from_ += kKeys * stride_;
    } else {
      read(tile, at, pos, first, end);
    }
  }
  // Whether rows are as wide as the tile, and may be copied.
  __device__ __forceinline__ bool full() const { return wide_ && cols_ == kCols; }
  __device__ __forceinline__ const void* address(const Run& run) const {
    if constexpr (copied) return run.codes.at(0, col_);
    else return nullptr;
  }

 private:
  // Columns from the thread's first on.
  __device__ __forceinline__ int left() const { return cols_ - Layout::chunk() * 8; }
  static constexpr int kStep = Layout::kRowsPerPass * Layout::kRowBytes;
  __device__ __forceinline__ const T* from(int i, const void* const (&rows)[kFound], int half) const {
    if constexpr (kStraight) {
      return from_ + i * Layout::kRowsPerPass * stride_;
    } else {
      const int lane = i % 4 * 4 + threadIdx.x % 32 / 8 + half * 16;
      const void* const row = kFound == 1 || i < 4 ? rows[0] : rows[kFound - 1];
      return reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), lane)) + Layout::chunk() * 8;
    }
  }
  __device__ __forceinline__ void copy_all(uint32_t to, const void* const (&rows)[kFound], int half) {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const T* const row = from(i, rows, half);
      KERNELS_UNROLL
      for (int run = 0; run < Layout::kRuns; ++run) arch::copy_async_16(to + i * kStep + run * Layout::kRunBytes, row + run * 64);
    }
  }
  __device__ __forceinline__ void copy(uint32_t to, int first, int end, const void* const (&rows)[kFound], int half) {
#pragma unroll 1
    for (int i = 0; i < kEach; ++i) {
      const int at = Layout::row() + i * Layout::kRowsPerPass;
      const bool there = at >= first && at < end;
      const T* const row = there || !kStraight ? from(i, rows, half) : from_;
      KERNELS_UNROLL
      for (int run = 0; run < Layout::kRuns; ++run) arch::copy_async_16_if(to + i * kStep + run * Layout::kRunBytes, row + run * 64, run * 64 < left(), !there);
    }
  }
  template <class At>
  __device__ __forceinline__ void read(unsigned char* tile, const At& at, int pos, int first, int end) const {
    KERNELS_ROLLED
    for (int run = 0; run * 64 < left(); ++run) {
      bring_rows<T, 8, kEach, !copied, std::decay_t<decltype(cached(at(pos).codes))>>([&](int i, const auto& there, const auto& missing) {
        const int row = Layout::row() + i * Layout::kRowsPerPass;
        unsigned char* const to = tile + Layout::mine() + i * kStep + run * Layout::kRunBytes;
        if (row >= first && row < end) there(cached(at(pos + row).codes), 0, col_ + run * 64 + Layout::chunk() * 8, to);
        else missing(to);
      }, wide_);
    }
  }

  const T* from_ = nullptr;
  int64_t stride_ = 0, col_;
  int cols_;
  bool wide_;
};

}  // namespace detail
KERNELS_END
