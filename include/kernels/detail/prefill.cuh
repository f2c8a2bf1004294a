// Attention of many queries, for sm_80 and up, on tensor cores: o = softmax(q k^T) v, tile by tile of the keys (FlashAttention-2).
//
// A block has a tile of rows, which are queries of one head, or where these are few those of all heads that share keys. Its queries
// stand in shared memory; keys and values come in tiles, the next while one is worked on. 16-bit operands that are aligned
// are copied by cp.async; others are read through their functors, rounded to 16 bits and stored. Each warp has 16 or 32 of the
// rows and all to itself: logits, their weights, and the output stay in its registers, in the fragments of mma.sync, of which the
// weights, rounded to 16 bits, are operands again. In shared memory a run of 64 columns is eight chunks of 16 bytes, permuted so
// that neither the writes nor the reads meet a bank conflict.
//
// Keys that none of a block's rows see are not read; a warp leaves out tiles that its own rows do not see, and asks for
// each key whether it is visible only in those that they do not see as a whole.
#pragma once

#include "../arch/sm80.cuh"
#include "../arch/sm90.cuh"
#include "../exec.cuh"
#include "attention_tile.cuh"

KERNELS_BEGIN
namespace detail {

template <class Q_, class Kv_, class Out_, class S_>
struct PrefillProblem {
  using Q = Q_;
  using Kv = Kv_;
  using Out = Out_;
  using S = S_;

  Q q;
  Kv kv;
  Out out;
  S score;
  AttentionShape shape;
  Attention options;
  float scale;
  bool wide_queries, wide_keys, wide_values;  // whether packs may be read
  int out_pack;
};

// The rows of a block: `pack` heads from `first_head` on, those of a query side by side.
struct PrefillRows {
  int64_t b, first_query, queries, keys;
  int first_head, kv_head, pack, shift, count, part;

  __device__ __forceinline__ int64_t query(int row) const { return first_query + (pack == 1 ? row : (shift + row) / pack); }
  __device__ __forceinline__ int head(int row) const { return first_head + (pack == 1 ? 0 : (shift + row) % pack); }
};

// How rows are shared out among blocks: tiles of a sequence's rows, those with the most keys first; parts of the output's columns;
// heads; sequences.
struct PrefillGrid {
  int64_t tiles, heads;
  int parts, pack;

  PrefillGrid(const AttentionShape& shape, int rows, int cols) : parts(int((shape.value_dim() + cols - 1) / cols)) {
    const int64_t group = shape.group(), alone = (shape.q_len + rows - 1) / rows, together = (shape.q_len * group + rows - 1) / rows;
    pack = together < alone * group ? int(group) : 1;
    tiles = pack == 1 ? alone : together;
    heads = shape.heads / pack;
  }
  // 0: too many.
  int64_t blocks(int64_t batch) const {
    const int64_t limit = std::numeric_limits<int32_t>::max();
    return tiles > limit || tiles * parts > limit / heads || tiles * parts * heads > limit / batch ? 0 : tiles * parts * heads * batch;
  }

  template <class P>
  __device__ __forceinline__ PrefillRows rows(const P& p, int each) const {
    PrefillRows r;
    unsigned index = blockIdx.x;
    const int64_t first = int64_t(unsigned(tiles) - 1 - index % unsigned(tiles)) * each;
    index /= unsigned(tiles);
    r.part = int(index % unsigned(parts));
    index /= unsigned(parts);
    r.pack = pack;
    r.first_head = int(index % unsigned(heads)) * pack;
    r.kv_head = r.first_head / int(p.shape.group());
    r.b = index / unsigned(heads);
    r.queries = p.shape.queries(r.b);
    r.keys = p.kv.length(r.b);
    r.first_query = pack == 1 ? first : first / pack;
    r.shift = pack == 1 ? 0 : int(first - r.first_query * pack);
    r.count = int(greater<int64_t>(0, lesser<int64_t>(each, r.queries * pack - first)));
    return r;
  }
};

// Keys that all of some rows see, and keys that any of them see.
struct SeenKeys {
  KeyRange all, any;
};
template <class P>
__device__ __forceinline__ SeenKeys seen_by(const P& p, const PrefillRows& rows, int row) {
  constexpr int64_t most = int64_t(1) << 62;
  if (row >= rows.count) return {{0, most}, {most, 0}};
  const int64_t query = rows.query(row);
  const KeyRange seen = key_range(p.score, {rows.b, query, query, rows.queries, rows.keys});
  return {seen, seen.begin < seen.end ? seen : KeyRange{most, 0}};
}
__device__ __forceinline__ void join(SeenKeys& a, const SeenKeys& b) {
  a.all = {greater(a.all.begin, b.all.begin), lesser(a.all.end, b.all.end)};
  a.any = {lesser(a.any.begin, b.any.begin), greater(a.any.end, b.any.end)};
}
// That of all lanes.
__device__ __forceinline__ SeenKeys join_lanes(SeenKeys seen) {
  const auto from = [](int64_t x, int mask) { return int64_t(__shfl_xor_sync(0xffffffffu, static_cast<long long>(x), mask)); };
  KERNELS_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    join(seen, {{from(seen.all.begin, mask), from(seen.all.end, mask)}, {from(seen.any.begin, mask), from(seen.any.end, mask)}});
  }
  return seen;
}

// ---- tiles in shared memory ----------------------------------------------------------------------------------------

// Of kCols columns of 16 bits. Threads take chunks of 16 bytes: eight threads a row, each the chunk of its number in each run of 64
// columns; a thread's rows are kTogether apart.
template <int kCols, int kThreads>
struct TileLayout {
  static constexpr int kRowBytes = kCols * 2, kRuns = kCols / 64, kTogether = kThreads / 8;
  static __device__ __forceinline__ uint32_t place(int row, int chunk) { return row * kRowBytes + (chunk ^ row % 8) * 16; }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % 8; }
  static __device__ __forceinline__ int row() { return threadIdx.x / 8; }
  static __device__ __forceinline__ uint32_t mine() { return place(row(), chunk()); }

  // Zeros in the chunks from `cols` on.
  static __device__ __forceinline__ void clear_behind(unsigned char* tile, int rows, int cols) {
    for (int i = row(); i < rows; i += kTogether) {
      for (int run = 0; run < kRuns; ++run) {
        if (run * 64 + chunk() * 8 >= cols) *reinterpret_cast<::uint4*>(tile + place(i, chunk()) + run * 128) = ::uint4{0, 0, 0, 0};
      }
    }
  }
};

// The keys, or the values, of a sequence on their way to tiles of kKeys of them. at(pos): where they are, as a KvRun.
template <class T, class Run, bool kStraight, int kKeys, int kCols, int kThreads>
class KvTiles {
 public:
  using Layout = TileLayout<kCols, kThreads>;
  static constexpr int kBytes = kKeys * Layout::kRowBytes, kEach = kKeys / Layout::kTogether;
  static constexpr bool copied = std::is_same<tensor_type<typename Run::Codes>, T>::value;
  // Of a warp.
  static constexpr int kWarpRows = kEach * 4;
  static_assert(kWarpRows <= 16 && kKeys % Layout::kTogether == 0, "half a warp finds the rows of a warp");

  // Columns from `col` on, so many of them.
  template <class At>
  __device__ __forceinline__ KvTiles(const At& at, int64_t pos, int64_t col, int cols, bool wide) : col_(col), left_(cols - Layout::chunk() * 8), wide_(wide) {
    if constexpr (copied && kStraight) {
      const Run first = at(pos);
      from_ = first.codes.at(Layout::row(), col) + Layout::chunk() * 8;
      stride_ = first.codes.at(1, 0) - first.codes.at(0, 0);
    }
  }

  // Number `row` of the warp's rows of a tile, in the tile.
  static __device__ __forceinline__ int tile_row(int row) { return row / 4 * Layout::kTogether + threadIdx.x / 32 * 4 + row % 4; }

  // Rows of the tile from `pos` on, so many of which there are. rows: in lane i + half * 16 where the warp's row i is, as
  // address() said.
  template <class At>
  __device__ __forceinline__ void bring(unsigned char* tile, const At& at, int64_t pos, int64_t count, const void* rows, int half) {
    if constexpr (copied) {
      if (wide_) return copy(arch::shared_address(tile) + Layout::mine(), pos, count, rows, half);
    }
    for (int i = 0; i < kEach; ++i) {
      const int row = Layout::row() + i * Layout::kTogether;
      unsigned char* const to = tile + Layout::mine() + i * (Layout::kTogether * Layout::kRowBytes);
      if (row >= count) {
        for (int run = 0; run * 64 < left_; ++run) *reinterpret_cast<::uint4*>(to + run * 128) = ::uint4{0, 0, 0, 0};
        continue;
      }
      const auto codes = read_twice(at(pos + row).codes);
      for (int run = 0; run * 64 < left_; ++run) bring_columns<T, 8>(reinterpret_cast<T*>(to + run * 128), codes, 0, col_ + run * 64 + Layout::chunk() * 8, wide_);
    }
    if constexpr (copied && kStraight) from_ += kKeys * stride_;
  }
  __device__ __forceinline__ const void* address(const Run& run) const {
    if constexpr (copied) return run.codes.at(0, col_);
    else return nullptr;
  }

 private:
  __device__ __forceinline__ void copy(uint32_t to, int64_t pos, int64_t count, const void* rows, int half) {
    KERNELS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const T* from;
      if constexpr (kStraight) {
        from = from_ + i * Layout::kTogether * stride_;
      } else {
        const int lane = i * 4 + threadIdx.x % 32 / 8 + half * 16;
        from = reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(rows), lane)) + Layout::chunk() * 8;
      }
      if (count >= kKeys) {
        KERNELS_UNROLL
        for (int run = 0; run < Layout::kRuns; ++run) {
          if (run * 64 < left_) arch::copy_async_16(to + i * (Layout::kTogether * Layout::kRowBytes) + run * 128, from + run * 64);
        }
      } else {
        const bool there = Layout::row() + i * Layout::kTogether < count;
        for (int run = 0; run * 64 < left_; ++run) {
          arch::copy_async_16(to + i * (Layout::kTogether * Layout::kRowBytes) + run * 128, there || !kStraight ? from + run * 64 : from_, there ? 16 : 0);
        }
      }
    }
    if constexpr (kStraight) from_ += kKeys * stride_;
  }

  const T* from_ = nullptr;
  int64_t stride_ = 0, col_;
  int left_;
  bool wide_;
};

// ---- the kernel ----------------------------------------------------------------------------------------------------

// kTiles: of 16 rows, of a warp. kDim, kCols: columns of queries and keys, and of values, at most. kStages: 2 if the next keys and
// values have room beside those that are worked on.
template <class P, int kWarps, int kTiles, int kKeys, int kDim, int kCols_, int kStages, int kRegisters>
struct PrefillBody {
  using Kv = typename P::Kv;
  using S = typename P::S;
  using Key = KeyRun<Kv>;
  using Value = ValueRun<Kv>;
  using TK = key_meeting_type<typename P::Q, Kv>;
  using TV = value_meeting_type<typename P::Q, Kv>;
  static constexpr int kThreads = kWarps * 32, kRows = kWarps * kTiles * 16, kCols = kCols_;
  static constexpr int max_threads = kThreads, registers = kRegisters;
  using Queries = TileLayout<kDim, kThreads>;
  using Keys = KvTiles<TK, Key, in_one_run<Kv>, kKeys, kDim, kThreads>;
  using Values = KvTiles<TV, Value, in_one_run<Kv>, kKeys, kCols, kThreads>;
  static constexpr int kStageBytes = Keys::kBytes + Values::kBytes, kQueryBytes = kRows * Queries::kRowBytes;
  static constexpr int kScaleBytes = Key::scaled || Value::scaled ? 2 * kKeys * 4 : 0;
  static constexpr int kPitch = 64 + 8;  // floats in a row of results on their way to the sink
  static constexpr int kSharedBytes = kQueryBytes + kStages * (kStageBytes + kScaleBytes);
  static_assert(kSharedBytes <= 99 * 1024 - 512, "what a block of sm_86 can have");
  static_assert(kWarps * 16 * kPitch * 4 <= kSharedBytes, "results take the place of the tiles");
  static size_t shared_bytes(const AttentionShape&) { return kSharedBytes; }

  struct Params {
    P problem;
    PrefillGrid grid;
  };

  static __device__ __forceinline__ void run(const Params& params) {
    extern __shared__ __align__(128) unsigned char tiles_memory[];
    __shared__ SeenKeys seen_by_warps[kWarps];
    const P& p = params.problem;
    const PrefillRows rows = params.grid.rows(p, kRows);
    if (rows.count == 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = int(p.shape.dim);
    const int cols = int(lesser<int64_t>(kCols, p.shape.value_dim() - rows.part * kCols));

    // Which keys the block's rows see, and the warp's.
    SeenKeys mine{{0, rows.keys}, {0, rows.keys}};
    if constexpr (score_ranges<S>) {
      mine = seen_by(p, rows, warp * kTiles * 16 + lane % (kTiles * 16));
      mine = join_lanes(mine);
      if (lane == 0) seen_by_warps[warp] = mine;
    }

    unsigned char* const stages = tiles_memory + kQueryBytes;
    bring_queries(p, rows, tiles_memory, dim);
    for (int stage = 0; stage < kStages; ++stage) {
      Keys::Layout::clear_behind(stages + stage * kStageBytes, kKeys, dim);
      Values::Layout::clear_behind(stages + stage * kStageBytes + Keys::kBytes, kKeys, cols);
    }
    int64_t begin = 0, end = rows.keys;
    if constexpr (score_ranges<S>) {
      __syncthreads();
      SeenKeys all = seen_by_warps[0];
      KERNELS_UNROLL
      for (int i = 1; i < kWarps; ++i) join(all, seen_by_warps[i]);
      begin = all.any.begin, end = greater(all.any.begin, all.any.end);
    }
    const int tiles = int((end - begin + kKeys - 1) / kKeys);
    // Tiles that the warp has something to do in, and those in which its rows see all keys.
    int first = 0, last = tiles, first_whole = 0, last_whole = int((end - begin) / kKeys);
    if constexpr (score_ranges<S>) {
      const auto tile_of = [&](int64_t key, int up) { return int(greater<int64_t>(0, lesser(key, end) - begin + up) / kKeys); };
      first = tile_of(mine.any.begin, 0), last = mine.any.begin < mine.any.end ? tile_of(mine.any.end, kKeys - 1) : 0;
      first_whole = tile_of(mine.all.begin, kKeys - 1), last_whole = tile_of(mine.all.end, 0);
    }

    const auto key_at = [&](int64_t pos) { return p.kv.key(rows.b, rows.kv_head, pos); };
    const auto value_at = [&](int64_t pos) { return p.kv.value(rows.b, rows.kv_head, pos); };
    Keys keys(key_at, begin, 0, dim, p.wide_keys);
    Values values(value_at, begin, rows.part * kCols, cols, p.wide_values);
    const void* addresses = nullptr;
    // Where the rows of the tile from `pos` on are.
    const auto find = [&](int64_t pos) {
      if constexpr (!in_one_run<Kv> && (Keys::copied || Values::copied)) {
        if (pos >= end || lane % 16 >= Keys::kWarpRows) return;
        const int64_t at = lesser<int64_t>(pos + Keys::tile_row(lane % 16), end - 1);
        addresses = lane < 16 ? keys.address(key_at(at)) : values.address(value_at(at));
      }
    };
    const auto scales_of = [&](int stage) { return reinterpret_cast<float*>(stages + kStages * kStageBytes + stage * kScaleBytes); };
    const auto bring_keys = [&](int tile, int stage) {
      const int64_t pos = begin + int64_t(tile) * kKeys, count = end - pos;
      if constexpr (Key::scaled) {
        if (threadIdx.x < kKeys) scales_of(stage)[threadIdx.x] = threadIdx.x < count ? key_at(pos + threadIdx.x).scale(0) : 0.f;
      }
      keys.bring(stages + stage * kStageBytes, key_at, pos, count, addresses, 0);
    };
    const auto bring_values = [&](int tile, int stage) {
      const int64_t pos = begin + int64_t(tile) * kKeys, count = end - pos;
      if constexpr (Value::scaled) {
        if (threadIdx.x < kKeys) scales_of(stage)[kKeys + threadIdx.x] = threadIdx.x < count ? value_at(pos + threadIdx.x).scale(0) : 0.f;
      }
      values.bring(stages + stage * kStageBytes + Keys::kBytes, value_at, pos, count, addresses, 1);
    };

    Work work;
    if (tiles > 0) {
      find(begin);
      bring_keys(0, 0);
      if constexpr (kStages == 2) {
        bring_values(0, 0);
        find(begin + kKeys);
      }
    }
    arch::copy_async_commit();
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = kStages == 2 ? tile % 2 : 0;
      const unsigned char* const at = stages + stage * kStageBytes;
      const bool busy = tile >= first && tile < last, whole = tile >= first_whole && tile < last_whole;
      arch::copy_async_wait<0>();
      __syncthreads();
      if constexpr (kStages == 2) {
        if (tile + 1 < tiles) {
          bring_keys(tile + 1, stage ^ 1);
          bring_values(tile + 1, stage ^ 1);
          find(begin + int64_t(tile + 2) * kKeys);
        }
        arch::copy_async_commit();
        if (busy) {
          work.multiply_keys(tiles_memory, at, dim, scales_of(stage));
          work.weigh(p, rows, begin + int64_t(tile) * kKeys, whole, scales_of(stage) + kKeys);
          work.add_values(at + Keys::kBytes, cols);
        }
      } else {
        bring_values(tile, 0);
        find(begin + int64_t(tile + 1) * kKeys);
        arch::copy_async_commit();
        if (busy) work.multiply_keys(tiles_memory, at, dim, scales_of(0));
        arch::copy_async_wait<0>();
        __syncthreads();
        if (tile + 1 < tiles) bring_keys(tile + 1, 0);
        arch::copy_async_commit();
        if (busy) {
          work.weigh(p, rows, begin + int64_t(tile) * kKeys, whole, scales_of(0) + kKeys);
          work.add_values(at + Keys::kBytes, cols);
        }
      }
    }
    arch::copy_async_wait<0>();
    __syncthreads();
    work.finish(p, rows, reinterpret_cast<float*>(tiles_memory) + warp * 16 * kPitch, cols);
  }

 private:
  static constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

  static __device__ __forceinline__ void bring_queries(const P& p, const PrefillRows& rows, unsigned char* tile, int dim) {
    const int64_t token = p.shape.first_query(rows.b);
#pragma unroll 2
    for (int i = Queries::row(); i < kRows; i += Queries::kTogether) {
      unsigned char* const to = tile + Queries::place(i, Queries::chunk());
      const bool there = i < rows.count;
      const int64_t row = there ? token + rows.query(i) : 0, col = there ? int64_t(rows.head(i)) * dim : 0;
      for (int run = 0; run < Queries::kRuns; ++run) {
        const int at = run * 64 + Queries::chunk() * 8;
        if (there && at < dim) bring_columns<TK, 8>(reinterpret_cast<TK*>(to + run * 128), p.q, row, col + at, p.wide_queries);
        else *reinterpret_cast<::uint4*>(to + run * 128) = ::uint4{0, 0, 0, 0};
      }
    }
  }

  // What a warp holds. Lane 4g + t has, of tile i of 16 rows, rows g and g + 8; of 8 columns of logits or of the output columns 2t and
  // 2t + 1.
  struct Work {
    float logits[kTiles][kKeys / 8][4], outputs[kTiles][kCols / 8][4] = {};
    uint32_t weights[kTiles][kKeys / 16][4];
    // The largest logit so far, times log2(e), and the lane's part of the sum of exponentials under it.
    float largest[kTiles][2], sums[kTiles][2] = {};

    __device__ __forceinline__ Work() {
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) largest[i][0] = largest[i][1] = -infinity<float>();
    }

    static __device__ __forceinline__ int row(int i, int half) { return threadIdx.x / 32 * (kTiles * 16) + i * 16 + half * 8 + threadIdx.x % 32 / 4; }

    __device__ __forceinline__ void multiply_keys(const unsigned char* queries, const unsigned char* keys, int dim, const float* scales) {
      const int lane = threadIdx.x % 32;
      const uint32_t q = arch::shared_address(queries) + Queries::place(threadIdx.x / 32 * (kTiles * 16) + lane % 16, lane / 16);
      const uint32_t k = arch::shared_address(keys) + Keys::Layout::place(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int j = 0; j < kKeys / 8; ++j) logits[i][j][0] = logits[i][j][1] = logits[i][j][2] = logits[i][j][3] = 0.f;
      }
      const auto multiply = [&](int run) {
        KERNELS_UNROLL
        for (int step = 0; step < 4; ++step) {
          uint32_t a[kTiles][4];
          KERNELS_UNROLL
          for (int i = 0; i < kTiles; ++i) arch::load_matrix_x4(a[i], (q ^ (step * 32)) + run * 128 + i * (16 * Queries::kRowBytes));
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 16; ++j) {
            uint32_t b[4];
            arch::load_matrix_x4(b, (k ^ (step * 32)) + run * 128 + j * (16 * Keys::Layout::kRowBytes));
            KERNELS_UNROLL
            for (int i = 0; i < kTiles; ++i) {
              arch::mma_16816<TK>(logits[i][2 * j], a[i], {b[0], b[1]});
              arch::mma_16816<TK>(logits[i][2 * j + 1], a[i], {b[2], b[3]});
            }
          }
        }
      };
      if constexpr (kDim <= 128) {
        KERNELS_UNROLL
        for (int run = 0; run < kDim / 64; ++run) multiply(run);
      } else {
#pragma unroll 1
        for (int run = 0; run * 64 < dim; ++run) multiply(run);
      }
      if constexpr (Key::scaled) {
        each([&](int i, int j, int x, float& logit) { logit *= scales[j * 8 + lane % 4 * 2 + x % 2]; });
      }
    }

    // Logits become weights. `whole`: the rows see all keys of the tile.
    __device__ __forceinline__ void weigh(const P& p, const PrefillRows& rows, int64_t pos, bool whole, const float* scales) {
      const int lane = threadIdx.x % 32;
      float factor = p.scale * kLog2e;
      if constexpr (score_transforms<S> || score_masks<S>) {
        factor = kLog2e;
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          KERNELS_UNROLL
          for (int half = 0; half < 2; ++half) {
            const Seen seen = seen_of(p, rows, row(i, half), pos);
            ScoreAt at{rows.b, rows.head(row(i, half)), rows.query(row(i, half)), 0, rows.queries, rows.keys};
            KERNELS_UNROLL
            for (int j = 0; j < kKeys / 8; ++j) {
              KERNELS_UNROLL
              for (int x = 0; x < 2; ++x) {
                float& logit = logits[i][j][half * 2 + x];
                const int key = j * 8 + lane % 4 * 2 + x;
                at.key = pos + key;
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
        if (!(factor > 1e-30f)) {
          each([&](int, int, int, float& logit) { logit *= p.scale; });
          factor = kLog2e;
        }
        if (!whole) {
          KERNELS_UNROLL
          for (int i = 0; i < kTiles; ++i) {
            KERNELS_UNROLL
            for (int half = 0; half < 2; ++half) {
              const Seen seen = seen_of(p, rows, row(i, half), pos);
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
      bool raised = false;
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
          raised = raised || largest[i][half] != before[i][half];
        }
      }
      // Most tiles have no larger logit than those before.
      if (__any_sync(0xffffffffu, raised)) {
        KERNELS_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          KERNELS_UNROLL
          for (int half = 0; half < 2; ++half) {
            const float shrink = arch::exp2_flushed(before[i][half] - reference(i, half));
            sums[i][half] *= shrink;
            KERNELS_UNROLL
            for (int j = 0; j < kCols / 8; ++j) outputs[i][j][half * 2] *= shrink, outputs[i][j][half * 2 + 1] *= shrink;
          }
        }
      }
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          const float from = reference(i, half);
          KERNELS_UNROLL
          for (int j = 0; j < kKeys / 8; ++j) {
            float w[2];
            KERNELS_UNROLL
            for (int x = 0; x < 2; ++x) {
              w[x] = arch::exp2_flushed(fma(logits[i][j][half * 2 + x], factor, -from));
              sums[i][half] += w[x];
              if constexpr (Value::scaled) w[x] *= scales[j * 8 + lane % 4 * 2 + x];
            }
            weights[i][j / 2][j % 2 * 2 + half] = std::is_same<TV, half_type>::value ? arch::floats_to_halves(w[0], w[1]) : arch::floats_to_bfloats(w[0], w[1]);
          }
        }
      }
    }

    __device__ __forceinline__ void add_values(const unsigned char* values, int cols) {
      const int lane = threadIdx.x % 32;
      const uint32_t v = arch::shared_address(values) + Values::Layout::place(lane % 16, lane / 16);
      KERNELS_UNROLL
      for (int run = 0; run < kCols / 64; ++run) {
        if (kCols > 128 && run * 64 >= cols) break;
        KERNELS_UNROLL
        for (int k = 0; k < kKeys / 16; ++k) {
          KERNELS_UNROLL
          for (int j = 0; j < 4; ++j) {
            uint32_t b[4];
            arch::load_matrix_x4_turned(b, (v ^ (j * 32)) + run * 128 + k * (16 * Values::Layout::kRowBytes));
            KERNELS_UNROLL
            for (int i = 0; i < kTiles; ++i) {
              arch::mma_16816<TV>(outputs[i][run * 8 + 2 * j], weights[i][k], {b[0], b[1]});
              arch::mma_16816<TV>(outputs[i][run * 8 + 2 * j + 1], weights[i][k], {b[2], b[3]});
            }
          }
        }
      }
    }

    // To the sink by way of shared memory, 16 rows and 64 columns at a time, so that whole rows are written.
    __device__ __forceinline__ void finish(const P& p, const PrefillRows& rows, float* slab, int cols) {
      const int lane = threadIdx.x % 32;
      const int64_t token = p.shape.first_query(rows.b), v_dim = p.shape.value_dim();
      const auto map = sink_map(p.out);
      const auto end = sink_end(p.out);
      KERNELS_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        float inverse[2];
        KERNELS_UNROLL
        for (int half = 0; half < 2; ++half) {
          float sum = sums[i][half];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          SoftmaxState<float> state{largest[i][half] * kLn2, sum};
          const int r = row(i, half);
          inverse[half] = 1.f;
          if constexpr (score_sinks<S>) {
            if (r < rows.count) inverse[half] = state.merge(sink_state(p.score, rows.head(r))).mine;
          }
          inverse[half] *= state.inverse();
          if (lane % 4 == 0 && r < rows.count && rows.part == 0) p.options.write_lse(state.logsumexp(), token + rows.query(r), rows.head(r), p.shape.heads);
        }
        KERNELS_UNROLL
        for (int run = 0; run < kCols / 64; ++run) {
          if (run * 64 >= cols) break;
          KERNELS_UNROLL
          for (int j = 0; j < 8; ++j) {
            const float* const from = outputs[i][run * 8 + j];
            float* const to = slab + lane / 4 * kPitch + j * 8 + lane % 4 * 2;
            *reinterpret_cast<::float2*>(to) = {from[0] * inverse[0], from[1] * inverse[0]};
            *reinterpret_cast<::float2*>(to + 8 * kPitch) = {from[2] * inverse[1], from[3] * inverse[1]};
          }
          __syncwarp();
#pragma unroll 1
          for (int x = lane; x < 16 * 8; x += 32) {
            const int r = row(i, 0) - lane / 4 + x / 8, col = run * 64 + x % 8 * 8;
            if (r >= rows.count || col >= cols) continue;
            Pack<float, 8> values;
            memcpy(values.v, __builtin_assume_aligned(slab + x / 8 * kPitch + x % 8 * 8, 16), 32);
            const int64_t to = token + rows.query(r);
            in_packs(p.out_pack, values, rows.head(r) * v_dim + rows.part * kCols + col, [&](const auto& some, int64_t at) {
              constexpr int N = std::decay_t<decltype(some)>::size;
              put(end, apply_map(map, some, fetch_operands<N>(map, to, at), to, at), to, at);
            });
          }
          __syncwarp();
        }
      }
    }

   private:
    using half_type = ::kernels::half;

    // Keys of the tile that a row sees: [begin, end).
    struct Seen {
      int begin, end;
    };
    static __device__ __forceinline__ Seen seen_of(const P& p, const PrefillRows& rows, int row, int64_t pos) {
      const int64_t query = rows.query(row);
      const KeyRange seen = key_range(p.score, {rows.b, query, query, rows.queries, rows.keys});
      return {int(greater<int64_t>(seen.begin - pos, 0)), int(lesser<int64_t>(seen.end - pos, kKeys))};
    }
    __device__ __forceinline__ float reference(int i, int half) const { return largest[i][half] == -infinity<float>() ? 0.f : largest[i][half]; }
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
  };
};

template <class Body, class P>
Status start_prefill(const Exec& ex, const P& problem) {
  const PrefillGrid grid(problem.shape, Body::kRows, Body::kCols);
  const int64_t blocks = grid.blocks(problem.shape.batch);
  if (blocks == 0) return unsupported("attention: there are more than 2^31 tiles of queries");
  Launch how;
  how.grid.x = unsigned(blocks);
  how.threads = Body::max_threads;
  how.shared = Body::shared_bytes(problem.shape);
  return launch<Body>(ex, how, {problem, grid});
}

}  // namespace detail
KERNELS_END
