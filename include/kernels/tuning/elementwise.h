// How copy() shares out its work.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace tuning {

// So many bytes a thread asks for before it uses the first: the copy kernel that benchmarks hold copy() against is fastest with one to
// four packs of 16 bytes, which bench_elementwise measures beside it.
constexpr int kBytesInFlight = 64;
// Where there is not enough work for so many blocks on each multiprocessor, threads take fewer packs at a time.
constexpr int kBlocksEach = 8;

}  // namespace tuning
KERNELS_END
