// How products on the CPU read operands and write results: stretches of a row as numbers in a buffer, the states of
// rows that are normalized while they are read, and operations on the lanes of vectors.
#pragma once

#include "../../../weights.h"
#include "../row/engine.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Lanes of the concatenation of a and b.
template <class C, int... lane>
inline KERNELS_INLINE Register<C> shuffle(const Register<C>& a, const Register<C>& b) {
#if KERNELS_VECTORS && (defined(__clang__) || __GNUC__ >= 12)
  return __builtin_shufflevector(a, b, lane...);
#elif KERNELS_VECTORS
  using Index = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>;
  return __builtin_shuffle(a, b, VectorOf<Index, kLanes<C>>{Index(lane)...});
#else
  return {{(lane < kLanes<C> ? a : b).v[lane % kLanes<C>]...}};
#endif
}

// Half kHalf of a and of b, interleaved.
template <int kHalf, class C, int... i>
inline KERNELS_INLINE Register<C> zip(const Register<C>& a, const Register<C>& b, std::integer_sequence<int, i...>) {
  return shuffle<C, kHalf * kLanes<C> / 2 + i / 2 + i % 2 * kLanes<C>...>(a, b);
}

// For adding up lanes in pairs: lane x of half kHalf of the pair (a, b), such that half 0 + half 1 has the sums of a
// and b. The lanes of a and b alternate between kEach registers' sums. Shuffles within 16 bytes are one fast
// instruction, and across them another; only free shuffles of elements are slow.
template <class C, int kEach, int kHalf>
constexpr int lane_of_sums(int x) {
  constexpr int lanes = kLanes<C>, in_16 = 16 / int(sizeof(C)), groups = lanes / in_16;
  const int group = x / in_16, at = x % in_16;
  if (2 * kEach <= in_16)
    return at / kEach % 2 * lanes + group * in_16 + kHalf * in_16 / 2 + at / (2 * kEach) * kEach + at % kEach;
  const int half = groups > 1 ? groups / 2 : 1;
  return group / half * lanes + (group % half * 2 + kHalf) * in_16 + at;
}
template <class C, int kEach, int kHalf, int... i>
inline KERNELS_INLINE Register<C> half_of_sums(const Register<C>& a, const Register<C>& b,
                                               std::integer_sequence<int, i...>) {
  return shuffle<C, lane_of_sums<C, kEach, kHalf>(i)...>(a, b);
}

// The sum of the lanes of each of kCount registers, in order; at most as many registers as lanes.
template <class C, int kCount, int kEach, int... i>
KERNELS_INLINE inline void halve(Register<C> (&v)[kCount], std::integer_sequence<int, i...>) {
  const auto lanes = std::make_integer_sequence<int, kLanes<C>>();
  ((v[i] = half_of_sums<C, kEach, 0>(v[2 * i], v[2 * i + 1], lanes) +
           half_of_sums<C, kEach, 1>(v[2 * i], v[2 * i + 1], lanes)),
   ...);
}
template <class C, int kCount, int kEach = 1>
KERNELS_INLINE inline Pack<C, kCount> sums_of(Register<C> (&v)[kCount]) {
  if constexpr (kEach < kCount) {
    halve<C, kCount, kEach>(v, std::make_integer_sequence<int, kCount / kEach / 2>());
    return sums_of<C, kCount, 2 * kEach>(v);
  } else {
    // With fewer registers than lanes each sum is in several parts: side by side within 16 bytes, and then across them.
    constexpr int in_16 = 16 / int(sizeof(C)), parts = kLanes<C> / kCount, across = kCount < in_16 ? 1 : parts;
    const Pack<C, kLanes<C>> lanes = as_pack<C>(v[0]);
    Pack<C, kCount> out = broadcast<kCount>(C(0));
    for (int i = 0; i < kCount; ++i) {
      for (int part = 0; part < parts; ++part) {
        out.v[i] = out.v[i] + lanes.v[kCount < in_16 ? part * kCount + i
                                                     : (i / in_16 * across + part) * in_16 + i % in_16];
      }
    }
    return out;
  }
}

// Whether a source is plain bfloat16 in memory, without maps, scales or a norm.
template <class S>
constexpr bool is_plain_bfloat16 = std::is_same<typename Traits<S>::Code, bfloat16>::value && !Traits<S>::scaled;

// What was fetched, as numbers of type C. bfloat16 panels take only plain bfloat16 sources.
template <class C, class Source, class Fetched>
KERNELS_INLINE inline auto values(const Source& source, const Fetched& fetched, int64_t row, int64_t col) {
  if constexpr (std::is_same<C, bfloat16>::value) {
    static_assert(is_plain_bfloat16<Source>, "other sources compute their numbers");
    return fetched.unpack();
  } else {
    return convert<C>(resolve(source, fetched, row, col));
  }
}

// Reads columns [begin, begin + count) of a row.
template <class Source, class C>
void read_row(const Source& source, int64_t row, int64_t begin, int64_t count, C* to) {
  const Packs<Source, DirectStore<C, C>> packs(source, DirectStore<C, C>(to, 0), begin % kWidestPack == 0 ? count : 1);
  packs.each(begin, begin + count, [&source, row, begin, to](auto width, int64_t col) KERNELS_INLINE {
    constexpr int N = decltype(width)::value;
    put_pack(to + (col - begin), values<C>(source, fetch<N>(source, row, col), row, col));
  });
}

// What has to be known of a whole row before it can be read: the state, if the source begins with normed().
template <class Source>
auto row_state(const Source& source, int64_t row, int64_t cols) {
  if constexpr (starts_normed<Source>) {
    const auto& base = base_of(source);
    using Base = std::decay_t<decltype(base)>;
    using Before = std::decay_t<decltype(base.before())>;
    using Sink = DirectStore<typename Base::C, typename Base::C>;
    using Problem = RowProblem<typename Base::Op, Before, Sink>;
    if (cols == 0) return typename Base::State{};
    const Sink none(nullptr, 0);
    const Problem problem{base.op(), base.before(), none, row + 1, cols, {base.before(), none, cols}};
    return RowEngine<Problem>(problem).state(row);
  } else {
    return Nothing{};
  }
}
// Writes mean and rstd of such a row where the caller wants them, once for each row.
template <class Source, class State>
void write_state(const Source& source, const State& state, int64_t row, int64_t cols) {
  if constexpr (starts_normed<Source>) {
    const auto& op = base_of(source).op();
    op.write_row(op.finish(state, Count<typename std::decay_t<decltype(base_of(source))>::C>(int(cols))), row);
  }
}
// The source for reading such a row.
template <class Source, class State>
auto with_state(const Source& source, const State& state, int64_t cols) {
  if constexpr (starts_normed<Source>) {
    return on_base(source, [&](const auto& base) {
      return base.with(state, Count<typename std::decay_t<decltype(base)>::C>(int(cols)));
    });
  } else {
    return source;
  }
}

// Calls f(source, index) for a source of weights, or for both sources of gated().
template <class W, class F>
void each_matrix(const W& w, const F& f) {
  if constexpr (is_gated<W>::value) f(w.gate(), 0), f(w.up(), 1);
  else f(w, 0);
}

// Passes results to a sink, those of gated weights in pairs.
template <class C, class W, class Out>
class Results {
 public:
  Results(const Out& out, int64_t cols) : map_(sink_map(out)), end_(sink_end(out)), packs_({nullptr, 0}, out, cols) {}

  // Writes columns [begin, end) of a row. With gated weights `sums` belong to the gate, `others` to the other matrix.
  void write(int64_t row, int64_t begin, int64_t end, const C* sums, const C* others = nullptr) const {
    packs_.each(begin, end, [=, map = map_, sink = end_](auto width, int64_t col) KERNELS_INLINE {
      constexpr int N = width();
      const auto v = pack_at<N>(sums + (col - begin));
      if constexpr (is_gated<W>::value) put_joined(sink, map, v, pack_at<N>(others + (col - begin)), row, col);
      else put_mapped(sink, map, v, row, col);
    });
  }

 private:
  std::decay_t<decltype(sink_map(std::declval<const Out&>()))> map_;
  SinkEnd<Out> end_;
  Packs<DirectLoad<C, C>, Out> packs_;
};

}  // namespace host
}  // namespace detail
KERNELS_END
