// Compiled as a is, it has the same functions, of which a few are enough; otherwise LINK_B_CALLS is every_door.
#include "doors.h"

#if !defined(LINK_B_CALLS)
#define LINK_B_CALLS cpu_calls
#endif

extern "C" __attribute__((visibility("default"))) int link_b() { return LINK_B_CALLS("b"); }
