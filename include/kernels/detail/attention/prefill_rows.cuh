// Work distribution of prefill: which thread block processes which rows (pairs of a query and a head), and which keys
// these rows see. This is the tile scheduler of all prefill kernels.
//
//   sequence 0       | tile 2 | tile 1 | tile 0 |      query tiles: rows of one head, or of a GQA group.
//   sequence 1       | tile 0 |                        The last ones, which see the most keys, go first
//
//   with a workspace, a long context and few queries (split-KV):
//   sequence 0       | keys 0 | keys 1 | keys 2 |      one block per split; a second kernel merges the partial results
//
// Words used here:
// - tile: a query tile, Body::kRows rows. Without splits, a tile is the work item of the grid; with splits, a tile and
//   one split of its keys are.
// - part: a range of Body::kCols columns of the output, where a kernel cannot accumulate all columns at once.
//   (PartialResults is something else: the partial results of key splits.)
// - pack: how many heads have their rows interleaved in a tile (GQA packing); 1: a tile has rows of one head.
#pragma once

#include "../../exec.cuh"
#include "../fast_division.cuh"
#include "merge_states.cuh"
#include "prefill_cuts.cuh"
#include "tile.cuh"

KERNELS_BEGIN
namespace detail {

// What a prefill kernel is called with. kSplits: the caller gave a workspace, so that keys may be split.
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
  // scale is applied to products. factor is what goes with a product into exp2: scale * log2(e), or log2(e) if the
  // scale is negative or tiny and products are scaled beforehand.
  float scale, factor;
  bool wide_queries, wide_keys, wide_values;  // whether wide (vector) accesses are possible
  int out_pack;
  std::conditional_t<kSplits, PartialResults, Nothing> parts;
};

// A work item: `count` rows of a sequence. Row i is number first + i among the rows of `pack` heads that start at
// first_head; the heads of a query are adjacent. With split keys the block processes keys [key_begin, key_end), and its
// first row is row first_partial_row of the partial results in the workspace.
struct PrefillRows {
  int64_t token;  // of the sequence's first query
  int b, first, count, queries, keys, first_head, kv_head, part;
  FastDivision pack;
  int splits, split, key_begin, key_end, first_partial_row;

  struct QueryHead {
    int query, head;
  };
  __device__ __forceinline__ QueryHead query_head(int row) const {
    unsigned head = unsigned(first + row);
    const int query = int(pack(head));
    return {query, first_head + int(head)};
  }
  __device__ __forceinline__ ScoreQueries at(int query) const { return {b, query, query, queries, keys}; }
};

// The value that another lane of the warp has.
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
// The same rows, in a form that the compiler knows to be uniform in a warp, which saves registers.
__device__ __forceinline__ PrefillRows same_in_lanes(const PrefillRows& rows) { return from_lane(rows, 0); }

// The order of work items and how blocks take them. From the fastest index to the slowest: query tiles of a sequence
// (those with the most keys first), parts of the output's columns, key splits, heads, sequences.
//
// If all sequences have the same number of queries and no keys are split, the grid is even: a block computes its item
// from its index alone. Otherwise the lengths are known on the device only. Then a block searches for the sequence of
// an item with a prefix sum over the sequences' items. The host launches as many blocks as there can be items, or a few
// persistent blocks per multiprocessor. Some of these items do not exist.
struct PrefillGrid {
  FastDivision tiles, parts, heads, pack, group;
  int64_t total_items;    // 0: too many for an index
  unsigned items_per_block = 1;  // contiguous items per block
  unsigned step = 1;      // or: distance between the items of a persistent block
  unsigned rounds = 1;    // the most items per block
  bool reverses = false;  // whether persistent blocks reverse their order in every other round
  unsigned section = 0;   // or: heads (of all sequences) whose tiles are processed before those of the next ones
  FastDivision section_heads{}, section_rounds{};  // rounds: of one section
  unsigned resident_blocks;                        // how many blocks run at the same time
  int64_t most_blocks = INT64_MAX;
  int pair = 1;  // blocks of a cluster that share a query tile, each with some of its keys
  bool even = false;  // all sequences have the same items, and no keys are split
  SplitPolicy split_policy;

  // share: split keys so that the work of all sequences together fills the machine, instead of each sequence by itself.
  template <class Body, class P>
  static PrefillGrid of(const DeviceInfo& device, const P& p, bool share = false) {
    const AttentionShape& shape = p.shape;
    constexpr bool splits = P::kSplits;
    static_assert(Body::kRows <= PrefillWorkspace::most_rows(Body::kDim) && Body::kOnEach <= SplitPolicy::kOnEach,
                  "what the workspace has room for");
    const SplitPolicy split_policy(device, p.options, Body::kOnEach, Body::kKeys, share, most_keys(p.kv));
    PrefillGrid grid(shape, split_policy, splits, Body::kRows, Body::kCols,
                     packed(shape.q_len, shape.group(), Body::kRows));
    if (grid.even)
      Body::choose_schedule(grid, p);
    else if (Body::kPersistentBlocksPerSm > 0 &&
             grid.total_items >= int64_t(splits ? 1 : 2) * Body::kPersistentBlocksPerSm * grid.resident_blocks)
      grid.persist(Body::kPersistentBlocksPerSm), grid.reverses = true;
    return grid;
  }
  int64_t blocks() const { return pair * lesser(most_blocks, (total_items + items_per_block - 1) / items_per_block); }

  // Persistent blocks, `each` times as many as are resident.
  void persist(int64_t each) {
    most_blocks = each * resident_blocks;
    step = unsigned(blocks() / pair);
    if (step > 0) rounds = unsigned((total_items + step - 1) / step);
  }
  // One persistent block per resident slot. Reversed rounds balance the load: a block with many keys gets few in the
  // next.
  void persist_in_one_wave() { persist(1), reverses = true; }
  // Each block takes the same number of contiguous items (the last block the remainder), at most `most`, in as few
  // waves as possible. The limit bounds the imbalance if some sequences have more keys than others, which only the
  // device knows.
  void take_contiguous_items(int64_t most) {
    const int64_t waves = tiles_of(total_items, resident_blocks * most);
    items_per_block = rounds = unsigned(tiles_of(total_items, resident_blocks * waves));
  }
  // Persistent blocks for causal masks, where each tile of a head sees fewer keys than the one before it. Blocks
  // process a section of heads in rounds: the first tiles of all its heads, then the second tiles, and so on. Rounds
  // alternate in direction, so that after two rounds all blocks have processed about as many keys, and blocks with one
  // round fewer miss a short tile. The next section starts from the other end of the blocks.
  //
  // All sections have the same number of heads. If that number allows it, a section has at least three rounds, and its
  // keys and values fit the L2 cache. bytes: those of the keys and values of one KV head.
  void persist_by_sections(int64_t bytes) {
    constexpr int64_t kept = 32 << 20;
    const int64_t all = total_items / tiles.divisor, sharing = group.divisor / pack.divisor;
    const int64_t least = (3 * int64_t(resident_blocks) + tiles.divisor - 1) / tiles.divisor;
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
    const int64_t in_rounds = (each * tiles.divisor + resident_blocks - 1) / resident_blocks;
    section_rounds = FastDivision(in_rounds);
    rounds = unsigned(sections * in_rounds), most_blocks = resident_blocks, reverses = true;
  }
  // The item that a block takes in a round. There may be none: the result is then at least total_items.
  __device__ __forceinline__ unsigned tile_of(unsigned round, unsigned block, unsigned blocks) const {
    if (section == 0) return (reverses && round % 2 != 0 ? blocks - 1 - block : block) * items_per_block + round * step;
    unsigned in_section = round;
    const unsigned s = section_rounds(in_section);  // in_section becomes the remainder
    unsigned head = ((in_section + s) % 2 != 0 ? blocks - 1 - block : block) + in_section * blocks;
    const unsigned tile = section_heads(head);
    return tile < tiles.divisor ? (s * section + head) * tiles.divisor + tile : kNone;
  }

  // Splits of the longest sequence.
  int most_splits() const { return split_policy.most_of(tiles.divisor * parts.divisor * heads.divisor); }

  // Called by all threads of a block. Contains a barrier, or needs one behind it before `kept` is read. `kept` stays in
  // shared memory for a later same_in_lanes().
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
  // Whether a tile may have rows of one head only: a ragged sequence decides that by its own length.
  bool rows_are_queries(const AttentionShape& shape) const { return shape.q_offsets != nullptr || pack.divisor == 1; }

  template <class P>
  __device__ __forceinline__ PrefillRows even_rows(const P& p, int each, unsigned block) const {
    unsigned tile = block, part = tiles(tile), head = parts(part), b = heads(head);
    PrefillRows r = of_sequence(p, int(b));
    r.pack = pack;
    if constexpr (P::kSplits) r.key_end = r.keys;
    set_tile(r, each, tiles.divisor, tile, part, head);
    return r;
  }

  // Called by one warp: finds item `wanted`, which the block takes in this round, and the block's items of the next
  // rounds, kCount at most. A search for several takes about as long as for one. Without a workspace, for uneven grids
  // only.
  template <class Body, int kCount, class P>
  __device__ __forceinline__ void search(const P& p, unsigned wanted, unsigned round, unsigned block, unsigned blocks,
                                         PrefillRows* found) const {
    static_assert(kCount <= 20, "in 32 rounds no more than every third lacks a tile");
    const unsigned lane = threadIdx.x % 32;
    bool mine = lane == 0;
    if constexpr (kCount > 1) {
      wanted = round + lane < rounds ? tile_of(round + lane, block, blocks) : kNone;
      const unsigned there = __ballot_sync(0xffffffffu, wanted < unsigned(total_items));
      const unsigned place = __popc(there & ((1u << lane) - 1));
      mine = place < kCount && wanted < unsigned(total_items);
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

  // Called by one warp: finds the item that each lane wants (kSame: the one that all lanes want); count is 0 if it does
  // not exist. Each lane counts the items of some sequences; a prefix sum over the lanes tells which lane's sequences
  // have the item, and a last pass over these finds it. All passes share one loop, as the time goes into instruction
  // cache misses: with a loop per pass, latents of 32 sequences took 2 us more (H100).
  //
  // If the work of all sequences is shared out (shares), the first passes find how many key tiles a split needs so that
  // all splits are resident at the same time. If even whole sequences are not, their keys are not split.
  template <class Body, bool kSame, class P>
  __device__ __forceinline__ void find(const P& p, unsigned wanted, PrefillRows* found) const {
    constexpr unsigned all = 0xffffffffu;
    constexpr int kUncut = 1 << 30;
    // Passes, in their order: count blocks without splits, count the key tiles of these blocks, count blocks with
    // splits, and find the item.
    enum class Pass { whole, key_tiles, parts, find };
    const int lane = threadIdx.x % 32, each = int((p.shape.batch + 31) / 32);
    const bool alike = p.shape.q_offsets == nullptr;  // all sequences have the same number of queries
    bool shares = false;
    if constexpr (P::kSplits) shares = split_policy.shared;
    // If all sequences have the same number of queries and the grid is not even, the host knows that blocks of whole
    // sequences are all resident. This saves the first pass.
    Pass pass = !shares ? Pass::parts : alike ? Pass::key_tiles : Pass::whole;
    int most = kUncut;   // key tiles of a split
    int owner = lane;    // the lane whose sequences are counted
    unsigned block = 0;  // the number of the wanted item among them
    int partial_rows_ahead = 0;  // rows of partial results of the sequences before them
    KERNELS_ROLLED
    for (;;) {
      unsigned sum = 0;
      int partial_rows = 0;
      const int begin = int(lesser<int64_t>(int64_t(owner) * each, p.shape.batch)),
                end = int(lesser<int64_t>(int64_t(begin) + each, p.shape.batch));
      KERNELS_ROLLED
      for (int b = begin; b < end; ++b) {
        const Share s = share<Body>(p, b, alike);
        const Cut cut = cut_of(p, s, most);
        if (pass == Pass::find && block - sum < cut.blocks) {
          *found = rows_in<Body>(p, s, cut.splits, block - sum, partial_rows_ahead + partial_rows);
          return;
        }
        sum += pass == Pass::key_tiles ? s.blocks * unsigned(s.key_tiles) : cut.blocks,
            partial_rows += cut.partial_rows;
      }
      if (shares) {
        const unsigned total = __reduce_add_sync(all, sum), once = unsigned(split_policy.once);
        if (pass == Pass::whole && total <= once) {
          pass = Pass::key_tiles;
          continue;
        }
        if (pass == Pass::key_tiles || (pass == Pass::parts && total > once && most < kUncut / 2)) {
          most = pass == Pass::key_tiles ? greater(int(SplitPolicy::kFewestOfShared), int(total / once))
                                         : most + most / 16 + 1;
          pass = Pass::parts;
          continue;
        }
      }
      unsigned up_to = sum;  // items up to and including this lane's sequences
      partial_rows_ahead = partial_rows;
      KERNELS_ROLLED
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(all, up_to, distance);
        const int other_partial_rows = P::kSplits ? __shfl_up_sync(all, partial_rows_ahead, distance) : 0;
        if (lane >= distance) up_to += other, partial_rows_ahead += other_partial_rows;
      }
      if constexpr (P::kSplits) {
        if (blockIdx.x == 0 && lane == 31) *p.parts.count = partial_rows_ahead;
      }
      block = wanted - (up_to - sum), partial_rows_ahead -= partial_rows;
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
        partial_rows_ahead = __shfl_sync(all, partial_rows_ahead, owner);
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
  // Query tiles with packed heads; a huge number if row numbers could overflow, so that heads are not packed.
  static KERNELS_HD int64_t packed_tiles(int64_t queries, int64_t group, unsigned each) {
    const int64_t rows = queries * group;
    return rows > (int64_t(1) << 30) ? int64_t(~uint64_t(0) >> 1) : int64_t((unsigned(rows) + each - 1) / each);
  }
  // Heads are packed if that takes fewer tiles.
  static bool packed(int64_t queries, int64_t group, int each) {
    return packed_tiles(queries, group, unsigned(each)) < tiles_of(queries, each) * group;
  }

  PrefillGrid(const AttentionShape& shape, const SplitPolicy& how, bool splits, int each, int cols, bool together)
      : tiles(tiles_of(shape.q_len * (together ? shape.group() : 1), each)),
        parts(tiles_of(shape.value_dim(), cols)),
        heads(together ? shape.kv_heads : shape.heads),
        pack(together ? shape.group() : 1),
        group(shape.group()),
        resident_blocks(unsigned(how.once)),
        split_policy(how) {
    constexpr int64_t limit = INT32_MAX;
    const int64_t of_head = int64_t(tiles.divisor) * parts.divisor;  // below 2^34
    total_items = of_head > limit / heads.divisor || of_head * heads.divisor > limit / shape.batch
                      ? 0
                      : of_head * heads.divisor * shape.batch;
    if (total_items == 0) return;
    const unsigned longest = unsigned(of_head * heads.divisor);
    const bool whole =
        !splits || (split_policy.shared ? total_items > split_policy.once : split_policy.most_of(longest) == 1);
    even = whole && shape.q_offsets == nullptr;
    if (even) return;
    // With q_offsets, all tiles of a sequence but one are full.
    if (shape.q_offsets != nullptr)
      total_items = lesser(
          total_items, (shape.total_queries() * shape.group() / each + shape.batch) * shape.kv_heads * parts.divisor);
    if (!splits) return;
    if (split_policy.shared) {
      // A pair of blocks merges its results sooner than a second kernel does. This pays if each pair has all rows of a
      // sequence and these fill their tile. With fewer sequences there are more splits anyway, and other calls can be
      // split finer without pairs. H200, 4,096 keys, 128 heads: 32 sequences take 89 us (101 us without pairs), 24 take
      // 85 (96), 16 take 68 (67), and 8 take 50 (48). 64 sequences of 16 heads and up to 8,192 keys take 144 us (114).
      if (2 * total_items <= split_policy.once && 3 * total_items > split_policy.once &&
          shape.q_len * shape.group() >= each)
        pair = 2, split_policy.once /= 2;
      total_items = greater<int64_t>(total_items, split_policy.once);
      return;
    }
    const bool known = shape.q_offsets == nullptr || split_policy.fixed > 0;
    const int64_t more = total_items * (known ? split_policy.most_of(longest) : split_policy.most());
    total_items = known ? more : lesser(more, total_items + shape.batch * split_policy.twice);
    if (total_items > limit) total_items = 0;
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
  // Fills in the rows of tile `tile`, counted from the end, of tiles_there tiles.
  __device__ __forceinline__ void set_tile(PrefillRows& r, int each, unsigned tiles_there, unsigned tile, unsigned part,
                                           unsigned head) const {
    r.first = int(tiles_there - 1 - tile) * each;
    r.part = int(part);
    r.first_head = int(head * r.pack.divisor);
    unsigned first_head = unsigned(r.first_head);
    r.kv_head = int(group(first_head));
    r.count = greater(0, lesser(each, r.queries * int(r.pack.divisor) - r.first));
  }

  // What a sequence needs: query tiles per head, blocks if its keys are not split, and key tiles.
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
  // Splits of a sequence's keys, and the resulting blocks and rows of partial results. most: key tiles per split, if
  // the work of all sequences is shared out.
  struct Cut {
    int splits, partial_rows;
    unsigned blocks;
  };
  template <class P>
  __device__ __forceinline__ Cut cut_of(const P& p, const Share& s, int most) const {
    Cut cut{1, 0, s.blocks};
    if constexpr (P::kSplits) {
      if (s.queries == 0) return cut;
      cut.splits = split_policy.shared ? greater(1, (s.key_tiles + most - 1) / most)
                                       : split_policy.of(s.blocks, s.key_tiles, unsigned(s.queries) * group.divisor);
      cut.blocks *= unsigned(cut.splits);
      if (cut.splits > 1) cut.partial_rows = cut.splits * s.queries * int(p.shape.heads);
    }
    return cut;
  }

  // The rows of block `block` of a sequence, whose partial results start at row `partial_rows` of the workspace.
  template <class Body, class P>
  __device__ __forceinline__ PrefillRows rows_in(const P& p, const Share& s, int splits, unsigned block,
                                                 int partial_rows) const {
    PrefillRows r = of_sequence(p, s.b);
    r.pack = group;
    if (!s.together) r.pack.divisor = 1;
    unsigned part = block / s.tiles;
    const unsigned tile = block - part * s.tiles;
    unsigned head = parts(part);
    if constexpr (P::kSplits) {
      r.splits = splits, r.split = int(head % unsigned(splits)), head /= unsigned(splits);
      // The first `more` splits have one key tile more
      const int each = s.key_tiles / splits, more = s.key_tiles - each * splits;
      const auto cut = [&](int i) { return s.first_key_tile + each * i + lesser(i, more); };
      r.key_begin = cut(r.split) * Body::kKeys,
      r.key_end = int(lesser<int64_t>(int64_t(cut(r.split + 1)) * Body::kKeys, r.keys));
    }
    set_tile(r, Body::kRows, s.tiles, tile, part, head);
    if constexpr (P::kSplits)
      r.first_partial_row = partial_rows + r.split * r.queries * int(p.shape.heads) +
                            int(head) * r.queries * int(r.pack.divisor) + r.first;
    return r;
  }
};

// Whether the block has only a split of the keys, so that its results are partial.
template <class P>
__device__ __forceinline__ bool is_split(const PrefillRows& rows) {
  if constexpr (P::kSplits) return rows.splits > 1;
  else return false;
}
// Writes what the merge has to know of a row of a split.
template <class P>
__device__ __forceinline__ void store_partial_state(const P& p, const PrefillRows& rows, int row, float logsumexp) {
  if constexpr (P::kSplits) {
    const auto place = rows.query_head(row);
    p.parts.rows[rows.first_partial_row + row] = {int32_t(rows.token + place.query), uint16_t(place.head),
                                                  uint16_t(rows.split == 0 ? rows.splits : 0),
                                                  rows.queries * int(p.shape.heads), logsumexp};
  }
}
// Writes partial outputs of a row, from column `col` of the head on.
template <int N, class P>
__device__ __forceinline__ void store_partial_outputs(const P& p, const PrefillRows& rows, int row,
                                                      const Pack<float, N>& outputs, int64_t col) {
  if constexpr (P::kSplits)
    put_floats(p.parts.outputs + (int64_t(rows.first_partial_row) + row) * p.shape.value_dim() + col, outputs);
}

// The keys that all of some rows see, and the keys that any of them sees. A range is empty if its end is not greater
// than its beginning.
struct SeenKeys {
  int all_begin, all_end, any_begin, any_end;
};
// The keys [begin, end) that a row sees; empty if the row does not exist.
struct RowKeys {
  int begin, end;
};
template <class P>
__device__ __forceinline__ RowKeys keys_seen(const P& p, const PrefillRows& rows, int row) {
  if (row >= rows.count) return {0, 0};
  const KeyRange seen = key_range(p.score, rows.at(rows.query_head(row).query));
  int begin = int(lesser<int64_t>(seen.begin, rows.keys)), end = int(lesser<int64_t>(seen.end, rows.keys));
  if constexpr (P::kSplits) begin = greater(begin, rows.key_begin), end = greater(begin, lesser(end, rows.key_end));
  return {begin, end};
}
// The end of the keys that any query of the sequence sees. Nothing may be read from there on.
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
// Joins the ranges of all lanes.
__device__ __forceinline__ SeenKeys join_lanes(const SeenKeys& seen) {
  constexpr unsigned all = 0xffffffffu;
  return {__reduce_max_sync(all, seen.all_begin), __reduce_min_sync(all, seen.all_end),
          __reduce_min_sync(all, seen.any_begin), __reduce_max_sync(all, seen.any_end)};
}

}  // namespace detail
KERNELS_END
