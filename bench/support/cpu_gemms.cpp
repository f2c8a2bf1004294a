// Compiled once for each instruction set; BENCH_RUN names the function.
#include "cpu_gemms.h"

#include <kernels/cpu/detail/matmul/gemm.h>

namespace k = kernels;

namespace bench {
namespace {

template <class T>
k::Status run(const GemmCall& c) {
  const auto x = k::load(static_cast<const T*>(c.x), c.k), w = k::load(static_cast<const T*>(c.w), c.k);
  return k::detail::host::gemm(k::cpu::Exec{c.threads}, x, w, k::store(c.y, c.n), {c.m, c.n, c.k});
}

}  // namespace

const char* BENCH_RUN(const GemmCall& c) {
  k::Status status;
  switch (c.type) {
    case Operand::fp32: status = run<float>(c); break;
    case Operand::fp16: status = run<k::half>(c); break;
    case Operand::bf16: status = run<k::bfloat16>(c); break;
  }
  return status ? nullptr : status.reason();
}

}  // namespace bench
