#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <limits>
#include <queue>

#include "tokenizer/parts.h"

namespace llm {

// ---- BPE ------------------------------------------------------------------------------------------------------------

// A token of a word that is being merged, and the indices of its neighbours (-1: none).
struct Tokenizer::Symbol {
  int32_t id, previous, next;
};

void Tokenizer::merge(std::string_view word, Ids& out) const {
  if (ignore_merges_) {
    if (const auto at = ids_.find(std::string(word)); at != ids_.end() && !control_[size_t(at->second)])
      return out.push_back(at->second);
  }
  std::vector<Symbol> symbols = symbols_of(word);
  if (symbols.empty()) return;
  join(symbols);
  for (int32_t i = 0; i >= 0; i = symbols[size_t(i)].next) out.push_back(symbols[size_t(i)].id);
}

// The bytes or characters of a word as tokens. One that is not a token becomes the tokens of its bytes, or else the
// unknown token.
std::vector<Tokenizer::Symbol> Tokenizer::symbols_of(std::string_view word) const {
  std::vector<Symbol> out;
  out.reserve(word.size());
  const auto push = [&](int32_t id) { out.push_back({id, int32_t(out.size()) - 1, int32_t(out.size()) + 1}); };
  const auto of_byte = [&](char c) { return raw_bytes_.empty() ? -1 : raw_bytes_[static_cast<unsigned char>(c)]; };
  bool after_unknown = false;
  while (!word.empty()) {
    const std::string_view part = word.substr(0, byte_level_ ? 1 : length_at(word));
    const auto at = ids_.find(std::string(part));
    const bool known = at != ids_.end(),
               unknown = !known && std::any_of(part.begin(), part.end(), [&](char c) { return of_byte(c) < 0; });
    if (known) push(at->second);
    else if (!unknown) for (const char c : part) push(of_byte(c));
    else if (unknown_ >= 0 && !(fuse_unknown_ && after_unknown)) push(unknown_);
    after_unknown = unknown;
    word.remove_prefix(part.size());
  }
  if (out.size() > size_t(std::numeric_limits<int32_t>::max())) throw Error("a word has more than 2^31 - 1 bytes");
  if (!out.empty()) out.back().next = -1;
  return out;
}

// Merges neighbours, those of the lowest rank first and of equal ranks the leftmost, until no pair is in the table.
// With a heap of pairs and a linked list, a word of n letters takes n log n steps.
void Tokenizer::join(std::vector<Symbol>& symbols) const {
  struct Pair {
    int32_t rank, left, left_id, right_id, id;
    // The queue returns the largest.
    bool operator<(const Pair& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
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
      continue;  // the pair is no longer there
    Symbol& right = symbols[size_t(left.next)];
    left.id = pair.id, right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[size_t(left.next)].previous = pair.left;
    consider(left.previous);
    consider(pair.left);
  }
}

// ---- encoding -------------------------------------------------------------------------------------------------------

namespace {

bool is_within_word(std::string_view text, size_t begin, size_t end) {
  return (begin > 0 && is_word(code_point(last_character(text.substr(0, begin))))) ||
         (end < text.size() && is_word(code_point(text.substr(end))));
}

// Where the spaces before a place begin, but not before `least`; and where the spaces after it end.
size_t before_spaces(std::string_view text, size_t least, size_t at) {
  while (at > least) {
    const std::string_view last = last_character(text.substr(least, at - least));
    if (!is_space(code_point(last))) break;
    at -= last.size();
  }
  return at;
}
size_t behind_spaces(std::string_view text, size_t at) {
  while (at < text.size() && is_space(code_point(text.substr(at)))) at += length_at(text.substr(at));
  return at;
}

}  // namespace

bool Tokenizer::Origins::allow(const Added& token, size_t begin, size_t end) const {
  const auto at =
      std::partition_point(plain.begin(), plain.end(), [&](const Plain& part) { return part.end <= begin; });
  for (auto part = at; part != plain.end() && part->begin < end; ++part) {
    if (token.special || (!part->by_model && control->count(token.id) > 0)) return false;
  }
  return true;
}

// Cuts added tokens out of a text: first those that are not normalized, then, in the normalized rest, the others.
void Tokenizer::segment(std::string_view text, bool normalized, const Origins& origins, bool first, Ids& out) const {
  const Trie& trie = tries_[normalized ? 1 : 0];
  size_t done = 0;
  for (size_t at = 0; at < text.size() && !trie.ends.empty();) {
    const Added* found = nullptr;  // the longest one
    uint64_t node = 0;
    for (size_t end = at; end < text.size();) {
      const auto next = trie.next.find(node << 8 | static_cast<unsigned char>(text[end]));
      if (next == trie.next.end()) break;
      node = next->second, ++end;
      const auto tokens = trie.ends.find(node);
      for (size_t i = 0; tokens != trie.ends.end() && i < tokens->second.size(); ++i) {
        const Added& token = added_[tokens->second[i]];
        if (!origins.allow(token, at, end) || (token.single_word && is_within_word(text, at, end))) continue;
        found = &token;
        break;
      }
    }
    if (found == nullptr) {
      ++at;
      continue;
    }
    const size_t end = at + found->match.size();
    between(text, done, found->left ? before_spaces(text, done, at) : at, normalized, origins, first && done == 0, out);
    out.push_back(found->id);
    done = at = found->right ? behind_spaces(text, end) : end;
  }
  between(text, done, text.size(), normalized, origins, first && done == 0, out);
}

// Encodes the part [from, to) of a text, between added tokens.
void Tokenizer::between(std::string_view text, size_t from, size_t to, bool normalized, const Origins& origins,
                        bool first, Ids& out) const {
  const std::string_view part = text.substr(from, to - from);
  if (part.empty()) return;
  if (normalized) return split(part, 0, first, out);
  Origins inside{{}, origins.control};
  std::vector<size_t> places;  // begin and end of each part that comes from a message
  if (!tries_[1].ends.empty()) {
    const auto behind = [&](const Plain& plain) { return plain.end <= from; };
    auto plain = std::partition_point(origins.plain.begin(), origins.plain.end(), behind);
    for (; plain != origins.plain.end() && plain->begin < to; ++plain) {
      places.insert(places.end(), {std::max(plain->begin, from) - from, std::min(plain->end, to) - from});
      inside.plain.push_back({0, 0, plain->by_model});
    }
  }
  const std::string made = normalize(part, places);
  for (size_t i = 0; i < inside.plain.size(); ++i)
    inside.plain[i].begin = places[2 * i], inside.plain[i].end = places[2 * i + 1];
  segment(made, true, inside, first, out);
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

int32_t Tokenizer::id_of(const std::string& text) const {
  for (const Added& token : added_) {
    if (token.text == text) return token.id;
  }
  const auto at = ids_.find(text);
  return at == ids_.end() ? -1 : at->second;
}

}  // namespace llm
