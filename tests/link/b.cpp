#include "doors.h"

extern "C" int link_b() { return every_door("b"); }
