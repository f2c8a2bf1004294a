// Decoding: attention of a few queries of each sequence, which reads keys and values once for each tile of rows.
//
//   keys of:   seq 0, head 0   seq 1, head 0   seq 2, head 0   seq 0, head 1  ...   an item: a sequence, a head of keys
//             [----+---------] [------+------] [-+-------+---] [------+------]
//   block:    |  0  |    1    |   2    |    3    |    4    |    5     |   ...       equal shares, wherever items begin
//                  \____________________ a cut item: blocks leave (m, l, o) in the workspace, the last merges
//
//   a block:  warp 0  keys  0-15, 64- 79 ...  each warp has a state and an output of its own;
//             warp 1  keys 16-31, 80- 95 ...  they are merged where an item ends or is cut
//             warp 2  keys 32-47, ...         (or 32 or 64 keys at a time: WarpKeys)
//
//   two teams:  warps 0, 1  keys  0-15, ...   warps that share keys have rows of their own of the tile: what a warp's
//               warps 2, 3  keys 16-31, ...   registers cannot hold, its teammate does, and keys are read once
//
// The rows of an item are the queries of all heads that share its keys (grouped-query packing), up to 8, 16 or 32 in a
// tile. Items are ordered by head, then by sequence, and cut into units of keys; every block gets as many units as any
// other. So blocks that read different heads of a sequence do so at about the same time: these are adjacent in memory,
// which is faster (64 sequences of 4096 keys, 8 heads: 245.7 us, one sequence after the other 252.5). A block that has
// a whole item finishes it. All of this is found out on the device, from the lengths as they are when the kernel runs
// (decode_schedule.cuh). If bits must not depend on the batch, items are cut into a fixed number of parts instead, and
// a block gets those that begin among its units.
//
// How a warp multiplies is the business of Rows: on tensor cores (decode_tensor.cuh) or on CUDA cores
// (decode_plain.cuh).
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

constexpr int kDecodeKeys = 16;  // of a tile: as many as mma has rows

// Which of kTeams, whose warps take turns, the warp is in.
template <int kTeams>
__device__ __forceinline__ int team_of_warp() {
  return kTeams == 1 ? 0 : threadIdx.x / 32 % kTeams;
}

// The keys of a part that a warp takes, one step of the block after the other: kTiles tiles each time, or fewer where
// what is left of the part would not be enough for all warps. kTeams warps take the same keys, for other rows:
// kWarps counts them once.
template <int kWarps, int kTiles, int kTeams = 1>
struct WarpKeys {
  static constexpr int warps = kWarps, tiles = kTiles, teams = kTeams;
  // Which keys the warp has, and in which team it is.
  static __device__ __forceinline__ int number() { return threadIdx.x / (32 * kTeams); }
  static __device__ __forceinline__ int team() { return team_of_warp<kTeams>(); }

  uint32_t first, count;

  // Before a part's first step.
  __device__ __forceinline__ void begin(uint32_t part_begin) { block_ = part_begin, block_keys_ = 0; }
  // The next step of a part that ends at `end`. False: the warp has no keys any more.
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

  // Behind the last step of a part that ends at `end`: whether other warps have one more.
  __device__ __forceinline__ bool had_fewer(uint32_t end) const { return block_ < end; }

 private:
  uint32_t block_ = 0, block_keys_ = 0;  // where the block's step begins, and its keys
};

// A value of a warp that is seldom read. Where registers are short it lies in shared memory: otherwise the compiler has
// no registers to load operands of products ahead of time (16 sequences of 4,096 keys with 8 queries of 32 heads over
// 8: 75.6 us, and 86.6 with all in registers, H200). kWhich: tells apart several of one type.
template <class T, int kWarps, bool kInShared, int kWhich = 0>
class SpilledToShared {
 public:
  SpilledToShared() = default;
  __device__ __forceinline__ explicit SpilledToShared(const T& value) { set(value); }
  __device__ __forceinline__ const T& get() const { return mine(); }
  // What f(T&) returns.
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

// Counts the parts of an item that have been left in the workspace. The workspace needs no clearing: a counter whose
// upper 48 bits are not kMark counts as 0. With them, its 64 bits are a double's NaN whose payload no computation
// gives, so that what earlier calls of other kernels left there is not taken for a count.
class DecodeCounter {
 public:
  // By one thread of each block that will arrive, some time before.
  static __device__ __forceinline__ void prepare(unsigned long long* counter) {
    const unsigned long long found = *reinterpret_cast<volatile unsigned long long*>(counter);
    if (found >> 16 != kMark) atomicCAS(counter, found, kMark << 16);
  }
  // By one thread of a block, whose others have written before a barrier. Whether all `count` have arrived: what they
  // wrote can be read then.
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

  // Of a row of an item: which of the sequence's queries it is.
  __device__ __forceinline__ int query_of(int row) const { return int(unsigned(row) / unsigned(group)); }

  Q q;
  Kv kv;
  S score;
  Out out;
  AttentionShape shape;
  Attention options;
  float scale = 0;
  int dim = 0, v_dim = 0;
  int kv_heads = 0, group = 0;                // of an item: heads of keys that go together count once
  int tile_rows = 0, tiles = 0;               // of an item, at most
  int blocks = 0;                             // that keys are shared out to, at most
  int splits = 0;                             // parts of an item, if fixed
  int q_pack = 0, out_pack = 0;               // elements per access that the functors allow
  bool wide_kv = false;                       // whether they allow wide ones to keys and values: see decode_plain.cuh
  // What blocks leave, tile_rows to a part: see PartialSlots.
  unsigned long long* counters = nullptr;
  float2* states = nullptr;
  float* outputs = nullptr;
};

// The result of a row that has seen all keys: with logits to the base of 2, l is the sum of 2^(logit - m).
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
  // sums: of 2^(logit - m) times the values.
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

// From the logits of a warp's keys to their weights, for kTiles times 8 rows, of which each of kTeams has as many. Lane
// 4g + t has keys g and g + 8 of each 16 for rows 2t and 2t + 1 of each tile: as mma leaves them.
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

  // x: products of each tile of rows and some times 16 keys, of which there are `keys`; then weights. shrink(factors):
  // what was summed so far becomes so much less.
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
      // Of several tiles the last ones can be another warp's.
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
    return arch::exp2_flushed(m_[n][j] - softmax_reference(most_of(states, row_of(n, j))));
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  // The first row of the warp's team, and row j of those that a lane has of tile n.
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
  // m lies so far below the largest logit, to the base of 2, that the weights of small ones stay in the range of half;
  // and logits may grow so far beyond m before everything is scaled anew: seldom, then.
  static constexpr float kLead = 7.f, kMost = 15.f;

  Factors m_, l_;
  float scale_;
  uint32_t begin_[kTiles][2], count_[kTiles][2];  // the keys that a row sees
  int q_len_, kv_len_;
};

// kEarly: the first keys that are old (Attention::new_keys) are brought before the kernel ahead has ended.
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

  // What is looked at where a part ends.
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
    // Each part's queries are prefetched while the keys of the part before are worked on, and the first ones ahead of
    // all keys that are not ready before the kernel ahead has ended.
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
  // A part, which begins `at` units behind the block's first.
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

  // Eight rows of each team, from row `first` of the team's on, of a part, from all warps.
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

  static constexpr int kPartsAtOnce = 16;  // that are merged
  // Of each row, in shared memory: what the sums of these parts are multiplied by and what was summed before, and the
  // state of all so far.
  struct Merged {
    float (&factors)[kRows][kPartsAtOnce];
    float2 (&states)[kRows];
    float (&shrink)[kRows];
  };
  // Where the rows of an item's parts begin in the workspace: of the first, and of the others from `others` on.
  struct PartialOffsets {
    int64_t first, others, distance, step;  // step: the distance between sums
    __device__ __forceinline__ PartialOffsets(const P& p, const PartialSlots& partial_at)
        : first(partial_at.first * p.tile_rows),
          others(partial_at.others * p.tile_rows),
          distance(partial_at.distance * p.tile_rows),
          step(distance * p.v_dim) {}
  };

  // All parts of an item, of which this block has left the last one, in the order of keys. This code runs once in a
  // block, so that its instructions miss the instruction cache: it has to be short.
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
  // Four columns of a row, of each of `count` parts from the `first` on.
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
  // Of these parts, and of those before: a row to a warp, a part to a lane.
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
