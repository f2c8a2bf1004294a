// A chat template's tokens as a tree.
#include <initializer_list>

#include "template/tokens.h"

namespace llm {
namespace jinja {
namespace {

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

NodePtr parsed(std::string_view source) { return Parser(tokens_of(source)).all(); }

}  // namespace jinja
}  // namespace llm
