// The file that is compiled without -ffast-math makes NaN of a row with a NaN, also where the linker finds the code of
// the file with it first. What that one makes of the row is its own affair; without a NaN both agree.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

extern "C" int softmax_plain(const float* x, float* y, int64_t cols);
extern "C" int softmax_fast(const float* x, float* y, int64_t cols);

int main() {
  constexpr int cols = 67;
  float x[cols], plain[cols], fast[cols];
  for (int i = 0; i < cols; ++i) x[i] = float(i % 7);
  int wrong = softmax_plain(x, plain, cols) != 0 || softmax_fast(x, fast, cols) != 0;
  for (int i = 0; i < cols; ++i) wrong += !(std::fabs(plain[i] - fast[i]) < 1e-6f);
  if (wrong != 0) std::printf("%d of the results of numbers differ\n", wrong);
  for (const int place : {0, 30, cols - 1}) {
    const float kept = x[place];
    x[place] = NAN;
    int numbers = softmax_plain(x, plain, cols) != 0;
    for (const float each : plain) numbers += !std::isnan(each);
    if (numbers != 0) std::printf("a NaN in column %d: %d numbers without -ffast-math\n", place, numbers);
    wrong += numbers + (softmax_fast(x, fast, cols) != 0);
    x[place] = kept;
  }
  return wrong == 0 ? 0 : 1;
}
