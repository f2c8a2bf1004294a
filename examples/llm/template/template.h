// Chat templates: the part of Jinja that the templates of models are written in, with the results and the settings that
// transformers has (trim_blocks, lstrip_blocks, loop controls, `generation`). What is beyond it is refused with its
// line, and so is what would take too long.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace llm {
namespace jinja {
struct Node;
}

struct Message {
  std::string role, content;
};

// What a template made of messages, in UTF-8, and the parts of it that came from them.
struct Rendered {
  std::string text;
  std::vector<Plain> plain;
};

class Template {
 public:
  explicit Template(std::string_view source);
  // variables: an object of what the template knows by name beside the messages.
  Rendered render(const std::vector<Message>& messages, const Json& variables,
                  std::time_t now = std::time(nullptr)) const;

 private:
  std::shared_ptr<const jinja::Node> root_;
};

}  // namespace llm
