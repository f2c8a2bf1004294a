// What functors are and how they fit together: roles, operator|, pack widths, argument checks, users' own functors and
// those in OneFlow's form.
#include <kernels/append.h>
#include <kernels/functor.h>
#include <kernels/quantize.h>
#include <kernels/rope.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/tally.h"

namespace k = kernels;
using k::Role;

namespace {

// ---- users' functors, in every form --------------------------------------------------------------------------------

struct Clamp : k::Functor {
  float hi;
  explicit Clamp(float h) : hi(h) {}
  template <int N>
  KERNELS_HD auto map(k::Pack<float, N> v, int64_t, int64_t) const { return k::min(v, hi); }
};

// value = row * 1000 + col
struct Ramp : k::Functor {
  template <int N>
  KERNELS_HD k::Pack<float, N> load(int64_t row, int64_t col) const {
    k::Pack<float, N> out;
    for (int i = 0; i < N; ++i) out[i] = float(row * 1000 + col + i);
    return out;
  }
};

struct DoubleRamp : k::Functor {
  template <int N>
  KERNELS_HD k::Pack<double, N> load(int64_t row, int64_t col) const {
    return k::convert<double>(Ramp{}.load<N>(row, col));
  }
};

// Reading apart from computing.
struct SplitRamp : k::Functor {
  template <int N>
  struct Both {
    k::Pack<float, N> value;
    int64_t row;
  };
  template <int N>
  KERNELS_HD Both<N> fetch(int64_t row, int64_t col) const { return {Ramp{}.load<N>(0, col), row}; }
  template <int N>
  KERNELS_HD k::Pack<float, N> resolve(const Both<N>& fetched, int64_t, int64_t) const {
    return fetched.value + float(fetched.row) * 1000.f;
  }
};

// A source that counts: reading it again would give something else.
struct Once : k::Functor {
  int* reads;
  explicit Once(int* r) : reads(r) {}
  template <int N>
  KERNELS_HD k::Pack<float, N> load(int64_t, int64_t) const { return k::broadcast<N>(float(++*reads)); }
  template <int N>
  KERNELS_HD k::Pack<float, N> reload(int64_t, int64_t) const { return k::broadcast<N>(float(*reads)); }
};

// A map with an operand.
struct AddRamp : k::Functor {
  template <int N>
  KERNELS_HD k::Pack<float, N> fetch(int64_t row, int64_t col) const { return Ramp{}.load<N>(row, col); }
  template <int N>
  KERNELS_HD k::Pack<float, N> map(const k::Pack<float, N>& v, const k::Pack<float, N>& ramp, int64_t, int64_t) const {
    return v + ramp;
  }
};

struct ToFloats : k::Functor {
  float* p;
  explicit ToFloats(float* pointer) : p(pointer) {}
  static constexpr int widest = 2;
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>& v, int64_t, int64_t col) const {
    for (int i = 0; i < N; ++i) p[col + i] = v[i];
  }
};

struct RowMaximum : k::Functor {
  float* p;
  explicit RowMaximum(float* pointer) : p(pointer) {}
  struct State {
    float largest = -1e30f;
  };
  KERNELS_HD float padding() const { return -1e30f; }
  template <int N>
  KERNELS_HD void accumulate(State& s, const k::Pack<float, N>& v, int) const {
    s.largest = k::greater(s.largest, k::max_of(v));
  }
  KERNELS_HD void merge(State& a, const State& b) const { a.largest = k::greater(a.largest, b.largest); }
  KERNELS_HD float finish(const State& s) const { return s.largest; }
  KERNELS_HD void write_row(const State& s, int64_t row) const { p[row] = s.largest; }
  template <int N>
  KERNELS_HD void store(const k::Pack<float, N>&, float, int64_t, int64_t) const {}
};

// OneFlow's forms: no base, and plain pointers.
template <class Src, class Dst>
struct OneFlowLoad {
  const Src* src;
  int64_t row_size;
  template <int N>
  KERNELS_HD void load(Dst* dst, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) dst[i] = k::convert<Dst>(src[row * row_size + col + i]);
  }
};

template <class Src, class Dst>
struct OneFlowStore {
  Dst* dst;
  int64_t row_size;
  template <int N>
  KERNELS_HD void store(const Src* src, int64_t row, int64_t col) const {
    for (int i = 0; i < N; ++i) dst[row * row_size + col + i] = static_cast<Dst>(src[i]);
  }
};

// Not const, into halves, with rows of 32 bits.
struct Halves {
  int64_t group;
  template <int N>
  KERNELS_HD void load(k::half* dst, int32_t, int64_t) {
    for (int i = 0; i < N; ++i) dst[i] = k::convert<k::half>(1.f);
  }
  bool CanPackAs(size_t n) { return group % int64_t(n) == 0; }
};
struct FromDoubles {
  template <int N>
  KERNELS_HD void store(const double*, int, int) {}
};
struct WithoutColumn {
  template <int N>
  void load(float*, int64_t) const {}
};

struct NoFunctor {};

template <class F>
constexpr Role role_of() { return k::detail::role_of<F>(); }

template <class A, class B, class = void>
struct composes : std::false_type {};
template <class A, class B>
struct composes<A, B, k::detail::void_t<decltype(std::declval<const A&>() | std::declval<const B&>())>>
    : std::integral_constant<bool, k::detail::goes_before<A, B>> {};

template <int N, class S>
auto read(const S& source, int64_t row, int64_t col) {
  return k::detail::resolve(source, k::detail::fetch<N>(source, row, col), row, col);
}

float x[64];
float y[64];
int8_t q[64];

}  // namespace

// ---- roles ---------------------------------------------------------------------------------------------------------

TEST_CASE("the library's functors have their roles") {
  CHECK(role_of<decltype(k::load(x, 8))>() == Role::source);
  CHECK(role_of<decltype(k::row(x))>() == Role::source);
  CHECK(role_of<decltype(k::per_row(x))>() == Role::source);
  CHECK(role_of<decltype(k::cycle(k::row(x), 2))>() == Role::source);
  CHECK(role_of<decltype(k::one_plus(x))>() == Role::source);
  CHECK(role_of<decltype(k::scale(1))>() == Role::map);
  CHECK(role_of<decltype(k::shift(1))>() == Role::map);
  CHECK(role_of<decltype(k::relu())>() == Role::map);
  CHECK(role_of<decltype(k::silu())>() == Role::map);
  CHECK(role_of<decltype(k::gelu())>() == Role::map);
  CHECK(role_of<decltype(k::gelu_erf())>() == Role::map);
  CHECK(role_of<decltype(k::round_to<k::half>())>() == Role::map);
  CHECK(role_of<decltype(k::add(x))>() == Role::map);
  CHECK(role_of<decltype(k::mul(k::load(x, 8)))>() == Role::map);
  CHECK(role_of<decltype(k::mask(k::load(x, 8)))>() == Role::map);
  CHECK(role_of<decltype(k::bias(x))>() == Role::map);
  CHECK(role_of<decltype(k::affine(x))>() == Role::map);
  CHECK(role_of<decltype(k::affine(x, y))>() == Role::map);
  CHECK(role_of<decltype(k::causal(1, 1))>() == Role::map);
  CHECK(role_of<decltype(k::tee(x, 8))>() == Role::map);
  CHECK(role_of<k::Identity>() == Role::map);
  CHECK(role_of<decltype(k::store(x, 8))>() == Role::sink);
  CHECK(role_of<decltype(k::both(k::store(x, 8), k::store(y, 8)))>() == Role::sink);
  CHECK(role_of<decltype(k::quantize(q, 8, x))>() == Role::row_sink);
}

TEST_CASE("users' functors are recognized by their members") {
  CHECK(role_of<Clamp>() == Role::map);
  CHECK(role_of<AddRamp>() == Role::map);
  CHECK(role_of<Ramp>() == Role::source);
  CHECK(role_of<DoubleRamp>() == Role::source);
  CHECK(role_of<SplitRamp>() == Role::source);
  CHECK(role_of<Once>() == Role::source);
  CHECK(role_of<ToFloats>() == Role::sink);
  CHECK(role_of<RowMaximum>() == Role::row_sink);
  CHECK((role_of<OneFlowLoad<float, float>>() == Role::source));
  CHECK((role_of<OneFlowLoad<float, double>>() == Role::source));
  CHECK((role_of<OneFlowStore<float, int>>() == Role::sink));
  CHECK((role_of<OneFlowStore<double, float>>() == Role::sink));
  CHECK(role_of<Halves>() == Role::source);
  CHECK(role_of<FromDoubles>() == Role::sink);
  CHECK(role_of<WithoutColumn>() == Role::none);
  // A load that is not const may change its functor, and any may change memory; alone or in a composition.
  CHECK((k::detail::changes_itself<Halves> && k::detail::changes_itself<FromDoubles>));
  CHECK((!k::detail::changes_itself<OneFlowLoad<float, float>> &&
         !k::detail::changes_itself<k::DirectStore<float, float>>));
  CHECK((k::detail::loaded_once<Halves> && k::detail::loaded_once<OneFlowLoad<float, float>> &&
         !k::detail::loaded_once<Ramp>));
  using Composed = decltype(Halves{} | k::scale(2) | k::shift(1));
  CHECK((k::detail::loaded_once<Composed> && k::detail::changes_itself<Composed>));
  CHECK((k::detail::loaded_once<decltype(Ramp{} | k::add(Halves{}))>));
  CHECK(role_of<NoFunctor>() == Role::none);
  CHECK(role_of<int>() == Role::none);
  CHECK(role_of<float*>() == Role::none);
}

TEST_CASE("compute types") {
  CHECK(std::is_same<k::compute_type<k::DirectLoad<k::half>>, float>::value);
  CHECK(std::is_same<k::compute_type<k::DirectLoad<double>>, double>::value);
  CHECK(std::is_same<k::compute_type<k::DirectLoad<k::half, double>>, double>::value);
  CHECK(std::is_same<k::compute_type<DoubleRamp>, double>::value);
  CHECK((std::is_same<k::compute_type<OneFlowLoad<float, double>>, double>::value));
  CHECK((std::is_same<k::compute_type<Halves>, float>::value));
  CHECK((std::is_same<k::compute_type<OneFlowLoad<k::half, float>>, float>::value));
  CHECK(std::is_same<k::compute_type<decltype(DoubleRamp{} | k::scale(2) | k::gelu())>, double>::value);
}

// ---- composition ---------------------------------------------------------------------------------------------------

TEST_CASE("what composes, and into what") {
  using Source = decltype(k::load(x, 8));
  using Map = decltype(k::scale(2));
  using Chain = decltype(k::scale(2) | k::relu());
  using Sink = decltype(k::store(y, 8));
  using RowSink = decltype(k::quantize(q, 8, x));
  CHECK((role_of<decltype(std::declval<Source>() | std::declval<Map>())>() == Role::source));
  CHECK((role_of<decltype(std::declval<Source>() | std::declval<Chain>())>() == Role::source));
  CHECK((role_of<decltype(std::declval<Map>() | std::declval<Map>())>() == Role::map));
  CHECK((role_of<decltype(std::declval<Chain>() | std::declval<Chain>())>() == Role::map));
  CHECK((role_of<decltype(std::declval<Map>() | std::declval<Sink>())>() == Role::sink));
  CHECK((role_of<decltype(std::declval<Chain>() | std::declval<Sink>())>() == Role::sink));
  CHECK((role_of<decltype(std::declval<Map>() | (std::declval<Map>() | std::declval<Sink>()))>() == Role::sink));
  CHECK((role_of<decltype(std::declval<Map>() | std::declval<RowSink>())>() == Role::row_sink));
  CHECK(
      (role_of<decltype(std::declval<Chain>() | (std::declval<Map>() | std::declval<RowSink>()))>() == Role::row_sink));
  CHECK((composes<OneFlowLoad<float, float>, Map>::value));
  CHECK((composes<Map, OneFlowStore<float, float>>::value));
  CHECK((composes<Clamp, ToFloats>::value));
  CHECK((composes<Ramp, Clamp>::value));
  CHECK((composes<Clamp, RowMaximum>::value));

  CHECK_FALSE((composes<Source, Source>::value));
  CHECK_FALSE((composes<Source, Sink>::value));
  CHECK_FALSE((composes<Map, Source>::value));
  CHECK_FALSE((composes<Sink, Map>::value));
  CHECK_FALSE((composes<Sink, Source>::value));
  CHECK_FALSE((composes<Sink, Sink>::value));
  CHECK_FALSE((composes<RowSink, Map>::value));
  CHECK_FALSE((composes<Map, NoFunctor>::value));
  CHECK_FALSE((composes<NoFunctor, Map>::value));
  CHECK_FALSE((composes<Map, float>::value));
}

// However a sink was put together, engines see one map and one end.
TEST_CASE("a sink comes apart into its maps and its end") {
  const auto left = k::scale(2) | k::shift(1) | k::store(y, 8);
  const auto right = k::scale(2) | (k::shift(1) | k::store(y, 8));
  CHECK(std::is_same<decltype(left), decltype(right)>::value);
  CHECK(std::is_same<k::detail::SinkEnd<decltype(left)>, decltype(k::store(y, 8))>::value);
  CHECK(k::detail::sink_map(right).map(k::broadcast<2>(3.f),
                                       k::detail::fetch_operands<2>(k::detail::sink_map(right), 0, 0), 0, 0)[1] == 7.f);
  CHECK(std::is_same<decltype(k::detail::sink_map(k::store(y, 8))), k::Identity>::value);
  CHECK(std::is_same<k::detail::SinkEnd<decltype(k::store(y, 8))>, decltype(k::store(y, 8))>::value);
}

TEST_CASE("users' sources and maps give their values, alone and composed") {
  test::Tally t;
  const auto check = [&t](const char* what, const auto& source, float (*want)(float)) {
    for (const int64_t row : {0, 3}) {
      for (const int64_t col : {0, 5, 8}) {
        const auto wide = read<4>(source, row, col);
        const auto narrow = read<1>(source, row, col + 2);
        for (int i = 0; i < 4; ++i) {
          const float w = want(float(row * 1000 + col + i));
          t.expect(wide[i] == w, "%s: got %g, want %g", what, double(wide[i]), double(w));
        }
        t.expect(narrow[0] == want(float(row * 1000 + col + 2)), "%s: one element is %g", what, double(narrow[0]));
      }
    }
  };
  check("Ramp", Ramp{}, [](float v) { return v; });
  check("DoubleRamp", DoubleRamp{}, [](float v) { return v; });
  check("SplitRamp", SplitRamp{}, [](float v) { return v; });
  check("Ramp | Clamp", Ramp{} | Clamp(7), [](float v) { return v < 7 ? v : 7; });
  check("SplitRamp | Clamp | scale", SplitRamp{} | Clamp(7) | k::scale(2), [](float v) { return 2 * (v < 7 ? v : 7); });
  check("Ramp | AddRamp", Ramp{} | AddRamp{}, [](float v) { return 2 * v; });
  check("Ramp | (AddRamp | Clamp)", Ramp{} | (AddRamp{} | Clamp(7)), [](float v) { return 2 * v < 7 ? 2 * v : 7; });
  check("Ramp | add(Ramp)", Ramp{} | k::add(Ramp{}), [](float v) { return 2 * v; });
  check("Ramp | add(DoubleRamp)", Ramp{} | k::add(DoubleRamp{}), [](float v) { return 2 * v; });
  check("Ramp | affine(Ramp, SplitRamp)", Ramp{} | k::affine(Ramp{}, SplitRamp{} | k::scale(-1)),
        [](float v) { return v * v - v; });

  std::vector<double> matrix(4 * 1000 + 20);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = double(i);
  check("OneFlow load", OneFlowLoad<double, float>{matrix.data(), 1000}, [](float v) { return v; });
  check("OneFlow load, double", OneFlowLoad<double, double>{matrix.data(), 1000}, [](float v) { return v; });
  check("OneFlow load | maps", OneFlowLoad<double, float>{matrix.data(), 1000} | k::scale(0.5) | Clamp(2),
        [](float v) { return v / 2 < 2 ? v / 2 : 2; });
  check("add(OneFlow load)", Ramp{} | k::add(OneFlowLoad<double, float>{matrix.data(), 1000}),
        [](float v) { return 2 * v; });
  CHECK_TALLY(t);
}

TEST_CASE("users' sinks receive the values, alone and composed") {
  const k::Pack<float, 2> v{{2.5f, -9.f}};
  const auto clear = [] { std::memset(y, 0, sizeof(y)); };
  clear();
  k::detail::put(ToFloats(y), v, 0, 4);
  CHECK((y[3] == 0 && y[4] == 2.5f && y[5] == -9.f && y[6] == 0));
  clear();
  k::detail::put(k::scale(2) | Clamp(4) | ToFloats(y), v, 0, 1);
  CHECK((y[0] == 0 && y[1] == 4.f && y[2] == -18.f && y[3] == 0));
  clear();
  k::detail::put(OneFlowStore<float, float>{y, 10}, v, 1, 3);
  CHECK((y[12] == 0 && y[13] == 2.5f && y[14] == -9.f && y[15] == 0));
  clear();
  k::detail::put(k::relu() | OneFlowStore<float, float>{y, 10}, v, 1, 3);
  CHECK((y[13] == 2.5f && y[14] == 0 && y[15] == 0));
  clear();
  k::detail::put(k::both(OneFlowStore<float, float>{y, 10}, k::scale(3) | ToFloats(y)), v, 2, 3);
  CHECK((y[23] == 2.5f && y[24] == -9.f && y[3] == 7.5f && y[4] == -27.f));

  RowMaximum::State a, b;
  const auto sink = k::detail::sink_end(k::scale(2) | RowMaximum(y));
  sink.accumulate(a, v, 2);
  sink.accumulate(b, k::broadcast<4>(3.f), 4);
  sink.merge(a, b);
  sink.write_row(a, 7);
  CHECK(y[7] == 3.f);
}

TEST_CASE("a second pass asks a source that has one for its reload") {
  int reads = 0;
  const Once once(&reads);
  const auto source = once | k::scale(10);
  CHECK(read<2>(source, 0, 0)[1] == 10.f);
  CHECK(reads == 1);
  const auto again = k::detail::second_pass(source);
  CHECK(read<2>(again, 0, 0)[1] == 10.f);
  CHECK(read<2>(k::detail::second_pass(once), 0, 0)[0] == 1.f);
  CHECK(reads == 1);
  CHECK(read<2>(source, 0, 0)[1] == 20.f);
  CHECK(std::is_same<decltype(k::detail::second_pass(Ramp{})), const Ramp&>::value);  // itself
}

// ---- how wide a pack may be ----------------------------------------------------------------------------------------

namespace {

// Whether packs of n start at a multiple of min(16, their size) in every row: tried, not derived.
bool packs_fit(const void* p, int64_t ld, int64_t size, int n) {
  const int64_t unit = n * size < 16 ? n * size : 16;
  for (int64_t row = 0; row < 32; ++row) {
    if ((reinterpret_cast<intptr_t>(p) + row * ld * size) % unit != 0) return false;
  }
  return true;
}
int widest_fit(const void* p, int64_t ld, int64_t size, int widest) {
  int n = widest;
  while (n > 1 && !packs_fit(p, ld, size, n)) n /= 2;
  return n;
}

template <class T>
void check_widths(test::Tally& t, const char* type) {
  alignas(64) static T memory[128];
  constexpr int widest = 16 / int(sizeof(T)), vector_widest = sizeof(T) == 1 ? 16 : 32 / int(sizeof(T));
  for (int shift = 0; shift < 33; ++shift) {
    T* p = memory + shift;
    for (int64_t ld = 0; ld < 70; ++ld) {
      const auto check = [&](const char* what, int got, int want) {
        t.expect(got == want, "%s of %s, shift %d, stride %d: max_pack %d, want %d", what, type, shift, int(ld), got,
                 want);
      };
      const int want = widest_fit(p, ld, sizeof(T), widest);
      check("load", k::load(p, ld).max_pack(), want);
      check("store", k::store(p, ld).max_pack(), want);
      check("tee", k::tee(p, ld).max_pack(), want);
      check("cycle", k::cycle(k::load(p, ld), 3).max_pack(), want);
      check("a map's operand", k::add(k::load(p, ld)).max_pack(), want);
      if constexpr (sizeof(T) == 1)
        check("quantize", k::quantize(p, ld, nullptr).max_pack(), want);
      check("row", k::row(p).max_pack(), widest_fit(p, 0, sizeof(T), vector_widest));
    }
  }
}

}  // namespace

TEST_CASE("pointer and row stride limit the pack width") {
  test::Tally t;
  check_widths<int8_t>(t, "int8_t");
  check_widths<k::half>(t, "half");
  check_widths<float>(t, "float");
  check_widths<double>(t, "double");
  CHECK_TALLY(t);
}

TEST_CASE("a composition is as wide as its narrowest part") {
  alignas(64) static float a[64];
  alignas(64) static k::half b[64];
  const auto wide = k::load(a, 32), narrow = k::load(a + 1, 32);
  CHECK(k::detail::max_pack_of(wide) == 4);
  CHECK(k::detail::max_pack_of(narrow) == 1);
  CHECK(k::detail::max_pack_of(wide | k::scale(2)) == 4);
  CHECK(k::detail::max_pack_of(wide | k::add(narrow)) == 1);
  CHECK(k::detail::max_pack_of(wide | k::add(k::load(a + 2, 32))) == 2);
  CHECK(k::detail::max_pack_of(narrow | k::scale(2)) == 1);
  CHECK(k::detail::max_pack_of(wide | k::scale(1) | (k::relu() | k::tee(a + 1, 32))) == 1);
  CHECK(k::detail::max_pack_of(k::load(b, 32)) == 8);
  CHECK(k::detail::max_pack_of(k::load(b, 32) | k::add(wide)) == 4);
  CHECK(k::detail::max_pack_of(k::load(b, 32) | k::affine(a, a + 16)) == 8);
  CHECK(k::detail::max_pack_of(k::load(b, 32) | k::affine(a, a + 1)) == 1);
  CHECK(k::detail::max_pack_of(k::load(b, 32) | k::affine(a + 2, a)) == 2);
  CHECK(k::detail::max_pack_of(k::scale(2) | k::store(b + 4, 32)) == 4);
  CHECK(k::detail::max_pack_of(k::add(narrow) | k::store(b, 32)) == 1);
  CHECK(k::detail::max_pack_of(k::both(k::store(b, 32), k::store(a, 32))) == 4);
  CHECK(k::detail::max_pack_of(k::both(k::store(b, 31), k::store(a, 32))) == 1);
  CHECK(k::detail::max_pack_of(ToFloats(y)) == 2);
  CHECK(k::detail::max_pack_of(k::scale(2) | ToFloats(y)) == 2);
  CHECK(k::detail::max_pack_of(Ramp{}) == 16);
  // OneFlow's pairs, unless the functor says more or less.
  CHECK((k::detail::max_pack_of(OneFlowLoad<float, float>{x, 8}) == 2));
  CHECK((k::detail::max_pack_of(k::load(b, 32) | k::add(OneFlowLoad<float, float>{x, 8})) == 2));
  CHECK(k::detail::widest_of<Halves>() == 4);
  CHECK(k::detail::max_pack_of(Halves{12}) == 4);
  CHECK(k::detail::max_pack_of(Halves{6}) == 2);
  CHECK(k::detail::max_pack_of(Halves{7}) == 1);
  CHECK(k::detail::max_pack_of(k::load(b, 32) | k::add(Halves{7})) == 1);

  CHECK(k::detail::widest_of<decltype(wide)>() == 4);
  CHECK(k::detail::widest_of<decltype(k::load(b, 32))>() == 8);
  CHECK(k::detail::widest_of<decltype(k::load(b, 32) | k::add(wide))>() == 4);
  CHECK(k::detail::widest_of<decltype(k::load(b, 32) | k::affine(a, a))>() == 8);
  CHECK(k::detail::widest_of<decltype(k::scale(2) | k::relu())>() == 16);
  CHECK(k::detail::widest_of<decltype(k::relu() | k::both(k::store(b, 32), k::store(a, 32)))>() == 4);
  CHECK(k::detail::widest_of<decltype(Ramp{} | Clamp(1))>() == 16);
}

// ---- wrong arguments -----------------------------------------------------------------------------------------------

namespace {

template <class F>
std::string reason(const F& f, int64_t rows = 4, int64_t cols = 8) {
  const k::Status status = k::detail::check_of(f, rows, cols);
  CHECK(status.code() == (status.ok() ? k::Code::ok : k::Code::invalid));
  return status.reason();
}

}  // namespace

TEST_CASE("wrong arguments are refused, with the functor's name") {
  float* none = nullptr;
  constexpr int64_t huge = std::numeric_limits<int64_t>::max() / 4;
  CHECK(reason(k::load(x, 8)) == "ok");
  CHECK(reason(k::load(x, 0)) == "ok");
  CHECK(reason(k::load(x, 3)) == "ok");  // overlapping rows may be read
  CHECK(reason(k::load(none, 8)) == "load: the pointer is null");
  CHECK(reason(k::load(x, -1)) == "load: the row stride is negative");
  CHECK(reason(k::load(x, huge), 2) == "load: rows x row stride exceeds 64 bits");
  CHECK(reason(k::load(x, huge), 1) == "ok");
  CHECK(reason(k::load(reinterpret_cast<const char*>(x), huge), 4) == "ok");
  CHECK(reason(k::load(reinterpret_cast<const char*>(x), huge), 5) == "load: rows x row stride exceeds 64 bits");
  CHECK(reason(k::row(none)) == "the pointer to a vector is null");
  CHECK(reason(k::per_row(none)) == "per_row: the vector's pointer is null");
  CHECK(reason(k::cycle(k::row(x), 0)) == "cycle: the period is less than 1");
  CHECK(reason(k::cycle(k::row(x), -3)) == "cycle: the period is less than 1");
  CHECK(reason(k::cycle(k::row(none), 2)) == "the pointer to a vector is null");
  CHECK(reason(k::cycle(k::load(x, huge), 1), 1000) == "ok");  // only the rows of one period are read
  CHECK(reason(k::cycle(k::load(x, huge), 2), 1000) == "load: rows x row stride exceeds 64 bits");
  CHECK(reason(k::repeated(k::load(x, 8), 0)) == "repeated: the number of times is less than 1");
  for (const int64_t times : {int64_t(1), int64_t(4), int64_t(5), std::numeric_limits<int64_t>::max()})
    CHECK(reason(k::repeated(k::load(none, 8), times)) == "load: the pointer is null");
  CHECK(reason(k::repeated(k::load(x, huge), 4), 4) == "ok");
  CHECK(reason(k::repeated(k::load(x, huge), 4), 5) == "load: rows x row stride exceeds 64 bits");
  CHECK(reason(k::causal(0, 4)) == "causal: q_len is less than 1");
  CHECK(reason(k::causal(1, -1)) == "causal: kv_len is negative");
  CHECK(reason(k::causal(4, 0)) == "ok");
  CHECK(reason(k::store(y, 8)) == "ok");
  CHECK(reason(k::store(none, 8)) == "store: the pointer is null");
  CHECK(reason(k::store(y, 7)) == "store: the row stride is smaller than a row");
  CHECK(reason(k::store(y, -8)) == "store: the row stride is smaller than a row");
  CHECK(reason(k::store(y, 0), 1) == "ok");  // one row needs no stride
  CHECK(reason(k::store(y, huge), 2) == "store: rows x row stride exceeds 64 bits");
  CHECK(reason(k::quantize(q, 8, x)) == "ok");
  CHECK(reason(k::quantize<int8_t>(nullptr, 8, x)) == "quantize: the pointer is null");
  CHECK(reason(k::quantize(q, 8, nullptr)) == "quantize: the pointer to the scales is null");
  CHECK(reason(k::quantize(q, 7, x)) == "quantize: the row stride is smaller than a row");
  CHECK(reason(k::scale(2)) == "ok");
}

TEST_CASE("weights of experts whose rows exceed 64 bits are refused") {
  const int32_t ids[4] = {};
  constexpr int64_t huge = std::numeric_limits<int64_t>::max() / 4;
  const auto w = k::load(x, 0);
  CHECK(reason(k::experts(w, ids, 4, huge)) == "ok");
  CHECK(reason(k::experts(w, ids, 4, huge + 1)) == "experts: the rows of all experts exceed 64 bits");
  CHECK(reason(k::mixed(w, ids, x, 2, 4, 4, huge)) == "ok");
  CHECK(reason(k::mixed(w, ids, x, 2, 4, 4, huge + 1)) == "mixed: the rows of all experts exceed 64 bits");
  CHECK(reason(k::mixed(w, ids, x, 4, 4, 2 * (huge + 1) + 2, 4)) == "mixed: K is not top_k x cols");
  CHECK(reason(k::mixed(w, ids, x, 3, 4, 2, 4)) == "mixed: K is not top_k x cols");
}

TEST_CASE("stacked, apart and qkv: parts that exceed 64 bits together do not add up to a small number") {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  const auto w = k::load(x, 0);
  CHECK(reason(k::stacked(w, 3, w, 0, w, 1)) == "ok");
  CHECK(reason(k::stacked(w, 3, w, -1, w, 2)) == "stacked: a number of rows is negative");
  CHECK(reason(k::stacked(w, 3, w, std::numeric_limits<int64_t>::min())) == "stacked: a number of rows is negative");
  CHECK(reason(k::stacked(w, most, w, most, w, 6)) == "stacked: the numbers of rows do not add up to N");
  const auto out = k::store(y, 8);
  CHECK(reason(k::apart(out, 3, out, 5)) == "ok");
  CHECK(reason(k::apart(out, most, out, most, out, 10)) == "apart: the numbers of columns do not add up to N");
  CHECK(reason(k::qkv(out, 3, out, 0, out, 5)) == "ok");
  CHECK(reason(k::qkv(out, 3, out, 0, out, -5)) == "qkv: a number of columns is negative");
  CHECK(reason(k::qkv(out, most, out, most, out, 10)) == "qkv: the numbers of columns do not add up to N");
}

TEST_CASE("an amplitude of rope that is not finite is refused") {
  const int32_t at[4] = {};
  const auto by = [&](float a) { return reason(k::load(x, 8) | k::Rope(at, x, 8).amplitude(a)); };
  CHECK(by(1.5f) == "ok");
  CHECK(by(0) == "ok");
  for (const float wrong : {INFINITY, -INFINITY, NAN}) CHECK(by(wrong) == "rope: the amplitude is not finite");
}

TEST_CASE("blocks of keys that exceed 64 bits are refused") {
  const auto of = [](const auto& tensor, int64_t heads) { return std::string(tensor.check(heads, 8).reason()); };
  constexpr int64_t huge = int64_t(1) << 62;
  const std::string too_far = "kv: the positions, heads and columns of a block exceed 64 bits";
  CHECK(of(k::nhd(x, 4, 2, 8), 2) == "ok");
  CHECK(of(k::nhd(x, huge / 16, 2, 8), 2) == "ok");
  CHECK(of(k::nhd(x, huge, 2, 8), 2) == too_far);
  CHECK(of(k::hnd(x, huge, 2, 8), 2) == too_far);
  CHECK(of(k::hnd(x, 2, huge, 8), huge) == too_far);
  CHECK(of(k::nhd(x, 0, huge, 8), huge) == too_far);
  CHECK(of(k::nhd(x, -4, 2, 8), 2) == "kv: a stride is negative");
  CHECK(of(k::nhd(x, 4, 2, std::numeric_limits<int64_t>::min() / 2), 2) == "kv: a stride is negative");
}

TEST_CASE("a ring with more positions than its view has is refused") {
  const int32_t at[4] = {}, table[4] = {}, lengths[4] = {};
  const auto tensor = k::nhd(y, 4, 1, 8);
  const auto to = [&](const auto& kv, int64_t capacity) {
    return reason(k::append_keys(kv, k::AppendAt(at).ring(capacity, 1, lengths), 8));
  };
  const auto dense = k::dense_kv(tensor, tensor, lengths);
  CHECK(to(dense, 4) == "ok");
  CHECK(to(dense, 5) == "append: the ring has more positions than nhd() or hnd() was told of");
  const auto paged = k::paged_kv(tensor, tensor, k::pages(table, 3, 4), lengths);
  CHECK(to(paged, 12) == "ok");
  CHECK(to(paged, 13) == "append: the ring has more positions than a row of the page table");
  // Where the host does not know how many there are.
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  CHECK(to(k::paged_kv(tensor, tensor, k::pages(table, 0, 4), lengths), most) == "ok");
  const auto any = k::strided(y, 32, 8, 8);
  CHECK(to(k::dense_kv(any, any, lengths), most) == "ok");
}

TEST_CASE("scales whose rows exceed 64 bits are refused") {
  constexpr int64_t huge = std::numeric_limits<int64_t>::max() / 4;
  const double wide = 0;
  const auto codes = k::load(static_cast<const int8_t*>(q), 8);
  const auto in_groups = [&](int64_t ld) { return k::group_scales(x, ld, 8); };
  const std::string too_far = "rows x row stride of the scales exceeds 64 bits";
  CHECK(reason(k::dequant(codes, in_groups(huge)), 1) == "ok");
  CHECK(reason(k::dequant(codes, in_groups(huge)), 2) == "dequant: " + too_far);
  CHECK(reason(k::dequant(codes, in_groups(huge / 4))) == "ok");
  CHECK(reason(k::dequant(codes, in_groups(huge / 4 + 1))) == "dequant: " + too_far);
  CHECK(reason(k::dequant(codes, k::block_scales(x, huge, 8)), 8) == "ok");
  CHECK(reason(k::dequant(codes, k::block_scales(x, huge, 8)), 9) == "dequant: " + too_far);
  CHECK(reason(k::dequant(codes, in_groups(huge / 4).zeros(q))) == "ok");
  CHECK(reason(k::dequant(codes, in_groups(huge / 4).zeros(&wide))) == "dequant: " + too_far);
  CHECK(reason(k::quantize(q, 8, in_groups(huge / 4))) == "ok");
  CHECK(reason(k::quantize(q, 8, in_groups(huge / 4 + 1))) == "quantize: " + too_far);
  CHECK(reason(k::quantize(q, 8, k::tensor_scale(x)), 4) == "ok");
}

TEST_CASE("a composition is refused for the first of its wrong parts") {
  float* none = nullptr;
  const auto in = k::load(x, 8);
  CHECK(reason(in | k::scale(2) | k::relu()) == "ok");
  CHECK(reason(k::load(none, 8) | k::add(k::row(none))) == "load: the pointer is null");
  CHECK(reason(in | k::add(none)) == "add: the pointer to a vector is null");
  CHECK(reason(in | k::scale(2) | k::mul(k::per_row(none)) | k::relu()) ==
        "mul: per_row: the vector's pointer is null");
  CHECK(reason(in | k::add(k::load(x, -8) | k::scale(2))) == "add: load: the row stride is negative");
  CHECK(reason(in | k::mask(k::load(none, 8))) == "mask: load: the pointer is null");
  CHECK(reason(in | k::affine(none)) == "affine: gamma: the pointer to a vector is null");
  CHECK(reason(in | k::affine(x, none)) == "affine: beta: the pointer to a vector is null");
  CHECK(reason(in | k::affine(none, x)) == "affine: gamma: the pointer to a vector is null");
  CHECK(reason(in | k::add(k::load(x, 8) | k::mul(none))) == "mul: the pointer to a vector is null");
  CHECK(reason(in | k::causal(0, 0)) == "causal: q_len is less than 1");
  CHECK(reason(k::relu() | (k::causal(0, 0) | k::store(none, 8))) == "causal: q_len is less than 1");
  CHECK(reason(k::relu() | k::store(none, 8)) == "store: the pointer is null");
  CHECK(reason(k::both(k::store(y, 8), k::store(none, 8))) == "store: the pointer is null");
  CHECK(reason(k::both(k::store(y, 1), k::store(y, 8))) == "store: the row stride is smaller than a row");
  CHECK(reason(k::bias(none) | k::quantize(q, 8, x)) == "bias: the pointer to a vector is null");
  CHECK(reason(Ramp{} | Clamp(1)) == "ok");
  CHECK((reason(OneFlowLoad<float, float>{x, 8}) == "ok"));
}

// A tee is a kind of store, and yet the reason must say which of the two was meant.
TEST_CASE("a wrong tee is refused") {
  float* none = nullptr;
  CHECK(reason(k::load(x, 8) | k::tee(none, 8)) == "tee: the pointer is null");
  CHECK(reason(k::load(x, 8) | k::tee(y, 7)) == "tee: the row stride is smaller than a row");
  CHECK(reason(k::load(x, 8) | k::tee(y, std::numeric_limits<int64_t>::max() / 4), 2) ==
        "tee: rows x row stride exceeds 64 bits");
}

TEST_CASE("a status converts to nothing but a truth value") {
  CHECK(k::Status{}.ok());
  CHECK(k::Status{});
  CHECK(k::Status{}.code() == k::Code::ok);
  CHECK(std::string(k::Status{}.reason()) == "ok");
  CHECK_FALSE(k::invalid("a").ok());
  CHECK(k::unsupported("b").code() == k::Code::unsupported);
  CHECK(std::string(k::unsupported("b").reason()) == "b");
  CHECK(k::Status(k::Code::device, "c", 17).native() == 17);
  CHECK(std::string(k::Status{}.in("copy").reason()) == "ok");
  CHECK(std::string(k::invalid("a").of("x").in("copy").reason()) == "copy: x: a");
  CHECK(std::string(k::invalid("copy: a").in("copy").reason()) == "copy: a");
  CHECK(std::string(k::invalid("copying: a").in("copy").reason()) == "copy: copying: a");
  CHECK_FALSE((std::is_convertible<k::Status, int>::value));
  CHECK_FALSE((std::is_convertible<k::Status, bool>::value));
}
