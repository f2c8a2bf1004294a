// Routing on the CPU: choices and weights against double, the order of rows, and a layer of experts.
#include <kernels/cpu/elementwise.h>
#include <kernels/cpu/matmul.h>
#include <kernels/cpu/router.h>

#include "support/router.h"
#include "support/threads.h"

using namespace test;

TEST_CASE("which experts, and their weights") {
  Tally t;
  for (const int threads : {1, 3}) {
    check_routings<HostMemory>(t, [&](const auto& logits, int32_t* ids, float* weights, const k::RouterShape& shape,
                                      const k::Router& options) {
      return k::cpu::route(on_threads(threads), logits, ids, weights, shape, options);
    });
  }
  CHECK_TALLY(t);
}

TEST_CASE("rows in the order of their experts") {
  Tally t;
  check_sortings<HostMemory>(t, [](const int32_t* ids, const k::ExpertOrder& to, const k::RouterShape& shape) {
    return k::cpu::sort_by_expert(k::cpu::Exec{1}, ids, to, shape);
  });
  CHECK_TALLY(t);
}

namespace {

struct Calls {
  template <class Logits>
  k::Status route(const Logits& logits, int32_t* ids, float* weights, const k::RouterShape& shape,
                  const k::Router& options) const {
    return k::cpu::route(on_threads(2), logits, ids, weights, shape, options);
  }
  k::Status sort(const int32_t* ids, const k::ExpertOrder& to, const k::RouterShape& shape) const {
    return k::cpu::sort_by_expert(on_threads(2), ids, to, shape);
  }
  template <class X, class W, class Out>
  k::Status matmul(const X& x, const W& w, const Out& out, const k::MatmulShape& shape, const k::Groups& groups) const {
    return k::cpu::matmul(on_threads(2), x, w, out, shape, groups);
  }
  template <class In, class Out>
  k::Status copy(const In& in, const Out& out, int64_t rows, int64_t cols) const {
    return k::cpu::copy(on_threads(2), in, out, rows, cols);
  }
};

}  // namespace

TEST_CASE("a layer of experts") {
  Tally t;
  for (const Routing& c : layers()) check_layer<float, HostMemory>(t, c, 24, 40, Calls{});
  check_layer<k::half, HostMemory>(t, layers()[0], 33, 19, Calls{});
  CHECK_TALLY(t);
}

TEST_CASE("a few tokens need no sorting, and choices of nobody count nothing") {
  const int64_t tokens = 3, top_k = 2, cols = 16, experts = 4;
  Tally t;
  for (const int64_t hidden : {24, 5, 10, 17, 33}) {
    const RandomMatrix<float> x(1, tokens, cols, cols), w(2, experts * hidden, cols, cols),
        v(3, experts * cols, hidden, hidden);
    const int32_t ids[] = {1, -1, 3, 0, -1, -1};
    const float weights[] = {0.5f, 0.25f, 2.f, 1.f, NAN, 1.f};
    std::vector<float> h(size_t(tokens * top_k * hidden)), y(size_t(tokens * cols));
    CHECK(k::cpu::matmul(k::cpu::Exec{1}, k::repeated(k::load(static_cast<const float*>(x.data()), cols), top_k),
                         k::experts(k::load(static_cast<const float*>(w.data()), cols), ids, hidden, experts),
                         k::store(h.data(), hidden), {tokens * top_k, hidden, cols}));
    CHECK(k::cpu::matmul(
        k::cpu::Exec{1}, k::load(static_cast<const float*>(h.data()), top_k * hidden),
        k::mixed(k::load(static_cast<const float*>(v.data()), hidden), ids, weights, int(top_k), cols, hidden, experts),
        k::store(y.data(), cols), {tokens, cols, top_k * hidden}));
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t n = 0; n < cols; ++n) {
        double want = 0, size = 0;
        for (int64_t j = m * top_k; j < (m + 1) * top_k; ++j) {
          for (int64_t f = 0; f < hidden && ids[j] >= 0; ++f) {
            double inner = 0, inner_size = 0;
            for (int64_t i = 0; i < cols; ++i)
              inner += x.value(m, i) * w.value(ids[j] * hidden + f, i),
                  inner_size += std::fabs(x.value(m, i) * w.value(ids[j] * hidden + f, i));
            want += weights[j] * inner * v.value(ids[j] * cols + n, f),
                size += std::fabs(weights[j] * inner_size * v.value(ids[j] * cols + n, f));
          }
        }
        t.expect(std::fabs(y[size_t(m * cols + n)] - want) <= 1e-5 * size,
                 "%d of each expert, token %d, column %d: %g, want %g", int(hidden), int(m), int(n),
                 double(y[size_t(m * cols + n)]), want);
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("groups of tokens") {
  const int64_t n = 40, cols = 72;
  Tally t;
  for (const std::vector<int32_t>& offsets :
       {std::vector<int32_t>{0, 5, 5, 60, 61, 90}, std::vector<int32_t>{0, 0, 0}, std::vector<int32_t>()}) {
    const bool ragged = !offsets.empty();
    const int64_t groups = ragged ? int64_t(offsets.size()) - 1 : 3, each = 7,
                  used = ragged ? offsets.back() : groups * each, rows = used + 3;
    const RandomMatrix<float> x(1, rows, cols, cols), w(2, groups * n, cols, cols + 1), gamma(3, 1, cols, cols);
    Guarded<float> y(rows, n, n + 1), before(rows, n, n + 1), rstd(rows, 1, 1);
    const k::Status status =
        k::cpu::matmul(on_threads(2),
                       k::normed(k::load(static_cast<const float*>(x.data()), cols), k::RmsNorm{}.rstd(rstd.data())) |
                           k::mul(static_cast<const float*>(gamma.data())),
                       k::load(static_cast<const float*>(w.data()), cols + 1), k::store(y.data(), y.ld()),
                       {ragged ? rows : each, n, cols}, k::Groups{groups, ragged ? offsets.data() : nullptr});
    t.expect(status.ok(), "%s", status.reason());
    y.download();
    rstd.download();
    t.expect(y.intact() && rstd.intact(), "wrote outside");
    for (int64_t m = 0; m < rows; ++m) {
      int64_t g = 0;
      if (ragged) while (g < groups && m >= offsets[size_t(g + 1)]) ++g;
      else g = m / each;
      double squares = 0;
      for (int64_t i = 0; i < cols; ++i) squares += x.value(m, i) * x.value(m, i);
      const double scale = 1 / std::sqrt(squares / double(cols) + 1e-5);
      if (m < used) t.expect(std::fabs(rstd.get(m, 0) - scale) <= 1e-5 * scale, "rstd of row %d", int(m));
      for (int64_t i = 0; i < n; ++i) {
        if (m >= used) {
          t.expect(
              y.get(m, i) == before.get(m, i) || (y.get(m, i) != y.get(m, i) && before.get(m, i) != before.get(m, i)),
              "row %d belongs to no group, and was written", int(m));
          continue;
        }
        double sum = 0, size = 0;
        for (int64_t c = 0; c < cols; ++c) {
          const double part = x.value(m, c) * scale * gamma.value(0, c) * w.value(g * n + i, c);
          sum += part, size += std::fabs(part);
        }
        t.expect(std::fabs(y.get(m, i) - sum) <= 1e-5 * size, "row %d, column %d: %g, want %g", int(m), int(i),
                 double(y.get(m, i)), sum);
      }
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("offsets of groups that fall, or reach beyond the rows, are refused") {
  const int64_t rows = 5, n = 8, cols = 16;
  const RandomMatrix<float> x(1, rows, cols, cols), w(2, 3 * n, cols, cols);
  Guarded<float> y(rows, n, n);
  const auto call = [&](const std::vector<int32_t>& offsets) {
    return k::cpu::matmul(k::cpu::Exec{1}, k::load(static_cast<const float*>(x.data()), cols),
                          k::load(static_cast<const float*>(w.data()), cols), k::store(y.data(), y.ld()),
                          {rows, n, cols}, k::Groups{3, offsets.data()});
  };
  CHECK(call({0, 2, 2, 5}));
  CHECK(std::string(call({0, 1, 2, 9}).reason()) == "matmul: the last offset of groups exceeds M");
  for (const std::vector<int32_t>& offsets : {std::vector<int32_t>{0, 5, 3, 4}, {-1, 2, 3, 4}})
    CHECK(std::string(call(offsets).reason()) == "matmul: the offsets of groups are negative or fall");
}

TEST_CASE("what routing refuses, and why") {
  std::vector<float> memory(4096);
  std::vector<int32_t> numbers(4096);
  float* const p = memory.data();
  int32_t* const i = numbers.data();
  const auto reason = [&](const k::RouterShape& shape, const k::Router& options) {
    const k::Status status =
        k::cpu::route(k::cpu::Exec{1}, k::load(static_cast<const float*>(p), 64), i, p + 2048, shape, options);
    return std::string(status.reason());
  };
  CHECK(reason({2, 8, 2}, {}) == "ok");
  CHECK(reason({0, 8, 2}, {}) == "ok");
  CHECK(reason({-1, 8, 2}, {}) == "route: tokens is negative");
  CHECK(reason({2, 8, 0}, {}) == "route: top_k is less than 1");
  CHECK(reason({2, 0, 1}, {}) == "route: experts is less than 1");
  CHECK(reason({2, 513, 1}, {}) == "route: experts exceeds 512");
  CHECK(reason({2, 64, 33}, {}) == "route: top_k exceeds 32");
  CHECK(reason({2, 8, 9}, {}) == "route: top_k exceeds experts");
  CHECK(reason({2, 8, 2}, k::Router{}.groups(3, 1)) ==
        "route: groups: their number does not divide that of the experts");
  CHECK(reason({2, 8, 2}, k::Router{}.groups(4, 5)) == "route: groups: kept exceeds count");
  CHECK(reason({2, 8, 2}, k::Router{}.groups(0, 0)) == "route: groups: count is less than 1");
  CHECK(reason({2, 8, 2}, k::Router{}.groups(4, 0)) == "route: groups: kept is less than 1");
  CHECK(reason({2, 64, 2}, k::Router{}.groups(64, 3)) == "route: groups: count exceeds 32");
  CHECK(reason({2, 8, 3}, k::Router{}.groups(4, 1)) ==
        "route: top_k exceeds the number of experts in the groups that are kept");
  CHECK(reason({2, 8, 2}, k::Router{}.groups(8, 2, k::GroupScore::two_largest)) ==
        "route: groups: one expert alone has no two best");
  CHECK(reason({2, 8, 2}, k::Router{}.scale(INFINITY)) == "route: scale: the factor is not finite");
  CHECK(reason({2, 8, 2}, k::Router{}.bias(nullptr)) == "route: bias: the pointer is null");
  CHECK(reason({2, 8, 2}, k::Router{}.local(4, 5)) ==
        "route: local: not all of these experts are among those of the call");
  CHECK(std::string(
            k::cpu::route(k::cpu::Exec{1}, k::load(static_cast<const float*>(nullptr), 8), i, p, {2, 8, 2}).reason()) ==
        "route: logits: load: the pointer is null");
  CHECK(std::string(
            k::cpu::route(k::cpu::Exec{1}, k::load(static_cast<const float*>(p), 8), nullptr, p, {2, 8, 2}).reason()) ==
        "route: ids: the pointer is null");
  CHECK(std::string(
            k::cpu::route(k::cpu::Exec{1}, k::load(static_cast<const float*>(p), 8), i, nullptr, {2, 8, 2}).reason()) ==
        "route: weights: the pointer is null");

  const auto sort = [&](const int32_t* ids, const k::ExpertOrder& to, const k::RouterShape& shape) {
    return std::string(k::cpu::sort_by_expert(k::cpu::Exec{1}, ids, to, shape).reason());
  };
  const k::ExpertOrder to{i + 100, i + 300, i + 500};
  CHECK(sort(i, to, {2, 8, 2}) == "ok");
  CHECK(sort(nullptr, to, {2, 8, 2}) == "sort_by_expert: ids: the pointer is null");
  CHECK(sort(i, {nullptr, to.order, to.places}, {2, 8, 2}) == "sort_by_expert: offsets: the pointer is null");
  CHECK(sort(i, {to.offsets, nullptr, to.places}, {2, 8, 2}) == "sort_by_expert: order: the pointer is null");
  CHECK(sort(i, {to.offsets, to.order, nullptr}, {2, 8, 2}) == "sort_by_expert: places: the pointer is null");
  CHECK(sort(i, to, {2, 513, 2}) == "sort_by_expert: experts exceeds 512");
  CHECK(sort(i, to, {2, 0, 2}) == "sort_by_expert: experts is less than 1");
  CHECK(sort(i, to, {int64_t(1) << 30, 8, 2}) == "sort_by_expert: there are more than 2^31 - 1 choices");

  const auto off = [](auto* pointer) {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<uintptr_t>(pointer) + 1);
  };
  CHECK(reason({int64_t(1) << 60, 8, 2}, {}) == "route: tokens x top_k exceeds 64 bits");
  CHECK(reason({2, 8, 2}, k::Router{}.bias(off(p))) == "route: bias: the pointer is not aligned for floats");
  CHECK(sort(i, to, {-1, 8, 2}) == "sort_by_expert: tokens is negative");
  CHECK(sort(i, to, {2, 8, 0}) == "sort_by_expert: top_k is less than 1");
  CHECK(sort(off(i), to, {2, 8, 2}).find("sort_by_expert: ids: the pointer is not aligned") == 0);
  CHECK(sort(i, {to.offsets, to.order, off(to.places)}, {2, 8, 2})
            .find("sort_by_expert: places: the pointer is not aligned") == 0);

  const auto copy = [&](const auto& in, int64_t rows = 2) {
    return std::string(k::cpu::copy(k::cpu::Exec{1}, in, k::store(p + 2048, 8), rows, 8).reason());
  };
  const auto source = k::load(static_cast<const float*>(p), 8);
  CHECK(copy(k::combined(source, i, p, 2)) == "ok");
  CHECK(copy(k::combined(source, nullptr, p, 2)) == "copy: in: combined: the pointer to the places is null");
  CHECK(copy(k::combined(source, i, nullptr, 2)) == "copy: in: combined: the pointer to the weights is null");
  CHECK(copy(k::combined(source, i, p, 0)) == "copy: in: combined: top_k is less than 1");
  CHECK(copy(k::combined(source, off(i), p, 2)).find("copy: in: combined: the pointer to the places is not aligned") ==
        0);
  CHECK(copy(k::combined(source, i, p, int64_t(1) << 30), 3) ==
        "copy: in: combined: there are more than 2^31 - 1 choices");
  CHECK(copy(k::gathered(source, i, 2)) == "ok");
  CHECK(copy(k::gathered(source, nullptr, 2)) == "copy: in: gathered: the pointer to the order is null");
  CHECK(copy(k::gathered(source, i, 0)) == "copy: in: gathered: top_k is less than 1");
}
