// FAILS WRONG_COMPUTE_TYPE: the compute type does not fit the load
// FAILS IGNORED_STATUS: nodiscard
// FAILS NUMBER_AS_EXEC: Exec
#include <kernels/cpu/softmax.h>

namespace k = kernels;

void f(const float* x, float* y, int64_t rows, int64_t cols) {
  const k::cpu::Exec cx{1};
  const auto in = k::load(x, cols);
  const auto out = k::store(y, cols);
  (void)bool(k::cpu::softmax(cx, in, out, rows, cols));
#if defined(WRONG_COMPUTE_TYPE)
  (void)bool(k::cpu::softmax<k::DirectLoad<float>, k::DirectStore<float, float>, double>(cx, in, out, rows, cols));
#elif defined(IGNORED_STATUS)
  k::cpu::softmax(cx, in, out, rows, cols);
#elif defined(NUMBER_AS_EXEC)
  (void)bool(k::cpu::softmax(4, in, out, rows, cols));  // 4 threads, or a stream by mistake
#endif
}
