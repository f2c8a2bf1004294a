// What most tests include, parsed once for all that are compiled alike. Tests include what they use all the same.
#pragma once

#include <kernels/cpu/exec.h>
#include <kernels/functor.h>

#include "guarded.h"
#include "oracle.h"
#include "random_matrix.h"
#include "tally.h"
#include "threads.h"
