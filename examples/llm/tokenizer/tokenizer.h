// Text to tokens and back: byte-level BPE, and SentencePiece's BPE with byte fallback, as described by tokenizer.json,
// by tokenizer.model, or by vocab.json and merges.txt of GPT-2 or Qwen 2. Anything else is refused by name.
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

// A part of a rendered chat that comes from a message. Special tokens in it are plain text. So are other tokens that
// the template uses for control, unless the message is the model's own (by_model), which may contain them.
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
    std::string match{};  // what is searched for: text, or its normalized form
  };

  // The tokenizer of a directory. tokenizer_config.json names bos and eos, and may say whether they are put around a
  // text. It, or else added_tokens.json, also has added tokens that tokenizer.json lacks.
  explicit Tokenizer(const std::string& directory);
  static Tokenizer from_json(const Json& json, const std::string& what);
  static Tokenizer from_model(const std::string& bytes, const std::string& what);  // SentencePiece's protobuf

  // with_ends: adds what the post-processor puts around a text (BOS). with_special: special tokens in the text become
  // control tokens; untrusted text is encoded without.
  Ids encode(std::string_view text, bool with_ends = true, bool with_special = true) const;
  // A rendered chat. plain: the parts that come from messages, in order. control: tokens that the template uses
  // although they are not special.
  Ids encode_mixed(const std::string& text, const std::vector<Plain>& plain, const std::set<int32_t>& control) const;
  // The bytes of a token in a text. Special tokens have none, unless with_special.
  std::string bytes(int32_t id, bool with_special = false) const;

  const Ids& before() const { return before_; }  // the tokens that are put before a text
  int64_t size() const { return int64_t(pieces_.size()); }
  int32_t id_of(const std::string& text) const;  // of an added token or a piece; -1 if there is none
  const std::vector<Added>& added() const { return added_; }
  int32_t bos = -1, eos = -1;
  std::map<std::string, std::string> chat_templates;  // by name; the only one is "default"
  Json special_names = Json::object();  // the texts of bos_token and the like, by the names that templates use

 private:
  struct Origins {
    std::vector<Plain> plain;
    const std::set<int32_t>* control;
    bool allow(const Added& token, size_t begin, size_t end) const;  // whether this part of the text may be the token
  };
  struct Symbol;

  Tokenizer() = default;
  void read_json(const Json& json, const std::string& what);
  void read_model(const std::string& bytes, const std::string& what);
  // For a directory (directory.cpp). config: tokenizer_config.json. type: what class_of() returns.
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
  std::vector<std::string> pieces_;  // the bytes of each token
  std::vector<bool> control_;        // whether a token is special and has no text
  std::vector<int32_t> raw_bytes_;   // byte fallback: the token of each byte, or -1
  std::unordered_map<std::string, int32_t> ids_;
  struct Merge {
    int32_t rank, id;
  };
  std::unordered_map<uint64_t, Merge> merges_;
  int32_t unknown_ = -1;
  bool fuse_unknown_ = false, ignore_merges_ = false;
  std::vector<Added> added_;
  // Added tokens by their bytes: a node and a byte give the next node. So a text that consists of beginnings of tokens
  // takes no longer than any other.
  struct Trie {
    std::unordered_map<uint64_t, uint64_t> next;
    std::unordered_map<uint64_t, std::vector<size_t>> ends;  // the tokens that end at a node
  };
  Trie tries_[2];  // [0]: searched for in the text itself, [1]: in the normalized text
  // Returns the normalized text. places: where parts of the text begin and end, in rising order; becomes where they
  // begin and end in the normalized text.
  using Normalizer = std::function<std::string(const std::string& text, std::vector<size_t>& places)>;
  std::vector<Normalizer> normalizers_;
  struct Splitter;
  std::vector<std::shared_ptr<const Splitter>> splitters_;
  std::vector<int32_t> before_, after_;
};

}  // namespace llm
