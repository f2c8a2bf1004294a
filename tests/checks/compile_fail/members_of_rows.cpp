// FAILS MAX_PACK_NOT_CONST: max_pack does not fit, and would be left out: it must be public, and declared as int
// FAILS MAX_PACK_A_NUMBER: declared as int max_pack() const
// FAILS MAX_PACK_PRIVATE: declared as int max_pack() const
// FAILS MAX_PACK_OF_A_SINK: declared as int max_pack() const
// FAILS MAX_PACK_OF_A_MAP: declared as int max_pack() const
// FAILS WIDEST_A_FUNCTION: declared as static constexpr int widest
// FAILS CHECK_OF_NOTHING: declared as k::Status check(int64_t rows, int64_t cols) const
// FAILS CHECK_NOT_CONST: declared as k::Status check(int64_t rows, int64_t cols) const
// FAILS CHECK_OF_AN_ELEMENTWISE: declared as k::Status check(int64_t rows, int64_t cols) const
// FAILS CHECK_OF_AN_HEIR: declared as k::Status check(int64_t rows, int64_t cols) const
// FAILS EFFECTS_A_FUNCTION: declared as static constexpr bool has_effects
// FAILS RELOAD_NOT_CONST: declared as template <int N> KERNELS_HD k::Pack<float, N> reload(int64_t row,
// FAILS RELOAD_WITH_EFFECTS: declared as template <int N> KERNELS_HD k::Pack<float, N> reload(int64_t row,
// FAILS WITHOUT_EFFECTS_NOT_CONST: declared as KERNELS_HD auto without_effects() const
// FAILS CAN_PACK_AS_A_STRING: declared as bool CanPackAs(size_t n), as in OneFlow
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/quantize.h>

namespace k = kernels;

struct Source : k::Functor {
  template <int N>
  k::Pack<float, N> load(int64_t, int64_t) const { return {}; }
};
struct Sink : k::Functor {
  template <int N>
  void store(k::Pack<float, N>, int64_t, int64_t) const {}
};
struct Map : k::Functor {
  template <int N>
  k::Pack<float, N> map(k::Pack<float, N> v, int64_t, int64_t) const { return v; }
};

struct NotConst : Source { int max_pack() { return 1; } };
struct Number : Source { static constexpr int max_pack = 1; };
class Private : public Source { int max_pack() const { return 1; } };
struct SinkNotConst : Sink { int max_pack() { return 1; } };
struct MapNotConst : Map { int max_pack() { return 1; } };
struct Widest : Source { static constexpr int widest() { return 1; } };
struct OfNothing : Source { k::Status check() const { return {}; } };
struct CheckNotConst : Sink { k::Status check(int64_t, int64_t) { return {}; } };
struct Halved : k::Elementwise<Halved> {
  float operator()(float x) const { return x / 2; }
  k::Status check() const { return {}; }
};
struct Heir : k::DirectLoad<float> {
  Heir() : k::DirectLoad<float>(nullptr, 1) {}
  k::Status check(int64_t) const { return {}; }
};
struct Effects : Source { bool has_effects() const { return true; } };
struct Reload : Source {
  template <int N>
  k::Pack<float, N> reload(int64_t, int64_t) { return {}; }
};
struct ReloadEffects : Reload { static constexpr bool has_effects = true; };
struct WithoutEffects : Map {
  static constexpr bool has_effects = true;
  Map without_effects() { return {}; }
};
struct CanPack : Source { bool CanPackAs(const char*) { return true; } };

// These are right: what they inherit is, and data are their own business.
struct RightHeir : k::DirectLoad<float> {
  bool check = true, reload = true;
  RightHeir() : k::DirectLoad<float>(nullptr, 1) {}
};
struct RightMap : k::Elementwise<RightMap> {
  float operator()(float x) const { return x / 2; }
  k::Status check(int64_t, int64_t) const { return {}; }
};
struct RightFinal final : k::Functor {
  int max_pack() const { return 1; }
  template <int N>
  k::Pack<float, N> load(int64_t, int64_t) const { return {}; }
  template <int N>
  k::Pack<float, N> reload(int64_t, int64_t) const { return {}; }
};
struct RightDoubles : k::Functor {
  template <int N>
  void store(k::Pack<double, N>, int64_t, int64_t) const {}
  template <int N>
  void store_if(bool, k::Pack<double, N>, int64_t, int64_t) const {}
};

template <class Source, class Sink>
k::Status twice(const Source& source, const Sink& sink) {
  return k::cpu::rmsnorm(k::cpu::Exec{1}, source, sink, 1, 1);
}

k::Status f(int8_t* codes, float* scales) {
  const k::cpu::Exec cx{1};
  KERNELS_TRY(twice(RightHeir() | RightMap(), k::add(RightHeir()) | Sink()));
  KERNELS_TRY(twice(RightFinal(), k::quantize(codes, 1, scales)));
  KERNELS_TRY(twice(k::load(static_cast<const double*>(nullptr), 1), RightDoubles()));
#if defined(MAX_PACK_NOT_CONST)
  return k::cpu::copy(cx, NotConst(), Sink(), 1, 1);
#elif defined(MAX_PACK_A_NUMBER)
  return k::cpu::copy(cx, Number() | k::gelu(), Sink(), 1, 1);
#elif defined(MAX_PACK_PRIVATE)
  return k::cpu::copy(cx, Private(), Sink(), 1, 1);
#elif defined(MAX_PACK_OF_A_SINK)
  return twice(Source(), k::gelu() | SinkNotConst());
#elif defined(MAX_PACK_OF_A_MAP)
  return twice(Source() | k::gelu() | MapNotConst(), Sink());
#elif defined(WIDEST_A_FUNCTION)
  return k::cpu::copy(cx, Widest(), Sink(), 1, 1);
#elif defined(CHECK_OF_NOTHING)
  return k::cpu::copy(cx, k::load(scales, 1) | k::add(OfNothing()), Sink(), 1, 1);
#elif defined(CHECK_NOT_CONST)
  return k::cpu::copy(cx, Source(), CheckNotConst(), 1, 1);
#elif defined(CHECK_OF_AN_ELEMENTWISE)
  return twice(Source() | Halved(), Sink());
#elif defined(CHECK_OF_AN_HEIR)
  return twice(Heir(), Sink());
#elif defined(EFFECTS_A_FUNCTION)
  return twice(Effects() | k::gelu(), Sink());
#elif defined(RELOAD_NOT_CONST)
  return twice(Reload() | k::gelu(), Sink());
#elif defined(RELOAD_WITH_EFFECTS)
  return twice(ReloadEffects() | k::gelu(), Sink());
#elif defined(WITHOUT_EFFECTS_NOT_CONST)
  return twice(k::load(scales, 1) | WithoutEffects(), Sink());
#elif defined(CAN_PACK_AS_A_STRING)
  return k::cpu::copy(cx, CanPack(), Sink(), 1, 1);
#else
  return k::cpu::copy(cx, RightFinal(), Sink(), 1, 1);
#endif
}
