// FAILS SOURCE_INTO_SINK: they are two arguments of a call
// FAILS SINK_INTO_MAP: maps stand before it
// FAILS MAP_INTO_SOURCE: maps stand behind it
// FAILS MAP_INTO_NUMBER: one of these is none of them. A map of your own derives from k::Functor
// FAILS LAMBDA: struct S : k::Elementwise<S> { KERNELS_HD float operator()(float x) const; }
// FAILS LAMBDA_BEFORE_A_SINK: as a map that derives from k::Elementwise
// FAILS FUNCTION_OF_VALUES: as a map that derives from k::Elementwise
// FAILS ADD_A_MAP: expected a source
// FAILS ADD_A_NUMBER: k::shift(s) adds one
// FAILS BOTH_WITH_A_SOURCE: both() takes two sinks
// FAILS BOTH_WITH_A_SCALE_PER_ROW: quantize() cannot be one of both()
// FAILS STORE_INTO_CONST: store, tee: the pointer is to const elements
// FAILS STORE_FLAT_INTO_CONST: store, tee: the pointer is to const elements
// FAILS STORE_HEADS_INTO_CONST: store, tee: the pointer is to const elements
// FAILS TEE_INTO_CONST: store, tee: the pointer is to const elements
// FAILS STORE_INTO_CONST_VOID: store, tee: the pointer is to const elements
// FAILS STORE_INTO_VOID: store, tee: a pointer to void
// FAILS STORE_INT32: store, tee: results are half, bfloat16, float, double, float8_e4m3, float8_e5m2 or int8_t
// FAILS STORE_INT16: store, tee: results are half
// FAILS STORE_UINT8: store, tee: results are half
// FAILS TEE_BOOL: store, tee: results are half
// FAILS LOAD_WORDS: load: 16 bits that may be anything
// FAILS LOAD_VOID: load, row, per_row: a pointer to void: cast it to the type of its elements
// FAILS LOAD_FLAT_VOID: load, row, per_row: a pointer to void: cast it to the type of its elements
// FAILS LOAD_HEADS_VOID: load, row, per_row: a pointer to void: cast it to the type of its elements
// FAILS PER_ROW_VOID: load, row, per_row: a pointer to void: cast it to the type of its elements
// FAILS ADD_VOID: load, row, per_row: a pointer to void: cast it to the type of its elements
// FAILS STORE_WORDS: store, tee: 16 bits that may be anything
#include <kernels/functor.h>
#include <kernels/heads.h>

namespace k = kernels;

struct Twice : k::Functor {
  float operator()(float x) const { return 2 * x; }
};

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
#elif defined(LAMBDA)
  (void)(in | [](float value) { return 2 * value; });
#elif defined(LAMBDA_BEFORE_A_SINK)
  (void)([](auto value) { return 2 * value; } | out);
#elif defined(FUNCTION_OF_VALUES)
  (void)(in | Twice());
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
  (void)(k::gelu() | k::store(x, 8));
#elif defined(LOAD_VOID)
  (void)(k::load(static_cast<void*>(y), 8) | k::gelu());
#elif defined(LOAD_FLAT_VOID)
  (void)(k::load(static_cast<const void*>(x)) | k::gelu());
#elif defined(LOAD_HEADS_VOID)
  (void)(k::load(static_cast<const void*>(x), k::heads(8, 8, 8)) | k::gelu());
#elif defined(PER_ROW_VOID)
  (void)(in | k::mul(k::per_row(static_cast<const void*>(x))));
#elif defined(ADD_VOID)
  (void)(in | k::add(static_cast<const void*>(x)));
#elif defined(STORE_FLAT_INTO_CONST)
  (void)(k::gelu() | k::store(x));
#elif defined(STORE_HEADS_INTO_CONST)
  (void)(k::gelu() | k::store(x, k::heads(8, 8, 8)));
#elif defined(TEE_INTO_CONST)
  (void)(in | k::tee(x, 8));
#elif defined(STORE_INTO_CONST_VOID)
  (void)(k::gelu() | k::store(static_cast<const void*>(x), 8));
#elif defined(STORE_INTO_VOID)
  (void)(k::gelu() | k::store(static_cast<void*>(y), 8));
#elif defined(STORE_INT32)
  (void)(k::gelu() | k::store(reinterpret_cast<int32_t*>(y), 8));
#elif defined(STORE_INT16)
  (void)(k::gelu() | k::store(reinterpret_cast<int16_t*>(y), 8));
#elif defined(STORE_UINT8)
  (void)(k::gelu() | k::store(reinterpret_cast<uint8_t*>(y)));
#elif defined(TEE_BOOL)
  (void)(in | k::tee(reinterpret_cast<bool*>(y), 8));
#endif
}
