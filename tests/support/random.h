// Random test data: the same values on every run.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace test {

// splitmix64: a good hash of any 64-bit number.
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed)) {}

  uint64_t bits() { return mix(state_++); }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T any_of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<int64_t>(all.size()))];
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double uniform(double from, double to) { return from + (to - from) * uniform(); }
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  uint64_t state_;
};

// Kinds of rows. An outlier in the last or first column shows at once whether that column was counted.
enum class Kind { normal, outlier_last, outlier_first, wide, offset, holes };
constexpr int kKinds = 6;

// One row after another, each of the next kind.
class RandomRows {
 public:
  // `holes` are columns of -inf: for softmax only.
  RandomRows(uint64_t seed, bool holes)
      : random_(seed), first_(static_cast<int64_t>(seed % kKinds)), kinds_(holes ? kKinds : kKinds - 1) {}

  template <class Put>
  void row(int64_t index, int64_t cols, Put put) {  // put(col, value)
    const Kind kind = static_cast<Kind>((first_ + index) % kinds_);
    const double outlier = random_.uniform(8.0, 24.0);
    const double offset = random_.uniform(-40.0, 40.0);
    for (int64_t c = 0; c < cols; ++c) {
      double x = random_.normal();
      if (kind == Kind::wide) x *= 6.0;
      if (kind == Kind::offset) x += offset;
      if (kind == Kind::outlier_last && c == cols - 1) x = outlier;
      if (kind == Kind::outlier_first && c == 0) x = outlier;
      if (kind == Kind::holes && random_.below(3) == 0) x = -std::numeric_limits<double>::infinity();
      put(c, x);
    }
  }

 private:
  Random random_;
  int64_t first_;
  int kinds_;
};

}  // namespace test
