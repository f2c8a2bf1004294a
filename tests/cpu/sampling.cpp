// Sampling on the CPU: against an oracle that sorts.
#include <kernels/cpu/sampling.h>

#include "support/sampling.h"
#include "support/threads.h"

using namespace test;

namespace {

const auto on_two = [](const auto& logits, auto* tokens, int64_t rows, int64_t vocabulary, const k::Sampling& options) {
  return k::cpu::sample(on_threads(2), logits, tokens, rows, vocabulary, options);
};

}  // namespace

TEST_CASE("tokens of every kind of row, by every rule") {
  Tally t;
  for (const int64_t n : {1, 2, 31, 33, 200, 1000})
    check_samples<HostMemory, float>(t, {8, n, n % 3, n % 2}, sample_rules(), on_two);
  check_samples<HostMemory, float>(t, {8, 32000, 5, 1}, sample_rules(), on_two);
  CHECK_TALLY(t);
}

TEST_CASE("vocabularies as large as they get") {
  Tally t;
  const std::vector<SampleRulesOf> some = {rules_of("top_k, top_p", 0.8f, 50, 0.9f), rules_of("plain", 1, 0),
                                           sample_rules()[21]};
  check_samples<HostMemory, float>(t, {8, 50257, 1, 1}, some, on_two);
  check_samples<HostMemory, float>(t, {3, 128256, 0, 0}, some, on_two);
  check_samples<HostMemory, float>(t, {2, 1000000, 0, 0}, some, on_two);
  check_samples<HostMemory, float>(t, {1, 151937, 1, 1}, sample_rules(), on_two);  // a row that threads share
  CHECK_TALLY(t);
}

TEST_CASE("logits of 16 bits") {
  Tally t;
  check_samples<HostMemory, k::bfloat16>(t, {8, 5000, 1, 1}, sample_rules(), on_two);
  CHECK_TALLY(t);
}

TEST_CASE("parameters, seeds and steps of each row, and rows without a token") {
  Tally t;
  check_sample_rows<HostMemory>(t, on_two);
  CHECK_TALLY(t);
}

TEST_CASE("what Hugging Face's processors keep") {
  Tally t;
  check_golden<HostMemory>(t, on_two);
  CHECK_TALLY(t);
}

TEST_CASE("tokens that every processor draws") {
  Tally t;
  check_known<HostMemory>(t, on_two);
  CHECK_TALLY(t);
}

TEST_CASE("many draws of each rule") {
  Tally t;
  check_draws<HostMemory>(t, 24, is_shortened() ? 20000 : 100000, on_two);
  check_draws<HostMemory>(t, 1500, 20000, on_two);  // not all in a list
  CHECK_TALLY(t);
}

TEST_CASE("weights are powers of two of their levels") {
  Tally t;
  Random random(5);
  for (int i = 0; i < 300000; ++i) {
    const uint32_t level = i < 1000 ? uint32_t(i) : uint32_t(random.below(k::detail::kNoLevel));
    const double want = std::exp2(40 - level * 0x1p-24), got = double(k::detail::weight_of(level));
    t.expect(std::fabs(got - want) <= want * 0x1p-23 + 1, "level %u: %g, want %g", level, got, want);
    t.expect(level == 0 || k::detail::weight_of(level - 1) >= k::detail::weight_of(level),
             "level %u weighs more than the one before", level);
    const float top = float(10 * random.normal()), x = top - float(std::fabs(8 * random.normal())),
                temperature = float(random.uniform(0.1, 3));
    const double below = (double(top) - double(x)) / temperature * 1.4426950408889634;
    const double exact = below < 40 ? std::floor(below * 0x1p24) : double(k::detail::kNoLevel);
    const k::detail::Levels levels(k::detail::key_of(top), temperature);
    t.expect(std::fabs(levels(k::detail::key_of(x)) - exact) <= 1 + exact * 0x1p-21, "%g below %g: level %u, want %g",
             x, top, levels(k::detail::key_of(x)), exact);
    const float z = float(20 * random.normal()), cap = float(random.uniform(0.5, 50));
    t.expect(std::fabs(k::detail::capped(z, cap) - cap * std::tanh(double(z) / cap)) <= cap * 0x1p-22,
             "%g capped at %g: %g", z, cap, k::detail::capped(z, cap));
  }
  CHECK(k::detail::weight_of(k::detail::kNoLevel) == 0);
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(k::detail::key_of(-0.f) == k::detail::key_of(0.f));
  CHECK(k::detail::key_of(-inf) == k::detail::kLowestKey);
  CHECK(k::detail::key_of(-std::numeric_limits<float>::quiet_NaN()) == k::detail::kNanKey);
  CHECK(k::detail::capped(inf, 3.f) == 3.f);
  CHECK(k::detail::capped(-inf, 3.f) == -3.f);
  CHECK(k::detail::capped(0.f, 3.f) == 0.f);
  CHECK(std::isnan(k::detail::capped(std::nanf(""), 3.f)));
  CHECK_TALLY(t);
}

TEST_CASE("wrong arguments are named") {
  const k::cpu::Exec cx{1};
  const std::vector<float> x(64, 1.f);
  const std::vector<int32_t> some(64);
  const std::vector<uint32_t> words(64);
  int32_t token = 5;
  const auto reason = [&](const k::Sampling& s, int64_t rows = 1, int64_t vocabulary = 64, int32_t* to = nullptr) {
    const k::Status status =
        k::cpu::sample(cx, k::load(x.data(), 64), to == nullptr ? &token : to, rows, vocabulary, s);
    CHECK(token == 5);
    CHECK(!status.ok());
    return std::string(status.reason());
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  using S = k::Sampling;
  CHECK(reason({}, -1) == "sample: rows is negative");
  CHECK(reason({}, 1, -1) == "sample: vocabulary is negative");
  CHECK(reason({}, 1, 0) == "sample: vocabulary is 0: there is no token to draw");
  CHECK(reason({}, 1, (1 << 22) + 1) == "sample: vocabulary is larger than 2^22");
  for (const float v : {-1.f, nan, inf})
    CHECK(reason(S{}.temperature(v)) == "sample: temperature is negative, infinite or NaN");
  for (const int64_t v : {int64_t(-2), -(int64_t(1) << 40)})
    CHECK(reason(S{}.top_k(v)) == "sample: top_k is less than -1");
  for (const int64_t v : {int64_t(-1), int64_t(65), int64_t(1) << 40}) {
    int32_t drawn = -1;
    CHECK(k::cpu::sample(cx, k::load(x.data(), 64), &drawn, 1, 64, S{}.top_k(v)));
    CHECK((drawn >= 0 && drawn < 64));
  }
  for (const float v : {-0.1f, 1.1f, nan}) {
    CHECK(reason(S{}.top_p(v)) == "sample: top_p is not from 0 to 1");
    CHECK(reason(S{}.min_p(v)) == "sample: min_p is not from 0 to 1");
    CHECK(reason(S{}.typical(v)) == "sample: typical is not from 0 to 1");
  }
  const auto seen = [&] { return S{}.counts(some.data(), 64); };
  for (const float v : {0.f, -1.f, nan, inf})
    CHECK(reason(seen().repetition_penalty(v)) == "sample: repetition_penalty is not positive, or infinite");
  for (const float v : {nan, inf})
    CHECK(reason(seen().presence_penalty(v)) == "sample: presence_penalty is infinite or NaN");
  for (const float v : {nan, -inf})
    CHECK(reason(seen().frequency_penalty(v)) == "sample: frequency_penalty is infinite or NaN");
  for (const float v : {-1.f, nan, inf})
    CHECK(reason(S{}.soft_cap(v)) == "sample: soft_cap is negative, infinite or NaN");
  CHECK(reason(S{}.repetition_penalty(1.2f)) ==
        "sample: a penalty needs previous() or counts(): the tokens that occurred");
  CHECK(reason(S{}.temperature(static_cast<const float*>(nullptr))) == "sample: temperature: the pointer is null");
  CHECK(reason(S{}.seed(static_cast<const uint64_t*>(nullptr))) == "sample: seed: the pointer is null");
  CHECK(reason(S{}.step(reinterpret_cast<const uint64_t*>(reinterpret_cast<uintptr_t>(x.data()) + 1))) ==
        "sample: step: the pointer is not aligned for its elements");
  CHECK(reason(S{}.temperature(x.data(), -1)) == "sample: temperature: the stride is negative");
  CHECK(reason(S{}.top_k(some.data(), -1)) == "sample: top_k: the stride is negative");
  const uint64_t seeds[2] = {};
  CHECK(reason(S{}.seed(seeds, -1)) == "sample: seed: the stride is negative");
  CHECK(reason(S{}.step(seeds, -2)) == "sample: step: the stride is negative");
  CHECK(reason(S{}.bias(nullptr, 0)) == "sample: bias: the pointer is null");
  CHECK(reason(S{}.bias(x.data(), 63)) == "sample: bias: ld is neither 0 nor at least the vocabulary");
  constexpr int64_t far = std::numeric_limits<int64_t>::max() / 8;
  CHECK(reason(S{}.bias(x.data(), 2 * far + 2)) == "sample: bias: rows x ld exceeds 64 bits");
  CHECK(reason(S{}.allowed(words.data(), 2 * far + 2)) == "sample: allowed: rows x ld exceeds 64 bits");
  CHECK(reason(S{}.counts(some.data(), 2 * far + 2)) == "sample: counts: rows x ld exceeds 64 bits");
  CHECK(reason(S{}.previous(some.data(), 2 * far + 2, some.data())) == "sample: previous: rows x ld exceeds 64 bits");
  CHECK(reason(S{}.temperature(x.data(), 2 * far + 2)) == "sample: temperature: rows x stride exceeds 64 bits");
  CHECK(reason(S{}.seed(seeds, far + 1)) == "sample: seed: rows x stride exceeds 64 bits");
  CHECK(reason(S{}.allowed(nullptr, 2)) == "sample: allowed: the pointer is null");
  CHECK(reason(S{}.allowed(words.data(), 1)) ==
        "sample: allowed: ld is neither 0 nor at least vocabulary / 32, rounded up");
  CHECK(reason(S{}.counts(nullptr, 64)) == "sample: counts: the pointer is null");
  CHECK(reason(S{}.counts(some.data(), -1)) == "sample: counts: ld is neither 0 nor at least the vocabulary");
  CHECK(reason(S{}.previous(nullptr, 4, some.data())) == "sample: previous: the pointer to tokens is null");
  CHECK(reason(S{}.previous(some.data(), -4, some.data())) == "sample: previous: ld is negative");
  CHECK(reason(S{}.prompts(some.data())) ==
        "sample: prompts: there is no previous(), of whose tokens the first are the prompt's");
  CHECK(reason(S{}.previous(some.data(), 4, some.data()).prompts(nullptr)) == "sample: prompts: the pointer is null");
  CHECK(reason(S{}.previous(some.data(), 4, nullptr)) == "sample: previous: the pointer to lengths is null");
  CHECK(reason(S{}.status(static_cast<int32_t*>(nullptr))) == "sample: status: the pointer is null");
  CHECK(reason({}, 1, 64, reinterpret_cast<int32_t*>(reinterpret_cast<uintptr_t>(some.data()) + 1)) ==
        "sample: tokens: the pointer is not aligned for its elements");
  const auto off = [](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<uintptr_t>(p) + 1); };
  const std::string misaligned = ": the pointer is not aligned for its elements";
  CHECK(reason(S{}.temperature(off(x.data()))) == "sample: temperature" + misaligned);
  CHECK(reason(S{}.bias(off(x.data()), 0)) == "sample: bias" + misaligned);
  CHECK(reason(S{}.allowed(off(words.data()), 2)) == "sample: allowed: the pointer is not aligned for its words");
  CHECK(reason(S{}.counts(off(some.data()), 64)) == "sample: counts" + misaligned);
  CHECK(reason(S{}.previous(off(some.data()), 4, some.data())) ==
        "sample: previous: the pointer to tokens is not aligned for its elements");
  CHECK(reason(S{}.previous(some.data(), 4, off(some.data()))) ==
        "sample: previous: the pointer to lengths is not aligned for its elements");
  CHECK(reason(S{}.status(off(&token))) == "sample: status" + misaligned);
  const auto text = [](const k::Status& status) { return std::string(status.reason()); };
  CHECK(text(k::cpu::sample(cx, k::load(x.data(), int64_t(1) << 62), &token, 4, 64)) ==
        "sample: logits: load: rows x row stride exceeds 64 bits");
  CHECK(text(k::cpu::sample(cx, k::load(x.data(), -1), &token, 4, 64)) ==
        "sample: logits: load: the row stride is negative");
  CHECK(text(k::cpu::sample(cx, k::load(x.data(), 64), static_cast<int32_t*>(nullptr), 1, 64)) ==
        "sample: tokens: the pointer is null");
  CHECK(text(k::cpu::sample(cx, k::load(static_cast<const float*>(nullptr), 64), &token, 1, 64)) ==
        "sample: logits: load: the pointer is null");
  CHECK(
      k::cpu::sample(cx, k::load(static_cast<const float*>(nullptr), 64), static_cast<int32_t*>(nullptr), 0, 64).ok());
  CHECK(k::cpu::sample(cx, k::load(static_cast<const float*>(nullptr), 64), static_cast<int32_t*>(nullptr), 0, 0).ok());
}

TEST_CASE("drafts are accepted or replaced") {
  Tally t;
  const auto run = [](const auto& logits, const auto& drafts, auto* tokens, int32_t* accepted,
                      const k::VerifyShape& shape, const k::Sampling& options) {
    return k::cpu::verify(on_threads(2), logits, drafts, tokens, accepted, shape, options);
  };
  for (const int64_t n : {50, 3000, 20000}) check_verify<HostMemory>(t, n, run);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const int64_t draws = is_shortened() ? 20000 : 300000;
#else
  const int64_t draws = 50000;
#endif
  check_verified_draws<HostMemory>(t, draws, run);
  CHECK_TALLY(t);
}

TEST_CASE("logarithms of probabilities") {
  Tally t;
  const auto run = [](const auto& logits, int64_t rows, int64_t vocabulary, const k::LogProbs& outputs) {
    return k::cpu::log_probs(on_threads(2), logits, rows, vocabulary, outputs);
  };
  for (const int64_t n : {1, 31, 300, 5000, 32000}) check_log_probs<HostMemory>(t, n, n % 3, run);
  CHECK_TALLY(t);
}

TEST_CASE("wrong arguments of drafts and logarithms are named") {
  const k::cpu::Exec cx{1};
  const std::vector<float> x(64, 1.f);
  int32_t tokens[8] = {5, 5, 5, 5, 5, 5, 5, 5}, drafted[8] = {}, accepted[8] = {5};
  const auto in = k::load(x.data(), 8);
  using Shape = k::VerifyShape;
  const auto text = [](const k::Status& status) { return std::string(status.ok() ? "ok" : status.reason()); };
  const auto verify = [&](const Shape& shape, const int32_t* drafts, int64_t ld, int32_t* to, int32_t* count) {
    return text(k::cpu::verify(cx, in, k::drafts(drafts, ld), to, count, shape));
  };
  CHECK(verify({-1, 1, 8}, drafted, 1, tokens, accepted) == "verify: sequences is negative");
  CHECK(verify({1, -1, 8}, drafted, 1, tokens, accepted) == "verify: drafts is negative or larger than 65,535");
  CHECK(verify({int64_t(1) << 41, 1, 8}, drafted, 1, tokens, accepted) == "verify: sequences is larger than 2^40");
  CHECK(verify({1, 65536, 8}, drafted, 65536, tokens, accepted) == "verify: drafts is negative or larger than 65,535");
  CHECK(verify({1, 1, (1 << 22) + 1}, drafted, 1, tokens, accepted) == "verify: vocabulary is larger than 2^22");
  const auto off = [](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<uintptr_t>(p) + 1); };
  CHECK(verify({1, 1, 8}, off(drafted), 1, tokens, accepted) ==
        "verify: drafts: the pointer to tokens is not aligned for its elements");
  CHECK(verify({1, 1, 8}, drafted, 1, off(tokens), accepted) ==
        "verify: tokens: the pointer is not aligned for its elements");
  CHECK(verify({1, 1, 8}, drafted, 1, tokens, off(accepted)) ==
        "verify: accepted: the pointer is not aligned for its elements");
  CHECK(verify({1, 1, 0}, drafted, 1, tokens, accepted) == "verify: vocabulary is 0: there is no token to draw");
  CHECK(verify({1, 2, 8}, drafted, 1, tokens, accepted) == "verify: drafts: ld is less than the number of drafts");
  CHECK(verify({1, 2, 8}, nullptr, 2, tokens, accepted) == "verify: drafts: the pointer to tokens is null");
  CHECK(verify({1, 2, 8}, drafted, 2, nullptr, accepted) == "verify: tokens: the pointer is null");
  CHECK(verify({1, 2, 8}, drafted, 2, tokens, nullptr) == "verify: accepted: the pointer is null");
  CHECK(text(k::cpu::verify(cx, in, k::drafts(drafted, 2, k::load(static_cast<const float*>(nullptr), 8)), tokens,
                            accepted, {1, 2, 8})) == "verify: probabilities: load: the pointer is null");
  CHECK(tokens[0] == 5);
  CHECK(accepted[0] == 5);
  CHECK(verify({0, 2, 8}, nullptr, 2, nullptr, nullptr) == "ok");
  CHECK(verify({2, 0, 8}, nullptr, 0, tokens, accepted) == "ok");
  CHECK(accepted[0] == 0);

  float values[8] = {};
  const auto score = [&](const k::LogProbs& outputs, int64_t rows = 1, int64_t vocabulary = 8) {
    return text(k::cpu::log_probs(cx, in, rows, vocabulary, outputs));
  };
  CHECK(score({}) == "log_probs: neither of() nor top() says what is wanted");
  CHECK(score(k::LogProbs{}.top(257, tokens, values, 257)) == "log_probs: top: n is not from 0 to 256");
  CHECK(score(k::LogProbs{}.top(3, tokens, values, 2)) == "log_probs: top: ld is less than n");
  CHECK(score(k::LogProbs{}.top(3, static_cast<int32_t*>(nullptr), nullptr, 3)) ==
        "log_probs: top: both pointers are null");
  CHECK(score(k::LogProbs{}.of(static_cast<const int32_t*>(nullptr), values)) ==
        "log_probs: of: the pointer to tokens is null");
  CHECK(score(k::LogProbs{}.of(drafted, nullptr)) == "log_probs: of: the pointer to log_probs is null");
  CHECK(score(k::LogProbs{}.of(off(drafted), values)) ==
        "log_probs: of: the pointer to tokens is not aligned for its elements");
  CHECK(score(k::LogProbs{}.of(drafted, off(values))) ==
        "log_probs: of: the pointer to log_probs is not aligned for its elements");
  CHECK(score(k::LogProbs{}.top(-1, tokens, values, 8)) == "log_probs: top: n is not from 0 to 256");
  CHECK(score(k::LogProbs{}.top(3, off(tokens), values, 3)) ==
        "log_probs: top: the pointer to ids is not aligned for its elements");
  CHECK(score(k::LogProbs{}.top(3, tokens, off(values), 3)) ==
        "log_probs: top: the pointer to log_probs is not aligned for its elements");
  CHECK(score(k::LogProbs{}.of(drafted, values), -1) == "log_probs: rows is negative");
  CHECK(score(k::LogProbs{}.of(drafted, values), 1, int64_t(1) << 23) == "log_probs: vocabulary is larger than 2^22");
  CHECK(score(k::LogProbs{}.of(drafted, values), 0, 8) == "ok");
}

TEST_CASE("a limit that is reached exactly ends there, with the lowest ids") {
  Tally t;
  for (const int64_t n : {4, 2048}) {
    const std::vector<float> equal(size_t(n), 1.f);
    for (const float p : {0.25f, 0.5f, 0.75f}) {
      for (const k::Sampling& s :
           {k::Sampling{}.top_p(p), k::Sampling{}.typical(p), k::Sampling{}.top_k(int64_t(float(n) * p))}) {
        std::vector<int32_t> tokens(1000);
        t.expect(k::cpu::sample(on_threads(2), k::load(equal.data(), 0), tokens.data(), 1000, n, s).ok(), "refused");
        const int32_t most = *std::max_element(tokens.begin(), tokens.end()), limit = int32_t(float(n) * p);
        t.expect(most < limit && most >= limit - 1 - n / 128, "%d equal tokens, %g of them: up to %d", int(n), p,
                 int(most));
      }
    }
  }
  CHECK_TALLY(t);
}
