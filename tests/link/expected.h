// Inputs and what the operations make of them, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {
namespace link {

inline std::vector<float> input(int64_t rows, int64_t cols) {
  std::vector<float> x(static_cast<size_t>(rows * cols));
  uint32_t state = 1;
  for (float& a : x) {
    state = state * 1664525u + 1013904223u;
    a = float(state >> 8) / float(1 << 23) - 1.f;
  }
  return x;
}

// f(row, mean, mean of squares, sum of exponentials) for each row gives what to make of each value.
template <class F>
std::vector<double> by_rows(const std::vector<float>& x, int64_t rows, int64_t cols, F f) {
  std::vector<double> y;
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0, squares = 0, exponentials = 0;
    for (int64_t c = 0; c < cols; ++c) {
      const double a = x[size_t(r * cols + c)];
      sum += a;
      squares += a * a;
      exponentials += std::exp(a);
    }
    for (int64_t c = 0; c < cols; ++c)
      y.push_back(f(double(x[size_t(r * cols + c)]), sum / double(cols), squares / double(cols), exponentials));
  }
  return y;
}

inline std::vector<double> softmax(const std::vector<float>& x, int64_t rows, int64_t cols) {
  return by_rows(x, rows, cols, [](double a, double, double, double e) { return std::exp(a) / e; });
}
inline std::vector<double> log_softmax(const std::vector<float>& x, int64_t rows, int64_t cols) {
  return by_rows(x, rows, cols, [](double a, double, double, double e) { return a - std::log(e); });
}
inline std::vector<double> layernorm(const std::vector<float>& x, int64_t rows, int64_t cols, double gamma) {
  return by_rows(x, rows, cols, [gamma](double a, double m, double s, double) {
    return gamma * (a - m) / std::sqrt(s - m * m + 1e-5);
  });
}
inline std::vector<double> rmsnorm(const std::vector<float>& x, int64_t rows, int64_t cols) {
  return by_rows(x, rows, cols, [](double a, double, double s, double) { return a / std::sqrt(s + 1e-5); });
}

class Verdict {
 public:
  explicit Verdict(const char* unit) : unit_(unit) {}

  void called(const char* what, bool accepted, const std::vector<float>& got, const std::vector<double>& want,
              double tolerance = 1e-5) {
    double worst = accepted ? 0 : HUGE_VAL, largest = 0;
    for (const double w : want) largest = std::fmax(largest, std::fabs(w));
    for (size_t i = 0; i < want.size() && accepted; ++i) {
      const double error = std::fabs(got[i] - want[i]) / largest;
      if (!(error <= worst)) worst = error;
    }
    if (worst <= tolerance) return;
    ++failures_;
    std::printf("unit %s, %s: %s, error %g\n", unit_, what, accepted ? "accepted" : "refused", worst);
  }
  int failures() const { return failures_; }

 private:
  const char* unit_;
  int failures_ = 0;
};

}  // namespace link
}  // namespace
