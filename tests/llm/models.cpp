// Tiny models of every architecture against Hugging Face transformers (examples/llm/golden), and against themselves: in
// chunks and as a whole, in pages and dense, in a batch and alone.
#include "golden.h"
#include "support/catch.h"

using namespace golden;

namespace {

llm::Settings settings_of(const Folder& folder) {
  llm::Settings s;
  s.directory = folder.path(), s.device = "cpu", s.threads = 2, s.quiet = true, s.cache = "fp32";
  return s;
}

struct Loaded {
  llm::Settings settings;
  llm::Session session;
  explicit Loaded(const llm::Settings& s, int64_t sequences = 1) : settings(s), session(settings) {
    session.load(sequences);
  }
  std::vector<float> last_logits(const std::vector<int32_t>& ids, int64_t sequence = 0) {
    session.model->read(sequence, 0, ids.data(), int64_t(ids.size()));
    const float* const p = session.model->logits(0);
    return std::vector<float>(p, p + session.config.vocabulary);
  }
  std::vector<int32_t> greedy(const std::vector<int32_t>& ids, int64_t n) {
    settings.most = n, settings.ignore_eos = true;
    session.choice = {};
    llm::Session::Times times;
    const auto text = session.generate({ids}, {}, times)[0];
    return std::vector<int32_t>(text.ids.begin() + text.prompt, text.ids.end());
  }
};

// text: whether to write one as well; otherwise experts are named as transformers 4 did.
void compare(const Json& golden, const Json& config, Type type, const char* weights, const char* cache, int64_t chunk,
             double tolerance, bool text) {
  const Folder folder;
  write_model(folder, golden, config, type, !text);
  llm::Settings settings = settings_of(folder);
  settings.weights = weights, settings.cache = cache, settings.chunk = chunk, settings.context = 200;
  Loaded model(settings);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  for (const Json& mark : golden["logits"]) {
    const std::vector<int32_t> some(ids.begin(), ids.begin() + mark["at"].get<int64_t>() + 1);
    const std::vector<float> logits = model.last_logits(some);
    INFO("behind token " << mark["at"]);
    CHECK(difference(logits.data(), mark["values"].get<std::vector<float>>()) < tolerance);
  }
  if (text) CHECK(model.greedy(ids, 20) == golden["greedy"].get<std::vector<int32_t>>());
}

}  // namespace

TEST_CASE("tiny models give the logits and the text that transformers gives") {
  for (const char* name : {"llama",         "llama_tied",   "llama_bias", "llama_linear",
                           "llama_dynamic", "llama_llama3", "llama_yarn", "llama_yarn_plain",
                           "mistral",       "mistral_nemo", "qwen2",      "qwen2_window",
                           "qwen3",         "phi3",         "phi3_long",  "gemma",
                           "gemma2",        "gemma3",       "gpt2",       "mixtral",
                           "qwen2_moe",     "qwen3_moe"}) {
    INFO(name);
    const Json golden = read(name);
    compare(golden, golden["config"], Type::f32, "stored", "fp32", 512, 2e-5, true);
    // In chunks, with weights of 16 bits, which hold these exactly, and as transformers 4 wrote its configuration.
    const Json& old = golden["old_config"];
    compare(golden, old.is_null() ? golden["config"] : old, Type::bf16, "stored", "fp32", 7, 2e-5, false);
  }
}

TEST_CASE("prompts of many chunks are written on in as those of one") {
  for (const char* name : {"llama", "llama_dynamic", "phi3_long"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden);
    llm::Settings settings = settings_of(folder);
    settings.weights = "stored", settings.chunk = 8, settings.context = 200;
    const auto ids = golden["ids"].get<std::vector<int32_t>>();
    REQUIRE(ids.size() > 16);
    CHECK(Loaded(settings).greedy(ids, 20) == golden["greedy"].get<std::vector<int32_t>>());
  }
}

TEST_CASE("reading a prompt tells how much of it is done") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  llm::Settings settings = settings_of(folder);
  settings.chunk = 8, settings.context = 60;
  Loaded loaded(settings);
  const int64_t layers = int64_t(loaded.session.config.layers.size());
  const std::vector<int32_t> ids(20, 1);
  std::vector<double> shares, expected;
  loaded.session.model->read(0, 0, ids.data(), 20, [&](double share) { shares.push_back(share); });
  for (const int64_t done : {0, 8, 16}) {
    const double rows = double(std::min<int64_t>(8, 20 - done));
    for (int64_t i = 0; i < layers; ++i) expected.push_back((double(done) + rows * double(i) / double(layers)) / 20);
  }
  REQUIRE(shares.size() == expected.size());
  for (size_t i = 0; i < shares.size(); ++i) CHECK(std::abs(shares[i] - expected[i]) < 1e-12);
}

TEST_CASE("the flag decides whether a head is its own") {
  const Json tied = read("llama_tied"), untied = read("llama");
  const auto behind = [](const Json& golden, const std::vector<golden::Tensor>& tensors) {
    const ModelFolder folder(golden);
    folder.write("model.safetensors", safetensors(tensors, Type::f32));
    llm::Settings settings = settings_of(folder);
    settings.context = 60;
    return difference(Loaded(settings).last_logits(golden["ids"].get<std::vector<int32_t>>()).data(),
                      golden["logits"].back()["values"].get<std::vector<float>>());
  };
  auto tensors = tensors_of(tied);
  tensors.push_back({"lm_head.weight", {96, 32}, std::vector<float>(96 * 32, 1.f)});  // not read
  CHECK(behind(tied, tensors) < 2e-5);
  tensors = tensors_of(untied);
  tensors.erase(std::find_if(tensors.begin(), tensors.end(), [](const auto& t) { return t.name == "lm_head.weight"; }));
  std::string why;
  try {
    behind(untied, tensors);
  } catch (const llm::Error& e) {
    why = e.what();
  }
  CHECK(why.find("lm_head.weight") != std::string::npos);
}

TEST_CASE("a prompt is multiplied by the layers' weights for each token, and by the head's once") {
  for (const char* name : {"llama", "llama_tied", "phi3", "gpt2", "mixtral", "qwen2_moe"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden);
    double layers = 0, head = 0;
    for (const auto& tensor : tensors_of(golden)) {
      const auto is = [&](const char* part) { return tensor.name.find(part) != std::string::npos; };
      const double size = double(tensor.values.size());
      if (is("embed_tokens") || is("wte")) head = size;  // this table is the head, or as large
      else if (tensor.shape.size() == 2 && !is("lm_head") && !is("wpe")) layers += size;
      else if (tensor.shape.size() == 3)
        layers += size / double(tensor.shape[0]) * golden["config"]["num_experts_per_tok"].get<double>();
    }
    llm::Settings settings = settings_of(folder);
    settings.context = 60;
    const Loaded model(settings);
    REQUIRE(head > 0);
    CHECK(model.session.model->multiplications(1) == layers + head);
    CHECK(model.session.model->multiplications(50) == 50 * layers + head);
  }
}

TEST_CASE("a text that grows over the length where angles change is read anew") {
  const Json golden = read("phi3_long");
  const ModelFolder folder(golden);
  llm::Settings settings = settings_of(folder);
  settings.temperature = 0;
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  const auto follows = golden["over"]["greedy"].get<std::vector<int32_t>>();
  CHECK(Loaded(settings).greedy({ids.begin(), ids.begin() + golden["over"]["from"].get<int64_t>()},
                                int64_t(follows.size())) == follows);
}

TEST_CASE("weights and caches of fewer bits stay near") {
  const Json golden = read("llama");
  compare(golden, golden["config"], Type::f16, "stored", "fp16", 512, 2e-3, true);
  compare(golden, golden["config"], Type::f16, "stored", "bf16", 512, 2e-2, false);
  compare(golden, golden["config"], Type::f16, "stored", "fp8", 512, 0.1, false);
  compare(golden, golden["config"], Type::f32, "int8", "fp32", 512, 0.05, false);
  compare(golden, golden["config"], Type::f32, "fp8", "fp32", 512, 0.2, false);
}

TEST_CASE("texts in a batch and in pages are the texts alone") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  std::vector<llm::Tokenizer::Ids> prompts;
  for (const int64_t n : {40, 3, 17}) prompts.emplace_back(ids.begin(), ids.begin() + n);

  llm::Settings settings = settings_of(folder);
  settings.most = 30, settings.ignore_eos = true, settings.temperature = 0;
  std::vector<std::vector<int32_t>> alone;
  for (const auto& prompt : prompts) {
    Loaded one(settings);
    llm::Session::Times times;
    alone.push_back(one.session.generate({prompt}, {}, times)[0].ids);
    CHECK(alone.back().size() == prompt.size() + 30);
  }
  for (const int64_t page : {0, 5, 16}) {
    INFO("pages of " << page);
    settings.page = page, settings.context = 75;
    Loaded all(settings, 3);
    llm::Session::Times times;
    const auto texts = all.session.generate(prompts, {}, times);
    for (size_t i = 0; i < 3; ++i) CHECK(texts[i].ids == alone[i]);
  }
}

TEST_CASE("texts whose angles depend on their length are what they are alone") {
  for (const char* name : {"phi3_long", "llama_dynamic"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden);
    const auto ids = golden["ids"].get<std::vector<int32_t>>();
    llm::Settings settings = settings_of(folder);
    settings.most = 12, settings.ignore_eos = true, settings.temperature = 0;
    const std::vector<llm::Tokenizer::Ids> prompts = {{ids.begin(), ids.begin() + 8}, {ids.begin(), ids.begin() + 40}};
    Loaded all(settings, 2);
    llm::Session::Times times;
    std::vector<size_t> printed;
    const auto texts =
        all.session.generate(prompts, [&](size_t text, const std::string&) { printed.push_back(text); }, times);
    REQUIRE(texts.size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      Loaded one(settings);
      llm::Session::Times unused;
      CHECK(texts[i].ids == one.session.generate({prompts[i]}, {}, unused)[0].ids);
    }
    CHECK(times.decoded == 24);
    CHECK(std::is_sorted(printed.begin(), printed.end()));
  }
}

TEST_CASE("a text ends where it should") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  const auto follows = golden["greedy"].get<std::vector<int32_t>>();
  llm::Settings settings = settings_of(folder);
  settings.temperature = 0;
  const auto write = [&](const llm::Settings& s, const std::vector<int32_t>& ends = {}) {
    Loaded model(s);
    if (!ends.empty()) model.session.stops = ends;
    llm::Session::Times times;
    return model.session.generate({ids}, {}, times)[0];
  };
  settings.most = 5;
  auto text = write(settings);
  CHECK(std::string(text.finish) == "length");
  CHECK(text.ids.size() == ids.size() + 5);

  // At a token, which is not printed.
  settings.most = -1;
  text = write(settings, {follows[3]});
  CHECK(std::string(text.finish) == "stop");
  CHECK(text.ids.size() ==
        ids.size() + size_t(std::find(follows.begin(), follows.end(), follows[3]) - follows.begin()) + 1);

  // At the end of the context.
  settings.context = 43, settings.ignore_eos = true;
  text = write(settings);
  CHECK(std::string(text.finish) == "length");
  CHECK(text.ids.size() == 43);

  // At a string over three tokens, of which nothing is printed.
  settings.context = 0;
  std::string whole;
  {
    settings.most = 12;
    whole = write(settings).written;
    settings.most = -1;
  }
  REQUIRE(whole.size() >= 8);
  settings.stops = {"never", whole.substr(4, 3)};
  text = write(settings);
  CHECK(std::string(text.finish) == "stop");
  CHECK(text.written == whole.substr(0, whole.find(settings.stops[1])));
}

TEST_CASE("a text ends at a special token that a stop string names") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  const auto ids = golden["ids"].get<std::vector<int32_t>>();
  llm::Settings settings = settings_of(folder);
  settings.temperature = 0, settings.most = 12, settings.ignore_eos = true;
  const auto write = [&] {
    Loaded model(settings);
    llm::Session::Times times;
    return model.session.generate({ids}, {}, times)[0];
  };
  const auto whole = write();
  const auto first = whole.ids.begin() + whole.prompt;
  // The first token that is another one than those before it is made a special one.
  const auto at = std::find_if(first + 1, whole.ids.end(), [&](int32_t id) { return id != *first; });
  REQUIRE(at != whole.ids.end());
  const int32_t id = *at;
  Json tokens = Json::parse(tokenizer());
  tokens["added_tokens"] = {{{"id", id}, {"content", "<|stop|>"}, {"special", true}}};
  folder.write("tokenizer.json", tokens.dump());
  settings.stops = {"never", "<|stop|>"};
  for (const int64_t lookup : {0, 4}) {
    settings.lookup = lookup;
    const auto text = write();
    CHECK(std::string(text.finish) == "stop");
    CHECK(text.ids == std::vector<int32_t>(whole.ids.begin(), at + 1));
    CHECK(whole.written.find(text.written) == 0);
  }
  settings.stops = {"<|stop|>x"};
  CHECK(write().ids == whole.ids);
}
