// Detects forbidden overlaps of inputs and outputs (docs/memory.md has the rules), as far as pointers on the host show
// that two matrices certainly share bytes. Page tables and offsets on the device, and functors other than load and
// store, are not examined.
#pragma once

#include "concepts.h"

KERNELS_BEGIN
namespace detail {

struct Repeat {
  int64_t count = 1, stride = 0;  // bytes
};

// A matrix in memory: `rows` rows of `bytes` bytes, `stride` bytes apart, repeated for heads and sequences if those do
// not continue the rows (heads.h). rows == 0: unknown.
struct Plane {
  const char* begin = nullptr;
  int64_t rows = 0, bytes = 0, stride = 0;
  int element = 0;  // bytes; 0: an element is read for other results too
  Repeat heads = {}, batches = {};
};

template <class T>
Plane plane(const T* p, int64_t ld, int64_t rows, int64_t cols) {
  const int64_t size = int64_t(sizeof(T));
  // Sizes that exceed 64 bits are refused elsewhere.
  if (p == nullptr || cols <= 0 || ld < 0 || cols > (int64_t(1) << 40) || ld > (int64_t(1) << 40) ||
      rows > (int64_t(1) << 20) * (int64_t(1) << 20))
    return {};
  return {reinterpret_cast<const char*>(p), rows, cols * size, ld * size, int(size)};
}

KERNELS_DETECT(has_plane, std::declval<const F&>().plane(kAny, kAny))
template <class F>
Plane plane_of(const F& f, int64_t rows, int64_t cols) {
  if constexpr (has_plane<F>::value) return f.plane(rows, cols);
  else return {};
}

constexpr int64_t floor_quotient(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

inline bool holds(const Plane& plane, const char* p) {
  int64_t at = int64_t(reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(plane.begin));
  if (at < 0) return false;
  // The largest stride first: the others together span less.
  Repeat steps[] = {{plane.rows, plane.stride}, plane.heads, plane.batches};
  const auto order = [&](int a, int b) {
    if (steps[a].stride < steps[b].stride) std::swap(steps[a], steps[b]);
  };
  order(0, 1), order(1, 2), order(0, 1);
  for (const Repeat& step : steps) {
    if (step.stride > 0) at -= lesser(at / step.stride, step.count - 1) * step.stride;
  }
  return at < plane.bytes;
}

// Whether two matrices share bytes. Exact for equal strides; otherwise, and for heads that are not adjacent, only the
// beginning of each is looked up in the other.
inline bool share_bytes(const Plane& a, const Plane& b) {
  if (a.rows < 1 || b.rows < 1) return false;
  if (holds(a, b.begin) || holds(b, a.begin)) return true;
  if (a.stride != b.stride || a.stride == 0 || a.heads.count * b.heads.count * a.batches.count * b.batches.count != 1)
    return false;
  // Row j of b begins apart + j * stride bytes after the beginning of a, row i of a begins i * stride after it.
  const int64_t apart = int64_t(reinterpret_cast<uintptr_t>(b.begin) - reinterpret_cast<uintptr_t>(a.begin));
  const int64_t first = greater(1 - a.rows, floor_quotient(-b.bytes - apart, a.stride) + 1);
  const int64_t last = lesser(b.rows - 1, floor_quotient(a.bytes - 1 - apart, a.stride));
  return first <= last;
}

// Whether each result is written to the place of the element from which it is made.
inline bool in_place(const Plane& in, const Plane& out) {
  const auto same = [](const Repeat& a, const Repeat& b) {
    return a.count == b.count && (a.stride == b.stride || a.count == 1);
  };
  return in.begin == out.begin && in.element == out.element && in.element != 0 &&
         same({in.rows, in.stride}, {out.rows, out.stride}) && same(in.heads, out.heads) &&
         same(in.batches, out.batches);
}

}  // namespace detail
KERNELS_END
