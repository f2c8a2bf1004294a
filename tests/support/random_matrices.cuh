// Matrices of random calls (random_calls.cuh): where they lie, and their numbers, which follow from a seed. And their
// activations.
#pragma once

#include <kernels/functor.h>

#include "random_calls.cuh"

namespace test {

// Where a matrix lies, whatever its type.
struct Place {
  int kind = 0;  // 0: rows without gaps, 1: at multiples of 16 bytes, 2: of 8 bytes, 3: anywhere
  int64_t more = 0;
  template <class T>
  int64_t ld(int64_t cols) const {
    const int64_t unit = kind == 1   ? std::max<int64_t>(1, 16 / int64_t(sizeof(T)))
                         : kind == 2 ? std::max<int64_t>(1, 8 / int64_t(sizeof(T)))
                                     : 1;
    if (kind == 0) return cols;
    if (kind == 3) return cols + more % 10;
    const int64_t units = (cols + unit - 1) / unit + more % 3;
    return unit * (kind == 2 && units % 2 == 0 ? units + 1 : units);
  }
  template <class T>
  int64_t shift() const {
    if (kind == 0) return 0;
    if (kind == 3) return more / 16 % 5;
    return more / 16 % 2 * std::max<int64_t>(1, (kind == 1 ? 16 : 8) / int64_t(sizeof(T)));
  }
};

inline Place draw_place(Random& random) {
  const int64_t what = random.below(100);
  return {what < 25 ? 0 : what < 70 ? 1 : what < 80 ? 2 : 3, random.below(1 << 20)};
}

enum class Values { normal, codes, scales };

// Some thousands of numbers of T, from which those of all matrices are taken: making one from a double takes longer.
template <class T>
const std::vector<T>& numbers(Values values) {
  static const auto make_all = [](Values what) {
    std::vector<T> all;
    Random random(77);
    for (int i = 0; i < 1 << 13; ++i) {
      const double codes = std::is_same<T, int8_t>::value ? 40 : 3;
      // Scales that half holds, as codes times these.
      all.push_back(make<T>(what == Values::scales ? (i % 2 ? 1 : -1) * random.uniform(0.04, 0.2)
                                                   : random.normal() * (what == Values::codes ? codes : 1)));
    }
    return all;
  };
  static const std::vector<T> of[] = {make_all(Values::normal), make_all(Values::codes), make_all(Values::scales)};
  return of[int(values)];
}
inline uint64_t cell_bits(uint64_t seed, int64_t row, int64_t col) {
  return mix(seed * 0x9e3779b97f4a7c15ull + uint64_t(row) * 0x100000001b3ull + uint64_t(col));
}

// For what is only read. Row r has the numbers of row r + first.
template <class T>
struct Cells : Guarded<T, DeviceMemory> {
  template <class Value>
  Cells(const Value& value, int64_t rows, int64_t cols, int64_t ld, int64_t shift, int64_t first)
      : Guarded<T, DeviceMemory>(rows, cols, ld, shift, Poison::nan) {
    const int64_t some = 1 + 20000 / (cols + 1), filled = ld == 0 ? std::min<int64_t>(rows, 1) : rows;
    in_parallel(size_t((filled + some - 1) / some), [&](size_t part) {
      for (int64_t r = int64_t(part) * some; r < std::min(filled, (int64_t(part) + 1) * some); ++r)
        for (int64_t c = 0; c < cols; ++c) this->set(r, c, value(ld == 0 ? 0 : r + first, c));
    });
    this->upload();
  }
  Cells(uint64_t seed, Values values, int64_t rows, int64_t cols, int64_t ld, int64_t shift = 0, int64_t first = 0)
      : Cells([&, &all = numbers<T>(values)](int64_t r, int64_t c) { return all[cell_bits(seed, r, c) % all.size()]; },
              rows, cols, ld, shift, first) {}
  double value(int64_t row, int64_t col) const { return value_of(this->get(row, col)); }
  const T* at() const { return this->data(); }
};

// How much of a workspace a call gets, compared with what it asks for.
enum class Room { none, exact, more, less };
inline const char* name_of(Room room) {
  static const char* const names[] = {"no workspace", "a workspace", "a larger workspace", "too small a workspace"};
  return names[int(room)];
}
// Of a call that asks for `exact` bytes.
inline std::unique_ptr<Scratch> make_workspace(Room room, int64_t exact, uint64_t seed) {
  Random random(seed);
  const int64_t bytes = room == Room::exact  ? exact
                        : room == Room::more ? exact + random.below(100000)
                        : room == Room::less ? random.below(std::max<int64_t>(1, exact))
                                             : 0;
  return bytes > 0 ? std::make_unique<Scratch>(size_t(bytes), 0xff) : nullptr;
}

// What a call says is wrong, or that it changed what it should only read.
template <class Call>
std::string run_and_check_inputs(Call&& call) {
  const std::string wrong = call.run();
  return !wrong.empty() || call.inputs_unchanged() ? wrong : "an input was changed";
}

// An activation that is known when the program runs: none, relu, silu or gelu.
struct DrawnActivation : k::Elementwise<DrawnActivation> {
  int kind;
  explicit DrawnActivation(int which) : kind(which) {}
  KERNELS_HD float operator()(float x) const {
    switch (kind) {
      case 1:
        return k::Relu{}(x);
      case 2:
        return k::Silu{}(x);
      case 3:
        return k::GeluTanh{}(x);
      default:
        return x;
    }
  }
};
// What it should give, in the oracle's own double arithmetic (oracle.h), not by the library's functors.
inline Real<> activated(int kind, Real<> x) {
  return kind == 1 ? relu(x) : kind == 2 ? silu(x) : kind == 3 ? gelu(x) : x;
}

}  // namespace test
