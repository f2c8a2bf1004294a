// The tokenizer of a directory: its own file, and what the files beside it say of it.
#include <algorithm>

#include "tokenizer/parts.h"

namespace llm {
namespace {

// How Qwen 2 and 3 split words; GPT-2's way is in steps.cpp.
constexpr const char* kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Json object_in(const std::string& path) {
  const Json json = read_json(path);
  if (!json.is_object()) throw Error(path + ": not an object");
  return json;
}

// What is a text, or an object with a text.
const Json* content_of(const Json& json) {
  const Json* const text = json.is_object() ? part_of(json, "content") : &json;
  return text != nullptr && text->is_string() ? text : nullptr;
}

// The class that transformers has for the tokenizer, without the "Fast" at its end: tokenizer_config.json or
// config.json name it, or else it is the usual one of the architecture. Empty if nobody says.
std::string class_of(const std::string& directory, const Json& config) {
  const std::string path = directory + "/config.json";
  const Json about = file_exists(path) ? object_in(path) : Json::object();
  for (const Json* json : {&config, &about}) {
    if (part_of(*json, "tokenizer_class") == nullptr) continue;
    std::string name = text_of(*json, "tokenizer_class", json == &about ? path : directory + "/tokenizer_config.json");
    if (name.size() > 4 && name.substr(name.size() - 4) == "Fast") name.erase(name.size() - 4);
    return name;
  }
  const std::string type = part_of(about, "model_type") != nullptr ? text_of(about, "model_type", path) : "";
  for (const char* name : {"llama", "mistral", "mixtral", "phi3"}) {
    if (type == name) return "LlamaTokenizer";
  }
  if (starts_with(type, "gemma")) return "GemmaTokenizer";
  if (starts_with(type, "qwen2") || starts_with(type, "qwen3")) return "Qwen2Tokenizer";
  return type == "gpt2" ? "GPT2Tokenizer" : "";
}

bool is_like_llama(const std::string& name) {
  return name == "LlamaTokenizer" || name == "CodeLlamaTokenizer" || name == "GemmaTokenizer" ||
         name == "CohereTokenizer";
}

int32_t number_in(const std::string& text, const std::string& what) {
  if (text.empty() || text.size() > 7 || text.find_first_not_of("0123456789") != std::string::npos)
    throw Error(what + ": " + shown(text) + ": not a token's number");
  return id_in(Json(std::stol(text)), what);
}

}  // namespace

// A vocabulary and merges alone do not say how words are split.
void Tokenizer::read_vocabulary(const std::string& directory, const Json& config, const std::string& type) {
  Json json = {
      {"model", {{"type", "BPE"}, {"vocab", llm::read_json(directory + "/vocab.json")}, {"merges", Json::array()}}},
      {"added_tokens", Json::array()}};
  if (type.empty() || type == "GPT2Tokenizer") {
    const bool space = flag_of(config, "add_prefix_space", false, directory + "/tokenizer_config.json");
    json["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", space}};
  } else if (type == "Qwen2Tokenizer") {
    const Json words = {{"type", "Split"}, {"pattern", {{"Regex", kQwen2Words}}}, {"behavior", "Isolated"}},
               bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    json["normalizer"] = {{"type", "NFC"}};
    json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {words, bytes}}};
  } else {
    throw Error(directory + ": how a " + shown(type) + " splits words is known from its tokenizer.json or " +
                "tokenizer.model, and there are only vocab.json and merges.txt");
  }
  const std::string merges = read_file(directory + "/merges.txt");
  for (size_t at = 0; at < merges.size();) {
    const size_t end = std::min(merges.find('\n', at), merges.size());
    std::string line = merges.substr(at, end - at);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && line.rfind("#version", 0) != 0) json["model"]["merges"].push_back(line);
    at = end + 1;
  }
  const Json& vocabulary = json["model"]["vocab"];
  if (vocabulary.is_object() && vocabulary.contains("<|endoftext|>"))
    json["added_tokens"].push_back(
        {{"content", "<|endoftext|>"}, {"id", vocabulary["<|endoftext|>"]}, {"special", true}});
  read_json(json, directory + "/vocab.json");
}

// Added tokens of the files beside the tokenizer's own. tokenizer.json has its own, which stay as they are there, and
// those that it lacks are added, as transformers does. Beside other files they are cut out of the text as it is
// written, whether they are normalized or not, as by the tokenizers that read such files.
void Tokenizer::read_added_beside(const std::string& directory, const Json& config, Source source) {
  const std::string path = directory + "/tokenizer_config.json", older = directory + "/added_tokens.json";
  const bool behind = source == Source::json;
  std::set<std::string> special;
  for (const auto& item : special_names.items()) special.insert(item.value().get<std::string>());
  const Json* const more = part_of(config, "additional_special_tokens");
  for (const Json& item : more != nullptr && more->is_array() ? *more : Json::array()) {
    if (const Json* const text = content_of(item)) special.insert(text->get<std::string>());
  }
  std::set<std::string> stay;
  if (behind) for (const Added& token : added_) stay.insert(token.text);
  const auto add = [&](const Added& token, const std::string& what) {
    if (!behind) {
      const auto is_replaced = [&](const Added& other) { return other.text == token.text || other.id == token.id; };
      added_.erase(std::remove_if(added_.begin(), added_.end(), is_replaced), added_.end());
    } else if (stay.count(token.text) > 0) {
      return;
    } else {
      const int32_t known = id_of(token.text);
      const std::string there = bytes(token.id, true),
                        is = what + ": " + shown(token.text) + " is the token " + std::to_string(token.id);
      if (known >= 0 && known != token.id) throw Error(is + ", and " + std::to_string(known) + " in tokenizer.json");
      if (known < 0 && !there.empty()) throw Error(is + ", which is " + shown(there) + " in tokenizer.json");
    }
    add_added(token, what);
  };
  if (const Json* const decoder = part_of(config, "added_tokens_decoder")) {
    if (!decoder->is_object()) throw Error(path + ": added_tokens_decoder: not an object");
    for (const auto& item : decoder->items()) {
      const std::string what = path + ": added_tokens_decoder";
      const Json& json = item.value();
      if (!json.is_object()) throw Error(what + ": a token that is not an object");
      const std::string text = text_of(json, "content", what);
      const bool is_special = flag_of(json, "special", false, what) || special.count(text) > 0;
      add({text, number_in(item.key(), what), is_special, behind && flag_of(json, "normalized", !is_special, what),
           flag_of(json, "lstrip", false, what), flag_of(json, "rstrip", false, what),
           flag_of(json, "single_word", false, what), ""},
          what);
    }
  } else if (file_exists(older)) {
    const Json tokens = object_in(older);
    for (const auto& item : tokens.items()) {
      const bool is_special = special.count(item.key()) > 0;
      add({item.key(), id_in(item.value(), older), is_special, behind && !is_special, false, false, false, ""}, older);
    }
  }
  // Pieces that tokenizer_config.json calls special.
  for (const std::string& text : special) {
    const auto known = [&](const Added& token) { return token.text == text; };
    if (std::none_of(added_.begin(), added_.end(), known) && id_of(text) >= 0)
      add({text, id_of(text), true, false, false, false, false, ""}, path);
  }
  index_added();
}

// What is put around a text: add_bos_token and add_eos_token count with tokenizer.model, and with tokenizer.json where
// the tokenizer is of Llama's kind; add_bos_token with GPT-2's two files, too. Elsewhere transformers does not read
// them.
void Tokenizer::read_ends_beside(const std::string& path, const Json& config, const std::string& type, Source source) {
  const bool like_llama = source == Source::model || (source == Source::json && is_like_llama(type)),
             like_gpt2 = source == Source::vocabulary && type != "Qwen2Tokenizer";
  const auto read = [&](const char* flag, const char* name, int32_t id, const char* usual, Ids& ends) {
    if (part_of(config, flag) == nullptr) return;
    ends.clear();
    if (!flag_of(config, flag, false, path)) return;
    if (id < 0 && !config.contains(name)) id = id_of(usual);
    if (id < 0) throw Error(path + ": " + flag + " is true, and there is no " + name);
    ends = {id};
  };
  const bool gemma = type == "GemmaTokenizer";
  if (source == Source::model && bos >= 0) before_ = {bos};
  if (like_llama) read("add_bos_token", "bos_token", bos, gemma ? "<bos>" : "<s>", before_);
  if (like_llama) read("add_eos_token", "eos_token", eos, gemma ? "<eos>" : "</s>", after_);
  if (like_gpt2) read("add_bos_token", "bos_token", bos, "<|endoftext|>", before_);
}

Tokenizer::Tokenizer(const std::string& directory) {
  const std::string path = directory + "/tokenizer_config.json";
  const auto has = [&](const char* name) { return file_exists(directory + "/" + name); };
  const bool configured = file_exists(path);
  const Json config = configured ? object_in(path) : Json::object();
  const std::string type = class_of(directory, config);
  const Source source = has("tokenizer.json")    ? Source::json
                        : has("tokenizer.model") ? Source::model
                                                 : Source::vocabulary;
  if (source == Source::json)
    read_json(llm::read_json(directory + "/tokenizer.json"), directory + "/tokenizer.json");
  else if (source == Source::model)
    read_model(read_file(directory + "/tokenizer.model"), directory + "/tokenizer.model");
  else if (has("vocab.json"))
    read_vocabulary(directory, config, type);
  else
    throw Error(directory + ": has neither tokenizer.json nor tokenizer.model");

  for (const auto& item : config.items()) {
    const std::string& name = item.key();
    const Json* const text = content_of(item.value());
    if (name.size() > 6 && name.substr(name.size() - 6) == "_token" && text != nullptr) special_names[name] = *text;
  }
  read_added_beside(directory, config, source);
  const auto token = [&](const char* name, int32_t otherwise) {
    const int32_t id = special_names.contains(name) ? id_of(special_names[name].get<std::string>()) : -1;
    return id >= 0 ? id : otherwise;
  };
  bos = token("bos_token", bos), eos = token("eos_token", eos);
  if (!configured) {  // as the model's own file has them
    if (bos >= 0) special_names["bos_token"] = bytes(bos, true);
    if (eos >= 0) special_names["eos_token"] = bytes(eos, true);
  }
  read_ends_beside(path, config, type, source);
  read_templates(directory, config);
}

void Tokenizer::read_templates(const std::string& directory, const Json& config) {
  const std::string path = directory + "/tokenizer_config.json";
  const Json* const all = part_of(config, "chat_template");
  if (all != nullptr && !all->is_string() && !all->is_array())
    throw Error(path + ": chat_template: neither a text nor a list of templates");
  if (all != nullptr && all->is_string()) chat_templates["default"] = all->get<std::string>();
  for (const Json& item : all != nullptr && all->is_array() ? *all : Json::array()) {
    if (!item.is_object()) throw Error(path + ": chat_template: a list of something else than objects");
    chat_templates[text_of(item, "name", path)] = text_of(item, "template", path);
  }
  if (file_exists(directory + "/chat_template.jinja"))
    chat_templates["default"] = read_file(directory + "/chat_template.jinja", 1 << 20);
}

}  // namespace llm
