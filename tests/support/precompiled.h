// What most tests include, parsed once for all that are compiled alike. Tests include what they use all the same.
#pragma once

#include <kernels/cpu/attention.h>
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/exec.h>
#include <kernels/cpu/matmul.h>
#include <kernels/functor.h>

#include "guarded.h"
#include "oracle.h"
#include "random_matrix.h"
#include "tally.h"
#include "threads.h"
