// The target of libFuzzer, and of main.cpp where there is none.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "../base64.h"
#include "config.h"
#include "fuzz.h"
#include "tokenizer/tokenizer.h"
#include "weights.h"
#if FUZZ_MODELS
#include "../golden.h"
#endif

namespace fuzz {

using llm::Json;

uint64_t random_bits(uint64_t& state) {
  uint64_t x = state += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

namespace {

void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "must hold: %s\n", what);
  std::abort();
}

void use(const llm::Config& config) {
  for (const llm::RopeConfig& rope : config.ropes) {
    for (const int64_t length : {int64_t(1), int64_t(5000), int64_t(1) << 30})
      must(int64_t(rope.frequencies(config.rotary_dim, length).size()) == config.rotary_dim / 2,
           "a frequency for each pair");
    rope.differs(1, 1 << 20);
  }
  must(config.layers.size() <= 4096 && config.head_dim >= 8 && config.heads >= config.kv_heads && config.kv_heads > 0,
       "numbers that can be computed with");
}

void use(const std::map<std::string, llm::Tensor>& tensors) {
  for (const auto& item : tensors) {
    const llm::Tensor& tensor = item.second;
    if (!tensor.other_type.empty()) continue;  // only named
    int64_t count = 1;
    for (const int64_t d : tensor.shape) count *= d;
    must(size_t(count) * size_t(llm::bits_of(tensor.type) / 8) == tensor.bytes, "a tensor has the bytes of its shape");
    std::vector<float> values(size_t(std::min<int64_t>(count, 1 << 16)));
    llm::to_floats(tensor.type, tensor.data + (tensor.bytes - values.size() * size_t(llm::bits_of(tensor.type) / 8)),
                   values.data(), int64_t(values.size()));
  }
}

void use(const llm::Tokenizer& tokenizer) {
  std::string text =
      "Hello  world, 1234 it's\n\n <s> <|end|> x\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80 e\xcc\x81 \xff <tool>";
  for (size_t i = 0; i < std::min<size_t>(tokenizer.added().size(), 3); ++i) text += " " + tokenizer.added()[i].text;
  llm::Utf8Stream stream;
  std::string joined;
  for (const int32_t id : tokenizer.encode(text)) {
    must(id >= 0 && id < tokenizer.size(), "a token is one of the tokenizer's");
    joined += stream.add(tokenizer.bytes(id, true));
  }
  joined += stream.end();
  must(llm::valid_utf8(joined) == joined, "text that is decoded is UTF-8");
  tokenizer.encode(text, false, false);
  tokenizer.encode("");
}

#if FUZZ_MODELS
// Twice: what it takes, and, if that is little, a few tokens.
void use_directory(const Json& parts) {
  const auto part = [&](const char* name) { return parts.is_object() && parts.contains(name) ? parts[name] : Json(); };
  std::vector<golden::Tensor> tensors;
  size_t count = 0;
  for (const Json& item : part("tensors")) {
    if (!item.is_array() || item.size() != 4 || !item[0].is_string() || !item[1].is_array() || !item[2].is_number() ||
        !item[3].is_number())
      return;
    golden::Tensor tensor{item[0].get<std::string>(), {}, {}};
    size_t n = 1;
    for (const Json& d : item[1]) {
      if (!d.is_number_unsigned() || d.get<uint64_t>() > 4096) return;
      tensor.shape.push_back(d.get<int64_t>()), n *= d.get<size_t>();
      if (n > 1 << 16) return;
    }
    if ((count += n) > 1 << 20) return;
    tensor.values = golden::elements(tensor.name, int64_t(n), item[2].get<double>(), item[3].get<double>());
    tensors.push_back(tensor);
  }
  const golden::Folder folder;
  folder.write("config.json", part("config").dump());
  folder.write("tokenizer.json", golden::tokenizer());
  folder.write("tokenizer_config.json", part("tokenizer_config").dump());
  folder.write("generation_config.json", part("generation").dump());
  folder.write("model.safetensors", golden::safetensors(tensors, llm::Type::f32));
  llm::Settings settings;
  settings.directory = folder.path(), settings.device = "cpu", settings.cache = "fp32", settings.quiet = true,
  settings.threads = 1, settings.seed = 1;
  settings.context = 12, settings.most = 3;
  llm::Session session(settings);
  const llm::Plan plan = llm::Model::plan(session.config, *session.weights, *session.device, session.options(2));
  if (plan.total() > size_t(256) << 20) return;
  session.load(2);
  llm::Session::Times times;
  session.generate({session.tokenizer->encode("Hello"), session.tokenizer->encode("ab")}, {}, times);
}
#endif

}  // namespace

void read(const std::string& input) {
  if (input.empty()) return;
  const std::string text = input.substr(1);
  try {
    if (input[0] == 'c') use(llm::read_config(llm::parse_json(text, "config.json")));
    if (input[0] == 't') use(llm::Tokenizer::from_json(llm::parse_json(text, "tokenizer.json"), "tokenizer.json"));
    if (input[0] == 'm') use(llm::Tokenizer::from_model(text, "tokenizer.model"));
    if (input[0] == 's') {
      // In a block of exactly this size, so that reading behind it is noticed.
      const std::unique_ptr<unsigned char[]> exact(new unsigned char[text.size()]);
      std::copy(text.begin(), text.end(), exact.get());
      use(llm::parse_safetensors(exact.get(), text.size(), "model.safetensors"));
    }
#if FUZZ_MODELS
    if (input[0] == 'd') use_directory(llm::parse_json(text, "directory"));
#endif
  } catch (const llm::Error& e) {
    const std::string line = e.what();
    must(line.size() > 8 && line.size() < 1000, "an error is a line");
    must(std::none_of(line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < 32 || c == 127; }),
         "an error has no control characters");
  }
}

// ---- what is changed ------------------------------------------------------------------------------------------------

std::map<std::string, std::string> seeds(const std::string& golden) {
  std::map<std::string, std::string> out;
  for (const auto& file : std::filesystem::directory_iterator(golden)) {
    if (file.path().extension() != ".json") continue;
    const std::string name = file.path().stem().string();
    const Json json = llm::read_json(file.path().string());
    if (name == "tokenizers") {
      for (const auto& item : json["tokenizers"].items())
        out["tokenizer_" + item.key()] = "t" + item.value()["json"].dump();
      out["tokenizer_model"] = "m" + golden::from_base64(json["sentencepiece"]["model"].get<std::string>());
    }
    if (!json.contains("tensors")) continue;
    out["config_" + name] = "c" + json["config"].dump();
    if (!json["old_config"].is_null()) out["config_old_" + name] = "c" + json["old_config"].dump();
    out["directory_" + name] =
        "d" + Json{{"config", json["config"]},
                   {"tensors", json["tensors"]},
                   {"generation", {{"eos_token_id", {2, 3}}, {"do_sample", true}, {"top_k", 5}, {"temperature", 0.5}}},
                   {"tokenizer_config", {{"bos_token", {{"content", "a"}}}, {"eos_token", "b"}}}}
                  .dump();
  }
  return out;
}

// ---- changes --------------------------------------------------------------------------------------------------------

namespace {

// Words that files have, so that one can stand where another was.
const char* const kWords[] = {"",
                              "x",
                              "a",
                              " ",
                              "\xe2\x96\x81",
                              "<unk>",
                              "<0x41>",
                              "<0x-1>",
                              "<0xGG>",
                              "llama",
                              "mistral",
                              "qwen2",
                              "qwen3",
                              "mixtral",
                              "qwen2_moe",
                              "qwen3_moe",
                              "phi3",
                              "gemma",
                              "gemma2",
                              "gemma3",
                              "gemma3_text",
                              "gpt2",
                              "silu",
                              "gelu",
                              "gelu_new",
                              "default",
                              "linear",
                              "dynamic",
                              "llama3",
                              "yarn",
                              "longrope",
                              "full_attention",
                              "sliding_attention",
                              "BPE",
                              "Unigram",
                              "Sequence",
                              "NFC",
                              "NFD",
                              "NFKC",
                              "NFKD",
                              "Lowercase",
                              "Prepend",
                              "Replace",
                              "Split",
                              "ByteLevel",
                              "Digits",
                              "Metaspace",
                              "TemplateProcessing",
                              "Isolated",
                              "Removed",
                              "MergedWithPrevious",
                              "MergedWithNext",
                              "always",
                              "first",
                              "never",
                              "Strip",
                              "(a+)+$",
                              "[^\\s\\p{L}]+|\\s+(?!\\S)",
                              "(?=.*)",
                              "\\K",
                              "(?<=a)b",
                              "[[a]",
                              "\\C",
                              "(?R)?a",
                              "F32",
                              "F16",
                              "BF16",
                              "U8",
                              "__metadata__",
                              "model.layers.0.self_attn.q_proj.weight"};
const char* const kNames[] = {"model",
                              "vocab",
                              "merges",
                              "type",
                              "normalizer",
                              "pre_tokenizer",
                              "pretokenizers",
                              "normalizers",
                              "pattern",
                              "Regex",
                              "String",
                              "behavior",
                              "invert",
                              "content",
                              "prepend",
                              "replacement",
                              "added_tokens",
                              "id",
                              "special",
                              "normalized",
                              "lstrip",
                              "single_word",
                              "byte_fallback",
                              "ignore_merges",
                              "unk_token",
                              "post_processor",
                              "decoder",
                              "rope_parameters",
                              "rope_scaling",
                              "rope_type",
                              "factor",
                              "head_dim",
                              "partial_rotary_factor",
                              "sliding_window",
                              "layer_types",
                              "text_config",
                              "eos_token_id",
                              "mlp_only_layers",
                              "num_key_value_heads",
                              "tie_word_embeddings",
                              "dtype",
                              "shape",
                              "data_offsets"};

template <size_t N>
std::string any(const char* const (&list)[N], uint64_t& state) {
  return list[random_bits(state) % N];
}

Json interesting(uint64_t& state) {
  const double reals[] = {0.0, -0.0, 0.5, -1.0, 1e-300, 1e300, 3.4e38, 255.5};
  const uint64_t whole[] = {0,
                            1,
                            2,
                            3,
                            7,
                            8,
                            16,
                            255,
                            256,
                            257,
                            4096,
                            65535,
                            65536,
                            1u << 24,
                            0x7fffffff,
                            0x80000000u,
                            0xffffffffu,
                            0x7fffffffffffffffull,
                            0x8000000000000000ull,
                            ~0ull};
  switch (random_bits(state) % 12) {
    case 0: return nullptr;
    case 1: return random_bits(state) % 2 == 0;
    case 2: return reals[random_bits(state) % 8];
    case 3: return -int64_t(random_bits(state) % 300);
    case 4: return Json::array();
    case 5: return Json::object();
    case 6: return Json{{any(kNames, state), any(kWords, state)}};
    case 7: return Json::array({any(kWords, state), random_bits(state) % 100});
    case 8: return std::string(size_t(random_bits(state) % 600), char('a' + random_bits(state) % 26));
    case 9: return any(kWords, state);
    default: return whole[random_bits(state) % 20];
  }
}

// A value somewhere inside; of those near the root more often.
Json& somewhere(Json& json, uint64_t& state) {
  Json* at = &json;
  while (at->is_structured() && !at->empty() && random_bits(state) % 4 != 0) {
    auto child = at->begin();
    std::advance(child, int64_t(random_bits(state) % at->size()));
    at = &*child;
  }
  return *at;
}

void change(Json& json, uint64_t& state) {
  Json& at = somewhere(json, state);
  const uint64_t how = random_bits(state) % 8;
  if (how == 0 && at.is_array() && !at.empty()) {
    at.erase(size_t(random_bits(state) % at.size()));
  } else if (how == 0 && at.is_object() && !at.empty()) {
    auto child = at.begin();
    std::advance(child, int64_t(random_bits(state) % at.size()));
    at.erase(child);
  } else if (how == 1 && at.is_array()) {
    const Json one = somewhere(json, state);
    for (uint64_t n = random_bits(state) % 3 == 0 ? 100 : 1; n > 0; --n) at.push_back(one);
  } else if (how <= 2 && at.is_object()) {
    const Json one = random_bits(state) % 2 == 0 ? somewhere(json, state) : interesting(state);
    at[random_bits(state) % 2 == 0 || at.empty() ? any(kNames, state) : at.begin().key() + any(kWords, state)] = one;
  } else if (how == 3 && at.is_number_integer()) {
    at = at.get<int64_t>() / 2 + int64_t(random_bits(state) % 5) - 2;
  } else if (how == 4 && at.is_number()) {
    at = at.get<double>() * 2;
  } else if (how == 5) {
    const Json one = somewhere(json, state);
    if (one.dump().size() < 10000) at = one;
  } else {
    at = interesting(state);
  }
}

void change(std::string& bytes, uint64_t& state) {
  const auto place = [&](size_t more) { return size_t(random_bits(state) % (bytes.size() + more)); };
  if (bytes.empty()) return void(bytes = char(random_bits(state)));
  switch (random_bits(state) % 7) {
    case 0: bytes[place(0)] = char(random_bits(state)); break;
    case 1: bytes[place(0)] ^= char(1 << random_bits(state) % 8); break;
    case 2:
      bytes.insert(place(1), size_t(random_bits(state) % 9),
                   char(random_bits(state) % 2 == 0 ? 0xff : random_bits(state)));
      break;
    case 3: bytes.erase(place(0), size_t(random_bits(state) % 30)); break;
    case 4: bytes.resize(place(1)); break;
    case 5: {  // something that was elsewhere
      const std::string some = bytes.substr(place(0), size_t(random_bits(state) % 60));
      bytes.insert(place(1), some);
      break;
    }
    default: bytes.insert(place(1), any(kWords, state)); break;
  }
}

}  // namespace

std::string mutate(const std::string& input, uint64_t& state) {
  if (input.empty()) return std::string(1, "cstmd"[random_bits(state) % 5]);
  const char kind = input[0];
  std::string text = input.substr(1), behind;
  size_t begin = 0, size = kind == 'm' ? 0 : text.size();  // where JSON stands
  if (kind == 's' && text.size() >= 8) {
    size = 0;
    for (int i = 3; i >= 0; --i) size = size << 8 | static_cast<unsigned char>(text[size_t(i)]);
    begin = 8, size = std::min(size, text.size() - 8);
  }
  const uint64_t how = random_bits(state) % 8;
  if (how > 1 && size > 0) {
    Json json = Json::parse(text.substr(begin, size), nullptr, false);
    if (!json.is_discarded()) {
      for (uint64_t n = random_bits(state) % 3 + 1; n > 0; --n) change(json, state);
      std::string made = json.dump(-1, ' ', false, Json::error_handler_t::replace);
      for (size_t i = 0; i < begin; ++i) text[i] = i < 4 ? char(made.size() >> (8 * i) & 255) : '\0';
      text = text.substr(0, begin) + made + text.substr(begin + size);
    }
  }
  if (how < 3 || size == 0) {
    for (uint64_t n = random_bits(state) % 4 + 1; n > 0; --n) change(text, state);
  }
  return kind + text;
}

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::read(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}

#if FUZZ_LIBFUZZER  // its main() is linked
// Half of the changes are libFuzzer's own.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  uint64_t state = seed;
  if (size > 0 && fuzz::random_bits(state) % 2 == 0) return 1 + LLVMFuzzerMutate(data + 1, size - 1, most - 1);
  std::string out = fuzz::mutate(std::string(reinterpret_cast<const char*>(data), size), state);
  out.resize(std::min(out.size(), most));
  std::copy(out.begin(), out.end(), data);
  return out.size();
}
#endif
