// FAILS MAX_PACK_NOT_CONST: max_pack does not fit, and would be left out: it must be public, and declared as int
// FAILS MAX_PACK_OF_A_SINK: declared as int max_pack() const
// FAILS CHECK_OF_NOTHING: declared as k::Status check(int64_t rows, int64_t cols) const
// FAILS RELOAD_NOT_CONST: declared as template <int N> KERNELS_HD k::Pack<float, N> reload(int64_t row,
// FAILS TAKES_ANY_COLUMN_A_FUNCTION: declared as static constexpr bool takes_any_column
// FAILS ANY_COLUMN_NOT_CONST: declared as auto any_column() const
// FAILS PLACED_OF_A_ROW: declared as template <int N> KERNELS_HD auto placed(int64_t row, int64_t col) const
// FAILS STORE_IF_OF_NOTHING: declared as template <int N> KERNELS_HD void store_if(bool there,
#include <kernels/elementwise.cuh>
#include <kernels/rmsnorm.cuh>

namespace k = kernels;

struct Source : k::Functor {
  template <int N>
  KERNELS_HD k::Pack<float, N> load(int64_t, int64_t) const { return {}; }
};
struct Sink : k::Functor {
  template <int N>
  KERNELS_HD void store(k::Pack<float, N>, int64_t, int64_t) const {}
};
struct Map : k::Functor {
  template <int N>
  KERNELS_HD k::Pack<float, N> map(k::Pack<float, N> v, int64_t, int64_t) const { return v; }
};

struct NotConst : Source { int max_pack() { return 1; } };
struct SinkNotConst : Sink { int max_pack() { return 1; } };
struct OfNothing : Source { k::Status check() const { return {}; } };
struct Reload : Source {
  template <int N>
  KERNELS_HD k::Pack<float, N> reload(int64_t, int64_t) { return {}; }
};
struct TakesAnyColumn : Map { static constexpr bool takes_any_column() { return true; } };
struct AnyColumn : Source {
  static constexpr bool takes_any_column = true;
  AnyColumn any_column() { return *this; }
};
struct Placed : Source {
  static constexpr bool takes_any_column = true;
  KERNELS_HD Placed placed(int64_t) const { return *this; }
};
struct StoredIf : Sink {
  static constexpr bool takes_any_column = true;
  template <int N>
  KERNELS_HD void store_if(k::Pack<float, N>, int64_t, int64_t) const {}
};

k::Status f(const float* p, float* y) {
  const cudaStream_t s{};
  const auto in = k::load(p, 8);
  const auto out = k::store(y, 8);
#if defined(MAX_PACK_NOT_CONST)
  return k::copy(s, NotConst() | k::gelu(), Sink(), 1, 1);
#elif defined(MAX_PACK_OF_A_SINK)
  return k::copy(s, Source(), SinkNotConst(), 1, 1);
#elif defined(CHECK_OF_NOTHING)
  return k::rmsnorm(s, in | k::add(OfNothing()), Sink(), 1, 1);
#elif defined(RELOAD_NOT_CONST)
  return k::rmsnorm(s, Reload(), Sink(), 1, 1);
#elif defined(TAKES_ANY_COLUMN_A_FUNCTION)
  return k::rmsnorm(s, in | TakesAnyColumn(), out, 1, 8);
#elif defined(ANY_COLUMN_NOT_CONST)
  return k::rmsnorm(s, AnyColumn() | k::gelu(), out, 1, 8);
#elif defined(PLACED_OF_A_ROW)
  return k::rmsnorm(s, Placed() | k::gelu(), out, 1, 8);
#elif defined(STORE_IF_OF_NOTHING)
  return k::rmsnorm(s, in, StoredIf(), 1, 8);
#else
  return k::copy(s, in, out, 1, 1);
#endif
}
