// The same text, computed in all ways that there are: alone and in a batch, in pages and dense, in chunks and as a
// whole, with fewer bits; on a GPU also by a graph and call by call, with weights asked for early and not, and against
// the CPU. Compiled for a device, LLM_DEVICE.
#include <cstdlib>

#include "golden.h"
#include "support/catch.h"
#include "support/shortened.h"

using namespace golden;
using Ids = llm::Tokenizer::Ids;

namespace {

const bool on_gpu = std::string(LLM_DEVICE) == "gpu";

// A device with all that is needed for such weights and such a cache.
bool can(llm::Type stored, llm::Type weights, llm::Type cache) {
  std::string why;
  const auto device = on_gpu ? llm::make_gpu(stored, 1, why) : llm::make_cpu(1);
  if (device == nullptr) WARN(why);
  return device != nullptr && device->products(stored) != nullptr && device->products(weights) != nullptr &&
         device->attend(cache) != nullptr;
}

llm::Settings settings_of(const std::string& directory, llm::Type cache) {
  llm::Settings s;
  s.directory = directory, s.device = LLM_DEVICE, s.threads = 2, s.quiet = true, s.cache = llm::name_of(cache);
  s.temperature = 0, s.ignore_eos = true, s.seed = 1;
  return s;
}

struct Loaded {
  llm::Settings settings;
  llm::Session session;
  explicit Loaded(const llm::Settings& s, int64_t sequences = 1) : settings(s), session(settings) {
    session.load(sequences);
  }

  std::vector<float> logits(int64_t row = 0) {
    const float* const p = session.model->logits(row);
    return std::vector<float>(p, p + session.config.vocabulary);
  }
  std::vector<float> read(const Ids& ids, int64_t sequence = 0) {
    session.model->read(sequence, 0, ids.data(), int64_t(ids.size()));
    return logits();
  }
  // Of each text behind so many more tokens, which are written into the texts. A token is one of the first `some`.
  std::vector<std::vector<float>> write(std::vector<Ids>& texts, int steps) {
    llm::Model& model = *session.model;
    const int64_t some = std::min(session.config.vocabulary, session.tokenizer->size());
    int64_t longest = 0;
    for (size_t i = 0; i < texts.size(); ++i) {
      model.begin(int64_t(i), texts[i], {}, some, 1);
      model.read(int64_t(i), 0, texts[i].data(), int64_t(texts[i].size()));
      model.choose_next(int64_t(i));
      longest = std::max(longest, int64_t(texts[i].size()));
    }
    for (int step = 0; step < steps; ++step) {
      for (size_t i = 0; i < texts.size(); ++i) texts[i].push_back(model.token(int64_t(i), int64_t(texts[i].size())));
      model.step(longest + step + 1);
    }
    std::vector<std::vector<float>> out;
    for (size_t i = 0; i < texts.size(); ++i) out.push_back(logits(int64_t(i)));
    return out;
  }
};

std::vector<std::string> stories() {
  std::vector<std::string> out;
  std::ifstream file(LLM_STORIES);
  for (std::string line; std::getline(file, line);) out.push_back(line);
  return out;
}

// Nats in all stories, each of them read alone.
double nats(const llm::Settings& settings) {
  Loaded model(settings);
  double sum = 0;
  for (const std::string& story : stories()) {
    const Ids ids = model.session.tokenizer->encode(story);
    model.session.model->read(0, 0, ids.data(), int64_t(ids.size()), {}, [&](int64_t i, const float* logits) {
      if (i + 1 < int64_t(ids.size()))
        sum += llm::negative_log_likelihood(logits, model.session.config.vocabulary, ids[size_t(i + 1)]) /
               double(ids.size() - 1);
    });
  }
  return sum / double(stories().size());
}

// The stories one behind the other, again and again.
Ids long_text(const llm::Tokenizer& tokenizer, size_t tokens) {
  Ids ids;
  while (ids.size() < tokens) {
    for (const std::string& story : stories()) {
      for (const auto id : tokenizer.encode(story)) ids.push_back(id);
    }
  }
  ids.resize(tokens);
  return ids;
}

// A model, texts to read, and how far the roundings of its types may bring results apart.
void compare_ways(const std::string& directory, llm::Type cache, const std::vector<Ids>& prompts, double tolerance) {
  constexpr int steps = 12;
  llm::Settings settings = settings_of(directory, cache);
  settings.context = 220;
  std::vector<Ids> texts = prompts;
  const auto together = Loaded(settings, int64_t(prompts.size())).write(texts, steps);
  // What was written in steps, read: alone, as a whole and in chunks.
  for (const int64_t chunk : {512, 7}) {
    settings.chunk = chunk;
    Loaded alone(settings);
    for (size_t i = 0; i < texts.size(); ++i) {
      INFO("text " << i << ", chunks of " << chunk);
      CHECK(difference(alone.read(texts[i]).data(), together[i]) < tolerance);
    }
  }
  settings.chunk = 512;
  for (const int64_t page : {1, 5, 16}) {
    settings.page = page;
    std::vector<Ids> again = prompts;
    const auto paged = Loaded(settings, int64_t(prompts.size())).write(again, steps);
    for (size_t i = 0; i < texts.size(); ++i) {
      INFO("text " << i << ", pages of " << page);
      if (on_gpu && again[i] != texts[i]) continue;  // two tokens of almost the same logits
      CHECK(again[i] == texts[i]);
      CHECK(difference(paged[i].data(), together[i]) < tolerance);
    }
  }
  settings.page = 0, settings.batch_invariant = true;
  std::vector<Ids> beside;  // so many that products of one token and of all are made in other ways
  while (beside.size() < 36) beside.insert(beside.end(), prompts.begin(), prompts.end());
  const auto all = Loaded(settings, int64_t(beside.size())).write(beside, steps);
  for (size_t i = 0; i < prompts.size(); ++i) {
    INFO("text " << i << ", whose bits are to be those of the batch");
    std::vector<Ids> own = {prompts[i]};
    const auto alone = Loaded(settings).write(own, steps);
    CHECK(own[0] == beside[i]);
    CHECK(alone[0] == all[i]);
    CHECK(alone[0] == all[all.size() - prompts.size() + i]);
  }
  settings.batch_invariant = false;
  if (!on_gpu) return;
  for (const char* name : {"LLM_GRAPH", "LLM_EARLY"}) {
    setenv(name, "0", 1);
    std::vector<Ids> again = prompts;
    const auto plain = Loaded(settings, int64_t(prompts.size())).write(again, steps);
    unsetenv(name);
    INFO(name << "=0");
    CHECK(again == texts);
    CHECK(plain == together);  // the same kernels
  }
}

std::vector<Ids> three(const Ids& ids) {
  std::vector<Ids> out;
  for (const size_t n : {size_t(40), size_t(3), size_t(17)})
    out.emplace_back(ids.begin(), ids.begin() + int64_t(std::min(n, ids.size())));
  return out;
}

}  // namespace

TEST_CASE("tiny models compute the same in every way") {
  const llm::Type type = on_gpu ? llm::Type::f16 : llm::Type::f32;
  if (!can(type, type, type)) return test::skip("no such device or types");
  for (const char* name :
       {"llama", "mistral", "qwen2_window", "qwen3", "phi3", "gemma2", "gemma3", "gpt2", "mixtral", "qwen2_moe"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden, type);
    compare_ways(folder.path(), type, three(golden["ids"].get<Ids>()),
                 on_gpu ? 2 * golden["errors"]["float16"].get<double>() : 2e-5);
  }
}

// Twice the error that transformers has itself; fp32 is tested against its logits in models.cpp.
TEST_CASE("models with weights and caches of 16 bits err no more than transformers does") {
  for (const llm::Type type : {llm::Type::f16, llm::Type::bf16}) {
    if (!can(type, type, type)) continue;
    for (const auto& file : fs::directory_iterator(LLM_GOLDEN)) {
      if (file.path().extension() != ".json") continue;
      const Json golden = llm::read_json(file.path().string());
      if (!golden.contains("tensors")) continue;
      INFO(file.path().stem().string() << " in " << llm::name_of(type));
      const ModelFolder folder(golden, type);
      llm::Settings settings = settings_of(folder.path(), type);
      settings.context = 200;
      Loaded model(settings);
      const double allowed = 2 * golden["errors"][type == llm::Type::f16 ? "float16" : "bfloat16"].get<double>();
      const Ids ids = golden["ids"].get<Ids>();
      for (const Json& mark : golden["logits"]) {
        CHECK(difference(model.read({ids.begin(), ids.begin() + mark["at"].get<int64_t>() + 1}).data(),
                         mark["values"].get<std::vector<float>>()) < allowed);
      }
    }
  }
}

TEST_CASE("models of fp32 become bf16 on a GPU") {
  if (!on_gpu || !can(llm::Type::bf16, llm::Type::bf16, llm::Type::bf16)) return test::skip("no GPU, or not compiled");
  for (const char* name : {"llama", "gpt2", "phi3", "qwen2_moe"}) {
    INFO(name);
    const Json golden = read(name);
    const ModelFolder folder(golden, llm::Type::f32);
    llm::Settings settings = settings_of(folder.path(), llm::Type::bf16);
    settings.context = 200;
    Loaded model(settings);
    const Ids ids = golden["ids"].get<Ids>();
    for (const Json& mark : golden["logits"]) {
      CHECK(difference(model.read({ids.begin(), ids.begin() + mark["at"].get<int64_t>() + 1}).data(),
                       mark["values"].get<std::vector<float>>()) < 2 * golden["errors"]["bfloat16"].get<double>());
    }
  }
}

TEST_CASE("the bundled model computes the same in every way, and on the CPU") {
  if (!can(llm::Type::f16, llm::Type::f16, llm::Type::f16)) return test::skip("no such device or types");
  const Ids ids = llm::Tokenizer(LLM_MODEL).encode(stories()[0]);
  REQUIRE(ids.size() > 100);
  compare_ways(LLM_MODEL, llm::Type::f16, three(ids), 1e-2);
  if (!on_gpu) return;
  llm::Settings settings = settings_of(LLM_MODEL, llm::Type::f16);
  const std::vector<float> there = Loaded(settings).read(ids);
  settings.device = "cpu";
  CHECK(difference(there.data(), Loaded(settings).read(ids)) < 1e-2);
}

// On a GPU other kernels read guesses than single tokens, and two tokens that are as likely to the last bits may change
// places: hardly a text does that.
TEST_CASE("the bundled model's texts are the same with guesses") {
  if (!can(llm::Type::f16, llm::Type::f16, llm::Type::f16)) return test::skip("no such device or types");
  llm::Settings settings = settings_of(LLM_MODEL, llm::Type::f16);
  settings.most = 80, settings.context = 200;
  const auto write = [&](const std::string& prompt, int64_t guesses, llm::Session::Times& times) {
    settings.lookup = guesses;
    llm::Session session(settings);
    session.load(1);
    return session.generate({session.tokenizer->encode(prompt)}, [](size_t, const std::string&) {}, times)[0].ids;
  };
  int others = 0;
  for (const char* prompt : {"Once upon a time, there was a little girl named Lily.", "Tom had a red ball. Tom",
                             "The dog ran. The dog ran. The dog ran. The dog", "One day, a big bear"}) {
    INFO(prompt);
    llm::Session::Times plain, guessed;
    const Ids alone = write(prompt, 0, plain), together = write(prompt, 7, guessed);
    others += alone != together;
    if (alone == together) CHECK(guessed.steps <= plain.steps);
    if (std::string(prompt).find("ran. The") != std::string::npos) CHECK(guessed.steps < plain.steps);
  }
  CHECK(others <= (on_gpu ? 1 : 0));
}

TEST_CASE("the bundled model foresees texts with fewer bits almost as well") {
  struct {
    llm::Type weights, cache;
    double most;
  } const all[] = {{llm::Type::i8, llm::Type::f16, 1.005},
                   {llm::Type::i4, llm::Type::f16, 1.04},
                   {llm::Type::f8, llm::Type::f16, 1.01},
                   {llm::Type::f16, llm::Type::f8, 1.01},
                   {llm::Type::f16, llm::Type::i8, 1.005}};
  if (!can(llm::Type::f16, llm::Type::f16, llm::Type::f16)) return test::skip("no such device or types");
  const double plain = nats(settings_of(LLM_MODEL, llm::Type::f16));
  CHECK(plain < 2.6);  // it has learned something, or nothing is tested
  for (const auto& one : all) {
    if (!can(llm::Type::f16, one.weights, one.cache)) continue;
    llm::Settings settings = settings_of(LLM_MODEL, llm::Type::f16);
    settings.weights = llm::name_of(one.weights), settings.cache = llm::name_of(one.cache);
    const double more = std::exp(nats(settings) - plain);
    INFO("weights of " << llm::name_of(one.weights) << ", cache of " << llm::name_of(one.cache) << ": perplexity "
                       << std::exp(plain) << " times " << more);
    CHECK(more < one.most);
    if (one.cache != llm::Type::i8) continue;
    settings.page = 5;  // scales lie in pages as keys do
    CHECK(std::exp(nats(settings) - plain) < one.most);
  }
}

// On a GPU products of so many tokens decode their weights ahead of them, to memory that is planned for it.
TEST_CASE("the bundled model reads long prompts alike in one chunk and in several, with fewer bits") {
  for (const llm::Type weights : {llm::Type::i8, llm::Type::i4}) {
    if (!can(llm::Type::f16, weights, llm::Type::f16)) continue;
    llm::Settings settings = settings_of(LLM_MODEL, llm::Type::f16);
    settings.weights = llm::name_of(weights), settings.context = 1024, settings.chunk = 768;
    Loaded whole(settings);
    const Ids ids = long_text(*whole.session.tokenizer, 1000);
    const auto at_once = whole.read(ids);
    settings.chunk = 767;
    Loaded parts(settings);
    INFO(llm::name_of(weights));
    // A row more, and on a GPU the memory.
    const size_t room = whole.session.model->plan().activations - parts.session.model->plan().activations;
    CHECK((room > size_t(2 * 2 * whole.session.config.inner * whole.session.config.hidden)) == on_gpu);
    CHECK(difference(parts.read(ids).data(), at_once) < 0.02);
  }
}

TEST_CASE("the bundled model foresees long texts with inputs of 8 bits almost as well, and short ones the same") {
  int tested = 0;
  for (const llm::Type weights : {llm::Type::i8, llm::Type::f8}) {
    if (!can(llm::Type::f16, weights, llm::Type::f16)) continue;
    INFO(llm::name_of(weights));
    llm::Settings settings = settings_of(LLM_MODEL, llm::Type::f16);
    settings.weights = llm::name_of(weights), settings.context = 512;
    Loaded plain(settings);
    if (!plain.session.device->products(weights)->takes_codes(plain.session.device->place())) continue;
    settings.inputs = settings.weights;
    Loaded coded(settings);
    ++tested;
    CHECK(coded.session.model->plan().activations - plain.session.model->plan().activations == 512 * (576 + 4));
    const Ids ids = long_text(*plain.session.tokenizer, 512), few(ids.begin(), ids.begin() + 100);
    CHECK(coded.read(few) == plain.read(few));
    const double apart = difference(coded.read(ids).data(), plain.read(ids));
    CHECK(apart > 0);
    CHECK(apart < (weights == llm::Type::i8 ? 0.05 : 0.1));
    const auto nats_of = [&](Loaded& model) {
      double sum = 0;
      model.session.model->read(0, 0, ids.data(), 512, {}, [&](int64_t i, const float* logits) {
        if (i < 511) sum += llm::negative_log_likelihood(logits, model.session.config.vocabulary, ids[size_t(i + 1)]);
      });
      return sum / 511;
    };
    const double more = std::exp(nats_of(coded) - nats_of(plain));
    INFO("perplexity times " << more << ", logits apart by " << apart);
    CHECK(more < 1.02);
  }
  if (tested == 0) return test::skip("no such device or types");
}

// Layers with a LayerNorm, with norms behind products, with heads that are normalized, with experts and one for all.
TEST_CASE("all kinds of layers compute almost the same with inputs of 8 bits") {
  const llm::Type type = on_gpu ? llm::Type::f16 : llm::Type::f32;
  int tested = 0;
  for (const char* name : {"llama", "qwen3", "phi3", "gemma3", "gpt2", "mixtral", "qwen2_moe"}) {
    for (const llm::Type weights : {llm::Type::i8, llm::Type::f8}) {
      if (!can(type, weights, type)) continue;
      INFO(name << " with weights of " << llm::name_of(weights));
      const Json golden = read(name);
      const ModelFolder folder(golden, type);
      llm::Settings settings = settings_of(folder.path(), type);
      settings.weights = llm::name_of(weights), settings.context = 200;
      Loaded plain(settings);
      if (!plain.session.device->products(weights)->takes_codes(plain.session.device->place())) continue;
      settings.inputs = settings.weights;
      ++tested;
      Ids ids = golden["ids"].get<Ids>();
      while (ids.size() < 200) ids.push_back(ids[ids.size() / 2]);
      ids.resize(200);
      const double apart = difference(Loaded(settings).read(ids).data(), plain.read(ids));
      CHECK(apart > 0);
      CHECK(apart < (weights == llm::Type::i8 ? 0.05 : 0.15));
    }
  }
  if (tested == 0) return test::skip("no such device or types");
}

// ---- a step in one launch -------------------------------------------------------------------------------------------

namespace {

// A model that the launch takes, of numbers that say nothing.
Json walking_model(const std::string& type, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t dim, int64_t inner,
                   int64_t layers = 3, int64_t vocabulary = 96) {
  const int64_t nq = heads * dim, nk = kv_heads * dim;
  Json config = {{"model_type", type},
                 {"vocab_size", vocabulary},
                 {"hidden_size", hidden},
                 {"intermediate_size", inner},
                 {"num_hidden_layers", layers},
                 {"num_attention_heads", heads},
                 {"num_key_value_heads", kv_heads},
                 {"head_dim", dim},
                 {"hidden_act", "silu"},
                 {"rms_norm_eps", 1e-5},
                 {"rope_theta", 10000.0},
                 {"tie_word_embeddings", false},
                 {"max_position_embeddings", 4096}};
  // Fewer keys than one block takes alone, and more.
  if (type == "mistral") config["sliding_window"] = layers > 3 ? 450 : 150;
  if (type == "qwen2") config["use_sliding_window"] = false, config.erase("head_dim");
  Json tensors = Json::array();
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape, double scale, double offset = 0) {
    tensors.push_back({name, shape, scale, offset});
  };
  add("model.embed_tokens.weight", {vocabulary, hidden}, 1);
  for (int64_t i = 0; i < layers; ++i) {
    const std::string at = "model.layers." + std::to_string(i) + ".", attention = at + "self_attn.", mlp = at + "mlp.";
    const auto matrix = [&](const std::string& name, int64_t rows, int64_t cols) {
      add(name + ".weight", {rows, cols}, 2 / std::sqrt(double(cols)));
    };
    matrix(attention + "q_proj", nq, hidden), matrix(attention + "k_proj", nk, hidden);
    matrix(attention + "v_proj", nk, hidden), matrix(attention + "o_proj", hidden, nq);
    matrix(mlp + "gate_proj", inner, hidden), matrix(mlp + "up_proj", inner, hidden);
    matrix(mlp + "down_proj", hidden, inner);
    if (type == "qwen2") {
      add(attention + "q_proj.bias", {nq}, 0.5), add(attention + "k_proj.bias", {nk}, 0.5);
      add(attention + "v_proj.bias", {nk}, 0.5);
    }
    if (type == "qwen3")
      add(attention + "q_norm.weight", {dim}, 0.5, 1), add(attention + "k_norm.weight", {dim}, 0.5, 1);
    add(at + "input_layernorm.weight", {hidden}, 0.5, 1), add(at + "post_attention_layernorm.weight", {hidden}, 0.5, 1);
  }
  add("model.norm.weight", {hidden}, 0.5, 1);
  add("lm_head.weight", {vocabulary, hidden}, 2 / std::sqrt(double(hidden)));
  return {{"config", config}, {"tensors", tensors}};
}

Ids some_ids(int64_t n) {
  Ids out;
  for (int64_t i = 0; i < n; ++i) out.push_back(int32_t((i * i * 7 + 11 * i + 3) % 96));
  return out;
}

// The same text by the launch and call by call: the logits of one step, and whether all tokens of some more are the
// same.
bool compare_walk(llm::Settings settings, int64_t prompt, int steps, double tolerance) {
  std::vector<Ids> walked = {some_ids(prompt)}, called = walked;
  Loaded one(settings);
  REQUIRE(one.session.model->walks());
  setenv("LLM_WALK", "0", 1);
  Loaded other(settings);
  unsetenv("LLM_WALK");
  REQUIRE_FALSE(other.session.model->walks());
  const auto same_logits = [&](int count) {
    const auto mine = one.write(walked, count), its = other.write(called, count);
    if (walked != called) return false;
    CHECK(difference(mine[0].data(), its[0]) < tolerance);
    return true;
  };
  REQUIRE(same_logits(1));        // the token that it reads comes from the prompt
  return same_logits(steps - 1);  // two tokens may have almost the same logits
}

// Without a graph, where it depends on the kernel ahead programmatically or waits for its end, the launch computes the
// same bits.
void compare_launches(const llm::Settings& settings, int64_t prompt) {
  std::vector<Ids> texts = {some_ids(prompt)};
  const auto in_graph = Loaded(settings).write(texts, 3);
  setenv("LLM_GRAPH", "0", 1);
  for (const char* early : {"1", "0"}) {
    setenv("LLM_EARLY", early, 1);
    std::vector<Ids> again = {some_ids(prompt)};
    const auto launched = Loaded(settings).write(again, 3);
    INFO("LLM_GRAPH=0 LLM_EARLY=" << early);
    CHECK(again == texts);
    CHECK(launched == in_graph);
  }
  unsetenv("LLM_GRAPH");
  unsetenv("LLM_EARLY");
}

}  // namespace

TEST_CASE("a step in one launch computes what its calls do") {
  if (!on_gpu) return test::skip("there is no such launch on the CPU");
  // The last one has more layers than there are in shared memory, more tiles for a block than wait for their results at
  // a time, and a head whose last tile is not whole.
  const Json models[] = {
      walking_model("llama", 256, 12, 4, 64, 768),           walking_model("mistral", 512, 8, 1, 64, 256),
      walking_model("qwen2", 512, 4, 4, 128, 1280),          walking_model("llama", 2304, 8, 2, 128, 512),
      walking_model("qwen3", 256, 12, 2, 128, 512),          walking_model("qwen3", 512, 8, 8, 64, 768),
      walking_model("mistral", 256, 4, 2, 64, 17408, 7, 101)};
  struct {
    llm::Type stored, weights;
    double tolerance;
  } const types[] = {{llm::Type::f16, llm::Type::f16, 1e-2}, {llm::Type::bf16, llm::Type::bf16, 6e-2},
                     {llm::Type::f16, llm::Type::f8, 1e-2},  {llm::Type::f16, llm::Type::i8, 1e-2},
                     {llm::Type::bf16, llm::Type::i4, 6e-2}, {llm::Type::f16, llm::Type::i4, 1e-2}};
  int same = 0, all = 0;
  test::Shortened shortened;
  for (const Json& model : models) {
    for (const auto& type : types) {
      if (!can(type.stored, type.weights, type.stored)) continue;
      const ModelFolder folder(model, type.stored);
      llm::Settings settings = settings_of(folder.path(), type.stored);
      settings.weights = llm::name_of(type.weights);
      for (const int64_t prompt : {140, 1, 40, 127, 382, 1500}) {
        if (shortened.leaves_out()) continue;
        INFO(model["config"]["model_type"].get<std::string>()
             << " of " << llm::name_of(type.weights) << " in " << llm::name_of(type.stored) << ", behind " << prompt);
        settings.context = 2000, settings.page = prompt == 140 ? 16 : 0;
        same += compare_walk(settings, prompt, 5, type.tolerance), ++all;
        if (prompt == 40) compare_launches(settings, prompt);
      }
      if (model["config"]["model_type"] == "mistral" || shortened.leaves_out()) continue;
      INFO("in a ring, of " << llm::name_of(type.weights) << " in " << llm::name_of(type.stored));
      settings.context = 64, settings.page = 0, settings.sinks = 4;
      same += compare_walk(settings, 50, 40, type.tolerance), ++all;
    }
  }
  INFO(same << " of " << all << " texts are the same");
  CHECK(10 * same >= 8 * all);
}
