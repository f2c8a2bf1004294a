#include <utf8proc.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "tokenizer/parts.h"

namespace llm {

namespace {

constexpr const char* kGpt2Words = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr const char* kSpaces =
    "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
// As is_word() has them, but for joiners; outside of classes also the exponents and fractions of Latin-1.
constexpr const char* kWordCharacters =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}"
    "\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}";
constexpr const char* kWordNumbers = "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";

bool can_be_compiled(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF, &error, &at, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

// A pattern for PCRE2 that means what Oniguruma, which the files are written for, understands by this one, in the
// syntax of Ruby. What both read in other ways, and models do without, is refused by name.
class Translation {
 public:
  Translation(const std::string& pattern, const std::string& what) : pattern_(pattern), what_(what) {}

  std::string all() {
    while (at_ < pattern_.size()) {
      if (now() == '\\')
        escape();
      else if (in_class_)
        of_class();
      else if (now() == '[')
        open_class();
      else if (now() == '(')
        open_group();
      else if (now() == '{')
        repetition();
      else
        plain();
    }
    return "(*LF)" + out_;  // what . and $ take for the end of a line
  }

 private:
  char now(size_t ahead = 0) const { return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : 0; }
  void take(size_t n) { out_ += pattern_.substr(at_, n), at_ += n; }
  void put(const std::string& text, size_t n) { out_ += text, at_ += n; }
  bool stands(const char* text) const { return pattern_.compare(at_, std::strlen(text), text) == 0; }
  [[noreturn]] void refuse(const std::string& part, const char* where = "in a regular expression") const {
    throw Error(what_ + ": " + shown(valid_utf8(part)) + " " + where + " is not supported");
  }

  void plain() {
    const auto is_any = [](char c, const char* of) { return c != 0 && std::strchr(of, c) != nullptr; };
    const char c = now(), next = now(1);
    if (caseless_.back()) {  // one character may be several in the other case there: "ss" and U+DF
      const bool joined = (is_any(c, "fF") && is_any(next, "fFiIlL")) || (is_any(c, "sS") && is_any(next, "sStT"));
      if (static_cast<unsigned char>(c) >= 0x80 || (joined && !in_class_))
        refuse("(?i", "with what has several characters in another case, or is not ASCII,");
    }
    if (c == ')' && !in_class_ && caseless_.size() > 1) caseless_.pop_back();
    take(1);
  }
  void open_class() {
    in_class_ = true;
    take(now(1) == '^' ? 2 : 1);
    if (now() == ']') refuse("]", "at the beginning of a class of characters");
  }
  void of_class() {
    if (stands("[:")) refuse(pattern_.substr(at_, pattern_.find(']', at_) - at_) + "]");
    if (now() == '[') throw Error(what_ + ": a class of characters within another one is not supported");
    if (stands("&&")) refuse("&&", "in a class of characters");
    if (now() == ']')
      in_class_ = false, take(1);
    else
      plain();
  }
  void open_group() {
    bool caseless = caseless_.back();
    if (stands("(?i)") && at_ == 0) return caseless_[0] = true, take(4);
    if (stands("(?i:"))
      caseless = true, take(4);
    else if (stands("(?<=") || stands("(?<!"))
      take(4);
    else if (stands("(?:") || stands("(?=") || stands("(?!") || stands("(?>"))
      take(3);
    else if (now(1) == '?' || now(1) == '*')
      refuse(pattern_.substr(at_, 4));
    else
      take(1);
    caseless_.push_back(caseless);
  }
  // {2}+ is no possessive form there, {2}? may be nothing at all, and {,2} is {0,2}.
  void repetition() {
    const size_t end = pattern_.find_first_not_of("0123456789,", at_ + 1);
    if (end != std::string::npos && end > at_ + 1 && pattern_[end] == '}') {
      const std::string form = pattern_.substr(at_, end + 2 - at_);
      if (form[1] == ',' || form.back() == '+' || (form.back() == '?' && form.find(',') == std::string::npos))
        refuse(form);
    }
    take(1);
  }
  void escape() {
    const char c = now(1);
    if (c == 0) refuse("\\", "at the end of a regular expression");
    if (caseless_.back() && std::strchr("pPwWx", c) != nullptr) refuse(pattern_.substr(at_, 2), "behind (?i");
    if (in_class_ && (c == 'S' || c == 'W')) refuse(pattern_.substr(at_, 2), "in a class of characters");
    const std::string spaces = kSpaces, words = kWordCharacters;
    if (c == 's')
      put(in_class_ ? spaces : "[" + spaces + "]", 2);
    else if (c == 'w')
      put(in_class_ ? words : "[" + words + kWordNumbers + "]", 2);
    else if (c == 'S')
      put("[^" + spaces + "]", 2);
    else if (c == 'W')
      put("[^" + words + kWordNumbers + "]", 2);
    else if (c == 'p' || c == 'P')
      property();
    else if (c == 'x' && (now(2) == '{' ||
                          (now(2) >= '0' && now(2) <= '7' && std::isxdigit(static_cast<unsigned char>(now(3))) != 0)))
      take(3);
    else if (std::strchr("dDrntfae", c) != nullptr)
      take(2);
    else if (std::isalnum(static_cast<unsigned char>(c)) != 0)
      refuse(pattern_.substr(at_, 2));
    else
      at_ += 1, out_ += '\\', plain();
  }
  // A script's name means those that have the script, and for PCRE2 also those that are used with it.
  void property() {
    const size_t end = pattern_.find('}', at_);
    if (now(2) != '{' || end == std::string::npos) refuse(pattern_.substr(at_, 3));
    const std::string all = pattern_.substr(at_, end + 1 - at_), sign = now(3) == '^' ? "^" : "";
    const std::string script = all.substr(0, 3) + sign + "sc:" + all.substr(3 + sign.size());
    put(all.size() > 6 + sign.size() && can_be_compiled(script) ? script : all, all.size());
  }

  const std::string& pattern_;
  const std::string& what_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::vector<bool> caseless_{false};  // for each group that is open
  std::string out_;
};

}  // namespace

Tokenizer::Regex::Regex(const std::string& pattern, const std::string& what) {
  const std::string own = Translation(pattern, what).all();
  int error = 0;
  PCRE2_SIZE at = 0;
  code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(own.data()), own.size(),
                       PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
  if (code == nullptr) {
    PCRE2_UCHAR text[128];
    pcre2_get_error_message(error, text, sizeof(text));
    throw Error(what + ": the regular expression " + shown(pattern) + ": " + reinterpret_cast<const char*>(text));
  }
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without it matching is slower
  context = pcre2_match_context_create(nullptr);
  stack = pcre2_jit_stack_create(32 << 10, 64 << 20, nullptr);
  pcre2_jit_stack_assign(context, nullptr, stack);
}

Tokenizer::Regex::~Regex() {
  pcre2_code_free(code);
  pcre2_match_context_free(context);
  pcre2_jit_stack_free(stack);
}

std::string text_of(const Json& json, const char* name, const std::string& what) {
  const auto at = json.find(name);
  if (at == json.end() || !at->is_string()) throw Error(what + ": " + name + ": not a string");
  return at->get<std::string>();
}
bool flag_of(const Json& json, const char* name, bool otherwise, const std::string& what) {
  const auto at = json.find(name);
  if (at == json.end() || at->is_null()) return otherwise;
  if (!at->is_boolean()) throw Error(what + ": " + name + ": neither true nor false");
  return at->get<bool>();
}
const Json* part_of(const Json& json, const char* name) {
  const auto at = json.find(name);
  return at == json.end() || at->is_null() ? nullptr : &*at;
}
int32_t id_in(const Json& json, const std::string& what) {
  if (!json.is_number_integer() || json.get<int64_t>() < 0 || json.get<int64_t>() >= kMostTokens)
    throw Error(what + ": not a token's number");
  return json.get<int32_t>();
}

// utf8proc_map() takes the square of the length of a run of marks to sort it, and a text may be nothing else.
std::string composed(std::string_view text, int options) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }))
    return std::string(text);
  std::vector<utf8proc_int32_t> points;
  const auto option = utf8proc_option_t(UTF8PROC_STABLE | options);
  for (int before = 0; !text.empty(); text.remove_prefix(length_at(text))) {
    utf8proc_int32_t some[32];
    const auto n = utf8proc_decompose_char(utf8proc_int32_t(code_point(text)), some, 32, option, &before);
    if (n < 0 || n > 32) throw Error(std::string("a text cannot be normalized: ") + utf8proc_errmsg(n));
    points.insert(points.end(), some, some + n);
  }
  const auto order = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (auto at = points.begin(); (at = std::find_if(at, points.end(), order)) != points.end();) {
    const auto end = std::find_if(at, points.end(), [&](utf8proc_int32_t c) { return order(c) == 0; });
    std::stable_sort(at, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) { return order(a) < order(b); });
    at = end;
  }
  points.resize(size_t(utf8proc_normalize_utf32(points.data(), utf8proc_ssize_t(points.size()), option)));
  std::string out;
  for (const utf8proc_int32_t c : points) out += utf8_of(uint32_t(c));
  return out;
}

// A pattern is a text or a regular expression.
void Tokenizer::read_pattern(Step& step, const Json& json, const std::string& what) {
  const std::string type = text_of(json, "type", what);
  const Json* const pattern = part_of(json, "pattern");
  if (pattern == nullptr || !pattern->is_object()) throw Error(what + ": " + type + ": no pattern");
  if (pattern->contains("Regex")) step.regex = std::make_shared<Regex>(text_of(*pattern, "Regex", what), what);
  else step.from = text_of(*pattern, "String", what);
  if (!step.regex && step.from.empty()) throw Error(what + ": " + type + ": an empty pattern");
}

void Tokenizer::read_normalizer(Step& step, const Json& json, const std::string& what) {
  const std::string type = text_of(json, "type", what);
  if (type == "NFC") step.kind = Step::nfc;
  else if (type == "NFD") step.kind = Step::nfd;
  else if (type == "NFKC") step.kind = Step::nfkc;
  else if (type == "NFKD") step.kind = Step::nfkd;
  else if (type == "Lowercase") step.kind = Step::lowercase;
  else if (type == "Prepend") step.kind = Step::prepend, step.to = text_of(json, "prepend", what);
  else if (type == "Replace")
    step.kind = Step::replace, step.to = text_of(json, "content", what), read_pattern(step, json, what);
  else throw Error(what + ": the normalizer " + shown(type) + " is not supported");
  if (step.to.size() > 256) throw Error(what + ": " + type + ": a text of more than 256 bytes");
}

void Tokenizer::read_splitter(Step& step, const Json& json, const std::string& what) {
  const std::string type = text_of(json, "type", what);
  if (type == "Split") {
    step.kind = Step::split;
    read_pattern(step, json, what);
    const std::string behavior = text_of(json, "behavior", what);
    if (behavior == "Isolated") step.behavior = Step::isolated;
    else if (behavior == "Removed") step.behavior = Step::removed;
    else if (behavior == "MergedWithPrevious") step.behavior = Step::with_previous;
    else if (behavior == "MergedWithNext") step.behavior = Step::with_next;
    else throw Error(what + ": Split: the behavior " + shown(behavior) + " is not supported");
    step.invert = flag_of(json, "invert", false, what);
  } else if (type == "ByteLevel") {
    step.kind = Step::byte_level;
    step.prefix_space = flag_of(json, "add_prefix_space", true, what);
    if (flag_of(json, "use_regex", true, what)) step.regex = std::make_shared<Regex>(kGpt2Words, what);
  } else if (type == "Digits") {
    step.kind = Step::digits;
    step.individual = flag_of(json, "individual_digits", false, what);
    step.regex = std::make_shared<Regex>(step.individual ? R"(\p{N})" : R"(\p{N}+)", what);
  } else if (type == "Metaspace") {
    step.kind = Step::metaspace;
    step.to = text_of(json, "replacement", what);
    if (step.to.empty() || length_at(step.to) != step.to.size())
      throw Error(what + ": Metaspace: replacement: not one character");
    const std::string scheme = json.contains("prepend_scheme")                 ? text_of(json, "prepend_scheme", what)
                               : flag_of(json, "add_prefix_space", true, what) ? "always"
                                                                               : "never";
    if (scheme != "always" && scheme != "first" && scheme != "never")
      throw Error(what + ": Metaspace: prepend_scheme: " + shown(scheme));
    step.always = scheme == "always", step.first = scheme == "first";
    step.whole = !flag_of(json, "split", true, what);
  } else {
    throw Error(what + ": the pre-tokenizer " + shown(type) + " is not supported");
  }
}

void Tokenizer::read_steps(const Json& json, const std::string& what, bool normalizing) {
  if (!json.is_object()) throw Error(what + ": not an object");
  const std::string type = text_of(json, "type", what);
  if (type == "Sequence") {
    const Json* const list = part_of(json, normalizing ? "normalizers" : "pretokenizers");
    if (list == nullptr || !list->is_array()) throw Error(what + ": a Sequence of nothing");
    for (const Json& item : *list) read_steps(item, what, normalizing);
    return;
  }
  if (normalizers_.size() + splitters_.size() >= 64)
    throw Error(what + ": more than 64 normalizers and pre-tokenizers");
  auto step = std::make_shared<Step>();
  normalizing ? read_normalizer(*step, json, what) : read_splitter(*step, json, what);
  (normalizing ? normalizers_ : splitters_).push_back(step);
}

namespace {

// Characters that never join what is before them: ASCII, Chinese and Japanese ones and their punctuation, Hangul
// syllables. There are others, which a text can do without.
bool begins_anew(uint32_t c) {
  return c < 0x80 || (c >= 0x3001 && c <= 0x3029) || (c >= 0x3041 && c <= 0x3096) || (c >= 0x30a1 && c <= 0x30fa) ||
         (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x4e00 && c <= 0x9fff) || (c >= 0xac00 && c <= 0xd7a3);
}

// A normal form of a text, and its places. What stands behind the beginning of such a character is made on its own: so
// the text before a place need not be made again for each.
std::string composed_in_parts(std::string_view text, int options, std::vector<size_t>& places) {
  std::string out;
  size_t done = 0, least = 0;
  for (size_t& place : places) {
    size_t safe = place;
    while (safe > done && (safe == text.size() || (text[safe] & 0xc0) == 0x80 ||
                           !begins_anew(code_point(text.substr(safe)))))
      --safe;
    out += composed(text.substr(done, safe - done), options);
    done = safe;
    least = std::max(least, out.size() + composed(text.substr(safe, place - safe), options).size());
    place = least;
  }
  out += composed(text.substr(done), options);
  for (size_t& place : places) place = std::min(place, out.size());
  return out;
}

std::string lowered(std::string_view text, std::vector<size_t>& places) {
  std::string out;
  auto place = places.begin();
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(length_at(rest))) {
    for (; place != places.end() && *place <= text.size() - rest.size(); ++place) *place = out.size();
    const uint32_t c = code_point(rest);
    out += c == 0x130 ? "i\xcc\x87"  // the only letter that becomes two characters
                      : utf8_of(uint32_t(utf8proc_tolower(utf8proc_int32_t(c))));
  }
  std::fill(place, places.end(), out.size());
  return out;
}

}  // namespace

std::string Tokenizer::normalize(std::string_view text, std::vector<size_t>* given) const {
  std::string out(text);
  if (out.empty()) return out;
  std::vector<size_t> none;
  std::vector<size_t>& places = given != nullptr ? *given : none;
  for (const auto& step : normalizers_) {
    switch (step->kind) {
      case Step::nfc: out = composed_in_parts(out, UTF8PROC_COMPOSE, places); break;
      case Step::nfd: out = composed_in_parts(out, UTF8PROC_DECOMPOSE, places); break;
      case Step::nfkc: out = composed_in_parts(out, UTF8PROC_COMPOSE | UTF8PROC_COMPAT, places); break;
      case Step::nfkd: out = composed_in_parts(out, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT, places); break;
      case Step::lowercase: out = lowered(out, places); break;
      case Step::prepend:
        out = step->to + out;
        for (size_t& place : places) place += place > 0 ? step->to.size() : 0;
        break;
      case Step::replace: {
        std::string next;
        size_t done = 0, at = 0;  // at: of the places
        const auto put = [&](size_t begin, size_t end) {
          for (; at < places.size() && places[at] <= begin; ++at) places[at] = next.size() + places[at] - done;
          next.append(out, done, begin - done);
          // What is replaced belongs to a part that has some of it.
          for (; at < places.size() && places[at] < end; ++at)
            places[at] = std::max(next.size() + (at % 2 == 1 ? step->to.size() : 0), at > 0 ? places[at - 1] : 0);
          next.append(step->to);
          done = end;
        };
        if (step->regex) step->regex->each(out, put);
        else
          for (size_t from = out.find(step->from); from != std::string::npos;
               from = out.find(step->from, from + step->from.size()))
            put(from, from + step->from.size());
        for (; at < places.size(); ++at) places[at] = next.size() + places[at] - done;
        out = next.append(out, done, std::string::npos);
        break;
      }
      default: break;
    }
    // No step that is meant seriously makes 32 bytes of one; a few that are not would fill the memory.
    if (out.size() > 32 * text.size() + 1024)
      throw Error("the tokenizer's normalizers make a text of " + std::to_string(out.size()) + " bytes of one of " +
                  std::to_string(text.size()));
  }
  return out;
}

// Splits a piece of text by the steps from this one on, and merges what comes out at the end.
void Tokenizer::split(std::string_view word, size_t index, bool first, Ids& out) const {
  if (word.empty()) return;
  if (index == splitters_.size()) return merge(word, out);
  const Step& step = *splitters_[index];
  if (step.kind == Step::metaspace) {
    std::string text;
    const bool marked = starts_with(word, step.to) || word[0] == ' ';
    if (!marked && (step.always || (step.first && first))) text = step.to;
    for (const char c : word) {
      if (c == ' ') text += step.to;
      else text += c;
    }
    if (step.whole) return split(text, index + 1, first, out);
    for (size_t begin = 0; begin < text.size();) {  // each sign begins a word
      size_t end =
          text.find(step.to, begin + (starts_with(std::string_view(text).substr(begin), step.to) ? step.to.size() : 0));
      if (end == std::string::npos) end = text.size();
      split(std::string_view(text).substr(begin, end - begin), index + 1, first && begin == 0, out);
      begin = end;
    }
    return;
  }
  std::string with_space;
  if (step.kind == Step::byte_level && step.prefix_space && word[0] != ' ') {
    with_space = " " + std::string(word);
    word = with_space;
  }
  if (step.kind == Step::byte_level && !step.regex) return split(word, index + 1, first, out);

  // Matches and what lies between them.
  std::vector<std::pair<size_t, bool>> ends;  // of each part; whether it is a match
  size_t done = 0;
  const auto match = [&](size_t begin, size_t end) {
    if (begin > done) ends.emplace_back(begin, step.invert);
    ends.emplace_back(end, !step.invert);
    done = end;
  };
  if (step.regex) step.regex->each(word, match);
  else
    for (size_t at = word.find(step.from); at != std::string::npos; at = word.find(step.from, at + step.from.size()))
      match(at, at + step.from.size());
  if (done < word.size()) ends.emplace_back(word.size(), step.invert);
  size_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const bool is_match = ends[i].second;
    if (step.behavior == Step::removed && is_match) {
      begin = ends[i].first;
      continue;
    }
    const bool joins =
        i + 1 < ends.size() && ((step.behavior == Step::with_previous && !is_match && ends[i + 1].second) ||
                                (step.behavior == Step::with_next && is_match && !ends[i + 1].second));
    if (joins) continue;
    split(word.substr(begin, ends[i].first - begin), index + 1, first && begin == 0, out);
    begin = ends[i].first;
  }
}

}  // namespace llm
