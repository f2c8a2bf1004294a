#include "calls.h"

extern "C" int link_b() { return cpu_calls("b"); }
