// What a chat template's text is made of: data, and the words and signs within tags.
#pragma once

#include "template/node.h"

namespace llm {
namespace jinja {

struct Token {
  enum Kind { data, print_begin, print_end, block_begin, block_end, word, string, integer, sign, end } kind;
  int line;
  Text text;
  std::string word_;
};

std::vector<Token> tokens_of(std::string_view source);

}  // namespace jinja
}  // namespace llm
