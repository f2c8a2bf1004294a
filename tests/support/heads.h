// Queries and results whose tokens, heads and sequences stand any distances apart.
#pragma once

#include <kernels/heads.h>

#include "guarded.h"
#include "random_matrix.h"

namespace test {

namespace k = kernels;

struct HeadStrides {
  const char* name;
  int64_t token, head, batch;
};

// In the orders that people have them, and with gaps.
inline std::vector<HeadStrides> head_strides(int64_t batch, int64_t length, int64_t heads, int64_t dim) {
  const int64_t wide = dim + 8, odd = dim + 3;
  return {{"batch, head, token", dim, length * dim, heads * length * dim},
          {"batch, token, head", heads * dim, dim, length * heads * dim},
          {"head, batch, token", dim, batch * length * dim, length * dim},
          {"token, batch, head", batch * heads * dim, dim, heads * dim},
          {"batch, head, token, with gaps", wide, length * wide + 16, heads * (length * wide + 16) + 24},
          {"batch, head, token, not aligned", odd, length * odd + 1, heads * (length * odd + 1) + 5}};
}

// A tensor of them; what belongs to no head is poison.
template <class T, class Memory = HostMemory>
class SpreadHeads {
 public:
  SpreadHeads(const HeadStrides& strides, int64_t batch, int64_t length, int64_t heads, int64_t dim, Poison poison)
      : s_(strides),
        batch_(batch),
        length_(length),
        heads_(heads),
        dim_(dim),
        memory_(1, extent(), extent(), 0, poison) {}

  k::Heads where() const { return k::heads(dim_, s_.token, s_.head).batches(length_, s_.batch); }
  T* data() const { return memory_.data(); }
  const HeadStrides& strides() const { return s_; }
  auto source() const { return k::load(static_cast<const T*>(memory_.data()), where()); }
  auto sink() const { return k::store(memory_.data(), where()); }

  // Of row b * length + i and column h * dim + c.
  T get(int64_t row, int64_t col) const { return memory_.get(0, index(row, col)); }
  template <class F>
  void fill(const F& value) {
    each([&](int64_t row, int64_t col) { memory_.set(0, index(row, col), value(row, col)); });
    memory_.upload();
  }
  bool unchanged() const { return memory_.unchanged(); }
  // Takes in what was written; whether that is nothing but heads.
  bool download() {
    const std::vector<unsigned char> before = memory_.bytes();
    memory_.download();
    const std::vector<unsigned char>& now = memory_.bytes();
    if (!memory_.intact()) return false;
    std::vector<bool> of_heads(size_t(extent()), false);
    each([&](int64_t row, int64_t col) { of_heads[size_t(index(row, col))] = true; });
    const size_t first = (before.size() - size_t(extent()) * sizeof(T)) / 2;
    for (int64_t i = 0; i < extent(); ++i) {
      const size_t at = first + size_t(i) * sizeof(T);
      if (!of_heads[size_t(i)] && std::memcmp(&before[at], &now[at], sizeof(T)) != 0) return false;
    }
    return true;
  }

 private:
  int64_t extent() const { return (batch_ - 1) * s_.batch + (length_ - 1) * s_.token + (heads_ - 1) * s_.head + dim_; }
  int64_t index(int64_t row, int64_t col) const {
    return row / length_ * s_.batch + row % length_ * s_.token + col / dim_ * s_.head + col % dim_;
  }
  template <class F>
  void each(const F& f) const {
    for (int64_t row = 0; row < batch_ * length_; ++row) {
      for (int64_t col = 0; col < heads_ * dim_; ++col) f(row, col);
    }
  }

  HeadStrides s_;
  int64_t batch_, length_, heads_, dim_;
  Guarded<T, Memory> memory_;
};

}  // namespace test
