// What model families put behind RMSNorm, with every rounding where they have it: half in and out, and the same bits
// are wanted.
#pragma once

#include <kernels/functor.h>

#include "oracle.h"
#include "tally.h"

namespace test {

namespace k = kernels;

// f(name, maps, model): model(x / rms, weight), in float, is what the maps make of it before it is stored.
template <class F>
void each_family(const k::half* weight, const F& f) {
  f("Llama", k::affine(weight), [](float x, float w) { return x * w; });
  f("Hugging Face's Llama", k::round_to<k::half>() | k::affine(weight),
    [](float x, float w) { return float(round_to(DType::f16, double(x))) * w; });
  f("Gemma", k::affine(k::one_plus(weight)), [](float x, float w) { return x * (1 + w); });
}

template <class X, class Weight, class Y, class Rstd, class Model>
void check_family(Tally& t, const char* name, const X& x, const Weight& weight, const Y& y, const Rstd& rstd,
                  const Model& model) {
  for (int64_t r = 0; r < y.rows(); ++r) {
    for (int64_t c = 0; c < y.cols(); ++c) {
      const float normed = float(value_of(x.get(r, c))) * rstd.get(0, r);
      const double want = round_to(DType::f16, double(model(normed, float(value_of(weight.get(0, c)))))),
                   got = value_of(y.get(r, c));
      t.expect(got == want, "%s, %d columns: row %d, column %d: %g, want %g", name, int(y.cols()), int(r), int(c), got,
               want);
    }
  }
}

}  // namespace test
