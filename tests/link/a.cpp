#include "doors.h"

extern "C" int link_a() { return every_door("a"); }
