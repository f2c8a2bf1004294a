// Prints the least time that a product of floats takes. See wide_vectors.sh.
#include <kernels/cpu/matmul.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

int main() {
  namespace k = kernels;
  const int64_t n = 256;
  std::vector<float> x(size_t(n * n), 0.5f), w(size_t(n * n), 0.25f), y(size_t(n * n));
  double least = 1e9;
  for (int i = 0; i < 20; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const k::Status status =
        k::cpu::matmul(k::cpu::Exec{1}, k::load(static_cast<const float*>(x.data()), n),
                       k::load(static_cast<const float*>(w.data()), n), k::store(y.data(), n), {n, n, n});
    if (!status) return std::fprintf(stderr, "%s\n", status.reason()), 1;
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::printf("%g\n", least);
  return y[0] == 32.f ? 0 : 1;
}
