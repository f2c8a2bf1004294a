// The router's kernels: a warp chooses a token's experts; blocks sort choices by expert, stably.
//
//   RouteBody       warp = token:  lane l has the logits of experts l, l + 32, ...; choice i ends in lane i
//   SortCountBody   block = a range of choices:  counts the choices of each expert
//   SortBody        the same ranges: writes each choice to its place, after those of earlier experts and blocks
#pragma once

#include "../router.h"
#include "team.cuh"

KERNELS_BEGIN
namespace detail {

// The lane with the largest rank, the lowest of equal ones. Every lane gets the result.
__device__ __forceinline__ int best_lane(uint32_t rank) {
  return __ffs(int(__ballot_sync(0xffffffffu, rank == __reduce_max_sync(0xffffffffu, rank)))) - 1;
}

// A warp for each token: lane l has kEach experts, l, l + 32 and so on.
template <class Logits, int kEach>
struct RouteBody {
  static constexpr int max_threads = 128, registers = kEach > 8 ? 128 : 64;
  struct Params {
    Logits logits;
    Router options;
    int32_t* ids;
    float* weights;
    int64_t tokens;
    int experts, top_k;
  };

  static __device__ __forceinline__ void run(const Params& p) {
    constexpr int kWarps = max_threads / 32;
    KERNELS_ROLLED
    for (int64_t token = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; token < p.tokens;
         token += int64_t(gridDim.x) * kWarps)
      route_token(p, token);
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  static __device__ __forceinline__ void route_token(const Params& p, int64_t token) {
    const Router& options = p.options;
    const Lanes<32> lanes;
    const int lane = lanes.rank();
    float logits[kEach];
    fetch_logits(p, token, logits);
    float largest = -infinity<float>(), sum = 0;
    KERNELS_UNROLL
    for (int j = 0; j < kEach; ++j) largest = logits[j] > largest ? logits[j] : largest;
    largest = (lanes.max)(largest);
    if (options.softmax_of_all()) {
      KERNELS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        if (lane + 32 * j < p.experts) sum += Router::shifted_exp(logits[j], largest);
      }
      sum = lanes.sum(sum);
    }
    uint32_t ranks[kEach];
    KERNELS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const int expert = lane + 32 * j;
      ranks[j] = expert < p.experts ? rank_of(options.selection_score(logits[j], expert, largest, sum)) : 0;
    }
    if (options.group_count() > 1) keep_groups(p, ranks);

    // Choice i goes to lane i.
    int id = 0;
    float logit = 0;
    KERNELS_ROLLED
    for (int i = 0; i < p.top_k; ++i) {
      uint32_t best = 0;
      int at = 0;
      KERNELS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        if (ranks[j] > best) best = ranks[j], at = j;
      }
      const uint32_t all = __reduce_max_sync(kAll, best);
      const int chosen = __reduce_min_sync(kAll, best == all ? lane + 32 * at : 32 * kEach - 1);
      float its_logit = 0;
      KERNELS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        if (chosen == lane + 32 * j) its_logit = logits[j], ranks[j] = 0;
      }
      its_logit = __shfl_sync(kAll, its_logit, chosen & 31);
      if (lane == i) id = chosen, logit = its_logit;
    }
    const bool mine = lane < p.top_k;
    float score = mine ? options.score(logit, largest, sum) : 0.f;
    if (options.chosen_alone()) {
      const float highest = (lanes.max)(mine && score > -infinity<float>() ? score : -infinity<float>());
      const float part = mine ? Router::shifted_exp(score, highest) : 0.f;
      score = Router::normalized(part, lanes.sum(part));
    }
    const float total = options.renormalizes() ? lanes.sum(score) : 1.f;
    if (!mine) return;
    const int here = options.id_here(id);
    p.ids[token * p.top_k + lane] = here;
    p.weights[token * p.top_k + lane] = here < 0 ? 0.f : options.weight(score, total);
  }

  static __device__ __forceinline__ void fetch_logits(const Params& p, int64_t token, float (&logits)[kEach]) {
    const int lane = threadIdx.x & 31;
    decltype(fetch<1>(p.logits, token, 0)) fetched[kEach];
    KERNELS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      if (lane + 32 * j < p.experts) fetched[j] = fetch<1>(p.logits, token, lane + 32 * j);
    }
    KERNELS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      logits[j] = -infinity<float>();
      if (lane + 32 * j < p.experts)
        logits[j] = convert<float>(resolve(p.logits, fetched[j], token, lane + 32 * j)).v[0];
    }
  }

  // Excludes experts in groups that are not kept.
  static __device__ __forceinline__ void keep_groups(const Params& p, uint32_t (&ranks)[kEach]) {
    const int lane = threadIdx.x & 31, groups = p.options.group_count(), size = p.experts / groups;
    const auto is_in = [&](int j, int begin) { return unsigned(lane + 32 * j - begin) < unsigned(size); };
    uint32_t mine = 0;  // lane g: the rank of group g
    KERNELS_ROLLED
    for (int g = 0; g < groups; ++g) {
      uint32_t first = 0, second = 0;
      KERNELS_UNROLL
      for (int j = 0; j < kEach; ++j) {
        if (!is_in(j, g * size)) continue;
        second = greater(second, lesser(first, ranks[j]));
        first = greater(first, ranks[j]);
      }
      uint32_t score = __reduce_max_sync(kAll, first);
      if (p.options.by_top_two()) {
        const bool owner = lane == best_lane(first);
        score = rank_of(value_of_rank(score) + value_of_rank(__reduce_max_sync(kAll, owner ? second : first)));
      }
      if (lane == g) mine = score;
    }
    uint32_t kept = 0;
    KERNELS_ROLLED
    for (int i = 0; i < p.options.groups_kept(); ++i) {
      const int best = best_lane(mine);
      kept |= 1u << best;
      if (lane == best) mine = 0;
    }
    KERNELS_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const int expert = lane + 32 * j;
      if (expert < p.experts && (kept >> (expert / size) & 1u) == 0) ranks[j] = 0;
    }
  }
};

// ---- sorting -------------------------------------------------------------------------------------------------------

// Each warp processes a part of the choices with its own table: first the number of choices of each expert, then the
// place of the next one. So the order needs no atomics, and is the same each time.
struct SortParams {
  const int32_t* ids;
  ExpertOrder to;
  int32_t* counts;  // blocks x experts, where there are several blocks
  int64_t choices, each;
  int experts;
};

struct SortTables {
  static constexpr int kThreads = 512, kWarps = kThreads / 32;  // a thread for each expert
  static_assert(kThreads >= kMaxExperts, "a thread for each expert");
  int32_t of_warp[kWarps][kMaxExperts];
  int32_t of_warps[kWarps];

  // Calls f(index of the choice, its expert or -1, how many with the same expert precede it in the warp, how many there
  // are) for 32 choices at a time of this warp's part, on all lanes.
  template <class F>
  static __device__ __forceinline__ void each(const SortParams& p, const F& f) {
    constexpr int kAhead = 8;
    const int lane = threadIdx.x & 31;
    const int64_t block_begin = lesser(p.choices, blockIdx.x * p.each),
                  block_end = lesser(p.choices, block_begin + p.each);
    const int64_t part = (p.each / 32 + kWarps - 1) / kWarps * 32;
    const int64_t begin = lesser(block_end, block_begin + threadIdx.x / 32 * part),
                  end = lesser(block_end, begin + part);
    KERNELS_ROLLED
    for (int64_t first = begin; first < end; first += 32 * kAhead) {
      int32_t ids[kAhead];
      KERNELS_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = first + 32 * i + lane;
        ids[i] = at < end ? p.ids[at] : -1;
      }
      KERNELS_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int32_t id = ids[i] >= 0 && ids[i] < p.experts ? ids[i] : -1;
        const unsigned same = __match_any_sync(0xffffffffu, id);
        f(first + 32 * i + lane, id, __popc(same & ((1u << lane) - 1)), __popc(same), end);
        __syncwarp();
      }
    }
  }

  // Counts each expert's choices in the block's warps. Returns the total for the expert with this thread's number.
  __device__ __forceinline__ int32_t count(const SortParams& p) {
    KERNELS_ROLLED
    for (int i = threadIdx.x; i < kWarps * kMaxExperts; i += kThreads) of_warp[i / kMaxExperts][i % kMaxExperts] = 0;
    __syncthreads();
    int32_t* const mine = of_warp[threadIdx.x / 32];
    each(p, [&](int64_t, int32_t id, int before, int all, int64_t) {
      if (id >= 0 && before == 0) mine[id] += all;
    });
    __syncthreads();
    int32_t sum = 0;
    KERNELS_UNROLL
    for (int w = 0; w < kWarps; ++w) sum += of_warp[w][threadIdx.x];
    return sum;
  }

  // The sum of the values of lower-numbered threads.
  __device__ __forceinline__ int32_t before(int32_t value) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const auto rising = [lane](int32_t x) {
      KERNELS_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, x, distance);
        x += lane >= distance ? other : 0;
      }
      return x;
    };
    const int32_t up_to = rising(value);
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();
    const int32_t warps = rising(lane < kWarps ? of_warps[lane] : 0);
    const int32_t ahead = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
    return up_to - value + (warp > 0 ? ahead : 0);
  }
};

struct SortCountBody {
  static constexpr int max_threads = SortTables::kThreads, registers = 64;
  using Params = SortParams;
  static __device__ __forceinline__ void run(const Params& p) {
    __shared__ SortTables tables;
    const int32_t sum = tables.count(p);
    if (int(threadIdx.x) < p.experts) p.counts[int64_t(blockIdx.x) * p.experts + threadIdx.x] = sum;
  }
};

struct SortBody {
  static constexpr int max_threads = SortTables::kThreads, registers = 64;
  using Params = SortParams;
  static __device__ __forceinline__ void run(const Params& p) {
    __shared__ SortTables tables;
    const int expert = threadIdx.x;
    // For this thread's expert: the choices of all blocks, and of the blocks before this one.
    int32_t all = tables.count(p), ahead = 0;
    if (gridDim.x > 1) {
      all = 0;
      if (expert < p.experts) {
#pragma unroll 8
        for (int b = 0; b < int(gridDim.x); ++b) {
          const int32_t count = p.counts[int64_t(b) * p.experts + expert];
          ahead += b < int(blockIdx.x) ? count : 0;
          all += count;
        }
      }
    }
    const int32_t offset = tables.before(all);
    if (blockIdx.x == 0 && expert < p.experts) {
      p.to.offsets[expert] = offset;
      if (expert == p.experts - 1) p.to.offsets[p.experts] = offset + all;
    }
    int32_t next = offset + ahead;
    KERNELS_UNROLL
    for (int w = 0; w < SortTables::kWarps; ++w) {
      const int32_t count = tables.of_warp[w][expert];
      tables.of_warp[w][expert] = next;
      next += count;
    }
    __syncthreads();
    int32_t* const mine = tables.of_warp[threadIdx.x / 32];
    SortTables::each(p, [&](int64_t choice, int32_t id, int before, int same, int64_t end) {
      const int32_t place = id >= 0 ? mine[id] + before : -1;
      __syncwarp();
      if (id >= 0 && before == 0) mine[id] += same;
      if (choice >= end) return;
      p.to.places[choice] = place;
      if (place >= 0) p.to.order[place] = int32_t(choice);
    });
    // The last expert's thread knows where rows end.
    if (expert == p.experts - 1) tables.of_warps[0] = offset + all;
    __syncthreads();
    KERNELS_ROLLED
    for (int64_t i = tables.of_warps[0] + int64_t(blockIdx.x) * max_threads + threadIdx.x; i < p.choices;
         i += int64_t(gridDim.x) * max_threads)
      p.to.order[i] = -1;
  }
};

}  // namespace detail
KERNELS_END
