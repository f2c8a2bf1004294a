// Chat templates: an interpreter for the part of Jinja that models' templates are written in, with the settings and
// results of transformers (trim_blocks, lstrip_blocks, loop controls, `generation`). Anything else is refused with its
// line, and so is what would take too long.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace llm::jinja {
struct Node;
}

namespace llm {

struct Message {
  std::string role, content;
};

// What a template has made of messages, in UTF-8, and which parts of it come from the messages.
struct Rendered {
  std::string text;
  std::vector<Plain> plain;
};

class Template {
 public:
  explicit Template(std::string_view source);
  // variables: an object with the variables of the template beside the messages.
  Rendered render(const std::vector<Message>& messages, const Json& variables,
                  std::time_t now = std::time(nullptr)) const;

 private:
  std::shared_ptr<const jinja::Node> root_;
};

}  // namespace llm
