// The host side of sample(), verify() and log_probs(), and their kernels: a block, or the blocks of a cluster, for each
// row of logits.
//
//   row:   | block 0: warp 0 | warp 1 | ... | block 1: warp 0 | ... |   a range of tokens for each warp
//
//   LargestOfRow   the largest tokens decide (greedy, top-k): one read; blocks send candidates to block 0
//   DrawOfRow      all tokens count: what fits is kept in shared memory between the passes
//   SampleRow      everything else (bias, typical ...): the algorithm of core/sampling_row.h
#pragma once

#include "../../tuning/sampling.h"
#include "draw.cuh"
#include "largest.cuh"
#include "row.cuh"

KERNELS_BEGIN
namespace detail {

// The number of largest tokens from which one is drawn; 0 if others count as well, -1 if parameters on the device
// decide.
inline int drawn_from(const SampleOptions& o, int64_t vocabulary) {
  if (o.temperature.on_device() || o.top_k.on_device() || o.typical.on_device()) return -1;
  const int k = o.temperature.value() == 0.f ? 1 : kept_by(o.top_k.value(), vocabulary);
  return k <= kMostListed && k < vocabulary && o.typical.value() >= 1.f ? k : 0;
}
// Whether rows are for DrawOfRow; false if parameters on the device decide.
inline bool decided_by_all(const SampleOptions& o, int64_t vocabulary) {
  if (o.temperature.on_device() || o.top_k.on_device() || o.typical.on_device()) return false;
  return o.temperature.value() != 0.f && kept_by(o.top_k.value(), vocabulary) == 0 && o.typical.value() >= 1.f;
}

// kListed: only logits of listed tokens are adjusted.
template <class P, int N, bool kListed>
struct SampleBody {
  static constexpr int max_threads = kSampleThreads, registers = 64;
  using Row = SampleRow<typename P::Source, N>;
  // In the order in which they are needed.
  struct Params {
    int few;  // drawn_from()
    P p;
  };

  // Shared memory: SampleRoom, ListedTokens if there are any, then a LargestRoom or kept logits. SampleRow has the
  // counts of listed tokens directly after the SampleRoom.
  static constexpr int kCounts = Row::kTile * int(sizeof(int32_t));
  static __device__ __forceinline__ void run(const Params& params) {
    const P& p = params.p;
    int rank = int(arch::cluster_rank()), blocks = int(arch::cluster_size());
    const int clusters = int(arch::clusters());
    int64_t row = arch::cluster_index();
    if constexpr (P::kOnlyDraws) {
      int few = params.few;
      if (few < 0) {
        const int32_t k = p.options.temperature.at(row) == 0.f ? 1 : kept_by(p.options.top_k.at(row), p.vocabulary);
        few = k <= kMostListed && k < p.vocabulary && p.options.typical.at(row) >= 1.f ? k : 0;
      }
      if (few > 0 && p.rows <= clusters && takes_listed(p, row)) {
        SampleRoom& room = room_of_block();
        unsigned char* const after_listed = reinterpret_cast<unsigned char*>(&room) + kBehindListed<kListed>;
        const LargestOfRow<P, N, kListed> largest(p, row, room, *reinterpret_cast<LargestRoom*>(after_listed), rank,
                                                  blocks);
        if (few == 1) return largest.greedy();
        if (largest.draw(few)) return;
        rank = 0, blocks = 1;  // the first block processes the whole row alone
        __syncthreads();       // all have read the listed tokens, whose memory is reused
      }
    }
    for (; row < p.rows; row += clusters) {
      if (P::kOnlyDraws && draws_from_all(p, row)) drawn(p, row, rank, blocks);
      else wholly(p, row, rank, blocks);
    }
  }

 private:
  // Whether the row's listed tokens, if there are any, fit; stores them.
  static __device__ __forceinline__ bool takes_listed(const P& p, int64_t row) {
    if constexpr (kListed)
      return listed_of_block().take(p.options, row, p.vocabulary);
    else
      return true;
  }
  static __device__ __forceinline__ bool draws_from_all(const P& p, int64_t row) {
    return (kListed || !p.options.adjusted()) && kept_by(p.options.top_k.at(row), p.vocabulary) == 0 &&
           p.options.temperature.at(row) != 0.f && p.options.typical.at(row) >= 1.f && takes_listed(p, row);
  }
  static __device__ __forceinline__ void drawn(const P& p, int64_t row, int rank, int blocks) {
    if constexpr (P::kOnlyDraws) {
      DrawOfRow<P, N, kListed> one(p, row, rank, blocks);
      one.draw(p, row);
      one.sync();  // all have seen the shared results
    }
  }
  // Called, not inlined, so that its registers do not burden rows that are done without it.
  static __device__ KERNELS_CALLED void wholly(const P& p, int64_t row, int rank, int blocks) {
    const SampleRules rules = p.rules(row);
    Row one(p.source, p.options, rules, row, int(p.vocabulary), rank, blocks);
    p.solve(one, rules, row);
    one.sync();  // all have seen the shared results
  }
};

template <class P, int N, bool kListed = false>
Status start_sample(const Exec& ex, const P& problem) {
  // Rows that are read one logit at a time are not worth another kernel; and some GPUs' blocks have no room for the
  // list.
  if constexpr (P::kOnlyDraws && N > 1 && !kListed) {
    const bool room = kBehindListed<true> + int(sizeof(LargestRoom)) <= ex.device().shared_per_block;
    if (problem.options.only_listed() && room) return start_sample<P, N, true>(ex, problem);
  }
  using Body = SampleBody<P, N, kListed>;
  Launch how;
  how.threads = kSampleThreads;
  int image = 0;
  KERNELS_TRY(image_architecture<Body>(ex, image));
  const bool newer = ex.device().capability >= 90 && image >= 90,
             packs = P::kOnlyDraws && (kListed || !problem.options.adjusted()),
             of_all = packs && decided_by_all(problem.options, problem.vocabulary);
  const int counts = problem.options.previous.p != nullptr ? Body::kCounts : 0,
            largest = packs ? kBehindListed<kListed> - kSampleRoom + int(sizeof(LargestRoom)) : 0,
            kept = of_all ? lesser(int(tuning::kSampleKeptBytes) / (newer ? 1 : 2),
                                   ex.device().shared_per_block - kSampleRoom)
                          : 0;
  how.shared = size_t(kSampleRoom + greater(counts, greater(largest, kept)));
  if (newer) {
    // As many blocks for each row as leave room for all rows at the same time. Clusters of 16 are not supported
    // everywhere.
    const int64_t room = tuning::kSampleBlocksPerMultiprocessor * ex.device().sm_count;
    for (int cluster = 16; cluster > 1; cluster /= 2) {
      if (problem.rows > room / cluster || problem.vocabulary < cluster * tuning::kSampleTokensPerBlock) continue;
      Launch larger = how;
      larger.cluster = cluster;
      larger.grid.x = unsigned(cluster);
      int64_t clusters = 0;
      if (!resident_clusters<Body>(ex, larger, clusters).ok() || clusters < problem.rows) continue;
      how.cluster = cluster;
      break;
    }
  }
  how.grid.x = unsigned(lesser<int64_t>(problem.rows, int64_t(1) << 26) * how.cluster);
  return launch<Body>(ex, how, {packs ? drawn_from(problem.options, problem.vocabulary) : 0, problem});
}

// make(source) returns the problem.
template <class Load, class Make>
Status run_samples(const Exec& ex, const Load& logits, int64_t vocabulary, const Make& make) {
  const auto problem = make(cached(logits));
  using Problem = std::decay_t<decltype(problem)>;
  using Source = typename Problem::Source;
  constexpr int wide = widest_of<Source>() < 8 ? widest_of<Source>() : 8;
  if (max_pack_of(problem.source, vocabulary) >= wide && vocabulary % wide == 0)
    return start_sample<Problem, wide>(ex, problem);
  return start_sample<Problem, 1>(ex, problem);
}

// A thread for each sequence.
template <class P>
struct VerifiedBody {
  static constexpr int max_threads = 128, registers = 64;
  using Params = P;
  static __device__ __forceinline__ void run(const Params& p) {
    const int64_t sequences = p.rows / (p.drafts + 1), all = int64_t(gridDim.x) * max_threads;
    for (int64_t i = int64_t(blockIdx.x) * max_threads + threadIdx.x; i < sequences; i += all) p.finish(i);
  }
};

template <class P>
Status finish_sequences(const Exec& ex, const P& problem) {
  using Body = VerifiedBody<P>;
  Launch how;
  how.threads = Body::max_threads;
  how.grid.x = unsigned(lesser<int64_t>(
      (problem.rows / (problem.drafts + 1) + Body::max_threads - 1) / Body::max_threads, int64_t(1) << 30));
  return launch<Body>(ex, how, problem);
}

}  // namespace detail
KERNELS_END
