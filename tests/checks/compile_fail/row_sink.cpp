// FAILS PADDING_A_STATE: lacks KERNELS_HD float padding() const: a value that does not change a state
// FAILS ACCUMULATE_WITHOUT_VALID: accumulate(State& state, k::Pack<float, N> values, int valid) const
// FAILS MERGE_TO_A_RESULT: lacks KERNELS_HD void merge(State& into, const State& from) const
// FAILS NO_GATHER: lacks template <class Lanes> KERNELS_HD State gather(const State& state, const Lanes& lanes) const
// FAILS NO_FINISH: lacks KERNELS_HD float finish(const State& state) const
// FAILS WRITE_ROW_NOT_CONST: lacks KERNELS_HD void write_row(const State& state, int64_t row) const
// FAILS STORE_WITHOUT_A_RESULT: store(k::Pack<float, N> values, float finished, int64_t row, int64_t col) const
// FAILS GROUP_NOT_CONST: lacks KERNELS_HD int group() const
// FAILS WRITE_SCALE_OF_A_ROW: lacks KERNELS_HD void write_scale(const State& state, int64_t row, int64_t index) const
// FAILS TAKE_WITHOUT_A_COLUMN: take(k::Pack<float, N> values, int64_t col)
// FAILS NO_LARGEST: in its State float largest
// FAILS NO_FINISH_OF_A_GROUP: in its State KERNELS_HD float finish() const
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/rmsnorm.h>

namespace k = kernels;

struct OfRows : k::Functor {
  struct State {
    float m;
  };
#if defined(PADDING_A_STATE)
  KERNELS_HD State padding() const { return {0}; }
#else
  KERNELS_HD float padding() const { return 0; }
#endif
#if defined(ACCUMULATE_WITHOUT_VALID)
  template <int N>
  KERNELS_HD void accumulate(State&, const k::Pack<float, N>&) const {}
#else
  template <int N>
  KERNELS_HD void accumulate(State&, const k::Pack<float, N>&, int) const {}
#endif
#if defined(MERGE_TO_A_RESULT)
  KERNELS_HD State merge(const State& a, const State& b) const { return {a.m + b.m}; }
#else
  KERNELS_HD void merge(State& a, const State& b) const { a.m += b.m; }
#endif
#if !defined(NO_GATHER)
  template <class Lanes>
  KERNELS_HD State gather(const State& s, const Lanes& lanes) const { return {lanes.sum(s.m)}; }
#endif
#if !defined(NO_FINISH)
  KERNELS_HD float finish(const State& s) const { return s.m; }
#endif
#if defined(WRITE_ROW_NOT_CONST)
  KERNELS_HD void write_row(const State&, int64_t) {}
#else
  KERNELS_HD void write_row(const State&, int64_t) const {}
#endif
#if defined(STORE_WITHOUT_A_RESULT)
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>&, int64_t, int64_t) const {}
#else
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>&, float, int64_t, int64_t) const {}
#endif
};

struct OfGroups : k::Functor {
  static constexpr bool by_group = true;
  struct State {
#if defined(TAKE_WITHOUT_A_COLUMN)
    template <int N>
    KERNELS_HD void take(const k::Pack<float, N>&) {}
#else
    template <int N>
    KERNELS_HD void take(const k::Pack<float, N>&, int64_t) {}
#endif
#if defined(NO_LARGEST)
    float most;
#else
    float largest;
#endif
#if !defined(NO_FINISH_OF_A_GROUP)
    KERNELS_HD float finish() const { return 1; }
#endif
  };
#if defined(GROUP_NOT_CONST)
  KERNELS_HD int group() { return 4; }
#else
  KERNELS_HD int group() const { return 4; }
#endif
#if defined(WRITE_SCALE_OF_A_ROW)
  KERNELS_HD void write_scale(const State&, int64_t) const {}
#else
  KERNELS_HD void write_scale(const State&, int64_t, int64_t) const {}
#endif
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>&, float, int64_t, int64_t) const {}
};

k::Status f(const float* p) {
  const k::cpu::Exec ex{1};
  KERNELS_TRY(k::cpu::copy(ex, k::load(p, 8), OfRows(), 1, 8));
  KERNELS_TRY(k::cpu::rmsnorm(ex, k::load(p, 8), k::gelu() | OfRows(), 1, 8));
  return k::cpu::copy(ex, k::load(p, 8), k::gelu() | OfGroups(), 1, 8);
}
