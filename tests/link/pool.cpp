// Parts that have a thread each, and a call, for one of the instruction sets in a library: CALL is the function's name.
#include <kernels/cpu/rmsnorm.h>

#include <sched.h>

#include <atomic>

extern "C" __attribute__((visibility("default"))) int CALL(int threads);

int CALL(int threads) {
  namespace k = kernels;
  std::atomic<int> here{0};
  k::detail::host::run_on_pool(threads, [&](int) {
    ++here;
    while (here < threads) sched_yield();
  });
  float x[16 * 32], y[16 * 32];
  for (float& each : x) each = 2;
  const k::Status status = k::cpu::rmsnorm(k::cpu::Exec{threads}.least_work(0), k::load(x, 32), k::store(y, 32), 16, 32,
                                           k::RmsNorm{}.eps(0));
  int wrong = !status;
  for (const float each : y) wrong += each != 1;
  return wrong;
}
