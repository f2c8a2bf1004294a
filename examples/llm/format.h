// The chat format: what a model's template makes of a conversation, as tokens.
#pragma once

#include <optional>
#include <set>

#include "template/template.h"

namespace llm {

// Variables of a template, each given as NAME=VALUE. Values are read as JSON; what is not JSON is a text.
Json template_variables(const std::vector<std::string>& given);

class Format {
 public:
  // source: the name of one of the tokenizer's templates ("": the default one), or a file. variables: of the template,
  // beside the names of special tokens.
  Format(const Tokenizer& tokenizer, const std::string& source, const Json& variables = Json::object());
  // The tokens of the conversation up to where the model's answer begins. Nothing is put before them: BOS is in the
  // template, if anywhere.
  Tokenizer::Ids ids(const std::vector<Message>& messages) const;

  int32_t turn_end = -1;  // the token that the template writes after an answer, or -1

 private:
  const Tokenizer& tokenizer_;
  Json variables_;
  std::optional<Template> template_;
  std::set<int32_t> control_;  // tokens that messages may not contain although they are not special
};

}  // namespace llm
