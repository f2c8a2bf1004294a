#include "calls.h"

extern "C" int link_a() { return cpu_calls("a"); }
