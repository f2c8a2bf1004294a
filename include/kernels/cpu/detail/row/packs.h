// The packs in which the CPU reads and writes a row.
#pragma once

#include "../../../functor/experts.h"
#include "lanes.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Whether a functor takes packs of any width at any column and address. The library's own do: host accesses need no
// alignment. A user's functor may rely on what the GPU guarantees, and gets that (see Packs).
template <class F>
struct AnyWidth {
  static constexpr bool value =
      !oneflow_load<F> && !oneflow_store<F> && !has_widest<F>::value && !has_max_pack<F>::value;
};
template <class... F>
constexpr bool any_width = (AnyWidth<F>::value && ...);

#define KERNELS_ANY_WIDTH(parameters, functor, answer) \
  template <parameters>                                \
  struct AnyWidth<functor> {                           \
    static constexpr bool value = answer;              \
  }
#define KERNELS_TWO class A, class B
#define KERNELS_PAIR(name) name<A, B>
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(DirectLoad), true);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(DirectStore), true);
KERNELS_ANY_WIDTH(class A, RowVector<A>, true);
KERNELS_ANY_WIDTH(class A, Tee<A>, true);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Quantize), true);
KERNELS_ANY_WIDTH(class A, Cycle<A>, any_width<A>);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Binary), any_width<A>);
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Affine), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(Both), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(MappedSource), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(MappedSink), (any_width<A, B>));
KERNELS_ANY_WIDTH(KERNELS_TWO, KERNELS_PAIR(MapChain), (any_width<A, B>));
// These read their rows at other addresses, in the same way.
KERNELS_ANY_WIDTH(class A, Repeated<A>, any_width<A>);
KERNELS_ANY_WIDTH(class A, Gathered<A>, any_width<A>);
KERNELS_ANY_WIDTH(class A, Paired<A>, any_width<A>);
#define KERNELS_STACKED Stacked<A, kParts>
#define KERNELS_COUNTED class A, int kParts
KERNELS_ANY_WIDTH(KERNELS_COUNTED, KERNELS_STACKED, any_width<A>);
#undef KERNELS_COUNTED
#undef KERNELS_STACKED
#undef KERNELS_PAIR
#undef KERNELS_TWO
#undef KERNELS_ANY_WIDTH

template <int N>
using Width = std::integral_constant<int, N>;

// The packs in which a row is read and written: the widest, followed by narrower ones for the remainder; or, if a
// functor requires it, packs of one width that divides cols and that every functor allows.
template <class Source, class Sink>
class Packs {
  static constexpr bool any = any_width<Source, Sink>;
  static constexpr int vector = kLanes<compute_type<Source>>;
  static constexpr int narrower = widest_of<Source>() < widest_of<Sink>() ? widest_of<Source>() : widest_of<Sink>();
  static constexpr int wide = any || narrower > vector ? vector : narrower;
  static constexpr int middle = wide >= 8 ? 4 : wide == 4 ? 2 : 1;

 public:
  Packs(const Source& source, const Sink& sink, int64_t cols) {
    if (any) return;
    const int most = lesser(max_pack_of(source, cols), max_pack_of(sink, cols));
    while (width_ > 1 && (width_ > most || cols % width_ != 0)) width_ = width_ == wide ? middle : 1;
  }

  // Calls f(Width<N>, col) for all packs in [begin, end). The widest ones are at multiples of their width after `lead`,
  // if the functors allow it.
  template <class F>
  void each(int64_t begin, int64_t end, const F& f, int lead = 0) const {
    // Narrow packs up to the first of the widest, then those and narrow ones behind them: a loop, to be compiled once.
    bool widest = !any || lead == 0;
    for (int64_t stop = widest ? end : lesser(end, begin + (lead - begin % wide + wide) % wide);; stop = end) {
      if (widest && (any || width_ == wide)) begin = run<wide>(begin, stop, f);
      if (middle < wide && (any || width_ == middle)) begin = run<middle>(begin, stop, f);
      if (any || width_ == 1) begin = run<1>(begin, stop, f);
      if (widest) return;
      widest = true;
    }
  }

 private:
  // f is a copy, so the compiler knows that no write changes its members.
  template <int N, class F>
  static KERNELS_INLINE int64_t run(int64_t col, int64_t end, const F f) {
    for (; col + N <= end; col += N) f(Width<N>{}, col);
    return col;
  }

  int width_ = wide;
};

}  // namespace host
}  // namespace detail
KERNELS_END
