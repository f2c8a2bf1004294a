// FAILS LOAD_OF_HALVES: load gives Pack<float, N> or Pack<double, N>, made of other types by k::convert<float>(pack)
// FAILS LOAD_OF_HALVES_BEFORE_A_MAP: load gives Pack<float, N> or Pack<double, N>
// FAILS LOAD_OF_NUMBERS: load gives Pack<float, N> or Pack<double, N>
// FAILS ELEMENTWISE_TO_A_STRUCT: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS ELEMENTWISE_TO_NOTHING: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS GLU_TO_A_STRUCT: a map of k::Elementwise has KERNELS_HD float operator()(float x) const
// FAILS LOAD_NOT_CONST: it must be template <int N> KERNELS_HD k::Pack<float, N> load(int64_t row, int64_t
// FAILS STORE_NOT_CONST: template <int N> KERNELS_HD void store(k::Pack<float, N> values, int64_t row,
// FAILS LOAD_NOT_CONST_BEFORE_A_MAP: a source has template <int N> KERNELS_HD k::Pack<float, N> load(int64_t row,
// FAILS STORE_NOT_CONST_BEHIND_A_MAP: a sink has template <int N> KERNELS_HD void store(k::Pack<float, N>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/rmsnorm.h>

namespace k = kernels;

struct Halves : k::Functor {
  template <int N>
  k::Pack<k::half, N> load(int64_t, int64_t) const { return {}; }
};
struct Numbers : k::Functor {
  template <int N>
  k::Pack<int, N> load(int64_t, int64_t) const { return {}; }
};
struct ToStruct : k::Elementwise<ToStruct> {
  Halves operator()(float) const { return {}; }
};
struct ToNothing : k::Elementwise<ToNothing> {
  void operator()(float) const {}
};
struct LoadNotConst : k::Functor {
  template <int N>
  k::Pack<float, N> load(int64_t, int64_t) { return {}; }
};
struct StoreNotConst : k::Functor {
  template <int N>
  void store(k::Pack<float, N>, int64_t, int64_t) {}
};

k::Status f(const float* p, float* y, int64_t n) {
  const k::cpu::Exec cx{1};
  const auto in = k::load(p, n);
  const auto out = k::store(y, n);
  KERNELS_TRY(k::cpu::rmsnorm(cx, in | k::add(Halves()), out, n, n));  // converted there
#if defined(LOAD_OF_HALVES)
  return k::cpu::rmsnorm(cx, Halves(), out, n, n);
#elif defined(LOAD_OF_HALVES_BEFORE_A_MAP)
  return k::cpu::copy(cx, Halves() | k::scale(2), out, n, n);
#elif defined(LOAD_OF_NUMBERS)
  return k::cpu::rmsnorm(cx, Numbers(), out, n, n);
#elif defined(ELEMENTWISE_TO_A_STRUCT)
  return k::cpu::copy(cx, in | ToStruct(), out, n, n);
#elif defined(ELEMENTWISE_TO_NOTHING)
  return k::cpu::copy(cx, in, ToNothing() | out, n, n);
#elif defined(GLU_TO_A_STRUCT)
  return k::cpu::copy(cx, k::gated(in, in) | k::glu(ToStruct()), out, n, n);
#elif defined(LOAD_NOT_CONST)
  return k::cpu::copy(cx, LoadNotConst(), out, n, n);
#elif defined(STORE_NOT_CONST)
  return k::cpu::rmsnorm(cx, in, StoreNotConst(), n, n);
#elif defined(LOAD_NOT_CONST_BEFORE_A_MAP)
  (void)(LoadNotConst() | k::gelu());
  return {};
#elif defined(STORE_NOT_CONST_BEHIND_A_MAP)
  (void)(k::gelu() | StoreNotConst());
  return {};
#else
  return k::cpu::copy(cx, in, out, n, n);
#endif
}
