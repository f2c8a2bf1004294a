// Dropout: each value becomes 0 with probability p, or is divided by 1 - p.
//
//   k::copy(ex, k::load(x, d) | k::dropout(0.1, seed, offset, d), k::store(y, d), rows, d);   // drawn
//   k::copy(ex, k::load(x) | k::dropout(0.1, seed, offset), k::store(y), n);                  // of a flat tensor
//   k::copy(ex, k::load(x, d) | k::dropout(0.1, k::load(keep, d)), k::store(y, d), rows, d);  // given: 0 drops
//
// The decision for an element depends only on seed, offset and the element's position. It is the same on the CPU and
// the GPU, in every call and behind every operation. Element (row, col) gets word col % 4 of philox(seed, row * blocks
// + col / 4, offset) (core/philox.h), where blocks = (ld + 3) / 4 and ld is the number of random numbers in a row. It
// is dropped if the upper 31 bits of its word are less than p 2^31.
//
// Give different offsets to calls that must draw different numbers. The offset is part of a captured graph; a mask that
// is given can change between replays.
//
// A dropped value is 0, even if it was NaN. p = 0 changes nothing; with p = 1 everything is 0.
#pragma once

#include "core/philox.h"
#include "functor.h"

KERNELS_BEGIN
namespace detail {

// 1 / (1 - p), and 0 for p = 1.
inline double kept_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }
inline Status check_share(double p) {
  return p >= 0 && p <= 1 ? Status{} : invalid("dropout: p is not between 0 and 1");
}

}  // namespace detail

class Dropout : public Functor {
 public:
  static constexpr Role role = Role::map;
  static constexpr bool takes_any_column = true;
  Dropout(double p, uint64_t seed, uint64_t offset, int64_t ld)
      : p_(p),
        scale_(detail::kept_scale(p)),
        seed_(seed),
        offset_(offset),
        ld_(ld),
        limit_(p >= 0 && p <= 1 ? uint32_t(p * 0x1p31 + 0.5) : 0) {}

  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_share(p_));
    if (ld_ == detail::kOneRow && rows > 1) return invalid("dropout: several rows need ld, how many numbers a row has");
    if (ld_ < cols && rows > 1) return invalid("dropout: ld is smaller than cols, rows would share their numbers");
    return {};
  }

  template <class C, int N>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, int64_t row, int64_t col) const {
    // The blocks that N numbers span, plus one more if they do not begin at a block.
    constexpr int blocks = (N + 3) / 4;
    const uint64_t first = uint64_t(row) * ((uint64_t(ld_) + 3) / 4) + uint64_t(col) / 4;
    const int skipped = int(col & 3);
    uint32_t words[4 * blocks + 4] = {};
    KERNELS_UNROLL
    for (int b = 0; b < blocks; ++b) draw(words + 4 * b, first + uint64_t(b));
    if (skipped != 0) {
      if (skipped + N > 4 * blocks) draw(words + 4 * blocks, first + uint64_t(blocks));
      // Shifts by constants, so that the words stay in registers.
      KERNELS_UNROLL
      for (int i = 0; i < 4 * blocks + 3; ++i) words[i] = skipped & 1 ? words[i + 1] : words[i];
      KERNELS_UNROLL
      for (int i = 0; i < 4 * blocks + 2; ++i) words[i] = skipped & 2 ? words[i + 2] : words[i];
    }
    const C scale = static_cast<C>(scale_);
    Pack<C, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = words[i] >> 1 < limit_ ? C(0) : v.v[i] * scale;
    return out;
  }

 private:
  KERNELS_HD void draw(uint32_t* to, uint64_t block) const {
    const auto four = philox(seed_, block, offset_);
    KERNELS_UNROLL
    for (int i = 0; i < 4; ++i) to[i] = four.v[i];
  }

  double p_, scale_;
  uint64_t seed_, offset_;
  int64_t ld_;
  uint32_t limit_;
};

// ld: the number of random numbers in a row, usually the number of columns.
inline Dropout dropout(double p, uint64_t seed, uint64_t offset, int64_t ld) { return {p, seed, offset, ld}; }
inline Dropout dropout(double p, uint64_t seed, uint64_t offset) { return {p, seed, offset, detail::kOneRow}; }

template <class S>
class MaskedDropout : public Functor {
 public:
  static constexpr Role role = Role::map;
  KERNELS_HD MaskedDropout(double p, double scale, S keep) : p_(p), scale_(scale), keep_(keep) {}

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return detail::max_pack_of(keep_); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(detail::check_share(p_));
    return detail::check_of(keep_, rows, cols);
  }
  static constexpr bool takes_any_column = detail::takes_any_column<S>();
  auto any_column() const { return with(detail::any_column(keep_)); }

  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const { return detail::fetch<N>(keep_, row, col); }
  template <class C, int N, class Fetched>
  KERNELS_HD Pack<C, N> map(const Pack<C, N>& v, const Fetched& fetched, int64_t row, int64_t col) const {
    const C scale = static_cast<C>(scale_);
    const auto keep = detail::resolve(keep_, fetched, row, col);
    Pack<C, N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) out.v[i] = keep.v[i] == 0 || p_ >= 1 ? C(0) : v.v[i] * scale;
    return out;
  }
  KERNELS_HD auto cached() const { return with(detail::cached(keep_)); }
  KERNELS_HD auto second_pass() const { return with(detail::second_pass(keep_)); }
  KERNELS_HD auto without_effects() const { return with(detail::without_effects(keep_)); }
  KERNELS_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    detail::prefetch(keep_, row, begin, end);
  }

 private:
  template <class T>
  KERNELS_HD auto with(const T& keep) const { return MaskedDropout<T>(p_, scale_, keep); }

  double p_, scale_;
  S keep_;
};

// A mask that is given: a source of any type whose zeros drop values. A pointer means a row vector.
template <class S>
auto dropout(double p, S keep) {
  return MaskedDropout<detail::source_t<S>>(p, detail::kept_scale(p), detail::as_source(keep));
}

KERNELS_END
