// Oracles: what the kernels should give, from plain loops in double precision that share no code with the library.
//
// A Real<C> is a number and a bound on how far a computation in C (float or double) may be from it. The bounds are
// carried along operation by operation, so a tolerance is derived, never guessed; comparing rounds both ends of the
// interval to the output's type, which adds that type's half unit in the last place, its saturation and its overflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <kernels/core/dtype.h>

namespace test {

// ---- storage types -------------------------------------------------------------------------------------------------

enum class DType { f16, bf16, f32, f64, e4m3, e5m2, i8, boolean };

template <class T> struct dtype_of;
template <> struct dtype_of<kernels::half> { static constexpr DType value = DType::f16; };
template <> struct dtype_of<kernels::bfloat16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of<double> { static constexpr DType value = DType::f64; };
template <> struct dtype_of<kernels::float8_e4m3> { static constexpr DType value = DType::e4m3; };
template <> struct dtype_of<kernels::float8_e5m2> { static constexpr DType value = DType::e5m2; };
template <> struct dtype_of<int8_t> { static constexpr DType value = DType::i8; };
template <> struct dtype_of<bool> { static constexpr DType value = DType::boolean; };

inline const char* name(DType type) {
  static const char* const names[] = {"half", "bfloat16", "float", "double", "e4m3", "e5m2", "int8", "bool"};
  return names[static_cast<int>(type)];
}

// A binary floating-point format. Without an infinity only the code of all ones is special: NaN.
struct Format {
  int exponent_bits, mantissa_bits;
  bool infinity;   // has one
  bool saturates;  // what is too large becomes the largest finite value

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int smallest_exponent() const { return 1 - bias(); }
  double largest() const {
    const int exponent = (1 << exponent_bits) - (infinity ? 2 : 1) - bias();
    const double units = double((2 << mantissa_bits) - (infinity ? 1 : 2));
    return std::ldexp(units, exponent - mantissa_bits);
  }
};
inline Format format(DType type) {
  switch (type) {
    case DType::f16: return {5, 10, true, false};
    case DType::bf16: return {8, 7, true, false};
    case DType::e4m3: return {4, 3, false, true};
    default: return {5, 2, true, true};
  }
}

// The nearest value that the type can hold, ties to even.
inline double round_to(DType type, double x) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (type == DType::f64) return x;
  if (type == DType::f32) return static_cast<double>(static_cast<float>(x));
  if (type == DType::boolean) return x != 0 ? 1 : 0;
  if (type == DType::i8) return x != x ? 0 : std::nearbyint(x < -128 ? -128 : x > 127 ? 127 : x);
  if (x != x || x == 0) return x;
  const Format f = format(type);
  double rounded = x;
  if (std::fabs(x) != infinity) {
    int exponent = std::ilogb(x);
    if (exponent < f.smallest_exponent()) exponent = f.smallest_exponent();
    const double unit = std::ldexp(1.0, exponent - f.mantissa_bits);
    rounded = std::nearbyint(x / unit) * unit;
  }
  if (std::fabs(rounded) <= f.largest()) return rounded;
  return std::copysign(f.saturates ? f.largest() : infinity, x);
}

// Bits to value, and value to the bits of the nearest one.
inline double decode_small(const Format& f, uint32_t code) {
  const uint32_t magnitude = code & ((1u << (f.exponent_bits + f.mantissa_bits)) - 1);
  const uint32_t ones = (1u << f.exponent_bits) - 1;
  const int exponent = static_cast<int>(magnitude >> f.mantissa_bits);
  const int mantissa = static_cast<int>(magnitude & ((1u << f.mantissa_bits) - 1));
  double x;
  if (f.infinity && exponent == static_cast<int>(ones)) {
    x = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (!f.infinity && magnitude == (1u << (f.exponent_bits + f.mantissa_bits)) - 1) {
    x = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    x = std::ldexp(mantissa, f.smallest_exponent() - f.mantissa_bits);
  } else {
    x = std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - f.bias() - f.mantissa_bits);
  }
  return code >> (f.exponent_bits + f.mantissa_bits) & 1 ? -x : x;
}

inline uint32_t encode_small(const Format& f, DType type, double value) {
  const double x = round_to(type, value);
  const uint32_t sign = (std::signbit(x) ? 1u : 0u) << (f.exponent_bits + f.mantissa_bits);
  const double size = std::fabs(x);
  const uint32_t all = (1u << (f.exponent_bits + f.mantissa_bits)) - 1;
  if (x != x) return f.infinity ? all & ~((1u << (f.mantissa_bits - 1)) - 1) : all;
  if (size == std::numeric_limits<double>::infinity()) return sign | (all >> f.mantissa_bits << f.mantissa_bits);
  if (size < std::ldexp(1.0, f.smallest_exponent())) {
    return sign | static_cast<uint32_t>(std::ldexp(size, f.mantissa_bits - f.smallest_exponent()));
  }
  const int exponent = std::ilogb(size);
  const uint32_t units = static_cast<uint32_t>(std::ldexp(size, f.mantissa_bits - exponent));
  return sign | ((static_cast<uint32_t>(exponent + f.bias() - 1) << f.mantissa_bits) + units);
}

// All values of a type of at most 16 bits.
inline const double* decoded(DType type) {
  static const std::vector<std::vector<double>> tables = [] {
    std::vector<std::vector<double>> all;
    for (const DType t : {DType::f16, DType::bf16, DType::e4m3, DType::e5m2}) {
      const Format f = format(t);
      std::vector<double> table(2u << (f.exponent_bits + f.mantissa_bits));
      for (uint32_t code = 0; code < table.size(); ++code) table[code] = decode_small(f, code);
      all.push_back(table);
    }
    return all;
  }();
  return tables[type == DType::f16 ? 0 : type == DType::bf16 ? 1 : type == DType::e4m3 ? 2 : 3].data();
}

template <class T>
double value_of(const T& x) {
  constexpr DType type = dtype_of<T>::value;
  if constexpr (type == DType::f32 || type == DType::f64 || type == DType::i8 || type == DType::boolean) {
    return static_cast<double>(x);
  } else {
    static const double* const table = decoded(type);
    std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t> code;
    std::memcpy(&code, static_cast<const void*>(&x), sizeof(T));
    return table[code];
  }
}

template <class T>
T make(double value) {
  constexpr DType type = dtype_of<T>::value;
  if constexpr (type == DType::f32 || type == DType::f64) {
    return static_cast<T>(value);
  } else if constexpr (type == DType::i8 || type == DType::boolean) {
    return static_cast<T>(round_to(type, value));
  } else {
    const auto code =
        static_cast<std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>>(encode_small(format(type), type, value));
    T x;
    std::memcpy(static_cast<void*>(&x), &code, sizeof(T));
    return x;
  }
}

// ---- numbers with error bounds -------------------------------------------------------------------------------------

template <class C> constexpr double unit = 0x1p-24;  // half a unit in the last place, relative
template <> constexpr double unit<double> = 0x1p-53;
// Below this the hardware's fast functions may flush to zero.
template <class C> constexpr double tiny = 0x1p-126;
template <> constexpr double tiny<double> = 0x1p-1022;

template <class C = float>
struct Real {
  double v = 0;
  double e = 0;  // how far a computation in C may be off

  Real() = default;
  Real(double value, double error = 0) : v(value), e(error) {}

  // One more operation in C, good to `units` half units in the last place.
  Real rounded(double units = 1) const { return {v, e + units * unit<C> * std::fabs(v) + tiny<C>}; }
};
// A constant given as a double and used as a C.
template <class C = float>
Real<C> constant(double value) { return Real<C>(value).rounded(); }

template <class C> Real<C> operator+(Real<C> a, Real<C> b) { return Real<C>(a.v + b.v, a.e + b.e).rounded(); }
template <class C> Real<C> operator-(Real<C> a, Real<C> b) { return Real<C>(a.v - b.v, a.e + b.e).rounded(); }
template <class C> Real<C> operator*(Real<C> a, Real<C> b) {
  return Real<C>(a.v * b.v, std::fabs(a.v) * b.e + std::fabs(b.v) * a.e + a.e * b.e).rounded();
}

template <class C> Real<C> relu(Real<C> x) { return {x.v < 0 ? 0.0 : x.v, x.e}; }
// The slopes of the next three stay below 1.13. exp is good to 2 + 1.2 |x| units, erf and tanh to 3.
template <class C> Real<C> silu(Real<C> x) {
  const double y = x.v / (1.0 + std::exp(-x.v));
  return Real<C>(y, 1.13 * x.e + std::fabs(x.v) * 0x1p-125).rounded(16 + 4 * std::fabs(x.v));
}
template <class C> Real<C> gelu(Real<C> x) {
  const double inner = 0.79788456080286536 * (x.v + 0.044715 * x.v * x.v * x.v);
  return {0.5 * x.v * (1.0 + std::tanh(inner)), 1.13 * x.e + 16 * unit<C> * std::fabs(x.v) + tiny<C>};
}
template <class C> Real<C> gelu_erf(Real<C> x) {
  return {0.5 * x.v * (1.0 + std::erf(x.v * 0.70710678118654752)),
          1.13 * x.e + 16 * unit<C> * std::fabs(x.v) + tiny<C>};
}
// What T can hold; a value near a tie may go either way.
template <class T, class C> Real<C> rounded_to(Real<C> x) {
  constexpr DType type = dtype_of<T>::value;
  const double middle = round_to(type, x.v), low = round_to(type, x.v - x.e), high = round_to(type, x.v + x.e);
  if (!std::isfinite(middle)) return {middle};
  return {middle, std::fmax(middle - low, high - middle)};
}

// ---- comparing -----------------------------------------------------------------------------------------------------

// Whether a type could hold `got` after rounding some number within the bound. NaN equals NaN, an infinity equals
// itself. Doubles become narrow types by way of float.
template <class C>
bool within(DType type, double got, Real<C> want) {
  const auto stored = [type](double x) { return round_to(type, type == DType::f64 ? x : round_to(DType::f32, x)); };
  if (!std::isfinite(want.v)) {
    const double w = stored(want.v);
    return got == w || (got != got && w != w);
  }
  if (std::fabs(got - want.v) <= want.e) return true;
  return stored(want.v - want.e) <= got && got <= stored(want.v + want.e);
}
template <class T, class C>
bool within(T got, Real<C> want) { return within(dtype_of<T>::value, value_of(got), want); }

template <class C = float>
using Row = std::vector<Real<C>>;

// "" when every element of the row is right, else what is wrong with the first that is not.
// `got` is called with the column.
template <class C, class Got>
std::string mismatch(int64_t row, const Row<C>& want, Got got) {
  for (size_t col = 0; col < want.size(); ++col) {
    const auto g = got(static_cast<int64_t>(col));
    if (within(g, want[col])) continue;
    std::ostringstream text;
    text.precision(9);
    text << "row " << row << " col " << col << ": got " << value_of(g) << ", want " << want[col].v << " +- "
         << want[col].e << " as " << name(dtype_of<std::decay_t<decltype(g)>>::value);
    return text.str();
  }
  return "";
}

// ---- row operations, in place --------------------------------------------------------------------------------------
//
// Sums are taken in long double. Bounds on the sums of a computation in C: serial chains are at most 100 long (a
// thread's tile, its tiles, lanes, warps), their rounding errors differ in sign, and 64 units cover what they add up
// to.

constexpr double kSum = 64;

// exp is good to 2 + 1.2 |x| units in the last place on a GPU and better on a CPU; the rounding of x - max adds |x -
// max| half units: 4 |x - max| half units together.
template <class C>
Real<C> log_sum_exp(const Row<C>& x, double& largest) {
  largest = -std::numeric_limits<double>::infinity();
  bool nan = false;
  for (const Real<C>& a : x) {
    nan = nan || a.v != a.v || a.v == std::numeric_limits<double>::infinity();
    if (a.v > largest) largest = a.v;
  }
  if (nan) return {std::numeric_limits<double>::quiet_NaN()};
  if (largest == -std::numeric_limits<double>::infinity()) return {largest};
  long double sum = 0, error = 0;
  for (const Real<C>& a : x) {
    if (a.v == -std::numeric_limits<double>::infinity()) continue;
    const double p = std::exp(a.v - largest);
    sum += p;
    error += p * (a.e + 4 * unit<C> * (largest - a.v));
  }
  return {static_cast<double>(std::log(sum)), static_cast<double>(error / sum) + kSum * unit<C>};
}

template <class C>
void softmax(Row<C>& x) {
  double largest;
  const Real<C> log_sum = log_sum_exp(x, largest);
  for (Real<C>& a : x) {
    if (log_sum.v != log_sum.v) a = {log_sum.v};
    else if (a.v == -std::numeric_limits<double>::infinity()) a = {0.0};
    else {
      const double p = std::exp(a.v - largest - log_sum.v);
      a = {p, p * (a.e + log_sum.e + unit<C> * (12 + 4 * (largest - a.v))) + tiny<C>};
    }
  }
}

template <class C>
void log_softmax(Row<C>& x) {
  double largest;
  const Real<C> log_sum = log_sum_exp(x, largest);
  for (Real<C>& a : x) {
    if (log_sum.v != log_sum.v) a = {log_sum.v};
    else if (a.v != -std::numeric_limits<double>::infinity()) {
      const double difference = a.v - largest;
      a = {difference - log_sum.v, a.e + log_sum.e + unit<C> * (2 * std::fabs(difference) + 2 * std::fabs(log_sum.v))};
    }
  }
}

template <class C>
struct RowStatistics {
  Real<C> mean, rstd;
};

// The mean is off by a few units of the row's largest deviation at most, and of its own size only to second order:
// nothing cancels under a large mean. 64 units cover long chains, too; two_pass.h holds rows with outliers to less.
template <class C>
RowStatistics<C> layernorm(Row<C>& x, double eps) {
  const long double n = static_cast<long double>(x.size());
  const long double base = x[0].v;  // what the values have in common would take digits from a long double, too
  long double sum = 0, error = 0;
  for (const Real<C>& a : x) {
    sum += a.v - base;
    error += a.e;
  }
  const long double shift = sum / n;
  const double mean = static_cast<double>(base + shift);
  long double squares = 0, squares_error = 0, largest = 0;
  for (const Real<C>& a : x) {
    const long double d = (a.v - base) - shift;
    squares += d * d;
    squares_error += std::fabs(d) * a.e;
    largest = std::fabs(d) > largest ? std::fabs(d) : largest;
  }
  const long double variance = squares / n + eps;
  const double rstd = static_cast<double>(1 / std::sqrt(variance));
  const double mean_error = static_cast<double>(
      16 * unit<C> * largest + 64 * unit<C> * unit<C> * std::fabs(mean) + error / n);
  const double rstd_error = rstd * (64 * unit<C> + static_cast<double>(squares_error / n / variance));
  for (Real<C>& a : x) {
    const double d = static_cast<double>((a.v - base) - shift);
    const double y = d * rstd;
    a = {y, rstd * (a.e + mean_error) + std::fabs(d) * rstd_error + 4 * unit<C> * std::fabs(y)};
  }
  return {{mean, mean_error + unit<C> * std::fabs(mean)}, {rstd, rstd_error}};
}

template <class C>
Real<C> rmsnorm(Row<C>& x, double eps) {
  const long double n = static_cast<long double>(x.size());
  long double squares = 0, squares_error = 0;
  for (const Real<C>& a : x) {
    squares += static_cast<long double>(a.v) * a.v;
    squares_error += std::fabs(a.v) * a.e;
  }
  const long double mean = squares / n + eps;
  const double rstd = static_cast<double>(1 / std::sqrt(mean));
  // Of an infinite row nothing but 0 and NaN is left.
  const double rstd_error = rstd == 0 ? 0 : rstd * (32 * unit<C> + static_cast<double>(squares_error / n / mean));
  for (Real<C>& a : x) {
    const double y = a.v * rstd;
    a = {y, rstd * a.e + std::fabs(a.v) * rstd_error + 2 * unit<C> * std::fabs(y) + tiny<C>};
  }
  return {rstd, rstd_error};
}

// One scale per row: largest |value| / largest T, but no subnormal one. The codes are value / scale, still to be
// rounded to T.
template <class T, class C>
Real<C> quantize(Row<C>& x) {
  const double most = dtype_of<T>::value == DType::i8 ? 127 : format(dtype_of<T>::value).largest();
  Real<C> largest;
  for (const Real<C>& a : x) {
    if (!(std::fabs(a.v) <= largest.v) && largest.v == largest.v) largest.v = std::fabs(a.v);
    largest.e = std::fmax(largest.e, a.e);
  }
  if (largest.v > 0 && largest.v < most * 0x1p-126) largest = {most * 0x1p-126};
  for (Real<C>& a : x) {
    if (largest.v != largest.v) a = {largest.v};
    else if (largest.v > 0) {
      const double code = a.v / largest.v * most;
      a = {code, std::fabs(code) * (largest.e / largest.v + 4 * unit<C>) + a.e / largest.v * most};
    }
  }
  return {largest.v / most, largest.e / most + 2 * unit<C> * largest.v / most};
}

}  // namespace test
