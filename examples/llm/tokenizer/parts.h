// What the files of the tokenizer share: characters, names of bytes, regular expressions, the steps before BPE, and
// values of its JSON.
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "tokenizer/tokenizer.h"

namespace llm {

// ---- regular expressions and steps (steps.cpp) ----------------------------------------------------------------------

struct Tokenizer::Regex {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;

  Regex(const std::string& pattern, const std::string& what);
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;
  ~Regex();

  // f(begin, end) for each match; the text is valid UTF-8.
  template <class F>
  void each(std::string_view text, const F& f) const {
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create(1, nullptr),
                                                                              pcre2_match_data_free);
    for (size_t at = 0; at <= text.size();) {
      const int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                    PCRE2_NO_UTF_CHECK, data.get(), context);
      if (found == PCRE2_ERROR_NOMATCH) return;
      if (found < 0) throw Error("a text cannot be split into words (PCRE2 error " + std::to_string(found) + ")");
      const PCRE2_SIZE* const place = pcre2_get_ovector_pointer(data.get());
      const size_t begin = place[0], end = place[1];
      if (end > begin) f(begin, end);
      at = end > begin ? end : end + (end < text.size() ? length_at(text.substr(end)) : 1);
    }
  }
};

struct Tokenizer::Step {
  enum Kind { nfc, nfd, nfkc, nfkd, lowercase, prepend, replace, split, byte_level, digits, metaspace } kind;
  std::string from, to;                           // replace, prepend, metaspace (to: its sign)
  std::shared_ptr<Regex> regex;                   // split, byte_level, replace
  enum { isolated, removed, with_previous, with_next } behavior = isolated;
  bool invert = false, prefix_space = false, whole = true, always = false, first = false, individual = false;
};

// ---- values of its JSON, and Unicode's normal forms (steps.cpp) -----------------------------------------------------

// Far more than anybody's vocabulary: a number costs the memory of all below it.
constexpr int32_t kMostTokens = 1 << 21;

std::string text_of(const Json& json, const char* name, const std::string& what);
bool flag_of(const Json& json, const char* name, bool otherwise, const std::string& what);
const Json* part_of(const Json& json, const char* name);
int32_t id_in(const Json& json, const std::string& what);

// One of Unicode's normal forms, by utf8proc's options.
std::string composed(std::string_view text, int options);

}  // namespace llm
