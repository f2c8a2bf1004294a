// Decoding: attention of a few queries of each sequence, which reads all keys and values once.
//
// The rows of an item are the queries of all heads that share keys. The items of all sequences stand one behind the other, cut into
// units of keys, and each block gets as many units as any other, wherever an item begins or ends. A block that has a
// whole item finishes it. Of an item that is cut, each block leaves the state of its part in the workspace, and a second kernel
// merges these. All of this is found out on the device, from the lengths as they are when the kernels run.
//
// The warps of a block go through the keys side by side, 16 at a time, each with a state and an output of its own, and meet where
// an item ends or is cut. How a warp multiplies is the business of Rows: on tensor cores (decode_tensor.cuh) or on CUDA cores
// (decode_plain.cuh).
#pragma once

#include "../arch/arch.cuh"
#include "../arch/sm80.cuh"
#include "../arch/sm90.cuh"
#include "../core/attention_call.h"
#include "attention_tile.cuh"
#include "pointwise.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int kDecodeKeys = 16;  // that a warp takes at a time: a unit

// Floats at a multiple of 16 bytes.
template <int N>
__device__ __forceinline__ Pack<float, N> floats_at(const float* p) {
  Pack<float, N> out;
  KERNELS_UNROLL
  for (int i = 0; i < N; i += 4) {
    const ::float4 some = *reinterpret_cast<const ::float4*>(p + i);
    out.v[i] = some.x, out.v[i + 1] = some.y, out.v[i + 2] = some.z, out.v[i + 3] = some.w;
  }
  return out;
}
template <int N>
__device__ __forceinline__ void put_floats(float* p, const Pack<float, N>& v) {
  KERNELS_UNROLL
  for (int i = 0; i < N; i += 4) *reinterpret_cast<::float4*>(p + i) = make_float4(v.v[i], v.v[i + 1], v.v[i + 2], v.v[i + 3]);
}

// A part of the keys of an item, for the rows of one of its tiles.
struct DecodePart {
  int b, head, tile, rows, begin, end;
  int unit;  // of the item, the first of the part
  bool ends;

  __device__ __forceinline__ bool starts() const { return unit == 0; }
  __device__ __forceinline__ bool whole() const { return starts() && ends; }
};

template <class Q_, class Kv_, class S_, class Out_>
struct DecodeProblem {
  using Q = Q_;
  using Kv = Kv_;
  using S = S_;
  using Out = Out_;

  DecodeProblem(const Q& queries, const Kv& keys, const S& s, const Out& sink, const AttentionShape& sizes, const Attention& opts)
      : q(queries), kv(keys), score(s), out(sink), shape(sizes), options(opts) {}

  Q q;
  Kv kv;
  S score;
  Out out;
  AttentionShape shape;
  Attention options;
  float scale = 0;
  int dim = 0, v_dim = 0, group = 0;
  int tile_rows = 0, tiles = 0;  // of an item, at most
  int blocks = 0;                // that keys are shared out to, at most
  bool merged_by_item = false;
  int q_pack = 0, kv_pack = 0, out_pack = 0;  // elements per access that the functors allow
  // What blocks leave: two parts each, of which the first goes on with an item and the second begins one.
  float2* states = nullptr;
  float* outputs = nullptr;

  __device__ __forceinline__ int64_t left_at(int block, bool begins, int row) const { return (2 * int64_t(block) + begins) * tile_rows + row; }
};

// Of a tile of rows: keys [begin, end), how many rows it has, and its units.
struct DecodeKeys {
  int begin, end, rows, units;
};
template <class P>
__device__ __forceinline__ DecodeKeys keys_of(const P& p, int64_t b, int tile) {
  const int q_len = int(p.shape.queries(b)), all = q_len * p.group, first = tile * p.tile_rows;
  if (first >= all) return {0, 0, 0, 0};
  const int rows = lesser(p.tile_rows, all - first);
  const KeyRange seen = key_range(p.score, {b, first / p.group, (first + rows - 1) / p.group, q_len, p.kv.length(b)});
  // Rows without keys have a result as well.
  return {int(seen.begin), int(seen.end), rows, greater(1, int(unsigned(seen.end - seen.begin + kDecodeKeys - 1) / unsigned(kDecodeKeys)))};
}

// Walks through a block's parts.
template <class P>
class DecodeCursor {
 public:
  // `left` units, from the one that stands `offset` behind the first of sequence b.
  __device__ __forceinline__ DecodeCursor(const P& p, int b, int64_t offset, int64_t left) : left_(left), b_(b) {
    int64_t head_units = 0;
    for (int tile = 0; tile < p.tiles; ++tile) head_units += keys_of(p, b, tile).units;
    head_ = int(quotient(offset, head_units));
    offset -= head_ * head_units;
    keys_ = keys_of(p, b, 0);
    while (offset >= keys_.units) {
      offset -= keys_.units;
      keys_ = keys_of(p, b, ++tile_);
    }
    unit_ = int(offset);
  }
  __device__ __forceinline__ bool next(const P& p, DecodePart& part) {
    if (left_ == 0) return false;
    while (unit_ == keys_.units) {
      unit_ = 0;
      if (++tile_ == p.tiles) tile_ = 0, ++head_;
      if (head_ == p.shape.kv_heads) head_ = 0, ++b_;
      keys_ = keys_of(p, b_, tile_);
    }
    const int count = int(lesser<int64_t>(left_, keys_.units - unit_)), begin = keys_.begin + unit_ * kDecodeKeys;
    part = {b_, head_, tile_, keys_.rows, begin, lesser(keys_.end, begin + count * kDecodeKeys), unit_, unit_ + count == keys_.units};
    left_ -= count;
    unit_ += count;
    return true;
  }

 private:
  int64_t left_;
  int b_, head_ = 0, tile_ = 0, unit_;
  DecodeKeys keys_;
};

// How the units of all sequences are shared out: `blocks` get any, block i from unit total * i / blocks on.
struct DecodeShares {
  int64_t total;
  int blocks;

  __device__ __forceinline__ int64_t first(int block) const { return block < blocks ? quotient(total * block, blocks) : total; }
  __device__ __forceinline__ int block_of(int64_t unit) const { return int(quotient((unit + 1) * blocks - 1, total)); }
};
// A unit: `offset` behind the first of sequence b.
struct DecodeUnit {
  int64_t offset;
  int b;
};

template <class P>
__device__ __forceinline__ int64_t units_of(const P& p, int64_t b) {
  int64_t sum = 0;
  for (int tile = 0; tile < p.tiles; ++tile) sum += keys_of(p, b, tile).units;
  return sum * p.shape.kv_heads;
}
// By all threads of a block, of which each calls look(shares, begin, end, before, up_to) for its sequences [begin, end), and the units
// before these and up to their end.
template <class P, class F>
__device__ __forceinline__ DecodeShares share_out(const P& p, const F& look) {
  __shared__ int64_t sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int64_t each = (p.shape.batch + blockDim.x - 1) / blockDim.x;
  const int64_t begin = lesser<int64_t>(threadIdx.x * each, p.shape.batch), end = lesser(begin + each, p.shape.batch);
  int64_t mine = 0;
  for (int64_t b = begin; b < end; ++b) mine += units_of(p, b);
  int64_t up_to = mine;
  KERNELS_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) sums[warp] = up_to;
  __syncthreads();
  int64_t total = 0;
  for (int i = 0; i < int(blockDim.x) / 32; ++i) {
    if (i < warp) up_to += sums[i];
    total += sums[i];
  }
  const DecodeShares shares{total, int(lesser<int64_t>(p.blocks, total))};
  look(shares, begin, end, up_to - mine, up_to);
  __syncthreads();
  return shares;
}
// The unit that a block begins with.
template <class P>
__device__ __forceinline__ DecodeShares find_first(const P& p, int block, DecodeUnit& found) {
  return share_out(p, [&](const DecodeShares& shares, int64_t begin, int64_t, int64_t before, int64_t up_to) {
    int64_t offset = shares.first(block) - before;
    if (offset < 0 || shares.first(block) >= up_to) return;
    int64_t b = begin;
    for (int64_t units; offset >= (units = units_of(p, b)); ++b) offset -= units;
    found = {offset, int(b)};
  });
}
// How many units there are before sequence b.
template <class P>
__device__ __forceinline__ DecodeShares count_before(const P& p, int b, int64_t& count) {
  return share_out(p, [&](const DecodeShares&, int64_t begin, int64_t end, int64_t before, int64_t) {
    if (b < begin || b >= end) return;
    for (int64_t other = begin; other < b; ++other) before += units_of(p, other);
    count = before;
  });
}

// The result of a row that has seen all keys: with logits to the base of 2, l is the sum of 2^(logit - m).
template <class P>
class DecodeRow {
 public:
  __device__ __forceinline__ DecodeRow(const P& p, int b, int kv_head, int row, float m, float l)
      : p_(p), token_(p.shape.first_query(b) + row / p.group), head_(int64_t(kv_head) * p.group + row % p.group) {
    SoftmaxState<float> state{m * kLn2, l};
    scale_ = 1.f;
    if constexpr (score_sinks<typename P::S>) scale_ = state.merge(sink_state(p.score, head_)).mine;
    scale_ *= state.inverse();
    lse_ = state.logsumexp();
  }
  // sums: of 2^(logit - m) times the values.
  template <int N>
  __device__ __forceinline__ void write(const Pack<float, N>& sums, int col) const {
    const auto map = sink_map(p_.out);
    const auto sink = sink_end(p_.out);
    in_packs(p_.out_pack, sums * scale_, head_ * p_.v_dim + col, [&](const auto& some, int64_t at) {
      constexpr int M = std::decay_t<decltype(some)>::size;
      put(sink, apply_map(map, some, fetch_operands<M>(map, token_, at), token_, at), token_, at);
    });
    if (col == 0) p_.options.write_lse(lse_, token_, head_, p_.shape.heads);
  }

 private:
  const P& p_;
  int64_t token_, head_;
  float scale_, lse_;
};

// From the logits of a warp's 16 keys to their weights, for kTiles times 8 rows. Lane 4g + t has keys g and g + 8 for rows 2t and
// 2t + 1 of each tile: as mma leaves them.
template <class P, int kTiles>
class DecodeWeights {
 public:
  using Values = float[kTiles][4];
  using Factors = float[kTiles][2];

  __device__ __forceinline__ void begin(const P& p, const DecodePart& part) {
    q_len_ = int(p.shape.queries(part.b));
    kv_len_ = int(p.kv.length(part.b));
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        m_[n][j] = -infinity<float>(), l_[n][j] = 0.f;
        const int row = row_of(n, j), query = (part.tile * p.tile_rows + row) / p.group;
        const KeyRange seen = key_range(p.score, {part.b, query, query, q_len_, kv_len_});
        begin_[n][j] = row < part.rows ? int(seen.begin) : 0;
        end_[n][j] = row < part.rows ? lesser(part.end, int(seen.end)) : 0;
      }
    }
  }

  // x: products of queries and keys, then weights. shrink(factors): what was summed so far becomes so much less.
  template <class Shrink>
  __device__ __forceinline__ void weigh(const P& p, const DecodePart& part, Values& x, int first_key, const Shrink& shrink) {
    const int key = first_key + lane() / 4;
    bool grows = false;
    float most[kTiles][2];
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int j = i % 2, at = key + i / 2 * 8;
        bool visible = at >= begin_[n][j] && at < end_[n][j];
        if constexpr (score_transforms<typename P::S> || score_masks<typename P::S>) {
          if (visible) {
            const int row = part.tile * p.tile_rows + row_of(n, j), query = row / p.group;
            const ScoreAt place{part.b, int64_t(part.head) * p.group + (row - query * p.group), query, at, q_len_, kv_len_};
            if constexpr (score_masks<typename P::S>) visible = key_visible(p.score, place);
            x[n][i] = transform_logits(p.score, Pack<float, 1>{{x[n][i] * p.scale}}, place).v[0] * kLog2e;
          }
        } else {
          x[n][i] *= p.scale * kLog2e;
        }
        if (!visible) x[n][i] = -infinity<float>();
      }
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        most[n][j] = greater(x[n][j], x[n][2 + j]);
        grows |= most[n][j] > m_[n][j] + kMost;
      }
    }
    if (__any_sync(0xffffffffu, grows)) {
      Factors factors;
      KERNELS_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        KERNELS_UNROLL
        for (int j = 0; j < 2; ++j) {
          KERNELS_UNROLL
          for (int mask = 4; mask < 32; mask *= 2) most[n][j] = greater(most[n][j], __shfl_xor_sync(0xffffffffu, most[n][j], mask));
          const float before = m_[n][j];
          m_[n][j] = greater(before, most[n][j] - kLead);
          factors[n][j] = arch::exp2_flushed(before - reference(m_[n][j]));
          l_[n][j] *= factors[n][j];
        }
      }
      shrink(factors);
    }
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int i = 0; i < 4; ++i) {
        x[n][i] = arch::exp2_flushed(x[n][i] - reference(m_[n][i % 2]));
        l_[n][i % 2] += x[n][i];
      }
    }
  }

  // The states of all rows of the warp.
  __device__ __forceinline__ void write(float2* states) {
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        KERNELS_UNROLL
        for (int mask = 4; mask < 32; mask *= 2) l_[n][j] += __shfl_xor_sync(0xffffffffu, l_[n][j], mask);
        if (lane() < 4) states[row_of(n, j)] = make_float2(m_[n][j], l_[n][j]);
      }
    }
  }
  // What the warp's sums of a row are multiplied by when all warps' are added up.
  template <int kWarps, int kRows>
  __device__ __forceinline__ float factor(const float2 (&states)[kWarps][kRows], int n, int j) const {
    return arch::exp2_flushed(m_[n][j] - reference(most_of(states, row_of(n, j))));
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int row_of(int n, int j) { return n * 8 + lane() % 4 * 2 + j; }
  static __device__ __forceinline__ float reference(float m) { return m == -infinity<float>() ? 0.f : m; }
  template <int kWarps, int kRows>
  static __device__ __forceinline__ float most_of(const float2 (&states)[kWarps][kRows], int row) {
    float m = states[0][row].x;
    KERNELS_UNROLL
    for (int warp = 1; warp < kWarps; ++warp) m = greater(m, states[warp][row].x);
    return m;
  }

 private:
  // m lies so far below the largest logit, to the base of 2, that the weights of small ones stay in the range of half; and logits may
  // grow so far beyond m before everything is scaled anew: seldom, then.
  static constexpr float kLead = 7.f, kMost = 15.f;

  Factors m_, l_;
  int begin_[kTiles][2], end_[kTiles][2], q_len_, kv_len_;
};

template <class P, class Rows>
struct DecodeBody {
  static constexpr int kWarps = Rows::warps, kRows = Rows::rows;
  static constexpr int max_threads = kWarps * 32, registers = Rows::registers;
  using Params = P;
  using States = float2[kWarps][kRows];

  static __device__ __forceinline__ void run(const P& p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ DecodeUnit begin;
    __shared__ States states;
    // Everything ahead has ended: the kernel that merges reads lengths without waiting.
    arch::grid_dependency_trigger();
    const DecodeShares shares = find_first(p, int(blockIdx.x), begin);
    const int64_t count = shares.first(int(blockIdx.x) + 1) - shares.first(int(blockIdx.x));
    if (count == 0) return;
    DecodeCursor<P> cursor(p, begin.b, begin.offset, count);
    Rows rows(p, shared, cursor);
    DecodePart part;
    while (cursor.next(p, part)) {
      rows.begin(part);
      for (int key = part.begin + int(threadIdx.x) / 32 * kDecodeKeys; key < part.end; key += kWarps * kDecodeKeys) rows.take(part, key);
      rows.write_states(states[threadIdx.x / 32]);
      __syncthreads();
      KERNELS_UNROLL
      for (int n = 0; n < kRows / 8; ++n) {
        if (n * 8 >= part.rows) break;
        rows.write_sums(n, states);
        __syncthreads();
        hand_over(p, part, rows, states, n * 8);
        __syncthreads();
      }
    }
  }

 private:
  // Eight rows of a part, from all warps.
  static __device__ __forceinline__ void hand_over(const P& p, const DecodePart& part, const Rows& rows, const States& states, int first) {
    const int packs = p.v_dim / 8;
    for (int i = threadIdx.x; i < 8 * packs; i += max_threads) {
      const int row = first + i / packs, col = i % packs * 8;
      if (row >= part.rows) break;
      const float m = DecodeWeights<P, 1>::most_of(states, row), reference = DecodeWeights<P, 1>::reference(m);
      float l = 0.f;
      Pack<float, 8> sums = broadcast<8>(0.f);
      KERNELS_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        l += states[warp][row].y * arch::exp2_flushed(states[warp][row].x - reference);
        sums = sums + rows.sums_of(warp, row - first, col);
      }
      if (part.whole()) {
        DecodeRow<P>(p, part.b, part.head, part.tile * kRows + row, m, l).write(sums, col);
      } else {
        const int64_t at = p.left_at(blockIdx.x, part.starts(), row);
        if (col == 0) p.states[at] = make_float2(m, l);
        put_floats(p.outputs + at * p.v_dim + col, sums);
      }
    }
  }
};

// Merges the parts of items that were cut: a block for each item, or where there are more items than blocks that could cut them, for
// each block that may end an item which another one began. Several along y share the columns.
template <class P>
struct DecodeMergeBody {
  // So small that it finds room beside the blocks that it waits for.
  static constexpr int max_threads = 128, registers = 96, kUnroll = 8;
  static constexpr bool early = true;
  using Params = P;
  static int64_t items(const P& p) { return p.shape.batch * p.shape.kv_heads * p.tiles; }

  static __device__ __forceinline__ void run(const P& p) {
    __shared__ float2 all_states[max_threads];
    __shared__ ::float4 all_sums[max_threads];
    const Cut cut = p.merged_by_item ? cut_of_item(p, int(blockIdx.x)) : cut_of_block(p, int(blockIdx.x));
    // One block waits in any case: what comes next in the stream waits for this kernel alone.
    if (cut.count >= 2 || blockIdx.x + blockIdx.y == 0) arch::grid_dependency_wait();
    if (cut.count < 2) return;
    const int rows = cut.rows, count = cut.count, first_row = cut.tile * p.tile_rows;
    // Where there are more threads than packs of results, several share a pack's parts.
    const int each = (p.v_dim / 4 + int(gridDim.y) - 1) / int(gridDim.y), first_pack = int(blockIdx.y) * each;
    const int packs = lesser(each, p.v_dim / 4 - first_pack), results = rows * packs, sharers = greater(1, max_threads / greater(1, results));
    for (int begin = 0; begin < results; begin += max_threads) {
      const int sharer = threadIdx.x / results, i = begin + int(threadIdx.x) - sharer * results;
      const int row = i / packs, col = (first_pack + i - row * packs) * 4;
      const bool works = sharer < sharers && i < results;
      Merged mine;
      for (int part = sharer; works && part < count; part += sharers * kUnroll) {
        float2 states[kUnroll];
        Pack<float, 4> some[kUnroll];
        KERNELS_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const int at = lesser(part + u * sharers, count - 1);
          const int64_t place = p.left_at(cut.first + at, at == 0, row);
          states[u] = p.states[place];
          some[u] = floats_at<4>(p.outputs + place * p.v_dim + col);
        }
        KERNELS_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          if (part + u * sharers < count) mine.take({states[u].x, states[u].y, some[u]});
        }
      }
      if (sharers > 1) {
        all_states[threadIdx.x] = make_float2(mine.m, mine.l);
        all_sums[threadIdx.x] = make_float4(mine.sums.v[0], mine.sums.v[1], mine.sums.v[2], mine.sums.v[3]);
        __syncthreads();
        for (int other = 1; sharer == 0 && other < sharers; ++other) {
          const int at = other * results + i;
          mine.take({all_states[at].x, all_states[at].y, floats_at<4>(&all_sums[at].x)});
        }
      }
      if (sharer == 0 && works) DecodeRow<P>(p, cut.b, cut.head, first_row + row, mine.m, mine.l).write(mine.sums, col);
    }
  }

 private:
  // An item whose parts are with blocks from `first` on.
  struct Cut {
    int b, head, tile, rows, first, count;
  };
  static __device__ __forceinline__ Cut cut_of_item(const P& p, int item) {
    __shared__ int64_t before;
    const int tile = item % p.tiles, head = item / p.tiles % int(p.shape.kv_heads), b = item / p.tiles / int(p.shape.kv_heads);
    const DecodeShares shares = count_before(p, b, before);
    int64_t first = before, head_units = 0;
    DecodeKeys keys = {};
    for (int i = 0; i < p.tiles; ++i) {
      const DecodeKeys some = keys_of(p, b, i);
      if (i < tile) first += some.units;
      if (i == tile) keys = some;
      head_units += some.units;
    }
    first += head_units * head;
    if (keys.units < 2) return {};
    const int block = shares.block_of(first);
    return {b, head, tile, keys.rows, block, shares.block_of(first + keys.units - 1) - block + 1};
  }
  static __device__ __forceinline__ Cut cut_of_block(const P& p, int block) {
    __shared__ DecodeUnit begin;
    const DecodeShares shares = find_first(p, block, begin);
    const int64_t count = shares.first(block + 1) - shares.first(block);
    if (count == 0) return {};
    DecodePart part;
    DecodeCursor<P>(p, begin.b, begin.offset, count).next(p, part);
    if (part.starts() || !part.ends) return {};
    const int first = shares.block_of(shares.first(block) - part.unit);
    return {part.b, part.head, part.tile, part.rows, first, block - first + 1};
  }

  struct Merged {
    float m = -infinity<float>(), l = 0.f;
    Pack<float, 4> sums = broadcast<4>(0.f);

    __device__ __forceinline__ void take(const Merged& other) {
      const float most = greater(m, other.m), reference = most == -infinity<float>() ? 0.f : most;
      const float before = arch::exp2_flushed(m - reference), factor = arch::exp2_flushed(other.m - reference);
      m = most;
      l = l * before + other.l * factor;
      sums = sums * before + other.sums * factor;
    }
  };
};

}  // namespace detail
KERNELS_END
