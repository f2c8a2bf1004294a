#include "tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <queue>

namespace llm {

// ---- UTF-8 ----------------------------------------------------------------------------------------------------------------------

namespace {

// The length of the character that begins at text[0]: > 0 if it is whole, 0 if more bytes are needed, < 0 if so many bytes can begin
// none.
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

constexpr const char* kReplacement = "\xef\xbf\xbd";

// Appends the whole characters of text, and returns what is left: the beginning of one.
std::string_view repair(std::string_view text, std::string& out) {
  while (!text.empty()) {
    const int n = character(text);
    if (n == 0) break;
    if (n > 0) out.append(text.substr(0, size_t(n)));
    else out += kReplacement;
    text.remove_prefix(size_t(n > 0 ? n : -n));
  }
  return text;
}

std::string utf8_of(uint32_t c) {
  utf8proc_uint8_t bytes[4];
  return std::string(reinterpret_cast<char*>(bytes), size_t(utf8proc_encode_char(utf8proc_int32_t(c), bytes)));
}

// Code points of valid UTF-8.
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
  return (c >= 9 && c <= 13) || c == 32 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}
bool is_word(uint32_t c) {
  const auto category = utf8proc_category(utf8proc_int32_t(c));
  return (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_NO) || c == '_' || category == UTF8PROC_CATEGORY_PC;
}

bool starts_with(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }

// GPT-2's names of bytes: those that can be printed are themselves, the others follow behind U+0100.
struct ByteNames {
  std::string of[256];
  std::unordered_map<uint32_t, unsigned char> byte;
  ByteNames() {
    uint32_t next = 256;
    for (int b = 0; b < 256; ++b) {
      const bool itself = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      const uint32_t c = itself ? uint32_t(b) : next++;
      of[b] = utf8_of(c);
      byte[c] = static_cast<unsigned char>(b);
    }
  }
};
const ByteNames& byte_names() {
  static const ByteNames names;
  return names;
}

// The byte of a piece like "<0x41>", or -1.
int byte_of(const std::string& text) {
  if (text.size() != 6 || text.compare(0, 3, "<0x") != 0 || text[5] != '>' || !std::isxdigit(static_cast<unsigned char>(text[3])) || !std::isxdigit(static_cast<unsigned char>(text[4]))) return -1;
  return std::stoi(text.substr(3, 2), nullptr, 16);
}

// A piece with spaces where SentencePiece has signs for them.
std::string with_spaces(const std::string& text) {
  const std::string sign = "\xe2\x96\x81";
  std::string out;
  size_t done = 0;
  for (size_t at; (at = text.find(sign, done)) != std::string::npos; done = at + sign.size()) out.append(text, done, at - done) += ' ';
  return out.append(text, done, std::string::npos);
}

// A piece as byte-level BPE writes it; added tokens are plain text, of which characters may have no byte.
bool from_byte_names(std::string_view text, std::string& out) {
  out.clear();
  while (!text.empty()) {
    const size_t n = length_at(text);
    const auto at = byte_names().byte.find(code_point(text));
    if (at == byte_names().byte.end()) return false;
    out.push_back(char(at->second));
    text.remove_prefix(n);
  }
  return true;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  Utf8Stream stream;
  std::string out = stream.add(text);
  return out += stream.end();
}

std::string Utf8Stream::add(std::string_view bytes) {
  std::string all = held_, out;
  all.append(bytes);
  held_ = std::string(repair(all, out));
  return out;
}

std::string Utf8Stream::end() {
  const bool open = !held_.empty();
  held_.clear();
  return open ? kReplacement : "";
}

// ---- regular expressions --------------------------------------------------------------------------------------------------------

struct Tokenizer::Regex {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  std::string source;

  Regex(const std::string& pattern, const std::string& what) : source(pattern) {
    const std::string own = translated(pattern, what);
    int error = 0;
    PCRE2_SIZE at = 0;
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(own.data()), own.size(), PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
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
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;
  ~Regex() {
    pcre2_code_free(code);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }

  // f(begin, end) for each match; the text is valid UTF-8.
  template <class F>
  void each(std::string_view text, const F& f) const {
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    for (size_t at = 0; at <= text.size();) {
      const int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), context);
      if (found == PCRE2_ERROR_NOMATCH) return;
      if (found < 0) throw Error("a text cannot be split into words (PCRE2 error " + std::to_string(found) + ")");
      const PCRE2_SIZE* const place = pcre2_get_ovector_pointer(data.get());
      const size_t begin = place[0], end = place[1];
      if (end > begin) f(begin, end);
      at = end > begin ? end : end + (end < text.size() ? length_at(text.substr(end)) : 1);
    }
  }

  // \s and \S as Oniguruma, which the files are written for, understands them: PCRE2's take U+180E for a space.
  static std::string translated(const std::string& pattern, const std::string& what) {
    const std::string spaces = "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
    std::string out;
    bool in_class = false;
    for (size_t i = 0; i < pattern.size(); ++i) {
      const char c = pattern[i];
      if (c == '\\' && i + 1 < pattern.size()) {
        const char next = pattern[++i];
        if (next == 's') out += in_class ? spaces : "[" + spaces + "]";
        else if (next == 'S' && in_class) throw Error(what + ": \\S in a class of characters is not supported");
        else if (next == 'S') out += "[^" + spaces + "]";
        else (out += c) += next;
        continue;
      }
      if (c == '[' && in_class && (i + 1 >= pattern.size() || pattern[i + 1] != ':')) {
        // In Oniguruma a class in a class.
        throw Error(what + ": a class of characters within another one is not supported");
      }
      if (c == '[') in_class = true;
      if (c == ']') in_class = false;
      out += c;
    }
    return out;
  }
};

// ---- steps ----------------------------------------------------------------------------------------------------------------------

struct Tokenizer::Step {
  enum Kind { nfc, nfd, nfkc, nfkd, lowercase, prepend, replace, split, byte_level, digits, metaspace } kind;
  std::string from, to;                           // replace, prepend, metaspace (to: its sign)
  std::shared_ptr<Regex> regex;                   // split, byte_level, replace
  enum { isolated, removed, with_previous, with_next } behavior = isolated;
  bool invert = false, prefix_space = false, whole = true, always = false, first = false, individual = false;
};

namespace {

constexpr const char* kGpt2Words = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

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
// Far more than anybody's vocabulary: a number costs the memory of all below it.
constexpr int32_t kMostTokens = 1 << 21;

int32_t id_in(const Json& json, const std::string& what) {
  if (!json.is_number_integer() || json.get<int64_t>() < 0 || json.get<int64_t>() >= kMostTokens) throw Error(what + ": not a token's number");
  return json.get<int32_t>();
}

// One of Unicode's normal forms. utf8proc_map() takes the square of the length of a run of marks to sort it, and a text may be nothing else.
std::string composed(std::string_view text, int options) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; })) return std::string(text);
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

}  // namespace

void Tokenizer::read_steps(const Json& json, const std::string& what, bool normalizing) {
  if (!json.is_object()) throw Error(what + ": not an object");
  const std::string type = text_of(json, "type", what);
  if (type == "Sequence") {
    const Json* const list = part_of(json, normalizing ? "normalizers" : "pretokenizers");
    if (list == nullptr || !list->is_array()) throw Error(what + ": a Sequence of nothing");
    for (const Json& item : *list) read_steps(item, what, normalizing);
    return;
  }
  if (normalizers_.size() + splitters_.size() >= 64) throw Error(what + ": more than 64 normalizers and pre-tokenizers");
  auto step = std::make_shared<Step>();
  // A pattern is a text or a regular expression.
  const auto read_pattern = [&] {
    const Json* const pattern = part_of(json, "pattern");
    if (pattern == nullptr || !pattern->is_object()) throw Error(what + ": " + type + ": no pattern");
    if (pattern->contains("Regex")) step->regex = std::make_shared<Regex>(text_of(*pattern, "Regex", what), what);
    else step->from = text_of(*pattern, "String", what);
    if (!step->regex && step->from.empty()) throw Error(what + ": " + type + ": an empty pattern");
  };
  if (normalizing) {
    if (type == "NFC") step->kind = Step::nfc;
    else if (type == "NFD") step->kind = Step::nfd;
    else if (type == "NFKC") step->kind = Step::nfkc;
    else if (type == "NFKD") step->kind = Step::nfkd;
    else if (type == "Lowercase") step->kind = Step::lowercase;
    else if (type == "Prepend") step->kind = Step::prepend, step->to = text_of(json, "prepend", what);
    else if (type == "Replace") step->kind = Step::replace, step->to = text_of(json, "content", what), read_pattern();
    else throw Error(what + ": the normalizer " + shown(type) + " is not supported");
    if (step->to.size() > 256) throw Error(what + ": " + type + ": a text of more than 256 bytes");
    normalizers_.push_back(step);
    return;
  }
  if (type == "Split") {
    step->kind = Step::split;
    read_pattern();
    const std::string behavior = text_of(json, "behavior", what);
    if (behavior == "Isolated") step->behavior = Step::isolated;
    else if (behavior == "Removed") step->behavior = Step::removed;
    else if (behavior == "MergedWithPrevious") step->behavior = Step::with_previous;
    else if (behavior == "MergedWithNext") step->behavior = Step::with_next;
    else throw Error(what + ": Split: the behavior " + shown(behavior) + " is not supported");
    step->invert = flag_of(json, "invert", false, what);
  } else if (type == "ByteLevel") {
    step->kind = Step::byte_level;
    step->prefix_space = flag_of(json, "add_prefix_space", true, what);
    if (flag_of(json, "use_regex", true, what)) step->regex = std::make_shared<Regex>(kGpt2Words, what);
  } else if (type == "Digits") {
    step->kind = Step::digits;
    step->individual = flag_of(json, "individual_digits", false, what);
    step->regex = std::make_shared<Regex>(step->individual ? R"(\p{N})" : R"(\p{N}+)", what);
  } else if (type == "Metaspace") {
    step->kind = Step::metaspace;
    step->to = text_of(json, "replacement", what);
    if (step->to.empty() || length_at(step->to) != step->to.size()) throw Error(what + ": Metaspace: replacement: not one character");
    const std::string scheme = json.contains("prepend_scheme") ? text_of(json, "prepend_scheme", what) : flag_of(json, "add_prefix_space", true, what) ? "always" : "never";
    if (scheme != "always" && scheme != "first" && scheme != "never") throw Error(what + ": Metaspace: prepend_scheme: " + shown(scheme));
    step->always = scheme == "always", step->first = scheme == "first";
    step->whole = !flag_of(json, "split", true, what);
  } else {
    throw Error(what + ": the pre-tokenizer " + shown(type) + " is not supported");
  }
  splitters_.push_back(step);
}

std::string Tokenizer::normalize(std::string_view text, bool) const {
  std::string out(text);
  if (out.empty()) return out;
  for (const auto& step : normalizers_) {
    switch (step->kind) {
      case Step::nfc: out = composed(out, UTF8PROC_COMPOSE); break;
      case Step::nfd: out = composed(out, UTF8PROC_DECOMPOSE); break;
      case Step::nfkc: out = composed(out, UTF8PROC_COMPOSE | UTF8PROC_COMPAT); break;
      case Step::nfkd: out = composed(out, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT); break;
      case Step::lowercase: {
        std::string lower;
        for (std::string_view rest = out; !rest.empty(); rest.remove_prefix(length_at(rest))) lower += utf8_of(uint32_t(utf8proc_tolower(utf8proc_int32_t(code_point(rest)))));
        out = lower;
        break;
      }
      case Step::prepend: out = step->to + out; break;
      case Step::replace: {
        std::string next;
        size_t done = 0;
        const auto put = [&](size_t begin, size_t end) {
          next.append(out, done, begin - done).append(step->to);
          done = end;
        };
        if (step->regex) step->regex->each(out, put);
        else for (size_t at = out.find(step->from); at != std::string::npos; at = out.find(step->from, at + step->from.size())) put(at, at + step->from.size());
        out = next.append(out, done, std::string::npos);
        break;
      }
      default: break;
    }
    // No step that is meant seriously makes 32 bytes of one; a few that are not would fill the memory.
    if (out.size() > 32 * text.size() + 1024) throw Error("the tokenizer's normalizers make a text of " + std::to_string(out.size()) + " bytes of one of " + std::to_string(text.size()));
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
      size_t end = text.find(step.to, begin + (starts_with(std::string_view(text).substr(begin), step.to) ? step.to.size() : 0));
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
  else for (size_t at = word.find(step.from); at != std::string::npos; at = word.find(step.from, at + step.from.size())) match(at, at + step.from.size());
  if (done < word.size()) ends.emplace_back(word.size(), step.invert);
  size_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const bool is_match = ends[i].second;
    if (step.behavior == Step::removed && is_match) {
      begin = ends[i].first;
      continue;
    }
    const bool joins = i + 1 < ends.size() && ((step.behavior == Step::with_previous && !is_match && ends[i + 1].second) || (step.behavior == Step::with_next && is_match && !ends[i + 1].second));
    if (joins) continue;
    split(word.substr(begin, ends[i].first - begin), index + 1, first && begin == 0, out);
    begin = ends[i].first;
  }
}

// ---- BPE ------------------------------------------------------------------------------------------------------------------------

// Neighbours are joined, those of the lowest rank first and of equal ranks the leftmost, until no pair is in the table. A heap of pairs
// and a list of neighbours: a word of a million letters takes n log n steps.
void Tokenizer::merge(std::string_view word, Ids& out) const {
  if (ignore_merges_) {
    if (const auto at = ids_.find(std::string(word)); at != ids_.end() && !control_[size_t(at->second)]) return out.push_back(at->second);
  }
  struct Symbol {
    int32_t id, previous, next;
  };
  std::vector<Symbol> symbols;
  bool after_unknown = false;
  const auto push = [&](int32_t id) { symbols.push_back({id, int32_t(symbols.size()) - 1, int32_t(symbols.size()) + 1}); };
  for (std::string_view rest = word; !rest.empty();) {
    const size_t n = kind_ == Kind::bytes ? 1 : length_at(rest);
    const auto at = ids_.find(std::string(rest.substr(0, n)));
    if (at != ids_.end()) {
      push(at->second);
      after_unknown = false;
    } else {
      bool all = !raw_bytes_.empty();
      for (size_t i = 0; i < n; ++i) all = all && raw_bytes_[static_cast<unsigned char>(rest[i])] >= 0;
      if (all) {
        for (size_t i = 0; i < n; ++i) push(raw_bytes_[static_cast<unsigned char>(rest[i])]);
      } else if (unknown_ >= 0 && !(fuse_unknown_ && after_unknown)) {
        push(unknown_);
      }
      after_unknown = !all;
    }
    rest.remove_prefix(n);
  }
  if (symbols.empty()) return;
  if (symbols.size() > size_t(std::numeric_limits<int32_t>::max())) throw Error("a word is longer than 2^31 bytes");
  symbols.back().next = -1;

  struct Pair {
    int32_t rank, left, left_id, right_id, id;
    bool operator<(const Pair& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }  // the queue gives the largest
  };
  std::vector<Pair> room;
  room.reserve(symbols.size());
  std::priority_queue<Pair> pairs(std::less<Pair>(), std::move(room));
  const auto consider = [&](int32_t left) {
    if (left < 0 || symbols[size_t(left)].next < 0) return;
    const int32_t a = symbols[size_t(left)].id, b = symbols[size_t(symbols[size_t(left)].next)].id;
    const auto at = merges_.find(uint64_t(uint32_t(a)) << 32 | uint32_t(b));
    if (at != merges_.end()) pairs.push({at->second.rank, left, a, b, at->second.id});
  };
  for (int32_t i = 0; i + 1 < int32_t(symbols.size()); ++i) consider(i);
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    Symbol& left = symbols[size_t(pair.left)];
    if (left.id != pair.left_id || left.next < 0 || symbols[size_t(left.next)].id != pair.right_id) continue;  // no longer there
    Symbol& right = symbols[size_t(left.next)];
    left.id = pair.id, right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[size_t(left.next)].previous = pair.left;
    consider(left.previous);
    consider(pair.left);
  }
  for (int32_t i = 0; i >= 0; i = symbols[size_t(i)].next) out.push_back(symbols[size_t(i)].id);
}

// ---- encoding -------------------------------------------------------------------------------------------------------------------

// Added tokens are cut out first: those that are not normalized, then, of what the normalizer makes of the rest, the others.
void Tokenizer::segment(std::string_view text, bool normalized, const Origins& origins, bool first, Ids& out) const {
  const Trie& trie = tries_[normalized ? 1 : 0];
  const auto rest = [&](size_t from, size_t to, bool at_start) {
    const std::string_view part = text.substr(from, to - from);
    if (part.empty()) return;
    if (normalized) return split(part, 0, at_start, out);
    const std::string made = normalize(part, at_start);
    Origins inside{{}, origins.control};
    if (!tries_[1].ends.empty()) {
      // Where parts begin and end when they are normalized.
      const auto place = [&](size_t at) { return at <= from ? 0 : at >= to ? made.size() : std::min(made.size(), normalize(text.substr(from, at - from), at_start).size()); };
      for (const Plain& plain : origins.plain) {
        if (plain.begin < to && plain.end > from) inside.plain.push_back({place(plain.begin), place(plain.end), plain.by_model});
      }
    }
    segment(made, true, inside, at_start, out);
  };
  const auto is_allowed = [&](const Added& token, size_t begin, size_t end) {
    const auto at = std::partition_point(origins.plain.begin(), origins.plain.end(), [&](const Plain& plain) { return plain.end <= begin; });
    for (auto plain = at; plain != origins.plain.end() && plain->begin < end; ++plain) {
      if (token.special || (!plain->by_model && origins.control->count(token.id) > 0)) return false;
    }
    return true;
  };
  const auto fits = [&](const Added& token, size_t at, size_t end) {
    if (!is_allowed(token, at, end)) return false;
    return !token.single_word || !((at > 0 && is_word(code_point(last_character(text.substr(0, at))))) || (end < text.size() && is_word(code_point(text.substr(end)))));
  };
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !trie.ends.empty();) {
    const Added* found = nullptr;  // the longest that fits
    uint64_t node = 0;
    for (size_t end = at; end < text.size();) {
      const auto next = trie.next.find(node << 8 | static_cast<unsigned char>(text[end]));
      if (next == trie.next.end()) break;
      node = next->second, ++end;
      const auto tokens = trie.ends.find(node);
      if (tokens == trie.ends.end()) continue;
      const auto first = std::find_if(tokens->second.begin(), tokens->second.end(), [&](size_t i) { return fits(added_[i], at, end); });
      if (first != tokens->second.end()) found = &added_[*first];
    }
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + found->match.size();
    if (found->left) {
      while (begin > done && is_space(code_point(last_character(text.substr(done, begin - done))))) begin -= last_character(text.substr(done, begin - done)).size();
    }
    if (found->right) {
      while (end < text.size() && is_space(code_point(text.substr(end)))) end += length_at(text.substr(end));
    }
    rest(done, begin, first && done == 0);
    out.push_back(found->id);
    done = at = end;
  }
  rest(done, text.size(), first && done == 0);
}

Tokenizer::Ids Tokenizer::encode(std::string_view text, bool with_ends, bool with_special) const {
  Ids out;
  if (with_ends) out = before_;
  const std::string valid = valid_utf8(text);
  Origins origins{{}, nullptr};
  if (!with_special) origins.plain.push_back({0, valid.size(), true});
  segment(valid, false, origins, true, out);
  if (with_ends) out.insert(out.end(), after_.begin(), after_.end());
  return out;
}

Tokenizer::Ids Tokenizer::encode_mixed(const std::string& text, const std::vector<Plain>& plain, const std::set<int32_t>& control) const {
  Ids out;
  segment(text, false, {plain, &control}, true, out);
  return out;
}

std::string Tokenizer::bytes(int32_t id, bool with_special) const {
  if (id < 0 || size_t(id) >= pieces_.size() || (control_[size_t(id)] && !with_special)) return "";
  return pieces_[size_t(id)];
}

std::string Tokenizer::decode(const Ids& ids, bool with_special) const {
  std::string out;
  for (const int32_t id : ids) out += bytes(id, with_special);
  if (strip_first_space_ && !out.empty() && out[0] == ' ') out.erase(0, 1);
  return valid_utf8(out);
}

int32_t Tokenizer::id_of(const std::string& text) const {
  for (const Added& token : added_) {
    if (token.text == text) return token.id;
  }
  const auto at = ids_.find(text);
  return at == ids_.end() ? -1 : at->second;
}

// ---- files ----------------------------------------------------------------------------------------------------------------------

void Tokenizer::add_piece(const std::string& text, int32_t id, const std::string& what) {
  if (id < 0 || id >= kMostTokens) throw Error(what + ": a token's number is out of range");
  if (size_t(id) >= pieces_.size()) pieces_.resize(size_t(id) + 1), control_.resize(size_t(id) + 1);
  pieces_[size_t(id)] = text;
}

void Tokenizer::add_added(const Added& token, const std::string& what) {
  if (token.text.empty()) throw Error(what + ": an added token without text");
  add_piece(token.text, token.id, what);
  control_[size_t(token.id)] = token.special;
  added_.push_back(token);
}

void Tokenizer::index_added() {
  for (Added& token : added_) {
    if (token.match.empty()) token.match = token.normalized ? normalize(token.text, true) : token.text;
    if (token.match.empty()) throw Error("the added token " + shown(token.text) + " is nothing when it is normalized");
  }
  for (size_t i = 0; i < added_.size(); ++i) {
    Trie& trie = tries_[added_[i].normalized ? 1 : 0];
    uint64_t node = 0;
    for (const char c : added_[i].match) node = trie.next.emplace(node << 8 | static_cast<unsigned char>(c), trie.next.size() + 1).first->second;
    trie.ends[node].push_back(i);
  }
}

void Tokenizer::read_ends(const Json& json, const std::string& what) {
  if (!json.is_object()) throw Error(what + ": not an object");
  const std::string type = text_of(json, "type", what);
  if (type == "Sequence") {
    const Json* const list = part_of(json, "processors");
    if (list == nullptr || !list->is_array()) throw Error(what + ": a Sequence of nothing");
    for (const Json& item : *list) read_ends(item, what);
  } else if (type == "TemplateProcessing") {
    const Json *const single = part_of(json, "single"), *const special = part_of(json, "special_tokens");
    if (single == nullptr || !single->is_array()) throw Error(what + ": no template for a single text");
    bool behind = false;
    for (const Json& item : *single) {
      if (!item.is_object()) throw Error(what + ": a template of something else than objects");
      if (item.contains("Sequence")) {
        behind = true;
        continue;
      }
      const Json* const token = part_of(item, "SpecialToken");
      const Json* const entry = token != nullptr && token->is_object() && special != nullptr && special->is_object() ? part_of(*special, text_of(*token, "id", what).c_str()) : nullptr;
      const Json* const ids = entry != nullptr && entry->is_object() ? part_of(*entry, "ids") : nullptr;
      if (ids == nullptr || !ids->is_array()) throw Error(what + ": a special token of the template is not defined");
      for (const Json& id : *ids) (behind ? after_ : before_).push_back(id_in(id, what));
    }
  } else if (type != "ByteLevel") {
    throw Error(what + ": the post-processor " + shown(type) + " is not supported");
  }
}

// Pieces of tokenizer.json, as bytes; returns them as the file spells them, as merges do.
Tokenizer::Spelled Tokenizer::read_pieces(const Json& vocabulary, bool byte_level, bool fallback, const std::string& what) {
  Spelled spelled;
  if (fallback) raw_bytes_.assign(256, -1);
  for (const auto& item : vocabulary.items()) {
    const int32_t id = id_in(item.value(), what);
    spelled[item.key()] = id;
    std::string text = item.key();
    if (byte_level) {
      if (!from_byte_names(item.key(), text)) text = item.key();
    } else if (const int byte = fallback ? byte_of(text) : -1; byte >= 0) {
      raw_bytes_[size_t(byte)] = id;
      add_piece(std::string(1, char(byte)), id, what);
      continue;
    }
    ids_[text] = id;
    add_piece(text, id, what);
  }
  return spelled;
}

void Tokenizer::read_merges(const Json& merges, const Spelled& spelled, const std::string& what) {
  int32_t rank = 0;
  for (const Json& item : merges) {
    std::string left, right;
    if (item.is_string()) {
      const std::string both = item.get<std::string>();
      const size_t space = both.find(' ');
      if (space != std::string::npos) left = both.substr(0, space), right = both.substr(space + 1);
    } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      left = item[0].get<std::string>(), right = item[1].get<std::string>();
    }
    const auto a = spelled.find(left), b = spelled.find(right), c = spelled.find(left + right);
    if (a == spelled.end() || b == spelled.end() || c == spelled.end()) throw Error(what + ": merge " + std::to_string(rank) + " is not of pieces of the vocabulary");
    merges_.emplace(uint64_t(uint32_t(a->second)) << 32 | uint32_t(b->second), Merge{rank++, c->second});
  }
}

void Tokenizer::read_added(const Json& added, const std::string& what) {
  if (!added.is_array()) throw Error(what + ": added_tokens: not a list");
  for (const Json& item : added) {
    if (!item.is_object() || !item.contains("id")) throw Error(what + ": added_tokens: not objects with an id");
    add_added({text_of(item, "content", what), id_in(item["id"], what), flag_of(item, "special", false, what), flag_of(item, "normalized", false, what),
               flag_of(item, "lstrip", false, what), flag_of(item, "rstrip", false, what), flag_of(item, "single_word", false, what), ""}, what);
  }
}

void Tokenizer::read_json(const Json& json, const std::string& what) {
  const Json* const model = json.is_object() ? part_of(json, "model") : nullptr;
  if (model == nullptr || !model->is_object()) throw Error(what + ": no model");
  const Json* const type = part_of(*model, "type");
  if (type != nullptr && *type != "BPE") throw Error(what + ": the model " + shown(type->dump()) + " is not supported");
  const Json *const vocabulary = part_of(*model, "vocab"), *const merges = part_of(*model, "merges");
  if (vocabulary == nullptr || !vocabulary->is_object() || merges == nullptr || !merges->is_array()) throw Error(what + ": no vocab or no merges");
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const Json* const value = part_of(*model, name); value != nullptr && *value != "" && *value != 0.0) throw Error(what + ": " + name + " is not supported");
  }
  if (const Json* const steps = part_of(json, "normalizer")) read_steps(*steps, what, true);
  if (const Json* const steps = part_of(json, "pre_tokenizer")) read_steps(*steps, what, false);
  if (const Json* const ends = part_of(json, "post_processor")) read_ends(*ends, what);

  const bool byte_level = std::any_of(splitters_.begin(), splitters_.end(), [](const auto& step) { return step->kind == Step::byte_level; });
  kind_ = byte_level ? Kind::bytes : Kind::chars;
  const bool fallback = flag_of(*model, "byte_fallback", false, what);
  fuse_unknown_ = flag_of(*model, "fuse_unk", false, what);
  ignore_merges_ = flag_of(*model, "ignore_merges", false, what);

  const Spelled spelled = read_pieces(*vocabulary, byte_level, fallback, what);
  read_merges(*merges, spelled, what);
  if (const Json* const unknown = part_of(*model, "unk_token")) {
    const auto at = unknown->is_string() ? spelled.find(unknown->get<std::string>()) : spelled.end();
    if (at != spelled.end()) unknown_ = at->second;
  }
  // How pieces are read back: a sign for spaces becomes one, and the first one of a text may not be its own.
  if (!byte_level) {
    for (std::string& piece : pieces_) piece = with_spaces(piece);
    const Json* const decoder = part_of(json, "decoder");
    const std::string all = decoder != nullptr ? decoder->dump() : "";
    strip_first_space_ = all.find("\"Strip\"") != std::string::npos || (all.find("\"Metaspace\"") != std::string::npos && all.find("\"never\"") == std::string::npos);
  }
  if (const Json* const added = part_of(json, "added_tokens")) read_added(*added, what);
  for (const Ids* ends : {&before_, &after_}) {
    for (const int32_t id : *ends) {
      if (id >= size()) throw Error(what + ": the post-processor puts the token " + std::to_string(id) + ", which is none");
    }
  }
  index_added();
}

// GPT-2's own two files.
void Tokenizer::read_vocabulary(const std::string& directory) {
  Json json = {{"model", {{"type", "BPE"}, {"vocab", llm::read_json(directory + "/vocab.json")}, {"merges", Json::array()}}},
               {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}}, {"added_tokens", Json::array()}};
  const std::string merges = read_file(directory + "/merges.txt");
  for (size_t at = 0; at < merges.size();) {
    const size_t end = std::min(merges.find('\n', at), merges.size());
    std::string line = merges.substr(at, end - at);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (!line.empty() && line.rfind("#version", 0) != 0) json["model"]["merges"].push_back(line);
    at = end + 1;
  }
  const Json& vocabulary = json["model"]["vocab"];
  if (vocabulary.is_object() && vocabulary.contains("<|endoftext|>")) json["added_tokens"].push_back({{"content", "<|endoftext|>"}, {"id", vocabulary["<|endoftext|>"]}, {"special", true}});
  read_json(json, directory + "/vocab.json");
}

void Tokenizer::read_config(const std::string& directory) {
  const std::string path = directory + "/tokenizer_config.json";
  if (file_exists(path)) {
    const Json json = llm::read_json(path);
    if (!json.is_object()) throw Error(path + ": not an object");
    for (const auto& item : json.items()) {
      const std::string& name = item.key();
      const Json* const text = item.value().is_object() ? part_of(item.value(), "content") : &item.value();
      if (name.size() > 6 && name.substr(name.size() - 6) == "_token" && text != nullptr && text->is_string()) special_names[name] = *text;
    }
    const auto token = [&](const char* name, int32_t otherwise) {
      const int32_t id = special_names.contains(name) ? id_of(special_names[name].get<std::string>()) : -1;
      return id >= 0 ? id : otherwise;
    };
    bos = token("bos_token", bos), eos = token("eos_token", eos);
    const Json* const all = part_of(json, "chat_template");
    if (all != nullptr && all->is_string()) chat_templates["default"] = all->get<std::string>();
    for (const Json& item : all != nullptr && all->is_array() ? *all : Json::array()) {
      if (!item.is_object()) throw Error(path + ": chat_template: a list of something else than objects");
      chat_templates[text_of(item, "name", path)] = text_of(item, "template", path);
    }
  } else {  // as the model's own file has them
    if (bos >= 0) special_names["bos_token"] = bytes(bos, true);
    if (eos >= 0) special_names["eos_token"] = bytes(eos, true);
  }
  if (file_exists(directory + "/chat_template.jinja")) chat_templates["default"] = read_file(directory + "/chat_template.jinja", 1 << 20);
}

Tokenizer Tokenizer::from_json(const Json& json, const std::string& what) {
  Tokenizer out;
  out.read_json(json, what);
  return out;
}

Tokenizer Tokenizer::from_model(const std::string& bytes, const std::string& what) {
  Tokenizer out;
  out.read_model(bytes, what);
  return out;
}

Tokenizer::Tokenizer(const std::string& directory) {
  if (file_exists(directory + "/tokenizer.json")) read_json(llm::read_json(directory + "/tokenizer.json"), directory + "/tokenizer.json");
  else if (file_exists(directory + "/tokenizer.model")) read_model(read_file(directory + "/tokenizer.model"), directory + "/tokenizer.model");
  else if (file_exists(directory + "/vocab.json")) read_vocabulary(directory);
  else throw Error(directory + ": has neither tokenizer.json nor tokenizer.model");
  read_config(directory);
}

// ---- SentencePiece's file: a protobuf -------------------------------------------------------------------------------------------

namespace {

// The fields of a message: f(number, value of a number, bytes of a text or a message).
template <class F>
void each_field(std::string_view message, const std::string& what, const F& f) {
  const auto broken = [&]() -> Error { return Error(what + ": not a SentencePiece model"); };
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (message.empty()) throw broken();
      const auto byte = static_cast<unsigned char>(message[0]);
      message.remove_prefix(1);
      value |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw broken();
  };
  while (!message.empty()) {
    const uint64_t key = varint(), wire = key & 7;
    uint64_t number = 0, length = wire == 1 ? 8 : wire == 5 ? 4 : 0;
    if (wire == 0) number = varint();
    else if (wire == 2) length = varint();
    else if (wire != 1 && wire != 5) throw broken();
    if (length > message.size()) throw broken();
    f(int(key >> 3), number, message.substr(0, size_t(length)));
    message.remove_prefix(size_t(length));
  }
}

// What is in such a file.
struct PieceFile {
  struct Piece {
    std::string text;
    float score = 0;
    uint64_t type = 1;  // 1: normal, 2: unknown, 3: control, 4: user defined, 5: unused, 6: byte
  };
  std::vector<Piece> all;
  uint64_t model = 1, unknown = 0, bos_id = 1, eos_id = 2;
  bool dummy_prefix = true, extra_spaces = true, escape = true;
  std::string normalizer;

  PieceFile(const std::string& bytes, const std::string& what) {
    each_field(bytes, what, [&](int field, uint64_t, std::string_view value) {
      if (field == 1) add(value, what);
      else if (field == 2) read_trainer(value, what);
      else if (field == 3) read_normalizer(value, what);
    });
    if (all.empty()) throw Error(what + ": not a SentencePiece model");
    if (model != 2) throw Error(what + ": only SentencePiece's BPE is supported");
    if (normalizer != "identity" || extra_spaces || !escape) throw Error(what + ": the normalizer " + shown(normalizer) + " is not supported");
    if (all.size() >= size_t(kMostTokens)) throw Error(what + ": too many pieces");
  }

 private:
  void add(std::string_view value, const std::string& what) {
    Piece piece;
    each_field(value, what, [&](int f, uint64_t n, std::string_view v) {
      if (f == 1) piece.text = std::string(v);
      if (f == 2 && v.size() == 4) std::memcpy(&piece.score, v.data(), 4);
      if (f == 3) piece.type = n;
    });
    all.push_back(piece);
  }
  void read_trainer(std::string_view value, const std::string& what) {
    each_field(value, what, [&](int f, uint64_t n, std::string_view) {
      if (f == 3) model = n;
      if (f == 40) unknown = n;
      if (f == 41) bos_id = n;
      if (f == 42) eos_id = n;
    });
  }
  void read_normalizer(std::string_view value, const std::string& what) {
    each_field(value, what, [&](int f, uint64_t n, std::string_view v) {
      if (f == 1) normalizer = std::string(v);
      if (f == 3) dummy_prefix = n != 0;
      if (f == 4) extra_spaces = n != 0;
      if (f == 5) escape = n != 0;
    });
  }
};

}  // namespace

void Tokenizer::read_model(const std::string& bytes, const std::string& what) {
  const PieceFile file(bytes, what);
  const auto& all = file.all;
  kind_ = Kind::chars;
  fuse_unknown_ = true;
  unknown_ = file.unknown < all.size() ? int32_t(file.unknown) : -1;
  bos = file.bos_id < all.size() ? int32_t(file.bos_id) : -1, eos = file.eos_id < all.size() ? int32_t(file.eos_id) : -1;
  if (bos >= 0) before_ = {bos};
  for (size_t i = 0; i < all.size(); ++i) {
    const PieceFile::Piece& piece = all[i];
    std::string shown_as = with_spaces(piece.text);
    if (piece.text.size() > 1024) throw Error(what + ": a piece of more than 1024 bytes");
    if (piece.type == 5) throw Error(what + ": pieces that are not used are not supported");
    if (piece.type == 6) {
      const int byte = byte_of(piece.text);
      if (byte < 0) throw Error(what + ": a byte's piece has another name");
      if (raw_bytes_.empty()) raw_bytes_.assign(256, -1);
      raw_bytes_[size_t(byte)] = int32_t(i);
      shown_as = std::string(1, char(byte));
    } else if (piece.type == 1) {
      ids_[piece.text] = int32_t(i);
    }
    add_piece(shown_as, int32_t(i), what);
    // Those that users have defined are cut out of the text like added tokens, after normalization.
    if (piece.type == 4) add_added({piece.text, int32_t(i), false, true, false, false, false, piece.text}, what), pieces_[i] = shown_as;
    if (piece.type == 2 || piece.type == 3) add_added({piece.text, int32_t(i), true, false, false, false, false, piece.text}, what);
  }
  // Two pieces become a third one by its score: pieces of equal scores are of equal rank.
  std::vector<float> scores;
  for (const PieceFile::Piece& piece : all) scores.push_back(piece.score);
  std::sort(scores.begin(), scores.end(), std::greater<float>());
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].type != 1) continue;
    const std::string& text = all[i].text;
    const auto rank = int32_t(std::lower_bound(scores.begin(), scores.end(), all[i].score, std::greater<float>()) - scores.begin());
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const auto left = ids_.find(text.substr(0, cut)), right = ids_.find(text.substr(cut));
      if (left != ids_.end() && right != ids_.end()) merges_.emplace(uint64_t(uint32_t(left->second)) << 32 | uint32_t(right->second), Merge{rank, int32_t(i)});
    }
  }
  // Spaces become signs, one before the text.
  const auto step = [&](Step::Kind kind, const std::string& from) {
    auto made = std::make_shared<Step>();
    made->kind = kind, made->from = from, made->to = "\xe2\x96\x81";
    normalizers_.push_back(made);
  };
  if (file.dummy_prefix) step(Step::prepend, ""), strip_first_space_ = true;
  step(Step::replace, " ");
  index_added();
}

}  // namespace llm
