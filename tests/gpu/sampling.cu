// Sampling on the GPU: against the oracle of the CPU's tests, with one block for a row and with clusters of every size.
#include "support/gpu.cuh"

#include <kernels/sampling.cuh>

#include "support/sampling.h"

using namespace test;

namespace {

// As if the device had so many multiprocessors, which makes fewer blocks for a row, and so much shared memory for one.
struct OnDevice {
  cudaStream_t stream;
  int multiprocessors, shared = 0;
  template <class Load, class Token>
  k::Status operator()(const Load& logits, Token* tokens, int64_t rows, int64_t vocabulary,
                       const k::Sampling& options) const {
    const k::Exec whole(stream);
    k::DeviceInfo part = whole.device();
    if (multiprocessors > 0) part.sm_count = multiprocessors;
    if (shared > 0) part.shared_per_block = std::min(part.shared_per_block, shared);
    const k::Status status = k::sample(k::Exec(stream, part), logits, tokens, rows, vocabulary, options);
    check_cuda(cudaStreamSynchronize(stream));
    return status;
  }
};

std::vector<SampleRulesOf> listed_rules() {
  std::vector<SampleRulesOf> listed;
  for (const SampleRulesOf& r : sample_rules()) {
    if (r.listed) listed.push_back(r);
  }
  return listed;
}

}  // namespace

TEST_CASE("tokens of every kind of row, by every rule, on the GPU") {
  Tally t;
  Stream stream;
  for (const int64_t n : {1, 2, 31, 33, 200, 1000, 1028})
    check_samples<DeviceMemory, float>(t, {8, n, n % 3, n % 2}, sample_rules(), OnDevice{stream, 0});
  check_samples<DeviceMemory, float>(t, {8, 1028, 4, 0}, sample_rules(), OnDevice{stream, 0});
  for (const int multiprocessors : {1, 8, 16, 0}) {
    check_samples<DeviceMemory, float>(t, {8, 32000, 0, 0}, sample_rules(), OnDevice{stream, multiprocessors});
    check_samples<DeviceMemory, float>(t, {8, 31999, 1, 1}, sample_rules(), OnDevice{stream, multiprocessors});
  }
  CHECK_TALLY(t);
}

TEST_CASE("vocabularies as large as they get, on the GPU") {
  Tally t;
  Stream stream;
  const std::vector<SampleRulesOf> some = {rules_of("greedy", 0, 0), rules_of("top_k, top_p", 0.8f, 50, 0.9f),
                                           rules_of("plain", 1, 0), sample_rules()[21]};
  check_samples<DeviceMemory, float>(t, {8, 50257, 1, 1}, some, OnDevice{stream, 0});
  check_samples<DeviceMemory, float>(t, {8, 128256, 0, 0}, some, OnDevice{stream, 0});
  check_samples<DeviceMemory, float>(t, {8, 128256, 0, 0}, some, OnDevice{stream, 4});
  check_samples<DeviceMemory, float>(t, {2, 1000000, 0, 0}, some, OnDevice{stream, 0});
  check_samples<DeviceMemory, float>(t, {1, 4194304, 0, 0}, some, OnDevice{stream, 0});
  CHECK_TALLY(t);
}

// A block has room for 3,072 different tokens of a list: of 3,500, some of which are the same, and not of 6,000.
TEST_CASE("lists of more tokens than a block has room for, on the GPU") {
  Tally t;
  Stream stream;
  for (const int multiprocessors : {4, 0}) {
    for (const int64_t length : {3500, 6000})
      check_samples<DeviceMemory, float>(t, {8, 32000, 0, 0, length}, listed_rules(),
                                         OnDevice{stream, multiprocessors});
    check_samples<DeviceMemory, float>(t, {8, 1028, 0, 0, 3500}, listed_rules(), OnDevice{stream, multiprocessors});
  }
  CHECK_TALLY(t);
}

// As many different tokens as there is room for, and one more; the lists say some of them twice.
TEST_CASE("lists of just as many tokens as a block has room for, on the GPU") {
  Tally t;
  Stream stream;
  for (const int multiprocessors : {4, 0}) {
    for (const int64_t different : {3071, 3072, 3073})
      check_samples<DeviceMemory, float>(t, {8, 32000, 0, 0, different + 20, different}, listed_rules(),
                                         OnDevice{stream, multiprocessors});
  }
  CHECK_TALLY(t);
}

// More tokens than a list has bits for, so that others share these, and clusters of 16 and 8 blocks.
TEST_CASE("listed tokens of a large vocabulary, on the GPU") {
  Tally t;
  Stream stream;
  for (const int multiprocessors : {0, 40})
    check_samples<DeviceMemory, float>(t, {8, 128256, 0, 0}, listed_rules(), OnDevice{stream, multiprocessors});
  CHECK_TALLY(t);
}

// As sm_86, sm_89 and sm_120 have it: too little for listed tokens, and for all of the logits that are kept otherwise.
TEST_CASE("blocks with 99 KB of shared memory, on the GPU") {
  Tally t;
  Stream stream;
  check_samples<DeviceMemory, float>(t, {8, 32000, 0, 0}, sample_rules(), OnDevice{stream, 0, 99 << 10});
  CHECK_TALLY(t);
}

TEST_CASE("logits of 16 bits, on the GPU") {
  Tally t;
  Stream stream;
  check_samples<DeviceMemory, k::bfloat16>(t, {8, 32000, 0, 0}, sample_rules(), OnDevice{stream, 0});
  check_samples<DeviceMemory, k::bfloat16>(t, {8, 5001, 1, 1}, sample_rules(), OnDevice{stream, 0});
  CHECK_TALLY(t);
}

TEST_CASE("parameters, seeds and steps of each row, and rows without a token, on the GPU") {
  Tally t;
  Stream stream;
  check_sample_rows<DeviceMemory>(t, OnDevice{stream, 0});
  CHECK_TALLY(t);
}

TEST_CASE("what Hugging Face's processors keep, on the GPU") {
  Tally t;
  Stream stream;
  check_golden<DeviceMemory>(t, OnDevice{stream, 0});
  CHECK_TALLY(t);
}

TEST_CASE("tokens that every processor draws, on the GPU") {
  Tally t;
  Stream stream;
  check_known<DeviceMemory>(t, OnDevice{stream, 0});
  CHECK_TALLY(t);
}

TEST_CASE("a million draws of each rule, on the GPU") {
  Tally t;
  Stream stream;
  check_draws<DeviceMemory>(t, 24, is_shortened() ? 2000 : 1000000, OnDevice{stream, 0});
  check_draws<DeviceMemory>(t, 1500, is_shortened() ? 200 : 100000, OnDevice{stream, 0});
  CHECK_TALLY(t);
}

TEST_CASE("wrong arguments are named, and nothing is written") {
  Stream stream;
  Device<float> logits(2, 64, 64), values(1, 2, 2);
  Device<int32_t> tokens(1, 4, 4), accepted(1, 2, 2);
  const auto in = k::load(static_cast<const float*>(logits.data()), 64);
  const int32_t* const drafted = accepted.data();
  const auto text = [](const k::Status& status) { return std::string(status.reason()); };
  CHECK(text(k::sample(stream, in, static_cast<int32_t*>(nullptr), 2, 64)) == "sample: tokens: the pointer is null");
  CHECK(text(k::sample(stream, in, tokens.data(), -1, 64)) == "sample: rows is negative");
  CHECK(text(k::sample(stream, in, tokens.data(), 2, 64, k::Sampling{}.top_k(-2))) == "sample: top_k is less than -1");
  CHECK(text(k::sample(stream, k::load(static_cast<const float*>(nullptr), 64), tokens.data(), 2, 64)) ==
        "sample: logits: load: the pointer is null");
  CHECK(text(k::verify(stream, in, k::drafts(drafted, 1), tokens.data(), static_cast<int32_t*>(nullptr), {1, 1, 64})) ==
        "verify: accepted: the pointer is null");
  CHECK(text(k::verify(stream, in, k::drafts(drafted, 0), tokens.data(), accepted.data(), {1, 1, 64})) ==
        "verify: drafts: ld is less than the number of drafts");
  CHECK(text(k::log_probs(stream, in, 2, int64_t(1) << 23, k::LogProbs{}.of(drafted, values.data()))) ==
        "log_probs: vocabulary is larger than 2^22");
  CHECK(text(k::log_probs(stream, in, 2, 64, k::LogProbs{}.of(drafted, nullptr))) ==
        "log_probs: of: the pointer to log_probs is null");
  stream.wait();
  CHECK((tokens.unchanged() && accepted.unchanged() && values.unchanged()));
}

TEST_CASE("a graph draws new tokens as its step and parameters change on the device") {
  Stream stream;
  const int64_t rows = 5, n = 32000;
  Device<float> logits(rows, n, n);
  Random random(1);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) logits.set(r, i, float(random.normal()));
  }
  logits.upload();
  Numbers<uint64_t, DeviceMemory> step(std::vector<uint64_t>{0});
  Numbers<int32_t, DeviceMemory> top_k(std::vector<int32_t>{40});
  Device<int32_t> tokens(1, rows, rows), alone(1, rows, rows);
  const auto in = k::load(static_cast<const float*>(logits.data()), n);
  k::Status captured;
  const Graph graph(stream, [&] {
    captured = k::sample(stream, in, tokens.data(), rows, n,
                         k::Sampling{}.seed(4).step(step.data(), 0).top_k(top_k.data(), 0));
  });
  REQUIRE(captured.ok());
  Tally t;
  for (uint64_t i = 0; i < 6; ++i) {
    step.assign({i});
    top_k.assign({i == 4 ? 1 : 40});
    graph.replay();
    tokens.download();
    const k::Status status =
        k::sample(stream, in, alone.data(), rows, n, k::Sampling{}.seed(4).step(i).top_k(i == 4 ? 1 : 40));
    stream.wait();
    alone.download();
    t.expect(status.ok() && tokens.bytes() == alone.bytes(), "step %d: %d, %d", int(i), int(tokens.get(0, 0)),
             int(alone.get(0, 0)));
  }
  CHECK_TALLY(t);
}

TEST_CASE("drafts are accepted or replaced, on the GPU") {
  Tally t;
  Stream stream;
  const auto run = [&](const auto& logits, const auto& drafts, auto* tokens, int32_t* accepted,
                       const k::VerifyShape& shape, const k::Sampling& options) {
    const k::Status status = k::verify(stream, logits, drafts, tokens, accepted, shape, options);
    stream.wait();
    return status;
  };
  for (const int64_t n : {50, 3000, 20000}) check_verify<DeviceMemory>(t, n, run);
  check_verified_draws<DeviceMemory>(t, is_shortened() ? 2000 : 1000000, run);
  CHECK_TALLY(t);
}

TEST_CASE("logarithms of probabilities, on the GPU") {
  Tally t;
  Stream stream;
  const auto run = [&](const auto& logits, int64_t rows, int64_t vocabulary, const k::LogProbs& outputs) {
    const k::Status status = k::log_probs(stream, logits, rows, vocabulary, outputs);
    stream.wait();
    return status;
  };
  for (const int64_t n : {5000, 1, 31, 300, 32000}) {
    if (!t.leaves_out()) check_log_probs<DeviceMemory>(t, n, n % 3, run);
  }
  CHECK_TALLY(t);
}
