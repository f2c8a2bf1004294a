// Rotary positions (RoPE): pairs of columns of each head are rotated by position * frequency of the pair.
//
//   k::rope_frequencies(f.data(), 128, 5e5);            // on the host, once; copy it where calls compute
//   auto rope = k::rope(positions, f, 128);
//   k::attention(ex, k::load(q, ld) | rope, kv, k::store(o, ld), shape, k::causal());
//   k::matmul(ex, x, k::stacked(k::paired(wq, rope), nq, k::paired(wk, rope), nk, k::plain(wv), nk),
//             k::qkv(rope | k::store(q, nq), nq, rope | k::append_keys(kv, at, 128), nk,
//                    k::append_values(kv, at, 128), nk), {M, N, K});       // append.h
//
// Rows are tokens, row r at positions[r]; columns are adjacent heads of head_dim. By default the two columns of a pair
// are half a rotary dimension apart (GPT-NeoX, Llama in Hugging Face's form); with .interleaved() they are adjacent.
// .rotary_dim(n) rotates only the first n columns of a head. Angles are products of floats; sine and cosine have float
// precision.
//
// A map sees adjacent columns only, but the partner of a column may be half a head away. Therefore rope is not an
// ordinary map:
//
//   source | rope   reads both columns of a pair: each element is read twice, once for each result. Not in place.
//   rope | sink     is for products, which compute each column once. paired(w, rope) reads the rows of weights in an
//                   order that makes the two columns of a pair adjacent; the sink rotates them and writes them to their
//                   true columns. Maps before rope (a bias) see the true columns. Such a sink takes packs of 2 or more
//                   at even columns.
#pragma once

#include <cmath>

#include "weights.h"

KERNELS_BEGIN

// ---- frequencies: on the host --------------------------------------------------------------------------------------

// frequencies[i] = theta^(-2 i / rotary_dim), for i < rotary_dim / 2.
inline void rope_frequencies(float* frequencies, int rotary_dim, double theta) {
  for (int i = 0; i < rotary_dim / 2; ++i) frequencies[i] = float(std::pow(theta, -2.0 * i / rotary_dim));
}
// Position interpolation: positions divided by `factor`.
inline void rope_frequencies_linear(float* frequencies, int rotary_dim, double theta, double factor) {
  rope_frequencies(frequencies, rotary_dim, theta);
  for (int i = 0; i < rotary_dim / 2; ++i) frequencies[i] = float(double(frequencies[i]) / factor);
}
// NTK-aware scaling: the base grows with the context.
inline void rope_frequencies_ntk(float* frequencies, int rotary_dim, double theta, double factor) {
  rope_frequencies(frequencies, rotary_dim, theta * std::pow(factor, rotary_dim / double(rotary_dim - 2)));
}
// Llama 3: pairs with fewer than `low` turns over the original context are scaled, those with more than `high` are
// kept, and those in between are interpolated.
inline void rope_frequencies_llama3(float* frequencies, int rotary_dim, double theta, double factor, double low,
                                    double high, double context) {
  for (int i = 0; i < rotary_dim / 2; ++i) {
    const double f = std::pow(theta, -2.0 * i / rotary_dim), turns = context * f / 6.283185307179586;
    const double keep = turns < low ? 0 : turns > high ? 1 : (turns - low) / (high - low);
    frequencies[i] = float((1 - keep) * f / factor + keep * f);
  }
}
// YaRN: pairs with fewer than `slow` turns over the original context are scaled, those with more than `fast` are kept,
// with a ramp between them, which begins and ends at whole pairs with `truncate`. Returns the matching factor for
// rope().amplitude().
inline float rope_frequencies_yarn(float* frequencies, int rotary_dim, double theta, double factor, double context,
                                   double fast = 32, double slow = 1, bool truncate = true) {
  const auto pair_of = [=](double turns) {
    return rotary_dim * std::log(context / (turns * 6.283185307179586)) / (2 * std::log(theta));
  };
  const double begin = pair_of(fast), end = pair_of(slow);
  const double first = std::fmax(truncate ? std::floor(begin) : begin, 0),
               last = std::fmin(truncate ? std::ceil(end) : end, rotary_dim - 1);
  for (int i = 0; i < rotary_dim / 2; ++i) {
    const double f = std::pow(theta, -2.0 * i / rotary_dim),
                 scaled = std::fmin(std::fmax((i - first) / std::fmax(last - first, 0.001), 0), 1);
    frequencies[i] = float(scaled * f / factor + (1 - scaled) * f);
  }
  return factor <= 1 ? 1.f : float(0.1 * std::log(factor) + 1);
}

// ---- the map -------------------------------------------------------------------------------------------------------

template <class S>
class RotatedSource;
template <class M, class S>
class RotatingSink;

class Rope : public Functor {
 public:
  static constexpr Role role = Role::map;
  Rope(const int32_t* positions, const float* frequencies, int head_dim)
      : positions_(positions),
        frequencies_(frequencies),
        heads_(head_dim),
        head_dim_(head_dim),
        rotary_dim_(head_dim) {}

  Rope rotary_dim(int n) const { Rope out = *this; out.rotary_dim_ = n; return out; }
  Rope interleaved() const { Rope out = *this; out.interleaved_ = true; return out; }
  // A factor of sine and cosine (YaRN).
  Rope amplitude(float a) const { Rope out = *this; out.amplitude_ = a; return out; }

  template <class S>
  RotatedSource<S> on_source(const S& source) const {
    static_assert(
        !detail::has_effects<S>,
        "rope reads each element twice, as itself and as the other one of its pair: put tee() behind rope, or make its input before with copy()");
    return {source, *this};
  }
  template <class S, class = std::enable_if_t<detail::is_sink<S>>>
  RotatingSink<Identity, S> on_sink(const S& sink) const {
    return {{}, *this, sink};
  }

  Status check(int64_t, int64_t cols) const {
    KERNELS_TRY(detail::check_pointer(positions_, "rope: the pointer to positions is null",
                                      "rope: the pointer to positions is not aligned for its elements"));
    KERNELS_TRY(detail::check_pointer(frequencies_, "rope: the pointer to frequencies is null",
                                      "rope: the pointer to frequencies is not aligned for its elements"));
    if (cols > INT32_MAX) return unsupported("rope: more than 2^31 - 1 columns");
    if (head_dim_ < 8 || head_dim_ % 8 != 0 || cols % head_dim_ != 0)
      return invalid("rope: columns are no whole heads of a multiple of 8");
    if (rotary_dim_ < 0 || rotary_dim_ > head_dim_ || rotary_dim_ % 2 != 0)
      return invalid("rope: rotary_dim is odd, or larger than a head");
    if (!(amplitude_ - amplitude_ == 0)) return invalid("rope: the amplitude is not finite");
    return {};
  }

  int head_dim() const { return head_dim_; }
  KERNELS_HD int half() const { return rotary_dim_ / 2; }
  KERNELS_HD int in_head(int64_t col) const { return int(heads_.remainder(static_cast<uint32_t>(col))); }
  KERNELS_HD bool turns(int in_head) const { return in_head < rotary_dim_; }
  KERNELS_HD bool pairs_are_neighbours() const { return interleaved_; }
  // The widest pack, up to `most`, that never crosses the end of a head, of its rotary part, or of a half of that.
  int pack_within(int most) const {
    const int unit = interleaved_ ? rotary_dim_ : rotary_dim_ / 2;
    while (most > 1 && (unit % most != 0 || head_dim_ % most != 0)) most /= 2;
    return most;
  }

  // Sine and cosine for N pairs of a row, from `pair` on.
  template <int N>
  struct Angles {
    float sine[N], cosine[N];
  };
  template <int N>
  KERNELS_HD Angles<N> angles(int64_t row, int pair) const {
    const float position = float(positions_[row]);
    Angles<N> out;
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) sin_cos(position * frequencies_[pair + i], out.sine[i], out.cosine[i]);
    return out;
  }
  // Rotates: (x, y) becomes (x cos - y sin, y cos + x sin).
  template <int N>
  KERNELS_HD void turn(Pack<float, N>& x, Pack<float, N>& y, const Angles<N>& by) const {
    KERNELS_UNROLL
    for (int i = 0; i < N; ++i) {
      const float a = x.v[i], b = y.v[i];
      x.v[i] = (a * by.cosine[i] - b * by.sine[i]) * amplitude_;
      y.v[i] = (b * by.cosine[i] + a * by.sine[i]) * amplitude_;
    }
  }
  template <int N>
  KERNELS_HD void turn(Pack<float, N>& x, Pack<float, N>& y, int64_t row, int pair) const {
    turn(x, y, angles<N>(row, pair));
  }

 private:
  const int32_t* positions_;
  const float* frequencies_;
  detail::Divisor heads_;
  int head_dim_, rotary_dim_;
  float amplitude_ = 1;
  bool interleaved_ = false;
};

// positions: one for each row. frequencies: rotary_dim / 2 numbers. Both are in the memory space in which the call
// runs.
inline Rope rope(const int32_t* positions, const float* frequencies, int head_dim) {
  return {positions, frequencies, head_dim};
}

namespace detail {

// Splits (a0 a1 a2 a3) into (a0 a2) and (a1 a3); zipped() is the inverse.
template <int N>
KERNELS_HD void unzip(const Pack<float, N>& v, Pack<float, N / 2>& even, Pack<float, N / 2>& odd) {
  KERNELS_UNROLL
  for (int i = 0; i < N / 2; ++i) even.v[i] = v.v[2 * i], odd.v[i] = v.v[2 * i + 1];
}
template <int N>
KERNELS_HD Pack<float, 2 * N> zipped(const Pack<float, N>& even, const Pack<float, N>& odd) {
  Pack<float, 2 * N> v;
  KERNELS_UNROLL
  for (int i = 0; i < N; ++i) v.v[2 * i] = even.v[i], v.v[2 * i + 1] = odd.v[i];
  return v;
}

}  // namespace detail

// ---- on a source ---------------------------------------------------------------------------------------------------

template <class S>
class RotatedSource : public Functor {
 public:
  static constexpr Role role = Role::source;
  static constexpr bool has_effects = false;  // rope does not take a source with any
  KERNELS_HD RotatedSource(const S& source, const Rope& rope) : source_(source), rope_(rope) {
    static_assert(std::is_same<compute_type<S>, float>::value, "rope turns floats");
  }

  static constexpr int widest = detail::widest_of<S>();
  int max_pack() const { return rope_.pack_within(detail::max_pack_of(source_)); }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(rope_.check(rows, cols));
    return detail::check_of(source_, rows, cols);
  }

  // element 0: an element is read for its partner too, which may happen after a result is written there.
  detail::Plane plane(int64_t rows, int64_t cols) const {
    detail::Plane all = detail::plane_of(source_, rows, cols);
    all.element = 0;
    return all;
  }

  template <class F>
  struct Two {
    F mine, other;
  };
  template <int N>
  KERNELS_HD auto fetch(int64_t row, int64_t col) const {
    const auto mine = detail::fetch<N>(source_, row, col);
    return Two<std::decay_t<decltype(mine)>>{mine, detail::fetch<N>(source_, row, other<N>(col))};
  }
  template <class F>
  KERNELS_HD auto resolve(const Two<F>& fetched, int64_t row, int64_t col) const {
    auto mine = detail::resolve(source_, fetched.mine, row, col);
    constexpr int N = decltype(mine)::size;
    const int at = rope_.in_head(col);
    if (!rope_.turns(at)) return mine;
    if (N > 1 && rope_.pairs_are_neighbours()) {
      if constexpr (N > 1) {
        Pack<float, N / 2> x, y;
        detail::unzip(mine, x, y);
        rope_.turn(x, y, row, at / 2);
        return detail::zipped(x, y);
      }
    }
    auto partner = detail::resolve(source_, fetched.other, row, other<N>(col));
    const bool first = rope_.pairs_are_neighbours() ? at % 2 == 0 : at < rope_.half();
    const int pair = rope_.pairs_are_neighbours() ? at / 2 : first ? at : at - rope_.half();
    if (first) {
      rope_.turn(mine, partner, row, pair);
      return mine;
    }
    rope_.turn(partner, mine, row, pair);
    return mine;
  }
  void prefetch(int64_t row, int64_t begin, int64_t end) const { detail::prefetch(source_, row, begin, end); }

 private:
  // The partner columns of a pack, or `col` itself if it needs no other columns.
  template <int N>
  KERNELS_HD int64_t other(int64_t col) const {
    const int at = rope_.in_head(col);
    if (!rope_.turns(at)) return col;
    if (rope_.pairs_are_neighbours()) return N > 1 ? col : at % 2 == 0 ? col + 1 : col - 1;
    return at < rope_.half() ? col + rope_.half() : col - rope_.half();
  }

  S source_;
  Rope rope_;
};

namespace detail {
template <class S>
struct Traits<RotatedSource<S>> : ComputedTraits<S> {};
}  // namespace detail

// ---- on the sink of a product --------------------------------------------------------------------------------------

template <class M, class S>
class RotatingSink : public Functor {
 public:
  static constexpr Role role = detail::role_of<S>();
  static constexpr bool by_head = detail::is_row_sink<S>;
  KERNELS_HD RotatingSink(M before, Rope rope, S sink) : before_(before), rope_(rope), sink_(sink) {}

  static constexpr int widest = 16;
  static constexpr bool wants_pairs = true;
  // The two halves of a pack go to two places, unless pairs are adjacent.
  int max_pack() const {
    const int most = lesser(detail::max_pack_of(before_), detail::max_pack_of(sink_)),
              pair_pack = rope_.interleaved().pack_within(widest);
    return greater(2, lesser(pair_pack, rope_.pairs_are_neighbours() ? most : 2 * most));
  }
  Status check(int64_t rows, int64_t cols) const {
    KERNELS_TRY(rope_.check(rows, cols));
    KERNELS_TRY(detail::check_of(before_, rows, cols));
    return detail::check_of(sink_, rows, cols);
  }
  template <class A>
  auto after(const A& map) const {
    auto all = map | before_;
    return RotatingSink<decltype(all), S>(all, rope_, sink_);
  }

  KERNELS_HD const M& map() const { return before_; }
  KERNELS_HD const S& end() const { return sink_; }
  template <class Map, class End>
  KERNELS_HD RotatingSink<Map, End> with(const Map& map, const End& end) const {
    return {map, rope_, end};
  }

  // For one pair: its two columns, the angle, and what the maps before rope and the sink behind it prepare for each
  // column.
  struct Prepared {
    using Operands = decltype(detail::fetch_operands<1>(std::declval<const M&>(), 0, 0));
    using Place = decltype(detail::prepare<1>(std::declval<const S&>(), 0, 0));
    int64_t first, second;
    bool turns;
    Rope::Angles<1> angles;
    Operands operands[2];
    Place places[2];
  };
  bool pairs_within(int64_t dim) const { return dim % rope_.head_dim() == 0; }
  KERNELS_HD detail::ColumnPair pair_at(int64_t col) const {
    const int at = rope_.in_head(col);
    if (!rope_.turns(at) || rope_.pairs_are_neighbours()) return {col, col + 1};
    return {col - at + at / 2, col - at + at / 2 + rope_.half()};
  }
  template <int N>
  KERNELS_HD Prepared prepare(int64_t row, int64_t col) const {
    static_assert(N == 2, "pair by pair");
    const int at = rope_.in_head(col);
    const bool turns = rope_.turns(at);
    const auto [first, second] = pair_at(col);
    return {first, second, turns, turns ? rope_.angles<1>(row, at / 2) : Rope::Angles<1>{},
            {detail::fetch_operands<1>(before_, row, first), detail::fetch_operands<1>(before_, row, second)},
            {detail::prepare<1>(sink_, row, first), detail::prepare<1>(sink_, row, second)}};
  }
  KERNELS_HD void store(const Pack<float, 2>& v, const Prepared& prepared, int64_t row, int64_t) const {
    auto x = detail::apply_map(before_, Pack<float, 1>{{v.v[0]}}, prepared.operands[0], row, prepared.first);
    auto y = detail::apply_map(before_, Pack<float, 1>{{v.v[1]}}, prepared.operands[1], row, prepared.second);
    if (prepared.turns) rope_.turn(x, y, prepared.angles);
    detail::put_prepared(sink_, prepared.places[0], x, row, prepared.first);
    detail::put_prepared(sink_, prepared.places[1], y, row, prepared.second);
  }
  template <int N>
  KERNELS_HD void store(const Pack<float, N>& v, int64_t row, int64_t col) const {
    if constexpr (N == 1) {
      // A single column cannot be rotated. An engine that gets here breaks the contract; NaN makes that visible.
      detail::put(sink_, v * (infinity<float>() - infinity<float>()), row, col);
    } else if constexpr (N == 2) {
      store(v, prepare<2>(row, col), row, col);
    } else {
      turn(v, row, col);
    }
  }

 private:
  // The columns of v are all pairs, or none is.
  template <int N>
  KERNELS_HD void turn(const Pack<float, N>& v, int64_t row, int64_t col) const {
    const int at = rope_.in_head(col);
    Pack<float, N / 2> x, y;
    if (rope_.pairs_are_neighbours()) {
      if (!rope_.turns(at)) return detail::put(sink_, mapped(v, row, col), row, col);
      detail::unzip(mapped(v, row, col), x, y);
      rope_.turn(x, y, row, at / 2);
      return detail::put(sink_, detail::zipped(x, y), row, col);
    }
    if (!rope_.turns(at)) {  // in halves, as for rotated pairs: the sink need not accept more at once
      KERNELS_UNROLL
      for (int i = 0; i < N / 2; ++i) x.v[i] = v.v[i], y.v[i] = v.v[N / 2 + i];
      detail::put(sink_, mapped(x, row, col), row, col);
      return detail::put(sink_, mapped(y, row, col + N / 2), row, col + N / 2);
    }
    const int64_t first = col - at + at / 2, second = first + rope_.half();
    detail::unzip(v, x, y);
    x = mapped(x, row, first);
    y = mapped(y, row, second);
    rope_.turn(x, y, row, at / 2);
    detail::put(sink_, x, row, first);
    detail::put(sink_, y, row, second);
  }
  template <int N>
  KERNELS_HD Pack<float, N> mapped(const Pack<float, N>& v, int64_t row, int64_t col) const {
    return detail::apply_map(before_, v, detail::fetch_operands<N>(before_, row, col), row, col);
  }

  M before_;
  Rope rope_;
  S sink_;
};

// ---- weights whose results come in pairs ---------------------------------------------------------------------------

// Weights of queries or keys for rope | sink.
template <class S>
Paired<S> paired(S source, const Rope& rope) {
  static_assert(detail::is_source<S>, "paired() takes a source of weights");
  return {source, rope.head_dim(), rope.pairs_are_neighbours() ? 0 : rope.half()};
}
// Weights of values, unchanged, for use in stacked() beside paired(): its sources have one type.
template <class S>
Paired<S> plain(S source) {
  static_assert(detail::is_source<S>, "plain() takes a source of weights");
  return {source, 1, 0};
}

KERNELS_END
