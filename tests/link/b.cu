#include "calls.cuh"

extern "C" int link_b() { return gpu_calls("b"); }
