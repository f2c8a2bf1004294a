// Splits the text of a chat template into tokens.
#include "template/node.h"

namespace llm::jinja {
namespace {

// Whitespace around tags is removed as in Jinja: '-' removes all of it, '+' none; otherwise a block removes the spaces
// before it, if nothing else is on its line, and the newline after it.
class Lexer {
 public:
  explicit Lexer(const Text& source) {
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] != '\r') source_ += source[i];
      else if (!is_at(source, i + 1, U"\n")) source_ += U'\n';
    }
    if (!source_.empty() && source_.back() == '\n') source_.pop_back();
  }

  std::vector<Token> tokens() {
    while (at_ < source_.size()) {
      size_t begin = at_;
      while (begin < source_.size() && !is(begin, U"{{") && !is(begin, U"{%") && !is(begin, U"{#")) ++begin;
      const char32_t kind = now(begin + 1), sign = now(begin + 2);
      Text data = source_.substr(at_, begin - at_);
      if (kind != 0 && sign == '-') data = stripped(data, nullptr, false, true);
      else if (kind != 0 && kind != '{' && sign != '+') strip_line(data);
      if (!data.empty()) push(Token::data, begin, data);
      advance(begin);  // also if no data is left
      if (kind == 0) break;
      advance(begin + (sign == '-' || sign == '+' ? 3 : 2));
      if (kind == '#') comment();
      else tag(kind == '{');
    }
    push(Token::end, at_, {});
    return std::move(out_);
  }

 private:
  char32_t now(size_t at) const { return at < source_.size() ? source_[at] : 0; }
  bool is(size_t at, const Text& what) const { return is_at(source_, at, what); }
  void advance(size_t to) {
    line_ += int(std::count(source_.begin() + int64_t(at_), source_.begin() + int64_t(to), U'\n'));
    at_ = to;
  }
  void strip_line(Text& data) const {
    const size_t newline = data.rfind(U'\n'), begin = newline == Text::npos ? 0 : newline + 1;
    if (newline == Text::npos && at_ > 0 && source_[at_ - 1] != '\n') return;
    if (std::all_of(data.begin() + int64_t(begin), data.end(), is_space)) data.resize(begin);
  }
  // Continues after a tag that ends at `end`. sign: '-' removes all whitespace that follows; without a sign a block
  // removes a newline.
  void close(size_t end, char32_t sign, bool block) {
    if (block && sign == 0 && now(end) == '\n') ++end;
    while (sign == '-' && is_space(now(end))) ++end;
    advance(end);
  }
  void comment() {
    const size_t end = source_.find(U"#}", at_);
    if (end == Text::npos) fail(line_, "unterminated comment");
    const char32_t sign = end > at_ ? source_[end - 1] : 0;
    close(end + 2, sign == '-' || sign == '+' ? sign : 0, true);
  }
  void tag(bool print) {
    const Text end = print ? U"}}" : U"%}";
    const int first = line_;
    push(print ? Token::print_begin : Token::block_begin, at_, {});
    std::string open;  // the closing brackets that are still to come
    for (;;) {
      while (is_space(now(at_))) advance(at_ + 1);
      if (at_ >= source_.size()) fail(first, "unterminated tag");
      const char32_t c = source_[at_];
      const bool has_sign = (c == '-' || (c == '+' && !print)) && is(at_ + 1, end);
      if (open.empty() && (has_sign || is(at_, end))) {
        push(print ? Token::print_end : Token::block_end, at_, {});
        return close(at_ + (has_sign ? 3 : 2), has_sign ? c : 0, !print);
      }
      if (is_of_name(c)) word();
      else if (c == '"' || c == '\'') string();
      else sign(open);
    }
  }
  // A name or a number.
  void word() {
    size_t to = at_;
    while (is_of_name(now(to))) ++to;
    const Text word = source_.substr(at_, to - at_);
    const bool digits = word[0] - '0' < 10;
    if (digits && (word.size() > 18 || (word.size() > 1 && word[0] == '0') ||
                   word.find_first_not_of(U"0123456789") != Text::npos))
      fail(line_, "this number format is not supported");
    if (digits && now(to) == '.' && now(to + 1) - '0' < 10) fail(line_, "floating-point numbers are not supported");
    push(digits ? Token::integer : Token::word, to, word);
  }
  void sign(std::string& open) {
    const char32_t c = source_[at_];
    Text sign;
    for (const char32_t* two : {U"==", U"!=", U"<=", U">=", U"//", U"**"}) {
      if (is(at_, two)) sign = two;
    }
    if (sign.empty() && Text(U"+-*/%~<>=.,:|()[]{}").find(c) != Text::npos) sign = c;
    if (sign.empty()) fail(line_, "unexpected character '" + shown(narrow(Text(1, c))) + "'");
    if (c == '(' || c == '[' || c == '{') open.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != char(c)) fail(line_, std::string("'") + char(c) + "' closes nothing");
      open.pop_back();
    }
    push(Token::sign, at_ + sign.size(), sign);
  }
  void push(Token::Kind kind, size_t to, const Text& text) {
    out_.push_back({kind, line_, narrow(text)});
    advance(to);
  }
  void string() {
    const int first = line_;
    const char32_t quote = source_[at_];
    size_t at = at_ + 1;
    Text text;
    for (;; ++at) {
      if (at >= source_.size()) fail(first, "unterminated string");
      const char32_t c = source_[at];
      if (c == quote) break;
      if (c == '\\' && now(at + 1) != 0) escape(at, text);
      else text += c;
    }
    push(Token::string, at + 1, text);
  }
  // at: the index of the backslash; becomes that of the escape's last character.
  void escape(size_t& at, Text& text) const {
    const char32_t kind = source_[++at];
    const size_t known = Text(U"nrt\\'\"").find(kind);
    if (known != Text::npos) text += U"\n\r\t\\'\""[known];
    if (known != Text::npos || kind == '\n') return;
    constexpr char32_t kNone = 1 << 20;
    char32_t code = 0;
    for (int digits = kind == 'x' ? 2 : kind == 'u' ? 4 : 0; digits > 0; --digits) {
      const char32_t d = now(++at);
      const char32_t value = d - '0' < 10 ? d - '0' : (d | 32) - 'a' < 6 ? (d | 32) - 'a' + 10 : kNone;
      code = std::min<char32_t>(code * 16 + value, kNone);
    }
    if ((kind != 'x' && kind != 'u') || code >= kNone || (code >= 0xd800 && code < 0xe000))
      fail(line_, "this escape in a string is not supported");
    text += code;
  }

  Text source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> out_;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source) { return Lexer(wide(source)).tokens(); }

}  // namespace llm::jinja
