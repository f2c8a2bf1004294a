// A row of logits on the GPU, as core/sampling.h goes through it: by one block or the blocks of a cluster. It is read once from memory
// for the largest logit of each thread; from then on threads whose largest logit is below what is asked for have nothing to do.
#pragma once

#include "../arch/sm80.cuh"
#include "../core/row_call.h"
#include "../core/sampling.h"
#include "../exec.cuh"
#include "../functor.h"
#include "../tuning/sampling.h"

KERNELS_BEGIN
namespace detail {

constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;

// A block's shared memory. What the first block of a cluster has in `shared` is for all.
struct SampleRoom {
  SampleShared shared;
  uint64_t warp_sums[kSampleWarps];
  uint32_t warp_keys[2][kSampleWarps];
  uint32_t top, floor;
};

class SampleBlock {
 public:
  __device__ __forceinline__ explicit SampleBlock(SampleRoom& room) : room_(room) {}
  __device__ __forceinline__ SampleShared& shared() const { return room_.shared; }

  template <class F>
  __device__ __forceinline__ void each(int n, const F& f) const {
    for (int i = threadIdx.x; i < n; i += kSampleThreads) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ __forceinline__ uint64_t sum(int n, const F& f) const {
    uint64_t mine = 0;
    for (int i = threadIdx.x; i < n; i += kSampleThreads) mine += f(i);
    return scan_threads(room_, mine).all;
  }
  template <class F>
  __device__ __forceinline__ int count(int n, const F& f) const {
    return int(sum(n, [&f](int i) { return uint64_t(f(i) ? 1 : 0); }));
  }
  // Of at most 4 times as many values as there are threads.
  template <class Get, class Put>
  __device__ __forceinline__ uint64_t scan(int n, const Get& get, const Put& put) const {
    constexpr int most = kBins / kSampleThreads;
    const int each = (n + kSampleThreads - 1) / kSampleThreads, first = int(threadIdx.x) * each;
    uint64_t values[most], mine = 0;
    KERNELS_UNROLL
    for (int j = 0; j < most; ++j) {
      values[j] = j < each && first + j < n ? get(first + j) : 0;
      mine += values[j];
    }
    Scanned sums = scan_threads(room_, mine);
    KERNELS_UNROLL
    for (int j = 0; j < most; ++j) {
      if (j < each && first + j < n) put(first + j, sums.before);
      sums.before += values[j];
    }
    __syncthreads();
    return sums.all;
  }
  // Counts for each entry how many are larger, by as many threads as there are for it.
  template <class Put>
  __device__ __forceinline__ void ranks(int n, const uint64_t* entries, const Put& put) const {
    int share = 1;
    while (share < 32 && 2 * share * n <= kSampleThreads) share *= 2;
    for (int base = 0; base < n; base += kSampleThreads / share) {
      const int i = base + int(threadIdx.x) / share;
      const uint64_t entry = i < n ? entries[i] : ~uint64_t(0);
      int larger = 0;
      for (int j = int(threadIdx.x) & (share - 1); j < n; j += share) larger += entries[j] > entry ? 1 : 0;
      for (int distance = 1; distance < share; distance *= 2) larger += __shfl_xor_sync(0xffffffffu, larger, distance);
      if (i < n && (threadIdx.x & (share - 1)) == 0) put(i, larger);
    }
    __syncthreads();
  }

 private:
  // The sum of what the threads before this one have, and that of all. A function of its own, as many call it.
  struct Scanned {
    uint64_t before, all;
  };
  static __device__ __noinline__ Scanned scan_threads(SampleRoom& room, uint64_t mine) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const auto scan_lanes = [lane](uint64_t sum) {
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
      }
      return sum;
    };
    const uint64_t sum = scan_lanes(mine);
    if (lane == 31) room.warp_sums[warp] = sum;
    __syncthreads();
    const uint64_t others = scan_lanes(lane < kSampleWarps ? room.warp_sums[lane] : 0);
    const uint64_t all = __shfl_sync(0xffffffffu, others, kSampleWarps - 1), earlier = __shfl_sync(0xffffffffu, others, warp > 0 ? warp - 1 : 0);
    __syncthreads();  // the sums may be written again
    return {(warp > 0 ? earlier : 0) + sum - mine, all};
  }

  SampleRoom& room_;
};

// The row's address is found out once, where the source has one.
template <class Source>
KERNELS_HD auto one_row(const Source& source, int64_t row) {
  if constexpr (has_at_row<Source>::value) return source.at_row(row);
  else return source;
}

template <class Source, int N>
class SampleRow {
 public:
  // Packs that a thread asks for at a time, and for how many of its packs tokens of a list are counted at once.
  static constexpr int kLooks = N > 4 ? 4 : 8, kCounted = N == 1 ? 8 : 8192 / (kSampleThreads * N);
  static constexpr int kTile = kCounted * kSampleThreads * N, kSegment = 32 * N;

  __device__ __forceinline__ SampleRow(const Source& source, const SampleOptions& options, const SampleRules& rules, int64_t row, int vocabulary,
                                       SampleRoom& room, int32_t* counts)
      : source_(one_row(source, row)), adjust_(options, rules, row), adjusted_(options.adjusted()), row_(has_at_row<Source>::value ? 0 : row), vocabulary_(vocabulary), room_(room), block_(room),
        counts_(counts), rank_(int(arch::cluster_rank())), blocks_(int(arch::cluster_size())) {
    if (options.previous.p != nullptr) {
      previous_ = options.previous.at(row);
      listed_ = options.lengths[row];
    }
    if (is_first()) room.shared.listed = 0;
    first_ = (int(threadIdx.x / 32) * blocks_ + rank_) * kSegment + int(threadIdx.x & 31) * N;
    step_ = kSampleWarps * blocks_ * kSegment;
  }

  __device__ __forceinline__ SampleShared& shared() const { return *leaders(&room_.shared); }
  __device__ __forceinline__ SampleBlock& block() { return block_; }
  __device__ __forceinline__ bool leads() const { return rank_ == 0; }
  __device__ __forceinline__ bool is_first() const { return rank_ == 0 && threadIdx.x == 0; }
  __device__ __forceinline__ void sync() const {
    if (blocks_ > 1) {
      arch::cluster_arrive();
      arch::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ uint32_t look(int want, uint32_t& floor) {
    if (adjusted_) {
      greatest_ = 0;
      each(0, [this](uint32_t key, uint32_t) { greatest_ = greatest_ < key ? key : greatest_; });
    } else {
      float most = -infinity<float>();
      each_pack<kLooks>([&most](const Pack<float, N>& x, int) {
        KERNELS_UNROLL
        for (int i = 0; i < N; ++i) most = arch::max_or_nan(most, x.v[i]);
      });
      greatest_ = key_of(most);
    }

    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    uint32_t high = __reduce_max_sync(0xffffffffu, greatest_), low = __reduce_min_sync(0xffffffffu, greatest_);
    if (lane == 0) room_.warp_keys[0][warp] = high, room_.warp_keys[1][warp] = low;
    __syncthreads();
    high = __reduce_max_sync(0xffffffffu, room_.warp_keys[0][lane & (kSampleWarps - 1)]);
    low = __reduce_min_sync(0xffffffffu, room_.warp_keys[1][lane & (kSampleWarps - 1)]);
    uint32_t top = high;
    if (want > 1) {
      // A key that enough threads of this block reach, and few more: if each block has its share above a floor, all have.
      const int least = (want + blocks_ - 1) / blocks_;
      while (low < high) {
        const uint32_t middle = low + (high - low) / 2 + 1;
        const int reach = __syncthreads_count(greatest_ >= middle);
        if (reach >= least) low = middle;
        else high = middle - 1;
        if (reach >= least && reach <= least + least / 4 + 2) break;
      }
    }
    floor = low;
    if (blocks_ > 1) {
      if (threadIdx.x == 0) room_.top = top, room_.floor = floor;
      sync();
      const SampleRoom* const other = arch::in_block(&room_, unsigned(lane & (blocks_ - 1)));
      top = __reduce_max_sync(0xffffffffu, other->top);
      floor = __reduce_min_sync(0xffffffffu, other->floor);
    }
    if (want == 0) floor = 0;  // all tokens count, also those behind the largest of their thread
    if (want == 1) floor = top;
    return top;
  }

  __device__ __forceinline__ void list(uint32_t from) {
    const auto take = [this, from](uint32_t key, uint32_t id) {
      if (key >= from) append(entry_of(key, id), key);
    };
    if (adjusted_) return each(from, take);
    if (greatest_ < from) return;
    each_pack<kLooks>([&take](const Pack<float, N>& x, int col) {
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) take(key_of(x.v[i]), uint32_t(col + i));
    });
  }
  // Of one token, in a row that nothing changes.
  __device__ __forceinline__ uint32_t key_at(int64_t id) const { return key_of(convert<float>(resolve(source_, fetch<1>(source_, row_, id), row_, id)).v[0]); }

  // A function of its own, as it is long and many call it; so is what adjusts a logit.
  template <class V>
  __device__ __noinline__ void visit(uint32_t from, const V& all) {
    const V what = all;
    each(from, [this, &what](uint32_t key, uint32_t id) { what(*this, key, id); });
  }

  __device__ __forceinline__ void append(uint64_t entry, uint32_t key) const {
    SampleShared& s = shared();
    const uint32_t at = atomicAdd(&s.listed, 1u);
    if (at >= uint32_t(kFew)) return;
    s.entries[at] = entry;
    s.keys[at] = key;
  }

  __device__ __forceinline__ void clear_bins() const {
    block_.each(kBins, [this](int i) { room_.shared.mass[i] = 0, room_.shared.count[i] = 0; });
  }
  __device__ __forceinline__ void bin(int i, uint64_t mass) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(&room_.shared.mass[i]), static_cast<unsigned long long>(mass));
    atomicAdd(&room_.shared.count[i], 1u);
  }
  // Those of all blocks, in the first one.
  __device__ __forceinline__ void gather_bins() const {
    sync();
    if (blocks_ == 1 || !leads()) return;
    block_.each(kBins, [this](int i) {
      for (int block = 1; block < blocks_; ++block) {
        const SampleShared* const other = arch::in_block(&room_.shared, unsigned(block));
        room_.shared.mass[i] += other->mass[i];
        room_.shared.count[i] += other->count[i];
      }
    });
  }

  template <class V>
  __device__ __forceinline__ void sums(const V& what, uint64_t (&result)[4]) {
    SampleShared& s = shared();
    if (is_first()) {
      for (int i = 0; i < 4; ++i) s.sums[i] = 0;
    }
    for (int i = 0; i < 4; ++i) sums_[i] = 0;
    sync();
    visit(0, what);
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint64_t mine = sums_[i];
      KERNELS_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) mine += __shfl_xor_sync(0xffffffffu, mine, distance);
      if ((threadIdx.x & 31) == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&s.sums[i]), static_cast<unsigned long long>(mine));
    }
    sync();
    for (int i = 0; i < 4; ++i) result[i] = s.sums[i];
  }
  __device__ __forceinline__ void sum(int i, uint64_t value) { sums_[i] += value; }

 private:
  template <class T>
  __device__ __forceinline__ T* leaders(T* own) const {
    return blocks_ > 1 ? const_cast<T*>(arch::in_block(const_cast<const T*>(own), 0u)) : own;
  }

  __device__ __forceinline__ auto fetch_at(int col) const { return fetch<N>(source_, row_, col); }

  // f(values, column) for this thread's packs, kPacks of them asked for at a time. Warps take segments of 32 packs in turn, blocks in
  // turn as well, so that each has some of the tokens that are frequent.
  template <int kPacks, class F>
  __device__ __forceinline__ void each_pack(const F& f) const {
    for (int first = first_; first < vocabulary_; first += kPacks * step_) {
      // Packs that are not there are the first one again: a choice of addresses keeps all loads together.
      decltype(fetch_at(0)) fetched[kPacks];
      KERNELS_UNROLL
      for (int k = 0; k < kPacks; ++k) fetched[k] = fetch_at(first + k * step_ < vocabulary_ ? first + k * step_ : first);
      KERNELS_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        const int col = first + k * step_;
        if (col < vocabulary_) f(convert<float>(resolve(source_, fetched[k], row_, col)), col);
      }
    }
  }

  // f(key, id), of logits as the filters see them. The block counts how often tokens stand in the list for some packs of every thread at
  // a time.
  template <class F>
  __device__ __forceinline__ void each(uint32_t from, const F& f) {
    const bool takes_part = greatest_ >= from;
    int tile = 0;
    KERNELS_ROLLED
    for (int begin = first_; begin - first_ < vocabulary_; begin += kCounted * step_, ++tile) {
      if (listed_ > 0) count_previous(tile * kTile);
      if (!takes_part || begin >= vocabulary_) continue;
      decltype(fetch_at(0)) fetched = fetch_at(begin);
      KERNELS_ROLLED
      for (int k = 0; k < kCounted; ++k) {
        const int col = begin + k * step_, next = col + step_;
        const bool more = k + 1 < kCounted && next < vocabulary_;
        const Pack<float, N> x = convert<float>(resolve(source_, fetched, row_, col));
        if (more) fetched = fetch_at(next);  // on its way meanwhile
        const int32_t* const counts = counts_ + k * kSampleThreads * N + int(threadIdx.x) * N;
        KERNELS_UNROLL
        for (int i = 0; i < N; ++i) {
          const float logit = adjusted_ ? adjust_one(adjust_, x.v[i], col + i, listed_ > 0 ? counts[i] : 0) : x.v[i];
          f(key_of(logit), uint32_t(col + i));
        }
        if (!more) break;
      }
    }
  }
  static __device__ __noinline__ float adjust_one(const Adjust& adjust, float x, int id, int count) { return adjust(x, id, count); }

  // Of this block's tokens, those from number `begin` on.
  __device__ __forceinline__ void count_previous(int begin) const {
    __syncthreads();
    for (int i = threadIdx.x; i < kTile; i += kSampleThreads) counts_[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < listed_; i += kSampleThreads) {
      const int32_t token = previous_[i];
      if (token < 0 || token >= vocabulary_) continue;
      const int segment = token / kSegment;
      if ((segment & (blocks_ - 1)) != rank_) continue;
      const int at = segment / blocks_ * kSegment + token % kSegment - begin;
      if (at >= 0 && at < kTile) atomicAdd(&counts_[at], 1);
    }
    __syncthreads();
  }

  decltype(one_row(std::declval<const Source&>(), kAny)) source_;
  Adjust adjust_;
  bool adjusted_;
  int64_t row_;
  int vocabulary_;
  SampleRoom& room_;
  SampleBlock block_;
  int32_t* counts_;
  int rank_, blocks_;
  int first_, step_;
  const int32_t* previous_ = nullptr;
  int listed_ = 0;
  uint32_t greatest_ = 0;
  uint64_t sums_[4];
};

template <class P, int N>
struct SampleBody {
  static constexpr int max_threads = kSampleThreads, registers = 64;
  using Row = SampleRow<typename P::Source, N>;
  using Params = P;

  static size_t shared_bytes(const SampleOptions& options) {
    return sizeof(SampleRoom) + (options.previous.p == nullptr ? 0 : size_t(Row::kTile) * sizeof(int32_t));
  }
  static __device__ __forceinline__ void run(const Params& p) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    SampleRoom& room = *reinterpret_cast<SampleRoom*>(dynamic_shared);
    int32_t* const counts = reinterpret_cast<int32_t*>(dynamic_shared + sizeof(SampleRoom));
    const int blocks = int(arch::cluster_size());
    for (int64_t row = blockIdx.x / blocks; row < p.rows; row += gridDim.x / blocks) {
      const SampleRules rules = p.rules(row);
      Row one(p.source, p.options, rules, row, int(p.vocabulary), room, counts);
      p.solve(one, rules, row);
      one.sync();  // all have seen what they share
    }
  }
};

template <class P, int N>
Status start_sample(const Exec& ex, const P& problem) {
  using Body = SampleBody<P, N>;
  Launch how;
  how.threads = kSampleThreads;
  how.shared = Body::shared_bytes(problem.options);
  int image = 0;
  KERNELS_TRY(image_architecture<Body>(ex, image));
  if (ex.device().capability >= 90 && image >= 90) {
    const int64_t room = tuning::kSampleBlocksPerMultiprocessor * ex.device().sm_count;
    const auto wanted = [&](int cluster) { return problem.rows <= room / cluster && problem.vocabulary >= cluster * tuning::kSampleTokensPerBlock; };
    while (how.cluster < kPortableCluster && wanted(2 * how.cluster)) how.cluster *= 2;
    if (how.cluster == kPortableCluster && wanted(16)) {
      // An option of the hardware.
      Launch larger = how;
      larger.cluster = 16;
      larger.grid.x = 16;
      int64_t clusters = 0;
      if (resident_clusters<Body>(ex, larger, clusters).ok() && clusters > 0) how.cluster = 16;
    }
  }
  how.grid.x = unsigned(lesser<int64_t>(problem.rows, int64_t(1) << 26) * how.cluster);
  return launch<Body>(ex, how, problem);
}

// `problem` is made from a source by make(source).
template <class Load, class Make>
Status run_samples(const Exec& ex, const Load& logits, int64_t vocabulary, const Make& make) {
  const auto problem = make(read_twice(logits));
  using Problem = std::decay_t<decltype(problem)>;
  using Source = typename Problem::Source;
  constexpr int wide = widest_of<Source>() < 8 ? widest_of<Source>() : 8;
  if (max_pack_of(problem.source, vocabulary) >= wide && vocabulary % wide == 0) return start_sample<Problem, wide>(ex, problem);
  return start_sample<Problem, 1>(ex, problem);
}

// One thread for each sequence.
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
  how.grid.x = unsigned(lesser<int64_t>((problem.rows / (problem.drafts + 1) + Body::max_threads - 1) / Body::max_threads, int64_t(1) << 30));
  return launch<Body>(ex, how, problem);
}

}  // namespace detail
KERNELS_END
