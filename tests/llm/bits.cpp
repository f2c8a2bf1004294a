// Weights, and keys and values, of few bits: every architecture with each of them, against transformers' logits in
// fp32.
#include <limits>

#include "golden.h"
#include "support/catch.h"

using namespace golden;

namespace {

using Ids = llm::Tokenizer::Ids;

struct On {
  llm::Settings settings;
  llm::Session session;
  On(const Folder& folder, const char* weights, const char* cache)
      : settings(settings_of(folder, weights, cache)), session(settings) {
    session.load(1);
  }
  static llm::Settings settings_of(const Folder& folder, const char* weights, const char* cache) {
    llm::Settings s;
    s.directory = folder.path(), s.device = "cpu", s.threads = 2, s.quiet = true, s.weights = weights, s.cache = cache;
    s.context = 200, s.temperature = 0, s.ignore_eos = true, s.most = 4;
    return s;
  }
  std::vector<float> read(const Ids& ids) {
    session.model->read(0, 0, ids.data(), int64_t(ids.size()));
    const float* const logits = session.model->logits(0);
    return {logits, logits + session.config.vocabulary};
  }
};

Ids first(const Ids& ids, int64_t n) { return {ids.begin(), ids.begin() + n}; }

// The same with more columns inside of feed-forward layers, as int4 needs them.
Json widened(Json golden) {
  const auto wider = [](int64_t n) -> int64_t { return n == 24 ? 32 : n == 40 || n == 48 ? 64 : n; };
  for (const char* name : {"intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"}) {
    Json& config = golden["config"];
    if (config.contains(name)) config[name] = wider(config[name].get<int64_t>());
  }
  for (Json& tensor : golden["tensors"]) {
    const bool two = tensor[0].get<std::string>().find("gate_up_proj") != std::string::npos;
    for (Json& n : tensor[1]) n = two && n == 96 ? 128 : wider(n.get<int64_t>());
  }
  return golden;
}

}  // namespace

// The bounds are twice what was measured on a CPU with AVX2, and below what other prompts' logits differ by.
TEST_CASE("weights, keys and values of few bits change the logits of every architecture little") {
  struct {
    const char* name;
    double int8, fp8, cache_int8, cache_fp8, int4;
  } const all[] = {{"llama", 0.028, 0.14, 0.015, 0.044, 0.38},     {"phi3", 0.017, 0.25, 0.012, 0.069, 0.46},
                   {"gpt2", 0.019, 0.14, 0.011, 0.042, 0.24},      {"mixtral", 0.017, 0.11, 0.009, 0.056, 0.48},
                   {"qwen2", 0.024, 0.20, 0.017, 0.11, 0.63},      {"qwen2_moe", 0.018, 0.10, 0.011, 0.085, 0.27},
                   {"gemma2", 0.027, 0.14, 0.014, 0.088, 0.44},    {"gemma3", 0.021, 0.16, 0.018, 0.12, 0.56},
                   {"qwen3", 0.023, 0.13, 0.013, 0.081, 0.61},     {"mistral", 0.027, 0.14, 0.012, 0.081, 0.39}};
  for (const auto& one : all) {
    const Json golden = read(one.name);
    const Ids ids = golden["ids"].get<Ids>();
    std::vector<Ids> prompts;
    std::vector<std::vector<float>> expected;
    for (const Json& mark : golden["logits"]) {
      prompts.push_back(first(ids, mark["at"].get<int64_t>() + 1));
      expected.push_back(mark["values"].get<std::vector<float>>());
    }
    const auto compare = [&](On&& on, double bound, const char* what) {
      INFO(one.name << ": " << what);
      CHECK(bound < difference(expected[0].data(), expected.back()));
      for (size_t i = 0; i < prompts.size(); ++i) CHECK(difference(on.read(prompts[i]).data(), expected[i]) < bound);
    };
    const ModelFolder folder(golden);
    compare(On(folder, "int8", "fp32"), one.int8, "weights of int8");
    compare(On(folder, "fp8", "fp32"), one.fp8, "weights of fp8");
    compare(On(folder, "fp32", "int8"), one.cache_int8, "keys and values of int8");
    compare(On(folder, "fp32", "fp8"), one.cache_fp8, "keys and values of fp8");

    const ModelFolder wide(widened(golden));
    On plain(wide, "fp32", "fp32");
    for (size_t i = 0; i < prompts.size(); ++i) expected[i] = plain.read(prompts[i]);
    compare(On(wide, "int4", "fp32"), one.int4, "weights of int4");
  }
}

TEST_CASE("keys with large biases are kept by a cache of 16 bits") {
  const Json golden = read("qwen2");
  const ModelFolder folder(golden);
  auto tensors = tensors_of(golden);
  for (auto& tensor : tensors) {
    if (tensor.name.find("k_proj.bias") == std::string::npos) continue;
    for (float& x : tensor.values) x += 300;
  }
  folder.write("model.safetensors", safetensors(tensors, Type::f32));
  const Ids ids = golden["ids"].get<Ids>();
  On plain(folder, "fp32", "fp32");
  const std::vector<float> exact = plain.read(ids), shorter = plain.read(first(ids, 10));
  CHECK(difference(shorter.data(), exact) > 0.1);
  CHECK(difference(On(folder, "fp32", "fp16").read(ids).data(), exact) < 0.005);  // 0.0024, measured
}

TEST_CASE("weights that are no numbers do not become numbers of 8 or 4 bits") {
  const Json golden = widened(read("llama"));
  const ModelFolder folder(golden);
  for (const float x : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity()}) {
    auto tensors = tensors_of(golden);
    for (auto& tensor : tensors) {
      if (tensor.name == "model.layers.1.mlp.up_proj.weight") tensor.values[77] = x;
    }
    folder.write("model.safetensors", safetensors(tensors, Type::f32));
    for (const char* weights : {"fp8", "int8", "int4"}) {
      INFO(x << " in " << weights);
      std::string why;
      try {
        On(folder, weights, "fp32");
      } catch (const llm::Error& e) {
        why = e.what();
      }
      CHECK(why.find("model.layers.1.mlp.up_proj.weight: an infinite or NaN weight") == 0);
    }
  }
}

TEST_CASE("a text ends with a line where its logits are no numbers") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  auto tensors = tensors_of(golden);
  for (auto& tensor : tensors) {
    if (tensor.name == "model.layers.1.input_layernorm.weight")
      tensor.values[5] = std::numeric_limits<float>::quiet_NaN();
  }
  const auto refusal = [&] {
    On on(folder, "stored", "fp32");
    llm::Session::Times times;
    try {
      on.session.generate({golden["ids"].get<Ids>()}, {}, times);
    } catch (const llm::Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refusal() == "");
  folder.write("model.safetensors", safetensors(tensors, Type::f32));
  CHECK(refusal().find("are not finite") != std::string::npos);
}

TEST_CASE("a text ends with a line where a logit is infinite") {
  const Json golden = read("llama");
  const ModelFolder folder(golden);
  auto tensors = tensors_of(golden);
  for (auto& tensor : tensors) {
    if (tensor.name == "model.norm.weight") tensor.values[0] = 1e20f;
    // One of them becomes infinite, and the other one its negative, which is never chosen.
    if (tensor.name == "lm_head.weight") tensor.values[0] = 1e20f, tensor.values[size_t(tensor.shape[1])] = -1e20f;
  }
  folder.write("model.safetensors", safetensors(tensors, Type::f32));
  for (const double temperature : {0.0, 1.0}) {
    for (const int64_t lookup : {0, 4}) {
      INFO("temperature " << temperature << ", " << lookup << " guesses");
      llm::Settings settings = On::settings_of(folder, "stored", "fp32");
      settings.temperature = temperature, settings.lookup = lookup;
      std::string why;
      try {
        llm::Session session(settings);
        session.load(1);
        llm::Session::Times times;
        session.generate({golden["ids"].get<Ids>()}, {}, times);
      } catch (const llm::Error& e) {
        why = e.what();
      }
      CHECK(why.find("are not finite: the model has overflowed") != std::string::npos);
    }
  }
}
