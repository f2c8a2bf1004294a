// FAILS IGNORED: nodiscard
// FAILS CONVERTED: kernels::
#include <kernels/core/status.h>

kernels::Status call();

void f() {
  if (!call()) return;
#ifdef IGNORED
  call();
#endif
#ifdef CONVERTED
  int error = call();  // a Status is no number: 0 would read as success or as failure
  (void)error;
#endif
}
