// Every pair of storage types on the CPU, by way of a source and a sink whose types are known at run time (one
// instantiation for all), and every type on either side through load() and store() themselves.
#include "support/cpu.h"
#include "support/threads.h"

using namespace test;

namespace {

constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::e4m3, DType::e5m2, DType::i8};

// f(T{}) with the type that `type` stands for.
template <class F>
auto with_type(DType type, F f) {
  switch (type) {
    case DType::f16: return f(k::half{});
    case DType::bf16: return f(k::bfloat16{});
    case DType::f64: return f(double{});
    case DType::e4m3: return f(k::float8_e4m3{});
    case DType::e5m2: return f(k::float8_e5m2{});
    case DType::i8: return f(int8_t{});
    default: return f(float{});
  }
}
int64_t size_of(DType type) {
  return with_type(type, [](auto x) { return int64_t(sizeof(x)); });
}

// ---- a source and a sink of any type --------------------------------------------------------------------------------

struct AnyLoad : k::Functor {
  const void* p;
  int64_t ld;
  DType type;
  AnyLoad(const void* pointer, int64_t stride, DType t) : p(pointer), ld(stride), type(t) {}

  template <int N>
  k::Pack<float, N> load(int64_t row, int64_t col) const {
    k::Pack<float, N> out;
    with_type(type, [&](auto x) {
      using T = decltype(x);
      out = k::convert<float>(k::read<N, k::Cache::stream>(static_cast<const T*>(p) + row * ld + col).unpack());
    });
    return out;
  }
};

struct AnyStore : k::Functor {
  void* p;
  int64_t ld;
  DType type;
  AnyStore(void* pointer, int64_t stride, DType t) : p(pointer), ld(stride), type(t) {}

  template <int N>
  void store(const k::Pack<float, N>& v, int64_t row, int64_t col) const {
    with_type(type, [&](auto x) {
      using T = decltype(x);
      k::write<N>(static_cast<T*>(p) + row * ld + col, k::convert<T>(v));
    });
  }
};

// ---- a matrix of any type -------------------------------------------------------------------------------------------

class AnyMatrix {
 public:
  AnyMatrix(DType type, int64_t rows, int64_t cols, int64_t ld, int64_t shift)
      : type_(type), bytes_(rows, cols * size_of(type), ld * size_of(type), shift * size_of(type)), ld_(ld) {}

  void* data() const { return bytes_.data(); }
  int64_t ld() const { return ld_; }
  DType type() const { return type_; }
  Guarded<unsigned char>& bytes() { return bytes_; }

  void set(int64_t row, int64_t col, double value) {
    with_type(type_, [&](auto x) {
      x = make<decltype(x)>(value);
      unsigned char raw[sizeof(x)];
      std::memcpy(raw, static_cast<const void*>(&x), sizeof(x));
      for (size_t i = 0; i < sizeof(x); ++i) bytes_.set(row, col * int64_t(sizeof(x)) + int64_t(i), raw[i]);
    });
  }
  double get(int64_t row, int64_t col) const {
    return with_type(type_, [&](auto x) {
      unsigned char raw[sizeof(x)];
      for (size_t i = 0; i < sizeof(x); ++i) raw[i] = bytes_.get(row, col * int64_t(sizeof(x)) + int64_t(i));
      std::memcpy(static_cast<void*>(&x), raw, sizeof(x));
      return value_of(x);
    });
  }

 private:
  DType type_;
  Guarded<unsigned char> bytes_;
  int64_t ld_;
};

// ---- calls ----------------------------------------------------------------------------------------------------------

using Call = k::Status (*)(const AnyMatrix& in, const AnyMatrix& out, int64_t rows, int64_t cols);

template <class Op>
k::Status call_any(const AnyMatrix& in, const AnyMatrix& out, int64_t rows, int64_t cols) {
  float* const unused = nullptr;
  return Op{}.run(on_threads(2), AnyLoad(in.data(), in.ld(), in.type()), AnyStore(out.data(), out.ld(), out.type()),
                  rows, cols, unused, unused);
}

template <class Op, class S, class D>
k::Status call(const AnyMatrix& in, const AnyMatrix& out, int64_t rows, int64_t cols) {
  float* const unused = nullptr;
  return Op{}.run(on_threads(2), k::load(static_cast<const S*>(in.data()), in.ld()),
                  k::store(static_cast<D*>(out.data()), out.ld()), rows, cols, unused, unused);
}

template <class Op, class C = float>
void check(Tally& t, DType from, DType to, Call call) {
  const int64_t rows = 6;
  for (const int64_t cols : {1, 7, 16, 64, 333, 1000, 4100}) {
    AnyMatrix in(from, rows, cols, cols + cols % 2, cols % 3 == 0), out(to, rows, cols, cols, cols % 2);
    RandomRows random(mix(uint64_t(cols)), Op::holes && from != DType::e4m3 && from != DType::i8);
    for (int64_t r = 0; r < rows; ++r) {
      random.row(r, cols, [&](int64_t c, double x) { in.set(r, c, x); });
    }
    in.bytes().upload();
    const k::Status status = call(in, out, rows, cols);
    t.expect(status.ok(), "%s %s to %s, %d cols: %s", Op::name, name(from), name(to), int(cols), status.reason());
    t.expect(in.bytes().unchanged(), "%s %s to %s, %d cols: the input was changed", Op::name, name(from), name(to),
             int(cols));
    out.bytes().download();
    t.expect(out.bytes().intact(), "%s %s to %s, %d cols: wrote outside its rows", Op::name, name(from), name(to),
             int(cols));
    for (int64_t r = 0; r < rows; ++r) {
      Row<C> want;
      for (int64_t c = 0; c < cols; ++c) want.push_back(in.get(r, c));
      Op{}.expect(want);
      for (int64_t c = 0; c < cols; ++c) {
        const Real<C> w = want[size_t(c)];
        const double got = out.get(r, c);
        t.expect(within(to, got, w), "%s %s to %s, %d cols, row %d, col %d: got %.9g, want %.9g +- %g", Op::name,
                 name(from), name(to), int(cols), int(r), int(c), got, w.v, w.e);
      }
    }
  }
}

template <class Op, class S, class... D>
void check_from(Tally& t) {
  (check<Op, k::compute_t<S>>(t, dtype_of<S>::value, dtype_of<D>::value, call<Op, S, D>), ...);
}

template <class Op>
void check_all() {
  Tally t;
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      if (from != DType::f64) check<Op>(t, from, to, call_any<Op>);
    }
  }
  CHECK_TALLY(t);
}

}  // namespace

// Directly: every type on either side, and each into itself.
TEMPLATE_TEST_CASE("softmax of every storage type", "", k::half, k::bfloat16, k::float8_e4m3, k::float8_e5m2, int8_t) {
  Tally t;
  check_from<Softmax, TestType, TestType, float>(t);
  check_from<Softmax, float, TestType>(t);
  CHECK_TALLY(t);
}
TEST_CASE("softmax of float and double") {
  Tally t;
  check_from<Softmax, float, float, double>(t);
  check_from<Softmax, double, double, float, k::half, k::float8_e4m3>(t);
  CHECK_TALLY(t);
}
TEST_CASE("norms of doubles to narrower types") {
  Tally t;
  check_from<LayerNorm, double, k::bfloat16>(t);
  check_from<RmsNorm, double, k::float8_e5m2>(t);
  CHECK_TALLY(t);
}

TEST_CASE("log_softmax of all pairs") { check_all<LogSoftmax>(); }
TEST_CASE("layernorm of all pairs") { check_all<LayerNorm>(); }
