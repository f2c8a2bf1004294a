// One program for every x86 machine: the same calls compiled for three instruction sets (dispatch_cpu/unit.cpp), of
// which the best that the machine has is chosen as the program runs. Checks all that it can run against a computation
// in double.
//   dispatch_cpu [threads]
// Beside -march flags nothing distinguishes the units: all that the library defines is named after them, and none of it
// is shared.
#include <kernels/cpu/exec.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dispatch_cpu/kernels.h"

constexpr int64_t kTokens = 3, kOutputs = 37, kDepth = 501;

// The number of results that are wrong, or -1 for a call that was refused.
int check(const Kernels& unit, int threads) {
  std::vector<float> x(kTokens * kDepth), y(x.size()), scales(kOutputs), product(kTokens * kOutputs);
  std::vector<int8_t> w(kOutputs * kDepth);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i * 37 % 101) / 50 - 1;
  for (size_t i = 0; i < w.size(); ++i) w[i] = int8_t(int(i * 53 % 255) - 127);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.01f * float(i + 1);
  for (const char* reason :
       {unit.softmax(threads, x.data(), y.data(), kTokens, kDepth),
        unit.matmul(threads, x.data(), w.data(), scales.data(), product.data(), kTokens, kOutputs, kDepth)}) {
    if (reason == nullptr) continue;
    std::fprintf(stderr, "dispatch_cpu: %s: %s\n", unit.name, reason);
    return -1;
  }
  int wrong = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    double total = 0;
    for (int64_t c = 0; c < kDepth; ++c) total += std::exp(double(x[t * kDepth + c]));
    for (int64_t c = 0; c < kDepth; ++c)
      wrong += !(std::fabs(y[t * kDepth + c] * total / std::exp(double(x[t * kDepth + c])) - 1) < 1e-5);
    for (int64_t n = 0; n < kOutputs; ++n) {
      double sum = 0, size = 0;
      for (int64_t c = 0; c < kDepth; ++c) {
        const double term = double(x[t * kDepth + c]) * w[n * kDepth + c] * scales[n];
        sum += term, size += std::fabs(term);
      }
      wrong += !(std::fabs(product[t * kOutputs + n] - sum) <= 1e-5 * size);
    }
  }
  return wrong;
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const Kernels* best = nullptr;
  for (const Kernels* unit : {&kernels_scalar, &kernels_avx2, &kernels_avx512}) {
    const kernels::Status status = kernels::cpu::machine_has(unit->needs);
    if (!status) {
      std::printf("%-7s not here: %s\n", unit->name, status.reason());
      continue;
    }
    const int wrong = check(*unit, threads);
    std::printf("%-7s %s\n", unit->name, wrong == 0 ? "right" : "WRONG");
    if (wrong != 0) return 1;
    best = unit;
  }
  if (best == nullptr) return 1;
  std::printf("an engine would take %s\n", best->name);
}
