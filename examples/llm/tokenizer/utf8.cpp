#include <utf8proc.h>

#include <cstdlib>

#include "tokenizer/utf8.h"

namespace llm {

namespace {

// The length of the character that begins at text[0]; 0 if more bytes are needed; -n if the first n bytes are not the
// beginning of a character that could go on.
int character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4) return -1;
  const int length = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (int i = 1; i < length; ++i) {
    if (size_t(i) >= text.size()) return 0;
    unsigned low = 0x80, high = 0xbf;
    if (i == 1) {  // no overlong forms, no surrogates, nothing above U+10FFFF
      if (first == 0xe0) low = 0xa0;
      if (first == 0xed) high = 0x9f;
      if (first == 0xf0) low = 0x90;
      if (first == 0xf4) high = 0x8f;
    }
    if (byte(size_t(i)) < low || byte(size_t(i)) > high) return -i;
  }
  return length;
}

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

}  // namespace

std::string utf8_of(uint32_t c) {
  utf8proc_uint8_t bytes[4];
  return std::string(reinterpret_cast<char*>(bytes), size_t(utf8proc_encode_char(utf8proc_int32_t(c), bytes)));
}

uint32_t code_point(std::string_view text) {
  utf8proc_int32_t c = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), utf8proc_ssize_t(text.size()), &c);
  return c < 0 ? 0xfffd : uint32_t(c);
}
size_t length_at(std::string_view text) {
  const int n = character(text);
  return n > 0 ? size_t(n) : 1;
}
std::string_view last_character(std::string_view text) {
  size_t at = text.size();
  while (at > 0 && (static_cast<unsigned char>(text[--at]) & 0xc0) == 0x80) {}
  return text.substr(at);
}

bool is_space(uint32_t c) {
  const auto category = utf8proc_category(utf8proc_int32_t(c));
  return (category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP) || (c >= 9 && c <= 13) || c == 0x85;
}
// \w of Rust: Alphabetic, marks, decimal digits, connectors and joiners.
bool is_word(uint32_t c) {
  const auto category = utf8proc_category(utf8proc_int32_t(c));
  const bool is_circled = (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
                          (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NL) || category == UTF8PROC_CATEGORY_PC ||
         is_circled || c == 0x200c || c == 0x200d;
}

bool starts_with(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

std::string valid_utf8(std::string_view text) {
  Utf8Stream stream;
  std::string out = stream.add(text);
  return out += stream.end();
}

std::string Utf8Stream::add(std::string_view bytes) {
  std::string out;
  held_.append(bytes);
  std::string_view rest = held_;
  for (int n; !rest.empty() && (n = character(rest)) != 0; rest.remove_prefix(size_t(std::abs(n))))
    out += n > 0 ? rest.substr(0, size_t(n)) : kReplacement;
  held_ = std::string(rest);
  return out;
}

std::string Utf8Stream::end() {
  const bool open = !held_.empty();
  held_.clear();
  return std::string(open ? kReplacement : "");
}

}  // namespace llm
