// Writes when each kernel of a program began and ended, in nanoseconds, as lines of a CSV file, without the program
// knowing:
//
//   g++ -O2 -shared -fPIC -I $CUDA/include bench/support/trace_kernels.cpp -L $CUDA/lib64 -lcupti -o trace_kernels.so
//   CUDA_INJECTION64_PATH=./trace_kernels.so TRACE_KERNELS=kernels.csv program ...
//
// Kernels overlap in it as they do without it; those of a graph are there one by one.
#include <cupti.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr size_t kBuffer = 8 << 20;
FILE* out = nullptr;

void CUPTIAPI give(uint8_t** buffer, size_t* size, size_t* records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(4096, kBuffer));
  *size = *buffer == nullptr ? 0 : kBuffer;
  *records = 0;
}

void CUPTIAPI take(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (out != nullptr && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    // All that is read stands at the same place in older and newer records.
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
    std::fprintf(out, "%llu,%llu,%d,%d,%d,%d,\"%s\"\n", static_cast<unsigned long long>(kernel->start),
                 static_cast<unsigned long long>(kernel->end), kernel->gridX * kernel->gridY * kernel->gridZ,
                 kernel->blockX, kernel->registersPerThread, kernel->staticSharedMemory + kernel->dynamicSharedMemory,
                 kernel->name);
  }
  std::free(buffer);
}

void finish() {
  (void)cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  if (out != nullptr) std::fclose(out), out = nullptr;
}

}  // namespace

extern "C" int InitializeInjection() {
  const char* const path = std::getenv("TRACE_KERNELS");
  out = std::fopen(path == nullptr ? "kernels.csv" : path, "w");
  if (out == nullptr) return 0;
  std::fprintf(out, "begin,end,blocks,threads,registers,shared,name\n");
  const bool works = cuptiActivityRegisterCallbacks(give, take) == CUPTI_SUCCESS &&
                     cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) == CUPTI_SUCCESS;
  if (!works) std::fprintf(stderr, "CUPTI cannot trace kernels here\n");
  std::atexit(finish);
  return 1;
}
