// DrawOfRow: draws a token from a row in which all tokens count, without sorting.
//
//   a block's tokens:   | kept in shared memory from the first pass on | read again |
#pragma once

#include "../../core/sampling_row.h"
#include "row.cuh"

KERNELS_BEGIN
namespace detail {

// For rows in which all tokens count, without typical(), in calls that do not adjust logits, or with kListed only those
// of listed tokens. As much of the row as fits is kept in shared memory and read from there from the second pass on.
template <class P, int N, bool kListed>
class DrawOfRow : public SampleRanges<typename P::Source, N, kListed> {
  using Ranges = SampleRanges<typename P::Source, N, kListed>;

 public:
  __device__ __forceinline__ DrawOfRow(const P& p, int64_t row, int rank, int blocks)
      : Ranges(p.source, row, int(p.vocabulary), rank, blocks),
        kept_(lesser(of_warp_, (int(arch::dynamic_shared_bytes()) - kBehindListed<kListed>) /
                                   int(kSampleThreads * N * sizeof(float)))) {}

  __device__ __forceinline__ void draw(const P& p, int64_t row) {
    float most = -infinity<float>();
    KERNELS_ROLLED
    for (int number = packs_; number < kept_; ++number) keep(number, this->nothing());
    this->template each_pack<4>(0, [this, &most](const Pack<float, N>& x, int, int number) {
      if (number < kept_) keep(number, x);
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) most = arch::max_or_nan(most, x.v[i]);
    });
    uint32_t top, nothing;
    extremes_of_block(room_, key_of(most), top, nothing);
    if (blocks_ > 1) {
      if (threadIdx.x == 0) room_.top = top;
      this->sync();
      top = __reduce_max_sync(0xffffffffu,
                              arch::in_block(&room_, unsigned(lesser(int(threadIdx.x) & 31, blocks_ - 1)))->top);
    }
    const SampleRules rules(p.options, row);
    const Sampled status = !rules.right()      ? Sampled::parameter
                           : top == kNanKey    ? Sampled::nan
                           : top <= kLowestKey ? Sampled::none
                                               : Sampled::ok;
    if (status == Sampled::ok) {
      Visit<NoDraft> visit(Levels(top, rules.temperature), NoDraft{});
      draw_by_id(*this, visit, rules, rules.top_p, RowDraw(p.options, row, 0));
    }
    if (this->is_first())
      write_sampled(p.options, p.tokens, row, status,
                    status == Sampled::ok ? int64_t(id_of(room_.shared.edge)) : kNoToken);
  }

  template <class V>
  __device__ __forceinline__ uint64_t weigh(const V& what) {
    const auto mass = mass_of(what);
    uint64_t all = 0;
    const auto add = [&all, &mass](const Pack<float, N>& x, int col, int) {
      KERNELS_UNROLL
      for (int i = 0; i < N; ++i) all += mass(x.v[i], col + i);
    };
    KERNELS_ROLLED
    for (int number = 0; number < kept_; ++number) add(kept(number, int(threadIdx.x)), first_ + number * step_, number);
    if (kept_ < of_warp_) this->template each_pack<2>(kept_, add);
    return this->sum_of_row(all);
  }
  template <class V>
  __device__ __forceinline__ void find(const V& what, uint64_t target) const {
    const auto pack = [this](int number, int thread, int col) {
      return number < kept_      ? kept(number, thread)
             : col < vocabulary_ ? values_of(fetch_at(col), col)
                                 : this->nothing();
    };
    this->find_by(target, pack, mass_of(what));
  }

 private:
  using Ranges::vocabulary_, Ranges::blocks_, Ranges::first_, Ranges::step_, Ranges::packs_, Ranges::fetch_at,
      Ranges::values_of, Ranges::room_, Ranges::of_warp_;

  // Visit::mass_left() for such rows, in few instructions.
  template <class V>
  static __device__ __forceinline__ auto mass_of(const V& what) {
    const Levels levels = what.levels;
    const float least = logit_of(first_of_entry(what.kept.least));
    const uint32_t last = id_of(what.kept.least);
    const uint32_t last_level = what.kept.least_weight > 0 ? last_level_of(what.kept.least_weight) : kNoLevel;
    return [=](float x, int id) {
      const uint32_t level = levels.of(x);
      const bool left = ((x > least) | ((x == least) & (uint32_t(id) <= last))) & (level <= last_level);
      return weight_of(left ? level : kNoLevel);
    };
  }

  // The kept logits, in parts of 16 bytes, with those of a warp adjacent. Behind the end of a row they are -infinity.
  static constexpr int kWidth = N < 4 ? N : 4, kParts = N / kWidth;
  struct alignas(kWidth * sizeof(float)) Part {
    float v[kWidth];
  };
  static __device__ __forceinline__ Part& part(int number, int i, int thread) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    return reinterpret_cast<Part*>(dynamic_shared +
                                   kBehindListed<kListed>)[(number * kParts + i) * kSampleThreads + thread];
  }
  static __device__ __forceinline__ Pack<float, N> kept(int number, int thread) {
    Pack<float, N> x;
    KERNELS_UNROLL
    for (int i = 0; i < kParts; ++i) {
      const Part some = part(number, i, thread);
      KERNELS_UNROLL
      for (int j = 0; j < kWidth; ++j) x.v[i * kWidth + j] = some.v[j];
    }
    return x;
  }
  static __device__ __forceinline__ void keep(int number, const Pack<float, N>& x) {
    KERNELS_UNROLL
    for (int i = 0; i < kParts; ++i) {
      Part some;
      KERNELS_UNROLL
      for (int j = 0; j < kWidth; ++j) some.v[j] = x.v[i * kWidth + j];
      part(number, i, int(threadIdx.x)) = some;
    }
  }

  int kept_;
};

}  // namespace detail
KERNELS_END
