#include "tokenizer.h"

#include <algorithm>
#include <limits>
#include <queue>

#include "tokenizer_parts.h"

namespace llm {

// ---- BPE ------------------------------------------------------------------------------------------------------------

// Neighbours are joined, those of the lowest rank first and of equal ranks the leftmost, until no pair is in the table.
// A heap of pairs and a list of neighbours: a word of a million letters takes n log n steps.
void Tokenizer::merge(std::string_view word, Ids& out) const {
  if (ignore_merges_) {
    if (const auto at = ids_.find(std::string(word)); at != ids_.end() && !control_[size_t(at->second)])
      return out.push_back(at->second);
  }
  struct Symbol {
    int32_t id, previous, next;
  };
  std::vector<Symbol> symbols;
  bool after_unknown = false;
  const auto push = [&](int32_t id) {
    symbols.push_back({id, int32_t(symbols.size()) - 1, int32_t(symbols.size()) + 1});
  };
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
    bool operator<(const Pair& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }  // the queue gives the largest
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
    if (left.id != pair.left_id || left.next < 0 || symbols[size_t(left.next)].id != pair.right_id)
      continue;  // no longer there
    Symbol& right = symbols[size_t(left.next)];
    left.id = pair.id, right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[size_t(left.next)].previous = pair.left;
    consider(left.previous);
    consider(pair.left);
  }
  for (int32_t i = 0; i >= 0; i = symbols[size_t(i)].next) out.push_back(symbols[size_t(i)].id);
}

// ---- encoding -------------------------------------------------------------------------------------------------------

// Added tokens are cut out first: those that are not normalized, then, of what the normalizer makes of the rest, the
// others.
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
      const auto place = [&](size_t at) {
        return at <= from ? 0
               : at >= to ? made.size()
                          : std::min(made.size(), normalize(text.substr(from, at - from), at_start).size());
      };
      for (const Plain& plain : origins.plain) {
        if (plain.begin < to && plain.end > from)
          inside.plain.push_back({place(plain.begin), place(plain.end), plain.by_model});
      }
    }
    segment(made, true, inside, at_start, out);
  };
  const auto is_allowed = [&](const Added& token, size_t begin, size_t end) {
    const auto at = std::partition_point(origins.plain.begin(), origins.plain.end(),
                                         [&](const Plain& plain) { return plain.end <= begin; });
    for (auto plain = at; plain != origins.plain.end() && plain->begin < end; ++plain) {
      if (token.special || (!plain->by_model && origins.control->count(token.id) > 0)) return false;
    }
    return true;
  };
  const auto fits = [&](const Added& token, size_t at, size_t end) {
    if (!is_allowed(token, at, end)) return false;
    return !token.single_word || !((at > 0 && is_word(code_point(last_character(text.substr(0, at))))) ||
                                   (end < text.size() && is_word(code_point(text.substr(end)))));
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
      const auto first = std::find_if(tokens->second.begin(), tokens->second.end(),
                                      [&](size_t i) { return fits(added_[i], at, end); });
      if (first != tokens->second.end()) found = &added_[*first];
    }
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + found->match.size();
    if (found->left) {
      while (begin > done && is_space(code_point(last_character(text.substr(done, begin - done)))))
        begin -= last_character(text.substr(done, begin - done)).size();
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

Tokenizer::Ids Tokenizer::encode_mixed(const std::string& text, const std::vector<Plain>& plain,
                                       const std::set<int32_t>& control) const {
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

}  // namespace llm
