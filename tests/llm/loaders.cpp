// Files that are wrong, in every way that comes to mind: one clear line, and no crash. The sanitizers' run of this test
// is what counts.
#include <functional>

#include "fuzz/fuzz.h"
#include "golden.h"
#include "support/catch.h"
#include "tokenizer/tokenizer.h"

using namespace golden;

namespace {

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const llm::Error& e) {
    CHECK(std::string(e.what()).find('\n') == std::string::npos);
    CHECK(std::string(e.what()).size() > 10);
    return e.what();
  }
  return "";
}

// A golden file's configuration with other fields, of which those that are `gone` are left out.
const char* const gone = "(gone)";
Json edited(Json config, const Json& edits) {
  for (const auto& item : edits.items()) {
    if (item.value() == gone) config.erase(item.key());
    else config[item.key()] = item.value();
  }
  return config;
}
llm::Config config_of(const std::string& golden, const Json& edits) {
  return llm::read_config(edited(read(golden)["config"], edits));
}
std::string why_not(const std::string& golden, const Json& edits) {
  return refusal([&] { config_of(golden, edits); });
}

std::string parse(const std::string& bytes) {
  // In a block of exactly this size, so that reading behind it is noticed.
  std::vector<unsigned char> exact(bytes.begin(), bytes.end());
  exact.shrink_to_fit();
  return refusal([&] { llm::parse_safetensors(exact.data(), exact.size(), "file"); });
}

std::string with_header(const std::string& json, size_t data) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = char(json.size() >> (8 * i) & 255);
  return out + json + std::string(data, 'x');
}

std::string tensor(const std::string& shape, const std::string& offsets, const std::string& dtype = "F32") {
  return "{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
}

}  // namespace

TEST_CASE("safetensors that are not what they must be are refused") {
  CHECK(parse(with_header(tensor("[2,2]", "[0,16]"), 16)) == "");
  CHECK(parse(with_header("{}", 0)) == "");
  for (
      const std::string& bytes :
      {std::string(),
       std::string("abc"),
       std::string(8, '\xff'),
       std::string(8, '\0'),
       with_header("{", 0),
       with_header("[]", 0),
       with_header("{\"a\":1}", 0),
       with_header("{\"a\":{}}", 0),
       with_header(tensor("[2,2]", "[0,17]"), 16),
       with_header(tensor("[2,2]", "[0,12]"), 16),
       with_header(tensor("[2,2]", "[16,0]"), 16),
       with_header(tensor("[-1,2]", "[0,16]"), 16),
       with_header(tensor("[2.5,2]", "[0,16]"), 16),
       with_header(tensor("[2,2]", "[0]"), 16),
       with_header(tensor("[2,2]", "[-16,0]"), 16),
       with_header(tensor("{}", "[0,16]"), 16),
       with_header(tensor("[4294967296,4294967296]", "[0,16]"), 16),
       with_header(tensor("[18446744073709551615,2]", "[0,16]"), 16),
       with_header(tensor("[0,18446744073709551615]", "[0,0]"), 16),
       with_header(tensor("[2,2]", "[18446744073709551600,18446744073709551615]"), 16),
       with_header(
           "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
           16),
       with_header(std::string(100000, '['), 0),
       with_header("{\"a\":" + std::string(5000, '[') + std::string(5000, ']') + "}", 0),
       std::string("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")}) {
    INFO(llm::shown(bytes));
    CHECK(parse(bytes) != "");
  }
  // Types that nobody reads are no error until somebody wants them.
  CHECK(parse(with_header(tensor("[16]", "[0,16]", "U8"), 16)) == "");
}

TEST_CASE("configurations, tokenizers and directories that are wrong are refused by name") {
  const Json golden = read("llama");
  const auto with = [&](const char* field, const Json& value) {
    Json config = golden["config"];
    config[field] = value;
    return refusal([&] { llm::read_config(config); });
  };
  CHECK(with("vocab_size", 96) == "");
  CHECK(with("model_type", "mamba").find("mamba") != std::string::npos);
  CHECK(with("hidden_act", "relu6").find("relu6") != std::string::npos);
  CHECK(with("hidden_size", -1).find("hidden_size") != std::string::npos);
  CHECK(with("hidden_size", 1e300).find("hidden_size") != std::string::npos);
  CHECK(with("hidden_size", uint64_t(1) << 63).find("hidden_size") != std::string::npos);
  CHECK(with("num_attention_heads", 0).find("num_attention_heads") != std::string::npos);
  CHECK(with("num_key_value_heads", 3).find("num_key_value_heads") != std::string::npos);
  CHECK(with("head_dim", 12).find("head_dim") != std::string::npos);
  CHECK(with("rope_parameters", {{"rope_type", "spiral"}}).find("spiral") != std::string::npos);
  CHECK(with("rope_parameters", {{"rope_type", "linear"}, {"factor", 2.0}, {"wobble", 1}}).find("wobble") !=
        std::string::npos);
  CHECK(with("rope_parameters", {{"rope_type", "llama3"}, {"factor", 2.0}}).find("low_freq_factor") !=
        std::string::npos);
  CHECK(with("quantization_config", {{"bits", 4}}).find("quantization_config") != std::string::npos);
  CHECK(with("mlp_bias", true).find("config.json: mlp_bias: true") != std::string::npos);
  CHECK(with("mlp_bias", false) == "");
  CHECK(with("eos_token_id", "</s>").find("config.json: eos_token_id") != std::string::npos);
  for (const Json& wrong : {Json("0"), Json(0), Json(true), Json::object(), Json::array({"0"}), Json::array({0.5}),
                            Json::array({-1}), Json::array({1 << 20}), Json::array({nullptr})}) {
    INFO(wrong);
    Json config = read("qwen3_moe")["config"];
    config["mlp_only_layers"] = wrong;
    CHECK(refusal([&] { llm::read_config(config); }).find("config.json: mlp_only_layers: ") == 0);
    config["mlp_only_layers"] = {0};
    CHECK(!llm::read_config(config).layers[0].experts);
  }
  CHECK(with("wobble", 2.0) == "");  // a line says that it is not read
  CHECK(with("original_max_position_embeddings", 64).find("original_max_position_embeddings") != std::string::npos);
  CHECK(with("original_max_position_embeddings", golden["config"]["max_position_embeddings"]) == "");
  for (const char* kind : {"llama_yarn", "llama_llama3"}) {
    Json config = read(kind)["config"];
    config["original_max_position_embeddings"] = 64;
    CHECK(refusal([&] { llm::read_config(config); }) == "");
    config["original_max_position_embeddings"] = 128;
    CHECK(refusal([&] { llm::read_config(config); }).find("128") != std::string::npos);
  }
  CHECK(refusal([&] { llm::read_config(Json::array()); }) != "");
  CHECK(refusal([&] { llm::parse_json(std::string(1000, '[') + std::string(1000, ']'), "deep"); }).find("deep") !=
        std::string::npos);

  const auto load = [&](const std::function<void(const Folder&, Json&)>& spoil) {
    const Folder folder;
    Json copy = golden;
    write_model(folder, golden, golden["config"], Type::f32);
    spoil(folder, copy);
    return refusal([&] {
      llm::Settings settings;
      settings.directory = folder.path(), settings.device = "cpu", settings.quiet = true, settings.threads = 1,
      settings.most = 1;
      llm::Session session(settings);
      session.load(1);
      llm::Session::Times times;
      session.generate({session.tokenizer->encode("A text")}, {}, times);
    });
  };
  const auto weights = [](const std::function<void(std::vector<golden::Tensor>&)>& change) {
    return [change](const Folder& folder, Json& json) {
      auto tensors = tensors_of(json);
      change(tensors);
      folder.write("model.safetensors", safetensors(tensors, Type::f32));
    };
  };
  CHECK(load([](const Folder&, Json&) {}) == "");
  CHECK(load(weights([](auto& t) { t.erase(t.begin() + 3); })).find(golden["tensors"][3][0].get<std::string>()) !=
        std::string::npos);
  CHECK(load(weights([](auto& t) {
          t.push_back({"model.extra.weight", {2}, {1, 2}});
        })).find("model.extra.weight") != std::string::npos);
  CHECK(load(weights([](auto& t) {
          std::swap(t[3].shape[0], t[3].shape[1]), t[3].shape[0] *= 2, t[3].values.resize(t[3].values.size() * 2);
        })) != "");
  CHECK(load(weights([](auto& t) {
          t.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {4}, {1, 2, 3, 4}});
        })) == "");
  CHECK(load([](const Folder& f, Json&) {
          f.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
        }).find("Git LFS") != std::string::npos);
  for (const char* file : {"config.json", "tokenizer.json", "model.safetensors.index.json"}) {
    const std::string why = load([&](const Folder& f, Json&) {
      if (file == std::string("model.safetensors.index.json")) fs::remove(f.path() + "/model.safetensors");
      f.write(file, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n");
    });
    CHECK(why.find("Git LFS") != std::string::npos);
    CHECK(why.find(file) != std::string::npos);
  }
  CHECK(load([](const Folder& f, Json&) {
          fs::resize_file(f.path() + "/model.safetensors", fs::file_size(f.path() + "/model.safetensors") - 100);
        }).find("ends 100 bytes beyond the file: the download may be incomplete") != std::string::npos);
  CHECK(load([](const Folder& f, Json&) {
          f.write("config.json", "{\"model_type\": \"llama\"");
        }).find("config.json") != std::string::npos);
  CHECK(load([](const Folder& f, Json&) { f.write("tokenizer.json", "{}"); }).find("tokenizer.json") !=
        std::string::npos);
  CHECK(load([](const Folder& f, Json&) {
          fs::remove(f.path() + "/model.safetensors");
          f.write("pytorch_model.bin", "x");
        }).find("pytorch_model.bin") != std::string::npos);
  CHECK(load([](const Folder& f, Json&) {
          fs::remove(f.path() + "/config.json"), fs::remove(f.path() + "/model.safetensors");
          f.write("llama-q4_k.gguf", "x");
        }).find("GGUF") != std::string::npos);
  // Beside a config.json, or without one; GGUF by any name.
  for (const auto& [name, what] : std::map<std::string, std::string>{
           {"model.bin", "GGUF files"}, {"consolidated.safetensors", "weights in consolidated.safetensors"}}) {
    for (const bool configured : {true, false}) {
      CHECK(load([&, name = name](const Folder& f, Json&) {
              fs::remove(f.path() + "/model.safetensors"), fs::remove(f.path() + "/tokenizer.json");
              if (!configured) fs::remove(f.path() + "/config.json");
              f.write(name, name == "model.bin" ? "GGUF" : "x");
            }).find(what) != std::string::npos);
    }
  }
  CHECK(load([](const Folder& f, Json&) {
          f.write("model.safetensors", "GGUF" + std::string(100, '\0'));
        }).find("model.safetensors: GGUF files") == 0);
  const Folder single;
  single.write("model", "GGUF");
  CHECK(refusal([&] {
          llm::Settings settings;
          settings.directory = single.path() + "/model";
          llm::Session session(settings);
        }).find("GGUF files are not supported") != std::string::npos);
  CHECK(load([](const Folder& f, Json&) { fs::remove(f.path() + "/model.safetensors"); }).find("model.safetensors") !=
        std::string::npos);
  for (const char* index : {"{}", "{\"weight_map\":{\"a\":\"../../etc/passwd\"}}", "{\"weight_map\":{\"a\":5}}",
                            "{\"weight_map\":{\"a\":\"missing.safetensors\"}}"}) {
    CHECK(load([&](const Folder& f, Json&) {
            fs::remove(f.path() + "/model.safetensors");
            f.write("model.safetensors.index.json", index);
          }) != "");
  }
  CHECK(load([](const Folder& f, Json&) {
    Json more = llm::parse_json(tokenizer(), "tokenizer");
    more["added_tokens"] = {{{"id", 96}, {"content", "A"}}};
    f.write("tokenizer.json", more.dump());
  }).find("token 96") != std::string::npos);
  for (const Json& wrong : {Json{{"do_sample", "yes"}}, Json{{"temperature", "1"}}, Json{{"top_k", 2.5}},
                            Json{{"top_p", true}}, Json{{"min_p", Json::array()}}, Json{{"top_k", -2}},
                            Json{{"repetition_penalty", Json::object()}}, Json{{"eos_token_id", "</s>"}}}) {
    const std::string name = wrong.begin().key();
    const auto why = load([&](const Folder& f, Json&) { f.write("generation_config.json", wrong.dump()); });
    CHECK(why.find("generation_config.json: " + name + ": ") == 0);
  }
  CHECK(load([](const Folder& f, Json&) {
          f.write("generation_config.json", R"({"do_sample": null, "top_k": null, "temperature": 1, "wobble": 5})");
        }) == "");
  // Shards, and one that is missing.
  const auto shards = [](bool both) {
    return [both](const Folder& f, Json& json) {
      fs::remove(f.path() + "/model.safetensors");
      const auto all = tensors_of(json);
      const size_t half = all.size() / 2;
      Json map = Json::object();
      for (size_t i = 0; i < all.size(); ++i)
        map[all[i].name] = i < half ? "model-1.safetensors" : "model-2.safetensors";
      f.write("model.safetensors.index.json", Json{{"weight_map", map}}.dump());
      f.write("model-1.safetensors", safetensors({all.begin(), all.begin() + int(half)}, Type::f32));
      if (both) f.write("model-2.safetensors", safetensors({all.begin() + int(half), all.end()}, Type::f32));
    };
  };
  CHECK(load(shards(true)) == "");
  CHECK(load(shards(false)).find("model-2.safetensors") != std::string::npos);
}

TEST_CASE("fields that change the computation elsewhere are refused, unless their value changes nothing") {
  const Json one = {1, 1.0}, off = {false}, none = Json::array();
  const std::map<std::string, Json> neutral = {{"no_rope_layers", off},
                                               {"no_rope_layer_interval", off},
                                               {"rope", none},
                                               {"my_rotary_base", none},
                                               {"use_mrope", off},
                                               {"use_rope", {true}},
                                               {"rotary_pct", one},
                                               {"rope_ratio", one},
                                               {"use_scaled_rope_scaling", {false, 1, 1.0}},
                                               {"logits_scaling", one},
                                               {"embedding_multiplier", one},
                                               {"residual_multiplier", one},
                                               {"attention_multiplier", none},
                                               {"attn_logit_softcapping", none},
                                               {"final_logit_softcapping", none},
                                               {"use_qk_norm", off},
                                               {"alibi", off},
                                               {"mlp_bias", off},
                                               {"is_causal", {true}},
                                               {"use_bidirectional_attention", off},
                                               {"position_embedding_type", {"rope"}},
                                               {"quantization", none},
                                               {"quantization_config", none}};
  const Json values = {true, false, 0, 1, 1.0, 2.0, "rope", "alibi", {0, 1}, {{"bits", 4}}};
  for (const char* kind : {"llama", "gemma", "qwen2"}) {
    const Json config = read(kind)["config"];
    for (const auto& [name, allowed] : neutral) {
      for (const Json& value : values) {
        INFO(kind << " " << name << " " << value);
        const bool may = std::find(allowed.begin(), allowed.end(), value) != allowed.end();
        const std::string why = refusal([&] { llm::read_config(edited(config, {{name, value}})); });
        CHECK((may ? why == "" : why.find("config.json: " + name + ": ") == 0));
      }
      CHECK(llm::read_config(edited(config, {{name, nullptr}})).unread.empty());
    }
    CHECK(llm::read_config(edited(config, {{"wobble", nullptr}})).unread.empty());
    CHECK(llm::read_config(edited(config, {{"wobble", 1}})).unread == std::vector<std::string>{"wobble"});
  }
  CHECK(why_not("qwen3", {{"use_qk_norm", true}}) == "");
  CHECK(why_not("gpt2", {{"position_embedding_type", "absolute"}}) == "");
  CHECK(why_not("gpt2", {{"position_embedding_type", "rope"}}).find("config.json: position_embedding_type: ") == 0);
  // Gemma 3's caps, of which transformers passes one on.
  CHECK(why_not("gemma3", {{"attn_logit_softcapping", 50}}).find("config.json: attn_logit_softcapping: ") == 0);
  CHECK(config_of("gemma3", {{"final_logit_softcapping", 30}}).logit_cap == 30);
  // What stands beside the text model's fields.
  const auto beside = [&](const Json& fields) {
    return edited({{"model_type", "gemma3"}, {"text_config", read("gemma3")["config"]}, {"mm_tokens_per_image", 256}},
                  fields);
  };
  for (const char* name : {"rope_scaling", "final_logit_softcapping", "use_bidirectional_attention", "quantization"}) {
    INFO(name);
    const Json value = name == std::string("rope_scaling") ? Json{{"factor", 8}} : Json(true);
    const std::string why = refusal([&] { llm::read_config(beside({{name, value}})); });
    CHECK(why.find(std::string("config.json: ") + name + ": ") == 0);
    CHECK(llm::read_config(beside({{name, nullptr}})).unread.empty());
  }
  CHECK(llm::read_config(beside({{"wobble", 1}})).unread == std::vector<std::string>{"wobble"});
  Json both = beside(Json::object());
  both["text_config"]["quantization"] = {{"bits", 4}};
  CHECK(refusal([&] { llm::read_config(both); }).find("config.json: quantization: ") == 0);
}

TEST_CASE("windows are those of transformers, also where fields are missing") {
  const auto windows = [](const char* kind, const Json& edits) {
    std::vector<int64_t> out;
    for (const auto& layer : config_of(kind, edits).layers) out.push_back(layer.window);
    return out;
  };
  using All = std::vector<int64_t>;
  const Json full = {"full_attention", "full_attention"}, slide = {"sliding_attention", "sliding_attention"},
             mixed = {"sliding_attention", "full_attention"};
  const auto uses = [](Json more) {
    more["use_sliding_window"] = true;
    if (!more.contains("layer_types")) more["layer_types"] = gone;
    return more;
  };
  // Qwen3-MoE has no max_window_layers.
  CHECK(windows("qwen3_moe", uses({{"sliding_window", 8}})) == All{8, 8});
  CHECK(windows("qwen3_moe", uses({{"sliding_window", 8}, {"max_window_layers", 28}})) == All{8, 8});
  CHECK(windows("qwen3_moe", uses({{"sliding_window", gone}})) == All{4096, 4096});
  for (const char* kind : {"qwen2", "qwen3"}) {
    INFO(kind);
    CHECK(windows(kind, uses({{"sliding_window", 8}, {"max_window_layers", 1}})) == All{0, 8});
    CHECK(windows(kind, uses({{"sliding_window", 8}, {"max_window_layers", gone}})) == All{0, 0});
    CHECK(windows(kind, uses({{"sliding_window", gone}, {"max_window_layers", 0}})) == All{4096, 4096});
    CHECK(windows(kind, uses({{"sliding_window", 8}, {"layer_types", mixed}})) == All{8, 0});
  }
  CHECK(windows("qwen2_moe", uses({{"sliding_window", gone}, {"layer_types", mixed}})) == All{4096, 0});
  CHECK(why_not("qwen2_moe", uses({{"sliding_window", 8}})).find("config.json: layer_types: missing") == 0);
  for (const char* kind : {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}) {
    INFO(kind);
    CHECK(windows(kind, uses({{"sliding_window", nullptr}, {"max_window_layers", 0}})) == All{0, 0});
    CHECK(windows(kind, {{"use_sliding_window", false}, {"sliding_window", 8}, {"layer_types", gone}}) == All{0, 0});
  }
  CHECK(windows("mistral", {{"sliding_window", gone}}) == All{4096, 4096});
  CHECK(windows("mistral", {{"sliding_window", nullptr}}) == All{0, 0});
  // Where all layers are alike, layer_types may only say so.
  for (const char* kind : {"mistral", "mixtral", "phi3", "qwen3_moe"}) {
    INFO(kind);
    for (const bool window : {true, false}) {
      const auto says = [&](const Json& types) {
        return why_not(kind, uses({{"sliding_window", window ? Json(8) : Json(nullptr)}, {"layer_types", types}}));
      };
      CHECK(says(window ? slide : full) == "");
      for (const Json& other : {window ? full : slide, mixed})
        CHECK(says(other).find("config.json: layer_types: ") == 0);
    }
  }
  for (const char* kind : {"llama", "gemma", "gpt2"}) {
    INFO(kind);
    CHECK(why_not(kind, {{"layer_types", full}}) == "");
    for (const Json& other : {slide, mixed, Json{"full_attention", "chunked_attention"}})
      CHECK(why_not(kind, {{"layer_types", other}}).find("config.json: layer_types: ") == 0);
  }
}

TEST_CASE("positions are those of transformers where their number is missing") {
  const std::map<std::string, int64_t> positions = {{"llama", 2048},      {"mistral", 131072}, {"mixtral", 131072},
                                                    {"qwen2", 32768},     {"qwen3", 32768},    {"qwen2_moe", 32768},
                                                    {"qwen3_moe", 32768}, {"phi3", 4096},      {"gemma", 8192},
                                                    {"gemma2", 8192},     {"gemma3", 131072},  {"gpt2", 1024}};
  for (const auto& [kind, number] : positions) {
    INFO(kind);
    CHECK(config_of(kind, {{"max_position_embeddings", gone}, {"n_positions", gone}}).positions == number);
  }
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  CHECK(config_of("mistral", {{"max_position_embeddings", gone}, {"rope_parameters", yarn}}).ropes[0].original ==
        131072);
  // Phi-3 was trained for 4096 at first unless it says something else, beside its rotation.
  const char* const name = "original_max_position_embeddings";
  CHECK(config_of("phi3_long", {{name, 64}}).ropes[0].original == 64);
  CHECK(why_not("phi3_long", {{name, gone}}).find("64 contradicts this model's 4096") != std::string::npos);
  Json long_rope = read("phi3_long")["config"]["rope_parameters"];
  long_rope.erase(name);
  CHECK(config_of("phi3_long", {{name, gone}, {"rope_parameters", long_rope}}).ropes[0].original == 4096);
  CHECK(config_of("qwen3_moe", {{"head_dim", gone}}).head_dim == 8);
}

TEST_CASE("activations and numbers of experts that are not supported are refused by the name of their field") {
  const auto refuses = [](const char* kind, const char* field, const Json& value) {
    return why_not(kind, {{field, value}}).find(std::string("config.json: ") + field + ": ") == 0;
  };
  for (const char* gelu : {"gelu", "silu", "relu"}) CHECK(refuses("gpt2", "activation_function", gelu));
  for (const char* kind : {"gemma2", "gemma3"}) CHECK(refuses(kind, "hidden_activation", "gelu"));
  CHECK(refuses("llama", "hidden_act", "gelu"));
  CHECK(config_of("llama", {{"hidden_act", "gelu_new"}}).activation == llm::Activation::gelu_tanh);
  CHECK(config_of("gemma", {{"hidden_act", "gelu"}}).activation == llm::Activation::gelu_tanh);
  CHECK(config_of("gemma", {{"hidden_act", "silu"}}).activation == llm::Activation::silu);
  for (const char* kind : {"mixtral", "qwen2_moe", "qwen3_moe"}) {
    INFO(kind);
    CHECK(refuses(kind, "hidden_act", "gelu_pytorch_tanh"));
    CHECK(refuses(kind, "num_experts_per_tok", 7));
    CHECK(refuses(kind, "num_experts_per_tok", 33));
    CHECK(refuses(kind, "num_local_experts", 513));
    CHECK(refuses(kind, "num_experts", 513));
    CHECK(why_not(kind, {{"num_local_experts", 512}, {"num_experts_per_tok", 32}}) == "");
  }
  const Json few = {{"num_local_experts", 1}, {"num_experts", 1}, {"num_experts_per_tok", gone}};
  for (const char* kind : {"mixtral", "qwen2_moe", "qwen3_moe"})
    CHECK(why_not(kind, few).find("config.json: num_experts_per_tok: ") == 0);
}

TEST_CASE("weights that int4 cannot hold are refused with the type that can") {
  const ModelFolder folder(read("llama"));  // rows of 48
  llm::Settings settings;
  settings.directory = folder.path(), settings.device = "cpu", settings.quiet = true, settings.context = 60;
  const auto load = [&](const char* weights) {
    settings.weights = weights;
    return refusal([&] { llm::Session(settings).load(1); });
  };
  CHECK(load("int4").find("down_proj.weight: 48 columns are not a multiple of 32 as int4 needs; try --weights int8") !=
        std::string::npos);
  CHECK(load("int8") == "");
}

TEST_CASE("rope_scaling goes before rope_parameters, which must not say something else") {
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}},
             plain = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  const auto ropes = [](Json config, const Json& parameters, const Json& scaling) {
    config.erase("rope_theta");
    config["rope_parameters"] = parameters, config["rope_scaling"] = scaling;
    return llm::read_config(config).ropes;
  };
  const auto with = [](Json json, const char* name, const Json& value) {
    json[name] = value;
    return json;
  };
  const Json llama = read("llama")["config"], gemma = read("gemma3")["config"];
  const auto full = [&](const Json& parameters) {
    return Json{{"full_attention", parameters}, {"sliding_attention", {{"rope_type", "default"}}}};
  };
  for (const bool windows : {false, true}) {
    const auto one = [&](const Json& parameters, const Json& scaling) {
      return (windows ? ropes(gemma, full(parameters), scaling) : ropes(llama, parameters, scaling))[0];
    };
    const auto rope = one(plain, yarn);
    CHECK(rope.type == "yarn");
    CHECK(rope.factor == 4);
    CHECK(rope.theta == 1e6);
    CHECK(one(plain, with(yarn, "rope_theta", 5e5)).theta == 5e5);
    for (const Json& nothing : {Json(nullptr), Json::object()}) {
      CHECK(one(plain, nothing).type == "default");
      CHECK(one(yarn, nothing).factor == 4);
    }
    CHECK(one(yarn, yarn).factor == 4);
    CHECK(one(yarn, {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}}).factor == 4);
    for (const Json& other : {with(yarn, "factor", 8.0), Json{{"rope_type", "linear"}, {"factor", 4.0}}, plain})
      CHECK(refusal([&] { one(yarn, other); }).find("config.json: rope_scaling: contradicts rope_parameters") == 0);
    CHECK(refusal([&] { one(with(plain, "wobble", 1), yarn); }).find("wobble") != std::string::npos);
  }
  CHECK(ropes(gemma, full(plain), yarn)[1].type == "default");
}

TEST_CASE("what is no file, or no directory, is called that") {
  const Folder folder;
  folder.write("model.safetensors", "x");
  const auto read = [](const std::string& path) { return refusal([&] { llm::read_file(path); }); };
  CHECK(read(folder.path()) == folder.path() + ": a directory, not a file");
  CHECK(read(folder.path() + "/config.json") == "cannot open " + folder.path() + "/config.json");
  CHECK(read(folder.path() + "/model.safetensors/config.json") ==
        "cannot open " + folder.path() + "/model.safetensors/config.json: " + folder.path() +
            "/model.safetensors is not a directory");
  CHECK(read(folder.path() + "/none/config.json").find("/none/config.json: no such directory") != std::string::npos);
  CHECK(read("Some/Model-0.6B/config.json").find("hf download Some/Model-0.6B --local-dir Some/Model-0.6B") !=
        std::string::npos);
  for (const char* name : {"./a/config.json", "a/b/c/config.json", "../a/config.json", "a b/c/config.json"}) {
    INFO(name);
    CHECK(read(name).find("hf download") == std::string::npos);
    CHECK(read(name).find("no such directory") != std::string::npos);
  }
}

// tests/llm/fuzz does this with sanitizers, and for longer, but without loading and running what has been read.
TEST_CASE("files and whole models with changes are read or refused") {
  std::vector<std::string> all;
  for (const auto& seed : fuzz::seeds(LLM_GOLDEN)) all.push_back(seed.second);
  for (const auto& file : fs::directory_iterator(LLM_CORPUS)) all.push_back(llm::read_file(file.path().string()));
  for (const std::string& input : all) fuzz::read(input);
  const char* const more = std::getenv("LLM_FUZZ");  // how many
  uint64_t state = 1;
  for (int64_t i = more != nullptr ? std::atoll(more) : 1500; i > 0; --i) {
    std::string input = all[fuzz::random_bits(state) % all.size()];
    for (uint64_t n = fuzz::random_bits(state) % 3 + 1; n > 0; --n) input = fuzz::mutate(input, state);
    fuzz::read(input);
  }
}
