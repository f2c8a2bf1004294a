// Sources, maps and sinks: kernels read through a source, change values by maps, and write through a sink.
//
//   auto in  = k::load(x, ld) | k::add(k::row(bias)) | k::add(k::load(res, ld)) | k::tee(res, ld);
//   auto out = k::affine(gamma, beta) | k::gelu() | k::store(y, ld);
//   k::layernorm(stream, in, out, rows, cols);            // one pass over memory
//
// The same objects drive the CPU versions, with host pointers. All are plain values: copy them and build them anywhere.
//
// Sources      load(p, ld)  row(p)  per_row(p)  one_plus(p)  cycle(source, period)
// Maps         scale(s)  shift(s)  add(source)  mul(source)  bias(p)  affine(gamma[, beta])
//              gelu()  gelu_erf()  silu()  relu()  relu2()  sigmoid()  tanh()  exp()  clamp(low, high)
//              mask(source)  causal(q_len, kv_len)  round_to<T>()  tee(p, ld)
// Sinks        store(p, ld)  both(sink, sink ...)  quantize(p, ld, scales)
//
// ld counts elements from one row to the next: any stride for a load (0 repeats one row), at least the number of
// columns for what is written. load(p), store(p) and tee(p) without ld are for a single row: a flat tensor.
// docs/memory.md says what may be written in place.
//
// To fuse your own, derive from k::Functor and give it one member (core/concepts.h lists all forms):
//
//   struct Clamp : k::Functor {
//     float hi;
//     template <int N>
//     KERNELS_HD auto map(k::Pack<float, N> v, int64_t row, int64_t col) const { return k::min(v, hi); }
//   };
#pragma once

#include "functor/compose.h"
#include "functor/map.h"
#include "functor/sink.h"
#include "functor/source.h"
