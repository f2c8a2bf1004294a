// The row ops as a CPU core runs them: many columns of a row at once, one sum per vector lane.
//
//   by_largest                        whether a run of columns is looked at for its largest value first
//   open(largest), open(first, count) the state to center the run on, from its largest value or its first ones (how
//                                     many; behind them is the very first again)
//   neutral(State)                    what takes the place of the values that the last vector of a run lacks
//   kSums, add(sums, centered)        what is summed, lane by lane
//   close(State, sums, count)         the state of the run
//   recenter(State, closed)           whether the run was centered so poorly that it is better summed once more; if so,
//                                     centers anew
#pragma once

#include "../../../core/memory.h"
#include "../../../core/row_op.h"
#include "../threads.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Packs of as many values as a vector register holds: the compilers then keep each pack in a register, where all that
// touches it is inlined. Wider ones live in memory between two operations.
template <class C>
constexpr int kLanes = kVectorBytes / int(sizeof(C));

// A pack in a register whatever the compiler makes of arrays: what a loop carries from one turn to the next.
#if KERNELS_VECTORS
template <class C>
using Register = VectorOf<C, kLanes<C>>;

template <class C>
inline KERNELS_INLINE Register<C> larger(Register<C> a, Register<C> b) { return a > b ? a : b; }
#else
template <class C>
using Register = Pack<C, kLanes<C>>;

template <class C>
inline KERNELS_INLINE Register<C> larger(const Register<C>& a, const Register<C>& b) {
  Register<C> out;
  for (int i = 0; i < out.size; ++i) out.v[i] = greater(a.v[i], b.v[i]);
  return out;
}
#endif

template <class C>
inline KERNELS_INLINE Register<C> in_register(const Pack<C, kLanes<C>>& v) { return bit_cast<Register<C>>(v); }
template <class C>
inline KERNELS_INLINE Pack<C, kLanes<C>> as_pack(const Register<C>& v) { return bit_cast<Pack<C, kLanes<C>>>(v); }

template <class C>
inline KERNELS_INLINE Register<C> vector_at(const C* from) {
  Register<C> v;
  copy_bytes<int(sizeof(v))>(&v, from);
  return v;
}
template <class C>
inline KERNELS_INLINE void put_vector(C* to, const Register<C>& v) { copy_bytes<int(sizeof(v))>(to, &v); }

template <int M, class C>
inline KERNELS_INLINE Pack<C, M> pack_at(const C* from) {
  Pack<C, M> v;
  copy_bytes<int(sizeof(v.v))>(v.v, from);
  return v;
}

template <int M, class C>
inline KERNELS_INLINE void put_pack(C* to, const Pack<C, M>& v) { copy_bytes<int(sizeof(v.v))>(to, v.v); }

// Not the standard library's, whose code would be the same for files with different instruction sets.
template <class T>
inline KERNELS_INLINE void fill(T* to, int64_t count, const T& value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// a * b + c, rounded once where the machine can. The compilers fuse the two on their own only where the language may be
// bent.
template <class C>
inline KERNELS_INLINE Register<C> multiply_add(const Register<C>& a, const Register<C>& b, const Register<C>& c) {
#if KERNELS_VECTORS && defined(__AVX512F__)
  if constexpr (std::is_same<C, float>::value) return _mm512_fmadd_ps(a, b, c);
  else return _mm512_fmadd_pd(a, b, c);
#elif KERNELS_VECTORS && defined(__FMA__)
  if constexpr (std::is_same<C, float>::value) return _mm256_fmadd_ps(a, b, c);
  else return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// So many of a run's first values may have a say in what it is centered on.
constexpr int kFirst = 32;

template <class Op>
struct InLanes;

template <class C>
struct SoftmaxInLanes {
  using State = SoftmaxState<C>;
  static constexpr bool by_largest = true;
  static constexpr int kSums = 1;

  static KERNELS_INLINE State open(C largest) { return {largest, C(0)}; }
  static KERNELS_INLINE C neutral(const State&) { return -infinity<C>(); }
  static KERNELS_INLINE State close(const State& s, const C* sums, const Count<C>&) { return {s.m, sums[0]}; }
  static constexpr bool recenter(State&, const State&) { return false; }
};
template <class C>
struct InLanes<SoftmaxOp<C>> : SoftmaxInLanes<C> {
  static KERNELS_INLINE void add(Register<C>* sums, const Pack<C, kLanes<C>>& x) { sums[0] = sums[0] + in_register(x); }
};
template <class C>
struct InLanes<LogSoftmaxOp<C>> : SoftmaxInLanes<C> {
  static KERNELS_INLINE void add(Register<C>* sums, const Pack<C, kLanes<C>>& x) {
    sums[0] = sums[0] + in_register(exp(x));
  }
};

// The origin is the mean of the first values. Taking the mean out of the squares afterwards costs as many times the
// rounding of m2 as the squares are larger than it: where outliers among the first values make that much, the run is
// summed again around its mean.
template <class C>
struct InLanes<LayerNormOp<C>> {
  using State = WelfordState<C>;
  static constexpr bool by_largest = false;
  static constexpr int kSums = 2;

  static KERNELS_INLINE State open(const Pack<C, kFirst>& first, int count) {
    const C total = sum(first - first.v[0]);
    return {first.v[0] + (count == kFirst ? total * C(1.0 / kFirst) : total / C(count)), C(0), C(0), C(0)};
  }
  static KERNELS_INLINE C neutral(const State& s) { return s.origin; }
  static KERNELS_INLINE void add(Register<C>* sums, const Pack<C, kLanes<C>>& x) {
    const Register<C> v = in_register(x);
    sums[0] = sums[0] + v;
    sums[1] = sums[1] + v * v;
  }
  static KERNELS_INLINE State close(const State& s, const C* sums, const Count<C>& count) {
    const C offset = sums[0] * count.inverse, m2 = sums[1] - sums[0] * offset;
    return {s.origin, offset, m2 < C(0) ? C(0) : m2, count.n};
  }
  static KERNELS_INLINE bool recenter(State& s, const State& closed) {
    const bool poor = C(2) * closed.n * (closed.offset * closed.offset) > closed.m2;
    if (poor) s.origin = closed.mean();
    return poor;
  }
};

// Values as they are, not centered, and one sum, which is the state.
template <class C, class State_>
struct UncenteredInLanes {
  using State = State_;
  static constexpr bool by_largest = false;
  static constexpr int kSums = 1;

  static KERNELS_INLINE State open(const Pack<C, kFirst>&, int) { return {}; }
  static KERNELS_INLINE C neutral(const State&) { return C(0); }
  static KERNELS_INLINE State close(const State&, const C* sums, const Count<C>&) { return {sums[0]}; }
  static constexpr bool recenter(State&, const State&) { return false; }
};
template <class C>
struct InLanes<RmsNormOp<C>> : UncenteredInLanes<C, typename RmsNormOp<C>::State> {
  static KERNELS_INLINE void add(Register<C>* sums, const Pack<C, kLanes<C>>& x) {
    const Register<C> v = in_register(x);
    sums[0] = sums[0] + v * v;
  }
};
template <class C>
struct InLanes<AsItIsOp<C>> : UncenteredInLanes<C, typename AsItIsOp<C>::State> {
  static KERNELS_INLINE void add(Register<C>*, const Pack<C, kLanes<C>>&) {}
};

}  // namespace host
}  // namespace detail
KERNELS_END
