// Attention over keys and values of one type, kCaches[0]. cpu.cpp and gpu.cu include it.

namespace {

k::AttentionShape shape_of(const Tokens& tokens, const Heads& heads) { return {tokens.sequences, tokens.each, heads.heads, heads.kv_heads, heads.dim}; }

// With few queries of each sequence, decode() splits the keys among all threads or blocks. With many, attention()
// distributes the queries; on the GPU it also splits the keys of a chunk that has too few queries for all blocks, for
// which it needs a workspace.
bool is_decode(const Tokens& tokens) { return tokens.each <= kFewQueries; }
bool is_chunk(const Tokens& tokens) { return kSplitsChunks && tokens.each <= kChunkQueries; }

// How keys are split. With --batch-invariant the number of parts depends neither on how many texts there are nor on the
// longest one.
k::Attention keys_of(const Place& place, const Tokens& tokens) {
  return place.invariant && is_decode(tokens) ? k::Attention{}.splits(kInvariantParts) : k::Attention{}.most_keys(tokens.longest);
}

size_t attend_bytes(const Place& place, const Tokens& tokens, const Heads& heads) {
  const k::AttentionShape shape = shape_of(tokens, heads);
  const k::Attention options = keys_of(place, tokens);
  if (is_decode(tokens)) return decode_bytes(place, shape, options);
  return is_chunk(tokens) ? chunk_bytes(place, shape, options) : 0;
}

// The window of one query in a ring. In a text that is longer than the ring, the index of a key is not its position in
// the text.
struct WindowInRing : k::Score {
  const int32_t* lengths;  // of the texts, not of the keys in the ring
  uint32_t window, ring, sinks;
  k::SoftCap cap;
  WindowInRing(const Tokens& tokens, const Cache& cache, const Attend& how)
      : lengths(tokens.lengths), window(uint32_t(how.window)), ring(uint32_t(cache.ring)), sinks(uint32_t(cache.sinks)), cap(how.cap) {}

  template <int N>
  KERNELS_HD k::Pack<float, N> transform(const k::Pack<float, N>& logits, const k::ScoreAt& at) const {
    return cap.cap > 0 ? cap.transform(logits, at) : logits;
  }
  KERNELS_HD bool visible(const k::ScoreAt& at) const {
    const uint32_t last = uint32_t(lengths[at.batch]) - 1, key = uint32_t(at.key), around = ring - sinks;
    const uint32_t place = key < sinks ? key : key + (last - key) / around * around;
    return last - place < window;
  }
};

const char* attend(const Place& place, const Tokens& tokens, const Attend& how, const void* q, const Cache& cache, void* o, void* room, size_t bytes) {
  const int64_t cols = how.shape.heads * how.shape.dim;
  const auto queries = k::load(static_cast<const A*>(q), cols);
  const auto out = k::store(static_cast<A*>(o), cols);
  auto options = keys_of(place, tokens).scale(how.scale);
  // Which keys are new tells attention which ones it may prefetch early; in a ring they lie among the old ones. Lengths
  // may be read early, too: the step before has written them. With guesses the first kernel of the step writes them,
  // and it has ended: a product of several rows lets attention begin only when all kernels before that product have
  // ended.
  if (cache.ring == 0) options.new_keys(tokens.each);
  const k::Window mask = k::window(how.window > 0 ? how.window - 1 : -1, 0);
  const k::AttentionShape shape = shape_of(tokens, how.shape);
  return with_cache(cache, how.shape, tokens, [&](const auto& kv) {
    const auto decode = [&](const auto& score) { return reason(on::decode(for_attention(place, tokens.rows()), queries, kv, out, shape, score, k::Workspace{room, bytes}, options)); };
    if (tokens.each == 1 && how.window > 0 && cache.ring > 0) return decode(WindowInRing(tokens, cache, how));
    const auto with = [&](const auto& score) {
      if (is_decode(tokens)) return decode(score);
      if constexpr (kSplitsChunks) {
        if (is_chunk(tokens)) return reason(on::attention(for_attention(place, tokens.rows()), queries, kv, out, shape, score, k::Workspace{room, bytes}, options));
      }
      return reason(on::attention(for_attention(place, tokens.rows()), queries, kv, out, shape, score, options));
    };
    return how.cap > 0 ? with(mask & k::soft_cap(how.cap)) : with(mask);
  });
}

}  // namespace

extern const AttendCalls CALLS;
const AttendCalls CALLS = {kCaches[0], attend_bytes, attend};
