// What the tests of products on the CPU share: one call and its check.
#pragma once

#include <kernels/cpu/matmul.h>

#include "products.h"
#include "tally.h"
#include "threads.h"

namespace test {

namespace k = kernels;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class T>
using Matrix = RandomMatrix<T>;

struct Case {
  int64_t m, n, k;
  int threads = 2;
};

inline std::string describe(const char* what, const Case& c) {
  std::ostringstream out;
  out << what << " M " << c.m << " N " << c.n << " K " << c.k << ", " << c.threads << " threads";
  return out.str();
}

// The result in y against want(m, n).
template <class T, class Want>
void check_result(Tally& t, const char* what, const Case& c, const k::Status& status, Guarded<T>& y, const Want& want) {
  t.expect(status.ok(), "%s: %s", describe(what, c).c_str(), status.reason());
  y.download();
  t.expect(y.intact(), "%s: wrote outside its rows", describe(what, c).c_str());
  for (int64_t m = 0; m < c.m; ++m) {
    Row<> row;
    for (int64_t n = 0; n < y.cols(); ++n) row.push_back(want(m, n));
    const std::string problem = mismatch(m, row, [&](int64_t n) { return y.get(m, n); });
    t.expect(problem.empty(), "%s, %s", describe(what, c).c_str(), problem.c_str());
  }
}

template <class TX, class TY, class Weights>
void check(Tally& t, const char* what, const Case& c, const Weights& w) {
  const Matrix<TX> x(21, c.m, c.k, c.k + 2, 1, 1);
  Guarded<TY> y(c.m, c.n, c.n + 3, 1);
  const k::Status status = k::cpu::matmul(on_threads(c.threads), k::load(static_cast<const TX*>(x.data()), x.ld()),
                                          w.source(), k::store(y.data(), y.ld()), {c.m, c.n, c.k});
  const auto value = [&](int64_t m, int64_t i) { return Real<>(x.value(m, i)); };
  check_result(t, what, c, status, y, [&](int64_t m, int64_t n) { return product(m, n, c.k, value, w); });
}

// make(rows, cols) gives the weights. Tokens that are alone, fill a tile, share decoded weights, and are more than
// share a pass; columns that fill no vector, no unit, no run, and more than a buffer holds.
template <class TX, class TY, class Make>
void every_shape(const char* what, const Make& make) {
  Tally t;
  for (const int64_t cols : {1, 7, 8, 31, 32, 33, 63, 100, 129, 500, 1025}) {
    for (const int64_t rows : {1, 3, 16, 21}) {
      const auto w = make(rows, cols);
      for (const int64_t m : {1, 2, 3, 4, 5, 33}) check<TX, TY>(t, what, {m, rows, cols}, w);
    }
  }
  for (const Case c : {Case{1, 9, 4096 + 41, 1}, Case{2, 9, 8192 + 17, 3}, Case{6, 5, 5001, 2}, Case{1, 5, 70001, 2},
                       Case{31, 6, 3001, 2}}) {
    check<TX, TY>(t, what, c, make(c.n, c.k));
  }
  CHECK_TALLY(t);
}

}  // namespace test
