#include <kernels/cpu/softmax.h>

#include <cmath>

int main() {
  const float x[4] = {0, 0, 0, 0};
  float y[4] = {};
  kernels::cpu::Exec ex;
  const kernels::Status status = kernels::cpu::softmax(ex, kernels::load(x, 4), kernels::store(y, 4), 1, 4);
  return status.ok() && std::fabs(y[3] - 0.25f) < 1e-6f ? 0 : 1;
}
