// Sources, maps and sinks: what every kernel reads through, passes through and writes through.
//
//   auto in  = k::load(x, ld) | k::add(k::row(bias)) | k::add(k::load(res, ld)) | k::tee(res, ld);
//   auto out = k::affine(gamma, beta) | k::gelu() | k::store(y, ld);
//   k::layernorm(stream, in, out, rows, cols);            // one pass over memory
//
// The same objects drive the CPU versions, with host pointers. All are plain values: copy them, build them anywhere.
//
// Sources      load(p, ld)  row(p)  per_row(p)  one_plus(p)  cycle(source, period)
// Maps         scale(s)  shift(s)  add(source)  mul(source)  bias(p)  affine(gamma[, beta])
//              gelu()  gelu_erf()  silu()  relu()  relu2()  sigmoid()  tanh()  exp()  clamp(low, high)
//              mask(source)  causal(q_len, kv_len)  round_to<T>()  tee(p, ld)
// Sinks        store(p, ld)  both(sink, sink ...)  quantize(p, ld, scales)
//
// Rows may be any distance apart: ld counts elements from one row to the next (ld >= cols for what is written; 0 in a
// load repeats one row). load(p), store(p) and tee(p) are of a single row: a flat tensor. What may be written in place:
// docs/memory.md.
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
