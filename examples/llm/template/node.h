// What parsing and running a chat template share: texts, tokens, values, and the nodes of its tree.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "template/template.h"
#include "tokenizer/utf8.h"

namespace llm::jinja {

// Characters with their origin in the bits above the 21 of Unicode, so that it stays with them through everything that
// a template does to texts.
using Text = std::u32string;
constexpr char32_t kCharacter = 0x1fffff, kByModel = 1 << 24, kByOthers = 2 << 24;

constexpr int kNesting = 200, kCalls = 300, kValues = 100;  // greatest depth of a template, of its calls and its values
constexpr size_t kWork = 1 << 25, kNodeWork = 16;  // limit of characters and elements made; a node counts as kNodeWork
constexpr size_t kLongestRange = 100000;           // as in Jinja's sandbox

[[noreturn]] inline void fail(int line, const std::string& why) {
  throw Error("chat template, line " + std::to_string(line) + ": " + why);
}

inline Text wide(std::string_view utf8, char32_t origin = 0) {
  const std::string valid = valid_utf8(utf8);
  Text out;
  for (std::string_view rest = valid; !rest.empty(); rest.remove_prefix(length_at(rest)))
    out.push_back(code_point(rest) | origin);
  return out;
}
inline std::string narrow(const Text& text) {
  std::string out;
  for (const char32_t c : text) out += utf8_of(c & kCharacter);
  return out;
}

inline bool is_same(char32_t a, char32_t b) { return ((a ^ b) & kCharacter) == 0; }
inline bool is_same(const Text& a, const Text& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char32_t x, char32_t y) { return is_same(x, y); });
}
inline size_t find(const Text& text, const Text& what, size_t from = 0) {
  const auto at = std::search(text.begin() + int64_t(from), text.end(), what.begin(), what.end(),
                              [](char32_t x, char32_t y) { return is_same(x, y); });
  return at == text.end() && !what.empty() ? Text::npos : size_t(at - text.begin());
}
inline bool is_at(const Text& text, size_t at, const Text& what) {
  return at <= text.size() && is_same(text.substr(at, what.size()), what);
}

// Python's str.isspace().
inline bool is_space(char32_t c) {
  c &= kCharacter;
  return llm::is_space(c) || (c >= 28 && c <= 31);
}
inline bool is_letter(char32_t c) { return ((c & kCharacter) | 32) - 'a' < 26; }
inline bool is_of_name(char32_t c) { return is_letter(c) || c == '_' || c - '0' < 10; }

inline Text stripped(const Text& text, const Text* chars, bool left, bool right) {
  const auto goes = [&](char32_t c) { return chars == nullptr ? is_space(c) : find(*chars, Text(1, c)) != Text::npos; };
  size_t begin = 0, end = text.size();
  while (left && begin < end && goes(text[begin])) ++begin;
  while (right && end > begin && goes(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

// A token of a template's text: data, or a word or sign within a tag.
struct Token {
  enum Kind { data, print_begin, print_end, block_begin, block_end, word, string, integer, sign, end } kind;
  int line;
  std::string text;
};
std::vector<Token> tokens_of(std::string_view source);

struct Node;
struct Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<Text, Value>>;  // in the order of insertion

struct Value {
  enum Kind { undefined, none, boolean, integer, text, list, dict, space, loop, function, macro } kind = undefined;
  // Kinds of lists that differ in what Python allows: a stream is always true, has no length, and can be read once.
  enum Sort { plain, tuple, range, view, stream };
  int64_t n = 0;                         // a number; true; the Sort of a list; the index of a loop
  int depth = 0;                         // of a list or a dict, to limit recursion
  std::shared_ptr<const Text> chars;     // a text; the name of a function or of an undefined value
  std::shared_ptr<const List> elements;  // of a list, or of the list that a loop goes over
  std::shared_ptr<Dict> entries;         // of a dict or a namespace; only a namespace changes
  const Node* body = nullptr;            // of a macro

  static Value of(Kind kind, int64_t n = 0) {
    Value out;
    out.kind = kind, out.n = n;
    return out;
  }
  static Value of(bool b) { return of(boolean, b); }
  static Value of(Text t, Kind kind = text) {
    Value out = of(kind);
    out.chars = std::make_shared<const Text>(std::move(t));
    return out;
  }
};

using NodePtr = std::shared_ptr<const Node>;
struct Node {
  // clang-format off
  enum Kind {
    constant, name, make_list, make_dict, attribute, item, slice, call, filter, test, inverse, compare, binary, choose,
    body, print, branch, repeat, assign, capture, define, leave, next, generation
  } kind;
  // clang-format on
  int line;
  std::vector<NodePtr> parts;      // nullptr: not given
  std::string word;                // a name, an operator
  std::vector<std::string> words;  // names of arguments ("": positional), assigned names, comparison operators
  Value value;                     // a constant
  int depth = 1;
};
NodePtr parsed(std::string_view source);

}  // namespace llm::jinja
