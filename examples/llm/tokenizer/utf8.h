// UTF-8 texts and their characters.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace llm {

// Replaces bytes that are not UTF-8 by U+FFFD, one for each maximal part of a character.
std::string valid_utf8(std::string_view text);

// Makes whole characters of bytes that come in any pieces. Joined, the results of add() and end() are valid_utf8() of
// all bytes.
class Utf8Stream {
 public:
  std::string add(std::string_view bytes);
  std::string end();

 private:
  std::string held_;  // the beginning of a character
};

std::string utf8_of(uint32_t c);
// Of valid UTF-8: the first character, its length in bytes, and the bytes of the last character.
uint32_t code_point(std::string_view text);
size_t length_at(std::string_view text);
std::string_view last_character(std::string_view text);
bool is_space(uint32_t c);
bool is_word(uint32_t c);
bool starts_with(std::string_view text, std::string_view with);

}  // namespace llm
