// How rows that begin at any element are cut: each column once, packs aligned, and what is read around them within the
// row.
#include <kernels/core/memory.h>
#include <kernels/core/row_ends.h>
#include <kernels/dropout.h>
#include <kernels/functor.h>

#include <algorithm>
#include <vector>

#include "support/guarded.h"
#include "support/tally.h"

namespace k = kernels;
using k::detail::LaneColumns;
using k::detail::RowEnds;
using k::detail::RowPhase;

namespace {

constexpr int kPacks[] = {2, 4, 8};

// 1, 2, 3 ... and fewer of the longer ones.
template <class F>
void for_columns(int64_t most, F f) {
  for (int64_t cols = 1; cols <= most; cols += cols < 200 ? 1 : cols < 2200 ? 7 : 1237) f(int(cols));
}

// The columns that a cluster of blocks goes through, as the row engine's kernels do.
struct Launch {
  int blocks, warps, width, warp_width;
};
Launch shape(int cols, int pack, int blocks, int warps) {
  const auto up = [](int64_t n, int64_t unit) { return int((n + unit - 1) / unit * unit); };
  const int64_t whole = std::max<int64_t>(1, RowEnds::most_packs(cols, pack)) * pack;
  const int width = blocks > 1 ? up(up(cols, blocks) / blocks, 16) : int(whole);
  return {blocks, warps, width, up(up(width, 32 * pack) / (32 * pack), warps) / warps * 32 * pack};
}

}  // namespace

TEST_CASE("row ends: packs are aligned, and what is left is little") {
  test::Tally t;
  for (const int pack : kPacks) {
    for (int phase = 0; phase < pack; ++phase) {
      for_columns(60000, [&](int cols) {
        const RowEnds row(uint32_t(phase) - 8u * 77, pack, cols);
        const int count = (row.end - row.head) / pack;
        t.expect(row.head >= 0 && row.head <= row.end && row.end <= cols && (row.end - row.head) % pack == 0,
                 "%d columns, phase %d: [%d, %d)", cols, phase, row.head, row.end);
        t.expect(row.left() <= 4 * pack - 4 && row.left() == cols - count * pack, "%d columns, phase %d: %d left", cols,
                 phase, row.left());
        t.expect(count <= RowEnds::most_packs(cols, pack), "%d columns, phase %d: %d packs", cols, phase, count);
        if (count > 0) {
          t.expect((phase + row.head) % pack == 0, "%d columns, phase %d: packs begin at %d", cols, phase, row.head);
          t.expect(row.head >= pack - 1 && row.end + pack - 1 <= cols, "%d columns, phase %d: packs of [%d, %d)", cols,
                   phase, row.head, row.end);
        }
        // No pack more would do.
        t.expect(count + 1 >= RowEnds::most_packs(cols, pack), "%d columns, phase %d: only %d packs", cols, phase,
                 count);
      });
    }
  }
  const RowEnds none = RowEnds::none(1234);
  CHECK((none.head == 0 && none.end == 1234 && none.left() == 0));
  CHECK_TALLY(t);
}

TEST_CASE("row ends: every column once, whoever takes it") {
  test::Tally t;
  for (const int pack : kPacks) {
    for (int phase = 0; phase < pack; ++phase) {
      for_columns(21000, [&](int cols) {
        for (const auto& [blocks, warps] : {std::pair<int, int>{1, 1}, {1, 3}, {1, 32}, {2, 2}, {8, 13}}) {
          if (cols > 3000 && blocks * warps == 1) continue;
          const Launch how = shape(cols, pack, blocks, warps);
          const RowEnds row(uint32_t(phase), pack, cols);
          std::vector<unsigned char> seen(size_t(cols), 0);
          int wrong = 0;
          for (int block = 0; block < blocks; ++block) {
            for (int warp = 0; warp < warps; ++warp) {
              for (int lane = 0; lane < 32; ++lane) {
                const LaneColumns mine(block, warp, lane, pack, how.width, how.warp_width, row.head, row.end);
                for (int col = mine.first; col < mine.end; col += 32 * pack) {
                  wrong += (phase + col) % pack != 0 || col < row.head || col + pack > row.end;
                  for (int i = 0; i < pack; ++i) ++seen[size_t(col + i)];
                }
              }
            }
          }
          for (int i = 0; i < row.left(); ++i) ++seen[size_t(row.column(i))];
          for (int col = 0; col < cols; ++col) wrong += seen[size_t(col)] != 1;
          t.expect(wrong == 0, "%d columns, phase %d, packs of %d, %d blocks of %d warps: %d wrong", cols, phase, pack,
                   blocks, warps, wrong);
        }
      });
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("row ends: the phase of a row") {
  for (const uint32_t first : {0u, 3u, 4294967295u}) {
    for (const uint32_t step : {0u, 1u, 7u, 50257u, 4294967293u}) {
      const RowPhase phase{first, step};
      for (const int64_t row : {int64_t(0), int64_t(1), int64_t(1000003), (int64_t(1) << 33) + 5}) {
        const uint64_t want = uint64_t(first) + uint64_t(step) * uint64_t(row);
        CHECK(phase.at(row) % 8 == want % 8);
      }
    }
  }
}

namespace {

// Every address of a row: what is read is what stands there, and what is written stands there and nowhere else.
template <class T, int N>
void anywhere(test::Tally& t) {
  constexpr int64_t cols = 6 * N;
  for (int64_t shift = 0; shift < 32; ++shift) {
    test::Guarded<T> x(1, cols, cols, shift, test::Poison::nan);
    for (int64_t i = 0; i < cols; ++i) x.set(0, i, T(float(i % 50 + 1)));
    x.upload();
    for (int64_t col = N - 1; col + 2 * N - 1 <= cols; ++col) {
      const auto got = k::read_anywhere<N>(x.data() + col).unpack();
      test::Guarded<T> y(1, cols, cols, shift);
      k::write_anywhere(y.data() + col, got);
      y.download();
      const test::Guarded<T> fresh(1, cols, cols, shift);
      for (int64_t i = 0; i < N; ++i) {
        t.expect(float(got.v[i]) == float((col + i) % 50 + 1), "read, %d bytes, N %d, shift %d, column %d",
                 int(sizeof(T)), N, int(shift), int(col + i));
        t.expect(float(y.get(0, col + i)) == float(got.v[i]), "written, %d bytes, N %d, shift %d, column %d",
                 int(sizeof(T)), N, int(shift), int(col + i));
        y.set(0, col + i, fresh.get(0, col + i));
      }
      t.expect(y.bytes() == fresh.bytes(), "written elsewhere, %d bytes, N %d, shift %d, column %d", int(sizeof(T)), N,
               int(shift), int(col));
    }
  }
}

}  // namespace

TEST_CASE("row ends: a placed sink knows whether its packs are whole, and writes them if they are there") {
  alignas(16) float y[64] = {};
  const auto sink = k::detail::any_column(k::store(y, 21));
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t col = 0; col < 8; ++col) {
      const auto here = sink.placed<4>(r, col);
      REQUIRE(here.is_whole() == ((r * 21 + col) % 4 == 0));
      if (!here.is_whole()) continue;
      for (const bool there : {false, true}) {
        k::detail::put_if(there, here.whole(), k::Pack<float, 4>{{1, 2, 3, 4}}, r, col);
        for (int i = 0; i < 4; ++i) CHECK(y[r * 21 + col + i] == (there ? float(i + 1) : 0.f));
      }
      std::fill(y, y + 64, 0.f);
    }
  }
}

TEST_CASE("row ends: packs at any address") {
  test::Tally t;
  anywhere<int8_t, 1>(t), anywhere<int8_t, 2>(t), anywhere<int8_t, 4>(t), anywhere<int8_t, 8>(t);
  anywhere<int16_t, 2>(t), anywhere<int16_t, 4>(t), anywhere<int16_t, 8>(t);
  anywhere<float, 2>(t), anywhere<float, 4>(t), anywhere<float, 8>(t);
  anywhere<double, 2>(t), anywhere<double, 4>(t);
  CHECK_TALLY(t);
}

namespace {

struct Plain : k::Functor {
  template <class C, int N>
  k::Pack<C, N> map(const k::Pack<C, N>& v, int64_t, int64_t) const { return v; }
};
struct Derived : k::DirectLoad<float> {
  using k::DirectLoad<float>::DirectLoad;
};
template <class F>
constexpr bool any(const F&) { return k::detail::takes_any_column<F>(); }
template <class F>
constexpr bool leads(const F&) { return k::detail::leads<F>(); }

}  // namespace

TEST_CASE("row ends: which functors take packs at any column") {
  const float* x = nullptr;
  float* y = nullptr;
  CHECK(any(k::load(x, 5)));
  CHECK(any(k::load(x, 5) | k::scale(2) | k::add(x) | k::add(k::load(x, 5)) | k::tee(y, 5)));
  CHECK(any(k::load(x, 5) | k::mask(k::cycle(k::load(x, 5), 3)) | k::causal(2, 5)));
  CHECK(any(k::affine(k::one_plus(x), x) | k::gelu() | k::store(y, 5)));
  CHECK(any(k::both(k::store(y, 5), k::scale(2) | k::store(y, 5))));
  CHECK(any(k::load(x, 5) | k::dropout(0.1, 1, 2, 5) | k::dropout(0.1, k::load(x, 5))));
  CHECK(any(k::mul(k::per_row(x)) | k::quantize(static_cast<int8_t*>(nullptr), 5, y)));
  // What the library does not know stays as it is.
  CHECK(!any(Plain{}));
  CHECK(!any(Derived(x, 5)));
  CHECK(!any(k::load(x, 5) | Plain{}));
  CHECK(!any(k::load(x, 5) | k::add(Derived(x, 5))));
  CHECK(!any(k::add(x) | Plain{} | k::store(y, 5)));
  CHECK(!any(k::both(k::store(y, 5), Plain{} | k::store(y, 5))));

  CHECK(leads(k::load(x, 5) | k::scale(2) | k::add(x)));
  CHECK(!leads(k::row(x) | k::add(k::load(x, 5))));
  CHECK(!leads(k::cycle(k::load(x, 5), 3) | k::scale(2)));
}

// A whole row, packs and what is left, through the functors that the GPU's kernels get.
TEST_CASE("row ends: functors at any column give what they give elsewhere") {
  test::Tally t;
  constexpr int N = 4;
  for (const int64_t cols : {1, 9, 14, 15, 16, 40, 101}) {
    for (int shift = 0; shift < 8; ++shift) {
      const bool placed = shift >= 4;
      for (const int64_t gap : {0, 1, 3}) {
        const int64_t rows = 5, ld = cols + gap;
        test::Guarded<float> x(rows, cols, ld, shift, test::Poison::nan), bias(1, cols, cols, 1, test::Poison::nan),
            res(rows, cols, cols + 2, 3, test::Poison::nan);
        test::Guarded<float> kept(rows, cols, ld, 2), y(rows, cols, ld, shift + 1);
        const auto value = [](int64_t row, int64_t col) { return float(row * 1000 + col); };
        for (int64_t c = 0; c < cols; ++c) {
          bias.set(0, c, float(c % 7));
          for (int64_t r = 0; r < rows; ++r) x.set(r, c, value(r, c)), res.set(r, c, float(c % 3));
        }
        x.upload(), bias.upload(), res.upload();
        const auto drop = k::dropout(0.3, 11, 5, ld) | k::dropout(0.5, k::load(res.data(), res.ld()));
        const auto whole_source = k::detail::leading(k::load(x.data(), ld) | k::add(bias.data()) |
                                                     (k::add(k::load(res.data(), res.ld())) | k::tee(kept.data(), ld)));
        const auto whole_sink =
            k::detail::any_column(k::affine(k::one_plus(bias.data())) |
                                  k::both(k::scale(1) | k::store(y.data(), ld), k::store(y.data(), ld)));
        for (int64_t r = 0; r < rows; ++r) {
          const RowEnds row(uint32_t(reinterpret_cast<uintptr_t>(x.data()) / 4 + uint64_t(ld) * uint64_t(r)), N,
                            int(cols));
          const auto source = placed ? k::detail::placed<N>(whole_source, r, row.head) : whole_source;
          const auto sink = placed ? k::detail::placed<N>(whole_sink, r, row.head) : whole_sink;
          const auto again = k::detail::second_pass(source);
          const auto visit = [&](auto width, int64_t col) {
            constexpr int n = decltype(width)::value;
            const auto v = k::detail::resolve(source, k::detail::fetch<n>(source, r, col), r, col);
            const auto w = k::detail::resolve(again, k::detail::fetch<n>(again, r, col), r, col);
            const auto map = k::detail::sink_map(sink);
            k::detail::put(k::detail::sink_end(sink),
                           k::detail::apply_map(map, w, k::detail::fetch_operands<n>(map, r, col), r, col), r, col);
            const auto any_drop = k::detail::any_column(drop);
            const auto dropped =
                k::detail::apply_map(any_drop, v, k::detail::fetch_operands<n>(any_drop, r, col), r, col);
            for (int i = 0; i < n; ++i) {
              const k::Pack<float, 1> one{{v.v[i]}};
              const auto want =
                  k::detail::apply_map(drop, one, k::detail::fetch_operands<1>(drop, r, col + i), r, col + i);
              t.expect(dropped.v[i] == want.v[0], "%d columns: dropout gives %g, not %g", int(cols),
                       double(dropped.v[i]), double(want.v[0]));
            }
            for (int i = 0; i < n; ++i)
              t.expect(v.v[i] == w.v[i], "%d columns: the second look gives %g, not %g", int(cols), double(w.v[i]),
                       double(v.v[i]));
          };
          for (int col = row.head; col < row.end; col += N) visit(std::integral_constant<int, N>(), col);
          for (int i = 0; i < row.left(); ++i) visit(std::integral_constant<int, 1>(), row.column(i));
        }
        y.download(), kept.download();
        t.expect(y.intact() && kept.intact(), "%d columns, shift %d, gap %d: wrote outside its rows", int(cols), shift,
                 int(gap));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            const float sum = value(r, c) + float(c % 7) + float(c % 3);
            t.expect(kept.get(r, c) == sum && y.get(r, c) == sum * float(c % 7 + 1),
                     "%d columns, shift %d, gap %d: (%d, %d)", int(cols), shift, int(gap), int(r), int(c));
          }
        }
      }
    }
  }
  CHECK_TALLY(t);
}
