// Workspace: scratch memory that the caller owns. Calls that run at the same time need different workspaces.
#pragma once

#include <cstddef>

#include "macros.h"

KERNELS_BEGIN

struct Workspace {
  void* ptr = nullptr;
  size_t bytes = 0;
};

KERNELS_END
