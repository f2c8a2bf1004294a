// How calls behave: the same bits every time, in graphs, after a predecessor that is still running, on failing streams.
#include "support/gpu.cuh"

#include <kernels/attention.cuh>
#include <kernels/elementwise.cuh>
#include <kernels/matmul.cuh>
#include <kernels/norm_heads.cuh>
#include <kernels/router.cuh>
#include <kernels/sampling.cuh>

#include <string>

using namespace test;

namespace {

template <class Op, class T>
void same_bits() {
  Stream stream;
  const int64_t rows = 150;
  Workspace workspace(rows);
  Shortened shortened;
  for (const int64_t cols : {40, 256, 1001, 5000, 20000}) {
    for (k::RowPolicy policy : residencies(cols)) {
      if (shortened.leaves_out()) continue;
      Trial<Op, T> trial(Shape{rows, cols}, policy);
      INFO(trial.describe());
      std::vector<unsigned char> first;
      for (const int64_t max_blocks : {0, 1, 7, 100, 0}) {
        trial.policy().max_blocks = max_blocks;
        REQUIRE(trial.launch(workspace.exec(stream)));
        stream.wait();
        trial.fetch();
        if (first.empty()) {
          first = trial.bits();
          CHECK(trial.verify(/*step*/ 50) == "");
        }
        INFO("max_blocks " << max_blocks);
        CHECK((trial.bits() == first));
      }
    }
  }
}

}  // namespace

TEST_CASE("calls: softmax gives the same bits every time, whatever the grid") { same_bits<Softmax, k::half>(); }
TEST_CASE("calls: layernorm gives the same bits every time, whatever the grid") { same_bits<LayerNorm, float>(); }

// Of a policy that is spelt out, and of few rows; the automatic choice and split rows look at how many there are, and
// streamed rows at whether there are more than twice as many as multiprocessors.
TEST_CASE("calls: a row gives the same bits alone and inside a batch") {
  Stream stream;
  const int64_t rows = 40, chosen = 17;
  for (const int64_t cols : {48, 256, 1001, 5000, 20000}) {
    // The output is not rounded to half: a difference of one bit shows.
    Device<k::half> x(rows, cols, cols + 8);
    Device<float> all(rows, cols, cols + 8), one(1, cols, cols);
    randomize(x, 1);
    for (const k::RowPolicy& p : residencies(cols)) {
      if (p.residency == k::Residency::automatic || p.residency == k::Residency::split) continue;
      INFO(cols << " columns, " << text(p));
      REQUIRE(k::softmax(stream, k::load(x.data(), x.ld()), k::store(all.data(), all.ld()), rows, cols, p));
      REQUIRE(k::softmax(stream, k::load(x.data() + chosen * x.ld(), x.ld()), k::store(one.data(), cols), 1, cols, p));
      stream.wait();
      all.download();
      one.download();
      bool same = true;
      for (int64_t c = 0; c < cols; ++c) {
        const float a = all.get(chosen, c), b = one.get(0, c);
        same = same && std::memcmp(&a, &b, sizeof(a)) == 0;
      }
      CHECK(same);
      CHECK(mismatch(
                0,
                [&] {
                  Row<float> row = row_of(x, chosen);
                  softmax(row);
                  return row;
                }(),
                [&](int64_t c) { return one.get(0, c); }) == "");
    }
  }
}

namespace {

bool same_plan(const k::RowPlan& a, const k::RowPlan& b) {
  return text(a.policy) == text(b.policy) && a.pack == b.pack && a.width == b.width && a.warp_width == b.warp_width &&
         a.count == b.count && a.kept == b.kept && a.chunks == b.chunks && a.ends == b.ends;
}

// The bits of a row alone, and in batches of which it is not the same row; and what the plans say.
template <class Op, class T>
void same_in_every_batch() {
  Stream stream;
  const int64_t chosen = 133, many = std::max<int64_t>(220, 2 * sm_count() + 8);
  struct Rows {
    int64_t cols, ld;
  };
  // That lie alike between multiples of 16 bytes, packed or not, and that do not; the longest is shared by a cluster.
  const Rows all[] = {{1024, 1024}, {8192, 8192}, {9001, 9008}, {9001, 9001}, {16384, 16384}, {140000, 140000}};
  struct Batch {
    int64_t first, rows;
  };
  const Batch batches[] = {{chosen, 1}, {chosen - 2, 7}, {chosen - 120, 200}, {0, many}};
  for (const Rows& size : all) {
    const int64_t cols = size.cols, ld = size.ld;
    if (is_shortened() && cols > 20000) continue;
    Device<T> x(many, cols, ld);
    Device<float> y(many, cols, ld), mean(many, 1, 1), rstd(many, 1, 1);
    randomize(x, 1);
    for (k::RowPolicy p : {k::RowPolicy{}, policy(k::Residency::streamed, 64), policy(k::Residency::streamed)}) {
      p.batch_invariant = true;
      std::vector<float> alone;
      k::RowPlan plan_alone;
      for (const Batch& batch : batches) {
        INFO(batch.rows << " of " << cols << " columns " << ld << " apart, " << text(p));
        const auto in = k::load(static_cast<const T*>(x.data()) + batch.first * ld, ld);
        const auto out = k::store(y.data() + batch.first * ld, ld);
        k::RowPlan plan;
        REQUIRE(k::row_plan(stream, Op{}.options(), in, out, batch.rows, cols, p, plan));
        CHECK(plan.policy.batch_invariant);
        CHECK(plan.ends == (ld > cols));
        CHECK((plan.pack == 1) == (cols % 2 != 0 && ld == cols));
        CHECK((*plan.why_not != 0) == (plan.pack == 1));
        check_cuda(cudaMemsetAsync(y.data(), 0xff, size_t(many * ld) * sizeof(float), stream));
        REQUIRE(Op{}.run(stream, in, out, batch.rows, cols, p, mean.data() + batch.first, rstd.data() + batch.first));
        stream.wait();
        y.download(), mean.download(), rstd.download();
        std::vector<float> row;
        for (int64_t c = 0; c < cols; ++c) row.push_back(y.get(chosen, c));
        if (Op::has_mean) row.push_back(mean.get(chosen, 0));
        if (Op::has_rstd) row.push_back(rstd.get(chosen, 0));
        if (alone.empty()) {
          alone = row, plan_alone = plan;
          Row<float> want = row_of(x, chosen);
          Op{}.expect(want);
          CHECK(mismatch(chosen, want, [&](int64_t c) { return y.get(chosen, c); }) == "");
        }
        CHECK(same_plan(plan, plan_alone));
        CHECK(std::memcmp(row.data(), alone.data(), row.size() * sizeof(float)) == 0);
      }
    }
  }
}

}  // namespace

TEST_CASE("calls: batch_invariant gives a row of softmax the same bits in every batch") {
  same_in_every_batch<Softmax, k::half>();
}
TEST_CASE("calls: batch_invariant gives a row of layernorm the same bits in every batch") {
  same_in_every_batch<LayerNorm, float>();
}
TEST_CASE("calls: batch_invariant gives a row of rmsnorm the same bits in every batch") {
  same_in_every_batch<RmsNorm, k::half>();
}

// What it rules out is there without it.
TEST_CASE("calls: without batch_invariant few long rows are shared by more blocks") {
  Stream stream;
  Workspace workspace(1);
  const k::half* x = reinterpret_cast<const k::half*>(uintptr_t(1) << 20);  // planned with, never read
  float* y = reinterpret_cast<float*>(uintptr_t(1) << 46);
  for (const bool invariant : {false, true}) {
    k::RowPolicy p;
    p.batch_invariant = invariant;
    k::RowPlan plan;
    REQUIRE(k::row_plan(workspace.exec(stream), k::Softmax{}, k::load(x, 8192), k::store(y, 8192), 1, 8192, p, plan));
    INFO(text(plan.policy));
    CHECK((plan.policy.cluster > 1 || plan.policy.residency == k::Residency::split) == !invariant);
    CHECK(plan.policy.batch_invariant == invariant);
    p.residency = k::Residency::split;
    const k::Status split =
        k::row_plan(workspace.exec(stream), k::Softmax{}, k::load(x, 8192), k::store(y, 8192), 1, 8192, p, plan);
    if (invariant) CHECK(split.code() == k::Code::invalid);
  }
}

namespace {

template <class Op, class T>
void in_graphs() {
  Stream stream;
  const int64_t rows = 5;
  Workspace workspace(rows);
  for (const int64_t cols : {256, 5000, 40000}) {
    for (const k::RowPolicy& policy : residencies(cols)) {
      for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
        Trial<Op, T> trial(Shape{rows, cols}, policy);
        INFO(trial.describe());
        // The Exec, too, is made while capturing.
        k::Status status;
        const Graph graph(stream, [&] { status = trial.launch(workspace.exec(stream)); }, mode);
        INFO(text(status));
        CHECK(status);
        for (const int replay : {1, 2}) {
          INFO("replay " << replay);
          Random random{uint64_t(replay)};
          trial.input([&](int64_t, int64_t) { return replay * random.normal(); });
          graph.replay();
          trial.fetch();
          CHECK(trial.verify() == "");
        }
      }
    }
  }
  CHECK(workspace.intact());
}

}  // namespace

TEST_CASE("calls: softmax in a graph, replayed with other inputs") { in_graphs<Softmax, k::half>(); }
TEST_CASE("calls: layernorm in a graph, replayed with other inputs") { in_graphs<LayerNorm, float>(); }

TEST_CASE("calls: programmatic launches wait for what they read") {
  Stream stream;
  const int64_t rows = 8;
  Workspace workspace(rows);
  for (const int64_t cols : {256, 5000, 40000}) {
    for (const k::RowPolicy& policy : residencies(cols)) {
      Device<k::half> source(rows, cols, cols), x(rows, cols, cols), y(rows, cols, cols), z(rows, cols, cols);
      randomize(source, 1);
      const k::Exec ex = workspace.exec(stream).programmatic(true);
      CHECK(ex.programmatic());
      for (int repeat = 0; repeat < 3; ++repeat) {
        check_cuda(cudaMemsetAsync(x.data(), 0, rows * cols * sizeof(k::half), stream));
        slow_copy<<<16, 256, 0, stream>>>(source.data(), x.data(), rows * cols, 200000);
        check_cuda(cudaGetLastError());
        REQUIRE(k::softmax(ex, k::load(x.data(), cols), k::store(y.data(), cols), rows, cols, policy));
        // The second call reads what the first writes.
        REQUIRE(k::softmax(ex, k::load(y.data(), cols), k::store(z.data(), cols), rows, cols, policy));
        stream.wait();
        INFO(cols << " columns, " << text(policy) << ", repeat " << repeat);
        CHECK(compare(y, [&](int64_t r) {
                Row<float> row = row_of(source, r);
                softmax(row);
                return row;
              }) == "");
        CHECK(compare(z, [&](int64_t r) {
                Row<float> row = row_of(y, r);
                softmax(row);
                return row;
              }) == "");
      }
    }
  }
}

TEST_CASE("calls: two streams, two workspaces") {
  if (have_clusters()) return skip("rows need no workspace where there are clusters");
  Stream streams[2];
  Workspace workspace_0(3), workspace_1(3);
  const int64_t cols = 100000;
  Trial<Softmax, k::half> a(Shape{3, cols}, policy(k::Residency::split)),
      b(Shape{3, cols}, policy(k::Residency::split));
  b.input([](int64_t r, int64_t c) { return 0.001 * double((c * 31 + r) % 5000); });
  for (int i = 0; i < 20; ++i) {
    REQUIRE(a.launch(workspace_0.exec(streams[0])));
    REQUIRE(b.launch(workspace_1.exec(streams[1])));
  }
  for (const Stream& stream : streams) stream.wait();
  a.fetch();
  b.fetch();
  CHECK(a.verify() == "");
  CHECK(b.verify() == "");
}

TEST_CASE("calls: the default stream") {
  Trial<Softmax, k::half> trial(Shape{5, 300});
  REQUIRE(trial.launch(cudaStream_t(nullptr)));
  check_cuda(cudaStreamSynchronize(nullptr));
  trial.fetch();
  CHECK(trial.verify() == "");
  CHECK(k::Exec{}.stream() == nullptr);
  CHECK(k::Exec{}.status());
  CHECK(k::Exec{}.device().sm_count > 0);
}

// A capture that something else has spoilt: the call reports what the runtime says, and leaves no error behind.
TEST_CASE("calls: what the runtime refuses comes back as a status") {
  Stream stream;
  Trial<Softmax, k::half> trial(Shape{5, 300});
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaStreamSynchronize(stream) != cudaSuccess);
  (void)cudaGetLastError();
  const k::Status status = trial.launch(k::Exec(cudaStream_t(stream)));
  CHECK(status.code() == k::Code::device);
  CHECK(status.native() == int(cudaErrorStreamCaptureInvalidated));
  const auto refused = [](const k::Status& of_call, const char* call) {
    CHECK(of_call.code() == k::Code::device);
    CHECK(std::string(of_call.reason()) ==
          std::string(call) + ": " + cudaGetErrorString(cudaErrorStreamCaptureInvalidated));
  };
  refused(status, "softmax");
  Device<float> x(1, 64, 64), y(1, 64, 64);
  Device<k::half> w(64, 64, 64);
  Device<int32_t> ids(1, 64, 64);
  Device<unsigned char> room(1, 1 << 20, 1 << 20);
  const auto in = k::load(x.data(), 64);
  const auto out = k::store(y.data(), 64);
  refused(k::copy(stream, in, out, 1, 64), "copy");
  refused(k::sample(stream, in, ids.data(), 1, 64), "sample");
  refused(k::log_probs(stream, in, 1, 64, k::LogProbs{}.of(ids.data(), y.data())), "log_probs");
  refused(k::verify(stream, in, k::drafts(ids.data(), 0), ids.data(), ids.data() + 32, {1, 0, 64}), "verify");
  refused(k::route(stream, in, ids.data(), y.data(), {1, 64, 2}), "route");
  refused(k::norm_heads(stream, in, out, {1, 1, 64, 1}), "norm_heads");
  refused(k::matmul<k::Path::gemv>(stream, in, k::load(w.data(), 64), out, {1, 64, 64}), "matmul");
  const auto kv = k::dense_kv(k::nhd(w.data(), 64, 1, 64), k::nhd(w.data(), 64, 1, 64), 64);
  const k::AttentionShape one{1, 1, 1, 1, 64};
  refused(k::attention<64>(stream, in, kv, out, one, k::causal()), "attention");
  refused(k::decode<64>(stream, in, kv, out, one, k::causal(), k::Workspace{room.data(), 1 << 20}), "decode");
  refused(k::merge_states(stream, in, in, out, {1, 1, 1, 64}), "merge_states");
  CHECK(cudaGetLastError() == cudaSuccess);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(stream, &graph) != cudaSuccess);
  (void)cudaGetLastError();
  CHECK(trial.untouched() == "");
}
