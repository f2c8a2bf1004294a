// Compiled once for each instruction set, with its flags and UNIT=scalar, avx2 or avx512. Only such units include the
// library.
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/softmax.h>

#include "kernels.h"

namespace {
namespace k = kernels;

const char* reason(const k::Status& status) { return status ? nullptr : status.reason(); }

const char* softmax(int threads, const float* x, float* y, int64_t rows, int64_t cols) {
  return reason(k::cpu::softmax(k::cpu::Exec{threads}, k::load(x, cols), k::store(y, cols), rows, cols));
}

const char* matmul(int threads, const float* x, const int8_t* w, const float* scales, float* y, int64_t m, int64_t n,
                   int64_t depth) {
  const auto weights = k::dequant(k::load(w, depth), k::row_scales(scales));
  return reason(k::cpu::matmul(k::cpu::Exec{threads}, k::load(x, depth), weights, k::store(y, n), {m, n, depth}));
}

}  // namespace

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)
extern "C" const Kernels JOIN(kernels_, UNIT) = {TEXT(UNIT), k::cpu::kNeeds, softmax, matmul};
