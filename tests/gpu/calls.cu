// How calls behave: the same bits every time, in graphs, after a predecessor that is still running, on failing streams.
#include "support/gpu.cuh"

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

// Of a policy that is spelt out; the automatic choice and split rows look at the number of rows.
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
  CHECK(std::string(status.reason()) ==
        std::string("softmax: ") + cudaGetErrorString(cudaErrorStreamCaptureInvalidated));
  CHECK(cudaGetLastError() == cudaSuccess);
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(stream, &graph) != cudaSuccess);
  (void)cudaGetLastError();
  CHECK(trial.untouched() == "");
}
