// Keys and values appended with the scales that are found for them: what codes and scales should be, in the memory of
// the CPU or the GPU.
#pragma once

#include <kernels/append.h>
#include <kernels/rope.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "guarded.h"
#include "oracle.h"
#include "random.h"
#include "random_matrix.h"
#include "tally.h"

namespace test {

namespace k = kernels;

// Whether two values are the same bits, or both NaN.
template <class T>
bool same_bits(T a, T b) {
  if (std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(T)) == 0) return true;
  if constexpr (std::is_integral<T>::value) return false;
  else return std::isnan(value_of(a)) && std::isnan(value_of(b));
}

template <class Code>
struct CodeUnit {
  using Unit = Code;
  static constexpr int each = 1;
};
template <>
struct CodeUnit<k::Int4> {
  using Unit = uint32_t;
  static constexpr int each = 8;
};

enum class Cache { dense, heads_first, apart, ring, paged };
constexpr Cache kCaches[] = {Cache::dense, Cache::heads_first, Cache::apart, Cache::ring, Cache::paged};

// Tokens of two sequences, taken by turns, that go to a cache, each to a place of its own; some are to be left out.
template <class Code, class S, class Memory>
struct AppendTo {
  using Unit = typename CodeUnit<Code>::Unit;
  static constexpr int each = CodeUnit<Code>::each;
  static constexpr int64_t sequences = 2, capacity = 10, page = 5, kept = 2;

  Cache cache;
  int64_t tokens, heads, dim, gap, block, pos, head;  // strides, in elements
  std::vector<int32_t> where, whose, pages{3, 0, 4, 1};
  Numbers<int32_t, Memory> positions, owners, table, lengths;
  Guarded<Unit, Memory> codes;
  Guarded<S, Memory> scales;

  AppendTo(Cache which, int64_t tokens_, int64_t heads_, int64_t dim_, int64_t shift)
      : cache(which),
        tokens(tokens_),
        heads(heads_),
        dim(dim_),
        gap(which == Cache::apart ? 8 : 0),
        where(places(which, tokens_)),
        whose(owners_of(tokens_)),
        positions(where),
        owners(whose),
        table(pages),
        lengths(std::vector<int32_t>{last(0) + 1, last(1) + 1}),
        codes(1, units(), units(), shift),
        scales(1, blocks() * rows() * heads_, blocks() * rows() * heads_, 1) {
    head = which == Cache::heads_first ? rows() * (dim + gap) : dim + gap;
    pos = which == Cache::heads_first ? dim + gap : heads * (dim + gap);
    block = rows() * heads * (dim + gap);
  }

  static std::vector<int32_t> places(Cache which, int64_t tokens) {
    std::vector<int32_t> out;
    for (int64_t t = 0; t < tokens; ++t) {
      if (which == Cache::ring) out.push_back(int32_t(1 + t));  // more of a sequence than there is room for
      else if (t == 3) out.push_back(-1);
      else if (t == 8 && which != Cache::apart) out.push_back(int32_t(capacity));  // behind the cache
      else out.push_back(int32_t(t / 2 % capacity));
    }
    return out;
  }
  static std::vector<int32_t> owners_of(int64_t tokens) {
    std::vector<int32_t> out;
    for (int64_t t = 0; t < tokens; ++t) out.push_back(int32_t(t % sequences));
    return out;
  }
  int32_t last(int32_t sequence) const {
    int32_t most = -1;
    for (size_t t = 0; t < where.size(); ++t) most = whose[t] == sequence ? std::max(most, where[t]) : most;
    return most;
  }
  int64_t rows() const { return cache == Cache::paged ? page : capacity; }
  int64_t blocks() const { return cache == Cache::paged ? 5 : sequences; }
  int64_t units() const { return blocks() * rows() * heads * (dim + gap) / each; }

  // Of a token, in its sequence; negative: it is left out.
  int64_t position(int64_t t) const {
    const int64_t at = where[size_t(t)];
    if (cache != Cache::ring) return at < capacity ? at : -1;
    if (at < kept) return at;
    return at <= last(whose[size_t(t)]) - (capacity - kept) ? -1 : kept + (at - kept) % (capacity - kept);
  }
  // Of position `at` of a sequence: its first code, counted in elements, and its scale.
  int64_t code_at(int64_t sequence, int64_t at, int64_t h) const {
    return block_of(sequence, at) * block + at % rows() * pos + h * head;
  }
  int64_t scale_at(int64_t sequence, int64_t at, int64_t h) const {
    return (block_of(sequence, at) * rows() + at % rows()) * heads + h;
  }
  int64_t block_of(int64_t sequence, int64_t at) const {
    return cache == Cache::paged ? pages[size_t(sequence * 2 + at / page)] : sequence;
  }
  double code(int64_t element) const {
    if constexpr (each == 1) return value_of(codes.get(0, element));
    else {
      static const int shifts[] = {0, 16, 4, 20, 8, 24, 12, 28};
      return double(codes.get(0, element / 8) >> shifts[element % 8] & 15u) - 8;
    }
  }

  std::vector<Unit> all_codes() const { return all_of(codes); }
  std::vector<S> all_scales() const { return all_of(scales); }
  template <class E>
  static std::vector<E> all_of(const Guarded<E, Memory>& m) {
    std::vector<E> out;
    for (int64_t i = 0; i < m.cols(); ++i) out.push_back(m.get(0, i));
    return out;
  }

  k::AppendAt at() const {
    const k::AppendAt all(positions.data(), owners.data());
    return cache == Cache::ring ? all.ring(capacity, kept, static_cast<const int32_t*>(lengths.data())) : all;
  }
  auto tensor() const {
    const auto plain = [&](Unit* p) {
      if constexpr (each == 1) {
        return cache == Cache::apart         ? k::strided(p, block, pos, head)
               : cache == Cache::heads_first ? k::hnd(p, rows(), heads, dim)
                                             : k::nhd(p, rows(), heads, dim);
      } else {
        return cache == Cache::apart         ? k::strided<Code>(p, block, pos, head)
               : cache == Cache::heads_first ? k::hnd<Code>(p, rows(), heads, dim)
                                             : k::nhd<Code>(p, rows(), heads, dim);
      }
    };
    return plain(codes.data()).scales(static_cast<const S*>(scales.data()), rows() * heads, heads, 1);
  }
  // f(view)
  template <class F>
  auto with_view(const F& f) const {
    const auto side = tensor();
    if (cache == Cache::paged) return f(k::paged_kv(side, side, k::pages(table.data(), 2, page), 0));
    else return f(k::dense_kv(side, side, 0));
  }
};

// ---- what there should be -------------------------------------------------------------------------------------------

// The scale of a head and its codes.
template <class Code, class S>
struct FoundHead {
  S scale;
  std::vector<double> codes;
  bool exceeds = false;  // a half is too small for the scale

  explicit FoundHead(const std::vector<float>& v) {
    constexpr bool narrow = std::is_same<S, k::half>::value;
    double largest = 0;
    for (const float x : v) {
      if (std::isnan(largest) || std::isnan(x)) largest = std::nan("");
      else if (std::fabs(x) > std::fabs(largest)) largest = x;  // the first of those that are as large
    }
    if constexpr (std::is_same<Code, k::Int4>::value) {
      set_scale(double(float(largest / -8)));
      const double s = value_of(scale);
      for (const float x : v) {
        const double code = std::nearbyint(double(float(s != 0 ? x / s : 0)));
        codes.push_back(code > 7 ? 7 : code > -8 ? code : -8);
      }
    } else {
      const double most = double(k::detail::Largest<Code>::value), least = narrow ? 0x1p-24 : 0x1p-126;
      largest = std::fabs(largest);
      if (largest > 0 && largest < most * least) largest = most * least;
      set_scale(double(float(largest / most)));
      const float s = float(value_of(scale)), plain = std::is_same<S, float>::value ? float(most / largest) : 1 / s,
                  factor = largest == 0 ? 0 : plain;
      for (const float x : v) codes.push_back(value_of(make<Code>(double(x * factor))));
    }
  }
  void set_scale(double exact) {
    exceeds = std::is_same<S, k::half>::value && std::isfinite(exact) && std::fabs(exact) > 65504;
    scale = make<S>(exceeds ? std::copysign(65504, exact) : exact);
  }
  // Whether a finite code is as near to x as it can be: at half a step, unless it is the largest one.
  bool is_near(double code, double x) const {
    const double s = value_of(scale), least = std::is_same<S, k::half>::value ? 0x1p-14 : 0x1p-120;
    if (!std::isfinite(s) || std::fabs(s) < least || exceeds) return true;
    const double q = x / s, off = std::fabs(code - q);
    if (std::is_same<Code, k::Int4>::value) return off <= (q > 7 ? 1.05 : 0.5001);
    if (std::is_same<Code, int8_t>::value) return off <= 0.5001;
    const double part = std::is_same<Code, k::float8_e4m3>::value ? 0x1p-4 : 0x1p-3;
    return off <= std::fmax(1.01 * part * std::fabs(q), 0x1p-9);
  }
};

// Heads of all kinds: number `kind` of them.
constexpr int kHeadKinds = 12;
template <class T>
T head_value(int kind, int64_t col, int64_t dim, Random& random) {
  constexpr bool wide = std::is_same<T, float>::value;
  const double x = 3 * random.normal();
  switch (kind) {
    case 1: return make<T>(col % 2 == 0 ? -0.0 : 0.0);
    case 2: return make<T>(col == dim / 2 ? std::nan("") : x);
    case 3: return make<T>(col == dim / 3 || col == dim - 1 ? (col % 2 == 0 ? INFINITY : -INFINITY) : x);
    case 4: return make<T>(col == dim / 2 ? 5e3 * x : x);
    case 5: return make<T>(1e-7 * x);
    case 6: return make<T>((wide ? 1e-41 : 1e-6) * x);
    case 7: return make<T>((wide ? 3e37 : 9e3) * std::fmax(-3, std::fmin(3, x)));
    case 8: return make<T>(x < 0 ? 1.7109375 : -1.7109375);  // all as large
    case 9: return make<T>(col == 0 ? -8 : double(col % 16) - 7.5);  // between two codes
    case 10: return make<T>((wide ? 0x1p-149 : 0x1p-24) * double(col % 5 - 2));
    case 11: return make<T>((wide ? 1e8 : 1e-3) * x);
    default: return make<T>(x);
  }
}

// ---- the checks -----------------------------------------------------------------------------------------------------

// run(source, sink, rows, columns) copies, and returns when it is done.
template <class Code, class S, class T, class Memory, class Run>
void check_append_found(Tally& t, const Run& run) {
  const int64_t tokens = 19, heads = 3;
  for (const int64_t dim : {8, 64, 72, 128, 256, 576}) {
    for (const Cache cache : kCaches) {
      for (const int64_t shift : {0, 1, 2}) {  // sources that are read in packs of any width
        if (t.leaves_out()) continue;
        const int64_t cols = heads * dim;
        RandomMatrix<T, Memory> x(1, tokens, cols, cols + (shift == 0 ? 16 : shift), shift);
        Random random(uint64_t(dim) * 5 + uint64_t(cache));
        for (int64_t i = 0; i < tokens * heads; ++i) {
          for (int64_t c = 0; c < dim; ++c)
            x.set(i / heads, i % heads * dim + c, head_value<T>(int(i % kHeadKinds), c, dim, random));
        }
        x.upload();
        AppendTo<Code, S, Memory> to(cache, tokens, heads, dim, shift % 2);
        const auto codes_before = to.all_codes();
        const auto scales_before = to.all_scales();
        const auto in = k::load(static_cast<const T*>(x.data()), x.ld());
        const k::Status status = to.with_view([&](const auto& view) {
          if (shift == 1)
            return run(in, k::scale(2) | k::append_values(view, to.at(), dim, to.scales.data()), tokens, cols);
          return run(in, k::scale(2) | k::append_keys(view, to.at(), dim, to.scales.data()), tokens, cols);
        });
        const std::string what = "heads of " + std::to_string(dim) + ", cache " + std::to_string(int(cache)) +
                                 ", shift " + std::to_string(shift);
        if (!t.expect(status.ok(), "%s: %s", what.c_str(), status.reason())) continue;
        to.codes.download(), to.scales.download();
        t.expect(to.codes.intact() && to.scales.intact() && x.unchanged(), "%s: wrote outside", what.c_str());
        std::vector<bool> codes_written(size_t(to.units())), scales_written(scales_before.size());
        for (int64_t row = 0; row < tokens; ++row) {
          const int64_t at = to.position(row), owner = to.whose[size_t(row)];
          for (int64_t h = 0; at >= 0 && h < heads; ++h) {
            std::vector<float> v;
            for (int64_t c = 0; c < dim; ++c) v.push_back(float(2 * x.value(row, h * dim + c)));
            const FoundHead<Code, S> want(v);
            const int64_t first = to.code_at(owner, at, h), scale = to.scale_at(owner, at, h);
            const int kind = int((row * heads + h) % kHeadKinds);
            t.expect(same_bits(to.scales.get(0, scale), want.scale), "%s, kind %d: scale %g, want %g", what.c_str(),
                     kind, value_of(to.scales.get(0, scale)), value_of(want.scale));
            scales_written[size_t(scale)] = true;
            for (int64_t c = 0; c < dim; ++c) {
              const double got = to.code(first + c), wanted = want.codes[size_t(c)];
              t.expect(got == wanted || (std::isnan(got) && std::isnan(wanted)),
                       "%s, kind %d, column %d: %g became %g, want %g", what.c_str(), kind, int(c), v[size_t(c)], got,
                       wanted);
              t.expect(want.is_near(got, v[size_t(c)]), "%s, kind %d, column %d: %g became %g of %g", what.c_str(),
                       kind, int(c), v[size_t(c)], got, value_of(want.scale));
              codes_written[size_t((first + c) / to.each)] = true;
            }
            if constexpr (std::is_same<Code, k::Int4>::value) {
              S packed_scale;
              std::vector<uint32_t> packed(size_t(dim / 8));
              const k::Status status = k::pack_int4(v.data(), dim, 1, dim, int(dim), packed.data(), &packed_scale);
              t.expect(status.ok(), "%s: %s", what.c_str(), status.reason());
              const bool finite = std::all_of(v.begin(), v.end(), [](float a) { return std::isfinite(a); });
              for (int64_t i = 0; finite && !want.exceeds && i < dim / 8; ++i)
                t.expect(packed[size_t(i)] == to.codes.get(0, first / 8 + i), "%s, kind %d: not what is packed",
                         what.c_str(), kind);
            }
          }
        }
        for (size_t i = 0; i < codes_before.size(); ++i)
          t.expect(codes_written[i] || same_bits(codes_before[i], to.codes.get(0, int64_t(i))),
                   "%s: unit %d was written", what.c_str(), int(i));
        for (size_t i = 0; i < scales_before.size(); ++i)
          t.expect(scales_written[i] || same_bits(scales_before[i], to.scales.get(0, int64_t(i))),
                   "%s: scale %d was written", what.c_str(), int(i));
      }
    }
  }
}

// Keys that are turned, and of which a plain copy is written, once: the same codes as those of that copy.
template <class Memory, class Run>
void check_append_turned(Tally& t, const Run& run) {
  const int64_t tokens = 9, heads = 2;
  for (const int64_t dim : {64, 72}) {
    const int64_t cols = heads * dim;
    const RandomMatrix<k::half, Memory> x(1, tokens, cols, cols);
    std::vector<float> speeds(size_t(dim / 2));
    k::rope_frequencies(speeds.data(), int(dim), 1e4);
    const Numbers<float, Memory> frequencies(speeds);
    AppendTo<k::Int4, k::half, Memory> once(Cache::paged, tokens, heads, dim, 0),
        twice(Cache::paged, tokens, heads, dim, 0);
    Guarded<float, Memory> copy(tokens, cols, cols + 1), turned(tokens, cols, cols);
    const auto in = k::load(static_cast<const k::half*>(x.data()), cols) |
                    k::rope(once.positions.data(), frequencies.data(), int(dim));
    const auto append = [&](const auto& from, const auto& map, auto& to) {
      return to.with_view([&](const auto& view) {
        return run(from, map | k::append_keys(view, to.at(), dim, to.scales.data()), tokens, cols);
      });
    };
    t.expect(append(in, k::tee(copy.data(), copy.ld()), once).ok() &&
                 run(in, k::store(turned.data(), cols), tokens, cols).ok() &&
                 append(k::load(static_cast<const float*>(copy.data()), copy.ld()), k::scale(1), twice).ok(),
             "heads of %d", int(dim));
    copy.download(), turned.download();
    for (auto* to : {&once, &twice}) to->codes.download(), to->scales.download();
    t.expect(copy.intact() && once.codes.intact() && once.scales.intact(), "wrote outside");
    // In two kernels a turn may be rounded once or twice.
    for (int64_t i = 0; i < tokens * cols; ++i)
      t.expect(std::fabs(copy.get(i / cols, i % cols) - turned.get(i / cols, i % cols)) < 1e-5f,
               "heads of %d: copy %d", int(dim), int(i));
    t.expect(once.codes.bytes() == twice.codes.bytes() && once.scales.bytes() == twice.scales.bytes() &&
                 once.codes.bytes() != Guarded<uint32_t, Memory>(1, once.units(), once.units()).bytes(),
             "heads of %d: other codes", int(dim));
  }
}

// Behind an operation on whole rows: as near to its results as codes can be. norm(source, sink, rows, columns) is
// rmsnorm(), and returns when it is done.
template <class T, class Memory, class Norm>
void check_append_normed(Tally& t, const Norm& norm) {
  const int64_t tokens = 11, heads = 4;
  for (const int64_t dim : {64, 72, 128, 576}) {
    for (const int64_t shift : {0, 1}) {
      const int64_t cols = heads * dim;
      const RandomMatrix<T, Memory> x(1, tokens, cols, cols + 8 * shift, shift);
      AppendTo<k::Int4, k::half, Memory> to(Cache::dense, tokens, heads, dim, 0);
      Guarded<float, Memory> plain(tokens, cols, cols);
      const auto in = k::load(static_cast<const T*>(x.data()), x.ld());
      const k::Status appended = to.with_view([&](const auto& view) {
        return norm(in, k::append_keys(view, to.at(), dim, to.scales.data()), tokens, cols);
      });
      t.expect(appended.ok(), "heads of %d: %s", int(dim), appended.reason());
      t.expect(norm(in, k::store(plain.data(), cols), tokens, cols).ok(), "heads of %d", int(dim));
      plain.download(), to.codes.download(), to.scales.download();
      t.expect(to.codes.intact() && to.scales.intact(), "heads of %d: wrote outside", int(dim));
      for (int64_t row = 0; row < tokens; ++row) {
        const int64_t at = to.position(row), owner = to.whose[size_t(row)];
        for (int64_t h = 0; at >= 0 && h < heads; ++h) {
          const double s = value_of(to.scales.get(0, to.scale_at(owner, at, h)));
          double most = 0;
          for (int64_t c = 0; c < dim; ++c) {
            const double want = plain.get(row, h * dim + c), got = s * to.code(to.code_at(owner, at, h) + c);
            t.expect(std::fabs(got - want) <= std::fabs(s) * (want / s > 7 ? 1.05 : 0.51),
                     "heads of %d, row %d, column %d: %g, want %g", int(dim), int(row), int(c), got, want);
            most = std::fmax(most, std::fabs(want));
          }
          t.expect(std::fabs(std::fabs(s) - most / 8) <= 0x1p-10 * most, "heads of %d: scale %g of %g", int(dim), s,
                   most);
        }
      }
    }
  }
}

}  // namespace test
