// Per-head scales, which norm_heads() computes: how it shows the sinks of a row a head's values before they write them.
//
// Any sink end that quantizes groups of columns, with a head as a group, takes part; of qkv() each of the three, behind
// its own maps and rope. A head's values pass through the same functors twice: first to an end that only collects their
// state, then to one that knows the scale.
#pragma once

#include "../core/row_call.h"
#include "compose.h"

KERNELS_BEGIN

template <class M, class S>
class RotatingSink;
template <class Q, class K, class V>
class Qkv;

namespace detail {

// Ignores everything.
struct DiscardHead : Functor {
  static constexpr Role role = Role::sink;
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>&, int64_t, int64_t) const {}
};
template <class State>
struct CollectHead : Functor {
  static constexpr Role role = Role::sink;
  State* state;
  KERNELS_HD explicit CollectHead(State* s) : state(s) {}
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t, int64_t col) const {
    state->take(v, col);
  }
};
template <class End>
struct WriteHead : Functor {
  static constexpr Role role = Role::sink;
  End end;
  float found;
  KERNELS_HD WriteHead(const End& sink, float f) : end(sink), found(f) {}
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>& v, int64_t row, int64_t col) const {
    end.store(v, found, row, col);
  }
};

// The state of a head for each end of a sink; for all ends but the head's own it stays empty.
//
//   computes_scales    whether any end computes scales
//   supported          whether norm_heads() supports those
//   collecting(sink)   the sink with ends that collect the head's state
//   writing(sink)      the sink with ends that write
//   gather(lanes)      combines the states of the lanes
//   write(...)         writes the scale of the head that begins at a column
template <class S, bool = SinksGroups<S>::value>
struct HeadScales {
  static constexpr bool computes_scales = false, supported = !is_row_sink<S>;
  KERNELS_HD DiscardHead collecting(const S&) { return {}; }
  KERNELS_HD const S& writing(const S& sink) const { return sink; }
  template <class Lanes>
  KERNELS_HD void gather(const Lanes&) {}
  KERNELS_HD void write(const S&, int64_t, int64_t, int64_t) const {}
  static Status check(const S&, int64_t) { return {}; }
};

template <class S>
struct HeadScales<S, true> {
  // Packs of a head may not fill whole words of 4-bit codes, so those are not supported.
  static constexpr bool computes_scales = true, supported = narrowest_of<S>() == 1;
  typename S::State state{};
  KERNELS_HD CollectHead<typename S::State> collecting(const S&) { return CollectHead<typename S::State>(&state); }
  KERNELS_HD WriteHead<S> writing(const S& sink) const { return {sink, state.finish()}; }
  template <class Lanes>
  KERNELS_HD void gather(const Lanes& lanes) {
    state.largest = (lanes.max)(state.largest);
  }
  KERNELS_HD void write(const S& sink, int64_t row, int64_t col, int64_t dim) const {
    sink.write_scale(state, row, col / dim);
  }
  static Status check(const S& sink, int64_t dim) {
    return sink.group() == dim ? Status{}
                               : invalid("the groups of columns that are quantized are not the heads of dim");
  }
};

// The scales of the end behind a map, or behind a map and rope.
template <class S>
struct ScalesBehind {
  HeadScales<S> behind;
  static constexpr bool computes_scales = HeadScales<S>::computes_scales, supported = HeadScales<S>::supported;
  template <class Sink>
  KERNELS_HD auto collecting(const Sink& sink) {
    if constexpr (computes_scales)
      return sink.with(without_effects(sink.map()), behind.collecting(sink.end()));
    else
      return DiscardHead{};
  }
  template <class Sink>
  KERNELS_HD auto writing(const Sink& sink) const {
    return sink.with(sink.map(), behind.writing(sink.end()));
  }
  template <class Lanes>
  KERNELS_HD void gather(const Lanes& lanes) {
    behind.gather(lanes);
  }
  template <class Sink>
  KERNELS_HD void write(const Sink& sink, int64_t row, int64_t col, int64_t dim) const {
    behind.write(sink.end(), row, col, dim);
  }
  template <class Sink>
  static Status check(const Sink& sink, int64_t dim) {
    return HeadScales<S>::check(sink.end(), dim);
  }
};
template <class M, class S>
struct HeadScales<MappedSink<M, S>, false> : ScalesBehind<S> {};
template <class M, class S>
struct HeadScales<RotatingSink<M, S>, false> : ScalesBehind<S> {};

template <class Q, class K, class V>
struct HeadScales<Qkv<Q, K, V>, false> {
  using Sink = Qkv<Q, K, V>;
  HeadScales<Q> q;
  HeadScales<K> k;
  HeadScales<V> v;
  static constexpr bool computes_scales = HeadScales<Q>::computes_scales || HeadScales<K>::computes_scales ||
                                          HeadScales<V>::computes_scales,
                        supported = HeadScales<Q>::supported && HeadScales<K>::supported && HeadScales<V>::supported;
  KERNELS_HD auto collecting(const Sink& sink) {
    return sink.with(q.collecting(sink.q()), k.collecting(sink.k()), v.collecting(sink.v()));
  }
  KERNELS_HD auto writing(const Sink& sink) const {
    return sink.with(q.writing(sink.q()), k.writing(sink.k()), v.writing(sink.v()));
  }
  template <class Lanes>
  KERNELS_HD void gather(const Lanes& lanes) {
    q.gather(lanes), k.gather(lanes), v.gather(lanes);
  }
  KERNELS_HD void write(const Sink& sink, int64_t row, int64_t col, int64_t dim) const {
    const int64_t keys = sink.q_cols(), values = keys + sink.k_cols();
    if (col < keys)
      q.write(sink.q(), row, col, dim);
    else if (col < values)
      k.write(sink.k(), row, col - keys, dim);
    else
      v.write(sink.v(), row, col - values, dim);
  }
  static Status check(const Sink& sink, int64_t dim) {
    KERNELS_TRY(HeadScales<Q>::check(sink.q(), dim));
    KERNELS_TRY(HeadScales<K>::check(sink.k(), dim));
    return HeadScales<V>::check(sink.v(), dim);
  }
};

}  // namespace detail
KERNELS_END
