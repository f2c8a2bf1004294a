// Random calls of row operations (support/random_calls.cuh): shapes, strides, alignment, residuals, dropout, quantizing
// sinks, workspaces and policies, each combined with the others.
#include <kernels/dropout.h>
#include <kernels/quantize.h>

#include "support/elementwise.h"
#include "support/random_matrices.cuh"
#include "support/row_groups.h"

using namespace test;

namespace {

struct DrawnRows {
  const char* name = "";
  uint64_t seed = 0;
  int64_t rows = 0, cols = 0, group = 0;
  Place x, kept, y, copy, scales;
  int vectors = 0;  // how far gamma and beta are from aligned addresses, in elements
  bool in_place = false, one_row = false, statistics = false, programmatic = false, graph = false;
  double dropped = 0;
  int activation = 0, offset = 0;
  k::RowPolicy policy;
  Room room = Room::none;

  std::string describe() const {
    std::ostringstream out;
    out << name << " " << rows << " x " << cols << ", groups of " << group << ", x " << x.kind << "/" << x.more
        << ", kept " << kept.kind << "/" << kept.more << ", y " << y.kind << "/" << y.more << ", vectors at " << vectors
        << (in_place ? ", in place" : "") << (one_row ? ", one row" : "") << (statistics ? ", statistics" : "")
        << (programmatic ? ", programmatic" : "") << (graph ? ", graph" : "") << ", dropped " << dropped
        << ", activation " << activation << ", offset " << offset << ", " << name_of(room) << ", " << text(policy);
    return out.str();
  }
};

DrawnRows draw_rows(const char* name, uint64_t seed) {
  Random random(seed * 7919 + 3);
  DrawnRows d;
  d.name = name, d.seed = seed;
  const int64_t of_cols = random.below(100), of_rows = random.below(100);
  if (of_cols < 2)
    d.cols = 0;
  else if (of_cols < 20)
    d.cols = 1 + random.below(70);
  else if (of_cols < 55)
    d.cols = int64_t(1) << (5 + random.below(10)), d.cols += random.below(3) - 1;
  else if (of_cols < 75)
    d.cols = 32 * (1 + random.below(300));
  else if (of_cols < 95)
    d.cols = 1 + random.below(9000);
  else
    d.cols = 1 + random.below(120000);
  d.rows = of_rows < 2    ? 0
           : of_rows < 50 ? 1 + random.below(9)
           : of_rows < 75 ? 1 + random.below(300)
                          : 1 + random.below(3000);
  d.rows = std::min(d.rows, 1 + 600000 / (d.cols + 1));

  d.x = draw_place(random), d.kept = draw_place(random), d.y = draw_place(random), d.copy = draw_place(random);
  if (random.chance(40)) d.kept = d.y = d.copy = d.x;  // alike, so that packs may be
  d.scales = draw_place(random);
  d.vectors = int(random.chance(60) ? 0 : random.below(5));
  d.in_place = random.chance(25), d.one_row = !d.in_place && random.chance(3);
  d.statistics = random.chance(50);
  d.programmatic = random.chance(30), d.graph = random.chance(15);
  d.dropped = random.chance(50) ? 0 : random.any_of({1, 25, 50, 100}) / 100.;
  d.activation = int(random.below(4));
  d.offset = random.any_of({0, 0, 3, 100});
  d.group = random.chance(75) ? int64_t(1) << random.below(12) : 1 + random.below(700);

  using R = k::Residency;
  if (random.chance(65)) {
    d.policy.residency = random.chance(15) ? R::split : R(1 + random.below(4));
    const bool group = d.policy.residency == R::group, split = d.policy.residency == R::split;
    const int warps = split ? 18 : 32;  // split rows have blocks of 16 at most
    if (random.chance(60)) d.policy.threads = int(group ? 1 << random.below(6) : 32 * (1 + random.below(warps)));
    if (!group && random.chance(split ? 5 : 40)) d.policy.cluster = 1 << random.below(5);
  }
  if (random.chance(25)) d.policy.max_pack = int(1 << random.below(5));
  if (random.chance(25)) d.policy.max_blocks = 1 + random.below(40);
  d.policy.batch_invariant = random.chance(30);
  d.room = Room(random.below(4));
  return d;
}

// How results are quantized.
enum class Quantized { no, by_row, by_group };

// S in, added to K that is kept in place, to D. Rows of the call are rows `first` and up of all that this seed has.
template <class Op, class S, class K, class D, Quantized kQuantized>
class RandomRowsCall {
 public:
  explicit RandomRowsCall(const DrawnRows& drawn, int64_t start = 0)
      : d(drawn),
        first(start),
        x(d.rows, d.cols, d.one_row ? 0 : d.x.ld<S>(d.cols), d.x.shift<S>(),
          writes_x() ? Poison::garbage : Poison::nan),
        kept(d.rows, d.cols, d.kept.ld<K>(d.cols), d.kept.shift<K>()),
        y(d.rows, d.cols, d.y.ld<D>(d.cols), d.y.shift<D>()),
        // A scale for each row has no stride.
        scales(d.rows, groups(), kQuantized == Quantized::by_group ? d.scales.ld<float>(groups()) : groups(),
               d.scales.shift<float>()),
        mean(d.rows, 1, 1),
        rstd(d.rows, 1, 1),
        gamma(d.seed + 1, Values::normal, 1, d.cols, d.cols, d.vectors),
        beta(d.seed + 2, Values::normal, 1, d.cols, d.cols, (d.vectors + int64_t(d.seed)) % 3),
        workspace(make_workspace(d.room, int64_t(k::row_workspace_bytes(d.rows)), d.seed + 99)) {
    fill(x, 3, d.offset), fill(kept, 4, 0);
    remember();
  }

  std::string run() {
    const bool empty = d.rows == 0 || d.cols == 0;
    const k::Status status = call(d.policy);
    stream.wait();
    if (!status) {
      const std::string reason = std::string("refused: ") + status.reason();
      if (d.policy.residency == k::Residency::automatic || status.code() == k::Code::device) return reason;
      const bool too_little = reason.find("needs a workspace") != std::string::npos;
      if (too_little && (d.room == Room::exact || d.room == Room::more)) return reason;
      bool unchanged = true;
      each([&](const auto& m) { unchanged = unchanged && m.unchanged(); });
      if (!unchanged) return "something was written, though the call was " + reason;
      const bool invariant = d.policy.batch_invariant;
      d.policy = {};
      d.policy.batch_invariant = invariant;
      const std::string wrong = run();
      return wrong.empty() ? "" : wrong + " (without what was " + reason + ")";
    }
    if (!empty && d.policy.residency == k::Residency::split && !workspace) return "a row is split without a workspace";
    const auto bits = all_bits();
    if (std::string wrong = check(empty); !wrong.empty()) return wrong;
    const auto again = [&](const char* what, const k::RowPolicy& policy) -> std::string {
      restore();
      if (const k::Status repeated = call(policy); !repeated) return std::string(what) + ": " + repeated.reason();
      stream.wait();
      if (workspace && !workspace->intact()) return std::string(what) + ": wrote outside the workspace";
      return all_bits() == bits ? "" : std::string(what) + " gives other bits";
    };
    if (std::string wrong = again("a second call", d.policy); !wrong.empty()) return wrong;
    k::RowPolicy other = d.policy;
    other.max_blocks = other.max_blocks == 0 ? 1 + int64_t(d.seed % 9) : 0;
    if (std::string wrong = again("with other max_blocks", other); !wrong.empty()) return wrong;
    if (empty) return "";
    // What a call does, given as its policy, is what that call does, if rows are cut alike.
    k::RowPlan plan, of_plan;
    const auto plan_with = [&](const k::RowPolicy& policy, k::RowPlan& made) {
      return k::row_plan(exec(), options(), source(), sink(), d.rows, d.cols, policy, made);
    };
    if (const k::Status planned = plan_with(d.policy, plan); !planned)
      return std::string("the plan: ") + planned.reason();
    if (const k::Status planned = plan_with(plan.policy, of_plan); !planned)
      return std::string("the plan as a policy: ") + planned.reason() + " [" + text(plan.policy) + "]";
    if (of_plan.pack == plan.pack && of_plan.ends == plan.ends && of_plan.width == plan.width) {
      if (std::string wrong = again("the plan as a policy", plan.policy); !wrong.empty())
        return wrong + " [" + text(plan.policy) + "]";
    }
    if (d.graph) {
      restore();
      k::Status captured;
      const Graph graph(stream, [&] { captured = call(d.policy); });
      if (!captured) return std::string("captured: ") + captured.reason();
      for (int i = 0; i < 2; ++i) {
        restore();
        graph.replay();
        if (all_bits() != bits) return "a graph gives other bits";
      }
    }
    return d.policy.batch_invariant ? check_invariant() : "";
  }

  // Besides x and kept, which check() looks at.
  bool inputs_unchanged() const { return gamma.unchanged() && beta.unchanged(); }

  DrawnRows d;
  int64_t first;
  Stream stream;
  Device<S> x;
  Device<K> kept;
  Device<D> y;
  Device<float> scales, mean, rstd;
  Cells<float> gamma, beta;
  const std::unique_ptr<Scratch> workspace;

  k::Exec exec() const {
    k::Exec ex = k::Exec(stream).programmatic(d.programmatic);
    return workspace ? ex.workspace(workspace->data(), workspace->bytes()) : ex;
  }
  k::Status call(const k::RowPolicy& policy) const {
    return op.run(exec(), source(), sink(), d.rows, d.cols, policy, d.statistics ? mean.data() : nullptr,
                  d.statistics ? rstd.data() : nullptr);
  }

 private:
  Op op;
  std::vector<std::vector<unsigned char>> before;

  static constexpr bool may_write_x = std::is_same<S, D>::value && kQuantized == Quantized::no;
  bool writes_x() const { return may_write_x && d.in_place; }
  int64_t groups() const { return kQuantized == Quantized::by_group ? (d.cols + d.group - 1) / d.group : 1; }
  auto options() const { return op.options(); }
  auto source() const {
    return k::load(static_cast<const S*>(x.data()), x.ld()) | k::scale(0.5) |
           k::add(k::load(static_cast<const K*>(kept.data()), kept.ld())) | k::tee(kept.data(), kept.ld());
  }
  auto sink() const {
    const auto behind =
        k::affine(gamma.at(), beta.at()) | k::dropout(d.dropped, d.seed, 5, d.cols) | DrawnActivation(d.activation);
    if constexpr (kQuantized == Quantized::no) {
      if constexpr (may_write_x)
        return behind | k::store(writes_x() ? x.data() : y.data(), writes_x() ? x.ld() : y.ld());
      else
        return behind | k::store(y.data(), y.ld());
    } else if constexpr (kQuantized == Quantized::by_row) {
      return behind | k::quantize(y.data(), y.ld(), scales.data());
    } else {
      return behind | k::quantize(y.data(), y.ld(), scales.data(), scales.ld(), int(d.group));
    }
  }

  template <class T>
  void fill(Device<T>& to, uint64_t which, int offset) {
    const auto& all = numbers<T>(Values::normal);
    for (int64_t r = 0; r < (to.ld() == 0 ? std::min<int64_t>(1, d.rows) : d.rows); ++r) {
      // Rows of many kinds: some are large, some have an outlier at their end.
      const uint64_t kind = to.ld() == 0 ? 0 : cell_bits(d.seed + 10 * which, r + first, -1) % 6;
      for (int64_t c = 0; c < d.cols; ++c) {
        const T v = all[cell_bits(d.seed + which, r + first, c) % all.size()];
        if (kind == 1 && offset > 0)
          to.set(r, c, make<T>(value_of(v) + offset));
        else
          to.set(r, c, kind == 2 && c == d.cols - 1 ? make<T>(30) : v);
      }
    }
    to.upload();
  }
  template <class F>
  void each(const F& f) {
    f(x), f(kept), f(y), f(scales), f(mean), f(rstd);
  }
  void remember() {
    before.clear();
    each([&](const auto& m) { before.push_back(m.bytes()); });
  }
  void restore() {
    size_t i = 0;
    each([&](auto& m) { m.restore(before[i++]); });
  }
  std::vector<std::vector<unsigned char>> all_bits() {
    std::vector<std::vector<unsigned char>> all;
    each([&](auto& m) { m.download(), all.push_back(m.bytes()); });
    return all;
  }

  // What was given, from the bytes of before.
  template <class T>
  static double given(const std::vector<unsigned char>& bytes, const Device<T>& m, const Place& place, int64_t r,
                      int64_t c) {
    T v;
    const int64_t at = Device<T>::guard + (place.shift<T>() + r * m.ld() + c) * int64_t(sizeof(T));
    std::memcpy(static_cast<void*>(&v), bytes.data() + at, sizeof(T));
    return value_of(v);
  }

  std::string check(bool empty) {
    std::string outside;
    each([&](const auto& m) { outside = m.intact() ? outside : "wrote outside its rows"; });
    if (workspace && !workspace->intact()) outside = "wrote outside the workspace";
    if (!outside.empty()) return outside;
    size_t i = 0;
    if (empty) {
      each([&](const auto& m) { outside = m.bytes() == before[i++] ? outside : "something was written"; });
      return outside;
    }
    if (!writes_x() && x.bytes() != before[0]) return "the input was changed";
    if (writes_x() && y.bytes() != before[2]) return "y was written";
    std::vector<std::string> problems(static_cast<size_t>(d.rows));
    const int64_t step = 1 + d.rows * d.cols / 300000;
    in_parallel(problems.size(), [&](size_t row) {
      if (int64_t(row) % step == 0 || int64_t(row) == d.rows - 1) problems[row] = check_row(int64_t(row));
    });
    for (const std::string& problem : problems)
      if (!problem.empty()) return problem;
    return "";
  }
  std::string check_row(int64_t r) const {
    Row<> row(size_t(d.cols));
    for (int64_t c = 0; c < d.cols; ++c)
      row[size_t(c)] =
          Real<>(given(before[0], x, d.x, r, c)) * Real<>(0.5) + Real<>(given(before[1], kept, d.kept, r, c));
    std::string problem = mismatch(r, row, [&](int64_t c) { return kept.get(r, c); });
    if (!problem.empty()) return "kept: " + problem;
    // The row that was written is the one that counts.
    for (int64_t c = 0; c < d.cols; ++c) row[size_t(c)] = Real<>(value_of(kept.get(r, c)));
    const RowStatistics<float> statistics = op.expect(row);
    if (d.statistics && Op::has_mean && !within(mean.get(r, 0), statistics.mean))
      return "mean of row " + std::to_string(r);
    if (d.statistics && Op::has_rstd && !within(rstd.get(r, 0), statistics.rstd))
      return "rstd of row " + std::to_string(r);
    const double scale = d.dropped < 1 ? 1 / (1 - d.dropped) : 0;
    for (int64_t c = 0; c < d.cols; ++c) {
      Real<>& v = row[size_t(c)];
      v = v * Real<>(gamma.value(0, c)) + Real<>(beta.value(0, c));
      v = is_dropped(d.dropped, d.seed, 5, uint64_t(d.cols + 3) / 4, r, c) ? Real<>(0) : v * constant(scale);
      v = activated(d.activation, v);
    }
    if constexpr (kQuantized == Quantized::no) {
      if constexpr (may_write_x)
        if (writes_x()) return mismatch(r, row, [&](int64_t c) { return x.get(r, c); });
      return mismatch(r, row, [&](int64_t c) { return y.get(r, c); });
    } else {
      const Row<> found = quantize_groups<D>(row, kQuantized == Quantized::by_row ? d.cols : d.group);
      problem = mismatch(r, found, [&](int64_t g) { return scales.get(r, g); });
      if (!problem.empty()) return "scales: " + problem;
      return mismatch(r, row, [&](int64_t c) { return y.get(r, c); });
    }
  }

  // Some of the rows, alone.
  std::string check_invariant() {
    Random random(d.seed + 6);
    DrawnRows few = d;
    few.rows = 1 + random.below(d.rows);
    // What is dropped depends on the row's number.
    const int64_t start = d.one_row || (d.dropped > 0 && d.dropped < 1) ? 0 : random.below(d.rows - few.rows + 1);
    RandomRowsCall other(few, start);
    restore();
    const k::Status status = call(d.policy), of_few = other.call(d.policy);
    if (!status || !of_few) return std::string("batch_invariant: ") + of_few.reason();
    stream.wait(), other.stream.wait();
    all_bits(), other.all_bits();
    for (int64_t r = 0; r < few.rows; ++r) {
      const auto same = [&](const auto& a, const auto& b) {
        for (int64_t c = 0; c < a.cols(); ++c) {
          const auto one = a.get(r + start, c), two = b.get(r, c);
          if (std::memcmp(&one, &two, sizeof(one)) != 0) return false;
        }
        return true;
      };
      const bool equal = same(kept, other.kept) && (!d.statistics || !Op::has_rstd || same(rstd, other.rstd)) &&
                         (!d.statistics || !Op::has_mean || same(mean, other.mean)) &&
                         (writes_x() ? same(x, other.x) : same(y, other.y)) &&
                         (kQuantized == Quantized::no || same(scales, other.scales));
      if (equal) continue;
      return "batch_invariant: row " + std::to_string(r + start) + " differs as row " + std::to_string(r) + " of " +
             std::to_string(few.rows);
    }
    return "";
  }
};

template <class Op, class S, class K, class D, Quantized kQuantized = Quantized::no>
void random_rows(const char* name, int64_t usual = 150) {
  each_random_call(
      usual,
      [&](uint64_t seed) {
        DrawnRows d = draw_rows(name, seed);
        // A group of nothing but what silu or gelu leave of large negative numbers has any codes.
        if (kQuantized == Quantized::by_group && d.activation > 1) d.activation = 1;
        return d;
      },
      [](const DrawnRows& d) { return run_and_check_inputs(RandomRowsCall<Op, S, K, D, kQuantized>(d)); });
}

using H = k::half;
using B = k::bfloat16;

}  // namespace

TEST_CASE("random rows: softmax") { random_rows<Softmax, H, H, H>("softmax"); }
TEST_CASE("random rows: log_softmax") { random_rows<LogSoftmax, B, float, float>("log_softmax"); }
TEST_CASE("random rows: layernorm") { random_rows<LayerNorm, H, B, H>("layernorm"); }
TEST_CASE("random rows: rmsnorm") { random_rows<RmsNorm, B, B, B>("rmsnorm"); }
TEST_CASE("random rows: rmsnorm of float to e4m3") {
  random_rows<RmsNorm, float, H, k::float8_e4m3>("rmsnorm to e4m3");
}
TEST_CASE("random rows: rmsnorm, a scale for each row") {
  random_rows<RmsNorm, H, H, int8_t, Quantized::by_row>("rmsnorm to codes");
}
TEST_CASE("random rows: layernorm, scales for groups") {
  random_rows<LayerNorm, B, float, k::float8_e4m3, Quantized::by_group>("layernorm to groups");
}
