// The same softmax in two files of one program, of which one is compiled with -ffast-math: CALL is the function's name.
#include <kernels/cpu/softmax.h>

extern "C" int CALL(const float* x, float* y, int64_t cols);

int CALL(const float* x, float* y, int64_t cols) {
  namespace k = kernels;
  return int(k::cpu::softmax(k::cpu::Exec{1}, k::load(x, cols), k::store(y, cols), 1, cols).code());
}
