#include "calls.cuh"

extern "C" int link_a() { return gpu_calls("a"); }
