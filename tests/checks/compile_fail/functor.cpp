// FAILS SOURCE_INTO_SINK: operator|
// FAILS SINK_INTO_MAP: operator|
// FAILS ADD_A_MAP: expected a source
// FAILS ADD_A_NUMBER: as_source
// FAILS BOTH_WITH_A_SOURCE: both() takes two sinks
// FAILS BOTH_WITH_A_SCALE_PER_ROW: quantize() cannot be one of both()
// FAILS STORE_INTO_CONST: const
#include <kernels/functor.h>

namespace k = kernels;

void f(const float* x, float* y, int8_t* q, float* scales) {
  const auto in = k::load(x, 8) | k::scale(2);
  const auto out = k::gelu() | k::store(y, 8);
  const auto two = k::both(k::store(y, 8), k::store(y, 8));
  const auto codes = k::quantize(q, 8, scales);
  (void)in, (void)out, (void)two, (void)codes;
#if defined(SOURCE_INTO_SINK)
  (void)(in | out);
#elif defined(SINK_INTO_MAP)
  (void)(out | k::gelu());
#elif defined(ADD_A_MAP)
  (void)(in | k::add(k::scale(2)));
#elif defined(ADD_A_NUMBER)
  (void)(in | k::add(1.0f));
#elif defined(BOTH_WITH_A_SOURCE)
  (void)k::both(out, in);
#elif defined(BOTH_WITH_A_SCALE_PER_ROW)
  (void)k::both(out, codes);
#elif defined(STORE_INTO_CONST)
  k::store(x, 8).store<1>(k::broadcast<1>(1.f), 0, 0);
#endif
}
