// LargestOfRow: for rows that their largest tokens decide (greedy, top-k). The row is read once:
//
//   blocks 0 ... n of a cluster:  each thread's candidates -> the block's -> one message to block 0, which draws
#pragma once

#include "../../core/sampling_row.h"
#include "block.cuh"

KERNELS_BEGIN
namespace detail {

// What the blocks of a cluster send to the first one about a row's largest tokens.
struct LargestRoom {
  static constexpr int kParts = 8, kItems = kFew, kMostBlocks = 16;
  uint64_t arrived;            // an mbarrier
  uint64_t summary[kMostBlocks];  // by each block: the key from which on it has sent all its tokens, and their number
  uint64_t entries[kFew];         // entry i of block b is at i * blocks + b
  float greatest[kParts][kSampleThreads];
  uint32_t item[kItems];       // thread + kSampleThreads * part
  uint32_t items;
  SampleRules rules;           // the row's, written by the first block's first thread
  uint64_t random;
  bool right;
};

// For rows that the k largest tokens decide, with k at most kMostListed, in calls that do not adjust logits, or with
// kListed only those of listed tokens. A block processes one row.
template <class P, int N, bool kListed>
class LargestOfRow : SamplePacks<typename P::Source, N, kListed> {
  using Packs = SamplePacks<typename P::Source, N, kListed>;

 public:
  __device__ __forceinline__ LargestOfRow(const P& p, int64_t row, SampleRoom& room, LargestRoom& largest, int rank,
                                          int blocks)
      : Packs(p.source, row, int(p.vocabulary), rank, blocks), p_(p), number_(row), room_(room), largest_(largest) {
    static_assert(kSampleWarps == 16, "their logarithm is 4");
    this->take(first_of(int(threadIdx.x)), Packs::kLogSegment + 4 + log_blocks(), vocabulary_);
  }

  // Writes the largest token.
  __device__ __forceinline__ void greedy() const {
    float most = -infinity<float>();
    int at = 0;
    const auto look = [&most, &at](const Pack<float, N>& x, int col, int) {
      float larger = most;
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) larger = arch::max_or_nan(larger, x.v[i]);
      at = larger != most ? col : at;
      most = larger;
    };
    this->template each_pack<kLooks>(0, look, [](int) {}, [this] { prepare([] {}); });
    const uint32_t greatest = key_of(most);
    uint32_t top, nothing;
    extremes_of_block(room_, greatest, top, nothing);
    // The token's place in its pack is determined once for the block, by reading the pack again.
    if (greatest == top) {
      const Pack<float, N> x = values_of(fetch_at(at), at);
      int i = N - 1;
      KERNELS_UNROLL
      for (int j = N - 2; j >= 0; --j) i = key_of(x.v[j]) == top ? j : i;
      atomicMax(&room_.top, ~uint32_t(at + i));
    }
    __syncthreads();
    if (blocks_ > 1) arch::cluster_wait();
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    uint64_t entry = uint64_t(top) << 32 | room_.top;
    if (blocks_ > 1) {
      if (lane == 0) send(largest_.summary[rank_], entry), arrive_expect(1);
      if (rank_ > 0) return;
    }
    if (blocks_ > 1) {
      arch::mbarrier_wait(&largest_.arrived, 0);
      entry = first_of_warp(largest_.summary[lesser(lane, blocks_ - 1)]);
    }
    conclude(first_of_entry(entry), entry);
  }

  // Draws from the k largest. In the first block, returns false if these were not found, as too many are equal, or are
  // in one block.
  __device__ __forceinline__ bool draw(int k) const {
    int log_part = log_looks;  // packs in a part, as a power of two
    while (LargestRoom::kParts * step_ << log_part < vocabulary_) ++log_part;
    const uint32_t greatest = greatest_of_parts(log_part), from = floor_of_block(k, greatest);
    list_parts(greatest, from, log_part);
    __syncthreads();
    const int parts = int(largest_.items);
    list_tokens(parts, from, log_part);
    __syncthreads();
    const Listed own = listed_here(parts, from);
    if (blocks_ > 1) {
      send_listed(own);
      if (rank_ > 0) return true;
    }
    return draw_from(k, own);
  }

 private:
  static constexpr uint32_t kTooMany = 0x7fffffffu;
  using Packs::kLooks;
  static constexpr int log_looks = kLooks == 8 ? 3 : 2;
  using Packs::kSegment, Packs::vocabulary_, Packs::rank_, Packs::blocks_, Packs::first_, Packs::step_, Packs::fetch_at,
      Packs::values_of;

  // What a block lists: all its tokens from a key on, and their number.
  struct Listed {
    uint64_t summary;
    int count;
  };

  // The key of the largest logit of all the thread's packs; the largest of each part is written to shared memory.
  __device__ __forceinline__ uint32_t greatest_of_parts(int log_part) const {
    float most = -infinity<float>(), of_part = most, of_some = most;
    this->template each_pack<kLooks>(
        0,
        [&of_some](const Pack<float, N>& x, int, int) {
          KERNELS_UNROLL
          for (int i = 0; i < N; ++i) of_some = arch::max_or_nan(of_some, x.v[i]);
        },
        [&](int time) {
          const int part = time << log_looks >> log_part;
          of_part = part << log_part == time << log_looks ? of_some : arch::max_or_nan(of_part, of_some);
          most = arch::max_or_nan(most, of_some);
          largest_.greatest[part][int(threadIdx.x)] = of_part;
          of_some = -infinity<float>();
        },
        [this] { prepare([this] { largest_.random = RowDraw(p_.options, number_, 0).token; }); });
    return key_of(most);
  }
  // A key that enough tokens of this block reach that the k largest of the row are listed, unless very many of these
  // are in this block.
  __device__ __forceinline__ uint32_t floor_of_block(int k, uint32_t greatest) const {
    const int share = (k + blocks_ - 1) >> log_blocks(), want = blocks_ == 1 ? k : lesser(k, share + share / 2 + 12);
    uint32_t high, low;
    extremes_of_block(room_, greatest, high, low);
    low = floor_for(want, low, high, [greatest](uint32_t key) { return __syncthreads_count(greatest >= key); });
    return greater(low, kLowestKey + 1);
  }
  // Lists the parts that have a token to list.
  __device__ __forceinline__ void list_parts(uint32_t greatest, uint32_t from, int log_part) const {
    if (greatest < from) return;
    const int thread = int(threadIdx.x);
    KERNELS_ROLLED
    for (int part = 0; part < LargestRoom::kParts && first_ + (part * step_ << log_part) < vocabulary_; ++part) {
      if (key_of(largest_.greatest[part][thread]) < from) continue;
      const uint32_t at = atomicAdd(&largest_.items, 1u);
      if (at < uint32_t(LargestRoom::kItems)) largest_.item[at] = uint32_t(part * kSampleThreads + thread);
    }
  }
  // Reads these parts again, with their packs distributed among all threads.
  __device__ __forceinline__ void list_tokens(int parts, uint32_t from, int log_part) const {
    const int packs = lesser(parts, LargestRoom::kItems) << log_part;
    constexpr int kUnroll = N < 8 ? 8 / N : 1;
    KERNELS_ROLLED
    for (int first = int(threadIdx.x); first < packs; first += kUnroll * kSampleThreads) {
      decltype(fetch_at(0)) fetched[kUnroll];
      int cols[kUnroll];
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        const int number = first + i * kSampleThreads;
        const int item = int(largest_.item[(number < packs ? number : first) >> log_part]),
                  begin = first_of(item % kSampleThreads);
        const int col = begin + ((item / kSampleThreads << log_part) + (number & ((1 << log_part) - 1))) * step_;
        cols[i] = number < packs ? col : vocabulary_;
        fetched[i] = fetch_at(cols[i] < vocabulary_ ? col : begin);
      }
      KERNELS_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        if (cols[i] >= vocabulary_) continue;
        const Pack<float, N> x = values_of(fetched[i], cols[i]);
        KERNELS_UNROLL
        for (int j = 0; j < N; ++j) {
          if (key_of(x.v[j]) >= from) list(entry_of(key_of(x.v[j]), uint32_t(cols[i] + j)));
        }
      }
    }
  }
  __device__ __forceinline__ Listed listed_here(int parts, uint32_t from) const {
    const int count = int(room_.shared.listed);
    return {uint64_t(from) << 32 |
                (parts <= LargestRoom::kItems && count <= kFew >> log_blocks() ? uint32_t(count) : kTooMany),
            count};
  }
  // Sends what this block has listed to the first block.
  __device__ __forceinline__ void send_listed(const Listed& own) const {
    arch::cluster_wait();
    const int thread = int(threadIdx.x), count = lesser(own.count, kFew >> log_blocks());
    if (thread < count) send(largest_.entries[thread * blocks_ + rank_], room_.shared.entries[thread]);
    if (thread == 0) send(largest_.summary[rank_], own.summary), arrive_expect(1 + count);
  }
  // In the first block: draws from what all blocks have listed.
  __device__ __forceinline__ bool draw_from(int k, const Listed& own) const {
    SampleShared& s = room_.shared;
    const int thread = int(threadIdx.x), lane = thread & 31, listed = own.count;
    uint64_t summaries = own.summary;
    if (blocks_ > 1) {
      arch::mbarrier_wait(&largest_.arrived, 0);
      summaries = largest_.summary[lesser(lane, blocks_ - 1)];
    }
    const uint32_t known = __reduce_max_sync(0xffffffffu, uint32_t(summaries >> 32)),
                   most_of_one = __reduce_max_sync(0xffffffffu, uint32_t(summaries));
    if (most_of_one == kTooMany) return false;
    // Every thread takes one or two entries.
    const bool two = most_of_one * uint32_t(blocks_) > uint32_t(kSampleThreads);
    const auto entry = [&](int at) {
      if (blocks_ == 1) return at < listed ? s.entries[at] : 0;
      return uint32_t(at >> log_blocks()) < uint32_t(largest_.summary[at & (blocks_ - 1)]) ? largest_.entries[at] : 0;
    };
    const uint64_t a = entry(thread), b = two ? entry(thread + kSampleThreads) : 0;
    const uint32_t first = first_of_entry(a), second = first_of_entry(b);
    uint32_t top, nothing;
    extremes_of_block(room_, greater(first, second), top, nothing);
    if (top != kNanKey && top > kLowestKey) {
      // All tokens are known only above the highest of the blocks' keys.
      const auto reach = [first, second, two](uint32_t key) {
        const int one = __syncthreads_count(first >= key);
        return two ? one + __syncthreads_count(second >= key) : one;
      };
      if (blocks_ > 1 || listed > k + k / 2 + 16) {
        const int reached = reach(known);
        if (reached < k && known > kLowestKey + 1) return false;
        const uint32_t floor = reached > k + k / 2 + 16 ? floor_for(k, known, top, reach) : known;
        if (thread == 0) s.listed = 0;
        __syncthreads();
        if (first >= floor) list(a);
        if (second >= floor) list(b);
        __syncthreads();
      }
      SampleBlock block(room_);
      const SampleRules& rules = largest_.rules;
      rank_listed(block, Levels(top, rules.temperature));
      if (thread < 32) {
        SampleWarp warp(s);
        draw_ranked(warp, keep_first(warp, k, rules), largest_.random);
      }
    }
    if (thread < 32) conclude(top, s.edge);
    return true;
  }

  // Everything that does not depend on the logits, done while their first loads are in flight.
  template <class More>
  __device__ __forceinline__ void prepare(const More& more) const {
    if (threadIdx.x == 0) largest_.items = room_.shared.listed = room_.top = 0;
    if (blocks_ > 1) {
      if (threadIdx.x == 0) {
        arch::mbarrier_init(&largest_.arrived, blocks_);
        arch::mbarrier_init_fence();
      }
      arch::cluster_arrive_relaxed();  // completed before the first message
    }
    if (rank_ > 0 || threadIdx.x > 0) return;
    largest_.rules = SampleRules(p_.options, number_);
    largest_.right = largest_.rules.right();
    more();
  }

  // A cluster has 1, 2, 4, 8 or 16 blocks.
  __device__ __forceinline__ int log_blocks() const { return 31 - __clz(blocks_); }
  // Warps take segments of 32 packs in turn, across blocks, so that each block has some of the frequent tokens.
  __device__ __forceinline__ int first_of(int thread) const {
    return (thread / 32 * blocks_ + rank_) * kSegment + (thread & 31) * N;
  }

  // The first, in order, of a warp's entries.
  static __device__ __forceinline__ uint64_t first_of_warp(uint64_t entry) {
    const uint32_t key = __reduce_max_sync(0xffffffffu, first_of_entry(entry));
    return uint64_t(key) << 32 | __reduce_max_sync(0xffffffffu, first_of_entry(entry) == key ? uint32_t(entry) : 0u);
  }
  __device__ __forceinline__ void list(uint64_t entry) const {
    const uint32_t at = atomicAdd(&room_.shared.listed, 1u);
    if (at < uint32_t(kFew)) room_.shared.entries[at] = entry;
  }
  // Sends to the first block, which waits for as many numbers as are announced.
  __device__ __forceinline__ void send(const uint64_t& to, uint64_t value) const {
    arch::store_async(arch::remote_address(&to, 0), value, arch::remote_address(&largest_.arrived, 0));
  }
  __device__ __forceinline__ void arrive_expect(int numbers) const {
    arch::mbarrier_arrive_expect_there(arch::remote_address(&largest_.arrived, 0), numbers * int(sizeof(uint64_t)));
  }
  __device__ __forceinline__ void conclude(uint32_t top, uint64_t entry) const {
    if (threadIdx.x > 0) return;
    const Sampled status = !largest_.right     ? Sampled::parameter
                           : top == kNanKey    ? Sampled::nan
                           : top <= kLowestKey ? Sampled::none
                                               : Sampled::ok;
    write_sampled(p_.options, p_.tokens, number_, status, status == Sampled::ok ? int64_t(id_of(entry)) : kNoToken);
  }

  const P& p_;
  int64_t number_;
  SampleRoom& room_;
  LargestRoom& largest_;
};

}  // namespace detail
KERNELS_END
