// What the tokenizer's files share: patterns, the steps before BPE, and helpers for its JSON.
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "fields.h"
#include "tokenizer/tokenizer.h"

namespace llm {

// A literal text, or a regular expression, or neither.
struct Pattern {
  std::string text{};
  std::shared_ptr<pcre2_code> code{};
  std::shared_ptr<pcre2_match_context> context{};
  std::shared_ptr<pcre2_jit_stack> stack{};

  bool given() const { return code != nullptr || !text.empty(); }
  // Calls f(begin, end) for each match. `in` must be valid UTF-8.
  template <class F>
  void each(std::string_view in, const F& f) const {
    if (!code) {
      const size_t n = text.size();
      for (size_t at = 0; (at = in.find(text, at)) != std::string_view::npos; at += n) f(at, at + n);
      return;
    }
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> data(pcre2_match_data_create(1, nullptr),
                                                                              pcre2_match_data_free);
    for (size_t at = 0; at <= in.size();) {
      const int found = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(in.data()), in.size(), at,
                                    PCRE2_NO_UTF_CHECK, data.get(), context.get());
      if (found == PCRE2_ERROR_NOMATCH) return;
      if (found < 0) throw Error("the text cannot be split into words (PCRE2 error ", found, ")");
      const PCRE2_SIZE* const place = pcre2_get_ovector_pointer(data.get());
      const size_t begin = place[0], end = place[1];
      if (end > begin) f(begin, end);
      at = end > begin ? end : end + (end < in.size() ? length_at(in.substr(end)) : 1);
    }
  }
};
Pattern regex(const std::string& pattern, const std::string& what);

struct Tokenizer::Splitter {
  std::string sign;                    // replaces spaces, unless it is empty
  bool always = false, first = false;  // it is also put before every part of a text, or before the first one
  Pattern pattern;
  enum Behavior { isolated, removed, with_previous, with_next } behavior = isolated;
  bool invert = false;
};

constexpr const char* kSign = "\xe2\x96\x81";  // SentencePiece's sign for a space
// More than any real vocabulary. There is a limit because a token id costs the memory of all ids below it.
constexpr int32_t kMostTokens = 1 << 21;
int32_t id_in(const Json& json, const std::string& what);
Tokenizer::Added added_of(const Fields& fields, int32_t id);

// Normalizers. Places are explained at Tokenizer::Normalizer.
using Places = std::vector<size_t>;
std::string prepended(const std::string& text, const std::string& more, Places& places);
std::string replaced(const std::string& text, const Pattern& pattern, const std::string& by, Places& places);

}  // namespace llm
