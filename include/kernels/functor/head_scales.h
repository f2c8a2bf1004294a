// Per-head scales, which norm_heads() computes: how it shows the sinks of a row a head's values before they write them.
//
// Any sink end that quantizes groups of columns, with a head as a group, takes part; of qkv() each of the three, behind
// its own maps and rope. A head's values pass through the same functors twice: first to an end that only looks at them,
// then to one that knows the scale.
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
struct LeaveOut : Functor {
  static constexpr Role role = Role::sink;
  template <int N, class C>
  KERNELS_HD void store(const Pack<C, N>&, int64_t, int64_t) const {}
};
template <class State>
struct LookAtHead : Functor {
  static constexpr Role role = Role::sink;
  State* state;
  KERNELS_HD explicit LookAtHead(State* s) : state(s) {}
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
//   finds, right     whether any end computes scales; whether norm_heads() supports those
//   looking(sink)    the sink with ends that look
//   knowing(sink)    the sink with ends that write
//   gather(lanes)    combines the states of the lanes
//   write(...)       writes the scale of the head that begins at a column
template <class S, bool = SinksGroups<S>::value>
struct HeadScales {
  static constexpr bool finds = false, right = !is_row_sink<S>;
  KERNELS_HD LeaveOut looking(const S&) { return {}; }
  KERNELS_HD const S& knowing(const S& sink) const { return sink; }
  template <class Lanes>
  KERNELS_HD void gather(const Lanes&) {}
  KERNELS_HD void write(const S&, int64_t, int64_t, int64_t) const {}
  static Status check(const S&, int64_t) { return {}; }
};

template <class S>
struct HeadScales<S, true> {
  // Packs of a head may not fill whole words of 4-bit codes, so those are not supported.
  static constexpr bool finds = true, right = narrowest_of<S>() == 1;
  typename S::State state{};
  KERNELS_HD LookAtHead<typename S::State> looking(const S&) { return LookAtHead<typename S::State>(&state); }
  KERNELS_HD WriteHead<S> knowing(const S& sink) const { return {sink, state.finish()}; }
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
  static constexpr bool finds = HeadScales<S>::finds, right = HeadScales<S>::right;
  template <class Sink>
  KERNELS_HD auto looking(const Sink& sink) {
    if constexpr (finds)
      return sink.with(without_effects(sink.map()), behind.looking(sink.end()));
    else
      return LeaveOut{};
  }
  template <class Sink>
  KERNELS_HD auto knowing(const Sink& sink) const {
    return sink.with(sink.map(), behind.knowing(sink.end()));
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
  static constexpr bool finds = HeadScales<Q>::finds || HeadScales<K>::finds || HeadScales<V>::finds,
                        right = HeadScales<Q>::right && HeadScales<K>::right && HeadScales<V>::right;
  KERNELS_HD auto looking(const Sink& sink) {
    return sink.with(q.looking(sink.q()), k.looking(sink.k()), v.looking(sink.v()));
  }
  KERNELS_HD auto knowing(const Sink& sink) const {
    return sink.with(q.knowing(sink.q()), k.knowing(sink.k()), v.knowing(sink.v()));
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
