// A few calls on the CPU, on two threads each, checked: what ./test.sh runs under sanitizers. tests/sanitize.sh cpu
// runs all tests so.
#include <kernels/cpu/matmul.h>

#include "../link/calls.h"

int main() {
  namespace k = kernels;
  int wrong = cpu_calls("sanitized");
  // Ones times ones, with rests in every direction.
  const int64_t m = 3, n = 37, depth = 131;
  const std::vector<float> x(size_t(m * depth), 1.f), w(size_t(n * depth), 1.f);
  std::vector<float> y(size_t(m * n));
  const k::Status status = k::cpu::matmul(k::cpu::Exec{2}.least_work(0), k::load(x.data(), depth),
                                          k::load(w.data(), depth), k::store(y.data(), n), {m, n, depth});
  wrong += !status;
  for (const float sum : y) wrong += sum != float(depth);
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
