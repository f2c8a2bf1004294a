// How the rows of attention of many queries, which are those of queries and heads, are shared out among thread blocks,
// and which keys they see.
//
//   sequence 0       | tile 2 | tile 1 | tile 0 |      rows of one head, or of those that share keys; the last tiles
//   sequence 1       | tile 0 |                        see the most keys and come first
//
//   with a workspace, a long context and few queries:
//   sequence 0       | keys 0 | keys 1 | keys 2 |      in parts that are merged
#pragma once

#include "../../exec.cuh"
#include "merge_states.cuh"
#include "tile.cuh"

KERNELS_BEGIN
namespace detail {

// What blocks leave in the workspace of rows whose keys are split: for each part of the keys the rows of the sequence,
// with all heads, one behind the other. They hold the outputs of the part, finished, and what its merge has to know.
struct PrefillParts {
  // Of the row of a part. In the first part's, `parts` says how many there are, `distance` rows apart, and which query
  // and head it is; in others' it is 0.
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

// The rows of a block, `count` of them: from row `first` on of those of `pack` heads from `first_head` on, a query's
// side by side. Where keys are split, the block has those from key_begin up to key_end, and its first row is row
// `left_first` of what is left.
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

// In how many parts keys are cut: so many that the sequence's own blocks fill the machine, once, or twice where that
// leaves fewer multiprocessors idle, as long as a part is worth its state. Other sequences have no say in this, so that
// bits do not depend on them.
struct PrefillCuts {
  static constexpr int kMost = 32, kFewestTiles = 8, kFewestOfFew = 32;
  static constexpr int kFewRows =
      64;  // single queries, say: what a block does before and behind its tiles takes as long as many of these
  static constexpr int kOnEach = 2;  // blocks of what is split, on a multiprocessor, at most
  static constexpr int kFewestOfShared = 4;  // tiles of keys of a part of what is shared out; others were not measured
  int once, twice;  // how many blocks that is
  int fixed;        // parts that are asked for, or 0
  int most_tiles;   // of keys that are announced
  bool shared;      // blocks are shared out among all sequences instead, in parts of as many tiles of keys

  PrefillCuts() = default;
  PrefillCuts(const DeviceInfo& device, const Attention& options, int on_each, int tile_keys, bool share = false)
      : once(on_each * device.sm_count),
        twice(kOnEach * device.sm_count),
        fixed(options.fixed_splits()),
        most_tiles(std::numeric_limits<int>::max()),
        shared(share && fixed == 0) {
    if (options.expected_keys() > 0)
      most_tiles = int(lesser<int64_t>(most_tiles, (options.expected_keys() - 1) / tile_keys + 2));
  }

  // Of any sequence.
  KERNELS_HD int most() const { return fixed > 0 ? fixed : greater(1, lesser(int(kMost), most_tiles / kFewestTiles)); }
  // Of one that has so many blocks, and of one that has so many tiles of keys as well, and rows of heads that share
  // them.
  KERNELS_HD int most_of(unsigned blocks) const {
    const int of_once = int(unsigned(once) / blocks), of_twice = int(unsigned(twice) / blocks);
    return fixed > 0 ? fixed
                     : greater(1, lesser(most(), 8 * of_twice > 19 * of_once ? of_twice : of_once));  // a fifth better
  }
  KERNELS_HD int of(unsigned blocks, int tiles, unsigned rows) const {
    return greater(
        1, lesser(most_of(blocks), fixed > 0 ? tiles : tiles / (rows <= kFewRows ? kFewestOfFew : kFewestTiles)));
  }
};

// How many rows blocks leave at most, whichever kernel it is.
struct PrefillRoom {
  static constexpr int most_rows(int64_t dim, bool in_8_bits = true) {
    return dim <= 64 || (dim <= 128 && in_8_bits) ? 192 : 128;
  }  // of a tile, of heads of so many columns
  static constexpr int kSharedRows = 64;  // the same where blocks are shared out among all sequences, one on each
  static constexpr size_t kCountBytes = 16;
  int64_t rows = 0;
  size_t state_bytes = 0, output_bytes = 0;

  PrefillRoom(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool share = false) {
    constexpr int fewest_keys = 32;  // of a tile
    const PrefillCuts cuts(device, options, PrefillCuts::kOnEach, fewest_keys, share);
    const int64_t of_one =
        int64_t(cuts.twice) * most_rows(greater(shape.dim, shape.value_dim()), options.wants_8_bits());
    if (cuts.shared) {
      rows = int64_t(device.sm_count) * kSharedRows;
    } else {
      if (cuts.most() == 1 || (cuts.fixed == 0 && shape.q_offsets == nullptr && shape.q_len * shape.heads > of_one))
        return;
      rows = shape.total_queries() * shape.heads * cuts.most();
      if (cuts.fixed == 0) rows = lesser(rows, shape.batch * of_one);
    }
    state_bytes = size_t(rows) * sizeof(PrefillParts::Row),
    output_bytes = size_t(rows) * size_t(shape.value_dim()) * sizeof(float);
  }
  size_t bytes() const { return kCountBytes + state_bytes + output_bytes; }
};

// How rows are shared out: tiles of a sequence's rows, those with the most keys first; parts of the output's columns;
// parts of the keys; heads; sequences. Sequences of one length all have the same tiles. Others have as many as they
// need: a block looks for the sequence that a tile belongs to in their sums, and the host, which does not know the
// lengths, launches as many blocks as there can be, or so many that a few find nothing and the others walk on to
// further tiles.
struct PrefillGrid {
  FastDivision tiles, parts, heads, pack, group;
  int64_t tiles_in_all;   // 0: too many
  unsigned of_block = 1;  // how many of them a block takes, one behind the other
  unsigned at_once;       // how many blocks run at the same time
  int64_t most_blocks = std::numeric_limits<int64_t>::max();
  int pair = 1;  // blocks that have a tile of queries together, each some of its keys
  PrefillCuts cuts;

  // splits: whether keys may be split; share: whether blocks are shared out among all sequences.
  template <class Body>
  static PrefillGrid of(const DeviceInfo& device, const AttentionShape& shape, const Attention& options, bool splits,
                        bool share = false) {
    static_assert(Body::kRows <= PrefillRoom::most_rows(Body::kDim) && Body::kOnEach <= PrefillCuts::kOnEach,
                  "what the workspace has room for");
    PrefillGrid grid(shape, PrefillCuts(device, options, Body::kOnEach, Body::kKeys, share), splits, Body::kRows,
                     Body::kCols, packed(shape.q_len, shape.group(), Body::kRows));
    if (even(shape, splits)) grid.of_block = Body::tiles_of_block(grid);
    else if (Body::kWalking > 0) grid.most_blocks = int64_t(Body::kWalking) * grid.at_once;
    return grid;
  }
  int64_t blocks() const { return pair * lesser(most_blocks, (tiles_in_all + of_block - 1) / of_block); }

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
  static KERNELS_HD bool even(const AttentionShape& shape, bool splits) {
    return !splits && shape.q_offsets == nullptr;
  }
  template <class P>
  static __device__ __forceinline__ bool even(const P& p) { return even(p.shape, P::kSplits); }

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
    const int most = tiles_of_part<Body>(p);
    unsigned sum = 0;
    int left_sum = 0;
    KERNELS_ROLLED
    for (int64_t b = begin; b < end; ++b) {
      const Share s = share<Body>(p, int(b), most);
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
        Share s = share<Body>(p, b, most);
        KERNELS_ROLLED
        for (; block >= s.blocks; s = share<Body>(p, ++b, most)) block -= s.blocks, left += s.left;
        found = rows_in<Body>(p, s, b, block, left);
      }
    }
  }
  // By a warp: how many rows all blocks leave.
  template <class Body, class P>
  __device__ __forceinline__ void count_rows(const P& p) const {
    if constexpr (P::kSplits) {
      const int most = tiles_of_part<Body>(p);
      int rows = 0;
      for (int64_t b = threadIdx.x % 32; b < p.shape.batch; b += 32) rows += share<Body>(p, int(b), most).left;
      rows = __reduce_add_sync(0xffffffffu, rows);
      if (threadIdx.x % 32 == 0) *p.parts.count = rows;
    }
  }

 private:
  static int64_t tiles_of(int64_t rows, int64_t each) { return (rows + each - 1) / each; }
  // Tiles of the heads that share keys, if they go together; so many that they do not if a row's number could be too
  // large.
  static KERNELS_HD int64_t packed_tiles(int64_t queries, int64_t group, unsigned each) {
    const int64_t rows = queries * group;
    return rows > (int64_t(1) << 30) ? int64_t(~uint64_t(0) >> 1) : int64_t((unsigned(rows) + each - 1) / each);
  }
  // They go together where that takes fewer tiles.
  static bool packed(int64_t queries, int64_t group, int each) {
    return packed_tiles(queries, group, unsigned(each)) < tiles_of(queries, each) * group;
  }

  PrefillGrid(const AttentionShape& shape, const PrefillCuts& how, bool splits, int each, int cols, bool together)
      : tiles(tiles_of(shape.q_len * (together ? shape.group() : 1), each)),
        parts(tiles_of(shape.value_dim(), cols)),
        heads(together ? shape.kv_heads : shape.heads),
        pack(together ? shape.group() : 1),
        group(shape.group()),
        at_once(unsigned(how.once)),
        cuts(how) {
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    const int64_t of_head = int64_t(tiles.divisor) * parts.divisor;  // below 2^34
    tiles_in_all = of_head > limit / heads.divisor || of_head * heads.divisor > limit / shape.batch
                       ? 0
                       : of_head * heads.divisor * shape.batch;
    if (tiles_in_all == 0) return;
    const unsigned longest = unsigned(of_head * heads.divisor);
    // With q_offsets each tile but one of a sequence is full.
    if (shape.q_offsets != nullptr)
      tiles_in_all = lesser(
          tiles_in_all, (shape.total_queries() * shape.group() / each + shape.batch) * shape.kv_heads * parts.divisor);
    if (!splits) return;
    if (cuts.shared) {
      // Two blocks merge their results sooner than a kernel behind them, but where they find nothing left to share each
      // takes as long as one alone.
      if (2 * tiles_in_all <= cuts.once) pair = 2, cuts.once /= 2;
      tiles_in_all = greater<int64_t>(tiles_in_all, cuts.once);
      return;
    }
    const bool known = shape.q_offsets == nullptr || cuts.fixed > 0;
    const int64_t more = tiles_in_all * (known ? cuts.most_of(longest) : cuts.most());
    tiles_in_all = known ? more : lesser(more, tiles_in_all + shape.batch * cuts.twice);
    if (tiles_in_all > limit) tiles_in_all = 0;
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
  __device__ __forceinline__ void place(PrefillRows& r, int each, unsigned tiles_there, unsigned tile, unsigned part,
                                        unsigned head) const {
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
  // most: tiles of keys of a part, where blocks are shared out among all sequences.
  template <class Body, class P>
  __device__ __forceinline__ Share share(const P& p, int b, int most) const {
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
      s.splits = cuts.shared ? greater(1, (s.key_tiles + most - 1) / most)
                             : cuts.of(s.blocks, s.key_tiles, queries * group.divisor);
      s.blocks *= unsigned(s.splits);
      if (s.splits > 1) s.left = s.splits * int(queries) * int(p.shape.heads);
    }
    return s;
  }

  // By a warp: how many tiles of keys a part has where blocks are shared out among all sequences, so that all parts
  // run at the same time, or sequences are not split.
  template <class Body, class P>
  __device__ __forceinline__ int tiles_of_part(const P& p) const {
    if constexpr (P::kSplits) {
      if (!cuts.shared) return 0;
      constexpr int whole = 1 << 30;
      const auto of_all = [&](int most, auto add) {
        unsigned sum = 0;
        KERNELS_ROLLED
        for (int64_t b = threadIdx.x % 32; b < p.shape.batch; b += 32) sum += add(share<Body>(p, int(b), most));
        return __reduce_add_sync(0xffffffffu, sum);
      };
      const auto blocks = [](const Share& s) { return s.blocks; };
      if (of_all(whole, blocks) > unsigned(cuts.once)) return whole;
      const unsigned tiles = of_all(whole, [](const Share& s) { return s.blocks * unsigned(s.key_tiles); });
      int most = greater(int(PrefillCuts::kFewestOfShared), int(tiles / unsigned(cuts.once)));
#pragma unroll 1
      while (most < whole / 2 && of_all(most, blocks) > unsigned(cuts.once)) most += most / 16 + 1;
      return most;
    } else {
      return 0;
    }
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
      r.key_begin = cut(r.split) * Body::kKeys,
      r.key_end = int(lesser<int64_t>(int64_t(cut(r.split + 1)) * Body::kKeys, r.keys));
    }
    place(r, Body::kRows, s.tiles, tile, part, head);
    if constexpr (P::kSplits)
      r.left_first =
          left + r.split * r.queries * int(p.shape.heads) + int(head) * r.queries * int(r.pack.divisor) + r.first;
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
    p.parts.rows[rows.left_first + row] = {int32_t(rows.token + place.query), uint16_t(place.head),
                                           uint16_t(rows.split == 0 ? rows.splits : 0),
                                           rows.queries * int(p.shape.heads), logsumexp};
  }
}
// Its outputs, from a column of the head on.
template <int N, class P>
__device__ __forceinline__ void leave_outputs(const P& p, const PrefillRows& rows, int row,
                                              const Pack<float, N>& outputs, int64_t col) {
  if constexpr (P::kSplits)
    put_floats(p.parts.outputs + (int64_t(rows.left_first) + row) * p.shape.value_dim() + col, outputs);
}

// Keys that all of some rows see, and keys that any of them see; both are empty where the end is not behind the
// beginning.
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
  return {greater(a.all_begin, b.all_begin), lesser(a.all_end, b.all_end), lesser(a.any_begin, b.any_begin),
          greater(a.any_end, b.any_end)};
}
// That of all lanes.
__device__ __forceinline__ SeenKeys join_lanes(const SeenKeys& seen) {
  constexpr unsigned all = 0xffffffffu;
  return {__reduce_max_sync(all, seen.all_begin), __reduce_min_sync(all, seen.all_end),
          __reduce_min_sync(all, seen.any_begin), __reduce_max_sync(all, seen.any_end)};
}

}  // namespace detail
KERNELS_END
