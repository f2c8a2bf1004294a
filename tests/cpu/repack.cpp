// 4-bit matrices of checkpoints, written here as their formats say, come out with every code, zero and scale in its
// place.
#include <kernels/cpu/matmul.h>
#include <kernels/repack.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/tally.h"

namespace k = kernels;

namespace {

struct Plain {
  int64_t rows, cols;
  int group;
  std::vector<uint32_t> codes, zeros;  // [rows, cols], [rows, groups]
  std::vector<k::half> scales;
  int64_t groups() const { return cols / group; }

  Plain(int64_t n, int64_t c, int g) : rows(n), cols(c), group(g) {
    std::mt19937 random(unsigned(n * 31 + c * 7 + g));
    for (int64_t i = 0; i < rows * cols; ++i) codes.push_back(random() % 16);
    for (int64_t i = 0; i < rows * groups(); ++i) {
      zeros.push_back(random() % 16);
      scales.push_back(k::convert<k::half>(float(random() % 1000 + 1) / 4096.f));
    }
  }
  double weight(int64_t row, int64_t col) const {
    const size_t g = size_t(row * groups() + col / group);
    return (double(codes[size_t(row * cols + col)]) - double(zeros[g])) * double(k::convert<float>(scales[g]));
  }
};

struct File {
  std::vector<uint32_t> codes, zeros;
  std::vector<k::half> scales;  // [groups, rows]

  explicit File(const Plain& m)
      : codes(size_t(m.rows * m.cols / 8)), zeros(size_t(m.groups() * m.rows / 8)), scales(m.scales.size()) {
    for (int64_t n = 0; n < m.rows; ++n)
      for (int64_t g = 0; g < m.groups(); ++g) scales[size_t(g * m.rows + n)] = m.scales[size_t(n * m.groups() + g)];
  }
};
// Of eight codes along K the first is lowest; zeros are stored less `missing`, of eight outputs the first is lowest.
File gptq(const Plain& m, int missing) {
  File f(m);
  for (int64_t n = 0; n < m.rows; ++n) {
    for (int64_t c = 0; c < m.cols; ++c)
      f.codes[size_t(c / 8 * m.rows + n)] |= m.codes[size_t(n * m.cols + c)] << (c % 8 * 4);
    for (int64_t g = 0; g < m.groups(); ++g) {
      const uint32_t stored = (m.zeros[size_t(n * m.groups() + g)] - uint32_t(missing)) & 15u;
      f.zeros[size_t(g * (m.rows / 8) + n / 8)] |= stored << (n % 8 * 4);
    }
  }
  return f;
}
// Of eight outputs these follow each other, from the lowest bits on.
File awq(const Plain& m) {
  constexpr int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  File f(m);
  for (int64_t first = 0; first < m.rows; first += 8) {
    for (int i = 0; i < 8; ++i) {
      const int64_t n = first + order[i];
      for (int64_t c = 0; c < m.cols; ++c)
        f.codes[size_t(c * (m.rows / 8) + first / 8)] |= m.codes[size_t(n * m.cols + c)] << (4 * i);
      for (int64_t g = 0; g < m.groups(); ++g)
        f.zeros[size_t(g * (m.rows / 8) + first / 8)] |= m.zeros[size_t(n * m.groups() + g)] << (4 * i);
    }
  }
  return f;
}

constexpr uint32_t kGuard = 0xa5a5a5a5u;

// What is written, with room that stays as it is behind each.
struct Written {
  std::vector<uint32_t> words;
  std::vector<k::half> scales;
  std::vector<uint8_t> zeros;
  explicit Written(const Plain& m)
      : words(size_t(m.rows * m.cols / 8 + 4), kGuard),
        scales(m.scales.size() + 4, k::convert<k::half>(-77.f)),
        zeros(m.zeros.size() + 4, 0xa5) {}
  k::Uint4Matrix<k::half> to() { return {words.data(), scales.data(), zeros.data()}; }
};

void expect_alike(test::Tally& t, const char* what, const Plain& m, const Written& w) {
  for (int64_t n = 0; n < m.rows; ++n) {
    for (int64_t c = 0; c < m.cols; ++c) {
      const int64_t i = n * m.cols + c;
      const float got = k::Uint4::at(w.words[size_t(i / 8)], int(i % 8));
      t.expect(got == float(m.codes[size_t(i)]), "%s %dx%d by %d: code of row %d, column %d is %g", what, int(m.rows),
               int(m.cols), int(m.group), int(n), int(c), double(got));
    }
  }
  for (size_t i = 0; i < m.zeros.size(); ++i) {
    t.expect(w.zeros[i] == m.zeros[i], "%s: zero %d is %d, not %d", what, int(i), int(w.zeros[i]), int(m.zeros[i]));
    t.expect(std::memcmp(&w.scales[i], &m.scales[i], 2) == 0, "%s: scale %d differs", what, int(i));
  }
  for (size_t i = 0; i < 4; ++i) {
    t.expect(w.words[size_t(m.rows * m.cols / 8) + i] == kGuard && w.zeros[m.zeros.size() + i] == 0xa5 &&
                 k::convert<float>(w.scales[m.scales.size() + i]) == -77.f,
             "%s: wrote behind the matrix", what);
  }
}

}  // namespace

TEST_CASE("matrices of GPTQ and AWQ") {
  test::Tally t;
  for (const int64_t rows : {8, 24, 64, 72, 200}) {
    for (const auto& size : std::vector<std::pair<int64_t, int>>{{8, 8}, {40, 40}, {128, 32}, {384, 128}, {96, 8}}) {
      const Plain m(rows, size.first, size.second);
      for (const int missing : {0, 1}) {
        const File f = gptq(m, missing);
        std::vector<int32_t> groups(static_cast<size_t>(m.cols));
        for (int64_t c = 0; c < m.cols; ++c) groups[size_t(c)] = int32_t(c / m.group);
        Written w(m);
        const k::Status status =
            k::repack(k::GptqMatrix<k::half>{f.codes.data(), f.zeros.data(), f.scales.data(), m.rows, m.cols, m.group,
                                             missing, missing == 0 ? nullptr : groups.data()},
                      w.to());
        t.expect(status.ok(), "%s", status.reason());
        expect_alike(t, "gptq", m, w);
      }
      const File f = awq(m);
      Written w(m);
      const k::Status status = k::repack(
          k::AwqMatrix<k::half>{f.codes.data(), f.zeros.data(), f.scales.data(), m.rows, m.cols, m.group}, w.to());
      t.expect(status.ok(), "%s", status.reason());
      expect_alike(t, "awq", m, w);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("a product with weights of AWQ") {
  const Plain m(24, 256, 64);
  const File f = awq(m);
  Written w(m);
  REQUIRE(
      k::repack(k::AwqMatrix<k::half>{f.codes.data(), f.zeros.data(), f.scales.data(), m.rows, m.cols, m.group}, w.to())
          .ok());
  const int64_t tokens = 3;
  std::vector<float> x(static_cast<size_t>(tokens * m.cols)), y(static_cast<size_t>(tokens * m.rows));
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 7 % 23) - 11) / 8.f;
  const auto weights = k::dequant(k::uint4(static_cast<const uint32_t*>(w.words.data()), m.cols),
                                  k::group_scales(static_cast<const k::half*>(w.scales.data()), m.groups(), m.group)
                                      .zeros(static_cast<const uint8_t*>(w.zeros.data())));
  REQUIRE(k::cpu::matmul(k::cpu::Exec{1}, k::load(static_cast<const float*>(x.data()), m.cols), weights,
                         k::store(y.data(), m.rows), {tokens, m.rows, m.cols})
              .ok());
  test::Tally t;
  for (int64_t r = 0; r < tokens; ++r) {
    for (int64_t n = 0; n < m.rows; ++n) {
      double want = 0, sum = 0;
      for (int64_t c = 0; c < m.cols; ++c) {
        const double term = double(x[size_t(r * m.cols + c)]) * m.weight(n, c);
        want += term, sum += std::fabs(term);
      }
      const double got = double(y[size_t(r * m.rows + n)]);
      t.expect(std::fabs(got - want) <= sum * 1e-6, "token %d, output %d: %g, not %g", int(r), int(n), got, want);
    }
  }
  CHECK_TALLY(t);
}

TEST_CASE("repack refuses what it cannot put in order") {
  const Plain m(16, 64, 32);
  const File f = gptq(m, 1);
  const auto refused = [&](k::GptqMatrix<k::half> from) {
    Written w(m);
    const k::Status status = k::repack(from, w.to());
    for (const uint32_t word : w.words) CHECK(word == kGuard);
    return std::string(status.ok() ? "" : status.reason());
  };
  const k::GptqMatrix<k::half> good{f.codes.data(), f.zeros.data(), f.scales.data(), m.rows, m.cols, m.group};
  const auto with = [&](auto change) {
    auto changed = good;
    change(changed);
    return refused(changed);
  };
  CHECK(with([](auto& g) { g.rows = 12; }).find("rows") != std::string::npos);
  CHECK(with([](auto& g) { g.cols = -8; }).find("cols") != std::string::npos);
  CHECK(with([](auto& g) { g.group = 24; }).find("group") != std::string::npos);
  CHECK(with([](auto& g) { g.group = 0; }).find("group") != std::string::npos);
  CHECK(with([](auto& g) { g.group = 128; }).find("multiple of group") != std::string::npos);
  CHECK(with([](auto& g) { g.codes = nullptr; }).find("codes") != std::string::npos);
  CHECK(with([](auto& g) { g.zeros = nullptr; }).find("zeros") != std::string::npos);
  CHECK(with([](auto& g) { g.scales = nullptr; }).find("scales") != std::string::npos);
  CHECK(with([](auto& g) { g.missing = 2; }).find("missing") != std::string::npos);
  CHECK(with([&](auto& g) {
          g.codes = reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(f.codes.data()) + 2);
        }) == "repack: codes: the pointer is not aligned");
  std::vector<int32_t> groups(64, 1);
  CHECK(with([&](auto& g) { g.group_of_column = groups.data(); }).find("desc_act") != std::string::npos);
  Written w(m);
  CHECK_FALSE(k::repack(good, k::Uint4Matrix<k::half>{nullptr, w.scales.data(), w.zeros.data()}).ok());
  CHECK(k::repack(k::GptqMatrix<k::half>{nullptr, nullptr, nullptr, 0, 64, 32}, k::Uint4Matrix<k::half>{}).ok());
}
