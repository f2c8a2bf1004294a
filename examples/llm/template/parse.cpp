// Parses the tokens of a chat template to a tree.
#include "template/node.h"

namespace llm::jinja {
namespace {

using Words = std::vector<std::string>;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  // Parses up to a block that begins with one of these words, which is then the next token.
  NodePtr body(const Words& ends) {
    const Deeper deeper(*this);
    std::vector<NodePtr> parts;
    const int line = now().line;
    while (now().kind != Token::end) {
      const Token& token = next();
      if (token.kind == Token::data) {
        parts.push_back(node(Node::print, token.line, {constant(Value::of(wide(token.text)))}));
      } else if (token.kind == Token::print_begin) {
        parts.push_back(node(Node::print, token.line, {tuple()}));
        expect(Token::print_end);
      } else if (is_any(ends)) {
        return node(Node::body, line, std::move(parts));
      } else {
        parts.push_back(statement());
      }
    }
    if (!ends.empty()) fail(line, "'" + ends.back() + "' is missing");
    return node(Node::body, line, std::move(parts));
  }

 private:
  const Token& now() const { return tokens_[at_]; }
  const Token& next() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  // Whether the next token, or the one `ahead` after it, is this word or sign.
  bool is(const std::string& text, size_t ahead = 0) const {
    const Token& token = tokens_[std::min(at_ + ahead, tokens_.size() - 1)];
    return (token.kind == Token::word || token.kind == Token::sign) && token.text == text;
  }
  bool is_any(const Words& texts) const {
    return std::any_of(texts.begin(), texts.end(), [&](const std::string& text) { return is(text); });
  }
  bool skip(const std::string& text) { return is(text) && (next(), true); }
  void expect(const std::string& text) {
    if (!skip(text)) fail(now().line, "'" + text + "' is missing");
  }
  void expect(Token::Kind kind) {
    if (next().kind != kind) fail(tokens_[at_ - 1].line, "unexpected end or content of a tag");
  }
  std::string expect_word() {
    if (now().kind != Token::word) fail(now().line, "a name is missing");
    return next().text;
  }

  NodePtr node(Node::Kind kind, int line, std::vector<NodePtr> parts, const std::string& word = "", Words words = {},
               Value value = {}) {
    int depth = 1;
    for (const NodePtr& part : parts) depth = std::max(depth, part == nullptr ? 1 : part->depth + 1);
    if (depth > kNesting) fail(line, "nested too deep");
    return std::make_shared<const Node>(
        Node{kind, line, std::move(parts), word, std::move(words), std::move(value), depth});
  }
  NodePtr node(Node::Kind kind, std::vector<NodePtr> parts, const std::string& word = "", Words words = {}) {
    return node(kind, now().line, std::move(parts), word, std::move(words));
  }
  NodePtr constant(Value value) { return node(Node::constant, now().line, {}, "", {}, std::move(value)); }
  struct Deeper {
    explicit Deeper(Parser& parser) : depth(parser.depth_) {
      if (++depth > kNesting) fail(parser.now().line, "nested too deep");
    }
    ~Deeper() { --depth; }
    int& depth;
  };

  // ---- statements

  // Parses what is between a block and the one that ends it.
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
    if (word == "if") out = branch(line);
    else if (word == "for") out = loop(line);
    else if (word == "set") out = assignment(line);
    else if (word == "macro") out = macro(line);
    else if (word == "generation") out = node(Node::generation, line, {ended("endgeneration")});
    else if (word == "break" || word == "continue") out = node(word == "break" ? Node::leave : Node::next, line, {});
    else fail(line, "'" + shown(word) + "' is not supported");
    expect(Token::block_end);
    return out;
  }
  // Conditions and bodies in turn; the last body may have no condition.
  NodePtr branch(int line) {
    std::vector<NodePtr> parts;
    std::string end;
    do {
      parts.push_back(operators(0));
      expect(Token::block_end);
      parts.push_back(body({"elif", "else", "endif"}));
      end = next().text;
    } while (end == "elif");
    if (end == "else") parts.push_back(ended("endif"));
    return node(Node::branch, line, std::move(parts));
  }
  NodePtr loop(int line) {
    Words names;
    const bool open = skip("(");
    do names.push_back(expect_word());
    while (skip(","));
    if (open) expect(")");
    if (!skip("in")) fail(line, "'for' without 'in'");
    NodePtr items = operators(0), condition, otherwise;
    if (skip("if")) condition = expression();
    if (is("recursive")) fail(line, "recursive loops are not supported");
    expect(Token::block_end);
    NodePtr inside = body({"else", "endfor"});
    if (next().text == "else") otherwise = ended("endfor");
    return node(Node::repeat, line, {items, condition, inside, otherwise}, "", names);
  }
  NodePtr assignment(int line) {
    Words names{expect_word()};
    std::string of;
    if (skip(".")) of = names[0], names[0] = expect_word();
    while (of.empty() && skip(",")) names.push_back(expect_word());
    if (skip("=")) return node(Node::assign, line, {tuple()}, of, names);
    if (!of.empty() || names.size() > 1 || now().kind != Token::block_end)
      fail(line, "this form of 'set' is not supported");
    return node(Node::capture, line, {ended("endset")}, "", names);
  }
  NodePtr macro(int line) {
    const std::string name = expect_word();
    Words names;
    std::vector<NodePtr> parts{nullptr};
    expect("(");
    while (!skip(")")) {
      if (!names.empty()) expect(",");
      names.push_back(expect_word());
      parts.push_back(skip("=") ? expression() : nullptr);
    }
    parts[0] = ended("endmacro");
    return node(Node::define, line, std::move(parts), name, names);
  }

  // ---- expressions, from the weakest binding to the strongest

  NodePtr tuple() {
    NodePtr first = expression();
    if (!is(",")) return first;
    std::vector<NodePtr> parts{first};
    while (skip(",")) {
      if (now().kind == Token::block_end || now().kind == Token::print_end || is(")")) break;
      parts.push_back(expression());
    }
    return node(Node::make_list, std::move(parts), "tuple");
  }
  NodePtr expression() {
    const Deeper deeper(*this);
    NodePtr out = operators(0);
    while (skip("if")) {
      NodePtr condition = operators(0);
      out = node(Node::choose, {condition, out, skip("else") ? expression() : nullptr});
    }
    return out;
  }
  // Binary operators, the weakest first; `not` and comparisons are between `and` and sums.
  NodePtr operators(size_t level) {
    static const Words levels[] = {{"or"}, {"and"}, {"+", "-"}, {"~"}, {"*", "//", "/", "%"}, {"**"}};
    const auto side = [&] {
      return level + 1 == std::size(levels) ? unary(true) : level == 1 ? inverse() : operators(level + 1);
    };
    NodePtr left = side();
    while (is_any(levels[level])) {
      const std::string sign = next().text;
      left = node(Node::binary, {left, side()}, sign);
    }
    return left;
  }
  NodePtr inverse() {
    static const Words all{"==", "!=", "<", "<=", ">", ">=", "in"};
    const Deeper deeper(*this);
    if (skip("not")) return node(Node::inverse, {inverse()});
    std::vector<NodePtr> parts{operators(2)};
    Words signs;
    while (is_any(all) || (is("not") && is("in", 1))) {
      signs.push_back(next().text);
      if (signs.back() == "not") signs.back() += " " + next().text;
      parts.push_back(operators(2));
    }
    return signs.empty() ? parts[0] : node(Node::compare, std::move(parts), "", signs);
  }
  NodePtr unary(bool with_filter) {
    const Deeper deeper(*this);
    NodePtr out;
    if (is("-") || is("+")) {
      const std::string sign = next().text;
      out = node(Node::binary, {constant(Value::of(Value::integer)), unary(false)}, sign);
    } else {
      out = primary();
    }
    out = postfix(out);
    while (with_filter) {
      if (skip("|")) {
        const std::string name = dotted();
        out = with_arguments(Node::filter, out, name);
      } else if (skip("is")) out = test(out);
      else if (is("(")) out = with_arguments(Node::call, out);
      else break;
    }
    return out;
  }
  std::string dotted() {
    std::string name = expect_word();
    while (skip(".")) name += "." + expect_word();
    return name;
  }
  NodePtr test(const NodePtr& of) {
    const bool inverse = skip("not");
    const std::string name = dotted();
    // The argument of a test may have no brackets.
    const bool word = now().kind == Token::word && !is_any({"else", "or", "and", "if", "is", "in", "not"});
    const bool bare = word || now().kind == Token::string || now().kind == Token::integer || is("[") || is("{");
    NodePtr out = bare ? node(Node::test, {of, postfix(primary())}, name, {""}) : with_arguments(Node::test, of, name);
    if (is("is")) fail(now().line, "'is' after 'is' is not supported");
    return inverse ? node(Node::inverse, {out}) : out;
  }
  // A call, or a filter or test, which may have no brackets.
  NodePtr with_arguments(Node::Kind kind, const NodePtr& of, const std::string& word = "") {
    const int line = now().line;
    std::vector<NodePtr> parts{of};
    Words names;
    for (bool open = skip("("); open && !skip(")");) {
      if (!names.empty()) expect(",");
      if (skip(")")) break;
      const bool named = now().kind == Token::word && is("=", 1);
      if (!named && !names.empty() && !names.back().empty())
        fail(now().line, "a positional argument after a named one");
      names.push_back(named ? next().text : "");
      if (named) next();
      parts.push_back(expression());
    }
    return node(kind, line, std::move(parts), word, names);
  }
  NodePtr postfix(NodePtr out) {
    for (;;) {
      if (skip(".")) {
        out = node(Node::attribute, {out}, expect_word());
      } else if (is("(")) {
        out = with_arguments(Node::call, out);
      } else if (skip("[")) {
        NodePtr bounds[3];
        int colons = 0;
        while (!is("]")) {
          if (skip(":")) {
            if (++colons > 2) fail(now().line, "a slice with more than three parts");
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
    const bool list = is("[");
    if (skip("(")) {
      if (skip(")")) return node(Node::make_list, {}, "tuple");
      NodePtr out = tuple();
      expect(")");
      return out;
    }
    if (skip("[") || skip("{")) {
      const char* const end = list ? "]" : "}";
      std::vector<NodePtr> parts;
      while (!skip(end)) {
        if (!parts.empty()) expect(",");
        if (skip(end)) break;
        parts.push_back(expression());
        if (!list) expect(":"), parts.push_back(expression());
      }
      return node(list ? Node::make_list : Node::make_dict, std::move(parts));
    }
    if (is_any({"and", "else", "if", "in", "is", "not", "or"}))
      fail(now().line, "'" + now().text + "' is not expected");
    const Token& token = next();
    const std::string& word = token.text;
    if (token.kind == Token::string) {
      Text text = wide(word);
      while (now().kind == Token::string) text += wide(next().text);
      return constant(Value::of(text));
    }
    if (token.kind == Token::integer) return constant(Value::of(Value::integer, std::stoll(word)));
    if (token.kind != Token::word) fail(token.line, "an expression is missing");
    if (word == "true" || word == "True" || word == "false" || word == "False")
      return constant(Value::of((word[0] | 32) == 't'));
    if (word == "none" || word == "None") return constant(Value::of(Value::none));
    return node(Node::name, {}, word);
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

NodePtr parsed(std::string_view source) { return Parser(tokens_of(source)).body({}); }

}  // namespace llm::jinja
