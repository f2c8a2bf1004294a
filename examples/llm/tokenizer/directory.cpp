// The tokenizer of a directory: its own file, and what other files of the directory say about it.
#include <algorithm>
#include <sstream>

#include "tokenizer/parts.h"

namespace llm {
namespace {

// The pattern with which Qwen 2 and 3 split words. That of GPT-2 is in steps.cpp.
constexpr const char* kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// The text, if json is one or is an object with a text in `content`; otherwise null.
const Json* content_of(const Json& json) {
  const Json& text = json.is_object() && json.contains("content") ? json["content"] : json;
  return text.is_string() ? &text : nullptr;
}

// The class of the tokenizer in transformers, without "Fast" at its end: the one that tokenizer_config.json or
// config.json names, or else the usual one of the architecture. Empty if it is not known.
std::string class_of(const std::string& directory, const Fields& config) {
  const std::string path = directory + "/config.json";
  const Json json = file_exists(path) ? read_json(path) : Json::object();
  const Fields model(json, path);
  std::string name = config.text("tokenizer_class", "");
  if (name.empty()) name = model.text("tokenizer_class", "");
  if (name.size() > 4 && name.substr(name.size() - 4) == "Fast") name.erase(name.size() - 4);
  if (!name.empty()) return name;
  const std::string type = model.text("model_type", "");
  if (type == "llama" || type == "mistral" || type == "mixtral" || type == "phi3") return "LlamaTokenizer";
  if (starts_with(type, "gemma")) return "GemmaTokenizer";
  if (starts_with(type, "qwen2") || starts_with(type, "qwen3")) return "Qwen2Tokenizer";
  return type == "gpt2" ? "GPT2Tokenizer" : "";
}

bool is_like_llama(const std::string& name) {
  return name == "LlamaTokenizer" || name == "CodeLlamaTokenizer" || name == "GemmaTokenizer" ||
         name == "CohereTokenizer";
}

}  // namespace

// From vocab.json and merges.txt, which do not say how words are split: known only for two families.
void Tokenizer::read_vocabulary(const std::string& directory, const Fields& config, const std::string& type) {
  Json json = {
      {"model", {{"type", "BPE"}, {"vocab", llm::read_json(directory + "/vocab.json")}, {"merges", Json::array()}}},
      {"added_tokens", Json::array()}};
  if (type.empty() || type == "GPT2Tokenizer") {
    json["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", config.flag("add_prefix_space", false)}};
  } else if (type == "Qwen2Tokenizer") {
    const Json words = {{"type", "Split"}, {"pattern", {{"Regex", kQwen2Words}}}, {"behavior", "Isolated"}},
               bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    json["normalizer"] = {{"type", "NFC"}};
    json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {words, bytes}}};
  } else {
    throw Error(directory + ": " + shown(type) + " needs tokenizer.json or tokenizer.model: vocab.json and " +
                "merges.txt do not say how it splits words");
  }
  std::istringstream merges(read_file(directory + "/merges.txt"));
  for (std::string line; std::getline(merges, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && !starts_with(line, "#version")) json["model"]["merges"].push_back(line);
  }
  const Json& vocabulary = json["model"]["vocab"];
  if (vocabulary.is_object() && vocabulary.contains("<|endoftext|>"))
    json["added_tokens"].push_back(
        {{"content", "<|endoftext|>"}, {"id", vocabulary["<|endoftext|>"]}, {"special", true}});
  read_json(json, directory + "/vocab.json");
}

// Adds the added tokens of tokenizer_config.json or added_tokens.json. As in transformers, those of tokenizer.json stay
// as they are, and those that it lacks are added. With other files, all added tokens are cut out of the text before it
// is normalized, whether they are marked as normalized or not, as the tokenizers do that read such files.
void Tokenizer::read_added_beside(const std::string& directory, const Fields& config, Source source) {
  const std::string older = directory + "/added_tokens.json";
  const bool behind = source == Source::json;
  std::set<std::string> special, stay;
  for (const auto& item : special_names.items()) special.insert(item.value().get<std::string>());
  const Json* const more = config.find("additional_special_tokens");
  for (const Json& item : more != nullptr && more->is_array() ? *more : Json::array()) {
    if (const Json* const text = content_of(item)) special.insert(text->get<std::string>());
  }
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
                        is = what + ": " + shown(token.text) + " has the ID " + std::to_string(token.id);
      if (known >= 0 && known != token.id) throw Error(is + ", but " + std::to_string(known) + " in tokenizer.json");
      if (known < 0 && !there.empty()) throw Error(is + ", which is " + shown(there) + " in tokenizer.json");
    }
    add_added(token, what);
  };
  if (config.find("added_tokens_decoder") != nullptr) {
    const Fields decoder = config.object("added_tokens_decoder");
    for (const auto& item : decoder.items()) {
      const Fields fields = decoder.object(item.key());
      Added token = added_of(fields, id_in(Json::parse(item.key(), nullptr, false), fields.what()));
      token.special = token.special || special.count(token.text) > 0;
      token.normalized = behind && fields.flag("normalized", !token.special);
      add(token, fields.what());
    }
  } else if (file_exists(older)) {
    const Json tokens = llm::read_json(older);
    for (const auto& item : Fields(tokens, older).items()) {
      const bool is_special = special.count(item.key()) > 0;
      add({item.key(), id_in(item.value(), older), is_special, behind && !is_special}, older);
    }
  }
  // Pieces that tokenizer_config.json names as special.
  for (const std::string& text : special) {
    const auto known = [&](const Added& token) { return token.text == text; };
    if (std::none_of(added_.begin(), added_.end(), known) && id_of(text) >= 0)
      add({text, id_of(text), true}, config.what());
  }
  index_added();
}

// The tokens that are put around a text. As in transformers, add_bos_token and add_eos_token are read with a
// tokenizer.model, and with a tokenizer.json if the tokenizer is of Llama's kind; with GPT-2's two files only
// add_bos_token is.
void Tokenizer::read_ends_beside(const Fields& config, const std::string& type, Source source) {
  const bool like_llama = source == Source::model || (source == Source::json && is_like_llama(type)),
             like_gpt2 = source == Source::vocabulary && type != "Qwen2Tokenizer", gemma = type == "GemmaTokenizer";
  const auto read = [&](const char* flag, const char* name, int32_t id, const char* usual, Ids& ends) {
    if (config.find(flag) == nullptr) return;
    ends.clear();
    if (!config.flag(flag, false)) return;
    if (id < 0 && !config.has(name)) id = id_of(usual);
    if (id < 0) config.refuse(std::string(flag) + " is true, but there is no " + name);
    ends = {id};
  };
  if (source == Source::model && bos >= 0) before_ = {bos};
  if (like_llama) read("add_bos_token", "bos_token", bos, gemma ? "<bos>" : "<s>", before_);
  if (like_llama) read("add_eos_token", "eos_token", eos, gemma ? "<eos>" : "</s>", after_);
  if (like_gpt2) read("add_bos_token", "bos_token", bos, "<|endoftext|>", before_);
}

Tokenizer::Tokenizer(const std::string& directory) {
  const auto path = [&](const char* name) { return directory + "/" + name; };
  const auto has = [&](const char* name) { return file_exists(path(name)); };
  const bool configured = has("tokenizer_config.json");
  const Json json = configured ? llm::read_json(path("tokenizer_config.json")) : Json::object();
  const Fields config(json, path("tokenizer_config.json"));
  const std::string type = class_of(directory, config);
  const Source source = has("tokenizer.json")    ? Source::json
                        : has("tokenizer.model") ? Source::model
                                                 : Source::vocabulary;
  if (source == Source::json)
    read_json(llm::read_json(path("tokenizer.json")), path("tokenizer.json"));
  else if (source == Source::model)
    read_model(read_file(path("tokenizer.model")), path("tokenizer.model"));
  else if (has("vocab.json"))
    read_vocabulary(directory, config, type);
  else
    throw Error(directory + ": no tokenizer.json, tokenizer.model or vocab.json");

  for (const auto& item : json.items()) {
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
  if (!configured) {  // as the tokenizer's own file names them
    if (bos >= 0) special_names["bos_token"] = bytes(bos, true);
    if (eos >= 0) special_names["eos_token"] = bytes(eos, true);
  }
  read_ends_beside(config, type, source);
  read_templates(directory, config);
}

void Tokenizer::read_templates(const std::string& directory, const Fields& config) {
  const Json* const all = config.find("chat_template");
  if (all != nullptr && all->is_array()) {
    for (const Json& item : *all) {
      const Fields one(item, config.what() + ": chat_template");
      chat_templates[one.text("name")] = one.text("template");
    }
  } else if (all != nullptr) {
    if (!all->is_string()) config.refuse("chat_template", "not a string or an array of templates");
    chat_templates["default"] = all->get<std::string>();
  }
  if (file_exists(directory + "/chat_template.jinja"))
    chat_templates["default"] = read_file(directory + "/chat_template.jinja", 1 << 20);
}

}  // namespace llm
