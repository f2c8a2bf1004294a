#include "template.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <initializer_list>
#include <utility>

#include "tokenizer.h"

namespace llm {
namespace {

// ---- texts ----------------------------------------------------------------------------------------------------------------------

// Characters with their origin above the 21 bits of Unicode, so that it goes with them through everything that a template does to texts.
using Text = std::u32string;
constexpr char32_t kCharacter = 0x1fffff, kByModel = 1 << 24, kByOthers = 2 << 24;

constexpr int kNesting = 200, kCalls = 300, kValues = 100;  // how deep a template, what it calls and what it makes may be
constexpr int64_t kWork = 1 << 25, kNodeWork = 16;          // characters and elements that are made, and what a step counts
constexpr int64_t kLongestRange = 100000;                   // as in Jinja's sandbox

[[noreturn]] void fail(int line, const std::string& why) { throw Error("the chat template, line " + std::to_string(line) + ": " + why); }

Text wide(std::string_view utf8, char32_t origin = 0) {
  const std::string valid = valid_utf8(utf8);
  Text out;
  for (const char c : valid) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0xc0) out.push_back((byte & (byte < 0xe0 ? 0x1f : byte < 0xf0 ? 0x0f : 0x07)) | origin);
    else if (byte >= 0x80) out.back() = ((out.back() & kCharacter) << 6) | (byte & 0x3f) | origin;
    else out.push_back(byte | origin);
  }
  return out;
}

void append_utf8(std::string& out, char32_t c) {
  const auto byte = [&](char32_t value) { out.push_back(char(value)); };
  const auto tail = [&](int shift) { byte(0x80 | ((c >> shift) & 0x3f)); };
  if (c < 0x80) byte(c);
  else if (c < 0x800) byte(0xc0 | (c >> 6)), tail(0);
  else if (c < 0x10000) byte(0xe0 | (c >> 12)), tail(6), tail(0);
  else byte(0xf0 | (c >> 18)), tail(12), tail(6), tail(0);
}

std::string narrow(const Text& text) {
  std::string out;
  for (const char32_t c : text) append_utf8(out, c & kCharacter);
  return out;
}

bool is_same(char32_t a, char32_t b) { return ((a ^ b) & kCharacter) == 0; }
bool is_same(const Text& a, const Text& b) { return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char32_t x, char32_t y) { return is_same(x, y); }); }
size_t find(const Text& text, const Text& what, size_t from = 0) {
  const auto at = std::search(text.begin() + int64_t(from), text.end(), what.begin(), what.end(), [](char32_t x, char32_t y) { return is_same(x, y); });
  return at == text.end() && !what.empty() ? Text::npos : size_t(at - text.begin());
}
bool is_at(const Text& text, size_t at, const Text& what) { return at <= text.size() && text.size() - at >= what.size() && is_same(text.substr(at, what.size()), what); }

// As Python's str.isspace().
bool is_space(char32_t c) {
  c &= kCharacter;
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}
bool is_letter(char32_t c) { return ((c & kCharacter) | 32) - 'a' < 26; }
bool is_of_name(char32_t c) { return is_letter(c) || c == '_' || c - '0' < 10; }

Text stripped(const Text& text, const Text* chars, bool left, bool right) {
  const auto goes = [&](char32_t c) { return chars == nullptr ? is_space(c) : find(*chars, Text(1, c)) != Text::npos; };
  size_t begin = 0, end = text.size();
  while (left && begin < end && goes(text[begin])) ++begin;
  while (right && end > begin && goes(text[end - 1])) --end;
  return text.substr(begin, end - begin);
}

}  // namespace

// ---- what a template is ---------------------------------------------------------------------------------------------------------

struct Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<Text, Value>>;  // in the order in which it was made

struct Value {
  enum Kind { undefined, none, boolean, integer, text, list, dict, space, function, macro } kind = undefined;
  // What can be looped over in Python, and differs in what else can be done with it: a stream is always true, has no length and is gone
  // when it has been read.
  enum Sort { plain, tuple, range, view, stream };
  int64_t n = 0;                          // a number, true; of a list: what sort it is
  int depth = 0;                          // of a list or a dict, so that recursion ends
  std::shared_ptr<const Text> chars;      // a text; the name of a function or of what is undefined
  std::shared_ptr<const List> elements;   // of a list
  std::shared_ptr<const Dict> entries;    // of a dict
  Dict* attributes = nullptr;             // of a namespace
  const Template::Node* body = nullptr;   // of a macro

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

struct Template::Node {
  enum Kind {
    constant, name, make_list, make_dict, attribute, item, slice, call, filter, test, negative, inverse, compare, binary, choose,
    body, print, branch, repeat, assign, capture, define, leave, next, generation
  } kind;
  int line, depth = 1;
  std::string word;                                // a name, an operator
  Value value{};                                   // a constant
  std::vector<std::shared_ptr<const Node>> parts{};  // nullptr: not given
  std::vector<std::string> words{};                // names of arguments ("": by place), of what is assigned, operators of a comparison
};

namespace {

using Node = Template::Node;
using NodePtr = std::shared_ptr<const Node>;

// ---- reading --------------------------------------------------------------------------------------------------------------------

struct Token {
  enum Kind { data, print_begin, print_end, block_begin, block_end, word, string, integer, sign, end } kind;
  int line;
  Text text;
  std::string word_;
};

// Whitespace around tags is as in Jinja: '-' takes all of it, '+' none; otherwise a block takes the spaces before it, if nothing else is
// in its line, and the newline behind it.
class Lexer {
 public:
  explicit Lexer(const Text& source) {
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] != '\r') source_ += source[i];
      else if (i + 1 == source.size() || source[i + 1] != '\n') source_ += U'\n';
    }
    if (!source_.empty() && source_.back() == '\n') source_.pop_back();
  }

  std::vector<Token> tokens() {
    while (at_ < source_.size()) {
      size_t begin = at_;
      while (begin < source_.size() && !(source_[begin] == '{' && (is(begin + 1, "{") || is(begin + 1, "%") || is(begin + 1, "#")))) ++begin;
      const char32_t kind = begin + 1 < source_.size() ? source_[begin + 1] : 0, sign = begin + 2 < source_.size() ? source_[begin + 2] : 0;
      Text data = source_.substr(at_, begin - at_);
      if (kind != 0 && sign == '-') data = stripped(data, nullptr, false, true);
      else if (kind != 0 && kind != '{' && sign != '+') strip_line(data);
      if (!data.empty()) out_.push_back({Token::data, line_, data, {}});
      advance(begin);
      if (kind == 0) break;
      advance(begin + 2 + (sign == '-' || sign == '+' ? 1 : 0));
      if (kind == '#') comment();
      else tag(kind == '{');
    }
    out_.push_back({Token::end, line_, {}, {}});
    return std::move(out_);
  }

 private:
  bool is(size_t at, const char* what) const {
    for (; *what != 0; ++what, ++at) {
      if (at >= source_.size() || source_[at] != char32_t(*what)) return false;
    }
    return true;
  }
  void advance(size_t to) {
    line_ += int(std::count(source_.begin() + int64_t(at_), source_.begin() + int64_t(to), U'\n'));
    at_ = to;
  }
  void strip_line(Text& data) const {
    const size_t newline = data.rfind(U'\n'), begin = newline == Text::npos ? 0 : newline + 1;
    if (newline == Text::npos && at_ > 0 && source_[at_ - 1] != '\n') return;
    if (std::all_of(data.begin() + int64_t(begin), data.end(), is_space)) data.resize(begin);
  }
  // Goes on behind a tag that ends at `end`; sign: '-' takes all whitespace that follows, none a newline, if it is a block.
  void close(size_t end, char32_t sign, bool block) {
    if (block && sign == 0 && is(end, "\n")) ++end;
    while (sign == '-' && end < source_.size() && is_space(source_[end])) ++end;
    advance(end);
  }
  void comment() {
    const size_t end = source_.find(U"#}", at_);
    if (end == Text::npos) fail(line_, "a comment does not end");
    const char32_t sign = end > at_ ? source_[end - 1] : 0;
    close(end + 2, sign == '-' || sign == '+' ? sign : 0, true);
  }
  void tag(bool print) {
    const char* const end = print ? "}}" : "%}";
    const int first = line_;
    out_.push_back({print ? Token::print_begin : Token::block_begin, line_, {}, {}});
    std::string open;  // brackets
    for (;;) {
      while (at_ < source_.size() && is_space(source_[at_])) advance(at_ + 1);
      if (at_ >= source_.size()) fail(first, "a tag does not end");
      const char32_t c = source_[at_];
      const bool has_sign = (c == '-' || (c == '+' && !print)) && is(at_ + 1, end);
      if (open.empty() && (has_sign || is(at_, end))) {
        out_.push_back({print ? Token::print_end : Token::block_end, line_, {}, {}});
        return close(at_ + (has_sign ? 3 : 2), has_sign ? c : 0, !print);
      }
      if (is_of_name(c)) {
        size_t to = at_;
        while (to < source_.size() && is_of_name(source_[to])) ++to;
        const std::string word = narrow(source_.substr(at_, to - at_));
        const bool digits = c - '0' < 10;
        if (digits && (word.size() > 18 || (word.size() > 1 && c == '0') || word.find_first_not_of("0123456789") != std::string::npos)) fail(line_, "this form of number is not supported");
        if (digits && is(to, ".") && to + 1 < source_.size() && source_[to + 1] - '0' < 10) fail(line_, "numbers with fractions are not supported");
        push(digits ? Token::integer : Token::word, to, word);
      } else if (c == '"' || c == '\'') {
        string(c);
      } else {
        std::string sign;
        for (const char* two : {"==", "!=", "<=", ">=", "//", "**"}) {
          if (is(at_, two)) sign = two;
        }
        if (sign.empty() && c < 128 && std::strchr("+-*/%~<>=.,:|()[]{}", int(c)) != nullptr) sign = char(c);
        if (sign.empty()) fail(line_, "the character '" + narrow(Text(1, c)) + "' is not expected");
        if (c == '(' || c == '[' || c == '{') open.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
        if (c == ')' || c == ']' || c == '}') {
          if (open.empty() || open.back() != char(c)) fail(line_, std::string("'") + char(c) + "' closes nothing");
          open.pop_back();
        }
        push(Token::sign, at_ + sign.size(), sign);
      }
    }
  }
  void push(Token::Kind kind, size_t to, const std::string& word) {
    out_.push_back({kind, line_, {}, word});
    advance(to);
  }
  void string(char32_t quote) {
    const int first = line_;
    size_t at = at_ + 1;
    Text text;
    for (;; ++at) {
      if (at >= source_.size()) fail(first, "a string does not end");
      const char32_t c = source_[at];
      if (c == quote) break;
      const char32_t next = c == '\\' && at + 1 < source_.size() ? source_[at + 1] : 0;
      if (next == 0) {
        text += c;
        continue;
      }
      ++at;
      const char *const names = "nrt\\'\"", *const meant = "\n\r\t\\'\"";
      const char* const known = next < 128 ? std::strchr(names, int(next)) : nullptr;
      if (known != nullptr) text += char32_t(meant[known - names]);
      if (known != nullptr || next == '\n') continue;
      char32_t code = 0;
      for (int digits = next == 'x' ? 2 : next == 'u' ? 4 : 0; digits > 0; --digits) {
        const char32_t d = ++at < source_.size() ? source_[at] : 0, value = d - '0' < 10 ? d - '0' : (d | 32) - 'a' < 6 ? (d | 32) - 'a' + 10 : 1 << 20;
        code = std::min<char32_t>(code * 16 + value, 1 << 20);
      }
      if ((next != 'x' && next != 'u') || code >= 1 << 20 || (code >= 0xd800 && code < 0xe000)) fail(line_, "this escape in a string is not supported");
      text += code;
    }
    out_.push_back({Token::string, line_, text, {}});
    advance(at + 1);
  }

  Text source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> out_;
};

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}
  NodePtr all() {
    NodePtr out = body({});
    if (now().kind != Token::end) fail(now().line, "'" + now().word_ + "' belongs to nothing");
    return out;
  }

 private:
  const Token& now() const { return tokens_[at_]; }
  const Token& next() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is(Token::Kind kind, const char* word) const { return now().kind == kind && now().word_ == word; }
  bool is_word(const char* word) const { return is(Token::word, word); }
  bool is_sign(const char* sign) const { return is(Token::sign, sign); }
  bool skip(Token::Kind kind, const char* word) { return is(kind, word) && (next(), true); }
  bool skip_word(const char* word) { return skip(Token::word, word); }
  bool skip_sign(const char* sign) { return skip(Token::sign, sign); }
  void expect_sign(const char* sign) {
    if (!skip_sign(sign)) fail(now().line, std::string("'") + sign + "' is missing");
  }
  void expect(Token::Kind kind) {
    if (next().kind != kind) fail(tokens_[at_ - 1].line, "something is left over, or missing, in a tag");
  }
  std::string expect_word() {
    if (now().kind != Token::word) fail(now().line, "a name is missing");
    return next().word_;
  }

  std::shared_ptr<Node> node(Node::Kind kind, int line, const std::string& word, std::vector<NodePtr> parts) {
    auto out = std::make_shared<Node>(Node{kind, line, 1, word});
    for (const NodePtr& part : parts) out->depth = std::max(out->depth, part == nullptr ? 1 : part->depth + 1);
    if (out->depth > kNesting) fail(line, "it is nested too deep");
    out->parts = std::move(parts);
    return out;
  }
  std::shared_ptr<Node> node(Node::Kind kind, std::vector<NodePtr> parts, const std::string& word = "") { return node(kind, now().line, word, std::move(parts)); }
  NodePtr constant(Value value) {
    auto out = node(Node::constant, {});
    out->value = std::move(value);
    return out;
  }
  struct Deeper {
    explicit Deeper(Parser& parser) : depth(parser.depth_) {
      if (++depth > kNesting) fail(parser.now().line, "it is nested too deep");
    }
    ~Deeper() { --depth; }
    int& depth;
  };

  // Up to a block that begins with one of these words, of which the word is the next token.
  NodePtr body(std::initializer_list<const char*> ends) {
    const Deeper deeper(*this);
    std::vector<NodePtr> parts;
    const int line = now().line;
    while (now().kind != Token::end) {
      const Token& token = next();
      if (token.kind == Token::data) {
        parts.push_back(node(Node::print, token.line, "", {constant(Value::of(token.text))}));
      } else if (token.kind == Token::print_begin) {
        parts.push_back(node(Node::print, token.line, "", {tuple()}));
        expect(Token::print_end);
      } else {
        if (std::any_of(ends.begin(), ends.end(), [&](const char* end) { return is_word(end); })) return node(Node::body, line, "", std::move(parts));
        parts.push_back(statement());
      }
    }
    if (ends.size() > 0) fail(line, std::string("'") + *(ends.end() - 1) + "' is missing");
    return node(Node::body, line, "", std::move(parts));
  }
  NodePtr ended(const char* end) {
    expect(Token::block_end);
    NodePtr out = body({end});
    next();
    return out;
  }

  NodePtr statement() {
    const int line = now().line;
    const std::string word = expect_word();
    NodePtr out;
    if (word == "if") {  // conditions and bodies in turn; the last body may be alone
      std::vector<NodePtr> parts;
      for (bool last = false; !last || !is_word("endif");) {
        if (!last) parts.push_back(operators(0));
        expect(Token::block_end);
        parts.push_back(last ? body({"endif"}) : body({"elif", "else", "endif"}));
        if (is_word("endif")) break;
        last = next().word_ == "else";
      }
      next();
      out = node(Node::branch, line, "", std::move(parts));
    } else if (word == "for") {
      std::vector<std::string> names;
      const bool open = skip_sign("(");
      do names.push_back(expect_word());
      while (skip_sign(","));
      if (open) expect_sign(")");
      if (!skip_word("in")) fail(line, "'for' without 'in'");
      NodePtr items = operators(0), condition, otherwise;
      if (skip_word("if")) condition = expression();
      if (is_word("recursive")) fail(line, "recursive loops are not supported");
      expect(Token::block_end);
      NodePtr inside = body({"else", "endfor"});
      if (next().word_ == "else") otherwise = ended("endfor");
      auto made = node(Node::repeat, line, "", {items, condition, inside, otherwise});
      made->words = names;
      out = made;
    } else if (word == "set") {
      std::vector<std::string> names{expect_word()};
      std::string of;
      if (skip_sign(".")) of = names[0], names[0] = expect_word();
      while (of.empty() && skip_sign(",")) names.push_back(expect_word());
      if (!skip_sign("=") && (!of.empty() || names.size() > 1 || now().kind != Token::block_end)) fail(line, "this form of 'set' is not supported");
      const bool captures = now().kind == Token::block_end;
      auto made = captures ? node(Node::capture, line, "", {ended("endset")}) : node(Node::assign, line, of, {tuple()});
      made->words = names;
      out = made;
    } else if (word == "macro") {
      const std::string name = expect_word();
      std::vector<std::string> names;
      std::vector<NodePtr> parts{nullptr};
      expect_sign("(");
      while (!skip_sign(")")) {
        if (!names.empty()) expect_sign(",");
        names.push_back(expect_word());
        parts.push_back(skip_sign("=") ? expression() : nullptr);
      }
      parts[0] = ended("endmacro");
      auto made = node(Node::define, line, name, std::move(parts));
      made->words = names;
      out = made;
    } else if (word == "generation") {
      out = node(Node::generation, line, "", {ended("endgeneration")});
    } else if (word == "break" || word == "continue") {
      out = node(word == "break" ? Node::leave : Node::next, line, "", {});
    } else {
      fail(line, "'" + shown(word) + "' is not supported");
    }
    expect(Token::block_end);
    return out;
  }

  // Expressions, from what binds least to what binds most.
  NodePtr tuple() {
    NodePtr first = expression();
    if (!is_sign(",")) return first;
    std::vector<NodePtr> parts{first};
    while (skip_sign(",")) {
      if (now().kind == Token::block_end || now().kind == Token::print_end || is_sign(")")) break;
      parts.push_back(expression());
    }
    return node(Node::make_list, std::move(parts), "tuple");
  }
  NodePtr expression() {
    const Deeper deeper(*this);
    NodePtr out = operators(0);
    while (skip_word("if")) {
      NodePtr condition = operators(0);
      out = node(Node::choose, {condition, out, skip_word("else") ? expression() : nullptr});
    }
    return out;
  }
  // Operators of two sides, by how little they bind; `not` and comparisons stand between `and` and sums.
  NodePtr operators(size_t level) {
    static const std::vector<std::string> levels[] = {{"or"}, {"and"}, {"+", "-"}, {"~"}, {"*", "//", "/", "%"}, {"**"}};
    const auto side = [&] { return level + 1 == std::size(levels) ? unary(true) : level == 1 ? inverse() : operators(level + 1); };
    NodePtr left = side();
    for (;;) {
      const bool given = now().kind == (level < 2 ? Token::word : Token::sign) && std::count(levels[level].begin(), levels[level].end(), now().word_) > 0;
      if (!given) return left;
      const std::string sign = next().word_;
      left = node(Node::binary, {left, side()}, sign);
    }
  }
  NodePtr inverse() {
    const Deeper deeper(*this);
    if (skip_word("not")) return node(Node::inverse, {inverse()});
    std::vector<NodePtr> parts{operators(2)};
    std::vector<std::string> signs;
    for (;;) {
      const std::string& sign = now().word_;
      const bool in = is_word("in"), not_in = is_word("not") && tokens_[at_ + 1].word_ == "in";
      const bool compares = now().kind == Token::sign && (sign == "==" || sign == "!=" || sign == "<" || sign == "<=" || sign == ">" || sign == ">=");
      if (!in && !not_in && !compares) break;
      signs.push_back(not_in ? "not in" : sign);
      if (next(), not_in) next();
      parts.push_back(operators(2));
    }
    if (signs.empty()) return parts[0];
    auto out = node(Node::compare, std::move(parts));
    out->words = signs;
    return out;
  }
  NodePtr unary(bool with_filter) {
    const Deeper deeper(*this);
    NodePtr out;
    if (is_sign("-") || is_sign("+")) {
      const std::string sign = next().word_;
      out = node(Node::negative, {unary(false)}, sign);
    } else {
      out = primary();
    }
    out = postfix(out);
    while (with_filter) {
      if (skip_sign("|")) {
        const std::string name = dotted();
        out = arguments(node(Node::filter, {out}, name), is_sign("("));
      } else if (is_word("is")) out = is_test(out);
      else if (is_sign("(")) out = arguments(node(Node::call, {out}), true);
      else break;
    }
    return out;
  }
  std::string dotted() {
    std::string name = expect_word();
    while (skip_sign(".")) name += "." + expect_word();
    return name;
  }
  NodePtr is_test(const NodePtr& of) {
    next();
    const bool inverse = skip_word("not");
    const std::string name = dotted();
    // An argument may stand without brackets.
    const bool word = now().kind == Token::word && !is_word("else") && !is_word("or") && !is_word("and") && !is_word("if") && !is_word("is") && !is_word("in") && !is_word("not");
    NodePtr out;
    if (word || now().kind == Token::string || now().kind == Token::integer || is_sign("[") || is_sign("{")) {
      auto made = node(Node::test, {of, postfix(primary())}, name);
      made->words = {""};
      out = made;
    } else {
      out = arguments(node(Node::test, {of}, name), is_sign("("));
    }
    if (is_word("is")) fail(now().line, "a test of a test");
    return inverse ? node(Node::inverse, {out}) : out;
  }
  NodePtr arguments(const std::shared_ptr<Node>& of, bool given) {
    if (!given) return of;
    expect_sign("(");
    std::vector<NodePtr> parts = of->parts;
    std::vector<std::string> names;
    while (!skip_sign(")")) {
      if (!names.empty()) expect_sign(",");
      if (skip_sign(")")) break;
      const bool named = now().kind == Token::word && tokens_[at_ + 1].kind == Token::sign && tokens_[at_ + 1].word_ == "=";
      if (!named && !names.empty() && !names.back().empty()) fail(now().line, "an argument without a name behind one with a name");
      names.push_back(named ? next().word_ : "");
      if (named) next();
      parts.push_back(expression());
    }
    auto out = node(of->kind, of->line, of->word, std::move(parts));
    out->words = names;
    return out;
  }
  NodePtr postfix(NodePtr out) {
    for (;;) {
      if (skip_sign(".")) {
        out = node(Node::attribute, {out}, expect_word());
      } else if (is_sign("(")) {
        out = arguments(node(Node::call, {out}), true);
      } else if (skip_sign("[")) {
        NodePtr bounds[3];
        int colons = 0;
        while (!is_sign("]")) {
          if (skip_sign(":")) {
            if (++colons > 2) fail(now().line, "a slice of more than three parts");
          } else if (bounds[colons] == nullptr) {
            bounds[colons] = expression();
          } else {
            fail(now().line, "']' is missing");
          }
        }
        if (colons == 0 && bounds[0] == nullptr) fail(now().line, "an index is missing");
        next();
        out = colons == 0 ? node(Node::item, {out, bounds[0]}) : node(Node::slice, {out, bounds[0], bounds[1], bounds[2]});
      } else {
        return out;
      }
    }
  }
  NodePtr primary() {
    const Token& token = next();
    if (token.kind == Token::string) {
      Text text = token.text;
      while (now().kind == Token::string) text += next().text;
      return constant(Value::of(text));
    }
    if (token.kind == Token::integer) return constant(Value::of(Value::integer, std::stoll(token.word_)));
    if (token.kind == Token::word) {
      const std::string& word = token.word_;
      if (word == "true" || word == "True" || word == "false" || word == "False") return constant(Value::of((word[0] | 32) == 't'));
      if (word == "none" || word == "None") return constant(Value::of(Value::none));
      for (const char* reserved : {"and", "else", "if", "in", "is", "not", "or"}) {
        if (word == reserved) fail(token.line, "'" + word + "' is not expected");
      }
      return node(Node::name, {}, word);
    }
    std::vector<NodePtr> parts;
    if (token.kind == Token::sign && token.word_ == "(") {
      if (skip_sign(")")) return node(Node::make_list, {}, "tuple");
      NodePtr out = tuple();
      expect_sign(")");
      return out;
    }
    if (token.kind == Token::sign && (token.word_ == "[" || token.word_ == "{")) {
      const bool list = token.word_ == "[";
      while (!skip_sign(list ? "]" : "}")) {
        if (!parts.empty()) expect_sign(",");
        if (skip_sign(list ? "]" : "}")) break;
        parts.push_back(expression());
        if (!list) expect_sign(":"), parts.push_back(expression());
      }
      return node(list ? Node::make_list : Node::make_dict, std::move(parts));
    }
    fail(token.line, "an expression is missing");
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

// ---- running --------------------------------------------------------------------------------------------------------------------

struct Arguments {
  std::vector<Value> values;
  std::vector<std::string> names;  // "": by place
};

// What Python's dicts have: asking for one of these is not asking for an entry.
bool is_dict_method(const std::string& name) {
  return std::strstr(" clear copy fromkeys get items keys pop popitem setdefault update values ", (" " + name + " ").c_str()) != nullptr;
}

class Run {
 public:
  Run(std::time_t time) : time_(time) { scopes_.emplace_back(); }

  void set(const std::string& name, Value value) {
    work_ += int64_t(scopes_.back().names.size());
    for (auto& item : scopes_.back().names) {
      if (item.first == name) return void(item.second = std::move(value));
    }
    scopes_.back().names.emplace_back(name, std::move(value));
  }
  static Value value_of(const Json& json) {
    if (json.is_boolean()) return Value::of(json.get<bool>());
    if (json.is_string()) return Value::of(wide(json.get<std::string>()));
    if (json.is_null()) return Value::of(Value::none);
    throw Error("a variable of the chat template is neither a text nor true, false or null");
  }
  Value list_of(int line, List list, int64_t sort = Value::plain) {
    Value out = Value::of(Value::list, sort);
    for (const Value& value : list) deepen(line, out, value);
    spend(line, int64_t(list.size()));
    out.elements = std::make_shared<const List>(std::move(list));
    return out;
  }
  Value dict_of(int line, Dict dict) {
    Value out = Value::of(Value::dict);
    for (const auto& item : dict) deepen(line, out, item.second);
    spend(line, int64_t(dict.size()));
    out.entries = std::make_shared<const Dict>(std::move(dict));
    return out;
  }

  enum Flow { on, left, again };
  Flow run(const Node& node, Text& out) {
    const Deeper deeper(*this, node.line);
    switch (node.kind) {
      case Node::body:
        for (const NodePtr& part : node.parts) {
          if (const Flow flow = run(*part, out); flow != on) return flow;
        }
        return on;
      case Node::print: append(node.line, out, text_of(node.line, evaluate(*node.parts[0]))); return on;
      case Node::branch:
        for (size_t i = 0; i < node.parts.size(); i += 2) {
          if (i + 1 == node.parts.size()) return run(*node.parts[i], out);
          if (truth(evaluate(*node.parts[i]))) return run(*node.parts[i + 1], out);
        }
        return on;
      case Node::repeat: return repeat(node, out);
      case Node::assign: {
        const Value value = evaluate(*node.parts[0]);
        if (node.words.size() == 1) check_kept(node.line, value);
        if (node.word.empty()) return assign(node, node.words, value), on;
        const Value* const space = lookup(node.word);
        if (space == nullptr || space->kind != Value::space) fail(node.line, "'" + node.word + "' is no namespace");
        if (value.kind == Value::space) fail(node.line, "a namespace within a namespace is not supported");
        put(*space->attributes, wide(node.words[0]), value);
        return on;
      }
      case Node::capture: {
        Text text;
        scopes_.push_back({});
        run(*node.parts[0], text);
        scopes_.pop_back();
        set(node.words[0], made(node.line, std::move(text)));
        return on;
      }
      case Node::define: {
        if (scopes_.size() > 1) fail(node.line, "a macro within a loop or a macro is not supported");
        Value macro = Value::of(wide(node.word), Value::macro);
        macro.body = &node;
        set(node.word, macro);
        return on;
      }
      case Node::generation: {
        scopes_.push_back({});
        const Flow flow = run(*node.parts[0], out);
        scopes_.pop_back();
        return flow;
      }
      case Node::leave: return left;
      case Node::next: return again;
      default: fail(node.line, "an expression where a statement should be");
    }
  }

 private:
  struct Loop {
    const List* items;
    size_t at;
  };
  struct Scope {
    std::vector<std::pair<std::string, Value>> names;
    const Loop* loop = nullptr;
  };
  struct Deeper {
    Deeper(Run& run, int line) : depth(run.depth_) {
      run.spend(line, kNodeWork);
      if (++depth > kCalls) fail(line, "it is nested too deep");
    }
    ~Deeper() { --depth; }
    int& depth;
  };

  void spend(int line, int64_t work) {
    work_ += work;
    if (work_ > kWork) fail(line, "it takes too long, or makes too much");
  }
  void spend_search(int line, const Text& text, const Text& what) { spend(line, int64_t(text.size() + text.size() * what.size() / 8)); }
  void deepen(int line, Value& whole, const Value& part) {
    whole.depth = std::max(whole.depth, part.depth + 1);
    if (whole.depth > kValues) fail(line, "values are nested too deep");
    check_kept(line, part);
    if (part.kind == Value::space) fail(line, "a namespace within a list is not supported");
  }
  static void check_kept(int line, const Value& v) {
    if (v.kind == Value::list && v.n == Value::stream) fail(line, "what a filter makes without 'list' behind it cannot be kept");
  }
  void append(int line, Text& to, const Text& more) {
    spend(line, int64_t(more.size()));
    to += more;
  }
  Value made(int line, Text text) {
    spend(line, int64_t(text.size()));
    return Value::of(std::move(text));
  }
  static constexpr int64_t kNotGiven = 1;
  static bool is_missing(const Value& v) { return v.kind == Value::undefined && v.n == kNotGiven; }
  static Value nothing(const std::string& name) { return Value::of(wide(name), Value::undefined); }

  const Value* lookup(const std::string& name) const {
    for (size_t i = scopes_.size(); i-- > base_;) {
      for (const auto& item : scopes_[i].names) {
        if (item.first == name) return &item.second;
      }
    }
    if (base_ > 0) {
      for (const auto& item : scopes_[0].names) {
        if (item.first == name) return &item.second;
      }
    }
    return nullptr;
  }
  static void put(Dict& dict, const Text& key, const Value& value) {
    for (auto& item : dict) {
      if (is_same(item.first, key)) return void(item.second = value);
    }
    dict.emplace_back(key, value);
  }
  static const Value* get(const Dict& dict, const Text& key) {
    for (const auto& item : dict) {
      if (is_same(item.first, key)) return &item.second;
    }
    return nullptr;
  }
  void assign(const Node& node, const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) return set(names[0], value);
    const List parts = elements(node.line, value);
    if (parts.size() != names.size()) fail(node.line, std::to_string(parts.size()) + " values for " + std::to_string(names.size()) + " names");
    for (size_t i = 0; i < names.size(); ++i) set(names[i], parts[i]);
  }

  Flow repeat(const Node& node, Text& out) {
    List items = elements(node.line, evaluate(*node.parts[0]));
    if (node.parts[1] != nullptr) {
      List some;
      for (const Value& item : items) {
        scopes_.push_back({});
        assign(node, node.words, item);
        if (truth(evaluate(*node.parts[1]))) some.push_back(item);
        scopes_.pop_back();
      }
      items = some;
    }
    Flow flow = on;
    Loop loop{&items, 0};
    for (; loop.at < items.size() && flow != left; ++loop.at) {
      scopes_.push_back({{}, &loop});
      assign(node, node.words, items[loop.at]);
      flow = run(*node.parts[2], out);
      scopes_.pop_back();
    }
    if (items.empty() && node.parts[3] != nullptr) {
      scopes_.push_back({});
      flow = run(*node.parts[3], out);
      scopes_.pop_back();
      return flow;
    }
    return on;
  }
  Value loop_attribute(int line, const std::string& name, const Arguments* call) {
    const Loop* loop = nullptr;
    for (size_t i = scopes_.size(); i-- > base_ && loop == nullptr;) loop = scopes_[i].loop;
    if (loop == nullptr) fail(line, "'loop' outside of a loop");
    const auto at = int64_t(loop->at), n = int64_t(loop->items->size());
    if (call != nullptr) {
      if (name != "cycle" || call->values.empty()) fail(line, "'loop." + shown(name) + "(...)' is not supported");
      return call->values[loop->at % call->values.size()];
    }
    if (name == "first") return Value::of(at == 0);
    if (name == "last") return Value::of(at == n - 1);
    if (name == "previtem") return at > 0 ? (*loop->items)[loop->at - 1] : nothing("loop.previtem");
    if (name == "nextitem") return at < n - 1 ? (*loop->items)[loop->at + 1] : nothing("loop.nextitem");
    const std::pair<const char*, int64_t> numbers[] = {{"index", at + 1}, {"index0", at}, {"revindex", n - at}, {"revindex0", n - at - 1}, {"length", n}};
    for (const auto& number : numbers) {
      if (name == number.first) return Value::of(Value::integer, number.second);
    }
    fail(line, "'loop." + shown(name) + "' is not supported");
  }

  // ---- values

  static bool truth(const Value& v) {
    switch (v.kind) {
      case Value::undefined: case Value::none: return false;
      case Value::boolean: case Value::integer: return v.n != 0;
      case Value::text: return !v.chars->empty();
      case Value::list: return v.n == Value::stream || !v.elements->empty();
      case Value::dict: return !v.entries->empty();
      default: return true;
    }
  }
  static bool is_number(const Value& v) { return v.kind == Value::boolean || v.kind == Value::integer; }
  bool equal(int line, const Value& a, const Value& b) {
    spend(line, a.kind == Value::text ? int64_t(a.chars->size()) : 1);
    if (is_number(a) && is_number(b)) return a.n == b.n;
    if (a.kind != b.kind) return false;
    if (a.kind == Value::text) return is_same(*a.chars, *b.chars);
    if (a.kind == Value::list) {
      return a.n == b.n && std::equal(a.elements->begin(), a.elements->end(), b.elements->begin(), b.elements->end(),
                                      [&](const Value& x, const Value& y) { return equal(line, x, y); });
    }
    if (a.kind == Value::dict) {
      return a.entries->size() == b.entries->size() && std::all_of(a.entries->begin(), a.entries->end(), [&](const auto& item) {
        const Value* const other = get(*b.entries, item.first);
        return other != nullptr && equal(line, item.second, *other);
      });
    }
    return a.kind == Value::undefined || a.kind == Value::none || (a.attributes == b.attributes && a.body == b.body);
  }
  Text text_of(int line, const Value& v) {
    switch (v.kind) {
      case Value::undefined: return {};
      case Value::none: return U"None";
      case Value::boolean: return v.n != 0 ? U"True" : U"False";
      case Value::integer: return wide(std::to_string(v.n));
      case Value::text: return *v.chars;
      default: fail(line, std::string(name_of(v)) + " as a text is not supported");
    }
  }
  static const char* name_of(const Value& v) {
    const char* const names[] = {"something undefined", "none", "true or false", "a number", "a text", "a list", "a dict", "a namespace", "a function", "a macro"};
    return names[v.kind];
  }
  [[noreturn]] void wrong(int line, const std::string& what, const Value& v) {
    fail(line, what + " of " + name_of(v) + (v.kind == Value::undefined && v.chars ? ", '" + shown(narrow(*v.chars)) + "'," : "") + " is not possible or not supported");
  }
  // What a loop goes over.
  List elements(int line, const Value& v) {
    List out;
    if (v.kind == Value::list) out = *v.elements;
    else if (v.kind == Value::text) for (const char32_t c : *v.chars) out.push_back(Value::of(Text(1, c)));
    else if (v.kind == Value::dict) for (const auto& item : *v.entries) out.push_back(Value::of(item.first));
    else if (v.kind != Value::undefined) wrong(line, "a loop over the elements", v);
    spend(line, int64_t(out.size()));
    return out;
  }
  int64_t length(int line, const Value& v) {
    if (v.kind == Value::text) return int64_t(v.chars->size());
    if (v.kind == Value::list && v.n != Value::stream) return int64_t(v.elements->size());
    if (v.kind == Value::dict) return int64_t(v.entries->size());
    if (v.kind != Value::undefined) wrong(line, "the length", v);
    return 0;
  }
  bool contains(int line, const Value& all, const Value& one) {
    if (all.kind == Value::list) return std::any_of(all.elements->begin(), all.elements->end(), [&](const Value& v) { return equal(line, v, one); });
    if (all.kind == Value::dict && one.kind == Value::text) return get(*all.entries, *one.chars) != nullptr;
    if (all.kind == Value::text && one.kind == Value::text) return spend_search(line, *all.chars, *one.chars), find(*all.chars, *one.chars) != Text::npos;
    if (all.kind != Value::undefined) wrong(line, "'in'", all);
    return false;
  }
  Value attribute(int line, const Value& of, const std::string& name) {
    if (of.kind == Value::undefined) wrong(line, "the attribute '" + shown(name) + "'", of);
    const bool has_own = of.kind == Value::dict ? is_dict_method(name) : of.kind != Value::space && of.kind != Value::none;
    if (name[0] == '_' || has_own) fail(line, "'" + shown(name) + "' of " + name_of(of) + " is not supported here");
    const Value* const found = of.kind == Value::dict ? get(*of.entries, wide(name)) : of.kind == Value::space ? get(*of.attributes, wide(name)) : nullptr;
    return found != nullptr ? *found : nothing(name);
  }
  void check_indexed(int line, const Value& v) {
    if (v.kind == Value::list && v.n >= Value::view) fail(line, "an element of what a filter or a method makes, without 'list' behind it, is not supported");
  }
  Value item(int line, const Value& of, const Value& at) {
    if (of.kind == Value::undefined) wrong(line, "an element", of);
    if (at.kind == Value::text && of.kind == Value::dict) {
      if (const Value* const found = get(*of.entries, *at.chars)) return *found;
    }
    if (at.kind == Value::text && of.kind != Value::text) return attribute(line, of, narrow(*at.chars).empty() ? " " : narrow(*at.chars));
    if (at.kind == Value::text) return attribute(line, of, narrow(*at.chars));
    if (!is_number(at) || (of.kind != Value::list && of.kind != Value::text)) return nothing("an element");
    check_indexed(line, of);
    const int64_t n = length(line, of), i = at.n < 0 ? at.n + n : at.n;
    if (i < 0 || i >= n) return nothing("element " + std::to_string(at.n));
    return of.kind == Value::list ? (*of.elements)[size_t(i)] : Value::of(Text(1, (*of.chars)[size_t(i)]));
  }
  Value slice(const Node& node) {
    const Value of = evaluate(*node.parts[0]);
    if (of.kind != Value::list && of.kind != Value::text) wrong(node.line, "a slice", of);
    check_indexed(node.line, of);
    int64_t bounds[3] = {0, 0, 1};
    bool given[3] = {};
    for (int i = 0; i < 3; ++i) {
      if (node.parts[size_t(i) + 1] == nullptr) continue;
      const Value v = evaluate(*node.parts[size_t(i) + 1]);
      if (v.kind == Value::none) continue;
      if (!is_number(v)) wrong(node.line, "a slice by the value", v);
      bounds[i] = v.n, given[i] = true;
    }
    const int64_t n = length(node.line, of), step = bounds[2];
    if (step == 0) fail(node.line, "a slice of step 0");
    const auto bound = [&](int i, int64_t otherwise) {
      const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
      return !given[i] ? otherwise : std::min(high, std::max(low, bounds[i] < 0 ? bounds[i] + n : bounds[i]));
    };
    const int64_t from = bound(0, step < 0 ? n - 1 : 0), to = bound(1, step < 0 ? -1 : n);
    List list;
    Text text;
    for (int64_t i = from; step < 0 ? i > to : i < to; i += step) {
      if (of.kind == Value::list) list.push_back((*of.elements)[size_t(i)]);
      else text += (*of.chars)[size_t(i)];
      if (step > n || step < -n) break;
    }
    return of.kind == Value::list ? list_of(node.line, std::move(list), of.n) : made(node.line, std::move(text));
  }

  // ---- expressions

  Value evaluate(const Node& node) {
    const Deeper deeper(*this, node.line);
    switch (node.kind) {
      case Node::constant: return node.value;
      case Node::name: return name(node);
      case Node::make_list: {
        List list;
        for (const NodePtr& part : node.parts) list.push_back(evaluate(*part));
        return list_of(node.line, std::move(list), node.word.empty() ? Value::plain : Value::tuple);
      }
      case Node::make_dict: {
        Dict dict;
        for (size_t i = 0; i < node.parts.size(); i += 2) {
          const Value key = evaluate(*node.parts[i]);
          if (key.kind != Value::text) wrong(node.line, "a dict with the key", key);
          spend(node.line, int64_t(dict.size()));
          put(dict, *key.chars, evaluate(*node.parts[i + 1]));
        }
        return dict_of(node.line, std::move(dict));
      }
      case Node::attribute:
      case Node::item: {
        const bool by_name = node.kind == Node::attribute;
        if (is_loop(*node.parts[0])) {
          return loop_attribute(node.line, by_name ? node.word : narrow(text_of(node.line, evaluate(*node.parts[1]))), nullptr);
        }
        const Value of = evaluate(*node.parts[0]);
        return by_name ? attribute(node.line, of, node.word) : item(node.line, of, evaluate(*node.parts[1]));
      }
      case Node::slice: return slice(node);
      case Node::call: return call(node);
      case Node::filter: return filter(node.line, node.word, evaluate(*node.parts[0]), arguments(node));
      case Node::test: return Value::of(test(node.line, node.word, evaluate(*node.parts[0]), arguments(node)));
      case Node::negative: return arithmetic(node.line, node.word, Value::of(Value::integer, 0), evaluate(*node.parts[0]));
      case Node::inverse: return Value::of(!truth(evaluate(*node.parts[0])));
      case Node::compare: {
        Value left = evaluate(*node.parts[0]);
        for (size_t i = 0; i < node.words.size(); ++i) {
          const Value right = evaluate(*node.parts[i + 1]);
          if (!compare(node.line, node.words[i], left, right)) return Value::of(false);
          left = right;
        }
        return Value::of(true);
      }
      case Node::binary: {
        const Value left = evaluate(*node.parts[0]);
        if (node.word == "or" || node.word == "and") return truth(left) == (node.word == "or") ? left : evaluate(*node.parts[1]);
        const Value right = evaluate(*node.parts[1]);
        if (node.word == "~") return made(node.line, text_of(node.line, left) + text_of(node.line, right));
        return arithmetic(node.line, node.word, left, right);
      }
      case Node::choose:
        if (truth(evaluate(*node.parts[0]))) return evaluate(*node.parts[1]);
        return node.parts[2] != nullptr ? evaluate(*node.parts[2]) : nothing("the other case");
      default: fail(node.line, "a statement where an expression should be");
    }
  }
  bool is_loop(const Node& node) const { return node.kind == Node::name && node.word == "loop" && lookup("loop") == nullptr; }
  Value name(const Node& node) {
    if (const Value* const found = lookup(node.word)) return *found;
    if (is_loop(node)) fail(node.line, "'loop' without an attribute is not supported");
    for (const char* known : {"range", "namespace", "raise_exception", "strftime_now"}) {
      if (node.word == known) return Value::of(wide(node.word), Value::function);
    }
    for (const char* known : {"cycler", "dict", "joiner", "lipsum", "self", "caller", "varargs", "kwargs"}) {
      if (node.word == known) fail(node.line, "'" + node.word + "' is not supported");
    }
    return nothing(node.word);
  }
  bool compare(int line, const std::string& sign, const Value& a, const Value& b) {
    if (sign == "in" || sign == "not in") return contains(line, b, a) == (sign == "in");
    for (const Value* v : {&a, &b}) {
      if (v->kind == Value::list && v->n >= Value::view) wrong(line, "'" + sign + "'", *v);
    }
    if (sign == "==" || sign == "!=") return equal(line, a, b) == (sign == "==");
    const bool texts = a.kind == Value::text && b.kind == Value::text;
    if (!texts && !(is_number(a) && is_number(b))) wrong(line, "'" + sign + "'", is_number(a) ? b : a);
    const auto plain = [](Text t) {
      for (char32_t& c : t) c &= kCharacter;
      return t;
    };
    const int order = texts ? plain(*a.chars).compare(plain(*b.chars)) : a.n < b.n ? -1 : a.n > b.n;
    return sign == "<" ? order < 0 : sign == "<=" ? order <= 0 : sign == ">" ? order > 0 : order >= 0;
  }
  Value arithmetic(int line, const std::string& sign, const Value& a, const Value& b) {
    if (is_number(a) && is_number(b)) {
      int64_t n = 0;
      const bool divides = sign == "//" || sign == "%";
      if (divides && b.n == 0) fail(line, "a division by zero");
      if (divides && b.n == -1) return sign == "%" ? Value::of(Value::integer, 0) : arithmetic(line, "-", Value::of(Value::integer, 0), a);
      if (divides) {
        const int64_t rest = a.n % b.n, low = rest != 0 && (rest < 0) != (b.n < 0) ? 1 : 0;  // as Python, towards minus infinity
        return Value::of(Value::integer, sign == "%" ? rest + low * b.n : a.n / b.n - low);
      }
      const bool over = sign == "+" ? __builtin_add_overflow(a.n, b.n, &n) : sign == "-" ? __builtin_sub_overflow(a.n, b.n, &n) : sign == "*" ? __builtin_mul_overflow(a.n, b.n, &n) : true;
      if (over) fail(line, "'" + sign + "' of these numbers is not supported");
      return Value::of(Value::integer, n);
    }
    if (sign == "+" && a.kind == Value::text && b.kind == Value::text) return made(line, *a.chars + *b.chars);
    if (sign == "+" && a.kind == Value::list && b.kind == Value::list && a.n == b.n && a.n <= Value::tuple) {
      List all = *a.elements;
      all.insert(all.end(), b.elements->begin(), b.elements->end());
      return list_of(line, std::move(all), a.n);
    }
    wrong(line, "'" + sign + "'", is_number(a) || (a.kind == Value::text && b.kind != Value::text) ? b : a);
  }

  // ---- calls

  Arguments arguments(const Node& node) {
    Arguments out;
    for (size_t i = 1; i < node.parts.size(); ++i) out.values.push_back(evaluate(*node.parts[i]));
    out.names = node.words;
    return out;
  }
  // The arguments in the order of their names; those that are not given are undefined, and say so.
  std::vector<Value> bind(int line, const std::string& what, const Arguments& given, const std::vector<std::string>& names, size_t least = 0) {
    std::vector<Value> out(names.size(), Value::of(Value::undefined, kNotGiven));
    for (size_t i = 0; i < given.values.size(); ++i) {
      const size_t at = given.names[i].empty() ? i : size_t(std::find(names.begin(), names.end(), given.names[i]) - names.begin());
      if (at >= names.size() || !is_missing(out[at])) fail(line, "'" + shown(what) + "' with " + (given.names[i].empty() ? "so many arguments" : "the argument '" + shown(given.names[i]) + "'") + " is not supported");
      out[at] = given.values[i];
    }
    for (size_t i = 0; i < least; ++i) {
      if (is_missing(out[i])) fail(line, "'" + shown(what) + "' without the argument '" + names[i] + "'");
    }
    return out;
  }

  Value call(const Node& node) {
    const Node& callee = *node.parts[0];
    if (callee.kind == Node::attribute) {
      if (is_loop(*callee.parts[0])) {
        const Arguments given = arguments(node);
        return loop_attribute(node.line, callee.word, &given);
      }
      const Value of = evaluate(*callee.parts[0]);
      if (of.kind == Value::text) return text_method(node.line, callee.word, of, arguments(node));
      if (of.kind == Value::dict) return dict_method(node.line, callee.word, of, arguments(node));
      wrong(node.line, "the method '" + shown(callee.word) + "'", of);
    }
    const Value of = evaluate(callee);
    if (of.kind == Value::macro) return call_macro(node.line, *of.body, arguments(node));
    if (of.kind != Value::function) wrong(node.line, "a call", of);
    return function(node.line, narrow(*of.chars), arguments(node));
  }
  Value call_macro(int line, const Node& macro, const Arguments& given) {
    const std::vector<Value> values = bind(line, macro.word, given, macro.words);
    const size_t base = base_;
    base_ = scopes_.size();
    scopes_.push_back({});
    for (const Value& value : values) check_kept(line, value);
    for (size_t i = 0; i < values.size(); ++i) {
      const NodePtr& otherwise = macro.parts[i + 1];
      set(macro.words[i], !is_missing(values[i]) ? values[i] : otherwise != nullptr ? evaluate(*otherwise) : nothing(macro.words[i]));
    }
    Text text;
    run(*macro.parts[0], text);
    scopes_.pop_back();
    base_ = base;
    return Value::of(std::move(text));
  }
  Value function(int line, const std::string& name, const Arguments& given) {
    if (name == "namespace") {
      Dict dict;
      for (size_t i = 0; i < given.values.size(); ++i) {
        if (!given.names[i].empty()) put(dict, wide(given.names[i]), given.values[i]);
        else if (given.values[i].kind == Value::dict && i == 0) dict = *given.values[i].entries;
        else fail(line, "a namespace of " + std::string(name_of(given.values[i])) + " is not supported");
      }
      dict_of(line, dict);  // for its checks
      spaces_.push_back(std::move(dict));
      Value out = Value::of(Value::space);
      out.attributes = &spaces_.back();
      return out;
    }
    if (name == "range") {
      const auto values = bind(line, name, given, {"start", "stop", "step"}, 1);
      for (size_t i = 0; i < given.values.size(); ++i) if (!is_number(values[i])) wrong(line, "a range", values[i]);
      const bool one = given.values.size() == 1;
      const int64_t from = one ? 0 : values[0].n, to = one ? values[0].n : values[1].n, step = given.values.size() < 3 ? 1 : values[2].n;
      if (step == 0) fail(line, "a range of step 0");
      List list;
      for (int64_t i = from; step > 0 ? i < to : i > to;) {
        if (int64_t(list.size()) >= kLongestRange) fail(line, "a range of more than " + std::to_string(kLongestRange) + " numbers");
        list.push_back(Value::of(Value::integer, i));
        if (__builtin_add_overflow(i, step, &i)) break;
      }
      return list_of(line, std::move(list), Value::range);
    }
    if (name == "raise_exception") {
      throw Error("the chat template refuses this conversation: " + shown(narrow(text_of(line, bind(line, name, given, {"message"}, 1)[0])), 300));
    }
    const std::string format = narrow(text_of(line, bind(line, name, given, {"format"}, 1)[0]));
    std::tm local{};
    localtime_r(&time_, &local);
    char text[256];
    const size_t n = std::strftime(text, sizeof(text), format.c_str(), &local);
    if (n == 0 && !format.empty()) fail(line, "this format of a time is not supported");
    return made(line, wide(std::string_view(text, n)));
  }

  // To upper or lower case: `upper` says of each character what it becomes. Beyond ASCII that is a science of its own.
  template <class F>
  Value cased(int line, const Text& text, const F& upper) {
    Text out = text;
    for (size_t i = 0; i < out.size(); ++i) {
      if ((out[i] & kCharacter) >= 128) fail(line, "upper and lower case of '" + narrow(Text(1, out[i])) + "' are not supported");
      if (is_letter(out[i])) out[i] = upper(i) ? out[i] & ~char32_t(32) : out[i] | 32;
    }
    return made(line, std::move(out));
  }
  Value joined(int line, const List& list, const Text& between) {
    Text out;
    for (size_t i = 0; i < list.size(); ++i) append(line, out, (i > 0 ? between : Text()) + text_of(line, list[i]));
    return Value::of(std::move(out));
  }

  Value text_method(int line, const std::string& name, const Value& of, const Arguments& given) {
    const Text& text = *of.chars;
    spend(line, int64_t(text.size()));
    if (name == "strip" || name == "lstrip" || name == "rstrip") {
      const Value chars = bind(line, name, given, {"chars"})[0];
      if (!is_missing(chars) && chars.kind != Value::none && chars.kind != Value::text) wrong(line, "'" + name + "' by the value", chars);
      if (chars.kind == Value::text) spend_search(line, text, *chars.chars);
      return made(line, stripped(text, chars.kind == Value::text ? chars.chars.get() : nullptr, name != "rstrip", name != "lstrip"));
    }
    if (name == "startswith" || name == "endswith") {
      const Value what = bind(line, name, given, {"what"}, 1)[0];
      if (what.kind != Value::text && !(what.kind == Value::list && what.n == Value::tuple)) wrong(line, "'" + name + "'", what);
      const List any = what.kind == Value::text ? List{what} : *what.elements;
      return Value::of(std::any_of(any.begin(), any.end(), [&](const Value& v) {
        if (v.kind != Value::text) wrong(line, "'" + name + "'", v);
        return v.chars->size() <= text.size() && is_at(text, name == "startswith" ? 0 : text.size() - v.chars->size(), *v.chars);
      }));
    }
    if (name == "split") {
      const auto a = bind(line, name, given, {"sep", "maxsplit"});
      const Text by = a[0].kind > Value::none ? text_of(line, a[0]) : Text();
      const bool spaces = a[0].kind <= Value::none;
      spend_search(line, text, by);
      if (!spaces && (a[0].kind != Value::text || by.empty())) fail(line, "'split' by nothing");
      List out;
      size_t at = 0;
      for (int64_t left = is_number(a[1]) ? a[1].n : -1;; --left) {
        while (spaces && at < text.size() && is_space(text[at])) ++at;
        if (spaces && at == text.size()) break;
        size_t end = left == 0 ? text.size() : spaces ? size_t(std::find_if(text.begin() + int64_t(at), text.end(), is_space) - text.begin()) : std::min(text.size(), find(text, by, at));
        const bool last = end == text.size() && (spaces || left == 0 || !is_at(text, end, by));
        out.push_back(made(line, text.substr(at, end - at)));
        if (last) break;
        at = end + (spaces ? 0 : by.size());
      }
      return list_of(line, std::move(out));
    }
    if (name == "join") return joined(line, elements(line, bind(line, name, given, {"list"}, 1)[0]), text);
    if (name == "replace") {
      const auto a = bind(line, name, given, {"old", "new", "count"}, 2);
      const Text from = text_of(line, a[0]), to = text_of(line, a[1]);
      spend_search(line, text, from);
      if (from.empty()) fail(line, "'replace' of an empty text is not supported");
      Text out;
      size_t done = 0;
      for (int64_t left = is_number(a[2]) ? a[2].n : -1; left != 0; --left) {
        const size_t at = find(text, from, done);
        if (at == Text::npos) break;
        append(line, out, text.substr(done, at - done) + to);
        done = at + from.size();
      }
      return made(line, out + text.substr(done));
    }
    bind(line, name, given, {});
    if (name == "upper" || name == "lower") return cased(line, text, [&](size_t) { return name == "upper"; });
    if (name == "capitalize") return cased(line, text, [](size_t i) { return i == 0; });
    if (name == "title") return cased(line, text, [&](size_t i) { return i == 0 || !is_letter(text[i - 1]); });
    fail(line, "the method '" + shown(name) + "' of a text is not supported");
  }
  Value dict_method(int line, const std::string& name, const Value& of, const Arguments& given) {
    if (name == "get") {
      const auto a = bind(line, name, given, {"key", "default"}, 1);
      const Value* const found = a[0].kind == Value::text ? get(*of.entries, *a[0].chars) : nullptr;
      return found != nullptr ? *found : given.values.size() > 1 ? a[1] : Value::of(Value::none);
    }
    bind(line, name, given, {});
    List list;
    for (const auto& item : *of.entries) {
      const Value key = Value::of(item.first);
      if (name == "keys") list.push_back(key);
      else if (name == "values") list.push_back(item.second);
      else if (name == "items") list.push_back(list_of(line, {key, item.second}, Value::tuple));
      else break;
    }
    if (list.size() != of.entries->size() || !is_dict_method(name)) fail(line, "the method '" + shown(name) + "' of a dict is not supported");
    return list_of(line, std::move(list), Value::view);
  }

  // As json.dumps without escapes of what is not ASCII; indent < 0: in one line.
  void write_json(int line, Text& out, const Value& v, int64_t indent, int64_t depth) {
    spend(line, 1);
    const auto new_line = [&](int64_t d) {
      if (indent >= 0) append(line, out, U"\n" + Text(size_t(indent * d), U' '));
    };
    if ((v.kind == Value::list && v.n <= Value::tuple) || v.kind == Value::dict) {
      const bool list = v.kind == Value::list;
      const size_t n = size_t(length(line, v));
      out += list ? U'[' : U'{';
      for (size_t i = 0; i < n; ++i) {
        if (i > 0) append(line, out, indent >= 0 ? U"," : U", ");
        new_line(depth + 1);
        if (!list) write_json(line, out, Value::of((*v.entries)[i].first), indent, depth), append(line, out, U": ");
        write_json(line, out, list ? (*v.elements)[i] : (*v.entries)[i].second, indent, depth + 1);
      }
      if (n > 0) new_line(depth);
      out += list ? U']' : U'}';
    } else if (v.kind == Value::text) {
      out += U'"';
      for (const char32_t c : *v.chars) {
        const char32_t plain = c & kCharacter, origin = c & ~kCharacter;
        const char *const escaped = "\"\\\n\r\t\f\b", *const letters = "\"\\nrtfb";
        const char* const at = plain != 0 && plain < 128 ? std::strchr(escaped, int(plain)) : nullptr;
        std::string text;
        if (at != nullptr) text = std::string("\\") + letters[at - escaped];
        else if (plain < 32) text = std::string("\\u00") + "01"[plain / 16] + "0123456789abcdef"[plain % 16];
        append(line, out, text.empty() ? Text(1, c) : wide(text, origin));
      }
      out += U'"';
    } else if (v.kind == Value::none || is_number(v)) {
      append(line, out, v.kind == Value::none ? U"null" : v.kind == Value::boolean ? (v.n != 0 ? U"true" : U"false") : text_of(line, v));
    } else {
      wrong(line, "JSON", v);
    }
  }

  Value path(int line, Value v, const std::string& names) {
    for (size_t at = 0; at <= names.size();) {
      const size_t end = std::min(names.size(), names.find('.', at));
      const std::string part = names.substr(at, end - at);
      const bool digits = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
      v = item(line, v, digits ? Value::of(Value::integer, std::stoll(part)) : Value::of(wide(part)));
      at = end + 1;
    }
    return v;
  }

  Value filter(int line, const std::string& name, const Value& of, Arguments given) {
    spend(line, of.kind == Value::text ? int64_t(of.chars->size()) : 0);
    const bool of_text = name == "trim" || name == "replace" || name == "upper" || name == "lower" || name == "capitalize";
    if (of_text) return text_method(line, name == "trim" ? "strip" : name, Value::of(text_of(line, of)), given);
    if (name == "tojson") {
      const auto a = bind(line, name, given, {"ensure_ascii", "indent"});
      const Value& indent = a[1];
      if (truth(a[0])) fail(line, "'tojson' in ASCII is not supported");
      if (indent.kind > Value::none && (indent.kind != Value::integer || indent.n < 0 || indent.n > 64)) wrong(line, "an indent", indent);
      Text out;
      write_json(line, out, of, indent.kind == Value::integer ? indent.n : -1, 0);
      return Value::of(std::move(out));
    }
    if (name == "length" || name == "count") return bind(line, name, given, {}), Value::of(Value::integer, length(line, of));
    if (name == "default" || name == "d") {
      const auto a = bind(line, name, given, {"default_value", "boolean"});
      if (of.kind != Value::undefined && !(truth(a[1]) && !truth(of))) return of;
      return given.values.empty() ? Value::of(Text()) : a[0];
    }
    if (name == "join") {
      const auto a = bind(line, name, given, {"d", "attribute"});
      List list = elements(line, of);
      if (a[1].kind == Value::text) for (Value& v : list) v = path(line, v, narrow(*a[1].chars));
      return joined(line, list, text_of(line, a[0]));
    }
    if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
      const bool by_attribute = name.size() > 6, wanted = name[0] == 's';
      const size_t used = by_attribute ? 2 : 1;
      for (size_t i = 0; i < std::min(used, given.values.size()); ++i) {
        if (given.values[i].kind != Value::text || !given.names[i].empty()) fail(line, "'" + name + "' of this form is not supported");
      }
      if (by_attribute && given.values.empty()) fail(line, "'" + name + "' without an attribute");
      const std::string attribute = by_attribute ? narrow(*given.values[0].chars) : "", how = given.values.size() >= used ? narrow(*given.values[used - 1].chars) : "";
      Arguments rest;
      for (size_t i = used; i < given.values.size(); ++i) rest.values.push_back(given.values[i]), rest.names.push_back(given.names[i]);
      List out;
      for (const Value& v : elements(line, of)) {
        const Value seen = by_attribute ? path(line, v, attribute) : v;
        if ((how.empty() ? truth(seen) : test(line, how, seen, rest)) == wanted) out.push_back(v);
      }
      return list_of(line, std::move(out), Value::stream);
    }
    if (name == "map") {
      if (given.values.empty() || given.values[0].kind != Value::text) fail(line, "'map' of this form is not supported");
      const std::string first = narrow(*given.values[0].chars);
      const bool by_attribute = given.names[0] == "attribute";
      const Value otherwise = by_attribute ? bind(line, name, given, {"attribute", "default"})[1] : Value();
      if (!by_attribute) given.values.erase(given.values.begin()), given.names.erase(given.names.begin());
      List out;
      for (const Value& v : elements(line, of)) {
        out.push_back(by_attribute ? path(line, v, first) : filter(line, first, v, given));
        if (out.back().kind == Value::undefined && by_attribute) out.back() = otherwise;
      }
      return list_of(line, std::move(out), Value::stream);
    }
    bind(line, name, given, {});
    if (name == "string") return of.kind == Value::text ? of : made(line, text_of(line, of));
    if (name == "list") return list_of(line, elements(line, of));
    if (name == "first" || name == "last") {
      if (name == "last") length(line, of);  // a stream has no end
      const List list = elements(line, of);
      return list.empty() ? nothing("the " + name + " of nothing") : name == "first" ? list.front() : list.back();
    }
    if (name == "reverse") {
      List list = elements(line, of);
      std::reverse(list.begin(), list.end());
      return of.kind == Value::text ? joined(line, list, {}) : list_of(line, std::move(list), Value::stream);
    }
    if (name == "items") {
      if (of.kind != Value::dict && of.kind != Value::undefined) wrong(line, "'items'", of);
      return list_of(line, of.kind == Value::dict ? *dict_method(line, name, of, given).elements : List(), Value::stream);
    }
    if (name == "title") {
      const Text text = text_of(line, of);
      return cased(line, text, [&](size_t i) { return i == 0 || is_space(text[i - 1]) || find(U"-({[<", Text(1, text[i - 1])) != Text::npos; });
    }
    fail(line, "the filter '" + shown(name) + "' is not supported");
  }

  bool test(int line, const std::string& name, const Value& of, const Arguments& given) {
    const std::pair<const char*, const char*> comparisons[] = {{"eq", "=="}, {"equalto", "=="}, {"==", "=="}, {"ne", "!="}, {"!=", "!="}, {"lt", "<"}, {"lessthan", "<"}, {"<", "<"}, {"le", "<="},
                                                               {"<=", "<="}, {"gt", ">"}, {"greaterthan", ">"}, {">", ">"}, {"ge", ">="}, {">=", ">="}, {"in", "in"}};
    for (const auto& comparison : comparisons) {
      if (name == comparison.first) return compare(line, comparison.second, of, bind(line, name, given, {"other"}, 1)[0]);
    }
    if (name == "divisibleby") return arithmetic(line, "%", of, bind(line, name, given, {"num"}, 1)[0]).n == 0;
    bind(line, name, given, {});
    if (name == "defined" || name == "undefined") return (of.kind == Value::undefined) == (name[0] == 'u');
    if (name == "none") return of.kind == Value::none;
    if (name == "string") return of.kind == Value::text;
    if (name == "mapping") return of.kind == Value::dict;
    const bool loops = of.kind == Value::text || of.kind == Value::list || of.kind == Value::dict || of.kind == Value::undefined;
    if (name == "sequence" || name == "iterable") return loops && !(name == "sequence" && of.kind == Value::list && of.n >= Value::view);
    if (name == "number") return is_number(of);
    if (name == "integer") return of.kind == Value::integer;
    if (name == "float") return false;
    if (name == "boolean") return of.kind == Value::boolean;
    if (name == "true" || name == "false") return of.kind == Value::boolean && (of.n != 0) == (name[0] == 't');
    if (name == "odd" || name == "even") return arithmetic(line, "%", of, Value::of(Value::integer, 2)).n == (name == "odd");
    fail(line, "the test '" + shown(name) + "' is not supported");
  }

  std::vector<Scope> scopes_;
  size_t base_ = 0;  // of the macro that is running; it sees the outermost scope besides
  std::deque<Dict> spaces_;
  std::time_t time_;
  int64_t work_ = 0;
  int depth_ = 0;
};

}  // namespace

Template::Template(std::string_view source) : root_(Parser(Lexer(wide(source)).tokens()).all()) {}

Rendered Template::render(const std::vector<Message>& messages, const Json& variables, std::time_t now) const {
  Run run(now);
  List list;
  for (const Message& message : messages) {
    const bool is_name = std::all_of(message.role.begin(), message.role.end(), [](char c) { return is_letter(static_cast<unsigned char>(c)) || c == '_'; });
    if (!is_name) throw Error("a message of the role " + shown(message.role));  // templates make control tokens of roles
    const char32_t origin = message.role == "assistant" ? kByModel : kByOthers;
    list.push_back(run.dict_of(0, {{U"role", Value::of(wide(message.role))}, {U"content", Value::of(wide(message.content, origin))}}));
  }
  run.set("messages", run.list_of(0, std::move(list)));
  for (const auto& item : variables.items()) run.set(item.key(), run.value_of(item.value()));
  Text text;
  run.run(*root_, text);

  Rendered out;
  char32_t last = 0;
  for (const char32_t c : text) {
    const char32_t origin = c & ~kCharacter;
    if (origin != last && origin != 0) out.plain.push_back({out.text.size(), 0, origin == kByModel});
    append_utf8(out.text, c & kCharacter);
    if (origin != 0) out.plain.back().end = out.text.size();
    last = origin;
  }
  return out;
}

}  // namespace llm
