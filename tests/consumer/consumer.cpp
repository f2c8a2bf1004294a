// Every header that a user includes is there; one call shows that it works.
#include <kernels/append.h>
#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/norm_heads.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/router.h>
#include <kernels/cpu/sampling.h>
#include <kernels/cpu/softmax.h>
#include <kernels/dropout.h>
#include <kernels/embed.h>
#include <kernels/heads.h>
#include <kernels/quantize.h>
#include <kernels/rope.h>

#include <cmath>

int main() {
  const float x[4] = {0, 0, 0, 0};
  float y[4] = {};
  kernels::cpu::Exec ex;
  const kernels::Status status = kernels::cpu::softmax(ex, kernels::load(x, 4), kernels::store(y, 4), 1, 4);
  return status.ok() && std::fabs(y[3] - 0.25f) < 1e-6f ? 0 : 1;
}
