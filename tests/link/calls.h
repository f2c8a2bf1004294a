// What both translation units of a link test do: the same calls of the CPU operations, checked.
#pragma once

#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/rmsnorm.h>
#include <kernels/cpu/softmax.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "expected.h"

namespace {

// 0: everything is right.
inline int cpu_calls(const char* unit) {
  namespace k = kernels;
  const int64_t rows = 5, cols = 1000;
  const std::vector<float> x = link::input(rows, cols);
  std::vector<float> y(x.size()), gamma(size_t(cols), 2.f), scales(static_cast<size_t>(rows));
  std::vector<int8_t> q(x.size());
  const k::cpu::Exec cx = k::cpu::Exec{2}.least_work(0);
  const auto in = k::load(x.data(), cols);
  const auto out = k::store(y.data(), cols);
  link::Verdict verdict(unit);
  verdict.called("softmax", bool(k::cpu::softmax(cx, in, out, rows, cols)), y, link::softmax(x, rows, cols));
  verdict.called("log_softmax", bool(k::cpu::log_softmax(cx, in | k::scale(1), out, rows, cols)), y,
                 link::log_softmax(x, rows, cols));
  verdict.called("layernorm", bool(k::cpu::layernorm(cx, in, k::affine(gamma.data()) | out, rows, cols)), y,
                 link::layernorm(x, rows, cols, 2));
  verdict.called("rmsnorm", bool(k::cpu::rmsnorm(cx, in, out, rows, cols)), y, link::rmsnorm(x, rows, cols));
  const bool ok = bool(k::cpu::rmsnorm(cx, in, k::quantize(q.data(), cols, scales.data()), rows, cols));
  for (size_t i = 0; i < y.size(); ++i) y[i] = float(q[i]) * scales[i / size_t(cols)];
  verdict.called("quantize", ok, y, link::rmsnorm(x, rows, cols), /*tolerance*/ 0.01);
  return verdict.failures();
}

}  // namespace
