#include <algorithm>
#include <cstring>

#include "tokenizer/parts.h"

namespace llm {

namespace {

// GPT-2's characters for bytes: printable bytes are themselves, the others are characters from U+0100 on.
std::unordered_map<uint32_t, char> bytes_by_name() {
  std::unordered_map<uint32_t, char> out;
  for (uint32_t b = 0, next = 256; b < 256; ++b) {
    const bool itself = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
    out[itself ? b : next++] = char(b);
  }
  return out;
}

// The bytes of a piece that byte-level BPE has written. Added tokens are plain text, with characters that stand for no
// byte.
std::string from_byte_names(const std::string& text) {
  static const std::unordered_map<uint32_t, char> bytes = bytes_by_name();
  std::string out;
  for (std::string_view rest = text; !rest.empty(); rest.remove_prefix(length_at(rest))) {
    const auto at = bytes.find(code_point(rest));
    if (at == bytes.end()) return text;
    out.push_back(at->second);
  }
  return out;
}

// The byte of a piece like "<0x41>", or -1 if it is none.
int byte_of(const std::string& text) {
  if (text.size() != 6 || text.compare(0, 3, "<0x") != 0 || text[5] != '>' ||
      !std::isxdigit(static_cast<unsigned char>(text[3])) || !std::isxdigit(static_cast<unsigned char>(text[4])))
    return -1;
  return std::stoi(text.substr(3, 2), nullptr, 16);
}

// A piece with spaces in place of SentencePiece's signs for them.
std::string with_spaces(const std::string& text) {
  Places none;
  return replaced(text, {kSign}, " ", none);
}

}  // namespace

void Tokenizer::add_piece(const std::string& text, int32_t id, const std::string& what) {
  if (id < 0 || id >= kMostTokens) throw Error(what, ": token ID ", id, " is not between 0 and ", kMostTokens - 1);
  if (size_t(id) >= pieces_.size()) pieces_.resize(size_t(id) + 1), control_.resize(size_t(id) + 1);
  pieces_[size_t(id)] = text;
}

void Tokenizer::add_added(const Added& token, const std::string& what) {
  if (token.text.empty()) throw Error(what + ": an added token has no content");
  add_piece(token.text, token.id, what);
  control_[size_t(token.id)] = token.special;
  added_.push_back(token);
}

void Tokenizer::index_added() {
  tries_[0] = tries_[1] = {};
  for (Added& token : added_) {
    std::vector<size_t> none;
    if (token.match.empty()) token.match = token.normalized ? normalize(token.text, none) : token.text;
    if (token.match.empty()) throw Error("the added token " + shown(token.text) + " is empty after normalization");
  }
  for (size_t i = 0; i < added_.size(); ++i) {
    Trie& trie = tries_[added_[i].normalized ? 1 : 0];
    uint64_t node = 0;
    for (const char c : added_[i].match)
      node = trie.next.emplace(node << 8 | static_cast<unsigned char>(c), trie.next.size() + 1).first->second;
    trie.ends[node].push_back(i);
  }
}

int32_t id_in(const Json& json, const std::string& what) {
  if (!json.is_number_integer() || json.get<int64_t>() < 0 || json.get<int64_t>() >= kMostTokens)
    throw Error(what + ": not a token ID");
  return json.get<int32_t>();
}

Tokenizer::Added added_of(const Fields& fields, int32_t id) {
  const auto flag = [&](const char* name) { return fields.flag(name, false); };
  return {fields.text("content"), id, flag("special"), flag("normalized"), flag("lstrip"), flag("rstrip"),
          flag("single_word")};
}

// The post-processor: the tokens before and after a text.
void Tokenizer::read_ends(const Fields& fields, const std::string& type) {
  if (type == "ByteLevel") return;
  if (type != "TemplateProcessing") fields.refuse("the post-processor " + shown(type) + " is not supported");
  Ids* ends = &before_;
  for (const Json& json : fields.list("single")) {
    const Fields item(json, fields.what());
    if (item.has("Sequence")) {
      ends = &after_;
      continue;
    }
    const std::string token = item.object("SpecialToken").text("id");
    for (const Json& id : fields.object("special_tokens").object(token).list("ids"))
      ends->push_back(id_in(id, fields.what()));
  }
}

// Reads the pieces of tokenizer.json as bytes. Returns their ids by the spelling of the file, which merges use.
Tokenizer::Spelled Tokenizer::read_pieces(const Fields& model) {
  Spelled spelled;
  const bool fallback = model.flag("byte_fallback", false);
  if (fallback) raw_bytes_.assign(256, -1);
  const Fields vocabulary = model.object("vocab");
  for (const auto& item : vocabulary.items()) {
    const int32_t id = id_in(item.value(), vocabulary.what());
    spelled[item.key()] = id;
    const int byte = fallback && !byte_level_ ? byte_of(item.key()) : -1;
    const std::string text = byte >= 0     ? std::string(1, char(byte))
                             : byte_level_ ? from_byte_names(item.key())
                                           : item.key();
    (byte >= 0 ? raw_bytes_[size_t(byte)] : ids_[text]) = id;
    add_piece(byte_level_ ? text : with_spaces(text), id, model.what());
  }
  return spelled;
}

void Tokenizer::read_merges(const Fields& model, const Spelled& spelled) {
  int32_t rank = 0;
  for (const Json& item : model.list("merges")) {
    std::string left, right;
    if (item.is_string()) {
      const std::string both = item.get<std::string>();
      const size_t space = both.find(' ');
      if (space != std::string::npos) left = both.substr(0, space), right = both.substr(space + 1);
    } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      left = item[0].get<std::string>(), right = item[1].get<std::string>();
    }
    const auto a = spelled.find(left), b = spelled.find(right), c = spelled.find(left + right);
    if (a == spelled.end() || b == spelled.end() || c == spelled.end())
      model.refuse("merge " + std::to_string(rank) + " has tokens that are not in the vocabulary");
    merges_.emplace(uint64_t(uint32_t(a->second)) << 32 | uint32_t(b->second), Merge{rank++, c->second});
  }
}

void Tokenizer::read_json(const Json& json, const std::string& what) {
  const Fields fields(json, what), model = fields.object("model");
  const Json* const type = model.find("type");
  if (type != nullptr && *type != "BPE") fields.refuse("the model " + shown(type->dump()) + " is not BPE");
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const Json* const value = model.find(name); value != nullptr && *value != "" && *value != 0.0)
      model.refuse(name, "not supported");
  }
  const auto read = [&](const char* name, const char* list, Read one) {
    if (const Json* const steps = fields.find(name)) read_steps(*steps, list, what, one);
  };
  read("normalizer", "normalizers", &Tokenizer::read_normalizer);
  read("pre_tokenizer", "pretokenizers", &Tokenizer::read_splitter);
  read("post_processor", "processors", &Tokenizer::read_ends);
  fuse_unknown_ = model.flag("fuse_unk", false);
  ignore_merges_ = model.flag("ignore_merges", false);

  const Spelled spelled = read_pieces(model);
  read_merges(model, spelled);
  if (const Json* const unknown = model.find("unk_token")) {
    const auto at = unknown->is_string() ? spelled.find(unknown->get<std::string>()) : spelled.end();
    if (at != spelled.end()) unknown_ = at->second;
  }
  if (fields.find("added_tokens") != nullptr) {
    for (const Json& item : fields.list("added_tokens")) {
      const Fields token(item, what + ": added_tokens");
      add_added(added_of(token, int32_t(token.integer("id", 0, kMostTokens - 1))), token.what());
    }
  }
  for (const Ids* ends : {&before_, &after_}) {
    for (const int32_t id : *ends) {
      if (id >= size()) fields.refuse("the post-processor's token " + std::to_string(id) + " is not in the vocabulary");
    }
  }
  index_added();
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

// ---- SentencePiece's file: a protobuf -------------------------------------------------------------------------------

namespace {

// Calls f(field, value of a number, bytes of a text or message) for the fields of a message.
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

// The contents of such a file.
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
    each_field(bytes, what, [&](int part, uint64_t, std::string_view message) {
      if (part == 1) all.emplace_back();
      if (part < 1 || part > 3) return;
      each_field(message, what, [&](int field, uint64_t n, std::string_view text) {
        const auto is = [&](int a, int b) { return part == a && field == b; };
        if (is(1, 1)) all.back().text = text;
        if (is(1, 2) && text.size() == 4) std::memcpy(&all.back().score, text.data(), 4);
        if (is(1, 3)) all.back().type = n;
        if (is(2, 3)) model = n;
        if (is(2, 40)) unknown = n;
        if (is(2, 41)) bos_id = n;
        if (is(2, 42)) eos_id = n;
        if (is(3, 1)) normalizer = text;
        if (is(3, 3)) dummy_prefix = n != 0;
        if (is(3, 4)) extra_spaces = n != 0;
        if (is(3, 5)) escape = n != 0;
      });
    });
    if (all.empty()) throw Error(what + ": not a SentencePiece model");
    if (model != 2) throw Error(what + ": only SentencePiece models of type BPE are supported");
    if (normalizer != "identity" || extra_spaces || !escape)
      throw Error(what + ": the normalizer " + shown(normalizer) + " is not supported");
    if (all.size() >= size_t(kMostTokens)) throw Error(what, ": ", all.size(), " pieces, at most ", kMostTokens - 1);
  }
};

}  // namespace

void Tokenizer::read_model(const std::string& bytes, const std::string& what) {
  const PieceFile file(bytes, what);
  const auto& all = file.all;
  fuse_unknown_ = true;
  unknown_ = file.unknown < all.size() ? int32_t(file.unknown) : -1;
  bos = file.bos_id < all.size() ? int32_t(file.bos_id) : -1,
  eos = file.eos_id < all.size() ? int32_t(file.eos_id) : -1;
  if (bos >= 0) before_ = {bos};
  for (size_t i = 0; i < all.size(); ++i) {
    const PieceFile::Piece& piece = all[i];
    std::string shown_as = with_spaces(piece.text);
    if (piece.text.size() > 1024) throw Error(what + ": a piece is longer than 1024 bytes");
    if (piece.type == 5) throw Error(what + ": pieces of type UNUSED are not supported");
    if (piece.type == 6) {
      const int byte = byte_of(piece.text);
      if (byte < 0) throw Error(what + ": a piece of type BYTE is not named <0x00> to <0xFF>");
      if (raw_bytes_.empty()) raw_bytes_.assign(256, -1);
      raw_bytes_[size_t(byte)] = int32_t(i);
      shown_as = std::string(1, char(byte));
    } else if (piece.type == 1) {
      ids_[piece.text] = int32_t(i);
    }
    add_piece(shown_as, int32_t(i), what);
    // User-defined pieces are cut out of the normalized text, like added tokens.
    if (piece.type == 4)
      add_added({piece.text, int32_t(i), false, true, false, false, false, piece.text}, what), pieces_[i] = shown_as;
    if (piece.type == 2 || piece.type == 3) add_added({piece.text, int32_t(i), true}, what);
  }
  // The rank of a merge is that of the resulting piece's score; equal scores give equal ranks.
  std::vector<float> scores;
  for (const PieceFile::Piece& piece : all) scores.push_back(piece.score);
  std::sort(scores.begin(), scores.end(), std::greater<float>());
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].type != 1) continue;
    const std::string& text = all[i].text;
    const auto rank =
        int32_t(std::lower_bound(scores.begin(), scores.end(), all[i].score, std::greater<float>()) - scores.begin());
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const auto left = ids_.find(text.substr(0, cut)), right = ids_.find(text.substr(cut));
      if (left != ids_.end() && right != ids_.end())
        merges_.emplace(uint64_t(uint32_t(left->second)) << 32 | uint32_t(right->second), Merge{rank, int32_t(i)});
    }
  }
  // Spaces become signs, and a sign is put before the text.
  normalizers_.push_back([first = file.dummy_prefix](const std::string& text, Places& places) {
    return replaced(first ? prepended(text, kSign, places) : text, {" "}, kSign, places);
  });
  index_added();
}

}  // namespace llm
