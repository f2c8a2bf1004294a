// What a model's template makes of a conversation, in tokens.
#pragma once

#include <optional>
#include <set>

#include "template/template.h"

namespace llm {

// Variables of a template, each given as NAME=VALUE: the values are those of JSON, and what is none is a text.
Json template_variables(const std::vector<std::string>& given);

class Format {
 public:
  // source: a name of one of the tokenizer's templates ("": the default one), or a file. variables: what the template
  // knows by name beside the names of special tokens.
  Format(const Tokenizer& tokenizer, const std::string& source, const Json& variables = Json::object());
  // Up to where the model's answer begins. The template says what stands at the beginning: nothing is put before it.
  Tokenizer::Ids ids(const std::vector<Message>& messages) const;

  int32_t turn_end = -1;  // the token that the template writes behind an answer

 private:
  Tokenizer::Ids encode(const Rendered& rendered) const;

  const Tokenizer& tokenizer_;
  Json variables_;
  std::optional<Template> template_;
  std::set<int32_t> control_;  // tokens that only the template may write, though they are not special
};

}  // namespace llm
