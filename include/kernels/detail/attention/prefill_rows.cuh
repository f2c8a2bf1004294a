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
#include "../fast_division.cuh"
#include "merge_states.cuh"
#include "prefill_cuts.cuh"
#include "tile.cuh"

KERNELS_BEGIN
namespace detail {

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
  float scale, factor;  // of products, and of what goes into powers of 2: products, or logits where scale is tiny
  bool wide_queries, wide_keys, wide_values;  // whether packs may be read
  int out_pack;
  std::conditional_t<kSplits, PrefillParts, Nothing> parts;
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

// What a lane of the warp has.
template <class T>
__device__ __forceinline__ T from_lane(const T& mine, int lane) {
  static_assert(sizeof(T) % 4 == 0, "words");
  int words[sizeof(T) / 4];
  memcpy(words, &mine, sizeof(words));
  KERNELS_UNROLL
  for (int& word : words) word = __shfl_sync(0xffffffffu, word, lane);
  T out;
  memcpy(&out, words, sizeof(words));
  return out;
}
// Rows of which the compiler knows that all lanes of a warp have them, which spares registers.
__device__ __forceinline__ PrefillRows same_in_lanes(const PrefillRows& rows) { return from_lane(rows, 0); }

// How rows are shared out: tiles of a sequence's rows, those with the most keys first; parts of the output's columns;
// parts of the keys; heads; sequences. Sequences of one length all have the same tiles. Others have as many as they
// need: a block looks for the sequence that a tile belongs to in their sums, and the host, which does not know the
// lengths, launches as many blocks as there can be, or so many that a few find nothing and the others walk on to
// further tiles. Where keys may be cut, blocks look for their sequence as well, as the host does not know how many
// keys there are.
struct PrefillGrid {
  FastDivision tiles, parts, heads, pack, group;
  int64_t tiles_in_all;   // 0: too many
  unsigned of_block = 1;  // how many of them a block takes in a row,
  unsigned step = 1;      // or how far apart those are that it walks on to,
  unsigned rounds = 1;    // and how many it takes at most
  bool back = false;      // whether every other round goes from the last block to the first
  unsigned section = 0;   // or: of how many heads, of all sequences, blocks take the tiles before they go on,
  FastDivision section_heads{}, section_rounds{};  // and in how many rounds
  unsigned at_once;       // how many blocks run at the same time
  int64_t most_blocks = INT64_MAX;
  int pair = 1;  // blocks that have a tile of queries together, each some of its keys
  bool even = false;  // whether all sequences have the same blocks, and no keys are cut
  PrefillCuts cuts;

  // share: whether blocks are shared out among all sequences.
  template <class Body, class P>
  static PrefillGrid of(const DeviceInfo& device, const P& p, bool share = false) {
    const AttentionShape& shape = p.shape;
    constexpr bool splits = P::kSplits;
    static_assert(Body::kRows <= PrefillRoom::most_rows(Body::kDim) && Body::kOnEach <= PrefillCuts::kOnEach,
                  "what the workspace has room for");
    const PrefillCuts cuts(device, p.options, Body::kOnEach, Body::kKeys, share, most_keys(p.kv));
    PrefillGrid grid(shape, cuts, splits, Body::kRows, Body::kCols, packed(shape.q_len, shape.group(), Body::kRows));
    if (grid.even)
      Body::share_out(grid, p);
    else if (Body::kWalking > 0 && grid.tiles_in_all >= int64_t(splits ? 1 : 2) * Body::kWalking * grid.at_once)
      grid.walk(Body::kWalking), grid.back = true;
    return grid;
  }
  int64_t blocks() const { return pair * lesser(most_blocks, (tiles_in_all + of_block - 1) / of_block); }

  // With so many blocks for each that runs at a time.
  void walk(int64_t each) {
    most_blocks = each * at_once;
    step = unsigned(blocks() / pair);
    if (step > 0) rounds = unsigned((tiles_in_all + step - 1) / step);
  }
  // A block for each that runs at a time; every other round goes back, so that who had many keys then has few.
  void stay() { walk(1), back = true; }
  // Each block takes the same number of tiles in a row, and the last one what is left: in as few waves of blocks as
  // there can be if none has more than `most`. Some sequences may be longer than others, which only the device knows.
  void take_in_a_row(int64_t most) {
    const int64_t waves = tiles_of(tiles_in_all, at_once * most);
    of_block = rounds = unsigned(tiles_of(tiles_in_all, at_once * waves));
  }
  // The same where a head's tiles have fewer and fewer keys. Blocks go through a section of heads in rounds, the first
  // tiles of all its heads before the second ones, so that in two rounds, there and back, all blocks have about as many
  // keys, and those that have one round fewer miss a short tile; the next section begins with the other end of the
  // blocks. All sections have as many heads, and where the number of heads divides so, three rounds at least and keys
  // and values of a size that the L2 cache keeps. bytes: those of one head of keys.
  void stay_in_sections(int64_t bytes) {
    constexpr int64_t kept = 32 << 20;
    const int64_t all = tiles_in_all / tiles.divisor, sharing = group.divisor / pack.divisor;
    const int64_t least = (3 * int64_t(at_once) + tiles.divisor - 1) / tiles.divisor;
    const int64_t most = greater<int64_t>(1, all / least);
    const int64_t wanted = lesser<int64_t>(most, (all / sharing * bytes + kept - 1) / kept);
    const auto fits = [&](int64_t count) {
      return count >= 1 && count <= most && all % count == 0 && all / count % sharing == 0;
    };
    int64_t away = 0;
    while (away < 256 && !fits(wanted - away) && !fits(wanted + away)) ++away;
    const int64_t sections = fits(wanted - away) ? wanted - away : fits(wanted + away) ? wanted + away : 1;
    const int64_t each = all / sections;
    section = unsigned(each), section_heads = FastDivision(each);
    const int64_t in_rounds = (each * tiles.divisor + at_once - 1) / at_once;
    section_rounds = FastDivision(in_rounds);
    rounds = unsigned(sections * in_rounds), most_blocks = at_once, back = true;
  }
  // The tile that a block takes in a round, or one that there is not.
  __device__ __forceinline__ unsigned tile_of(unsigned round, unsigned block, unsigned blocks) const {
    if (section == 0) return (back && round % 2 != 0 ? blocks - 1 - block : block) * of_block + round * step;
    unsigned in_section = round;
    const unsigned s = section_rounds(in_section);  // which leaves the remainder there
    unsigned head = ((in_section + s) % 2 != 0 ? blocks - 1 - block : block) + in_section * blocks;
    const unsigned tile = section_heads(head);
    return tile < tiles.divisor ? (s * section + head) * tiles.divisor + tile : kNone;
  }

  // Of the longest sequence.
  int most_splits() const { return cuts.most_of(tiles.divisor * parts.divisor * heads.divisor); }

  // By all threads of a block; with a barrier, or ahead of one. `kept` is for those that ask again.
  template <class Body, class P>
  __device__ __forceinline__ PrefillRows rows(const P& p, PrefillRows& kept) const {
    if (even) {
      const PrefillRows r = even_rows(p, Body::kRows, blockIdx.x);
      if (threadIdx.x == 0) kept = r;
      return r;
    }
    if (threadIdx.x < 32) find<Body, true>(p, blockIdx.x, &kept);
    __syncthreads();
    return same_in_lanes(kept);
  }
  // Whether the rows of a tile may be queries of one head: a ragged sequence decides that by its own length.
  bool rows_are_queries(const AttentionShape& shape) const { return shape.q_offsets != nullptr || pack.divisor == 1; }

  template <class P>
  __device__ __forceinline__ PrefillRows even_rows(const P& p, int each, unsigned block) const {
    unsigned tile = block, part = tiles(tile), head = parts(part), b = heads(head);
    PrefillRows r = of_sequence(p, int(b));
    r.pack = pack;
    if constexpr (P::kSplits) r.key_end = r.keys;
    place(r, each, tiles.divisor, tile, part, head);
    return r;
  }

  // By a warp: the rows of tile `wanted`, which the block takes in this round, and of its next ones, up to kCount of
  // them, as looking for several takes about as long as for one. Without a workspace, of uneven grids only.
  template <class Body, int kCount, class P>
  __device__ __forceinline__ void search(const P& p, unsigned wanted, unsigned round, unsigned block, unsigned blocks,
                                         PrefillRows* found) const {
    static_assert(kCount <= 20, "in 32 rounds no more than every third lacks a tile");
    const unsigned lane = threadIdx.x % 32;
    bool mine = lane == 0;
    if constexpr (kCount > 1) {
      wanted = round + lane < rounds ? tile_of(round + lane, block, blocks) : kNone;
      const unsigned there = __ballot_sync(0xffffffffu, wanted < unsigned(tiles_in_all));
      const unsigned place = __popc(there & ((1u << lane) - 1));
      mine = place < kCount && wanted < unsigned(tiles_in_all);
      if (!mine) wanted = kNone;
      found += lesser(place, unsigned(kCount - 1));
    }
    if (!P::kSplits || !even)
      find<Body, kCount == 1>(p, wanted, found);
    else if (mine)
      *found = even_rows(p, Body::kRows, wanted);
  }

 private:
  static constexpr unsigned kNone = ~0u;

  // By a warp, the rows of the tile that each lane wants, or of the one that all want; no rows if there is no such
  // tile. Each lane sums up some sequences, and the tile is found among those of one of them. All of that is one loop,
  // gone through several times, as most of its time is that of instructions on their way from memory: with loops of
  // their own, latents of 32 sequences took 2 us more (H100).
  //
  // Where blocks are shared out among all sequences, parts have so many tiles of keys that all of them run at the same
  // time, or sequences are not cut.
  template <class Body, bool kSame, class P>
  __device__ __forceinline__ void find(const P& p, unsigned wanted, PrefillRows* found) const {
    constexpr unsigned all = 0xffffffffu;
    constexpr int kUncut = 1 << 30;
    enum class Pass { whole, key_tiles, parts, find };
    const int lane = threadIdx.x % 32, each = int((p.shape.batch + 31) / 32);
    const bool alike = p.shape.q_offsets == nullptr;  // the same queries everywhere
    bool shares = false;
    if constexpr (P::kSplits) shares = cuts.shared;
    // Where queries are alike and the grid is not even, the host has found that blocks of whole sequences can run at
    // the same time, which spares the first pass.
    Pass pass = !shares ? Pass::parts : alike ? Pass::key_tiles : Pass::whole;
    int most = kUncut;   // tiles of keys in a part
    int owner = lane;    // the lane whose sequences are gone through,
    unsigned block = 0;  // which of their blocks is looked for,
    int left_ahead = 0;  // and rows that those ahead of them leave
    KERNELS_ROLLED
    for (;;) {
      unsigned sum = 0;
      int left = 0;
      const int begin = int(lesser<int64_t>(int64_t(owner) * each, p.shape.batch)),
                end = int(lesser<int64_t>(int64_t(begin) + each, p.shape.batch));
      KERNELS_ROLLED
      for (int b = begin; b < end; ++b) {
        const Share s = share<Body>(p, b, alike);
        const Cut cut = cut_of(p, s, most);
        if (pass == Pass::find && block - sum < cut.blocks) {
          *found = rows_in<Body>(p, s, cut.splits, block - sum, left_ahead + left);
          return;
        }
        sum += pass == Pass::key_tiles ? s.blocks * unsigned(s.key_tiles) : cut.blocks, left += cut.left;
      }
      if (shares) {
        const unsigned total = __reduce_add_sync(all, sum), once = unsigned(cuts.once);
        if (pass == Pass::whole && total <= once) {
          pass = Pass::key_tiles;
          continue;
        }
        if (pass == Pass::key_tiles || (pass == Pass::parts && total > once && most < kUncut / 2)) {
          most = pass == Pass::key_tiles ? greater(int(PrefillCuts::kFewestOfShared), int(total / once))
                                         : most + most / 16 + 1;
          pass = Pass::parts;
          continue;
        }
      }
      unsigned up_to = sum;  // the lane's sequences
      left_ahead = left;
      KERNELS_ROLLED
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(all, up_to, distance);
        const int other_left = P::kSplits ? __shfl_up_sync(all, left_ahead, distance) : 0;
        if (lane >= distance) up_to += other, left_ahead += other_left;
      }
      if constexpr (P::kSplits) {
        if (blockIdx.x == 0 && lane == 31) *p.parts.count = left_ahead;
      }
      block = wanted - (up_to - sum), left_ahead -= left;
      if constexpr (kSame) {
        owner = __ffs(int(__ballot_sync(all, wanted < up_to))) - 1;
        if (owner < 0 && lane == 0) found->count = 0;
        if (lane != owner) return;
      } else {
        owner = -1;
        KERNELS_ROLLED
        for (unsigned others = __ballot_sync(all, wanted != kNone); others != 0; others &= others - 1) {
          const int other = __ffs(int(others)) - 1;
          const unsigned tile = __shfl_sync(all, wanted, other), behind = __ballot_sync(all, tile < up_to);
          if (lane == other) owner = __ffs(int(behind)) - 1;
        }
        block = wanted - __shfl_sync(all, up_to - sum, owner);
        left_ahead = __shfl_sync(all, left_ahead, owner);
        if (wanted == kNone) return;
        if (owner < 0) {
          found->count = 0;
          return;
        }
      }
      pass = Pass::find;
    }
  }

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
    constexpr int64_t limit = INT32_MAX;
    const int64_t of_head = int64_t(tiles.divisor) * parts.divisor;  // below 2^34
    tiles_in_all = of_head > limit / heads.divisor || of_head * heads.divisor > limit / shape.batch
                       ? 0
                       : of_head * heads.divisor * shape.batch;
    if (tiles_in_all == 0) return;
    const unsigned longest = unsigned(of_head * heads.divisor);
    const bool whole = !splits || (cuts.shared ? tiles_in_all > cuts.once : cuts.most_of(longest) == 1);
    even = whole && shape.q_offsets == nullptr;
    if (even) return;
    // With q_offsets each tile but one of a sequence is full.
    if (shape.q_offsets != nullptr)
      tiles_in_all = lesser(
          tiles_in_all, (shape.total_queries() * shape.group() / each + shape.batch) * shape.kv_heads * parts.divisor);
    if (!splits) return;
    if (cuts.shared) {
      // Two blocks merge their results sooner than a kernel behind them does. It pays where each pair has a whole
      // sequence's rows, and these fill their tile; fewer sequences are cut further, and others can be cut finer
      // without pairs. H200, 4,096 keys: 32 sequences of 128 heads 89 us (101 without), 24 of them 85 (96), 16 of them
      // 68 (67), 8 of them 50 (48); 64 of 16 heads and up to 8,192 keys 144 (114).
      if (2 * tiles_in_all <= cuts.once && 3 * tiles_in_all > cuts.once && shape.q_len * shape.group() >= each)
        pair = 2, cuts.once /= 2;
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

  // What a sequence needs: tiles of rows, as many blocks if its keys are not cut, and tiles of keys.
  struct Share {
    int b;
    unsigned tiles, blocks;
    int queries, first_key_tile, key_tiles;
    bool together;
  };
  template <class Body, class P>
  __device__ __forceinline__ Share share(const P& p, int b, bool alike) const {
    constexpr unsigned each = Body::kRows;
    Share s{};
    const unsigned queries = unsigned(p.shape.queries(b));
    s.b = b, s.queries = int(queries);
    if (alike) {
      s.tiles = tiles.divisor, s.together = pack.divisor > 1;
    } else {
      s.tiles = queries / each + (queries % each > 0);
      const int64_t together = packed_tiles(queries, group.divisor, each);
      s.together = together < int64_t(s.tiles) * group.divisor;
      if (s.together) s.tiles = unsigned(together);
    }
    s.blocks = s.tiles * unsigned(s.together ? p.shape.kv_heads : p.shape.heads) * parts.divisor;
    if constexpr (P::kSplits) {
      if (queries == 0) return s;
      const int64_t keys = p.kv.length(b);
      const KeyRange seen = key_range(p.score, {b, 0, queries - 1, queries, keys});
      s.first_key_tile = int(unsigned(lesser(seen.begin, keys)) / Body::kKeys);
      s.key_tiles = int(unsigned(lesser(seen.end, keys) + Body::kKeys - 1) / Body::kKeys) - s.first_key_tile;
    }
    return s;
  }
  // In how many parts keys are cut, and with these how many blocks there are, and how many rows they leave. most: tiles
  // of keys of a part, where blocks are shared out among all sequences.
  struct Cut {
    int splits, left;
    unsigned blocks;
  };
  template <class P>
  __device__ __forceinline__ Cut cut_of(const P& p, const Share& s, int most) const {
    Cut cut{1, 0, s.blocks};
    if constexpr (P::kSplits) {
      if (s.queries == 0) return cut;
      cut.splits = cuts.shared ? greater(1, (s.key_tiles + most - 1) / most)
                               : cuts.of(s.blocks, s.key_tiles, unsigned(s.queries) * group.divisor);
      cut.blocks *= unsigned(cut.splits);
      if (cut.splits > 1) cut.left = cut.splits * s.queries * int(p.shape.heads);
    }
    return cut;
  }

  // Of block `block` of a sequence, whose first row left is row `left`.
  template <class Body, class P>
  __device__ __forceinline__ PrefillRows rows_in(const P& p, const Share& s, int splits, unsigned block,
                                                 int left) const {
    PrefillRows r = of_sequence(p, s.b);
    r.pack = group;
    if (!s.together) r.pack.divisor = 1;
    unsigned part = block / s.tiles;
    const unsigned tile = block - part * s.tiles;
    unsigned head = parts(part);
    if constexpr (P::kSplits) {
      r.splits = splits, r.split = int(head % unsigned(splits)), head /= unsigned(splits);
      const int each = s.key_tiles / splits, more = s.key_tiles - each * splits;  // that have a tile more
      const auto cut = [&](int i) { return s.first_key_tile + each * i + lesser(i, more); };
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
// The end of the keys that any query of the sequence sees: behind it nothing may be read.
template <class P>
__device__ __forceinline__ int end_of_keys(const P& p, const PrefillRows& rows) {
  return int(key_range(p.score, {rows.b, 0, rows.queries - 1, rows.queries, rows.keys}).end);
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
