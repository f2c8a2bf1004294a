#include "format.h"

#include <algorithm>
#include <cctype>

namespace llm {

Json template_variables(const std::vector<std::string>& given) {
  Json out = Json::object();
  for (const std::string& one : given) {
    const size_t end = std::min(one.find('='), one.size());
    const std::string name = one.substr(0, end), what = "--template-set: " + shown(valid_utf8(one));
    const auto is_of_name = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
    if (end == one.size() || name.empty() || !std::all_of(name.begin(), name.end(), is_of_name))
      throw Error(what + " is not NAME=VALUE");
    if (name == "messages" || name == "add_generation_prompt") throw Error(what + ": set by the program");
    const std::string text = valid_utf8(one.substr(end + 1));
    const Json value = Json::parse(text, nullptr, false);
    if (value.is_structured() || value.is_number_float())
      throw Error(what + ": not true, false, null, an integer or a string");
    out[name] = value.is_discarded() ? Json(text) : value;
  }
  return out;
}

Format::Format(const Tokenizer& tokenizer, const std::string& source, const Json& variables)
    : tokenizer_(tokenizer), variables_(tokenizer.special_names) {
  const auto named = tokenizer.chat_templates.find(source.empty() ? "default" : source);
  if (named == tokenizer.chat_templates.end() && source.empty()) {
    std::string names;
    for (const auto& item : tokenizer.chat_templates) names += (names.empty() ? "; it has " : ", ") + shown(item.first);
    throw Error("the model has no chat template" +
                (names.empty() ? "; set one with --template FILE"
                               : " named default" + names + "; choose one with --template NAME"));
  }
  const std::string text = named != tokenizer.chat_templates.end() ? named->second : read_file(source, 1 << 20);
  if (text.find_first_not_of(" \t\r\n") == std::string::npos)
    throw Error(source.empty() ? "the model's chat template is empty; set another with --template"
                               : "--template " + shown(source) + ": the chat template is empty");
  template_.emplace(text);
  for (const char* name : {"tools", "documents"}) variables_[name] = nullptr;
  variables_.update(variables);

  // Added tokens that stand in the template or in what it renders count as control tokens, even if not marked special.
  variables_["add_generation_prompt"] = false;
  std::set<int32_t> added;
  for (const Tokenizer::Added& token : tokenizer.added()) {
    added.insert(token.id);
    if (text.find(token.text) != std::string::npos) control_.insert(token.id);
  }
  Rendered probe;
  try {
    probe = template_->render({{"user", "1"}, {"assistant", "2"}, {"user", "3"}}, variables_);
  } catch (const Error&) {
    // A template may refuse this conversation. It will report errors for real conversations when it renders them.
  }
  variables_["add_generation_prompt"] = true;
  for (const int32_t id : tokenizer.encode_mixed(probe.text, probe.plain, control_)) {
    if (added.count(id) > 0) control_.insert(id);
  }
  // The token after the answer, and perhaps spaces, is the one that ends it, if it is an added token.
  for (const Plain& plain : probe.plain) {
    const size_t behind = plain.by_model ? probe.text.find_first_not_of(" \n", plain.end) : std::string::npos;
    const auto ids =
        behind == std::string::npos ? Tokenizer::Ids() : tokenizer.encode(probe.text.substr(behind), false);
    if (!ids.empty() && added.count(ids[0]) > 0) turn_end = ids[0];
  }
}

Tokenizer::Ids Format::ids(const std::vector<Message>& messages) const {
  const Rendered rendered = template_->render(messages, variables_);
  return tokenizer_.encode_mixed(rendered.text, rendered.plain, control_);
}

}  // namespace llm
