// FAILS SOURCE_INTO_SINK: they are two arguments of a call
// FAILS SINK_INTO_MAP: maps stand before it
// FAILS MAP_INTO_SOURCE: maps stand behind it
// FAILS MAP_INTO_NUMBER: one of these is none of them. A map of your own derives from k::Functor
// FAILS ADD_A_MAP: expected a source
// FAILS ADD_A_NUMBER: k::shift(s) adds one
// FAILS BOTH_WITH_A_SOURCE: both() takes two sinks
// FAILS BOTH_WITH_A_SCALE_PER_ROW: quantize() cannot be one of both()
// FAILS STORE_INTO_CONST: store: the pointer is to const elements
// FAILS LOAD_WORDS: load: 16 bits that may be anything
// FAILS STORE_WORDS: store: 16 bits that may be anything
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
#elif defined(MAP_INTO_SOURCE)
  (void)(k::gelu() | in);
#elif defined(MAP_INTO_NUMBER)
  (void)(k::gelu() | 2.f);
#elif defined(LOAD_WORDS)
  (void)k::load(reinterpret_cast<const uint16_t*>(x));
#elif defined(STORE_WORDS)
  (void)k::store(reinterpret_cast<uint16_t*>(y), 8);
#elif defined(ADD_A_MAP)
  (void)(in | k::add(k::scale(2)));
#elif defined(ADD_A_NUMBER)
  (void)(in | k::add(1.0f));
#elif defined(BOTH_WITH_A_SOURCE)
  (void)k::both(out, in);
#elif defined(BOTH_WITH_A_SCALE_PER_ROW)
  (void)k::both(out, codes);
#elif defined(STORE_INTO_CONST)
  (void)k::store(x, 8);
#endif
}
