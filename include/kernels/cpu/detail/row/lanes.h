// The row ops in vectors, for the CPU: many columns of a row at once, one sum for each vector lane. The members of
// InLanes:
//
//   by_largest                        whether a run of columns is first searched for its largest value
//   open(largest), open(first, count) the state on which the run is centered, from its largest value or from its first
//                                     ones (`count`; behind them the very first is repeated)
//   neutral(State)                    fills up the last vector of a run
//   kSums, add(sums, centered)        what is summed, lane by lane
//   close(State, sums, count)         the state of the run
//   recenter(State, closed)           whether the run was centered so poorly that it should be summed again; if so,
//                                     changes the state to center on
#pragma once

#include "../../../core/memory.h"
#include "../../../core/row_op.h"
#include "../threads.h"

KERNELS_BEGIN
namespace detail {
namespace host {

// Packs that fill a vector register: compilers keep each in a register if all code that uses it is inlined. Wider packs
// go through memory between operations.
template <class C>
constexpr int kLanes = kVectorBytes / int(sizeof(C));

// A pack that stays in a register, whatever the compiler does with arrays: for values carried from iteration to
// iteration.
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

// Not the standard library's, whose code files with different instruction sets would share.
template <class T>
inline KERNELS_INLINE void fill(T* to, int64_t count, const T& value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// a * b + c, rounded once if the machine can. Compilers fuse the two themselves only with relaxed floating-point flags.
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

// How many of a run's first values can influence what it is centered on.
constexpr int kFirst = 32;

template <class Op>
struct InLanes;

template <class C>
struct SoftmaxInLanes {
  using State = SoftmaxState<C>;
  static constexpr bool by_largest = true, by_first = false;
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

// The origin is the mean of the first values. Subtracting the mean from the squares afterwards amplifies the rounding
// error of m2 by the ratio of the squares to m2. If outliers among the first values make that ratio large, the run is
// summed again around its mean.
template <class C>
struct InLanes<LayerNormOp<C>> {
  using State = WelfordState<C>;
  static constexpr bool by_largest = false, by_first = true;
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

// Values that are not centered, with a single sum, which is the state.
template <class C, class State_>
struct UncenteredInLanes {
  using State = State_;
  static constexpr bool by_largest = false, by_first = false;
  static constexpr int kSums = 1;

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
