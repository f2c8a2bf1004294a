// Calls from many threads at the same time, and from threads that have another device current.
#include <kernels/sampling.cuh>

#include "support/gpu_decode.cuh"
#include "support/gpu_products.cuh"

using namespace test;

namespace {

// work(t) on so many threads, all begun before any goes on. Catch's macros are not for them: what they return is.
template <class Work>
std::vector<std::string> on_threads(size_t count, const Work& work) {
  std::vector<std::string> problems(count);
  std::atomic<size_t> ready{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      ++ready;
      while (ready < count) std::this_thread::yield();
      try {
        problems[t] = work(t);
      } catch (const std::exception& e) {
        problems[t] = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

std::string problem_of(const k::Status& status) { return status ? "" : status.reason(); }

constexpr int kThreads = 12, kCalls = 300;
constexpr int64_t kOutputs = 200, kColumns = 200;

// Of m tokens with weights.
struct Product {
  using Weights = Plain<k::half, DeviceMemory>;
  Stream stream;
  Matrix<k::half> x;
  Device<k::half> y;
  explicit Product(int64_t m) : x(uint64_t(m), m, kColumns, kColumns + 8, 0, 1), y(m, kOutputs, kOutputs + 8) {}

  k::Status launch(const k::Exec& ex, const Weights& w, const k::MatmulPolicy& policy = {}) const {
    return k::matmul(ex, k::load(static_cast<const k::half*>(x.data()), x.ld()), w.source(), k::store(y.data(), y.ld()),
                     {x.rows(), kOutputs, kColumns}, policy);
  }
  std::string problem(const Weights& w) {
    return compare(y, [&](int64_t m) {
      Row<> row;
      for (int64_t c = 0; c < kOutputs; ++c)
        row.push_back(product(
            m, c, kColumns, [&](int64_t r, int64_t i) { return Real<>(x.value(r, i)); }, w,
            units(k::Path::gemm, kColumns)));
      return row;
    });
  }
};

}  // namespace

// Rows that are kept in 32 to 192 KB of shared memory, by one kernel.
TEST_CASE("threads: one kernel with as many amounts of shared memory as threads") {
  std::vector<std::unique_ptr<Trial<Softmax, k::half>>> trials;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int t = 0; t < kThreads; ++t) {
    k::RowPolicy shared;
    shared.residency = k::Residency::shared;
    shared.threads = t % 2 == 0 ? 1024 : 512;
    trials.push_back(std::make_unique<Trial<Softmax, k::half>>(Shape{2, 24000 + 7000 * t}, shared));
    streams.push_back(std::make_unique<Stream>());
  }
  report(on_threads(kThreads, [&](size_t t) -> std::string {
    for (int i = 0; i < kCalls; ++i) {
      if (const k::Status status = trials[t]->launch(*streams[t]); !status) return status.reason();
    }
    return "";
  }));
  std::vector<std::string> wrong;
  for (int t = 0; t < kThreads; ++t) {
    streams[size_t(t)]->wait();
    trials[size_t(t)]->fetch();
    wrong.push_back(trials[size_t(t)]->verify());
  }
  report(wrong);
}

// Tiles of several heights, 96 to 216 KB.
TEST_CASE("threads: products of several tiles") {
  const Product::Weights w(kOutputs, kColumns, 8, 0);
  std::vector<std::unique_ptr<Product>> products;
  for (int t = 0; t < kThreads; ++t) products.push_back(std::make_unique<Product>(5 + 13 * t));
  report(on_threads(kThreads, [&](size_t t) -> std::string {
    Product& p = *products[t];
    k::MatmulPolicy policy{k::Path::gemm};
    if (t % 3 != 0) policy.tile_tokens = t % 3 == 1 ? 64 : 128;
    for (int i = 0; i < kCalls; ++i) {
      const k::Status status = p.launch(p.stream, w, policy);
      if (!status) return status.reason();
    }
    return "";
  }));
  for (const auto& p : products) {
    p->stream.wait();
    CHECK(p->problem(w) == "");
  }
}

// No thread has used this kernel before: each asks the runtime about it while it records.
TEST_CASE("threads: the first use of a kernel, in graphs") {
  std::vector<std::unique_ptr<Trial<LogSoftmax, k::bfloat16>>> trials;
  std::vector<std::unique_ptr<Stream>> streams;
  k::RowPolicy shared;
  shared.residency = k::Residency::shared;
  shared.threads = 1024;
  for (int t = 0; t < kThreads; ++t) {
    trials.push_back(std::make_unique<Trial<LogSoftmax, k::bfloat16>>(Shape{2, 20000 + 6000 * t}, shared));
    streams.push_back(std::make_unique<Stream>());
  }
  report(on_threads(kThreads, [&](size_t t) -> std::string {
    std::string problem;
    Graph(*streams[t], [&] { problem = problem_of(trials[t]->launch(k::Exec(*streams[t]))); }).replay();
    return problem;
  }));
  std::vector<std::string> wrong;
  for (const auto& trial : trials) {
    trial->fetch();
    wrong.push_back(trial->verify());
  }
  report(wrong);
}

TEST_CASE("threads: what a device has is asked for once, and is the same for all") {
  const k::DeviceInfo want = k::Exec{}.device();
  int sms = 0, shared = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, want.device));
  check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, want.device));
  CHECK((want.sm_count == sms && want.shared_per_block == shared));
  report(on_threads(kThreads, [&](size_t) -> std::string {
    for (int i = 0; i < 1000; ++i) {
      const k::Exec ex;
      const k::DeviceInfo& got = ex.device();
      if (!ex.status() || got.device != want.device || got.sm_count != want.sm_count ||
          got.shared_per_block != want.shared_per_block || got.shared_per_sm != want.shared_per_sm ||
          got.capability != want.capability || got.memory_gbs != want.memory_gbs)
        return "another device";
    }
    return "";
  }));
}

// An Exec of a device that is not there stands for one of another: the call must not run on the current one.
TEST_CASE("threads: a call for another device does not run on the current one") {
  int count = 0, before = -1, after = -1;
  check_cuda(cudaGetDeviceCount(&count));
  check_cuda(cudaGetDevice(&before));
  k::DeviceInfo other = k::Exec{}.device();
  other.device = count;
  Stream stream;
  const k::Exec ex(stream, other);
  Trial<Softmax, k::half> rows(Shape{3, 300});
  const k::Status status = rows.launch(ex);
  INFO(text(status));
  CHECK(status.code() == k::Code::device);
  CHECK(rows.launch(ex).code() == k::Code::device);  // also when the kernel is known already
  check_cuda(cudaGetDevice(&after));
  CHECK(after == before);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(rows.launch(stream));
  CHECK(rows.launch(ex).code() == k::Code::device);
  stream.wait();
}

TEST_CASE("threads: calls go to the device of their Exec") {
  int count = 0, before = 0;
  check_cuda(cudaGetDeviceCount(&count));
  if (count < 2) return skip("one GPU");
  check_cuda(cudaGetDevice(&before));
  const int other = before == 0 ? 1 : 0;
  check_cuda(cudaSetDevice(other));
  {
    const Stream stream;
    const k::Exec ex(stream);
    k::RowPolicy shared;
    shared.residency = k::Residency::shared;
    Trial<Softmax, k::half> rows(Shape{3, 300}), kept(Shape{2, 90000}, shared);
    Trial<LayerNorm, float> few(Shape{1, 200000});  // clusters
    const Product::Weights w(kOutputs, kColumns, 8, 0);
    Product one_token(1), some_tokens(20), many_tokens(300);

    const AttentionCase c{{1, 1}, {9000, 300}, 8, 2, 64};
    const Placement where(Layout::nhd, c.kv_lens, c.kv_heads);
    const DeviceKv<k::half> key(1, where, c.dim, ScaleOf::head, 1, 0, 8),
        value(2, where, c.dim, ScaleOf::head, 1, 0, 8);
    AttentionData<k::half, float, DeviceMemory> attended(c);
    const OnDevice<int32_t> lengths(where.short_lengths);
    const auto kv = k::dense_kv(key.tensor(), value.tensor(), lengths.data());
    const int64_t bytes = int64_t(k::decode_workspace_bytes(ex, attended.shape(), attended.options()));
    Device<unsigned char> memory(1, bytes, bytes);

    const int64_t samples = 3, vocabulary = 32000;
    Device<float> logits(samples, vocabulary, vocabulary);
    randomize(logits, 5);
    Device<int32_t> greedy(samples, 1, 1), drawn(samples, 1, 1);
    const k::Sampling draw = k::Sampling{}.top_p(0.9f).seed(7);

    check_cuda(cudaSetDevice(before));
    for (int i = 0; i < 2; ++i) {
      CHECK(rows.launch(ex));
      CHECK(kept.launch(ex));
      CHECK(few.launch(ex));
      for (const Product* p : {&one_token, &some_tokens, &many_tokens}) CHECK(p->launch(ex, w));
      const k::Status decoded = k::decode<64>(ex, attended.source(), kv, attended.sink(), attended.shape(), k::causal(),
                                              k::Workspace{memory.data(), size_t(bytes)}, attended.options());
      CHECK(decoded);
      const auto in = k::load(static_cast<const float*>(logits.data()), vocabulary);
      CHECK(k::sample(ex, in, greedy.data(), samples, vocabulary, k::Sampling{}.greedy()));
      CHECK(k::sample(ex, in, drawn.data(), samples, vocabulary, draw));
    }
    CHECK(cudaGetLastError() == cudaSuccess);
    int after = -1;
    check_cuda(cudaGetDevice(&after));
    CHECK(after == before);
    stream.wait();
    rows.fetch(), kept.fetch(), few.fetch();
    CHECK(rows.verify() == "");
    CHECK(kept.verify() == "");
    CHECK(few.verify() == "");
    for (Product* p : {&one_token, &some_tokens, &many_tokens}) CHECK(p->problem(w) == "");

    Tally t;
    attended.check(t, "decode", {}, key, value, causal_model(), 1,
                   precision_of(k::DecodeMode::precise, DType::f16, DType::f16, false));
    CHECK_TALLY(t);
    memory.download();
    CHECK(memory.intact());

    // The current device draws the same tokens from the same logits.
    Device<float> same_logits(samples, vocabulary, vocabulary);
    randomize(same_logits, 5);
    Device<int32_t> same_drawn(samples, 1, 1);
    const Stream own;
    REQUIRE(k::sample(own, k::load(static_cast<const float*>(same_logits.data()), vocabulary), same_drawn.data(),
                      samples, vocabulary, draw));
    own.wait();
    greedy.download(), drawn.download(), same_drawn.download();
    for (int64_t r = 0; r < samples; ++r) {
      CHECK(drawn.get(r, 0) == same_drawn.get(r, 0));
      int32_t largest = 0;
      for (int32_t i = 1; i < int32_t(vocabulary); ++i) {
        if (logits.get(r, i) > logits.get(r, largest)) largest = i;
      }
      CHECK(greedy.get(r, 0) == largest);
    }
  }
  check_cuda(cudaSetDevice(before));
}
