// How far a LayerNorm is off, beside one in float that reads its row twice: what any row is held to, wherever its
// outliers lie.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "random.h"

namespace test {

// The largest errors of a normalized row's values, and that of rstd, in units of 2^-24; relative where values are
// larger than 1.
struct NormErrors {
  double values, rstd;
  // At most 4 times the other ones, which may come out right by chance: then at most 6 units.
  bool within_four_of(const NormErrors& other) const {
    return values <= 4 * std::max(1.5, other.values) && rstd <= 4 * std::max(1.5, other.rstd);
  }
};

// Of rows without a large common part; value(i) is what came out for x[i].
template <class Value>
NormErrors norm_errors(const std::vector<float>& x, double eps, Value value, double rstd) {
  long double sum = 0, squares = 0;
  for (const float a : x) sum += a;
  const long double mean = sum / x.size();
  for (const float a : x) squares += (a - mean) * (a - mean);
  const double exact_rstd = double(1 / std::sqrt(squares / x.size() + eps));
  NormErrors errors{0, std::fabs(rstd - exact_rstd) / exact_rstd * 0x1p24};
  for (size_t i = 0; i < x.size(); ++i) {
    const double y = double(x[i] - mean) * exact_rstd,
                 error = std::fabs(value(i) - y) / std::max(1.0, std::fabs(y)) * 0x1p24;
    if (!(error <= errors.values)) errors.values = error;  // NaN stays
  }
  return errors;
}

// Sums of many short chains, brought together two by two, as a machine with many lanes makes them.
template <class F>
float pairwise_sum(int64_t begin, int64_t end, const F& value) {
  if (end - begin > 16) {
    const int64_t middle = begin + (end - begin) / 2;
    return pairwise_sum(begin, middle, value) + pairwise_sum(middle, end, value);
  }
  float sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += value(size_t(i));
  return sum;
}
inline NormErrors two_pass_errors(const std::vector<float>& x, double eps) {
  const int64_t n = int64_t(x.size());
  const float mean = pairwise_sum(0, n, [&](size_t i) { return x[i]; }) / float(n);
  const float squares = pairwise_sum(0, n, [&](size_t i) { return (x[i] - mean) * (x[i] - mean); });
  const float rstd = 1 / std::sqrt(squares / float(n) + float(eps));
  return norm_errors(x, eps, [&](size_t i) { return double((x[i] - mean) * rstd); }, double(rstd));
}

// f(is_outlier) for the places in which outliers are most trouble to a sum whose origin is one of the first values, or
// a mean of some: one value, a lane's first ones, those of a lane, of a warp, of many lanes.
template <class F>
void each_place_of_outliers(int64_t cols, F f) {
  for (const int64_t first : {1, 4, 8, 32, 128, 1024}) {
    if (first < cols) f([=](int64_t c) { return c < first; });
  }
  f([](int64_t c) { return c % 256 < 8; });
  f([](int64_t c) { return c % 13 == 5; });
  f([cols](int64_t c) { return c == cols - 1; });
}
constexpr double kOutliers[] = {1.0, 30.0, 1e4, 6e4};

// Standard normal values, and 1 to 2 times `outlier` elsewhere.
template <class IsOutlier>
double with_outliers(Random& random, int64_t c, double outlier, IsOutlier is_outlier) {
  return is_outlier(c) ? outlier * random.uniform(1, 2) : random.normal();
}

}  // namespace test
