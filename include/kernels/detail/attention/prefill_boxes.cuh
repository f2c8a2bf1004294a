// TMA copies of keys and values to tiles in shared memory, where their layout allows it. A box is 128 bytes of each of
// some rows of a head: all rows of a tile, or as many as are in one page. Boxes have the layout of TileLayout (128-byte
// swizzle). Results may be stored in such boxes, too.
//
//   tile of 64 keys of 128 columns, in pages of 32:   | box 0 | box 1 |    each box is issued by another thread
//                                                     | box 2 | box 3 |
//
// The tensor maps of keys and values do not know the lengths of sequences. Therefore tiles that begin before the first
// visible key, or end behind the last one, are copied by cp.async.
#pragma once

#include <numeric>

#include "../tensor_map.cuh"
#include "prefill_tiles.cuh"

KERNELS_BEGIN
namespace detail {

// Kernel parameters for TMA.
struct TileBoxes {
  arch::TensorMap keys, values, results;
  int rows, result_rows;  // rows of a box; 0: there are no tensor maps
};

// Rows of a box for tiles of kKeys rows, or 0 if TMA cannot be used. Boxes need a multiple of 8 rows to match the
// swizzle.
template <int kKeys, class Kv>
int rows_of_boxes(const Kv& kv) {
  if constexpr (in_pages<Kv>) {
    const int rows = int(std::gcd(kv.where().pages.size, uint32_t(kKeys)));
    return rows % 8 == 0 ? rows : 0;
  } else {
    static_assert(constant_stride<Kv>, "rows that follow each other");
    return kKeys;
  }
}

template <class Tensor>
bool make_kv_map(const Exec& ex, const Tensor& tensor, bool many_blocks, const AttentionShape& shape, int64_t columns,
                 int box_rows, arch::TensorMap& map) {
  constexpr int64_t any = int64_t(1) << 31;
  const auto* const first = tensor.at({0, 0, 0}, 0);
  MappedRows rows;
  rows.from = first;
  rows.element_bytes = int(sizeof(typename Tensor::Element));
  rows.columns = columns, rows.rows = any, rows.heads = shape.kv_heads, rows.blocks = many_blocks ? any : 1;
  rows.row_stride = tensor.at({0, 1, 0}, 0) - first;
  rows.head_stride = tensor.at({0, 0, 0}, 1) - first;
  rows.block_stride = tensor.at({1, 0, 0}, 0) - first;
  return make_tensor_map(ex, rows, box_rows, map);
}
constexpr int kResultBoxRows = 64;  // the rows of a warpgroup
// A row has all columns of a token, and the rows of all sequences follow each other.
template <class P>
bool make_result_map(const Exec& ex, const P& p, arch::TensorMap& map) {
  constexpr int64_t any = int64_t(1) << 31;
  const int64_t columns = p.shape.heads * p.shape.value_dim();
  const Plane out = plane_of(p.out, p.shape.total_queries(), columns);
  if (out.rows == 0 || out.heads.count > 1 || out.batches.count > 1 || out.rows > any) return false;
  return make_tensor_map(ex, {out.begin, 2, columns, any, 1, 1, out.stride / 2, 0, 0}, kResultBoxRows, map);
}
// Makes the tensor maps of a call. rows_are_queries: whether a tile's rows may be queries of one head.
template <class Body, class P>
TileBoxes boxes_for(const Exec& ex, const P& p, bool rows_are_queries) {
  using Where = std::decay_t<decltype(p.kv.where())>;
  const bool many_blocks = std::is_same<Where, Dense>::value ? p.shape.batch > 1 : in_pages<typename P::Kv>;
  const int rows = p.wide_keys && p.wide_values ? rows_of_boxes<Body::kKeys>(p.kv) : 0;
  TileBoxes boxes = {};
  bool made = rows > 0 && make_kv_map(ex, p.kv.keys(), many_blocks, p.shape, p.shape.dim, rows, boxes.keys);
  if constexpr (Body::kTmaValues)
    made = made && make_kv_map(ex, p.kv.values(), many_blocks, p.shape, p.shape.value_dim(), rows, boxes.values);
  boxes.rows = made ? rows : 0;
  if constexpr (Body::kTmaResults) {
    const bool whole = p.out_pack == 8 && p.shape.value_dim() == Body::kCols;
    if (whole && rows_are_queries && make_result_map(ex, p, boxes.results)) boxes.result_rows = kResultBoxRows;
  }
  return boxes;
}

// The coordinates of a box: the first row, and its block (of kv.h: a sequence or a page).
struct BoxCoordinates {
  int row, block;
};

// Copies a tile of kKeys rows and kRuns runs of 128 bytes, from run kFirst of a head on. Thread number() of the
// producer's 128 threads issues run number() % kRuns of box number() / kRuns; threads without a box only arrive at the
// barrier.
template <class T, int kKeys, int kRuns, int kFirst = 0>
class TileBox {
  static_assert(kKeys / 8 * kRuns <= 128, "a thread for each box");

 public:
  // Positions [low, end) may be read.
  __device__ __forceinline__ TileBox(const TileBoxes& boxes, int low, int end)
      : boxes_(boxes), low_(low), last_(boxes.rows > 0 ? end - kKeys : -1) {}

  // Whether the tile at `pos` can be copied by TMA.
  __device__ __forceinline__ bool have(int pos) const { return pos >= low_ && pos <= last_; }
  template <class Kv>
  __device__ __forceinline__ BoxCoordinates find(const Kv& kv, int b, int pos) const {
    if (row() >= kKeys) return {};
    const KvSlot slot = kv.where().slot(b, int64_t(pos) + row());
    return {int(slot.place), int(slot.block)};
  }
  // Arrives at the barrier, as one of 128 threads, and issues the thread's box unless that is behind the head's
  // columns: such boxes, which are zeros, cost time. 16 heads of 192 columns and values of 128, 16,384 keys, took 5,915
  // us with them for 3,885 (H200).
  template <bool kValues>
  __device__ __forceinline__ void load(const BoxCoordinates& at, int head, int columns, unsigned char* tile,
                                       uint64_t* full) const {
    if (row() < kKeys && (kFirst + run()) * (128 / int(sizeof(T))) < columns) {
      arch::mbarrier_arrive_expect(full, boxes_.rows * 128);
      arch::copy_box(arch::shared_address(tile) + (run() * kKeys + row()) * 128,
                     kValues ? boxes_.values : boxes_.keys, (kFirst + run()) * (128 / int(sizeof(T))), at.row,
                     head, at.block, full);
    } else {
      arch::mbarrier_arrive(full);
    }
  }

 private:
  static __device__ __forceinline__ int number() { return int(threadIdx.x % 32 * 4 + threadIdx.x / 32); }
  static __device__ __forceinline__ int run() { return number() % kRuns; }
  __device__ __forceinline__ int row() const { return number() / kRuns * boxes_.rows; }

  const TileBoxes& boxes_;
  int low_, last_;
};
// For kernels without TMA.
struct NoBox {
  __device__ __forceinline__ NoBox(const Nothing&, int, int) {}
  static KERNELS_HD constexpr bool have(int) { return false; }
  template <class Kv>
  __device__ __forceinline__ BoxCoordinates find(const Kv&, int, int) const {
    return {};
  }
  template <bool kValues>
  __device__ __forceinline__ void load(const BoxCoordinates&, int, int, unsigned char*, uint64_t*) const {}
};

}  // namespace detail
KERNELS_END
