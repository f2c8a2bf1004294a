// Every row policy: served and right, or refused with a reason and nothing written; and what the automatic choice
// takes.
#include "support/gpu.cuh"

#include <kernels/tuning/row.h>

using namespace test;
using k::Residency;

namespace {

bool have_clusters() { return k::Exec{}.device().capability >= 90; }

// Calls of one operation with many policies, on one stream and with one workspace.
template <class Op, class T>
class Sweep {
 public:
  using OneTrial = Trial<Op, T>;
  static constexpr int64_t words = sizeof(k::compute_t<T>) / 4;  // of a value in registers or shared memory

  void add(const Shape& shape, const k::RowPolicy& policy, bool must_be_served) {
    const k::Exec ex = workspace_.exec(stream_);
    auto trial = std::make_unique<OneTrial>(shape, policy);
    k::RowPlan plan;
    const k::Status planned = trial->plan(ex, plan);
    const k::Status status = trial->launch(ex);
    const std::string what = trial->describe() + ": ";
    if (planned.code() != status.code()) fail(what + "the plan says " + text(planned) + ", the call " + text(status));
    if (status) {
      if (!as_asked(policy, plan)) fail(what + "the plan is another: " + text(plan.policy));
      served_.push_back(std::move(trial));
      return;
    }
    ++refused_;
    if (must_be_served) fail(what + text(status));
    if (status.code() == k::Code::device || *status.reason() == 0)
      fail(what + "refused without a proper reason: " + text(status));
    fail(trial->untouched());
  }

  // Everything served must be right.
  void finish() {
    stream_.wait();
    for (auto& trial : served_) trial->fetch();
    std::vector<std::string> problems(served_.size());
    in_parallel(served_.size(), [&](size_t i) { problems[i] = served_[i]->verify(); });
    problems.insert(problems.end(), problems_.begin(), problems_.end());
    report(problems);
    CHECK(workspace_.intact());
    CHECK(!served_.empty());
  }
  int refused() const { return refused_; }

 private:
  static bool as_asked(const k::RowPolicy& asked, const k::RowPlan& plan) {
    const k::RowPolicy& got = plan.policy;
    if (got.threads <= 0 || plan.pack <= 0 || got.residency == Residency::automatic) return false;
    if (asked.max_pack > 0 && plan.pack > asked.max_pack) return false;
    return asked.residency == Residency::automatic ||
           (got.residency == asked.residency && (asked.threads == 0 || got.threads == asked.threads) &&
            got.cluster == asked.cluster && got.rows_per_group == asked.rows_per_group &&
            (asked.walk == 0 || got.walk == asked.walk));
  }
  void fail(const std::string& problem) {
    if (!problem.empty()) problems_.push_back(problem);
  }

  Stream stream_;
  Workspace workspace_{128};
  std::vector<std::unique_ptr<OneTrial>> served_;
  std::vector<std::string> problems_;
  int refused_ = 0;
};

template <class Op, class T>
void groups() {
  Sweep<Op, T> sweep;
  for (int lanes = 1; lanes <= 32; lanes *= 2) {
    for (const int max_pack : {0, 1, 2}) {
      for (const int rows : {1, 2}) {
        k::RowPolicy p = rows == 2 ? two_rows(lanes) : policy(Residency::group, lanes);
        p.max_pack = max_pack;
        for (const int64_t cols :
             {1, lanes, 3 * lanes, 8 * lanes - 1, 8 * lanes, 16 * lanes, 32 * lanes, 100 * lanes}) {
          const bool wide = max_pack == 0 && cols % 16 == 0;
          const bool fits = cols * sweep.words <= 8 * lanes;
          p.walk = int(cols % 3);
          sweep.add({67, cols}, p, fits && (wide || (rows == 1 && max_pack == 1)));
        }
      }
    }
  }
  sweep.finish();
  CHECK(sweep.refused() > 0);
}

template <class Op, class T>
void registers() {
  Sweep<Op, T> sweep;
  for (const int threads : {32, 64, 96, 128, 256, 512, 1024}) {
    for (const int max_pack : {0, 1, 2}) {
      for (const int64_t cols : {1, threads, 8 * threads - 1, 8 * threads, 16 * threads, 32 * threads, 100 * threads}) {
        const bool fits = threads <= 256 && cols * sweep.words <= 8 * threads;
        k::RowPolicy p = policy(Residency::registers, threads, 1, max_pack);
        sweep.add({4, cols}, p, fits);
        p.walk = 3;
        sweep.add({7, cols}, p, fits);
      }
    }
  }
  sweep.finish();
  CHECK(sweep.refused() > 0);
}

template <class Op, class T>
void register_clusters() {
  if (!have_clusters()) return skip("needs an sm_90 GPU");
  Sweep<Op, T> sweep;
  for (const int cluster : {2, 4, 8, 16}) {
    for (const int threads : {32, 128, 256, 512}) {
      const int64_t all = int64_t(cluster) * threads;
      for (const int max_pack : {0, 1, 2}) {
        for (const int64_t cols :
             {int64_t(1), int64_t(17), int64_t(8 * threads - 1), 7 * all / sweep.words, 16 * all + 1, 32 * all}) {
          // A block's part is rounded up to 16 columns.
          const bool fits = threads <= 256 && cols * sweep.words <= cluster * (8 * threads - 16 * sweep.words);
          k::RowPolicy p = policy(Residency::registers, threads, cluster, max_pack);
          p.walk = int(cols % 3);
          sweep.add({3, cols}, p, fits);
        }
      }
    }
  }
  sweep.finish();
}

template <class Op, class T>
void shared_and_streamed() {
  Sweep<Op, T> sweep;
  for (const int cluster : {1, 2, 8, 16}) {
    if (cluster > 1 && !have_clusters()) continue;
    for (const int threads : {0, 32, 128, 256, 512, 1024}) {
      for (const int max_pack : {0, 1, 2}) {
        for (const int64_t cols : {1, 33, 1000, 4096, 22400}) {
          // Shared memory holds 92 KB on every GPU, and only rows that the widest packs divide.
          const bool fits = cols * int64_t(sizeof(T)) <= cluster * 92 * 1024 && max_pack == 0 && cols % 16 == 0;
          sweep.add({3, cols}, policy(Residency::shared, threads, cluster, max_pack), fits && threads <= 256);
          sweep.add({3, cols}, policy(Residency::streamed, threads, cluster, max_pack), threads <= 256);
        }
      }
    }
    const int64_t most = 92 * 1024 / int64_t(sizeof(T)) * cluster;
    sweep.add({3, most}, policy(Residency::shared, 0, cluster), true);
    sweep.add({3, most - 7}, policy(Residency::shared, 0, cluster), false);
    sweep.add({3, 3 * most}, policy(Residency::shared, 0, cluster), false);
    sweep.add({3, 300000}, policy(Residency::streamed, 0, cluster), true);
  }
  sweep.finish();
  CHECK(sweep.refused() > 0);
}

template <class Op, class T>
void split() {
  Sweep<Op, T> sweep;
  for (const int threads : {0, 32, 256, 512, 1024}) {
    for (const int max_pack : {0, 1, 2}) {
      for (const int64_t cols : {1, 33, 5000, 65536, 100003}) {
        for (const int64_t rows : {1, 3, 40}) {
          if (rows == 40 && cols > 5000) continue;
          sweep.add({rows, cols}, policy(Residency::split, threads, 1, max_pack), threads <= 256);
        }
      }
    }
  }
  sweep.finish();
}

template <class Op, class T>
void in_place() {
  Sweep<Op, T> sweep;
  for (const int64_t cols : {1, 40, 256, 1000, 5001, 20000, 40000}) {
    for (const int64_t gap : {0, 3}) {
      for (const k::RowPolicy& p : residencies(cols, Needs{4 * sweep.words, int64_t(sizeof(T)), gap == 0})) {
        sweep.add({9, cols, gap, gap, gap, gap, /*in_place*/ true}, p, true);
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
  SECTION("shared and streamed") { shared_and_streamed<Op, T>(); }
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
    CHECK(std::string(status.reason()).rfind("policy:", 0) == 0);
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
  for (const int rows : {-1, 0, 3, 4}) {
    k::RowPolicy p = policy(Residency::group, 32);
    p.rows_per_group = rows;
    refused(with, p, 256);
  }
  for (const Residency residency : {Residency::registers, Residency::shared, Residency::streamed, Residency::split}) {
    k::RowPolicy p = policy(residency);
    p.rows_per_group = 2;
    refused(with, p, 256);
  }
  for (const Residency residency : {Residency::shared, Residency::streamed, Residency::split}) {
    k::RowPolicy p = policy(residency);
    p.walk = 2;
    refused(with, p, 256);
  }
  for (const Residency residency : {Residency::group, Residency::registers}) {
    k::RowPolicy p = policy(residency);
    p.walk = -1;
    refused(with, p, 256);
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
      k::RowPolicy threads, cluster, two, pack, walk;
      threads.threads = 64;
      cluster.cluster = 2;
      two.rows_per_group = 2;
      pack.max_pack = 1;
      walk.walk = 3;
      for (const k::RowPolicy& p : {threads, cluster, two, pack, walk}) {
        k::half* x = reinterpret_cast<k::half*>(uintptr_t(1) << 20);  // planned with, never read
        k::RowPlan plan;
        if (!k::row_plan(stream, k::Softmax{}, k::load(x, cols), k::store(x, cols), rows, cols, p, plan)) continue;
        INFO(rows << " x " << cols << ", asked for " << text(p) << ", got " << text(plan.policy));
        CHECK((p.threads == 0 || plan.policy.threads == p.threads));
        CHECK((p.cluster == 1 || plan.policy.cluster == p.cluster));
        CHECK((p.rows_per_group == 1 || plan.policy.rows_per_group == p.rows_per_group));
        CHECK((p.walk == 0 || plan.policy.walk == p.walk));
        CHECK((p.max_pack == 0 || plan.pack <= p.max_pack));
      }
    }
  }
}

namespace {

void check_table() {
  Stream stream;
  const int64_t rows = sm_count();
  int64_t from = 16;
  for (const k::tuning::RowTuning& entry : k::tuning::kRows) {
    if (entry.cluster > 1 && !have_clusters()) continue;
    for (const int64_t cols : {from, entry.max_cols}) {
      Trial<Softmax, k::half> trial(Shape{rows, cols});
      k::RowPlan plan;
      REQUIRE(trial.plan(stream, plan));
      INFO(rows << " x " << cols << ": " << text(plan.policy) << " pack " << plan.pack);
      CHECK(plan.policy.residency == entry.residency);
      CHECK(plan.policy.cluster == entry.cluster);
      CHECK(plan.policy.rows_per_group == entry.rows_per_group);
      CHECK(plan.policy.walk == entry.walk);
      CHECK(plan.pack == 8);
      REQUIRE(trial.launch(stream));
      stream.wait();
      trial.fetch();
      CHECK(trial.verify(/*step*/ cols > 4096 ? 50 : 10) == "");
    }
    from = entry.max_cols + 16;
  }
}

k::Status automatic(int64_t rows, int64_t cols, const k::Exec& ex, k::RowPlan& plan, int shift = 0) {
  const k::half* x = reinterpret_cast<const k::half*>(uintptr_t(1) << 20);  // planned with, never read
  return k::row_plan(ex, k::Softmax{}, k::load(x + shift, cols), k::store(const_cast<k::half*>(x), cols), rows, cols,
                     {}, plan);
}
k::RowPlan automatic(int64_t rows, int64_t cols, const k::Exec& ex) {
  k::RowPlan plan;
  INFO(rows << " x " << cols);
  REQUIRE(automatic(rows, cols, ex, plan));
  return plan;
}

}  // namespace

TEST_CASE("policies: the automatic choice follows the tuning table") { check_table(); }

TEST_CASE("policies: the automatic choice beyond the table, for few rows and for narrow packs") {
  Stream stream;
  Workspace workspace(2);
  const int64_t many = sm_count();

  const auto beyond = automatic(many, 400000, stream).policy;
  CHECK((beyond.residency == Residency::shared || beyond.residency == Residency::streamed));
  CHECK(beyond.cluster == (have_clusters() ? 8 : 1));
  CHECK(automatic(many, 1 << 26, stream).policy.residency == Residency::streamed);

  // Few rows are shared by several blocks.
  for (const int64_t cols : {8192, 65536, 1 << 20}) {
    const k::RowPolicy few = automatic(2, cols, workspace.exec(stream)).policy;
    INFO("2 x " << cols << ": " << text(few));
    if (have_clusters())
      CHECK(few.cluster > 1);
    else
      CHECK(few.residency == Residency::split);
  }

  // Every number of columns is served, whatever the pack width that pointer and columns leave.
  std::vector<std::string> problems;
  for (const int64_t rows : {int64_t(1), int64_t(7), many, int64_t(100000)}) {
    for (int64_t cols = 1; cols <= 400000; cols += cols < 3000 ? 1 : 997) {
      for (const int shift : {0, 1}) {
        k::RowPlan plan;
        const k::Status status = automatic(rows, cols, stream, plan, shift);
        std::ostringstream what;
        what << rows << " x " << cols << ", shift " << shift << ": " << text(status) << ", pack " << plan.pack;
        problems.push_back(status && plan.pack >= 1 && (shift == 0 || plan.pack == 1) ? "" : what.str());
      }
    }
  }
  report(problems);
  CHECK(automatic(many, 1024, stream).pack == 8);
  CHECK(automatic(many, 1002, stream).pack == 2);
  CHECK(automatic(many, 1001, stream).pack == 1);
}
