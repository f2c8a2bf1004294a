// Without a CUDA device every GPU test is skipped, unless KERNELS_REQUIRE_GPU is set: then that is a failure.
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "main.h"

static const char* why_no_device() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return devices == 0 ? "no CUDA device" : nullptr;
}

int main(int argc, char** argv) {
  const char* cannot_run = test::only_lists(argc, argv) ? nullptr : why_no_device();
  if (cannot_run && std::getenv("KERNELS_REQUIRE_GPU")) {
    std::fprintf(stderr, "KERNELS_REQUIRE_GPU is set: %s\n", cannot_run);
    return 1;
  }
  return test::run(argc, argv, cannot_run);
}
