#include <utf8proc.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "tokenizer/parts.h"

namespace llm {

namespace {

constexpr const char* kGpt2Words = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr const char* kSpaces = "\\t-\\r\\x{85}\\p{Z}";
// The characters of is_word() except joiners. Outside of classes \w also has the exponents and fractions of Latin-1.
constexpr const char* kWordCharacters =
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}"
    "\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{1f169}\\x{1f170}-\\x{1f189}";
constexpr const char* kWordNumbers = "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";

// A compiled pattern; if the pattern is wrong, nullptr and the error.
std::shared_ptr<pcre2_code> compiled(const std::string& pattern, uint32_t options, int& error) {
  PCRE2_SIZE at = 0;
  const auto text = reinterpret_cast<PCRE2_SPTR>(pattern.data());
  return {pcre2_compile(text, pattern.size(), PCRE2_UTF | options, &error, &at, nullptr), pcre2_code_free};
}

// Translates a pattern in Oniguruma's Ruby syntax, for which the files are written, to one of PCRE2 that means the
// same. What the two understand differently, and models do not use, is refused by name.
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
    return "(*LF)" + out_;  // . and $ take only LF as the end of a line
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
    if (caseless_.back()) {  // for Oniguruma one character may match several in the other case: "ss" and U+DF
      const bool joined = (is_any(c, "fF") && is_any(next, "fFiIlL")) || (is_any(c, "sS") && is_any(next, "sStT"));
      if (static_cast<unsigned char>(c) >= 0x80 || (joined && !in_class_))
        refuse("(?i", "with characters beyond ASCII or of several characters in the other case");
    }
    if (c == ')' && !in_class_ && caseless_.size() > 1) caseless_.pop_back();
    take(1);
  }
  void open_class() {
    in_class_ = true;
    take(now(1) == '^' ? 2 : 1);
    if (now() == ']') refuse("]", "at the start of a character class");
  }
  void of_class() {
    if (stands("[:")) refuse(pattern_.substr(at_, pattern_.find(']', at_) - at_) + "]");
    if (now() == '[') throw Error(what_ + ": a nested character class is not supported");
    if (stands("&&")) refuse("&&", "in a character class");
    if (now() == ']') in_class_ = false;
    plain();
  }
  void open_group() {
    if (stands("(?i)") && at_ == 0) return caseless_[0] = true, take(4);
    caseless_.push_back(caseless_.back() || stands("(?i:"));
    for (const char* group : {"(?i:", "(?<=", "(?<!", "(?:", "(?=", "(?!", "(?>"}) {
      if (stands(group)) return take(std::strlen(group));
    }
    if (now(1) == '?' || now(1) == '*') refuse(pattern_.substr(at_, 4));
    take(1);
  }
  // In Oniguruma {2}+ is not possessive, {2}? may match nothing, and {,2} is {0,2}.
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
    if (caseless_.back() && std::strchr("pPwWx", c) != nullptr) refuse(pattern_.substr(at_, 2), "after (?i");
    if (in_class_ && (c == 'S' || c == 'W')) refuse(pattern_.substr(at_, 2), "in a character class");
    if (std::strchr("sSwW", c) != nullptr) {
      const std::string words = std::string(kWordCharacters) + (in_class_ ? "" : kWordNumbers),
                        set = c == 's' || c == 'S' ? kSpaces : words;
      put(in_class_ ? set : (c == 's' || c == 'w' ? "[" : "[^") + set + "]", 2);
    } else if (c == 'p' || c == 'P')
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
  // The name of a script means characters of that script, and in PCRE2 also those that are used with it.
  void property() {
    const size_t end = pattern_.find('}', at_);
    if (now(2) != '{' || end == std::string::npos) refuse(pattern_.substr(at_, 3));
    const std::string all = pattern_.substr(at_, end + 1 - at_), sign = now(3) == '^' ? "^" : "";
    const std::string script = all.substr(0, 3) + sign + "sc:" + all.substr(3 + sign.size());
    int error = 0;
    put(all.size() > 6 + sign.size() && compiled(script, 0, error) ? script : all, all.size());
  }

  const std::string& pattern_;
  const std::string& what_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::vector<bool> caseless_{false};  // for each open group
  std::string out_;
};

}  // namespace

Pattern regex(const std::string& pattern, const std::string& what) {
  Pattern out;
  int error = 0;
  out.code = compiled(Translation(pattern, what).all(), PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, error);
  if (!out.code) {
    PCRE2_UCHAR text[128];
    pcre2_get_error_message(error, text, sizeof(text));
    throw Error(what + ": the regular expression " + shown(pattern) + ": " + reinterpret_cast<const char*>(text));
  }
  pcre2_jit_compile(out.code.get(), PCRE2_JIT_COMPLETE);  // without it matching is slower
  out.context.reset(pcre2_match_context_create(nullptr), pcre2_match_context_free);
  out.stack.reset(pcre2_jit_stack_create(32 << 10, 64 << 20, nullptr), pcre2_jit_stack_free);
  pcre2_jit_stack_assign(out.context.get(), nullptr, out.stack.get());
  return out;
}

namespace {

// A normal form of a text. Replaces utf8proc_map(), which sorts a run of n marks in n^2 steps, and a text may be one
// run.
std::string composed(std::string_view text, int options) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; }))
    return std::string(text);
  std::vector<utf8proc_int32_t> points;
  const auto option = utf8proc_option_t(UTF8PROC_STABLE | options);
  for (int before = 0; !text.empty(); text.remove_prefix(length_at(text))) {
    utf8proc_int32_t some[32];
    const auto n = utf8proc_decompose_char(utf8proc_int32_t(code_point(text)), some, 32, option, &before);
    if (n < 0 || n > 32) throw Error(std::string("Unicode normalization failed: ") + utf8proc_errmsg(n));
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

// Whether a character never composes with those before it: ASCII, Chinese and Japanese characters and their
// punctuation, Hangul syllables. There are others, but this list is enough.
bool begins_anew(uint32_t c) {
  return c < 0x80 || (c >= 0x3001 && c <= 0x3029) || (c >= 0x3041 && c <= 0x3096) || (c >= 0x30a1 && c <= 0x30fa) ||
         (c >= 0x3400 && c <= 0x4dbf) || (c >= 0x4e00 && c <= 0x9fff) || (c >= 0xac00 && c <= 0xd7a3);
}

// A normal form of a text, and its places. A text can be cut before a character that begins anew, and each part is
// normalized alone, so that the text before a place is not normalized again for each place.
std::string composed_in_parts(std::string_view text, int options, Places& places) {
  std::string out;
  size_t done = 0, least = 0;
  for (size_t& place : places) {
    size_t safe = place;
    while (safe > done &&
           (safe == text.size() || (text[safe] & 0xc0) == 0x80 || !begins_anew(code_point(text.substr(safe)))))
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

std::string lowered(std::string_view text, Places& places) {
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

// The field `pattern`: a text or a regular expression.
Pattern pattern_of(const Fields& fields) {
  const Fields pattern = fields.object("pattern");
  const Pattern out =
      pattern.has("Regex") ? regex(pattern.text("Regex"), fields.what()) : Pattern{pattern.text("String")};
  if (!out.given()) fields.refuse("an empty pattern");
  return out;
}

// A field with a text that is inserted into texts.
std::string short_text(const Fields& fields, const char* name) {
  const std::string text = fields.text(name);
  if (text.size() > 256) fields.refuse(name, "longer than 256 bytes");
  return text;
}

}  // namespace

std::string prepended(const std::string& text, const std::string& more, Places& places) {
  for (size_t& place : places) place += place > 0 ? more.size() : 0;
  return more + text;
}

std::string replaced(const std::string& text, const Pattern& pattern, const std::string& by, Places& places) {
  std::string out;
  size_t done = 0, at = 0;  // at: index of the next place
  pattern.each(text, [&](size_t begin, size_t end) {
    for (; at < places.size() && places[at] <= begin; ++at) places[at] = out.size() + places[at] - done;
    out.append(text, done, begin - done);
    // What is replaced belongs to a part that overlaps it.
    for (; at < places.size() && places[at] < end; ++at)
      places[at] = std::max(out.size() + (at % 2 == 1 ? by.size() : 0), at > 0 ? places[at - 1] : 0);
    out.append(by);
    done = end;
  });
  for (; at < places.size(); ++at) places[at] = out.size() + places[at] - done;
  return out.append(text, done, std::string::npos);
}

// ---- what a file says of them ---------------------------------------------------------------------------------------

void Tokenizer::read_normalizer(const Fields& fields, const std::string& type) {
  static const std::map<std::string, int> forms{{"NFC", UTF8PROC_COMPOSE},
                                                {"NFD", UTF8PROC_DECOMPOSE},
                                                {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                                                {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};
  if (const auto form = forms.find(type); form != forms.end()) {
    normalizers_.push_back([options = form->second](const std::string& text, Places& places) {
      return composed_in_parts(text, options, places);
    });
  } else if (type == "Lowercase") {
    normalizers_.push_back(lowered);
  } else if (type == "Prepend") {
    normalizers_.push_back([more = short_text(fields, "prepend")](const std::string& text, Places& places) {
      return prepended(text, more, places);
    });
  } else if (type == "Replace") {
    normalizers_.push_back(
        [pattern = pattern_of(fields), by = short_text(fields, "content")](const std::string& text, Places& places) {
          return replaced(text, pattern, by, places);
        });
  } else {
    fields.refuse("the normalizer " + shown(type) + " is not supported");
  }
}

void Tokenizer::read_splitter(const Fields& fields, const std::string& type) {
  Splitter step;
  if (type == "Split") {
    static const std::map<std::string, Splitter::Behavior> behaviors{{"Isolated", Splitter::isolated},
                                                                     {"Removed", Splitter::removed},
                                                                     {"MergedWithPrevious", Splitter::with_previous},
                                                                     {"MergedWithNext", Splitter::with_next}};
    step.pattern = pattern_of(fields);
    const std::string behavior = fields.text("behavior");
    if (behaviors.count(behavior) == 0) fields.refuse("Split: the behavior " + shown(behavior) + " is not supported");
    step.behavior = behaviors.at(behavior);
    step.invert = fields.flag("invert", false);
  } else if (type == "ByteLevel") {
    byte_level_ = true;
    if (fields.flag("add_prefix_space", true)) step.sign = " ", step.always = true;
    if (fields.flag("use_regex", true)) step.pattern = regex(kGpt2Words, fields.what());
  } else if (type == "Digits") {
    step.pattern = regex(fields.flag("individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)", fields.what());
  } else if (type == "Metaspace") {
    step.sign = fields.text("replacement");
    if (step.sign.empty() || length_at(step.sign) != step.sign.size())
      fields.refuse("Metaspace: replacement: not one character");
    const std::string scheme =
        fields.text("prepend_scheme", fields.flag("add_prefix_space", true) ? "always" : "never");
    if (scheme != "always" && scheme != "first" && scheme != "never")
      fields.refuse("Metaspace: prepend_scheme: " + shown(scheme) + " is not supported");
    step.always = scheme == "always", step.first = scheme == "first";
    if (fields.flag("split", true)) step.pattern.text = step.sign, step.behavior = Splitter::with_next;
  } else {
    fields.refuse("the pre-tokenizer " + shown(type) + " is not supported");
  }
  const bool does_something = !step.sign.empty() || step.pattern.given();
  if (does_something) splitters_.push_back(std::make_shared<const Splitter>(step));
}

// Reads one step, or a Sequence of steps.
void Tokenizer::read_steps(const Json& json, const char* list, const std::string& what, Read read) {
  const Fields fields(json, what);
  const std::string type = fields.text("type");
  if (type == "Sequence") {
    for (const Json& step : fields.list(list)) read_steps(step, list, what, read);
    return;
  }
  (this->*read)(fields, type);
  if (normalizers_.size() + splitters_.size() > 64) fields.refuse("more than 64 normalizers and pre-tokenizers");
}

// ---- what they do ---------------------------------------------------------------------------------------------------

std::string Tokenizer::normalize(std::string_view text, Places& places) const {
  std::string out(text);
  if (text.empty()) return out;
  for (const Normalizer& step : normalizers_) {
    out = step(out, places);
    // No serious normalizer makes 32 bytes of one, and a few malicious ones would fill the memory.
    if (out.size() > 32 * text.size() + 1024)
      throw Error("the tokenizer's normalizers expand a text from ", text.size(), " to ", out.size(), " bytes");
  }
  return out;
}

// Splits a piece of text with the steps from `index` on, and merges what comes out of the last one.
void Tokenizer::split(std::string_view word, size_t index, bool first, Ids& out) const {
  if (word.empty()) return;
  if (index == splitters_.size()) return merge(word, out);
  const Splitter& step = *splitters_[index];
  std::string text;
  if (!step.sign.empty()) {
    const bool marked = word[0] == ' ' || starts_with(word, step.sign);
    Places none;
    text = replaced(std::string(word), {" "}, step.sign, none);
    if (!marked && (step.always || (step.first && first))) text = step.sign + text;
    word = text;
  }
  if (!step.pattern.given()) return split(word, index + 1, first, out);

  // Parts: matches, and what lies between them.
  std::vector<std::pair<size_t, bool>> ends;  // the end of each part; whether it counts as a match
  size_t done = 0;
  step.pattern.each(word, [&](size_t begin, size_t end) {
    if (begin > done) ends.emplace_back(begin, step.invert);
    ends.emplace_back(end, !step.invert);
    done = end;
  });
  if (done < word.size()) ends.emplace_back(word.size(), step.invert);
  size_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const bool is_match = ends[i].second;
    if (step.behavior == Splitter::removed && is_match) {
      begin = ends[i].first;
      continue;
    }
    const bool joins =
        i + 1 < ends.size() && ((step.behavior == Splitter::with_previous && !is_match && ends[i + 1].second) ||
                                (step.behavior == Splitter::with_next && is_match && !ends[i + 1].second));
    if (joins) continue;
    split(word.substr(begin, ends[i].first - begin), index + 1, first && begin == 0, out);
    begin = ends[i].first;
  }
}

}  // namespace llm
