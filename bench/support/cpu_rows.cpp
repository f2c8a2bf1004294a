// Compiled once for each instruction set; BENCH_RUN names the function.
#include "cpu_rows.h"

#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/softmax.h>

namespace k = kernels;

namespace bench {
namespace {

template <class T>
k::Status run(const RowCall& c) {
  const k::cpu::Exec cx{c.threads};
  const auto in = k::load(static_cast<const T*>(c.x), c.cols);
  const auto out = k::store(static_cast<T*>(c.y), c.cols);
  switch (c.op) {
    case RowOp::softmax: return k::cpu::softmax(cx, in, out, c.rows, c.cols);
    case RowOp::layernorm:
      return k::cpu::layernorm(cx, in, k::affine(c.gamma, c.beta) | out, c.rows, c.cols,
                               k::LayerNorm{}.mean(c.mean).rstd(c.rstd));
    case RowOp::rmsnorm: return k::cpu::rmsnorm(cx, in, k::affine(c.gamma) | out, c.rows, c.cols);
  }
  return k::Status{};
}

}  // namespace

const char* BENCH_RUN(const RowCall& c) {
  k::Status status;
  switch (c.type) {
    case Type::fp32: status = run<float>(c); break;
    case Type::fp16: status = run<k::half>(c); break;
    case Type::bf16: status = run<k::bfloat16>(c); break;
  }
  return status ? nullptr : status.reason();
}

}  // namespace bench
