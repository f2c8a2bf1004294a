// Shared memory for types that have constructors.
#pragma once

#include "../core/macros.h"

KERNELS_BEGIN
namespace detail {

// Constructors do not run.
template <class T, int kCount>
union Uninitialized {
  T items[kCount];
  __device__ Uninitialized() {}
};

}  // namespace detail
KERNELS_END
