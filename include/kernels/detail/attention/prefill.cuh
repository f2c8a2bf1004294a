// Attention of many queries, for sm_80 and up, on tensor cores: o = softmax(q k^T) v, tile by tile of the keys
// (FlashAttention-2).
//
//                   keys:  | tile 0 | tile 1 | tile 2 | ...    tiles begin at multiples of their size
//   rows   warp 0    16    |########|########|###\    |    each warp has 16 or 32 rows to itself: logits,
//   of a   warp 1    16    |########|########|#######\|    weights, state and output stay in its registers
//   block  ...             |        |  all   |  any   |    any: some keys visible; all: no mask to apply
//
//   shared memory:  | queries kRows x kDim | keys 0 | values 0 | keys 1 | values 1 |   one stage where heads are large
//
// A block's rows are queries of one head, or where these are few those of all heads that share keys (grouped-query
// packing). 16-bit operands that are aligned are copied by cp.async; others are read through their functors, rounded to
// 16 bits and stored. Logits are fragments of mma.sync, and their weights, rounded to 16 bits, are operands again. In
// shared memory a run of 64 columns is eight chunks of 16 bytes, swizzled so that neither writes nor reads have bank
// conflicts.
//
// Keys that none of a block's rows see are not read; a warp skips tiles that its own rows do not see, and asks the
// score for single keys only in those that its rows do not see as a whole. As tiles begin at multiples of their size,
// wherever the first key that a block sees is, the bits of a row do not depend on which other rows are in its block.
#pragma once

#include "../../arch/sm80.cuh"
#include "../../arch/sm90.cuh"
#include "../../exec.cuh"
#include "merge_states.cuh"
#include "tile.cuh"

KERNELS_BEGIN
namespace detail {

// What blocks leave in the workspace of rows whose keys are split: for each part of the keys the rows of the sequence, with all heads,
// one behind the other. They hold the outputs of the part, finished, and what its merge has to know.
struct PrefillParts {
  // Of the row of a part. In the first part's, `parts` says how many there are, `distance` rows apart, and which query and head it is;
  // in others' it is 0.
  struct alignas(16) Row {
    int32_t token;
    uint16_t head, parts;
    int32_t distance;
    float logsumexp;
  };
  static_assert(sizeof(Row) == 16, "one access");

  int32_t* count = nullptr;  // of rows, of all parts
  Row* rows = nullptr;
  float* outputs = nullptr;
};

// kSplits: whether there is a workspace, so that keys may be split.
template <class Q_, class Kv_, class Out_, class S_, bool kSplits_ = false>
struct PrefillProblem {
  using Q = Q_;
  using Kv = Kv_;
  using Out = Out_;
  using S = S_;
  static constexpr bool kSplits = kSplits_;

  Q q;
  Kv kv;
  Out out;
  S score;
  AttentionShape shape;
  Attention options;
  float scale;
  bool wide_queries, wide_keys, wide_values;  // whether packs may be read
  int out_pack;
  std::conditional_t<kSplits, PrefillParts, Nothing> parts;
};

// n / divisor for n below 2^31.
struct FastDivision {
  unsigned divisor, multiplier;
  int shift;

  FastDivision() = default;
  explicit FastDivision(int64_t by) : divisor(unsigned(by)), shift(0) {
    while ((uint64_t(1) << shift) < divisor) ++shift;
    multiplier = unsigned(((uint64_t(1) << (31 + shift)) + divisor - 1) / divisor);
    --shift;
  }
  // Leaves the remainder in n.
  __device__ __forceinline__ unsigned operator()(unsigned& n) const {
    const unsigned quotient = divisor == 1 ? n : __umulhi(n, multiplier) >> shift;
    n -= quotient * divisor;
    return quotient;
  }
};

// The rows of a block, `count` of them: from row `first` on of those of `pack` heads from `first_head` on, a query's side by side. Where
// keys are split, the block has those from key_begin up to key_end, and its first row is row `left_first` of what is left.
struct PrefillRows {
  int64_t token;  // of the sequence's first query
  int b, first, count, queries, keys, first_head, kv_head, part;
  FastDivision pack;
  int splits, split, key_begin, key_end, left_first;

  struct Place {
    int query, head;
  };
  __device__ __forceinline__ Place place(int row) const {
    unsigned head = unsigned(first + row);
    const int query = int(pack(head));
    return {query, first_head + int(head)};
  }
  __device__ __forceinline__ ScoreQueries at(int query) const { return {b, query, query, queries, keys}; }
};

// The same, of which the compiler knows that all lanes of a warp have them, which spares registers.
__device__ __forceinline__ PrefillRows same_in_lanes(const PrefillRows& rows) {
  static_assert(sizeof(PrefillRows) % 4 == 0, "words");
  int words[sizeof(PrefillRows) / 4];
  memcpy(words, &rows, sizeof(words));
  KERNELS_UNROLL
  for (int& word : words) word = __shfl_sync(0xffffffffu, word, 0);
  PrefillRows out;
  memcpy(&out, words, sizeof(words));
  return out;
}

// In how many parts keys are cut: so many that the sequence's own blocks fill the machine, once, or twice where that leaves fewer
// multiprocessors idle, as long as a part is worth its state. Other sequences have no say in this, so that bits do not depend on them.
struct PrefillCuts {
  static constexpr int kMost = 32, kFewestTiles = 8, kFewestOfFew = 32;
  static constexpr int kFewRows = 64;  // single queries, say: what a block does before and behind its tiles takes as long as many of these
  static constexpr int kOnEach = 2;  // blocks of what is split, on a multiprocessor, at most
  int once, twice;  // how many blocks that is
  int fixed;        // parts that are asked for, or 0
  int most_tiles;   // of keys that are announced

  PrefillCuts() = default;
  PrefillCuts(const DeviceInfo& device, const Attention& options, int on_each, int tile_keys)
      : once(on_each * device.sm_count), twice(kOnEach * device.sm_count), fixed(options.fixed_splits()), most_tiles(std::numeric_limits<int>::max()) {
    if (options.expected_keys() > 0) most_tiles = int(lesser<int64_t>(most_tiles, (options.expected_keys() - 1) / tile_keys + 2));
  }

  // Of any sequence.
  KERNELS_HD int most() const { return fixed > 0 ? fixed : greater(1, lesser(int(kMost), most_tiles / kFewestTiles)); }
  // Of one that has so many blocks, and of one that has so many tiles of keys as well, and rows of heads that share them.
  KERNELS_HD int most_of(unsigned blocks) const {
    const int of_once = int(unsigned(once) / blocks), of_twice = int(unsigned(twice) / blocks);
    return fixed > 0 ? fixed : greater(1, lesser(most(), 8 * of_twice > 19 * of_once ? of_twice : of_once));  // a fifth better
  }
  KERNELS_HD int of(unsigned blocks, int tiles, unsigned rows) const {
    return greater(1, lesser(most_of(blocks), fixed > 0 ? tiles : tiles / (rows <= kFewRows ? kFewestOfFew : kFewestTiles)));
  }
};

// How many rows blocks leave at most, whichever kernel it is.
struct PrefillRoom {
  static constexpr int most_rows(int64_t dim) { return dim <= 64 ? 192 : 128; }  // of a tile, of heads of so many columns
  static constexpr size_t kCountBytes = 16;
  int64_t rows = 0;
  size_t state_bytes = 0, output_bytes = 0;

  PrefillRoom(const DeviceInfo& device, const AttentionShape& shape, const Attention& options) {
    constexpr int fewest_keys = 32;  // of a tile
    const PrefillCuts cuts(device, options, PrefillCuts::kOnEach, fewest_keys);
    const int64_t of_one = int64_t(cuts.twice) * most_rows(greater(shape.dim, shape.value_dim()));
    if (cuts.most() == 1 || (cuts.fixed == 0 && shape.q_offsets == nullptr && shape.q_len * shape.heads > of_one)) return;
    rows = shape.total_queries() * shape.heads * cuts.most();
    if (cuts.fixed == 0) rows = lesser(rows, shape.batch * of_one);
    state_bytes = size_t(rows) * sizeof(PrefillParts::Row), output_bytes = size_t(rows) * size_t(shape.value_dim()) * sizeof(float);
  }
  size_t bytes() const { return kCountBytes + state_bytes + output_bytes; }
};

// How rows are shared out: tiles of a sequence's rows, those with the most keys first; parts of the output's columns; parts of the keys; heads;
// sequences. Sequences of one length all have the same tiles. Others have as many as they need: a block looks for the sequence that a tile
// belongs to in their sums, and the host, which does not know the lengths, launches as many blocks as there can be.
struct PrefillGrid {
  FastDivision tiles, parts, heads, pack, group;
  int64_t tiles_in_all;  // 0: too many
  unsigned each = 1;     // how many of them a block takes, one behind the other
  unsigned at_once;      // how many blocks run at the same time
  PrefillCuts cuts;

  // splits: whether keys may be split.
  template <class Body>
  static PrefillGrid of(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool splits) {
    static_assert(Body::kRows <= PrefillRoom::most_rows(Body::kDim) && Body::kOnEach <= PrefillCuts::kOnEach, "what the workspace has room for");
    PrefillGrid grid(shape, PrefillCuts(device, options, Body::kOnEach, Body::kKeys), splits, Body::kRows, Body::kCols, packed(shape.q_len, shape.group(), Body::kRows));
    if (!splits && shape.q_offsets == nullptr) grid.each = Body::tiles_each(grid);
    return grid;
  }
  int64_t blocks() const { return (tiles_in_all + each - 1) / each; }

  // Of the longest sequence.
  int most_splits() const { return cuts.most_of(tiles.divisor * parts.divisor * heads.divisor); }

  // By all threads of a block; with a barrier, or ahead of one. `kept` is for those that ask again.
  template <class Body, class P>
  __device__ __forceinline__ PrefillRows rows(const P& p, PrefillRows& kept) const {
    if (even(p)) {
      const PrefillRows r = even_rows(p, Body::kRows, blockIdx.x);
      if (threadIdx.x == 0) kept = r;
      return r;
    }
    if (blockIdx.x == 0 && threadIdx.x / 32 == 1) count_rows<Body>(p);
    if (threadIdx.x < 32) search<Body>(p, blockIdx.x, kept);
    __syncthreads();
    return same_in_lanes(kept);
  }
  // Whether all sequences have the same blocks.
  template <class P>
  static __device__ __forceinline__ bool even(const P& p) { return !P::kSplits && p.shape.q_offsets == nullptr; }

  template <class P>
  __device__ __forceinline__ PrefillRows even_rows(const P& p, int each, unsigned block) const {
    unsigned tile = block, part = tiles(tile), head = parts(part), b = heads(head);
    PrefillRows r = of_sequence(p, int(b));
    r.pack = pack;
    place(r, each, tiles.divisor, tile, part, head);
    return r;
  }

  // By a warp, the rows of a tile. Each lane sums up some sequences, and one finds the tile's among its own.
  template <class Body, class P>
  __device__ __forceinline__ void search(const P& p, unsigned wanted, PrefillRows& found) const {
    constexpr unsigned all = 0xffffffffu;
    const int lane = threadIdx.x % 32, each = int((p.shape.batch + 31) / 32);
    const int64_t begin = int64_t(lane) * each, end = lesser(begin + each, p.shape.batch);
    unsigned sum = 0;
    int left_sum = 0;
    KERNELS_ROLLED
    for (int64_t b = begin; b < end; ++b) {
      const Share s = share<Body>(p, int(b));
      sum += s.blocks, left_sum += s.left;
    }
    unsigned up_to = sum;
    int left = left_sum;
    KERNELS_ROLLED
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned other = __shfl_up_sync(all, up_to, distance);
      const int other_left = P::kSplits ? __shfl_up_sync(all, left, distance) : 0;
      if (lane >= distance) up_to += other, left += other_left;
    }
    const int owner = __ffs(int(__ballot_sync(all, wanted < up_to))) - 1;
    if (lane == greater(0, owner)) {
      if (owner < 0) {
        found.count = 0;
      } else {
        unsigned block = wanted - (up_to - sum);
        left -= left_sum;
        int b = int(begin);
        Share s = share<Body>(p, b);
        KERNELS_ROLLED
        for (; block >= s.blocks; s = share<Body>(p, ++b)) block -= s.blocks, left += s.left;
        found = rows_in<Body>(p, s, b, block, left);
      }
    }
  }
  // By a warp: how many rows all blocks leave.
  template <class Body, class P>
  __device__ __forceinline__ void count_rows(const P& p) const {
    if constexpr (P::kSplits) {
      int rows = 0;
      for (int64_t b = threadIdx.x % 32; b < p.shape.batch; b += 32) rows += share<Body>(p, int(b)).left;
      rows = __reduce_add_sync(0xffffffffu, rows);
      if (threadIdx.x % 32 == 0) *p.parts.count = rows;
    }
  }

 private:
  static int64_t tiles_of(int64_t rows, int64_t each) { return (rows + each - 1) / each; }
  // Tiles of the heads that share keys, if they go together; so many that they do not if a row's number could be too large.
  static KERNELS_HD int64_t packed_tiles(int64_t queries, int64_t group, unsigned each) {
    const int64_t rows = queries * group;
    return rows > (int64_t(1) << 30) ? int64_t(~uint64_t(0) >> 1) : int64_t((unsigned(rows) + each - 1) / each);
  }
  // They go together where that takes fewer tiles.
  static bool packed(int64_t queries, int64_t group, int each) { return packed_tiles(queries, group, unsigned(each)) < tiles_of(queries, each) * group; }

  PrefillGrid(const AttentionShape& shape, const PrefillCuts& how, bool splits, int each, int cols, bool together)
      : tiles(tiles_of(shape.q_len * (together ? shape.group() : 1), each)), parts(tiles_of(shape.value_dim(), cols)), heads(together ? shape.kv_heads : shape.heads),
        pack(together ? shape.group() : 1), group(shape.group()), at_once(unsigned(how.once)), cuts(how) {
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    const int64_t of_head = int64_t(tiles.divisor) * parts.divisor;  // below 2^34
    int64_t& blocks = tiles_in_all;
    blocks = of_head > limit / heads.divisor || of_head * heads.divisor > limit / shape.batch ? 0 : of_head * heads.divisor * shape.batch;
    if (blocks == 0) return;
    const unsigned longest = unsigned(of_head * heads.divisor);
    // With q_offsets each tile but one of a sequence is full.
    if (shape.q_offsets != nullptr) blocks = lesser(blocks, (shape.total_queries() * shape.group() / each + shape.batch) * shape.kv_heads * parts.divisor);
    if (!splits) return;
    const bool known = shape.q_offsets == nullptr || cuts.fixed > 0;
    const int64_t more = blocks * (known ? cuts.most_of(longest) : cuts.most());
    blocks = known ? more : lesser(more, blocks + shape.batch * cuts.twice);
    if (blocks > limit) blocks = 0;
  }

  template <class P>
  static __device__ __forceinline__ PrefillRows of_sequence(const P& p, int b) {
    PrefillRows r{};
    r.b = b;
    r.token = p.shape.first_query(b);
    r.queries = int(p.shape.queries(b));
    r.keys = int(p.kv.length(b));
    r.splits = 1;
    return r;
  }
  // Tile `tile` from the end, of so many.
  __device__ __forceinline__ void place(PrefillRows& r, int each, unsigned tiles_there, unsigned tile, unsigned part, unsigned head) const {
    r.first = int(tiles_there - 1 - tile) * each;
    r.part = int(part);
    r.first_head = int(head * r.pack.divisor);
    unsigned first_head = unsigned(r.first_head);
    r.kv_head = int(group(first_head));
    r.count = greater(0, lesser(each, r.queries * int(r.pack.divisor) - r.first));
  }

  // What a sequence needs, and how many rows its blocks leave.
  struct Share {
    unsigned tiles, blocks;
    int left, splits, first_key_tile, key_tiles;
    bool together;
  };
  template <class Body, class P>
  __device__ __forceinline__ Share share(const P& p, int b) const {
    constexpr unsigned each = Body::kRows;
    Share s{};
    const unsigned queries = unsigned(p.shape.queries(b));
    s.tiles = queries / each + (queries % each > 0);
    const int64_t together = packed_tiles(queries, group.divisor, each);
    s.together = together < int64_t(s.tiles) * group.divisor;
    if (s.together) s.tiles = unsigned(together);
    s.blocks = s.tiles * unsigned(s.together ? p.shape.kv_heads : p.shape.heads) * parts.divisor;
    s.splits = 1;
    if constexpr (P::kSplits) {
      if (queries == 0) return s;
      const int64_t keys = p.kv.length(b);
      const KeyRange seen = key_range(p.score, {b, 0, queries - 1, queries, keys});
      s.first_key_tile = int(unsigned(lesser(seen.begin, keys)) / Body::kKeys);
      s.key_tiles = int(unsigned(lesser(seen.end, keys) + Body::kKeys - 1) / Body::kKeys) - s.first_key_tile;
      s.splits = cuts.of(s.blocks, s.key_tiles, queries * group.divisor);
      s.blocks *= unsigned(s.splits);
      if (s.splits > 1) s.left = s.splits * int(queries) * int(p.shape.heads);
    }
    return s;
  }

  // Of block `block` of a sequence, whose first row left is row `left`.
  template <class Body, class P>
  __device__ __forceinline__ PrefillRows rows_in(const P& p, const Share& s, int b, unsigned block, int left) const {
    PrefillRows r = of_sequence(p, b);
    r.pack = group;
    if (!s.together) r.pack.divisor = 1;
    unsigned part = block / s.tiles;
    const unsigned tile = block - part * s.tiles;
    unsigned head = parts(part);
    if constexpr (P::kSplits) {
      r.splits = s.splits, r.split = int(head % unsigned(s.splits)), head /= unsigned(s.splits);
      const auto cut = [&](int i) { return int(s.first_key_tile + int64_t(s.key_tiles) * i / s.splits); };
      r.key_begin = cut(r.split) * Body::kKeys, r.key_end = int(lesser<int64_t>(int64_t(cut(r.split + 1)) * Body::kKeys, r.keys));
    }
    place(r, Body::kRows, s.tiles, tile, part, head);
    if constexpr (P::kSplits) r.left_first = left + r.split * r.queries * int(p.shape.heads) + int(head) * r.queries * int(r.pack.divisor) + r.first;
    return r;
  }
};

// Whether the block has a part of the keys alone.
template <class P>
__device__ __forceinline__ bool leaves_part(const PrefillRows& rows) {
  if constexpr (P::kSplits) return rows.splits > 1;
  else return false;
}
// What the merge has to know of a row of a part.
template <class P>
__device__ __forceinline__ void leave_state(const P& p, const PrefillRows& rows, int row, float logsumexp) {
  if constexpr (P::kSplits) {
    const auto place = rows.place(row);
    p.parts.rows[rows.left_first + row] = {int32_t(rows.token + place.query), uint16_t(place.head), uint16_t(rows.split == 0 ? rows.splits : 0), rows.queries * int(p.shape.heads), logsumexp};
  }
}
// Its outputs, from a column of the head on.
template <int N, class P>
__device__ __forceinline__ void leave_outputs(const P& p, const PrefillRows& rows, int row, const Pack<float, N>& outputs, int64_t col) {
  if constexpr (P::kSplits) put_floats(p.parts.outputs + (int64_t(rows.left_first) + row) * p.shape.value_dim() + col, outputs);
}

// Keys that all of some rows see, and keys that any of them see; both are empty where the end is not behind the beginning.
struct SeenKeys {
  int all_begin, all_end, any_begin, any_end;
};
// Keys [begin, end) that a row sees; none if it is not there.
struct RowKeys {
  int begin, end;
};
template <class P>
__device__ __forceinline__ RowKeys keys_seen(const P& p, const PrefillRows& rows, int row) {
  if (row >= rows.count) return {0, 0};  // there is no such query
  const KeyRange seen = key_range(p.score, rows.at(rows.place(row).query));
  int begin = int(lesser<int64_t>(seen.begin, rows.keys)), end = int(lesser<int64_t>(seen.end, rows.keys));
  if constexpr (P::kSplits) begin = greater(begin, rows.key_begin), end = greater(begin, lesser(end, rows.key_end));
  return {begin, end};
}
__device__ __forceinline__ SeenKeys seen_by(const PrefillRows& rows, int row, const RowKeys& seen) {
  constexpr int most = 0x7fffffff;
  const int begin = seen.begin, end = seen.end;
  if (row >= rows.count) return {0, most, most, 0};
  return begin < end ? SeenKeys{begin, end, begin, end} : SeenKeys{begin, end, most, 0};
}
__device__ __forceinline__ SeenKeys join(const SeenKeys& a, const SeenKeys& b) {
  return {greater(a.all_begin, b.all_begin), lesser(a.all_end, b.all_end), lesser(a.any_begin, b.any_begin), greater(a.any_end, b.any_end)};
}
// That of all lanes.
__device__ __forceinline__ SeenKeys join_lanes(const SeenKeys& seen) {
  constexpr unsigned all = 0xffffffffu;
  return {__reduce_max_sync(all, seen.all_begin), __reduce_min_sync(all, seen.all_end), __reduce_min_sync(all, seen.any_begin), __reduce_max_sync(all, seen.any_end)};
}

// ---- tiles in shared memory ----------------------------------------------------------------------------------------

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

// ---- the softmax ---------------------------------------------------------------------------------------------------

constexpr float kSmallScale = 1e-30f;  // not above it, products are scaled before they are compared

// What a warp holds, from kFirstWarp of the block on: kTiles of 16 rows. Lane 4g + t has, of tile i, rows g and g + 8; of 8 columns of
// logits or of the output columns 2t and 2t + 1.
template <class P, class TV, int kTiles, int kKeys, int kCols, int kFirstWarp = 0>
struct PrefillWork {
  using S = typename P::S;
  using Value = ValueRun<typename P::Kv>;
  float logits[kTiles][kKeys / 8][4], outputs[kTiles][kCols / 8][4] = {};
  uint32_t weights[kTiles][kKeys / 16][4];
  // The largest logit so far, times log2(e), and the lane's part of the sum of exponentials under it.
  float largest[kTiles][2], sums[kTiles][2] = {};

  __device__ __forceinline__ PrefillWork() {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) largest[i][0] = largest[i][1] = -infinity<float>();
  }

  static __device__ __forceinline__ int first_row() { return (int(threadIdx.x / 32) - kFirstWarp) * (kTiles * 16); }
  static __device__ __forceinline__ int row(int i, int half) { return first_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4; }

  // What logits are to be multiplied by, and, if any of the warp's rows has a larger one than before, the outputs so far.
  struct Look {
    float factor, shrink[kTiles][2];
    bool raised;
  };

  // Logits become weights.
  template <bool kFull>
  __device__ __forceinline__ void weigh(const P& p, const PrefillRows& rows, const RowKeys* row_keys, int pos, bool whole, const float* scales) {
    const Look look = look_at<kFull>(p, rows, row_keys, pos, whole);
    shrink_outputs(look);
    make_exponentials(look);
    round_weights(scales);
  }

  // Logits are scored and masked, and the sums so far are brought under the largest. `whole`: the rows see all keys of the tile.
  template <bool kFull>
  __device__ __forceinline__ Look look_at(const P& p, const PrefillRows& rows, const RowKeys* row_keys, int pos, bool whole) {
    const int lane = threadIdx.x % 32;
    Look look{p.scale * kLog2e, {}, false};
    float& factor = look.factor;
    if constexpr (score_transforms<S> || score_masks<S>) {
      factor = kLog2e;
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const RowKeys seen = seen_of(row_keys, row(i, half), pos);
          const auto place = rows.place(row(i, half));
          ScoreAt at{rows.b, place.head, place.query, 0, rows.queries, rows.keys};
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 8; ++j) {
            KERNELS_UNROLL
            for (int x = 0; x < 2; ++x) {
              float& logit = logits[i][j][half * 2 + x];
              const int key = j * 8 + lane % 4 * 2 + x;
              at.key = int64_t(pos) + key;
              float scored = -infinity<float>();
              if (key >= seen.begin && key < seen.end) {
                if (key_visible(p.score, at)) scored = transform_logits(p.score, Pack<float, 1>{{logit * p.scale}}, at).v[0];
              }
              logit = scored;
            }
          }
        }
      }
    } else {
      // The largest logit is not that of the largest product.
      if (!kFull && !(p.scale > kSmallScale)) {
        each([&](int, int, int, float& logit) { logit *= p.scale; });
        factor = kLog2e;
      }
      if (!whole) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          KERNELS_UNROLL
          for (int half = 0; half < 2; ++half) {
            const RowKeys seen = seen_of(row_keys, row(i, half), pos);
            KERNELS_UNROLL
            for (int j = 0; j < kKeys / 8; ++j) {
              KERNELS_UNROLL
              for (int x = 0; x < 2; ++x) {
                const int key = j * 8 + lane % 4 * 2 + x;
                if (key < seen.begin || key >= seen.end) logits[i][j][half * 2 + x] = -infinity<float>();
              }
            }
          }
        }
      }
    }

    float before[kTiles][2];
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        float most = logits[i][0][half * 2];
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) most = greater(most, greater(logits[i][j][half * 2], logits[i][j][half * 2 + 1]));
        most = greater(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = greater(most, __shfl_xor_sync(0xffffffffu, most, 2));
        before[i][half] = largest[i][half];
        largest[i][half] = greater(largest[i][half], most * factor);
        look.raised = look.raised || largest[i][half] != before[i][half];
      }
    }
    // Most tiles have no larger logit than those before. (To shrink only by much would spare more, but then a row's largest weight is not 1,
    // which 16 bits have exactly.)
    look.raised = __any_sync(0xffffffffu, look.raised);
    if (look.raised) {
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          look.shrink[i][half] = arch::exp2_flushed(before[i][half] - reference(i, half));
          sums[i][half] = __fmul_rn(sums[i][half], look.shrink[i][half]);  // never fused with what is added next: the same bits in full tiles and in others
        }
      }
    }
    return look;
  }

  __device__ __forceinline__ void shrink_outputs(const Look& look) {
    if (!look.raised) return;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kCols / 8; ++j) {
        KERNELS_UNROLL
        for (int x = 0; x < 4; ++x) outputs[i][j][x] *= look.shrink[i][x / 2];
      }
    }
  }

  // Logits become exponentials, which are summed up.
  __device__ __forceinline__ void make_exponentials(const Look& look) {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float from = reference(i, half);
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) {
          KERNELS_UNROLL
          for (int x = 0; x < 2; ++x) {
            float& logit = logits[i][j][half * 2 + x];
            logit = arch::exp2_flushed(fma(logit, look.factor, -from));
            sums[i][half] += logit;
          }
        }
      }
    }
  }

  // Exponentials, times the scales of values, become operands of the product with these.
  __device__ __forceinline__ void round_weights(const float* scales) {
    const int lane = threadIdx.x % 32;
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          float w[2];
          KERNELS_UNROLL
          for (int x = 0; x < 2; ++x) {
            w[x] = logits[i][j][half * 2 + x];
            if constexpr (Value::scaled) w[x] *= scales[j * 8 + lane % 4 * 2 + x];
          }
          weights[i][j / 2][j % 2 * 2 + half] = rounded_pair<TV>(w[0], w[1]);
        }
      }
    }
  }

  // What a row's outputs are to be multiplied with, behind its last key; its logsumexp is written.
  __device__ __forceinline__ float finish_row(const P& p, const PrefillRows& rows, int i, int half) const {
    float sum = sums[i][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    SoftmaxState<float> state{largest[i][half] * kLn2, sum};
    const int r = row(i, half);
    if (leaves_part<P>(rows)) {
      if (threadIdx.x % 4 == 0 && r < rows.count && rows.part == 0) leave_state(p, rows, r, state.logsumexp());
      return state.inverse();
    }
    float inverse = 1.f;
    if constexpr (score_sinks<S>) {
      if (r < rows.count) inverse = state.merge(sink_state(p.score, rows.place(r).head)).mine;
    }
    inverse *= state.inverse();
    if (p.options.writes_lse() && threadIdx.x % 4 == 0 && r < rows.count && rows.part == 0) {
      const auto place = rows.place(r);
      p.options.write_lse(state.logsumexp(), rows.token + place.query, place.head, p.shape.heads);
    }
    return inverse;
  }
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    KERNELS_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      KERNELS_UNROLL
      for (int j = 0; j < kKeys / 8; ++j) {
        KERNELS_UNROLL
        for (int x = 0; x < 4; ++x) f(i, j, x, logits[i][j][x]);
      }
    }
  }

 private:
  // Of the tile at `pos`.
  static __device__ __forceinline__ RowKeys seen_of(const RowKeys* row_keys, int row, int pos) { return {row_keys[row].begin - pos, row_keys[row].end - pos}; }
  __device__ __forceinline__ float reference(int i, int half) const { return largest[i][half] == -infinity<float>() ? 0.f : largest[i][half]; }
};

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Whether there is a kernel for sm_90a (prefill_hopper.cuh): for operands that are copied, and heads of this size.
template <class P, int kDim>
constexpr bool has_hopper_prefill = kDim <= 256 && !KeyRun<typename P::Kv>::scaled && !ValueRun<typename P::Kv>::scaled &&
                                    lies_as<typename KeyRun<typename P::Kv>::Codes, key_meeting_type<typename P::Q, typename P::Kv>> &&
                                    lies_as<typename ValueRun<typename P::Kv>::Codes, value_meeting_type<typename P::Q, typename P::Kv>>;

// kTiles: of 16 rows, of a warp. kDim, kCols: columns of queries and keys, and of values, at most. kStages: 2 if the next keys and
// values have room beside those that are worked on. kReplaced: code for sm_90a has other kernels for all calls, if it has one of its own.
template <class P, int kWarps, int kTiles, int kKeys_, int kDim_, int kCols_, int kStages, int kRegisters,
          bool kReplaced = false>
struct PrefillBody {
  using Kv = typename P::Kv;
  using S = typename P::S;
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  using TK = key_meeting_type<typename P::Q, Kv>;
  using TV = value_meeting_type<typename P::Q, Kv>;
  static constexpr int kThreads = kWarps * 32, kRows = kWarps * kTiles * 16, kKeys = kKeys_, kDim = kDim_, kCols = kCols_, kResultPack = 8, kOnEach = 2;
  static constexpr int max_threads = kThreads, registers = kRegisters;
  static constexpr bool kParted = kCols < kDim;  // whether there may be several parts of the output's columns
  using Queries = TileLayout<kDim, kThreads>;
  using Keys = KvTiles<TK, Key, in_one_run<Kv>, kKeys, kDim, kThreads>;
  using Values = KvTiles<TV, Value, in_one_run<Kv>, kKeys, kCols, kThreads>;
  static constexpr int kStageBytes = Keys::kBytes + Values::kBytes, kQueryBytes = kRows * Queries::kRowBytes;
  static constexpr int kScaleBytes = Key::scaled || Value::scaled ? 2 * kKeys * 4 : 0;
  static constexpr int kPitch = kCols + 8;  // floats in a row of results on their way to the sink
  static constexpr int kTileBytes = kQueryBytes + kStages * (kStageBytes + kScaleBytes), kResultBytes = kRows * kPitch * 4;
  static constexpr int kSharedBytes = kTileBytes > kResultBytes ? kTileBytes : kResultBytes;  // results take the place of the tiles
  static_assert(kSharedBytes + kRows * 8 + kWarps * 16 + int(sizeof(PrefillRows)) <= 99 * 1024, "what a block of sm_86 can have");
  // Full tiles, of which every row sees every key, have code of their own, without branches, in which the compiler finds more to do
  // at the same time: 5 to 10 % faster. Fewer of them than this are not worth fetching it; with 64 columns 3 cost a sixth (causal, 512 keys).
  // H200, bench_prefill. Code for sm_90a has none where heads of the full size are the other kernel's.
  static constexpr bool kFullSteps = Keys::copied && Values::copied && !(arch::kWarpgroupMma && kDim == kCols && has_hopper_prefill<P, kDim>);
  static constexpr int kFewestFull = kDim == 64 ? 8 : 1;
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }
  static unsigned tiles_each(const PrefillGrid&) { return 1; }

  struct Params {
    P problem;
    PrefillGrid grid;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    if constexpr (!(kReplaced && arch::kWarpgroupMma && has_hopper_prefill<P, kDim>)) attend(params);
  }

 private:
  static __device__ __forceinline__ void attend(const Params& params) {
    extern __shared__ __align__(128) unsigned char tiles_memory[];
    __shared__ SeenKeys seen_by_warps[kWarps];
    __shared__ RowKeys row_keys[kRows];
    __shared__ PrefillRows kept;
    const P& p = params.problem;
    PrefillRows rows = params.grid.template rows<PrefillBody>(p, kept);
    if (rows.count == 0) return;
    if (!kParted) rows.part = 0;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = int(p.shape.dim);
    const int cols = int(lesser<int64_t>(kCols, p.shape.value_dim() - rows.part * kCols));

    bring_queries<TK, kRows, Queries>(p, rows, 0, tiles_memory, dim);

    // Which keys the block's rows see, and the warp's.
    const int mine = warp * kTiles * 16 + lane % (kTiles * 16);
    row_keys[mine] = keys_seen(p, rows, mine);
    const SeenKeys seen = join_lanes(seen_by(rows, mine, row_keys[mine]));
    if (lane == 0) seen_by_warps[warp] = seen;

    unsigned char* const stages = tiles_memory + kQueryBytes;
    KERNELS_ROLLED
    for (int stage = 0; stage < kStages; ++stage) {
      Keys::Layout::clear_behind(stages + stage * kStageBytes, kKeys, dim);
      Values::Layout::clear_behind(stages + stage * kStageBytes + Keys::kBytes, kKeys, cols);
    }
    __syncthreads();
    SeenKeys all = seen_by_warps[0];
    KERNELS_UNROLL
    for (int i = 1; i < kWarps; ++i) all = join(all, seen_by_warps[i]);
    const int end = all.any_end, low = lesser(all.any_begin, end), begin = low / kKeys * kKeys;
    const auto tiles_in = [](int keys, int up) { return int(unsigned(keys + unsigned(up)) / kKeys); };
    const int tiles = tiles_in(end - begin, kKeys - 1);
    // Tiles that the warp has something to do in, and those in which its rows see all keys.
    const auto tile_of = [&](int key, int up) { return tiles_in(greater(begin, lesser(key, end)) - begin, up); };
    const int first = tile_of(seen.any_begin, 0), last = seen.any_begin < seen.any_end ? tile_of(seen.any_end, kKeys - 1) : 0;
    const int first_whole = tile_of(seen.all_begin, kKeys - 1), last_whole = tile_of(seen.all_end, 0);

    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    Keys keys(key_at, begin, 0, dim, p.wide_keys);
    Values values(value_at, begin, rows.part * kCols, cols, p.wide_values);
    const void* addresses[Keys::kFound] = {};
    // Where the rows of the tile from `pos` on are.
    const auto find = [&](int pos) {
      if constexpr (!in_one_run<Kv> && (Keys::copied || Values::copied)) {
        if (unsigned(pos) >= unsigned(end) || lane % 16 >= Keys::kWarpRows) return;  // behind 2^31 - 1 as well
        KERNELS_UNROLL
        for (int j = 0; j < Keys::kFound; ++j) {
          const int at = greater(low, pos + lesser(Keys::tile_row(lane % 16 + j * 16), end - 1 - pos));
          addresses[j] = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
        }
      }
    };
    const auto scales_of = [&](int stage) { return reinterpret_cast<float*>(stages + kStages * kStageBytes + stage * kScaleBytes); };
    const auto has_key = [&](int pos, int row) { return row >= low - pos && row < end - pos; };
    const auto bring_keys = [&](int tile, int stage, auto full) {
      const int pos = begin + tile * kKeys;
      if constexpr (Key::scaled) {
        if (threadIdx.x < kKeys) scales_of(stage)[threadIdx.x] = has_key(pos, threadIdx.x) ? key_at(pos + threadIdx.x).scale(0) : 0.f;
      }
      keys.template bring<decltype(full)::value>(stages + stage * kStageBytes, key_at, pos, low - pos, end - pos, addresses, 0);
    };
    const auto bring_values = [&](int tile, int stage, auto full) {
      const int pos = begin + tile * kKeys;
      if constexpr (Value::scaled) {
        if (threadIdx.x < kKeys) scales_of(stage)[kKeys + threadIdx.x] = has_key(pos, threadIdx.x) ? value_at(pos + threadIdx.x).scale(0) : 0.f;
      }
      values.template bring<decltype(full)::value>(stages + stage * kStageBytes + Keys::kBytes, value_at, pos, low - pos, end - pos, addresses, 1);
    };

    Work work;
    find(begin);
    // full: all of the block's rows see all keys of the tile, and it and the next have all their keys, so that there is nothing to test.
    const auto step = [&](int tile, auto full) {
      constexpr bool kFull = decltype(full)::value;
      const int stage = kStages == 2 ? tile & 1 : 0;
      const unsigned char* const at = stages + stage * kStageBytes;
      const bool busy = kFull || (tile >= first && tile < last), whole = kFull || (tile >= first_whole && tile < last_whole);
      const bool more = kFull || tile + 1 < tiles;
      arch::copy_async_wait<0>();
      __syncthreads();
      if constexpr (kStages == 2) {
        if (more) {
          bring_keys(tile + 1, stage ^ 1, full);
          bring_values(tile + 1, stage ^ 1, full);
          find(begin + (tile + 2) * kKeys);
        }
        arch::copy_async_commit();
        if (busy) work.template multiply_keys<kFull>(tiles_memory, at, dim, scales_of(stage));
      } else {
        if (kFull || tile >= 0) {
          bring_values(tile, 0, full);
          find(begin + (tile + 1) * kKeys);
        }
        arch::copy_async_commit();
        if (busy) work.template multiply_keys<kFull>(tiles_memory, at, dim, scales_of(0));
        arch::copy_async_wait<0>();
        __syncthreads();
        if (more) bring_keys(tile + 1, 0, full);
        arch::copy_async_commit();
      }
      if (kStages == 1 && !kFull && tile < 0) prefetch_next_queries(params, dim);
      if (busy) {
        work.template weigh<kFull>(p, rows, row_keys, begin + tile * kKeys, whole, scales_of(stage) + kKeys);
        work.template add_values<kFull>(at + Keys::kBytes, cols);
      }
    };
    int first_full = 0, last_full = 0;
    if constexpr (kFullSteps) {
      if (keys.full() && values.full() && p.scale > kSmallScale) {
        first_full = tile_of(all.all_begin, kKeys - 1), last_full = lesser(tile_of(all.all_end, 0), (end - begin) / kKeys - 1);
        if (last_full - first_full < kFewestFull) last_full = 0;
      }
    }
    // Tile -1 is there to bring the first: code that is not in the cache takes longer than what it does.
#pragma unroll 1
    for (int tile = -1; tile < tiles; ++tile) {
      if constexpr (kFullSteps) {
        if (tile >= first_full && tile < last_full) {
          step(tile, std::true_type{});
          continue;
        }
      }
      step(tile, std::false_type{});
    }
    arch::copy_async_wait<0>();
    __syncthreads();
    rows = same_in_lanes(kept);  // which took no registers until here
    if (!kParted) rows.part = 0;
    work.finish(p, rows, reinterpret_cast<float*>(tiles_memory) + warp * (kTiles * 16) * kPitch, cols);
  }

  // Asks the L2 for queries of the block that follows when this one ends: blocks begin at the same time, and all would wait for theirs.
  // With 256 columns and 512 keys 3 % faster; where both stages have room it costs more than it gains. H200, bench_prefill.
  static __device__ __forceinline__ void prefetch_next_queries(const Params& params, int dim) {
    if constexpr (lies_as<typename P::Q, TK>) {
      const P& p = params.problem;
      if (!params.grid.even(p) || blockIdx.x + params.grid.at_once >= gridDim.x) return;
      const PrefillRows rows = params.grid.even_rows(p, kRows, blockIdx.x + params.grid.at_once);
      const int lines = dim / 64;
#pragma unroll 1
      for (int x = threadIdx.x; x < rows.count * lines; x += kThreads) {
        const auto place = rows.place(x / lines);
        arch::prefetch_l2(p.q.at(rows.token + place.query, place.head * dim + x % lines * 64));
      }
    }
  }

  // A warp's rows, in the fragments of mma.sync.
  struct Work : PrefillWork<P, TV, kTiles, kKeys, kCols> {
    using Base = PrefillWork<P, TV, kTiles, kKeys, kCols>;
    using Base::each, Base::finish_row, Base::first_row, Base::logits, Base::outputs, Base::row, Base::weights;

    static __device__ __forceinline__ uint32_t query_address(const unsigned char* queries) {
      const int lane = threadIdx.x % 32;
      return arch::shared_address(queries) + Queries::place(first_row() + lane % 16, lane / 16);
    }
    template <bool kFull>
    __device__ __forceinline__ void multiply_keys(const unsigned char* from, const unsigned char* keys, int dim, const float* scales) {
      const int lane = threadIdx.x % 32;
      const uint32_t q = query_address(from), k = arch::shared_address(keys) + Keys::Layout::place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) logits[i][j][0] = logits[i][j][1] = logits[i][j][2] = logits[i][j][3] = 0.f;
      }
      const auto load_queries = [&](uint32_t (&a)[kTiles][4], int run, int step) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) arch::load_matrix_x4(a[i], (q ^ (step * 32)) + run * 128 + i * (16 * Queries::kRowBytes));
      };
      const auto load_keys = [&](uint32_t (&b)[4], int run, int step, int j) {
        arch::load_matrix_x4(b, (k ^ (step * 32)) + run * 128 + j * (16 * Keys::Layout::kRowBytes));
      };
      const auto multiply = [&](const uint32_t (&a)[kTiles][4], const uint32_t (&b)[4], int j) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          arch::mma_16816<TK>(logits[i][2 * j], a[i], {b[0], b[1]});
          arch::mma_16816<TK>(logits[i][2 * j + 1], a[i], {b[2], b[3]});
        }
      };
      if constexpr (kDim <= 128) {
        KERNELS_UNROLL
        for (int i = 0; i < kDim / 16; ++i) {
          uint32_t a[kTiles][4];
          load_queries(a, i / 4, i % 4);
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 16; ++j) {
            uint32_t b[4];
            load_keys(b, i / 4, i % 4, j);
            multiply(a, b, j);
          }
        }
      } else {
        // As many runs as there are; what is multiplied next is read before.
        uint32_t a[2][kTiles][4], b[2][kKeys / 16][4];
        const auto load = [&](int buffer, int run, int step) {
          load_queries(a[buffer], run, step);
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 16; ++j) load_keys(b[buffer][j], run, step, j);
        };
        const auto multiply_run = [&](int run, int runs) {
          KERNELS_UNROLL
          for (int step = 0; step < 4; ++step) {
            const int next = step < 3 ? run : lesser(run + 1, runs - 1);
            if (!kFull || step < 3 || next != run) load((step + 1) % 2, next, (step + 1) % 4);
            KERNELS_UNROLL
            for (int j = 0; j < kKeys / 16; ++j) multiply(a[step % 2], b[step % 2][j], j);
          }
        };
        load(0, 0, 0);
        if constexpr (kFull) {
          KERNELS_UNROLL
          for (int run = 0; run < kDim / 64; ++run) multiply_run(run, kDim / 64);
        } else {
          const int runs = (dim + 63) / 64;
#pragma unroll 1
          for (int run = 0; run < runs; ++run) multiply_run(run, runs);
        }
      }
      if constexpr (Key::scaled) {
        each([&](int i, int j, int x, float& logit) { logit *= scales[j * 8 + lane % 4 * 2 + x % 2]; });
      }
    }

    template <bool kFull>
    __device__ __forceinline__ void add_values(const unsigned char* values, int cols) {
      const int lane = threadIdx.x % 32;
      const uint32_t v = arch::shared_address(values) + Values::Layout::place(lane % 16, lane / 16);
      constexpr int kSteps = kKeys / 16;
      const auto load = [&](uint32_t (&b)[4], int run, int k, int j) {
        arch::load_matrix_x4_turned(b, (v ^ (j * 32)) + run * 128 + k * (16 * Values::Layout::kRowBytes));
      };
      const auto multiply = [&](const uint32_t (&b)[4], int run, int k, int j) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          arch::mma_16816<TV>(outputs[i][run * 8 + 2 * j], weights[i][k], {b[0], b[1]});
          arch::mma_16816<TV>(outputs[i][run * 8 + 2 * j + 1], weights[i][k], {b[2], b[3]});
        }
      };
      if constexpr (kCols <= 128) {
        KERNELS_UNROLL
        for (int i = 0; i < kCols / 64 * kSteps * 4; ++i) {
          uint32_t b[4];
          load(b, i / 4 / kSteps, i / 4 % kSteps, i % 4);
          multiply(b, i / 4 / kSteps, i / 4 % kSteps, i % 4);
        }
      } else {
        uint32_t b[2][4][4];
        KERNELS_UNROLL
        for (int j = 0; j < 4; ++j) load(b[0][j], 0, 0, j);
        KERNELS_UNROLL
        for (int run = 0; run < kCols / 64; ++run) {
          if (!kFull && run * 64 >= cols) break;
          KERNELS_UNROLL
          for (int k = 0; k < kSteps; ++k) {
            const int next = run * kSteps + k + 1;
            KERNELS_UNROLL
            for (int j = 0; j < 4; ++j) {
              if (next < kCols / 64 * kSteps) load(b[next % 2][j], next / kSteps, next % kSteps, j);
            }
            KERNELS_UNROLL
            for (int j = 0; j < 4; ++j) multiply(b[(next - 1) % 2][j], run, k, j);
          }
        }
      }
    }

    // To the sink by way of shared memory, so that whole rows are written. slab: the warp's.
    __device__ __forceinline__ void finish(const P& p, const PrefillRows& rows, float* slab, int cols) {
      const int lane = threadIdx.x % 32;
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float inverse = finish_row(p, rows, i, half);
          float* const to = slab + (i * 16 + half * 8 + lane / 4) * kPitch + lane % 2 * 2;
          KERNELS_UNROLL
          for (int j = 0; j < kCols / 8; ++j) *reinterpret_cast<::float2*>(to + j * 8 + half_of(lane / 4, j, lane / 2 % 2)) = {outputs[i][j][half * 2] * inverse, outputs[i][j][half * 2 + 1] * inverse};
        }
      }
      __syncwarp();
      if (p.out_pack == 8 && cols == kCols) put_rows<true>(p, rows, slab, cols, 8);
      else put_rows<false>(p, rows, slab, cols, p.out_pack);
    }
    // Where in 8 columns of a slab half of them stand: what eight lanes read at the same time lies in different banks.
    static __device__ __forceinline__ int half_of(int row, int pack, int half) { return ((row + pack / 4) % 2 ^ half) * 4; }
    // Some packs of a row to each lane. most: the widest that the sink takes. kWhole: that is 8, and there are as many columns as can be.
    template <bool kWhole>
    static __device__ __forceinline__ void put_rows(const P& p, const PrefillRows& rows, const float* slab, int cols, int most) {
      constexpr int kEach = kCols == 64 ? 2 : 4, kLanes = kCols / 8 / kEach, kAtOnce = kWhole ? kEach : 1;
      const int64_t v_dim = p.shape.value_dim(), first_col = rows.part * kCols;
      const int lane = threadIdx.x % 32;
      const auto map = sink_map(p.out);
      const auto& end = sink_end(p.out);
#pragma unroll 1
      for (int i = lane / kLanes; i < kTiles * 16; i += 32 / kLanes) {
        const int r = first_row() + i;
        if (r >= rows.count) break;
        const auto place = rows.place(r);
        const int64_t to = rows.token + place.query;
#pragma unroll 1
        for (int first = lane % kLanes; first < kCols / 8; first += kLanes * kAtOnce) {
          Pack<float, 8> values[kAtOnce];
          KERNELS_UNROLL
          for (int k = 0; k < kAtOnce; ++k) {
            const int pack = first + k * kLanes;
            const float* const from = slab + i * kPitch + pack * 8;
            memcpy(values[k].v, __builtin_assume_aligned(from + half_of(i, pack, 0), 16), 16);
            memcpy(values[k].v + 4, __builtin_assume_aligned(from + half_of(i, pack, 1), 16), 16);
          }
          KERNELS_UNROLL
          for (int k = 0; k < kAtOnce; ++k) {
            const int col = (first + k * kLanes) * 8;
            if (!kWhole && col >= cols) break;
            if (leaves_part<P>(rows)) {
              leave_outputs(p, rows, r, values[k], first_col + col);
              continue;
            }
            in_packs(kWhole ? 8 : most, values[k], place.head * v_dim + first_col + col, [&](const auto& some, int64_t at) {
              constexpr int N = std::decay_t<decltype(some)>::size;
              put(end, apply_map(map, some, fetch_operands<N>(map, to, at), to, at), to, at);
            });
          }
        }
      }
    }
  };
};

// What blocks have left, a row of all parts for each warp.
template <class P>
struct PrefillMerge {
  static constexpr int max_threads = 256, registers = 128, kWarps = max_threads / 32, kBlocksOnEach = 2;
  using Params = P;

  static __device__ __forceinline__ void run(const P& p) {
    const int lane = threadIdx.x % 32, count = *p.parts.count;
    const int64_t v_dim = p.shape.value_dim();
    const auto map = sink_map(p.out);
#pragma unroll 1
    for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; row < count; row += int64_t(gridDim.x) * kWarps) {
      const PrefillParts::Row first = p.parts.rows[row];
#pragma unroll 1
      for (int64_t col = first.parts > 0 ? lane * 4 : v_dim; col < v_dim; col += 32 * 4) {
        auto all = merged_states<4, 8>(first.parts, [&](int64_t part) {
          const int64_t at = row + part * first.distance;
          return AttentionState<float, 4>(p.parts.rows[at].logsumexp, floats_at<4>(p.parts.outputs + at * v_dim + col));
        });
        if constexpr (score_sinks<typename P::S>) all.o = all.o * all.SoftmaxState<float>::merge(sink_state(p.score, first.head)).mine;
        if (col == 0) p.options.write_lse(all.logsumexp(), first.token, first.head, p.shape.heads);
        in_packs(lesser(4, p.out_pack), all.output(), first.head * v_dim + col, [&](const auto& some, int64_t at) {
          constexpr int N = std::decay_t<decltype(some)>::size;
          put(sink_end(p.out), apply_map(map, some, fetch_operands<N>(map, first.token, at), first.token, at), first.token, at);
        });
      }
    }
  }
};

inline Status too_many_tiles() { return unsupported("attention: there are more than 2^31 tiles of queries"); }

template <class Body, class P>
Status start_prefill(const Exec& ex, const P& problem) {
  const auto grid = PrefillGrid::of<Body>(ex.device(), problem.shape, problem.options, P::kSplits);
  if (grid.tiles_in_all == 0) return too_many_tiles();
  Launch how;
  how.grid.x = unsigned(grid.blocks());
  how.threads = Body::max_threads;
  how.shared = Body::shared_bytes(problem.shape);
  KERNELS_TRY(launch<Body>(ex, how, {problem, grid}));
  if constexpr (P::kSplits) {
    using Merge = PrefillMerge<P>;
    const int64_t rows = PrefillRoom(ex.device(), problem.shape, problem.options).rows;
    if (rows == 0) return {};
    Launch merge;
    merge.grid.x = unsigned(lesser<int64_t>(Merge::kBlocksOnEach * ex.device().sm_count, (rows + Merge::kWarps - 1) / Merge::kWarps));
    merge.threads = Merge::max_threads;
    return launch<Merge>(ex, merge, problem);
  }
  return {};
}

}  // namespace detail
KERNELS_END
