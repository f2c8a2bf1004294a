#include "format.h"

namespace llm {

Format::Format(const Tokenizer& tokenizer, const std::string& source)
    : tokenizer_(tokenizer), variables_(tokenizer.special_names) {
  const auto named = tokenizer.chat_templates.find(source.empty() ? "default" : source);
  if (named == tokenizer.chat_templates.end() && source.empty()) {
    std::string names;
    for (const auto& item : tokenizer.chat_templates) names += (names.empty() ? "; it has " : ", ") + shown(item.first);
    throw Error("the model has no chat template" +
                (names.empty() ? ": --template FILE gives it one"
                               : " of the name default" + names + ": --template NAME takes one"));
  }
  const std::string text = named != tokenizer.chat_templates.end() ? named->second : read_file(source, 1 << 20);
  template_.emplace(text);
  for (const char* name : {"tools", "documents"}) variables_[name] = nullptr;

  // Tokens that are not special by name, but stand in the template, or come out of it.
  variables_["add_generation_prompt"] = false;
  for (const Tokenizer::Added& token : tokenizer.added()) {
    if (text.find(token.text) != std::string::npos) control_.insert(token.id);
  }
  Rendered probe;
  try {
    probe = template_->render({{"user", "1"}, {"assistant", "2"}, {"user", "3"}}, variables_);
  } catch (const Error&) {
    // A template that does not take this conversation says so of others when it is asked for them.
  }
  variables_["add_generation_prompt"] = true;
  std::set<int32_t> added;
  for (const Tokenizer::Added& token : tokenizer.added()) added.insert(token.id);
  for (const int32_t id : encode(probe)) {
    if (added.count(id) > 0) control_.insert(id);
  }
  // Behind the answer, and maybe spaces, stands the token that ends it, if one does.
  for (const Plain& plain : probe.plain) {
    const size_t behind = plain.by_model ? probe.text.find_first_not_of(" \n", plain.end) : std::string::npos;
    const auto ids =
        behind == std::string::npos ? Tokenizer::Ids() : tokenizer.encode(probe.text.substr(behind), false);
    if (!ids.empty() && added.count(ids[0]) > 0) turn_end = ids[0];
  }
}

Tokenizer::Ids Format::encode(const Rendered& rendered) const {
  return tokenizer_.encode_mixed(rendered.text, rendered.plain, control_);
}

Tokenizer::Ids Format::ids(const std::vector<Message>& messages) const {
  return encode(template_->render(messages, variables_));
}

}  // namespace llm
