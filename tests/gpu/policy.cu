// Every row policy: served and right, or refused with a reason and nothing written; and what the automatic choice
// takes.
#include "support/gpu.cuh"

#include <set>

#include <kernels/tuning/row.h>

using namespace test;
using k::Residency;

namespace {

// Calls of one operation with many policies, on one stream and with one workspace.
template <class Op, class T>
class Sweep {
 public:
  using OneTrial = Trial<Op, T>;
  using Engine = typename OneTrial::Engine;
  static constexpr int64_t words = sizeof(k::compute_t<T>) / 4;  // of a value in registers
  static constexpr int wide = Engine::wide;

  // The pack width of aligned rows.
  static int pack(int64_t cols, int max_pack) {
    for (const int width : {wide, Engine::middle}) {
      if (cols % width == 0 && (max_pack == 0 || width <= max_pack)) return width;
    }
    return 1;
  }
  // Whether rows of so many columns, at aligned addresses, are moved in wide packs with single elements at their ends.
  static bool with_ends(int64_t cols, const k::RowPolicy& p) {
    if (!Engine::ends || cols % wide == 0 || (p.max_pack != 0 && p.max_pack < wide)) return false;
    return p.residency == Residency::streamed ||
           (p.residency == Residency::group && (p.threads == 0 || p.threads >= Engine::ends_lanes));
  }
  // Columns that a thread of a block works on at a time, and that it holds in registers.
  static int64_t step(int pack) { return int64_t(pack) * Engine::packs(pack); }
  static int64_t held(int pack) { return int64_t(pack) * Engine::packs(pack); }
  static int64_t held_in_group(int pack) { return int64_t(pack) * Engine::group_packs(pack); }
  static bool allows(Residency residency, int pack, int threads) {
    return threads <= Engine::max_block(pack, residency);
  }

  enum Expected { refused, served, either };

  void add(const Shape& shape, const k::RowPolicy& policy, Expected expected) {
    if (shortened_.leaves_out()) return;
    const k::Exec ex = workspace_.exec(stream_);
    auto trial = std::make_unique<OneTrial>(shape, policy);
    k::RowPlan plan;
    const k::Status planned = trial->plan(ex, plan);
    const k::Status status = trial->launch(ex);
    const std::string what = trial->describe() + ": ";
    if (planned.code() != status.code()) fail(what + "the plan says " + text(planned) + ", the call " + text(status));
    if (status) {
      if (expected == refused) fail(what + "served though it does not fit");
      if (!as_asked(policy, plan)) fail(what + "the plan is another: " + text(plan.policy));
      if (plan.policy.residency == Residency::shared) {
        if (plan.kept < 1) fail(what + "nothing is kept");
        ++(kept_wholly<Engine>(plan) ? wholly_ : partly_);
      } else if (plan.kept != 0) {
        fail(what + "something is kept in shared memory");
      }
      if (plan.count > 0) counts_.insert(plan.count);
      served_.push_back(std::move(trial));
      return;
    }
    ++refused_;
    if (expected == served) fail(what + text(status));
    if (status.code() == k::Code::device || *status.reason() == 0)
      fail(what + "refused without a proper reason: " + text(status));
    fail(trial->untouched());
  }

  // Everything served must be right, and something if `some`. Frees the memory, and may be called again.
  void finish(bool some = true) {
    stream_.wait();
    for (auto& trial : served_) trial->fetch();
    std::vector<std::string> problems(served_.size());
    in_parallel(served_.size(), [&](size_t i) { problems[i] = served_[i]->verify(); });
    problems.insert(problems.end(), problems_.begin(), problems_.end());
    report(problems);
    CHECK(workspace_.intact());
    if (!is_shortened()) CHECK(served_.empty() == !some);
    served_.clear();
    problems_.clear();
  }
  int refused_calls() const { return refused_; }
  const std::set<int>& counts() const { return counts_; }  // of packs, where every thread holds the same
  int wholly() const { return wholly_; }  // of those in shared memory: the ones that it keeps all of
  int partly() const { return partly_; }

 private:
  static bool as_asked(const k::RowPolicy& asked, const k::RowPlan& plan) {
    const k::RowPolicy& got = plan.policy;
    if (got.threads <= 0 || plan.pack <= 0 || got.residency == Residency::automatic) return false;
    if (asked.max_pack > 0 && plan.pack > asked.max_pack) return false;
    return asked.residency == Residency::automatic ||
           (got.residency == asked.residency && (asked.threads == 0 || got.threads == asked.threads) &&
            got.cluster == asked.cluster && got.max_blocks == asked.max_blocks);
  }
  void fail(const std::string& problem) {
    if (!problem.empty()) problems_.push_back(problem);
  }

  Stream stream_;
  Workspace workspace_{128};
  std::vector<std::unique_ptr<OneTrial>> served_;
  std::vector<std::string> problems_;
  std::set<int> counts_;
  int refused_ = 0, wholly_ = 0, partly_ = 0;
  Shortened shortened_;
};

template <class Op, class T>
void groups() {
  using Calls = Sweep<Op, T>;
  Calls sweep;
  const int wide = Calls::wide;
  for (int lanes = 1; lanes <= 32; lanes *= 2) {
    const int64_t full = lanes * Calls::held_in_group(wide), full_single = lanes * Calls::held_in_group(1);
    for (const int max_pack : {0, 1, 2}) {
      k::RowPolicy p = policy(Residency::group, lanes, 1, max_pack);
      // Full, with one pack less or more, with lanes that hold nothing; and the same of single elements.
      for (const int64_t cols : {int64_t(1), int64_t(lanes), int64_t(3 * lanes), int64_t(wide), full - wide, full,
                                 full + wide, full - 1, full_single - 1, full_single, full_single + 1, 100 * full}) {
        if (cols < 1) continue;
        const int pack = Calls::pack(cols, max_pack);
        const bool ends = Calls::with_ends(cols, p);
        const bool compiled = ends || pack == wide || pack == 1;
        const bool fits = ends ? Calls::Engine::ends_fit(cols, lanes) : cols <= lanes * Calls::held_in_group(pack);
        p.max_blocks = cols % 3;
        // Two passes of full blocks, and a last one with groups that have no row.
        sweep.add({2 * 128 / lanes + 3, cols}, p, compiled && fits ? Calls::served : Calls::refused);
      }
    }
  }
  sweep.finish();
  if (!is_shortened()) CHECK(sweep.refused_calls() > 0);
  if (!is_shortened()) CHECK(sweep.counts().count(Calls::Engine::group_packs(wide)) == 1);
}

// Numbers of columns for a block of so many threads, each with up to `steps` steps of `held` columns;
// for some. With the last run of a step whole, and of 1, 2, 3 ... packs; with lanes, and a warp, that have none.
std::vector<int64_t> block_cols(int threads, int pack, int64_t held, int64_t steps) {
  const int64_t stripe = 32 * pack, warps = threads / 32,
                packs = held / pack;  // a stripe: a pack for each lane of a warp
  std::vector<int64_t> cols = {1, 33, pack, stripe, threads * held, threads * held - pack, threads * held + pack};
  for (int64_t more = 1; more < packs; more = more < 3 ? more + 1 : 2 * more + 1) {
    const int64_t per_warp = (steps - 1) * packs + more;
    cols.push_back(warps * per_warp * stripe - 5 * pack);
  }
  cols.push_back(warps * steps * packs * stripe - 5 * pack);
  for (int64_t even = 1; even < packs; even += packs > 8 ? 3 : 1) cols.push_back(warps * even * stripe);
  if (warps > 1) cols.push_back((warps - 1) * stripe);
  if (warps > 2) cols.push_back((warps - 1) * 2 * stripe - 7 * pack);
  for (int64_t& n : cols) n = n < 1 ? pack : n;
  return cols;
}

constexpr int kThreads[] = {32, 64, 96, 128, 256, 512, 768, 1024};

template <class Op, class T>
void registers() {
  using Calls = Sweep<Op, T>;
  Calls sweep;
  for (const int threads : kThreads) {
    for (const int max_pack : {0, 1, 2}) {
      const int widest = max_pack == 0 ? Calls::wide : Calls::pack(16, max_pack);
      for (const int64_t cols : block_cols(threads, widest, Calls::held(widest), 1)) {
        const int pack = Calls::pack(cols, max_pack);
        const bool fits = Calls::allows(Residency::registers, pack, threads) && cols <= threads * Calls::held(pack);
        k::RowPolicy p = policy(Residency::registers, threads, 1, max_pack);
        sweep.add({2, cols}, p, fits ? Calls::served : Calls::refused);
        p.max_blocks = 2;
        sweep.add({5, cols}, p, fits ? Calls::served : Calls::refused);
      }
    }
    sweep.finish(Calls::allows(Residency::registers, 1, threads) ||
                 Calls::allows(Residency::registers, Calls::wide, threads));
  }
  if (!is_shortened()) CHECK(sweep.refused_calls() > 0);
  for (int count = 1; count <= Calls::Engine::packs(Calls::wide) && !is_shortened(); ++count)
    CHECK(sweep.counts().count(count) == 1);
}

template <class Op, class T>
void register_clusters() {
  if (!have_clusters()) return skip("needs an sm_90 GPU");
  using Calls = Sweep<Op, T>;
  Calls sweep;
  for (const int cluster : {2, 4, 8, 16}) {
    for (const int threads : {32, 96, 256, 512}) {
      for (const int max_pack : {0, 1, 2}) {
        const int widest = max_pack == 0 ? Calls::wide : Calls::pack(16, max_pack);
        const int64_t full = cluster * threads * Calls::held(widest);
        // Blocks without columns, a last block with few, all full, one pack too many.
        for (const int64_t cols :
             {int64_t(1), int64_t(17), int64_t(16 * cluster - 15), full / cluster + widest, full - full / cluster,
              full - full / cluster + widest, full - 16, full - widest, full, full + widest, 2 * full}) {
          const int pack = Calls::pack(cols, max_pack);
          const int64_t width =
              ((cols + cluster - 1) / cluster + 15) / 16 * 16;  // a block's part is rounded up to 16 columns
          const bool fits = Calls::allows(Residency::registers, pack, threads) && width <= threads * Calls::held(pack);
          k::RowPolicy p = policy(Residency::registers, threads, cluster, max_pack);
          p.max_blocks = cols % 3;
          sweep.add({3, cols}, p, fits ? Calls::served : Calls::refused);
        }
      }
    }
    sweep.finish();
  }
  if (!is_shortened()) CHECK(!sweep.counts().empty());
}

// How many steps shared memory has room for, of a row without end.
template <class Op, class T>
int64_t most_kept(const k::RowPolicy& policy) {
  const T* x = reinterpret_cast<const T*>(uintptr_t(1) << 20);  // planned with, never read
  const int64_t cols = 1 << 28;
  k::RowPlan plan;
  const k::Status status = k::row_plan(k::Exec{}, Op{}.options(), k::load(x, cols), k::store(const_cast<T*>(x), cols),
                                       2, cols, policy, plan);
  return status ? plan.kept : 0;
}

// Rows that are kept wholly, partly and not at all.
template <class Op, class T>
void shared_and_streamed(int cluster) {
  if (cluster > 1 && !have_clusters()) return skip("needs an sm_90 GPU");
  using Calls = Sweep<Op, T>;
  Calls sweep;
  for (const int threads : kThreads) {
    if (threads * cluster > (cluster == 2 ? 2048 : 1024)) continue;  // rows get long
    for (const int max_pack : {0, 1, 2}) {
      const int widest = max_pack == 0 ? Calls::wide : Calls::pack(16, max_pack);
      const int64_t held = Calls::step(widest);
      for (const Residency residency : {Residency::shared, Residency::streamed}) {
        const k::RowPolicy p = policy(residency, threads, cluster, max_pack);
        const bool shared = residency == Residency::shared;
        const int64_t kept = shared ? most_kept<Op, T>(p) : 0;
        const auto add = [&](int64_t cols) {
          const bool allowed = Calls::with_ends(cols, p)
                                   ? threads <= Calls::Engine::max_block(0, residency, true)
                                   : Calls::allows(residency, Calls::pack(cols, max_pack), threads);
          k::RowPolicy limited = p;
          limited.max_blocks =
              cols % 3 == 0 ? 1 : 0;  // rounded up to one cluster: the next row goes where this one was
          sweep.add({2, cols}, limited,
                    !allowed                          ? Calls::refused
                    : shared && !much_shared_memory() ? Calls::either
                                                      : Calls::served);
        };
        for (const int64_t cols : block_cols(threads, widest, held, 3)) add(cols > 33 ? cluster * cols : cols);
        // One step more than is kept, with ragged ends; in blocks, too: only the first have all their columns.
        if (kept > 0) {
          const int64_t most = cluster * threads * held * kept;
          for (const int64_t cols : {most, most + widest, most + cluster * threads * int64_t(widest) - 5 * widest})
            add(cols);
        }
      }
    }
    sweep.finish(Calls::allows(Residency::streamed, 1, threads) ||
                 Calls::allows(Residency::streamed, Calls::wide, threads));
  }
  for (const int64_t cols : {1000, 4096, 22400, 300000}) {
    for (const Residency residency : {Residency::shared, Residency::streamed}) {
      const bool must = residency == Residency::streamed || much_shared_memory();
      sweep.add({3, cols}, policy(residency, 0, cluster), must ? Calls::served : Calls::either);
      sweep.add({3, cols, 1, 2, 1, 0}, policy(residency, 0, cluster), must ? Calls::served : Calls::either);
    }
  }
  sweep.finish();
  if (much_shared_memory() && !is_shortened()) {
    CHECK(sweep.wholly() > 0);
    CHECK(sweep.partly() > 0);
  }
}

template <class Op, class T>
void split() {
  using Calls = Sweep<Op, T>;
  Calls sweep;
  for (const int threads : {0, 32, 96, 256, 512, 1024}) {
    for (const int max_pack : {0, 1, 2}) {
      for (const int64_t cols : {1, 33, 5000, 65536, 100003}) {
        for (const int64_t rows : {1, 3, 40}) {
          if (rows == 40 && cols > 5000) continue;
          sweep.add({rows, cols}, policy(Residency::split, threads, 1, max_pack),
                    threads <= 512 && !have_clusters() ? Calls::served : Calls::refused);
        }
      }
    }
  }
  sweep.finish(!have_clusters());
}

template <class Op, class T>
void in_place() {
  using Calls = Sweep<Op, T>;
  Calls sweep;
  for (const int64_t cols : {1, 40, 256, 1000, 5001, 20000, 40000}) {
    for (const int64_t gap : {0, 3}) {
      for (const k::RowPolicy& p : residencies(cols, Needs{4 * Calls::words, gap == 0})) {
        sweep.add({9, cols, gap, gap, gap, gap, /*in_place*/ true}, p, Calls::served);
      }
    }
  }
  sweep.finish();
}

template <class Op, class T>
void all_policies() {
  SECTION("groups") { groups<Op, T>(); }
  SECTION("registers") { registers<Op, T>(); }
  SECTION("registers of clusters") { register_clusters<Op, T>(); }
  for (const int cluster : {1, 2, 4, 8, 16}) {
    DYNAMIC_SECTION("shared and streamed, clusters of " << cluster) { shared_and_streamed<Op, T>(cluster); }
  }
  SECTION("split") { split<Op, T>(); }
  SECTION("in place") { in_place<Op, T>(); }
}

}  // namespace

// Four packs: 8, 4, 16 and 2 elements wide.
TEST_CASE("policies: softmax of half") { all_policies<Softmax, k::half>(); }
TEST_CASE("policies: layernorm of float") { all_policies<LayerNorm, float>(); }
TEST_CASE("policies: log_softmax of e4m3") { all_policies<LogSoftmax, k::float8_e4m3>(); }
TEST_CASE("policies: rmsnorm of double") { all_policies<RmsNorm, double>(); }

TEST_CASE("policies: what makes no sense is refused") {
  Stream stream;
  Workspace workspace(8);
  const k::Exec with = workspace.exec(stream), without(stream);
  const auto refused = [](const k::Exec& ex, const k::RowPolicy& p, int64_t cols) {
    Trial<Softmax, k::half> trial(Shape{8, cols}, p);
    INFO(trial.describe());
    k::RowPlan plan;
    CHECK(!trial.plan(ex, plan));
    const k::Status status = trial.launch(ex);
    CHECK((status.code() == k::Code::invalid || status.code() == k::Code::unsupported));
    CHECK(std::string(status.reason()).rfind("softmax: policy:", 0) == 0);
    CHECK(trial.untouched() == "");
  };
  for (const int cluster : {-2, 0, 3, 6, 32}) {
    refused(with, policy(Residency::registers, 128, cluster), 256);
    refused(with, policy(Residency::streamed, 0, cluster), 256);
  }
  for (const Residency residency : {Residency::group, Residency::split}) refused(with, policy(residency, 0, 2), 256);
  for (const int threads : {-1, 3, 33, 64, 128}) refused(with, policy(Residency::group, threads), 8);
  for (const Residency residency : {Residency::registers, Residency::shared, Residency::streamed, Residency::split}) {
    for (const int threads : {-32, 1, 16, 33, 100, 1056, 4096}) refused(with, policy(residency, threads), 256);
  }
  refused(without, policy(Residency::split), 4096);
  refused(k::Exec(stream).workspace(nullptr, 1 << 20), policy(Residency::split), 65536);
  Device<unsigned char> small(1, 16, 16);
  refused(k::Exec(stream).workspace(small.data(), 16), policy(Residency::split), 65536);
  CHECK(small.unchanged());

  k::RowPolicy negative;
  negative.max_pack = -1;
  refused(with, negative, 256);
  negative.max_pack = 0;
  negative.max_blocks = -1;
  refused(with, negative, 256);
  if (!have_clusters()) refused(with, policy(Residency::registers, 128, 2), 256);
}

// No field is ignored: with an automatic residency too, what is asked for is in the plan, or the call is refused.
TEST_CASE("policies: an automatic residency keeps the other fields") {
  Stream stream;
  for (const int64_t rows : {2, 4096}) {
    for (const int64_t cols : {64, 1000, 6000, 30000}) {
      k::RowPolicy threads, cluster, pack, blocks;
      threads.threads = 64;
      cluster.cluster = 2;
      pack.max_pack = 1;
      blocks.max_blocks = 3;
      for (const k::RowPolicy& p : {threads, cluster, pack, blocks}) {
        k::half* x = reinterpret_cast<k::half*>(uintptr_t(1) << 20);  // planned with, never read
        k::RowPlan plan;
        if (!k::row_plan(stream, k::Softmax{}, k::load(x, cols), k::store(x, cols), rows, cols, p, plan)) continue;
        INFO(rows << " x " << cols << ", asked for " << text(p) << ", got " << text(plan.policy));
        CHECK((p.threads == 0 || plan.policy.threads == p.threads));
        CHECK((p.cluster == 1 || plan.policy.cluster == p.cluster));
        CHECK(plan.policy.max_blocks == p.max_blocks);
        CHECK((p.max_pack == 0 || plan.pack <= p.max_pack));
      }
    }
  }
}

// A plan does not depend on what the variable held before.
TEST_CASE("policies: a plan says nothing about the one before") {
  Stream stream;
  k::half* x = reinterpret_cast<k::half*>(uintptr_t(1) << 20);  // planned with, never read
  const auto plan = [&](int64_t cols, const k::RowPolicy& p, k::RowPlan& out) {
    REQUIRE(k::row_plan(stream, k::Softmax{}, k::load(x, cols), k::store(x, cols), 1000, cols, p, out));
  };
  k::RowPlan reused, fresh;
  plan(2048, policy(Residency::shared, 128), reused);
  CHECK(reused.kept > 0);
  plan(2048, policy(Residency::streamed, 64), reused);
  plan(2048, policy(Residency::streamed, 64), fresh);
  CHECK(reused.kept == fresh.kept);
  CHECK(fresh.kept == 0);
  plan(256, policy(Residency::group, 16), reused);
  plan(256, policy(Residency::group, 16), fresh = k::RowPlan{});
  CHECK(fresh.count > 0);
  CHECK(reused.count == fresh.count);
  CHECK(reused.width == fresh.width);
  CHECK(reused.kept == fresh.kept);
}

namespace {

// The first and the last length of every entry, rows of half.
void check_table() {
  using Calls = Sweep<Softmax, k::half>;
  Stream stream;
  const int64_t rows = sm_count() + 1;  // not few
  int64_t from = 16;
  Shortened shortened;
  for (const k::tuning::RowTuning& entry : k::tuning::kRows) {
    if (entry.cluster > 1 && !have_clusters()) continue;
    const bool last = entry.max_packs == k::tuning::kAnyLength;
    const int64_t to = last ? 2 * from + 16 : entry.max_packs * 8;
    if (to < from) continue;
    for (const int64_t cols : {from, to}) {
      Trial<Softmax, k::half> trial(Shape{rows, cols});
      k::RowPlan plan;
      REQUIRE(trial.plan(stream, plan));
      INFO(rows << " x " << cols << ": " << text(plan.policy) << " pack " << plan.pack << " kept " << plan.kept);
      // More than one warp hold a row in registers only when each thread gets the same number of packs.
      const bool uneven = entry.residency == Residency::registers && plan.policy.residency == Residency::streamed;
      CHECK((plan.policy.residency == entry.residency || uneven));
      CHECK(plan.policy.cluster == entry.cluster);
      CHECK(plan.pack == 8);
      if (entry.residency == Residency::group) {
        CHECK(plan.policy.threads <= 32);
      } else if (plan.policy.residency == Residency::registers) {
        CHECK(plan.policy.threads * plan.count * 8 >= cols);
        CHECK((plan.policy.threads == 32 || plan.policy.threads * plan.count * 8 == cols));
      } else {
        // A thread for so many packs, as far as a block may be that large; a warp more than asked for at most.
        const int64_t packs = (cols / 8 + entry.cluster - 1) / entry.cluster, 
                      most = Calls::Engine::max_block(8, plan.policy.residency);
        const int64_t wanted = (packs + entry.packs - 1) / entry.packs;
        CHECK(plan.policy.threads >= std::min(wanted, most));
        CHECK(plan.policy.threads <= std::min((wanted + 31) / 32 * 32 + 32, most));
      }
      if (shortened.leaves_out()) continue;
      REQUIRE(trial.launch(stream));
      stream.wait();
      trial.fetch();
      CHECK(trial.verify(/*step*/ cols > 4096 ? 50 : 10) == "");
    }
    if (last) return;
    from = to + 8;
  }
  FAIL("no entry for any length");
}

template <class Op, class T>
k::Status automatic(int64_t rows, int64_t cols, const k::Exec& ex, k::RowPlan& plan, int shift = 0) {
  const T* x = reinterpret_cast<const T*>(uintptr_t(1) << 20);  // planned with, never read
  T* y = reinterpret_cast<T*>(uintptr_t(1) << 46);
  return k::row_plan(ex, Op{}.options(), k::load(x + shift, cols), k::store(y, cols), rows, cols, {}, plan);
}
k::RowPlan automatic(int64_t rows, int64_t cols, const k::Exec& ex) {
  k::RowPlan plan;
  INFO(rows << " x " << cols);
  REQUIRE((automatic<Softmax, k::half>(rows, cols, ex, plan)));
  return plan;
}

// Every number of columns is served, whatever the pack width that pointer and columns leave.
template <class Op, class T>
void every_length_is_served() {
  Stream stream;
  std::vector<std::string> problems;
  const int64_t many = sm_count() + 1;
  for (const int64_t rows : {int64_t(1), int64_t(7), many / 2, many / 2 + 1, int64_t(100000)}) {
    for (int64_t cols = 1; cols <= 1 << 21; cols += cols < 3000 ? 1 : cols < 40000 ? 61 : 16 * 977 + cols % 16 % 3) {
      for (const int shift : {0, 1}) {
        k::RowPlan plan;
        const k::Status status = automatic<Op, T>(rows, cols, stream, plan, shift);
        std::ostringstream what;
        what << name(dtype_of<T>::value) << " " << rows << " x " << cols << ", shift " << shift << ": " << text(status)
             << ", pack " << plan.pack;
        problems.push_back(status && plan.pack >= 1 && (shift == 0 || plan.pack == 1 || plan.ends) ? "" : what.str());
      }
    }
  }
  report(problems);
}

// And runs: the lengths on both sides of whatever the choice changes at.
template <class Op, class T>
void every_choice_is_right() {
  Stream stream;
  for (const int64_t rows : {int64_t(3), int64_t(sm_count() + 1)}) {
    Trials<Trial<Op, T>> trials;
    k::RowPlan before, plan;
    REQUIRE((automatic<Op, T>(rows, 1, stream, before)));
    for (const int step : {1, 2, 4, 8, 16}) {
      for (int64_t cols = step; cols <= 20000; cols += cols < 3000 ? step : 16 * 7 + step) {
        if (!automatic<Op, T>(rows, cols, stream, plan)) continue;  // reported above
        const bool all = plan.ends || plan.pack == 1;  // of what takes any number of columns each one is tried
        if (text(plan.policy) != text(before.policy) && (plan.pack == step || (step == 1 && all)))
          trials.add(Shape{rows, cols});
        before = plan;
      }
    }
    trials.run(stream, /*step*/ 23);
  }
}

}  // namespace

TEST_CASE("policies: the automatic choice follows the tuning table") { check_table(); }

TEST_CASE("policies: the automatic choice serves every length") {
  SECTION("half") { every_length_is_served<Softmax, k::half>(); }
  SECTION("float") { every_length_is_served<LayerNorm, float>(); }
  SECTION("e4m3") { every_length_is_served<LogSoftmax, k::float8_e4m3>(); }
  SECTION("double") { every_length_is_served<RmsNorm, double>(); }
}

TEST_CASE("policies: the automatic choice is right wherever it changes") {
  SECTION("half") { every_choice_is_right<Softmax, k::half>(); }
  SECTION("float") { every_choice_is_right<LayerNorm, float>(); }
  SECTION("e4m3") { every_choice_is_right<LogSoftmax, k::float8_e4m3>(); }
  SECTION("double") { every_choice_is_right<RmsNorm, double>(); }
}

TEST_CASE("policies: the automatic choice for long and few rows, and for narrow packs") {
  Stream stream;
  Workspace workspace(2);
  const int64_t many = sm_count() + 1;

  for (const int64_t cols : {400000, 1 << 26, 1 << 30}) {
    const Residency beyond = automatic(many, cols, stream).policy.residency;
    CHECK((beyond == Residency::shared || beyond == Residency::streamed));
  }

  // Few rows are shared by several blocks.
  for (const int64_t rows : {int64_t(2), many / 2}) {
    for (const int64_t cols : {8192, 65536, 1 << 20}) {
      Workspace enough(rows);
      const k::RowPolicy few = automatic(rows, cols, enough.exec(stream)).policy;
      INFO(rows << " x " << cols << ": " << text(few));
      if (have_clusters())
        CHECK(few.cluster > 1);
      else
        CHECK(few.residency == Residency::split);
    }
  }
  // Not without enough to do for each, nor in a workspace that is too small or is none.
  for (const int64_t rows : {int64_t(2), many / 2}) CHECK(automatic(rows, 2048, stream).policy.cluster == 1);
  CHECK(automatic(2, 65536, k::Exec(stream).workspace(nullptr, size_t(1) << 30)).policy.residency != Residency::split);

  CHECK(automatic(many, 1024, stream).pack == 8);
  CHECK(!automatic(many, 1024, stream).ends);
  for (const int64_t cols : {1001, 1002, 50257}) {
    CHECK(automatic(many, cols, stream).pack == 8);
    CHECK(automatic(many, cols, stream).ends);
  }
  CHECK(automatic(many, 101, stream).pack == 1);
  CHECK(!automatic(many, 101, stream).ends);
}
