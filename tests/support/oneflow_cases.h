// Calls as they are written for OneFlow, with functors of every form (oneflow.h), each checked against the oracle. A
// Machine is where they run: its memory, its doors and OneFlow's direct functors.
#pragma once

#include <string>

#include "catch.h"
#include "guarded.h"
#include "oneflow.h"
#include "oracle.h"
#include "random.h"

namespace test {
namespace flow {

// Numbers that all types hold, and of which sums of three are exact in all.
inline double number(Random& random) { return double(random.below(65) - 32) / 8; }

template <class Machine, class T>
class Matrix : public Guarded<T, typename Machine::Memory> {
 public:
  using Base = Guarded<T, typename Machine::Memory>;
  // Of random numbers, or of what is there when something else is written.
  Matrix(uint64_t seed, int64_t rows, int64_t cols, int64_t ld = 0) : Base(rows, cols, ld > 0 ? ld : cols) {
    Random random(seed);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c)
        this->set(r, c, make<T>(dtype_of<T>::value == DType::boolean ? double(random.below(4) != 0) : number(random)));
    }
    this->upload();
  }
  double value(int64_t row, int64_t col) const { return value_of(this->get(row, col)); }
  // "" if rows are as want(row) says.
  template <class Want>
  std::string compare(Want want) {
    this->download();
    if (!this->intact()) return "wrote outside its rows";
    for (int64_t r = 0; r < this->rows(); ++r) {
      const std::string problem = mismatch(r, want(r), [&](int64_t c) { return this->get(r, c); });
      if (!problem.empty()) return problem;
    }
    return "";
  }
};

template <class C, class F>
Row<C> row_of(int64_t cols, F value) {
  Row<C> row(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) row[size_t(c)] = value(c);
  return row;
}

struct Size {
  int64_t rows, cols, ld;
};
// Odd and even, short and long, with gaps behind the rows that allow pairs and no more.
constexpr Size kSizes[] = {{7, 1, 1},       {7, 3, 3},       {13, 48, 50},    {13, 64, 66},
                           {5, 127, 129},   {9, 128, 128},   {3, 257, 257},   {7, 1000, 1002},
                           {3, 1023, 1023}, {2, 1026, 1026}, {3, 4098, 4098}, {2, 5001, 5001},
                           {3, 5120, 5122}, {1, 8190, 8190}, {2, 8192, 8192}, {1, 12291, 12291}};

// Scale and mask before softmax; dropout, and adding to what is there, behind it.
template <class T, class Machine>
void scale_mask_dropout(Machine& machine) {
  using C = k::compute_t<T>;
  for (const Size& size : kSizes) {
    INFO(size.rows << " x " << size.cols << ", " << size.ld << " apart, " << name(dtype_of<T>::value));
    const Matrix<Machine, T> x(1, size.rows, size.cols, size.ld);
    const Matrix<Machine, bool> mask(2, size.rows, size.cols, size.ld), keep(3, size.rows, size.cols, size.ld);
    Matrix<Machine, T> y(4, size.rows, size.cols, size.ld), sum(5, size.rows, size.cols, size.ld);
    const Matrix<Machine, T> before(5, size.rows, size.cols, size.ld);
    ScaleMaskLoad<T, C> load(x.data(), mask.data(), size.ld, C(-10000), C(0.375));
    DropoutAddStore<C, T> store(sum.data(), y.data(), keep.data(), size.ld, C(1.25));
    REQUIRE(machine.template softmax<C>(load, store, size.rows, size.cols));
    const auto want = [&](int64_t r) {
      auto row = row_of<C>(size.cols, [&](int64_t c) {
        return mask.get(r, c) ? (Real<C>(x.value(r, c)) * constant<C>(0.375)) : Real<C>(-10000.0);
      });
      softmax(row);
      return row;
    };
    CHECK(y.compare(want) == "");
    CHECK(sum.compare([&](int64_t r) {
      auto row = want(r);
      for (int64_t c = 0; c < size.cols; ++c) {
        const Real<C> dropped = keep.get(r, c) ? row[size_t(c)] * constant<C>(1.25) : Real<C>(0.0);
        row[size_t(c)] = Real<C>(before.value(r, c)) + dropped;
      }
      return row;
    }) == "");
  }
}

// Bias of the head and the batch's mask, found with an index helper, before softmax.
template <class T, class Machine>
void bias_mask_broadcast(Machine& machine) {
  using C = k::compute_t<T>;
  const int64_t batch = 2, heads = 3, queries = 2, rows = batch * heads * queries;
  for (const Size& size : kSizes) {
    INFO(size.cols << " cols, " << size.ld << " apart, " << name(dtype_of<T>::value));
    const Matrix<Machine, T> x(11, rows, size.cols, size.ld), bias(12, heads, size.cols, size.ld);
    const Matrix<Machine, bool> mask(13, batch * queries, size.cols, size.ld);
    Matrix<Machine, T> y(14, rows, size.cols, size.ld);
    BroadcastBiasMaskLoad<T, C> load(x.data(), bias.data(), mask.data(), size.ld,
                                     RowHelper(int32_t(heads), int32_t(queries)), C(-10000), C(0.5));
    typename Machine::template DirectStore<C, T> store(y.data(), size.ld);
    REQUIRE(machine.template softmax<C>(load, store, rows, size.cols));
    CHECK(y.compare([&](int64_t r) {
      const int64_t head = r / queries % heads, mask_row = r / (heads * queries) * queries + r % queries;
      auto row = row_of<C>(size.cols, [&](int64_t c) {
        return mask.get(mask_row, c) ? (Real<C>(x.value(r, c)) + Real<C>(bias.value(head, c))) * Real<C>(0.5)
                                     : Real<C>(-10000.0);
      });
      softmax(row);
      return row;
    }) == "");
  }
}

template <class T, class Machine>
void tril(Machine& machine) {
  using C = k::compute_t<T>;
  const int64_t queries = 3;
  for (const Size& size : kSizes) {
    INFO(size.rows << " x " << size.cols << ", " << size.ld << " apart, " << name(dtype_of<T>::value));
    const int64_t diagonal = size.cols / 2;
    const Matrix<Machine, T> x(21, size.rows, size.cols, size.ld);
    Matrix<Machine, T> y(22, size.rows, size.cols, size.ld);
    TrilLoad<T, C> load(x.data(), queries, size.ld, diagonal, C(-100));
    typename Machine::template DirectStore<C, T> store(y.data(), size.ld);
    REQUIRE(machine.template log_softmax<C>(load, store, size.rows, size.cols));
    CHECK(y.compare([&](int64_t r) {
      auto row = row_of<C>(size.cols,
                           [&](int64_t c) { return Real<C>(c <= r % queries + diagonal ? x.value(r, c) : -100.0); });
      log_softmax(row);
      return row;
    }) == "");
  }
}

// bias + residual + LayerNorm, where the load replaces the residual.
template <class T, class Machine>
void skip_in_place(Machine& machine, int64_t most_cols) {
  using C = k::compute_t<T>;
  for (const Size& size : kSizes) {
    if (size.cols > most_cols) continue;
    INFO(size.rows << " x " << size.cols << ", " << size.ld << " apart, " << name(dtype_of<T>::value));
    const Matrix<Machine, T> x(31, size.rows, size.cols, size.ld), bias(32, 1, size.cols), gamma(33, 1, size.cols),
        beta(34, 1, size.cols);
    Matrix<Machine, T> residual(35, size.rows, size.cols, size.ld), y(36, size.rows, size.cols, size.ld);
    const Matrix<Machine, T> before(35, size.rows, size.cols, size.ld);
    Matrix<Machine, C> mean(37, size.rows, 1), inverse(38, size.rows, 1);
    SkipInPlaceLoad<T, T> load(x.data(), bias.data(), residual.data(), size.ld);
    AffineStore<C, T> store(y.data(), size.ld, gamma.data(), beta.data());
    REQUIRE(machine.template layernorm<C>(load, store, size.rows, size.cols, 1e-3, mean.data(), inverse.data()));
    const auto sum = [&](int64_t r) {
      return row_of<C>(size.cols,
                       [&](int64_t c) { return Real<C>(x.value(r, c) + bias.value(0, c) + before.value(r, c)); });
    };
    CHECK(residual.compare(sum) == "");
    CHECK(y.compare([&](int64_t r) {
      auto row = sum(r);
      layernorm(row, 1e-3);
      for (int64_t c = 0; c < size.cols; ++c)
        row[size_t(c)] = row[size_t(c)] * Real<C>(gamma.value(0, c)) + Real<C>(beta.value(0, c));
      return row;
    }) == "");
    CHECK(mean.compare([&](int64_t r) {
      auto row = sum(r);
      return Row<C>{layernorm(row, 1e-3).mean};
    }) == "");
    CHECK(inverse.compare([&](int64_t r) {
      auto row = sum(r);
      return Row<C>{layernorm(row, 1e-3).rstd};
    }) == "");
  }
}

struct Groups {
  int64_t channels, groups, spatial;
};
// Groups of 1 to 40 channels; numbers of elements in a channel that fours, pairs or nothing divides, where rows are
// always divided.
constexpr Groups kGroups[] = {{8, 2, 1},   {8, 2, 3},   {4, 2, 6},   {16, 4, 49},  {12, 3, 50},    {12, 3, 64},
                              {320, 32, 10}, {64, 16, 9}, {36, 6, 196}, {160, 4, 66}, {96, 2, 101}, {320, 32, 1024}};

// Group norm: a row is a group of channels.
template <class T, class Machine>
void group_norm_first(Machine& machine) {
  using C = k::compute_t<T>;
  for (const Groups& g : kGroups) {
    const int64_t batch = 2, rows = batch * g.groups, cols = g.channels / g.groups * g.spatial;
    INFO(g.channels << " channels, " << g.groups << " groups of " << cols << ", " << g.spatial << " each, "
                    << name(dtype_of<T>::value));
    const Matrix<Machine, T> x(41, rows, cols), gamma(42, 1, g.channels), beta(43, 1, g.channels);
    Matrix<Machine, T> y(44, rows, cols);
    Matrix<Machine, C> mean(45, rows, 1), inverse(46, rows, 1);
    typename Machine::template DirectLoad<T, T> load(x.data(), cols);
    ChannelsFirstStore<C, T> store(y.data(), cols, g.channels, g.spatial, gamma.data(), beta.data());
    REQUIRE(machine.template layernorm<C>(load, store, rows, cols, 1e-3, mean.data(), inverse.data()));
    CHECK(y.compare([&](int64_t r) {
      auto row = row_of<C>(cols, [&](int64_t c) { return Real<C>(x.value(r, c)); });
      layernorm(row, 1e-3);
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t channel = r % g.groups * (g.channels / g.groups) + c / g.spatial;
        row[size_t(c)] = row[size_t(c)] * Real<C>(gamma.value(0, channel)) + Real<C>(beta.value(0, channel));
      }
      return row;
    }) == "");
  }
}
template <class T, class Machine>
void group_norm_last(Machine& machine) {
  using C = k::compute_t<T>;
  for (const Groups& g : kGroups) {
    const int64_t batch = 2, each = g.channels / g.groups, rows = batch * g.groups, cols = each * g.spatial;
    INFO(g.channels << " channels, " << g.groups << " groups of " << cols << ", " << g.spatial << " each, "
                    << name(dtype_of<T>::value));
    const Matrix<Machine, T> x(51, batch * g.spatial, g.channels), gamma(52, 1, g.channels), beta(53, 1, g.channels);
    Matrix<Machine, T> y(54, batch * g.spatial, g.channels);
    Matrix<Machine, C> mean(55, rows, 1), inverse(56, rows, 1);
    ChannelsLastLoad<T, T> load(x.data(), g.spatial, g.channels, g.groups);
    ChannelsLastStore<C, T> store(y.data(), gamma.data(), beta.data(), g.spatial, g.channels, g.groups);
    REQUIRE(machine.template layernorm<C>(load, store, rows, cols, 1e-3, mean.data(), inverse.data()));
    std::vector<Row<C>> want(static_cast<size_t>(batch * g.spatial), Row<C>(static_cast<size_t>(g.channels)));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = r / g.groups * g.spatial, channel = r % g.groups * each;
      auto row = row_of<C>(cols, [&](int64_t c) { return Real<C>(x.value(first + c / each, channel + c % each)); });
      layernorm(row, 1e-3);
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t at = channel + c % each;
        want[size_t(first + c / each)][size_t(at)] =
            row[size_t(c)] * Real<C>(gamma.value(0, at)) + Real<C>(beta.value(0, at));
      }
    }
    CHECK(y.compare([&](int64_t r) -> const Row<C>& { return want[size_t(r)]; }) == "");
  }
}

// RMSNorm to int8.
template <class T, class Machine>
void quantizing_store(Machine& machine) {
  using C = k::compute_t<T>;
  for (const Size& size : kSizes) {
    INFO(size.rows << " x " << size.cols << ", " << size.ld << " apart, " << name(dtype_of<T>::value));
    const Matrix<Machine, T> x(61, size.rows, size.cols, size.ld);
    Matrix<Machine, int8_t> y(62, size.rows, size.cols, size.ld);
    Matrix<Machine, C> inverse(63, size.rows, 1);
    typename Machine::template DirectLoad<T, C> load(x.data(), size.ld);
    QuantStore<C> store(y.data(), size.ld, 50.f);
    REQUIRE(machine.template rmsnorm<C>(load, store, size.rows, size.cols, 1e-3, inverse.data()));
    CHECK(y.compare([&](int64_t r) {
      auto row = row_of<C>(size.cols, [&](int64_t c) { return Real<C>(x.value(r, c)); });
      rmsnorm(row, 1e-3);
      for (Real<C>& a : row) a = Real<C>(a.v * 50, a.e * 50 + 64 * unit<float> * std::fabs(a.v));
      return row;
    }) == "");
  }
}

}  // namespace flow
}  // namespace test
