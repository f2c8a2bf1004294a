// Compiled once for each instruction set; BENCH_RUN names the function.
#include "cpu_gemvs.h"

#include <kernels/cpu/matmul.h>

namespace k = kernels;

namespace bench {
namespace {

template <class W>
k::Status run(const GemvCall& c, const W& w) {
  return k::cpu::matmul(k::cpu::Exec{c.threads}, k::load(c.x, c.k), w, k::store(c.y, c.n), {c.m, c.n, c.k});
}

k::Status run(const GemvCall& c) {
  const auto* bytes = static_cast<const int8_t*>(c.w);
  const auto* words = static_cast<const uint32_t*>(c.w);
  const auto* scales = static_cast<const k::half*>(c.scales);
  const auto groups = [&](int size) { return k::group_scales(scales, c.k / size, size); };
  switch (c.type) {
    case Weights::fp32: return run(c, k::load(static_cast<const float*>(c.w), c.k));
    case Weights::fp16: return run(c, k::load(static_cast<const k::half*>(c.w), c.k));
    case Weights::bf16: return run(c, k::load(static_cast<const k::bfloat16*>(c.w), c.k));
    case Weights::e4m3:
      return run(c, k::dequant(k::load(static_cast<const k::float8_e4m3*>(c.w), c.k), k::row_scales(scales)));
    case Weights::e5m2:
      return run(c, k::dequant(k::load(static_cast<const k::float8_e5m2*>(c.w), c.k), k::row_scales(scales)));
    case Weights::int8: return run(c, k::dequant(k::load(bytes, c.k), k::row_scales(scales)));
    case Weights::int8_g128: return run(c, k::dequant(k::load(bytes, c.k), groups(128)));
    case Weights::int4_g32: return run(c, k::dequant(k::int4(words, c.k), groups(32)));
    case Weights::int4_g128: return run(c, k::dequant(k::int4(words, c.k), groups(128)));
    case Weights::uint4_g64:
      return run(c, k::dequant(k::uint4(words, c.k), groups(64).zeros(static_cast<const uint8_t*>(c.zeros))));
    case Weights::gf4: return run(c, k::gf4(words, c.k));
  }
  return k::Status{};
}

}  // namespace

const char* BENCH_RUN(const GemvCall& c) {
  const k::Status status = run(c);
  return status ? nullptr : status.reason();
}

}  // namespace bench
