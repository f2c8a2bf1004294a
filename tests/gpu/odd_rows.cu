// Rows that begin and end anywhere between multiples of 16 bytes, which are moved in wide packs nevertheless: all
// phases of source and sink, all row strides, NaNs around what is read and guards around what is written. Other types
// and policies: policy.cu.
#include "support/gpu.cuh"
#include "support/tally.h"

#include <kernels/cpu/layernorm.h>
#include <kernels/cpu/rmsnorm.h>

using namespace test;
using k::Residency;

namespace {

// Trials on one stream, a few hundred at a time.
template <class Op, class T>
class Calls {
 public:
  using OneTrial = Trial<Op, T>;
  using Engine = typename OneTrial::Engine;

  // Whether it takes the way of rows with ends, and why it is not faster.
  void add(const Shape& shape, const k::RowPolicy& policy) {
    if (shortened_.leaves_out()) return;
    auto trial = std::make_unique<OneTrial>(shape, policy);
    k::RowPlan plan;
    const k::Status planned = trial->plan(stream_, plan);
    const bool same = shape.in_gap == shape.out_gap && shape.in_shift == shape.out_shift;
    const bool aligned = shape.cols % Engine::wide == 0 && shape.in_gap % Engine::wide == 0 &&
                         shape.out_gap % Engine::wide == 0 && shape.in_shift % Engine::wide == 0 &&
                         shape.out_shift % Engine::wide == 0;
    if (!planned) {
      // Groups hold fewer columns of other rows.
      if (policy.residency != Residency::group || (same && !aligned))
        problems_.push_back(trial->describe() + ": " + text(planned));
      return;
    }
    const bool chosen =
        policy.residency != Residency::automatic || shape.cols >= k::tuning::kEndsPacks * Engine::ends_pack;
    if (plan.ends && aligned) problems_.push_back(trial->describe() + ": aligned rows have no ends");
    if (same && chosen && plan.ends == aligned)
      problems_.push_back(trial->describe() + ": not in wide packs: " + plan.why_not);
    if (same && chosen && *plan.why_not != 0)
      problems_.push_back(trial->describe() + ": why not faster? " + plan.why_not);
    if (!plan.ends && !aligned && *plan.why_not == 0)
      problems_.push_back(trial->describe() + ": does not say why it is not faster");
    if (plan.ends) ++with_ends_;
    if (plan.why_not == k::detail::why_not::pieces) ++in_pieces_;
    trials_.push_back(std::move(trial));
    if (trials_.size() >= 400) run();
  }
  void run() {
    std::vector<std::string> problems(trials_.size());
    for (size_t i = 0; i < trials_.size(); ++i) {
      if (const k::Status status = trials_[i]->launch(stream_); !status)
        problems[i] = trials_[i]->describe() + ": " + text(status);
    }
    stream_.wait();
    for (auto& trial : trials_) trial->fetch();
    in_parallel(trials_.size(), [&](size_t i) {
      if (problems[i].empty()) problems[i] = trials_[i]->verify();
    });
    problems_.insert(problems_.end(), problems.begin(), problems.end());
    trials_.clear();
  }
  void finish() {
    run();
    report(problems_);
    CHECK(with_ends_ > 0);
    if (!is_shortened()) CHECK(in_pieces_ > 0);
  }

 private:
  Stream stream_;
  std::vector<std::unique_ptr<OneTrial>> trials_;
  std::vector<std::string> problems_;
  int with_ends_ = 0, in_pieces_ = 0;
  Shortened shortened_;
};

// Ways for rows of so many columns: the automatic one, a group's registers where they fit, and read twice by few and
// many threads.
template <class Engine>
std::vector<k::RowPolicy> ways(int64_t cols) {
  std::vector<k::RowPolicy> all = {k::RowPolicy{}, policy(Residency::streamed, 96)};
  if (Engine::ends_fit(cols, 32)) all.push_back(policy(Residency::group, 32));
  if (Engine::ends_fit(cols, Engine::ends_lanes)) all.push_back(policy(Residency::group, Engine::ends_lanes));
  if (cols > 500) all.push_back(policy(Residency::streamed));
  return all;
}

template <class Op, class T>
void every_length() {
  Calls<Op, T> calls;
  using Engine = typename Calls<Op, T>::Engine;
  const int unit = Engine::wide;
  for (int64_t cols = 1; cols <= 60000; cols += cols < 1100 ? 1 : cols < 5000 ? 173 : 7919) {
    const int64_t rows = cols < 5000 ? 9 : 3, gap = cols / 3 % unit, shift = cols / 5 % unit;
    for (const k::RowPolicy& way : ways<Engine>(cols)) {
      calls.add({rows, cols, gap, gap, shift, shift}, way);
      if (cols % 7 == 0) calls.add({rows, cols, 0, 2, shift, shift + 2}, way);
      if (cols % 11 == 0) calls.add({rows, cols, gap, 1, 1, 0}, way);
      if (cols % 13 == 0) calls.add({rows, cols, gap, gap, shift, shift, /*in_place*/ true}, way);
    }
  }
  calls.finish();
}

template <class Op, class T>
void every_phase() {
  Calls<Op, T> calls;
  using Engine = typename Calls<Op, T>::Engine;
  const int unit = Engine::wide;
  for (const int64_t cols : {1, 3, 8, 14, 15, 22, 23, 29, 31, 37, 64, 257, 1023, 1025, 1039, 1040, 1041, 4097}) {
    for (int64_t shift = 0; shift < unit; ++shift) {
      for (int64_t step = 0; step < unit; ++step) {
        const int64_t gap = (step - cols % unit + unit) % unit;  // row stride mod the width of a pack
        for (const k::RowPolicy& way : ways<Engine>(cols)) {
          calls.add({5, cols, gap, gap, shift, shift}, way);
          if (cols % 2 == 0 || cols > 1000) continue;
          for (const int64_t apart : {1, 2, 4}) calls.add({5, cols, gap, gap + apart % 3, shift, shift + apart}, way);
        }
      }
    }
  }
  calls.finish();
}

}  // namespace

TEST_CASE("odd rows: softmax of half") {
  SECTION("every length") { every_length<Softmax, k::half>(); }
  SECTION("every phase") { every_phase<Softmax, k::half>(); }
}
TEST_CASE("odd rows: layernorm of float") {
  SECTION("every length") { every_length<LayerNorm, float>(); }
  SECTION("every phase") { every_phase<LayerNorm, float>(); }
}

TEST_CASE("odd rows: shared by clusters, and few") {
  if (!have_clusters()) return skip("needs an sm_90 GPU");
  Calls<Softmax, k::half> calls;
  for (const int64_t cols : {5, 100, 1025, 4099, 50257}) {
    for (const int cluster : {2, 8}) {
      for (const int64_t gap : {0, 2, 7})
        calls.add({3, cols, gap, gap, 3, 3}, policy(Residency::streamed, 64, cluster));
      calls.add({2, cols, 1, 1, 1, 3}, policy(Residency::streamed, 0, cluster));
    }
    if (cols > 1000) calls.add({2, cols, 0, 0, 1, 1}, {});
  }
  calls.finish();
}

TEST_CASE("odd rows: the same bits again, whatever the grid") {
  Stream stream;
  for (const int64_t cols : {999, 4097, 50257}) {
    std::vector<unsigned char> first;
    for (const int64_t max_blocks : {0, 0, 1, 3}) {
      k::RowPolicy p;
      p.max_blocks = max_blocks;
      Trial<Softmax, k::half> trial(Shape{200, cols, 0, 0, 1, 1}, p);
      REQUIRE(trial.launch(stream));
      stream.wait();
      trial.fetch();
      if (first.empty()) first = trial.bits();
      INFO(cols << " columns, max_blocks " << max_blocks);
      CHECK(trial.bits() == first);
    }
  }
}

// ---- fused: row vectors, a residual and a tee, each at a place of its own; the CPU's version is the oracle ----------

namespace {

template <class T>
void fill(Pinned<T>& m, uint64_t seed) {
  RandomRows rows(seed, /*holes*/ false);
  for (int64_t r = 0; r < m.rows(); ++r) rows.row(r, m.cols(), [&](int64_t c, double x) { m.set(r, c, make<T>(x)); });
  m.upload();
}
template <class T>
std::vector<double> take(Pinned<T>& m, Tally& t, int64_t cols) {
  m.download();
  t.expect(m.intact(), "%d columns: wrote outside its rows", int(cols));
  std::vector<double> values;
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (int64_t c = 0; c < m.cols(); ++c) values.push_back(value_of(m.get(r, c)));
  }
  return values;
}
void compare(Tally& t, const char* what, int64_t cols, const std::vector<double>& gpu, const std::vector<double>& cpu,
             double relative, double absolute) {
  for (size_t i = 0; i < gpu.size(); ++i) {
    t.expect(std::fabs(gpu[i] - cpu[i]) <= relative * std::fabs(cpu[i]) + absolute,
             "%s of %d columns, element %d: GPU %.9g, CPU %.9g", what, int(cols), int(i), gpu[i], cpu[i]);
  }
}

constexpr int64_t kCols[] = {1, 13, 30, 100, 257, 263, 500, 1000, 1023, 1025, 1041, 4097, 20001};
constexpr int64_t kRows = 9;

template <class Engine>
std::vector<k::RowPolicy> short_ways(int64_t cols) {
  std::vector<k::RowPolicy> all = {k::RowPolicy{}, policy(Residency::streamed, 64)};
  if (Engine::ends_fit(cols, 32)) all.push_back(policy(Residency::group, 32));
  return all;
}

}  // namespace

TEST_CASE("odd rows: bias, residual, tee in place and rmsnorm with a weight") {
  Stream stream;
  Tally t;
  int with_ends = 0;
  for (const int64_t cols : kCols) {
    for (int64_t shift = 0; shift < 8; ++shift) {
      Pinned<k::half> x(kRows, cols, cols, shift, Poison::nan), y(kRows, cols, cols, shift),
          res(kRows, cols, cols + 3, 3);
      Pinned<k::half> gamma(1, cols, cols, shift / 2, Poison::nan);
      Pinned<float> bias(1, cols, cols, 1, Poison::nan), scale(1, cols, cols, shift % 3, Poison::nan);
      fill(x, 1), fill(gamma, 2), fill(bias, 3), fill(scale, 4);
      const auto in = k::load(x.data(), x.ld()) | k::add(bias.data()) | k::add(k::load(res.data(), res.ld())) |
                      k::tee(res.data(), res.ld());
      const auto out = k::affine(gamma.data()) | k::mul(k::one_plus(scale.data())) | k::store(y.data(), y.ld());
      using Engine = EngineOf<k::RmsNorm, std::decay_t<decltype(in)>, std::decay_t<decltype(out)>>;
      fill(res, 5);
      REQUIRE(k::cpu::rmsnorm(k::cpu::Exec{}, in, out, kRows, cols));
      const auto cpu_y = take(y, t, cols), cpu_res = take(res, t, cols);
      for (const k::RowPolicy& way : short_ways<Engine>(cols)) {
        fill(res, 5);
        k::RowPlan plan;
        REQUIRE(k::row_plan(stream, k::RmsNorm{}, in, out, kRows, cols, way, plan));
        with_ends += plan.ends;
        REQUIRE(k::rmsnorm(stream, in, out, kRows, cols, k::RmsNorm{}, way));
        stream.wait();
        compare(t, "the residual", cols, take(res, t, cols), cpu_res, 0, 0);
        compare(t, "y", cols, take(y, t, cols), cpu_y, 2e-3, 1e-4);
      }
    }
  }
  CHECK_TALLY(t);
  CHECK(with_ends > 0);
}

// A sink that needs a row's values twice.
TEST_CASE("odd rows: layernorm with weights, quantized") {
  Stream stream;
  Tally t;
  for (const int64_t cols : kCols) {
    for (int64_t shift = 0; shift < 4; ++shift) {
      Pinned<float> x(kRows, cols, cols + shift, shift, Poison::nan), gamma(1, cols, cols, 1, Poison::nan),
          beta(1, cols, cols, shift, Poison::nan), scales(kRows, 1, 1);
      Pinned<int8_t> q(kRows, cols, cols + shift, shift);
      fill(x, 1), fill(gamma, 2), fill(beta, 3);
      const auto in = k::load(x.data(), x.ld());
      const auto out = k::affine(gamma.data(), beta.data()) | k::quantize(q.data(), q.ld(), scales.data());
      using Engine = EngineOf<k::LayerNorm, std::decay_t<decltype(in)>, std::decay_t<decltype(out)>>;
      REQUIRE(k::cpu::layernorm(k::cpu::Exec{}, in, out, kRows, cols));
      const auto cpu_q = take(q, t, cols), cpu_scales = take(scales, t, cols);
      for (const k::RowPolicy& way : short_ways<Engine>(cols)) {
        REQUIRE(k::layernorm(stream, in, out, kRows, cols, k::LayerNorm{}, way));
        stream.wait();
        compare(t, "codes", cols, take(q, t, cols), cpu_q, 0, 1);
        compare(t, "scales", cols, take(scales, t, cols), cpu_scales, 1e-5, 1e-30);
      }
    }
  }
  CHECK_TALLY(t);
}
