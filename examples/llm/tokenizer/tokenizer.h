// Text to tokens and back: byte-level BPE and SentencePiece's BPE with byte fallback, as tokenizer.json,
// tokenizer.model or vocab.json and merges.txt of GPT-2 or Qwen 2 describe them. What a file asks for beyond that is
// refused by name.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text.h"
#include "tokenizer/utf8.h"

namespace llm {

class Fields;

// A part of a text that came from elsewhere: special tokens in it are plain text, and so are other tokens that the
// text's author uses for control, but for a model's own words, which may well be written in them.
struct Plain {
  size_t begin, end;
  bool by_model;
};

class Tokenizer {
 public:
  using Ids = std::vector<int32_t>;
  struct Added {
    std::string text;
    int32_t id = 0;
    bool special = false, normalized = false, left = false, right = false, single_word = false;
    std::string match{};  // what is looked for: text, or what the normalizer makes of it
  };

  // Of a directory. bos and eos by name come from tokenizer_config.json, and whether they are put around a text, if it
  // says so; so do added tokens, or else from added_tokens.json, that tokenizer.json does not have.
  explicit Tokenizer(const std::string& directory);
  static Tokenizer from_json(const Json& json, const std::string& what);
  static Tokenizer from_model(const std::string& bytes, const std::string& what);  // SentencePiece's protobuf

  // with_ends: what the post-processor puts around a text (BOS). with_special: special tokens in the text become
  // control tokens; text that comes from elsewhere is encoded without.
  Ids encode(std::string_view text, bool with_ends = true, bool with_special = true) const;
  // A text of which some parts, in order, came from elsewhere; `control`: tokens that the text's author uses though
  // they are not special.
  Ids encode_mixed(const std::string& text, const std::vector<Plain>& plain, const std::set<int32_t>& control) const;
  // The bytes of a token, as they stand in a text: special tokens have none unless asked for.
  std::string bytes(int32_t id, bool with_special = false) const;
  std::string decode(const Ids& ids, bool with_special = false) const;

  const Ids& before() const { return before_; }  // what is put before a text
  int64_t size() const { return int64_t(pieces_.size()); }
  int32_t id_of(const std::string& text) const;  // of an added token or a piece, -1 if there is none
  const std::vector<Added>& added() const { return added_; }
  int32_t bos = -1, eos = -1;
  std::map<std::string, std::string> chat_templates;  // by name; the only one is "default"
  Json special_names = Json::object();  // bos_token and the like: what templates call them, and their texts

 private:
  struct Origins {
    std::vector<Plain> plain;
    const std::set<int32_t>* control;
    bool allow(const Added& token, size_t begin, size_t end) const;  // that this part of the text is a token
  };
  struct Symbol;

  Tokenizer() = default;
  void read_json(const Json& json, const std::string& what);
  void read_model(const std::string& bytes, const std::string& what);
  // Of a directory (directory.cpp); config: tokenizer_config.json; type: what class_of() says.
  enum class Source { json, model, vocabulary };
  void read_vocabulary(const std::string& directory, const Fields& config, const std::string& type);
  void read_added_beside(const std::string& directory, const Fields& config, Source source);
  void read_ends_beside(const Fields& config, const std::string& type, Source source);
  void read_templates(const std::string& directory, const Fields& config);
  using Read = void (Tokenizer::*)(const Fields& step, const std::string& type);
  void read_steps(const Json& json, const char* list, const std::string& what, Read read);
  void read_normalizer(const Fields& fields, const std::string& type);
  void read_splitter(const Fields& fields, const std::string& type);
  void read_ends(const Fields& fields, const std::string& type);
  using Spelled = std::unordered_map<std::string, int32_t>;
  Spelled read_pieces(const Fields& model);
  void read_merges(const Fields& model, const Spelled& spelled);
  void add_piece(const std::string& text, int32_t id, const std::string& what);
  void add_added(const Added& token, const std::string& what);
  void index_added();

  std::string normalize(std::string_view text, std::vector<size_t>& places) const;
  void segment(std::string_view text, bool normalized, const Origins& origins, bool first, Ids& out) const;
  void between(std::string_view text, size_t from, size_t to, bool normalized, const Origins& origins, bool first,
               Ids& out) const;
  void split(std::string_view word, size_t step, bool first, Ids& out) const;
  void merge(std::string_view word, Ids& out) const;
  std::vector<Symbol> symbols_of(std::string_view word) const;
  void join(std::vector<Symbol>& symbols) const;

  bool byte_level_ = false;          // BPE of bytes, not of characters
  std::vector<std::string> pieces_;  // the bytes of each
  std::vector<bool> control_;        // special tokens: no text
  std::vector<int32_t> raw_bytes_;   // the token of each byte, or -1: byte fallback
  std::unordered_map<std::string, int32_t> ids_;
  struct Merge {
    int32_t rank, id;
  };
  std::unordered_map<uint64_t, Merge> merges_;
  int32_t unknown_ = -1;
  bool fuse_unknown_ = false, ignore_merges_ = false, strip_first_space_ = false;
  std::vector<Added> added_;
  // Added tokens by their bytes: a node and a byte give the node behind. A text of the first bytes of many tokens costs
  // no more than any.
  struct Trie {
    std::unordered_map<uint64_t, uint64_t> next;
    std::unordered_map<uint64_t, std::vector<size_t>> ends;  // the tokens that end at a node
  };
  Trie tries_[2];  // [1]: of those that are normalized
  // Each makes another text of one. places: where parts of it begin and end, in order, and then where these do in what
  // is made of it.
  using Normalizer = std::function<std::string(const std::string& text, std::vector<size_t>& places)>;
  std::vector<Normalizer> normalizers_;
  struct Splitter;
  std::vector<std::shared_ptr<const Splitter>> splitters_;
  std::vector<int32_t> before_, after_;
};

}  // namespace llm
