// A call on a thread with as much stack as the documentation says.
#pragma once

#include <pthread.h>

#include "catch.h"

namespace test {

#if defined(__SANITIZE_ADDRESS__)
#define TEST_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEST_ADDRESS_SANITIZER 1
#endif
#endif
#if !defined(TEST_ADDRESS_SANITIZER)
#define TEST_ADDRESS_SANITIZER 0
#endif

// What docs/cpu.md says that products and attention need. AddressSanitizer puts more of its own around every array.
constexpr size_t kStackBytes = (TEST_ADDRESS_SANITIZER ? 4 : 1) * (640 << 10);

// f() on a thread with so many bytes of stack. The guard behind them is longer than any array that might reach past it.
template <class F>
void on_stack(size_t bytes, const F& f) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  pthread_attr_setguardsize(&attributes, 1 << 20);
  const auto run = [](void* p) -> void* {
    (*static_cast<const F*>(p))();
    return nullptr;
  };
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, run, const_cast<F*>(&f)) == 0;
  pthread_attr_destroy(&attributes);
  REQUIRE(started);
  pthread_join(thread, nullptr);
}

}  // namespace test
