// A chat template's text as a tree.
#include <initializer_list>

#include "template_node.h"

namespace llm {
namespace jinja {
namespace {

struct Token {
  enum Kind { data, print_begin, print_end, block_begin, block_end, word, string, integer, sign, end } kind;
  int line;
  Text text;
  std::string word_;
};

// Whitespace around tags is as in Jinja: '-' takes all of it, '+' none; otherwise a block takes the spaces before it,
// if nothing else is in its line, and the newline behind it.
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
      while (begin < source_.size() &&
             !(source_[begin] == '{' && (is(begin + 1, "{") || is(begin + 1, "%") || is(begin + 1, "#"))))
        ++begin;
      const char32_t kind = begin + 1 < source_.size() ? source_[begin + 1] : 0,
                     sign = begin + 2 < source_.size() ? source_[begin + 2] : 0;
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
  // Goes on behind a tag that ends at `end`; sign: '-' takes all whitespace that follows, none a newline, if it is a
  // block.
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
        if (digits && (word.size() > 18 || (word.size() > 1 && c == '0') ||
                       word.find_first_not_of("0123456789") != std::string::npos))
          fail(line_, "this form of number is not supported");
        if (digits && is(to, ".") && to + 1 < source_.size() && source_[to + 1] - '0' < 10)
          fail(line_, "numbers with fractions are not supported");
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
        const char32_t d = ++at < source_.size() ? source_[at] : 0, value = d - '0' < 10         ? d - '0'
                                                                            : (d | 32) - 'a' < 6 ? (d | 32) - 'a' + 10
                                                                                                 : 1 << 20;
        code = std::min<char32_t>(code * 16 + value, 1 << 20);
      }
      if ((next != 'x' && next != 'u') || code >= 1 << 20 || (code >= 0xd800 && code < 0xe000))
        fail(line_, "this escape in a string is not supported");
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
  std::shared_ptr<Node> node(Node::Kind kind, std::vector<NodePtr> parts, const std::string& word = "") {
    return node(kind, now().line, word, std::move(parts));
  }
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
        if (std::any_of(ends.begin(), ends.end(), [&](const char* end) { return is_word(end); }))
          return node(Node::body, line, "", std::move(parts));
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

  NodePtr loop(int line) {
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
    return made;
  }
  NodePtr assignment(int line) {
    std::vector<std::string> names{expect_word()};
    std::string of;
    if (skip_sign(".")) of = names[0], names[0] = expect_word();
    while (of.empty() && skip_sign(",")) names.push_back(expect_word());
    if (!skip_sign("=") && (!of.empty() || names.size() > 1 || now().kind != Token::block_end))
      fail(line, "this form of 'set' is not supported");
    const bool captures = now().kind == Token::block_end;
    auto made = captures ? node(Node::capture, line, "", {ended("endset")}) : node(Node::assign, line, of, {tuple()});
    made->words = names;
    return made;
  }
  NodePtr macro(int line) {
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
    return made;
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
      out = loop(line);
    } else if (word == "set") {
      out = assignment(line);
    } else if (word == "macro") {
      out = macro(line);
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
    static const std::vector<std::string> levels[] = {{"or"}, {"and"}, {"+", "-"}, {"~"}, {"*", "//", "/", "%"},
                                                      {"**"}};
    const auto side = [&] {
      return level + 1 == std::size(levels) ? unary(true) : level == 1 ? inverse() : operators(level + 1);
    };
    NodePtr left = side();
    for (;;) {
      const bool given = now().kind == (level < 2 ? Token::word : Token::sign) &&
                         std::count(levels[level].begin(), levels[level].end(), now().word_) > 0;
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
      const bool compares = now().kind == Token::sign && (sign == "==" || sign == "!=" || sign == "<" || sign == "<=" ||
                                                          sign == ">" || sign == ">=");
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
    const bool word = now().kind == Token::word && !is_word("else") && !is_word("or") && !is_word("and") &&
                      !is_word("if") && !is_word("is") && !is_word("in") && !is_word("not");
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
      const bool named =
          now().kind == Token::word && tokens_[at_ + 1].kind == Token::sign && tokens_[at_ + 1].word_ == "=";
      if (!named && !names.empty() && !names.back().empty())
        fail(now().line, "an argument without a name behind one with a name");
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
        out = colons == 0 ? node(Node::item, {out, bounds[0]})
                          : node(Node::slice, {out, bounds[0], bounds[1], bounds[2]});
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
      if (word == "true" || word == "True" || word == "false" || word == "False")
        return constant(Value::of((word[0] | 32) == 't'));
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

}  // namespace

NodePtr parsed(std::string_view source) { return Parser(Lexer(wide(source)).tokens()).all(); }

}  // namespace jinja
}  // namespace llm
