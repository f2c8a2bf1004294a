// A guarded matrix of normal numbers, for what is only read.
#pragma once

#include "guarded.h"
#include "oracle.h"
#include "random.h"

namespace test {

template <class T, class Memory = HostMemory>
struct RandomMatrix : Guarded<T, Memory> {
  RandomMatrix(uint64_t seed, int64_t rows, int64_t cols, int64_t ld, int64_t shift = 0, double spread = 3)
      : Guarded<T, Memory>(rows, cols, ld, shift, Poison::nan) {
    Random random(seed);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) this->set(r, c, make<T>(spread * random.normal()));
    }
    this->upload();
  }
  double value(int64_t row, int64_t col) const { return value_of(this->get(row, col)); }
};

}  // namespace test
