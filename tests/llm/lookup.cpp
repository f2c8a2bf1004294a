// Guesses looked up in the text change how many tokens come in a step, and nothing else.
#include "golden.h"
#include "support/catch.h"

using namespace golden;

namespace {

struct Written {
  llm::Session::Text text;
  llm::Session::Times times;
};

Written write(llm::Settings settings, const std::string& prompt, const std::vector<int32_t>& ids, int64_t lookup) {
  settings.lookup = lookup;
  llm::Session session(settings);
  session.load(1);
  Written out;
  std::string printed;
  out.text = session.generate(
      {ids.empty() ? session.tokenizer->encode(prompt) : ids},
      [&](size_t, const std::string& more) { printed += more; }, out.times)[0];
  CHECK(printed == out.text.written);
  return out;
}

void compare(const llm::Settings& settings, const std::string& prompt, const std::vector<int32_t>& ids, bool repeats,
             std::initializer_list<int64_t> guesses) {
  const Written plain = write(settings, prompt, ids, 0);
  CHECK(plain.times.steps + 1 == plain.times.decoded);
  for (const int64_t n : guesses) {
    INFO(n << " guesses");
    const Written fast = write(settings, prompt, ids, n);
    CHECK(fast.text.ids == plain.text.ids);
    CHECK(fast.text.written == plain.text.written);
    CHECK(std::string(fast.text.finish) == plain.text.finish);
    CHECK(fast.times.decoded == plain.times.decoded);
    CHECK(fast.times.steps <= plain.times.steps);
    if (repeats) CHECK(double(fast.times.decoded) > 1.3 * double(fast.times.steps));
  }
}

llm::Settings settings_of(const std::string& directory) {
  llm::Settings s;
  s.directory = directory, s.device = "cpu", s.threads = 1, s.quiet = true, s.seed = 5;
  return s;
}

}  // namespace

TEST_CASE("what is guessed is what came behind the same tokens") {
  using Ids = std::vector<int32_t>;
  CHECK(llm::lookup({1, 2, 3, 4, 9, 1, 2}, 3) == Ids{3, 4, 9});
  CHECK(llm::lookup({1, 2, 3, 1, 2, 4, 1, 2}, 1) == Ids{4});             // the latest place
  CHECK(llm::lookup({8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2}, 2) == Ids{3, 9});  // where more are the same
  CHECK(llm::lookup({1, 2, 3, 1, 2, 3, 1, 2}, 7) == Ids{3, 1, 2, 3, 1, 2, 3});
  CHECK(llm::lookup({6, 5, 5, 5}, 4) == Ids{5, 5, 5, 5});
  CHECK(llm::lookup({1, 2, 3, 2}, 4).empty());  // one token is too few
  CHECK(llm::lookup({1, 2, 1, 2}, 0).empty());
  CHECK(llm::lookup({1}, 4).empty());
  CHECK(llm::lookup({}, 4).empty());
}

TEST_CASE("a text with guesses is the text without, greedy and sampled") {
  llm::Settings s = settings_of(LLM_MODEL);
  s.context = 200;
  const std::string prompts[] = {"Once upon a time, there was a little girl named Lily.",
                                 "Tom and Sue ran. Tom and Sue ran. Tom and Sue ran. Tom and"};
  for (const std::string& prompt : prompts) {
    for (const uint64_t seed : {1, 2}) {
      for (const double temperature : {0.0, 0.7}) {
        INFO(prompt << " seed " << seed << " temperature " << temperature);
        s.seed = seed, s.temperature = temperature, s.top_p = temperature > 0 ? 0.9 : 1,
        s.repetition_penalty = seed == 1 ? 1 : 1.1;
        compare(s, prompt, {}, false, {seed == 1 ? 2 : 7});
      }
    }
  }
}

TEST_CASE("a text that repeats itself comes in fewer steps, and ends where it would") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  llm::Settings s = settings_of(folder.path());
  s.cache = "fp32", s.temperature = 0, s.ignore_eos = true;
  s.context = 200, compare(s, "", ids, true, {1, 7, 12, 63});  // up to the end of the context
  s.most = 33, compare(s, "", ids, false, {7});
  const std::string whole = write(s, "", ids, 0).text.written;
  s.most = -1, s.stops = {whole.substr(20, 3)}, compare(s, "", ids, false, {7});  // in the middle of what is guessed
}

TEST_CASE("angles that depend on the length of the text are those without guesses") {
  for (const char* name : {"llama_dynamic", "phi3_long"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden);
    llm::Settings s = settings_of(folder.path());
    s.cache = "fp32", s.temperature = 0, s.ignore_eos = true, s.context = 180;
    auto ids = golden["ids"].get<std::vector<int32_t>>();
    ids.resize(20);
    compare(s, "", ids, false, {7});
  }
}

TEST_CASE("several texts are not guessed at") {
  llm::Settings s = settings_of(LLM_MODEL);
  s.lookup = 3;
  llm::Session session(s);
  CHECK_THROWS_AS(session.load(2), llm::Error);
}
