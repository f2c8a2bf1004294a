// Flash decoding: attention for a few queries per sequence. Keys and values are read once per tile of rows.
//
//   keys of:   seq 0, head 0   seq 1, head 0   seq 2, head 0   seq 0, head 1  ...   item: one sequence, one KV head
//             [----+---------] [------+------] [-+-------+---] [------+------]
//   block:    |  0  |    1    |   2    |    3    |    4    |    5     |   ...       equal shares, across items
//                  \____________________ a split item: blocks store (m, l, o) in the workspace, the last one merges
//
//   a block:  warp 0  keys  0-15, 64- 79 ...  each warp has its own softmax state and output;
//             warp 1  keys 16-31, 80- 95 ...  they are merged where an item ends or is split
//             warp 2  keys 32-47, ...         (or 32 or 64 keys at a time: WarpKeys)
//
//   two teams:  warps 0, 1  keys  0-15, ...   warps of a team pair read the same keys for different rows of the tile:
//               warps 2, 3  keys 16-31, ...   what one warp's registers cannot hold, the other's do
//
// The rows of an item are the queries of all heads that share a KV head (GQA packing), up to 8, 16 or 32 per tile.
// Items are ordered by head, then by sequence, and divided into units of keys; every block gets the same number of
// units. So blocks read the heads of a sequence, which are adjacent in memory, at about the same time, which is faster
// (64 sequences of 4096 keys, 8 heads: 245.7 us, one sequence after the other 252.5). A block that has a whole item
// also writes its result. The device computes the schedule from the lengths when the kernel runs (decode_schedule.cuh).
// If the bits of a result must not depend on the batch, items are split into a fixed number of parts instead, and a
// block gets those that begin among its units.
//
// Rows says how a warp multiplies: on tensor cores (decode_tensor.cuh) or on CUDA cores (decode_plain.cuh).
#pragma once

#include "../../arch/arch.cuh"
#include "../../arch/sm80.cuh"
#include "../../arch/sm90.cuh"
#include "../../core/attention_call.h"
#include "../pointwise.cuh"
#include "../uninitialized.cuh"
#include "decode_schedule.cuh"
#include "tile.cuh"

KERNELS_BEGIN
namespace detail {

constexpr int kDecodeKeys = 16;  // per tile: the rows of an mma

// The warp's team. Consecutive warps belong to different teams.
template <int kTeams>
__device__ __forceinline__ int team_of_warp() {
  return kTeams == 1 ? 0 : threadIdx.x / 32 % kTeams;
}

// Distributes the keys of a part over the warps of a block. In each step of the block a warp takes kTiles tiles, or
// fewer if the rest of the part would not suffice for all warps. kTeams warps take the same keys, for different rows;
// kWarps counts them once.
template <int kWarps, int kTiles, int kTeams = 1>
struct WarpKeys {
  static constexpr int warps = kWarps, tiles = kTiles, teams = kTeams;
  // The warp's number among those with different keys, and its team.
  static __device__ __forceinline__ int number() { return threadIdx.x / (32 * kTeams); }
  static __device__ __forceinline__ int team() { return team_of_warp<kTeams>(); }

  uint32_t first, count;

  // Before a part's first step.
  __device__ __forceinline__ void begin(uint32_t part_begin) { block_ = part_begin, block_keys_ = 0; }
  // Moves to the next step of a part that ends at `end`. False: the warp has no more keys.
  __device__ __forceinline__ bool next(uint32_t end) {
    block_ += block_keys_;
    if (block_ >= end) return false;
    uint32_t most = kDecodeKeys;
    if constexpr (kTiles > 1) {
      const uint32_t tiles = (end - block_ + kWarps * kDecodeKeys - 1) / (kWarps * kDecodeKeys);
      most *= lesser<uint32_t>(kTiles, tiles);
    }
    block_keys_ = kWarps * most;
    first = block_ + number() * most;
    if (first >= end) return false;
    count = lesser(most, end - first);
    return true;
  }

  // After the warp's last step of a part that ends at `end`: whether other warps have one more.
  __device__ __forceinline__ bool had_fewer(uint32_t end) const { return block_ < end; }

 private:
  uint32_t block_ = 0, block_keys_ = 0;  // the first key of the block's step, and how many it has
};

// A per-warp value that is read rarely. If registers are scarce it is kept in shared memory: otherwise the compiler has
// none left to load operands of products ahead of time (16 sequences of 4,096 keys with 8 queries of 32 heads over 8:
// 75.6 us, with all in registers 86.6, H200). kWhich distinguishes several values of one type.
template <class T, int kWarps, bool kInShared, int kWhich = 0>
class SpilledToShared {
 public:
  SpilledToShared() = default;
  __device__ __forceinline__ explicit SpilledToShared(const T& value) { set(value); }
  __device__ __forceinline__ const T& get() const { return mine(); }
  // Calls f(T&) and returns its result.
  template <class F>
  __device__ __forceinline__ auto change(const F& f) {
    T value = mine();
    const auto result = f(value);
    set(value);
    return result;
  }

 private:
  static __device__ __forceinline__ T& mine() {
    __shared__ Uninitialized<T, kWarps> all;
    return all.items[threadIdx.x / 32];
  }
  static __device__ __forceinline__ void set(const T& value) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mine() = value;
    __syncwarp();
  }
};
template <class T, int kWarps, int kWhich>
class SpilledToShared<T, kWarps, false, kWhich> {
 public:
  SpilledToShared() = default;
  __device__ __forceinline__ explicit SpilledToShared(const T& value) : value_(value) {}
  __device__ __forceinline__ const T& get() const { return value_; }
  template <class F>
  __device__ __forceinline__ auto change(const F& f) {
    return f(value_);
  }

 private:
  T value_;
};

// Counts the parts of an item that have been stored in the workspace. The workspace needs no clearing: a counter whose
// upper 48 bits are not kMark counts as 0. With kMark, its 64 bits are a NaN of double with a payload that no
// computation produces, so data of earlier kernels is not mistaken for a count.
class DecodeCounter {
 public:
  // Called by one thread of each block that will arrive, some time before.
  static __device__ __forceinline__ void prepare(unsigned long long* counter) {
    const unsigned long long found = *reinterpret_cast<volatile unsigned long long*>(counter);
    if (found >> 16 != kMark) atomicCAS(counter, found, kMark << 16);
  }
  // Called by one thread of a block, after a barrier behind the block's stores. True if all `count` blocks have
  // arrived: then their stores are visible.
  static __device__ __forceinline__ bool arrive(unsigned long long* counter, int count) {
    const bool last = int(arch::atomic_add_released(counter, 1) & 0xffff) + 1 == count;
    if (last) *counter = kMark << 16;
    return last;
  }

 private:
  static constexpr unsigned long long kMark = 0x7ff4c0de5eedull;
};

template <class Q_, class Kv_, class S_, class Out_>
struct DecodeProblem {
  using Q = Q_;
  using Kv = Kv_;
  using S = S_;
  using Out = Out_;

  DecodeProblem(const Q& queries, const Kv& keys, const S& s, const Out& sink, const AttentionShape& sizes,
                const Attention& opts)
      : q(queries), kv(keys), score(s), out(sink), shape(sizes), options(opts) {}

  // The query of the sequence that a row of an item belongs to.
  __device__ __forceinline__ int query_of(int row) const { return int(unsigned(row) / unsigned(group)); }

  Q q;
  Kv kv;
  S score;
  Out out;
  AttentionShape shape;
  Attention options;
  float scale = 0;
  int dim = 0, v_dim = 0;
  int kv_heads = 0, group = 0;                // KV heads that share a tile count as one
  int tile_rows = 0, tiles = 0;               // the most rows of a tile, and tiles of an item
  int blocks = 0;                             // the most blocks
  int splits = 0;                             // fixed number of parts per item, or 0
  int q_pack = 0, out_pack = 0;               // elements per access that the functors allow
  bool wide_kv = false;                       // whether keys and values allow wide accesses (decode_plain.cuh)
  // Partial results in the workspace, tile_rows per part (PartialSlots).
  unsigned long long* counters = nullptr;
  float2* states = nullptr;
  float* outputs = nullptr;
};

// The result of a row after all keys. Logits are to the base of 2, and l is the sum of 2^(logit - m).
template <class P>
class DecodeRow {
 public:
  __device__ __forceinline__ DecodeRow(const P& p, int b, int kv_head, int row, float m, float l)
      : p_(p),
        token_(p.shape.first_query(b) + p.query_of(row)),
        head_(int64_t(kv_head) * p.group + (row - p.query_of(row) * p.group)) {
    SoftmaxState<float> state{m * kLn2, l};
    scale_ = 1.f;
    if constexpr (score_sinks<typename P::S>) scale_ = state.merge(sink_state(p.score, head_)).mine;
    scale_ *= state.inverse();
    lse_ = state.logsumexp();
  }
  // sums: the sum of 2^(logit - m) times the values.
  __device__ __forceinline__ void write(const Pack<float, 4>& sums, int col) const {
    const int64_t at = head_ * p_.v_dim + col;
    const Pack<float, 4> results = sums * scale_;
    if (p_.out_pack >= 4) {
      put_some(results, at);
    } else {
      KERNELS_ROLLED
      for (int i = 0; i < 4; ++i) put_some(Pack<float, 1>{{results.v[i]}}, at + i);
    }
    if (col == 0) p_.options.write_lse(lse_, token_, head_, p_.shape.heads);
  }

 private:
  template <int N>
  __device__ __forceinline__ void put_some(const Pack<float, N>& some, int64_t at) const {
    put_mapped(sink_end(p_.out), sink_map(p_.out), some, token_, at);
  }

  const P& p_;
  int64_t token_, head_;
  float scale_, lse_;
};

// Turns the logits of a warp's keys into weights (online softmax), for kTiles times 8 rows per team. Lane 4g + t has
// keys g and g + 8 of each 16 for rows 2t and 2t + 1 of each tile, the accumulator layout of mma.
template <class P, int kTiles, int kTeams = 1>
class DecodeWeights {
 public:
  using Factors = float[kTiles][2];

  __device__ __forceinline__ void begin(const P& p, const DecodePart& part) {
    q_len_ = int(p.shape.queries(part.b));
    kv_len_ = int(p.kv.length(part.b));
    scale_ = p.scale * kLog2e;
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) {
        m_[n][j] = -infinity<float>(), l_[n][j] = 0.f;
        const int row = row_of(n, j), query = p.query_of(part.tile * p.tile_rows + row);
        const KeyRange seen = key_range(p.score, {part.b, query, query, q_len_, kv_len_});
        begin_[n][j] = uint32_t(seen.begin);
        count_[n][j] = row < part.rows ? greater(0, lesser(part.end, int(seen.end)) - int(seen.begin)) : 0;
      }
    }
  }

  // x: on entry the products of each tile of rows with a multiple of 16 keys, of which `keys` exist; on return weights.
  // Calls shrink(factors) if the sums so far are to be rescaled.
  template <int kProducts, class Shrink>
  __device__ __forceinline__ void weigh(const P& p, const DecodePart& part, float (&x)[kProducts][4],
                                        uint32_t first_key, uint32_t keys, const Shrink& shrink) {
    constexpr int kKeyTiles = kProducts / kTiles;
    const uint32_t first = first_key + lane() / 4;
    bool grows = false;
    float most[kTiles][2];
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) most[n][j] = -infinity<float>();
      // If there are several tiles, the last ones may belong to another warp.
      uint32_t count[2] = {count_[n][0], count_[n][1]};
      if constexpr (kKeyTiles > 1) {
        KERNELS_UNROLL
        for (int j = 0; j < 2; ++j)
          count[j] = greater(0, lesser(int(count[j]), int(first_key + keys - begin_[n][j])));
      }
      KERNELS_UNROLL
      for (int i = 0; i < 4 * kKeyTiles; ++i) {
        const int j = i % 2;
        float& logit = x[n * kKeyTiles + i / 4][i % 4];
        const uint32_t at = first + i / 2 * 8;
        bool visible = at - begin_[n][j] < count[j];
        if constexpr (score_transforms<typename P::S> || score_masks<typename P::S>) {
          if (visible) {
            const int row = part.tile * p.tile_rows + row_of(n, j), query = p.query_of(row);
            const ScoreAt place{part.b, int64_t(part.head) * p.group + (row - query * p.group), query, at, q_len_,
                                kv_len_};
            if constexpr (score_masks<typename P::S>) visible = key_visible(p.score, place);
            logit = transform_logits(p.score, Pack<float, 1>{{logit * p.scale}}, place).v[0] * kLog2e;
          }
        } else {
          logit *= scale_;
        }
        logit = visible ? logit : -infinity<float>();
        most[n][j] = greater(most[n][j], logit);
      }
      KERNELS_UNROLL
      for (int j = 0; j < 2; ++j) grows |= most[n][j] > m_[n][j] + kMost;
    }
    if (__any_sync(0xffffffffu, grows)) {
      Factors factors;
      KERNELS_UNROLL
      for (int n = 0; n < kTiles; ++n) {
        KERNELS_UNROLL
        for (int j = 0; j < 2; ++j) {
          KERNELS_UNROLL
          for (int mask = 4; mask < 32; mask *= 2)
            most[n][j] = greater(most[n][j], __shfl_xor_sync(0xffffffffu, most[n][j], mask));
          const float before = m_[n][j];
          m_[n][j] = greater(before, most[n][j] - kLead);
          factors[n][j] = arch::exp2_flushed(before - softmax_reference(m_[n][j]));
          l_[n][j] *= factors[n][j];
        }
      }
      shrink(factors);
    }
    KERNELS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      KERNELS_UNROLL
      for (int i = 0; i < 4 * kKeyTiles; ++i) {
        float& weight = x[n * kKeyTiles + i / 4][i % 4];
        weight = arch::exp2_flushed(weight - softmax_reference(m_[n][i % 2]));
        l_[n][i % 2] += weight;
      }
    }
  }

  // Writes the softmax states of the warp's rows.
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
  // The factor of the warp's sums of a row when the sums of all warps are added.
  template <int kWarps, int kRows>
  __device__ __forceinline__ float factor(const float2 (&states)[kWarps][kRows], int n, int j) const {
    return arch::exp2_flushed(m_[n][j] - softmax_reference(most_of(states, row_of(n, j))));
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  // The first row of the warp's team, and below, row j of a lane in tile n.
  static __device__ __forceinline__ int first_row() { return team_of_warp<kTeams>() * (kTiles * 8); }
  static __device__ __forceinline__ int row_of(int n, int j) { return first_row() + n * 8 + lane() % 4 * 2 + j; }
  template <int kWarps, int kRows>
  static __device__ __forceinline__ float most_of(const float2 (&states)[kWarps][kRows], int row) {
    float m = states[0][row].x;
    KERNELS_UNROLL
    for (int warp = 1; warp < kWarps; ++warp) m = greater(m, states[warp][row].x);
    return m;
  }

 private:
  // m is kLead below the largest logit (to the base of 2), so that the weights of small logits stay in the range of
  // half. Logits may exceed m by kMost before sums are rescaled, which makes that rare.
  static constexpr float kLead = 7.f, kMost = 15.f;

  Factors m_, l_;
  float scale_;
  uint32_t begin_[kTiles][2], count_[kTiles][2];  // the keys that a row attends to
  int q_len_, kv_len_;
};

// kEarly: the first old keys (Attention::new_keys) are loaded before the previous kernel has ended.
template <class P, class Rows, bool kEarly = false>
struct DecodeBody {
  using Steps = typename Rows::Steps;
  static constexpr int kWarps = Rows::warps, kKeyWarps = Steps::warps, kRows = Rows::rows;
  static constexpr int max_threads = kWarps * 32, registers = Rows::registers;
  static constexpr bool waits_for_predecessor_itself = true;
  using Params = P;
  using Schedule = typename Rows::Schedule;
  using Cursor = typename Schedule::Cursor;
  using States = float2[kKeyWarps][kRows];

  // State that is needed only at the end of a part.
  template <class T>
  using Kept = SpilledToShared<T, kWarps, Rows::short_of_registers>;

  static __device__ __forceinline__ void run(const P& p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const auto wait = [] {
      if constexpr (Rows::fills_shared) arch::grid_dependency_wait();
      else arch::grid_dependency_pass();
    };
    if (!kEarly) wait();
    const Schedule all(p);
    if (all.idle()) {
      if (kEarly) wait();
      return;
    }
    const Kept<Schedule> schedule(all);
    Kept<Cursor> cursor(all.cursor(p));
    Rows rows(p, shared, cursor.get());
    Kept<DecodePart> next;
    DecodePart part;
    int64_t at = 0;
    // The queries of a part are prefetched while the keys of the previous part are processed; the first queries before
    // all keys that cannot be loaded before the previous kernel has ended.
    for (bool first = true, more = true;; first = false) {
      if (!first) rows.begin(part);
      if (more)
        more = next.change([&](DecodePart& n) { return cursor.change([&](Cursor& from) { return from.next(p, n); }); });
      int filled = 0;
      if constexpr (kEarly) {
        if (first) filled = rows.fill_ready(), wait();
      }
      if (more) rows.prefetch(next.get());
      if (first) rows.fill(filled);
      else work(p, schedule.get(), rows, part, at);
      if (!first) at += part.next_unit - part.unit;
      if (!more) return;
      part = next.get();
    }
  }

 private:
  // Processes a part, which begins `at` units after the block's first unit.
  static __device__ __forceinline__ void work(const P& p, const Schedule& schedule, Rows& rows, const DecodePart& part,
                                              int64_t at) {
    __shared__ States states;
    __shared__ PartialSlots partial_at;
    __shared__ bool last;
    if (threadIdx.x == 0 && !part.whole()) {
      partial_at = schedule.partial_slots(p, part, at);
      DecodeCounter::prepare(p.counters + partial_at.counter);
    }
    Steps keys;
    keys.begin(uint32_t(part.begin));
    KERNELS_ROLLED
    while (keys.next(uint32_t(part.end))) rows.take(part, keys.first, keys.count);
    rows.end_keys(keys.had_fewer(uint32_t(part.end)));
    rows.write_states(states[Steps::number()]);
    __syncthreads();
    KERNELS_ROLLED
    for (int n = 0; n < kRows / (8 * Steps::teams) && n * 8 < part.rows; ++n) {
      rows.write_sums(n, states);
      __syncthreads();
      hand_over(p, part, rows, states, n * 8, partial_at);
      __syncthreads();
    }
    if (part.whole()) return;
    if (threadIdx.x == 0) last = DecodeCounter::arrive(p.counters + partial_at.counter, partial_at.count);
    __syncthreads();
    if (last) merge(p, part, partial_at);
  }

  // Adds up the sums of all warps for eight rows of each team, from the team's row `first` on.
  static __device__ __forceinline__ void hand_over(const P& p, const DecodePart& part, const Rows& rows,
                                                   const States& states, int first, const PartialSlots& partial_at) {
    const unsigned packs = unsigned(p.v_dim) / 4;
    KERNELS_ROLLED
    for (unsigned i = threadIdx.x; i < 8 * Steps::teams * packs; i += max_threads) {
      const int number = int(i / packs), col = int(i % packs * 4),
                row = number / 8 * (kRows / Steps::teams) + first + number % 8;
      if (row >= part.rows) break;
      const float m = DecodeWeights<P, 1>::most_of(states, row), reference = softmax_reference(m);
      float l = 0.f;
      Pack<float, 4> sums = broadcast<4>(0.f);
      KERNELS_UNROLL
      for (int warp = 0; warp < kKeyWarps; ++warp) {
        l += states[warp][row].y * arch::exp2_flushed(states[warp][row].x - reference);
        sums = sums + rows.sums_of(warp, number, col);
      }
      if (part.whole()) {
        DecodeRow<P>(p, part.b, part.head, part.tile * kRows + row, m, l).write(sums, col);
      } else {
        const int64_t at = partial_at.mine * p.tile_rows + row;
        if (col == 0) p.states[at] = make_float2(m, l);
        put_floats(p.outputs + at * p.v_dim + col, sums);
      }
    }
  }

  static constexpr int kPartsAtOnce = 16;  // merged at a time
  // In shared memory, per row: the factors of the sums of these parts, the factor of the sums so far, and the state of
  // all parts so far.
  struct Merged {
    float (&factors)[kRows][kPartsAtOnce];
    float2 (&states)[kRows];
    float (&shrink)[kRows];
  };
  // The first rows of an item's parts in the workspace: the first part's, and those of the others from `others` on.
  struct PartialOffsets {
    int64_t first, others, distance, step;  // step: the distance between sums
    __device__ __forceinline__ PartialOffsets(const P& p, const PartialSlots& partial_at)
        : first(partial_at.first * p.tile_rows),
          others(partial_at.others * p.tile_rows),
          distance(partial_at.distance * p.tile_rows),
          step(distance * p.v_dim) {}
  };

  // Merges all parts of an item in the order of keys, after this block has stored the last one. This code runs once per
  // block, so its instructions miss the instruction cache: it has to be short.
  static __device__ __forceinline__ void merge(const P& p, const DecodePart& item, const PartialSlots& partial_at) {
    __shared__ float factors[kRows][kPartsAtOnce];
    __shared__ float2 states[kRows];
    __shared__ float shrink[kRows];
    const Merged merged{factors, states, shrink};
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, packs = int(unsigned(p.v_dim) / 4),
              results = item.rows * packs;
    const PartialOffsets partials(p, partial_at);
    KERNELS_ROLLED
    for (int first_pack = 0; first_pack < results; first_pack += max_threads) {
      const int i = lesser(first_pack + int(threadIdx.x), results - 1), row = int(unsigned(i) / unsigned(packs)),
                col = (i - row * packs) * 4;
      Pack<float, 4> all = broadcast<4>(0.f);
      float2 state;
      KERNELS_ROLLED
      for (int first = 0; first < partial_at.count; first += kPartsAtOnce) {
        const int count = lesser(kPartsAtOnce, partial_at.count - first);
        Pack<float, 4> some[kPartsAtOnce];
        read_sums(p, partials, first, count, row, col, some);
        merge_states(p, partials, first, count, item.rows, lane, warp, merged);
        __syncthreads();
        state = merged.states[row];
        all = all * merged.shrink[row];
        KERNELS_UNROLL
        for (int u = 0; u < kPartsAtOnce; ++u) {
          if (u >= count) break;
          all = all + some[u] * merged.factors[row][u];
        }
        __syncthreads();
      }
      if (first_pack + int(threadIdx.x) < results)
        DecodeRow<P>(p, item.b, item.head, item.tile * kRows + row, state.x, state.y).write(all, col);
    }
  }
  // Adds up four columns of a row over `count` parts, from part `first` on.
  static __device__ __forceinline__ void read_sums(const P& p, const PartialOffsets& partials, int first, int count,
                                                   int row, int col, Pack<float, 4> (&some)[kPartsAtOnce]) {
    const float* sums = p.outputs + (partials.others + first * partials.distance + row) * p.v_dim + col;
    KERNELS_UNROLL
    for (int u = 0; u < kPartsAtOnce; ++u) {
      if (u >= count) break;
      const float* const at = u == 0 && first == 0 ? p.outputs + (partials.first + row) * p.v_dim + col : sums;
      const ::float4 x = __ldcg(reinterpret_cast<const ::float4*>(at));
      sums += partials.step;
      some[u] = {{x.x, x.y, x.z, x.w}};
    }
  }
  // Computes the factors of these parts and of those before: one row per warp, one part per lane.
  static __device__ __forceinline__ void merge_states(const P& p, const PartialOffsets& partials, int first, int count,
                                                      int rows, int lane, int warp, const Merged& merged) {
    const int64_t from = partials.others + first * partials.distance;
    KERNELS_ROLLED
    for (int r = warp; r < rows; r += kWarps) {
      float2 mine = make_float2(-infinity<float>(), 0.f), before = mine;
      if (lane < count)
        mine = __ldcg(p.states + (first + lane == 0 ? partials.first : from + lane * partials.distance) + r);
      if (first > 0) before = merged.states[r];
      float m = greater(before.x, mine.x);
      KERNELS_UNROLL
      for (int mask = kPartsAtOnce / 2; mask > 0; mask /= 2) m = greater(m, __shfl_xor_sync(0xffffffffu, m, mask));
      const float reference = softmax_reference(m), factor = arch::exp2_flushed(mine.x - reference);
      float l = mine.y * factor;
      KERNELS_UNROLL
      for (int mask = kPartsAtOnce / 2; mask > 0; mask /= 2) l += __shfl_xor_sync(0xffffffffu, l, mask);
      __syncwarp();  // all have read
      if (lane < kPartsAtOnce) merged.factors[r][lane] = factor;
      if (lane == 0) {
        merged.shrink[r] = arch::exp2_flushed(before.x - reference);
        merged.states[r] = make_float2(m, l + before.y * merged.shrink[r]);
      }
    }
  }
};

}  // namespace detail
KERNELS_END
